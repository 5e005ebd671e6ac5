"""Does a circuit search find the arrows of an induction net? ROC-AUC, compared with attention weight and rollout.

The net has two slices; sentences are `^ ... A B ... A`, and the next word is B. In slice 0 a head attends to the
previous word, so the word after A contains the information that A precedes it. In slice 1 a head at the last word
attends to the word after the earlier A, by its key (K-composition), and copies B. With the earlier A at word p, these
arrows are planted for the metric at the last word:

    v -> a    v_0_h_p -> a_0_h_(p+1)        copies the earlier A to the next word
              v_1_g_(p+1) -> a_1_g_last     copies B to the last word
    k -> a    k_1_g_(p+1) -> a_1_g_last     matches the word before B with the last word

No other arrow is planted: word p+1 attends to its previous word in both runs, because this attention depends only on
positions. In the corrupt sentence both the earlier A and its B are replaced, by C D. If only A were replaced, the
values of B would not differ; if only B, the keys. The metric is log P(B) - log P(D).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import bnet_transformer as bt
from benchmarks.harness import Figure, figure, measure_peak, time_calls
from bnet_transformer.interventions.circuit import Circuit, FaithfulnessWarning
from bnet_transformer.tpm import Add, Attention, Categorical, Concat, Dot, Embed, Given, Linear, Positions, Weight

VOCABULARY, WORDS, START = 16, 12, 0
SHARP = 8.0  # attention score of a planted head at its word
ROLES = ("v", "k", "vk")
FRACTION = 0.02  # threshold as a fraction of clean - corrupt
SCORES = ("circuit", "attention", "rollout")


def create_net(heads: int, dim: int, key: int, value: int, *, scale: float | None = None, seed: int = 0) -> bt.BNet:
    """Return a causal net of two slices: token, position, attention, the next word; no feed-forward maps and norms."""
    over, sizes = ["head", "word"], {"q": key, "k": key, "v": value}
    maps = [bt.Node(f"W_{r}", Weight((size, dim), spread=dim**-0.5), plates=["head"]) for r, size in sizes.items()]
    maps += [bt.Node(r, Linear(), [f"W_{r}", "x"], plates=over) for r in sizes]
    slice_ = [
        *maps,
        bt.Node("a", Attention(Dot(scale)), ["q", bt.Arrow("k", "causal"), bt.Arrow("v", "causal")], plates=over),
        bt.Node("W_o", Weight((dim, value), spread=(heads * value) ** -0.5), plates=["head"]),
        bt.Node("mix", Concat(), ["W_o", "a"], plates=["word"]),
        bt.Node("x", Add(), ["x", "mix"], plates=["word"]),
    ]
    words = [
        bt.Node("token", Given(states=VOCABULARY), plates=["word"]),
        bt.Node("embed", Embed(dim), ["token"], plates=["word"]),
        bt.Node("position", Positions(WORDS, dim), plates=["word"]),
        bt.Node("x", Add(), ["embed", "position"], plates=["word"]),
    ]
    stack = bt.Stack(slice_, words, [bt.Node("y", Categorical(VOCABULARY), ["x"], plates=["word"])], slices=2)
    return bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", heads)], name="induction"), seed=seed)


def build_net(noise: float = 0.05) -> bt.BNet:
    """Return the net by hand: head 0 of each slice is planted; head 1 attends to the first word as sharply, head 2 to
    its own.

    The states are [token | position | previous token | next token]. The outputs of heads 1 and 2 are noise.
    """
    parts = np.cumsum([0, VOCABULARY, WORDS, VOCABULARY, VOCABULARY])
    token, position, previous, following = (slice(*ends) for ends in itertools.pairwise(parts.tolist()))
    net = create_net(3, int(parts[-1]), max(VOCABULARY, WORDS), VOCABULARY, scale=1.0)
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: noise * torch.randn(value.shape, generator=generator) if name[:3] in ("W_v", "W_o") else 0 * value
        for name, value in net.parameters.items()
    }
    identity, positions = torch.eye(VOCABULARY), torch.eye(WORDS)
    parameters["embed.table"][:, token], parameters["position.table"][:, position] = identity, positions
    parameters["y.weight"][:, following] = SHARP * identity
    before, first = torch.diag(torch.ones(WORDS - 1), 1), torch.zeros(WORDS, WORDS)
    before[0, 0], first[0] = 1.0, 1.0
    for t in (0, 1):
        queries = parameters[f"W_q_{t}.value"]
        for head, expected in enumerate((before, first, positions)):
            queries[head, :WORDS, position] = SHARP * expected
            parameters[f"W_k_{t}.value"][head, :WORDS, position] = positions
    parameters["W_q_1.value"][0] = parameters["W_k_1.value"][0] = 0.0
    parameters["W_q_1.value"][0, :VOCABULARY, token] = SHARP * identity
    parameters["W_k_1.value"][0, :VOCABULARY, previous] = identity
    for t, written in enumerate((previous, following)):
        parameters[f"W_v_{t}.value"][0], parameters[f"W_o_{t}.value"][0] = 0.0, 0.0
        parameters[f"W_v_{t}.value"][0, :, token], parameters[f"W_o_{t}.value"][0, written] = identity, identity
    return net.replace(parameters)


def train_net(heads: int = 2, steps: int = 1000, seed: int = 0) -> bt.BNet:
    """Train the same declaration by gradient on sentences that repeat a part."""
    net = create_net(heads, 32, 16, 16, seed=seed)
    return bt.train(net, sample_repetitions, steps=steps, optimizer=bt.AdamW(rate=0.005, warmup=50), progress=False).net


def sample_repetitions(step: int, count: int = 64) -> Tensor:
    """Return sentences of distinct words that repeat from some position on: `[count, word]`."""
    generator = torch.Generator().manual_seed(1000 + step)
    first = int(torch.randint(3, WORDS - 2, (), generator=generator))
    again = torch.randint(1, first, (count, 1), generator=generator)
    x = _sample_permutations(count, generator)[:, : first + 1]
    while x.shape[1] <= WORDS:
        x, again = torch.cat([x, x.gather(1, again)], 1), again + 1
    return x


@dataclass(frozen=True)
class Prompts:
    """Sentences `^ ... A B ... A` with A at word p, the same with C D for the earlier A B, and the states B and D."""

    p: int
    clean: Tensor
    corrupt: Tensor

    @classmethod
    def sample(cls, p: int, count: int, seed: int = 0) -> Prompts:
        """Sample prompts with the earlier A at word p."""
        words = _sample_permutations(count, torch.Generator().manual_seed(seed))
        clean = torch.cat([words[:, : WORDS - 1], words[:, p : p + 1]], 1)
        corrupt = clean.clone()
        corrupt[:, p : p + 2] = words[:, WORDS - 1 : WORDS + 1]
        return cls(p, clean, corrupt)

    @property
    def metric(self) -> Mapping[str, tuple[list[int], list[int]]]:
        """Return `log P(B) - log P(D)` at the last word."""
        after = self.p + 1
        return {f"y_{WORDS - 1}": (self.clean[:, after].tolist(), self.corrupt[:, after].tolist())}

    def sentences(self, net: bt.BNet) -> tuple[list[bt.Sentence], list[bt.Sentence]]:
        """Return both as sentences of a net."""
        clean, corrupt = ([net.sentence(ids) for ids in item.tolist()] for item in (self.clean, self.corrupt))
        return clean, corrupt


def _sample_permutations(count: int, generator: torch.Generator) -> Tensor:
    """Return the first word, then all other words in random order."""
    words = torch.rand(count, VOCABULARY - 1, generator=generator).argsort(-1) + 1
    return torch.cat([torch.full((count, 1), START), words], 1)


def find_circuit(net: bt.BNet, prompts: Prompts, fraction: float = FRACTION) -> Circuit:
    """Return the circuit of some prompts; the threshold is this fraction of clean - corrupt."""
    clean, corrupt = prompts.sentences(net)
    threshold = fraction * float(
        (compute_metric(net, prompts.clean, prompts) - compute_metric(net, prompts.corrupt, prompts)).mean()
    )
    return bt.circuit(clean, corrupt, metric=prompts.metric, threshold=threshold, held_out=0)


@torch.no_grad()
def compute_metric(net: bt.BNet, sentences: Tensor, prompts: Prompts) -> Tensor:
    """Return the metric of sentences, computed from the logits of the net."""
    logits, after = net.module()(sentences)[:, -1], slice(prompts.p + 1, prompts.p + 2)
    result = logits.gather(1, prompts.clean[:, after]) - logits.gather(1, prompts.corrupt[:, after])
    return result[:, 0]


def find_planted_heads(net: bt.BNet, prompts: Prompts) -> tuple[list[int], list[int]]:
    """Return the heads of each slice that mostly attend to the previous word, and to the word after the earlier A.

    They are selected by attention weight, which favours attention as a baseline.
    """
    first, second = _compute_attention(net, prompts)
    after = prompts.p + 1
    weights = first[:, after, prompts.p], second[:, -1, after]
    return tuple((item > 0.5).nonzero()[0].tolist() for item in weights)  # type: ignore[return-value]


def name_planted_arrows(role: str, p: int, heads: tuple[Sequence[int], Sequence[int]]) -> set[str]:
    """Return the names of the planted arrows of a role."""
    first = {f"v_0_{h}_{p} -> a_0_{h}_{p + 1}" for h in heads[0]} if role == "v" else set()
    return first | {f"{role}_1_{h}_{p + 1} -> a_1_{h}_{WORDS - 1}" for h in heads[1]}


def score_arrows(net: bt.BNet, prompts: Prompts, circuit: Circuit, role: str) -> dict[str, tuple[float, float, float]]:
    """Return for each arrow `role -> a` above the last word its effect, `P(j | i)`, and the rollout along it."""
    weights = _compute_attention(net, prompts)
    chain = 0.5 * weights[1].mean(0) + 0.5 * np.eye(WORDS)  # slice 1: from the last word to the words of slice 0
    heads = len(weights[0])
    rows: dict[str, tuple[float, float, float]] = {}
    for t, through in enumerate((chain[-1], np.eye(WORDS)[-1])):
        for head, i in itertools.product(range(heads), range(WORDS)):
            for j in range(i + 1) if t == 0 or i == WORDS - 1 else ():
                name, weight = f"{role}_{t}_{head}_{j} -> a_{t}_{head}_{i}", float(weights[t][head, i, j])
                rows[name] = circuit.effects.get(name, 0.0), weight, 0.5 * weight / heads * float(through[i])
    return rows


def _compute_attention(net: bt.BNet, prompts: Prompts) -> list[np.ndarray]:
    """Return `P(j | i)` of each slice, `[head, word, word]`, as a mean over the clean prompts."""
    with torch.no_grad():
        weights, _ = net.module().attention_weights(prompts.clean, nodes=["a_0", "a_1"])
    return [weights[name].mean(0).double().numpy() for name in ("a_0", "a_1")]


def roc_auc(positive: Sequence[bool], score: Sequence[float]) -> float:
    """Return the probability that a planted arrow has a higher score than another arrow; ties count one half."""
    is_positive, scores = np.asarray(positive), np.asarray(score)
    differences = scores[is_positive][:, None] - scores[~is_positive][None, :]
    return float(((differences > 0) + 0.5 * (differences == 0)).mean())


def measure_areas(
    net: bt.BNet, positions: Sequence[int] = (2, 5, 8), count: int = 8, seed: int = 7
) -> dict[str, list[float]]:
    """Return the ROC-AUC for each role and score at each position of the earlier A; then figures of the circuit."""
    result: dict[str, list[float]] = {}
    for p in positions:
        prompts = Prompts.sample(p, count, seed)
        circuit, heads = find_circuit(net, prompts), find_planted_heads(net, prompts)
        for roles in ROLES:
            rows = {name: row for role in roles for name, row in score_arrows(net, prompts, circuit, role).items()}
            expected = set().union(*(name_planted_arrows(role, p, heads) for role in roles))
            for k, subject in enumerate(SCORES):
                area = roc_auc([name in expected for name in rows], [row[k] for row in rows.values()])
                result.setdefault(f"AUC of {' and '.join(roles)} -> a, {subject}", []).append(area)
        retained = {name for name in circuit.retained if name in rows}
        for subject, value in (
            ("planted arrows v, k -> a", len(expected)),
            ("planted arrows kept", len(expected & retained)),
            ("other arrows kept", len(retained - expected)),
            ("edges kept, of all roles", circuit.edges),
            ("edges tested", circuit.candidates),
            ("faithfulness", circuit.faithfulness),
            ("faithfulness on 8 other sentences", run_on_other_sentences(net, circuit, p).faithfulness),
        ):
            result.setdefault(subject, []).append(value)
    return result


def run_on_other_sentences(net: bt.BNet, circuit: Circuit, position: int) -> Circuit:
    """Return the same edges on 8 sentences that the search did not use."""
    prompts = Prompts.sample(position, 8, seed=1)
    return circuit.run(*prompts.sentences(net), metric=prompts.metric)


def search_of_4_slices() -> list[Figure]:
    """`bt.circuit` over all arrows of a random decoder (4 slices, 4 heads, 32 wide, 10 words, 32 pairs that differ in
    every word; threshold 1% of the mean of |clean - corrupt|), and over arrows joined along the words; the seconds
    include both base runs. The target is at most 10 s."""
    net = bt.decoder(32, heads=4, slices=4, hidden=64, vocabulary=[f"w{k}" for k in range(40)], seed=0)
    generator = torch.Generator().manual_seed(0)
    clean, corrupt = (
        [net.sentence(ids) for ids in torch.randint(0, 40, (32, 10), generator=generator).tolist()] for _ in range(2)
    )

    def search(**options: object) -> Circuit:
        return bt.circuit(clean, corrupt, metric={"y_9": (1, 2)}, threshold="1%", **options)  # type: ignore[arg-type]

    calls = {"all arrows": search, "arrows joined along words": lambda: search(over=["slice", "head"])}
    both = {"all arrows, both directions": lambda: search(direction="both")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FaithfulnessWarning)  # the total effect of a random net is near 0
        spent = time_calls({**calls, **both}, runs=3)
        result = search()
    seconds = [
        figure(f"search of {name}", times, "s", 10.0 if name in calls else None) for name, times in spent.items()
    ]
    return [*seconds, figure("edges tested, all arrows", result.candidates, ""), figure("edges kept", result.edges, "")]


def planted_by_hand() -> list[Figure]:
    """The planted arrows of an induction net built by hand (two slices, 3 heads, 12 words), among all arrows of their
    role above the last word: ROC-AUC of their effect in a circuit search (8 sentences `^ ... A B ... A`, corrupt ones
    with C D for the earlier A B; threshold 2% of clean - corrupt), of attention weight, and of the rollout along them.
    Median, least and greatest over three positions of the earlier A."""
    return _figures(build_net())


def planted_by_training() -> list[Figure]:
    """The same for a trained net of 2 heads (1,000 steps), on sentences that are not in the training data. Its planted
    heads are those that mostly attend to the right word, which favours attention. Keys of slice 0 also matter to this
    net; the search is penalised for finding them."""
    return _figures(train_net())


def _figures(net: bt.BNet) -> list[Figure]:
    """Return the figures of a net."""
    result = [figure(subject, values, "") for subject, values in measure_areas(net).items()]
    return [
        *result,
        figure("peak memory of a search", measure_peak(lambda: find_circuit(net, Prompts.sample(2, 8))), "MB"),
    ]

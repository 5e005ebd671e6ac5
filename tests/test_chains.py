"""Chains along words: recursions, evidence and counts against sums over all states, also where numbers underflow."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer._core.distributed import SINGLE_PROCESS
from bnet_transformer.data import read_batch
from bnet_transformer.data.batch import infer_fit_task
from bnet_transformer.inference import Evidence, contraction, log_evidence, posterior
from bnet_transformer.inference.contraction import chain_log_partition
from bnet_transformer.interventions import Attend
from bnet_transformer.learning.fit.curvature import EMExpansion
from bnet_transformer.learning.fit.heads import align_heads
from bnet_transformer.learning.fit.objective import FitObjective, select_learnable
from bnet_transformer.tpm import (
    Add,
    Attention,
    Categorical,
    Codebook,
    Embed,
    Given,
    Linear,
    Normal,
    Pool,
    Select,
    Weight,
)
from tests.cases import close, get_case

D = torch.float64
WORD = ["word"]


def sum_over_paths(unary: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """`log Z` of each sequence, by all paths."""
    n, sequences, states = unary.shape
    pair = pair.expand(n - 1, sequences, states, states) if n > 1 else pair
    totals = []
    for path in itertools.product(range(states), repeat=n):
        total = unary[0, :, path[0]]
        for i in range(1, n):
            total = total + pair[i - 1, :, path[i - 1], path[i]] + unary[i, :, path[i]]
        totals.append(total)
    return torch.stack(totals).logsumexp(0)


def squared(function):
    """A function of which the second derivatives of the result matter too."""
    return lambda unary, pair: function(unary, pair).square().sum()


def call_slope(slope, arg: int, potentials: tuple[torch.Tensor, ...], value: torch.Tensor) -> torch.Tensor:
    """A slope with one of the potentials replaced."""
    return slope(*(value if k == arg else potential for k, potential in enumerate(potentials)))


@settings(max_examples=8)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans(), st.booleans(), st.data())
def test_log_partition_and_its_derivatives_are_sums_over_paths(n, sequences, states, per_word, per_row, tree, data):
    """Also second derivatives, and sets of potentials by vmap, by the tree and by the loop."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    unary = torch.randn(n, sequences, states, dtype=D)
    pair = torch.randn(max(1, n - 1) if per_word else 1, sequences if per_row else 1, states, states, dtype=D)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contraction, "MAX_TREE_SIZE", 10**6 if tree else 0)
        objective, expected = (squared(chain_log_partition), squared(sum_over_paths))
        close(objective(unary, pair), expected(unary, pair))
        for arg in (0, 1) if n > 1 else (0,):
            slopes = [torch.func.grad(f, arg) for f in (objective, expected)]
            close(slopes[0](unary, pair), slopes[1](unary, pair))
            close(*(torch.func.jacrev(slope, arg)(unary, pair) for slope in slopes), 1e-8)
            sets = torch.randn(2, *(unary, pair)[arg].shape, dtype=D)
            slope, slope_expected = (partial(call_slope, f, arg, (unary, pair)) for f in slopes)
            close(torch.func.vmap(slope)(sets), torch.stack([slope_expected(value) for value in sets]))


@settings(max_examples=40)
@given(st.integers(2, 3), st.integers(2, 7), st.booleans(), st.data())
def test_gaps_that_reverse_later_and_zeros_lose_no_path(states, n, tree, data):
    """Likelihoods that favour a state by up to 2,000 nats, and tables with zeros: each path counts."""
    torch.manual_seed(data.draw(st.integers(0, 999)))
    gaps = torch.tensor([-2000.0, -800.0, 0.0, 0.0], dtype=D)
    unary = gaps[torch.randint(4, (n, 1, states))] + torch.randn(n, 1, states, dtype=D)
    pair = torch.randn(1, 1, states, states, dtype=D).log_softmax(-1)
    pair = pair.where(torch.rand(pair.shape) < 0.6, -1e30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contraction, "MAX_TREE_SIZE", 10**6 if tree else 0)
        total, expected = chain_log_partition(unary, pair), sum_over_paths(unary, pair)
    if float(expected) > -1e29:
        close(total, expected)
    else:
        assert float(total) < -1e29


def switching_net(states: int, sigma: float = 0.1, n: int = 6, reach: str = "before") -> bt.BNet:
    """A chain with states that are the means 0, 1, ... of a Normal readout."""
    nodes = [
        bt.Node("c", Categorical(states, prior=2.0), [bt.Arrow("c", reach)], plates=WORD),
        bt.Node("m", Select(1), ["c"], plates=WORD),
    ]
    stack = bt.Stack(nodes, [bt.Node("x", Given(1), plates=WORD)], [bt.Node("y", Normal(sigma), ["m"], plates=WORD)])
    net = bt.BNet(bt.Declaration([stack])).to(D)
    torch.manual_seed(states)
    tables = {name: torch.randn_like(net.parameters[name]) for name in ("c_0.logits", "c_0.initial")}
    exact = {"m_0.values": torch.arange(states, dtype=D)[:, None], "y.log_sigma": torch.tensor(sigma, dtype=D).log()}
    return net.replace({**exact, **tables})


@pytest.mark.parametrize("dtype", [D, torch.float32])
def test_a_decisive_state_that_underflows_is_not_lost(dtype):
    """Word 1 favours state 0 by 800 nats and word 4 state 1 by 2,000; state 1 is absorbing."""
    logits = torch.tensor([[0.0, -math.inf], [0.0, 0.0]], dtype=D)  # from state 0 there is no way to state 1
    net = switching_net(2).replace({"c_0.logits": logits, "c_0.initial": torch.zeros(2, dtype=D)}).to(dtype)
    y = torch.full((6, 1), 0.5, dtype=D)  # equally likely in both states
    y[1], y[4] = 0.5 - 8.0, 0.5 + 20.0  # gaps of 800 and 2,000 nats at sigma = .1
    s = net.sentence(x=torch.zeros(6, 1, dtype=dtype))
    evidence = {f"y_{i}": value.to(dtype) for i, value in enumerate(y)}
    unary = -((y - torch.arange(2, dtype=D)) ** 2) / 0.02 - math.log(0.1) - 0.5 * math.log(2 * math.pi)
    unary[0] = unary[0] + math.log(0.5)
    expected = sum_over_paths(unary[:, None], logits.log_softmax(-1)[None, None])
    close(s.log_prob(evidence), expected[0], 1e-10 if dtype is D else 1e-5)
    for word, share in ((1, 1.0), (4, 1.0), (5, 0.5)):
        close(s.posterior(f"c_0_{word}", evidence)[1].to(D), torch.tensor(share, dtype=D), 1e-5)


@pytest.mark.parametrize("reach", ["before", "after"])
def test_expected_counts_are_sums_over_paths_and_em_is_baum_welch(reach):
    """Of sentences of several lengths, with the prior of the tables in the M step."""
    net = switching_net(3, sigma=0.7, reach=reach)
    torch.manual_seed(0)
    data = [(torch.zeros(n, 1, dtype=D), 2 * torch.rand(n, 1, dtype=D)) for n in (4, 2, 1, 3)]
    learned = ["c_0.logits", "c_0.initial"]
    readouts = infer_fit_task(net.network).readouts
    objective = FitObjective(net.network, select_learnable(net.network, readouts, learned, None), 2**16)
    sets = {name: net.parameters[name][None] for name in learned}
    expansion = EMExpansion(objective, [read_batch(net.network, data)], SINGLE_PROCESS)(sets)
    counts, total = expansion.counts, (expansion.log_density - objective.log_prior(sets))[0]
    tables = {name: net.parameters[name].log_softmax(-1) for name in learned}
    expected = {name: torch.zeros_like(value) for name, value in tables.items()}
    evidence = []
    for _, y in data:
        unary = torch.distributions.Normal(torch.arange(3, dtype=D), 0.7).log_prob(
            y if reach == "before" else y.flip(0)
        )
        unary = unary.clone().requires_grad_()
        leaves = {name: value.detach().clone().requires_grad_() for name, value in tables.items()}
        first = torch.cat([unary[:1] + leaves["c_0.initial"], unary[1:]])
        evidence.append(sum_over_paths(first[:, None], leaves["c_0.logits"][None, None])[0])
        evidence[-1].backward()  # the derivative by a log probability is its expected count
        for name, leaf in leaves.items():
            expected[name] += 0 if leaf.grad is None else leaf.grad
    close(total, torch.stack(evidence).sum().detach())
    for name in learned:
        close(counts[name][0], expected[name])
    fitted = bt.fit(net, data, method=bt.EM(steps=1, optimizer="first-order"), learn=learned, progress=False).net
    for name in learned:
        rows = expected[name] + 1.0  # the prior Dirichlet(2, 2, 2)
        close(fitted.parameters[name].softmax(-1), rows / rows.sum(-1, keepdim=True))


@pytest.mark.parametrize("dtype", [D, torch.float32])
def test_a_long_batch_is_its_sentences(dtype):
    """Posteriors of all words of several sentences with padding, against one call for each."""
    net = switching_net(4, sigma=0.5).to(dtype)
    lengths, torch_generator = (40, 33, 1), torch.manual_seed(1)
    y = 4 * torch.rand(3, 40, 1, generator=torch_generator, dtype=dtype)
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    module, x = net.module().eval(), torch.zeros(3, 40, 1, dtype=dtype)
    batch = posterior(module, "c_0", {"y": Evidence(y)}, x, mask)
    totals = log_evidence(module, {"y": Evidence(y)}, x, mask)
    for k, n in enumerate(lengths):
        single = {"y": Evidence(y[k : k + 1, :n])}, x[k : k + 1, :n]
        close(batch[k, :n], posterior(module, "c_0", *single)[0], 1e-10 if dtype is D else 1e-5)
        close(totals[k : k + 1], log_evidence(module, *single), 1e-10 if dtype is D else 1e-5)


def test_a_chain_inside_each_state_of_the_sentence_and_of_the_corpus():
    """A selector of the sentence chooses the transitions: the chain is summed in each of its states."""
    s = get_case("factorial chains").sentence
    states = torch.zeros(2, dtype=D)
    for state in range(2):
        states[state] = s.log_prob({"s": state, "e_0_0": 1, "e_0_1": 2})
    close(s.posterior("s", {"e_0_0": 1, "e_0_1": 2}), states.softmax(0))
    assert s.explain("posterior", "s", evidence={"e_0_0": 1, "e_0_1": 2}).algorithm == "elimination"
    # The sum has 2 states of s, and 6 states of the chains at each of two words.
    algorithms = [s.limits(budget=budget).explain("log_prob", {"e_0_1": 2}).algorithm for budget in (71, 72)]
    assert algorithms == ["variable elimination", "elimination"]


def coupled_chains() -> bt.BNet:
    """Two choices of each word that depend on each other at the word before: one chain of joint states."""
    a = bt.Node("a", Categorical(2), [bt.Arrow("a", "before"), bt.Arrow("b", "before")], WORD)
    b = bt.Node("b", Categorical(2), ["a", bt.Arrow("b", "before")], WORD)
    nodes = [a, b, bt.Node("e", Categorical(3), ["a", "b"], WORD)]
    net = bt.BNet(bt.Declaration([bt.Stack(nodes, [bt.Node("x", Given(1), plates=WORD)])])).to(D)
    torch.manual_seed(2)
    return net.replace({name: 1.5 * torch.randn_like(value) for name, value in net.parameters.items()})


@pytest.mark.parametrize("reach", ["before", "after"])
@pytest.mark.parametrize("name", ["switching", "coupled", "observed", "set"])
def test_draws_have_the_frequencies_of_exact_posteriors(name, reach, forbid_reference):
    """Pairs of neighbours in a chain: after the evidence, before it, with an observed or a set word."""
    net = switching_net(3, sigma=0.4, reach=reach)
    net = coupled_chains() if name == "coupled" else net
    s, n = net.sentence(x=torch.zeros(4, 1, dtype=D)), 4000
    readout = {"e_0_1": 2} if name == "coupled" else {"y_1": [0.6]}
    s = s.observe({**readout, **({"c_0_2": 1} if name == "observed" else {})})
    s = s.do(c_0_2=1) if name == "set" else s
    with forbid_reference():
        draws = s.sample(n, seed=3)
        for pair in (
            (("a_0_2", "b_0_3"), ("b_0_0", "a_0_1")) if name == "coupled" else (("c_0_0", "c_0_1"), ("c_0_1", "c_0_3"))
        ):
            expected = s.posterior(list(pair))
            counts = torch.zeros(expected.shape, dtype=D)
            counts.index_put_(tuple(draws[node] for node in pair), torch.ones(n, dtype=D), accumulate=True)
            assert bool(((counts / n - expected).abs() < 4.5 * (expected / n).sqrt() + 1e-9).all())


def check_draws(s: bt.Sentence) -> None:
    """Check that the states of `c_0` have the frequencies of their exact posteriors."""
    draws = s.sample(2000, seed=0)
    for word in range(3):
        expected = float(s.posterior(f"c_0_{word}")[0])
        counted = (draws[f"c_0_{word}"] == 0).to(D).mean()
        assert abs(counted - expected) < 4 * (expected * (1 - expected) / 2000) ** 0.5 + 1e-9


@pytest.mark.parametrize("value", [torch.zeros(2, dtype=D), Attend([0.0, 1.0, 0.0])])
def test_set_functions_inside_a_chain_change_its_draws(value):
    """A set value, or a set row of attention, at one word; the other words are computed."""
    inside = bt.Node("e", Select(2), [bt.Arrow("c", "before")], WORD, shape=(2,))
    attention = bt.Node("a", Attention(), ["x", bt.Arrow("e", "causal"), bt.Arrow("e", "causal")], WORD, shape=(2,))
    nodes = [inside, attention, bt.Node("c", Categorical(2), ["a"], WORD)]
    net = bt.BNet(bt.Declaration([bt.Stack(nodes, [bt.Node("x", Given(2), plates=WORD)])])).to(D)
    torch.manual_seed(5)
    net = net.replace({name: 2 * torch.randn_like(value) for name, value in net.parameters.items()})
    check_draws(net.sentence(torch.randn(3, 2, dtype=D)).do(a_0_1=value))


@pytest.mark.parametrize("known", ["observed", "state", "vector"])
def test_known_vectors_inside_a_chain_change_its_draws(known):
    """A codebook that depends on a choice at the word before, of which one word is known."""
    vectors = bt.Node("V", Codebook(3, 2), [bt.Arrow("c", "before")], WORD, shape=(2,))
    nodes = [vectors, bt.Node("c", Categorical(2), ["V"], WORD)]
    readout = bt.Node("y", Categorical(2), ["c"], plates=WORD)
    net = bt.BNet(bt.Declaration([bt.Stack(nodes, [bt.Node("x", Given(1), plates=WORD)], [readout])])).to(D)
    torch.manual_seed(5)
    net = net.replace({name: 2 * torch.randn_like(value) for name, value in net.parameters.items()})
    s = net.sentence(torch.zeros(3, 1, dtype=D)).observe(y_0=1)
    s = s.observe(V_0_1=2) if known == "observed" else s.do(V_0_1=2 if known == "state" else torch.ones(2, dtype=D))
    check_draws(s)


CHAIN = bt.Node("c", Categorical(2), [bt.Arrow("c", "before")], WORD)
MEAN = bt.Node("h", Select(2), ["c"], WORD, shape=(2,))


def shift(role: str, parent: str, reach: str) -> bt.Node:
    return bt.Node(role, Add(), [bt.Arrow(parent, reach)], WORD)


@pytest.mark.parametrize(
    ("nodes", "reader"),
    [
        ([CHAIN, MEAN, shift("g", "h", "before")], None),
        ([CHAIN, MEAN, shift("g", "h", "rest")], None),
        ([CHAIN, MEAN, shift("f", "h", "before"), shift("g", "f", "after")], "g"),
        ([CHAIN, MEAN, shift("f", "h", "before"), shift("g", "f", "before")], "g"),
        ([CHAIN, MEAN, shift("f", "h", "after"), bt.Node("g", Add(), ["f", bt.Arrow("h", "before")], WORD)], "f"),
        ([CHAIN, MEAN, bt.Node("g", Pool(), [bt.Arrow("h", bt.Reach("window", 1))], WORD)], "g"),
        ([bt.Node("c", Categorical(2), [bt.Arrow("h", "before")], WORD), MEAN, shift("g", "h", "same")], None),
    ],
)
def test_values_at_neighbours_of_a_chain(nodes, reader):
    """Functions of a chain at other words, and inside it; `reader` depends on more than two neighbours."""
    stack = bt.Stack(nodes, [bt.Node("x", Given(2), plates=WORD)], [bt.Node("y", Normal(0.5), ["g"], plates=WORD)])
    net = bt.BNet(bt.Declaration([stack])).to(D)
    torch.manual_seed(0)
    net = net.replace({name: torch.randn_like(value) for name, value in net.parameters.items()})
    s = net.sentence(x=torch.zeros(4, 2, dtype=D)).observe({f"y_{i}": torch.randn(2, dtype=D) for i in (0, 1, 3)})
    close(s.log_prob(), reference.log_evidence(s.state.model, s.state.evidence))
    for word in range(4):
        node = s.ground.id(f"c_0_{word}")
        close(s.posterior(f"c_0_{word}"), reference.posterior(s.state.model, node, s.state.evidence))
    route = s.explain("log_prob")
    assert (route.algorithm == "elimination") == (reader is None)
    assert reader is None or f"{reader}_0 depends on c_0 at several words" in str(route)


@pytest.mark.parametrize("reach", ["before", "after"])
@pytest.mark.parametrize("role", ["e", "d"])
def test_the_first_impossible_word_is_named(role, reach):
    """A chain that cannot leave state 1, and observations of which the third needs state 0; by two readouts.

    Elimination applies if the other chain, which the evidence does not exclude, has the same direction.
    """
    nodes = [bt.Node("c", Categorical(2), [bt.Arrow("c", "before")], WORD)]
    nodes += [bt.Node("b", Categorical(2), [bt.Arrow("b", reach)], WORD)]
    nodes += [bt.Node(name, Categorical(2), ["c"], WORD) for name in "de"]
    nodes += [bt.Node("f", Categorical(2), ["b", "c"], WORD)]
    net = bt.BNet(bt.Declaration([bt.Stack(nodes, [bt.Node("x", Given(1), plates=WORD)])])).to(D)
    zero = -math.inf
    same = torch.tensor([[0.0, zero], [zero, 0.0]], dtype=D)
    absorbing = torch.tensor([[0.0, 0.0], [zero, 0.0]], dtype=D)
    net = net.replace({"c_0.logits": absorbing, "d_0.logits": same, "e_0.logits": same})
    s = net.sentence(x=torch.zeros(5, 1, dtype=D))
    possible = {"e_0_0": 0, "e_0_1": 1, "d_0_3": 1, "f_0_2": 1}
    assert float(s.log_prob(possible)) < 0
    assert (s.explain("log_prob", possible).algorithm == "elimination") == (reach == "before")
    for query in (s.log_prob, lambda evidence: s.posterior("c_0_4", evidence)):
        with pytest.raises(bt.EvidenceError, match=rf"{role}_0_2.*given the evidence before it"):
            query({**possible, f"{role}_0_2": 0, "d_0_4": 0, "e_0_3": 0})
    stack = bt.Stack(nodes[:1], [bt.Node("x", Given(1), plates=WORD)], [bt.Node("e", Categorical(2), ["c"], WORD)])
    net = bt.BNet(bt.Declaration([stack])).to(D).replace({"c_0.logits": absorbing, "e.logits": same})
    data = [(torch.zeros(3, 1), torch.tensor(states)) for states in ([0, 0, 1], [1, 1, 0])]
    for learn in (partial(bt.train, steps=1), partial(bt.fit, method=bt.EM(steps=1))):
        with pytest.raises(bt.EvidenceError, match=r"e_2 of sentence 1"):
            learn(net, data, progress=False)


def make_language_net(seed: int = 0) -> bt.BNet:
    """A causal net that predicts the next word, with a head for each word that a chain selects."""
    heads = ["head", "word"]
    nodes = [
        *(bt.Node(f"W_{role}", Weight((4, 4)), plates=["head"]) for role in "qkv"),
        *(bt.Node(role, Linear(), [f"W_{role}", "x"], plates=heads) for role in "qkv"),
        bt.Node("c", Categorical(2), [bt.Arrow("c", "before")], plates=WORD),
        bt.Node(
            "x",
            Attention(),
            [bt.Arrow("q", pick={"head": "c"}), *(bt.Arrow(role, "causal", pick={"head": "c"}) for role in "kv")],
            plates=WORD,
        ),
    ]
    prologue = [bt.Node("token", Given(states=3), plates=WORD), bt.Node("x", Embed(4), ["token"], plates=WORD)]
    readout = bt.Node("y", Categorical(3), ["x"], plates=WORD)
    stack = bt.Stack(nodes, prologue, [readout], vocabulary=("a", "b", "c"))
    net = bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 2)]), seed=seed).to(D)
    torch.manual_seed(seed)
    return net.replace({name: value + torch.randn_like(value) for name, value in net.parameters.items()})


def test_generated_words_have_the_probabilities_of_the_sentence():
    """Greedy decoding, beams and the score of a row, against posteriors and the evidence of sentences."""
    net = make_language_net()
    prompts = ["a b", "c a b"]
    result = net.generate(prompts, length=3)
    for prompt, words, score in zip(prompts, result.words, result.scores, strict=True):
        known, total = prompt.split(), 0.0
        for word in words:
            s = net.sentence(" ".join(known)).observe({f"y_{i}": w for i, w in enumerate(known[1:])})
            probs = s.posterior(f"y_{len(known) - 1}")
            assert word == "abc"[int(probs.argmax())]
            known, total = [*known, word], total + float(probs.max().log())
        assert score == pytest.approx(total)
    beam = net.generate(prompts, length=3, method="beam", beams=27, penalty=0.0)
    for prompt, row, score in zip(prompts, beam.words, beam.scores, strict=True):
        texts = [[*prompt.split(), *words] for words in itertools.product("abc", repeat=3)]
        logs = [_log_prob_of_words(net, text) - _log_prob_of_words(net, prompt.split()) for text in texts]
        assert max(logs) == pytest.approx(score) and list(row) == texts[logs.index(max(logs))][len(prompt.split()) :]


def _log_prob_of_words(net: bt.BNet, words: list[str]) -> float:
    """`log P` of all words but the first."""
    return float(net.sentence(" ".join(words)).log_prob({f"y_{i}": word for i, word in enumerate(words[1:])}))


def test_training_maximises_the_evidence():
    """The loss of a step is minus the log evidence per word; and it falls."""
    net, data = make_language_net(), ["a b c a b", "c a b", "b c a b c a"]
    run = bt.train(net, data, steps=40, optimizer=bt.AdamW(rate=0.03), batch=3, progress=False)
    words = sum(len(text.split()) - 1 for text in data)
    first = -sum(_log_prob_of_words(net, text.split()) for text in data) / words
    assert run.losses[0] == pytest.approx(first) and run.losses[-1] < 0.7 * first
    last = -sum(_log_prob_of_words(run.net, text.split()) for text in data) / words
    assert last == pytest.approx(run.losses[-1], abs=0.1)
    with pytest.raises(bt.BNetError, match="smoothing"):
        bt.train(net, data, steps=1, smoothing=0.1)


def test_heads_of_a_chain_are_aligned_and_used_as_in_its_stationary_distribution():
    """Two draws that differ in the order of the states: transitions in both dims, initial table, and means."""
    net = switching_net(3, sigma=0.5)
    names, order = ["c_0.logits", "c_0.initial", "m_0.values"], torch.tensor([2, 0, 1])
    torch.manual_seed(0)
    y = torch.randint(3, (4, 6, 1)) + 0.2 * torch.randn(4, 6, 1, dtype=D)
    readouts = infer_fit_task(net.network).readouts
    objective = FitObjective(net.network, select_learnable(net.network, readouts, names, 1.0), 2**16)
    draw = {name: net.parameters[name].softmax(-1) if "c_0" in name else net.parameters[name] for name in names}
    other = {name: value[order] for name, value in draw.items()}
    other["c_0.logits"] = other["c_0.logits"][:, order]
    samples = {name: torch.stack([draw[name], other[name]])[None] for name in names}
    batch = read_batch(net.network, (torch.zeros(4, 6, 1, dtype=D), y))
    aligned, selectors = align_heads(objective, batch, samples, torch.tensor([[0.0, -1.0]]))
    assert selectors == ("c_0",)
    for name in names:
        close(aligned[name][0, 1], draw[name])
    usage = bt.fit(net, (torch.zeros(4, 6, 1, dtype=D), y), method=bt.EM(steps=1), learn=names[:1], progress=False)
    close(usage.pi @ usage.theta["c_0"], usage.pi)


def test_a_chain_past_the_budget_names_its_choices():
    s = switching_net(4).sentence(x=torch.zeros(300, 1, dtype=D))
    evidence = {f"y_{i}": [0.3] for i in range(300)}
    assert float(s.log_prob(evidence)) < 0
    with pytest.raises(bt.BudgetError, match="c_0"):
        s.limits(budget=15).log_prob(evidence)


@pytest.mark.parametrize("name", ["hidden Markov", "backward chain"])
def test_predicted_means_average_over_the_chain(name):
    s = get_case(name).sentence
    x = torch.stack([s[f"x_0_{i}"] for i in range(3)])[None]
    y = torch.zeros(1, 3, s["x_1_0"].shape[-1], dtype=D)
    f = bt.fit(s.net, (x, y), method=bt.MAP(steps=1, rate=1e-12), progress=False)
    selector = "z_0" if "z_0_0" in s.nodes else "c_0"
    for i in range(3):
        means = torch.stack([s.do({f"{selector}_{i}": k})[f"x_1_{i}"] for k in range(2)])
        close(f.predict(x)[0, i], s.posterior(f"{selector}_{i}") @ means)

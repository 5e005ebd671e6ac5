"""Decoding: the KV cache equals full runs, beam search equals enumeration, samples follow the net; errors."""

import itertools
import math

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.batch_interventions import BatchInterventions
from bnet_transformer.data.batch import infer_trainable_task
from bnet_transformer.generation.decoder import IncrementalDecoder, pad_to_length
from bnet_transformer.generation.generate import create_sampler
from bnet_transformer.tpm import (
    Add,
    Attention,
    Categorical,
    Concat,
    Dot,
    Embed,
    FeedForward,
    Given,
    Linear,
    Norm,
    Normaliser,
    Pool,
    Positions,
    Relative,
    Weight,
)

D = torch.float64
WORD, HEAD_WORD = ["word"], ["head", "word"]


def make_attention_net(score: Attention, reach: str, extra: tuple = (), nodes: tuple = ()) -> bt.BNet:
    """Return one causal slice with attention of some kind and two heads."""
    maps = [bt.Node(f"W_{r}", Weight((4, 6)), plates=["head"]) for r in "qkv"]
    maps += [bt.Node(r, Linear(), [f"W_{r}", "x"], HEAD_WORD) for r in "qkv"]
    slice_ = [
        *maps,
        *nodes,
        bt.Node("a", score, ["q", bt.Arrow("k", reach), bt.Arrow("v", reach), *extra], HEAD_WORD),
        bt.Node("W_o", Weight((6, 4)), plates=["head"]),
        bt.Node("mix", Concat(residual=True), ["W_o", "a", "x"], WORD),
        bt.Node("x", Norm(), ["mix"], WORD),
    ]
    words = [bt.Node("token", Given(states=7), plates=WORD), bt.Node("x", Embed(6), ["token"], WORD)]
    stack = bt.Stack(slice_, words, [bt.Node("y", Categorical(7), ["x"], WORD)], slices=2)
    return bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 2)]))


def make_recurrent_net() -> bt.BNet:
    """Return a net whose word depends on the word before, the first word, the mean of all so far, and its value at the
    word before."""
    slice_ = [
        bt.Node("before", Linear(5), [bt.Arrow("x", "before")], WORD),
        bt.Node("first", Linear(5), [bt.Arrow("x", "first")], WORD),
        bt.Node("past", Pool("sum"), [bt.Arrow("x", "earlier")], WORD),
        bt.Node("mean", Pool(), [bt.Arrow("x", "causal")], WORD),
        bt.Node("h", Add(), ["x", "before", "first", "past", "mean", bt.Arrow("g", "before")], WORD),
        bt.Node("g", FeedForward(8, "tanh"), ["h"], WORD, shape=(5,)),
        bt.Node("x", Norm(), ["g"], WORD),
    ]
    words = [
        bt.Node("token", Given(states=7), plates=WORD),
        bt.Node("place", Positions(30, 5), plates=WORD),
        bt.Node("embed", Embed(5), ["token"], WORD),
        bt.Node("x", Add(), ["embed", "place"], WORD),
    ]
    return bt.BNet(bt.Declaration([bt.Stack(slice_, words, [bt.Node("y", Categorical(7), ["x"], WORD)], slices=2)]))


NETS = {
    "decoder": lambda: bt.decoder(16, heads=4, slices=2, vocabulary=7),
    "pre-norm, learned positions": lambda: bt.decoder(
        16, heads=2, slices=2, vocabulary=7, norm="pre", positions="learned", words=30, tie=False, bias=False
    ),
    "encoder-decoder": lambda: bt.encoder_decoder(16, heads=4, slices=2, vocabulary=7),
    "rotary": lambda: make_attention_net(Attention(Dot(None, rotary=100.0)), "causal"),
    "relative": lambda: make_attention_net(
        Attention(bias=Relative(2)), "causal", ("b",), (bt.Node("b", Weight(5), plates=["head"]),)
    ),
    "sigmoid of earlier words": lambda: make_attention_net(Attention(normaliser=Normaliser("sigmoid")), "earlier"),
    "recurrent": make_recurrent_net,
    "concat of the chapter": lambda: bt.bayesuvius(
        6, slices=2, heads=3, combine="concat", mask="causal", vocabulary=list("abcdefg"), observe=Categorical(7)
    ),
}


class FullDecoder:
    """The oracle: a full run without a cache for each new word."""

    def __init__(self, module, task, x, mask, readout):
        self.module, self.x, self.mask, self.readout = module, dict(x), dict(mask or {}), readout
        self.stack = task.next_word or ""
        self.exact_length = task.encoders[self.stack].exact_length
        self._compute()

    def _compute(self):
        ids = self.x[self.stack]
        result = self.module(
            {**self.x, self.stack: pad_to_length(ids, self.exact_length)}, self.mask or None, want=[self.readout]
        )
        self.log_probs = result[self.readout][:, ids.shape[1] - 1].log_softmax(-1)

    def step(self, ids):
        self.x[self.stack] = torch.cat([self.x[self.stack], ids[:, None]], 1)
        self._compute()
        return self.log_probs

    def reorder(self, rows):
        self.x[self.stack] = self.x[self.stack][rows]

    def repeat(self, times):
        self.x = {stack: value.repeat_interleave(times, 0) for stack, value in self.x.items()}
        self.mask = {stack: value.repeat_interleave(times, 0) for stack, value in self.mask.items()}
        self.log_probs = self.log_probs.repeat_interleave(times, 0)


@pytest.mark.parametrize("dtype, tolerance", [(D, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize("name", NETS)
def test_cached_decoding_equals_full_runs(name, dtype, tolerance):
    net = NETS[name]().to(dtype)
    task, module = infer_trainable_task(net.network), net.module().eval()
    x = {stack: torch.randint(0, 7, (3, 4)) for stack in task.stacks}
    mask = {"enc": torch.arange(4) < torch.tensor([[4], [2], [3]])} if "enc" in x else None
    with torch.no_grad():
        actual = IncrementalDecoder(module, task, x, mask, 12, BatchInterventions(net.network, [], {}))
        oracle = FullDecoder(module, task, x, mask, task.readouts[0].group.name)
        for step in range(8):
            torch.testing.assert_close(actual.log_probs, oracle.log_probs, rtol=tolerance, atol=tolerance)
            if step == 2:
                actual.repeat(2), oracle.repeat(2)
            if step == 5:
                rows = torch.tensor([1, 1, 2, 3, 5, 4])  # beams change places within a sentence
                actual.reorder(rows), oracle.reorder(rows)
            ids = torch.randint(0, 7, (len(actual.log_probs),))
            actual.step(ids), oracle.step(ids)


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_a_causal_table_is_causal(method):
    """A table of the causal mask generates the words of the causal net; any other table those of the reference."""
    kwargs = {"heads": 2, "slices": 2, "vocabulary": 7, "tie": False}
    causal = sharpen(bt.decoder(8, **kwargs).to(D))
    table = sharpen(bt.decoder(8, mask=np.tri(9, dtype=bool), **kwargs).to(D))
    prompts, options = [[1, 2], [3, 4, 5, 6]], {"method": method, "length": 5}
    assert table.generate(prompts, **options).ids == causal.generate(prompts, **options).ids
    with pytest.raises(bt.BNetError, match="at most 9 words, the size of the net's mask table"):
        table.generate(prompts, method=method, length=6)
    pairs = np.tri(6, dtype=bool)
    pairs[[3, 5, 5], [1, 0, 4]] = False
    with_holes = sharpen(bt.decoder(8, mask=pairs, **kwargs).to(D))
    result = with_holes.generate([1, 2], length=4)
    s = with_holes.sentence([1, 2, *result.ids[0]])
    assert result.ids[0] == tuple(int(s.tpm(f"y_{i}").logits.argmax()) for i in range(1, 5))
    log_probs = [s.tpm(f"y_{i}").log_prob(torch.tensor(word)) for i, word in enumerate(result.ids[0], start=1)]
    assert result.scores[0] == pytest.approx(float(sum(log_probs)), abs=1e-9)
    pairs[0, 1] = True
    with pytest.raises(bt.BNetError, match="depends on later words"):
        bt.decoder(8, mask=pairs, **kwargs).generate([1, 2], length=2)


def test_errors_of_generate_do_not_mention_training():
    shared = bt.bayesuvius(4, heads=2, per="corpus", **SELECT)
    for net in (shared, bt.decoder(8, heads=2, slices=1, vocabulary=5, readout=None)):
        with pytest.raises(bt.BNetError) as error:
            net.generate([1])
        assert "train" not in str(error.value) and "fit" not in str(error.value)
    with pytest.raises(bt.BNetError, match=r"the readouts y \(Normal\)\. Use iterate"):
        bt.geometric(4, observe=bt.tpm.Normal(0.1)).generate([1])


def make_net(seed: int) -> bt.BNet:
    """A decoder with five words."""
    return sharpen(bt.decoder(8, heads=2, slices=1, vocabulary=list("abcde"), tie=False, seed=seed).to(D))


@pytest.fixture(scope="module")
def net() -> bt.BNet:
    return make_net(4)


def sharpen(net: bt.BNet) -> bt.BNet:
    """Return the net with logits scaled by 3, so that it prefers some words."""
    return net.replace({name: 3 * value for name, value in net.parameters.items() if "logits" in name})


def log_prob(net: bt.BNet, prompt: list[int], words: tuple[int, ...]) -> float:
    """Return the log probability of words after a prompt, by the reference: one TPM for each word."""
    s = net.sentence([*prompt, *words])
    positions = range(len(prompt) - 1, len(prompt) + len(words) - 1)
    return sum(float(s.tpm(f"y_{i}").log_prob(torch.tensor(w))) for i, w in zip(positions, words, strict=True))


def test_greedy_takes_the_likeliest_word_each_time(net):
    result = net.generate([1, 2], length=5)
    words: list[int] = []
    for _ in range(5):
        tpm = net.sentence([1, 2, *words]).tpm(f"y_{1 + len(words)}")
        words.append(int(tpm.logits.argmax()))
    assert result.ids == (tuple(words),)
    assert result.scores[0] == pytest.approx(log_prob(net, [1, 2], tuple(words)), abs=1e-9)


@pytest.mark.parametrize("seed", [3, 17, 23])
def test_as_many_beams_as_sentences_find_the_likeliest(seed):
    net = make_net(seed)
    log_probs = log_probs_of(net, list(itertools.product(range(5), repeat=4)))
    best = max(log_probs, key=log_probs.__getitem__)
    result = net.generate([1], method="beam", length=4, beams=5**3, penalty=0.0)
    assert result.ids == (best,) != net.generate([1], length=4).ids
    assert result.scores[0] == pytest.approx(log_prob(net, [1], best), abs=1e-9)


@pytest.mark.parametrize(("seed", "penalty"), [(3, 0.0), (17, 1.0), (23, 4.0), (31, 1.0)])
def test_beams_with_a_stop_word_find_the_best_by_length(seed, penalty):
    """All sentences of at most 4 words, ended by `e` or by the length, weighted as in Wu et al."""
    net, stop = make_net(seed), 4
    ended = [(*words, stop) for n in range(4) for words in itertools.product(range(4), repeat=n)]
    log_probs = log_probs_of(net, [*ended, *itertools.product(range(4), repeat=4)])
    best = max(log_probs, key=lambda words: log_probs[words] / ((5 + len(words)) / 6) ** penalty)
    result = net.generate([1], method="beam", length=4, beams=256, penalty=penalty, stop="e")
    assert result.ids == (tuple(word for word in best if word != stop),)
    assert result.scores[0] == pytest.approx(log_probs[best], abs=1e-9)


def log_probs_of(net: bt.BNet, sentences: list[tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """Return the log probability of words after the prompt [1], for all sentences at once."""
    padded = torch.tensor([[1, *words] + [0] * (4 - len(words)) for words in sentences])
    logits = net.module().eval()(padded).detach().log_softmax(-1)[:, :-1]
    word_log_probs = logits.gather(2, padded[:, 1:, None])[..., 0].tolist()
    return {words: sum(row[: len(words)]) for words, row in zip(sentences, word_log_probs, strict=True)}


def test_one_beam_is_greedy(net):
    prompts = [[1], [2, 3], [4, 4, 4]]
    assert net.generate(prompts, method="beam", beams=1, length=6).ids == net.generate(prompts, length=6).ids


@pytest.mark.parametrize("method", ["greedy", "beam"])
@pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
def test_a_ragged_batch_is_its_sentences(name, method):
    net = NETS[name]().to(D)
    prompts = [[1, 2, 3], [4], [5, 6, 0, 1, 2, 3]]
    options = {"method": method, "length": 6, "start": 1, "stop": 3}
    result = net.generate(prompts, **options)
    separate = [net.generate(prompt, **options) for prompt in prompts]
    assert result.ids == tuple(generated.ids[0] for generated in separate)
    assert result.scores == pytest.approx([generated.scores[0] for generated in separate], abs=1e-10)


def test_samples_follow_the_net(net):
    draws = net.generate([[1]] * 4000, method="sample", length=2, seed=7)
    first = net.sentence([1]).tpm("y_0").probs
    counts = torch.bincount(torch.tensor([row[0] for row in draws.ids]), minlength=5) / 4000
    torch.testing.assert_close(counts, first.float(), rtol=0, atol=4 * math.sqrt(0.25 / 4000))
    assert draws.ids == net.generate([[1]] * 4000, method="sample", length=2, seed=7).ids
    assert draws.ids != net.generate([[1]] * 4000, method="sample", length=2, seed=8).ids
    assert draws.scores[0] == pytest.approx(log_prob(net, [1], draws.ids[0]), abs=1e-9)


def test_what_sampling_leaves_out():
    log_probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(3000, 4)

    def get_frequencies(temperature: float, top_k: int | None, top_p: float | None) -> torch.Tensor:
        sample_word = create_sampler(temperature, top_k, top_p, torch.Generator().manual_seed(0))
        return torch.bincount(sample_word(log_probs), minlength=4) / 3000

    expected = {
        (1.0, None, None): [0.4, 0.3, 0.2, 0.1],
        (1.0, 2, None): [4 / 7, 3 / 7, 0, 0],
        (1.0, None, 0.6): [4 / 7, 3 / 7, 0, 0],
        (1.0, None, 0.35): [1, 0, 0, 0],
        (0.5, None, None): [16 / 30, 9 / 30, 4 / 30, 1 / 30],
        (1.0, 3, 0.5): [4 / 7, 3 / 7, 0, 0],
    }
    for options, probs in expected.items():
        frequencies = get_frequencies(*options)
        torch.testing.assert_close(frequencies, torch.tensor(probs, dtype=torch.float32), rtol=0, atol=0.04)
        assert bool((frequencies[torch.tensor(probs) == 0] == 0).all())


def test_the_whole_net_is_computed_once(net, monkeypatch):
    calls = []
    execute = CompiledModule.execute
    monkeypatch.setattr(CompiledModule, "execute", lambda self, request: calls.append(1) or execute(self, request))
    both = bt.encoder_decoder(8, heads=2, slices=1, vocabulary=5)
    assert len(both.generate([[1, 2], [3, 4]], start=0, length=6, method="beam").ids) == 2
    assert len(calls) == 1


def test_the_result_of_generate(net):
    result = net.generate(["a b", "c"], length=3, stop="e")
    assert result.texts == tuple(" ".join(words) for words in result.words) and len(result) == 2
    assert result.words == tuple(tuple("abcde"[k] for k in row) for row in result.ids)
    assert net.generate(torch.tensor([[0, 1]]), length=3, stop=4).ids == net.generate("a b", length=3, stop="e").ids
    assert list(result.to_dataframe().columns) == ["text", "words", "score"]
    odd = bt.decoder(8, heads=2, slices=1, vocabulary=["<b>", "&"]).generate("<b>", length=2)
    assert str(odd) == odd.texts[0]


def test_a_prompt_may_be_only_the_start_word(net):
    assert net.generate(start="b", length=3).ids == net.generate("b", length=3).ids


SELECT = {"vocabulary": list("abc"), "mask": "causal", "observe": Categorical(3)}
BAD = {
    "later words": (lambda: bt.encoder(8, heads=2, slices=1, vocabulary=5, readout="word"), [1], {}, "causal"),
    "no readout": (lambda: bt.decoder(8, heads=2, slices=1, vocabulary=5, readout=None), [1], {}, "observe="),
    "pooled": (
        lambda: bt.decoder(8, heads=2, slices=1, vocabulary=5, readout=Categorical(5), pool="last"),
        [1],
        {},
        "next word",
    ),
    "vectors": (lambda: bt.decoder(8, heads=2, slices=1, readout=Categorical(3)), [1], {}, "next word"),
    "a shared selector": (lambda: bt.bayesuvius(4, heads=2, per="corpus", **SELECT), "a", {}, "latent choices"),
    "stop": (lambda: bt.decoder(8, heads=2, slices=1, vocabulary=5), [1], {"stop": 9}, "ids from 0 to 4"),
    "no start": (lambda: bt.encoder_decoder(8, heads=2, slices=1, vocabulary=5), [1], {}, "start="),
    "no source": (lambda: bt.encoder_decoder(8, heads=2, slices=1, vocabulary=5), None, {"start": 1}, "same number"),
    "no prompt": (lambda: bt.decoder(8, heads=2, slices=1, vocabulary=5), None, {}, "start="),
    **{
        f"{name}={value}, {method}": (
            lambda: bt.decoder(8, heads=2, slices=1, vocabulary=5), [1], {"method": method, name: value}, name
        )
        for name, value, method in (
            ("length", 0, "greedy"),
            ("beams", 0, "beam"),
            ("penalty", -1.0, "beam"),
            ("temperature", 0.0, "sample"),
            ("top_k", 0, "sample"),
            ("top_p", 1.5, "sample"),
            ("seed", -1, "sample"),
            ("temperature", 0.7, "greedy"),
            ("top_k", 3, "greedy"),
            ("beams", 4, "greedy"),
        )
    },
    "method": (lambda: bt.decoder(8, heads=2, slices=1, vocabulary=5), [1], {"method": "best"}, "method"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    make, prompt, options, match = BAD[name]
    with pytest.raises(bt.BNetError, match=match):
        make().generate(prompt, **options)

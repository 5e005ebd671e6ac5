"""The lens: the readout of every state, and the affine maps that correct early states."""

import re
import sys

import pytest
import torch
from torch.distributions import Categorical

import bnet_transformer as bt
from bnet_transformer import tpm
from bnet_transformer.errors import format_count
from bnet_transformer.residual_stream import TunedLens
from bnet_transformer.residual_stream.lens import DivergenceFrom, entropy, find_lens_path
from tests.cases import CASES, close, get_case, jitter
from tests.test_plots import get_cells, get_ticks

WORDS = ["the", "cat", "sat"]


def find_latent(s):
    """A state of each latent choice of a sentence whose nodes are above others."""
    graph = s.state.network.graph
    names = [m.group for m in s.state.network.specs if m.tpm.kind == "discrete" and graph.out_edges[m.group.index]]
    return {s.ground.name(node): 0 for group in names for node in s.ground.select_nodes(group).tolist()}


def has_lens(case):
    """Whether the net has a discrete readout of a state."""
    try:
        find_lens_path(case.build().network)
    except bt.BNetError:
        return False
    return True


LENS_CASES = [case for case in CASES if has_lens(case)]


def words_of(s, name):
    """The names of all nodes of a group."""
    return [s.ground.name(node) for node in s.ground.select_nodes(s.state.network.graph.get_group(name)).tolist()]


@pytest.mark.parametrize("case", LENS_CASES, ids=lambda case: case.name)
def test_each_slice_is_the_readout_after_do(case):
    s = case.sentence
    s = s.do(find_latent(s))
    lens = s.lens(top=2)
    last, readouts = words_of(s, lens.states[-1]), words_of(s, lens.readout)
    end = Categorical(logits=torch.stack([s.tpm(name).logits for name in readouts]))
    assert lens.entropy.shape == lens.kl.shape == (len(lens.states), len(readouts)) and not lens.kl[-1].any()
    for t, state in enumerate(lens.states):
        mapped = s.do({node: s[source] for node, source in zip(last, words_of(s, state), strict=True)})
        expected = Categorical(logits=torch.stack([mapped.tpm(name).logits for name in readouts]))
        close(lens.distribution(t).probs, expected.probs)
        close(lens.entropy[t], expected.entropy())
        close(lens.kl[t], torch.distributions.kl_divergence(end, expected))
        probs, states = expected.probs.sort(-1, descending=True)
        close(lens.top_probabilities[t], probs[:, :2])
        close(lens.probability(0)[t], expected.probs[:, 0])
        assert lens.rank(int(states[0, 1]))[t, 0] == 2
    close(lens.distribution(len(lens.states) - 1).probs, end.probs)


@pytest.mark.parametrize(
    "case", [case for case in LENS_CASES if find_latent(case.sentence)], ids=lambda case: case.name
)
def test_a_lens_with_latent_choices_is_the_mean_over_their_posterior(case, tmp_path):
    s = case.sentence
    readout = words_of(s, s.do(find_latent(s)).lens().readout)[0]
    s = s.observe({readout: 0})  # the posterior differs from the prior
    lens = s.lens()
    weights = s.posterior(lens.averaged)
    for t in range(len(lens.states)):
        expected = 0.0
        for states in weights.nonzero().tolist():
            known, states = dict(zip(lens.averaged, states, strict=True)), tuple(states)
            expected = expected + weights[states] * s.do(known).lens().distribution(t).probs
        close(lens.distribution(t).probs, expected)
        close(lens.entropy[t], Categorical(probs=expected).entropy())
    last = s.lens().distribution(-1).probs
    for probs, name in zip(last[1:], words_of(s, lens.readout)[1:], strict=True):
        close(probs, s.posterior(name))
    lens.save(tmp_path / "lens.safetensors")
    close(bt.load(tmp_path / "lens.safetensors").distribution(0).probs, lens.distribution(0).probs)
    assert any(lens.averaged[0] in note for note in lens.notes)


@pytest.mark.parametrize(
    ("options", "count", "num_runs"),
    [({"per": "word"}, 9, 2), ({"per": "word", "slices": 2}, 4, 2**5), ({"attention": "marginal"}, 6, 12)],
    ids=["one choice", "choices of all words", "word and head"],
)
def test_choices_of_different_words_are_set_in_the_same_runs(options, count, num_runs):
    net = bt.bayesuvius(4, heads=2, vocabulary=["a", "b"], observe=tpm.Categorical(2), **options)
    net = jitter(net.to(torch.float64))
    s = net.sentence((["a", "b", "b", "a", "a"] * 2)[:count]).observe({"y_0": 0, "y_2": 1})
    lens = s.lens()
    for i in {*range(count)} - {0, 2}:
        close(lens.distribution(-1).probs[i], s.posterior(f"y_{i}"))
    assert len(lens.reader.runs.states) == num_runs  # the number of joint states of the choices of one word
    for i, t in {(1, 0), (1, -1), (3, len(lens.states) - 2), (3, -1)}:  # brute force over the choices of one word
        node = s.ground.parents(s.ground.id(f"y_{i}"))
        names = [s.ground.name(choice) for choice in s.state.evaluator.find_open_choices(node)]
        expected, weights = 0.0, s.posterior(names)
        remaining = {name: 0 for name in lens.averaged if name not in names}
        for states in weights.nonzero().tolist():
            known = remaining | dict(zip(names, states, strict=True))
            expected = expected + weights[tuple(states)] * s.do(known).lens().distribution(t).probs[i]
        close(lens.distribution(t).probs[i], expected)


def test_an_early_state_may_depend_on_choices_on_which_the_last_state_does_not_depend():
    """`x_(t+1)` of a word is a map of `x_t` of the word before: c_0_2 determines x_1_2, but no word of x_2."""
    nodes = [
        bt.Node("c", tpm.Categorical(2), plates=["word"]),
        bt.Node("W", tpm.Select((4, 4)), ["c"], plates=["word"]),
        bt.Node("x", tpm.Linear(), ["W", bt.Arrow("x", "before")], plates=["word"]),
    ]
    prologue = [bt.Node("token", tpm.Given(states=6), plates=["word"]), bt.Node("x", tpm.Embed(4), ["token"], ["word"])]
    stack = bt.Stack(nodes, prologue, [bt.Node("y", tpm.Categorical(3), ["x"], plates=["word"])], slices=2)
    s = jitter(bt.BNet(bt.Declaration([stack])).to(torch.float64)).sentence([1, 4, 2])
    lens, names = s.lens(), [f"c_{t}_{i}" for t in (0, 1) for i in range(3)]
    weights, expected = s.posterior(names), torch.zeros(3, 3, 3, dtype=torch.float64)
    for states in weights.nonzero().tolist():
        fixed = s.do(dict(zip(names, states, strict=True))).lens()
        expected += weights[tuple(states)] * torch.stack([fixed.distribution(t).probs for t in range(3)])
    close(torch.stack([lens.distribution(t).probs for t in range(3)]), expected)
    assert "c_0_2" in lens.averaged


def test_the_number_of_joint_states_is_short_in_messages():
    options = {"heads": 2, "per": "word", "slices": 2}
    s = bt.bayesuvius(4, vocabulary=["a", "b"], observe=tpm.Categorical(2), **options).sentence(["a"] * 300)
    assert format_count(2**300) == "about 10^90"
    for query in (s.lens, lambda: s["x_2_299"], lambda: s.observe(y_299=0).log_prob()):
        with pytest.raises(bt.BudgetError) as error:
            query()
        assert not re.search(r"\d{20}|(\d,\d{3},){5}", str(error.value))


def test_chunks_of_slices_and_of_rows_agree(monkeypatch):
    s = get_case("vanilla decoder, causal").sentence
    expected = s.lens()
    monkeypatch.setattr("bnet_transformer.residual_stream.lens.MAX_CHUNK_ENTRIES", 1)
    lens = s.lens()
    close(
        (lens.entropy, lens.kl, lens.probability("cat")), (expected.entropy, expected.kl, expected.probability("cat"))
    )


def test_interventions_and_evidence():
    s = get_case("vanilla decoder, causal").sentence
    changed = s.do(x_1_1=torch.ones(4)).lens()
    close(changed.kl[0] > 0, s.lens().kl[0] > 0)
    assert not torch.equal(changed.entropy[2, 1], s.lens().entropy[2, 1])
    close(s.observe(y_0="cat").lens().kl, s.lens().kl)  # evidence on a readout does not change states
    with pytest.raises(bt.BNetError, match="set by do"):
        s.do(y_1="cat").lens()


def test_a_state_of_probability_zero_adds_nothing():
    p, q = torch.tensor([0.0, 0.25, 0.75], dtype=torch.float64), torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    close(entropy(p.log()), Categorical(p).entropy())
    close(DivergenceFrom(p.log())(q.log()), torch.distributions.kl_divergence(Categorical(p[1:]), Categorical(q[1:])))
    assert DivergenceFrom(q.log())(torch.tensor([1.0, 0.0, 1.0]).log()) == torch.inf


def init_model(name):
    """A small random model of transformers."""
    from tests import huggingface_models as models

    options = {"LlamaForCausalLM": models.LLAMA, "GPT2LMHeadModel": models.GPT2}
    return models.init_model(name, options[name])


@pytest.mark.parametrize(
    ("name", "norm"), [("LlamaForCausalLM", "model.norm"), ("GPT2LMHeadModel", "transformer.ln_f")]
)
def test_equals_the_lens_of_transformers(name, norm):
    from tests.huggingface_models import use_float64

    model = init_model(name)
    ids = [3, 7, 1, 12, 5]
    lens = bt.from_pretrained(model).sentence(ids).lens()
    output = model(torch.tensor([ids]), output_hidden_states=True)
    # The last hidden state of transformers is after the norm.
    states = [*output.hidden_states[:-1]]
    with use_float64(sys.modules[type(model).__module__]):
        logits = [model.lm_head(model.get_submodule(norm)(h))[0] for h in states] + [output.logits[0]]
    expected = [Categorical(logits=row.detach()) for row in logits]
    assert lens.norm is not None and len(expected) == len(lens.states)
    for t, row in enumerate(expected):
        close(lens.distribution(t).probs, row.probs, 1e-9)
        close(lens.kl[t], torch.distributions.kl_divergence(expected[-1], row), 1e-9)


def test_zero_maps_are_the_logit_lens():
    net = get_case("vanilla decoder, causal").net
    tuned = bt.fit_lens(net, ["the cat", "sat the cat", "cat"], steps=0)
    assert not tuned.weights.any() and not tuned.biases.any()
    close(tuned.kl, tuned.plain_kl)
    s = net.sentence("sat the")
    lens = s.lens(tuned=tuned)
    close((lens.kl, lens.entropy), (s.lens().kl, s.lens().entropy))
    assert lens.is_tuned and not s.lens().is_tuned and lens.notes != s.lens().notes


def test_a_saved_lens_is_read_again_and_recognises_its_net(tmp_path):
    net = get_case("vanilla decoder, causal").net
    tuned = bt.fit_lens(net, ["the cat", "sat the cat", "cat"], steps=2)
    tuned.save(tmp_path / "lens.safetensors")
    loaded = TunedLens.load(tmp_path / "lens.safetensors")
    assert repr(loaded) == repr(tuned) and torch.equal(loaded.weights, tuned.weights)
    for converted in (net, net.to(torch.float32)):
        assert converted.sentence("sat the").lens(tuned=loaded).is_tuned
    net.save(tmp_path / "net.safetensors")
    with pytest.raises(bt.BNetError, match="tuned lens"):
        TunedLens.load(tmp_path / "net.safetensors")


def random_corpus(num_ids, count=48, length=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(num_ids, (length - k % 3,), generator=generator).tolist() for k in range(count)]


@pytest.mark.slow
def test_the_fit_lowers_the_held_out_divergence():
    net = bt.from_pretrained(init_model("GPT2LMHeadModel"))
    corpus = random_corpus(13)
    tuned = bt.fit_lens(net, corpus, steps=30, rate=0.05, seed=1)
    with torch.inference_mode():
        again = bt.fit_lens(net, corpus, steps=30, rate=0.05, seed=1)
    assert (tuned.plain_kl > 0).all() and (tuned.kl < 0.7 * tuned.plain_kl).all()
    assert torch.equal(tuned.weights, again.weights) and torch.equal(tuned.kl, again.kl)
    # The reported divergence is that of the lenses of the held-out sentences.
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1)).tolist()[:10]
    for lens, expected in ((tuned, tuned.kl), (None, tuned.plain_kl)):
        kl = torch.cat([net.sentence(corpus[k]).lens(tuned=lens).kl[:-1] for k in order], 1)
        close(kl.mean(1), expected, 1e-9)
    assert tuned.num_held_out_words == sum(len(corpus[k]) for k in order)


@pytest.mark.slow
def test_a_lens_finds_an_affine_scramble():
    """The readout of x_0 is that of an affine map of x_0: the fit removes all divergence."""
    torch.manual_seed(0)
    nodes = [bt.Node("x", tpm.Affine(4), ["x"], plates=["word"])]
    prologue = [bt.Node("token", tpm.Given(states=6), plates=["word"]), bt.Node("x", tpm.Embed(4), ["token"], ["word"])]
    stack = bt.Stack(nodes, prologue, [bt.Node("y", tpm.Categorical(5), ["x"], plates=["word"])], slices=2)
    net = bt.BNet(bt.Declaration([stack])).to(torch.float64)
    net = net.replace({name: torch.randn(value.shape, dtype=value.dtype) for name, value in net.parameters.items()})
    tuned = bt.fit_lens(net, random_corpus(6), steps=120, rate=0.1)
    assert (tuned.plain_kl > 0.05).all() and (tuned.kl < 0.01 * tuned.plain_kl).all()


@pytest.mark.parametrize("name", ["started", "vanilla encoder, class", "vanilla encoder-decoder, pre-norm"])
def test_fits_of_other_readouts(name):
    case = get_case(name)
    text = case.text if isinstance(case.text, dict) else "the cat sat"
    short = {"enc": "cat sat", "dec": "le"} if isinstance(text, dict) else "sat the"
    texts = [text, short] if name != "vanilla encoder-decoder, pre-norm" else [case.text, case.text]
    tuned = bt.fit_lens(case.net, texts, steps=2, batch=1)
    s = case.net.sentence(texts[0])
    assert s.lens(tuned=tuned).kl.isfinite().all()
    assert any("does not determine" in note for note in tuned.notes)


def test_invalid_input():
    net = get_case("vanilla decoder, causal").net
    lens, texts = net.sentence("the cat").lens(), ["the cat", "cat"]
    assert lens.top("x_2", -1) == lens.top(-1, 1) == lens.top(2, 1)
    assert torch.equal(lens.distribution("x_1").probs, lens.distribution(-2).probs)
    for state in ("x_3", -4, True, 9):
        with pytest.raises(bt.BNetError, match="slice"):
            lens.distribution(state)
    other = bt.fit_lens(bt.decoder(8, heads=2, slices=2, vocabulary=WORDS), texts, steps=0)
    same_shape = bt.fit_lens(jitter(net), texts, steps=0)
    chapter = {"dim": 4, "heads": 2, "slices": 2, "vocabulary": WORDS, "observe": tpm.Categorical(2)}
    for call, term in [
        (lambda: lens.probability("cta"), "near matches are cat"),
        (bt.bayesuvius(dim=4).sentence("the cat").lens, "lens"),
        (get_case("chapter, real").sentence.lens, "Normal"),
        (lambda: net.sentence("the cat").lens("x_1"), "readout"),
        *((lambda tuned=tuned: net.sentence("the cat").lens(tuned=tuned), "tuned") for tuned in (3, other, same_shape)),
        (lambda: bt.fit_lens(net, ["the cat"]), "sentences"),
        (lambda: bt.fit_lens(bt.bayesuvius(**chapter), texts), "combine='concat'"),
    ]:
        with pytest.raises(bt.BNetError, match=term):
            call()
    assert bt.fit_lens(bt.bayesuvius(**chapter, combine="concat"), texts, steps=0).num_words


def test_the_grid_has_the_most_probable_words_with_the_last_state_on_top():
    lens = get_case("vanilla decoder, causal").sentence.lens()
    figure = bt.plot(lens)
    ax = figure.axes[0]
    texts = [text.get_text() for text in ax.texts]
    assert texts == [lens.top(t, i)[0][0] for t in (2, 1, 0) for i in range(3)]
    close(torch.tensor(get_cells(figure)), lens.top_probabilities[..., 0].flip(0))
    assert get_ticks(ax, "y") == ["x_2", "x_1", "x_0"]
    close(torch.tensor(get_cells(bt.plot(lens, colour="kl", slices=[0, 1], words="cat"))), lens.kl[:2, 1:2].flip(0))
    (curve,) = bt.plot(lens, target="sat").axes[0].lines
    close(torch.tensor(curve.get_ydata()), lens.probability("sat")[:, -1])
    axes = bt.plot(lens, target="sat", show="rank", slices=["x_0", -1], words=0).axes[0]
    close(torch.tensor(axes.lines[0].get_ydata()), lens.rank("sat")[[0, 2], 0])
    assert axes.get_yscale() == "log" and axes.get_xlabel() == "state"


def test_the_curves_of_a_fit_are_drawn():
    tuned = bt.fit_lens(get_case("vanilla decoder, causal").net, ["the cat", "sat the cat"], steps=1)
    curves = bt.plot(tuned).axes[0].lines
    close(torch.tensor(curves[1].get_ydata()), tuned.kl)


def test_data_frame():
    s = get_case("vanilla decoder, causal").sentence
    lens = s.lens(top=1)
    frame = lens.to_dataframe()
    assert len(frame) == lens.kl.numel() and frame["top"][3] == lens.top(1, 0)[0][0]
    assert len(lens.top(0, 0, count=3)) == 3
    close(sum(prob for _, prob in lens.top(0, 0, count=99)), 1.0)

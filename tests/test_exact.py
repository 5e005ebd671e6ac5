"""Exact elimination: batches by hand, interacting choices of words, evidence, advice (cases: `test_equivalence`)."""

import itertools

import pytest
import torch
from pyro.infer import TraceEnum_ELBO

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.inference import Evidence, log_evidence, posterior
from bnet_transformer.tpm import Add, Categorical, Codebook, Concat, Given, Linear, Normal, Recur, Select
from tests.cases import close, every, get_case, jitter

D = torch.float64

pytestmark = pytest.mark.usefixtures("cached_runs")


def test_responsibilities_of_a_batch_by_hand():
    net = bt.bayesuvius(4, heads=3, slices=2, observe=Normal(0.5)).to(D)
    module = net.module()
    x, y = torch.randn(6, 5, 4, dtype=D), torch.randn(6, 5, 4, dtype=D)
    mean = module(x, want=["x_2"])["x_2"]
    log_p = torch.distributions.Normal(mean, net.parameters["y.log_sigma"].exp()).log_prob(y).sum((-1, -2))
    expected = torch.softmax(log_p + torch.log_softmax(net.parameters["c.logits"], 0)[:, None], 0).T
    actual = posterior(module, "c", {"y": Evidence(y)}, x)
    close(actual, expected)


def test_a_selector_of_the_corpus_sums_over_sentences_first():
    net = bt.bayesuvius(3, heads=2, per="corpus", observe=Normal(1.0)).to(D)
    module = net.module()
    x, y = torch.randn(4, 2, 3, dtype=D), torch.randn(4, 2, 3, dtype=D)
    mean = module(x, want=["x_1"])["x_1"]
    log_p = torch.distributions.Normal(mean, torch.ones((), dtype=D)).log_prob(y).sum((1, 2, 3))
    expected = torch.logsumexp(log_p + torch.log_softmax(net.parameters["c.logits"], 0), 0)
    close(log_evidence(module, {"y": Evidence(y)}, x), expected[None])


def test_above_the_budget_it_refuses_with_the_count():
    net = bt.bayesuvius(3, heads=2, atoms=50, observe=Categorical(2))
    with pytest.raises(bt.BudgetError, match="125,000"):
        log_evidence(net.module(), {"y": Evidence(torch.zeros(1, 2, dtype=torch.long))}, torch.zeros(1, 2, 3))


# elimination answers for a sentence, and for interacting words state by state


def recurrence(selector: bt.Node, weight: bt.Node) -> bt.BNet:
    """Words whose choices interact in a state that is passed from word to word."""
    step = [
        bt.Node("u", Linear(), [weight.role, "x"], plates=["word"]),
        bt.Node("h", Recur(3), ["u", bt.Arrow("h", "before")], plates=["word"], shape=(3,)),
        bt.Node("x", Add(), ["h"], plates=["word"]),
    ]
    x, y = bt.Node("x", Given(3), plates=["word"]), bt.Node("y", Categorical(3), ["x"], plates=["word"])
    stack = bt.Stack([selector, weight, *step], [x], [y])
    return jitter(bt.BNet(bt.Declaration([stack], name="recurrence")), 1.0).to(D)


def per_word_choices() -> bt.BNet:
    selector = bt.Node("c", Categorical(2), plates=["word"])
    return recurrence(selector, bt.Node("W", Select((3, 3)), ["c"], plates=["word"]))


def switching_recurrence() -> bt.BNet:
    """Each choice depends on the one before, and on the passed state before."""
    arrows = [bt.Arrow("z", "before"), bt.Arrow("h", "before")]
    selector = bt.Node("z", Categorical(2), arrows, plates=["word"])
    return recurrence(selector, bt.Node("W", Codebook(2, (3, 3)), ["z"], plates=["word"]))


def plate_choices() -> bt.BNet:
    """One readout of a sentence below a choice for each head."""
    heads, words = ["head"], ["word"]
    nodes = [
        bt.Node("A", Codebook(3, (3, 3)), ["c"], plates=heads),
        bt.Node("q", Linear(), ["A", "x"], plates=[*heads, *words]),
        bt.Node("m", Concat(mapped=False), ["q"], plates=words),
        bt.Node("x", Linear(3), ["m"], plates=words),
    ]
    label = bt.Node("y", Categorical(2, pool="mean"), [every("x")])
    stack = bt.Stack(nodes, [bt.Node("x", Given(3), plates=words)], [label])
    roots = [bt.Node("c", Categorical(2))]
    return jitter(bt.BNet(bt.Declaration([stack], roots, plates=[bt.Plate("head", 2)], name="plate"))).to(D)


@pytest.mark.parametrize(
    ("make", "do", "evidence"),
    [
        (per_word_choices, {}, {"y_1": 2}),
        (per_word_choices, {"c_0_1": 1}, {"y_0": 1, "y_2": 0}),
        (switching_recurrence, {"z_0_0": 1}, {"z_0_1": 0, "z_0_2": 0}),
        (switching_recurrence, {"W_0_1": 1}, {"y_2": 1}),
        (plate_choices, {}, {"y": 1}),
        (plate_choices, {"A_0_1": 2}, {"y": 0}),
    ],
)
def test_choices_that_interact_in_a_recurrence_or_below_a_plate(make, do, evidence, forbid_reference):
    s = make().sentence("the cat sat").do(do).observe(evidence)
    specs = s.net.network.specs
    nodes = [n for spec in specs if spec.tpm.kind == "discrete" for n in s.ground.select_nodes(spec.group).tolist()]
    nodes = [node for node in nodes if node not in s.state.evidence and node not in s.state.model.do]
    values = [s.ground.id(name) for name in ("x_1_0", "x_1_1")]
    total = reference.log_evidence(s.state.model, s.state.evidence)
    expected = [reference.posterior(s.state.model, node, s.state.evidence) for node in nodes]
    expected_values = [reference.values(s.state.model, node, s.state.evidence) for node in values]
    with forbid_reference():
        close(s.log_prob(), total)
        for node, probs in zip(nodes, expected, strict=True):
            close(s.posterior(s.ground.name(node)), probs, 1e-09)
    for node, value in zip(values, expected_values, strict=True):
        close(s[s.ground.name(node)], value)


@pytest.mark.parametrize("make", [per_word_choices, plate_choices])
def test_a_batch_refuses_interacting_choices(make):
    net = make()
    x, y = torch.zeros(2, 3, 3, dtype=D), torch.zeros((2, 3) if make is per_word_choices else 2, dtype=torch.long)
    with pytest.raises(bt.BNetError, match=r"cannot eliminate [cA]_0 exactly in a batch"):
        log_evidence(net.module(), {"y": Evidence(y)}, x)
    with pytest.raises(bt.BNetError):
        bt.fit(net, (x, y), method=bt.MAP(steps=1), progress=False)
    if make is per_word_choices:
        elbo = TraceEnum_ELBO(max_plate_nesting=net.pyro().max_plate_nesting)
        with pytest.raises(bt.BNetError, match="c_0"):
            elbo.loss(net.pyro(), lambda *_: None, x, y)


def test_a_real_parent_without_a_value_is_no_zero():
    nodes = [bt.Node("u", Normal(0.7), ["x"], plates=["word"]), bt.Node("x", Add(), ["x"], plates=["word"])]
    y = bt.Node("y", Categorical(3), [bt.Arrow("u", slice="last")], plates=["word"])
    stack = bt.Stack(nodes, [bt.Node("x", Given(3), plates=["word"])], [y])
    s = jitter(bt.BNet(bt.Declaration([stack], name="noisy"))).to(D).sentence("a b")
    for call in (lambda: s.posterior("y_0"), lambda: s.tpm("y_0"), lambda: s.log_prob({"y_0": 1})):
        with pytest.raises(bt.BNetError, match="u_0"):
            call()
    u = (1.0, 2.0, 3.0)
    done = s.do(u_0_0=u)
    expected = reference.posterior(done.state.model, s.ground.id("y_0"), {})
    close(done.posterior("y_0"), expected)
    close(s.observe(u_0_0=u).tpm("y_0").probs, expected)


def test_impossible_evidence_is_named_for_interacting_words():
    case = get_case("word, two slices")
    value = case.sentence.do(c_0=0, c_1=0)["x_2_1"]
    assert case.sentence.log_prob({"y_0": 1, "x_2_1": value}) < 0
    with pytest.raises(bt.EvidenceError, match=r"x_2_1: .*probability zero given the evidence before it"):
        case.sentence.log_prob({"y_0": 1, "x_2_1": value + 1, "y_1": 0})


@pytest.mark.parametrize("name, node, count", [("codebook", "c", 24), ("slice", "c_2", 8), ("codebook", "W_q_0", 24)])
def test_above_the_budget_the_error_has_the_count_and_a_method(name, node, count):
    case = get_case(name)
    for budget in (1, 7):
        with pytest.raises(bt.BudgetError, match=r"expected at most . joint states .*got \d+\. .*sample"):
            case.sentence.limits(budget=budget).posterior(node, case.evidence)
    assert case.sentence.limits(budget=count).posterior(node, case.evidence).sum() == pytest.approx(1)


def test_many_words_are_fast(forbid_reference):
    """There are 3^12 joint states, but each word depends on only three."""
    s = bt.bayesuvius(4, heads=3, per="word", observe=Categorical(3)).sentence(" ".join("abcdefghijkl"))
    with forbid_reference():
        assert s.limits(budget=9).posterior("c_0_3", {f"y_{i}": i % 3 for i in range(12)}).shape == (3,)


def test_evidence_on_what_is_given_is_checked():
    s = bt.bayesuvius(4, heads=2).sentence("a b")
    assert s.posterior("c", {"x_0_1": s["x_0_1"]}).tolist() == [0.5, 0.5]
    with pytest.raises(bt.EvidenceError, match=r"x_0_1: .*probability zero"):
        s.posterior("c", {"x_0_1": torch.zeros(4)})


# other oracles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, D], ids=str)
def test_a_net_recognises_its_own_values(dtype):
    """Rounding differs between queries and numbers of sentences, but only within the precision of the dtype."""
    for seed in range(5):
        module = bt.bayesuvius(16, heads=3, seed=seed).to(dtype).module()
        x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)
        value = module(x, want=["x_1", "q_0"])["x_1"][1].detach()
        assert posterior(module, "c", {"x_1": Evidence(value)}, x).argmax(-1).tolist() == [1] * 4


def test_dropout_is_a_delta_in_inference():
    net = bt.encoder(8, heads=2, slices=1, vocabulary=3, readout="word", dropout=0.5)
    module, ids = net.module().train(), torch.zeros(2, 3, dtype=torch.long)
    result = log_evidence(module, {"y": Evidence(ids)}, ids)
    torch.testing.assert_close(result, log_evidence(module.eval(), {"y": Evidence(ids)}, ids))


def test_advice_for_choices_on_plates_with_several_words_works():
    """Random experts of a sentence, each used by some words: a batch raises an error, a sentence sums."""
    word, expert = ["word"], ["expert"]
    nodes = [
        bt.Node("e", Categorical(2), plates=expert),
        bt.Node("V", Select(3), ["e"], expert),
        bt.Node("x", Add(), ["x", bt.Arrow("V", pick={"expert": "r"})], word),
    ]
    prologue = [bt.Node("x", Given(3), plates=word), bt.Node("r", Given(states=2), plates=word)]
    stack = bt.Stack(nodes, prologue, [bt.Node("y", Categorical(3), ["x"], word)])
    net = jitter(bt.BNet(bt.Declaration([stack], plates=[bt.Plate("expert", 2)]))).to(D)
    x, r, y = torch.randn(3, 3, dtype=D), torch.tensor([0, 1, 1]), [1, 2, 0]
    with pytest.raises(bt.UnsupportedError, match=r"net\.sentence"):
        posterior(net.module(), "e_0", {"y": Evidence(torch.tensor([y]))}, x[None], given={"r": r[None]})
    p = net.parameters
    log_probs = torch.zeros(2, 2, dtype=D)
    for e in itertools.product(range(2), repeat=2):
        value = p["V_0.values"]
        shifted = x + torch.stack([value[k, e[k]] for k in r.tolist()])
        rows = (shifted @ p["y.weight"].T + p["y.logits"]).log_softmax(-1)
        prior = p["e_0.logits"].log_softmax(-1)
        log_probs[e] = sum(prior[k, e[k]] for k in range(2)) + sum(rows[i, k] for i, k in enumerate(y))
    result = net.sentence(x=x, given={"r": r.tolist()}).posterior("e_0_0", {f"y_{i}": k for i, k in enumerate(y)})
    torch.testing.assert_close(result, log_probs.flatten().softmax(0).reshape(2, 2).sum(1))

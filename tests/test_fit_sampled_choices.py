"""Fits by SVI with choices="sampled": the joint density of choices and data equals enumeration."""

import itertools
import math

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.data import read_batch
from bnet_transformer.data.batch import infer_fit_task
from bnet_transformer.learning.fit.objective import FitObjective, select_learnable
from bnet_transformer.tpm import Categorical, Given
from tests import flat_options

WORD, SIDES = ["word"], ["side", "word"]
D = Categorical(2)


def choices_net(*choices: bt.Node, of: str = "c", seed: int = 0) -> bt.BNet:
    """Return a net with choices of words, and a readout that nearly determines one of them; x is given."""
    readout = bt.Node("y", Categorical(3), [of], plates=WORD)
    stack = bt.Stack(prologue=[bt.Node("x", Given(2), plates=WORD)], slice=list(choices), epilogue=[readout])
    net = bt.BNet(bt.Declaration([stack], plates=[bt.Plate("side", 3)], name="choices"), seed=seed).to(torch.float64)
    torch.manual_seed(seed)
    return net.replace({name: 1.5 * torch.randn_like(value) for name, value in net.parameters.items()})


def make_chain(*more: str, reach: str = "before") -> bt.Node:
    return bt.Node("c", D, [bt.Arrow("c", reach), *more], plates=WORD, shape=())


def make_pair(reach: str) -> tuple[bt.Node, bt.Node]:
    return bt.Node("b", D, plates=WORD), bt.Node("c", D, [bt.Arrow("b", reach)], plates=WORD)


# Each net, and by hand `log P(c_i)` of word i from the states of all choices, x and the parameters.
NETS = {
    "before": choices_net(make_chain()),
    "before and x": choices_net(make_chain("x")),
    "x": choices_net(bt.Node("c", D, ["x"], plates=WORD)),
    "x as logits": choices_net(bt.Node("c", Categorical(2, affine=False), ["x"], plates=WORD)),
    "same": choices_net(*make_pair("same")),
    "first": choices_net(*make_pair("first")),
    "last": choices_net(*make_pair("last")),
    "rest": choices_net(*make_pair("rest")),
}
LOGITS = {"b": "b_0.logits", "c": "c_0.logits"}


def parent_state(name: str, states: dict[str, list[int]], word: int, length: int) -> tuple[int, ...] | None:
    """The state of the discrete parent of c at a word, by hand; None where the reach finds no word."""
    if name.startswith("before"):
        return (states["c"][word - 1],) if word else None
    if name.startswith("x"):
        return ()
    if name == "rest" and not word:
        return None
    return (states["b"][{"same": word, "first": 0, "last": length - 1, "rest": word}[name]],)


def enumerate_log_prob(name: str, net: bt.BNet, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`log P(y | x)` of one sentence, by a sum over all states of all its choices."""
    store, length = net.parameters, len(y)
    roles = ["b", "c"] if "b_0.logits" in store else ["c"]
    readout, log_probs = store["y.logits"].log_softmax(-1), []
    for joint_states in itertools.product(range(2), repeat=len(roles) * length):
        states = {role: list(joint_states[k * length : (k + 1) * length]) for k, role in enumerate(roles)}
        total = torch.zeros((), dtype=torch.float64)
        for i in range(length):
            if "b" in states:
                total = total + store["b_0.logits"].log_softmax(-1)[states["b"][i]]
            parent = parent_state(name, states, i, length)
            table = store.get("c_0.logits", x)
            logits = store["c_0.initial"] if parent is None else table[parent] if table is not x else x[i]
            if "c_0.weight" in store:
                logits = logits + store["c_0.weight"] @ x[i]
            total = total + logits.log_softmax(-1)[states["c"][i]] + readout[states["c"][i], y[i]]
        log_probs.append(total)
    return torch.stack(log_probs).logsumexp(0)


def make_objective(net: bt.BNet) -> FitObjective:
    learned = select_learnable(net.network, infer_fit_task(net.network).readouts, None, None)
    return FitObjective(net.network, learned, 2**16)


def make_sentences(count: int, *lengths: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    return [(torch.randn(n, 2, dtype=torch.float64), torch.randint(3, (n,))) for n in lengths for _ in range(count)]


@pytest.mark.parametrize("name", NETS)
def test_the_joint_density_of_choices_and_data_sums_to_the_evidence(name):
    """Over all states of all choices, in sentences of several lengths."""
    net, data = NETS[name], make_sentences(1, 3, 2, 1)
    objective, corpus = make_objective(net), read_batch(net.network, data)
    groups, log_probs = [spec.group for spec in objective.network.choices], []
    for joint_states in itertools.product(range(2), repeat=3 * len(groups)):
        states = torch.tensor(joint_states).reshape(len(groups), 1, 3).expand(-1, 3, -1)
        states_by_name = {group.name: state for group, state in zip(groups, states, strict=True)}
        prior, likelihood = objective.log_joint(net.parameters, corpus, states_by_name)
        log_probs.append(prior + likelihood)
    result = torch.stack(log_probs).logsumexp(0)
    if corpus.mask is not None:  # the sum went over the states of absent words, which have no factor
        (present,) = corpus.mask.values()
        result = result - (~present).sum(1) * len(groups) * math.log(2)
    expected = torch.stack([enumerate_log_prob(name, net, x, y) for x, y in data])
    torch.testing.assert_close(result.detach(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["before and x", "rest"])
def test_the_bound_of_sampled_choices_is_below_the_evidence(name):
    """With fixed parameters: any guide of the choices gives a bound, and a fitted guide a tight one."""
    net, data = NETS[name], make_sentences(4, 3, 2)
    options = {"method": "svi", "choices": "sampled", "progress": False, "batch": len(data)}
    f = flat_options.fit(net, data, steps=120, rate=0.2, learn=["y.logits"], spread=1e-3, **options)
    fitted = net.replace(dict(f.net.parameters))
    expected = torch.stack([enumerate_log_prob(name, fitted, x, y) for x, y in data])
    gap = float(expected.mean()) - f.measured[-1][2]
    assert -0.1 < gap < 0.5


@pytest.mark.slow
def test_a_markov_table_is_found_again_from_its_chain():
    """Sentences of a simulated chain that changes its state with probability .95."""
    true = choices_net(make_chain())
    table = torch.tensor([[0.05, 0.95], [0.95, 0.05]], dtype=torch.float64)
    shown = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.1, 0.8]], dtype=torch.float64)
    torch.manual_seed(0)
    c = torch.zeros(80, 8, dtype=torch.long)
    for i in range(8):
        c[:, i] = torch.multinomial(table[c[:, i - 1]], 1)[:, 0] if i else torch.randint(2, (80,))
    y = torch.multinomial(shown[c].reshape(-1, 3), 1).reshape(80, 8)
    zeros = {"c_0.logits": torch.zeros(2, 2).double(), "c_0.initial": torch.zeros(2).double()}
    net = true.replace({"y.logits": shown.log(), **zeros})
    options = {"method": "svi", "choices": "sampled", "learn": ["c_0.logits"], "progress": False}
    f = flat_options.fit(net, (torch.zeros(80, 8, 2).double(), y), steps=250, rate=0.15, **options)
    torch.testing.assert_close(f.theta["c_0"], table, atol=0.08, rtol=0)


def test_a_choice_of_words_is_aligned_with_a_choice_on_plates_and_words():
    """As many sides as words: a state [word] and one [side, word] share only their last axis."""
    side = bt.Node("d", D, ["b"], plates=SIDES)
    read = bt.Node("c", D, [bt.Arrow("d", pick={"side": "e"})], plates=WORD)
    net = choices_net(bt.Node("b", D, plates=WORD), side, bt.Node("e", Categorical(3), plates=WORD), read)
    objective, corpus = make_objective(net), read_batch(net.network, make_sentences(1, 3))
    torch.manual_seed(1)
    store = {name: value.log_softmax(-1) for name, value in net.parameters.items()}
    sizes = {"b_0": (1, 3), "d_0": (1, 3, 3), "e_0": (1, 3), "c_0": (1, 3)}
    states = {name: torch.randint(3 if name == "e_0" else 2, size) for name, size in sizes.items()}
    prior, _ = objective.log_joint(net.parameters, corpus, states)
    b, d, e, c = (states[name][0] for name in sizes)
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(3):
        expected = expected + store["b_0.logits"][b[i]] + store["e_0.logits"][e[i]]
        for k in range(3):
            logits = store["d_0.logits"]
            expected = expected + (logits[k] if logits.dim() == 3 else logits)[b[i], d[k, i]]
        expected = expected + store["c_0.logits"][d[e[i], i], c[i]]
    assert float(prior) == pytest.approx(float(expected))


@pytest.mark.parametrize("name", ["x", "x as logits", "same", "rest"])
def test_independent_choices_are_summed_as_by_enumeration(name):
    net, data = NETS[name], make_sentences(1, 3, 2)
    result = make_objective(net).log_evidence(net.parameters, read_batch(net.network, data))
    expected = torch.stack([enumerate_log_prob(name, net, x, y) for x, y in data])
    torch.testing.assert_close(result.detach(), expected)

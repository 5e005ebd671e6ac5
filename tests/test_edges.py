"""Edges from writers to readers: exact runs and circuits by the reference, estimates by finite differences."""

import itertools
import math
import random

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.data.do_values import Zero
from bnet_transformer.interventions.edge_runs import build_edge_runner
from bnet_transformer.interventions.edges import EdgeStructure
from bnet_transformer.interventions.engine import SweepRun, run_cells
from bnet_transformer.interventions.sweep import parse_experiment
from tests.cases import CASES, close, get_case
from tests.edge_oracle import run_edge
from tests.sweep_oracle import get_outputs, make_metric, make_pair

RECURRENT = ("recurrent", "recurrent, rnn", "recurrent, lstm", "recurrences")
DISCRETE = ("factorial chains", "tagger", "sprinkler", "chest clinic", "sites", "hidden states")  # nets without edges
WITH_EDGES = [case for case in CASES if case.text is not None and case.name not in (*RECURRENT, *DISCRETE)]
QUICK = ("chapter, two slices", "encoder, pre-norm", "encoder, post-norm", "three stacks", "grouped", "encoder-decoder")
PARAMETERS = [pytest.param(case, marks=[pytest.mark.slow] * (case.name not in QUICK)) for case in WITH_EDGES]
SAMPLE = 4  # edges of each case that are compared with the oracle
EPSILON = 1e-5


def make_fixed_pair(case):
    """A clean and a corrupt sentence of a case with all latent choices set, and the outcomes."""
    clean, corrupt = make_pair(case)
    names, choices = get_outputs(corrupt), set()
    for s in (clean, corrupt):
        model = s.state.model
        choices |= set(reference.find_open_choices(model, range(len(model.ground)), {}, include_ancestors=True))
    choices -= {corrupt.ground.id(name) for name in names}
    states = {corrupt.ground.name(n): k % model.count_states(n) for k, n in enumerate(sorted(choices))}
    pair = (clean.do(states), corrupt.do(states)) if states else (clean, corrupt)
    return *pair, names


def make_experiment(clean, corrupt, metric, **options):
    defaults = {"over": None, "direction": "denoise", "words": None, "memory": 2**29}
    return parse_experiment(clean, corrupt, at="edges", metric=metric, **{**defaults, **options})


def choose(name, names):
    """Some edges of a case."""
    return random.Random(name).sample(list(names), min(SAMPLE, len(names)))


@pytest.mark.parametrize("case", PARAMETERS, ids=lambda case: case.name)
def test_an_edge_equals_two_runs_by_hand(case):
    """Run 1: the reader's value, with one writer of the other run. Run 2: the reader set to this value."""
    clean, corrupt, names = make_fixed_pair(case)
    metric, nodes = make_metric(names), [corrupt.ground.id(name) for name in names]
    result = bt.sweep(clean, corrupt, at="edges", metric=metric)
    by_word = bt.sweep(clean, corrupt, at="edges", metric=metric, over="word")
    structure = make_experiment(clean, corrupt, metric).cells.edges.structure
    for (edge,), _ in choose(case.name, result.names.items()):
        models = corrupt.state.model, clean.state.model
        expected = metric(*(value[None] for value in run_edge(*models, structure, edge, nodes)))
        close(result.outcomes[edge], expected)
        last = max(word for number, word in by_word.names if number == edge)
        expected = metric(*(value[None] for value in run_edge(*models, structure, edge, nodes, last)))
        close(by_word.outcomes[edge, last], expected)


@pytest.mark.parametrize("case", PARAMETERS, ids=lambda case: case.name)
def test_estimates_are_the_derivative_of_exact_edges(case, monkeypatch):
    """Finite differences along the difference of the writer; the words of a reader add up."""
    clean, corrupt, names = make_fixed_pair(case)
    metric = make_metric(names)
    estimates = bt.sweep(clean, corrupt, at="edges", metric=metric, method=bt.Gradient())
    by_word = bt.sweep(clean, corrupt, at="edges", metric=metric, method=bt.Gradient(), over="word")
    close(by_word.effects.nansum(-2), estimates.effects, 1e-9)
    compare_writer = SweepRun._compare_writer
    monkeypatch.setattr(SweepRun, "_compare_writer", lambda self, w: EPSILON * compare_writer(self, w))
    result = run_cells(make_experiment(clean, corrupt, metric), progress=None)
    close((result.values - result.base) / EPSILON, estimates.effects, 1e-3)


def check_circuits(clean, corrupt, metric):
    """Assert that circuits of all edges, of no edges, and without one edge are the runs of a sweep."""
    runner = build_edge_runner(clean, corrupt, metric)
    exact = bt.sweep(clean, corrupt, at="edges", metric=metric, direction="noise")
    close(runner.evaluate_clean(), exact.clean)
    close(runner.evaluate_corrupt(), exact.corrupt)
    close(runner.evaluate(~torch.eye(len(runner.edge_names), dtype=torch.bool)), exact.outcomes)


@pytest.mark.parametrize("case", PARAMETERS, ids=lambda case: case.name)
def test_circuits_without_one_edge_are_the_cells_of_a_sweep(case):
    clean, corrupt, names = make_fixed_pair(case)
    check_circuits(clean, corrupt, make_metric(names))


def test_a_readout_in_the_middle_of_the_net_is_seen_by_the_metric_only():
    clean, corrupt, _ = make_fixed_pair(get_case("encoder, pre-norm"))
    metrics = (lambda x_1_2, y_2: 0 * x_1_2[:, 0] + y_2[:, 0], lambda x_1_2, y_2: x_1_2[:, 0] + 0 * y_2[:, 0])
    later, middle = (bt.sweep(clean, corrupt, at="edges", metric=metric) for metric in metrics)
    assert later["embed -> x_1"] == 0 and middle["embed -> x_1"] != 0 and middle["embed -> y"] == 0
    single = bt.sweep(clean, corrupt, at="edges", metric=lambda y_2: y_2[:, 0])
    for name in single.names.values():
        close(later[name], single[name])


def test_interventions_in_circuits():
    """Nodes that both runs set equally are set in every circuit; other differences inside the net are errors."""
    clean, corrupt, names = make_fixed_pair(get_case("encoder, pre-norm"))
    metric, vector = make_metric(names), torch.arange(4, dtype=torch.float64)
    for setting in ({"x_1_1": vector}, {"a_0_1_1": vector[:2]}, {"W_o_1_0": torch.ones(4, 2, dtype=torch.float64)}):
        pair = clean.do(setting), corrupt.do(setting)
        check_circuits(*pair, metric)
        for differing in ((clean.do(setting), corrupt), (clean, corrupt.do(setting))):
            with pytest.raises(bt.UnsupportedError, match="equal in both runs"):
                build_edge_runner(*differing, metric)
    check_circuits(clean.do(embed_1=vector), corrupt, metric)
    with pytest.raises(bt.BNetError, match="embed_1"):
        build_edge_runner(clean, corrupt, lambda embed_1, y_2: embed_1[:, 0] + y_2[:, 0])


@pytest.mark.slow
def test_gates_have_the_gradient_of_circuits():
    clean, corrupt, names = make_fixed_pair(get_case("encoder, pre-norm"))
    runner = build_edge_runner(clean, corrupt, make_metric(names))
    gates = torch.full((len(runner.edge_names),), 0.6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(runner.evaluate_with_grad, (gates,))


@pytest.mark.slow
def test_outcomes_are_averaged_over_choices():
    """`P(y)` is the mean of `P(y)` in each joint state of the latent choices, which are the same in both runs."""
    clean, corrupt = make_pair(get_case("slice"))
    name = get_outputs(corrupt)[-1]
    metric = {name: 0}
    choices = [node for node in corrupt.ground.names if node.split("_")[0] == "c"]
    result = bt.sweep(clean, corrupt, at="edges", metric=metric, direction="noise")
    total = torch.zeros_like(result.outcomes)
    for states in itertools.product(*(range(len(corrupt.posterior(c))) for c in choices)):
        setting = dict(zip(choices, states, strict=True))
        weight = math.prod(float(corrupt.posterior(c)[state]) for c, state in setting.items())
        fixed = bt.sweep(clean.do(setting), corrupt.do(setting), at="edges", metric=metric, direction="noise")
        total += weight * fixed.outcomes.exp()
    close(result.outcomes, total.log())


def test_edges_are_pruned_where_the_subspaces_do_not_meet():
    """Each head writes to entries of the state that some readers do not read; no other edge is pruned."""
    word, heads = ["word"], ["head", "word"]
    tpm = bt.tpm
    nodes = [
        *(bt.Node(f"W_{r}", tpm.Weight((2, 4)), plates=["head"]) for r in "qkv"),
        *(bt.Node(r, tpm.Linear(), [f"W_{r}", "x"], plates=heads) for r in "qkv"),
        bt.Node("a", tpm.Attention(), ["q", bt.Arrow("k", "every"), bt.Arrow("v", "every")], plates=heads),
        bt.Node("W_o", tpm.Weight((4, 2)), plates=["head"]),
        bt.Node("x", tpm.Concat(residual=True), ["W_o", "a", "x"], plates=word),
    ]
    stack = bt.Stack(
        nodes, [bt.Node("x", tpm.Given(4), plates=word)], [bt.Node("y", tpm.Normal(1.0), ["x"], word)], slices=2
    )
    net = bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 2)])).to(torch.float64)
    parameters = {name: value.clone() for name, value in net.parameters.items()}
    parameters["W_o_0.value"][0, 2:], parameters["W_o_0.value"][1, :2] = 0, 0  # head 0 writes 0 and 1, head 1 2 and 3
    parameters["W_q_1.value"][0, :, 2:], parameters["W_k_1.value"][1, :, :2] = 0, 0  # entries that are not read
    net = net.replace(parameters)
    runner = build_edge_runner(net.sentence("a b c"), net.sentence("d e f"), lambda y_2: y_2[:, 0])
    blocked = {name for name, flag in zip(runner.edge_names, runner.blocked, strict=True) if flag}
    assert blocked == {"a_0_1 -> q_1_0", "a_0_0 -> k_1_1"}
    result = bt.sweep(net.sentence("a b c"), net.sentence("d e f"), at="edges", metric=lambda y_2: y_2[:, 0])
    assert all(result[name] == 0 for name in blocked)
    clean, corrupt, names = make_fixed_pair(get_case("encoder, pre-norm"))  # nothing is proven behind a norm
    assert not build_edge_runner(clean, corrupt, make_metric(names)).blocked.any()


# the public face


def test_table_of_edges():
    net = get_case("grouped").net
    frame = net.edges()
    assert list(frame.columns[:4]) == ["edge", "writer", "reader", "channel"]
    assert set(frame["channel"]) == {"q", "k", "v", "readout"}
    row = frame.set_index("edge").loc["a_0_1_2 -> k_1_0"]
    assert (row.writer, row.reader, row.channel) == ("a_0_1_2", "k_1_0", "k")
    structure = EdgeStructure.of_network(net.network)
    assert tuple(frame["edge"]) == structure.edges.names


def test_heads_of_a_separate_stream_have_edges_to_themselves_only():
    """A plate that no node on the way joins is not crossed."""
    word = ["word"]
    nodes = [
        bt.Node("x", bt.tpm.Given(2), plates=word),
        bt.Node("e", bt.tpm.Linear(3), ["x"], plates=["head", "word"]),
        bt.Node("s", bt.tpm.Activation("relu"), ["e"], plates=["head", "word"]),
        bt.Node("t", bt.tpm.Activation("relu"), ["s"], plates=["head", "word"]),
        bt.Node("y", bt.tpm.Concat(mapped=False), ["t"], plates=word),
    ]
    net = bt.BNet(bt.Declaration([bt.Stack([], nodes[:1], nodes[1:], slices=0)], plates=[bt.Plate("head", 2)]))
    pairs = set(zip(*(net.edges()[end] for end in ("writer", "reader")), strict=True))
    assert {("s_0", "t_0"), ("s_1", "t_1")} <= pairs and ("s_0", "t_1") not in pairs


def test_edges_beside_roles_and_arrows():
    clean, corrupt, names = make_fixed_pair(get_case("encoder, pre-norm"))
    metric = make_metric(names)
    result = bt.sweep(clean, corrupt, at=["edges", "v -> a", "q"], metric=metric)
    for item in ("edges", "v -> a", "q"):
        single = bt.sweep(clean, corrupt, at=item, metric=metric)
        close(result.part(item).outcomes.nan_to_num(), single.outcomes.nan_to_num())


def test_names_and_patterns_of_edges():
    """A star is one index; roles with one node are also ends of edges."""
    clean, corrupt, names = make_fixed_pair(get_case("encoder, pre-norm"))
    metric = make_metric(names)
    full = bt.sweep(clean, corrupt, at="edges", metric=metric)
    for at, count in (("embed -> y", 1), ("a_0_1->q_1_0", 1), (["a_0_* -> y"], 2), (["a_0_* -> q_1_*", "edges"], 46)):
        result = bt.sweep(clean, corrupt, at=at, metric=metric)
        assert len(result.names) == count
        for index, name in result.names.items():
            close(result.outcomes[index], full.outcomes[full.index_of(name)])
    for options in (
        {"method": bt.Gradient()},
        {"method": bt.Gradient(), "over": "word"},
        {"method": bt.Gradient(steps=2)},
    ):
        full = bt.sweep(clean, corrupt, at="edges", metric=metric, **options)
        for name in ("embed -> q_1_0", "a_0_1 -> y", "ffn_0 -> ffn_1"):
            single = bt.sweep(clean, corrupt, at=name, metric=metric, **options)
            for index, cell in single.names.items():
                close(single.outcomes[index], full.outcomes[full.index_of(cell)])


def test_an_ablation_of_an_edge():
    _, corrupt, names = make_fixed_pair(get_case("encoder, pre-norm"))
    metric = make_metric(names)
    result = bt.sweep(Zero(), corrupt, at="edges", metric=metric)
    zero = corrupt.do({"a_1_*_*": Zero()})  # the heads of the last slice reach the readout and the last step
    both = bt.sweep(zero, corrupt, at=["a_1_0 -> y"], metric=metric)
    close(result["a_1_0 -> y"], both["a_1_0 -> y"])


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_nets_are_errors(name):
    clean, corrupt = make_pair(get_case(name))
    with pytest.raises(bt.BNetError, match="recurrent"):
        bt.sweep(clean, corrupt, at="edges", metric=make_metric(get_outputs(corrupt)))


def test_bad_input():
    clean, corrupt, names = make_fixed_pair(get_case("encoder, pre-norm"))
    for first, options, term in [
        (clean, {"at": ["a_0_1 -> q_0_1"]}, "a_0_1 -> q_1_1"),  # a near name
        (corrupt, {"at": "edges"}, "differ"),
        (clean, {"at": "x", "method": bt.Gradient(steps=2, rule="activations")}, "rule"),
    ]:
        with pytest.raises(bt.BNetError, match=term):
            bt.sweep(first, corrupt, metric=make_metric(names), **options)

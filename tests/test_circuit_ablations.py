"""Circuits whose left-out arrows, edges or nodes transmit an ablation: node by node by the reference, and by sweeps."""

import random
import re
from dataclasses import replace

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.interventions import Attend, Mean, Noise, Project, Scale, Set, Shift, Swap, Zero
from bnet_transformer.interventions.acdc import CircuitPairs
from bnet_transformer.interventions.circuit import FaithfulnessWarning
from tests.cases import close, get_case
from tests.edge_oracle import CircuitRun, get_outcome
from tests.sweep_oracle import AblatedValues, get_refusal, make_metric
from tests.test_circuits import SHOWN, examples
from tests.test_edges import QUICK as QUICK_EDGES, WITH_EDGES, make_fixed_pair
from tests.test_sweeps_lengths import build_pairs

# Node groups without words have no mean over words.
ABLATIONS = {
    "zero": lambda clean, corrupt: Zero(),
    "mean of sentences": lambda clean, corrupt: Mean([*clean, *corrupt]),
    "mean over words": lambda clean, corrupt: Mean(),
    "noise": lambda clean, corrupt: Noise(0.3, seed=4),
    "function": lambda clean, corrupt: lambda value: value.tanh() + 0.1,
    "scale": lambda clean, corrupt: Scale(-0.5),
    "project": lambda clean, corrupt: Project([0]),
    "set": lambda clean, corrupt: Set(0.3, [0]),
    "swap": lambda clean, corrupt: Swap(corrupt, [0]),
    "other sentence": lambda clean, corrupt: corrupt,
}
QUICK = ("chapter, two slices", "concat", "three stacks", "vanilla decoder, learned")


def list_cases(names, quick):
    """Each case with other sentences and with two of the ablations, so that each ablation has some cases."""
    *kinds, pair = ABLATIONS
    return [
        pytest.param(name, kind, marks=[pytest.mark.slow] * (name not in quick or k == 2))
        for n, name in enumerate(names)
        for k, kind in enumerate((pair, kinds[2 * n % len(kinds)], kinds[(2 * n + 1) % len(kinds)]))
    ]


class CircuitOfArrows(reference.ReferenceRun):
    """The run of a circuit: along a removed arrow a node receives `left_out.value(parent)`."""

    def __init__(self, model, removed):
        super().__init__(model, {})
        self.removed, self.left_out = removed, None

    def value(self, node):
        if node not in self.values:
            self.values[node] = self.read(node, lambda run: run._compute_value(node))
        return self.values[node]

    def read(self, node, compute):
        run = reference.ReferenceRun(self.model, {})
        for parent in reference.parents(self.model, node):
            run.values[parent] = (self.left_out if (parent, node) in self.removed else self).value(parent)
        return compute(run)

    def get_outcomes(self, nodes):
        specs = {node: reference.locate_node(self.model, node)[0] for node in nodes}
        is_open = {node: spec.tpm.is_random and node not in self.model.do for node, spec in specs.items()}
        return [
            self.read(n, lambda run, n=n: get_outcome(run.distribution(n))) if is_open[n] else self.value(n)
            for n in nodes
        ]


def build_runs(clean, kind, metric, at, over=None):
    """The runs; None if the intervention has no meaning for a node of the net."""
    try:
        runs = CircuitPairs.parse(clean, kind, metric, at, over, None, 2**29).build_runs()
        runs.evaluate(torch.zeros(1, len(runs.edge_names), dtype=torch.bool))
    except bt.EvidenceError as error:
        assert "has no words" in str(error) or "words" in str(error)
        return None
    return runs


def draw_masks(count, shares=(0.5, 0.9)):
    generator = random.Random(count)
    masks = [[generator.random() < share for _ in range(count)] for share in shares]
    return [*masks, [True] * count, [False] * count]


def compare_with_reference(runs, masks, clean, corrupt, nodes, ablation=None):
    """Compare circuits of arrows or of nodes with runs of the reference, node by node."""
    metric, ground = make_metric([clean[0].ground.name(node) for node in nodes]), clean[0].ground
    for mask, actual in zip(masks, runs.evaluate(torch.tensor(masks)), strict=True):
        removed = set()
        for edge, is_retained in zip(runs.edge_names, mask, strict=True):
            source, *targets = map(ground.id, edge.split(" -> "))
            removed |= set() if is_retained else {(source, t) for t in targets or ground.children(source)}
        outcomes = []
        for s, other in zip(clean, corrupt, strict=True):
            corrupt_run = reference.ReferenceRun(other.state.model, {})
            run = CircuitOfArrows(s.state.model, removed)
            run.left_out = corrupt_run if ablation is None else AblatedValues(run, ablation, corrupt_run)
            outcomes.append(run.get_outcomes(nodes))
        close(actual, metric(*(torch.stack(values) for values in zip(*outcomes, strict=True))))


@pytest.mark.parametrize("at", ["arrows", "nodes"])
@pytest.mark.parametrize(("name", "kind"), list_cases(SHOWN, QUICK))
def test_circuits_of_arrows_and_nodes_equal_runs_node_by_node(name, kind, at):
    clean, corrupt, nodes = examples(name)
    ablation = ABLATIONS[kind](clean, corrupt)
    runs = build_runs(clean, ablation, make_metric([clean[0].ground.name(node) for node in nodes]), at)
    if runs is None:
        pytest.skip("a node without words")
    masks, is_pair = draw_masks(len(runs.edge_names)), kind == "other sentence"
    compare_with_reference(runs, masks, clean, corrupt, nodes, None if is_pair else ablation)
    for actual, value in ((runs.evaluate_clean(), True), (runs.evaluate_corrupt(), False)):
        close(actual, runs.evaluate(torch.full((1, len(runs.edge_names)), value))[0])
    if is_pair:
        compare_with_reference(runs.swap(), masks, corrupt, clean, nodes)
        close(replace(runs, memory=1).evaluate(torch.tensor(masks)), runs.evaluate(torch.tensor(masks)))


ROWS = Attend([0.2, 0.5, 0.3]), Attend([0.6, 0.1, 0.3])


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"x_1_1": Zero()}, {"x_1_1": Zero()}),
        ({"x_1_1": Zero()}, {}),
        ({}, {"q_1_2": Zero(), "x_1_0": Zero()}),
        ({"c": 1}, {"c": 0}),
        ({"x_1_2": ROWS[0]}, {"x_1_2": ROWS[1]}),
        ({"x_2_2": ROWS[0]}, {"x_2_2": ROWS[0]}),
    ],
)
def test_nodes_and_rows_that_one_or_both_runs_set(one, two):
    clean, corrupt, nodes = examples("chapter, two slices")
    clean, corrupt = [clean[0].do(one)], [corrupt[0].do(two)]
    runs = build_runs(clean, corrupt, make_metric([clean[0].ground.name(node) for node in nodes]), "arrows")
    compare_with_reference(runs, draw_masks(len(runs.edge_names)), clean, corrupt, nodes)


@pytest.mark.parametrize(("name", "kind"), list_cases([case.name for case in WITH_EDGES], QUICK_EDGES))
def test_circuits_of_edges_equal_runs_node_by_node(name, kind):
    clean, corrupt, names = make_fixed_pair(get_case(name))
    metric, nodes = make_metric(names), [clean.ground.id(name) for name in names]
    ablation = ABLATIONS[kind]([clean], [corrupt])
    try:
        runs = build_runs(clean, ablation, metric, "edges")
    except bt.UnsupportedError as error:
        assert "a part of" in str(error)
        return
    if runs is None:
        pytest.skip("a node without words")
    masks = draw_masks(len(runs.edge_names))
    is_pair = kind == "other sentence"
    for mask, actual in zip(masks, runs.evaluate(torch.tensor(masks)), strict=True):
        models, ablated = (clean.state.model, corrupt.state.model), None if is_pair else ablation
        run = CircuitRun(*models, runs.structure, mask, ablated)
        close(actual, metric(*(value[None] for value in run.get_outcomes(nodes))))


@pytest.mark.parametrize("kind", ["zero", "mean over words", "function", "swap"])
def test_a_circuit_of_all_nodes_but_one_is_a_cell_of_a_sweep(kind):
    clean, corrupt, nodes = examples("concat")
    ablation, metric = ABLATIONS[kind](clean, corrupt), make_metric([clean[0].ground.name(node) for node in nodes])
    for over in (("slice", "head"), ("slice", "word"), None):
        runs = CircuitPairs.parse(clean, ablation, metric, "nodes", over, None, 2**29).build_runs()
        for role in ("a", "v"):
            swept = bt.sweep(clean, ablation, at=role, over=over, metric=metric, direction="noise")
            for name in swept.names.values():
                mask = torch.tensor([[unit != name for unit in runs.edge_names]])
                close(runs.evaluate(mask)[0], swept.outcomes[swept.index_of(name)])


def make_sentences():
    words = ["the", "cat", "dog", "sat", "ran", "on", "a", "mat"]
    net = bt.decoder(8, heads=2, slices=2, hidden=8, vocabulary=words, seed=0).to(torch.float64)
    cleans = [net.sentence(text) for text in ("the cat sat on", "a dog ran on", "the mat sat on")]
    return net, cleans, {"metric": {"y_3": ("cat", "dog")}, "over": ("slice", "head")}


@pytest.mark.slow
def test_a_circuit_of_nodes_has_nodes_arrows_and_a_figure(tmp_path):
    _, cleans, options = make_sentences()
    result = bt.circuit(cleans, Zero(), at="nodes", threshold="4%", **options)
    assert 0 < result.edges < result.candidates and result.kind == "nodes" and result.over == ("nodes", "slice", "head")
    assert set(result.edge_of.values()) - {None} <= set(result.retained)
    ground, retained = cleans[0].ground, set(result.retained)
    for arrow, unit in result.edge_of.items():  # an arrow belongs to the unit of its source
        source = ground.id(arrow.split(" -> ")[0])
        if unit is None:
            assert cleans[0].state.model.spec(source).tpm.kind != "deterministic" or arrow.startswith("token")
        else:
            assert unit in retained
    assert result.nodes["embed_1"]["part"] == "differs" and result.nodes["y_3"]["part"] == "outcome"
    assert {box.name for box in cleans[0].picture(highlight=result).boxes if not box.is_faded} == set(result.nodes)
    again = bt.circuit(cleans, Zero(), at="nodes", edges=result.retained, **options)
    close(again.outcome, result.outcome)
    assert (result | again).retained == result.retained and f"{result.edges} of {result.candidates} nodes" in repr(
        result
    )
    result.save(tmp_path / "circuit.safetensors")
    loaded = bt.load(tmp_path / "circuit.safetensors")
    close(loaded.run(cleans, Zero()).outcome, result.outcome)
    close((loaded | loaded).outcome, result.outcome)


@pytest.mark.parametrize("kind", ["zero", "mean over words", "noise", "function", "swap", "other sentence"])
def test_saved_circuits_evaluate_their_ablation_or_report_that_the_file_lacks_it(kind, tmp_path):
    net, cleans, options = make_sentences()
    ablation = ABLATIONS[kind](cleans, [net.sentence("a mat ran the")] * 3)
    bt.circuit(cleans, ablation, edges="a_* -> *", **options).save(tmp_path / "circuit.safetensors")
    loaded = bt.load(tmp_path / "circuit.safetensors")
    if kind in ("mean over words", "function", "swap"):
        with pytest.raises(bt.BNetError, match="a file does not contain"):
            loaded | loaded
    else:
        close((loaded | loaded).outcome, loaded.outcome)
    close(loaded.run(cleans, ablation).outcome, loaded.outcome)


@pytest.mark.parametrize("at", ["arrows", "edges", "nodes"])
def test_curves_of_ablations_end_at_the_net_and_start_at_the_empty_circuit(at):
    net, cleans, options = make_sentences()
    options |= {"at": at, "over": None if at == "edges" else options["over"]}
    donors = Mean([net.sentence(text) for text in ("a cat ran the", "dog dog mat on")])
    scores = {"search": bt.circuit(cleans[:1], donors, **options)}
    if at != "arrows":
        cells = {**options, "at": "a" if at == "nodes" else at}
        scores["sweep"] = bt.sweep(cleans, donors, direction="noise", **cells)
    curves = bt.faithfulness_curves(
        cleans, donors, scores=scores, shares=(0.3, 0.6, 1), readout="y_3", baselines=(), **options
    )
    close(curves.outcomes["search"][0, -1], curves.clean)
    close(curves.empty, bt.circuit(cleans, donors, edges=[], **options).outcome)
    assert curves.kl is not None and curves.kl["search"][-1] == pytest.approx(0, abs=1e-12)
    assert f"{curves.edges} {'nodes' if at == 'nodes' else 'edges'}" in curves.caption


def test_shifts_change_candidates_of_their_shape():
    _, cleans, options = make_sentences()
    vector = torch.linspace(-1, 1, 4, dtype=torch.float64)
    chosen = {**options, "at": "nodes", "candidates": "a"}
    result = bt.circuit(cleans, Shift(vector), edges=["a_0_0_*", "a_0_1_*", "a_1_0_*"], **chosen)
    expected = bt.circuit(cleans, lambda value: value + vector, edges=["a_0_0_*", "a_0_1_*", "a_1_0_*"], **chosen)
    close(result.outcome, expected.outcome)
    shifted = [s.do({"a_1_1_*": Shift(vector)}) for s in cleans]
    close(result.outcome, bt.circuit(shifted, cleans, edges=[], **options).clean)
    with pytest.raises(bt.EvidenceError, match="a shift of shape"):
        bt.circuit(cleans, Shift(vector), **options)


def test_the_default_threshold_is_a_share_of_the_total_effect():
    _, cleans, options = make_sentences()
    result = bt.circuit(cleans, Zero(), **options)
    assert result.threshold == pytest.approx(0.01 * float((result.clean - result.corrupt).abs().mean()))
    assert "0.01 of the total effect" in result.caption


def test_candidates_that_change_nothing_are_named():
    net, _, options = make_sentences()
    parameters = {name: value.clone() for name, value in net.parameters.items()}
    parameters["W_v_1.value"][1] = 0.0
    silent = net.replace(parameters).sentence("the cat sat on")
    for at in ("arrows", "nodes", "edges"):
        chosen = {**options, "at": at, "over": None if at == "edges" else options["over"]}
        (note,) = bt.circuit(silent, Zero(), edges="a_1_1" if at == "nodes" else "a_1_1 -> *", **chosen).notes
        assert "a_1_1" in note and "a_1_0" not in note
    other = silent.net.sentence("the dog sat on")
    (note, *_) = bt.circuit(silent, other, candidates=["v -> a", "W_q -> q"], **options).notes
    assert "W_q -> q" in note and "v -> a" not in note
    for identity in (lambda value: value, Shift(torch.zeros(4))):
        with pytest.warns(FaithfulnessWarning):
            result = bt.circuit(silent, identity, candidates="a", at="nodes", edges=["a_0_*"], **options)
        assert "4 nodes change nothing" in result.notes[0]


def test_ablations_without_a_meaning_are_refused():
    net, cleans, options = make_sentences()
    residual = bt.bayesuvius(dim=4, heads=1, residual=True).sentence("the cat sat")
    for sides, chosen, message in [
        ((cleans, Zero()), {"direction": "denoise"}, "direction: .*no corrupt run"),
        ((cleans, Zero()), {"candidates": "token -> embed"}, "token, which has states"),
        ((cleans, Zero()), {"at": "nodes", "candidates": "v -> a"}, "role of candidates"),
        ((Zero(), cleans), {}, "clean: .*sentences"),
        ((cleans, Attend([1.0])), {}, "corrupt: .*a function"),
        ((cleans, Mean([net.sentence("the cat")])), {}, "of 2 words"),
        ((residual, Zero()), {"at": "edges", "over": None, "metric": lambda y_2: y_2[:, 0]}, "."),
    ]:
        assert re.search(message, get_refusal(bt.circuit, *sides, **{**options, **chosen})), message


@pytest.mark.filterwarnings("ignore::bnet_transformer.interventions.circuit.FaithfulnessWarning")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("zero", {"at": "edges"}),
        pytest.param("mean over words", {"at": "nodes", "over": ("slice",)}, marks=pytest.mark.slow),
        pytest.param("other sentence", {"over": ("slice", "head")}, marks=pytest.mark.slow),
    ],
)
def test_examples_of_unequal_lengths_have_the_circuits_of_single_pairs(kind, options, tmp_path):
    clean, corrupt = build_pairs()
    ablation, metric = ABLATIONS[kind](clean, corrupt), {"y_-1": ("cat", "dog")}
    result = bt.circuit(clean, ablation, metric=metric, threshold="10%", held_out=0.25, **options)
    given = bt.circuit(clean, ablation, metric=metric, edges=result.retained, **options)
    for k, s in enumerate(clean):
        peer = corrupt[k] if kind == "other sentence" else ablation
        single = bt.circuit(s, peer, metric=metric, edges=result.retained, **options)
        for name in ("outcome", "clean", "corrupt"):
            close(getattr(given, name)[k], getattr(single, name)[0])
    in_sample = [k for k in range(4) if k not in result.pairs.held_out]
    close(result.outcome, given.outcome[in_sample])
    search = {**options, "metric": metric, "threshold": result.threshold}
    chosen = [ABLATIONS[kind]([clean[k] for k in in_sample], [corrupt[k] for k in in_sample])]
    assert bt.circuit([clean[k] for k in in_sample], *chosen, **search).retained == result.retained
    result.save(tmp_path / "circuit.safetensors")
    loaded = bt.load(tmp_path / "circuit.safetensors")
    close(loaded.run(clean, ablation).outcome, given.outcome)
    curves = bt.faithfulness_curves(
        clean, ablation, metric=metric, scores=result, shares=(0.5, 1), readout="y_-1", baselines=(), **options
    )
    close(curves.outcomes["scores"][0, -1], given.clean)
    assert curves.digests == given.pairs.digests and len(curves.digests) == 4
    for name, wrong in [("over", {"over": None, "at": "arrows"}), ("metric", {"metric": {"y_1": ("cat", "dog")}})]:
        with pytest.raises(bt.BNetError, match=name):
            bt.circuit(clean, ablation, **{**options, "metric": metric, **wrong})

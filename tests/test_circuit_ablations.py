"""Circuits whose left-out arrows, edges or nodes transmit an ablation: node by node by the reference, and by sweeps."""

import random

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.interventions import Mean, Noise, Shift, Zero
from bnet_transformer.interventions.acdc import CircuitPairs
from tests.cases import CASES, close, get_case
from tests.edge_oracle import CircuitRun, get_outcome
from tests.sweep_oracle import AblatedValues, get_outputs, make_metric
from tests.test_circuits import SHOWN, examples
from tests.test_edges import QUICK as QUICK_EDGES, WITH_EDGES, make_fixed_pair

# Node groups without words have no mean over words.
ABLATIONS = {
    "zero": lambda clean, corrupt: Zero(),
    "mean of sentences": lambda clean, corrupt: Mean([*clean, *corrupt]),
    "mean over words": lambda clean, corrupt: Mean(),
    "noise": lambda clean, corrupt: Noise(0.3, seed=4),
    "function": lambda clean, corrupt: lambda value: value.tanh() + 0.1,
    "other sentence": lambda clean, corrupt: corrupt,
}
QUICK = ("chapter, two slices", "concat", "three stacks", "vanilla decoder, learned")


def list_cases(names, quick):
    return [
        pytest.param(name, what, marks=[pytest.mark.slow] * (name not in quick)) for name in names for what in ABLATIONS
    ]


class CircuitOfArrows(reference.ReferenceRun):
    """The run of a circuit: a node reads `left_out.value(parent)` along a removed arrow."""

    def __init__(self, model, removed, left_out):
        super().__init__(model, {})
        self.removed = removed
        self.left_out = left_out or AblatedValues(self, Zero())

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


def build_runs(clean, what, metric, at, over=None):
    """The runs; None if the intervention has no meaning for a node of the net."""
    try:
        runs = CircuitPairs.parse(clean, what, metric, at, over, None, 2**29).build_runs()
        runs.evaluate(torch.zeros(1, len(runs.edge_names), dtype=torch.bool))
    except bt.EvidenceError as error:
        assert "has no words" in str(error) or "words" in str(error)
        return None
    return runs


def draw_masks(count, shares=(0.5, 0.9)):
    generator = random.Random(count)
    masks = [[generator.random() < share for _ in range(count)] for share in shares]
    return [*masks, [True] * count, [False] * count]


@pytest.mark.parametrize("at", ["arrows", "nodes"])
@pytest.mark.parametrize(("name", "what"), list_cases(SHOWN, QUICK))
def test_circuits_of_arrows_and_nodes_equal_runs_node_by_node(name, what, at):
    clean, corrupt, nodes = examples(name)
    ablation, ground = ABLATIONS[what](clean, corrupt), clean[0].ground
    metric = make_metric([ground.name(node) for node in nodes])
    runs = build_runs(clean, ablation, metric, at)
    if runs is None:
        pytest.skip("a node without words")
    masks = draw_masks(len(runs.edge_names))
    for mask, actual in zip(masks, runs.evaluate(torch.tensor(masks)), strict=True):
        removed = set()
        for edge, is_retained in zip(runs.edge_names, mask, strict=True):
            source, *targets = map(ground.id, edge.split(" -> "))
            removed |= set() if is_retained else {(source, t) for t in targets or ground.children(source)}
        outcomes = []
        for s, other in zip(clean, corrupt, strict=True):
            left_out = reference.ReferenceRun(other.state.model, {}) if what == "other sentence" else None
            run = CircuitOfArrows(s.state.model, removed, left_out)
            run.left_out = left_out or AblatedValues(run, ablation)
            outcomes.append(run.get_outcomes(nodes))
        close(actual, metric(*(torch.stack(values) for values in zip(*outcomes, strict=True))))
    close(runs.evaluate_clean(), runs.evaluate(torch.ones(1, len(runs.edge_names), dtype=torch.bool))[0])
    close(runs.evaluate_corrupt(), runs.evaluate(torch.zeros(1, len(runs.edge_names), dtype=torch.bool))[0])


@pytest.mark.parametrize(("name", "what"), list_cases([case.name for case in WITH_EDGES], QUICK_EDGES))
def test_circuits_of_edges_equal_runs_node_by_node(name, what):
    clean, corrupt, names = make_fixed_pair(get_case(name))
    metric, nodes = make_metric(names), [clean.ground.id(name) for name in names]
    ablation = ABLATIONS[what]([clean], [corrupt])
    try:
        runs = build_runs(clean, ablation, metric, "edges")
    except bt.UnsupportedError as error:
        assert "a part of" in str(error)
        return
    if runs is None:
        pytest.skip("a node without words")
    masks = draw_masks(len(runs.edge_names))
    other = corrupt.state.model if what == "other sentence" else ablation
    for mask, actual in zip(masks, runs.evaluate(torch.tensor(masks)), strict=True):
        run = CircuitRun(clean.state.model, other, runs.structure, mask)
        close(actual, metric(*(value[None] for value in run.get_outcomes(nodes))))


@pytest.mark.parametrize("what", list(ABLATIONS)[:-2])
def test_a_circuit_of_all_nodes_but_one_is_a_cell_of_a_sweep(what):
    clean, corrupt, nodes = examples("concat")
    ablation, metric = ABLATIONS[what](clean, corrupt), make_metric([clean[0].ground.name(node) for node in nodes])
    for over in (("slice", "head"), ("slice", "word"), None):
        runs = CircuitPairs.parse(clean, ablation, metric, "nodes", over, None, 2**29).build_runs()
        for role in ("a", "v"):
            swept = bt.sweep(clean, ablation, at=role, over=over, metric=metric, direction="noise")
            for name in swept.names.values():
                mask = torch.tensor([[unit != name for unit in runs.edge_names]])
                close(runs.evaluate(mask)[0], swept.outcomes[swept.index_of(name)])

"""Every place, every intervention, every instrument: equal to one intervention at a time, by the reference."""

import math
import random

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.graph import topological_order
from bnet_transformer.interventions import Mean, Project, Scale, Set, Shift, Swap, Zero
from tests.cases import CASES, close, get_case
from tests.sweep_oracle import D, Oracle, get_outputs, get_refusal, make_metric, make_pair, with_values

INTERVENTIONS = (
    "tensor",
    *("zero", "mean", "shift", "scale", "function", "swap", "swap entries", "project", "project on mean", "set"),
)


def make_intervention(kind, shape, clean, sentences):
    """An intervention on nodes of a shape, and its formula: of the value, that of the clean run, and the mean."""
    size, generator = math.prod(shape), torch.Generator().manual_seed(3)
    draw = lambda *sizes: torch.randn(*sizes, generator=generator, dtype=D)  # noqa: E731
    Q, z, factor, vector = (
        torch.linalg.qr(draw(size, max(1, size // 2))).Q,
        draw(max(1, size // 2)),
        draw(*shape),
        draw(*shape),
    )
    entries = sorted({0, size - 1})
    onto = lambda v, target: v + (Q @ (Q.T @ (target - v).reshape(-1))).reshape(shape)  # noqa: E731

    def swap_entries(v, other):
        flat = v.reshape(-1).clone()
        flat[entries] = other.reshape(-1)[entries]
        return flat.reshape(shape)

    bend = lambda v: (2 * v).tanh() - v**2 / 3  # noqa: E731
    return {
        "tensor": (vector, lambda v, other, mean: vector),
        "zero": (Zero(), lambda v, other, mean: torch.zeros_like(v)),
        "mean": (Mean(sentences), lambda v, other, mean: mean),
        "shift": (Shift(vector), lambda v, other, mean: v + vector),
        "scale": (Scale(factor), lambda v, other, mean: v * factor),
        "function": (bend, lambda v, other, mean: bend(v)),
        "swap": (Swap(clean, Q), lambda v, other, mean: onto(v, other)),
        "swap entries": (Swap(clean, entries), lambda v, other, mean: swap_entries(v, other)),
        "project": (Project(Q), lambda v, other, mean: onto(v, torch.zeros_like(v))),
        "project on mean": (Project(Q, Mean(sentences)), lambda v, other, mean: onto(v, mean)),
        "set": (Set(z, Q), lambda v, other, mean: onto(v, (Q @ z).reshape(shape))),
    }[kind]


def change_values(nodes, formula):
    """Change these nodes in the corrupt run, ancestors first: each from its value after the changes above it."""

    def patch(clean, corrupt):
        patches = {}
        for node in (n for n in topological_order(corrupt.model.ground).tolist() if n in nodes):
            states = {n: state for n, state in corrupt.states.items() if n not in patches}
            run = reference.ReferenceRun(with_values(corrupt.model.surgery(patches), patches), states)
            mean = (clean.value(node) + corrupt.value(node)) / 2
            patches[node] = formula(run.value(node), clean.value(node), mean)
        return patches

    return patch


def choose_roles(net, key, count):
    """Roles of deterministic nodes with real values that are not computed from indices only."""
    specs = [m for m in net.network.specs if m.tpm.kind == "deterministic" and not m.tpm.is_index_valued]
    roles = sorted({m.group.stem for m in specs})
    return random.Random(str(key)).sample(roles, min(count, len(roles)))


def list_pairs():
    """Every net with every intervention; of every second net, one intervention is quick."""
    for k, case in enumerate(CASES):
        quick = random.Random(case.name).sample(INTERVENTIONS, 1) if k % 2 else ()
        for kind in INTERVENTIONS if case.text is not None else ():
            marks = () if kind in quick else pytest.mark.slow
            yield pytest.param(case, kind, id=f"{case.name}, {kind}", marks=marks)


@pytest.mark.parametrize(("case", "kind"), [*list_pairs()])
def test_a_sweep_takes_every_intervention(case, kind):
    clean, corrupt = make_pair(case)
    outputs = get_outputs(corrupt)
    oracle = Oracle(clean, corrupt, tuple(outputs))
    for role in choose_roles(clean.net, (case.name, kind), 1):
        groups = clean.ground.template.by_stem[role]
        nodes = [node for group in groups for node in corrupt.ground.select_nodes(group).tolist()]
        spec = clean.net.network.specs[groups[0].index]
        if any(clean.net.network.specs[group.index].shape != spec.shape for group in groups):
            continue
        intervention, formula = make_intervention(kind, spec.shape, clean, [clean, corrupt])
        name, last = corrupt.ground.name(nodes[0]), corrupt.ground.name(nodes[-1])
        cells = {"first": [name], "last": [last], "all": [role]}
        if len(oracle.runs) > 8:
            cells.pop("last")
        at = {key: cells[key] for key in cells}
        refusal = get_refusal(bt.sweep, intervention, corrupt, at=at, metric=make_metric(outputs))
        if refusal:  # the same refusal for do
            assert "latent" in refusal or "choice" in refusal or "random" in refusal, refusal
            continue
        result = bt.sweep(intervention, corrupt, at=at, metric=make_metric(outputs))
        for k, members in enumerate(([nodes[0]], [nodes[-1]], nodes) if len(cells) == 3 else ([nodes[0]], nodes)):
            close(float(result.outcomes[k, 0]), oracle.evaluate(change_values(members, formula)))


@pytest.mark.parametrize("name", ["chapter, two slices", "vanilla encoder", "recurrent", "encoder, pre-norm"])
def test_do_takes_every_intervention_also_on_entries(name):
    clean, corrupt = make_pair(get_case(name))
    clean, corrupt = ((s.do(c=1) if "c" in s.ground.template.by_stem else s) for s in (clean, corrupt))
    role = choose_roles(clean.net, name, 1)[0]
    groups = clean.ground.template.by_stem[role]
    nodes = [node for group in groups for node in corrupt.ground.select_nodes(group).tolist()]
    shape, names = clean.net.network.specs[groups[0].index].shape, [corrupt.ground.name(node) for node in nodes]
    runs = [reference.ReferenceRun(s.state.model, {}) for s in (clean, corrupt)]
    entries = sorted({0, math.prod(shape) - 1})
    for kind in INTERVENTIONS:
        intervention, formula = make_intervention(kind, shape, clean, [clean, corrupt])

        def at_entries(v, other, mean, formula=formula):
            flat = v.reshape(-1).clone()
            flat[entries] = formula(v, other, mean).reshape(-1)[entries]
            return flat.reshape(v.shape)

        keys = [(role, formula), (f"{role}{list(entries)}", at_entries)]
        for key, rule in keys if kind != "tensor" else keys[:1]:  # a tensor of entries has only these
            expected, patched = change_values(nodes, rule)(*runs), corrupt.do({key: intervention})
            for node, node_name in zip(nodes, names, strict=True):
                close(patched.state.model.do[node], expected[node])
                assert torch.equal(patched[node_name], patched.state.model.do[node])


def test_a_cell_with_a_node_that_does_not_lead_to_the_metric():
    net = bt.decoder(8, heads=2, slices=2, vocabulary=["the", "a", "cat", "dog", "sat"], norm="pre", seed=1).to(D)
    s, metric = net.sentence("the cat sat"), {"y_2": ("cat", "dog")}
    for change in (Project([0]), lambda v: v / v.abs().amax()):
        both, one = (bt.sweep(change, s, at={"all": names}, metric=metric) for names in (["x_0_0", "x_2_0"], ["x_0_0"]))
        close(both.values, one.values)

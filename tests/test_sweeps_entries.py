"""Sweeps of entries of values: one entry set at a time, by the reference; ablations, names with entries, estimates."""

import random

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.interventions import Mean, Noise, Scale, Swap, Zero, engine
from tests.cases import get_case
from tests.sweep_oracle import D, Oracle, forbid_shared_runs, get_cells, get_outputs, make_metric, rotate_words
from tests.test_sweeps import REFUSED, check, close, make_examples, make_net, make_sentences
from tests.test_sweeps_first_order import SEQUENTIAL

ROLES = {
    "chapter": ("x", "W_q"),
    "codebook": ("q",),
    "concat": ("W_q", "a"),
    "encoder, pre-norm": ("ffn", "q"),
    "three stacks": ("W_shared", "dec_left"),
    "recurrent": ("h",),
    "recurrences": ("g", "m"),
    "grouped": ("a",),
    "experts": ("e",),
    "encoder-decoder": ("dec_a",),
    "positioned": ("both", "pool"),
    "vanilla decoder, causal": ("neuron",),
    "vanilla encoder-decoder": ("dec_neuron", "enc_neuron"),
}


def make_case(name):
    """A clean and a corrupt sentence of a case, with neurons as nodes for roles of neurons."""
    net, text = get_case(name).net, get_case(name).text
    net = net.expose_neurons() if any("neuron" in role for role in ROLES[name]) else net
    return net.sentence(rotate_words(net, text)), net.sentence(text)


def set_entries(pairs):
    """Set entries of nodes, parents first, to their clean values: each in the run with the entries before it."""

    def patch(clean, corrupt):
        patches = {}
        for node in dict.fromkeys(node for node, _ in pairs):
            run = reference.ReferenceRun(corrupt.model.surgery(patches), corrupt.states) if patches else corrupt
            value, source = run.value(node).flatten().clone(), clean.value(node).flatten()
            for entry in (entry for other, entry in pairs if other == node):
                value[entry] = source[entry]
            patches[node] = value.reshape(run.value(node).shape)
        return patches

    return patch


@pytest.mark.parametrize("name", ROLES)
def test_one_entry_is_set_at_a_time(name):
    """Each cell by the reference, node by node: an entry of one node, and of all nodes of a slice."""
    clean, corrupt = make_case(name)
    names = get_outputs(corrupt)
    oracle, metric = Oracle(clean, corrupt, tuple(names)), make_metric(names)
    order = [corrupt.ground.id(node) for node in corrupt.nodes]
    for role in ROLES[name]:
        if (name, role) in REFUSED:
            with pytest.raises(bt.EvidenceError, match="a value for each state"):
                bt.sweep(clean, corrupt, at=role, over=("slice", "entry"), metric=metric)
            continue
        axes = bt.sweep(clean, corrupt, at=role, metric=metric).axes
        for over in dict.fromkeys((axes, axes[:1])):
            cells = get_cells(corrupt, role, over)
            result = bt.sweep(clean, corrupt, at=role, over=(*over, "entry"), metric=metric)
            size = len(result.positions["entry"])
            assert result.axes == (*over, "entry") and result.outcomes[..., 0, 0].numel() == len(cells)
            rng = random.Random(f"{name} {role} {over}")
            picked = [(*rng.choice(sorted(cells)), rng.randrange(size)) for _ in range(3)]
            pairs = {i: [(node, i[-1]) for node in sorted(cells[i[:-1]], key=order.index)] for i in picked}
            check(result, oracle, {index: set_entries(nodes) for index, nodes in pairs.items()})
            for index, nodes in pairs.items() if over == axes else ():
                assert result.names[index] == f"{corrupt.ground.name(nodes[0][0])}[{index[-1]}]"
            if role not in SEQUENTIAL.get(name, ()):
                query = {"at": role, "metric": metric, "method": bt.Gradient()}
                estimates = bt.sweep(clean, corrupt, over=(*over, "entry"), **query)
                close(estimates.effects.sum(-2), bt.sweep(clean, corrupt, over=over, **query).effects)


@pytest.mark.parametrize("is_sequential", [False, True])
def test_other_entries_are_those_of_the_patched_run(monkeypatch, is_sequential):
    """A cell that also sets a node above, or its entries; entries of rows of several slices. By both routes."""
    clean, corrupt = make_sentences(make_net(observe=bt.tpm.Categorical(3)))
    names, ids = ["y_0", "x_2_2"], corrupt.ground.id
    oracle, query = Oracle(clean, corrupt, tuple(names)), {"metric": make_metric(names)}
    rows = bt.sweep(clean, corrupt, at="j", over=("head", "read"), **query)
    if is_sequential:
        forbid_shared_runs(monkeypatch)
    cells = {
        "below a node": ["x_1_1[2]", "q_0_0_1", "x_1_1[0]"],
        "below an entry": ["x_0_*[1]", "x_1_2[3,0]"],
        "a node and its entry": ["x_1_1[2]", "x_1_1"],
    }
    result = bt.sweep(clean, corrupt, at=cells, **query)
    x = {name: ids(name) for name in ("q_0_0_1", "x_0_0", "x_0_1", "x_0_2", "x_1_1", "x_1_2")}
    full = [(x["q_0_0_1"], entry) for entry in range(4)]
    check(
        result,
        oracle,
        {
            (0,): set_entries([*full, (x["x_1_1"], 2), (x["x_1_1"], 0)]),
            (1,): set_entries([(x["x_0_0"], 1), (x["x_0_1"], 1), (x["x_0_2"], 1), (x["x_1_2"], 3), (x["x_1_2"], 0)]),
            (2,): set_entries([(x["x_1_1"], entry) for entry in range(4)]),
        },
    )
    close(bt.sweep(clean, corrupt, at="j", over=("head", "read"), **query).outcomes, rows.outcomes)
    joined = bt.sweep(clean, corrupt, at="x", over=("word", "entry"), **query)
    nodes = [(ids(f"x_{t}_1"), 3) for t in range(3)]
    check(joined, oracle, {(1, 3): set_entries(nodes)})


@pytest.mark.parametrize("is_sequential", [False, True])
def test_ablations_of_entries(monkeypatch, is_sequential):
    """Zeros, means over sentences and words, and changes: the entry of the value that the intervention gives."""
    net = make_net(observe=bt.tpm.Categorical(3))
    clean, corrupt = make_sentences(net)
    if is_sequential:
        forbid_shared_runs(monkeypatch)
    basis = torch.linalg.qr(torch.randn(4, 2, dtype=D, generator=torch.Generator().manual_seed(1)))[0]
    changes = Noise(0.5, seed=3), Scale(2.0), lambda v: v.cumsum(-1).tanh(), Swap(clean, basis)
    for ablation in (Zero(), Mean([clean, corrupt]), Mean(), *changes):
        query = {"at": "q", "over": ("slice", "head", "word", "entry"), "metric": {"y_2": 1}}
        result = bt.sweep(ablation, corrupt, **query)
        for index in ((0, 1, 2, 3), (1, 0, 2, 0), (0, 0, 1, 2)):
            name, entry = "_".join(["q", *map(str, index[:-1])]), index[-1]
            value = corrupt[name].clone()
            value[entry] = corrupt.do({name: ablation})[name][entry]
            close(result.outcomes[index][0], corrupt.do({name: value}).posterior("y_2")[1].log())
        if not is_sequential:
            first = bt.sweep(ablation, corrupt, method=bt.Gradient(), **query)
            full = bt.sweep(ablation, corrupt, method=bt.Gradient(), **{**query, "over": query["over"][:-1]})
            close(first.effects.sum(-2), full.effects)
    cell = {"cell": ["x_0_1[0]", "x_1_1[1,2]", "x_1_1[3]"]}
    for change in changes:  # of the value in the run of the cell
        result, run = bt.sweep(change, corrupt, at=cell, metric={"y_2": 1}), corrupt
        for name, entries in (("x_0_1", [0]), ("x_1_1", [1, 2, 3])):
            value = run[name].clone()
            value[entries] = run.do({name: change})[name][entries]
            run = run.do({name: value})
        close(result.outcomes[0, 0], run.posterior("y_2")[1].log())
    moved = bt.sweep(Swap(clean, basis), corrupt, at=["x_0_1[2,3]"], words={1: 2}, metric={"y_2": 1})
    value, delta = corrupt["x_0_1"].clone(), clean["x_0_2"] - corrupt["x_0_1"]
    value[2:] += (basis @ (basis.T @ delta))[2:]
    close(moved.outcomes[0, 0], corrupt.do(x_0_1=value).posterior("y_2")[1].log())


def test_names_with_entries():
    """In a list, where a cell of a role occurs once; negative words; an aligned word; several examples in parts."""
    clean, corrupt = make_examples(make_net(observe=bt.tpm.Categorical(3)), 3)
    query = {"metric": make_metric(["y_0", "y_2"])}
    entries = bt.sweep(clean, corrupt, at="x", over=("slice", "entry"), **query)
    items = ["x", "x_1_*[2]", "x_1_-1[ 0, 3 ]", "x_1_1"]
    result = bt.sweep(clean, corrupt, at=items, over=("slice", "entry"), **query)
    assert len(result.names) == 3 * 4 + 2 and result.part("x").axes == ("slice", "entry")
    close(result.part("x").outcomes, entries.outcomes)
    assert result["x_1_*[2]"] == pytest.approx(float(entries.values[1, 2]), rel=1e-12)
    assert result.index_of("x_1_-1[ 0, 3 ]") == result.index_of("x_1_2[0,3]")
    words = bt.sweep(clean, corrupt, at="x", over=("slice", "word", "entry"), **query)
    assert words["x_1_-1[2]"] == words["x_1_2[2]"] == float(words.values[1, 2, 2])
    close(bt.sweep(clean, corrupt, at="x", over=words.axes, memory=2**14, **query).outcomes, words.outcomes)
    moved = bt.sweep(clean[0], corrupt[0], at=["x_0_1[2,3]"], words={1: 2}, metric={"y_2": 1})
    value = corrupt[0]["x_0_1"].clone()
    value[2:] = clean[0]["x_0_2"][2:]
    close(moved.outcomes[0, 0], corrupt[0].do(x_0_1=value).posterior("y_2")[1].log())
    assert "3 slices x 4 entries" in repr(entries)


def test_a_patch_has_no_value_for_each_entry(monkeypatch):
    """One number for each cell, or the table of values that all cells share."""
    clean, corrupt = make_sentences(make_net(observe=bt.tpm.Categorical(3)))
    patches, measure_changes = [], engine.measure_changes

    def record(run, by_group, count):
        patches.extend(patch for group in by_group.values() for patch in group)
        return measure_changes(run, by_group, count)

    monkeypatch.setattr(engine, "measure_changes", record)
    for source, words in ((clean, None), (clean, {1: 2, 0: 0, 2: 1}), (Zero(), None), (Noise(1.0), None)):
        over = ("slice", "word", "entry")
        bt.sweep(source, corrupt, at="x", over=over, words=words, metric={"y_2": 1})
    assert patches and all(len(patch.cells) == patch.source.numel() == 12 for patch in patches)

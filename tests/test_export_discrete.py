"""The discrete export against pgmpy's own inference: its posteriors are the reference's."""

from __future__ import annotations

import itertools
import math
import re
import sys
import warnings
from collections.abc import Collection

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.bridges.pgmpy import MAX_TABLE_DIMS, format_state_name, model_to_tables, to_bif, to_pgmpy
from bnet_transformer.reference import GroundModel
from bnet_transformer.tpm import Categorical, Codebook, Given, Normal
from tests.cases import CASES, Case

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # pgmpy 1.1.2 imports what it deprecates
    from pgmpy.inference import VariableElimination
    from pgmpy.readwrite import BIFReader

READOUTS = {
    "each word": (Categorical(3), {"y_0": 1, "y_1": 0}),
    "pooled": (Categorical(2, pool="mean"), {"y": 1}),
    "real": (Normal(0.4), {"y_1": (0.5, -0.2, 0.1, 0.9)}),
}

pytestmark = pytest.mark.usefixtures("each_run_once")


def chapter(per: str, atoms: int | None, readout: str, slices: int = 1) -> Case:
    observe, evidence = READOUTS[readout]
    options = {"per": per, "atoms": atoms, "slices": slices, "residual": True, "observe": observe}
    name = f"{per}, {'codebook' if atoms else 'select'}, {readout}"
    return Case(name, lambda: bt.bayesuvius(4, **options), "cat sat", evidence)  # type: ignore[arg-type]


GRID = [
    chapter(per, atoms, readout, 2 if per == "slice" and atoms is None else 1)
    for per, atoms, readout in itertools.product(("sentence", "slice", "word"), (None, 2), READOUTS)
]


def label_of(name: str) -> str:
    """The label that `format_state_name` made into an identifier."""
    return re.sub("_([0-9a-f]*)_", lambda result: chr(int(result[1], 16)) if result[1] else "", name)


def world_of(sentence: bt.Sentence) -> GroundModel:
    return sentence.state.model


def variables(world: GroundModel) -> list[int]:
    families = [m.group for m in world.network.specs if m.tpm.kind == "discrete"]
    return [node for family in families for node in world.ground.select_nodes(family).tolist()]


def states_of(world: GroundModel) -> int:
    """How many joint states the reference goes through for a posterior: those of all but the readouts."""
    inner = [node for node in variables(world) if world.ground.children(node)]
    return math.prod(world.count_states(node) for node in inner)


ALL = [*CASES, *GRID[::2]]
SOME = [case for case in ALL if case.name in ("codebook", "chapter, real", "marginal")]
MANY = ("slice", "codebook, two slices", "word, two slices", "two selectors", "grouped", "word, codebook")  # states
EVERY = [pytest.param(case, marks=[pytest.mark.slow] * (k % 2 or case.name in MANY)) for k, case in enumerate(ALL)]
EVERY_SOME = [pytest.param(case, marks=[pytest.mark.slow] * (case is not SOME[0])) for case in SOME]


def asked(model: object, name: str, evidence: dict[str, str]) -> Tensor:
    result = VariableElimination(model).query([name], evidence=evidence, show_progress=False)
    return torch.tensor(result.values)


def agree(
    world: GroundModel, observed: dict[int, Tensor], *passed: tuple[object, dict[str, str]], but: Collection[int] = ()
) -> None:
    """Posteriors of exported nets, given what they are told, are the reference's: of a variable in the middle, in small
    nets of all; in the largest of none, for the reference takes too long."""
    left = [node for node in variables(world) if node not in observed and node not in but]
    states = states_of(world)
    for node in {} if states > 1000 or not left else {left[len(left) // 2], *(left if states <= 16 else [])}:
        expected = reference.posterior(world, node, observed)
        for model, evidence in passed:
            result = asked(model, world.ground.name(node), evidence)
            torch.testing.assert_close(result, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_posteriors_are_the_references(case: Case) -> None:
    sentence = case.sentence
    world = world_of(sentence)
    if not variables(world):
        with pytest.raises(bt.BNetError, match="at least one discrete random node"):
            to_pgmpy(world)
        return
    model = to_pgmpy(world)
    assert model.check_model()
    assert set(model) == {world.ground.name(node) for node in variables(world)}
    if not case.evidence or states_of(world) <= 16:
        agree(world, {}, (model, {}))
    if case.evidence:
        observed = sentence.observe(case.evidence).state.evidence
        model = to_pgmpy(world, evidence=observed)
        assert model.check_model()
        assert model.graph["evidence"].keys() == set(case.evidence)
        agree(world, observed, (model, model.graph["evidence"]))


@pytest.mark.parametrize("case", [SOME[0], *GRID[1::8]], ids=lambda case: case.name)
def test_do_is_surgery_in_both(case: Case) -> None:
    sentence = case.sentence
    world = world_of(sentence)
    observed = sentence.observe(case.evidence).state.evidence
    if not variables(world):
        return
    plain = to_pgmpy(world, evidence=observed)
    free = [node for node in variables(world) if node not in observed]
    if not free:
        return
    for node in {free[0], free[-1]} if states_of(world) <= 16 else free[-1:]:
        name, state = world.ground.name(node), world.count_states(node) - 1
        done = GroundModel(world.network, world.ground.surgery([node]), world.inputs, {node: torch.tensor(state)})
        evidence = plain.graph["evidence"]
        cut = plain.do([name])
        passed = cut.get_cpds(name).state_names[name][state]
        model = to_pgmpy(done, evidence=observed)
        assert set(to_pgmpy(GroundModel(world.network, world.ground, world.inputs, done.do)).edges) <= set(model.edges)
        agree(done, observed, (cut, {**evidence, name: passed}), (model, evidence), but=[node])
        assert set(model.edges) == {(u, v) for u, v in plain.edges if v != name}
        np.testing.assert_array_equal(model.get_cpds(name).values, np.eye(state + 1)[state])
        for other in set(plain) - {name}:
            np.testing.assert_array_equal(model.get_cpds(other).values, plain.get_cpds(other).values)


def test_parents_are_the_choices_that_decide() -> None:
    for case in ALL[::9]:
        world = world_of(case.sentence)
        tables, _ = model_to_tables(world) if variables(world) else ([], {})
        for table in tables:
            expected = reference.find_open_choices(world, reference.parents(world, world.ground.id(table.name)), {})
            assert table.parents == tuple(map(world.ground.name, expected))


def test_an_atom_set_to_a_matrix_is_no_variable() -> None:
    net = bt.bayesuvius(4, atoms=3, observe=Categorical(3)).to(torch.float64)
    sentence = net.sentence("the cat sat").do(W_k_0=torch.eye(4))
    model = to_pgmpy(world_of(sentence))
    assert "W_k_0" not in model
    agree(world_of(sentence), {}, (model, {}), but=[sentence.ground.id("W_k_0")])
    table = model.get_cpds("y_1")
    assert set(table.variables) == {"y_1", "W_q_0", "W_v_0"}


def test_evidence_that_is_no_state() -> None:
    """On a deterministic node, on an atom by its matrix, on a continuous one: a variable that is seen."""
    net = bt.bayesuvius(4, atoms=2, observe=Normal(0.5)).to(torch.float64)
    sentence = net.sentence("the cat sat")
    atom, x = net.parameters["W_q_0.atoms"][1], sentence.do(W_q_0=0, W_k_0=1, W_v_0=0)["x_1_2"]
    for evidence, name in (
        ({"W_q_0": atom}, "W_q_0_seen"),
        ({"x_1_2": x}, "x_1_2"),
        ({"y_0": torch.zeros(4)}, "y_0"),
        ({"x_0_1": sentence["x_0_1"]}, "x_0_1"),
    ):
        observed = sentence.observe(evidence).state.evidence
        model = to_pgmpy(world_of(sentence), evidence=observed)
        assert model.graph["evidence"] == {name: "seen"} and model.check_model()
        agree(world_of(sentence), observed, (model, {name: "seen"}))


def test_a_density_above_one_is_no_probability() -> None:
    net = bt.bayesuvius(4, heads=3, observe=Normal(0.01)).to(torch.float64)
    sentence = net.sentence("the cat")
    observed = sentence.observe(y_0=sentence.do(c=1)["x_1_0"]).state.evidence
    model = to_pgmpy(world_of(sentence), evidence=observed)
    assert model.check_model() and model.get_cpds("y_0").values.max() == 1
    agree(world_of(sentence), observed, (model, {"y_0": "seen"}))


def test_a_continuous_node_above_a_discrete_one() -> None:
    """Its evidence is settled below it, and counts above it; without evidence it is an error that names it."""
    stack = bt.Stack(
        [bt.Node("x", Normal(0.5), ["W"], plates=["word"])],
        [bt.Node("x", Given(2), plates=["word"])],
        [bt.Node("y", Categorical(3), ["x"], plates=["word"])],
    )
    roots = [bt.Node("c", Categorical(3, (0.2, 0.5, 0.3))), bt.Node("W", Codebook(2, 2), ["c"])]
    net = bt.BNet(bt.Declaration([stack], roots)).to(torch.float64)
    sentence = net.sentence("a")
    with pytest.raises(bt.EvidenceError, match="x_1_0"):
        to_pgmpy(world_of(sentence))
    observed = sentence.observe(x_1_0=(0.3, -0.1)).state.evidence
    model = to_pgmpy(world_of(sentence), evidence=observed)
    agree(world_of(sentence), observed, (model, model.graph["evidence"]))
    assert not model.get_parents("y_0")


@pytest.mark.parametrize("case", EVERY_SOME, ids=lambda case: case.name)  # pgmpy's reader takes a second
def test_bif_reads_back_to_the_last_digit(case: Case) -> None:
    sentence = case.sentence
    observed = sentence.observe(case.evidence).state.evidence
    tables, _ = model_to_tables(world_of(sentence), evidence=observed)
    model = BIFReader(string=to_bif(world_of(sentence), evidence=observed)).get_model()
    assert set(model) == {table.name for table in tables} and model.check_model()
    for table in tables:
        read = model.get_cpds(table.name)
        assert tuple(read.variables) == (table.name, *table.parents)
        assert tuple(read.state_names[table.name]) == table.states
        np.testing.assert_array_equal(read.values, table.values)


def test_labels_survive_bif() -> None:
    words = ("the", "don't", 'a "b"', "{x; y, z}", "2nd", "été", "//", "\ud800", "a b", "a_b", "A", "_61_")
    net = bt.bayesuvius(4, heads=len(words), observe=Categorical(len(words)), vocabulary=words)
    sentence = net.sentence(["the", "//"])
    tables, _ = model_to_tables(world_of(sentence))
    by_name = {table.name: table for table in tables}
    assert by_name["c"].states == tuple(map(str, range(len(words))))  # heads are no words
    assert tuple(map(label_of, by_name["y_0"].states)) == words
    model = BIFReader(string=to_bif(world_of(sentence))).get_model()
    assert tuple(map(label_of, model.get_cpds("y_1").state_names["y_1"])) == words
    model = to_pgmpy(world_of(sentence), evidence=sentence.observe(y_0="don't").state.evidence)
    assert model.graph["evidence"] == {"y_0": "don_27_t"}


@given(st.lists(st.text(), unique=True, max_size=6))
def test_state_names_are_identifiers_and_reversible(labels: list[str]) -> None:
    names = list(map(format_state_name, labels))
    assert list(map(label_of, names)) == labels and len(set(names)) == len(labels)
    assert all(name.isidentifier() and name.isascii() for name in names)


def test_bif_needs_no_pgmpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pgmpy", None)
    monkeypatch.setitem(sys.modules, "pgmpy.models", None)
    assert to_bif(world_of(bt.bayesuvius(4).sentence("a"))).startswith("network bnet {\n}\nvariable c {")


def test_too_much_is_refused_before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: object) -> None:
        raise AssertionError("a run was made")

    monkeypatch.setattr(reference, "enumerate_runs", never)
    net = bt.bayesuvius(4, per="word", heads=3, observe=Categorical(5, pool="sum"))
    with pytest.raises(bt.BudgetError, match=rf"y: .*10000000 entries; got 16 dims and {5 * 3**15} entries"):
        to_pgmpy(world_of(net.sentence(["w"] * 15)))
    with pytest.raises(bt.BudgetError, match=r"at most 64 dims .* got 65 dims"):
        to_bif(world_of(bt.bayesuvius(4, per="word", heads=1, observe=Categorical(1, pool="sum")).sentence(["w"] * 64)))
    with pytest.raises(bt.BudgetError, match=r"y: .*got 71 dims and some 2\^"):
        to_bif(world_of(net.sentence(["w"] * 70)))
    small = world_of(net.sentence("a b"))
    with pytest.raises(bt.BudgetError, match=r"y: .*at most 64 dims and 44 entries; got 3 dims and 45 entries"):
        to_pgmpy(small, limit=44)
    with pytest.raises(bt.BudgetError, match="at most 50 entries in all; got 51 in 3 tables"):
        to_pgmpy(small, limit=50)
    with pytest.raises(bt.BudgetError, match=r"at most 9 runs .*; got 10 runs; allowed: runs=10"):
        to_pgmpy(small, runs=9)
    for bad in (0, -1, 2.5, None, "9"):
        with pytest.raises(bt.BNetError, match="limit"):
            to_pgmpy(small, limit=bad)  # type: ignore[arg-type]
    monkeypatch.undo()
    assert to_pgmpy(small, limit=51, runs=10).check_model()


def test_bad_input_is_told() -> None:
    sentence = bt.bayesuvius(4, combine="concat").sentence("a b")
    with pytest.raises(bt.BNetError, match=r"at least one discrete random node; got none$"):
        to_pgmpy(world_of(sentence))
    with pytest.raises(bt.BNetError, match=r"got none \(Normal is continuous\)"):
        to_bif(world_of(bt.bayesuvius(4, combine="concat", observe=Normal()).sentence("a")))
    net = bt.bayesuvius(4, observe=Categorical(2))
    sentence = net.sentence("a b")
    with pytest.raises(bt.EvidenceError, match=r"x_1_0: .*possible; got .*of probability zero"):
        to_pgmpy(world_of(sentence), evidence=sentence.observe(x_1_0=torch.full((4,), 9.0)).state.evidence)


def test_tables_of_a_float32_net_sum_to_one() -> None:
    world = world_of(bt.bayesuvius(4, atoms=3, observe=Categorical(3)).sentence("a b"))
    for table in model_to_tables(world)[0]:
        assert math.isclose(table.values.sum(0).max(), 1, abs_tol=1e-6)
        assert table.values.dtype == np.float64 and table.values.shape[0] == len(table.states)


def test_states_of_a_word_that_is_read_are_the_words() -> None:
    case = next(case for case in CASES if case.name == "marginal")
    world = world_of(case.sentence)
    table = next(t for t in model_to_tables(world)[0] if t.name == "j_0_0")
    np.testing.assert_array_equal(table.values, [1, 0, 0])  # causal: the first word reads itself
    assert table.states == ("0", "1", "2") and MAX_TABLE_DIMS == 64

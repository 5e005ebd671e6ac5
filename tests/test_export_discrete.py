"""The discrete export: posteriors of pgmpy's inference on it equal those of the reference."""

from __future__ import annotations

import itertools
import math
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
from bnet_transformer.bridges.pgmpy import (
    MAX_TABLE_DIMS,
    format_state_name,
    model_to_tables,
    parse_state_name,
    to_bif,
    to_pgmpy,
)
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

pytestmark = pytest.mark.usefixtures("cached_runs")


def chapter(per: str, atoms: int | None, readout: str, slices: int = 1) -> Case:
    observe, evidence = READOUTS[readout]
    options = {"per": per, "atoms": atoms, "slices": slices, "residual": True, "observe": observe}
    name = f"{per}, {'codebook' if atoms else 'select'}, {readout}"
    return Case(name, lambda: bt.bayesuvius(4, **options), "cat sat", evidence)  # type: ignore[arg-type]


GRID = [
    chapter(per, atoms, readout, 2 if per == "slice" and atoms is None else 1)
    for per, atoms, readout in itertools.product(("sentence", "slice", "word"), (None, 2), READOUTS)
]


def get_model(sentence: bt.Sentence) -> GroundModel:
    return sentence.state.model


def get_choices(model: GroundModel) -> list[int]:
    groups = [m.group for m in model.network.specs if m.tpm.kind == "discrete"]
    return [node for group in groups for node in model.ground.select_nodes(group).tolist()]


def count_joint_states(model: GroundModel) -> int:
    """Return the number of joint states that the reference enumerates: of all discrete nodes except the readouts."""
    parents = [node for node in get_choices(model) if model.ground.children(node)]
    return math.prod(model.count_states(node) for node in parents)


ALL = [*CASES, *GRID[::2]]
SELECTED = [case for case in ALL if case.name in ("codebook", "chapter, real", "marginal")]
LARGE = (
    "slice",
    "codebook, two slices",
    "word, two slices",
    "two selectors",
    "grouped",
    "word, codebook",
    "word, codebook, pooled",
)  # states
EVERY = [pytest.param(case, marks=[pytest.mark.slow] * (k % 2 or case.name in LARGE)) for k, case in enumerate(ALL)]
SELECTED_PARAMS = [pytest.param(case, marks=[pytest.mark.slow] * (case is not SELECTED[0])) for case in SELECTED]


def query_posterior(bn: object, name: str, evidence: dict[str, str]) -> Tensor:
    factor = VariableElimination(bn).query([name], evidence=evidence, show_progress=False)
    return torch.tensor(factor.values)


def check_posteriors(
    model: GroundModel, observed: dict[int, Tensor], *exports: tuple[object, dict[str, str]], but: Collection[int] = ()
) -> None:
    """Assert that posteriors of exported nets, given their evidence, equal the reference: of the middle variable, in
    small nets of all, and in the largest of none, because the reference is too slow there."""
    hidden = [node for node in get_choices(model) if node not in observed and node not in but]
    states = count_joint_states(model)
    for node in {} if states > 1000 or not hidden else {hidden[len(hidden) // 2], *(hidden if states <= 16 else [])}:
        expected = reference.posterior(model, node, observed)
        for bn, evidence in exports:
            result = query_posterior(bn, model.ground.name(node), evidence)
            torch.testing.assert_close(result, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_posteriors_are_the_references(case: Case) -> None:
    sentence = case.sentence
    model = get_model(sentence)
    if not get_choices(model):
        with pytest.raises(bt.BNetError, match="at least one discrete random node"):
            to_pgmpy(model)
        return
    bn = to_pgmpy(model)
    assert bn.check_model()
    assert set(bn) == {model.ground.name(node) for node in get_choices(model)}
    if not case.evidence or count_joint_states(model) <= 16:
        check_posteriors(model, {}, (bn, {}))
    if case.evidence:
        observed = sentence.observe(case.evidence).state.evidence
        bn = to_pgmpy(model, evidence=observed)
        assert bn.check_model()
        assert bn.graph["evidence"].keys() == set(case.evidence)
        check_posteriors(model, observed, (bn, bn.graph["evidence"]))


@pytest.mark.parametrize("case", [SELECTED[0], *GRID[1::8]], ids=lambda case: case.name)
def test_do_is_surgery_in_both(case: Case) -> None:
    sentence = case.sentence
    model = get_model(sentence)
    observed = sentence.observe(case.evidence).state.evidence
    if not get_choices(model):
        return
    plain = to_pgmpy(model, evidence=observed)
    hidden = [node for node in get_choices(model) if node not in observed]
    if not hidden:
        return
    for node in {hidden[0], hidden[-1]} if count_joint_states(model) <= 16 else hidden[-1:]:
        name, state = model.ground.name(node), model.count_states(node) - 1
        done = GroundModel(model.network, model.ground.surgery([node]), model.inputs, {node: torch.tensor(state)})
        evidence = plain.graph["evidence"]
        cut = plain.do([name])
        state_name = cut.get_cpds(name).state_names[name][state]
        bn = to_pgmpy(done, evidence=observed)
        uncut = GroundModel(model.network, model.ground, model.inputs, done.do)
        assert set(to_pgmpy(uncut).edges) <= set(bn.edges)
        check_posteriors(done, observed, (cut, {**evidence, name: state_name}), (bn, evidence), but=[node])
        assert set(bn.edges) == {(u, v) for u, v in plain.edges if v != name}
        np.testing.assert_array_equal(bn.get_cpds(name).values, np.eye(state + 1)[state])
        for name_ in set(plain) - {name}:
            np.testing.assert_array_equal(bn.get_cpds(name_).values, plain.get_cpds(name_).values)


def test_parents_are_the_choices_that_decide() -> None:
    for case in ALL[::9]:
        model = get_model(case.sentence)
        tables, _ = model_to_tables(model) if get_choices(model) else ([], {})
        for table in tables:
            expected = reference.find_open_choices(model, reference.parents(model, model.ground.id(table.name)), {})
            assert table.parents == tuple(map(model.ground.name, expected))


def test_an_atom_set_to_a_matrix_is_no_variable() -> None:
    net = bt.bayesuvius(4, atoms=3, observe=Categorical(3)).to(torch.float64)
    sentence = net.sentence("the cat sat").do(W_k_0=torch.eye(4))
    bn = to_pgmpy(get_model(sentence))
    assert "W_k_0" not in bn
    check_posteriors(get_model(sentence), {}, (bn, {}), but=[sentence.ground.id("W_k_0")])
    table = bn.get_cpds("y_1")
    assert set(table.variables) == {"y_1", "W_q_0", "W_v_0"}


def test_evidence_that_is_no_state() -> None:
    """On a deterministic node, on an atom by its matrix, on a continuous node: an observed variable."""
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
        bn = to_pgmpy(get_model(sentence), evidence=observed)
        assert bn.graph["evidence"] == {name: "seen"} and bn.check_model()
        check_posteriors(get_model(sentence), observed, (bn, {name: "seen"}))


def test_a_density_above_one_is_no_probability() -> None:
    net = bt.bayesuvius(4, heads=3, observe=Normal(0.01)).to(torch.float64)
    sentence = net.sentence("the cat")
    observed = sentence.observe(y_0=sentence.do(c=1)["x_1_0"]).state.evidence
    bn = to_pgmpy(get_model(sentence), evidence=observed)
    assert bn.check_model() and bn.get_cpds("y_0").values.max() == 1
    check_posteriors(get_model(sentence), observed, (bn, {"y_0": "seen"}))


def test_a_continuous_node_above_a_discrete_one() -> None:
    """Its evidence fixes its value for its descendants and is a factor above it; without evidence an error names it."""
    stack = bt.Stack(
        [bt.Node("x", Normal(0.5), ["W"], plates=["word"])],
        [bt.Node("x", Given(2), plates=["word"])],
        [bt.Node("y", Categorical(3), ["x"], plates=["word"])],
    )
    roots = [bt.Node("c", Categorical(3, (0.2, 0.5, 0.3))), bt.Node("W", Codebook(2, 2), ["c"])]
    net = bt.BNet(bt.Declaration([stack], roots)).to(torch.float64)
    sentence = net.sentence("a")
    with pytest.raises(bt.EvidenceError, match="x_1_0"):
        to_pgmpy(get_model(sentence))
    observed = sentence.observe(x_1_0=(0.3, -0.1)).state.evidence
    bn = to_pgmpy(get_model(sentence), evidence=observed)
    check_posteriors(get_model(sentence), observed, (bn, bn.graph["evidence"]))
    assert not bn.get_parents("y_0")


@pytest.mark.parametrize("case", SELECTED_PARAMS, ids=lambda case: case.name)  # pgmpy's reader takes a second
def test_bif_reads_back_to_the_last_digit(case: Case) -> None:
    sentence = case.sentence
    observed = sentence.observe(case.evidence).state.evidence
    tables, _ = model_to_tables(get_model(sentence), evidence=observed)
    bn = BIFReader(string=to_bif(get_model(sentence), evidence=observed)).get_model()
    assert set(bn) == {table.name for table in tables} and bn.check_model()
    for table in tables:
        cpd = bn.get_cpds(table.name)
        assert tuple(cpd.variables) == (table.name, *table.parents)
        assert tuple(cpd.state_names[table.name]) == table.states
        np.testing.assert_array_equal(cpd.values, table.values)


def test_labels_survive_bif() -> None:
    words = ("the", "don't", 'a "b"', "{x; y, z}", "2nd", "été", "//", "\ud800", "a b", "a_b", "A", "_61_")
    net = bt.bayesuvius(4, heads=len(words), observe=Categorical(len(words)), vocabulary=words)
    sentence = net.sentence(["the", "//"])
    tables, _ = model_to_tables(get_model(sentence))
    by_name = {table.name: table for table in tables}
    assert by_name["c"].states == tuple(map(str, range(len(words))))  # heads are not words
    assert by_name["y_0"].states == words
    bn = BIFReader(string=to_bif(get_model(sentence))).get_model()
    assert tuple(map(parse_state_name, bn.get_cpds("y_1").state_names["y_1"])) == words
    bn = to_pgmpy(get_model(sentence), evidence=sentence.observe(y_0="don't").state.evidence)
    assert bn.graph["evidence"] == {"y_0": "don't"}


@given(st.lists(st.text(), unique=True, max_size=6))
def test_state_names_are_identifiers_and_reversible(labels: list[str]) -> None:
    names = list(map(format_state_name, labels))
    assert list(map(parse_state_name, names)) == labels and len(set(names)) == len(labels)
    assert all(name.isidentifier() and name.isascii() for name in names)


def test_bif_needs_no_pgmpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pgmpy", None)
    monkeypatch.setitem(sys.modules, "pgmpy.models", None)
    assert to_bif(get_model(bt.bayesuvius(4).sentence("a"))).startswith("network bayesuvius {\n}\nvariable c {")


def test_too_much_is_refused_before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise AssertionError("a run was made")

    monkeypatch.setattr(reference, "enumerate_runs", refuse)
    net = bt.bayesuvius(4, per="word", heads=3, observe=Categorical(5, pool="sum"))
    with pytest.raises(bt.BudgetError, match=rf"y: .*10,000,000 entries; got 16 dims and {5 * 3**15:,} entries"):
        to_pgmpy(get_model(net.sentence(["w"] * 15)))
    one_head = bt.bayesuvius(4, per="word", heads=1, observe=Categorical(1, pool="sum"))
    with pytest.raises(bt.BudgetError, match=r"at most 64 dims .* got 65 dims"):
        to_bif(get_model(one_head.sentence(["w"] * 64)))
    with pytest.raises(bt.BudgetError, match=r"y: .*got 71 dims and about 10\^"):
        to_bif(get_model(net.sentence(["w"] * 70)))
    two_words = get_model(net.sentence("a b"))
    with pytest.raises(bt.BudgetError, match=r"y: .*at most 64 dims and 44 entries; got 3 dims and 45 entries"):
        to_pgmpy(two_words, limit=44)
    with pytest.raises(bt.BudgetError, match="at most 50 entries in all tables; got 51 in 3 tables"):
        to_pgmpy(two_words, limit=50)
    with pytest.raises(bt.BudgetError, match=r"at most 9 runs, .*; got 10 runs"):
        to_pgmpy(two_words, runs=9)
    for bad in (0, -1, 2.5, None, "9"):
        with pytest.raises(bt.BNetError, match="limit"):
            to_pgmpy(two_words, limit=bad)  # type: ignore[arg-type]
    monkeypatch.undo()
    assert to_pgmpy(two_words, limit=51, runs=10).check_model()


def test_bad_input_is_refused() -> None:
    sentence = bt.bayesuvius(4, combine="concat").sentence("a b")
    with pytest.raises(bt.BNetError, match=r"at least one discrete random node. This net"):
        to_pgmpy(get_model(sentence))
    with pytest.raises(bt.BNetError, match=r"are continuous \(Normal\)"):
        to_bif(get_model(bt.bayesuvius(4, combine="concat", observe=Normal()).sentence("a")))
    net = bt.bayesuvius(4, observe=Categorical(2))
    sentence = net.sentence("a b")
    with pytest.raises(bt.EvidenceError, match=r"x_1_0: .*possible .*; got .*probability zero"):
        to_pgmpy(get_model(sentence), evidence=sentence.observe(x_1_0=torch.full((4,), 9.0)).state.evidence)


def test_tables_of_a_float32_net_sum_to_one() -> None:
    model = get_model(bt.bayesuvius(4, atoms=3, observe=Categorical(3)).sentence("a b"))
    for table in model_to_tables(model)[0]:
        assert math.isclose(table.values.sum(0).max(), 1, abs_tol=1e-6)
        assert table.values.dtype == np.float64 and table.values.shape[0] == len(table.states)


def test_states_of_a_word_that_is_read_are_the_words() -> None:
    case = next(case for case in CASES if case.name == "marginal")
    model = get_model(case.sentence)
    table = next(t for t in model_to_tables(model)[0] if t.name == "j_0_0")
    np.testing.assert_array_equal(table.values, [1, 0, 0])  # causal: the first word attends to itself
    assert table.states == ("0", "1", "2") and MAX_TABLE_DIMS == 64

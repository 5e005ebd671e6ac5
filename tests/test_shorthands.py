"""Shorthands of a sentence: all slices, slices from the end, scalars in `do`, names of nodes, most probable states."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.graph import NodeSelection
from bnet_transformer.interventions import Zero
from tests.cases import CASES, Case, close, get_case


def read_slices(s: bt.Sentence) -> list[torch.Tensor] | None:
    """The attention of each slice; None for a sentence without one attention TPM in each slice."""
    try:
        return [s.attention(t) for t in range(s.net.network.graph.depth)] or None
    except bt.BNetError:
        return None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_of_all_slices_stacks_the_slices(case: Case) -> None:
    s = case.sentence
    slices = read_slices(s)
    if slices is None or len({table.shape for table in slices}) > 1:
        with pytest.raises(bt.BNetError, match=r"slice|role"):
            s.attention()
        return
    close(s.attention(), torch.stack(slices))
    for t in range(len(slices)):
        assert torch.equal(s.attention(t - len(slices)), slices[t])
    assert s.explain("attention").is_exact


def test_slices_with_other_choices_of_equal_size_are_not_stacked() -> None:
    net = bt.bayesuvius(dim=4, heads=2, slices=2, per="slice")
    s = net.sentence("the cat sat")
    assert s.do(c_0=0).attention(1).shape == s.attention(0).shape == (2, 3, 3)
    with pytest.raises(bt.BNetError, match="slice=") as error:
        s.attention()
    assert "c_0, c_1" in str(error.value)
    assert s.do(c_0=0, c_1=1).attention().shape == (2, 3, 3)


def two_depths() -> bt.Sentence:
    """A net whose stacks differ in their number of slices."""
    net = bt.encoder_decoder(dim=4, heads=2, slices={"enc": 3, "dec": 2}, vocabulary=["the", "cat", "sat"])
    return net.sentence({"enc": "the cat sat", "dec": "the cat"})


@pytest.mark.parametrize("role, last", [("enc_a", 2), ("dec_a", 1)])
def test_a_negative_slice_counts_from_the_end_of_its_stack(role: str, last: int) -> None:
    s = two_depths()
    assert torch.equal(s.attention(-1, role=role), s.attention(last, role=role))
    assert s.reads(-1, role=role).slices == (last,)
    assert s.reads([-1, -2], role=role).slices == (last - 1, last)
    assert s.tan_tree(-1, role=role).slice == last
    stack = role.split("_")[0]
    boxes = [s.tan("roles", slice=t, stack=stack).quotient.boxes for t in (-1, last, 0)]
    assert boxes[0] == boxes[1] != boxes[2]
    roles = bt.roles(s.net, [{"enc": "the cat sat", "dec": "the cat"}], slices=-1, role=role, relations=["first"])
    assert roles.slices == (f"{role}_{last}",)
    with pytest.raises(bt.BNetError, match="slice"):
        s.attention(-last - 2, role=role)


def test_selections_and_results_count_slices_from_the_end() -> None:
    net = bt.decoder(dim=4, heads=2, slices=3, vocabulary=["the", "cat", "sat"], norm="pre")
    s, other = net.sentence("the cat sat"), net.sentence("the sat sat")
    assert s.state.selection(slices=[0, -1]) == NodeSelection([0, 2])
    assert set(s.graph(slices=-1)) == set(s.graph(slices=2)) != set(s.graph(slices=1))
    sweep = bt.sweep(s, other, at="a", over=("slice", "head"), metric={"y_2": "cat"})
    assert torch.equal(sweep.select(slice=-1, head=-2).effects, sweep.effects[2, 0])
    assert s.lens().top(-1, -1) == s.lens().top(3, 2)
    for bad in (-4, 3, True, 0.0):
        for call in (s.attention, s.reads, s.tan_tree, lambda t: s.tan(slice=t), lambda t: s.graph(slices=t)):
            with pytest.raises(bt.BNetError, match="slice"):
                call(bad)
        with pytest.raises(bt.BNetError, match="slice"):
            sweep.select(slice=bad)


def first_node_by_group(s: bt.Sentence) -> list[tuple[str, int, tuple[int, ...], bool]]:
    """The first node of each group: its name and id, its shape, and whether its values are states."""
    rows = []
    for spec in s.net.network.specs:
        node = int(s.ground.offsets[spec.group.index])
        is_discrete = spec.tpm.kind == "discrete" or spec.tpm.is_index_valued
        rows.append((s.ground.name(node), node, spec.shape, is_discrete))
    return rows


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_number_fills_the_shape_of_a_real_node_and_is_a_state_of_a_discrete_one(case: Case) -> None:
    s = case.sentence
    for name, node, shape, is_discrete in first_node_by_group(s):
        value = s.state.resolve_interventions({name: 0})[node]
        if is_discrete:
            assert value.dim() == 0 and not value.is_floating_point()
            with pytest.raises(bt.BNetError, match=name):
                s.do({name: 0.5})
            continue
        close(value, torch.zeros(shape))
        close(s.state.resolve_interventions({name: torch.tensor(-1.5)})[node], torch.full(shape, -1.5))
        for wrong in ([2.0] if shape != (1,) else [2.0, 2.0], [[2.0]], True):
            if shape:
                with pytest.raises(bt.BNetError, match="shape"):
                    s.do({name: wrong})


def test_a_number_is_zero_in_do_counterfactuals_sweeps_and_generation() -> None:
    s = get_case("chapter, real").sentence
    close(s.do({"v_0_*": 0})["x_1_2"], s.do({"v_0_*": Zero()})["x_1_2"])
    evidence = {"y_1": s.do(c=0)["x_1_1"] + 0.1}
    number, zero = (s.counterfactual("y_1", do={"v_0_1": value}, evidence=evidence) for value in (0, Zero()))
    close(number.values, zero.values)
    net = bt.decoder(dim=4, heads=2, slices=1, vocabulary=["the", "cat", "sat"]).to(torch.float64)
    cat, the = net.sentence("the cat"), net.sentence("cat the")
    pair = [[s.do({"a_0_1_*": value}) for s in (cat, the)] for value in (0, Zero())]
    sweeps = [bt.sweep(*sides, at="x", metric={"y_1": "sat"}).effects for sides in pair]
    close(*sweeps)
    runs = [net.generate("the cat", length=3, do={"a_0_1": value}) for value in (0, Zero())]
    close(runs[0].log_probs, runs[1].log_probs)
    with pytest.raises(bt.BNetError, match="shape"):
        cat.observe(x_1_0=0)


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_nodes_are_all_names_with_parents_first(case: Case) -> None:
    s = case.sentence
    names = list(s.nodes)
    position = {name: k for k, name in enumerate(names)}
    assert len(s.nodes) == len(position) == len(s.ground) and set(names) == set(s.ground.names)
    assert all(position[parent] < position[name] for name in names for parent in s.parents(name))
    assert s.nodes[-1] == names[-1] and s.nodes[1:4] == names[1:4] and names[-1] in s.nodes
    assert "missing_9" not in s.nodes and 3 not in s.nodes


def test_nodes_of_a_long_sentence_are_lazy() -> None:
    net = bt.decoder(dim=8, heads=8, slices=6, vocabulary=["the", "cat"])
    s = net.sentence(["the"] * 2000)
    s.ground.name = None  # type: ignore[assignment,method-assign]  # no name is computed
    assert len(s.nodes) == len(s.ground) > 300_000 and "a_5_7_1999" in s.nodes


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_top_sorts_the_posterior_of_every_discrete_node(case: Case) -> None:
    s = case.sentence.observe(case.evidence)
    kinds = {name: s.state.model.spec(s.ground.id(name)).tpm.kind for name, _, _, _ in first_node_by_group(s)}
    discrete = [name for name, kind in kinds.items() if kind == "discrete"]
    for name in {*discrete[:1], *discrete[-1:]}:
        expected = sorted(zip(s.labels(name), s.posterior(name).tolist(), strict=True), key=lambda pair: -pair[1])
        assert s.top(name, 2) == expected[:2] and s.top(name, 99) == expected
        assert s.explain("top", name) == s.explain("posterior", name)
    for name in [name for name, kind in kinds.items() if kind != "discrete"][-1:]:
        with pytest.raises(bt.BNetError, match=name):
            s.top(name)


def test_top_sums_latent_choices_and_takes_evidence() -> None:
    s = get_case("codebook").sentence
    by_choice = sum(p * s.posterior("y_0", {"W_q_0": k}) for k, p in enumerate(s.posterior("W_q_0")))
    close(dict(s.top("y_0", 3)), {str(k): float(p) for k, p in enumerate(by_choice)}, 1e-8)
    evidence = {"y_2": 1, "y_1": 0}
    close([p for _, p in s.top("W_q_0", 3, evidence)], s.posterior("W_q_0", evidence).sort(descending=True)[0].tolist())
    with pytest.raises(bt.BudgetError, match="joint states"):
        s.limits(budget=1).top("W_q_0", 2, evidence)
    with pytest.raises(bt.BNetError, match="one node"):
        s.top(["y_0", "y_1"])  # type: ignore[arg-type]


def test_tables_of_reads_without_special_tokens_show_their_mass() -> None:
    s = get_case("encoder, post-norm").sentence
    every = s.reads()
    assert every.special == (False,) * 3 and len(every.to_dataframe()) == 9
    reads = replace(s.reads(special=False), special=(True, False, True))
    assert torch.equal(reads.matrix, every.matrix)
    close(reads.special_mass, every.matrix[:, 0] + every.matrix[:, 2])
    rows = reads.to_dataframe()
    assert rows["output"].tolist() == [1, 1] and rows["source"].tolist() == [1, -1]
    close(rows["share"].tolist(), [float(every.matrix[1, 1]), float(reads.special_mass[1])])
    assert "special tokens" in reads._repr_html_() and "special tokens" not in every._repr_html_()
    with pytest.raises(bt.BNetError, match="special"):
        s.reads(special="no")  # type: ignore[arg-type]

"""Circuits of arrows: the batched search equals a plain greedy search; their graph, figures, numbers and errors.

`test_circuit_ablations` compares the runs with those of the reference, node by node.
"""

import re
from functools import cache

import networkx as nx
import numpy as np
import pytest
import torch

import bnet_transformer as bt
from benchmarks import induction
from bnet_transformer.compiler.module import find_default_output
from bnet_transformer.graph import ancestors
from bnet_transformer.interventions import Zero
from bnet_transformer.interventions.acdc import CircuitPairs
from bnet_transformer.interventions.circuit import FaithfulnessWarning
from tests.cases import CASES
from tests.sweep_oracle import get_refusal, make_metric

D = torch.float64
# Nets of every kind of arrow, and the threshold as a fraction of the total effect.
SHOWN = {
    "chapter, two slices": 0.02,
    "chapter, words": 0.3,
    "chapter, widths": 0.02,
    "codebook": 0.02,
    "word": 0.02,
    "concat": 0.02,
    "encoder, post-norm": 0.3,
    "three stacks": 0.02,
    "two selectors": 0.3,
    "gated": 0.3,
    "geometric, add": 0.02,
    "integrator": 0.3,
    "cayley": 0.02,
    "marginal": 0.02,
    "experts": 0.3,
    "shared slices": 0.02,
    "vanilla encoder, class": 0.02,
    "vanilla decoder, learned": 0.3,
}
BY_NAME = {case.name: case for case in CASES}


def search_plainly(runs, threshold):
    """The greedy search, one circuit at a time: the effects of all edges by name, and the retained edges."""
    clean, retained, effects = runs.evaluate_clean(), torch.ones(len(runs.edge_names), dtype=torch.bool), {}

    def distance(removed=None):
        mask = retained.clone()
        if removed is not None:
            mask[removed] = False
        return float((runs.evaluate(mask[None])[0] - clean).abs().mean())

    for group in reversed(runs.edge_groups):
        current = distance()
        estimates = {edge: round(distance(edge) - current, 9) for edge in group}
        for edge in sorted(group, key=estimates.get):
            effects[runs.edge_names[edge]] = increase = distance(edge) - current
            if increase < threshold:
                retained[edge] = False
                current += increase
    return effects, {runs.edge_names[edge] for edge in retained.nonzero().flatten().tolist()}


def rotate_words(text, shift):
    """Return another sentence of the same length: words of the same vocabulary, or other words."""
    if isinstance(text, dict):
        return {stack: rotate_words(words, shift) if k == 0 else words for k, (stack, words) in enumerate(text.items())}
    words = text.split() if isinstance(text, str) else list(text)
    rotated = [*words[1:], words[0]] if len(words) > 1 and shift == 0 else [words[0], *words[1:-1], words[0]]
    return " ".join(rotated) if isinstance(text, str) else rotated


def set_choices(net, s):
    """Return the sentence with every latent ancestor of its outcome set."""
    outcome = find_default_output(net.network)
    random = [spec for spec in net.network.specs if spec.tpm.kind == "discrete" and spec.group.name != outcome]
    return s.do({spec.group.name: 1 if spec.tpm.states is not None else 0 for spec in random}) if random else s


@cache
def examples(name):
    """Two clean and two corrupt sentences of a case, and the outcomes at its first and last word."""
    case = BY_NAME[name]
    net, text = case.net, case.text
    sentences = [set_choices(net, net.sentence(t)) for t in (text, rotate_words(text, 1), rotate_words(text, 0))]
    ground = sentences[0].ground
    nodes = ground.select_nodes(net.network.get_spec(find_default_output(net.network)).group).tolist()
    return sentences[:2], [sentences[2]] * 2, list(dict.fromkeys([nodes[0], nodes[-1]]))


def metric_of(s, nodes):
    return make_metric([s.ground.name(node) for node in nodes])


def build_runs(clean, corrupt, nodes, over=None, candidates=None, memory=2**29):
    return CircuitPairs.parse(
        clean, corrupt, metric_of(clean[0], nodes), "arrows", over, candidates, memory
    ).build_runs()


def check(clean, corrupt, nodes, fraction, **options):
    """Assert that the search equals the greedy one: effects, edges, and the final run."""
    runs = build_runs(clean, corrupt, nodes, **options)
    threshold = fraction * float((runs.evaluate_corrupt() - runs.evaluate_clean()).abs().mean())
    effects, retained = search_plainly(runs, threshold)
    result = bt.circuit(clean, corrupt, metric=metric_of(clean[0], nodes), threshold=threshold, **options)
    assert result.effects == pytest.approx(effects, abs=1e-9, rel=1e-10)
    assert {*result.retained} == retained and result.edges == len(retained)
    mask = torch.tensor([[name in retained for name in runs.edge_names]])
    close(result.outcome, runs.evaluate(mask)[0])
    close(result.clean, runs.evaluate_clean())
    return result, runs


def close(one, other, atol=1e-10):
    torch.testing.assert_close(one.to(D), other.to(D), rtol=1e-10, atol=atol)


@pytest.mark.parametrize(
    ("name", "fraction"),
    [pytest.param(*item, marks=[pytest.mark.slow] * (k % 4 > 0)) for k, item in enumerate(SHOWN.items())],
)
def test_the_batched_search_is_the_plain_greedy_one(name, fraction):
    clean, corrupt, nodes = examples(name)
    check(clean, corrupt, nodes if fraction < 0.1 else nodes[-1:], fraction)


@pytest.mark.parametrize("over", [["slice"], ["slice", "head"], ["slice", "word"]])
def test_arrows_joined_go_together(over):
    result, _ = check(*examples("concat"), 0.1, over=over)
    assert result.over == tuple(over) and all("*" in edge for edge in result.effects if edge.startswith("v"))
    assert all("*" not in arrow for arrow in result.arrows)


def test_arrows_that_are_no_candidates_stay():
    clean, corrupt, nodes = examples("concat")
    result, _ = check(clean, corrupt, nodes, 0.1, candidates=["v -> a", "k -> a"])
    assert {edge[0] for edge in result.effects} == {"v", "k"}
    fixed = {arrow for arrow in result.arrows if result.edge_of[arrow] is None}
    assert any(arrow.startswith("x") for arrow in fixed)
    assert all(result.graph.edges[tuple(arrow.split(" -> "))]["effect"] is None for arrow in fixed)
    assert bt.circuit(clean, corrupt, metric=metric_of(clean[0], nodes), threshold=1, candidates="v -> a").candidates


@pytest.mark.parametrize("name", SHOWN)
def test_edges_are_the_arrows_below_words_that_differ(name):
    clean, corrupt, nodes = examples(name)
    runs, ground, graph = build_runs(clean, corrupt, nodes), clean[0].ground, nx.DiGraph()
    for _, sources, targets in ground.arrows():
        graph.add_edges_from(zip(sources.tolist(), targets.tolist(), strict=True))
    first = set()
    for one, two in zip(clean, corrupt, strict=True):
        words = (set(item.state.model.inputs) for item in (one, two))
        for group in set.union(*words):
            values = (item.state.model.inputs[group] for item in (one, two))
            differs = torch.ne(*values).reshape(*ground.shapes[ground.template.by_name[group].index], -1).any(-1)
            offset = int(ground.offsets[ground.template.by_name[group].index])
            first |= {offset + k for k in differs.flatten().nonzero().flatten().tolist()}
    below = first.union(*(nx.descendants(graph, node) for node in first))
    above = {*nodes}.union(*(nx.ancestors(graph, node) for node in nodes))
    expected = {(a, b) for a, b in graph.edges if a in below and b in above}
    assert {tuple(map(ground.id, edge.split(" -> "))) for edge in runs.edge_names} == expected


def test_the_circuit_as_a_graph():
    clean, corrupt, nodes = examples("encoder, pre-norm")
    result = bt.circuit(clean, corrupt, metric=metric_of(clean[0], nodes[-1:]), threshold=0.002)
    graph, ground = result.graph, clean[0].ground
    retained = {tuple(map(ground.id, edge.split(" -> "))) for edge in result.retained}
    circuit = nx.DiGraph(sorted(retained))
    starts = {n for n in circuit if ground.name(n).startswith("token")}
    beneath = starts.union(*(nx.descendants(circuit, n) for n in starts))
    above = nx.ancestors(circuit, nodes[-1]) | {nodes[-1]}
    expected = {(a, b) for a, b in retained if a in beneath and b in above}
    assert {(ground.id(a), ground.id(b)) for a, b in graph.edges} == expected
    name = next(n for n in graph if n.startswith("a_0"))
    _, _, head, word = name.split("_")
    data = clean[0].graph().nodes[name]
    node = graph.nodes[name]
    assert (node["role"], node["slice"], node["head"], node["word"]) == ("a", 0, int(head), int(word))
    assert all(node[key] == data[key] for key in ("index", "plates", "stack"))
    assert node["token"] is None and data["label"] == f'{node["label"]} "{data["token"]}"'  # the examples differ
    assert {node["part"] for n, node in graph.nodes(data=True) if n.startswith("token")} == {"differs"}
    assert [n for n, node in graph.nodes(data=True) if node["part"] == "outcome"] == [ground.name(nodes[-1])]
    for a, b, arrow in graph.edges(data=True):
        assert arrow["effect"] == result.effects[f"{a} -> {b}"] >= result.threshold


def net_picture(s, result):
    return s.net.picture(highlight=result)


def test_the_circuit_is_drawn_and_printed(tmp_path):
    clean, corrupt, nodes = examples("encoder, pre-norm")
    result = bt.circuit(clean[0], corrupt[0], metric=metric_of(clean[0], nodes[-1:]), threshold=0.2)
    s = clean[0]
    picture = s.picture(only=result.graph)
    assert {(a.source, a.target) for a in picture.arrows} == set(result.graph.edges)
    for subject in (result, result.arrows):
        picture = s.picture(highlight=subject, weights=False)
        assert {box.name for box in picture.boxes if not box.is_faded} == set(result.nodes)
        assert {(a.source, a.target) for a in picture.arrows if a.opacity == 1.0} >= set(result.graph.edges)
    picture = s.picture(highlight=result, detail="folded", legend=False)
    groups = {name: s.ground.group_of(s.ground.id(name)).name for name in result.nodes}
    assert {box.name for box in picture.boxes if not box.is_faded} == set(groups.values())
    marked = {(a.source, a.target) for a in picture.arrows if a.opacity == 1.0}
    assert marked == {(groups[a], groups[b]) for a, b in result.graph.edges}
    assert {box.name for box in net_picture(s, result).boxes if not box.is_faded} == set(groups.values())
    picture = s.picture(highlight=result, detail="words")
    states = {name for name in result.nodes if name.startswith("x_")}
    assert {box.name for box in picture.boxes if not box.is_faded} == states
    picture = s.picture(highlight=result, detail="nodes")
    assert {box.name for box in picture.boxes if not box.is_faded} == set(result.nodes)
    frame = result.to_dataframe()
    assert list(frame["edge"]) == list(result.effects) and frame["kept"].sum() == result.edges
    assert len(frame) == result.candidates
    assert f"{result.edges} of {result.candidates}" in repr(result)


def test_numbers_of_a_circuit():
    clean, corrupt, nodes = examples("concat")
    result, runs = check(clean, corrupt, nodes, 0.1)
    close(result.corrupt, runs.evaluate_corrupt())
    restored = (result.outcome - result.corrupt).mean() / (result.clean - result.corrupt).mean()
    assert result.faithfulness == pytest.approx(float(restored))
    assert result.distance == pytest.approx(float((result.outcome - result.clean).abs().mean()))
    ground, relevant = clean[0].ground, {*nodes, *ancestors(clean[0].ground, nodes)}
    count = sum(int(np.isin(targets, list(relevant)).sum()) for _, _, targets in ground.arrows())
    assert result.idle == count - len(runs.edge_names)
    with pytest.warns(FaithfulnessWarning):
        same = bt.circuit(clean, corrupt, metric=lambda x_1_0: 0 * x_1_0[:, 0], threshold=0.0)
    assert np.isnan(same.faithfulness) and same.edges + sum(e == 0 for e in same.effects.values()) >= same.candidates
    empty = bt.circuit(clean, corrupt, metric=metric_of(clean[0], nodes), threshold=1e9)
    assert empty.edges == 0 and not empty.arrows and not len(empty.graph) and empty.faithfulness == pytest.approx(0)
    close(empty.outcome, empty.corrupt)


def test_what_is_refused():
    clean, corrupt, nodes = examples("chapter, two slices")
    open_ = [s.undo("c") for s in corrupt]
    for sides, options, message in [
        ((clean, open_), {}, r"clean and corrupt by do\(c=...\)"),
        (([s.observe(y_0=1) for s in clean], corrupt), {}, "evidence"),
        ((clean, corrupt), {"over": ["slice", "head"]}, "over"),
        ((clean, corrupt), {"candidates": ["v -> z"]}, "candidates"),
        ((clean, clean), {}, "corrupt"),
        ((clean, corrupt), {"candidates": ["W_q -> q"]}, "none of the candidates"),
        (([clean[0], clean[1].do(x_1_0=Zero())], corrupt), {}, "the same nodes"),
    ]:
        kwargs = {"metric": metric_of(clean[0], nodes), "threshold": 0.1, **options}
        assert re.search(message, get_refusal(bt.circuit, *sides, **kwargs)), message


def test_words_that_are_computed_one_after_another_are_refused():
    net = BY_NAME["recurrent"].net
    with pytest.raises(bt.UnsupportedError, match=r"h_0: circuits cannot contain a recurrent node group"):
        bt.circuit(net.sentence("a b c"), net.sentence("d b c"), metric=lambda y_2: y_2[:, 0], threshold=0.1)


def test_a_choice_that_picks_must_be_the_same():
    net = BY_NAME["word"].net
    s = net.sentence("the cat sat")
    one, other = s.do(c_0=1), s.do(c_0=1).undo("c_0_2").do(c_0_2=0)
    with pytest.raises(bt.UnsupportedError, match=r"c_0 -> x_1: the selector c_0 differs"):
        bt.circuit(one, other, metric={"y_2": 1}, threshold=0.1)


def test_the_induction_net_by_hand():
    net = induction.build_net()
    prompts = induction.Prompts.sample(5, 8, seed=3)
    result, heads = induction.find_circuit(net, prompts), induction.find_planted_heads(net, prompts)
    assert heads == ([0], [0])
    expected = induction.name_planted_arrows("v", 5, heads) | induction.name_planted_arrows("k", 5, heads)
    assert expected == {"v_0_0_5 -> a_0_0_6", "v_1_0_6 -> a_1_0_11", "k_1_0_6 -> a_1_0_11"}
    retained = {edge for edge in result.retained if " -> a_" in edge}
    assert expected <= retained and len(retained - expected) <= 2 and expected <= set(result.arrows)
    assert result.edges < result.candidates / 10 and abs(result.faithfulness - 1) < 0.05
    areas = induction.measure_areas(net, positions=(5,))
    for roles in ("v", "k", "v and k"):
        circuit_auc, attention, rollout = (areas[f"AUC of {roles} -> a, {score}"][0] for score in induction.SCORES)
        assert circuit_auc == 1.0 and circuit_auc > rollout > attention


@pytest.mark.slow
def test_the_induction_net_that_has_learned_it():
    net = induction.train_net(steps=600)
    prompts = induction.Prompts.sample(4, 8, seed=3)
    correct = net.module()(prompts.clean)[:, -1].argmax(-1) == prompts.clean[:, 5]
    assert correct.double().mean() > 0.9
    result, heads = induction.find_circuit(net, prompts), induction.find_planted_heads(net, prompts)
    assert heads[0] and heads[1]
    for role in ("v", "k"):
        rows = induction.score_arrows(net, prompts, result, role)
        expected = induction.name_planted_arrows(role, 4, heads)
        assert expected <= set(result.retained)
        area = induction.roc_auc([name in expected for name in rows], [row[0] for row in rows.values()])
        assert area > 0.98
    assert abs(result.faithfulness - 1) < 0.1


@pytest.mark.parametrize("states", [3, 4])  # as many states as words, or more
def test_all_edges_are_the_net_where_do_set_a_word_of_the_readout(states):
    net = bt.decoder(4, heads=2, slices=1, hidden=8, vocabulary=["the", "cat", "sat", "on"][:states]).to(torch.float64)
    clean, corrupt = (net.sentence(words).do(y_1=0) for words in ("the cat sat", "cat the sat"))
    result = bt.circuit(clean, corrupt, metric={"y_2": (0, 1)}, threshold=1e-12)
    assert result.faithfulness == pytest.approx(1, abs=1e-6)

"""Circuits: the batched search equals a plain greedy search, node by node with the TPMs of the reference."""

import re
from functools import cache

import networkx as nx
import numpy as np
import pytest
import torch

import bnet_transformer as bt
from benchmarks import induction
from bnet_transformer import reference
from bnet_transformer.compiler.module import find_default_output
from bnet_transformer.graph import ancestors, topological_order
from bnet_transformer.interventions import Attend, Zero
from bnet_transformer.interventions.acdc import CircuitPairs
from bnet_transformer.interventions.circuit import FaithfulnessWarning
from tests.cases import CASES
from tests.sweep_oracle import get_refusal, make_metric, nonlinear

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
LONG = ("chapter", "positioned", "encoder, pre-norm", "encoder-decoder")
BY_NAME = {case.name: case for case in CASES}


class CircuitOracle:
    """One example: runs of both sentences, and of any circuit, as dictionaries of the values of nodes."""

    def __init__(self, clean, corrupt):
        self.model, self.ground = clean.state.model, clean.ground
        self.clean, self.corrupt = (reference.ReferenceRun(sentence.state.model, {}) for sentence in (clean, corrupt))
        self.order = topological_order(self.ground).tolist()
        self.parents = {node: reference.parents(self.model, node) for node in self.order}
        self.known = {}

    def get_outputs(self, removed, nodes):
        """Return the outputs of nodes without these arrows; for a random node its log probabilities or its mean."""
        relevant = {*nodes, *ancestors(self.ground, nodes)}
        removed_parents = {}
        for source, target in removed:
            removed_parents.setdefault(target, set()).add(source)
        values, signatures = {}, {}
        for node in (node for node in self.order if node in relevant):
            parents, cut = self.parents[node], removed_parents.get(node, set())
            retained = [(p, signatures[p]) for p in parents if p not in cut]
            signatures[node] = hash(
                (node, frozenset(cut), tuple(retained))
            )  # the removed arrows above it, the key of its cached value
            if signatures[node] not in self.known:
                run = reference.ReferenceRun(self.model, {})
                run.values = {p: self.corrupt.value(p) if p in cut else values[p] for p in parents}
                self.known[signatures[node]] = self._get_output(run, node)
            values[node] = self.known[signatures[node]]
        return [values[node] for node in nodes]

    def _get_output(self, run, node):
        if not self._is_random(node):
            return run._compute_value(node)
        distribution = run.distribution(node)
        return distribution.logits if hasattr(distribution, "logits") else distribution.mean

    def _is_random(self, node):
        spec = self.model.network.specs[self.ground.group_of(node).index]
        return spec.tpm.is_random and node not in self.model.do


def find_differing(oracle):
    """The nodes whose value differs, or may differ in a run between the two."""
    live = set()
    for node in oracle.order:
        clean_do, corrupt_do = ({**run.model.do, **run.model.attention_rows} for run in (oracle.clean, oracle.corrupt))
        if (node in clean_do) != (node in corrupt_do) or live & set(oracle.parents[node]):
            live.add(node)
        elif not oracle.parents[node] and not oracle._is_random(node):
            live |= set() if torch.equal(oracle.clean.value(node), oracle.corrupt.value(node)) else {node}
    return live


def format_edge_end(ground, node, over):
    """The name of a node, with a star for each index along which arrows are grouped."""
    group, index = ground.unravel_index(node)
    indices = [i if over is None or a in over else "*" for a, i in zip(ground.axes(group), index, strict=True)]
    return "_".join(map(str, [group.name, *indices]))


class GreedySearch:
    """The greedy search in plain Python, one circuit at a time."""

    def __init__(self, clean, corrupt, nodes, metric, threshold, over=None, candidates=None):
        self.runs = [CircuitOracle(*pair) for pair in zip(clean, corrupt, strict=True)]
        self.nodes, self.metric = nodes, metric
        ground = self.runs[0].ground
        live = set().union(*map(find_differing, self.runs))
        relevant = {*nodes, *ancestors(ground, nodes)}
        edges = {}
        self.always = set()
        for _, sources, targets in ground.arrows():
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                if source in live and target in relevant:
                    roles = " -> ".join(ground.unravel_index(node)[0].stem for node in (source, target))
                    if candidates is None or roles in candidates:
                        name = " -> ".join(format_edge_end(ground, node, over) for node in (source, target))
                        group = ground.group_of(target).index
                        edges.setdefault(group, {}).setdefault(name, set()).add((source, target))
                    else:
                        self.always.add((source, target))
        self.all_arrows = set().union(*(a for group in edges.values() for a in group.values()))
        self.clean = self.evaluate(set())
        self.removed, self.effects, self.retained = set(), {}, []
        for group in sorted(edges, reverse=True):
            self.search_group(edges[group], threshold)

    def evaluate(self, removed):
        """The metric without these arrows, for each example."""
        outputs = [run.get_outputs(removed, self.nodes) for run in self.runs]
        return self.metric(*(torch.stack(values) for values in zip(*outputs, strict=True)))

    def distance(self, removed):
        return float((self.evaluate(removed) - self.clean).abs().mean())

    def search_group(self, edges, threshold):
        below = set(self.nodes)
        for source, target in sorted(self.all_arrows | self.always, key=lambda arrow: -arrow[1]):
            if (source, target) not in self.removed and target in below:
                below.add(source)
        for name, arrows in edges.items():
            if not any(target in below for _, target in arrows):
                self.effects[name] = 0.0
                self.removed |= arrows
        remaining = [name for name in edges if name not in self.effects]
        current = self.distance(self.removed)
        estimates = {name: round(self.distance(self.removed | edges[name]) - current, 9) for name in remaining}
        for name in sorted(remaining, key=lambda name: estimates[name]):
            increase = self.distance(self.removed | edges[name]) - current
            self.effects[name] = increase
            if increase < threshold:
                self.removed |= edges[name]
                current += increase
            else:
                self.retained.append(name)


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


def check(clean, corrupt, nodes, fraction, **options):
    """Assert that the search equals the greedy one: edges, their order and effects, and the final run."""
    options_ = {"over": options.get("over"), "candidates": options.get("candidates")}
    full_search = GreedySearch(clean, corrupt, nodes, nonlinear, float("inf"), **options_)
    threshold = fraction * float((full_search.evaluate(full_search.removed) - full_search.clean).abs().mean())
    search = GreedySearch(clean, corrupt, nodes, nonlinear, threshold, **options_)
    result = bt.circuit(clean, corrupt, metric=metric_of(clean[0], nodes), threshold=threshold, **options)
    assert list(result.effects) == list(search.effects)
    close(torch.tensor(list(result.effects.values())), torch.tensor(list(search.effects.values())), atol=1e-9)
    assert list(result.retained) == search.retained and result.edges == len(search.retained)
    close(result.outcome, search.evaluate(search.removed))
    close(result.clean, search.clean)
    return result, search


def close(one, other, atol=1e-10):
    torch.testing.assert_close(one.to(D), other.to(D), rtol=1e-10, atol=atol)


@pytest.mark.parametrize(
    ("name", "fraction"),
    [pytest.param(*item, marks=[pytest.mark.slow] * (k % 4 > 0)) for k, item in enumerate(SHOWN.items())],
)
def test_the_batched_search_is_the_plain_greedy_one(name, fraction):
    clean, corrupt, nodes = examples(name)
    check(clean, corrupt, nodes if fraction < 0.1 else nodes[-1:], fraction)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHOWN, *LONG])
def test_the_batched_search_at_both_thresholds(name):
    clean, corrupt, nodes = examples(name)
    check(clean, corrupt, nodes, 0.02)
    check(clean, corrupt, nodes[-1:], 0.3)


def test_the_memory_limit_does_not_change_the_result():
    clean, corrupt, nodes = examples("concat")
    kwargs = {"metric": metric_of(clean[0], nodes), "threshold": 0.1}
    expected = bt.circuit(clean, corrupt, **kwargs)
    for memory in (1, 2**14):
        small = bt.circuit(clean, corrupt, memory=memory, **kwargs)
        assert list(small.effects) == list(expected.effects) and small.retained == expected.retained
        close(torch.tensor(list(small.effects.values())), torch.tensor(list(expected.effects.values())))


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


@pytest.mark.slow
def test_surgery_counts():
    """Nodes that are set, or have an intervened row of attention: in both sentences, in one, to different values."""
    clean, corrupt, nodes = examples("chapter, two slices")
    row, other_row = Attend([0.2, 0.5, 0.3]), Attend([0.6, 0.1, 0.3])
    clean_s, corrupt_s = clean[0], corrupt[0]
    check([s.do(x_1_1=Zero()) for s in clean], [s.do(x_1_1=Zero()) for s in corrupt], nodes, 0.1)
    check([clean_s.do(x_1_1=Zero())], [corrupt_s], nodes, 0.1)
    check([clean_s], [clean_s.do(q_1_2=Zero(), x_1_0=Zero())], nodes, 0.1)
    check([clean_s.do(c=1)], [clean_s.do(c=0)], nodes, 0.1)
    check([clean_s.do(x_1_2=row)], [corrupt_s.do(x_1_2=other_row)], nodes, 0.1)
    check([clean_s.do(x_2_2=row)], [corrupt_s.do(x_2_2=row)], nodes[-1:], 0.1)


@pytest.mark.parametrize("name", SHOWN)
def test_all_arrows_are_the_clean_run_and_none_the_corrupt_one(name):
    clean, corrupt, nodes = examples(name)
    runs = CircuitPairs.parse(clean, corrupt, metric_of(clean[0], nodes), "arrows", None, None, 2**29).build_runs()
    close(runs.evaluate(torch.ones(1, len(runs.edge_names), dtype=torch.bool))[0], runs.evaluate_clean())
    close(runs.evaluate(torch.zeros(1, len(runs.edge_names), dtype=torch.bool))[0], runs.evaluate_corrupt())


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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (k % 3 > 0)) for k, name in enumerate(SHOWN)]
)
def test_any_masks_in_one_batch_are_the_circuits_of_the_reference(name):
    clean, corrupt, nodes = examples(name)
    runs = CircuitPairs.parse(clean, corrupt, metric_of(clean[0], nodes), "arrows", None, None, 2**29).build_runs()
    ground, oracles = clean[0].ground, [CircuitOracle(*pair) for pair in zip(clean, corrupt, strict=True)]
    shares = torch.tensor([0.3, 0.8, 0.95, 0.99])[:, None]
    masks = torch.rand(4, len(runs.edge_names), generator=torch.Generator().manual_seed(0)) < shares
    for side, swapped in ((runs, False), (runs.swap(), True)):
        if swapped:
            oracles = [CircuitOracle(*pair) for pair in zip(corrupt, clean, strict=True)]
        for mask, actual in zip(masks, side.evaluate(masks), strict=True):
            cut = [name for name, retained in zip(runs.edge_names, mask.tolist(), strict=True) if not retained]
            removed = {tuple(map(ground.id, edge.split(" -> "))) for edge in cut}
            outputs = [oracle.get_outputs(removed, nodes) for oracle in oracles]
            close(actual, nonlinear(*(torch.stack(values) for values in zip(*outputs, strict=True))))
        limited = CircuitPairs.parse(clean, corrupt, metric_of(clean[0], nodes), "arrows", None, None, 1).build_runs()
        close((limited.swap() if swapped else limited).evaluate(masks), side.evaluate(masks))


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
    result, search = check(clean, corrupt, nodes, 0.1)
    corrupt_value = search.evaluate(search.all_arrows)
    close(result.corrupt, corrupt_value)
    restored = (search.evaluate(search.removed) - corrupt_value).mean() / (search.clean - corrupt_value).mean()
    assert result.faithfulness == pytest.approx(float(restored))
    assert result.distance == pytest.approx(search.distance(search.removed))
    ground, relevant = clean[0].ground, {*nodes, *ancestors(clean[0].ground, nodes)}
    count = sum(int(np.isin(targets, list(relevant)).sum()) for _, _, targets in ground.arrows())
    assert result.idle == count - len(search.all_arrows)
    with pytest.warns(FaithfulnessWarning, match="the same in the clean and the corrupt run"):
        same = bt.circuit(clean, corrupt, metric=lambda x_1_0: 0 * x_1_0[:, 0], threshold=0.0)
    assert np.isnan(same.faithfulness) and same.edges + sum(e == 0 for e in same.effects.values()) >= same.candidates
    empty = bt.circuit(clean, corrupt, metric=metric_of(clean[0], nodes), threshold=1e9)
    assert empty.edges == 0 and not empty.arrows and not len(empty.graph) and empty.faithfulness == pytest.approx(0)
    close(empty.outcome, empty.corrupt)


def test_what_is_refused():
    clean, corrupt, nodes = examples("chapter, two slices")
    open_ = [s.undo("c") for s in corrupt]
    for sides, options, message in [
        ((open_, open_), {}, r"clean and corrupt by do\(c=...\)"),
        ((clean, open_), {}, r"clean and corrupt by do\(c=...\)"),
        (([s.observe(y_0=1) for s in clean], corrupt), {}, "without evidence"),
        ((clean, corrupt), {"threshold": -1}, "threshold: .*at least 0"),
        ((clean, corrupt), {"over": ["slice", "head"]}, r"over.*'slice'"),
        ((clean, corrupt), {"candidates": ["v -> z"]}, r"candidates: .*'v -> z'.*near matches are v -> x"),
        ((clean, clean), {}, "corrupt: .*do not differ"),
        ((clean, corrupt), {"candidates": ["W_q -> q"]}, "corrupt: none of the candidates"),
        ((clean, corrupt[:1]), {}, r"2 sentences|as many"),
        (([clean[0], clean[1].do(x_1_0=Zero())], corrupt), {}, "the same nodes"),
        ((clean, corrupt), {"metric": {"y_9": 1}}, "y_9"),
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
    prompts = induction.Prompts.sample(4, 16, seed=3)
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

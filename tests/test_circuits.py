"""Circuits: the batched search against a plain greedy one, node by node with the reference's own TPMs."""

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
from bnet_transformer.interventions.circuits.arrows import find_circuit_arrows, parse_edge_axes
from bnet_transformer.interventions.circuits.runner import build_runner
from bnet_transformer.interventions.sweeps.examples import parse_example_pair, parse_metric as measure_of
from tests.cases import CASES
from tests.sweep_oracle import get_refusal, make_metric, nonlinear

D = torch.float64
# Nets of every kind of arrow, and the share of the whole effect that is the threshold.
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


class Slow:
    """One example: runs of both sentences, and of any circuit, as dictionaries of the values of nodes."""

    def __init__(self, clean, corrupt):
        self.model, self.ground = clean.state.model, clean.ground
        self.clean, self.corrupt = (reference.ReferenceRun(item.state.model, {}) for item in (clean, corrupt))
        self.order = topological_order(self.ground).tolist()
        self.parents = {node: reference.parents(self.model, node) for node in self.order}
        self.known = {}

    def told(self, removed, nodes):
        """What some nodes come to if these arrows are gone; a random one by its log P, or mean."""
        above = {*nodes, *ancestors(self.ground, nodes)}
        into = {}
        for source, target in removed:
            into.setdefault(target, set()).add(source)
        values, hangs = {}, {}
        for node in (node for node in self.order if node in above):
            parents, local = self.parents[node], into.get(node, set())
            retained = [(p, hangs[p]) for p in parents if p not in local]
            hangs[node] = hash(
                (node, frozenset(local), tuple(retained))
            )  # what is gone above it: its value is kept by that
            if hangs[node] not in self.known:
                single = reference.ReferenceRun(self.model, {})
                single.values = {p: self.corrupt.value(p) if p in local else values[p] for p in parents}
                self.known[hangs[node]] = self._of(single, node)
            values[node] = self.known[hangs[node]]
        return [values[node] for node in nodes]

    def _of(self, run, node):
        if not self._random(node):
            return run._compute_value(node)
        distribution = run.distribution(node)
        return distribution.logits if hasattr(distribution, "logits") else distribution.mean

    def _random(self, node):
        member = self.model.network.specs[self.ground.group_of(node).index]
        return member.tpm.is_random and node not in self.model.do


def differing(slow):
    """The nodes whose value differs, or may differ in a run between the two."""
    live = set()
    for node in slow.order:
        actual, peer = ({**run.model.do, **run.model.attention_rows} for run in (slow.clean, slow.corrupt))
        if (node in actual) != (node in peer) or live & set(slow.parents[node]):
            live.add(node)
        elif not slow.parents[node] and not slow._random(node):
            live |= set() if torch.equal(slow.clean.value(node), slow.corrupt.value(node)) else {node}
    return live


def starred(ground, node, over):
    """The name of a node, with a star for each index along which arrows are joined."""
    family, index = ground.unravel_index(node)
    given = [i if over is None or a in over else "*" for a, i in zip(ground.axes(family), index, strict=True)]
    return "_".join(map(str, [family.name, *given]))


class Greedy:
    """The search as one would write it down, one circuit at a time."""

    def __init__(self, clean, corrupt, nodes, metric, threshold, over=None, candidates=None):
        self.runs = [Slow(*both) for both in zip(clean, corrupt, strict=True)]
        self.nodes, self.metric = nodes, metric
        ground = self.runs[0].ground
        live = set().union(*map(differing, self.runs))
        above = {*nodes, *ancestors(ground, nodes)}
        edges = {}
        self.always = set()
        for _, sources, targets in ground.arrows():
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                if source in live and target in above:
                    roles = " -> ".join(ground.unravel_index(node)[0].stem for node in (source, target))
                    if candidates is None or roles in candidates:
                        name = " -> ".join(starred(ground, node, over) for node in (source, target))
                        family = ground.group_of(target).index
                        edges.setdefault(family, {}).setdefault(name, set()).add((source, target))
                    else:
                        self.always.add((source, target))
        self.all_arrows = set().union(*(a for family in edges.values() for a in family.values()))
        self.clean = self.of(set())
        self.gone, self.effects, self.kept = set(), {}, []
        for family in sorted(edges, reverse=True):
            self.one_family(edges[family], threshold)

    def of(self, removed):
        """The metric without these arrows, for each example."""
        given = [run.told(removed, self.nodes) for run in self.runs]
        return self.metric(*(torch.stack(item) for item in zip(*given, strict=True)))

    def distance(self, removed):
        return float((self.of(removed) - self.clean).abs().mean())

    def one_family(self, edges, threshold):
        below = set(self.nodes)
        for source, target in sorted(self.all_arrows | self.always, key=lambda arrow: -arrow[1]):
            if (source, target) not in self.gone and target in below:
                below.add(source)
        for name, arrows in edges.items():
            if not any(target in below for _, target in arrows):
                self.effects[name] = 0.0
                self.gone |= arrows
        remainder = [name for name in edges if name not in self.effects]
        current = self.distance(self.gone)
        single = {name: round(self.distance(self.gone | edges[name]) - current, 9) for name in remainder}
        for name in sorted(remainder, key=lambda name: single[name]):
            rise = self.distance(self.gone | edges[name]) - current
            self.effects[name] = rise
            if rise < threshold:
                self.gone |= edges[name]
                current += rise
            else:
                self.kept.append(name)


def turned(text, shift):
    """Another sentence of the same length: words of the same vocabulary, or others."""
    if isinstance(text, dict):
        return {stack: turned(words, shift) if k == 0 else words for k, (stack, words) in enumerate(text.items())}
    words = text.split() if isinstance(text, str) else list(text)
    other = [*words[1:], words[0]] if len(words) > 1 and shift == 0 else [words[0], *words[1:-1], words[0]]
    return " ".join(other) if isinstance(text, str) else other


def settled(net, s):
    """The sentence with every choice above its outcome set."""
    outcome = find_default_output(net.network)
    random = [m for m in net.network.specs if m.tpm.kind == "discrete" and m.group.name != outcome]
    return s.do({m.group.name: 1 if m.tpm.states is not None else 0 for m in random}) if random else s


@cache
def examples(name):
    """Two clean and two corrupt sentences of a case, and the outcomes at its first and last word."""
    case = BY_NAME[name]
    net, text = case.net, case.text
    sentences = [settled(net, net.sentence(words)) for words in (text, turned(text, 1), turned(text, 0))]
    ground = sentences[0].ground
    nodes = ground.select_nodes(net.network.get_spec(find_default_output(net.network)).group).tolist()
    return sentences[:2], [sentences[2]] * 2, list(dict.fromkeys([nodes[0], nodes[-1]]))


def metric_of(s, nodes):
    return make_metric([s.ground.name(node) for node in nodes])


def check(clean, corrupt, nodes, share, **options):
    """The search beside the plain one: the same edges in the same order, the same effects, the same run."""
    both = {"over": options.get("over"), "candidates": options.get("candidates")}
    full = Greedy(clean, corrupt, nodes, nonlinear, float("inf"), **both)
    threshold = share * float((full.of(full.gone) - full.clean).abs().mean())
    slow = Greedy(clean, corrupt, nodes, nonlinear, threshold, **both)
    result = bt.circuit(clean, corrupt, metric=metric_of(clean[0], nodes), threshold=threshold, **options)
    assert list(result.effects) == list(slow.effects)
    close(torch.tensor(list(result.effects.values())), torch.tensor(list(slow.effects.values())), atol=1e-9)
    assert list(result.retained) == slow.kept and result.edges == len(slow.kept)
    close(result.outcome, slow.of(slow.gone))
    close(result.clean, slow.clean)
    return result, slow


def close(one, other, atol=1e-10):
    torch.testing.assert_close(one.to(D), other.to(D), rtol=1e-10, atol=atol)


@pytest.mark.parametrize(
    ("name", "share"),
    [pytest.param(*item, marks=[pytest.mark.slow] * (k % 4 > 0)) for k, item in enumerate(SHOWN.items())],
)
def test_the_batched_search_is_the_plain_greedy_one(name, share):
    clean, corrupt, nodes = examples(name)
    check(clean, corrupt, nodes if share < 0.1 else nodes[-1:], share)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHOWN, *LONG])
def test_the_batched_search_at_both_thresholds(name):
    clean, corrupt, nodes = examples(name)
    check(clean, corrupt, nodes, 0.02)
    check(clean, corrupt, nodes[-1:], 0.3)


def test_memory_changes_nothing():
    clean, corrupt, nodes = examples("concat")
    ask = {"metric": metric_of(clean[0], nodes), "threshold": 0.1}
    many = bt.circuit(clean, corrupt, **ask)
    for memory in (1, 2**14):
        small = bt.circuit(clean, corrupt, memory=memory, **ask)
        assert list(small.effects) == list(many.effects) and small.retained == many.retained
        close(torch.tensor(list(small.effects.values())), torch.tensor(list(many.effects.values())))


@pytest.mark.parametrize("over", [["slice"], ["slice", "head"], ["slice", "word"]])
def test_arrows_joined_go_together(over):
    result, _ = check(*examples("concat"), 0.1, over=over)
    assert result.over == tuple(over) and all("*" in edge for edge in result.effects if edge.startswith("v"))
    assert all("*" not in arrow for arrow in result.arrows)


def test_arrows_that_are_no_candidates_stay():
    clean, corrupt, nodes = examples("concat")
    result, _ = check(clean, corrupt, nodes, 0.1, candidates=["v -> a", "k -> a"])
    assert {edge[0] for edge in result.effects} == {"v", "k"}
    other = {arrow for arrow in result.arrows if result.edge_of[arrow] is None}
    assert any(arrow.startswith("x") for arrow in other)
    assert all(result.graph.edges[tuple(arrow.split(" -> "))]["effect"] is None for arrow in other)
    assert bt.circuit(clean, corrupt, metric=metric_of(clean[0], nodes), threshold=1, candidates="v -> a").candidates


@pytest.mark.slow
def test_surgery_counts():
    """Nodes that are set, or read by a row of their own: in both sentences, in one, to unlike values."""
    clean, corrupt, nodes = examples("chapter, two slices")
    row, other = Attend([0.2, 0.5, 0.3]), Attend([0.6, 0.1, 0.3])
    actual, peer = clean[0], corrupt[0]
    check([s.do(x_1_1=Zero()) for s in clean], [s.do(x_1_1=Zero()) for s in corrupt], nodes, 0.1)
    check([actual.do(x_1_1=Zero())], [peer], nodes, 0.1)
    check([actual], [actual.do(q_1_2=Zero(), x_1_0=Zero())], nodes, 0.1)
    check([actual.do(c=1)], [actual.do(c=0)], nodes, 0.1)
    check([actual.do(x_1_2=row)], [peer.do(x_1_2=other)], nodes, 0.1)
    check([actual.do(x_2_2=row)], [peer.do(x_2_2=row)], nodes[-1:], 0.1)


@pytest.mark.parametrize("name", SHOWN)
def test_all_arrows_are_the_clean_run_and_none_the_corrupt_one(name):
    clean, corrupt, nodes = examples(name)
    actual, peer = parse_example_pair(clean, corrupt)
    metric = measure_of(actual, metric_of(clean[0], nodes))
    arrows = find_circuit_arrows(actual, peer, nodes, parse_edge_axes(actual.model.ground, None), None)
    runs = build_runner(actual, peer, arrows, metric, 2**29)
    for side, retained in ((runs.clean, True), (runs.corrupt, False)):
        for family in reversed(arrows.incoming):
            runs.fix_arrows(family, np.full(len(arrows.incoming[family]), retained))
        close(runs.evaluate_circuit(), runs.evaluate_run(side))


def test_the_circuit_as_a_graph():
    clean, corrupt, nodes = examples("encoder, pre-norm")
    result = bt.circuit(clean, corrupt, metric=metric_of(clean[0], nodes[-1:]), threshold=0.002)
    graph, ground = result.graph, clean[0].ground
    retained = {tuple(map(ground.id, edge.split(" -> "))) for edge in result.retained}
    full = nx.DiGraph(sorted(retained))
    starts = {n for n in full if ground.name(n).startswith("token")}
    beneath = starts.union(*(nx.descendants(full, n) for n in starts))
    above = nx.ancestors(full, nodes[-1]) | {nodes[-1]}
    expected = {(a, b) for a, b in retained if a in beneath and b in above}
    assert {(ground.id(a), ground.id(b)) for a, b in graph.edges} == expected
    name = next(n for n in graph if n.startswith("a_0"))
    _, _, head, word = name.split("_")
    about = clean[0].graph().nodes[name]
    given = graph.nodes[name]
    assert (given["role"], given["slice"], given["head"], given["word"]) == ("a", 0, int(head), int(word))
    assert all(given[subject] == about[subject] for subject in ("index", "plates", "stack"))
    assert given["token"] is None and about["label"] == f'{given["label"]} "{about["token"]}"'  # the examples differ
    assert {given["part"] for n, given in graph.nodes(data=True) if n.startswith("token")} == {"differs"}
    assert [n for n, given in graph.nodes(data=True) if given["part"] == "outcome"] == [ground.name(nodes[-1])]
    for a, b, arrow in graph.edges(data=True):
        assert arrow["effect"] == result.effects[f"{a} -> {b}"] >= result.threshold


def test_the_circuit_is_drawn_and_told(tmp_path):
    clean, corrupt, nodes = examples("encoder, pre-norm")
    result = bt.circuit(clean[0], corrupt[0], metric=metric_of(clean[0], nodes[-1:]), threshold=0.2)
    s = clean[0]
    only = s.picture(only=result.graph)
    assert {(a.source, a.target) for a in only.arrows} == set(result.graph.edges)
    for given in (result, result.arrows):
        picture = s.picture(highlight=given, weights=False)
        assert {box.name for box in picture.boxes if not box.is_faded} == set(result.nodes)
        assert {(a.source, a.target) for a in picture.arrows if a.opacity == 1.0} >= set(result.graph.edges)
    with pytest.raises(bt.BNetError, match="highlight") as caught:
        s.picture(highlight=result, detail="words")
    assert caught.value.allowed == "detail='nodes'"
    picture = s.picture(highlight=result, detail="nodes")
    assert {box.name for box in picture.boxes if not box.is_faded} == set(result.nodes)
    frame = result.to_dataframe()
    assert list(frame["edge"]) == list(result.effects) and frame["kept"].sum() == result.edges
    assert len(frame) == result.candidates
    html = result._repr_html_()
    assert html.count("<tr") == 1 + min(20, result.edges) and "&gt;" in html
    assert f"{result.edges} of {result.candidates}" in repr(result)


def test_numbers_of_a_circuit():
    clean, corrupt, nodes = examples("concat")
    result, slow = check(clean, corrupt, nodes, 0.1)
    full = slow.of(slow.all_arrows)
    close(result.corrupt, full)
    restored = (slow.of(slow.gone) - full).mean() / (slow.clean - full).mean()
    assert result.faithfulness == pytest.approx(float(restored))
    assert result.distance == pytest.approx(slow.distance(slow.gone))
    ground, above = clean[0].ground, {*nodes, *ancestors(clean[0].ground, nodes)}
    count = sum(int(np.isin(targets, list(above)).sum()) for _, _, targets in ground.arrows())
    assert result.idle == count - len(slow.all_arrows)
    same = bt.circuit(clean, corrupt, metric=lambda x_1_0: 0 * x_1_0[:, 0], threshold=0.0)
    assert np.isnan(same.faithfulness) and same.edges + sum(e == 0 for e in same.effects.values()) >= same.candidates
    none = bt.circuit(clean, corrupt, metric=metric_of(clean[0], nodes), threshold=1e9)
    assert none.edges == 0 and not none.arrows and not len(none.graph) and none.faithfulness == pytest.approx(0)
    close(none.outcome, none.corrupt)


def test_what_is_refused():
    clean, corrupt, nodes = examples("chapter, two slices")
    free = [s.undo("c") for s in corrupt]
    for sides, options, given in [
        ((free, free), {}, r"do\(c=...\) first"),
        ((clean, free), {}, r"do\(c=...\) first"),
        (([s.observe(y_0=1) for s in clean], corrupt), {}, "without evidence"),
        ((clean, corrupt), {"threshold": -1}, "threshold: .*at least 0"),
        ((clean, corrupt), {"over": ["slice", "head"]}, r"over.*'slice'"),
        ((clean, corrupt), {"candidates": ["v -> z"]}, r"candidates: .*'v -> z'.*near matches are v -> x"),
        ((clean, clean), {}, r"corrupt: .*differs"),
        ((clean, corrupt), {"candidates": ["W_q -> q"]}, r"corrupt: .*none of these arrows"),
        ((clean, corrupt[:1]), {}, r"2 sentences|as many"),
        (([clean[0], clean[1].do(x_1_0=Zero())], corrupt), {}, "same nodes set"),
        ((clean, corrupt), {"metric": {"y_9": 1}}, "y_9"),
    ]:
        ask = {"metric": metric_of(clean[0], nodes), "threshold": 0.1, **options}
        assert re.search(given, get_refusal(bt.circuit, *sides, **ask)), given


def test_words_that_are_computed_one_after_another_are_refused():
    net = BY_NAME["recurrent"].net
    with pytest.raises(bt.UnsupportedError, match=r"h_0: expected words that are computed at once"):
        bt.circuit(net.sentence("a b c"), net.sentence("d b c"), metric=lambda y_2: y_2[:, 0], threshold=0.1)


def test_a_choice_that_picks_must_be_the_same():
    net = BY_NAME["word"].net
    s = net.sentence("the cat sat")
    one, other = s.do(c_0=1), s.do(c_0=1).undo("c_0_2").do(c_0_2=0)
    with pytest.raises(bt.UnsupportedError, match=r"c_0 -> x_1.*a choice, picked by"):
        bt.circuit(one, other, metric={"y_2": 1}, threshold=0.1)


def test_the_induction_net_by_hand():
    net = induction.built()
    prompts = induction.Prompts.of(5, 8, seed=3)
    result, heads = induction.searched(net, prompts), induction.planted_heads(net, prompts)
    assert heads == ([0], [0])
    expected = induction.planted("v", 5, heads) | induction.planted("k", 5, heads)
    assert expected == {"v_0_0_5 -> a_0_0_6", "v_1_0_6 -> a_1_0_11", "k_1_0_6 -> a_1_0_11"}
    retained = {edge for edge in result.retained if " -> a_" in edge}
    assert expected <= retained and len(retained - expected) <= 2 and expected <= set(result.arrows)
    assert result.edges < result.candidates / 10 and abs(result.faithfulness - 1) < 0.05
    areas = induction.areas(net, positions=(5,))
    for roles in ("v", "k", "v and k"):
        actual, attention, rollout = (areas[f"AUC of {roles} -> a, {subject}"][0] for subject in induction.SCORES)
        assert actual == 1.0 and actual > rollout > attention


@pytest.mark.slow
def test_the_induction_net_that_has_learned_it():
    net = induction.trained(steps=600)
    prompts = induction.Prompts.of(4, 16, seed=3)
    right = net.module()(prompts.clean)[:, -1].argmax(-1) == prompts.clean[:, 5]
    assert right.double().mean() > 0.9
    result, heads = induction.searched(net, prompts), induction.planted_heads(net, prompts)
    assert heads[0] and heads[1]
    for role in ("v", "k"):
        rows = induction.scores(net, prompts, result, role)
        expected = induction.planted(role, 4, heads)
        assert expected <= set(result.retained)
        area = induction.roc_auc([name in expected for name in rows], [row[0] for row in rows.values()])
        assert area > 0.98
    assert abs(result.faithfulness - 1) < 0.1


@pytest.mark.parametrize("states", [3, 4])  # as many states as words, and more
def test_all_edges_are_the_net_where_do_set_a_word_of_the_readout(states):
    net = bt.decoder(4, heads=2, slices=1, hidden=8, vocabulary=["the", "cat", "sat", "on"][:states]).to(torch.float64)
    clean, corrupt = (net.sentence(words).do(y_1=0) for words in ("the cat sat", "cat the sat"))
    result = bt.circuit(clean, corrupt, metric={"y_2": (0, 1)}, threshold=1e-12)
    assert result.faithfulness == pytest.approx(1, abs=1e-6)

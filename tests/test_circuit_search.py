"""Searches and curves over any edges: nets of logic with enumerable circuits; circuits of a real net."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.interventions.acdc import search_circuit
from bnet_transformer.interventions.circuit import FaithfulnessWarning, read_json, run_tests
from bnet_transformer.interventions.circuit_runs import CircuitRuns, match_edges
from bnet_transformer.interventions.curves import MIB_SHARES, measure_curves
from tests.cases import get_case
from tests.sweep_oracle import make_pair

D = torch.float64


class LogicRuns(CircuitRuns):
    """Edges from bits into one reader: a retained edge reads 1 in the clean run, another 0, the corrupt value."""

    def __init__(self, function, count, clean_bit=1.0, scales=(1.0,)):
        self.function, self.clean_bit, self.scales = function, clean_bit, torch.tensor(scales, dtype=D)
        self.edge_names = tuple(f"a_{k} -> y" for k in range(count))

    def evaluate(self, retained):
        bits = torch.where(retained, self.clean_bit, 1 - self.clean_bit).to(D)
        return self.function(*bits.unbind(-1))[:, None] * self.scales

    def swap(self):
        return LogicRuns(self.function, len(self.edge_names), 1 - self.clean_bit, self.scales.tolist())


# Functions of bits, and the edges that each direction retains at a threshold of half the total effect.
LOGIC = {
    "or": (lambda a, b, c: torch.maximum(a, b) + 0 * c, {1}, {0, 1}),
    "and": (lambda a, b, c: a * b + 0 * c, {0, 1}, {1}),
    "backup": (lambda a, b, c: a + (1 - a) * b + 0 * c, {1}, {0, 1}),  # b acts only where a does not
    "cancelling": (lambda a, b, c: c + a - b, {0, 1, 2}, {0, 1, 2}),
    "single": (lambda a, b, c: a + 0 * b * c, {0}, {0}),
}


@pytest.mark.parametrize("name", LOGIC)
def test_each_direction_finds_the_edges_of_logic_and_both_finds_their_union(name):
    function, noise, denoise = LOGIC[name]
    runs = LogicRuns(function, 3)
    expected = {"noise": noise, "denoise": denoise, "both": noise | denoise}
    for direction, edges in expected.items():
        result = search_circuit(runs, np.array([0]), 0.5, direction)
        assert set(result.retained) == edges
        assert set(result.effects) == {0, 1, 2}
    # By enumeration: an edge is in "both" if and only if the function depends on it in some state of the others.
    masks = torch.tensor(list(itertools.product([False, True], repeat=3)))
    values = {tuple(mask.tolist()): float(v) for mask, v in zip(masks, runs.evaluate(masks)[:, 0], strict=True)}
    flips = [{values[m] != values[tuple(b != (i == k) for i, b in enumerate(m))] for m in values} for k in range(3)]
    assert expected["both"] == {k for k in range(3) if True in flips[k]}


def test_the_search_uses_the_examples_in_the_sample_only():
    runs = LogicRuns(lambda a, b: a + b, 2, scales=(0.1, 10.0))
    assert search_circuit(runs, np.array([0]), 0.5, "noise").retained == ()
    assert search_circuit(runs, np.array([0, 1]), 0.5, "noise").retained == (0, 1)


def test_patterns_match_names_of_edges():
    runs = LogicRuns(lambda a, b: a + b, 2)
    assert match_edges(["* -> y"], runs) == match_edges(["a_1->y", "a_*->*"], runs)[::-1]
    with pytest.raises(bt.BNetError, match="near matches are a_1 -> y"):
        match_edges(["a_11 -> y"], runs)


def make_net():
    words = ["the", "cat", "dog", "sat", "ran", "on", "a", "mat"]
    return bt.decoder(8, heads=2, slices=1, hidden=8, vocabulary=words, seed=0).to(D)


@pytest.fixture(scope="module")
def pairs():
    net, generator = make_net(), torch.Generator().manual_seed(0)
    ids = torch.randint(0, 8, (2, 12, 4), generator=generator)
    ids[1, :, 1:] = ids[0, :, 1:]
    ids[0, :, [0, 3]], ids[1, :, [0, 3]] = 1, 2
    return [[net.sentence(row) for row in side.tolist()] for side in ids]


def read(x_1_3):
    return x_1_3 @ torch.linspace(0, 1, 8, dtype=D) ** 2


def test_a_circuit_of_one_s_own_equals_the_one_that_was_found(pairs):
    clean, corrupt = pairs
    result = bt.circuit(clean, corrupt, metric=read, threshold="20%", held_out=0.25, seed=3)
    total = (result.clean - result.corrupt).abs().mean()
    assert result.threshold == pytest.approx(0.2 * float(total)) and 0 < result.edges < result.candidates
    given = bt.circuit(clean, corrupt, metric=read, edges=result.retained)
    assert len(given.clean) == 12 and not given.is_in_sample and given.held_out is None and result.is_in_sample
    split = torch.cat([result.outcome, result.held_out.outcome]).sort()[0]
    torch.testing.assert_close(split, given.outcome.sort()[0])
    rerun = result.run(clean[:3], corrupt[:3])
    torch.testing.assert_close(rerun.outcome, given.outcome[:3])
    assert rerun.retained == result.retained and rerun.effects == result.effects and rerun.arrows
    other = result.run(clean[:3], corrupt[:3], metric=lambda x_1_3: 2 * read(x_1_3))
    torch.testing.assert_close(other.outcome, 2 * rerun.outcome)
    full = bt.circuit(clean, corrupt, metric=read, edges="* -> *")
    assert full.edges == full.candidates and full.distance == pytest.approx(0)
    assert math.isnan(given.to_dataframe()["effect"][0]) and given.to_dataframe()["kept"].sum() == given.edges
    assert f"{result.held_out.faithfulness:.3f} on 3 held-out pairs" in repr(result)


def test_held_out_sentences_are_evaluated_and_not_searched(pairs):
    clean, corrupt = pairs
    result = bt.circuit(clean[:4], corrupt[:4], metric=read, threshold="5%", held_out=(clean[4:6], corrupt[4:6]))
    expected = bt.circuit(clean[4:6], corrupt[4:6], metric=read, edges=result.retained)
    torch.testing.assert_close(result.held_out.outcome, expected.outcome)
    same = bt.circuit(clean[:4], corrupt[:4], metric=read, threshold="5%")
    assert same.retained == result.retained and same.held_out is None
    assert (same | result).held_out is None
    torch.testing.assert_close((result | same).held_out.outcome, expected.outcome)


def test_set_operations_of_circuits(pairs):
    clean, corrupt = pairs
    first, second = (bt.circuit(clean[:2], corrupt[:2], metric=read, edges=e) for e in ("* -> v_*", "token_* -> *"))
    every = bt.circuit(clean[:2], corrupt[:2], metric=read, edges="* -> *")
    assert set((first | second).retained) == set(first.retained) | set(second.retained)
    assert (first & second).edges == 0 and (every - first).edges == every.edges - first.edges
    assert set((every & first).retained) == set(first.retained)
    torch.testing.assert_close((first | every).outcome, every.clean)
    torch.testing.assert_close((first - first).outcome, every.corrupt)
    coarse = bt.circuit(clean[:2], corrupt[:2], metric=read, edges="* -> *", over=["slice"])
    with pytest.raises(bt.BNetError, match="two circuits over"):
        first | coarse
    equal = make_net()  # as in a loaded circuit
    assert first.run(*(equal.sentence(text) for text in ("the cat sat on", "the dog sat on"))).edges == first.edges
    other = equal.replace({name: 2 * value for name, value in equal.parameters.items()})
    s, t = other.sentence("the cat sat on"), other.sentence("the dog sat on")
    with pytest.raises(bt.BNetError, match="one net"):
        first & bt.circuit(s, t, metric=read, edges="* -> *")
    with pytest.raises(bt.BNetError, match="of the net of the circuit"):
        first.run(s, t)


def test_the_second_branch_of_a_real_net_is_found_by_both_directions():
    """x_1 adds two heads, and the metric saturates: each head suffices."""
    net = bt.bayesuvius(dim=4, heads=2, combine="concat", residual=True, vocabulary=["p", "q", "r"]).to(D)
    s, t = net.sentence("p r"), net.sentence("q r")
    start = bt.circuit(s, t, metric=lambda a_0_0_1: a_0_0_1[:, 0], edges="* -> *")
    other = bt.circuit(s, t, metric=lambda a_0_1_1: a_0_1_1[:, 0], edges="* -> *")
    ends = [(float(c.corrupt[0]), float(c.clean[0])) for c in (start, other)]

    def either(a_0_0_1, a_0_1_1):
        shares = [(v[:, 0] - low) / (high - low) for v, (low, high) in zip((a_0_0_1, a_0_1_1), ends, strict=True)]
        return torch.maximum(*shares).clamp(0, 1)

    retained = {}
    for direction in ("noise", "denoise", "both"):
        result = bt.circuit(s, t, metric=either, threshold="50%", direction=direction, candidates=["v -> a", "x -> v"])
        retained[direction] = {name for name in result.retained if name.startswith("v")}
        assert result.direction == direction
    branches = {"v_0_0_0 -> a_0_0_1", "v_0_1_0 -> a_0_1_1"}
    assert len(retained["noise"]) == 1 and retained["denoise"] == retained["both"] == branches


def test_the_json_of_mib_is_read_and_written(tmp_path, pairs):
    """The names follow from the kinds of writers and readers; the format is that of the package EAP-IG."""
    clean, corrupt = pairs
    words = bt.circuit(clean[:1], corrupt[:1], metric=read, edges="* -> *")
    with pytest.raises(bt.BNetError, match="convention='mib'"):
        words.to_json(tmp_path / "words.json", scores={})
    net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "cat", "dog", "sat"], seed=1)
    pair = net.sentence("the cat sat"), net.sentence("the dog sat")
    options = {"metric": {"y_2": ("cat", "dog")}, "at": "edges"}
    result = bt.circuit(*pair, **options, threshold="5%")
    result.to_json(tmp_path / "net.json")
    content = json.loads((tmp_path / "net.json").read_text())
    assert content["cfg"] == {"n_layers": 2, "n_heads": 2, "parallel_attn_mlp": False, "d_model": 8}
    names = {"embed -> q_0_1": "input->a0.h1<q>", "a_0_1 -> v_1_0": "a0.h1->a1.h0<v>", "ffn_0 -> ffn_1": "m0->m1"}
    for name, counterpart in {**names, "a_1_0 -> y": "a1.h0->logits", "embed -> ffn_0": "input->m0"}.items():
        assert content["edges"][counterpart] == {"score": result.effects[name], "in_graph": name in result}
    assert len(content["edges"]) == len(net.edges()) and list(content["nodes"])[:4] == ["input", "a0.h0", "a0.h1", "m0"]
    stored = read_json(tmp_path / "net.json", net)
    assert set(stored.edges) == set(result.retained)
    assert stored.scores == {name: result.effects[name] for name in net.edges()["edge"]}
    assert bt.circuit(*pair, **options, edges=stored.edges).faithfulness == pytest.approx(result.faithfulness)
    for text in (
        "{}",
        "[",
        "[" * 100_000,
        '{"edges": {"m0->logits": {}}}',
        '{"edges": {"m0->logits": null}}',
        '{"edges": {"m0->logits": {"score": "1", "in_graph": true}}}',
        '{"edges": {"m0->logits": {"score": true, "in_graph": true}}}',
        '{"edges": {"m0->logits": {"score": 1, "in_graph": "false"}}}',
        '{"edges": {"m7->logits": {"score": 1, "in_graph": true}}}',
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(bt.BNetError, match=r"bad\.json"):
            read_json(tmp_path / "bad.json", net)


def test_grouped_keys_are_written_for_each_head(tmp_path):
    net = get_case("grouped").net
    pair = make_pair(get_case("grouped"))
    result = bt.circuit(*pair, metric=lambda y_1: y_1[:, 0], at="edges", edges="a_0_1_2 -> k_1_1")
    with pytest.raises(bt.BNetError, match="scores"):
        result.to_json(tmp_path / "grouped.json")
    scores = bt.sweep(*pair, metric=lambda y_1: y_1[:, 0], at="edges")
    with pytest.raises(bt.BNetError, match="ungroup=True"):
        result.to_json(tmp_path / "grouped.json", scores=scores)
    result.to_json(tmp_path / "grouped.json", scores=scores, ungroup=True)
    edges = json.loads((tmp_path / "grouped.json").read_text())["edges"]
    assert {name for name, row in edges.items() if row["in_graph"]} == {f"a0.h5->a1.h{h}<k>" for h in (3, 4, 5)}
    stored = read_json(tmp_path / "grouped.json", net)
    assert stored.edges == result.retained
    assert stored.scores == pytest.approx({name: scores[name] for name in scores.names.values()})
    again = bt.circuit(*pair, metric=lambda y_1: y_1[:, 0], at="edges", edges=stored)
    assert again.retained == result.retained


def test_total_effects_near_zero_warn(pairs):
    clean, corrupt = pairs
    with pytest.warns(FaithfulnessWarning, match="cancel"):
        result = bt.circuit([clean[0], corrupt[0]], [corrupt[0], clean[0]], metric=read, edges="* -> *")
    assert math.isnan(result.faithfulness) and "undefined" in repr(result)
    with pytest.warns(FaithfulnessWarning, match="standard error"):
        bt.circuit(
            clean[:3] + corrupt[2:5], corrupt[:3] + clean[2:5], metric=lambda x_1_3: read(x_1_3) ** 2, edges="* -> *"
        )


def test_invalid_calls(pairs):
    clean, corrupt = pairs[0][:2], pairs[1][:2]
    for options, term in [
        ({"threshold": 1, "edges": "* -> *"}, "threshold="),
        ({"threshold": "5"}, "threshold"),
        ({"threshold": "x%"}, "threshold"),
        ({"threshold": 1, "held_out": 2}, "held_out"),
        ({"edges": ["v_0_0_1 -> a_0_0_9"]}, "near matches are v_0_0_"),
        ({"edges": ["q_0 -> "]}, "edge"),
        ({"edges": "* -> *", "held_out": 0.5}, "without a search"),
        ({"threshold": "5%", "metric": lambda x_1_3: 0 * x_1_3[:, 0]}, "total effect"),
    ]:
        with pytest.raises(bt.BNetError, match=term):
            bt.circuit(clean, corrupt, **{"metric": read, **options})
    idle = bt.circuit(clean, corrupt, metric=read, edges=["token_2 -> embed_2"])
    assert idle.edges == 1 and idle.distance == pytest.approx(float((idle.corrupt - idle.clean).abs().mean()))


def mib_areas(f, shares):
    """CPR and CMD as the loop of MIB's `evaluate_area_under_curve` adds them."""
    under = from_one = 0.0
    for k in range(len(f) - 1):
        width = shares[k + 1] - shares[k]
        under += width * (f[k] + f[k + 1]) / 2
        from_one += width * (abs(1 - f[k]) + abs(1 - f[k + 1])) / 2
    return under, from_one


class WeightedRuns(LogicRuns):
    """1,000 edges with weights: the metric of a pair is the sum of its weights of the retained edges."""

    def __init__(self, weights):
        super().__init__(None, len(weights))
        self.weights = weights  # [edge, example]

    def evaluate(self, retained):
        return retained.to(D) @ self.weights


@pytest.fixture(scope="module")
def weighted():
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(1000, 1, generator=generator, dtype=D) + 0.3 * torch.randn(
        1000, 20, generator=generator, dtype=D
    )
    return WeightedRuns(weights + 0.2)


ABOUT = {"confidence": 0.95, "resamples": 400, "seed": 0}


def test_curves_equal_the_formulas_of_mib(weighted):
    mean = weighted.weights.mean(1)
    scores = dict(zip(weighted.edge_names, mean.tolist(), strict=True))
    curves = measure_curves(weighted, {"true": scores, "none": dict.fromkeys(scores, 0.0)}, MIB_SHARES, 3, **ABOUT)
    assert curves.counts == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) and curves.methods == ("true", "none", "random")
    for ranking, order in (
        ("signed", mean.argsort(descending=True)),
        ("absolute", mean.abs().argsort(descending=True)),
    ):
        expected = [float(mean[order[:count]].sum() / mean.sum()) for count in curves.counts]
        assert curves.faithfulness("true", ranking=ranking).tolist() == pytest.approx(expected)
        under, from_one = mib_areas(expected, MIB_SHARES)
        assert (curves.cpr["true"] if ranking == "signed" else curves.cmd["true"]) == pytest.approx(
            under if ranking == "signed" else from_one
        )
    logs = [math.log(k) for k in MIB_SHARES]
    f = curves.faithfulness("true").tolist()
    assert curves.log_area["true"] * math.log(1000) == pytest.approx(mib_areas(f, logs)[0])
    assert curves.cpr["true"] > curves.cpr["random"]
    by_pair = weighted.weights[mean.argsort(descending=True)[:20]].sum(0) / weighted.weights.sum(0)
    torch.testing.assert_close(curves.by_pair("true")[4], by_pair)
    frame, summary = curves.to_dataframe(), curves.summary()
    assert len(frame) == 30 and frame["median"][4] == pytest.approx(float(by_pair.quantile(0.5)))
    assert (summary["CPR low"] < summary["CPR"]).all() and (summary["CPR"] < summary["CPR high"]).all()


def test_a_perfect_ranking_has_area_999():
    runs = WeightedRuns(torch.eye(1000, 1, dtype=D))
    curves = measure_curves(runs, {"true": {"a_0 -> y": 1.0}}, MIB_SHARES, 0, **ABOUT)
    assert curves.cpr["true"] == pytest.approx(0.999) and curves.cmd["true"] == pytest.approx(0, abs=1e-12)
    assert curves.log_area["true"] == pytest.approx(1) and math.isnan(curves.summary()["CPR low"][0])
    with pytest.raises(bt.BNetError, match="at least 2 pairs"):
        curves.interval("true")


def test_intervals_resample_both_sides_of_the_ratio():
    """The ratio of pairs with proportional effects has no variance, for any differences of the total effects."""
    scales = torch.linspace(0.1, 5, 12, dtype=D)
    runs = WeightedRuns(torch.rand(40, 1, generator=torch.Generator().manual_seed(0), dtype=D) * scales)
    scores = dict(zip(runs.edge_names, runs.weights[:, 0].tolist(), strict=True))
    curves = measure_curves(runs, scores, (0.1, 0.5, 1.0), 0, **ABOUT)
    low, high = curves.interval("scores")
    torch.testing.assert_close(low, high)
    torch.testing.assert_close(low, curves.faithfulness("scores"))
    one = torch.ones(40, 12, dtype=D)
    one[0] += torch.randn(12, generator=torch.Generator().manual_seed(1), dtype=D) * 30
    low, high = measure_curves(WeightedRuns(one), scores, (0.1, 0.5, 1.0), 0, **ABOUT).interval("scores")
    assert (high[:2] > low[:2]).all() and float(high[2]) == pytest.approx(1) == float(low[2])


def test_curves_of_a_real_net_from_a_sweep_a_circuit_and_numbers(pairs):
    clean, corrupt = pairs
    result = bt.circuit(clean[:4], corrupt[:4], metric=read, threshold="1%")
    sweep = bt.sweep(clean[:4], corrupt[:4], at="v -> a", metric=read)
    cells = {name: sweep[name] for name in sweep.names.values()}
    curves = bt.faithfulness_curves(
        clean[4:],
        corrupt[4:],
        metric=read,
        scores={"search": result, "sweep": sweep, "cells": cells},
        shares=(0.05, 0.2, 1),
    )
    assert torch.equal(curves.outcomes["sweep"], curves.outcomes["cells"]) and curves.examples == 8
    for name in curves.methods:
        torch.testing.assert_close(curves.outcomes[name][:, -1], curves.clean.expand(len(curves.outcomes[name]), -1))
    best = sorted(result.effects, key=lambda name: -result.effects[name])[: curves.counts[1]]
    given = bt.circuit(clean[4:], corrupt[4:], metric=read, edges=best)
    torch.testing.assert_close(given.outcome, curves.outcomes["search"][0, 1])
    assert curves.edges == given.candidates
    nodes = bt.sweep(clean[:2], corrupt[:2], at="v", metric=read)
    for options, term in [
        ({"scores": nodes}, "edge"),
        ({"scores": {"a": {"v_0_0_1 -> a_0_0_9": 1.0}}}, "near matches"),
        ({"scores": {"a": {"token_2 -> embed_2": 1.0}}}, "transmit a difference"),
        ({"scores": {"random": result}}, "other than 'random'"),
        ({"scores": {"v_0_0_0 -> a_0_0_1": math.nan}}, "a finite number"),
        ({"scores": result, "shares": (0.5, 0.1)}, "increasing shares"),
        ({"scores": result, "baselines": ("best",)}, "baseline"),
        ({"scores": result, "metric": lambda x_1_3: 0 * x_1_3[:, 0]}, "total effect of 0"),
    ]:
        with pytest.raises(bt.BNetError, match=term):
            bt.faithfulness_curves(clean[4:6], corrupt[4:6], **{"metric": read, **options})


def test_hypotheses_of_sufficiency_necessity_and_minimality():
    """Edges 0 to 2 have the whole effect; edge 3 of the circuit has none; outside there are small effects."""
    weights = torch.full((40, 6), 0.01, dtype=D)
    weights[:3], weights[3] = 1.0, 0.0
    runs = WeightedRuns(weights)
    tests = run_tests(runs, runs.edge_names[:4], [0, 1], 199, 0, is_in_sample=True)
    assert tests.sufficiency == tests.necessity == 1 / 200 and tests.examples == 2
    assert tests.distance == pytest.approx(0.36) and tests.removed_distance == pytest.approx(3.0)
    assert list(tests.minimality.values()) == [1 / 37] * 3 + [1.0]
    assert list(tests.changes.values()) == pytest.approx([1.0, 1.0, 1.0, 0.0])
    poor = run_tests(runs, runs.edge_names[10:14], [0], 199, 0, is_in_sample=False)
    assert poor.sufficiency > 0.3 and poor.necessity > 0.2
    assert "for 0 of 4 edges" in repr(poor)
    with pytest.raises(bt.BNetError, match="some of the edges"):
        run_tests(runs, [], [0], 9, 0, is_in_sample=True)


def test_a_circuit_is_tested_on_held_out_pairs(pairs):
    result = bt.circuit(*pairs, metric=read, threshold="5%", over=["slice", "head"])
    tests = result.test(draws=20)
    assert tests.examples == 3 and not tests.is_in_sample and set(tests.minimality) <= set(result.retained)
    assert tests.distance == pytest.approx(result.held_out.distance)


def test_the_plot_has_the_curves_and_the_areas(weighted):
    scores = dict(zip(weighted.edge_names, weighted.weights.mean(1).tolist(), strict=True))
    curves = measure_curves(weighted, {"a $b_1$ <i>": scores}, MIB_SHARES, 2, **ABOUT)
    figure = bt.plot(curves)
    for ax, ranking in zip(figure.axes, ("signed", "absolute"), strict=True):
        for line, name in zip(ax.get_lines()[:2], curves.methods, strict=True):
            np.testing.assert_allclose(line.get_ydata(), curves.faithfulness(name, ranking=ranking))
        area = curves.cpr["random"] if ranking == "signed" else curves.cmd["random"]
        assert f"{area:.2f}" in ax.get_legend().get_texts()[1].get_text() and ax.get_xscale() == "log"
        assert len(ax.collections) == 2
    one = bt.plot(curves, ranking="absolute", methods=["random"], intervals=False)
    assert len(one.axes) == 1 and not one.axes[0].collections


@pytest.mark.slow
def test_curves_of_edges_from_sweeps(tmp_path):
    """Scores of a sweep are contributions to the clean run in both directions; KL is that of the readout."""
    net = bt.decoder(dim=16, heads=2, slices=2, vocabulary=["the", "a", "cat", "dog", "sat", "ran"], seed=3).to(D)
    clean = [net.sentence(text) for text in ("the cat sat", "a cat ran", "the cat ran")]
    corrupt = [net.sentence(text) for text in ("the dog sat", "a dog ran", "the dog ran")]
    total = float(bt.sweep(clean, corrupt, at="edges", metric={"y_2": ("ran", "sat")}).total.mean())
    states = ("ran", "sat") if total > 0 else ("sat", "ran")
    for metric, sign in (({"y_2": states}, 1.0), ({"y_2": states[::-1]}, -1.0)):
        sweeps = {d: bt.sweep(clean, corrupt, at="edges", metric=metric, direction=d) for d in ("noise", "denoise")}
        signed = {
            d: {
                name: (sign if d == "denoise" else -sign) * float(sweep.values[index])
                for index, name in sweep.names.items()
            }
            for d, sweep in sweeps.items()
        }
        options = {"metric": metric, "at": "edges", "shares": (0.1, 0.5, 1.0), "baselines": (), "readout": "y_2"}
        first = bt.faithfulness_curves(clean, corrupt, scores=sweeps, **options)
        second = bt.faithfulness_curves(clean, corrupt, scores=signed, **options)
        for name in sweeps:
            torch.testing.assert_close(first.outcomes[name], second.outcomes[name])
    best = sorted(signed["noise"], key=lambda name: -abs(signed["noise"][name]))[: first.counts[1]]
    runs = {}
    for k, state in enumerate(net.network.vocabularies[""]):
        result = bt.circuit(clean, corrupt, metric={"y_2": state}, at="edges", edges=best, held_out=None)
        runs[k] = result.clean, result.outcome
    p, q = (torch.stack([run[side] for run in runs.values()]) for side in (0, 1))
    assert float(first.kl["noise"][1]) == pytest.approx(float((p.exp() * (p - q)).sum(0).mean()), rel=1e-6)
    assert abs(float(first.kl["noise"][-1])) < 1e-12

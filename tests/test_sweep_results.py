"""Results of sweeps: means, errors, bootstrap intervals, names, selections, frames, plots and figures."""

import html
import itertools
import warnings
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings, strategies as st
from matplotlib.figure import Figure

import bnet_transformer as bt
from bnet_transformer.figures.options import resolve_highlight
from bnet_transformer.interventions.sweep_results import MEDIATION_PARTS, Mediation, Sweep
from tests.sweep_oracle import get_refusal
from tests.test_plots import get_cells, get_heights, get_ticks

WORDS = ("the", "cat", "<sat>")


def make_sweep(axes=("slice", "word"), sizes=(2, 3), examples=5, *, hole=False, seed=0, clean=True, scale=1.0):
    """Return a sweep of random outcomes; with a hole its first cell is missing."""
    generator = torch.Generator().manual_seed(seed)
    outcomes = scale * torch.randn(*sizes, examples, generator=generator, dtype=torch.float64)
    totals = scale * torch.randn(2, examples, generator=generator, dtype=torch.float64)
    names = {index: "_".join(["x", *map(str, index)]) for index in itertools.product(*map(range, sizes))}
    if hole:
        hole_index = next(iter(names))
        outcomes[hole_index] = torch.nan
        del names[hole_index]
    positions = {axis: tuple(range(1, size + 1)) for axis, size in zip(axes, sizes, strict=True)}
    labels = {axis: tuple(map(str, along)) for axis, along in positions.items()}
    if "word" in axes:
        count = sizes[axes.index("word")]
        positions["word"], labels["word"] = tuple(range(count)), WORDS[:count]
    runs = {"clean": totals[0] if clean else None, "corrupt": totals[1]}
    return Sweep("x", axes, labels, positions, names, outcomes=outcomes, **runs)


def make_mediation(**options):
    first, second = make_sweep(**options), make_sweep(**options | {"seed": 7})
    shared = (first.at, first.axes, first.labels, first.positions, first.names, first.clean, first.corrupt)
    return Mediation(*shared, first.outcomes, second.outcomes)


def test_means_and_errors_are_those_of_numpy():
    result = make_sweep()
    effects = result.outcomes.numpy() - result.corrupt.numpy()
    assert np.array_equal(result.effects, effects)
    assert np.allclose(result.values, effects.mean(-1), rtol=1e-14)
    assert np.allclose(result.error, scipy.stats.sem(effects, axis=-1), rtol=1e-12)
    total = float((result.clean - result.corrupt).mean())
    assert np.allclose(result.restored, effects.mean(-1) / total, rtol=1e-12)
    assert result["x_1_2"] == pytest.approx(effects[1, 2].mean(), rel=1e-12)
    assert np.array_equal(result.total, result.clean - result.corrupt)


@pytest.mark.parametrize(("confidence", "examples", "draws"), [(0.95, 5, 999), (0.5, 2, 40), (0.9, 40, 200)])
def test_intervals_are_those_of_scipy_on_the_same_draws(confidence, examples, draws):
    result = make_sweep(examples=examples)
    low, high = result.interval(confidence, draws=draws, seed=3)
    for index in result.names:
        sample = (result.effects[index].numpy(),)
        options = {"n_resamples": draws, "confidence_level": confidence, "method": "percentile"}
        peer = scipy.stats.bootstrap(sample, np.mean, rng=np.random.default_rng(3), **options).confidence_interval
        assert (float(low[index]), float(high[index])) == pytest.approx((peer.low, peer.high), rel=1e-9)
    repeated = result.interval(confidence, draws=draws, seed=3)
    assert torch.equal(low, repeated[0]) and torch.equal(high, repeated[1])
    assert not torch.equal(low, result.interval(confidence, draws=draws, seed=4)[0])


def test_one_example_has_no_error_and_no_interval():
    result = make_sweep(examples=1)
    assert bool(result.error.isnan().all())
    frame = result.to_dataframe()
    assert frame[["error", "low", "high"]].isna().all(axis=None) and frame["effect"].notna().all()
    with pytest.raises(bt.BNetError, match="at least 2 examples"):
        result.interval()


def test_missing_cells_are_nan_without_a_name_or_row():
    result = make_sweep(hole=True)
    for values in (result.values, result.error, result.restored, *result.interval()):
        assert bool(values[0, 0].isnan()) and int(values.isnan().sum()) == 1
    assert len(result.to_dataframe()) == 5 and len(result.to_dataframe(examples=True)) == 25
    assert len(result.top(99)) == 5
    with pytest.raises(bt.UnknownNameError, match="near matches are x_1_0"):
        result["x_0_0"]
    part = make_sweep(hole=True).select(slice=1)
    assert [*part.names.values()] == ["x_0_1", "x_0_2"]


def test_infinite_effects_are_no_warnings():
    result = make_sweep()
    result.outcomes[0, 0, 0] = -torch.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low, _ = result.interval()
        assert result["x_0_0"] == -np.inf and bool(low[0, 0].isnan()) and int(low.isnan().sum()) == 1
        assert result.top(1) == [("x_0_0", -np.inf)]
        result.to_dataframe()
        result.corrupt[0] = -torch.inf
        assert np.isnan(result["x_0_0"]) and "x_0_0" not in dict(result.top(9)) and len(result.top(9)) == 5


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_top_are_the_greatest_up_or_down(seed, count):
    result = make_sweep(seed=seed)
    ranked = sorted(
        ((name, float(result.values[index])) for index, name in result.names.items()), key=lambda e: -abs(e[1])
    )
    assert result.top(count) == ranked[:count]


def test_frames_have_a_row_for_each_cell_and_example():
    result = make_sweep()
    frame = result.to_dataframe()
    assert [*frame] == ["name", "slice", "word", "token", "effect", "error", "low", "high"]
    assert [*frame.iloc[4, :4]] == ["x_1_1", 2, 1, "cat"]
    low, high = result.interval()
    for column, values in {"effect": result.values, "error": result.error, "low": low, "high": high}.items():
        assert np.array_equal(frame[column], values.flatten())
    examples = result.to_dataframe(examples=True)
    assert [*examples] == ["name", "slice", "word", "token", "example", "outcome", "effect"] and len(examples) == 30
    assert np.allclose(examples.groupby("name", sort=False)["effect"].mean(), result.values.flatten())
    assert np.array_equal(examples["outcome"], result.outcomes.flatten()) and np.array_equal(
        examples["effect"], result.effects.flatten()
    )
    assert [*examples["example"][:6]] == [0, 1, 2, 3, 4, 0] and [*examples["name"][4:6]] == ["x_0_0", "x_0_1"]
    paths = make_sweep(("path",), (2,))
    assert [*paths.to_dataframe()] == ["name", "effect", "error", "low", "high"]
    single = make_sweep((), ())
    assert len(single.to_dataframe()) == 1 and len(single.to_dataframe(examples=True)) == 5


def test_positions_are_numbers_of_the_net_not_of_the_table():
    result = make_sweep(("slice", "head", "word"), (2, 4, 3))
    part = result.select(slice=2, word=0)
    assert part.axes == ("head",) and torch.equal(part.outcomes, result.outcomes[1, :, 0])
    assert {name: part[name] for name in part.names.values()} == {f"x_1_{h}_0": result[f"x_1_{h}_0"] for h in range(4)}
    assert part.labels == {"head": ("1", "2", "3", "4")} and part.total is not None
    assert torch.equal(result.select(slice=2).select(head=3).values, result.select(head=3, slice=2).values)
    assert make_mediation().select(slice=2)["x_1_2"] == make_mediation()["x_1_2"]


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_direct_indirect_and_interaction_sum_to_the_total(seed):
    result = make_mediation(seed=seed)
    total = result.direct + result.indirect + result.interaction
    assert torch.allclose(total, result.total.mean().expand(2, 3), atol=1e-12)
    for part in MEDIATION_PARTS:
        sweep = result.of(part)
        assert torch.equal(sweep.values, getattr(result, part)) and sweep.error.shape == (2, 3)
    direct, indirect = (result.of(part).effects for part in ("direct", "indirect"))
    assert torch.equal(direct, result.direct_outcomes - result.corrupt)
    assert torch.equal(indirect, result.indirect_outcomes - result.corrupt)
    assert torch.allclose(result.of("interaction").effects, result.total - direct - indirect, atol=1e-12)
    frame = result.to_dataframe()
    assert np.array_equal(frame["interaction_error"], result.of("interaction").error.flatten())
    assert np.array_equal(frame["direct_low"], result.of("direct").interval()[0].flatten())
    assert len(result.to_dataframe(examples=True)) == 30
    assert result["x_0_1"]["indirect"] == float(result.indirect[0, 1]) and result.top(1) == result.of("indirect").top(1)


def test_what_is_shown_is_short_and_escaped():
    result = make_sweep(("slice", "cell"), (4, 5))
    odd = replace(result, at="<b>", names=dict.fromkeys(result.names, "") | {(0, 0): "<i>"})
    for shown in (result, make_sweep(examples=1), make_sweep(clean=False), make_mediation(), make_sweep((), ())):
        assert len(repr(shown)) < 120 and "tensor" not in repr(shown)
        assert "tensor" not in shown._repr_html_()
    assert "<b>" not in odd._repr_html_() and html.escape("<i>") in odd._repr_html_() and "<i>" not in odd._repr_html_()


def test_plots_show_the_numbers_with_their_errors():
    result = make_sweep()
    figure = bt.plot(result)
    assert np.allclose(get_cells(figure), result.values) and get_ticks(figure.axes[0]) == ["the", "cat", "<sat>"]
    norm = figure.axes[0].collections[0].norm
    assert norm.vmin == -norm.vmax == -float(result.values.abs().max())
    labels = [t.get_text() for t in figure.axes[0].texts]
    assert (
        sum(t.startswith("±") for t in labels) == 6 and f"±{float(result.error[0, 0]):.2f}".replace("0.", ".") in labels
    )
    assert np.allclose(get_cells(bt.plot(result, restored=True)), result.restored)
    cube = make_sweep(("slice", "head", "word"), (2, 4, 3))
    figure = bt.plot(result, intervals=True, confidence=0.5)
    low, high = result.interval(0.5)
    scale = f"scale from {min(float(low.min()), 0):.2g} to {max(float(high.max()), 0):.2g}".replace("-", "−")
    assert scale in get_notes(figure)
    bars = make_sweep(("head",), (4,))
    assert "50% bootstrap intervals" in get_notes(bt.plot(bars, confidence=0.5))
    for sweep, options in ((result, {}), (bars, {"restored": True}), (bars, {"intervals": False}), (cube, {})):
        with pytest.raises(bt.BNetError, match="a plot with intervals"):
            bt.plot(sweep, confidence=0.5, **options)
    figure = bt.plot(cube)
    assert np.allclose(get_cells(figure, 1), cube.values[:, 1]) and figure.axes[1].get_title() == "head 2"
    figure = bt.plot(make_sweep(("slice", "word", "read"), (2, 3, 3), hole=True))
    assert "Blank: the cell does not exist" in get_notes(figure) and np.isnan(get_cells(figure)[0, 0])
    tiny = make_sweep(scale=1e-5)
    figure = bt.plot(tiny)
    assert (
        np.allclose(get_cells(figure), 1e6 * tiny.values)
        and figure.axes[0].child_axes[0].get_ylabel() == "mean effect, in 10⁻⁶"
    )


def get_notes(figure):
    return " ".join(t.get_text() for t in figure.texts).replace("\n", " ")


def test_lists_are_bars_with_intervals_the_strongest_in_their_order():
    result = make_sweep(("cell",), (6,))
    figure = bt.plot(result)
    assert get_heights(figure) == pytest.approx(result.values.tolist())
    ends = np.array([line[:, 1] for line in figure.axes[0].collections[0].get_segments()])
    assert np.allclose(ends.T, torch.stack(result.interval()))
    figure = bt.plot(result, top=2)
    top = sorted(int(name[2:]) for name, _ in result.top(2))
    assert get_heights(figure) == pytest.approx(result.values[top].tolist()) and "2 strongest of 6" in get_notes(figure)
    assert get_heights(bt.plot(make_sweep((), ()))) == pytest.approx([float(make_sweep((), ()).values)])
    result = make_mediation(axes=("cell",), sizes=(3,))
    assert get_heights(bt.plot(result)) == pytest.approx([*result.direct.tolist(), *result.indirect.tolist()])
    result = make_mediation(sizes=(5, 3))
    figure = bt.plot(result)
    assert np.allclose(get_cells(figure, 0), result.direct) and np.allclose(get_cells(figure, 1), result.indirect)
    assert np.allclose(get_cells(bt.plot(result, show="interaction")), result.interaction)
    assert f"Total effect: {float(result.total.mean()):.3g}".replace("-", "−") in get_notes(figure)


def test_a_negative_cell_is_recognisable_without_colour():
    result = make_sweep(sizes=(2, 3), examples=1)
    result.outcomes[0, :2, 0] = result.corrupt + torch.tensor([0.001, -0.001])  # too weak for a stroke
    large = replace(
        result,
        labels={"slice": result.labels["slice"], "word": tuple("abc" * 30)},
        positions={},
        names=dict.fromkeys(itertools.product(range(2), range(90)), "x"),
        outcomes=result.outcomes.repeat(1, 30, 1),
    )
    figure = bt.plot(large)
    strokes = next(collection for collection in figure.axes[0].collections if collection.get_label() == "below 0")
    assert not figure.axes[0].texts
    marked = {(int(line[0, 1]), round(float(line[:, 0].mean()))) for line in strokes.get_segments()}
    threshold = 0.02 * float(large.values.abs().max())
    assert marked == {tuple(index) for index in np.argwhere(large.values.numpy() < -threshold).tolist()}


def test_plots_leave_what_has_no_page_to_parts_of_it():
    deep = make_sweep(("slice", "head", "word", "read"), (2, 2, 3, 3))
    with pytest.raises(bt.BNetError, match=r"\.select\(slice=1\)"):
        bt.plot(deep)
    assert np.allclose(get_cells(bt.plot(deep.select(slice=1))), deep.values[0, 0])
    with pytest.raises(bt.BNetError, match="show='indirect'"):
        bt.plot(make_mediation(axes=("slice", "head", "word"), sizes=(2, 4, 3)))
    ax = Figure().subplots()
    assert bt.plot(make_sweep(), ax=ax) is ax.figure


def test_figures_mark_the_strongest_cells():
    net = bt.decoder(dim=8, heads=2, slices=1, vocabulary=["the", "cat", "dog", "sat"])
    clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    nodes = {*corrupt.graph()}
    result = bt.sweep(clean, corrupt, at="v -> a", metric={"y_2": ("cat", "dog")})
    marks, routes = resolve_highlight(result, nodes)
    (best, effect), *_ = result.top(1)
    source, target = best.split(" -> ")
    assert marks[target] == f"{effect:+.2g}" and marks[source] == "marked" and (source, target) in routes
    assert {source, target} <= {*resolve_highlight(best, nodes)[0]}
    assert [*resolve_highlight({"q_0_*_1": "here"}, nodes)[0]] == ["q_0_0_1", "q_0_1_1"]
    assert resolve_highlight({"q_0_0_1": "first", "q_0_0_1 -> a_0_0_1": "then"}, nodes)[0] == {
        "q_0_0_1": "first",
        "a_0_0_1": "then",
    }
    marked = resolve_highlight({"q_0_0_1": "first", "q_0_*_1": "then"}, nodes)[0]
    assert marked == {"q_0_0_1": "first", "q_0_1_1": "then"}
    assert [*resolve_highlight("j_0_1_2[0]", nodes)[0]] == ["a_0_1_2"]
    assert ("v_0_1_0", "a_0_1_2") in resolve_highlight("v_0_*_0 -> a_0_1_2", nodes)[1]
    box = next(box for box in corrupt.picture(highlight=result).boxes if box.name == target)
    assert box.mark == f"{effect:+.2g}"
    with pytest.raises(bt.UnknownNameError, match="q_0_0_1"):
        resolve_highlight("q_0_0_9", nodes)


def test_errors_for_bad_input_name_allowed_values():
    result, plain = make_sweep(), make_sweep(clean=False)
    equal_runs = replace(result, clean=result.corrupt)
    cube = make_sweep(("slice", "head", "word"), (2, 2, 2))
    for call, message in [
        (lambda: result["x_0_7"], "near matches are x_0_"),
        (lambda: result.select(head=0), "slice"),
        (lambda: result.select(slice=0), "one of 1 to 2; got 0"),
        (lambda: plain.total, "no clean run"),
        (lambda: equal_runs.restored, "with different metrics"),
        (lambda: make_mediation().of("total"), "'direct', 'indirect', 'interaction'"),
        (lambda: bt.plot(result, interval=True), "intervals"),
        (lambda: bt.plot(make_sweep(examples=1), intervals=True), "a single example"),
        (lambda: bt.plot(result, intervals=True, restored=True), "restored=True"),
        (lambda: bt.plot(cube, intervals=True), "3 axes"),
        (lambda: bt.plot(make_mediation(), show="total"), "'direct', 'indirect', 'interaction'"),
    ]:
        assert message in get_refusal(call), message

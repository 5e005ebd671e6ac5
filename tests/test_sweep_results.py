"""What a sweep tells of its numbers: means, errors, bootstrap intervals, names, parts, frames, plots and figures."""

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
from bnet_transformer.interventions.sweeps.results import MEDIATION_PARTS, Mediation, Sweep
from tests.sweeping import refusal
from tests.test_plots import cells, heights, texts

WORDS = ("the", "cat", "<sat>")


def swept(axes=("slice", "word"), sizes=(2, 3), examples=5, *, hole=False, seed=0, clean=True, scale=1.0):
    """A sweep of random outcomes; with a hole its first cell is none."""
    generator = torch.Generator().manual_seed(seed)
    outcomes = scale * torch.randn(*sizes, examples, generator=generator, dtype=torch.float64)
    told = scale * torch.randn(2, examples, generator=generator, dtype=torch.float64)
    names = {index: "_".join(["x", *map(str, index)]) for index in itertools.product(*map(range, sizes))}
    if hole:
        first = next(iter(names))
        outcomes[first] = torch.nan
        del names[first]
    places = {axis: tuple(range(1, size + 1)) for axis, size in zip(axes, sizes, strict=True)}
    labels = {axis: tuple(map(str, along)) for axis, along in places.items()}
    if "word" in axes:
        count = sizes[axes.index("word")]
        places["word"], labels["word"] = tuple(range(count)), WORDS[:count]
    base = {"clean": told[0] if clean else None, "corrupt": told[1]}
    return Sweep("x", axes, labels, places, names, outcomes=outcomes, **base)


def mediated(**told):
    one, other = swept(**told), swept(**told | {"seed": 7})
    shared = (one.at, one.axes, one.labels, one.positions, one.names, one.clean, one.corrupt)
    return Mediation(*shared, one.outcomes, other.outcomes)


def test_means_and_errors_are_those_of_numpy():
    found = swept()
    effects = found.outcomes.numpy() - found.corrupt.numpy()
    assert np.array_equal(found.effects, effects)
    assert np.allclose(found.values, effects.mean(-1), rtol=1e-14)
    assert np.allclose(found.error, scipy.stats.sem(effects, axis=-1), rtol=1e-12)
    total = float((found.clean - found.corrupt).mean())
    assert np.allclose(found.restored, effects.mean(-1) / total, rtol=1e-12)
    assert found["x_1_2"] == pytest.approx(effects[1, 2].mean(), rel=1e-12)
    assert np.array_equal(found.total, found.clean - found.corrupt)


@pytest.mark.parametrize(("confidence", "examples", "draws"), [(0.95, 5, 999), (0.5, 2, 40), (0.9, 40, 200)])
def test_intervals_are_those_of_scipy_on_the_same_draws(confidence, examples, draws):
    found = swept(examples=examples)
    low, high = found.interval(confidence, draws=draws, seed=3)
    for index in found.names:
        told = (found.effects[index].numpy(),)
        options = {"n_resamples": draws, "confidence_level": confidence, "method": "percentile"}
        theirs = scipy.stats.bootstrap(told, np.mean, rng=np.random.default_rng(3), **options).confidence_interval
        assert (float(low[index]), float(high[index])) == pytest.approx((theirs.low, theirs.high), rel=1e-9)
    again = found.interval(confidence, draws=draws, seed=3)
    assert torch.equal(low, again[0]) and torch.equal(high, again[1])
    assert not torch.equal(low, found.interval(confidence, draws=draws, seed=4)[0])


def test_one_example_has_no_error_and_no_interval():
    found = swept(examples=1)
    assert bool(found.error.isnan().all())
    frame = found.to_dataframe()
    assert frame[["error", "low", "high"]].isna().all(axis=None) and frame["effect"].notna().all()
    with pytest.raises(bt.BNetError, match="at least 2 examples"):
        found.interval()


def test_what_is_no_cell_is_nan_and_has_no_name_nor_row():
    found = swept(hole=True)
    for told in (found.values, found.error, found.restored, *found.interval()):
        assert bool(told[0, 0].isnan()) and int(told.isnan().sum()) == 1
    assert len(found.to_dataframe()) == 5 and len(found.to_dataframe(examples=True)) == 25
    assert len(found.top(99)) == 5
    with pytest.raises(bt.UnknownNameError, match="near matches are x_1_0"):
        found["x_0_0"]
    swept_away = swept(hole=True).select(slice=1)
    assert [*swept_away.names.values()] == ["x_0_1", "x_0_2"]


def test_infinite_effects_are_no_warnings():
    found = swept()
    found.outcomes[0, 0, 0] = -torch.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low, _ = found.interval()
        assert found["x_0_0"] == -np.inf and bool(low[0, 0].isnan()) and int(low.isnan().sum()) == 1
        assert found.top(1) == [("x_0_0", -np.inf)]
        found.to_dataframe()
        found.corrupt[0] = -torch.inf
        assert np.isnan(found["x_0_0"]) and "x_0_0" not in dict(found.top(9)) and len(found.top(9)) == 5


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_top_are_the_greatest_up_or_down(seed, count):
    found = swept(seed=seed)
    ranked = sorted(
        ((name, float(found.values[index])) for index, name in found.names.items()), key=lambda e: -abs(e[1])
    )
    assert found.top(count) == ranked[:count]


def test_frames_have_a_row_for_each_cell_and_example():
    found = swept()
    frame = found.to_dataframe()
    assert [*frame] == ["name", "slice", "word", "token", "effect", "error", "low", "high"]
    assert [*frame.iloc[4, :4]] == ["x_1_1", 2, 1, "cat"]
    low, high = found.interval()
    for column, told in {"effect": found.values, "error": found.error, "low": low, "high": high}.items():
        assert np.array_equal(frame[column], told.flatten())
    each = found.to_dataframe(examples=True)
    assert [*each] == ["name", "slice", "word", "token", "example", "outcome", "effect"] and len(each) == 30
    assert np.allclose(each.groupby("name", sort=False)["effect"].mean(), found.values.flatten())
    assert np.array_equal(each["outcome"], found.outcomes.flatten()) and np.array_equal(
        each["effect"], found.effects.flatten()
    )
    assert [*each["example"][:6]] == [0, 1, 2, 3, 4, 0] and [*each["name"][4:6]] == ["x_0_0", "x_0_1"]
    paths = swept(("path",), (2,))
    assert [*paths.to_dataframe()] == ["name", "effect", "error", "low", "high"]
    alone = swept((), ())
    assert len(alone.to_dataframe()) == 1 and len(alone.to_dataframe(examples=True)) == 5


def test_places_are_numbers_of_the_net_not_of_the_table():
    found = swept(("slice", "head", "word"), (2, 4, 3))
    part = found.select(slice=2, word=0)
    assert part.axes == ("head",) and torch.equal(part.outcomes, found.outcomes[1, :, 0])
    assert {name: part[name] for name in part.names.values()} == {f"x_1_{h}_0": found[f"x_1_{h}_0"] for h in range(4)}
    assert part.labels == {"head": ("1", "2", "3", "4")} and part.total is not None
    assert torch.equal(found.select(slice=2).select(head=3).values, found.select(head=3, slice=2).values)
    assert mediated().select(slice=2)["x_1_2"] == mediated()["x_1_2"]


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_direct_indirect_and_interaction_sum_to_the_total(seed):
    found = mediated(seed=seed)
    total = found.direct + found.indirect + found.interaction
    assert torch.allclose(total, found.total.mean().expand(2, 3), atol=1e-12)
    for part in MEDIATION_PARTS:
        each = found.of(part)
        assert torch.equal(each.values, getattr(found, part)) and each.error.shape == (2, 3)
    direct, indirect = (found.of(part).effects for part in ("direct", "indirect"))
    assert torch.equal(direct, found.direct_outcomes - found.corrupt)
    assert torch.equal(indirect, found.indirect_outcomes - found.corrupt)
    assert torch.allclose(found.of("interaction").effects, found.total - direct - indirect, atol=1e-12)
    frame = found.to_dataframe()
    assert np.array_equal(frame["interaction_error"], found.of("interaction").error.flatten())
    assert np.array_equal(frame["direct_low"], found.of("direct").interval()[0].flatten())
    assert len(found.to_dataframe(examples=True)) == 30
    assert found["x_0_1"]["indirect"] == float(found.indirect[0, 1]) and found.top(1) == found.of("indirect").top(1)


def test_what_is_shown_is_short_and_escaped():
    found = swept(("slice", "cell"), (4, 5))
    odd = replace(found, at="<b>", names=dict.fromkeys(found.names, "") | {(0, 0): "<i>"})
    for each in (found, swept(examples=1), swept(clean=False), mediated(), swept((), ())):
        assert len(repr(each)) < 120 and "tensor" not in repr(each)
        assert "tensor" not in each._repr_html_()
    assert "<b>" not in odd._repr_html_() and html.escape("<i>") in odd._repr_html_() and "<i>" not in odd._repr_html_()
    assert "The 12 strongest of 20" in found._repr_html_()


def test_plots_show_the_numbers_with_their_errors():
    found = swept()
    figure = bt.plot(found)
    assert np.allclose(cells(figure), found.values) and texts(figure.axes[0]) == ["the", "cat", "<sat>"]
    norm = figure.axes[0].collections[0].norm
    assert norm.vmin == -norm.vmax == -float(found.values.abs().max())
    told = [t.get_text() for t in figure.axes[0].texts]
    assert sum(t.startswith("±") for t in told) == 6 and f"±{float(found.error[0, 0]):.2f}".replace("0.", ".") in told
    assert np.allclose(cells(bt.plot(found, restored=True)), found.restored)
    figure = bt.plot(found, intervals=True, confidence=0.5)
    low, high = found.interval(0.5)
    assert f"between {min(float(low.min()), 0):.2g} and {max(float(high.max()), 0):.2g}" in notes(figure)
    cube = swept(("slice", "head", "word"), (2, 4, 3))
    figure = bt.plot(cube)
    assert np.allclose(cells(figure, 1), cube.values[:, 1]) and figure.axes[1].get_title() == "head 2"
    figure = bt.plot(swept(("slice", "word", "read"), (2, 3, 3), hole=True))
    assert "Blank: no such cell" in notes(figure) and np.isnan(cells(figure)[0, 0])
    tiny = swept(scale=1e-5)
    figure = bt.plot(tiny)
    assert (
        np.allclose(cells(figure), 1e6 * tiny.values)
        and figure.axes[0].child_axes[0].get_ylabel() == "mean effect, in 10⁻⁶"
    )


def notes(figure):
    return " ".join(t.get_text() for t in figure.texts).replace("\n", " ")


def test_lists_are_bars_with_intervals_the_strongest_in_their_order():
    found = swept(("cell",), (6,))
    figure = bt.plot(found)
    assert heights(figure) == pytest.approx(found.values.tolist())
    ends = np.array([line[:, 1] for line in figure.axes[0].collections[0].get_segments()])
    assert np.allclose(ends.T, torch.stack(found.interval()))
    figure = bt.plot(found, top=2)
    kept = sorted(int(name[2:]) for name, _ in found.top(2))
    assert heights(figure) == pytest.approx(found.values[kept].tolist()) and "The 2 strongest of 6" in notes(figure)
    assert heights(bt.plot(swept((), ()))) == pytest.approx([1e3 * float(swept((), ()).values)])
    found = mediated(axes=("cell",), sizes=(3,))
    assert heights(bt.plot(found)) == pytest.approx([*found.direct.tolist(), *found.indirect.tolist()])
    found = mediated(sizes=(5, 3))
    figure = bt.plot(found)
    assert np.allclose(cells(figure, 0), found.direct) and np.allclose(cells(figure, 1), found.indirect)
    assert np.allclose(cells(bt.plot(found, show="interaction")), found.interaction)
    assert f"The total effect is {float(found.total.mean()):.3g}".replace("-", "−") in notes(figure)


def test_a_cell_below_zero_is_known_without_its_colour():
    found = swept(sizes=(2, 3), examples=1)
    found.outcomes[0, :2, 0] = found.corrupt + torch.tensor([0.001, -0.001])  # too weak for a stroke
    wide = replace(
        found,
        labels={"slice": found.labels["slice"], "word": tuple("abc" * 30)},
        positions={},
        names=dict.fromkeys(itertools.product(range(2), range(90)), "x"),
        outcomes=found.outcomes.repeat(1, 30, 1),
    )
    figure = bt.plot(wide)
    strokes = next(each for each in figure.axes[0].collections if each.get_label() == "below 0")
    assert not figure.axes[0].texts
    drawn = {(int(line[0, 1]), round(float(line[:, 0].mean()))) for line in strokes.get_segments()}
    least = 0.02 * float(wide.values.abs().max())
    assert drawn == {tuple(index) for index in np.argwhere(wide.values.numpy() < -least).tolist()}


def test_plots_leave_what_has_no_page_to_parts_of_it():
    deep = swept(("slice", "head", "word", "read"), (2, 2, 3, 3))
    with pytest.raises(bt.BNetError, match=r"\.select\(slice=1\)"):
        bt.plot(deep)
    assert np.allclose(cells(bt.plot(deep.select(slice=1))), deep.values[0, 0])
    with pytest.raises(bt.BNetError, match="show='indirect'"):
        bt.plot(mediated(axes=("slice", "head", "word"), sizes=(2, 4, 3)))
    own = Figure().subplots()
    assert bt.plot(swept(), ax=own) is own.figure


def test_figures_mark_the_strongest_cells():
    net = bt.decoder(dim=8, heads=2, slices=1, vocabulary=["the", "cat", "dog", "sat"])
    clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    drawn = {*corrupt.graph()}
    found = bt.sweep(clean, corrupt, at="v -> a", metric={"y_2": ("cat", "dog")})
    marks, ways = resolve_highlight(found, drawn)
    (best, effect), *_ = found.top(1)
    source, target = best.split(" -> ")
    assert marks[target] == f"{effect:+.2g}" and marks[source] == "marked" and (source, target) in ways
    assert {source, target} <= {*resolve_highlight(best, drawn)[0]}
    assert [*resolve_highlight({"q_0_*_1": "here"}, drawn)[0]] == ["q_0_0_1", "q_0_1_1"]
    assert resolve_highlight({"q_0_0_1": "first", "q_0_0_1 -> a_0_0_1": "then"}, drawn)[0] == {
        "q_0_0_1": "first",
        "a_0_0_1": "then",
    }
    both = resolve_highlight({"q_0_0_1": "first", "q_0_*_1": "then"}, drawn)[0]
    assert both == {"q_0_0_1": "first", "q_0_1_1": "then"}
    assert [*resolve_highlight("j_0_1_2[0]", drawn)[0]] == ["a_0_1_2"]
    assert ("v_0_1_0", "a_0_1_2") in resolve_highlight("v_0_*_0 -> a_0_1_2", drawn)[1]
    box = next(box for box in corrupt.picture(highlight=found).boxes if box.name == target)
    assert box.mark == f"{effect:+.2g}"
    with pytest.raises(bt.UnknownNameError, match="q_0_0_1"):
        resolve_highlight("q_0_0_9", drawn)


def test_bad_input_says_what_is_allowed():
    found, plain = swept(), swept(clean=False)
    same = replace(found, clean=found.corrupt)
    cube = swept(("slice", "head", "word"), (2, 2, 2))
    for ask, told in [
        (lambda: found["x_0_7"], "near matches are x_0_"),
        (lambda: found.select(head=0), "slice"),
        (lambda: found.select(slice=0), "one of 1 to 2; got 0"),
        (lambda: plain.total, "a clean run"),
        (lambda: same.restored, "whose metrics differ"),
        (lambda: mediated().of("total"), "'direct', 'indirect', 'interaction'"),
        (lambda: bt.plot(found, interval=True), "intervals"),
        (lambda: bt.plot(swept(examples=1), intervals=True), "a single example"),
        (lambda: bt.plot(found, intervals=True, restored=True), "restored=True"),
        (lambda: bt.plot(cube, intervals=True), "3 axes"),
        (lambda: bt.plot(mediated(), show="total"), "'direct', 'indirect', 'interaction'"),
    ]:
        assert told in refusal(ask), told

"""Plots fit a width and the axes of a user: exact size, legible texts, nothing cut and nothing overlapping."""

import io
import itertools
import logging
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib import image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

import bnet_transformer as bt
from bnet_transformer.figures.fonts import MIN_FONT_SIZE, NAMED_WIDTHS
from bnet_transformer.learning.training import Trained
from bnet_transformer.plots.heat_maps import make_labelled_array
from bnet_transformer.plots.registry import PLOTS_BY_TYPE
from tests.plot_examples import EXAMPLES, build, random_array

pytestmark = pytest.mark.slow

TOLERANCE = 1.5  # pixels
# The gallery and tests/test_results.py plot these.
OTHERWISE_PLOTTED = {"Circuit", "CircuitTests", "EstimateCalibration", "ResultComparison"}
QUICK = ("posterior", "sweep, errors")


def get_texts(figure):
    """The visible texts of a figure that are not empty."""
    figure.draw_without_rendering()
    axes = get_axes(figure)
    hidden = {id(text) for ax in figure.axes if not ax.get_visible() for text in ax.findobj(Text)}
    for axis in (axis for ax in axes for axis in (ax.xaxis, ax.yaxis)):
        labels = {id(label) for label in get_tick_labels(axis)}
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        hidden |= {id(label) for tick in ticks for label in (tick.label1, tick.label2)} - labels
    texts = figure.findobj(lambda item: isinstance(item, Text) and item.get_visible() and item.get_text().strip())
    return [text for text in texts if id(text) not in hidden]


def get_axes(figure):
    return [panel for ax in figure.axes if ax.get_visible() for panel in (ax, *ax.child_axes)]


def get_tick_labels(axis):
    """The labels of the ticks within the limits of an axis."""
    low, high = sorted(axis.get_view_interval())
    margin = 1e-6 * (high - low)
    ticks = zip(axis.get_major_ticks(), axis.get_majorticklocs(), strict=False)
    return [
        label
        for tick, position in ticks
        if low - margin <= position <= high + margin
        for label in (tick.label1, tick.label2)
        if label.get_visible() and label.get_text()
    ]


def check_ticks(figure):
    """The labels of neighbouring ticks do not overlap."""
    for ax in get_axes(figure):
        for axis, side in ((ax.xaxis, 0), (ax.yaxis, 1)):
            labels = get_tick_labels(axis)
            if any(label.get_rotation() not in (0, 90) for label in labels):
                positions = sorted(label.get_transform().transform(label.get_position())[side] for label in labels)
                height = labels[0].get_fontsize() * figure.dpi / 72
                assert all(b - a >= 1.3 * height for a, b in itertools.pairwise(positions))
                continue
            ends = sorted(tuple(label.get_window_extent().get_points()[:, side]) for label in labels)
            texts = [label.get_text() for label in labels]
            assert all(a[1] <= b[0] + TOLERANCE for a, b in itertools.pairwise(ends)), texts


def check_inside(texts, box):
    """All texts are inside a box in pixels."""
    outside = []
    for text in texts:
        (x0, y0), (x1, y1) = text.get_window_extent().get_points()
        if min(x0 - box.x0, y0 - box.y0, box.x1 - x1, box.y1 - y1) < -TOLERANCE:
            outside.append((text.get_text(), [x0 - box.x0, y0 - box.y0, box.x1 - x1, box.y1 - y1]))
    assert not outside


def check_cells(figure):
    """The numbers of cells are inside their cells."""
    for ax in get_axes(figure):
        if not any(type(artist).__name__ == "QuadMesh" for artist in ax.collections) or "colorbar" in ax.get_label():
            continue
        unit = np.abs(np.subtract(*ax.transData.transform([(1, 1), (0, 0)])))
        for text in ax.texts:
            extent = text.get_window_extent()
            assert extent.width <= unit[0] + TOLERANCE and extent.height <= 1.1 * unit[1] + TOLERANCE, text.get_text()
        by_cell = [tuple(map(round, text.get_position())) for text in ax.texts]
        filled = sum(artist.get_array().count() for artist in ax.collections if type(artist).__name__ == "QuadMesh")
        assert len(set(by_cell)) in (0, filled)  # all numbers or none


def get_width(data, kind):
    """The width in inches that a file states."""
    if kind == "png":
        return image.imread(io.BytesIO(data)).shape[1] / 200
    if kind == "svg":
        return float(ElementTree.fromstring(data).get("width").removesuffix("pt")) / 72
    return float(re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ", data)[1]) / 72


SIZES = [
    *(pytest.param(name, "column", marks=[pytest.mark.slow] * (name not in QUICK)) for name in EXAMPLES),
    *(pytest.param(name, "text", marks=pytest.mark.slow) for name in [*EXAMPLES][::6]),
]


@pytest.mark.slow
def test_the_examples_have_every_kind_of_plot():
    kinds = [next((kind for kind in PLOTS_BY_TYPE if isinstance(build(name), kind)), list) for name in EXAMPLES]
    assert {kind.__name__ for kind in set(PLOTS_BY_TYPE) - set(kinds)} == OTHERWISE_PLOTTED


@pytest.mark.parametrize(("name", "width"), SIZES)
def test_a_plot_has_exactly_its_width_and_legible_texts(name, width):
    figure = bt.plot(build(name), width=width, theme="dark" if width == "text" else "light", **EXAMPLES[name].options)
    texts = get_texts(figure)
    assert texts and min(text.get_fontsize() for text in texts) >= MIN_FONT_SIZE
    check_inside(texts, figure.bbox)
    check_ticks(figure)
    check_cells(figure)
    titles = [ax.title.get_window_extent() for ax in figure.axes if ax.get_title()]
    assert not any(first.overlaps(second) for first, second in itertools.combinations(titles, 2))
    written = " ".join(text.get_text() for text in texts)
    assert not re.search(r"[-−]0?\.?0+(?![\d.])", written.replace("word 0", ""))
    assert figure.get_figwidth() == NAMED_WIDTHS[width]
    buffer = io.BytesIO()
    figure.savefig(buffer, format="pdf", bbox_inches="tight")
    assert get_width(buffer.getvalue(), "pdf") == pytest.approx(NAMED_WIDTHS[width], abs=1e-4)


@pytest.mark.parametrize(
    "names",
    [
        ("attention, one head", "posterior", "sweep, errors", "roles"),
        ("damage", "fit", "tree", "contributions"),
        ("reads, flow", "check", "lens", "most probable states"),
    ],
)
def test_plots_on_the_axes_of_a_user_do_not_overlap(names):
    figure = Figure(figsize=(7.5, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2).ravel().tolist()
    for name, ax in zip(names, panels, strict=True):
        assert bt.plot(build(name), ax=ax, **EXAMPLES[name].options) is figure
    texts = get_texts(figure)
    check_inside(texts, figure.bbox)
    check_ticks(figure)
    boxes = [ax.get_tightbbox().shrunk(0.99, 0.99) for ax in panels]
    assert not any(first.overlaps(second) for first, second in itertools.combinations(boxes, 2))
    assert min(text.get_fontsize() for text in texts) >= MIN_FONT_SIZE


@pytest.mark.parametrize(
    ("kind", "width", "inches"),
    [("svg", "8.5cm", 8.5 / 2.54), pytest.param("png", "240pt", 240 / 72, marks=pytest.mark.slow)],
)
def test_files_have_the_physical_width(kind, width, inches):
    figure = bt.plot(build("posterior"), width=width, **EXAMPLES["posterior"].options)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=200, bbox_inches=None)
    assert get_width(buffer.getvalue(), kind) == pytest.approx(inches, abs=0.006)
    assert len(figure._repr_png_()) > 1000


def test_a_width_without_space_and_a_width_of_foreign_axes_are_errors():
    with pytest.raises(bt.BNetError, match="space for the labels"):
        bt.plot(build("attention, heads"), width="0.6in")
    with pytest.raises(bt.BNetError, match="ax="):
        bt.plot(build("posterior"), width="column", ax=Figure().subplots(), node="c")
    with pytest.raises(bt.BNetError, match="special"):
        bt.plot(build("check"), special=False)


@pytest.mark.slow
def test_titles_are_replaced_or_left_out():
    titles = [
        bt.plot(build("attention, one head"), width="column", title=title, slice=0, head=0).texts
        for title in (None, "", "A title " * 12)
    ]
    written = [[text.get_text() for text in texts] for texts in titles]
    assert "Slice 0, head 0" in written[0] and not any("Slice" in text for text in written[1])
    (long,) = [text for text in titles[2] if text.get_text().startswith("A title")]
    assert "\n" in long.get_text() and long.get_text().split() == ["A", "title"] * 12


@pytest.mark.slow
def test_a_font_is_named_in_svg_and_required_in_other_files():
    figure = bt.plot(build("posterior"), font="No Such Font", width="column", **EXAMPLES["posterior"].options)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    texts = re.findall(rb"<text[^>]*>", buffer.getvalue())
    assert texts and all(b"No Such Font" in text for text in texts)
    assert not any("No Such Font" in text.get_fontfamily() for text in get_texts(figure))
    for options in ({"format": "png"}, {"format": "pdf"}):
        with pytest.raises(bt.BNetError, match="font of this system"):
            figure.savefig(io.BytesIO(), **options)
    with pytest.warns(UserWarning, match="not installed"):
        figure._repr_png_()
    serif = bt.plot(build("posterior"), font="serif", width="column", **EXAMPLES["posterior"].options)
    serif.savefig(io.BytesIO(), format="pdf")
    assert {text.get_fontfamily()[0] for text in get_texts(serif)} == {"serif"}
    with pytest.raises(bt.BNetError, match="font"):
        bt.plot(build("posterior"), font=12, **EXAMPLES["posterior"].options)


def test_a_missing_font_is_silent_until_a_file_contains_its_letters(caplog):
    values = torch.tensor([0.2, 0.8])
    with pytest.raises(bt.BNetError, match="font"):
        bt.plot(values, font=" serif ")
    lower = bt.plot(values, font="dejavu serif", width="column")
    lower.savefig(io.BytesIO(), format="png")
    assert {text.get_fontfamily()[0] for text in get_texts(lower)} == {"DejaVu Serif"}
    logger = logging.getLogger("matplotlib.font_manager")
    level = logger.level
    figure = bt.plot(values, font="cursive", width="column")
    figure.canvas.draw()
    figure.savefig(io.BytesIO(), format="svg")
    assert "findfont" not in caplog.text and logger.level == level
    with pytest.raises(bt.BNetError, match="font of this system"):
        figure.savefig(io.BytesIO(), format="pdf")
    with pytest.raises(bt.BNetError, match="font of this system"):
        bt.plot(values, font="No Such Font", ax=Figure().subplots())


def test_a_png_with_a_width_has_the_resolution_of_print():
    figure = bt.plot(torch.tensor([0.2, 0.8]), width="column")
    widths = []
    for options in ({}, {"dpi": 100}):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", **options)
        widths.append(int.from_bytes(buffer.getvalue()[16:20], "big"))
    assert widths == [990, 330] and int.from_bytes(figure._repr_png_()[16:20], "big") == round(3.3 * 144)


def test_contributions_have_one_minus_sign_and_special_needs_words():
    parts = build("contributions")
    figure = bt.plot(replace(parts, value=-parts.value.abs()))
    titles = [text.get_text() for text in get_texts(figure)]
    (title,) = [text for text in titles if text.startswith("cat")]
    assert title.startswith("cat − sat at ") and "-" not in title
    for name, reason in (("contributions", "a plot without words"), ("tree", "A plot of TanTree shows all words")):
        with pytest.raises(bt.BNetError, match=reason):
            bt.plot(build(name), special=False)


def get_ticks(ax, axis="x"):
    return [label.get_text() for label in (ax.get_xticklabels() if axis == "x" else ax.get_yticklabels())]


def get_notes(figure):
    return " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


FLAGS = (True, *[False] * 7, True)


def test_special_tokens_are_left_out_of_reads_with_a_note():
    reads = replace(build("reads"), special=FLAGS)
    figure = bt.plot(reads, special=False)
    cells = np.ma.filled(figure.axes[0].collections[0].get_array(), np.nan)
    np.testing.assert_allclose(np.nan_to_num(cells), reads.matrix[1:8, 1:8].numpy())
    share = float(reads.matrix[1:8][:, [0, 8]].sum(1).mean())
    assert f"{share:.1%} of the attention" in get_notes(figure) and get_ticks(figure.axes[0]) == list(reads.tokens[1:8])
    assert len(get_ticks(bt.plot(reads, special=False, show="entropy").axes[0])) == 7
    with pytest.raises(bt.BNetError, match="unknown"):
        bt.plot(replace(reads, special=()), special=False)
    with pytest.raises(bt.BNetError, match="all words are special"):
        bt.plot(replace(reads, special=(True,) * 9), special=False)
    with pytest.raises(bt.BNetError, match="flow"):
        bt.plot(reads, special=False, word=8)


def test_special_tokens_are_left_out_of_attention(monkeypatch):
    s = build("attention, one head")
    monkeypatch.setattr(type(s.state.encoded), "flag_special_tokens", lambda *_: FLAGS)
    figure = bt.plot(s, slice=0, head=1, special=False)
    cells = np.ma.filled(figure.axes[0].collections[0].get_array(), np.nan)
    attention = s.attention(0)[1].numpy()
    np.testing.assert_allclose(np.nan_to_num(cells), attention[1:8, 1:8])
    assert f"{attention[1:8][:, [0, 8]].sum(1).mean():.1%} of the attention" in get_notes(figure)


@pytest.mark.slow
def test_special_tokens_are_left_out_of_results_by_word():
    lens = replace(build("lens"), special=FLAGS)
    assert get_ticks(bt.plot(lens, special=False).axes[0]) == list(lens.words[1:8])
    sweep = replace(build("sweep"), special={"word": (True, False, False, False, False)})
    figure = bt.plot(sweep, special=False)
    assert get_ticks(figure.axes[0]) == ["cat / dog", "sat / ran", "on", "a"] and "The special token" in get_notes(
        figure
    )
    group = replace(build("posteriors of a group"), special=(True, False, False))
    assert len(get_ticks(bt.plot(group, special=False).axes[0])) == 2
    parts = replace(build("contributions, words"), special=(True, False, False, False))
    figure = bt.plot(parts, by="word", special=False)
    frame = parts.by_word()
    hidden = frame["total"].iloc[0]
    assert get_ticks(figure.axes[0]) == ["1 cat", "2 sat"] and f"sum to {hidden:+.3g}" in get_notes(figure)
    with pytest.raises(bt.BNetError, match="a plot with words"):
        bt.plot(parts, by="head", special=False)


def test_words_of_sweeps_have_both_tokens_or_their_number():
    assert get_ticks(bt.plot(build("sweep")).axes[0]) == ["the", "cat / dog", "sat / ran", "on", "a"]
    assert get_ticks(bt.plot(build("sweep, errors")).axes[0]) == ["word 0", "word 1", "word 2", "on", "a"]


def test_arrows_without_effect_are_left_out_and_zeros_are_written():
    result = build("sweep, arrows")
    values = result.values.numpy()
    figure = bt.plot(result)
    has_effect = (np.nan_to_num(values) != 0).any(0)
    expected = values[:, has_effect.any(1)][:, :, has_effect.any(0)]
    for k in range(len(values)):
        cells = np.ma.filled(figure.axes[k].collections[0].get_array(), np.nan)
        np.testing.assert_allclose(cells, expected[k])
        texts = {tuple(map(round, text.get_position())): text.get_text() for text in figure.axes[k].texts}
        for (row, column), value in np.ndenumerate(expected[k]):
            assert (texts.get((column, row)) == "0") == (value == 0)
            assert ((column, row) in texts) == (not np.isnan(value))


def test_numbers_share_a_power_of_ten_that_the_label_names():
    figure = bt.plot(build("small numbers"), axes=("slice", "head"))
    assert figure.axes[0].child_axes[0].get_ylabel() == "value, in 10⁻⁶"
    bars = bt.plot(torch.tensor([2e-7, -3e-7]), axes="feature")
    bars.draw_without_rendering()
    assert bars.axes[0].get_ylabel() == "value, in 10⁻⁶" and bars.axes[0].yaxis.get_offset_text().get_text() == ""
    curve = bt.plot(Trained(None, (3e7, 2e7, 1e7), (), 3))
    curve.draw_without_rendering()
    assert curve.axes[0].get_ylabel() == "loss, in 10⁶" and curve.axes[0].yaxis.get_offset_text().get_text() == ""


@pytest.mark.slow
def test_intervals_of_small_cells_are_bars():
    values, error = random_array(30, 30), torch.full((30, 30), 0.3)
    array = make_labelled_array(values, ("slice", "head"), error=error)
    figure = bt.plot(array, width="column")
    interval = next(item for item in figure.axes[0].collections if item.get_label() == "interval")
    assert interval.get_linewidths()[0] > 1.2 and "interval (bar)" in get_notes(figure)
    low, high = array.low.min(), array.high.max()
    ends = [low + (high - low) * (0.4 - (interval.get_segments()[0][:, 1])) / 0.8]
    np.testing.assert_allclose(ends[0], [array.low[0, 0], array.high[0, 0]])


def test_the_panels_of_many_heads_share_the_words_at_the_outer_edges():
    figure = bt.plot(build("attention, many heads"), slice=0)
    panels = [ax for ax in figure.axes if ax.get_label() != "<colorbar>" and ax.get_visible()]
    columns = len({round(ax.get_position().x0, 4) for ax in panels})
    for k, ax in enumerate(panels):
        has_rows, has_columns = bool(get_tick_labels(ax.yaxis)), bool(get_tick_labels(ax.xaxis))
        assert has_rows == (k % columns == 0) and has_columns == (k + columns >= len(panels))

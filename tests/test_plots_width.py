"""Plots fit a width and the axes of a user: exact size, legible texts, nothing cut and nothing overlapping."""

import io
import itertools
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib import image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

import bnet_transformer as bt
from bnet_transformer.figures.size import MIN_FONT_SIZE, NAMED_WIDTHS
from bnet_transformer.plots.registry import PLOTS_BY_TYPE
from tests.plot_examples import EXAMPLES, build

TOLERANCE = 1.5  # pixels
QUICK = ("attention, one head", "posterior", "sweep, errors")


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
        for tick, place in ticks
        if low - margin <= place <= high + margin
        for label in (tick.label1, tick.label2)
        if label.get_visible() and label.get_text()
    ]


def check_ticks(figure):
    """The labels of neighbouring ticks do not overlap."""
    for ax in get_axes(figure):
        for axis, side in ((ax.xaxis, 0), (ax.yaxis, 1)):
            labels = get_tick_labels(axis)
            if any(label.get_rotation() not in (0, 90) for label in labels):
                places = sorted(label.get_transform().transform(label.get_position())[side] for label in labels)
                height = labels[0].get_fontsize() * figure.dpi / 72
                assert all(b - a >= 1.3 * height for a, b in itertools.pairwise(places))
                continue
            ends = sorted(tuple(label.get_window_extent().get_points()[:, side]) for label in labels)
            texts = [label.get_text() for label in labels]
            assert all(a[1] <= b[0] + TOLERANCE for a, b in itertools.pairwise(ends)), texts


def check_inside(texts, box):
    """All texts lie in a box in pixels."""
    outside = []
    for text in texts:
        (x0, y0), (x1, y1) = text.get_window_extent().get_points()
        if min(x0 - box.x0, y0 - box.y0, box.x1 - x1, box.y1 - y1) < -TOLERANCE:
            outside.append((text.get_text(), [x0 - box.x0, y0 - box.y0, box.x1 - x1, box.y1 - y1]))
    assert not outside


def check_cells(figure):
    """The numbers of cells lie in their cells."""
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


def mark_slow(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.slow
def test_the_examples_have_every_kind_of_plot():
    kinds = [next((kind for kind in PLOTS_BY_TYPE if isinstance(build(name), kind)), list) for name in EXAMPLES]
    assert set(PLOTS_BY_TYPE) - set(kinds) == set()


@pytest.mark.parametrize("name", mark_slow(EXAMPLES))
@pytest.mark.parametrize("width", ["column", pytest.param("text", marks=pytest.mark.slow)])
def test_a_plot_has_exactly_its_width_and_legible_texts(name, width):
    figure = bt.plot(build(name), width=width, theme="dark" if width == "text" else "light", **EXAMPLES[name].options)
    texts = get_texts(figure)
    assert texts and min(text.get_fontsize() for text in texts) >= MIN_FONT_SIZE
    check_inside(texts, figure.bbox)
    check_ticks(figure)
    check_cells(figure)
    written = " ".join(text.get_text() for text in texts)
    assert not re.search(r"[-−]0?\.?0+(?![\d.])", written.replace("word 0", ""))
    assert figure.get_figwidth() == NAMED_WIDTHS[width]
    for options in ({}, {"bbox_inches": "tight"}):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="pdf", **options)
        assert get_width(buffer.getvalue(), "pdf") == pytest.approx(NAMED_WIDTHS[width], abs=1e-4)


def draw_grid(names, layout=None):
    """Nine plots in the subplots of a figure of the width of a column; return the figure, and the space of each."""
    figure = Figure(figsize=(3.3, 3.6), dpi=144, layout=layout)
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 3).ravel().tolist()
    for name, ax in zip(names, panels, strict=False):
        bt.plot(build(name), ax=ax, **EXAMPLES[name].options)
    figure.draw_without_rendering()
    return figure, panels


def get_panel_texts(ax):
    inside = {id(text) for text in ax.findobj(Text)}
    return [text for text in get_texts(ax.figure) if id(text) in inside]


SEVERAL_PANELS = ("attention", "attention, heads", "attention, many heads", "sweep, three axes", "sweep, arrows")
SEVERAL_PANELS += ("mediation, maps", "heads of a fit, cosine", "three axes")
SINGLE_PANELS = [
    name
    for name in EXAMPLES
    if name not in SEVERAL_PANELS
    and name not in ("attention, heads", "attention, many heads", "heads of a fit, cosine")
]


def test_an_attention_plot_stays_in_the_cell_of_a_small_subplot():
    figure, panels = draw_grid(["attention, one head"])
    check_grid(figure, panels, 1)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(SINGLE_PANELS), 9))
def test_plots_stay_in_the_cells_of_small_subplots(start):
    names = SINGLE_PANELS[start : start + 9]
    figure, panels = draw_grid(names)
    check_grid(figure, panels, len(names))


def check_grid(figure, panels, count):
    spec = figure.axes[0].get_gridspec()
    bottoms, tops, lefts, rights = spec.get_grid_positions(figure)
    middles = [0, *((rights[:-1] + lefts[1:]) / 2), 1], [1, *((bottoms[:-1] + tops[1:]) / 2), 0]
    for k, ax in enumerate(panels[:count]):
        row, column = divmod(k, 3)
        texts = get_panel_texts(ax)
        cell = figure.bbox.width * np.array(middles[0][column : column + 2])
        ends = figure.bbox.height * np.array(middles[1][row : row + 2])
        assert min(text.get_fontsize() for text in texts) >= MIN_FONT_SIZE
        check_inside(texts, Bbox.from_extents(cell[0], ends[1], cell[1], ends[0]))

"""The figure of a plot: its fonts, its layout, and how it is saved with an exact width."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, get_font_names
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.textpath import text_to_path
from matplotlib.transforms import Bbox

from bnet_transformer._core.files import as_path, atomic_write
from bnet_transformer.figures.font_names import resolve_font
from bnet_transformer.figures.fonts import BASE_FONT, text_width
from bnet_transformer.figures.labels import fill_lines
from bnet_transformer.figures.size import PRINT_DPI

PADDING = 0.06  # inches around the content
SHARED_LABEL_HEIGHT = 0.17  # inches of the label that all panels share
NOTE_SHARE = 0.97  # of the width: letters on a screen are up to 3% wider than in print
DPI = 144  # points per inch

RC_PARAMS: Any = {
    "text.parse_math": False,
    "font.family": [BASE_FONT],
    "font.size": 8.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "bnet_transformer",
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
}
VECTOR_FORMATS = ("svg", "svgz", "pdf", "ps", "eps", "pgf")
DATE_METADATA = {"svg": "Date", "pdf": "CreationDate"}  # omitted, so that equal plots have equal bytes
SAVE_HINT = "Install it, use another one, or save as SVG, which has only its name"
NAMED_FONT_FORMATS = ("svg", "svgz")  # a file of these formats has the name of a font, not its letters


@contextmanager
def plot_rc_context(text_colour: str) -> Iterator[None]:
    """A context with the matplotlib settings of plots."""
    with matplotlib.style.context("default"), matplotlib.rc_context({**RC_PARAMS, "text.color": text_colour}):
        yield


@contextmanager
def silence_font_search() -> Iterator[None]:
    """A context without the messages of matplotlib about a font that is not installed."""
    logger = logging.getLogger("matplotlib.font_manager")
    level = logger.level
    logger.setLevel(logging.ERROR + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def relative_font_width(font: str | None) -> float:
    """The width of text in an installed font relative to that in the default font, at least 1; 1 for None."""
    if font is None:
        return 1.0
    sample = "abcdefghijklmnopqrstuvwxyz 0123456789"
    widths = [
        text_to_path.get_text_width_height_descent(sample, FontProperties(family=family, size=10), ismath=False)[0]
        for family in (font, BASE_FONT)
    ]
    return max(1.0, widths[0] / widths[1])


class PlotFigure(Figure):
    """A Figure that saves text as text, without date and empty margins, and writes files atomically.

    With `exact_width`, files have the size of the figure. A notebook shows it without pyplot. A `missing_font` is named
    only in SVG: all texts have installed fonts, with which their sizes are measured.
    """

    text_colour = "black"
    exact_width = False
    missing_font = ""

    def draw(self, renderer: Any) -> None:
        with plot_rc_context(self.text_colour):
            super().draw(renderer)

    def get_tightbbox(self, renderer: Any = None, *args: Any, **options: Any) -> Bbox:
        """The box of the content in inches; with `exact_width`, that of the figure."""
        if self.exact_width:
            return Bbox.from_bounds(0, 0, *self.get_size_inches())
        return super().get_tightbbox(renderer, *args, **options)

    def savefig(self, fname: Any, **options: Any) -> None:
        is_path = isinstance(fname, str | os.PathLike)
        file_format = options.pop("format", None) or (as_path(fname).suffix[1:] if is_path else "")
        if not file_format:
            file_format = matplotlib.rcParams["savefig.format"]
            fname = f"{os.fspath(fname)}.{file_format}" if is_path else fname
        if self.missing_font and file_format.lower() not in NAMED_FONT_FORMATS:
            resolve_font(self.missing_font, get_font_names(), SAVE_HINT)
        if file_format.lower() in DATE_METADATA:
            options["metadata"] = {DATE_METADATA[file_format.lower()]: None, **(options.get("metadata") or {})}
        options = {"bbox_inches": "tight", "pad_inches": PADDING, **options}
        if self.exact_width:
            options |= {"bbox_inches": "tight", "pad_inches": 0}
            if file_format.lower() not in VECTOR_FORMATS:
                options = {"dpi": PRINT_DPI, **options}
        self._save(fname if is_path else None, fname, file_format, options)

    def _save(self, path: Any, target: Any, file_format: str, options: dict[str, Any]) -> None:
        """Write a file or a stream."""
        self.draw_without_rendering()  # compute the layout at the dpi of the figure, not of the file
        with (
            plot_rc_context(self.text_colour),
            self._name_missing_font(file_format),
            atomic_write(path) if path is not None else nullcontext(target) as stream,
        ):
            buffer = io.BytesIO()  # on a full disk, the writers of matplotlib raise errors other than OSError
            super().savefig(buffer if path is not None else stream, format=file_format, **options)
            if path is not None:
                stream.write_bytes(buffer.getvalue())

    @contextmanager
    def _name_missing_font(self, file_format: str) -> Iterator[None]:
        """A context in which the texts of an SVG have the font that is not installed as their first choice."""
        is_named = self.missing_font and file_format.lower() in NAMED_FONT_FORMATS
        texts: list[Any] = self.findobj(Text) if is_named else []
        families = {text: text.get_fontfamily() for text in texts if text.get_fontfamily()[0] == BASE_FONT}
        try:
            for text, names in families.items():
                text.set_fontfamily([self.missing_font, *names])
            with silence_font_search() if families else nullcontext():
                yield
        finally:
            for text, names in families.items():
                text.set_fontfamily(names)

    def _repr_png_(self) -> bytes:
        """The PNG that a notebook shows."""
        buffer = io.BytesIO()
        pad = 0 if self.exact_width else PADDING
        if self.missing_font:
            warnings.warn(
                f"font {self.missing_font!r} is not installed: {BASE_FONT} is shown. {SAVE_HINT}", stacklevel=2
            )
        self._save(None, buffer, "png", {"bbox_inches": "tight", "pad_inches": pad, "dpi": DPI})
        return buffer.getvalue()


def wrap_text(text: str, size: float, points: float, max_lines: int | None = None) -> str:
    """The text with line breaks at spaces, so that no line is wider than `points`; cut after `max_lines` lines."""
    lines = fill_lines(text.split(" "), lambda line: text_width(line, size) <= points)
    if max_lines is not None and len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], " ".join(lines[max_lines - 1 :])]
    return "\n".join(cut(line, size, points) for line in lines)


def cut(line: str, size: float, points: float) -> str:
    """The line, shortened with an ellipsis if it is wider than `points`."""
    if text_width(line, size) <= points:
        return line
    lengths = range(len(line) - 1, 0, -1)
    return next((f"{line[:n].rstrip()}…" for n in lengths if text_width(f"{line[:n]}…", size) <= points), "…")


def measure_content(figure: Figure) -> Bbox:
    """The box in pixels of the axes of a figure with their labels and legends, without the texts of the figure."""
    panels = [ax for ax in figure.axes if ax.get_visible()]
    legends = [legend for ax in panels if (legend := ax.get_legend()) is not None]
    boxes = [*(ax.get_tightbbox() for ax in panels), *(legend.get_window_extent() for legend in legends)]
    return Bbox.union([box for box in boxes if box is not None])


class FigureLayout(ConstrainedLayoutEngine):
    """Packs the panels as tightly as their labels allow, and puts title, shared axis labels and notes around them.

    With `exact_width`, title and notes span the width of the figure.
    """

    def __init__(self, exact_width: bool = False, font_scale: float = 1.0) -> None:
        super().__init__(compress=True)
        self.exact_width, self.font_scale = exact_width, font_scale
        self.texts: dict[str, Text] = {}
        self.notes: list[str] = []
        self.size: tuple[float, ...] = ()
        self.panels: Sequence[Axes] = ()

    def execute(self, fig: Any) -> None:
        size = tuple(fig.get_size_inches())
        if size != self.size and self.panels[0].get_subplotspec() is not None:
            if self.exact_width:
                left = ((SHARED_LABEL_HEIGHT if "y" in self.texts else 0) + PADDING / 2) / size[0]
                self.set(rect=(left, 0, 1 - left - PADDING / 2 / size[0], 1))
            super().execute(fig)  # a second run would move the panels slightly
        self.size = size
        inches = fig.dpi_scale_trans.inverted()
        box = inches.transform_bbox(measure_content(fig))
        panels = inches.transform_bbox(Bbox.union([ax.bbox for ax in self.panels if ax.get_visible()]))
        left = box.x0 - (SHARED_LABEL_HEIGHT if "y" in self.texts else 0.0)
        right = box.x1
        if self.exact_width:
            left, right = PADDING, size[0] - PADDING
        bottom = box.y0 - PADDING
        positions = {
            "y": (box.x0 - PADDING, (panels.y0 + panels.y1) / 2),
            "x": ((panels.x0 + panels.x1) / 2, bottom),
            "title": (left, box.y1 + PADDING),
            "notes": (left, bottom - (SHARED_LABEL_HEIGHT if "x" in self.texts else 0.0)),
        }
        for name, text in self.texts.items():
            text.set_position(np.divide(positions[name], size).tolist())
        if "notes" in self.texts:
            text = self.texts["notes"]
            points = max(120.0, NOTE_SHARE * 72 * (right - left)) / self.font_scale
            text.set_text("\n".join(wrap_text(note, float(text.get_fontsize()), points) for note in self.notes))

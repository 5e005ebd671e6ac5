"""SVG to PNG and PDF by typst: the same paths and the same text, so that all three formats are one layout.

The fonts are those of the system and DejaVu, which comes with matplotlib, so a bare machine shows the same letters.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import inspect
import shutil
import tempfile
import unicodedata
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from bnet_transformer.viz.labels import is_foreign, visible
from bnet_transformer.viz.picture import Picture
from bnet_transformer.viz.svg import to_svg

PAPER = (468.0, 648.0)  # points: a larger figure becomes a PDF of at most this width and height
DPI = 192.0
PIXELS = 8000.0  # a side of a PNG at most
DEJAVU = ("DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSerif-Italic.ttf")  # all that the figures ask for
# What lies between a figure and the code that draws it.
INSIDE = (str(Path(__file__).parents[1]), functools.__file__, contextlib.__file__)
# The figure arrives as an input, so nothing in it is read as typst. Without a date, the same figure is the same bytes.
PAGE = """
#set document(title: sys.inputs.title, date: none)
#set page(width: {width}pt, height: {height}pt, margin: 0pt, fill: none)
#image(bytes(sys.inputs.svg), format: "svg", width: {width}pt, height: {height}pt, alt: sys.inputs.title)
"""


def to_png(picture: Picture) -> bytes:
    """The picture as PNG, at 192 dots to the inch, or fewer where a side would pass 8,000."""
    dpi = min(DPI, 72.0 * PIXELS / max(picture.width, picture.height, 1.0))
    return _compiled(picture, 1.0, format="png", ppi=dpi)


def to_pdf(picture: Picture) -> bytes:
    """The picture as PDF: vectors and text that can be selected, made smaller where it would pass a page."""
    scale = min(1.0, PAPER[0] / max(picture.width, 1.0), PAPER[1] / max(picture.height, 1.0))
    return _compiled(picture, scale, format="pdf")


def _compiled(picture: Picture, scale: float, **options: Any) -> bytes:
    import typst

    page = PAGE.format(width=round(picture.width * scale, 3), height=round(picture.height * scale, 3))
    inputs = {"svg": to_svg(picture, printed=True), "title": visible(picture.title or "a figure")}
    _warn_of_missing_letters(picture)
    return bytes(typst.compile(page.encode(), font_paths=_fonts(), sys_inputs=inputs, **options))


@cache
def _fonts() -> Any:
    """The fonts of the system and DejaVu, sought once in a process: there may be thousands.

    typst takes folders, and matplotlib's own holds LastResort, which has a box for every letter and would be chosen for
    labels; so the three files that are needed are copied to a folder of their own, which goes when Python ends.
    """
    import typst

    found = importlib.util.find_spec("matplotlib")
    assert found is not None and found.origin is not None
    dejavu = Path(found.origin).parent / "mpl-data" / "fonts" / "ttf"
    folder = tempfile.TemporaryDirectory(prefix="bnet-fonts-")
    atexit.register(folder.cleanup)
    for name in DEJAVU:
        shutil.copyfile(dejavu / name, Path(folder.name) / name)
    return typst.Fonts(include_system_fonts=True, include_embedded_fonts=False, font_paths=[folder.name])


def _warn_of_missing_letters(picture: Picture) -> None:
    """Warn of letters that no font has: typst draws an empty box for each, and says nothing."""
    labels = [box.label for box in picture.boxes] + [line.runs for line in picture.lines]
    words = {visible(run.text) for label in labels for run in label if is_foreign(run.text)}
    if not words:  # most figures: matplotlib, which knows the fonts, is not imported for them
        return
    from bnet_transformer.viz.plots.canvas import written

    _, _, missing = written(words)
    if missing:
        some = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        warnings.warn(
            f"no font has the letters {some}: PNG and PDF show an empty box for each. Install a font that has them, "
            f"on Debian and Ubuntu such as {_package(missing[0])}; SVG takes the fonts of its reader",
            stacklevel=_caller(),
        )


def _caller() -> int:
    """The `stacklevel` of the code that draws: of the first frame that is not of this package."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    return level


def _package(letter: str) -> str:
    """The package of Debian whose font has a letter."""
    name = unicodedata.name(letter, "")
    if name.startswith(("CJK", "HIRAGANA", "KATAKANA", "HANGUL")):
        return "fonts-noto-cjk"
    return "fonts-noto-color-emoji" if unicodedata.category(letter) == "So" else "fonts-noto-core"

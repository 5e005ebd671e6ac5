"""Texts of a figure: fonts, the widths of texts, labels of nodes as runs of styled text, and widths on paper."""

from __future__ import annotations

import difflib
import math
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

from matplotlib.font_manager import FontProperties, findfont, findSystemFonts, fontManager
from matplotlib.ft2font import FT2Font, LoadFlags
from matplotlib.textpath import text_to_path

from bnet_transformer.errors import BNetError

# --------------------------------------------------------------------------------------------------------------------
# The name of a font: its validation, and the rule for a font that this system lacks.


# The generic names of CSS, and the fonts that take their place in PNG and PDF; matplotlib includes all three.
GENERIC_FONTS: Mapping[str, str] = {
    "serif": "DejaVu Serif",
    "sans-serif": "DejaVu Sans",
    "monospace": "DejaVu Sans Mono",
}
NAMED_FONT_HINT = "Install it, use another one, or write an SVG or TeX file, which needs only its name"
# A font name is written into SVG, TeX and DOT files: these characters have no meaning in any of them.
_FONT_NAME = re.compile(r"[^\W_](?:[\w .+-]*[\w.+-])?")


def check_font_name(font: object) -> str | None:
    """Return the name of a font family, or None; an error if it is not a name.

    >>> check_font_name("Times New Roman"), check_font_name(None)
    ('Times New Roman', None)
    """
    if font is None:
        return None
    if not isinstance(font, str) or not _FONT_NAME.fullmatch(font):
        expected = "the name of one font family"
        raise BNetError("font", expected=expected, actual=font, allowed='a name such as "Times New Roman" or "serif"')
    return font


def find_family(font: str, families: Collection[str]) -> str | None:
    """Return the one of the installed `families` that is a font, in any case of letters; None if none is.

    >>> find_family("dejavu serif", ["DejaVu Serif"]), find_family("serif", ["DejaVu Serif"]), find_family("Arial", [])
    ('DejaVu Serif', 'DejaVu Serif', None)
    """
    name = GENERIC_FONTS.get(font, font).casefold()
    return next((family for family in families if family.casefold() == name), None)


def resolve_font(font: str, families: Collection[str], hint: str = NAMED_FONT_HINT) -> str:
    """Return the family to use for a font in an image, one of the installed `families`.

    An image (PNG, PDF, a window) contains the letters of a font, so a font that the system lacks is an error. SVG and
    TeX files contain only its name: the viewer needs the font, and this system does not.
    """
    family = find_family(font, families)
    if family is None:
        matches = difflib.get_close_matches(font, sorted(families))
        expected = "a font of this system, for PNG and PDF"
        allowed = ", ".join([*GENERIC_FONTS, *matches])
        raise BNetError("font", expected=expected, actual=font, allowed=allowed, hint=hint)
    return family


BASE_FONT = "DejaVu Sans"  # included in matplotlib
LAST_RESORT_FONT = "Last Resort High-Efficiency"  # contains only empty boxes, and causes warnings
MISSING_GLYPH = "▯"
FONT_SIZE = 100.0  # at which a font is measured


def replace_missing_glyphs(texts: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the texts with missing characters replaced, the required font families, and the missing characters."""
    strings = list(texts)
    families, absent = _find_fonts(frozenset(letter for text in strings for letter in text))
    swapped = str.maketrans(dict.fromkeys(absent, MISSING_GLYPH))
    return [text.translate(swapped) for text in strings], list(families), sorted(absent)


@lru_cache(maxsize=2**14)
def text_width(text: str, size: float) -> float:
    """Return the width of a line of text in points; a character that `BASE_FONT` lacks counts as an M."""
    font = FontProperties(family=BASE_FONT, size=size)
    has = _supported_letters(findfont(font), frozenset(text))
    text = "".join(letter if letter in has else "M" for letter in text)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def advance_width(letter: str, family: str) -> float:
    """Return the width of a character in a font, relative to the font size; 0 if the font lacks it or is missing."""
    font = _load_font(GENERIC_FONTS.get(family, family))
    if font is None or ord(letter) not in font.get_charmap():
        return 0.0
    return float(font.load_char(ord(letter), flags=LoadFlags.NO_HINTING).linearHoriAdvance / 65536 / FONT_SIZE)


@lru_cache(maxsize=8)
def _load_font(family: str) -> FT2Font | None:
    """Return a font of the system in its regular style, or None."""
    path: str | None = None
    if family in {font.name for font in fontManager.ttflist}:
        path = str(findfont(FontProperties(family=family)))
    else:  # matplotlib stores its list of fonts, which may be older than a font
        files = (file for file in sorted(findSystemFonts()) if family in _family_names(file))
        path = next(files, None)
    if path is None:
        return None
    font = FT2Font(path)
    font.set_size(FONT_SIZE, 72.0)
    return font


def _family_names(path: str) -> tuple[str, ...]:
    """Return the family of a font file, if its style is regular."""
    try:
        font = FT2Font(path)
    except RuntimeError:  # FreeType cannot read the file
        return ()
    return (font.family_name,) if font.style_name in ("Regular", "Book", "Roman") else ()


@lru_cache(maxsize=64)
def _find_fonts(letters: frozenset[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the font families that cover these characters, `BASE_FONT` first, and the characters that no font has."""
    families = [BASE_FONT]
    missing = letters - _supported_letters(findfont(FontProperties(family=BASE_FONT)), letters)
    regular = {
        f.name for f in fontManager.ttflist if f.weight == 400 and f.style == "normal" and f.name != LAST_RESORT_FONT
    }
    for name in sorted(regular):
        if not missing:
            break
        has = _supported_letters(findfont(FontProperties(family=name)), missing)
        if has:
            families.append(name)
            missing -= has
    return tuple(families), missing


def _supported_letters(path: str, letters: frozenset[str]) -> frozenset[str]:
    """Return the characters of `letters` that a font contains."""
    return frozenset(letter for letter in letters if ord(letter) in _read_charmap(path))


@lru_cache(maxsize=64)
def _read_charmap(path: str) -> frozenset[int]:
    """Return the code points of the characters in the file of a font."""
    try:
        return frozenset(FT2Font(path).get_charmap())
    except RuntimeError:  # FreeType cannot read the file
        return frozenset()


# --------------------------------------------------------------------------------------------------------------------
# Labels of nodes as runs of styled text, and functions that escape and shorten tokens for display.


MAX_TOKEN_LENGTH = 16
INVISIBLE_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
SCRIPT_SCALE = 0.72  # size of subscripts and superscripts
# Widths of the characters of DejaVu Sans in hundredths of the font size, from the space to the tilde.
_LETTER_WIDTHS = """
32 40 46 84 64 95 78 27 39 39 50 84 32 36 32 34 64 64 64 64 64 64 64 64 64 64 34 34 84 84 84 53 100
68 69 70 77 63 58 77 75 29 29 66 56 86 75 79 60 79 69 63 61 73 68 99 69 61 69 39 34 39 84 50 50 61
63 55 63 62 35 63 63 28 28 58 28 97 63 61 63 63 41 52 39 63 59 82 59 59 52 64 34 64 84
"""
LETTER_WIDTHS = tuple(map(int, _LETTER_WIDTHS.split()))
_FONT: ContextVar[str | None] = ContextVar("font", default=None)  # the font for which labels are measured


@dataclass(frozen=True)
class TextRun:
    """A piece of a label: `text` (plain), `math` (an italic letter), `name` (upright), `sub`, `sup`, or `token`."""

    text: str
    style: str = "text"


def fill_lines(words: Iterable[str], fits: Callable[[str], bool]) -> list[str]:
    """Join words with spaces to lines that fit and are as long as possible; a word that does not fit is a line.

    >>> fill_lines(["the", "cat", "sat"], lambda line: len(line) < 8)
    ['the cat', 'sat']
    """
    lines: list[str] = []
    for word in words:
        if lines and fits(f"{lines[-1]} {word}"):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def format_token(word: object, max_length: int | None = MAX_TOKEN_LENGTH) -> str:
    r"""Return a word for display: invisible characters are escaped, and text beyond `max_length` becomes an ellipsis.

    With `max_length=None` the word is not shortened.

    >>> format_token("a\nb"), format_token(" "), format_token("x" * 200, 5)
    ('a\\nb', '␣', 'xxxx…')
    """
    text = str(word)
    is_cut = max_length is not None and len(text) > max_length
    prefix = text[: max_length - 1] if is_cut and max_length is not None else text
    visible = escape_invisible(prefix)
    if max_length is not None and len(visible) > max_length:
        visible, is_cut = visible[: max_length - 1], True
    if not visible.strip():
        visible = "␣" * len(visible) or "∅"
    return visible + "…" if is_cut else visible


@lru_cache(maxsize=2**12)
def escape_invisible(text: str) -> str:
    r"""Return the text with control, format and unassigned characters escaped: they break file formats and viewers.

    >>> escape_invisible("a\x00\u202eb")
    'a\\x00\\u202eb'
    """
    if text.isprintable():
        return text
    return "".join(
        letter.encode("unicode_escape", "surrogatepass").decode("ascii")
        if unicodedata.category(letter) in INVISIBLE_CATEGORIES
        else letter
        for letter in text
    )


def has_non_latin(text: str) -> bool:
    """Return True if the text has characters that a Latin font may lack.

    >>> has_non_latin("“naïve”…"), has_non_latin("中文")
    (False, True)
    """
    return any(letter > "\u024f" and not "\u2000" <= letter <= "\u206f" for letter in text)


def parse_role(role: str) -> tuple[TextRun, list[str]]:
    """Return the letter of a role and the parts of its subscript; a role without a letter is returned as a name.

    >>> parse_role("W_q"), parse_role("embed")
    ((TextRun(text='W', style='math'), ['q']), (TextRun(text='embed', style='name'), []))
    """
    parts = [part for part in role.split("_") if part]
    position = next((k for k, part in enumerate(parts) if len(part) == 1), None)
    if position is None:
        return TextRun(role.replace("_", " "), "name"), []
    return TextRun(parts.pop(position), "math"), parts


def format_node_label(
    role: str,
    *,
    slice: int | None = None,
    plates: Sequence[int] = (),
    word: int | None = None,
    token: str | None = None,
) -> tuple[TextRun, ...]:
    """Return the label of a node: its letter, the word as subscript, slice and plates as superscript, and its token.

    Indices of plates are in parentheses.

    >>> label_to_text(format_node_label("W_q", slice=1))
    'W_q^1'
    >>> label_to_text(format_node_label("x", slice=1, word=2, token="sat"))
    'x_2^1 “sat”'
    """
    letter, below = parse_role(role)
    runs = [letter]
    if word is not None:
        below.append(str(word))
    above = "" if slice is None else str(slice)
    above += "".join(f"({index})" for index in plates)
    if below:
        runs.append(TextRun(",".join(below), "sub"))
    if above:
        runs.append(TextRun(above, "sup"))
    if token is not None:
        runs.append(TextRun(f" “{format_token(token)}”", "token"))
    return tuple(runs)


def label_to_text(label: Iterable[TextRun]) -> str:
    """Return a label as one line of plain text."""
    marks = {"sub": "_", "sup": "^"}
    return "".join(marks.get(run.style, "") + run.text for run in label)


@contextmanager
def measuring_font(font: str | None) -> Iterator[None]:
    """Measure labels for a font: a letter is at least as wide as in this font, if it is installed."""
    token = _FONT.set(font)
    try:
        yield
    finally:
        _FONT.reset(token)


def measure_label(label: Iterable[TextRun], size: float) -> float:
    """Return an upper estimate of the width of a label in points."""
    font = _FONT.get()
    return sum(
        sum(_letter_width(letter, font) for letter in run.text)
        * size
        * (SCRIPT_SCALE if run.style in ("sub", "sup") else 1.0)
        for run in label
    )


@lru_cache(maxsize=2**12)
def _letter_width(letter: str, font: str | None = None) -> float:
    """The width of a character, relative to the font size."""
    if font is not None:
        return max(_letter_width(letter), advance_width(letter, font))
    if letter.isascii():
        return LETTER_WIDTHS[ord(letter) - 32] / 100 if " " <= letter <= "~" else 0.7
    if unicodedata.combining(letter):
        return 0.0
    return 1.15 if unicodedata.east_asian_width(letter) in "WF" else 1.0 if letter in "…—" else 0.7


# --------------------------------------------------------------------------------------------------------------------
# The width of a figure on paper or a slide: a number with a unit, or a name; and how compact its layout is.


POINTS_PER_INCH = 72.0
NAMED_WIDTHS: Mapping[str, float] = {"column": 3.3, "text": 6.9, "slide": 12.0}  # inches
INCHES_PER_UNIT: Mapping[str, float] = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / POINTS_PER_INCH}
MIN_WIDTH, MAX_WIDTH = 0.5, 200.0  # inches
MAX_HEIGHT = 9.0  # inches; a taller figure does not fit a page
SLIDE_RATIO = 9 / 16  # height by width
PRINT_DPI = 300.0  # of a PNG with a width
MIN_FONT_SIZE = 5.0  # points; smaller text is not legible in print
_NUMBER_WITH_UNIT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*")


def parse_width(width: object) -> float:
    """Convert the width of a figure to inches.

    Args:
        width: A number with a unit ("8.5cm", "85mm", "3.3in", "240pt"), or "column" (of a paper with two columns),
            "text" (of a page) or "slide".

    Returns:
        The width in inches.

    Raises:
        BNetError: The width is not one of these, or it is outside 0.5 to 200 inches.

    >>> parse_width("column"), parse_width("5.08 cm")
    (3.3, 2.0)
    """
    if isinstance(width, str) and width in NAMED_WIDTHS:
        return NAMED_WIDTHS[width]
    match = _NUMBER_WITH_UNIT.fullmatch(width) if isinstance(width, str) else None
    if match is None or match[2] not in INCHES_PER_UNIT:
        expected = 'a number with a unit, such as "8.5cm"'
        names = ", ".join([*(f'"{name}"' for name in NAMED_WIDTHS), "units " + ", ".join(INCHES_PER_UNIT)])
        raise BNetError("width", expected=expected, actual=width, allowed=names)
    inches = float(match[1]) * INCHES_PER_UNIT[match[2]]
    if not MIN_WIDTH <= inches <= MAX_WIDTH or not math.isfinite(inches):
        raise BNetError("width", expected=f"{MIN_WIDTH:g} to {MAX_WIDTH:g} inches", actual=f"{width} = {inches:g}in")
    return round(inches, 6)


@dataclass(frozen=True)
class Density:
    """How compact the layout of a figure is.

    Args:
        gap: A factor of the horizontal gaps.
        row_gap: A factor of the vertical gaps.
        padding: The horizontal space of a label in its box, in points.
        max_token: The maximum number of characters of a token in a label.
        is_upright: Whether the words of an attention grid are columns; None for columns if they are few.
    """

    gap: float = 1.0
    row_gap: float = 1.0
    padding: float = 16.0
    max_token: int = MAX_TOKEN_LENGTH
    is_upright: bool | None = None

    @property
    def min_box_width(self) -> float:
        """The minimum width of a box, in points."""
        return 20.0 + self.padding if self.padding > 8.0 else 20.0


# The layouts of an attention grid to try for a given width, from loose to compact. Short tokens come last.
GRID_DENSITIES = (
    *(Density(gap, row_gap=0.8) for gap in (2.4, 1.8, 1.4, 1.0)),
    *(Density(gap, 0.8, padding) for gap, padding in ((0.7, 13.0), (0.45, 11.0), (0.3, 9.0))),
    *(Density(gap, 0.8, is_upright=False) for gap in (1.0, 0.7, 0.5, 0.35)),
    *(Density(0.2, 0.8, 8.0, length, is_upright) for length in (10, 6, 4) for is_upright in (None, False)),
)
GRAPH_DENSITIES = tuple(density for density in GRID_DENSITIES if density.is_upright is None)

"""Labels of nodes as runs of styled text, and functions that escape and shorten tokens for display."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

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


def text_to_label(text: str) -> tuple[TextRun, ...]:
    """Return plain text as a label."""
    return (TextRun(text),)


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
        from bnet_transformer.figures.fonts import advance_width

        return max(_letter_width(letter), advance_width(letter, font))
    if letter.isascii():
        return LETTER_WIDTHS[ord(letter) - 32] / 100 if " " <= letter <= "~" else 0.7
    if unicodedata.combining(letter):
        return 0.0
    return 1.15 if unicodedata.east_asian_width(letter) in "WF" else 1.0 if letter in "…—" else 0.7

"""The installed fonts, found through matplotlib: the characters that they contain, and the widths of texts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from matplotlib.font_manager import FontProperties, findfont, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.textpath import text_to_path

BASE_FONT = "DejaVu Sans"  # included in matplotlib
LAST_RESORT_FONT = "Last Resort High-Efficiency"  # contains only empty boxes, and causes warnings
MISSING_GLYPH = "▯"


def replace_missing_glyphs(texts: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the texts with missing characters replaced, the required font families, and the missing characters."""
    strings = list(texts)
    families, absent = _find_fonts(frozenset(letter for text in strings for letter in text))
    swapped = str.maketrans(dict.fromkeys(absent, MISSING_GLYPH))
    return [text.translate(swapped) for text in strings], list(families), sorted(absent)


def text_width(text: str, size: float) -> float:
    """Return the width of a line of text in points; a character that `BASE_FONT` lacks counts as an M."""
    font = FontProperties(family=BASE_FONT, size=size)
    has = _supported_letters(findfont(font), frozenset(text))
    text = "".join(letter if letter in has else "M" for letter in text)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


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
    try:
        charmap = FT2Font(path).get_charmap()
    except RuntimeError:  # FreeType cannot read the file
        return frozenset()
    return frozenset(letter for letter in letters if ord(letter) in charmap)

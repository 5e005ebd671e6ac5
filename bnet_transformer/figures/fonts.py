"""The installed fonts, found through matplotlib: the characters that they contain, and the widths of texts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from matplotlib.font_manager import FontProperties, findfont, findSystemFonts, fontManager
from matplotlib.ft2font import FT2Font, LoadFlags
from matplotlib.textpath import text_to_path

from bnet_transformer.figures.font_names import GENERIC_FONTS

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
    try:
        charmap = FT2Font(path).get_charmap()
    except RuntimeError:  # FreeType cannot read the file
        return frozenset()
    return frozenset(letter for letter in letters if ord(letter) in charmap)

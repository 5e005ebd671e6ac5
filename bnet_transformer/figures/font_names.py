"""The name of a font: its validation, and the rule for a font that this system lacks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

from bnet_transformer.errors import BNetError

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

"""The colours of every picture, for light and dark paper: one name, one meaning, safe for colour-blind readers.

Colour is never the only sign: what a colour says, a border, a dash or a label says too.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from bnet_transformer.errors import one_of

THEMES = ("light", "dark")
COLOURS = {
    "ink": ("#1b1f24", "#e6e9ee"),  # text and borders
    "paper": ("#ffffff", "#14171c"),
    "grey": ("#6b7280", "#98a1ae"),  # what stands back: second text, plain arrows
    "prior": ("#b4bac3", "#5d6673"),  # what was before the evidence
    "line": ("#d5d9df", "#353b45"),  # frames and grids
    "q": ("#cc2f27", "#ff7a70"),  # queries, red as in the chapter
    "k": ("#0b66ad", "#62aef0"),  # keys
    "v": ("#0b8a68", "#3fc79d"),  # values
    "observed": ("#d9dce1", "#474e59"),  # fill of an observed node
    "do": ("#f6c453", "#a8741a"),  # fill of a node that is set
    "learnable": ("#8a5a9e", "#c79bdb"),  # what is learned
    "accent": ("#0b66ad", "#62aef0"),  # the one thing to look at
    "second": ("#c2571a", "#f0995c"),  # what is held beside it
}
PALETTES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {theme: MappingProxyType({name: pair[k] for name, pair in COLOURS.items()}) for k, theme in enumerate(THEMES)}
)

# Heads and other kinds without order: after Okabe and Ito, darkened or lightened until each stands out on its paper.
HEADS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "light": ("#0b66ad", "#c2571a", "#0b8a68", "#b3588c", "#b07d00", "#4a9fd0", "#6b7280", "#6a4c93"),
        "dark": ("#62aef0", "#f0995c", "#3fc79d", "#e393bf", "#e6c04d", "#9fd5f7", "#98a1ae", "#b79ae0"),
    }
)


def palette(theme: str = "light") -> Mapping[str, str]:
    """The named colours of a theme, `light` or `dark`.

    >>> palette("light")["q"], palette("dark")["paper"]
    ('#cc2f27', '#14171c')
    """
    one_of("theme", theme, THEMES)
    return PALETTES[theme]

"""The colours of every picture, for light and dark paper: one name, one meaning, safe for colour-blind readers.

Colour is never the only sign: what a colour says, a border, a dash or a label says too.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from bnet_transformer.errors import one_of

LIGHT: Mapping[str, str] = MappingProxyType(
    {
        "ink": "#1b1f24",  # text and borders
        "paper": "#ffffff",
        "grey": "#6b7280",  # what stands back: second text, plain arrows
        "prior": "#b4bac3",  # what was before the evidence
        "line": "#d5d9df",  # frames and grids
        "q": "#cc2f27",  # queries, red as in the chapter
        "k": "#0b66ad",  # keys
        "v": "#0b8a68",  # values
        "observed": "#d9dce1",  # fill of an observed node
        "do": "#f6c453",  # fill of a node that is set
        "learnable": "#8a5a9e",  # what is learned
        "accent": "#0b66ad",  # the one thing to look at
        "second": "#c2571a",  # what is held beside it
    }
)

DARK: Mapping[str, str] = MappingProxyType(
    {
        "ink": "#e6e9ee",
        "paper": "#14171c",
        "grey": "#98a1ae",
        "prior": "#5d6673",
        "line": "#353b45",
        "q": "#ff7a70",
        "k": "#62aef0",
        "v": "#3fc79d",
        "observed": "#474e59",
        "do": "#a8741a",
        "learnable": "#c79bdb",
        "accent": "#62aef0",
        "second": "#f0995c",
    }
)

PALETTES: Mapping[str, Mapping[str, str]] = MappingProxyType({"light": LIGHT, "dark": DARK})

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
    one_of("theme", theme, tuple(PALETTES))
    return PALETTES[theme]

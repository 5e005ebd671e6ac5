"""Rotary positions and windows, as the configs of families tell them: in today's words, and in those of before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bnet_transformer.axes import Reach
from bnet_transformer.errors import BNetError, number, whole
from bnet_transformer.tpm import Rotary

SCALINGS = ("default", "linear", "llama3")
BASE = 10000.0


def config_to_rotary(
    config: Mapping[str, Any], widths: tuple[int, int], part: object, base: object, length: int | None
) -> Rotary:
    """The rotary positions of heads, of which `widths` tells how wide they are and how wide the turns take them to be.

    `base`, and the `part` of the features that turns, are what the config tells beside its `rope_parameters`, which go
    first; all features turn where a family knows no part. `length` is how many words the model may read.
    """
    told = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(told, Mapping) or any(isinstance(value, Mapping) for value in told.values()):
        raise BNetError("rope_parameters of the config", expected="those of all slices, a mapping", got=told)
    kind = told.get("rope_type", told.get("type", "default"))
    if kind not in SCALINGS:
        raise BNetError("rope_type of the config", expected="a known one", got=kind, allowed=", ".join(SCALINGS))
    share = number("partial_rotary_factor of the config", told.get("partial_rotary_factor", part or 1), above=0)
    if share > 1 or (part is None and share < 1):
        wanted = "1: all features turn" if part is None else "at most 1"
        raise BNetError("partial_rotary_factor of the config", expected=wanted, got=share)
    turned = int(widths[1] * share)
    of_heads = None if turned == widths[0] else turned
    base = number("rope_theta of the config", told.get("rope_theta") or base or BASE, above=0)
    if kind == "default":
        return Rotary(base, of_heads)
    factor = number("factor of the rope_parameters", told.get("factor"), above=0)
    known = {"original_max_position_embeddings": length} | dict(told) | dict(config)  # what stands outside goes first
    return Rotary(base, of_heads, factor, _bands(known) if kind == "llama3" else None)


def _bands(told: Mapping[str, Any]) -> tuple[float, float, int]:
    """Which turns are slow, in a sentence of the length that a model was first trained on."""
    names = ("low_freq_factor", "high_freq_factor")
    low, high = (number(f"{name} of the rope_parameters", told.get(name), above=0) for name in names)
    what = "original_max_position_embeddings"
    return low, high, whole(f"{what} of the rope_parameters", told.get(what))


def is_causal(config: Mapping[str, Any]) -> bool:
    """False where a config lets the words of a decoder read later ones too."""
    return bool(config.get("is_causal", True))


def config_to_reach(types: Sequence[str] | None, window: int | None, first: int, slices: int) -> Reach:
    """Which words a word of a causal stack reads: all those before it, or those of a window alone.

    Slices from `first` on have the window, unless the config tells the types of its slices; they are of one type.
    """
    if types is not None and not (isinstance(types, list | tuple) and all(isinstance(each, str) for each in types)):
        raise BNetError("layer_types of the config", expected="a list of the types of its slices", got=types)
    slides = [window is not None and t >= first for t in range(slices)]
    types = types or ["sliding_attention" if each else "full_attention" for each in slides]
    if len(set(types)) > 1 or types[0] not in ("sliding_attention", "full_attention"):
        got, allowed = ", ".join(map(str, types)), "full_attention in every slice, sliding_attention in every slice"
        raise BNetError("layer_types of the config", expected="slices that all read alike", got=got, allowed=allowed)
    if window is None or types[0] == "full_attention":
        return Reach("causal")
    return Reach("recent", window - 1)

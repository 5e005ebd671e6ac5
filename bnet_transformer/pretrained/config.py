"""What a config tells: its config.json as `transformers` reads it, labels, rotary positions, windows, patches.

The config classes of `transformers` are asked for alternative names, defaults and derived values where it is installed
and knows the model type; else the family's own tables, `Family.aliases` and `Family.config`, say the same.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bnet_transformer.axes import Reach
from bnet_transformer.errors import BNetError, FileError, number, shown, whole
from bnet_transformer.tpm import Patches, Rotary

if TYPE_CHECKING:
    from bnet_transformer.pretrained.family import Family

LARGEST = 2**22
"""As large as a width or a vocabulary can be."""
MOST_SLICES = 2**10
LONGEST = 2**32
"""As many words as a model may read at once."""
COUNTED = ("dim", "heads", "slices", "hidden", "states", "segments", "embedding")  # options that count something
SCALINGS = ("default", "linear", "llama3")
BASE = 10000.0


def load_config(family: Family, raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The settings that `transformers` makes of a config.json; those themselves where it is not installed or does not
    know the model type."""
    _check_counts(family, raw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports, and of names that are deprecated
        try:
            from transformers import CONFIG_MAPPING

            config_class = CONFIG_MAPPING[family.name]
        except (ImportError, KeyError):
            return raw
        try:
            config: dict[str, Any] = config_class.from_dict(copy.deepcopy(dict(raw))).to_dict()
        except Exception as error:  # of many kinds, for each class checks its settings in its own way
            got = shown(" ".join(str(error).split()) or type(error).__name__)  # in one line
            raise FileError(f"config of {where}", expected="settings that transformers reads", got=got) from error
    return config


def _check_counts(family: Family, raw: Mapping[str, Any]) -> None:
    """Refuse counts that no model has before a config class makes a list of such a length."""
    for option in COUNTED:
        own = family.names.get(option)
        for name in (own, *(alias for alias, name in family.aliases.items() if name == own)):
            if name is not None and raw.get(name) is not None:
                bounded(f"{name} of the config", raw[name], MOST_SLICES if option == "slices" else LARGEST)
    config_labels(raw)


def bounded(what: str, value: object, most: int) -> int:
    """A whole number from 1 up to the most that it can be."""
    found = whole(what, value)
    if found > most:
        raise BNetError(what, expected=f"a whole number of at most {most}", got=value)
    return found


def config_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes, which a config tells by number, or how many they are; two where it tells neither."""
    count = config.get("num_labels")
    count = 2 if count is None else bounded("num_labels of the config", count, LARGEST)
    found = config.get("id2label") or {k: f"LABEL_{k}" for k in range(count)}
    if not isinstance(found, Mapping):
        raise BNetError("id2label of the config", expected="a mapping from numbers to labels", got=found)
    numbered = all(str(k).isdecimal() and len(str(k)) < 10 for k in found)
    by_number = {int(k): str(label) for k, label in found.items()} if numbered else {}
    if not by_number or sorted(by_number) != list(range(len(found))):
        raise BNetError("id2label of the config", expected="labels for 0, 1, 2, ...", got=found)
    return tuple(by_number[k] for k in range(len(by_number)))


def check_classes(config: Mapping[str, Any], labels: tuple[str, ...]) -> None:
    """Refuse a readout of the sentence that is no choice of one class."""
    kind = config.get("problem_type")
    if kind in (None, "single_label_classification") and len(labels) > 1:
        return
    got = f"problem_type={kind!r}" if kind else "num_labels=1, which is regression"
    allowed = "readout=None reads the states alone"
    wanted = "one class of several (a regression tells no sigma, and labels that do not exclude each other no classes)"
    raise BNetError("readout of the sentence", expected=wanted, got=got, allowed=allowed)


# rotary positions, windows, patches


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


def config_to_patches(config: Mapping[str, Any]) -> Patches:
    """How a config cuts an image; a size is one number or `[rows, columns]`."""
    rows, columns = _pair(config, "image_size", 224)
    high, wide = _pair(config, "patch_size", 16)
    channels = whole("num_channels of the config", config.get("num_channels", 3))
    return Patches(channels, rows, columns, high, wide)


def _pair(config: Mapping[str, Any], name: str, default: int) -> tuple[int, int]:
    found = config.get(name, default)
    pair = list(found) if isinstance(found, list | tuple) else [found, found]
    if len(pair) != 2:
        raise BNetError(f"{name} of the config", expected="a number, or one for rows and one for columns", got=found)
    return whole(f"{name} of the config", pair[0]), whole(f"{name} of the config", pair[1])

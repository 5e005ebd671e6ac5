"""The values of a config: sizes, labels, rotary positions, attention windows, image patches.

A config comes from strangers, so each value is checked before anything of its size is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bnet_transformer._core.checks import check_float, check_int
from bnet_transformer._core.naming import Reach
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm import Patches, Rotary

Config = Mapping[str, Any]
MAX_SIZE = 2**22  # of a width or a vocabulary
ROPE_TYPES = ("default", "linear", "llama3")
DEFAULT_ROPE_THETA = 10000.0


def check_size(subject: str, value: object, maximum: int) -> int:
    """The integer, from 1 to `maximum`."""
    integer = check_int(subject, value)
    if integer > maximum:
        raise BNetError(subject, expected=f"a whole number of at most {maximum}", actual=value)
    return integer


def config_to_labels(config: Config) -> tuple[str, ...]:
    """The names of the classes: `id2label`, or `LABEL_k` for `num_labels` classes, by default 2."""
    count = config.get("num_labels")
    count = 2 if count is None else check_size("num_labels of the config", count, MAX_SIZE)
    labels = config.get("id2label") or {k: f"LABEL_{k}" for k in range(count)}
    if not isinstance(labels, Mapping):
        raise BNetError("id2label of the config", expected="a mapping from numbers to labels", actual=labels)
    is_numbered = all(str(k).isdecimal() and len(str(k)) < 10 for k in labels)
    by_id = {int(k): str(label) for k, label in labels.items()} if is_numbered else {}
    if not by_id or sorted(by_id) != list(range(len(labels))):
        raise BNetError("id2label of the config", expected="labels for 0, 1, 2, ...", actual=labels)
    return tuple(by_id[k] for k in range(len(by_id)))


def check_single_label(config: Config, labels: tuple[str, ...]) -> None:
    """Refuse a readout of the sentence that is not the choice of one class.

    A regression has no sigma, so it defines no distribution; labels that do not exclude each other are no classes.
    """
    kind = config.get("problem_type")
    if kind in (None, "single_label_classification") and len(labels) > 1:
        return
    actual = f"problem_type={kind!r}" if kind else "num_labels=1, which is regression"
    allowed = "readout=None reads the states alone"
    expected = (
        "one class of several (a regression tells no sigma, and labels that do not exclude each other no classes)"
    )
    raise BNetError("readout of the sentence", expected=expected, actual=actual, allowed=allowed)


def config_to_rotary(
    config: Config, widths: tuple[int, int], partial_factor: object, theta: object, max_words: int | None
) -> Rotary:
    """The rotary positions (RoPE) of heads; `rope_parameters` in the config take precedence over the arguments.

    Args:
        config: The config.
        widths: The width of a head, and the width from which the number of rotated features is computed.
        partial_factor: The fraction of features that are rotated; None where the family rotates all.
        theta: The base of the angles.
        max_words: The maximum number of words of a sentence.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise BNetError("rope_parameters of the config", expected="those of all slices, a mapping", actual=rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise BNetError("rope_type of the config", expected="a known one", actual=kind, allowed=", ".join(ROPE_TYPES))
    subject = "partial_rotary_factor of the config"
    fraction = check_float(subject, rope.get("partial_rotary_factor", partial_factor or 1), above=0)
    if fraction > 1 or (partial_factor is None and fraction < 1):
        expected = "1: all features turn" if partial_factor is None else "at most 1"
        raise BNetError(subject, expected=expected, actual=fraction)
    rotated = int(widths[1] * fraction)
    num_features = None if rotated == widths[0] else rotated
    theta = check_float("rope_theta of the config", rope.get("rope_theta") or theta or DEFAULT_ROPE_THETA, above=0)
    if kind == "default":
        return Rotary(theta, num_features)
    factor = check_float("factor of the rope_parameters", rope.get("factor"), above=0)
    if kind != "llama3":
        return Rotary(theta, num_features, factor)
    # Llama 3.1 (Grattafiori et al. 2024) divides only low frequencies by `factor`; the bands are given in wavelengths
    # relative to the length of the sentences of the first training. Values outside `rope_parameters` take precedence.
    original = "original_max_position_embeddings"
    known = {original: max_words} | dict(rope) | dict(config)
    names = ("low_freq_factor", "high_freq_factor")
    low, high = (check_float(f"{name} of the rope_parameters", known.get(name), above=0) for name in names)
    bands = low, high, check_int(f"{original} of the rope_parameters", known.get(original))
    return Rotary(theta, num_features, factor, bands)


def is_causal(config: Config) -> bool:
    """Whether the words of a decoder attend only to earlier words."""
    return bool(config.get("is_causal", True))


def config_to_reach(layer_types: Sequence[str] | None, window: int | None, first_sliding: int, slices: int) -> Reach:
    """The words that a word of a causal stack attends to: all earlier words, or those of a sliding window.

    Args:
        layer_types: The type of each slice, which must be the same; None to infer them from the other arguments.
        window: The number of words of the window, with the word itself; None for all.
        first_sliding: The first slice with the window.
        slices: The number of slices.
    """
    is_list = isinstance(layer_types, list | tuple) and all(isinstance(kind, str) for kind in layer_types)
    if layer_types is not None and not is_list:
        raise BNetError("layer_types of the config", expected="a list of the types of its slices", actual=layer_types)
    slides = [window is not None and t >= first_sliding for t in range(slices)]
    layer_types = layer_types or ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]
    if len(set(layer_types)) > 1 or layer_types[0] not in ("sliding_attention", "full_attention"):
        expected, actual = "slices that all read alike", ", ".join(map(str, layer_types))
        allowed = "full_attention in every slice, sliding_attention in every slice"
        raise BNetError("layer_types of the config", expected=expected, actual=actual, allowed=allowed)
    if window is None or layer_types[0] == "full_attention":
        return Reach("causal")
    return Reach("recent", window - 1)


def config_to_patches(config: Config) -> Patches:
    """The patches of an image of a config."""
    image_size, patch_size = _read_size_pair(config, "image_size", 224), _read_size_pair(config, "patch_size", 16)
    channels = check_int("num_channels of the config", config.get("num_channels", 3))
    return Patches(channels, *image_size, *patch_size)


def _read_size_pair(config: Config, name: str, default: int) -> tuple[int, int]:
    """The rows and columns of a size, which is one number or `[rows, columns]`."""
    size = config.get(name, default)
    pair = list(size) if isinstance(size, list | tuple) else [size, size]
    if len(pair) != 2:
        raise BNetError(f"{name} of the config", expected="a number, or one for rows and one for columns", actual=size)
    return check_int(f"{name} of the config", pair[0]), check_int(f"{name} of the config", pair[1])

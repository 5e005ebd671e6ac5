"""The values of a config: sizes, labels, rotary positions, attention windows, image patches.

A config is untrusted input, so each value is checked before anything of its size is built.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bnet_transformer._core.checks import check_float, check_int, is_integer
from bnet_transformer._core.naming import Reach
from bnet_transformer.errors import BNetError, format_value
from bnet_transformer.tpm import Patches, Rotary

Config = Mapping[str, Any]
MAX_SIZE = 2**22  # maximum width, and maximum size of a vocabulary
ROPE_TYPES = ("default", "linear", "llama3")
DEFAULT_ROPE_THETA = 10000.0
LABEL_KEYS = ("num_labels", "id2label", "problem_type")
PATCH_KEYS = ("image_size", "patch_size", "num_channels")
ROPE_KEYS = ("rope_scaling", "rope_parameters", "original_max_position_embeddings")
ROPE_PARAMETERS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
)
# Keys that change no value of a net in evaluation mode, in any family.
IRRELEVANT_KEYS = re.compile(
    r"""model_type | architectures | auto_map | _?name_or_path | _commit_hash | transformers\.js_config
    | ((adapter_)?transformers|adapters|unsloth|torch)_version | finetuning_task | label2id | _num_labels | language
    | (torch_)?dtype | use_bfloat16 | torchscript | _?(attn|experts)_implementation(_internal|_autoset)?
    | _flash_attn_2_enabled | use_flash_attn | is_encoder_decoder | tokenizer_class | n_ctx
    | \w*dropout(_(prob|rate))? | \w+_pdrop | \w*layerdrop | drop_path_rate
    | initializer_(range|factor) | init_std | gradient_checkpointing | loss_type | pretraining_tp
    | use_cache | output_(attentions|hidden_states|past|scores) | return_dict(_in_generate)? | chunk_size_feed_forward
    | (decoder_|forced_)?(bos|eos|pad|sep|cls|mask|unk)_token_ids? | decoder_start_token_id
    | force_bos_token_to_be_generated | bad_words_ids | prefix | task_specific_params
    | summary_(type|use_proj|activation|proj_to_labels|hidden_size)
    | (max|min)_length | max_new_tokens | do_sample | early_stopping | num_beams | num_beam_groups | diversity_penalty
    | temperature | top_[kp] | typical_p | (repetition|length|exponential_decay_length)_penalty
    | (encoder_)?no_repeat_ngram_size | num_return_sequences | remove_invalid_values | (begin_)?suppress_tokens""",
    re.VERBOSE,
)


def check_settings(
    subject: str,
    family: str,
    settings: Mapping[str, object],
    read: Collection[str],
    neutral: Mapping[str, Collection[object]],
    hint: str | None = None,
) -> None:
    """Raise an error for settings that no rule reads, with their list, because they could change the equations.

    Args:
        subject: The source of the settings.
        family: The name of the family.
        settings: The settings; None is a setting without a value.
        read: The settings that rules read.
        neutral: For other settings, the values that change nothing.
        hint: What to do.
    """
    unread = []
    for key, value in sorted(settings.items()):
        values = neutral.get(key, ())
        if key not in read and value is not None and value not in values:
            expected = f", not {' or '.join(map(repr, values))}" if values else ""
            unread.append(f"{key}={format_value(repr(value))}{expected}")
    if unread:
        expected, allowed = f"only settings of a {family} that are read", ", ".join(sorted({*read, *neutral}))
        raise BNetError(subject, expected=expected, actual=", ".join(unread), allowed=allowed, hint=hint)


def check_size(subject: str, value: object, maximum: int) -> int:
    """Check an integer from 1 to `maximum`."""
    integer = check_int(subject, value)
    if integer > maximum:
        raise BNetError(subject, expected=f"an integer of at most {maximum}", actual=value)
    return integer


def config_to_labels(config: Config) -> tuple[str, ...]:
    """Return the names of the classes: `id2label`, or `LABEL_k` for `num_labels` classes, 2 by default."""
    count = config.get("num_labels")
    count = 2 if count is None else check_size("num_labels of the config", count, MAX_SIZE)
    labels = config.get("id2label") or {k: f"LABEL_{k}" for k in range(count)}
    if not isinstance(labels, Mapping):
        raise BNetError("id2label of the config", expected="a mapping from numbers to labels", actual=labels)
    is_numbered = all(is_integer(str(k)) for k in labels)
    by_id = {int(k): str(label) for k, label in labels.items()} if is_numbered else {}
    if not by_id or sorted(by_id) != list(range(len(labels))):
        raise BNetError("id2label of the config", expected="labels for 0, 1, 2, ...", actual=labels)
    return tuple(by_id[k] for k in range(len(by_id)))


def check_single_label(config: Config, labels: tuple[str, ...]) -> None:
    """Raise an error for a readout of the sentence that does not choose one class.

    A regression has no sigma, so it defines no distribution. Labels that do not exclude each other are not classes.
    """
    kind = config.get("problem_type")
    if kind in (None, "single_label_classification") and len(labels) > 1:
        return
    actual = f"problem_type={kind!r}" if kind else "num_labels=1, which is regression"
    expected = "a choice of one of several classes, because other readouts define no distribution"
    hint = "Use readout=None for only the hidden states"
    raise BNetError("readout of the sentence", expected=expected, actual=actual, hint=hint)


def config_to_rotary(
    config: Config, widths: tuple[int, int], partial_factor: object, theta: object, max_words: int | None
) -> Rotary:
    """Read the rotary positions (RoPE) of heads; `rope_parameters` of the config take precedence over the arguments.

    Args:
        config: The config.
        widths: The width of a head, and the width from which the number of rotated features is computed.
        partial_factor: The share of features that are rotated; None if the family rotates all features.
        theta: The base of the angles.
        max_words: The maximum number of words of a sentence.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        expected = "a mapping with the same parameters for all slices"
        raise BNetError("rope_parameters of the config", expected=expected, actual=rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        allowed = ", ".join(ROPE_TYPES)
        raise BNetError("rope_type of the config", expected="a supported type", actual=kind, allowed=allowed)
    check_settings("rope_parameters of the config", str(config.get("model_type", "model")), rope, ROPE_PARAMETERS, {})
    subject = "partial_rotary_factor of the config"
    fraction = check_float(subject, rope.get("partial_rotary_factor", partial_factor or 1), above=0)
    if fraction > 1 or (partial_factor is None and fraction < 1):
        expected = "1, because the family rotates all features" if partial_factor is None else "at most 1"
        raise BNetError(subject, expected=expected, actual=fraction)
    rotated = int(widths[1] * fraction)
    num_features = None if rotated == widths[0] else rotated
    theta = next(value for value in (rope.get("rope_theta"), theta, DEFAULT_ROPE_THETA) if value is not None)
    theta = check_float("rope_theta of the config", theta, above=0)
    if kind == "default":
        return Rotary(theta, num_features)
    factor = check_float("factor of the rope_parameters", rope.get("factor"), above=0)
    if kind != "llama3":
        return Rotary(theta, num_features, factor)
    # Llama 3.1 (Grattafiori et al. 2024) divides only low frequencies by `factor`. The bands are wavelengths relative
    # to the sentence length of the original training. Values outside `rope_parameters` take precedence.
    original = "original_max_position_embeddings"
    known = {original: max_words} | dict(rope) | dict(config)
    names = ("low_freq_factor", "high_freq_factor")
    low, high = (check_float(f"{name} of the rope_parameters", known.get(name), above=0) for name in names)
    bands = low, high, check_int(f"{original} of the rope_parameters", known.get(original))
    return Rotary(theta, num_features, factor, bands)


def is_causal(config: Config) -> bool:
    """Return True if the words of a decoder attend only to earlier words."""
    return bool(config.get("is_causal", True))


def config_to_reach(layer_types: Sequence[str] | None, window: int | None, first_sliding: int, slices: int) -> Reach:
    """Return the words that a word of a causal stack attends to: all earlier words, or those of a sliding window.

    Args:
        layer_types: The type of each slice; all must be equal. None to infer them from the other arguments.
        window: The number of words of the window, including the word itself; None for all words.
        first_sliding: The index of the first slice with the window.
        slices: The number of slices.
    """
    is_list = isinstance(layer_types, list | tuple) and all(isinstance(kind, str) for kind in layer_types)
    if layer_types is not None and not is_list:
        raise BNetError("layer_types of the config", expected="a list of the types of its slices", actual=layer_types)
    slides = [window is not None and t >= first_sliding for t in range(slices)]
    layer_types = layer_types or ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]
    if len(set(layer_types)) > 1 or layer_types[0] not in ("sliding_attention", "full_attention"):
        expected, actual = "one attention type for all slices", ", ".join(map(str, layer_types))
        allowed = "full_attention or sliding_attention, in every slice"
        raise BNetError("layer_types of the config", expected=expected, actual=actual, allowed=allowed)
    if window is None or layer_types[0] == "full_attention":
        return Reach("causal")
    return Reach("recent", window - 1)


def config_to_patches(config: Config) -> Patches:
    """Read the patches of an image from a config."""
    image_size, patch_size = _read_size_pair(config, "image_size", 224), _read_size_pair(config, "patch_size", 16)
    channels = check_int("num_channels of the config", config.get("num_channels", 3))
    return Patches(channels, *image_size, *patch_size)


def _read_size_pair(config: Config, name: str, default: int) -> tuple[int, int]:
    """Read the rows and columns of a size, which is one number or `[rows, columns]`."""
    size = config.get(name, default)
    pair = list(size) if isinstance(size, list | tuple) else [size, size]
    if len(pair) != 2:
        raise BNetError(f"{name} of the config", expected="one number, or the numbers of rows and columns", actual=size)
    return check_int(f"{name} of the config", pair[0]), check_int(f"{name} of the config", pair[1])

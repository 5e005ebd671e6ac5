"""Pretrained models as nets: `from_pretrained`, and the names that other libraries give to parameters and nodes.

The modules, in the order of a call: `source` finds the files of a model; `families` describes each model family as data
(`family`, which reads the config as options); `module_check` compares a net with its model in `transformers`;
`declaration` builds the declaration; `weights` maps keys to parameters and devices. `names` translates names. `gguf`
reads GGUF files, and `geometric` the files of a Julia package. Only modules of `families/` refer to a family by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from bnet_transformer import bnet
from bnet_transformer._core.checks import check_choice
from bnet_transformer._core.process import ignore_caller_modes
from bnet_transformer._core.tokens import Tokenizer
from bnet_transformer.bnet import BNet
from bnet_transformer.declare.network import build_structure
from bnet_transformer.errors import BNetError, DeclarationError, FileError
from bnet_transformer.pretrained.declaration import (
    SEGMENT_ROLE,
    EncoderDecoderOptions,
    options_to_declaration,
    resolve_options,
)
from bnet_transformer.pretrained.families import FAMILIES, register_family
from bnet_transformer.pretrained.family import ADAPTER_ADVICE, GGUFFormat, ModelFamily, WeightLocation, load_config
from bnet_transformer.pretrained.gguf import gguf_to_source, is_gguf
from bnet_transformer.pretrained.module_check import check_modules, check_values, load_reference
from bnet_transformer.pretrained.names import from_hugging_face, from_lens, to_hugging_face, to_lens
from bnet_transformer.pretrained.source import (
    PACKAGES,
    ModelSource,
    fetch_hub_folder,
    find_package_path,
    folder_to_source,
    list_cached,
    model_to_source,
    serialize_tokenizer,
)
from bnet_transformer.pretrained.weights import (
    FLOAT_DTYPES,
    apply_device_map,
    has_readout_weights,
    index_keys,
    promote_weight_dtypes,
    weights_to_parameters,
)

__all__ = [
    "FAMILIES",
    "PACKAGES",
    "GGUFFormat",
    "ModelFamily",
    "WeightLocation",
    "from_hugging_face",
    "from_lens",
    "from_pretrained",
    "list_cached",
    "register_family",
    "to_hugging_face",
    "to_lens",
]

TINY_FILE = Path(__file__).parent / "tiny.safetensors"


def from_pretrained(
    source: object,
    *,
    tokenizer: object = None,
    readout: str | None = "auto",
    device_map: object = None,
    dtype: torch.dtype | None = None,
    check: bool | None = None,
) -> BNet:
    """Load the net of a pretrained model.

    Weights are not copied. They are memory-mapped from the file, or shared with the model in memory.

    Args:
        source: A folder, a GGUF file, a model id of the Hugging Face hub, `"minilm"`, `"smollm2"`, `"tiny"`, or a model
            of `transformers` in memory.
        tokenizer: A tokenizer of `transformers` or `tokenizers`, or a file, for a source without a tokenizer.
        readout: `"auto"` for the readout of the model's class, None for only the hidden states.
        device_map: A device, `"auto"`, or a mapping from modules to devices, as in `transformers`; None for the device
            of the weights. A node is computed on the device of its weights.
        dtype: The floating-point dtype of the parameters; None for the dtype of the weights.
        check: True to compare the values of the net on a few random words with those of the model in `transformers`,
            which is loaded for a folder; both have the weights before the conversion to `dtype`. None checks only a
            model in memory.

    Returns:
        The net.

    Raises:
        BNetError: If the model family or a setting is not supported, if a model in memory has other modules than its
            config builds, or if the net has other values than its model.
        FileError: If a file is missing or damaged.

    >>> from_pretrained("tiny").sentence("the cat sat on the mat").posterior("c").shape
    torch.Size([3])
    """
    if isinstance(source, str) and source == "tiny":
        options = {"tokenizer": tokenizer, "device_map": device_map, "dtype": dtype, "check": check}
        return _load_tiny(options if readout == "auto" else {**options, "readout": str(readout)})
    source = getattr(source, "_orig_mod", source)  # unwrap torch.compile
    model = _find_source(source, tokenizer)
    if tokenizer is not None:
        model = replace(model, tokenizer=serialize_tokenizer(tokenizer))
    if dtype is not None and dtype not in FLOAT_DTYPES:
        allowed = ", ".join(map(str, FLOAT_DTYPES))
        raise BNetError("dtype", expected="a floating-point dtype", actual=dtype, allowed=allowed)
    family = _get_family(model)
    check_choice("check", check, (None, True, False))
    in_memory = hasattr(source, "state_dict")
    if in_memory:
        check_modules(source)
    elif model.needs_defaults:
        model = replace(model, config=load_config(family, model.config, model.origin))
    net = _build_net(model, family, readout, device_map, dtype)
    if in_memory if check is None else check:
        exact = net
        if dtype is not None:  # without rounding the weights, the values are comparable with those of the model
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # its warnings are those of the net in another dtype
                exact = _build_net(model, family, readout, device_map, promote_weight_dtypes(model.weights))
        with ignore_caller_modes():
            check_values(exact, source if in_memory else load_reference(model, exact))
    return net


def _build_net(
    model: ModelSource, family: ModelFamily, readout: str | None, device_map: object, dtype: torch.dtype | None
) -> BNet:
    """Build the net of a source on the devices of a map, in a dtype."""
    weights = apply_device_map(family, model.weights, device_map, dtype)
    return source_to_net(replace(model, weights=weights), readout)


def _load_tiny(options: Mapping[str, object]) -> BNet:
    """Load the net `tiny`, which accepts no options."""
    given = [f"{name}=" for name, value in options.items() if value is not None]
    if given:
        subject = f"from_pretrained('tiny') does not accept {', '.join(given)}"
        raise BNetError(subject, hint="Convert the net with to(...)")
    return bnet.load_net(TINY_FILE)


def _find_source(source: object, tokenizer: object) -> ModelSource:
    """Open a folder, a package, a model of the hub, or a model in memory."""
    if isinstance(source, str | Path):
        path = find_package_path(str(source)) if str(source) in PACKAGES else Path(source)
        if path.is_dir():
            return folder_to_source(path)
        if path.is_file():
            if is_gguf(path):
                return gguf_to_source(path, has_tokenizer=tokenizer is not None)
            expected, hint = "the folder of a model, or a GGUF file", "Use bt.load to read the file of a net"
            raise FileError(str(path), expected=expected, actual="a file", hint=hint)
        if isinstance(source, Path) or path.is_absolute() or str(source).startswith(".") or is_gguf(path):
            raise FileError(str(path), expected="the folder of a model, or a GGUF file; it does not exist")
        return folder_to_source(fetch_hub_folder(str(source)))
    if hasattr(source, "state_dict") and hasattr(getattr(source, "config", None), "to_dict"):
        return model_to_source(source, tokenizer)
    names = ", ".join(map(repr, [*PACKAGES, "tiny"]))
    expected = f"a folder, a GGUF file, a model id of the hub, {names}, or a model of transformers"
    raise BNetError("source", expected=expected, actual=source)


def source_to_net(source: ModelSource, readout: str | None) -> BNet:
    """Build the net of a source; warn of weights that no node uses."""
    family = _get_family(source)
    options = family.config_to_options(source.config, source.architecture, readout)
    if source.is_sentence_encoder and readout == "auto" and not has_readout_weights(family, source.weights):
        options = replace(options, readout=None)  # its config contains the class that it was trained from
    options = resolve_options(family, options, source.weights)
    keys = index_keys(family, source.weights)
    pools = set(source.pools)
    if "pooler" in family.modules and options.readout != "class" and family.get_weight_key("pooler") in keys:
        pools.add("pooler")
    segments = SEGMENT_ROLE if (options.segments or 0) > 1 else None
    one_stack = isinstance(options, EncoderDecoderOptions) and options.separate_vocabularies
    text = source.tokenizer
    tokenizer = None if text is None else Tokenizer(text, segments, options.start, first_stack_only=one_stack)
    vocabulary = None
    if tokenizer is not None:  # models may have more ids than the tokenizer has tokens
        tokens = {k: token for token, k in tokenizer.vocabulary.items()}
        vocabulary = tuple(tokens.get(k) or f"[id {k}]" for k in range(options.states))
    try:
        declare = family.declare or options_to_declaration
        network = build_structure(declare(family, options, vocabulary, pools))
        parameters, unused = weights_to_parameters(network, family, source.weights, options.tied_keys)
        network = network.with_parameters(parameters, check_finite=False)  # a check would read the mapped file
    except DeclarationError as error:
        raise FileError(source.origin, expected="a valid model", actual=str(error.faults[0])) from error
    if unused and readout is not None:
        names = ", ".join(unused[:6]) + (", …" if len(unused) > 6 else "")
        warnings.warn(f"{source.origin}: no node uses {len(unused)} of its weights: {names}", stacklevel=4)
    return BNet(replace(network, default_dtype=network.dtype, tokenizer=tokenizer))


def _get_family(source: ModelSource) -> ModelFamily:
    """Return the family of a source; raise an error for an unknown `model_type`."""
    kind = source.config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        subject, allowed = f"model_type of {source.origin}", ", ".join(FAMILIES)
        expected = "a supported model type"
        raise BNetError(subject, expected=expected, actual=repr(kind), allowed=allowed, hint=ADAPTER_ADVICE)
    return FAMILIES[kind]

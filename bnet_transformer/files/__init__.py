"""Nets on disk: one safetensors file, parameters as tensors and the declaration as versioned JSON. No pickle.

Loading gives back what was saved: an equal declaration, parameters equal to the bit. A class from outside the package
is stored by its import path, and imported only with the caller's consent.
"""

from bnet_transformer.files.store import as_bytes, load, save
from bnet_transformer.files.tensors import (
    as_path,
    exclusive_lock,
    is_of,
    read_tensors,
    reading,
    replacing,
    write_tensors,
)

__all__ = [
    "as_bytes",
    "as_path",
    "exclusive_lock",
    "is_of",
    "load",
    "read_tensors",
    "reading",
    "replacing",
    "save",
    "write_tensors",
]

"""Nets on disk: one safetensors file, parameters as tensors and the declaration as versioned JSON. No pickle.

Loading gives back what was saved: an equal declaration, parameters equal to the bit. A class from outside the package
is stored by its import path, and imported only with the caller's consent.
"""

from bnet_transformer.files.atomic import as_path, replacing
from bnet_transformer.files.store import load, save

__all__ = ["as_path", "load", "replacing", "save"]

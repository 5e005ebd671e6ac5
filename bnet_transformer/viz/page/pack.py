"""Packing: probabilities as bytes, bytes as text, and JSON that can stand inside a script element."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

STEPS = 255  # a probability p is the byte round(255 p), so it is exact to 1/510


def quantised(shares: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """Probabilities as bytes.

    >>> quantised(np.array([0.0, 0.5, 1.0])).tolist()
    [0, 128, 255]
    """
    return np.asarray(np.rint(np.clip(shares, 0.0, 1.0) * STEPS), dtype=np.uint8)


def packed(block: bytes) -> str:
    """A block of bytes as text: gzip, then base64; the same bytes make the same text."""
    return base64.b64encode(gzip.compress(block, compresslevel=4, mtime=0)).decode("ascii")


def as_json(about: object) -> str:
    r"""JSON in plain ASCII in which no tag can open or close.

    >>> as_json({"word": "</script>"})
    '{"word":"\\u003c/script>"}'
    """
    text = json.dumps(about, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")

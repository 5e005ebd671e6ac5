"""Tensors as arrays of numpy."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


def in_numpy(value: Tensor) -> NDArray[Any]:
    """A tensor of any device as an array: numpy has no bfloat16, so halves go as float32.

    >>> in_numpy(torch.ones(2, dtype=torch.bfloat16, requires_grad=True)).tolist()
    [1.0, 1.0]
    """
    value = value.detach().cpu()
    found: NDArray[Any] = (value.float() if value.dtype in HALVES else value).numpy()
    return found

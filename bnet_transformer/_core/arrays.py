"""Conversions between tensors and numpy arrays, and checks of tensors that a caller passes."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

HALF_DTYPES = (torch.bfloat16, torch.float16)
UNSIGNED_DTYPES = (torch.uint16, torch.uint32, torch.uint64)  # torch supports few operations on these types


def to_numpy(value: Tensor) -> NDArray[Any]:
    """A tensor on any device as an array; half precision is converted to float32, because numpy has no bfloat16.

    >>> to_numpy(torch.ones(2, dtype=torch.bfloat16, requires_grad=True)).tolist()
    [1.0, 1.0]
    """
    value = value.detach().cpu()
    dense: NDArray[Any] = (value.float() if value.dtype in HALF_DTYPES else value).numpy()
    return dense


def is_dense(value: object) -> TypeGuard[Tensor]:
    """True for a strided tensor: not sparse, nested or quantised.

    >>> is_dense(torch.ones(2)), is_dense(torch.ones(2).to_sparse())
    (True, False)
    """
    return isinstance(value, Tensor) and value.layout is torch.strided and not (value.is_nested or value.is_quantized)


def copy_to_tensor(value: object) -> Tensor:
    """A copy of a caller's numbers as a tensor; raises `TypeError` if entries are missing or masked.

    >>> numbers = torch.ones(2, requires_grad=True)
    >>> copy = copy_to_tensor(numbers)
    >>> copy.requires_grad, copy.data_ptr() == numbers.data_ptr()
    (False, False)
    """
    if isinstance(value, Tensor):
        if not is_dense(value) or value.is_meta:
            raise TypeError("a tensor with missing entries (sparse, nested, quantised or on the meta device)")
        tensor = value.detach().resolve_conj().resolve_neg().clone()
    elif np.ma.is_masked(value):
        raise TypeError("an array with masked entries")
    else:
        array = np.asarray(value)
        tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    return tensor.long() if tensor.dtype in UNSIGNED_DTYPES else tensor


def to_tuples(table: float | list[Any]) -> Any:
    """Nested lists as nested tuples, which are hashable."""
    return tuple(map(to_tuples, table)) if isinstance(table, list) else table

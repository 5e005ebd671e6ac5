"""Conversions between tensors and numpy arrays, and checks of tensors that a caller passes."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

HALF_DTYPES = (torch.bfloat16, torch.float16)
UNSIGNED_DTYPES = (torch.uint16, torch.uint32, torch.uint64)  # types of which torch can hold numbers and hardly do more


def to_numpy(value: Tensor) -> NDArray[Any]:
    """A tensor of any device as an array; half precision becomes float32, since numpy has no bfloat16.

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
    """A caller's numbers as a tensor that shares no memory with them; TypeError where entries are missing or masked.

    >>> theirs = torch.ones(2, requires_grad=True)
    >>> ours = copy_to_tensor(theirs)
    >>> ours.requires_grad, ours.data_ptr() == theirs.data_ptr()
    (False, False)
    """
    if isinstance(value, Tensor):
        if not is_dense(value) or value.is_meta:
            raise TypeError("a tensor without a number in each place")
        tensor = value.detach().resolve_conj().resolve_neg().clone()
    elif np.ma.is_masked(value):
        raise TypeError("an array of which some is masked")
    else:
        array = np.asarray(value)
        tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    return tensor.long() if tensor.dtype in UNSIGNED_DTYPES else tensor

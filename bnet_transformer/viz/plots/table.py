"""A table: numbers with named axes, labels on them, and an interval around each, where there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer.errors import BNetError, mapping, unknown
from bnet_transformer.tpm.arrays import in_numpy, own_tensor

Numbers = NDArray[np.float64]


@runtime_checkable
class Tabled(Protocol):
    """What has `values` and the names of their `axes`; `labels`, `low`, `high` and `error` are asked for as well."""

    @property
    def values(self) -> object:
        """The numbers."""

    @property
    def axes(self) -> Sequence[str]:
        """The name of each of their dims."""


@dataclass(frozen=True)
class Table:
    """Numbers with named axes: `values[i, j]` lies between `low[i, j]` and `high[i, j]`, where these are known.

    `labels[axis]` names the places along an axis; NaN is a number that is not there.
    """

    values: Numbers = field(repr=False)
    axes: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    low: Numbers | None = field(default=None, repr=False)
    high: Numbers | None = field(default=None, repr=False)
    what: str = ""

    @property
    def are_shares(self) -> bool:
        """True where no number is below zero and each row adds up to 1."""
        least, sums = np.nanmin(self.values, initial=0.0), np.nansum(self.values, -1)
        return bool(least >= 0 and np.allclose(sums, 1, atol=1e-4))

    def named(self, dim: int) -> tuple[str, ...]:
        """The labels along a dim: those told, else its numbers."""
        axis = self.axes[dim]
        return self.labels.get(axis, tuple(map(str, range(self.values.shape[dim]))))


def table_of(
    values: object,
    axes: object,
    *,
    labels: object = None,
    low: object = None,
    high: object = None,
    error: object = None,
    what: str = "",
) -> Table:
    """A table from arrays or tensors, checked; `error` stands for `low = values - error`, `high = values + error`.

    >>> table_of([[0.2, 0.8]], ("sentence", "head")).named(1)
    ('0', '1')
    """
    numbers = numbers_of("values", values)
    names = names_of(axes, numbers.ndim)
    if numbers.size == 0:
        raise BNetError("values", expected="at least one number", got=f"none, of shape {numbers.shape}")
    told = _labels(labels, names, numbers.shape)
    if error is not None:
        if low is not None or high is not None:
            raise BNetError("error", expected="error=, or low= and high=", got="both")
        spread = numbers_of("error", error, numbers.shape)
        if bool((spread < 0).any()):
            raise BNetError("error", expected="no number below 0", got=float(np.nanmin(spread)))
        return Table(numbers, names, told, numbers - spread, numbers + spread, what)
    if (low is None) != (high is None):
        raise BNetError("interval", expected="low= and high=", got="one of them")
    if low is None:
        return Table(numbers, names, told, what=what)
    lower, upper = numbers_of("low", low, numbers.shape), numbers_of("high", high, numbers.shape)
    if bool((lower > upper).any()):
        raise BNetError("interval", expected="low at most high", got="low above high")
    return Table(numbers, names, told, lower, upper, what)


def numbers_of(what: str, value: object, shape: tuple[int, ...] | None = None) -> Numbers:
    """An array or tensor as real numbers, NaN where there is none."""
    try:
        found = np.asarray(in_numpy(own_tensor(value)) if isinstance(value, Tensor) else value)
    except (TypeError, ValueError):  # rows of different lengths, a tensor that does not show its numbers
        found = np.asarray(None)
    if found.dtype.kind not in "biuf":
        raise BNetError(what, expected="an array of real numbers", got=value)
    numbers = found.astype(np.float64)
    if bool(np.isinf(numbers).any()):
        raise BNetError(what, expected="finite numbers (NaN is left blank)", got="an infinite one")
    if shape is not None and numbers.shape != shape:
        raise BNetError(what, expected=f"the shape of the values, {shape}", got=numbers.shape)
    return numbers


def names_of(axes: object, count: int) -> tuple[str, ...]:
    """The names of the axes: one for each dim."""
    if axes is None and count == 1:
        return ("state",)
    names = (axes,) if isinstance(axes, str) else tuple(axes) if isinstance(axes, Sequence) else ()
    if not 1 <= count <= 3:
        raise BNetError("values", expected="1, 2 or 3 dims", got=f"{count}")
    if len(names) != count or not all(isinstance(name, str) and name for name in names):
        allowed = 'such as ("sentence", "head"), ("slice", "head"), ("head", "word", "word")'
        raise BNetError("axes", expected=f"a name for each of {count} dims", got=axes, allowed=allowed)
    if len(set(names)) != count:
        raise BNetError("axes", expected="different names", got=axes)
    return names


def _labels(labels: object, names: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, tuple[str, ...]]:
    found = {}
    sizes = dict(zip(names, shape, strict=True))
    for axis, told in mapping("labels", labels).items():
        if axis not in names:
            raise unknown("labels", axis, names)
        if isinstance(told, str) or not isinstance(told, Sequence):
            raise BNetError(f"labels of {axis}", expected="a list of strings", got=told)
        if len(told) != sizes[axis]:
            raise BNetError(f"labels of {axis}", expected=f"{sizes[axis]} of them", got=len(told))
        found[axis] = tuple(map(str, told))
    return found

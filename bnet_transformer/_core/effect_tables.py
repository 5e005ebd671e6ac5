"""Effect tables: numbers by cell along named axes, with the cells of the largest numbers and the values by sentence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from bnet_transformer._core.stats import ComparableResult


class LabelledAxes:
    """Numbers along named axes, with labels along some of them."""

    axes: Any
    labels: Any

    @property
    def _numbers(self) -> Any:
        """The array or tensor with these axes."""
        raise NotImplementedError

    def labels_along(self, dim: int) -> tuple[str, ...]:
        """The labels along a dim.

        Args:
            dim: The number of the dim.

        Returns:
            The labels; numerals for an axis without labels.
        """
        labels: tuple[str, ...] = self.labels.get(self.axes[dim], tuple(map(str, range(self._numbers.shape[dim]))))
        return labels


class EffectTable(ComparableResult):
    """The base class of results with a row for each cell: each index along some axes."""

    _columns: ClassVar[tuple[str, ...]] = ()  # the attributes with a number for each cell

    def _get_axes(self) -> Mapping[str, Sequence[Any]]:
        """The labels along each axis, in the order of the dims."""
        raise NotImplementedError

    def _get_cells(self) -> dict[str, Sequence[Any]]:
        """The columns that describe each cell: by default its label along each axis."""
        axes = self._get_axes()
        return dict(zip(axes, zip(*itertools.product(*axes.values()), strict=True), strict=True))

    def _get_numbers(self) -> dict[str, Any]:
        """The columns of numbers, in the order of the cells."""
        return {name: getattr(self, name).flatten() for name in self._columns}

    def _get_columns(self) -> Mapping[Any, Any]:
        return self._get_cells() | self._get_numbers()

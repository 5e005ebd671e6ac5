"""Results by cell: axes, names, parts of a list of roles, selections and data frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_int
from bnet_transformer._core.naming import WORD, count_word_from_start, split_path
from bnet_transformer._core.result_comparison import ComparableResult, SentenceValues
from bnet_transformer._core.saved_results import stored_class
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.interventions.sweeps.metric import explain_unchecked_metric

if TYPE_CHECKING:
    import pandas as pd

TOKEN_COLUMNS = {"word": "token"}  # the column of tokens of an axis; the default is `read_token` and so on


@stored_class
@dataclass(frozen=True)
class CellGrid:
    """The axes of cells, the positions and labels along them, and the name of each cell, by its index."""

    _shapes = "labels positions: {_} any @"

    at: str
    axes: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]]
    positions: Mapping[str, tuple[int, ...]]
    names: Mapping[tuple[int, ...], str]


@dataclass(frozen=True, eq=False, repr=False)
class CellResult(ComparableResult):
    """The base class of results by cell.

    Attributes:
        at: The argument `at` of the sweep.
        axes: The names of the axes of the result.
        labels: The labels along each axis, such as the tokens of the words.
        positions: The positions along each axis: the numbers of its slices, heads or words.
        names: The name of each cell, by its index along the axes.
        clean: The metric of the clean run, `[example]`; None if there is none, as for an ablation.
        corrupt: The metric of the corrupt run, `[example]`; None if there is none.
        parts: The axes and the cells of each item of `at`, if it is a list.
        direction: `"denoise"` if the clean values are patched into the corrupt run, `"noise"` if the corrupt values are
            patched into the clean run.
        metric: The metric: its node and states, or the parameters of a function.
        aligned: The aligned tokens of the clean and the corrupt run along the axes of words, such as "sat / ran"; empty
            if they are unknown.
        special: For each word along the axes of words, whether it is a special token; empty if this is unknown.
        digests: A digest of the words of each pair, or of each corrupt sentence if an ablation replaces the clean
            run; empty if they are unknown.
        notes: What to consider, such as that no cell changes the metric.
    """

    _shapes = (
        "labels positions: {_} any @; aligned special: {_} any @?; clean corrupt: float64 example; digests: any "
        "example?"
    )

    at: str
    axes: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]]
    positions: Mapping[str, tuple[int, ...]]
    names: Mapping[tuple[int, ...], str]
    clean: Tensor | None
    corrupt: Tensor | None
    parts: Mapping[str, CellGrid] = field(default_factory=dict, kw_only=True)
    direction: str = field(default="denoise", kw_only=True)
    metric: str = field(default="", kw_only=True)
    aligned: Mapping[str, tuple[str, ...]] = field(default_factory=dict, kw_only=True)
    special: Mapping[str, tuple[bool, ...]] = field(default_factory=dict, kw_only=True)
    digests: tuple[str, ...] = field(default=(), kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def base(self) -> Tensor:
        """The metric of the run that is patched, `[example]`: `corrupt`, or `clean` with `direction="noise"`."""
        base = self.corrupt if self.direction == "denoise" else self.clean
        assert base is not None
        return base

    @property
    def examples(self) -> int:
        """The number of examples."""
        return len(self.base)

    @property
    def total(self) -> Tensor:
        """The total effect, `clean - corrupt`, `[example]`, in both directions."""
        if self.clean is None or self.corrupt is None:
            missing = "clean" if self.clean is None else "corrupt"
            fault = f"total: there is no {missing} run for a total effect, as in an ablation"
            hint = "Use values or effects; with words=, map the words of the metric"
            raise BNetError(fault, hint=hint)
        return self.clean - self.corrupt

    def part(self, item: str) -> Self:
        """The cells of one item of a list `at`, as the result that `at=item` has.

        Args:
            item: The item, such as `"v -> a"`.

        Returns:
            The result of these cells, with the axes of the item.

        Raises:
            BNetError: `at` was no list, or the list has no such item.

        >>> import bnet_transformer as bt
        >>> net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "cat", "dog", "sat"])
        >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
        >>> found = bt.sweep(clean, corrupt, at=["x", "v -> a"], metric={"y_2": ("cat", "dog")})
        >>> found.axes, found.part("x").axes, found.part("v -> a").axes
        (('cell',), ('slice', 'word'), ('slice', 'head', 'word', 'read'))
        """
        if item not in self.parts:
            raise unknown_name_error("part", item, self.parts)
        grid = self.parts[item]
        shape = tuple(len(grid.positions[axis]) for axis in grid.axes)
        outcomes: dict[str, Any] = {}
        for name in self._outcome_names:
            table: Tensor = getattr(self, name)
            outcomes[name] = table.new_full((*shape, table.shape[-1]), torch.nan)
            for index, cell in grid.names.items():
                outcomes[name][index] = table[self.index_of(cell)]
        return replace(self, **vars(grid), **outcomes, parts={})

    @property
    def _outcome_names(self) -> list[str]:
        """The names of the fields with an outcome for each cell."""
        return [item.name for item in fields(self) if item.name.endswith("outcomes")]

    def index_of(self, name: str) -> tuple[int, ...]:
        """The index of a cell along the axes.

        Args:
            name: The name of the cell, also an item of `at=` that is one cell, such as `"x_1_-1"`. Along an axis of
                words, a negative word counts from the end.

        Returns:
            The index along each axis.
        """
        grid = self.parts.get(name)
        if grid is not None and len(grid.names) == 1:
            (name,) = grid.names.values()
        elif isinstance(name, str) and WORD in self.axes:
            name = count_word_from_start(name, len(self.positions_along(WORD)))
        if name not in self._index_by_name:
            raise unknown_name_error("cell", name, self._index_by_name)
        return self._index_by_name[name]

    @cached_property
    def _index_by_name(self) -> dict[str, tuple[int, ...]]:
        """The index of each cell along the axes, by its name."""
        return {name: index for index, name in self.names.items()}

    def select(self, **positions: int) -> Self:
        """Select one position along some axes, such as `select(slice=1)`.

        Args:
            **positions: The position along each of these axes: the number of a slice, head or word. A negative number
                counts from the end of the axis, such as `slice=-1` for the last slice.

        Returns:
            The result without these axes.

        Raises:
            BNetError: The result has no such axis, or the axis has no such position.
        """
        index: list[Any] = [slice(None)] * len(self.axes)
        for axis, position in positions.items():
            known = self.positions_along(axis)
            number = check_int(axis, position, minimum=-len(known))
            number = known[number] if number < 0 else number
            if number not in known:
                numbers = f"{known[0]} to {known[-1]}" if known == tuple(range(known[0], known[-1] + 1)) else f"{known}"
                raise BNetError(axis, expected=f"one of {numbers}", actual=position)
            index[self.axes.index(axis)] = known.index(number)
        dims = [dim for dim, axis in enumerate(self.axes) if axis not in positions]
        names = {
            tuple(cell[dim] for dim in dims): name
            for cell, name in self.names.items()
            if all(cell[dim] == k for dim, k in enumerate(index) if dim not in dims)
        }
        axes = tuple(self.axes[dim] for dim in dims)
        labels = {axis: self.labels[axis] for axis in axes if axis in self.labels}
        remaining = {axis: self.positions[axis] for axis in axes if axis in self.positions}
        outcomes = {name: getattr(self, name)[tuple(index)] for name in self._outcome_names}
        return replace(self, axes=axes, labels=labels, positions=remaining, names=names, parts={}, **outcomes)

    def positions_along(self, axis: str) -> tuple[int, ...]:
        """The numbers of the slices, heads or words along an axis.

        Args:
            axis: The name of the axis.

        Returns:
            The positions.
        """
        if axis not in self.axes:
            raise unknown_name_error("axis", axis, self.axes)
        return self.positions.get(axis, tuple(range(len(self.labels.get(axis, ())))))

    def to_dataframe(self, *, examples: bool = False) -> pd.DataFrame:
        """A data frame of the cells.

        Args:
            examples: Whether to return a row for each cell and example instead of means over the examples.

        Returns:
            A row for each cell: its effects, each with its standard error and 95% interval (NaN for a single example).
        """
        frame = self._get_cell_frame()
        if examples:
            count = len(frame)
            frame = frame.loc[frame.index.repeat(self.examples)].reset_index(drop=True)
            frame["example"] = np.tile(np.arange(self.examples), count)
        values = self._get_columns(examples)
        return frame.assign(**{column: self._get_cell_values(tensor).reshape(-1) for column, tensor in values.items()})

    def _get_cell_frame(self) -> pd.DataFrame:
        """The name of each cell, and its position and token along each axis."""
        import pandas as pd

        indices = list(self.names)
        frame = pd.DataFrame({"name": list(self.names.values())})
        for dim, axis in enumerate(self.axes):
            if axis in ("cell", "path"):
                continue
            if axis == "edge":
                ends = [split_path(name) for name in self.labels[axis]]
                for column, end in (("writer", 0), ("reader", 1)):
                    frame[column] = [ends[index[dim]][end] for index in indices]
                continue
            along, labels = self.positions_along(axis), self.labels.get(axis)
            frame[axis] = [along[index[dim]] for index in indices]
            if labels is not None and labels != tuple(map(str, along)):
                frame[TOKEN_COLUMNS.get(axis, f"{axis}_token")] = [labels[index[dim]] for index in indices]
        return frame

    def _to_sentence_values(self) -> SentenceValues:
        frame = self._get_cell_frame()
        tables = {part: self._get_cell_values(effects) for part, effects in self._get_effects().items()}
        cells = [f"{name}{suffix}" for part in tables for suffix in [f" {part}".rstrip()] for name in frame["name"]]
        columns: dict[str, list[Any]] = {key: frame[key].tolist() * len(tables) for key in frame.columns[1:]}
        if len(tables) > 1:
            columns["part"] = [part for part in tables for _ in frame.index]
        settings = {"at": self.at, "axes": self.axes, "direction": self.direction, "metric": self.metric}
        is_estimated = getattr(self, "first_order", False)
        notes = explain_unchecked_metric(self.metric)
        notes += ("one result has estimates to first order",) if is_estimated else ()
        values = np.concatenate([*tables.values()])
        return SentenceValues(
            "effect", tuple(cells), columns, values, settings=settings, notes=notes, digests=self.digests
        )

    def _get_effects(self) -> dict[str, Tensor]:
        """The effects of the cells, `[*axes, example]`, by the part of the total effect; `""` for all of it."""
        raise NotImplementedError

    def _get_columns(self, examples: bool) -> dict[str, Tensor]:
        """The columns of numbers, `[*axes]` each, or `[*axes, example]`."""
        raise NotImplementedError

    def _get_cell_values(self, values: Tensor) -> Any:
        """The values of the cells that exist, `[cell]` or `[cell, example]`, in the order of their names."""
        array = np.asarray(values.detach().cpu().double())
        return np.array([array[index] for index in self.names])

    def _format_notes(self) -> str:
        """The notes, as text after semicolons."""
        return "".join(f"; {note}" for note in self.notes)

    def _format_shape(self) -> str:
        """The sizes of the axes, and the number of examples, as text."""
        counts = [(axis, len(self.labels[axis])) for axis in self.axes]
        axes = " x ".join(_format_count(count, axis) for axis, count in counts) or "all together"
        return f"{axes}, {_format_count(self.examples, 'example')}"


def _format_count(count: int, noun: str) -> str:
    """A count with its noun."""
    noun, tail = ("word", " read") if noun == "read" else (noun, "")
    return f"{count:,} {noun}{'' if count == 1 else 's'}{tail}"

"""Results of sweeps: the effect of each cell on the metric, by example, with standard errors and intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import to_numpy
from bnet_transformer._core.checks import check_choice, check_fraction, check_int, check_seed
from bnet_transformer.errors import BNetError, unknown_name_error

if TYPE_CHECKING:
    import pandas as pd

BOOTSTRAP_CHUNK_SIZE = 2**23  # resampled means at once, 64 MB
MEDIATION_PARTS = ("direct", "indirect", "interaction")
TOKEN_COLUMNS = {"word": "token"}  # the column of tokens of an axis; the default is `read_token` and so on
MAX_HTML_ROWS = 12  # rows in a notebook
DEFAULT_TOP_COUNT = 5


@dataclass(frozen=True, eq=False, repr=False)
class CellResult:
    """The base class of results by cell.

    Attributes:
        at: The argument `at` of the sweep.
        axes: The names of the axes of the result.
        labels: The labels along each axis, such as the tokens of the words.
        positions: The positions along each axis: the numbers of its slices, heads or words.
        names: The name of each cell, by its index along the axes.
        clean: The metric of the clean run, `[example]`; None for an ablation.
        corrupt: The metric of the corrupt run, `[example]`.
    """

    at: str
    axes: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]]
    positions: Mapping[str, tuple[int, ...]]
    names: Mapping[tuple[int, ...], str]
    clean: Tensor | None
    corrupt: Tensor

    @property
    def examples(self) -> int:
        """The number of examples."""
        return len(self.corrupt)

    @property
    def total(self) -> Tensor:
        """The total effect, `clean - corrupt`, `[example]`."""
        if self.clean is None:
            hint = "Use values or effects"
            raise BNetError("total: an ablation has no clean run, hence no total effect", hint=hint)
        return self.clean - self.corrupt

    def index_of(self, name: str) -> tuple[int, ...]:
        """The index of a cell along the axes.

        Args:
            name: The name of the cell.

        Returns:
            The index along each axis.
        """
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
            **positions: The position along each of these axes.

        Returns:
            The result without these axes.

        Raises:
            BNetError: The result has no such axis, or the axis has no such position.
        """
        index: list[Any] = [slice(None)] * len(self.axes)
        for axis, position in positions.items():
            known = self.positions_along(axis)
            if check_int(axis, position, minimum=0) not in known:
                numbers = f"{known[0]} to {known[-1]}" if known == tuple(range(known[0], known[-1] + 1)) else f"{known}"
                raise BNetError(axis, expected=f"one of {numbers}", actual=position)
            index[self.axes.index(axis)] = known.index(position)
        dims = [dim for dim, axis in enumerate(self.axes) if axis not in positions]
        names = {
            tuple(cell[dim] for dim in dims): name
            for cell, name in self.names.items()
            if all(cell[dim] == k for dim, k in enumerate(index) if dim not in dims)
        }
        axes = tuple(self.axes[dim] for dim in dims)
        labels = {axis: self.labels[axis] for axis in axes if axis in self.labels}
        remaining = {axis: self.positions[axis] for axis in axes if axis in self.positions}
        tensors = [item.name for item in fields(self) if item.name.endswith("outcomes")]
        outcomes = {name: getattr(self, name)[tuple(index)] for name in tensors}
        return replace(self, axes=axes, labels=labels, positions=remaining, names=names, **outcomes)

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
        import pandas as pd

        indices = list(self.names)
        frame = pd.DataFrame({"name": list(self.names.values())})
        for dim, axis in enumerate(self.axes):
            if axis in ("cell", "path"):
                continue
            along, labels = self.positions_along(axis), self.labels.get(axis)
            frame[axis] = [along[index[dim]] for index in indices]
            if labels is not None and labels != tuple(map(str, along)):
                frame[TOKEN_COLUMNS.get(axis, f"{axis}_token")] = [labels[index[dim]] for index in indices]
        if examples:
            frame = frame.loc[frame.index.repeat(self.examples)].reset_index(drop=True)
            frame["example"] = np.tile(np.arange(self.examples), len(indices))
        values = self._get_columns(examples)
        return frame.assign(**{column: self._get_cell_values(tensor).reshape(-1) for column, tensor in values.items()})

    def _get_columns(self, examples: bool) -> dict[str, Tensor]:
        """The columns of numbers, `[*axes]` each, or `[*axes, example]`."""
        raise NotImplementedError

    def _get_cell_values(self, values: Tensor) -> Any:
        """The values of the cells that exist, `[cell]` or `[cell, example]`, in the order of their names."""
        array = np.asarray(values.detach().cpu().double())
        return np.array([array[index] for index in self.names])

    def _format_shape(self) -> str:
        """The sizes of the axes, and the number of examples, as text."""
        counts = [(axis, len(self.labels[axis])) for axis in self.axes]
        axes = " x ".join(_format_count(count, axis) for axis, count in counts) or "all together"
        return f"{axes}, {_format_count(self.examples, 'example')}"


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(CellResult):
    """The result of `bt.sweep`: the metric with each cell patched, and the metric of the clean and the corrupt run.

    An *effect* is `outcomes - corrupt`. Standard errors and intervals are over the examples.

    Attributes:
        at: The argument `at` of the sweep.
        axes: The names of the axes of the result.
        labels: The labels along each axis, such as the tokens of the words.
        positions: The positions along each axis: the numbers of its slices, heads or words.
        names: The name of each cell, by its index along the axes.
        clean: The metric of the clean run, `[example]`; None for an ablation.
        corrupt: The metric of the corrupt run, `[example]`.
        outcomes: The metric with each cell patched, `[*axes, example]`; NaN at positions without a cell, such as an
            arrow that the mask excludes.
        first_order: Whether the outcomes are first-order estimates, without a run of any cell.
    """

    outcomes: Tensor
    first_order: bool = False

    @property
    def effects(self) -> Tensor:
        """The effect of each cell, `outcomes - corrupt`, `[*axes, example]`."""
        return self.outcomes - self.corrupt

    @property
    def values(self) -> Tensor:
        """The mean effect over the examples, `[*axes]`."""
        return self.effects.mean(-1)

    @property
    def error(self) -> Tensor:
        """The standard error of the mean effect, `[*axes]`; NaN with a single example."""
        if self.examples == 1:
            return torch.full_like(self.values, torch.nan)
        return self.effects.std(-1) / math.sqrt(self.examples)

    @property
    def restored(self) -> Tensor:
        """The mean effect as a fraction of the mean total effect, `[*axes]`: 0 like corrupt, 1 like clean."""
        total = self.total.mean()
        if not bool(total.abs() > 0) or not bool(total.isfinite()):
            actual = f"a mean total effect of {float(total):g}"
            expected = "a clean and a corrupt run with different metrics"
            raise BNetError("restored", expected=expected, actual=actual, hint="Use values or effects")
        return self.values / total

    def interval(self, confidence: float = 0.95, *, draws: int = 1000, seed: int = 0) -> tuple[Tensor, Tensor]:
        """The percentile bootstrap interval of the mean effect, over resampled examples.

        Args:
            confidence: The confidence level of the interval, from 0 to 1.
            draws: The number of resamples, which all cells share.
            seed: The seed of the resamples.

        Returns:
            The lower and the upper ends, `[*axes]` each.

        Raises:
            BNetError: There are fewer than 2 examples.
        """
        return bootstrap_interval(self.effects, confidence, draws, seed)

    def __getitem__(self, name: str) -> float:
        """The mean effect of a cell.

        Args:
            name: The name of the cell.

        Returns:
            The mean over the examples.
        """
        return float(self.values[self.index_of(name)])

    def top(self, count: int = DEFAULT_TOP_COUNT) -> list[tuple[str, float]]:
        """The cells with the largest absolute mean effects; ties are in the order of the cells.

        Args:
            count: The maximum number of cells.

        Returns:
            Pairs of the name of a cell and its mean effect, in decreasing order of the absolute effect.
        """
        values = self._get_cell_values(self.values)
        magnitude = np.where(np.isnan(values), -1.0, np.abs(values))
        greatest = magnitude.max(initial=1e-290, where=np.isfinite(magnitude))
        ranked = np.round(magnitude / greatest, 6)  # effects that differ only by rounding are ties
        order = np.argsort(-ranked, kind="stable")[: check_int("count", count)]
        names = list(self.names.values())
        return [(names[k], float(values[k])) for k in order.tolist() if magnitude[k] >= 0]

    def marks(self) -> Mapping[str, str]:
        """The marks of the strongest cells, for `s.draw("cells.svg", highlight=sweep)`."""
        return {name: f"{effect:+.2g}" for name, effect in self.top() if effect != 0}

    def _get_columns(self, examples: bool) -> dict[str, Tensor]:
        if examples:
            return {"outcome": self.outcomes, "effect": self.effects}
        nan = torch.full_like(self.values, torch.nan)
        low, high = (nan, nan) if self.examples == 1 else self.interval()
        return {"effect": self.values, "error": self.error, "low": low, "high": high}

    def __repr__(self) -> str:
        best = "".join(f"; strongest {name} {effect:+.3g}" for name, effect in self.top(1))
        return f"Sweep({self.at!r}, {self._format_shape()}{', to first order' * self.first_order}{best})"

    def _repr_html_(self) -> str:
        clean = "an ablation" if self.clean is None else f"clean {float(self.clean.mean()):.3g}"
        order = ", to first order" if self.first_order else ""
        summary = f"{self.at}: {self._format_shape()}{order}; {clean}, corrupt {float(self.corrupt.mean()):.3g}"
        return _render_html(self, summary, {"effect": self.values, "standard error": self.error})


@dataclass(frozen=True, eq=False, repr=False)
class Mediation(CellResult):
    """The result of `bt.mediation`: the natural effects (Pearl 2001) of each cell M, as parts of the total effect.

    The total effect is `clean - corrupt`. *indirect*: the corrupt run with the clean M, minus the corrupt run.
    *direct*: the clean run with the corrupt M, minus the corrupt run. *interaction*: `total - direct - indirect`, which
    is 0 in a linear net. `of("direct")` returns one of the three as a `Sweep`, with errors and intervals.

    Attributes:
        at: The argument `through` of the mediation.
        axes: The names of the axes of the result.
        labels: The labels along each axis, such as the tokens of the words.
        positions: The positions along each axis: the numbers of its slices, heads or words.
        names: The name of each cell, by its index along the axes.
        clean: The metric of the clean run, `[example]`.
        corrupt: The metric of the corrupt run, `[example]`.
        indirect_outcomes: The metric of the corrupt run with the clean M, `[*axes, example]`.
        direct_outcomes: The metric of the clean run with the corrupt M, `[*axes, example]`.
    """

    clean: Tensor
    indirect_outcomes: Tensor
    direct_outcomes: Tensor

    @property
    def direct(self) -> Tensor:
        """The mean direct effect, which bypasses the cell, `[*axes]`."""
        return self.of("direct").values

    @property
    def indirect(self) -> Tensor:
        """The mean indirect effect, through the cell, `[*axes]`."""
        return self.of("indirect").values

    @property
    def interaction(self) -> Tensor:
        """The mean interaction, `total - direct - indirect`, `[*axes]`."""
        return self.of("interaction").values

    def of(self, part: str) -> Sweep:
        """One part of the total effect as a sweep, with errors and intervals.

        Args:
            part: `"direct"`, `"indirect"` or `"interaction"`.

        Returns:
            A sweep whose effects are this part.
        """
        check_choice("part", part, MEDIATION_PARTS)
        direct, indirect = self.direct_outcomes, self.indirect_outcomes
        by_part = {"direct": direct, "indirect": indirect}
        outcomes = by_part.get(part, self.clean + self.corrupt - direct - indirect + self.corrupt)
        return Sweep(**{item.name: getattr(self, item.name) for item in fields(CellResult)}, outcomes=outcomes)

    def __getitem__(self, name: str) -> dict[str, float]:
        """The mean effects of a cell.

        Args:
            name: The name of the cell.

        Returns:
            The mean over the examples of each part: direct, indirect and interaction.
        """
        index = self.index_of(name)
        return {part: float(self.of(part).values[index]) for part in MEDIATION_PARTS}

    def top(self, count: int = DEFAULT_TOP_COUNT) -> list[tuple[str, float]]:
        """The cells with the largest absolute indirect effects.

        Args:
            count: The maximum number of cells.

        Returns:
            Pairs of the name of a cell and its mean indirect effect, in decreasing order of the absolute effect.
        """
        return self.of("indirect").top(count)

    def marks(self) -> Mapping[str, str]:
        """The marks of the cells of the strongest indirect effects, for `s.draw("cells.svg", highlight=mediation)`."""
        return self.of("indirect").marks()

    def _get_columns(self, examples: bool) -> dict[str, Tensor]:
        if examples:
            return {part: self.of(part).effects for part in MEDIATION_PARTS}
        columns = {part: self.of(part)._get_columns(examples) for part in MEDIATION_PARTS}
        flat = ((part, name, values) for part, table in columns.items() for name, values in table.items())
        return {part if name == "effect" else f"{part}_{name}": values for part, name, values in flat}

    def __repr__(self) -> str:
        best = "".join(f"; most through {name}, {effect:+.3g}" for name, effect in self.top(1))
        return f"Mediation({self.at!r}, {self._format_shape()}, total {float(self.total.mean()):+.3g}{best})"

    def _repr_html_(self) -> str:
        summary = f"through {self.at}: {self._format_shape()}; total effect {float(self.total.mean()):+.3g}"
        return _render_html(self, summary, {part: self.of(part).values for part in MEDIATION_PARTS})


def bootstrap_interval(effects: Tensor, confidence: float, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """The percentile bootstrap interval (Efron 1979) of the mean over the last dim.

    Args:
        effects: The effects, `[*axes, example]`.
        confidence: The confidence level of the interval, from 0 to 1.
        draws: The number of resamples, shared by all other dims.
        seed: The seed of the resamples.

    Returns:
        The lower and the upper ends, `[*axes]` each.
    """
    check_fraction("confidence", confidence)
    count, draws = effects.shape[-1], check_int("draws", draws)
    generator = np.random.default_rng(check_seed(seed))
    if count < 2:
        raise BNetError("interval", expected="at least 2 examples", actual=count)
    # The mean of a resample is the product of the effects and the frequencies of the examples in it, so that all cells
    # and resamples are one matrix product.
    weights = np.zeros((draws, count))  # the frequency of each example in each resample
    np.add.at(weights, (np.arange(draws)[:, None], generator.integers(0, count, (draws, count))), 1 / count)
    flat = to_numpy(effects.double().reshape(-1, count))
    ends = np.full((2, len(flat)), np.nan)
    quantiles = ((1 - confidence) / 2, (1 + confidence) / 2)
    step = max(1, BOOTSTRAP_CHUNK_SIZE // draws)
    for first in range(0, len(flat), step):
        part = slice(first, first + step)
        with np.errstate(invalid="ignore"):  # the interval of an infinite effect is NaN
            ends[:, part] = np.quantile(flat[part] @ weights.T, quantiles, axis=1)
    low, high = torch.from_numpy(ends).reshape(2, *effects.shape[:-1])
    return low, high


def _format_count(count: int, noun: str) -> str:
    """A count with its noun."""
    noun, tail = ("word", " read") if noun == "read" else (noun, "")
    return f"{count:,} {noun}{'' if count == 1 else 's'}{tail}"


def _render_html(result: Sweep | Mediation, summary: str, columns: Mapping[str, Tensor]) -> str:
    """The strongest cells as an HTML table with these columns."""
    import pandas as pd

    names = [name for name, _ in result.top(MAX_HTML_ROWS)]
    numbers = {column: [float(values[result.index_of(name)]) for name in names] for column, values in columns.items()}
    table = pd.DataFrame({"cell": names, **numbers}).to_html(index=False, float_format="{:.3g}".format, na_rep="")
    more = (
        f"<p>The {MAX_HTML_ROWS} strongest of {len(result.names):,}.</p>" if len(result.names) > MAX_HTML_ROWS else ""
    )
    return f"<p>{escape(summary)}</p>{table}{more}"

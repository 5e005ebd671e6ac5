"""Results of sweeps: the effect of each cell on the metric, by example, with standard errors and intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_fraction, check_int, check_seed
from bnet_transformer._core.naming import WORD, count_word_from_start, split_path
from bnet_transformer._core.results import Fields, Result
from bnet_transformer._core.stats import EffectTable, SentenceValues, bootstrap_interval
from bnet_transformer._core.tensors import rank_by_size, to_numpy
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.interventions.examples import explain_unchecked_metric
from bnet_transformer.interventions.methods import EXACT, Gradient

if TYPE_CHECKING:
    import pandas as pd


# --------------------------------------------------------------------------------------------------------------------
# Calibration of estimated effects: estimated and exact effects of some cells.


RELATIVE_ZERO = 1e-9  # effects that are smaller, relative to the largest, have no sign


@dataclass(frozen=True, eq=False, repr=False)
class EstimateCalibration(Result):
    """Estimated and exact effects of some cells, the result of `method=bt.Gradient(check=n)`.

    Half of the cells are those with the largest estimates, the others are drawn at random.

    Attributes:
        names: The names of the cells.
        estimates: The estimated effects, `[cell, example]`.
        exact: The exact effects, `[cell, example]`.

    The numbers below compare means over the examples.
    """

    _shapes = "names: any cell; estimates exact: float64 cell example"

    names: tuple[str, ...]
    estimates: Tensor
    exact: Tensor

    @property
    def correlation(self) -> float | None:
        """The correlation of the estimates and the exact effects; None if one of them is constant."""
        estimates, exact = self._means
        scale = max(np.abs(estimates).max(), np.abs(exact).max())
        if min(estimates.std(), exact.std()) <= RELATIVE_ZERO * scale:
            return None
        return float(np.corrcoef(estimates, exact)[0, 1])

    @property
    def slope(self) -> float | None:
        """The slope of the least-squares line from the estimates to the exact effects; None without a spread.

        A slope of 2 means that exact effects are twice as large as estimated.
        """
        estimates, exact = self._means
        if estimates.std() <= RELATIVE_ZERO * np.abs(estimates).max():
            return None
        return float(np.cov(estimates, exact, bias=True)[0, 1] / estimates.var())

    @property
    def largest_error(self) -> float:
        """The largest `|estimate - exact|`."""
        estimates, exact = self._means
        return float(np.abs(estimates - exact).max())

    @property
    def sign_agreement(self) -> float:
        """The share of cells whose estimate and exact effect have the same sign; 0 has its own sign."""
        estimates, exact = self._means
        zero = RELATIVE_ZERO * max(np.abs(estimates).max(), np.abs(exact).max())
        signs = [np.sign(np.where(np.abs(means) <= zero, 0.0, means)) for means in (estimates, exact)]
        return float((signs[0] == signs[1]).mean())

    @property
    def _means(self) -> tuple[np.ndarray, np.ndarray]:
        """The mean estimate and the mean exact effect of each cell."""
        estimates, exact = (effects.double().mean(-1).numpy() for effects in (self.estimates, self.exact))
        return estimates, exact

    def _get_columns(self) -> Mapping[str, Any]:
        estimates, exact = self._means
        return {"name": self.names, "estimate": estimates, "exact": exact, "error": estimates - exact}

    @property
    def caption(self) -> str:
        """The numbers that compare the effects, in one line."""
        terms = {"correlation": self.correlation, "slope": self.slope}
        numbers = [f"{name} {value:.3f}" for name, value in terms.items() if value is not None]
        numbers += [f"largest error {self.largest_error:.2g}", f"signs agree {self.sign_agreement:.0%}"]
        count = len(self.names)
        return f"checked {count:,} cell{'s' * (count != 1)}: {', '.join(numbers)}"

    def __repr__(self) -> str:
        return f"EstimateCalibration({self.caption})"

    def _get_shown_rows(self) -> list[int]:
        return rank_by_size(self._means[1])


# --------------------------------------------------------------------------------------------------------------------
# Results by cell: axes, names, parts of a list of roles, selections and data frames.


TOKEN_COLUMNS = {"word": "token"}  # the column of tokens of an axis; the default is `read_token` and so on


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
class CellResult(EffectTable):
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
        silent: The names of the cells that change no value, up to rounding, in any example.
    """

    _ranked: ClassVar[str]  # the column by which cells are ranked
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
    silent: tuple[str, ...] = field(default=(), kw_only=True)

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
        return self._restrict(**vars(grid), **outcomes)

    def _restrict(self, *, names: Mapping[tuple[int, ...], str], **changes: Any) -> Self:
        """The result of the cells with these names."""
        remaining = {*names.values()}
        silent = tuple(name for name in self.silent if name in remaining)
        return replace(self, names=names, silent=silent, parts={}, **changes)

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
        return self._restrict(axes=axes, labels=labels, positions=remaining, names=names, **outcomes)

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

        frame = pd.DataFrame(self._get_cells())
        if examples:
            count = len(frame)
            frame = frame.loc[frame.index.repeat(self.examples)].reset_index(drop=True)
            frame["example"] = np.tile(np.arange(self.examples), count)
        numbers = self._get_example_numbers() if examples else self._get_numbers()
        return frame.assign(**{name: values.reshape(-1) for name, values in numbers.items()})

    def _get_cells(self) -> dict[str, Sequence[Any]]:
        """The name of each cell, and its position and token along each axis."""
        columns: dict[str, Sequence[Any]] = {"name": list(self.names.values())}
        for dim, axis in enumerate(self.axes):
            index, labels = [cell[dim] for cell in self.names], self.labels.get(axis)
            if axis == "edge":
                ends = [split_path(self.labels[axis][k]) for k in index]
                columns |= {"writer": [end[0] for end in ends], "reader": [end[1] for end in ends]}
            elif axis not in ("cell", "path"):
                along = self.positions_along(axis)
                columns[axis] = [along[k] for k in index]
                if labels is not None and labels != tuple(map(str, along)):
                    columns[TOKEN_COLUMNS.get(axis, f"{axis}_token")] = [labels[k] for k in index]
        return columns

    def _to_sentence_values(self) -> SentenceValues:
        cells, tables = self._get_cells(), self._get_effects()
        names = [f"{name} {part}".rstrip() for part in tables for name in cells["name"]]
        columns: dict[str, list[Any]] = {key: [*values] * len(tables) for key, values in cells.items() if key != "name"}
        if len(tables) > 1:
            columns["part"] = [part for part in tables for _ in cells["name"]]
        settings = {"at": self.at, "axes": self.axes, "direction": self.direction, "metric": self.metric}
        notes = explain_unchecked_metric(self.metric)
        notes += ("one result has estimates to first order",) if getattr(self, "method", EXACT) != EXACT else ()
        options: Any = {"settings": settings, "notes": notes, "digests": self.digests}
        values = np.concatenate([self._get_cell_values(effects) for effects in tables.values()])
        return SentenceValues("effect", tuple(names), columns, values, **options)

    def _get_effects(self) -> dict[str, Tensor]:
        """The effects of the cells, `[*axes, example]`, by the part of the total effect; `""` for all of it."""
        raise NotImplementedError

    def _get_example_numbers(self) -> dict[str, Any]:
        """The columns of numbers by cell and example, `[cell, example]` each."""
        return {name: self._get_cell_values(effects) for name, effects in self._get_effects().items()}

    def _get_shown_frame(self) -> pd.DataFrame:
        import pandas as pd

        means = {name: self._get_cell_values(values) for name, values in self._get_means().items()}
        return pd.DataFrame({"cell": list(self.names.values()), **means}).iloc[rank_by_size(means[self._ranked])]

    def _get_means(self) -> dict[str, Tensor]:
        """The mean effects, and their standard errors if there are any, `[*axes]` each."""
        raise NotImplementedError

    def _rank(self, values: Tensor, count: int) -> list[tuple[str, float]]:
        """The names of the cells of the largest absolute values, and these values; not of cells that are NaN."""
        numbers, names = self._get_cell_values(values), list(self.names.values())
        ranked = [(names[k], float(numbers[k])) for k in rank_by_size(numbers, count)]
        return [(name, number) for name, number in ranked if not np.isnan(number)]

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
    singular, tail = ("word", " read") if noun == "read" else (noun, "")
    plural = "entries" if noun == "entry" else f"{singular}s"
    return f"{count:,} {singular if count == 1 else plural}{tail}"


# --------------------------------------------------------------------------------------------------------------------
# Results of sweeps: the effect of each cell on the metric, by example, with standard errors and intervals.


MEDIATION_PARTS = ("direct", "indirect", "interaction")
DEFAULT_TOP_COUNT = 5


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(CellResult):
    """The result of `bt.sweep`: the metric with each cell patched, and the metric of the clean and the corrupt run.

    An *effect* is `outcomes - base`, where `base` is the run that is patched: the corrupt run, or the clean run with
    `direction="noise"`. Standard errors and intervals are over the examples.

    Attributes:
        at: The argument `at` of the sweep.
        axes: The names of the axes of the result.
        labels: The labels along each axis, such as the tokens of the words.
        positions: The positions along each axis: the numbers of its slices, heads or words.
        names: The name of each cell, by its index along the axes.
        clean: The metric of the clean run, `[example]`; None for an ablation of the corrupt run.
        corrupt: The metric of the corrupt run, `[example]`; None for an ablation of the clean run.
        parts: The axes and the cells of each item of `at`, if it is a list; `part` returns the results of one item.
        direction: `"denoise"`, clean values patched into the corrupt run, or `"noise"`, the reverse.
        metric: The metric: its node and states, or the parameters of a function.
        aligned: The aligned tokens of the clean and the corrupt run along the axes of words, such as "sat / ran"; empty
            if they are unknown.
        special: For each word along the axes of words, whether it is a special token; empty if this is unknown.
        digests: A digest of the words of each pair, or of each corrupt sentence if an ablation replaces the clean
            run; empty if they are unknown.
        notes: What to consider: that no cell changes the metric, that some examples have a gradient of zero, or that a
            cell that `at` names changes no value, or no node on which the metric depends.
        silent: The names of the cells that change no value, up to rounding, in any example.
        outcomes: The metric with each cell patched, `[*axes, example]`; NaN at positions without a cell, such as an
            arrow that the mask excludes.
        method: `"exact"`, or the `bt.Gradient` by which the outcomes are estimated, without a run of any cell.
        calibration: Estimated and exact effects of some cells, with `bt.Gradient(check=n)`; else None.
    """

    _ranked = "effect"
    _shapes = CellResult._shapes + "; outcomes: float64 *axes example"

    outcomes: Tensor
    method: Literal["exact"] | Gradient = EXACT
    calibration: EstimateCalibration | None = None

    @property
    def effects(self) -> Tensor:
        """The effect of each cell, `outcomes - base`, `[*axes, example]`."""
        return self.outcomes - self.base

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
        """The mean outcome on a scale from the corrupt run, 0, to the clean run, 1, `[*axes]`.

        With `direction="denoise"` it is the mean effect as a fraction of the mean total effect. With `"noise"` the
        effects are subtracted from a clean run, so it is 1 plus that fraction.
        """
        total = self.total.mean()
        if not bool(total.abs() > 0) or not bool(total.isfinite()):
            actual = f"a mean total effect of {float(total):g}"
            expected = "a clean and a corrupt run with different metrics"
            raise BNetError("restored", expected=expected, actual=actual, hint="Use values or effects")
        return self.values / total + (self.direction == "noise")

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
        if self.examples < 2:
            raise BNetError("interval", expected="at least 2 examples", actual=self.examples)
        check_fraction("confidence", confidence)
        flat = to_numpy(self.effects.double().flatten(0, -2) if self.axes else self.effects.double()[None])
        ends = bootstrap_interval(flat, confidence, check_int("draws", draws), check_seed(seed))
        low, high = torch.from_numpy(np.stack(ends)).reshape(2, *self.effects.shape[:-1])
        return low, high

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
        return self._rank(self.values, count)

    def marks(self) -> Mapping[str, str]:
        """The marks of the strongest cells, for `s.draw("cells.svg", highlight=sweep)`; of edges, of both ends."""
        strongest = [(name, f"{effect:+.2g}") for name, effect in self.top() if effect != 0]
        if "edge" not in self.axes:
            return dict(strongest)
        ends = [(end.split("<")[0], label) for name, label in strongest for end in split_path(name)]
        return {f"{end}_*": label for end, label in reversed(ends)}

    def _get_effects(self) -> dict[str, Tensor]:
        return {"": self.effects}

    def _get_example_numbers(self) -> dict[str, Any]:
        return {"outcome": self._get_cell_values(self.outcomes), "effect": self._get_cell_values(self.effects)}

    def _get_means(self) -> dict[str, Tensor]:
        return {"effect": self.values, "error": self.error}

    def _get_numbers(self) -> dict[str, Any]:
        nan = torch.full_like(self.values, torch.nan)
        ends = (nan, nan) if self.examples == 1 else self.interval()
        numbers = self._get_means() | dict(zip(("low", "high"), ends, strict=True))
        return {name: self._get_cell_values(values) for name, values in numbers.items()}

    def __repr__(self) -> str:
        best = "".join(f"; strongest {name} {effect:+.3g}" for name, effect in self.top(1))
        return f"Sweep({self.at!r}, {self._format_shape()}{self._format_method()}{best}{self._format_notes()})"

    def _format_notes(self) -> str:
        """The calibration and the notes, as text after semicolons."""
        check = "" if self.calibration is None else f"; {self.calibration.caption}"
        return check + super()._format_notes()

    def format_order(self) -> str:
        """Whether effects are estimated, as text.

        Returns:
            `", to first order"`, with the number of steps of integrated gradients; an empty string for exact effects.

        >>> import bnet_transformer as bt
        >>> net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "cat", "dog", "sat"])
        >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
        >>> method = bt.Gradient(steps=8)
        >>> bt.sweep(clean, corrupt, at="a", metric={"y_2": ("cat", "dog")}, method=method).format_order()
        ', to first order over 8 steps'
        """
        return "" if isinstance(self.method, str) else f", {self.method.describe()}"

    def _format_method(self) -> str:
        """The direction and the order of the effects, as text after a comma; empty for an exact sweep by denoising."""
        return (", corrupt into clean" if self.direction == "noise" else "") + self.format_order()

    @classmethod
    def _upgrade_fields(cls, fields: Fields) -> Fields:
        steps = fields.pop("steps", 0)  # version 0.1 has these two fields instead of the method
        return {"method": Gradient(steps=steps), **fields} if fields.pop("first_order", False) else fields

    @property
    def caption(self) -> str:
        """The cells, the method and the means of the runs, in one line."""
        runs = {"clean": self.clean, "corrupt": self.corrupt}
        means = [f"{name} {float(run.mean()):.3g}" for name, run in runs.items() if run is not None]
        means = means if len(means) == 2 else ["an ablation", *means]
        text = f"{self.at}: {self._format_shape()}{self._format_method()}; {', '.join(means)}"
        text += f"; {len(self.silent):,} change no value" if self.silent else ""
        return text if self.calibration is None else f"{text}; {self.calibration.caption}"


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
        parts: The axes and the cells of each item of `through`, if it is a list.
        direction: `"denoise"`; the direct effects are computed by noising.
        metric: The metric: its node and states, or the parameters of a function.
        aligned: The aligned tokens of the clean and the corrupt run along the axes of words, such as "sat / ran"; empty
            if they are unknown.
        special: For each word along the axes of words, whether it is a special token; empty if this is unknown.
        digests: A digest of the words of each pair, or of each corrupt sentence if an ablation replaces the clean
            run; empty if they are unknown.
        notes: What to consider: that no cell changes the metric, in both directions.
        silent: The names of the cells whose values are equal in both runs, up to rounding.
        indirect_outcomes: The metric of the corrupt run with the clean M, `[*axes, example]`.
        direct_outcomes: The metric of the clean run with the corrupt M, `[*axes, example]`.
    """

    _ranked = "indirect"
    _shapes = CellResult._shapes + "; indirect_outcomes direct_outcomes: float64 *axes example"

    clean: Tensor
    corrupt: Tensor
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

    def _get_effects(self) -> dict[str, Tensor]:
        return {part: self.of(part).effects for part in MEDIATION_PARTS}

    def _get_means(self) -> dict[str, Tensor]:
        return {part: self.of(part).values for part in MEDIATION_PARTS}

    def _get_numbers(self) -> dict[str, Any]:
        columns = {part: self.of(part)._get_numbers() for part in MEDIATION_PARTS}
        flat = ((part, name, values) for part, table in columns.items() for name, values in table.items())
        return {part if name == "effect" else f"{part}_{name}": values for part, name, values in flat}

    def __repr__(self) -> str:
        best = "".join(f"; most through {name}, {effect:+.3g}" for name, effect in self.top(1))
        total = f"total {float(self.total.mean()):+.3g}"
        return f"Mediation({self.at!r}, {self._format_shape()}, {total}{best}{self._format_notes()})"

    @property
    def caption(self) -> str:
        """The cells and the total effect, in one line."""
        return f"through {self.at}: {self._format_shape()}; total effect {float(self.total.mean()):+.3g}"

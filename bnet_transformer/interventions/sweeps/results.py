"""What a sweep tells: the effect of each cell on the metric, example by example, with errors and intervals."""

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

from bnet_transformer._core.checks import check_choice, check_fraction, check_int, check_seed
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.tpm.arrays import to_numpy

if TYPE_CHECKING:
    import pandas as pd

BOOTSTRAP_CHUNK_SIZE = 2**23  # resampled means at once: 64 MB
MEDIATION_PARTS = ("direct", "indirect", "interaction")
TOKEN_COLUMNS = {"word": "token"}  # what the column of an axis' words is called; of others `read_token` and the like
MAX_HTML_ROWS = 12  # rows in a notebook
DEFAULT_TOP_COUNT = 5


@dataclass(frozen=True, eq=False, repr=False)
class CellResult:
    """What is common to results by cell.

    `names` has the name of each cell, by its index; `labels` what stands along an axis, `positions` the numbers of its
    slices, heads and words. `clean` and `corrupt` are the metric of both base runs, `[example]`.
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
        """How many examples there are."""
        return len(self.corrupt)

    @property
    def total(self) -> Tensor:
        """How far the corrupt run is from the clean one, `[example]`: `clean - corrupt`."""
        if self.clean is None:
            got = "an ablation, which has no clean run"
            raise BNetError("total", expected="a sweep with a clean run", actual=got, allowed="values, effects")
        return self.clean - self.corrupt

    def index_of(self, name: str) -> tuple[int, ...]:
        """Where a cell stands, by its name."""
        if name not in self._index_by_name:
            raise unknown_name_error("cell", name, self._index_by_name)
        return self._index_by_name[name]

    @cached_property
    def _index_by_name(self) -> dict[str, tuple[int, ...]]:
        return {name: index for index, name in self.names.items()}

    def select(self, **positions: int) -> Self:
        """The cells at one place of some axes, such as `select(slice=1)`: the same result without these axes."""
        index: list[Any] = [slice(None)] * len(self.axes)
        for axis, place in positions.items():
            along = self.positions_along(axis)
            if check_int(axis, place, minimum=0) not in along:
                told = f"{along[0]} to {along[-1]}" if along == tuple(range(along[0], along[-1] + 1)) else f"{along}"
                raise BNetError(axis, expected=f"one of {told}", actual=place)
            index[self.axes.index(axis)] = along.index(place)
        free = [dim for dim, axis in enumerate(self.axes) if axis not in positions]
        names = {
            tuple(cell[dim] for dim in free): name
            for cell, name in self.names.items()
            if all(cell[dim] == k for dim, k in enumerate(index) if dim not in free)
        }
        axes = tuple(self.axes[dim] for dim in free)
        labels = {axis: self.labels[axis] for axis in axes if axis in self.labels}
        numbers = {axis: self.positions[axis] for axis in axes if axis in self.positions}
        tensors = [each.name for each in fields(self) if each.name.endswith("outcomes")]
        outcomes = {name: getattr(self, name)[tuple(index)] for name in tensors}
        return replace(self, axes=axes, labels=labels, positions=numbers, names=names, **outcomes)

    def positions_along(self, axis: str) -> tuple[int, ...]:
        """The numbers of the slices, heads or words along an axis."""
        if axis not in self.axes:
            raise unknown_name_error("axis", axis, self.axes)
        return self.positions.get(axis, tuple(range(len(self.labels.get(axis, ())))))

    def to_dataframe(self, *, examples: bool = False) -> pd.DataFrame:
        """A row for each cell: its effects, each with its error and 95% interval (NaN with a single example).

        With `examples=True` a row for each cell and example.
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
        return frame.assign(**{what: self._get_cell_values(told).reshape(-1) for what, told in values.items()})

    def _get_columns(self, examples: bool) -> dict[str, Tensor]:
        """The columns of numbers: `[*axes]`, or `[*axes, example]`."""
        raise NotImplementedError

    def _get_cell_values(self, values: Tensor) -> Any:
        """The numbers of the cells that there are, in the order of their names."""
        found = np.asarray(values.detach().cpu().double())
        return np.array([found[index] for index in self.names])

    def _format_shape(self) -> str:
        """The axes and how long they are, and how many examples, in words."""
        counts = [(axis, len(self.labels[axis])) for axis in self.axes]
        axes = " x ".join(_format_count(count, axis) for axis, count in counts) or "all together"
        return f"{axes}, {_format_count(self.examples, 'example')}"


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(CellResult):
    """The metric with each cell set, `outcomes[*axes, example]`, beside that of the clean and of the corrupt run.

    An *effect* is `outcomes - corrupt`. NaN is where there is no such cell: an arrow that the mask lacks. Standard
    errors and intervals are over the examples. Of a sweep to `first_order` the outcomes are estimates: no cell was run.
    """

    outcomes: Tensor
    first_order: bool = False

    @property
    def effects(self) -> Tensor:
        """How far each cell moves the metric from the corrupt run, `[*axes, example]`."""
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
        """The mean effect as a share of the mean total, `[*axes]`: 0 as corrupt, 1 as clean."""
        total = self.total.mean()
        if not bool(total.abs() > 0) or not bool(total.isfinite()):
            got = f"a mean total of {float(total):g}"
            wanted = "a clean and a corrupt run whose metrics differ"
            raise BNetError("restored", expected=wanted, actual=got, allowed="values, effects")
        return self.values / total

    def interval(self, confidence: float = 0.95, *, draws: int = 1000, seed: int = 0) -> tuple[Tensor, Tensor]:
        """The ends of the percentile bootstrap interval of the mean effect: two `[*axes]`.

        The examples are drawn anew, with replacement, `draws` times; all cells share the draws.
        """
        return bootstrap_interval(self.effects, confidence, draws, seed)

    def __getitem__(self, name: str) -> float:
        """The mean effect of a cell, by its name."""
        return float(self.values[self.index_of(name)])

    def top(self, count: int = DEFAULT_TOP_COUNT) -> list[tuple[str, float]]:
        """The cells of the greatest effects, up or down, each with its mean effect; equal ones in their order."""
        values = self._get_cell_values(self.values)
        size = np.where(np.isnan(values), -1.0, np.abs(values))
        greatest = size.max(initial=1e-290, where=np.isfinite(size))
        told = np.round(size / greatest, 6)  # what differs by rounding alone is equal
        order = np.argsort(-told, kind="stable")[: check_int("count", count)]
        names = list(self.names.values())
        return [(names[k], float(values[k])) for k in order.tolist() if size[k] >= 0]

    def marks(self) -> Mapping[str, str]:
        """The strongest cells with their effects: `s.draw("cells.svg", highlight=sweep)` shows them."""
        return {name: f"{effect:+.2g}" for name, effect in self.top() if effect != 0}

    def _get_columns(self, examples: bool) -> dict[str, Tensor]:
        if examples:
            return {"outcome": self.outcomes, "effect": self.effects}
        none = torch.full_like(self.values, torch.nan)
        low, high = (none, none) if self.examples == 1 else self.interval()
        return {"effect": self.values, "error": self.error, "low": low, "high": high}

    def __repr__(self) -> str:
        best = "".join(f"; strongest {name} {effect:+.3g}" for name, effect in self.top(1))
        return f"Sweep({self.at!r}, {self._format_shape()}{', to first order' * self.first_order}{best})"

    def _repr_html_(self) -> str:
        clean = "an ablation" if self.clean is None else f"clean {float(self.clean.mean()):.3g}"
        order = ", to first order" if self.first_order else ""
        told = f"{self.at}: {self._format_shape()}{order}; {clean}, corrupt {float(self.corrupt.mean()):.3g}"
        return _render_html(self, told, {"effect": self.values, "standard error": self.error})


@dataclass(frozen=True, eq=False, repr=False)
class Mediation(CellResult):
    """How much of the total effect, `clean - corrupt`, goes through each cell M (Pearl's natural effects).

    *indirect*: the corrupt run with the clean M, less the corrupt run. *direct*: the clean run with the corrupt M, less
    the corrupt run. *interaction*: `total - direct - indirect`, which is 0 in a linear net. `of("direct")` is one of
    the three as a `Sweep`, with its errors and intervals.
    """

    clean: Tensor
    indirect_outcomes: Tensor
    direct_outcomes: Tensor

    @property
    def direct(self) -> Tensor:
        """The mean direct effect, that which does not go through the cell, `[*axes]`."""
        return self.of("direct").values

    @property
    def indirect(self) -> Tensor:
        """The mean indirect effect, that which goes through the cell, `[*axes]`."""
        return self.of("indirect").values

    @property
    def interaction(self) -> Tensor:
        """What the mean total has beyond both, `[*axes]`."""
        return self.of("interaction").values

    def of(self, part: str) -> Sweep:
        """The `direct`, the `indirect` effect or the `interaction`, as a sweep."""
        check_choice("part", part, MEDIATION_PARTS)
        direct, indirect = self.direct_outcomes, self.indirect_outcomes
        both = {"direct": direct, "indirect": indirect}
        outcomes = both.get(part, self.clean + self.corrupt - direct - indirect + self.corrupt)
        return Sweep(**{each.name: getattr(self, each.name) for each in fields(CellResult)}, outcomes=outcomes)

    def __getitem__(self, name: str) -> dict[str, float]:
        """The mean effects of a cell, by its name."""
        index = self.index_of(name)
        return {part: float(self.of(part).values[index]) for part in MEDIATION_PARTS}

    def top(self, count: int = DEFAULT_TOP_COUNT) -> list[tuple[str, float]]:
        """The cells of the greatest indirect effects, each with it."""
        return self.of("indirect").top(count)

    def marks(self) -> Mapping[str, str]:
        """The cells through which most goes: `s.draw("cells.svg", highlight=mediation)` shows them."""
        return self.of("indirect").marks()

    def _get_columns(self, examples: bool) -> dict[str, Tensor]:
        if examples:
            return {part: self.of(part).effects for part in MEDIATION_PARTS}
        told = {part: self.of(part)._get_columns(examples) for part in MEDIATION_PARTS}
        return {part if w == "effect" else f"{part}_{w}": v for part, each in told.items() for w, v in each.items()}

    def __repr__(self) -> str:
        best = "".join(f"; most through {name}, {effect:+.3g}" for name, effect in self.top(1))
        return f"Mediation({self.at!r}, {self._format_shape()}, total {float(self.total.mean()):+.3g}{best})"

    def _repr_html_(self) -> str:
        told = f"through {self.at}: {self._format_shape()}; total effect {float(self.total.mean()):+.3g}"
        return _render_html(self, told, {part: self.of(part).values for part in MEDIATION_PARTS})


def bootstrap_interval(effects: Tensor, confidence: float, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """The percentile bootstrap interval of the mean over the last dim; what stands in other dims shares the draws."""
    check_fraction("confidence", confidence)
    count, draws = effects.shape[-1], check_int("draws", draws)
    generator = np.random.default_rng(check_seed(seed))
    if count < 2:
        raise BNetError("interval", expected="at least 2 examples, over which it is", actual=count)
    shares = np.zeros((draws, count))  # how much of each resample each example makes
    np.add.at(shares, (np.arange(draws)[:, None], generator.integers(0, count, (draws, count))), 1 / count)
    flat = to_numpy(effects.double().reshape(-1, count))
    ends = np.full((2, len(flat)), np.nan)
    at = ((1 - confidence) / 2, (1 + confidence) / 2)
    step = max(1, BOOTSTRAP_CHUNK_SIZE // draws)
    for first in range(0, len(flat), step):
        part = slice(first, first + step)
        with np.errstate(invalid="ignore"):  # where an effect is infinite the ends are NaN
            ends[:, part] = np.quantile(flat[part] @ shares.T, at, axis=1)
    low, high = torch.from_numpy(ends).reshape(2, *effects.shape[:-1])
    return low, high


def _format_count(count: int, noun: str) -> str:
    noun, tail = ("word", " read") if noun == "read" else (noun, "")
    return f"{count:,} {noun}{'' if count == 1 else 's'}{tail}"


def _render_html(result: Sweep | Mediation, summary: str, columns: Mapping[str, Tensor]) -> str:
    """The strongest cells as a table, with some of their numbers."""
    import pandas as pd

    names = [name for name, _ in result.top(MAX_HTML_ROWS)]
    numbers = {what: [float(values[result.index_of(name)]) for name in names] for what, values in columns.items()}
    table = pd.DataFrame({"cell": names, **numbers}).to_html(index=False, float_format="{:.3g}".format, na_rep="")
    more = (
        f"<p>The {MAX_HTML_ROWS} strongest of {len(result.names):,}.</p>" if len(result.names) > MAX_HTML_ROWS else ""
    )
    return f"<p>{escape(summary)}</p>{table}{more}"

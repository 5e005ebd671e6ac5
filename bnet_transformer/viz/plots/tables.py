"""Plots of numbers with named axes: arrays, tensors, tables, and all results that have `values` and `axes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bnet_transformer.errors import BNetError, one_of, whole
from bnet_transformer.viz.plots.bars import Series, bars, top_of
from bnet_transformer.viz.plots.canvas import Canvas
from bnet_transformer.viz.plots.heat import Map, heat_map, heat_maps, shared_limits, up_to
from bnet_transformer.viz.plots.table import Numbers, Table, Tabled, table_of


def array(
    result: object,
    canvas: Canvas,
    *,
    axes: object = None,
    labels: Mapping[str, Sequence[str]] | None = None,
    low: object = None,
    high: object = None,
    error: object = None,
    what: str = "",
    top: int = 20,
    sort: bool | None = None,
) -> None:
    """An array or tensor, by the names of its axes."""
    table(table_of(result, axes, labels=labels, low=low, high=high, error=error, what=what), canvas, top=top, sort=sort)


def tabled(result: Tabled, canvas: Canvas, *, top: int = 20, sort: bool | None = None) -> None:
    """A result with `values` and `axes`; `labels`, `low`, `high`, `error` and `what` where it has them."""
    extra = {name: getattr(result, name, None) for name in ("labels", "low", "high", "error")}
    what = getattr(result, "what", "")
    found = table_of(result.values, tuple(result.axes), **extra, what=what if isinstance(what, str) else "")
    table(found, canvas, top=top, sort=sort)


def table(result: Table, canvas: Canvas, *, top: int = 20, sort: bool | None = None) -> None:
    """Bars of one axis, a heat map of two (with intervals in its cells), small heat maps of three.

    `top` is how many bars are drawn of more; `sort` orders sentences by their strongest head, as it does by default.
    """
    whole("top", top)
    one_of("sort", sort, (None, True, False))
    if result.values.ndim == 1:
        _bars(result, canvas, top)
    elif result.values.ndim == 2:
        _map(result, canvas, sort)
    else:
        _maps(result, canvas)


def strongest_first(values: object) -> list[int]:
    """The rows by their strongest column; among those of one column the surest first."""
    numbers = np.nan_to_num(np.asarray(values), nan=-np.inf)
    return np.lexsort((-numbers.max(1), numbers.argmax(1))).tolist()  # type: ignore[no-any-return]


def what_of(result: Table) -> str:
    """What the numbers are: as told, or a share, or a value."""
    if result.what:
        return result.what
    return "probability" if shares(result) else "value"


def shares(result: Table) -> bool:
    """True where each row adds up to 1."""
    return not result.signed and bool(np.allclose(np.nansum(result.values, -1), 1, atol=1e-4))


def _bars(result: Table, canvas: Canvas, top: int) -> None:
    one = Series(result.values, low=result.low, high=result.high)
    series, labels, told = top_of([one], result.named(0), top)
    ax = bars(canvas, None, series, labels, what=what_of(result), of=result.axes[0])
    canvas.note(told)
    canvas.headline("", ax)


def _map(result: Table, canvas: Canvas, sort: bool | None) -> None:
    rows, columns = result.named(0), result.named(1)
    values, low, high = result.values, result.low, result.high
    corpus = result.axes[0] == "sentence"
    if sort or (sort is None and corpus):
        order = strongest_first(values)
        rows = tuple(rows[k] for k in order)
        values, low, high = values[order], _ordered(low, order), _ordered(high, order)
        canvas.note(f"{result.axes[0].capitalize()}s in the order of their strongest {result.axes[1]}.")
    many = corpus and len(rows) > 40 and "sentence" not in result.labels
    square = result.axes[0] == result.axes[1]
    limits = up_to([values]) if shares(result) else None
    found = Map(values, rows, columns, low=low, high=high)
    ax = heat_map(canvas, found, what=what_of(result), x=result.axes[1], y=result.axes[0], limits=limits, square=square)
    if many:
        ax.set_yticks([])
        canvas.named(ax, y=f"{len(rows):,} {result.axes[0]}s")
    canvas.headline("", ax)


def _ordered(values: Numbers | None, order: list[int]) -> Numbers | None:
    return None if values is None else values[order]


def _maps(result: Table, canvas: Canvas) -> None:
    if result.low is not None:
        raise BNetError("interval", expected="a table of 1 or 2 axes to draw intervals in", got="3 axes")
    by = result.axes.index("head") if result.axes.count("head") == 1 else 0
    values, names = np.moveaxis(result.values, by, 0), result.named(by)
    rest = [dim for dim in range(3) if dim != by]
    rows, columns = (result.named(dim) for dim in rest)
    maps = [Map(each, rows, columns, f"{result.axes[by]} {name}") for name, each in zip(names, values, strict=True)]
    limits = shared_limits([values])
    y, x = (result.axes[dim] for dim in rest)
    across = min(4, len(maps))
    heat_maps(canvas, maps, what=what_of(result), x=x, y=y, across=across, limits=limits, square=x == y)
    canvas.headline("")

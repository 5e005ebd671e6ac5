"""Plots: `plot` draws any result as a matplotlib Figure. No global state of pyplot is read or changed.

`table` is what a plot takes (numbers with named axes), `canvas` the paper and the fonts; `heat`, `tables` (bars) and
`flow` are the kinds of drawing; `sentences`, `readings`, `fits`, `heads` and `sweeps` say which drawing tells a result,
and `kinds` is the one table of them all: a new plot is a row there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bnet_transformer.viz.plots.table import Table, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["Table", "plot", "table_of"]


def plot(
    result: object, *, ax: Axes | None = None, theme: str = "light", title: str | None = None, **options: Any
) -> Figure | SubFigure:
    """Draw any result; the figure comes back, a new one or that of `ax`.

    A `Sentence` shows its attention TPMs (`slice=`, `head=`, `role=`), or a posterior with `node=` (and `evidence=`).
    An array or tensor is drawn by the names of its axes (`axes=("sentence", "head")`, with `labels=`, and `low=` and
    `high=` or `error=`). `theme` is light or dark. `docs/plots.md` has them all.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=4, heads=2).sentence("the cat sat")
    >>> figure = bt.plot(s, slice=0)
    >>> [panel.get_title() for panel in figure.axes[:2]]
    ['c = 0', 'c = 1']
    """
    from bnet_transformer.viz.plots.kinds import drawn

    return drawn(result, ax, theme, title, options)

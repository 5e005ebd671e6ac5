"""The one table of plots: what kind of result is drawn by which function, and what options that takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor
from torch.distributions import Categorical, Distribution

from bnet_transformer._core.checks import check_names
from bnet_transformer.attention import CorpusTan, Reads, Tan, TanTree
from bnet_transformer.attention.heads.corpus_roles import Roles
from bnet_transformer.attention.heads.gates import Damage, Inclusion
from bnet_transformer.cost import Cost
from bnet_transformer.errors import BNetError
from bnet_transformer.inference import Samples
from bnet_transformer.interventions.counterfactual import Counterfactual
from bnet_transformer.interventions.sweeps.results import Mediation, Sweep
from bnet_transformer.learning.fit import Check, Comparison, Fit, Heads
from bnet_transformer.learning.training.loop import Trained
from bnet_transformer.plots import fits, heads, readings, sentences, sweeps, tables
from bnet_transformer.plots.canvas import Canvas, settings
from bnet_transformer.plots.tables import Table

# The first kind that a result is of draws it.
PLOTS: Mapping[type, Callable[..., None]] = {
    Table: tables.table,
    Tensor: tables.array,
    np.ndarray: tables.array,
    Categorical: readings.categorical,
    Distribution: readings.distribution,
    Reads: readings.reads,
    Tan: readings.tan,
    TanTree: readings.tan_tree,
    CorpusTan: readings.corpus_tan,
    Counterfactual: readings.counterfactual,
    Samples: readings.samples,
    Sweep: sweeps.sweep,
    Mediation: sweeps.mediation,
    Fit: fits.fit,
    Heads: fits.heads,
    Comparison: fits.comparison,
    Check: fits.check,
    Inclusion: heads.inclusion,
    Damage: heads.damage,
    Roles: heads.roles,
    Trained: fits.trained,
    Cost: fits.cost,
    sentences.AnySentence: sentences.sentence,
}
NAMES: Mapping[type, str] = {sentences.AnySentence: "Sentence"}
OTHERS = "what has values and axes, a list of Sentences"


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
    draw = _plot_of(result)
    known = [p.name for p in inspect.signature(draw).parameters.values() if p.kind is p.KEYWORD_ONLY]
    check_names(f"option of a plot of {type(result).__name__}", options, known)
    canvas = Canvas(ax, theme, title)
    with settings(canvas.colours["ink"]):
        draw(result, canvas, **options)
        return canvas.finished()


def _plot_of(result: object) -> Callable[..., None]:
    if isinstance(result, list | tuple) and result and all(isinstance(each, sentences.AnySentence) for each in result):
        return sentences.sentences
    for kind, draw in PLOTS.items():
        if isinstance(result, kind):
            return draw
    if hasattr(result, "values") and hasattr(result, "axes"):
        return tables.tabled
    names = ", ".join([*(NAMES.get(kind, kind.__name__) for kind in PLOTS), OTHERS])
    raise BNetError("plot", expected="a result that has a plot", actual=result, allowed=f"{names}; draw is for graphs")

"""`plot`, and the table from the type of a result to the function that plots it."""

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
from bnet_transformer._core.stats import ResultComparison
from bnet_transformer.attention import CorpusTan, Reads, Tan, TanTree
from bnet_transformer.attention.inclusion import Damage, Inclusion
from bnet_transformer.attention.roles import Roles
from bnet_transformer.cost import Cost
from bnet_transformer.errors import BNetError
from bnet_transformer.inference import GroupPosterior, RankedStates, Samples
from bnet_transformer.interventions.circuit import Circuit, CircuitTests
from bnet_transformer.interventions.counterfactual import Counterfactual
from bnet_transformer.interventions.curves import FaithfulnessCurves
from bnet_transformer.interventions.sweep_results import EstimateCalibration, Mediation, Sweep
from bnet_transformer.learning.calibration import Calibration
from bnet_transformer.learning.fit import Check, Comparison, Fit, Heads, ModelComparison
from bnet_transformer.learning.training import Trained
from bnet_transformer.plots import attention, fits, heat_maps, residual_stream, sentences, sweeps
from bnet_transformer.plots.canvas import Canvas, plot_rc_context
from bnet_transformer.plots.heat_maps import LabelledArray
from bnet_transformer.residual_stream import Contributions, Lens, PathContributions, ScoreContributions, TunedLens

# The first type that matches a result determines its plot.
PLOTS_BY_TYPE: Mapping[type, Callable[..., None]] = {
    LabelledArray: heat_maps.plot_labelled_array,
    Tensor: heat_maps.plot_array,
    np.ndarray: heat_maps.plot_array,
    Categorical: sentences.plot_categorical,
    Distribution: sentences.plot_distribution,
    Reads: attention.plot_reads,
    Lens: residual_stream.plot_lens,
    TunedLens: residual_stream.plot_tuned_lens,
    Tan: attention.plot_tan,
    TanTree: attention.plot_tan_tree,
    CorpusTan: attention.plot_corpus_tan,
    Counterfactual: sentences.plot_counterfactual,
    Samples: sentences.plot_samples,
    GroupPosterior: sentences.plot_group_posterior,
    RankedStates: sentences.plot_ranked_states,
    Contributions: residual_stream.plot_contributions,
    PathContributions: residual_stream.plot_path_contributions,
    ScoreContributions: residual_stream.plot_score_contributions,
    Sweep: sweeps.plot_sweep,
    Mediation: sweeps.plot_mediation,
    FaithfulnessCurves: sweeps.plot_faithfulness_curves,
    Circuit: sweeps.plot_circuit,
    CircuitTests: sweeps.plot_circuit_tests,
    EstimateCalibration: fits.plot_estimate_calibration,
    ResultComparison: fits.plot_result_comparison,
    Fit: fits.plot_fit,
    Heads: fits.plot_heads,
    Comparison: fits.plot_comparison,
    ModelComparison: fits.plot_model_comparison,
    Check: fits.plot_check,
    Calibration: fits.plot_calibration,
    Inclusion: attention.plot_inclusion,
    Damage: attention.plot_damage,
    Roles: attention.plot_roles,
    Trained: fits.plot_training,
    Cost: fits.plot_cost,
    sentences.SentenceLike: sentences.plot_sentence,
}
PUBLIC_NAMES: Mapping[type, str] = {LabelledArray: "Table", sentences.SentenceLike: "Sentence"}  # in error messages
UNTYPED_RESULTS = "an object with values and axes, a list of Sentences"


def plot(
    result: object,
    *,
    ax: Axes | None = None,
    theme: str = "light",
    title: str | None = None,
    width: str | None = None,
    font: str | None = None,
    **options: Any,
) -> Figure | SubFigure:
    """Plot any result with matplotlib.

    `docs/plots.md` has the options of each type of result. For example, a `Sentence` is plotted as its attention TPMs
    (`slice=`, `head=`, `role=`) or a posterior (`node=`, `evidence=`), and an array or tensor by the names of its axes
    (`axes=("sentence", "head")`, `labels=`, `low=` and `high=` or `error=`).

    Args:
        result: The result, such as a `Sentence`, a `Sweep`, a `Fit`, an array.
        ax: The matplotlib axes to draw on, for plots with one panel; None for a new figure.
        theme: The colours, "light" or "dark".
        title: The title; "" for none; None for the default title.
        width: The exact width of the figure: a number with a unit ("8.5cm", "3.3in"), or "column", "text" or "slide".
            None for the width that the content requires, at most that of a page.
        font: The name of a font family, such as "Times New Roman" or "serif"; None for DejaVu Sans. Files other than
            SVG require that the font is installed.
        **options: The options of the plot for this type of result.

    Returns:
        The new figure, or the figure that contains `ax`.

    Raises:
        BNetError: The result has no plot, or an option or the width is unknown or invalid.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=4, heads=2).sentence("the cat sat")
    >>> figure = bt.plot(s, slice=0)
    >>> [panel.get_title() for panel in figure.axes[:2]]
    ['c = 0', 'c = 1']
    >>> float(bt.plot(s, slice=0, width="column").get_figwidth())
    3.3
    """
    draw = _find_plot(result)
    known = [p.name for p in inspect.signature(draw).parameters.values() if p.kind is p.KEYWORD_ONLY]
    kind = type(result).__name__
    if "special" in options and "special" not in known:
        expected, hint = "a result whose plot can leave out special tokens", f"A plot of {kind} shows all words"
        raise BNetError("special", expected=expected, actual=kind, hint=hint)
    check_names(f"option of a plot of {kind}", options, known)
    canvas = Canvas(ax, theme, title, width, font)
    with plot_rc_context(canvas.rc_params):
        draw(result, canvas, **options)
        return canvas.finish()


def _find_plot(result: object) -> Callable[..., None]:
    """The function that plots a result."""
    if isinstance(result, list | tuple) and result and all(isinstance(item, sentences.SentenceLike) for item in result):
        return sentences.plot_sentences
    for kind, draw in PLOTS_BY_TYPE.items():
        if isinstance(result, kind):
            return draw
    if hasattr(result, "values") and hasattr(result, "axes"):
        return heat_maps.plot_array_result
    names = ", ".join([*(PUBLIC_NAMES.get(kind, kind.__name__) for kind in PLOTS_BY_TYPE), UNTYPED_RESULTS])
    hint = "To draw a graph, use draw()"
    raise BNetError("plot", expected="a result that has a plot", actual=result, allowed=names, hint=hint)

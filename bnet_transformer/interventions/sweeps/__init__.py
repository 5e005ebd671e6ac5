"""Sweeps: patch many groups of nodes, attention rows, arrows or paths in one batch, and measure the effect on a metric.

The pipeline, in the order in which data flows: `lengths` splits the examples by their length; `request` validates the
arguments of each part: `examples` the sentences, `metric` the metric, `parse_cells` the cells (of roles by
`role_cells`, of arrows and paths by `arrow_cells`), `alignment` the words. `choices` enumerates the latent choices over
which outcomes are averaged. `routing` decides which cells share one run; `engine` computes these by `patched_run`,
which updates only the values that change (`sparse_update`), and the other cells one at a time by `sequential`.
`first_order` estimates all effects from `gradients`, at the base run or at runs of `interpolation`. `ablation` computes
the values of ablations; `results` contains the effects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice
from bnet_transformer._core.memory import translate_memory_errors
from bnet_transformer._core.torch_context import enable_gradients
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.routing import Route
from bnet_transformer.interventions.sweeps.calibration import EstimateCalibration
from bnet_transformer.interventions.sweeps.cell_result import CellResult
from bnet_transformer.interventions.sweeps.cell_route import route_cells
from bnet_transformer.interventions.sweeps.engine import CellOutcomes, run_cells
from bnet_transformer.interventions.sweeps.examples import DEFAULT_MEMORY
from bnet_transformer.interventions.sweeps.first_order import estimate_cells
from bnet_transformer.interventions.sweeps.lengths import LengthPart, join_examples, parse_requests
from bnet_transformer.interventions.sweeps.metric import describe_metric
from bnet_transformer.interventions.sweeps.request import ABLATIONS, SweepRequest
from bnet_transformer.interventions.sweeps.results import Mediation, Sweep

ROUNDING_STEPS = 4  # effects below this number of rounding steps of the metric are rounding errors
ADVISED_STEPS = 8  # enough to average gradients of which one is zero

__all__ = ["EstimateCalibration", "Mediation", "Sweep", "explain_sweep", "mediation", "sweep"]


@translate_memory_errors("sweep")
@enable_gradients()
def sweep(
    clean: object,
    corrupt: object,
    *,
    at: str | Sequence[str] | Mapping[str, Sequence[str]] = "x",
    metric: object,
    over: str | Sequence[str] | None = None,
    direction: Literal["denoise", "noise"] = "denoise",
    words: object = None,
    first_order: bool = False,
    steps: int = 0,
    convention: Literal["eap-ig", "eap-ig-activations"] | None = None,
    check: int = 0,
    seed: int = 0,
    memory: int = DEFAULT_MEMORY,
    progress: bool | None = None,
) -> Sweep:
    """Patch values of one run into another, one cell at a time, and measure the metric (activation patching).

    A *cell* is a group of nodes that are patched together. Cells are computed in batches whose size depends on
    `memory`. `bt.explain("sweep", ...)` reports the cells that run one at a time.

    Args:
        clean: The sentence, or the list of sentences (the examples), whose values are patched into the corrupt run.
            For an ablation of the corrupt sentences `Zero()`, `Mean(...)` or `Noise(...)`.
        corrupt: The corrupt sentence or sentences: as many as the clean ones, each with as many words as its clean one.
            With `direction="noise"` also an ablation of the clean sentences. The pairs of a list may differ in length
            if cells and metric refer to no single word, as with `over=("slice", "head")`.
        at: The nodes that cells set: a role (`"x"`, `"q"`; `"j"` for rows of attention), an arrow or a path of roles
            (`"v -> a"`), `"arrows"` for all arrows of roles, `"edges"` for all edges of `net.edges()` or the name of
            one (`"a_0_1 -> q_2_3"`), a list of all these and of names, patterns, paths of names
            and arrows of patterns (`"v_0_1_* -> a_0_1_*"`; without words only if no edge matches), or a mapping from
            the name of a cell to the names and patterns of all its nodes. In a list each role or arrow of roles is
            expanded into its cells; `result.part("v -> a")` returns those of one item.
        metric: A mapping from a discrete node to a state, whose log probability is the metric, or to two states, for
            the difference of their log probabilities. A list of states has one for each example. The node `"y_-1"` is
            that of the last word; of a role, `"y"`, the metric is the mean over its nodes. Or a function whose
            parameters are names of nodes, which are `[example, *shape]`, or of roles, which are `[example, slice,
            *plates, word, *shape]` (without `slice` for a role of one group, such as `x_2`). A parameter `examples`
            receives the indices of the examples, `[example]`, for data such as `labels[examples]`; functions of
            sentences of unequal lengths, which are called for each length, must have it.
        over: The axes along which cells are separate, such as `("slice", "word")`; by default all. Nodes that differ
            along other axes only belong to one cell. Without the axis `"group"` of groups of heads, the axis `"head"`
            numbers the heads over all groups. In a list it applies to the items with these axes.
        direction: `"denoise"`: the clean values are patched into the corrupt run, and effects are changes from the
            corrupt run. `"noise"`: the corrupt values are patched into the clean run, and effects are changes from it.
        words: The word of the other sentence from which each word takes its values, as a mapping or as pairs, such as
            `{3: 5, 4: 6}`, with words of the sentence that is patched as keys. Words that are not in it are not
            patched. The sentences may then differ in length, or be equal. For several stacks, a map for each stack.
        first_order: Whether to estimate the effects from the gradient of the metric at the run that is patched, with
            one backward pass and without running a cell (attribution patching; with `direction="noise"` as in EAP).
        steps: The number of runs over which the gradient of `first_order` is averaged (integrated gradients), by the
            midpoint rule between the patched and the other run; 0 for the gradient at the patched run. The inputs, or
            the embeddings of tokens, are interpolated.
        convention: For `at="edges"` with `direction="noise"` and `steps`, the points at which the package EAP-IG
            (Hanna, Pezzelle and Belinkov 2024) averages gradients: `"eap-ig"`, a left Riemann sum over interpolated
            inputs, or `"eap-ig-activations"`, one group of writers after the other.
        check: The number of cells that are also run, to check the estimates of `first_order`: half of them those with
            the largest estimates, the others drawn at random.
        seed: The seed of this draw.
        memory: The approximate number of bytes that are used at once.
        progress: Whether to show a progress bar; by default only in a terminal.

    Returns:
        The result; `result.outcomes` is the metric with each cell patched, `[*axes, example]`, and `result.clean` and
        `result.corrupt` are the metric of the unpatched runs; `result.notes` states if no cell changes the metric.

    Raises:
        BNetError: The sentences do not match or do not differ, a cell has no values, the metric returns no number, or
            with `first_order` its gradient is zero up to rounding, as that of a divergence from the patched run.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "a", "cat", "dog", "sat"])
    >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    >>> found = bt.sweep(clean, corrupt, at="x", metric={"y_2": ("cat", "dog")})
    >>> found.axes, found.values.shape, found.values[0, 0].item()
    (('slice', 'word'), torch.Size([3, 3]), 0.0)
    """
    check_choice("progress", progress, (True, False, None))
    options: dict[str, Any] = {"first_order": first_order, "steps": steps, "convention": convention}
    options |= {"check": check, "seed": seed}
    parts = parse_requests(
        clean, corrupt, at=at, metric=metric, over=over, direction=direction, words=words, memory=memory, **options
    )
    result = _compute(parts, progress)
    effects = result.values - result.base
    request = parts[0].request
    notes = _explain_zeros(request, result)
    clean_run, corrupt_run = (result.base, result.source) if request.options.is_noise else (result.source, result.base)
    calibration = _calibrate(parts, effects, progress) if check else None
    return Sweep(
        **request.cells.to_result_fields(),
        clean=clean_run,
        corrupt=corrupt_run,
        outcomes=result.values,
        direction=direction,
        metric=describe_metric(metric),
        digests=_digest_sentences(parts),
        first_order=first_order,
        steps=steps,
        calibration=calibration,
        notes=notes,
    )


def _explain_zeros(request: SweepRequest, result: CellOutcomes) -> tuple[str, ...]:
    """The notes on effects and gradients of zero; an error if they contradict the difference of the two runs."""
    options, stationary = request.options, int(result.is_stationary.sum())
    has_difference = result.source is None or not torch.equal(result.source, result.base)
    if stationary == len(result.base) and has_difference:
        runs = "every interpolated run" if options.steps else f"the {options.side_names[1]} run"
        expected = f"a metric whose gradient is not zero at {runs}, for first_order=True"
        actual = "a gradient of zero, as of a divergence at its minimum or of a metric that is piecewise constant"
        has_more_steps = options.steps < ADVISED_STEPS and request.source is not None
        advice = f"steps={ADVISED_STEPS}, " if has_more_steps else ""
        hint = f"Use {advice}the log probability of a state as the metric, or first_order=False"
        raise BNetError("metric", expected=expected, actual=actual, hint=hint)
    notes = []
    if stationary:
        notes.append(f"the gradient of the metric is zero in {stationary} of {len(result.base)} examples")
    # Sums are accumulated in float32 or better, so that a run repeats its metric to a few steps of that type. A larger
    # bound, or an absolute one, would hide effects on a small metric or in half precision.
    precision = torch.finfo(torch.promote_types(request.base.model.network.dtype, torch.float32))
    is_unchanged = torch.isclose(result.values, result.base, rtol=ROUNDING_STEPS * precision.eps, atol=0)
    if bool((is_unchanged | result.values.isnan()).all()):  # NaN: no cell
        order = ", to first order" if options.first_order else ""
        notes.append(f"no cell changes the metric by more than its rounding error{order}")
    return tuple(notes)


def _digest_sentences(parts: Sequence[LengthPart]) -> tuple[str, ...]:
    """The digests of the pairs, clean first, or of the patched sentences if an ablation provides the values."""
    digests: dict[int, str] = {}
    for part in parts:
        request = part.request
        is_base = request.options.is_noise or request.source is None
        clean, corrupt = (request.base, request.source) if is_base else (request.source, request.base)
        assert clean is not None
        digests |= dict(zip(part.examples, clean.digest_pairs(corrupt), strict=True))
    return tuple(digests[k] for k in sorted(digests))


def _compute(parts: Sequence[LengthPart], progress: bool | None) -> CellOutcomes:
    """The outcomes of the cells, and of the source and the base run, in the order of all examples."""
    results = []
    for part in parts:
        request = part.request
        batches = request.build_batches()
        if batches[0].obstacles:
            route_cells(batches, request.cells).warn_if_slow()
        compute = estimate_cells if request.options.first_order else run_cells
        results.append(compute(batches, request.metric, request.cells, progress))
    sources = [result.source for result in results if result.source is not None]
    return CellOutcomes(
        join_examples(parts, [result.values for result in results]),
        join_examples(parts, sources) if len(sources) == len(parts) else None,
        join_examples(parts, [result.base for result in results]),
        join_examples(parts, [result.is_stationary for result in results]),
    )


def _calibrate(parts: Sequence[LengthPart], effects: Tensor, progress: bool | None) -> EstimateCalibration:
    """Run some cells, and compare with the estimated effects, `[*axes, example]`."""
    flat = effects.flatten(0, -2)
    chosen = [replace(part, request=part.request.choose_cells(flat)) for part in parts]
    result = _compute(chosen, progress)
    cells = chosen[0].request.cells
    cell_ids = torch.from_numpy(cells.cell_ids)
    estimates, exact = (table.flatten(0, -2)[cell_ids] for table in (effects, result.values - result.base))
    return EstimateCalibration(tuple(cells.names[int(cell)] for cell in cell_ids), estimates, exact)


@translate_memory_errors("explain_sweep")
def explain_sweep(
    clean: object,
    corrupt: object,
    *,
    at: str | Sequence[str] | Mapping[str, Sequence[str]] = "x",
    metric: object,
    over: str | Sequence[str] | None = None,
    direction: Literal["denoise", "noise"] = "denoise",
    words: object = None,
    first_order: bool = False,
    steps: int = 0,
    convention: Literal["eap-ig", "eap-ig-activations"] | None = None,
    check: int = 0,
    seed: int = 0,
    memory: int = DEFAULT_MEMORY,
    progress: bool | None = None,
) -> Route:
    """Explain how `sweep` would compute its cells, and why; nothing is computed.

    Args:
        clean: The clean sentences, or an ablation, as for `sweep`.
        corrupt: The corrupt sentences.
        at: The nodes that cells set.
        metric: The metric.
        over: The axes along which cells are separate.
        direction: Whether clean values are patched into the corrupt run, or the reverse.
        words: The word of the other sentence from which each word takes its values.
        first_order: Whether the effects are estimated from gradients.
        steps: The number of runs over which gradients are averaged.
        convention: The points at which gradients are averaged, as for `sweep`.
        check: Has no effect.
        seed: Has no effect.
        memory: The approximate number of bytes that are used at once.
        progress: Has no effect.

    Returns:
        The algorithm, the reason and the cost; of sentences of unequal lengths, those of the longest ones. If only some
        cells share a run, `parts` contains a route for each kind of cell, with the node that is the reason.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions.sweeps import explain_sweep
    >>> net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "a", "cat", "dog", "sat"])
    >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    >>> route = explain_sweep(clean, corrupt, at="x", metric={"y_2": ("cat", "dog")})
    >>> route.question, route.algorithm, route.node
    ('sweep of 9 cells', 'compiled', None)
    """
    options: dict[str, Any] = {"first_order": first_order, "steps": steps, "convention": convention}
    options |= {"check": check, "seed": seed}
    parts = parse_requests(
        clean, corrupt, at=at, metric=metric, over=over, direction=direction, words=words, memory=memory, **options
    )
    request = max(parts, key=lambda part: len(part.request.base.model.ground)).request
    return route_cells(request.build_batches(), request.cells, count_flops=True)


@translate_memory_errors("mediation")
def mediation(
    clean: object,
    corrupt: object,
    *,
    through: str | Sequence[str] | Mapping[str, Sequence[str]] = "x",
    metric: object,
    over: str | Sequence[str] | None = None,
    memory: int = DEFAULT_MEMORY,
    progress: bool | None = None,
) -> Mediation:
    """Compute the natural indirect effect through each cell, and the natural direct effect (Pearl 2001).

    The indirect effect is that of the clean values of the cell in the corrupt run. The direct effect, which bypasses
    the cell, is that of the clean run with the corrupt values of the cell. Both are differences from the corrupt run.

    Args:
        clean: The clean sentence, or a list of sentences; `corrupt.do(...)` for a treatment of some nodes.
        corrupt: The corrupt sentence or sentences: as many as the clean ones, with the same numbers of words.
        through: The nodes of the cells: a role, an arrow or a path of roles, or a list, as `at=` of `sweep`.
        metric: A mapping from a discrete node to one or two states, or a function of nodes, as for `sweep`.
        over: The axes along which cells are separate, such as `("slice", "word")`; by default all.
        memory: The approximate number of bytes that are used at once.
        progress: Whether to show a progress bar; by default only in a terminal.

    Returns:
        The result: for each cell the direct and the indirect effect, `[*axes]`, and the total effect; `result.notes`
        states if no cell changes the metric.

    Raises:
        BNetError: The sentences do not match, a cell has no values, the metric returns no number, or `clean` is an
            ablation.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "a", "cat", "dog", "sat"])
    >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    >>> found = bt.mediation(clean, corrupt, through="x", metric={"y_2": ("cat", "dog")})
    >>> found.axes, found.indirect.shape, found.direct.shape
    (('slice', 'word'), torch.Size([3, 3]), torch.Size([3, 3]))
    """
    check_choice("progress", progress, (True, False, None))
    if isinstance(clean, ABLATIONS):
        raise BNetError("clean", expected="sentences, for a mediation", actual=clean)
    indirect = sweep(clean, corrupt, at=through, metric=metric, over=over, memory=memory, progress=progress)
    direct = sweep(
        clean, corrupt, at=through, metric=metric, over=over, direction="noise", memory=memory, progress=progress
    )
    shared = {item.name: getattr(indirect, item.name) for item in fields(CellResult)}
    shared["notes"] = tuple(note for note in indirect.notes if note in direct.notes)
    return Mediation(**shared, indirect_outcomes=indirect.outcomes, direct_outcomes=direct.outcomes)

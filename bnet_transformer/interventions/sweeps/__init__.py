"""Sweeps: patch many groups of nodes, attention rows, arrows or paths in one batch, and measure the effect on a metric.

The pipeline, in the order in which data flows: `examples` validates the sentences and the metric, and enumerates the
latent choices over which outcomes are averaged; `cell_spec` parses `at` and `over` into cells; `routing` decides which
cells share one run; `engine` computes these by `patched_run`, which updates only the values that change
(`sparse_update`), computes the other cells one at a time by `sequential`, or estimates all effects to first order;
`ablation` computes the values of ablations; `results` contains the effects.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from bnet_transformer._core.arrays import IntArray
from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer._core.memory import translate_memory_errors
from bnet_transformer._core.torch_context import enable_gradients
from bnet_transformer.cost import cost
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.intervention_values import Mean, Noise, Zero
from bnet_transformer.inference.routing import Route, format_fault
from bnet_transformer.interventions.sweeps.ablation import Ablation
from bnet_transformer.interventions.sweeps.cell_spec import PatchCells, parse_cells
from bnet_transformer.interventions.sweeps.engine import ExampleBatch, estimate_cells, run_cells
from bnet_transformer.interventions.sweeps.examples import (
    DEFAULT_MEMORY,
    Metric,
    parse_example_pair,
    parse_examples,
    parse_metric,
)
from bnet_transformer.interventions.sweeps.results import CellResult, Mediation, Sweep
from bnet_transformer.interventions.sweeps.routing import iter_patched_words
from bnet_transformer.interventions.sweeps.sparse_update import (
    estimate_bytes,
    find_changed_positions,
    find_needed_positions,
    is_wordwise,
)

__all__ = ["Mediation", "Sweep", "explain_sweep", "mediation", "sweep"]

ABLATIONS = Zero | Mean | Noise


@translate_memory_errors("sweep")
@enable_gradients()
def sweep(
    clean: object,
    corrupt: object,
    *,
    at: str | Sequence[str] | Mapping[str, Sequence[str]] = "x",
    metric: object,
    over: str | Sequence[str] | None = None,
    first_order: bool = False,
    memory: int = DEFAULT_MEMORY,
    progress: bool | None = None,
) -> Sweep:
    """Patch clean values into the corrupt run, one cell at a time, and measure the metric (activation patching).

    A *cell* is a group of nodes that are patched together. Cells are computed in batches whose size depends on
    `memory`. `bt.explain("sweep", ...)` reports the cells that run one at a time.

    Args:
        clean: The sentence, or the list of sentences (the examples), whose values are patched into the corrupt run.
            For an ablation `Zero()`, `Mean(...)` or `Noise(...)`.
        corrupt: The corrupt sentence or sentences: as many as the clean ones, with the same numbers of words.
        at: The nodes that cells set: a role (`"x"`, `"q"`; `"j"` for rows of attention), an arrow or a path of roles
            (`"v -> a"`), a list of names, patterns and paths, or a mapping from the name of a cell to the names and
            patterns of all its nodes, such as all heads outside a circuit.
        metric: A mapping from a discrete node to a state, whose log probability is the metric, or to two states, for
            the difference of their log probabilities. Or a function whose parameters are names of nodes; it receives
            their values, `[example, *shape]` each.
        over: The axes along which cells are separate, such as `("slice", "word")`; by default all. Nodes that differ
            along other axes only belong to one cell.
        first_order: Whether to estimate the effects from the gradient of the metric at the corrupt run, with one
            backward pass and without running a cell (attribution patching).
        memory: The approximate number of bytes that are used at once.
        progress: Whether to show a progress bar; by default only in a terminal.

    Returns:
        The result; `result.outcomes` is the metric with each cell patched, `[*axes, example]`, and `result.clean` and
        `result.corrupt` are the metric of the unpatched runs.

    Raises:
        BNetError: The sentences do not match, a cell has no values, or the metric returns no number.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "a", "cat", "dog", "sat"])
    >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    >>> found = bt.sweep(clean, corrupt, at="x", metric={"y_2": ("cat", "dog")})
    >>> found.axes, found.values.shape, found.values[0, 0].item()
    (('slice', 'word'), torch.Size([3, 3]), 0.0)
    """
    check_choice("progress", progress, (True, False, None))
    batches, parsed_metric, cells = _prepare(clean, corrupt, at, metric, over, memory, first_order=first_order)
    if batches[0].obstacles:
        _route(batches, cells).warn_if_slow()
    if first_order:
        outcomes, clean_base, corrupt_base = estimate_cells(batches, parsed_metric, cells, progress)
    else:
        outcomes, clean_base, corrupt_base = run_cells(batches, parsed_metric, cells, progress)
    return Sweep(
        **cells.to_result_fields(), outcomes=outcomes, clean=clean_base, corrupt=corrupt_base, first_order=first_order
    )


@translate_memory_errors("explain_sweep")
def explain_sweep(
    clean: object,
    corrupt: object,
    *,
    at: str | Sequence[str] | Mapping[str, Sequence[str]] = "x",
    metric: object,
    over: str | Sequence[str] | None = None,
    first_order: bool = False,
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
        first_order: Whether the effects are estimated from gradients.
        memory: The approximate number of bytes that are used at once.
        progress: Has no effect.

    Returns:
        The algorithm, the reason and the cost. If only some cells share a run, `parts` contains a route for each kind
        of cell, with the node that is the reason.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions.sweeps import explain_sweep
    >>> net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "a", "cat", "dog", "sat"])
    >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    >>> route = explain_sweep(clean, corrupt, at="x", metric={"y_2": ("cat", "dog")})
    >>> route.question, route.algorithm, route.node
    ('sweep of 9 cells', 'compiled', None)
    """
    batches, _, cells = _prepare(clean, corrupt, at, metric, over, memory, first_order=first_order)
    return _route(batches, cells, count_flops=True)


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
        through: The nodes of the cells: a role, an arrow or a path of roles, or a list of names, patterns and paths.
        metric: A mapping from a discrete node to one or two states, or a function of nodes, as for `sweep`.
        over: The axes along which cells are separate, such as `("slice", "word")`; by default all.
        memory: The approximate number of bytes that are used at once.
        progress: Whether to show a progress bar; by default only in a terminal.

    Returns:
        The result: for each cell the direct and the indirect effect, `[*axes]`, and the total effect.

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
    direct = sweep(corrupt, clean, at=through, metric=metric, over=over, memory=memory, progress=progress)
    shared = {item.name: getattr(indirect, item.name) for item in fields(CellResult)}
    return Mediation(**shared, indirect_outcomes=indirect.outcomes, direct_outcomes=direct.outcomes)


def _route(batches: Sequence[ExampleBatch], cells: PatchCells, *, count_flops: bool = False) -> Route:
    """The route of the cells, which is the same in all batches.

    If some cells run one at a time, `parts` contains a route for the cells that share a run, and one for each obstacle.
    """
    first, cell_ids = batches[0], cells.cell_ids
    shared_ids = cell_ids[~np.isin(cell_ids, list(first.obstacles))]
    states = len(first.choices.states)
    num_runs = sum(len(batch.corrupt) for batch in batches) * states
    parts: list[Route] = []
    if len(shared_ids):
        flops = _count_flops(first, cells, shared_ids, num_runs) if count_flops and not first.first_order else None
        reason = "all cells share one run, and only the values that a cell changes are computed again"
        reason = "the gradient of one run estimates the effect of every cell" if first.first_order else reason
        question = _format_question(len(shared_ids))
        parts.append(Route(question, "compiled", reason, states=states, flops=flops, is_exact=not first.first_order))
    shapes = first.corrupt.model.ground.shapes
    needed = first.needed.ancestor_words
    num_nodes = sum(int(words.sum()) * math.prod(shapes[i]) // len(words) for i, words in needed.items())
    for obstacle, count in Counter(first.obstacles.values()).items():
        reason = f"each cell has a separate run; {format_fault('a shared run', obstacle)}"
        evaluations = count * num_runs * num_nodes
        parts.append(
            Route(_format_question(count), "sequential", reason, obstacle.node, states, evaluations=evaluations)
        )
    if len(parts) == 1:
        return parts[0]
    reason = "some cells require separate runs, for the reasons below"
    evaluations = sum(part.evaluations for part in parts)
    node, flops, exact = parts[-1].node, parts[0].flops, not first.first_order
    return Route(
        _format_question(len(cell_ids)), "sequential", reason, node, states, flops, evaluations, exact, tuple(parts)
    )


def _format_question(num_cells: int) -> str:
    """The question of a route, with the number of cells."""
    return f"sweep of {num_cells:,} cell{'s' if num_cells != 1 else ''}"


def _count_flops(batch: ExampleBatch, cells: PatchCells, cell_ids: IntArray, num_runs: int) -> int | None:
    """FLOPs of the matrix products of the runs and of the changes of cells; None if a TPM does not define them."""
    model, needed = batch.corrupt.model, batch.needed
    network, ground = model.network, model.ground
    requested = sorted({ground.group_of(node).name for node in needed.outcome_nodes})
    if batch.corrupt.module.find_requirements(requested, ()).fault is not None:
        return None
    flops, slices = Counter[str](), Counter[str]()
    for row in cost(network, dict(ground.word_counts) or None, want=requested).rows:
        if row.flops is None:
            return None
        flops[row.template] += row.flops
        slices[row.template] += row.slices
    fractions = dict.fromkeys(needed.ancestor_words, 2.0)  # how many times a group is computed; 2 for the base runs
    for chunk, set_words in iter_patched_words(model, needed, cells):
        inside = np.isin(chunk, cell_ids)
        for index, (_, changed) in find_changed_positions(model, needed, set_words, len(chunk)).items():
            table = changed[inside]
            if not is_wordwise(network, network.specs[index]):  # then all words of a cell are computed
                table = np.any(table, axis=-1, keepdims=True)
            fractions[index] += float(table.mean(-1).sum())
    stems = {index: network.graph.groups[index].stem for index in fractions}
    return round(num_runs * sum(n * flops[stems[i]] / (slices[stems[i]] or 1) for i, n in fractions.items()))


def _prepare(
    clean: object, corrupt: object, at: Any, metric: object, over: object, memory: int, *, first_order: bool
) -> tuple[list[ExampleBatch], Metric, PatchCells]:
    """Validate the arguments of a sweep, and divide the examples into batches that fit in memory."""
    check_choice("first_order", first_order, (True, False))
    memory = check_int("memory", memory)
    sources, targets = (
        (None, parse_examples("corrupt", corrupt))
        if isinstance(clean, ABLATIONS)
        else parse_example_pair(clean, corrupt)
    )
    cells = parse_cells(targets, at, over)
    parsed_metric = parse_metric(targets, metric)
    if cells.paths and first_order:
        expected, hint = (
            "nodes or rows of attention, for first_order=True",
            "Use first_order=False for arrows and paths",
        )
        raise BNetError("at", expected=expected, actual=at, hint=hint)
    ablation = None
    if isinstance(clean, ABLATIONS):
        if cells.paths or any(sites.is_attention for sites in cells.sites):
            hint = 'Pass a role such as "a", or names of nodes'
            raise BNetError("at", expected="nodes, for an ablation", actual=at, hint=hint)
        sentences = list(corrupt) if isinstance(corrupt, list | tuple) else [corrupt]
        ablation = Ablation(clean, sentences, cells.get_patched_nodes(targets.model), memory)
    size, nodes = 1, parsed_metric.nodes  # the maximum number of examples whose runs fit in half of the memory
    if len(targets) > 1:
        size = max(1, memory // (2 * estimate_bytes(targets.model, find_needed_positions(targets.model, nodes))[1]))
    fits = size >= len(targets)
    cleans = itertools.repeat(None) if sources is None else sources.split(size)
    batches = [
        ExampleBatch(source, target, cells, nodes, memory, ablation, k * size, fits, first_order)
        for k, (source, target) in enumerate(zip(cleans, targets.split(size), strict=False))
    ]
    return batches, parsed_metric, cells

"""Sweeps: many interventions as one batch, for their effect on a metric; along nodes, attention rows, arrows and paths.

In the order in which data flows: `examples` holds the sentences, the open choices that outcomes are averaged over and
the metric, `cell_spec` turns `at` and `over` into cells, `sparse_update` says which nodes are computed again, `routing`
which cells are computed together; `engine` runs these by `patched_run` (on the changed values alone, `sparse_update`)
and the others one at a time by `sequential`, or estimates all effects to first order. `ablation` makes the values of
ablations.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer._core.memory import translate_memory_errors
from bnet_transformer._core.torch_context import enable_gradients
from bnet_transformer.cost import cost
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.intervention_values import Mean, Noise, Zero
from bnet_transformer.inference.routing import Route
from bnet_transformer.interventions.sweeps.ablation import Ablation
from bnet_transformer.interventions.sweeps.cell_spec import IntArray, PatchCells, parse_cells
from bnet_transformer.interventions.sweeps.engine import SweepBatch, estimate_cells, run_cells
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
    at: str | Sequence[str] = "x",
    metric: object,
    over: str | Sequence[str] | None = None,
    first_order: bool = False,
    memory: int = DEFAULT_MEMORY,
    progress: bool | None = None,
) -> Sweep:
    """What the metric comes to when clean values are put into the corrupt run: every cell of `at`, in one batch.

    Args:
        clean: A sentence, or a list of them (the examples), whose values are put into the corrupt run; `Zero()`,
            `Mean(...)` or `Noise(...)` for an ablation.
        corrupt: As many sentences of the same length.
        at: What a cell sets: a role (`"x"`, `"q"`; `"j"` for rows of attention), an arrow or a path of roles
            (`"v -> a"`), or a list of names, patterns and paths.
        metric: A discrete node with its state (or two, for the difference of their log probabilities), or a function
            of nodes, which are its parameters, `[example, *shape]` each.
        over: The axes along which cells stay apart; all by default.
        first_order: Run no cell: estimate the effects from the slopes of the metric at the corrupt run, all in one
            pass back (attribution patching).
        memory: About how many bytes are used at once.
        progress: Show a bar: in a terminal (None), always or never.

    Returns:
        The metric with each cell set, `[*axes, example]`, and in both base runs.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "a", "cat", "dog", "sat"])
    >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    >>> found = bt.sweep(clean, corrupt, at="x", metric={"y_2": ("cat", "dog")})
    >>> found.axes, found.values.shape, found.values[0, 0].item()
    (('slice', 'word'), torch.Size([3, 3]), 0.0)
    """
    check_choice("progress", progress, (True, False, None))
    batches, asked, cells = _prepare(clean, corrupt, at, metric, over, memory, first_order=first_order)
    if batches[0].obstacles:
        _route(batches, cells).warn_if_slow()
    if first_order:
        outcomes, best, worst = estimate_cells(batches, asked, cells, progress)
    else:
        outcomes, best, worst = run_cells(batches, asked, cells, progress)
    return Sweep(**cells.to_result_fields(), outcomes=outcomes, clean=best, corrupt=worst, first_order=first_order)


@translate_memory_errors("explain_sweep")
def explain_sweep(
    clean: object,
    corrupt: object,
    *,
    at: str | Sequence[str] = "x",
    metric: object,
    over: str | Sequence[str] | None = None,
    first_order: bool = False,
    memory: int = DEFAULT_MEMORY,
    progress: bool | None = None,
) -> Route:
    """Say how `sweep` would compute its cells, and why, without computing them.

    Args:
        clean: As for `sweep`, and so all others.
        corrupt: Corrupt sentences.
        at: What a cell sets.
        metric: The metric.
        over: The axes along which cells stay apart.
        first_order: Estimate the effects from slopes.
        memory: About how many bytes are used at once.
        progress: Has no effect here.

    Returns:
        The algorithm, the reason and the cost. Where some cells run alone and others do not, `parts` has a route for
        each kind, with the node that is the reason.

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
    through: str | Sequence[str] = "x",
    metric: object,
    over: str | Sequence[str] | None = None,
    memory: int = DEFAULT_MEMORY,
    progress: bool | None = None,
) -> Mediation:
    """The natural indirect effect through each cell, and the natural direct effect past it (Pearl 2001).

    Indirect: the corrupt run with the cell as in the clean one. Direct: the clean run with the cell as in the corrupt
    one. Both effects are differences from the corrupt run.

    Args:
        clean: A sentence, or a list of them; `corrupt.do(...)` for a treatment of some nodes.
        corrupt: As many sentences of the same length.
        through: What a cell sets, as `at` of `sweep`.
        metric: As for `sweep`.
        over: The axes along which cells stay apart; all by default.
        memory: About how many bytes are used at once.
        progress: Show a bar: in a terminal (None), always or never.

    Returns:
        The metric with each cell set, in both directions, and in both base runs.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "a", "cat", "dog", "sat"])
    >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    >>> found = bt.mediation(clean, corrupt, through="x", metric={"y_2": ("cat", "dog")})
    >>> found.axes, found.indirect.shape, found.direct.shape
    (('slice', 'word'), torch.Size([3, 3]), torch.Size([3, 3]))
    """
    check_choice("progress", progress, (True, False, None))
    if isinstance(clean, ABLATIONS):
        raise BNetError("clean", expected="sentences", actual=clean)
    there = sweep(clean, corrupt, at=through, metric=metric, over=over, memory=memory, progress=progress)
    back = sweep(corrupt, clean, at=through, metric=metric, over=over, memory=memory, progress=progress)
    shared = {each.name: getattr(there, each.name) for each in fields(CellResult)}
    return Mediation(**shared, indirect_outcomes=there.outcomes, direct_outcomes=back.outcomes)


def _route(batches: Sequence[SweepBatch], cells: PatchCells, *, count_flops: bool = False) -> Route:
    """How the cells are computed, which is the same in all batches.

    Where some run alone, `parts` has a route for those that do not, and one for each obstacle.
    """
    first, there = batches[0], cells.cell_ids
    together = there[~np.isin(there, list(first.obstacles))]
    states = len(first.choices.states)
    runs = sum(len(batch.corrupt) for batch in batches) * states
    parts: list[Route] = []
    if len(together):
        flops = _count_flops(first, cells, together, runs) if count_flops and not first.first_order else None
        reason = "all cells share one run, and only what a cell changes is computed again"
        reason = "the slopes of one run estimate the effect of every cell" if first.first_order else reason
        question = _format_question(len(together))
        parts.append(Route(question, "compiled", reason, states=states, flops=flops, is_exact=not first.first_order))
    shapes = first.corrupt.model.ground.shapes
    nodes = sum(
        int(table.sum()) * math.prod(shapes[i]) // len(table) for i, table in first.needed.ancestor_words.items()
    )
    for obstacle, count in Counter(first.obstacles.values()).items():
        reason, evaluations = str(obstacle), count * runs * nodes
        parts.append(
            Route(_format_question(count), "sequential", reason, obstacle.subject, states, evaluations=evaluations)
        )
    if len(parts) == 1:
        return parts[0]
    reason, evaluations = "cells meet different obstacles", sum(part.evaluations for part in parts)
    node, flops, exact = parts[-1].node, parts[0].flops, not first.first_order
    return Route(
        _format_question(len(there)), "sequential", reason, node, states, flops, evaluations, exact, tuple(parts)
    )


def _format_question(num_cells: int) -> str:
    return f"sweep of {num_cells:,} cell{'s' if num_cells != 1 else ''}"


def _count_flops(batch: SweepBatch, cells: PatchCells, cell_ids: IntArray, num_runs: int) -> int | None:
    """FLOPs of the products of the runs, and of what cells change; None where a TPM does not say its products."""
    world, needed = batch.corrupt.model, batch.needed
    network, ground = world.network, world.ground
    want = sorted({ground.group_of(node).name for node in needed.outcome_nodes})
    if batch.corrupt.module.find_requirements(want, ()).fault is not None:
        return None
    flops, slices = Counter[str](), Counter[str]()
    for row in cost(network, dict(ground.word_counts) or None, want=want).rows:
        if row.flops is None:
            return None
        flops[row.template] += row.flops
        slices[row.template] += row.slices
    share = dict.fromkeys(needed.ancestor_words, 2.0)  # of a run that a family takes: the corrupt and the clean one
    for chunk, set_words in iter_patched_words(world, needed, cells):
        inside = np.isin(chunk, cell_ids)
        for index, (_, both) in find_changed_positions(world, needed, set_words, len(chunk)).items():
            table = both[inside]
            if not is_wordwise(network, network.specs[index]):  # all words of a cell are computed
                table = np.any(table, axis=-1, keepdims=True)
            share[index] += float(table.mean(-1).sum())
    stems = {index: network.graph.groups[index].stem for index in share}
    return round(num_runs * sum(part * flops[stems[i]] / (slices[stems[i]] or 1) for i, part in share.items()))


def _prepare(
    clean: object, corrupt: object, at: Any, metric: object, over: object, memory: int, *, first_order: bool
) -> tuple[list[SweepBatch], Metric, PatchCells]:
    """Check the arguments of a sweep, and divide the examples into batches that fit in memory."""
    check_choice("first_order", first_order, (True, False))
    memory = check_int("memory", memory)
    theirs, ours = (
        (None, parse_examples("corrupt", corrupt))
        if isinstance(clean, ABLATIONS)
        else parse_example_pair(clean, corrupt)
    )
    cells = parse_cells(ours, at, over)
    asked = parse_metric(ours, metric)
    if cells.paths and first_order:
        wanted, allowed = "nodes or rows of attention, for first_order=True", "first_order=False"
        raise BNetError("at", expected=wanted, actual=at, allowed=allowed)
    ablation = None
    if isinstance(clean, ABLATIONS):
        if cells.paths or any(each.is_attention for each in cells.sites):
            raise BNetError("at", expected="nodes, for an ablation", actual=at, allowed='a role such as "a", or names')
        sentences = list(corrupt) if isinstance(corrupt, list | tuple) else [corrupt]
        ablation = Ablation(clean, sentences, cells.get_patched_nodes(ours.model), memory)
    size = 1  # so many examples at a time that their runs fit in half of the memory
    if len(ours) > 1:
        size = max(1, memory // (2 * estimate_bytes(ours.model, find_needed_positions(ours.model, asked.nodes))[1]))
    keep = size >= len(ours)
    cleans = itertools.repeat(None) if theirs is None else theirs.split(size)
    batches = [
        SweepBatch(one, other, cells, asked.nodes, memory, ablation, k * size, keep, first_order)
        for k, (one, other) in enumerate(zip(cleans, ours.split(size), strict=False))
    ]
    return batches, asked, cells

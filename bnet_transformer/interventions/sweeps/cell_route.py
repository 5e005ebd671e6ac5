"""The route of a sweep: which cells share a run, which run one at a time and why, and what they cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bnet_transformer._core.arrays import IntArray
from bnet_transformer.cost import cost
from bnet_transformer.inference.routing import Route, format_fault
from bnet_transformer.interventions.sweeps.cell_spec import PatchCells
from bnet_transformer.interventions.sweeps.engine import ExampleBatch
from bnet_transformer.interventions.sweeps.routing import iter_patched_words
from bnet_transformer.interventions.sweeps.sparse_update import find_changed_positions, is_wordwise


def route_cells(batches: Sequence[ExampleBatch], cells: PatchCells, *, count_flops: bool = False) -> Route:
    """The route of the cells, which is the same in all batches.

    If some cells run one at a time, `parts` contains a route for the cells that share a run, and one for each obstacle.
    """
    first, cell_ids = batches[0], cells.cell_ids
    shared_ids = cell_ids[~np.isin(cell_ids, list(first.obstacles))]
    states = len(first.choices.states)
    num_runs = sum(len(batch.base) for batch in batches) * states
    parts: list[Route] = []
    if len(shared_ids):
        flops = (
            _count_flops(first, cells, shared_ids, num_runs) if count_flops and not first.options.first_order else None
        )
        reason = "all cells share one run, and only the values that a cell changes are computed again"
        if first.options.first_order:
            steps = first.options.steps
            runs = f"{steps} interpolated runs" if steps else f"the {first.options.side_names[1]} run"
            reason = f"the gradient at {runs} estimates the effect of every cell"
        question = _format_question(len(shared_ids))
        parts.append(
            Route(question, "compiled", reason, states=states, flops=flops, is_exact=not first.options.first_order)
        )
    shapes = first.base.model.ground.shapes
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
    node, flops, exact = parts[-1].node, parts[0].flops, not first.options.first_order
    return Route(
        _format_question(len(cell_ids)), "sequential", reason, node, states, flops, evaluations, exact, tuple(parts)
    )


def _format_question(num_cells: int) -> str:
    """The question of a route, with the number of cells."""
    return f"sweep of {num_cells:,} cell{'s' if num_cells != 1 else ''}"


def _count_flops(batch: ExampleBatch, cells: PatchCells, cell_ids: IntArray, num_runs: int) -> int | None:
    """FLOPs of the matrix products of the runs and of the changes of cells; None if a TPM does not define them."""
    model, needed = batch.base.model, batch.needed
    network, ground = model.network, model.ground
    requested = sorted({ground.group_of(node).name for node in needed.outcome_nodes})
    if batch.base.module.find_requirements(requested, ()).fault is not None:
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

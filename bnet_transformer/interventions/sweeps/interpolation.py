"""Runs between the base run and the source run, for integrated gradients (Sundararajan, Taly and Yan 2017).

The inputs are interpolated, not the nodes that cells set: the node groups with real values at which the difference
between the runs begins. These are inputs and nodes set by `do` with real values. Where an input is an index, such as a
token, they are the first nodes with real values below it, such as the embedding of the token. All other nodes are
computed from the interpolated ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import BoolArray
from bnet_transformer.compiler.execution_state import ExecutionState
from bnet_transformer.interventions.sweeps.alignment import WordAlignment
from bnet_transformer.interventions.sweeps.cell_spec import PatchSites, is_index_valued
from bnet_transformer.interventions.sweeps.examples import Examples, Overrides
from bnet_transformer.interventions.sweeps.patched_run import PatchedRun, build_patch
from bnet_transformer.interventions.sweeps.sparse_update import NeededPositions
from bnet_transformer.reference import GroundModel


@dataclass(frozen=True)
class InputDifference:
    """The interpolated nodes, with their values in the base run and the difference of the source run.

    Args:
        values: For each group its values in the base run, `[example, *plates, word, *shape]`.
        differences: The values in the source run minus these.
        masks: The nodes that are interpolated, `[1, *plates, word]`.
    """

    values: Mapping[int, Tensor]
    differences: Mapping[int, Tensor]
    masks: Mapping[int, Tensor]

    def __bool__(self) -> bool:
        return bool(self.values)

    def interpolate(self, fraction: float) -> Overrides:
        """The values of the interpolated nodes at a fraction of the way from the base run to the source run."""
        return {
            group: (
                value + fraction * self.differences[group],
                self.masks[group].expand(len(value), *self.masks[group].shape[1:]),
            )
            for group, value in self.values.items()
        }


def find_interpolation_groups(models: Iterable[GroundModel], needed: NeededPositions) -> frozenset[int]:
    """The groups at which a difference between two sentences may begin, and those that read an index there."""
    starts, reached = set[int](), set[int]()
    for model in models:
        network = model.network
        set_groups = {model.ground.group_of(node).index for node in model.do}
        for index in sorted(needed.ancestor_words):  # parents before children
            spec = network.specs[index]
            if spec.tpm.kind == "input" or index in set_groups:
                starts.add(index)
            if index in reached and not spec.tpm.is_random:
                starts.add(index)
            if index in starts and is_index_valued(spec):
                reached |= {edge.child for edge in network.graph.out_edges[index]} & needed.ancestor_words.keys()
    return frozenset(starts)


def find_input_difference(
    run: PatchedRun, source: ExecutionState, source_examples: Examples, alignment: WordAlignment
) -> InputDifference:
    """Find the nodes with real values at which the difference between two runs begins.

    Args:
        run: The base run, with the values of all groups of `find_interpolation_groups`.
        source: The source run, with the same groups.
        source_examples: The sentences of the source run.
        alignment: The source word of each base word; words without one have no difference.

    Returns:
        These nodes and their values; no group if the runs do not differ there.
    """
    model = run.examples.model
    ground, specs = model.ground, model.network.specs
    roots = {*model.do, *_find_set_nodes(model, source_examples.model)}
    marked = {index: np.zeros(_count_nodes(model, index), dtype=np.bool_) for index in run.needed.ancestor_words}
    for node in roots:
        group = ground.group_of(node).index
        if group in marked:
            marked[group][node - int(ground.offsets[group])] = True
    values, differences, masks = dict[int, Tensor](), dict[int, Tensor](), dict[int, Tensor]()
    for index in sorted(marked):
        spec, mask = specs[index], marked[index] | (specs[index].tpm.kind == "input")
        mask = mask & (alignment.align_nodes(index, np.arange(len(mask))) >= 0)
        if not mask.any() or index not in run.base.values or index not in source.values:
            continue
        base_values, delta, differs = _compare_values(run, source, index, mask, alignment)
        if not differs.any():
            continue
        if is_index_valued(spec):
            for node in np.flatnonzero(differs).tolist():
                for child in ground.children(int(ground.offsets[index]) + node):
                    group = ground.group_of(child).index
                    if group in marked and not specs[group].tpm.is_random:
                        marked[group][child - int(ground.offsets[group])] = True
            continue
        shape = (len(run.examples), *ground.shapes[index], *spec.shape)
        values[index], differences[index] = base_values.reshape(shape), delta.reshape(shape)
        masks[index] = torch.from_numpy(differs).reshape(1, *ground.shapes[index]).to(base_values.device)
    return InputDifference(values, differences, masks)


def _find_set_nodes(base: GroundModel, source: GroundModel) -> list[int]:
    """The ids in the base of the nodes that `do` sets in the source."""
    names = (source.ground.name(node) for node in source.do)
    template, counts = base.ground.template, base.ground.word_counts
    return [base.ground.id(name) for name in names if template.parse_name(name, counts) is not None]


def _count_nodes(model: GroundModel, index: int) -> int:
    """The number of nodes of a group."""
    return math.prod(model.ground.shapes[index])


def _compare_values(
    run: PatchedRun, source: ExecutionState, index: int, mask: BoolArray, alignment: WordAlignment
) -> tuple[Tensor, Tensor, BoolArray]:
    """The base values of all nodes of a group, the source values minus these, and the mask of nodes that differ."""
    nodes = np.flatnonzero(mask)
    patch = build_patch(run, source, PatchSites(index, np.zeros_like(nodes), nodes), alignment)
    base = run.get_base_values(index, patch).detach()  # [node, 1 or N, *shape]
    delta = run.get_patch_values(index, patch).detach() - base
    count = len(run.examples)
    full_base = base.new_zeros(len(mask), count, *base.shape[2:])
    full_delta = torch.zeros_like(full_base, dtype=delta.dtype)
    full_base[nodes], full_delta[nodes] = (
        base.expand(-1, count, *base.shape[2:]),
        delta.expand(-1, count, *delta.shape[2:]),
    )
    differs: BoolArray = (full_delta != 0).reshape(len(mask), -1).any(-1).cpu().numpy()
    return full_base.transpose(0, 1), full_delta.transpose(0, 1), differs

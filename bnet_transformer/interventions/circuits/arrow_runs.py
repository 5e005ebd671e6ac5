"""Runs of circuits of ground arrows: many circuits on the same examples in one batch.

A run starts at the first node group in which a circuit differs from the clean run, and computes only node groups that
lead to an outcome. Node groups in which all circuits are equal are computed once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import BoolArray
from bnet_transformer._core.naming import WORD, join_path, split_path
from bnet_transformer.compiler.execution_state import ExecutionState, TensorLayout
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import UnsupportedError
from bnet_transformer.graph import ancestors, count_from_start
from bnet_transformer.interventions.circuits.arrows import (
    CircuitArrows,
    check_edge_name,
    get_node_slice,
    iter_active_arrows,
    mark_needed_sources,
)
from bnet_transformer.interventions.circuits.masked_group import MaskedGroup
from bnet_transformer.interventions.circuits.runs import (
    BETWEEN,
    INPUT,
    OUTCOME,
    CircuitParts,
    CircuitRuns,
    describe_node,
)
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.interventions.sweeps.metric import Metric
from bnet_transformer.interventions.sweeps.sparse_update import (
    CELL_AXIS,
    get_layout_shape,
    get_parent_groups,
    summarize_distribution,
)

GroupValues = dict[int, Tensor]
GroupMasks = dict[int, BoolArray]


@dataclass
class ArrowRuns(CircuitRuns):
    """Runs of circuits of ground arrows; edges are arrows, or arrows that `over` joins.

    Args:
        clean: The clean run.
        corrupt: The corrupt run.
        arrows: The active arrows, by the node group of their target.
        metric: The metric.
        num_examples: The number of examples.
        memory: The maximum number of bytes that are used at once.
        tokens: The tokens of each clean sentence, by stack.
    """

    clean: ExecutionState
    corrupt: ExecutionState
    arrows: CircuitArrows
    metric: Metric
    num_examples: int
    memory: int
    tokens: tuple[Mapping[str, Sequence[str]], ...] = ()
    clean_outcomes: GroupValues = field(init=False, repr=False)
    _masked_groups: dict[tuple[int, int | None], MaskedGroup] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.edge_names = self.arrows.edge_names
        self.clean_outcomes = self._summarize_outcomes(self.clean)

    def evaluate(self, retained: Tensor) -> Tensor:
        """The metric, `[circuit, example]`, of circuits with the masks `retained`, `[circuit, edge]`."""
        masks = self.build_arrow_masks(retained.cpu().numpy())
        needed = self._find_needed_nodes(masks)
        affected = self._find_affected_groups(masks, needed)
        words = {index: word for index in affected if (word := self._find_single_word(index, needed)) is not None}
        memory = sum(self._estimate_bytes(index, index in words) for index in affected) + 4 * len(self.edge_names)
        size, results = max(1, self.memory // memory), []
        for start in range(0, len(retained), size):
            part = {index: mask[start : start + size] for index, mask in masks.items()}
            values = self.clean_outcomes | self._compute_groups(affected, part, words)
            results.append(self._evaluate_metric(values, len(retained[start : start + size])))
        return torch.cat(results)

    def evaluate_clean(self) -> Tensor:
        """The metric of the clean run, `[example]`."""
        return self._evaluate_metric(self.clean_outcomes, 1, self.clean)[0]

    def evaluate_corrupt(self) -> Tensor:
        """The metric of the corrupt run, `[example]`."""
        return self._evaluate_metric(self._summarize_outcomes(self.corrupt), 1, self.corrupt)[0]

    def swap(self) -> ArrowRuns:
        """The same edges with the clean and the corrupt run exchanged."""
        return replace(self, clean=self.corrupt, corrupt=self.clean)

    @property
    def edge_groups(self) -> tuple[tuple[int, ...], ...]:
        """The edges into each node group, groups in topological order."""
        return tuple(self.arrows.edges_by_group.values())

    def count_from_start(self, name: str) -> str:
        """The name of a node, with a word that is counted from the start."""
        return count_from_start(self.arrows.ground, name)

    def find_connected(self, retained: Tensor) -> Tensor:
        """The mask of the edges that lead to the metric along the retained ones, `[edge]`."""
        connected = np.zeros(len(self.edge_names) + 1, dtype=bool)
        needed = self._find_needed_nodes(self.build_arrow_masks(retained.cpu().numpy()[None]))
        for incoming in self.arrows.incoming.values():
            connected[incoming.edge_ids[needed[incoming.targets]]] = True
        return torch.from_numpy(connected[:-1])

    def check_edge(self, name: str) -> None:
        """Raise an error if the net has no such edge."""
        check_edge_name(self.arrows, name)

    def trace(self, retained: Tensor) -> CircuitParts:
        """The ground arrows on a path from a node that differs to an outcome, and the nodes of these paths."""
        arrows, ground = self.arrows, self.arrows.ground
        masks = {index: mask[0] for index, mask in self.build_arrow_masks(retained.cpu().numpy()[None]).items()}
        edge_of = {
            join_path((ground.name(source), ground.name(target))): None if edge < 0 else self.edge_names[edge]
            for source, target, edge in iter_active_arrows(arrows, masks)
        }
        names = dict.fromkeys(name for arrow in edge_of for name in split_path(arrow))
        nodes = {name: _get_node_attributes(arrows, self.tokens, name) for name in names}
        return CircuitParts(edge_of, nodes, arrows.num_idle)

    def build_arrow_masks(self, retained: BoolArray) -> GroupMasks:
        """The masks of the arrows into each node group, `[circuit, arrow]`, from masks of edges, `[circuit, edge]`."""
        padded = np.pad(retained, ((0, 0), (0, 1)), constant_values=True)  # arrows that are never removed have id -1
        return {index: padded[:, incoming.edge_ids] for index, incoming in self.arrows.incoming.items()}

    def _find_needed_nodes(self, masks: GroupMasks) -> BoolArray:
        """The mask of the nodes that lead to an outcome along the retained arrows of some circuit, `[node]`."""
        needed = np.zeros(len(self.arrows.ground), dtype=bool)
        needed[list(self.arrows.outcome_nodes)] = True
        retained: GroupMasks = {index: np.asarray(mask.any(0)) for index, mask in masks.items()}
        for group in reversed(self.arrows.incoming):
            mark_needed_sources(self.arrows, retained, needed, group)
        return needed

    def _find_affected_groups(self, masks: GroupMasks, needed: BoolArray) -> list[int]:
        """The groups that lead to an outcome and differ from the clean run in some circuit, in order."""
        graph, affected = self.clean.network.graph, set[int]()
        for index, mask in masks.items():
            if not mask.all() or any(edge.parent in affected for edge in graph.in_edges[index]):
                affected.add(index)
        return [index for index in sorted(affected) if needed[get_node_slice(self.arrows.ground, index)].any()]

    def _find_single_word(self, index: int, needed: BoolArray) -> int | None:
        """The word of a group if only one word is needed."""
        spec, ground = self.clean.network.specs[index], self.arrows.ground
        if spec.group.word_stack is None or self.clean.word_counts[spec.group.word_stack] < 2:
            return None
        marks = needed[get_node_slice(ground, index)].reshape(ground.shapes[index])
        words = np.flatnonzero(marks.reshape(-1, marks.shape[-1]).any(0))
        return int(words[0]) if len(words) == 1 else None

    @torch.no_grad()
    def _compute_groups(self, groups: Sequence[int], masks: GroupMasks, words: Mapping[int, int]) -> GroupValues:
        """The values of groups in topological order, with each mask of `[circuit, arrow]`.

        Values are freed after their last use, except those of outcomes.
        """
        specs = self.clean.network.specs
        last_use = {parent.index: k for k, index in enumerate(groups) for parent in specs[index].parents}
        outcome_groups = {self.arrows.ground.group_of(node).index for node in self.arrows.outcome_nodes}
        values: GroupValues = {}
        for k, index in enumerate(groups):
            mask = masks[index]
            is_shared = bool((mask == mask[:1]).all())
            retained = torch.from_numpy(mask[:1] if is_shared else mask).to(self.clean.device)
            values[index] = self._compute_group(index, words.get(index), values, retained, words)
            for i in [*values]:
                if last_use.get(i, -1) <= k and i != index and i not in outcome_groups:
                    del values[i]
        return values

    def _compute_group(
        self,
        index: int,
        word: int | None,
        values: Mapping[int, Tensor],
        retained: Tensor,
        single_words: Mapping[int, int],
    ) -> Tensor:
        """The values of one group in each circuit; nodes that `do` sets have their set values."""
        key = index, word
        if key not in self._masked_groups:
            self._masked_groups[key] = MaskedGroup.build(self.clean, self.arrows, index, word)
        masked = self._masked_groups[key]
        result = masked.compute(self._build_state(masked.spec, word, values, single_words), self.corrupt, retained)
        value, is_set = self.clean.patched.get(index, (None, None))
        if value is not None and is_set is not None and result.dim() == value.dim():  # not log P of a choice
            if word is not None:
                value, is_set = (tensor.narrow(self.clean.layout.word_dim, word, 1) for tensor in (value, is_set))
            result = torch.where(is_set.reshape(*is_set.shape, *[1] * (value.dim() - is_set.dim())), value, result)
        return result

    def _build_state(
        self, spec: NodeSpec, word: int | None, values: Mapping[int, Tensor], single_words: Mapping[int, int]
    ) -> ExecutionState:
        """The state that a group reads: values of the circuit if they are computed, else clean values."""
        merged = self.clean.values | {g.index: values[g.index] for g in spec.parents if g.index in values}
        axis = self.clean.layout.word_dim
        for parent in spec.parents:
            index, parent_word = parent.index, single_words.get(parent.index)
            is_aligned = parent.reach.kind == "same" and parent_word == word
            if parent_word is not None and not is_aligned and index in values and merged[index].shape[axis] == 1:
                # Only one word is computed. The other words get corrupt values, which no needed node uses.
                value, corrupt_value = merged[index], self.corrupt.values[index]
                count = self.clean.word_counts[self.clean.network.specs[index].group.word_stack or ""]
                batch_shape = torch.broadcast_shapes(value.shape[:axis], corrupt_value.shape[:axis])
                expanded = corrupt_value.expand(*batch_shape, count, *corrupt_value.shape[axis + 1 :]).clone()
                expanded.narrow(axis, parent_word, 1).copy_(value.expand(*batch_shape, 1, *value.shape[axis + 1 :]))
                merged[index] = expanded
        return replace(self.clean, values=merged)

    @torch.no_grad()
    def _summarize_outcomes(self, state: ExecutionState) -> GroupValues:
        """The summaries (`log P`, or the mean) of the random outcomes in a run, by node group."""
        summaries: GroupValues = {}
        for node in self.arrows.outcome_nodes:
            index = self.arrows.ground.group_of(node).index
            if index not in state.values and index not in summaries:
                spec = state.network.specs[index]
                value = summarize_distribution(spec, *gather_parents(state, spec))
                event_dim = 1 if spec.tpm.kind == "discrete" else len(spec.shape)
                summaries[index] = state.layout.pad_dims(value, event_dim)
        return summaries

    def _evaluate_metric(
        self, values: Mapping[int, Tensor], num_circuits: int, state: ExecutionState | None = None
    ) -> Tensor:
        """The metric of the values of node groups: `[circuit, example]`."""
        base, outcomes = state or self.clean, {}
        for node in self.arrows.outcome_nodes:
            group, index = self.arrows.ground.unravel_index(node)
            value = values[group.index] if group.index in values else base.values[group.index]
            position = dict(zip(self.arrows.ground.axes(group), index, strict=True))
            for plate in reversed((*base.layout.plates, WORD)):
                axis = base.layout.axis(plate)
                value = value.select(axis, position.get(plate, 0) if value.shape[axis] > 1 else 0)
            outcomes[node] = value.expand(num_circuits, self.num_examples, *value.shape[2:])
        return self.metric(outcomes)

    def _estimate_bytes(self, index: int, has_single_word: bool) -> int:
        """An upper bound of the memory of a group, and of the collections that it reads, in one circuit."""
        spec, sizes = self.clean.network.specs[index], self.clean.network.graph.plate_sizes
        *plates, words = get_layout_shape(self.clean, spec)
        count = self.num_examples * math.prod(plates) * (1 if has_single_word else words)
        num_values = self.clean.count_states(index) if spec.tpm.kind == "discrete" else math.prod(spec.shape)
        sources = self.arrows.incoming[index].sources
        for parent, tpm_parent in zip(spec.parents, spec.tpm_parents, strict=True):
            ids = get_node_slice(self.arrows.ground, parent.index)
            if not ((sources >= ids.start) & (sources < ids.stop)).any():
                continue  # the slot is the same in all circuits
            read_stack = self.clean.network.specs[parent.index].group.word_stack or ""
            counts = {**sizes, WORD: self.clean.word_counts.get(read_stack, 1)}
            size = math.prod(counts[axis] for axis in parent.over)
            num_values += size * (1 if MaskedGroup.can_mix_attention(spec) else math.prod(tpm_parent.shape))
        return 3 * count * num_values * self.clean.dtype.itemsize


def build_arrow_runs(
    clean: Examples, corrupt: Examples, arrows: CircuitArrows, metric: Metric, memory: int
) -> ArrowRuns:
    """Run both sides of the examples."""
    clean_state, corrupt_state = (run_with_cells(examples, arrows.outcome_nodes) for examples in (clean, corrupt))
    return ArrowRuns(clean_state, corrupt_state, arrows, metric, len(clean), memory, clean.tokens)


def check_ancestors_fixed(examples: Examples, outcome_nodes: Sequence[int]) -> None:
    """Raise an error if a random ancestor of an outcome is not set."""
    model = examples.model
    for node in ancestors(model.ground, outcome_nodes):
        spec = model.network.specs[model.ground.group_of(node).index]
        if spec.tpm.is_random and node not in model.do:
            name = model.ground.name(node)
            raise UnsupportedError(
                f"circuit: the metric depends on the random node {name}, which is not set",
                hint=f"Set it in clean and corrupt by do({name}=...)",
            )


def run_with_cells(examples: Examples, outcome_nodes: Sequence[int]) -> ExecutionState:
    """Run the ancestors of the outcomes, with a leading dim for circuits: `[1, example, *plates, word, *shape]`."""
    model = examples.model
    nodes = *outcome_nodes, *ancestors(model.ground, outcome_nodes)
    ancestor_groups = {model.ground.group_of(node).index for node in nodes}
    set_groups = {model.ground.group_of(node).index for node in model.do}
    specs = model.network.specs
    state = examples.run({index for index in ancestor_groups if not specs[index].tpm.is_random or index in set_groups})
    values = {index: value[None] for index, value in state.values.items()}
    return replace(
        state,
        layout=TensorLayout((CELL_AXIS,), state.layout.plates),
        values=_zero_pruned_groups(state, ancestor_groups) | values,
        patched={index: (value[None], is_set[None]) for index, (value, is_set) in state.patched.items()},
        attention_rows={index: (value[None], is_set[None]) for index, (value, is_set) in state.attention_rows.items()},
        known={},
        attention_weights={},
    )


def _zero_pruned_groups(state: ExecutionState, ancestor_groups: set[int]) -> GroupValues:
    """Zeros for the parent groups that no longer lead to an outcome after surgery: a TPM still gathers them."""
    specs, zeros = state.network.specs, {}
    for index in ancestor_groups:
        for parent in get_parent_groups(state.network, specs[index]):
            if parent not in ancestor_groups:
                dtype = torch.long if specs[parent].tpm.is_index_valued else state.dtype
                shape = 1, 1, *get_layout_shape(state, specs[parent]), *specs[parent].shape
                zeros[parent] = torch.zeros(shape, dtype=dtype, device=state.device)
    return zeros


def _get_node_attributes(
    arrows: CircuitArrows, tokens: Sequence[Mapping[str, Sequence[str]]], name: str
) -> dict[str, Any]:
    """The attributes of a node of the graph; its token is None if the examples have different tokens."""
    ground = arrows.ground
    node = ground.id(name)
    group, index = ground.unravel_index(node)
    word = dict(zip(ground.axes(group), index, strict=True)).get(WORD)
    known = set() if word is None else {by_stack[group.word_stack or ""][word] for by_stack in tokens}
    token = known.pop() if len(known) == 1 else None
    part = OUTCOME if node in arrows.outcome_nodes else INPUT if arrows.differing_nodes[node] else BETWEEN
    return describe_node(group, ground.axes(group), index, part, token)

"""Runs of circuits of ground arrows: the candidate arrows, and many circuits on the same examples in one batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD, format_label, join_path, match_names, split_path
from bnet_transformer._core.tensors import BoolArray
from bnet_transformer.compiler.evaluate import evaluate_tpm
from bnet_transformer.compiler.gather import ExecutionState, TensorLayout, gather_parents
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, UnsupportedError, unknown_name_error
from bnet_transformer.graph import GroundGraph, NodeGroup, ancestors, count_from_start
from bnet_transformer.interventions.ablation import Ablation
from bnet_transformer.interventions.circuit_arrows import (
    NODES,
    CircuitArrows,
    IncomingArrows,
    check_edge_name,
    find_circuit_arrows,
    get_node_slice,
    iter_active_arrows,
    mark_needed_sources,
)
from bnet_transformer.interventions.examples import Examples, Metric, Overrides
from bnet_transformer.interventions.patched_run import (
    CELL_AXIS,
    get_layout_shape,
    get_parent_groups,
    summarize_distribution,
)
from bnet_transformer.tpm import Attention, Bilinear, Dot, EvalContext

# --------------------------------------------------------------------------------------------------------------------
# What a search and a curve need of a net: runs of circuits over named edges, in which the other edges are corrupt.
#
# `ArrowRuns` implements `CircuitRuns` for ground arrows. Any other class of edges with the same methods can be searched
# and ranked in the same way, because edges occur only as names and as columns of masks.


INPUT, OUTCOME, BETWEEN = "differs", "outcome", "between"  # the part of a node in a circuit
MAX_LISTED = 5  # names in a note
ROUNDING_STEPS = 4  # values that differ by less are equal


@dataclass(frozen=True)
class CircuitParts:
    """What a figure of a circuit draws.

    Args:
        edge_of: The edge of each arrow of the circuit; None for an arrow that was not a candidate.
        nodes: The nodes of these arrows, with their attributes.
        num_idle: The number of arrows of the net that transmit no difference between the runs.
    """

    edge_of: Mapping[str, str | None]
    nodes: Mapping[str, Mapping[str, Any]]
    num_idle: int


class CircuitRuns(ABC):
    """Runs of circuits. Along a retained edge the run reads its own value, along any other edge the corrupt one.

    Attributes:
        edge_names: The name of each edge, `"source -> target"`, targets in topological order.
    """

    edge_names: tuple[str, ...]

    @abstractmethod
    def evaluate(self, retained: Tensor) -> Tensor:
        """The metric, `[circuit, example]`, of circuits with the masks `retained`, `[circuit, edge]`."""

    @abstractmethod
    def swap(self) -> CircuitRuns:
        """The same edges with the clean and the corrupt run exchanged."""

    def evaluate_clean(self) -> Tensor:
        """The metric of the clean run, `[example]`: by default that of the circuit of all edges."""
        return self.evaluate(torch.ones(1, len(self.edge_names), dtype=torch.bool))[0]

    def evaluate_corrupt(self) -> Tensor:
        """The metric of the corrupt run, `[example]`: by default that of the circuit without edges."""
        return self.evaluate(torch.zeros(1, len(self.edge_names), dtype=torch.bool))[0]

    @property
    def edge_groups(self) -> tuple[tuple[int, ...], ...]:
        """The edges that a search tests together, groups in topological order: by default those into one target."""
        targets = enumerate(split_path(name)[-1] for name in self.edge_names)
        return tuple(tuple(k for k, _ in edges) for _, edges in groupby(targets, key=lambda item: item[1]))

    def count_from_start(self, name: str) -> str:
        """The name of the end of an edge, with a word that is counted from the start; by default unchanged."""
        return name

    def find_connected(self, retained: Tensor) -> Tensor:
        """The mask of the edges that lead to the metric along the retained ones, `[edge]`; by default all edges."""
        return torch.ones_like(retained)

    def list_notes(self) -> tuple[str, ...]:
        """What a reader of the circuits should consider, such as edges that change nothing; by default nothing."""
        return ()

    def check_edge(self, name: str) -> None:
        """Raise an error if the net has no such edge. Edges without a difference may have no column in the masks."""
        if name not in self.edge_names:
            raise unknown_name_error("edge", name, self.edge_names)

    def trace(self, retained: Tensor) -> CircuitParts:
        """The arrows and nodes of a circuit, for its graph and for figures: by default the edges and their ends."""
        names = [name for name, is_retained in zip(self.edge_names, retained.tolist(), strict=True) if is_retained]
        ends = dict.fromkeys(end for name in names for end in split_path(name))
        nodes = {end: {"role": end.split("_")[0], "label": end, "part": BETWEEN} for end in ends}
        return CircuitParts({name: name for name in names}, nodes, 0)


def match_edges(patterns: Iterable[str], runs: CircuitRuns) -> tuple[str, ...]:
    """The names of the edges that match the patterns.

    Args:
        patterns: Names such as `"v_0_0_1 -> a_0_0_3"`, and patterns such as `"a_0_* -> *"`.
        runs: The runs.

    Returns:
        The names, without duplicates; a full name of an edge without a difference is retained unchanged.
    """
    known, names = dict.fromkeys(runs.edge_names), dict[str, None]()
    for pattern in patterns:
        name = join_path(map(runs.count_from_start, split_path(pattern)))
        matches = [name] if name in known else match_names(name, known)
        if not matches:
            runs.check_edge(name)
            matches = [name]
        names |= dict.fromkeys(matches)
    return tuple(names)


def build_mask(runs: CircuitRuns, names: Iterable[str]) -> Tensor:
    """The mask of the named edges, `[edge]`; names without a column are omitted."""
    included = set(names)
    return torch.tensor([name in included for name in runs.edge_names], dtype=torch.bool)


def describe_unchanged(names: Sequence[str], kind: str = "edges") -> tuple[str, ...]:
    """The note on edges, or candidates, that transmit the same value whether they are in a circuit or not."""
    if not names:
        return ()
    listed = ", ".join(names[:MAX_LISTED]) + ("" if len(names) <= MAX_LISTED else ", ...")
    return (f"{len(names):,} {kind} change nothing, because what replaces their value is equal to it: {listed}",)


def find_changed_nodes(state: ExecutionState, index: int, first: Tensor, second: Tensor) -> BoolArray:
    """Whether the nodes of a group have other values in two runs, by more than rounding in some example, `[node]`."""
    spec, layout = state.network.specs[index], state.layout
    precision = torch.finfo(first.dtype).eps if first.is_floating_point() else 0.0
    differs = ~torch.isclose(first, second.to(first.dtype), rtol=ROUNDING_STEPS * precision, atol=0)
    leading, event = differs.shape[: layout.batch_dim + 1], differs.shape[layout.rank :]
    full = differs.expand(*leading, *get_layout_shape(state, spec), *event)
    axes = [layout.axis(plate) for plate in spec.group.plates]
    axes += [layout.word_dim] if spec.group.word_stack is not None else []
    nodes = full.movedim(axes, list(range(len(axes)))).flatten(0, len(axes) - 1) if axes else full[None]
    changed: BoolArray = nodes.flatten(1).any(-1).cpu().numpy()
    return changed


def describe_node(
    group: NodeGroup, axes: Sequence[str], index: Sequence[int], part: str, token: str | None = None
) -> dict[str, Any]:
    """The attributes of a node in the graph of a circuit.

    Args:
        group: The node group.
        axes: The axes of the node: the plates of its group, and `"word"` if it has a word.
        index: The position along each axis.
        part: `INPUT`, `OUTCOME` or `BETWEEN`.
        token: The token of its word; None if the examples have different tokens.

    Returns:
        The attributes, by name.
    """
    position = dict(zip(axes, index, strict=True))
    word, plates = position.get(WORD), tuple(int(position[plate]) for plate in group.plates)
    return {
        "stack": group.stack,
        "role": group.role,
        "slice": group.slice,
        "head": position.get("head"),
        "plates": axes,
        "index": index,
        "word": word,
        "token": None if token is None else str(token),  # writers of graphs accept only built-in types
        "label": format_label(group.role, stack=group.stack, slice=group.slice, plates=plates, word=word, token=token),
        "part": part,
    }


# --------------------------------------------------------------------------------------------------------------------
# A node group that is evaluated in many circuits at once, with a mask over its incoming arrows.
#
# Along a retained arrow a node uses the value of its parent in the run of the circuit; along any other arrow it uses
# the value in the corrupt run. Values have the layout `[circuit, example, *plates, word, *shape]`; a mask `[circuit,
# arrow]` marks the retained arrows into a node group. A node that reads all words can then read a different collection
# in each circuit and for each word, `[..., i, j, *shape]`. This tensor is avoided if all words use the same collection.
# It is also avoided for an attention, which instead mixes the scores and the weighted values of the two runs.


@dataclass(frozen=True)
class MaskedGroup:
    """A node group (or its one needed word) that is evaluated with a mask over its incoming arrows.

    `slot_arrows` contains, for each entry of each slot, `[1 or N, *plates, word, *over]`, the index of the arrow along
    which the entry is read; -1 for an idle arrow.
    """

    spec: NodeSpec
    word: int | None
    slot_arrows: tuple[Tensor, ...]

    @classmethod
    def build(cls, state: ExecutionState, arrows: CircuitArrows, index: int, word: int | None) -> MaskedGroup:
        """Find the arrow of each entry of each slot: gather node ids instead of values, and find the pairs of ids."""
        spec, offsets = state.network.specs[index], arrows.ground.offsets
        incoming = arrows.incoming.get(index, IncomingArrows(*[np.zeros(0, dtype=np.int64)] * 3))
        scale = len(arrows.ground)
        find_arrows = pd.Index(incoming.targets * scale + incoming.sources).get_indexer  # -1 for pairs without an arrow
        targets, slot_arrows = _number_nodes(state, spec, int(offsets[index]), word)[0], []
        for parent in spec.parents:
            parent_spec = state.network.specs[parent.index]
            picks = {selector: state.values[selector] for _, selector in parent.pick}
            numbers = _number_nodes(state, parent_spec, int(offsets[parent.index]), None) + 1  # 0 is padding
            numbered = replace(state, values={**picks, parent.index: numbers})
            _, (source,) = gather_parents(numbered, replace(spec, parents=(parent,)), word)
            target = targets.reshape(*targets.shape, *[1] * (source.dim() - 1 - targets.dim()))
            ends = torch.where(source[0] > 0, target * scale + source[0] - 1, -1)
            numbers_of_arrows = torch.from_numpy(find_arrows(ends.reshape(-1).cpu().numpy()))
            slot_arrows.append(numbers_of_arrows.reshape(ends.shape).to(state.device))
        return cls(spec, word, tuple(slot_arrows))

    @staticmethod
    def can_mix_attention(spec: NodeSpec) -> bool:
        """True for an attention over words whose scores and weighted values can be a mixture of two runs."""
        is_supported = isinstance(spec.tpm, Attention) and isinstance(spec.tpm.score, Dot | Bilinear)
        return is_supported and all(parent.over in ((), (WORD,)) for parent in spec.parents)

    def compute(self, state: ExecutionState, corrupt: ExecutionState, retained: Tensor) -> Tensor:
        """The values of the group in each circuit.

        Args:
            state: The values of the circuit's run.
            corrupt: The corrupt run.
            retained: The mask of the retained arrows into the group, `[circuit, arrow]`.

        Returns:
            The values, `[circuit, example, *plates, word, *shape]`; for a random group `log P` or the mean.
        """
        context, values = gather_parents(state, self.spec, self.word)
        _, corrupt_values = gather_parents(corrupt, self.spec, self.word)

        def select_slots() -> list[Tensor]:
            slots = zip(values, corrupt_values, self.slot_arrows, strict=True)
            return [_select_parent_values(*slot, retained) for slot in slots]

        if not self.can_mix_attention(self.spec) or bool(retained.all()):
            return evaluate_group(state, self.spec, context, select_slots(), self.word)
        result = state.layout.pad_dims(self._mix_attention(context, values, corrupt_values, retained), 1)
        return mix_set_rows(state, self.spec, result, select_slots, self.word)

    def _mix_attention(
        self, context: EvalContext, circuit_parents: list[Tensor], corrupt_parents: list[Tensor], retained: Tensor
    ) -> Tensor:
        """Evaluate an attention whose scores and weighted values are a mixture of both runs."""
        # A score reads one key, and the weighted sum is linear in the values. So the score of word j comes from the run
        # in which k_j is read, and sum_j w_j v_j is the sum over retained arrows plus the sum over other arrows with
        # the values of the corrupt run. No copy of all keys and values for each word is necessary.
        tpm = self.spec.tpm
        assert isinstance(tpm, Attention)
        names = [parent.slot for parent in self.spec.parents]
        read_slot = next(k for k, name in enumerate(names[:2]) if name.endswith("."))
        parents = [
            value if k in (read_slot, 2) else _select_parent_values(value, corrupt, slot, retained)
            for k, (value, corrupt, slot) in enumerate(
                zip(circuit_parents, corrupt_parents, self.slot_arrows, strict=True)
            )
        ]
        scores, mask = tpm.scores(context, *parents)
        in_circuit = _build_mask(self.slot_arrows[read_slot], retained)
        if in_circuit is not None:
            swapped = [*parents]
            swapped[read_slot] = corrupt_parents[read_slot]
            scores = torch.where(in_circuit, scores, tpm.scores(context, *swapped)[0])
        weights = tpm.normaliser.normalise(scores, mask)
        in_circuit = _build_mask(self.slot_arrows[2], retained)
        if in_circuit is None:
            return tpm.mix(weights, *parents)
        swapped = [*parents]
        swapped[2] = corrupt_parents[2]
        if tpm.residual:
            swapped[-1] = torch.zeros_like(swapped[-1])  # the first of the two sums adds the residual
        return tpm.mix(weights * in_circuit, *parents) + tpm.mix(weights * ~in_circuit, *swapped)


def evaluate_group(
    state: ExecutionState, spec: NodeSpec, context: EvalContext, parents: list[Tensor], word: int | None = None
) -> Tensor:
    """The value of a group (or of its one word) in the layout; of an open random group `log P`, or the mean."""
    if spec.tpm.is_random:
        value = summarize_distribution(spec, context, parents)
        return state.layout.pad_dims(value, 1 if spec.tpm.kind == "discrete" else len(spec.shape))
    value = state.layout.pad_dims(evaluate_tpm(state, spec, context, parents), len(spec.shape))
    return mix_set_rows(state, spec, value, lambda: parents, word)


def mix_set_rows(
    state: ExecutionState, spec: NodeSpec, value: Tensor, get_parents: Callable[[], list[Tensor]], word: int | None
) -> Tensor:
    """A value in which the nodes with a set row of attention mix by this row."""
    if spec.group.index not in state.attention_rows:
        return value
    rows, is_set = _narrow_word(state, word, *state.attention_rows[spec.group.index])
    assert isinstance(spec.tpm, Attention)
    return torch.where(is_set[..., None], spec.tpm.mix(rows, *get_parents()), value)


def restore_set_values(state: ExecutionState, index: int, value: Tensor, word: int | None = None) -> Tensor:
    """A value in which the nodes that `do` sets have their set values; `log P` of a choice is unchanged."""
    if index not in state.patched or value.dim() != state.patched[index][0].dim():
        return value
    fixed, is_set = _narrow_word(state, word, *state.patched[index])
    return torch.where(is_set.reshape(*is_set.shape, *[1] * (fixed.dim() - is_set.dim())), fixed, value)


def _narrow_word(state: ExecutionState, word: int | None, *values: Tensor) -> Sequence[Tensor]:
    """Values at one word; unchanged without a word."""
    return values if word is None else [value.narrow(state.layout.word_dim, word, 1) for value in values]


def get_outcomes(
    ground: GroundGraph, nodes: Sequence[int], state: ExecutionState, values: Mapping[int, Tensor], size: Sequence[int]
) -> dict[int, Tensor]:
    """The outcome of each node, `[circuit, example, *shape]`, from values of groups, or else those of a run.

    `size` is the number of circuits and of examples.
    """
    outcomes = {}
    for node in nodes:
        group, index = ground.unravel_index(node)
        value = values[group.index] if group.index in values else state.values[group.index]
        position = dict(zip(ground.axes(group), index, strict=True))
        for plate in reversed((*state.layout.plates, WORD)):
            axis = state.layout.axis(plate)
            value = value.select(axis, position.get(plate, 0) if value.shape[axis] > 1 else 0)
        outcomes[node] = value.expand(*size, *value.shape[2:])
    return outcomes


def _number_nodes(state: ExecutionState, spec: NodeSpec, offset: int, word: int | None) -> Tensor:
    """The ids of the nodes of a group in the layout, `[1, 1, *plates, word]`."""
    shape = (1, 1, *get_layout_shape(state, spec))
    ids = (torch.arange(int(np.prod(shape)), device=state.device) + offset).reshape(shape)
    return ids if word is None else ids.narrow(state.layout.word_dim, word, 1)


def _select_parent_values(
    circuit_value: Tensor, corrupt_value: Tensor, slot_arrows: Tensor, retained: Tensor
) -> Tensor:
    """The values that a slot reads: of the circuit along retained and idle arrows, else of the corrupt run."""
    mask = _build_mask(slot_arrows, retained)
    if mask is None:
        return circuit_value
    for d in range(1, mask.dim()):  # words (or heads) that read the same arrows share a collection
        if mask.shape[d] > 1 and circuit_value.shape[d] == corrupt_value.shape[d] == 1:
            has_true, has_false = (part.any(d, keepdim=True) for part in (mask, ~mask & (slot_arrows >= 0)))
            mask = mask if bool((has_true & has_false).any()) else has_true  # if all entries with an arrow agree
    event_dim = circuit_value.dim() - mask.dim()
    return torch.where(mask.reshape(*mask.shape, *[1] * event_dim), circuit_value, corrupt_value)


def _build_mask(slot_arrows: Tensor, retained: Tensor) -> Tensor | None:
    """The mask of the slot's entries whose arrow is retained, `[circuit, *entries]`; None if all arrows are."""
    if bool(retained.all()):
        return None
    mask = retained[:, slot_arrows.clamp(min=0)] & (slot_arrows >= 0)
    return None if bool((mask | ~(slot_arrows >= 0)).all()) else mask


# --------------------------------------------------------------------------------------------------------------------
# Runs of circuits of ground arrows: many circuits on the same examples in one batch.
#
# A run starts at the first node group in which a circuit differs from the clean run, and computes only node groups that
# lead to an outcome. Node groups in which all circuits are equal are computed once.


GroupValues = dict[int, Tensor]
GroupMasks = dict[int, BoolArray]


@dataclass
class ArrowRuns(CircuitRuns):
    """Runs of circuits of ground arrows; edges are arrows, or arrows that `over` joins.

    Args:
        clean: The clean run.
        corrupt: The corrupt run, or the clean run with the values of an ablation.
        arrows: The active arrows, by the node group of their target.
        metric: The metric.
        num_examples: The number of examples.
        memory: The maximum number of bytes that are used at once.
        tokens: The tokens of each clean sentence, by stack.
        ablation: The ablation of the nodes whose arrows are left out; None for the values of corrupt sentences.
    """

    clean: ExecutionState
    corrupt: ExecutionState
    arrows: CircuitArrows
    metric: Metric
    num_examples: int
    memory: int
    tokens: tuple[Mapping[str, Sequence[str]], ...] = ()
    ablation: Ablation | None = None
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
            shape = len(retained[start : start + size]), self.num_examples
            outcomes = get_outcomes(self.arrows.ground, self.arrows.outcome_nodes, self.clean, values, shape)
            results.append(self.metric(outcomes))
        return torch.cat(results)

    def evaluate_corrupt(self) -> Tensor:
        """The metric of the corrupt run, or of the circuit without edges if nodes are ablated, `[example]`."""
        return super().evaluate_corrupt() if self.ablation is not None else self.swap().evaluate_clean()

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

    @cached_property
    def ablated_groups(self) -> frozenset[int]:
        """The groups of the nodes from which edges start."""
        sources = [part.sources[part.edge_ids >= 0] for part in self.arrows.incoming.values()]
        nodes = np.concatenate(sources) if sources else np.zeros(0, dtype=np.int64)
        return frozenset(self.arrows.ground.split_by_group(np.unique(nodes).tolist()))

    def find_connected(self, retained: Tensor) -> Tensor:
        """The mask of the edges that lead to the metric along the retained ones, `[edge]`."""
        connected = np.zeros(len(self.edge_names) + 1, dtype=bool)
        needed = self._find_needed_nodes(self.build_arrow_masks(retained.cpu().numpy()[None]))
        for incoming in self.arrows.incoming.values():
            connected[incoming.edge_ids[needed[incoming.targets]]] = True
        return torch.from_numpy(connected[:-1])

    @torch.no_grad()
    def list_notes(self) -> tuple[str, ...]:
        """The candidates that transmit no difference, and the edges whose nodes have equal values in both runs."""
        arrows, changed = self.arrows, np.zeros(len(self.arrows.ground), dtype=bool)
        left_out = self._build_left_out_state(self.clean, self.ablated_groups)
        for index in self.ablated_groups:
            values = self.clean.values[index], left_out.values[index]
            changed[get_node_slice(arrows.ground, index)] = find_changed_nodes(self.clean, index, *values)
        is_changed = np.zeros(len(self.edge_names) + 1, dtype=bool)
        for part in arrows.incoming.values():
            is_changed[part.edge_ids[changed[part.sources]]] = True
        unchanged = [name for name, flag in zip(self.edge_names, is_changed[:-1], strict=True) if not flag]
        kind = "nodes" if NODES in arrows.over else "edges"
        return describe_unchanged(arrows.silent, "candidates") + describe_unchanged(unchanged, kind)

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
        """The mask of the nodes that lead to an outcome along the retained arrows of some circuit, `[node]`.

        An arrow that is left out transmits a value too, if the ablation is a function of the value of the node.
        """
        ground, is_relative = self.arrows.ground, self.ablation is not None and self.ablation.is_relative
        needed = np.zeros(len(ground), dtype=bool)
        needed[list(self.arrows.outcome_nodes)] = True
        retained: GroupMasks = {index: np.asarray(mask.any(0) | is_relative) for index, mask in masks.items()}
        for group in reversed(self.arrows.incoming):
            if is_relative and group in self.ablated_groups:  # a mean over words needs all of them
                nodes = get_node_slice(ground, group)
                needed[nodes] |= needed[nodes].any()
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
        """The values of groups in topological order, with each mask of `[circuit, arrow]`."""
        values: GroupValues = {}
        for index in groups:
            mask = masks[index]
            is_shared = bool((mask == mask[:1]).all())
            retained = torch.from_numpy(mask[:1] if is_shared else mask).to(self.clean.device)
            values[index] = self._compute_group(index, words.get(index), values, retained, words)
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
        key, spec = (index, word), self.clean.network.specs[index]
        if key not in self._masked_groups:
            self._masked_groups[key] = MaskedGroup.build(self.clean, self.arrows, index, word)
        masked, state = self._masked_groups[key], self._build_state(spec, word, values, single_words)
        left_out = self._build_left_out_state(state, {parent.index for parent in spec.parents})
        result = masked.compute(state, left_out, retained)
        return restore_set_values(self.clean, index, result, word)

    def _build_left_out_state(self, state: ExecutionState, groups: AbstractSet[int]) -> ExecutionState:
        """The state with the values of groups that arrows transmit which are left out."""
        if self.ablation is None or not self.ablation.is_relative:
            return self.corrupt
        ablated = groups & self.ablated_groups
        values = {index: self.ablation.apply(state, index, state.values[index], self.corrupt) for index in ablated}
        return replace(state, values={**state.values, **values})

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

    def _estimate_bytes(self, index: int, has_single_word: bool) -> int:
        """An upper bound of the memory of a group, and of the collections that it reads, in one circuit."""
        spec, sizes = self.clean.network.specs[index], self.clean.network.graph.plate_sizes
        *plates, words = get_layout_shape(self.clean, spec)
        count = self.num_examples * math.prod(plates) * (1 if has_single_word else words)
        states = self.clean.network.count_states(index, self.clean.word_counts) if spec.tpm.kind == "discrete" else None
        num_values = math.prod(spec.shape) if states is None else states
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
    clean: Examples,
    corrupt: Examples | Ablation,
    outcome: Metric,
    over: tuple[str, ...],
    candidates: object,
    memory: int,
) -> ArrowRuns:
    """Find the edges, and run both sides of the examples.

    Raises:
        BNetError: No candidate transmits a difference to the metric.
    """
    ablation, peer = (corrupt, corrupt.peer or clean) if isinstance(corrupt, Ablation) else (None, corrupt)
    for examples in (clean, peer):
        check_ancestors_fixed(examples, outcome.nodes)
    arrows = find_circuit_arrows(clean, corrupt, outcome.nodes, over, candidates)
    if not arrows.edge_names:
        reason = "the clean and the corrupt sentence do not differ in any ancestor of the metric"
        if arrows.incoming or ablation:
            reason = "none of the candidates transmits a difference between clean and corrupt to the metric"
        raise BNetError(f"corrupt: {reason}")
    overrides = {}
    if ablation is not None:
        ablated = np.flatnonzero(arrows.differing_nodes).tolist()
        ablation.check(arrows.ground.split_by_group(ablated))
        overrides = ablation.build_overrides(ablated)
    clean_state = run_with_cells(clean, arrows.outcome_nodes)
    corrupt_state = run_with_cells(peer, arrows.outcome_nodes, overrides)
    return ArrowRuns(clean_state, corrupt_state, arrows, outcome, len(clean), memory, clean.tokens, ablation)


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


def run_with_cells(
    examples: Examples, outcome_nodes: Sequence[int], overrides: Overrides | None = None
) -> ExecutionState:
    """Run the ancestors of the outcomes, with a leading dim for circuits: `[1, example, *plates, word, *shape]`."""
    model = examples.model
    nodes = *outcome_nodes, *ancestors(model.ground, outcome_nodes)
    ancestor_groups = {model.ground.group_of(node).index for node in nodes}
    set_groups = {model.ground.group_of(node).index for node in model.do}
    specs = model.network.specs
    groups = {index for index in ancestor_groups if not specs[index].tpm.is_random or index in set_groups}
    state = examples.run(groups, overrides=overrides)
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
    part = OUTCOME if node in arrows.outcome_nodes else INPUT if arrows.first_nodes[node] else BETWEEN
    return describe_node(group, ground.axes(group), index, part, token)

"""The ground model: a sentence with its interventions, and the parents and choices of its nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from bnet_transformer._core.naming import WORD, Reach
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import EvidenceError
from bnet_transformer.graph.ground_graph import GroundGraph, RetainedParents
from bnet_transformer.graph.traversal import ancestors
from bnet_transformer.tpm import Attention


@dataclass(frozen=True)
class AttentionRow:
    """What `do` sets a node to that reads by a row of its own in place of `P(j | i)`: `weights[j]`, for all words."""

    weights: Tensor


Interventions = Mapping[int, Tensor | AttentionRow]


@dataclass(frozen=True)
class GroundModel:
    """A sentence with all that is settled about it.

    `inputs` holds the values that come with the sentence, `[*plates, word, *shape]` for each group of `Given` nodes;
    `do` a value (a state, where the node is discrete) for each node that is set, `attention_rows` a row of attention for each
    that reads by one. Nodes are ground ids.
    """

    network: Network
    ground: GroundGraph
    inputs: Mapping[str, Tensor]
    do: Mapping[int, Tensor] = field(default_factory=dict)
    attention_rows: Mapping[int, Tensor] = field(default_factory=dict)

    def spec(self, node: int) -> NodeSpec:
        """The group of a node, as it was declared."""
        return self.network.specs[self.ground.group_of(node).index]

    def count_states(self, node: int) -> int:
        """How many states a discrete node has."""
        return self.network.count_states(self.ground.group_of(node).index, self.ground.word_counts)

    def surgery(self, interventions: Interventions) -> GroundModel:
        """The same sentence with more nodes set; of what is told of one node, the last counts."""
        if not interventions:
            return self
        do = {node: value for node, value in self.do.items() if node not in interventions}
        rows = {node: row for node, row in self.attention_rows.items() if node not in interventions}
        do |= {node: value for node, value in interventions.items() if isinstance(value, Tensor)}
        rows |= {node: value.weights for node, value in interventions.items() if isinstance(value, AttentionRow)}
        retained = {node: _retained_reaches(self.spec(node)) for node in rows}
        return replace(self, ground=self.ground.surgery(do, retained), do=do, attention_rows=rows)


def find_slot_parents(
    model: GroundModel, spec: NodeSpec, index: tuple[int, ...], parent: ParentSpec, states: Mapping[int, Tensor]
) -> tuple[tuple[int, ...], list[int], list[int]]:
    """The ground parents that fill one slot of a node: the axes of the collection, the ids, the words read.

    An id of -1 stands for a word that is not there, whose value is zero (or state 0): the one before the first, or
    one that a selector picks out of reach (which has probability zero).
    """
    ground, parent_group = model.ground, model.network.specs[parent.index].group
    node_indices = dict(zip(ground.axes(spec.group), index, strict=True))
    options: list[list[int]] = []
    words: list[int] = []
    for plate in parent_group.plates:
        selected = _selected_entry(model, spec, index, parent, plate, states)
        entries = list(range(ground.template.plate_sizes[plate]))
        options.append(
            entries
            if plate in parent.over and selected is None
            else [node_indices[plate] if selected is None else selected]
        )
    if parent_group.word_stack is not None:
        row = parent.reach.matrix(_count_words(model, spec), ground.word_counts[parent_group.word_stack])[
            node_indices.get(WORD, 0)
        ]
        words = np.flatnonzero(row).tolist()
        selected = _selected_entry(model, spec, index, parent, WORD, states)
        words = words if selected is None else [word for word in words if word == selected]
        if not words and WORD not in parent.over:
            return (), [-1], []
        options.append(words)
    shape = tuple(
        len(option) for axis, option in zip(ground.axes(parent_group), options, strict=True) if axis in parent.over
    )
    return shape, [ground.ravel_index(parent_group, at) for at in itertools.product(*options)], words


def _selected_entry(
    model: GroundModel,
    spec: NodeSpec,
    index: tuple[int, ...],
    parent: ParentSpec,
    plate: str,
    states: Mapping[int, Tensor],
) -> int | None:
    """The entry along a plate that a selector picks, if one does."""
    selector = dict(parent.pick).get(plate)
    if selector is None:
        return None
    chooser, node_indices = model.network.specs[selector], dict(zip(model.ground.axes(spec.group), index, strict=True))
    selector_index = tuple(node_indices[axis] for axis in model.ground.axes(chooser.group))
    node = model.ground.ravel_index(chooser.group, selector_index)
    state = model.do.get(node, states.get(node))
    if state is None and chooser.tpm.kind == "input":
        state = model.inputs[chooser.group.name][selector_index]
    if state is None:
        raise EvidenceError(model.ground.name(node), expected="a state, for it is random", actual="none")
    return int(state)


def evaluation_order(
    model: GroundModel, node: int, computed: Mapping[int, object], states: Mapping[int, Tensor]
) -> list[int]:
    """The nodes on which a value depends, itself last, that are not known yet; a node with a state needs no parent."""
    order: list[int] = []
    visited: set[int] = set()
    stack = [(node, False)]
    while stack:
        current, is_expanded = stack.pop()
        if is_expanded:
            order.append(current)
        elif current not in visited and current not in computed:
            visited.add(current)
            stack.append((current, True))
            node_parents = [] if current in states else parents(model, current)
            stack.extend((parent, False) for parent in node_parents if parent not in computed)
    return order


def parents(model: GroundModel, node: int) -> list[int]:
    """A node's parents after surgery: none where it is set."""
    return [] if node in model.do else model.ground.parents(node)


def attention_parents(model: GroundModel, node: int) -> list[int]:
    """The parents of a node on which its reading `P(j | i)` depends."""
    spec, _ = locate_node(model, node)
    slots = spec.tpm.attention_slots() if node not in model.attention_rows else ()
    groups = {parent_spec.index for parent_spec in spec.parents if parent_spec.slot in slots}
    groups |= {
        selector for parent_spec in spec.parents if parent_spec.slot in slots for _, selector in parent_spec.pick
    }
    return [parent for parent in parents(model, node) if model.ground.group_of(parent).index in groups]


def find_open_choices(
    model: GroundModel, nodes: Iterable[int], fixed: Mapping[int, Tensor], *, include_ancestors: bool = False
) -> list[int]:
    """The discrete random nodes, not settled, that decide the values of `nodes`; `include_ancestors` adds those that decide
    their distributions in turn."""
    discrete = frozenset(m.group.index for m in model.network.specs if m.tpm.kind == "discrete")
    start = [node for node in nodes if node not in model.do]
    blocked_groups, blocked_nodes = ((), ()) if include_ancestors else (discrete, fixed)
    reached = {*start, *ancestors(model.ground, start, blocked_groups, blocked_nodes)}
    candidates = (node for node in reached if node not in fixed and node not in model.do)
    return sorted(node for node in candidates if model.ground.group_of(node).index in discrete)


def find_readable_words(model: GroundModel, node: int) -> list[int]:
    """The words that a node may read whose state is a word."""
    spec, index = locate_node(model, node)
    parent = spec.word_parents[0]
    words = model.ground.word_counts[model.network.get_source_stack(spec)]
    row = index[-1] if spec.group.word_stack is not None else 0
    readable: list[int] = np.flatnonzero(parent.reach.matrix(_count_words(model, spec), words)[row]).tolist()
    return readable


def get_fixed(model: GroundModel, evidence: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The evidence that says outright what a random node came to."""
    return {node: observed for node, observed in evidence.items() if is_fixed(model, node, observed)}


def is_fixed(model: GroundModel, node: int, observed: Tensor) -> bool:
    """True where evidence says outright what a random node came to."""
    kind = model.spec(node).tpm.kind
    return kind == "continuous" or (kind == "discrete" and not observed.is_floating_point())


def _retained_reaches(spec: NodeSpec) -> RetainedParents:
    """What a node still reads that reads by a row: the groups of its values and its residual, with their reaches."""
    assert isinstance(spec.tpm, Attention)
    retained: dict[int, tuple[Reach, ...]] = {}
    for parent in spec.parents:
        if parent.slot in spec.tpm.mixed_slots():
            retained[parent.index] = tuple(dict.fromkeys((*retained.get(parent.index, ()), parent.reach)))
    return retained


def locate_node(model: GroundModel, node: int) -> tuple[NodeSpec, tuple[int, ...]]:
    """The member to which a node belongs, and its index there."""
    group, index = model.ground.unravel_index(node)
    return model.network.specs[group.index], index


def _count_words(model: GroundModel, spec: NodeSpec) -> int:
    return 1 if spec.group.word_stack is None else model.ground.word_counts[spec.group.word_stack]

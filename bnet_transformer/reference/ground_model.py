"""The ground model: a sentence with its interventions, and the parents and latent choices of its nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from bnet_transformer._core.naming import WORD, Reach
from bnet_transformer._core.saved_results import Fields, register_codec
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import EvidenceError
from bnet_transformer.graph.ground_graph import GroundGraph, RetainedParents
from bnet_transformer.graph.traversal import ancestors
from bnet_transformer.tpm import Attention


@dataclass(frozen=True)
class AttentionRow:
    """An intervention on an attention node: `weights[j]`, for all words j, replace `P(j | i)`."""

    weights: Tensor


Interventions = Mapping[int, Tensor | AttentionRow]


@dataclass(frozen=True)
class GroundModel:
    """A sentence with its inputs and interventions.

    `inputs` contains the values of input nodes, `[*plates, word, *shape]` for each group; `do` contains the value (for
    a discrete node the state) of each node that is set; `attention_rows` contains the row of each node whose attention
    is set. Nodes are identified by their ground ids.
    """

    network: Network
    ground: GroundGraph
    inputs: Mapping[str, Tensor]
    do: Mapping[int, Tensor] = field(default_factory=dict)
    attention_rows: Mapping[int, Tensor] = field(default_factory=dict)

    def spec(self, node: int) -> NodeSpec:
        """The spec of a node."""
        return self.network.specs[self.ground.group_of(node).index]

    def count_states(self, node: int) -> int:
        """The number of states of a discrete node."""
        return self.network.count_states(self.ground.group_of(node).index, self.ground.word_counts)

    def surgery(self, interventions: Interventions) -> GroundModel:
        """The same sentence with further interventions; a later intervention on a node replaces the earlier one."""
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
    """The ground parents in one slot of a node: the shape of the collection, the ids, and the words of the collection.

    The id -1 is a missing word, whose value is zero (or state 0): the word before the first one, or a word out of reach
    that a selector picks (with probability zero).
    """
    ground, parent_group = model.ground, model.network.specs[parent.index].group
    node_indices = dict(zip(ground.axes(spec.group), index, strict=True))
    options: list[list[int]] = []
    words: list[int] = []
    for plate in parent_group.plates:
        selected = _selected_entry(model, spec, index, parent, plate, states)
        if plate in parent.over and selected is None:
            options.append(list(range(ground.template.plate_sizes[plate])))
        else:
            options.append([node_indices[plate] if selected is None else selected])
    if parent_group.word_stack is not None:
        reads = parent.reach.matrix(_count_words(model, spec), ground.word_counts[parent_group.word_stack])
        words = np.flatnonzero(reads[node_indices.get(WORD, 0)]).tolist()
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
    """The entry along a plate that a selector picks; None without a selector."""
    selector = dict(parent.pick).get(plate)
    if selector is None:
        return None
    selector_spec, node_indices = (
        model.network.specs[selector],
        dict(zip(model.ground.axes(spec.group), index, strict=True)),
    )
    selector_index = tuple(node_indices[axis] for axis in model.ground.axes(selector_spec.group))
    node = model.ground.ravel_index(selector_spec.group, selector_index)
    state = model.do.get(node, states.get(node))
    if state is None and selector_spec.tpm.kind == "input":
        state = model.inputs[selector_spec.group.name][selector_index]
    if state is None:
        raise EvidenceError(f"{model.ground.name(node)}: the node is random and has no state")
    return int(state)


def evaluation_order(
    model: GroundModel, node: int, computed: Mapping[int, object], states: Mapping[int, Tensor]
) -> list[int]:
    """The nodes to compute for a value, parents first; the parents of a node with a given state are omitted."""
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
    """The parents of a node after interventions; a node that is set has none."""
    return [] if node in model.do else model.ground.parents(node)


def attention_parents(model: GroundModel, node: int) -> list[int]:
    """The parents of a node on which `P(j | i)` depends."""
    spec, _ = locate_node(model, node)
    slots = spec.tpm.attention_slots() if node not in model.attention_rows else ()
    filled = [parent_spec for parent_spec in spec.parents if parent_spec.slot in slots]
    groups = {index for parent_spec in filled for index in (parent_spec.index, *dict(parent_spec.pick).values())}
    return [parent for parent in parents(model, node) if model.ground.group_of(parent).index in groups]


def find_open_choices(
    model: GroundModel, nodes: Iterable[int], fixed: Mapping[int, Tensor], *, include_ancestors: bool = False
) -> list[int]:
    """The discrete random nodes without a fixed state that determine the values of `nodes`, sorted.

    `include_ancestors` adds those that determine their distributions.
    """
    discrete = frozenset(m.group.index for m in model.network.specs if m.tpm.kind == "discrete")
    start = [node for node in nodes if node not in model.do]
    blocked_groups, blocked_nodes = ((), ()) if include_ancestors else (discrete, fixed)
    reached = {*start, *ancestors(model.ground, start, blocked_groups, blocked_nodes)}
    candidates = (node for node in reached if node not in fixed and node not in model.do)
    return sorted(node for node in candidates if model.ground.group_of(node).index in discrete)


def find_readable_words(model: GroundModel, node: int) -> list[int]:
    """The words that are possible states of a node whose state is a word that it reads."""
    spec, index = locate_node(model, node)
    parent = spec.word_parents[0]
    words = model.ground.word_counts[model.network.get_source_stack(spec)]
    row = index[-1] if spec.group.word_stack is not None else 0
    readable: list[int] = np.flatnonzero(parent.reach.matrix(_count_words(model, spec), words)[row]).tolist()
    return readable


def get_fixed(model: GroundModel, evidence: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The evidence that fixes the state or value of a random node."""
    return {node: observed for node, observed in evidence.items() if is_fixed(model, node, observed)}


def is_fixed(model: GroundModel, node: int, observed: Tensor) -> bool:
    """True where evidence fixes the state or value of a random node."""
    kind = model.spec(node).tpm.kind
    return kind == "continuous" or (kind == "discrete" and not observed.is_floating_point())


def _retained_reaches(spec: NodeSpec) -> RetainedParents:
    """The groups (values and residual), with their reaches, that an attention node uses also if its row is set."""
    assert isinstance(spec.tpm, Attention)
    retained: dict[int, tuple[Reach, ...]] = {}
    for parent in spec.parents:
        if parent.slot in spec.tpm.mixed_slots():
            retained[parent.index] = tuple(dict.fromkeys((*retained.get(parent.index, ()), parent.reach)))
    return retained


def locate_node(model: GroundModel, node: int) -> tuple[NodeSpec, tuple[int, ...]]:
    """The spec of a node, and its index in the group."""
    group, index = model.ground.unravel_index(node)
    return model.network.specs[group.index], index


def _count_words(model: GroundModel, spec: NodeSpec) -> int:
    """The number of words of a group; 1 for a group without words."""
    return 1 if spec.group.word_stack is None else model.ground.word_counts[spec.group.word_stack]


def _to_fields(model: GroundModel) -> Fields:
    """A sentence without its graph, which its word counts and its interventions determine."""
    parts = {"network": model.network, "word_counts": dict(model.ground.word_counts), "inputs": model.inputs}
    return {**parts, "do": model.do, "attention_rows": model.attention_rows}


def _from_fields(fields: Fields) -> GroundModel:
    """The sentence of `_to_fields`."""
    network, rows = fields["network"], fields["attention_rows"]
    model = GroundModel(network, GroundGraph(network.graph, fields["word_counts"]), fields["inputs"])
    return model.surgery({**fields["do"], **{node: AttentionRow(row) for node, row in rows.items()}})


STORED_TYPES = {
    "network": Network,
    "word_counts": Mapping[str, int],
    "inputs": Mapping[str, Tensor],
    "do": Mapping[int, Tensor],
    "attention_rows": Mapping[int, Tensor],
}
register_codec(GroundModel, _to_fields, lambda fields, trust: _from_fields(fields), STORED_TYPES)

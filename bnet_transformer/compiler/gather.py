"""One run of the compiled net: its request, its layout, its state, and the inputs of each TPM in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD, Reach
from bnet_transformer.compiler.plan import PlanRequest, unset_parent_error
from bnet_transformer.data.batch import Batch, Evidence
from bnet_transformer.data.checks import index_inputs
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.reference import GroundModel
from bnet_transformer.tpm import TPM, EvalContext
from bnet_transformer.tpm.base import broadcast_shapes

# --------------------------------------------------------------------------------------------------------------------
# One run of the compiled net: its request (`ExecutionRequest`), its layout (`TensorLayout`), its state.


NodePatches = Mapping[int, tuple[Tensor, Tensor]]  # by group: values, and a mask of the nodes that have them
# From the value of a group in the layout of a run, at all words or at the word of this index, to its changed value. It
# may be called in a layout with further leading dims.
ValueChange = Callable[[Tensor, int | None], Tensor]
ValueChanges = Mapping[int, Sequence[ValueChange]]  # by group, in their order


@dataclass
class TensorLayout:
    """The leading dims of all values of a run: enumerated groups, batch, plates, word.

    A choice in `neighbours` has a second dim, between those of `enumerated` and the batch: its state at the
    neighbouring word, on which a factor of a chain along words depends. That is the word before, or the word after if
    the choice is in `backward`.
    """

    enumerated: tuple[int, ...]
    plates: tuple[str, ...]
    neighbours: tuple[int, ...] = ()
    backward: frozenset[int] = frozenset()
    batch_dim: int = field(init=False, compare=False)  # plain fields: torch.compile cannot trace a cached property
    word_dim: int = field(init=False, compare=False)
    rank: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        self.batch_dim = len(self.enumerated) + len(self.neighbours)
        self.word_dim = self.batch_dim + 1 + len(self.plates)
        self.rank = self.word_dim + 1

    def axis(self, plate: str) -> int:
        """The dim of a plate, or of the word."""
        return self.word_dim if plate == WORD else self.batch_dim + 1 + self.plates.index(plate)

    def neighbour_dim(self, index: int) -> int:
        """The dim of the state of a choice at the word before (or after)."""
        return len(self.enumerated) + self.neighbours.index(index)

    def pad_dims(self, value: Tensor, event_dim: int) -> Tensor:
        """A value with all dims of the layout before its last `event_dim` dims; missing dims get size 1."""
        missing = self.rank + event_dim - value.dim()
        return value.reshape(*[1] * missing, *value.shape) if missing else value


@dataclass(frozen=True)
class ExecutionRequest:
    """What one run of the compiled net computes: the requested node groups, the sentences, the interventions.

    Groups are given by index. Values are `[batch, *plates, word, *shape]`, states `[batch, *plates, word]`; a batch of
    1 is broadcast. A run trusts them: tensors of users are checked by `CompiledModule.check_request`.

    Args:
        outputs: Groups to compute; for a random group, the parents of its distribution are computed.
        known: Values of groups that are not computed: inputs, groups that `do` sets, random groups that are observed.
            An input without a value has its default.
        word_counts: The number of words of each stack.
        device: The device of the values.
        mask: Booleans `[batch, word]` for each stack with padding, true for words.
        patched: Values for some nodes of a group, and the mask of these nodes, `[batch, *plates, word]`.
        attention_rows: Attention weights for some nodes, `[batch, *plates, word, word read]`, and their mask.
        changes: Functions of the values of groups, which are called after nodes are set by `patched`.
        enumerate_too: Choices to enumerate even if no value depends on them.
        has_chains: Whether a value may depend on a choice at its word and at the word before (or after), each of which
            then has a dim. By default such a value is an error.
        deferred: Groups that are not computed, although their parents are.
        record_attention: Groups whose `P(j | i)` is recorded.
        training: Whether TPMs are in training mode; by default the mode of the module.
    """

    outputs: tuple[int, ...]
    known: Mapping[int, Tensor]
    word_counts: Mapping[str, int]
    device: torch.device
    mask: Mapping[str, Tensor] = field(default_factory=dict)
    patched: NodePatches = field(default_factory=dict)
    attention_rows: NodePatches = field(default_factory=dict)
    changes: ValueChanges = field(default_factory=dict)
    enumerate_too: frozenset[int] = frozenset()
    has_chains: bool = False
    deferred: frozenset[int] = frozenset()
    record_attention: frozenset[int] = frozenset()
    training: bool | None = None

    @property
    def structure(self) -> PlanRequest:
        """All of the request on which a plan depends."""
        return PlanRequest(
            self.outputs,
            frozenset(self.known),
            self.enumerate_too,
            frozenset({*self.patched, *self.attention_rows, *self.changes}),
            self.record_attention,
            self.deferred,
            self.has_chains,
        )


def batch_to_request(network: Network, batch: Batch, outputs: tuple[int, ...] = (), **options: Any) -> ExecutionRequest:
    """The request of a run over the sentences of a batch.

    Args:
        network: The net.
        batch: The sentences; evidence is not used.
        outputs: The groups to compute.
        **options: Other fields of the request.
    """
    values, word_counts, device = index_inputs(network, batch.x, batch.given)
    return ExecutionRequest(outputs, values, word_counts, device, batch.mask or {}, **options)


def build_request(
    model: GroundModel,
    outputs: tuple[int, ...] = (),
    relevant: Collection[int] | None = None,
    states: Mapping[int, Tensor] | None = None,
    **options: Any,
) -> ExecutionRequest:
    """The request of a run for one sentence after its interventions.

    Users name single nodes; a run computes whole groups. A planner reads the structure of the request that is run.

    Args:
        model: The ground model.
        outputs: The groups to compute.
        relevant: The groups whose interventions matter; all by default.
        states: The states `[row]` of each node in the rows of a batch, which override the set values. The other nodes
            of their groups are not used.
        **options: Other fields of the request.
    """
    network, batched = model.network, {model.ground.group_of(node).index for node in states or ()}
    known = {network.graph.by_name[name].index: value[None] for name, value in model.inputs.items()}
    patched = {}
    relevant = relevant if relevant is None else {*relevant, *batched}
    for index, (value, mask) in group_values(model, model.do, relevant, states).items():
        if index in batched or (bool(mask.all()) and network.specs[index].tpm.kind != "input"):
            known[index] = value
        else:
            patched[index] = value, mask
    rows = group_values(model, model.attention_rows, relevant) if model.attention_rows else {}
    words = model.ground.word_counts
    return ExecutionRequest(outputs, known, words, network.device, patched=patched, attention_rows=rows, **options)


def group_evidence(
    model: GroundModel, evidence: Mapping[int, Tensor], states: Mapping[int, Tensor] | None = None
) -> dict[int, Evidence]:
    """Evidence on nodes as evidence on node groups, by the index of the group.

    Args:
        model: The ground model.
        evidence: The observed state or value of each node, the same in each row of a batch.
        states: The states `[row]` of each node in the rows of a batch; None for a batch of one row.
    """
    states = {node: state.to(model.network.device) for node, state in (states or {}).items()}
    groups = group_values(model, evidence, states=states)
    return {index: Evidence(value, None if bool(mask.all()) else mask) for index, (value, mask) in groups.items()}


def group_values(
    model: GroundModel,
    values: Mapping[int, Tensor],
    relevant: Collection[int] | None = None,
    states: Mapping[int, Tensor] | None = None,
) -> dict[int, tuple[Tensor, Tensor]]:
    """Values of nodes as tensors of their groups.

    Args:
        model: The ground model.
        values: The value `[*shape]` of each node, the same in each row of a batch.
        relevant: The groups that matter; all by default.
        states: The values `[row, *shape]` of each node in the rows of a batch; they override `values`.

    Returns:
        For each group the values `[row, *plates, word, *shape]` (zero for nodes without value; one row if no node has
        `states`), and the mask `[1, *plates, word]` of the nodes with a value.
    """
    columns = {**{node: value[None] for node, value in values.items()}, **(states or {})}
    groups = {}
    for index, nodes in model.ground.split_by_group(columns, relevant).items():
        shape, positions = model.ground.shapes[index], [node - int(model.ground.offsets[index]) for node in nodes]
        first = next((columns[node] for node in nodes if node in (states or {})), columns[nodes[0]])
        flat = first.new_zeros(len(first), math.prod(shape), *first.shape[1:])
        mask = torch.zeros(math.prod(shape), dtype=torch.bool, device=first.device)
        flat[:, positions] = torch.stack([columns[node].expand_as(first) for node in nodes], 1)
        mask[positions] = True
        groups[index] = flat.reshape(-1, *shape, *first.shape[1:]), mask.reshape(1, *shape)
    return groups


@dataclass
class ExecutionState:
    """The state of one run of a plan: the parameters, the known values, the number of words, and the values so far.

    `positions` contains the positions of a stack's words if they are not `0 .. n - 1`. `changes` are functions of the
    values of groups. `is_multi_device` is true if some parameters are not on the device of the inputs.
    """

    network: Network
    layout: TensorLayout
    parameters: Mapping[str, Tensor]
    known: Mapping[int, Tensor]
    word_counts: Mapping[str, int]
    present: Mapping[str, Tensor]
    training: bool
    values: dict[int, Tensor]
    dtype: torch.dtype
    device: torch.device
    patched: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    attention_rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    attention_weights: dict[int, Tensor | None] = field(default_factory=dict)
    changes: ValueChanges = field(default_factory=dict)
    positions: Mapping[str, Tensor] = field(default_factory=dict)
    _aranges: dict[int, Tensor] = field(default_factory=dict)
    mask_cache: dict[object, Tensor] = field(default_factory=dict)  # computed once for all slices
    rotary: dict[Any, Any] = field(default_factory=dict)  # another cache: rotations and score biases
    is_multi_device: bool = False
    reach_tables: Mapping[Reach, Tensor] = field(default_factory=dict)  # the masks of reaches that are tables

    @property
    def log_dtype(self) -> torch.dtype:
        """The type of log probabilities: at least float32, because half precision overflows and rounds too much."""
        return torch.promote_types(self.dtype, torch.float32)

    def arange(self, n: int) -> Tensor:
        """The numbers `0 .. n - 1`."""
        if n not in self._aranges:
            self._aranges[n] = torch.arange(n, device=self.device)
        return self._aranges[n]


def move_to_device(
    state: ExecutionState, context: EvalContext, parents: Sequence[Tensor]
) -> tuple[EvalContext, list[Tensor]]:
    """The context and the parents of a TPM, all on the device where its node is computed."""
    device = _choose_device(state, context, parents)
    read_indices = {slot: value.to(device) for slot, value in context.read_indices.items()}
    mask = {slot: value.to(device) for slot, value in context.mask.items()}
    missing = {k: value.to(device) for k, value in context.missing.items()}
    context = replace(context, word=context.word.to(device), read_indices=read_indices, mask=mask, missing=missing)
    return context, [parent.to(device) for parent in parents]


def _choose_device(state: ExecutionState, context: EvalContext, parents: Sequence[Tensor]) -> torch.device:
    """The device of the node's parameters; without parameters, the device of its largest parent."""
    for value in context.parameters.values():
        return value.device
    greatest = max([parent.numel() for parent in parents], default=0)
    return next((parent.device for parent in reversed(parents) if parent.numel() == greatest), state.device)


def lay_out_value(state: ExecutionState, index: int, value: Tensor, event_shape: Sequence[int] | None = None) -> Tensor:
    """Reshape a value `[batch, *plates, word, *shape]`, with or without batch, to the layout.

    The shape is `event_shape`, by default that of the group, or () for states.
    """
    spec = state.network.specs[index]
    group, layout = spec.group, state.layout
    value_shape = tuple(event_shape) if event_shape is not None else spec.shape if value.is_floating_point() else ()
    rank = len(value_shape) + len(group.plates) + (group.word_stack is not None)
    value = value if value.dim() > rank else value.unsqueeze(0)
    shape = [1] * layout.batch_dim + [value.shape[0]] + [1] * (len(layout.plates) + 1)
    for k, plate in enumerate(group.plates):
        shape[layout.axis(plate)] = value.shape[1 + k]
    if group.word_stack is not None:
        shape[layout.word_dim] = value.shape[1 + len(group.plates)]
    return value.reshape(*shape, *value_shape)


def get_layout_sizes(network: Network, spec: NodeSpec) -> list[int]:
    """The sizes of the dims of plates in the values of a group; 1 for plates that the group does not have."""
    return [size if plate in spec.group.plates else 1 for plate, size in network.graph.plate_sizes.items()]


def gates_to_changes(
    network: Network, gates: Mapping[int, Tensor], targets: Mapping[int, ValueChange] = MappingProxyType({})
) -> ValueChanges:
    """Products of the values of groups with gates `[batch, *plates]`, as changes of a request.

    A group with a target has the target where the gate is 0, and points between it and the value for other gates.
    """
    changes: dict[int, list[ValueChange]] = {}
    for index, gate in gates.items():
        spec, target = network.specs[index], targets.get(index)
        factor = gate.reshape(len(gate), *get_layout_sizes(network, spec), 1, *[1] * len(spec.shape))

        def multiply(
            value: Tensor, word: int | None, factor: Tensor = factor, target: ValueChange | None = target
        ) -> Tensor:
            return value * factor if target is None else torch.lerp(target(value, word), value, factor)

        changes[index] = [multiply]
    return changes


def lay_out_known(state: ExecutionState, index: int, value: Tensor) -> Tensor:
    """Reshape a given value to the layout, states as `int64`, with zeros at padding."""
    value = lay_out_value(state, index, value if value.is_floating_point() else value.long())
    return zero_padding(state, state.network.specs[index].group.word_stack, value)


def enumerate_states(state: ExecutionState, index: int) -> Tensor:
    """All states of an enumerated group, along its dim of the layout."""
    position = state.layout.enumerated.index(index)
    shape = [1] * state.layout.rank
    shape[position] = -1
    return state.arange(state.network.count_states(index, state.word_counts)).reshape(shape)


def get_known_value(state: ExecutionState, index: int) -> Tensor | None:
    """The value of a known or enumerated group, as its children receive it; None if it must be computed."""
    spec = state.network.specs[index]
    if index not in state.known and index not in state.layout.enumerated:
        return None
    value = state.known[index] if index in state.known else enumerate_states(state, index)
    if spec.tpm.kind != "discrete" or value.is_floating_point():
        return value
    has_values = type(spec.tpm).emit is not TPM.emit  # else the children receive the state
    value = spec.tpm.emit(build_context(state, spec), value) if has_values else value
    return state.layout.pad_dims(value, len(spec.shape))


def gather_parents(state: ExecutionState, spec: NodeSpec, word: int | None = None) -> tuple[EvalContext, list[Tensor]]:
    """The context of a TPM and the value in each of its slots, aligned with its words.

    Args:
        state: The run.
        spec: The node group.
        word: The word of a scan; None for all words at once.

    Returns:
        The context, and for each slot a value `[*layout, *collected, *shape]`.

    Raises:
        UnsupportedError: A continuous random parent has no value.
    """
    if spec.is_wordwise and word is None:
        context, values = build_context(state, spec), state.values
        parents = [
            values[parent.index] if parent.index in values else _get_parent_value(state, parent)
            for parent in spec.parents
        ]
        return move_to_device(state, context, parents) if state.is_multi_device else (context, parents)
    read_indices: dict[str, Tensor] = {}
    mask: dict[str, Tensor] = {}
    missing: dict[int, Tensor] = {}
    parents = []
    for k, parent in enumerate(spec.parents):
        value = _get_parent_value(state, parent)
        stack = state.network.specs[parent.index].group.word_stack
        if stack is not None and not (parent.pick and WORD in dict(parent.pick)):
            value = _select_words(state, parent, value, stack, word)  # first: selectors pick for the child's word
        for plate, selector in parent.pick:
            value = pick_entry(state, value, state.layout.axis(plate), selector, word)
            if plate == WORD:
                value = _zero_out_of_reach(state, spec, parent, value, selector)
        plates = [plate for plate in parent.over if plate != WORD]
        if plates:
            value = _collect_plates(state, value, plates)
        if parent.over:
            read_indices[parent.slot], mask[parent.slot] = _get_indices_and_mask(state, spec, parent, word)
        if spec.tpm_parents[k].is_optional:
            missing[k] = get_missing_mask(state, parent, word)
        parents.append(value)
    context = build_context(state, spec, read_indices, mask, missing, word)
    return move_to_device(state, context, parents) if state.is_multi_device else (context, parents)


def _collect_plates(state: ExecutionState, value: Tensor, plates: Sequence[str]) -> Tensor:
    """A value with the dims of some plates after those of the layout, and size 1 in their place: a view."""
    rank, axes = state.layout.rank, [state.layout.axis(plate) for plate in plates]
    remaining = [d for d in range(rank) if d not in axes]
    sizes = [1 if d in axes else n for d, n in enumerate(value.shape[:rank])]
    value = value.permute(*remaining, *axes, *range(rank, value.dim()))
    return value.reshape(*sizes, *value.shape[len(remaining) :])


def _get_parent_value(state: ExecutionState, parent: ParentSpec) -> Tensor:
    """The value of a parent at all its words."""
    value = state.values.get(parent.index)
    if value is None:  # its value was released, as no later component reads it
        value = get_known_value(state, parent.index)
    if value is None:
        if parent.index not in state.network.graph.recurrent:  # else, in a scan, no word of it is computed yet
            raise unset_parent_error(state.network.specs[parent.index].group.name)
        value = get_initial_value(state, parent)
    return value


def find_word_picks(state: ExecutionState, spec: NodeSpec) -> list[tuple[tuple[str, int], ...]]:
    """For each parent of a group, the picks whose selector has given states that differ between words.

    The list is empty if no collection of words has such a pick. (The states of an enumerated selector do not differ.)
    """
    axis = state.layout.word_dim
    picks = [tuple(pick for pick in parent.pick if state.values[pick[1]].shape[axis] > 1) for parent in spec.parents]
    return picks if any(p and parent.over == (WORD,) for p, parent in zip(picks, spec.parents, strict=True)) else []


def get_initial_value(state: ExecutionState, parent: ParentSpec) -> Tensor:
    """The value before the first word: zero, or state 0."""
    parent_spec = state.network.specs[parent.index]
    dtype = torch.long if parent_spec.tpm.is_index_valued else state.dtype
    return torch.zeros([1] * state.layout.rank + list(parent_spec.shape), dtype=dtype, device=state.device)


def _zero_out_of_reach(
    state: ExecutionState, spec: NodeSpec, parent: ParentSpec, value: Tensor, selector: int
) -> Tensor:
    """Set the value of a picked word to zero if it is out of reach; such a state has probability zero."""
    stack = state.network.specs[parent.index].group.word_stack or ""
    n = state.word_counts[spec.group.word_stack] if spec.group.word_stack is not None else 1
    is_read = _build_reach_mask(state, parent, n, state.word_counts[stack])
    selected = state.values[selector]
    word = state.arange(n)
    inside = is_read[word, selected]
    return value * inside.reshape(*inside.shape, *[1] * (value.dim() - inside.dim()))


def _select_words(state: ExecutionState, parent: ParentSpec, value: Tensor, stack: str, word: int | None) -> Tensor:
    """The value of a parent at the words of its reach: aligned with the child's words, or in a collection dim."""
    axis = state.layout.word_dim
    n = value.shape[axis]
    match parent.reach.kind:
        case "same":
            return value if word is None else value.narrow(axis, word if n > 1 else 0, 1)
        case "first":
            return value.narrow(axis, 0, 1)
        case "last":
            return _select_last_word(state, value, stack)
        case "rest":  # the first word receives zero
            value = value.expand(*value.shape[:axis], state.word_counts[stack], *value.shape[axis + 1 :])
            zero = torch.zeros_like(value.narrow(axis, 0, 1))
            if word is not None:
                return value.narrow(axis, word, 1) if word else zero
            return torch.cat([zero, value.narrow(axis, 1, state.word_counts[stack] - 1)], axis)
        case "before" | "after":
            count = state.word_counts[stack]
            value = zero_padding(state, stack, value)
            value = value.expand(*value.shape[:axis], count, *value.shape[axis + 1 :])
            zero = torch.zeros_like(value.narrow(axis, 0, 1))
            is_before = parent.reach.kind == "before"
            if word is not None:
                neighbour = word - 1 if is_before else word + 1
                return value.narrow(axis, neighbour, 1) if 0 <= neighbour < count else zero
            neighbours = value.narrow(axis, 0 if is_before else 1, count - 1)
            value = torch.cat([zero, neighbours] if is_before else [neighbours, zero], axis)
            for index in state.layout.neighbours:  # the state of a choice on which the neighbour depends is another dim
                dim = state.layout.enumerated.index(index)
                value = value.transpose(dim, state.layout.neighbour_dim(index)) if value.shape[dim] > 1 else value
            return value
        case _:
            return value.unsqueeze(axis)


def get_missing_mask(state: ExecutionState, parent: ParentSpec, word: int | None = None) -> Tensor:
    """The words without an optional parent, in the layout: `[*layout]` with the dims of batch and word."""
    layout, stack = state.layout, state.network.specs[parent.index].group.word_stack or ""
    n, step = state.word_counts[stack], {"before": -1, "after": 1}.get(parent.reach.kind, 0)
    neighbour = state.arange(n) + step
    inside = (neighbour >= 0) & (neighbour < n) if step else neighbour > 0  # "rest": the first word has no parent
    missing = ~inside.reshape(*[1] * (layout.rank - 1), n)
    present = get_present_mask(state, stack) if step else None
    if present is not None:
        missing = missing | ~present.index_select(layout.word_dim, neighbour.clamp(0, n - 1))
    return missing if word is None else missing.narrow(layout.word_dim, word, 1)


def get_present_mask(state: ExecutionState, stack: str | None) -> Tensor | None:
    """The mask of words, false for padding, in the layout; None without padding, or for a group without words."""
    if stack is None or stack not in state.present:
        return None
    present, layout = state.present[stack], state.layout
    return present.reshape(*[1] * layout.batch_dim, present.shape[0], *[1] * len(layout.plates), present.shape[1])


def zero_padding(state: ExecutionState, stack: str | None, value: Tensor) -> Tensor:
    """A value with zero, or state 0, at padding."""
    present = get_present_mask(state, stack)
    if present is None:
        return value
    present = present.reshape(*present.shape, *[1] * (value.dim() - present.dim())).to(value.device)
    return torch.where(present, value, value.new_zeros(()))


def _select_last_word(state: ExecutionState, value: Tensor, stack: str) -> Tensor:
    """The value at the last word of each sentence before padding, `[*layout, *shape]` with one word."""
    axis = state.layout.word_dim
    if stack not in state.present:
        return value.narrow(axis, value.shape[axis] - 1, 1)
    # The running count of words is maximal from the last word on, and argmax returns the first maximum.
    last = state.present[stack].long().cumsum(-1).argmax(-1).to(value.device)
    shape = [1] * value.dim()
    shape[state.layout.batch_dim] = -1
    idx = last.reshape(shape)
    full = broadcast_shapes(idx.shape, (*value.shape[:axis], 1, *value.shape[axis + 1 :]))
    return value.expand(*full[:axis], value.shape[axis], *full[axis + 1 :]).gather(axis, idx.expand(full))


def _get_indices_and_mask(
    state: ExecutionState, spec: NodeSpec, parent: ParentSpec, word: int | None
) -> tuple[Tensor, Tensor]:
    """The indices of the entries of a collection, and the mask of those on which each word depends."""
    network = state.network
    if WORD not in parent.over:
        size = network.graph.plate_sizes[parent.over[-1]]
        if size not in state.mask_cache:
            state.mask_cache[size] = torch.ones(size, dtype=torch.bool, device=state.device)
        return state.arange(size), state.mask_cache[size]
    stack = network.specs[parent.index].group.word_stack or ""
    m = state.word_counts[stack]
    key = parent.reach, stack, spec.group.word_stack, word
    if key not in state.mask_cache:
        n = spec.group.count_words(state.word_counts)
        mask = _build_reach_mask(state, parent, n, m)
        mask = mask if word is None else mask[word : word + 1]
        if stack in state.present:
            present = state.present[stack]
            mask = mask & present.reshape(present.shape[0], *[1] * len(state.layout.plates), 1, m)
            mask = mask | _find_fully_masked_padding(state, spec, mask, word)
        state.mask_cache[key] = mask
    return state.arange(m), state.mask_cache[key]


def _find_fully_masked_padding(state: ExecutionState, spec: NodeSpec, mask: Tensor, word: int | None) -> Tensor:
    """The padding that depends on no word. It depends on all words instead, because the softmax of an empty row is NaN.

    No value depends on them, because no word depends on padding.
    """
    is_fully_masked = ~mask.any(-1, keepdim=True)
    if spec.group.word_stack not in state.present:
        return torch.zeros_like(is_fully_masked)
    present = state.present[spec.group.word_stack or ""]
    present = present if word is None else present[:, word : word + 1]
    return is_fully_masked & ~present.reshape(present.shape[0], *[1] * len(state.layout.plates), -1, 1)


def _build_reach_mask(state: ExecutionState, parent: ParentSpec, n: int, m: int) -> Tensor:
    """The mask `[n, m]` of the words on which each word depends."""
    if parent.reach.kind == "mask":
        table = state.reach_tables.get(parent.reach)
        return torch.tensor(parent.reach.table, device=state.device) if table is None else table.to(state.device)
    i, j = state.arange(n), state.arange(m)
    mask: Tensor = parent.reach.has_arrow(i[:, None], j[None, :], m)
    return mask


def pick_entry(state: ExecutionState, value: Tensor, axis: int, selector: int, word: int | None = None) -> Tensor:
    """The entry of a dim that a selector picks; a view if the selector is enumerated.

    The states of an enumerated selector are 0, 1, ... along its dim. To pick entry s in state s for all s, the picked
    dim becomes the selector's dim: this is a transpose, not a gather.
    """
    if selector in state.layout.enumerated and selector not in state.patched:
        position = state.layout.enumerated.index(selector)
        if value.shape[position] == 1:
            return value.transpose(position, axis)
    selected = state.values[selector]
    if word is not None and selected.shape[state.layout.word_dim] > 1:
        selected = selected.narrow(state.layout.word_dim, word, 1)
    extra = value.dim() - selected.dim()
    idx = selected.reshape(*selected.shape, *[1] * extra)
    full = broadcast_shapes((*value.shape[:axis], 1, *value.shape[axis + 1 :]), idx.shape)
    return value.expand(*full[:axis], value.shape[axis], *full[axis + 1 :]).gather(axis, idx.expand(full))


def build_context(
    state: ExecutionState,
    spec: NodeSpec,
    read_indices: Mapping[str, Tensor] | None = None,
    mask: Mapping[str, Tensor] | None = None,
    missing: Mapping[int, Tensor] | None = None,
    word: int | None = None,
) -> EvalContext:
    """The context of a group: its parameters in the layout, its positions, and the indices and masks of the caller."""
    layout, group, count = state.layout, spec.group, len(spec.group.plates)
    parameters = {name: state.parameters[f"{spec.param_prefix}.{name}"] for name in spec.parameters}
    if count:
        for name, stored in parameters.items():
            shape = [1] * (1 + len(layout.plates) + 1)
            for plate, size in zip(group.plates, stored.shape, strict=False):
                shape[1 + layout.plates.index(plate)] = size
            parameters[name] = stored.reshape(*shape, *stored.shape[count:])
    if word is not None:
        positions = torch.full((1,), word, device=state.device)
    elif group.word_stack is not None and group.word_stack in state.positions:
        positions = state.positions[group.word_stack]
    else:
        positions = state.arange(group.count_words(state.word_counts))
    rotary = state.rotary if word is None else {}
    return EvalContext(
        parameters, positions, read_indices or {}, mask or {}, state.training, state.dtype, rotary, missing or {}
    )

"""One run of the compiled net: what it is asked (`ExecutionRequest`), how its values lie (`TensorLayout`), its state (`ExecutionState`).

Then what a TPM sees in it (`gather_parents`): where its family stands, and the value in each slot, aligned with its own words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bnet_transformer._core.checks import set_frozen
from bnet_transformer._core.naming import WORD, Reach
from bnet_transformer.compiler.plan import unset_parent_error
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.tpm import EvalContext

StackTensors = Tensor | Mapping[str, Tensor]
NodePatches = Mapping[str, tuple[Tensor, Tensor]]  # for some nodes of a family: values, and which nodes


@dataclass(frozen=True)
class TensorLayout:
    """Where things lie: the enumerated families, then the batch, the plates of the net, the word."""

    enumerated: tuple[int, ...]
    plates: tuple[str, ...]
    batch_dim: int = field(init=False, compare=False)  # plain fields: torch.compile cannot trace a cached property
    word_dim: int = field(init=False, compare=False)
    rank: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        batch = len(self.enumerated)
        set_frozen(self, batch_dim=batch, word_dim=batch + 1 + len(self.plates), rank=batch + 2 + len(self.plates))

    def axis(self, plate: str) -> int:
        """The dim of a plate, or of the word."""
        return self.word_dim if plate == WORD else self.batch_dim + 1 + self.plates.index(plate)

    def pad_dims(self, value: Tensor, event_dim: int) -> Tensor:
        """A value with all dims before its last `event_dim`: those that a TPM left out lead with size 1."""
        missing = self.rank + event_dim - value.dim()
        return value.reshape(*[1] * missing, *value.shape) if missing else value


class ValidatedInputs(NamedTuple):
    """The value of every input family with its name in messages, the words of each stack, the batch, the device."""

    values: dict[int, tuple[str, Tensor]]
    word_counts: dict[str, int]
    batch: int
    device: torch.device


@dataclass(frozen=True)
class ExecutionRequest:
    """What one run of the compiled net computes: the families that are wanted, the sentences, the interventions.

    Values are `[batch, *plates, word, *shape]`, states `[batch, *plates, word]`; a batch of 1 holds for all sentences.

    Args:
        outputs: Families whose values are computed; of a random one, what its distribution is made of.
        x: The words of each stack, or the `ValidatedInputs` that `Module.inputs` made of them.
        mask: Which words are present, `[batch, word]` for each stack; all by default.
        given: Values of further input families.
        do: Values of families that are set.
        observed: Values of random families that were seen. They act as `do` does; only messages tell them apart.
        patched: Values for some nodes of a family, and which nodes, `[batch, *plates, word]`.
        attention_rows: Attention weights by which some nodes mix, `[batch, *plates, word, word read]`, and which nodes.
        gates: Factors of the values of families, `[batch, *plates]`; zero shuts a head off.
        perturbations: What is added to the values of families (by their numbers), in the layout of the run.
        enumerate_too: Choices that are enumerated though no value depends on them.
        deferred: Families that are not computed, though all that they read is.
        record_attention: Families whose `P(j | i)` is kept.
        training: Whether TPMs are in training mode; the module's own mode by default.
        check_values: Whether states, ids and masks are looked at, to refuse wrong ones; the module's mode by default.
    """

    outputs: tuple[str, ...]
    x: StackTensors | ValidatedInputs | None = None
    mask: StackTensors | None = None
    given: Mapping[str, Tensor] | None = None
    do: Mapping[str, Tensor] | None = None
    observed: Mapping[str, Tensor] | None = None
    patched: NodePatches | None = None
    attention_rows: NodePatches | None = None
    gates: Mapping[str, Tensor] | None = None
    perturbations: Mapping[int, Tensor] | None = None
    enumerate_too: frozenset[int] = frozenset()
    deferred: frozenset[int] = frozenset()
    record_attention: frozenset[int] = frozenset()
    training: bool | None = None
    check_values: bool | None = None


@dataclass
class ExecutionState:
    """One run of a plan: the parameters, what is known, the words of each stack, and the values so far.

    `positions` say where the words of a stack stand in their sentence, where they are not `0 .. n - 1`; by `gates` the
    values of a family are multiplied, and its `perturbations` are added to them. Some parameters may lie `is_multi_device` from the
    inputs, on other devices.
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
    gates: dict[int, Tensor] = field(default_factory=dict)
    perturbations: Mapping[int, Tensor] = field(default_factory=dict)
    positions: Mapping[str, Tensor] = field(default_factory=dict)
    _aranges: dict[int, Tensor] = field(default_factory=dict)
    mask_cache: dict[tuple[object, ...], Tensor] = field(default_factory=dict)  # made once for all slices
    rotary: dict[Any, Any] = field(default_factory=dict)  # so too
    is_multi_device: bool = False
    reach_tables: Mapping[Reach, Tensor] = field(default_factory=dict)  # of reaches that are told by one
    check_values: bool = True  # whether states, ids and masks are looked at

    @property
    def log_dtype(self) -> torch.dtype:
        """The type of log probabilities: a half is too coarse for them, and too narrow."""
        return torch.promote_types(self.dtype, torch.float32)

    def count_states(self, index: int) -> int:
        """How many states a discrete family has; the words that it may read, where its state is a word."""
        return self.network.count_states(index, self.word_counts)

    def arange(self, n: int) -> Tensor:
        """The numbers `0 .. n - 1`."""
        if n not in self._aranges:
            self._aranges[n] = torch.arange(n, device=self.device)
        return self._aranges[n]


def move_to_device(
    state: ExecutionState, context: EvalContext, parents: Sequence[Tensor]
) -> tuple[EvalContext, list[Tensor]]:
    """What a TPM sees, all of it where its node is computed."""
    device = _choose_device(state, context, parents)
    read_indices = {slot: value.to(device) for slot, value in context.read_indices.items()}
    mask = {slot: value.to(device) for slot, value in context.mask.items()}
    return replace(context, word=context.word.to(device), read_indices=read_indices, mask=mask), [
        parent.to(device) for parent in parents
    ]


def _choose_device(state: ExecutionState, context: EvalContext, parents: Sequence[Tensor]) -> torch.device:
    """The device of a node's own parameters; else that of the greatest of what it reads, the last of several."""
    for value in context.parameters.values():
        return value.device
    greatest = max([parent.numel() for parent in parents], default=0)
    return next((parent.device for parent in reversed(parents) if parent.numel() == greatest), state.device)


def enumerate_states(state: ExecutionState, index: int) -> Tensor:
    """All states of an enumerated family, along its own dim."""
    place = state.layout.enumerated.index(index)
    shape = [1] * state.layout.rank
    shape[place] = -1
    return state.arange(state.count_states(index)).reshape(shape)


def get_known_value(state: ExecutionState, index: int) -> Tensor | None:
    """The value of a family that is known or enumerated, as its children receive it; None of one to be computed."""
    member = state.network.specs[index]
    if index not in state.known and index not in state.layout.enumerated:
        return None
    found = state.known[index] if index in state.known else enumerate_states(state, index)
    discrete = member.tpm.kind == "discrete" and not found.is_floating_point()
    return pad_dims(state, member, member.tpm.emit(build_context(state, member), found)) if discrete else found


def pad_dims(state: ExecutionState, spec: NodeSpec, value: Tensor) -> Tensor:
    """A value with all dims of the layout: those that a TPM left out lead with size 1."""
    return state.layout.pad_dims(value, len(spec.shape))


def gather_parents(state: ExecutionState, spec: NodeSpec, word: int | None = None) -> tuple[EvalContext, list[Tensor]]:
    """What a TPM sees: where it stands, then the value in each slot, aligned. `word` picks one word of a scan."""
    read_indices: dict[str, Tensor] = {}
    mask: dict[str, Tensor] = {}
    parents = []
    for given in spec.parents:
        found = state.values.get(given.index)
        if found is None:  # a value that is read no more in the plan was dropped
            found = get_known_value(state, given.index)
        if found is None:
            if given.index not in state.network.graph.recurrent:  # else it is a word that is not there yet
                raise unset_parent_error(state.network.specs[given.index].group.name)
            found = get_initial_value(state, given)
        stack = state.network.specs[given.index].group.word_stack
        if stack is not None and WORD not in dict(given.pick):
            found = _select_words(
                state, spec, given, found, stack, word
            )  # first: a selector picks for the child's word
        for plate, selector in given.pick:
            found = _pick_entry(state, found, state.layout.axis(plate), selector, word)
            if plate == WORD:
                found = _zero_out_of_reach(state, spec, given, found, selector)
        for plate in reversed(given.over):
            if plate != WORD:
                found = found.unsqueeze(state.layout.rank).transpose(state.layout.axis(plate), state.layout.rank)
        if given.over:
            read_indices[given.slot], mask[given.slot] = _get_indices_and_mask(state, spec, given, word)
        parents.append(found)
    at = build_context(state, spec, read_indices, mask, word)
    return move_to_device(state, at, parents) if state.is_multi_device else (at, parents)


def get_initial_value(state: ExecutionState, parent: ParentSpec) -> Tensor:
    """What is read of a word that is not there yet: zero, or state 0."""
    parent_spec = state.network.specs[parent.index]
    dtype = torch.long if parent_spec.tpm.is_index_valued else state.dtype
    return torch.zeros([1] * state.layout.rank + list(parent_spec.shape), dtype=dtype, device=state.device)


def _zero_out_of_reach(
    state: ExecutionState, spec: NodeSpec, parent: ParentSpec, value: Tensor, selector: int
) -> Tensor:
    """A picked word that is out of reach gives zero (it has probability zero)."""
    stack = state.network.specs[parent.index].group.word_stack or ""
    n = state.word_counts[spec.group.word_stack] if spec.group.word_stack is not None else 1
    is_read = _build_reach_mask(state, parent, n, state.word_counts[stack])
    selected = state.values[selector]
    word = state.arange(n)
    inside = is_read[word, selected]
    return value * inside.reshape(*inside.shape, *[1] * (value.dim() - inside.dim()))


def _select_words(
    state: ExecutionState, spec: NodeSpec, parent: ParentSpec, value: Tensor, stack: str, word: int | None
) -> Tensor:
    """A parent's value at the words that are read: aligned with the child's, or as a collection behind them."""
    axis = state.layout.word_dim
    n = value.shape[axis]
    match parent.reach.kind:
        case "same":
            return value if word is None else value.narrow(axis, word if n > 1 else 0, 1)
        case "first":
            return value.narrow(axis, 0, 1)
        case "last":
            return _select_last_word(state, value, stack)
        case "before" | "rest":  # the first word reads nothing, and the others the word before them, or their own
            back = int(parent.reach.kind == "before")
            value = zero_padding(state, stack, value) if back else value
            value = value.expand(*value.shape[:axis], state.word_counts[stack], *value.shape[axis + 1 :])
            zero = torch.zeros_like(value.narrow(axis, 0, 1))
            if word is not None:
                return value.narrow(axis, word - back, 1) if word else zero
            return torch.cat([zero, value.narrow(axis, 1 - back, state.word_counts[stack] - 1)], axis)
        case _:
            return value.unsqueeze(axis)


def get_present_mask(state: ExecutionState, stack: str | None) -> Tensor | None:
    """Which words of a stack are present, in the layout; None where all are, or of a family without words."""
    if stack is None or stack not in state.present:
        return None
    present, layout = state.present[stack], state.layout
    return present.reshape(*[1] * layout.batch_dim, present.shape[0], *[1] * len(layout.plates), present.shape[1])


def zero_padding(state: ExecutionState, stack: str | None, value: Tensor) -> Tensor:
    """A value that is zero, or state 0, at the words that are absent."""
    there = get_present_mask(state, stack)
    if there is None:
        return value
    there = there.reshape(*there.shape, *[1] * (value.dim() - there.dim())).to(value.device)
    return torch.where(there, value, value.new_zeros(()))


def _select_last_word(state: ExecutionState, value: Tensor, stack: str) -> Tensor:
    """The last word that is present."""
    axis = state.layout.word_dim
    if stack not in state.present:
        return value.narrow(axis, value.shape[axis] - 1, 1)
    last = state.present[stack].long().cumsum(-1).argmax(-1).to(value.device)
    shape = [1] * value.dim()
    shape[state.layout.batch_dim] = -1
    where = last.reshape(shape)
    lead = torch.broadcast_shapes(where.shape, (*value.shape[:axis], 1, *value.shape[axis + 1 :]))
    return value.expand(*lead[:axis], value.shape[axis], *lead[axis + 1 :]).gather(axis, where.expand(lead))


def _get_indices_and_mask(
    state: ExecutionState, spec: NodeSpec, parent: ParentSpec, word: int | None
) -> tuple[Tensor, Tensor]:
    """For a collection: the indices of its entries, and which of them each word reads."""
    network = state.network
    if WORD not in parent.over:
        size = network.graph.plate_sizes[parent.over[-1]]
        return state.arange(size), torch.ones(size, dtype=torch.bool, device=state.device)
    stack = network.specs[parent.index].group.word_stack or ""
    m = state.word_counts[stack]
    key = parent.reach, stack, spec.group.word_stack, word
    if key not in state.mask_cache:
        state.mask_cache[key] = _build_mask(state, spec, parent, stack, word)
    return state.arange(m), state.mask_cache[key]


def _build_mask(state: ExecutionState, spec: NodeSpec, parent: ParentSpec, stack: str, word: int | None) -> Tensor:
    """Which words of a stack each word of a family reads, none that is absent."""
    m = state.word_counts[stack]
    n = 1 if spec.group.word_stack is None else state.word_counts[spec.group.word_stack]
    mask = _build_reach_mask(state, parent, n, m)
    mask = mask if word is None else mask[word : word + 1]
    if stack in state.present:
        present = state.present[stack]
        shape = (present.shape[0], *[1] * len(state.layout.plates), 1, m)
        mask = mask & present.reshape(shape)
        mask = mask | _find_fully_masked_padding(state, spec, mask, word)
    return mask


def _find_fully_masked_padding(state: ExecutionState, spec: NodeSpec, mask: Tensor, word: int | None) -> Tensor:
    """The padding words that may read nobody: they read everybody, and nobody reads them."""
    is_fully_masked = ~mask.any(-1, keepdim=True)
    if spec.group.word_stack not in state.present:
        return torch.zeros_like(is_fully_masked)
    present = state.present[spec.group.word_stack or ""]
    present = present if word is None else present[:, word : word + 1]
    return is_fully_masked & ~present.reshape(present.shape[0], *[1] * len(state.layout.plates), -1, 1)


def _build_reach_mask(state: ExecutionState, parent: ParentSpec, n: int, m: int) -> Tensor:
    """`[n, m]`: which words each word reads."""
    if parent.reach.kind == "mask":
        made = state.reach_tables.get(parent.reach)
        return torch.tensor(parent.reach.table, device=state.device) if made is None else made.to(state.device)
    i, j = state.arange(n), state.arange(m)
    mask: Tensor = parent.reach.has_arrow(i[:, None], j[None, :], m)
    return mask


def _pick_entry(state: ExecutionState, value: Tensor, axis: int, selector: int, word: int | None = None) -> Tensor:
    """The entry of a dim that a selector picks; a view where the selector is enumerated."""
    if selector in state.layout.enumerated and selector not in state.patched:
        place = state.layout.enumerated.index(selector)
        if value.shape[place] == 1:
            return value.transpose(place, axis)
    selected = state.values[selector]
    if word is not None and selected.shape[state.layout.word_dim] > 1:
        selected = selected.narrow(state.layout.word_dim, word, 1)
    extra = value.dim() - selected.dim()
    where = selected.reshape(*selected.shape, *[1] * extra)
    lead = torch.broadcast_shapes((*value.shape[:axis], 1, *value.shape[axis + 1 :]), where.shape)
    return value.expand(*lead[:axis], value.shape[axis], *lead[axis + 1 :]).gather(axis, where.expand(lead))


def build_context(
    state: ExecutionState,
    spec: NodeSpec,
    read_indices: Mapping[str, Tensor] | None = None,
    mask: Mapping[str, Tensor] | None = None,
    word: int | None = None,
) -> EvalContext:
    """Where a family stands, with its parameters among the dims of the layout; what it reads is told."""
    layout, family = state.layout, spec.group
    parameters = {}
    for name in spec.parameters:
        stored = state.parameters[f"{spec.param_prefix}.{name}"]
        if family.plates:
            shape = [1] * (1 + len(layout.plates) + 1)
            for k, plate in enumerate(family.plates):
                shape[1 + layout.plates.index(plate)] = stored.shape[k]
            stored = stored.reshape(*shape, *stored.shape[len(family.plates) :])
        parameters[name] = stored
    if word is not None:
        positions = torch.full((1,), word, device=state.device)
    elif family.word_stack is not None and family.word_stack in state.positions:
        positions = state.positions[family.word_stack]
    else:
        positions = state.arange(1 if family.word_stack is None else state.word_counts[family.word_stack])
    rotary = state.rotary if word is None else {}
    return EvalContext(parameters, positions, read_indices or {}, mask or {}, state.training, state.dtype, rotary)

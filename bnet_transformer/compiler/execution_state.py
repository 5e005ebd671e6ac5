"""One run of the compiled net: its request (`ExecutionRequest`), its layout (`TensorLayout`), its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bnet_transformer._core.checks import set_frozen
from bnet_transformer._core.naming import WORD, Reach
from bnet_transformer.declare import Network

StackTensors = Tensor | Mapping[str, Tensor]
NodePatches = Mapping[str, tuple[Tensor, Tensor]]  # by group: values, and a mask of the nodes that have them


@dataclass(frozen=True)
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
        batch = len(self.enumerated) + len(self.neighbours)
        set_frozen(self, batch_dim=batch, word_dim=batch + 1 + len(self.plates), rank=batch + 2 + len(self.plates))

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


class ValidatedInputs(NamedTuple):
    """Checked inputs: the value of each input group, the words of each stack, the batch size and the device."""

    values: dict[int, tuple[str, Tensor]]
    word_counts: dict[str, int]
    batch: int
    device: torch.device


@dataclass(frozen=True)
class ExecutionRequest:
    """What one run of the compiled net computes: the requested node groups, the sentences, the interventions.

    Values are `[batch, *plates, word, *shape]`, states `[batch, *plates, word]`; a batch of 1 is broadcast.

    Args:
        outputs: Groups to compute; for a random group, the parents of its distribution are computed.
        x: The words of each stack, or the result of `CompiledModule.validate_inputs`.
        mask: Booleans `[batch, word]` for each stack, true for words; by default there is no padding.
        given: Values of further input groups.
        do: Values of groups that are set.
        observed: Values of random groups that are observed. A run treats them like `do`; only messages differ.
        patched: Values for some nodes of a group, and the mask of these nodes, `[batch, *plates, word]`.
        attention_rows: Attention weights for some nodes, `[batch, *plates, word, word read]`, and their mask.
        gates: Factors by which values of groups are multiplied, `[batch, *plates]`; 0 turns a head off.
        perturbations: Tensors that are added to the values of groups (by index), in the layout of the run.
        enumerate_too: Choices to enumerate even if no value depends on them.
        has_chains: Whether a value may depend on a choice at its word and at the word before (or after), each of which
            then has a dim. By default such a value is an error.
        deferred: Groups that are not computed, although their parents are.
        record_attention: Groups whose `P(j | i)` is recorded.
        training: Whether TPMs are in training mode; by default the mode of the module.
        check_values: Whether to check that ids, states and masks are in range; by default the module's setting.
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
    has_chains: bool = False
    deferred: frozenset[int] = frozenset()
    record_attention: frozenset[int] = frozenset()
    training: bool | None = None
    check_values: bool | None = None


@dataclass
class ExecutionState:
    """The state of one run of a plan: the parameters, the known values, the number of words, and the values so far.

    `positions` contains the positions of a stack's words if they are not `0 .. n - 1`. The values of a group are
    multiplied by its `gates`, and its `perturbations` are added. `is_multi_device` is true if some parameters are not
    on the device of the inputs.
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
    mask_cache: dict[object, Tensor] = field(default_factory=dict)  # computed once for all slices
    rotary: dict[Any, Any] = field(default_factory=dict)  # another cache: rotations and score biases
    is_multi_device: bool = False
    reach_tables: Mapping[Reach, Tensor] = field(default_factory=dict)  # the masks of reaches that are tables
    check_values: bool = True  # whether the numbers of states, ids and masks are checked

    @property
    def log_dtype(self) -> torch.dtype:
        """The type of log probabilities: at least float32, because half precision overflows and rounds too much."""
        return torch.promote_types(self.dtype, torch.float32)

    def count_states(self, index: int) -> int:
        """The number of states of a discrete group; it is the number of words if the states are words."""
        return self.network.count_states(index, self.word_counts)

    def arange(self, n: int) -> Tensor:
        """The numbers `0 .. n - 1`."""
        if n not in self._aranges:
            self._aranges[n] = torch.arange(n, device=self.device)
        return self._aranges[n]

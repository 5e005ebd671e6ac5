"""One run of the compiled net: what it is asked (`ExecutionRequest`), how its values lie (`TensorLayout`), its state (`ExecutionState`).

Then what a TPM sees in it (`gather_parents`): where its family stands, and the value in each slot, aligned with its own words.
"""

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

"""One run of the compiled net: what it is asked (`Request`), how its values lie (`Layout`), its state (`Course`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bnet_transformer.axes import WORD, Reach
from bnet_transformer.errors import put
from bnet_transformer.network import Network

Values = Tensor | Mapping[str, Tensor]
SomeNodes = Mapping[str, tuple[Tensor, Tensor]]  # for some nodes of a family: values, and which nodes


@dataclass(frozen=True)
class Layout:
    """Where things lie: the enumerated families, then the batch, the plates of the net, the word."""

    enumerated: tuple[int, ...]
    plates: tuple[str, ...]
    batch: int = field(init=False, compare=False)  # plain fields: torch.compile cannot trace a cached property
    word: int = field(init=False, compare=False)
    rank: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        batch = len(self.enumerated)
        put(self, batch=batch, word=batch + 1 + len(self.plates), rank=batch + 2 + len(self.plates))

    def axis(self, plate: str) -> int:
        """The dim of a plate, or of the word."""
        return self.word if plate == WORD else self.batch + 1 + self.plates.index(plate)

    def full(self, value: Tensor, own: int) -> Tensor:
        """A value with all dims before its last `own`: those that a TPM left out lead with size 1."""
        missing = self.rank + own - value.dim()
        return value.reshape(*[1] * missing, *value.shape) if missing else value


class Inputs(NamedTuple):
    """The value of every input family with its name in messages, the words of each stack, the batch, the device."""

    values: dict[int, tuple[str, Tensor]]
    words: dict[str, int]
    batch: int
    device: torch.device


@dataclass(frozen=True)
class Request:
    """What one run of the compiled net computes: the families that are wanted, the sentences, the interventions.

    Values are `[batch, *plates, word, *shape]`, states `[batch, *plates, word]`; a batch of 1 holds for all sentences.

    Args:
        want: Families whose values are computed; of a random one, what its distribution is made of.
        x: The words of each stack, or the `Inputs` that `Module.inputs` made of them.
        mask: Which words are present, `[batch, word]` for each stack; all by default.
        given: Values of further input families.
        do: Values of families that are set.
        observed: Values of random families that were seen. They act as `do` does; only messages tell them apart.
        patched: Values for some nodes of a family, and which nodes, `[batch, *plates, word]`.
        rows: Attention weights by which some nodes mix, `[batch, *plates, word, word read]`, and which nodes.
        gates: Factors of the values of families, `[batch, *plates]`; zero shuts a head off.
        nudges: What is added to the values of families (by their numbers), in the layout of the run.
        enumerate_too: Choices that are enumerated though no value depends on them.
        left: Families that are not computed, though all that they read is.
        readings: Families whose `P(j | i)` is kept.
        training: Whether TPMs are in training mode; the module's own mode by default.
        check_values: Whether states, ids and masks are looked at, to refuse wrong ones; the module's mode by default.
    """

    want: tuple[str, ...]
    x: Values | Inputs | None = None
    mask: Values | None = None
    given: Mapping[str, Tensor] | None = None
    do: Mapping[str, Tensor] | None = None
    observed: Mapping[str, Tensor] | None = None
    patched: SomeNodes | None = None
    rows: SomeNodes | None = None
    gates: Mapping[str, Tensor] | None = None
    nudges: Mapping[int, Tensor] | None = None
    enumerate_too: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    readings: frozenset[int] = frozenset()
    training: bool | None = None
    check_values: bool | None = None


@dataclass
class Course:
    """One run of a plan: the parameters, what is known, the words of each stack, and the values so far.

    `places` say where the words of a stack stand in their sentence, where they are not `0 .. n - 1`; by `gates` the
    values of a family are multiplied, and its `nudges` are added to them. Some parameters may lie `apart` from the
    inputs, on other devices.
    """

    network: Network
    layout: Layout
    parameters: Mapping[str, Tensor]
    known: Mapping[int, Tensor]
    words: Mapping[str, int]
    present: Mapping[str, Tensor]
    training: bool
    values: dict[int, Tensor]
    dtype: torch.dtype
    device: torch.device
    patched: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    readings: dict[int, Tensor | None] = field(default_factory=dict)
    gates: dict[int, Tensor] = field(default_factory=dict)
    nudges: Mapping[int, Tensor] = field(default_factory=dict)
    places: Mapping[str, Tensor] = field(default_factory=dict)
    _counted: dict[int, Tensor] = field(default_factory=dict)
    masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict)  # made once for all slices
    turns: dict[Any, Any] = field(default_factory=dict)  # so too
    apart: bool = False
    tables: Mapping[Reach, Tensor] = field(default_factory=dict)  # of reaches that are told by one
    check_values: bool = True  # whether states, ids and masks are looked at

    @property
    def log_dtype(self) -> torch.dtype:
        """The type of log probabilities: a half is too coarse for them, and too narrow."""
        return torch.promote_types(self.dtype, torch.float32)

    def count_states(self, index: int) -> int:
        """How many states a discrete family has; the words that it may read, where its state is a word."""
        return self.network.count_states(index, self.words)

    def count(self, n: int) -> Tensor:
        """The numbers `0 .. n - 1`."""
        if n not in self._counted:
            self._counted[n] = torch.arange(n, device=self.device)
        return self._counted[n]

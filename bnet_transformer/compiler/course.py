"""One run of a plan: how its values lie, `[*enumerated, batch, *plates, word, *shape]`, and all that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bnet_transformer.axes import WORD, Reach
from bnet_transformer.network import Network


@dataclass(frozen=True)
class Layout:
    """Where things lie: the enumerated families, then the batch, the plates of the net, the word."""

    enumerated: tuple[int, ...]
    plates: tuple[str, ...]

    @cached_property
    def batch(self) -> int:
        return len(self.enumerated)

    @cached_property
    def word(self) -> int:
        return len(self.enumerated) + 1 + len(self.plates)

    @cached_property
    def rank(self) -> int:
        return self.word + 1

    def axis(self, plate: str) -> int:
        """The dim of a plate, or of the word."""
        return self.word if plate == WORD else self.batch + 1 + self.plates.index(plate)

    def full(self, value: Tensor, own: int) -> Tensor:
        """A value with all dims before its last `own`: those that a TPM left out lead with size 1."""
        missing = self.rank + own - value.dim()
        return value.reshape(*[1] * missing, *value.shape) if missing else value


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
    looks: bool = True  # at the numbers of what it is told

    @property
    def log_dtype(self) -> torch.dtype:
        """The type of log probabilities: a half is too coarse for them, and too narrow."""
        return torch.promote_types(self.dtype, torch.float32)

    def count(self, n: int) -> Tensor:
        """The numbers `0 .. n - 1`."""
        if n not in self._counted:
            self._counted[n] = torch.arange(n, device=self.device)
        return self._counted[n]

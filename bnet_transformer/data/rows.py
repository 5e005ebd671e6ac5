"""Arrays of real numbers, looked at once as a whole: which row is not sound, and which need no look at each example."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.data.task import Task


def suspect(task: Task, arrays: Sequence[object]) -> int | None:
    """The first row with a number that no example may have: not finite among words, infinite in what is observed.

    Arrays that are no real numbers, lie in a file or may not be written to are not looked at.
    """
    found: list[int] = []
    for place, array in enumerate(arrays):
        if _real(array):
            value = _tensor(array)
            off = ~value.isfinite() if place < len(task.stacks) else value.isinf()
            found += off.reshape(len(off), -1).any(1).nonzero()[:1].flatten().tolist()
    return min(found, default=None)


def rows_of(task: Task, arrays: Sequence[object]) -> dict[str, Tensor] | None:
    """Words and what is observed, by name, `[example, ...]`, whose rows are examples as they stand; None of others.

    They stand so where they are real numbers, words of one stack and its readouts.
    """
    of, *more = task.words.values()
    readouts = task.readouts
    plain = not more and of.states is None and all(m.tpm.kind == "continuous" for m in readouts)
    if not plain or len(arrays) != 1 + len(readouts) or not all(map(_real, arrays)):
        return None
    names = [of.stack, *(readout.family.name for readout in readouts)]
    return dict(zip(names, map(_tensor, arrays), strict=True))


def _real(array: object) -> bool:
    """True for real numbers in memory; those of a file stay there until they are wanted."""
    if isinstance(array, Tensor):
        return array.is_floating_point()
    owned = isinstance(array, np.ndarray) and not isinstance(array, np.memmap)
    return owned and array.dtype in (np.float32, np.float64) and array.flags.writeable  # type: ignore[attr-defined]


def _tensor(array: object) -> Tensor:
    return array.detach() if isinstance(array, Tensor) else torch.from_numpy(array)

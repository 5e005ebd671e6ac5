"""Arrays of real numbers, read once as a whole: their rows make minibatches without a look at each example."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.network import Member
from bnet_transformer.training.task import Task


def rows_of(task: Task, arrays: Sequence[object]) -> dict[str, Tensor] | None:
    """Words and what is observed, by name, `[example, ...]`; None where examples are to be read one by one.

    That is so of anything but real numbers for one stack of vectors and its readouts, and of what is not sound: the
    reading of examples tells which one is not.
    """
    if len(task.stacks) > 1 or len(arrays) != 1 + len(task.readouts) or not all(map(_real, arrays)):
        return None
    (of,) = task.words.values()
    found = [part.detach() if isinstance(part, Tensor) else torch.from_numpy(part) for part in arrays]
    words, *observed = found
    if of.states is not None or words.dim() < 2 or words.shape[2:] != of.member.shape or 0 in words.shape:
        return None
    if of.exact not in (None, words.shape[1]) or words.shape[1] > (of.longest or words.shape[1]):
        return None
    if not bool(words.isfinite().all()) or not all(map(_fits, task.readouts, observed, [words] * len(observed))):
        return None
    names = [of.stack, *(readout.family.name for readout in task.readouts)]
    return dict(zip(names, found, strict=True))


def _real(array: object) -> bool:
    """True for real numbers in memory; those of a file stay there until they are wanted."""
    if isinstance(array, Tensor):
        return array.is_floating_point()
    owned = isinstance(array, np.ndarray) and not isinstance(array, np.memmap)
    return owned and array.dtype in (np.float32, np.float64) and array.flags.writeable  # type: ignore[attr-defined]


def _fits(readout: Member, value: Tensor, words: Tensor) -> bool:
    """True where values are what a readout can be observed to be; NaN is not observed."""
    lead = words.shape[: 1 if readout.family.words is None else 2]
    sound = readout.tpm.kind == "continuous" and not readout.family.plates
    return sound and value.shape == (*lead, *readout.shape) and not bool(value.isinf().any())

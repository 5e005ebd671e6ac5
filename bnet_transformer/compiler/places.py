"""Where a node is computed, in a net whose parameters lie on several devices: there, and what it reads is brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bnet_transformer.compiler.course import Course
from bnet_transformer.tpm import At


def brought(course: Course, at: At, parents: Sequence[Tensor]) -> tuple[At, list[Tensor]]:
    """What a TPM sees, all of it where its node is computed."""
    device = _home(course, at, parents)
    read = {slot: value.to(device) for slot, value in at.read.items()}
    mask = {slot: value.to(device) for slot, value in at.mask.items()}
    return replace(at, word=at.word.to(device), read=read, mask=mask), [parent.to(device) for parent in parents]


def _home(course: Course, at: At, parents: Sequence[Tensor]) -> torch.device:
    """The device of a node's own parameters; else that of the greatest of what it reads, the last of several."""
    for value in at.parameters.values():
        return value.device
    greatest = max([parent.numel() for parent in parents], default=0)
    return next((parent.device for parent in reversed(parents) if parent.numel() == greatest), course.device)

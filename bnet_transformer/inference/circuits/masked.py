"""What a family comes to in many circuits at once: along a kept arrow a node sees what its parent came to in this run,
along any other what its parent is in the corrupt one.

Values lie as `[circuit, example, *plates, word, *shape]`. A table `[circuit, arrow]` says which arrows into a family
are kept; where a collection is read, each node may then see another one, `[..., i, j, *shape]`. That is made only where
it must be: not where all words see alike, nor by an attention, which mixes scores and weights instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.axes import WORD
from bnet_transformer.compiler.course import Course
from bnet_transformer.compiler.seeing import seen
from bnet_transformer.compiler.values import computed
from bnet_transformer.inference.circuits.arrows import Arrows, Into
from bnet_transformer.inference.sweeps.sparse_update import full_shape, summary
from bnet_transformer.network import Member
from bnet_transformer.tpm import At, Attention, Bilinear, Dot


@dataclass(frozen=True)
class Masked:
    """A family some of whose arrows are not kept, or the one word of it that is needed.

    `slots` has for each entry of each slot, `[1 or N, *plates, word, *over]`, the number of the arrow along which it is
    seen; -1 where nothing that differs is.
    """

    member: Member
    word: int | None
    slots: tuple[Tensor, ...]

    @classmethod
    def of(cls, course: Course, arrows: Arrows, index: int, word: int | None) -> Masked:
        """Find the arrow of each entry of each slot, by letting nodes see numbers in place of values."""
        member, offsets = course.network.members[index], arrows.ground.offsets
        none = Into(*[np.zeros(0, dtype=np.int64)] * 3)
        lookup = _Lookup(arrows.into.get(index, none))
        own, slots = _numbers(course, member, int(offsets[index]), word)[0], []
        for given in member.inputs:
            parent = course.network.members[given.parent]
            picks = {selector: course.values[selector] for _, selector in given.pick}
            numbers = _numbers(course, parent, int(offsets[given.parent]), None) + 1  # 0 is nobody
            told = replace(course, values={**picks, given.parent: numbers})
            _, (source,) = seen(told, replace(member, inputs=(given,)), word)
            target = own.reshape(*own.shape, *[1] * (source.dim() - 1 - own.dim()))
            slots.append(lookup(source[0] - 1, target))
        return cls(member, word, tuple(slots))

    @staticmethod
    def mixes(member: Member) -> bool:
        """True for an attention over words, whose scores and weights can be mixed of two runs."""
        plain = isinstance(member.tpm, Attention) and isinstance(member.tpm.score, Dot | Bilinear)
        return plain and all(given.over in ((), (WORD,)) for given in member.inputs)

    def value(self, course: Course, corrupt: Course, kept: Tensor) -> Tensor:
        """The value (of a random node log P, or its mean) in each circuit of a table `[circuit, arrow]`."""
        at, here = seen(course, self.member, self.word)
        _, there = seen(corrupt, self.member, self.word)
        random = self.member.tpm.is_random
        if self.mixes(self.member) and not bool(kept.all()):
            found = self._attended(at, here, there, kept)
        else:
            parents = [_seen(*each, kept) for each in zip(here, there, self.slots, strict=True)]
            found = summary(self.member, at, parents) if random else computed(course, self.member, at, parents)
        own = found.shape[-1:] if self.member.tpm.kind == "discrete" else self.member.shape
        found = course.layout.full(found, len(own))
        if self.member.family.index in course.rows:
            parents = [_seen(*each, kept) for each in zip(here, there, self.slots, strict=True)]
            found = self._by_rows(course, parents, found)
        return found

    def _attended(self, at: At, here: list[Tensor], there: list[Tensor], kept: Tensor) -> Tensor:
        """An attention whose scores, and then values, are mixed of both runs: no word needs keys of its own."""
        tpm = self.member.tpm
        assert isinstance(tpm, Attention)
        names = [given.slot for given in self.member.inputs]
        read = next(k for k, name in enumerate(names[:2]) if name.endswith("."))
        parents = [
            ours if k in (read, 2) else _seen(ours, theirs, slot, kept)
            for k, (ours, theirs, slot) in enumerate(zip(here, there, self.slots, strict=True))
        ]
        scores, mask = tpm.scores(at, *parents)
        which = _mask(self.slots[read], kept)
        if which is not None:
            other = [*parents]
            other[read] = there[read]
            scores = torch.where(which, scores, tpm.scores(at, *other)[0])
        weights = tpm.normaliser.weights(scores, mask)
        which = _mask(self.slots[2], kept)
        if which is None:
            return tpm.mix(weights, *parents)
        other = [*parents]
        other[2] = there[2]
        if tpm.residual:
            other[-1] = torch.zeros_like(other[-1])
        return tpm.mix(weights * which, *parents) + tpm.mix(weights * ~which, *other)

    def _by_rows(self, course: Course, parents: list[Tensor], found: Tensor) -> Tensor:
        """The same, but for the nodes whose row of attention is set."""
        rows, which = course.rows[self.member.family.index]
        if self.word is not None:
            rows, which = (each.narrow(course.layout.word, self.word, 1) for each in (rows, which))
        assert isinstance(self.member.tpm, Attention)
        return torch.where(which[..., None], self.member.tpm.mix(rows, *parents), found)


class _Lookup:
    """From the ids of both ends of an arrow to its number."""

    def __init__(self, into: Into) -> None:
        self.order = np.lexsort((into.sources, into.targets))
        self.scale = int(max(into.sources.max(initial=0), into.targets.max(initial=0))) + 1
        self.keys = (into.targets * self.scale + into.sources)[self.order]

    def __call__(self, source: Tensor, target: Tensor) -> Tensor:
        """The arrow from each source to each target, -1 where there is none."""
        inside = (source >= 0) & (source < self.scale) & (target < self.scale)
        wanted = torch.where(inside, target * self.scale + source, torch.full_like(source, -1)).numpy()
        if not len(self.keys):
            return torch.full(wanted.shape, -1)
        place = np.searchsorted(self.keys, wanted).clip(max=len(self.keys) - 1)
        return torch.from_numpy(np.where(self.keys[place] == wanted, self.order[place], -1))


def _numbers(course: Course, member: Member, offset: int, word: int | None) -> Tensor:
    """The ids of a family's nodes in the layout, `[1, 1, *plates, word]`."""
    shape = (1, 1, *full_shape(course, member))
    found = (torch.arange(int(np.prod(shape))) + offset).reshape(shape)
    return found if word is None else found.narrow(course.layout.word, word, 1)


def _seen(here: Tensor, there: Tensor, slot: Tensor, kept: Tensor) -> Tensor:
    """What is seen in a slot: of this run where the arrow is kept, of the corrupt one where it is not."""
    which = _mask(slot, kept)
    if which is None:
        return here
    for d in range(1, which.dim()):  # not one collection for each word (or head) where they all see alike
        if which.shape[d] > 1 and here.shape[d] == there.shape[d] == 1:
            which = _alike(which, slot >= 0, d)
    own = here.dim() - which.dim()
    return torch.where(which.reshape(*which.shape, *[1] * own), here, there)


def _mask(slot: Tensor, kept: Tensor) -> Tensor | None:
    """Which entries of a slot are seen in this run, `[circuit, *entries]`; None where all that differ are."""
    if bool(kept.all()):
        return None
    which = kept[:, slot.clamp(min=0)] & (slot >= 0)
    return None if bool((which | ~(slot >= 0)).all()) else which


def _alike(which: Tensor, there: Tensor, d: int) -> Tensor:
    """The same with one entry along a dim, where all entries along it that are there agree."""
    some, none = (each.any(d, keepdim=True) for each in (which, ~which & there))
    return which if bool((some & none).any()) else some

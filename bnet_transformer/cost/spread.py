"""Along which dims each value of the compiled reading spreads; a dim on which it does not depend has size 1.

A dim is a plate or `word`, `BATCH`, or the index of an enumerated family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bnet_transformer.axes import WORD
from bnet_transformer.network import Input, Member, Network
from bnet_transformer.tpm import Weight

BATCH = "*batch"
Dims = frozenset[object]
NONE: Dims = frozenset()


@dataclass(frozen=True)
class Seen:
    """One parent as a child sees it: its dims, and whether its values differ along the axes that are collected."""

    dims: Dims
    axes: tuple[object, ...] = ()
    collected: bool = False  # a collection over words


@dataclass
class Spread:
    """The dims of the values so far, for a set of enumerated families."""

    network: Network
    enumerated: frozenset[int]
    known: frozenset[int] = frozenset()
    dims: dict[int, Dims] = field(default_factory=dict)

    def of(self, member: Member, seen: Iterable[Seen]) -> Dims:
        """The dims of a family's value, from what it sees."""
        family, tpm = member.family, member.tpm
        own: Dims = frozenset(family.plates)
        if family.index in self.enumerated:
            return frozenset({family.index}) | (NONE if tpm.reads_by_index else own)
        if tpm.kind == "input" or family.index in self.known:
            return own | {BATCH} | self._word(member)
        found = frozenset(dim for each in seen for dim in each.dims) | (own if member.parameters else NONE)
        placed = not member.inputs and not isinstance(tpm, Weight)
        collects = bool(member.word_inputs)
        return found | (self._word(member) if placed or collects else NONE)

    def seen(self, member: Member) -> list[Seen]:
        """What a family sees in each of its slots."""
        return [self._seen(given) for given in member.inputs]

    def seen_in_scan(self, member: Member, there: Mapping[int, Dims]) -> list[Seen]:
        """The same at one word of a scan, where `there` are the families of the group that have a word already."""
        found = []
        for given in member.inputs:
            parent = self.dims if given.parent in self.dims else there
            if given.parent not in parent:
                found.append(Seen(NONE, (), WORD in given.over))
                continue
            each = self._seen(given, parent[given.parent])
            found.append(Seen(each.dims - {WORD}, each.axes, each.collected))
        return found

    def _seen(self, given: Input, dims: Dims | None = None) -> Seen:
        found = self.dims[given.parent] if dims is None else dims
        picked = dict(given.pick)
        axes: tuple[object, ...] = tuple(plate for plate in given.over if plate in found)
        collected = WORD in given.over
        if WORD not in picked and (collected or given.reach.kind in ("first", "last")):
            found = found - {WORD}
        for plate, selector in given.pick:
            if plate in found:
                found = (found - {plate}) | self.dims[selector]
        return Seen((found - set(given.over)) | ({WORD} if WORD in picked else NONE), axes, collected)

    def _word(self, member: Member) -> Dims:
        return NONE if member.family.words is None else frozenset({WORD})

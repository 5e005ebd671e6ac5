"""The chain of attention TPMs of a sentence: through which nodes it passes, and that surgery has not cut it."""

from __future__ import annotations

from collections.abc import Sequence

from bnet_transformer.errors import BNetError
from bnet_transformer.graph import Family
from bnet_transformer.network import Member
from bnet_transformer.world import World


def check_chain(world: World, readers: Sequence[Member], slices: Sequence[int]) -> None:
    """Refuse a chain that passes through a node that is set: what comes after it was not read from what came before.

    It may begin at a state that is set.
    """
    way = passed(world, readers, slices)
    cut = [node for node in sorted(world.do) if world.ground.family_of(node).index in way]
    if cut:
        names = [world.ground.name(node) for node in cut[:6]] + ["…"] * (len(cut) > 6)
        raise BNetError(
            f"reads of slices {slices[0]} to {slices[-1]}" if len(slices) > 1 else f"reads of slice {slices[0]}",
            expected="a chain of attention that do does not cut",
            got=f"{', '.join(names)} set on its way",
            allowed="slices= before or after them (a chain may begin at a state that is set), or undo(...) first",
        )


def passed(world: World, readers: Sequence[Member], slices: Sequence[int]) -> set[int]:
    """The families between the state that enters the first slice and the one that leaves the last, by way of values.

    What decides who is read (q, k and what they are made of) is not on the way.
    """
    members, stack = world.network.members, readers[0].family.stack
    families = [member.family for member in members]
    enters = {f.index for f in families if _is_state(f, stack, slices[0])}
    leaves = {f.index for f in families if _is_state(f, stack, slices[-1] + 1)}
    above, below = set(leaves), set(enters)
    for member in reversed(members):
        if member.family.index in above - enters:
            above |= _carried(member)
    for member in members:
        if member.tpm.kind != "discrete" and _carried(member) & below:
            below.add(member.family.index)
    return {reader.family.index for reader in readers} | (above & below - enters)


def _is_state(family: Family, stack: str, slice_: int) -> bool:
    """True of the state that enters a slice: what the slice before has made, or the prologue."""
    return family.stack == stack and family.slice == slice_ and family.step == slice_ - 1


def _carried(member: Member) -> set[int]:
    """The families whose values go into the value of one, and not only into whom it reads."""
    reading = set(member.tpm.reading_slots()) if member.reads_words else set()
    apart = reading if reading < set(member.tpm.takes()) else set()
    return {given.parent for given in member.inputs if given.slot not in apart}

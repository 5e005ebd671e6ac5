"""First pass, network to plan: the families that what is wanted needs, in order, and the choices to enumerate."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bnet_transformer.errors import BNetError
from bnet_transformer.network import Member, Network
from bnet_transformer.tpm import Given


@dataclass(frozen=True)
class Plan:
    """What is computed: groups of families in order (several in one group read each other word after word), the
    families that nothing reads after each group, the discrete families whose states lead as enumerated dims, and what
    is wanted."""

    groups: tuple[tuple[int, ...], ...]
    done: tuple[tuple[int, ...], ...]
    enumerated: tuple[int, ...]
    wanted: tuple[int, ...]


def network_to_plan(
    network: Network, want: Sequence[str], known: Collection[int] = (), enumerate_too: Collection[int] = ()
) -> Plan:
    """The plan for some families; `known` are those whose value comes from outside (`do`, evidence)."""
    wanted = tuple(network.graph.family(name).index for name in want)
    needed: set[int] = set(enumerate_too)
    enumerated: set[int] = set(enumerate_too)
    stack = [parent for index in wanted for parent in _above(network, index, known, wanted=True)]
    stack += [index for index in wanted if not _random(network.members[index]) or index in known]
    while stack:
        index = stack.pop()
        if index in needed:
            continue
        needed.add(index)
        member = network.members[index]
        if member.tpm.kind == "discrete" and index not in known:
            enumerated.add(index)
        elif member.tpm.kind == "continuous" and index not in known:
            raise BNetError(
                member.family.name, expected="a value (do=), for it is random and real, and others read it", got="none"
            )
        else:
            stack.extend(_above(network, index, known, wanted=False))
    groups = tuple(
        kept for group in network.graph.groups if (kept := tuple(index for index in group if index in needed))
    )
    for index in enumerated:
        _check_enumerated(network, index, (needed - enumerated) | set(wanted), enumerated)
    return Plan(groups, _done(network, groups, wanted), tuple(sorted(enumerated)), wanted)


def _done(
    network: Network, groups: tuple[tuple[int, ...], ...], wanted: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """After each group, the families that are read no more."""
    kept = {*wanted, *(bundle.parent for index in wanted for bundle in network.graph.into[index])}
    last: dict[int, int] = {}
    for k, group in enumerate(groups):
        for index in group:
            last.setdefault(index, k)
            last |= {bundle.parent: k for bundle in network.graph.into[index]}
    return tuple(tuple(i for i, at in last.items() if at == k and i not in kept) for k in range(len(groups)))


def _random(member: Member) -> bool:
    return member.tpm.kind != "deterministic"


def _above(network: Network, index: int, known: Collection[int], *, wanted: bool) -> list[int]:
    """The families whose values one family needs: none where its value comes from outside or is enumerated."""
    member = network.members[index]
    if index in known or isinstance(member.tpm, Given) or (_random(member) and not wanted):
        return []
    return [bundle.parent for bundle in network.graph.into[index]]


def _check_enumerated(network: Network, index: int, computed: set[int], enumerated: set[int]) -> None:
    """A choice for each word may be enumerated in parallel only while no word's value depends on another's choice."""
    member = network.members[index]
    reached = {index} if member.family.words is not None else set()
    for child in sorted(computed) if reached else ():
        inputs = network.members[child].inputs
        picks = {selector for given in inputs for _, selector in given.pick}
        reads = [given for given in inputs if given.parent in reached]
        if any(given.reach.kind != "same" for given in reads):
            raise BNetError(
                member.family.name,
                expected="a choice whose words do not meet, to be enumerated for all words at once",
                got=f"{network.members[child].family.name}, which reads other words' choices",
                allowed="do= for that choice; the reference, for a small net",
            )
        if child not in enumerated and (reads or picks & reached):
            reached.add(child)

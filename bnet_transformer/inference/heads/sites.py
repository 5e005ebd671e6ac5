"""Where heads are summed: the families of which a later node adds up a plate, `a = sum_nu W_o^nu a^nu`."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from bnet_transformer.data.task import decided_by
from bnet_transformer.errors import BNetError, unknown
from bnet_transformer.network import Member, Network


@dataclass(frozen=True)
class Site:
    """One slice's heads: the family of what they read, and the families of a run that they do not change but that
    what descends from them reads."""

    member: Member
    beside: tuple[str, ...]
    plates: tuple[int, ...]

    @property
    def heads(self) -> int:
        """How many heads there are, through all groups of them."""
        return math.prod(self.plates)

    @property
    def name(self) -> str:
        """The family's name: `a_0`."""
        return self.member.family.name


def sites_of(network: Network, role: str | None, wanted: Collection[int]) -> tuple[Site, ...]:
    """The sites of a net above what is wanted, of one role or of all; as many heads in each."""
    graph = network.graph
    needed = graph.ancestral_set(wanted)
    found = [m for m in network.members if m.family.index in needed and _is_summed(network, m)]
    if not found:
        choose = [m.family.name for m in network.members if m.tpm.kind == "discrete" and graph.out_of[m.family.index]]
        got = f"one thing at a time, chosen by {choose[0]}" if choose else "none"
        hint = "posterior('c') and fit tell of a mixture; combine='concat' sums heads" if choose else None
        raise BNetError("net", expected="heads that are summed: a plate of them that a later node reads", got=got,
                        allowed=hint)  # fmt: skip
    roles = list(dict.fromkeys(_role(m) for m in found))
    if role is not None:
        if role not in roles:
            raise unknown("role of heads", role, roles)
        found = [m for m in found if _role(m) == role]
    sites = tuple(_site(network, m, needed) for m in found)
    if len({site.heads for site in sites}) > 1:
        told = ", ".join(f"{site.name} {site.heads}" for site in sites)
        raise BNetError("role", expected="as many heads in each slice", got=told, allowed=", ".join(roles))
    return sites


def _site(network: Network, member: Member, needed: set[int]) -> Site:
    sizes = tuple(network.graph.sizes[plate] for plate in member.family.plates)
    return Site(member, _beside(network, member.family.index, needed), sizes)


def _role(member: Member) -> str:
    return member.family.stem


def _is_summed(network: Network, member: Member) -> bool:
    """True for a function of each word and head that all its readers read over the plates of heads."""
    family = member.family
    if member.tpm.is_random or family.words is None or not family.plates or not member.shape:
        return False
    children = {bundle.child for bundle in network.graph.out_of[family.index]}
    inputs = [g for child in children for g in network.members[child].inputs if g.parent == family.index]
    return bool(inputs) and all(given.over == family.plates for given in inputs)


def _beside(network: Network, index: int, needed: set[int]) -> tuple[str, ...]:
    """What is read, and hangs on the words, by what descends from a family and is needed."""
    graph, below = network.graph, {index}
    order = [i for group in graph.groups for i in group if i in needed]
    for i in order:
        if any(bundle.parent in below for bundle in graph.into[i]):
            below.add(i)
    decided = decided_by(network, [network.members[i] for i in order])
    read = {bundle.parent for i in below - {index} for bundle in graph.into[i]} - below
    members = [network.members[i] for i in sorted(read) if decided[i] and network.graph.into[i]]
    return tuple(m.family.name for m in members if not m.tpm.is_random)

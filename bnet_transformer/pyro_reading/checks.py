"""What Pyro would pass over in silence: data for names that are no site, choices whose words meet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.do_messenger import DoMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK

from bnet_transformer.axes import WORD
from bnet_transformer.errors import BNetError, EvidenceError
from bnet_transformer.network import Input, Member, Network


class Watch(Messenger):
    """Sees whether a site within it is enumerated."""

    def __init__(self) -> None:
        super().__init__()
        self.enumerated = False

    def _pyro_post_sample(self, msg: Any) -> None:
        self.enumerated = (msg["infer"] or {}).get("_enumerate_dim") is not None


def handled() -> Iterator[tuple[str, str]]:
    """The names that the handlers around the model condition or set by a mapping, each with what is done to it."""
    for handler in _PYRO_STACK:
        for kind, what in ((ConditionMessenger, "condition"), (DoMessenger, "do")):
            if isinstance(handler, kind) and isinstance(handler.data, dict):
                yield from ((name, what) for name in handler.data)


def check_handled(network: Network, sites: frozenset[str], observed: frozenset[str]) -> frozenset[str]:
    """The names that are conditioned; refuse those of nodes of the net that are no site, and do on what is seen."""
    found: dict[str, set[str]] = {"condition": set(), "do": set()}
    for name, what in handled():
        if name in sites:
            found[what].add(name)
            continue
        family, owner = network.graph.by_name.get(name), network.graph.owner(name)
        if family is None and owner is None:
            continue  # a site of a model around this one
        if family is None and owner is not None:
            some = f", or y={{{owner.name!r}: ...}} with seen= for some of its words" if owner.name in sites else ""
            raise BNetError(
                f"{what} on {name}",
                expected="the name of a whole family, for its nodes are one site",
                got="one node",
                allowed=f"{owner.name!r}{some}",
            )
        kind = "deterministic" if network.member(name).tpm.kind == "deterministic" else "set by do="
        raise BNetError(
            f"{what} on {name}",
            expected="a random site of the model",
            got=f"a {kind} node, which Pyro would pass over in silence",
            allowed=", ".join(sorted(sites)) + f"; to set it, model(x, do={{{name!r}: ...}})",
        )
    for name in sorted(found["do"] & (found["condition"] | observed)):
        raise EvidenceError(name, expected="do or evidence on a node, not both", got="both")
    return frozenset(found["condition"])


def meeting(network: Network, index: int, known: frozenset[int]) -> str | None:
    """The first family in which entries of a plate meet that a choice was drawn for one by one; None where none does.

    Pyro sums such a choice out for each entry apart, which is right only while nothing depends on two of them.
    """
    member = network.members[index]
    own = set(member.family.plates) | ({WORD} if member.family.words is not None else set())
    reached = {index: own}
    for child in network.members:
        at = child.family.index
        if at in known or (at == index and not any(given.parent == index for given in child.inputs)):
            continue
        axes: set[str] = set()
        for given in child.inputs:
            if given.parent in reached:
                if any(_meets(child, given, axis) for axis in reached[given.parent]):
                    return child.family.name
                axes |= reached[given.parent]
            axes |= {axis for _, selector in given.pick for axis in reached.get(selector, ())}
        reads = any(g.parent in reached or any(s in reached for _, s in g.pick) for g in child.inputs)
        if reads and child.tpm.kind == "deterministic":
            reached[at] = axes
    return None


def _meets(child: Member, given: Input, axis: str) -> bool:
    """True where one entry of the child reads other entries of its parent along an axis."""
    if axis in given.over or axis in dict(given.pick):
        return True
    return given.reach.kind != "same" if axis == WORD else axis not in child.family.plates

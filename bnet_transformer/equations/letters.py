r"""Which letters stand for what: roles, plates, stacks, sets of words, masks; no two things share one.

A role with a one-letter part shows that letter, the rest as subscripts (`W_q` is `W_q`, `cross_q` is
`q_{\mathrm{cross}}`); any other stands upright (`\mathrm{norm1}`). A matrix of all words has the capital
letter; a bold one where that means something else, a spare one where another role has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from bnet_transformer.axes import Reach
from bnet_transformer.network import Network
from bnet_transformer.tpm.symbols import escaped, scripts

Name = tuple[str, tuple[str, ...]]

RESERVED = frozenset("imntTP")
TAKEN_CAPITALS = frozenset("EIMPRT")
SPARE = "ZHGQ"
GREEK = (
    "alpha",
    "beta",
    "zeta",
    "eta",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "rho",
    "tau",
    "phi",
    "chi",
    "psi",
    "omega",
)


@dataclass(frozen=True)
class Letters:
    """The letters of one net."""

    network: Network

    @cached_property
    def _roles(self) -> dict[str, Name]:
        roles = list(dict.fromkeys(family.role for family in self.network.graph.families))
        names = {role: _name(role) for role in roles}
        twice = _repeated(names.values())
        return {role: (upright(role), ()) if name in twice else name for role, name in names.items()}

    @cached_property
    def _capitals(self) -> dict[str, Name]:
        """The letter of the matrix of all words, for roles whose own letter is small."""
        taken = set(self._roles.values())
        letters = {base.upper() for base, _ in taken}
        spare = [letter for letter in SPARE if letter not in letters]
        found = {}
        for role, (base, sub) in self._roles.items():
            if len(base) == 1 and base.islower():
                capital, clashes = base.upper(), (base.upper(), sub) in taken
                if clashes and spare:
                    capital = spare.pop(0)
                elif clashes or capital in TAKEN_CAPITALS:
                    capital = rf"\mathbf{{{capital}}}"
                found[role] = (capital, sub)
        return found

    def renamed(self, role: str) -> bool:
        """True where the matrix of all words has another letter than one word."""
        one, many = self.role(role)[0], self.matrix(role)[0]
        return len(many) == 1 and many not in (one, one.upper())

    def role(self, role: str) -> Name:
        """The letter and subscripts of one word's value, and of what has no words."""
        return self._roles[role]

    def matrix(self, role: str) -> Name:
        """The letter and subscripts of the matrix of all words."""
        return self._capitals.get(role, self._roles[role])

    @cached_property
    def plates(self) -> dict[str, str]:
        """The index of each plate: h for heads, Greek letters for the others."""
        others = [plate for plate in self.network.graph.sizes if plate != "head"]
        greek = [rf"\{name}" for name in GREEK] + [rf"\omega_{{{k}}}" for k in range(1, len(others))]
        return {"head": "h", **dict(zip(others, greek, strict=False))}

    def stack(self, name: str) -> tuple[str, ...]:
        """The superscript of a stack: none where it has no name."""
        return (upright(name),) if name else ()

    def words(self, stack: str) -> str:
        """The set of a stack's words."""
        return scripts(r"\mathcal{S}", self.stack(stack))

    def count(self, stack: str) -> str:
        """The number of a stack's words."""
        return scripts("n", self.stack(stack))

    def depth(self, stack: str) -> str:
        """The number of a stack's slices."""
        return scripts("T", self.stack(stack))

    @cached_property
    def tables(self) -> dict[Reach, int]:
        """The tables that serve as masks, numbered."""
        reaches = [given.reach for member in self.network.members for given in member.inputs]
        return {reach: k for k, reach in enumerate(dict.fromkeys(r for r in reaches if r.kind == "mask"))}

    def table(self, reach: Reach) -> str:
        """The set of words that word i reads by a table."""
        return self._numbered(reach, r"\mathcal{M}", ("i",))

    def mask(self, reach: Reach) -> tuple[str, ...]:
        """The superscript of a reach's mask; none where every word is read."""
        match reach.kind:
            case "every":
                return ()
            case "window" | "recent":
                return (rf"\mathrm{{{reach.kind}}}\,{reach.width}",)
            case "mask":
                return (self._numbered(reach, r"\mathrm{mask}", ()),)
            case kind:
                return (rf"\mathrm{{{kind}}}",)

    def _numbered(self, reach: Reach, base: str, sub: tuple[str, ...]) -> str:
        number = (f"({self.tables[reach] + 1})",) if len(self.tables) > 1 else ()
        return scripts(base, sub, number)


def upright(name: str) -> str:
    """A name of several letters, as an equation shows it."""
    return rf"\mathrm{{{escaped(name)}}}"


def _name(role: str) -> Name:
    parts = [part for part in role.split("_") if part]
    letter = next((k for k, part in enumerate(parts) if len(part) == 1), None)
    if letter is None or (len(parts) == 1 and role in RESERVED):
        return upright(role), ()
    rest = parts[:letter] + parts[letter + 1 :]
    return parts[letter], tuple(part if len(part) == 1 else upright(part) for part in rest)


def _repeated(names: Iterable[Name]) -> set[Name]:
    listed = list(names)
    return {name for name in listed if listed.count(name) > 1}

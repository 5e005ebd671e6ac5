r"""Notation: distinct letters for roles, plates, stacks, sets of words and masks.

A role with a one-letter part uses that letter, with the other parts as subscripts (`W_q` is `W_q`, `cross_q` is
`q_{\mathrm{cross}}`); any other role is upright (`\mathrm{norm1}`). The matrix of all words has the capital letter. It
is bold if the capital letter has another meaning, and another letter if a different role uses it. `describe_notation`
writes the definitions below the equations: the ranges of indices, and the layout of words in matrices.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from bnet_transformer._core.naming import Reach
from bnet_transformer.declare import Network, Stack
from bnet_transformer.tpm.symbols import Symbol, add_scripts, escape_latex

Letter = tuple[str, tuple[str, ...]]

RESERVED_LETTERS = frozenset("imntTP")
TAKEN_CAPITALS = frozenset("EIMPRT")
SPARE_CAPITALS = "ZHGQ"
GREEK = ["alpha", "beta", "zeta", "eta", "kappa", "lambda", "mu", "nu", "rho", "tau", "phi", "chi", "psi", "omega"]


@dataclass(frozen=True)
class Notation:
    """The letters of the equations of one net."""

    network: Network

    @cached_property
    def _role_letters(self) -> dict[str, Letter]:
        """The letter of each role; all letters are distinct."""
        roles = list(dict.fromkeys(group.role for group in self.network.graph.groups))
        names = {role: _parse_role(role) for role in roles}
        count = Counter(names.values())
        return {role: (format_upright(role), ()) if count[name] > 1 else name for role, name in names.items()}

    @cached_property
    def _capitals(self) -> dict[str, Letter]:
        """The letter of the matrix of all words, for roles with a lowercase letter."""
        taken = set(self._role_letters.values())
        letters = {base.upper() for base, _ in taken}
        spare = [letter for letter in SPARE_CAPITALS if letter not in letters]
        capitals = {}
        for role, (base, sub) in self._role_letters.items():
            if len(base) == 1 and base.islower():
                capital, clashes = base.upper(), (base.upper(), sub) in taken
                if clashes and spare:
                    capital = spare.pop(0)
                elif clashes or capital in TAKEN_CAPITALS:
                    capital = rf"\mathbf{{{capital}}}"
                capitals[role] = (capital, sub)
        return capitals

    def role_letter(self, role: str) -> Letter:
        """The letter and the subscripts of the value of one word, or of a value without words."""
        return self._role_letters[role]

    def matrix_letter(self, role: str) -> Letter:
        """The letter and the subscripts of the matrix of all words."""
        return self._capitals.get(role, self._role_letters[role])

    @cached_property
    def plate_indices(self) -> dict[str, str]:
        """The index of each plate: h for heads, Greek letters for the others."""
        other_plates = [plate for plate in self.network.graph.plate_sizes if plate != "head"]
        greek = [rf"\{name}" for name in GREEK] + [rf"\omega_{{{k}}}" for k in range(1, len(other_plates))]
        return {"head": "h", **dict(zip(other_plates, greek, strict=False))}

    def stack_superscript(self, name: str) -> tuple[str, ...]:
        """The superscript of a stack; empty for a stack without a name."""
        return (format_upright(name),) if name else ()

    def word_set(self, stack: str) -> str:
        """The symbol of the set of words of a stack."""
        return add_scripts(r"\mathcal{S}", self.stack_superscript(stack))

    def word_count(self, stack: str) -> str:
        """The symbol of the number of words of a stack."""
        return add_scripts("n", self.stack_superscript(stack))

    def slice_count(self, stack: str) -> str:
        """The symbol of the number of slices of a stack."""
        return add_scripts("T", self.stack_superscript(stack))

    @cached_property
    def mask_tables(self) -> dict[Reach, int]:
        """The masks that are tables, with their numbers."""
        reaches = [parent.reach for spec in self.network.specs for parent in spec.parents]
        return {reach: k for k, reach in enumerate(dict.fromkeys(r for r in reaches if r.kind == "mask"))}

    def mask_set(self, reach: Reach) -> str:
        """The symbol of the set of words that word i reads by a table."""
        return self._add_number(reach, r"\mathcal{M}", ("i",))

    def mask_superscript(self, reach: Reach) -> tuple[str, ...]:
        """The superscript of the mask of a reach; empty if every word has an arrow."""
        match reach.kind:
            case "every":
                return ()
            case "window" | "recent":
                return (rf"\mathrm{{{reach.kind}}}\,{reach.width}",)
            case "mask":
                return (self._add_number(reach, r"\mathrm{mask}", ()),)
            case kind:
                return (rf"\mathrm{{{kind}}}",)

    def _add_number(self, reach: Reach, base: str, sub: tuple[str, ...]) -> str:
        """The letter of a mask, with a number if there are several."""
        number = (f"({self.mask_tables[reach] + 1})",) if len(self.mask_tables) > 1 else ()
        return add_scripts(base, sub, number)


def format_upright(name: str) -> str:
    """A name of several letters as upright LaTeX."""
    return rf"\mathrm{{{escape_latex(name)}}}"


def _parse_role(role: str) -> Letter:
    """The letter and the subscripts of a role."""
    parts = [part for part in role.split("_") if part]
    letter = next((k for k, part in enumerate(parts) if len(part) == 1), None)
    if letter is None or (len(parts) == 1 and role in RESERVED_LETTERS):
        return format_upright(role), ()
    subscripts = parts[:letter] + parts[letter + 1 :]
    return parts[letter], tuple(part if len(part) == 1 else format_upright(part) for part in subscripts)


def describe_notation(network: Network, notation: Notation, form: str) -> list[str]:
    """The definitions of the letters of a net, in LaTeX."""
    lines = [_describe_stack(network, notation, stack) for stack in network.declaration.stacks]
    used = [plate for plate in network.graph.plate_sizes if any(plate in f.plates for f in network.graph.groups)]
    for plate in used:
        last = network.graph.plate_sizes[plate] - 1
        values = rf"0, \ldots, {last}" if last > 1 else "0, 1" if last else "0"
        lines.append(rf"{notation.plate_indices[plate]} \in \{{{values}\}} \quad \text{{({escape_latex(plate)})}}")
    lines += [line for reach in notation.mask_tables for line in _describe_mask(notation, reach)]
    return (
        lines
        + _describe_initial_values(network, notation)
        + _describe_first_words(network, notation)
        + _describe_matrices(network, notation, form)
    )


def _describe_stack(network: Network, notation: Notation, stack: Stack) -> str:
    """The ranges of the slices and the words of a stack."""
    depth, words, count = (
        notation.slice_count(stack.name),
        notation.word_set(stack.name),
        notation.word_count(stack.name),
    )
    slices = "t = 0" if stack.slices == 1 else rf"t = 0, \ldots, {depth}-1"
    line = rf"{slices}, \quad {depth} = {stack.slices}"
    if any(group.word_stack == stack.name for group in network.graph.groups):
        index = "" if stack.name else r"i, j \in "
        line += rf", \qquad {index}{words} = \{{0, \ldots, {count}-1\}}"
    return rf"\text{{in }} {notation.stack_superscript(stack.name)[0]}: \; {line}" if stack.name else line


def _describe_mask(notation: Notation, reach: Reach) -> list[str]:
    """The words that a mask allows: all of them for small masks."""
    name = notation.mask_set(reach)
    if len(reach.table) > 6:
        size = rf"{len(reach.table)} \times {len(reach.table[0])}"
        return [rf"{name} \text{{ holds the words that row }} i \text{{ of the mask }} ({size}) \text{{ marks}}"]
    rows = [
        rf"{name.replace('_i', f'_{i}')} = \{{{', '.join(str(j) for j, cell in enumerate(row) if cell)}\}}"
        for i, row in enumerate(reach.table)
    ]
    return [r", \quad ".join(rows)]


def _describe_matrices(network: Network, notation: Notation, form: str) -> list[str]:
    """The layout of words in a matrix, for the first role and for roles with another letter."""
    vector_roles = [m.group.role for m in network.specs if m.group.word_stack is not None and len(m.shape) == 1]
    if form == "word" or not vector_roles:
        return []
    letters = {role: (notation.role_letter(role)[0], notation.matrix_letter(role)[0]) for role in vector_roles}
    renamed = [role for role, (x, X) in letters.items() if len(X) == 1 and X not in (x, x.upper())]
    roles = dict.fromkeys([vector_roles[0], *renamed])
    vectors = [Symbol(*notation.role_letter(role), word="i") for role in roles]
    matrices = [Symbol(*notation.matrix_letter(role), word="i", form=form, is_full_matrix=False) for role in roles]
    pairs = list(zip(matrices, vectors, strict=True))
    match form:
        case "row":
            return [r"\text{words are rows: } " + r", \quad ".join(f"{X} = {x.T}" for X, x in pairs)]
        case "column":
            return [r"\text{words are columns: } " + r", \quad ".join(f"{X} = {x}" for X, x in pairs)]
        case _:
            entry = rf"{matrices[0]['a']} \text{{ is feature }} a \text{{ of word }} i"
            descriptions = [rf"{X['a']} \text{{ that of }} {x}" for X, x in pairs[1:]]
            return [
                r", \quad ".join([entry, *descriptions]),
                r"\text{indices that are repeated, and not on the left, are summed over}",
            ]


def _describe_first_words(network: Network, notation: Notation) -> list[str]:
    """The parents that a first word does not read (reach `rest`)."""
    read = {(m.group.role, parent.index) for m in network.specs for parent in m.parents if parent.reach.kind == "rest"}
    pairs = dict.fromkeys((role, network.graph.groups[k].role) for role, k in sorted(read))
    symbols = [
        (Symbol(*notation.role_letter(child), word="0"), Symbol(*notation.role_letter(parent), word="0"))
        for child, parent in pairs
    ]
    return [rf"{child} \text{{ does not read }} {parent}" for child, parent in symbols]


def _describe_initial_values(network: Network, notation: Notation) -> list[str]:
    """The value of the word before the first word, and after the last word, for roles in which it is read."""
    read = {
        (parent.index, {"before": "-1", "after": "n"}[parent.reach.kind])
        for m in network.specs
        for parent, described in zip(m.parents, m.tpm_parents, strict=True)
        if parent.reach.kind in ("before", "after") and not ("initial" in m.parameters and described.states is not None)
    }
    roles = dict.fromkeys((network.graph.groups[k].role, word) for k, word in sorted(read))
    return [f"{Symbol(*notation.role_letter(role), word=word)} = 0" for role, word in roles]

"""What the letters stand for: what the indices run over, and how words stand in matrices."""

from __future__ import annotations

from bnet_transformer.axes import Reach
from bnet_transformer.equations.letters import Letters
from bnet_transformer.network import Network, Stack
from bnet_transformer.tpm.symbols import Symbol, escaped


def meanings(network: Network, letters: Letters, form: str) -> list[str]:
    """What the letters of a net stand for."""
    lines = [_stack(network, letters, stack) for stack in network.declaration.stacks]
    used = [plate for plate in network.graph.sizes if any(plate in f.plates for f in network.graph.families)]
    for plate in used:
        last = network.graph.sizes[plate] - 1
        several = rf"0, \ldots, {last}" if last > 1 else "0, 1" if last else "0"
        lines.append(rf"{letters.plates[plate]} \in \{{{several}\}} \quad \text{{({escaped(plate)})}}")
    lines += [line for reach in letters.tables for line in _table(letters, reach)]
    return lines + _before(network, letters) + _rest(network, letters) + _convention(network, letters, form)


def _stack(network: Network, letters: Letters, stack: Stack) -> str:
    depth, words, count = letters.depth(stack.name), letters.words(stack.name), letters.count(stack.name)
    slices = "t = 0" if stack.slices == 1 else rf"t = 0, \ldots, {depth}-1"
    line = rf"{slices}, \quad {depth} = {stack.slices}"
    if any(family.words == stack.name for family in network.graph.families):
        index = "" if stack.name else r"i, j \in "
        line += rf", \qquad {index}{words} = \{{0, \ldots, {count}-1\}}"
    return rf"\text{{in }} {letters.stack(stack.name)[0]}: \; {line}" if stack.name else line


def _table(letters: Letters, reach: Reach) -> list[str]:
    """Who is read by a table: in full where it is small."""
    name = letters.table(reach)
    if len(reach.table) > 6:
        size = rf"{len(reach.table)} \times {len(reach.table[0])}"
        return [rf"{name} \text{{ holds the words that row }} i \text{{ of the mask }} ({size}) \text{{ marks}}"]
    rows = [
        rf"{name.replace('_i', f'_{i}')} = \{{{', '.join(str(j) for j, cell in enumerate(row) if cell)}\}}"
        for i, row in enumerate(reach.table)
    ]
    return [r", \quad ".join(rows)]


def _convention(network: Network, letters: Letters, form: str) -> list[str]:
    """How words stand in a matrix, said of the first that there is, and of those that have another letter."""
    vectors = [m.family.role for m in network.members if m.family.words is not None and len(m.shape) == 1]
    if form == "word" or not vectors:
        return []
    roles = dict.fromkeys([vectors[0], *filter(letters.renamed, vectors)])
    ones = [Symbol(*letters.role(role), word="i") for role in roles]
    manies = [Symbol(*letters.matrix(role), word="i", form=form, whole=False) for role in roles]
    pairs = list(zip(manies, ones, strict=True))
    match form:
        case "row":
            return [r"\text{words are rows: } " + r", \quad ".join(f"{many} = {one.T}" for many, one in pairs)]
        case "column":
            return [r"\text{words are columns: } " + r", \quad ".join(f"{many} = {one}" for many, one in pairs)]
        case _:
            entry = rf"{manies[0]['a']} \text{{ is feature }} a \text{{ of word }} i"
            others = [rf"{many['a']} \text{{ that of }} {one}" for many, one in pairs[1:]]
            return [
                r", \quad ".join([entry, *others]),
                r"\text{indices that are repeated, and not on the left, are summed over}",
            ]


def _rest(network: Network, letters: Letters) -> list[str]:
    """Of what a first word reads nothing."""
    read = {(m.family.role, given.parent) for m in network.members for given in m.inputs if given.reach.kind == "rest"}
    pairs = dict.fromkeys((role, network.graph.families[k].role) for role, k in sorted(read))
    symbols = [(Symbol(*letters.role(one), word="0"), Symbol(*letters.role(other), word="0")) for one, other in pairs]
    return [rf"{one} \text{{ does not read }} {other}" for one, other in symbols]


def _before(network: Network, letters: Letters) -> list[str]:
    """What a word before the first one is worth, where one is read."""
    read = {given.parent for m in network.members for given in m.inputs if given.reach.kind == "before"}
    roles = dict.fromkeys(network.graph.families[k].role for k in sorted(read))
    return [f"{Symbol(*letters.role(role), word='-1')} = 0" for role in roles]

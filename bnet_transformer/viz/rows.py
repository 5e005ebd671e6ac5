"""Which row of the grid a family of nodes stands in: below its parents, and close above its children."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from bnet_transformer.graph import FoldedGraph


def rows_of(folded: FoldedGraph, kept: Collection[int]) -> dict[int, int]:
    """The row of each kept family that is not a weight; rows are numbered without gaps."""
    drawn = [family.index for family in folded.families if family.index not in folded.wordless]
    there = set(drawn)
    children: dict[int, list[int]] = {index: [] for index in drawn}
    for bundle in folded.bundles:
        if bundle.parent in there and bundle.child in there and bundle.parent < bundle.child:
            children[bundle.parent].append(bundle.child)
    early = dict.fromkeys(drawn, 0)
    for index in drawn:
        for child in children[index]:
            early[child] = max(early[child], early[index] + 1)
    late = dict(early)
    for index in reversed(drawn):
        if children[index]:
            late[index] = min(late[child] for child in children[index]) - 1
    number = {row: k for k, row in enumerate(sorted({late[index] for index in drawn if index in kept}))}
    return {index: number[late[index]] for index in drawn if index in kept}


def depths_of(folded: FoldedGraph, kept: Collection[int], rows: dict[int, int]) -> dict[int, tuple[int, int]]:
    """For each kept weight the row that it stands above, and its depth: 1 above words, 2 above weights, ..."""
    found: dict[int, tuple[int, int]] = {}
    for family in reversed(folded.families):
        index = family.index
        if index not in kept or index not in folded.wordless:
            continue
        below = [bundle.child for bundle in folded.out_of[index] if bundle.child in rows or bundle.child in found]
        row = min((rows[c] if c in rows else found[c][0] for c in below), default=0)
        found[index] = row, 1 + max((found[c][1] for c in below if c in found), default=0)
    return found


def places_in_rows(rows: Mapping[str, int], arrows: Sequence[tuple[str, str]], sweeps: int = 4) -> dict[str, int]:
    """The place of each node in its row, such that arrows cross little; nodes come in the order that ties keep.

    Sugiyama's barycentre heuristic (1981): down and up in turn, each row is sorted by the mean place of the nodes that
    its nodes are joined to in the rows before it, places being counted from the middle of a row.
    """
    lines: dict[int, list[str]] = {}
    for name, row in rows.items():
        lines.setdefault(row, []).append(name)
    joined: dict[str, list[str]] = {name: [] for name in rows}
    for parent, child in arrows:
        joined[parent].append(child)
        joined[child].append(parent)
    at = {name: k - (len(line) - 1) / 2 for line in lines.values() for k, name in enumerate(line)}
    for sweep in range(sweeps):
        way = 1 if sweep % 2 == 0 else -1
        for row in sorted(lines, reverse=way < 0):
            means = {}
            for name in lines[row]:
                others = [at[other] for other in joined[name] if (row - rows[other]) * way > 0]
                means[name] = sum(others) / len(others) if others else at[name]
            lines[row].sort(key=means.__getitem__)
            at |= {name: k - (len(lines[row]) - 1) / 2 for k, name in enumerate(lines[row])}
    return {name: k for line in lines.values() for k, name in enumerate(line)}

"""Which row of the grid a family of nodes stands in: below its parents, and close above its children."""

from __future__ import annotations

from collections.abc import Collection

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

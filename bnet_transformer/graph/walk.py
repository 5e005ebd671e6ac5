"""Walks over the ground graph: how marks move along bundles of arrows; ancestors, the Markov blanket, an order.

A set of nodes is an array of marks for each family, `[*plates, word, lanes]`, of booleans or of bits, so that one step
along a bundle of arrows is one array operation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnet_transformer.axes import Reach
from bnet_transformer.errors import whole
from bnet_transformer.graph.folded import Bundle
from bnet_transformer.graph.ground import Ground, Ids, Selection

Marks = NDArray[Any]  # [*plates, word, lanes]: booleans in one lane, or a bit of each question


def ancestors(ground: Ground, nodes: Iterable[int], ends: Collection[int] = (), stops: Iterable[int] = ()) -> list[int]:
    """Every node from which a path of arrows leads to one of `nodes`, those left out.

    Args:
        ground: The ground graph.
        nodes: Where the walk starts.
        ends: Families above whose nodes it does not go, be they among those where it starts or not.
        stops: Nodes above which it does not go.
    """
    return _closure(ground, nodes, up=True, ends=ends, stops=stops)


def descendants(ground: Ground, nodes: Iterable[int]) -> list[int]:
    """Every node to which a path of arrows leads from one of `nodes`, those left out."""
    return _closure(ground, nodes, up=False)


def blanket(ground: Ground, node: int) -> list[int]:
    """The Markov blanket: parents, children, and the children's other parents."""
    found = set(ground.parents(node))
    for child in ground.children(node):
        found |= {child, *ground.parents(child)}
    return sorted(found - {node})


def topological_order(ground: Ground) -> Ids:
    """All nodes, parents before children; within a recurrent group word after word."""
    parts: list[Ids] = []
    for group in ground.folded.groups:
        families = [ground.folded.families[index] for index in group]
        reads_itself = any(bundle.parent in group for bundle in ground.folded.into[group[0]])
        if not reads_itself:
            parts.append(ground.nodes(families[0]))
            continue
        stack = families[0].words or ""
        for i in range(ground.words[stack]):
            here = Selection(words={stack: [i]})
            parts.extend(ground.nodes(family, here) for family in families)
    return np.concatenate(parts)


def ancestral_order(ground: Ground, nodes: Collection[int]) -> list[int]:
    """Some nodes and all their ancestors, parents before children."""
    needed = {*nodes, *ancestors(ground, nodes)}
    return [node for node in topological_order(ground).tolist() if node in needed]


def marks_of(ground: Ground, nodes: Iterable[int]) -> dict[int, Marks]:
    """Which nodes of each family are among some: `[*plates, word, 1]`."""
    found: dict[int, list[int]] = {}
    for node in nodes:
        found.setdefault(ground.family_of(whole("node", node, least=0)).index, []).append(node)
    return {family: _marked(ground, family, own) for family, own in found.items()}


def _marked(ground: Ground, family: int, nodes: list[int]) -> Marks:
    marks = np.zeros((*ground.shapes[family], 1), dtype=bool)
    marks.reshape(-1)[np.array(nodes) - int(ground.offsets[family])] = True
    return marks


def _closure(
    ground: Ground, nodes: Iterable[int], *, up: bool, ends: Collection[int] = (), stops: Iterable[int] = ()
) -> list[int]:
    roots = marks_of(ground, nodes)
    reached = reach(ground, roots, up=up, ends=ends, stops=stops)
    found: list[int] = []
    for index in sorted(reached):
        mark = reached[index] & ~roots[index] if index in roots else reached[index]
        found.extend((np.flatnonzero(mark) + int(ground.offsets[index])).tolist())
    return found


def reach(
    ground: Ground,
    roots: Mapping[int, Marks],
    *,
    up: bool,
    ends: Collection[int] = (),
    stops: Iterable[int] = (),
) -> dict[int, Marks]:
    """Mark every node to which a path leads from some marked nodes, up or down, by at least one arrow."""
    stopped = marks_of(ground, stops)
    reached: dict[int, Marks] = {}
    fresh = dict(roots)
    while fresh:
        index = max(fresh) if up else min(fresh)
        mark = fresh.pop(index)
        if index in ends:
            continue
        mark = mark & ~stopped[index] if index in stopped else mark
        for bundle in (ground.folded.into if up else ground.folded.out_of)[index]:
            other = bundle.parent if up else bundle.child
            hit = spread(ground, bundle, mark, up=up)
            new = hit & ~reached[other] if other in reached else hit
            if new.any():
                reached[other] = reached[other] | hit if other in reached else hit
                fresh[other] = fresh[other] | new if other in fresh else new
    return reached


def spread(ground: Ground, bundle: Bundle, marks: Marks, *, up: bool) -> Marks:
    """The nodes one arrow of a bundle away from the marked ones, `[*plates, word, 1]`; surgery counts.

    Args:
        ground: The ground graph.
        bundle: The arrows.
        marks: The marked nodes, of the child going up, of the parent going down.
        up: Whether the walk goes from children to parents.
    """
    cut, rows = (some.get(bundle.child) for some in (ground.cut_by_family, ground.rows_by_family))
    uncut = None if cut is None else ~_marked(ground, bundle.child, cut)
    if uncut is not None and up:
        marks = marks & uncut
    kept = None if rows is None else ground.kept_of(bundle)
    found = stepped(ground, bundle, marks, None if rows is None else _marked(ground, bundle.child, rows), kept, up=up)
    return found if uncut is None or up else found & uncut


def stepped(
    ground: Ground, bundle: Bundle, marks: Marks, rows: Marks | None, kept: Bundle | None, *, up: bool
) -> Marks:
    """The marks of one family moved along a bundle; the nodes `rows` of the child have `kept` of it alone."""
    if rows is None:
        return carried(ground, bundle, marks, up=up)
    found = carried(ground, bundle, marks & ~rows, up=True) if up else carried(ground, bundle, marks, up=False) & ~rows
    if kept is None:
        return found
    more = carried(ground, kept, marks & rows, up=True) if up else carried(ground, kept, marks, up=False) & rows
    return found | more


def carried(ground: Ground, bundle: Bundle, bits: Marks, *, up: bool) -> Marks:
    """The bits of one family moved along a bundle of arrows; broadcasts to the shape of the other family."""
    child, parent = ground.folded.families[bundle.child], ground.folded.families[bundle.parent]
    here, there = (child, parent) if up else (parent, child)
    gone = tuple(k for k, plate in enumerate(here.plates) if plate not in there.plates)
    bits = np.bitwise_or.reduce(bits, axis=gone) if gone else bits
    bits = bits[..., None, :] if here.words is None else bits
    bits = _along(ground, bundle, bits, up=up)
    stay = [plate for plate in here.plates if plate in there.plates]
    order = [stay.index(plate) for plate in there.plates if plate in stay]
    bits = bits.transpose(*order, len(stay), len(stay) + 1)
    for k, plate in enumerate(there.plates):
        if plate not in stay:
            bits = np.expand_dims(bits, k)
    bits = bits[..., 0, :] if there.words is None else bits
    return np.broadcast_to(bits, (*ground.shapes[there.index], bits.shape[-1]))


def _along(ground: Ground, bundle: Bundle, bits: Marks, *, up: bool) -> Marks:
    """`[..., word, lanes]` moved from word to word by the reaches of a bundle."""
    child, parent = ground.folded.families[bundle.child], ground.folded.families[bundle.parent]
    if parent.words is None or not bundle.reaches:
        return np.bitwise_or.reduce(bits, axis=-2, keepdims=True) if up else bits
    n = 1 if child.words is None else ground.words[child.words]
    moved = [_moved(reach, bits, n, ground.words[parent.words], up) for reach in bundle.reaches]
    return reduce(np.bitwise_or, moved)


def _moved(reach: Reach, bits: Marks, n: int, m: int, up: bool) -> Marks:
    """What n words of a child send to m words of the parent that they read (up), or the other way."""
    match reach.kind:
        case "same":
            return bits
        case "every":
            return np.bitwise_or.reduce(bits, axis=-2, keepdims=True)
        case "causal" | "earlier" | "before" if n == m:
            if reach.kind != "before":
                flow = bits[..., ::-1, :] if up else bits
                flow = np.bitwise_or.accumulate(flow, axis=-2)
                bits = flow[..., ::-1, :] if up else flow
            return bits if reach.kind == "causal" else _shifted(bits, -1 if up else 1)
    rows, which = _rows(reach, n, m, up)
    found = [np.bitwise_or.reduce(bits[..., row, :], axis=-2) for row in rows]
    return np.stack(found, axis=-2)[..., which, :]


def _shifted(bits: Marks, by: int) -> Marks:
    found = np.zeros_like(bits)
    if by == 0:
        return bits
    if abs(by) < bits.shape[-2]:
        into, out = (slice(by, None), slice(None, -by)) if by > 0 else (slice(None, by), slice(-by, None))
        found[..., into, :] = bits[..., out, :]
    return found


@lru_cache(maxsize=64)
def _rows(reach: Reach, n: int, m: int, up: bool) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """The different rows of who reads whom, and which row each word has."""
    pairs = reach.matrix(n, m)
    rows, which = np.unique(pairs.T if up else pairs, axis=0, return_inverse=True)
    return rows, which.reshape(-1)

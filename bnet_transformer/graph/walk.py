"""Walks over the ground graph: ancestors, descendants, the Markov blanket, a topological order.

A set of nodes is a boolean array for each family, so that one step along a bundle of arrows is one array operation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bnet_transformer.errors import whole
from bnet_transformer.graph.folded import Bundle, Family
from bnet_transformer.graph.ground import Ground, Ids, Selection

Marks = NDArray[np.bool_]


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
    """Which nodes of each family are among some: `[*plates, word]`."""
    found: dict[int, Marks] = {}
    for node in nodes:
        family = ground.family_of(whole("node", node, least=0)).index
        mark = found.setdefault(family, np.zeros(ground.shapes[family], dtype=bool))
        mark.reshape(-1)[node - int(ground.offsets[family])] = True
    return found


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
        mark = np.asarray(mark & ~stopped[index]) if index in stopped else mark
        for bundle in (ground.folded.into if up else ground.folded.out_of)[index]:
            other = bundle.parent if up else bundle.child
            hit = spread(ground, bundle, mark, up=up)
            new = np.asarray(hit & ~reached[other]) if other in reached else hit
            if new.any():
                reached[other] = np.asarray(reached[other] | hit) if other in reached else hit
                fresh[other] = np.asarray(fresh[other] | new) if other in fresh else new
    return reached


def spread(ground: Ground, bundle: Bundle, mark: Marks, *, up: bool) -> Marks:
    """The nodes one arrow of a bundle away from the marked ones: parents going up, children going down."""
    rows = ground.rows_by_family.get(bundle.child)
    if not rows:
        return _spread(ground, bundle, mark, up=up)
    at = np.zeros(ground.shapes[bundle.child], dtype=bool)
    at.reshape(-1)[np.array(rows) - int(ground.offsets[bundle.child])] = True
    some, found = ground.kept_of(bundle), _spread(ground, bundle, mark & ~at if up else mark, up=up)
    found = found if up else found & ~at
    if some is None:
        return found
    more = _spread(ground, some, mark & at if up else mark, up=up)
    return np.asarray(found | (more if up else more & at))


def _spread(ground: Ground, bundle: Bundle, mark: Marks, *, up: bool) -> Marks:
    child, parent = ground.folded.families[bundle.child], ground.folded.families[bundle.parent]
    here, there = (child, parent) if up else (parent, child)
    cut = ground.cut_by_family.get(child.index, ())
    if cut and up:
        mark = _without(ground, mark, child, cut)
    pairs = ground.reads(bundle) if up else ground.reads(bundle).T
    if here.words is None:
        mark = mark[..., None]
    mark = np.asarray(mark.any(-1, keepdims=True) & pairs[0]) if len(pairs) == 1 else _product(mark, pairs)
    gone = tuple(k for k, plate in enumerate(here.plates) if plate not in there.plates)
    mark = np.asarray(mark.any(axis=gone))
    stay = [plate for plate in here.plates if plate in there.plates]
    mark = mark.transpose([*(stay.index(plate) for plate in there.plates if plate in stay), len(stay)])
    for k, plate in enumerate(there.plates):
        if plate not in stay:
            mark = np.repeat(np.expand_dims(mark, k), ground.folded.sizes[plate], axis=k)
    mark = np.asarray(mark[..., 0]) if there.words is None else mark
    return _without(ground, mark, child, cut) if cut and not up else mark


def _without(ground: Ground, mark: Marks, family: Family, cut: Sequence[int]) -> Marks:
    """The marks without the nodes into which no arrow leads any more."""
    kept = mark.copy()
    kept.reshape(-1)[np.array(cut) - int(ground.offsets[family.index])] = False
    return kept


def _product(mark: Marks, pairs: Marks) -> Marks:
    with np.errstate(invalid="ignore"):  # the products of some BLAS raise the flag over numbers that are none of ours
        return np.asarray((mark.astype(np.float32) @ pairs.astype(np.float32)) > 0)

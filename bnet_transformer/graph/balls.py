"""Balls that roll along arrows (Shachter 1998), those of many questions at once: a bit of each node for each question.

A ball rolls past a node that is not given, and back up from one that is. A set of nodes is an array of bits for each
family, so that one step along a bundle of arrows is one array operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bnet_transformer.graph.folded import Bundle
from bnet_transformer.graph.ground import Ground, Ids, Kept
from bnet_transformer.graph.walk import stepped

Bits = NDArray[np.uint64]  # [..., lanes]: bit q % 64 of lane q // 64 belongs to question q
LANE = 64


@dataclass(frozen=True)
class Cut:
    """What surgery took, with a bit for each question: all arrows into `nodes`, some of those into `rows`, of whose
    families the nodes keep what `kept` says."""

    nodes: Bits
    rows: Bits
    kept: Mapping[int, Kept]


def marks(ground: Ground, count: int, nodes: Sequence[Iterable[int]]) -> Bits:
    """`[node, lanes]`: the bit of each question at its nodes."""
    found: Bits = np.zeros((len(ground), -(-count // LANE)), dtype=np.uint64)
    pairs = [(node, question) for question, some in enumerate(nodes) for node in some]
    if pairs:
        node, question = np.array(pairs).T
        bit = np.uint64(1) << (question % LANE).astype(np.uint64)
        np.bitwise_or.at(found, (node, question // LANE), bit)
    return found


def cuts(ground: Ground, small: Ground, cut: Sequence[Iterable[int]], rows: Sequence[Iterable[int]]) -> Cut:
    """What surgery took of a graph, as bits of a smaller one, in which each question has these numbers for it."""
    kept = {ground.family_of(node).index: kept for node, kept in ground.rows.items()}
    return Cut(marks(small, len(cut), cut), marks(small, len(rows), rows), kept)


def roll(
    ground: Ground,
    start: Bits,
    given: Bits,
    blocked: Bits,
    cut: Cut,
    within: Bits | None = None,
    goal: Bits | None = None,
) -> Bits:
    """`[node, lanes]`: where the balls come that start at `start`; they stay inside `within`, and may stop once each
    question that has a `goal` has come to it.
    """
    families = range(len(ground.folded.families))
    sides = {"given": given, "blocked": blocked, "cut": cut.nodes, "up": start.copy(), "down": np.zeros_like(start)}
    told = {name: [view(ground, bits, index) for index in families] for name, bits in sides.items()}
    inside = None if within is None else [view(ground, within, index) for index in families]
    waiting: dict[str, dict[int, Bits]] = {"up": {}, "down": {}}
    goals = {index: view(ground, goal, index) for index in _families(ground, goal)} if goal is not None else {}
    short: Bits = start[0] * 0 if goal is None else np.bitwise_or.reduce(goal, axis=0)

    def send(index: int, bits: Bits, way: str) -> None:
        up = way == "up"
        if not bits.any():
            return
        for bundle in (ground.folded.into if up else ground.folded.out_of)[index]:
            other = bundle.parent if up else bundle.child
            come = moved(ground, bundle, bits, cut, up=up)
            come = come if up else come & ~told["cut"][other]
            fresh = come & ~told[way][other] if inside is None else come & ~told[way][other] & inside[other]
            if fresh.any():
                told[way][other] |= fresh
                waiting[way][other] = waiting[way][other] | fresh if other in waiting[way] else fresh
                if other in goals:
                    come = (fresh & goals[other]).reshape(-1, len(short))
                    np.bitwise_and(short, ~np.bitwise_or.reduce(come, axis=0), out=short)

    waiting["up"] |= {index: told["up"][index].copy() for index in _families(ground, start)}
    while (waiting["up"] or waiting["down"]) and (goal is None or short.any()):
        rising = bool(waiting["up"])
        way = "up" if rising else "down"
        index = max(waiting[way]) if rising else min(waiting[way])
        bits = waiting[way].pop(index)
        past = bits & ~told["blocked"][index]
        send(index, (past if rising else bits & told["given"][index]) & ~told["cut"][index], "up")
        send(index, past, "down")
    return sides["up"] | sides["down"]


def _families(ground: Ground, bits: Bits) -> list[int]:
    """The families in which there are bits."""
    nodes = np.flatnonzero(bits.any(axis=-1))
    return sorted(set((np.searchsorted(ground.offsets, nodes, side="right") - 1).tolist()))


def view(ground: Ground, bits: Bits, index: int) -> Bits:
    """The part of a family, `[*plates, word, lanes]`."""
    low, high = int(ground.offsets[index]), int(ground.offsets[index + 1])
    return bits[low:high].reshape(*ground.shapes[index], bits.shape[-1])


def moved(ground: Ground, bundle: Bundle, bits: Bits, cut: Cut, *, up: bool) -> Bits:
    """The bits of one family moved along a bundle of arrows, less those that surgery took from nodes with rows."""
    if bundle.child not in cut.kept:
        return stepped(ground, bundle, bits, None, None, up=up)
    reaches = cut.kept[bundle.child].get(bundle.parent)
    kept = None if reaches is None else replace(bundle, reaches=reaches)
    return stepped(ground, bundle, bits, view(ground, cut.rows, bundle.child), kept, up=up)


def ids_of(bits: Bits) -> Ids:
    """The nodes at which the first question has its bit."""
    return np.flatnonzero(bits[:, 0] & np.uint64(1))

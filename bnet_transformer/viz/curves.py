"""The ways of arrows, as chains of cubic curves: smooth from row to row, or along straight lines with round corners."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bnet_transformer.viz.picture import Box, Point

ROUND = 7.0


def curve(start: Point, end: Point, *, sideways: bool = False, bow: float = 0.5) -> tuple[Point, ...]:
    """One smooth curve that leaves and arrives upright, or sideways.

    >>> curve((0, 0), (10, 40))
    ((0, 0), (0, 20.0), (10, 20.0), (10, 40))
    """
    (x0, y0), (x1, y1) = start, end
    if sideways:
        dx = bow * (x1 - x0)
        return start, (x0 + dx, y0), (x1 - dx, y1), end
    dy = bow * (y1 - y0)
    return start, (x0, y0 + dy), (x1, y1 - dy), end


def level(source: Box, target: Box, way: int) -> tuple[Point, ...]:
    """A straight line between boxes side by side; `way` is 1 to the right, -1 to the left."""
    start, end = (source.x + way * source.width / 2, source.y), (target.x - way * target.width / 2, target.y)
    return curve(start, end, sideways=True)


def arch(source: Box, target: Box, rise: float, *, below: bool = False, shift: float = 0.0) -> tuple[Point, ...]:
    """An arch from the top (or bottom) of one box to that of another; `shift` moves its ends towards each other."""
    way = -1 if not below else 1
    toward = 1 if target.x > source.x else -1
    y0, y1 = source.y + way * source.height / 2, target.y + way * target.height / 2
    x0, x1 = source.x + toward * shift, target.x - toward * shift
    return (x0, y0), (x0 + 0.1 * (x1 - x0), y0 + way * rise), (x1 - 0.1 * (x1 - x0), y1 + way * rise), (x1, y1)


def bent(corners: Sequence[Point]) -> tuple[Point, ...]:
    """Straight lines through these corners, the corners rounded."""
    kept = [corners[0]]
    for corner in corners[1:]:
        if math.dist(corner, kept[-1]) > 1e-6:
            kept.append(corner)
    found: list[Point] = [kept[0]]
    for before, corner, after in zip(kept, kept[1:], kept[2:], strict=False):
        radius = min(ROUND, math.dist(before, corner) / 2, math.dist(corner, after) / 2)
        into, out = _towards(corner, before, radius), _towards(corner, after, radius)
        found += _straight(found[-1], into)
        found += [_towards(corner, before, radius * 0.45), _towards(corner, after, radius * 0.45), out]
    return (*found, *_straight(found[-1], kept[-1]))


def _straight(start: Point, end: Point) -> list[Point]:
    (x0, y0), (x1, y1) = start, end
    return [(x0 + (x1 - x0) / 3, y0 + (y1 - y0) / 3), (x0 + 2 * (x1 - x0) / 3, y0 + 2 * (y1 - y0) / 3), end]


def _towards(start: Point, end: Point, length: float) -> Point:
    far = math.dist(start, end)
    return start[0] + (end[0] - start[0]) * length / far, start[1] + (end[1] - start[1]) * length / far

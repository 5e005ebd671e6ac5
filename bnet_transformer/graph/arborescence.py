"""Maximum spanning arborescences (Chu and Liu 1965; Edmonds 1967): the best acyclic choice of parents."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def best_parents(weight: NDArray[np.float64]) -> list[int]:
    """The parent of each node in a maximum spanning forest with as few roots as possible; -1 for a root.

    `weight[i, j]` is the weight of the arrow from j to i, or NaN if there is no arrow. The diagonal is ignored.

    >>> best_parents(np.array([[0, 3.0, 1], [2, 0, 1], [1, 4, 0]]))
    [1, -1, 1]
    """
    # A root is represented as a child of an additional node n. The weight of an arrow from n is lower than any
    # difference between two choices of the other arrows, so the maximum has as few of them as possible.
    n = len(weight)
    table = np.full((n + 1, n + 1), -np.inf)
    table[:n, :n] = np.where(np.isnan(weight), -np.inf, weight)
    finite = table[np.isfinite(table)]
    table[:n, n] = -1 - 2 * (n + 1) * (np.abs(finite).max() if len(finite) else 0)
    np.fill_diagonal(table, -np.inf)
    return [-1 if parent == n else int(parent) for parent in _arborescence(table, n)[:n]]


def _arborescence(table: NDArray[np.float64], root: int) -> NDArray[np.int64]:
    """The parent of each node in the maximum spanning arborescence from `root`."""
    parent: NDArray[np.int64] = table.argmax(axis=1)
    parent[root] = root
    pointers = parent
    for _ in range(len(table).bit_length()):
        pointers = pointers[pointers]  # 2^k steps up; at the end every pointer is the root or part of a cycle
    unreached = np.flatnonzero(pointers != root)
    if not len(unreached):
        return parent
    # Edmonds (1967): if the greedy choice has a cycle, some maximum arborescence contains all its arrows except one,
    # which an arrow from outside replaces. So contract the cycle, subtract from the weight of each entering arrow that
    # of the arrow that it replaces, and recurse.
    path = [int(unreached[0])]
    while int(parent[path[-1]]) not in path:
        path.append(int(parent[path[-1]]))
    cycle = np.array(path[path.index(int(parent[path[-1]])) :])
    in_cycle = np.zeros(len(table), dtype=bool)
    in_cycle[cycle] = True
    outer = np.flatnonzero(~in_cycle)
    gain = table[cycle] - table[cycle, parent[cycle]][:, None]  # the change of weight by an entering arrow
    reduced = np.full((len(outer) + 1, len(outer) + 1), -np.inf)
    reduced[:-1, :-1] = table[np.ix_(outer, outer)]
    reduced[-1, :-1] = gain[:, outer].max(axis=0)
    reduced[:-1, -1] = table[np.ix_(outer, cycle)].max(axis=1)
    np.fill_diagonal(reduced, -np.inf)
    contracted = _arborescence(reduced, int(np.flatnonzero(outer == root)[0]))
    parents: NDArray[np.int64] = parent.copy()
    for k, node in enumerate(outer):
        best = table[node, cycle].argmax()
        parents[node] = cycle[best] if contracted[k] == len(outer) else outer[contracted[k]]
    entry = outer[contracted[-1]]
    parents[cycle[gain[:, entry].argmax()]] = entry
    return parents

"""Maximum spanning arborescences (Chu and Liu 1965; Edmonds 1967): the best acyclic choice of parents."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def best_parents(weight: NDArray[np.float64]) -> list[int]:
    """The parent of each node, -1 for a root: as few roots as possible, and of those choices the largest total weight.

    `weight[i, j]` is that of an arrow from j to i, NaN where there is none; the diagonal does not count.

    >>> best_parents(np.array([[0, 3.0, 1], [2, 0, 1], [1, 4, 0]]))
    [1, -1, 1]
    """
    # A root is a node whose parent is an added node n. Such an arrow weighs less than any difference between two
    # choices of the other arrows, so the maximum has as few of them as possible.
    n = len(weight)
    table = np.full((n + 1, n + 1), -np.inf)
    table[:n, :n] = np.where(np.isnan(weight), -np.inf, weight)
    finite = table[np.isfinite(table)]
    table[:n, n] = -1 - 2 * (n + 1) * (np.abs(finite).max() if len(finite) else 0)
    np.fill_diagonal(table, -np.inf)
    return [-1 if parent == n else int(parent) for parent in _arborescence(table, n)[:n]]


def _arborescence(table: NDArray[np.float64], root: int) -> NDArray[np.int64]:
    """The parent of each node in the maximum arborescence from `root` that reaches every node."""
    parent: NDArray[np.int64] = table.argmax(axis=1)
    parent[root] = root
    pointers = parent
    for _ in range(len(table).bit_length()):
        pointers = pointers[pointers]  # 2^k steps up: in the end every pointer is the root or lies on a cycle
    unreached = np.flatnonzero(pointers != root)
    if not len(unreached):
        return parent
    # Edmonds (1967): if the greedy choice has a cycle, some maximum arborescence breaks it at exactly one node, where
    # an arrow enters. Contract the cycle, charge each entering arrow for the arrow of the cycle that it replaces,
    # recurse.
    path = [int(unreached[0])]
    while int(parent[path[-1]]) not in path:
        path.append(int(parent[path[-1]]))
    cycle = np.array(path[path.index(int(parent[path[-1]])) :])
    in_cycle = np.zeros(len(table), dtype=bool)
    in_cycle[cycle] = True
    outer = np.flatnonzero(~in_cycle)
    gain = table[cycle] - table[cycle, parent[cycle]][:, None]  # the change of weight if the cycle is entered there
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

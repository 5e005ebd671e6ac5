"""Rows of states of variables that contain all joint states of each of many scopes, such as one scope for each word."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class JointRows:
    """Rows in which each variable is in the state of its colour; the variables of one scope have different colours.

    So the rows contain all joint states of each scope, and their number is the product over colours and not over
    variables. The last colour varies fastest.

    Attributes:
        counts: The number of states of each variable.
        colours: The colour of each variable in a scope, by the position of the variable in `counts`.
        sizes: The number of states of each colour.
    """

    counts: Sequence[int]
    colours: Mapping[int, int]
    sizes: tuple[int, ...]

    @classmethod
    def build(
        cls, scopes: Iterable[Sequence[int]], counts: Sequence[int], order: Sequence[tuple[int, int]]
    ) -> JointRows:
        """Rows for some scopes, with a small number of colours.

        Args:
            scopes: The positions of the variables of each scope.
            counts: The number of states of each variable.
            order: A sort key of each variable, such as its word.
        """
        neighbours: dict[int, set[int]] = {}
        for scope in {tuple(scope) for scope in scopes}:
            for k in scope:
                neighbours.setdefault(k, set()).update(scope)
        colours: dict[int, int] = {}
        # Greedy colouring in the order of words: if scopes are intervals of words, it needs only as many colours as the
        # largest scope has variables (Golumbic 2004, Algorithmic graph theory and perfect graphs, chapter 8).
        for k in sorted(neighbours, key=order.__getitem__):
            taken = {colours[other] for other in neighbours[k] if other in colours}
            colours[k] = next(colour for colour in range(len(taken) + 1) if colour not in taken)
        sizes = [1] * (max(colours.values(), default=-1) + 1)
        for k, colour in colours.items():
            sizes[colour] = max(sizes[colour], counts[k])
        return cls(counts, colours, tuple(sizes))

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return math.prod(self.sizes)

    def get_states(self) -> dict[int, NDArray[np.int64]]:
        """The state of each variable of a scope in each row, `[row]` by position.

        A variable with fewer states than its colour is in its last state in the other rows, which `find_rows` omits.
        """
        digits = np.unravel_index(np.arange(self.num_rows), self.sizes) if self.sizes else ()
        return {k: np.minimum(digits[colour], self.counts[k] - 1) for k, colour in self.colours.items()}

    def find_rows(self, scope: Sequence[int]) -> NDArray[np.int64]:
        """The row of each joint state of some variables, with all other colours in their first state.

        Returns:
            `[*states of the scope]`.
        """
        rows = np.zeros([1] * len(scope), dtype=np.int64)
        for axis, k in enumerate(scope):
            steps = np.arange(self.counts[k]) * math.prod(self.sizes[self.colours[k] + 1 :])
            rows = rows + steps.reshape([-1 if other == axis else 1 for other in range(len(scope))])
        return rows

"""The structure of linear paths: the groups on them, the parents that a group adds unchanged, its affine function."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD
from bnet_transformer.declare import Network, NodeSpec, ParentSpec


def find_linear_groups(network: Network, starts: Collection[int], leaves: Collection[int]) -> list[int]:
    """The groups on linear paths to some groups, these included, children first; `leaves` are not followed."""
    visited: set[int] = set()
    stack = list(starts)
    while stack:
        index = stack.pop()
        if index not in visited:
            visited.add(index)
            spec = network.specs[index]
            stack += [spec.parents[k].index for k in get_linear_positions(spec, leaves)]
    order = [index for component in network.filter_components(visited) for index in component]
    return order[::-1]


def get_linear_positions(spec: NodeSpec, leaves: Collection[int]) -> tuple[int, ...]:
    """The positions of the parents through which a path continues; none for a leaf, or for a random value."""
    is_leaf = spec.group.index in leaves or spec.tpm.is_random
    return () if is_leaf else spec.tpm.linear_parents(*spec.tpm_parents)


def is_aligned(parent: ParentSpec) -> bool:
    """Whether word i of a child depends on word i of a parent, or on a parent without words."""
    return parent.reach.kind == "same" and WORD not in (*parent.over, *dict(parent.pick))


def find_residuals(spec: NodeSpec, positions: Collection[int]) -> dict[int, int]:
    """The groups that a group adds unchanged, and only so, each with its number of slots."""
    residual = {
        k
        for k in spec.tpm.residual_parents(*spec.tpm_parents)
        if k in positions and is_aligned(spec.parents[k]) and not (spec.parents[k].over or spec.parents[k].pick)
    }
    indices = [parent.index for parent in spec.parents]
    return {i: indices.count(i) for i in set(indices) if all(k in residual for k, j in enumerate(indices) if j == i)}


@dataclass(frozen=True)
class AffineFunction:
    """An affine function of the values in all slots; weights of attention and the scale of a norm are constants.

    Args:
        evaluate: The function, `[*layout, *shape]`.
        parents: The values in all slots.
        is_norm: Whether it contains the scale of a norm.
        is_sum: Whether it is the sum of the values, so that its constant is zero.
        has_entries: Whether it computes only some entries of the value.
    """

    evaluate: Callable[..., Tensor]
    parents: list[Tensor]
    is_norm: bool
    is_sum: bool
    has_entries: bool = False

    @torch.no_grad()
    def compute_constant(self, positions: Collection[int]) -> Tensor | None:
        """The value if the slots at some positions are zero, `[*layout, *shape]`; None for a sum."""
        if self.is_sum:
            return None
        return self.evaluate(*(torch.zeros_like(p) if k in positions else p for k, p in enumerate(self.parents)))

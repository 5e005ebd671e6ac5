"""Dense blocks of the Gauss-Newton matrix, one for each head: which weights they have, and their inverse.

Under a choice of heads, each prediction depends on the weights of one head, so that the matrix has one block for each
head, and one vector that contains the same entry of every head probes all blocks at once. Where weights of several
heads act together, the blocks omit what lies between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.learning.fit.curvature import FlatLayout
from bnet_transformer.learning.fit.head_summary import find_selectors, head_dims

MAX_ENTRIES = 128  # of a block; weights of larger ones have the mean of the diagonal only
RIDGE = 1e-6  # of the scale, which is added to a block: without a prior it can be singular


@dataclass(frozen=True)
class BlockGroup:
    """Some weights with one block for each head of a selector.

    Attributes:
        selector: The selector; None for one block of weights that are not of heads.
        index: The positions of the entries of each block in the flat vector of the weights, `[block, entry]`.
    """

    selector: NodeSpec | None
    index: Tensor


@dataclass(frozen=True)
class CurvatureBlocks:
    """Blocks of the Gauss-Newton matrix of several sets of parameters.

    Attributes:
        groups: The weights of the blocks.
        matrices: The blocks of each group, `[set, block, entry, entry]`, without damping.
    """

    groups: Sequence[BlockGroup]
    matrices: Sequence[Tensor]

    def select(self, rows: Sequence[int]) -> CurvatureBlocks:
        """Return the blocks of some sets."""
        return replace(self, matrices=[matrix[list(rows)] for matrix in self.matrices])

    def factorize(self, scale: Tensor, damping: Tensor, positions: Tensor) -> Callable[[Tensor], Tensor]:
        """Factorise the damped blocks.

        Args:
            scale: The diagonal of the matrix where there are no blocks, `[set, entry]`.
            damping: The factor of `scale` that is added to the matrix, `[set]`.
            positions: The position of each weight in the vectors to be multiplied, `[weight]`.

        Returns:
            The function from vectors, `[set, entry]`, to their products with the inverse.
        """
        factors = []
        for group, matrix in zip(self.groups, self.matrices, strict=True):
            at = positions[group.index]
            added = (damping[:, None] + RIDGE) * scale
            factors.append((at, torch.linalg.cholesky_ex(matrix + added[:, at].diag_embed()).L))
        diagonal = (1 + damping[:, None]) * scale

        def solve(r: Tensor) -> Tensor:
            z = r / diagonal
            for at, factor in factors:
                z[:, at] = torch.cholesky_solve(r[:, at][..., None], factor)[..., 0]
            return z

        return solve


def find_groups(network: Network, layout: FlatLayout) -> list[BlockGroup]:
    """Group the weights of a layout into blocks. Weights whose block would have too many entries are in no group."""
    parts: dict[str | None, tuple[NodeSpec | None, list[Tensor]]] = {}
    offset = 0
    for name, shape in layout.shapes.items():
        index = torch.arange(offset, offset + shape.numel()).reshape(shape)
        offset += shape.numel()
        owners = [(s, dims[0]) for s in find_selectors(network) if (dims := head_dims(network, s, name))]
        selector, index = (owners[0][0], index.movedim(owners[0][1], 0)) if owners else (None, index[None])
        key = selector.param_prefix if selector else None
        parts.setdefault(key, (selector, []))[1].append(index.reshape(len(index), -1))
    groups = [BlockGroup(selector, torch.cat(index, 1)) for selector, index in parts.values()]
    return [group for group in groups if group.index.shape[1] <= MAX_ENTRIES]

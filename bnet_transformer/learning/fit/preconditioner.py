"""Conjugate gradients that Gauss-Newton blocks of the heads precondition.

The blocks only speed up a solution, and never change what it converges to. So they may be those of a sample of the
sentences, or of earlier parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer.data import Batch
from bnet_transformer.learning.fit.curvature import FlatLayout, ModelStep, QuadraticModel, solve_model
from bnet_transformer.learning.fit.curvature_blocks import CurvatureBlocks, find_groups
from bnet_transformer.learning.fit.gauss_newton import EMExpansion
from bnet_transformer.learning.fit.problem import FitObjective

# Blocks are those of a sample if they need more products with the Jacobian, or if there are more sentences.
MAX_PROBES, MAX_SENTENCES = 16, 1000
MAX_VALUES = 2**25  # numbers in the products of one part of the sample


class PreconditionedSolver:
    """Maximises quadratic models of several sets of parameters. Blocks are computed again as soon as it saves products.

    Args:
        objective: The log evidence and the log prior.
        corpus: The sentences of the blocks, or a set of which they are a sample.
        split: The function that splits sentences into the parts of this process.
        sets: The learned parameters, `[set, *shape]`.
        ranks: The processes that share the sentences.
    """

    def __init__(
        self,
        objective: FitObjective,
        corpus: Batch,
        split: Callable[[Batch], list[Batch]],
        sets: Mapping[str, Tensor],
        ranks: DistributedContext,
    ) -> None:
        self.weights = objective.learned.weights
        self.groups = find_groups(objective.network, FlatLayout.create(sets, self.weights))
        self.blocks: CurvatureBlocks | None = None
        self.excess = 0.0  # products since the blocks were computed, beyond those that new blocks would have needed
        self.first_products: dict[int, float] = {}  # of the first solution with these blocks, by its limit
        sizes = [group.index.shape[1] for group in self.groups]
        self.stride = max(1, math.ceil(sum(sizes) / MAX_PROBES), math.ceil(len(corpus) / MAX_SENTENCES))
        if objective.has_corpus_choice:
            self.stride = 1
        sample = corpus.take(torch.arange(0, len(corpus), self.stride))
        count, observed = len(next(iter(sets.values()))), count_observed_numbers(corpus)
        states = max((spec.tpm.states or 1 for spec in objective.network.choices), default=1)
        size = max(1, MAX_VALUES // (count * max(sizes, default=1) * states * observed))
        parts = split(sample) if self.stride == 1 else [part for full in split(sample) for part in full.parts(size)]
        self.expand = EMExpansion(objective, parts, ranks)

    def solve(
        self,
        sets: Mapping[str, Tensor],
        model: QuadraticModel,
        scale: Tensor,
        damping: Tensor,
        limit: int,
        tolerance: float,
        floor: Tensor | float = 0.0,
    ) -> ModelStep:
        """Maximise damped models by conjugate gradients.

        Args:
            sets: The parameters, at which new blocks are computed.
            model: The models.
            scale: The positive diagonal of the damping, `[set, entry]`.
            damping: The factor of `scale` that is added to `H`, `[set]`.
            limit: The maximum number of products.
            tolerance: The relative residual at which a set stops.
            floor: As that of `solve_model`.

        Returns:
            The steps.
        """
        if not self.groups:
            return solve_model(model, scale, damping, limit, tolerance, floor)
        if self.blocks is None or self.excess > MAX_PROBES:
            self.blocks = self.compute_blocks(sets)
            self.excess, self.first_products = 0.0, {}
        precondition = self.blocks.factorize(scale, damping, model.layout.locate(self.weights))
        solution = solve_model(model, scale, damping, limit, tolerance, floor, precondition)
        self.excess += solution.iterations - self.first_products.setdefault(limit, solution.iterations)
        return solution

    def compute_blocks(self, sets: Mapping[str, Tensor]) -> CurvatureBlocks:
        """Compute the blocks at these parameters, `[set, *shape]`."""
        return self.expand.compute_blocks(sets, self.groups, self.stride)

    def select(self, rows: list[int]) -> None:
        """Keep only some sets."""
        self.blocks = self.blocks and self.blocks.select(rows)

    def snapshot(self) -> dict[str, Tensor]:
        """Return the state as tensors."""
        state = {f"blocks_{i}": matrix for i, matrix in enumerate(self.blocks.matrices if self.blocks else ())}
        products = [(0.0, self.excess), *self.first_products.items()]
        return state | {"products": torch.tensor(products, dtype=torch.float64)}

    def restore(self, state: Mapping[str, Tensor], like: Tensor) -> None:
        """Load the state of a snapshot, to the device of another tensor."""
        (_, self.excess), *products = state["products"].tolist()
        self.first_products = {int(limit): count for limit, count in products}
        matrices = [state[f"blocks_{i}"].to(like) for i in range(len(self.groups)) if f"blocks_{i}" in state]
        self.blocks = CurvatureBlocks(self.groups, matrices) if matrices else None


def count_observed_numbers(corpus: Batch) -> int:
    """Count the observed numbers of one sentence; at least 1."""
    return max(1, sum(evidence.value[0].numel() for evidence in corpus.evidence.values()))

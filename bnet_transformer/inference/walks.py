"""Walks down the slices of a reading chain: products of its steps, greatest flows, the most probable paths."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer.errors import BudgetError
from bnet_transformer.tpm.arrays import in_numpy

FLOWS = 2**16  # greatest flows (one for each state, output word and source word) through three slices or more
WORK = 2**28  # products while paths are sought
UNITS = 2**30  # the parts of which a flow is made


def with_residual(attention: Tensor, share: float) -> Tensor:
    """`(1 - share) P(j | i) + share 1(j = i)`."""
    return (1 - share) * attention + share * torch.eye(attention.shape[-1], dtype=attention.dtype)


def product(steps: Tensor) -> Tensor:
    """`A_T ... A_1 A_0` of `[..., slice, word, word]`."""
    found = steps[..., 0, :, :]
    for t in range(1, steps.shape[-3]):
        found = steps[..., t, :, :] @ found
    return found


def max_flow(steps: Tensor) -> Tensor:
    """For each output word and source word, the greatest flow between them where transitions are capacities.

    Of `[..., slice, word, word]`. Through one slice it is the capacity, through two `sum_k min(A_1[i, k], A_0[k, j])`;
    through more each pair is a flow of its own, of which at most `FLOWS` are sought.
    """
    *lead, count, n, _ = steps.shape
    if count == 1:
        return steps[..., 0, :, :].clone()
    if count == 2:
        return torch.minimum(steps[..., 1, :, :, None], steps[..., 0, None, :, :]).sum(-2)
    each = steps.reshape(-1, count, n, n)
    if len(each) * n * n > FLOWS:
        allowed = "fewer words or slices; do or evidence on choices; method='rollout'"
        wanted, got = f"at most {FLOWS} flows (states x words x words)", f"{len(each) * n * n}"
        raise BudgetError("reads by flow", expected=wanted, got=got, allowed=allowed)
    return torch.stack([_flows(in_numpy(one)) for one in each]).to(steps).reshape(*lead, n, n)


def _flows(steps: NDArray[np.float64]) -> Tensor:
    """The greatest flow from each word above the last step to each word below the first."""
    count, n, _ = steps.shape
    capacity = np.zeros(((count + 1) * n, (count + 1) * n))
    for t, step in enumerate(steps):
        capacity[(t + 1) * n : (t + 2) * n, t * n : (t + 1) * n] = step
    pairs = itertools.product(range(count * n, (count + 1) * n), range(n))
    return torch.tensor([_flow(capacity, source, sink) for source, sink in pairs], dtype=torch.float64).reshape(n, n)


def _flow(capacity: NDArray[np.float64], source: int, sink: int) -> float:
    """The greatest flow: in whole units, then what is left of it in far smaller ones, to the precision of float64."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_flow

    total, most, left = 0.0, 1.0, capacity
    arrows = np.count_nonzero(capacity)
    for _ in range(2):
        unit = most / UNITS
        found = maximum_flow(csr_matrix(np.floor(np.minimum(left, most) / unit).astype(np.int32)), source, sink)
        total += found.flow_value * unit
        left = np.maximum(left - found.flow.toarray() * unit, 0.0)
        most = arrows * unit  # rounding cannot have hidden more than a unit for each arrow
    return total


def best_paths(weights: Tensor, steps: Tensor, word: int, count: int) -> list[tuple[float, tuple[int, ...]]]:
    """The paths of words from a word down through all slices that are most probable in all, best first: exact.

    `P(path) = sum_s weights[s] prod_t steps[s, t, i_(t+1), i_t]`. A path begun is no better than the sum over
    the states of the best that each could make of it; the search goes on from where that is greatest (A*).
    """
    to_go = _best_to_go(steps)
    depth, work = steps.shape[1], 0
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, (word,))]
    found: list[tuple[float, tuple[int, ...]]] = []
    while heap and len(found) < count:
        bound, words = heapq.heappop(heap)
        if len(words) > depth:
            found.append((-bound, words))
            continue
        work += steps.shape[0] * steps.shape[-1]
        if work > WORK:
            allowed = "fewer slices, or a smaller count; do or evidence on choices"
            raise BudgetError("paths", expected=f"at most {WORK} products", got="more", allowed=allowed)
        for total, after in _steps_on(weights, steps, to_go, words):
            heapq.heappush(heap, (-total, after))
    return found


def _best_to_go(steps: Tensor) -> list[Tensor]:
    """For each state, depth and word, the most that a path from there can keep: `[slice][state, word]`."""
    found = [steps.new_ones(steps.shape[0], steps.shape[-1])]
    for t in range(steps.shape[1]):
        found.append((steps[:, t] * found[-1][:, None, :]).amax(-1))
    return found


def _steps_on(
    weights: Tensor, steps: Tensor, to_go: list[Tensor], words: tuple[int, ...]
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Each word that may come next, with a bound on what comes of it (what it comes to, at the last)."""
    share, last = path_shares(weights, steps, words), steps.shape[1] - len(words)
    bounds = (share[:, None] * steps[:, last, words[-1]] * to_go[last]).sum(0)
    return ((bound, (*words, j)) for j, bound in enumerate(bounds.tolist()) if bound > 0)


def path_shares(weights: Tensor, steps: Tensor, words: tuple[int, ...]) -> Tensor:
    """`P(state, these words)` of a path from the top, `[state]`."""
    last, found = steps.shape[1] - 1, weights
    for k, (i, j) in enumerate(itertools.pairwise(words)):
        found = found * steps[:, last - k, i, j]
    return found

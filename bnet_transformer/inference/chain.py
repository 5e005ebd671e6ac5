"""Forward-backward recursions on chains in log space: log partition functions with exact gradients.

A chain of n positions with states `c_0 .. c_(n-1)` has the unnormalised probability

    exp(u_0[c_0]) prod_{i > 0} exp(p_i[c_(i-1), c_i] + u_i[c_i]),

with a vector `u_i` (`unary`) for each position and a matrix `p_i` (`pair`) for each position but the first. The forward
message `alpha_i[b]` is the log of the sum over all states up to i with `c_i = b`; the backward message `beta_i[a]` is
that over all states after i, given `c_i = a` (Rabiner 1989, "A tutorial on hidden Markov models").

All sums are log-sum-exp. Rescaled products of probabilities are not enough: if the likelihood of one position favours a
state by 800 nats, and later positions favour another state by 2,000 nats, then the decisive state has underflowed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer.inference.contraction import Array, find_grid_step

# The loop takes n steps, the tree O(log n). On a CPU the tree is faster while the matrices of one position have few
# entries (measured). On a GPU it is faster while its terms fit in memory.
MAX_TREE_SIZE = 2**9
MAX_TREE_TERMS = 2**27
CHUNK_ELEMENTS = 2**18  # entries of pair posteriors that are computed at once, so that they fit in the cache


def chain_log_partition(unary: Tensor, pair: Tensor) -> Tensor:
    """The log of the sum over all sequences of states, in float64.

    Its derivative with respect to `unary` is the posterior `P(c_i = b)`, and that with respect to `pair` is
    `P(c_(i-1) = a, c_i = b)` (Darwiche 2003, "A differential approach to inference in Bayesian networks").

    Args:
        unary: `[n, S, K]`: the log potential of each position, sequence and state.
        pair: `[n - 1 or 1, S or 1, K, K]`: the log potential of each position after the first, from the state of the
            previous position (dim -2) to its own state (dim -1). Size 1 broadcasts.

    Returns:
        The log partition function of each sequence, `[S]`.
    """
    unary, pair = unary.double(), pair.double()
    if len(unary) == 1:
        return unary[0].logsumexp(-1)
    log_partition: Tensor = _ForwardBackward.apply(unary, pair, torch.is_grad_enabled())[0]  # type: ignore[no-untyped-call]
    return log_partition


def most_probable_path(unary: Array, pair: Array) -> tuple[NDArray[np.int64], float]:
    """The most probable sequence of states, and the log of its product (Viterbi 1967).

    Args:
        unary: `[n, K]`: the log potential of each position and state.
        pair: `[n - 1, K, K]`: the log potential of each position after the first, from the state of the previous
            position to its own state.

    Returns:
        The states `[n]` and the log of the product. Of equal products, the sequence with the smallest first states.
    """
    # Backward messages, and then states from the first position on: so the first of equal maxima is the smallest state.
    greatest = [np.abs(table, where=np.isfinite(table), out=np.zeros_like(table)) for table in (unary, pair)]
    step = find_grid_step(sum(float(table.max(tuple(range(1, table.ndim)), initial=0.0).sum()) for table in greatest))
    rounded, links = np.round(unary / step) * step, np.round(pair / step) * step
    for i in range(len(links) - 1, -1, -1):
        rounded[i] += (links[i] + rounded[i + 1]).max(1)
    state = int(rounded[0].argmax())
    states = [state]
    for i, link in enumerate(links):
        state = int((link[state] + rounded[i + 1]).argmax())
        states.append(state)
    path = np.array(states)
    terms = np.concatenate([unary[np.arange(len(path)), path], pair[np.arange(len(pair)), path[:-1], path[1:]]])
    return path, math.fsum(terms)


def forward_messages(unary: Tensor, pair: Tensor) -> Tensor:
    """The forward messages `alpha`, `[n, S, K]`, in a loop over the positions."""
    messages = [unary[0]]
    for factor, matrix in zip(unary[1:].unbind(0), _matrices(unary, pair), strict=True):
        messages.append((messages[-1].unsqueeze(-1) + matrix).logsumexp(-2) + factor)
    return torch.stack(messages)


def backward_messages(unary: Tensor, pair: Tensor) -> Tensor:
    """The backward messages `beta`, `[n, S, K]`, in a loop over the positions."""
    messages = [torch.zeros_like(unary[-1])]
    for factor, matrix in zip(unary[1:].flip(0).unbind(0), reversed(_matrices(unary, pair)), strict=True):
        messages.append((matrix + (messages[-1] + factor).unsqueeze(-2)).logsumexp(-1))
    return torch.stack(messages[::-1])


def _matrices(unary: Tensor, pair: Tensor) -> list[Tensor]:
    """The matrix of each position after the first, `[S or 1, K, K]`."""
    return list(pair.expand(len(unary) - 1, *pair.shape[1:]).unbind(0))


class _ForwardBackward(torch.autograd.Function):
    """`log Z`, `alpha` and `beta`. The gradient of `log Z` is a function of the messages, which are outputs, so that it
    is differentiable too.
    """

    @staticmethod
    def forward(unary: Tensor, pair: Tensor, needs_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
        n, sequences, states = unary.shape
        if unary.device.type == "cpu":
            has_tree = sequences * states**2 <= MAX_TREE_SIZE
        else:
            has_tree = n * sequences * states**3 <= MAX_TREE_TERMS
        messages = _messages_by_tree(unary, pair) if has_tree else None
        if messages is None and not has_tree and unary.device.type == "cpu" and pair.shape[1] == 1:
            messages = _messages_by_products(unary, pair, needs_gradient)
        if messages is None:
            alpha = forward_messages(unary, pair)
            messages = alpha, backward_messages(unary, pair) if needs_gradient else torch.zeros_like(alpha)
        return messages[0][-1].logsumexp(-1), *messages

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:2], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        unary, pair, log_partition, alpha, beta = ctx.saved_tensors
        by_partition, by_alpha, by_beta = grads
        unary_grad, pair_grad = None, None
        if by_partition is not None:
            posterior = (alpha + beta - log_partition.unsqueeze(-1)).clamp(max=0.0).exp()
            unary_grad = by_partition.unsqueeze(-1) * posterior
            if ctx.needs_input_grad[1]:
                pair_grad = _weighted_pair_posterior(unary, pair, alpha, beta, log_partition, by_partition)
        for messages, grad in ((forward_messages, by_alpha), (backward_messages, by_beta)):  # second derivatives
            if grad is not None:
                by_unary, by_pair = torch.func.vjp(messages, unary, pair)[1](grad)
                unary_grad = by_unary if unary_grad is None else unary_grad + by_unary
                pair_grad = by_pair if pair_grad is None else pair_grad + by_pair
        return unary_grad, pair_grad, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], unary: Tensor, pair: Tensor, needs_gradient: bool
    ) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
        """The dim of `vmap` becomes part of the dim of sequences."""
        count, (n, sequences, states) = info.batch_size, unary.shape[-3:]
        by_set = unary.unsqueeze(0) if in_dims[0] is None else unary.movedim(in_dims[0], 0)
        n, sequences, states = by_set.shape[1:]
        unary = by_set.expand(count, n, sequences, states).transpose(0, 1).reshape(n, -1, states)
        pair = pair.unsqueeze(0) if in_dims[1] is None else pair.movedim(in_dims[1], 0)
        if in_dims[1] is not None or pair.shape[2] > 1:
            pair = pair.expand(count, -1, sequences, states, states)
        pair = pair.transpose(0, 1).flatten(1, 2)
        log_partition, *messages = _ForwardBackward.apply(unary, pair, needs_gradient)  # type: ignore[no-untyped-call]
        unfolded = (message.unflatten(1, (count, sequences)) for message in messages)
        return (log_partition.unflatten(0, (count, sequences)), *unfolded), (0, 1, 1)


def _weighted_pair_posterior(
    unary: Tensor, pair: Tensor, alpha: Tensor, beta: Tensor, log_partition: Tensor, weight: Tensor
) -> Tensor:
    """`P(c_(i-1) = a, c_i = b)` times the weight of each sequence, summed over the dims in which `pair` has size 1."""
    size = max(1, CHUNK_ELEMENTS // (unary.shape[1] * unary.shape[2] ** 2))
    parts = []
    for start in range(0, len(unary) - 1, size):
        current = slice(start + 1, start + 1 + size)
        matrices = pair if len(pair) == 1 else pair[start : start + size]
        into = (unary[current] + beta[current] - log_partition.unsqueeze(-1)).unsqueeze(-2)
        logs = alpha[: len(unary) - 1][start : start + size].unsqueeze(-1) + matrices + into
        part = logs.clamp(max=0.0).exp() * weight[:, None, None]
        part = part.sum(1, keepdim=True) if pair.shape[1] == 1 else part
        parts.append(part.sum(0, keepdim=True) if len(pair) == 1 else part)
    return torch.stack(parts).sum(0) if len(pair) == 1 else torch.cat(parts)


def _messages_by_products(unary: Tensor, pair: Tensor, needs_gradient: bool) -> tuple[Tensor, Tensor] | None:
    """The messages of sequences that share their matrices, by a matrix product for each position; None if they
    underflow.
    """
    matrices = pair.squeeze(1).expand(len(unary) - 1, *pair.shape[2:])
    arrivals = _iterate_products(unary, matrices)
    if arrivals is None:
        return None
    alpha, zero = torch.cat([unary[:1], arrivals + unary[1:]]), torch.zeros_like(unary)
    arrivals = _iterate_products(unary.flip(0), matrices.flip(0).mT) if needs_gradient else zero[1:]
    return None if arrivals is None else (alpha, torch.cat([arrivals.flip(0), zero[:1]]))


def _iterate_products(unary: Tensor, matrices: Tensor) -> Tensor | None:
    """`log(exp(m_i + u_i) @ exp(p_i))` for each position but the last, where m_(i+1) is the result of position i.

    None if scaling by the maximum of each vector and column does not prevent underflow; see `_log_matmul`.
    """
    columns = matrices.amax(-2, keepdim=True)
    message, arrivals, products = unary[0], list[Tensor](), list[Tensor]()
    for factor, matrix, column in zip(unary[1:], (matrices - columns).exp(), columns, strict=True):
        greatest = message.amax(-1, keepdim=True)
        products.append((message - greatest).exp() @ matrix)
        arrivals.append(products[-1].log() + (greatest + column))
        message = arrivals[-1] + factor
    return torch.stack(arrivals) if _is_exact(torch.stack(products)) else None


def _messages_by_tree(unary: Tensor, pair: Tensor) -> tuple[Tensor, Tensor] | None:
    """The messages by products of neighbouring matrices in a balanced tree, in O(log n) steps; None if they underflow.

    The products of blocks of 1, 2, 4, ... positions are computed upwards; downwards, the messages at the ends of each
    block follow from those of the block above it (Blelloch 1990, "Prefix sums and their applications"; Särkkä and
    García-Fernández 2021 for hidden Markov models).
    """
    levels = [pair + unary[1:].unsqueeze(-2)]
    while len(levels[-1]) > 1:
        blocks = levels[-1]
        even = len(blocks) // 2 * 2
        products = _log_matmul(blocks[0:even:2], blocks[1:even:2])
        if products is None:
            return None
        levels.append(torch.cat([products, blocks[even:]]))
    alpha, beta = unary[:1], torch.zeros_like(unary[:1])  # before and after the block of all positions
    for blocks in levels[-2::-1]:
        even = len(blocks) // 2 * 2
        left, right = alpha[: even // 2], beta[: even // 2]
        middle = (
            (left.unsqueeze(-1) + blocks[0:even:2]).logsumexp(-2),
            (blocks[1:even:2] + right.unsqueeze(-2)).logsumexp(-1),
        )
        alpha = torch.cat([torch.stack([left, middle[0]], 1).flatten(0, 1), alpha[even // 2 :]])
        beta = torch.cat([torch.stack([middle[1], right], 1).flatten(0, 1), beta[even // 2 :]])
    last = (alpha[-1:].unsqueeze(-1) + levels[0][-1:]).logsumexp(-2)
    first = (levels[0][:1] + beta[:1].unsqueeze(-2)).logsumexp(-1)
    return torch.cat([alpha, last]), torch.cat([first, beta])


def _log_matmul(left: Tensor, right: Tensor) -> Tensor | None:
    """`log(exp(left) @ exp(right))`; None if scaling by the maximum of each row and column does not prevent underflow.

    A GPU does not wait for this test: it computes log-sum-exp of all terms instead.
    """
    if left.device.type != "cpu":
        return (left.unsqueeze(-1) + right.unsqueeze(-3)).logsumexp(-2)
    row, column = left.amax(-1, keepdim=True), right.amax(-2, keepdim=True)
    product = (left - row).exp() @ (right - column).exp()
    return product.log() + row + column if _is_exact(product) else None


def _is_exact(products: Tensor) -> bool:
    """True if all entries are much greater than the smallest number, and so than all terms that underflow."""
    return bool((products > torch.finfo(products.dtype).tiny ** 0.8).all())

"""The likelihood of a readout of an attention, for all words together, without the mean of each joint state.

The linear map of the readout commutes with the attention weights: `W (P v) = P (W v)`. For a Normal readout

    sum_i |t_i - sum_j P_ij v_j|^2 = |t|^2 - 2 <P, t v^T> + <P^T P, v v^T>

On the right, the choices of P (of q and k) and the choices of v are combined only in a product of Gram matrices. With M
atoms for each of q, k and v, the right-hand side takes M^2 attentions and M^3 inner products of n^2 numbers; the
left-hand side takes M^3 products of n^2 d numbers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.evaluate import gather_attention_inputs
from bnet_transformer.compiler.execution_state import ExecutionState
from bnet_transformer.compiler.fused import AttentionInputs, apply_maps, attend, classify_dims, scaled_product
from bnet_transformer.compiler.gather import build_context
from bnet_transformer.compiler.plan import Plan
from bnet_transformer.compiler.validate_inputs import is_readable
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.tpm import Attention, Categorical, Dot, EvalContext, Normal
from bnet_transformer.tpm.base import broadcast_shapes
from bnet_transformer.tpm.combine import apply_linear
from bnet_transformer.tpm.random import squared_distance

MIN_LOG_SIGMA = -2.5  # minimum log sigma for Gram matrices in float32
MIN_SPEEDUP = 2.0  # required ratio of products, because products of Gram matrices are small and slow


def find_deferred_attention(
    network: Network,
    observed: Collection[int],
    ancestral_set: Collection[int],
    retained: Collection[int],
    enumerated: Collection[int],
) -> dict[int, int]:
    """Readouts whose attention no other computation requires.

    Args:
        network: The net.
        observed: Groups with evidence.
        ancestral_set: All groups that matter.
        retained: Groups whose values are requested or set.
        enumerated: The enumerated choices.

    Returns:
        A mapping from readout to its attention, by group index.
    """
    deferred = {}
    if any(network.specs[i].group.word_stack is not None or network.specs[i].group.plates for i in enumerated):
        return {}
    for index in observed:
        spec = network.specs[index]
        if _is_affine_readout(spec) and not spec.group.plates and index not in retained:
            (parent,) = spec.parents
            readers = {edge.child for edge in network.graph.out_edges[parent.index]} & set(ancestral_set)
            is_same_word = not parent.pick and parent.reach.kind == "same" and spec.group.word_stack is not None
            if is_same_word and readers == {index} and _is_fusible_attention(network.specs[parent.index], retained):
                deferred[index] = parent.index
    return deferred


def _is_affine_readout(spec: NodeSpec) -> bool:
    """True for a readout of single words that is affine in one vector."""
    tpm = spec.tpm
    if not isinstance(tpm, Normal | Categorical) or tpm.pool or len(spec.parents) != 1:
        return False
    return isinstance(tpm, Normal) or (tpm.affine and spec.tpm_parents[0].states is None)


def _is_fusible_attention(spec: NodeSpec, retained: Collection[int]) -> bool:
    """True for softmax attention over words by scaled dot products, without a bias."""
    tpm = spec.tpm
    if not isinstance(tpm, Attention) or spec.group.plates or spec.group.index in retained:
        return False
    is_plain = isinstance(tpm.score, Dot) and tpm.score.rotary is None and tpm.bias is None and tpm.over == "keys"
    over = all(parent.over == (WORD,) and not parent.pick for parent in spec.parents[1:3])
    return is_plain and over and tpm.normaliser.kind == "softmax" and not spec.parents[0].pick


def deferred_log_likelihood(
    execution: ExecutionState, plan: Plan, spec: NodeSpec, y: Tensor, observed: Tensor | None
) -> Tensor:
    """`log P(y | choices)`, summed over all words.

    Args:
        execution: The state after the pass.
        plan: The plan of the pass.
        spec: The readout.
        y: The observed values, in the layout.
        observed: The mask of observed words; None for all.
    """
    x = execution.network.specs[spec.parents[0].index]
    attention, output_map, residual = gather_attention_inputs(execution, x, plan.folds.get(x.group.index))
    context = build_context(execution, spec)
    W = context.parameters.get("weight")
    if W is not None:
        residual = None if residual is None else apply_linear(W, residual)
        if output_map is None and _is_map_first_cheaper(W, attention):
            attention = replace(attention, v=apply_linear(W, attention.v))
        else:
            output_map = W if output_map is None else W @ output_map
    if isinstance(spec.tpm, Normal):
        target = y if W is None else y - context["bias"]
        target = target if residual is None else target - residual
        return _normal_log_likelihood(spec.tpm, context, attention, output_map, target, observed)
    logits = context["logits"] if residual is None else context["logits"] + residual
    return _categorical_log_likelihood(_mapped_mix(attention, output_map) + logits, y, observed)


def _normal_log_likelihood(
    tpm: Normal,
    context: EvalContext,
    attention: AttentionInputs,
    output_map: Tensor | None,
    target: Tensor,
    observed: Tensor | None,
) -> Tensor:
    """The log likelihood of a Normal readout, by Gram matrices if that costs less and is precise enough."""
    if output_map is None and _is_gram_precise(context["log_sigma"]) and _is_gram_cheaper(attention, target):
        square = _gram_squared_error(attention, target, observed)
    else:
        mean = _mapped_mix(attention, output_map)
        over = (-1,) if observed is not None else (-2, -1)
        square = squared_distance(target, mean, over)
        square = square.unsqueeze(-1) if observed is None else _sum_over_words(square, observed)
    words = target.shape[-2] if observed is None else observed.sum(-1, keepdim=True)
    return tpm.log_density(context, square, words * target.shape[-1])


def _categorical_log_likelihood(logits: Tensor, target: Tensor, observed: Tensor | None) -> Tensor:
    """The log likelihood of a categorical readout."""
    shape = broadcast_shapes(logits.shape[:-1], target.shape)
    # Subtract the detached maximum: `exp(logits - logsumexp)`, the gradient of torch.logsumexp, does not sum to 1 when
    # logits are large. (log_softmax is slower for few states.)
    logits = logits - logits.detach().amax(-1, keepdim=True)
    picked = logits.expand(*shape, -1).gather(-1, target.expand(shape).unsqueeze(-1)).squeeze(-1)
    return _sum_over_words(picked - logits.exp().sum(-1).log(), observed)


def _mapped_mix(attention: AttentionInputs, output_map: Tensor | None) -> Tensor:
    """The mixed values, multiplied by the output map."""
    mix = attend(attention)
    return mix if output_map is None else apply_maps([output_map], mix, [None])[0]


def _sum_over_words(values: Tensor, observed: Tensor | None) -> Tensor:
    """The sum over the observed words."""
    return (values if observed is None else values * observed).sum(-1, keepdim=True)


def _is_map_first_cheaper(W: Tensor, attention: AttentionInputs) -> bool:
    """True if mapping the values takes fewer products than mapping the mixed values of every joint state."""
    (rows, width), m = W.shape[-2:], attention.k.shape[-2]
    return rows * m <= width * (m + rows)


def _is_gram_precise(log_sigma: Tensor) -> bool:
    """False in float32 with a small sigma: the terms of the expansion are much larger than their sum (cancellation)."""
    if log_sigma.dtype == torch.float64 or not is_readable(log_sigma):
        return True
    return float(log_sigma.detach().min()) >= MIN_LOG_SIGMA


def _is_gram_cheaper(attention: AttentionInputs, target: Tensor) -> bool:
    """True if Gram matrices take far fewer products than the mixed values of every joint state."""
    dims = classify_dims(attention, target)
    n, m, width = attention.q.shape[-2], attention.k.shape[-2], attention.v.shape[-1]
    P, V = dims.count_entries(dims.only_q) * dims.count_entries(dims.only_k), dims.count_entries(dims.only_v)
    grams = P * m * (n * m + V * (n + m)) + V * m * width * (n + m)
    return P * V * n * m * width > MIN_SPEEDUP * grams


def _gram_squared_error(attention: AttentionInputs, target: Tensor, observed: Tensor | None) -> Tensor:
    """`sum_i |t_i - sum_j P_ij v_j|^2`, `[*lead, 1]`."""
    mask_by_word = None if observed is None else observed.unsqueeze(-1)
    # The expansion in the module docstring: <P, t v^T> and <P^T P, v v^T> are inner products of n m and m^2 numbers,
    # one for each pair of a state of P and a state of v, so that no mixture P v of a joint state is computed.
    dims = classify_dims(attention, target, *([] if mask_by_word is None else [mask_by_word]))
    n, m, width = attention.q.shape[-2], attention.k.shape[-2], attention.v.shape[-1]
    Q, K, V = (
        dims.flatten(attention.q, dims.only_q, is_leading=True),
        dims.flatten(attention.k, dims.only_k),
        dims.flatten(attention.v, dims.only_v, is_leading=True),
    )
    t, count = dims.flatten(target, ()), len(Q)
    mask = None if mask_by_word is None else dims.flatten(mask_by_word, ())
    t = t if mask is None else t * mask
    values = V.reshape(-1, m, width)
    vv = torch.bmm(values, values.mT).reshape(count, -1, m * m)
    tv = torch.bmm(t, V.mT).reshape(count, n, -1, m).transpose(1, 2).reshape(count, -1, n * m)
    squares = []
    for k in K.reshape(count, m, -1, K.shape[-1]).unbind(2):  # one state of the keys at a time, to limit memory
        scores = scaled_product(Q, k, attention.scale).reshape(count, -1, n, m)
        if attention.mask is not None:
            scores = scores.masked_fill(~dims.flatten_mask(attention.mask).unsqueeze(-3), -torch.inf)
        P = scores.softmax(-1)
        P = (P if mask is None else P * mask.unsqueeze(1)).reshape(-1, n, m)
        pp = torch.bmm(P.mT, P).reshape(count, -1, m * m)
        squares.append(torch.baddbmm(torch.bmm(pp, vv.mT), P.reshape(count, -1, n * m), tv.mT, alpha=-2))
    total = torch.stack(squares, 2) + t.square().sum((1, 2))[:, None, None, None]
    return dims.unflatten(total.flatten(1, 2), 1, 1).squeeze(-1)

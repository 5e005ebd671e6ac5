"""The likelihood of a Normal readout right above an attention, all words together.

    sum_i |t_i - sum_j P_ij v_j|^2 = |t|^2 - 2 <P, t v^T> + <P^T P, v v^T>

On the right the choices of P (those of q and k) and those of v meet in one product of Gram matrices: with M atoms for
each role there are M^2 attentions and M^3 inner products of n^2 numbers; on the left M^3 mixes of n^2 d.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from bnet_transformer.axes import WORD
from bnet_transformer.compiler.fused import Reading, dims_of, maps, mix_of, scaled_product
from bnet_transformer.compiler.plan import Plan
from bnet_transformer.compiler.values import Course, attended, standing
from bnet_transformer.network import Member, Network
from bnet_transformer.tpm import Attention, Dot, Normal
from bnet_transformer.tpm.linear import apply
from bnet_transformer.tpm.normal import squared_distance

PAYS = 2.0  # how many times fewer products Gram matrices must need: theirs are small


def attentions_below(
    network: Network, told: Collection[int], above: Collection[int], kept: Collection[int], free: Collection[int]
) -> dict[int, int]:
    """Readout -> the attention right below it, where nothing else needs the attention's value.

    `told` are families with evidence, `above` all that matter, `kept` those asked for or set, `free` the choices.
    """
    found = {}
    if any(network.members[i].family.words is not None or network.members[i].family.plates for i in free):
        return {}
    for index in told:
        member = network.members[index]
        if isinstance(member.tpm, Normal) and not member.tpm.pool and not member.family.plates and index not in kept:
            (given,) = member.inputs
            readers = {bundle.child for bundle in network.graph.out_of[given.parent]} & set(above)
            straight = not given.pick and given.reach.kind == "same" and member.family.words is not None
            if straight and readers == {index} and _is_attention(network.members[given.parent], kept):
                found[index] = given.parent
    return found


def _is_attention(member: Member, kept: Collection[int]) -> bool:
    """True for softmax attention over words by scaled products, nothing added to the score."""
    tpm = member.tpm
    if not isinstance(tpm, Attention) or member.family.plates or member.family.index in kept:
        return False
    plain = isinstance(tpm.score, Dot) and tpm.score.rotary is None and tpm.bias is None and tpm.over == "keys"
    over = all(given.over == (WORD,) and not given.pick for given in member.inputs[1:3])
    return plain and over and tpm.normaliser.kind == "softmax" and not member.inputs[0].pick


def log_likelihood(course: Course, plan: Plan, member: Member, y: Tensor, observed: Tensor | None) -> Tensor:
    """`log P(y | choices)` of all words together; `y` is `[*layout, dim]`, `observed` `[*layout]`."""
    assert isinstance(member.tpm, Normal)
    x = course.network.members[member.inputs[0].parent]
    reading, W_v, residual = attended(course, x, plan.folds.get(x.family.index))
    own = standing(course, member)
    if member.tpm.dim is not None:
        W, y = own["weight"], y - own["bias"]
        residual = None if residual is None else apply(W, residual)
        reading, W_v = (replace(reading, v=apply(W, reading.v)), None) if W_v is None else (reading, W @ W_v)
    target = y if residual is None else y - residual
    if W_v is None and _pays(reading, target):
        square = _by_gram_matrices(reading, target, observed)
    else:
        mix = mix_of(reading)
        mean = mix if W_v is None else maps([W_v], mix, [None])[0]
        square = squared_distance(target, mean)
        square = (square if observed is None else square * observed).sum(-1, keepdim=True)
    words = target.shape[-2] if observed is None else observed.sum(-1, keepdim=True)
    return member.tpm.log_density(own, square, words * target.shape[-1])


def _pays(r: Reading, target: Tensor) -> bool:
    """True where Gram matrices need far fewer products than the mix of every joint state."""
    dims = dims_of(r, target)
    n, m, width = r.q.shape[-2], r.k.shape[-2], r.v.shape[-1]
    P, V = dims.count(dims.of_q) * dims.count(dims.of_k), dims.count(dims.of_v)
    grams = P * m * (n * m + V * (n + m)) + V * m * width * (n + m)
    return P * V * n * m * width > PAYS * grams


def _by_gram_matrices(r: Reading, target: Tensor, observed: Tensor | None) -> Tensor:
    """`sum_i |t_i - sum_j P_ij v_j|^2`, `[*lead, 1]`."""
    shown = None if observed is None else observed.unsqueeze(-1)
    dims = dims_of(r, target, *([] if shown is None else [shown]))
    n, m, width = r.q.shape[-2], r.k.shape[-2], r.v.shape[-1]
    Q, K, V = dims.rows(r.q, dims.of_q, first=True), dims.rows(r.k, dims.of_k), dims.rows(r.v, dims.of_v, first=True)
    t, count = dims.rows(target, ()), len(Q)
    there = None if shown is None else dims.rows(shown, ())
    t = t if there is None else t * there
    each = V.reshape(-1, m, width)
    vv = torch.bmm(each, each.mT).reshape(count, -1, m * m)
    tv = torch.bmm(t, V.mT).reshape(count, n, -1, m).transpose(1, 2).reshape(count, -1, n * m)
    squares = []
    for k in K.reshape(count, m, -1, K.shape[-1]).unbind(
        2
    ):  # one state of the keys at a time: what it makes stays small
        scores = scaled_product(Q, k, r.scale).reshape(count, -1, n, m)
        scores = scores if r.mask is None else scores.masked_fill(~dims.mask(r.mask).unsqueeze(-3), -torch.inf)
        P = scores.softmax(-1)
        P = (P if there is None else P * there.unsqueeze(1)).reshape(-1, n, m)
        pp = torch.bmm(P.mT, P).reshape(count, -1, m * m)
        squares.append(torch.baddbmm(torch.bmm(pp, vv.mT), P.reshape(count, -1, n * m), tv.mT, alpha=-2))
    total = torch.stack(squares, 2) + t.square().sum((1, 2))[:, None, None, None]
    return dims.back(total.flatten(1, 2), 1, 1).squeeze(-1)

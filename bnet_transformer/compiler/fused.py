"""Fused operations: equations of the package's TPMs as the fewest and largest products that torch has for them.

Each takes what the TPM would see, in the layout `[*enumerated, batch, *plates, word, *shape]`, and returns the same
value, or None where it does not apply. Dims of size 1 are dims on which a value does not depend: what is the same for
all heads or selector states is one operand of one large product, never copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bnet_transformer._core.naming import WORD
from bnet_transformer.declare import NodeSpec
from bnet_transformer.tpm import Affine, Attention, Bias, Cayley, Dot, EvalContext, Linear
from bnet_transformer.tpm.base import broadcast_shapes
from bnet_transformer.tpm.combine import apply_linear

FEW = 16 * 16  # pairs of words up to which explicit products beat fused attention (2 cores, forward and backward)


def fused(member: NodeSpec, at: EvalContext, parents: Sequence[Tensor], *, whole: bool, causal: bool) -> Tensor | None:
    """The value of a node by a fused operation, where there is one.

    `whole` says that every word reads every word, `causal` that it reads those up to itself: no mask is needed then.
    """
    tpm = member.tpm
    if isinstance(tpm, Linear | Affine) and tpm.dim is None:
        bias = at["bias"] if isinstance(tpm, Affine) else None
        return maps([parents[0]], parents[1], [bias])[0]
    if isinstance(tpm, Attention) and is_plain(tpm, member, parents):
        mix = mix_of(reading_of(tpm, at, parents, whole=whole, causal=causal))
        return mix + parents[-1] if tpm.residual else mix
    if isinstance(tpm, Cayley) and all(x.shape[-3] == 1 for x in parents) and at.word is at.read_indices["z."]:
        mask = None if whole else at.mask["z."].any(-2, keepdim=True)  # every word reads the same: all that are there
        return tpm.mix(at.read_indices["z."], mask, *parents).squeeze(-3)
    return None


def entries(table: Tensor, dims: Sequence[int], rank: int) -> Tensor:
    """`table[d1, d2, *shape]` at all states of its parents, each along its own dim of the layout: a view, where a
    look-up would copy."""
    order = sorted(range(len(dims)), key=dims.__getitem__)
    sizes = [1] * rank
    for d, size in zip(dims, table.shape, strict=False):
        sizes[d] = size
    return table.permute(*order, *range(len(dims), table.dim())).reshape(*sizes, *table.shape[len(dims) :])


def maps(weights: Sequence[Tensor], x: Tensor, biases: Sequence[Tensor | None]) -> list[Tensor]:
    """`W x (+ b)` for several W at once: one matrix product where x is the same for all their heads and states."""
    shared = all(_shares(W, x) for W in weights)
    if shared and not any(_wider(b, W) for b, W in zip(biases, weights, strict=True)):
        if len(weights) > 1 and not _joins(weights, x):
            return [maps([W], x, [b])[0] for W, b in zip(weights, biases, strict=True)]
        flat = [W.reshape(-1, W.shape[-1]) for W in weights]
        bias = [b.expand(W.shape[:-1]).reshape(-1) for b, W in zip(biases, weights, strict=True) if b is not None]
        y = functional.linear(x, _joined(flat), _joined(bias) if bias else None)
        parts = y.split([len(W) for W in flat], -1) if len(flat) > 1 else [y]
        return [_spread(part, W) for part, W in zip(parts, weights, strict=True)]
    if len(weights) > 1 and len({W.shape[:-2] for W in weights}) == 1:
        parts = _each(torch.cat(list(weights), -2), x).split([W.shape[-2] for W in weights], -1)
    else:
        parts = [_each(W, x) for W in weights]
    return [part if b is None else part + b for part, b in zip(parts, biases, strict=True)]


def _each(W: Tensor, x: Tensor) -> Tensor:
    """`W x` with one product for each head or state, each of all words."""
    rank = x.dim() - 1
    wide = [d for d in range(rank) if W.shape[d] > 1] if W.dim() == x.dim() + 1 else []
    if not wide or any(x.shape[d] != W.shape[d] for d in wide):
        return apply_linear(W, x)
    rest = [d for d in range(rank) if d not in wide]
    count = math.prod([W.shape[d] for d in wide])
    order = [*wide, *rest]
    W, x = W.reshape(count, *W.shape[-2:]), x.permute(*order, rank)
    y = torch.bmm(x.reshape(count, -1, x.shape[-1]), W.mT)
    return y.reshape(*x.shape[:-1], -1).permute(*(order.index(d) for d in range(rank)), rank)


def _joins(weights: Sequence[Tensor], x: Tensor) -> bool:
    """True where one product with all weights side by side moves fewer numbers than a product with each: their copy is
    written and read, where x would be read again for each. On a GPU calls count for more."""
    return x.device.type != "cpu" or (len(weights) - 1) * x.numel() > 2 * sum([W.numel() for W in weights])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _shares(W: Tensor, x: Tensor) -> bool:
    """True where x has size 1 along every dim in which W differs."""
    return W.dim() == x.dim() + 1 and all(x.shape[d] == 1 for d in range(x.dim() - 1) if W.shape[d] > 1)


def _wider(b: Tensor | None, W: Tensor) -> bool:
    """True where a bias differs along a dim in which its W does not."""
    return b is not None and any(n > m for n, m in zip(b.shape[-2::-1], W.shape[-3::-1], strict=False))


def _spread(y: Tensor, W: Tensor) -> Tensor:
    """From `[*lead, all rows of W]` to the layout, the dims of W in their places: a view."""
    rank = y.dim() - 1
    wide = [d for d in range(rank) if W.shape[d] > 1]
    if not wide:
        return y
    y = y.reshape(*y.shape[:-1], *[W.shape[d] for d in wide], W.shape[-2])
    order = [rank + wide.index(d) if d in wide else d for d in range(rank)]
    return y.permute(*order, *wide, y.dim() - 1).squeeze(tuple(range(rank, rank + len(wide))))


def is_plain(tpm: Attention, member: NodeSpec, parents: Sequence[Tensor]) -> bool:
    """True for softmax attention over words by scaled products, all words reading the same keys."""
    plain = isinstance(tpm.score, Dot) and tpm.over == "keys"
    plain = plain and tpm.normaliser.kind == "softmax" and member.parents[1].over == (WORD,) and parents[1].dim() >= 4
    return plain and parents[1].shape[-3] == 1 == parents[2].shape[-3]  # each word may have keys of its own


@dataclass(frozen=True)
class Reading:
    """What a plain softmax attention reads: q, k, v `[*lead, word, feature]`; no mask where every word reads all.

    A bias `[*lead, word, word read]` is added to the scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    bias: Tensor | None = None


def reading_of(tpm: Attention, at: EvalContext, parents: Sequence[Tensor], *, whole: bool, causal: bool) -> Reading:
    """What an attention reads, from what it sees."""
    assert isinstance(tpm.score, Dot)
    q, v = tpm.score.rotate(parents[0], at.word, at.rotary), parents[2].squeeze(-3)
    k = tpm.score.rotate(parents[1].squeeze(-3), at.read_indices["k."], at.rotary)
    if q.shape[-2] != k.shape[-2]:  # a branch: torch.compile would make a symbol of the comparison
        causal = False
    bias = None
    if tpm.bias is not None:  # each pair of words has its own score then, though q and k may be the same for all
        bias = _bias(tpm.bias, at, parents[3])
        q = q.expand(*q.shape[:-2], bias.shape[-2], -1)
        k, v = (x.expand(*x.shape[:-2], bias.shape[-1], -1) for x in (k, v))
    return Reading(q, k, v, None if whole else at.mask["k."], causal, tpm.score.get_scale(q.shape[-1]), bias)


def _bias(bias: Bias, at: EvalContext, b: Tensor) -> Tensor:
    """What is added to the scores, made once for all slices that have it from the same parent."""
    i, j = at.word, at.read_indices["k."]
    made: list[tuple[Tensor, ...]] = at.rotary.setdefault(bias, [])
    for *of, found in made:
        if all(mine is other for mine, other in zip(of, (b, i, j), strict=True)):
            return found
    made.append((b, i, j, bias.compute_bias(b, i, j)))
    return made[-1][-1]


def mix_of(r: Reading) -> Tensor:
    """`softmax(scale q k^T) v`: by explicit products for few words, else torch's own attention."""
    n, m = r.q.shape[-2], r.k.shape[-2]
    if n * m > FEW:
        return _scaled_dot_product(r)
    dims = dims_of(r)
    Q, K, V = dims.rows(r.q, dims.of_q), dims.rows(r.k, dims.of_k, first=True), dims.rows(r.v, dims.of_v)
    scores = scaled_product(Q, K, r.scale).reshape(len(Q), n, -1, m)
    if r.bias is not None:
        scores = scores + dims.mask(r.bias).unsqueeze(-2)
    if r.mask is not None:
        scores = scores.masked_fill(~dims.mask(r.mask).unsqueeze(-2), -torch.inf)
    mix = torch.bmm(scores.softmax(-1).reshape(len(Q), -1, m), V.reshape(len(Q), m, -1))
    return dims.back(mix, n, r.v.shape[-1])


def told_apart(r: Reading) -> tuple[Tensor, Tensor]:
    """`P = softmax(scale q k^T)`, `[*lead, word, word read]`, and the mix `P v`."""
    n, m = r.q.shape[-2], r.k.shape[-2]
    added = _added(r)
    lead = broadcast_shapes(r.q.shape[:-2], r.k.shape[:-2], () if added is None else added.shape[:-2])
    grouped = _are_grouped(r, lead)
    own, rows = (lead[:-1], lead[-1] * n) if grouped else (lead, n)
    Q = r.q.expand(*lead, n, -1).reshape(-1, rows, r.q.shape[-1])
    K, v = (x.squeeze(-3) if grouped else x for x in (r.k, r.v))
    K = K.expand(*own, m, -1).reshape(-1, m, K.shape[-1])
    if added is None:
        scores = scaled_product(Q, K, r.scale)
    else:
        scores = added.expand(*lead, n, m).clone(memory_format=torch.contiguous_format).reshape(-1, rows, m)
        scores.baddbmm_(Q, K.mT, alpha=r.scale)
    P = scores.softmax(-1)
    mix = P.reshape(*own, rows, m) @ v
    return P.reshape(*lead, n, m), mix.reshape(*lead, n, -1) if grouped else mix


def _added(r: Reading) -> Tensor | None:
    """What is added to the scores: a bias, and minus infinity where a word is not read."""
    if r.mask is None:
        return r.bias
    hidden = torch.zeros(r.mask.shape, dtype=r.q.dtype, device=r.mask.device).masked_fill_(~r.mask, -torch.inf)
    return hidden if r.bias is None else r.bias + hidden


def _are_grouped(r: Reading, lead: Sequence[int]) -> bool:
    """True where the heads of a group share k and v: their words are then rows of one product."""
    shared = min(r.q.dim(), r.k.dim(), r.v.dim()) > 3 and r.k.shape[-3] == 1 == r.v.shape[-3] and lead[-1] > 1
    return shared and tuple(broadcast_shapes(lead, r.v.shape[:-2])) == tuple(lead)


def scaled_product(Q: Tensor, K: Tensor, scale: float) -> Tensor:
    """`scale Q K^T` for a batch of matrices."""
    return torch.bmm(Q, K.mT) if scale == 1 else torch.baddbmm(Q.new_empty(()), Q, K.mT, beta=0, alpha=scale)


def _scaled_dot_product(r: Reading) -> Tensor:
    q, k, v, mask, causal = r.q, r.k, r.v, None if r.causal else r.mask, r.causal
    if r.bias is not None:
        mask, causal = r.bias if r.mask is None else r.bias.masked_fill(~r.mask, -torch.inf), False
    n = q.shape[-2]
    dims = dims_of(r)
    if mask is None and not causal and dims.of_q and not dims.of_k and not dims.of_v:
        Q, K, V = dims.rows(q, dims.of_q), dims.rows(k, ()), dims.rows(v, ())
        mix = functional.scaled_dot_product_attention(Q[:, None], K[:, None], V[:, None], scale=r.scale)
        return dims.back(mix[:, 0], n, v.shape[-1])
    lead = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    if _are_grouped(r, lead) and (mask is None or mask.dim() == 2 or mask.shape[-4:-2] == (1, 1)):
        return _grouped_product(r, lead, mask, causal=causal)
    if mask is not None and mask.dim() > 2:
        lead = broadcast_shapes(lead, mask.shape[:-2])
        mask = mask.expand(*lead[:-1], *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])  # heads share it: not copied
    q, k, v = (x.expand(*lead, *x.shape[-2:]).reshape(-1, lead[-1], *x.shape[-2:]) for x in (q, k, v))
    mix = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=r.scale)
    return mix.reshape(*lead, n, v.shape[-1])


def _grouped_product(r: Reading, lead: Sequence[int], mask: Tensor | None, *, causal: bool) -> Tensor:
    """`softmax(scale q k^T) v`, where k and v are the same for the heads of a group, and are not copied for each."""
    *outer, groups, heads = lead
    q = r.q.expand(*lead, -1, -1).reshape(-1, groups * heads, *r.q.shape[-2:])
    k, v = (x.squeeze(-3).expand(*outer, groups, -1, -1).reshape(-1, groups, *x.shape[-2:]) for x in (r.k, r.v))
    if mask is not None and mask.dim() > 2:
        mask = mask.squeeze(-4).expand(*outer, -1, -1, -1).reshape(-1, 1, *mask.shape[-2:])
    mix = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=r.scale, enable_gqa=True
    )
    return mix.reshape(*lead, -1, r.v.shape[-1])


@dataclass(frozen=True)
class Dims:
    """The leading dims of an attention: those of q, of k or of v alone, and those that several of them have."""

    sizes: tuple[int, ...]
    both: tuple[int, ...]
    of_q: tuple[int, ...]
    of_k: tuple[int, ...]
    of_v: tuple[int, ...]

    def rows(self, x: Tensor, own: tuple[int, ...], *, first: bool = False) -> Tensor:
        """`[both, word * own, feature]` of `[*lead, word, feature]`; `first`: `own * word`."""
        rank = len(self.sizes)
        x = x.reshape(*[1] * (rank + 2 - x.dim()), *x.shape)
        x = x.expand(*(n if d in self.both else x.shape[d] for d, n in enumerate(self.sizes)), -1, -1)
        rest = [d for d in range(rank) if d not in self.both and d not in own]
        order = [*self.both, *own, rank] if first else [*self.both, rank, *own]
        return x.permute(*order, *rest, rank + 1).reshape(self.count(self.both), -1, x.shape[-1])

    def back(self, mix: Tensor, n: int, width: int) -> Tensor:
        """The layout `[*lead, word, feature]` of `[both, word * of_q * of_k, of_v * feature]`: a view."""
        order = [*self.both, -1, *self.of_q, *self.of_k, *self.of_v]
        full = mix.reshape(*(n if d < 0 else self.sizes[d] for d in order), width)
        return full.permute(*(order.index(d) for d in range(len(self.sizes))), order.index(-1), len(order))

    def mask(self, mask: Tensor) -> Tensor:
        """A mask `[..., word, word read]` as `[both, word, word read]`, or as it is where all share it."""
        return mask if mask.dim() == 2 else self.rows(mask, ())

    def count(self, dims: tuple[int, ...]) -> int:
        """How many entries some dims have."""
        return math.prod([self.sizes[d] for d in dims])


def dims_of(r: Reading, *others: Tensor) -> Dims:
    """The dims of a reading; those of its mask, its bias and of others `[*lead, ., .]`, count as dims of several."""
    rank = r.q.dim() - 2
    given = [list(x.shape[:rank]) for x in (r.q, r.k, r.v)]
    more = [_lead(x, rank) for x in (r.mask, r.bias, *others) if x is not None]
    sizes = [max([lead[d] for lead in given + more]) for d in range(rank)]
    both: list[int] = []
    alone: list[list[int]] = [[], [], []]
    for d in range(rank):
        wide = [i for i in range(3) if given[i][d] > 1]
        shared = len(wide) != 1 or any([lead[d] > 1 for lead in more])  # noqa: C419
        (both if shared else alone[wide[0]]).append(d)
    return Dims(tuple(sizes), tuple(both), tuple(alone[0]), tuple(alone[1]), tuple(alone[2]))


def _lead(x: Tensor, rank: int) -> list[int]:
    """The leading dims of `[..., ., .]`, as many as there are in the layout."""
    return [1] * (rank + 2 - x.dim()) + list(x.shape[:-2])

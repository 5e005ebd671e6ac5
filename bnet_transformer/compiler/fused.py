"""Fused operations: a TPM of the package whose equation torch has as one operation.

Each takes what the TPM would see and returns the same value, or None where the operation does not apply.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from bnet_transformer.axes import WORD
from bnet_transformer.network import Member
from bnet_transformer.tpm import Affine, At, Attention, Dot, Linear

FEW = 16 * 16


def fused(member: Member, at: At, parents: list[Tensor], *, whole: bool, causal: bool) -> Tensor | None:
    """The value of a node by a fused operation, where there is one.

    `whole` says that every word reads every word, `causal` that it reads those up to itself: no mask is needed then.
    """
    tpm = member.tpm
    if isinstance(tpm, Linear | Affine) and tpm.dim is None:
        product = _linear(parents[0], parents[1])
        return product + at["bias"] if product is not None and isinstance(tpm, Affine) else product
    if isinstance(tpm, Attention) and _is_plain(tpm, member, parents):
        return _attention(tpm, at, parents, whole=whole, causal=causal)
    return None


def _linear(W: Tensor, x: Tensor) -> Tensor | None:
    """`W x` as one matrix product for all heads and selector states, where x is the same for them all."""
    rank = x.dim() - 1
    wide = [d for d in range(rank) if W.shape[d] > 1]
    if not wide or W.dim() != x.dim() + 1 or any(x.shape[d] > 1 for d in wide):
        return None
    rows, sizes = W.shape[-2], [W.shape[d] for d in wide]
    y: Tensor = functional.linear(x, W.reshape(-1, W.shape[-1])).reshape(*x.shape[:-1], *sizes, rows)
    order = [rank + wide.index(d) if d in wide else d for d in range(rank)]
    return y.permute(*order, *wide, y.dim() - 1).squeeze(tuple(range(rank, rank + len(wide))))


def _is_plain(tpm: Attention, member: Member, parents: list[Tensor]) -> bool:
    """True for scaled dot-product attention over words, nothing added to the score, and words enough to gain by it.

    Explicit products are faster for few words (measured forward and backward on 2 cores: 1.2 times at 16 x 16).
    """
    if parents[0].shape[-2] * parents[1].shape[-2] <= FEW:
        return False
    score = tpm.score
    plain = isinstance(score, Dot) and score.rotary is None and tpm.bias is None and tpm.over == "keys"
    plain = plain and tpm.normaliser.kind == "softmax" and member.inputs[1].over == (WORD,) and parents[1].dim() >= 4
    return plain and parents[1].shape[-3] == 1 == parents[2].shape[-3]  # each word may have keys of its own


def _attention(tpm: Attention, at: At, parents: list[Tensor], *, whole: bool, causal: bool) -> Tensor:
    """Scaled dot-product attention over `[*lead, word, dim]`."""
    assert isinstance(tpm.score, Dot)
    q, k, v = parents[0], parents[1].squeeze(-3), parents[2].squeeze(-3)
    n, m = q.shape[-2], k.shape[-2]
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    mask = None
    if not whole and not (causal and n == m):
        mask = at.mask["k."]
        lead = torch.broadcast_shapes(lead, mask.shape[:-2])
        mask = mask.expand(*lead, n, m).reshape(-1, 1, n, m) if mask.dim() > 2 else mask
    rows = lead[-1] if mask is None or mask.dim() == 2 else 1
    q, k, v = (x.expand(*lead, *x.shape[-2:]).reshape(-1, rows, *x.shape[-2:]) for x in (q, k, v))
    mix = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=tpm.score.factor(q.shape[-1])
    )
    mix = mix.reshape(*lead, n, v.shape[-1])
    return mix + parents[-1] if tpm.residual else mix

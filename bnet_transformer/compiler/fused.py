"""Fused operations: linear maps and attention as few large matrix products.

Each function takes the inputs of a TPM, in the layout `[*enumerated, batch, *plates, word, *shape]`, and returns the
value of the TPM, or None if the function does not apply. A dim on which a value does not depend has size 1. So an
operand that all heads or selector states share is not copied: it is used once, in one large product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.gather import ExecutionState
from bnet_transformer.declare import NodeSpec
from bnet_transformer.tpm import Attention, Bias, Dot, EvalContext
from bnet_transformer.tpm.base import broadcast_shapes
from bnet_transformer.tpm.deterministic import apply_linear

# Up to this number of pairs of words, explicit products are faster than torch's attention (2 cores, with backward).
MAX_EXPLICIT_PAIRS = 16 * 16


@dataclass(frozen=True)
class WordPick:
    """The entry of a collection that each word picks: `entry` `[*layout]`, one of `count` along dims of the layout.

    Several dims are one dim in row-major order.
    """

    axes: tuple[int, ...]
    entry: Tensor
    count: int

    def concat_features(self, x: Tensor) -> Tensor:
        """The features of all entries of a collection, `[*layout, m, count * feature]`, with size 1 along the dims."""
        for axis in self.axes:
            x = x.unsqueeze(axis).movedim(axis + 1, -2)
        return x.flatten(-1 - len(self.axes))

    def pad_query(self, q: Tensor) -> Tensor:
        """A query in the features of its entry, and zero in those of others, `[*layout, count * feature]`."""
        is_picked: Tensor = self.entry.to(q.device).unsqueeze(-1) == torch.arange(self.count, device=q.device)
        return torch.where(is_picked.unsqueeze(-1), q.unsqueeze(-2), 0).flatten(-2)

    def select_features(self, x: Tensor) -> Tensor:
        """The features of the entry of each word, of values `[*layout, count * feature]`."""
        by_entry: Tensor = x.unflatten(-1, (self.count, -1))
        shape = broadcast_shapes(x.shape[:-1], self.entry.shape)
        idx = self.entry.to(x.device).expand(shape)[..., None, None].expand(*shape, 1, by_entry.shape[-1])
        return by_entry.expand(*shape, -1, -1).gather(-2, idx).squeeze(-2)


def expand_table(table: Tensor, dims: Sequence[int], rank: int) -> Tensor:
    """`table[d1, d2, *shape]` for all states of its parents, each along its dim of the layout: a view, not a gather."""
    order = sorted(range(len(dims)), key=dims.__getitem__)
    sizes = [1] * rank
    for d, size in zip(dims, table.shape, strict=False):
        sizes[d] = size
    return table.permute(*order, *range(len(dims), table.dim())).reshape(*sizes, *table.shape[len(dims) :])


def apply_maps(weights: Sequence[Tensor], x: Tensor, biases: Sequence[Tensor | None]) -> list[Tensor]:
    """`W x (+ b)` for several W at once: one matrix product if x is the same for all their heads and states.

    `[W_1; W_2] x = [W_1 x; W_2 x]`: the rows of all W, heads and states are stacked.
    """
    pairs = list(zip(weights, biases, strict=True))
    is_shared = all([_can_share_input(W, x, b) for W, b in pairs])  # noqa: C419
    if len(pairs) == 1:
        is_separate = True
    elif is_shared:
        # Concatenation writes and reads the weights once more. Separate products read x once more for each further
        # weight. On a GPU the number of calls is more important.
        num_weights = sum([W.numel() for W in weights])
        is_separate = x.device.type == "cpu" and (len(weights) - 1) * x.numel() <= 2 * num_weights
    else:
        is_separate = len({W.shape[:-2] for W in weights}) > 1
    if is_separate:
        return [apply_map(W, x, b) for W, b in pairs]
    if is_shared:
        flat = [W.reshape(-1, W.shape[-1]) for W in weights]
        bias = [b.expand(W.shape[:-1]).reshape(-1) for W, b in pairs if b is not None]
        y = functional.linear(x, torch.cat(flat), torch.cat(bias) if bias else None)
        return [_unflatten_rows(part, W) for part, W in zip(y.split([len(W) for W in flat], -1), weights, strict=True)]
    parts = _batched_matmul(torch.cat(list(weights), -2), x).split([W.shape[-2] for W in weights], -1)
    return [part if b is None else part + b for part, b in zip(parts, biases, strict=True)]


def apply_map(W: Tensor, x: Tensor, b: Tensor | None) -> Tensor:
    """`W x (+ b)` for one W."""
    if _can_share_input(W, x, b):
        bias = None if b is None else b.expand(W.shape[:-1]).reshape(-1)
        return _unflatten_rows(functional.linear(x, W.reshape(-1, W.shape[-1]), bias), W)
    y = _batched_matmul(W, x)
    return y if b is None else y + b


def _batched_matmul(W: Tensor, x: Tensor) -> Tensor:
    """`W x` with one product for each head or state over all words."""
    rank = x.dim() - 1
    batch_dims = [d for d in range(rank) if W.shape[d] > 1] if W.dim() == x.dim() + 1 else []
    if not batch_dims or any(x.shape[d] != W.shape[d] for d in batch_dims):
        return apply_linear(W, x)
    row_dims = [d for d in range(rank) if d not in batch_dims]
    count = math.prod([W.shape[d] for d in batch_dims])
    order = [*batch_dims, *row_dims]
    W, x = W.reshape(count, *W.shape[-2:]), x.permute(*order, rank)
    y = torch.bmm(x.reshape(count, -1, x.shape[-1]), W.mT)
    return y.reshape(*x.shape[:-1], -1).permute(*(order.index(d) for d in range(rank)), rank)


def _can_share_input(W: Tensor, x: Tensor, b: Tensor | None) -> bool:
    """True if x has size 1 along every leading dim of W that is larger than 1, and the bias varies along no other."""
    W_sizes, x_sizes = W.shape[:-2], x.shape[:-1]
    if len(W_sizes) != len(x_sizes) or not all([m == 1 or n == 1 for m, n in zip(W_sizes, x_sizes)]):  # noqa: B905, C419
        return False
    return b is None or all(n <= m for n, m in zip(b.shape[-2::-1], W.shape[-3::-1], strict=False))


def _unflatten_rows(y: Tensor, W: Tensor) -> Tensor:
    """From `[*leading, all rows of W]` to the layout, with the leading dims of W back in place: a view."""
    W_sizes, y_sizes = W.shape[:-2], y.shape[:-1]
    W_dims = [d for d, n in enumerate(W_sizes) if n > 1]
    if not W_dims:
        return y
    y_dims = [d for d, n in enumerate(W_sizes) if n == 1]
    order = [*y_dims, *W_dims]
    y = y.reshape(*[y_sizes[d] for d in y_dims], *[W_sizes[d] for d in W_dims], W.shape[-2])
    return y.permute(*[order.index(d) for d in range(len(order))], len(order))


def is_softmax_dot_product(spec: NodeSpec) -> bool:
    """True for softmax attention over words with scaled dot products."""
    tpm = spec.tpm
    if not isinstance(tpm, Attention) or not isinstance(tpm.score, Dot) or tpm.over != "keys":
        return False
    return tpm.normaliser.kind == "softmax" and spec.parents[1].over == (WORD,)


def is_scaled_dot_product(spec: NodeSpec, parents: Sequence[Tensor]) -> bool:
    """True for softmax attention over words with scaled dot products, if all words use the same keys and values."""
    return is_softmax_dot_product(spec) and parents[1].dim() >= 4 and parents[1].shape[-3] == 1 == parents[2].shape[-3]


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of a softmax attention: q, k, v `[*leading, word, feature]`; mask None if no pair is masked.

    The bias `[*leading, word, word read]` is added to the scores. With `v_pick`, v contains the features of all entries
    of a collection, and each word keeps those of one entry of its mix.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    bias: Tensor | None = None
    v_pick: WordPick | None = None


def build_attention_inputs(
    state: ExecutionState,
    spec: NodeSpec,
    context: EvalContext,
    parents: Sequence[Tensor],
    picks: Mapping[str, WordPick] | None = None,
) -> AttentionInputs:
    """The inputs of an attention, from its parents: q and k after rotation, and the bias of the scores.

    `picks` are the entries that each word picks from collections of which the parents contain all entries.
    """
    tpm, (is_full, is_causal) = spec.tpm, is_full_or_causal(state, spec)
    assert isinstance(tpm, Attention)
    assert isinstance(tpm.score, Dot)
    q, v = tpm.score.rotate(parents[0], context.word, context.rotary), parents[2].squeeze(-3)
    k = tpm.score.rotate(parents[1].squeeze(-3), context.read_indices["k."], context.rotary)
    if q.shape[-2] != k.shape[-2]:  # not `is_causal &= ...`, which torch.compile would turn into a symbolic boolean
        is_causal = False
    bias = None if tpm.bias is None else _compute_bias(tpm.bias, context, parents[3])
    mask, scale = None if is_full else context.mask["k."], tpm.score.get_scale(q.shape[-1])
    # A parent that is the same for all words has one; the pairs of words in the bias and the mask are different.
    pairs = [pair.shape[-2:] for pair in (bias, mask) if pair is not None]
    n, m = broadcast_shapes((q.shape[-2], k.shape[-2]), (1, v.shape[-2]), *pairs)
    q, k, v = (
        x if x.shape[-2] == count else x.expand(*x.shape[:-2], count, -1) for x, count in ((q, n), (k, m), (v, m))
    )
    # Where word i picks head c_i, its score is a product with the keys of all heads side by side, and zeros:
    # q_i . k_j^(c_i) = [0 .. q_i .. 0] . [k_j^1 .. k_j^K], and its mix is the part c_i of sum_j P_ij [v_j^1 .. v_j^K].
    # That is the work of K heads without a softmax for each of them, and no keys or values are copied for each word.
    k_pick, v_pick = ((picks or {}).get(slot) for slot in ("k.", "v."))
    if k_pick is not None:
        q, k = k_pick.pad_query(q), k_pick.concat_features(k)
    if v_pick is not None:
        v = v_pick.concat_features(v)
    return AttentionInputs(q, k, v, mask, is_causal, scale, bias, v_pick)


def is_full_or_causal(state: ExecutionState, spec: NodeSpec) -> tuple[bool, bool]:
    """Whether, without padding, every word depends on every word, or on the words up to itself (no mask is needed)."""
    if state.present:
        return False, False
    kinds = set()
    for parent in (parent for parent in spec.parents if WORD in parent.over):
        num_words = state.word_counts[state.network.specs[parent.index].group.word_stack or ""]
        covers_all = parent.reach.kind == "recent" and num_words <= parent.reach.width + 1
        kinds.add("causal" if covers_all else parent.reach.kind)
    return kinds == {"every"}, kinds == {"causal"}


def _compute_bias(bias: Bias, context: EvalContext, b: Tensor) -> Tensor:
    """The bias of the scores, computed once for all slices that read the same parent."""
    i, j = context.word, context.read_indices["k."]
    cache: list[tuple[Tensor, ...]] = context.rotary.setdefault(bias, [])
    for *key, value in cache:
        if all(x is y for x, y in zip(key, (b, i, j), strict=True)):
            return value
    cache.append((b, i, j, bias.compute_bias(b, i, j)))
    return cache[-1][-1]


def attend(inputs: AttentionInputs) -> Tensor:
    """`softmax(scale q k^T) v`: by explicit products for few words, else by `scaled_dot_product_attention`.

    In the explicit products, dims that only one of q, k and v has (such as states of a selector) become rows or columns
    of one matrix. Dims that several of them have become a batch.
    """
    n, m = inputs.q.shape[-2], inputs.k.shape[-2]
    if n * m > MAX_EXPLICIT_PAIRS:
        mix = _scaled_dot_product(inputs)
    else:
        dims = classify_dims(inputs)
        Q, V = dims.flatten(inputs.q, dims.only_q), dims.flatten(inputs.v, dims.only_v)
        K = dims.flatten(inputs.k, dims.only_k, is_leading=True)
        scores = scaled_product(Q, K, inputs.scale).reshape(len(Q), n, -1, m)
        if inputs.bias is not None:
            scores = scores + dims.flatten_mask(inputs.bias).unsqueeze(-2)
        if inputs.mask is not None:
            scores = scores.masked_fill(~dims.flatten_mask(inputs.mask).unsqueeze(-2), -torch.inf)
        mix = torch.bmm(scores.softmax(-1).reshape(len(Q), -1, m), V.reshape(len(Q), m, -1))
        mix = dims.unflatten(mix, n, inputs.v.shape[-1])
    return mix if inputs.v_pick is None else inputs.v_pick.select_features(mix)


def attend_with_weights(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """`P = softmax(scale q k^T)`, `[*leading, word, word read]`, and `P v`, `[*leading, word, feature]`."""
    n, m = inputs.q.shape[-2], inputs.k.shape[-2]
    added = inputs.bias
    if inputs.mask is not None:  # minus infinity for words that are not read
        hidden = torch.zeros(inputs.mask.shape, dtype=inputs.q.dtype, device=inputs.mask.device)
        hidden = hidden.masked_fill_(~inputs.mask, -torch.inf)
        added = hidden if added is None else added + hidden
    leading = broadcast_shapes(inputs.q.shape[:-2], inputs.k.shape[:-2], () if added is None else added.shape[:-2])
    grouped = _is_grouped_query(inputs, leading)
    outer, rows = (leading[:-1], leading[-1] * n) if grouped else (leading, n)
    Q = inputs.q.expand(*leading, n, -1).reshape(-1, rows, inputs.q.shape[-1])
    K, v = (x.squeeze(-3) if grouped else x for x in (inputs.k, inputs.v))
    K = K.expand(*outer, m, -1).reshape(-1, m, K.shape[-1])
    if added is None:
        scores = scaled_product(Q, K, inputs.scale)
    else:
        scores = added.expand(*leading, n, m).clone(memory_format=torch.contiguous_format).reshape(-1, rows, m)
        scores.baddbmm_(Q, K.mT, alpha=inputs.scale)
    P = scores.softmax(-1)
    mix = P.reshape(*outer, rows, m) @ v
    mix = mix.reshape(*leading, n, -1) if grouped else mix
    return P.reshape(*leading, n, m), mix if inputs.v_pick is None else inputs.v_pick.select_features(mix)


def _is_grouped_query(inputs: AttentionInputs, leading: Sequence[int]) -> bool:
    """True if all heads of a group share k and v (Ainslie et al. 2023): their words are then rows of one product."""
    shared = min(inputs.q.dim(), inputs.k.dim(), inputs.v.dim()) > 3 and leading[-1] > 1
    shared = shared and inputs.k.shape[-3] == 1 == inputs.v.shape[-3]
    k_sizes, v_sizes = inputs.k.shape[:-2], inputs.v.shape[:-2]
    return shared and (v_sizes == k_sizes or broadcast_shapes(leading, v_sizes) == tuple(leading))


def scaled_product(Q: Tensor, K: Tensor, scale: float) -> Tensor:
    """`scale Q K^T` for a batch of matrices."""
    return torch.bmm(Q, K.mT) if scale == 1 else torch.baddbmm(Q.new_empty(()), Q, K.mT, beta=0, alpha=scale)


def _scaled_dot_product(inputs: AttentionInputs) -> Tensor:
    """Attention by torch's `scaled_dot_product_attention`."""
    q, k, v, mask, is_causal = inputs.q, inputs.k, inputs.v, None if inputs.is_causal else inputs.mask, inputs.is_causal
    if inputs.bias is not None:
        mask = inputs.bias if inputs.mask is None else inputs.bias.masked_fill(~inputs.mask, -torch.inf)
        is_causal = False
    n = q.shape[-2]
    dims = classify_dims(inputs) if mask is None and not is_causal else None
    if dims is not None and dims.only_q and not dims.only_k and not dims.only_v:
        Q, K, V = dims.flatten(q, dims.only_q), dims.flatten(k, ()), dims.flatten(v, ())
        mix = functional.scaled_dot_product_attention(Q[:, None], K[:, None], V[:, None], scale=inputs.scale)
        return dims.unflatten(mix[:, 0], n, v.shape[-1])
    leading = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    if _is_grouped_query(inputs, leading) and (mask is None or mask.dim() == 2 or mask.shape[-4:-2] == (1, 1)):
        return _grouped_query_attention(inputs, leading, mask, is_causal=is_causal)
    # torch's attention has two leading dims, and the mask may have size 1 in the second. So the dims of the mask become
    # the first one, and the mask is not copied for each head or state. Without a mask, a dim that stays separate is a
    # view.
    rank = len(leading)
    mask_sizes = [1] * rank if mask is None else _get_leading_sizes(mask, rank)
    leading = broadcast_shapes(leading, mask_sizes)
    first = [d for d in range(rank) if mask_sizes[d] > 1] or [d for d in range(rank) if leading[d] > 1][:-1]
    order = [*first, *(d for d in range(rank) if d not in first)]
    count = math.prod([leading[d] for d in first])
    q, k, v = (
        x.expand(*leading, *x.shape[-2:]).permute(*order, rank, rank + 1).reshape(count, -1, *x.shape[-2:])
        for x in (q, k, v)
    )
    if mask is not None and mask.dim() > 2:
        mask = mask.reshape(*mask_sizes, *mask.shape[-2:]).permute(*order, rank, rank + 1)
        mask = mask.reshape(-1, 1, *mask.shape[-2:])
    mix = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=inputs.scale)
    mix = mix.reshape(*(leading[d] for d in order), n, v.shape[-1])
    return mix.permute(*(order.index(d) for d in range(rank)), rank, rank + 1)


def _grouped_query_attention(
    inputs: AttentionInputs, leading: Sequence[int], mask: Tensor | None, *, is_causal: bool
) -> Tensor:
    """`softmax(scale q k^T) v` for groups of heads that share k and v, without copies of k and v for each head."""
    *outer, groups, _ = leading
    q, k, v = (
        (x if x.shape[:-2] == sizes else x.expand(*sizes, -1, -1)).reshape(-1, math.prod(sizes[-2:]), *x.shape[-2:])
        for x, sizes in ((inputs.q, leading), (inputs.k, (*outer, groups, 1)), (inputs.v, (*outer, groups, 1)))
    )
    if mask is not None and mask.dim() > 2:
        mask = mask.squeeze(-4).expand(*outer, -1, -1, -1).reshape(-1, 1, *mask.shape[-2:])
    mix = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=inputs.scale, enable_gqa=True
    )
    return mix.reshape(*leading, -1, inputs.v.shape[-1])


@dataclass(frozen=True)
class AttentionDims:
    """The leading dims of an attention by operand: dims of q only, of k only, of v only, or of several (`shared`)."""

    sizes: tuple[int, ...]
    shared: tuple[int, ...]
    only_q: tuple[int, ...]
    only_k: tuple[int, ...]
    only_v: tuple[int, ...]

    def flatten(self, x: Tensor, private: tuple[int, ...], *, is_leading: bool = False) -> Tensor:
        """`[*leading, word, feature]` as `[shared, word * private, feature]`, or `private * word` with `is_leading`."""
        rank = len(self.sizes)
        x = x.reshape(*[1] * (rank + 2 - x.dim()), *x.shape)
        x = x.expand(*(n if d in self.shared else x.shape[d] for d, n in enumerate(self.sizes)), -1, -1)
        trailing = [d for d in range(rank) if d not in self.shared and d not in private]
        order = [*self.shared, *private, rank] if is_leading else [*self.shared, rank, *private]
        return x.permute(*order, *trailing, rank + 1).reshape(self.count_entries(self.shared), -1, x.shape[-1])

    def unflatten(self, mix: Tensor, n: int, width: int) -> Tensor:
        """`[shared, word * only_q * only_k, only_v * feature]` as `[*leading, word, feature]`: a view."""
        order = [*self.shared, -1, *self.only_q, *self.only_k, *self.only_v]
        full = mix.reshape(*(n if d < 0 else self.sizes[d] for d in order), width)
        return full.permute(*(order.index(d) for d in range(len(self.sizes))), order.index(-1), len(order))

    def flatten_mask(self, mask: Tensor) -> Tensor:
        """A mask `[..., word, word read]` as `[shared, word, word read]`; unchanged if all share it."""
        return mask if mask.dim() == 2 else self.flatten(mask, ())

    def count_entries(self, dims: tuple[int, ...]) -> int:
        """The product of the sizes of some dims."""
        return math.prod([self.sizes[d] for d in dims])


def classify_dims(inputs: AttentionInputs, *extra: Tensor) -> AttentionDims:
    """Classify the leading dims of an attention; dims of its mask, its bias and `extra` count as shared."""
    rank = inputs.q.dim() - 2
    qkv_shapes = [list(x.shape[:rank]) for x in (inputs.q, inputs.k, inputs.v)]
    extra_shapes = [_get_leading_sizes(x, rank) for x in (inputs.mask, inputs.bias, *extra) if x is not None]
    sizes = [max([shape[d] for shape in qkv_shapes + extra_shapes]) for d in range(rank)]
    shared_dims: list[int] = []
    exclusive: list[list[int]] = [[], [], []]
    for d in range(rank):
        operands = [i for i in range(3) if qkv_shapes[i][d] > 1]
        is_shared = len(operands) != 1 or any([shape[d] > 1 for shape in extra_shapes])  # noqa: C419
        (shared_dims if is_shared else exclusive[operands[0]]).append(d)
    return AttentionDims(
        tuple(sizes), tuple(shared_dims), tuple(exclusive[0]), tuple(exclusive[1]), tuple(exclusive[2])
    )


def _get_leading_sizes(x: Tensor, rank: int) -> list[int]:
    """The leading sizes of `[..., n, m]`, padded in front to the rank of the layout."""
    return [1] * (rank + 2 - x.dim()) + list(x.shape[:-2])

"""Two fits beside each other on the same sentences: heads matched, and the difference of what they foretell."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bnet_transformer.data import Batch
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.fit.heads import Heads, cosines
from bnet_transformer.inference.fit.matching import Comparison, matched, overlap_of, rand_index

if TYPE_CHECKING:
    from bnet_transformer.inference.fit.result import Fit

LEFT_OUT = "leave-one-out (PSIS, az.loo)"


def compared(
    shares: Sequence[Tensor], present: Tensor | None, heads: Sequence[Heads], by: str, gain: Tensor
) -> Comparison:
    """Two fits by their responsibilities (of the words `present`), their heads, and the gain of each sentence."""
    a, b = shares
    if a.shape[:-1] != b.shape[:-1]:
        got = f"responsibilities of shape {tuple(a.shape)} and {tuple(b.shape)}"
        wanted = "selectors that draw for the same things: both for sentences, or both for their words"
        raise BNetError("compare", expected=wanted, got=got, allowed="selector=")
    match = matched(overlap := overlap_of(a.double(), b.double(), present))
    most = [share.argmax(-1) if present is None else share.argmax(-1)[present] for share in shares]
    mine, theirs = heads
    return Comparison(
        match,
        overlap,
        rand_index(*most),
        float(gain.mean()),
        float(gain.std() / len(gain) ** 0.5) if len(gain) > 1 else float("nan"),
        {k: _of_match(v, theirs.A[k], match) for k, v in mine.A.items() if k in theirs.A},
        {k: _of_match(v, theirs.OV[k], match) for k, v in mine.OV.items() if k in theirs.OV},
        by,
    )


def held_by_both(one: Batch | None, other: Batch | None) -> tuple[Batch, Batch]:
    """The sentences that two fits were fitted to, where they are the same."""
    if one is None or other is None:
        got = "none: a net, or a fit that was loaded, does not hold the sentences that it was fitted to"
        raise BNetError("data", expected="sentences to compare on", got=got, allowed="data=")
    if not one.same(other):
        wanted, got = "two fits of the same sentences in the same order", "fits of other sentences"
        raise BNetError("compare", expected=wanted, got=got, allowed="data=")
    return one, other


def gains(one: Fit[Any], other: Fit[Any], corpora: Sequence[Batch], *, told: bool) -> tuple[str, Tensor]:
    """By which likelihood two fits are compared, and how much more of each sentence the first foretells."""
    both = one.log_likelihoods is not None and other.log_likelihoods is not None
    if not told and both and find_spec("arviz") is not None:
        return LEFT_OUT, _left_out(one) - _left_out(other)
    mine, theirs = (fit.log_likelihood(corpus).double() for fit, corpus in zip((one, other), corpora, strict=True))
    return "log likelihood of " + ("the data told" if told else "the sentences learned from"), mine - theirs


def _left_out(fit: Fit[Any]) -> Tensor:
    """The log probability of each sentence given all others, `[sentence]`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "\nArviZ is undergoing", FutureWarning)
        import arviz as az
    found: Any = az.loo(fit.to_arviz(), var_name="y", pointwise=True)  # type: ignore[no-untyped-call]
    return torch.as_tensor(found.loo_i.values, dtype=torch.float64)


def _of_match(a: Tensor, b: Tensor, match: tuple[int, ...]) -> Tensor:
    """The cosine of each head's matrix and that of its match; NaN where it has none."""
    same = a.shape[1:] == b.shape[1:]
    table = cosines(a, b.to(a.dtype)) if same else a.new_full((len(a), len(b)), torch.nan)
    return torch.stack([table[h, m] if m >= 0 else table.new_tensor(torch.nan) for h, m in enumerate(match)])

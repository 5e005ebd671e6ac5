"""Two fits beside each other on the same sentences: heads matched, and the difference of what they foretell."""

from __future__ import annotations

import html
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bnet_transformer.data import Batch
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.fit.heads import Heads, cosines
from bnet_transformer.network import Member

if TYPE_CHECKING:
    import pandas as pd

    from bnet_transformer.inference.fit.result import Fit

LEFT_OUT = "leave-one-out (PSIS, az.loo)"


@dataclass(frozen=True)
class Comparison:
    """Two fits on the same sentences.

    `match[h]` is the head of the other fit that answers for what head h answers for (-1 where it has none left),
    `agreement` the adjusted Rand index of the most responsible heads, `gain` the mean log likelihood of a sentence
    under this fit less that under the other, with its standard error (`judged_by` says which likelihood). `A` and
    `OV` are cosines of matched heads.
    """

    match: tuple[int, ...]
    overlap: Tensor = field(repr=False)
    agreement: float
    gain: float
    gain_error: float
    A: dict[str, Tensor] = field(repr=False)
    OV: dict[str, Tensor] = field(repr=False)
    judged_by: str = "log likelihood"

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each head of this fit."""
        import pandas as pd

        rows: dict[str, list[float]] = {"match": list(self.match)}
        rows["overlap"] = [float(self.overlap[h, m]) if m >= 0 else 0.0 for h, m in enumerate(self.match)]
        for what, by in (("A", self.A), ("OV", self.OV)):
            rows |= {f"cosine {what} {name}": value.tolist() for name, value in by.items()}
        return pd.DataFrame(rows, index=pd.RangeIndex(len(self.match), name="head"))

    def _repr_html_(self) -> str:
        told = f"ARI {self.agreement:.3f}; {self.gain:+.4f} ± {self.gain_error:.4f} nats a sentence"
        told += f" by {self.judged_by}"
        return f"<p>{html.escape(told)}</p>{self.to_dataframe().to_html(float_format='{:.3f}'.format)}"


def overlap_of(a: Tensor, b: Tensor, present: Tensor | None = None) -> Tensor:
    """How many sentences (or words, of those that are `present`) both heads answer for, `[head of a, head of b]`."""
    if present is not None:
        a = a * present[..., None]
    return a.flatten(0, -2).mT @ b.flatten(0, -2).to(a.dtype)


def words_present(member: Member, corpus: Batch) -> Tensor | None:
    """Which words of which sentence a selector of words draws for, `[sentence, word]`; None for all, or sentences."""
    stack = member.family.words
    if stack is None:
        return None
    if corpus.mask is not None and stack in corpus.mask:
        return corpus.mask[stack]
    shown = [told.observed for told in corpus.evidence.values()]
    known = [each for each in shown if each is not None and each.shape == corpus.x[stack].shape[:2]]
    return torch.stack(known).any(0) if known and len(known) == len(shown) else None


def matched(overlap: Tensor) -> tuple[int, ...]:
    """For each row the column that it goes with, none twice, their sum the greatest; -1 where no column is left."""
    rows, columns = linear_sum_assignment(overlap.detach().cpu().numpy(), maximize=True)
    found = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    return tuple(found.get(row, -1) for row in range(len(overlap)))


def compared(
    shares: Sequence[Tensor], present: Tensor | None, heads: Sequence[Heads], by: str, gain: Tensor
) -> Comparison:
    """Two fits by their responsibilities (of the words `present`), their heads, and the gain of each sentence."""
    a, b = shares
    if a.shape[:-1] != b.shape[:-1]:
        got = f"responsibilities of shape {tuple(a.shape)} and {tuple(b.shape)}"
        wanted = "selectors that draw for the same things: both for sentences, or both for their words"
        raise BNetError("compare", expected=wanted, got=got, allowed="selector=")
    from sklearn.metrics import adjusted_rand_score  # slow to import

    match = matched(overlap := overlap_of(a.double(), b.double(), present))
    most = [share.argmax(-1) if present is None else share.argmax(-1)[present] for share in shares]
    labels = [label.flatten().cpu().numpy() for label in most]
    mine, theirs = heads
    return Comparison(
        match,
        overlap,
        float(adjusted_rand_score(*labels)),
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

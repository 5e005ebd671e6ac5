"""Matching the heads of two fits, which have no names in common: by what they answer for, as well as can be."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bnet_transformer.data import Batch
from bnet_transformer.network import Member

if TYPE_CHECKING:
    import pandas as pd


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


def rand_index(a: Tensor, b: Tensor) -> float:
    """The adjusted Rand index of two labellings (Hubert and Arabie 1985): 1 for the same parts, 0 by chance.

    >>> rand_index(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0]))
    1.0
    """
    a, b = a.flatten(), b.flatten()
    table = torch.zeros(int(a.max()) + 1, int(b.max()) + 1, dtype=torch.float64)
    table.index_put_((a.cpu(), b.cpu()), torch.ones(len(a), dtype=torch.float64), accumulate=True)
    both, rows, columns = _pairs(table), _pairs(table.sum(1)), _pairs(table.sum(0))
    chance = rows * columns / max(_pairs(torch.tensor([float(len(a))], dtype=torch.float64)), 1.0)
    most = (rows + columns) / 2
    return 1.0 if most == chance else (both - chance) / (most - chance)


def _pairs(count: Tensor) -> float:
    return float((count * (count - 1) / 2).sum())

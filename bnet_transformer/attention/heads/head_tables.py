"""The results of head inclusion as tables: `Inclusion`, the posterior of each head's gate, and `Damage`."""

from __future__ import annotations

import html
import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import to_numpy
from bnet_transformer._core.checks import check_float
from bnet_transformer._core.result_comparison import ComparableResult, SentenceValues, digest_words
from bnet_transformer._core.saved_results import SavedResult
from bnet_transformer.attention.heads.gibbs_posterior import MAX_RHAT
from bnet_transformer.data import Batch
from bnet_transformer.data.word_encoder import word_encoder
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError, unknown_name_error

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("log Bayes factor", "gradient importance", "ablation")


def head_shares(rho: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `E[xi_nu / sum xi]` and `P(sum xi = 0)` of independent gates, averaged over samples.

    Args:
        rho: The probabilities of the gates, `[draw, slice, head]`.

    Returns:
        The two quantities, `[slice, head]` and `[slice]`.

    >>> head_shares(torch.tensor([[[1.0, 1.0, 0.0]]]))[0].round(decimals=4).tolist()
    [[0.5, 0.5, 0.0]]
    """
    # `1 / (1 + K)` is the integral of `t^K` from 0 to 1. `E[t^K] = prod (1 - rho + rho t)` over the other gates is a
    # polynomial in t of degree heads - 1, which Gauss-Legendre quadrature with heads // 2 + 1 nodes integrates exactly.
    heads = rho.shape[-1]
    nodes, weights = (torch.from_numpy(array) for array in np.polynomial.legendre.leggauss(heads // 2 + 1))
    t, weights = (nodes + 1) / 2, weights / 2
    factor = (1 - rho[..., None] + rho[..., None] * t).double()  # [draw, slice, head, node]
    shares = []
    for head in range(heads):
        other_factors = factor[..., [k for k in range(heads) if k != head], :].prod(-2)
        shares.append((rho[..., head].double() * (other_factors * weights).sum(-1)).mean(0))
    return torch.stack(shares, -1), (1 - rho.double()).prod(-1).mean(0)


class HeadTable(ComparableResult, ABC):
    """A result about heads, which is displayed as a one-line summary and a table with one row for each head."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """The subject and the method, in one line."""

    @abstractmethod
    def to_dataframe(self) -> pd.DataFrame:
        """Return all values, in rows."""

    def by_head(self) -> pd.DataFrame:
        """Return one row for each head."""
        return self.to_dataframe()

    def to_rows(self, arrays: Collection[str], **axes: Collection[object]) -> pd.DataFrame:
        """Return one row for each index along some axes, with a column for each axis and each field in `arrays`.

        Args:
            arrays: The names of the fields.
            **axes: The labels of each axis, in the order of the dims of the fields.

        Returns:
            The table.
        """
        import pandas as pd

        table = pd.MultiIndex.from_product(axes.values(), names=axes.keys()).to_frame(index=False)
        return table.assign(**{name: to_numpy(getattr(self, name).flatten()) for name in arrays})

    def __str__(self) -> str:
        return f"{self.summary}\n{self.by_head().to_string(index=False, float_format='{:.3f}'.format)}"

    def _repr_html_(self) -> str:
        """Return the summary and the table of heads as HTML."""
        table = self.by_head().to_html(index=False, float_format="{:.3f}".format)
        return f"<p>{html.escape(self.summary)}</p>{table}"


def to_head_values(
    measure: str,
    slices: tuple[str, ...],
    values: Tensor | None,
    settings: Mapping[str, object],
    relations: tuple[str, ...] = (),
) -> SentenceValues:
    """The values of heads by sentence, `[sentence, slice, head]` or `[sentence, slice, head, relation]`."""
    if values is None:
        raise BNetError("compare", expected="results with values by sentence", hint="Compute the results again")
    axes: dict[str, Sequence[Any]] = {"slice": slices, "head": range(values.shape[2])}
    axes |= {"relation": relations} if relations else {}
    rows = list(itertools.product(*axes.values()))
    cells = tuple(f"{row[0]}_{row[1]}" + "".join(f" {name}" for name in row[2:]) for row in rows)
    columns = dict(zip(axes, zip(*rows, strict=True), strict=True))
    return SentenceValues(measure, cells, columns, to_numpy(values.flatten(1).T), settings=settings)


def _digest_batch(network: Network, batch: Batch) -> tuple[str, ...]:
    """A digest of the words of each sentence; empty for vectors, whose words have no names."""
    tokens: list[dict[str, tuple[str, ...]]] = [{} for _ in range(len(batch))]
    special: list[dict[str, tuple[int, ...]]] = [{} for _ in range(len(batch))]
    tokenizer, first = network.tokenizer, next(iter(batch.x), "")
    for stack, values in batch.x.items():
        encoder, mask = word_encoder(network, stack), (batch.mask or {}).get(stack)
        if encoder is None or encoder.states is None:
            continue
        for k, row in enumerate(values):
            ids = (row if mask is None else row[mask[k]]).tolist()
            tokens[k][stack] = encoder.decode(ids)
            if tokenizer is not None and tokenizer.can_encode(stack, first):
                flags = tokenizer.special_tokens_mask(ids)
                special[k][stack] = tuple(index for index, flag in enumerate(flags) if flag)
    return tuple(map(digest_words, tokens, special))


@dataclass(frozen=True)
class Inclusion(HeadTable):
    """The posterior of `rho`, the share of sentences in which a head is on, for each head of each slice.

    Attributes:
        slices: The names of the groups of heads, such as `a_0`, one for each slice.
        method: `"exact"`, `"gibbs"` or `"svi"`.
        sentences: The number of sentences.
        likelihood: A description of the likelihood.
        sigma: The standard deviation around the output of the full net; None with observations.
        interval: The probability of the intervals.
        rho: The posterior samples of `rho`, `[draw, slice, head]`.
        rho_error: The Monte Carlo error of `mean`, `[slice, head]`: from the spread of independent populations of
            `"exact"`, or of the chains of `"gibbs"`. NaN for a head whose chains disagree (R-hat above 1.1), because
            they do not mix between modes, and for `"svi"`, whose main error is the approximation.
        log_bayes: The log Bayes factor of free `rho` against `rho = 0`, `[slice, head]`; 0 for a head without effect.
        error: The Monte Carlo error of `log_bayes`, `[slice, head]`. For `"svi"` it leaves out the error of the
            approximation, which is larger, so plots of svi omit it.
        inclusion: The probability of each gate, `[sentence, slice, head]`.
        importance: The gradient importance, `[slice, head]`.
        importance_error: The standard error of `importance`, `[slice, head]`.
        ablation: The mean loss in nats with the head off, `[slice, head]`.
        ablation_error: The standard error of `ablation`, `[slice, head]`.
        interaction: The mean over sentences of the log odds ratio of two gates, `[slice, head, head]`. It is below 0
            for heads that substitute for each other. None unless the method is `"exact"`.
        rhat: R-hat of `rho` over the chains of `"gibbs"`, `[slice, head]`: near 1 if they agree. None for the others.
        idle: True for heads without effect, `[slice, head]`.
        network: The net.
        data: The sentences.
        losses: The loss of each sentence in nats with the head off, `[sentence, slice, head]`, whose mean is
            `ablation`; `compare` compares it.
    """

    _shapes = (
        "sentences: size sentence; slices: any slice; rho: float64 draw+ slice head; rho_error log_bayes error "
        "importance importance_error ablation ablation_error rhat: float64 slice head; inclusion losses: float64 "
        "sentence slice head; interaction: float64 slice head head; idle: bool slice head"
    )

    slices: tuple[str, ...]
    method: str
    sentences: int
    likelihood: str
    sigma: float | None
    interval: float
    rho: Tensor = field(repr=False)
    rho_error: Tensor = field(repr=False)
    log_bayes: Tensor = field(repr=False)
    error: Tensor = field(repr=False)
    inclusion: Tensor = field(repr=False)
    importance: Tensor = field(repr=False)
    importance_error: Tensor = field(repr=False)
    ablation: Tensor = field(repr=False)
    ablation_error: Tensor = field(repr=False)
    interaction: Tensor | None = field(repr=False)
    rhat: Tensor | None = field(repr=False)
    idle: Tensor = field(repr=False)
    network: Network = field(repr=False)
    data: Batch = field(repr=False)
    losses: Tensor | None = field(default=None, repr=False)

    @property
    def mean(self) -> Tensor:
        """The posterior mean of `rho`, `[slice, head]`."""
        return self.rho.mean(0)

    @property
    def has_interval(self) -> Tensor:
        """True for each head whose `rho` has an interval, `[slice, head]`.

        Variational inference has no intervals, because its error is about as large as the width of the posterior.
        Gibbs sampling has none for a head with R-hat above 1.1.
        """
        if self.rhat is not None:
            return self.rhat <= MAX_RHAT
        return torch.full(self.rho.shape[1:], self.method != "svi")

    @property
    def low(self) -> Tensor:
        """The lower end of the interval of `rho`, `[slice, head]`; NaN without `has_interval`."""
        return self._quantile((1 - self.interval) / 2)

    @property
    def high(self) -> Tensor:
        """The upper end of the interval of `rho`, `[slice, head]`; NaN without `has_interval`."""
        return self._quantile((1 + self.interval) / 2)

    def _quantile(self, probability: float) -> Tensor:
        """Compute a quantile of `rho`, `[slice, head]`; NaN without `has_interval`."""
        return torch.where(self.has_interval, self.rho.quantile(probability, dim=0), torch.nan)

    @property
    def rank(self) -> Tensor:
        """The rank of each head by its log Bayes factor, `[slice, head]`; 1 for the largest."""
        order = self.log_bayes.flatten().argsort(descending=True, stable=True)
        return (order.argsort() + 1).reshape(self.log_bayes.shape)

    @property
    def dead(self) -> tuple[tuple[int, int], ...]:
        """The heads without effect, as pairs (slice, head).

        In every gate setting that was run, the gate of such a head changes the likelihood of each sentence by less than
        a millionth of the maximum effect of a head.
        """
        return tuple((int(s), int(h)) for s, h in self.idle.nonzero())

    def duplicates(self, nats: float = 1.0) -> tuple[tuple[int, int, int], ...]:
        """Find the pairs of heads of a slice that substitute for each other, strongest first.

        Args:
            nats: The minimum strength: the log odds ratio of the two gates is below `-nats`. The default is 1.

        Returns:
            The pairs as (slice, head, other head).

        Raises:
            BNetError: If the method was not `"exact"`.
        """
        check_float("nats", nats, above=0)
        if self.interaction is None:
            actual = f"method={self.method!r}"
            expected, hint = "the joint posterior of a slice's gates", "Use bt.inclusion(..., method='exact')"
            raise BNetError("duplicates", expected=expected, actual=actual, hint=hint)
        pairs = torch.triu(self.interaction, 1)
        matches = (pairs < -nats).nonzero().tolist()
        return tuple((s, h, o) for s, h, o in sorted(matches, key=lambda at: float(pairs[tuple(at)])))

    def slice_index(self, name: str) -> int:
        """Return the index of a group of heads in `slices`.

        Args:
            name: The name of the group of heads, such as `a_0`.

        Returns:
            The index.

        Raises:
            UnknownNameError: If there is no such group.
        """
        if name not in self.slices:
            raise unknown_name_error("slice of heads", name, self.slices)
        return self.slices.index(name)

    def measure(self, name: str) -> Tensor:
        """Return one of the three measures.

        Args:
            name: `"log Bayes factor"`, `"gradient importance"` or `"ablation"`.

        Returns:
            The measure, `[slice, head]`.

        Raises:
            BNetError: If there is no such measure.
        """
        measures = dict(zip(MEASURES, (self.log_bayes, self.importance, self.ablation), strict=True))
        if name not in measures:
            raise BNetError("measure", expected="a measure of heads", actual=name, allowed=", ".join(MEASURES))
        return measures[name]

    def agreement(self) -> pd.DataFrame:
        """Compute Spearman's rank correlations of the three measures over all heads."""
        import pandas as pd

        columns = {name: to_numpy(self.measure(name).flatten()) for name in MEASURES}
        return pd.DataFrame(columns).corr(method="spearman")

    def shares(self) -> tuple[Tensor, Tensor]:
        """Compute the weights of heads for a new sentence.

        Returns:
            The expected weight of each head in the average of a slice, `E[xi_nu / sum xi]`, `[slice, head]`, and the
            probability that all heads of a slice are off, `[slice]`.
        """
        return head_shares(self.rho)

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row for each head, by rank."""
        names = ["rank", "mean", "rho_error", "low", "high", "log_bayes", "error"]
        names += ["rhat"] if self.rhat is not None else []
        names += ["importance", "importance_error", "ablation", "ablation_error"]
        table = self.to_rows(names, slice=self.slices, head=range(self.log_bayes.shape[1]))
        return table.rename(columns={"mean": "rho"}).sort_values("rank", ignore_index=True)

    def by_head(self) -> pd.DataFrame:
        """Return one row for each head; the table of svi labels its error, which leaves out the approximation."""
        table = self.to_dataframe()
        if self.method == "svi":
            return table.drop(columns="rho_error").rename(columns={"error": "Monte Carlo error"})
        return table

    def _to_sentence_values(self) -> SentenceValues:
        # The gates of a net share rho, so that their probabilities are not independent between sentences.
        settings = {"likelihood": self.likelihood}
        values = to_head_values("loss with the head off, nats", self.slices, self.losses, settings)
        return replace(values, digests=_digest_batch(self.network, self.data))

    def _check_pair(self, other: Inclusion) -> None:
        if self.sigma != other.sigma:  # a loss is a squared error in units of sigma
            expected, hint = (
                f"losses with the same sigma, {self.sigma}",
                "Pass one sigma= to both calls of bt.inclusion",
            )
            raise BNetError("compare", expected=expected, actual=other.sigma, hint=hint)

    @property
    def summary(self) -> str:
        """The subject and the method, in one line."""
        slices, heads = self.log_bayes.shape
        sigma = "" if self.sigma is None else f", sigma {self.sigma:.4g}"
        details = f"{self.method}; {self.likelihood}{sigma}; {self._describe_intervals()}"
        counts = [f"{n} {unit}{'' if n == 1 else 's'}" for n, unit in ((slices, "slice"), (self.sentences, "sentence"))]
        return f"{heads} head{'s' * (heads != 1)} of {' by '.join(counts)} ({details})"

    def _describe_intervals(self) -> str:
        """Describe the intervals, and which heads have none."""
        if self.method == "svi":
            return "approximate, without intervals; the Monte Carlo error leaves out that of the approximation"
        missing = int((~self.has_interval).sum())
        count = f"{missing} head{'s' * (missing != 1)}"
        heads = f", none and no error of rho for {count} with R-hat above {MAX_RHAT}" if missing else ""
        return f"intervals of {100 * self.interval:g}%{heads}"


@dataclass(frozen=True)
class Damage(SavedResult):
    """The loss of sentences when the heads with the lowest rank by a measure are off.

    The sentences may differ from those of the measures.

    Attributes:
        axes: The names of the two dims of `values`: the measure, and the number of heads that are off.
        labels: The labels of each dim, by name.
        values: The mean loss of a sentence in nats, `[measure, count]`.
        error: The standard error of `values`, `[measure, count]`.
        sentences: The number of sentences.
        order: For each measure all heads (slice, head), in ascending order.
    """

    _shapes = "labels: {_} any @; values error: float64 *axes"

    axes: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]]
    values: Tensor = field(repr=False)
    error: Tensor = field(repr=False)
    sentences: int
    order: Mapping[str, tuple[tuple[int, int], ...]] = field(repr=False)

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row for each number of heads that are off, with one column for each measure."""
        import pandas as pd

        measures, counts = (self.labels[axis] for axis in self.axes)
        index = pd.Index([int(k) for k in counts], name="heads off")
        return pd.DataFrame(to_numpy(self.values).T, index=index, columns=list(measures))

    def _repr_html_(self) -> str:
        """Return the table of losses as HTML."""
        return str(self.to_dataframe().to_html(float_format="{:.3f}".format))

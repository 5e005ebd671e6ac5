"""Inclusion of heads: the posterior of each head's gate in a net that sums its heads, with ablation and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_float, check_int, check_seed, check_sequence
from bnet_transformer._core.distributed import SINGLE_PROCESS
from bnet_transformer._core.files import derive_seed
from bnet_transformer._core.process import check_memory, translate_memory_errors
from bnet_transformer._core.results import Fields, Result, UnsavedFunction
from bnet_transformer._core.stats import EffectTable, SentenceValues, digest_words
from bnet_transformer._core.tensors import enable_gradients, to_numpy
from bnet_transformer.attention.gates import (
    MAX_RHAT,
    NUM_FREE,
    CorpusPart,
    GatedRuns,
    GatePosterior,
    count_passes,
    exact_gate_posterior,
    find_head_sites,
    gate_settings,
    gibbs_gate_posterior,
    infer_targets,
    relaxed_gate_posterior,
)
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.data import Batch, read_batch
from bnet_transformer.data.batch import check_has_words, infer_task
from bnet_transformer.data.dataset import ObservedMode, has_observed
from bnet_transformer.data.do_values import to_stored
from bnet_transformer.data.encode import word_encoder
from bnet_transformer.declare import Network, as_network
from bnet_transformer.errors import BNetError, BudgetError, format_count, unknown_name_error
from bnet_transformer.learning.loop import LoopConfig

if TYPE_CHECKING:
    import pandas as pd


# --------------------------------------------------------------------------------------------------------------------
# The results of head inclusion as tables: `Inclusion`, the posterior of each head's gate, and `Damage`.


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


class HeadTable(EffectTable):
    """A result about heads, which is displayed as a one-line summary and a table with one row for each head."""

    _number_format = "{:.3f}"
    _max_rows = None

    def by_head(self) -> pd.DataFrame:
        """Return one row for each head."""
        return self.to_dataframe()

    def __str__(self) -> str:
        return self._format_text()

    def _to_head_values(
        self, measure: str, values: Tensor | None, settings: Mapping[str, object], **options: Any
    ) -> SentenceValues:
        """The values of cells by sentence, `[sentence, slice, head]` or `[sentence, slice, head, relation]`."""
        if values is None:
            raise BNetError("compare", expected="results with values by sentence", hint="Compute the results again")
        cells = self._get_cells()
        names = (
            f"{row[0]}_{row[1]}" + "".join(f" {name}" for name in row[2:]) for row in zip(*cells.values(), strict=True)
        )
        return SentenceValues(measure, tuple(names), cells, to_numpy(values.flatten(1).T), settings=settings, **options)

    def _get_shown_frame(self) -> pd.DataFrame:
        return self.by_head()


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
        corrupt: What the value of a head that is off becomes; None for zero.
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
    corrupt: object = field(default=None, repr=False)

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

    @property
    def _columns(self) -> tuple[str, ...]:  # type: ignore[override]
        rhat = () if self.rhat is None else ("rhat",)
        errors = ("importance", "importance_error", "ablation", "ablation_error")
        return ("rank", "mean", "rho_error", "low", "high", "log_bayes", "error", *rhat, *errors)

    def _get_axes(self) -> Mapping[str, Sequence[Any]]:
        return {"slice": self.slices, "head": range(self.log_bayes.shape[1])}

    def to_dataframe(self) -> pd.DataFrame:
        """A data frame with a row for each head, by rank."""
        return super().to_dataframe().rename(columns={"mean": "rho"}).sort_values("rank", ignore_index=True)

    def by_head(self) -> pd.DataFrame:
        """Return one row for each head; the table of svi labels its error, which leaves out the approximation."""
        table = self.to_dataframe()
        if self.method == "svi":
            return table.drop(columns="rho_error").rename(columns={"error": "Monte Carlo error"})
        return table

    def _to_sentence_values(self) -> SentenceValues:
        # The gates of a net share rho, so that their probabilities are not independent between sentences.
        settings = {"likelihood": self.likelihood, "corrupt": repr(to_stored(self.corrupt))}
        digests = _digest_batch(self.network, self.data)
        return self._to_head_values("loss with the head off, nats", self.losses, settings, digests=digests)

    def _check_pair(self, other: Inclusion) -> None:
        if self.sigma != other.sigma:  # a loss is a squared error in units of sigma
            expected, hint = (
                f"losses with the same sigma, {self.sigma}",
                "Pass one sigma= to both calls of bt.inclusion",
            )
            raise BNetError("compare", expected=expected, actual=other.sigma, hint=hint)

    def _to_fields(self) -> Fields:
        return {**super()._to_fields(), "corrupt": to_stored(self.corrupt)}

    @property
    def caption(self) -> str:
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
class Damage(Result):
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

    _index, _number_format, _max_rows = "heads off", "{:.3f}", None
    _shapes = "labels: {_} any @; values error: float64 *axes"

    axes: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]]
    values: Tensor = field(repr=False)
    error: Tensor = field(repr=False)
    sentences: int
    order: Mapping[str, tuple[tuple[int, int], ...]] = field(repr=False)

    @property
    def caption(self) -> str:
        """The subject, in one line."""
        return f"loss in nats by the number of heads that are off, {self.sentences:,} sentences"

    def _get_columns(self) -> Mapping[str, Any]:
        measures, counts = (self.labels[axis] for axis in self.axes)
        return {"heads off": [int(k) for k in counts], **dict(zip(measures, self.values, strict=True))}


# --------------------------------------------------------------------------------------------------------------------
# `inclusion`: the posterior of each head's gate in a net that sums its heads, with ablation and gradient importance.
#
# Ablation is the loss of log probability when a head is off. Importance is the mean slope of the loss along a gate
# (Michel, Levy and Neubig 2019, "Are sixteen heads really better than one?"): `E_x |d loss / d xi|` at `xi = 1`, which
# is `E_x |a^T d loss / d a|` if heads that are off become zero. Without observations the loss is the distance from the
# full net, whose slope is zero at `xi = 1`. In this case `y` is sampled from `Normal(f(all on), sigma)`, several times
# for each sentence.


MAX_HEADS = 12  # maximum heads of a slice for which all gate settings are enumerated
BUDGET = 2**17  # maximum runs of one slice: sentences x settings
MAX_SIGMA_RATIO = 1e4  # a sigma further from the effect of a head carries no information, or overflows
IDLE_TOLERANCE = 1e-6  # a head is idle if its effect is below this fraction of the maximum effect of a head
OUTPUT_SAMPLES = 8  # sampled outputs of each sentence without observations
NORMAL_AROUND = "Normal around "
INCLUSION_METHODS = ("exact", "gibbs", "svi")
MIN_ROUNDS = {"exact": 3, "gibbs": 8, "svi": 3}  # 8 sweeps are 6 after the warmup, so R-hat is defined
CreateProgressBar = Callable[[str, int], Any]  # creates a progress bar from its unit and its total


@translate_memory_errors("inclusion")
@enable_gradients()
def inclusion(
    net: Any,
    sentences: object,
    *,
    corrupt: object = None,
    method: str = "exact",
    sigma: float | None = None,
    output: str | None = None,
    role: str | None = None,
    interval: float = 0.9,
    draws: int = 1000,
    rounds: int = 40,
    budget: int = BUDGET,
    seed: int = 0,
    progress: bool | None = None,
) -> Inclusion:
    """Compute the posterior of `rho`, the share of sentences in which each head is on, and two other measures.

    The likelihood is that of the observations (for a language model, of the next words). Without observations, or if
    `output` or `sigma` is given, it is a Normal around the output of the full net at the group `output`.

    Args:
        net: A net that sums its heads.
        sentences: Text, lists of words, ids or vectors, or pairs with observations, as for `bt.fit`. In a net with
            several stacks a sentence is a mapping from stack, or the words of each stack in their order.
        corrupt: What the value of a head that is off becomes, as in `bt.circuit`, at each word of each sentence:
            `Mean(sentences)`, a tensor, a sentence, or a change of the value, such as a function or `Noise(sigma)`; by
            default zero.
        method: `"exact"` sums over all gates of a slice, while the heads of other slices are on. The other methods
            gate all slices at once: `"gibbs"` by Gibbs sampling with the exact likelihood, `"svi"` by variational
            inference, which gives no intervals, and whose error leaves out that of the approximation.
        sigma: The standard deviation around the output of the full net. By default the root mean square distance by
            which the output changes when one head is off.
        output: The node group of this output, such as x_6; by default the output of the module.
        role: The role of heads, such as dec_cross_a, if the net has several kinds of heads.
        interval: The probability of intervals, 0.9 by default.
        draws: The number of posterior samples.
        rounds: The number of rounds of `"svi"`, or of sweeps of each chain of `"gibbs"` (at least 8).
        budget: The maximum number of runs (sentences x 2^heads) of a slice for `"exact"`.
        seed: The seed of the draws.
        progress: True shows a progress bar, False none; None shows one only in a terminal.

    Returns:
        The posterior, with gradient importance and ablation.

    Raises:
        BNetError: If the net does not sum heads, or an option is out of range.
        BudgetError: If `"exact"` would need more runs than `budget`.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(8, heads=2, slices=2, vocabulary=["the", "cat", "sat"])
    >>> found = bt.inclusion(net, ["the cat sat", "sat the cat"])
    >>> found.mean.shape                                        # [slice, head]
    torch.Size([2, 2])
    """
    check_choice("method", method, INCLUSION_METHODS)
    if sigma is not None:
        check_float("sigma", sigma, above=0)
    if not 0 < check_float("interval", interval) < 1:
        raise BNetError("interval", expected="a probability between 0 and 1", actual=interval)
    check_int("draws", draws)
    check_int("rounds", rounds, minimum=MIN_ROUNDS[method])
    check_seed(seed)
    network = as_network(net)
    should_observe = sigma is None and output is None
    runs = create_runs(network, sentences, output, role, should_observe=should_observe, corrupt=corrupt)
    check_memory(f"{draws} draws", 8 * draws * len(runs.sites) * runs.num_heads, "fewer draws=")
    if method == "exact":
        _check_budget(runs, check_int("budget", budget))
    bars, generator = _create_bars(progress), torch.Generator().manual_seed(seed)
    if method == "exact":
        estimate, losses, idle, sigma = _infer_exactly(runs, sigma, draws, generator, bars)
    else:
        estimate, losses, idle, sigma = _infer_jointly(runs, method, sigma, draws, rounds, generator, bars)
    with bars("sentences", len(runs.corpus)) as bar:
        slopes, error = importance(runs, sigma, seed, bar.update)
    ablation_mean, ablation_error = mean_and_error(losses)
    return Inclusion(
        slices=tuple(site.name for site in runs.sites),
        method=method,
        sentences=len(losses),
        likelihood=_describe_likelihood(runs),
        sigma=sigma,
        interval=float(interval),
        **vars(estimate),
        importance=slopes,
        importance_error=error,
        ablation=ablation_mean,
        ablation_error=ablation_error,
        idle=idle,
        network=network,
        data=runs.corpus,
        losses=losses,
        corrupt=corrupt,
    )


def _create_bars(progress: bool | None) -> CreateProgressBar:
    """Return a function that creates the progress bars of a run."""
    loop = LoopConfig(progress=progress)
    return lambda unit, total: loop.progress_bar(SINGLE_PROCESS, total, 0, f" {unit}")


# The posterior, the loss in nats with each head off, which heads are idle, and the standard deviation of the output.
InclusionEstimate = tuple[GatePosterior, Tensor, Tensor, float | None]


def _infer_exactly(
    runs: GatedRuns, sigma: float | None, draws: int, generator: torch.Generator, bars: CreateProgressBar
) -> InclusionEstimate:
    """Estimate the posterior from all gate settings of a slice, slice by slice."""
    heads, gates = runs.num_heads, gate_settings(runs.num_heads)
    with bars("runs", len(runs.corpus) * len(gates) * len(runs.sites)) as bar:
        table = runs.log_prob_table(gates, bar.update)
    off = (len(gates) - 1) - 2 ** torch.arange(heads)
    losses = (table[..., -1:] - table[..., off]).transpose(0, 1)
    sigma, scale = _resolve_sigma(runs, losses, sigma)
    with bars("posteriors", len(runs.sites) * (1 + heads)) as bar:
        posteriors = [exact_gate_posterior(scale * log, draws, generator, bar.update) for log in table]
    dims = {"rho": 1, "rho_error": 0, "log_bayes": 0, "error": 0, "inclusion": 1, "interaction": 0}
    posterior = GatePosterior(
        **{
            name: torch.stack([getattr(slice_posterior, name) for slice_posterior in posteriors], dim)
            for name, dim in dims.items()
        }
    )
    halves = (table.unflatten(-1, (-1, 2, 2**head)) for head in range(heads))
    change = torch.stack([(half[..., 1, :] - half[..., 0, :]).abs().amax((1, 2, 3)) for half in halves], 1)
    return posterior, scale * losses, change <= IDLE_TOLERANCE * change.max(), sigma


def _infer_jointly(
    runs: GatedRuns,
    method: str,
    sigma: float | None,
    draws: int,
    rounds: int,
    generator: torch.Generator,
    bars: CreateProgressBar,
) -> InclusionEstimate:
    """Estimate the posterior of the gates of all slices at once."""
    num_gates = runs.num_heads * len(runs.sites)
    with bars("runs", len(runs.corpus) * (runs.num_heads + 1) * len(runs.sites)) as bar:
        losses = ablation(runs, bar.update)
    sigma, scale = _resolve_sigma(runs, losses, sigma)
    if method == "gibbs":
        infer, runs_per_sentence = gibbs_gate_posterior, (NUM_FREE + num_gates) * (1 + num_gates * rounds)
    else:
        infer, runs_per_sentence = relaxed_gate_posterior, count_passes(num_gates) * rounds
    with bars("runs", len(runs.corpus) * runs_per_sentence) as bar:
        posterior = infer(runs, scale, rounds, draws, generator, bar.update)
    change = losses.abs().amax(0)
    idle = (change <= IDLE_TOLERANCE * change.max()) & (posterior.log_bayes.abs() < IDLE_TOLERANCE)
    return posterior, scale * losses, idle, sigma


def _resolve_sigma(runs: GatedRuns, losses: Tensor, sigma: float | None) -> tuple[float | None, float]:
    """Return the standard deviation around the output, and the factor by which `log P` of a run is multiplied.

    The default is the root mean square distance by which one head changes the output. Runs return half the negative
    square of this distance, so the factor is `sigma^-2`.
    """
    if runs.is_observed:
        return None, 1.0
    name, rms = runs.targets[0], float((2 * losses.mean()).sqrt())
    if not rms > 0:
        expected = "a node group that changes when a head is off"
        raise BNetError("output", expected=expected, actual=name)
    sigma = rms if sigma is None else float(sigma)
    if not rms / MAX_SIGMA_RATIO <= sigma <= rms * MAX_SIGMA_RATIO:
        bounds = f"a number from {rms / MAX_SIGMA_RATIO:.3g} to {rms * MAX_SIGMA_RATIO:.3g}"
        expected = f"{bounds}, because one head changes {name} by {rms:.3g}"
        raise BNetError("sigma", expected=expected, actual=sigma)
    return sigma, sigma**-2


@translate_memory_errors("damage")
def damage(
    result: Inclusion, sentences: object = None, *, counts: object = None, progress: bool | None = None
) -> Damage:
    """Compute the loss of sentences when the heads with the lowest rank are off.

    Args:
        result: The result of `inclusion`.
        sentences: Other sentences; by default those of the result.
        counts: The numbers of heads that are off; by default from none to all.
        progress: True shows a progress bar, False none; None shows one only in a terminal.

    Returns:
        The mean loss in nats for each measure and number of heads.

    Raises:
        BNetError: If the sentences do not have the likelihood of the result, or a count is out of range.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.attention import damage
    >>> net = bt.decoder(8, heads=2, slices=1, vocabulary=["the", "cat", "sat"])
    >>> damage(bt.inclusion(net, ["the cat sat", "sat the cat"]), counts=[1, 2]).to_dataframe().shape
    (2, 3)
    """
    if not isinstance(result, Inclusion):
        raise BNetError("damage", expected="a result of bt.inclusion", actual=result)
    is_normal = result.sigma is not None
    output = result.likelihood.removeprefix(NORMAL_AROUND) if is_normal else None
    data = result.data if sentences is None else sentences
    roles = {result.network.graph.get_group(name).stem for name in result.slices}
    role = min(roles) if len(roles) == 1 else None
    if isinstance(result.corrupt, UnsavedFunction):
        hint = "Compute the result again by bt.inclusion"
        raise BNetError("damage", expected="what a head that is off becomes", actual=result.corrupt, hint=hint)
    options: dict[str, Any] = {"sites": result.slices, "corrupt": result.corrupt}
    runs = create_runs(result.network, data, output, role, should_observe=not is_normal, **options)
    if _describe_likelihood(runs) != result.likelihood:
        expected = f"sentences with {result.likelihood}, as in the result of bt.inclusion"
        actual = f"sentences with {_describe_likelihood(runs)}"
        raise BNetError("sentences", expected=expected, actual=actual)
    scale = 1.0 if result.sigma is None else result.sigma**-2
    heads = result.log_bayes.numel()
    counts = range(heads + 1) if counts is None else counts
    numbers = check_sequence("counts", counts, int, lambda k: check_int("counts", k, minimum=0))
    if not numbers or max(numbers) > heads:
        expected = f"numbers of heads from 0 to {heads}"
        raise BNetError("counts", expected=expected, actual=counts)
    order = {name: rank_heads(result.measure(name)) for name in MEASURES}
    gates = torch.ones(len(MEASURES), len(numbers), *result.log_bayes.shape, dtype=result.network.dtype)
    for m, ranked in enumerate(order.values()):
        for k, off in enumerate(numbers):
            for head in ranked[:off]:
                gates[(m, k, *head)] = 0.0
    settings = [torch.ones_like(gates[0, 0]), *gates.flatten(0, 1)]
    losses = torch.zeros(len(runs.corpus), len(settings) - 1, dtype=torch.float64)
    with torch.no_grad(), _create_bars(progress)("sentences", len(losses)) as bar:
        for part in runs.parts():
            rows = (g.expand(len(part), -1, -1).to(result.network.device) for g in settings)
            full, *log_probs = (runs.gated_log_probs(part, row) for row in rows)
            losses[part.indices] = (scale * (full - torch.stack(log_probs)).double().cpu()).T
            bar.update(len(part))
    labels = {"measure": MEASURES, "heads off": tuple(map(str, numbers))}
    mean, error = (values.reshape(gates.shape[:2]) for values in mean_and_error(losses))
    return Damage(("measure", "heads off"), labels, mean, error, len(losses), order)


def _describe_likelihood(runs: GatedRuns) -> str:
    """Describe the likelihood."""
    names = ", ".join(runs.targets)
    return f"P({names} | x)" if runs.is_observed else f"{NORMAL_AROUND}{names}"


def create_runs(
    network: Network,
    sentences: object,
    output: str | None = None,
    role: str | None = None,
    *,
    should_observe: bool = True,
    sites: tuple[str, ...] | None = None,
    corrupt: object = None,
) -> GatedRuns:
    """Create the gated runs of a net: its sites, the sentences and their likelihood."""
    network.check_single_dtype()
    check_has_words(network, "sentences")
    if not should_observe and not isinstance(sentences, Batch) and has_observed(infer_task(network), sentences):
        expected = "sentences without observations, because sigma= or output= selects the output of the net"
        raise BNetError("sentences", expected=expected, actual="pairs of sentences and observations")
    needs: ObservedMode = "optional" if should_observe else "none"
    corpus = read_batch(network, sentences, "sentences", observed=needs, missing_option=None, mask_padding=True)
    targets = infer_targets(network, corpus, output)
    indices = [network.graph.get_group(name).index for name in targets]
    head_sites = find_head_sites(network, role, indices)
    head_sites = head_sites if sites is None else tuple(site for site in head_sites if site.name in sites)
    module = CompiledModule(network).eval().requires_grad_(False)
    return GatedRuns(module, head_sites, corpus.to(network.device), targets, head_sites[0].num_heads, corrupt)


def _check_budget(runs: GatedRuns, budget: int) -> None:
    """Raise an error for more gate settings, or more runs, than the exact method sums over."""
    subject, alternative = "method='exact'", "method='gibbs', or method='svi', which is approximate"
    if runs.num_heads > MAX_HEADS:
        expected = f"at most {MAX_HEADS} heads in a slice ({2**MAX_HEADS:,} settings of their gates)"
        actual = f"{runs.num_heads} heads ({format_count(2**runs.num_heads)} settings)"
        raise BudgetError(subject, expected=expected, actual=actual, hint=f"Use {alternative}")
    count, max_count = len(runs.corpus), budget >> runs.num_heads
    if count > max_count:
        current, fewer = (f"{n:,} sentence{'s' * (n != 1)}" for n in (count, max_count))
        settings = f"{format_count(2**runs.num_heads)} settings of {runs.num_heads} gates"
        actual = f"{format_count(count << runs.num_heads)} ({current} x {settings})"
        hint = f"Use {fewer + ', ' if max_count else ''}a larger budget=, or {alternative}"
        raise BudgetError(subject, expected=f"at most {budget:,} runs of each slice", actual=actual, hint=hint)


def ablation(runs: GatedRuns, update_progress: Callable[[int], object]) -> Tensor:
    """Compute the loss of `log P` of each sentence with one head off, `[sentence, site, head]`."""
    one_off = torch.cat([torch.ones(1, runs.num_heads), 1 - torch.eye(runs.num_heads)]).double()
    table = runs.log_prob_table(one_off, update_progress)
    return (table[..., :1] - table[..., 1:]).transpose(0, 1)


def importance(
    runs: GatedRuns, sigma: float | None, seed: int, update_progress: Callable[[int], object]
) -> tuple[Tensor, Tensor]:
    """Compute the mean absolute slope of the loss along each gate, all heads on, `[site, head]`, and its error."""
    slopes = torch.empty(len(runs.corpus), len(runs.sites), runs.num_heads, dtype=torch.float64)
    for part in runs.parts(runs.gradient_part_size()):
        if sigma is None:
            slopes[part.indices] = gate_slopes(runs, part).abs()
        else:
            sampled = [gate_slopes(runs, sample).abs() for sample in _sample_outputs(part, sigma, seed)]
            slopes[part.indices] = torch.stack(sampled).mean(0) / sigma**2
        update_progress(len(part))
    return mean_and_error(slopes)


def gate_slopes(runs: GatedRuns, part: CorpusPart) -> Tensor:
    """Compute `d log P / d gates` of each sentence with all heads on."""
    shape, network = (len(part), len(runs.sites), runs.num_heads), runs.module.network
    gates = torch.ones(shape, dtype=network.dtype, device=network.device).requires_grad_()
    (slopes,) = torch.autograd.grad(runs.gated_log_probs(part, gates).sum(), gates)
    return slopes.double().cpu()


def _sample_outputs(part: CorpusPart, sigma: float, seed: int) -> Iterator[CorpusPart]:
    """Iterate over samples of outputs around the full output; the random numbers depend only on the sentence."""
    assert part.full_output is not None
    full = part.full_output.expand(len(part), *part.full_output.shape[1:])
    noise = []
    for sentence in part.indices.tolist():
        generator = torch.Generator().manual_seed(derive_seed(seed, "output", sentence))
        noise.append(torch.randn(OUTPUT_SAMPLES, *full.shape[1:], generator=generator, dtype=torch.float64))
    for sample in torch.stack(noise, 1):
        yield replace(part, full_output=full + sigma * sample.to(full))


def rank_heads(measure: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the heads in ascending order of a measure."""
    heads = measure.shape[1]
    return tuple(divmod(int(k), heads) for k in measure.flatten().argsort(stable=True))


def mean_and_error(values: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mean over sentences, and its standard error (NaN for one sentence)."""
    count = len(values)
    return values.mean(0), values.std(0) / count**0.5 if count > 1 else values[0] * torch.nan

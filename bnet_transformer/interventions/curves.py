"""Faithfulness curves: how much of the total effect the best edges of a ranking restore, by their number (MIB)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import (
    check_choice,
    check_float,
    check_fraction,
    check_int,
    check_names,
    check_seed,
    check_sequence,
)
from bnet_transformer._core.process import translate_memory_errors
from bnet_transformer._core.stats import ComparableResult, SentenceValues, percentile_interval, resample_weights
from bnet_transformer._core.tensors import BoolArray, FloatArray, to_numpy
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.acdc import ARROWS, MAX_BATCH_SIZE, CircuitPairs, build_divergence_runs
from bnet_transformer.interventions.circuit import (
    RELATIVE_ZERO,
    Circuit,
    FaithfulnessWarning,
    StoredCircuit,
    explain_weak_total,
    is_total_zero,
)
from bnet_transformer.interventions.circuit_arrows import NODES
from bnet_transformer.interventions.circuit_runs import CircuitRuns
from bnet_transformer.interventions.edges import EDGES
from bnet_transformer.interventions.examples import DEFAULT_MEMORY, describe_metric, explain_unchecked_metric
from bnet_transformer.interventions.sweep_results import Sweep

if TYPE_CHECKING:
    import pandas as pd


MIB_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
RANKINGS = ("signed", "absolute")
RANDOM = "random"
QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True, eq=False, repr=False)
class FaithfulnessCurves(ComparableResult):
    """The result of `faithfulness_curves`: for each method, the metric of circuits of its best edges.

    The circuit C_k consists of the `int(k E)` best of the E edges. Its faithfulness is `f(k) = (m(C_k) - m(empty)) /
    (m(all) - m(empty))`, where m is the mean over the pairs. Intervals resample the pairs, in the numerator and the
    denominator together.

    Attributes:
        shares: The shares k of the edges.
        counts: The number of edges of each circuit.
        edges: The number E of ranked edges.
        clean: The metric of the circuit of all edges, `[example]`.
        empty: The metric of the empty circuit, `[example]`.
        outcomes: For each method, the metric of the circuits of its signed ranking, `[draw, share, example]`; several
            draws for the random baseline only.
        absolute_outcomes: The same for the ranking by absolute scores.
        confidence: The confidence level of the intervals.
        resamples: The number of resamples of the pairs.
        seed: The seed of the resamples and of the random baseline.
        kl: With `readout=`, for each method the mean over the pairs of `KL(P_clean || P_C)` of this node, in nats, for
            the circuits of its ranking by absolute scores, `[share]`; for a random baseline the mean over its draws.
        metric: The metric: its node and states, or the parameters of a function; empty if it is unknown.
        over: The axes along which arrows are separate edges; `("edges",)` for edges from writers to readers; after
            `"nodes"`, the axes along which nodes are separate.
        digests: A digest of the words of each pair; empty if they are unknown.
    """

    _shapes = (
        "shares counts: any share; clean empty: float64 example; outcomes absolute_outcomes: {method} float64 _+ share "
        "example; kl: {method} float64 share; digests: any example?"
    )

    shares: tuple[float, ...]
    counts: tuple[int, ...]
    edges: int
    clean: Tensor
    empty: Tensor
    outcomes: Mapping[str, Tensor]
    absolute_outcomes: Mapping[str, Tensor]
    confidence: float = 0.95
    resamples: int = 1000
    seed: int = 0
    kl: Mapping[str, Tensor] | None = None
    metric: str = ""
    over: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the methods, baselines last."""
        return tuple(self.outcomes)

    @property
    def examples(self) -> int:
        """The number of pairs."""
        return len(self.clean)

    @property
    def cpr(self) -> dict[str, float]:
        """The integral of f(k) of each method for its signed ranking, by trapezoids on k (`area_under` of MIB).

        Circuits that equal the net at each share have 0.999, because the first share is 0.001. Values above this are
        not more faithful: edges that counteract the metric were left out.
        """
        return {name: float(self._integrals[name]["CPR"][0]) for name in self.methods}

    @property
    def cmd(self) -> dict[str, float]:
        """The integral of `|1 - f(k)|` of each method for its ranking by absolute scores (`area_from_1` of MIB)."""
        return {name: float(self._integrals[name]["CMD"][0]) for name in self.methods}

    @property
    def log_area(self) -> dict[str, float]:
        """The mean of f(k) over log k of each method for its signed ranking, which gives small circuits more weight.

        MIB's integral with `log_scale=True` is this number times the length of the interval, `log(1 / 0.001)`.
        """
        return {name: float(self._integrals[name]["log-k area"][0]) for name in self.methods}

    def faithfulness(self, method: str, *, ranking: str = "signed") -> Tensor:
        """The curve f(k) of a method; for a random baseline the mean over its draws.

        Args:
            method: The name of the method.
            ranking: `"signed"` or `"absolute"`.

        Returns:
            The faithfulness at each share, `[share]`.
        """
        return torch.from_numpy(self._curves(method, ranking)[..., 0].mean(0))

    def interval(self, method: str, *, ranking: str = "signed") -> tuple[Tensor, Tensor]:
        """The percentile bootstrap interval of the curve of a method.

        Args:
            method: The name of the method.
            ranking: `"signed"` or `"absolute"`.

        Returns:
            The lower and the upper ends, `[share]` each.

        Raises:
            BNetError: There are fewer than 2 pairs.
        """
        if self.examples < 2:
            raise BNetError("interval", expected="at least 2 pairs", actual=self.examples)
        low, high = percentile_interval(self._curves(method, ranking).mean(0)[..., 1:], self.confidence)
        return torch.from_numpy(low), torch.from_numpy(high)

    def by_pair(self, method: str, *, ranking: str = "signed") -> Tensor:
        """The faithfulness of each pair, whose median is robust to pairs with a small total effect.

        Args:
            method: The name of the method.
            ranking: `"signed"` or `"absolute"`.

        Returns:
            The faithfulness, `[share, pair]`, of the pairs whose total effect is not 0.
        """
        total = self.clean - self.empty
        has_effect = total.abs() > RELATIVE_ZERO * torch.maximum(self.clean.abs(), self.empty.abs())
        effects = self._get_outcomes(method, ranking).mean(0) - self.empty
        return (effects / total)[:, has_effect]

    def to_dataframe(self) -> pd.DataFrame:
        """A data frame with a row for each method and share.

        The columns are the method, the share and number of edges, f of the signed ranking with its interval and the
        quartiles over pairs, f of the ranking by absolute scores and, with `readout=`, its KL divergence.
        """
        import pandas as pd

        rows = []
        for name in self.methods:
            f, absolute = self.faithfulness(name), self.faithfulness(name, ranking="absolute")
            low, high = self.interval(name) if self.examples > 1 else (torch.full_like(f, torch.nan),) * 2
            quartiles = torch.quantile(self.by_pair(name), torch.tensor(QUARTILES, dtype=torch.float64), dim=-1)
            for k, (share, count) in enumerate(zip(self.shares, self.counts, strict=True)):
                numbers = (f, low, high, *quartiles[[1, 0, 2]], absolute, *([] if self.kl is None else [self.kl[name]]))
                rows.append((name, share, count, *(float(column[k]) for column in numbers)))
        columns = ["method", "share", "edges", "f", "low", "high", "median", "lower quartile", "upper quartile"]
        columns += ["f by size", *([] if self.kl is None else ["KL by size"])]
        return pd.DataFrame(rows, columns=columns)

    def summary(self) -> pd.DataFrame:
        """A data frame with a row for each method: CPR, CMD and log-k area, each with its interval."""
        import pandas as pd

        rows: dict[str, dict[str, float]] = {}
        for name in self.methods:
            row = rows[name] = {}
            for measure, values in self._integrals[name].items():
                ends = percentile_interval(values[1:], self.confidence) if self.examples > 1 else (np.nan, np.nan)
                row |= {measure: float(values[0]), f"{measure} low": float(ends[0]), f"{measure} high": float(ends[1])}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("method").reset_index()

    def _to_sentence_values(self) -> SentenceValues:
        empty, total = to_numpy(self.empty), to_numpy(self.clean - self.empty)
        cells, values = [], []
        for name in self.methods:
            effects = to_numpy(self.outcomes[name].mean(0)) - empty  # [share, example]
            cells += [(name, "f", share) for share in self.shares] + [(name, "CPR", None)]
            # CPR is linear in f, so that it is a ratio of means too.
            values += [effects, integrate(effects[None], np.array(self.shares))]
        names = [f"{name}: CPR" if measure == "CPR" else f"{name}: f({share:g})" for name, measure, share in cells]
        columns = dict(zip(("method", "measure", "share"), zip(*cells, strict=True), strict=True))
        settings = {"shares": self.shares, "methods": self.methods, "metric": self.metric, "over": self.over}
        notes = (*self._get_notes(), *explain_unchecked_metric(self.metric))
        return SentenceValues(
            "faithfulness", tuple(names), columns, np.concatenate(values), total[None], settings, notes, self.digests
        )

    def _get_outcomes(self, method: str, ranking: str) -> Tensor:
        """The metric of the circuits of a method, `[draw, share, example]`."""
        check_names("method", [method], self.methods)
        check_choice("ranking", ranking, RANKINGS)
        return (self.outcomes if ranking == "signed" else self.absolute_outcomes)[method]

    def _curves(self, method: str, ranking: str) -> FloatArray:
        """f(k) of all pairs, then of each resample, `[draw, share, 1 + resample]`."""
        effects = to_numpy(self._get_outcomes(method, ranking) - self.empty) @ self._weights
        with np.errstate(divide="ignore", invalid="ignore"):  # a resample of pairs whose effects cancel
            return effects / (to_numpy(self.clean - self.empty) @ self._weights)

    @cached_property
    def _weights(self) -> FloatArray:
        """The weights of the pairs in the sample and in each resample, `[example, 1 + resample]`."""
        count = self.examples
        weights = resample_weights(count, self.resamples, np.random.default_rng(self.seed))
        return np.concatenate([np.full((count, 1), 1 / count), weights], axis=1)

    @cached_property
    def _integrals(self) -> dict[str, dict[str, FloatArray]]:
        """CPR, CMD and log-k area of each method, of all pairs and of each resample, `[1 + resample]`."""
        k = np.array(self.shares)
        results = {}
        for name in self.methods:
            signed, absolute = self._curves(name, "signed"), self._curves(name, "absolute")
            results[name] = {
                "CPR": integrate(signed, k).mean(0),
                "CMD": integrate(np.abs(1 - absolute), k).mean(0),
                "log-k area": integrate(signed, np.log(k)).mean(0) / np.log(k[-1] / k[0]),
            }
        return results

    def __repr__(self) -> str:
        values = ", ".join(f"{name} CPR {self.cpr[name]:.3f} CMD {self.cmd[name]:.3f}" for name in self.methods)
        return f"<FaithfulnessCurves: {self._format_size()}; {values}>"

    def _format_size(self) -> str:
        """The numbers of edges and pairs, as text."""
        kind = NODES if NODES in self.over else EDGES
        return f"{self.edges:,} {kind}, {self.examples} pair{'s' * (self.examples != 1)}"

    @property
    def caption(self) -> str:
        """The numbers of edges and pairs, and the level of the intervals, in one line."""
        level = f"{self.confidence:.0%} intervals over pairs" if self.examples > 1 else "one pair, hence no intervals"
        return f"{self._format_size()}; {level}"

    def _get_shown_frame(self) -> pd.DataFrame:
        return self.summary()

    def _get_notes(self) -> Sequence[str]:
        note = explain_weak_total(self.clean, self.empty)
        return () if note is None else (note,)


@translate_memory_errors("faithfulness_curves")
def faithfulness_curves(
    clean: object,
    corrupt: object,
    *,
    metric: object,
    scores: Any,
    shares: Sequence[float] = MIB_SHARES,
    readout: str | None = None,
    baselines: Sequence[str] = (RANDOM,),
    random_draws: int = 5,
    at: str = ARROWS,
    over: Sequence[str] | None = None,
    candidates: str | Sequence[str] | None = None,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    words: object = None,
    memory: int = DEFAULT_MEMORY,
) -> FaithfulnessCurves:
    """Measure rankings of edges as MIB does: f(k), CPR and CMD, with intervals over the pairs.

    Pass pairs on which the scores were not computed: a ranking fits the pairs that it saw.

    Args:
        clean: The clean sentence, or the list of sentences.
        corrupt: The corrupt sentence or sentences, or an ablation of the clean ones, as for `bt.circuit`.
        metric: A mapping from a discrete node to one or two states, or a function of nodes, as for `bt.sweep`.
        scores: The scores of edges by method, `{"sweep": sweep, "mine": {"v_0_0_1 -> a_0_0_3": 0.2, ...}}`, or the
            scores of one method. Scores are a mapping from names of edges, a `Sweep`, whose effects get the sign of a
            contribution to the clean run, a `Circuit` (its effects), or a `StoredCircuit`. Edges without a score have
            the score 0; if all methods are sweeps, edges that none scores are in every circuit.
        shares: The shares k of the edges, increasing; by default those of MIB.
        readout: The name of a discrete node, such as the next word: the result then has the KL divergence from its
            distribution in the clean run to that in each circuit.
        baselines: The baselines: `"random"`, or none.
        random_draws: The number of random rankings, whose curves are averaged.
        at: The kind of edges: `"arrows"`, ground arrows; `"edges"`, those of `net.edges()`; or `"nodes"`, all arrows
            from a node, as for `bt.circuit`.
        over: The axes along which arrows are separate edges, as for `bt.circuit`; the scores have the same names.
        candidates: The arrows that may be removed; by default all.
        confidence: The confidence level of the intervals.
        resamples: The number of resamples of the pairs.
        seed: The seed of the random baseline and of the resamples.
        words: The word of the corrupt sentence from which each word of the clean one takes its values, as for
            `bt.circuit`.
        memory: The approximate number of bytes that are used at once.

    Returns:
        The curves of each method and baseline.

    Raises:
        BNetError: An edge is unknown, or the metric has the same mean in both runs.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(dim=4, heads=2, combine="concat", residual=True)
    >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    >>> metric = lambda x_1_2: x_1_2[:, 0]
    >>> found = bt.circuit(clean, corrupt, metric=metric, threshold=0.0)
    >>> curves = bt.faithfulness_curves(clean, corrupt, metric=metric, scores={"search": found}, shares=(0.5, 1.0))
    >>> curves.methods, round(float(curves.faithfulness("search")[-1]), 3)
    (('search', 'random'), 1.0)
    """
    pairs = CircuitPairs.parse(clean, corrupt, metric, at, over, candidates, memory, words)
    ends = _parse_shares(shares)
    check_names("baseline", check_sequence("baselines", baselines, str), (RANDOM,))
    level, count, seed = check_fraction("confidence", confidence), check_int("resamples", resamples), check_seed(seed)
    draws = check_int("random_draws", random_draws) if baselines else 0
    divergence_runs = None if readout is None else build_divergence_runs(pairs, readout)
    options: dict[str, Any] = {"confidence": level, "resamples": count, "seed": seed}
    curves = measure_curves(pairs.build_runs(), scores, ends, draws, **options)
    curves = replace(curves, metric=describe_metric(metric), over=pairs.over, digests=pairs.digests)
    if divergence_runs is not None:
        divergences = measure_curves(divergence_runs, scores, ends, draws, **options)
        kl = {name: values.mean((0, -1)) for name, values in divergences.absolute_outcomes.items()}
        curves = replace(curves, kl=kl)
    if note := explain_weak_total(curves.clean, curves.empty):
        warnings.warn(note, FaithfulnessWarning, stacklevel=3)
    return curves


def measure_curves(
    runs: CircuitRuns,
    scores: Any,
    shares: Sequence[float],
    random_draws: int,
    *,
    confidence: float,
    resamples: int,
    seed: int,
) -> FaithfulnessCurves:
    """Run the circuits of all rankings; equal circuits are run once."""
    methods, is_fixed = _parse_scores(scores, runs)
    size, count = len(runs.edge_names), int((~is_fixed).sum())
    counts = tuple(int(share * count) for share in shares)

    def build_masks(values: FloatArray) -> Any:  # [share, edge], with the edges that are not ranked
        masks = np.broadcast_to(is_fixed, (len(counts), size)).copy()
        ranks = np.empty(len(values), dtype=np.int64)
        ranks[np.argsort(-values, kind="stable")] = np.arange(len(values))  # ties are in the order of the edges
        masks[:, ~is_fixed] = ranks < np.array(counts)[:, None]
        return masks

    rankings = {
        (name, ranking): build_masks(values if ranking == "signed" else np.abs(values))[None]
        for name, values in methods.items()
        for ranking in RANKINGS
    }
    if random_draws:
        generator = np.random.default_rng(seed)
        masks = np.stack([build_masks(generator.random(count)) for _ in range(random_draws)])
        rankings |= dict.fromkeys(((RANDOM, ranking) for ranking in RANKINGS), masks)
    stacked = np.concatenate([is_fixed[None], *(m.reshape(-1, size) for m in rankings.values())])
    packed, inverse = np.unique(np.packbits(stacked, axis=-1), axis=0, return_inverse=True)
    unique = torch.from_numpy(np.unpackbits(packed, axis=-1, count=size).astype(bool))
    computed = torch.cat([runs.evaluate(part) for part in unique.split(MAX_BATCH_SIZE)])
    outcomes = computed[torch.from_numpy(inverse.reshape(-1))]
    clean, empty = runs.evaluate_clean(), outcomes[0]
    if is_total_zero(clean, empty):
        expected = "a metric whose mean differs between the clean run and the empty circuit"
        raise BNetError("metric", expected=expected, actual=f"a total effect of {float((clean - empty).mean()):g}")
    sizes = [masks.shape[0] * masks.shape[1] for masks in rankings.values()]
    parts = dict(zip(rankings, outcomes[1:].split(sizes), strict=True))
    by_ranking = {
        ranking: {name: part.reshape(-1, len(shares), len(clean)) for (name, r), part in parts.items() if r == ranking}
        for ranking in RANKINGS
    }
    results = by_ranking["signed"], by_ranking["absolute"]
    return FaithfulnessCurves(tuple(shares), counts, count, clean, empty, *results, confidence, resamples, seed)


def integrate(values: FloatArray, k: FloatArray) -> FloatArray:
    """The integral of values, `[draw, share, resample]`, over k by trapezoids, `[draw, resample]`."""
    areas: FloatArray = ((values[:, 1:] + values[:, :-1]) / 2 * np.diff(k)[:, None]).sum(1)
    return areas


def _parse_shares(shares: object) -> tuple[float, ...]:
    """Validate the shares: increasing, above 0, at most 1."""
    values = np.array(check_sequence("shares", shares, float, convert=lambda share: check_float("shares", share)))
    if len(values) < 2 or not ((values > 0) & (values <= 1)).all() or (np.diff(values) <= 0).any():
        raise BNetError("shares", expected="at least 2 increasing shares above 0 and at most 1", actual=shares)
    return tuple(values.tolist())


def _parse_scores(scores: Any, runs: CircuitRuns) -> tuple[dict[str, FloatArray], BoolArray]:
    """The scores of each method, of the ranked edges, `[edge]`; and the mask of the edges that are not ranked.

    A sweep does not score some arrows, such as those into a random node or from an index. If every method is a sweep,
    these arrows have no rank: all circuits retain them, so that the others can transmit a difference.
    """
    is_one = isinstance(scores, Sweep | Circuit | StoredCircuit) or (
        isinstance(scores, Mapping) and all(isinstance(value, int | float | Tensor) for value in scores.values())
    )
    methods = {"scores": scores} if is_one else scores
    if not isinstance(methods, Mapping) or not methods or RANDOM in methods:
        expected = "a mapping from methods other than 'random' to scores of edges"
        raise BNetError("scores", expected=expected, actual=scores)
    values = {str(name): _parse_method(f"scores of {name}", part, runs) for name, part in methods.items()}
    is_fixed = np.zeros(len(runs.edge_names), dtype=bool)
    if all(isinstance(part, Sweep) for part in methods.values()):
        scored = {name for sweep in methods.values() for name in sweep.names.values()}
        is_fixed = np.array([name not in scored for name in runs.edge_names])
    return {name: part[~is_fixed] for name, part in values.items()}, is_fixed


def _parse_method(subject: str, scores: Any, runs: CircuitRuns) -> FloatArray:
    """The scores of one method, `[edge]`: of a sweep, a circuit or a mapping."""
    if isinstance(scores, Sweep):  # as contributions to the clean run: positive if the edge moves the metric to it
        sign = -1.0 if scores.direction == "noise" else 1.0
        if scores.clean is not None and scores.corrupt is not None and float(scores.total.mean()) < 0:
            sign = -sign
        table = np.asarray(scores.values)
        scores = {name: sign * float(table[index]) for index, name in scores.names.items()}
    elif isinstance(scores, Circuit):
        scores = scores.effects
    elif isinstance(scores, StoredCircuit):
        scores = scores.scores
    if not isinstance(scores, Mapping):
        raise BNetError(subject, expected="a mapping from edges, a Sweep or a Circuit", actual=scores)
    columns = {name: k for k, name in enumerate(runs.edge_names)}
    values = np.zeros(len(columns))
    for name, score in scores.items():
        number = float(score)
        if not np.isfinite(number):
            raise BNetError(f"{subject}, {name}", expected="a finite number", actual=score)
        if name in columns:
            values[columns[name]] = number
        else:
            runs.check_edge(name)
    if not any(name in columns for name in scores):
        hint = "Use the same at=, over= and candidates= as for the scores"
        raise BNetError(subject, expected="scores of edges that transmit a difference", actual="none", hint=hint)
    return values

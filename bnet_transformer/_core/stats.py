"""Statistics of results: permutation tests, bootstrap intervals, comparisons, Pareto-smoothed importance weights."""

from __future__ import annotations

import functools
import itertools
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_fraction, check_int, check_seed
from bnet_transformer._core.files import compute_digest
from bnet_transformer._core.results import Result
from bnet_transformer._core.tensors import FloatArray, rank_by_size
from bnet_transformer._core.tokens import get_raw
from bnet_transformer.errors import BNetError

# --------------------------------------------------------------------------------------------------------------------
# Permutation tests and bootstrap intervals of the difference of two ratios of means, by cell.
#
# With *paired* sentences (two models or checkpoints on the same sentences) the null hypothesis is that both results of
# a sentence have the same joint distribution when they are exchanged: a resample exchanges the results of random
# sentences, which for a mean is a random sign of each difference. With *unpaired* sentences (two data sets) it is that
# all sentences have one distribution: a resample divides them at random. The statistic is studentised, so that it stays
# valid to first order if only the means are equal (Chung and Romano 2013), and so that cells have one scale: the
# adjusted p of a cell compares it with the maximum over all cells (max-T, Westfall and Young 1993).


MAX_CHUNK_NUMEL = 2**22  # numbers of resampled tables at once
TIE_MARGIN = 1e-9  # statistics from 0 to 1 that differ by no more are equal


def estimate_ratio(table: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The ratio of the means of numerators and denominators, and the influence of each sentence on it.

    Args:
        table: Numerators and denominators, `[..., 2, cell, sentence]`.

    Returns:
        The ratio, `[..., cell]`, and its influence values (delta method), `[..., cell, sentence]`, whose mean is 0.
    """
    numerators, denominators = table[..., 0, :, :], table[..., 1, :, :]
    with np.errstate(divide="ignore", invalid="ignore"):  # the effects of a resample can cancel
        scale = denominators.mean(-1, keepdims=True)
        ratio = numerators.mean(-1, keepdims=True) / scale
        return ratio[..., 0], (numerators - ratio * denominators) / scale


def count_permutations(counts: Sequence[int], paired: bool) -> int:
    """The number of distinct permutations of the test."""
    return 2 ** counts[0] if paired else math.comb(sum(counts), counts[0])


def permutation_p(
    tables: Sequence[FloatArray], paired: bool, resamples: int, seed: int
) -> tuple[FloatArray, FloatArray, bool]:
    """The permutation p value of each cell, and its max-T adjustment.

    Args:
        tables: Numerators and denominators of both results, `[2, cell, sentence]` each.
        paired: Whether the sentences are the same.
        resamples: The maximum number of permutations.
        seed: The seed of the permutations.

    Returns:
        The p values, the adjusted p values, `[cell]` each, and whether all permutations were computed.
    """
    from scipy.stats import permutation_test  # slow to import

    samples: tuple[FloatArray, ...] = tuple(tables)
    statistic: Callable[..., FloatArray] = functools.partial(_studentise, paired=paired)
    if paired and all((table[1] == 1).all() for table in tables):
        # For means, |t| is monotone in |mean| / (root mean square), and sign flips do not change the mean square.
        differences = tables[0][0] - tables[1][0]
        scale = np.sqrt(np.square(differences).mean(-1, keepdims=True))
        samples = (np.divide(differences, scale, out=np.zeros_like(differences), where=scale > 0),)
        statistic = _mean_magnitude
    result = permutation_test(
        samples,
        statistic,
        permutation_type="samples" if paired else "independent",
        vectorized=True,
        n_resamples=resamples,
        batch=max(1, MAX_CHUNK_NUMEL // sum(sample.size for sample in samples)),
        alternative="greater",
        axis=-1,
        random_state=np.random.default_rng(seed),
    )
    is_exact = count_permutations([table.shape[-1] for table in tables], paired) <= resamples
    is_finite = np.isfinite(estimate_ratio(tables[0])[0] - estimate_ratio(tables[1])[0])
    null, observed = result.null_distribution, np.asarray(result.statistic)
    greatest = null[:, is_finite].max(1, initial=0.0, keepdims=True)
    extra = 0 if is_exact else 1  # the observed value counts as one of the draws

    def count_p(statistics: FloatArray) -> FloatArray:
        # Equal statistics, which are from 0 to 1, differ by rounding. The tolerance of scipy's p value is relative, so
        # that ties of a statistic of zero are lost.
        num_extreme = (statistics >= observed - TIE_MARGIN).sum(0)
        return np.where(is_finite, (num_extreme + extra) / (len(null) + extra), np.nan)

    return count_p(null), count_p(greatest), is_exact


def _mean_magnitude(differences: FloatArray, axis: int) -> FloatArray:
    """The absolute mean of differences over the last dim."""
    magnitude: FloatArray = np.abs(differences.mean(axis))
    return magnitude


def _studentise(first: FloatArray, second: FloatArray, axis: int, *, paired: bool) -> FloatArray:
    """A monotone function of |t| of the difference of two ratios of means, `[..., cell]`, from 0 to 1."""
    (estimate, influence), (other, other_influence) = estimate_ratio(first), estimate_ratio(second)
    parts = [influence - other_influence] if paired else [influence, other_influence]
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = np.sum([part.var(axis, ddof=1) / part.shape[axis] for part in parts], axis=0)
        difference = estimate - other
        # |t| / sqrt(1 + t^2) is finite also if all differences are equal.
        bounded = np.abs(difference) / np.sqrt(variance + np.square(difference))
    is_zero = (difference == 0) & (variance == 0)
    return np.where(is_zero, 0.0, np.nan_to_num(bounded, nan=1.0, posinf=1.0))


def studentised_interval(
    tables: Sequence[FloatArray], paired: bool, confidence: float, resamples: int, seed: int
) -> tuple[FloatArray, FloatArray]:
    """The studentised bootstrap interval (bootstrap-t) of the difference of two ratios of means.

    It resamples the influence values of the sentences. It holds its level better than percentiles if values are skewed
    or sentences are few (Davison and Hinkley 1997, section 5.2).

    Args:
        tables: Numerators and denominators of both results, `[2, cell, sentence]` each.
        paired: Whether the sentences are the same.
        confidence: The confidence level.
        resamples: The number of resamples.
        seed: The seed of the resamples.

    Returns:
        The lower and the upper ends, `[cell]` each.
    """
    (first, influence), (second, other_influence) = (estimate_ratio(table) for table in tables)
    parts = [influence - other_influence] if paired else [influence, -other_influence]
    generator = np.random.default_rng(seed)
    weights = [resample_weights(part.shape[-1], resamples, generator) for part in parts]
    error = np.sqrt(sum(part.var(-1, ddof=1) / part.shape[-1] for part in parts))
    ends = np.full((2, len(first)), np.nan)
    step = max(1, MAX_CHUNK_NUMEL // resamples)
    for start in range(0, len(first), step):
        rows = slice(start, start + step)
        mean: Any = 0.0
        variance: Any = 0.0
        for part, weight in zip(parts, weights, strict=True):
            centre = part[rows] @ weight
            mean, count = mean + centre, part.shape[-1]
            variance = variance + np.maximum(np.square(part[rows]) @ weight - np.square(centre), 0) / (count - 1)
        floor = 1e-9 * error[rows, None]
        with np.errstate(invalid="ignore"):  # NaN for a cell whose estimate is not finite
            t = np.divide(mean, np.sqrt(variance), out=np.zeros_like(mean), where=np.sqrt(variance) > floor)
            ends[:, rows] = percentile_interval(t, confidence)
    low, high = first - second - ends[::-1] * error
    return low, high


def resample_weights(count: int, resamples: int, generator: np.random.Generator) -> FloatArray:
    """The weight of each of `count` examples in the mean of each resample, `[count, resample]`."""
    weights: FloatArray = generator.multinomial(count, np.full(count, 1 / count), resamples).T / count
    return weights


def percentile_interval(values: FloatArray, confidence: float) -> tuple[FloatArray, FloatArray]:
    """The ends of the percentile interval (Efron 1979) of the values of the resamples, the last dim."""
    low, high = np.quantile(values, ((1 - confidence) / 2, (1 + confidence) / 2), axis=-1)
    return low, high


def bootstrap_interval(effects: FloatArray, confidence: float, draws: int, seed: int) -> tuple[FloatArray, FloatArray]:
    """The percentile bootstrap interval of the mean effect of each cell.

    Args:
        effects: The effects, `[cell, example]`.
        confidence: The confidence level of the interval, from 0 to 1.
        draws: The number of resamples, which all cells share.
        seed: The seed of the resamples.

    Returns:
        The lower and the upper ends, `[cell]` each.
    """
    size, count = effects.shape
    # The mean of a resample is the product of the effects and the frequencies of the examples in it, so that all cells
    # and resamples are one matrix product.
    weights = np.zeros((draws, count))
    numbers = np.random.default_rng(seed).integers(0, count, (draws, count))
    np.add.at(weights, (np.arange(draws)[:, None], numbers), 1 / count)
    step = max(1, MAX_CHUNK_NUMEL // draws)
    with np.errstate(invalid="ignore"):  # the interval of an infinite effect is NaN
        parts = [
            percentile_interval(effects[k : k + step] @ weights.T, confidence) for k in range(0, max(size, 1), step)
        ]
    low, high = (np.concatenate(ends) for ends in zip(*parts, strict=True))
    return low, high


# --------------------------------------------------------------------------------------------------------------------
# The comparison of two results of one kind: differences by cell, with intervals and permutation p values.
#
# The estimate of a cell is a mean over sentences, or a ratio of two means, with the tests and intervals above.


MIN_INTERVAL_COUNT = 10  # with fewer sentences the intervals are too narrow (docs/results.md)
TOP_COUNT = 12
LEVEL = 0.05  # of the adjusted p values in summaries
MARKERS = re.compile(r"^##|[ĠĊ▁\s]")  # of word pieces, of byte-level vocabularies and of SentencePiece
UNKNOWN_TOKENS = re.compile(r"\[unk\]|<unk>|[^\x00-\x7f]")  # tokenizers change characters outside of ASCII
UNCERTAIN = "~"  # starts the digest of a text that another tokenizer can change
SCOPE = "p and intervals are about other sentences, not about other training seeds: two checkpoints are one pair"


@dataclass(frozen=True)
class SentenceValues:
    """The values of a result by sentence, from which `compare` estimates each cell.

    Args:
        measure: The quantity, in words.
        cells: The names of the cells.
        columns: The columns that describe the cells in a data frame.
        values: The value of each cell and sentence, `[cell, sentence]`; the estimate is their mean.
        scale: If the estimate is a ratio of means, the denominator of each sentence, `[cell or 1, sentence]`.
        settings: What both results must have in common, by name.
        notes: What a reader of the estimates must know.
        digests: The digest of each sentence (`digest_words`), in its order; empty if the sentences are unknown.
    """

    measure: str
    cells: tuple[str, ...]
    columns: Mapping[str, Sequence[Any]]
    values: FloatArray
    scale: FloatArray | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()

    def to_table(self) -> FloatArray:
        """Numerators and denominators, `[2, cell, sentence]`."""
        scale = np.ones_like(self.values) if self.scale is None else np.broadcast_to(self.scale, self.values.shape)
        return np.stack([self.values, scale]).astype(np.float64)


class ComparableResult(Result):
    """The base class of results that `compare` compares with each other."""

    @abstractmethod
    def _to_sentence_values(self) -> SentenceValues:
        """The values by sentence."""

    def _describe_pair(self, other: Any) -> tuple[str, ...]:
        """What a reader of the comparison must know that one result does not show."""
        return ()

    def _check_pair(self, other: Any) -> None:
        """Raise an error if the values of the two results are not on one scale."""

    def compare(
        self,
        other: object,
        *,
        paired: bool = True,
        clusters: Sequence[Any] | None = None,
        confidence: float = 0.95,
        resamples: int = 2000,
        seed: int = 0,
    ) -> ResultComparison:
        """Compare with another result of this kind: differences, this result minus the other, by cell.

        Args:
            other: The other result, with the same cells: of another model or checkpoint on the same sentences, or on
                another data set.
            paired: True if sentence k of both results is the same sentence; False for two data sets.
            clusters: A label for each sentence, such as the template from which it is made: sentences of one cluster
                are exchanged and resampled together. With `paired=False` a pair of such lists. None if the sentences
                are independent.
            confidence: The confidence level of the intervals, from 0 to 1.
            resamples: The number of resamples for p and for the intervals. If there are not more permutations, all of
                them are used.
            seed: The seed of the resamples.

        Returns:
            The comparison. Results with a single sentence give differences without intervals and p values, and results
            with fewer than 10 sentences (or clusters) have no intervals.

        Raises:
            BNetError: The other result is of another kind, has other cells, another metric or, if paired, other
                sentences.

        >>> import bnet_transformer as bt
        >>> words = ["the", "cat", "dog", "sat", "ran"]
        >>> first, second = (bt.decoder(8, heads=2, slices=1, vocabulary=words, seed=k) for k in (0, 1))
        >>> texts = ["the cat sat", "the dog ran", "dog sat the", "cat ran the"]
        >>> found = bt.roles(first, texts).compare(bt.roles(second, texts))
        >>> found.paired, found.examples, found.difference.shape
        (True, (4, 4), torch.Size([12]))
        """
        check_choice("paired", paired, (True, False))
        level, count = check_fraction("confidence", confidence), check_int("resamples", resamples)
        if type(other) is not type(self):
            expected = f"a result of the same kind, {type(self).__name__}"
            raise BNetError("compare", expected=expected, actual=type(other).__name__)
        pair = self._to_sentence_values(), other._to_sentence_values()
        _check_same(*pair)
        self._check_pair(other)
        sizes = [values.values.shape[1] for values in pair]
        if paired and sizes[0] != sizes[1]:
            hint = "Pass paired=False to compare two data sets"
            actual = f"{sizes[0]} and {sizes[1]} sentences"
            raise BNetError("compare", expected="results on the same sentences", actual=actual, hint=hint)
        notes = _check_sentences(*pair) if paired else ()
        tables = [values.to_table() for values in pair]
        if clusters is not None:
            labels = (clusters, clusters) if paired else clusters
            tables = [_sum_clusters(*item) for item in zip(tables, _parse_clusters(labels, sizes), strict=True)]
        result = _compare_tables(type(self).__name__, pair, tables, sizes, paired, level, count, check_seed(seed))
        return replace(result, notes=(*notes, *self._describe_pair(other), *result.notes))


class EffectTable(ComparableResult):
    """The base class of results with a row for each cell: each index along some axes."""

    _columns: ClassVar[tuple[str, ...]] = ()  # the attributes with a number for each cell

    def _get_axes(self) -> Mapping[str, Sequence[Any]]:
        """The labels along each axis, in the order of the dims."""
        raise NotImplementedError

    def _get_cells(self) -> dict[str, Sequence[Any]]:
        """The columns that describe each cell: by default its label along each axis."""
        axes = self._get_axes()
        return dict(zip(axes, zip(*itertools.product(*axes.values()), strict=True), strict=True))

    def _get_numbers(self) -> dict[str, Any]:
        """The columns of numbers, in the order of the cells."""
        return {name: getattr(self, name).flatten() for name in self._columns}

    def _get_columns(self) -> Mapping[Any, Any]:
        return self._get_cells() | self._get_numbers()


@dataclass(frozen=True, eq=False, repr=False)
class ResultComparison(Result):
    """The result of `a.compare(b)`: the difference of two results of one kind, a minus b, in each cell.

    p values and intervals are about sentences: whether the difference would remain on other sentences of the same kind.
    They do not concern other training seeds, because two models are one pair.

    Attributes:
        kind: The class of the two results, such as `"Sweep"`.
        measure: The quantity that is compared.
        cells: The names of the cells.
        columns: The columns of the data frame that describe the cells.
        first: The estimate of each cell in this result, `[cell]`.
        second: The estimate of each cell in the other result, `[cell]`.
        low: The lower ends of the intervals of the differences, `[cell]`; None without intervals.
        high: The upper ends, `[cell]`; None without intervals.
        p: The p value of each cell, without a correction for the number of cells, `[cell]`; None for one sentence. NaN
            for a cell whose estimate is not finite.
        adjusted_p: The p values adjusted for the number of cells (max-T), `[cell]`.
        paired: Whether the sentences of both results are the same.
        examples: The numbers of sentences of both results.
        clusters: The numbers of clusters of both results; None if each sentence is one.
        is_exact: Whether all permutations were computed.
        confidence: The confidence level of the intervals.
        resamples: The number of resamples.
        seed: The seed of the resamples.
        notes: What a reader of the comparison must know.
    """

    _shapes = "cells: any cell; columns: {_} any cell; first second low high p adjusted_p: float64 cell"

    kind: str
    measure: str
    cells: tuple[str, ...]
    columns: Mapping[str, tuple[Any, ...]]
    first: Tensor
    second: Tensor
    low: Tensor | None
    high: Tensor | None
    p: Tensor | None
    adjusted_p: Tensor | None
    paired: bool
    examples: tuple[int, int]
    clusters: tuple[int, int] | None
    is_exact: bool
    confidence: float
    resamples: int
    seed: int
    notes: tuple[str, ...]

    @property
    def difference(self) -> Tensor:
        """This result minus the other, `[cell]`."""
        return self.first - self.second

    def significant(self, level: float = LEVEL) -> tuple[str, ...]:
        """The cells that differ, with control of the probability of any error among all cells.

        Args:
            level: The maximum adjusted p.

        Returns:
            The names of the cells, in increasing order of the adjusted p; empty without p values.
        """
        check_fraction("level", level)
        if self.adjusted_p is None:
            return ()
        order = self.adjusted_p.argsort(stable=True).tolist()
        return tuple(self.cells[k] for k in order if self.adjusted_p[k] <= level)

    def top(self, count: int = TOP_COUNT) -> list[tuple[str, float]]:
        """The cells with the largest absolute differences.

        Args:
            count: The maximum number of cells.

        Returns:
            Pairs of the name of a cell and its difference, in decreasing order of the absolute difference.
        """
        order = rank_by_size(self.difference, count)
        return [(self.cells[k], float(self.difference[k])) for k in order]

    def _get_columns(self) -> Mapping[str, Any]:
        numbers = {"first": self.first, "second": self.second, "difference": self.difference}
        numbers |= {"low": self.low, "high": self.high, "p": self.p, "adjusted p": self.adjusted_p}  # type: ignore[dict-item]
        parts = {"name": self.cells, **self.columns}
        return parts | {key: value for key, value in numbers.items() if value is not None}

    @property
    def caption(self) -> str:
        """The quantity, the sentences and the test, in one line."""
        first, second = self.examples
        counts = f"{first} paired sentence{'s' * (first != 1)}" if self.paired else f"{first} and {second} sentences"
        if self.clusters is not None:
            counts += " in " + (f"{self.clusters[0]}" if self.paired else " and ".join(map(str, self.clusters)))
            counts += " clusters"
        return f"{self.kind}: {self.measure}, first minus second, {counts}{self._describe_test()}"

    def _describe_test(self) -> str:
        """The permutation test and its result, as text after a semicolon; empty without p values."""
        if self.p is None:
            return ""
        permutations = "sign flips of paired differences" if self.paired else "permutations of the sentences"
        number = "all" if self.is_exact else f"{self.resamples:,}"
        count = len(self.significant())
        return f"; {number} {permutations}: adjusted p at most {LEVEL} in {count:,} of {len(self.cells):,} cells"

    def __repr__(self) -> str:
        best = "".join(f"; largest {name} {value:+.3g}" for name, value in self.top(1))
        return f"<ResultComparison of {self.caption}{best}>"

    def _get_shown_rows(self) -> list[int]:
        return rank_by_size(self.difference)


def _check_same(first: SentenceValues, second: SentenceValues) -> None:
    """Raise an error for results with other settings or cells."""
    for name, value in first.settings.items():
        if value != second.settings[name]:
            expected = f"two results with the same {name}, {value!r}"
            raise BNetError("compare", expected=expected, actual=repr(second.settings[name]))
    if first.cells != second.cells:
        missing = [name for name in first.cells if name not in set(second.cells)]
        extra = [name for name in second.cells if name not in set(first.cells)]
        lines = [
            f"{len(names):,} only in the {which}, such as {names[0]}"
            for which, names in (("first", missing), ("second", extra))
            if names
        ]
        actual = "; ".join(lines) or "the same cells in another order"
        hint = 'Use sentences of one length, or over=("slice", "head"), so that cells have no words'
        raise BNetError("compare", expected="two results with the same cells", actual=actual, hint=hint)


def digest_words(tokens: Mapping[str, Sequence[str]], special: Mapping[str, Collection[int]]) -> str:
    """A digest of the words of a sentence, which different tokenizers share: of its text without spaces and case.

    Args:
        tokens: The tokens of each stack; numerals for vectors without names.
        special: The indices of the special tokens of each stack.

    Returns:
        The digest; empty if no stack has names of words.

    >>> digest_words({"": ["[CLS]", "embed", "##ding"]}, {"": [0]}) == digest_words({"": ["ĠEm", "bedding"]}, {})
    True
    """
    texts = []
    for stack, words in tokens.items():
        named = [(k, word) for k, word in enumerate(words) if k not in special.get(stack, ())]
        is_numbered = all(word == str(k) for k, word in named)
        texts.append("" if is_numbered else "".join(MARKERS.sub("", get_raw(word)) for _, word in named).casefold())
    if not any(texts):
        return ""
    return (UNCERTAIN if any(map(UNKNOWN_TOKENS.search, texts)) else "") + compute_digest(texts)[:8]


def _check_sentences(first: SentenceValues, second: SentenceValues) -> tuple[str, ...]:
    """Raise an error if sentences of a pair differ; return a note if that is unknown for some."""
    count = first.values.shape[1]
    sides = [values.digests if len(values.digests) == count else ("",) * count for values in (first, second)]
    other, unknown = [], 0
    for k, (one, two) in enumerate(zip(*sides, strict=True)):
        if not one or not two or (one != two and UNCERTAIN in one + two):
            unknown += 1
        elif one != two:
            other.append(k)
    if other:
        actual = f"other words in {len(other):,} of {count:,} pairs, such as sentence {other[0]}"
        hint = "Pass paired=False to compare two data sets"
        raise BNetError("compare", expected="results on the same sentences", actual=actual, hint=hint)
    if not unknown:
        return ()
    return (f"it is not checked that sentence k of both is the same: the words of {unknown:,} pairs are unknown",)


def _parse_clusters(clusters: Any, sizes: Sequence[int]) -> list[list[Any]]:
    """The labels of the clusters of both results."""
    try:
        labels = [[item.item() if isinstance(item, Tensor) else item for item in part] for part in clusters]
        is_valid = [len(part) for part in labels] == list(sizes) and all(len({*part}) for part in labels)
    except TypeError:
        is_valid = False
    if not is_valid:
        expected = f"a label for each sentence, {' and '.join(map(str, sizes))}"
        hint = "With paired=False pass a pair of lists"
        raise BNetError("clusters", expected=expected, actual=clusters, hint=hint)
    return labels


def _sum_clusters(table: FloatArray, labels: Sequence[Any]) -> FloatArray:
    """The sums over the sentences of each cluster: means become ratios of sums to numbers of sentences."""
    numbers: dict[Any, int] = {}
    index = np.array([numbers.setdefault(label, len(numbers)) for label in labels])
    member = (index == np.arange(len(numbers))[:, None]).astype(np.float64)
    sums: FloatArray = table @ member.T
    return sums


def _compare_tables(
    kind: str,
    pair: tuple[SentenceValues, SentenceValues],
    tables: Sequence[FloatArray],
    sizes: Sequence[int],
    paired: bool,
    confidence: float,
    resamples: int,
    seed: int,
) -> ResultComparison:
    """Estimate the differences, and test them, from numerators and denominators, `[2, cell, sentence]`."""
    counts = [table.shape[-1] for table in tables]
    estimates = [estimate_ratio(table)[0] + 0.0 for table in tables]  # no -0.0
    notes = [note for values in pair for note in values.notes]
    p: Tensor | None = None
    adjusted: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    is_exact = False
    if min(counts) < 2:
        notes.append("a single sentence: differences without intervals and p values")
    else:
        p_values, adjusted_p, is_exact = permutation_p(tables, paired, resamples, seed)
        p, adjusted = torch.from_numpy(p_values), torch.from_numpy(adjusted_p)
        # The exchange of all sentences has the same |t|, unless the two data sets differ in size.
        ties = 2 if paired or counts[0] == counts[1] else 1
        smallest = ties / count_permutations(counts, paired) if is_exact else 0.0
        if smallest > LEVEL:
            notes.append(f"with so few sentences no p is below {smallest:.3g}")
        if min(counts) < MIN_INTERVAL_COUNT:
            notes.append(
                f"no intervals: with fewer than {MIN_INTERVAL_COUNT} sentences or clusters they are too narrow"
            )
        else:
            low, high = map(torch.from_numpy, studentised_interval(tables, paired, confidence, resamples, seed))
        notes.append(SCOPE)
    columns = {
        key: tuple(column)
        for key, column in pair[0].columns.items()
        if list(column) == list(pair[1].columns.get(key, ()))
    }
    is_clustered = counts != list(sizes)
    return ResultComparison(
        kind,
        pair[0].measure,
        pair[0].cells,
        columns,
        torch.from_numpy(estimates[0]),
        torch.from_numpy(estimates[1]),
        low,
        high,
        p,
        adjusted,
        paired,
        (sizes[0], sizes[1]),
        (counts[0], counts[1]) if is_clustered else None,
        is_exact,
        confidence,
        resamples,
        seed,
        tuple(dict.fromkeys(notes)),
    )


# --------------------------------------------------------------------------------------------------------------------
# Pareto-smoothed importance weights, their diagnostic k-hat, and resampling.


MAX_KHAT = 0.7  # above it, estimates by importance weights are unreliable (Vehtari et al. 2024)
MIN_TAIL = 5  # fewer weights have no tail whose shape can be estimated


def smooth_weights(log_weights: Tensor) -> tuple[Tensor, float]:
    """Smooth the largest importance weights by a generalised Pareto distribution.

    Args:
        log_weights: The logarithms of the weights, `[draw]`, up to a constant.

    Returns:
        The normalised weights, `[draw]`, and k-hat, the shape of the distribution of the largest weights. It is
        infinite if the tail has fewer than five weights or one that is not finite.
    """
    logs, khat = smooth_log_weights(log_weights)
    return logs.softmax(0), khat


def smooth_log_weights(log_weights: Tensor) -> tuple[Tensor, float]:
    """Smooth weights as `smooth_weights` does, but return their logarithms, not normalised, `[draw]`, and k-hat."""
    # Vehtari, Simpson, Gelman, Yao and Gabry 2024, "Pareto smoothed importance sampling", section 2: the M largest of S
    # weights, M = min(S / 5, 3 sqrt(S)), are replaced by the expected order statistics of a generalised Pareto
    # distribution that is fitted to them, and no weight exceeds the largest raw weight. The mean of the weights has a
    # finite variance only if the shape is below 1/2; below 0.7 it converges at a practical rate.
    largest = log_weights.max().double()
    logs = log_weights.double() - largest
    count = len(logs)
    tail = min(count // 5, math.ceil(3 * math.sqrt(count)))
    order = logs.argsort()
    khat = math.inf
    if tail >= MIN_TAIL and bool(logs.isfinite().any()):
        cutoff = logs[order[-tail - 1]].exp()
        excess = logs[order[-tail:]].exp() - cutoff
        if bool(excess[0] >= 0) and float(excess[-1]) > 0:
            shape, sigma = _fit_pareto(excess)
            if math.isfinite(shape):
                khat = shape
                probs = (torch.arange(tail, dtype=torch.float64, device=logs.device) + 0.5) / tail
                quantiles = (
                    torch.expm1(-khat * torch.log1p(-probs)) * (sigma / khat) if khat else -sigma * (-probs).log1p()
                )
                logs[order[-tail:]] = (cutoff + quantiles).log().clamp(max=0.0)
    return logs + largest, khat


def _fit_pareto(excess: Tensor) -> tuple[float, float]:
    """Estimate the shape and scale of a generalised Pareto distribution from ordered values of at least 0."""
    # Zhang and Stephens 2009: the profile likelihood of theta = -k / sigma is averaged over a grid. The shape is then
    # shrunk towards 1/2 with the weight of ten observations (Vehtari et al. 2024, appendix).
    n = len(excess)
    grid = 30 + int(math.sqrt(n))
    k = torch.arange(1, grid + 1, dtype=torch.float64, device=excess.device)
    quartile = excess[int(n / 4 + 0.5) - 1].clamp(min=torch.finfo(torch.float64).tiny)
    theta = 1 / excess[-1] + (1 - (grid / (k - 0.5)).sqrt()) / 3 / quartile
    shape = torch.log1p(-theta[:, None] * excess).mean(1)
    likelihood = n * ((-theta / shape).log() - shape - 1)
    weights = likelihood.nan_to_num(nan=-math.inf).softmax(0)
    mean = (weights * theta).sum()
    fitted = float(torch.log1p(-mean * excess).mean())
    return (n * fitted + 10 * 0.5) / (n + 10), -fitted / float(mean)


def estimate_log_mean(log_weights: Tensor) -> tuple[float, float, float]:
    """Estimate the logarithm of the mean importance weight: the log of the integral of an unnormalised density.

    Args:
        log_weights: The log of the unnormalised density minus the log density of the proposal, `[draw]`.

    Returns:
        The estimate by smoothed weights, its standard error, and k-hat.
    """
    # The relative variance of the mean of n weights is 1 / ESS - 1 / n with ESS = (sum w)^2 / sum w^2, which is the
    # variance of its logarithm (delta method).
    logs, khat = smooth_log_weights(log_weights)
    count = len(logs)
    variance = 1 / effective_sample_size(logs.softmax(0)) - 1 / count
    return float(logs.logsumexp(0)) - math.log(count), math.sqrt(max(variance, 0.0)), khat


def effective_sample_size(weights: Tensor) -> float:
    """Compute the number of equal weights with the same variance of estimates, from normalised weights (Kong 1992)."""
    return float(1 / weights.square().sum())


def resample(weights: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw indices in proportion to normalised weights, by systematic resampling, in random order, `[count]`."""
    # One uniform number determines n evenly spaced points on the cumulative weights. So a draw of weight w is taken
    # either floor(w n) or ceil(w n) times, and w n times on average: unbiased, and in practice with less variance than
    # multinomial resampling (Douc, Cappe and Moulines 2005).
    start = torch.rand((), generator=generator, dtype=torch.float64)
    points = (torch.arange(count, dtype=torch.float64) + start) / count
    indices = torch.searchsorted(weights.cpu().cumsum(0), points).clamp(max=len(weights) - 1)
    return indices[torch.randperm(count, generator=generator)].to(weights.device)

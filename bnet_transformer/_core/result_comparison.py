"""The comparison of two results of one kind: differences by cell, with intervals and permutation p values.

The estimate of a cell is a mean over sentences, or a ratio of two means; `resampling` has its tests and intervals.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import FloatArray, to_numpy
from bnet_transformer._core.checks import check_choice, check_fraction, check_int, check_seed
from bnet_transformer._core.hashing import compute_digest
from bnet_transformer._core.resampling import count_permutations, estimate_ratio, permutation_p, studentised_interval
from bnet_transformer._core.saved_results import SavedResult
from bnet_transformer._core.tokens import get_raw
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    import pandas as pd

MIN_INTERVAL_COUNT = 10  # with fewer sentences the intervals are too narrow (docs/results.md)
MAX_HTML_ROWS = 12
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


class ComparableResult(SavedResult):
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


@dataclass(frozen=True, eq=False, repr=False)
class ResultComparison(SavedResult):
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

    def top(self, count: int = MAX_HTML_ROWS) -> list[tuple[str, float]]:
        """The cells with the largest absolute differences.

        Args:
            count: The maximum number of cells.

        Returns:
            Pairs of the name of a cell and its difference, in decreasing order of the absolute difference.
        """
        order = self._rank_cells()[: check_int("count", count)]
        return [(self.cells[k], float(self.difference[k])) for k in order]

    def _rank_cells(self) -> list[int]:
        """The cells in decreasing order of the absolute difference."""
        order: list[int] = self.difference.abs().nan_to_num(-1.0).argsort(descending=True, stable=True).tolist()
        return order

    def to_dataframe(self) -> pd.DataFrame:
        """A data frame with a row for each cell: both estimates, their difference, its interval and p values."""
        import pandas as pd

        frame = pd.DataFrame({"name": self.cells, **self.columns})
        numbers = {"first": self.first, "second": self.second, "difference": self.difference}
        numbers |= {"low": self.low, "high": self.high, "p": self.p, "adjusted p": self.adjusted_p}  # type: ignore[dict-item]
        return frame.assign(**{key: to_numpy(value) for key, value in numbers.items() if value is not None})

    @property
    def summary(self) -> str:
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
        return f"<ResultComparison of {self.summary}{best}>"

    def _repr_html_(self) -> str:
        """The summary, the cells with the largest differences, and the notes as HTML."""
        frame = self.to_dataframe().iloc[self._rank_cells()[:MAX_HTML_ROWS]]
        table = frame.to_html(index=False, float_format="{:.3g}".format, na_rep="")
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        return f"<p>{escape(self.summary)}</p>{table}<ul>{notes}</ul>"


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

"""Comparison of the heads of two fits, or of two draws. Heads have no names: they are matched by responsibilities.

`match_heads` matches the heads of two fits. `align_heads` brings the heads of all posterior draws into one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bnet_transformer._core.results import Result
from bnet_transformer._core.stats import MIN_INTERVAL_COUNT, permutation_p, studentised_interval
from bnet_transformer._core.tensors import to_numpy
from bnet_transformer.data import Batch
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.factors import LOG_ZERO
from bnet_transformer.learning.fit.heads import (
    cosine_matrix,
    find_selectors,
    head_dims,
    responsibilities,
    samples_to_parameters,
)
from bnet_transformer.learning.fit.objective import FitObjective

RESAMPLES = 2000  # of the p value and the interval of a gain
MATCHING_SENTENCES = 200  # the number of sentences whose responsibilities match heads


@dataclass(frozen=True)
class Comparison(Result):
    """The comparison of two fits on the same sentences.

    Attributes:
        match: The head of the other fit that is matched to each head of this fit; -1 for a head without a match.
        overlap: The sum over sentences of the products of responsibilities, `[head, other head]`.
        agreement: The adjusted Rand index (ARI) of the most responsible heads.
        gain: The mean difference of the log likelihood of a sentence, this fit minus the other, in nats.
        gain_error: The standard error of `gain`.
        interval: The 95% interval of `gain` over sentences (bootstrap-t); None on training data, and with fewer than 10
            sentences.
        p: The p value of `gain` by sign flips of the differences of sentences; None on training data, which the fits
            have seen, for one sentence, and if a sentence has probability 0 in one fit.
        A: The cosines of the matrices `W_q^T W_k` of matched heads by attention node, `[head]`.
        OV: The cosines of the matrices `W_v` of matched heads by attention node, `[head]`.
        criterion: The name of the likelihood in `gain`.
        notes: What a reader of the comparison must know: the notes of both fits, and sentences for which leave-one-out
            cross-validation is unreliable.
    """

    _index = "head"
    _shapes = "match: int<other head; overlap: float64 head other; A OV: {_} float head"

    match: tuple[int, ...]
    overlap: Tensor = field(repr=False)
    agreement: float
    gain: float
    gain_error: float
    A: dict[str, Tensor] = field(repr=False)
    OV: dict[str, Tensor] = field(repr=False)
    criterion: str = "log likelihood"
    notes: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None
    p: float | None = None

    def _get_columns(self) -> Mapping[str, Any]:
        overlap = [float(self.overlap[h, m]) if m >= 0 else 0.0 for h, m in enumerate(self.match)]
        cosines = [("A", *item) for item in self.A.items()] + [("OV", *item) for item in self.OV.items()]
        columns = {"head": range(len(self.match)), "match": self.match, "overlap": overlap}
        return columns | {f"cosine {kind} {name}": value.tolist() for kind, name, value in cosines}

    @property
    def caption(self) -> str:
        """The agreement and the gain, in one line."""
        caption = f"ARI {self.agreement:.3f}; gain {self.gain:+.4f} ± {self.gain_error:.4f} nats per sentence"
        caption += f" by {self.criterion}"
        caption += "" if self.interval is None else "; 95% interval {:+.4f} to {:+.4f}".format(*self.interval)
        return caption + ("" if self.p is None else f"; p {self.p:.3g} by sign flips over sentences")


def count_overlap(a: Tensor, b: Tensor, present: Tensor | None = None) -> Tensor:
    """Compute the expected number of sentences (or `present` words) for which both heads are responsible.

    The result is `[head a, head b]`.
    """
    if present is not None:
        a = a * present[..., None]
    return a.flatten(0, -2).mT @ b.flatten(0, -2).to(a.dtype)


def get_present_words(spec: NodeSpec, corpus: Batch) -> Tensor | None:
    """Return the words that a selector draws for, `[sentence, word]`; None for all words or for whole sentences."""
    stack, present = spec.group.word_stack, corpus.get_present(spec)
    if stack is None or present is not None:
        return present
    masks = [evidence.observed for evidence in corpus.evidence.values()]
    known = [mask for mask in masks if mask is not None and mask.shape == corpus.x[stack].shape[:2]]
    return torch.stack(known).any(0) if known and len(known) == len(masks) else None


def match_heads(overlap: Tensor) -> tuple[int, ...]:
    """Match each row to one column so that the sum of the overlaps is maximal; -1 for a row without a column."""
    # A linear assignment problem (Kuhn 1955, the Hungarian algorithm). Matching each row to its best column would
    # match two heads to one; relabelling heads does not change the sum, so the match does not depend on their order.
    rows, columns = linear_sum_assignment(overlap.detach().cpu().numpy(), maximize=True)
    match = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    return tuple(match.get(row, -1) for row in range(len(overlap)))


def paired_difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Compute the mean over sentences of `a - b` and its standard error.

    The error is NaN for a single sentence, and for a sentence of probability 0.
    """
    # Both fits are evaluated on the same sentences, whose difficulty is common to both and cancels in the difference.
    difference = a - b
    error = float(difference.std() / len(difference) ** 0.5) if len(difference) > 1 else float("nan")
    return float(difference.mean()), error


def estimate_gain_uncertainty(a: Tensor, b: Tensor) -> tuple[tuple[float, float] | None, float | None]:
    """The 95% interval of the mean over sentences of `a - b`, and its p value, as of `compare` of other results."""
    if len(a) < 2 or not bool((a - b).isfinite().all()):  # a sentence of probability 0 in one fit
        return None, None
    tables = [np.stack([to_numpy(x)[None], np.ones((1, len(x)))]) for x in (a, b)]
    p, _, _ = permutation_p(tables, True, RESAMPLES, 0)
    if len(a) < MIN_INTERVAL_COUNT:
        return None, float(p[0])
    low, high = studentised_interval(tables, True, 0.95, RESAMPLES, 0)
    return (float(low[0]), float(high[0])), float(p[0])


def check_densities(names: Sequence[str], densities: Sequence[Tensor]) -> None:
    """Raise an error if a log density is NaN, or all fits give some sentence the probability 0."""
    for name, row in zip(names, densities, strict=True):
        if bool((row.isnan() | row.isposinf()).any()):
            hint = "Its parameters are not valid: fit it again, for example with a lower rate"
            raise BNetError(name, expected="finite log densities of all sentences", hint=hint)
    if not any(bool((row > LOG_ZERO / 2).all()) for row in densities):
        expected = "a fit in which every sentence has a probability above 0"
        raise BNetError("compare", expected=expected, hint="Use a prior=, which leaves no probability 0")


def matched_cosines(a: Tensor, b: Tensor, match: tuple[int, ...]) -> Tensor:
    """Compute the cosine of each head's matrix with that of its match, `[head]`; NaN for a head without a match."""
    same = a.shape[1:] == b.shape[1:]
    table = cosine_matrix(a, b.to(a.dtype)) if same else a.new_full((len(a), len(b)), torch.nan)
    return torch.stack([table[h, m] if m >= 0 else table.new_tensor(torch.nan) for h, m in enumerate(match)])


def align_heads(
    objective: FitObjective, corpus: Batch, samples: dict[str, Tensor], log_density: Tensor
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Order the heads of every draw as in the draw of highest density; also return the aligned selectors."""
    # Label switching (Stephens 2000): if the posterior is invariant under permutations of the heads, a permuted draw is
    # a draw of the same posterior, and means over draws make sense only in one common order. Each draw is matched to
    # the pivot by its responsibilities. A selector whose heads are not exchangeable is not changed.
    network, shape = objective.network, log_density.shape
    part = corpus if objective.has_corpus_choice else corpus.take(slice(0, MATCHING_SENTENCES))
    sets, pivot, aligned = samples_to_parameters(network, samples), int(log_density.argmax()), []
    for selector in find_selectors(network):
        dims = {name: dims for name in network.parameters if (dims := head_dims(network, selector, name))}
        if not _is_exchangeable(objective, part, {name: value[pivot] for name, value in sets.items()}, dims):
            continue
        probs, present = responsibilities(objective, part, sets, selector), get_present_words(selector, part)
        orders = [torch.tensor(match_heads(count_overlap(probs[pivot], draw, present))) for draw in probs]
        for name in sets.keys() & dims.keys():
            pairs = zip(sets[name], orders, strict=True)
            sets[name] = torch.stack([permute_heads(draw, dims[name], order) for draw, order in pairs])
        aligned.append(selector.group.name)
    tables = network.unconditional_logit_names
    values = {name: sets[name].exp() if name in tables else sets[name] for name in samples}
    return {name: value.reshape(*shape, *value.shape[1:]) for name, value in values.items()}, tuple(aligned)


def _is_exchangeable(
    objective: FitObjective, corpus: Batch, parameters: Mapping[str, Tensor], dims: Mapping[str, tuple[int, ...]]
) -> bool:
    """Return True if the prior and the log evidence do not depend on the order of a selector's heads."""
    # A cyclic shift and one transposition of neighbours generate all permutations, so two orders are enough. Parameters
    # of heads that are not learned keep their order, so they must be equal for all heads.
    store = {**{k: v.detach().to(objective.device) for k, v in objective.network.parameters.items()}, **parameters}
    for name, axes in dims.items():
        if name not in parameters and not torch.equal(store[name], store[name].roll([1] * len(axes), axes)):
            return False
    count = next((store[name].shape[axes[0]] for name, axes in dims.items()), 0)
    if count < 2:
        return False
    subset = corpus if objective.has_corpus_choice else corpus.take(slice(0, 16))
    orders = [*range(1, count), 0], [1, 0, *range(2, count)]
    for name, alpha in {**objective.learned.tables, **objective.learned.logits}.items():
        rows = alpha.expand(objective.network.parameters[name].shape)
        if not all(torch.equal(rows, permute_heads(rows, dims.get(name, ()), torch.tensor(order))) for order in orders):
            return False
    with torch.no_grad():
        before = objective.log_evidence(store, subset)
        for order in orders:
            permuted = {name: permute_heads(store[name], axes, torch.tensor(order)) for name, axes in dims.items()}
            after = objective.log_evidence({**store, **permuted}, subset)
            if not torch.allclose(before, after, rtol=torch.finfo(before.dtype).eps ** 0.5, atol=1e-4):
                return False
    return True


def permute_heads(value: Tensor, dims: tuple[int, ...], order: Tensor) -> Tensor:
    """Return a parameter with its heads in another order."""
    for dim in dims:
        value = value.index_select(dim, order.to(value.device))
    return value

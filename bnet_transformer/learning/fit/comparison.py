"""Comparison of the heads of two fits, or of two draws. Heads have no names: they are matched by responsibilities.

`compare_heads` compares two fits. `align_heads` brings the heads of all posterior draws into one order.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bnet_transformer._core.results import SavedResult
from bnet_transformer._core.stats import MAX_KHAT, MIN_INTERVAL_COUNT, permutation_p, studentised_interval
from bnet_transformer._core.tensors import to_numpy
from bnet_transformer.data import Batch
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.factors import LOG_ZERO
from bnet_transformer.learning.fit.arviz_groups import leave_one_out
from bnet_transformer.learning.fit.heads import (
    cosine_matrix,
    find_selectors,
    head_dims,
    responsibilities,
    samples_to_parameters,
)
from bnet_transformer.learning.fit.objective import FitObjective

if TYPE_CHECKING:
    import pandas as pd

    from bnet_transformer.learning.fit.result import Fit

RESAMPLES = 2000  # of the p value and the interval of a gain
LEAVE_ONE_OUT = "leave-one-out (PSIS, az.loo)"
MATCHING_SENTENCES = 200  # the number of sentences whose responsibilities match heads


@dataclass(frozen=True)
class Comparison(SavedResult):
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

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row for each head of this fit."""
        import pandas as pd

        rows: dict[str, list[float]] = {"match": list(self.match)}
        rows["overlap"] = [float(self.overlap[h, m]) if m >= 0 else 0.0 for h, m in enumerate(self.match)]
        for kind, cosines in (("A", self.A), ("OV", self.OV)):
            rows |= {f"cosine {kind} {name}": value.tolist() for name, value in cosines.items()}
        return pd.DataFrame(rows, index=pd.RangeIndex(len(self.match), name="head"))

    def _repr_html_(self) -> str:
        """Return the comparison and its table of heads as HTML."""
        caption = f"ARI {self.agreement:.3f}; gain {self.gain:+.4f} ± {self.gain_error:.4f} nats per sentence"
        caption += f" by {self.criterion}"
        caption += "" if self.interval is None else "; 95% interval {:+.4f} to {:+.4f}".format(*self.interval)
        caption += "" if self.p is None else f"; p {self.p:.3g} by sign flips over sentences"
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        table = self.to_dataframe().to_html(float_format="{:.3f}".format)
        return f"<p>{html.escape(caption)}</p>{table}" + (f"<ul>{notes}</ul>" if notes else "")


def count_overlap(a: Tensor, b: Tensor, present: Tensor | None = None) -> Tensor:
    """Compute the expected number of sentences (or `present` words) for which both heads are responsible.

    The result is `[head a, head b]`.
    """
    if present is not None:
        a = a * present[..., None]
    return a.flatten(0, -2).mT @ b.flatten(0, -2).to(a.dtype)


def get_present_words(spec: NodeSpec, corpus: Batch) -> Tensor | None:
    """Return the words that a selector draws for, `[sentence, word]`; None for all words or for whole sentences."""
    stack = spec.group.word_stack
    if stack is None:
        return None
    if corpus.mask is not None and stack in corpus.mask:
        return corpus.mask[stack]
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


def compare_heads(
    first: Fit[Any], second: Fit[Any], data: object, selector: str | None, selector_spec: NodeSpec
) -> Comparison:
    """Compare two fits by their responsibilities, their heads, and the log likelihood of each sentence."""
    fits = first, second
    if data is not None:
        corpora = [fit._read_data(data) for fit in fits]
    else:
        corpora = [*get_shared_data(first.data, second.data)]
    a, b = (f.responsibilities(corpus, selector=selector) for f, corpus in zip(fits, corpora, strict=True))
    if a.shape[:-1] != b.shape[:-1]:
        actual = f"responsibilities of shape {tuple(a.shape)} and {tuple(b.shape)}"
        expected = "selectors of the same kind: both with one draw per sentence, or both with one draw per word"
        raise BNetError("compare", expected=expected, actual=actual, hint="Pass selector=")
    heads_a, heads_b = first.heads_of(selector), second.heads_of(selector)
    named, notes = {"this fit": first, "the other fit": second}, list[str]()
    if data is None and can_leave_one_out(fits):
        criterion, (densities, notes) = LEAVE_ONE_OUT, estimate_leave_one_out(named)
    else:
        criterion = "log likelihood of " + ("the training data" if data is None else "the given data")
        densities = [fit.log_likelihood(corpus).double() for fit, corpus in zip(fits, corpora, strict=True)]
    check_densities([*named], densities)
    from sklearn.metrics import adjusted_rand_score  # slow to import

    present = get_present_words(selector_spec, corpora[0])
    match = match_heads(overlap := count_overlap(a.double(), b.double(), present))
    top_heads = [probs.argmax(-1) if present is None else probs.argmax(-1)[present] for probs in (a, b)]
    labels = [label.flatten().cpu().numpy() for label in top_heads]
    return Comparison(
        match,
        overlap,
        float(adjusted_rand_score(*labels)),
        *paired_difference(*densities),
        {k: _matched_cosines(v, heads_b.A[k], match) for k, v in heads_a.A.items() if k in heads_b.A},
        {k: _matched_cosines(v, heads_b.OV[k], match) for k, v in heads_a.OV.items() if k in heads_b.OV},
        criterion,
        (*notes, *collect_notes(named)),
        *(estimate_gain_uncertainty(*densities) if data is not None or criterion == LEAVE_ONE_OUT else (None, None)),
    )


def get_shared_data(first: Batch | None, second: Batch | None) -> tuple[Batch, Batch]:
    """Return the training sentences of two fits; raise an error if they differ."""
    if first is None or second is None:
        expected = "data to compare on, because a net or a loaded fit does not contain its training data"
        raise BNetError("data", expected=expected, hint="Pass data=")
    if not first.equals(second):
        expected = "two fits of the same sentences in the same order"
        raise BNetError("compare", expected=expected, hint="Pass data= to compare on other sentences")
    return first, second


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


def can_leave_one_out(fits: Sequence[Fit[Any]]) -> bool:
    """Return True if all fits have log likelihoods of draws and ArviZ is installed."""
    return find_spec("arviz") is not None and all(fit.log_likelihoods is not None for fit in fits)


def estimate_leave_one_out(fits: Mapping[str, Fit[Any]]) -> tuple[list[Tensor], list[str]]:
    """Estimate the leave-one-out log predictive densities of fits, `[sentence]`, from draws from the posterior.

    Args:
        fits: The fits, by their names in messages.

    Returns:
        The densities of each fit, and notes on sentences for which they are unreliable.

    Raises:
        BNetError: If the draws of a fit are not draws from the posterior, or give a sentence the probability 0.
    """
    densities, notes = [], []
    for name, fit in fits.items():
        # The weights of PSIS-LOO are those of draws from the posterior. Draws from a guide need others, and their
        # Pareto k-hat does not show it.
        if not fit.has_posterior_draws:
            expected = "draws from the posterior for leave-one-out cross-validation: those of NUTS, or reweighted draws"
            hint = "Compare on held-out sentences (data=, or held_out= of bt.fit_heads), or fit with method=bt.NUTS() "
            hint += "or with a bt.Laplace() whose draws are reweighted (k-hat below 0.7)"
            actual = f"method={fit.method!r}, {fit.approximate}"
            raise BNetError(name, expected=expected, actual=actual, hint=hint)
        likelihoods = fit.log_likelihoods
        assert likelihoods is not None
        is_impossible = ~(likelihoods > LOG_ZERO / 2)  # also NaN
        if bool(is_impossible.any()):
            actual = f"{int(is_impossible.any(-1).sum()):,} draws in which a sentence has none"
            expected = "draws in which each training sentence has a finite log likelihood"
            hint = "Compare on held-out sentences: data="
            raise BNetError(name, expected=expected, actual=actual, hint=hint)
        density, khats = leave_one_out(fit)
        if bool((~density.isfinite()).any()):
            hint = "Its draws predict too differently for importance sampling: pass held-out sentences as data="
            raise BNetError(name, expected="finite leave-one-out densities of all sentences", hint=hint)
        densities.append(density)
        limit = min(1 - 1 / math.log10(max(likelihoods[..., 0].numel(), 11)), MAX_KHAT)  # Vehtari et al. 2024
        if count := int((~(khats <= limit)).sum()):
            notes.append(
                f"{name}: leave-one-out is unreliable for {count:,} sentences (Pareto k-hat above {limit:.2f})"
            )
    return densities, notes


def check_densities(names: Sequence[str], densities: Sequence[Tensor]) -> None:
    """Raise an error if a log density is NaN, or all fits give some sentence the probability 0."""
    for name, row in zip(names, densities, strict=True):
        if bool((row.isnan() | row.isposinf()).any()):
            hint = "Its parameters are not valid: fit it again, for example with a lower rate"
            raise BNetError(name, expected="finite log densities of all sentences", hint=hint)
    if not any(bool((row > LOG_ZERO / 2).all()) for row in densities):
        expected = "a fit in which every sentence has a probability above 0"
        raise BNetError("compare", expected=expected, hint="Use a prior=, which leaves no probability 0")


def collect_notes(fits: Mapping[str, Fit[Any]]) -> list[str]:
    """Collect what a reader of a comparison must know of the fits, by their names in messages."""
    notes = []
    for name, fit in fits.items():
        notes += [f"{name}: not converged"] if fit.converged is False else []
        notes += [f"{name}: interrupted"] if not fit.finished else []
        notes += [f"{name}: {note}" for note in fit.notes]
    return notes


def _matched_cosines(a: Tensor, b: Tensor, match: tuple[int, ...]) -> Tensor:
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

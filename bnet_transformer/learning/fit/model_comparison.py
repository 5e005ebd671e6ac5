"""Comparison of fits by held-out log predictive density, and of numbers of heads by cross-validation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_int, check_seed, check_sequence
from bnet_transformer._core.process import translate_memory_errors
from bnet_transformer._core.results import Result
from bnet_transformer._core.tensors import to_numpy
from bnet_transformer.data import Batch, read_batch
from bnet_transformer.declare import Network, as_network
from bnet_transformer.errors import BNetError
from bnet_transformer.learning.fit.diagnostics import count_free
from bnet_transformer.learning.fit.heads import (
    DEAD_USAGE,
    check_densities,
    find_selectors,
    occupancy,
    paired_difference,
)
from bnet_transformer.learning.fit.methods import fit as fit_net
from bnet_transformer.learning.fit.result import (
    LEAVE_ONE_OUT,
    Fit,
    as_fit,
    can_leave_one_out,
    collect_notes,
    estimate_leave_one_out,
    get_shared_data,
)

if TYPE_CHECKING:
    import pandas as pd


HELD_OUT = "log predictive density of held-out sentences"
TIE_NATS = 0.1  # a smaller difference over all sentences is a tie: less than rounding and the end of optimisation


@dataclass(frozen=True)
class ModelComparison(Result):
    """A table of fits that were evaluated on the same sentences, and the choice of one of them.

    The unit is a sentence: its log predictive density is `log P(y | x)`, for a fit with samples the log of the mean
    over draws.

    Attributes:
        fits: The fits by label, in the order of the caller; the labels of `fit_heads` are the numbers of heads.
        densities: The log predictive density of each sentence under each fit, in nats, `[fit, sentence]`.
        criterion: The name of the density in `densities`.
        notes: What a reader of the table must know, such as fits that did not converge.
    """

    _index, _number_format, _max_rows = "fit", "{:.4f}", None
    _shapes = "fits: any fit; densities: float64 fit sentence+"

    fits: Mapping[Any, Fit[Any]] = field(repr=False)
    densities: Tensor = field(repr=False)
    criterion: str
    notes: tuple[str, ...] = ()

    @property
    def density(self) -> Tensor:
        """The mean log predictive density of a sentence under each fit, in nats, `[fit]`."""
        return self.densities.mean(1)

    @property
    def gain(self) -> Tensor:
        """The mean difference of the density of a sentence, each fit minus the best, in nats, `[fit]`; at most 0."""
        return self._gains()[:, 0]

    @property
    def gain_error(self) -> Tensor:
        """The paired standard error of `gain`, `[fit]`; NaN for a fit in which a sentence has probability 0."""
        return self._gains()[:, 1]

    @property
    def tie(self) -> float:
        """The difference of densities below which two fits are equal, in nats per sentence: 0.1 nats over all."""
        return TIE_NATS / self.densities.shape[1]

    @property
    def heads(self) -> tuple[int, ...]:
        """The number of heads of each fit: the states of its selectors. Selectors with a common table count once."""
        return tuple(sum(len(usage) for usage in _head_usages(fit)) for fit in self.fits.values())

    @property
    def live(self) -> tuple[int, ...]:
        """The number of heads of each fit that are not dead, as in `Fit.heads`."""
        return tuple(sum(int((u >= DEAD_USAGE).sum()) for u in _head_usages(fit)) for fit in self.fits.values())

    @property
    def parameters(self) -> tuple[int, ...]:
        """The number of learned numbers of each fit; a distribution over n states counts n - 1.

        Directions that do not change the model, such as a change of basis of `W_q` and `W_k`, are not subtracted.
        """
        return tuple(count_free(fit.network, fit.learned) for fit in self.fits.values())

    @property
    def log_marginal_likelihood(self) -> tuple[float | None, ...]:
        """The log marginal likelihood (the evidence) of each fit; None if the fit has no trustworthy estimate."""
        return tuple(fit.log_marginal_likelihood for fit in self.fits.values())

    @property
    def log_marginal_likelihood_error(self) -> tuple[float | None, ...]:
        """The standard error of `log_marginal_likelihood`; None without an estimate."""
        return tuple(fit.log_marginal_likelihood_error for fit in self.fits.values())

    @property
    def best(self) -> Any:
        """The label of the fit with the highest density."""
        return [*self.fits][int(self.density.argmax())]

    @property
    def choice(self) -> Any:
        """The label of the smallest fit whose difference from the best is at most one paired standard error.

        The smallest fit has the fewest heads, and of these the fewest parameters. A difference of less than 0.1 nats
        over all sentences is a tie, because the errors of rounding and of the optimiser are not part of the standard
        error.
        """
        # The rule of one standard error (Breiman, Friedman, Olshen and Stone 1984, section 3.4.3), with the standard
        # error of the paired difference: that of a single density contains the spread between sentences, which all
        # fits share. A comparison with NaN is False.
        labels, heads, parameters = [*self.fits], self.heads, self.parameters
        best = labels.index(self.best)
        gain, error = self.gain, self.gain_error
        is_within = (-gain <= error) | (-gain < self.tie)
        within = [k for k in range(len(labels)) if k == best or is_within[k]]
        return labels[min(within, key=lambda k: (heads[k], parameters[k], -float(gain[k])))]

    def _get_columns(self) -> Mapping[str, Any]:
        order = np.argsort(-to_numpy(self.density), kind="stable")
        evidences = [self.log_marginal_likelihood, self.log_marginal_likelihood_error]
        evidence, error = ([math.nan if value is None else value for value in values] for values in evidences)
        labels = [*self.fits]
        columns = {
            "fit": labels,
            "heads": self.heads,
            "live": self.live,
            "parameters": self.parameters,
            "density": self.density.tolist(),
            "gain": self.gain.tolist(),
            "gain error": self.gain_error.tolist(),
            "log marginal likelihood": evidence,
            "log marginal likelihood error": error,
            "choice": [label == self.choice for label in labels],
        }
        return {name: [values[k] for k in order] for name, values in columns.items()}

    @property
    def caption(self) -> str:
        """The choice, the criterion and the number of sentences, in one line."""
        count = self.densities.shape[1]
        return (
            f"choice: {self.choice}, the smallest fit within one paired standard error of the best, {self.best}; "
            f"{self.criterion}, {count:,} sentences, nats per sentence"
        )

    def __str__(self) -> str:
        return self._format_text()

    def _get_shown_frame(self) -> pd.DataFrame:
        """Return the table for display: an evidence without an estimate is "not available"."""
        column = "log marginal likelihood"
        table = self.to_dataframe()
        errors = [f" ± {error:.2f}" if error == error else "" for error in table.pop(f"{column} error")]
        pairs = zip(table[column], errors, strict=True)
        texts = [f"{value:.2f}{error}" if value == value else "not available" for value, error in pairs]
        return table.assign(**{column: texts, "choice": ["yes" if value else "" for value in table["choice"]]})

    def _gains(self) -> Tensor:
        """Compute the gains over the best fit and their paired standard errors, `[fit, 2]`."""
        best = self.densities[int(self.density.argmax())]
        return torch.tensor([paired_difference(row, best) for row in self.densities], dtype=torch.float64)


@translate_memory_errors("compare")
def compare(fits: Mapping[Any, Fit[Any]] | Sequence[Fit[Any]], data: object = None) -> ModelComparison:
    """Compare many fits in one table, and choose the smallest one that predicts held-out sentences well.

    The fits are ordered by the log predictive density of held-out sentences. The choice is the smallest fit (fewest
    heads, then fewest parameters) whose difference from the best is at most one standard error of the paired
    difference. `bt.fit_heads` also makes the fits, one for each number of heads.

    Args:
        fits: The fits by label, or a list of fits, whose labels are 0, 1, 2, ... A net is a fit without learned
            parameters, such as the net that generated the data.
        data: Sentences and their observations that no fit was trained on, in the forms of `bt.fit`. None uses the
            training sentences with leave-one-out cross-validation (PSIS-LOO), which requires ArviZ and, of all fits,
            draws from the posterior (`Fit.has_posterior_draws`).

    Returns:
        The table of the fits.

    Raises:
        BNetError: If the fits have other training sentences or other readouts, if `data` contains training sentences,
            or if without `data` leave-one-out cross-validation is not possible.

    >>> import torch
    >>> import bnet_transformer as bt
    >>> data = torch.randn(20, 3, 2), torch.randn(20, 3, 2)
    >>> nets = {k: bt.bayesuvius(2, heads=k, observe=bt.tpm.Normal(1.0)) for k in (1, 2)}
    >>> fits = {k: bt.fit(net, data, method=bt.MAP(steps=2)) for k, net in nets.items()}
    >>> table = bt.compare(fits, (torch.randn(10, 3, 2), torch.randn(10, 3, 2)))
    >>> table.densities.shape, table.heads, table.choice in fits
    (torch.Size([2, 10]), (1, 2), True)
    """
    labelled = _read_fits(fits)
    for label, fit in labelled.items():
        check_independent_sentences(fit.network, f"fit {label}")
    if data is None:
        return _compare_by_leave_one_out(labelled)
    corpora = [fit._read_data(data) for fit in labelled.values()]
    check_readouts([*labelled], corpora)
    note = _check_sentences(labelled, corpora)
    densities = [fit.log_likelihood(corpus) for fit, corpus in zip(labelled.values(), corpora, strict=True)]
    return create_comparison(labelled, densities, HELD_OUT, (note,) if note else ())


def create_comparison(
    fits: Mapping[Any, Fit[Any]], densities: Sequence[Tensor], criterion: str, notes: Sequence[str] = ()
) -> ModelComparison:
    """Create the table from the densities of each fit, `[sentence]`; check them and collect the notes of the fits."""
    rows = torch.stack([row.detach().double().cpu() for row in densities])
    if rows.shape[1] < 2:
        expected = "at least 2 sentences, because the standard error is estimated from their spread"
        raise BNetError("compare", expected=expected, actual=rows.shape[1])
    named = {f"fit {label}": fit for label, fit in fits.items()}
    check_densities([*named], [*rows])
    return ModelComparison(dict(fits), rows, criterion, tuple(dict.fromkeys([*notes, *collect_notes(named)])))


def _read_fits(fits: object) -> dict[Any, Fit[Any]]:
    """Return fits by label; the labels of a list are its indices."""
    if isinstance(fits, Mapping):
        items = [*fits.items()]
    elif isinstance(fits, Sequence) and not isinstance(fits, str):
        items = [*enumerate(fits)]
    else:
        items = []
    if not items:
        expected = "at least one fit: a mapping from label to Fit, or a list of fits"
        raise BNetError("fits", expected=expected, actual=fits, hint="A fit of each number of heads: bt.fit_heads(...)")
    return {label: as_fit(fit) for label, fit in items}


def _compare_by_leave_one_out(fits: Mapping[Any, Fit[Any]]) -> ModelComparison:
    """Compare fits with samples by leave-one-out cross-validation on their training sentences."""
    first = next(iter(fits.values()))
    for fit in fits.values():
        get_shared_data(first.data, fit.data)
    if not can_leave_one_out([*fits.values()]):
        expected = "held-out sentences; on training sentences more heads always have a higher likelihood"
        hint = "Pass data=, or use bt.fit_heads(...), or fits with samples (method='nuts') and install ArviZ"
        raise BNetError("data", expected=expected, hint=hint)
    densities, notes = estimate_leave_one_out({f"fit {label}": fit for label, fit in fits.items()})
    return create_comparison(fits, densities, LEAVE_ONE_OUT, notes)


def check_independent_sentences(network: Network, subject: str) -> None:
    """Raise an error for a net in which all sentences share one draw of a choice."""
    if any(spec.scope == "corpus" for spec in network.choices):
        expected = "sentences with separate draws; with per='corpus' all share one draw, so a sentence has no density"
        raise BNetError(subject, expected=expected, hint="Use per='sentence' or 'word'")


def check_readouts(labels: Sequence[Hashable], corpora: Sequence[Batch]) -> None:
    """Raise an error if the fits do not give probabilities to the same observations."""
    # Densities of different quantities, or with respect to different measures, cannot be subtracted.
    described = [
        ", ".join(
            f"{name} ({'real numbers' if value.is_floating_point() else 'states'}, {list(value.shape)})"
            for name, value in sorted(corpus.observed.items())
        )
        for corpus in corpora
    ]
    for label, readouts in zip(labels, described, strict=False):
        if readouts != described[0]:
            expected = f"fits with the same observed readouts: {described[0]} in fit {labels[0]}"
            raise BNetError("compare", expected=expected, actual=f"{readouts} in fit {label}")


def _check_sentences(fits: Mapping[Any, Fit[Any]], corpora: Sequence[Batch]) -> str | None:
    """Check that all fits have the same training sentences and that the others are held out; the result is a note.

    Fits without training data (loaded fits, nets) are not checked.
    """
    first: tuple[Any, Counter[bytes], list[bytes]] | None = None
    note = None
    for (label, fit), corpus in zip(fits.items(), corpora, strict=True):
        if fit.data is None:
            continue
        training, held_out = Counter(_hash_sentences(fit.network, fit.data)), _hash_sentences(fit.network, corpus)
        first = first or (label, training, held_out)
        # Nets with other vocabularies encode the same held-out sentences as other numbers, which cannot be compared.
        if held_out == first[2] and training != first[1]:
            shared = (training & first[1]).total()
            actual = f"{len(fit.data):,} sentences in fit {label}, of which {shared:,} are also in fit {first[0]}"
            hint = "Fit all on the same sentences; f.log_likelihood(data) evaluates a single fit"
            raise BNetError("compare", expected="fits of the same training sentences", actual=actual, hint=hint)
        note = check_held_out(fit.network, fit.data, corpus) or note
    return note


def check_held_out(network: Network, training: Batch, held_out: Batch) -> str | None:
    """Raise an error if held-out sentences are training sentences; return a note if they may be equal by chance."""
    # If no sentence occurs twice in the training data, equal sentences are the same observations. If sentences recur,
    # as in a small discrete net, new observations can be equal to old ones.
    counts, sentences = Counter(_hash_sentences(network, training)), _hash_sentences(network, held_out)
    repeated = sum(sentence in counts for sentence in sentences)
    if repeated and (len(counts) == counts.total() or Counter(sentences) == counts):
        actual = f"{repeated:,} training sentences among {len(sentences):,} sentences"
        hint = "Leave these out, or use bt.fit_heads(create, data, folds=5)"
        raise BNetError("held-out sentences", expected="sentences that no fit used", actual=actual, hint=hint)
    return (
        f"{repeated:,} of {len(sentences):,} held-out sentences are equal to a training sentence" if repeated else None
    )


def _hash_sentences(network: Network, corpus: Batch) -> list[bytes]:
    """Return a hash of each sentence and its observations, which does not depend on padding and floating type."""
    corpus = corpus.to(torch.device("cpu"), torch.float32)
    hashes = [b""] * len(corpus)
    parts = corpus.split_by_length(network, 2**20) if corpus.x else [(torch.arange(len(corpus)), corpus)]
    for indices, part in parts:
        values = {**part.x, **part.given, **part.observed}
        arrays = [to_numpy(values[name]) for name in sorted(values)]
        for k, index in enumerate(indices.tolist()):
            hashes[index] = blake2b(b"".join(array[k].tobytes() for array in arrays)).digest()
    return hashes


def _head_usages(fit: Fit[Any]) -> list[Tensor]:
    """Return `P(head)` of each selector, `[head]`; selectors with a common table are listed once."""
    theta, selectors = fit.theta, {spec.param_prefix: spec for spec in find_selectors(fit.network)}
    return [occupancy(spec, theta) for spec in selectors.values()]


# --------------------------------------------------------------------------------------------------------------------
# `fit_heads`: one fit for each number of heads, evaluated on held-out sentences or by cross-validation.

DEFAULT_FOLDS = 5


def fit_heads(
    create: Any,
    data: object,
    *,
    heads: Iterable[int] = range(1, 7),
    held_out: object = None,
    folds: int | None = None,
    seed: int = 0,
    **options: Any,
) -> ModelComparison:
    """Fit a net with each number of heads, and choose the number of heads by held-out log predictive density.

    The choice is the smallest number of heads whose difference from the best is at most one standard error of the
    paired difference over sentences. Without `held_out`, the densities are those of cross-validation: each sentence is
    evaluated by a fit of the other folds, and all numbers of heads have the same folds.

    Args:
        create: A function from the number of heads K to the net with K heads that is fitted.
        data: The sentences and their observations, in the forms of `bt.fit`.
        heads: The numbers of heads, 1 to 6 by default.
        held_out: Sentences that evaluate the fits, in the forms of `data`. No fit uses them, not even to choose among
            restarts, which the option of the same name of `bt.fit` does. None for cross-validation.
        folds: The number of folds of cross-validation, 5 by default; the sentences are assigned at random. A number of
            heads then costs `folds` fits plus one fit of all sentences.
        seed: The seed of the folds and of every fit.
        **options: The options of `bt.fit`, such as `method`, `spread` and `progress`, except `checkpoints`.

    Returns:
        The table of the numbers of heads. Its `fits` are fits of all sentences of `data`, by number of heads:
        `found.fits[found.choice]`. After Ctrl-C it contains the numbers of heads that were completed.

    Raises:
        BNetError: If there are fewer sentences than folds, if `held_out` contains training sentences, if an option is
            invalid, or if all sentences share one draw of a choice.

    >>> import torch
    >>> import bnet_transformer as bt
    >>> create = lambda heads: bt.bayesuvius(2, heads=heads, observe=bt.tpm.Normal(1.0))
    >>> data = torch.randn(20, 3, 2), torch.randn(20, 3, 2)
    >>> found = bt.fit_heads(create, data, heads=(1, 2), folds=2, method=bt.MAP(steps=2))
    >>> found.densities.shape, found.choice in (1, 2)
    (torch.Size([2, 20]), True)
    """
    if not callable(create):
        expected = "a function from a number of heads to a net, such as lambda heads: bt.bayesuvius(4, heads=heads)"
        raise BNetError("create", expected=expected, actual=create)
    counts = check_sequence("heads", heads, int, lambda value: check_int("heads", value))
    if not counts or len(set(counts)) < len(counts):
        raise BNetError("heads", expected="at least one number of heads, each once", actual=counts)
    if "checkpoints" in options:
        hint = "Write the checkpoints of each fit with bt.fit, and compare the fits with bt.compare"
        raise BNetError("checkpoints", expected="no checkpoints, because fit_heads runs many fits", hint=hint)
    if held_out is not None and folds is not None:
        raise BNetError("folds", expected="None with held_out=, which evaluates the fits", actual=folds)
    count_folds = check_int("folds", DEFAULT_FOLDS if folds is None else folds, minimum=2)
    options["seed"] = check_seed(seed)
    fits: dict[int, Fit[Any]] = {}
    densities: list[Tensor] = []
    corpora: list[Batch] = []
    notes: list[str] = []
    for count in counts:
        net = create(count)
        corpora.append(_read_data(net, data, "data", options))
        check_readouts(counts, corpora)
        if held_out is not None:
            check_held_out(as_network(net), corpora[-1], _read_data(net, held_out, "held_out", options))
        try:
            if held_out is None:
                assigned = assign_folds(len(corpora[-1]), count_folds, options["seed"])
                density, num_unconverged = cross_validate(net, corpora[-1], assigned, options)
                if num_unconverged:
                    notes.append(f"fit {count}: {num_unconverged} of {count_folds} fits of folds did not converge")
            fitted = _fit_completely(net, corpora[-1], options)
        except KeyboardInterrupt:
            if not fits:
                raise
            notes.append(f"interrupted: {', '.join(map(str, counts[len(fits) :]))} heads were not completed")
            break
        fits[count] = fitted
        densities += [density] if held_out is None else []
    if held_out is not None:
        table = compare(fits, held_out)
    else:
        table = create_comparison(fits, densities, f"{HELD_OUT} ({count_folds}-fold cross-validation)")
    return replace(table, notes=(*table.notes, *notes, *_describe_choice(table)))


def _describe_choice(table: ModelComparison) -> list[str]:
    """Describe what makes the choice doubtful: it is at the end of the range, or some of its heads are dead."""
    notes, index = [], [*table.fits].index(table.choice)
    if len(table.fits) > 1 and table.choice == max(table.fits):
        notes.append(f"the choice has the most heads of all fits: extend heads= beyond {table.choice}")
    if table.live[index] < table.heads[index]:
        # A net with as many heads as are live contains the same model, so its fit is not the global optimum.
        notes.append(
            f"only {table.live[index]} of the {table.heads[index]} heads of the choice are live: fits of fewer heads "
            "may be poor local optima, so use more restarts"
        )
    return notes


def assign_folds(sentences: int, folds: int, seed: int) -> list[Tensor]:
    """Assign sentences to folds at random; return the sorted indices of each fold, `[n]`. Sizes differ by at most 1."""
    if sentences < folds:
        expected = f"at most as many folds as sentences, {sentences:,}"
        raise BNetError("folds", expected=expected, actual=folds, hint="Use more sentences or fewer folds")
    order = torch.randperm(sentences, generator=torch.Generator().manual_seed(seed))
    return [part.sort().values for part in order.tensor_split(folds)]


def cross_validate(
    net: object, corpus: Batch, folds: Sequence[Tensor], options: Mapping[str, Any]
) -> tuple[Tensor, int]:
    """Compute the log predictive density of each sentence by a fit of the other folds, `[sentence]`.

    The second result is the number of fits that did not converge.
    """
    # Every sentence is held out once. Fits of different folds share sentences, so their densities are dependent, and no
    # unbiased estimator of the variance exists (Bengio and Grandvalet 2004); the standard error ignores this.
    density = torch.zeros(len(corpus), dtype=torch.float64)
    num_unconverged = 0
    for fold in folds:
        is_training = torch.ones(len(corpus), dtype=torch.bool).index_fill(0, fold, False)
        fitted = _fit_completely(net, corpus.take(is_training.nonzero()[:, 0]), options)
        density[fold] = fitted.log_likelihood(corpus.take(fold)).detach().double().cpu()
        num_unconverged += fitted.converged is False
    return density, num_unconverged


def _fit_completely(net: object, corpus: Batch, options: Mapping[str, Any]) -> Fit[Any]:
    """Fit a net; a fit that Ctrl-C ended early raises an interrupt, because its density is not comparable."""
    fitted: Fit[Any] = fit_net(net, corpus, **options)
    if not fitted.finished:
        raise KeyboardInterrupt
    return fitted


def _read_data(net: object, data: object, subject: str, options: Mapping[str, Any]) -> Batch:
    """Read data as `fit` does; raise an error if all sentences share one draw of a choice."""
    network = as_network(net)
    check_independent_sentences(network, "create")
    return read_batch(network, data, subject, missing=options.get("missing", False))

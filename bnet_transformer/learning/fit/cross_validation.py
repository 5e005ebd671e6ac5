"""`fit_heads`: one fit for each number of heads, evaluated on held-out sentences or by cross-validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_int, check_seed, check_sequence
from bnet_transformer.data import Batch, read_batch
from bnet_transformer.declare import as_network
from bnet_transformer.errors import BNetError
from bnet_transformer.learning.fit.methods import fit
from bnet_transformer.learning.fit.model_comparison import (
    HELD_OUT,
    ModelComparison,
    check_held_out,
    check_independent_sentences,
    check_readouts,
    compare,
    create_comparison,
)
from bnet_transformer.learning.fit.result import Fit

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
        num_unconverged += getattr(fitted, "converged", None) is False
    return density, num_unconverged


def _fit_completely(net: object, corpus: Batch, options: Mapping[str, Any]) -> Fit[Any]:
    """Fit a net; a fit that Ctrl-C ended early raises an interrupt, because its density is not comparable."""
    fitted: Fit[Any] = fit(net, corpus, **options)
    if not fitted.finished:
        raise KeyboardInterrupt
    return fitted


def _read_data(net: object, data: object, subject: str, options: Mapping[str, Any]) -> Batch:
    """Read data as `fit` does; raise an error if all sentences share one draw of a choice."""
    network = as_network(net)
    check_independent_sentences(network, "create")
    return read_batch(network, data, subject, missing=options.get("missing", False))

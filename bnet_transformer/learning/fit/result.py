"""`Fit`, the result of a fit: the fitted net, posterior samples, queries on new data, and the file format."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_fraction, check_int
from bnet_transformer._core.process import translate_memory_errors
from bnet_transformer._core.results import Fields, Result, check_field_types
from bnet_transformer._core.stats import MAX_KHAT
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.gather import batch_to_request
from bnet_transformer.compiler.plan import StructureError
from bnet_transformer.data import Batch, read_batch
from bnet_transformer.data.batch import infer_fit_task
from bnet_transformer.declare import Network, NodeSpec, as_network
from bnet_transformer.errors import BNetError, BudgetError, UnsupportedError, unknown_name_error
from bnet_transformer.inference.elimination import compute_posterior
from bnet_transformer.inference.factors import LOG_ZERO, request_factors
from bnet_transformer.learning.fit import heads as heads
from bnet_transformer.learning.fit.arviz_groups import leave_one_out, to_arviz
from bnet_transformer.learning.fit.diagnostics import describe_rhat
from bnet_transformer.learning.fit.heads import (
    Comparison,
    Heads,
    check_densities,
    count_overlap,
    estimate_gain_uncertainty,
    find_selectors,
    get_present_words,
    match_heads,
    matched_cosines,
    occupancy,
    paired_difference,
    samples_to_parameters,
)
from bnet_transformer.learning.fit.objective import LOG_EVIDENCE, FitObjective, select_learnable
from bnet_transformer.learning.fit.predictive import Check, check_posterior_predictive, predict_readout
from bnet_transformer.learning.training import N
from bnet_transformer.reference import BUDGET

if TYPE_CHECKING:
    import arviz as az
    import pandas as pd

MAX_POSTERIOR_DRAWS = 100  # a prediction, responsibility or likelihood is the mean over at most this many draws
SENTENCES_PER_PART = 1024
LEAVE_ONE_OUT = "leave-one-out (PSIS, az.loo)"
MISSING_OPTION = "bt.fit(..., missing=True)"  # queries treat NaN as the fit does
MAX_LIKELIHOOD_NUMEL = 2**26  # maximum numbers of a table of log likelihoods


@dataclass(frozen=True)
class FitRecord:
    """The options of a fit that its queries need, and how the fit ended. All attributes are also those of the `Fit`.

    Attributes:
        sentences: The number of training sentences.
        evaluated_on: A description of the sentences that the scores are computed on.
        restart: The index of the best restart.
        finished: False if Ctrl-C ended the fit early; a finished fit need not be a good one (`converged`, `notes`).
        approximate: A description of what is not exact; None if the fit is exact.
        converged: For `map` and `em`, whether the parameters are a maximum to second order: the Newton decrement
            `sqrt(g^T H^-1 g)` is at most 0.001 in the weights and the log ratios of the tables, with `H` positive
            definite along the steps. None if this was not tested. A finished fit need not be converged.
        restart_densities: The log posterior density at which each restart of second-order steps ended, in nats, up to a
            constant; that of a restart that was dropped is an upper bound.
        learned: The names of the learned parameters.
        budget: The maximum number of joint states of the choices of a sentence that queries sum.
        missing: True if words whose numbers are all NaN are treated as not observed.
        bounds: The objective at each step, per sentence.
        measured: The scores of the restarts as `(step, restart, score)`, per sentence, on the sentences `evaluated_on`.
        criterion: The name of the score. For `map` and `em` it is the log evidence of held-out sentences, or else the
            log posterior density up to a constant, which is the log evidence if there is no prior.
        divergent: The number of divergent transitions of each chain of NUTS.
        matched: The selectors whose heads have the same order in all draws, because the posterior does not depend on
            their order.
        effective_sample_size: The effective sample size of importance weights; None if draws are not weighted.
        khat: The Pareto k-hat of the importance weights of `laplace`: below 0.7 they are reliable. It does not detect
            modes that no start found. None for other methods.
        log_marginal_likelihood: The log marginal likelihood of the training data by importance sampling, for
            `method="laplace"`. It is None, with the reason in `notes`, unless every head is live and separate from the
            others, the Hessian is positive definite and `khat` is below 0.7.
        log_marginal_likelihood_error: The standard error of `log_marginal_likelihood`. It is too small if `khat` is
            above 0.5, because then the variance of the weights is not finite.
    """

    sentences: int
    evaluated_on: str
    restart: int = 0
    finished: bool = True
    approximate: str | None = None
    converged: bool | None = None
    restart_densities: tuple[float, ...] = field(default=(), repr=False)
    learned: tuple[str, ...] = field(default=(), repr=False)
    budget: int = field(default=BUDGET, repr=False)
    missing: bool = field(default=False, repr=False)
    bounds: tuple[float, ...] = field(default=(), repr=False)
    measured: tuple[tuple[int, int, float], ...] = field(default=(), repr=False)
    criterion: str = LOG_EVIDENCE
    divergent: tuple[int, ...] = field(default=(), repr=False)
    matched: tuple[str, ...] = field(default=(), repr=False)
    effective_sample_size: float | None = field(default=None, repr=False)
    khat: float | None = None
    log_marginal_likelihood: float | None = field(default=None, repr=False)
    log_marginal_likelihood_error: float | None = field(default=None, repr=False)


RECORD_NAMES = frozenset(item.name for item in fields(FitRecord))


@dataclass(frozen=True)
class Fit(Result, Generic[N]):
    """A fitted net, with its posterior samples and the history of the fit.

    The attributes of the record are also attributes of the fit, such as `f.converged`, `f.bounds` or `f.khat`.

    Attributes:
        net: The net with the fitted parameters: those of the best restart (`map`, `em`), the mode (`laplace`), the mean
            of the guide (`svi`), or the representative draw (`nuts`), whose tables and invariants are nearest to their
            posterior means.
        method: The name of the method, such as `"map"`.
        record: The options of the fit, and how it ended.
        notes: What a reader of the result must know, such as restarts that disagree, singular
            directions, dead or coincident heads, too few data.
        samples: The posterior samples by parameter, `[chain, draw, *shape]`, with tables as probabilities; empty for
            `map` and `em`.
        statistics: The sampler statistics of NUTS by name, `[chain, draw]`.
        choices: If the choices were sampled, the approximate posterior of each, `[sentence, *plates, word, state]`.
        data: The training data, which `save` does not write; None for a loaded fit.
        known_likelihoods: The log likelihoods that a loaded fit contains, `[chain, draw, sentence]`; None otherwise.
    """

    _shapes = (
        "samples: {_} real chain draw *_; statistics: {_} any chain draw *_; known_likelihoods: real chain draw _; "
        "choices: {_} real *_; data: any"
    )

    net: N
    method: str
    record: FitRecord
    notes: tuple[str, ...] = ()
    samples: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    statistics: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    choices: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    data: Batch | None = field(default=None, repr=False, compare=False)
    known_likelihoods: Tensor | None = field(default=None, repr=False)

    def __getattr__(self, name: str) -> Any:
        if name not in RECORD_NAMES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self.record, name)

    @property
    def network(self) -> Network:
        """The net with the fitted parameters."""
        return as_network(self.net)

    @property
    def selectors(self) -> tuple[str, ...]:
        """The names of the selectors of heads: the choices without parents, and chains along words."""
        return tuple(spec.group.name for spec in find_selectors(self.network))

    @property
    def pi(self) -> Tensor:
        """`P(c)` of the first selector, `[head]`; for a chain along words its stationary distribution.

        `theta` contains all tables.
        """
        return occupancy(self._find_selector(None), self.theta)

    @property
    def theta(self) -> dict[str, Tensor]:
        """The tables of discrete nodes by owner, `[*states of parents, state]`; with samples their posterior means.

        A chain along words has a second table, `<owner>.initial`, of its first word.
        """
        store, samples = self.network.parameters, self.samples
        names = self.network.unconditional_logit_names
        means = {name: samples[name].mean((0, 1)) for name in names if name in samples}
        tables = {name: store[name].detach().softmax(-1) for name in names} | means
        return {name.removesuffix(".logits"): table for name, table in tables.items()}

    @property
    def atoms(self) -> dict[str, Tensor]:
        """The learned weights of `net` by name: matrices of heads, atoms, and other parameters that are not tables."""
        tables, store = self.network.unconditional_logit_names, self.network.parameters
        return {name: store[name].detach() for name in self.learned if name not in tables}

    @property
    def heads(self) -> Heads:
        """The heads of the first selector."""
        return self.heads_of()

    @translate_memory_errors("heads_of")
    def heads_of(self, selector: str | None = None) -> Heads:
        """Summarise the heads of a selector: usage, effective and dead heads, invariants.

        Args:
            selector: The selector; by default the first one.

        Returns:
            The heads; for a fit with samples their posterior means, if these have a meaning.
        """
        network, chosen = self.network, self._find_selector(selector)
        matrices = heads.invariants(network, chosen, network.parameters)
        if self.samples:
            means = heads.mean_invariants(network, chosen, samples_to_parameters(network, self.samples))
            unidentified = heads.find_unidentified(network, self.samples)
            matrices |= {name: mean for name, mean in means.items() if name not in unidentified}
        A, OV = ({k.removeprefix(kind): v for k, v in matrices.items() if k.startswith(kind)} for kind in ("A ", "OV "))
        return Heads(chosen.group.name, occupancy(chosen, self.theta), A, OV)

    @cached_property
    def log_likelihoods(self) -> Tensor | None:
        """The log evidence of each training sentence for each draw, `[chain, draw, sentence]`; computed once.

        It is None if there are no samples, if choices were sampled or belong to the corpus, or if it would have more
        than 2^26 numbers.
        """
        if self.known_likelihoods is not None or self.data is None or not self.samples or self.choices:
            return self.known_likelihoods
        learned = select_learnable(self.network, infer_fit_task(self.network).readouts, self.learned, None)
        objective = FitObjective(self.network, learned, self.budget)
        shape = next(iter(self.samples.values())).shape[:2]
        if objective.has_corpus_choice or shape.numel() * len(self.data) > MAX_LIKELIHOOD_NUMEL:
            return None
        objective.to(device := self.network.device)
        sets = {k: v.to(device) for k, v in samples_to_parameters(self.network, self.samples).items()}
        with self._explain_sampled_choices():
            return heads.log_likelihoods(objective, self.data, sets).reshape(*shape, -1)

    @property
    def has_intervals(self) -> bool:
        """True if the fit has samples whose intervals `interval` returns.

        Those of a mean-field guide of weights are measured to be too narrow.
        """
        if self.method != "svi" or not self.samples:
            return bool(self.samples)
        if self.record.khat is not None:  # of a Normal guide, in the file of an earlier version
            return self.record.khat < MAX_KHAT
        has_weights = any(name not in self.network.unconditional_logit_names for name in self.learned)
        return not (has_weights or self.choices)

    @property
    def has_posterior_draws(self) -> bool:
        """True if the samples are draws from the posterior: of a Markov chain, or reweighted by the exact density."""
        return bool(self.samples) and (self.approximate is None or self.effective_sample_size is not None)

    @translate_memory_errors("interval")
    def interval(self, name: str, share: float = 0.9) -> tuple[Tensor, Tensor]:
        """Compute the central posterior interval of a parameter, or of an invariant of the heads such as `A x_1`.

        Args:
            name: The parameter or invariant; `f.heads.cosine` contains the names of the invariants.
            share: The posterior probability of the interval, 0.9 by default.

        Returns:
            The lower and the upper bound of each number, both with the shape of the parameter or invariant. A warning
            reports chains that disagree (R-hat above 1.1).

        Raises:
            BNetError: If the fit has no samples, the parameter depends on the basis of the key space, or the samples
                are those of a guide whose intervals are too narrow (`has_intervals`).
        """
        self._check_intervals("interval", share)
        bounds = heads.interval(self.network, self.samples, name, share)
        if self.has_posterior_draws and self.effective_sample_size is None:  # draws of Markov chains
            known = (
                self.samples if name in self.samples else heads.compute_invariant_samples(self.network, self.samples)
            )
            _warn_of_rhat(name, known[name])
        return bounds

    @translate_memory_errors("responsibilities")
    def responsibilities(self, data: object, *, selector: str | None = None) -> Tensor:
        """Compute the probability of each head given a sentence and its observations, `P(c | x, y)`.

        Args:
            data: The sentences and their observations, in the forms of `fit`.
            selector: The choice whose states are the heads; by default the first selector.

        Returns:
            `[sentence, head]`, or `[sentence, word, head]` if each word has its own draw. For a fit with samples it is
            the mean over draws.
        """
        corpus, spec = self._read_data(data), self._find_selector(selector)

        def evaluate(net: Network) -> Tensor:
            module, probs = CompiledModule(net).eval(), []
            for part in [corpus] if spec.scope == "corpus" else corpus.parts(SENTENCES_PER_PART):
                evidence, request = part.index_evidence(net), batch_to_request(net, part)
                factors = request_factors(module, evidence, spec.group.index, request, budget=self.budget)
                probs.append(compute_posterior(module, spec.group.index, factors))
            return torch.cat(probs)

        return self._mean_over_draws(evaluate)

    @translate_memory_errors("predict")
    def predict(self, data: object = None, *, readout: str | None = None) -> Tensor:
        """Predict a readout from the sentences; the choices are summed out.

        Args:
            data: The sentences, in the forms of `fit`; observations are ignored. For a net without words: the values of
                its given nodes by column, or None if it has no inputs.
            readout: The readout; by default the first without children.

        Returns:
            `P(y | x)` of a discrete readout, `[sentence, word, state]`, or the mean of a real-valued readout,
            `[sentence, word, dim]`. For a fit with samples it is the mean over draws.
        """
        return self._mean_over_draws(self._create_predictor(data, readout))

    @translate_memory_errors("predict_interval")
    def predict_interval(
        self, data: object = None, share: float = 0.9, *, readout: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the central posterior interval of each number of `predict`: of a probability, or of the mean of y.

        It is not an interval of y itself, which also varies given the parameters.

        Args:
            data: The sentences, in the forms of `predict`.
            share: The posterior probability of the interval, 0.9 by default.
            readout: The readout; by default the first without children.

        Returns:
            The lower and the upper bound, each with the shape of `predict`, from at most 100 draws.

        Raises:
            BNetError: If the fit has no samples, or those of a guide whose intervals are too narrow (`has_intervals`).
        """
        self._check_intervals("predict_interval", share)
        if "lp" in self.statistics:
            _warn_of_rhat("the log density", self.statistics["lp"])
        predict = self._create_predictor(data, readout)
        with self._explain_sampled_choices():
            return heads.quantile_bounds(torch.stack([*map(predict, self._posterior_networks())]), share)

    def _create_predictor(self, data: object, readout: str | None) -> Callable[[Network], Tensor]:
        """Return a function from a net to its predictions of a readout."""
        name, corpus = self._find_readout(readout).group.name, read_batch(self.network, data, observed="none")
        return lambda net: predict_readout(net, name, corpus.parts(SENTENCES_PER_PART), self.budget)

    def _check_intervals(self, operation: str, share: float) -> None:
        """Raise an error if the fit has no intervals, or the probability is out of range."""
        if not self.samples:
            hint = "Fit with method='laplace', 'svi' or 'nuts'"
            raise BNetError(operation, expected="a fit with samples", actual=self.method, hint=hint)
        if not self.has_intervals:
            expected = "intervals of about the requested probability; those of a guide of weights are too narrow"
            hint = "Fit with method=bt.Laplace() or bt.NUTS()"
            raise BNetError(operation, expected=expected, actual=f"method={self.method!r}", hint=hint)
        check_fraction("share", share)

    @translate_memory_errors("log_likelihood")
    def log_likelihood(self, data: object) -> Tensor:
        """Compute `log P(y | x)` of each sentence.

        Args:
            data: The sentences and their observations, in the forms of `fit`.

        Returns:
            The log likelihoods, `[sentence]`; for a fit with samples the log of the mean likelihood over draws.
        """
        corpus = self._read_data(data)
        learned = select_learnable(self.network, infer_fit_task(self.network).readouts, None, None)
        objective = FitObjective(self.network, learned, self.budget).to(self.network.device)
        with torch.no_grad(), self._explain_sampled_choices():
            parts, log_probs = objective.split(corpus), []
            for net in self._posterior_networks():
                log_probs.append(torch.cat([objective.log_evidence(net.parameters, part) for part in parts]))
            return torch.stack(log_probs).logsumexp(0) - math.log(len(log_probs))

    @translate_memory_errors("check")
    def check(self, data: object, statistics: object = None, *, draws: int = 100, readout: str | None = None) -> Check:
        """Run posterior predictive checks: compare statistics of the data with those of replicated data sets.

        Args:
            data: The sentences and their observations, in the forms of `fit`.
            statistics: A mapping from name to a function of the observed values that returns a number. By default the
                share of each state, or the mean, variance and kurtosis of a real-valued readout.
            draws: The number of replicated data sets, 100 by default.
            readout: The readout to check; by default the first observed one without children.

        Returns:
            The statistics of the data and of the replicated data, with posterior predictive p-values.
        """
        corpus = self._read_data(data)
        spec = self._find_readout(readout, corpus)
        nets = self._posterior_networks(check_int("draws", draws))
        states = spec.tpm.states if spec.tpm.kind == "discrete" else None
        return check_posterior_predictive(nets, spec.group.name, corpus, statistics, draws, states)

    @translate_memory_errors("compare")
    def compare(self, other: Any, data: object = None, *, selector: str | None = None) -> Comparison:
        """Compare this fit with another one on the same sentences: matched heads, ARI, difference of log likelihoods.

        Args:
            other: Another fit; with `data` it may also be a net, such as the net that generated the data.
            data: The (held-out) sentences and observations to compare on, in the forms of `fit`. By default the common
                training data, with leave-one-out likelihoods if both fits have samples and ArviZ is installed; the
                samples must then be draws from the posterior (`has_posterior_draws`).
            selector: The selector whose heads are matched; by default the first one.

        Returns:
            The comparison.

        Raises:
            BNetError: If the fits have no common data, their selectors do not correspond, a log likelihood is not
                finite in both fits, or without `data` the samples of a fit are not draws from the posterior.
        """
        second = as_fit(other)
        fits, chosen = (self, second), self._find_selector(selector)
        if data is not None:
            corpora = [fit._read_data(data) for fit in fits]
        else:
            corpora = [*get_shared_data(self.data, second.data)]
        a, b = (f.responsibilities(corpus, selector=selector) for f, corpus in zip(fits, corpora, strict=True))
        if a.shape[:-1] != b.shape[:-1]:
            actual = f"responsibilities of shape {tuple(a.shape)} and {tuple(b.shape)}"
            expected = "selectors of the same kind: both with one draw per sentence, or both with one draw per word"
            raise BNetError("compare", expected=expected, actual=actual, hint="Pass selector=")
        heads_a, heads_b = self.heads_of(selector), second.heads_of(selector)
        named, notes = {"this fit": self, "the other fit": second}, list[str]()
        if data is None and can_leave_one_out(fits):
            criterion, (densities, notes) = LEAVE_ONE_OUT, estimate_leave_one_out(named)
        else:
            criterion = "log likelihood of " + ("the training data" if data is None else "the given data")
            densities = [fit.log_likelihood(corpus).double() for fit, corpus in zip(fits, corpora, strict=True)]
        check_densities([*named], densities)
        from sklearn.metrics import adjusted_rand_score  # slow to import

        present = get_present_words(chosen, corpora[0])
        match = match_heads(overlap := count_overlap(a.double(), b.double(), present))
        top_heads = [probs.argmax(-1) if present is None else probs.argmax(-1)[present] for probs in (a, b)]
        labels = [label.flatten().cpu().numpy() for label in top_heads]
        has_gain = data is not None or criterion == LEAVE_ONE_OUT
        return Comparison(
            match,
            overlap,
            float(adjusted_rand_score(*labels)),
            *paired_difference(*densities),
            {k: matched_cosines(v, heads_b.A[k], match) for k, v in heads_a.A.items() if k in heads_b.A},
            {k: matched_cosines(v, heads_b.OV[k], match) for k, v in heads_a.OV.items() if k in heads_b.OV},
            criterion,
            (*notes, *collect_notes(named)),
            *(estimate_gain_uncertainty(*densities) if has_gain else (None, None)),
        )

    @translate_memory_errors("to_arviz")
    def to_arviz(self, *, predictive_draws: int = 100) -> az.InferenceData:
        """Convert the samples to the data structure of ArviZ: InferenceData, or with ArviZ 1.x xarray's DataTree.

        The groups are `posterior` (with label-invariant summaries of heads), `sample_stats` (NUTS), `log_likelihood`
        (of each sentence, named by the readout, or `joint` for several readouts), and, for a fit that has its training
        data, `observed_data` and `posterior_predictive` by readout. Words that are absent or not observed are NaN.

        Args:
            predictive_draws: The maximum number of draws, evenly spaced in each chain, for which observations are
                replicated in `posterior_predictive`; 0 omits this group.

        Returns:
            The groups, with the dims `sentence`, the plates, `word` (`<stack>_word` in a named stack) and
            `<readout>_dim`.

        Raises:
            BNetError: If the fit has no samples, or ArviZ is not installed.
        """
        draws = check_int("predictive_draws", predictive_draws, minimum=0)
        if not self.samples:
            hint = "Fit with method='svi' or 'nuts'"
            raise BNetError("to_arviz", expected="a fit with samples", actual=self.method, hint=hint)
        result: az.InferenceData = to_arviz(
            self.network, self.samples, self.log_likelihoods, self.statistics, self.data, draws
        )
        return result

    def _to_fields(self) -> Fields:
        return {**super()._to_fields(), "data": None, "known_likelihoods": self.log_likelihoods}

    @classmethod
    def _upgrade_fields(cls, fields: Fields) -> Fields:
        if "record" in fields:
            return fields
        fields.pop("guide", None)  # of the files of earlier versions, which have the record in parts
        parts = {name: fields.pop(name) for name in RECORD_NAMES & fields.keys()}
        check_field_types(FitRecord, parts, cls.__name__)
        return {**fields, "record": FitRecord(**parts)}

    @classmethod
    def _from_fields(cls, fields: Fields) -> Fit[Any]:
        as_network(fields["net"])  # a file may name another class
        return cls(**fields)

    def _get_columns(self) -> Mapping[str, Any]:
        steps, restarts, scores = zip(*self.measured, strict=True) if self.measured else ((), (), ())
        return {"step": steps, "restart": restarts, f"{self.criterion} of a sentence": scores}

    @property
    def caption(self) -> str:
        """The net, the method and the score, in one line."""
        caption = f"{self.net!r}: {self.method} of {self.sentences:,} sentences, {len(self.bounds)} steps, "
        caption += f"restart {self.restart}, scored by the {self.criterion} on {self.evaluated_on}"
        caption += "" if self.finished else ", interrupted"
        caption += {None: "", True: ", converged", False: ", not converged"}[self.converged]
        caption += "" if self.approximate is None else f"; approximate: {self.approximate}"
        return caption + ("" if self.khat is None else f"; k-hat {self.khat:.2f}")

    def _get_shown_frame(self) -> pd.DataFrame:
        return self.heads.to_dataframe() if self.selectors else self.to_dataframe()

    def _get_notes(self) -> Sequence[str]:
        notes = [*self.notes, *([self.heads.caption] if self.selectors else [])]
        if self.samples and self.method == "nuts" and len(self.matched) < len(self.selectors):
            names = ", ".join(name for name in self.selectors if name not in self.matched)
            notes.append(f"the heads of {names} are not aligned across draws, because they are not exchangeable")
        return notes

    def _find_selector(self, name: str | None) -> NodeSpec:
        """Return the selector of this name, by default the first one."""
        selectors = {spec.group.name: spec for spec in find_selectors(self.network)}
        if not selectors:
            names = [spec.group.name for spec in self.network.choices]
            expected = "a net with a selector that has no parents, or only itself at the neighbouring word"
            if not names:
                raise BNetError("selector", expected=expected, hint="This net has no latent choices")
            hint = "Use posterior(...) of a node of a sentence of f.net"
            raise BNetError("selector", expected=expected, actual=f"{', '.join(names[:4])} with parents", hint=hint)
        if name is None:
            return next(iter(selectors.values()))
        if not isinstance(name, str) or name not in selectors:
            raise unknown_name_error("selector", name, selectors)
        return selectors[name]

    def _find_readout(self, name: str | None, corpus: Batch | None = None) -> NodeSpec:
        """Return the readout of this name that the corpus observes; by default the first without children."""
        readouts, reads = infer_fit_task(self.network).readouts, self.network.graph.out_edges
        candidates = {m.group.name: m for m in readouts if corpus is None or m.group.name in corpus.evidence}
        if name is not None and (not isinstance(name, str) or name not in candidates):
            raise unknown_name_error("readout", name, candidates)
        leaves = [spec for spec in candidates.values() if not reads[spec.group.index]]
        return candidates[name] if name is not None else [*leaves, *candidates.values()][0]

    def _mean_over_draws(self, evaluate: Callable[[Network], Tensor]) -> Tensor:
        """Compute the mean over the posterior draws of a function of the net, `[sentence, ...]`."""
        nets = self._posterior_networks()
        with self._explain_sampled_choices():
            return sum((evaluate(net) / len(nets) for net in nets[1:]), evaluate(nets[0]) / len(nets))

    @contextmanager
    def _explain_sampled_choices(self) -> Iterator[None]:
        """Name the queries that are possible, if the choices were sampled because they cannot be summed."""
        try:
            yield
        except (BudgetError, UnsupportedError) as error:
            if not self.choices:
                raise
            reason = error.reason if isinstance(error, StructureError) else f"{error.subject} exceeds the budget"
            raise UnsupportedError(
                "this query",
                expected="the training data, because the fit has choices='sampled' and other sentences have no "
                f"table of choices; elimination is not possible: {reason}",
                hint="Use f.choices, P(c | x, y) of the training data; f.check(data); f.to_arviz(); or fit a net "
                "whose choices can be summed (per='sentence', fewer slices or atoms, a larger budget=)",
            ) from error

    def _read_data(self, data: object) -> Batch:
        """Read data in any form of `fit`, with the options of the fit."""
        return read_batch(self.network, data, missing=self.missing, missing_option=MISSING_OPTION)

    def _posterior_networks(self, max_draws: int = MAX_POSTERIOR_DRAWS) -> list[Network]:
        """Return nets of evenly spaced posterior draws; the net itself if there are no samples."""
        if not self.samples:
            return [self.network]
        sets = samples_to_parameters(self.network, self.samples)
        count = len(next(iter(sets.values())))
        idx = torch.linspace(0, count - 1, min(max_draws, count)).round().long().tolist()
        return [self.network.with_parameters({name: value[k] for name, value in sets.items()}) for k in idx]


def _warn_of_rhat(name: str, draws: Tensor) -> None:
    """Warn the caller of an interval of a quantity, with draws `[chain, draw, *shape]`, on which chains disagree."""
    if note := describe_rhat({name: draws}):
        warnings.warn(note, stacklevel=4)


def as_fit(value: Any) -> Fit[Any]:
    """Return a fit, or a net as a fit that learned no parameter; raise an error for any other value."""
    if isinstance(value, Fit):
        return value
    if not isinstance(getattr(value, "network", value), Network):
        raise BNetError("compare", expected="a Fit, or a net", actual=value)
    return Fit(value, "none", FitRecord(0, "nothing"))


def get_shared_data(first: Batch | None, second: Batch | None) -> tuple[Batch, Batch]:
    """Return the training sentences of two fits; raise an error if they differ."""
    if first is None or second is None:
        expected = "data to compare on, because a net or a loaded fit does not contain its training data"
        raise BNetError("data", expected=expected, hint="Pass data=")
    if not first.equals(second):
        expected = "two fits of the same sentences in the same order"
        raise BNetError("compare", expected=expected, hint="Pass data= to compare on other sentences")
    return first, second


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
        density, khats = leave_one_out(fit.network, fit.samples, likelihoods)
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


def collect_notes(fits: Mapping[str, Fit[Any]]) -> list[str]:
    """Collect what a reader of a comparison must know of the fits, by their names in messages."""
    notes = []
    for name, fit in fits.items():
        notes += [f"{name}: not converged"] if fit.converged is False else []
        notes += [f"{name}: interrupted"] if not fit.finished else []
        notes += [f"{name}: {note}" for note in fit.notes]
    return notes

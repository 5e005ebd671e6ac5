"""The objective of a fit, the fit problem, and one config class for each method.

Every fit maximises, or samples from, the exact log evidence of the sentences plus the log prior of the parameters. A
set of parameters is a mapping from name to tensor. Several sets have a leading dim and are evaluated together by
`torch.vmap`. To add a method, write its config and a function `(problem, config) -> Fit`, and add a row to `METHODS` in
`methods.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bnet_transformer._core.checks import check_choice, check_float, check_int, check_options, check_sequence
from bnet_transformer._core.distributed import SINGLE_PROCESS, DistributedContext
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.gather import ExecutionState, batch_to_request, enumerate_states
from bnet_transformer.data import Batch, Evidence
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, EvidenceError
from bnet_transformer.inference.elimination import (
    compute_log_evidence,
    eliminate_choices,
    find_posterior_dims,
    get_batch_size,
    get_full_shape,
)
from bnet_transformer.inference.factors import (
    Factor,
    FactorRequest,
    compute_factors,
    log_prior,
    request_factors,
    select_logits,
)
from bnet_transformer.learning.training import LoopConfig

LOG_EVIDENCE, LOG_POSTERIOR = "log evidence", "log posterior density"  # criteria that choose among restarts and steps
Parameters = Mapping[str, Tensor]
A = TypeVar("A")
FULL_PASS_SIZE = 1024  # sentences of one part of a full pass
FactorFunction = Callable[[ExecutionState, list[Factor]], A]


@dataclass(frozen=True)
class LearnableParameters:
    """The parameters that a fit learns.

    Args:
        tables: The Dirichlet concentrations of the prior of each table of log probabilities, by parameter name, as
            tensors that broadcast to the table.
        weights: The names of all other learned parameters.
        spread: The standard deviation of the Normal prior of the weights; None for no prior.
        logits: The Dirichlet concentrations of the prior of the softmax of each of those `weights` that are logits of a
            node with a vector parent.
    """

    tables: Mapping[str, Tensor]
    weights: tuple[str, ...]
    spread: float | None
    logits: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all learned parameters, tables first."""
        return (*self.tables, *self.weights)


def to_parameters(network: Network, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert samples, in which tables are probabilities, to parameters, in which tables are log probabilities."""
    return {
        name: value.log() if name in network.unconditional_logit_names else value for name, value in samples.items()
    }


def select_learnable(
    network: Network, readouts: tuple[NodeSpec, ...], learn: object, spread: float | None
) -> LearnableParameters:
    """Select the learnable parameters of the readouts and their ancestors; if `learn` is given, only those it names.

    Raises:
        BNetError: If `learn` names a parameter that cannot be learned, or no parameter remains.
    """
    ancestors = {spec.param_prefix: spec for readout in readouts for spec in network.ancestral_specs(readout)}
    learnable = [
        name for name in network.parameters if name in network.learnable and name.rpartition(".")[0] in ancestors
    ]
    if learn is not None:
        requested = check_sequence("learn", learn, str)
        for name in requested:
            if name not in learnable:
                expected = "the names of learnable parameters of a readout or its ancestors"
                raise BNetError("learn", expected=expected, actual=name, allowed=", ".join(learnable))
        learnable = [name for name in learnable if name in requested]
    if not learnable:
        raise BNetError("net", expected="a net with learnable parameters")
    concentrations = {f"{prefix}.{name}": a for prefix, m in ancestors.items() for name, a in m.priors.items()}
    is_table = set(network.unconditional_logit_names)
    flat = torch.ones((), dtype=torch.float64)
    tables = {name: concentrations.get(name, flat) for name in learnable if name in is_table}
    weights = tuple(name for name in learnable if name not in tables)
    logits = {name: concentrations[name] for name in weights if name in concentrations}
    return LearnableParameters(tables, weights, spread, logits)


class FitObjective(nn.Module):
    """Computes `log P(y | x)` of sentences by exact elimination, for one set of parameters or several.

    Args:
        network: The net. The parameters of a call replace its learned parameters.
        learned: The learned parameters and their priors.
        budget: The maximum number of joint states of the choices over which elimination may sum.
    """

    def __init__(self, network: Network, learned: LearnableParameters, budget: int) -> None:
        super().__init__()
        self.module = CompiledModule(network)
        for value in self.module.store.values():
            value.requires_grad_(False)
        self.module.eval()
        self.network, self.learned, self.budget = network, learned, budget
        self._requests: WeakKeyDictionary[Batch, dict[bool, FactorRequest]] = WeakKeyDictionary()
        self._factor_cache: WeakKeyDictionary[Batch, tuple[ExecutionState, list[Factor]]] = WeakKeyDictionary()

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        device: torch.device = next(iter(self.module.store.values())).device
        return device

    @property
    def has_corpus_choice(self) -> bool:
        """True if all sentences share one draw of some selector."""
        return any(spec.scope == "corpus" for spec in self.network.choices)

    def forward(self, corpus: Batch, fn: FactorFunction[Any], *, defer: bool = True) -> Any:
        """Apply `fn` to the execution state and the factors of the sentences, with the parameters in the module."""
        if not self.learned.weights and corpus in self._factor_cache:
            return fn(*self._update_tables(*self._factor_cache[corpus]))
        requests = self._requests.setdefault(corpus, {})
        if defer not in requests:
            evidence, run = corpus.index_evidence(self.network), batch_to_request(self.network, corpus)
            requests[defer] = request_factors(self.module, evidence, None, run, budget=self.budget, defer=defer)
        return fn(*compute_factors(self.module, requests[defer]))

    def cache_factors(self, corpus: Batch) -> None:
        """Cache the factors of sentences that are evaluated repeatedly, if only tables are learned.

        The cached likelihoods stay valid, because they depend only on the weights: `P(y | x, c)` has no parameter of
        `P(c)`. If a learned table belongs to an observed choice, it is a likelihood itself, and nothing is cached.
        """
        if not self.learned.weights and corpus not in self._factor_cache:
            with torch.no_grad():
                state, factors = self(corpus, lambda state, factors: (state, factors))
            if not any(f.evidence is not None and self.find_learned_tables(f) for f in factors):
                state.values.clear()
                self._factor_cache[corpus] = state, factors

    def find_learned_tables(self, factor: Factor) -> list[str]:
        """Return the parameter names of the learned tables of a factor."""
        names = (f"{factor.spec.param_prefix}.{name}" for name in factor.spec.parameters)
        return [name for name in names if name in self.learned.tables]

    def _update_tables(self, state: ExecutionState, factors: list[Factor]) -> tuple[ExecutionState, list[Factor]]:
        """Recompute the cached factors that are tables from the current parameters; reuse the likelihoods."""
        parameters = {name: self.module.store[name.replace(".", "/")] for name in self.network.parameters}
        values = {**state.known, **{i: enumerate_states(state, i) for i in state.layout.enumerated}}
        state = replace(state, parameters=parameters, values=values)
        return state, [
            f if f.evidence is not None else replace(f, table=log_prior(state, f.spec.group.index, f.spec))
            for f in factors
        ]

    def log_evidence(self, parameters: Parameters, corpus: Batch) -> Tensor:
        """Compute the log evidence of each sentence for one set of parameters, `[sentence]`.

        If all sentences share one draw of a choice, the result is the log evidence of the corpus, `[1]`.
        """
        return self.evaluate(parameters, corpus, eliminate_choices)

    def evaluate(self, parameters: Parameters, corpus: Batch, fn: FactorFunction[A], *, defer: bool = True) -> A:
        """Apply `fn` to the execution state and the factors of the sentences, with one set of parameters.

        With `defer=False` no likelihood of a readout is computed without its mean.
        """
        stored = {f"module.store.{name.replace('.', '/')}": value for name, value in parameters.items()}
        result: A = torch.func.functional_call(self, stored, (corpus, fn), {"defer": defer})
        return result

    def log_joint(self, parameters: Parameters, corpus: Batch, states: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute `log P(choices)` and `log P(y | choices)` of each sentence, both `[sentence]`.

        `states` contains the states of all choices. Each choice is passed as evidence on its node group, so its prior
        is a factor like any other: parents follow the reach and the pick of the declaration, and absent words
        contribute nothing.
        """
        evidence = {name: Evidence(value) for name, value in states.items()}

        def evaluate(state: ExecutionState, factors: list[Factor]) -> tuple[Tensor, Tensor]:
            priors = [factor for factor in factors if factor.spec.group.name in states]
            likelihoods = [factor for factor in factors if factor.spec.group.name not in states]
            return eliminate_choices(state, priors), eliminate_choices(state, likelihoods)

        observed = replace(corpus, evidence={**corpus.evidence, **evidence})
        return self.evaluate(parameters, observed, evaluate)

    def log_evidences(self, sets: Parameters, corpus: Batch) -> Tensor:
        """Compute the log evidence of each sentence for several sets of parameters, `[set, sentence]`."""
        return torch.vmap(lambda parameters: self.log_evidence(parameters, corpus))(dict(sets))

    def split(self, corpus: Batch) -> list[Batch]:
        """Split sentences into the parts of a full pass; one part if all sentences share a draw."""
        return [corpus] if self.has_corpus_choice else corpus.parts(FULL_PASS_SIZE)

    def check_possible(self, corpus: Batch) -> None:
        """Raise an error for the first observation that is impossible in the net before the fit."""
        for number, part in enumerate(self.split(corpus)):
            try:
                with torch.no_grad():
                    evidence, request = part.index_evidence(self.network), batch_to_request(self.network, part)
                    factors = request_factors(self.module, evidence, None, request, budget=self.budget)
                    compute_log_evidence(self.module, factors)
            except EvidenceError as error:
                where = f" after {number * FULL_PASS_SIZE} other sentences" if number else ""
                raise EvidenceError(f"{error.subject}{where}", **error.parts) from error
            except BNetError:  # numbers overflow: the fit reports its bound
                return

    @property
    def has_prior(self) -> bool:
        """True if the log prior is not constant."""
        weights = self.learned.weights if self.learned.spread is not None else ()
        concentrations = {**self.learned.tables, **self.learned.logits}
        return any(name not in concentrations for name in weights) or any(
            bool((a != 1).any()) for a in concentrations.values()
        )

    def log_prior(self, sets: Parameters) -> Tensor:
        """Compute the log prior density of each set up to a constant, `[set]`: Dirichlet rows, Normal weights.

        The Dirichlet density is with respect to the probabilities, not the logits. No Jacobian is added, so the maximum
        is the same MAP estimate as in the closed-form M step.
        """
        first = next(iter(sets.values()))
        total = first.new_zeros(len(first))
        for name, concentration in {**self.learned.tables, **self.learned.logits}.items():
            if bool((concentration != 1).any()):
                logs = torch.log_softmax(sets[name], -1)
                total = total + ((concentration - 1).to(logs) * logs).flatten(1).sum(1)
        if self.learned.spread is not None:
            for name in self.learned.weights:
                if name in self.learned.logits:
                    continue
                squares = sets[name].reshape(len(first), -1).square().sum(1)
                total = total - squares / (2 * self.learned.spread**2)
        return total

    def responsibilities(self, parameters: Parameters, corpus: Batch, selector: NodeSpec) -> Tensor:
        """Compute the responsibilities `P(c | x, y)` of a selector, `[sentence, ..., head]`."""
        # The derivative of a log partition function by the log of a factor is the expectation of its indicator: with
        # Z(t) = sum_c exp(t_c) P(c, y | x), d log Z / d t_c at t = 0 is P(c | x, y) (Darwiche 2003, "A differential
        # approach to inference in Bayesian networks"). One backward pass of elimination gives all states.
        group = selector.group

        def evaluate(state: ExecutionState, factors: list[Factor]) -> Tensor:
            state_dim = state.layout.enumerated.index(group.index)
            batch = 1 if selector.scope == "corpus" else get_batch_size(factors, state)
            shape = get_full_shape(state, group.plates, group.word_stack, batch)
            shape[state_dim] = state.count_states(group.index)
            tilt = torch.zeros(shape, dtype=state.log_dtype, device=state.device)
            evidence = lambda tilt: eliminate_choices(state, [*factors, Factor(selector, tilt)]).sum()  # noqa: E731
            probs: Tensor = torch.func.grad(evidence)(tilt)
            sizes = [shape[k] for k in find_posterior_dims(state, group)]
            return probs.movedim(state_dim, -1).reshape(*sizes, shape[state_dim])

        return self.evaluate(parameters, corpus, evaluate)

    def expected_counts(self, parameters: Parameters, corpus: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Compute the E step: the expected count of each entry of the learned tables of choices, and the log evidence.

        The log evidence is `[]`. Observed states count too. A choice that is enumerated although it is observed has two
        factors: its prior is counted, its evidence is not.
        """
        # The expected count of an entry is the derivative of the log evidence with respect to its log probability
        # (Darwiche 2003; EM: Dempster, Laird and Rubin 1977): the entry is a factor wherever it is used, and the
        # derivatives of shared factors add up. The probabilities need not be renormalised for the derivative.

        def evaluate(state: ExecutionState, factors: list[Factor]) -> tuple[dict[str, Tensor], Tensor]:
            summed = state.layout.enumerated
            is_prior = [f.evidence is None or f.spec.group.index not in summed for f in factors]
            idx = [k for k, f in enumerate(factors) if is_prior[k] and self.find_learned_tables(f)]
            names = dict.fromkeys(name for k in idx for name in self.find_learned_tables(factors[k]))
            shapes = {name: state.parameters[name].shape for name in names}
            zeros = {name: torch.zeros(s, dtype=state.log_dtype, device=state.device) for name, s in shapes.items()}

            def total(tilts: dict[str, Tensor]) -> Tensor:
                tilted, tilted_factors = replace(state, parameters={**state.parameters, **tilts}), list(factors)
                for k in idx:
                    tilted_factors[k] = replace(factors[k], table=factors[k].table + select_logits(tilted, factors[k]))
                return eliminate_choices(state, tilted_factors).sum()

            counts: dict[str, Tensor]
            counts, evidence = torch.func.grad_and_value(total)(zeros)
            return counts, evidence

        return self.evaluate(parameters, corpus, evaluate)


@dataclass(frozen=True)
class FitProblem:
    """The input of a method, without the method's own options.

    Args:
        objective: The log evidence and the log prior of the learned parameters.
        corpus: The training sentences, on the device of `ranks`.
        held_out: The sentences that choose among restarts and steps; None if the caller gave none.
        batch: The number of sentences of a step; None for the default of the method.
        seed: The seed of all random numbers of the method.
        loop: When to evaluate and save, and the progress bar.
        settings: The settings that must be equal in a resumed fit and in the fit that wrote the checkpoint.
        ranks: The processes that share the work.
    """

    objective: FitObjective
    corpus: Batch
    held_out: Batch | None
    batch: int | None
    seed: int
    loop: LoopConfig = field(default_factory=LoopConfig)
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranks: DistributedContext = SINGLE_PROCESS


def to_float64(problem: FitProblem) -> FitProblem:
    """Return the problem in float64, on the device of its ranks."""
    objective, device = problem.objective, problem.ranks.device
    double = FitObjective(objective.network.to(torch.float64), objective.learned, objective.budget).to(device)
    corpus = problem.corpus.to(device, torch.float64)
    held_out = None if problem.held_out is None else problem.held_out.to(device, torch.float64)
    return replace(problem, objective=double, corpus=corpus, held_out=held_out)


def check_full_batch(problem: FitProblem, user: str, alternative: str) -> None:
    """Raise an error if a step uses a part of the sentences.

    Args:
        problem: The fit problem.
        user: The algorithm that requires the whole likelihood.
        alternative: The argument of `fit` for minibatches.
    """
    count = len(problem.corpus)
    if problem.batch is not None and problem.batch < count:
        expected = f"None or all {count} sentences, because {user} requires the whole likelihood"
        raise BNetError("batch", expected=expected, actual=problem.batch, hint=f"Use {alternative} for minibatches")


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of `fit` with its options."""

    name: ClassVar[str]
    is_point: ClassVar[bool] = False  # the result is one set of parameters; other methods sample a posterior

    @property
    def settings(self) -> dict[str, Any]:
        """The options that must be equal in a resumed fit and in the fit that wrote the checkpoint."""
        return {"method": self.name, **{option.name: getattr(self, option.name) for option in fields(self)}}


@dataclass(frozen=True, kw_only=True)
class IterativeMethod(Method):
    """A method that maximises a bound by Adam steps.

    Args:
        steps: The number of Adam steps.
        rate: The peak learning rate.
        clip: The maximum norm of the gradient; None for no clipping.
    """

    steps: int = 300
    rate: float = 0.05
    clip: float | None = None

    def __post_init__(self) -> None:
        check_options(self, check_int, "steps")
        check_options(self, check_float, "rate", "clip", above=0)


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of a point method for one net, without defaults that depend on the net.

    Args:
        steps: The maximum number of steps.
        rate: The peak learning rate of Adam.
        clip: The maximum norm of the gradient of Adam; None for no clipping.
        restarts: The number of restarts.
        inner: The number of Adam steps between two updates of the tables of EM; None if tables follow the gradient.
        prune: Whether Adam drops the worse half of the restarts at 25% and at 50% of the steps.
    """

    steps: int
    rate: float = 0.05
    clip: float | None = None
    restarts: int = 1
    inner: int | None = None
    prune: bool = False

    @property
    def pruning_steps(self) -> tuple[int, ...]:
        """The steps after which the worse half of the restarts is dropped: at 25% and at 50% of all steps."""
        # Successive halving (Jamieson and Talwalkar 2016) with two rungs. Restarts that end in a poor local optimum are
        # usually behind early, so the remaining steps are spent on the better half.
        return (self.steps // 4, self.steps // 2) if self.prune and self.restarts > 2 else ()


@dataclass(frozen=True, kw_only=True)
class PointMethod(Method):
    """A method whose result is the best of several restarts, which are computed as one batched dim.

    Args:
        restarts: The number of restarts; None for 4 with second-order steps and latent choices, else 1.
        optimizer: `"second-order"` or `"first-order"`; `"auto"` chooses.
        steps: The maximum number of steps of the restarts; None for 40 second-order or 300 first-order steps.
        rate: The peak learning rate of Adam; None for 0.05.
        clip: The maximum norm of the gradient of Adam; None for no clipping.
        prune: Whether first-order steps drop the worse half of the restarts at 25% and at 50% of the steps.
    """

    is_point: ClassVar[bool] = True
    gradient_options: ClassVar[tuple[str, ...]] = ("rate", "clip")  # they apply to gradient steps only

    restarts: int | None = None
    optimizer: str = "auto"
    steps: int | None = None
    rate: float | None = None
    clip: float | None = None
    prune: bool = True

    def __post_init__(self) -> None:
        check_options(self, check_int, "restarts", "steps")
        check_options(self, check_float, "rate", "clip", above=0)
        check_choice("optimizer", self.optimizer, ("auto", "second-order", "first-order"))
        check_choice("prune", self.prune, (True, False))
        if self.optimizer == "second-order":
            for option in self.gradient_options:
                if getattr(self, option) is not None:
                    expected = f"no such option with optimizer={self.optimizer!r}, which has no learning rate"
                    raise BNetError(option, expected=expected, actual=getattr(self, option))


@dataclass(frozen=True, kw_only=True)
class MAP(PointMethod):
    """The maximum of the posterior density.

    Args:
        restarts: The number of restarts, which are computed together; None for 4 with second-order steps and latent
            choices, else 1. The first starts at the parameters of the net, the others at random parameters.
        optimizer: `"second-order"`: the algorithm of `bt.EM`, in float64. `"first-order"`: Adam on the log evidence
            plus the log prior, in minibatches. `"auto"` is second order, unless an option of Adam is given, `batch` is
            smaller than the data, or the net is not covered (`f.notes` gives the reason).
        steps: The maximum number of steps of the restarts; None for 40 second-order or 300 first-order steps. Rounds of
            moves and final steps after second-order steps are in proportion: 10 and 100 with 40 steps.
        rate: The peak learning rate of Adam; None for 0.05. It rises during the first 5% of the steps and decays to 0
            as a cosine.
        clip: The maximum norm of the gradient of Adam; None for no clipping.
        prune: Whether first-order steps drop the worse half of the restarts at 25% and again at 50% of the steps.
            Second-order steps drop a restart only if its predicted maximum is not above that of another one.

    Raises:
        BNetError: If an option is out of range, or does not apply to the optimizer.

    >>> import bnet_transformer as bt
    >>> bt.MAP(restarts=4).optimizer
    'auto'
    """

    name: ClassVar[str] = "map"


@dataclass(frozen=True, kw_only=True)
class EM(PointMethod):
    """Expectation maximisation: exact responsibilities, closed-form updates of tables, and steps of the weights.

    Args:
        restarts: The number of restarts, which are computed together; None for 4 with second-order steps and latent
            choices, else 1. The first starts at the parameters of the net, the others at random parameters.
        optimizer: `"second-order"`: a damped Gauss-Newton step of the weights in each iteration, Newton steps at the
            end, and split-and-merge moves of heads, on all sentences, in float64. `"first-order"`: `inner` steps of
            Adam between two updates of the tables; plain EM if no weights are learned. `"auto"` is second order, unless
            an option of Adam is given, `batch` is smaller than the data, or the net is not covered (`f.notes` gives the
            reason).
        steps: The maximum number of steps of the restarts; None for 40 second-order or 300 first-order steps. Rounds of
            moves and final steps after second-order steps are in proportion: 10 and 100 with 40 steps.
        rate: The peak learning rate of Adam; None for 0.05. It rises during the first 5% of the steps and decays to 0
            as a cosine.
        clip: The maximum norm of the gradient of Adam; None for no clipping.
        prune: Whether first-order steps drop the worse half of the restarts at 25% and again at 50% of the steps.
            Second-order steps drop a restart only if its predicted maximum is not above that of another one.
        inner: The number of Adam steps of the weights between two updates of the tables; None for 10.

    Raises:
        BNetError: If an option is out of range, or does not apply to the optimizer.

    >>> import bnet_transformer as bt
    >>> bt.EM(inner=5).settings["method"]
    'em'
    """

    name: ClassVar[str] = "em"
    gradient_options: ClassVar[tuple[str, ...]] = ("rate", "clip", "inner")

    inner: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self, check_int, "inner")


@dataclass(frozen=True, kw_only=True)
class SVI(IterativeMethod):
    """Stochastic variational inference. The exact log evidence is a factor of the model.

    The mean-field guide is a Dirichlet for each row of a table and a Normal for each weight. It underestimates the
    posterior spread, so a fit of weights by it has no intervals; those of `bt.Laplace` and `bt.NUTS` have.

    Args:
        guide: `"mean-field"`, the only guide.
        steps: The number of Adam steps.
        rate: The peak learning rate. It rises during the first 5% of the steps and decays to 0 as a cosine.
        clip: The maximum norm of the gradient; None for no clipping.
        draws: The number of draws from the guide, which are the posterior samples.
        choices: `"exact"` sums the latent choices out. `"sampled"` draws them for each sentence and word from a table
            of the guide. That is approximate, and is for choices with too many joint states.
        anneal: The initial power of the likelihoods, which rises to 1 over the first half of the steps. It applies only
            to sampled choices. None for 1 in all steps.

    Raises:
        BNetError: If an option is out of range, or `anneal` is set with exact choices.

    >>> import bnet_transformer as bt
    >>> bt.SVI(choices="sampled", anneal=0.01).steps
    1000
    """

    name: ClassVar[str] = "svi"

    steps: int = 1000
    draws: int = 500
    choices: str = "exact"
    anneal: float | None = None
    guide: str = "mean-field"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guide != "mean-field":
            hint = "Use bt.Laplace(), a Normal distribution with any covariance, or bt.NUTS(): both have intervals"
            raise BNetError("guide", expected="'mean-field', the only guide", actual=self.guide, hint=hint)
        check_options(self, check_int, "draws")
        check_choice("choices", self.choices, ("exact", "sampled"))
        if self.anneal is not None and (self.choices == "exact" or not 0 < check_float("anneal", self.anneal) <= 1):
            expected = "a power above 0 and at most 1, with choices='sampled'"
            raise BNetError("anneal", expected=expected, actual=self.anneal)


@dataclass(frozen=True, kw_only=True)
class Laplace(Method):
    """Posterior samples by the Laplace approximation: a Normal distribution at the mode of the posterior density.

    The mode is found by point fits from several starts and Newton steps with the exact Hessian, in coordinates without
    the gauge of attention: `W_q` and `W_k` enter by the triangular factor of `W_q` and by `W_k` in its basis. The prior
    must be proper: `fit` requires `spread=`. Entries of `W_q` and `W_k` that are Normal with standard deviation s give
    entries of `A = W_q^T W_k` with mean 0 and standard deviation `s^2 sqrt(key_dim)`, which are uncorrelated but not
    independent and not Normal: their tails are heavier, and the rank of `A` is at most `key_dim`.

    Args:
        draws: The number of draws, which are the posterior samples.
        reweight: True (default) draws from a Student t distribution and reweights the draws by the exact density with
            Pareto-smoothed importance weights, if their diagnostic k-hat is below 0.7. Otherwise the draws are Normal.
        restarts: The number of starts of the point fit.

    Raises:
        BNetError: If an option is out of range.

    >>> import bnet_transformer as bt
    >>> bt.Laplace(draws=500).restarts
    4
    """

    name: ClassVar[str] = "laplace"

    draws: int = 1000
    reweight: bool = True
    restarts: int = 4

    def __post_init__(self) -> None:
        check_options(self, check_int, "draws", "restarts")
        check_choice("reweight", self.reweight, (True, False))


@dataclass(frozen=True, kw_only=True)
class NUTS(Method):
    """Posterior samples by Pyro's No-U-Turn sampler on the exact log evidence.

    Args:
        chains: The number of chains. They draw in turn, one draw each.
        draws: The number of draws of each chain.
        warmup: The number of warmup steps of each chain before its draws. They adapt the step size and mass matrix.

    Raises:
        BNetError: If an option is out of range.

    >>> import bnet_transformer as bt
    >>> bt.NUTS(chains=2, draws=100).warmup
    300
    """

    name: ClassVar[str] = "nuts"

    chains: int = 4
    draws: int = 500
    warmup: int = 300

    def __post_init__(self) -> None:
        check_options(self, check_int, "chains", "draws", "warmup")

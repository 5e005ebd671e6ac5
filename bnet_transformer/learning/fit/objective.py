"""The objective of a fit, the fit problem, and the base class of methods.

Every fit maximises, or samples from, the exact log evidence of the sentences plus the log prior of the parameters. A
set of parameters is a mapping from name to tensor. Several sets have a leading dim and are evaluated together by
`torch.vmap`. To add a method, write a file with its config and a function `(problem, config) -> Fit`, and add a row to
`METHODS` in `methods.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bnet_transformer._core.checks import check_sequence
from bnet_transformer._core.distributed import SINGLE_PROCESS, DistributedContext
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.gather import ExecutionState, batch_to_request, enumerate_states
from bnet_transformer.data import Batch, Evidence
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, EvidenceError
from bnet_transformer.inference.elimination import build_tilt, compute_log_evidence, eliminate_choices, shape_posterior
from bnet_transformer.inference.factors import Factor, FactorRequest, compute_factors, log_prior, request_factors
from bnet_transformer.learning.loop import LoopConfig

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
                    factor_request = request_factors(self.module, evidence, None, request, budget=self.budget)
                    compute_log_evidence(self.module, factor_request)
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

        def evaluate(state: ExecutionState, factors: list[Factor]) -> Tensor:
            evidence = lambda tilt: eliminate_choices(state, [*factors, Factor(selector, tilt)]).sum()  # noqa: E731
            probs: Tensor = torch.func.grad(evidence)(build_tilt(state, factors, selector))
            return shape_posterior(state, selector.group, probs)

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
    """A method of `fit` with its options, and what it needs.

    Attributes:
        name: The name of the method.
        is_point: Whether the result is one set of parameters; other methods sample a posterior.
        full_batch: The algorithm that requires all sentences in each process, and the argument of `fit` for
            minibatches; None if a step may use a part of them.
    """

    name: ClassVar[str]
    is_point: ClassVar[bool] = False
    full_batch: ClassVar[tuple[str, str] | None] = None

    @property
    def settings(self) -> dict[str, Any]:
        """The options that must be equal in a resumed fit and in the fit that wrote the checkpoint."""
        return {"method": self.name, **{option.name: getattr(self, option.name) for option in fields(self)}}

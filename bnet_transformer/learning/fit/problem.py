"""What a fit is asked: the objective, the problem, and the methods as configs, each with the options that are its own.

Every fit makes the exact log evidence of the sentences plus the log prior of the parameters large. One set of
parameters is a mapping from name to tensor; several sets have one more dim in front, and are computed at once
(`torch.vmap`). To add a method, write its config and its function `config, problem -> Fit`, and add a row to `METHODS`
in `run.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bnet_transformer._core.checks import check_choice, check_float, check_int, check_sequence, set_frozen
from bnet_transformer._core.distributed import SINGLE_PROCESS, DistributedContext
from bnet_transformer.compiler import CompiledModule, ExecutionRequest
from bnet_transformer.compiler.execution_state import ExecutionState
from bnet_transformer.compiler.gather import enumerate_states
from bnet_transformer.data import Batch, Evidence
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.exact import eliminate_choices, get_batch_size, get_full_shape, has_posterior_dim
from bnet_transformer.inference.factors import Factor, build_factors, log_prior, select_logits
from bnet_transformer.learning.training.configs import LoopConfig
from bnet_transformer.reference import ATOL

LOG_EVIDENCE, LOG_POSTERIOR = "log evidence", "log posterior density"  # what the parameters of a fit are judged by
Parameters = Mapping[str, Tensor]
A = TypeVar("A")
FactorFunction = Callable[[ExecutionState, list[Factor]], A]


@dataclass(frozen=True)
class LearnableParameters:
    """What a fit learns: tables of log probabilities (with their Dirichlet concentration), and weights."""

    tables: Mapping[str, float]
    weights: tuple[str, ...]
    spread: float | None

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.tables, *self.weights)


def to_parameters(network: Network, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Draws as parameters: the tables, which are probabilities, as their logs."""
    return {
        name: value.log() if name in network.unconditional_logit_names else value for name, value in samples.items()
    }


def select_learnable(
    network: Network, readouts: tuple[NodeSpec, ...], learn: object, spread: float | None
) -> LearnableParameters:
    """The parameters above the readouts that may be learned, those of `learn` where it names some."""
    read = {member.param_prefix: member for readout in readouts for member in network.ancestral_specs(readout)}
    known = [name for name in network.parameters if name in network.learnable and name.rpartition(".")[0] in read]
    if learn is not None:
        asked = check_sequence("learn", learn, str)
        for name in asked:
            if name not in known:
                wanted = "learnable parameters above a readout"
                raise BNetError("learn", expected=wanted, actual=name, allowed=", ".join(known))
        known = [name for name in known if name in asked]
    if not known:
        raise BNetError("net", expected="parameters that a fit changes", actual="none")
    of = {name: read[name.removesuffix(".logits")] for name in known if name in network.unconditional_logit_names}
    tables = {name: member.tpm.priors().get("logits", 1.0) for name, member in of.items()}
    return LearnableParameters(tables, tuple(name for name in known if name not in tables), spread)


class FitObjective(nn.Module):
    """`log P(y | x)` of sentences by exact elimination, for one set of parameters or several."""

    def __init__(self, network: Network, learned: LearnableParameters, budget: int) -> None:
        super().__init__()
        self.module = CompiledModule(network)
        for value in self.module.store.values():
            value.requires_grad_(False)
        self.module.eval()
        self.network, self.learned, self.budget = network, learned, budget
        self.check_values = True
        self._factor_cache: WeakKeyDictionary[Batch, tuple[ExecutionState, list[Factor]]] = WeakKeyDictionary()

    @property
    def device(self) -> torch.device:
        """Where its parameters lie."""
        found: torch.device = next(iter(self.module.store.values())).device
        return found

    @property
    def has_corpus_choice(self) -> bool:
        """True where a selector is drawn once for all sentences."""
        return any(member.scope == "corpus" for member in self.network.choices)

    def forward(self, corpus: Batch, fn: FactorFunction[Any]) -> Any:
        """What is asked of the factors of the sentences."""
        if not self.learned.weights and corpus in self._factor_cache:
            return fn(*self._update_tables(*self._factor_cache[corpus]))
        request = ExecutionRequest((), corpus.x, corpus.mask, corpus.given, check_values=self.check_values)
        course, factors = build_factors(self.module, corpus.evidence, None, request, atol=ATOL, budget=self.budget)
        return fn(course, factors)

    def cache_factors(self, corpus: Batch) -> None:
        """Keep the likelihoods of sentences that are asked about again and again, where only tables are learned."""
        if not self.learned.weights and corpus not in self._factor_cache:
            with torch.no_grad():
                course, factors = self(corpus, lambda course, factors: (course, factors))
            if not any(f.evidence is not None and _table_name(f) in self.learned.tables for f in factors):
                course.values.clear()
                self._factor_cache[corpus] = course, factors

    def _update_tables(self, state: ExecutionState, factors: list[Factor]) -> tuple[ExecutionState, list[Factor]]:
        """Kept factors, those of tables made anew."""
        now = {name: self.module.store[name.replace(".", "/")] for name in self.network.parameters}
        values = {**state.known, **{i: enumerate_states(state, i) for i in state.layout.enumerated}}
        state = replace(state, parameters=now, values=values)
        return state, [
            f if f.evidence is not None else replace(f, table=log_prior(state, f.spec.group.index, f.spec))
            for f in factors
        ]

    def log_evidence(self, parameters: Parameters, corpus: Batch) -> Tensor:
        """The log evidence of each sentence under a set of parameters, `[sentence]`; `[1]` of the whole corpus."""
        return self._evaluate(parameters, corpus, eliminate_choices)

    def _evaluate(self, parameters: Parameters, corpus: Batch, fn: FactorFunction[A]) -> A:
        """What is asked of the factors of the sentences under a set of parameters."""
        stored = {f"module.store.{name.replace('.', '/')}": value for name, value in parameters.items()}
        found: A = torch.func.functional_call(self, stored, (corpus, fn))
        return found

    def log_joint(self, parameters: Parameters, corpus: Batch, states: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """`log P(choices)` and `log P(y | choices)` of each sentence, `[sentence]`, where `states` has all choices.

        Each choice is evidence on its family, so it is given its parents in the way of every other factor: with their
        reach, at the entry that is picked, and without absent words.
        """
        chosen = {name: Evidence(value) for name, value in states.items()}

        def ask(course: ExecutionState, factors: list[Factor]) -> tuple[Tensor, Tensor]:
            priors = [factor for factor in factors if factor.spec.group.name in states]
            likelihoods = [factor for factor in factors if factor.spec.group.name not in states]
            return eliminate_choices(course, priors), eliminate_choices(course, likelihoods)

        together = replace(corpus, evidence={**corpus.evidence, **chosen})
        return self._evaluate(parameters, together, ask)

    def log_evidences(self, sets: Parameters, corpus: Batch) -> Tensor:
        """The log evidence under several sets of parameters at once, `[set, sentence]`."""
        return torch.vmap(lambda each: self.log_evidence(each, corpus))(dict(sets))

    @property
    def has_prior(self) -> bool:
        """True where the log prior is more than a constant."""
        weights = bool(self.learned.weights) and self.learned.spread is not None
        return weights or any(concentration != 1.0 for concentration in self.learned.tables.values())

    def log_prior(self, sets: Parameters) -> Tensor:
        """The log density of the learned parameters, up to a constant, `[set]`: Dirichlet rows, normal weights."""
        first = next(iter(sets.values()))
        total = first.new_zeros(len(first))
        for name, concentration in self.learned.tables.items():
            if concentration != 1.0:
                total = total + (concentration - 1) * torch.log_softmax(sets[name], -1).flatten(1).sum(1)
        if self.learned.spread is not None:
            for name in self.learned.weights:
                squares = sets[name].reshape(len(first), -1).square().sum(1)
                total = total - squares / (2 * self.learned.spread**2)
        return total

    def responsibilities(self, parameters: Parameters, corpus: Batch, selector: NodeSpec) -> Tensor:
        """`P(c | x, y)` of a selector, `[sentence, .., head]`: how the log evidence changes with log probabilities."""
        family = selector.group

        def ask(course: ExecutionState, factors: list[Factor]) -> Tensor:
            place = course.layout.enumerated.index(family.index)
            batch = 1 if selector.scope == "corpus" else get_batch_size(factors, course)
            shape = get_full_shape(course, family.plates, family.word_stack, batch)
            shape[place] = course.count_states(family.index)
            tilt = torch.zeros(shape, dtype=course.log_dtype, device=course.device)
            share: Tensor
            share = torch.func.grad(lambda tilt: eliminate_choices(course, [*factors, Factor(selector, tilt)]).sum())(
                tilt
            )
            kept = [
                shape[k]
                for k in range(course.layout.batch_dim, course.layout.rank)
                if has_posterior_dim(course, family, k)
            ]
            return share.movedim(place, -1).reshape(*kept, shape[place])

        return self._evaluate(parameters, corpus, ask)

    def expected_counts(self, parameters: Parameters, corpus: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """How often each state of each learned table of choices is expected to have been drawn; the log evidence.

        The counts are the derivative of the log evidence by log probabilities (Darwiche 2003), those of states that
        evidence tells as well, but not of evidence on a choice that is enumerated all the same.
        """

        def ask(course: ExecutionState, factors: list[Factor]) -> tuple[dict[str, Tensor], Tensor]:
            summed, tables = course.layout.enumerated, self.learned.tables
            own = [f.evidence is None or f.spec.group.index not in summed for f in factors]
            drawn = [k for k, f in enumerate(factors) if own[k] and _table_name(f) in tables]
            shapes = {_table_name(factors[k]): course.parameters[_table_name(factors[k])].shape for k in drawn}
            zeros = {name: torch.zeros(s, dtype=course.log_dtype, device=course.device) for name, s in shapes.items()}

            def total(tilts: dict[str, Tensor]) -> Tensor:
                tilted, added = replace(course, parameters={**course.parameters, **tilts}), list(factors)
                for k in drawn:
                    added[k] = replace(factors[k], table=factors[k].table + select_logits(tilted, factors[k]))
                return eliminate_choices(course, added).sum()

            counts: dict[str, Tensor]
            counts, evidence = torch.func.grad_and_value(total)(zeros)
            return counts, evidence

        return self._evaluate(parameters, corpus, ask)


def _table_name(factor: Factor) -> str:
    return f"{factor.spec.param_prefix}.logits"


@dataclass(frozen=True)
class FitProblem:
    """What a method is given besides its own options.

    Args:
        objective: The log evidence and the log prior of the learned parameters.
        corpus: The sentences to learn from, on the device of `ranks`.
        held_out: The sentences that choose among restarts and steps; None where the caller gave none.
        batch: Sentences of a step; None for the default of the method.
        seed: The seed of all that the method draws.
        loop: Measures, checkpoints and the progress bar.
        settings: What a resumed fit must share with the fit that wrote the checkpoint.
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


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of `fit` and its options."""

    name: ClassVar[str]
    is_point: ClassVar[bool] = False  # it gives one set of parameters; the others sample a posterior, and need priors

    @property
    def settings(self) -> dict[str, Any]:
        """The options that a resumed fit must share with the fit that wrote the checkpoint."""
        return {"method": self.name, **{each.name: getattr(self, each.name) for each in fields(self)}}


@dataclass(frozen=True, kw_only=True)
class IterativeMethod(Method):
    """A method that takes steps of Adam up the gradient of a bound."""

    steps: int = 300
    rate: float = 0.05
    clip: float | None = None

    def __post_init__(self) -> None:
        set_frozen(self, steps=check_int("steps", self.steps), rate=check_float("rate", self.rate, above=0))
        if self.clip is not None:
            set_frozen(self, clip=check_float("clip", self.clip, above=0))


@dataclass(frozen=True, kw_only=True)
class PointMethod(IterativeMethod):
    """A method that gives the best of several restarts, which are one batched dimension."""

    is_point: ClassVar[bool] = True

    restarts: int = 1
    prune: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        set_frozen(self, restarts=check_int("restarts", self.restarts))
        check_choice("prune", self.prune, (True, False))

    @property
    def pruning_steps(self) -> tuple[int, ...]:
        """The steps after which the worse half of the restarts is dropped: a quarter and a half of them."""
        return (self.steps // 4, self.steps // 2) if self.prune and self.restarts > 2 else ()


@dataclass(frozen=True, kw_only=True)
class MAP(PointMethod):
    """The greatest posterior density, by Adam on the log evidence plus the log prior.

    Args:
        steps: Steps of Adam.
        rate: The highest rate; it rises for a twentieth of the steps and falls to 0 as a cosine.
        clip: The greatest length of the gradient; None for any.
        restarts: Sets of parameters that are followed at once; the first begins at the net's own, others are drawn.
        prune: True drops the worse half of the restarts after a quarter and after a half of the steps.

    Raises:
        BNetError: Where an option is out of its range.

    >>> import bnet_transformer as bt
    >>> bt.MAP(restarts=4, steps=40).pruning_steps
    (10, 20)
    """

    name: ClassVar[str] = "map"


@dataclass(frozen=True, kw_only=True)
class EM(PointMethod):
    """Expectation maximisation: tables in closed form from expected counts, weights by Adam between.

    Where tables alone are learned every step is the closed form of all sentences: then `rate`, `clip` and `inner`, and
    the `batch` of `fit`, are refused.

    Args:
        inner: Steps of the weights from one closed form of the tables to the next.
        steps: Steps in all, those of the weights included.
        rate: The highest rate of the weights; it rises for a twentieth of the steps and falls to 0 as a cosine.
        clip: The greatest length of the gradient; None for any.
        restarts: Sets of parameters that are followed at once; the first begins at the net's own, others are drawn.
        prune: True drops the worse half of the restarts after a quarter and after a half of the steps.

    Raises:
        BNetError: Where an option is out of its range.

    >>> import bnet_transformer as bt
    >>> bt.EM(inner=5).settings["method"]
    'em'
    """

    name: ClassVar[str] = "em"

    inner: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        set_frozen(self, inner=check_int("inner", self.inner))


@dataclass(frozen=True, kw_only=True)
class SVI(IterativeMethod):
    """Stochastic variational inference by a mean-field guide: a Dirichlet for each row of a table, a Normal for each
    weight. The exact log evidence is a factor of the model; the spread of the posterior comes out too small.

    Args:
        steps: Steps of Adam.
        rate: The highest rate; it rises for a twentieth of the steps and falls to 0 as a cosine.
        clip: The greatest length of the gradient; None for any.
        draws: Draws of the guide that are the samples of the posterior.
        choices: `"exact"` sums choices out. `"sampled"` draws them from a table for each sentence and word, where they
            are too many to be summed; that is approximate.
        anneal: The power from which likelihoods rise to 1 over the first half of the steps, for sampled choices alone;
            None for 1 throughout.

    Raises:
        BNetError: Where an option is out of its range, or `anneal` is set with exact choices.

    >>> import bnet_transformer as bt
    >>> bt.SVI(choices="sampled", anneal=0.01).steps
    1000
    """

    name: ClassVar[str] = "svi"

    steps: int = 1000
    draws: int = 500
    choices: str = "exact"
    anneal: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        set_frozen(self, draws=check_int("draws", self.draws))
        check_choice("choices", self.choices, ("exact", "sampled"))
        if self.anneal is not None and (self.choices == "exact" or not 0 < check_float("anneal", self.anneal) <= 1):
            wanted = "the power from which likelihoods of sampled choices rise to 1, a share"
            raise BNetError("anneal", expected=wanted, actual=self.anneal, allowed="choices='sampled'")


@dataclass(frozen=True, kw_only=True)
class NUTS(Method):
    """Samples of the posterior by Pyro's No-U-Turn sampler on the exact log evidence.

    Args:
        chains: Chains, which take a draw each in turn.
        draws: Draws of each chain.
        warmup: Steps of each chain before its draws, in which step size and mass matrix are adapted.

    Raises:
        BNetError: Where an option is out of its range.

    >>> import bnet_transformer as bt
    >>> bt.NUTS(chains=2, draws=100).warmup
    300
    """

    name: ClassVar[str] = "nuts"

    chains: int = 4
    draws: int = 500
    warmup: int = 300

    def __post_init__(self) -> None:
        for option in ("chains", "draws", "warmup"):
            set_frozen(self, **{option: check_int(option, getattr(self, option))})

"""What every fit makes large: the exact log evidence of the sentences plus the log prior of the parameters.

One set of parameters is a mapping from name to tensor; several sets have one more dim in front, and are computed at
once (`torch.vmap`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bnet_transformer.compiler import Module, Request
from bnet_transformer.compiler.course import Course, states
from bnet_transformer.data import Batch, Evidence
from bnet_transformer.errors import BNetError, listed
from bnet_transformer.graph import Family
from bnet_transformer.inference.exact import batch_of, eliminated, full_shape, keeps
from bnet_transformer.inference.factors import Factor, prior_of, question_to_factors, table_entries
from bnet_transformer.network import Member, Network
from bnet_transformer.reference import ATOL

LOG_EVIDENCE, LOG_POSTERIOR = "log evidence", "log posterior density"  # what the parameters of a fit are judged by
Parameters = Mapping[str, Tensor]
Ask = Callable[[Course, list[Factor]], Any]


@dataclass(frozen=True)
class Learned:
    """What a fit learns: tables of log probabilities (with their Dirichlet concentration), and weights."""

    tables: Mapping[str, float]
    weights: tuple[str, ...]
    spread: float | None

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.tables, *self.weights)


def tables_of(network: Network) -> tuple[str, ...]:
    """The parameters of which a sample is told as probabilities."""
    owners = (m.owner for m in network.members if m.tpm.kind == "discrete" and "weight" not in m.parameters)
    return tuple(name for name in dict.fromkeys(f"{owner}.logits" for owner in owners) if name in network.shapes)


def as_parameters(network: Network, drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Draws as parameters: the tables, which are probabilities, as their logs."""
    return {name: value.log() if name in tables_of(network) else value for name, value in drawn.items()}


def learned_of(network: Network, readouts: tuple[Member, ...], learn: object, spread: float | None) -> Learned:
    """The parameters above the readouts that may be learned, those of `learn` where it names some."""
    read = {member.owner: member for readout in readouts for member in network.ancestral_members(readout)}
    known = [name for name in network.parameters if name in network.learnable and name.rpartition(".")[0] in read]
    if learn is not None:
        asked = listed("learn", learn, str)
        for name in asked:
            if name not in known:
                wanted = "learnable parameters above a readout"
                raise BNetError("learn", expected=wanted, got=name, allowed=", ".join(known))
        known = [name for name in known if name in asked]
    if not known:
        raise BNetError("net", expected="parameters that a fit changes", got="none")
    of = {name: read[name.removesuffix(".logits")] for name in known if name in tables_of(network)}
    tables = {name: member.tpm.priors().get("logits", 1.0) for name, member in of.items()}
    return Learned(tables, tuple(name for name in known if name not in tables), spread)


class Objective(nn.Module):
    """`log P(y | x)` of sentences by exact elimination, for one set of parameters or several."""

    def __init__(self, network: Network, learned: Learned, budget: int) -> None:
        super().__init__()
        self.module = Module(network)
        for value in self.module.store.values():
            value.requires_grad_(False)
        self.module.eval()
        self.network, self.learned, self.budget = network, learned, budget
        self.check_values = True
        self._kept: WeakKeyDictionary[Batch, tuple[Course, list[Factor]]] = WeakKeyDictionary()

    @property
    def device(self) -> torch.device:
        """Where its parameters lie."""
        found: torch.device = next(iter(self.module.store.values())).device
        return found

    @property
    def selectors(self) -> tuple[Family, ...]:
        """The discrete families that choose: something reads them."""
        return tuple(member.family for member in self.network.choices)

    @property
    def of_corpus(self) -> bool:
        """True where a selector is drawn once for all sentences."""
        return any(member.scope == "corpus" for member in self.network.choices)

    def forward(self, corpus: Batch, ask: Ask, do: Mapping[str, Tensor] | None = None) -> Any:
        """What is asked of the factors of the sentences."""
        if not self.learned.weights and do is None and corpus in self._kept:
            return ask(*self._with_tables(*self._kept[corpus]))
        request = Request((), corpus.x, corpus.mask, corpus.given, do, check_values=self.check_values)
        course, factors = question_to_factors(
            self.module, corpus.evidence, None, request, atol=ATOL, budget=self.budget
        )
        return ask(course, factors)

    def keep(self, corpus: Batch) -> None:
        """Keep the likelihoods of sentences that are asked about again and again, where only tables are learned."""
        if not self.learned.weights and corpus not in self._kept:
            with torch.no_grad():
                course, factors = self(corpus, lambda course, factors: (course, factors))
            if not any(f.told is not None and _table(f) in self.learned.tables for f in factors):
                course.values.clear()
                self._kept[corpus] = course, factors

    def _with_tables(self, course: Course, factors: list[Factor]) -> tuple[Course, list[Factor]]:
        """Kept factors, those of tables made anew."""
        now = {name: self.module.store[name.replace(".", "/")] for name in self.network.parameters}
        values = {**course.known, **{i: states(course, i) for i in course.layout.enumerated}}
        course = replace(course, parameters=now, values=values)
        return course, [
            f if f.told is not None else replace(f, table=prior_of(course, f.member.family.index, f.member))
            for f in factors
        ]

    def log_evidence(
        self, parameters: Parameters, corpus: Batch, power: float = 1.0, do: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """The log evidence of each sentence under a set of parameters, `[sentence]`; `[1]` of the whole corpus.

        With a `power` below 1 all factors are flattened: `log sum_c (P(c) P(y | c))^power / power`. What is set (`do`)
        is not summed.
        """

        def ask(course: Course, factors: list[Factor]) -> Tensor:
            return _flattened(course, factors, power)

        return torch.func.functional_call(self, _stored(parameters), (corpus, ask, do))  # type: ignore[no-any-return]

    def log_joint(self, parameters: Parameters, corpus: Batch, states: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """`log P(choices)` and `log P(y | choices)` of each sentence, `[sentence]`, where `states` has all choices.

        Each choice is evidence on its family, so it is given its parents in the way of every other factor: with their
        reach, at the entry that is picked, and without absent words.
        """
        chosen = {name: Evidence(value) for name, value in states.items()}

        def ask(course: Course, factors: list[Factor]) -> tuple[Tensor, Tensor]:
            priors = [factor for factor in factors if factor.member.family.name in states]
            likelihoods = [factor for factor in factors if factor.member.family.name not in states]
            return eliminated(course, priors), eliminated(course, likelihoods)

        together = replace(corpus, evidence={**corpus.evidence, **chosen})
        return torch.func.functional_call(self, _stored(parameters), (together, ask))  # type: ignore[no-any-return]

    def log_evidences(self, sets: Parameters, corpus: Batch, power: float = 1.0) -> Tensor:
        """The same for several sets of parameters at once, `[set, sentence]`."""
        return torch.vmap(lambda each: self.log_evidence(each, corpus, power))(dict(sets))

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

    def shares(self, parameters: Parameters, corpus: Batch, selector: Member) -> Tensor:
        """`P(c | x, y)` of a selector, `[sentence, .., head]`: how the log evidence changes with log probabilities."""
        family = selector.family

        def ask(course: Course, factors: list[Factor]) -> Tensor:
            place = course.layout.enumerated.index(family.index)
            batch = 1 if selector.scope == "corpus" else batch_of(factors, course)
            shape = full_shape(course, family.plates, family.words, batch)
            shape[place] = course.count_states(family.index)
            tilt = torch.zeros(shape, dtype=course.log_dtype, device=course.device)
            share: Tensor
            share = torch.func.grad(lambda tilt: eliminated(course, [*factors, Factor(selector, tilt)]).sum())(tilt)
            kept = [shape[k] for k in range(course.layout.batch, course.layout.rank) if keeps(course, family, k)]
            return share.movedim(place, -1).reshape(*kept, shape[place])

        return torch.func.functional_call(self, _stored(parameters), (corpus, ask))  # type: ignore[no-any-return]

    def counts(self, parameters: Parameters, corpus: Batch, power: float = 1.0) -> tuple[dict[str, Tensor], Tensor]:
        """How often each state of each learned table of choices is expected to have been drawn; the log evidence.

        The counts are the derivative of the log evidence by log probabilities (Darwiche 2003), those of states that
        evidence tells as well; all factors to a `power` as in `log_evidence`.
        """

        def ask(course: Course, factors: list[Factor]) -> tuple[dict[str, Tensor], Tensor]:
            drawn = [k for k, f in enumerate(factors) if _table(f) in self.learned.tables and _is_of_table(course, f)]
            shapes = {_table(factors[k]): course.parameters[_table(factors[k])].shape for k in drawn}
            zeros = {name: torch.zeros(s, dtype=course.log_dtype, device=course.device) for name, s in shapes.items()}

            def total(tilts: dict[str, Tensor]) -> Tensor:
                tilted, added = replace(course, parameters={**course.parameters, **tilts}), list(factors)
                for k in drawn:
                    added[k] = replace(factors[k], table=factors[k].table + table_entries(tilted, factors[k]))
                return _flattened(course, added, power).sum()

            counts: dict[str, Tensor]
            counts, evidence = torch.func.grad_and_value(total)(zeros)
            return counts, evidence

        return torch.func.functional_call(self, _stored(parameters), (corpus, ask))  # type: ignore[no-any-return]


def _flattened(course: Course, factors: list[Factor], power: float) -> Tensor:
    """The log evidence with all factors to a power, `log sum (prod factors)^power / power`."""
    if power == 1.0:
        return eliminated(course, factors)
    return eliminated(course, [replace(factor, table=factor.table * power) for factor in factors]) / power


def _table(factor: Factor) -> str:
    return f"{factor.member.owner}.logits"


def _is_of_table(course: Course, factor: Factor) -> bool:
    """True for the log probability of a choice, and not for evidence on a choice that is enumerated all the same."""
    return factor.told is None or factor.member.family.index not in course.layout.enumerated


def _stored(parameters: Parameters) -> dict[str, Tensor]:
    return {f"module.store.{name.replace('.', '/')}": value for name, value in parameters.items()}

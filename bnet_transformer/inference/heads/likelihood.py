"""How likely a run is whose heads are gated: what is observed under it, or the output of the full net around it."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bnet_transformer.compiler.course import Course
from bnet_transformer.compiler.module import Module, output_of
from bnet_transformer.compiler.plan import Plan
from bnet_transformer.data import Batch
from bnet_transformer.errors import BNetError, ReadingError
from bnet_transformer.inference.factors import evidence_in, likelihood_of, where_seen
from bnet_transformer.network import Network
from bnet_transformer.reference import ATOL


@dataclass(frozen=True)
class Likelihood(abc.ABC):
    """What is asked of a run: some families, and from them `log P` of each sentence, up to a constant."""

    families: tuple[str, ...]

    @abc.abstractmethod
    def log(self, module: Module, course: Course, plan: Plan, corpus: Batch, full: Tensor | None) -> Tensor:
        """`[sentence]`; `full` is the output of the run in which all heads are on."""

    def check(self, plan: Plan, network: Network) -> None:
        """Refuse nets that choose."""
        if plan.enumerated:
            name = network.members[plan.enumerated[0]].family.name
            raise ReadingError(name, expected="a net that chooses nothing", got="a choice that is open")


@final
@dataclass(frozen=True)
class Observed(Likelihood):
    """`log P(y | x, gates)` of what is observed."""

    def log(self, module: Module, course: Course, plan: Plan, corpus: Batch, full: Tensor | None) -> Tensor:
        total = torch.zeros(1, dtype=course.log_dtype, device=course.device)
        for name in self.families:
            member = module.network.member(name)
            told = evidence_in(course, member, corpus.evidence[name])
            table = where_seen(told, likelihood_of(course, member.family.index, member, told, ATOL))
            total = total + table.sum(tuple(range(1, table.dim())))
        return total


@final
@dataclass(frozen=True)
class Around(Likelihood):
    """`- |f(gates) - f(all on)|^2 / 2` of an output f: `log Normal(f(all on); f(gates), sigma)` times `sigma^2`."""

    def log(self, module: Module, course: Course, plan: Plan, corpus: Batch, full: Tensor | None) -> Tensor:
        found = self.output(module, course, plan)
        apart = found - (found if full is None else full)
        return -0.5 * apart.square().flatten(1).sum(-1).to(course.log_dtype)

    def output(self, module: Module, course: Course, plan: Plan) -> Tensor:
        """The output, `[sentence, ...]`: a value, the log probabilities of a discrete node, a mean."""
        return module.wanted(course, self.families[0], plan.wanted[0])


def likelihood_for(network: Network, corpus: Batch, output: str | None) -> Likelihood:
    """By what is observed, where something is; else around an output: by default what the module returns."""
    if corpus.evidence:
        return Observed(tuple(corpus.evidence))
    name = output_of(network) if output is None else output
    member = network.member(name)
    if not member.shape and not member.tpm.is_random:
        raise BNetError("output", expected="a family of vectors, or a readout", got=name)
    return Around((name,))

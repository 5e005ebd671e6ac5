"""The density that `svi` and `nuts` share, and `svi`: a guide with choices summed out, or (`Drawn`) drawn."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Categorical, biject_to, constraints, kl_divergence

from bnet_transformer._core.hashing import derive_seed
from bnet_transformer._core.torch_context import reseed
from bnet_transformer.data import Batch
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.fit.ascent import USUAL, RestartOptimizer, Sets, optimize
from bnet_transformer.inference.fit.methods import SVI, FitProblem
from bnet_transformer.inference.fit.objective import Objective
from bnet_transformer.inference.fit.point import at_home, with_learned
from bnet_transformer.inference.fit.result import Fit
from bnet_transformer.network import Network

SIMPLEX = constraints.simplex
NARROW = "mean-field: the posterior is taken as independent by parameter, and its spread comes out too small"
DRAWN = "; choices are drawn, not summed, and taken as independent of each other given the sentence"
DRAWS = 8  # of the choices of each sentence, for one gradient


class Model:
    """The model: Dirichlet tables, Normal weights, and the log evidence of sentences."""

    def __init__(self, objective: Objective) -> None:
        self.objective, self.learned = objective, objective.learned
        self.device = objective.device

    def prior(self, name: str) -> Any:
        """The prior of one parameter; tables as probabilities."""
        like = self.objective.network.parameters[name].detach().to(self.device)
        if name in self.learned.tables:
            found = dist.Dirichlet(torch.full_like(like, self.learned.tables[name]))
            return found.to_event(like.dim() - 1)
        return dist.Normal(torch.zeros_like(like), self.learned.spread or 1.0).to_event(like.dim())

    def parameters(self, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
        """Draws as parameters: the tables, which are probabilities, as their logs."""
        return {name: value.log() if name in self.learned.tables else value for name, value in drawn.items()}

    def potential(self, corpus: Batch, z: dict[str, Tensor]) -> Tensor:
        """Minus the log density of parameters told without constraints."""
        drawn, total = {}, torch.zeros((), dtype=self.objective.network.dtype, device=self.device)
        for name in self.learned.names:
            drawn[name] = value = z[site(name)]
            if name in self.learned.tables:
                to = biject_to(SIMPLEX)
                drawn[name] = to(value)
                total = total + to.log_abs_det_jacobian(value, drawn[name]).sum()
            total = total + self.prior(name).log_prob(drawn[name])
        return -(total + self.objective.log_evidence(self.parameters(drawn), corpus).sum())


def site(name: str) -> str:
    """The name of a parameter as Pyro has it."""
    return name.replace(".", "_")


class Variational(RestartOptimizer):
    """A fit by a mean-field guide: a Dirichlet for each row of a table, a Normal for each weight."""

    def __init__(self, problem: FitProblem, method: SVI) -> None:
        super().__init__(problem, method)
        self.model = Model(self.objective)
        values: dict[str, Tensor] = {}
        for name, value in self.sets.values.items():
            if name in self.model.learned.tables:
                rows = value[0].numel() // value.shape[-1]  # as if each sentence had told one row its state
                values[f"log_concentration/{name}"] = (value.softmax(-1) * len(self.corpus) / rows + 1.0).log()
            else:
                values[f"mean/{name}"] = value.clone()
                values[f"log_spread/{name}"] = torch.full_like(value, -3.0)
        self.begin(values)

    def begin(self, values: dict[str, Tensor]) -> None:
        """Learn these numbers, from these values."""
        self.sets = Sets.of(values)
        self.best = self.best[0], 0, self.sets.one(0)

    def guide(self, told: dict[str, Tensor]) -> dict[str, Any]:
        """The distribution of each parameter, told by what is learned of it."""
        found = {}
        for name in self.model.learned.names:
            if name in self.model.learned.tables:
                concentration = told[f"log_concentration/{name}"].exp()
                found[name] = dist.Dirichlet(concentration).to_event(concentration.dim() - 1)
            else:
                mean = told[f"mean/{name}"]
                found[name] = dist.Normal(mean, told[f"log_spread/{name}"].exp()).to_event(mean.dim())
        return found

    def bound_and_grad(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The evidence lower bound per sentence, by one draw of the parameters, and its gradient.

        Under torchrun all ranks draw the same; each has the likelihood of its share of the sentences, and its part of
        the divergence from the prior, which is one part in so many.
        """
        reseed(derive_seed(self.seed, "draw", step), self.ranks.device)
        leaves = {name: value.detach().requires_grad_() for name, value in self.sets.values.items()}
        told = {name: value[0] for name, value in leaves.items()}
        with pyro.validation_enabled(False):  # a number that is none shows in the bound
            guide = self.guide(told)
            drawn = {name: of.rsample() for name, of in guide.items()}
            kl = torch.stack([kl_divergence(of, self.model.prior(name)).sum() for name, of in guide.items()]).sum()
            kl = kl / len(self.corpus) / self.ranks.world
            likelihood, climbed = self.likelihood(self.model.parameters(drawn), told, step)
        gradients = torch.autograd.grad(climbed - kl, list(leaves.values()))
        whole = {name: self.ranks.all_reduce(each) for name, each in zip(leaves, gradients, strict=True)}
        return self.ranks.all_reduce((likelihood - kl).detach()[None]), whole

    def likelihood(self, parameters: dict[str, Tensor], told: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        """This rank's part of the mean log evidence of the sentences of a step, and what has the gradient to follow."""
        which = self.minibatch_indices(step)
        part = self.corpus if which is None else self.corpus.take(which)
        if which is None and len(self.full) == 1:
            part = self.full[0]  # whose likelihoods may be kept
        elif self.ranks.world > 1:
            part = self.ranks.shard(part)
        zero = torch.stack([0 * value.sum() for value in parameters.values()]).sum()
        evidence = self.objective.log_evidence(parameters, part).sum() if len(part) else zero
        mean = evidence / (len(self.corpus) if which is None else len(which))
        return mean, mean

    @property
    def judged_by(self) -> str:
        """What `scores` measures."""
        return "log evidence at the mean of the guide"

    def scores(self) -> list[float]:
        """The mean log evidence of a sentence at the mean of the guide."""
        means = self.mean()
        total = torch.zeros((), dtype=self.objective.network.dtype, device=self.ranks.device)
        with torch.no_grad():
            for part in self.judges:
                total = total + self.objective.log_evidence(means, part).sum()
        return [float(self.ranks.all_reduce(total)) / len(self.judge)]

    def mean(self) -> dict[str, Tensor]:
        """The mean of the guide, as parameters."""
        return self.model.parameters({name: of.mean for name, of in self.guide(self.sets.one(0)).items()})

    def choices(self) -> dict[str, Tensor]:
        """The approximate posterior of the choices: none, where they are summed out."""
        return {}


class Drawn(Variational):
    """The same where choices are too many to be summed: they are drawn, each from a table of its own.

    The gradient of the tables is the score function's, each draw measured against the mean of the others.
    """

    sums_choices = False

    def __init__(self, problem: FitProblem, method: SVI) -> None:
        super().__init__(problem, method)
        network = self.objective.network
        observed = [family.name for family in self.objective.selectors if family.name in self.corpus.evidence]
        if observed:
            got = f"'sampled', with {', '.join(observed)} observed"
            raise BNetError("choices", expected="'exact': a choice that is observed is not drawn", got=got)
        words = {stack: value.shape[1] for stack, value in self.corpus.x.items()}
        values = dict(self.sets.values)
        for family in self.objective.selectors:
            member = network.members[family.index]
            if member.tpm.states is None or member.scope == "corpus":
                kind = "drawn for the corpus" if member.scope == "corpus" else "a word that is read"
                wanted = "choices of sentences or words, each with a fixed number of states"
                raise BNetError("choices", expected=wanted, got=f"{family.name}, {kind}", allowed="exact")
            shape = [len(self.corpus), *(network.graph.sizes[plate] for plate in family.plates)]
            shape += [words[family.words]] if family.words is not None else []
            start = torch.zeros(1, *shape, member.tpm.states, dtype=network.dtype, device=self.ranks.device)
            values[f"choice/{family.name}"] = start
        self.begin(values)

    def likelihood(self, parameters: dict[str, Tensor], told: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        """This rank's part of the mean bound of the sentences of a step, by a few draws of their choices."""
        which = self.minibatch_indices(step)
        which = torch.arange(len(self.corpus), device=self.ranks.device) if which is None else which
        joint, guess = self._draw(parameters, told, which, self.method.likelihood_power(step))
        signal = (joint - guess).detach()
        others = (signal.sum(0) - signal) / (DRAWS - 1)
        count = DRAWS * len(which)
        return signal.sum() / count, (joint + (signal - others) * guess).sum() / count

    @property
    def judged_by(self) -> str:
        """What `scores` measures."""
        return "lower bound on the log evidence at the mean of the guide"

    def scores(self) -> list[float]:
        """The mean of the bound of a sentence at the mean of the guide, by the same draws every time."""
        reseed(derive_seed(self.seed, "judge"), self.ranks.device)
        with torch.no_grad():
            places = torch.arange(len(self.corpus), device=self.ranks.device).split(USUAL)
            means, told = self.mean(), self.sets.one(0)
            parts = [torch.sub(*self._draw(means, told, which)).mean(0) for which in places]
        return [float(self.ranks.all_reduce(torch.cat(parts).sum())) / len(self.corpus)]

    def choices(self) -> dict[str, Tensor]:
        """The approximate posterior of every choice, `[sentence, *plates, word, state]`."""
        return {name[7:]: v[0].softmax(-1) for name, v in self.sets.values.items() if name.startswith("choice/")}

    def _draw(
        self, parameters: dict[str, Tensor], told: dict[str, Tensor], which: Tensor, power: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """`log P(y, choices)` and `log q(choices)` of a few draws for some sentences, `[draw, sentence]`.

        Under torchrun all ranks draw for all of these sentences, and each tells of its share.
        """
        network, share = self.objective.network, self.ranks.shard(which)
        part = self.corpus.take(share)
        states: dict[str, Tensor] = {}
        guess = torch.zeros(DRAWS, len(share), dtype=network.dtype, device=which.device)
        for family in self.objective.selectors:
            logits = told[f"choice/{family.name}"]
            s = Categorical(logits=logits[which], validate_args=False).sample((DRAWS,))
            s = self.ranks.shard(s.transpose(0, 1)).transpose(0, 1)
            log_q = Categorical(logits=logits[share], validate_args=False).log_prob(s)
            present = None if part.mask is None or family.words is None else part.mask.get(family.words)
            if present is not None:  # log P(choices) has no terms of absent words; with theirs, log q is too low
                log_q = log_q * present[:, *[None] * len(family.plates)]
            guess = guess + (log_q.flatten(2).sum(2) if log_q.dim() > 2 else log_q)
            states[family.name] = s.flatten(0, 1)
        if not len(share):
            return guess, guess
        repeated = self.corpus.take(share.repeat(DRAWS))
        prior, likelihood = self.objective.log_joint(parameters, repeated, states)
        return (prior + power * likelihood).reshape(DRAWS, -1), guess


def fit_svi(problem: FitProblem, method: SVI) -> Fit[Network]:
    """A fit by a mean-field guide.

    Args:
        problem: What is fitted.
        method: The options.

    Returns:
        The fit, with draws of the guide as samples.
    """
    network, is_drawn = problem.objective.network, method.choices == "sampled"
    run = (Drawn if is_drawn else Variational)(problem, method)
    is_finished = optimize(run, problem.loop)
    reseed(derive_seed(problem.seed, "posterior"), problem.ranks.device)
    samples = {name: of.sample((1, method.draws)) for name, of in run.guide(run.sets.one(0)).items()}
    return Fit(
        with_learned(network, run.mean()),
        method.name,
        len(problem.corpus),
        "the sentences learned from",
        finished=is_finished,
        approximate=NARROW + (DRAWN if is_drawn else ""),
        learned=problem.objective.learned.names,
        budget=problem.objective.budget,
        bounds=tuple(run.bounds),
        measured=tuple(run.measured),
        samples=at_home(network, samples),
        choices=run.choices(),
        judged_by=run.judged_by,
    )

"""The density that `svi` and `nuts` share, and `svi`: a guide with choices summed out, or (`Drawn`) drawn."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import TraceMeanField_ELBO
from torch import Tensor
from torch.distributions import biject_to, constraints, kl_divergence

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
    """The model as Pyro takes it: Dirichlet tables, Normal weights, and the log evidence of sentences as a factor."""

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

    def __call__(self, corpus: Batch, weight: float) -> None:
        """Draw the parameters; weigh them by the sentences, each of which stands for so many."""
        drawn = {name: pyro.sample(site(name), self.prior(name)) for name in self.learned.names}
        drawn = {name: value.log() if name in self.learned.tables else value for name, value in drawn.items()}
        if len(corpus):
            pyro.factor("evidence", self.objective.log_evidence(drawn, corpus).sum() * weight)

    def potential(self, corpus: Batch, z: dict[str, Tensor]) -> Tensor:
        """Minus the log density of parameters told without constraints."""
        parameters, total = {}, torch.zeros((), dtype=self.objective.network.dtype, device=self.device)
        for name in self.learned.names:
            value = z[site(name)]
            if name in self.learned.tables:
                to = biject_to(SIMPLEX)
                theta = to(value)
                total = total + to.log_abs_det_jacobian(value, theta).sum()
                value, parameters[name] = theta, theta.log()
            else:
                parameters[name] = value
            total = total + self.prior(name).log_prob(value)
        return -(total + self.objective.log_evidence(parameters, corpus).sum())


def site(name: str) -> str:
    """The name of a parameter as Pyro has it."""
    return name.replace(".", "_")


@contextmanager
def _as_it_was() -> Iterator[None]:
    """An error of ours as it was: Pyro's trace makes another one of its text and the shapes of all parameters."""
    try:
        yield
    except BNetError as error:
        found: BaseException = error
        while isinstance(found, BNetError) and found.expected is None and found.__cause__ is not None:
            found = found.__cause__
        raise found from None


class Variational(RestartOptimizer):
    """A fit by a mean-field guide: a Dirichlet for each row of a table, a Normal for each weight."""

    def __init__(self, problem: FitProblem, method: SVI) -> None:
        super().__init__(problem, method)
        self.own = self.full[0] if len(self.full) == 1 else self.ranks.shard(self.corpus)
        self.model = Model(self.objective)
        values: dict[str, Tensor] = {}
        for name, value in self.sets.values.items():
            if name in self.model.learned.tables:
                rows = value[0].numel() // value.shape[-1]  # as if each sentence had told one row its state
                values[f"log_concentration/{name}"] = (value.softmax(-1) * len(self.corpus) / rows + 1.0).log()
            else:
                values[f"mean/{name}"] = value.clone()
                values[f"log_spread/{name}"] = torch.full_like(value, -3.0)
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
        """The evidence lower bound per sentence, by one draw, and its gradient.

        Under torchrun all ranks draw the same; each has the likelihood of its share of the sentences, and its part of
        the divergence from the prior, which is one part in so many.
        """
        reseed(derive_seed(self.seed, "draw", step), self.ranks.device)
        leaves = {name: value.detach().requires_grad_() for name, value in self.sets.values.items()}
        told = {name: value[0] for name, value in leaves.items()}

        def guide(corpus: Batch, weight: float) -> None:
            for name, of in self.guide(told).items():
                pyro.sample(site(name), of)

        total, world = len(self.corpus), self.ranks.world
        with (
            _as_it_was(),
            pyro.validation_enabled(False),
            pyro.poutine.scale(scale=1 / world),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", r"Encountered [+-]?(NaN|inf)", UserWarning)  # our own error tells it
            which = self.minibatch_indices(step)
            share = self.own if which is None else self.corpus.take(self.ranks.shard(which))
            weight = world * total / (total if which is None else len(which))
            loss = TraceMeanField_ELBO().differentiable_loss(self.model, guide, share, weight)
        return self.sum_over_ranks(-loss / total, leaves)

    def sum_over_ranks(self, bound: Tensor, leaves: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The bound and its gradient, `[set]`, from this rank's part of the bound."""
        gradients = torch.autograd.grad(bound, list(leaves.values()))
        whole = {name: self.ranks.all_reduce(each) for name, each in zip(leaves, gradients, strict=True)}
        return self.ranks.all_reduce(bound.detach()[None]), whole

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
        means = {name: of.mean for name, of in self.guide(self.sets.one(0)).items()}
        return {name: value.log() if name in self.model.learned.tables else value for name, value in means.items()}

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
        self.sets = Sets.of(values)
        self.best = self.best[0], 0, self.sets.one(0)

    def bound_and_grad(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The evidence lower bound per sentence by a few draws, and its gradient."""
        reseed(derive_seed(self.seed, "draw", step), self.ranks.device)
        leaves = {name: value.detach().requires_grad_() for name, value in self.sets.values.items()}
        told = {name: value[0] for name, value in leaves.items()}
        guide = self.guide(told)
        drawn = {name: of.rsample() for name, of in guide.items()}
        which = self.minibatch_indices(step)
        which = torch.arange(len(self.corpus), device=self.ranks.device) if which is None else which
        joint, guess = self._draw(drawn, told, which, self.method.likelihood_power(step))
        signal = (joint - guess).detach()
        others = (signal.sum(0) - signal) / (DRAWS - 1)
        kl = torch.stack([kl_divergence(of, self.model.prior(name)).sum() for name, of in guide.items()]).sum()
        kl = kl / len(self.corpus) / self.ranks.world
        climbed = (joint + (signal - others) * guess).sum() / (DRAWS * len(which)) - kl
        _, gradient = self.sum_over_ranks(climbed, leaves)
        bound = signal.sum() / (DRAWS * len(which)) - kl.detach()
        return self.ranks.all_reduce(bound[None]), gradient

    @property
    def judged_by(self) -> str:
        """What `scores` measures."""
        return "lower bound on the log evidence at the mean of the guide"

    def scores(self) -> list[float]:
        """The mean of the bound of a sentence at the mean of the guide, by the same draws every time."""
        told = self.sets.one(0)
        means = {name: of.mean for name, of in self.guide(told).items()}
        reseed(derive_seed(self.seed, "judge"), self.ranks.device)
        with torch.no_grad():
            places = torch.arange(len(self.corpus), device=self.ranks.device).split(USUAL)
            parts = [torch.sub(*self._draw(means, told, which)).mean(0) for which in places]
        return [float(self.ranks.all_reduce(torch.cat(parts).sum())) / len(self.corpus)]

    def choices(self) -> dict[str, Tensor]:
        """The approximate posterior of every choice, `[sentence, *plates, word, state]`."""
        return {name[7:]: v[0].softmax(-1) for name, v in self.sets.values.items() if name.startswith("choice/")}

    def _draw(
        self, drawn: dict[str, Tensor], told: dict[str, Tensor], which: Tensor, power: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """`log P(y, choices)` and `log q(choices)` of a few draws for some sentences, `[draw, sentence]`.

        Under torchrun all ranks draw for all of these sentences, and each tells of its share.
        """
        network, share = self.objective.network, self.ranks.shard(which)
        tables = self.model.learned.tables
        parameters = {name: value.log() if name in tables else value for name, value in drawn.items()}
        part = self.corpus.take(share)
        states: dict[str, Tensor] = {}
        guess = torch.zeros(DRAWS, len(share), dtype=network.dtype, device=which.device)
        for family in self.objective.selectors:
            logits = told[f"choice/{family.name}"]
            s = torch.distributions.Categorical(logits=logits[which], validate_args=False).sample((DRAWS,))
            s = self.ranks.shard(s.transpose(0, 1)).transpose(0, 1)
            log_q = torch.distributions.Categorical(logits=logits[share], validate_args=False).log_prob(s)
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

"""`svi`: posterior samples of the learned parameters from a guide.

The guide is mean-field, with the choices summed out (`VariationalOptimizer`) or sampled (`SampledChoicesOptimizer`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from bnet_transformer._core.checks import check_choice, check_float, check_int, check_options
from bnet_transformer._core.files import derive_seed
from bnet_transformer._core.tensors import seed_rngs
from bnet_transformer.data.checks import get_plate_sizes
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError
from bnet_transformer.learning.fit.adam import GradientOptimizer, IterativeMethod
from bnet_transformer.learning.fit.objective import FitObjective, FitProblem, to_parameters
from bnet_transformer.learning.fit.restarts import (
    DEFAULT_BATCH_SIZE,
    ParameterSets,
    build_fit,
    optimize,
    to_network_devices,
)
from bnet_transformer.learning.fit.result import Fit

MEAN_FIELD_NOTE = "the mean-field guide treats parameters as independent in the posterior and underestimates its spread"
SAMPLED_CHOICES_NOTE = "; choices are sampled, not summed, and treated as independent given the sentence"
CHOICE_SAMPLES = 8  # samples of the choices of each sentence for one gradient


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


def get_prior(objective: FitObjective, name: str) -> Any:
    """Return the prior of a learned parameter: Dirichlet of a table of probabilities, Normal of weights."""
    like, learned = objective.network.parameters[name].detach().to(objective.device), objective.learned
    if name in learned.tables:
        return dist.Dirichlet(learned.tables[name].to(like).expand(like.shape)).to_event(like.dim() - 1)
    return dist.Normal(torch.zeros_like(like), learned.spread or 1.0).to_event(like.dim())


class VariationalOptimizer(GradientOptimizer):
    """A fit by a mean-field guide: a Dirichlet for each row of a table, a Normal for each weight.

    The parameters of the guide are `log_concentration/`, `mean/` and `log_spread/`, each followed by the name of the
    parameter.
    """

    def __init__(self, problem: FitProblem, method: SVI) -> None:
        super().__init__(problem, method)
        self.network, self.learned = self.objective.network, self.objective.learned
        values: dict[str, Tensor] = {}
        for name, value in self.sets.values.items():
            if name in self.learned.tables:
                rows = value[0].numel() // value.shape[-1]  # the initial counts: each sentence observed one row once
                values[f"log_concentration/{name}"] = (value.softmax(-1) * len(self.corpus) / rows + 1.0).log()
            else:
                values[f"mean/{name}"] = value.clone()
                values[f"log_spread/{name}"] = torch.full_like(value, -3.0)
        self.initialize(values)

    def initialize(self, values: dict[str, Tensor]) -> None:
        """Set the parameters of the guide and reset the optimizer."""
        self.sets = ParameterSets.create(values)
        self.best = self.best[0], 0, self.sets.get(0)

    def guide(self, guide_parameters: dict[str, Tensor]) -> dict[str, Any]:
        """Return the distribution of each parameter, given the parameters of the guide."""
        distributions = {}
        for name in self.learned.names:
            if name in self.learned.tables:
                concentration = guide_parameters[f"log_concentration/{name}"].exp()
                distributions[name] = dist.Dirichlet(concentration).to_event(concentration.dim() - 1)
            else:
                mean = guide_parameters[f"mean/{name}"]
                spread = guide_parameters[f"log_spread/{name}"].exp()
                distributions[name] = dist.Normal(mean, spread).to_event(mean.dim())
        return distributions

    def bound_and_grad(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the evidence lower bound per sentence from draws of the guide, `[1]`, and its gradient.

        Under torchrun all ranks draw the same parameters, and each computes a part of the bound.
        """
        seed_rngs(derive_seed(self.seed, "draw", step), self.ranks.device)
        leaves = {name: value.detach().requires_grad_() for name, value in self.sets.values.items()}
        guide_parameters = {name: value[0] for name, value in leaves.items()}
        # ELBO = E_q[log P(y | x, theta)] - KL(q || prior). Draws from both guides, Normal and Dirichlet, are
        # reparameterised (Kingma and Welling 2014; Figurnov, Mohamed and Mnih 2018), and the KL is exact, so one draw
        # is enough. The part of this rank is the likelihood of its shard and an equal part of the KL.
        with pyro.validation_enabled(False):  # a NaN makes the bound invalid
            guide = self.guide(guide_parameters)
            draws = {name: q.rsample() for name, q in guide.items()}
            parts = [kl_divergence(q, get_prior(self.objective, name)).sum() for name, q in guide.items()]
            kl = torch.stack(parts).sum() / len(self.corpus) / self.ranks.world_size
            likelihood, surrogate = self.likelihood(to_parameters(self.network, draws), guide_parameters, step)
        gradients = torch.autograd.grad(surrogate - kl, list(leaves.values()))
        reduced = {name: self.ranks.all_reduce(gradient) for name, gradient in zip(leaves, gradients, strict=True)}
        return self.ranks.all_reduce((likelihood - kl).detach()[None]), reduced

    def likelihood(
        self, parameters: dict[str, Tensor], guide_parameters: dict[str, Tensor], step: int
    ) -> tuple[Tensor, Tensor]:
        """Compute this rank's part of the mean log evidence of a step's sentences, and a surrogate for its gradient."""
        indices = self.minibatch_indices(step)
        if indices is None and len(self.corpus_parts) == 1:
            part = self.corpus_parts[0]  # the factors of this batch may be cached
        else:
            part = self.ranks.shard(self.corpus if indices is None else self.corpus.take(indices))
        zero = next(iter(parameters.values())).new_zeros(())
        evidence = self.objective.log_evidence(parameters, part).sum() if len(part) else zero
        mean = evidence / (len(self.corpus) if indices is None else len(indices))
        return mean, mean

    @property
    def criterion(self) -> str:
        """The name of the quantity in `scores`."""
        return "log evidence at the mean of the guide"

    def scores(self) -> list[float]:
        """Return the log evidence per sentence at the mean of the guide, as a list of one value."""
        means = self.mean()
        total = torch.zeros((), dtype=self.network.dtype, device=self.ranks.device)
        with torch.no_grad():
            for part in self.validation_parts:
                total = total + self.objective.log_evidence(means, part).sum()
        return [float(self.ranks.all_reduce(total)) / len(self.validation)]

    def mean(self) -> dict[str, Tensor]:
        """Return the mean of the guide, as parameters of the net."""
        means = {name: q.mean for name, q in self.guide(self.sets.get(0)).items()}
        return to_parameters(self.network, means)

    def sample(self, count: int) -> dict[str, Tensor]:
        """Draw samples from the guide, `[1, draw, *shape]`, with tables as probabilities."""
        return {name: q.sample((1, count)) for name, q in self.guide(self.sets.get(0)).items()}


class SampledChoicesOptimizer(VariationalOptimizer):
    """A mean-field guide that samples the choices, for nets whose choices have too many joint states to be summed.

    Each choice of each sentence and word has a table of logits in the guide, `choice/...`.
    """

    has_summed_choices = False

    def __init__(self, problem: FitProblem, method: SVI) -> None:
        super().__init__(problem, method)
        self.anneal, self.is_comparable = method.anneal or 1.0, method.anneal is None
        names = [spec.group.name for spec in self.network.choices]
        observed = [name for name in names if name in self.corpus.evidence]
        if observed:
            actual = f"'sampled', with {', '.join(observed)} observed"
            expected = "'exact', because observed choices cannot be sampled"
            raise BNetError("choices", expected=expected, actual=actual)
        words = {stack: value.shape[1] for stack, value in self.corpus.x.items()}
        values = dict(self.sets.values)
        for spec in self.network.choices:
            name = spec.group.name
            if spec.tpm.states is None or spec.scope == "corpus":
                kind = "drawn for the corpus" if spec.scope == "corpus" else "the position of a word"
                expected = "choices of sentences or words, each with a fixed number of states"
                raise BNetError("choices", expected=expected, actual=f"{name}, {kind}", hint="Use choices='exact'")
            shape = (1, len(self.corpus), *get_plate_sizes(self.network, spec, words), spec.tpm.states)
            values[f"choice/{name}"] = torch.zeros(shape, dtype=self.network.dtype, device=self.ranks.device)
        self.initialize(values)

    def likelihood(
        self, parameters: dict[str, Tensor], guide_parameters: dict[str, Tensor], step: int
    ) -> tuple[Tensor, Tensor]:
        """Compute this rank's part of the mean bound of the sentences of a step, from samples of their choices."""
        # Discrete samples have no reparameterised gradient: the surrogate has the score function gradient,
        # E[(f - baseline) grad log q], with the mean of the other samples as baseline. A baseline that does not depend
        # on the sample keeps the estimate unbiased and reduces its variance (Kool, van Hoof and Welling 2019, RLOO).
        indices = self.minibatch_indices(step)
        indices = torch.arange(len(self.corpus), device=self.ranks.device) if indices is None else indices
        power = min(1.0, self.anneal + (1 - self.anneal) * 2 * step / self.steps)
        joint, log_q = self._sample_log_probs(parameters, guide_parameters, indices, power)
        signal = (joint - log_q).detach()
        baseline = (signal.sum(0) - signal) / (CHOICE_SAMPLES - 1)
        count = CHOICE_SAMPLES * len(indices)
        return signal.sum() / count, (joint + (signal - baseline) * log_q).sum() / count

    @property
    def criterion(self) -> str:
        """The name of the quantity in `scores`."""
        return "lower bound on the log evidence at the mean of the guide"

    def scores(self) -> list[float]:
        """Return the bound per sentence at the mean of the guide; the seed is fixed, so that steps are comparable."""
        seed_rngs(derive_seed(self.seed, "judge"), self.ranks.device)
        with torch.no_grad():
            batches = torch.arange(len(self.corpus), device=self.ranks.device).split(DEFAULT_BATCH_SIZE)
            means, guide_parameters = self.mean(), self.sets.get(0)
            parts = [torch.sub(*self._sample_log_probs(means, guide_parameters, idx)).mean(0) for idx in batches]
        return [float(self.ranks.all_reduce(torch.cat(parts).sum())) / len(self.corpus)]

    def _sample_log_probs(
        self, parameters: dict[str, Tensor], guide_parameters: dict[str, Tensor], indices: Tensor, power: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Sample the choices of some sentences; return `log P(y, choices)` and `log q(choices)`, `[draw, sentence]`.

        Under torchrun all ranks draw the samples of all these sentences, and each rank returns its shard.
        """
        shard = self.ranks.shard(indices)
        part = self.corpus.take(shard)
        states: dict[str, Tensor] = {}
        log_q_sum = torch.zeros(CHOICE_SAMPLES, len(shard), dtype=self.network.dtype, device=indices.device)
        for spec in self.network.choices:
            group = spec.group
            logits = guide_parameters[f"choice/{group.name}"]
            s = Categorical(logits=logits[indices], validate_args=False).sample((CHOICE_SAMPLES,))
            s = self.ranks.shard(s.transpose(0, 1)).transpose(0, 1)
            log_q = Categorical(logits=logits[shard], validate_args=False).log_prob(s)
            # log P(choices) has no terms for absent words, so log q must have none.
            if (present := part.get_present(spec)) is not None:
                log_q = log_q * present[:, *[None] * len(group.plates)]
            log_q_sum = log_q_sum + (log_q.flatten(2).sum(2) if log_q.dim() > 2 else log_q)
            states[group.name] = s.flatten(0, 1)
        if not len(shard):
            return log_q_sum, log_q_sum
        repeated = self.corpus.take(shard.repeat(CHOICE_SAMPLES))
        prior, likelihood = self.objective.log_joint(parameters, repeated, states)
        return (prior + power * likelihood).reshape(CHOICE_SAMPLES, -1), log_q_sum


def fit_svi(problem: FitProblem, method: SVI) -> Fit[Network]:
    """Fit a guide.

    Args:
        problem: The fit problem.
        method: The options.

    Returns:
        The fit, with draws from the guide as samples.
    """
    network, is_sampled = problem.objective.network, method.choices == "sampled"
    optimizer = (SampledChoicesOptimizer if is_sampled else VariationalOptimizer)(problem, method)
    is_finished = optimize(optimizer, problem.loop)
    seed_rngs(derive_seed(problem.seed, "posterior"), problem.ranks.device)
    learned, samples = optimizer.sets.get(0), optimizer.sample(method.draws)
    return build_fit(
        problem,
        method,
        optimizer.mean(),
        finished=is_finished,
        approximate=MEAN_FIELD_NOTE + (SAMPLED_CHOICES_NOTE if is_sampled else ""),
        bounds=tuple(optimizer.bounds),
        measured=tuple(optimizer.measured),
        samples=to_network_devices(network, samples),
        choices={name[7:]: v.softmax(-1) for name, v in learned.items() if name.startswith("choice/")},
        criterion=optimizer.criterion,
    )

"""`svi`: posterior samples of the learned parameters from a guide.

The guide is mean-field with the choices summed out (`VariationalOptimizer`) or sampled (`SampledChoicesOptimizer`), or
Normal in coordinates with a fixed gauge (`NormalGuideOptimizer`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from bnet_transformer._core.files import derive_seed
from bnet_transformer._core.stats import MAX_KHAT, effective_sample_size, resample, smooth_weights
from bnet_transformer._core.tensors import seed_rngs
from bnet_transformer.data.checks import get_plate_sizes
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError
from bnet_transformer.learning.fit.adam import (
    DEFAULT_BATCH_SIZE,
    GradientOptimizer,
    ParameterSets,
    build_fit,
    optimize,
    to_network_devices,
)
from bnet_transformer.learning.fit.coordinates import Coordinates
from bnet_transformer.learning.fit.diagnostics import describe_weighted
from bnet_transformer.learning.fit.laplace import (
    MIN_PROPOSALS,
    check_size,
    choose_approximation,
    describe_mode,
    evaluate_draws,
    find_mode,
    find_uninformed,
    to_double,
)
from bnet_transformer.learning.fit.objective import SVI, FitObjective, FitProblem, Laplace, to_parameters
from bnet_transformer.learning.fit.result import Fit

MEAN_FIELD_NOTE = "the mean-field guide treats parameters as independent in the posterior and underestimates its spread"
SAMPLED_CHOICES_NOTE = "; choices are sampled, not summed, and treated as independent given the sentence"
CHOICE_SAMPLES = 8  # samples of the choices of each sentence for one gradient
INIT_FACTOR = 0.01  # standard deviation of the initial factor of the low-rank guide
GUIDE_DRAWS = 8  # draws from a Normal guide for one gradient


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

    note: ClassVar[str] = MEAN_FIELD_NOTE
    notes: tuple[str, ...] = ()
    khat: float | None = None
    effective_sample_size: float | None = None  # of reweighted draws
    has_start: bool = True  # False if Ctrl-C ended the search for a start

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
        bound, surrogate = self.draw_bound({name: value[0] for name, value in leaves.items()}, step)
        gradients = torch.autograd.grad(surrogate, list(leaves.values()))
        reduced = {name: self.ranks.all_reduce(gradient) for name, gradient in zip(leaves, gradients, strict=True)}
        return self.ranks.all_reduce(bound.detach()[None]), reduced

    def draw_bound(self, guide_parameters: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        """Compute this rank's part of the bound from one draw of the parameters, and a surrogate for its gradient.

        It is the likelihood of the shard and an equal part of the KL divergence from the prior.
        """
        # ELBO = E_q[log P(y | x, theta)] - KL(q || prior). Draws from both guides, Normal and Dirichlet, are
        # reparameterised (Kingma and Welling 2014; Figurnov, Mohamed and Mnih 2018), and the KL is exact, so one draw
        # is enough.
        with pyro.validation_enabled(False):  # a NaN makes the bound invalid
            guide = self.guide(guide_parameters)
            draws = {name: q.rsample() for name, q in guide.items()}
            parts = [kl_divergence(q, get_prior(self.objective, name)).sum() for name, q in guide.items()]
            kl = torch.stack(parts).sum() / len(self.corpus) / self.ranks.world_size
            likelihood, surrogate = self.likelihood(to_parameters(self.network, draws), guide_parameters, step)
        return likelihood - kl, surrogate - kl

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


class NormalGuideOptimizer(VariationalOptimizer):
    """A Normal guide with a low-rank or full-rank covariance, in standard deviations w of the Laplace approximation.

    The guide is a Normal distribution of w, which starts at Normal(0, 1), the Laplace approximation
    (`approximation.Approximation`). Its parameters are `mean`, `log_scale` and `factor`.
    """

    note: ClassVar[str] = "a Normal guide at one mode; other modes are not represented"

    def __init__(self, problem: FitProblem, method: SVI) -> None:
        double = to_double(problem)
        self.coordinates = Coordinates(double.objective, double.corpus)
        check_size(self.coordinates)
        seed = derive_seed(problem.seed, "mode")
        self.mode = find_mode(double, self.coordinates, Laplace().restarts, seed)
        self.has_start = self.mode.is_finished
        generator = torch.Generator().manual_seed(derive_seed(problem.seed, "approximation"))
        self.approximation = choose_approximation(self.coordinates, double.corpus, self.mode, generator).approximation
        shared = replace(double, ranks=problem.ranks, held_out=None, settings=problem.settings, loop=problem.loop)
        super().__init__(shared, method)
        self.is_low_rank = method.guide == "low-rank"
        size, dtype, device = self.coordinates.size, torch.float64, self.ranks.device
        columns = min(method.rank, size) if self.is_low_rank else size
        generator = torch.Generator().manual_seed(derive_seed(problem.seed, "factor"))
        factor = torch.zeros(1, size, columns, dtype=dtype)
        if self.is_low_rank:  # a factor of 0 would have a gradient of 0
            factor = INIT_FACTOR * torch.randn(1, size, columns, generator=generator, dtype=dtype)
        zeros = torch.zeros(1, size, dtype=dtype, device=device)
        self.initialize({"mean": zeros, "log_scale": zeros.clone(), "factor": factor.to(device)})

    def standard_guide(self, guide_parameters: dict[str, Tensor]) -> Any:
        """Return the distribution of w, `[coordinate]`."""
        mean, scale, factor = (guide_parameters[name] for name in ("mean", "log_scale", "factor"))
        if self.is_low_rank:
            return dist.LowRankMultivariateNormal(mean, factor, (2 * scale).exp())
        return dist.MultivariateNormal(mean, scale_tril=factor.tril(-1) + torch.diag_embed(scale.exp()))

    def draw_bound(self, guide_parameters: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        """Compute this rank's part of the bound from pairs of draws, twice: it is its own surrogate.

        It is the likelihood of the shard and an equal part of the prior and the entropy.
        """
        # ELBO = E_q[log p(y, z)] + H(q). The entropy is exact; draws w = mean +- S e in pairs have the exact mean, so
        # the linear part of the log density has no noise.
        guide = self.standard_guide(guide_parameters)
        half = guide.rsample((GUIDE_DRAWS // 2,))
        z, log_det = self.approximation.to_coordinates(torch.cat([half, 2 * guide_parameters["mean"] - half]))
        indices = self.minibatch_indices(step)
        part = self.ranks.shard(self.corpus if indices is None else self.corpus.take(indices))
        size = len(self.corpus) if indices is None else len(indices)
        bound = (torch.vmap(self.coordinates.log_prior)(z) + log_det).mean()
        bound = bound + guide.entropy() + self.approximation.log_det
        bound = bound / len(self.corpus) / self.ranks.world_size
        if len(part):
            sets = torch.vmap(self.coordinates.decode)(z)
            bound = bound + self.objective.log_evidences(sets, part).sum(1).mean() / size
        return bound, bound

    def mean(self) -> dict[str, Tensor]:
        """Return the mean of the guide, as parameters of the net."""
        (z,), _ = self.approximation.to_coordinates(self.sets.get(0)["mean"][None])
        return self.coordinates.decode(z)

    def sample(self, count: int) -> dict[str, Tensor]:
        """Draw samples from the guide, `[1, draw, *shape]`; also compute k-hat and the notes.

        If k-hat is below 0.7, the draws are reweighted by the exact density.
        """
        guide, corpus = self.standard_guide(self.sets.get(0)), self.corpus
        w = guide.sample((max(MIN_PROPOSALS, 4 * count),))
        z, log_det = self.approximation.to_coordinates(w)
        weights, self.khat = smooth_weights(evaluate_draws(self.coordinates, corpus, z) + log_det - guide.log_prob(w))
        if self.khat < MAX_KHAT:
            self.effective_sample_size = effective_sample_size(weights)
        z = z[resample(weights, count)] if self.khat < MAX_KHAT else z[:count]
        samples = {name: value[None] for name, value in self.coordinates.to_samples(z).items()}
        uninformed = find_uninformed(self.approximation, self.mode)
        self.notes = tuple(describe_mode(self.approximation, corpus, self.mode, uninformed))
        if self.effective_sample_size is not None:
            self.notes += describe_weighted(self.effective_sample_size)
        if not self.khat < MAX_KHAT:
            self.notes += (
                f"k-hat of the importance weights is {self.khat:.2f}, above {MAX_KHAT}: there are no intervals",
            )
        return samples


class SampledChoicesOptimizer(VariationalOptimizer):
    """A mean-field guide that samples the choices, for nets whose choices have too many joint states to be summed.

    Each choice of each sentence and word has a table of logits in the guide, `choice/...`.
    """

    has_summed_choices = False

    def __init__(self, problem: FitProblem, method: SVI) -> None:
        super().__init__(problem, method)
        self.anneal = 1.0 if method.anneal is None else method.anneal
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
        power = min(1.0, self.anneal + (1 - self.anneal) * 2 * step / self.method.steps)
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
    optimizer: VariationalOptimizer
    if method.guide == "mean-field":
        optimizer = (SampledChoicesOptimizer if is_sampled else VariationalOptimizer)(problem, method)
    else:
        optimizer = NormalGuideOptimizer(problem, method)
    is_finished = optimize(optimizer, problem.loop)
    seed_rngs(derive_seed(problem.seed, "posterior"), problem.ranks.device)
    learned, samples = optimizer.sets.get(0), optimizer.sample(method.draws)
    return build_fit(
        problem,
        method,
        optimizer.mean(),
        finished=is_finished and optimizer.has_start,
        approximate=optimizer.note + (SAMPLED_CHOICES_NOTE if is_sampled else ""),
        notes=optimizer.notes,
        khat=optimizer.khat,
        effective_sample_size=optimizer.effective_sample_size,
        guide=method.guide,
        bounds=tuple(optimizer.bounds),
        measured=tuple(optimizer.measured),
        samples=to_network_devices(network, samples),
        choices={name[7:]: v.softmax(-1) for name, v in learned.items() if name.startswith("choice/")},
        criterion=optimizer.criterion,
    )

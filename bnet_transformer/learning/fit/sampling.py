"""`svi` and `nuts`: samples of the posterior, of one density.

`svi` has a guide with choices summed out, or (`SampledChoicesOptimizer`) drawn. `nuts` is Pyro's No-U-Turn sampler, by chains that go on
side by side, a draw each.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import NUTS as Kernel
from torch import Tensor
from torch.distributions import Categorical, biject_to, constraints, kl_divergence

from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer._core.hashing import derive_seed
from bnet_transformer._core.torch_context import seed_rngs
from bnet_transformer.compiler.validate_inputs import get_plate_sizes
from bnet_transformer.data import Batch
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.factors import LOG_ZERO
from bnet_transformer.learning.fit.head_summary import align_heads, find_representative
from bnet_transformer.learning.fit.problem import NUTS, SVI, FitObjective, FitProblem, to_parameters
from bnet_transformer.learning.fit.restarts import (
    DEFAULT_BATCH_SIZE,
    ParameterSets,
    RestartOptimizer,
    build_fit,
    optimize,
    to_network_devices,
)
from bnet_transformer.learning.fit.result import Fit
from bnet_transformer.learning.training.configs import defer_interrupt

SIMPLEX = constraints.simplex
MEAN_FIELD_NOTE = "mean-field: the posterior is taken as independent by parameter, and its spread comes out too small"
SAMPLED_CHOICES_NOTE = "; choices are drawn, not summed, and taken as independent of each other given the sentence"
CHOICE_SAMPLES = 8  # of the choices of each sentence, for one gradient
MAX_INIT_TRIES = 100  # draws of the prior among which a start with a finite density is looked for
INIT_JITTER = 0.1  # by how much the first chain's start lies off the net's own parameters
STATISTICS = ("diverging", "acceptance_rate", "n_steps", "tree_depth", "step_size", "lp")
WARMUP_NOTE = "interrupted in the warmup: nothing is drawn yet, and the net is the likeliest that was come to"


class ParameterModel:
    """The model: Dirichlet tables, Normal weights, and the log evidence of sentences."""

    def __init__(self, objective: FitObjective) -> None:
        self.objective, self.learned, self.network = objective, objective.learned, objective.network
        self.device = objective.device

    def prior(self, name: str) -> Any:
        """The prior of one parameter; tables as probabilities."""
        like = self.network.parameters[name].detach().to(self.device)
        if name in self.learned.tables:
            found = dist.Dirichlet(torch.full_like(like, self.learned.tables[name]))
            return found.to_event(like.dim() - 1)
        return dist.Normal(torch.zeros_like(like), self.learned.spread or 1.0).to_event(like.dim())

    def potential(self, corpus: Batch, z: dict[str, Tensor]) -> Tensor:
        """Minus the log density of parameters told without constraints."""
        drawn, total = {}, torch.zeros((), dtype=self.network.dtype, device=self.device)
        for name in self.learned.names:
            drawn[name] = value = z[to_site_name(name)]
            if name in self.learned.tables:
                to = biject_to(SIMPLEX)
                drawn[name] = to(value)
                total = total + to.log_abs_det_jacobian(value, drawn[name]).sum()
            total = total + self.prior(name).log_prob(drawn[name])
        return -(total + self.objective.log_evidence(to_parameters(self.network, drawn), corpus).sum())


def to_site_name(name: str) -> str:
    """The name of a parameter as Pyro has it."""
    return name.replace(".", "_")


class VariationalOptimizer(RestartOptimizer):
    """A fit by a mean-field guide: a Dirichlet for each row of a table, a Normal for each weight."""

    def __init__(self, problem: FitProblem, method: SVI) -> None:
        super().__init__(problem, method)
        self.model, self.network = ParameterModel(self.objective), self.objective.network
        values: dict[str, Tensor] = {}
        for name, value in self.sets.values.items():
            if name in self.model.learned.tables:
                rows = value[0].numel() // value.shape[-1]  # as if each sentence had told one row its state
                values[f"log_concentration/{name}"] = (value.softmax(-1) * len(self.corpus) / rows + 1.0).log()
            else:
                values[f"mean/{name}"] = value.clone()
                values[f"log_spread/{name}"] = torch.full_like(value, -3.0)
        self.initialize(values)

    def initialize(self, values: dict[str, Tensor]) -> None:
        """Learn these numbers, from these values."""
        self.sets = ParameterSets.create(values)
        self.best = self.best[0], 0, self.sets.get(0)

    def guide(self, guide_parameters: dict[str, Tensor]) -> dict[str, Any]:
        """The distribution of each parameter, told by what is learned of it."""
        found = {}
        for name in self.model.learned.names:
            if name in self.model.learned.tables:
                concentration = guide_parameters[f"log_concentration/{name}"].exp()
                found[name] = dist.Dirichlet(concentration).to_event(concentration.dim() - 1)
            else:
                mean = guide_parameters[f"mean/{name}"]
                found[name] = dist.Normal(mean, guide_parameters[f"log_spread/{name}"].exp()).to_event(mean.dim())
        return found

    def bound_and_grad(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The evidence lower bound per sentence, by one draw of the parameters, and its gradient.

        Under torchrun all ranks draw the same; each has the likelihood of its share of the sentences, and its part of
        the divergence from the prior, which is one part in so many.
        """
        seed_rngs(derive_seed(self.seed, "draw", step), self.ranks.device)
        leaves = {name: value.detach().requires_grad_() for name, value in self.sets.values.items()}
        told = {name: value[0] for name, value in leaves.items()}
        with pyro.validation_enabled(False):  # a number that is none shows in the bound
            guide = self.guide(told)
            drawn = {name: of.rsample() for name, of in guide.items()}
            kl = torch.stack([kl_divergence(of, self.model.prior(name)).sum() for name, of in guide.items()]).sum()
            kl = kl / len(self.corpus) / self.ranks.world_size
            likelihood, climbed = self.likelihood(to_parameters(self.network, drawn), told, step)
        gradients = torch.autograd.grad(climbed - kl, list(leaves.values()))
        whole = {name: self.ranks.all_reduce(each) for name, each in zip(leaves, gradients, strict=True)}
        return self.ranks.all_reduce((likelihood - kl).detach()[None]), whole

    def likelihood(
        self, parameters: dict[str, Tensor], guide_parameters: dict[str, Tensor], step: int
    ) -> tuple[Tensor, Tensor]:
        """This rank's part of the mean log evidence of the sentences of a step, and what has the gradient to follow."""
        which = self.minibatch_indices(step)
        if which is None and len(self.corpus_parts) == 1:
            part = self.corpus_parts[0]  # whose likelihoods may be kept
        else:
            part = self.ranks.shard(self.corpus if which is None else self.corpus.take(which))
        nothing = next(iter(parameters.values())).new_zeros(())
        evidence = self.objective.log_evidence(parameters, part).sum() if len(part) else nothing
        mean = evidence / (len(self.corpus) if which is None else len(which))
        return mean, mean

    @property
    def criterion(self) -> str:
        """What `scores` measures."""
        return "log evidence at the mean of the guide"

    def scores(self) -> list[float]:
        """The mean log evidence of a sentence at the mean of the guide."""
        means = self.mean()
        total = torch.zeros((), dtype=self.network.dtype, device=self.ranks.device)
        with torch.no_grad():
            for part in self.validation_parts:
                total = total + self.objective.log_evidence(means, part).sum()
        return [float(self.ranks.all_reduce(total)) / len(self.validation)]

    def mean(self) -> dict[str, Tensor]:
        """The mean of the guide, as parameters."""
        means = {name: of.mean for name, of in self.guide(self.sets.get(0)).items()}
        return to_parameters(self.network, means)


class SampledChoicesOptimizer(VariationalOptimizer):
    """The same where choices are too many to be summed: they are drawn, each from a table of its own.

    The gradient of the tables is the score function's, each draw measured against the mean of the others.
    """

    has_summed_choices = False

    def __init__(self, problem: FitProblem, method: SVI) -> None:
        super().__init__(problem, method)
        self.anneal = 1.0 if method.anneal is None else method.anneal
        names = [member.group.name for member in self.network.choices]
        observed = [name for name in names if name in self.corpus.evidence]
        if observed:
            got = f"'sampled', with {', '.join(observed)} observed"
            raise BNetError("choices", expected="'exact': a choice that is observed is not drawn", actual=got)
        words = {stack: value.shape[1] for stack, value in self.corpus.x.items()}
        values = dict(self.sets.values)
        for member in self.network.choices:
            name = member.group.name
            if member.tpm.states is None or member.scope == "corpus":
                kind = "drawn for the corpus" if member.scope == "corpus" else "a word that is read"
                wanted = "choices of sentences or words, each with a fixed number of states"
                raise BNetError("choices", expected=wanted, actual=f"{name}, {kind}", allowed="exact")
            shape = (1, len(self.corpus), *get_plate_sizes(self.network, member, words), member.tpm.states)
            values[f"choice/{name}"] = torch.zeros(shape, dtype=self.network.dtype, device=self.ranks.device)
        self.initialize(values)

    def likelihood(
        self, parameters: dict[str, Tensor], guide_parameters: dict[str, Tensor], step: int
    ) -> tuple[Tensor, Tensor]:
        """This rank's part of the mean bound of the sentences of a step, by a few draws of their choices."""
        which = self.minibatch_indices(step)
        which = torch.arange(len(self.corpus), device=self.ranks.device) if which is None else which
        power = min(1.0, self.anneal + (1 - self.anneal) * 2 * step / self.method.steps)
        joint, guess = self._sample_log_probs(parameters, guide_parameters, which, power)
        signal = (joint - guess).detach()
        others = (signal.sum(0) - signal) / (CHOICE_SAMPLES - 1)
        count = CHOICE_SAMPLES * len(which)
        return signal.sum() / count, (joint + (signal - others) * guess).sum() / count

    @property
    def criterion(self) -> str:
        """What `scores` measures."""
        return "lower bound on the log evidence at the mean of the guide"

    def scores(self) -> list[float]:
        """The mean of the bound of a sentence at the mean of the guide, by the same draws every time."""
        seed_rngs(derive_seed(self.seed, "judge"), self.ranks.device)
        with torch.no_grad():
            places = torch.arange(len(self.corpus), device=self.ranks.device).split(DEFAULT_BATCH_SIZE)
            means, told = self.mean(), self.sets.get(0)
            parts = [torch.sub(*self._sample_log_probs(means, told, which)).mean(0) for which in places]
        return [float(self.ranks.all_reduce(torch.cat(parts).sum())) / len(self.corpus)]

    def _sample_log_probs(
        self, parameters: dict[str, Tensor], guide_parameters: dict[str, Tensor], indices: Tensor, power: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """`log P(y, choices)` and `log q(choices)` of a few draws for some sentences, `[draw, sentence]`.

        Under torchrun all ranks draw for all of these sentences, and each tells of its share.
        """
        share = self.ranks.shard(indices)
        part = self.corpus.take(share)
        states: dict[str, Tensor] = {}
        guess = torch.zeros(CHOICE_SAMPLES, len(share), dtype=self.network.dtype, device=indices.device)
        for family in (member.group for member in self.network.choices):
            logits = guide_parameters[f"choice/{family.name}"]
            s = Categorical(logits=logits[indices], validate_args=False).sample((CHOICE_SAMPLES,))
            s = self.ranks.shard(s.transpose(0, 1)).transpose(0, 1)
            log_q = Categorical(logits=logits[share], validate_args=False).log_prob(s)
            present = None if part.mask is None or family.word_stack is None else part.mask.get(family.word_stack)
            if present is not None:  # log P(choices) has no terms of absent words; with theirs, log q is too low
                log_q = log_q * present[:, *[None] * len(family.plates)]
            guess = guess + (log_q.flatten(2).sum(2) if log_q.dim() > 2 else log_q)
            states[family.name] = s.flatten(0, 1)
        if not len(share):
            return guess, guess
        repeated = self.corpus.take(share.repeat(CHOICE_SAMPLES))
        prior, likelihood = self.objective.log_joint(parameters, repeated, states)
        return (prior + power * likelihood).reshape(CHOICE_SAMPLES, -1), guess


def fit_svi(problem: FitProblem, method: SVI) -> Fit[Network]:
    """A fit by a mean-field guide.

    Args:
        problem: What is fitted.
        method: The options.

    Returns:
        The fit, with draws of the guide as samples.
    """
    network, is_drawn = problem.objective.network, method.choices == "sampled"
    run = (SampledChoicesOptimizer if is_drawn else VariationalOptimizer)(problem, method)
    is_finished = optimize(run, problem.loop)
    seed_rngs(derive_seed(problem.seed, "posterior"), problem.ranks.device)
    learned = run.sets.get(0)
    samples = {name: of.sample((1, method.draws)) for name, of in run.guide(learned).items()}
    return build_fit(
        problem,
        method,
        run.mean(),
        finished=is_finished,
        approximate=MEAN_FIELD_NOTE + (SAMPLED_CHOICES_NOTE if is_drawn else ""),
        bounds=tuple(run.bounds),
        measured=tuple(run.measured),
        samples=to_network_devices(network, samples),
        choices={name[7:]: v.softmax(-1) for name, v in learned.items() if name.startswith("choice/")},
        criterion=run.criterion,
    )


class NUTSChain:
    """One chain: NUTS with random numbers of its own, what it drew after the warmup, and what is known of each draw."""

    def __init__(self, model: ParameterModel, problem: FitProblem, warmup: int, index: int) -> None:
        self.model, self.corpus, self.warmup, self.index = model, problem.corpus, warmup, index
        self.samples: list[dict[str, Tensor]] = []
        self.statistics: list[tuple[float, ...]] = []
        self.step = self.num_evaluations = self.num_divergences = 0
        seed_rngs(derive_seed(problem.seed, "chain", index), model.device)
        self.rng_state = _get_rng_state(model.device)
        self.kernel = Kernel(potential_fn=self._potential)
        with self._use_rng_state():
            self.z = init_chain(model, problem.corpus, index)
            self.kernel.initial_params = self.z
            self.kernel.setup(warmup)

    def advance(self) -> None:
        """One step of the warmup, or one draw."""
        # Pyro tells of the acceptance rate by its running mean alone, which it keeps to itself.
        before, mean = self.num_evaluations, self.kernel._mean_accept_prob
        with self._use_rng_state():
            self.z = self.kernel.sample(self.z)
        self.step += 1
        count = self.step - self.warmup
        if count <= 0:
            return
        steps = self.num_evaluations - before
        mean = mean if count > 1 else 0.0
        acceptance = min(1.0, max(0.0, mean + count * (self.kernel._mean_accept_prob - mean)))
        divergences = len(self.kernel.diagnostics()["divergences"])
        diverging, self.num_divergences = float(divergences > self.num_divergences), divergences
        depth = steps.bit_length()  # a tree of depth d takes from 2^(d-1) to 2^d - 1 steps
        self.statistics.append((diverging, acceptance, steps, depth, float(self.kernel.step_size), self.log_density()))
        self.samples.append(self.parameters())

    def log_density(self) -> float:
        """The log density where the chain stands, of parameters without constraints."""
        with torch.no_grad():
            return -float(self.model.potential(self.corpus, self.z))

    def parameters(self) -> dict[str, Tensor]:
        """Where the chain stands, tables as probabilities."""
        values = {name: self.z[to_site_name(name)].detach() for name in self.model.learned.names}
        return {k: biject_to(SIMPLEX)(v) if k in self.model.learned.tables else v for k, v in values.items()}

    def _potential(self, z: dict[str, Tensor]) -> Tensor:
        self.num_evaluations += 1
        return self.model.potential(self.corpus, z)

    @contextmanager
    def _use_rng_state(self) -> Iterator[None]:
        device = self.model.device
        torch.set_rng_state(self.rng_state[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(self.rng_state[1], device)
        yield
        self.rng_state = _get_rng_state(device)


def _get_rng_state(device: torch.device) -> list[Tensor]:
    """The state of the random numbers: of the processor, and of the device where that is another."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def init_chain(model: ParameterModel, corpus: Batch, index: int) -> dict[str, Tensor]:
    """Where a chain begins: the first near the net's own parameters, the others at draws of the prior."""
    for _ in range(MAX_INIT_TRIES):
        z = {}
        for name in model.learned.names:
            own = model.objective.network.parameters[name].detach().to(model.device)
            is_table = name in model.learned.tables
            value = model.prior(name).sample() if index else own.softmax(-1) if is_table else own
            if is_table:
                value = biject_to(SIMPLEX).inv(0.9 * value + 0.1 / value.shape[-1])
            z[to_site_name(name)] = value if index else value + INIT_JITTER * torch.randn_like(value)
        with torch.no_grad():
            if bool(model.potential(corpus, z) < -LOG_ZERO / 2):
                return z
    raise BNetError(
        f"chain {index}",
        expected=f"a start with a finite density, among {MAX_INIT_TRIES} draws of the prior",
        actual="none",
        allowed="a smaller spread=, float64",
    )


def fit_nuts(problem: FitProblem, method: NUTS) -> Fit[Network]:
    """A fit by NUTS: a draw of each chain in turn, so that all chains have as many draws whenever they end.

    Under torchrun each rank follows every so many-th chain, on all sentences.

    Args:
        problem: What is fitted.
        method: The options.

    Returns:
        The fit; without samples where it was interrupted in the warmup.

    Raises:
        BNetError: Where `batch` is less than all sentences.
    """
    objective, corpus = problem.objective, problem.corpus
    network = objective.network
    if problem.batch is not None and problem.batch < len(corpus):
        wanted = f"None or all {len(corpus)} sentences: NUTS needs the whole likelihood"
        raise BNetError("batch", expected=wanted, actual=problem.batch, allowed="svi")
    chains, is_finished = _run_chains(problem, method)
    drawn, statistics_by_chain, best = _gather_chains(chains, method.chains, problem.ranks)
    found: dict[str, Any] = {"approximate": WARMUP_NOTE}
    shown = to_parameters(network, best)
    if drawn:
        samples = {name: torch.stack([each[name] for each in drawn]) for name in objective.learned.names}
        statistics = dict(zip(STATISTICS, torch.stack(statistics_by_chain).unbind(-1), strict=True))
        samples, matched = align_heads(objective, corpus, samples, statistics["lp"])
        divergent = tuple(int(count) for count in statistics["diverging"].sum(1))
        found = {"divergent": divergent, "statistics": statistics, "matched": matched}
        found["samples"], shown = to_network_devices(network, samples), find_representative(network, samples)
    return build_fit(problem, method, shown, finished=is_finished, **found)


def _run_chains(problem: FitProblem, method: NUTS) -> tuple[list[NUTSChain], bool]:
    """The chains of this rank after their draws, and whether they came to the end."""
    ranks = problem.ranks
    problem.objective.cache_factors(problem.corpus)
    model, steps, done, stop = ParameterModel(problem.objective), method.warmup + method.draws, 0, False
    with pyro.validation_enabled(False), warnings.catch_warnings(), defer_interrupt() as asked:
        warnings.simplefilter("ignore", UserWarning)  # Pyro's own, of torch interfaces that go away
        chains = [NUTSChain(model, problem, method.warmup, number) for number in ranks.shard(range(method.chains))]
        with problem.loop.progress_bar(ranks, steps, 0, "draw") as bar:
            while done < steps and not stop:
                for chain in chains:
                    chain.advance()
                done += 1
                stop = ranks.any(bool(asked))
                bar.update()
                bar.set_postfix(phase="warmup" if done <= method.warmup else "draws", refresh=False)
            bar.refresh()  # a quick fit shows how it ended, too
    return chains, done == steps


def _gather_chains(
    chains: list[NUTSChain], count: int, ranks: DistributedContext
) -> tuple[list[dict[str, Tensor]], list[Tensor], dict[str, Tensor]]:
    """The draws and statistics of the chains of all ranks, by their numbers, and where the densest of them stands."""
    own: dict[int, Any] = {}
    for chain in chains:
        drawn = {k: torch.stack([each[k] for each in chain.samples]).cpu() for k in (chain.samples or [{}])[0]}
        stands = {name: value.cpu() for name, value in chain.parameters().items()}
        own[chain.index] = drawn, torch.tensor(chain.statistics, dtype=torch.float64), chain.log_density(), stands
    by_number = {number: each for part in ranks.all_gather_object(own) for number, each in part.items()}
    every = [by_number[number] for number in range(count)]
    _, _, _, best = max(every, key=lambda each: each[2])

    def here(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(ranks.device) for name, value in values.items()}

    return [here(drawn) for drawn, *_ in every if drawn], [rows for _, rows, *_ in every], here(best)

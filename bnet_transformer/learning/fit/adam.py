"""The loop over the steps of several restarts, and `map` and `em` by Adam."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_float, check_int, check_options
from bnet_transformer._core.files import compute_digest, derive_seed
from bnet_transformer.data import Batch
from bnet_transformer.data.batch import send_to_device
from bnet_transformer.declare import Network
from bnet_transformer.declare.network import initialize_parameters
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.factors import LOG_ZERO
from bnet_transformer.learning.fit.curvature import EMExpansion
from bnet_transformer.learning.fit.objective import LOG_EVIDENCE, LOG_POSTERIOR, FitObjective, FitProblem, Method
from bnet_transformer.learning.fit.result import Fit, FitRecord
from bnet_transformer.learning.loop import (
    Checkpoint,
    LoopConfig,
    Run,
    check_shapes_and_dtypes,
    read_checkpoint,
    run_steps,
)
from bnet_transformer.learning.training import create_schedule

BETA1, BETA2, EPS = 0.9, 0.99, 1e-8  # decay rates of the moments; EPS keeps divisions and logs finite


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
class AdamSteps(IterativeMethod):
    """The options of a point method by Adam for one net, without defaults that depend on the net.

    Args:
        restarts: The number of restarts.
        inner: The number of Adam steps between two updates of the tables of EM; None if tables follow the gradient.
        prune: Whether the worse half of the restarts is dropped at 25% and at 50% of the steps.
    """

    restarts: int = 1
    inner: int | None = None
    prune: bool = False


@dataclass
class ParameterSets:
    """The learned parameters of all active restarts, `[set, *shape]`, with their Adam moments.

    `restart_ids[i]` is the index of the restart in row i; the rows of dropped restarts are removed.
    """

    values: dict[str, Tensor]
    first_moments: dict[str, Tensor]
    second_moments: dict[str, Tensor]
    restart_ids: list[int]

    @classmethod
    def create(cls, values: dict[str, Tensor]) -> ParameterSets:
        """Create sets of parameters before the first step: all moments are 0."""
        first, second = ({name: torch.zeros_like(value) for name, value in values.items()} for _ in range(2))
        return cls(values, first, second, list(range(len(next(iter(values.values()))))))

    def select(self, indices: list[int]) -> None:
        """Keep only these rows."""
        for part in (self.values, self.first_moments, self.second_moments):
            for name, value in part.items():
                part[name] = value[indices]
        self.restart_ids = [self.restart_ids[i] for i in indices]

    def get(self, index: int) -> dict[str, Tensor]:
        """Return a copy of the parameters of one row, without the leading dim."""
        return {name: value[index].detach().clone() for name, value in self.values.items()}


def adam_step(sets: ParameterSets, gradients: Mapping[str, Tensor], step: int, rate: float, clip: float | None) -> None:
    """Take one Adam step that increases the objective, independently for each set.

    Args:
        sets: The parameters, `[set, *shape]`, and their moments; the function replaces both.
        gradients: The gradient by parameter, `[set, *shape]`; a parameter without a gradient does not change.
        step: The number of the step, counted from 1.
        rate: The learning rate.
        clip: The maximum gradient norm of a set; None for no clipping.
    """
    # Kingma and Ba 2015, algorithm 1, elementwise: the sets do not interact, and one stacked step equals one step of
    # each restart. `torch.optim` would compute one norm for all sets, so one diverged restart would clip or stop all.
    # A set whose gradient is not finite is dropped by the caller.
    factor = None if clip is None else (clip / squared_grad_norm(gradients).sqrt().clamp(min=1e-30)).clamp(max=1.0)
    for name, g in gradients.items():
        g = g if factor is None else g * factor.reshape(-1, *[1] * (g.dim() - 1)).to(g.dtype)
        m = sets.first_moments[name] = BETA1 * sets.first_moments[name] + (1 - BETA1) * g
        s = sets.second_moments[name] = BETA2 * sets.second_moments[name] + (1 - BETA2) * g.square()
        m, s = m / (1 - BETA1**step), s / (1 - BETA2**step)
        sets.values[name] = sets.values[name] + rate * m / (s.sqrt() + EPS)


def squared_grad_norm(gradients: Mapping[str, Tensor]) -> Tensor:
    """Compute the squared gradient norm of each set over all parameters, `[set]`, in float64."""
    return torch.stack([g.reshape(len(g), -1).double().square().sum(1) for g in gradients.values()]).sum(0)


# --------------------------------------------------------------------------------------------------------------------
# The loop over the steps of several restarts, and `map` and `em` by Adam.
#
# A `RestartOptimizer` is a run of `loop.py`. A `GradientOptimizer` takes steps of Adam, on minibatches, along the
# gradient of its `bound_and_grad`: for `map` and `em` the `AdamOptimizer`, if `em.py` does not apply; for `svi` those
# of `svi.py`.

TRAINING_SENTENCES = "the training sentences"
DEFAULT_BATCH_SIZE = 256  # sentences of a minibatch, if the caller gives none
ROUNDING = 1e-12  # relative difference of two scores that may be a rounding error
DIVERGENCE_FACTOR = 100.0  # a bound has diverged if it is this many times (1 + |start|) below its start
FINAL_RATE_FACTOR = 0.2  # factor of the learning rate when the best restart continues on all sentences
VALIDATION_FRACTION, MAX_VALIDATION = 0.1, 1000  # held-out sentences that choose among restarts, if none are given


def init_restarts(
    network: Network, names: tuple[str, ...], restarts: int, seed: int, device: torch.device
) -> ParameterSets:
    """Create the initial parameters of all restarts: those of the net for the first, random ones for the others.

    Tables with declared numbers are drawn from a uniform Dirichlet. Logits that are -inf in the net are -inf in all
    restarts.
    """
    sets = [{name: network.parameters[name] for name in names}]
    for r in range(1, restarts):
        init = initialize_parameters(network, derive_seed(seed, "restart", r))
        new = {name: init[name].to(sets[0][name]) for name in names}
        for name in names:
            if isinstance(network.parameter_specs[name][1].fill, tuple) and name in network.logit_names:
                generator = torch.Generator().manual_seed(derive_seed(seed, "restart", r, name))
                # Normalised exponential variables have the uniform Dirichlet distribution.
                samples = torch.empty(init[name].shape, dtype=torch.float64).exponential_(generator=generator)
                new[name] = samples.log().to(sets[0][name])
        sets.append({name: value.where(sets[0][name] > -torch.inf, -torch.inf) for name, value in new.items()})
    return ParameterSets.create({name: torch.stack([s[name].detach().to(device) for s in sets]) for name in names})


class RestartOptimizer(Run):
    """The state of a fit: the parameters of all active restarts, their scores, and the best parameters so far.

    Args:
        problem: The fit problem.
        steps: The number of steps.
        restarts: The number of restarts.
        prune: Whether the worse half of the restarts is dropped at 25% and at 50% of the steps.
    """

    has_summed_choices: ClassVar[bool] = True
    is_comparable: bool = True  # whether the bounds of all steps are those of one objective
    remedies = "another seed=, or data and weights of a smaller scale"  # the options that may help a diverged fit

    def __init__(self, problem: FitProblem, steps: int, restarts: int = 1, prune: bool = False) -> None:
        self.objective = objective = problem.objective
        self.network, self.corpus, self.ranks, self.seed = (
            objective.network,
            problem.corpus,
            problem.ranks,
            problem.seed,
        )
        self.steps, self.restarts = steps, restarts
        # Successive halving (Jamieson and Talwalkar 2016) with two rungs. Restarts that end in a poor local optimum are
        # usually behind early, so the remaining steps are spent on the better half.
        self.extra_evaluations = (steps // 4, steps // 2) if prune and restarts > 2 else ()
        self.validation = self.corpus if problem.held_out is None else problem.held_out
        self.settings = {**problem.settings, "judged_by": self.criterion}
        self.sets = init_restarts(self.network, objective.learned.names, restarts, self.seed, self.ranks.device)
        self.bounds: list[float] = []
        self.measured: list[tuple[int, int, float]] = []
        self.best: tuple[float, int, dict[str, Tensor]] = (-math.inf, 0, self.sets.get(0))
        self.corpus_parts = self.split_full_pass(self.corpus)
        held_out = problem.held_out
        self.validation_parts = self.corpus_parts if held_out is None else self.split_full_pass(held_out)
        for part in (*self.corpus_parts, *self.validation_parts) if self.has_summed_choices else ():
            objective.cache_factors(part)
        batch = len(self.corpus) if objective.has_corpus_choice else problem.batch or DEFAULT_BATCH_SIZE
        self.batch_size = min(batch, len(self.corpus))

    def describe(self) -> Mapping[str, object]:
        """Return what the progress bar shows."""
        return {"bound": f"{self.bounds[-1]:.4f}", "restarts": len(self.sets.restart_ids)}

    def valid_bounds(self, bound: Tensor) -> Tensor:
        """Return whether each bound is finite, of positive probability, and not far below the start, `[set]`."""
        is_valid = bound.isfinite() & (bound > LOG_ZERO / 2 / len(self.corpus))
        if not self.bounds or not self.is_comparable:
            return is_valid
        start = self.bounds[0]
        return is_valid & (bound > start - DIVERGENCE_FACTOR * (1 + abs(start)))

    def create_error(self, received: str) -> BNetError:
        """Create the error of a fit that diverged, with the last checkpoint and the remedies.

        Raises:
            EvidenceError: The sentences are impossible in the net; the error names the first impossible observation.
        """
        if self.has_summed_choices:
            self.objective.check_possible(self.corpus)
        remedies = f"{self.remedies}, or a prior (spread=)"
        return self.divergence_error(
            "a finite bound, not far below its start", received, remedies, len(self.bounds) + 1
        )

    @property
    def criterion(self) -> str:
        """The name of the quantity in `scores`. Without a prior the log posterior density equals the log evidence."""
        return LOG_POSTERIOR if self.validation is self.corpus and self.objective.has_prior else LOG_EVIDENCE

    def scores(self) -> list[float]:
        """Compute the criterion of each restart, per validation sentence.

        On the training sentences it is the objective, including the prior, because the likelihood would prefer the step
        that overfits most. On held-out sentences it is the log evidence, which evaluates prior and data together.
        """
        with torch.no_grad():
            total = self.sum_log_evidence(self.validation_parts, self.sets.values)
        total = self.ranks.all_reduce(total)  # before the prior, which must count once and not once for each rank
        if self.criterion == LOG_POSTERIOR:
            total = total + self.objective.log_prior(self.sets.values).detach()
        return [float(score) for score in total / len(self.validation)]

    def sum_log_evidence(self, parts: list[Batch], values: Mapping[str, Tensor]) -> Tensor:
        """Compute the log evidence of the sentences of this process for each set of parameters, `[set]`."""
        first = next(iter(values.values()))
        total = first.new_zeros(len(first))
        for part in parts:
            total = total + self.objective.log_evidences(values, part).sum(1)
        return total

    def split_full_pass(self, corpus: Batch) -> list[Batch]:
        """Split this process's shard of a corpus into the parts of a full pass; one part if sentences share a draw."""
        shard = corpus if self.objective.has_corpus_choice else self.ranks.shard(corpus)
        return self.objective.split(shard) if len(shard) else []

    def update_best(self) -> list[float]:
        """Score every restart, and keep the best parameters so far."""
        scores = self.scores()
        for i, (restart, score) in enumerate(zip(self.sets.restart_ids, scores, strict=True)):
            # Of restarts that are equal up to rounding errors, the first is the best.
            if math.isinf(self.best[0]) or score > self.best[0] + ROUNDING * abs(self.best[0]):
                self.best = score, restart, self.sets.get(i)
        return scores

    def evaluate(self) -> None:
        """Score every restart and keep the best parameters. At a pruning step, drop the worse half, rounded down."""
        scores = self.update_best()
        self.measured += [(self.step, k, score) for k, score in zip(self.sets.restart_ids, scores, strict=True)]
        if self.step in self.extra_evaluations:
            order = sorted(range(len(scores)), key=lambda i: -scores[i])
            self.sets.select(sorted(order[: -(-len(order) // 2)]))

    def snapshot(self) -> Checkpoint:
        """Create a checkpoint of the current state."""
        score, restart, best = self.best
        tensors = {f"net/{name}": value for name, value in best.items() if name in self.network.parameters}
        parts = {
            "best": best,
            "all": self.sets.values,
            "first": self.sets.first_moments,
            "second": self.sets.second_moments,
        }
        tensors |= {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}
        tensors["story/who"] = torch.tensor(self.sets.restart_ids)
        tensors["story/best"] = torch.tensor([score, restart], dtype=torch.float64)
        tensors["story/measured"] = torch.tensor(self.measured, dtype=torch.float64).reshape(-1, 3)
        return Checkpoint(self.step, tensors, tuple(self.bounds), (), self.settings)

    def restore(self, saved: Checkpoint) -> None:
        """Load the state of a checkpoint."""
        story, device = saved.get_tensors("story"), self.ranks.device
        ids = [int(k) for k in story["who"]]
        if not ids or not {*ids} <= {*range(self.restarts)}:
            raise BNetError("restarts", expected=f"indices of restarts below {self.restarts}", actual=ids)
        form = {name: value[:1].expand(len(ids), *value.shape[1:]) for name, value in self.sets.values.items()}
        parts = [saved.get_tensors(name) for name in ("all", "first", "second")]
        for part in parts:
            check_shapes_and_dtypes(part, form)
        best = saved.get_tensors("best")
        check_shapes_and_dtypes(best, {name: value[0] for name, value in form.items()})
        values, first, second = ({k: v.to(device) for k, v in part.items()} for part in parts)
        self.sets = ParameterSets(values, first, second, ids)
        self.bounds = list(saved.losses)
        self.measured = [(int(step), int(k), score) for step, k, score in story["measured"].tolist()]
        score, restart = story["best"].tolist()
        self.best = score, int(restart), {name: value.to(device) for name, value in best.items()}


class GradientOptimizer(RestartOptimizer):
    """An optimizer whose steps follow a gradient by Adam.

    Attributes:
        values: The parameters at which the gradient of the current step is computed.
    """

    def __init__(self, problem: FitProblem, method: IterativeMethod, restarts: int = 1, prune: bool = False) -> None:
        super().__init__(problem, method.steps, restarts, prune)
        self.method = method
        self.schedule = create_schedule("cosine", method.rate, max(1, method.steps // 20), method.steps, None)

    @property
    def remedies(self) -> str:  # type: ignore[override]
        """The options that may help a fit that diverged."""
        return f"a rate= below {self.schedule(len(self.bounds) + 1):g}, clip=1.0"

    @abstractmethod
    def bound_and_grad(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the bound of each restart on the sentences of a step, `[set]`, and the gradient of the step.

        Args:
            step: The index of the step, from 0; it determines the minibatch and the seed of random draws.

        Returns:
            The bounds, and the gradient by parameter. A function that sets parameters in closed form replaces them in
            `values`.
        """

    def minibatch_indices(self, step: int) -> Tensor | None:
        """Return the indices of the sentences of a step, `[sentence]`; None for all sentences."""
        size, count = self.batch_size, len(self.corpus)
        if size >= count:
            return None
        epoch, i = divmod(step, -(-count // size))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        order = torch.randperm(count, generator=generator)
        return send_to_device(order[i * size : (i + 1) * size].clone(), self.ranks.device)

    def compute(self, is_interrupted: bool, is_due: bool) -> None:
        """Compute the bound and the gradient of every restart, and find the restarts that diverged.

        A restart diverged if its bound or gradient is not finite, or its bound is far below its start.

        Raises:
            BNetError: If all restarts diverged.
        """
        self.values = dict(self.sets.values)
        self.bound, self.gradient = self.bound_and_grad(self.step)
        is_valid = self.valid_bounds(self.bound)
        if self.gradient:
            is_valid = is_valid & squared_grad_norm(self.gradient).isfinite()
        self.live = is_valid.nonzero()[:, 0].tolist()
        if not self.live:
            raise self.create_error(f"a bound of {float(self.bound.max()):g}")

    def update(self) -> None:
        """Take one step of every restart, and drop the restarts that diverged."""
        self.sets.values = self.values
        self.bounds.append(float(self.bound[self.live].max()))
        self.step += 1
        if self.gradient:
            adam_step(self.sets, self.gradient, self.step, self.schedule(self.step), self.method.clip)
        if len(self.live) < len(self.bound):
            self.sets.select(self.live)


def optimize(optimizer: RestartOptimizer, loop: LoopConfig) -> bool:
    """Run the remaining steps of `run_steps`; return False if Ctrl-C ended the run early. Then score its end too."""
    is_complete = run_steps(optimizer, loop)
    if not optimizer.measured or optimizer.measured[-1][0] < optimizer.step:
        optimizer.evaluate()
    return is_complete


class AdamOptimizer(GradientOptimizer):
    """The optimizer of `map` and `em` by Adam.

    `map` follows the gradient of a minibatch for all parameters. `em` updates the tables of choices in closed form
    every `inner` steps, and the weights by gradient in between. If only tables are learned, every step is an M step on
    all sentences.
    """

    method: AdamSteps

    def __init__(self, problem: FitProblem, method: AdamSteps) -> None:
        super().__init__(problem, method, method.restarts, method.prune)
        self.expand = EMExpansion(self.objective, self.corpus_parts, self.ranks, weights=())

    def bound_and_grad(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the M step if it is due, then return the bound of each restart and its gradient.

        The bound is `mean over sentences of log P(y | x) + log P(parameters) / number of sentences`, so the minibatch
        estimate is unbiased. The gradient excludes parameters that are updated in closed form. If only tables are
        learned, the bound is the bound before the M step. Under torchrun each process computes its shard, and the
        results are summed.
        """
        objective, ranks, inner = self.objective, self.ranks, self.method.inner
        if inner is not None and step % inner == 0 and objective.learned.tables:
            expansion = self.expand(self.values)
            self.values |= update_tables(objective, self.values, expansion.counts)
            if not objective.learned.weights:
                return expansion.log_density / len(self.corpus), {}
        indices = self.minibatch_indices(step)
        part = self.corpus if indices is None else self.corpus.take(indices)
        size, shard = len(part), ranks.shard(part)
        leaves = {name: value.detach().requires_grad_() for name, value in self.values.items()}
        bound = objective.log_prior(leaves) / len(self.corpus) / ranks.world_size
        if len(shard):
            bound = bound + objective.log_evidences(leaves, shard).sum(1) / size
        closed = () if inner is None else objective.learned.tables
        open_ = {name: leaf for name, leaf in leaves.items() if name not in closed}
        gradients = torch.autograd.grad(bound.sum(), [*open_.values()], allow_unused=True, materialize_grads=True)
        reduced = {name: ranks.all_reduce(g) for name, g in zip(open_, gradients, strict=True)}
        return ranks.all_reduce(bound.detach()), reduced


def update_tables(
    objective: FitObjective, values: Mapping[str, Tensor], counts: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tables of the M step, `theta = (counts + concentration - 1) / sum`, as logs, `[set, *shape]`.

    Args:
        objective: The objective, with the concentrations of the priors.
        values: The parameters before the step.
        counts: The expected counts of all sentences, `[set, *shape]`, by table.
    """
    # With expected counts n_k, the expected complete-data log posterior of a row is sum_k (n_k + a_k - 1) log theta_k,
    # whose maximum is the mode of a Dirichlet(n + a): theta_k is proportional to n_k + a_k - 1 (Dempster, Laird and
    # Rubin 1977; Bishop 2006, section 9.4). If every n_k + a_k >= 1, a step never decreases the posterior density.
    # Otherwise (a prior below 1 and few counts) that density is unbounded at the border of the simplex, and `EPS`
    # bounds the distance of the row to the border. Impossible states (-inf) stay impossible.
    tables = {}
    for name, count in counts.items():
        probs = (count + (objective.learned.tables[name] - 1).to(count)).clamp(min=EPS)
        probs = probs.where(values[name] > -torch.inf, 0.0)
        tables[name] = (probs / probs.sum(-1, keepdim=True)).log()
    return tables


def fit_by_adam(problem: FitProblem, method: Method, options: AdamSteps) -> Fit[Network]:
    """Fit by Adam: all restarts on the training sentences, then the best restart on all sentences.

    Args:
        problem: The fit problem.
        method: The method.
        options: Its options for this net.

    Returns:
        The fit; its net has the parameters with the best score.
    """
    split, evaluated_on, corpus = problem, TRAINING_SENTENCES, problem.corpus
    count = min(MAX_VALIDATION, int(VALIDATION_FRACTION * len(corpus)))
    if problem.held_out is not None:
        evaluated_on = "held-out sentences"
    elif options.restarts > 1 and count and not problem.objective.has_corpus_choice:  # they choose among restarts
        generator = torch.Generator().manual_seed(derive_seed(problem.seed, "held out"))
        order = torch.randperm(len(corpus), generator=generator)
        split = replace(problem, corpus=corpus.take(order[count:]), held_out=corpus.take(order[:count]))
        evaluated_on = f"{count} held-out sentences"
    optimizer = AdamOptimizer(split, options)
    is_finished = optimize(optimizer, problem.loop)
    (_, restart, best), bounds = optimizer.best, optimizer.bounds
    if len(split.corpus) < len(problem.corpus) and is_finished:
        last, is_finished = _continue_on_all(problem, options, best)
        best, bounds = last.best[2], [*bounds, *last.bounds]
    fields = {"bounds": tuple(bounds), "measured": tuple(optimizer.measured), "criterion": optimizer.criterion}
    return build_fit(problem, method, best, evaluated_on, restart=restart, finished=is_finished, **fields)


def build_fit(
    problem: FitProblem,
    method: Method,
    parameters: Mapping[str, Tensor],
    evaluated_on: str = TRAINING_SENTENCES,
    **fields: Any,
) -> Fit[Network]:
    """Create the fit of a method: the net with these parameters, and `fields` of `Fit` and of its record."""
    objective, count = problem.objective, len(problem.corpus)
    net, learned = replace_learned(objective.network, parameters), objective.learned.names
    parts = {name: fields.pop(name) for name in ("notes", "samples", "statistics", "choices") if name in fields}
    record = FitRecord(count, evaluated_on, learned=learned, budget=objective.budget, **fields)
    return Fit(net, method.name, record, **parts)


def replace_learned(network: Network, learned: Mapping[str, Tensor]) -> Network:
    """Return the net with the learned parameters, each on the device of the parameter that it replaces."""
    return network.with_parameters({**network.parameters, **to_network_devices(network, learned)})


def to_network_devices(network: Network, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move values or draws of parameters to the devices and floating types of the parameters of the net."""
    return {name: value.to(network.parameters[name]) for name, value in values.items()}


def _continue_on_all(
    problem: FitProblem, options: AdamSteps, best: Mapping[str, Tensor]
) -> tuple[RestartOptimizer, bool]:
    """Continue from the best restart on all sentences, for 25% of the steps and at a lower learning rate."""
    objective, ranks = problem.objective, problem.ranks
    network = replace_learned(objective.network, best)
    final_objective = FitObjective(network, objective.learned, objective.budget).to(ranks.device)
    final_options = replace(options, restarts=1, steps=max(1, options.steps // 4))
    if options.inner is None or objective.learned.weights:
        final_options = replace(final_options, rate=options.rate * FINAL_RATE_FACTOR)
    settings = {"again": "with all sentences", "parameters": compute_digest(network.parameters)}
    loop = problem.loop.in_subfolder("all")
    problem = replace(problem, objective=final_objective, loop=loop, settings={**problem.settings, **settings})
    optimizer = AdamOptimizer(problem, final_options)
    with loop.lock(ranks.is_main_process):
        if loop.checkpoints is not None and loop.checkpoints.resume and ranks.is_main_process:
            path = loop.checkpoints.create_path()
            if path.exists():  # a checkpoint that started from another first phase does not belong to this fit
                saved = read_checkpoint(path, network).settings
                if saved.get("parameters") != settings["parameters"]:
                    path.unlink()
        ranks.barrier()
        optimizer.evaluate()  # the initial parameters may be better than those after the steps
        return optimizer, optimize(optimizer, loop)

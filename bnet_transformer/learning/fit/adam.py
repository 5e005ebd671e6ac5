"""Optimizers that follow a gradient by Adam, and `map` and `em` by Adam."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_float, check_int, check_options
from bnet_transformer._core.files import compute_digest, derive_seed
from bnet_transformer.data.batch import send_to_device
from bnet_transformer.declare import Network
from bnet_transformer.learning.fit.curvature import EMExpansion, update_tables
from bnet_transformer.learning.fit.objective import FitObjective, FitProblem, Method
from bnet_transformer.learning.fit.restarts import (
    TRAINING_SENTENCES,
    ParameterSets,
    RestartOptimizer,
    build_fit,
    optimize,
    replace_learned,
)
from bnet_transformer.learning.fit.result import Fit
from bnet_transformer.learning.loop import read_checkpoint
from bnet_transformer.learning.training import create_schedule

BETA1, BETA2, EPS = 0.9, 0.99, 1e-8  # decay rates of the moments; EPS keeps divisions finite


@dataclass(frozen=True, kw_only=True)
class IterativeMethod(Method):
    """A method that maximises its objective by Adam steps.

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
        v = sets.second_moments[name] = BETA2 * sets.second_moments[name] + (1 - BETA2) * g.square()
        m, v = m / (1 - BETA1**step), v / (1 - BETA2**step)
        sets.values[name] = sets.values[name] + rate * m / (v.sqrt() + EPS)


def squared_grad_norm(gradients: Mapping[str, Tensor]) -> Tensor:
    """Compute the squared gradient norm of each set over all parameters, `[set]`, in float64."""
    return torch.stack([g.reshape(len(g), -1).double().square().sum(1) for g in gradients.values()]).sum(0)


# --------------------------------------------------------------------------------------------------------------------
# Steps of Adam on minibatches, along the gradient of the `bound_and_grad` of a `GradientOptimizer`: for `map` and `em`
# that of the `AdamOptimizer`, if `em.py` does not apply; for `svi` that of `svi.py`.

FINAL_RATE_FACTOR = 0.2  # factor of the learning rate when the best restart continues on all sentences
VALIDATION_FRACTION, MAX_VALIDATION = 0.1, 1000  # held-out sentences that choose among restarts, if none are given


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
        self.valid_rows = is_valid.nonzero()[:, 0].tolist()
        if not self.valid_rows:
            raise self.create_error(f"a bound of {float(self.bound.max()):g}")

    def update(self) -> None:
        """Take one step of every restart, and drop the restarts that diverged."""
        self.sets.values = self.values
        self.bounds.append(float(self.bound[self.valid_rows].max()))
        self.step += 1
        if self.gradient:
            adam_step(self.sets, self.gradient, self.step, self.schedule(self.step), self.method.clip)
        if len(self.valid_rows) < len(self.bound):
            self.sets.select(self.valid_rows)


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
        closed_form = () if inner is None else objective.learned.tables
        by_gradient = {name: leaf for name, leaf in leaves.items() if name not in closed_form}
        gradients = torch.autograd.grad(bound.sum(), [*by_gradient.values()], allow_unused=True, materialize_grads=True)
        reduced = {name: ranks.all_reduce(g) for name, g in zip(by_gradient, gradients, strict=True)}
        return ranks.all_reduce(bound.detach()), reduced


def fit_by_adam(problem: FitProblem, method: Method, options: AdamSteps) -> Fit[Network]:
    """Fit by Adam: all restarts on the training sentences, then the best restart on all sentences.

    Args:
        problem: The fit problem.
        method: The method.
        options: Its options for this net.

    Returns:
        The fit; its net has the parameters with the best score.
    """
    search, evaluated_on, corpus = problem, TRAINING_SENTENCES, problem.corpus
    count = min(MAX_VALIDATION, int(VALIDATION_FRACTION * len(corpus)))
    if problem.held_out is not None:
        evaluated_on = "held-out sentences"
    elif options.restarts > 1 and count and not problem.objective.has_corpus_choice:  # they choose among restarts
        generator = torch.Generator().manual_seed(derive_seed(problem.seed, "held out"))
        order = torch.randperm(len(corpus), generator=generator)
        search = replace(problem, corpus=corpus.take(order[count:]), held_out=corpus.take(order[:count]))
        evaluated_on = f"{count} held-out sentences"
    optimizer = AdamOptimizer(search, options)
    is_finished = optimize(optimizer, problem.loop)
    (_, restart, best), bounds = optimizer.best, optimizer.bounds
    if len(search.corpus) < len(problem.corpus) and is_finished:
        final, is_finished = _continue_on_all(problem, options, best)
        best, bounds = final.best[2], [*bounds, *final.bounds]
    fields = {"bounds": tuple(bounds), "measured": tuple(optimizer.measured), "criterion": optimizer.criterion}
    return build_fit(problem, method, best, evaluated_on, restart=restart, finished=is_finished, **fields)


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

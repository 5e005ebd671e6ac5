"""`map` and `em`: EM with a Gauss-Newton M step, Newton steps, and split-and-merge moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bnet_transformer._core.checks import check_choice, check_float, check_int, check_options
from bnet_transformer._core.files import derive_seed
from bnet_transformer.compiler.gather import ExecutionState
from bnet_transformer.data import Batch
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.elimination import eliminate_choices, get_batch_size, get_full_shape
from bnet_transformer.inference.factors import LOG_ZERO, Factor
from bnet_transformer.learning.fit.adam import AdamSteps, fit_by_adam
from bnet_transformer.learning.fit.curvature import (
    DECREMENT,
    EMExpansion,
    Expansion,
    FlatLayout,
    PreconditionedSolver,
    QuadraticModel,
    Tilt,
    count_observed_numbers,
    expand_function,
    find_lowest_curvature,
    find_uncovered,
    solve_model,
    update_tables,
)
from bnet_transformer.learning.fit.diagnostics import describe_parameters
from bnet_transformer.learning.fit.heads import find_selectors, head_dims
from bnet_transformer.learning.fit.objective import FitProblem, Method, check_full_batch, to_float64
from bnet_transformer.learning.fit.restarts import (
    TRAINING_SENTENCES,
    ParameterSets,
    RestartOptimizer,
    build_fit,
    init_restarts,
    optimize,
)
from bnet_transformer.learning.fit.result import Fit
from bnet_transformer.learning.loop import Checkpoint, defer_interrupt

# --------------------------------------------------------------------------------------------------------------------
# The options of `map` and `em`.


@dataclass(frozen=True, kw_only=True)
class PointMethod(Method):
    """A method whose result is the best of several restarts, which are computed as one batched dim.

    Args:
        restarts: The number of restarts; None for 4 with second-order steps and latent choices, else 1.
        optimizer: `"second-order"` or `"first-order"`; `"auto"` chooses.
        steps: The maximum number of steps of the restarts; None for 40 second-order or 300 first-order steps.
        rate: The peak learning rate of Adam; None for 0.05.
        clip: The maximum norm of the gradient of Adam; None for no clipping.
        prune: Whether first-order steps drop the worse half of the restarts at 25% and at 50% of the steps.
    """

    is_point: ClassVar[bool] = True
    gradient_options: ClassVar[tuple[str, ...]] = ("rate", "clip")  # they apply to gradient steps only

    restarts: int | None = None
    optimizer: str = "auto"
    steps: int | None = None
    rate: float | None = None
    clip: float | None = None
    prune: bool = True

    def __post_init__(self) -> None:
        check_options(self, check_int, "restarts", "steps")
        check_options(self, check_float, "rate", "clip", above=0)
        check_choice("optimizer", self.optimizer, ("auto", "second-order", "first-order"))
        check_choice("prune", self.prune, (True, False))
        if self.optimizer == "second-order":
            for option in self.gradient_options:
                if getattr(self, option) is not None:
                    expected = f"no such option with optimizer={self.optimizer!r}, which has no learning rate"
                    raise BNetError(option, expected=expected, actual=getattr(self, option))


@dataclass(frozen=True, kw_only=True)
class MAP(PointMethod):
    """The maximum of the posterior density.

    Args:
        restarts: The number of restarts, which are computed together; None for 4 with second-order steps and latent
            choices, else 1. The first starts at the parameters of the net, the others at random parameters.
        optimizer: `"second-order"`: the algorithm of `bt.EM`, in float64. `"first-order"`: Adam on the log evidence
            plus the log prior, in minibatches. `"auto"` is second order, unless an option of Adam is given, `batch` is
            smaller than the data, or the net is not covered (`f.notes` gives the reason).
        steps: The maximum number of steps of the restarts; None for 40 second-order or 300 first-order steps. Rounds of
            moves and final steps after second-order steps are in proportion: 10 and 100 with 40 steps.
        rate: The peak learning rate of Adam; None for 0.05. It rises during the first 5% of the steps and decays to 0
            as a cosine.
        clip: The maximum norm of the gradient of Adam; None for no clipping.
        prune: Whether first-order steps drop the worse half of the restarts at 25% and again at 50% of the steps.
            Second-order steps drop a restart only if its predicted maximum is not above that of another one.

    Raises:
        BNetError: If an option is out of range, or does not apply to the optimizer.

    >>> import bnet_transformer as bt
    >>> bt.MAP(restarts=4).optimizer
    'auto'
    """

    name: ClassVar[str] = "map"


@dataclass(frozen=True, kw_only=True)
class EM(PointMethod):
    """Expectation maximisation: exact responsibilities, closed-form updates of tables, and steps of the weights.

    Args:
        restarts: The number of restarts, which are computed together; None for 4 with second-order steps and latent
            choices, else 1. The first starts at the parameters of the net, the others at random parameters.
        optimizer: `"second-order"`: a damped Gauss-Newton step of the weights in each iteration, Newton steps at the
            end, and split-and-merge moves of heads, on all sentences, in float64. `"first-order"`: `inner` steps of
            Adam between two updates of the tables; plain EM if no weights are learned. `"auto"` is second order, unless
            an option of Adam is given, `batch` is smaller than the data, or the net is not covered (`f.notes` gives the
            reason).
        steps: The maximum number of steps of the restarts; None for 40 second-order or 300 first-order steps. Rounds of
            moves and final steps after second-order steps are in proportion: 10 and 100 with 40 steps.
        rate: The peak learning rate of Adam; None for 0.05. It rises during the first 5% of the steps and decays to 0
            as a cosine.
        clip: The maximum norm of the gradient of Adam; None for no clipping.
        prune: Whether first-order steps drop the worse half of the restarts at 25% and again at 50% of the steps.
            Second-order steps drop a restart only if its predicted maximum is not above that of another one.
        inner: The number of Adam steps of the weights between two updates of the tables; None for 10.

    Raises:
        BNetError: If an option is out of range, or does not apply to the optimizer.

    >>> import bnet_transformer as bt
    >>> bt.EM(inner=5).settings["method"]
    'em'
    """

    name: ClassVar[str] = "em"
    gradient_options: ClassVar[tuple[str, ...]] = ("rate", "clip", "inner")

    inner: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self, check_int, "inner")


# --------------------------------------------------------------------------------------------------------------------
# The steps: EM with a Gauss-Newton M step, and Newton steps.
#
# All restarts take their steps together. Most are EM iterations, which need no good start. Newton steps on the log
# posterior density converge fast near a maximum, and predict how much a restart can still gain. The optimizer computes
# in float64.

NEWTON_INTERVAL = 3  # each third iteration is a Newton step
SMALL_GAIN = 1.0  # nats that a Newton step still predicts near a maximum; there all iterations are Newton steps
EM_ITERATIONS, EM_TOLERANCE = 30, 0.02  # products and relative residual of an M step: any ascent keeps EM monotone
NEWTON_ITERATIONS, NEWTON_TOLERANCE = 100, 0.02  # maximum number of products, and relative residual, of a Newton step
MAX_EARLY_PRODUCTS = 20  # of a Newton step after an iteration that gained more than `SMALL_GAIN`
DEFINITE_RESIDUAL = 0.1  # a solution with a smaller relative residual shows that a Hessian is definite
STALL_INTERVAL, STALLED_GAIN = 10, 0.01  # a restart stops if it gains less, in nats, in this number of iterations
MIN_EM_FACTOR = 4**-2  # an EM step that decreases the density is shortened down to this fraction
GROWTH, MAX_GROWTH = 4.0, 256.0  # a Newton step along negative curvature grows by this factor, up to that one
MIN_STEP_FACTOR = 2**-6  # a Newton step that decreases the density is shortened down to this fraction
MIN_SAMPLE, VALUES_PER_WEIGHT = 50, 20  # the sample of the first iterations: sentences, observed numbers per weight
WARM_STEPS = 12  # iterations on the sample
INITIAL_DAMPING, MIN_DAMPING = 0.1, 1e-5  # damping of M steps
MAX_SADDLE_STEP = 16.0  # length of the longest step from a saddle point, in standard deviations
MAX_DAMPING = 0.001  # more damping could hide the curvature of a saddle point: such Newton steps predict no maximum
ROUNDING = 1e-11  # relative decrease of a density that may be a rounding error
GRADIENT_ROUNDING = 1e-13  # squared norm of a gradient, relative to the density, that may be a rounding error
AGREEMENT = 0.5  # nats of the log posterior density within which two restarts have reached the same maximum


class SecondOrderOptimizer(RestartOptimizer):
    """The optimizer of `map` and `em` by second-order steps.

    A restart that is stationary, or that cannot reach the density of another one, takes no further steps.
    """

    def __init__(self, problem: FitProblem, steps: int, restarts: int = 1) -> None:
        super().__init__(problem, steps, restarts)
        self.is_started = False
        self._reset(self.corpus)

    def _reset(self, corpus: Batch) -> None:
        """Start at the current parameters, with EM iterations on these sentences."""
        self.restarts = len(self.sets.restart_ids)
        self.damping = torch.full((self.restarts,), INITIAL_DAMPING, dtype=torch.float64, device=self.ranks.device)
        self.log_density: dict[int, float] = {}  # of each restart after its last step
        self.stationary: set[int] = set()  # the restarts at a stationary point
        self.done: dict[int, float] = {}  # the restarts that take no further steps: their density, or a bound of it
        self.reached = -math.inf  # the highest log posterior density that a restart has reached
        self.is_close_to_maximum = False  # whether the last Newton step was near the maxima of all restarts
        self._last_density: dict[int, float] = {}  # of each restart at the last test of its gain
        self._gains: dict[int, float] = {}  # of each restart by the last iteration
        self.use_sentences(corpus)

    def use_sentences(self, corpus: Batch) -> None:
        """Take EM iterations on these sentences."""
        self._expansion: Expansion | None = None
        self.expand = EMExpansion(self.objective, self.split_full_pass(corpus), self.ranks)
        self.solver = PreconditionedSolver(self.objective, corpus, self.split_full_pass, self.sets.values, self.ranks)

    @property
    def is_finished(self) -> bool:
        """True if every restart is stationary, or cannot win; or one is left, near its maximum."""
        return {*self.sets.restart_ids} <= {*self.done} or (
            self.is_close_to_maximum and len(self.sets.restart_ids) == 1 < self.restarts
        )

    def compute(self, is_interrupted: bool, is_due: bool) -> None:
        """Before the first step, drop the restarts whose density is not finite, and take EM iterations on a sample.

        Later steps compute the density of the parameters to which they move.
        """
        if self.is_started:
            return
        self.is_started = True
        density = self.compute_log_density(self.sets.values)
        live = self.valid_bounds(density / len(self.corpus)).nonzero()[:, 0].tolist()
        if not live:
            raise self.create_error(f"a bound of {float(density.max()):g}")
        self.select(live)
        if self.steps >= WARM_STEPS and (sample := self.draw_sample("sample")) is not None:
            warm = self.fork(self.sets.values, sample)
            for _ in range(WARM_STEPS):
                warm.em_step()
            self.sets.values = warm.sets.values

    def update(self) -> None:
        """Take one iteration of every restart."""
        restarts = list(self.sets.restart_ids)
        is_newton = self.step % (1 if self.is_close_to_maximum else NEWTON_INTERVAL) == 0 and self.step > 0
        log_density = self.newton_step() if is_newton else self.em_step()
        densities = dict(zip(restarts, log_density.tolist(), strict=True))
        self._gains = {k: density - self.log_density.get(k, -math.inf) for k, density in densities.items()}
        self.log_density |= densities
        self.bounds.append(max(self.log_density.values()) / len(self.corpus))
        self.step += 1
        if self.step % STALL_INTERVAL == 0:
            # Without a prior the likelihood can grow without limit along weights that grow, ever more slowly. So the
            # restarts that gained almost nothing since the last test stop, stationary or not.
            density = torch.tensor([self.log_density[k] for k in self.sets.restart_ids], dtype=torch.float64)
            before = [self._last_density.get(k, -math.inf) for k in self.sets.restart_ids]
            self._stop_restarts(density - torch.tensor(before, dtype=torch.float64) < STALLED_GAIN, density)
            self._last_density = dict(self.log_density)

    def stop_slow(self, target: float, patience: float) -> None:
        """Stop the sets that would not reach a density with some iterations that gain as much as the last one."""
        density, gain = (
            torch.tensor([values[k] for k in self.sets.restart_ids], dtype=torch.float64)
            for values in (self.log_density, self._gains)
        )
        self._stop_restarts(density + patience * gain < target, density)

    def draw_sample(self, *labels: str | int) -> Batch | None:
        """Draw sentences for the first iterations. None if most sentences are necessary.

        Args:
            *labels: Other labels give another sample.
        """
        # Far from a maximum, a sample tells the direction as well as all sentences do, at a fraction of the cost.
        weights = sum(value[0].numel() for value in self.sets.values.values())
        count = max(MIN_SAMPLE, VALUES_PER_WEIGHT * weights // count_observed_numbers(self.corpus))
        if self.objective.has_corpus_choice or 2 * count > len(self.corpus):
            return None
        generator = torch.Generator().manual_seed(derive_seed(self.seed, *labels))
        return self.corpus.take(torch.randperm(len(self.corpus), generator=generator)[:count])

    def select(self, rows: list[int]) -> None:
        """Keep only the restarts of these rows."""
        self.sets.select(rows)
        self.damping, self._expansion = self.damping[rows], None
        self.solver.select(rows)

    @property
    def _histories(self) -> dict[str, dict[int, float]]:
        """The numbers of each restart that a checkpoint contains."""
        return {
            "log_density": self.log_density,
            "done": self.done,
            "last_density": self._last_density,
            "gains": self._gains,
        }

    def snapshot(self) -> Checkpoint:
        """Create a checkpoint of the current state."""
        state = super().snapshot()
        tensors = dict(state.tensors)
        tensors["second_order/damping"] = self.damping
        tensors["second_order/search"] = torch.tensor([self.is_close_to_maximum, self.reached], dtype=torch.float64)
        tensors |= {f"second_order/{name}": value for name, value in self.solver.snapshot().items()}
        for name, values in self._histories.items():
            tensors[f"second_order/{name}"] = torch.tensor(list(values.items()), dtype=torch.float64).reshape(-1, 2)
        return replace(state, tensors=tensors)

    def restore(self, saved: Checkpoint) -> None:
        """Load the state of a checkpoint."""
        super().restore(saved)
        tensors = saved.get_tensors("second_order")
        self.damping = tensors["damping"].to(self.damping)
        is_close_to_maximum, self.reached = tensors["search"].tolist()
        self.is_close_to_maximum, self.is_started = bool(is_close_to_maximum), True
        for name, values in self._histories.items():
            values.clear()
            values.update({int(k): value for k, value in tensors[name].tolist()})
        self._expansion = None
        self.solver.restore(tensors, self.damping)

    def em_step(self, tilt: Tilt | None = None) -> Tensor:
        """Take one EM iteration, and return the log posterior density of each set after it, `[set]`.

        A step that would decrease the density of a set is not taken, and its damping rises.
        """
        # The closed-form tables and the damped Gauss-Newton step both increase the expected complete-data density, so
        # this is a generalised EM iteration, whose density never falls (Dempster, Laird and Rubin 1977). The damping is
        # that of Levenberg and Marquardt (Nocedal and Wright 2006, section 10.3).
        before = self._expansion
        if before is None or tilt is not None:
            before = self.expand(self.sets.values, tilt)
        values, tables = self.sets.values, update_tables(self.objective, self.sets.values, before.counts)
        step, gain = {}, torch.zeros_like(self.damping)
        if before.model is not None:
            scale = before.model.estimate_scale()
            if tilt is None:
                solution = self.solver.solve(values, before.model, scale, self.damping, EM_ITERATIONS, EM_TOLERANCE)
            else:  # the blocks do not know the sentences of a new head
                solution = solve_model(before.model, scale, self.damping, EM_ITERATIONS, EM_TOLERANCE)
            step, gain = before.model.layout.unflatten(solution.step), solution.gain
        after, is_open, factor = before, torch.ones_like(gain, dtype=torch.bool), 1.0
        new = values
        while bool(is_open.any()) and factor >= MIN_EM_FACTOR:
            # An evaluation costs much less than a solution of the model: a shorter step is tried first.
            trial = {**values, **tables, **{name: values[name] + factor * d for name, d in step.items()}}
            trial = _where(is_open, trial, new)
            after = self.expand(trial, tilt)
            increase = after.log_density - before.log_density
            is_worse = increase < -ROUNDING * before.log_density.abs()
            if factor == 1:  # from the increase of the density and the one that the model predicted
                rate = torch.where(increase > 0.75 * gain, 0.3, torch.where(increase < 0.25 * gain, 2.0, 1.0))
                self.damping = self.damping * torch.where(increase >= -ROUNDING * before.log_density.abs(), rate, 4.0)
            is_open, new, factor = is_open & is_worse, trial, factor / 4
        self.damping = self.damping.clamp(min=MIN_DAMPING)
        is_reusable = tilt is None and not bool(is_open.any())
        self.sets.values, self._expansion = _where(~is_open, new, values), after if is_reusable else None
        return torch.where(is_open, before.log_density, after.log_density)

    def expand_log_density(self) -> tuple[Tensor, QuadraticModel, dict[str, Tensor]]:
        """Expand the log posterior density in the weights and the log ratios of the tables.

        Returns:
            The density of each set, `[set]`, its exact quadratic model, and the parameters with finite logits.
        """
        # A table is moved in its logits, whose differences are log ratios. A constant added to a row does not change
        # the density, and neither do changes of the basis of W_q and W_k: H is zero in these directions, and the
        # gradient and all steps of conjugate gradients are orthogonal to them.
        values = {name: value.clamp(min=LOG_ZERO) for name, value in self.sets.values.items()}
        layout = FlatLayout.create(values, self.objective.learned.names)
        with sdpa_kernel(SDPBackend.MATH):
            local, evidence = expand_function(partial(self.sum_log_evidence, self.corpus_parts), values, layout)
        log_prior, prior = expand_function(self.objective.log_prior, values, layout)

        def product(v: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                return self.ranks.all_reduce(evidence.product(v)) + prior.product(v)

        gradient = self.ranks.all_reduce(evidence.gradient) + prior.gradient
        return self.ranks.all_reduce(local) + log_prior, QuadraticModel(layout, gradient, product), values

    def newton_step(self) -> Tensor:
        """Take one Newton step where it increases the density, and stop the restarts that are stationary or cannot win.

        Returns:
            The log posterior density of each set after the step, `[set]`.
        """
        before, model, values = self.expand_log_density()
        tables = self.objective.learned.tables  # their logits have no scale
        point = model.layout.flatten({k: torch.zeros_like(v) if k in tables else v for k, v in values.items()})
        scale = model.estimate_scale()
        # Regularised Newton steps (Li, Fukushima, Qi and Yamashita 2004). Along a change of basis f is constant on a
        # curve, not on a line, so that near a maximum H has eigenvalues of either sign there, of the size of the
        # gradient divided by the parameters. This damping exceeds them, and vanishes with the gradient.
        length = (model.gradient.square() / scale).sum(1) / (scale * point.square()).sum(1).clamp(min=1.0)
        floor, damping = GRADIENT_ROUNDING * before.abs(), length.sqrt()
        # Where EM iterations still gain much, an exact step is worth less than the EM iterations that it costs.
        is_early = max(self._gains.get(k, math.inf) for k in self.sets.restart_ids) > SMALL_GAIN
        iterations = min(MAX_EARLY_PRODUCTS if is_early else NEWTON_ITERATIONS, 2 * point.shape[1])
        newton = self.solver.solve(values, model, scale, damping, iterations, NEWTON_TOLERANCE, floor)
        is_definite = ~newton.has_ascent & (newton.residual < DEFINITE_RESIDUAL)
        # A gain below the rounding errors of the density is no reason to move.
        after, new, factor = before, self.sets.values, 1.0
        is_open = newton.gain > ROUNDING * before.abs()
        while bool(is_open.any()) and factor >= MIN_STEP_FACTOR:
            trial = self._move(values, model.layout.unflatten(newton.step * factor))
            density = self.compute_log_density(trial)
            is_better = is_open & density.isfinite() & (density >= before)
            new, after = _where(is_better, trial, new), torch.where(is_better, density, after)
            is_open, factor = is_open & ~is_better, factor / 2
        # A step along a direction of negative curvature is as long as the step before it: longer ones are tried.
        is_growing, factor = newton.has_ascent & (after > before), GROWTH
        while bool(is_growing.any()) and factor <= MAX_GROWTH:
            trial = self._move(values, model.layout.unflatten(newton.step * factor))
            density = self.compute_log_density(trial)
            is_growing = is_growing & (density > after)
            new, after = _where(is_growing, trial, new), torch.where(is_growing, density, after)
            factor *= GROWTH
        self.sets.values, self._expansion = new, None
        gains = newton.gain.clamp(min=0)
        is_close_to_maximum = is_definite & (gains < SMALL_GAIN)
        self.is_close_to_maximum = bool(is_close_to_maximum.all())
        is_stationary = is_definite & ((2 * gains).sqrt() <= DECREMENT)
        # At a point with a definite Hessian the model has its maximum at f + g^T H^-1 g / 2. A restart is dropped only
        # if this is not above the density that another restart has reached, by more than `AGREEMENT`. There is no
        # prediction where the damping can hide a negative curvature, or where the step has gained more than predicted.
        self.reached = max(self.reached, float(after.max()))
        is_leader = (after == self.reached) & (torch.arange(len(after), device=after.device) == int(after.argmax()))
        is_predicted = is_definite & (damping < MAX_DAMPING) & (after <= before + gains + AGREEMENT)
        bound = torch.maximum(after, before + gains)
        cannot_win = is_predicted & (bound < self.reached + AGREEMENT) & ~is_leader
        if self.validation is not self.corpus:  # the restart of the highest density need not be the chosen one
            cannot_win = torch.zeros_like(cannot_win)
        self.stationary |= {self.sets.restart_ids[row] for row in is_stationary.nonzero()[:, 0].tolist()}
        self._stop_restarts(is_stationary | cannot_win, bound)
        return after

    def leave_saddle(self) -> bool:
        """Move sets at a stationary point along a direction in which the density increases, if one is found.

        Returns:
            True if a set has moved; it can take further steps.
        """
        # Conjugate gradients from the gradient do not meet the negative curvature of directions that are orthogonal to
        # it, such as all directions of W_q and W_k where both are 0.
        before, model, values = self.expand_log_density()
        curvature, direction = find_lowest_curvature(model, model.estimate_scale(), derive_seed(self.seed, "saddle"))
        has_ascent = curvature < -MAX_DAMPING
        new, is_open, factor = self.sets.values, has_ascent, MAX_SADDLE_STEP
        while bool(is_open.any()) and factor >= MIN_STEP_FACTOR:
            for sign in (1.0, -1.0):
                trial = self._move(values, model.layout.unflatten(sign * factor * direction))
                density = self.compute_log_density(trial)
                is_better = is_open & density.isfinite() & (density > before + STALLED_GAIN)
                new, is_open = _where(is_better, trial, new), is_open & ~is_better
            factor /= 2
        has_moved = bool((has_ascent & ~is_open).any())
        if has_moved:
            self.sets.values, self._expansion, self.is_close_to_maximum = new, None, False
            self.done, self.stationary = {}, set()
        return has_moved

    def _stop_restarts(self, is_done: Tensor, log_density: Tensor) -> None:
        """Stop some restarts; the last one stays in `sets`."""
        if not bool(is_done.any()):
            return
        self.update_best()  # the parameters of a stopped restart may be the best
        pairs = zip(self.sets.restart_ids, is_done.tolist(), log_density.tolist(), strict=True)
        self.done |= {restart: value for restart, is_last, value in pairs if is_last}
        rows = (~is_done).nonzero()[:, 0].tolist()
        if rows:
            self.select(rows)

    def _move(self, values: Mapping[str, Tensor], step: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add a step to the parameters, and normalise the tables."""
        moved = {name: value + step[name] for name, value in values.items()}
        for name in self.objective.learned.tables:
            logits = moved[name].log_softmax(-1)
            moved[name] = logits.where(self.sets.values[name] > -torch.inf, -torch.inf)
        return moved

    def compute_log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        """The log posterior density of each set up to a constant, `[set]`, without a gradient."""
        with torch.no_grad():
            evidence = self.sum_log_evidence(self.corpus_parts, values)
            return self.ranks.all_reduce(evidence) + self.objective.log_prior(values)

    def fork(self, values: Mapping[str, Tensor], sample: Batch | None = None) -> SecondOrderOptimizer:
        """Return an optimizer of the same problem at other parameters.

        Args:
            values: The parameters, `[set, *shape]`.
            sample: The sentences of its EM iterations; None for all.
        """
        other = copy(self)
        other.sets, other.is_started = ParameterSets.create(dict(values)), True
        other.step, other.bounds, other.measured, other.best = 0, [], [], (-math.inf, 0, {})
        other._reset(self.corpus if sample is None else sample)
        return other


def _where(condition: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The new parameters of the sets for which the condition, `[set]`, is true, and the old ones of the others."""
    return {k: torch.where(condition.reshape(-1, *[1] * (v.dim() - 1)), new[k], v) for k, v in old.items()}


# --------------------------------------------------------------------------------------------------------------------
# Split-and-merge moves from a fit that has converged: one head is removed and grown again elsewhere.
#
# A local maximum of a mixture often spends two heads where one is enough, and one where two are needed. EM cannot leave
# it, but a fit that starts with one head less, and a new one on sentences that the others explain badly, can.

FORBIDDEN = -1e6  # log weight of a state that an anchor excludes; far from LOG_ZERO, so that sums keep their digits
MIN_ANCHORS = 20  # sentences (or words) on which a new head starts, if there are as many
FORCED_STEPS, FREE_STEPS, LAST_STEPS = 3, 6, 30
MAX_FAILURES = 4  # rounds in sequence without an improvement
PATIENCE = 10  # gains as large as its last one with which a candidate must be able to exceed the density of the fit
FINALISTS = 2  # candidates that take the last steps, at most `LAST_STEPS`


def improve_by_moves(
    optimizer: SecondOrderOptimizer, best: Mapping[str, Tensor], rounds: int, should_stop: Callable[[], bool]
) -> dict[str, Tensor]:
    """Split and merge until a round of moves of every selector does not increase the log posterior density.

    Args:
        optimizer: The optimizer that found `best`; its own state does not change.
        best: The parameters of a converged fit.
        rounds: The maximum number of rounds.
        should_stop: Whether to stop before the next move.

    Returns:
        The best parameters.
    """
    network, weights = optimizer.objective.network, optimizer.objective.learned.weights
    selectors = [  # of at least two heads with learned weights; not those with one draw for all sentences
        spec
        for spec in find_selectors(network)
        if spec.scope != "corpus"
        and (spec.tpm.states or 0) > 1
        and any(head_dims(network, spec, name) for name in weights)
    ]
    density = float(optimizer.compute_log_density({name: value[None] for name, value in best.items()})[0])
    failures = 0
    for number in range(rounds):
        before = density
        for selector in selectors:
            if should_stop():
                break
            score, _, parameters = propose_moves(optimizer, best, selector, number, density).best
            new_density = score * len(optimizer.corpus)
            if new_density > density + AGREEMENT:
                density, best = new_density, parameters
        failures = failures + 1 if density == before else 0
        if failures == MAX_FAILURES or not selectors:
            break
    return dict(best)


def propose_moves(
    optimizer: SecondOrderOptimizer, best: Mapping[str, Tensor], selector: NodeSpec, number: int, target: float
) -> SecondOrderOptimizer:
    """Return an optimizer with the best candidates of one round, in which one head each was removed and grown again.

    Args:
        optimizer: The optimizer of the fit.
        best: The parameters from which the moves start.
        selector: The selector of the heads.
        number: The number of the round, which determines the random draws.
        target: The log posterior density that a candidate must exceed; those that cannot are stopped.
    """
    # Split-and-merge EM (Ueda, Nakano, Ghahramani and Hinton 2000). To remove head k and to grow it elsewhere is their
    # merge of k into the others and a split in one move. As in k-means++ (Arthur and Vassilvitskii 2007) the new head
    # starts on sentences that are sampled in proportion to how badly the other heads explain them.
    objective, heads = optimizer.objective, selector.tpm.states or 0
    sets = {name: value.expand(heads, *value.shape).clone() for name, value in best.items()}
    fresh = init_restarts(
        objective.network, tuple(sets), heads + 1, derive_seed(optimizer.seed, "move", number), optimizer.ranks.device
    ).values
    for name in objective.learned.weights:
        for dim in head_dims(objective.network, selector, name)[:1]:
            for k in range(heads):
                sets[name][k].select(dim, k).copy_(fresh[name][k + 1].select(dim, k))
    sample = optimizer.draw_sample("move sample", number)
    candidates = optimizer.fork(sets, sample)
    tilt = draw_anchors(candidates, best, selector, derive_seed(optimizer.seed, "anchors", number))
    for _ in range(FORCED_STEPS):
        candidates.em_step(tilt)
    for _ in range(FREE_STEPS):
        density = candidates.em_step()
    candidates.select(density.topk(min(FINALISTS, heads)).indices.tolist())
    if sample is not None:
        candidates.use_sentences(optimizer.corpus)
    candidates.reached = target
    while candidates.step < LAST_STEPS and not candidates.is_finished:
        candidates.update()
        candidates.stop_slow(target + AGREEMENT, PATIENCE)
    candidates.evaluate()
    return candidates


def draw_anchors(optimizer: SecondOrderOptimizer, best: Mapping[str, Tensor], selector: NodeSpec, seed: int) -> Tilt:
    """Draw the sentences (or words) on which each removed head starts again: its anchors.

    Set k removes head k. Its anchors can only be in head k, and all other sentences (or words) only in other heads.
    """
    heads, dims, badness = selector.tpm.states or 0, (0, 0), list[Tensor]()
    with torch.no_grad():
        for part in optimizer.expand.parts:
            measure = partial(_measure_badness, selector=selector)
            values, dims = optimizer.objective.evaluate(best, part, measure)
            badness.append(values)
    sizes = [len(values) for values in badness]
    # All processes draw the anchors of all sentences, so that the result does not depend on their number.
    gathered = optimizer.ranks.all_gather(torch.cat(badness) if badness else torch.zeros(0))
    weights = gathered.transpose(0, 1).flatten(1).double().cpu()
    weights = weights - weights.amin(1, keepdim=True) + torch.finfo(torch.float32).tiny
    count = min(weights.shape[1], max(MIN_ANCHORS, weights.shape[1] // (2 * heads)))
    sampled = torch.multinomial(weights, count, generator=torch.Generator().manual_seed(seed))
    is_anchor = torch.zeros_like(weights, dtype=torch.bool).scatter_(
        1, sampled, torch.ones_like(sampled, dtype=torch.bool)
    )
    anchors = is_anchor.reshape(heads, len(gathered), *gathered.shape[2:]).transpose(0, 1).to(gathered.device)
    states_dim, batch_dim = dims
    log_weights = []
    for part in optimizer.ranks.shard(anchors).split(sizes):  # [sentence, removed head, ...]
        mask = part.transpose(0, 1).reshape(heads, *[1] * batch_dim, len(part), *part.shape[2:])
        states = torch.arange(heads, device=mask.device)
        states = states.reshape([-1 if d == states_dim else 1 for d in range(mask.dim() - 1)])
        removed = torch.arange(heads, device=mask.device).reshape(-1, *[1] * (mask.dim() - 1))
        log_weights.append(torch.where(mask == (states == removed), 0.0, FORBIDDEN).to(gathered.dtype))
    return Tilt(selector, log_weights)


def _measure_badness(
    state: ExecutionState, factors: list[Factor], selector: NodeSpec
) -> tuple[Tensor, tuple[int, int]]:
    """How badly the other heads explain each sentence (or word), `[sentence, removed head, *plates, word]`.

    The function also returns the dim of the states of the selector, and that of the sentences, in the layout.
    """
    group, dim, batch_dim = selector.group, state.layout.enumerated.index(selector.group.index), state.layout.batch_dim
    shape = get_full_shape(state, group.plates, group.word_stack, get_batch_size(factors, state))
    states = torch.arange(selector.tpm.states or 0, device=state.device)
    states = states.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    rows = []
    for k in range(states.numel()):
        removed = torch.where(states == k, FORBIDDEN, 0.0).to(state.log_dtype)
        if group.word_stack is None and not group.plates:
            rows.append(-eliminate_choices(state, [*factors, Factor(selector, removed)]).reshape(shape[batch_dim:]))
        else:
            # The log evidence of each word on its own; exact if words share no other choice.
            total = removed
            for factor in factors:
                axes = [d for d in range(batch_dim + 1, len(shape)) if factor.table.shape[d] > 1 and shape[d] == 1]
                total = total + (factor.table.sum(axes, keepdim=True) if axes else factor.table)
            evidence = total.logsumexp([*range(batch_dim)], keepdim=True).expand([1] * batch_dim + shape[batch_dim:])
            rows.append(-evidence.reshape(shape[batch_dim:]))
    return torch.stack(rows, 1), (dim, batch_dim)


# --------------------------------------------------------------------------------------------------------------------
# `map` and `em`: the choice of the optimizer, the search by restarts, the moves, and the tests of the result.

RESTARTS = 4  # default of second-order steps for a net with latent choices
SEARCH_STEPS, FIRST_ORDER_STEPS, INNER_STEPS = 40, 300, 10
# With `SEARCH_STEPS`; in proportion with more or fewer steps:
MAX_MOVE_ROUNDS = 10
FINAL_STEPS = 100  # of the best restart, to a stationary point
MAX_WEIGHTS = 20_000  # learned weights that second-order steps cover


def choose_first_order(problem: FitProblem, method: PointMethod) -> tuple[AdamSteps, str] | None:
    """Choose between first-order and second-order steps of a method for a problem.

    Args:
        problem: The fit problem.
        method: The method.

    Returns:
        The options of Adam for this problem, and the reason for first-order steps; None if the steps are second-order.

    Raises:
        BNetError: If an option does not apply.
    """
    network, learned, batch = problem.objective.network, problem.objective.learned, problem.batch
    given = {name: value for name in method.gradient_options if (value := getattr(method, name)) is not None}
    inner = (method.inner or INNER_STEPS) if isinstance(method, EM) else None
    if isinstance(method, EM) and not learned.weights:
        for name, value in {**given, **({} if batch is None else {"batch": batch})}.items():
            expected = "no such option, because EM that learns only tables takes no gradient steps"
            raise BNetError(name, expected=expected, actual=value, hint="Use bt.MAP(), or learn weights too (learn=)")
        inner = 1
    weights = sum(network.parameters[name].numel() for name in learned.weights)
    reason = find_uncovered(problem.objective)
    if method.optimizer == "second-order":
        check_full_batch(problem, "a second-order step", "optimizer='first-order'")
        if reason is not None:
            raise BNetError("optimizer", expected="'first-order' or 'auto'", actual="'second-order'", hint=reason)
    elif method.optimizer == "first-order":
        reason = "optimizer='first-order'"
    elif given:
        reason = f"{', '.join(given)} applies to gradient steps only"
    elif batch is not None and batch < len(problem.corpus):
        reason = f"batch={batch}"
    elif weights > MAX_WEIGHTS:
        reason = f"{weights:,} weights, more than the {MAX_WEIGHTS:,} that second-order steps cover"
    if reason is None:
        return None
    steps, rate = method.steps or FIRST_ORDER_STEPS, method.rate or AdamSteps.rate
    restarts = method.restarts or 1
    return AdamSteps(
        steps=steps, rate=rate, clip=method.clip, restarts=restarts, inner=inner, prune=method.prune
    ), reason


def count_restarts(problem: FitProblem, method: PointMethod) -> int:
    """Return the number of restarts of a method for a problem."""
    needs_restarts = problem.objective.network.choices and choose_first_order(problem, method) is None
    return method.restarts or (RESTARTS if needs_restarts else 1)


def fit_point(problem: FitProblem, method: PointMethod) -> Fit[Network]:
    """Fit by `map` or `em`.

    Args:
        problem: The fit problem.
        method: The method.

    Returns:
        The fit; its net has the parameters with the best score.
    """
    first_order = choose_first_order(problem, method)
    if first_order is None:
        return fit_by_second_order(problem, method)
    options, reason = first_order
    result = fit_by_adam(problem, method, options)
    steps = "steps of Adam" if problem.objective.learned.weights or options.inner is None else "EM steps"
    notes = [f"{options.steps} first-order {steps} ({reason}), which can end before they converge", *result.notes]
    values = result.network.parameters
    if result.finished and sum(values[name].numel() for name in result.learned) <= MAX_WEIGHTS:
        notes += describe_parameters(problem.objective, len(problem.corpus), values)
    return replace(result, notes=tuple(notes))


def fit_by_second_order(problem: FitProblem, method: PointMethod) -> Fit[Network]:
    """Fit by second-order steps: all restarts, then split-and-merge moves, then steps to a stationary point.

    Args:
        problem: The fit problem.
        method: The method.

    Returns:
        The fit. If held-out sentences choose among restarts, there are no moves and no further steps.
    """
    steps = method.steps or SEARCH_STEPS
    double = to_float64(problem)
    optimizer = SecondOrderOptimizer(double, steps, count_restarts(problem, method))
    is_finished, converged, notes = optimize(optimizer, problem.loop), None, list[str]()
    (_, restart, best), bounds = optimizer.best, optimizer.bounds
    fields: dict[str, Any] = {"restart": restart, "criterion": optimizer.criterion}
    if is_finished and problem.held_out is None:
        with defer_interrupt() as interrupts:
            rounds = steps * MAX_MOVE_ROUNDS // SEARCH_STEPS
            best = improve_by_moves(optimizer, best, rounds, lambda: optimizer.ranks.any(bool(interrupts)))
            last = optimizer.fork({name: value[None] for name, value in best.items()})
            final_steps = steps * FINAL_STEPS // SEARCH_STEPS
            while last.step < final_steps and is_finished and (not last.is_finished or last.leave_saddle()):
                last.update()
                is_finished = not optimizer.ranks.any(bool(interrupts))
        best, converged = last.sets.get(0), bool(last.stationary)
        bounds = [*bounds, *last.bounds]
        if not converged:
            notes.append(_describe_end(problem, last.step >= final_steps))
    ends = tuple({**optimizer.log_density, **optimizer.done}.values())
    if is_finished:
        values = {**optimizer.objective.network.parameters, **best}
        notes += describe_restarts(ends, bounds[-1] * len(problem.corpus))
        notes += describe_parameters(optimizer.objective, len(problem.corpus), values)
    fields["restart_densities"] = ends
    fields |= {"bounds": tuple(bounds), "measured": tuple(optimizer.measured), "finished": is_finished}
    evaluated_on = TRAINING_SENTENCES if problem.held_out is None else "held-out sentences"
    return build_fit(problem, method, best, evaluated_on, converged=converged, notes=tuple(notes), **fields)


def _describe_end(problem: FitProblem, used_all_steps: bool) -> str:
    """Describe a fit that has not reached a stationary point."""
    hints = ["more steps="] if used_all_steps else []
    if problem.objective.learned.spread is None and problem.objective.learned.weights:
        hints.append("a prior (spread=), if the likelihood grows without limit")
    if problem.objective.network.choices:
        hints.append("fewer heads")
    reason = "in all its steps" if used_all_steps else "and gains almost nothing in further steps"
    help_text = f"; what may help: {', or '.join(hints)}" if hints else ""
    return f"the fit has not reached a stationary point {reason}{help_text}"


def describe_restarts(ends: Sequence[float], density: float) -> list[str]:
    """Describe restarts that have not reached the same maximum.

    Args:
        ends: The log posterior density at which each restart ended.
        density: That of the result.
    """
    below = sorted(density - end for end in ends)
    count = sum(gap < AGREEMENT for gap in below)
    if len(below) < 2 or count >= 2:
        return []
    source = f"{count} of {len(below)} restarts" if count else f"no restart of {len(below)}, but a move of heads,"
    return [
        f"{source} reached this maximum; the next one is {below[count]:.1f} nats lower. There may be a better one: "
        "use more restarts= or another seed="
    ]

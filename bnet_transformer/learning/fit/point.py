"""`map` and `em`: the choice of the optimizer, the search by restarts, the moves, and the tests of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError
from bnet_transformer.learning.fit.diagnostics import describe_parameters
from bnet_transformer.learning.fit.gauss_newton import find_uncovered
from bnet_transformer.learning.fit.problem import EM, FitProblem, PointMethod, StepOptions, check_full_batch, to_float64
from bnet_transformer.learning.fit.restarts import TRAINING_SENTENCES, build_fit, fit_by_adam, optimize
from bnet_transformer.learning.fit.result import Fit
from bnet_transformer.learning.fit.second_order import AGREEMENT, SecondOrderOptimizer
from bnet_transformer.learning.fit.split_merge import improve_by_moves
from bnet_transformer.learning.training.configs import defer_interrupt

RESTARTS = 4  # of a net with latent choices
SEARCH_STEPS, FIRST_ORDER_STEPS, INNER_STEPS = 40, 300, 10
# With `SEARCH_STEPS`; in proportion with more or fewer steps:
MAX_MOVE_ROUNDS = 10
FINAL_STEPS = 100  # of the best restart, to a stationary point
MAX_WEIGHTS = 20_000  # learned weights that second-order steps cover


def resolve_options(problem: FitProblem, method: PointMethod) -> tuple[StepOptions, str | None]:
    """Choose the optimizer of a method for a problem, and fill its defaults.

    Args:
        problem: The fit problem.
        method: The method.

    Returns:
        The options, and the reason for first-order steps; None for second-order steps.

    Raises:
        BNetError: If an option does not apply.
    """
    objective, learned = problem.objective, problem.objective.learned
    inner = (method.inner or INNER_STEPS) if isinstance(method, EM) else None
    given = {name: getattr(method, name) for name in method.gradient_options} | {"batch": problem.batch}
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(method, EM) and not learned.weights:
        for name, value in given.items():
            expected = "no such option, because EM that learns only tables takes no gradient steps"
            raise BNetError(name, expected=expected, actual=value, hint="Use bt.MAP(), or learn weights too (learn=)")
        inner = 1
    reason = None if method.optimizer == "second-order" else _find_reason_for_first_order(problem, method, given)
    if method.optimizer == "second-order":
        check_full_batch(problem, "a second-order step", "optimizer='first-order'")
        if (fault := find_uncovered(objective)) is not None:
            raise BNetError("optimizer", expected="'first-order' or 'auto'", actual="'second-order'", hint=fault)
    if reason is None:
        restarts = method.restarts or (RESTARTS if objective.network.choices else 1)
        return StepOptions(steps=method.steps or SEARCH_STEPS, restarts=restarts), None
    options = StepOptions(
        steps=method.steps or FIRST_ORDER_STEPS,
        rate=method.rate or StepOptions.rate,
        clip=method.clip,
        restarts=method.restarts or 1,
        inner=inner,
        prune=method.prune,
    )
    return options, reason


def _find_reason_for_first_order(problem: FitProblem, method: PointMethod, given: dict[str, object]) -> str | None:
    """Return the reason for first-order steps; None if second-order steps apply."""
    if method.optimizer == "first-order":
        return "optimizer='first-order'"
    given.pop("batch", None)
    if given:
        return f"{', '.join(given)} applies to gradient steps only"
    if problem.batch is not None and problem.batch < len(problem.corpus):
        return f"batch={problem.batch}"
    objective = problem.objective
    weights = sum(objective.network.parameters[name].numel() for name in objective.learned.weights)
    if weights > MAX_WEIGHTS:
        return f"{weights:,} weights, more than the {MAX_WEIGHTS:,} that second-order steps cover"
    return find_uncovered(objective)


def fit_point(problem: FitProblem, method: PointMethod) -> Fit[Network]:
    """Fit by `map` or `em`.

    Args:
        problem: The fit problem.
        method: The method.

    Returns:
        The fit; its net has the parameters with the best score.
    """
    options, reason = resolve_options(problem, method)
    if reason is None:
        return fit_by_second_order(problem, method, options)
    result = fit_by_adam(problem, method, options)
    steps = "steps of Adam" if problem.objective.learned.weights or options.inner is None else "EM steps"
    notes = [f"{options.steps} first-order {steps} ({reason}), which can end before they converge", *result.notes]
    if (
        result.finished
        and sum(problem.objective.network.parameters[name].numel() for name in result.learned) <= MAX_WEIGHTS
    ):
        notes += describe_parameters(problem.objective, len(problem.corpus), result.network.parameters)
    return replace(result, notes=tuple(notes))


def fit_by_second_order(problem: FitProblem, method: PointMethod, options: StepOptions) -> Fit[Network]:
    """Fit by second-order steps: all restarts, then split-and-merge moves, then steps to a stationary point.

    Args:
        problem: The fit problem.
        method: The method.
        options: Its options for this net.

    Returns:
        The fit. If held-out sentences choose among restarts, there are no moves and no further steps.
    """
    double = to_float64(problem)
    optimizer = SecondOrderOptimizer(double, options)
    is_finished, converged, notes = optimize(optimizer, problem.loop), None, list[str]()
    if not optimizer.measured or optimizer.measured[-1][0] < optimizer.step:
        optimizer.evaluate_restarts()
    (_, restart, best), bounds = optimizer.best, optimizer.bounds
    fields: dict[str, Any] = {"restart": restart, "criterion": optimizer.criterion}
    if is_finished and problem.held_out is None:
        with defer_interrupt() as interrupts:
            rounds = options.steps * MAX_MOVE_ROUNDS // SEARCH_STEPS
            best = improve_by_moves(optimizer, best, rounds, lambda: optimizer.ranks.any(bool(interrupts)))
            last = optimizer.fork({name: value[None] for name, value in best.items()})
            final_steps = options.steps * FINAL_STEPS // SEARCH_STEPS
            while last.step < final_steps and is_finished and (not last.is_converged or last.leave_saddle()):
                last.advance()
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

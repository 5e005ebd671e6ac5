"""Plans: which algorithm computes the result of a question, why, whether it is exact, and what it costs (`Plan`).

Each question, such as a posterior, has one function that returns its plan. `Plan.run` computes the result; `explain`
returns the same plan without running it. A plan is chosen from the structure of the net, the evidence and the
interventions: `choose_plan` tries the algorithms of a question, fastest first. Each of them returns its plan, or why it
does not apply (`Fault`). No numbers are computed, and no exceptions decide.

Algorithms:

- `graph`: uses the structure of the graph only.
- `compiled`: one batched pass of the compiled net.
- `elimination`: whole groups of choices are summed out of the factors of whole groups, within the compiled net.
- `variable elimination`: single choices are summed out of the factor graph of the sentence (`factor_graph`).
- `conditioning`: the joint states of some choices are a batch; the other choices are eliminated in each row.
- `enumeration`: all joint states of the choices are a batch of the compiled net.
- `sampling`: Monte Carlo samples, which are approximate.
- `sequential`: one run for each cell of a sweep; slow.
- `reference`: evaluates nodes one by one in Python; slow.
"""

from __future__ import annotations

import functools
import html
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

from torch import Tensor

from bnet_transformer._core.process import translate_memory_errors
from bnet_transformer.compiler.plan import StructureError
from bnet_transformer.errors import BNetError, BudgetError, format_count
from bnet_transformer.reference import GroundModel

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
WARN_EVALUATIONS = 2**16  # node evaluations, some 10 s in all, above which a slow plan warns
FAST_ALGORITHMS = ("graph", "compiled", "elimination")  # every other plan names the node that is its reason
MAX_LISTED = 6  # names of nodes in a message
UNLIMITED_STATES = 2**1023  # more joint states than any sentence has; the largest budget that queries accept


class PerformanceWarning(UserWarning):
    """A slow algorithm computes a query; the message contains the cost and the node that is the reason."""


@dataclass(frozen=True)
class Obstacle:
    """Why an algorithm does not apply, without an error: the next one is tried.

    Args:
        node: The node or the node group that is the reason.
        reason: The reason, as a clause.
        remedy: What would make the algorithm possible, as an instruction; None if nothing would.
    """

    node: str
    reason: str
    remedy: str | None = None

    def __str__(self) -> str:
        return self.reason


Fault = Obstacle | StructureError  # a StructureError is the error that the algorithm would raise


@dataclass(frozen=True)
class Plan(Generic[R]):
    """How a result is computed: the algorithm, the reason and the cost. `print` shows it as a sentence.

    Attributes:
        question: The query in words, such as `"posterior of c"`.
        algorithm: The algorithm: `"graph"` (the structure of the graph only), `"compiled"` (one batched pass),
            `"elimination"` (exact sums over choices within the compiled net), `"variable elimination"` (exact sums
            over choices in tables of the factor graph), `"conditioning"` (the joint states of some choices are a batch,
            in which the others are eliminated), `"enumeration"` (all joint states are a batch), `"sampling"`,
            `"sequential"` (one run for each cell of a sweep) or `"reference"` (node by node in Python).
        reason: Why this algorithm is used, in words.
        run: Computes the result.
        node: The node or node group that rules out a faster algorithm; None if the fastest algorithm is used.
        states: The number of joint states of the choices that are computed; for variable elimination, those of the
            largest scope.
        evaluations: The number of nodes that are evaluated one by one in Python.
        is_exact: Whether the result is exact: False for samples and for first-order estimates.
        parts: The plans of the parts of the query, if they differ.
        choices: The ground ids of the choices whose joint states are computed.
        rows: The number of evaluations of the net, as rows of batches; 0 if they are not counted.
        entries: The number of entries of all tables of variable elimination.
        order: The names of the choices in the order in which variable elimination sums them out.
        scope: The names of the choices of the largest scope of variable elimination.
        excess: The error that the query raises, because it exceeds its budget; None within the budget. The other
            attributes are then those of the query with a larger budget.
        count_flops: Counts the floating-point operations of the compiled passes; see `flops`.
    """

    question: str
    algorithm: str
    reason: str
    run: Callable[[], R] = field(repr=False, compare=False)
    node: str | None = None
    states: int = 1
    evaluations: int = 0
    is_exact: bool = True
    parts: tuple[Plan[Any], ...] = ()
    choices: tuple[int, ...] = field(default=(), repr=False)
    rows: int = 0
    entries: int = 0
    order: tuple[str, ...] = field(default=(), repr=False)
    scope: tuple[str, ...] = ()
    excess: str | None = None
    count_flops: Callable[[], int | None] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def flops(self) -> int | None:
        """The floating-point operations of the compiled passes; None without a compiled pass."""
        return None if self.count_flops is None else self.count_flops()

    def with_run(self, run: Callable[[], S]) -> Plan[S]:
        """The plan with another result.

        Args:
            run: Computes the result.

        Returns:
            The new plan.
        """
        return replace(self, run=run)  # type: ignore[arg-type, return-value]

    def then(self, function: Callable[[R], S]) -> Plan[S]:
        """The plan whose result is a function of the result of this plan.

        Args:
            function: The function, which is called when the plan runs.

        Returns:
            The new plan.
        """
        return replace(self, run=lambda: function(self.run()))  # type: ignore[arg-type, return-value]

    def with_warning(self) -> Plan[R]:
        """The plan that warns before it evaluates many nodes one by one.

        Returns:
            This plan, or a new one if it is slow.
        """
        if self.evaluations <= WARN_EVALUATIONS:
            return self

        def warn_and_run() -> R:
            warnings.warn(str(self), PerformanceWarning, stacklevel=3)
            return self.run()

        return replace(self, run=warn_and_run)

    def __str__(self) -> str:
        scope = f" of {shorten_names(self.scope, len(self.scope))}" if self.scope else ""
        cost = [f"{format_count(self.states)} joint states{scope}"] if self.states > 1 else []
        cost += [f"{format_count(self.entries)} table entries"] if self.entries else []
        cost += [f"{format_count(self.rows)} evaluations of the net"] if self.rows else []
        cost += [f"in the order {shorten_names(self.order, len(self.order))}"] if self.order else []
        cost += [f"{format_count(self.flops)} FLOPs"] if self.flops is not None else []
        cost += [f"{format_count(self.evaluations)} node evaluations in Python"] if self.evaluations else []
        exact = "exact" if self.is_exact else "approximate"
        text = f"{self.question}: {self.algorithm} ({exact}; {', '.join(cost) or 'one state'}), because {self.reason}"
        excess = [] if self.excess is None else [f"The query raises an error: {self.excess}"]
        return "\n  ".join([text, *map(str, self.parts), *excess])

    def _repr_html_(self) -> str:
        """The plan as a paragraph of HTML."""
        return f"<p>{html.escape(str(self))}</p>"


def choose_plan(candidates: Mapping[str, Callable[[], Plan[R] | Fault]]) -> Plan[R]:
    """The plan of the first algorithm without a fault; its reason includes the fault of the algorithm before.

    Args:
        candidates: For each algorithm, fastest first, a function that returns its plan or why it does not apply. The
            last one applies to every query.
    """
    previous: tuple[str, Fault] | None = None  # the algorithm before, and its fault
    for algorithm, find_plan in candidates.items():
        plan = find_plan()
        if isinstance(plan, Plan):
            if previous is None or plan.algorithm in FAST_ALGORITHMS:
                return plan
            reason = f"{plan.reason}; {format_fault(*previous)}"
            return replace(plan, reason=reason, node=previous[1].node).with_warning()
        previous = algorithm, plan
    raise AssertionError(f"no algorithm of {', '.join(candidates)} applies")


def find_slowest(plans: Sequence[Plan[R]]) -> Plan[R]:
    """The plan with the largest cost; of equal ones the last, such as that of the deepest slice."""
    return max(reversed(plans), key=lambda plan: (plan.evaluations, plan.states))


def format_fault(algorithm: str, fault: Fault) -> str:
    """Why a faster algorithm does not apply, and what would make it possible, for the reason of a plan.

    >>> format_fault("elimination", Obstacle("c", "x depends on c at several words", "set or observe c"))
    'elimination does not apply, because x depends on c at several words (to make it possible, set or observe c)'
    """
    remedy = "" if fault.remedy is None else f" (to make it possible, {fault.remedy})"
    label = "one compiled pass" if algorithm == "compiled" else algorithm
    return f"{label} does not apply, because {fault.reason}{remedy}"


def plan_reference(question: str, model: GroundModel, choices: Collection[int], run: Callable[[], R]) -> Plan[R]:
    """The plan of a question without a compiled algorithm: one run of the net for each joint state of the choices."""
    states = math.prod(model.count_states(choice) for choice in choices)
    reason = "there is no compiled algorithm for this question, so that nodes are evaluated one by one"
    plan = Plan(question, "reference", reason, run, states=states, evaluations=states * len(model.ground))
    return plan.with_warning()


def find_mixed_type_fault(
    model: GroundModel,
    values: Mapping[int, Tensor],
    states: Iterable[int] = (),
    relevant: Collection[int] | None = None,
) -> Obstacle | None:
    """Why the values of a group are not one tensor: some nodes have states and others have vectors."""
    is_real = {node: value.is_floating_point() for node, value in values.items()} | dict.fromkeys(states, False)
    for index, nodes in model.ground.split_by_group(is_real, relevant).items():
        if len({is_real[node] for node in nodes}) > 1:
            name = model.network.specs[index].group.name
            return Obstacle(
                name,
                f"some nodes of {name} are set to or observed as states and others as vectors",
                f"use states only or vectors only for {name}",
            )
    return None


def format_nodes(model: GroundModel, nodes: Sequence[int]) -> str:
    """The names of some nodes; a long list is shortened."""
    return shorten_names([model.ground.name(node) for node in nodes[:MAX_LISTED]], len(nodes))


def shorten_names(names: Sequence[str], count: int) -> str:
    """The first names in one text; if the number of all names is large, it is added."""
    text = ", ".join(names[:MAX_LISTED])
    return f"{text}, … ({count} nodes)" if count > MAX_LISTED else text


def planned(method: Callable[P, Plan[R]]) -> Callable[P, R]:
    """Decorate a function that returns a plan, so that it returns the result; `explain` returns the plan."""

    @functools.wraps(method)
    def run_plan(*args: P.args, **options: P.kwargs) -> R:
        return method(*args, **options).run()

    result = signature(method).return_annotation.removeprefix("Plan[").removesuffix("]")
    run_plan.__annotations__ = {**method.__annotations__, "return": result}
    run_plan.__signature__ = signature(method).replace(return_annotation=result)  # type: ignore[attr-defined]
    return explained_by(method)(run_plan)


def explained_by(find_plan: Callable[..., Plan[Any]]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose plan another function with the same arguments returns."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        function.find_plan = find_plan  # type: ignore[attr-defined]
        return function

    return decorate


def get_planner(function: Callable[P, R]) -> Callable[P, Plan[R]]:
    """The function that returns the plan of a call of a function with a plan."""
    find_plan: Callable[P, Plan[R]] = function.find_plan  # type: ignore[attr-defined]
    return find_plan


def explain_call(
    question: str, function: Callable[..., Any], arguments: Sequence[object], options: Mapping[str, object]
) -> Plan[Any]:
    """The plan of a call; for a call that exceeds its budget, the plan with a larger one and the error as `excess`.

    Args:
        question: The name of the function, for errors.
        function: A function with a plan.
        arguments: The arguments of the call.
        options: The keyword arguments of the call; unknown and missing arguments are an error.
    """
    try:
        bound = signature(function).bind(*arguments, **options)
    except TypeError as error:
        expected, actual = f"the arguments of {question}", str(error).removeprefix("got ")
        raise BNetError(f"explain({question!r}, ...)", expected=expected, actual=actual) from error
    find_plan = get_planner(function)
    try:
        plan = find_plan(*bound.args, **bound.kwargs)
    except BudgetError as error:
        first = next(iter(bound.arguments))
        if "budget" in signature(function).parameters:
            larger = {"budget": UNLIMITED_STATES}
        elif hasattr(bound.arguments[first], "limits"):  # the sentence whose method is explained
            larger = {first: bound.arguments[first].limits(budget=UNLIMITED_STATES)}
        else:
            raise
        excess = error

        def raise_excess() -> NoReturn:
            raise excess

        bound.arguments.update(larger)
        plan = replace(find_plan(*bound.args, **bound.kwargs), excess=str(error), run=raise_excess)
    return replace(plan, run=translate_memory_errors(question)(plan.run))

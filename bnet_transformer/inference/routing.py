"""The router: which algorithm answers a query, why, whether it is exact, and what it costs (`Route`).

Each kind of query has a short list of rules, fastest algorithm first. A rule names its algorithm and a function that
finds a fault: a property of the net's structure, the evidence or the interventions that rules the algorithm out. The
first rule without a fault applies. The router computes no numbers, and it does not use exceptions to decide.

Algorithms:

- `graph`: graph structure only.
- `compiled`: one batched pass of the compiled net.
- `elimination`: variable elimination on the factors of the compiled net.
- `conditioning`: the states of the requested nodes are a batch; the other choices are eliminated.
- `enumeration`: all joint states of the choices are a batch of the compiled net.
- `sampling`: Monte Carlo samples, which are approximate.
- `sequential`: one run for each cell of a sweep, slow.
- `reference`: node by node in Python, slow.

For probabilities, a posterior that is the node's own TPM is one pass (`compiled`). Otherwise elimination comes first:
it sums the choices out of the factors of whole groups. It does not apply if one value depends on the choices of
several words. Conditioning is next, then enumeration. The reference, which loops over joint states and nodes, answers
what the compiled net cannot compute.
"""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from torch import Tensor

from bnet_transformer import reference
from bnet_transformer.cost.net_cost import count_plan_flops
from bnet_transformer.errors import NOT_GIVEN, UnsupportedError
from bnet_transformer.inference.factors import EliminationProblem, build_elimination_problem, check_elimination_budget
from bnet_transformer.inference.query import (
    Query,
    classify_evidence,
    find_set_groups,
    group_nodes,
    prune_barren_choices,
    prune_interventions,
    with_sentence_scope,
)
from bnet_transformer.reference import GroundModel, find_open_choices, locate_node

S = TypeVar("S")
WARN_EVALUATIONS = 2**16  # node evaluations, some 10 s in all, above which a slow route warns
FAST_ALGORITHMS = ("graph", "compiled", "elimination")  # every other route names the node that is its reason


class PerformanceWarning(UserWarning):
    """A query is answered by a slow algorithm; the message names the node that is the reason, and the cost."""


@dataclass(frozen=True)
class Route:
    """How a query is answered. `print` it, or read the fields.

    Args:
        question: The query in words, such as `"posterior of c"`.
        algorithm: The name of the algorithm, as above.
        reason: The rule that applied, in words.
        node: The node or group that rules out a faster algorithm; None if the fastest applies.
        states: The number of joint states of the choices that are computed.
        flops: The floating-point operations of the compiled passes; None without a compiled pass.
        evaluations: The number of nodes that are evaluated one by one in Python.
        is_exact: False for samples and for first-order estimates.
        parts: The routes of the parts of the query, if they differ.
        choices: The ground ids of the choices whose joint states are computed.
    """

    question: str
    algorithm: str
    reason: str
    node: str | None = None
    states: int = 1
    flops: int | None = None
    evaluations: int = 0
    is_exact: bool = True
    parts: tuple[Route, ...] = ()
    choices: tuple[int, ...] = field(default=(), repr=False)

    def warn_if_slow(self) -> None:
        """Warn before a computation that evaluates many nodes one by one."""
        if self.evaluations > WARN_EVALUATIONS:
            warnings.warn(str(self), PerformanceWarning, stacklevel=3)

    def __str__(self) -> str:
        cost = [f"{self.states:,} joint states"] if self.states > 1 else []
        cost += [f"{self.flops:,} FLOPs"] if self.flops is not None else []
        cost += [f"{self.evaluations:,} node evaluations in Python"] if self.evaluations else []
        exact = "exact" if self.is_exact else "approximate"
        text = f"{self.question}: {self.algorithm} ({exact}; {', '.join(cost) or 'one state'}), because {self.reason}"
        return "\n  ".join([text, *map(str, self.parts)])

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self))}</p>"


@dataclass(frozen=True)
class Obstacle:
    """Why an algorithm does not apply, if that is no error of the user: the next rule is tried."""

    subject: str
    reason: str

    def __str__(self) -> str:
        return f"{self.subject} is {self.reason}"


Fault = Obstacle | UnsupportedError  # an UnsupportedError is what the algorithm itself would raise


@dataclass(frozen=True)
class Rule(Generic[S]):
    """One rule of the router.

    Args:
        algorithm: The name of the algorithm, as above.
        reason: Why this algorithm is chosen if it has no fault, in words.
        find_fault: Returns why the algorithm cannot answer a query, from its structure; None if it can.
    """

    algorithm: str
    reason: str
    find_fault: Callable[[S], Fault | None] = lambda _: None


def choose_route(question: str, rules: Sequence[Rule[S]], subject: S) -> Route:
    """The route by the first rule without a fault; the fault of the rule before it is its reason.

    The last rule must apply to every query.
    """
    before: Fault | None = None
    for rule in rules:
        fault = rule.find_fault(subject)
        if fault is None:
            if before is None or rule.algorithm in FAST_ALGORITHMS:
                return Route(question, rule.algorithm, rule.reason)
            reason = f"{rule.reason}; not faster, for {format_fault(before)}"
            return Route(question, rule.algorithm, reason, before.subject)
        before = fault
    raise AssertionError(f"no rule for {question}")


def format_fault(fault: Fault) -> str:
    """A fault in words, for the reason of a route."""
    if isinstance(fault, Obstacle):
        return str(fault)
    actual = "" if fault.actual is NOT_GIVEN else f", and there is {fault.actual}"
    return f"{fault.subject} would need {fault.expected}{actual}"


def find_tpm_fault(query: Query) -> Fault | None:
    """Why the posterior of a node is not its TPM at the values of its parents."""
    node, *extra = query.nodes
    name = query.model.ground.name(node)
    if extra or query.evidence:
        return Obstacle(name, "asked for together with others" if extra else "asked for given evidence")
    if locate_node(query.model, node)[0].tpm.states is None:
        return Obstacle(name, "a choice of a word of the sentence")
    choices = find_open_choices(query.model, reference.parents(query.model, node), {})
    if choices:
        return Obstacle(query.model.ground.name(choices[0]), f"an open choice above {name}")
    return None


def find_single_target_fault(query: Query) -> Fault | None:
    """Why elimination does not answer for at most one requested node."""
    node, *extra = query.nodes or (None,)
    if extra:
        return Obstacle(query.format_nodes(), "more than one node")
    return find_elimination_fault(query, node)


def find_enumeration_fault(query: Query) -> Fault | None:
    """Why the joint states of all choices cannot be the batch of a pass of the compiled net."""
    model = prune_barren_choices(query.model, {*query.choices, *query.nodes, *query.evidence})
    states = dict.fromkeys([*query.nodes, *query.choices])
    return find_elimination_fault(replace(query.without_target_evidence(), model=model), None, [*states])


JOINT_RULES: Sequence[Rule[Query]] = (
    Rule(
        "conditioning",
        "each of its joint states is evidence on one sentence of a batch",
        lambda query: find_elimination_fault(query.without_target_evidence(), None, query.nodes),
    ),
    Rule("enumeration", "the choices of several words meet in one value", find_enumeration_fault),
    Rule("reference", "the compiled net cannot compute it"),
)
POSTERIOR_RULES: Sequence[Rule[Query]] = (
    Rule("compiled", "nothing is observed and no choice above it is open: it is the node's TPM", find_tpm_fault),
    Rule("elimination", "no value depends on the choices of several words", find_single_target_fault),
    *JOINT_RULES,
)
LOG_EVIDENCE_RULES: Sequence[Rule[Query]] = (
    Rule("elimination", "no value depends on the choices of several words", find_single_target_fault),
    *JOINT_RULES[1:],
)


def route_posterior(query: Query) -> Route:
    """The route of `P(nodes | evidence)`."""
    return _route_query(query, f"posterior of {query.format_nodes()}", POSTERIOR_RULES)


def route_joint(query: Query) -> Route:
    """The route of `log P(nodes, evidence)` of each joint state of the nodes."""
    return _route_query(query, f"joint probability of {query.format_nodes()}", JOINT_RULES)


def route_log_evidence(query: Query) -> Route:
    """The route of `log P(evidence)`."""
    return _route_query(query, "log probability of the evidence", LOG_EVIDENCE_RULES)


def _route_query(query: Query, question: str, rules: Sequence[Rule[Query]]) -> Route:
    """The route by the first rule that applies, with its joint states and the evaluations of the reference."""
    model, route = query.model, choose_route(question, rules, query)
    if route.algorithm not in ("conditioning", "enumeration", "reference"):
        return route
    enumerated = query.nodes if route.algorithm == "conditioning" else tuple(query.choices)
    states = math.prod(model.count_states(node) for node in dict.fromkeys([*query.nodes, *enumerated]))
    evaluations = states * len(model.ground) if route.algorithm == "reference" else 0
    return replace(route, states=states, evaluations=evaluations, choices=enumerated)


def find_elimination_problem(
    query: Query, node: int | None, states: Collection[int] = ()
) -> EliminationProblem | Fault:
    """The structure of an elimination, or a fault of the groups.

    Args:
        query: The query; only the structure of its evidence matters.
        node: The requested node, if any.
        states: Nodes of which a state is observed in each sentence of a batch.
    """
    model = prune_interventions(query.model, [*states, *query.evidence]) if states else query.model
    fault = find_mixed_type_fault(model, query.evidence, states) or find_mixed_type_fault(model, model.do)
    if fault is not None:
        return fault
    module = with_sentence_scope(query.module) if states else query.module
    target = None if node is None else model.ground.group_of(node).name
    do, partial = find_set_groups(model)
    return build_elimination_problem(module, classify_evidence(model, query.evidence, states), target, do, partial)


def find_elimination_fault(query: Query, node: int | None, states: Collection[int] = ()) -> Fault | None:
    """Why elimination cannot solve the problem of `find_elimination_problem`; None if it can."""
    problem = find_elimination_problem(query, node, states)
    return problem.fault if isinstance(problem, EliminationProblem) else problem


def find_mixed_type_fault(
    model: GroundModel,
    values: Mapping[int, Tensor],
    states: Iterable[int] = (),
    relevant: Collection[int] | None = None,
) -> Obstacle | None:
    """The fault of a group in which some nodes have states and others vectors: no tensor holds both."""
    is_real = {node: value.is_floating_point() for node, value in values.items()} | dict.fromkeys(states, False)
    for index, nodes in group_nodes(model, is_real, relevant).items():
        if len({is_real[node] for node in nodes}) > 1:
            name = model.network.specs[index].group.name
            return Obstacle(name, "in a state at some nodes and a tensor at others")
    return None


def route_reference(question: str, model: GroundModel, choices: Collection[int]) -> Route:
    """The route of a query without a compiled algorithm: one run of the net for each joint state of the choices."""
    states = math.prod(model.count_states(choice) for choice in choices)
    reason = "the compiled net has no algorithm for it"
    return Route(question, "reference", reason, states=states, evaluations=states * len(model.ground))


def with_cost(query: Query, route: Route) -> Route:
    """The route with the joint states and the FLOPs of its compiled passes; the sums are not counted."""
    if route.algorithm in ("compiled", "reference"):
        return route
    if route.algorithm == "enumeration":
        reference.check_joint_states(query.model, route.choices, query.budget)
    batch, node, states, model = 1, next(iter(query.nodes), None), tuple[int, ...](), query.model
    if route.algorithm in ("conditioning", "enumeration"):
        batch, node, states = route.states, None, tuple(dict.fromkeys([*query.nodes, *route.choices]))
    if route.algorithm == "enumeration":
        model = prune_barren_choices(model, {*states, *query.evidence})
    problem = find_elimination_problem(replace(query, model=model), node, states)
    assert isinstance(problem, EliminationProblem)
    specs, words = model.network.specs, model.ground.word_counts
    if route.algorithm == "elimination":
        for index, above in problem.ancestor_choices.items():
            check_elimination_budget(model.network, index, above, words, query.budget)
        choices, network = problem.ancestor_choices.values(), model.network
        counts = [math.prod(network.count_states(i, words) for i in above) for above in choices]
        route = replace(route, states=max(counts, default=1))
    outputs = tuple(dict.fromkeys([*problem.outputs, *(specs[index].group.name for index in problem.factor_groups)]))
    closed = {*find_set_groups(model)[0], *problem.fixed}
    known = frozenset(model.network.graph.get_group(name).index for name in closed)
    plan = query.module.plan(outputs, known, problem.enumerated)
    return replace(route, flops=count_plan_flops(model.network, plan, words, known, batch))

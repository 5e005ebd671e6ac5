"""The router: which algorithm answers a query, why, whether it is exact, and what it costs (`Route`).

Each kind of query has a short list of rules, fastest algorithm first. A rule names its algorithm and a function that
finds a fault: a property of the net's structure, the evidence or the interventions that rules the algorithm out. The
first rule without a fault applies. The router computes no numbers, and it does not use exceptions to decide.

Algorithms:

- `graph`: uses the structure of the graph only.
- `compiled`: one batched pass of the compiled net.
- `elimination`: variable elimination on the factors of whole groups, within the compiled net.
- `variable elimination`: variable elimination on the factor graph of the sentence (`factor_graph`).
- `conditioning`: the joint states of some choices are a batch; the other choices are eliminated in each row.
- `enumeration`: all joint states of the choices are a batch of the compiled net.
- `sampling`: Monte Carlo samples, which are approximate.
- `sequential`: one run for each cell of a sweep; slow.
- `reference`: evaluates nodes one by one in Python; slow.

For probabilities, a posterior that equals the node's TPM takes one pass (`compiled`). Otherwise the first choice is
elimination, which sums over the choices in the factors of whole groups. It does not apply if one value depends on the
choices of several words. Then the cheapest of variable elimination, conditioning and enumeration applies (`JointPlan`):
all are exact, and their costs are known before anything is computed. The reference, which loops over joint states and
nodes, is used if the compiled net cannot compute the result.
"""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from bnet_transformer import reference
from bnet_transformer.compiler.plan import PlanRequest
from bnet_transformer.cost.net_cost import count_plan_flops
from bnet_transformer.errors import BudgetError, format_count
from bnet_transformer.inference.contraction import EliminationOrder
from bnet_transformer.inference.factor_graph import (
    FactorGraph,
    build_factor_graph,
    excess_error,
    find_supports,
    format_nodes,
    shorten_names,
)
from bnet_transformer.inference.factors import EliminationProblem, build_elimination_problem, check_elimination_budget
from bnet_transformer.inference.query import (
    Fault,
    Obstacle,
    Query,
    classify_evidence,
    find_mixed_type_fault,
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
    """A slow algorithm computes a query; the message contains the cost and the node that is the reason."""


@dataclass(frozen=True)
class Route:
    """How a query is computed: the algorithm, the reason and the cost. `print` shows it as a sentence.

    Attributes:
        question: The query in words, such as `"posterior of c"`.
        algorithm: The algorithm: `"graph"` (the structure of the graph only), `"compiled"` (one batched pass),
            `"elimination"` (exact sums over choices within the compiled net), `"variable elimination"` (exact sums
            over choices in tables of the factor graph), `"conditioning"` (the joint states of some choices are a batch,
            in which the others are eliminated), `"enumeration"` (all joint states are a batch), `"sampling"`,
            `"sequential"` (one run for each cell of a sweep) or `"reference"` (node by node in Python).
        reason: Why this algorithm is used, in words.
        node: The node or node group that rules out a faster algorithm; None if the fastest algorithm is used.
        states: The number of joint states of the choices that are computed; for variable elimination, those of the
            largest scope.
        flops: The floating-point operations of the compiled passes; None without a compiled pass.
        evaluations: The number of nodes that are evaluated one by one in Python.
        is_exact: Whether the result is exact: False for samples and for first-order estimates.
        parts: The routes of the parts of the query, if they differ.
        choices: The ground ids of the choices whose joint states are computed.
        rows: The number of evaluations of the net, as rows of batches; 0 if they are not counted.
        entries: The number of entries of all tables of variable elimination.
        order: The names of the choices in the order in which variable elimination sums them out.
        scope: The names of the choices of the largest scope of variable elimination.
        excess: The error that the query raises, because it exceeds its budget; None within the budget. The other
            attributes are then those of the query with a larger budget.
        plan: The plan of variable elimination, conditioning or enumeration, for internal use.
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
    rows: int = 0
    entries: int = 0
    order: tuple[str, ...] = field(default=(), repr=False)
    scope: tuple[str, ...] = ()
    excess: str | None = None
    plan: JointPlan | None = field(default=None, repr=False, compare=False)

    def warn_if_slow(self) -> None:
        """Warn before a computation that evaluates many nodes one by one."""
        if self.evaluations > WARN_EVALUATIONS:
            warnings.warn(str(self), PerformanceWarning, stacklevel=3)

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
        """The route as a paragraph of HTML."""
        return f"<p>{html.escape(str(self))}</p>"


@dataclass(frozen=True)
class Rule(Generic[S]):
    """One rule of the router.

    Args:
        algorithm: The name of the algorithm.
        reason: Why this algorithm is chosen if it has no fault, in words.
        find_fault: A function that returns why the algorithm cannot compute a query, from the structure of the query;
            None if it can.
    """

    algorithm: str
    reason: str
    find_fault: Callable[[S], Fault | None] = lambda _: None


def choose_route(question: str, rules: Sequence[Rule[S]], subject: S) -> Route:
    """The route of the first rule without a fault; its reason includes the fault of the previous rule.

    The last rule must apply to every query.
    """
    previous: tuple[str, Fault] | None = None  # the algorithm of the rule before, and its fault
    for rule in rules:
        fault = rule.find_fault(subject)
        if fault is None:
            if previous is None or rule.algorithm in FAST_ALGORITHMS:
                return Route(question, rule.algorithm, rule.reason)
            algorithm, obstacle = previous
            return Route(question, rule.algorithm, f"{rule.reason}; {format_fault(algorithm, obstacle)}", obstacle.node)
        previous = rule.algorithm, fault
    raise AssertionError(f"no rule for {question}")


def format_fault(algorithm: str, fault: Fault) -> str:
    """Why a faster algorithm does not apply, and what would make it possible, for the reason of a route.

    >>> format_fault("elimination", Obstacle("c", "x depends on c at several words", "set or observe c"))
    'elimination does not apply, because x depends on c at several words (to make it possible, set or observe c)'
    """
    remedy = "" if fault.remedy is None else f" (to make it possible, {fault.remedy})"
    label = "one compiled pass" if algorithm == "compiled" else algorithm
    return f"{label} does not apply, because {fault.reason}{remedy}"


def find_tpm_fault(query: Query) -> Fault | None:
    """Why the posterior of a node is not its TPM at the values of its parents."""
    node, *extra = query.nodes
    name = query.model.ground.name(node)
    if extra or query.evidence:
        return Obstacle(name, "several nodes are requested" if extra else "there is evidence")
    if locate_node(query.model, node)[0].tpm.states is None:
        return Obstacle(name, f"the states of {name} are words of the sentence")
    choices = find_open_choices(query.model, reference.parents(query.model, node), {})
    if choices:
        choice = query.model.ground.name(choices[0])
        return Obstacle(choice, f"{name} depends on the latent choice {choice}", f"set or observe {choice}")
    return None


def find_single_target_fault(query: Query) -> Fault | None:
    """Why elimination for at most one requested node does not apply."""
    node, *extra = query.nodes or (None,)
    if extra:
        return Obstacle(query.format_nodes(), "several nodes are requested")
    problem = find_elimination_problem(query, node)
    if not isinstance(problem, EliminationProblem) or problem.fault is not None:
        return problem.fault if isinstance(problem, EliminationProblem) else problem
    network = query.model.network
    for index, scope in problem.scopes:
        count = math.prod(network.count_states(i, query.model.ground.word_counts) for i in scope)
        if count > query.budget:
            names = ", ".join(dict.fromkeys(network.specs[i].group.name for i in scope))
            budget = format_count(query.budget)
            reason = (
                f"it would sum over {format_count(count)} joint states of {names}, more than the budget of {budget}"
            )
            return Obstacle(network.specs[index].group.name, reason, "raise budget=")
    return None


@dataclass(frozen=True)
class JointPlan:
    """How the joint states of choices are summed if compiled elimination of all of them does not apply.

    Attributes:
        algorithm: `"variable elimination"`, `"conditioning"` or `"enumeration"`.
        states: The joint states of the batch, or those of the largest scope of variable elimination.
        rows: The number of rows of all batches: evaluations of the net.
        entries: The number of entries of the tables of variable elimination.
        flops: The floating-point operations of the passes; None if a TPM does not declare its products.
        nodes: The nodes whose joint states are the batch.
        query: The query whose elimination each row solves, without evidence on `nodes`.
        graph: The factor graph of variable elimination.
        excess: The error, if there are more joint states than the budget.
        summed: The joint states of the largest sum in each row.
    """

    algorithm: str
    states: int
    rows: int
    entries: int
    flops: int | None
    nodes: tuple[int, ...]
    query: Query
    graph: FactorGraph | None = None
    excess: BudgetError | None = None
    summed: int = 1

    @property
    def cost(self) -> tuple[bool, int]:
        """The order of preference: plans within the budget, then the smallest amount of work."""
        # The work is that of the passes, of one number for each joint state of each node, and of the tables.
        numbers = self.rows * self.summed * len(self.query.model.ground)
        return self.excess is not None, (self.flops or 0) + numbers + self.entries


def plan_joint(query: Query) -> JointPlan | Fault:
    """The cheapest exact plan for the joint states of a query, or why the compiled net cannot compute it."""
    graph, plan = build_factor_graph(query), plan_conditioning(query)
    if isinstance(graph, BudgetError):  # then all joint states exceed the budget too, and the scope is the reason
        return replace(plan, excess=graph) if isinstance(plan, JointPlan) and plan.excess is not None else plan
    if not isinstance(graph, FactorGraph):
        return plan if isinstance(plan, JointPlan) else graph
    order, rows, flops = graph.order, graph.rows, graph.count_flops()
    excess, name = graph.find_excess(order), "variable elimination"
    other = JointPlan(name, order.states, rows, order.entries, flops, (), graph.query, graph, excess)
    return min(plan, other, key=lambda plan: plan.cost) if isinstance(plan, JointPlan) else other


def plan_conditioning(query: Query) -> JointPlan | Fault:
    """The plan in which joint states of as few choices as possible are a batch, and the others are eliminated in it."""
    given, supports = query.without_target_evidence(), find_supports(query)
    nodes = tuple(query.nodes)
    conditioned = _condition(given, nodes)
    if not isinstance(conditioned, Query):
        nodes = tuple(dict.fromkeys([*query.nodes, *given.choices]))
        conditioned = _condition(given, nodes)
    if not isinstance(conditioned, Query):
        return conditioned
    # The last groups first: no value depends on several words of the choices of a last slice with word-wise readouts,
    # so that they are summed word by word in each joint state of the choices of the lower slices.
    removable = set(nodes) - set(query.nodes)
    for _, members in sorted(group_nodes(query.model, removable).items(), reverse=True):
        fewer = tuple(node for node in nodes if node in query.nodes or node not in members)
        attempt = _condition(given, fewer)
        if isinstance(attempt, Query):
            nodes, conditioned = fewer, attempt
    problem = find_elimination_problem(conditioned, None, nodes)
    assert isinstance(problem, EliminationProblem)
    rows, excess = math.prod(len(supports[node]) for node in nodes), None
    network, words = query.model.network, query.model.ground.word_counts
    counts = {math.prod(network.count_states(i, words) for i in scope): scope for _, scope in problem.scopes}
    summed = max(counts, default=1)
    if rows * summed > query.budget:
        groups = ", ".join(dict.fromkeys(network.specs[i].group.name for i in counts.get(summed, ())))
        names = ", times those of ".join(filter(None, [format_nodes(query.model, nodes), groups]))
        excess = excess_error(f"at most {format_count(query.budget)} joint states of {names}", rows * summed)
    flops, is_complete = _count_flops(conditioned, problem, rows), set(given.choices) <= set(nodes)
    algorithm = "enumeration" if is_complete and len(nodes) > len(query.nodes) else "conditioning"
    return JointPlan(algorithm, rows, rows, 0, flops, nodes, conditioned, None, excess, summed)


def _condition(query: Query, nodes: Sequence[int]) -> Query | Fault:
    """The query that each row of a batch solves in which some nodes have states, or why elimination cannot solve it."""
    evidence = {node: value for node, value in query.evidence.items() if node not in nodes}
    conditioned = replace(query, evidence=evidence)
    if find_elimination_fault(conditioned, None, nodes) is None:
        return conditioned
    # Barren choices at state 0 can make it possible, except those in the groups of choices that remain to be summed.
    latent = set(query.choices) - set(nodes)
    groups = [query.model.network.specs[index].group for index in group_nodes(query.model, latent)]
    members = (node for group in groups for node in query.model.ground.select_nodes(group).tolist())
    model = prune_barren_choices(query.model, {*query.choices, *members, *nodes, *query.evidence})
    conditioned = replace(conditioned, model=model)
    return find_elimination_fault(conditioned, None, nodes) or conditioned


REFERENCE_REASON = "the compiled net cannot compute it, so that nodes are evaluated one by one"
JOINT_REASONS = {
    "variable elimination": "the factors of the ground network are tables over the choices that occur together, and "
    "choices are summed out one by one",
    "conditioning": "each joint state of {nodes} is evidence on one sentence of a batch, in which other choices are "
    "summed out",
    "enumeration": "all joint states of the choices fit in batches of the compiled net",
}
PRUNED_REASON = (  # of conditioning on no node
    "the choices on which the evidence does not depend are at state 0, so that the others are summed out in one pass"
)
ELIMINATION_REASON = (
    "each value depends on the choices of one word, or of two neighbouring words of a chain, so that choices are "
    "summed out one by one, and chains word by word"
)
POSTERIOR_RULES: Sequence[Rule[Query]] = (
    Rule(
        "compiled",
        "nothing is observed and the node depends on no latent choice, so that its posterior is its TPM",
        find_tpm_fault,
    ),
    Rule("elimination", ELIMINATION_REASON, find_single_target_fault),
)
LOG_EVIDENCE_RULES: Sequence[Rule[Query]] = (Rule("elimination", ELIMINATION_REASON, find_single_target_fault),)


def route_posterior(query: Query) -> Route:
    """The route of `P(nodes | evidence)`."""
    return _route_query(query, f"posterior of {query.format_nodes()}", POSTERIOR_RULES)


def route_joint(query: Query) -> Route:
    """The route of `log P(nodes, evidence)` of each joint state of the nodes."""
    return _route_query(query, f"joint probability of {query.format_nodes()}", ())


def route_log_evidence(query: Query) -> Route:
    """The route of `log P(evidence)`."""
    return _route_query(query, "log probability of the evidence", LOG_EVIDENCE_RULES)


def _route_query(query: Query, question: str, rules: Sequence[Rule[Query]]) -> Route:
    """The route by the first rule that applies, or by the cheapest plan for the joint states of the choices."""
    plans = list[JointPlan | Fault]()

    def find_joint_fault(query: Query) -> Fault | None:
        plans.append(plan_joint(query))
        return plans[0] if isinstance(plans[0], Fault) else None

    joint_rule = Rule("variable elimination", "", find_joint_fault)
    route, model = choose_route(question, [*rules, joint_rule, Rule("reference", REFERENCE_REASON)], query), query.model
    if route.algorithm == "reference":
        choices = tuple(query.choices)
        states = math.prod(model.count_states(node) for node in dict.fromkeys([*query.nodes, *choices]))
        return replace(route, states=states, evaluations=states * len(model.ground), choices=choices)
    plan = plans[0] if plans else None
    if not isinstance(plan, JointPlan):
        return route
    is_pruned = plan.algorithm == "conditioning" and not plan.nodes
    reason = PRUNED_REASON if is_pruned else JOINT_REASONS[plan.algorithm].format(nodes=format_nodes(model, plan.nodes))
    reason += route.reason
    route = replace(route, algorithm=plan.algorithm, reason=reason, plan=plan)
    if plan.graph is not None:
        return with_factor_graph(route, plan.graph, plan.graph.order)
    return replace(route, states=plan.states, rows=plan.rows, flops=plan.flops, choices=plan.nodes)


def with_factor_graph(route: Route, graph: FactorGraph, *orders: EliminationOrder) -> Route:
    """The route with the cost of a factor graph and of some elimination orders."""
    names = [graph.query.model.ground.name(node) for node in graph.variables]
    largest = max(orders, key=lambda order: order.states)
    return replace(
        route,
        states=largest.states,
        rows=graph.rows,
        entries=sum(order.entries for order in orders),
        flops=graph.count_flops(),
        order=tuple(names[k] for order in orders for k in order.variables),
        scope=tuple(names[k] for k in largest.scope),
        choices=graph.variables,
    )


def find_elimination_problem(
    query: Query, node: int | None, states: Collection[int] = ()
) -> EliminationProblem | Fault:
    """The structure of an elimination, or why there is none.

    Args:
        query: The query; only the structure of its evidence matters.
        node: The requested node, if any.
        states: Nodes with an observed state in each sentence of a batch.
    """
    model = prune_interventions(query.model, [*states, *query.evidence]) if states else query.model
    fault = find_mixed_type_fault(model, query.evidence, states) or find_mixed_type_fault(model, model.do)
    if fault is not None:
        return fault
    module = with_sentence_scope(query.module) if states else query.module
    target = None if node is None else model.ground.group_of(node).index
    do, partial = find_set_groups(model)
    return build_elimination_problem(module, classify_evidence(model, query.evidence, states), target, do, partial)


def find_elimination_fault(query: Query, node: int | None, states: Collection[int] = ()) -> Fault | None:
    """Why elimination cannot solve the problem of `find_elimination_problem`; None if it can."""
    problem = find_elimination_problem(query, node, states)
    return problem.fault if isinstance(problem, EliminationProblem) else problem


def route_reference(question: str, model: GroundModel, choices: Collection[int]) -> Route:
    """The route of a query without a compiled algorithm: one run of the net for each joint state of the choices."""
    states = math.prod(model.count_states(choice) for choice in choices)
    reason = "there is no compiled algorithm for this question, so that nodes are evaluated one by one"
    return Route(question, "reference", reason, states=states, evaluations=states * len(model.ground))


def with_cost(query: Query, route: Route) -> Route:
    """The route with its joint states and the FLOPs of its compiled passes; sums over states are not counted.

    Raises:
        BudgetError: There are more joint states than the budget.
    """
    if route.plan is not None and route.plan.excess is not None:
        raise route.plan.excess
    if route.algorithm != "elimination":
        return route
    problem = find_elimination_problem(query, next(iter(query.nodes), None))
    assert isinstance(problem, EliminationProblem)
    network, words = query.model.network, query.model.ground.word_counts
    for index, scope in problem.scopes:
        check_elimination_budget(network, index, scope, words, query.budget)
    counts = [math.prod(network.count_states(i, words) for i in scope) for _, scope in problem.scopes]
    return replace(route, states=max(counts, default=1), flops=_count_flops(query, problem, 1))


def _count_flops(query: Query, problem: EliminationProblem, batch: int) -> int | None:
    """The floating-point operations of the pass of an elimination."""
    network, words = query.model.network, query.model.ground.word_counts
    outputs = tuple(dict.fromkeys([*problem.outputs, *problem.factor_groups]))
    known = find_set_groups(query.model)[0] | problem.fixed
    plan = query.module.plan(PlanRequest(outputs, known, problem.enumerated, has_chains=True))
    return count_plan_flops(network, plan, words, known, batch)

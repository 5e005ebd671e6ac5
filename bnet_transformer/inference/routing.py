"""The router: which algorithm answers a query, why, whether it is exact, and what it costs (`Route`).

Each kind of query has a short list of rules, fastest algorithm first. A rule names its algorithm and a function that
finds a fault: a property of the net's structure, the evidence or the interventions that rules the algorithm out. The
first rule without a fault applies. The router computes no numbers, and it does not use exceptions to decide.

Algorithms:

- `graph`: uses the structure of the graph only.
- `compiled`: one batched pass of the compiled net.
- `elimination`: variable elimination on the factors of the compiled net.
- `conditioning`: the joint states of the requested nodes are a batch; the other choices are eliminated.
- `enumeration`: all joint states of the choices are a batch of the compiled net.
- `sampling`: Monte Carlo samples, which are approximate.
- `sequential`: one run for each cell of a sweep; slow.
- `reference`: evaluates nodes one by one in Python; slow.

For probabilities, a posterior that equals the node's TPM takes one pass (`compiled`). Otherwise the first choice is
elimination, which sums over the choices in the factors of whole groups. It does not apply if one value depends on the
choices of several words. Conditioning is next, then enumeration. The reference, which loops over joint states and
nodes, is used if the compiled net cannot compute the result.
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
from bnet_transformer.compiler.plan import StructureError
from bnet_transformer.cost.net_cost import count_plan_flops
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
    """A slow algorithm computes a query; the message contains the cost and the node that is the reason."""


@dataclass(frozen=True)
class Route:
    """How a query is computed: the algorithm, the reason and the cost. `print` shows it as a sentence.

    Attributes:
        question: The query in words, such as `"posterior of c"`.
        algorithm: The algorithm: `"graph"` (the structure of the graph only), `"compiled"` (one batched pass),
            `"elimination"` (exact sums over choices), `"conditioning"` (the joint states of the requested nodes are a
            batch), `"enumeration"` (all joint states are a batch), `"sampling"`, `"sequential"` (one run for each cell
            of a sweep) or `"reference"` (node by node in Python).
        reason: Why this algorithm is used, in words.
        node: The node or node group that rules out a faster algorithm; None if the fastest algorithm is used.
        states: The number of joint states of the choices that are computed.
        flops: The floating-point operations of the compiled passes; None without a compiled pass.
        evaluations: The number of nodes that are evaluated one by one in Python.
        is_exact: Whether the result is exact: False for samples and for first-order estimates.
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
        """The route as a paragraph of HTML."""
        return f"<p>{html.escape(str(self))}</p>"


@dataclass(frozen=True)
class Obstacle:
    """Why an algorithm does not apply, without an error: the next rule is tried.

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
    return find_elimination_fault(query, node)


def find_enumeration_fault(query: Query) -> Fault | None:
    """Why the joint states of all choices cannot be the batch of a pass of the compiled net."""
    model = prune_barren_choices(query.model, {*query.choices, *query.nodes, *query.evidence})
    states = dict.fromkeys([*query.nodes, *query.choices])
    return find_elimination_fault(replace(query.without_target_evidence(), model=model), None, [*states])


REFERENCE_REASON = "the compiled net cannot compute it, so that nodes are evaluated one by one"
JOINT_RULES: Sequence[Rule[Query]] = (
    Rule(
        "conditioning",
        "each joint state of the requested nodes is evidence on one sentence of a batch",
        lambda query: find_elimination_fault(query.without_target_evidence(), None, query.nodes),
    ),
    Rule("enumeration", "all joint states of the choices fit in batches of the compiled net", find_enumeration_fault),
    Rule("reference", REFERENCE_REASON),
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
    *JOINT_RULES,
)
LOG_EVIDENCE_RULES: Sequence[Rule[Query]] = (
    Rule("elimination", ELIMINATION_REASON, find_single_target_fault),
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
    """Why the values of a group are not one tensor: some nodes have states and others have vectors."""
    is_real = {node: value.is_floating_point() for node, value in values.items()} | dict.fromkeys(states, False)
    for index, nodes in group_nodes(model, is_real, relevant).items():
        if len({is_real[node] for node in nodes}) > 1:
            name = model.network.specs[index].group.name
            return Obstacle(
                name,
                f"some nodes of {name} are set to or observed as states and others as vectors",
                f"use states only or vectors only for {name}",
            )
    return None


def route_reference(question: str, model: GroundModel, choices: Collection[int]) -> Route:
    """The route of a query without a compiled algorithm: one run of the net for each joint state of the choices."""
    states = math.prod(model.count_states(choice) for choice in choices)
    reason = "there is no compiled algorithm for this question, so that nodes are evaluated one by one"
    return Route(question, "reference", reason, states=states, evaluations=states * len(model.ground))


def with_cost(query: Query, route: Route) -> Route:
    """The route with its joint states and the FLOPs of its compiled passes; sums over states are not counted."""
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
        for index, scope in problem.scopes:
            check_elimination_budget(model.network, index, scope, words, query.budget)
        counts = [math.prod(model.network.count_states(i, words) for i in scope) for _, scope in problem.scopes]
        route = replace(route, states=max(counts, default=1))
    outputs = tuple(dict.fromkeys([*problem.outputs, *(specs[index].group.name for index in problem.factor_groups)]))
    closed = {*find_set_groups(model)[0], *problem.fixed}
    known = frozenset(model.network.graph.get_group(name).index for name in closed)
    plan = query.module.plan(outputs, known, problem.enumerated, has_chains=True)
    return replace(route, flops=count_plan_flops(model.network, plan, words, known, batch))

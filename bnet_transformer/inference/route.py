"""Which algorithm answers a question, why, how exact it is and what it costs.

A question has a short table of rules, fastest algorithm first. Each rule names its algorithm and finds the fault in the
structure of the net, the evidence and the interventions for which the algorithm cannot answer; the first rule without a
fault applies. Nothing is computed, and no exception decides.

Algorithms:

- `graph`: the structure of the graph; no number is computed.
- `compiled`: one batched pass of the compiled net.
- `elimination`: the choices are eliminated from the factors of the compiled net.
- `conditioning`: the states of the nodes that are asked for are a batch; the other choices are eliminated.
- `enumeration`: all joint states of the choices are a batch of the compiled net.
- `sampling`: draws, which are approximate.
- `sequential`: one run for each cell of a sweep, slow.
- `reference`: node by node in Python, slow.

Of probabilities elimination is the algorithm of choice: it sums the choices out of the factors of whole families. It
cannot where the choices of different words meet in one value. Then the joint states of the nodes that are asked for are
the batch of one pass, and the rest is eliminated; then all joint states of all choices above are the batch. What the
compiled net cannot compute at all is left to the reference, which loops over joint states and nodes.
"""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer.cost.count import plan_flops
from bnet_transformer.errors import ReadingError
from bnet_transformer.inference.factors import Question, analyse_question, check_count
from bnet_transformer.inference.query import Query, evidence_forms, nodes_by_family, of_one_sentence, set_families
from bnet_transformer.reference import World, choices, where

S = TypeVar("S")
SLOW = 2**16  # node evaluations one by one, some 10 s, from which a slow route warns before it starts
FAST = ("graph", "compiled", "elimination")  # what is not one of these has a node that is the reason


class PerformanceWarning(UserWarning):
    """A question takes a slow algorithm; the message names the node that is the reason, and the cost."""


@dataclass(frozen=True)
class Route:
    """How a question is answered. `print` it, or read the fields.

    Args:
        question: The question, such as `"posterior of c"`.
        algorithm: Its name, as above.
        reason: The rule that applied, in words.
        node: The node or family that rules out a faster algorithm; None where the fastest one applies.
        states: Joint states of the choices that are computed.
        flops: Floating-point operations of the compiled passes; None where no compiled pass answers.
        evaluations: Nodes that are evaluated one by one in Python.
        is_exact: False for draws and for first-order effects.
        parts: The routes of parts of the question, where they are answered in different ways.
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

    @property
    def is_slow(self) -> bool:
        """True where nodes are evaluated one by one, often enough to notice."""
        return self.evaluations > SLOW

    def warn_if_slow(self) -> None:
        """Warn, before it starts, of what will take long."""
        if self.is_slow:
            warnings.warn(str(self), PerformanceWarning, stacklevel=3)

    def __str__(self) -> str:
        cost = [f"{self.states:,} joint states"] if self.states > 1 else []
        cost += [f"{self.flops:,} FLOPs"] if self.flops is not None else []
        cost += [f"{self.evaluations:,} node evaluations in Python"] if self.evaluations else []
        exact = "exact" if self.is_exact else "approximate"
        told = f"{self.question}: {self.algorithm} ({exact}; {', '.join(cost) or 'one state'}), because {self.reason}"
        return "\n  ".join([told, *map(str, self.parts)])

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self))}</p>"


@dataclass(frozen=True)
class Obstacle:
    """Why an algorithm cannot answer, where it is no error to ask it: the next rule applies."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what} is {self.reason}"


Fault = Obstacle | ReadingError  # a ReadingError is what the algorithm raises to whoever asks it directly


@dataclass(frozen=True)
class Rule(Generic[S]):
    """One line of a table of rules.

    Args:
        algorithm: Its name, as above.
        reason: Why the algorithm is the one to take where no fault is found, in words.
        fault: What finds, in the structure of a question, why the algorithm cannot answer it; None where it can.
    """

    algorithm: str
    reason: str
    fault: Callable[[S], Fault | None] = lambda _: None


def choose(question: str, rules: Sequence[Rule[S]], subject: S) -> Route:
    """The route by the first rule without a fault; the fault of the rule before it is its reason.

    The last rule has to apply to everything.
    """
    before: Fault | None = None
    for rule in rules:
        fault = rule.fault(subject)
        if fault is None:
            if before is None or rule.algorithm in FAST:
                return Route(question, rule.algorithm, rule.reason)
            return Route(question, rule.algorithm, f"{rule.reason}; not faster, for {fault_text(before)}", before.what)
        before = fault
    raise AssertionError(f"no rule for {question}")


def fault_text(fault: Fault) -> str:
    """A fault in words, for the reason of a route."""
    if isinstance(fault, Obstacle):
        return str(fault)
    return f"{fault.what} would need {fault.expected}, and there is {fault.got}"


def route_posterior(query: Query) -> Route:
    """How `P(nodes | evidence)` is computed."""
    return _with_states(query, choose(f"posterior of {query.names()}", POSTERIOR, query))


def route_joint(query: Query) -> Route:
    """How `log P(nodes, evidence)` is computed for each joint state of the nodes."""
    return _with_states(query, choose(f"joint probability of {query.names()}", JOINT, query))


def route_log_evidence(query: Query) -> Route:
    """How `log P(evidence)` is computed."""
    return _with_states(query, choose("log probability of the evidence", LOG_EVIDENCE, query))


def own_tpm_fault(query: Query) -> Fault | None:
    """Why the posterior of a node is not its TPM at the values of its parents."""
    node, *others = query.nodes
    name = query.world.ground.name(node)
    if others or query.evidence:
        return Obstacle(name, "asked for together with others" if others else "asked for given evidence")
    if where(query.world, node)[0].tpm.states is None:
        return Obstacle(name, "a choice of a word of the sentence")
    above = choices(query.world, reference.parents(query.world, node), {})
    if above:
        return Obstacle(query.world.ground.name(above[0]), f"an open choice above {name}")
    return None


def elimination_fault(query: Query) -> Fault | None:
    """Why the choices cannot be eliminated, family by family, for one node (or none) that is asked for."""
    node, *others = query.nodes or (None,)
    if others:
        return Obstacle(query.names(), "more than one node")
    return question_fault(query, node)


def enumeration_fault(query: Query) -> Fault | None:
    """Why not even all choices above, each in a state, can be the batch of a pass of the compiled net."""
    world = without_barren_choices(query.world, {*query.choices, *query.nodes, *query.evidence})
    states = dict.fromkeys([*query.nodes, *query.choices])
    return question_fault(replace(query.without_own_evidence(), world=world), None, [*states])


JOINT: Sequence[Rule[Query]] = (
    Rule(
        "conditioning",
        "each of its joint states is evidence on one sentence of a batch",
        lambda query: question_fault(query.without_own_evidence(), None, query.nodes),
    ),
    Rule("enumeration", "the choices of several words meet in one value", enumeration_fault),
    Rule("reference", "the compiled net cannot compute it"),
)
POSTERIOR: Sequence[Rule[Query]] = (
    Rule("compiled", "nothing is observed and no choice above it is open: it is the node's TPM", own_tpm_fault),
    Rule("elimination", "no value depends on the choices of several words", elimination_fault),
    *JOINT,
)
LOG_EVIDENCE: Sequence[Rule[Query]] = (
    Rule("elimination", "no value depends on the choices of several words", elimination_fault),
    *JOINT[1:],
)


def find_question(query: Query, node: int | None, states: Collection[int] = ()) -> Question | Fault:
    """What elimination needs, or the fault of nodes that no tensor of a family holds.

    Args:
        query: The query; of its evidence the structure alone counts.
        node: The node that is asked for, if any.
        states: Nodes of which a state is observed in each sentence of a batch.
    """
    world = relevant_world(query.world, [*states, *query.evidence]) if states else query.world
    fault = mixed_fault(world, query.evidence, states) or mixed_fault(world, world.do)
    if fault is not None:
        return fault
    module = of_one_sentence(query.module) if states else query.module
    family = None if node is None else world.ground.family_of(node).name
    do, some = set_families(world)
    return analyse_question(module, evidence_forms(world, query.evidence, states), family, do, some)


def question_fault(query: Query, node: int | None, states: Collection[int] = ()) -> Fault | None:
    """Why elimination cannot answer what `find_question` finds for the same arguments; None where it can."""
    question = find_question(query, node, states)
    return question.fault if isinstance(question, Question) else question


def mixed_fault(
    world: World, values: Mapping[int, Tensor], states: Iterable[int] = (), above: Collection[int] | None = None
) -> Obstacle | None:
    """The fault of a family of which some nodes have states and others tensors: no tensor holds both."""
    is_real = {node: value.is_floating_point() for node, value in values.items()} | dict.fromkeys(states, False)
    for index, nodes in nodes_by_family(world, is_real, above).items():
        if len({is_real[node] for node in nodes}) > 1:
            name = world.network.members[index].family.name
            return Obstacle(name, "in a state at some nodes and a tensor at others")
    return None


def relevant_world(world: World, nodes: Collection[int]) -> World:
    """The sentence with only the interventions above some nodes."""
    families = {world.ground.family_of(node).index for node in nodes}
    above = world.network.graph.ancestral_set(families)
    do, rows = (
        {node: value for node, value in values.items() if world.ground.family_of(node).index in above}
        for values in (world.do, world.rows)
    )
    return replace(world, do=do, rows=rows)


def without_barren_choices(world: World, relevant: Collection[int]) -> World:
    """The sentence with state 0 for each choice that is above nothing relevant: its state changes no probability."""
    families = {world.ground.family_of(node).index for node in relevant}
    above = world.network.graph.ancestral_set(families)
    choices = [m.family for m in world.network.members if m.tpm.kind == "discrete" and m.family.index in above]
    nodes = [node for family in choices for node in world.ground.nodes(family).tolist()]
    zero = torch.zeros((), dtype=torch.long, device=world.network.device)
    return replace(world, do={**{node: zero for node in nodes if node not in relevant}, **world.do})


def route_reference(question: str, world: World, choices: Collection[int]) -> Route:
    """The route of a question that has no compiled algorithm: a run of the net for each joint state of the choices."""
    states = math.prod(world.count_states(choice) for choice in choices)
    reason = "the compiled net has no algorithm for it"
    return Route(question, "reference", reason, states=states, evaluations=states * len(world.ground))


def _with_states(query: Query, route: Route) -> Route:
    """The route with its number of joint states, and the evaluations of the reference."""
    world = query.world
    if route.algorithm in ("enumeration", "reference"):
        states = math.prod(world.count_states(node) for node in dict.fromkeys([*query.nodes, *query.choices]))
        evaluations = states * len(world.ground) if route.algorithm == "reference" else 0
        return replace(route, states=states, evaluations=evaluations, choices=tuple(query.choices))
    if route.algorithm == "conditioning":
        states = math.prod(world.count_states(node) for node in query.nodes)
        return replace(route, states=states, choices=query.nodes)
    return route


def with_cost(query: Query, route: Route) -> Route:
    """The route of a query with the joint states and the FLOPs of its compiled passes; the sums are not counted."""
    if route.algorithm in ("compiled", "reference"):
        return route
    if route.algorithm == "enumeration":
        reference.check_joint_states(query.world, route.choices, query.budget)
    batch, node, states, world = 1, next(iter(query.nodes), None), tuple[int, ...](), query.world
    if route.algorithm in ("conditioning", "enumeration"):
        batch, node, states = route.states, None, tuple(dict.fromkeys([*query.nodes, *route.choices]))
    if route.algorithm == "enumeration":
        world = without_barren_choices(world, {*states, *query.evidence})
    question = find_question(replace(query, world=world), node, states)
    assert isinstance(question, Question)
    members, words = world.network.members, world.ground.words
    if route.algorithm == "elimination":
        for index, above in question.choices.items():
            check_count(world.network, index, above, words, query.budget)
        counts = [math.prod(world.network.count_states(i, words) for i in above) for above in question.choices.values()]
        route = replace(route, states=max(counts, default=1))
    want = tuple(dict.fromkeys([*question.want, *(members[index].family.name for index in question.needed)]))
    closed = {*set_families(world)[0], *question.settled}
    known = frozenset(world.network.graph.family(name).index for name in closed)
    plan = query.module.plan(want, known, question.free)
    return replace(route, flops=plan_flops(world.network, plan, words, known, batch))

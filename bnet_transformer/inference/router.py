"""The rules by which questions about probabilities of a sentence's nodes are routed to an algorithm.

Elimination is the algorithm of choice: it sums the choices out of the factors of whole families. It cannot where the
choices of different words meet in one value. Then the joint states of the nodes that are asked for are the batch of one
pass, and the rest is eliminated; then all joint states of all choices above are the batch. What the compiled net cannot
compute at all is left to the reference, which loops over joint states and nodes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from bnet_transformer import reference
from bnet_transformer.cost.count import plan_flops
from bnet_transformer.inference.factors import Question, analyse_question, check_count
from bnet_transformer.inference.query import Query, evidence_forms, mixed_fault, of_one_sentence, set_families
from bnet_transformer.inference.route import Fault, Obstacle, Route, Rule, choose
from bnet_transformer.reference import World
from bnet_transformer.world import choices, where


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


def explain(query: Query, route: Route) -> Route:
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

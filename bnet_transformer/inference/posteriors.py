"""Posteriors of nodes and of node groups, the log probability of evidence, and attention averaged over posteriors.

All results are exact. A posterior that equals the TPM of its node takes one pass (`compiled`). Otherwise the first
choice is elimination, which sums over the choices in the factors of whole groups. It does not apply if one value
depends on the choices of several words. Then the cheapest of variable elimination, conditioning and enumeration
applies: their costs are known before anything is computed. The reference, which loops over joint states and nodes, is
used if the compiled net cannot compute the result.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer._core.naming import WORD
from bnet_transformer._core.results import Result
from bnet_transformer._core.tensors import to_numpy
from bnet_transformer._core.tokens import distinguish
from bnet_transformer.compiler.gather import build_request, group_evidence
from bnet_transformer.data.checks import find_groups
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError, format_count
from bnet_transformer.graph import EdgeTemplate, NodeGroup, NodeSelection
from bnet_transformer.inference import elimination
from bnet_transformer.inference.factor_graph import (
    FactorGraph,
    build_factor_graph,
    excess_error,
    find_supports,
    locate_words,
    scatter_possible,
)
from bnet_transformer.inference.factors import LOG_ZERO, FactorRequest, request_factors_unchecked
from bnet_transformer.inference.plan import Fault, Obstacle, Plan, choose_plan, find_mixed_type_fault, format_nodes
from bnet_transformer.inference.query import (
    MAX_DIMS,
    Query,
    enumerate_as_batch,
    enumerate_joint_states,
    prune_barren_choices,
    prune_interventions,
    with_sentence_scope,
)
from bnet_transformer.inference.values import REFERENCE_REASON, NodeEvaluator, NodeQuery, SentenceState
from bnet_transformer.reference import (
    ReferenceRun,
    check_discrete_node,
    expected_attention,
    find_open_choices,
    find_single_parents,
    locate_node,
    split_choices,
)

if TYPE_CHECKING:
    import pandas as pd

R = TypeVar("R")
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


def plan_posterior(query: Query, evaluator: NodeEvaluator | None = None) -> Plan[Tensor]:
    """The plan of `P(nodes | evidence)`: `[*states]` in float64, with a dim for each node in their order.

    Args:
        query: The nodes, the evidence and the sentence.
        evaluator: An evaluator of this sentence without evidence, whose values are reused.

    Raises:
        BudgetError: The number of joint states exceeds the budget; the error contains it.
        BNetError: More nodes are requested than a tensor has dims.
        EvidenceError: The evidence is impossible; the error names the first impossible observation. `run` raises it.
    """
    if len(query.nodes) > MAX_DIMS:
        hint = "Request fewer nodes; posteriors(group) has the posterior of each node, sample(n) joint states"
        raise BNetError("joint posterior", expected=f"at most {MAX_DIMS} nodes", actual=len(query.nodes), hint=hint)
    sizes = [query.model.count_states(node) for node in query.nodes]
    return plan_state_probs(query, evaluator).then(partial(torch.reshape, shape=sizes))


def plan_state_probs(query: Query, evaluator: NodeEvaluator | None = None) -> Plan[Tensor]:
    """The plan of `P(nodes | evidence)` of each joint state of any number of nodes, `[joint state]`.

    The last node varies fastest. Args and errors are those of `plan_posterior`.
    """
    check_nodes(query)
    question, query = f"posterior of {query.format_nodes()}", query.without_input_evidence()
    if len(query.nodes) > 1:
        query = replace(query, nodes=query.varying_nodes)
    if not query.nodes:  # all of them have a single state
        evidence = plan_log_evidence(query)
        return replace(evidence, question=question).then(lambda _: torch.ones(1, dtype=torch.float64))
    group, index = query.model.ground.unravel_index(query.nodes[0])
    target = group.index, index
    return choose_plan(
        {
            "compiled": partial(_plan_tpm, question, query, evaluator),
            "elimination": partial(plan_elimination, question, query, partial(_compute_posterior, query, *target)),
            **{name: partial(plan, question, query, partial(_normalise, query)) for name, plan in JOINT_PLANS.items()},
        }
    )


def plan_joint(query: Query) -> Plan[Tensor]:
    """The plan of `log P(nodes, evidence)` for discrete nodes, `[joint state]`: -inf for states that evidence excludes.

    The last node varies fastest.
    """
    question, query = f"joint probability of {query.format_nodes()}", query.without_input_evidence()
    query = replace(query, nodes=query.varying_nodes)
    return choose_plan({name: partial(plan, question, query, torch.flatten) for name, plan in JOINT_PLANS.items()})


def plan_log_evidence(query: Query) -> Plan[Tensor]:
    """The plan of `log P(evidence)`: a scalar in float64 (a log density if a node is continuous).

    Raises:
        EvidenceError: The evidence is impossible; the error names the first impossible observation. `run` raises it.
    """
    question, query = "log probability of the evidence", query.without_input_evidence()
    if not query.evidence:
        return Plan(question, "graph", "nothing is observed", partial(torch.zeros, (), dtype=torch.float64))
    check = partial(_check_possible, query)

    def eliminate_all(factor_request: FactorRequest) -> Tensor:
        return elimination.compute_log_evidence(query.module, factor_request, dtype=torch.float64).detach()[0]

    return choose_plan(
        {
            "elimination": partial(plan_elimination, question, query, eliminate_all),
            **{name: partial(plan, question, query, check) for name, plan in JOINT_PLANS.items()},
        }
    )


def check_nodes(query: Query) -> None:
    """Raise an error for repeated nodes, and for more joint states of the nodes than the budget."""
    if len(set(query.nodes)) < len(query.nodes):
        raise BNetError("nodes", expected="different nodes", actual=query.format_nodes())
    count = math.prod(query.model.count_states(node) for node in query.nodes)
    if len(query.nodes) > 1 and count > query.budget:
        hint = f"Request fewer nodes, set or observe some of them, or {reference.RAISE_BUDGET}"
        expected = f"at most {query.budget} joint states of {query.format_nodes()}"
        raise BudgetError("joint posterior", expected=expected, actual=format_count(count), hint=hint)


def _plan_tpm(question: str, query: Query, evaluator: NodeEvaluator | None) -> Plan[Tensor] | Fault:
    """The plan of a posterior that is the TPM of its node at the values of its parents, or why it is not."""
    (node, *extra), model = query.nodes, query.model
    name = model.ground.name(node)
    if extra or query.evidence:
        return Obstacle(name, "several nodes are requested" if extra else "there is evidence")
    if locate_node(model, node)[0].tpm.states is None:
        return Obstacle(name, f"the states of {name} are words of the sentence")
    choices = find_open_choices(model, reference.parents(model, node), {})
    if choices:
        choice = model.ground.name(choices[0])
        return Obstacle(choice, f"{name} depends on the latent choice {choice}", f"set or observe {choice}")
    plan = (evaluator or NodeEvaluator(query.module, model, {})).plan_distribution(node)
    return replace(plan, question=question).then(lambda tpm: tpm.logits.double().softmax(-1))  # type: ignore[attr-defined]


def plan_elimination(question: str, query: Query, compute: Callable[[FactorRequest], R]) -> Plan[R] | Fault:
    """The plan of a result of the factors of at most one requested node and the evidence, or why it does not apply."""
    node, *extra = query.nodes or (None,)
    if extra:
        return Obstacle(query.format_nodes(), "several nodes are requested")
    factor_request = find_factor_request(query, node)
    if not isinstance(factor_request, FactorRequest):
        return factor_request
    network = query.model.network
    states, index, scope = factor_request.problem.find_largest_scope(network, factor_request.pass_request.word_counts)
    if states > query.budget:
        names = ", ".join(dict.fromkeys(network.specs[i].group.name for i in scope))
        reason = f"it would sum over {format_count(states)} joint states of {names}, more than the budget of "
        return Obstacle(network.specs[index].group.name, reason + format_count(query.budget), reference.RAISE_BUDGET)
    run, flops = partial(compute, factor_request), partial(factor_request.count_flops, query.module)
    return Plan(question, "elimination", ELIMINATION_REASON, run, states=states, count_flops=flops)


def find_factor_request(query: Query, node: int | None, states: Collection[int] = ()) -> FactorRequest | Fault:
    """The factors of an elimination, or why it does not apply.

    Args:
        query: The query and its evidence.
        node: The requested node, if any.
        states: Nodes with an observed state in each sentence of a batch; the factors are those of state 0.
    """
    model = prune_interventions(query.model, [*states, *query.evidence]) if states else query.model
    fault = find_mixed_type_fault(model, query.evidence, states) or find_mixed_type_fault(model, model.do)
    if fault is not None:
        return fault
    module = with_sentence_scope(query.module) if states else query.module
    evidence = group_evidence(model, query.evidence, dict.fromkeys(states, torch.zeros(1, dtype=torch.long)))
    target = None if node is None else model.ground.group_of(node).index
    factor_request = request_factors_unchecked(module, evidence, target, build_request(model), query.atol)
    return factor_request.problem.fault or factor_request


def _compute_posterior(query: Query, group: int, index: tuple[int, ...], factor_request: FactorRequest) -> Tensor:
    """`P(node | evidence)` of the node of a discrete group at an index, or of each node: `[*plates, word, states]`."""
    probs = elimination.compute_posterior(query.module, group, factor_request)[(0, *index)].double()
    return probs / probs.sum(-1, keepdim=True)  # in float32 the sum is 1 only to 1e-7


def _normalise(query: Query, log_probs: Tensor) -> Tensor:
    """`P(nodes | evidence)` of each joint state, `[joint state]`, from `log P(nodes, evidence)`."""
    logs = log_probs.flatten()
    if bool(logs.isinf().all()):
        raise_impossible_evidence(query)
    return torch.softmax(logs, 0)


def _check_possible(query: Query, log_prob: Tensor) -> Tensor:
    """The log probability of the evidence; an error that names the first impossible observation if it is -inf."""
    if log_prob > -math.inf:
        return log_prob
    # If a prefix of the evidence is impossible, every longer prefix is: so bisection finds the impossible observation.
    ordered = {
        node: query.evidence[node] for _, node in sorted(locate_words(query.model, query.evidence), key=itemgetter(0))
    }

    def is_impossible(count: int) -> bool:
        first = replace(query, evidence=dict(islice(ordered.items(), count)))
        return bool(plan_joint(first).run() == -math.inf)

    try:
        last = bisect_left(range(1, len(ordered)), True, key=is_impossible)
    except BudgetError:  # fewer observations separate fewer choices
        expected = "evidence that is possible in some state of the net"
        raise EvidenceError("evidence", expected=expected, actual="observations of probability zero together") from None
    raise reference.impossible_evidence_error(query.model, ordered, last)


def raise_impossible_evidence(query: Query) -> NoReturn:
    """Raise the error that names the first impossible observation."""
    plan_log_evidence(replace(query, nodes=())).run()
    raise EvidenceError(f"{query.format_nodes()}: the evidence is impossible in all its states")


@dataclass(frozen=True)
class JointPlan:
    """A plan for the joint states of choices, if compiled elimination of all of them does not apply.

    Attributes:
        plan: The plan of `log P(nodes, evidence)`, `[*states]`.
        work: The amount of work: operations, numbers and table entries.
        excess: The error, if there are more joint states than the budget.
    """

    plan: Plan[Tensor]
    work: int
    excess: BudgetError | None


def _plan_joint_states(question: str, query: Query, function: Callable[[Tensor], Tensor]) -> Plan[Tensor] | Fault:
    """The cheapest exact plan for the joint states of a query, or why the compiled net cannot compute it.

    Its result is a function of `log P(nodes, evidence)`, `[*states]`.

    Raises:
        BudgetError: All plans exceed the budget.
    """
    graph, cheapest = build_factor_graph(query), plan_conditioning(question, query)
    if isinstance(graph, FactorGraph):
        reason, order = JOINT_REASONS["variable elimination"], graph.order
        plan = graph.plan(question, reason, graph.compute_joint, order)
        # The work is that of the passes, of one number for each joint state of each node, and of the tables.
        work = (plan.flops or 0) + plan.rows * len(query.model.ground) + plan.entries
        other = JointPlan(plan, work, graph.find_excess(order))
        plans = [cheapest, other] if isinstance(cheapest, JointPlan) else [other]
        cheapest = min(plans, key=lambda joint: (joint.excess is not None, joint.work))
    if not isinstance(cheapest, JointPlan):
        return graph if isinstance(graph, Fault) else cheapest
    if cheapest.excess is not None:  # if one factor exceeds the budget, it is the reason
        raise graph if isinstance(graph, BudgetError) else cheapest.excess
    return cheapest.plan.then(function)


def _plan_reference(question: str, query: Query, function: Callable[[Tensor], Tensor]) -> Plan[Tensor]:
    """The plan for the joint states of a query by the reference, with the result of `_plan_joint_states`."""
    nodes, model = tuple(dict.fromkeys([*query.nodes, *query.choices])), query.model
    states = math.prod(map(model.count_states, nodes))
    options: dict[str, Any] = {"states": states, "evaluations": states * len(model.ground), "choices": nodes}
    run = partial(_log_probs_by_reference, query, nodes)
    return Plan(question, "reference", REFERENCE_REASON, run, **options).then(function)


JOINT_PLANS: dict[str, Callable[..., Plan[Tensor] | Fault]] = {  # the names are those in the reason of a plan
    "a batch of joint states": _plan_joint_states,
    "reference": _plan_reference,
}


def plan_conditioning(question: str, query: Query) -> JointPlan | Fault:
    """The plan in which joint states of as few choices as possible are a batch, and the others are eliminated in it."""
    given, supports = query.without_target_evidence(), find_supports(query)
    nodes = tuple(query.nodes)
    result = _condition(given, nodes)
    if not isinstance(result, tuple):
        nodes = tuple(dict.fromkeys([*query.nodes, *given.choices]))
        result = _condition(given, nodes)
    if not isinstance(result, tuple):
        return result
    # The last groups first: no value depends on several words of the choices of a last slice with word-wise readouts,
    # so that they are summed word by word in each joint state of the choices of the lower slices.
    removable = set(nodes) - set(query.nodes)
    for _, members in sorted(query.model.ground.split_by_group(removable).items(), reverse=True):
        fewer = tuple(node for node in nodes if node in query.nodes or node not in members)
        attempt = _condition(given, fewer)
        if isinstance(attempt, tuple):
            nodes, result = fewer, attempt
    conditioned, factor_request = result
    rows, excess, network = math.prod(len(supports[node]) for node in nodes), None, query.model.network
    summed, _, scope = factor_request.problem.find_largest_scope(network, factor_request.pass_request.word_counts)
    if rows * summed > query.budget:
        groups = ", ".join(dict.fromkeys(network.specs[i].group.name for i in scope))
        names = ", times those of ".join(filter(None, [format_nodes(query.model, nodes), groups]))
        excess = excess_error(f"at most {format_count(query.budget)} joint states of {names}", rows * summed)
    flops = factor_request.count_flops(conditioned.module, rows)
    is_complete = set(given.choices) <= set(nodes)
    algorithm = "enumeration" if is_complete and len(nodes) > len(query.nodes) else "conditioning"
    reason = JOINT_REASONS[algorithm].format(nodes=format_nodes(query.model, nodes)) if nodes else PRUNED_REASON
    compute = partial(_batched_log_probs, conditioned, factor_request, nodes, summed=summed)
    run = partial(_sum_joint_states, query, supports, nodes, compute)
    options: dict[str, Any] = {"states": rows, "rows": rows, "choices": nodes, "count_flops": lambda: flops}
    work = (flops or 0) + rows * summed * len(conditioned.model.ground)
    return JointPlan(Plan(question, algorithm, reason, run, **options), work, excess)


def _condition(query: Query, nodes: Sequence[int]) -> tuple[Query, FactorRequest] | Fault:
    """The query that each row of a batch solves in which some nodes have states, or why elimination cannot solve it."""
    evidence = {node: value for node, value in query.evidence.items() if node not in nodes}
    conditioned = replace(query, evidence=evidence)
    factor_request = find_factor_request(conditioned, None, nodes)
    if not isinstance(factor_request, FactorRequest):
        # Barren choices at state 0 can make it possible, except those in the groups of choices that remain to be
        # summed.
        latent = set(query.choices) - set(nodes)
        groups = [query.model.network.specs[index].group for index in query.model.ground.split_by_group(latent)]
        members = (node for group in groups for node in query.model.ground.select_nodes(group).tolist())
        model = prune_barren_choices(query.model, {*query.choices, *members, *nodes, *query.evidence})
        conditioned = replace(conditioned, model=model)
        factor_request = find_factor_request(conditioned, None, nodes)
    return (conditioned, factor_request) if isinstance(factor_request, FactorRequest) else factor_request


def _sum_joint_states(
    query: Query, supports: Mapping[int, Sequence[int]], nodes: Sequence[int], compute: Callable[[Tensor], Tensor]
) -> Tensor:
    """`log P(nodes, evidence)` of the requested nodes, `[*states]`, summed over the joint states of further nodes.

    Args:
        query: The query.
        supports: The possible states of each node.
        nodes: The requested nodes, and further ones.
        compute: Computes `log P(nodes = states, evidence)` of each row of states, `[row]`.
    """
    if not all(supports.values()):
        return torch.full([query.model.count_states(node) for node in query.nodes], -math.inf, dtype=torch.float64)
    possible = compute(enumerate_joint_states([supports[node] for node in nodes]))
    requested = [supports[node] for node in query.nodes]
    summed = possible.reshape(*map(len, requested), -1).logsumexp(-1)
    return scatter_possible(query.model, query.nodes, requested, summed)


def _log_probs_by_reference(query: Query, nodes: Sequence[int]) -> Tensor:
    """`log P(nodes, evidence)`, `[*states]`, by one run of the reference for each joint state of the choices."""
    model, supports = query.model, find_supports(query)

    def compute(states: Tensor) -> Tensor:
        given = query.without_target_evidence()
        runs = (ReferenceRun(model, {**given.fixed, **dict(zip(nodes, row, strict=True))}) for row in states)
        logs = [reference.log_joint(run, given.choices, given.evidence, given.atol) for run in runs]
        return torch.tensor(logs, dtype=torch.float64)

    if all(supports.values()):
        reference.check_joint_states(model, nodes, query.budget)
    return _sum_joint_states(query, supports, nodes, compute)


def _batched_log_probs(
    query: Query, factor_request: FactorRequest, nodes: Sequence[int], states: Tensor, summed: int
) -> Tensor:
    """`log P(nodes = states, evidence)` for each row of states, `[row]`, computed in chunks that fit in memory."""
    module, model, logs = with_sentence_scope(query.module), query.model, []
    indices = {model.ground.group_of(node).index for node in (*nodes, *query.evidence)}
    for batch_states in enumerate_as_batch(model, nodes, states, indices, summed):
        batch = factor_request.with_evidence(group_evidence(model, query.evidence, batch_states))
        logs.append(elimination.compute_log_evidence(module, batch, check=False, dtype=torch.float64).detach())
    result = torch.cat(logs).cpu()
    if bool(result.isnan().any()):
        known = {**query.fixed, **dict(zip(nodes, states[result.isnan()][0], strict=True))}
        choices = [node for node in query.choices if node in known]
        reference.log_joint(ReferenceRun(model, known), choices, query.evidence, query.atol)  # its error names the node
        raise BNetError("joint posterior", expected="log probabilities that are numbers", actual="NaN")
    return torch.where(result > LOG_ZERO / 2, result, -math.inf)


def plan_node_posteriors(query: Query, question: str = "posteriors") -> Plan[dict[int, Tensor]]:
    """The plan of `P(node | evidence)` of each requested node by itself, `[state]` in float64, by ground id.

    If variable elimination is within the budget, two passes compute all of them; else the plan is that of the first.

    Args:
        query: The nodes, the evidence and the sentence.
        question: The question in words.

    Raises:
        BudgetError: The number of joint states exceeds the budget; the error contains it.
        EvidenceError: The evidence is impossible; the error names the first impossible observation. `run` raises it.
    """
    query = query.without_input_evidence()
    graph = build_factor_graph(query) if len(query.nodes) > 1 else None
    if isinstance(graph, FactorGraph) and graph.find_excess(graph.full_order) is None:

        def compute_marginals() -> dict[int, Tensor]:
            marginals = graph.compute_marginals()
            if marginals is None:
                raise_impossible_evidence(query)
            return {node: marginals[node] for node in query.nodes}

        reason = "one elimination, and one pass back, compute the posteriors of all choices"
        return graph.plan(question, reason, compute_marginals, graph.full_order)

    def plan_node(node: int) -> Plan[Tensor]:
        return plan_posterior(replace(query, nodes=(node,)))

    first, *following = query.nodes
    plan = replace(plan_node(first), question=f"{question}, one by one")
    return plan.then(lambda probs: {first: probs, **{node: plan_node(node).run() for node in following}})


def plan_expected_attention(
    query: Query, attention_query: NodeQuery, posteriors: dict[tuple[int, ...], Tensor] | None = None
) -> Plan[Tensor]:
    """The plan of `sum_c P(c | evidence) P(j | i, c)`: the mean attention of a group over the posterior of choices c.

    It takes the tables of the group in every state of the choices, or computes the mean of one node after the other.

    Args:
        query: The sentence and its evidence, the budget and the tolerance.
        attention_query: The query of `NodeEvaluator.attention_query`.
        posteriors: The posteriors of choices that are already computed, if any; the new ones are added.

    Returns:
        The plan of `[*plates, word, word read]` in float64; zero for set nodes.
    """
    model, spec = query.model, attention_query.spec
    plan = attention_query.evaluator.plan_entry(attention_query, lambda: None)
    if plan.algorithm != "reference" and split_choices(model, attention_query.choices) is not None:
        return plan.then(partial(_average_attention, query, attention_query, {} if posteriors is None else posteriors))
    if plan.algorithm != "reference":
        reason = "its words depend on different choices, for which one table of the node group has no dimensions"
        evaluations = len(attention_query.dependencies) * plan.states * len(model.ground)
        plan = replace(plan, algorithm="reference", reason=reason, node=spec.group.name, evaluations=evaluations)
    return plan.with_run(partial(_expected_attention_by_reference, query, spec)).with_warning()


def _average_attention(
    query: Query, attention_query: NodeQuery, posteriors: dict[tuple[int, ...], Tensor], attention: Tensor
) -> Tensor:
    """The mean of a table of attention, `[*states, *plates, word, word read]`, over the posterior of the choices."""
    shape, first, nodes = _locate_attention(query, attention_query.spec)
    table = torch.zeros(math.prod(shape[:-1]), shape[-1], dtype=torch.float64)
    flat = attention.detach().double().cpu().reshape(-1, *table.shape)
    groups: dict[tuple[int, ...], list[int]] = {}  # nodes that depend on the same choices share a posterior
    for node in nodes:
        groups.setdefault(tuple(attention_query.choices.get(node, ())), []).append(node - first)
    for choices, rows in groups.items():
        if not choices:  # the rows are the same in all states
            table[rows] = flat[0, rows]
            continue
        if choices not in posteriors:
            posteriors[choices] = plan_state_probs(replace(query, nodes=choices)).run()
        table[rows] = torch.einsum("s,snm->nm", posteriors[choices], flat[:, rows])
    return table.reshape(shape)


def _expected_attention_by_reference(query: Query, spec: NodeSpec) -> Tensor:
    """The mean attention of a group, node by node."""
    shape, first, nodes = _locate_attention(query, spec)
    table = torch.zeros(math.prod(shape[:-1]), shape[-1], dtype=torch.float64)
    for node in nodes:
        row = expected_attention(query.model, node, query.evidence, query.budget)
        if row is not None:
            table[node - first, row[0]] = row[1]
    return table.reshape(shape)


def _locate_attention(query: Query, spec: NodeSpec) -> tuple[tuple[int, ...], int, list[int]]:
    """The shape of the attention of a group, `[*plates, word, word read]`, its first node, and its nodes not set."""
    model, nodes = query.model, query.model.ground.select_nodes(spec.group).tolist()
    shape = (*model.ground.shapes[spec.group.index], model.ground.word_counts[model.network.get_source_stack(spec)])
    return shape, nodes[0], [node for node in nodes if node not in model.do]


def arrow_weights(query: Query, evaluator: NodeEvaluator, selection: NodeSelection) -> dict[tuple[int, int], float]:
    """The weight `P(j | i, evidence)` of each selected arrow along which a node attends to another word.

    Args:
        query: The sentence and its evidence, the budget and the tolerance.
        evaluator: The evaluator of the same sentence.
        selection: The part of the ground graph.

    Returns:
        The weight of each arrow (source, target), by ground ids. Arrows in other slots (query, residual) have no
        weight.
    """
    weights = dict[tuple[int, int], float]()
    for _, sources, targets, values in iter_arrow_weights(query, evaluator, selection):
        if values is not None:
            has_weight = ~np.isnan(values)
            pairs = zip(sources[has_weight].tolist(), targets[has_weight].tolist(), strict=True)
            weights.update(zip(pairs, values[has_weight].tolist(), strict=True))
    return weights


def iter_arrow_weights(
    query: Query, evaluator: NodeEvaluator, selection: NodeSelection
) -> Iterator[tuple[EdgeTemplate, NDArray[Any], NDArray[Any], NDArray[np.float64] | None]]:
    """The selected arrows with their weights `P(j | i, evidence)`, as arrays.

    Args:
        query: The sentence and its evidence, the budget and the tolerance.
        evaluator: The evaluator of the same sentence.
        selection: The part of the ground graph.

    Returns:
        For each edge template: the template, the ids of the parents, the ids of the children, and the weights,
        `[arrow]` each. A weight is NaN if the arrow is in another slot too (query, residual); the weights are None if
        no arrow of the template is attention.
    """
    plan_log_evidence(query).run()  # raises an error for impossible evidence
    ground, specs = query.model.ground, query.model.network.specs
    posteriors = dict[tuple[int, ...], Tensor]()
    plans = {
        spec.group.index: plan_expected_attention(query, evaluator.attention_query(spec), posteriors)
        for spec in specs
        if spec.has_word_attention and spec.tpm.has_attention and ground.is_selected(spec.group, selection)
    }
    evaluator.prefetch("attention", [specs[index] for index, plan in plans.items() if plan.algorithm == "compiled"])
    rows = {}
    for index, plan in plans.items():
        table = to_numpy(plan.run())
        rows[index] = table.reshape(-1, table.shape[-1])
    for edge, sources, targets in ground.arrows(selection):
        parents = [p for p in specs[edge.child].parents if p.index == edge.parent] if edge.child in rows else []
        if not any(WORD in parent.over for parent in parents):
            yield edge, sources, targets, None
            continue
        words = (sources - int(ground.offsets[edge.parent])) % ground.shapes[edge.parent][-1]
        values = rows[edge.child][targets - int(ground.offsets[edge.child]), words]
        if any(WORD not in parent.over for parent in parents):
            children = np.unique(targets).tolist()
            single = [(s, child) for child in children for s in find_single_parents(query.model, child)]
            codes = [source * len(ground) + child for source, child in single]
            is_single = np.isin(sources.astype(np.int64) * len(ground) + targets, np.array(codes, dtype=np.int64))
            values = np.where(is_single, np.nan, values)
        yield edge, sources, targets, values


# --------------------------------------------------------------------------------------------------------------------
# The posteriors of all nodes of a discrete node group, such as the choices of all words.


@dataclass(frozen=True)
class GroupPosterior(Result):
    """The posterior `P(node | evidence)` of each node of a discrete node group.

    Attributes:
        name: The name of the node group, such as `c_0`.
        probabilities: The probabilities, `[*plates, word, state]`. A node that is observed or set has probability 1 in
            its state; the row of a node that is set to a vector is NaN.
        axes: The names of the dims of `probabilities`: plates such as `head`, then `word` and `state`.
        labels: The labels along each axis, for axes with labels: the tokens of the words, the labels of the states.
        special: For each word, whether it is a special token; empty if this is unknown.
    """

    _shapes = "labels: {_} any @; probabilities: real *axes; special: any @word?"

    name: str
    probabilities: Tensor
    axes: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    special: tuple[bool, ...] = field(default=(), repr=False)

    def labels_along(self, dim: int) -> tuple[str, ...]:
        """The labels along a dim of `probabilities`.

        Args:
            dim: The number of the dim.

        Returns:
            The labels; numerals for an axis without labels.
        """
        return self.labels.get(self.axes[dim], tuple(map(str, range(self.probabilities.shape[dim]))))

    def to_dataframe(self) -> pd.DataFrame:
        """A data frame with a row for each node and a column for each state, indexed by the axes and the token.

        The axes are not columns, because a state may have the label of an axis, such as the token `word`.
        """
        import pandas as pd

        tokens, axes, probs = self.labels.get("word"), [*self.axes[:-1]], to_numpy(self.probabilities)
        frame = pd.DataFrame(probs.reshape(-1, probs.shape[-1]), columns=distinguish(self.labels_along(-1)))
        if not axes:
            return frame
        index = np.indices(probs.shape[:-1]).reshape(len(axes), -1)
        levels = [pd.Series(row, name=axis) for axis, row in zip(axes, index, strict=True)]
        levels += [] if tokens is None else [pd.Series([tokens[k] for k in index[-1]], name="token", dtype=object)]
        return frame.set_index(levels)

    @property
    def caption(self) -> str:
        """The group of nodes, in one line."""
        return f"P({self.name} | evidence)"


def plan_group_posterior(state: SentenceState, query: Query, name: str) -> Plan[GroupPosterior]:
    """The plan of `P(node | evidence)` of each node of a group: by one elimination if one applies, else node by node.

    Args:
        state: The sentence, for tokens and labels.
        query: The sentence, the evidence and the limits; its requested nodes are ignored.
        name: The name of the discrete node group, or the pattern of all its nodes.

    Raises:
        BNetError: The group is not discrete, or all its nodes are set.
        EvidenceError: The evidence is impossible. `run` raises it.
    """
    model, ground = query.model, query.model.ground
    groups = find_groups(model.network, name)
    group = groups[0] if len(groups) == 1 else ground.template.get_group(name)
    nodes: list[int] = ground.select_nodes(group).tolist()
    check_discrete_node(model, next((node for node in nodes if node not in model.do), nodes[0]))
    state_labels = state.labels(nodes[0])
    labels: dict[str, tuple[str, ...]] = {} if state_labels is None else {"state": state_labels}
    if group.word_stack is not None:
        labels["word"] = state.tokens[group.word_stack]
    flags = () if group.word_stack is None else state.encoded.flag_special_words(state.network, group.word_stack)
    axes, dtype = (*ground.axes(group), "state"), model.network.log_dtype
    plan = _plan_probabilities(query.without_input_evidence(), group, nodes)
    return plan.then(lambda probs: GroupPosterior(group.name, probs.to(dtype), axes, labels, flags))


def _plan_probabilities(query: Query, group: NodeGroup, nodes: Sequence[int]) -> Plan[Tensor]:
    """The plan of the posteriors of the nodes of a group, `[*plates, word, state]`."""
    model, question = query.model, f"posteriors of the nodes of {group.name}"
    compute = partial(_compute_posterior, query, group.index, ())
    plan = plan_elimination(question, replace(query, nodes=(nodes[0],)), compute)
    if isinstance(plan, Plan):
        return plan

    def build_table(posteriors: Mapping[int, Tensor]) -> Tensor:
        table = torch.zeros(len(nodes), model.count_states(nodes[0]), dtype=torch.float64)
        for row, node in zip(table, nodes, strict=True):
            if node in posteriors:
                row.copy_(posteriors[node])
            elif model.do[node].is_floating_point():
                row.fill_(math.nan)
            else:
                row[model.do[node]] = 1.0
        return table.reshape(*model.ground.shapes[group.index], -1)

    unset = replace(query, nodes=tuple(node for node in nodes if node not in model.do))
    return plan_node_posteriors(unset, question).then(build_table)

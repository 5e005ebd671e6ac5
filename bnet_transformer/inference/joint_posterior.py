"""Posteriors of nodes of a sentence, the log probability of its evidence, and attention averaged over posteriors.

All results are exact. The router chooses the algorithm.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Categorical

from bnet_transformer import reference
from bnet_transformer._core.arrays import to_numpy
from bnet_transformer._core.naming import WORD
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError, format_count
from bnet_transformer.graph import EdgeTemplate, NodeSelection
from bnet_transformer.inference import elimination
from bnet_transformer.inference.factor_graph import (
    FactorGraph,
    build_factor_graph,
    find_supports,
    format_nodes,
    locate_words,
    scatter_possible,
)
from bnet_transformer.inference.factors import LOG_ZERO, EliminationProblem
from bnet_transformer.inference.node_evaluator import NodeEvaluator, NodeQuery
from bnet_transformer.inference.query import (
    MAX_DIMS,
    Query,
    build_request_arguments,
    enumerate_joint_states,
    group_evidence,
    iter_chunks,
    prune_interventions,
    with_sentence_scope,
)
from bnet_transformer.inference.routing import (
    Route,
    find_elimination_problem,
    route_joint,
    route_log_evidence,
    route_posterior,
    with_cost,
    with_factor_graph,
)
from bnet_transformer.reference import ReferenceRun
from bnet_transformer.reference.node_tables import expected_attention, find_single_parents, split_choices


def joint_posterior(query: Query, evaluator: NodeEvaluator | None = None) -> Tensor:
    """`P(nodes | evidence)` for discrete nodes: `[*states]` in float64, with a dim for each node in their order.

    Args:
        query: The nodes, the evidence and the sentence.
        evaluator: An evaluator of this sentence without evidence, whose values are reused.

    Raises:
        BudgetError: The number of joint states exceeds the budget; the error contains it.
        BNetError: More nodes are requested than a tensor has dims.
        EvidenceError: The evidence is impossible; the error names the first impossible observation.
    """
    if len(query.nodes) > MAX_DIMS:
        hint = "Request fewer nodes; posteriors(group) has the posterior of each node, sample(n) joint states"
        raise BNetError("joint posterior", expected=f"at most {MAX_DIMS} nodes", actual=len(query.nodes), hint=hint)
    probs = joint_state_probs(query, evaluator)
    return probs.reshape([query.model.count_states(node) for node in query.nodes])


def joint_state_probs(query: Query, evaluator: NodeEvaluator | None = None) -> Tensor:
    """`P(nodes | evidence)` of each joint state of any number of nodes, `[joint state]`; the last node varies fastest.

    Args and errors are those of `joint_posterior`.
    """
    check_nodes(query)
    query = query.without_input_evidence()
    if len(query.nodes) > 1:
        query = replace(query, nodes=query.varying_nodes)
    if not query.nodes:
        joint_log_evidence(query)  # raises an error for impossible evidence
        return torch.ones(1, dtype=torch.float64)
    route = route_posterior(query)
    if route.algorithm == "compiled":
        evaluator = evaluator or NodeEvaluator(query.module, query.model, {})
        distribution = evaluator.distribution(query.nodes[0])
        assert isinstance(distribution, Categorical)
        return distribution.logits.double().softmax(-1)
    if route.algorithm == "elimination":
        return posterior_by_elimination(query)
    route.warn_if_slow()
    logs = _joint_log_probs(query, route).flatten()
    if bool(logs.isinf().all()):
        raise_impossible_evidence(query)
    return torch.softmax(logs, 0)


def joint_log_probs(query: Query) -> Tensor:
    """`log P(nodes, evidence)` for discrete nodes, `[joint state]`: -inf for states that the evidence excludes.

    The last node varies fastest.
    """
    query = query.without_input_evidence()
    query = replace(query, nodes=query.varying_nodes)
    route = route_joint(query)
    route.warn_if_slow()
    return _joint_log_probs(query, route).flatten()


def joint_log_evidence(query: Query) -> Tensor:
    """`log P(evidence)`: a scalar in float64 (a log density if a node is continuous).

    Raises:
        EvidenceError: The evidence is impossible; the error names the first impossible observation.
    """
    query = query.without_input_evidence()
    if not query.evidence:
        return torch.zeros((), dtype=torch.float64)
    route = route_log_evidence(query)
    route.warn_if_slow()
    if route.algorithm == "elimination":
        evidence = group_evidence(query.model, query.evidence)
        arguments = build_request_arguments(query.model)
        arguments |= {"budget": query.budget, "atol": query.atol, "dtype": torch.float64}
        logs = elimination.log_evidence(query.module, evidence, **arguments)
        return logs.detach()[0].double()

    total = _joint_log_probs(query, route)
    if total > -math.inf:
        return total
    # If a prefix of the evidence is impossible, every longer prefix is: so bisection finds the impossible observation.
    ordered = {
        node: query.evidence[node] for _, node in sorted(locate_words(query.model, query.evidence), key=itemgetter(0))
    }

    def is_impossible(count: int) -> bool:
        first = replace(query, evidence=dict(islice(ordered.items(), count)))
        return bool(_joint_log_probs(first, route_joint(first)) == -math.inf)

    try:
        last = bisect_left(range(1, len(ordered)), True, key=is_impossible)
    except BudgetError:  # fewer observations separate fewer choices
        expected = "evidence that is possible in some state of the net"
        raise EvidenceError("evidence", expected=expected, actual="observations of probability zero together") from None
    raise reference.impossible_evidence_error(query.model, ordered, last)


def raise_impossible_evidence(query: Query) -> NoReturn:
    """Raise the error that names the first impossible observation."""
    joint_log_evidence(replace(query, nodes=()))
    raise EvidenceError(f"{query.format_nodes()}: the evidence is impossible in all its states")


def posterior_by_elimination(query: Query) -> Tensor:
    """`P(node | evidence)` of one discrete node, `[states]`, by elimination."""
    group, index = query.model.ground.unravel_index(query.nodes[0])
    evidence = group_evidence(query.model, query.evidence)
    arguments = build_request_arguments(query.model)
    probs = elimination.posterior(query.module, group.name, evidence, **arguments, budget=query.budget, atol=query.atol)
    node_probs = probs[(0, *index)].double()
    return node_probs / node_probs.sum()  # in float32 the sum is 1 only to 1e-7


def _joint_log_probs(query: Query, route: Route) -> Tensor:
    """`log P(nodes, evidence)`, `[*states]`, by variable elimination, conditioning, enumeration or the reference."""
    plan, model, supports = route.plan, query.model, find_supports(query)
    if plan is not None and plan.excess is not None:
        raise plan.excess
    if plan is not None and plan.graph is not None:
        return plan.graph.compute_joint()
    if not all(supports.values()):
        return torch.full([model.count_states(node) for node in query.nodes], -math.inf, dtype=torch.float64)
    nodes = tuple(dict.fromkeys([*query.nodes, *route.choices]))
    if plan is None:
        reference.check_joint_states(model, nodes, query.budget)
    joint_states = enumerate_joint_states([supports[node] for node in nodes])
    if plan is not None:
        possible = _batched_log_probs(plan.query, nodes, joint_states, plan.summed)
    else:
        query = query.without_target_evidence()
        runs = (ReferenceRun(model, {**query.fixed, **dict(zip(nodes, row, strict=True))}) for row in joint_states)
        log_joints = [reference.log_joint(run, query.choices, query.evidence, query.atol) for run in runs]
        possible = torch.tensor(log_joints, dtype=torch.float64)
    requested = [supports[node] for node in query.nodes]
    summed = possible.reshape(*map(len, requested), -1).logsumexp(-1)
    return scatter_possible(model, query.nodes, requested, summed)


def _batched_log_probs(query: Query, nodes: Sequence[int], states: Tensor, summed: int) -> Tensor:
    """`log P(nodes = states, evidence)` for each row of states, `[row]`, computed in chunks that fit in memory."""
    module, pruned = with_sentence_scope(query.module), prune_interventions(query.model, [*nodes, *query.evidence])
    indices = {pruned.ground.group_of(node).index for node in (*nodes, *query.evidence)}
    arguments, logs = build_request_arguments(pruned), []
    for chunk in iter_chunks(pruned, len(states), indices, summed):
        evidence = group_evidence(pruned, query.evidence, dict(zip(nodes, states[chunk].unbind(1), strict=True)))
        batch = elimination.log_evidence(
            module, evidence, **arguments, budget=query.budget, atol=query.atol, check=False, dtype=torch.float64
        )
        logs.append(batch.detach())
    result = torch.cat(logs).double().cpu()
    if bool(result.isnan().any()):
        _raise_nan_error(query, nodes, states[result.isnan()][0])
    return torch.where(result > LOG_ZERO / 2, result, -math.inf)


def _raise_nan_error(query: Query, nodes: Sequence[int], states: Tensor) -> None:
    """Raise an error for NaN in one joint state, which names the node."""
    known = {**query.fixed, **dict(zip(nodes, states, strict=True))}
    choices = [node for node in query.choices if node in known]
    reference.log_joint(ReferenceRun(query.model, known), choices, query.evidence, query.atol)
    raise BNetError("joint posterior", expected="log probabilities that are numbers", actual="NaN")


def node_posteriors(query: Query) -> dict[int, Tensor]:
    """`P(node | evidence)` of each requested node by itself, `[state]` in float64, by ground id.

    Args:
        query: The nodes, the evidence and the sentence.

    Returns:
        The posteriors. If variable elimination is within the budget, two passes compute all of them.

    Raises:
        BudgetError: The number of joint states exceeds the budget; the error contains it.
        EvidenceError: The evidence is impossible; the error names the first impossible observation.
    """
    query = query.without_input_evidence()
    graph = find_graph_of_marginals(query)
    if graph is not None:
        marginals = graph.compute_marginals()
        if marginals is None:
            raise_impossible_evidence(query)
        return {node: marginals[node] for node in query.nodes}
    return {node: joint_posterior(replace(query, nodes=(node,))) for node in query.nodes}


def find_graph_of_marginals(query: Query) -> FactorGraph | None:
    """The factor graph that gives the posteriors of several nodes; None for one node, and beyond the budget."""
    graph = build_factor_graph(query) if len(query.nodes) > 1 else None
    return graph if isinstance(graph, FactorGraph) and graph.find_excess(graph.full_order) is None else None


def find_marginal_map(query: Query, count: int) -> tuple[list[int], Tensor, Tensor]:
    """The most probable joint states of the requested nodes, summed over all other choices: marginal MAP, k best.

    Args:
        query: The nodes, the evidence and the sentence.
        count: The maximum number k of joint states.

    Returns:
        The nodes by ground id, their states `[k, node]`, and `log P(states, evidence)`, `[k]` (float64; with an
        observed continuous node a log density). The most probable states come first, and of equally probable ones
        those with smaller state numbers; k is smaller than `count` if fewer joint states are possible.

    Raises:
        BudgetError: A scope of the elimination has more joint states than the budget.
        EvidenceError: The evidence is impossible; the error names the first impossible observation.
    """
    query, nodes = query.without_input_evidence(), [*query.nodes]
    if count == 1 and has_only_chains(query):
        return nodes, *_find_best_paths(query)
    graph = find_maximisation_graph(query)
    if graph is not None:
        states, log_probs = graph.find_best(count)
        result = torch.stack([states[node] for node in nodes], 1) if nodes else torch.zeros(len(log_probs), 0).long()
    else:
        check_nodes(query)
        log_probs, flat = torch.sort(joint_log_probs(query), descending=True, stable=True)
        possible = log_probs[:count] > -math.inf
        log_probs, flat = log_probs[:count][possible], flat[:count][possible]
        sizes = [query.model.count_states(node) for node in nodes]
        result = torch.stack(torch.unravel_index(flat, sizes), 1) if nodes else flat[:, None][:, :0]
    if not len(log_probs):
        raise_impossible_evidence(query)
    return nodes, result, log_probs


def has_only_chains(query: Query) -> bool:
    """Whether the requested nodes and the observed ones are independent chains along the words, the only choices."""
    model, network = query.model, query.model.network
    problem = find_elimination_problem(query, query.nodes[0]) if query.nodes else None
    if not isinstance(problem, EliminationProblem) or problem.fault is not None:
        return False
    single = {first for first, scope in problem.chain_scopes.items() if {*scope} == {first}}
    nodes = {n for i in problem.enumerated for n in model.ground.select_nodes(network.specs[i].group).tolist()}
    is_complete = {*query.nodes} <= nodes <= {*query.nodes, *query.fixed}
    has_small_tables = all(model.count_states(node) ** 2 <= query.budget for node in nodes)
    return problem.enumerated == single and is_complete and has_small_tables


def _find_best_paths(query: Query) -> tuple[Tensor, Tensor]:
    """The most probable states of the nodes of chains, `[1, node]`, and `log P(states, evidence)`, `[1]`."""
    ground = query.model.ground
    evidence, arguments = group_evidence(query.model, query.evidence), build_request_arguments(query.model)
    name = ground.group_of(query.nodes[0]).name
    paths, log_prob = elimination.find_best_paths(
        query.module, name, evidence, budget=query.budget, atol=query.atol, **arguments
    )
    if log_prob == -math.inf:
        raise_impossible_evidence(query)
    groups = [ground.group_of(node).index for node in query.nodes]
    states = [paths[k][node - int(ground.offsets[k])] for k, node in zip(groups, query.nodes, strict=True)]
    return torch.stack(states)[None], torch.tensor([log_prob], dtype=torch.float64)


def find_maximisation_graph(query: Query) -> FactorGraph | None:
    """The factor graph for the most probable states of the nodes of a query; None if their joint table is required.

    Raises:
        BudgetError: The joint table has more entries than the budget too.
    """
    graph = build_factor_graph(query)
    excess = graph.find_excess(*graph.constrained_orders) if isinstance(graph, FactorGraph) else graph
    if isinstance(excess, BudgetError) and math.prod(map(query.model.count_states, query.nodes)) > query.budget:
        raise excess
    return graph if isinstance(graph, FactorGraph) and excess is None else None


def route_marginal_map(query: Query, count: int) -> Route:
    """The route of the `count` most probable joint states of the requested nodes, summed over all other choices.

    Raises:
        BudgetError: There are more joint states than the budget.
    """
    query = query.without_input_evidence()
    question = f"most probable states of {format_nodes(query.model, query.nodes)}"
    if count == 1 and has_only_chains(query):
        reason = "the choices are chains along the words, whose most probable paths the Viterbi algorithm finds"
        return with_cost(replace(query, nodes=query.nodes[:1]), Route(question, "elimination", reason))
    graph = find_maximisation_graph(query)
    if graph is None:
        return replace(with_cost(query, route_joint(query)), question=question)
    reason = "choices are summed out first, then the requested nodes are maximised out, one by one"
    return with_factor_graph(Route(question, "variable elimination", reason), graph, *graph.constrained_orders)


def check_nodes(query: Query) -> None:
    """Raise an error for repeated nodes, and for more joint states of the nodes than the budget."""
    if len(set(query.nodes)) < len(query.nodes):
        raise BNetError("nodes", expected="different nodes", actual=query.format_nodes())
    count = math.prod(query.model.count_states(node) for node in query.nodes)
    if len(query.nodes) > 1 and count > query.budget:
        hint = "Request fewer nodes, set or observe some of them, or raise budget="
        expected = f"at most {query.budget} joint states of {query.format_nodes()}"
        raise BudgetError("joint posterior", expected=expected, actual=format_count(count), hint=hint)


def expected_group_attention(query: Query, attention_query: NodeQuery) -> Tensor:
    """`sum_c P(c | evidence) P(j | i, c)`: the attention of a group, averaged over the posterior of latent choices c.

    Args:
        query: The sentence and its evidence, the budget and the tolerance.
        attention_query: The query of `NodeEvaluator.attention_query`.

    Returns:
        `[*plates, word, word read]` in float64; zero for set nodes.
    """
    model, spec, evaluator = query.model, attention_query.spec, attention_query.evaluator
    shape = (*model.ground.shapes[spec.group.index], model.ground.word_counts[model.network.get_source_stack(spec)])
    nodes, first = model.ground.select_nodes(spec.group).tolist(), int(model.ground.offsets[spec.group.index])
    table = torch.zeros(len(nodes), shape[-1], dtype=torch.float64)
    nodes = [node for node in nodes if node not in model.do]
    route = route_expected_attention(attention_query)
    if route.algorithm == "reference":
        route.warn_if_slow()
        for node in nodes:
            row = expected_attention(model, node, query.evidence, query.budget)
            if row is not None:
                table[node - first, row[0]] = row[1]
        return table.reshape(shape)
    flat = evaluator.compute(attention_query, route).detach().double().cpu().reshape(-1, len(table), shape[-1])
    if bool(flat.isnan().any()):
        raise BNetError(spec.group.name, expected="numbers", actual="NaN")
    groups: dict[tuple[int, ...], list[int]] = {}  # nodes that depend on the same choices share a posterior
    for node in nodes:
        groups.setdefault(tuple(attention_query.choices.get(node, ())), []).append(node - first)
    for choices, rows in groups.items():
        if not choices:  # the rows are the same in all states
            table[rows] = flat[0, rows]
            continue
        probs = joint_state_probs(replace(query, nodes=choices))
        table[rows] = torch.einsum("s,snm->nm", probs, flat[:, rows])
    return table.reshape(shape)


def route_expected_attention(attention_query: NodeQuery) -> Route:
    """The route of the average attention of a group: from its tables in every state, or node by node."""
    model, route = attention_query.evaluator.model, attention_query.evaluator.route(attention_query)
    if split_choices(model, attention_query.choices) is not None or route.algorithm == "reference":
        return route
    count = len(attention_query.dependencies) * route.states * len(model.ground)
    reason = "its words depend on different choices, for which one table of the node group has no dimensions"
    return replace(route, algorithm="reference", reason=reason, node=attention_query.spec.group.name, evaluations=count)


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
    joint_log_evidence(query)  # raises an error for impossible evidence
    ground, specs = query.model.ground, query.model.network.specs
    queries = {
        spec.group.index: evaluator.attention_query(spec)
        for spec in specs
        if spec.has_word_attention and spec.tpm.has_attention and ground.is_selected(spec.group, selection)
    }
    evaluator.prefetch_attention([q.spec for q in queries.values() if evaluator.route(q).algorithm == "compiled"])
    rows = {}
    for index, attention_query in queries.items():
        table = to_numpy(expected_group_attention(query, attention_query))
        rows[index] = table.reshape(-1, table.shape[-1])
    for edge, sources, targets in ground.arrows(selection):
        parents = [p for p in queries[edge.child].spec.parents if p.index == edge.parent] if edge.child in rows else []
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

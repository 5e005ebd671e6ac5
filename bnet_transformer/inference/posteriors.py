"""Posteriors: of nodes, of node groups and joint; the log probability of evidence; the most probable joint states."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Categorical

from bnet_transformer import reference
from bnet_transformer._core.naming import EVERY_NODE, WORD, count_word_from_start, match_names
from bnet_transformer._core.process import check_memory
from bnet_transformer._core.results import Result
from bnet_transformer._core.tensors import to_numpy
from bnet_transformer._core.tokens import distinguish, name_columns
from bnet_transformer.data.checks import find_groups
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError, format_count, unknown_name_error
from bnet_transformer.graph import EdgeTemplate, NodeGroup, NodeSelection
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
from bnet_transformer.inference.plan import (
    Route,
    find_elimination_problem,
    find_single_target_fault,
    route_joint,
    route_log_evidence,
    route_posterior,
    with_cost,
    with_factor_graph,
)
from bnet_transformer.inference.query import (
    MAX_DIMS,
    Query,
    build_request,
    enumerate_joint_states,
    group_evidence,
    iter_chunks,
    prune_interventions,
    with_sentence_scope,
)
from bnet_transformer.inference.values import NodeEvaluator, NodeQuery, SentenceState
from bnet_transformer.reference import (
    GroundModel,
    ReferenceRun,
    check_discrete_node,
    expected_attention,
    find_single_parents,
    split_choices,
)

if TYPE_CHECKING:
    import pandas as pd


# --------------------------------------------------------------------------------------------------------------------
# Posteriors of nodes of a sentence, the log probability of its evidence, and attention averaged over posteriors.
#
# All results are exact. The router chooses the algorithm.


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
        tensors, limits = query.to_tensors(), (query.budget, query.atol)
        logs = elimination.compute_log_evidence(query.module, *tensors, *limits, dtype=torch.float64)
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
    probs = elimination.compute_posterior(
        query.module, group.index, *query.to_tensors(), budget=query.budget, atol=query.atol
    )
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
    request, logs = build_request(pruned), []
    for chunk in iter_chunks(pruned, len(states), indices, summed):
        evidence = group_evidence(pruned, query.evidence, dict(zip(nodes, states[chunk].unbind(1), strict=True)))
        batch = elimination.compute_log_evidence(
            module, evidence, request, query.budget, query.atol, check=False, dtype=torch.float64
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
    index = ground.group_of(query.nodes[0]).index
    paths, log_prob = elimination.find_best_paths(
        query.module, index, *query.to_tensors(), budget=query.budget, atol=query.atol
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


def compute_group_posterior(state: SentenceState, query: Query, name: str) -> GroupPosterior:
    """`P(node | evidence)` of each node of a group: by one elimination if one applies, else node by node.

    Args:
        state: The sentence, for tokens and labels.
        query: The sentence, the evidence and the limits; its requested nodes are ignored.
        name: The name of the discrete node group, or the pattern of all its nodes.

    Raises:
        EvidenceError: The evidence is impossible.
    """
    model, ground = query.model, query.model.ground
    nodes = find_group_nodes(model, name)
    group = ground.group_of(nodes[0])
    probs = _compute_probabilities(query.without_input_evidence(), group, nodes)
    state_labels = state.labels(nodes[0])
    labels: dict[str, tuple[str, ...]] = {} if state_labels is None else {"state": state_labels}
    if group.word_stack is not None:
        labels["word"] = state.tokens[group.word_stack]
    flags = () if group.word_stack is None else state.encoded.flag_special_words(state.network, group.word_stack)
    return GroupPosterior(group.name, probs.to(model.network.log_dtype), (*ground.axes(group), "state"), labels, flags)


def find_group_nodes(model: GroundModel, name: str) -> list[int]:
    """The nodes of a discrete node group; an error if the group is not discrete, or if all its nodes are set."""
    groups = find_groups(model.network, name)
    group = groups[0] if len(groups) == 1 else model.ground.template.get_group(name)
    nodes: list[int] = model.ground.select_nodes(group).tolist()
    check_discrete_node(model, next((node for node in nodes if node not in model.do), nodes[0]))
    return nodes


def _compute_probabilities(query: Query, group: NodeGroup, nodes: Sequence[int]) -> Tensor:
    """The posteriors of the nodes of a group, `[*plates, word, state]`."""
    model = query.model
    if find_single_target_fault(replace(query, nodes=(nodes[0],))) is None:
        probs = elimination.compute_posterior(
            query.module, group.index, *query.to_tensors(), budget=query.budget, atol=query.atol
        )
        probs = probs[0].double()
        return probs / probs.sum(-1, keepdim=True)  # in float32 the sum is 1 only to 1e-7
    table = torch.zeros(len(nodes), model.count_states(nodes[0]), dtype=torch.float64)
    posteriors = node_posteriors(replace(query, nodes=tuple(node for node in nodes if node not in model.do)))
    for row, node in zip(table, nodes, strict=True):
        if node in posteriors:
            row.copy_(posteriors[node])
        elif model.do[node].is_floating_point():
            row.fill_(math.nan)
        else:
            row[model.do[node]] = 1.0
    return table.reshape(*model.ground.shapes[group.index], -1)


# --------------------------------------------------------------------------------------------------------------------
# The most probable joint states of nodes given the evidence: the most probable explanation, and marginal MAP.
#
# The most probable explanation (MPE) of evidence e is `argmax_c P(c, e)` over the joint states c of all latent choices
# (Pearl 1988, Probabilistic Reasoning in Intelligent Systems, section 5.3). Marginal MAP maximises over some nodes only
# and sums over the others before: `argmax_a sum_b P(a, b, e)`. Its result is in general not a part of the MPE. Both are
# returned with the k best joint states (Nilsson 1998).


UNKNOWN_STATE = -1
MAX_SHOWN = 12  # states of a group in a text


@dataclass(frozen=True)
class GroupStates:
    """The states of one node group in each of the k best joint states.

    Attributes:
        name: The name of the node group, such as `c_0`.
        nodes: The names of its nodes, in the order of the flattened `states`.
        states: The states, `[k, *plates, word]`. Observed and set nodes have their own state; -1 is the state of a node
            that was not requested, or that is set to a vector.
        is_explained: True for the nodes over whose states the probability was maximised, `[*plates, word]`.
        num_states: The number of states of each node.
        labels: The labels of the states; None for states without labels.
        stack: The stack whose words the nodes have; None for nodes without words.
    """

    _shapes = "num_states: size state; labels: any state; states: int<state rank *plates; is_explained: bool *plates"

    name: str
    nodes: tuple[str, ...] = field(repr=False)
    states: Tensor = field(repr=False)
    is_explained: Tensor = field(repr=False)
    num_states: int
    labels: tuple[str, ...] | None = field(default=None, repr=False)
    stack: str | None = None

    @property
    def flat_states(self) -> Tensor:
        """The states, `[k, node]`."""
        return self.states.reshape(len(self.states), -1)

    def format_states(self, k: int) -> list[str]:
        """The labels of the states of all nodes in joint state k; a long list is shortened."""
        labels = [self.format_state(state) for state in self.flat_states[k].tolist() if state != UNKNOWN_STATE]
        return labels if len(labels) <= MAX_SHOWN else [*labels[:MAX_SHOWN], f"… ({len(labels)} nodes)"]

    def format_state(self, state: int) -> str:
        """The label of a state, or its number."""
        return str(state) if self.labels is None else self.labels[state]


@dataclass(frozen=True)
class RankedStates(Result):
    """The k most probable joint states of some nodes given the evidence, the most probable one first.

    `len(result)` is k, which is smaller than the requested count if fewer joint states are possible. Of equally
    probable joint states, the one with smaller states is first; the last ones of a list are the smallest of at most 256
    equally probable joint states that are compared.

    Attributes:
        nodes: The names of the nodes over whose states the probability was maximised.
        states: Their states, `[k, node]`.
        log_probs: `log P(states, evidence)` of each joint state, `[k]`: a log density if an observed node is
            continuous. Nodes that are neither in `nodes` nor observed are summed out.
        log_evidence: `log P(evidence)`.
        groups: The states by node group, with those of observed and set nodes.
        tokens: The tokens of the words of each stack.
        method: `"most_probable"` or `"marginal_map"`.
    """

    _index = "rank"
    _shapes = "nodes: any node; states: int rank node; log_probs: float64 rank; groups.states: int rank *_"

    nodes: tuple[str, ...] = field(repr=False)
    states: Tensor
    log_probs: Tensor
    log_evidence: float
    groups: tuple[GroupStates, ...] = field(repr=False)
    tokens: Mapping[str, tuple[str, ...]] = field(repr=False)
    method: str = "most_probable"

    def __len__(self) -> int:
        """The number k of joint states."""
        return len(self.log_probs)

    def __str__(self) -> str:
        lines = []
        for k, (log_prob, share) in enumerate(zip(self.log_probs.tolist(), self.shares.tolist(), strict=True)):
            groups = (f"{group.name}: {' '.join(group.format_states(k))}" for group in self.groups)
            lines.append(f"{k + 1}. log P = {log_prob:.4f}, share {share:.3g}; {'; '.join(groups)}")
        return "\n".join(lines)

    @property
    def log_shares(self) -> Tensor:
        """`log P(states | evidence)` of each joint state, `[k]`."""
        return self.log_probs - self.log_evidence

    @property
    def shares(self) -> Tensor:
        """The posterior probability `P(states | evidence)` of each joint state, `[k]`."""
        return self.log_shares.exp()

    @cached_property
    def _position_of(self) -> dict[str, tuple[GroupStates, int]]:
        """The group of each node, and its index in the flattened states."""
        return {name: (group, k) for group in self.groups for k, name in enumerate(group.nodes)}

    def __getitem__(self, name: str) -> Tensor:
        """The states of a node or of a node group.

        Args:
            name: The name of a node, such as `"c_0_2"` or `"c_0_-1"`, or of all nodes of a group, such as `"c_0"`.

        Returns:
            The state `[k]` of the node, or the states `[k, *plates, word]` of the nodes of the group, where observed
            and set nodes have their own state, and -1 is the state of a node that was not requested or is set to a
            vector.

        Raises:
            UnknownNameError: The result has no such node or group.
        """
        group, index = self._find(name)
        return group.states if index is None else group.flat_states[:, index]

    def _find(self, name: Any) -> tuple[GroupStates, int | None]:
        """The group of a node and its index in the flattened states; without an index for all nodes of a group."""
        matches = list[GroupStates]()
        for group in self.groups if isinstance(name, str) else ():
            node = count_word_from_start(name, 0 if group.stack is None else group.states.shape[-1])
            if self._position_of.get(node, (None, 0))[0] is group:
                return self._position_of[node]
            if name != EVERY_NODE and len(match_names(name, group.nodes)) == len(group.nodes):
                matches.append(group)
        if len(matches) == 1:
            return matches[0], None
        raise unknown_name_error("node", name, [*(group.name for group in self.groups), *self.nodes])

    def labels(self, name: str) -> list[str]:
        """The labels of the states of a node, one for each of the k joint states.

        Args:
            name: The name of a node.

        Returns:
            k labels; numerals for states without labels.
        """
        group, index = self._find(name)
        if index is None:
            raise unknown_name_error("node", name, self.nodes)
        return distinguish(group.format_state(state) for state in self[name].tolist())

    def _get_columns(self) -> Mapping[str, Any]:
        columns: dict[str, Any] = {"rank": range(1, len(self) + 1), "log_prob": self.log_probs, "share": self.shares}
        # The column of a node with the name of another column is marked, as in `share (node)`.
        names = name_columns(self.nodes, columns)
        return columns | {column: self.labels(name) for column, name in zip(names, self.nodes, strict=True)}

    @property
    def caption(self) -> str:
        """The numbers of joint states and of nodes, in one line."""
        names = ", ".join([*self.nodes[:3], *(["…"] if len(self.nodes) > 3 else [])])
        return f"{len(self)} most probable joint states of {len(self.nodes):,} nodes: {names}"


def find_explained_nodes(model: GroundModel) -> list[int]:
    """The nodes of a most probable explanation: the discrete nodes that have children and are not set.

    A discrete node without children is a readout. Without evidence on it, its probabilities sum to 1.
    """
    graph = model.network.graph
    choices = [s.group for s in model.network.specs if s.tpm.kind == "discrete" and graph.out_edges[s.group.index]]
    nodes = [node for group in choices for node in model.ground.select_nodes(group).tolist() if node not in model.do]
    if not nodes:
        raise BNetError(
            "most probable explanation",
            expected="a sentence with latent choices: discrete nodes that have children and are not set by do",
            hint="For the most probable states of readouts, use marginal_map(nodes)",
        )
    return nodes


def compute_ranked_states(state: SentenceState, query: Query, count: int, method: str) -> RankedStates:
    """The `count` most probable joint states of the nodes of a query.

    Args:
        state: The sentence, for labels and tokens.
        query: The nodes, the evidence and the limits; observed nodes keep their state.
        count: The maximum number of joint states.
        method: `"most_probable"` or `"marginal_map"`.

    Raises:
        EvidenceError: The evidence is impossible; the error names the first impossible observation.
    """
    model, maximised = query.model, _without_observed_nodes(query)
    log_evidence = joint_log_evidence(replace(maximised, nodes=()))
    sizes = [model.count_states(node) for node in maximised.nodes]
    count = min(count, math.prod(sizes))
    check_memory("count", 16 * count * sum(sizes), "a smaller count=")
    if maximised.nodes:
        nodes, states, log_probs = find_marginal_map(maximised, count)
    else:
        nodes, states, log_probs = [], torch.zeros(1, 0, dtype=torch.long), log_evidence[None]
    columns = dict(zip(nodes, states.unbind(1), strict=True))
    return RankedStates(
        tuple(map(model.ground.name, nodes)),
        states,
        log_probs,
        float(log_evidence),
        tuple(_build_group_states(state, query, columns, len(states))),
        dict(state.tokens),
        method,
    )


def route_ranked_states(query: Query, question: str, count: int) -> Route:
    """The route of the `count` most probable joint states of the nodes of a query."""
    query = _without_observed_nodes(query)
    route = route_marginal_map(query, count) if query.nodes else with_cost(query, route_log_evidence(query))
    return replace(route, question=f"{question} of {format_nodes(query.model, query.nodes) or 'no node'}")


def _without_observed_nodes(query: Query) -> Query:
    """The query without requested nodes whose state is observed, and without evidence on inputs."""
    query = query.without_input_evidence()
    return replace(query, nodes=tuple(node for node in query.nodes if node not in query.fixed))


def _build_group_states(
    state: SentenceState, query: Query, columns: Mapping[int, Tensor], count: int
) -> Iterator[GroupStates]:
    """The states of the groups of the requested nodes, in the order of the net.

    Args:
        state: The sentence.
        query: The query with all requested nodes, also observed ones.
        columns: The states `[k]` of each explained node.
        count: The number k of joint states.
    """
    model, ground = query.model, query.model.ground
    known = {node: value for node, value in {**query.fixed, **model.do}.items() if not value.is_floating_point()}
    for index in sorted({ground.group_of(node).index for node in query.nodes}):
        group, shape = model.network.specs[index].group, ground.shapes[index]
        nodes = ground.select_nodes(group).tolist()
        unknown = torch.tensor(UNKNOWN_STATE)
        states = [columns.get(node, known.get(node, unknown)).cpu().expand(count) for node in nodes]
        yield GroupStates(
            group.name,
            tuple(ground.iter_names(group)),
            torch.stack(states, 1).reshape(count, *shape),
            torch.tensor([node in columns for node in nodes]).reshape(shape),
            model.count_states(nodes[0]),
            state.labels(nodes[0]),
            group.word_stack,
        )

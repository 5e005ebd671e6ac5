"""`explain`: the algorithm that would compute a result, the reason and the cost; nothing is computed.

`explain` is for functions of data sets (`fit`, `sweep`), `explain_query` for methods of a sentence. Each explainer of a
sentence takes the arguments of the method with the same name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from types import SimpleNamespace
from typing import Any

from bnet_transformer import reference
from bnet_transformer._core.checks import check_int, check_mapping
from bnet_transformer.attention.rollout import find_choices_read
from bnet_transformer.errors import BNetError, BudgetError, unknown_name_error
from bnet_transformer.graph import find_family
from bnet_transformer.graph.queries import parse_names
from bnet_transformer.inference.plan import (
    ELIMINATION_REASON,
    Route,
    find_single_target_fault,
    route_log_evidence,
    route_posterior,
    route_reference,
    with_cost,
    with_factor_graph,
)
from bnet_transformer.inference.posteriors import (
    check_nodes,
    find_explained_nodes,
    find_graph_of_marginals,
    find_group_nodes,
    route_expected_attention,
    route_ranked_states,
)
from bnet_transformer.inference.query import Query, find_attention_spec, parse_attention_slices
from bnet_transformer.inference.sampling import route_sample
from bnet_transformer.inference.values import NodeQuery, SentenceState

UNLIMITED_STATES = 2**1023  # more joint states than any sentence has; the largest budget that queries accept
BoundArguments = SimpleNamespace  # the arguments of a method by name


def explain(task: str, *arguments: Any, **options: Any) -> Route:
    """How a fit or a sweep would be computed: the algorithm, the reason, joint states and FLOPs; nothing is computed.

    `Sentence.explain` is the same for the methods of a sentence.

    Args:
        task: The name of the function: `"fit"` or `"sweep"`.
        *arguments: The arguments of that function.
        **options: The keyword arguments of that function.

    Returns:
        The route; `print` shows it as a sentence. `route.node` is the node that rules out a faster algorithm.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(4, heads=2, vocabulary=["the", "cat"], observe=bt.tpm.Categorical(2))
    >>> route = bt.explain("fit", net, [("the cat", "cat the"), ("cat the", "the cat")])
    >>> route.algorithm, route.states
    ('elimination', 2)
    """
    from bnet_transformer.interventions.sweep import explain_sweep
    from bnet_transformer.learning.fit.methods import explain_fit

    tasks: dict[str, Callable[..., Route]] = {"fit": explain_fit, "sweep": explain_sweep}
    if not isinstance(task, str) or task not in tasks:
        raise unknown_name_error("task", task, tasks)
    _bind_arguments(task, tasks[task], arguments, options)
    return tasks[task](*arguments, **options)


def explain_query(
    state: SentenceState,
    methods: Mapping[str, Callable[..., Any]],
    question: str,
    arguments: Sequence[object],
    options: Mapping[str, object],
) -> Route:
    """How a method of a sentence would be computed.

    Args:
        state: The sentence.
        methods: The methods of a sentence by name, for their signatures.
        question: The name of the method, such as `"posterior"`.
        arguments: The arguments of that method.
        options: The keyword arguments of that method.

    Returns:
        The route: algorithm, reason, joint states, FLOPs.
    """
    if not isinstance(question, str) or question not in EXPLAINERS:
        raise unknown_name_error("question", question, EXPLAINERS)
    method = methods["__getitem__" if question == "value" else question]
    bound = _bind_arguments(question, method, (state, *arguments), options)
    try:
        return EXPLAINERS[question](state, bound)
    except BudgetError as error:
        if not hasattr(bound, "budget"):
            raise
        bound.budget = UNLIMITED_STATES
        return replace(EXPLAINERS[question](state, bound), excess=str(error))


def _bind_arguments(
    question: str, method: Callable[..., Any], arguments: Sequence[object], options: Mapping[str, object]
) -> BoundArguments:
    """The arguments of a method by name, including defaults; unknown and missing arguments are an error."""
    try:
        bound = signature(method).bind(*arguments, **options)
    except TypeError as error:
        expected, actual = f"the arguments of {question}", str(error).removeprefix("got ")
        raise BNetError(f"explain({question!r}, ...)", expected=expected, actual=actual) from error
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)


def _explain_attention(state: SentenceState, bound: BoundArguments) -> Route:
    """The route of `attention`; without a slice, the slowest route of all slices."""
    if bound.slice is None:
        slices = parse_attention_slices(state.network, "all", bound.role)[1]
        specs = [find_attention_spec(state.model, t, bound.role) for t in slices]
        routes = [_route_with_flops(state, state.evaluator.attention_query(spec)) for spec in specs]
        slowest = max(routes, key=lambda route: (route.evaluations, route.states, route.flops or 0))
        return replace(slowest, question="attention of all slices")
    spec = find_attention_spec(state.model, bound.slice, bound.role)
    return _route_with_flops(state, state.evaluator.attention_query(spec))


def _explain_posterior(state: SentenceState, bound: BoundArguments) -> Route:
    """The route of `posterior`."""
    query = state.posterior_query(bound.name, bound.evidence, bound.budget, bound.atol).without_input_evidence()
    check_nodes(query)
    route = route_posterior(query)
    if route.algorithm == "compiled":  # the posterior is the node's TPM
        tpm = _route_with_flops(state, state.evaluator.distribution_query(query.nodes[0]))
        return replace(tpm, question=route.question)
    return with_cost(query, route)


def _build_query(state: SentenceState, bound: BoundArguments, nodes: Collection[int] = ()) -> Query:
    """The query of a method with the arguments evidence, budget and atol."""
    return state.with_evidence(bound.evidence).query(nodes, bound.budget, bound.atol)


def _explain_log_prob(state: SentenceState, bound: BoundArguments) -> Route:
    """The route of `log_prob`."""
    query = _build_query(state, bound).without_input_evidence()
    return with_cost(query, route_log_evidence(query))


def _explain_posteriors(state: SentenceState, bound: BoundArguments) -> Route:
    """The route of `posteriors`: one elimination for all nodes of the group, or the route of each node."""
    nodes = [node for node in find_group_nodes(state.model, bound.group) if node not in state.model.do]
    query = _build_query(state, bound, nodes).without_input_evidence()
    first, question = replace(query, nodes=tuple(nodes[:1])), f"posteriors of the nodes of {bound.group}"
    if find_single_target_fault(first) is None:
        return with_cost(first, Route(question, "elimination", ELIMINATION_REASON))
    graph = find_graph_of_marginals(query)
    if graph is not None:
        reason = "one elimination, and one pass back, compute the posteriors of all choices"
        return with_factor_graph(Route(question, "variable elimination", reason), graph, graph.full_order)
    return replace(with_cost(first, route_posterior(first)), question=f"{question}, one by one")


def _explain_most_probable(state: SentenceState, bound: BoundArguments) -> Route:
    """The route of `most_probable`."""
    check_int("count", bound.count)
    query = _build_query(state, bound, find_explained_nodes(state.model))
    return route_ranked_states(query, "most probable explanation", bound.count)


def _explain_marginal_map(state: SentenceState, bound: BoundArguments) -> Route:
    """The route of `marginal_map`."""
    check_int("count", bound.count)
    query = state.marginal_map_query(bound.nodes, bound.evidence, bound.budget, bound.atol)
    return route_ranked_states(query, "marginal MAP", bound.count)


def _explain_reads(state: SentenceState, bound: BoundArguments) -> Route:
    """The route of `reads` and `tan_tree`."""
    slices = bound.slice if hasattr(bound, "slice") else bound.slices  # `tan_tree` has one slice
    chosen = parse_attention_slices(state.network, slices, bound.role)[1]
    query = state.with_evidence(bound.evidence).query((), bound.budget)
    specs = [find_attention_spec(state.model, t, bound.role) for t in chosen]
    choices = find_choices_read(state.model, chosen, bound.role)
    if not choices:
        return _route_slowest(state, specs)
    route = route_posterior(replace(query, nodes=tuple(choices)).without_input_evidence())
    states = math.prod(state.model.count_states(choice) for choice in choices)
    return replace(route, question=f"reads of slices {chosen}", states=max(states, route.states))


def _explain_graph(state: SentenceState, bound: BoundArguments) -> Route:
    """The route of `graph` and `draw`: attention is computed only if it is part of the result."""
    is_figure = not hasattr(bound, "attention")
    if not (bound.options.get("attention") is not False if is_figure else bound.attention):
        return Route("figure" if is_figure else "graph", "graph", "only the structure of the graph is requested")
    specs = [m for m in state.network.specs if m.has_word_attention and m.tpm.has_attention]
    question = "figure" if is_figure else "graph with the weights of its arrows"
    return replace(_route_slowest(state, specs), question=question)


def _explain_value(state: SentenceState, bound: BoundArguments) -> Route:
    """The slowest route among those of the nodes of a name."""
    family = find_family(state.ground, bound.name)
    queries = [state.evaluator.value_query(node) for node in family.nodes]
    routes = [state.evaluator.route(query) for query in queries]
    slowest = max(range(len(routes)), key=lambda k: (routes[k].evaluations, routes[k].states))
    route = _route_with_flops(state, queries[slowest])
    return route if family.is_node else replace(route, question=f"value of {family.name}")


def _explain_separated(state: SentenceState, bound: BoundArguments) -> Route:
    """The route of `separated`."""
    left, right, known = (parse_names(names, getattr(bound, names)) for names in ("x", "y", "given"))
    for subject, names in (("x", left), ("y", right)):
        if not names:
            raise BNetError(subject, expected="at least one node", actual="an empty list")
    question = f"separation of {', '.join(left)} and {', '.join(right)}"
    if not bound.verify:
        return Route(question, "graph", "separation is a property of the graph (Bayes ball)")
    nodes = [node for name in (*left, *right, *known) for node in find_family(state.ground, name).nodes]
    choices = reference.find_open_choices(state.model, nodes, {}, include_ancestors=True)
    return route_reference(question, state.model, choices)


def _explain_counterfactual(state: SentenceState, bound: BoundArguments) -> Route:
    """The route of `counterfactual`."""
    query = _build_query(state, bound, [state.ground.id(bound.name)])
    state.resolve_interventions(check_mapping("do", bound.do))
    return route_reference(f"counterfactual of {bound.name}", state.model, query.choices)


EXPLAINERS: dict[str, Callable[[SentenceState, BoundArguments], Route]] = {
    "value": _explain_value,
    "tpm": lambda state, bound: _route_with_flops(
        state, state.evaluator.distribution_query(state.ground.id(bound.name))
    ),
    "attention": _explain_attention,
    "posterior": _explain_posterior,
    "top": _explain_posterior,
    "posteriors": _explain_posteriors,
    "most_probable": _explain_most_probable,
    "marginal_map": _explain_marginal_map,
    "log_prob": _explain_log_prob,
    "sample": lambda state, bound: route_sample(_build_query(state, bound), bound.n),
    "reads": _explain_reads,
    "tan_tree": _explain_reads,
    "graph": _explain_graph,
    "draw": _explain_graph,
    "separated": _explain_separated,
    "counterfactual": _explain_counterfactual,
}


def _route_with_flops(state: SentenceState, query: NodeQuery) -> Route:
    """The route of a query for nodes, with its joint states and FLOPs."""
    route = state.evaluator.route(query)
    choices = next(iter(query.choices.values()), [])
    states = math.prod(map(state.model.count_states, choices)) if route.algorithm == "compiled" else route.states
    return replace(route, states=states, flops=state.evaluator.count_flops(route, query))


def _route_slowest(state: SentenceState, specs: Collection[Any]) -> Route:
    """The slowest route among those of some groups and of the posteriors over which their attention is averaged."""
    if not specs:
        return Route("attention", "graph", "the net has no attention over words")
    queries = [state.evaluator.attention_query(spec) for spec in specs]
    routes = [route_expected_attention(query) for query in queries]
    for query in queries:  # attention is averaged over the posterior of the choices
        choices = next(iter(query.choices.values()), [])
        routes += [route_posterior(state.query(choices).without_input_evidence())] if choices else []
    return max(routes, key=lambda route: (route.evaluations, route.states))

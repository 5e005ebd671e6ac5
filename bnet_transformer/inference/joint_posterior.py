"""Posteriors of nodes of a sentence, the log probability of its evidence, `P(j | i)` averaged over posteriors, draws.

All but the draws are exact, by the algorithm of the router. All draws are made at once, as the batch of a run: what
stands above evidence from its joint posterior, every other node from its TPM, parents before children.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import Categorical

from bnet_transformer import reference
from bnet_transformer._core.arrays import to_numpy
from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError
from bnet_transformer.graph import NodeSelection, topological_order
from bnet_transformer.inference import exact
from bnet_transformer.inference.factors import LOG_ZERO
from bnet_transformer.inference.node_evaluator import NodeEvaluator, NodeQuery, get_normal
from bnet_transformer.inference.query import (
    Fault,
    Obstacle,
    Query,
    Route,
    build_request_arguments,
    enumerate_joint_states,
    find_elimination_fault,
    find_single_target_fault,
    format_fault,
    group_evidence,
    iter_chunks,
    prune_barren_choices,
    prune_interventions,
    route_joint,
    route_log_evidence,
    route_posterior,
    with_cost,
    with_sentence_scope,
)
from bnet_transformer.reference import GroundModel, ReferenceRun
from bnet_transformer.reference.node_tables import expected_attention, find_single_parents, split_choices

if TYPE_CHECKING:
    import pandas as pd

MAX_JOINT_STATES = 2**12  # joint states whose posterior is made whole, for draws

NodeSamples = dict[int, Tensor]  # the states or values of a node, a row for each draw


def joint_posterior(query: Query, evaluator: NodeEvaluator | None = None) -> Tensor:
    """`P(nodes | evidence)` for discrete nodes: `[*states]` in float64, a dim for each node in their order.

    Args:
        query: Which nodes, given what evidence, in which sentence.
        evaluator: Values of this sentence that were computed before, without evidence; they are not computed again.

    Raises:
        BudgetError: Where more joint states than the budget have to be computed; says how many.
        EvidenceError: Where the evidence is impossible; names the first piece that is.
    """
    check_nodes(query)
    query = query.without_input_evidence()
    route = route_posterior(query)
    if route.algorithm == "compiled":
        evaluator = evaluator or NodeEvaluator(query.module, query.model, {})
        distribution = evaluator.distribution(query.nodes[0])
        assert isinstance(distribution, Categorical)
        return distribution.logits.double().softmax(-1)
    if route.algorithm == "elimination":
        return posterior_by_elimination(query)
    route.warn_if_slow()
    logs = _joint_log_probs(query, route)
    if bool(logs.isinf().all()):
        joint_log_evidence(replace(query, nodes=()))  # names the evidence that is impossible
        wanted = "evidence that some of its states make possible"
        raise EvidenceError(query.format_nodes(), expected=wanted, actual="none that does")
    return torch.softmax(logs.flatten(), 0).reshape(logs.shape)


def joint_log_probs(query: Query) -> Tensor:
    """`log P(nodes, evidence)` for discrete nodes, `[*states]`: -inf for states that cannot be beside the evidence."""
    query = query.without_input_evidence()
    route = route_joint(query)
    route.warn_if_slow()
    return _joint_log_probs(query, route)


def joint_log_evidence(query: Query) -> Tensor:
    """`log P(evidence)`: a number in float64 (a log density, where a node is continuous).

    Raises:
        EvidenceError: Where the evidence is impossible; names the first piece that is.
    """
    query = query.without_input_evidence()
    if not query.evidence:
        return torch.zeros((), dtype=torch.float64)
    route = route_log_evidence(query)
    route.warn_if_slow()
    if route.algorithm == "elimination":
        evidence = group_evidence(query.model, query.evidence)
        arguments = build_request_arguments(query.model)
        logs = exact.log_evidence(query.module, evidence, **arguments, budget=query.budget, atol=query.atol)
        return logs.detach()[0].double()

    def log_prob_of_first(count: int) -> Tensor:
        first = replace(query, evidence={node: query.evidence[node] for node in [*query.evidence][:count]})
        return _enumerated_log_probs(first, route.algorithm, []).reshape(())

    total = log_prob_of_first(len(query.evidence))
    if total > -math.inf:
        return total
    last = bisect_left(
        range(1, len(query.evidence)), True, key=lambda count: bool(log_prob_of_first(count) == -math.inf)
    )
    raise reference.impossible_evidence_error(query.model, query.evidence, last)


def posterior_by_elimination(query: Query) -> Tensor:
    """`P(node | evidence)` of one discrete node, `[states]`, by elimination."""
    family, index = query.model.ground.unravel_index(query.nodes[0])
    evidence = group_evidence(query.model, query.evidence)
    arguments = build_request_arguments(query.model)
    shares = exact.posterior(query.module, family.name, evidence, **arguments, budget=query.budget, atol=query.atol)
    share = shares[(0, *index)].double()
    return share / share.sum()  # in float32 the sum is 1 to 1e-7


def _joint_log_probs(query: Query, route: Route) -> Tensor:
    """`log P(nodes, evidence)`, `[*states]`, by conditioning, enumeration or the reference."""
    world = query.model
    supports = [_find_possible_states(query, node) for node in query.nodes]
    query = query.without_target_evidence()
    logs = torch.full([world.count_states(node) for node in query.nodes], -math.inf, dtype=torch.float64)
    place = torch.meshgrid(*(torch.tensor(support) for support in supports), indexing="ij")
    if route.algorithm == "conditioning":
        some = _batched_log_probs(query, query.nodes, enumerate_joint_states(supports))
    else:
        some = _enumerated_log_probs(query, route.algorithm, supports)
    logs[place] = some.reshape(place[0].shape)
    return logs


def _find_possible_states(query: Query, node: int) -> list[int]:
    """The states of a choice that evidence on it leaves: the tensor that its children receive may fit several."""
    observed = query.evidence.get(node)
    if observed is None:
        return list(range(query.model.count_states(node)))
    if not observed.is_floating_point():
        return [int(observed)]
    alone = replace(query, nodes=(node,), evidence={node: observed})
    if find_single_target_fault(alone) is None:
        share = posterior_by_elimination(alone)
    else:
        share = reference.posterior(query.model, node, alone.evidence, query.budget, query.atol)
    return torch.nonzero(share).flatten().tolist()


def _enumerated_log_probs(query: Query, algorithm: str, supports: Sequence[Sequence[int]]) -> Tensor:
    """`log P(nodes, evidence)` where choices meet, `[*supports]`: every choice above is in a state, then summed out.

    Args:
        query: The query; its evidence is on other nodes than those that are asked for.
        algorithm: `"enumeration"`, all joint states as a batch of the compiled net, or `"reference"`, a loop over them.
        supports: The states of each node that is asked for.
    """
    world, settled = query.model, query.fixed
    choices = query.choices
    others = [node for node in choices if node not in query.nodes]
    every = [*supports, *(range(world.count_states(node)) for node in others)]
    shape = [len(support) for support in every]
    if math.prod(shape) > query.budget:
        reference.check_joint_states(world, choices, query.budget)
    nodes, states = [*query.nodes, *others], enumerate_joint_states(every)
    if algorithm == "enumeration":
        batch = prune_barren_choices(world, {*choices, *query.nodes, *query.evidence})
        logs = _batched_log_probs(replace(query, model=batch), nodes, states)
    else:
        runs = (ReferenceRun(world, {**settled, **dict(zip(nodes, row, strict=True))}) for row in states)
        each = [reference.log_joint(run, choices, query.evidence, query.atol) for run in runs]
        logs = torch.tensor(each, dtype=torch.float64)
    return logs.reshape(*shape[: len(supports)], -1).logsumexp(-1)


def _batched_log_probs(query: Query, nodes: Sequence[int], states: Tensor) -> Tensor:
    """`log P(nodes = states, evidence)` for each row of states, `[row]`: a batch in pieces that fit in memory."""
    module, relevant = with_sentence_scope(query.module), prune_interventions(query.model, [*nodes, *query.evidence])
    families = {relevant.ground.group_of(node).index for node in (*nodes, *query.evidence)}
    arguments, logs = build_request_arguments(relevant), []
    for part in iter_chunks(relevant, len(states), families):
        evidence = group_evidence(relevant, query.evidence, dict(zip(nodes, states[part].unbind(1), strict=True)))
        batch = exact.log_evidence(
            module, evidence, **arguments, budget=query.budget, atol=query.atol, check=False, dtype=torch.float64
        )
        logs.append(batch.detach())
    result = torch.cat(logs).double().cpu()
    if bool(result.isnan().any()):
        _raise_nan_error(query, nodes, states[result.isnan()][0])
    return torch.where(result > LOG_ZERO / 2, result, -math.inf)


def _raise_nan_error(query: Query, nodes: Sequence[int], states: Tensor) -> None:
    """Raise the error that names the node whose log probability is no number, in one joint state."""
    known = {**query.fixed, **dict(zip(nodes, states, strict=True))}
    choices = [node for node in query.choices if node in known]
    reference.log_joint(ReferenceRun(query.model, known), choices, query.evidence, query.atol)
    raise BNetError("joint posterior", expected="log probabilities that are numbers", actual="NaN")


def check_nodes(query: Query) -> None:
    """Refuse a node that is asked for twice, and more joint states of the nodes than the budget."""
    if len(set(query.nodes)) < len(query.nodes):
        raise BNetError("nodes", expected="different nodes", actual=query.format_nodes())
    count = math.prod(query.model.count_states(node) for node in query.nodes)
    if len(query.nodes) > 1 and count > query.budget:
        allowed = "do or evidence on some; fewer nodes, or slices; a larger budget="
        wanted = f"at most {query.budget} joint states of {query.format_nodes()}"
        raise BudgetError("joint posterior", expected=wanted, actual=f"{count}", allowed=allowed)


def expected_group_attention(query: Query, attention_query: NodeQuery) -> Tensor:
    """`sum_c P(c | evidence) P(j | i, c)` of a family, `[*plates, word, word read]` in float64; zero for set nodes.

    Args:
        query: The sentence and its evidence, the budget and the tolerance.
        attention_query: What is asked of a family that reads words (`Answers.reading_query`).
    """
    world, member, answers = query.model, attention_query.spec, attention_query.evaluator
    shape = (*world.ground.shapes[member.group.index], world.ground.word_counts[world.network.get_source_stack(member)])
    nodes, first = world.ground.select_nodes(member.group).tolist(), int(world.ground.offsets[member.group.index])
    table = torch.zeros(len(nodes), shape[-1], dtype=torch.float64)
    nodes = [node for node in nodes if node not in world.do]
    route = route_expected_attention(attention_query)
    if route.algorithm == "reference":
        route.warn_if_slow()
        for node in nodes:
            row = expected_attention(world, node, query.evidence, query.budget)
            if row is not None:
                table[node - first, row[0]] = row[1]
        return table.reshape(shape)
    flat = answers.compute(attention_query, route).detach().double().cpu().reshape(-1, len(table), shape[-1])
    if bool(flat.isnan().any()):
        raise BNetError(member.group.name, expected="numbers", actual="NaN")
    groups: dict[tuple[int, ...], list[int]] = {}  # nodes that depend on the same choices have one posterior
    for node in nodes:
        groups.setdefault(tuple(attention_query.choices.get(node, ())), []).append(node - first)
    for choices, places in groups.items():
        if not choices:  # one row for all states
            table[places] = flat[0, places]
            continue
        share = joint_posterior(replace(query, nodes=choices))
        table[places] = torch.einsum("s,snm->nm", share.reshape(-1).double(), flat[:, places])
    return table.reshape(shape)


def route_expected_attention(attention_query: NodeQuery) -> Route:
    """How `P(j | i)` of a family is averaged: from its tables in every state, or node by node by the reference."""
    world, route = attention_query.evaluator.model, attention_query.evaluator.route(attention_query)
    if split_choices(world, attention_query.choices) is not None or route.algorithm == "reference":
        return route
    count = len(attention_query.dependencies) * route.states * len(world.ground)
    reason = "its words depend on different choices, for which no table of the family has a dim each"
    return replace(route, algorithm="reference", reason=reason, node=attention_query.spec.group.name, evaluations=count)


def arrow_weights(query: Query, evaluator: NodeEvaluator, selection: NodeSelection) -> dict[tuple[int, int], float]:
    """The weight `P(j | i, evidence)` of each selected arrow along which a node reads another word.

    Args:
        query: The sentence and its evidence, the budget and the tolerance.
        evaluator: The values of the same sentence.
        selection: The part of the ground graph.

    Returns:
        For each arrow, (source, target) by ground id, its weight. A parent that fills a slot of its own (the query, the
        residual) has none.
    """
    joint_log_evidence(query)  # evidence that is impossible is refused, whatever is read
    ground, members = query.model.ground, query.model.network.specs
    reading = {
        member.group.index: evaluator.attention_query(member)
        for member in members
        if member.has_word_attention and member.tpm.has_attention and ground.is_selected(member.group, selection)
    }
    evaluator.prefetch_attention(
        [each.spec for each in reading.values() if evaluator.route(each).algorithm == "compiled"]
    )
    rows, weights = {}, dict[tuple[int, int], float]()
    for index, each in reading.items():
        table = to_numpy(expected_group_attention(query, each))
        rows[index] = table.reshape(-1, table.shape[-1])
    for bundle, sources, targets in ground.arrows(selection):
        if bundle.child not in rows:
            continue
        inputs = [given for given in reading[bundle.child].spec.parents if given.index == bundle.parent]
        if not any(WORD in given.over for given in inputs):
            continue
        words = (sources - int(ground.offsets[bundle.parent])) % ground.shapes[bundle.parent][-1]
        shares = rows[bundle.child][targets - int(ground.offsets[bundle.child]), words]
        arrows = dict(zip(zip(sources.tolist(), targets.tolist(), strict=True), shares.tolist(), strict=True))
        if any(WORD not in given.over for given in inputs):
            arrows = {(s, t): w for (s, t), w in arrows.items() if s not in find_single_parents(query.model, t)}
        weights |= arrows
    return weights


@dataclass(frozen=True)
class Samples:
    """Draws of all random nodes: `states[name]` is `[n]` for a discrete node, `[n, *shape]` for a continuous one.

    `labels[name]` are what the states of a discrete node are called, where they have names.
    """

    states: dict[str, Tensor] = field(repr=False)
    n: int
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Tensor:
        return self.states[name]

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each draw, a column for each node (for each of its numbers, where it has several)."""
        import pandas as pd

        columns = {}
        for name, drawn in self.states.items():
            if drawn.dim() == 1:
                columns[name] = to_numpy(drawn)
            else:
                columns |= {f"{name}[{k}]": to_numpy(part) for k, part in enumerate(drawn.flatten(1).unbind(1))}
        return pd.DataFrame(columns, index=pd.RangeIndex(self.n, name="draw"))

    def _repr_html_(self) -> str:
        told = f"<p>{self.n} draws of {escape(', '.join(self.states))}</p>"
        return f"{told}{self.to_dataframe().head(10).to_html()}"


def sample(query: Query, n: int, seed: int) -> Samples:
    """n draws of every random node given the evidence.

    A node above evidence is drawn from its posterior given what was drawn before, every other from its TPM.

    Args:
        query: The sentence and its evidence; all nodes are drawn, whatever it asks for.
        n: How many draws.
        seed: The seed of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    query = replace(query.without_input_evidence(), nodes=())
    joint_log_evidence(query)
    world, order = query.model, topological_order(query.model.ground).tolist()
    drawn = {node: value.expand(n, *value.shape) for node, value in query.fixed.items()}
    above = set(query.choices)
    asked = replace(query, nodes=tuple(node for node in order if node in above))
    if above:
        drawn |= (_sample_by_chain_rule if _should_use_chain_rule(asked) else _sample_joint)(asked, n, generator)
    module = with_sentence_scope(query.module)
    for nodes, fault in _iter_ancestral_batches(asked, order):
        if fault is None:
            drawn |= _sample_batched(module, world, nodes, drawn, n, generator)
        else:
            drawn |= _sample_by_reference(world, nodes, drawn, n, generator)
    return Samples({world.ground.name(node): drawn[node].clone() for node in order if node in drawn}, n)


def route_sample(query: Query, n: int) -> Route:
    """How n draws are made: first those of the choices above the evidence, then the rest from their TPMs."""
    question, query = f"{n} draws", query.without_input_evidence()
    above = replace(query, nodes=tuple(query.choices))
    if not above.nodes:
        route = Route(question, "compiled", "nothing is observed: every node is drawn from its TPM")
    elif _should_use_chain_rule(above):
        reason = "the choices above the evidence are drawn one by one, each from its posterior given those before it"
        route = Route(question, "elimination", reason, choices=above.nodes)
    else:
        route = replace(with_cost(above, route_posterior(above)), question=question)
    order = topological_order(query.model.ground).tolist()
    slow = [(nodes, fault) for nodes, fault in _iter_ancestral_batches(above, order) if fault is not None]
    if not slow:
        return route
    first = slow[0][1]
    reason = f"each node is drawn by itself from its TPM; not faster, for {format_fault(first)}"
    evaluations = n * sum(len(nodes) for nodes, _ in slow)
    part = Route("draws one after another", "reference", reason, first.subject, evaluations=evaluations)
    return replace(part, question=question, parts=(replace(route, question="the others"), part))


def _iter_ancestral_batches(query: Query, order: Sequence[int]) -> Iterator[tuple[list[int], Fault | None]]:
    """The nodes that are drawn from their TPMs, family by family, and why those of one family cannot be one batch.

    Args:
        query: The sentence and its evidence; the nodes that it asks for are drawn before.
        order: All nodes, parents before children.
    """
    world, module = query.model, with_sentence_scope(query.module)
    drawn = {node: value[None] for node, value in query.fixed.items()} | _zero_samples(world, query.nodes)
    for group in world.network.graph.components:
        random = [m.group for m in map(world.network.specs.__getitem__, group) if m.tpm.is_random]
        left = {node for family in random for node in world.ground.select_nodes(family).tolist()} - world.do.keys()
        nodes = [node for node in order if node in left and node not in drawn]
        if nodes:
            yield nodes, _find_sampling_fault(module, world, group, drawn)
            drawn |= _zero_samples(world, nodes)


def _zero_samples(model: GroundModel, nodes: Sequence[int]) -> NodeSamples:
    """A draw of each node, zero: of draws the structure of a question takes the shape alone."""
    found = NodeSamples()
    for node in nodes:
        member = model.spec(node)
        shape, dtype = ((), torch.long) if member.tpm.kind == "discrete" else (member.shape, model.network.dtype)
        found[node] = torch.zeros(1, *shape, dtype=dtype, device=model.network.device)
    return found


def _should_use_chain_rule(query: Query) -> bool:
    """True where the choices are too many for one table, and elimination gives them one after another."""
    count = math.prod(query.model.count_states(node) for node in query.nodes)
    nodes = query.nodes
    return count > MAX_JOINT_STATES and all(
        find_elimination_fault(query, nodes[k], nodes[:k]) is None for k in range(len(nodes))
    )


def _find_sampling_fault(
    module: CompiledModule, model: GroundModel, indices: Sequence[int], samples: NodeSamples
) -> Fault | None:
    """Why the nodes of a group of families cannot be drawn in one batch: they read each other, or their parameters
    cannot be computed so."""
    members = [model.network.specs[index] for index in indices]
    for member in members:
        if any(given.index in indices for given in member.parents):
            return Obstacle(member.group.name, "read by others that are drawn with it")
    (member,) = members
    return (
        NodeEvaluator(module, model, {})
        .with_batched_states(samples, module)
        .find_table_fault(_get_parameter_table(member), [member], ())
    )


def _get_parameter_table(spec: NodeSpec) -> str:
    """The table that has the parameters of a family's distribution."""
    return "logits" if spec.tpm.kind == "discrete" else "normal"


def _sample_joint(query: Query, n: int, generator: torch.Generator) -> NodeSamples:
    """Draws of the choices above evidence from their joint posterior."""
    share = joint_posterior(query)
    states = torch.unravel_index(torch.multinomial(share.flatten(), n, True, generator=generator), share.shape)
    return dict(zip(query.nodes, states, strict=True))


def _sample_by_chain_rule(query: Query, n: int, generator: torch.Generator) -> NodeSamples:
    """Draws from `P(a | e) P(b | a, e) ...`; draws that agree so far are asked for once."""
    module, world, nodes = with_sentence_scope(query.module), query.model, query.nodes
    states, arguments = torch.zeros(n, 0, dtype=torch.long), build_request_arguments(world)
    for k, node in enumerate(nodes):
        family, index = world.ground.unravel_index(node)
        known, which = torch.unique(states, dim=0, return_inverse=True) if k else (states[:1], states.new_zeros(n))
        shares = []
        asked = {family.index, *(world.ground.group_of(other).index for other in (*nodes[:k], *query.evidence))}
        for part in iter_chunks(world, len(known), asked):
            before = dict(zip(nodes[:k], known[part].unbind(1), strict=True))
            evidence = group_evidence(world, query.evidence, before)
            share = exact.posterior(module, family.name, evidence, **arguments, budget=query.budget, atol=query.atol)
            shares.append(share.movedim(0, -2)[index].expand(len(known[part]), -1))
        new = torch.multinomial(torch.cat(shares)[which], 1, generator=generator)
        states = torch.cat([states, new], 1)
    return dict(zip(nodes, states.unbind(1), strict=True))


def _sample_batched(
    module: CompiledModule,
    model: GroundModel,
    nodes: Sequence[int],
    samples: NodeSamples,
    n: int,
    generator: torch.Generator,
) -> NodeSamples:
    """Draws of the nodes of one family, which do not read each other."""
    family = model.ground.group_of(nodes[0])
    member, own = model.network.specs[family.index], torch.tensor(nodes) - int(model.ground.offsets[family.index])
    table, lead, draws = _get_parameter_table(member), model.ground.shapes[family.index], []
    for part in iter_chunks(model, n, [family.index]):
        size = part.stop - part.start
        states = {node: value[part] for node, value in samples.items()}
        answers = NodeEvaluator(module, model, {}).with_batched_states(states, module)
        parameters = answers.compute_group(table, member)
        if not samples:  # the same for every draw
            parameters = parameters.expand(size, *parameters.shape)
        of_nodes = parameters.reshape(size, math.prod(lead), *parameters.shape[1 + len(lead) :])[:, own]
        draws.append(_sample_from_parameters([of_nodes] if table == "logits" else of_nodes.unbind(2), generator))
    return dict(zip(nodes, torch.cat(draws).unbind(1), strict=True))


def _sample_from_parameters(parameters: Sequence[Tensor], generator: torch.Generator) -> Tensor:
    """A draw for each row of logits, or of means and sigmas."""
    if len(parameters) == 1:
        shares = parameters[0].softmax(-1)
        return torch.multinomial(shares.flatten(0, -2), 1, generator=generator).reshape(shares.shape[:-1])
    mean, sigma = parameters
    return mean + sigma * torch.randn(mean.shape, generator=generator, dtype=mean.dtype)


def _sample_by_reference(
    model: GroundModel, nodes: Sequence[int], samples: NodeSamples, n: int, generator: torch.Generator
) -> NodeSamples:
    """Draws by the reference, node after node; draws that agree so far go on together."""
    found: dict[int, Tensor] = {}
    groups: list[tuple[Tensor, dict[int, Tensor]]] = [(torch.arange(n), {})]
    for node, value in samples.items():
        groups = [each for rows, known in groups for each in _split_by_state(rows, value[rows], known, node)]
    for node in nodes:
        after: list[tuple[Tensor, dict[int, Tensor]]] = []
        for rows, known in groups:
            states = _sample_node(ReferenceRun(model, known), node, len(rows), generator)
            found.setdefault(node, states.new_zeros(n, *states.shape[1:]))[rows] = states
            after += _split_by_state(rows, states, known, node) if model.ground.children(node) else [(rows, known)]
        groups = after
    return found


def _split_by_state(
    rows: Tensor, states: Tensor, fixed: dict[int, Tensor], node: int
) -> Iterator[tuple[Tensor, dict[int, Tensor]]]:
    """The draws that go on together: those with one state of the node."""
    for state in torch.unique(states, dim=0):
        same = (states == state).reshape(len(rows), -1).all(1)
        yield rows[same], {**fixed, node: state}


def _sample_node(run: ReferenceRun, node: int, n: int, generator: torch.Generator) -> Tensor:
    """n draws of a node from its TPM, its parents known."""
    distribution, member = run.distribution(node), run.model.spec(node)
    if isinstance(distribution, torch.distributions.Categorical):
        return torch.multinomial(distribution.probs, n, replacement=True, generator=generator)
    normal = get_normal(member, distribution)
    return _sample_from_parameters(
        [each.expand(n, *normal.mean.shape) for each in (normal.mean, normal.stddev)], generator
    )

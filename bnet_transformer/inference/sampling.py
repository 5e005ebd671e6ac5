"""Samples of all random nodes of a sentence, given its evidence.

All samples are drawn at once, as the batch of a run. The latent ancestors of the evidence are drawn from their joint
posterior, and every other random node is drawn from its TPM, parents before children (ancestral sampling).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.naming import count_word_from_start, match_names, split_pattern
from bnet_transformer._core.results import Result
from bnet_transformer._core.tokens import distinguish
from bnet_transformer.compiler.evaluate import Scan, WordStep
from bnet_transformer.compiler.gather import ExecutionState, build_request, group_evidence, group_values, lay_out_value
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import UnknownNameError, unknown_name_error
from bnet_transformer.graph import GroundGraph, NodeGroup, topological_order
from bnet_transformer.inference.elimination import compute_posterior, get_full_shape
from bnet_transformer.inference.factor_graph import FactorGraph, build_factor_graph
from bnet_transformer.inference.factors import FactorRequest, request_factors
from bnet_transformer.inference.plan import Fault, Obstacle, Plan, format_fault
from bnet_transformer.inference.posteriors import (
    find_factor_request,
    plan_log_evidence,
    plan_state_probs,
    raise_impossible_evidence,
)
from bnet_transformer.inference.query import Query, iter_chunks, with_sentence_scope
from bnet_transformer.inference.values import NodeEvaluator, get_normal
from bnet_transformer.reference import GroundModel, ReferenceRun
from bnet_transformer.tpm import Attention
from bnet_transformer.tpm.base import Shape

# --------------------------------------------------------------------------------------------------------------------
# Samples of groups that depend on each other at neighbouring words, drawn word by word for all samples at once.


class SamplingScan(Scan):
    """A scan of one recurrent component that draws the states of its discrete groups, each word from its TPM.

    Nodes of these groups with an entry in `state.patched` have this value for their children.

    Args:
        state: The state of a run with the values of all groups outside the component.
        component: The groups of the component, in the order of their computation at one word.
        shapes: For each sampled group, the shape of its states, `[*layout]`.
        draw_states: A function from logits `[..., states]` to a sample of each row, `[...]`.
        known_states: The states of some nodes of sampled groups, `[*layout]`, and the mask of these nodes.
    """

    def __init__(
        self,
        state: ExecutionState,
        component: Sequence[int],
        shapes: Mapping[int, Shape],
        draw_states: Callable[[Tensor], Tensor],
        known_states: Mapping[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__(state, component)
        self.shapes, self.draw_states = shapes, draw_states
        self.known_states = {
            index: (self.split_by_word(states), self.split_by_word(mask))
            for index, (states, mask) in (known_states or {}).items()
        }
        self.states: dict[int, list[Tensor]] = {index: [] for index in shapes}

    def build_step(self, spec: NodeSpec) -> WordStep:
        """The step of one group; a sampled group is drawn from its TPM."""
        index = spec.group.index
        if index not in self.states:
            return super().build_step(spec)

        def sample_word(word: int) -> None:
            context, parents = self.gather_word(spec, word)
            logits = spec.tpm.logits(context, *parents)
            sampled = self.draw_states(logits.expand(*self.shapes[index][:-1], 1, logits.shape[-1]))
            if index in self.known_states:
                states, mask = self.known_states[index]
                sampled = sampled.where(~mask[word], states[word])
            self.states[index].append(sampled)
            value = self.state.layout.pad_dims(spec.tpm.emit(context, sampled), len(spec.shape))
            self.append_value(index, word, value)

        return sample_word

    def sample(self) -> dict[int, Tensor]:
        """Draw the states of all words of each sampled group, `[*layout]`."""
        self.run()
        return {index: self.concat(states) for index, states in self.states.items()}


MAX_NAMES = 8  # nodes that the repr of samples names
MAX_JOINT_STATES = 2**12  # joint states up to which the posterior is one table
NodeSamples = dict[int, Tensor]  # the states or values of each node, a row for each sample


@dataclass(frozen=True, repr=False)
class Samples(Result):
    """Samples of all random nodes of a sentence.

    Attributes:
        states: The samples of each node by name: states `[n]` of a discrete node, values `[n, *shape]` of a continuous
            node.
        n: The number of samples.
        labels: The labels of the states of a discrete node, by name, for nodes with labels.
        texts: The text of each sample, where the words are sampled (`net.sample`), without the start word.
        word_counts: The number of words of each role with words.
    """

    _index = "draw"
    _shapes = "n: size sample; labels: {_} any @; states: {_} number<@ sample *_; texts: any sample?"

    states: dict[str, Tensor]
    n: int
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    word_counts: Mapping[str, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        """The samples of a node.

        Args:
            name: The name of a random node; a negative word counts from the end.

        Returns:
            States `[n]` of a discrete node, or values `[n, *shape]` of a continuous node.

        Raises:
            UnknownNameError: There are no samples of this node, or the name is that of several nodes.
        """
        return self.states[self.find_name(name)]

    def find_name(self, name: str) -> str:
        """The name in `states` of a node.

        Args:
            name: The name of the node; a negative word counts from the end.

        Returns:
            The name, with the word counted from the start.

        Raises:
            UnknownNameError: There are no samples of this node, or the name is that of several nodes.
        """
        words = self.word_counts.get(split_pattern(name)[0], 0) if isinstance(name, str) else 0
        stored = count_word_from_start(name, words) if words else name
        if stored in self.states:
            return stored
        if isinstance(name, str) and (nodes := match_names(stored, self.states)):
            actual, allowed = f"{name!r}, a name of several nodes", ", ".join(nodes[:MAX_NAMES])
            raise UnknownNameError("node", expected="the name of one node", actual=actual, allowed=allowed)
        raise unknown_name_error("node", name, self.states)

    def _get_columns(self) -> Mapping[str, Any]:
        columns: dict[str, Any] = {"draw": range(self.n)}
        for name, samples in self.states.items():
            if name in self.labels:
                columns[name] = distinguish(self.labels[name][k] for k in samples.tolist())
            elif samples.dim() == 1:
                columns[name] = samples
            else:
                columns |= {f"{name}[{k}]": part for k, part in enumerate(samples.flatten(1).unbind(1))}
        return columns

    def __repr__(self) -> str:
        names = [*self.states]
        listed = ", ".join(names[:MAX_NAMES]) + (f", … ({len(names)} nodes)" if len(names) > MAX_NAMES else "")
        return f"{self.n} draws of {listed}"


def plan_sample(query: Query, n: int, seed: int) -> Plan[Samples]:
    """The plan of samples of every random node, given the evidence.

    Args:
        query: The sentence and its evidence; the requested nodes are ignored, and all nodes are sampled.
        n: The number of samples.
        seed: The seed of the random numbers.
    """
    query = replace(query.without_input_evidence(), nodes=())
    model, order = query.model, topological_order(query.model.ground).tolist()
    choices = set(query.choices)
    target = replace(query, nodes=tuple(node for node in order if node in choices))
    question, generator = f"{n} draws", torch.Generator()
    plan = _plan_choices(question, target, n, generator)
    batches = list(_iter_ancestral_batches(target, order))

    def draw() -> Samples:
        # The latent ancestors of the evidence are sampled from their exact joint posterior. The other random nodes have
        # no evidence among their descendants. So, given its parents, such a node is independent of the evidence, and
        # its posterior is its TPM (ancestral sampling).
        generator.manual_seed(seed)
        samples = {node: value.expand(n, *value.shape) for node, value in query.fixed.items()} | plan.run()
        module = with_sentence_scope(query.module)
        for nodes, fault in batches:
            if fault is None and model.ground.group_of(nodes[0]).index in model.network.graph.recurrent:
                samples |= _sample_word_by_word(module, model, nodes, samples, n, generator)
            elif fault is None:
                samples |= _sample_batched(module, model, nodes, samples, n, generator)
            else:
                samples |= _sample_by_reference(model, nodes, samples, n, generator)
        sampled = [node for node in order if node in samples]
        states = {model.ground.name(node): samples[node].clone() for node in sampled}
        return Samples(states, n, word_counts=count_words(model.ground, map(model.ground.group_of, sampled)))

    slow = [(nodes, fault) for nodes, fault in batches if fault is not None]
    if not slow:
        return plan.with_run(draw)
    first = slow[0][1]
    reason = f"nodes are drawn one by one from their TPMs; {format_fault('one batch', first)}"
    evaluations = n * sum(len(nodes) for nodes, _ in slow)
    part = Plan("draws node by node", "reference", reason, draw, first.node, evaluations=evaluations)
    return replace(part, question=question, parts=(replace(plan, question="other nodes"), part))


def _plan_choices(question: str, target: Query, n: int, generator: torch.Generator) -> Plan[NodeSamples]:
    """The plan of samples of the requested nodes, the latent ancestors of the evidence, from their joint posterior."""
    nodes, evidence = target.nodes, replace(target, nodes=())
    is_large = math.prod(map(target.model.count_states, nodes)) > MAX_JOINT_STATES  # too large for one table
    graph = build_factor_graph(evidence) if is_large else None
    if isinstance(graph, FactorGraph) and graph.find_excess(graph.full_order) is None:

        def draw_backwards() -> NodeSamples:
            samples = graph.draw(n, generator)
            return raise_impossible_evidence(evidence) if samples is None else samples

        reason = "latent ancestors of the evidence are drawn one by one, in the reverse order of variable elimination"
        return graph.plan(question, reason, draw_backwards, graph.full_order)
    plan: Plan[NodeSamples]
    check = plan_log_evidence(evidence)  # it raises an error for impossible evidence
    if not nodes:
        plan = Plan(question, "compiled", "nothing is observed, so that every node is drawn from its TPM", dict)
    elif is_large and all(
        isinstance(find_factor_request(target, node, nodes[:k]), FactorRequest) for k, node in enumerate(nodes)
    ):
        reason = "latent ancestors of the evidence are drawn one by one, each from its posterior given the earlier ones"
        run = partial(_sample_by_chain_rule, target, n, generator)
        plan = Plan(question, "elimination", reason, run, choices=nodes)
    else:
        probs = replace(plan_state_probs(target), question=question)
        plan = probs.then(partial(_sample_joint, target, n, generator))

    def check_and_draw() -> NodeSamples:
        check.run()
        return plan.run()

    return plan.with_run(check_and_draw)


def count_words(ground: GroundGraph, groups: Iterable[NodeGroup]) -> dict[str, int]:
    """The number of words of the nodes of some groups, by role; groups without words are left out."""
    return {group.stem: ground.word_counts[group.word_stack] for group in groups if group.word_stack is not None}


def _iter_ancestral_batches(query: Query, order: Sequence[int]) -> Iterator[tuple[list[int], Fault | None]]:
    """The nodes that are sampled from their TPMs, by group, and why the nodes of a group cannot be one batch.

    Args:
        query: The sentence and its evidence; the requested nodes already have samples.
        order: All nodes, parents before children.
    """
    model, module = query.model, with_sentence_scope(query.module)
    samples = {node: value[None] for node, value in query.fixed.items()} | _zero_samples(model, query.nodes)
    for component in model.network.graph.components:
        random = [spec.group for spec in map(model.network.specs.__getitem__, component) if spec.tpm.is_random]
        left = {node for group in random for node in model.ground.select_nodes(group).tolist()} - model.do.keys()
        nodes = [node for node in order if node in left and node not in samples]
        if nodes:
            yield nodes, _find_sampling_fault(module, model, component, samples)
            samples |= _zero_samples(model, nodes)


def _zero_samples(model: GroundModel, nodes: Sequence[int]) -> NodeSamples:
    """A sample of zeros for each node: faults depend on the shapes of samples only."""
    samples = NodeSamples()
    for node in nodes:
        spec = model.spec(node)
        shape, dtype = ((), torch.long) if spec.tpm.kind == "discrete" else (spec.shape, model.network.dtype)
        samples[node] = torch.zeros(1, *shape, dtype=dtype, device=model.network.device)
    return samples


def _find_sampling_fault(
    module: CompiledModule, model: GroundModel, indices: Sequence[int], samples: NodeSamples
) -> Fault | None:
    """Why the nodes of some groups cannot be sampled in one batch.

    Reasons are that they are parents of each other, or that the compiled net cannot compute their parameters.
    """
    specs = [model.network.specs[index] for index in indices]
    evaluator = NodeEvaluator(module, model, {}).with_batched_states(samples, module)
    if indices[0] in model.network.graph.recurrent:
        set_groups = {model.ground.group_of(node).index for node in (*model.do, *model.attention_rows)}
        for spec in specs:
            name = spec.group.name
            if spec.tpm.kind == "continuous":
                reason = "is continuous and depends on itself at the neighbouring word"
                return Obstacle(name, f"{name} {reason}", f"set or observe {name}")
            if isinstance(spec.tpm, Attention) and spec.group.index in set_groups:
                return Obstacle(name, f"{name} is a recurrent attention, and some of its nodes are set")
        outside = [model.network.specs[index] for index in _find_outside_parents(model, indices)]
        return evaluator.find_table_fault("value", [m for m in outside if m.tpm.kind == "deterministic"], ())
    (spec,) = specs
    return evaluator.find_table_fault(_get_parameter_table(spec), [spec], ())


def _find_outside_parents(model: GroundModel, component: Sequence[int]) -> list[int]:
    """The groups outside a component on which its groups depend."""
    edges = [edge for index in component for edge in model.network.graph.in_edges[index]]
    return sorted({edge.parent for edge in edges} - {*component})


def _sample_word_by_word(
    module: CompiledModule,
    model: GroundModel,
    nodes: Sequence[int],
    samples: NodeSamples,
    n: int,
    generator: torch.Generator,
) -> NodeSamples:
    """Samples of choices of one recurrent component, word by word; its nodes with samples keep them."""
    graph, ground = model.network.graph, model.ground
    component = next(c for c in graph.components if ground.group_of(nodes[0]).index in c)
    discrete = [index for index in component if model.network.specs[index].tpm.kind == "discrete"]
    outside, parts = _find_outside_parents(model, component), []
    known = {node: value for node, value in samples.items() if ground.group_of(node).index in component}
    known |= {k: v.expand(n, *v.shape) for k, v in model.do.items() if ground.group_of(k).index in component}
    for chunk in iter_chunks(model, n, component):
        states = {node: value[chunk] for node, value in samples.items() if node not in known}
        evaluator = NodeEvaluator(module, model, {}).with_batched_states(states, module)
        execution = evaluator.execute(outside, graph.ancestral_set(outside))
        known_states: dict[int, tuple[Tensor, Tensor]] = {}
        for is_real in (True, False):  # some nodes of a discrete group may be set to vectors, and others to states
            selected = {k: value[chunk] for k, value in known.items() if value.is_floating_point() == is_real}
            for index, (value, mask) in group_values(model, {}, states=selected).items():
                pair = lay_out_value(execution, index, value), lay_out_value(execution, index, mask)
                if bool(mask.all()):
                    execution.known = {**execution.known, index: pair[0]}
                else:
                    (execution.patched if is_real else known_states)[index] = pair
        size = chunk.stop - chunk.start
        shapes = {}
        for index in discrete:
            group = graph.groups[index]
            if index not in execution.known:
                shapes[index] = tuple(get_full_shape(execution, group.plates, group.word_stack, size))
        draw_states = partial(_sample_from_logits, generator=generator)
        values = SamplingScan(execution, component, shapes, draw_states, known_states).sample()
        parts.append({index: value.reshape(size, -1) for index, value in values.items()})
    result = {}
    for node in nodes:
        group = ground.group_of(node)
        column = node - int(ground.offsets[group.index])
        result[node] = torch.cat([part[group.index][:, column] for part in parts])
    return result


def _get_parameter_table(spec: NodeSpec) -> str:
    """The table with the parameters of a group's distribution."""
    return "logits" if spec.tpm.kind == "discrete" else "normal"


def _sample_joint(query: Query, n: int, generator: torch.Generator, probs: Tensor) -> NodeSamples:
    """Samples of the requested nodes, from the probabilities of their joint states, `[joint state]`."""
    sizes = [query.model.count_states(node) for node in query.nodes]
    states = torch.unravel_index(torch.multinomial(probs, n, True, generator=generator), sizes)
    return dict(zip(query.nodes, states, strict=True))


def _sample_by_chain_rule(query: Query, n: int, generator: torch.Generator) -> NodeSamples:
    """Samples from `P(a | e) P(b | a, e) ...`."""
    module, model, nodes = with_sentence_scope(query.module), query.model, query.nodes
    states, request = torch.zeros(n, 0, dtype=torch.long), build_request(model)
    for k, node in enumerate(nodes):
        group, index = model.ground.unravel_index(node)
        # Samples with equal states so far have the same conditional posterior, which is computed once.
        known, inverse = torch.unique(states, dim=0, return_inverse=True) if k else (states[:1], states.new_zeros(n))
        probs = []
        indices = {group.index, *(model.ground.group_of(other).index for other in (*nodes[:k], *query.evidence))}
        for chunk in iter_chunks(model, len(known), indices):
            sampled = dict(zip(nodes[:k], known[chunk].unbind(1), strict=True))
            evidence = group_evidence(model, query.evidence, sampled)
            budget, atol = query.budget, query.atol
            factor_request = request_factors(module, evidence, group.index, request, budget=budget, atol=atol)
            posterior = compute_posterior(module, group.index, factor_request)
            probs.append(posterior.movedim(0, -2)[index].expand(len(known[chunk]), -1))
        new = torch.multinomial(torch.cat(probs)[inverse], 1, generator=generator)
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
    """Samples of nodes of one group that are not parents of each other."""
    group = model.ground.group_of(nodes[0])
    spec, columns = model.network.specs[group.index], torch.tensor(nodes) - int(model.ground.offsets[group.index])
    table, shape, draws = _get_parameter_table(spec), model.ground.shapes[group.index], []
    for chunk in iter_chunks(model, n, [group.index]):
        size = chunk.stop - chunk.start
        states = {node: value[chunk] for node, value in samples.items()}
        evaluator = NodeEvaluator(module, model, {}).with_batched_states(states, module)
        parameters = evaluator.compute_group(table, spec)
        if not samples:  # the parameters are the same for every sample
            parameters = parameters.expand(size, *parameters.shape)
        selected = parameters.reshape(size, math.prod(shape), *parameters.shape[1 + len(shape) :])[:, columns]
        draws.append(_sample_from_parameters([selected] if table == "logits" else selected.unbind(2), generator))
    return dict(zip(nodes, torch.cat(draws).unbind(1), strict=True))


def _sample_from_parameters(parameters: Sequence[Tensor], generator: torch.Generator) -> Tensor:
    """A sample for each row of logits, or of means and sigmas."""
    if len(parameters) == 1:
        return _sample_from_logits(parameters[0], generator)
    mean, sigma = parameters
    return mean + sigma * torch.randn(mean.shape, generator=generator, dtype=mean.dtype)


def _sample_from_logits(logits: Tensor, generator: torch.Generator) -> Tensor:
    """A sample for each row of logits `[..., states]`."""
    probs = logits.softmax(-1)
    return torch.multinomial(probs.flatten(0, -2), 1, generator=generator).reshape(probs.shape[:-1])


def _sample_by_reference(
    model: GroundModel, nodes: Sequence[int], samples: NodeSamples, n: int, generator: torch.Generator
) -> NodeSamples:
    """Samples by the reference, node by node; samples with equal states so far share one run."""
    result: dict[int, Tensor] = {}
    groups: list[tuple[Tensor, dict[int, Tensor]]] = [(torch.arange(n), {})]
    for node, value in samples.items():
        groups = [group for rows, known in groups for group in _split_by_state(rows, value[rows], known, node)]
    for node in nodes:
        after: list[tuple[Tensor, dict[int, Tensor]]] = []
        for rows, known in groups:
            states = _sample_node(ReferenceRun(model, known), node, len(rows), generator)
            result.setdefault(node, states.new_zeros(n, *states.shape[1:]))[rows] = states
            after += _split_by_state(rows, states, known, node) if model.ground.children(node) else [(rows, known)]
        groups = after
    return result


def _split_by_state(
    rows: Tensor, states: Tensor, fixed: dict[int, Tensor], node: int
) -> Iterator[tuple[Tensor, dict[int, Tensor]]]:
    """Split the samples by the state of a node."""
    for state in torch.unique(states, dim=0):
        same = (states == state).reshape(len(rows), -1).all(1)
        yield rows[same], {**fixed, node: state}


def _sample_node(run: ReferenceRun, node: int, n: int, generator: torch.Generator) -> Tensor:
    """Draw samples of a node from its TPM, given its parents."""
    distribution, spec = run.distribution(node), run.model.spec(node)
    if isinstance(distribution, torch.distributions.Categorical):
        return torch.multinomial(distribution.probs, n, replacement=True, generator=generator)
    normal = get_normal(spec, distribution)
    mean, sigma = (parameter.expand(n, *normal.mean.shape) for parameter in (normal.mean, normal.stddev))
    return _sample_from_parameters([mean, sigma], generator)

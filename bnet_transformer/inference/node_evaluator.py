"""Values, distributions and readings `P(j | i)` of single nodes of a sentence, each family computed once.

The compiled net computes a table of a whole family, with a dim for each open choice that decides it. Where the choices
of several words decide a node, all their joint states are a batch of one pass. The rest is left to the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal as TorchNormal

from bnet_transformer import reference
from bnet_transformer.compiler.execution_state import ExecutionRequest, ExecutionState, TensorLayout, gather_parents
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.compiler.plan import unset_parent_error
from bnet_transformer.cost.net_cost import count_plan_flops
from bnet_transformer.declare import NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, UnsupportedError
from bnet_transformer.inference.query import (
    build_length_inputs,
    enumerate_joint_states,
    find_set_groups,
    group_interventions,
    group_values,
    iter_chunks,
    with_sentence_scope,
)
from bnet_transformer.inference.routing import Fault, Obstacle, Route, Rule, choose_route, find_mixed_type_fault
from bnet_transformer.inference.selection import find_attention_spec
from bnet_transformer.reference import BUDGET, GroundModel
from bnet_transformer.reference.node_tables import (
    conditional_attention,
    conditional_distribution,
    has_ancestor_choices,
    split_choices,
)
from bnet_transformer.tpm import Normal

T = TypeVar("T")
GroupTable = tuple[
    TensorLayout, Tensor
]  # the values of one family in a layout, `[*enumerated, 1, *plates, word, *shape]`


def build_distribution(spec: NodeSpec, parameters: Tensor) -> Distribution:
    """The distribution of a node: of its value, of its mean and sigma, or of its logits."""
    if not spec.tpm.is_random:
        from pyro.distributions import Delta

        return Delta(parameters, event_dim=len(spec.shape))
    if isinstance(spec.tpm, Normal):
        mean, sigma = parameters.unbind(-2)
        return Independent(TorchNormal(mean, sigma, validate_args=False), 1, validate_args=False)
    return Categorical(logits=parameters, validate_args=False)


def get_normal(spec: NodeSpec, distribution: object) -> TorchNormal:
    """The normal of a distribution of vectors, or the error that it is none."""
    normal = distribution.base_dist if isinstance(distribution, Independent) else distribution
    if isinstance(normal, TorchNormal):
        return normal
    raise UnsupportedError(spec.group.name, expected="a Categorical or a Normal", actual=type(distribution).__name__)


def get_table_parents(table: str, spec: NodeSpec) -> list[ParentSpec]:
    """What the logits or the reading of a family depend on."""
    slots = spec.tpm.attention_slots()
    return [parent for parent in spec.parents if table != "attention" or parent.slot in slots]


def compute_table(table: str, spec: NodeSpec, execution: ExecutionState) -> GroupTable:
    """A table of a family, whose parents a pass has computed."""
    if table == "value":
        return execution.layout, execution.values[spec.group.index]
    table_parents = get_table_parents(table, spec)
    context, values = gather_parents(execution, replace(spec, parents=tuple(table_parents)))
    values_iter = iter(values)
    parents = [next(values_iter) if parent in table_parents else torch.zeros(0) for parent in spec.parents]
    if table == "normal":  # its mean and its sigma, one above the other
        normal = get_normal(spec, spec.tpm.distribution(context, *parents))
        parameters = torch.stack([normal.mean, normal.stddev.expand_as(normal.mean)], -2)
        return execution.layout, execution.layout.pad_dims(parameters, 2)
    entries = (
        spec.tpm.attention_weights(context, *parents) if table == "attention" else spec.tpm.logits(context, *parents)
    )
    if entries is None:
        raise BNetError(spec.group.name, expected="attention P(j | i)", actual=spec.tpm.no_attention_reason())
    entries = entries if table == "attention" else torch.log_softmax(entries.to(execution.log_dtype), -1)
    entries = execution.layout.pad_dims(entries, 1)
    if table == "attention" and spec.group.index in execution.attention_rows:
        rows, is_set = execution.attention_rows[spec.group.index]
        entries = torch.where(is_set[..., None], rows, entries)
    return execution.layout, entries


@dataclass(frozen=True)
class NodeQuery:
    """What is asked of a family: a table of it, at one node or at all that read.

    Args:
        question: `"value"`, `"TPM"` or `"attention"`, for messages.
        evaluator: The sentence that is asked.
        table: `"value"`, `"logits"`, `"normal"` (mean and sigma) or `"attention"`.
        spec: The family.
        node: The node; None for all nodes of the family.
        dependencies: For each node that is asked about the nodes whose values decide it.
    """

    question: str
    evaluator: NodeEvaluator
    table: str
    spec: NodeSpec
    node: int | None
    dependencies: Mapping[int, Sequence[int]]

    @cached_property
    def choices(self) -> dict[int, list[int]]:
        """The open choices that decide each node."""
        evaluator = self.evaluator
        if not has_ancestor_choices(evaluator.model.network, [self.spec.group.index]):
            return {key: [] for key in self.dependencies}
        return {node: evaluator.find_open_choices(nodes) for node, nodes in self.dependencies.items()}

    @cached_property
    def shared_and_local_choices(self) -> tuple[list[int], list[int]]:
        """The open choices that decide all the nodes, and the families of which each node depends on its own word's."""
        return split_choices(self.evaluator.model, self.choices) or ([], [])

    @property
    def single_state_evaluator(self) -> NodeEvaluator:
        """The answers in one joint state of the shared choices: those of a batch of states have the same structure."""
        states = {choice: torch.zeros(1, dtype=torch.long) for choice in self.shared_and_local_choices[0]}
        return self.evaluator.with_batched_states(states, self.evaluator.module)


def find_kind_fault(query: NodeQuery) -> Fault | None:
    """Why the compiled net has no such table of the family."""
    spec, tpm = query.spec, query.spec.tpm
    name, model = spec.group.name, query.evaluator.model
    if query.table == "value" and tpm.kind not in ("deterministic", "input"):
        return Obstacle(name, "random: its value is one of its own states")
    if query.table == "logits" and (tpm.kind != "discrete" or tpm.states is None):
        return Obstacle(name, "neither a Normal nor a choice with a number of states")
    if query.table == "attention" and not tpm.has_attention:
        return Obstacle(name, f"without P(j | i): {tpm.no_attention_reason()}")
    if query.table != "value" and tpm.kind == "input":
        return Obstacle(name, "an input")
    if query.table != "value" and query.node in model.do:
        return Obstacle(name, "set")
    return None


def find_pass_fault(query: NodeQuery) -> Fault | None:
    """Why one pass of the compiled net, each open choice enumerated, does not answer."""
    fault, evaluator = find_kind_fault(query), query.evaluator
    if fault is not None:
        return fault
    model, groups = evaluator.model, set[int]()
    for choices in query.choices.values():
        groups_of_node = {model.ground.group_of(choice).index for choice in choices}
        count = math.prod(model.count_states(choice) for choice in choices)
        if len(groups_of_node) < len(choices) or count > BUDGET:
            return Obstacle(query.spec.group.name, f"below {len(choices)} choices, some of one family or too many")
        groups |= groups_of_node
    return evaluator.find_table_fault(query.table, [query.spec], groups)


def find_batch_fault(query: NodeQuery) -> Fault | None:
    """Why a pass of the compiled net whose batch are the joint states of the open choices does not answer."""
    fault, evaluator, name = find_kind_fault(query), query.evaluator, query.spec.group.name
    if fault is not None:
        return fault
    shared, local = query.shared_and_local_choices
    if not shared or evaluator.states:
        return Obstacle(name, "below no open choices that all its nodes share")
    return query.single_state_evaluator.find_table_fault(query.table, [query.spec], local)


NODE_RULES: Sequence[Rule[NodeQuery]] = (
    Rule("compiled", "each open choice that decides it has a dim of its own", find_pass_fault),
    Rule("enumeration", "the choices of several words decide it", find_batch_fault),
    Rule("reference", "the compiled net cannot compute it"),
)


@dataclass
class NodeEvaluator:
    """What a sentence knows of its nodes: each family is computed when it is first asked for.

    Args:
        module: The compiled net.
        model: The sentence after its interventions.
        evidence: Node -> observed state or value.
        previous: The answers of the sentence before an intervention: they have the values that it left as they were.
        states: Choice -> many states of it, `[S]`, that are a batch: tables then lead with S.
    """

    module: CompiledModule
    model: GroundModel
    evidence: Mapping[int, Tensor]
    previous: NodeEvaluator | None = None
    states: Mapping[int, Tensor] = field(default_factory=dict)
    _tables: dict[tuple[str, int], GroupTable] = field(default_factory=dict)

    def value(self, node: int) -> Tensor:
        """The value of a node: `[*states, *shape]`."""
        return self._evaluate(self.value_query(node), lambda: reference.values(self.model, node, self.evidence))

    def distribution(self, node: int) -> Distribution:
        """`P(node | parents)`, batched over the open choices that decide the parents."""
        query = self.distribution_query(node)
        result = self._evaluate(query, lambda: conditional_distribution(self.model, node, self.evidence))
        return build_distribution(query.spec, result) if isinstance(result, Tensor) else result

    def attention(self, slice_: int, role: str | None) -> Tensor:
        """`P(j | i)` of the family that reads in a slice: `[*states, *plates, word, word]`.

        Raises:
            BNetError: Where a node that reads is set, or words depend on other choices than their own and shared ones.
        """
        spec, ground = find_attention_spec(self.model, slice_, role), self.model.ground
        query, subject = self.attention_query(spec), f"attention of {spec.group.name}"
        is_set = [ground.name(node) for node in ground.select_nodes(spec.group).tolist() if node in self.model.do]
        if is_set:
            allowed = "another slice; the sentence before that do; Attend(row), which sets what is read"
            raise BNetError(subject, expected="nodes that read", actual=f"{is_set[0]}, which is set", allowed=allowed)
        if split_choices(self.model, query.choices) is None:  # no tensor has a dim for each
            expected, actual = "words that depend on the same open choices", "words that depend on others"
            raise BNetError(
                subject, expected=expected, actual=actual, allowed="do(...) or observe(...) on these choices first"
            )
        table = self._evaluate(query, lambda: conditional_attention(self.model, spec, self.evidence))
        return table.to(self.model.network.log_dtype)

    def route(self, query: NodeQuery) -> Route:
        """How a query is answered."""
        name = query.spec.group.name if query.node is None else self.model.ground.name(query.node)
        route = choose_route(f"{query.question} of {name}", NODE_RULES, query)
        if route.algorithm == "compiled":
            return route
        choices = tuple(dict.fromkeys(choice for node_choices in query.choices.values() for choice in node_choices))
        count = math.prod(self.model.count_states(choice) for choice in choices)
        nodes = (
            len(query.dependencies) * len(self._get_ancestral_set(query.spec)) if route.algorithm == "reference" else 0
        )
        return replace(route, states=count, evaluations=count * nodes, choices=choices)

    def value_query(self, node: int) -> NodeQuery:
        """What is asked for the value of a node."""
        return NodeQuery("value", self, "value", self.model.spec(node), node, {node: [node]})

    def distribution_query(self, node: int) -> NodeQuery:
        """What is asked for the parameters of a node's distribution: its value, mean and sigma, or logits."""
        spec = self.model.spec(node)
        if spec.tpm.kind == "deterministic" and node not in self.model.do:
            return replace(self.value_query(node), question="TPM")
        table = "normal" if isinstance(spec.tpm, Normal) else "logits"
        return NodeQuery("TPM", self, table, spec, node, {node: reference.parents(self.model, node)})

    def attention_query(self, spec: NodeSpec) -> NodeQuery:
        """What is asked for `P(j | i)` of a family: of the nodes that read by their TPM."""
        dependencies = {}
        if has_ancestor_choices(self.model.network, [spec.group.index]):  # else no node depends on a choice
            nodes = [n for n in self.model.ground.select_nodes(spec.group).tolist() if n not in self.model.do]
            dependencies = {
                n: reference.attention_parents(self.model, n) for n in nodes if n not in self.model.attention_rows
            }
        return NodeQuery("attention", self, "attention", spec, None, dependencies)

    def compute_group(self, table: str, spec: NodeSpec) -> Tensor:
        """A table of all nodes of a family below no open choice: `[*plates, word, ...]`, the batch of states first."""
        return self._get_entry(NodeQuery("TPM", self, table, spec, None, {}))

    def prefetch_attention(self, specs: Sequence[NodeSpec]) -> None:
        """Compute what families read in one pass of the net, where the structure allows one for all."""
        if self.find_table_fault("attention", specs, ()) is None:
            self._fill_tables("attention", specs)

    def find_open_choices(self, nodes: Sequence[int]) -> list[int]:
        """The open choices that decide some nodes."""
        return reference.find_open_choices(self.model, nodes, reference.get_fixed(self.model, self.evidence))

    def with_batched_states(self, states: Mapping[int, Tensor], module: CompiledModule) -> NodeEvaluator:
        """The answers of many sentences that differ in the states of some choices, `[S]` each."""
        do = {**self._fixed_model.do, **{choice: state[0] for choice, state in states.items()}}
        return NodeEvaluator(module, replace(self.model, do=do), {}, states=states)

    def find_table_fault(
        self, table: str, specs: Sequence[NodeSpec], enumerated_groups: Collection[int]
    ) -> Fault | None:
        """Why one pass of the compiled net cannot compute a table of some families, found from the structure.

        Args:
            table: `"value"`, `"logits"`, `"normal"` or `"attention"`.
            specs: The families.
            enumerated_groups: The choices that have to be enumerated for them.
        """
        missing = [spec for spec in specs if (table, spec.group.index) not in self._tables]
        layout = None if missing or not specs else self._tables[table, specs[0].group.index][0]
        enumerated: Collection[int] = () if layout is None else layout.enumerated
        if missing:
            outputs, model = self._get_output_groups(table, missing), self.model
            ancestral = self._get_ancestral_set(*missing)
            closed, partial, fault = self._find_fixed_groups(ancestral)
            if fault is not None:
                return fault
            network = model.network
            is_open = {i for i in outputs if i not in closed and network.specs[i].tpm.kind == "discrete"}
            names = [network.specs[index].group.name for index in outputs]
            for index in outputs:
                if index not in closed and network.specs[index].tpm.kind == "continuous":
                    return unset_parent_error(network.specs[index].group.name)
            requirements = self.module.find_requirements(names, closed, is_open, partial, model.ground.word_counts)
            if requirements.fault is not None:
                return requirements.fault
            if (
                math.prod(network.count_states(index, model.ground.word_counts) for index in requirements.enumerated)
                > BUDGET
            ):
                return Obstacle(names[0], f"below more than {BUDGET} joint states")
            enumerated = requirements.enumerated
        if not set(enumerated_groups) <= set(enumerated):
            name = specs[0].group.name
            return Obstacle(name, "below choices that the compiled net does not enumerate for it")
        return None

    def count_flops(self, route: Route, query: NodeQuery) -> int | None:
        """The floating-point operations of the passes of a compiled route."""
        if route.algorithm == "reference":
            return None
        evaluator, batch = self, 1
        if route.algorithm == "enumeration":
            evaluator, batch = (
                query.single_state_evaluator,
                math.prod(map(self.model.count_states, query.shared_and_local_choices[0])),
            )
        network = self.model.network
        closed, partial, _ = evaluator._find_fixed_groups(evaluator._get_ancestral_set(query.spec))
        words, outputs = self.model.ground.word_counts, evaluator._get_output_groups(query.table, [query.spec])
        for candidates in (sorted({query.spec.group.index, *outputs}), outputs):  # with its own products, where planned
            is_open = frozenset(i for i in candidates if i not in closed and network.specs[i].tpm.kind == "discrete")
            names = tuple(network.specs[i].group.name for i in candidates)
            if self.module.find_requirements(names, closed, is_open, partial, words).fault is None:
                break
        plan = self.module.plan(names, closed, is_open, patched=partial)
        return count_plan_flops(network, plan, words, closed, batch)

    @cached_property
    def _fixed_model(self) -> GroundModel:
        """The sentence in which the nodes are set as well of which evidence says outright what they came to."""
        return replace(self.model, do={**reference.get_fixed(self.model, self.evidence), **self.model.do})

    def _find_fixed_groups(self, ancestral_set: set[int]) -> tuple[frozenset[int], frozenset[int], Fault | None]:
        """The families above some whose value is known, those of which some nodes have one, and the fault of a family
        of which some nodes have states and others tensors."""
        graph, known = self.model.network.graph, self._fixed_model
        batched = {known.ground.group_of(node).index for node in self.states}
        fault = find_mixed_type_fault(known, known.do, relevant=ancestral_set)
        full, partial = find_set_groups(known, ancestral_set)
        closed = batched | {graph.get_group(name).index for name in full}
        return frozenset(closed), frozenset({graph.get_group(name).index for name in partial} - batched), fault

    def compute(self, query: NodeQuery, route: Route) -> Tensor:
        """What a compiled route gives; rows of set nodes are as if they were not set."""
        return self._get_entry(query) if route.algorithm == "compiled" else self._compute_enumerated(query)

    def _evaluate(self, query: NodeQuery, fallback: Callable[[], T]) -> T | Tensor:
        """The answer by the route of a query: the table of a compiled route, or what the reference says.

        Args:
            query: What is asked.
            fallback: The answer of the reference, which also names the node where the compiled net gives NaN.
        """
        route = self.route(query)
        route.warn_if_slow()
        if route.algorithm == "reference":
            return fallback()
        table = self.compute(query, route)
        if bool(table.isnan().any()):
            fallback()
            raise BNetError(query.spec.group.name, expected="numbers", actual="NaN")
        return table

    def _compute_enumerated(self, query: NodeQuery) -> Tensor:
        """What is asked of a family, in every joint state of the shared open choices, as one batch: `[*states, ...]`.

        The choices of each word's own stay open, and have a dim each.
        """
        model, (shared, local) = self.model, query.shared_and_local_choices
        reference.check_joint_states(model, shared, BUDGET)
        sizes = [model.count_states(choice) for choice in shared]
        states, module, parts = (
            enumerate_joint_states([range(size) for size in sizes]),
            with_sentence_scope(self.module),
            [],
        )
        states = states.to(model.network.device)
        for chunk in iter_chunks(model, len(states), [query.spec.group.index]):
            evaluator = self.with_batched_states(dict(zip(shared, states[chunk].unbind(1), strict=True)), module)
            parts.append(evaluator._get_entry(replace(query, evaluator=evaluator)))
        table: Tensor = torch.cat(parts, len(local)).unflatten(len(local), sizes)
        order = [*local, *(model.ground.group_of(choice).index for choice in shared)]
        dims = sorted(range(len(order)), key=order.__getitem__)
        return table.permute(*dims, *range(len(order), table.dim()))

    def _get_ancestral_set(self, *specs: NodeSpec) -> set[int]:
        """The families above some, themselves included."""
        return self.model.network.graph.ancestral_set([spec.group.index for spec in specs])

    def _get_entry(self, query: NodeQuery) -> Tensor:
        """The entry of one node, or of all nodes of its family: `[*states, *shape]`, NaN and all."""
        spec, open_choices = query.spec, next(iter(query.choices.values()), [])
        index = None if query.node is None else self.model.ground.unravel_index(query.node)[1]
        shape = {"value": spec.shape, "normal": (2, *spec.shape)}.get(query.table)
        if query.table == "logits":
            shape = (self.model.network.count_states(spec.group.index, self.model.ground.word_counts),)
        elif shape is None:
            shape = (self.model.ground.word_counts[self.model.network.get_source_stack(spec)],)
        self._fill_tables(query.table, [spec])
        table = self._tables[query.table, spec.group.index]
        states = {self.model.ground.group_of(choice).index: self.model.count_states(choice) for choice in open_choices}
        return self._select_dims(table, spec, states, index, shape)

    def _select_dims(
        self,
        table: GroupTable,
        spec: NodeSpec,
        state_counts: Mapping[int, int],
        index: tuple[int, ...] | None,
        shape: tuple[int | None, ...],
    ) -> Tensor:
        """A table without the dims that it only has in the layout, and with those of the choices in `state_counts`."""
        (layout, values), group = table, spec.group
        if tuple(values.shape[layout.rank :]) != shape:
            actual = f"{tuple(values.shape[layout.rank :])}"
            subject = f"{group.name} ({type(spec.tpm).__name__})"
            raise BNetError(subject, expected=f"a table of shape {shape}, as it says", actual=actual)
        axes = [layout.axis(axis) for axis in self.model.ground.axes(group)]
        position = dict(zip(axes, index, strict=True)) if index is not None else {}
        sizes = dict(zip(axes, self.model.ground.shapes[group.index], strict=True)) if index is None else {}
        sizes |= {k: state_counts[choice] for k, choice in enumerate(layout.enumerated) if choice in state_counts}
        if self.states:
            sizes[layout.batch_dim] = len(next(iter(self.states.values())))
        for k in reversed(range(layout.rank)):
            if k in sizes:
                values = values.expand(*values.shape[:k], sizes[k], *values.shape[k + 1 :])
            else:
                values = values.select(k, position.get(k, 0) if values.shape[k] > 1 else 0)
        return values.clone()

    @torch.no_grad()
    def _fill_tables(self, table: str, specs: Sequence[NodeSpec]) -> None:
        """Compute the tables that are missing, all in one pass of the net."""
        missing = [spec for spec in specs if (table, spec.group.index) not in self._tables]
        if missing:
            execution = self._execute(self._get_output_groups(table, missing), self._get_ancestral_set(*missing))
            for spec in missing:
                self._tables[table, spec.group.index] = compute_table(table, spec, execution)

    def _get_output_groups(self, table: str, specs: Sequence[NodeSpec]) -> list[int]:
        """The families whose values a table of some families is made of."""
        if table == "value":
            return sorted({spec.group.index for spec in specs})
        parents = [parent for spec in specs for parent in get_table_parents(table, spec)]
        return sorted({parent.index for parent in parents} | {s for parent in parents for _, s in parent.pick})

    def _execute(self, outputs: Sequence[int], ancestral_set: set[int]) -> ExecutionState:
        """The values of families, with the interventions and the evidence above them."""
        model, network = self.model, self.model.network
        names = tuple(network.specs[index].group.name for index in outputs)
        arguments = group_interventions(self._fixed_model, ancestral_set)
        closed, patched = arguments["do"], arguments["patched"]
        batched = {model.ground.group_of(node).index for node in self.states}
        for name, (value, _) in group_values(model, model.do, batched, self.states).items():
            patched.pop(name, None)
            closed[name] = value
        closed |= self._reuse_previous_values(set(outputs), closed)
        known = frozenset(network.graph.get_group(name).index for name in closed)
        is_open = frozenset(i for i in set(outputs) - known if network.specs[i].tpm.kind == "discrete")
        request = ExecutionRequest(
            names,
            build_length_inputs(model),
            do=closed,
            patched=patched,
            attention_rows=arguments["attention_rows"],
            given={name: value[None] for name, value in model.inputs.items()},
            enumerate_too=is_open,
        )
        return self.module.run(request)[0]

    def _reuse_previous_values(self, outputs: set[int], fixed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values of families from before the intervention, of those that it left as they were and touched ones
        read."""
        if self.previous is None:
            return {}
        network, changed = self.model.network, self._changed_groups
        unchanged: set[int] = set()
        visited: set[int] = set()
        stack = list(outputs)
        while stack:
            index = stack.pop()
            if index in visited or network.graph.groups[index].name in fixed:
                continue
            visited.add(index)
            if index not in changed:
                unchanged.add(index)
            else:
                stack.extend(edge.parent for edge in network.graph.in_edges[index])
        candidates = (spec for spec in map(network.specs.__getitem__, sorted(unchanged)) if spec.parents)
        candidates = (spec for spec in candidates if spec.tpm.kind == "deterministic")
        reused = [spec for spec in candidates if not has_ancestor_choices(network, [spec.group.index])]
        if self.previous.find_table_fault("value", reused, ()) is not None:
            return {}
        self.previous._fill_tables("value", reused)
        tables = [self.previous._tables["value", spec.group.index] for spec in reused]
        tensors = (self._select_dims(t, m, {}, None, m.shape)[None] for t, m in zip(tables, reused, strict=True))
        values = {spec.group.name: value for spec, value in zip(reused, tensors, strict=True)}
        # What is no number is computed again, so that the error names the node.
        return {} if any(bool(value.isnan().any()) for value in values.values()) else values

    @cached_property
    def _changed_groups(self) -> set[int]:
        """The families that the surgery set or freed, and all that descend from them."""
        assert self.previous is not None
        after, before = ({**model.do, **model.attention_rows} for model in (self.model, self.previous.model))
        nodes = {n for n in {**after, **before} if n not in after or n not in before or not after[n].equal(before[n])}
        groups = {self.model.ground.group_of(node).index for node in nodes}
        return groups | self.model.network.graph.descendants(groups)

"""The state of a sentence, and the values, distributions and attention `P(j | i)` of its nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal as TorchNormal

from bnet_transformer import reference
from bnet_transformer._core.checks import check_float, check_int, check_mapping, parse_names
from bnet_transformer._core.process import check_cancelled
from bnet_transformer._core.tokens import Labels, as_labels
from bnet_transformer.compiler.gather import (
    ExecutionRequest,
    ExecutionState,
    TensorLayout,
    build_request,
    gather_parents,
)
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.compiler.plan import unset_parent_error
from bnet_transformer.cost.net_cost import count_plan_flops
from bnet_transformer.data.do_values import is_relative, parse_entries, resolve_relative, resolve_value
from bnet_transformer.data.encode import EncodedSentence, Tokens, encode_value, expand_names
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, EvidenceError, UnsupportedError, format_count, unknown_name_error
from bnet_transformer.graph import GroundGraph, NodeFamily, NodeSelection, find_family
from bnet_transformer.inference.plan import Fault, Obstacle, Plan, choose_plan, find_mixed_type_fault, find_slowest
from bnet_transformer.inference.query import (
    MAX_DIMS,
    Query,
    enumerate_as_batch,
    enumerate_joint_states,
    parse_indices,
    parse_slices,
    parse_words,
    with_sentence_scope,
)
from bnet_transformer.reference import (
    ATOL,
    BUDGET,
    AttentionRow,
    GroundModel,
    check_discrete_node,
    conditional_attention,
    conditional_distribution,
    has_ancestor_choices,
    split_choices,
)
from bnet_transformer.tpm import Normal

# --------------------------------------------------------------------------------------------------------------------
# Values, distributions and attention `P(j | i)` of single nodes of a sentence; each node group is computed once.
#
# The compiled net computes a table of a whole group, with a dim for each latent choice on which the group depends. If a
# node depends on the choices of several words, all their joint states are a batch of one pass. The reference computes
# what the compiled net cannot compute.


REFERENCE_REASON = "the compiled net cannot compute it, so that nodes are evaluated one by one"
GroupTable = tuple[TensorLayout, Tensor]  # all values of a group: `[*enumerated, 1, *plates, word, *shape]`


def build_distribution(spec: NodeSpec, parameters: Tensor) -> Distribution:
    """The distribution of a node, from its value, its mean and sigma, or its logits."""
    if not spec.tpm.is_random:
        from pyro.distributions import Delta

        return Delta(parameters, event_dim=len(spec.shape))
    if isinstance(spec.tpm, Normal):
        mean, sigma = parameters.unbind(-2)
        return Independent(TorchNormal(mean, sigma, validate_args=False), 1, validate_args=False)
    return Categorical(logits=parameters, validate_args=False)


def get_normal(spec: NodeSpec, distribution: object) -> TorchNormal:
    """The Normal of a distribution of vectors; an error for another distribution."""
    normal = distribution.base_dist if isinstance(distribution, Independent) else distribution
    if isinstance(normal, TorchNormal):
        return normal
    expected = "a Categorical or a Normal node"
    raise UnsupportedError(spec.group.name, expected=expected, actual=type(distribution).__name__)


def get_table_parents(table: str, spec: NodeSpec) -> list[ParentSpec]:
    """The parents on which a table of a group depends; for attention, those that determine the weights."""
    slots = spec.tpm.attention_slots()
    return [parent for parent in spec.parents if table != "attention" or parent.slot in slots]


def get_output_groups(table: str, specs: Sequence[NodeSpec]) -> list[int]:
    """The groups whose values a pass must compute for a table of some groups."""
    if table == "value":
        return sorted({spec.group.index for spec in specs})
    parents = [parent for spec in specs for parent in get_table_parents(table, spec)]
    return sorted({parent.index for parent in parents} | {s for parent in parents for _, s in parent.pick})


def compute_table(table: str, spec: NodeSpec, execution: ExecutionState) -> GroupTable:
    """A table of a group, from the values of its parents in an execution state."""
    if table == "value":
        return execution.layout, execution.values[spec.group.index]
    table_parents = get_table_parents(table, spec)
    context, values = gather_parents(execution, replace(spec, parents=tuple(table_parents)))
    iterator = iter(values)
    parents = [next(iterator) if parent in table_parents else torch.zeros(0) for parent in spec.parents]
    if table == "normal":  # mean and sigma, stacked
        normal = get_normal(spec, spec.tpm.distribution(context, *parents))
        parameters = torch.stack([normal.mean, normal.stddev.expand_as(normal.mean)], -2)
        return execution.layout, execution.layout.pad_dims(parameters, 2)
    entries = (spec.tpm.attention_weights if table == "attention" else spec.tpm.logits)(context, *parents)
    if entries is None:
        raise BNetError(
            spec.group.name, expected="a node with attention P(j | i)", actual=spec.tpm.no_attention_reason()
        )
    entries = entries if table == "attention" else torch.log_softmax(entries.to(execution.log_dtype), -1)
    entries = execution.layout.pad_dims(entries, 1)
    if table == "attention" and spec.group.index in execution.attention_rows:
        rows, is_set = execution.attention_rows[spec.group.index]
        entries = torch.where(is_set[..., None], rows, entries)
    return execution.layout, entries


@dataclass(frozen=True)
class NodeQuery:
    """A query for a table of a node group, at one node or at all nodes.

    Args:
        question: `"value"`, `"TPM"` or `"attention"`, for messages.
        evaluator: The evaluator of the sentence.
        table: `"value"`, `"logits"`, `"normal"` (mean and sigma) or `"attention"`.
        spec: The group.
        node: The node; None for all nodes of the group.
        dependencies: For each requested node, the nodes whose values determine it.
    """

    question: str
    evaluator: NodeEvaluator
    table: str
    spec: NodeSpec
    node: int | None
    dependencies: Mapping[int, Sequence[int]]

    @cached_property
    def choices(self) -> dict[int, list[int]]:
        """The latent choices on which each node depends."""
        model, is_choice = self.evaluator.model, self.table == "value" and self.spec.tpm.kind == "discrete"
        if not is_choice and not has_ancestor_choices(model.network, [self.spec.group.index]):
            return {key: [] for key in self.dependencies}
        return {node: self.evaluator.find_open_choices(nodes) for node, nodes in self.dependencies.items()}

    @cached_property
    def shared_and_local_choices(self) -> tuple[list[int], list[int]]:
        """The latent choices on which all nodes depend, and the groups with a choice for each word on which only the
        nodes of that word depend.
        """
        return split_choices(self.evaluator.model, self.choices) or ([], [])

    @property
    def single_state_evaluator(self) -> NodeEvaluator:
        """The evaluator in one joint state of the shared choices; all joint states have the same structure."""
        states = {choice: torch.zeros(1, dtype=torch.long) for choice in self.shared_and_local_choices[0]}
        return self.evaluator.with_batched_states(states, self.evaluator.module)


def find_kind_fault(query: NodeQuery) -> Fault | None:
    """Why the compiled net cannot compute such a table of the group."""
    spec, tpm = query.spec, query.spec.tpm
    name, model = spec.group.name, query.evaluator.model
    if query.table == "value" and tpm.kind not in ("deterministic", "input"):
        return Obstacle(name, f"{name} is random, and its value is one of its states", f"set or observe {name}")
    if query.table == "logits" and (tpm.kind != "discrete" or tpm.states is None):
        return Obstacle(name, f"{name} is neither a Normal nor a choice with a fixed number of states")
    if query.table == "attention" and not tpm.has_attention:
        return Obstacle(name, f"{name} has no attention P(j | i): {tpm.no_attention_reason()}")
    if query.table != "value" and tpm.kind == "input":
        return Obstacle(name, f"{name} is an input")
    if query.table != "value" and query.node in model.do:
        return Obstacle(name, f"{name} is set by do")
    return None


@dataclass
class NodeEvaluator:
    """Tables of the node groups of a sentence, each computed on first use.

    Args:
        module: The compiled net.
        model: The ground model of the sentence, after its interventions.
        evidence: The observed state or value of each node, by ground id.
        previous: The evaluator before an intervention or evidence; values that these do not change are reused.
        states: The states `[S]` of each choice in a batch of S sentences; tables then have S as their first dim.
    """

    module: CompiledModule
    model: GroundModel
    evidence: Mapping[int, Tensor]
    previous: NodeEvaluator | None = None
    states: Mapping[int, Tensor] = field(default_factory=dict)
    _tables: dict[tuple[str, int], GroupTable] = field(default_factory=dict)
    _passes: dict[tuple[str, tuple[int, ...]], tuple[Fault | None, frozenset[int]]] = field(default_factory=dict)

    def value(self, node: int) -> Tensor:
        """The value of a node: `[*states, *shape]`."""
        return self.plan_value(node).run()

    def read_value(self, node: int) -> Tensor:
        """The value to which `do` sets a node, or else its computed value: `[*states, *shape]`."""
        return self.model.do[node] if node in self.model.do else self.value(node)

    def plan_value(self, node: int) -> Plan[Tensor]:
        """The plan of the value of a node: `[*states, *shape]`."""
        fallback = partial(reference.values, self.model, node, self.evidence)
        return self.plan_entry(NodeQuery("value", self, "value", self.model.spec(node), node, {node: [node]}), fallback)

    def plan_stacked_value(self, family: NodeFamily) -> Plan[Tensor]:
        """The plan of the values of all nodes of a family: `[*states, *axes, *shape]`, with the axes of its `array`.

        Its cost is that of the slowest node. The result is an error if the nodes differ in their axes or shapes, or
        depend on too many joint states of latent choices.
        """
        if family.is_node:
            return self.plan_value(family.nodes[0])
        firsts = [int(part.flat[0]) for part in family.parts]
        specs = [self.model.spec(node) for node in firsts]
        has_choices = has_ancestor_choices(self.model.network, [spec.group.index for spec in specs])
        has_choices = has_choices or any(spec.tpm.kind == "discrete" for spec in specs)
        # Without choices, the nodes of a group have one plan.
        plans = {node: self.plan_value(node) for node in (family.nodes if has_choices else firsts)}
        question, run = f"value of {family.name}", partial(self._stack_values, family, plans, has_choices=has_choices)
        return replace(find_slowest([*plans.values()]), question=question, run=run)

    def _stack_values(self, family: NodeFamily, plans: Mapping[int, Plan[Tensor]], *, has_choices: bool) -> Tensor:
        """The values of all nodes of a family, from the plan of each, or of one for each group without choices."""
        array, model = family.array, self.model
        shapes = {model.spec(node).shape for node in family.nodes}
        if len(shapes) > 1:
            raise BNetError(family.name, expected="nodes of the same shape", actual=" and ".join(map(str, shapes)))
        shape = shapes.pop()
        if not has_choices and all(plan.algorithm == "compiled" for plan in plans.values()):
            tables = [self.compute_group("value", model.spec(node)).reshape(-1, *shape) for node in plans]
            offsets = [int(model.ground.offsets[model.ground.group_of(node).index]) for node in plans]
            rows = [torch.from_numpy(part.ravel() - k) for part, k in zip(family.parts, offsets, strict=True)]
            values = torch.cat([table[row] for table, row in zip(tables, rows, strict=True)])
            if not bool(values.isnan().any()):
                return values.reshape(*array.shape, *shape)
        choices = sorted(set().union(*(plan.choices for plan in plans.values())))
        states = {choice: model.count_states(choice) for choice in choices}
        reference.check_joint_states(model, [*states], BUDGET)
        if len(states) + len(array.shape) + len(shape) > MAX_DIMS:
            states = {choice: count for choice, count in states.items() if count > 1}
        by_node = []
        for node in family.nodes:  # a value has its dims of choices in the order of ids
            plan = plans[node] if node in plans else self.plan_value(node)
            value = plan.run().reshape([*(n if k in plan.choices else 1 for k, n in states.items()), *shape])
            by_node.append(value.expand([*states.values(), *shape]))
        stacked = torch.stack(by_node, len(states))
        return stacked.reshape(*states.values(), *array.shape, *stacked.shape[len(states) + 1 :])

    def plan_distribution(self, node: int) -> Plan[Distribution]:
        """The plan of `P(node | parents)`, batched over the latent choices on which the parents depend."""
        spec, model = self.model.spec(node), self.model
        if spec.tpm.kind == "deterministic" and node not in model.do:
            query = NodeQuery("TPM", self, "value", spec, node, {node: [node]})
        else:
            table = "normal" if isinstance(spec.tpm, Normal) else "logits"
            query = NodeQuery("TPM", self, table, spec, node, {node: reference.parents(model, node)})
        plan: Plan[Any] = self.plan_entry(query, partial(conditional_distribution, model, node, self.evidence))
        return plan.then(lambda entry: build_distribution(spec, entry) if isinstance(entry, Tensor) else entry)

    def plan_attention(self, spec: NodeSpec) -> Plan[Tensor]:
        """The plan of `P(j | i)` of a group: `[*states, *plates, word, word]`.

        The result is an error if a node of the group is set, or if its words depend on different choices.
        """
        ground, subject = self.model.ground, f"attention of {spec.group.name}"
        query = self.attention_query(spec)
        plan = self.plan_entry(query, partial(conditional_attention, self.model, spec, self.evidence))

        def compute() -> Tensor:
            is_set = [ground.name(node) for node in ground.select_nodes(spec.group).tolist() if node in self.model.do]
            if is_set:
                hint = (
                    "Use the sentence before this do, or set the attention instead of the node: do with Attend(weights)"
                )
                raise BNetError(f"{subject}: {is_set[0]} is set by do, and has no attention", hint=hint)
            if split_choices(self.model, query.choices) is None:  # no tensor has a dim for each
                names = list(dict.fromkeys(ground.name(c) for choices in query.choices.values() for c in choices))
                hint = f"Set or observe latent choices first: {', '.join(names[:6])}"
                hint += ", …" if len(names) > 6 else ""
                raise BNetError(subject, expected="words that depend on the same latent choices", hint=hint)
            table: Tensor = plan.run()
            return table.to(self.model.network.log_dtype)

        return plan.with_run(compute)

    def plan_attentions(self, specs: Sequence[NodeSpec]) -> list[Plan[Tensor]]:
        """The plan of `P(j | i)` of each of some groups; `prefetch` computes all of them in one pass."""
        self.find_table_fault("attention", specs, ())  # the structure of one pass for all is that of each
        return [self.plan_attention(spec) for spec in specs]

    def plan_attention_of_slices(self, specs: Sequence[NodeSpec]) -> Plan[Tensor]:
        """The plan of `P(j | i)` of a group of each slice: `[slice, *states, *plates, word, word]`.

        Its cost is that of the slowest slice. The result is an error if the slices differ in words, plates or choices.
        """
        plans, first = self.plan_attentions(specs), specs[0].group.step

        def compute() -> Tensor:
            self.prefetch("attention", specs)
            dims, tables = list[tuple[tuple[int, ...], tuple[int, ...]]](), [plan.run() for plan in plans]
            for spec, plan, table in zip(specs, plans, tables, strict=True):
                dims.append((plan.choices, tuple(table.shape)))
                if dims[-1] != dims[0]:
                    sizes = f"{list(dims[0][1])} in slice {first} and {[*table.shape]} in slice {spec.group.step}"
                    choices = [[self.model.ground.name(node) for node in part[0]] for part in (dims[0], dims[-1])]
                    names = "; the latent choices are " + " and ".join(", ".join(part) or "none" for part in choices)
                    raise BNetError(
                        "attention of all slices",
                        expected="slices with equal dimensions, and the same latent choices",
                        actual=sizes + (names if choices[0] != choices[1] else ""),
                        hint=f"Pass slice=, such as slice={first}",
                    )
            return torch.stack(tables)

        return replace(find_slowest(plans), question="attention of all slices", run=compute)

    def plan_entry(self, query: NodeQuery, fallback: Callable[[], Any]) -> Plan[Any]:
        """The plan of a query: a table of the compiled net, or the result of the reference.

        Args:
            query: The query.
            fallback: Computes the result by the reference. If the compiled net returns NaN, the error of the reference
                names the node.
        """
        model, name = self.model, query.spec.group.name
        question = f"{query.question} of {name if query.node is None else model.ground.name(query.node)}"
        choices, fault = tuple(sorted(set().union(*query.choices.values()))), find_kind_fault(query)
        cost: dict[str, Any] = {"states": math.prod(map(model.count_states, choices)), "choices": choices}

        def check_numbers(compute: Callable[[NodeQuery], Tensor]) -> Tensor:
            table = compute(query)
            if bool(table.isnan().any()):
                fallback()
                raise BNetError(name, expected="numbers", actual="NaN")
            return table

        def plan_pass() -> Plan[Any] | Fault:
            obstacle = fault or self._find_pass_fault(query)
            if obstacle is not None:
                return obstacle
            reason = "one pass computes it, with a dimension for each latent choice on which it depends"
            cost["states"] = math.prod(map(model.count_states, next(iter(query.choices.values()), ())))
            run, flops = partial(check_numbers, self._get_entry), partial(self.count_flops, query)
            return Plan(question, "compiled", reason, run, count_flops=flops, **cost)

        def plan_batch() -> Plan[Any] | Fault:
            obstacle = fault or self._find_batch_fault(query)
            if obstacle is not None:
                return obstacle
            reason = "it depends on the choices of several words, whose joint states are a batch"
            rows = math.prod(map(model.count_states, query.shared_and_local_choices[0]))
            run, flops = partial(check_numbers, self._compute_enumerated), partial(self.count_flops, query, rows)
            return Plan(question, "enumeration", reason, run, count_flops=flops, **cost)

        def plan_fallback() -> Plan[Any]:
            num_groups = len(model.network.graph.ancestral_set([query.spec.group.index]))
            evaluations = cost["states"] * len(query.dependencies) * num_groups
            return Plan(question, "reference", REFERENCE_REASON, fallback, evaluations=evaluations, **cost)

        return choose_plan({"compiled": plan_pass, "enumeration": plan_batch, "reference": plan_fallback})

    def _find_pass_fault(self, query: NodeQuery) -> Fault | None:
        """Why one pass of the compiled net, with each latent choice enumerated, does not compute a query."""
        model, groups, name = self.model, set[int](), query.spec.group.name
        for choices in query.choices.values():
            groups_of_node = {model.ground.group_of(choice).index for choice in choices}
            count = math.prod(model.count_states(choice) for choice in choices)
            if len(groups_of_node) < len(choices) or count > BUDGET:
                reason = f"{name} depends on {len(choices)} latent choices with {format_count(count)} joint states"
                if len(groups_of_node) < len(choices):
                    reason += ", and several of them belong to one node group"
                return Obstacle(name, reason, "set or observe some of them")
            groups |= groups_of_node
        return self.find_table_fault(query.table, [query.spec], groups)

    def _find_batch_fault(self, query: NodeQuery) -> Fault | None:
        """Why one pass of the compiled net, with the joint states of the latent choices as batch, does not apply."""
        (shared, local), name = query.shared_and_local_choices, query.spec.group.name
        if not shared or self.states:
            reason = f"the nodes of {name} do not depend on the same latent choices"
            return Obstacle(name, reason, "set or observe them")
        return query.single_state_evaluator.find_table_fault(query.table, [query.spec], local)

    def attention_query(self, spec: NodeSpec) -> NodeQuery:
        """The query for `P(j | i)` of the nodes of a group whose attention is not set."""
        dependencies = {}
        if has_ancestor_choices(self.model.network, [spec.group.index]):  # else no node depends on a choice
            nodes = [n for n in self.model.ground.select_nodes(spec.group).tolist() if n not in self.model.do]
            nodes = [n for n in nodes if n not in self.model.attention_rows]
            dependencies = {n: reference.attention_parents(self.model, n) for n in nodes}
        return NodeQuery("attention", self, "attention", spec, None, dependencies)

    def compute_group(self, table: str, spec: NodeSpec) -> Tensor:
        """A table of all nodes of a group, `[*plates, word, ...]`, with the batch of states first, without latent
        choices.
        """
        return self._get_entry(NodeQuery("TPM", self, table, spec, None, {}))

    def prefetch(self, table: str, specs: Sequence[NodeSpec]) -> None:
        """Compute a table of several groups in one pass of the net, if the structure allows it."""
        if self.find_table_fault(table, specs, ()) is None:
            self._fill_tables(table, specs)

    def find_open_choices(self, nodes: Sequence[int]) -> list[int]:
        """The latent choices on which some nodes depend."""
        return reference.find_open_choices(self.model, nodes, reference.get_fixed(self.model, self.evidence))

    def with_batched_states(self, states: Mapping[int, Tensor], module: CompiledModule) -> NodeEvaluator:
        """The evaluator of a batch of sentences that differ in the states of some choices, `[S]` each."""
        do = {**self._fixed_model.do, **{choice: state[0] for choice, state in states.items()}}
        return NodeEvaluator(module, replace(self.model, do=do), {}, states=states)

    def find_table_fault(
        self, table: str, specs: Sequence[NodeSpec], enumerated_groups: Collection[int]
    ) -> Fault | None:
        """Why one pass of the compiled net cannot compute a table of some groups, from the structure only.

        Args:
            table: `"value"`, `"logits"`, `"normal"` or `"attention"`.
            specs: The groups.
            enumerated_groups: The choices that must be enumerated.
        """
        missing = tuple(spec.group.index for spec in specs if (table, spec.group.index) not in self._tables)
        fault, enumerated = None, frozenset[int]()
        if missing:
            if (table, missing) not in self._passes:
                outputs = get_output_groups(table, [self.model.network.specs[index] for index in missing])
                relevant = self.model.network.graph.ancestral_set(missing)
                fault, enumerated = self.analyse_pass(outputs, relevant, self.model.network.specs[missing[0]])
                # Without choices, no single group has a fault either.
                keys = [missing] if fault or enumerated else [missing, *((index,) for index in missing)]
                self._passes |= {(table, key): (fault, enumerated) for key in keys}
            fault, enumerated = self._passes[table, missing]
        elif specs:
            enumerated = frozenset(self._tables[table, specs[0].group.index][0].enumerated)
        if fault is None and not enumerated.issuperset(enumerated_groups):
            name = specs[0].group.name
            return Obstacle(name, f"the compiled net does not enumerate all choices on which {name} depends")
        return fault

    def analyse_pass(
        self, outputs: Sequence[int], relevant: Collection[int], spec: NodeSpec
    ) -> tuple[Fault | None, frozenset[int]]:
        """Why one pass cannot compute the values of some groups, and the choices that it enumerates.

        Args:
            outputs: The groups that the pass computes.
            relevant: The groups whose values, interventions and evidence matter.
            spec: A group that depends on the values, for the reason.
        """
        network, words, model = self.model.network, self.model.ground.word_counts, self._fixed_model
        fault: Fault | None = find_mixed_type_fault(model, model.do, relevant=relevant)
        if fault is not None:
            return fault, frozenset()
        request = self.request_pass(outputs, relevant)
        unset = [i for i in outputs if i not in request.known and network.specs[i].tpm.kind == "continuous"]
        if unset:
            return unset_parent_error(network.specs[unset[0]].group.name), frozenset()
        needs = self.module.find_requirements(request.structure, words)
        if math.prod(network.count_states(i, words) for i in needs.enumerated) > BUDGET and not needs.fault:
            name = spec.group.name
            return Obstacle(name, f"{name} depends on more than {BUDGET} joint states of choices"), needs.enumerated
        return needs.fault, needs.enumerated

    def count_flops(self, query: NodeQuery, batch: int | None = None) -> int | None:
        """The floating-point operations of the pass of a query, or of a batch of states of its shared choices."""
        evaluator = self if batch is None else query.single_state_evaluator
        relevant = self.model.network.graph.ancestral_set([query.spec.group.index])
        words, outputs = self.model.ground.word_counts, get_output_groups(query.table, [query.spec])
        # The products of the group itself count as well, if there is a plan for them.
        for candidates in (sorted({query.spec.group.index, *outputs}), outputs):
            structure = evaluator.request_pass(candidates, relevant).structure
            if self.module.find_requirements(structure, words).fault is None:
                break
        return count_plan_flops(self.module, structure, words, batch or 1)

    def request_pass(self, outputs: Iterable[int], relevant: Collection[int]) -> ExecutionRequest:
        """The request of a pass. The states of a latent choice are enumerated; its distribution is not needed."""
        request, specs = build_request(self._fixed_model, (), relevant, self.states), self.model.network.specs
        is_open = frozenset(i for i in outputs if i not in request.known and specs[i].tpm.kind == "discrete")
        return replace(request, outputs=tuple(i for i in outputs if i not in is_open), enumerate_too=is_open)

    @cached_property
    def _fixed_model(self) -> GroundModel:
        """The model in which also the random nodes that evidence determines are set."""
        return replace(self.model, do={**reference.get_fixed(self.model, self.evidence), **self.model.do})

    def _compute_enumerated(self, query: NodeQuery) -> Tensor:
        """A table in every joint state of the shared latent choices, as one batch: `[*states, ...]`.

        Choices of single words are not part of the batch; each of them has a dim. Shared choices of a single state
        have none if the table would have more dims than a tensor can have.
        """
        model, (shared, local) = self.model, query.shared_and_local_choices
        reference.check_joint_states(model, shared, BUDGET)
        states = enumerate_joint_states([range(model.count_states(choice)) for choice in shared])
        module, parts = with_sentence_scope(self.module), list[Tensor]()
        for batch in enumerate_as_batch(model, shared, states.to(model.network.device), [query.spec.group.index]):
            evaluator = self.with_batched_states(batch, module)
            parts.append(evaluator._get_entry(replace(query, evaluator=evaluator)))
        table, start = torch.cat(parts, len(local)), len(local)
        if table.dim() - 1 + len(shared) > MAX_DIMS:
            shared = [choice for choice in shared if model.count_states(choice) > 1]
        sizes = [model.count_states(choice) for choice in shared]
        table = table.reshape(*table.shape[:start], *sizes, *table.shape[start + 1 :])
        order = [*local, *(model.ground.group_of(choice).index for choice in shared)]
        dims = sorted(range(len(order)), key=order.__getitem__)
        return table.permute(*dims, *range(len(order), table.dim()))

    def _get_entry(self, query: NodeQuery) -> Tensor:
        """The entry of one node, or of all nodes of its group: `[*states, *shape]`, possibly NaN."""
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
        """A table without dims that only the layout has, and with the dims of the choices in `state_counts`."""
        (layout, values), group = table, spec.group
        if tuple(values.shape[layout.rank :]) != shape:
            actual = f"{tuple(values.shape[layout.rank :])}"
            subject = f"{group.name} ({type(spec.tpm).__name__})"
            raise BNetError(subject, expected=f"a table of its declared shape {shape}", actual=actual)
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

    def select_rows(self, table: GroupTable, spec: NodeSpec, rows: int) -> Tensor:
        """A table of a group without latent choices as `[row of the batch of states, node, *shape]`."""
        (layout, values), shape = table, table[1].shape[table[0].rank :]
        return self._select_dims((layout, values), spec, {}, None, tuple(shape)).reshape(rows, -1, *shape)

    @torch.no_grad()
    def _fill_tables(self, table: str, specs: Sequence[NodeSpec]) -> None:
        """Compute the missing tables, all in one pass of the net."""
        if self.previous is not None:  # tables that the intervention does not change
            for key in ((table, spec.group.index) for spec in specs):
                if key not in self._tables and key in self.previous._tables and key[1] not in self._changed_groups:
                    self._tables[key] = self.previous._tables[key]
        missing = [spec for spec in specs if (table, spec.group.index) not in self._tables]
        if missing:
            ancestral = self.model.network.graph.ancestral_set([spec.group.index for spec in missing])
            execution = self.execute(get_output_groups(table, missing), ancestral)
            for spec in missing:
                self._tables[table, spec.group.index] = compute_table(table, spec, execution)

    def execute(self, outputs: Sequence[int], ancestral_set: set[int]) -> ExecutionState:
        """The execution state with the values of some groups, after interventions and evidence on their ancestors."""
        check_cancelled()
        request = self.request_pass(outputs, ancestral_set)
        known = {**request.known, **self._reuse_values(set(outputs), request.known)}
        return self.module.execute(replace(request, known=known))[0]

    def _reuse_values(self, outputs: set[int], fixed: Collection[int]) -> dict[int, Tensor]:
        """The known values of groups: those of earlier passes, and those before the intervention that it does not
        change; only groups that other groups read are included.
        """
        if self.states or not (self._tables or self.previous):  # a batch reuses nothing
            return {}
        network, model = self.model.network, self._fixed_model
        changed = frozenset[int]() if self.previous is None else self._changed_groups
        set_groups = {model.ground.group_of(node).index for node in (*model.do, *model.attention_rows)}
        known: list[NodeSpec] = []
        unchanged: list[NodeSpec] = []
        visited: set[int] = set()
        stack = list(outputs)
        while stack:
            index = stack.pop()
            spec = network.specs[index]
            if index in visited or index in fixed:
                continue
            visited.add(index)
            if self._is_reusable(spec) and index not in set_groups and ("value", index) in self._tables:
                known.append(spec)
            elif self.previous is not None and index not in changed:
                unchanged += [spec] if self._is_reusable(spec) else []
            else:
                stack.extend(edge.parent for edge in network.graph.in_edges[index])
        values = self._read_tables(known)
        if self.previous is not None and self.previous.find_table_fault("value", unchanged, ()) is None:
            self.previous._fill_tables("value", unchanged)
            values |= self.previous._read_tables(unchanged)
        # NaN is computed again, so that the error names the node.
        return {} if any(bool(value.isnan().any()) for value in values.values()) else values

    def _is_reusable(self, spec: NodeSpec) -> bool:
        """Whether the table of values of a group has no dims of choices."""
        is_value = spec.tpm.kind == "deterministic" and bool(spec.parents)
        return is_value and not has_ancestor_choices(self.model.network, [spec.group.index])

    def _read_tables(self, specs: Sequence[NodeSpec]) -> dict[int, Tensor]:
        """The computed values of some groups, by index: `[1, *plates, word, *shape]`."""
        tables = [self._tables["value", spec.group.index] for spec in specs]
        tensors = (self._select_dims(t, m, {}, None, m.shape)[None] for t, m in zip(tables, specs, strict=True))
        return {spec.group.index: value for spec, value in zip(specs, tensors, strict=True)}

    @cached_property
    def _changed_groups(self) -> set[int]:
        """The groups whose interventions or fixed states were added or removed, and all their descendants."""
        assert self.previous is not None
        models = (self._fixed_model, self.previous._fixed_model)
        after, before = ({**model.do, **model.attention_rows} for model in models)
        nodes = {n for n in {**after, **before} if n not in after or n not in before or not after[n].equal(before[n])}
        groups = {self.model.ground.group_of(node).index for node in nodes}
        return groups | self.model.network.graph.descendants(groups)


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
            hint="For the most probable states of readouts, pass nodes=",
        )
    return nodes


# --------------------------------------------------------------------------------------------------------------------
# The state of one sentence: its tensors, its interventions and its evidence; from these, its model and its values.


@dataclass(frozen=True, eq=False, repr=False)
class SentenceState:
    """The state of a `Sentence`: the argument of every function that computes a query about it.

    The state is frozen: `with_interventions` and `with_evidence` return a new state. `model` and `evaluator` are
    computed from the fields on first use.

    Args:
        module: The compiled net, in evaluation mode.
        encoded: The sentence as tensors.
        interventions: The value or the attention row to which `do` sets each node, by ground id.
        evidence: The observed value of each node, by ground id.
        previous: The evaluator before the last `do` or evidence; values that these do not change are reused.
        budget: The maximum number of joint states of choices that a query of probabilities computes.
        atol: The absolute tolerance of evidence on nodes that are functions of their parents.

    >>> import bnet_transformer as bt
    >>> state = bt.bayesuvius(dim=4).sentence("the cat sat").do(c=1).state
    >>> len(state.ground), state.interventions, state.tokens
    (19, {0: tensor(1)}, {'': ('the', 'cat', 'sat')})
    """

    module: CompiledModule
    encoded: EncodedSentence
    interventions: Mapping[int, Tensor | AttentionRow] = field(default_factory=dict)
    evidence: Mapping[int, Tensor] = field(default_factory=dict)
    previous: NodeEvaluator | None = None
    budget: int = BUDGET
    atol: float = ATOL

    @property
    def network(self) -> Network:
        """The declaration with its parameters."""
        return self.module.network

    @property
    def tokens(self) -> Tokens:
        """The tokens of each stack."""
        return self.encoded.tokens

    @property
    def ground(self) -> GroundGraph:
        """The ground graph after all interventions."""
        return self.model.ground

    @cached_property
    def model(self) -> GroundModel:
        """The ground model after all interventions: ground graph, inputs, set values."""
        ground = GroundGraph(self.network.graph, self.encoded.word_counts)
        return GroundModel(self.network, ground, self.encoded.given).surgery(self.interventions)

    @cached_property
    def evaluator(self) -> NodeEvaluator:
        """The evaluator of nodes; it computes each node group once."""
        values = self.network.parameters.values()
        if values and all(value.is_meta for value in values):
            raise BNetError("net: its parameters are on the device meta and have no values")
        return NodeEvaluator(self.module, self.model, self.evidence, self.previous)

    def drop_previous(self) -> SentenceState:
        """The same state with its computed values, without those of the state before it, which then can be freed."""
        state = replace(self, previous=None)
        evaluator = replace(self.evaluator, previous=None)
        vars(state).update(model=self.model, evaluator=evaluator)
        return state

    def resolve_interventions(self, nodes: Mapping[str, object]) -> dict[int, Tensor | AttentionRow]:
        """The values to which nodes are set, by ground id.

        Args:
            nodes: A mapping from a name, group, role or pattern to a value that `Sentence.do` accepts.

        Returns:
            A value or an attention row for each node.
        """
        requested = expand_names(self.model, "do", parse_entries(nodes))
        relative = {node: value for node, value in requested.items() if is_relative(value)}
        result = {n: resolve_value(self.model, n, value) for n, value in requested.items() if n not in relative}
        if not relative:
            return result
        # A relative value uses the value of a node after all other interventions of the same call.
        state = self

        def evaluate(resolved: Mapping[int, Tensor]) -> Callable[[int], Tensor]:
            nonlocal state
            interventions = {**self.interventions, **result, **resolved}
            evidence = {node: value for node, value in self.evidence.items() if node not in interventions}
            state = replace(self, interventions=interventions, evidence=evidence, previous=state.evaluator)
            return state.evaluator.read_value

        return result | resolve_relative(self.model, relative, evaluate)

    def with_interventions(self, nodes: Mapping[str, object]) -> SentenceState:
        """The state after `do`.

        Args:
            nodes: A mapping from a name, group, role or pattern to a value that `Sentence.do` accepts.

        Returns:
            A state with these interventions and those of this state; a new intervention on a node replaces the old one.

        Raises:
            EvidenceError: A node has evidence.
        """
        interventions = self.resolve_interventions(nodes)
        self._check_disjoint(interventions, self.evidence)
        return replace(self, interventions={**self.interventions, **interventions}, previous=self.evaluator)

    def without_interventions(self, names: Collection[str] = ()) -> SentenceState:
        """The state without some interventions.

        Args:
            names: Names, groups, roles or patterns of the nodes whose interventions are removed; all if empty.

        Returns:
            The new state.

        Raises:
            BNetError: These nodes have no intervention.
        """
        nodes = {node for name in names for node in find_family(self.model.ground, name).nodes} or set(
            self.interventions
        )
        if not nodes & self.interventions.keys():
            expected = "the name of a node that is set by do"
            raise BNetError("undo", expected=expected, actual=", ".join(names) or "a sentence without interventions")
        interventions = {node: value for node, value in self.interventions.items() if node not in nodes}
        return replace(self, interventions=interventions, previous=None)

    def with_evidence(self, nodes: Mapping[str, object] | None) -> SentenceState:
        """The state with more evidence.

        Args:
            nodes: A mapping from a name or a pattern to a value, a state or a label, for each of its nodes or one for
                all; None for no further evidence.

        Returns:
            A state with this evidence and that of this state.

        Raises:
            EvidenceError: A node is set, or has different evidence.
        """
        ids = expand_names(self.model, "evidence", check_mapping("evidence", nodes))
        self._check_disjoint(self.interventions, ids)
        evidence = {node: encode_value(self.model, node, value, evidence=True) for node, value in ids.items()}
        for node, value in evidence.items():
            if node in self.evidence and not torch.equal(value, self.evidence[node]):
                name, old = self.model.ground.name(node), self.evidence[node].tolist()
                raise EvidenceError(f"{name}: two different observed values, {old} and {value.tolist()}")
        state = replace(self, evidence={**self.evidence, **evidence}, previous=vars(self).get("evaluator"))
        vars(state)["model"] = self.model  # evidence changes no arrow, so both states have the same model
        return state

    def _check_disjoint(self, interventions: Collection[int], evidence: Collection[int]) -> None:
        """Raise an error for an intervention and evidence on the same node."""
        for node in set(interventions) & set(evidence):
            raise EvidenceError(f"{self.model.ground.name(node)}: set it by do or observe it, not both")

    def with_limits(self, budget: int | None = None, atol: float | None = None) -> SentenceState:
        """The state with another maximum number of joint states, or another tolerance of evidence."""
        budget = self.budget if budget is None else check_int("budget", budget)
        atol = self.atol if atol is None else check_float("atol", atol, minimum=0)
        state = replace(self, budget=budget, atol=atol)
        vars(state).update({name: vars(self)[name] for name in ("model", "evaluator") if name in vars(self)})
        return state

    def query(self, nodes: Collection[int] = ()) -> Query:
        """A query about the probabilities of nodes, by ground id, given the evidence and within the limits."""
        return Query(self.module, self.model, self.evidence, tuple(nodes), self.budget, self.atol)

    def posterior_query(self, name: object, evidence: Mapping[str, object] | None) -> Query:
        """The query of a posterior.

        Args:
            name: The name of a discrete node, or several names.
            evidence: Evidence in addition to that of this state.

        Returns:
            The query.
        """
        nodes = [self.model.ground.id(item) for item in parse_names("name", name)]
        if not nodes:
            raise BNetError("name", expected="the name of a node, or several names")
        query = self.with_evidence(evidence).query(nodes)
        for node in nodes:
            check_discrete_node(self.model, node)
        return query

    def ranked_states_query(self, names: object, evidence: Mapping[str, object] | None) -> Query:
        """The query of the most probable states of discrete nodes, by name, node group, role or pattern.

        Args:
            names: One name or several; nodes of a group or a pattern that are set by `do` are left out. None for all
                latent choices.
            evidence: Evidence in addition to that of this state.

        Returns:
            The query.
        """
        if names is None:
            return self.with_evidence(evidence).query(find_explained_nodes(self.model))
        nodes: list[int] = []
        for name in parse_names("nodes", names):
            matches = find_family(self.model.ground, name).nodes
            nodes += matches if len(matches) == 1 else [node for node in matches if node not in self.model.do]
        if not nodes:
            raise BNetError("nodes", expected="at least one node that is not set by do")
        for node in nodes:
            check_discrete_node(self.model, node)
        return self.with_evidence(evidence).query(dict.fromkeys(nodes))

    def selection(
        self,
        *,
        weights: bool = True,
        slices: int | Collection[int] | None = None,
        words: object = None,
        heads: int | Collection[int] | None = None,
    ) -> NodeSelection:
        """A part of the ground graph.

        Args:
            weights: Whether selectors and weights are included.
            slices: The indices of the included slices; None for all.
            words: The included words, by index or as words, or a mapping from stack to these; None for all.
            heads: The indices of the included heads; None for all.

        Returns:
            The selection of nodes.
        """
        chosen = None if slices is None else parse_slices(slices, self.network)
        sizes, plates, selected_words = self.network.graph.plate_sizes, {}, {}
        if heads is not None:
            if "head" not in sizes:
                raise BNetError("heads: the net has no plate of heads")
            plates["head"] = parse_indices("heads", heads, sizes["head"])
        by_stack = words if isinstance(words, Mapping) else dict.fromkeys(self.tokens, words)
        for stack, selected in by_stack.items():
            if stack not in self.tokens:
                raise unknown_name_error("stack", stack, self.tokens)
            if selected is not None:
                selected_words[stack] = parse_words(self.tokens[stack], selected)
        return NodeSelection(chosen, selected_words, plates, weights)

    def labels(self, node: int) -> Labels | None:
        """The labels of the states of a node: its labels, words of the sentence or words of the vocabulary.

        Args:
            node: The ground id of the node.

        Returns:
            The labels; None for a node without labels.
        """
        network, spec = self.network, self.model.spec(node)
        if spec.tpm.kind != "discrete":
            return None
        if spec.tpm.states is None:
            return as_labels(self.tokens[network.get_source_stack(spec)])
        labels = getattr(spec.tpm, "labels", None)
        if labels is None and not network.graph.out_edges[spec.group.index]:
            labels = network.vocabularies.get(spec.group.stack)
        return None if labels is None or len(labels) != spec.tpm.states else as_labels(labels)

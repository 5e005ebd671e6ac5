"""The algorithm `variable elimination`: exact inference on the factor graph of one sentence.

The variables are single nodes: the latent choices of a query. (`elimination`, in the module of that name, eliminates
whole node groups; it is faster, but does not apply if a value depends on the choices of several words, or if several
nodes are requested.) The factors are `log P(choice | parents)` of each choice and the likelihood of each observed node;
the scope of a factor contains the choices that determine it through nodes that are functions of their parents. So the
cost depends on which choices occur together, not on the product of all their states: a chain along n words with K
states has n tables of K^2 entries, where enumeration has K^n joint states.

`build_factor_graph` finds the scopes without computing a number. `FactorGraph.tables` evaluates the factors by the
compiled net, and `contraction` eliminates the variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer._core.process import check_memory
from bnet_transformer.compiler.gather import group_evidence
from bnet_transformer.cost.net_cost import count_plan_flops
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, BudgetError, format_count
from bnet_transformer.graph.traversal import CutMarks, Marks, mark_nodes, propagate_marks
from bnet_transformer.inference.contraction import (
    EliminationOrder,
    JointRows,
    LogTable,
    compute_joint_table,
    compute_marginals,
    draw_states,
    find_best_states,
    find_constrained_order,
    find_elimination_order,
    sum_out,
)
from bnet_transformer.inference.factors import LOG_ZERO, align_evidence, evidence_log_prob, state_log_probs
from bnet_transformer.inference.plan import Fault, Plan, format_nodes
from bnet_transformer.inference.query import Query, iter_chunks, with_sentence_scope
from bnet_transformer.inference.values import NodeEvaluator, get_output_groups
from bnet_transformer.reference import GroundModel, ReferenceRun, is_close

R = TypeVar("R")
LANE_BITS = 64
ALL_LANES = ~np.uint64(0)
BUDGET_HINT = (
    "Raise the budget (s.limits(budget=...)), set or observe some of these nodes, or use sample(n) of a sentence "
    "without evidence, which is approximate"
)


@dataclass(frozen=True)
class FactorBatch:
    """The factors of one node group, whose tables one batch of the compiled net computes.

    Attributes:
        spec: The node group.
        nodes: The nodes with a factor: latent choices and observed nodes.
        parents: For each node the variables that determine its distribution.
        states: Their states in each row of the batch.
    """

    spec: NodeSpec
    nodes: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...]
    states: JointRows

    @property
    def rows(self) -> int:
        """The number of rows of the batch."""
        return self.states.num_rows


@dataclass(frozen=True)
class FactorGraph:
    """The factor graph of a query: its variables and the scopes of its factors.

    Attributes:
        query: The query, without evidence on its requested nodes.
        evaluator: The evaluator in which each choice has a state; a batch has other states of the variables.
        variables: The latent choices, by ground id.
        supports: The possible states of each variable: those that agree with evidence on it.
        batches: The factors of each node group.
    """

    query: Query
    evaluator: NodeEvaluator
    variables: tuple[int, ...]
    supports: tuple[tuple[int, ...], ...]
    batches: tuple[FactorBatch, ...]

    @cached_property
    def positions(self) -> dict[int, int]:
        """The position of each variable, by ground id."""
        return {node: k for k, node in enumerate(self.variables)}

    @cached_property
    def sizes(self) -> list[int]:
        """The number of possible states of each variable."""
        return [len(support) for support in self.supports]

    @cached_property
    def retained(self) -> list[int]:
        """The positions of the requested nodes."""
        return [self.positions[node] for node in self.query.nodes]

    @property
    def rows(self) -> int:
        """The number of rows of all batches: evaluations of the net."""
        return sum(batch.rows for batch in self.batches)

    def get_scope(self, batch: FactorBatch, k: int) -> tuple[int, ...]:
        """The scope of factor k of a batch: its parents and itself, without variables of a single possible state."""
        variable = self.positions.get(batch.nodes[k])
        if variable is None or self.sizes[variable] == 1:
            return batch.parents[k]
        return tuple(sorted({*batch.parents[k], variable}))

    @cached_property
    def scopes(self) -> list[tuple[int, ...]]:
        """The scopes of all factors."""
        return [self.get_scope(batch, k) for batch in self.batches for k in range(len(batch.nodes))]

    @cached_property
    def order(self) -> EliminationOrder:
        """The order in which all variables except the requested nodes are eliminated."""
        return find_elimination_order(self.scopes, self.sizes, self.retained)

    @cached_property
    def full_order(self) -> EliminationOrder:
        """The order in which all variables are eliminated."""
        return find_elimination_order(self.scopes, self.sizes)

    @cached_property
    def constrained_orders(self) -> tuple[EliminationOrder, EliminationOrder]:
        """The orders in which first all other variables are eliminated, then the requested nodes."""
        return find_constrained_order([*self.scopes, *((k,) for k in self.retained)], self.sizes, self.retained)

    def format_variables(self, positions: Iterable[int]) -> str:
        """The names of some variables; a long list is shortened."""
        return format_nodes(self.query.model, [self.variables[k] for k in positions])

    def find_excess(self, *orders: EliminationOrder) -> BudgetError | None:
        """The error for a batch or for a joint scope of an elimination with more joint states than the budget."""
        budget = self.query.budget
        for order in orders:
            if order.states > budget:
                names = self.format_variables(order.scope)
                return excess_error(f"at most {format_count(budget)} joint states of {names}", order.states)
        for batch in self.batches:
            if batch.rows > budget:
                k = max(range(len(batch.nodes)), key=lambda k: len(batch.parents[k]))
                node, names = format_nodes(self.query.model, [batch.nodes[k]]), self.format_variables(batch.parents[k])
                factors = f"the factors of {batch.spec.group.name} ({node}: {names})"
                return excess_error(f"at most {format_count(budget)} joint states for {factors}", batch.rows)
        return None

    def plan(self, question: str, reason: str, run: Callable[[], R], *orders: EliminationOrder) -> Plan[R]:
        """The plan of variable elimination, with the cost of some elimination orders."""
        names = [self.query.model.ground.name(node) for node in self.variables]
        largest = max(orders, key=lambda order: order.states)
        return Plan(
            question,
            "variable elimination",
            reason,
            run,
            states=largest.states,
            rows=self.rows,
            entries=sum(order.entries for order in orders),
            order=tuple(names[k] for order in orders for k in order.variables),
            scope=tuple(names[k] for k in largest.scope),
            choices=self.variables,
            count_flops=self.count_flops,
        )

    def count_flops(self) -> int | None:
        """The floating-point operations of the passes of all batches."""
        module, words, counts = self.evaluator.module, self.query.model.ground.word_counts, list[int | None]()
        for batch in self.batches:
            structure = self.evaluator.request_pass(*find_pass(self.query.model, batch.spec)).structure
            counts.append(count_plan_flops(module, structure, words, batch.rows))
        return None if None in counts else sum(filter(None, counts))

    @cached_property
    def is_possible(self) -> bool:
        """False if evidence excludes all states of a variable."""
        return all(self.supports)

    @cached_property
    @torch.no_grad()
    def tables(self) -> list[LogTable]:
        """The log tables of all factors."""
        if not self.is_possible:
            return [LogTable((), np.array(-np.inf))]
        entries = sum(math.prod(self.sizes[k] for k in scope) for scope in self.scopes)
        check_memory("tables of the choices", 16 * entries, "a smaller budget=, or fewer words")
        return [table for batch in self.batches for table in self._compute_tables(batch)]

    def compute_joint(self) -> Tensor:
        """`log P(nodes, evidence)` of the requested nodes, `[*states]`: -inf for states that the evidence excludes."""
        supports = [self.supports[k] for k in self.retained]
        table = compute_joint_table(self.tables, self.order, self.sizes, self.retained) if self.is_possible else ()
        values = torch.as_tensor(np.array(table)) if self.is_possible else torch.zeros([*map(len, supports)])
        return scatter_possible(self.query.model, self.query.nodes, supports, values)

    def compute_marginals(self) -> dict[int, Tensor] | None:
        """`P(node | evidence)` of each variable, `[state]` by ground id; None if the evidence is impossible."""
        total, logs = compute_marginals(self.tables, self.full_order, self.sizes)
        if total == -math.inf:
            return None
        marginals = {}
        for k, node in enumerate(self.variables):
            probs = torch.zeros(self.query.model.count_states(node), dtype=torch.float64)
            probs[list(self.supports[k])] = torch.from_numpy(np.exp(logs[k])) if k in logs else 1.0
            marginals[node] = probs / probs.sum()
        return marginals

    def draw(self, n: int, generator: torch.Generator) -> dict[int, Tensor] | None:
        """Samples of all variables from their joint posterior, `[sample]` by ground id; None if it does not exist."""

        def draw_uniforms() -> NDArray[np.float64]:
            return torch.rand(n, generator=generator, dtype=torch.float64).numpy()

        total, states = draw_states(self.tables, self.full_order, self.sizes, draw_uniforms)
        return None if total == -math.inf else self._restore_states(states, n)

    def find_best(self, count: int) -> tuple[dict[int, Tensor], Tensor]:
        """The most probable joint states of the requested nodes, summed over the other variables.

        Returns:
            The states, `[rank]` by ground id, and `log P(states, evidence)`, `[rank]`.
        """
        if not self.is_possible:
            return self._restore_states({}, 0), torch.zeros(0, dtype=torch.float64)
        summed, order = self.constrained_orders
        tables = sum_out(self.tables, summed.variables, self.sizes)
        indices, logs = find_best_states(tables, order, self.sizes, count)
        return self._restore_states(indices, len(logs)), torch.from_numpy(logs)

    def _restore_states(self, indices: Mapping[int, NDArray[np.int64]], rows: int) -> dict[int, Tensor]:
        """The states of variables, `[row]` by ground id, from indices of their possible states, by position."""
        zero, states = np.zeros(rows, dtype=np.int64), {}
        for k, node in enumerate(self.variables):
            support = np.array(self.supports[k] or (0,), dtype=np.int64)
            states[node] = torch.from_numpy(support[indices.get(k, zero)])
        return states

    def _compute_tables(self, batch: FactorBatch) -> list[LogTable]:
        """The log tables of one batch."""
        is_latent = np.array([node in self.positions for node in batch.nodes])
        latent, observed = self._compute_log_probs(batch, is_latent)
        columns = np.where(is_latent, is_latent.cumsum(), (~is_latent).cumsum()) - 1
        tables = []
        for k, (node, parents, column) in enumerate(zip(batch.nodes, batch.parents, columns, strict=True)):
            index = batch.states.find_rows(parents)
            if not is_latent[k]:
                tables.append(LogTable(parents, observed[index, column]))
                continue
            variable, scope = self.positions[node], self.get_scope(batch, k)
            values = latent[index, column][..., list(self.supports[variable])]  # [*states of the parents, state]
            values = np.moveaxis(values, -1, scope.index(variable)) if variable in scope else values[..., 0]
            tables.append(LogTable(scope, values))
        if any(np.isnan(table.values).any() for table in tables):
            query, device = self.query, self.query.model.network.device
            pairs = zip(self.variables, self.supports, strict=True)
            states = {node: torch.tensor(support[0], device=device) for node, support in pairs}
            run = ReferenceRun(query.model, {**query.fixed, **states})
            reference.log_joint(
                run, [n for n in batch.nodes if n in states], query.evidence, query.atol
            )  # names the node
            raise BNetError(batch.spec.group.name, expected="log probabilities that are numbers", actual="NaN")
        return tables

    def _compute_log_probs(
        self, batch: FactorBatch, is_latent: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The log probabilities of all states of latent nodes, and those of the observations of observed nodes.

        Args:
            batch: The factors of a group.
            is_latent: Whether each of its nodes is latent.

        Returns:
            `[row, latent node, state]` and `[row, observed node]`.
        """
        model, spec, evaluator = self.query.model, batch.spec, self.evaluator
        columns = torch.tensor(batch.nodes) - int(model.ground.offsets[spec.group.index])
        observed = [node for node, latent in zip(batch.nodes, is_latent, strict=True) if not latent]
        evidence = group_evidence(model, {node: self.query.evidence[node] for node in observed})
        states = {}
        for k, indices in batch.states.get_states().items():
            values = torch.from_numpy(np.array(self.supports[k])[indices])
            states[self.variables[k]] = values.to(model.network.device)
        parts = list[tuple[Tensor, Tensor]]()
        for chunk in iter_chunks(model, batch.rows, {spec.group.index}):
            run = evaluator.with_batched_states({n: state[chunk] for n, state in states.items()}, evaluator.module)
            size, execution = chunk.stop - chunk.start, run.execute(*find_pass(model, spec))
            latent_logs, observed_logs = torch.zeros(size, 0, 1), torch.zeros(size, 0)
            if len(observed) < len(batch.nodes):
                table = run.select_rows((execution.layout, state_log_probs(execution, spec)), spec, size)
                latent_logs = table[:, columns[torch.from_numpy(is_latent)]]
            for item in evidence.values():
                aligned = align_evidence(execution, spec, item)
                log_probs = evidence_log_prob(execution, spec.group.index, spec, aligned, self.query.atol)
                table = run.select_rows((execution.layout, log_probs), spec, size)
                observed_logs = table[:, columns[torch.from_numpy(~is_latent)]]
            parts.append((latent_logs.double().cpu(), observed_logs.double().cpu()))
        latent_table, observed_table = (torch.cat(logs).numpy() for logs in zip(*parts, strict=True))
        impossible = observed_table < LOG_ZERO / 2
        return latent_table, np.where(impossible, -np.inf, observed_table)


def find_pass(model: GroundModel, spec: NodeSpec) -> tuple[list[int], set[int]]:
    """The groups that determine the distribution, or the value, of a group, and those on which they depend."""
    outputs = get_output_groups("logits" if spec.tpm.is_random else "value", [spec])
    return outputs, model.network.graph.ancestral_set(outputs)


def build_factor_graph(query: Query) -> FactorGraph | Fault | BudgetError:
    """The factor graph of a query, or why there is none; nothing is computed.

    Args:
        query: The query. A requested node with evidence is a variable, whose possible states agree with the evidence.

    Returns:
        The factor graph; an obstacle if the compiled net cannot evaluate a factor; an error if one factor depends on
        more joint states of variables than the budget.
    """
    supports = find_supports(query)
    query = replace(query, evidence={n: v for n, v in query.evidence.items() if n not in supports})
    model, variables = query.model, tuple(supports)
    groups = model.ground.split_by_group([*variables, *query.evidence])
    discrete = [spec.group for spec in model.network.specs if spec.tpm.kind == "discrete"]
    barren = [node for group in discrete for node in model.ground.select_nodes(group).tolist()]
    zero = torch.zeros((), dtype=torch.long, device=model.network.device)
    states = {node: zero + support[0] for node, support in supports.items() if support}
    # States that are neither observed nor variables do not affect any factor (Shachter 1986).
    fixed = replace(model, do={**dict.fromkeys(barren, zero), **query.fixed, **states, **model.do})
    evaluator = NodeEvaluator(with_sentence_scope(query.module), fixed, {})
    for index in groups:
        spec = model.network.specs[index]
        fault, _ = evaluator.analyse_pass(*find_pass(model, spec), spec)
        if fault is not None:
            return fault
    counts = [len(support) for support in supports.values()]
    words, logs = locate_words(model, variables), np.log(np.maximum(counts, 1))
    arrived, batches, excess = propagate_variables(model, variables, counts), list[FactorBatch](), dict[int, str]()
    for index, nodes in sorted(groups.items()):
        is_parent = select_marks(model, arrived, nodes, len(variables))
        node_sizes = np.array([len(supports.get(node, (0,))) for node in nodes])
        largest = int((is_parent @ logs + np.log(np.maximum(node_sizes, 1))).argmax())
        scope = np.flatnonzero(is_parent[largest]).tolist()
        count = math.prod([counts[k] for k in scope]) * int(node_sizes[largest])
        if count > query.budget:
            joint = sorted({variables[k] for k in scope} | ({nodes[largest]} & supports.keys()))
            factor = model.ground.name(nodes[largest])
            excess[count] = f"{format_nodes(model, joint)}, which occur together in the factor of {factor}"
            continue
        scopes = np.split(is_parent.nonzero()[1], is_parent.sum(1).cumsum()[:-1])
        node_parents = tuple(tuple(scope.tolist()) for scope in scopes)
        rows = JointRows.build(node_parents, counts, words)
        batches.append(FactorBatch(model.network.specs[index], tuple(nodes), node_parents, rows))
    if excess:
        return excess_error(f"at most {format_count(query.budget)} joint states of {excess[max(excess)]}", max(excess))
    return FactorGraph(query, evaluator, variables, tuple(supports.values()), tuple(batches))


def find_supports(query: Query) -> dict[int, tuple[int, ...]]:
    """The possible states of each latent choice: those that agree with evidence on it.

    Several states of a choice can give its children the same vector. A requested node with evidence is a choice too.
    """
    supports = {}
    for node in query.without_target_evidence().choices:
        states = range(query.model.count_states(node))
        observed = query.evidence.get(node)
        if observed is None:
            supports[node] = tuple(states)
        elif not observed.is_floating_point():
            supports[node] = (int(observed),)
        else:
            device = query.model.network.device
            runs = (ReferenceRun(query.model, {node: torch.tensor(state, device=device)}) for state in states)
            values = (run.value(node) for run in runs)
            supports[node] = tuple(k for k, v in enumerate(values) if is_close(v, observed, query.atol, v.dim()))
    return supports


def scatter_possible(
    model: GroundModel, nodes: Sequence[int], supports: Sequence[Sequence[int]], values: Tensor
) -> Tensor:
    """The log probabilities of all joint states of some nodes, `[*states]`, from those of their possible states."""
    logs = torch.full([model.count_states(node) for node in nodes], -math.inf, dtype=torch.float64)
    logs[np.ix_(*supports)] = values.double()
    return logs


def propagate_variables(model: GroundModel, variables: Sequence[int], counts: Sequence[int]) -> dict[int, Marks]:
    """The variables that determine each node through nodes that are functions of their parents, as bits.

    Args:
        model: The sentence.
        variables: The variables by ground id: latent choices, or nodes with unknown values.
        counts: The number of possible states of each variable; variables with one possible state are omitted.

    Returns:
        For each group `[*plates, word, lanes]`: bit k % 64 of lane k // 64 is set if variable k is a parent.
    """
    ground, network = model.ground, model.network
    lanes = max(1, -(-len(variables) // LANE_BITS))
    variable_marks: dict[int, Marks] = {}
    for k, node in enumerate(variables):
        if counts[k] > 1:
            index = ground.group_of(node).index
            marks = variable_marks.setdefault(index, np.zeros((*ground.shapes[index], lanes), dtype=np.uint64))
            marks.reshape(-1, lanes)[node - int(ground.offsets[index]), k // LANE_BITS] |= np.uint64(1 << k % LANE_BITS)
    cut = CutMarks(
        mark_nodes(ground, ground.cut_nodes, ALL_LANES),
        mark_nodes(ground, ground.retained_parents.keys() - ground.cut_nodes, ALL_LANES),
        ground,
    )
    values = dict(variable_marks)  # the variables that determine the value of each node
    arrived: dict[int, Marks] = {}
    for component in network.graph.components:
        has_changed = True
        while has_changed:  # a recurrent component is repeated until there are no new marks
            has_changed = False
            for index in component:
                edges = [edge for edge in network.graph.in_edges[index] if edge.parent in values]
                if not edges:
                    continue
                parts = [propagate_marks(ground, edge, values[edge.parent], cut, up=False) for edge in edges]
                marks = reduce(np.bitwise_or, parts)
                if index in arrived and np.array_equal(arrived[index], marks):
                    continue
                arrived[index] = marks
                if network.specs[index].tpm.kind == "deterministic":
                    values[index] = marks | variable_marks[index] if index in variable_marks else marks
                    has_changed = True
    return arrived


def select_marks(model: GroundModel, marks: Mapping[int, Marks], nodes: Sequence[int], count: int) -> NDArray[np.bool_]:
    """The marks of some nodes of one group as booleans, `[node, variable]`."""
    index = model.ground.group_of(nodes[0]).index
    if index not in marks:
        return np.zeros((len(nodes), count), dtype=bool)
    rows = marks[index].reshape(-1, marks[index].shape[-1])[np.array(nodes) - int(model.ground.offsets[index])]
    little = np.ascontiguousarray(rows).astype("<u8").view(np.uint8)
    return np.unpackbits(little, axis=-1, bitorder="little")[:, :count].astype(bool)


def locate_words(model: GroundModel, nodes: Iterable[int]) -> list[tuple[int, int]]:
    """For each node its word, -1 without a word, and its ground id: keys that sort nodes by word."""
    located = ((node, model.ground.unravel_index(node)) for node in nodes)
    return [(-1 if group.word_stack is None else index[-1], node) for node, (group, index) in located]


def excess_error(expected: str, states: int) -> BudgetError:
    """The error for more joint states than the budget."""
    return BudgetError("exact inference", expected=expected, actual=format_count(states), hint=BUDGET_HINT)

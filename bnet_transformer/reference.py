"""The reference: evaluation node by node over the ground graph. It defines what a declaration means."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal as TorchNormal

from bnet_transformer._core.naming import WORD, Reach
from bnet_transformer._core.results import Fields, register_codec
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError, format_count
from bnet_transformer.graph.ground_graph import GroundGraph, RetainedParents
from bnet_transformer.graph.traversal import ancestors
from bnet_transformer.tpm import Attention, EvalContext

# --------------------------------------------------------------------------------------------------------------------
# The ground model: a sentence with its interventions, and the parents and latent choices of its nodes.


@dataclass(frozen=True)
class AttentionRow:
    """An intervention on an attention node: `weights[j]`, for all words j, replace `P(j | i)`."""

    weights: Tensor


K = TypeVar("K")
Interventions = Mapping[int, Tensor | AttentionRow]


@dataclass(frozen=True)
class GroundModel:
    """A sentence with its inputs and interventions.

    `inputs` contains the values of input nodes, `[*plates, word, *shape]` for each group; `do` contains the value (for
    a discrete node the state) of each node that is set; `attention_rows` contains the row of each node whose attention
    is set. Nodes are identified by their ground ids.
    """

    network: Network
    ground: GroundGraph
    inputs: Mapping[str, Tensor]
    do: Mapping[int, Tensor] = field(default_factory=dict)
    attention_rows: Mapping[int, Tensor] = field(default_factory=dict)

    def spec(self, node: int) -> NodeSpec:
        """The spec of a node."""
        return self.network.specs[self.ground.group_of(node).index]

    def count_states(self, node: int) -> int:
        """The number of states of a discrete node."""
        return self.network.count_states(self.ground.group_of(node).index, self.ground.word_counts)

    def surgery(self, interventions: Interventions) -> GroundModel:
        """The same sentence with further interventions; a later intervention on a node replaces the earlier one."""
        if not interventions:
            return self
        do = {node: value for node, value in self.do.items() if node not in interventions}
        rows = {node: row for node, row in self.attention_rows.items() if node not in interventions}
        do |= {node: value for node, value in interventions.items() if isinstance(value, Tensor)}
        rows |= {node: value.weights for node, value in interventions.items() if isinstance(value, AttentionRow)}
        retained = {node: _retained_reaches(self.spec(node)) for node in rows}
        return replace(self, ground=self.ground.surgery(do, retained), do=do, attention_rows=rows)

    def to_float64(self) -> GroundModel:
        """The same sentence with parameters and values in float64."""
        names = ("inputs", "do", "attention_rows")
        values: dict[str, Any] = {name: cast_to_float64(getattr(self, name)) for name in names}
        return replace(self, network=self.network.to(torch.float64), **values)


def cast_to_float64(values: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """Real values in float64; states unchanged."""
    return {key: value.double() if value.is_floating_point() else value for key, value in values.items()}


def find_slot_parents(
    model: GroundModel, spec: NodeSpec, index: tuple[int, ...], parent: ParentSpec, states: Mapping[int, Tensor]
) -> tuple[tuple[int, ...], list[int], list[int]]:
    """The ground parents in one slot of a node: the shape of the collection, the ids, and the words of the collection.

    The id -1 is a missing word, whose value is zero (or state 0): the word before the first one, or a word out of reach
    that a selector picks (with probability zero).
    """
    ground, parent_group = model.ground, model.network.specs[parent.index].group
    node_indices = dict(zip(ground.axes(spec.group), index, strict=True))
    options: list[list[int]] = []
    words: list[int] = []
    for plate in parent_group.plates:
        selected = _selected_entry(model, spec, index, parent, plate, states)
        if plate in parent.over and selected is None:
            options.append(list(range(ground.template.plate_sizes[plate])))
        else:
            options.append([node_indices[plate] if selected is None else selected])
    if parent_group.word_stack is not None:
        reads = parent.reach.matrix(ground.count_words(spec.group.index), ground.count_words(parent.index))
        words = np.flatnonzero(reads[node_indices.get(WORD, 0)]).tolist()
        selected = _selected_entry(model, spec, index, parent, WORD, states)
        words = words if selected is None else [word for word in words if word == selected]
        if not words and WORD not in parent.over:
            return (), [-1], []
        options.append(words)
    shape = tuple(
        len(option) for axis, option in zip(ground.axes(parent_group), options, strict=True) if axis in parent.over
    )
    return shape, [ground.ravel_index(parent_group, at) for at in itertools.product(*options)], words


def _selected_entry(
    model: GroundModel,
    spec: NodeSpec,
    index: tuple[int, ...],
    parent: ParentSpec,
    plate: str,
    states: Mapping[int, Tensor],
) -> int | None:
    """The entry along a plate that a selector picks; None without a selector."""
    selector = dict(parent.pick).get(plate)
    if selector is None:
        return None
    selector_spec, node_indices = (
        model.network.specs[selector],
        dict(zip(model.ground.axes(spec.group), index, strict=True)),
    )
    selector_index = tuple(node_indices[axis] for axis in model.ground.axes(selector_spec.group))
    node = model.ground.ravel_index(selector_spec.group, selector_index)
    state = model.do.get(node, states.get(node))
    if state is None and selector_spec.tpm.kind == "input":
        state = model.inputs[selector_spec.group.name][selector_index]
    if state is None:
        raise EvidenceError(f"{model.ground.name(node)}: the node is random and has no state")
    return int(state)


def evaluation_order(
    model: GroundModel, node: int, computed: Mapping[int, object], states: Mapping[int, Tensor]
) -> list[int]:
    """The nodes to compute for a value, parents first; the parents of a node with a given state are omitted."""
    order: list[int] = []
    visited: set[int] = set()
    stack = [(node, False)]
    while stack:
        current, is_expanded = stack.pop()
        if is_expanded:
            order.append(current)
        elif current not in visited and current not in computed:
            visited.add(current)
            stack.append((current, True))
            node_parents = [] if current in states else parents(model, current)
            stack.extend((parent, False) for parent in node_parents if parent not in computed)
    return order


def parents(model: GroundModel, node: int) -> list[int]:
    """The parents of a node after interventions; a node that is set has none."""
    return [] if node in model.do else model.ground.parents(node)


def attention_parents(model: GroundModel, node: int) -> list[int]:
    """The parents of a node on which `P(j | i)` depends."""
    spec, _ = locate_node(model, node)
    slots = spec.tpm.attention_slots() if node not in model.attention_rows else ()
    filled = [parent_spec for parent_spec in spec.parents if parent_spec.slot in slots]
    groups = {index for parent_spec in filled for index in (parent_spec.index, *dict(parent_spec.pick).values())}
    return [parent for parent in parents(model, node) if model.ground.group_of(parent).index in groups]


def find_open_choices(
    model: GroundModel, nodes: Iterable[int], fixed: Mapping[int, Tensor], *, include_ancestors: bool = False
) -> list[int]:
    """The discrete random nodes without a fixed state that determine the values of `nodes`, sorted.

    `include_ancestors` adds those that determine their distributions.
    """
    discrete = frozenset(m.group.index for m in model.network.specs if m.tpm.kind == "discrete")
    start = [node for node in nodes if node not in model.do]
    blocked_groups, blocked_nodes = ((), ()) if include_ancestors else (discrete, fixed)
    reached = {*start, *ancestors(model.ground, start, blocked_groups, blocked_nodes)}
    candidates = (node for node in reached if node not in fixed and node not in model.do)
    return sorted(node for node in candidates if model.ground.group_of(node).index in discrete)


def find_readable_words(model: GroundModel, node: int) -> list[int]:
    """The words that are possible states of a node whose state is a word that it reads."""
    spec, index = locate_node(model, node)
    parent = spec.word_parents[0]
    words = model.ground.word_counts[model.network.get_source_stack(spec)]
    row = index[-1] if spec.group.word_stack is not None else 0
    reads = parent.reach.matrix(model.ground.count_words(spec.group.index), words)
    readable: list[int] = np.flatnonzero(reads[row]).tolist()
    return readable


def get_fixed(model: GroundModel, evidence: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The evidence that fixes the state or value of a random node."""
    return {node: observed for node, observed in evidence.items() if is_fixed(model, node, observed)}


def is_fixed(model: GroundModel, node: int, observed: Tensor) -> bool:
    """True where evidence fixes the state or value of a random node."""
    kind = model.spec(node).tpm.kind
    return kind == "continuous" or (kind == "discrete" and not observed.is_floating_point())


def _retained_reaches(spec: NodeSpec) -> RetainedParents:
    """The groups (values and residual), with their reaches, that an attention node uses also if its row is set."""
    assert isinstance(spec.tpm, Attention)
    retained: dict[int, tuple[Reach, ...]] = {}
    for parent in spec.parents:
        if parent.slot in spec.tpm.mixed_slots():
            retained[parent.index] = tuple(dict.fromkeys((*retained.get(parent.index, ()), parent.reach)))
    return retained


def locate_node(model: GroundModel, node: int) -> tuple[NodeSpec, tuple[int, ...]]:
    """The spec of a node, and its index in the group."""
    group, index = model.ground.unravel_index(node)
    return model.network.specs[group.index], index


def _to_fields(model: GroundModel) -> Fields:
    """A sentence without its graph, which its word counts and its interventions determine."""
    parts = {"network": model.network, "word_counts": dict(model.ground.word_counts), "inputs": model.inputs}
    return {**parts, "do": model.do, "attention_rows": model.attention_rows}


def _from_fields(fields: Fields) -> GroundModel:
    """The sentence of `_to_fields`."""
    network, rows = fields["network"], fields["attention_rows"]
    model = GroundModel(network, GroundGraph(network.graph, fields["word_counts"]), fields["inputs"])
    return model.surgery({**fields["do"], **{node: AttentionRow(row) for node, row in rows.items()}})


STORED_TYPES = {
    "network": Network,
    "word_counts": Mapping[str, int],
    "inputs": Mapping[str, Tensor],
    "do": Mapping[int, Tensor],
    "attention_rows": Mapping[int, Tensor],
}
register_codec(GroundModel, _to_fields, lambda fields, trust: _from_fields(fields), STORED_TYPES)


# --------------------------------------------------------------------------------------------------------------------
# One run of the reference: the value, distribution and attention of each node, given a state of each random node.


class ReferenceRun:
    """One run: `states` contains the state of each random node, which determines all other values.

    `values` caches the values of nodes; a value that a caller stores there replaces the computed one.
    """

    def __init__(self, model: GroundModel, states: Mapping[int, Tensor]) -> None:
        self.model = model
        self.states = states
        self.values: dict[int, Tensor] = {}

    def value(self, node: int) -> Tensor:
        """The value of a node, as its children receive it."""
        if node not in self.values:
            for ancestor in evaluation_order(self.model, node, self.values, self.states):
                self.values[ancestor] = self._compute_value(ancestor)
        return self.values[node]

    def _compute_value(self, node: int) -> Tensor:
        """Compute the value of a node from the values of its parents."""
        spec, index = locate_node(self.model, node)
        fixed = self.model.do.get(node, self.states.get(node))
        if fixed is not None:
            is_state = spec.tpm.kind == "discrete" and not fixed.is_floating_point()
            return spec.tpm.emit(self._make_context(spec, index), fixed) if is_state else fixed
        if spec.tpm.kind == "input":
            return self.model.inputs[spec.group.name][index]
        if spec.tpm.is_random:
            name = self.model.ground.name(node)
            hint = f"Use tpm({name!r}) for its distribution, or observe or set it"
            raise EvidenceError(f"{name}: the node is random and has no value", hint=hint)
        if node in self.model.attention_rows:
            assert isinstance(spec.tpm, Attention)
            context, *parents = self._tpm_arguments(spec, index, spec.tpm.mixed_slots())
            value = spec.tpm.mix(self.model.attention_rows[node][context.read_indices["v."]], *parents)
        else:
            value = spec.tpm.value(*self._tpm_arguments(spec, index))
        if not isinstance(value, Tensor) or tuple(value.shape) != spec.shape:
            actual = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            subject = f"{self.model.ground.name(node)} ({type(spec.tpm).__name__})"
            raise BNetError(subject, expected=f"a value of its declared shape {spec.shape}", actual=actual)
        if bool(value.isnan().any()):
            raise BNetError(self.model.ground.name(node), expected="a value that is a number", actual="NaN")
        return value

    def distribution(self, node: int) -> Distribution:
        """`P(node | parents)`; a delta for inputs and for nodes that are set."""
        from pyro.distributions import Delta

        spec, index = locate_node(self.model, node)
        if node in {**self.model.do, **self.model.attention_rows} or spec.tpm.kind == "input":
            value = self.value(node)
            return Delta(value, event_dim=value.dim())
        context, *parents = self._tpm_arguments(spec, index)
        if spec.tpm.kind == "discrete" and spec.tpm.states is None:
            network = self.model.network
            scores = torch.full((self.model.count_states(node),), -math.inf, dtype=network.dtype, device=network.device)
            scores[next(iter(context.read_indices.values()))] = spec.tpm.logits(context, *parents)
            return torch.distributions.Categorical(logits=scores, validate_args=False)
        conditional: Any = spec.tpm.distribution(context, *parents)
        if spec.tpm.kind == "discrete" and conditional.param_shape[-1] != spec.tpm.states:
            subject = f"{self.model.ground.name(node)} ({type(spec.tpm).__name__})"
            raise BNetError(
                subject, expected=f"logits for {spec.tpm.states} states", actual=f"{conditional.param_shape[-1]}"
            )
        distribution: Distribution = conditional
        return distribution

    def log_prob(self, node: int) -> Tensor:
        """`log P(state | parents)` of a random node."""
        log_prob: Tensor = self.distribution(node).log_prob(self.states[node]).double()
        if bool(log_prob.isnan().any()):
            raise BNetError(self.model.ground.name(node), expected="a log probability that is a number", actual="NaN")
        return log_prob

    def attention(self, node: int) -> tuple[list[int], Tensor] | None:
        """The words to which a node attends, and `P(j | i)` over them; None if its TPM has no such distribution."""
        spec, index = locate_node(self.model, node)
        if node in self.model.attention_rows:
            parent = next(parent for parent in spec.parents if parent.slot == "v.")
            words = find_slot_parents(self.model, spec, index, parent, self.states)[2]
            return words, self.model.attention_rows[node][words]
        context, *parents = self._tpm_arguments(spec, index, spec.tpm.attention_slots())
        weights = spec.tpm.attention_weights(context, *parents)
        if weights is None:
            return None
        if bool(weights.isnan().any()):
            raise BNetError(self.model.ground.name(node), expected="attention P(j | i) of numbers", actual="NaN")
        return next(iter(context.read_indices.values())).tolist(), weights

    def _tpm_arguments(
        self, spec: NodeSpec, index: tuple[int, ...], slots: tuple[str, ...] | None = None
    ) -> tuple[EvalContext, *tuple[Tensor, ...]]:
        """The arguments of a node's TPM: the context, and the value in each slot; slots not in `slots` are empty."""
        read_indices, mask, missing, arguments = {}, {}, dict[int, Tensor](), []
        device = self.model.network.device
        for k, parent in enumerate(spec.parents):
            if slots is not None and parent.slot not in slots:
                arguments.append(torch.zeros(0))
                continue
            shape, ids, words = find_slot_parents(self.model, spec, index, parent, self.states)
            values = [self.value(node) if node >= 0 else None for node in ids]
            parent_spec = self.model.network.specs[parent.index]
            zero = torch.zeros(
                parent_spec.shape,
                dtype=torch.long if parent_spec.tpm.is_index_valued else self.model.network.dtype,
                device=device,
            )
            if spec.tpm_parents[k].is_optional:
                missing[k] = torch.tensor(ids == [-1], device=device)
            padded = [zero if value is None else value for value in values]
            arguments.append(
                torch.stack(padded or [zero])[: len(padded)].reshape(*shape, *zero.shape) if shape else padded[0]
            )
            if shape:
                indices = words if WORD in parent.over else list(range(shape[-1]))
                read_indices[parent.slot] = torch.tensor(indices, device=device)
                mask[parent.slot] = torch.ones(len(indices), dtype=torch.bool, device=device)
        return (self._make_context(spec, index, read_indices, mask, missing), *arguments)

    def _make_context(
        self,
        spec: NodeSpec,
        index: tuple[int, ...],
        read_indices: Mapping[str, Tensor] | None = None,
        mask: Mapping[str, Tensor] | None = None,
        missing: Mapping[int, Tensor] | None = None,
    ) -> EvalContext:
        """The context of a node: its parameters, its word, and what the caller passes."""
        plates = index[: len(spec.group.plates)]
        parameters = {name: value[plates] for name, value in self.model.network.get_parameters(spec).items()}
        word = torch.tensor(index[-1] if spec.group.word_stack is not None else 0, device=self.model.network.device)
        return EvalContext(
            parameters, word, read_indices or {}, mask or {}, dtype=self.model.network.dtype, missing=missing or {}
        )


# --------------------------------------------------------------------------------------------------------------------
# Exact inference by enumeration: one run of the reference for each joint state of the latent choices.


BUDGET = 2**16
RAISE_BUDGET = "raise the budget (s.limits(budget=...))"
ATOL = 1e-6
RTOL = {
    torch.float32: 2**-12,
    torch.float16: 2**-7,
    torch.bfloat16: 2**-4,
}  # measured: 2^11 eps, and 8 eps in half precision


def enumerate_runs(
    model: GroundModel, choices: list[int], fixed: Mapping[int, Tensor], budget: int = BUDGET
) -> Iterator[ReferenceRun]:
    """A run for each joint state of the choices."""
    check_joint_states(model, choices, budget)
    for states in itertools.product(*(range(model.count_states(node)) for node in choices)):
        chosen = (torch.tensor(state, device=model.network.device) for state in states)
        yield ReferenceRun(model, {**fixed, **dict(zip(choices, chosen, strict=True))})


def check_joint_states(model: GroundModel, choices: Sequence[int], budget: int) -> None:
    """Raise an error if the choices have more joint states than the budget."""
    count = math.prod(model.count_states(node) for node in choices)
    if count > budget:
        names = ", ".join(model.ground.name(node) for node in choices[:6]) + (", …" if len(choices) > 6 else "")
        raise BudgetError(
            "exact enumeration",
            expected=f"at most {format_count(budget)} joint states of {names}",
            actual=f"{format_count(count)} states",
            hint=f"Observe or set some of these nodes, {RAISE_BUDGET}, or, without evidence, use sample(n), which is "
            "approximate",
        )


def values(model: GroundModel, node: int, fixed: Mapping[int, Tensor], budget: int = BUDGET) -> Tensor:
    """The value of a node for each joint state of the choices that determine it: `[*states, *shape]`."""
    fixed = get_fixed(model, fixed)
    choices = find_open_choices(model, [node], fixed)
    stacked = torch.stack([run.value(node) for run in enumerate_runs(model, choices, fixed, budget)])
    return stacked.reshape((*(model.count_states(choice) for choice in choices), *stacked.shape[1:]))


def log_evidence(
    model: GroundModel,
    evidence: Mapping[int, Tensor],
    query: int | None = None,
    budget: int = BUDGET,
    atol: float = ATOL,
) -> Tensor:
    """`log P(evidence)`, or `log P(query = state, evidence)` for each state of a discrete query.

    Evidence on a node that is a function of its parents, or a vector as evidence on a choice, is impossible unless the
    computed value is close to it (`is_close`). The error for impossible evidence names the node.
    """
    fixed = {n: v for n, v in evidence.items() if is_fixed(model, n, v)}
    query_nodes = [] if query is None or query in evidence else [query]
    choices = find_open_choices(model, [*evidence, *query_nodes], fixed, include_ancestors=True)
    size = 1 if query is None else model.count_states(query)
    totals = torch.full((len(evidence) + 1, size), -math.inf, dtype=torch.float64)
    # Row k is the joint probability of the choices and the first k observations, summed over the choices. So the first
    # row that is zero shows which observation is impossible.
    for run in enumerate_runs(model, choices, fixed, budget):
        state = 0 if query is None else int(run.states[query])
        totals[:, state] = torch.logaddexp(totals[:, state], _log_terms(run, choices, evidence, atol).cumsum(0))
    for k in range(len(evidence)):
        if torch.logsumexp(totals[k + 1], 0) == -math.inf:
            raise impossible_evidence_error(model, evidence, k)
    return totals[-1] if query is not None else totals[-1, 0]


def impossible_evidence_error(model: GroundModel, evidence: Mapping[int, Tensor], position: int) -> EvidenceError:
    """The error for the first observation (number `position`) that has probability zero given those before it."""
    node = [*evidence][position]
    return EvidenceError(
        model.ground.name(node),
        expected="evidence that is possible in some state of the net",
        actual=f"a value of probability zero{' given the evidence before it' if position else ''}: "
        f"{evidence[node].tolist()}",
    )


def posterior(
    model: GroundModel, query: int, evidence: Mapping[int, Tensor], budget: int = BUDGET, atol: float = ATOL
) -> Tensor:
    """`P(query | evidence)` for a discrete node, by enumeration."""
    return torch.softmax(log_evidence(model, evidence, query, budget, atol), 0)


def _log_terms(run: ReferenceRun, choices: list[int], evidence: Mapping[int, Tensor], atol: float) -> Tensor:
    """`log P(choices)` and the log probability of each observation in the run: `[1 + evidence]`."""
    terms = [sum((run.log_prob(node) for node in choices), torch.zeros((), dtype=torch.float64))]
    for node, observed in evidence.items():
        if is_fixed(run.model, node, observed):
            terms.append(run.log_prob(node))
        else:
            computed = run.value(node)
            is_same = bool(is_close(computed, observed, atol, computed.dim()))
            terms.append(torch.tensor(0.0 if is_same else -math.inf, dtype=torch.float64))
    return torch.stack(terms)


def log_joint(run: ReferenceRun, choices: list[int], evidence: Mapping[int, Tensor], atol: float = ATOL) -> float:
    """`log P(choices, evidence)` of one run."""
    return float(_log_terms(run, choices, evidence, atol).sum())


def is_close(computed: Tensor, observed: Tensor, atol: float, event_dims: int) -> Tensor:
    """True where computed and observed values agree: `|computed - observed| <= atol + r largest` in every entry.

    The last `event_dims` dims are those of a node's value, and `largest` is the largest absolute entry of that node,
    computed or observed. r is the rounding of the floating type: 0 in float64.
    """
    dims = tuple(range(-event_dims, 0))
    greatest = torch.maximum(computed.detach().abs(), observed.abs())
    greatest = greatest.amax(dims, keepdim=True) if event_dims else greatest
    is_within = (computed - observed).abs() <= atol + RTOL.get(computed.dtype, 0.0) * greatest
    return is_within.all(dims) if event_dims else is_within


# --------------------------------------------------------------------------------------------------------------------
# Distributions and attention of single nodes by the reference, for all states of the choices on which they depend.


def check_discrete_node(model: GroundModel, node: int) -> None:
    """Raise an error for a node without a finite number of states."""
    spec = model.spec(node)
    if node in model.do:
        actual = f"a node that do() set to {model.do[node].tolist()}"
        raise BNetError(model.ground.name(node), expected="a random node", actual=actual)
    if spec.tpm.kind != "discrete":
        names = [m.group.name for m in model.network.specs if m.tpm.kind == "discrete"]
        raise BNetError(
            model.ground.name(node),
            expected="a discrete random node",
            actual=f"{'an' if spec.tpm.kind == 'input' else 'a'} {spec.tpm.kind} node ({type(spec.tpm).__name__})",
            allowed="nodes of " + ", ".join(names) if names else None,
            hint=None if names else "This net has no discrete random node",
        )


def conditional_distribution(model: GroundModel, node: int, evidence: Mapping[int, Tensor]) -> Distribution:
    """`P(node | parents)`, batched over the latent choices on which the parents depend: `[*states]`."""
    evidence = get_fixed(model, evidence)
    choices = find_open_choices(model, parents(model, node), evidence)
    sizes = [model.count_states(choice) for choice in choices]
    distributions = [run.distribution(node) for run in enumerate_runs(model, choices, evidence)]
    if not choices:
        return distributions[0]
    first = distributions[0]

    def stack_states(name: str) -> Tensor:
        table = torch.stack([getattr(distribution, name) for distribution in distributions])
        return table.reshape((*sizes, *table.shape[1:]))

    if isinstance(first, Categorical):
        return Categorical(logits=stack_states("logits"), validate_args=False)
    if isinstance(first, Independent) and isinstance(first.base_dist, TorchNormal):
        normal = TorchNormal(stack_states("mean"), stack_states("stddev"), validate_args=False)
        return Independent(normal, first.mean.dim(), validate_args=False)
    from pyro.distributions import Delta

    if isinstance(first, Delta):
        return Delta(stack_states("v"), event_dim=first.v.dim())
    names = ", ".join(model.ground.name(choice) for choice in choices)
    reason = f"only Categorical, Delta and Normal distributions can be batched over latent choices ({names})"
    raise BNetError(f"{model.ground.name(node)}: {reason}, not {type(first).__name__}", hint=f"Set or observe {names}")


def conditional_attention(model: GroundModel, spec: NodeSpec, evidence: Mapping[int, Tensor]) -> Tensor:
    """`P(j | i)` of a group whose nodes depend on the same choices: `[*states, *plates, word, word]`."""
    evidence = get_fixed(model, evidence)
    base, shape = int(model.ground.offsets[spec.group.index]), model.ground.shapes[spec.group.index]
    parent = next(parent for parent in spec.parents if WORD in parent.over or dict(parent.pick).get(WORD) is not None)
    width = model.ground.word_counts[model.network.specs[parent.index].group.word_stack or ""]
    rows = []
    for offset in range(len(model.ground.select_nodes(spec.group))):
        node = base + offset
        choices = find_open_choices(model, attention_parents(model, node), evidence)
        table = []
        for run in enumerate_runs(model, choices, evidence):
            attention = run.attention(node)
            if attention is None:
                raise BNetError(spec.group.name, expected="attention P(j | i)", actual=spec.tpm.no_attention_reason())
            words, weights = attention
            row = torch.zeros(width, dtype=weights.dtype)
            row[words] = weights
            table.append(row)
        rows.append(torch.stack(table).reshape((*(model.count_states(choice) for choice in choices), width)))
    states = max((row.shape[:-1] for row in rows), key=len)
    stacked = torch.stack([row.expand(*states, width) for row in rows], -2)
    return stacked.reshape((*stacked.shape[:-2], *shape, width))


def split_choices(
    model: GroundModel, ancestor_choices: Mapping[int, Sequence[int]]
) -> tuple[list[int], list[int]] | None:
    """The choices that all nodes share, and the groups of which each node depends on the choice of the same word.

    None if a node depends on other choices. `ancestor_choices` maps each node to the choices on which it depends.
    """
    shared = set.intersection(*map(set, ancestor_choices.values())) if ancestor_choices else set()
    groups = set()
    for node, choices in ancestor_choices.items():
        word = model.ground.unravel_index(node)[1][-1:]
        located = [model.ground.unravel_index(choice) for choice in choices if choice not in shared]
        if any(index[-1:] != word for _, index in located):
            return None
        groups.add(tuple(group.index for group, _ in located))
    per_word = groups.pop() if groups else ()
    return None if groups or len(set(per_word)) < len(per_word) else (sorted(shared), sorted(per_word))


def has_ancestor_choices(network: Network, groups: Collection[int]) -> bool:
    """True if a discrete group is an ancestor of one of these groups."""
    return not network.choice_descendants.isdisjoint(groups)


def compute_read_mask(model: GroundModel, spec: NodeSpec) -> NDArray[np.bool_]:
    """`[word i, word j]`: whether there is an arrow by which word i of a group reads word j, in any of its plates."""
    ground, group = model.ground, spec.group
    read_groups = {parent.index for parent in spec.word_parents}
    edges = [edge for edge in ground.template.in_edges[group.index] if edge.parent in read_groups]
    pairs: NDArray[np.bool_] = np.logical_or.reduce([ground.word_adjacency(edge) for edge in edges])
    cut, partly_cut = ground.get_cut_nodes(group.index), ground.get_partly_cut_nodes(group.index)
    indices = [ground.unravel_index(node)[1] for node in (*cut, *partly_cut)]
    num_per_word = math.prod(ground.shapes[group.index][:-1])
    cut_words = [word for word, count in Counter(index[-1] for index in indices).items() if count == num_per_word]
    retained_edges = [edge for edge in map(ground.retained_edge, edges) if edge is not None] if partly_cut else []
    partly_cut_words = {ground.unravel_index(node)[1][-1] for node in partly_cut}
    for word in cut_words:
        rows_left = [ground.word_adjacency(edge)[word] for edge in retained_edges] if word in partly_cut_words else []
        pairs[word] = np.logical_or.reduce(rows_left) if rows_left else False
    return pairs


def expected_attention(
    model: GroundModel, node: int, evidence: Mapping[int, Tensor], budget: int = BUDGET
) -> tuple[list[int], Tensor] | None:
    """The words to which a node attends, and `P(j | i, evidence)`, its attention averaged over the choices."""
    fixed = get_fixed(model, evidence)
    choices = find_open_choices(model, [*attention_parents(model, node), *evidence], fixed, include_ancestors=True)
    words: list[int] = []
    tables, logs = [], []
    for run in enumerate_runs(model, choices, fixed, budget):
        attention = run.attention(node)
        if attention is None:
            return None
        words, weights = attention
        tables.append(weights.double())
        logs.append(log_joint(run, choices, evidence))
    if evidence and max(logs) == -math.inf:
        log_evidence(model, evidence, budget=budget)
    probs = torch.softmax(torch.tensor(logs, dtype=torch.float64), 0)
    return words, torch.einsum("s,sm->m", probs, torch.stack(tables))


def find_single_parents(model: GroundModel, node: int) -> set[int]:
    """The parents of a node in slots with a single parent (its query, its residual)."""
    group, index = model.ground.unravel_index(node)
    spec = model.network.specs[group.index]
    single = [parent_spec for parent_spec in spec.parents if not parent_spec.over and not parent_spec.pick]
    return {parent for parent_spec in single for parent in find_slot_parents(model, spec, index, parent_spec, {})[1]}

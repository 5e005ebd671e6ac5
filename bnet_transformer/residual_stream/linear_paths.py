"""The linear paths to a node: one pass from its readout back to all writers, with the scales of norms held fixed.

A node is *affine* in the parents that `TPM.linear_parents` names. The pass starts at a linear function of the node and
follows these parents. It computes the adjoint of each node group on the way: the derivative of the function, with all
other parents and the scales of norms as constants. The part of a group is the product of its adjoint and of what the
group adds itself: its bias, the mix of an attention, or its full value where no linear path continues. Since every step
is affine, the parts sum to the function.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.execution_state import ExecutionState, TensorLayout
from bnet_transformer.compiler.gather import gather_parents, get_known_value
from bnet_transformer.compiler.plan import unset_parent_error
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import UnsupportedError
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.node_evaluator import NodeEvaluator
from bnet_transformer.reference import GroundModel
from bnet_transformer.tpm import Attention, EvalContext

Kind = str  # "input", "attention", "feed-forward" or "bias"


@dataclass(frozen=True)
class Step:
    """One node group of a pass: its adjoint, `[seed, *layout, *shape]`, and the part that the group adds itself.

    Args:
        spec: The group.
        adjoint: The derivative of the readout with respect to the value of the group.
        part: The product of the adjoint and of what the group adds itself, `[seed, *layout]`.
        kind: The kind of the writer.
        is_norm: Whether the group is a norm whose scale is held fixed.
    """

    spec: NodeSpec
    adjoint: Tensor
    part: Tensor
    kind: Kind
    is_norm: bool = False


def find_linear_groups(network: Network, starts: Collection[int], leaves: Collection[int]) -> list[int]:
    """The groups on linear paths to some groups, these included, children first; `leaves` are not followed."""
    visited: set[int] = set()
    stack = list(starts)
    while stack:
        index = stack.pop()
        if index not in visited:
            visited.add(index)
            spec = network.specs[index]
            stack += [spec.parents[k].index for k in get_linear_positions(spec, leaves)]
    order = [index for component in network.filter_components(visited) for index in component]
    return order[::-1]


def get_linear_positions(spec: NodeSpec, leaves: Collection[int]) -> tuple[int, ...]:
    """The positions of the parents through which a path continues; none for a leaf, or for a random value."""
    is_leaf = spec.group.index in leaves or spec.tpm.is_random
    return () if is_leaf else spec.tpm.linear_parents(*spec.tpm_parents)


@dataclass
class LinearRun:
    """A run of a sentence that contains all values on the linear paths to a readout.

    Args:
        state: The sentence.
        subject: The start of error messages.
        groups: The groups whose linear paths are followed: the parents of the readout.
        outputs: Further groups whose values are needed.
    """

    state: SentenceState
    subject: str
    groups: frozenset[int]
    outputs: frozenset[int] = frozenset()
    _weights: dict[int, Tensor] = field(default_factory=dict)

    @property
    def model(self) -> GroundModel:
        """The ground model of the sentence."""
        return self.state.model

    @property
    def network(self) -> Network:
        """The net."""
        return self.state.network

    @property
    def layout(self) -> TensorLayout:
        """The layout of the values."""
        return self.execution.layout

    @cached_property
    def set_groups(self) -> frozenset[int]:
        """The groups of which every node is set by `do`; nothing passes through them."""
        nodes = [node for node in self.model.do if not self.model.spec(node).tpm.is_random]
        by_group, shapes = self.model.ground.split_by_group(nodes), self.model.ground.shapes
        return frozenset(i for i, members in by_group.items() if len(members) == math.prod(shapes[i]))

    @cached_property
    def linear_groups(self) -> list[int]:
        """The groups on the linear paths, children first."""
        return find_linear_groups(self.network, self.groups, self.set_groups)

    @cached_property
    def execution(self) -> ExecutionState:
        """The values of the linear groups and of their parents, after interventions and evidence."""
        network, needed = self.network, set(self.outputs) | set(self.linear_groups)
        for index in {*self.linear_groups} - self.set_groups:
            for parent in network.specs[index].parents:
                needed |= {parent.index, *(selector for _, selector in parent.pick)}
        self._check_structure()
        source = self.state.evaluator
        evaluator = NodeEvaluator(source.module, source.model, source.evidence)
        fault = evaluator.find_table_fault("value", [network.specs[i] for i in sorted(needed)], ())
        if fault is not None:
            hint = getattr(fault, "remedy", None) or "Set or observe the latent choices by do or observe"
            raise UnsupportedError(f"{self.subject}: one pass cannot compute the values, because {fault}", hint=hint)
        with torch.no_grad():
            execution = evaluator.execute(sorted(needed), network.graph.ancestral_set(needed))
            for index in needed - execution.values.keys():  # the states of enumerated choices, which a pick reads
                value = get_known_value(execution, index)
                if value is None:
                    raise unset_parent_error(network.graph.groups[index].name)
                execution.values[index] = value
        return execution

    def _check_structure(self) -> None:
        """Raise an error for paths through words that are computed one after another, and through nonlinear nodes."""
        network = self.network
        recurrent = [i for i in self.linear_groups if i in network.graph.recurrent and i not in self.set_groups]
        if recurrent:
            name = network.graph.groups[recurrent[0]].name
            reason = f"{name} is recurrent, so its words are no sum of writers"
            raise UnsupportedError(f"{self.subject}: {reason}", hint="Use bt.sweep, which runs the net again")
        kinds = {i: self.get_kind(network.specs[i]) for i in self.linear_groups}
        streams = {i for i, kind in kinds.items() if kind in ("input", "attention")}
        for index, kind in kinds.items():
            if kind == "feed-forward" and streams.isdisjoint(network.graph.ancestors([index])):
                spec = network.specs[index]
                expected = "a path of sums, linear maps and norms from the writers"
                actual = f"{spec.group.name}, a {type(spec.tpm).__name__}, which no linear path bypasses"
                parents = ", ".join(network.graph.groups[parent.index].name for parent in spec.parents)
                hint = f"Use the contributions of a node before it ({parents}), or bt.sweep"
                raise UnsupportedError(self.subject, expected=expected, actual=actual, hint=hint)

    def get_kind(self, spec: NodeSpec) -> Kind:
        """The kind of what a group adds itself."""
        tpm, index = spec.tpm, spec.group.index
        if index in self.set_groups:
            return "input"
        if isinstance(tpm, Attention) or tpm.has_attention:
            return "attention"
        if get_linear_positions(spec, self.set_groups):
            return "bias"
        specs, ancestral_set = self.network.specs, self.network.graph.ancestral_set
        vectors = [parent.index for parent in spec.parents if not specs[parent.index].tpm.is_index_valued]
        has_words = any(specs[i].tpm.kind == "input" for i in ancestral_set(vectors)) if vectors else False
        return "feed-forward" if has_words and not tpm.is_random else "input"

    # the values

    def expand_value(self, spec: NodeSpec, value: Tensor) -> Tensor:
        """A value with full dims of the choices and of the group, so that states and nodes have separate adjoints."""
        layout, ground, group = self.layout, self.model.ground, spec.group
        sizes = list(value.shape)
        sizes[: len(layout.enumerated)] = map(self.execution.count_states, layout.enumerated)
        for axis, size in zip(ground.axes(group), ground.shapes[group.index], strict=True):
            sizes[layout.axis(axis)] = size
        return value.expand(sizes)

    def gather_leaves(
        self, spec: NodeSpec, positions: Sequence[int], word: int | None = None
    ) -> tuple[EvalContext, list[Tensor], dict[int, Tensor]]:
        """The parents of a group in its slots; those at some positions depend on new leaves, one for each group."""
        execution = self.execution
        specs = [self.network.specs[i] for i in dict.fromkeys(spec.parents[k].index for k in positions)]
        values = {m.group.index: self.expand_value(m, execution.values[m.group.index]) for m in specs}
        leaves = {index: value.detach().requires_grad_() for index, value in values.items()}
        context, parents = gather_parents(replace(execution, values={**execution.values, **leaves}), spec, word)
        return context, [p if k in positions else p.detach() for k, p in enumerate(parents)], leaves

    def get_set_mask(self, index: int) -> Tensor | None:
        """The nodes of a group that are set by `do`, in the layout; None if none is set."""
        return self.execution.patched[index][1] if index in self.execution.patched else None

    def get_attention_weights(self, spec: NodeSpec) -> Tensor:
        """The weights of an attention, `[*layout, word read]`, with the rows that are set."""
        index, execution = spec.group.index, self.execution
        if index not in self._weights:
            assert isinstance(spec.tpm, Attention)
            with torch.no_grad():
                context, parents = gather_parents(execution, spec)
                weights = spec.tpm.normaliser.normalise(*spec.tpm.scores(context, *parents))
                weights = self.layout.pad_dims(weights, 1)
                if index in execution.attention_rows:
                    rows, is_set = execution.attention_rows[index]
                    weights = torch.where(is_set[..., None], rows, weights)
            self._weights[index] = weights
        return self._weights[index]

    def select_node(self, spec: NodeSpec, index: Sequence[int], value: Tensor, event_dims: int) -> Tensor:
        """The value of one node at its word, `[*states, *shape]`, from `[*layout, *shape]` with one word."""
        layout = self.layout
        value = layout.pad_dims(value, event_dims)
        position = {layout.axis(plate): k for plate, k in zip(spec.group.plates, index, strict=False)}
        for dim in reversed(range(layout.batch_dim, layout.rank)):
            value = value.select(dim, position.get(dim, 0) if value.shape[dim] > 1 else 0)
        return value

    def expand_node_states(self, value: Tensor, event_dims: int) -> Tensor:
        """A value of one node with full dims of the choices."""
        sizes = [self.execution.count_states(index) for index in self.layout.enumerated]
        return value.expand(*sizes, *value.shape[value.dim() - event_dims :])

    # the pass

    def pull_back(self, seeds: Mapping[int, Tensor]) -> Iterator[Step]:
        """Yield the groups on the linear paths, children first.

        Args:
            seeds: The derivative of each readout with respect to some groups, `[seed, *layout, *shape]`.

        Yields:
            The steps of the groups that a readout depends on.
        """
        adjoints = dict(seeds)
        for index in find_linear_groups(self.network, seeds, self.set_groups):
            adjoint = adjoints.pop(index, None)
            if adjoint is None:
                continue
            spec, value = self.network.specs[index], self.execution.values[index]
            value, positions = self.expand_value(spec, value), get_linear_positions(spec, self.set_groups)
            mask, kind = self.get_set_mask(index), self.get_kind(spec)
            dims = tuple(range(-len(spec.shape), 0))
            if mask is None:
                passed = adjoint
            else:
                mask = mask.reshape(*mask.shape, *[1] * len(spec.shape))
                yield Step(spec, adjoint * mask, _sum_dims(adjoint * mask * value, dims), "input")
                passed = adjoint * ~mask
            if not positions:
                yield Step(spec, passed, _sum_dims(passed * value, dims), kind)
                continue
            constant, gradients, is_norm = self._pull_back_group(spec, positions, passed)
            yield Step(spec, passed, _sum_dims(passed * constant, dims), kind, is_norm)
            for parent, gradient in gradients.items():
                adjoints[parent] = gradient if parent not in adjoints else adjoints[parent] + gradient

    def _pull_back_group(
        self, spec: NodeSpec, positions: Sequence[int], adjoint: Tensor
    ) -> tuple[Tensor, dict[int, Tensor], bool]:
        """What an affine group adds itself, the adjoints of its linear parents, and whether it is a norm."""
        context, parents, leaves = self.gather_leaves(spec, positions)
        zeros = [torch.zeros_like(p) if k in positions else p for k, p in enumerate(parents)]
        scale = None
        if isinstance(spec.tpm, Attention):  # the row may be set by do, so that it is no function of q and k
            weights = self.get_attention_weights(spec)
            value, constant = spec.tpm.mix(weights, *parents), spec.tpm.mix(weights, *zeros)
        else:
            with torch.no_grad():
                scale = spec.tpm.norm_scale(context, *parents)
                constant = spec.tpm.linear_value(context, scale, *zeros)
            value = spec.tpm.linear_value(context, scale, *parents)
        value = self.layout.pad_dims(value, len(spec.shape))
        gradients = compute_vjp(value, list(leaves.values()), adjoint)
        return constant.detach(), dict(zip(leaves, gradients, strict=True)), scale is not None


def _sum_dims(value: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The sum over some dims; the value itself without dims."""
    return value.sum(dims) if dims else value


def compute_vjp(value: Tensor, leaves: Sequence[Tensor], seeds: Tensor) -> tuple[Tensor, ...]:
    """The products of seeds, `[seed, *shape of value]`, with the derivative of a value, `[seed, *shape]` each leaf."""
    seeds = seeds.expand(seeds.shape[0], *value.shape) if seeds.shape[1:] != value.shape else seeds
    if len(seeds) == 1:
        single = torch.autograd.grad(value, leaves, seeds[0], materialize_grads=True)
        return tuple(gradient[None] for gradient in single)
    return torch.autograd.grad(value, leaves, seeds, is_grads_batched=True, materialize_grads=True)


def is_wordwise(run: LinearRun, groups: Collection[int]) -> bool:
    """Whether each word of some groups depends linearly only on the same word of writers."""
    specs = run.network.specs
    for index in find_linear_groups(run.network, groups, run.set_groups):
        spec = specs[index]
        for k in get_linear_positions(spec, run.set_groups):
            parent = spec.parents[k]
            has_same_word = parent.reach.kind == "same" and WORD not in (*parent.over, *dict(parent.pick))
            if not has_same_word or specs[parent.index].group.word_stack is None:
                return False
    return True

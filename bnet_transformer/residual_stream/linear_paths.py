"""The linear paths from writers to a node, with the scales of norms held fixed, and values as sums of writers' parts.

A node is *affine* in the parents that `TPM.linear_parents` names. The pass starts at a linear function of the node and
follows these parents. It computes the adjoint of each node group on the way: the derivative of the function, with all
other parents and the scales of norms as constants. The part of a group is the product of its adjoint and of what the
group adds itself: its bias, the mix of an attention, or its full value where no linear path continues. Since every step
is affine, the parts sum to the function.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD, join_name
from bnet_transformer.compiler.fused import (
    AffineFunction,
    find_linear_groups,
    find_residuals,
    get_linear_positions,
    is_aligned,
)
from bnet_transformer.compiler.gather import ExecutionState, TensorLayout, gather_parents, get_known_value
from bnet_transformer.compiler.plan import unset_parent_error
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import UnsupportedError
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.values import NodeEvaluator
from bnet_transformer.reference import GroundModel
from bnet_transformer.tpm import Attention, EvalContext

Kind = str  # "input", "attention", "feed-forward" or "bias"
ActiveWords = Mapping[int, frozenset[int]]  # by group; empty for a group without words


@dataclass(frozen=True)
class Step:
    """One node group of a pass: its adjoint, `[seed, *layout, *shape]`, and the part that the group adds itself.

    Args:
        spec: The group.
        words: The words at which the adjoint may differ from zero. With a single word, the adjoint has that word only.
        adjoint: The derivative of the readout with respect to the value of the group.
        part: The product of the adjoint and of what the group adds itself, `[seed, *layout]`; None if it adds nothing,
            or for a group at which the pass stops.
        kind: The kind of the writer.
        is_norm: Whether the group is a norm whose scale is held fixed.
        nodes: The nodes that the step has, `[*layout, *1]`; None for all. `do` sets the others, or only these.
    """

    spec: NodeSpec
    words: tuple[int, ...]
    adjoint: Tensor
    part: Tensor | None
    kind: Kind
    is_norm: bool = False
    nodes: Tensor | None = None


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
    _weights: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

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
        streams = [i for i in self.linear_groups if self.kinds[i] in ("input", "attention")]
        after_streams = network.graph.descendants(streams)
        for index in self.linear_groups:
            if self.kinds[index] == "feed-forward" and index not in after_streams:
                spec = network.specs[index]
                expected = "a path of sums, linear maps and norms from the writers"
                actual = f"{spec.group.name} with the TPM {type(spec.tpm).__name__}, which no linear path bypasses"
                parents = ", ".join(network.graph.groups[parent.index].name for parent in spec.parents)
                hint = f"Use the contributions of a node before it ({parents}), or bt.sweep"
                raise UnsupportedError(self.subject, expected=expected, actual=actual, hint=hint)

    @cached_property
    def kinds(self) -> dict[int, Kind]:
        """The kind of what each linear group adds itself."""
        specs = self.network.specs
        inputs = {spec.group.index for spec in specs if spec.tpm.kind == "input"}
        word_dependent = inputs | self.network.graph.descendants(inputs)
        return {index: self._get_kind(specs[index], word_dependent) for index in self.linear_groups}

    def _get_kind(self, spec: NodeSpec, word_dependent: Collection[int]) -> Kind:
        """The kind of what a group adds itself."""
        tpm, index, specs = spec.tpm, spec.group.index, self.network.specs
        if index in self.set_groups:
            return "input"
        if isinstance(tpm, Attention) or tpm.has_attention:
            return "attention"
        if get_linear_positions(spec, self.set_groups):
            return "bias"
        vectors = [parent.index for parent in spec.parents if not specs[parent.index].tpm.is_index_valued]
        has_words = any(index in word_dependent for index in vectors)
        return "feed-forward" if has_words and not tpm.is_random else "input"

    def find_read_words(self, spec: NodeSpec, parent: ParentSpec, words: Collection[int]) -> frozenset[int]:
        """The words of a parent on which some words of a group depend; none for a parent without words."""
        stack, counts = self.network.specs[parent.index].group.word_stack, self.execution.word_counts
        if stack is None:
            return frozenset()
        if is_aligned(parent):
            return frozenset(words)
        child_stack = spec.group.word_stack
        table = parent.reach.matrix(1 if child_stack is None else counts[child_stack], counts[stack])
        return frozenset(np.flatnonzero(table[[0] if child_stack is None else sorted(words)].any(0)).tolist())

    def find_active_words(self, starts: ActiveWords) -> dict[int, frozenset[int]]:
        """The words of each group on which some words of other groups depend along linear paths."""
        active = dict(starts)
        for index in find_linear_groups(self.network, starts, self.set_groups):
            spec = self.network.specs[index]
            for k in get_linear_positions(spec, self.set_groups):
                parent = spec.parents[k]
                words = self.find_read_words(spec, parent, active[index])
                active[parent.index] = active.get(parent.index, frozenset()) | words
        return active

    # the values

    def expand_value(self, spec: NodeSpec, value: Tensor) -> Tensor:
        """A value with full dims of the choices and of the group, so that states and nodes have separate adjoints."""
        layout, ground, group = self.layout, self.model.ground, spec.group
        sizes = list(value.shape)
        sizes[: len(layout.enumerated)] = map(self.execution.count_states, layout.enumerated)
        for axis, size in zip(ground.axes(group), ground.shapes[group.index], strict=True):
            sizes[layout.axis(axis)] = size
        return value.expand(sizes)

    def get_word(self, index: int, active: ActiveWords) -> int | None:
        """The only active word of a group, to compute the group for this word only; None for all words."""
        spec, words = self.network.specs[index], active[index]
        stack = spec.group.word_stack
        is_single = stack is not None and len(words) == 1 and self.execution.word_counts[stack] > 1
        is_single = is_single and all(WORD not in dict(parent.pick) for parent in spec.parents)
        return next(iter(words)) if is_single else None

    def narrow_words(self, value: Tensor, word: int | None, offset: int = 0) -> Tensor:
        """A value at one word, `[*layout, ...]` after `offset` dims; the value itself for None."""
        dim = self.layout.word_dim + offset
        return value if word is None or value.shape[dim] == 1 else value.narrow(dim, word, 1)

    def gather_leaves(
        self, spec: NodeSpec, positions: Sequence[int], word: int | None, active: ActiveWords
    ) -> tuple[EvalContext, list[Tensor], dict[int, Tensor]]:
        """The parents of a group in its slots; those at some positions depend on new leaves, one for each group.

        A leaf has only the active word of its group if the group is aligned with the words of the child.
        """
        execution, leaves = self.execution, {}
        for index in dict.fromkeys(spec.parents[k].index for k in positions):
            leaf = self.expand_value(self.network.specs[index], execution.values[index])
            if all(is_aligned(parent) for parent in spec.parents if parent.index == index):
                leaf = self.narrow_words(leaf, self.get_word(index, active))
            leaves[index] = leaf.detach().requires_grad_()
        context, parents = gather_parents(replace(execution, values={**execution.values, **leaves}), spec, word)
        return context, [p if k in positions else p.detach() for k, p in enumerate(parents)], leaves

    def compute_adjoints(
        self, value: Tensor, leaves: Mapping[int, Tensor], seeds: Tensor, active: ActiveWords
    ) -> dict[int, Tensor]:
        """The derivative with respect to each leaf, at its active words, `[seed, *layout, *shape]`."""
        seeds = seeds.expand(seeds.shape[0], *value.shape) if seeds.shape[1:] != value.shape else seeds
        targets = list(leaves.values())
        if len(seeds) == 1:
            single = torch.autograd.grad(value, targets, seeds[0], materialize_grads=True)
            gradients = tuple(gradient[None] for gradient in single)
        else:
            gradients = torch.autograd.grad(value, targets, seeds, is_grads_batched=True, materialize_grads=True)
        pairs = zip(leaves, gradients, strict=True)
        return {index: self.narrow_words(g, self.get_word(index, active), 1) for index, g in pairs}

    def get_set_mask(self, spec: NodeSpec) -> Tensor | None:
        """The nodes of a group that are set by `do`, `[*layout, *1]`; None if none is set, or if all are inputs."""
        if self.kinds[spec.group.index] == "input":  # one writer, set or not
            return None
        patched = self.execution.patched.get(spec.group.index)
        return None if patched is None else patched[1].reshape(*patched[1].shape, *[1] * len(spec.shape))

    def get_attention_weights(self, spec: NodeSpec, word: int | None = None) -> Tensor:
        """The weights of an attention, `[*layout, word read]`, with the rows that are set."""
        index, execution = spec.group.index, self.execution
        if (index, word) not in self._weights:
            assert isinstance(spec.tpm, Attention)
            with torch.no_grad():
                context, parents = gather_parents(execution, spec, word)
                weights = spec.tpm.normaliser.normalise(*spec.tpm.scores(context, *parents))
                weights = self.layout.pad_dims(weights, 1)
                if index in execution.attention_rows:
                    rows, is_set = (self.narrow_words(x, word) for x in execution.attention_rows[index])
                    weights = torch.where(is_set[..., None], rows, weights)
            self._weights[index, word] = weights
        return self._weights[index, word]

    def select_node(
        self, spec: NodeSpec, index: Sequence[int], value: Tensor, event_dims: int, *, keep_batch: bool = False
    ) -> Tensor:
        """The value of one node at its word, `[*states, *shape]`, from `[*layout, *shape]` with one word.

        With `keep_batch` the dim of the batch stays, before those of the shape.
        """
        layout = self.layout
        value = layout.pad_dims(value, event_dims)
        position = {layout.axis(plate): k for plate, k in zip(spec.group.plates, index, strict=False)}
        for dim in reversed(range(layout.batch_dim + keep_batch, layout.rank)):
            value = value.select(dim, position.get(dim, 0) if value.shape[dim] > 1 else 0)
        return value

    def expand_node_states(self, value: Tensor, event_dims: int) -> Tensor:
        """A value of one node with full dims of the choices."""
        sizes = [self.execution.count_states(index) for index in self.layout.enumerated]
        return value.expand(*sizes, *value.shape[value.dim() - event_dims :])

    @torch.no_grad()
    def make_linear_map(self, spec: NodeSpec, word: int | None, entries: Tensor | None = None) -> AffineFunction:
        """The value of a group as an affine function of its slots, at one word or at all words.

        With `entries`, the value is these entries, if the TPM can compute only some; then `has_entries` is true.
        """
        tpm, layout = spec.tpm, self.layout
        context, parents = gather_parents(self.execution, spec, word)
        scale, has_entries = None, False
        if entries is not None and (selected := tpm.select_entries(entries.to(parents[0].device), context, *parents)):
            context, parents, has_entries = selected[0], [*selected[1]], True
        if isinstance(tpm, Attention):  # the row may be set by do, so that it is no function of q and k
            evaluate = partial(tpm.mix, self.get_attention_weights(spec, word))
        else:
            scale = tpm.norm_scale(context, *parents)
            evaluate = partial(tpm.linear_value, context, scale)
        is_sum = len(tpm.residual_parents(*spec.tpm_parents)) == len(parents)
        dims = len(spec.shape) or tpm.kind == "discrete"
        return AffineFunction(
            lambda *x: layout.pad_dims(evaluate(*x), dims), parents, scale is not None, is_sum, has_entries
        )

    # the pass

    def pull_back(
        self, seeds: Mapping[int, Tensor], active: ActiveWords, stops: Collection[int] = ()
    ) -> Iterator[Step]:
        """Yield the groups on the linear paths, children first.

        Args:
            seeds: The derivative of each readout with respect to some groups, `[seed, *layout, *shape]`.
            active: The words of each group on which the readouts depend.
            stops: Groups at which the pass stops.

        Yields:
            The steps of the groups that a readout depends on.
        """
        adjoints = dict(seeds)
        for index in find_linear_groups(self.network, seeds, {*self.set_groups, *stops}):
            adjoint = adjoints.pop(index, None)
            if adjoint is None:
                continue
            spec, word = self.network.specs[index], self.get_word(index, active)
            if index in stops:
                yield Step(spec, tuple(sorted(active[index])), adjoint, None, self.kinds[index])
                continue
            value = self.narrow_words(self.expand_value(spec, self.execution.values[index]), word)
            positions, mask = get_linear_positions(spec, self.set_groups), self.get_set_mask(spec)
            words, passed = tuple(sorted(active[index])), adjoint
            if mask is not None:
                mask = self.narrow_words(mask, word)
                yield self._make_step(spec, self.filter_words(words, mask), adjoint * mask, value, "input", nodes=mask)
                mask = ~mask
                words, passed = self.filter_words(words, mask), adjoint * mask
            constant: Tensor | None = value
            gradients, is_norm = dict[int, Tensor](), False
            if positions:
                constant, gradients, is_norm = self._pull_back_group(spec, positions, passed, word, active)
            if words or spec.group.word_stack is None:
                yield self._make_step(spec, words, passed, constant, self.kinds[index], is_norm, mask)
            for parent, gradient in gradients.items():
                adjoints[parent] = gradient if parent not in adjoints else adjoints[parent] + gradient

    def _make_step(
        self,
        spec: NodeSpec,
        words: tuple[int, ...],
        adjoint: Tensor,
        value: Tensor | None,
        kind: Kind,
        is_norm: bool = False,
        nodes: Tensor | None = None,
    ) -> Step:
        """The step of a group that adds a value, `[*layout, *shape]`."""
        part = None if value is None else adjoint * value
        part = part.sum(tuple(range(-len(spec.shape), 0))) if part is not None and spec.shape else part
        return Step(spec, words, adjoint, part, kind, is_norm, nodes)

    def filter_words(self, words: tuple[int, ...], mask: Tensor) -> tuple[int, ...]:
        """The words at which a mask, `[*layout, *1]`, is true for a node."""
        at_word = mask.movedim(self.layout.word_dim, 0).flatten(1).any(-1).tolist()
        return tuple(word for word in words if (at_word[0] if len(at_word) == 1 else at_word[word]))

    def _pull_back_group(
        self, spec: NodeSpec, positions: Sequence[int], adjoint: Tensor, word: int | None, active: ActiveWords
    ) -> tuple[Tensor | None, dict[int, Tensor], bool]:
        """What an affine group adds itself, the adjoints of its linear parents, and whether it is a norm."""
        linear_map = self.make_linear_map(spec, word)
        constant = linear_map.compute_constant(positions)
        gradients: dict[int, Tensor] = {}
        residuals = find_residuals(spec, positions)
        for index, count in residuals.items():
            shape = self.expand_value(self.network.specs[index], self.execution.values[index]).shape
            shape = self.narrow_words(torch.empty(shape, device="meta"), self.get_word(index, active)).shape
            gradient = adjoint.sum_to_size(len(adjoint), *shape)
            gradients[index] = gradient if count == 1 else count * gradient
        mapped = [k for k in positions if spec.parents[k].index not in residuals]
        if mapped:
            _, parents, leaves = self.gather_leaves(spec, mapped, word, active)
            gradients |= self.compute_adjoints(linear_map.evaluate(*parents), leaves, adjoint, active)
        return constant, gradients, linear_map.is_norm


# --------------------------------------------------------------------------------------------------------------------
# Writers: the nodes that add to the residual stream, and the parts of a readout that they add, as one table.


@dataclass(frozen=True)
class Writer:
    """What adds to a readout: a node without its word, such as head 2 of slice 3 (`a_3_2`), or the bias of a node.

    Attributes:
        name: The name of the nodes without their word; for a bias, `"bias of mix_3"`.
        kind: `"input"` (embeddings, positions, set nodes), `"attention"` (the mix of a head), `"feed-forward"` (a
            nonlinear map that the stream bypasses) or `"bias"`.
        group: The name of the node group, such as `"a_3"`.
        plates: The index along each plate, such as the head.
        slice: The slice of its nodes; None outside of slices.
        words: The words at which it writes; empty for nodes without words.
        axes: The names of the plates, such as `("group", "head")`.
        is_head: Whether its nodes are heads, also where `do` sets them.
    """

    name: str
    kind: Kind
    group: str
    plates: tuple[int, ...] = ()
    slice: int | None = None
    words: tuple[int, ...] = field(default=(), repr=False)
    axes: tuple[str, ...] = field(default=(), repr=False)
    is_head: bool = field(default=False, repr=False)

    @property
    def form(self) -> str:
        """The form of the names of writers of this group, such as `a_3_group_head`."""
        return "_".join((self.group, *self.axes))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes that write, one for each word."""
        indices = [(*self.plates, word) for word in self.words] or [self.plates]
        return tuple(join_name(self.group, index) for index in indices)


@dataclass(frozen=True)
class WriterTable:
    """The parts of several readouts: `values`, `[seed, *states, writer, word]`, with the words of all stacks.

    The last word is that of nodes without words, and has the label "".
    """

    writers: tuple[Writer, ...]
    words: tuple[str, ...]
    values: Tensor
    norms: tuple[str, ...]


def split_by_read_word(run: LinearRun, step: Step) -> tuple[Tensor, str] | None:
    """The part of an attention by the word j that it reads, `[seed, *layout]`, and their stack; None for other nodes.

    The mix is `sum_j P(j | i) v_j`, so each word j has a part, with `P(j | i)` held fixed.
    """
    spec, dim = step.spec, run.layout.word_dim
    values = [parent for parent in spec.parents if parent.slot == "v."]
    if step.kind != "attention" or not isinstance(spec.tpm, Attention) or values[0].over != (WORD,):
        return None
    stack = run.network.specs[values[0].index].group.word_stack or ""
    word = step.words[0] if len(step.words) == 1 and step.adjoint.shape[dim + 1] == 1 else None
    word = None if spec.group.word_stack is None else word
    weights = run.get_attention_weights(spec, word)
    _, parents = gather_parents(run.execution, spec, word)
    part = weights * torch.einsum("s...d,...md->s...m", step.adjoint, parents[2])
    return part.sum(dim + 1), stack  # the word is the last dim of the layout


def list_writers(
    run: LinearRun, spec: NodeSpec, kind: Kind, words: tuple[int, ...], nodes: Tensor | None = None
) -> dict[int, Writer]:
    """The writers of a group, one for each index along its plates that has a node, by the position of the index.

    Args:
        run: The run.
        spec: The group.
        kind: The kind of the writers.
        words: The words at which some writers write.
        nodes: The nodes that write, `[*layout, *1]`; None for all.
    """
    group, layout = spec.group, run.layout
    sizes = [run.network.graph.plate_sizes[plate] for plate in group.plates]
    writes = torch.ones(*sizes, 1, dtype=torch.bool)
    if nodes is not None:
        dims = [*map(layout.axis, group.plates), layout.word_dim]
        table = nodes.movedim(dims, list(range(len(dims)))).flatten(len(dims)).any(-1)
        writes = table.expand(*sizes, table.shape[-1])
    prefix = "bias of " if kind == "bias" else ""
    is_head = isinstance(spec.tpm, Attention) or spec.tpm.has_attention
    writers = {}
    for k, index in enumerate(itertools.product(*map(range, sizes))):
        row = writes[index].tolist()
        written = tuple(word for word in words if row[word if len(row) > 1 else 0])
        if written or (group.word_stack is None and row[0]):
            name = prefix + join_name(group.name, index)
            writers[k] = Writer(name, kind, group.name, index, group.slice, written, group.plates, is_head)
    return writers


def format_norm(spec: NodeSpec, words: tuple[int, ...]) -> str:
    """The name or the pattern of the nodes of a norm at some words."""
    word = [str(words[0])] if len(words) == 1 else ["*"] * bool(words)
    return "_".join([spec.group.name, *["*" for _ in spec.group.plates], *word])


def collect_writers(run: LinearRun, steps: Iterable[Step], seeds: int, *, split_reads: bool = False) -> WriterTable:
    """The table of the parts of a pass.

    Args:
        run: The run.
        steps: The steps of the pass.
        seeds: The number of readouts.
        split_reads: Whether the part of a head is that of the word which it reads, instead of the word of the head.
    """
    tokens, layout = run.state.tokens, run.layout
    labels = (*itertools.chain.from_iterable(tokens.values()), "")
    offsets = dict(zip(tokens, itertools.accumulate([0, *map(len, tokens.values())]), strict=False))
    writers: list[Writer] = []
    rows: list[Tensor] = []
    norms: list[str] = []
    for step in steps:
        if step.is_norm:
            norms.append(format_norm(step.spec, step.words))
        if step.part is None or (step.kind == "bias" and not bool(step.part.any())):
            continue
        part, stack = step.part, step.spec.group.word_stack
        if split_reads and (split := split_by_read_word(run, step)) is not None:
            part, stack = split
        start = len(labels) - 1 if stack is None else offsets[stack]
        if stack is not None and part.shape[-1] == 1 and len(step.words) == 1:
            start += step.words[0]
        part = _move_plates(run, step.spec, part).flatten(0, -1 - layout.batch_dim - 2)  # [writer, seed, *states, word]
        block = torch.nn.functional.pad(part, (start, len(labels) - start - part.shape[-1]))
        for k, writer in reversed(list_writers(run, step.spec, step.kind, step.words, step.nodes).items()):
            if step.kind != "bias" or bool(block[k].any()):
                writers.append(writer)
                rows.append(block[k])
    sizes = [run.execution.count_states(index) for index in layout.enumerated]
    values = torch.stack(rows[::-1], -2) if rows else torch.zeros(seeds, *sizes, 0, len(labels))
    return WriterTable(tuple(writers[::-1]), labels, values, tuple(reversed(norms)))


def _move_plates(run: LinearRun, spec: NodeSpec, part: Tensor) -> Tensor:
    """A part `[seed, *layout]` as `[*plates, seed, *states, word]` with the plates of its group; without any, one."""
    layout = run.layout
    part = part.select(1 + layout.batch_dim, 0)
    offset = 1 + layout.batch_dim
    plates = [layout.plates.index(plate) for plate in spec.group.plates]
    for k in reversed(range(len(layout.plates))):
        if k not in plates:
            part = part.select(offset + k, 0)
    source = [offset + sorted(plates).index(k) for k in plates]
    return part.movedim(source, list(range(len(source)))) if source else part[None]


# --------------------------------------------------------------------------------------------------------------------
# The values of node groups as sums of the parts of writers: one pass from the writers to some groups.
#
# Where many numbers depend on the same writers (the keys of all words, the values of all heads), this pass is much
# faster than one pass back from each number. A residual connection passes the parts on unchanged, so that only maps and
# norms cost time.


@dataclass(frozen=True)
class GroupParts:
    """The parts of a group, in blocks: writers, and their parts with the writers in the dim of the batch.

    A block is `[*layout, *shape]`, or has only the active word of the group. No writer is in two blocks.
    """

    blocks: tuple[tuple[tuple[Writer, ...], Tensor], ...]

    @property
    def writers(self) -> tuple[Writer, ...]:
        """The writers of all blocks."""
        return tuple(writer for writers, _ in self.blocks for writer in writers)

    def merge(self, batch_dim: int) -> Tensor:
        """The parts of all writers in one block."""
        return concat_blocks([block for _, block in self.blocks], batch_dim)


def concat_blocks(blocks: Sequence[Tensor], dim: int) -> Tensor:
    """The concatenation along a dim of blocks whose other dims are broadcast."""
    if len(blocks) == 1:
        return blocks[0]
    sizes = [max(block.shape[k] for block in blocks) for k in range(blocks[0].dim())]
    return torch.cat([block.expand(*sizes[:dim], block.shape[dim], *sizes[dim + 1 :]) for block in blocks], dim)


def decompose(run: LinearRun, starts: ActiveWords, norms: dict[str, None]) -> Iterator[tuple[int, GroupParts]]:
    """Yield each group of `starts` with its parts, parents first.

    Args:
        run: The run.
        starts: The groups, and the words at which their parts are needed.
        norms: A dict to which the names of the norms are added, in order.
    """
    push = _Push(run, _widen_words(run, starts), norms)
    order = find_linear_groups(run.network, starts, run.set_groups)[::-1]
    last_use = {index: index for index in order}
    for index in order:
        spec = run.network.specs[index]
        last_use |= {spec.parents[k].index: index for k in get_linear_positions(spec, run.set_groups)}
    for index in order:
        parts = push.parts[index] = push.compute(run.network.specs[index])
        if index in starts:
            yield index, parts
        for parent in [p for p in push.parts if last_use[p] == index]:  # frees the memory
            del push.parts[parent]


def _widen_words(run: LinearRun, starts: ActiveWords) -> ActiveWords:
    """The active words of each group; all words of a group that a child reads at another word than its own."""
    active = run.find_active_words(starts)
    for index in find_linear_groups(run.network, starts, run.set_groups):
        spec = run.network.specs[index]
        for parent in (spec.parents[k] for k in get_linear_positions(spec, run.set_groups)):
            stack = run.network.specs[parent.index].group.word_stack
            is_narrow = run.get_word(parent.index, active) is not None
            if stack is not None and is_narrow and not (is_aligned(parent) and run.get_word(index, active) is not None):
                active[parent.index] = frozenset(range(run.execution.word_counts[stack]))
    return active


@dataclass
class _Push:
    """The state of a pass: the parts of the groups that later groups read."""

    run: LinearRun
    active: ActiveWords
    norms: dict[str, None]

    def __post_init__(self) -> None:
        self.parts: dict[int, GroupParts] = {}
        self.batch_dim = self.run.layout.batch_dim

    @torch.no_grad()
    def compute(self, spec: NodeSpec) -> GroupParts:
        """The parts of a group, from those of its linear parents."""
        run, index = self.run, spec.group.index
        word, positions = run.get_word(index, self.active), get_linear_positions(spec, run.set_groups)
        value = run.narrow_words(run.expand_value(spec, run.execution.values[index]), word)
        mask = run.get_set_mask(spec)
        mask = None if mask is None else run.narrow_words(mask, word)
        kind = run.kinds[index]
        if positions:
            linear_map = run.make_linear_map(spec, word)
            constant = linear_map.compute_constant(positions)
            blocks = self._push_parents(spec, positions, word, constant, linear_map)
            words = tuple(sorted(self.active[index]))
            words = words if mask is None else run.filter_words(words, ~mask)
            if linear_map.is_norm and (words or spec.group.word_stack is None):
                self.norms[format_norm(spec, words)] = None
        else:
            constant, blocks = value, []
        if constant is not None and (kind != "bias" or bool(constant.any())):
            blocks.append(self._write(spec, constant, kind, None if mask is None else ~mask))
        if mask is not None:
            blocks = [(writers, block * ~mask) for writers, block in blocks]
            blocks.append(self._write(spec, value * mask, "input", mask))
        return GroupParts(_sum_duplicates(blocks, self.batch_dim))

    def _push_parents(
        self,
        spec: NodeSpec,
        positions: Sequence[int],
        word: int | None,
        constant: Tensor | None,
        linear_map: AffineFunction,
    ) -> list[tuple[tuple[Writer, ...], Tensor]]:
        """The blocks of a group that come from its linear parents."""
        run, residuals = self.run, find_residuals(spec, positions)
        blocks = []
        for index in dict.fromkeys(spec.parents[k].index for k in positions):
            parts = self.parts[index]
            if index in residuals:
                count = residuals[index]
                narrow = [(writers, run.narrow_words(block, word)) for writers, block in parts.blocks]
                blocks += narrow if count == 1 else [(writers, count * block) for writers, block in narrow]
            elif parts.blocks:
                values = {**run.execution.values, index: parts.merge(self.batch_dim)}
                _, gathered = gather_parents(replace(run.execution, values=values), spec, word)
                slots = [k for k in positions if spec.parents[k].index == index]
                inputs = [
                    gathered[k] if k in slots else torch.zeros_like(parent) if k in positions else parent
                    for k, parent in enumerate(linear_map.parents)
                ]
                block = linear_map.evaluate(*inputs)
                if constant is not None and bool(constant.any()):
                    block = block - constant
                blocks.append((parts.writers, block))
        return blocks

    def _write(
        self, spec: NodeSpec, value: Tensor, kind: Kind, nodes: Tensor | None = None
    ) -> tuple[tuple[Writer, ...], Tensor]:
        """The block of what some nodes of a group add themselves: one writer for each index along its plates."""
        words = tuple(sorted(self.active[spec.group.index]))
        by_position, layout = list_writers(self.run, spec, kind, words, nodes), self.run.layout
        writers = tuple(by_position.values())
        sizes = [self.run.network.graph.plate_sizes[plate] for plate in spec.group.plates]
        if not sizes:
            return writers, value.narrow(layout.batch_dim, 0, len(writers))
        shape, count = [1] * value.dim(), math.prod(sizes)
        shape[layout.batch_dim] = len(writers)
        axes = [layout.axis(plate) for plate in spec.group.plates]
        for axis, size in zip(axes, sizes, strict=True):
            shape[axis] = size
        order = sorted(range(len(axes)), key=axes.__getitem__)  # the plates in the order of the layout
        is_same = torch.eye(count, dtype=value.dtype, device=value.device)[list(by_position)]
        is_same = is_same.reshape(len(writers), *sizes)
        is_same = is_same.permute(0, *(1 + k for k in order)).reshape(shape)
        block = value * is_same
        if kind != "bias":
            return writers, block
        is_used = block.movedim(layout.batch_dim, 0).flatten(1).any(-1)
        used = tuple(writer for writer, flag in zip(writers, is_used.tolist(), strict=True) if flag)
        return used, block.index_select(layout.batch_dim, is_used.nonzero().flatten())


def _sum_duplicates(
    blocks: Collection[tuple[tuple[Writer, ...], Tensor]], batch_dim: int
) -> tuple[tuple[tuple[Writer, ...], Tensor], ...]:
    """Blocks in which no writer occurs twice: the parts along several paths are added."""
    names = [writer for writers, _ in blocks for writer in writers]
    unique = {writer: k for k, writer in enumerate(dict.fromkeys(names))}
    if len(unique) == len(names):
        return tuple(blocks)
    merged = concat_blocks([block for _, block in blocks], batch_dim)
    total = merged.new_zeros(*merged.shape[:batch_dim], len(unique), *merged.shape[batch_dim + 1 :])
    positions = torch.tensor([unique[name] for name in names], device=merged.device)
    return ((tuple(unique), total.index_add(batch_dim, positions, merged)),)

"""The linear paths from writers to a node in one sentence, with the attention and the scales of norms held fixed.

The paths are those of `compiler.linear`. A readout is affine in all groups on its paths. So the part of a group is the
product of two numbers: its *adjoint*, the derivative of the readout, and what the group adds itself: its bias, the mix
of an attention, or its full value where no path continues. The parts sum to the readout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD, join_name
from bnet_transformer._core.tensors import BoolArray
from bnet_transformer.compiler.gather import ExecutionState, TensorLayout, gather_parents, get_known_value
from bnet_transformer.compiler.linear import (
    LinearStructure,
    WordMasks,
    compute_attention,
    compute_constant,
    evaluate_affine,
    find_read_words,
    is_aligned,
    is_norm,
)
from bnet_transformer.compiler.plan import unset_parent_error
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import UnsupportedError
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.values import NodeEvaluator
from bnet_transformer.interventions.linear_pass import Block, LinearPass, Norms
from bnet_transformer.interventions.patched_run import get_layout_shape
from bnet_transformer.tpm import Attention, EvalContext

Kind = str  # "input", "attention", "feed-forward" or "bias"
Values = Mapping[int, Tensor]  # by group


@dataclass(frozen=True)
class Addend:
    """What some nodes of a group add themselves.

    Args:
        kind: The kind of the writers.
        value: What all nodes of the group would add, `[*layout, *shape]`.
        nodes: The nodes that add it, `[*layout]`; None for all. `do` sets the others, or only these.
    """

    kind: Kind
    value: Tensor
    nodes: Tensor | None = None

    def mask(self, value: Tensor) -> Tensor:
        """A value of the group, `[..., *layout, *shape]`, with zeros at other nodes."""
        return value if self.nodes is None else value * align_mask(self.nodes, self.value)


@dataclass(frozen=True)
class Step:
    """One node group of a pass back from a readout.

    Args:
        spec: The group.
        words: The mask of the words at which the adjoint may differ from zero.
        word: The only word of the values of this step; None for all words.
        adjoint: The derivative of the readout with respect to the value of the group, `[seed, *layout, *shape]`.
        addends: What the group adds; empty for a group at which the pass stops.
    """

    spec: NodeSpec
    words: BoolArray
    word: int | None
    adjoint: Tensor
    addends: tuple[Addend, ...]


@dataclass
class LinearRun:
    """A run of a sentence that contains all values on the linear paths to a readout.

    Args:
        state: The sentence, in which all latent choices are set.
        subject: The start of error messages.
        groups: The groups whose linear paths are followed: the parents of the readout.
        outputs: Further groups whose values are needed.
    """

    state: SentenceState
    subject: str
    groups: frozenset[int]
    outputs: frozenset[int] = frozenset()

    @property
    def network(self) -> Network:
        """The net."""
        return self.state.network

    @property
    def layout(self) -> TensorLayout:
        """The layout of the values."""
        return self.execution.layout

    @cached_property
    def structure(self) -> LinearStructure:
        """The linear paths; nothing passes through groups of which every node is set by `do`."""
        model = self.state.model
        nodes = [node for node in model.do if not model.spec(node).tpm.is_random]
        by_group, shapes = model.ground.split_by_group(nodes), model.ground.shapes
        leaves = frozenset(i for i, members in by_group.items() if len(members) == math.prod(shapes[i]))
        return LinearStructure(self.network, leaves=leaves)

    @cached_property
    def linear_groups(self) -> list[int]:
        """The groups on the linear paths, parents first."""
        return self.structure.list_groups(self.groups)

    @cached_property
    def execution(self) -> ExecutionState:
        """The values of the linear groups and of their parents, after interventions and evidence."""
        network, needed = self.network, set(self.outputs) | set(self.linear_groups)
        for index in {*self.linear_groups} - self.structure.leaves:
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
            for index in needed - execution.values.keys():  # the states of set choices, which a pick reads
                value = get_known_value(execution, index)
                if value is None:
                    raise unset_parent_error(network.graph.groups[index].name)
                execution.values[index] = value
        return execution

    def _check_structure(self) -> None:
        """Raise an error for paths through words that are computed one after another, and through nonlinear nodes."""
        network = self.network
        recurrent = [i for i in self.linear_groups if i in network.graph.recurrent and i not in self.structure.leaves]
        if recurrent:
            name = network.graph.groups[recurrent[0]].name
            reason = f"{name} is recurrent, so its words are no sum of writers"
            raise UnsupportedError(f"{self.subject}: {reason}", hint="Use bt.sweep, which runs the net again")
        kinds = {index: self.get_kind(network.specs[index]) for index in self.linear_groups}
        after_streams = network.graph.descendants([i for i in kinds if kinds[i] in ("input", "attention")])
        for index in reversed(self.linear_groups):
            if kinds[index] == "feed-forward" and index not in after_streams:
                spec = network.specs[index]
                expected = "a path of sums, linear maps and norms from the writers"
                actual = f"{spec.group.name} with the TPM {type(spec.tpm).__name__}, which no linear path bypasses"
                parents = ", ".join(network.graph.groups[parent.index].name for parent in spec.parents)
                hint = f"Use the contributions of a node before it ({parents}), or bt.sweep"
                raise UnsupportedError(self.subject, expected=expected, actual=actual, hint=hint)

    def get_kind(self, spec: NodeSpec) -> Kind:
        """The kind of what a group adds itself."""
        if spec.group.index in self.structure.leaves:
            return "input"
        if isinstance(spec.tpm, Attention) or spec.tpm.has_attention:
            return "attention"
        if self.structure.get_linear_positions(spec):
            return "bias"
        is_map = not spec.tpm.is_random and self.structure.get_reading_positions(spec)
        return "feed-forward" if is_map else "input"

    # the values

    def count_words(self, index: int) -> int:
        """The number of words of a group; 1 for a group without words."""
        return self.network.specs[index].group.count_words(self.execution.word_counts)

    def find_read_words(self, spec: NodeSpec, slots: Collection[int], words: BoolArray) -> dict[int, BoolArray]:
        """The words of the parents in some slots on which some words of a group depend."""
        masks = dict[int, BoolArray]()
        for parent in (spec.parents[k] for k in slots):
            read = find_read_words(parent, words, self.count_words(parent.index))
            masks[parent.index] = masks.get(parent.index, np.zeros_like(read)) | read
        return masks

    def get_word(self, spec: NodeSpec, words: BoolArray) -> int | None:
        """The only word of a mask, to compute a group for this word only; None for all words."""
        is_single = (
            len(words) > 1 and words.sum() == 1 and all(WORD not in dict(parent.pick) for parent in spec.parents)
        )
        return int(words.argmax()) if is_single else None

    def narrow_words(self, value: Tensor, word: int | None) -> Tensor:
        """A value at one word, `[*layout, ...]`; the value itself for None."""
        dim = self.layout.word_dim
        return value if word is None or value.shape[dim] == 1 else value.narrow(dim, word, 1)

    def get_value(self, spec: NodeSpec, word: int | None = None) -> Tensor:
        """The value of a group with full dims, so that its nodes have separate adjoints."""
        value = self.execution.values[spec.group.index]
        sizes = get_layout_shape(self.execution, spec)
        return self.narrow_words(value.expand(1, *sizes, *value.shape[self.layout.rank :]), word)

    def select_node(self, spec: NodeSpec, index: Sequence[int], value: Tensor, event_dims: int) -> Tensor:
        """The value of one node at its word, `[batch, *shape]`, from `[*layout, *shape]` with one word."""
        layout = self.layout
        value = layout.pad_dims(value, event_dims)
        position = {layout.axis(plate): k for plate, k in zip(spec.group.plates, index, strict=False)}
        for dim in reversed(range(1, layout.rank)):
            value = value.select(dim, position.get(dim, 0) if value.shape[dim] > 1 else 0)
        return value

    def gather(self, spec: NodeSpec, values: Values, word: int | None) -> tuple[EvalContext, list[Tensor]]:
        """The context and the slots of a group, whose parents have some given values."""
        return gather_parents(replace(self.execution, values={**self.execution.values, **values}), spec, word)

    def evaluate(self, spec: NodeSpec, slots: Collection[int], values: Values, word: int | None) -> Tensor:
        """The value of a group as an affine function of some slots, whose groups have some given values."""
        context, base = gather_parents(self.execution, spec, word)
        _, parents = self.gather(spec, values, word)
        mixed = [new if k in slots else old for k, (new, old) in enumerate(zip(parents, base, strict=True))]
        return evaluate_affine(self.execution, spec, context, mixed, base, word)

    @torch.no_grad()
    def list_addends(self, spec: NodeSpec, word: int | None = None) -> tuple[Addend, ...]:
        """What a group adds itself, at one word or at all words; a bias of zero is omitted."""
        kind, value, slots = self.get_kind(spec), self.get_value(spec, word), self.structure.get_linear_positions(spec)
        patched = None if kind == "input" else self.execution.patched.get(spec.group.index)
        is_set = None if patched is None else self.narrow_words(patched[1], word)
        addends = [] if is_set is None else [Addend("input", value, is_set)]
        if slots:
            if len(spec.tpm.residual_parents(*spec.tpm_parents)) == len(spec.parents):
                return tuple(addends)
            value = compute_constant(self.execution, spec, slots, word).expand(value.shape)
        if kind != "bias" or bool(value.any()):
            addends.insert(0, Addend(kind, value, None if is_set is None else ~is_set))
        return tuple(addends)

    # the passes

    def pull_back(
        self,
        spec: NodeSpec,
        slots: Collection[int],
        words: BoolArray,
        word: int | None,
        read: Callable[[Values], Tensor],
        seeds: Tensor,
        stops: Collection[int] = (),
    ) -> tuple[Tensor, list[Step]]:
        """The adjoints of the groups on the linear paths to a group.

        Args:
            spec: The group.
            slots: The slots through which the paths lead.
            words: The mask of its words that are read.
            word: The only word at which it is computed; None for all words.
            read: Computes the readout from the values of its parents, at this word.
            seeds: The derivative of some numbers with respect to the readout, `[seed, ...]`.
            stops: Groups at which the pass stops.

        Returns:
            The readout, and the steps of the groups, parents first.
        """
        structure, specs, values = self.structure, self.network.specs, dict[int, Tensor]()
        starts = self.find_read_words(spec, slots, words)
        masks = structure.find_words(starts, self.execution.word_counts)
        order = structure.list_groups(starts, stops)
        single = {i: self.get_word(specs[i], masks[i]) for i in order}
        inner = {i: structure.get_linear_positions(specs[i]) for i in order if i not in stops}
        single[spec.group.index] = word  # of a child that is computed at all words, a parent has all words too
        for child, read_slots in ((spec, slots), *((specs[i], inner[i]) for i in reversed(inner))):
            for parent in (child.parents[k] for k in read_slots):
                if single[child.group.index] is None or not is_aligned(parent):
                    single[parent.index] = None
        with torch.enable_grad():
            for index in order:
                value, positions = self.get_value(specs[index], single[index]), inner.get(index)
                if positions:
                    computed = self.evaluate(specs[index], positions, values, single[index]).expand(value.shape)
                    if index in self.execution.patched:
                        is_set = self.narrow_words(self.execution.patched[index][1], single[index])
                        computed = torch.where(align_mask(is_set, value), value, computed)
                    values[index] = computed
                else:
                    values[index] = value.detach().requires_grad_()
            output, targets = read(values), list(values.values())
        is_batched = len(seeds) > 1
        seeds = seeds.expand(len(seeds), *output.shape)
        gradients = torch.autograd.grad(
            output, targets, seeds if is_batched else seeds[0], is_grads_batched=is_batched, materialize_grads=True
        )
        gradients = gradients if is_batched else tuple(gradient[None] for gradient in gradients)
        return output.detach(), [
            Step(specs[i], masks[i], single[i], gradient, () if i in stops else self.list_addends(specs[i], single[i]))
            for i, gradient in zip(order, gradients, strict=True)
        ]

    def list_norms(self, words: WordMasks) -> list[str]:
        """The names or patterns of the norms among some groups, at the words at which they are computed."""
        names = []
        for index in sorted(words):
            spec, mask = self.network.specs[index], words[index]
            if not is_norm(spec):
                continue
            if index in self.execution.patched and self.get_kind(spec) != "input":
                mask = self.filter_words(mask, ~self.execution.patched[index][1])
            if mask.any():
                names.append(format_norm(spec, mask))
        return names

    def filter_words(self, words: BoolArray, nodes: Tensor) -> BoolArray:
        """The words of a mask with a node that another mask, `[*layout]`, contains."""
        by_word: BoolArray = nodes.movedim(self.layout.word_dim, 0).flatten(1).any(-1).cpu().numpy()
        return np.asarray(words & by_word)


def align_mask(mask: Tensor, value: Tensor) -> Tensor:
    """A mask `[*layout]` with the dims of a value, `[*layout, *shape]`."""
    return mask.reshape(*mask.shape, *[1] * (value.dim() - mask.dim()))


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
    """The parts of several readouts: `values`, `[seed, writer, word]`, with the words of all stacks.

    The last word is that of nodes without words, and has the label "".
    """

    writers: tuple[Writer, ...]
    words: tuple[str, ...]
    values: Tensor


def split_by_read_word(run: LinearRun, step: Step, addend: Addend) -> tuple[Tensor, str] | None:
    """The part of an attention by the word j that it reads, `[seed, *layout]`, and their stack; None for other nodes.

    The mix is `sum_j P(j | i) v_j`, so each word j has a part, with `P(j | i)` held fixed.
    """
    spec = step.spec
    values = [parent for parent in spec.parents if parent.slot == "v."]
    if addend.kind != "attention" or not isinstance(spec.tpm, Attention) or values[0].over != (WORD,):
        return None
    with torch.no_grad():
        context, parents = gather_parents(run.execution, spec, step.word)
        weights = compute_attention(run.execution, spec, context, parents, step.word)
    part = weights * torch.einsum("s...d,...md->s...m", addend.mask(step.adjoint), parents[2])
    return part.sum(run.layout.word_dim + 1), run.network.specs[values[0].index].group.word_stack or ""


def list_writers(run: LinearRun, spec: NodeSpec, addend: Addend, words: BoolArray) -> dict[int, Writer]:
    """The writers of a group, one for each index along its plates that has a node, by the position of the index.

    Args:
        run: The run.
        spec: The group.
        addend: What the writers add.
        words: The mask of the words at which some writers write.
    """
    group, layout = spec.group, run.layout
    units = run.structure.list_units(spec)
    writes = np.ones((len(units), 1), dtype=bool)
    if addend.nodes is not None:
        full = addend.nodes.expand(1, *get_layout_shape(run.execution, spec)[:-1], -1)
        axes = [*map(layout.axis, group.plates), layout.word_dim]
        table = full.movedim(axes, list(range(len(axes)))).reshape(len(units), -1)
        writes = table.cpu().numpy()
    prefix = "bias of " if addend.kind == "bias" else ""
    is_head = isinstance(spec.tpm, Attention) or spec.tpm.has_attention
    writers = {}
    for k, index in enumerate(units):
        written = np.flatnonzero(words & writes[k])
        if len(written):
            name, at = prefix + join_name(group.name, index), () if group.word_stack is None else written.tolist()
            kind = addend.kind
            writers[k] = Writer(name, kind, group.name, index, group.slice, tuple(at), group.plates, is_head)
    return writers


def format_norm(spec: NodeSpec, words: BoolArray) -> str:
    """The name or the pattern of the nodes of a norm at the words of a mask."""
    word = [str(words.argmax())] if words.sum() == 1 else ["*"]
    stars = ["*" for _ in spec.group.plates]
    return "_".join([spec.group.name, *stars, *(word if spec.group.word_stack is not None else [])])


def collect_writers(run: LinearRun, steps: Iterable[Step], seeds: int, *, split_reads: bool = False) -> WriterTable:
    """The table of the parts of a pass.

    Args:
        run: The run.
        steps: The steps of the pass, parents first.
        seeds: The number of readouts.
        split_reads: Whether the part of a head is that of the word which it reads, instead of the word of the head.
    """
    tokens = run.state.tokens
    labels = (*itertools.chain.from_iterable(tokens.values()), "")
    offsets = dict(zip(tokens, itertools.accumulate([0, *map(len, tokens.values())]), strict=False))
    writers: list[Writer] = []
    rows: list[Tensor] = []
    for step, addend in [(item, addend) for item in steps for addend in item.addends]:
        spec, stack = step.spec, step.spec.group.word_stack
        split = split_by_read_word(run, step, addend) if split_reads else None
        if split is not None:
            part, stack = split
        else:
            part = (step.adjoint * addend.mask(addend.value)).flatten(run.layout.rank + 1).sum(-1)
        start = len(labels) - 1 if stack is None else offsets[stack]
        if split is None and step.word is not None:
            start += step.word
        axes = [run.layout.axis(plate) for plate in spec.group.plates]  # the batch has size 1
        part = part[:, 0].movedim(axes, list(range(len(axes)))).reshape(run.structure.count_units(spec), seeds, -1)
        block = torch.nn.functional.pad(part, (start, len(labels) - start - part.shape[-1]))
        for k, writer in list_writers(run, spec, addend, step.words).items():
            if addend.kind != "bias" or bool(block[k].any()):
                writers.append(writer)
                rows.append(block[k])
    values = torch.stack(rows, -2) if rows else torch.zeros(seeds, 0, len(labels))
    return WriterTable(tuple(writers), labels, values)


@dataclass
class Decomposition:
    """The values of some groups as sums of the parts of writers, by one pass from the writers to the groups.

    Where many numbers depend on the same writers (the keys of all words, the values of all heads), this pass is much
    faster than one pass back from each number.

    Args:
        run: The run.
        starts: The groups, and the words at which their parts are needed.
    """

    run: LinearRun
    starts: WordMasks
    writers: list[Writer] = field(init=False, default_factory=list)
    units: list[int] = field(init=False, default_factory=list)
    forward: LinearPass = field(init=False)

    def __post_init__(self) -> None:
        run = self.run
        words = run.structure.find_words(self.starts, run.execution.word_counts)
        self.forward = LinearPass(run.execution, 1, run.structure, words, self._list_blocks, self.units, Norms.FIXED)
        self.forward.compute([*self.starts])

    def _list_blocks(self, spec: NodeSpec) -> list[Block]:
        """What the nodes of a group add themselves: one writer for each index along its plates."""
        blocks = []
        for addend in self.run.list_addends(spec):
            by_unit = list_writers(self.run, spec, addend, self.forward.words[spec.group.index])
            block = self.forward.split_units(spec, addend.mask(addend.value), [*by_unit])
            if addend.kind == "bias":
                is_used = block.movedim(self.run.layout.word_dim, 0).flatten(1).any(-1)
                block = block.index_select(self.run.layout.word_dim, is_used.nonzero().flatten())
                by_unit = {k: by_unit[k] for k, flag in zip([*by_unit], is_used.tolist(), strict=True) if flag}
            blocks.append(([*range(len(self.writers), len(self.writers) + len(by_unit))], block))
            self.writers += by_unit.values()
            self.units += by_unit
        return blocks

    def join(self, index: int) -> tuple[list[Writer], Tensor]:
        """The writers of a group, and their parts `[1, *plates, writer, word, *shape]` at the needed words."""
        cells, block = self.forward.join(index)
        return [self.writers[cell] for cell in cells], block

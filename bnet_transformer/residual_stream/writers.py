"""Writers: the nodes that add to the residual stream, and the parts of a readout that they add, as one table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD, join_name
from bnet_transformer._core.saved_results import stored_class
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.declare import NodeSpec
from bnet_transformer.residual_stream.linear_paths import Kind, LinearRun, Step
from bnet_transformer.tpm import Attention


@stored_class
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

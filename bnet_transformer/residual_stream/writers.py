"""Writers: the nodes that add to the residual stream, and the parts of a readout that they add, as one table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD, join_name
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.declare import NodeSpec
from bnet_transformer.residual_stream.linear_paths import Kind, LinearRun, Step
from bnet_transformer.tpm import Attention


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
    """

    name: str
    kind: Kind
    group: str
    plates: tuple[int, ...] = ()
    slice: int | None = None
    words: tuple[int, ...] = field(default=(), repr=False)

    @property
    def node_pattern(self) -> str:
        """The name or the pattern of the nodes that write."""
        word = "" if not self.words else f"_{self.words[0]}" if len(self.words) == 1 else "_*"
        return join_name(self.group, self.plates) + word


@dataclass(frozen=True)
class WriterTable:
    """The parts of several readouts: `values`, `[seed, *states, writer, word]`, with the words of all stacks.

    The last word is that of nodes without words, and has the label "".
    """

    writers: tuple[Writer, ...]
    words: tuple[str, ...]
    values: Tensor
    norms: tuple[str, ...]


def find_active_words(run: LinearRun, adjoint: Tensor) -> list[int]:
    """The words at which an adjoint, `[seed, *layout, *shape]`, is not zero."""
    is_active = (adjoint != 0).movedim(run.layout.word_dim + 1, 0).flatten(1).any(-1)
    return is_active.nonzero().flatten().tolist()


def split_by_read_word(run: LinearRun, step: Step, words: Sequence[int]) -> tuple[Tensor, str] | None:
    """The part of an attention by the word j that it reads, `[seed, *layout]`, and their stack; None for other nodes.

    The mix is `sum_j P(j | i) v_j`, so each word j has a part, with `P(j | i)` held fixed.
    """
    spec, dim = step.spec, run.layout.word_dim
    values = [parent for parent in spec.parents if parent.slot == "v."]
    if step.kind != "attention" or not isinstance(spec.tpm, Attention) or values[0].over != (WORD,):
        return None
    stack = run.network.specs[values[0].index].group.word_stack or ""
    weights = run.get_attention_weights(spec)
    _, parents = gather_parents(run.execution, spec)
    index = torch.tensor(words, dtype=torch.long, device=step.adjoint.device)
    adjoint = step.adjoint.index_select(dim + 1, index)
    weights, v = (x.index_select(dim, index) if x.shape[dim] > 1 else x for x in (weights, parents[2]))
    part = weights * torch.einsum("s...d,...md->s...m", adjoint, v)
    return part.sum(dim + 1), stack  # the word is the last dim of the layout


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
    rows: list[tuple[Writer, Tensor]] = []
    norms: list[str] = []
    for step in steps:
        group = step.spec.group
        words = find_active_words(run, step.adjoint)
        active = tuple(words) if group.word_stack is not None else ()
        part, stack = step.part, group.word_stack
        if words and split_reads and (split := split_by_read_word(run, step, words)) is not None:
            part, stack = split
        if step.is_norm and words:
            plates = ["*" for _ in group.plates]
            word = [str(active[0])] if len(active) == 1 else ["*"] * bool(active)
            norms.append("_".join([group.name, *plates, *word]))
        part = _move_plates(run, step.spec, part)  # [*plates, seed, *states, word]
        row = part.new_zeros(*part.shape[:-1], len(labels))
        start = len(labels) - 1 if stack is None else offsets[stack]
        row[..., start : start + part.shape[-1]] = part
        sizes = [run.network.graph.plate_sizes[plate] for plate in group.plates]
        for index in reversed(list(itertools.product(*map(range, sizes)))):
            if step.kind != "bias" or bool(row[index].any()):
                name = join_name(group.name, index)
                name = f"bias of {name}" if step.kind == "bias" else name
                rows.append((Writer(name, step.kind, group.name, index, group.slice, active), row[index]))
    sizes = [run.execution.count_states(index) for index in layout.enumerated]
    rows.reverse()
    values = torch.stack([row for _, row in rows], -2) if rows else torch.zeros(seeds, *sizes, 0, len(labels))
    return WriterTable(tuple(writer for writer, _ in rows), labels, values, tuple(reversed(norms)))


def _move_plates(run: LinearRun, spec: NodeSpec, part: Tensor) -> Tensor:
    """A part `[seed, *layout]` as `[*plates, seed, *states, word]`, with the plates of its group."""
    layout = run.layout
    part = part.select(1 + layout.batch_dim, 0)
    offset = 1 + layout.batch_dim
    plates = [layout.plates.index(plate) for plate in spec.group.plates]
    for k in reversed(range(len(layout.plates))):
        if k not in plates:
            part = part.select(offset + k, 0)
    source = [offset + sorted(plates).index(k) for k in plates]
    return part.movedim(source, list(range(len(source))))

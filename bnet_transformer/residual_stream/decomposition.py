"""The values of node groups as sums of the parts of writers: one pass from the writers to some groups.

Where many numbers depend on the same writers (the keys of all words, the values of all heads), this pass is much faster
than one pass back from each number. A residual connection passes the parts on unchanged, so that only maps and norms
cost time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.compiler.linear_groups import (
    AffineFunction,
    find_linear_groups,
    find_residuals,
    get_linear_positions,
    is_aligned,
)
from bnet_transformer.declare import NodeSpec
from bnet_transformer.residual_stream.linear_paths import ActiveWords, Kind, LinearRun
from bnet_transformer.residual_stream.writers import Writer, format_norm, list_writers


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

"""The linear structure of a net: the sums, linear maps and norms on the paths from writers to a node.

A node is *affine* in the parents that `TPM.linear_parents` names. A *path* leads back from a node through these
parents. It ends at a *writer*: a group without such parents, or what an affine group adds itself, such as its bias or
the mix of an attention with a residual connection. Edges between writers and readers (Conmy et al. 2023) and
contributions to a readout (Elhage et al. 2021) are two readings of these paths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD
from bnet_transformer._core.tensors import BoolArray
from bnet_transformer.compiler.gather import ExecutionState, TensorLayout, gather_parents
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.tpm import TPM, Attention, EvalContext

WordMasks = Mapping[int, BoolArray]  # by group: the mask of words, `[word]`; one entry for a group without words


@dataclass(frozen=True)
class LinearStructure:
    """The linear paths of a net.

    Args:
        network: The net.
        outcomes: Random groups whose logits or mean may be the end of a path.
        leaves: Groups through which no path continues, because `do` sets all their nodes.
    """

    network: Network
    outcomes: tuple[int, ...] = ()
    leaves: frozenset[int] = frozenset()

    @cached_property
    def word_dependent(self) -> frozenset[int]:
        """The inputs and their descendants: the groups whose value depends on the words."""
        inputs = {spec.group.index for spec in self.network.specs if spec.tpm.kind == "input"}
        return frozenset(inputs | set(self.network.graph.descendants(inputs)))

    def is_vector(self, index: int) -> bool:
        """Whether a group has real values that depend on the words."""
        return index in self.word_dependent and not self.network.specs[index].tpm.is_index_valued

    @cached_property
    def _linear_positions(self) -> dict[int, tuple[int, ...]]:
        """The slots through which paths continue, by group."""
        return {}

    def get_linear_positions(self, spec: NodeSpec) -> tuple[int, ...]:
        """The slots through which paths to a group continue."""
        index = spec.group.index
        if index not in self._linear_positions:
            self._linear_positions[index] = self._find_linear_positions(spec)
        return self._linear_positions[index]

    def _find_linear_positions(self, spec: NodeSpec) -> tuple[int, ...]:
        """The slots that a TPM declares as linear; none for a leaf, or for a random value."""
        index = spec.group.index
        if index in self.leaves or (spec.tpm.is_random and index not in self.outcomes):
            return ()
        return spec.tpm.linear_parents(*spec.tpm_parents)

    def get_reading_positions(self, spec: NodeSpec) -> tuple[int, ...]:
        """The slots with vectors in which paths to a group end."""
        if spec.group.index in self.leaves:
            return ()
        linear = self.get_linear_positions(spec)
        return tuple(k for k, p in enumerate(spec.parents) if k not in linear and self.is_vector(p.index))

    def list_linear_parents(self, index: int) -> list[int]:
        """The linear parents of a group, each once."""
        spec = self.network.specs[index]
        return list(dict.fromkeys(spec.parents[k].index for k in self.get_linear_positions(spec)))

    def list_groups(self, ends: Collection[int], stops: Collection[int] = ()) -> list[int]:
        """The groups on the linear paths to some groups, these included, parents first; `stops` are not followed."""
        visited, stack = set[int](), list(ends)
        while stack:
            index = stack.pop()
            if index not in visited:
                visited.add(index)
                stack += [] if index in stops else self.list_linear_parents(index)
        return sorted(visited)

    def find_sums(self, starts: Collection[int], writers: Collection[int]) -> tuple[list[int], list[int]]:
        """The nearest sums and writers before some groups, and the groups between them, each parents first."""
        sums, between, stack = set[int](), set[int](), list(starts)
        while stack:
            index = stack.pop()
            parents = self.list_linear_parents(index)
            if index in writers or len(parents) != 1:
                sums.add(index)
            elif index not in between:
                between.add(index)
                stack += parents
        return sorted(sums), sorted(between)

    # the words

    def find_words(self, starts: WordMasks, word_counts: Mapping[str, int]) -> dict[int, BoolArray]:
        """The words of each group on which some words of other groups depend along linear paths."""
        masks = {index: mask.copy() for index, mask in starts.items()}
        for index in reversed(self.list_groups(starts)):
            spec = self.network.specs[index]
            for parent in (spec.parents[k] for k in self.get_linear_positions(spec)):
                count = self.network.specs[parent.index].group.count_words(word_counts)
                read = find_read_words(parent, masks[index], count)
                masks[parent.index] = masks[parent.index] | read if parent.index in masks else read
        return masks

    # the units: the indices along the plates of a group

    def list_units(self, spec: NodeSpec) -> list[tuple[int, ...]]:
        """The index of each unit of a group along its plates."""
        sizes = self.network.graph.plate_sizes
        return list(itertools.product(*(range(sizes[plate]) for plate in spec.group.plates)))

    def count_units(self, spec: NodeSpec) -> int:
        """The number of units of a group."""
        return math.prod(self.network.graph.plate_sizes[plate] for plate in spec.group.plates)

    def spread_units(self, table: Tensor, spec: NodeSpec, layout: TensorLayout, dims: int) -> Tensor:
        """A table `[*cell, unit]` with the units along the plates of a group, `[*cell, *plates, word, *shape]`.

        The result has size 1 along all other of the `dims` dims of the layout.
        """
        plates, leading, shape = spec.group.plates, table.shape[:-1], [1] * (dims - 1)
        sizes = [self.network.graph.plate_sizes[plate] for plate in plates]
        for plate, size in zip(plates, sizes, strict=True):
            shape[layout.axis(plate) - 1] = size
        order = sorted(range(len(plates)), key=lambda k: layout.axis(plates[k]))
        grid = table.reshape(*leading, *sizes)
        return grid.permute(*range(len(leading)), *(len(leading) + k for k in order)).reshape(*leading, *shape)

    def split_units(self, value: Tensor, spec: NodeSpec, layout: TensorLayout) -> Tensor:
        """A value `[batch, *plates, word, *shape]` for one unit of a group at a time, `[unit, batch, ...]`."""
        units = torch.eye(self.count_units(spec), dtype=value.dtype, device=value.device)
        return value[None] * self.spread_units(units, spec, layout, value.dim())[:, None]


def find_read_words(parent: ParentSpec, words: BoolArray, num_words: int) -> BoolArray:
    """The words of a parent, of `num_words`, on which some words of a child depend, `[word]`."""
    if parent.reach.kind == "same":  # a parent without words is one word that all words share
        return words if len(words) == num_words else np.full(num_words, words.any())
    return np.asarray(parent.reach.matrix(len(words), num_words)[words].any(0))


def find_reached_words(parent: ParentSpec, words: BoolArray, num_words: int) -> BoolArray:
    """The words of a child, of `num_words`, that depend on some words of a parent, `[..., word]` each."""
    if parent.reach.kind == "same":
        return np.broadcast_to(words, (*words.shape[:-1], num_words))
    table = parent.reach.matrix(num_words, words.shape[-1])
    reached: BoolArray = (words.astype(np.float32) @ table.T.astype(np.float32)) > 0
    return reached


def is_aligned(parent: ParentSpec) -> bool:
    """Whether word i of a child depends on word i of a parent, or on a parent without words."""
    return parent.reach.kind == "same" and WORD not in (*parent.over, *dict(parent.pick))


def is_norm(spec: NodeSpec) -> bool:
    """Whether the value of a group contains the scale of a norm."""
    return type(spec.tpm).norm_scale is not TPM.norm_scale


def find_residuals(spec: NodeSpec, positions: Collection[int]) -> dict[int, int]:
    """The groups that a group adds unchanged, and only so, each with its number of slots."""
    residual = {
        k
        for k in spec.tpm.residual_parents(*spec.tpm_parents)
        if k in positions and is_aligned(spec.parents[k]) and not (spec.parents[k].over or spec.parents[k].pick)
    }
    indices = [parent.index for parent in spec.parents]
    return {i: indices.count(i) for i in set(indices) if all(k in residual for k, j in enumerate(indices) if j == i)}


# --------------------------------------------------------------------------------------------------------------------
# The value of a group as an affine function of its linear slots.


def evaluate_affine(
    state: ExecutionState,
    spec: NodeSpec,
    context: EvalContext,
    parents: Sequence[Tensor],
    base: Sequence[Tensor],
    word: int | None = None,
) -> Tensor:
    """The value of a group, with the attention and the scale of a norm of other values of the slots.

    Args:
        state: The run.
        spec: The group.
        context: The context of its TPM.
        parents: The values of the slots.
        base: The values of the slots that determine the attention and the scale.
        word: The only word of the values; None for all words.

    Returns:
        The value, `[*layout, *shape]`; of a discrete group the logits.
    """
    tpm = spec.tpm
    if isinstance(tpm, Attention):  # the row may be set by do, so that it is no function of q and k
        value = tpm.mix(compute_attention(state, spec, context, base, word), *parents)
    else:
        value = tpm.linear_value(context, tpm.norm_scale(context, *base), *parents)
    return state.layout.pad_dims(value, len(spec.shape) or tpm.kind == "discrete")


@torch.no_grad()
def compute_attention(
    state: ExecutionState, spec: NodeSpec, context: EvalContext, parents: Sequence[Tensor], word: int | None = None
) -> Tensor:
    """The weights of an attention, `[*layout, word read]`, with the rows that `do` sets."""
    assert isinstance(spec.tpm, Attention)
    weights = spec.tpm.normaliser.normalise(*spec.tpm.scores(context, *parents))
    weights = state.layout.pad_dims(weights, 1)
    if spec.group.index in state.attention_rows:
        axis = state.layout.word_dim
        rows, is_set = (
            x if word is None or x.shape[axis] == 1 else x.narrow(axis, word, 1)
            for x in state.attention_rows[spec.group.index]
        )
        weights = torch.where(is_set[..., None], rows, weights)
    return weights


def compute_constant(
    state: ExecutionState, spec: NodeSpec, positions: Collection[int], word: int | None = None
) -> Tensor:
    """What a group adds to its linear slots: its value if these are zero, such as a bias or the mix of a head."""
    context, parents = gather_parents(state, spec, word)
    zeroed = [torch.zeros_like(x) if k in positions else x for k, x in enumerate(parents)]
    return evaluate_affine(state, spec, context, zeroed, parents, word)


# What each unit of a group of writers adds to a group that sums over them: each head by its own matrix. The zeros of
# all other heads would be mapped too if each head were a full collection.


def adds_units(network: Network, spec: NodeSpec, parent: int) -> bool:
    """Whether a group adds one term for each unit of a parent group."""
    plates = network.specs[parent].group.plates
    slots = [slot for slot in spec.parents if slot.index == parent]
    is_single = len(slots) == 1 and slots[0].over == plates != () and slots[0].reach.kind == "same"
    is_plain = all(slot.over in ((), plates) and not slot.pick for slot in spec.parents)
    return spec.tpm.adds_entries and is_single and is_plain


def map_units(state: ExecutionState, positions: Collection[int], spec: NodeSpec, parent: int) -> Tensor:
    """The term of each unit of a parent for which `adds_units` is true, `[unit, *layout, *shape]`.

    Args:
        state: The run, in which the parent has the values that are mapped.
        positions: The linear slots of the group.
        spec: The group that maps the parent.
        parent: The parent group.

    Returns:
        The terms, without the constant of the map.
    """
    context, parents = gather_parents(state, spec)
    rank = state.layout.rank
    inputs, zeros = [], []
    for k, (slot, value) in enumerate(zip(spec.parents, parents, strict=True)):
        count, event = len(slot.over), value.shape[rank + len(slot.over) :]
        if k in positions:
            zero = value.new_zeros([1] * (1 + rank + count) + list(event))
            zeros.append(zero)
            if slot.index != parent:
                inputs.append(zero)
                continue
        entries = value[None]
        if count:  # the units are a separate dim, and collections have one entry
            sizes = [state.network.graph.plate_sizes[plate] for plate in slot.over]
            full = value.expand(*value.shape[:rank], *sizes, *event)
            units = full.movedim(list(range(rank, rank + count)), list(range(count))).flatten(0, count - 1)
            entries = units.reshape(*units.shape[: 1 + rank], *[1] * count, *event)
        inputs.append(entries)
        if k not in positions:
            zeros.append(entries)
    terms: Tensor = spec.tpm.value(context, *inputs) - spec.tpm.value(context, *zeros)
    return terms

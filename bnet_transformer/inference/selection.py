"""Parse the slices, words and heads that users pass into indices and node groups."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_int, resolve_index
from bnet_transformer._core.tokens import as_labels
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.graph import NodeGroup
from bnet_transformer.reference import GroundModel


def merge_words(attention: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """`P(j | i)` for groups of tokens: the sum over the tokens j of a group, the mean over the tokens i of a group."""
    read = torch.stack([attention[..., list(group)].sum(-1) for group in groups], -1)
    return torch.stack([read[..., list(group), :].mean(-2) for group in groups], -2)


def find_attention_spec(model: GroundModel, slice_: int, role: str | None) -> NodeSpec:
    """The node group with attention over words in a slice; a negative slice counts from the last of its stack."""
    by_stem = model.network.graph.by_stem
    stack = by_stem[role][0].stack if isinstance(role, str) and role in by_stem else None
    slice_ = resolve_index("slice", slice_, get_depth(model.network, stack))
    matches = [m for m in model.network.specs if m.group.step == slice_ and m.has_word_attention]
    names = {spec.group.stem: spec for spec in matches}
    if role is not None:
        if not isinstance(role, str) or role not in names:
            raise unknown_name_error("role with attention", role, names)
        return names[role]
    if len(matches) > 1:
        raise BNetError(f"slice {slice_} has several nodes with attention", hint=f"Pass role=: {', '.join(names)}")
    if not matches:
        in_slice = [m for m in model.network.specs if m.group.step == slice_]
        reasons = [m.tpm.no_attention_reason() for m in in_slice if m.word_parents]
        actual = "; ".join(dict.fromkeys(reasons)) or ", ".join(sorted({type(m.tpm).__name__ for m in in_slice}))
        raise BNetError(f"attention of slice {slice_}", expected="a node with attention P(j | i)", actual=actual)
    return matches[0]


def find_state_group(network: Network, stack: str) -> NodeGroup | None:
    """The hidden state of a stack that is the input of its first slice, if there is one without plates."""
    return next((g for g in network.graph.groups if g.stack == stack and network.is_word_state(g)), None)


def parse_slices(slices: object, network: Network) -> list[int]:
    """The indices of slices, from one index or several; negative ones count from the end of the deepest stack."""
    return parse_indices("slices", slices, get_depth(network), is_from_end=True)


def parse_attention_slices(network: Network, slices: object, role: str | None) -> tuple[str, list[int]]:
    """The stack and the indices of the slices with attention.

    Args:
        network: The net.
        slices: The index of a slice, several indices, or `"all"`. Negative ones count from the end of the stack.
        role: The role with attention, which determines the stack; by default the first stack.
    """
    graph = network.graph
    if role is not None and (not isinstance(role, str) or role not in graph.by_stem):
        raise unknown_name_error("role", role, graph.by_stem)
    stack = graph.by_stem[role][0].stack if role is not None else next(iter(graph.slices), "")
    depth = get_depth(network, stack)
    if stack not in graph.word_stacks:
        subject = f"the stack {stack!r} has no words" if stack else "the net has no words"
        raise BNetError(f"slices: {subject}, so that there is no attention")
    if isinstance(slices, str):
        check_choice("slices", slices, ("all",))
        return stack, list(range(depth))
    return stack, parse_indices("slices", slices, depth, is_from_end=True)


def get_depth(network: Network, stack: str | None = None) -> int:
    """The number of slices of a stack, by default of the deepest stack; an error if there are no slices."""
    depth = network.graph.depth if stack is None else network.graph.slices.get(stack, 0)
    if not depth:
        raise BNetError(f"slices: {f'the stack {stack!r}' if stack else 'the net'} has no slices")
    return depth


def parse_words(tokens: Sequence[str], words: object) -> list[int]:
    """The indices of words, from indices or from words (all their positions)."""
    items = to_list(words)
    indices: list[int] = []
    for item in items:
        if isinstance(item, str):
            positions = as_labels(tokens).find_all(item)
            if not positions:
                raise unknown_name_error("word", item, tokens)
            indices.extend(positions)
        else:
            indices.extend(parse_indices("words", item, len(tokens)))
    return sorted(set(indices))


def to_list(value: object) -> list[object]:
    """An item or a collection of items, as a list."""
    if isinstance(value, Tensor | np.ndarray):
        with suppress(RuntimeError):  # a tensor without a list form is an error later
            value = value.tolist()
    return list(value) if isinstance(value, Collection) and not isinstance(value, str) else [value]


def parse_indices(subject: str, indices: object, count: int, *, is_from_end: bool = False) -> list[int]:
    """Indices below `count`, from one index or several; with `is_from_end` negative ones count from the end."""
    result = []
    for item in to_list(indices):
        if is_from_end:
            result.append(resolve_index(subject, item, count))
            continue
        number = check_int(subject, item, minimum=0)
        if number >= count:
            raise BNetError(subject, expected=f"integers from 0 to {count - 1}", actual=number)
        result.append(number)
    if not result:
        raise BNetError(subject, expected=f"at least one integer from 0 to {count - 1}", actual="an empty list")
    return sorted(set(result))

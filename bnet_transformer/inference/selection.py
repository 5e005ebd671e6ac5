"""Parse the slices, words and heads that users pass into indices and node groups."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer._core.tokenizer import match_label
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.graph import NodeGroup
from bnet_transformer.reference import GroundModel


def merge_words(attention: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """`P(j | i)` for groups of tokens: the sum over the tokens j of a group, the mean over the tokens i of a group."""
    read = torch.stack([attention[..., list(group)].sum(-1) for group in groups], -1)
    return torch.stack([read[..., list(group), :].mean(-2) for group in groups], -2)


def find_attention_spec(model: GroundModel, slice_: int, role: str | None) -> NodeSpec:
    """The node group with attention over words in a slice."""
    depth = get_depth(model.network)
    if check_int("slice", slice_, minimum=0) >= depth:
        raise BNetError("slice", expected=f"a slice from 0 to {depth - 1}", actual=slice_)
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
    """The indices of slices, from one index or several."""
    return parse_indices("slices", slices, get_depth(network))


def parse_attention_slices(network: Network, slices: object, role: str | None) -> tuple[str, list[int]]:
    """The stack and the indices of the slices with attention.

    Args:
        network: The net.
        slices: The index of a slice, several indices, or `"all"`.
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
    numbers = sorted({check_int("slice", item, minimum=0) for item in to_list(slices)})
    if not numbers or numbers[-1] >= depth:
        raise BNetError("slices", expected=f"slices from 0 to {depth - 1}", actual=slices)
    return stack, numbers


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
            match = match_label(item, tokens)
            positions = [k for k, token in enumerate(tokens) if token == match]
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


def parse_indices(subject: str, indices: object, count: int) -> list[int]:
    """Indices below `count`, from one index or several."""
    result = []
    for item in to_list(indices):
        number = check_int(subject, item, minimum=0)
        if number >= count:
            raise BNetError(subject, expected=f"integers from 0 to {count - 1}", actual=number)
        result.append(number)
    if not result:
        raise BNetError(subject, expected=f"at least one integer from 0 to {count - 1}", actual="an empty list")
    return sorted(set(result))

"""Sweeps of sentences of unequal lengths: one sweep for each length, if words play no part in the cells and the metric.

The cells of all lengths must be the same, such as the heads of `over=("slice", "head")`, each at all of its words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD, split_path
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.sweeps.cell_spec import READ, PatchCells
from bnet_transformer.interventions.sweeps.examples import get_sentence_state
from bnet_transformer.interventions.sweeps.metric import split_metric
from bnet_transformer.interventions.sweeps.request import SweepRequest, parse_request
from bnet_transformer.reference import GroundModel


@dataclass(frozen=True)
class LengthPart:
    """The examples of one length: their numbers, and the sweep of these examples."""

    examples: tuple[int, ...]
    request: SweepRequest


def parse_requests(
    clean: object, corrupt: object, *, metric: object, words: object, **options: Any
) -> list[LengthPart]:
    """Validate the arguments of a sweep, for the examples of each length.

    Raises:
        BNetError: The sentences differ in length, and the cells or the metric refer to words.
    """
    parts = _split_examples(clean, corrupt) if words is None else []
    if len(parts) < 2:
        request = parse_request(clean, corrupt, metric=metric, words=words, **options)
        return [LengthPart(tuple(range(len(request.base))), request)]
    states = [get_sentence_state(side[0]) for side in (clean, corrupt) if isinstance(side, list | tuple)]
    assert states[0] is not None
    metrics = split_metric(states[0].model, metric, parts, has_words=False)
    result = []
    for numbers, part_metric in zip(parts, metrics, strict=True):
        sides = [[s[k] for k in numbers] if isinstance(s, list | tuple) else s for s in (clean, corrupt)]
        request = parse_request(*sides, metric=part_metric, words=None, **options)
        _check_cells(request.base.model, request.cells)
        result.append(LengthPart(numbers, request))
    first = result[0].request.cells
    for part in result[1:]:
        cells = part.request.cells
        if (cells.axes, cells.positions, cells.names) != (first.axes, first.positions, first.names):
            only = next(iter({*cells.names.values()} ^ {*first.names.values()}), "")
            expected = "the same cells in sentences of all lengths"
            raise BNetError("at", expected=expected, actual=f"{only}, which only sentences of one length have")
    return result


def _split_examples(clean: object, corrupt: object) -> list[tuple[int, ...]]:
    """The numbers of the examples of each length; empty if the arguments are no lists of sentences of equal number."""
    sides = [side for side in (clean, corrupt) if isinstance(side, list | tuple)]
    lengths = [[_get_length(sentence) for sentence in side] for side in sides]
    is_valid = len({len(side) for side in lengths}) == 1 and all(None not in side for side in lengths)
    if not is_valid:
        return []
    numbers: dict[object, list[int]] = {}
    for k, length in enumerate(zip(*lengths, strict=True)):
        if len({*length}) > 1:
            actual = f"{length[0]} and {length[1]} words"
            hint = "Pairs have equal lengths, or align words in a sweep: words={word: word of the other sentence}"
            raise BNetError(f"corrupt[{k}]", expected=f"as many words as clean[{k}]", actual=actual, hint=hint)
        numbers.setdefault(length, []).append(k)
    return [tuple(part) for part in numbers.values()]


def _get_length(sentence: object) -> tuple[int, ...] | None:
    """The number of words of each stack; None if the object is no sentence."""
    state = get_sentence_state(sentence)
    return None if state is None else tuple(state.model.ground.word_counts.values())


def _check_cells(model: GroundModel, cells: PatchCells) -> None:
    """Raise an error for cells that set only some words of their nodes."""
    expected, actual = "cells of all words, because the sentences differ in length", ""
    hint = 'Pass over=("slice", "head"), for example, or names without a word, such as "a_0_1"'
    axes = [axis for axis in cells.axes if axis in (WORD, READ)]
    if axes:
        raise BNetError("over", expected=expected, actual=f"the axis {axes[0]!r}", hint=hint)
    for sites in cells.sites:
        stack = model.network.specs[sites.group].group.word_stack
        if stack is None:
            continue
        count = model.ground.word_counts[stack]
        pairs = np.unique(np.stack([sites.cells, sites.nodes // count, sites.nodes % count]), axis=1)
        _, counts = np.unique(pairs[:2], axis=1, return_counts=True)
        if bool((counts < count).any()):
            actual = cells.names[int(pairs[0, int(counts.argmin())])]
    for path in cells.paths:
        for name in split_path(cells.names[path.cell]):
            parsed = model.ground.template.parse_name(name, model.ground.word_counts)
            actual = cells.names[path.cell] if parsed is not None and parsed[0].word_stack is not None else actual
    if actual:
        raise BNetError("at", expected=expected, actual=actual, hint=hint)


def join_examples(parts: Sequence[LengthPart], tables: Sequence[Tensor]) -> Tensor:
    """Join tables of the examples of each length, `[*axes, example]`, in the order of all examples."""
    order = torch.tensor([k for part in parts for k in part.examples])
    return torch.cat(list(tables), -1)[..., order.argsort()]

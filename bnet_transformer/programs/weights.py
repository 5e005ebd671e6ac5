"""The weights of a compiled program: a head for each aggregate, and hidden units for each map.

A head scores a key by the number of conditions of the selector that it satisfies, times the sharpness s. With m
conditions, BOS has the score `(m - 1/2) s`, so that the head attends to BOS if no word satisfies all. The hidden units
of a map of states are indicators of one state, or of one pair; those of a map of numbers are steps between two numbers,
each the difference of two units (the maps of tracr, Lindner et al. 2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError
from bnet_transformer.programs.layout import Layout
from bnet_transformer.programs.sops import Aggregate, Fallback, Map, SelectedShare, SequenceMap, SOp, Value

Coordinates = Mapping[int, float]
MIN_GAP = 1e-5  # between numbers with different results, so that the error of a norm is no step


@dataclass(frozen=True)
class HiddenUnit:
    """One hidden unit, `relu(w . x + bias)`, and what it adds to the stream."""

    inputs: Coordinates
    bias: float
    outputs: Coordinates


def list_units(layout: Layout, sop: SOp) -> list[HiddenUnit]:
    """The hidden units that compute a variable."""
    match sop:
        case Map(x=x) if x.is_numeric:
            outputs = {value: layout.encode(sop, sop.apply(value)) for value in layout.program.list_values(x)}
            # BOS turns the units off, so that BOS has no value.
            return [*_step_units(layout.read_number(x), outputs, {layout.bos: -1.0} if layout.has_bos else {}, 1.0)]
        case Map(x=x):
            states = layout.program.list_values(x)
            return [HiddenUnit(layout.encode(x, v), 0.0, layout.encode(sop, sop.apply(v))) for v in states]
        case SequenceMap(x=x, y=y) if x.is_numeric or y.is_numeric:
            return [*_mixed_units(layout, sop)]
        case SequenceMap(x=x, y=y):
            pairs = itertools.product(*map(layout.program.list_values, (x, y)))
            return [_pair_unit(layout, sop, *pair) for pair in pairs if x is not y or pair[0] == pair[1]]
        case Fallback(x=x, y=y):
            present = dict.fromkeys(layout.list_columns(x), -1.0)
            units = [HiddenUnit(layout.encode(x, v), 0.0, layout.encode(sop, v)) for v in layout.values(x)]
            return units + [
                HiddenUnit(_add(layout.encode(y, v), present), 0.0, layout.encode(sop, v)) for v in layout.values(y)
            ]
    raise AssertionError(sop)


def _pair_unit(layout: Layout, sop: SequenceMap, first: Value, second: Value) -> HiddenUnit:
    """The indicator of a pair of states."""
    inputs = _add(layout.encode(sop.x, first), layout.encode(sop.y, second))
    return HiddenUnit(inputs, -1.0, layout.encode(sop, sop.apply(first, second)))


def _mixed_units(layout: Layout, sop: SequenceMap) -> Iterator[HiddenUnit]:
    """The units of a function of a state and a number: the steps in the number, for each state."""
    state_sop, number_sop = (sop.y, sop.x) if sop.x.is_numeric else (sop.x, sop.y)
    for state in layout.program.list_values(state_sop):
        outputs = {}
        for number in layout.program.list_values(number_sop):
            arguments = (number, state) if sop.x.is_numeric else (state, number)
            outputs[number] = layout.encode(sop, sop.apply(*arguments))
        yield from _step_units(layout.read_number(number_sop), outputs, layout.encode(state_sop, state), 0.0)


def _step_units(
    number: Coordinates, outputs: Mapping[float, Coordinates], switch: Coordinates, switch_bias: float
) -> Iterator[HiddenUnit]:
    """The units of a piecewise constant function of a number; they are on if `switch . x + switch_bias` is 1, not 0.

    Args:
        number: The linear function of the stream that is the number.
        outputs: The output at each number, in increasing order of the numbers.
        switch: The inputs of the switch.
        switch_bias: The bias of the switch.
    """
    numbers = [*outputs]
    yield HiddenUnit(switch, switch_bias, outputs[numbers[0]])
    largest = max(map(abs, numbers))
    for low, high in itertools.pairwise(numbers):
        if outputs[low] == outputs[high]:
            continue
        if high - low < MIN_GAP:
            hint = "Map it to other numbers, or aggregate fewer words"
            expected = f"numbers with different results that differ by at least {MIN_GAP}"
            raise BNetError("map of a numeric s-op", expected=expected, actual=(low, high), hint=hint)
        slope, threshold = 2 / (high - low), (low + high) / 2
        # |slope (x - threshold)| + 1/2 is at most this, so a switch of 0 turns the unit off.
        bound = slope * (largest + abs(threshold)) + 1
        change = _add(outputs[high], {k: -v for k, v in outputs[low].items()})
        for shift in (0.5, -0.5):
            inputs = _add({k: slope * v for k, v in number.items()}, {k: bound * v for k, v in switch.items()})
            bias = -slope * threshold + shift + bound * (switch_bias - 1)
            yield HiddenUnit(inputs, bias, change if shift > 0 else {k: -v for k, v in change.items()})


def _add(first: Coordinates, second: Coordinates) -> dict[int, float]:
    """The sum of two vectors of coordinates."""
    return {k: first.get(k, 0.0) + second.get(k, 0.0) for k in {**first, **second}}


@dataclass(frozen=True)
class Head:
    """The matrices of a head: `W_q` and `W_k`, `[key, dim]`, `W_v`, `[value, dim]`, and `W_o`, `[dim, value]`."""

    W_q: Tensor
    W_k: Tensor
    W_v: Tensor
    W_o: Tensor


def build_head(layout: Layout, sop: SOp, sharpness: float, one: float) -> Head:
    """The matrices of the head that computes an aggregate.

    Args:
        layout: The layout.
        sop: The aggregate.
        sharpness: The score of a satisfied condition.
        one: The coordinate of the constant direction.
    """
    assert isinstance(sop, Aggregate | SelectedShare)
    terms = sop.selector.terms
    rows = [(term, key) for term in terms for key in layout.values(term.keys)]
    W_q = torch.zeros(len(rows) + layout.has_bos, layout.dim, dtype=torch.float64)
    W_k = torch.zeros_like(W_q)
    for row, (term, key) in enumerate(rows):
        W_k[row, layout.get_column(term.keys, key)] = 1.0
        for query in layout.values(term.queries):
            W_q[row, layout.get_column(term.queries, query)] = sharpness * term.holds(key, query)
    if layout.has_bos:
        # A share selects BOS together with the words, an aggregate only if there is no word.
        score = len(terms) - (0.5 if isinstance(sop, Aggregate) else 0.0)
        W_q[-1, layout.one], W_k[-1, layout.bos] = sharpness * score / one, 1.0
    if isinstance(sop, SelectedShare):
        reads: list[Coordinates] = [{layout.bos: 1.0}]
    elif sop.is_numeric:
        reads = [layout.read_number(sop.values)]
    else:
        reads = [{column: 1.0} for column in layout.list_columns(sop.values)]
    W_v = torch.zeros(len(reads), layout.dim, dtype=torch.float64)
    W_o = torch.zeros(layout.dim, len(reads), dtype=torch.float64)
    for row, (source, target) in enumerate(zip(reads, layout.list_columns(sop), strict=True)):
        W_o[target, row] = 1.0
        for column, factor in source.items():
            W_v[row, column] = factor
    return Head(W_q, W_k, W_v, W_o)


def stack_heads(heads: list[Head], sizes: tuple[int, int, int, int]) -> dict[str, Tensor]:
    """The matrices of the heads of a slice, `[head, ...]`, padded with zeros to a number of heads and to their widths.

    Args:
        heads: The heads.
        sizes: The number of heads, the width of keys, that of values, and that of the stream.
    """
    count, key_width, value_width, dim = sizes
    shapes = {"q": (key_width, dim), "k": (key_width, dim), "v": (value_width, dim), "o": (dim, value_width)}
    stacked = {name: torch.zeros(count, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    for k, head in enumerate(heads):
        for name, matrix in zip("qkvo", (head.W_q, head.W_k, head.W_v, head.W_o), strict=True):
            stacked[name][k, : matrix.shape[0], : matrix.shape[1]] = matrix
    return stacked


def stack_units(units: list[HiddenUnit], hidden: int, dim: int) -> dict[str, Tensor]:
    """The parameters of the feed-forward step of a slice, with `hidden` units, of which the last ones may be zero."""
    weight_in = torch.zeros(hidden, dim, dtype=torch.float64)
    bias_in = torch.zeros(hidden, dtype=torch.float64)
    weight_out = torch.zeros(dim, hidden, dtype=torch.float64)
    for k, unit in enumerate(units):
        bias_in[k] = unit.bias
        for column, weight in unit.inputs.items():
            weight_in[k, column] += weight
        for column, weight in unit.outputs.items():
            weight_out[column, k] += weight
    bias_out = torch.zeros(dim, dtype=torch.float64)
    return {"weight_in": weight_in, "bias_in": bias_in, "weight_out": weight_out, "bias_out": bias_out}

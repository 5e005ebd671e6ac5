"""From a program to a `BNet`: its residual stream, its weights, and the circuit that is true of it.

The net is a residual net with the roles of `bt.decoder`: attention with heads and a feed-forward step in each slice,
each added to the stream `x`.

    x_0 = embed + position      add1 = x + sum_h W_o^h a^h      x' = add1 + ffn(add1)      y: a readout of the last x

With `norm="rms"` a norm precedes each sublayer and the readout.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_float, check_int, check_seed
from bnet_transformer._core.naming import Reach
from bnet_transformer._core.process import translate_memory_errors
from bnet_transformer._core.results import Result
from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Arrow, Declaration, Node, Plate, Stack
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.edges import EdgeStructure
from bnet_transformer.programs.language import (
    Aggregate,
    Fallback,
    Indices,
    LinearSequenceMap,
    Map,
    SelectedShare,
    SequenceMap,
    SOp,
    Tokens,
    Value,
)
from bnet_transformer.programs.program import BOS, Program
from bnet_transformer.tpm import (
    Add,
    Attention,
    Categorical,
    Concat,
    Dot,
    Embed,
    FeedForward,
    Given,
    Linear,
    Norm,
    Normal,
    Positions,
    Weight,
)

if TYPE_CHECKING:
    from bnet_transformer.compiler import CompiledModule


# --------------------------------------------------------------------------------------------------------------------
# The residual stream of a compiled program: orthogonal directions for the values of variables, and the order of steps.
#
# Each value of a categorical variable has a direction, and a numeric variable has one direction, whose coordinate is
# the number (the bases of tracr, Lindner et al. 2023). A linear sequence map has no direction: its readers read those
# of its parents with its factors. Two more directions are constants: `one` at every word, and `BOS` at the word BOS
# only.


@dataclass(frozen=True)
class Layout:
    """The columns of the residual stream and the slice of each variable.

    Args:
        program: The program.
        has_bos: Whether sentences begin with BOS.
        columns: The first column of each variable, except linear sequence maps.
        dim: The width of the stream.
        heads: The aggregates of each slice, in the order of its heads.
        steps: The maps of each slice.
    """

    program: Program
    has_bos: bool
    columns: Mapping[SOp, int] = field(repr=False)
    dim: int
    heads: tuple[tuple[SOp, ...], ...] = field(repr=False)
    steps: tuple[tuple[SOp, ...], ...] = field(repr=False)
    one: ClassVar[int] = 0  # the column of the constant direction
    bos: ClassVar[int] = 1  # the column of the direction of BOS

    def values(self, sop: SOp) -> tuple[Value, ...]:
        """The values that have columns; a numeric variable has one column."""
        return ("number",) if sop.is_numeric else self.program.list_values(sop)

    def list_columns(self, sop: SOp) -> range:
        """The columns of a variable."""
        return range(self.columns[sop], self.columns[sop] + len(self.values(sop)))

    def read_number(self, sop: SOp) -> dict[int, float]:
        """The linear function of the stream that is a numeric variable."""
        reads: dict[int, float] = {}
        for source, factor in list_sources(sop):
            reads[self.columns[source]] = reads.get(self.columns[source], 0.0) + factor
        return reads

    def get_column(self, sop: SOp, value: Value) -> int:
        """The column of a value of a categorical variable."""
        return self.columns[sop] + self.values(sop).index(value)

    def encode(self, sop: SOp, value: Value) -> dict[int, float]:
        """A value as coordinates of the stream; a missing value has none."""
        if value is None or (sop.is_numeric and value == 0):
            return {}
        return {self.columns[sop]: value} if sop.is_numeric else {self.get_column(sop, value): 1.0}


def list_sources(sop: SOp) -> list[tuple[SOp, float]]:
    """The variables in the stream from which a variable is read, with their factors: itself, or those of a sum."""
    if not isinstance(sop, LinearSequenceMap):
        return [(sop, 1.0)]
    terms = ((sop.x, sop.a), (sop.y, sop.b))
    return [(source, factor * inner) for parent, factor in terms for source, inner in list_sources(parent)]


def is_head(sop: SOp) -> TypeGuard[Aggregate | SelectedShare]:
    """Whether a variable is computed by a head."""
    return isinstance(sop, Aggregate | SelectedShare)


def make_layout(program: Program, bos: bool | None) -> Layout:
    """The layout of a program: each variable in the first slice after those of its parents.

    Args:
        program: The program.
        bos: Whether sentences begin with BOS; None: if an aggregate needs it.
    """
    fault = None if bos else _find_bos_fault(program)
    if bos is False and fault is not None:
        raise fault
    has_bos = bool(bos) or fault is not None
    # The sublayers are numbered: attention of slice t is 2 t, its feed-forward step 2 t + 1.
    sublayers: dict[SOp, int] = {}
    columns: dict[SOp, int] = {}
    dim = 1 + has_bos
    for sop in program.variables.values():
        latest = max((sublayers[parent] for parent in sop.parents), default=-1)
        if isinstance(sop, LinearSequenceMap):
            sublayers[sop] = latest
            continue
        is_input = isinstance(sop, Tokens | Indices)
        sublayers[sop] = -1 if is_input else latest + 1 + ((latest + 1) % 2 == is_head(sop))
        columns[sop] = dim
        dim += 1 if sop.is_numeric else len(program.list_values(sop))
    slices = max(max(sublayers.values()) // 2 + 1, 1)
    heads, steps = (
        tuple(tuple(sop for sop in columns if sublayers[sop] == 2 * t + offset) for t in range(slices))
        for offset in (0, 1)
    )
    return Layout(program, has_bos, columns, dim, heads, steps)


def _find_bos_fault(program: Program) -> BNetError | None:
    """The error without BOS of the first aggregate that counts words or can select no word; None if there is none."""
    for name, sop in program.variables.items():
        if isinstance(sop, SelectedShare):
            expected = "bos=True, because the number of words is computed from BOS"
            return BNetError(f"{sop.kind} {name}", expected=expected)
        if isinstance(sop, Aggregate) and program.can_be_empty(sop.selector):
            expected = "bos=True, because the selector can select no word, and the head then attends to BOS"
            return BNetError(f"{sop.kind} {name}", expected=expected, actual=False)
    return None


# --------------------------------------------------------------------------------------------------------------------
# The weights of a compiled program: a head for each aggregate, and hidden units for each map.
#
# A head scores a key by the number of conditions of the selector that it satisfies, times the sharpness s. With m
# conditions, BOS has the score `(m - 1/2) s`, so that the head attends to BOS if no word satisfies all. The hidden
# units of a map of states are indicators of one state, or of one pair; those of a map of numbers are steps between two
# numbers, each the difference of two units (the maps of tracr, Lindner et al. 2023).


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
            return [  # the indicators of pairs of states
                HiddenUnit(_add(layout.encode(x, v), layout.encode(y, w)), -1.0, layout.encode(sop, sop.apply(v, w)))
                for v, w in pairs
                if x is not y or v == w
            ]
        case Fallback(x=x, y=y):
            present = dict.fromkeys(layout.list_columns(x), -1.0)
            units = [HiddenUnit(layout.encode(x, v), 0.0, layout.encode(sop, v)) for v in layout.values(x)]
            return units + [
                HiddenUnit(_add(layout.encode(y, v), present), 0.0, layout.encode(sop, v)) for v in layout.values(y)
            ]
    raise AssertionError(sop)


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


Head = Mapping[str, Tensor]  # the matrices of a head: q and k, `[key, dim]`, v, `[value, dim]`, and o, `[dim, value]`


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
    return {"q": W_q, "k": W_k, "v": W_v, "o": W_o}


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
        for name, matrix in head.items():
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


WORD, HEADS = ["word"], ["head", "word"]
SHARPNESS = 100.0  # the other words have the weight exp(-50) or less
# With a constant coordinate c, the norm divides by sqrt((c^2 + r) / dim), where r is the squared length of the rest.
# The relative error of a constant gain is r / (2 c^2), about 5e-8 for r = 10 and c = 10,000.
CONSTANT = 1e4
LOGIT = 10.0  # of the value of the output; a missing value has half of it
SIGMA = 0.1  # the standard deviation of a numeric readout
MISSING = "None"


@dataclass(frozen=True, eq=False, repr=False)
class Compiled:
    """A compiled program: the net, and the program that it computes.

    Attributes:
        net: The net, in float64. Word 0 is BOS if `has_bos` is true.
        program: The program with its variables. `run`, `evaluate` and `graph` are its reference semantics.
        layout: The directions of the residual stream and the slices of the variables.
    """

    net: BNet
    program: Program
    layout: Layout

    @property
    def has_bos(self) -> bool:
        """Whether sentences of the net begin with BOS."""
        return self.layout.has_bos

    @cached_property
    def module(self) -> CompiledModule:
        """The net as a module, which runs many sentences at once."""
        return self.net.module().eval()

    @property
    def output_values(self) -> tuple[Value, ...]:
        """The value of each state of the readout `y`; empty for a numeric program."""
        output = self.program.output
        if output.is_numeric:
            return ()
        return (*self.program.list_values(output), *((None,) if self.program.can_be_missing(output) else ()))

    def encode(self, sentence: object) -> list[str]:
        """The words of a sentence for the net.

        Args:
            sentence: A list of tokens, or a text.

        Returns:
            The words as strings, after BOS if `has_bos` is true.

        Raises:
            BNetError: A token is unknown, or the sentence is empty or too long.

        >>> import operator
        >>> from bnet_transformer import programs
        >>> same = programs.select(programs.tokens, programs.tokens, operator.eq)
        >>> count = programs.compile(programs.selector_width(same), vocabulary="ab", max_words=3)
        >>> count.encode("aba"), count.net.sentence(count.encode("aba")).tpm("y_1").probs.argmax().item()
        (['BOS', 'a', 'b', 'a'], 2)
        """
        return [BOS] * self.has_bos + [str(token) for token in self.program.parse(sentence)]

    def run(self, sentence: object) -> tuple[Value, ...]:
        """The output of the program at each word, by its reference semantics.

        Args:
            sentence: A list of tokens, or a text.

        Returns:
            A value for each word. A missing value is None.
        """
        return self.program.run(sentence)

    @translate_memory_errors("predict")
    def predict(self, sentences: Sequence[object]) -> list[tuple[Value, ...]]:
        """The output of the net at each word: the most probable value, or the mean of a numeric readout.

        Args:
            sentences: The sentences.

        Returns:
            For each sentence a value for each word without BOS.

        >>> import operator
        >>> from bnet_transformer import programs
        >>> same = programs.select(programs.tokens, programs.tokens, operator.eq)
        >>> count = programs.compile(programs.selector_width(same), vocabulary="ab", max_words=3)
        >>> count.predict(["aba", "bb"]), count.run("bb")
        ([(2, 1, 2), (2, 2)], (2, 2))
        """
        parsed = [self.program.parse(sentence) for sentence in sentences]
        results: dict[int, tuple[Value, ...]] = {}
        for length in {len(words) for words in parsed}:
            rows = [k for k, words in enumerate(parsed) if len(words) == length]
            with torch.no_grad():
                values = self.module(self.to_ids([parsed[k] for k in rows]))
            assert isinstance(values, Tensor)
            results |= dict(zip(rows, self.decode(values), strict=True))
        return [results[k] for k in range(len(parsed))]

    def true_edges(self, sentences: Sequence[object] | None = None, **options: Any) -> TrueEdges:
        """The true circuit of the program, by effect and by structure.

        Args:
            sentences: The sentences from which pairs are formed, as in `programs.true_edges`. Default None.
            **options: The options of `programs.true_edges`.

        Returns:
            The edges with their effects.

        >>> from bnet_transformer import programs
        >>> previous = programs.select(programs.indices, programs.indices, lambda j, i: j == i - 1)
        >>> compiled = programs.compile(programs.aggregate(previous, programs.tokens), vocabulary="ab", max_words=3)
        >>> compiled.true_edges(["aba", "bba", "bab"]).num_pairs
        6
        """

        return true_edges(self, sentences, **options)

    def to_ids(self, sentences: Sequence[Sequence[Value]]) -> Tensor:
        """The input of the module for sentences of one length.

        Args:
            sentences: The sentences as lists of tokens.

        Returns:
            The ids of the words, `[sentence, word]`, with BOS.
        """
        index = {token: k + self.has_bos for k, token in enumerate(self.program.vocabulary)}
        return torch.tensor([[0] * self.has_bos + [index[token] for token in words] for words in sentences])

    def decode(self, readouts: Tensor) -> list[tuple[Value, ...]]:
        """The outputs of readouts of the module.

        Args:
            readouts: The logits of `y`, `[sentence, word, state]`, or its mean, `[sentence, word, 1]`.

        Returns:
            For each sentence a value for each word without BOS.
        """
        readouts = readouts[:, int(self.has_bos) :]
        if not self.output_values:
            return [tuple(row) for row in readouts[..., 0].tolist()]
        return [tuple(self.output_values[k] for k in row) for row in readouts.argmax(-1).tolist()]

    def __repr__(self) -> str:
        slices, heads = len(self.layout.heads), max(map(len, self.layout.heads))
        return f"<Compiled: {self.program!r}, {slices} slices, {heads} heads, width {self.layout.dim}>"


def compile(
    program: SOp,
    *,
    vocabulary: Sequence[Value],
    max_words: int,
    causal: bool = False,
    norm: str | None = None,
    bos: bool | None = None,
    sharpness: float = SHARPNESS,
    constant: float = CONSTANT,
) -> Compiled:
    """The net that computes a program (Lindner et al. 2023), with known nodes for its variables.

    Each aggregate is a head and each map is hidden units of a feed-forward step, in the first slice after those of its
    parents. Slices have the same number of heads; a head without an aggregate has zero weights.

    Args:
        program: The s-op that the net computes.
        vocabulary: The tokens: different strings or integers. A string is the list of its characters.
        max_words: The maximum number of words of a sentence, without BOS.
        causal: Whether word i attends only to words up to i. Default False.
        norm: `"rms"` for an RMS norm before each sublayer and before the readout. Its gain restores the length of the
            stream; see `constant`. None (default) for no norm.
        bos: Whether sentences begin with the word BOS, to which a head attends if it selects no word. None (default):
            if an aggregate needs it.
        sharpness: The score of a selected word, at least 20. Other words have the weight `exp(-sharpness / 2)` or less.
            Default 100.
        constant: With a norm, the coordinate c of the stream that is constant. The relative error of values is about
            `r / (2 c^2)`, where r, the number of variables or less, is the squared length of the other coordinates.
            Default 10,000: an error of about 1e-7. With a c below 10 the norm depends on the values; the most probable
            outputs of a program of states whose selectors select one word are still right.

    Returns:
        The compiled program.

    Raises:
        BNetError: The program does not fit, such as an aggregate that needs BOS; or an argument is invalid.

    >>> from bnet_transformer import programs
    >>> before = programs.select(programs.indices, programs.indices, lambda j, i: j == i - 1)
    >>> previous = programs.aggregate(before, programs.tokens, name="previous")
    >>> compiled = programs.compile(previous, vocabulary="ab", max_words=3)
    >>> compiled.run("aba"), compiled.predict(["aba"])
    ((None, 'a', 'b'), [(None, 'a', 'b')])
    >>> compiled.net.sentence(compiled.encode("aba")).attention(0)[0, 3].round()        # the last word reads word 2
    tensor([0., 0., 1., 0.], dtype=torch.float64)
    """
    check_choice("norm", norm, (None, "rms"))
    check_choice("bos", bos, (None, True, False))
    checked = Program(program, vocabulary, max_words, causal=causal)
    layout = make_layout(checked, bos)
    one = 1.0 if norm is None else check_float("constant", constant, minimum=1)
    sharpness = check_float("sharpness", sharpness, minimum=20)
    heads = [[build_head(layout, sop, sharpness, one) for sop in sops] for sops in layout.heads]
    units = [[unit for sop in sops for unit in list_units(layout, sop) if unit.outputs] for sops in layout.steps]
    sizes = _find_sizes(heads, units)
    net = BNet(_declare(layout, sizes, has_norm=norm is not None)).to(torch.float64)
    parameters = _embedding_parameters(layout, one) | _readout_parameters(layout)
    for t, (slice_heads, slice_units) in enumerate(zip(heads, units, strict=True)):
        stacked = stack_heads(slice_heads, (*sizes[:3], layout.dim))
        parameters |= {f"W_{name}_{t}.value": matrix for name, matrix in stacked.items()}
        step = stack_units(slice_units, sizes[3], layout.dim)
        parameters |= {f"ffn_{t}.{name}": value for name, value in step.items()}
    if norm is not None:
        eps = Norm("rms").eps
        gain = torch.full((layout.dim,), (one**2 / layout.dim + eps) ** 0.5, dtype=torch.float64)
        parameters |= {name: gain for name in net.parameters if name.endswith(".gain")}
    return Compiled(net.replace(parameters), checked, layout)


def _find_sizes(heads: list[list[Head]], units: list[list[HiddenUnit]]) -> tuple[int, int, int, int]:
    """The number of heads, the widths of their keys and values, and the number of hidden units, of every slice."""
    every = [head for row in heads for head in row]
    key_width = max((len(head["k"]) for head in every), default=1)
    value_width = max((len(head["v"]) for head in every), default=1)
    return max(1, *map(len, heads)), key_width, value_width, max(1, *map(len, units))


def _declare(layout: Layout, sizes: tuple[int, int, int, int], *, has_norm: bool) -> Declaration:
    """The declaration of the net."""
    (num_heads, key_width, value_width, hidden), program, dim = sizes, layout.program, layout.dim
    words = tuple([BOS] * layout.has_bos + [str(token) for token in program.vocabulary])
    prologue = [
        Node("token", Given(states=len(words)), plates=WORD),
        Node("embed", Embed(dim), ["token"], WORD),
        Node("position", Positions(program.max_words + layout.has_bos, dim), plates=WORD),
        Node("x", Add(), ["embed", "position"], WORD),
    ]
    reach = Reach("causal" if program.causal else "every")
    first, second, last = ("norm1", "norm2", "norm") if has_norm else ("x", "add1", "x")
    widths = {"q": key_width, "k": key_width, "v": value_width}
    nodes = [
        *(Node(f"W_{role}", Weight((width, dim)), plates=["head"]) for role, width in widths.items()),
        *(Node(role, Linear(), [f"W_{role}", first], HEADS) for role in widths),
        Node("a", Attention(Dot(1.0)), ["q", Arrow("k", reach), Arrow("v", reach)], HEADS),
        Node("W_o", Weight((dim, value_width)), plates=["head"]),
        Node("mix", Concat(), ["W_o", "a"], WORD),
        Node("add1", Add(), ["x", "mix"], WORD),
        Node("ffn", FeedForward(hidden), [second], WORD),
        Node("x", Add(), ["add1", "ffn"], WORD),
    ]
    epilogue = [Node("y", _make_readout(layout), [last], WORD)]
    if has_norm:
        norm1, norm2 = (Node(role, Norm("rms"), [x], WORD) for role, x in ((first, "x"), (second, "add1")))
        nodes = [norm1, *nodes[:-2], norm2, *nodes[-2:]]
        epilogue.insert(0, Node("norm", Norm("rms"), ["x"], WORD))
    stack = Stack(nodes, prologue, epilogue, slices=len(layout.heads), vocabulary=words)
    return Declaration([stack], plates=[Plate("head", num_heads)], name=program.names[program.output])


def _make_readout(layout: Layout) -> Categorical | Normal:
    """The TPM of the readout: the states are the values of the output, of which the last one may be missing."""
    program, output = layout.program, layout.program.output
    if output.is_numeric:
        return Normal(SIGMA, dim=1)
    labels = [str(value) for value in program.list_values(output)] + [MISSING] * program.can_be_missing(output)
    if len(set(labels)) < len(labels):
        raise BNetError("program", expected="an output with values of different texts", actual=labels)
    return Categorical(len(labels), labels=tuple(labels))


def _embedding_parameters(layout: Layout, one: float) -> dict[str, Tensor]:
    """The tables of tokens and positions."""
    program, offset = layout.program, int(layout.has_bos)
    embed = torch.zeros(len(program.vocabulary) + offset, layout.dim, dtype=torch.float64)
    position = torch.zeros(program.max_words + offset, layout.dim, dtype=torch.float64)
    embed[:, layout.one] = one
    if layout.has_bos:
        embed[0, layout.bos] = 1.0
    for sop, table in ((s, embed if s.kind == "tokens" else position) for s in program.variables.values()):
        if sop.kind in ("tokens", "indices"):
            for k, column in enumerate(layout.list_columns(sop)):
                table[k + offset, column] = 1.0
    return {"embed.table": embed, "position.table": position}


def _readout_parameters(layout: Layout) -> dict[str, Tensor]:
    """The map of the readout."""
    program, output = layout.program, layout.program.output
    is_optional = program.can_be_missing(output)
    weight = torch.zeros(len(layout.values(output)) + is_optional, layout.dim, dtype=torch.float64)
    if output.is_numeric:
        for column, factor in layout.read_number(output).items():
            weight[0, column] = factor
    else:
        for k, column in enumerate(layout.list_columns(output)):
            weight[k, column] = LOGIT
    bias = torch.zeros(len(weight), dtype=torch.float64)
    if is_optional:
        bias[-1] = LOGIT / 2
    return {"y.weight": weight, "y.bias" if output.is_numeric else "y.logits": bias}


# --------------------------------------------------------------------------------------------------------------------
# The true circuit of a compiled program: the edges from writers to readers that have an effect.
#
# Writers, readers and edges are those of `net.edges()`. A writer adds to the residual stream: the embedding `embed`, a
# head `a_slice_head`, or a feed-forward step `ffn_slice`; positions do not depend on the words, so they are no writer.
# A reader is the query, key or value of a head (`q_slice_head`), a feed-forward step, or the readout `y`. An edge is
# all words together, and its name has no word: `"a_0_1 -> q_2_3"`.
#
# An edge is true *by effect* if in some pair of sentences a corruption of this edge only changes the output: the reader
# is computed from the writers in the run of the first sentence, with this writer's output in the run of the second one,
# and then the rest of the net runs with the reader at this value. An edge is true *by structure* if the reader uses a
# variable that the writer writes. The two differ where a path has no influence, such as that of a copy which is read
# only where another one is missing.


Words = tuple[Value, ...]
Pair = tuple[Words, Words]
UNCHANGED = 1e-6  # a reader that differs by less is not changed
MAX_SENTENCES = 5000  # that are enumerated
CHUNK = 1024  # pairs in one run


@dataclass(frozen=True, eq=False, repr=False)
class TrueEdges(Result):
    """The true circuit of a compiled program.

    Attributes:
        effects: For each edge from a writer to a later reader, the share of the pairs of sentences in which its
            corruption changes the output.
        structural: The edges whose reader uses a variable that the writer writes.
        num_pairs: The number of pairs of sentences.
        is_exhaustive: Whether these are all pairs of sentences of the given length. Otherwise an effect that occurs in
            rare pairs can be missing.
    """

    effects: Mapping[str, float]
    structural: frozenset[str]
    num_pairs: int
    is_exhaustive: bool

    @property
    def edges(self) -> frozenset[str]:
        """The edges that are true by effect."""
        return frozenset(edge for edge, share in self.effects.items() if share > 0)

    @property
    def without_effect(self) -> frozenset[str]:
        """The edges that are true by structure, but have no effect."""
        return self.structural - self.edges

    def _get_columns(self) -> Mapping[str, Any]:
        by_effect = {"effect": [*self.effects.values()], "by effect": [share > 0 for share in self.effects.values()]}
        by_structure = [edge in self.structural for edge in self.effects]
        return {"edge": [*self.effects], **by_effect, "by structure": by_structure}

    def __repr__(self) -> str:
        counts = f"{len(self.edges)} by effect, {len(self.structural)} by structure"
        pairs = f"{self.num_pairs} pairs{'' if self.is_exhaustive else ', a sample'}"
        return f"<TrueEdges: of {len(self.effects)} edges {counts}; {pairs}>"

    def _get_shown_rows(self) -> list[int]:
        return [k for k, (edge, share) in enumerate(self.effects.items()) if share > 0 or edge in self.structural]


@translate_memory_errors("true_edges")
def true_edges(
    compiled: Compiled,
    sentences: Sequence[object] | None = None,
    *,
    max_pairs: int = 1024,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> TrueEdges:
    """The true circuit of a compiled program, by effect and by structure.

    Args:
        compiled: The compiled program.
        sentences: The sentences from which pairs are formed, all of one length. None (default) for all sentences of
            `max_words` words for which the program is defined; from more than 5000, a sample.
        max_pairs: The number of pairs. If there are more ordered pairs, this number is drawn, half of them with one
            word replaced. Default 1024.
        tolerance: The change of a numeric output that counts as a change; for states, another most probable value
            does. Default 0.001.
        seed: The seed of the drawn pairs. Default 0.

    Returns:
        The edges with their effects.

    Raises:
        BNetError: There are fewer than two sentences, or they differ in length or do not fit the program.

    >>> from bnet_transformer import programs
    >>> before = programs.select(programs.indices, programs.indices, lambda j, i: j == i - 1)
    >>> compiled = programs.compile(programs.aggregate(before, programs.tokens), vocabulary="ab", max_words=3)
    >>> sorted(true_edges(compiled).edges)
    ['a_0_0 -> y', 'embed -> v_0_0']
    """
    pairs, is_exhaustive = _make_pairs(compiled, sentences, check_int("max_pairs", max_pairs), check_seed(seed))
    tolerance = check_float("tolerance", tolerance, above=0)
    counts = dict.fromkeys(list_edges(compiled), 0)
    for start in range(0, len(pairs), CHUNK):
        runs = PairRuns(compiled, pairs[start : start + CHUNK], tolerance)
        for edge, changed in runs.iter_effects():
            counts[edge] += int(changed.sum())
    effects = {edge: count / len(pairs) for edge, count in counts.items()}
    return TrueEdges(effects, structural_edges(compiled), len(pairs), is_exhaustive)


def list_edges(compiled: Compiled) -> tuple[str, ...]:
    """The names of all edges from a writer to a later reader, as in `net.edges()`.

    Args:
        compiled: The compiled program.

    Returns:
        The names, in the order of the readers and then of the writers.
    """
    return EdgeStructure.of_network(compiled.net.network).edges.names


def structural_edges(compiled: Compiled) -> frozenset[str]:
    """The edges whose reader uses a variable that the writer writes; constant directions are no variables.

    No writer writes `indices`, because positions do not depend on the words.

    Args:
        compiled: The compiled program.

    Returns:
        The names of the edges.
    """
    layout = compiled.layout
    writes = {sop: "embed" for sop in compiled.program.variables.values() if sop.kind == "tokens"}
    reads: list[tuple[str, tuple[SOp, ...]]] = [("y", (compiled.program.output,))]
    for t, (heads, steps) in enumerate(zip(layout.heads, layout.steps, strict=True)):
        for h, sop in enumerate(heads):
            assert isinstance(sop, Aggregate | SelectedShare)
            writes[sop] = f"a_{t}_{h}"
            terms = sop.selector.terms
            reads.append((f"q_{t}_{h}", tuple(term.queries for term in terms)))
            reads.append((f"k_{t}_{h}", tuple(term.keys for term in terms)))
            reads.append((f"v_{t}_{h}", (sop.values,) if isinstance(sop, Aggregate) else ()))
        for sop in steps:
            writes[sop] = f"ffn_{t}"
            reads.append((f"ffn_{t}", sop.parents))
    sources = ((source, reader) for reader, sops in reads for sop in sops for source, _ in list_sources(sop))
    return frozenset(f"{writes[source]} -> {reader}" for source, reader in sources if source in writes)


class PairRuns:
    """The runs of pairs of sentences of one length, and those with one corrupted edge."""

    def __init__(self, compiled: Compiled, pairs: Sequence[Pair], tolerance: float) -> None:
        self.compiled, self.tolerance = compiled, tolerance
        self.structure = EdgeStructure.of_network(compiled.net.network)
        self.writers = [writer.spec.group.name for writer in self.structure.writer_groups]
        self.readers = [reader.target.group.name for reader in self.structure.reader_groups]
        self.ids = compiled.to_ids([pair[0] for pair in pairs])
        self.base = self._run(self.ids, want=[*dict.fromkeys([*self.writers, *self.readers])])
        self.other = self._run(compiled.to_ids([pair[1] for pair in pairs]), want=self.writers)

    def iter_effects(self) -> Iterator[tuple[str, Tensor]]:
        """Each edge with the pairs in which its corruption changes the output, `[pair]`."""
        groups = self.structure.reader_groups
        for sources, numbers in itertools.groupby(range(len(groups)), key=lambda r: tuple(groups[r].sources)):
            readers = list(numbers)  # those of one sublayer are computed in one run
            for w in sources:
                for h, writer in enumerate(self.structure.get_writer_names(w)):
                    values = self._compute_readers(readers, sources, w, h)
                    for r in readers:
                        for k, reader in enumerate(self.structure.get_reader_names(r)):
                            yield f"{writer} -> {reader}", self._find_changes(r, k, values[self.readers[r]])

    def _compute_readers(self, readers: Sequence[int], sources: Sequence[int], w: int, h: int) -> dict[str, Tensor]:
        """The values of readers if they read one writer in the other run."""
        values = {self.writers[source]: self.base[self.writers[source]] for source in sources}
        name, count = self.writers[w], len(self.structure.get_writer_names(w))
        values[name] = self._replace(name, h, count, self.other[name])
        return self._run(self.ids, do=values, want=[self.readers[r] for r in readers])

    def _find_changes(self, r: int, k: int, value: Tensor) -> Tensor:
        """The pairs in which the output changes if one reader has the value of its group, `[pair]`."""
        group = self.readers[r]
        if self.structure.reader_groups[r].is_readout:
            return self._differs(value, self.base[group])
        replaced = self._replace(group, k, len(self.structure.get_reader_names(r)), value)
        changed = ((replaced - self.base[group]).abs() > UNCHANGED).flatten(1).any(1)
        if changed.any():
            readouts = self._run(self.ids[changed], do={group: replaced[changed]}, want=["y"])["y"]
            changed[changed.clone()] = self._differs(readouts, self.base["y"][changed])
        return changed

    def _replace(self, group: str, k: int, count: int, value: Tensor) -> Tensor:
        """The value of a group in the base run with that of one of its members replaced."""
        if count == 1:
            return value
        replaced = self.base[group].clone()
        replaced[:, k] = value[:, k]
        return replaced

    def _differs(self, readouts: Tensor, base: Tensor) -> Tensor:
        """The pairs in which the output of a word differs, `[pair]`; the readout of BOS is no output."""
        readouts, base = (values[:, int(self.compiled.has_bos) :] for values in (readouts, base))
        if self.compiled.output_values:
            return (readouts.argmax(-1) != base.argmax(-1)).any(1)
        return ((readouts - base).abs() > self.tolerance).flatten(1).any(1)

    @torch.no_grad()
    def _run(self, ids: Tensor, *, want: list[str], do: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Values of groups, by name."""
        values = self.compiled.module(ids, want=want, do=do)
        assert isinstance(values, dict)
        return values


def _make_pairs(
    compiled: Compiled, sentences: Sequence[object] | None, max_pairs: int, seed: int
) -> tuple[list[Pair], bool]:
    """Pairs of sentences, and whether these are all pairs."""
    generator, is_sample = random.Random(seed), False
    if sentences is None:
        items, is_sample = list_sentences(compiled, compiled.program.max_words, generator)
    else:
        items = list(dict.fromkeys(compiled.program.parse(sentence) for sentence in sentences))
    if len(items) < 2 or len({len(words) for words in items}) > 1:
        raise BNetError("sentences", expected="at least two different sentences of one length", actual=len(items))
    if len(items) * (len(items) - 1) <= max_pairs:
        return list(itertools.permutations(items, 2)), not is_sample
    neighbours: dict[tuple[int, Words], list[Words]] = {}
    for words in items:
        for i in range(len(words)):
            neighbours.setdefault((i, (*words[:i], None, *words[i + 1 :])), []).append(words)
    pairs: dict[Pair, None] = {}
    for k in range(20 * max_pairs):
        words = generator.choice(items)
        i = generator.randrange(len(words))
        other = generator.choice(neighbours[i, (*words[:i], None, *words[i + 1 :])] if k % 2 else items)
        if other != words:
            pairs[words, other] = None
        if len(pairs) == max_pairs:
            break
    return [*pairs], False


def list_sentences(compiled: Compiled, length: int, generator: random.Random) -> tuple[list[Words], bool]:
    """The sentences of one length for which a program is defined, and whether they are only a sample.

    Args:
        compiled: The compiled program.
        length: The number of words.
        generator: The generator of the sample.

    Returns:
        The sentences, all of them up to 5000, and whether they are a sample.
    """
    vocabulary = compiled.program.vocabulary
    is_sample = len(vocabulary) ** length > MAX_SENTENCES
    if is_sample:
        draws = (tuple(generator.choice(vocabulary) for _ in range(length)) for _ in range(MAX_SENTENCES))
        candidates = [*dict.fromkeys(draws)]
    else:
        candidates = [*itertools.product(vocabulary, repeat=length)]
    return [words for words in candidates if is_defined(compiled, words)], is_sample


def is_defined(compiled: Compiled, words: Words) -> bool:
    """Whether the program has a value for a sentence: no aggregate has several categorical values.

    Args:
        compiled: The compiled program.
        words: The tokens of the sentence.

    Returns:
        False if the evaluation raises an error.
    """
    try:
        compiled.run(words)
    except BNetError:
        return False
    return True

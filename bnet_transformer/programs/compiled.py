"""From a program to a `BNet`: `compile` and its result, `Compiled`.

The net is a residual net with the roles of `bt.decoder`: attention with heads and a feed-forward step in each slice,
each added to the stream `x`.

    x_0 = embed + position      add1 = x + sum_h W_o^h a^h      x' = add1 + ffn(add1)      y: a readout of the last x

With `norm="rms"` a norm precedes each sublayer and the readout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_float
from bnet_transformer._core.memory import translate_memory_errors
from bnet_transformer._core.naming import Reach
from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Arrow, Declaration, Node, Plate, Stack
from bnet_transformer.errors import BNetError
from bnet_transformer.programs.layout import Layout, make_layout
from bnet_transformer.programs.program import BOS, Program
from bnet_transformer.programs.sops import SOp, Value
from bnet_transformer.programs.weights import Head, HiddenUnit, build_head, list_units, stack_heads, stack_units
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
    from bnet_transformer.programs.truth import TrueEdges

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
        from bnet_transformer.programs.truth import true_edges

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
    sizes = _find_sizes(layout, heads, units)
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


def _find_sizes(layout: Layout, heads: list[list[Head]], units: list[list[HiddenUnit]]) -> tuple[int, int, int, int]:
    """The number of heads, the widths of their keys and values, and the number of hidden units, of every slice."""
    every = [head for row in heads for head in row]
    key_width = max((head.W_k.shape[0] for head in every), default=1)
    value_width = max((head.W_v.shape[0] for head in every), default=1)
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
        nodes = [Node("norm1", Norm("rms"), ["x"], WORD), *nodes[:-2]]
        nodes += [
            Node("norm2", Norm("rms"), ["add1"], WORD),
            Node("ffn", FeedForward(hidden), ["norm2"], WORD),
            Node("x", Add(), ["add1", "ffn"], WORD),
        ]
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

"""Nodes that several models use: embeddings, readouts, and the sublayers of transformers with post-norm and pre-norm.

    post-norm   add = x + sublayer(x),   x' = norm(add)          pre-norm   x' = x + sublayer(norm(x))

A sublayer is multi-head attention, in which `W_o` sums the heads, or the feed-forward map. Dropout is a node between
the sublayer and the residual sum. The last node of a slice is its state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer._core.naming import Reach, as_reach
from bnet_transformer.declare import Arrow, Node, Plate
from bnet_transformer.declare.declaration import check_vocabulary
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm import (
    TPM,
    Activation,
    Add,
    Affine,
    Attention,
    Bias,
    Categorical,
    Concat,
    Dot,
    Dropout,
    Embed,
    FeedForward,
    Given,
    Linear,
    Norm,
    Normal,
    Pool,
    Positions,
    Sinusoid,
    Weight,
)
from bnet_transformer.tpm.field_checks import CheckedDataclass, check_below_one, check_bool, choice, optional
from bnet_transformer.tpm.steps import ACTIVATIONS, check_activation

Vocabulary = Sequence[str] | int | None
TABLE = "W_embed"
WORD, HEADS = ["word"], ["head", "word"]


def build_observation(readout: TPM | None, source_role: str = "x", plates: Sequence[str] = WORD) -> list[Node]:
    """The readout node `y` of each word, or of the sentence if the readout pools; [] without a readout."""
    if readout is None:
        return []
    slots = readout.get_slots() if isinstance(readout, TPM) and readout.is_random else ()
    if len(slots) != 1:
        allowed = "Categorical(n), Normal(sigma), a random TPM with one slot, None"
        raise BNetError("observe", expected="a readout", actual=readout, allowed=allowed)
    if slots[0].endswith("."):
        return [Node("y", readout, [Arrow(source_role, "every")])]
    return [Node("y", readout, [source_role], plates=plates)]


@dataclass(frozen=True)
class StackBuilder(CheckedDataclass):
    """The builder of the nodes before and after the slices: embeddings and readouts.

    `dim` is the width of the states, `features` that of words that are vectors. `norm_type` and `eps` are options of
    the norms.
    """

    dim: Annotated[int, check_int]
    bias: Annotated[bool, check_bool] = True
    features: Annotated[int | None, optional(check_int)] = None
    dropout: Annotated[float, check_below_one] = 0.0
    eps: float = field(default=1e-5, kw_only=True)
    norm_type: str = field(default="layer", kw_only=True)

    @property
    def norm_tpm(self) -> Norm:
        """The TPM of every norm."""
        return Norm(self.norm_type, eps=self.eps, bias=self.bias)

    @property
    def output_role(self) -> str:
        """The role of the output of a stack: the last state, or its norm."""
        return "x"

    # the words

    def build_embedding(
        self, vocabulary: Vocabulary, positions: TPM | None = None, *, tied: bool, mapped: bool = True
    ) -> list[Node]:
        """The nodes before the first slice.

        These are input vectors, mapped features, or an embedding times sqrt(dim); then positions and dropout. Without
        `mapped`, the features are the first state.
        """
        if vocabulary is not None and self.features is not None:
            raise BNetError("features", expected="None, because there is a vocabulary", actual=self.features)
        features = self.features if mapped else None
        if vocabulary is None and positions is None and features is None:
            return [Node("x", Given(self.features or self.dim), plates=WORD)]
        if features is not None:
            embed = Affine(self.dim) if self.bias else Linear(self.dim)
            nodes = [Node("value", Given(features), plates=WORD), Node("embed", embed, ["value"], WORD)]
        elif vocabulary is None:
            nodes = [Node("embed", Given(self.dim), plates=WORD)]
        else:
            table = Embed(self.dim, scale=self.dim**0.5, tied=tied, spread=self.dim**-0.5)
            token = Node("token", Given(states=count_words(vocabulary)), plates=WORD)
            nodes = [token, Node("embed", table, [TABLE, "token"] if tied else ["token"], WORD)]
        if positions is not None:
            nodes.append(Node("position", positions, plates=WORD))
            nodes.append(Node("add", Add(), ["embed", "position"], WORD))
        *before, last = nodes + self.build_dropout(nodes[-1].role, "drop")
        return [*before, Node("x", last.tpm, last.parents, WORD)]

    def build_embedding_table(self, vocabulary: Vocabulary, *, tied: bool) -> list[Node]:
        """The embedding table as a node outside the stacks, if embedding and readout share it."""
        return [Node(TABLE, Weight((count_words(vocabulary), self.dim)))] if tied else []

    def build_dropout(self, source: str, role: str) -> list[Node]:
        """The dropout node, if there is dropout."""
        return [Node(role, Dropout(self.dropout), [source], WORD)] if self.dropout else []

    # the readouts

    def build_word_readout(self, vocabulary: Vocabulary, transform: str | None, *, tied: bool) -> list[Node]:
        """The readout of a word of the vocabulary at each word."""
        # Tied logits have a bias only after a transform, as in BERT.
        nodes = self._build_transform(self.output_role, transform, WORD)
        if transform:
            nodes.append(Node("transform_norm", self.norm_tpm, ["transform"], WORD))
        source = nodes[-1].role if nodes else self.output_role
        size = count_words(vocabulary)
        num_logits = None if tied else size
        logits = Affine(num_logits) if self.bias and (transform or not tied) else Linear(num_logits)
        nodes.append(Node("logits", logits, [TABLE, source] if tied else [source], WORD))
        return [*nodes, Node("y", Categorical(size, affine=False), ["logits"], WORD)]

    def build_pooled_readout(
        self, readout: Categorical | Normal, pool: str | None, transform: str | None
    ) -> list[Node]:
        """A readout of each word, or of the sentence from its first or last word, or from their mean or sum."""
        if readout.pool is not None:
            if pool or transform:
                hint = f"Remove pool={readout.pool!r} from the readout, and pass pool= to the model"
                raise BNetError(f"pool= and transform= do not apply to the readout {readout}", hint=hint)
            return build_observation(readout, self.output_role)
        over = [] if pool else WORD
        nodes: list[Node] = []
        if pool in ("first", "last"):
            nodes = [Node("pool", Add(), [Arrow(self.output_role, pool)])]
        elif pool:
            nodes = [Node("pool", Pool(pool), [Arrow(self.output_role, "every")])]
        nodes += self._build_transform("pool" if pool else self.output_role, transform, over)
        return [*nodes, *build_observation(readout, nodes[-1].role if nodes else self.output_role, over)]

    def _build_transform(self, source: str, activation: str | None, plates: list[str]) -> list[Node]:
        """The nodes of `s(W x + b)` before a readout, if there is an activation."""
        if activation is None:
            return []
        dense = Affine(self.dim) if self.bias else Linear(self.dim)
        return [Node("dense", dense, [source], plates), Node("transform", Activation(activation), ["dense"], plates)]

    def build_readout(
        self,
        readout: TPM | str | None,
        vocabulary: Vocabulary,
        pool: str | None = None,
        transform: str | None = None,
        *,
        tied: bool,
    ) -> list[Node]:
        """The nodes of the readout; "word" is the readout of a word of the vocabulary, or of its features."""
        check_choice("pool", pool, (None, "first", "last", "mean", "sum"))
        check_choice("transform", transform, (None, *ACTIVATIONS))
        if isinstance(readout, Categorical | Normal):
            return self.build_pooled_readout(readout, pool, transform)
        allowed = "'auto', 'word', a Categorical, a Normal, None"
        if not (readout is None or (isinstance(readout, str) and readout in ("auto", "word"))):
            raise BNetError("readout", expected="a readout", actual=readout, allowed=allowed)
        if readout == "auto":
            readout = None if vocabulary is None and self.features is None else "word"
        if readout == "word" and vocabulary is None and self.features is not None:
            return self.build_pooled_readout(Normal(1.0, dim=self.features, learnable=True), pool, transform)
        for option, value in (("pool", pool), ("transform", transform)):
            if value is not None and (option == "pool" or readout is None):
                expected = "None without a readout" if readout is None else f"None for readout={readout!r}"
                raise BNetError(option, expected=expected, actual=value)
        if readout is None:
            return []
        if vocabulary is None:
            raise BNetError("readout='word'", expected="a vocabulary or features")
        return self.build_word_readout(vocabulary, transform, tied=tied)


@dataclass(frozen=True)
class BlockBuilder(StackBuilder):
    """The builder of the nodes of a transformer from its sizes and options.

    Later models use further options: `gated` feed-forward maps; `key_dim`, the width of a head if it is not dim /
    heads; another `score`; `relative_bias`, a bias of the scores within a stack with the parent `b`; `groups` of heads
    that share keys and values (grouped-query attention); and `parts_without_bias`, the maps without a bias (`map` for
    q, k and v, `mix`, `ffn`).
    """

    heads: Annotated[int, check_int] = 8
    hidden: Annotated[int | None, optional(check_int)] = None
    norm: Annotated[str, choice("post", "pre", "parallel")] = "post"
    final_norm: Annotated[bool | None, choice(None, True, False)] = None
    activation: Annotated[str, check_activation] = "relu"
    _: KW_ONLY
    gated: bool = False
    key_dim: Annotated[int | None, optional(check_int)] = None
    score: Dot = Dot(None)  # noqa: RUF009  (frozen)
    relative_bias: Bias | None = None
    groups: Annotated[int | None, optional(check_int)] = None
    parts_without_bias: Collection[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.heads and self.key_dim is None:
            raise BNetError("heads", expected=f"a divisor of dim, which is {self.dim}", actual=self.heads)
        if self.groups is not None and self.heads % self.groups:
            raise BNetError("groups", expected=f"a divisor of heads, which is {self.heads}", actual=self.groups)

    @property
    def plates(self) -> list[Plate]:
        """The plate of heads; for grouped queries, the plate of groups and the plate of the heads in a group."""
        if self.groups is None:
            return [Plate("head", self.heads)]
        return [Plate("group", self.groups), Plate("head", self.heads // self.groups)]

    @property
    def output_role(self) -> str:
        """The role of the output of a stack: the last state, or its norm, which is the default unless norm="post"."""
        return "norm" if (self.norm != "post" if self.final_norm is None else self.final_norm) else "x"

    # the slices

    def build_slice(self, reach: Reach, cross_reach: Reach | None = None) -> list[Node]:
        """The nodes of one slice: self-attention, cross attention with `cross_reach`, and the feed-forward map."""
        if self.norm == "parallel":
            if cross_reach is not None:
                raise BNetError("norm", expected="'post' or 'pre', because there is cross attention", actual=self.norm)
            return self._build_parallel_sublayers(reach)
        nodes = self._build_residual("x", partial(self._build_attention, reach=reach), ("drop1", "add1", "norm1"))
        if cross_reach is not None:
            attend = partial(
                self._build_attention,
                reach=cross_reach,
                prefix="cross_",
                memory=(f"enc.{self.output_role}", "enc.word"),
            )
            nodes += self._build_residual(nodes[-1].role, attend, ("cross_drop", "cross_add", "cross_norm"))
        return nodes + self._build_residual(
            nodes[-1].role, self._build_feed_forward, ("drop2", "add2", "norm2"), makes_state=True
        )

    def _build_parallel_sublayers(self, reach: Reach) -> list[Node]:
        """The nodes of `x' = x + attention(norm1(x)) + feed_forward(norm2(x))` (GPT-J, Wang and Komatsuzaki 2021)."""
        nodes, summed = [], ["x"]
        sublayers = (self._build_attention("norm1", reach), self._build_feed_forward("norm2"))
        for k, sublayer in enumerate(sublayers, 1):
            inner = [Node(f"norm{k}", self.norm_tpm, ["x"], WORD), *sublayer]
            inner += self.build_dropout(inner[-1].role, f"drop{k}")
            nodes += inner
            summed.append(inner[-1].role)
        return [*nodes, Node("x", Add(), summed, WORD)]

    def build_final_norm(self) -> list[Node]:
        """The norm after the last slice, if there is one."""
        return [Node("norm", self.norm_tpm, ["x"], WORD)] if self.output_role == "norm" else []

    def _build_residual(
        self, x: str, sublayer: Callable[[str], list[Node]], roles: tuple[str, str, str], *, makes_state: bool = False
    ) -> list[Node]:
        """The nodes of `norm(x + sublayer(x))`, or of `x + sublayer(norm(x))`."""
        drop, add, norm = roles
        pre = self.norm == "pre"
        inner = sublayer(norm if pre else x)
        inner += self.build_dropout(inner[-1].role, drop)
        total = Node("x" if pre and makes_state else add, Add(), [x, inner[-1].role], WORD)
        if pre:
            return [Node(norm, self.norm_tpm, [x], WORD), *inner, total]
        return [*inner, total, Node("x" if makes_state else norm, self.norm_tpm, [add], WORD)]

    def _build_attention(
        self, x: str, reach: Reach, prefix: str = "", memory: tuple[str, str] | None = None
    ) -> list[Node]:
        """The nodes of attention with all heads; keys and values are of `memory` (a role, its plate), else of x."""
        width = self.key_dim or self.dim // self.heads
        q, k, v, a, mix = (prefix + role for role in ("q", "k", "v", "a", "mix"))
        W_o = f"W_{prefix}o"
        project = Affine() if self._has_bias("map") else Linear()
        heads = [plate.name for plate in self.plates]
        plates = {q: heads, k: heads[:1], v: heads[:1]}
        sources = {q: (x, "word"), k: memory or (x, "word"), v: memory or (x, "word")}
        relative = self.relative_bias if memory is None else None  # words of two sentences have no distance
        arrows: list[str | Arrow] = [q, Arrow(k, reach), Arrow(v, reach), *(["b"] if relative else [])]
        return [
            *(Node(f"W_{role}", Weight((width, self.dim)), plates=plates[role]) for role in sources),
            *(Node(r, project, [f"W_{r}", source], [*plates[r], over]) for r, (source, over) in sources.items()),
            Node(a, Attention(self.score, bias=relative), arrows, [*heads, "word"]),
            Node(W_o, Weight((self.dim, width), spread=self.dim**-0.5), plates=heads),
            Node(mix, Concat(bias=self._has_bias("mix"), plates=len(heads)), [W_o, a], WORD),
        ]

    def _build_feed_forward(self, x: str) -> list[Node]:
        """The node of the feed-forward map."""
        hidden = 4 * self.dim if self.hidden is None else self.hidden
        return [Node("ffn", FeedForward(hidden, self.activation, self.gated, self._has_bias("ffn")), [x], WORD)]

    def _has_bias(self, part: str) -> bool:
        """True if a map has a bias."""
        return self.bias and part not in self.parts_without_bias


def count_words(vocabulary: Vocabulary) -> int:
    """The number of words of a vocabulary."""
    if isinstance(vocabulary, str | Sequence):
        return len(check_vocabulary(vocabulary))
    try:
        return check_int("vocabulary", vocabulary)
    except BNetError as error:
        expected = "a list of different words, or their number (at least 1)"
        raise BNetError("vocabulary", expected=expected, actual=vocabulary) from error


def list_words(vocabulary: Vocabulary) -> tuple[str, ...] | None:
    """The words of a vocabulary; None if only their number is given."""
    return check_vocabulary(vocabulary) if isinstance(vocabulary, str | Sequence) else None


def is_tied(tie: bool, vocabulary: Vocabulary) -> bool:
    """True if embedding and readout share one table."""
    check_choice("tie", tie, (True, False))
    return tie and vocabulary is not None


def get_positions(positions: TPM | str | None, dim: int, words: int | None) -> TPM | None:
    """The TPM of the positions from a name or a TPM; `words` is the maximum number of words of learned positions."""
    name = positions if isinstance(positions, str) else None
    if words is not None and name != "learned":
        raise BNetError("words", expected="None unless positions='learned'", actual=words)
    if positions is None or (isinstance(positions, TPM) and not positions.get_slots()):
        return positions
    if name == "sinusoidal":
        return Sinusoid(dim)
    if name == "learned":
        if words is None:
            raise BNetError("words", expected="the maximum number of words, because positions='learned'")
        return Positions(words, dim)
    allowed = "'sinusoidal', 'learned', None, a TPM without parents such as Sinusoid(dim, base=100.0)"
    raise BNetError("positions", expected="a position encoding", actual=positions, allowed=allowed)


def parse_mask(mask: object, subject: str = "mask") -> Reach:
    """The reach of a mask; None is the reach `"every"`."""
    reach = as_reach(mask)
    if reach.is_single:
        allowed = "None, 'causal', a Reach, a table of booleans"
        raise BNetError(subject, expected="a mask", actual=mask, allowed=allowed)
    return reach


def shift_right(outputs: Tensor, start: int) -> Tensor:
    """The input words of a decoder from its outputs: the start word, then all outputs except the last.

    Args:
        outputs: The ids of the output words, `[..., word]`, at least one word.
        start: The id of the start word, at least 0.

    Returns:
        The ids of the input words, `[..., word]`.

    Raises:
        BNetError: If `outputs` are not integers, or have no word.

    >>> shift_right(torch.tensor([[5, 6, 7]]), start=0)
    tensor([[0, 5, 6]])
    """
    has_words = isinstance(outputs, Tensor) and outputs.dim() > 0 and outputs.shape[-1] > 0
    if not has_words or outputs.is_floating_point() or outputs.is_complex() or outputs.dtype == torch.bool:
        raise BNetError("outputs", expected="a tensor of ids, [..., word], with at least one word", actual=outputs)
    first = torch.full_like(outputs[..., :1], check_int("start", start, minimum=0))
    return torch.cat([first, outputs[..., :-1]], -1)

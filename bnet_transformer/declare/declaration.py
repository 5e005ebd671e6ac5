"""The classes of a declaration: nodes with a TPM, the arrows into them, plates and stacks.

A declaration is plain data. All other parts of the package work from it, and none depends on a particular architecture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bnet_transformer._core.checks import check_choice, check_int, check_mapping, check_sequence, set_frozen
from bnet_transformer._core.naming import Reach, as_reach
from bnet_transformer._core.tokens import get_raw
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm.base import TPM, Shape, check_shape

SLICE_RULES = ("same", "next", "first", "last")
TPM_HINT = "Use a TPM of bt.tpm, such as bt.tpm.Linear(8), or your own subclass of bt.tpm.TPM"


@dataclass(frozen=True)
class Plate:
    """A repeated index of known size, such as the heads of a slice. The plates of words and slices are implicit.

    Args:
        name: The name, an identifier such as `"head"`.
        size: The number of indices.

    >>> import bnet_transformer as bt
    >>> bt.Plate("head", 4)
    Plate(name='head', size=4)
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise BNetError("plate name", expected="a string", actual=self.name)
        set_frozen(self, size=check_int(f"plate {self.name}", self.size))


@dataclass(frozen=True)
class Arrow:
    """An arrow into a node from a parent.

    Args:
        role: The role of the parent: a role of the same stack or outside the stacks, or `"stack.role"`.
        reach: The words of the parent on which each word depends: `"same"` (default), `"every"`, `"causal"`,
            `"earlier"`, `"before"`, `"after"`, `"rest"`, `"first"`, `"last"`, a `Reach`, a table of booleans
            `[word, word of the parent]`, or None for every word.
        slice: The slice of the parent: `"same"`, `"next"` (the state that this slice computes), `"first"`, `"last"` or
            a number. None (default) is `"same"` within a stack and `"last"` otherwise.
        pick: For each plate of the parent that a discrete node indexes, the role of that node. With
            `pick={"head": "c"}` the node receives head c of the parent, and `c` becomes a parent too. Default: none.

    >>> import bnet_transformer as bt
    >>> bt.Arrow("k", "causal"), bt.Arrow("x", slice="last", pick={"head": "c"})
    (...)
    """

    role: str
    reach: Reach | str | Sequence[Sequence[bool]] | None = field(default_factory=Reach)
    slice: str | int | None = None
    pick: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.role, str):
            raise BNetError("role of an arrow", expected="a string", actual=self.role)
        set_frozen(self, reach=as_reach(self.reach), pick=dict(check_mapping("pick", self.pick)))
        if isinstance(self.slice, str):
            check_choice("arrow slice", self.slice, SLICE_RULES)
        elif self.slice is not None:
            set_frozen(self, slice=check_int("arrow slice", self.slice, minimum=0))
        for plate, role in self.pick.items():
            if not isinstance(role, str):
                raise BNetError(f"pick of {plate}", expected="the role of a discrete node", actual=role)


@dataclass(frozen=True)
class Node:
    """A node template: all nodes of one role.

    Args:
        role: The name, an identifier such as `"q"`. Indices of slice, plates and word follow it in the name of a node.
        tpm: The conditional distribution of the node given its parents.
        parents: Roles or `Arrow`s, in the order of the TPM's slots. Default: none, for a root.
        plates: The plates over which the node is repeated: `"word"`, and plates of the declaration. Default: none.
        shared: Whether all slices have the same parameters. Default False.
        scope: `"sentence"` (default), or `"corpus"` for a root that is drawn once for all sentences.
        shape: The shape of the value. Only a recurrent node that is not discrete needs it; None (default) infers it
            from the TPM.

    >>> import bnet_transformer as bt
    >>> bt.Node("q", bt.tpm.Linear(), ["W_q", "x"], plates=["word"]).parents
    (Arrow(role='W_q', ...), Arrow(role='x', ...))
    """

    role: str
    tpm: TPM
    parents: Sequence[str | Arrow] = ()
    plates: Sequence[str] = ()
    shared: bool = False
    scope: str = "sentence"
    shape: Shape | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.role, str):
            raise BNetError("role of a node", expected="a string", actual=self.role)
        if not isinstance(self.tpm, TPM):
            raise BNetError(f"tpm of node {self.role}", expected="a TPM", actual=self.tpm, hint=TPM_HINT)
        set_frozen(self, parents=check_sequence(f"parents of node {self.role}", self.parents, Arrow, as_arrow))
        set_frozen(self, plates=check_sequence(f"plates of node {self.role}", self.plates, str))
        check_choice("shared", self.shared, (True, False))
        check_choice("scope", self.scope, ("sentence", "corpus"))
        if self.shape is not None:
            set_frozen(self, shape=check_shape("shape", self.shape))

    @property
    def arrows(self) -> tuple[Arrow, ...]:
        """The arrows into the node."""
        return tuple(as_arrow(parent) for parent in self.parents)


@dataclass(frozen=True)
class Stack:
    """A chain of slices over the words of one sentence, after a prologue and before an epilogue.

    A role in both the prologue and `slice` is a *state*, such as `x`. An arrow in slice t reads its value `x_t` before
    the slice, and the node in slice t computes its value `x_(t+1)` after it.

    Args:
        slice: The nodes of one slice (a layer). Default: none; such a stack has no slices.
        prologue: The nodes before the first slice, such as embeddings. Default: none.
        epilogue: The nodes after the last slice, such as readouts. Default: none.
        slices: The number of slices. Default 1.
        name: The name, which is a prefix of the names of its nodes. Default `""`; each of several stacks needs a name.
        vocabulary: The words of text, which must be different. None (default) for sentences of ids or vectors.

    >>> import bnet_transformer as bt
    >>> x, W = bt.Node("x", bt.tpm.Given(4), plates=["word"]), bt.Node("W", bt.tpm.Weight((4, 4)))
    >>> step = bt.Node("x", bt.tpm.Linear(), ["W", "x"], plates=["word"])
    >>> bt.Stack([W, step], prologue=[x], slices=2).slices
    2
    """

    slice: Sequence[Node] = ()
    prologue: Sequence[Node] = ()
    epilogue: Sequence[Node] = ()
    slices: int = 1
    name: str = ""
    vocabulary: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for block in ("slice", "prologue", "epilogue"):
            set_frozen(self, **{block: check_sequence(f"stack {block}", getattr(self, block), Node)})
        if not isinstance(self.name, str):
            raise BNetError("stack name", expected="a string", actual=self.name)
        count = check_int("slices", self.slices, minimum=1 if self.slice else 0)
        set_frozen(self, slices=count if self.slice else 0)
        if self.vocabulary is not None:
            set_frozen(self, vocabulary=check_vocabulary(self.vocabulary))

    @property
    def states(self) -> frozenset[str]:
        """The roles that are passed from slice to slice."""
        return frozenset(n.role for n in self.prologue) & frozenset(n.role for n in self.slice)


@dataclass(frozen=True)
class Declaration:
    """An architecture; `bt.BNet(declaration)` makes a net of it.

    Args:
        stacks: The stacks. Default: none; the net then is a Bayesian network without words.
        nodes: The nodes outside the stacks, such as selectors, shared weights and readouts of a sentence. Default:
            none.
        plates: The plates of known size. Default: none.
        name: The name of the architecture. Default `"net"`.

    >>> import torch
    >>> import bnet_transformer as bt
    >>> x, W = bt.Node("x", bt.tpm.Given(4), plates=["word"]), bt.Node("W", bt.tpm.Weight((4, 4)))
    >>> step = bt.Node("x", bt.tpm.Linear(), ["W", "x"], plates=["word"])
    >>> net = bt.BNet(bt.Declaration([bt.Stack([W, step], prologue=[x], slices=2)]))
    >>> net.sentence(x=torch.zeros(3, 4)).parents("x_2_1")
    ['W_1', 'x_1_1']
    >>> rain = bt.Node("rain", bt.tpm.Categorical(2, (0.8, 0.2)))
    >>> net = bt.BNet(bt.Declaration(nodes=[rain, bt.Node("wet", bt.tpm.Categorical(2), ["rain"])]))
    >>> net.sentence().posterior("rain", {"wet": 1}).shape
    torch.Size([2])
    """

    stacks: Sequence[Stack] = ()
    nodes: Sequence[Node] = ()
    plates: Sequence[Plate] = ()
    name: str = "net"

    def __post_init__(self) -> None:
        for name, kind in (("stacks", Stack), ("nodes", Node), ("plates", Plate)):
            set_frozen(self, **{name: check_sequence(name, getattr(self, name), kind)})
        if not isinstance(self.name, str):
            raise BNetError("declaration name", expected="a string", actual=self.name)


def as_arrow(parent: object) -> Arrow:
    """An `Arrow` from a role or an `Arrow`."""
    if isinstance(parent, Arrow):
        return parent
    if isinstance(parent, str):
        return Arrow(parent)
    raise BNetError("parent", expected="a role or an Arrow", actual=parent)


def check_vocabulary(words: object) -> tuple[str, ...]:
    """A vocabulary as a tuple of different words, none of them empty."""
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise BNetError("vocabulary", expected="a list of different words", actual=words)
    vocabulary = tuple(map(get_raw, check_sequence("vocabulary", words, str)))
    if not vocabulary or not all(vocabulary):
        expected = "words that are not empty" if vocabulary else "at least one word"
        raise BNetError("vocabulary", expected=expected, actual=words)
    if len(set(vocabulary)) != len(vocabulary):
        duplicate = next(word for word, count in Counter(vocabulary).items() if count > 1)
        raise BNetError("vocabulary", expected="different words", actual=f"{duplicate!r} twice")
    return vocabulary

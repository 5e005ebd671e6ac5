"""The declaration language: nodes with a TPM, the arrows into them, plates, stacks.

A declaration is plain data. All other parts of the package start from it, and none knows an architecture by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bnet_transformer._core.checks import check_choice, check_int, check_mapping, check_sequence, set_frozen
from bnet_transformer._core.naming import Reach, as_reach
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm.base import TPM, Shape, check_shape

SLICE_RULES = ("same", "next", "first", "last")


@dataclass(frozen=True)
class Plate:
    """A repeated index of known size, such as the heads of a slice. The word plate needs no declaration.

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
    """An arrow into a node: from which role, which words of it, which slice, and which entry of a plate.

    `role` is a role of the same stack or outside the stacks, or `stack.role`. `reach` says which words (`same`,
    `every`, `causal`, `earlier`, `before`, `first`, `last`, a `Reach`, a table of booleans). `slice` is `same`, `next`
    (the state that this slice makes), `first`, `last` or a number; by default `same` within a stack, else `last`.
    `pick={"head": "c"}` reads the plate `head` of the parent at the state of the discrete node `c`, which becomes a
    parent as well.

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
            raise BNetError("arrow", expected="the role that it comes from, a string", actual=self.role)
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
    """A node template: its role, its TPM, the arrows into it in the order of the TPM's slots, its plates.

    `plates` names the plates it is repeated over (`"word"`, and plates of the declaration); the slice plate comes
    with the block where the node stands. `shared=True` gives all its slices the same parameters. A root that is
    drawn once for a whole corpus, not for each sentence, has `scope="corpus"`. `shape` is needed only where a node
    that is not discrete reads itself at earlier words; elsewhere it follows from the TPM.

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
            raise BNetError("node", expected="a role, a string", actual=self.role)
        if not isinstance(self.tpm, TPM):
            raise BNetError(f"node {self.role}", expected="a TPM", actual=self.tpm, allowed="see bnet_transformer.tpm")
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
    """A chain of slices over one sentence's words, after a prologue and before an epilogue.

    A role that stands both in the prologue and in `slice` is a *state*: read in slice t it is the state that enters,
    declared there it is the state that leaves (t + 1). A stack among several has a name, which prefixes its nodes.
    A stack whose `slice` is empty has no slices: its prologue is followed by its epilogue.

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
        """The roles that pass from slice to slice."""
        return frozenset(n.role for n in self.prologue) & frozenset(n.role for n in self.slice)


@dataclass(frozen=True)
class Declaration:
    """An architecture: stacks, nodes outside them (selectors, shared weights, sentence readouts), and plates.

    Without stacks it is a Bayesian network without words: nodes, and plates of a known size.

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
    """An arrow, from a role alone or an Arrow."""
    if isinstance(parent, Arrow):
        return parent
    if isinstance(parent, str):
        return Arrow(parent)
    raise BNetError("parent", expected="a role or an Arrow", actual=parent)


def check_vocabulary(words: object) -> tuple[str, ...]:
    """A vocabulary as a tuple of distinct words, none empty."""
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise BNetError("vocabulary", expected="a list of different words", actual=words)
    vocabulary = check_sequence("vocabulary", words, str)
    if not vocabulary or not all(vocabulary):
        raise BNetError("vocabulary", expected="words, none empty", actual="an empty word" if vocabulary else "no word")
    if len(set(vocabulary)) != len(vocabulary):
        duplicate = next(word for word, count in Counter(vocabulary).items() if count > 1)
        raise BNetError("vocabulary", expected="different words", actual=f"{duplicate!r} twice")
    return vocabulary

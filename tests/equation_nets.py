"""Small nets for the tests of equations."""

from __future__ import annotations

import re

import bnet_transformer as bt
from bnet_transformer.tpm import TPM, Given

WORD = ["word"]
HEADS = ["head", "word"]
VECTOR = bt.Node("x", Given(4), plates=WORD)


def make_net(*nodes: bt.Node, plates: tuple[bt.Plate, ...] = (), **options: object) -> bt.BNet:
    """A net of one stack over given vectors."""
    stack = bt.Stack(list(nodes), **{"prologue": [VECTOR], **options})  # type: ignore[arg-type]
    return bt.BNet(bt.Declaration([stack], plates=list(plates)))


def mixed(tpm: TPM, *extra: str | bt.Node, reach: object = "every") -> bt.BNet:
    """A net whose state is an attention over itself."""
    arrow = bt.Arrow("x", reach)  # type: ignore[arg-type]
    parents = [
        arrow if slot.endswith(".") else "x" for slot in tpm.get_slots() if slot in ("q", "k", "z", "x") or "." in slot
    ]
    nodes = [node for node in extra if isinstance(node, bt.Node)]
    return make_net(*nodes, bt.Node("x", tpm, [*parents, *(n.role for n in nodes)], plates=WORD))


def right(net: bt.BNet, name: str, form: str = "word") -> str:
    """The right-hand side of one equation, without the indicator around it."""
    text = net.equations(form)[name].right
    match = re.fullmatch(r"\\mathbb{I}(?:\\Big)?\(\\, .+? = (.*) \\,(?:\\Big)?\)", text, re.DOTALL)
    return match[1] if match else text

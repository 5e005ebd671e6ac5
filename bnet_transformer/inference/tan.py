"""TAN: what a slice is once it is shrunk to a few boxes, and the tree of best parents within its attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bnet_transformer import asking
from bnet_transformer._core.drawing import Drawable
from bnet_transformer.axes import WORD
from bnet_transformer.errors import BNetError, one_of, unknown, whole
from bnet_transformer.graph import Ground, Quotient, Selection, shrink
from bnet_transformer.graph.arborescence import best_parents
from bnet_transformer.inference.sentence_state import SentenceState
from bnet_transformer.tpm.arrays import in_numpy

if TYPE_CHECKING:
    import pandas as pd

CLASS, OUTSIDE = "class", "(outside)"


@dataclass(frozen=True)
class Tan(Drawable):
    """What a shrunk slice is.

    `kind` is one of `no DAG`, `naive Bayes`, `TAN` (the boxes but the class are one tree: each has at most one parent
    besides it), `forest augmented naive Bayes` (several trees), `reverse TAN` (at most one child: the arrows of the
    tree turned round) and its forest, `augmented naive Bayes`, and `DAG` where the class has no arrow to some box
    (`missing`); `nearly` is what it would be with those arrows.
    """

    kind: str
    nearly: str
    class_box: str
    missing: tuple[str, ...]
    reverse_tree: bool
    quotient: Quotient = field(repr=False)

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each arrow between boxes, with the number of ground arrows that it stands for."""
        import pandas as pd

        boxes = self.quotient.boxes
        return pd.DataFrame(
            [
                {"parent": boxes[i], "child": boxes[j], "arrows": int(count)}
                for (i, j), count in zip(self.quotient.arrows.tolist(), self.quotient.counts.tolist(), strict=True)
            ],
            columns=["parent", "child", "arrows"],
        )

    def _repr_html_(self) -> str:
        but = f"; with arrows to {', '.join(self.missing)} it were {self.nearly}" if self.missing else ""
        told = f"{self.kind} (class {self.class_box}){but}"
        return f"<p>{escape(told)}</p>{self.to_dataframe().to_html(index=False)}"


@dataclass(frozen=True)
class TanTree(Drawable):
    """The best parent of each word in the attention of a slice (-1: a root): a true TAN under the state as class.

    `mass` is what it keeps of the attention between different words, `sum P(pa(i) | i) / sum (1 - P(i | i))`: how
    tree-like the attention is.
    """

    parents: tuple[int, ...]
    weights: tuple[float, ...]
    mass: float
    tokens: tuple[str, ...]
    slice: int
    head: str

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each word: its parent, and how much of it the word reads."""
        import pandas as pd

        said = list(self.tokens)
        rows = zip(said, self.parents, self.weights, strict=True)
        told = [(token, parent, said[parent] if parent >= 0 else "", share) for token, parent, share in rows]
        return pd.DataFrame(told, columns=["token", "parent", "parent_token", "share"])

    def _repr_html_(self) -> str:
        told = f"slice {self.slice}, {self.head}: {self.mass:.1%} of the attention between words is in the tree"
        return f"<p>{escape(told)}</p>{self.to_dataframe().to_html()}"


def tan(
    state: SentenceState, boxes: str | Mapping[str, str], slice_: int, class_box: str | None, stack: str | None = None
) -> Tan:
    """The class of a slice that is shrunk to boxes.

    Args:
        state: The sentence.
        boxes: `"words"`, `"roles"`, or the box of each node.
        slice_: The slice.
        class_box: The box of the class; by default the state that enters, else the root with the most arrows out.
        stack: Whose slice it is, in a net with several stacks.

    Raises:
        BNetError: There is no such slice, or no such box.
        UnknownNameError: There is no such stack.
    """
    ground, depths = state.ground, state.network.graph.slices
    if stack is not None and (not isinstance(stack, str) or stack not in depths):
        raise unknown("stack", stack, depths)
    if isinstance(boxes, str) or depths:
        depth = asking.depth_of(state.network, stack)
        if whole("slice", slice_, least=0) >= depth:
            raise BNetError("slice", expected=f"a slice from 0 to {depth - 1}", got=slice_)
    if isinstance(boxes, str):
        one_of("boxes", boxes, ("words", "roles"))
        naming, first = box_namer(ground, boxes, slice_, stack)
        quotient = _without(shrink(ground, naming, Selection(slices=[slice_], weights=False)), OUTSIDE)
    else:
        quotient, first = shrink(ground, boxes, Selection(slices=[slice_], weights=False)), None
    chosen = class_box if class_box is not None else first or _likely_class(quotient)
    if not isinstance(chosen, str) or chosen not in quotient.boxes:
        raise BNetError("class_box", expected="a box", got=chosen, allowed=", ".join(quotient.boxes))
    return _classified(quotient, chosen)


def box_namer(ground: Ground, boxes: str, slice_: int, stack: str | None = None) -> tuple[Callable[[str], str], str]:
    """The box of each node by name, and the box of the class; of a slice of that stack, where there are several."""
    before = slice_ - 1 if slice_ else -1
    over = [family for family in ground.folded.families if family.words is not None]
    states = [f for f in over if (f.slice, f.step) == (slice_, before) and stack in (None, f.stack)]
    if len(states) != 1:
        names = ", ".join(family.name for family in states) or "none"
        several = f"stack=, one of {', '.join(family.stack for family in states)}; " if len(states) > 1 else ""
        allowed = f"{several}boxes=, a mapping"
        raise BNetError("slice", expected="a slice that one state enters", got=names, allowed=allowed)
    entry, stack = states[0], states[0].stack

    def box(name: str) -> str:
        family, index = ground.locate(name)
        if family.index == entry.index:
            return CLASS if boxes == "words" else entry.name
        if family.step != slice_ or family.stack != stack:
            return OUTSIDE
        if boxes == "roles" or ground.axes(family)[-1:] != (WORD,):
            return family.name
        return f"word_{index[-1]}"

    return box, CLASS if boxes == "words" else entry.name


def _without(quotient: Quotient, box: str) -> Quotient:
    """The same without one box and its arrows."""
    if box not in quotient.boxes:
        return quotient
    gone = quotient.boxes.index(box)
    kept = ~(quotient.arrows == gone).any(axis=1)
    arrows = quotient.arrows[kept]
    boxes = tuple(name for name in quotient.boxes if name != box)
    return Quotient(boxes, arrows - (arrows > gone), quotient.counts[kept])


def _likely_class(quotient: Quotient) -> str:
    """The root with the most arrows out; the first box where there is no root."""
    counts = np.bincount(quotient.arrows[:, 0], minlength=len(quotient.boxes))
    entered = set(quotient.arrows[:, 1].tolist())
    roots = [k for k in range(len(quotient.boxes)) if k not in entered] or [0]
    return quotient.boxes[max(roots, key=lambda k: (counts[k], -k))]


def _classified(quotient: Quotient, class_box: str) -> Tan:
    others = [box for box in quotient.boxes if box != class_box]
    sources, targets = quotient.arrows.T
    own, rest = quotient.boxes.index(class_box), _without(quotient, class_box).arrows
    reached = {quotient.boxes[k] for k in targets[sources == own].tolist()}
    missing = tuple(box for box in others if box not in reached)
    parents, children = (np.bincount(rest[:, side]).max(initial=0) for side in (1, 0))
    acyclic = quotient.acyclic
    if not acyclic or (targets == own).any():
        nearly = "no DAG" if not acyclic else "DAG"
    elif not len(rest):
        nearly = "naive Bayes"
    else:
        one_tree = len(rest) == len(others) - 1
        whole = "TAN" if one_tree else "forest augmented naive Bayes"
        nearly = whole if parents <= 1 else f"reverse {whole}" if children <= 1 else "augmented naive Bayes"
    kind = "DAG" if missing and nearly != "no DAG" else nearly
    reverse = acyclic and len(rest) > 0 and bool(children <= 1)
    return Tan(kind, nearly, class_box, missing, reverse, quotient)


def tan_tree(reading: Tensor, tokens: tuple[str, ...], slice_: int, head: str) -> TanTree:
    """The maximum spanning arborescence of one slice's attention, `[word, word]`; `head` says of which head."""
    table = in_numpy(reading)
    table = np.where(table == 0, np.nan, table)
    parents = best_parents(table)
    kept = [float(reading[i, parent]) if parent >= 0 else 0.0 for i, parent in enumerate(parents)]
    between = float((1 - torch.diagonal(reading)).sum())
    mass = sum(kept) / between if between > 0 else 1.0
    return TanTree(tuple(parents), tuple(kept), mass, tokens, slice_, head)

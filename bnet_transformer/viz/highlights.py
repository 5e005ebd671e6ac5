"""Which views of a sentence draw the nodes that are highlighted, and what to do where one leaves some of them out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from bnet_transformer.errors import BNetError, unknown
from bnet_transformer.graph import Ground, Selection
from bnet_transformer.inference.sentence_state import matching
from bnet_transformer.network import Network
from bnet_transformer.viz.marks import forms_of, meant, named
from bnet_transformer.viz.options import VIEWS, Options

PARTS = ("slices", "words", "heads", "weights")  # options that leave nodes out
MOST = 20_000  # nodes up to which an unknown name is compared with all


@dataclass(frozen=True)
class Highlights:
    """What is highlighted in a figure of a sentence; `grid` has the stack and word of each node of its reading grid."""

    asked: Options
    ground: Ground
    grid: Callable[[Selection], Mapping[str, tuple[str, int]]]
    selection_of: Callable[[Options], Selection]

    @property
    def names(self) -> tuple[str, ...]:
        """The names and patterns that are highlighted."""
        return () if self.asked.highlight is None else named(self.asked.highlight)

    def left_out(self, view: str, selection: Selection) -> list[str]:
        """The names of which a view draws no node."""
        if not self.names:
            return []
        if view == "nodes":
            return [name for name in self.names if not self._is_selected(name, selection)]
        drawn = self.grid(selection) if view == "words" else [family.name for family in self.ground.folded.families]
        return [name for name in self.names if not meant(name, drawn)]

    def shown_in(self, view: str) -> bool:
        """Whether a view draws all, and uses every option that was given."""
        asked = replace(self.asked, detail=None)
        return asked.fits(view) and not self.left_out(view, self.selection_of(asked))

    def part_of(self, **part: object) -> Selection:
        """The selection with other options, or the error that it leaves out what must be drawn."""
        selection = self.selection_of(replace(self.asked, **part))  # type: ignore[arg-type]
        only = () if self.asked.only is None else named(self.asked.only)
        for name in (*self.names, *only):
            if not self._is_selected(name, selection):
                raise BNetError("highlight", expected="nodes that this figure draws (detail='nodes')", got=name)
        return selection

    def check(self, view: str) -> None:
        """Refuse a view that leaves some out, where another view, or fewer options, would draw them."""
        lost = self.left_out(view, self.selection_of(self.asked))
        if not lost:
            return
        self._check_known(lost[0])
        ways = [way for other in VIEWS if (way := self._way(other)) is not None]
        if ways:
            expected = f"nodes that this figure draws (detail={view!r})"
            raise BNetError("highlight", expected=expected, got=lost[0], allowed="; ".join(ways))

    def _way(self, view: str) -> str | None:
        """How a view draws all: as it is, or without options that it does not use or that leave nodes out."""
        defaults: dict[str, Any] = {each.name: each.default for each in fields(Options)}
        unused = [name for name in self.asked.told if name not in VIEWS[view]]
        parts = [name for name in PARTS if name in self.asked.told and name not in unused]
        for dropped in (unused, [*unused, *parts]):
            asked = replace(self.asked, detail=None, **{name: defaults[name] for name in dropped})
            if not self.left_out(view, self.selection_of(asked)):
                without = ", ".join(f"{name}=" for name in dropped)
                return f"detail={view!r}" + (f" without {without}" if dropped else "")
        return None

    def _check_known(self, name: str) -> None:
        """Refuse a name that no view of the sentence draws."""
        families = self.ground.folded.families
        if not self._is_selected(name, Selection()) and not meant(name, [family.name for family in families]):
            every = [self.ground.family_names(family) for family in families]
            few = len(self.ground) <= MOST
            raise unknown("highlight", name, itertools.chain(*every) if few else map(next, every))

    def _is_selected(self, name: str, selection: Selection) -> bool:
        """Whether a selection keeps some node that a name or a pattern stands for."""
        for form in forms_of(name):
            try:
                nodes = matching(self.ground, form) if "*" in form else [self.ground.id(form)]
            except BNetError:
                continue
            for family in {self.ground.family_of(node) for node in nodes}:
                kept = self.ground.kept(family, selection)
                if kept and bool(np.isin(nodes, self.ground.nodes(family, selection)).any()):
                    return True
        return False


def check_families(network: Network, asked: Options, kept: Collection[str]) -> None:
    """Refuse a highlighted family that a folded figure leaves out, and name the option that draws it."""
    for name in () if asked.highlight is None else named(asked.highlight):
        family = network.graph.by_name.get(name)
        if family is not None and name not in kept:
            last = network.graph.slices[family.stack] - 1
            way = "weights=True" if family.step is None else f"slices={min(max(family.step, 0), last)}"
            raise BNetError("highlight", expected="families that the figure draws", got=name, allowed=way)

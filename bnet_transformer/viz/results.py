"""Results that can draw themselves: what a sentence answers with is one of these."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from bnet_transformer import graph, inference
from bnet_transformer.axes import join
from bnet_transformer.errors import BNetError, one_of
from bnet_transformer.export import write
from bnet_transformer.tpm.arrays import in_numpy
from bnet_transformer.viz.formats import DATA, FORMATS, Drawable
from bnet_transformer.viz.options import LIMIT, THEMES, Options
from bnet_transformer.viz.picture import Picture
from bnet_transformer.viz.quotient import quotient_picture, tan_picture, tree_picture
from bnet_transformer.viz.style import finished
from bnet_transformer.viz.svg import showing
from bnet_transformer.viz.words import Reading, chosen, spoken, words_picture

Result = TypeVar("Result")
Path = str | os.PathLike[str]


def save(path: Path, picture: Picture) -> None:
    """Write a picture; the suffix says how."""
    formats = {suffix: writer for suffix, writer in FORMATS.items() if suffix not in DATA}
    write(path, Drawable(graph=picture.to_networkx, picture=lambda: picture), writers=formats)


def _themed(picture: Picture, theme: str) -> Picture:
    one_of("theme", theme, THEMES)
    return showing(replace(picture, theme=theme))


@dataclass(frozen=True)
class Quotient(graph.Quotient):
    """A shrunk graph that can be drawn."""

    def picture(self, *, theme: str = "light") -> Picture:
        """The boxes, and the arrows between them."""
        return _themed(quotient_picture(self), theme)

    def draw(self, path: Path, *, theme: str = "light") -> None:
        """Write the figure; the suffix says how."""
        save(path, self.picture(theme=theme))


@dataclass(frozen=True)
class Tan(inference.Tan):
    """What a shrunk slice is, and its figure."""

    def picture(self, *, theme: str = "light") -> Picture:
        """The boxes of the slice, the class on top."""
        return _themed(tan_picture(self), theme)

    def draw(self, path: Path, *, theme: str = "light") -> None:
        """Write the figure; the suffix says how."""
        save(path, self.picture(theme=theme))


@dataclass(frozen=True)
class TanTree(inference.TanTree):
    """The tree of best parents, and its figure."""

    def picture(self, *, theme: str = "light") -> Picture:
        """The words in a row, under the class and their best parents."""
        return _themed(tree_picture(self), theme)

    def draw(self, path: Path, *, theme: str = "light") -> None:
        """Write the figure; the suffix says how."""
        save(path, self.picture(theme=theme))


@dataclass(frozen=True)
class Reads(inference.Reads):
    """Which words were read, and the figure of the attention TPMs that say so."""

    def picture(
        self,
        *,
        min_weight: float | None = None,
        top: int | None = None,
        theme: str = "light",
        limit: int | None = LIMIT,
    ) -> Picture:
        """The reading grid of these slices: reads are averaged over the choices, without the residual share."""
        asked = Options(min_weight=min_weight, top=top, theme=theme, limit=limit)
        mean = np.einsum("s,stij->tij", in_numpy(self.weights), in_numpy(self.attention))
        there = in_numpy(self.readable)
        readings = [Reading(("", t), ("", t + 1), *each) for t, *each in zip(self.slices, mean, there, strict=True)]
        states = {"": [*self.slices, self.slices[-1] + 1]}
        reads = chosen(readings, {"": range(len(self.tokens))}, asked.min_weight, asked.top, asked.limit)
        words, silent = spoken({"": range(len(self.tokens))}, reads)
        name = lambda _, slice_, word: join(self.state, (slice_, word))  # noqa: E731
        found = words_picture({"": self.tokens}, words, states, name, reads)
        return _themed(finished(found, title="what is read", caption=[self.head, reads.hidden, silent]), theme)

    def draw(
        self,
        path: Path,
        *,
        min_weight: float | None = None,
        top: int | None = None,
        theme: str = "light",
        limit: int | None = LIMIT,
    ) -> None:
        """Write the figure; the suffix says how."""
        save(path, self.picture(min_weight=min_weight, top=top, theme=theme, limit=limit))


def drawable(result: Any, kind: type[Result]) -> Result:
    """A result as its kind that can be drawn."""
    if not any(type(result) is base for base in kind.__mro__):
        raise BNetError("result", expected=kind.__name__, got=result)
    return kind(**{each.name: getattr(result, each.name) for each in fields(result)})

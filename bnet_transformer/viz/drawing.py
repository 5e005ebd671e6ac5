"""Writing figures of nets and sentences: the suffix says how, and each way takes its own options."""

from __future__ import annotations

import abc
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from bnet_transformer.equations import equations
from bnet_transformer.errors import unknown
from bnet_transformer.export import write
from bnet_transformer.network import Network
from bnet_transformer.viz.formats import FORMATS, Drawable
from bnet_transformer.viz.options import VIEWS
from bnet_transformer.viz.options import options as as_options
from bnet_transformer.viz.picture import Picture
from bnet_transformer.viz.sentence import Said, net_picture, sentence_picture

Path = str | os.PathLike[str]


class NetFigures(abc.ABC):
    """The figures of a net."""

    network: Network

    @abc.abstractmethod
    def graph(self) -> Any:
        """The folded graph."""

    def picture(self, **options: Any) -> Picture:
        """The folded graph as a figure: `slices=`, `weights=`, `highlight=`, `theme=`, `legend=`."""
        return net_picture(self.network, as_options(options, VIEWS["folded"]))

    def draw(self, path: Path, **options: Any) -> None:
        """Write the folded graph: svg, png, pdf, tex, dot, json or graphml, by suffix. Options: those of `picture`."""
        what = Drawable(
            graph=lambda: self.graph(**_known(options, self.graph)),
            picture=lambda: self.picture(**options),
            equations=lambda: equations(self.network).latex,
        )
        write(path, what, writers=FORMATS)


class SentenceFigures(abc.ABC):
    """The figures of the bnet of a sentence."""

    @property
    @abc.abstractmethod
    def _said(self) -> Said: ...

    @abc.abstractmethod
    def graph(self) -> Any:
        """The ground graph."""

    def picture(self, **options: Any) -> Picture:
        """The figure of the sentence: its nodes in a grid; of many, each word's states and the strongest reads.

        `detail` is "nodes", "words" (the reading grid) or "folded"; `weights`, `slices`, `words`, `heads` keep a part,
        `min_weight` and `top` the strongest reads, `only` some nodes or a networkx graph of them; `highlight` marks
        names, patterns, paths or an answer (a trail, a separation, a sweep); `boxes` frames what `tan` and `shrink`
        would shrink; `attention=False` leaves out `P(j | i)`; `theme` is light, dark or auto. Past `limit` arrows it
        refuses, and says which filters fit; so it does an option for which `detail` has no use.

        >>> import bnet_transformer as bt
        >>> figure = bt.bayesuvius(dim=4).sentence("the cat sat").picture()
        >>> len(figure.boxes), len(figure.arrows)
        (19, 42)
        """
        return sentence_picture(self._said, as_options(options))

    def draw(self, path: Path, **options: Any) -> None:
        """Write the bnet of the sentence; the suffix says how: svg, png, pdf, tex, dot, or json, graphml, bif.

        Options are those of `picture`; of json and graphml, those of `graph`.
        """
        said = self._said
        what = Drawable(
            graph=lambda: self.graph(**_known(options, self.graph)),
            world=said.world,
            evidence=said.seen,
            picture=lambda: self.picture(**options),
            equations=lambda: equations(said.world.network).latex,
        )
        write(path, what, writers=FORMATS)


def _known(told: Mapping[str, Any], method: Callable[..., Any]) -> Mapping[str, Any]:
    """Options, all of which a method has; others are refused with the near ones."""
    names = list(inspect.signature(method).parameters)
    for name in told:
        if name not in names:
            raise unknown("option of a graph", name, names)
    return told

"""Writing figures of nets and sentences: the suffix says how, and each way takes its own options."""

from __future__ import annotations

import abc
import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bnet_transformer.equations import equations
from bnet_transformer.errors import BNetError, BudgetError, unknown
from bnet_transformer.export import write
from bnet_transformer.files import as_path
from bnet_transformer.inference import SentenceState
from bnet_transformer.network import Network
from bnet_transformer.viz.formats import FORMATS, Drawable
from bnet_transformer.viz.options import VIEWS
from bnet_transformer.viz.options import options as as_options
from bnet_transformer.viz.page import notebook
from bnet_transformer.viz.page.data import MOST_WORDS, Asked, asked_of, described
from bnet_transformer.viz.page.page import written
from bnet_transformer.viz.picture import Picture
from bnet_transformer.viz.sentence import net_picture, sentence_picture
from bnet_transformer.viz.svg import showing, to_svg

if TYPE_CHECKING:
    from bnet_transformer.viz.page.widget import Widget

Path = str | os.PathLike[str]


class NetFigures(abc.ABC):
    """The figures of a net."""

    network: Network

    @abc.abstractmethod
    def graph(self) -> Any:
        """The folded graph."""

    def picture(self, **options: Any) -> Picture:
        """The folded graph as a figure: `slices=`, `weights=`, `highlight=`, `theme=`, `legend=`.

        >>> import bnet_transformer as bt
        >>> len(bt.bayesuvius(dim=4).picture().boxes)               # c, W_q, W_k, W_v, x, q, k, v, x
        9
        """
        return showing(net_picture(self.network, as_options(options, VIEWS["folded"])))

    def draw(self, path: Path, **options: Any) -> None:
        """Write the folded graph: svg, png, pdf, tex, dot, json or graphml, by suffix. Options: those of `picture`.

        >>> import bnet_transformer as bt
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bt.bayesuvius(dim=4).draw(f"{folder}/net.svg")
        ...     Path(f"{folder}/net.svg").read_text()[:4]
        '<svg'
        """
        what = Drawable(
            graph=lambda: self.graph(**_known(options, self.graph)),
            picture=lambda: self.picture(**options),
            equations=lambda: equations(self.network).latex,
        )
        write(path, what, writers=FORMATS)


class SentenceFigures(abc.ABC):
    """The figures of the bnet of a sentence."""

    state: SentenceState

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
        return showing(sentence_picture(self.state, as_options(options)))

    def explore(
        self,
        path: Path,
        *,
        detail: str | None = None,
        posterior: str | Sequence[str] | None = None,
        inclusion: object = None,
        slices: int | Collection[int] | None = None,
        heads: int | Collection[int] | None = None,
        title: str | None = None,
        theme: str = "auto",
    ) -> Path:
        """Write the interactive page of the sentence, one HTML file that opens from disk, and return its path.

        `detail` says what comes unfolded: `"words"` (states alone), `"nodes"` (every slice), by default what can be
        read. `posterior` names discrete nodes whose posterior is told besides the selectors', `inclusion` is what
        `bt.inclusion` found, or a table of the probability that each head is in, `[slice, head]`. `slices` and `heads`
        keep a part of what is read.

        >>> import bnet_transformer as bt
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = bt.bayesuvius(dim=4).sentence("the cat").explore(f"{folder}/cat.html", theme="dark")
        ...     page.endswith("cat.html")
        True
        """
        asked = Asked(detail, posterior, title, theme, slices, heads, inclusion)
        what = Drawable(graph=self.graph, page=lambda: self._page(asked))
        write(path, what, writers={".html": FORMATS[".html"]})
        return path

    def widget(self, **options: Any) -> Widget:
        """The same page as a widget of notebooks, in which `do` is live: a click sets a node and runs the net again.

        Options are those of `explore`. What was clicked is in its `sentence`.
        """
        notebook.needed()
        from bnet_transformer.viz.page.widget import Widget

        asked = asked_of(options)
        return Widget(self, lambda s: described(s.state, asked, s._clean))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> notebook.Bundle:
        """What a notebook shows: the widget, or the figure where no widget can run."""
        return notebook.bundle(repr(self), self._plain_figure, self.widget)

    def _plain_figure(self) -> str:
        """The figure that stands where no widget runs: of a sentence past a page's words, the folded net."""
        long = max(map(len, self.state.tokens.values()), default=0) > MOST_WORDS
        try:
            picture = self.picture(theme="auto", **({"detail": "folded"} if long else {}))
        except BudgetError:
            picture = self.picture(detail="folded", theme="auto")
        return to_svg(picture)

    def _page(self, asked: Asked) -> bytes:
        return written(described(self.state, asked, self._clean))

    @abc.abstractmethod
    def undo(self, *names: str) -> Any:
        """The sentence without what `do` set."""

    @property
    def _clean(self) -> SentenceState | None:
        """The sentence before what `do` set; None where nothing is set."""
        return self.state.without_interventions() if self.state.interventions else None

    def draw(self, path: Path, **options: Any) -> None:
        """Write the bnet of the sentence; the suffix says how: svg, png, pdf, tex, dot, html, or json, graphml, bif.

        Options are those of `picture`; of json and graphml, of `graph`; of html, of `explore`; bif has none.

        >>> import bnet_transformer as bt
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bt.bayesuvius(dim=4).sentence("the cat").draw(f"{folder}/cat.dot", weights=False)
        ...     Path(f"{folder}/cat.dot").read_text()[:7]
        'digraph'
        """
        self._check_options(path, options)
        state = self.state
        what = Drawable(
            graph=lambda: self.graph(**options),
            world=state.world,
            evidence=state.evidence,
            picture=lambda: self.picture(**options),
            equations=lambda: equations(state.network).latex,
            page=lambda: self._page(asked_of(options)),
        )
        write(path, what, writers=FORMATS)

    def _check_options(self, path: Path, options: Mapping[str, Any]) -> None:
        """Refuse, before anything is written, options that the suffix of a file has no use for."""
        suffix = as_path(path).suffix.lower()
        if suffix == ".html":
            asked_of(options)
        elif suffix in (".json", ".graphml"):
            _known(options, self.graph)
        elif suffix == ".bif" and options:
            raise BNetError(f"options of {path}", expected="none: bif holds the whole bnet", got=", ".join(options))
        elif suffix in FORMATS:
            as_options(options)


def _known(told: Mapping[str, Any], method: Callable[..., Any]) -> Mapping[str, Any]:
    """Options, all of which a method has; others are refused with the near ones."""
    names = list(inspect.signature(method).parameters)
    for name in told:
        if name not in names:
            raise unknown("option of a graph", name, names)
    return told

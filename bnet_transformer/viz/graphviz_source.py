"""DOT source as the package `graphviz` holds it; a module of its own, so that only who asks for it imports graphviz."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import graphviz

if TYPE_CHECKING:
    from bnet_transformer.viz.svg import Shown


class DotSource(graphviz.Source):  # type: ignore[misc]  # graphviz says nothing of its types
    """DOT source that a notebook shows: drawn by `dot` where it is on the PATH, else as the figure of this library."""

    def __init__(self, dot: str, figure: Shown) -> None:
        super().__init__(dot)
        self._figure = figure

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **_: Any) -> dict[str, str]:
        if shutil.which("dot") is None:
            return {"image/svg+xml": self._figure._repr_svg_()}
        drawn: dict[str, str] = super()._repr_mimebundle_(include, exclude)
        return drawn

"""The figures of results by type: `make_picture` and `write_picture` dispatch on the class of a result.

Packages of results are below `figures` in the import order and cannot import it. `bnet_transformer.drawing` registers
its functions here, and results inherit the methods of `Drawable`.
"""

from __future__ import annotations

import importlib
import os
from functools import singledispatch
from typing import Any

from bnet_transformer.errors import BNetError


@singledispatch
def make_picture(result: object, **options: Any) -> Any:
    """The figure of a result.

    Args:
        result: A net, the state of a sentence, or a result that is `Drawable`.
        **options: The options of its figure, such as `theme=`.

    Returns:
        A `figures.Picture`.
    """
    raise BNetError("picture", expected="a net, a sentence or a result with a figure", actual=result)


@singledispatch
def write_picture(result: object, path: str | os.PathLike[str], **options: Any) -> None:
    """Write the figure of a result to a file; the suffix determines the format.

    Args:
        result: A net, the state of a sentence, or a result that is `Drawable`.
        path: The path of the file.
        **options: The options of its figure.
    """
    raise BNetError("picture", expected="a net, a sentence or a result with a figure", actual=result)


class Drawable:
    """The base class of results with a figure."""

    def picture(self, **options: Any) -> Any:
        """The figure of the result.

        Args:
            **options: `theme=`, `width=`, `font=` and `title=`; for a figure of reads also `min_weight=`, `top=`,
                `limit=` and `special=`.

        Returns:
            A `figures.Picture`.

        >>> import bnet_transformer as bt
        >>> len(bt.bayesuvius(dim=4).sentence("the cat sat").tan_tree().picture().boxes)
        4
        """
        _load_figures()
        return make_picture(self, **options)

    def to_graphviz(self, **options: Any) -> Any:
        """The figure as DOT source, which can be edited: structure, labels and colours, without positions.

        Args:
            **options: The options of `picture`.

        Returns:
            A `graphviz.Source`. `.source` is the DOT source. `.render(...)` and `.pipe(...)` draw it with the program
            `dot`. A notebook shows the drawing of `dot`, or that of `picture` if `dot` is not installed.

        >>> import bnet_transformer as bt
        >>> bt.bayesuvius(dim=4).sentence("the cat").tan_tree().to_graphviz().source.splitlines()[0]
        'digraph bnet {'
        """
        return self.picture(**options).to_graphviz()

    def draw(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Write the figure to a file.

        Args:
            path: The path of the file. Its suffix determines the format: `.svg`, `.png`, `.pdf`, `.tex` or `.dot`.
            **options: The options of `picture`.

        >>> import bnet_transformer as bt
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bt.bayesuvius(dim=4).sentence("the cat sat").tan("roles").draw(f"{folder}/roles.svg")
        """
        _load_figures()
        write_picture(self, path, **options)


def _load_figures() -> None:
    """Register the figures, because `drawing` may not be imported when a result is unpickled."""
    importlib.import_module("bnet_transformer.drawing")

"""A registry of figures by type: `make_picture` and `write_picture` dispatch on the class of a result.

Packages of results are below `figures` in the import order. `bnet_transformer.drawing` registers its functions here,
so results have the methods of `Drawable` and do not import `figures`.
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
    raise BNetError("picture", expected="something with a figure", actual=result)


@singledispatch
def write_picture(result: object, path: str | os.PathLike[str], **options: Any) -> None:
    """Write the figure of a result; the suffix of the file says in which format.

    Args:
        result: As in `make_picture`.
        path: The file.
        **options: The options of its figure.
    """
    raise BNetError("picture", expected="something with a figure", actual=result)


class Drawable:
    """A result that has a figure."""

    def picture(self, **options: Any) -> Any:
        """The figure.

        Args:
            **options: `theme=`, and for what is read also `min_weight=`, `top=` and `limit=`.

        Returns:
            A `figures.Picture`.

        >>> import bnet_transformer as bt
        >>> len(bt.bayesuvius(dim=4).sentence("the cat sat").tan_tree().picture().boxes)
        4
        """
        _load_figures()
        return make_picture(self, **options)

    def to_graphviz(self, **options: Any) -> Any:
        """The figure as DOT, to edit: structure, labels and colours, without positions.

        Args:
            **options: Those of `make_picture`.

        Returns:
            A `graphviz.Source`. `.source` is the DOT; `.render(...)` and `.pipe(...)` draw it by the program `dot`. A
            notebook shows what `dot` draws, or the figure of `make_picture` where there is no `dot`.

        >>> import bnet_transformer as bt
        >>> bt.bayesuvius(dim=4).sentence("the cat").tan_tree().to_graphviz().source.splitlines()[0]
        'digraph bnet {'
        """
        return self.picture(**options).to_graphviz()

    def draw(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Write the figure: svg, png, pdf, tex or dot, by suffix.

        Args:
            path: The file.
            **options: Those of `make_picture`.

        >>> import bnet_transformer as bt
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bt.bayesuvius(dim=4).sentence("the cat sat").tan("roles").draw(f"{folder}/roles.svg")
        """
        _load_figures()
        write_picture(self, path, **options)


def _load_figures() -> None:
    """Register the figures: after unpickling a result, `drawing` may not have been imported."""
    importlib.import_module("bnet_transformer.drawing")

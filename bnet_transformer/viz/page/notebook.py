"""What a notebook is given of a sentence: the widget where one can run, an SVG for where none can, a line of text."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.viz.page.data import asked_of, described

if TYPE_CHECKING:
    from bnet_transformer.viz.page.widget import Widget

Bundle = tuple[dict[str, Any], dict[str, Any]]


def bundle(said: str, figure: Callable[[], str], widget: Callable[[], Any]) -> Bundle:
    """The mime bundle and its metadata.

    A terminal has the line alone. GitHub, nbconvert and what else runs no widgets take the SVG; without a kernel, or
    without anywidget, no widget is made.
    """
    shell = _shell()
    found: dict[str, Any] = {"text/plain": said}
    if shell is not None and getattr(shell, "kernel", None) is None:
        return found, {}
    found["image/svg+xml"] = figure()
    if shell is None or importlib.util.find_spec("anywidget") is None:
        return found, {}
    try:
        made, about = _parts(widget()._repr_mimebundle_())
    except BudgetError as error:
        warnings.warn(f"no widget, but a figure: {error}", stacklevel=2)
        return found, {}
    return {**made, **found}, dict(about)


def widget_of(sentence: Any, options: Mapping[str, Any]) -> Widget:
    """The page of a sentence as a widget.

    Args:
        sentence: The `Sentence`.
        options: The options of `Sentence.explore`.

    Raises:
        BNetError: anywidget is not installed.
    """
    if importlib.util.find_spec("anywidget") is None:
        allowed = 'pip install "bnet-transformer[notebook]"'
        raise BNetError("widget", expected="anywidget to be installed", got="no such package", allowed=allowed)
    from bnet_transformer.viz.page.widget import Widget

    asked = asked_of(options)
    return Widget(sentence, lambda changed: described(changed.state, asked))


def _shell() -> Any:
    """The IPython that runs, or None."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def _parts(told: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Data and metadata of a mime bundle, which may be data alone, or nothing."""
    if isinstance(told, tuple):
        return told
    return told or {}, {}

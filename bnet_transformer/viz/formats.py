"""The one table of suffixes: how a file is written. To add a format, add its writer to `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bnet_transformer.errors import BNetError
from bnet_transformer.export import WRITERS, Exportable
from bnet_transformer.viz.dot import to_dot
from bnet_transformer.viz.picture import Picture
from bnet_transformer.viz.svg import to_svg
from bnet_transformer.viz.tikz import to_tikz
from bnet_transformer.viz.typeset import to_pdf, to_png


@dataclass(frozen=True)
class FigureParts(Exportable):
    """What can be exported and drawn; `equations` is the LaTeX that stands beside a figure, `page` the HTML."""

    picture: Callable[[], Picture] | None = None
    equations: Callable[[], str] = lambda: ""
    page: Callable[[], bytes] | None = None


def _drawn(what: Exportable) -> Picture:
    if not isinstance(what, FigureParts) or what.picture is None:
        raise BNetError("picture", expected="something with a figure", got=what)
    return what.picture()


def _html(what: Exportable) -> bytes:
    if not isinstance(what, FigureParts) or what.page is None:
        raise BNetError("page", expected="the bnet of a sentence", got="something without a page")
    return what.page()


def _tex(what: Exportable) -> bytes:
    picture = _drawn(what)
    return to_tikz(picture, what.equations() if isinstance(what, FigureParts) else "").encode("ascii")


FORMATS: Mapping[str, Callable[[Exportable], bytes]] = MappingProxyType(
    {
        **WRITERS,
        ".svg": lambda what: to_svg(_drawn(what)).encode(),
        ".dot": lambda what: to_dot(_drawn(what)).encode(),
        ".png": lambda what: to_png(_drawn(what)),
        ".pdf": lambda what: to_pdf(_drawn(what)),
        ".tex": _tex,
        ".html": _html,
    }
)
DATA = tuple(WRITERS)

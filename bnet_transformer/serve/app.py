"""The web application of the live page: its shell, its script, and the answers to the requests of its tabs."""

from __future__ import annotations

import importlib.util
import json
import logging
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from bnet_transformer._core.cancellation import Cancelled
from bnet_transformer._core.memory import translate_memory_errors
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.labels import escape_invisible
from bnet_transformer.page.render import bundle_script, read_asset, render_style_sheet, to_json
from bnet_transformer.serve.answers import compute_lens, compute_patch, describe_page, render_file
from bnet_transformer.serve.jobs import JobQueue, ServerBusyError
from bnet_transformer.serve.page_state import Limits, PageState, parse_page_state
from bnet_transformer.serve.security import API_PREFIX, LOGGER, Guard
from bnet_transformer.serve.sentences import SentenceSource

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from bnet_transformer.bnet import BNet

MAX_TAB_LENGTH = 64
STATUS_CLIENT_CLOSED = 499


def check_serve_installed() -> None:
    """Raise an error that names the extra if a package of the server is not installed."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            hint = 'Run pip install "bnet-transformer[serve]"'
            raise BNetError(f"the live page requires the package {package}, which is not installed", hint=hint)


def create_app(
    models: Mapping[str, Callable[[], BNet]], *, token: str, hosts: Collection[str], limits: Limits | None = None
) -> Starlette:
    """Return the web application of the live page.

    Args:
        models: For each name of a model, a function that loads it. The first one is the default.
        token: The token that requests of the page need.
        hosts: The permitted values of the header `Host`, such as `127.0.0.1:8765`.
        limits: The limits of a request; None for the defaults.

    Returns:
        A Starlette application.

    Raises:
        BNetError: Starlette is not installed, or there is no model.
    """
    check_serve_installed()
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Route

    if not models:
        raise BNetError("models", expected="at least one model", actual="no model")
    limits = limits or Limits()
    for entry_point in ("serve", "boot"):  # read once, so that an update of the package does not mix two versions
        bundle_script(entry_point)
    api = _Api(SentenceSource(models, limits), limits)

    @asynccontextmanager
    async def run_lifespan(_: Starlette) -> AsyncIterator[None]:
        api.load_default()
        yield
        api.queue.close()

    routes = [
        Route("/", _serve_shell),
        Route("/serve.js", partial(_serve_text, "text/javascript", partial(bundle_script, "serve"))),
        Route("/serve.css", partial(_serve_text, "text/css", _render_style)),
        Route("/api/models", api.list_models),
        *(Route(f"/api/{kind}", partial(api.answer, kind), methods=["POST"]) for kind in api.answers),
    ]
    guard = Middleware(Guard, token=token, hosts=hosts, max_body=limits.body)
    app = Starlette(
        routes=routes,
        middleware=[guard],
        lifespan=run_lifespan,
        exception_handlers=dict.fromkeys((404, 405), _answer_unknown_route),
    )
    app.router.redirect_slashes = False
    return app


class _Api:
    """The answers to the requests below `/api/`."""

    def __init__(self, source: SentenceSource, limits: Limits) -> None:
        self.source, self.limits = source, limits
        self.queue = JobQueue(limits.threads, limits.jobs)
        self.answers: dict[str, Callable[[SentenceSource, str, Any], tuple[str, bytes]]] = {
            "page": _encode_page,
            "lens": lambda *arguments: ("application/json", to_json(compute_lens(*arguments)).encode()),
            "patch": lambda *arguments: ("application/json", to_json(compute_patch(*arguments)).encode()),
            "file": lambda *arguments: ("text/html; charset=utf-8", render_file(*arguments)),
        }

    def load_default(self) -> None:
        """Start to load the default model, so that the first page does not wait for it."""
        self.source.load(next(iter(self.source.models))).add_done_callback(_log_load_error)

    async def list_models(self, _: Request) -> Response:
        """The names of the models, which of them are loaded, and the limits that the page shows."""
        from starlette.responses import JSONResponse

        models, loaded = list(self.source.models), self.source.list_loaded()
        return JSONResponse({"models": models, "loaded": loaded, "max_words": self.limits.words})

    async def answer(self, kind: str, request: Request) -> Response:
        """Answer a request; each error is one line on the page and in the log."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response

        try:
            body = await request.body()
        except ClientDisconnect:
            return _error_response(STATUS_CLIENT_CLOSED, "the client disconnected", logging.DEBUG)
        try:
            document = _parse_body(body)
            tab, state = _get_tab(document), parse_page_state(document.get("state"), self.limits)
            compute = partial(self._compute, kind, tab, state)
            waits = partial(_wait_for_disconnect, request), partial(self.source.wait_for_net, state.model)
            media_type, content = await self.queue.run(tab, kind, compute, *waits)
            return Response(content, media_type=media_type)
        except Cancelled:
            return _error_response(STATUS_CLIENT_CLOSED, "the answer is no longer needed", logging.DEBUG)
        except ServerBusyError as error:
            return _error_response(503, str(error), logging.WARNING)
        except BNetError as error:
            return _error_response(422, str(error), logging.WARNING)
        except ModuleNotFoundError as error:
            return _error_response(422, f"{error.name} is not installed", logging.WARNING)
        except Exception as error:
            for line in "".join(traceback.format_exception(error)).splitlines():
                LOGGER.error("%s", escape_invisible(line))
            text = f"{type(error).__name__}: an error of the library; the log of the server has its traceback"
            return _error_response(500, text, logging.ERROR)

    @translate_memory_errors("live page")
    def _compute(self, kind: str, tab: str, state: PageState) -> tuple[str, bytes]:
        """The media type and the content of an answer."""
        return self.answers[kind](self.source, tab, state)


def _log_load_error(load: Future[BNet]) -> None:
    """Log the error of a model; the page of this model shows it as well."""
    error = load.exception()
    if error is not None:
        LOGGER.warning("%s", escape_invisible(f"{type(error).__name__}: {' '.join(str(error).split())}"))


def _encode_page(source: SentenceSource, tab: str, state: Any) -> tuple[str, bytes]:
    """The page as 4 bytes with the length of its description, the description as JSON, and its buffer."""
    description, buffer = describe_page(source, tab, state)
    text = to_json(description).encode()
    return "application/octet-stream", len(text).to_bytes(4, "little") + text + buffer


def _parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):  # invalid UTF-8 is a ValueError
        document = None
    if not isinstance(document, dict):
        raise BNetError("request", expected="an object in JSON", actual=body[:40])
    return document


def _get_tab(document: Mapping[str, Any]) -> str:
    """The name of the tab that sent a request."""
    tab = document.get("tab")
    if not isinstance(tab, str) or not 0 < len(tab) <= MAX_TAB_LENGTH:
        raise BNetError("tab", expected=f"a text of 1 to {MAX_TAB_LENGTH} characters", actual=tab)
    return tab


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client has disconnected; the body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error_response(status: int, text: str, level: int) -> Response:
    """An error in one line, which is also logged."""
    from starlette.responses import JSONResponse

    line = escape_invisible(" ".join(text.split()))
    LOGGER.log(level, "%s %s", status, line)
    return JSONResponse({"error": line}, status_code=status)


async def _answer_unknown_route(request: Request, error: Exception) -> Response:
    """Answer a request whose path or method the server does not have."""
    from starlette.exceptions import HTTPException

    assert isinstance(error, HTTPException)
    level = logging.WARNING if request.url.path.startswith(API_PREFIX) else logging.DEBUG
    text = f"{request.method} {request.url.path}: {error.detail}"
    response = _error_response(error.status_code, text, level)
    response.headers.update(error.headers or {})
    return response


async def _serve_shell(_: Request) -> Response:
    """The page without content; it contains no secret, so it needs no token."""
    from starlette.responses import HTMLResponse

    return HTMLResponse(read_asset("serve.html"))


async def _serve_text(media_type: str, render: Callable[[], str], _: Request) -> Response:
    """A script or a style sheet."""
    from starlette.responses import Response

    return Response(render(), media_type=media_type)


def _render_style() -> str:
    """The style sheet of the live page."""
    return f"{render_style_sheet()}\n{read_asset('serve.css')}"

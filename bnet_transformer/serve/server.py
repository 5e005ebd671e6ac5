"""The server of the live page: it listens on 127.0.0.1, checks and limits requests, and runs computations in threads.

The arguments of a process are visible to all users of a computer, so the browser is started with a file that only its
user can read, and that contains the address with the token.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import html
import importlib.util
import json
import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
import traceback
import webbrowser
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from uvicorn.protocols.http.h11_impl import H11Protocol

from bnet_transformer._core.checks import is_integer
from bnet_transformer._core.process import Cancelled, cancellable, translate_memory_errors
from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.figures.fonts import escape_invisible
from bnet_transformer.page.html import bundle_script, read_asset, render_style_sheet, to_json
from bnet_transformer.serve.answers import (
    Limits,
    PageState,
    SentenceSource,
    compute_lens,
    compute_patch,
    describe_page,
    parse_page_state,
    render_file,
)

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from bnet_transformer.bnet import BNet


# --------------------------------------------------------------------------------------------------------------------
# Computations in threads: those of one tab run one after the other, those of several tabs at the same time.
#
# A job is cancelled when its client disconnects, or when its tab sends a newer request of the same kind. A waiting job
# then never starts, and a running one stops at its next call of `check_cancelled`. A job that waits for a model needs
# no thread.


T = TypeVar("T")
Waiting = Callable[[], Coroutine[Any, Any, object]]


class ServerBusyError(BudgetError):
    """More requests than the server accepts at the same time."""


@dataclass(eq=False)
class Job:
    """One computation of a tab.

    Args:
        kind: What it computes; a newer job of the same kind replaces it.
    """

    kind: str
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)  # set in the event loop, and read by threads

    def cancel(self) -> None:
        """Stop the job at its next check."""
        self._stopped.set()

    def check(self) -> None:
        """Raise `Cancelled` if the job was cancelled."""
        if self._stopped.is_set():
            raise Cancelled

    async def wait(self, waiting: Coroutine[Any, Any, object]) -> None:
        """Wait for a coroutine, or raise `Cancelled` as soon as the job is cancelled."""
        tasks = [asyncio.ensure_future(waiting), asyncio.ensure_future(self._stopped.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
            self.check()
        finally:
            for task in tasks:
                task.cancel()


@dataclass(eq=False)
class Tab:
    """The jobs of a tab, which run one after the other."""

    jobs: list[Job] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class JobQueue:
    """Runs jobs in threads.

    Args:
        threads: The number of threads.
        max_jobs: The maximum number of jobs that run or wait.
    """

    def __init__(self, threads: int, max_jobs: int) -> None:
        self.max_jobs = max_jobs
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="bnet-serve")
        self._tabs: dict[str, Tab] = {}
        self._tasks: set[asyncio.Task[object]] = set()

    async def run(
        self,
        tab_id: str,
        kind: str,
        function: Callable[[], T],
        wait_for_disconnect: Waiting,
        wait_for_input: Waiting | None = None,
    ) -> T:
        """Run a function in a thread and return its result.

        Args:
            tab_id: The tab of the request.
            kind: What the function computes. A newer job of this kind in the tab replaces it; a job of the kind
                `page` replaces all jobs of the tab.
            function: The function.
            wait_for_disconnect: A coroutine function that returns when the client has disconnected.
            wait_for_input: A coroutine function that returns when the function can run; until then the job needs no
                thread. Its error is the error of the job.

        Returns:
            The result of the function.

        Raises:
            Cancelled: The client disconnected, or a newer job replaced this one.
            ServerBusyError: There are too many jobs.
        """
        if len(self._tasks) >= self.max_jobs:
            expected = f"at most {self.max_jobs} requests at the same time"
            raise ServerBusyError("the server is busy", expected=expected, actual=len(self._tasks) + 1)
        tab = self._tabs.setdefault(tab_id, Tab())
        for other in tab.jobs:
            if kind in (other.kind, "page"):
                other.cancel()
        job = Job(kind)
        tab.jobs.append(job)
        task = asyncio.ensure_future(self._run_in_turn(tab_id, tab, job, function, wait_for_input))
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        disconnected = asyncio.ensure_future(wait_for_disconnect())
        try:
            await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Cancelled
            return task.result()
        finally:
            if not task.done():
                job.cancel()
            disconnected.cancel()

    async def _run_in_turn(
        self, tab_id: str, tab: Tab, job: Job, function: Callable[[], T], wait_for_input: Waiting | None
    ) -> T:
        """Run a job after the earlier jobs of its tab; a cancelled job first leaves its thread."""

        def run_in_thread() -> T:
            with cancellable(job.check):
                job.check()
                return function()

        try:
            async with tab.lock:
                job.check()
                if wait_for_input is not None:
                    await job.wait(wait_for_input())
                return await asyncio.get_running_loop().run_in_executor(self._pool, run_in_thread)
        finally:
            tab.jobs.remove(job)
            if not tab.jobs:
                self._tabs.pop(tab_id, None)

    def _finish(self, task: asyncio.Task[object]) -> None:
        """Forget a task; its error is read here, because no one awaits the task of a cancelled job."""
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def close(self) -> None:
        """Cancel all jobs and end the threads."""
        for tab in self._tabs.values():
            for job in tab.jobs:
                job.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)


# --------------------------------------------------------------------------------------------------------------------
# The checks of every request before it is answered: host, origin, token and size; and the headers of every answer.
#
# The server has the rights of its user, so other web pages and other users of the computer must not reach it. A page of
# another site cannot read the token. The check of `Host` excludes DNS rebinding, and the check of `Origin` excludes
# requests that a page of another site sends. The token excludes other users of the computer.


LOGGER = logging.getLogger("bnet_transformer.serve")
API_PREFIX = "/api/"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class BodyTooLargeError(Exception):
    """A request with more bytes than the limit."""


class Guard:
    """An ASGI application that passes only permitted requests to another one.

    Args:
        app: The application.
        token: The token that requests below `/api/` need.
        hosts: The permitted values of `Host`, such as `127.0.0.1:8765`.
        max_body: The maximum number of bytes of a request.
    """

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str], max_body: int) -> None:
        self.app, self.token, self.hosts, self.max_body = app, token.encode(), frozenset(hosts), max_body
        self.too_large = f"the request has more than {max_body:,} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or reject it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        if scope["type"] != "http":  # there are no web sockets
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        headers = read_headers(scope)
        status, line = self._check(scope["path"], headers)
        if status:
            await send_error(send_with_headers, status, line)
            return
        try:
            await self.app(scope, self._limit(receive), send_with_headers)
        except BodyTooLargeError as error:
            await send_error(send_with_headers, 413, str(error))

    def _check(self, path: str, headers: dict[str, list[str]]) -> tuple[int, str]:
        """The status and the reason with which a request is rejected; 0 for a permitted request."""
        hosts, origins = headers.get("host", []), headers.get("origin", [])
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return 403, "the host of the request is not this server"
        if any(origin.lower() not in {f"http://{host}" for host in self.hosts} for origin in origins):
            return 403, "the request is from a page of another origin"
        if headers.get("sec-fetch-site", ["none"])[-1] not in ("none", "same-origin") and path.startswith(API_PREFIX):
            return 403, "the request is from a page of another site"
        values = headers.get("authorization", [])
        if path.startswith(API_PREFIX) and not self._has_token(values):
            state = "wrong" if any(value.partition(" ")[2].strip() for value in values) else "missing"
            return 401, f"the token is {state}: open the address that the server printed"
        lengths = headers.get("content-length", [])
        if any(not is_integer(length) or int(length) > self.max_body for length in lengths):
            return 413, self.too_large
        return 0, ""

    def _has_token(self, values: list[str]) -> bool:
        """Whether the header `Authorization` has the token, compared in constant time."""
        scheme, _, token = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.encode("utf-8", "replace"), self.token)

    def _limit(self, receive: Receive) -> Receive:
        """Receive a body, and stop when it is too large, also if it does not state its length."""
        count = 0

        async def receive_limited() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self.max_body:
                raise BodyTooLargeError(self.too_large)
            return message

        return receive_limited


def read_headers(scope: Scope) -> dict[str, list[str]]:
    """The values of each header of a request, by its name in lower case."""
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return headers


async def send_error(send: Send, status: int, line: str) -> None:
    """Answer with an error in one line, which is also logged."""
    LOGGER.warning("%s %s", status, escape_invisible(line))
    body = json.dumps({"error": line}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close")]  # the body of a rejected request is not read
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# --------------------------------------------------------------------------------------------------------------------
# The connections of the live page: their number and their time are limited, so that no client can occupy the server.
#
# uvicorn limits the time between two requests and the size of the head of a request. It limits neither the time in
# which a request arrives, nor the time in which an answer is read, nor the number of connections without a request.


class LimitedProtocol(H11Protocol):
    """One connection. It is aborted if a request does not arrive in time, and if its answer is not read.

    The time of a request is that of its head and its body together, so a client that sends a byte from time to time
    does not extend it. The computation of an answer has no limit here.

    Args:
        *arguments: Passed to `H11Protocol`.
        limits: The limits of the server.
        **options: Passed to `H11Protocol`.
    """

    def __init__(self, *arguments: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._request_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._abort(f"more than {self._limits.connections} connections", logging.WARNING)
            return
        transport.set_write_buffer_limits(0)  # report each answer that is not sent at once
        self._limit_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._request_timer, self._answer_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self._limit_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_answer()

    def resume_writing(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
        super().resume_writing()

    def shutdown(self) -> None:
        """Drop the connection: the server stops, and an answer that is being computed is no longer needed."""
        self.transport.abort()

    def _limit_request(self) -> None:
        """Start the time of a request that has not arrived completely; stop it when the request is complete."""
        is_arriving = self.cycle is None or self.cycle.more_body or self.cycle.response_complete
        if is_arriving and self._request_timer is None and not self.transport.is_closing():
            self._request_timer = self.loop.call_later(self._limits.transfer_seconds, self._end_request)
        elif not is_arriving and self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _end_request(self) -> None:
        """Abort a connection whose request did not arrive in time; browsers also open connections without a request."""
        has_part = bool(self.conn.trailing_data[0]) or (self.cycle is not None and self.cycle.more_body)
        level = logging.WARNING if has_part else logging.DEBUG
        self._abort(f"a request did not arrive within {self._limits.transfer_seconds:g} seconds", level)

    def _limit_answer(self, unsent: float = float("inf")) -> None:
        """Abort a connection on which the client has read nothing since the last call, `unsent` bytes being left."""
        size = self.transport.get_write_buffer_size()
        if size >= unsent:
            self._abort(f"an answer was not read for {self._limits.transfer_seconds:g} seconds", logging.WARNING)
        elif size:
            self._answer_timer = self.loop.call_later(self._limits.transfer_seconds, self._limit_answer, size)

    def _abort(self, reason: str, level: int) -> None:
        """Drop the connection without an answer."""
        LOGGER.log(level, "connection closed: %s", reason)
        self.transport.abort()


# --------------------------------------------------------------------------------------------------------------------
# The web application of the live page: its shell, its script, and the answers to the requests of its tabs.


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

    def log_load_error(load: Future[BNet]) -> None:  # the page of the model shows the error as well
        if error := load.exception():
            LOGGER.warning("%s", escape_invisible(f"{type(error).__name__}: {' '.join(str(error).split())}"))

    @asynccontextmanager
    async def run_lifespan(_: Starlette) -> AsyncIterator[None]:
        api.source.load(next(iter(models))).add_done_callback(log_load_error)  # the first page does not wait for it
        yield
        api.queue.close()

    routes = [
        Route("/", _serve_shell),
        Route("/serve.js", partial(_serve_text, "text/javascript", partial(bundle_script, "serve"))),
        Route(
            "/serve.css", partial(_serve_text, "text/css", lambda: f"{render_style_sheet()}\n{read_asset('serve.css')}")
        ),
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
            tab, document = _parse_body(body)
            state = parse_page_state(document.get("state"), self.limits)
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


def _encode_page(source: SentenceSource, tab: str, state: Any) -> tuple[str, bytes]:
    """The page as 4 bytes with the length of its description, the description as JSON, and its buffer."""
    description, buffer = describe_page(source, tab, state)
    text = to_json(description).encode()
    return "application/octet-stream", len(text).to_bytes(4, "little") + text + buffer


def _parse_body(body: bytes) -> tuple[str, dict[str, Any]]:
    """The name of the tab that sent a request, and the JSON object of the request."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):  # invalid UTF-8 is a ValueError
        document = None
    if not isinstance(document, dict):
        raise BNetError("request", expected="an object in JSON", actual=body[:40])
    tab = document.get("tab")
    if not isinstance(tab, str) or not 0 < len(tab) <= MAX_TAB_LENGTH:
        raise BNetError("tab", expected=f"a text of 1 to {MAX_TAB_LENGTH} characters", actual=tab)
    return tab, document


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


ADDRESS = "127.0.0.1"
REDIRECT = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}">
<title>bnet-transformer</title>
<a href="{url}">Open the live page</a>
"""


def open_socket(port: int) -> socket.socket:
    """Return a socket that listens on a port of 127.0.0.1; 0 selects a free port."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit this size. In a larger buffer the system would hide that a client reads slowly.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**17)
        listener.bind((ADDRESS, port))
        listener.listen()  # from now on a browser can connect
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        actual = "a port that is in use" if getattr(error, "errno", None) == errno.EADDRINUSE else f"{port}"
        hint = "Use --port 0 for a free port"
        raise BNetError("--port", expected="a free port up to 65535", actual=actual, hint=hint) from error
    return listener


def build_server(
    listener: socket.socket, models: Mapping[str, Callable[[], BNet]], limits: Limits
) -> tuple[uvicorn.Server, str]:
    """Return the server of a socket, and the address of its page with a new token.

    Args:
        listener: The socket on which the server listens.
        models: For each name of a model, a function that loads it.
        limits: The limits of a request.
    """
    import uvicorn

    port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
    app = create_app(models, token=token, hosts=[f"{name}:{port}" for name in (ADDRESS, "localhost")], limits=limits)
    config = uvicorn.Config(
        app,
        http=cast(Any, partial(LimitedProtocol, limits=limits)),  # uvicorn only calls it
        ws="none",
        timeout_graceful_shutdown=1,
        access_log=False,  # an address can have the token
        server_header=False,
        log_config=None,
        log_level="warning",
    )
    return uvicorn.Server(config), f"http://{ADDRESS}:{port}/?token={token}"


def run_server(
    models: Mapping[str, Callable[[], BNet]],
    *,
    port: int,
    limits: Limits,
    print_line: Callable[[str], None],
    open_browser: bool,
) -> None:
    """Run the server until Ctrl-C, or until the process receives SIGTERM or SIGHUP.

    Threads that load a model or compute an answer can still run afterwards, because a thread cannot be interrupted.

    Args:
        models: For each name of a model, a function that loads it.
        port: The port; 0 for a free one.
        limits: The limits of a request.
        print_line: Prints the address, which includes the token.
        open_browser: Whether to open the page in a browser.

    Raises:
        BNetError: A package is not installed, or the port is in use.
    """
    check_serve_installed()
    # Several tabs compute at the same time; threads of torch that wait for a processor would slow down all of them.
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    with open_socket(port) as listener:
        server, url = build_server(listener, models, limits)
        with _stop_at_signals(server), open_in_browser(url) if open_browser else nullcontext():
            print_line(f"{url}\nThe page works on this computer only. Stop the server with Ctrl-C.")
            server.run(sockets=[listener])


@contextmanager
def open_in_browser(url: str) -> Iterator[None]:
    """Open an address in the browser by a file that redirects to it, and that exists until the end of the block.

    Args:
        url: The address, which contains a token.
    """
    with tempfile.TemporaryDirectory(prefix="bnet-transformer-") as folder:  # its mode is 0700
        path = Path(folder, "open.html")
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(REDIRECT.format(url=html.escape(url)))
        threading.Thread(target=webbrowser.open, args=(path.as_uri(),), daemon=True).start()
        yield


@contextmanager
def _stop_at_signals(server: uvicorn.Server) -> Iterator[None]:
    """Stop the server at Ctrl-C and at signals that would end the process, so that it removes its files.

    uvicorn does the same while it runs; afterwards it raises the signal again, for the handler set here. A signal that
    the process was started to ignore stays ignored: `nohup` protects from SIGHUP in this way.
    """
    signals = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    signals = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, server.handle_exit) for number in signals}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

"""The server of the live page: it listens on 127.0.0.1 only, and stops at Ctrl-C.

The arguments of a process are visible to all users of a computer, so the browser is started with a file that only its
user can read, and that contains the address with the token.
"""

from __future__ import annotations

import errno
import html
import os
import secrets
import signal
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from bnet_transformer.errors import BNetError
from bnet_transformer.serve.app import check_serve_installed, create_app
from bnet_transformer.serve.page_state import Limits

if TYPE_CHECKING:
    import uvicorn

    from bnet_transformer.bnet import BNet

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

    from bnet_transformer.serve.connections import LimitedProtocol

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

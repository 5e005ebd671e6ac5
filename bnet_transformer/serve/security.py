"""The checks of every request before it is answered: host, origin, token and size; and the headers of every answer.

The server has the rights of its user, so other web pages and other users of the computer must not reach it. A page of
another site cannot read the token. The check of `Host` excludes DNS rebinding, and the check of `Origin` excludes
requests that a page of another site sends. The token excludes other users of the computer.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from bnet_transformer._core.checks import is_integer
from bnet_transformer.figures.labels import escape_invisible

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
            return 413, self._describe_limit()
        return 0, ""

    def _has_token(self, values: list[str]) -> bool:
        """Whether the header `Authorization` has the token, compared in constant time."""
        scheme, _, token = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.encode("utf-8", "replace"), self.token)

    def _describe_limit(self) -> str:
        """The error for a large body."""
        return f"the request has more than {self.max_body:,} bytes"

    def _limit(self, receive: Receive) -> Receive:
        """Receive a body, and stop when it is too large, also if it does not state its length."""
        count = 0

        async def receive_limited() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self.max_body:
                raise BodyTooLargeError(self._describe_limit())
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

"""The connections of the live page: their number and their time are limited, so that no client can occupy the server.

uvicorn limits the time between two requests and the size of the head of a request. It limits neither the time in which
a request arrives, nor the time in which an answer is read, nor the number of connections without a request.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from bnet_transformer.serve.page_state import Limits
from bnet_transformer.serve.security import LOGGER


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
        self._cancel_timers()
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

    def _cancel_timers(self) -> None:
        """Stop the times of this connection."""
        for timer in (self._request_timer, self._answer_timer):
            if timer is not None:
                timer.cancel()

"""Computations in threads: those of one tab run one after the other, those of several tabs at the same time.

A job is cancelled when its client disconnects, or when its tab sends a newer request of the same kind. A waiting job
then never starts, and a running one stops at its next call of `check_cancelled`. A job that waits for a model needs no
thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bnet_transformer._core.cancellation import Cancelled, cancellable
from bnet_transformer.errors import BudgetError

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
        try:
            async with tab.lock:
                job.check()
                if wait_for_input is not None:
                    await job.wait(wait_for_input())
                return await asyncio.get_running_loop().run_in_executor(self._pool, _run_job, job, function)
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


def _run_job(job: Job, function: Callable[[], T]) -> T:
    """Run a function in this thread, with the check of its job."""
    with cancellable(job.check):
        job.check()
        return function()

"""Common functions of all rows: interleaved timings, ratios with their spread, slopes, memory.

A row is a function that returns figures. A figure is the median of its runs; its spread is their minimum and maximum.
Compared jobs run in turn in one process (or in processes that alternate), so the state of the machine is the same for
both. `limits.py` computes the distance of a job from the limit of the machine, `report.py` the tables.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

ROOT = Path(__file__).resolve().parent.parent
MAX_RUNS = (
    "BNET_BENCHMARK_RUNS"  # environment variable, inherited by fresh processes: the maximum number of runs of a call
)
STATUS = Path("/proc/self/status")
LIMIT = "time over the limit"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """One measured number: the median of its runs, their minimum and maximum, and a target (at most) or None.

    A slope has its standard error instead of minimum and maximum.
    """

    subject: str
    value: float
    unit: str
    low: float
    high: float
    runs: int
    target: float | None = None
    error: float | None = None

    @property
    def verdict(self) -> str:
        """`met`, `not met`, or an empty string without a target."""
        if self.target is None:
            return ""
        return "met" if self.value <= self.target else "not met"


@dataclass(frozen=True)
class Row:
    """A named benchmark and the function that measures it; `page` is its page of the docs.

    `unlimited` states why its job has no limit in FLOPs and bytes. Every other row reports its distance from the limit.
    """

    name: str
    page: str
    measure: Callable[[], list[Figure]]
    unlimited: str = ""

    def measure_figures(self) -> list[Figure]:
        """Measure the row; its figures include the time over the limit, unless `unlimited` gives the reason why not."""
        result = self.measure()
        has_limit = any(item.subject.endswith(LIMIT) for item in result)
        assert not result or has_limit != bool(self.unlimited), f"{self.name}: a limit, or the reason why there is none"
        return result

    @property
    def title(self) -> str:
        """What is measured, and how: the docstring of the measuring function."""
        return " ".join((self.measure.__doc__ or self.name).split())


def figure(subject: str, values: float | Sequence[float], unit: str, target: float | None = None) -> Figure:
    """Return the figure of one run or of several."""
    runs = [values] if isinstance(values, int | float) else list(values)
    return Figure(subject, statistics.median(runs), unit, min(runs), max(runs), len(runs), target)


def time_calls(
    calls: Mapping[str, Callable[[], object]], runs: int, warm: int = 1, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of each call, `runs` times in turn, in reversed order every other time; `warm` runs do not
    count.

    The result of a call is dropped, and the garbage is collected, outside the timed span. `--runs` reduces the number
    of runs.
    """
    runs = limit_runs(runs)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(-warm, runs):
        for name in list(calls) if run % 2 == 0 else list(calls)[::-1]:
            gc.collect()
            start = clock()
            result = calls[name]()
            spent = clock() - start
            del result
            if run >= 0:
                seconds[name].append(spent)
    return seconds


def ratios(values: Sequence[float], peer_values: Sequence[float]) -> list[float]:
    """Return our times over the other times, run by run."""
    return [actual / other for actual, other in zip(values, peer_values, strict=True)]


def differences(values: Sequence[float], peer_values: Sequence[float]) -> list[float]:
    """Return our times minus the other times, run by run."""
    return [actual - other for actual, other in zip(values, peer_values, strict=True)]


def slope(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return the slope of log value over log size by least squares, and its standard error.

    >>> estimate, error = slope([8, 16, 32], [3, 12, 48])
    >>> round(estimate, 6), round(error, 6)
    (2.0, 0.0)
    """
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y, n = sum(x) / len(x), sum(y) / len(y), len(x)
    spread = sum((a - mean_x) ** 2 for a in x)
    estimate = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    residual = sum((b - mean_y - estimate * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return estimate, math.sqrt(residual / (n - 2) / spread) if n > 2 else math.nan


def growth_figure(subject: str, sizes: Sequence[float], values: Sequence[float], target: float | None = None) -> Figure:
    """Return the slope of values over sizes as a figure, with its standard error."""
    result, error = slope(sizes, values)
    return Figure(subject, result, "", result, result, len(sizes), target, error)


def limit_runs(count: int) -> int:
    """Return the number of runs, or the limit of `--runs` if that is smaller."""
    return min(count, int(os.environ.get(MAX_RUNS, count)))


def make_python_call(code: str) -> Callable[[], object]:
    """Return a call that runs `python -c code` as a separate process, and raises an error if it fails."""
    return lambda: subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def measure_python_peak(code: str) -> float:
    """Return the peak memory, in MB, of a process that runs this code."""
    print_status = "from pathlib import Path; print(Path('/proc/self/status').read_text())"
    if not STATUS.exists():
        return math.nan
    process = subprocess.run(
        [sys.executable, "-c", f"{code}\n{print_status}"], check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    return _read_status("VmHWM", process.stdout)


def children_cpu_time() -> float:
    """Return the processor time, in seconds, of the child processes of this process: a clock for `time_calls`."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def run_in_process(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Return the result of a function in a fresh process, which imports only the imports of the function's module."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args, **options).result()


def peak_memory(pid: int | None = None) -> float:
    """Return the maximum resident memory of this process so far, or of the process `pid`, in MB of 10**6 bytes.

    The source is `VmHWM` of /proc/self/status if it exists, otherwise `getrusage` (on Linux `ru_maxrss` includes the
    memory of the process that forked this one).
    """
    if pid is not None:
        return _read_status("VmHWM", Path(f"/proc/{pid}/status").read_text())
    if STATUS.exists():
        return _read_status("VmHWM")
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


def measure_peak(job: Callable[[], object]) -> float:
    """Return the peak memory in MB of a run of a job, minus the memory of the process before it.

    Free memory is first returned to the system, and the peak is reset. The result is NaN where the system cannot reset
    it (no /proc/self/clear_refs).
    """
    if not reset_peak():
        return math.nan
    before = _read_status("VmRSS")
    result = job()
    peak = _read_status("VmHWM")
    del result
    return max(0.0, peak - before)


def reset_peak() -> bool:
    """Return free memory to the system, and reset `peak_memory`; False where the system cannot reset it."""
    clear_refs = Path("/proc/self/clear_refs")
    if not clear_refs.exists():
        return False
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    clear_refs.write_text("5")
    return True


def _read_status(field: str, text: str | None = None) -> float:
    """Return a line of /proc/self/status, in MB of 10**6 bytes."""
    lines = (STATUS.read_text() if text is None else text).splitlines()
    line = next(line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6

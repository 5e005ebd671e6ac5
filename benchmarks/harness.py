"""What every row needs: interleaved timings, ratios with their spread, peak memory, the machine, the tables.

A row is a function that returns figures. A figure is the median of its runs; its spread is their least and
greatest. What is compared runs side by side in one process (or in processes that alternate), so that both
meet the same machine.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "numpy", "networkx")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """One measured number: the median of its runs, their least and greatest, and a target (at most) or none."""

    what: str
    value: float
    unit: str
    low: float
    high: float
    runs: int
    target: float | None = None

    @property
    def verdict(self) -> str:
        """`met`, `not met`, or nothing where there is no target."""
        if self.target is None:
            return ""
        return "met" if self.value <= self.target else "not met"


@dataclass(frozen=True)
class Row:
    """A named benchmark and the function that measures it; `page` is the page of the docs where it stands."""

    name: str
    page: str
    measure: Callable[[], list[Figure]]

    @property
    def title(self) -> str:
        """What is measured, and how: the docstring of the function that measures."""
        return " ".join((self.measure.__doc__ or self.name).split())


def figure(what: str, values: float | Sequence[float], unit: str, target: float | None = None) -> Figure:
    """The figure of one run or of several."""
    runs = [values] if isinstance(values, int | float) else list(values)
    return Figure(what, statistics.median(runs), unit, min(runs), max(runs), len(runs), target)


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    runs: int,
    warm: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call, `runs` times in turn, the order reversed every other time; `warm` runs do not count.

    What a call returns is dropped, and the garbage collected, outside the timed span.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(-warm, runs):
        for name in list(calls) if run % 2 == 0 else list(calls)[::-1]:
            gc.collect()
            start = clock()
            kept = calls[name]()
            spent = clock() - start
            del kept
            if run >= 0:
                seconds[name].append(spent)
    return seconds


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours over theirs, run by run."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours less theirs, run by run."""
    return [mine - other for mine, other in zip(ours, theirs, strict=True)]


def of_the_limit(job: Callable[[], object], seconds: Sequence[float]) -> list[Figure]:
    """How far a job is from the machine's limit: the FLOPs of its matrix products over what the machine itself does in
    large ones (2,048 x 2,048, float32, the same threads), measured now."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        job()
    a = torch.randn(2048, 2048)
    rate = 2 * 2048**3 / min(interleaved({"": lambda: a @ a}, runs=7)[""])
    done = counter.get_total_flops()
    return [
        figure("matrix products", done / 1e9, "GFLOP"),
        figure("this machine's rate", rate / 1e9, "GFLOP/s"),
        figure("share of that rate", [done / spent / rate for spent in seconds], ""),
    ]


def python(code: str) -> Callable[[], object]:
    """A call that runs `python -c code` as a process of its own, and fails if it fails."""
    return lambda: subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def processes_clock() -> float:
    """The processor time, in seconds, of the processes that this one has run: a clock for `interleaved`."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def fresh(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """The result of a function in a fresh process, which imports only what the function's module imports."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args, **options).result()


def peak_memory() -> float:
    """The greatest resident memory of this process so far, in MB of 10**6 bytes.

    From `VmHWM` of /proc/self/status where there is one (`ru_maxrss` counts on Linux what the process that
    forked this one held), else from `getrusage`.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


def conditions() -> dict[str, str]:
    """When and on what this was measured."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{_processor()}, {cores} cores, {platform.system()}",
        "software": f"Python {platform.python_version()}, {versions}",
        "torch threads": str(torch.get_num_threads()),
        "load": ", ".join(f"{load:.1f}" for load in os.getloadavg()) + " (1, 5, 15 minutes, at the end)",
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def to_markdown(title: str, command: str, found: Mapping[Row, Sequence[Figure]], where: Mapping[str, str]) -> str:
    """A page of the docs, which says by which command it was written."""
    lines = [f"# {title}", "", f"Written by `{command}`; not edited by hand.", ""]
    lines += [f"- {what}: {value}" for what, value in where.items()]
    lines += ["- figures: the median of the runs, then the least and the greatest; MB are 10^6 bytes"]
    for row, figures in found.items():
        lines += ["", f"## {row.name}", "", row.title, ""]
        lines += ["| what | median | least to greatest | runs | target | |", "|---|---|---|---|---|---|"]
        lines += ["| " + " | ".join(cells(each)) + " |" for each in figures]
    return "\n".join(lines) + "\n"


def to_text(found: Mapping[Row, Sequence[Figure]], where: Mapping[str, str]) -> str:
    """The same for a terminal."""
    lines = [f"{what}: {value}" for what, value in where.items()]
    for row, figures in found.items():
        table = [("", "median", "least to greatest", "runs", "target", ""), *map(cells, figures)]
        widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
        padded = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table)
        lines += ["", row.name, *padded]
    return "\n".join(lines)


def to_json(found: Mapping[Row, Sequence[Figure]], where: Mapping[str, str]) -> str:
    """The same for a program."""
    rows = {
        row.name: {
            "title": row.title,
            "figures": [{**asdict(each), "verdict": each.verdict} for each in figures],
        }
        for row, figures in found.items()
    }
    return json.dumps({"conditions": dict(where), "rows": rows}, indent=1) + "\n"


def cells(each: Figure) -> tuple[str, str, str, str, str, str]:
    """A figure as the cells of a table."""
    spread = "" if each.runs == 1 else f"{_said(each.low)} to {_said(each.high)}"
    target = "" if each.target is None else f"at most {_said(each.target)} {each.unit}".rstrip()
    return (
        each.what,
        f"{_said(each.value)} {each.unit}".rstrip(),
        spread,
        str(each.runs),
        target,
        each.verdict,
    )


def _said(value: float) -> str:
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

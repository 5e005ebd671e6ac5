"""Arguments and reports of the benchmark scripts: the machine and the tables, as text, as a page, as JSON."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import Figure, Row
from benchmarks.limits import list_machines

PACKAGES = ("torch", "numpy", "networkx")
NOT_ON_PAGES = ("matrix products", "bytes to move", "memory before", "memory after", "its memory")  # only in the JSON
BAR = r"\|"  # escaped bar in a cell of a Markdown table


def describe_conditions() -> dict[str, str]:
    """Return the date, the machine and the software of a measurement."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{_get_processor()}, {cores} cores, {platform.system()}",
        "software": f"Python {platform.python_version()}, {versions}",
        "torch threads": f"{torch.get_num_threads()}, unless a row states another number",
        "limits": "; ".join(map(str, list_machines())) or "not measured",
        "load": ", ".join(f"{load:.1f}" for load in os.getloadavg()) + " (1, 5, 15 minutes, at the end)",
    }


def _get_processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def parse_arguments(
    parser: argparse.ArgumentParser, known: Collection[str], rows: str, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Parse the arguments of a benchmark script: names of rows, and output files."""
    from bnet_transformer.errors import unknown_name_error

    parser.add_argument("rows", nargs="*", metavar="row", help=rows)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the figures as a page of the docs")
    args = parser.parse_args(argv)
    for name in args.rows:
        if name not in known:
            parser.error(str(unknown_name_error("row", name, known)))
    return args


def write_report(
    args: argparse.Namespace,
    title: str,
    command: str,
    result: Mapping[Row, Sequence[Figure]],
    conditions: Mapping[str, str],
) -> None:
    """Print the figures, and write them to the files of `--json` and `--markdown`."""
    print(to_text(result, conditions))
    for file, written in (
        (args.json, to_json(result, conditions)),
        (args.markdown, to_markdown(title, command, result, conditions)),
    ):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(written, encoding="utf-8")


def to_markdown(title: str, command: str, result: Mapping[Row, Sequence[Figure]], conditions: Mapping[str, str]) -> str:
    """Return a page of the docs, with the command that writes it."""
    measured = "; ".join(value if subject == "date" else f"{subject}: {value}" for subject, value in conditions.items())
    lines = [f"# {title}", "", f"Written by `{command}`; not edited by hand.", f"Measured on {measured}.", ""]
    lines += [
        "Columns: the median of the runs, then the least and the greatest; MB are 10^6 bytes; "
        "[definitions of limit, bytes and slope](index.md).",
        "",
    ]
    for row in result:
        lines.append(f"- **{row.name}**: {row.title}" + (f" No limit: {row.unlimited}." if row.unlimited else ""))
    lines += ["", "| row | what | median | least to greatest | runs | target | |", "|---|---|---|---|---|---|---|"]
    for row, figures in result.items():
        shown = [(row.name, *format_cells(item)) for item in figures if not item.subject.endswith(NOT_ON_PAGES)]
        lines += [f"| {' | '.join(cell.replace('|', BAR) for cell in item)} |" for item in shown]
    return "\n".join(lines) + "\n"


def to_text(result: Mapping[Row, Sequence[Figure]], conditions: Mapping[str, str]) -> str:
    """Return the same as text for a terminal."""
    lines = [f"{subject}: {value}" for subject, value in conditions.items()]
    for row, figures in result.items():
        table = [("", "median", "least to greatest", "runs", "target", ""), *map(format_cells, figures)]
        widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
        padded = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table)
        lines += ["", row.name, *([f"no limit: {row.unlimited}"] if row.unlimited else []), *padded]
    return "\n".join(lines)


def to_json(result: Mapping[Row, Sequence[Figure]], conditions: Mapping[str, str]) -> str:
    """Return the same as JSON."""
    rows = {
        row.name: {
            "title": row.title,
            "unlimited": row.unlimited or None,
            "figures": [_to_record(item) for item in figures],
        }
        for row, figures in result.items()
    }
    return json.dumps({"conditions": dict(conditions), "rows": rows}, indent=1) + "\n"


def _to_record(item: Figure) -> dict[str, object]:
    """Return a figure as a record of the JSON file."""
    fields = asdict(item)
    return {"what": fields.pop("subject"), **fields, "verdict": item.verdict}


def format_cells(item: Figure) -> tuple[str, str, str, str, str, str]:
    """Return a figure as the cells of a table."""
    spread = "" if item.runs == 1 else f"{_format_number(item.low)} to {_format_number(item.high)}"
    spread = spread if item.error is None else f"± {_format_number(item.error)}"
    target = "" if item.target is None else f"at most {_format_number(item.target)} {item.unit}".rstrip()
    return (
        item.subject,
        f"{_format_number(item.value)} {item.unit}".rstrip(),
        spread,
        str(item.runs),
        target,
        item.verdict,
    )


def _format_number(value: float) -> str:
    """Return a number with three significant digits, or as an integer."""
    if math.isfinite(value) and float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

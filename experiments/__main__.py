"""`python -m experiments [name ...] [--threads N] [--folder FOLDER]`: train, print and store the results.

The folder (docs/experiments) has a page for each group of experiments, with its figures, and the results as JSON. An
experiment that is run again replaces its last result.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments import heads, indirect_objects, rigid_body, series, vanilla
from experiments.result import Result

# Each group of experiments: the name of its page, its title, its experiments.
FAMILIES: Mapping[str, tuple[str, Mapping[str, Callable[[], Result]]]] = {
    "vanilla": ("the vanilla transformer", vanilla.EXPERIMENTS),
    "heads": ("which heads matter", heads.EXPERIMENTS),
    "indirect_objects": ("indirect objects in SmolLM2", indirect_objects.EXPERIMENTS),
    "rigid_body": ("the rigid body", rigid_body.EXPERIMENTS),
    "series": ("a seasonal series", series.EXPERIMENTS),
}
PAGES = {name: page for page, (_, experiments) in FAMILIES.items() for name in experiments}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named experiments, or all."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(PAGES))
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--folder", type=Path, default=Path("docs/experiments"), help="folder of the results")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in PAGES:
            parser.error(f"name: expected one of {', '.join(PAGES)}; got {name}")
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    for name in args.names or PAGES:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        result = _save_figures(args.folder, FAMILIES[PAGES[name]][1][name](), args.threads)
        print(_format_section(result), flush=True)
        _write_page(args.folder, PAGES[name], name, result)
    return 0


def _save_figures(folder: Path, result: Result, threads: int) -> dict[str, Any]:
    """Save the figures of a result, and return its entry for the JSON file."""
    entry: dict[str, Any] = {"name": result.name, "summary": result.summary, "head": result.head, "rows": result.rows}
    entry |= {} if result.shown is None else {"shown": result.shown}
    for k, (shown, figure) in enumerate(result.figures.items()):
        path = folder / f"{result.name.replace(' ', '_')}_{k + 1}.png"
        figure.savefig(path, dpi=144)
        entry.setdefault("figures", []).append([shown, path.name])
    return entry | {"where": _describe_environment(threads)}


def _write_page(folder: Path, page: str, name: str, entry: Mapping[str, Any]) -> None:
    """Replace the entry of an experiment in the JSON file, and write its page."""
    title, experiments = FAMILIES[page]
    retained = folder / f"{page}.json"
    results = json.loads(retained.read_text(encoding="utf-8")) if retained.exists() else {}
    results = {item: entry if item == name else results.get(item) for item in experiments}
    results = {item: result for item, result in results.items() if result is not None}
    retained.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    head = f"# Experiments: {title}\n\nWritten by `python -m experiments`; not edited by hand.\n\n"
    (folder / f"{page}.md").write_text(head + "\n".join(map(_format_section, results.values())), encoding="utf-8")


def _describe_environment(threads: int) -> str:
    """Return the date, the system, the versions, the number of threads, and the GPU if there is one."""
    used = f"{threads} thread{'s' if threads > 1 else ''}"
    used += f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    today = datetime.date.today()
    return f"{today}, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}, {used}"


def _format_section(result: Mapping[str, Any]) -> str:
    """Return the section of an experiment in its page."""
    selected = result.get("shown") or range(len(result["rows"]))
    rows = [result["head"], ["---"] * len(result["head"]), *(result["rows"][k] for k in selected)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    figures = "".join(f"![{shown}]({path})\n\n" for shown, path in result.get("figures", ()))
    part = f" {len(selected)} of {len(result['rows'])} rows; the JSON file has all rows." if "shown" in result else ""
    return f"## {result['name']}\n\n{result['summary']}{part}\n\n{table}\n\n{figures}{result['where']}\n"


if __name__ == "__main__":
    sys.exit(main())

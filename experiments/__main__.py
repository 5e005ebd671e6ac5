"""`python -m experiments [name ...] [--threads N] [--folder FOLDER]`: trains, prints, and keeps what came of it.

The folder (docs/experiments) has the results as JSON, and a page of all that are there; an experiment that is run
again takes the place of its last result.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.vanilla import EXPERIMENTS, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(EXPERIMENTS))
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--folder", type=Path, default=Path("docs/experiments"), help="where the results are kept")
    asked = parser.parse_args(arguments)
    for name in asked.names:
        if name not in EXPERIMENTS:
            parser.error(f"name: expected one of {', '.join(EXPERIMENTS)}; got {name}")
    asked.folder.mkdir(parents=True, exist_ok=True)
    for name in asked.names or EXPERIMENTS:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        found = dataclasses.asdict(run(name, asked.threads)) | {"where": _where(asked.threads)}
        print(_section(found), flush=True)
        _keep(asked.folder, name, found)
    return 0


def _keep(folder: Path, name: str, found: Mapping[str, Any]) -> None:
    """Put a result in the place of the last one, and write the page anew."""
    kept = folder / "vanilla.json"
    results = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    results = {each: found if each == name else results.get(each) for each in EXPERIMENTS}
    results = {each: result for each, result in results.items() if result is not None}
    kept.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    head = "# Experiments: the vanilla transformer\n\nWritten by `python -m experiments`; not edited by hand.\n\n"
    (folder / "vanilla.md").write_text(head + "\n".join(map(_section, results.values())), encoding="utf-8")


def _where(threads: int) -> str:
    used = f"{threads} thread{'s' if threads > 1 else ''}"
    today = datetime.date.today()
    return f"{today}, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}, {used}"


def _section(result: Mapping[str, Any]) -> str:
    rows = [result["head"], ["---"] * len(result["head"]), *result["rows"]]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"## {result['name']}\n\n{result['told']}\n\n{table}\n\n{result['where']}\n"


if __name__ == "__main__":
    sys.exit(main())

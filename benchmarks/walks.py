"""The length of a call's path through the package: calls, functions, files and switches between files.

    python -m benchmarks.walks [--top 10] [--against FOLDER] [--page] [--check] [--write-limits]

A developer who follows a call by hand takes the same path, so a shorter path is easier to read. The script counts calls
of Python functions that the package defines, as `sys.setprofile` reports them. Bodies of comprehensions and generator
expressions do not count (Python 3.12 inlines some of them), and neither does a generator that resumes after a yield. A
*switch* is a call in another file than the call before it. Each call runs once on another net first, so imports and the
start of torch do not count. It is counted on a new net and a new sentence, so the compilation of the net counts. All
sentences have three words.

With `--against` the script counts another checkout, given by the folder that contains its `bnet_transformer`. `--check`
compares the calls, functions and files with the limits of `ratchet.json`.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import bnet_transformer as bt
from bnet_transformer.tpm import Normal

PACKAGE = Path(bt.__file__).resolve().parent
PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "walks.md"
SENTENCES = "the cat sat", "the dog sat"
COLUMNS = "calls", "functions", "files", "switches"
STEPS = 4  # steps of the fit

Figures = dict[str, dict[str, int]]


def mixture(seed: int) -> Any:
    """Return a net with a choice `c` of two heads, and an observed `y` for each word."""
    return bt.bayesuvius(dim=4, heads=2, key_dim=2, observe=Normal(0.5), seed=seed)


def value(seed: int) -> Callable[[], object]:
    """`s["x_1_0"]`"""
    s = mixture(seed).sentence(SENTENCES[0])
    return lambda: s["x_1_0"]


def posterior(seed: int) -> Callable[[], object]:
    """`s.posterior("c", evidence={"y_0": ...})`"""
    s, y = mixture(seed).sentence(SENTENCES[0]), torch.zeros(4)
    return lambda: s.posterior("c", evidence={"y_0": y})


def sweep(seed: int) -> Callable[[], object]:
    """`bt.sweep(clean, corrupt, at="x", metric={"y_2": ("cat", "dog")})`"""
    net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "a", "cat", "dog", "sat"], seed=seed)
    clean, corrupt = map(net.sentence, SENTENCES)
    return lambda: bt.sweep(clean, corrupt, at="x", metric={"y_2": ("cat", "dog")}, progress=False)


def em_fit(seed: int) -> Callable[[], object]:
    """`bt.fit(net, (x, y))` by EM, 4 steps"""
    net, generator = mixture(seed), torch.Generator().manual_seed(0)
    x, y = (torch.randn(20, 3, 4, generator=generator) for _ in range(2))
    if "steps" in inspect.signature(bt.fit).parameters:
        return lambda: bt.fit(net, (x, y), method="em", steps=STEPS, progress=False)  # version 0.1
    return lambda: bt.fit(net, (x, y), method=bt.EM(steps=STEPS), progress=False)


def draw(seed: int) -> Callable[[], object]:
    """`s.draw("figure.svg")`"""
    s, folder = mixture(seed).sentence(SENTENCES[0]), tempfile.mkdtemp()
    return lambda: s.draw(f"{folder}/figure.svg")


WALKS = {"value": value, "posterior": posterior, "sweep": sweep, "em fit": em_fit, "draw": draw}


def trace_call(call: Callable[[], object]) -> tuple[dict[str, int], Counter[str]]:
    """Run a call and count its path.

    Args:
        call: The function, which is called once.

    Returns:
        The four numbers by their column, and the number of calls of each function, by file and qualified name.
    """
    calls: Counter[CodeType] = Counter()
    switches, last = 0, ""

    def on_event(frame: FrameType, event: str, arg: object) -> None:
        nonlocal switches, last
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{PACKAGE}{os.sep}") or _is_part_of_a_call(frame):
            return
        calls[code] += 1
        if code.co_filename != last:
            switches, last = switches + 1, code.co_filename

    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(None)
    names = Counter({f"{Path(c.co_filename).relative_to(PACKAGE)} {c.co_qualname}": n for c, n in calls.items()})
    counts = calls.total(), len(calls), len({code.co_filename for code in calls}), switches
    return dict(zip(COLUMNS, counts, strict=True)), names


def _is_part_of_a_call(frame: FrameType) -> bool:
    """Return True for the body of a comprehension, and for a generator that resumes after a yield."""
    code = frame.f_code
    if code.co_name.startswith("<") and code.co_name != "<lambda>":
        return True
    # A new frame is at its first `RESUME`, whose argument is 0; a resumed frame is at another.
    return bool(code.co_flags & inspect.CO_GENERATOR) and code.co_code[frame.f_lasti + 1] != 0


def measure_walks(top: int = 0) -> Figures:
    """Count every path; print the functions with the most calls, if `top` is more than 0."""
    figures = {}
    for name, prepared in WALKS.items():
        prepared(0)()
        figures[name], calls = trace_call(prepared(1))
        if top:
            print(
                f"{name}: {figures[name]}", *(f"{n:8,}  {subject}" for subject, n in calls.most_common(top)), sep="\n"
            )
    return figures


def measure_walks_in(folder: Path) -> Figures:
    """Count every path with the package of another checkout, in a separate process."""
    environment = {**os.environ, "PYTHONPATH": str(folder.resolve())}
    command = [sys.executable, str(Path(__file__).resolve()), "--json"]
    process = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True, cwd=folder)
    figures = json.loads(process.stdout)
    if figures["package"] != str(folder.resolve() / "bnet_transformer"):
        raise SystemExit(f"--against: expected a folder that holds bnet_transformer; got {folder}")
    return dict(figures["walks"])


def format_table(current: Figures, before: Figures | None) -> list[str]:
    """Return the figures as a table in Markdown, with earlier figures and the ratio if there are any."""
    rows = [["walk", *COLUMNS]]
    rows += [
        [name, *(_format_cell(counts[c], before[name][c] if before else None) for c in COLUMNS)]
        for name, counts in current.items()
    ]
    rows.insert(1, ["---"] * len(rows[0]))
    return ["| " + " | ".join(row) + " |" for row in rows]


def _format_cell(current: int, before: int | None) -> str:
    """Return a number, with the earlier number and the ratio if there is one."""
    return f"{current:,}" if before is None else f"{before:,} to {current:,} ({current / before:.2f})"


def format_page(current: Figures, before: Figures | None, commit: str) -> str:
    """Return the page of the docs."""
    lines = [f"# {(__doc__ or '').splitlines()[0].rstrip('.')}", ""]
    lines += ["Written by `python -m benchmarks.walks --page` (with `--against FOLDER` for the earlier figures).", ""]
    lines += [f"- date: {datetime.date.today().isoformat()}"]
    lines += [f"- software: Python {platform.python_version()}, torch {torch.__version__}"]
    lines += [f"- cells: before (commit {commit}), now, and now over before"] if commit else []
    about = (__doc__ or "").split("\n\n")[2]
    lines += ["", *about.splitlines(), "", *format_table(current, before), "", "| walk | call |", "|---|---|"]
    lines += [f"| {name} | {' '.join((prepared.__doc__ or '').split())} |" for name, prepared in WALKS.items()]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Count the paths and print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walks", description=__doc__)
    parser.add_argument("--top", type=int, default=0, metavar="N", help="print the N functions with the most calls")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="also count another checkout")
    parser.add_argument("--page", action="store_true", help="write docs/benchmarks/walks.md")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--check", action="store_true", help="fail if a figure is over its limit")
    parser.add_argument("--write-limits", action="store_true", help="lower the limits to the figures, then check")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    current = measure_walks(args.top)
    if args.check or args.write_limits:
        from benchmarks.ratchet import check_figures  # not at the top, because another checkout may not have it

        figures = {f"{name}, {column}": n[column] for name, n in current.items() for column in COLUMNS[:3]}
        return check_figures("walks", figures, args.write_limits)
    if args.json:
        print(json.dumps({"package": str(PACKAGE), "walks": current}))
        return 0
    before = None if args.against is None else measure_walks_in(args.against)
    print(*format_table(current, before), sep="\n")
    if args.page:
        commit = ""
        if args.against is not None:
            command = ["git", "-C", str(args.against), "log", "-1", "--format=%h of %cs"]
            commit = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        PAGE.write_text(format_page(current, before, commit), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

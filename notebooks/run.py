"""Execute the notebooks, each in a fresh kernel, from top to bottom, and keep what they show.

    python notebooks/run.py                     all of them, in place
    python notebooks/run.py 1_the_bnet          those whose names begin so (or paths)
    python notebooks/run.py --check             execute, and write nothing: for CI

A kernel computes with one thread, unless OMP_NUM_THREADS says otherwise: so last digits hang less on the machine.
What is kept is stable: no times, no random ids, streams in one piece; so a second run of the same source on the same
machine changes nothing. A cell that fails, prints to stderr, or prints an address or a path of this machine is a fault,
and so are a notebook of more than `SIZE` bytes and one that takes longer than `WALL` seconds times the slack. `--check`
also finds fault with a committed notebook without outputs; text that differs from what is committed it tells, but that
is no fault, for times and last digits differ between machines.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

try:
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from nbformat import NotebookNode
    from traitlets.config import Config
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is not installed: run `make notebooks`, or pip install -e '.[dev,minilm]'")

HOME = Path(__file__).resolve().parent
SIZE = 1_000_000  # bytes
WALL = 60.0  # seconds on two quiet cores
SLACK = 3.0  # a busy machine is slower
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
OF_THIS_MACHINE = re.compile(r"\bat 0x[0-9a-f]{6,}|(?<![\w./:])/(?:home|root|tmp|work|Users|usr|opt)/\S+")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Fault(Exception):
    """What is wrong with a notebook, in words."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; the exit code is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="Execute the notebooks, each in a fresh kernel.")
    parser.add_argument("names", nargs="*", help="paths, or how their names begin; all by default")
    parser.add_argument("--check", action="store_true", help="write nothing; tell what prints otherwise than committed")
    parser.add_argument("--slack", type=float, default=SLACK, help=f"times {WALL:.0f} s a notebook may take")
    asked = parser.parse_args(arguments)
    wrong = 0
    for path in paths(asked.names):
        start = time.perf_counter()
        try:
            told = run(path, check=asked.check, limit=WALL * asked.slack)
        except Fault as fault:
            wrong += 1
            told = f"FAILED\n{fault}"
        seconds = time.perf_counter() - start
        print(f"{path.stem:48} {seconds:5.0f} s {path.stat().st_size / 1000:6.0f} kB  {told}", flush=True)
    return 1 if wrong else 0


def paths(names: Sequence[str]) -> list[Path]:
    """The notebooks that names ask for, in order."""
    if not names:
        return sorted(HOME.glob("*.ipynb"))
    found = []
    for name in names:
        there = sorted(HOME.glob("*.ipynb"))
        meant = [Path(name)] if Path(name).is_file() else [path for path in there if path.stem.startswith(name)]
        if not meant:
            raise SystemExit(f"no notebook begins with {name!r}; there are {', '.join(path.stem for path in there)}")
        found += meant
    return found


def run(path: Path, *, check: bool, limit: float) -> str:
    """Execute one notebook, in place or to compare, and tell how it went."""
    kept = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    made = execute(kept, path.resolve().parent, limit)
    seconds = time.perf_counter() - start
    faults = list(faults_of(made))
    size = len(text(made).encode())
    if size > SIZE:
        faults.append(f"  {size:,} bytes, of at most {SIZE:,}: smaller figures, or fewer")
    if seconds > limit:
        faults.append(f"  {seconds:.0f} s, of at most {WALL:.0f} s times a slack of {limit / WALL:g}")
    if check and not all(shown(kept)):
        faults.append("  committed without outputs: make notebooks, then commit what it wrote")
    if faults:
        raise Fault("\n".join(faults))
    slow = f"; over {WALL:.0f} s" if seconds > WALL else ""
    if check:
        return ("as committed" if not (other := differences(kept, made)) else "\n".join(("runs", *other))) + slow
    if (whole := text(made)) == path.read_text(encoding="utf-8"):
        return "nothing changed" + slow
    path.write_text(whole, encoding="utf-8", newline="\n")
    return "written" + slow


def execute(notebook: NotebookNode, folder: Path, limit: float) -> NotebookNode:
    """The notebook with its outputs made anew, in a fresh kernel that knows no settings of this user."""
    fresh = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory() as home:
        sockets = {"transport": "ipc", "ip": f"{home}/kernel"} if os.name == "posix" else {}
        here = {"IPYTHONDIR": home, "HF_HUB_OFFLINE": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        client = NotebookClient(
            fresh,
            config=Config({"KernelManager": sockets}),
            timeout=int(limit) + 1,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
        )
        try:
            client.execute(env={"OMP_NUM_THREADS": "1"} | os.environ | here)
        except CellExecutionError as error:
            raise Fault(COLOUR.sub("", str(error)).rstrip()) from None
        except CellTimeoutError:
            raise Fault(f"  a cell of more than {limit:.0f} s") from None
        except DeadKernelError:
            raise Fault("  the kernel died") from None
    return tidy(fresh)


def tidy(notebook: NotebookNode) -> NotebookNode:
    """The notebook without what changes from run to run: a cell's id is told by its source, streams are whole."""
    clean = nbformat.v4.new_notebook(metadata=METADATA)
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        mark = hashlib.sha256(cell.source.encode()).hexdigest()[:12]
        seen[mark] = seen.get(mark, 0) + 1
        cell.id = mark if seen[mark] == 1 else f"{mark}-{seen[mark]}"
        cell.metadata = NotebookNode({name: cell.metadata[name] for name in ("tags",) if name in cell.metadata})
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
        clean.cells.append(cell)
    clean.nbformat_minor = 5
    return clean


def joined(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """Outputs, with pieces of one stream that follow each other as one."""
    whole: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and whole and whole[-1].get("name") == output.name:
            whole[-1].text += output.text
        else:
            whole.append(output)
    return whole


def text(notebook: NotebookNode) -> str:
    """The file."""
    return str(nbformat.writes(notebook)).rstrip("\n") + "\n"


def faults_of(notebook: NotebookNode) -> Iterator[str]:
    """What a run left that must not be kept: a line for each."""
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            printed = words_of(output)
            if output.get("name") == "stderr":
                yield f"  cell {number} prints to stderr: {printed.strip()[:200]!r}"
            elif found := OF_THIS_MACHINE.search(printed):
                yield f"  cell {number} prints what is of this machine alone: {found.group()!r}"


def words_of(output: NotebookNode) -> str:
    """What an output says in plain text."""
    if output.output_type == "stream":
        return str(output.text)
    return str(output.get("data", {}).get("text/plain", ""))


def shown(notebook: NotebookNode) -> Iterator[bool]:
    """Whether the code was run, cell by cell, and whether any of it shows something."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    yield any(cell.outputs for cell in code)
    yield from (cell.execution_count is not None for cell in code)


def differences(kept: NotebookNode, made: NotebookNode) -> list[str]:
    """Cells that print another text than is committed, with the first line that differs."""
    told = []
    for number, (before, after) in enumerate(zip(kept.cells, made.cells, strict=True)):
        lines = [
            [line for output in cell.get("outputs", ()) for line in words_of(output).splitlines()]
            for cell in (before, after)
        ]
        if lines[0] != lines[1]:
            rows = zip(lines[0] + [""] * len(lines[1]), lines[1] + [""] * len(lines[0]), strict=True)
            was, now = next(pair for pair in rows if pair[0] != pair[1])
            told.append(f"  cell {number} prints {now.strip()[:90]!r} where {was.strip()[:90]!r} is committed")
    return told


if __name__ == "__main__":
    sys.exit(main())

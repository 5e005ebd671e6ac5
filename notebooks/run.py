"""Execute the notebooks, each in a fresh kernel, from top to bottom, and save their outputs.

    python notebooks/run.py                     all notebooks, in place
    python notebooks/run.py 1_the_bnet          notebooks whose names start with this (or paths)
    python notebooks/run.py --check             execute and write nothing, for CI

As many notebooks as there are cores run at a time, and they are reported in their order. A kernel uses one thread,
unless OMP_NUM_THREADS is set, so that last digits depend less on the machine. The saved
outputs are stable: they have no times, no random ids and no state of widgets, and streams are merged. A second run of
the same source on the same machine changes nothing. A fault is a cell that fails, prints to stderr, or prints an
address or a path of this machine; a notebook of more than `SIZE` bytes; and one that takes longer than `WALL` seconds
times the slack. With `--check` a committed notebook without outputs is a fault too. Text that differs from the
committed text is reported, but is not a fault, because times and last digits differ between machines.
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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
LOCAL_PATH = re.compile(r"\bat 0x[0-9a-f]{6,}|(?<![\w./:])/(?:home|root|tmp|work|Users|usr|opt)/\S+")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class NotebookError(Exception):
    """A notebook fails; the message lists its faults."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the notebooks of the command line; the exit code is 1 if one fails."""
    parser = argparse.ArgumentParser(description="Execute the notebooks, each in a fresh kernel.")
    parser.add_argument("names", nargs="*", help="paths, or the start of their names; all by default")
    parser.add_argument("--check", action="store_true", help="write nothing; report outputs that differ")
    parser.add_argument("--slack", type=float, default=SLACK, help=f"the time limit, in units of {WALL:.0f} s")
    args = parser.parse_args(argv)
    run = partial(try_notebook, check=args.check, limit=WALL * args.slack)
    num_failed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for passed, line in pool.map(run, find_notebooks(args.names)):
            num_failed += not passed
            print(line, flush=True)
    return 1 if num_failed else 0


def find_notebooks(names: Sequence[str]) -> list[Path]:
    """The notebooks of these names, in order."""
    if not names:
        return sorted(HOME.glob("*.ipynb"))
    result = []
    for name in names:
        available = sorted(HOME.glob("*.ipynb"))
        matches = [Path(name)] if Path(name).is_file() else [path for path in available if path.stem.startswith(name)]
        if not matches:
            raise SystemExit(
                f"no notebook starts with {name!r}; the notebooks are {', '.join(path.stem for path in available)}"
            )
        result += matches
    return result


def try_notebook(path: Path, *, check: bool, limit: float) -> tuple[bool, str]:
    """Whether a notebook has no fault, and its line of the report."""
    start = time.perf_counter()
    try:
        passed, message = True, run_notebook(path, check=check, limit=limit)
    except NotebookError as fault:
        passed, message = False, f"FAILED\n{fault}"
    seconds = time.perf_counter() - start
    return passed, f"{path.stem:48} {seconds:5.0f} s {path.stat().st_size / 1000:6.0f} kB  {message}"


def run_notebook(path: Path, *, check: bool, limit: float) -> str:
    """Execute a notebook, in place or for comparison, and return the message of its line."""
    committed = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    executed = execute(committed, path.resolve().parent, limit)
    seconds = time.perf_counter() - start
    faults = list(find_faults(executed))
    size = len(serialize(executed).encode())
    if size > SIZE:
        faults.append(f"  {size:,} bytes, of at most {SIZE:,}: smaller figures, or fewer")
    if seconds > limit:
        faults.append(f"  {seconds:.0f} s, of at most {WALL:.0f} s times a slack of {limit / WALL:g}")
    if check and not all(iter_executed(committed)):
        faults.append("  committed without outputs: run make notebooks and commit the result")
    if faults:
        raise NotebookError("\n".join(faults))
    slow = f"; over {WALL:.0f} s" if seconds > WALL else ""
    if check:
        return (
            "as committed" if not (changes := find_differences(committed, executed)) else "\n".join(("runs", *changes))
        ) + slow
    if (text := serialize(executed)) == path.read_text(encoding="utf-8"):
        return "nothing changed" + slow
    path.write_text(text, encoding="utf-8", newline="\n")
    return "written" + slow


def execute(notebook: NotebookNode, folder: Path, limit: float) -> NotebookNode:
    """The notebook with new outputs, from a fresh kernel without the settings of this user."""
    fresh = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory() as home:
        sockets = {"transport": "ipc", "ip": f"{home}/kernel"} if os.name == "posix" else {}
        settings = {"IPYTHONDIR": home, "HF_HUB_OFFLINE": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        client = NotebookClient(
            fresh,
            config=Config({"KernelManager": sockets}),
            timeout=int(limit) + 1,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
        )
        try:
            client.execute(env={"OMP_NUM_THREADS": "1"} | os.environ | settings)
        except CellExecutionError as error:
            raise NotebookError(COLOUR.sub("", str(error)).rstrip()) from None
        except CellTimeoutError:
            raise NotebookError(f"  a cell of more than {limit:.0f} s") from None
        except DeadKernelError:
            raise NotebookError("  the kernel died") from None
    return normalize(fresh)


def normalize(notebook: NotebookNode) -> NotebookNode:
    """The notebook without parts that change from run to run: the id of a cell is the hash of its source."""
    clean = nbformat.v4.new_notebook(metadata=METADATA)
    counts: dict[str, int] = {}
    for cell in notebook.cells:
        cell_id = hashlib.sha256(cell.source.encode()).hexdigest()[:12]
        counts[cell_id] = counts.get(cell_id, 0) + 1
        cell.id = cell_id if counts[cell_id] == 1 else f"{cell_id}-{counts[cell_id]}"
        cell.metadata = NotebookNode({name: cell.metadata[name] for name in ("tags",) if name in cell.metadata})
        if cell.cell_type == "code":
            cell.outputs = merge_streams(cell.outputs)
            for output in cell.outputs:  # a widget needs a kernel; its figure does not
                output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
        clean.cells.append(cell)
    clean.nbformat_minor = 5
    return clean


def merge_streams(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """Outputs, with consecutive pieces of one stream merged."""
    merged: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and merged and merged[-1].get("name") == output.name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def serialize(notebook: NotebookNode) -> str:
    """The text of the file."""
    return str(nbformat.writes(notebook)).rstrip("\n") + "\n"


def find_faults(notebook: NotebookNode) -> Iterator[str]:
    """A line for each output that must not be committed."""
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            printed = get_text(output)
            if output.get("name") == "stderr":
                yield f"  cell {number} prints to stderr: {printed.strip()[:200]!r}"
            elif match := LOCAL_PATH.search(printed):
                yield f"  cell {number} prints an address or path of this machine: {match.group()!r}"


def get_text(output: NotebookNode) -> str:
    """The plain text of an output."""
    if output.output_type == "stream":
        return str(output.text)
    return str(output.get("data", {}).get("text/plain", ""))


def iter_executed(notebook: NotebookNode) -> Iterator[bool]:
    """Whether any cell has an output, then for each cell whether it was executed."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    yield any(cell.outputs for cell in code)
    yield from (cell.execution_count is not None for cell in code)


def find_differences(committed: NotebookNode, executed: NotebookNode) -> list[str]:
    """Cells whose text differs from the committed text, with the first line that differs."""
    result = []
    for number, (before, after) in enumerate(zip(committed.cells, executed.cells, strict=True)):
        lines = [
            [line for output in cell.get("outputs", ()) for line in get_text(output).splitlines()]
            for cell in (before, after)
        ]
        if lines[0] != lines[1]:
            rows = zip(lines[0] + [""] * len(lines[1]), lines[1] + [""] * len(lines[0]), strict=True)
            was, now = next(pair for pair in rows if pair[0] != pair[1])
            result.append(f"  cell {number} prints {now.strip()[:90]!r} where {was.strip()[:90]!r} is committed")
    return result


if __name__ == "__main__":
    sys.exit(main())

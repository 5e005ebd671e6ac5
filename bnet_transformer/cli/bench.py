"""`bnet-transformer bench`: the benchmarks of a clone of the repository, run on this machine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from bnet_transformer.cli import outputs
from bnet_transformer.cli.outputs import Output
from bnet_transformer.cli.signatures import Count, command
from bnet_transformer.errors import BNetError

MAKES = 'they are not in the wheel: clone the repository, pip install -e ".[dev]" there, and say it there, or --folder'


@command("bench", short_help="Run the benchmarks of a clone.", formats=(".json", ".md"))
def bench(
    rows: tuple[str, ...], to: Output, folder: str | None = None, runs: Count | None = None, markdown: bool = False
) -> None:
    """Measure ROWS of the benchmarks, or pages of rows, or all.

    The benchmarks are in a clone of the repository, not in the installed package.

    Args:
        folder: The clone of the repository; by default this folder, one above it, or the package's.
        runs: At most so many runs of each call: a quick look.
        markdown: Print the figures as a page of the docs.
    """
    to.check()
    if markdown and to.json:
        raise BNetError("bench", expected="--json or --markdown", got="both")
    home = _home(folder)
    asked = [*rows, *([] if runs is None else ["--runs", str(runs)])]
    with tempfile.TemporaryDirectory(prefix="bnet-bench-") as held:
        files = {".json": Path(held, "found.json"), ".md": Path(held, "found.md")}
        printed = _run(home, ["--json", str(files[".json"]), "--markdown", str(files[".md"]), *asked])
        found = {suffix: file.read_text(encoding="utf-8") for suffix, file in files.items()}
    said = shlex.join(["python", "-m", "benchmarks", *asked])
    found[".md"] = "\n".join(_written_by(line, said) for line in found[".md"].splitlines()) + "\n"
    found[".json"] = outputs.json_of({"command": "bench", "asked": rows, **json.loads(found[".json"])}) + "\n"
    shown = found[".json"] if to.json else found[".md"] if markdown else printed
    for out in to.out:
        outputs.write_bytes(Path(out), found[Path(out).suffix.lower()].encode())
    click.echo(shown, nl=not shown.endswith("\n"))


def _written_by(line: str, asked: str) -> str:
    """A line of the page, which names the command without the temporary files of this one."""
    return f"Written by `{asked}`; not edited by hand." if line.startswith("Written by `") else line


def _home(folder: str | None) -> Path:
    """The clone that holds the benchmarks."""
    here = Path.cwd()
    asked = [here, *here.parents, Path(__file__).resolve().parents[2]] if folder is None else [Path(folder)]
    for home in asked:
        if (home / "benchmarks" / "harness.py").is_file() and (home / "benchmarks" / "__main__.py").is_file():
            return home
    got = "none here, above, or beside the package" if folder is None else f"none in {folder}"
    raise BNetError("benchmarks", expected="a clone with the folder benchmarks/", got=got, allowed=MAKES)


def _run(home: Path, asked: list[str]) -> str:
    """Run the benchmarks as a process of their own; what they printed. Their progress is seen in a terminal."""
    seen = sys.stderr is not None and sys.stderr.isatty()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *asked],
        cwd=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if seen else subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    if done.returncode in (130, -2):
        raise KeyboardInterrupt
    if done.returncode:
        last = (done.stderr or "").strip().rpartition("\n")[2].removeprefix("python -m benchmarks: error: ")
        raise BNetError(last or f"the benchmarks failed with exit code {done.returncode}")
    return done.stdout

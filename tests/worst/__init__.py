"""The worst inputs of each public function and what happens: rows of code, and the names that they use.

A row is an expression and what comes of it: an error with its first words (up to what came), or `works: ` with words
for a reader and an expression over `found` that holds. `docs/scripts/worst.py` writes the rows as docs/worst.md,
`tests/test_worst.py` runs them.
"""

from __future__ import annotations

import importlib
import inspect
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bnet_transformer as bt
from tests.worst import answers, commands, effects, fits, models, nets, readings, sentences, tpms, training
from tests.worst.names import Exit2, namespace
from tests.worst.reasons import REASONS as REASONS

PARTS = (nets, sentences, answers, models, tpms, training, fits, effects, readings, commands)
LEAST = 5
ENTRY = re.compile(r"^\.\. auto(class|exception|function|method|property|module):: bnet_transformer\.([\w.]+)")


@dataclass(frozen=True)
class Row:
    """One bad input of a function: the expression, what happens, and what must hold where it works."""

    function: str
    said: str
    happens: str
    holds: str = ""


ROWS = tuple(Row(function, *told) for part in PARTS for function, several in part.ROWS.items() for told in several)


def happened(row: Row) -> str:
    """What comes of a row: the class of the error and its first words, or what the row says where it holds."""
    with tempfile.TemporaryDirectory(prefix="worst") as folder:
        names = namespace(f"{row.said} {row.holds}", Path(folder))
        try:
            found = eval(row.said, names)
        except (bt.BNetError, Exit2) as error:
            words = " ".join(str(error).replace(folder, "…").split())
            kind = "exit 2" if isinstance(error, Exit2) else type(error).__name__
            return f"{kind}: {words}"
        if not row.holds:
            return f"no error: {found!r}"
        return row.happens if eval(row.holds, {**names, "found": found}) else f"not so ({row.holds}): {found!r}"


def as_told(row: Row) -> bool:
    """Whether what a row says is what happens; an error says what came, too."""
    found = happened(row)
    if row.happens.startswith("works: "):
        return found == row.happens
    rest = found.removeprefix(row.happens)
    return rest != found and (rest.startswith(("; got ", " ")) or row.happens.startswith("exit 2"))


def public() -> Iterator[str]:
    """Each function, class and method of docs/api that takes input."""
    for page in sorted((Path(__file__).resolve().parents[2] / "docs" / "api").glob("*.md")):
        for line in page.read_text(encoding="utf-8").split("```{eval-rst}"):
            yield from _of_block(line)


def _of_block(block: str) -> Iterator[str]:
    lines = block.splitlines()
    for k, line in enumerate(lines):
        entry = ENTRY.match(line)
        if entry is None or entry[1] in ("property", "module"):
            continue
        thing = _thing(entry[2])
        if takes(thing):
            yield entry[2]
        if k + 1 < len(lines) and ":members:" in lines[k + 1]:
            told = lines[k + 1].partition(":members:")[2].replace(",", " ").split()
            for name in told or dir(thing):
                member = inspect.getattr_static(thing, name)
                if not name.startswith("_") and inspect.isfunction(member) and takes(member, method=True):
                    yield f"{entry[2]}.{name}"


def _thing(name: str) -> Any:
    found, at = bt, "bnet_transformer"
    for part in name.split("."):
        at = f"{at}.{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(at)
    return found


def takes(thing: Any, *, method: bool = False) -> bool:
    """Whether there is something to get wrong: a parameter besides self."""
    if inspect.isclass(thing) and issubclass(thing, Warning):
        return False
    parameters = list(inspect.signature(thing).parameters)
    return bool(parameters[1:] if method or parameters[:1] == ["self"] else parameters)

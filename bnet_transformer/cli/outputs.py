"""What commands print and write: JSON, tables, pictures; each file whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bnet_transformer.cli.group import seen
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    import pandas as pd

PICTURES = (".pdf", ".png", ".svg")
TABLES = (".csv", ".json")
TOP = 20


@dataclass(frozen=True)
class Result:
    """What a command found.

    Args:
        told: What stands in JSON.
        lines: What is printed.
        table: The table of a csv file.
        picture: The plot of a picture.
        save: What writes a file of another suffix.
    """

    told: dict[str, Any]
    lines: Sequence[str]
    table: Callable[[], pd.DataFrame] | None = None
    picture: Callable[[], Any] | None = None
    save: Callable[[str], object] | None = None

    def write(self, out: str) -> None:
        """Write a file; its suffix says what of the result."""
        suffix = Path(out).suffix.lower()
        if suffix == ".json":
            write_bytes(Path(out), (json_of(self.told) + "\n").encode())
        elif suffix == ".csv" and self.table is not None:
            text = self.table().to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC)  # a word may hold a "\r"
            write_bytes(Path(out), text.encode())
        elif suffix in PICTURES and self.picture is not None:
            held = io.BytesIO()
            self.picture().figure.savefig(held, format=suffix[1:], dpi=200)
            write_bytes(Path(out), held.getvalue())
        elif self.save is not None:
            self.save(out)


@dataclass(frozen=True)
class Output:
    """Where a result goes.

    Args:
        out: The file to write, by its suffix: {formats}. May be repeated; {} is the sentence's number.
        json: Tell everything as one JSON document.
    """

    out: tuple[str, ...] = ()
    json: bool = False
    formats: tuple[str, ...] = ()

    def check(self, count: int | None = None, formats: Sequence[str] = ()) -> None:
        """Refuse before anything is computed what cannot be written; several sentences take a {} in the name.

        Args:
            count: The number of sentences; None where all are in one file, which has no number.
            formats: The suffixes, where they are not those of the command.
        """
        for out in self.out:
            path = Path(out)
            if path.suffix.lower() not in (formats or self.formats):
                got, allowed = repr(path.suffix), ", ".join(sorted(formats or self.formats))
                raise BNetError(f"suffix of {out}", expected="one that says how", got=got, allowed=allowed)
            if not path.resolve().parent.is_dir():
                raise BNetError(out, expected="a folder that is there", got=f"{path.parent}, which is not")
            if count is None and "{}" in out:
                wanted = "a name without {}: one file holds all sentences"
                raise BNetError(f"-o {out}", expected=wanted, got="{}", allowed=out.replace("{}", ""))
            if count is not None and count > 1 and "{}" not in out:
                allowed = str(path.with_name(f"{path.stem}-{{}}{path.suffix}"))
                wanted = f"a name with {{}} for the number of the sentence: there are {count}"
                raise BNetError(f"-o {out}", expected=wanted, got="one file for all", allowed=allowed)

    def tell(self, command: str, result: Result, **more: Any) -> None:
        """Write the files of a result, and print it.

        Args:
            command: The name of the command, for JSON.
            result: The result, which is one for all sentences.
            **more: What else stands in JSON before the result.
        """
        told = {"command": command, **more, "files": self.out, **result.told}
        for out in self.out:
            Result(told, (), result.table, result.picture, result.save).write(out)
        self.say(told, [*result.lines, *(f"written: {out}" for out in self.out)])

    def say(self, told: Mapping[str, Any], lines: Sequence[str]) -> None:
        """Print one JSON document, or lines."""
        click.echo(json_of(told) if self.json else seen("\n".join(lines)))


def placed(out: str, number: int) -> str:
    """The file of a sentence, by its number."""
    return str(Path(out.replace("{}", str(number))))


def plotted(result: object, **options: Any) -> Callable[[], Any]:
    """What plots a result."""

    def picture() -> Any:
        from bnet_transformer.viz.plots import plot

        return plot(result, **options)

    return picture


def plain(value: Any) -> Any:
    """A value as JSON has it: tensors and tables as lists, what is no finite number as null.

    >>> plain({"a": (1, float("nan")), "b": "x"})
    {'a': [1, None], 'b': 'x'}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        return json.loads(value.to_json(orient="records", double_precision=15))
    return plain(value.tolist() if hasattr(value, "tolist") else str(value))


def json_of(told: Mapping[str, Any]) -> str:
    """One JSON document."""
    return json.dumps(plain(told), allow_nan=False)


def write_bytes(path: Path, held: bytes) -> None:
    """A file, whole or not at all."""
    from bnet_transformer.files import replacing

    with replacing(path) as temporary:
        temporary.write_bytes(held)


def most_of(top: int | None, every: bool) -> int | None:
    """How many rows are printed, by `--top` and `--all`; None for all."""
    if every and top is not None:
        raise BNetError("rows", expected="--top or --all", got="both")
    return None if every else TOP if top is None else top


def rows_of(table: pd.DataFrame, most: int | None = None) -> list[str]:
    """A table as lines, the first rows of it; what is not known is a dash."""
    shown = table if most is None else table.head(most)
    lines = shown.to_string(index=False, float_format="{:.3f}".format, na_rep="-").splitlines()
    left = len(table) - len(shown)
    return [*(line.rstrip() for line in lines), *([f"... and {left} more (--all)"] if left else [])]

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

from bnet_transformer.cli.group import escape_control
from bnet_transformer.cli.signatures import Count
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    import pandas as pd

PICTURE_SUFFIXES = (".pdf", ".png", ".svg")
TABLE_SUFFIXES = (".csv", ".json")
DEFAULT_TOP = 20


@dataclass(frozen=True)
class CommandResult:
    """What a command found.

    Args:
        document: What stands in JSON.
        lines: What is printed.
        make_table: The table of a csv file.
        make_plot: The plot of a picture.
        save: What writes a file of another suffix.
    """

    document: dict[str, Any]
    lines: Sequence[str]
    make_table: Callable[[], pd.DataFrame] | None = None
    make_plot: Callable[[], Any] | None = None
    save: Callable[[str], object] | None = None

    def write(self, out: str, document: Mapping[str, Any]) -> None:
        """Write a file; its suffix says what of the result, and of `document`, which is all that JSON holds."""
        suffix = Path(out).suffix.lower()
        if suffix == ".json":
            held = (format_json(document) + "\n").encode()
        elif suffix == ".csv" and self.make_table is not None:
            held = (
                self.make_table().to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC).encode()
            )  # a word may hold a "\r"
        elif suffix in PICTURE_SUFFIXES and self.make_plot is not None:
            drawn = io.BytesIO()
            self.make_plot().figure.savefig(drawn, format=suffix[1:], dpi=200)
            held = drawn.getvalue()
        else:
            assert self.save is not None
            self.save(out)
            return
        from bnet_transformer._core.files import atomic_write

        with atomic_write(Path(out)) as temporary:  # whole or not at all
            temporary.write_bytes(held)


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

    def check(self, count: int | None = None, combined_suffixes: tuple[str, ...] = ()) -> None:
        """Refuse before anything is computed what cannot be written; several sentences take a {} in the name.

        Args:
            count: The number of sentences; None where all are in one file, which has no number.
            combined_suffixes: The suffixes of files that may hold all sentences.
        """
        for out in self.out:
            path = Path(out)
            if path.suffix.lower() not in self.formats:
                got, allowed = repr(path.suffix), ", ".join(sorted(self.formats))
                raise BNetError(f"suffix of {out}", expected="one that says how", actual=got, allowed=allowed)
            if not path.resolve().parent.is_dir():
                raise BNetError(out, expected="a folder that is there", actual=f"{path.parent}, which is not")
            if count is None and "{}" in out:
                wanted = "a name without {}: one file holds all sentences"
                raise BNetError(f"-o {out}", expected=wanted, actual="{}", allowed=out.replace("{}", ""))
            if count is not None and count > 1 and "{}" not in out and not out.lower().endswith(combined_suffixes):
                allowed = str(path.with_name(f"{path.stem}-{{}}{path.suffix}"))
                wanted = f"a name with {{}} for the number of the sentence: there are {count}"
                raise BNetError(f"-o {out}", expected=wanted, actual="one file for all", allowed=allowed)

    def write_result(self, command: str, result: CommandResult, **fields: Any) -> None:
        """Write the files of a result that is one for all sentences, and print it; `fields` stands before it in JSON."""
        told = {"command": command, **fields, "files": self.out, **result.document}
        for out in self.out:
            result.write(out, told)
        self.print_document(told, [*result.lines, *(f"written: {out}" for out in self.out)])

    def write_results(
        self, fields: Mapping[str, Any], key: str, texts: Sequence[str], results: Sequence[CommandResult]
    ) -> None:
        """Write and print the result of each sentence; a table without a {} in its name holds all.

        Args:
            fields: What stands before the results in JSON.
            key: The key of the results in JSON.
            texts: What each result is of.
            results: The results.
        """
        whole = {**fields, key: [each.document for each in results]}
        lines = [line for text, each in zip(texts, results, strict=True) for line in (f"# {text}", *each.lines)]
        lines = lines if len(results) > 1 else lines[1:]
        for out in self.out:
            if out.lower().endswith(TABLE_SUFFIXES) and "{}" not in out:
                CommandResult(whole, (), lambda: _join_tables(texts, results)).write(out, whole)
                lines.append(f"written: {out}")
                continue
            for k, each in enumerate(results):
                each.write(number_path(out, k), {**fields, key: [each.document]})
                lines.append(f"written: {number_path(out, k)}")
        self.print_document(whole, lines)

    def print_document(self, document: Mapping[str, Any], lines: Sequence[str]) -> None:
        """Print one JSON document, or lines."""
        click.echo(format_json(document) if self.json else escape_control("\n".join(lines)))


@dataclass(frozen=True)
class TableOutput(Output):
    """Where a result goes, of which the first rows are printed.

    Args:
        top: Print so many rows, 20 unless told.
        all_: Print all rows.
    """

    top: Count | None = None
    all_: bool = False

    def check(self, count: int | None = None, combined_suffixes: tuple[str, ...] = ()) -> None:
        if self.all_ and self.top is not None:
            raise BNetError("rows", expected="--top or --all", actual="both")
        super().check(count, combined_suffixes)

    def format_rows(self, table: pd.DataFrame, by: str | None = None) -> list[str]:
        """The rows of a table that are printed: those of the greatest values in the column `by`, or all in order."""
        if self.all_:
            return format_table(table)
        if by is not None:
            table = table.sort_values(by, key=abs, ascending=False, kind="stable")
        shown = table.head(DEFAULT_TOP if self.top is None else self.top)
        left = len(table) - len(shown)
        return [*format_table(shown), *([f"... and {left} more (--all)"] if left else [])]


def _join_tables(texts: Sequence[str], results: Sequence[CommandResult]) -> pd.DataFrame:
    """The tables of all sentences, one below the other."""
    import pandas as pd

    tables = [
        each.make_table().assign(sentence=text) for text, each in zip(texts, results, strict=True) if each.make_table
    ]
    joined = pd.concat(tables, ignore_index=True)
    return joined[["sentence", *joined.columns.drop("sentence")]]


def number_path(out: str, number: int) -> str:
    """The file of a sentence, by its number."""
    return str(Path(out.replace("{}", str(number))))


def make_plotter(result: object, **options: Any) -> Callable[[], Any]:
    """What plots a result."""

    def picture() -> Any:
        from bnet_transformer.plots.registry import plot

        return plot(result, **options)

    return picture


def to_json_value(value: Any) -> Any:
    """A value as JSON has it: tensors and tables as lists, what is no finite number as null.

    >>> to_json_value({"a": (1, float("nan")), "b": "x"})
    {'a': [1, None], 'b': 'x'}
    """
    if isinstance(value, Mapping):
        return {str(key): to_json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(each) for each in value]
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        return json.loads(value.to_json(orient="records", double_precision=15))
    return to_json_value(value.tolist() if hasattr(value, "tolist") else str(value))


def format_json(document: Mapping[str, Any]) -> str:
    """One JSON document."""
    return json.dumps(to_json_value(document), allow_nan=False)


def format_table(table: pd.DataFrame, *, index: bool = False) -> list[str]:
    """A table as lines, with its index or without; what is not known is a dash."""
    lines = table.to_string(index=index, float_format="{:.3f}".format, na_rep="-").splitlines()
    return [line.rstrip() for line in lines]

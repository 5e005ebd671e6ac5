"""The outputs of commands: printed lines or JSON, and files of JSON, tables and images, written atomically."""

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

from bnet_transformer._core.tokens import distinguish, name_columns
from bnet_transformer.cli.group import Count, escape_control
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    import pandas as pd

IMAGES = (".pdf", ".png", ".svg")  # suffixes of files
TABLES = (".csv", ".json")
DEFAULT_ROWS = 20


@dataclass(frozen=True)
class CommandResult:
    """The result of a command in each output format.

    Args:
        document: The JSON document.
        lines: The lines that are printed.
        make_table: Returns the table of a csv file.
        make_plot: Returns the axes of an image.
        save: Writes a file of another suffix.
    """

    document: dict[str, Any]
    lines: Sequence[str]
    make_table: Callable[[], pd.DataFrame] | None = None
    make_plot: Callable[[], Any] | None = None
    save: Callable[[str], object] | None = None

    def write(self, out: str, document: Mapping[str, Any]) -> None:
        """Write a file in the format of its suffix.

        Args:
            out: The path.
            document: The JSON document, which contains that of the result.
        """
        suffix = Path(out).suffix.lower()
        if suffix == ".json":
            data = (format_json(document) + "\n").encode()
        elif suffix == ".csv" and self.make_table is not None:
            # Words are quoted, because a word may contain "\r", at which CSV readers start a new row.
            data = self.make_table().to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC).encode()
        elif suffix in IMAGES and self.make_plot is not None:
            buffer = io.BytesIO()
            self.make_plot().figure.savefig(buffer, format=suffix[1:], dpi=200)
            data = buffer.getvalue()
        else:
            assert self.save is not None
            self.save(out)
            return
        from bnet_transformer._core.files import atomic_write

        with atomic_write(Path(out)) as temporary:
            temporary.write_bytes(data)


@dataclass(frozen=True)
class Output:
    """The output files of a result, and whether JSON is printed.

    Args:
        out: The file to write; its suffix is the format: {formats}. May be repeated. {} is the sentence's number.
        json: Print one JSON document.
    """

    out: tuple[str, ...] = ()
    json: bool = False
    formats: tuple[str, ...] = ()

    def check(self, count: int | None = None, combined_suffixes: tuple[str, ...] = ()) -> None:
        """Raise an error for files that cannot be written; for several sentences, a name requires {}.

        This check runs before the results are computed.

        Args:
            count: The number of sentences; None if one file contains all sentences.
            combined_suffixes: The suffixes of files that may contain all sentences.
        """
        for out in self.out:
            path = Path(out)
            if path.suffix.lower() not in self.formats:
                actual, allowed = repr(path.suffix), ", ".join(sorted(self.formats))
                raise BNetError(f"suffix of {out}", expected="a supported format", actual=actual, allowed=allowed)
            if not path.resolve().parent.is_dir():
                raise BNetError(f"-o {out}: the folder {path.parent} does not exist", hint="Create it first")
            if count is None and "{}" in out:
                hint = f"Use -o {out.replace('{}', '')}"
                raise BNetError(f"-o {out}: one file contains all sentences, so the name has no {{}}", hint=hint)
            if count is not None and count > 1 and "{}" not in out and not out.lower().endswith(combined_suffixes):
                hint = f"Use -o {path.with_name(f'{path.stem}-{{}}{path.suffix}')}"
                subject = f"-o {out}: {count} sentences require a name with {{}} for the number of the sentence"
                raise BNetError(subject, hint=hint)

    def write_result(self, command: str, result: CommandResult, **fields: Any) -> None:
        """Write the files of one result for all sentences, and print it.

        Args:
            command: The command, in the JSON document.
            result: The result.
            **fields: Fields of the JSON document that precede the result.
        """
        document = {"command": command, **fields, "files": self.out, **result.document}
        for out in self.out:
            result.write(out, document)
        self.print_document(document, [*result.lines, *(f"written: {out}" for out in self.out)])

    def write_results(
        self, fields: Mapping[str, Any], key: str, texts: Sequence[str], results: Sequence[CommandResult]
    ) -> None:
        """Write and print the result of each sentence; a table without {} in its name contains all results.

        Args:
            fields: Fields of the JSON document that precede the results.
            key: The key of the results in the JSON document.
            texts: The sentence of each result.
            results: The results.
        """
        document = {**fields, key: [result.document for result in results]}
        lines = [line for text, result in zip(texts, results, strict=True) for line in (f"# {text}", *result.lines)]
        lines = lines if len(results) > 1 else lines[1:]
        for out in self.out:
            if out.lower().endswith(TABLES) and "{}" not in out:
                CommandResult(document, (), lambda: _join_tables(texts, results)).write(out, document)
                lines.append(f"written: {out}")
                continue
            for k, result in enumerate(results):
                result.write(number_path(out, k), {**fields, key: [result.document]})
                lines.append(f"written: {number_path(out, k)}")
        self.print_document(document, lines)

    def print_document(self, document: Mapping[str, Any], lines: Sequence[str]) -> None:
        """Print one JSON document (`--json`), or lines."""
        click.echo(format_json(document) if self.json else escape_control("\n".join(lines)))


@dataclass(frozen=True)
class TableOutput(Output):
    """The output files of a table, and the number of printed rows.

    Args:
        top: The number of rows to print, by default 20.
        all_: Print all rows.
    """

    top: Count | None = None
    all_: bool = False

    @property
    def num_rows(self) -> int:
        """The maximum number of rows that are printed without `--all`."""
        return DEFAULT_ROWS if self.top is None else self.top

    def check(self, count: int | None = None, combined_suffixes: tuple[str, ...] = ()) -> None:
        if self.all_ and self.top is not None:
            raise BNetError("give --top or --all, not both")
        super().check(count, combined_suffixes)

    def format_rows(self, table: pd.DataFrame, by: str | None = None) -> list[str]:
        """Return the printed lines of a table: the rows with the largest absolute values in the column `by`."""
        if by is not None and not self.all_:
            table = table.sort_values(by, key=abs, ascending=False, kind="stable")
        top = (table if self.all_ else table.head(self.num_rows)).copy()
        for name in top:
            if top[name].dtype == object:  # of labels
                top[name] = distinguish(top[name])
        hidden = len(table) - len(top)
        return [*format_table(top), *([f"... and {hidden} more (--all)"] if hidden else [])]


def _join_tables(texts: Sequence[str], results: Sequence[CommandResult]) -> pd.DataFrame:
    """The tables of all sentences, one below the other, with the column `sentence` first."""
    import pandas as pd

    tables = [(r.make_table(), text) for text, r in zip(texts, results, strict=True) if r.make_table]
    renamed = [
        table.set_axis(name_columns(table, ["sentence"]), axis=1).assign(sentence=text) for table, text in tables
    ]
    joined = pd.concat(renamed, ignore_index=True)
    return joined[["sentence", *joined.columns.drop("sentence")]]


def number_path(out: str, number: int) -> str:
    """Return the file of a sentence: {} in the name becomes the number of the sentence."""
    return str(Path(out.replace("{}", str(number))))


def make_plotter(result: object, **options: Any) -> Callable[[], Any]:
    """A function that plots a result; it imports matplotlib when it is called."""

    def make_plot() -> Any:
        from bnet_transformer.plots.registry import plot

        return plot(result, **options)

    return make_plot


def to_json_value(value: Any) -> Any:
    """Convert a value to JSON types: tensors and tables become lists, nan and inf become null.

    >>> to_json_value({"a": (1, float("nan")), "b": "x"})
    {'a': [1, None], 'b': 'x'}
    """
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        return json.loads(value.to_json(orient="records", double_precision=15))
    return to_json_value(value.tolist() if hasattr(value, "tolist") else str(value))


def format_json(document: Mapping[str, Any]) -> str:
    """Return a JSON document as text on one line."""
    return json.dumps(to_json_value(document), allow_nan=False)


def format_table(table: pd.DataFrame, *, index: bool = False) -> list[str]:
    """Return a table as lines, with or without its index; missing values are dashes."""
    lines = table.to_string(index=index, float_format="{:.3f}".format, na_rep="-").splitlines()
    return [line.rstrip() for line in lines]

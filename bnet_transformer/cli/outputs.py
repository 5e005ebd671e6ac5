"""What commands print and write: JSON, tables, pictures; each file whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bnet_transformer.cli.telling import seen
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    import pandas as pd

PICTURES = (".pdf", ".png", ".svg")
TABLES = (".csv", ".json")
TOP = 20


def check_outs(outs: Sequence[str], suffixes: Sequence[str], count: int | None = None) -> None:
    """Refuse before anything is computed what cannot be written; several sentences take a {} in the name.

    Without a `count` all sentences are in one file, which has no number.
    """
    for out in outs:
        path = Path(out)
        if path.suffix.lower() not in suffixes:
            got, allowed = repr(path.suffix), ", ".join(sorted(suffixes))
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


def placed(out: str, number: int) -> Path:
    """The file of a sentence, by its number."""
    return Path(out.replace("{}", str(number)))


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


def write(
    outs: Sequence[str], told: Mapping[str, Any], table: Callable[[], pd.DataFrame], picture: Callable[[], Any] | None
) -> None:
    """A result as its table, its JSON or its picture, by the suffix of each file."""
    for out in outs:
        suffix = Path(out).suffix.lower()
        if suffix == ".json":
            held = (json_of(told) + "\n").encode()
        elif suffix == ".csv":
            held = table().to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC).encode()  # a word may hold a "\r"
        else:
            assert picture is not None
            held = figure_bytes(picture(), suffix)
        write_bytes(Path(out), held)


def figure_bytes(figure: Any, suffix: str) -> bytes:
    """A plot as a file would hold it."""
    held = io.BytesIO()
    figure.figure.savefig(held, format=suffix[1:], dpi=200)
    return held.getvalue()


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


def rows_of(table: pd.DataFrame, most: int | None = None, form: str = "{:.3f}") -> list[str]:
    """A table as lines, the first rows of it; what is not known is a dash."""
    shown = table if most is None else table.head(most)
    lines = shown.to_string(index=False, float_format=form.format, na_rep="-").splitlines()
    left = len(table) - len(shown)
    return [*(line.rstrip() for line in lines), *([f"... and {left} more (--all)"] if left else [])]


def say(lines: Sequence[str]) -> None:
    """Lines on the standard output."""
    click.echo(seen("\n".join(lines)))

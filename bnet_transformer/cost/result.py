"""The result: a row for each node template, one for the slices of each stack, and the totals; told as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from bnet_transformer.cost.polynomial import ZERO, Polynomial, Powers, order

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Row:
    """One node template: all its nodes, heads and slices, for the whole batch.

    `flops` are None where a TPM does not say its products. What the forward pass does not make costs nothing.
    """

    template: str
    block: str
    tpm: str
    slices: int
    parameters: int
    flops: int | None
    flops_in_words: Polynomial | None
    order: str
    monomials: frozenset[Powers]
    parameter_bytes: int
    value_bytes: int
    value_bytes_in_words: Polynomial


@dataclass(frozen=True)
class SliceCost:
    """The slices of one stack, beside as many dense maps of all n d inputs to all n d outputs.

    `order` and `steps` are those of one slice. `steps` is the longest chain of words each of which waits for the one
    before; `longest_path` the hops between the two words that are farthest apart (None: no word reads another, or its
    order is "unknown": it needs a table of more than 4096 places). Their orders are empty where only the number for so
    many words is known, as with tables of who reads whom.
    """

    stack: str
    slices: int
    flops: int | None
    flops_in_words: Polynomial | None
    order: str
    steps: int
    steps_order: str
    longest_path: int | None
    longest_path_order: str
    dense_parameters: int
    dense_flops: int
    dense_order: str


@dataclass(frozen=True)
class Cost:
    """What a forward pass of the compiled reading costs.

    FLOPs are those of matrix products, two for each multiplication with its addition; operations entry by entry (sums,
    norms, activations, softmax) are not counted. Bytes are those of parameters, and of the values of all nodes but
    weights, were they all kept.
    """

    name: str
    words: dict[str, int]
    batch: int
    rows: tuple[Row, ...]
    slices: tuple[SliceCost, ...]

    @property
    def parameters(self) -> int:
        """How many numbers the net learns or is given."""
        return sum(row.parameters for row in self.rows)

    @property
    def flops_in_words(self) -> Polynomial | None:
        """The FLOPs in the number of words; None where a template's are not known."""
        known = [row.flops_in_words for row in self.rows if row.flops_in_words is not None]
        return sum(known, ZERO) if len(known) == len(self.rows) else None

    @property
    def flops(self) -> int | None:
        """The FLOPs of the forward pass; None where a template's are not known."""
        known = [row.flops for row in self.rows if row.flops is not None]
        return sum(known) if len(known) == len(self.rows) else None

    @property
    def unknown(self) -> tuple[str, ...]:
        """The templates whose TPM does not say its products."""
        return tuple(row.template for row in self.rows if row.flops is None)

    @property
    def order(self) -> str:
        """The order of the whole."""
        return "unknown" if self.unknown else order(powers for row in self.rows for powers in row.monomials)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters."""
        return sum(row.parameter_bytes for row in self.rows)

    @property
    def value_bytes(self) -> int:
        """The bytes of all values, were they all kept."""
        return sum(row.value_bytes for row in self.rows)

    def to_dataframe(self) -> pd.DataFrame:
        """The rows as a pandas DataFrame; the polynomials as text."""
        import pandas as pd

        frame = pd.DataFrame([vars(row) for row in self.rows]).drop(columns="monomials")
        frame["flops_in_words"] = [str(row.flops_in_words or "") for row in self.rows]
        frame["value_bytes_in_words"] = [str(row.value_bytes_in_words) for row in self.rows]
        return frame.astype({"flops": "Int64"})

    def __str__(self) -> str:
        return "\n".join([self._head(), "", *_lines(self._table()), "", *_lines(self._stacks())])

    def _repr_html_(self) -> str:
        import pandas as pd

        frames = [pd.DataFrame(rows, columns=head) for head, *rows in (self._table(), self._stacks())]
        with pd.option_context("display.max_colwidth", None):
            tables = "".join(frame.to_html(index=False, border=0) for frame in frames)
        return f"<p>{escape(self._head())}</p>{tables}"

    def _head(self) -> str:
        words = "".join(f"{n:,} words" + (f" of {stack}, " if stack else ", ") for stack, n in self.words.items())
        flops = f"{self.flops:,} FLOPs" if self.flops is not None else "FLOPs unknown for " + ", ".join(self.unknown)
        return f"{self.name}: {words}batch {self.batch}: {self.parameters:,} parameters, {flops}, {self.order}"

    def _table(self) -> list[tuple[str, ...]]:
        head = ("template", "TPM", "slices", "parameters", "FLOPs", "in n", "order", "bytes", "bytes of values")
        rows = [(row.template, row.tpm, str(row.slices), *_numbers(row)) for row in self.rows]
        return [head, *rows, ("total", "", "", *_numbers(self))]

    def _stacks(self) -> list[tuple[str, ...]]:
        head = ("slices", "how many", "order of one", "steps of one", "longest path", "dense map", "dense parameters")
        table: list[tuple[str, ...]] = [head]
        for each in self.slices:
            steps = _with(each.steps, each.steps_order)
            longest_path = _with(each.longest_path, each.longest_path_order)
            dense = (each.dense_order, f"{each.dense_parameters:,}")
            table.append((each.stack or "all", str(each.slices), each.order, steps, longest_path, *dense))
        return table


def _numbers(counted: Row | Cost) -> tuple[str, ...]:
    """The numbers of a template, or of the whole."""
    return (
        f"{counted.parameters:,}",
        "unknown" if counted.flops is None else f"{counted.flops:,}",
        "" if counted.flops_in_words is None else str(counted.flops_in_words),
        counted.order,
        f"{counted.parameter_bytes:,}",
        f"{counted.value_bytes:,}",
    )


def _with(count: int | None, told: str) -> str:
    """A count with its order, where it has one."""
    return told or "none" if count is None else f"{count:,}, {told}" if told else f"{count:,}"


def _lines(table: Sequence[Sequence[str]]) -> list[str]:
    """A table as text, its numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(_cell(text, width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _cell(text: str, width: int) -> str:
    return text.rjust(width) if text[:1].isdigit() and text.replace(",", "").isdigit() else text.ljust(width)

"""The residual stream of a compiled program: orthogonal directions for the values of variables, and the order of steps.

Each value of a categorical variable has a direction, and a numeric variable has one direction, whose coordinate is the
number (the bases of tracr, Lindner et al. 2023). A linear sequence map has no direction: its readers read those of its
parents with its factors. Two more directions are constants: `one` at every word, and `BOS` at the word BOS only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from bnet_transformer.errors import BNetError
from bnet_transformer.programs.program import Program
from bnet_transformer.programs.sops import Aggregate, Indices, LinearSequenceMap, SelectedShare, SOp, Tokens, Value


@dataclass(frozen=True)
class Layout:
    """The columns of the residual stream and the slice of each variable.

    Args:
        program: The program.
        has_bos: Whether sentences begin with BOS.
        columns: The first column of each variable, except linear sequence maps.
        dim: The width of the stream.
        heads: The aggregates of each slice, in the order of its heads.
        steps: The maps of each slice.
    """

    program: Program
    has_bos: bool
    columns: Mapping[SOp, int] = field(repr=False)
    dim: int
    heads: tuple[tuple[SOp, ...], ...] = field(repr=False)
    steps: tuple[tuple[SOp, ...], ...] = field(repr=False)

    @property
    def one(self) -> int:
        """The column of the constant direction."""
        return 0

    @property
    def bos(self) -> int:
        """The column of the direction of BOS."""
        return 1

    def values(self, sop: SOp) -> tuple[Value, ...]:
        """The values that have columns; a numeric variable has one column."""
        return ("number",) if sop.is_numeric else self.program.list_values(sop)

    def list_columns(self, sop: SOp) -> range:
        """The columns of a variable."""
        return range(self.columns[sop], self.columns[sop] + len(self.values(sop)))

    def read_number(self, sop: SOp) -> dict[int, float]:
        """The linear function of the stream that is a numeric variable."""
        reads: dict[int, float] = {}
        for source, factor in list_sources(sop):
            reads[self.columns[source]] = reads.get(self.columns[source], 0.0) + factor
        return reads

    def get_column(self, sop: SOp, value: Value) -> int:
        """The column of a value of a categorical variable."""
        return self.columns[sop] + self.values(sop).index(value)

    def encode(self, sop: SOp, value: Value) -> dict[int, float]:
        """A value as coordinates of the stream; a missing value has none."""
        if value is None or (sop.is_numeric and value == 0):
            return {}
        return {self.columns[sop]: value} if sop.is_numeric else {self.get_column(sop, value): 1.0}


def list_sources(sop: SOp) -> list[tuple[SOp, float]]:
    """The variables in the stream from which a variable is read, with their factors: itself, or those of a sum."""
    if not isinstance(sop, LinearSequenceMap):
        return [(sop, 1.0)]
    terms = ((sop.x, sop.a), (sop.y, sop.b))
    return [(source, factor * inner) for parent, factor in terms for source, inner in list_sources(parent)]


def is_head(sop: SOp) -> TypeGuard[Aggregate | SelectedShare]:
    """Whether a variable is computed by a head."""
    return isinstance(sop, Aggregate | SelectedShare)


def make_layout(program: Program, bos: bool | None) -> Layout:
    """The layout of a program: each variable in the first slice after those of its parents.

    Args:
        program: The program.
        bos: Whether sentences begin with BOS; None: if an aggregate needs it.
    """
    has_bos = _needs_bos(program) if bos is None else bos
    if not has_bos:
        _check_without_bos(program)
    # The sublayers are numbered: attention of slice t is 2 t, its feed-forward step 2 t + 1.
    sublayers: dict[SOp, int] = {}
    columns: dict[SOp, int] = {}
    dim = 1 + has_bos
    for sop in program.variables.values():
        latest = max((sublayers[parent] for parent in sop.parents), default=-1)
        if isinstance(sop, LinearSequenceMap):
            sublayers[sop] = latest
            continue
        is_input = isinstance(sop, Tokens | Indices)
        sublayers[sop] = -1 if is_input else latest + 1 + ((latest + 1) % 2 == is_head(sop))
        columns[sop] = dim
        dim += 1 if sop.is_numeric else len(program.list_values(sop))
    slices = max(max(sublayers.values()) // 2 + 1, 1)
    heads, steps = (
        tuple(tuple(sop for sop in columns if sublayers[sop] == 2 * t + offset) for t in range(slices))
        for offset in (0, 1)
    )
    return Layout(program, has_bos, columns, dim, heads, steps)


def _needs_bos(program: Program) -> bool:
    """Whether an aggregate can select no word, or counts words."""
    aggregates = [sop for sop in program.variables.values() if is_head(sop)]
    return any(isinstance(sop, SelectedShare) or program.can_be_empty(sop.selector) for sop in aggregates)


def _check_without_bos(program: Program) -> None:
    """Raise an error for an aggregate that needs BOS."""
    for name, sop in program.variables.items():
        if isinstance(sop, SelectedShare):
            raise BNetError(f"{sop.kind} {name}", expected="bos=True, because the number of words is computed from BOS")
        if isinstance(sop, Aggregate) and program.can_be_empty(sop.selector):
            expected = "bos=True, because the selector can select no word, and the head then attends to BOS"
            raise BNetError(f"{sop.kind} {name}", expected=expected, actual=False)

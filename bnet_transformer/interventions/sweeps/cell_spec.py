"""Cells of a sweep: groups of nodes, rows of attention, arrows or paths that are patched together.

A cell has a name, and a position along each axis of the result. `role_cells` and `arrow_cells` build the cells of roles
and of arrows and paths; `parse_cells` parses `at` and `over`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bnet_transformer._core.arrays import BoolArray, IntArray
from bnet_transformer._core.checks import check_sequence
from bnet_transformer._core.naming import ARROW, SLICE, WORD, split_pattern
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.graph import NodeGroup
from bnet_transformer.graph.transformer_lens import get_attention_name
from bnet_transformer.interventions.edges.cells import EdgeCells
from bnet_transformer.interventions.sweeps.cell_result import CellGrid
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.reference import GroundModel

READ = "read"
HEAD = "head"


@dataclass(frozen=True)
class PatchSites:
    """The nodes of one group that cells set: cell `cells[k]` sets node `nodes[k]`, an index within the group.

    With `is_attention`, cells set `P(j | i)` of these nodes: the entry of word `read_words[k]`, or the full row if
    `read_words` is None.
    """

    group: int
    cells: IntArray
    nodes: IntArray
    is_attention: bool = False
    read_words: IntArray | None = None

    def select(self, mask: BoolArray) -> PatchSites:
        """The sites that a mask marks."""
        read = None if self.read_words is None else self.read_words[mask]
        return replace(self, cells=self.cells[mask], nodes=self.nodes[mask], read_words=read)


@dataclass(frozen=True)
class NodePath:
    """A path of ground nodes along which a cell transmits the other run's value of the first node to the last one."""

    cell: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class PathsToEnd:
    """The paths of one cell with the same last node."""

    cell: int
    paths: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int:
        """The number of nodes of each path."""
        return len(self.paths[0])


@dataclass(frozen=True)
class PatchCells:
    """The cells of a sweep: the axes of the result, their positions and labels, and the nodes that each cell sets.

    `names` contains the name of each cell, by its index in the flattened axes. A grid position without a name is not a
    cell. `parts` describes the cells of each item of a list, as they would be on their own.
    """

    at: str
    axes: tuple[str, ...]
    positions: Mapping[str, tuple[int, ...]]
    labels: Mapping[str, tuple[str, ...]]
    names: Mapping[int, str] = field(repr=False)
    sites: tuple[PatchSites, ...] = field(default=(), repr=False)
    paths: tuple[NodePath, ...] = field(default=(), repr=False)
    edges: EdgeCells | None = field(default=None, repr=False)
    parts: Mapping[str, CellGrid] = field(default_factory=dict, repr=False)
    aligned: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    special: Mapping[str, tuple[bool, ...]] = field(default_factory=dict, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of positions along each axis."""
        return tuple(len(self.positions[axis]) for axis in self.axes)

    def get_patched_nodes(self, model: GroundModel) -> list[int]:
        """Ground ids of the nodes that cells set, without the ends of paths; of an edge the nodes of the writer."""
        offsets, ground = model.ground.offsets, model.ground
        nodes = [int(offsets[sites.group]) + int(node) for sites in self.sites for node in np.unique(sites.nodes)]
        if self.edges is not None:
            specs = [self.edges.structure.writer_groups[w].spec for w in self.edges.writers]
            nodes += [node for spec in specs for node in ground.select_nodes(spec.group).tolist()]
        return nodes

    @property
    def grid(self) -> CellGrid:
        """The axes, the positions, the labels and the names, as the result has them."""
        columns = np.unravel_index(np.array([*self.names], dtype=np.int64), self.shape) if self.axes else ()
        positions = zip(*(column.tolist() for column in columns), strict=True) if columns else [()] * len(self.names)
        names = dict(zip(positions, self.names.values(), strict=True))
        return CellGrid(self.at, self.axes, self.labels, self.positions, names)

    def to_result_fields(self) -> dict[str, Any]:
        """The fields of `CellResult` that describe the cells."""
        return {**vars(self.grid), "parts": self.parts, "aligned": self.aligned, "special": self.special}

    def select(self, cell_ids: IntArray) -> PatchCells:
        """Some of the cells; the other positions of the grid are then no cells."""
        chosen = set(cell_ids.tolist())
        sites = [sites.select(np.isin(sites.cells, cell_ids)) for sites in self.sites]
        selected = self.with_sites(sites, [path for path in self.paths if path.cell in chosen], cell_ids)
        edges = None if self.edges is None else self.edges.select(np.isin(self.edges.cells, cell_ids))
        return replace(selected, edges=edges)

    def with_sites(self, sites: Iterable[PatchSites], paths: Iterable[NodePath], cell_ids: IntArray) -> PatchCells:
        """These cells, with other sites and paths; the parts contain only the remaining cells too."""
        names = {cell: self.names[cell] for cell in cell_ids.tolist()}
        remaining = set(names.values())
        parts = {}
        for item, grid in self.parts.items():
            part_names = {index: name for index, name in grid.names.items() if name in remaining}
            parts[item] = replace(grid, names=part_names)
        sites = tuple(part for part in sites if len(part.cells))
        return replace(self, names=names, sites=sites, paths=tuple(paths), parts=parts)

    @property
    def cell_ids(self) -> IntArray:
        """The indices of the cells that exist; an arrow that a mask excludes is not a cell."""
        return np.array(sorted(self.names), dtype=np.int64)


def group_paths(paths: Sequence[NodePath]) -> list[PathsToEnd]:
    """Group paths by cell and last node."""
    ends: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for path in paths:
        ends.setdefault((path.cell, path.nodes[-1]), []).append(path.nodes)
    return [PathsToEnd(cell, tuple(nodes)) for (cell, _), nodes in ends.items()]


def check_not_node(model: GroundModel, name: str, at: str) -> None:
    """Raise an error for a name or a pattern of nodes instead of the name of a role in `at`."""
    stem, indices = split_pattern(name)
    if "*" in name or (indices and stem in model.network.graph.by_stem):
        hint = f"Pass names and patterns as a list, at=[{at!r}]"
        raise BNetError("at", expected="an arrow of roles" if ARROW in at else "a role", actual=at, hint=hint)


def find_attention_groups(model: GroundModel) -> dict[str, tuple[NodeGroup, ...]]:
    """The groups whose rows of attention can be set, by the role of the attended word: `j`, `dec_cross_j`."""
    by_role: dict[str, list[NodeGroup]] = {}
    for spec in model.network.specs:
        if spec.has_word_attention and spec.tpm.kind == "deterministic":
            by_role.setdefault(get_attention_name(spec.group), []).append(spec.group)
    return {name: tuple(groups) for name, groups in by_role.items()}


def select_axes(
    over: object, default: tuple[str, ...], allowed: tuple[str, ...], *, is_strict: bool = True
) -> tuple[str, ...]:
    """Validate `over=`: the axes along which cells are separate, in the order of `allowed`."""
    if over is None:
        return default
    axes = check_sequence("over", [over] if isinstance(over, str) else over, str)
    for axis in axes:
        if axis not in allowed and is_strict:
            raise unknown_name_error("over", axis, allowed)
    return tuple(axis for axis in allowed if axis in axes)


def find_merged_plates(axes: Sequence[str], node_axes: Sequence[str]) -> tuple[str, ...]:
    """The plates that the axis of heads includes: those before `head` that are no axes, such as groups of heads.

    Heads are then numbered over all groups, as in roles, inclusion and reads.
    """
    if HEAD not in axes or HEAD not in node_axes:
        return ()
    before = node_axes[: list(node_axes).index(HEAD)]
    return tuple(axis for axis in before if axis not in (SLICE, *axes))


def merge_plates(
    merged: Sequence[str], sizes: Mapping[str, int], position: Mapping[str, IntArray]
) -> dict[str, IntArray]:
    """Number the heads of nodes over the merged plates too, in row-major order.

    Args:
        merged: The plates that the axis of heads includes.
        sizes: The size of each plate.
        position: The index of the nodes along each axis, `[node]` each.

    Returns:
        The indices, with the number over all merged plates along the axis of heads.
    """
    if not merged:
        return dict(position)
    plates = (*merged, HEAD)
    head = np.ravel_multi_index([position[plate] for plate in plates], [sizes[plate] for plate in plates])
    return {**position, HEAD: head.astype(np.int64)}


def number_cells(
    axes: Sequence[str], grid: Sequence[Mapping[str, IntArray]], num_words: int = 0
) -> tuple[dict[str, tuple[int, ...]], list[IntArray]]:
    """Number the cells in row-major order of the positions along the axes.

    Args:
        axes: The axes along which cells are separate.
        grid: For each node group, the index of its nodes along each axis, `[node]` each.
        num_words: If given, the number of positions along the axis of the attended words.

    Returns:
        The positions along each axis, and for each node group the cell of each node, `[node]`.
    """
    positions = {axis: tuple(np.unique(np.concatenate([index[axis] for index in grid])).tolist()) for axis in axes}
    if READ in positions and num_words:
        positions[READ] = tuple(range(num_words))
    if not axes:
        return positions, [np.zeros(len(position[SLICE]), dtype=np.int64) for position in grid]
    shape = tuple(map(len, positions.values()))
    indices = [[np.searchsorted(np.array(positions[axis]), position[axis]) for axis in axes] for position in grid]
    return positions, [np.ravel_multi_index(index, shape).astype(np.int64) for index in indices]


def unravel_nodes(model: GroundModel, group: NodeGroup, nodes: IntArray) -> dict[str, IntArray]:
    """The index of nodes of a group along each of its axes, and its slice (-1 outside of slices): `[node]` each."""
    index = np.unravel_index(nodes - int(model.ground.offsets[group.index]), model.ground.shapes[group.index] or (1,))
    position = {axis: np.asarray(i, dtype=np.int64) for axis, i in zip(model.ground.axes(group), index, strict=False)}
    return position | {SLICE: np.full(len(nodes), -1 if group.slice is None else group.slice)}


def is_index_valued(spec: NodeSpec) -> bool:
    """True for nodes without real values, such as tokens and states, which have no gradient."""
    return spec.tpm.kind == "discrete" or spec.tpm.is_index_valued


def check_patchable(model: GroundModel, spec: NodeSpec) -> None:
    """Raise an error for nodes without a value to patch: random nodes that are not set."""
    nodes = model.ground.select_nodes(spec.group).tolist()
    if spec.tpm.is_random and not all(node in model.do for node in nodes):
        names = [m.group.stem for m in model.network.specs if not m.tpm.is_random]
        raise BNetError(
            f"at {spec.group.name}",
            expected="nodes that are functions of their parents, or that are set in both runs",
            actual=f"{spec.tpm.kind} nodes ({type(spec.tpm).__name__})",
            allowed=", ".join(dict.fromkeys(names)),
            hint=f"To patch {spec.group.name}, set it in both runs by do({spec.group.name}=...)",
        )


def align_labels(
    positions: Mapping[str, tuple[int, ...]], clean: Examples, corrupt: Examples
) -> dict[str, tuple[str, ...]]:
    """The tokens of clean and corrupt along the axes of words, such as "sat / ran"; a number if examples differ.

    Empty for several stacks of words, of which an axis may have any.
    """
    if any(len(tokens) != 1 for tokens in (*clean.tokens, *corrupt.tokens)):
        return {}
    runs = [[next(iter(tokens.values())) for tokens in run.tokens] for run in (clean, corrupt)]
    aligned = {}
    for axis in {WORD, READ} & positions.keys():
        labels = []
        for i in positions[axis]:
            names = [{str(i) if i >= len(words) else words[i] for words in run} for run in runs]
            tokens = [run.pop() for run in names if len(run) == 1]
            labels.append(" / ".join(dict.fromkeys(tokens)) if len(tokens) == len(runs) else str(i))
        aligned[axis] = tuple(labels)
    return aligned


def flag_special_positions(positions: Mapping[str, tuple[int, ...]], examples: Examples) -> dict[str, tuple[bool, ...]]:
    """Whether each word along the axes of words is a special token in all examples; empty for several stacks."""
    if any(len(tokens) != 1 for tokens in examples.tokens):
        return {}
    special = [next(iter(words.values()), ()) for words in examples.special]
    axes = {WORD, READ} & positions.keys()
    return {axis: tuple(all(i in words for words in special) for i in positions[axis]) for axis in axes}


def label_positions(
    examples: Examples, positions: Mapping[str, tuple[int, ...]], stacks: Mapping[str, str | None]
) -> dict[str, tuple[str, ...]]:
    """The labels along each axis: the token of a word if all examples have the same token, else its position."""
    labels = {axis: tuple(map(str, numbers)) for axis, numbers in positions.items()}
    for axis in stacks.keys() & positions.keys():
        sentences = [tokens.get(stacks[axis] or "", ()) for tokens in examples.tokens]
        tokens_at = [{words[i] if i < len(words) else str(i) for words in sentences} for i in positions[axis]]
        pairs = zip(positions[axis], tokens_at, strict=True)
        labels[axis] = tuple(tokens.pop() if len(tokens) == 1 else str(i) for i, tokens in pairs)
    return labels

"""Cells of a sweep: groups of nodes, rows of attention, arrows, paths or edges that are patched together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from bnet_transformer._core.checks import check_sequence
from bnet_transformer._core.naming import ARROW, SLICE, WORD, join_path, split_path, split_pattern
from bnet_transformer._core.process import check_memory
from bnet_transformer._core.tensors import BoolArray, IntArray
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.graph import NodeGroup, find_family
from bnet_transformer.graph.template_graph import get_attention_name, unknown_node_error
from bnet_transformer.interventions.edges import EdgeStructure, WriterUnit
from bnet_transformer.interventions.examples import Examples
from bnet_transformer.interventions.sweep_results import CellGrid
from bnet_transformer.reference import GroundModel, compute_read_mask
from bnet_transformer.tpm import Attention

# --------------------------------------------------------------------------------------------------------------------
# The edges that the cells of a sweep set.


@dataclass(frozen=True)
class EdgeCells:
    """The edges that cells set: cell `cells[k]` sets edge `edges[k]` of the structure, at a word of the reader.

    `words` is the word of each reader; None for all words at once.
    """

    structure: EdgeStructure
    cells: IntArray
    edges: IntArray
    words: IntArray | None = None

    def select(self, mask: BoolArray) -> EdgeCells:
        """The cells that a mask, `[k]`, marks."""
        words = None if self.words is None else self.words[mask]
        return EdgeCells(self.structure, self.cells[mask], self.edges[mask], words)

    def renumber_cells(self, new_ids: IntArray) -> EdgeCells:
        """The cells with a new id, `new_ids[cell]`; cells whose new id is -1 are dropped."""
        selected = self.select(new_ids[self.cells] >= 0)
        return replace(selected, cells=new_ids[selected.cells])

    @cached_property
    def reader_groups(self) -> list[int]:
        """The numbers of the groups of readers."""
        return [int(r) for r in np.unique(self.structure.edges.readers[self.edges])]

    @cached_property
    def writer_units(self) -> list[WriterUnit]:
        """The writers, each once."""
        table = self.structure.edges
        pairs = np.stack([table.writers[self.edges], table.writer_units[self.edges]])
        return [(int(w), int(v)) for w, v in np.unique(pairs, axis=1).T]

    @cached_property
    def writers(self) -> list[int]:
        """The numbers of the groups of writers."""
        return sorted({w for w, _ in self.writer_units})

    @cached_property
    def targets(self) -> frozenset[int]:
        """The groups whose values are computed from what readers see."""
        return frozenset(self.structure.reader_groups[r].target.group.index for r in self.reader_groups)

    def list_target_words(self, word_counts: Mapping[int, int]) -> list[tuple[int, IntArray, IntArray]]:
        """For each group of targets the cells, and the word of the target that each of them sets: `[cell * word]`."""
        entries = []
        numbers = self.structure.edges.readers[self.edges]
        for r in self.reader_groups:
            index, inside = self.structure.reader_groups[r].target.group.index, numbers == r
            if self.words is not None:
                entries.append((index, self.cells[inside], self.words[inside]))
            elif index in word_counts:
                words = np.arange(word_counts[index])
                cells = self.cells[inside]
                entries.append((index, np.repeat(cells, len(words)), np.tile(words, len(cells))))
        return entries

    @cached_property
    def source_groups(self) -> frozenset[int]:
        """The groups whose values in both runs the edges need."""
        groups = set[int]()
        for w in self.writers:
            writer = self.structure.writer_groups[w]
            groups.add(writer.spec.group.index)
            if writer.is_part:
                groups |= {edge.parent for edge in self.structure.network.graph.in_edges[writer.spec.group.index]}
        return frozenset(groups)


def join_edge_cells(parts: Sequence[EdgeCells]) -> EdgeCells | None:
    """The cells of several parts with the same structure; None without edges."""
    parts = [part for part in parts if len(part.cells)]
    if not parts:
        return None
    words = None
    if any(part.words is not None for part in parts):
        words = np.concatenate([part.words for part in parts if part.words is not None])
    cells, edges = (np.concatenate([getattr(part, name) for part in parts]) for name in ("cells", "edges"))
    return EdgeCells(parts[0].structure, cells, edges, words)


# --------------------------------------------------------------------------------------------------------------------
# Cells of a sweep: groups of nodes, rows of attention, arrows or paths that are patched together.
#
# A cell has a name, and a position along each axis of the result. `build_role_cells` and `build_arrow_cells` build the
# cells of roles and of arrows and paths; `parse_cells` parses `at` and `over`.


READ = "read"
ENTRY = "entry"
HEAD = "head"
SCORE = "score"


@dataclass(frozen=True)
class PatchSites:
    """The nodes of one group that cells set: cell `cells[k]` sets node `nodes[k]`, an index within the group.

    With `is_attention`, cells set `P(j | i)` of these nodes instead of their values. With `entries`, cells set only the
    entry `entries[k]` of the value, in row-major order, or of the row, which is the attended word. With `is_score`, the
    rows are the scores before the softmax.
    """

    group: int
    cells: IntArray
    nodes: IntArray
    is_attention: bool = False
    entries: IntArray | None = None
    is_score: bool = False

    def select(self, mask: BoolArray) -> PatchSites:
        """The sites that a mask marks."""
        entries = None if self.entries is None else self.entries[mask]
        return replace(self, cells=self.cells[mask], nodes=self.nodes[mask], entries=entries)


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
    cell. `parts` describes the cells of each item of a list, as they would be on their own. `named` are the cells of
    names and patterns, instead of roles.
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
    named: frozenset[int] = field(default=frozenset(), repr=False)

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

    def drop(self, cell_ids: Collection[int]) -> PatchCells:
        """The cells, of which these set nothing; edges remain."""
        if not cell_ids:
            return self
        sites = tuple(sites for sites in self.sites if not np.isin(sites.cells, list(cell_ids)).all())
        return replace(self, sites=sites, paths=tuple(path for path in self.paths if path.cell not in cell_ids))

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


def find_row_groups(model: GroundModel) -> dict[str, tuple[NodeGroup, ...]]:
    """The groups of `find_attention_groups`, also by the role of the scores: `score`, `dec_cross_score`."""
    groups = find_attention_groups(model)
    return groups | {f"{name.removesuffix('j')}{SCORE}": members for name, members in groups.items()}


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


def number_cells(
    model: GroundModel,
    axes: Sequence[str],
    grid: Sequence[Mapping[str, IntArray]],
    merged: Sequence[str] = (),
    num_words: int = 0,
) -> tuple[dict[str, tuple[int, ...]], list[IntArray]]:
    """Number the cells in row-major order of the positions along the axes.

    Args:
        model: The sentence that is patched.
        axes: The axes along which cells are separate.
        grid: For each node group, the index of its nodes along each axis, `[node]` each.
        merged: The plates over all of which heads are numbered, in row-major order.
        num_words: If given, the number of positions along the axis of the attended words.

    Returns:
        The positions along each axis, and for each node group the cell of each node, `[node]`.
    """
    if merged:
        plates, sizes = (*merged, HEAD), model.network.graph.plate_sizes
        heads = [np.ravel_multi_index([index[p] for p in plates], [sizes[p] for p in plates]) for index in grid]
        grid = [{**index, HEAD: head.astype(np.int64)} for index, head in zip(grid, heads, strict=True)]
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


def count_entries(spec: NodeSpec) -> int:
    """The number of entries of a value; an error for nodes without entries."""
    if is_index_valued(spec) or not spec.shape:
        expected = "nodes whose values are vectors, for entries of them"
        raise BNetError(f"at {spec.group.name}", expected=expected, actual=f"{type(spec.tpm).__name__} nodes")
    return math.prod(spec.shape)


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


# --------------------------------------------------------------------------------------------------------------------
# Alignment of words: the word of the other run from which each word of the base run takes its values.
#
# By default a word takes the values of the same word. `words=` is another map, so that the two sentences may differ in
# length, or may be one sentence whose values are taken from other places.


WORDS_FORM = "a mapping, or pairs, from words of the sentence that is patched to words of the other sentence"


@dataclass(frozen=True)
class WordAlignment:
    """The source word of each base word.

    Args:
        base: A sentence that is patched.
        source: A sentence that provides the values.
        by_stack: For each stack of words, the source word of each base word, `[word]`; -1 for a word without one.
        is_identity: Whether each word is its own source word, in sentences of equal lengths.
    """

    base: GroundModel
    source: GroundModel
    by_stack: Mapping[str, IntArray]
    is_identity: bool

    @property
    def has_equal_lengths(self) -> bool:
        """Whether the sentences have the same numbers of words, so that a node has the same id in both."""
        return self.base.ground.word_counts == self.source.ground.word_counts

    def align_nodes(self, group: int, nodes: IntArray) -> IntArray:
        """The source nodes of nodes of a group, as indices within the group, `[node]`; -1 for a node without one."""
        stack = self.base.network.specs[group].group.word_stack
        if self.is_identity or stack is None:
            return nodes
        plate, word = np.divmod(nodes, self.base.ground.word_counts[stack])
        source_word = self.by_stack[stack][word]
        aligned: IntArray = np.where(
            source_word < 0, -1, plate * self.source.ground.word_counts[stack] + source_word
        ).astype(np.int64)
        return aligned

    def align_node(self, node: int) -> int | None:
        """The ground id of the source node of a base node; None for a node without one."""
        group = self.base.ground.group_of(node).index
        index = self.align_nodes(group, np.array([node - int(self.base.ground.offsets[group])]))[0]
        return None if index < 0 else int(self.source.ground.offsets[group]) + int(index)

    def align_outcomes(self, nodes: Sequence[int]) -> tuple[int, ...] | None:
        """The nodes of the metric in the source run, or None if a node has none, so that the metric is not defined.

        In sentences of equal lengths a word outside of the map is read at the same word.
        """
        aligned = []
        for node in nodes:
            source = self.align_node(node)
            if source is None and self.has_equal_lengths:
                source = node
            if source is None:
                return None
            aligned.append(source)
        return tuple(aligned)

    def drop_unaligned(self, cells: PatchCells) -> PatchCells:
        """The cells without the nodes, and the paths from nodes, that have no source; empty cells do not exist."""
        if self.is_identity:
            return cells
        ground = self.base.ground
        has_source: dict[int, BoolArray] = {}
        for group, shape in enumerate(ground.shapes):
            has_source[group] = self.align_nodes(group, np.arange(int(np.prod(shape, dtype=np.int64)))) >= 0

        def is_aligned(node: int) -> bool:
            group = ground.group_of(node).index
            return bool(has_source[group][node - int(ground.offsets[group])])

        sites = tuple(sites.select(has_source[sites.group][sites.nodes]) for sites in cells.sites)
        paths = tuple(path for path in cells.paths if is_aligned(path.nodes[0]))
        ids = [*(sites_part.cells for sites_part in sites), np.array([path.cell for path in paths], dtype=np.int64)]
        remaining = cells.with_sites(sites, paths, np.unique(np.concatenate(ids)))
        if not remaining.names:
            raise BNetError(
                "words", expected="a map with a word of some cell of at=", actual="no cell with such a word"
            )
        return remaining


def parse_words(base: GroundModel, source: GroundModel, words: object) -> WordAlignment:
    """Parse `words=` into an alignment of the words of each stack.

    Args:
        base: The first sentence that is patched.
        source: The first sentence that provides the values.
        words: None; a mapping or pairs of words; or for a net with several stacks of words, such a map for each stack.

    Returns:
        The alignment. A stack without a map has the identity, which requires equal lengths.
    """
    counts, source_counts = base.ground.word_counts, source.ground.word_counts
    has_stacks = isinstance(words, Mapping) and bool(words) and all(isinstance(key, str) for key in words)
    if words is not None and not has_stacks and len(counts) != 1:
        stacks = ", ".join(map(repr, counts))
        raise BNetError("words", expected="a map for each stack of words", actual=words, allowed=stacks)
    by_stack_maps: dict[str, Any] = {} if words is None else dict(words) if has_stacks else {next(iter(counts)): words}  # type: ignore[call-overload]
    unknown = [stack for stack in by_stack_maps if stack not in counts]
    if unknown:
        raise BNetError("words", expected=WORDS_FORM, actual=unknown[0], allowed=", ".join(map(repr, counts)))
    by_stack: dict[str, IntArray] = {}
    for stack, count in counts.items():
        if stack in by_stack_maps:
            by_stack[stack] = _parse_word_map(by_stack_maps[stack], count, source_counts[stack])
            continue
        if count != source_counts[stack]:
            expected = f"a map of the words of {stack or 'the sentences'}, which differ in number"
            raise BNetError("words", expected=expected, actual=f"{count} and {source_counts[stack]} words")
        by_stack[stack] = np.arange(count)
    is_same = all(np.array_equal(table, np.arange(len(table))) for table in by_stack.values())
    return WordAlignment(base, source, by_stack, is_same and dict(counts) == dict(source_counts))


def _parse_word_map(words: object, count: int, source_count: int) -> IntArray:
    """The source word of each base word, `[word]`, from a mapping or from pairs; -1 for a word that is not in it."""
    pairs: Any = list(words.items()) if isinstance(words, Mapping) else words
    is_valid = isinstance(pairs, Sequence) and not isinstance(pairs, str) and len(pairs) > 0
    is_valid = is_valid and all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs)
    if not is_valid or not all(isinstance(word, int | np.integer) for pair in pairs for word in pair):
        raise BNetError("words", expected=WORDS_FORM, actual=words)
    table = np.full(count, -1)
    for word, source in pairs:
        if not (0 <= word < count and 0 <= source < source_count):
            expected = f"words from 0 to {count - 1} mapped to words from 0 to {source_count - 1}"
            raise BNetError("words", expected=expected, actual=f"{word}: {source}")
        if table[word] >= 0:
            raise BNetError("words", expected="one word of the other sentence for each word", actual=f"{word} twice")
        table[word] = source
    return table


# --------------------------------------------------------------------------------------------------------------------
# Cells of a role: a cell for each of its nodes, or rows of attention, joined along the axes that `over` omits.


def build_role_cells(examples: Examples, at: str, over: object, *, is_strict: bool = True) -> PatchCells:
    """A cell for each node of a role, or for all its nodes with the same index along the axes of `over`.

    Without `is_strict`, axes in `over` that the role does not have are ignored.
    """
    model = examples.model
    graph, specs = model.network.graph, model.network.specs
    check_not_node(model, at, at)
    is_attention = at not in graph.by_stem
    known = {**graph.by_stem, **find_row_groups(model)} if is_attention else graph.by_stem
    if at not in known:
        raise unknown_node_error("at", at, [*graph.by_stem, *find_attention_groups(model)], graph)
    groups = known[at]
    for group in groups:
        if is_attention:
            _check_attention(specs[group.index])
        else:
            check_patchable(model, specs[group.index])
    axes_of = [((SLICE,) if group.slice is not None else ()) + tuple(model.ground.axes(group)) for group in groups]
    node_axes = axes_of[0]
    if any(axes != node_axes for axes in axes_of):
        raise BNetError("at", expected="a role whose nodes have the same axes in all slices", actual=at)
    allowed = (*node_axes, READ if is_attention else ENTRY)
    axes = select_axes(over, node_axes, allowed, is_strict=is_strict)
    read_stack = model.network.get_source_stack(specs[groups[0].index]) if is_attention else None
    words = 0 if read_stack is None else model.ground.word_counts[read_stack]
    is_score = is_attention and at.endswith(SCORE)
    grid, patched = [], []
    for group in groups:
        position = unravel_nodes(model, group, model.ground.select_nodes(group))
        node, entries = np.arange(len(position[SLICE])), None
        if allowed[-1] in axes:
            if is_attention:
                reads = compute_read_mask(model, specs[group.index])
                selected, entries = np.nonzero(reads[position[WORD] if WORD in position else np.zeros_like(node)])
            else:
                selected, entries = map(np.ravel, np.indices((len(node), count_entries(specs[group.index]))))
            position = {axis: index[selected] for axis, index in position.items()} | {allowed[-1]: entries}
            node = node[selected]
        grid.append(position)
        patched.append((group, node, entries))
    merged = find_merged_plates(axes, node_axes)
    positions, cell_ids = number_cells(model, axes, grid, merged, words)
    sites: list[PatchSites] = []
    names: dict[int, str] = {}
    for (group, node, entries), position, cells in zip(patched, grid, cell_ids, strict=True):
        sites.append(PatchSites(group.index, cells, node, is_attention, entries, is_score))
        values = [position[axis] if axis in (*axes, *merged) else None for axis in node_axes]
        for k, cell_id in enumerate(cells.tolist()):  # a star for each index that a cell joins
            if cell_id not in names:
                name = "_".join([at, *("*" if index is None else str(int(index[k])) for index in values)])
                names[cell_id] = name if entries is None else f"{name}[{int(entries[k])}]"
    labels = label_positions(examples, positions, {WORD: groups[0].word_stack, READ: read_stack})
    return PatchCells(at, axes, positions, labels, names, tuple(sites))


def _check_attention(spec: NodeSpec) -> None:
    """Raise an error for a group whose rows of attention cannot be set."""
    is_supported = isinstance(spec.tpm, Attention) and not any(parent.pick for parent in spec.parents)
    values = [parent for parent in spec.parents if parent.slot == "v."]
    if not is_supported or not values or values[0].over != (WORD,):
        expected = "node groups with an Attention over words and without pick="
        raise BNetError(f"at {spec.group.name}", expected=expected, actual=type(spec.tpm).__name__)
    if isinstance(spec.tpm, Attention) and spec.tpm.normaliser.kind != "softmax":
        raise BNetError(
            f"at {spec.group.name}", expected="nodes with attention P(j | i)", actual=spec.tpm.no_attention_reason()
        )


# --------------------------------------------------------------------------------------------------------------------
# Cells of arrows and paths: of all arrows between two roles, of all paths along roles, of one path of names.


PATH_BYTES = 2_500  # memory of one path: its name, its nodes, the values along it
RoleArrows = list[tuple[NodeGroup, NodeGroup, IntArray, IntArray]]  # parent, child, and the ids of both ends


def build_arrow_cells(examples: Examples, at: str, over: object, *, is_strict: bool = True) -> PatchCells:
    """A cell for each ground arrow between two roles, or for each ground path along more roles.

    Without `is_strict`, axes in `over` that the arrows do not have are ignored.
    """
    model = examples.model
    roles = split_path(at)
    for role in roles:
        if role not in model.network.graph.by_stem:
            check_not_node(model, role, at)
            raise unknown_node_error("at", role, model.network.graph.by_stem, model.network.graph)
    for pair in itertools.pairwise(roles):
        _check_path_memory(at, model.ground.count_arrows(roles=pair))
    steps = [_find_role_arrows(model, *pair, at) for pair in itertools.pairwise(roles)]
    if len(steps) > 1:
        if over is not None and is_strict:
            raise BNetError("over", expected="None, because at= is a path", actual=over)
        return _build_path_cells(model, at, steps)
    default = _get_arrow_axes(model, steps[0])
    axes = select_axes(over, default, default, is_strict=is_strict)
    grid = []
    for parent, child, sources, targets in steps[0]:
        read = unravel_nodes(model, parent, sources)
        grid.append(read | unravel_nodes(model, child, targets) | ({READ: read[WORD]} if WORD in read else {}))
    positions, cell_ids = number_cells(model, axes, grid, find_merged_plates(axes, default))
    paths: list[NodePath] = []
    names: dict[int, str] = {}
    for cells, (_, _, sources, targets) in zip(cell_ids, steps[0], strict=True):
        for cell_id, source, target in zip(cells.tolist(), sources.tolist(), targets.tolist(), strict=True):
            paths.append(NodePath(cell_id, (source, target)))
            name = join_path(map(model.ground.name, (source, target)))
            names[cell_id] = _join_arrow_names(names.get(cell_id, name), name)
    parent, child = steps[0][0][:2]
    labels = label_positions(examples, positions, {WORD: child.word_stack, READ: parent.word_stack})
    return PatchCells(at, axes, positions, labels, names, paths=tuple(paths))


def _join_arrow_names(first: str, second: str) -> str:
    """The common name of two arrows: a star for each index in which they differ."""
    ends = zip(split_path(first), split_path(second), strict=True)
    parts = [zip(a.split("_"), b.split("_"), strict=True) for a, b in ends]
    return join_path("_".join(a if a == b else "*" for a, b in indices) for indices in parts)


def _find_role_arrows(model: GroundModel, parent_role: str, child_role: str, at: str) -> RoleArrows:
    """The ground arrows from one role to another, by pair of node groups."""
    groups = model.network.graph.groups
    arrows: RoleArrows = []
    for edge, sources, targets in model.ground.arrows(roles=(parent_role, child_role)):
        parent, child = groups[edge.parent], groups[edge.child]
        if len(sources):
            check_patchable(model, model.network.specs[parent.index])
            check_path_node(model, int(targets[0]))
            arrows.append((parent, child, sources.astype(np.int64), targets.astype(np.int64)))
    if not arrows:
        graph, arrow = model.network.graph, f"{parent_role} -> {child_role}"
        parent_ids = (edge.parent for group in graph.by_stem[child_role] for edge in graph.in_edges[group.index])
        stems = sorted({groups[index].stem for index in parent_ids})
        allowed = ", ".join(f"{stem} -> {child_role}" for stem in stems) or f"{child_role} has no parent"
        raise BNetError(f"at {at!r}", expected="arrows of the bnet", actual=arrow, allowed=allowed)
    return arrows


def _get_arrow_axes(model: GroundModel, arrows: RoleArrows) -> tuple[str, ...]:
    """The axes of arrows: the slice of the child, the plates of both, the word of the child, the word that it reads."""
    axes_by_pair: list[tuple[str, ...]] = []
    for parent, child, _, _ in arrows:
        spec = model.network.specs[child.index]
        reads_other_words = any(ref.reach.kind != "same" for ref in spec.parents if ref.index == parent.index)
        reads = parent.word_stack is not None and (
            child.word_stack is None or reads_other_words or parent.word_stack != child.word_stack
        )
        plates = tuple(dict.fromkeys([*child.plates, *parent.plates]))
        sliced = (SLICE,) if child.slice is not None else ()
        word = (WORD,) if child.word_stack is not None else ()
        axes_by_pair.append((*sliced, *plates, *word, *((READ,) if reads else ())))
    union = max(axes_by_pair, key=len)
    if all(axes in (union, tuple(axis for axis in union if axis != READ)) for axes in axes_by_pair):
        return union  # the source of an arrow from the same word is this word
    if len(set(axes_by_pair)) > 1:
        actual = " and ".join(map(str, dict.fromkeys(axes_by_pair)))
        raise BNetError("at", expected="arrows with the same axes in all slices", actual=actual)
    return axes_by_pair[0]


def _build_path_cells(model: GroundModel, at: str, steps: Sequence[RoleArrows]) -> PatchCells:
    """A cell for every ground path along some roles."""
    first = dict.fromkeys(source for _, _, sources, _ in steps[0] for source in sources.tolist())
    chains: list[tuple[int, ...]] = [(source,) for source in first]
    for step in steps:
        next_nodes: dict[int, list[int]] = {}
        for _, _, sources, targets in step:
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                next_nodes.setdefault(source, []).append(target)
        _check_path_memory(at, sum(len(next_nodes.get(path[-1], ())) for path in chains))
        chains = [(*path, target) for path in chains for target in next_nodes.get(path[-1], ())]
    paths = [NodePath(k, nodes) for k, nodes in enumerate(chains)]
    if not paths:
        raise BNetError(f"at {at!r}: the ground graph has no path along these roles")
    names = {r.cell: join_path(map(model.ground.name, r.nodes)) for r in paths}
    positions = {"path": tuple(range(len(paths)))}
    return PatchCells(at, ("path",), positions, {"path": tuple(names.values())}, names, paths=tuple(paths))


def _check_path_memory(at: str, count: int) -> None:
    """Raise an error if the arrows or paths do not fit in memory."""
    check_memory(f"at {at!r}", PATH_BYTES * count, "a shorter sentence, or at=[...] with fewer paths")


def parse_path(model: GroundModel, text: str) -> tuple[int, ...]:
    """Parse a path of names, `"v_0_0_1 -> a_0_0_3"`, into ground ids; each step must be an arrow."""
    nodes = tuple(model.ground.id(name) for name in split_path(text))
    for parent, child in itertools.pairwise(nodes):
        if parent not in model.ground.parents(child):
            names = f"{model.ground.name(parent)} -> {model.ground.name(child)}"
            allowed = ", ".join(map(model.ground.name, model.ground.parents(child)[:6])) or "it has no parent"
            raise BNetError(f"path {text!r}", expected="arrows of the bnet", actual=names, allowed=allowed)
    for child in nodes[1:]:
        check_path_node(model, child)
    return nodes


def match_arrows(model: GroundModel, text: str) -> list[tuple[int, ...]]:
    """The ground arrows between the nodes of two patterns, `"v_0_1_* -> a_0_1_*"`."""
    parents, children = (find_family(model.ground, pattern).nodes for pattern in split_path(text))
    allowed = set(parents)
    arrows: list[tuple[int, ...]] = [
        (parent, child) for child in children for parent in model.ground.parents(child) if parent in allowed
    ]
    if not arrows:
        raise BNetError(f"path {text!r}", expected="arrows of the bnet", actual="no arrow between nodes of these names")
    for child in {arrow[-1] for arrow in arrows}:
        check_path_node(model, child)
    return arrows


def find_arrow_roles(model: GroundModel, *, is_real: bool = False) -> list[str]:
    """All arrows of roles (`"v -> a"`) along which a value can be patched, in the order of the declaration.

    The child is a function of its parents, and the parent has a value in both runs. With `is_real`, the nodes also have
    real values, which have gradients.
    """
    specs, ground, arrows = model.network.specs, model.ground, dict[tuple[str, str], bool]()
    with_rows = {ground.group_of(node).index for node in model.attention_rows}
    for edge in ground.template.edges:
        parent, child = specs[edge.parent], specs[edge.child]
        has_value = not parent.tpm.is_random or set(ground.select_nodes(parent.group).tolist()) <= model.do.keys()
        has_value &= not child.tpm.is_random and edge.child not in with_rows
        has_value &= not (is_real and (is_index_valued(parent) or is_index_valued(child)))
        roles = parent.group.stem, child.group.stem
        arrows[roles] = arrows.get(roles, True) and has_value
    return [join_path(roles) for roles, has_value in arrows.items() if has_value and ground.count_arrows(roles=roles)]


def check_path_node(model: GroundModel, child: int) -> None:
    """Raise an error for a path to a node that is not a function of its parents."""
    spec = model.network.specs[model.ground.group_of(child).index]
    if spec.tpm.is_random or child in model.attention_rows:
        is_set = child in model.attention_rows
        actual = "a node whose row of attention is set" if is_set else f"a {spec.tpm.kind} node"
        raise BNetError(
            f"path to {model.ground.name(child)}",
            expected="nodes that are functions of their parents",
            actual=actual,
            hint="End the path at a parent of this node; the run continues from there",
        )

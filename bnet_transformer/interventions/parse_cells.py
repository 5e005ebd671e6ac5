"""Parse `at=` and `over=` into cells of nodes, rows, arrows, paths and edges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace

import numpy as np

from bnet_transformer._core.checks import check_sequence
from bnet_transformer._core.naming import ARROW, WORD, join_path, match_names, split_entries, split_path
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.graph import NodeGroup, count_from_start, find_family
from bnet_transformer.interventions.cells import (
    EdgeCells,
    NodePath,
    PatchCells,
    PatchSites,
    build_arrow_cells,
    build_role_cells,
    check_patchable,
    count_entries,
    find_arrow_roles,
    find_row_groups,
    join_edge_cells,
    label_positions,
    match_arrows,
    parse_path,
    select_axes,
)
from bnet_transformer.interventions.edges import EDGES, EdgeStructure
from bnet_transformer.interventions.examples import Examples
from bnet_transformer.interventions.sweep_results import CellGrid
from bnet_transformer.reference import GroundModel

# --------------------------------------------------------------------------------------------------------------------
# Cells of edges: each cell sets one edge from a writer to a reader, at all words or at one word of the reader.


EDGE = "edge"


def build_structure(base: Examples, source: Examples | None, outcome_nodes: Sequence[int]) -> EdgeStructure:
    """The edges between two runs; nothing passes through a group of which `do` sets all nodes.

    Raises:
        BNetError: A recurrent group depends on the words, so that it is no sum of writers.
    """
    model, leaves = base.model, set[int]()
    for side in (base, source or base):
        by_group = side.model.ground.split_by_group(list(side.model.do))
        shapes = side.model.ground.shapes
        leaves |= {index for index, nodes in by_group.items() if len(nodes) == math.prod(shapes[index])}
    outcomes = sorted({model.ground.group_of(node).index for node in outcome_nodes})
    key = "edges", tuple(outcomes), frozenset(leaves)
    structure = base.module.memoize(key, lambda: EdgeStructure(model.network, tuple(outcomes), frozenset(leaves)))
    structure.check_not_recurrent()
    if not len(structure.edges):
        raise BNetError("edges: no edge leads from a writer to the metric")
    return structure


def build_edge_cells(
    examples: Examples, structure: EdgeStructure, names: Sequence[str] | None, over: object, *, is_strict: bool = True
) -> PatchCells:
    """A cell for each edge, or for each edge and word of its reader with `over="word"`.

    Args:
        examples: The sentences that are patched.
        structure: The edges.
        names: The names of some edges; None for all.
        over: The further axes along which cells are separate: None or `"word"`.
        is_strict: Whether other axes are an error.
    """
    table, edges, edge_labels = structure.edges, np.arange(len(structure.edges)), structure.edges.names
    if names is not None:
        edges = np.array([k for name in names for k in _find_known_edges(structure, name)], dtype=np.int64)
        edge_labels = tuple(table.names[k] for k in edges.tolist())
    at = EDGES if names is None or len(names) > 1 else names[0]
    axes = (EDGE, *select_axes(over, (), (WORD,), is_strict=is_strict))
    labels = {EDGE: edge_labels}
    positions = {EDGE: tuple(range(len(edges)))}
    if WORD not in axes:
        cells = np.arange(len(edges))
        by_cell = dict(enumerate(labels[EDGE]))
        named = frozenset() if names is None else frozenset(by_cell)
        return PatchCells(at, axes, positions, labels, by_cell, edges=EdgeCells(structure, cells, edges), named=named)
    readers = [structure.reader_groups[r].target for r in table.readers[edges].tolist()]
    counts = [examples.model.ground.count_words(spec.group.index) for spec in readers]
    positions[WORD] = tuple(range(max(counts)))
    stacks = {spec.group.word_stack for spec in readers if spec.group.word_stack is not None}
    labels[WORD] = tuple(map(str, positions[WORD]))
    if len(stacks) == 1:
        labels |= label_positions(examples, {WORD: positions[WORD]}, {WORD: stacks.pop()})
    pairs = [(k, word) for k, count in enumerate(counts) for word in range(count)]
    number, word = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    cells = number * len(positions[WORD]) + word
    names_by_cell = {
        int(cell): _add_word(labels[EDGE][k], i) if readers[k].group.word_stack is not None else labels[EDGE][k]
        for cell, (k, i) in zip(cells, pairs, strict=True)
    }
    by_word = EdgeCells(structure, cells, edges[number], word)
    named = frozenset() if names is None else frozenset(names_by_cell)
    return PatchCells(at, axes, positions, labels, names_by_cell, edges=by_word, named=named)


def match_edges(structure: EdgeStructure, pattern: str) -> list[int]:
    """The numbers of the edges of a name or a pattern, `"a_0_* -> y"`; none if there are no such edges."""
    known = structure.edges.numbers
    name = join_path(split_path(pattern))
    return [known[edge] for edge in ([name] if name in known else match_names(name, known))]


def _find_known_edges(structure: EdgeStructure, pattern: str) -> list[int]:
    """The numbers of the edges of a name or a pattern; an error if there are none."""
    matches = match_edges(structure, pattern)
    if not matches:
        hint = "An edge leads from a writer to a reader after it, such as 'a_0_1 -> q_1_0'; net.edges() lists them"
        raise unknown_name_error("edge", pattern, structure.edges.names, hint=hint)
    return matches


def _add_word(name: str, word: int) -> str:
    """The name of an edge at one word of its reader: `"x_0 -> q_0_1_3"`, `"x_0 -> a_0_1_3<k>"`."""
    stem, mark, channel = name.partition("<")
    return f"{stem}_{word}{mark}{channel}"


# --------------------------------------------------------------------------------------------------------------------
# Parse `at=` and `over=` into cells.
#
# `at` is a role ("x"), rows of attention ("j"), an arrow or a path of roles ("v -> a"), `"arrows"` for all arrows of
# roles, a list of all these and of names, patterns and paths of names, or a mapping from the name of a cell to the
# names and patterns of its nodes. `over` names the axes along which cells are separate.


ALL_ARROWS = "arrows"
AT_FORMS = (
    'a role ("x"), an arrow of roles ("v -> a"), "arrows", a list of these and of names, patterns and paths of names, '
    "or a mapping from the name of a cell to its nodes"
)


def parse_cells(
    examples: Examples, at: object, over: object, find_edges: Callable[[], EdgeStructure], *, is_real: bool = False
) -> PatchCells:
    """Parse `at=` and `over=` into cells.

    Args:
        examples: The sentences that are patched.
        at: The nodes, arrows, paths or edges that cells set.
        over: The axes along which cells are separate.
        find_edges: A function that returns the edges of the net; it is called only if an item of `at` can be an edge.
        is_real: Whether `"arrows"` are those between nodes with real values, which have gradients.
    """
    model = examples.model
    if isinstance(at, str) and not _is_keyword(model, at, ALL_ARROWS):
        if _is_keyword(model, at, EDGES):
            return build_edge_cells(examples, find_edges(), None, over)
        if _is_edge_item(model, at, find_edges):
            return build_edge_cells(examples, find_edges(), [at], over)
        return (build_arrow_cells if ARROW in at else build_role_cells)(examples, at, over)
    if isinstance(at, Mapping) and at:
        if over is not None:
            raise BNetError("over", expected="None, because at= is a mapping of cells", actual=over)
        return _build_pattern_cells(model, [(str(name), _parse_patterns(name, at[name])) for name in at])
    items = [at] if isinstance(at, str) else at
    if not isinstance(items, Sequence) or not items or not all(isinstance(item, str) for item in items):
        raise BNetError("at", expected=AT_FORMS, actual=at)
    expanded: list[str] = []
    for item in items:
        expanded += find_arrow_roles(model, is_real=is_real) if _is_keyword(model, item, ALL_ARROWS) else [item]
    at = at if isinstance(at, str) else "cells"
    return _build_list_cells(examples, list(dict.fromkeys(expanded)), over, at, find_edges)


def _is_keyword(model: GroundModel, item: str, keyword: str) -> bool:
    """True for `"arrows"` or `"edges"`, unless it is the name of a role."""
    return item == keyword and item not in model.network.graph.by_stem


def _can_be_edge(model: GroundModel, item: str) -> bool:
    """True for the form of a name or a pattern of edges, `"a_0_1 -> q_2_3"` or `"a_0_* -> y"`: nodes without word."""
    names = split_path(item)
    graph = model.network.graph
    if len(names) != 2:
        return False
    complete = [_find_complete_groups(model, name) for name in names]
    if any(group.word_stack is not None for groups in complete for group in groups):
        return False
    if any("*" in name for name in names):
        return not all(complete)
    if all(name in graph.by_stem for name in names):  # a role with one node may also be a writer or a reader
        stems = ((graph.groups[edge.parent].stem, graph.groups[edge.child].stem) for edge in graph.edges)
        return tuple(names) not in set(stems) and all(_is_edge_end(model, name) for name in names)
    return any(_is_edge_end(model, name) for name in names)


def _find_complete_groups(model: GroundModel, name: str) -> list[NodeGroup]:
    """The groups of the nodes that a name or a pattern matches without a missing index."""
    graph = model.network.graph
    matches = graph.match_groups(name, model.ground.word_counts)
    return [group for group, _ in matches if graph.has_all_indices(name, group)]


def _is_edge_end(model: GroundModel, name: str) -> bool:
    """True for the name of a writer or a reader: a node of which only the word is missing, or that has none."""
    end = name.partition("<")[0]
    return bool(_find_complete_groups(model, end) or _find_complete_groups(model, f"{end}_0"))


def _is_role(model: GroundModel, item: str) -> bool:
    """True for a role, rows of attention, or an arrow or a path of roles."""
    stems = model.network.graph.by_stem
    if ARROW in item:
        return all(name in stems for name in split_path(item))
    return item in stems or item in find_row_groups(model)


def _build_list_cells(
    examples: Examples, items: Sequence[str], over: object, at: str, find_edges: Callable[[], EdgeStructure]
) -> PatchCells:
    """The cells of all items along one axis, `"cell"`; a cell of several items occurs once."""
    model, names = examples.model, dict[str, int]()
    sites, paths, parts = list[PatchSites](), list[NodePath](), dict[str, CellGrid]()
    edges, named = list[EdgeCells](), set[int]()
    edge_items = {item for item in items if _is_edge_item(model, item, find_edges)}
    structure = find_edges() if edge_items else None
    for item in items:
        if structure is not None and item in edge_items:
            chosen = None if _is_keyword(model, item, EDGES) else [item]
            cells = build_edge_cells(examples, structure, chosen, over, is_strict=False)
        else:
            cells = _parse_item(examples, item, over)
        parts[item] = cells.grid
        is_new = {cell: name not in names for cell, name in cells.names.items()}
        ids = {cell: names.setdefault(name, len(names)) for cell, name in cells.names.items()}
        named |= {ids[cell] for cell in cells.named}
        table = np.full(max(ids) + 1, -1)
        table[list(ids)] = [ids[cell] if is_new[cell] else -1 for cell in ids]
        for part in cells.sites:
            new = part.select(table[part.cells] >= 0)
            sites.append(replace(new, cells=table[new.cells]))
        paths += [NodePath(int(table[path.cell]), path.nodes) for path in cells.paths if is_new[path.cell]]
        if cells.edges is not None:
            edges.append(cells.edges.renumber_cells(table))
    _check_over(model, items, edge_items, parts, over)
    labels = {"cell": tuple(names)}
    positions = {"cell": tuple(range(len(names)))}
    remaining = tuple(part for part in sites if len(part.cells))
    by_cell = {cell: name for name, cell in names.items()}
    sets = remaining, tuple(paths), join_edge_cells(edges)
    return PatchCells(at, ("cell",), positions, labels, by_cell, *sets, parts, named=frozenset(named))


def _is_edge_item(model: GroundModel, item: str, find_edges: Callable[[], EdgeStructure]) -> bool:
    """True for `"edges"`, and for a name or a pattern of edges that does not match arrows between nodes only."""
    if _is_keyword(model, item, EDGES):
        return True
    if not _can_be_edge(model, item):
        return False
    with suppress(BNetError):  # a net without edges, such as a recurrent one, can have these arrows
        if match_edges(find_edges(), item):
            return True
    try:
        match_arrows(model, item)
    except BNetError:  # neither: the error is that of an unknown edge
        return True
    return False


def _parse_item(examples: Examples, item: str, over: object) -> PatchCells:
    """The cells of one item of a list: those of a role, or one cell for names, patterns and paths."""
    if not _is_role(examples.model, item):
        ends = [count_from_start(examples.model.ground, end.replace(" ", "")) for end in split_path(item)]
        name = join_path(ends) if ends != split_path(item) else item
        return _build_pattern_cells(examples.model, [(name, [item])])
    build = build_arrow_cells if ARROW in item else build_role_cells
    return build(examples, item, over, is_strict=False)


def _check_over(
    model: GroundModel, items: Sequence[str], edge_items: Set[str], parts: Mapping[str, CellGrid], over: object
) -> None:
    """Raise an error for axes that no item of the list has."""
    if over is None:
        return
    if not any(_is_role(model, item) or item in edge_items for item in items):
        raise BNetError("over", expected="None, because at= is a list of cells without a role", actual=over)
    known = dict.fromkeys(axis for grid in parts.values() for axis in grid.axes)
    for axis in check_sequence("over", [over] if isinstance(over, str) else over, str):
        if axis not in known:
            raise BNetError("over", expected="axes of a role in at=", actual=axis)


def _parse_patterns(name: object, patterns: object) -> Sequence[str]:
    """The names and patterns of the nodes of one cell of a mapping."""
    nodes = check_sequence(f"at[{name!r}]", patterns, str)
    paths = [pattern for pattern in nodes if ARROW in pattern]
    if not nodes or paths:
        expected = "names and patterns of nodes; a path is a separate cell"
        raise BNetError(f"at[{name!r}]", expected=expected, actual=paths[0] if paths else "no node")
    return nodes


def _build_pattern_cells(model: GroundModel, named_patterns: Sequence[tuple[str, Sequence[str]]]) -> PatchCells:
    """One cell for each name, with the nodes of its patterns, the path, or the arrows of a pattern."""
    by_group: dict[tuple[int, bool], set[tuple[int, int, int]]] = {}
    paths = []
    for cell, (_, patterns) in enumerate(named_patterns):
        for pattern in patterns:
            if ARROW in pattern:
                paths += [NodePath(cell, nodes) for nodes in _parse_paths(model, pattern)]
                continue
            name, entries = split_entries(pattern)
            for node in find_family(model.ground, name).nodes:
                group = model.ground.group_of(node).index
                index, key = node - int(model.ground.offsets[group]), (group, entries is not None)
                by_group.setdefault(key, set()).update((cell, index, entry) for entry in entries or (-1,))
    sites = []
    for (group, has_entries), triples in sorted(by_group.items()):
        spec = model.network.specs[group]
        check_patchable(model, spec)
        if has_entries:  # the entries of nodes that the cell sets
            triples -= {triple for triple in triples if (*triple[:2], -1) in by_group.get((group, False), ())}
        if not triples:
            continue
        cells, nodes, entries = np.array(sorted(triples), dtype=np.int64).T
        if has_entries and entries.max() >= count_entries(spec):
            expected = f"entries from 0 to {count_entries(spec) - 1}"
            raise BNetError(f"at {spec.group.name}", expected=expected, actual=int(entries.max()))
        sites.append(PatchSites(group, cells, nodes, entries=entries if has_entries else None))
    names = {cell: name for cell, (name, _) in enumerate(named_patterns)}
    positions, labels = {"cell": tuple(names)}, {"cell": tuple(names.values())}
    sets = tuple(sites), tuple(paths)
    return PatchCells("cells", ("cell",), positions, labels, names, *sets, named=frozenset(names))


def _parse_paths(model: GroundModel, text: str) -> list[tuple[int, ...]]:
    """The path of names, or the ground arrows between nodes of two patterns, `"v_0_1_* -> a_0_1_*"`."""
    template, counts, names = model.ground.template, model.ground.word_counts, split_path(text)
    is_exact = len(names) > 2 or all(template.parse_name(name, counts) is not None for name in names)
    return [parse_path(model, text)] if is_exact else match_arrows(model, text)

"""Cells of a sweep: groups of nodes, rows of attention, arrows or paths that are patched together.

A cell has a name, and a position along each axis of the result. `at` is a role ("x"), rows of attention ("j"), an arrow
or a path of roles ("v -> a"), a list of names, patterns and paths of names, or a mapping from the name of a cell to the
names and patterns of its nodes; `over` names the axes along which cells are separate.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bnet_transformer._core.arrays import IntArray
from bnet_transformer._core.checks import check_sequence
from bnet_transformer._core.memory import check_memory
from bnet_transformer._core.naming import SLICE, WORD, split_name
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.graph import NodeGroup
from bnet_transformer.graph.transformer_lens import get_attention_name, unknown_node_error
from bnet_transformer.inference.intervention_values import match_nodes
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.reference import GroundModel
from bnet_transformer.reference.node_tables import compute_read_mask
from bnet_transformer.tpm import Attention

READ = "read"
ARROW = "->"
PATH_BYTES = 2_500  # memory of one path: its name, its nodes, the values along it
RoleArrows = list[tuple[NodeGroup, NodeGroup, IntArray, IntArray]]  # parent, child, and the ids of both ends


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


@dataclass(frozen=True)
class NodePath:
    """A path of ground nodes along which a cell transmits the clean value of the first node; the cell sets the last."""

    cell: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class PatchCells:
    """The cells of a sweep: the axes of the result, their positions and labels, and the nodes that each cell sets.

    `names` contains the name of each cell, by its index in the flattened axes. A grid position without a name is not a
    cell.
    """

    at: str
    axes: tuple[str, ...]
    positions: Mapping[str, tuple[int, ...]]
    labels: Mapping[str, tuple[str, ...]]
    names: Mapping[int, str] = field(repr=False)
    sites: tuple[PatchSites, ...] = field(default=(), repr=False)
    paths: tuple[NodePath, ...] = field(default=(), repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of positions along each axis."""
        return tuple(len(self.positions[axis]) for axis in self.axes)

    def get_patched_nodes(self, model: GroundModel) -> list[int]:
        """Ground ids of the nodes that cells set, without the ends of paths."""
        offsets = model.ground.offsets
        return [int(offsets[sites.group]) + int(node) for sites in self.sites for node in np.unique(sites.nodes)]

    def to_result_fields(self) -> dict[str, Any]:
        """The fields of `CellResult` that describe the cells."""
        names = {tuple(map(int, np.unravel_index(k, self.shape))): name for k, name in self.names.items()}
        return {"at": self.at, "axes": self.axes, "labels": self.labels, "positions": self.positions, "names": names}

    @property
    def cell_ids(self) -> IntArray:
        """The indices of the cells that exist; an arrow that a mask excludes is not a cell."""
        return np.array(sorted(self.names), dtype=np.int64)


def parse_cells(examples: Examples, at: object, over: object) -> PatchCells:
    """Parse `at=` and `over=` into cells."""
    if isinstance(at, str):
        return (build_arrow_cells if ARROW in at else build_role_cells)(examples, at, over)
    if over is not None:
        raise BNetError("over", expected="None, because at= is a list of cells", actual=over)
    if isinstance(at, Mapping) and at:
        return _build_pattern_cells(examples.model, [(str(name), _parse_patterns(name, at[name])) for name in at])
    if not isinstance(at, Sequence) or not at or not all(isinstance(item, str) for item in at):
        forms = (
            'a role ("x"), an arrow of roles ("v -> a"), a list of names, patterns and paths of names, or a mapping '
        )
        raise BNetError("at", expected=forms + "from the name of a cell to its nodes", actual=at)
    return _build_pattern_cells(examples.model, [(pattern, [pattern]) for pattern in at])


def _parse_patterns(name: object, patterns: object) -> Sequence[str]:
    """The names and patterns of the nodes of one cell of a mapping."""
    nodes = check_sequence(f"at[{name!r}]", patterns, str)
    paths = [pattern for pattern in nodes if ARROW in pattern]
    if not nodes or paths:
        expected = "names and patterns of nodes; a path is a separate cell"
        raise BNetError(f"at[{name!r}]", expected=expected, actual=paths[0] if paths else "no node")
    return nodes


def _build_pattern_cells(model: GroundModel, named_patterns: Sequence[tuple[str, Sequence[str]]]) -> PatchCells:
    """One cell for each name, with the nodes of its patterns or the path."""
    by_group: dict[int, list[tuple[int, int]]] = {}
    paths = []
    for cell, (_, patterns) in enumerate(named_patterns):
        for pattern in patterns:
            if ARROW in pattern:
                paths.append(NodePath(cell, parse_path(model, pattern)))
                continue
            for node in match_nodes(model.ground, pattern):
                group = model.ground.group_of(node).index
                by_group.setdefault(group, []).append((cell, node - int(model.ground.offsets[group])))
    sites = []
    for group, pairs in sorted(by_group.items()):
        check_patchable(model, model.network.specs[group])
        cell, node = np.array(sorted(set(pairs)), dtype=np.int64).T
        sites.append(PatchSites(group, cell, node))
    names = {cell: name for cell, (name, _) in enumerate(named_patterns)}
    positions, labels = {"cell": tuple(names)}, {"cell": tuple(names.values())}
    return PatchCells("cells", ("cell",), positions, labels, names, tuple(sites), tuple(paths))


def build_role_cells(examples: Examples, at: str, over: object) -> PatchCells:
    """A cell for each node of a role, or for all its nodes with the same index along the axes of `over`."""
    model = examples.model
    graph, specs = model.network.graph, model.network.specs
    stem, indices = split_name(at)
    if "*" in at or (indices and stem in graph.by_stem):
        hint = f"Pass names and patterns as a list, at=[{at!r}]"
        raise BNetError("at", expected="a role", actual=at, hint=hint)
    is_attention = at not in graph.by_stem
    known = {**graph.by_stem, **find_attention_groups(model)} if is_attention else graph.by_stem
    if at not in known:
        raise unknown_node_error("at", at, known, graph)
    groups = known[at]
    for group in groups:
        (_check_attention if is_attention else check_patchable)(model, specs[group.index])
    axes_of = [((SLICE,) if group.slice is not None else ()) + tuple(model.ground.axes(group)) for group in groups]
    node_axes = axes_of[0]
    if any(axes != node_axes for axes in axes_of):
        raise BNetError("at", expected="a role whose nodes have the same axes in all slices", actual=at)
    allowed = (*node_axes, READ) if is_attention else node_axes
    axes = select_axes(over, node_axes, allowed)
    read_stack = model.network.get_source_stack(specs[groups[0].index]) if is_attention else None
    words = 0 if read_stack is None else model.ground.word_counts[read_stack]
    grid, patched = [], []
    for group in groups:
        position = _unravel_nodes(model, group, model.ground.select_nodes(group))
        node, read = np.arange(len(position[SLICE])), None
        if READ in axes:
            reads = compute_read_mask(model, specs[group.index])
            selected, read = np.nonzero(reads[position[WORD] if WORD in position else np.zeros_like(node)])
            node, position = node[selected], {axis: index[selected] for axis, index in position.items()} | {READ: read}
        grid.append(position)
        patched.append((group, node, read))
    positions, cell_ids = _number_cells(axes, grid, words)
    sites: list[PatchSites] = []
    names: dict[int, str] = {}
    for (group, node, read), position, cells in zip(patched, grid, cell_ids, strict=True):
        sites.append(PatchSites(group.index, cells, node, is_attention, read))
        values = [position[axis] if axis in axes else None for axis in node_axes]
        for k, cell_id in enumerate(cells.tolist()):  # a star for each index that a cell joins
            if cell_id not in names:
                name = "_".join([at, *("*" if index is None else str(int(index[k])) for index in values)])
                names[cell_id] = name if read is None else f"{name}[{int(read[k])}]"
    labels = _label_positions(examples, positions, {WORD: groups[0].word_stack, READ: read_stack})
    return PatchCells(at, axes, positions, labels, names, tuple(sites))


def find_attention_groups(model: GroundModel) -> dict[str, tuple[NodeGroup, ...]]:
    """The groups whose rows of attention can be set, by the role of the attended word: `j`, `dec_cross_j`."""
    by_role: dict[str, list[NodeGroup]] = {}
    for spec in model.network.specs:
        if spec.has_word_attention and spec.tpm.kind == "deterministic":
            by_role.setdefault(get_attention_name(spec.group), []).append(spec.group)
    return {name: tuple(groups) for name, groups in by_role.items()}


def _check_attention(model: GroundModel, spec: NodeSpec) -> None:
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


def build_arrow_cells(examples: Examples, at: str, over: object) -> PatchCells:
    """A cell for each ground arrow between two roles, or for each ground path along more roles."""
    model = examples.model
    roles = [role.strip() for role in at.split(ARROW)]
    for role in roles:
        if role not in model.network.graph.by_stem:
            raise unknown_node_error("at", role, model.network.graph.by_stem, model.network.graph)
    for pair in itertools.pairwise(roles):
        _check_path_memory(at, model.ground.count_arrows(roles=pair))
    steps = [_find_role_arrows(model, *pair, at) for pair in itertools.pairwise(roles)]
    if len(steps) > 1:
        if over is not None:
            raise BNetError("over", expected="None, because at= is a path", actual=over)
        return _build_path_cells(model, at, steps)
    default = _get_arrow_axes(model, steps[0])
    axes = select_axes(over, default, default)
    grid = []
    for parent, child, sources, targets in steps[0]:
        read = _unravel_nodes(model, parent, sources)
        grid.append(read | _unravel_nodes(model, child, targets) | ({READ: read[WORD]} if WORD in read else {}))
    positions, cell_ids = _number_cells(axes, grid)
    paths: list[NodePath] = []
    names: dict[int, str] = {}
    for cells, (_, _, sources, targets) in zip(cell_ids, steps[0], strict=True):
        for cell_id, source, target in zip(cells.tolist(), sources.tolist(), targets.tolist(), strict=True):
            paths.append(NodePath(cell_id, (source, target)))
            name = f"{model.ground.name(source)} {ARROW} {model.ground.name(target)}"
            names[cell_id] = _join_arrow_names(names.get(cell_id, name), name)
    parent, child = steps[0][0][:2]
    labels = _label_positions(examples, positions, {WORD: child.word_stack, READ: parent.word_stack})
    return PatchCells(at, axes, positions, labels, names, paths=tuple(paths))


def _join_arrow_names(first: str, second: str) -> str:
    """The common name of two arrows: a star for each index in which they differ."""
    ends = zip(first.split(f" {ARROW} "), second.split(f" {ARROW} "), strict=True)
    parts = [zip(a.split("_"), b.split("_"), strict=True) for a, b in ends]
    return f" {ARROW} ".join("_".join(a if a == b else "*" for a, b in indices) for indices in parts)


def _find_role_arrows(model: GroundModel, parent_role: str, child_role: str, at: str) -> RoleArrows:
    """The ground arrows from one role to another, by pair of node groups."""
    groups = model.network.graph.groups
    arrows: RoleArrows = []
    for edge, sources, targets in model.ground.arrows():
        parent, child = groups[edge.parent], groups[edge.child]
        if (parent.stem, child.stem) == (parent_role, child_role) and len(sources):
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
    names = {r.cell: f" {ARROW} ".join(map(model.ground.name, r.nodes)) for r in paths}
    positions = {"path": tuple(range(len(paths)))}
    return PatchCells(at, ("path",), positions, {"path": tuple(names.values())}, names, paths=tuple(paths))


def _check_path_memory(at: str, count: int) -> None:
    """Raise an error if the arrows or paths do not fit in memory."""
    check_memory(f"at {at!r}", PATH_BYTES * count, "a shorter sentence, or at=[...] with fewer paths")


def parse_path(model: GroundModel, text: str) -> tuple[int, ...]:
    """Parse a path of names, `"v_0_0_1 -> a_0_0_3"`, into ground ids; each step must be an arrow."""
    nodes = tuple(model.ground.id(name.strip()) for name in text.split(ARROW))
    for parent, child in itertools.pairwise(nodes):
        if parent not in model.ground.parents(child):
            names = f"{model.ground.name(parent)} -> {model.ground.name(child)}"
            allowed = ", ".join(map(model.ground.name, model.ground.parents(child)[:6])) or "it has no parent"
            raise BNetError(f"path {text!r}", expected="arrows of the bnet", actual=names, allowed=allowed)
    for child in nodes[1:]:
        check_path_node(model, child)
    return nodes


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


def _unravel_nodes(model: GroundModel, group: NodeGroup, nodes: IntArray) -> dict[str, IntArray]:
    """The index of nodes of a group along each of its axes, and its slice (-1 outside of slices): `[node]` each."""
    index = np.unravel_index(nodes - int(model.ground.offsets[group.index]), model.ground.shapes[group.index] or (1,))
    position = {axis: np.asarray(i, dtype=np.int64) for axis, i in zip(model.ground.axes(group), index, strict=False)}
    return position | {SLICE: np.full(len(nodes), -1 if group.slice is None else group.slice)}


def select_axes(over: object, default: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Validate `over=`: the axes along which cells are separate, in the order of `allowed`."""
    if over is None:
        return default
    axes = check_sequence("over", [over] if isinstance(over, str) else over, str)
    for axis in axes:
        if axis not in allowed:
            raise unknown_name_error("over", axis, allowed)
    return tuple(axis for axis in allowed if axis in axes)


def _number_cells(
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


def _label_positions(
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

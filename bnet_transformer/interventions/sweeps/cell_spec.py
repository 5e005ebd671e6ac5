"""Cells: what a sweep sets, each a number of nodes (or rows of attention) that are set together, or paths.

A cell has a place along each axis of the result, and a name. `at` is a role ("x"), rows of attention ("j"), an arrow or
a path of roles ("v -> a"), or a list of names, patterns and paths of names; `over` names the axes that stay apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.checks import check_sequence
from bnet_transformer._core.memory import check_memory
from bnet_transformer._core.naming import SLICE, WORD, split_name
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.graph import NodeGroup
from bnet_transformer.inference.intervention_values import match_nodes
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.reference import GroundModel
from bnet_transformer.reference.node_tables import compute_read_mask
from bnet_transformer.tpm import Attention

READ = "read"
ARROW = "->"
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class PatchSites:
    """The nodes of one family that cells set: `node[k]`, its number in the family, for `cell[k]`.

    With `is_attention` it is their `P(j | i)` that is set; `read[k]` is the word of a single entry, or -1 for the whole row.
    """

    group: int
    cells: IntArray
    nodes: IntArray
    is_attention: bool = False
    read_words: IntArray | None = None


@dataclass(frozen=True)
class NodePath:
    """A path of ground nodes that a cell sends a value along, the last of which it sets."""

    cell: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class PatchCells:
    """The cells of a sweep: the axes of the result, what stands along them, and what each cell sets."""

    at: str
    axes: tuple[str, ...]
    positions: Mapping[str, tuple[int, ...]]
    labels: Mapping[str, tuple[str, ...]]
    names: Mapping[int, str] = field(repr=False)
    sites: tuple[PatchSites, ...] = field(default=(), repr=False)
    paths: tuple[NodePath, ...] = field(default=(), repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(self.positions[axis]) for axis in self.axes)

    def get_patched_nodes(self, model: GroundModel) -> list[int]:
        """Ground ids of the nodes that cells set, without the ends of paths."""
        offsets = model.ground.offsets
        return [int(offsets[each.group]) + int(node) for each in self.sites for node in np.unique(each.nodes)]

    def to_result_fields(self) -> dict[str, Any]:
        """What a result tells of its cells."""
        names = {tuple(map(int, np.unravel_index(k, self.shape))): name for k, name in self.names.items()}
        return {"at": self.at, "axes": self.axes, "labels": self.labels, "places": self.positions, "names": names}

    @property
    def cell_ids(self) -> IntArray:
        """The cells that there are: an arrow that a mask lacks is none."""
        return np.array(sorted(self.names), dtype=np.int64)


def parse_cells(examples: Examples, at: object, over: object) -> PatchCells:
    """The cells that `at=` and `over=` stand for."""
    if isinstance(at, str):
        return (build_arrow_cells if ARROW in at else build_role_cells)(examples, at, over)
    if not isinstance(at, Sequence) or not at or not all(isinstance(each, str) for each in at):
        forms = 'a role ("x"), an arrow of roles ("v -> a"), or a list of names, patterns and paths of names'
        raise BNetError("at", expected=forms, actual=at)
    if over is not None:
        raise BNetError("over", expected="none, for a list of cells", actual=over)
    return _build_pattern_cells(examples.model, at)


def _build_pattern_cells(model: GroundModel, patterns: Sequence[str]) -> PatchCells:
    """One cell for each pattern or path."""
    by_family: dict[int, list[tuple[int, int]]] = {}
    paths = []
    for cell, pattern in enumerate(patterns):
        if ARROW in pattern:
            paths.append(NodePath(cell, parse_path(model, pattern)))
            continue
        for node in match_nodes(model.ground, pattern):
            family = model.ground.group_of(node).index
            by_family.setdefault(family, []).append((cell, node - int(model.ground.offsets[family])))
    entries = []
    for family, pairs in sorted(by_family.items()):
        check_patchable(model, model.network.specs[family])
        cell, node = np.array(sorted(set(pairs)), dtype=np.int64).T
        entries.append(PatchSites(family, cell, node))
    count = tuple(range(len(patterns)))
    places, labels = {"cell": count}, {"cell": tuple(patterns)}
    names = dict(enumerate(patterns))
    return PatchCells("cells", ("cell",), places, labels, names, tuple(entries), tuple(paths))


def build_role_cells(examples: Examples, at: str, over: object) -> PatchCells:
    """A cell for each node of a role, or for each group of them that only the axes of `over` tell apart."""
    world = examples.model
    graph, members = world.network.graph, world.network.specs
    stem, indices = split_name(at)
    if "*" in at or (indices and stem in graph.by_stem):
        raise BNetError("at", expected="a role", actual=at, allowed=f"at=[{at!r}], a list of names and patterns")
    rows = at not in graph.by_stem
    known = {**graph.by_stem, **find_attention_groups(world)} if rows else graph.by_stem
    if at not in known:
        raise unknown_name_error("at", at, known)
    families = known[at]
    for family in families:
        (_check_attention if rows else check_patchable)(world, members[family.index])
    axes_of = [((SLICE,) if each.slice is not None else ()) + tuple(world.ground.axes(each)) for each in families]
    own = axes_of[0]
    if any(axes != own for axes in axes_of):
        raise BNetError("at", expected="a role whose nodes have the same axes in all slices", actual=at)
    allowed = (*own, READ) if rows else own
    axes = select_axes(over, own, allowed)
    read_stack = world.network.get_source_stack(members[families[0].index]) if rows else None
    words = 0 if read_stack is None else world.ground.word_counts[read_stack]
    grid, set_ = [], []
    for family in families:
        place = _unravel_nodes(world, family, world.ground.select_nodes(family))
        node, read = np.arange(len(place[SLICE])), None
        if READ in axes:
            reads = compute_read_mask(world, members[family.index])
            which, read = np.nonzero(reads[place[WORD] if WORD in place else np.zeros_like(node)])
            node, place = node[which], {axis: index[which] for axis, index in place.items()} | {READ: read}
        grid.append(place)
        set_.append((family, node, read))
    sizes, numbers = _number_cells(axes, grid, words)
    entries: list[PatchSites] = []
    names: dict[int, str] = {}
    for (family, node, read), place, cell in zip(set_, grid, numbers, strict=True):
        entries.append(PatchSites(family.index, cell, node, rows, read))
        shown = [place[axis] if axis in axes else None for axis in own]
        for k, number in enumerate(cell.tolist()):  # a star for each index that a cell joins
            if number not in names:
                name = "_".join([at, *("*" if each is None else str(int(each[k])) for each in shown)])
                names[number] = name if read is None else f"{name}[{int(read[k])}]"
    labels = _label_positions(examples, sizes, {WORD: families[0].word_stack, READ: read_stack})
    return PatchCells(at, axes, sizes, labels, names, tuple(entries))


def find_attention_groups(model: GroundModel) -> dict[str, tuple[NodeGroup, ...]]:
    """The families whose rows of attention can be set, by how the word that they read is called: `j`, `dec_cross_j`."""
    found: dict[str, list[NodeGroup]] = {}
    for member in model.network.specs:
        if member.has_word_attention and member.tpm.kind == "deterministic":
            family = member.group
            role = {"a": "j", "x": "j"}.get(family.role, f"{family.role.removesuffix('_a')}_j")
            found.setdefault(f"{family.stack}_{role}" if family.stack else role, []).append(family)
    return {name: tuple(families) for name, families in found.items()}


def _check_attention(model: GroundModel, spec: NodeSpec) -> None:
    plain = isinstance(spec.tpm, Attention) and not any(given.pick for given in spec.parents)
    values = [given for given in spec.parents if given.slot == "v."]
    if not plain or not values or values[0].over != (WORD,):
        wanted = "families that mix by an Attention over words, without picks"
        raise BNetError(f"at {spec.group.name}", expected=wanted, actual=type(spec.tpm).__name__)
    if isinstance(spec.tpm, Attention) and spec.tpm.normaliser.kind != "softmax":
        raise BNetError(f"at {spec.group.name}", expected="attention P(j | i)", actual=spec.tpm.no_attention_reason())


PATH_BYTES = 2_500  # of one path while it is swept: its name, its nodes, the values that it carries


def build_arrow_cells(examples: Examples, at: str, over: object) -> PatchCells:
    """A cell for each ground arrow between two roles, or for each path of several."""
    world = examples.model
    roles = [role.strip() for role in at.split(ARROW)]
    for role in roles:
        if role not in world.network.graph.by_stem:
            raise unknown_name_error("at", role, world.network.graph.by_stem)
    for pair in itertools.pairwise(roles):
        _check_path_memory(at, world.ground.count_arrows(roles=pair))
    steps = [_find_role_arrows(world, *pair, at) for pair in itertools.pairwise(roles)]
    if len(steps) > 1:
        if over is not None:
            raise BNetError("over", expected="none, for paths", actual=over)
        return _build_path_cells(world, at, steps)
    default = _get_arrow_axes(world, steps[0])
    axes = select_axes(over, default, default)
    grid = []
    for parent, child, sources, targets in steps[0]:
        theirs = _unravel_nodes(world, parent, sources)
        grid.append(theirs | _unravel_nodes(world, child, targets) | ({READ: theirs[WORD]} if WORD in theirs else {}))
    sizes, numbers = _number_cells(axes, grid)
    paths: list[NodePath] = []
    names: dict[int, str] = {}
    for cell, (_, _, sources, targets) in zip(numbers, steps[0], strict=True):
        for number, source, target in zip(cell.tolist(), sources.tolist(), targets.tolist(), strict=True):
            paths.append(NodePath(number, (source, target)))
            name = f"{world.ground.name(source)} {ARROW} {world.ground.name(target)}"
            names[number] = _join_arrow_names(names.get(number, name), name)
    parent, child = steps[0][0][:2]
    labels = _label_positions(examples, sizes, {WORD: child.word_stack, READ: parent.word_stack})
    return PatchCells(at, axes, sizes, labels, names, paths=tuple(paths))


def _join_arrow_names(first: str, second: str) -> str:
    """The name of both arrows, a star for each index in which they differ."""
    ends = zip(first.split(f" {ARROW} "), second.split(f" {ARROW} "), strict=True)
    parts = [zip(a.split("_"), b.split("_"), strict=True) for a, b in ends]
    return f" {ARROW} ".join("_".join(a if a == b else "*" for a, b in each) for each in parts)


RoleArrows = list[tuple[NodeGroup, NodeGroup, IntArray, IntArray]]


def _find_role_arrows(model: GroundModel, parent_role: str, child_role: str, at: str) -> RoleArrows:
    """The ground arrows from one role to another, family by family."""
    families = model.network.graph.groups
    found: RoleArrows = []
    for bundle, sources, targets in model.ground.arrows():
        one, other = families[bundle.parent], families[bundle.child]
        if (one.stem, other.stem) == (parent_role, child_role) and len(sources):
            check_patchable(model, model.network.specs[one.index])
            check_path_node(model, int(targets[0]))
            found.append((one, other, sources.astype(np.int64), targets.astype(np.int64)))
    if not found:
        graph, got = model.network.graph, f"no arrow {parent_role} -> {child_role}"
        above = (bundle.parent for family in graph.by_stem[child_role] for bundle in graph.in_edges[family.index])
        own = sorted({families[index].stem for index in above})
        allowed = ", ".join(f"{stem} -> {child_role}" for stem in own) or f"{child_role} has no parent"
        raise BNetError(f"at {at!r}", expected="arrows of the bnet", actual=got, allowed=allowed)
    return found


def _get_arrow_axes(model: GroundModel, arrows: RoleArrows) -> tuple[str, ...]:
    """Slice of the child, plates of both, the word of the child, the word that it reads."""
    own: list[tuple[str, ...]] = []
    for parent, child, _, _ in arrows:
        member = model.network.specs[child.index]
        apart = any(g.reach.kind != "same" for g in member.parents if g.index == parent.index)
        reads = parent.word_stack is not None and (
            child.word_stack is None or apart or parent.word_stack != child.word_stack
        )
        plates = tuple(dict.fromkeys([*child.plates, *parent.plates]))
        sliced = (SLICE,) if child.slice is not None else ()
        word = (WORD,) if child.word_stack is not None else ()
        own.append((*sliced, *plates, *word, *((READ,) if reads else ())))
    if len(set(own)) > 1:
        got = " and ".join(map(str, dict.fromkeys(own)))
        raise BNetError("at", expected="arrows with the same axes in all slices", actual=got)
    return own[0]


def _build_path_cells(model: GroundModel, at: str, steps: Sequence[RoleArrows]) -> PatchCells:
    """Every ground path along some roles."""
    first = dict.fromkeys(source for _, _, sources, _ in steps[0] for source in sources.tolist())
    found: list[tuple[int, ...]] = [(source,) for source in first]
    for step in steps:
        onward: dict[int, list[int]] = {}
        for _, _, sources, targets in step:
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                onward.setdefault(source, []).append(target)
        _check_path_memory(at, sum(len(onward.get(path[-1], ())) for path in found))
        found = [(*path, target) for path in found for target in onward.get(path[-1], ())]
    paths = [NodePath(k, nodes) for k, nodes in enumerate(found)]
    if not paths:
        raise BNetError(f"at {at!r}", expected="paths of the bnet", actual="none")
    names = {r.cell: f" {ARROW} ".join(map(model.ground.name, r.nodes)) for r in paths}
    places = {"path": tuple(range(len(paths)))}
    return PatchCells(at, ("path",), places, {"path": tuple(names.values())}, names, paths=tuple(paths))


def _check_path_memory(at: str, count: int) -> None:
    """Refuse more arrows, or paths, than there is memory for."""
    check_memory(f"at {at!r}", PATH_BYTES * count, "a shorter sentence, or at=[...] with the paths that matter")


def parse_path(model: GroundModel, text: str) -> tuple[int, ...]:
    """The nodes of a path of names, each an arrow from the one before."""
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
    """Refuse a path through a node that is not made of its parents."""
    member = model.network.specs[model.ground.group_of(child).index]
    if member.tpm.is_random or child in model.attention_rows:
        got = "one that reads by a row" if child in model.attention_rows else f"a {member.tpm.kind} one"
        raise BNetError(
            f"path to {model.ground.name(child)}",
            expected="nodes that are functions of their parents",
            actual=got,
            allowed="a path up to its parent: the run goes on from there",
        )


def _unravel_nodes(model: GroundModel, group: NodeGroup, nodes: IntArray) -> dict[str, IntArray]:
    """The index of nodes of a family along each of its axes, and along the slices (-1 outside of them)."""
    at = np.unravel_index(nodes - int(model.ground.offsets[group.index]), model.ground.shapes[group.index] or (1,))
    place = {axis: np.asarray(i, dtype=np.int64) for axis, i in zip(model.ground.axes(group), at, strict=False)}
    return place | {SLICE: np.full(len(nodes), -1 if group.slice is None else group.slice)}


def select_axes(over: object, default: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that stay apart, in their order."""
    if over is None:
        return default
    asked = check_sequence("over", [over] if isinstance(over, str) else over, str)
    for axis in asked:
        if axis not in allowed:
            raise unknown_name_error("over", axis, allowed)
    return tuple(axis for axis in allowed if axis in asked)


def _number_cells(
    axes: Sequence[str], grid: Sequence[Mapping[str, IntArray]], num_words: int = 0
) -> tuple[dict[str, tuple[int, ...]], list[IntArray]]:
    """What stands along each axis, and the numbers of the cells at the places of each family's nodes.

    With `num_words`, so many are along the axis of what is read, be they read or not.
    """
    places = {axis: tuple(np.unique(np.concatenate([place[axis] for place in grid])).tolist()) for axis in axes}
    if READ in places and num_words:
        places[READ] = tuple(range(num_words))
    if not axes:
        return places, [np.zeros(len(place[SLICE]), dtype=np.int64) for place in grid]
    shape = tuple(map(len, places.values()))
    along = [[np.searchsorted(np.array(places[axis]), place[axis]) for axis in axes] for place in grid]
    return places, [np.ravel_multi_index(index, shape).astype(np.int64) for index in along]


def check_patchable(model: GroundModel, spec: NodeSpec) -> None:
    """Refuse nodes that have no value that could be carried over."""
    nodes = model.ground.select_nodes(spec.group).tolist()
    if spec.tpm.is_random and not all(node in model.do for node in nodes):
        names = [m.group.stem for m in model.network.specs if not m.tpm.is_random]
        raise BNetError(
            f"at {spec.group.name}",
            expected="nodes with a value: functions of their parents, or nodes that are set in both runs",
            actual=f"{spec.tpm.kind} ones ({type(spec.tpm).__name__})",
            allowed=f"do({spec.group.name}=...) in both runs; " + ", ".join(dict.fromkeys(names)),
        )


def _label_positions(
    examples: Examples, positions: Mapping[str, tuple[int, ...]], stacks: Mapping[str, str | None]
) -> dict[str, tuple[str, ...]]:
    """What stands along each axis: a word as its token, where all examples have the same."""
    labels = {axis: tuple(map(str, numbers)) for axis, numbers in positions.items()}
    for axis in stacks.keys() & positions.keys():
        said = [tokens.get(stacks[axis] or "", ()) for tokens in examples.tokens]
        each = [{words[i] if i < len(words) else str(i) for words in said} for i in positions[axis]]
        labels[axis] = tuple(w.pop() if len(w) == 1 else str(i) for i, w in zip(positions[axis], each, strict=True))
    return labels

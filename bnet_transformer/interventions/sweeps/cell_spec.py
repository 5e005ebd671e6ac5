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
from bnet_transformer.inference.sentence_state import match_nodes
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.reference import GroundModel, asking
from bnet_transformer.tpm import Attention

READ = "read"
ARROW = "->"
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Entries:
    """The nodes of one family that cells set: `node[k]`, its number in the family, for `cell[k]`.

    With `rows` it is their `P(j | i)` that is set; `read[k]` is the word of a single entry, or -1 for the whole row.
    """

    family: int
    cell: Ids
    node: Ids
    rows: bool = False
    read: Ids | None = None


@dataclass(frozen=True)
class NodePath:
    """A path of ground nodes that a cell sends a value along, the last of which it sets."""

    cell: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Cells:
    """The cells of a sweep: the axes of the result, what stands along them, and what each cell sets."""

    at: str
    axes: tuple[str, ...]
    places: Mapping[str, tuple[int, ...]]
    labels: Mapping[str, tuple[str, ...]]
    names: Mapping[int, str] = field(repr=False)
    entries: tuple[Entries, ...] = field(default=(), repr=False)
    paths: tuple[NodePath, ...] = field(default=(), repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(self.places[axis]) for axis in self.axes)

    def nodes_set(self, world: GroundModel) -> list[int]:
        """Ground ids of the nodes that cells set, without the ends of paths."""
        offsets = world.ground.offsets
        return [int(offsets[each.family]) + int(node) for each in self.entries for node in np.unique(each.node)]

    def described(self) -> dict[str, Any]:
        """What a result tells of its cells."""
        names = {tuple(map(int, np.unravel_index(k, self.shape))): name for k, name in self.names.items()}
        return {"at": self.at, "axes": self.axes, "labels": self.labels, "places": self.places, "names": names}

    @property
    def there(self) -> Ids:
        """The cells that there are: an arrow that a mask lacks is none."""
        return np.array(sorted(self.names), dtype=np.int64)


def cells_of(examples: Examples, at: object, over: object) -> Cells:
    """The cells that `at=` and `over=` stand for."""
    if isinstance(at, str):
        return (of_arrows if ARROW in at else of_role)(examples, at, over)
    if not isinstance(at, Sequence) or not at or not all(isinstance(each, str) for each in at):
        forms = 'a role ("x"), an arrow of roles ("v -> a"), or a list of names, patterns and paths of names'
        raise BNetError("at", expected=forms, actual=at)
    if over is not None:
        raise BNetError("over", expected="none, for a list of cells", actual=over)
    return _listed(examples.world, at)


def _listed(world: GroundModel, patterns: Sequence[str]) -> Cells:
    """One cell for each pattern or path."""
    by_family: dict[int, list[tuple[int, int]]] = {}
    paths = []
    for cell, pattern in enumerate(patterns):
        if ARROW in pattern:
            paths.append(NodePath(cell, named_path(world, pattern)))
            continue
        for node in match_nodes(world.ground, pattern):
            family = world.ground.group_of(node).index
            by_family.setdefault(family, []).append((cell, node - int(world.ground.offsets[family])))
    entries = []
    for family, pairs in sorted(by_family.items()):
        check_value(world, world.network.specs[family])
        cell, node = np.array(sorted(set(pairs)), dtype=np.int64).T
        entries.append(Entries(family, cell, node))
    count = tuple(range(len(patterns)))
    places, labels = {"cell": count}, {"cell": tuple(patterns)}
    names = dict(enumerate(patterns))
    return Cells("cells", ("cell",), places, labels, names, tuple(entries), tuple(paths))


def of_role(examples: Examples, at: str, over: object) -> Cells:
    """A cell for each node of a role, or for each group of them that only the axes of `over` tell apart."""
    world = examples.world
    graph, members = world.network.graph, world.network.specs
    stem, indices = split_name(at)
    if "*" in at or (indices and stem in graph.by_stem):
        raise BNetError("at", expected="a role", actual=at, allowed=f"at=[{at!r}], a list of names and patterns")
    rows = at not in graph.by_stem
    known = {**graph.by_stem, **readers_of(world)} if rows else graph.by_stem
    if at not in known:
        raise unknown_name_error("at", at, known)
    families = known[at]
    for family in families:
        (_check_attention if rows else check_value)(world, members[family.index])
    axes_of = [((SLICE,) if each.slice is not None else ()) + tuple(world.ground.axes(each)) for each in families]
    own = axes_of[0]
    if any(axes != own for axes in axes_of):
        raise BNetError("at", expected="a role whose nodes have the same axes in all slices", actual=at)
    allowed = (*own, READ) if rows else own
    axes = chosen(over, own, allowed)
    read_stack = world.network.get_source_stack(members[families[0].index]) if rows else None
    words = 0 if read_stack is None else world.ground.word_counts[read_stack]
    grid, set_ = [], []
    for family in families:
        place = _place_of(world, family, world.ground.select_nodes(family))
        node, read = np.arange(len(place[SLICE])), None
        if READ in axes:
            reads = asking.compute_read_mask(world, members[family.index])
            which, read = np.nonzero(reads[place[WORD] if WORD in place else np.zeros_like(node)])
            node, place = node[which], {axis: index[which] for axis, index in place.items()} | {READ: read}
        grid.append(place)
        set_.append((family, node, read))
    sizes, numbers = _numbered(axes, grid, words)
    entries: list[Entries] = []
    names: dict[int, str] = {}
    for (family, node, read), place, cell in zip(set_, grid, numbers, strict=True):
        entries.append(Entries(family.index, cell, node, rows, read))
        shown = [place[axis] if axis in axes else None for axis in own]
        for k, number in enumerate(cell.tolist()):  # a star for each index that a cell joins
            if number not in names:
                name = "_".join([at, *("*" if each is None else str(int(each[k])) for each in shown)])
                names[number] = name if read is None else f"{name}[{int(read[k])}]"
    labels = _labels(examples, sizes, {WORD: families[0].word_stack, READ: read_stack})
    return Cells(at, axes, sizes, labels, names, tuple(entries))


def readers_of(world: GroundModel) -> dict[str, tuple[NodeGroup, ...]]:
    """The families whose rows of attention can be set, by how the word that they read is called: `j`, `dec_cross_j`."""
    found: dict[str, list[NodeGroup]] = {}
    for member in world.network.specs:
        if member.has_word_attention and member.tpm.kind == "deterministic":
            family = member.group
            role = {"a": "j", "x": "j"}.get(family.role, f"{family.role.removesuffix('_a')}_j")
            found.setdefault(f"{family.stack}_{role}" if family.stack else role, []).append(family)
    return {name: tuple(families) for name, families in found.items()}


def _check_attention(world: GroundModel, member: NodeSpec) -> None:
    plain = isinstance(member.tpm, Attention) and not any(given.pick for given in member.parents)
    values = [given for given in member.parents if given.slot == "v."]
    if not plain or not values or values[0].over != (WORD,):
        wanted = "families that mix by an Attention over words, without picks"
        raise BNetError(f"at {member.group.name}", expected=wanted, actual=type(member.tpm).__name__)
    if isinstance(member.tpm, Attention) and member.tpm.normaliser.kind != "softmax":
        raise BNetError(
            f"at {member.group.name}", expected="attention P(j | i)", actual=member.tpm.no_attention_reason()
        )


PATH_BYTES = 2_500  # of one path while it is swept: its name, its nodes, the values that it carries


def of_arrows(examples: Examples, at: str, over: object) -> Cells:
    """A cell for each ground arrow between two roles, or for each path of several."""
    world = examples.world
    roles = [role.strip() for role in at.split(ARROW)]
    for role in roles:
        if role not in world.network.graph.by_stem:
            raise unknown_name_error("at", role, world.network.graph.by_stem)
    for pair in itertools.pairwise(roles):
        _check_room(at, world.ground.count_arrows(roles=pair))
    steps = [_between(world, *pair, at) for pair in itertools.pairwise(roles)]
    if len(steps) > 1:
        if over is not None:
            raise BNetError("over", expected="none, for paths", actual=over)
        return _paths(world, at, steps)
    default = _arrow_axes(world, steps[0])
    axes = chosen(over, default, default)
    grid = []
    for parent, child, sources, targets in steps[0]:
        theirs = _place_of(world, parent, sources)
        grid.append(theirs | _place_of(world, child, targets) | ({READ: theirs[WORD]} if WORD in theirs else {}))
    sizes, numbers = _numbered(axes, grid)
    paths: list[NodePath] = []
    names: dict[int, str] = {}
    for cell, (_, _, sources, targets) in zip(numbers, steps[0], strict=True):
        for number, source, target in zip(cell.tolist(), sources.tolist(), targets.tolist(), strict=True):
            paths.append(NodePath(number, (source, target)))
            name = f"{world.ground.name(source)} {ARROW} {world.ground.name(target)}"
            names[number] = _joined_name(names.get(number, name), name)
    parent, child = steps[0][0][:2]
    labels = _labels(examples, sizes, {WORD: child.word_stack, READ: parent.word_stack})
    return Cells(at, axes, sizes, labels, names, paths=tuple(paths))


def _joined_name(one: str, other: str) -> str:
    """The name of both arrows, a star for each index in which they differ."""
    ends = zip(one.split(f" {ARROW} "), other.split(f" {ARROW} "), strict=True)
    parts = [zip(a.split("_"), b.split("_"), strict=True) for a, b in ends]
    return f" {ARROW} ".join("_".join(a if a == b else "*" for a, b in each) for each in parts)


Step = list[tuple[NodeGroup, NodeGroup, Ids, Ids]]


def _between(world: GroundModel, parent: str, child: str, at: str) -> Step:
    """The ground arrows from one role to another, family by family."""
    families = world.network.graph.groups
    found: Step = []
    for bundle, sources, targets in world.ground.arrows():
        one, other = families[bundle.parent], families[bundle.child]
        if (one.stem, other.stem) == (parent, child) and len(sources):
            check_value(world, world.network.specs[one.index])
            check_step(world, int(targets[0]))
            found.append((one, other, sources.astype(np.int64), targets.astype(np.int64)))
    if not found:
        graph, got = world.network.graph, f"no arrow {parent} -> {child}"
        above = (bundle.parent for family in graph.by_stem[child] for bundle in graph.in_edges[family.index])
        own = sorted({families[index].stem for index in above})
        allowed = ", ".join(f"{stem} -> {child}" for stem in own) or f"{child} has no parent"
        raise BNetError(f"at {at!r}", expected="arrows of the bnet", actual=got, allowed=allowed)
    return found


def _arrow_axes(world: GroundModel, step: Step) -> tuple[str, ...]:
    """Slice of the child, plates of both, the word of the child, the word that it reads."""
    own: list[tuple[str, ...]] = []
    for parent, child, _, _ in step:
        member = world.network.specs[child.index]
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


def _paths(world: GroundModel, at: str, steps: Sequence[Step]) -> Cells:
    """Every ground path along some roles."""
    first = dict.fromkeys(source for _, _, sources, _ in steps[0] for source in sources.tolist())
    found: list[tuple[int, ...]] = [(source,) for source in first]
    for step in steps:
        onward: dict[int, list[int]] = {}
        for _, _, sources, targets in step:
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                onward.setdefault(source, []).append(target)
        _check_room(at, sum(len(onward.get(path[-1], ())) for path in found))
        found = [(*path, target) for path in found for target in onward.get(path[-1], ())]
    paths = [NodePath(k, nodes) for k, nodes in enumerate(found)]
    if not paths:
        raise BNetError(f"at {at!r}", expected="paths of the bnet", actual="none")
    names = {r.cell: f" {ARROW} ".join(map(world.ground.name, r.nodes)) for r in paths}
    places = {"path": tuple(range(len(paths)))}
    return Cells(at, ("path",), places, {"path": tuple(names.values())}, names, paths=tuple(paths))


def _check_room(at: str, count: int) -> None:
    """Refuse more arrows, or paths, than there is memory for."""
    check_memory(f"at {at!r}", PATH_BYTES * count, "a shorter sentence, or at=[...] with the paths that matter")


def named_path(world: GroundModel, text: str) -> tuple[int, ...]:
    """The nodes of a path of names, each an arrow from the one before."""
    nodes = tuple(world.ground.id(name.strip()) for name in text.split(ARROW))
    for parent, child in itertools.pairwise(nodes):
        if parent not in world.ground.parents(child):
            names = f"{world.ground.name(parent)} -> {world.ground.name(child)}"
            allowed = ", ".join(map(world.ground.name, world.ground.parents(child)[:6])) or "it has no parent"
            raise BNetError(f"path {text!r}", expected="arrows of the bnet", actual=names, allowed=allowed)
    for child in nodes[1:]:
        check_step(world, child)
    return nodes


def check_step(world: GroundModel, child: int) -> None:
    """Refuse a path through a node that is not made of its parents."""
    member = world.network.specs[world.ground.group_of(child).index]
    if member.tpm.is_random or child in world.attention_rows:
        got = "one that reads by a row" if child in world.attention_rows else f"a {member.tpm.kind} one"
        raise BNetError(
            f"path to {world.ground.name(child)}",
            expected="nodes that are functions of their parents",
            actual=got,
            allowed="a path up to its parent: the run goes on from there",
        )


def _place_of(world: GroundModel, family: NodeGroup, nodes: Ids) -> dict[str, Ids]:
    """The index of nodes of a family along each of its axes, and along the slices (-1 outside of them)."""
    at = np.unravel_index(nodes - int(world.ground.offsets[family.index]), world.ground.shapes[family.index] or (1,))
    place = {axis: np.asarray(i, dtype=np.int64) for axis, i in zip(world.ground.axes(family), at, strict=False)}
    return place | {SLICE: np.full(len(nodes), -1 if family.slice is None else family.slice)}


def chosen(over: object, default: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that stay apart, in their order."""
    if over is None:
        return default
    asked = check_sequence("over", [over] if isinstance(over, str) else over, str)
    for axis in asked:
        if axis not in allowed:
            raise unknown_name_error("over", axis, allowed)
    return tuple(axis for axis in allowed if axis in asked)


def _numbered(
    axes: Sequence[str], grid: Sequence[Mapping[str, Ids]], words: int = 0
) -> tuple[dict[str, tuple[int, ...]], list[Ids]]:
    """What stands along each axis, and the numbers of the cells at the places of each family's nodes.

    With `words`, so many are along the axis of what is read, be they read or not.
    """
    places = {axis: tuple(np.unique(np.concatenate([place[axis] for place in grid])).tolist()) for axis in axes}
    if READ in places and words:
        places[READ] = tuple(range(words))
    if not axes:
        return places, [np.zeros(len(place[SLICE]), dtype=np.int64) for place in grid]
    shape = tuple(map(len, places.values()))
    along = [[np.searchsorted(np.array(places[axis]), place[axis]) for axis in axes] for place in grid]
    return places, [np.ravel_multi_index(index, shape).astype(np.int64) for index in along]


def check_value(world: GroundModel, member: NodeSpec) -> None:
    """Refuse nodes that have no value that could be carried over."""
    nodes = world.ground.select_nodes(member.group).tolist()
    if member.tpm.is_random and not all(node in world.do for node in nodes):
        names = [m.group.stem for m in world.network.specs if not m.tpm.is_random]
        raise BNetError(
            f"at {member.group.name}",
            expected="nodes with a value: functions of their parents, or nodes that are set in both runs",
            actual=f"{member.tpm.kind} ones ({type(member.tpm).__name__})",
            allowed=f"do({member.group.name}=...) in both runs; " + ", ".join(dict.fromkeys(names)),
        )


def _labels(
    examples: Examples, places: Mapping[str, tuple[int, ...]], stacks: Mapping[str, str | None]
) -> dict[str, tuple[str, ...]]:
    """What stands along each axis: a word as its token, where all examples have the same."""
    labels = {axis: tuple(map(str, numbers)) for axis, numbers in places.items()}
    for axis in stacks.keys() & places.keys():
        said = [tokens.get(stacks[axis] or "", ()) for tokens in examples.tokens]
        each = [{words[i] if i < len(words) else str(i) for words in said} for i in places[axis]]
        labels[axis] = tuple(w.pop() if len(w) == 1 else str(i) for i, w in zip(places[axis], each, strict=True))
    return labels

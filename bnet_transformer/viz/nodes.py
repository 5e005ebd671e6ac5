"""The bnet as a grid of nodes: the ground graph (words are columns, slices are rows), or the folded graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bnet_transformer.axes import WORD, join, stem_of
from bnet_transformer.errors import BNetError
from bnet_transformer.graph import Family
from bnet_transformer.network import Network
from bnet_transformer.viz.grid import Grid, Item, Room, Weight
from bnet_transformer.viz.labels import Run, plain, runs, shown, written
from bnet_transformer.viz.picture import Arrow, Box, Frame, Picture, Text
from bnet_transformer.viz.rows import depths_of, places_in_rows, rows_of
from bnet_transformer.viz.style import hue, link, node_box

if TYPE_CHECKING:
    import networkx as nx

WORDLESS = 28.0  # between the boxes of a row in a net without words

Placed = tuple[Grid, tuple[Box, ...], tuple[Arrow, ...]]


def ground_picture(network: Network, graph: nx.DiGraph, *, boxes: Mapping[str, str] | None = None) -> Picture:
    """A ground graph as `ground_to_networkx` makes it; `boxes` frames nodes by the name of their box."""
    family = {name: network.graph.by_name[_family(about)] for name, about in graph.nodes(data=True)}
    said = _speaking(network)
    drawn = {}
    for name, about in graph.nodes(data=True):
        index, word, token = about["index"], about["word"], about["token"] if family[name].name in said else None
        plates = index if word is None else index[:-1]
        label = runs(about["role"], slice=about["slice"], plates=plates, word=word, token=token)
        drawn[name] = node_box(name, about, label, _title(name, about))
    places = sorted({(family[name].words, about["word"]) for name, about in graph.nodes(data=True)}, key=_in(network))
    column = {place: k for k, place in enumerate(places) if place[0] is not None}
    order = {name: about["index"][: len(family[name].plates)] for name, about in graph.nodes(data=True)}
    column_of = {name: column.get((family[name].words, about["word"])) for name, about in graph.nodes(data=True)}
    links = [_ground_link(graph, *arrow) for arrow in graph.edges(data=True)]
    room = Room(gap=44.0) if boxes else Room()
    grid, placed, arrows = _arranged(network, family, drawn, column_of, order, links, room)
    frames, texts = _beside_slices(grid, {name: family[name] for name in grid.at})
    if boxes:
        framed = _framed(placed, boxes)
        frames, texts = [*frames, *framed[0]], [*texts, *framed[1]]
    return Picture(placed, arrows, tuple(frames), tuple(texts))


def folded_picture(network: Network, graph: nx.MultiDiGraph) -> Picture:
    """The folded graph: one box for each family, frames for plates."""
    family = {own.name: own for own in network.graph.families if own.name in graph}
    sizes = {plate: str(size) for plate, size in network.graph.sizes.items()}
    drawn, column_of = {}, {}
    stacks = [stack.name for stack in network.declaration.stacks]
    for name, own in family.items():
        about = graph.nodes[name]
        drawn[name] = node_box(name, about, runs(own.role, slice=own.slice), _title(name, about))
        column_of[name] = None if own.words is None else stacks.index(own.words)
    links = []
    for parent, child, about in graph.edges(data=True):
        title = f"{parent} → {child} ({about['slot']}, {about['reach']})"
        links.append(link(parent, child, hue(family[parent].role, family[child].role), title=title))
    grid, placed, arrows = _arranged(
        network, family, drawn, column_of, dict.fromkeys(drawn, ()), links, Room(apart=44.0, gap=22.0, gutter=64.0)
    )
    frames, texts, bare = _plates(placed, family, graph, sizes)
    placed = tuple(replace(box, under=2) if box.name in bare else box for box in placed)
    right = max((frame.x + frame.width for frame in frames), default=0.0)
    lines, told = _beside_slices(grid, {name: family[name] for name in grid.at}, right, always=True)
    return Picture(placed, arrows, (*frames, *lines), (*texts, *told))


def _arranged(
    network: Network,
    family: Mapping[str, Family],
    drawn: Mapping[str, Box],
    column: Mapping[str, int | None],
    order: Mapping[str, tuple[int, ...]],
    links: Sequence[Arrow],
    room: Room,
) -> Placed:
    """Boxes and arrows in a grid whose rows follow from the folded graph."""
    kept = {each.index for each in family.values()}
    rows = rows_of(network.graph, kept)
    depths = depths_of(network.graph, kept, rows)
    items = [
        Item(box, rows[family[name].index], column[name], (*order[name], family[name].index))
        for name, box in drawn.items()
        if family[name].index in rows
    ]
    if network.graph.word_stacks:
        items = _apart(items)
    else:
        items, room = _crossing_little(items, links), replace(room, inside=WORDLESS)
    weights = [
        Weight(box, *depths[family[name].index], own_slice=family[name].slice is not None)
        for name, box in drawn.items()
        if family[name].index in depths
    ]
    grid = Grid(items, weights, links, room)
    placed, arrows = grid.placed()
    by_name = {box.name: box for box in placed}
    return grid, tuple(by_name[name] for name in drawn), arrows


def _apart(items: Sequence[Item]) -> list[Item]:
    """Boxes without a column get one of their own, at the right, where their row has others."""
    shared = {item.row for item in items if item.column is not None}
    right = 1 + max((item.column for item in items if item.column is not None), default=0)
    return [replace(i, column=right) if i.column is None and i.row in shared else i for i in items]


def _crossing_little(items: Sequence[Item], links: Sequence[Arrow]) -> list[Item]:
    """Boxes of a net without words, whose rows have no columns: each row in an order such that arrows cross little."""
    items = sorted(items, key=lambda item: item.order)
    rows = {item.box.name: item.row for item in items}
    place = places_in_rows(rows, [(arrow.source, arrow.target) for arrow in links])
    return [replace(item, order=(place[item.box.name],)) for item in items]


def _family(about: Mapping[str, Any]) -> str:
    stem = stem_of(about["stack"], about["role"])
    return join(stem, () if about["slice"] is None else (about["slice"],))


def _in(network: Network) -> Any:
    """The order of columns: stack by stack, word by word."""
    stacks = [stack.name for stack in network.declaration.stacks]
    return lambda place: (stacks.index(place[0]) if place[0] is not None else -1, place[1] or 0)


def _speaking(network: Network) -> set[str]:
    """The families whose labels tell the word: what is given with the sentence, and the states."""
    return {
        member.family.name
        for member in network.members
        if member.family.words is not None
        and not member.family.plates
        and (network.is_state(member.family) or member.tpm.kind == "input")
    }


def _title(name: str, about: Mapping[str, Any]) -> str:
    """What a reader is told who points at a node."""
    token = about.get("token")
    word = "" if token is None else f" “{shown(token, None)}”"
    shape = "×".join(map(str, about["shape"])) or "one number"
    kind = "set by do" if about.get("do") else about["kind"]
    learnable = ", learnable" if about["learnable"] and not about.get("do") else ""
    return f"{name}{word}: {kind}, {about['tpm']}{learnable}, {shape}"


def _ground_link(graph: nx.DiGraph, parent: str, child: str, about: Mapping[str, Any]) -> Arrow:
    colour = hue(graph.nodes[parent]["role"], graph.nodes[child]["role"])
    weight = about.get("weight")
    told = "" if weight is None else f", P(j | i) = {weight:.3f}"
    return link(parent, child, colour, weight, f"{parent} → {child}{told}")


def _beside_slices(
    grid: Grid, family: Mapping[str, Family], beyond: float = 0.0, *, always: bool = False
) -> tuple[list[Frame], list[Text]]:
    """A thin line beside the rows of each slice, with its number."""
    steps: dict[tuple[str, int], list[Box]] = {}
    for name, own in family.items():
        if own.step is not None and own.slice is not None and own.words is not None:
            steps.setdefault((own.stack, own.step), []).append(grid.boxes[name])
    steps = {key: boxes for key, boxes in steps.items() if key[1] >= 0 and len({b.y for b in boxes}) > 1}
    stacks = list(dict.fromkeys(stack for stack, _ in steps))
    if len(steps) < 2 and not always:
        return [], []
    lanes = [end + 18.0 + 6.0 * grid.lanes.get(column, 0) for column, (_, end) in grid.columns.items()]
    right = 16.0 + max([beyond, *lanes, *(box.edges[2] for box in grid.boxes.values())])
    frames, texts = [], []
    for (stack, step), boxes in steps.items():
        x = right + 58.0 * stacks.index(stack)
        top, bottom = min(b.edges[1] for b in boxes), max(b.edges[3] for b in boxes)
        frames.append(Frame(x, top, 0.0, bottom - top, "line"))
        said = f"{stack} slice {step}" if stack else f"slice {step}"
        texts.append(Text(x + 6.0, (top + bottom) / 2, written(said), "start", 9.0, "grey"))
    return frames, texts


def _framed(placed: Iterable[Box], boxes: Mapping[str, str]) -> tuple[list[Frame], list[Text]]:
    """A frame around the nodes of each box."""
    groups: dict[str, list[Box]] = {}
    for box in placed:
        if box.name in boxes:
            groups.setdefault(boxes[box.name], []).append(box)
    frames, texts = [], []
    for name, group in groups.items():
        frame = _around(group, 8.0, "box", name)
        frame = replace(frame, height=frame.height + 8.0)
        strays = [b.name for b in placed if boxes.get(b.name) != name and _inside(b, frame)]
        if strays:
            got = f"{strays[0]} among the nodes of {name}"
            allowed = "s.shrink(boxes).draw(path), or s.tan(boxes).draw(path), which draw the shrunk graph"
            raise BNetError("boxes", expected="boxes whose nodes stand side by side", got=got, allowed=allowed)
        frames.append(frame)
        spot = frame.x + 7.0, frame.y + frame.height - 7.0
        texts.append(Text(*spot, written(shown(name).replace("_", " ")), "start", 8.0, "accent"))
    return frames, texts


def _plates(
    placed: Sequence[Box],
    family: Mapping[str, Family],
    graph: nx.MultiDiGraph,
    sizes: Mapping[str, str],
) -> tuple[list[Frame], list[Text], set[str]]:
    """A frame for each plate of each slice that can hold its nodes and no others; the nodes of the other plates."""
    groups: dict[tuple[str, str, int | None], list[Box]] = {}
    for box in placed:
        own = family[box.name]
        for plate in graph.nodes[box.name]["plates"]:
            step = own.step if plate != WORD else None
            stack = own.words or "" if plate == WORD else own.stack
            groups.setdefault((plate, stack, step), []).append(box)
    frames: list[Frame] = []
    texts: list[Text] = []
    bare: set[str] = set()
    for (plate, stack, _), group in sorted(groups.items(), key=lambda each: -len(each[1])):
        pad = 26.0 if plate == WORD else 14.0
        name = f"{stack} word".strip() if plate == WORD else f"{plate} × {sizes[plate]}"
        frame = _around(group, pad, "plate", name)
        names = {box.name for box in group}
        if any(box.name not in names and _inside(box, frame) for box in placed):
            bare |= names
            continue
        frames.append(frame)
        texts.append(Text(frame.x + 7.0, frame.y + frame.height - 7.0, written(name), "start", 8.0, "grey"))
    return frames, texts, bare


def _around(group: Sequence[Box], pad: float, kind: str, name: str) -> Frame:
    left, top = min(b.edges[0] for b in group) - pad, min(b.edges[1] for b in group) - pad
    right, bottom = max(b.edges[2] for b in group) + pad, max(b.edges[3] for b in group) + pad
    return Frame(left, top, right - left, bottom - top, kind, plain((Run(name),)))


def _inside(box: Box, frame: Frame) -> bool:
    left, top, right, bottom = box.edges
    return left < frame.x + frame.width and right > frame.x and top < frame.y + frame.height and bottom > frame.y

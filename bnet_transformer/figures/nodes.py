"""The bnet as a grid of nodes: the ground graph (words are columns, slices are rows), or the folded graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import networkx as nx

from bnet_transformer._core.naming import WORD, join_name, join_stem
from bnet_transformer.bridges.networkx import template_graph_to_networkx
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.grid import Grid, Item, Room, Weight
from bnet_transformer.figures.labels import Run, measured, runs, shown, written
from bnet_transformer.figures.options import Options, marks_of, named, part
from bnet_transformer.figures.picture import Arrow, Box, Frame, Picture, Text, bounds
from bnet_transformer.figures.style import HEIGHT, SIZE, finished, hue, link
from bnet_transformer.graph import GroundGraph, NodeGroup, NodeSelection, TemplateGraph
from bnet_transformer.reference.asking import parse_slices

WORDLESS = 28.0  # between the boxes of a row in a net without words
DEEP = 3  # slices up to which a folded net is drawn whole ...
TALL = 50  # ... if it has no more families than this

REACHES = {
    "every": "every word",
    "causal": "words j ≤ i",
    "earlier": "words j < i",
    "before": "word i − 1",
    "rest": "its own word, but at the first",
    "first": "the first word",
    "last": "the last word",
    "window": "words |i − j| ≤ {}",
    "recent": "words 0 ≤ i − j ≤ {}",
    "mask": "the words of a table",
}


# the ground graph


def ground_picture(network: Network, graph: nx.DiGraph, *, boxes: Mapping[str, str] | None = None) -> Picture:
    """A ground graph as `ground_to_networkx` makes it; `boxes` frames nodes by the name of their box."""
    family = {name: network.graph.by_name[_family(about)] for name, about in graph.nodes(data=True)}
    of_words = [m for m in network.specs if m.group.word_stack is not None and not m.group.plates]
    said = {m.group.name for m in of_words if network.is_state(m.group) or m.tpm.kind == "input"}  # tell their word
    drawn = {}
    for name, about in graph.nodes(data=True):
        index, word, token = about["index"], about["word"], about["token"] if family[name].name in said else None
        plates = index if word is None else index[:-1]
        label = runs(about["role"], slice=about["slice"], plates=plates, word=word, token=token)
        drawn[name] = _box(name, about, label)
    words = {
        name: (own.word_stack, graph.nodes[name]["word"]) for name, own in family.items() if own.word_stack is not None
    }
    stacks = [stack.name for stack in network.declaration.stacks]
    places = sorted(set(words.values()), key=lambda place: (stacks.index(place[0]), place[1]))
    number = {place: k for k, place in enumerate(places)}
    column = {name: number[words[name]] if name in words else None for name in family}
    order = {name: about["index"][: len(family[name].plates)] for name, about in graph.nodes(data=True)}
    links = []
    for parent, child, about in graph.edges(data=True):
        weight = about.get("weight")
        told = f"{parent} → {child}" + ("" if weight is None else f", P(j | i) = {weight:.3f}")
        links.append(link(parent, child, hue(family[parent].role, family[child].role), weight, told))
    room = Room(gap=44.0) if boxes else Room()
    grid, placed, arrows = _arranged(network, family, drawn, column, order, links, room)
    lines, numbers = _beside_slices(grid, family)
    frames, texts = _framed(placed, boxes or {})
    return Picture(placed, arrows, (*lines, *frames), (*numbers, *texts))


# the folded graph


def net_picture(network: Network, asked: Options) -> Picture:
    """The folded graph; of a deep net the first slice and what follows the last."""
    graph, families = template_graph_to_networkx(network), network.graph.groups
    slices, depth = network.graph.slices, network.graph.depth
    kept = list(graph)
    caption, leave_last = "", set[str]()
    if asked.slices is not None:
        kept = _in_slices(network, parse_slices(asked.slices, network))
        gone = len(graph) - len(kept)
        caption = f"{gone} of {len(graph)} families of nodes are not drawn" if gone else ""
    elif depth > DEEP or (depth > 1 and len(graph) > TALL):
        kept = _in_slices(network, [0])
        kept += [f.name for f in families if f.step is not None and f.step >= slices[f.stack]]
        leave_last = {f.name for f in families if f.step is not None and f.step + 1 == slices[f.stack] == f.slice}
        kept += leave_last
        rest = "slice 1 is like slice 0, and is" if depth == 2 else f"slices 1 to {depth - 1} are like slice 0, and are"
        caption = f"{rest} not drawn"
    if not asked.weights:
        wordless = {families[index].name for index in network.graph.word_independent}
        kept = [name for name in kept if name not in wordless]
    for name in named(asked.highlight):
        family = network.graph.by_name.get(name)
        if family is not None and name not in kept:
            step = family.step
            way = "weights=True" if step is None else f"slices={min(max(step, 0), slices[family.stack] - 1)}"
            raise BNetError("highlight", expected="families that the figure draws", actual=name, allowed=way)
    picture = folded_picture(network, part(graph, kept))
    last = [box for box in picture.boxes if box.name in leave_last]
    dots = [Text(box.x, box.edges[1] - 12.0, written("⋮"), size=14.0, colour="grey") for box in last]
    picture = replace(picture, texts=(*picture.texts, *dots))
    told = [caption, *_told_reaches(network, kept)]
    return finish(picture, asked, f"the folded graph of the net {network.declaration.name}", told)


def _told_reaches(network: Network, kept: Sequence[str]) -> list[str]:
    """Which words a word reads, for each role that reads others: a folded arrow does not show it."""
    told: dict[tuple[str, str], None] = {}
    for member in network.specs:
        for given in member.parents if member.group.name in kept else ():
            if given.reach.kind != "same" and network.specs[given.index].group.name in kept:
                said = REACHES[given.reach.kind].format(given.reach.width)
                told[join_stem(member.group.stack, member.group.role).replace("_", " "), said] = None
    return [f"{role} reads {said}" for role, said in told]


def _in_slices(network: Network, slices: Sequence[int]) -> list[str]:
    """The families of some slices, and those of no slice."""
    ground = GroundGraph(network.graph.without_plates, {})
    return [family.name for family in network.graph.groups if ground.is_selected(family, NodeSelection(slices))]


def folded_picture(network: Network, graph: nx.MultiDiGraph) -> Picture:
    """The folded graph: one box for each family, frames for plates."""
    family = {own.name: own for own in network.graph.groups if own.name in graph}
    drawn, column = {}, {}
    stacks = [stack.name for stack in network.declaration.stacks]
    for name, own in family.items():
        drawn[name] = _box(name, graph.nodes[name], runs(own.role, slice=own.slice))
        column[name] = None if own.word_stack is None else stacks.index(own.word_stack)
    links = []
    for parent, child, about in graph.edges(data=True):
        title = f"{parent} → {child} ({about['slot']}, {about['reach']})"
        links.append(link(parent, child, hue(family[parent].role, family[child].role), title=title))
    grid, placed, arrows = _arranged(
        network, family, drawn, column, dict.fromkeys(drawn, ()), links, Room(apart=44.0, gap=22.0, gutter=64.0)
    )
    frames, texts, bare = _plates(network, placed, family, graph)
    placed = tuple(replace(box, under=2) if box.name in bare else box for box in placed)
    right = max((frame.x + frame.width for frame in frames), default=0.0)
    lines, told = _beside_slices(grid, family, right, always=True)
    return Picture(placed, arrows, (*frames, *lines), (*texts, *told))


def _plates(
    network: Network, placed: Sequence[Box], family: Mapping[str, NodeGroup], graph: nx.MultiDiGraph
) -> tuple[list[Frame], list[Text], set[str]]:
    """A frame for each plate of each slice that can hold its nodes and no others; the nodes of the other plates."""
    groups: dict[tuple[str, str, int | None], list[Box]] = {}
    for box in placed:
        own = family[box.name]
        for plate in graph.nodes[box.name]["plates"]:
            step = own.step if plate != WORD else None
            stack = own.word_stack or "" if plate == WORD else own.stack
            groups.setdefault((plate, stack, step), []).append(box)
    frames: list[Frame] = []
    texts: list[Text] = []
    bare: set[str] = set()
    for (plate, stack, _), group in sorted(groups.items(), key=lambda each: -len(each[1])):
        pad = 26.0 if plate == WORD else 14.0
        name = f"{stack} word".strip() if plate == WORD else f"{plate} × {network.graph.plate_sizes[plate]}"
        frame = _around(group, pad, "plate", name)
        names = {box.name for box in group}
        if any(box.name not in names and _inside(box, frame) for box in placed):
            bare |= names
            continue
        frames.append(frame)
        texts.append(Text(frame.x + 7.0, frame.y + frame.height - 7.0, written(name), "start", 8.0, "grey"))
    return frames, texts, bare


# both


def finish(picture: Picture, asked: Options, title: str, caption: Sequence[str]) -> Picture:
    """The picture with what stands out, its legend and caption, in its theme."""
    if asked.highlight is not None:
        marks, ways = marks_of(asked.highlight, dict.fromkeys(box.name for box in picture.boxes))
        boxes = [replace(b, accent=marks.get(b.name, ""), faded=b.name not in marks) for b in picture.boxes]
        arrows = []
        for a in picture.arrows:
            stands_out = (a.source, a.target) in ways
            look = (max(a.width, 1.8), 1.0) if stands_out else (a.width, a.opacity * 0.25)
            arrows.append(replace(a, width=look[0], opacity=look[1]))
        picture = replace(picture, boxes=tuple(boxes), arrows=tuple(arrows))
    return finished(replace(picture, theme=asked.theme), legend=asked.legend, title=title, caption=caption)


def _arranged(
    network: Network,
    family: Mapping[str, NodeGroup],
    drawn: Mapping[str, Box],
    column: Mapping[str, int | None],
    order: Mapping[str, tuple[int, ...]],
    links: Sequence[Arrow],
    room: Room,
) -> tuple[Grid, tuple[Box, ...], tuple[Arrow, ...]]:
    """Boxes and arrows in a grid whose rows follow from the folded graph."""
    place = rows_and_depths(network.graph, {each.index for each in family.values()})
    items: list[Item] = []
    weights: list[Weight] = []
    for name, box in drawn.items():
        own = family[name]
        row, depth = place[own.index]
        if depth:
            weights.append(Weight(box, row, depth, own_slice=own.slice is not None))
        else:
            items.append(Item(box, row, column[name], (*order[name], own.index)))
    if network.graph.word_stacks:
        items = _apart(items)
    else:
        items, room = _crossing_little(items, links), replace(room, inside=WORDLESS)
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
    stem = join_stem(about["stack"], about["role"])
    return join_name(stem, () if about["slice"] is None else (about["slice"],))


def _box(name: str, about: Mapping[str, Any], label: tuple[Run, ...]) -> Box:
    """The box of a node, by what its graph says of it."""
    done, token = bool(about.get("do")), about.get("token")
    learnable = about["learnable"] and not done
    kind = "set by do" if done else about["kind"]
    word = "" if token is None else f" “{shown(token, None)}”"
    told = f"{kind}, {about['tpm']}" + (", learnable" if learnable else "")
    return Box(
        name,
        0.0,
        0.0,
        max(measured(label, SIZE) + 16.0, 36.0),
        HEIGHT,
        label,
        fill="do" if done else "observed" if kind == "observed" else "paper",
        border="double" if done or kind == "deterministic" else "single",
        dashed=learnable,
        title=f"{name}{word}: {told}, {'×'.join(map(str, about['shape'])) or 'one number'}",
    )


def _beside_slices(
    grid: Grid, family: Mapping[str, NodeGroup], beyond: float = 0.0, *, always: bool = False
) -> tuple[list[Frame], list[Text]]:
    """A thin line beside the rows of each slice, with its number; `always` also beside the only one."""
    steps: dict[tuple[str, int], list[Box]] = {}
    for name in grid.at:
        own = family[name]
        if own.step is not None and own.slice is not None and own.word_stack is not None:
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


def _framed(placed: Sequence[Box], boxes: Mapping[str, str]) -> tuple[list[Frame], list[Text]]:
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
            raise BNetError("boxes", expected="boxes whose nodes stand side by side", actual=got, allowed=allowed)
        frames.append(frame)
        spot = frame.x + 7.0, frame.y + frame.height - 7.0
        texts.append(Text(*spot, written(shown(name).replace("_", " ")), "start", 8.0, "accent"))
    return frames, texts


def _around(group: Sequence[Box], pad: float, kind: str, name: str) -> Frame:
    left, top, right, bottom = bounds(box.edges for box in group)
    return Frame(left - pad, top - pad, right - left + 2 * pad, bottom - top + 2 * pad, kind, name)


def _inside(box: Box, frame: Frame) -> bool:
    left, top, right, bottom = box.edges
    return left < frame.x + frame.width and right > frame.x and top < frame.y + frame.height and bottom > frame.y


# which row of the grid a family stands in: below its parents, and close above its children


def rows_and_depths(folded: TemplateGraph, kept: Collection[int]) -> dict[int, tuple[int, int]]:
    """The row and the depth of each kept family; rows are numbered without gaps.

    The depth is 0 of what is not a weight. A weight stands above the row of what it is for, at depth 1 where that is
    words, 2 where it is a weight of depth 1, ...
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(family.index for family in folded.groups if family.index not in folded.word_independent)
    joined = ((bundle.parent, bundle.child) for bundle in folded.edges if bundle.parent < bundle.child)
    graph.add_edges_from((parent, child) for parent, child in joined if parent in graph and child in graph)
    late = {index: row for row, those in enumerate(nx.topological_generations(graph)) for index in those}
    for index in reversed(list(graph)):
        if graph[index]:
            late[index] = min(late[child] for child in graph[index]) - 1
    number = {row: k for k, row in enumerate(sorted({late[index] for index in graph if index in kept}))}
    found = {index: (number[late[index]], 0) for index in graph if index in kept}
    for family in reversed(folded.groups):
        if family.index in kept and family.index in folded.word_independent:
            below = [found[bundle.child] for bundle in folded.out_edges[family.index] if bundle.child in found]
            row = min((row for row, _ in below), default=0)
            found[family.index] = row, 1 + max((depth for _, depth in below), default=0)
    return found


def places_in_rows(rows: Mapping[str, int], arrows: Sequence[tuple[str, str]], sweeps: int = 4) -> dict[str, int]:
    """The place of each node in its row, such that arrows cross little; nodes come in the order that ties keep.

    Sugiyama's barycentre heuristic (1981): down and up in turn, each row is sorted by the mean place of the nodes that
    its nodes are joined to in the rows before it, places being counted from the middle of a row.
    """
    lines: dict[int, list[str]] = {}
    for name, row in rows.items():
        lines.setdefault(row, []).append(name)
    joined: dict[str, list[str]] = {name: [] for name in rows}
    for parent, child in arrows:
        joined[parent].append(child)
        joined[child].append(parent)
    at = {name: k - (len(line) - 1) / 2 for line in lines.values() for k, name in enumerate(line)}
    for sweep in range(sweeps):
        way = 1 if sweep % 2 == 0 else -1
        for row in sorted(lines, reverse=way < 0):
            means = {}
            for name in lines[row]:
                others = [at[other] for other in joined[name] if (row - rows[other]) * way > 0]
                means[name] = sum(others) / len(others) if others else at[name]
            lines[row].sort(key=means.__getitem__)
            at |= {name: k - (len(lines[row]) - 1) / 2 for k, name in enumerate(lines[row])}
    return {name: k for line in lines.values() for k, name in enumerate(line)}

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
from bnet_transformer.figures.grid_layout import Grid, GridItem, GridSpacing, WeightItem
from bnet_transformer.figures.labels import TextRun, format_node_label, format_token, measure_label, text_to_label
from bnet_transformer.figures.options import FigureOptions, get_highlighted_names, resolve_highlight, subgraph
from bnet_transformer.figures.picture import Frame, NodeBox, Picture, PictureArrow, TextLine, bounding_box
from bnet_transformer.figures.style import BOX_HEIGHT, LABEL_SIZE, add_legend_and_caption, arrow_colour, make_arrow
from bnet_transformer.graph import GroundGraph, NodeGroup, NodeSelection, TemplateGraph
from bnet_transformer.inference.selection import parse_slices

WORDLESS_BOX_GAP = 28.0  # between the boxes of a row in a net without words
MAX_FULL_SLICES = 3  # slices up to which a folded net is drawn whole ...
MAX_FULL_GROUPS = 50  # ... if it has no more families than this

REACH_TEXTS = {
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


def layout_ground_graph(network: Network, graph: nx.DiGraph, *, boxes: Mapping[str, str] | None = None) -> Picture:
    """A ground graph as `ground_graph_to_networkx` makes it; `boxes` frames nodes by the name of their box."""
    family = {name: network.graph.by_name[_group_name(about)] for name, about in graph.nodes(data=True)}
    of_words = [m for m in network.specs if m.group.word_stack is not None and not m.group.plates]
    said = {m.group.name for m in of_words if network.is_state(m.group) or m.tpm.kind == "input"}  # tell their word
    drawn = {}
    for name, about in graph.nodes(data=True):
        index, word, token = about["index"], about["word"], about["token"] if family[name].name in said else None
        plates = index if word is None else index[:-1]
        label = format_node_label(about["role"], slice=about["slice"], plates=plates, word=word, token=token)
        drawn[name] = _make_box(name, about, label)
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
        links.append(make_arrow(parent, child, arrow_colour(family[parent].role, family[child].role), weight, told))
    room = GridSpacing(row_gap=44.0) if boxes else GridSpacing()
    grid, placed, arrows = _arrange(network, family, drawn, column, order, links, room)
    lines, numbers = _slice_lines(grid, family)
    frames, texts = _box_frames(placed, boxes or {})
    return Picture(placed, arrows, (*lines, *frames), (*numbers, *texts))


# the folded graph


def layout_net(network: Network, options: FigureOptions) -> Picture:
    """The folded graph; of a deep net the first slice and what follows the last."""
    graph, families = template_graph_to_networkx(network), network.graph.groups
    slices, depth = network.graph.slices, network.graph.depth
    kept = list(graph)
    caption, leave_last = "", set[str]()
    if options.slices is not None:
        kept = _groups_in_slices(network, parse_slices(options.slices, network))
        gone = len(graph) - len(kept)
        caption = f"{gone} of {len(graph)} families of nodes are not drawn" if gone else ""
    elif depth > MAX_FULL_SLICES or (depth > 1 and len(graph) > MAX_FULL_GROUPS):
        kept = _groups_in_slices(network, [0])
        kept += [f.name for f in families if f.step is not None and f.step >= slices[f.stack]]
        leave_last = {f.name for f in families if f.step is not None and f.step + 1 == slices[f.stack] == f.slice}
        kept += leave_last
        rest = "slice 1 is like slice 0, and is" if depth == 2 else f"slices 1 to {depth - 1} are like slice 0, and are"
        caption = f"{rest} not drawn"
    if not options.weights:
        wordless = {families[index].name for index in network.graph.word_independent}
        kept = [name for name in kept if name not in wordless]
    for name in get_highlighted_names(options.highlight):
        family = network.graph.by_name.get(name)
        if family is not None and name not in kept:
            step = family.step
            way = "weights=True" if step is None else f"slices={min(max(step, 0), slices[family.stack] - 1)}"
            raise BNetError("highlight", expected="families that the figure draws", actual=name, allowed=way)
    picture = layout_template_graph(network, subgraph(graph, kept))
    last = [box for box in picture.boxes if box.name in leave_last]
    dots = [TextLine(box.x, box.bounds[1] - 12.0, text_to_label("⋮"), size=14.0, colour="grey") for box in last]
    picture = replace(picture, texts=(*picture.texts, *dots))
    told = [caption, *_describe_reaches(network, kept)]
    return finish_picture(picture, options, f"the folded graph of the net {network.declaration.name}", told)


def _describe_reaches(network: Network, group_names: Sequence[str]) -> list[str]:
    """Which words a word reads, for each role that reads others: a folded arrow does not show it."""
    told: dict[tuple[str, str], None] = {}
    for member in network.specs:
        for given in member.parents if member.group.name in group_names else ():
            if given.reach.kind != "same" and network.specs[given.index].group.name in group_names:
                said = REACH_TEXTS[given.reach.kind].format(given.reach.width)
                told[join_stem(member.group.stack, member.group.role).replace("_", " "), said] = None
    return [f"{role} reads {said}" for role, said in told]


def _groups_in_slices(network: Network, slices: Sequence[int]) -> list[str]:
    """The families of some slices, and those of no slice."""
    ground = GroundGraph(network.graph.without_plates, {})
    return [family.name for family in network.graph.groups if ground.is_selected(family, NodeSelection(slices))]


def layout_template_graph(network: Network, graph: nx.MultiDiGraph) -> Picture:
    """The folded graph: one box for each family, frames for plates."""
    family = {own.name: own for own in network.graph.groups if own.name in graph}
    drawn, column = {}, {}
    stacks = [stack.name for stack in network.declaration.stacks]
    for name, own in family.items():
        drawn[name] = _make_box(name, graph.nodes[name], format_node_label(own.role, slice=own.slice))
        column[name] = None if own.word_stack is None else stacks.index(own.word_stack)
    links = []
    for parent, child, about in graph.edges(data=True):
        title = f"{parent} → {child} ({about['slot']}, {about['reach']})"
        links.append(make_arrow(parent, child, arrow_colour(family[parent].role, family[child].role), title=title))
    grid, placed, arrows = _arrange(
        network,
        family,
        drawn,
        column,
        dict.fromkeys(drawn, ()),
        links,
        GridSpacing(weight_gap=44.0, row_gap=22.0, column_gap=64.0),
    )
    frames, texts, bare = _plate_frames(network, placed, family, graph)
    placed = tuple(replace(box, num_stacked=2) if box.name in bare else box for box in placed)
    right = max((frame.x + frame.width for frame in frames), default=0.0)
    lines, told = _slice_lines(grid, family, right, is_always_shown=True)
    return Picture(placed, arrows, (*frames, *lines), (*texts, *told))


def _plate_frames(
    network: Network, boxes: Sequence[NodeBox], node_groups: Mapping[str, NodeGroup], graph: nx.MultiDiGraph
) -> tuple[list[Frame], list[TextLine], set[str]]:
    """A frame for each plate of each slice that can hold its nodes and no others; the nodes of the other plates."""
    groups: dict[tuple[str, str, int | None], list[NodeBox]] = {}
    for box in boxes:
        own = node_groups[box.name]
        for plate in graph.nodes[box.name]["plates"]:
            step = own.step if plate != WORD else None
            stack = own.word_stack or "" if plate == WORD else own.stack
            groups.setdefault((plate, stack, step), []).append(box)
    frames: list[Frame] = []
    texts: list[TextLine] = []
    bare: set[str] = set()
    for (plate, stack, _), group in sorted(groups.items(), key=lambda each: -len(each[1])):
        pad = 26.0 if plate == WORD else 14.0
        name = f"{stack} word".strip() if plate == WORD else f"{plate} × {network.graph.plate_sizes[plate]}"
        frame = _bounding_frame(group, pad, "plate", name)
        names = {box.name for box in group}
        if any(box.name not in names and _overlaps(box, frame) for box in boxes):
            bare |= names
            continue
        frames.append(frame)
        texts.append(TextLine(frame.x + 7.0, frame.y + frame.height - 7.0, text_to_label(name), "start", 8.0, "grey"))
    return frames, texts, bare


# both


def finish_picture(picture: Picture, options: FigureOptions, title: str, caption: Sequence[str]) -> Picture:
    """The picture with what stands out, its legend and caption, in its theme."""
    if options.highlight is not None:
        marks, ways = resolve_highlight(options.highlight, dict.fromkeys(box.name for box in picture.boxes))
        boxes = [replace(b, mark=marks.get(b.name, ""), is_faded=b.name not in marks) for b in picture.boxes]
        arrows = []
        for a in picture.arrows:
            stands_out = (a.source, a.target) in ways
            look = (max(a.width, 1.8), 1.0) if stands_out else (a.width, a.opacity * 0.25)
            arrows.append(replace(a, width=look[0], opacity=look[1]))
        picture = replace(picture, boxes=tuple(boxes), arrows=tuple(arrows))
    return add_legend_and_caption(
        replace(picture, theme=options.theme), legend=options.legend, title=title, caption=caption
    )


def _arrange(
    network: Network,
    groups: Mapping[str, NodeGroup],
    boxes: Mapping[str, NodeBox],
    columns: Mapping[str, int | None],
    order: Mapping[str, tuple[int, ...]],
    unrouted_arrows: Sequence[PictureArrow],
    spacing: GridSpacing,
) -> tuple[Grid, tuple[NodeBox, ...], tuple[PictureArrow, ...]]:
    """Boxes and arrows in a grid whose rows follow from the folded graph."""
    place = assign_rows(network.graph, {each.index for each in groups.values()})
    items: list[GridItem] = []
    weights: list[WeightItem] = []
    for name, box in boxes.items():
        own = groups[name]
        row, depth = place[own.index]
        if depth:
            weights.append(WeightItem(box, row, depth, has_slice=own.slice is not None))
        else:
            items.append(GridItem(box, row, columns[name], (*order[name], own.index)))
    if network.graph.word_stacks:
        items = _separate_columnless(items)
    else:
        items, spacing = _order_rows(items, unrouted_arrows), replace(spacing, box_gap=WORDLESS_BOX_GAP)
    grid = Grid(items, weights, unrouted_arrows, spacing)
    placed, arrows = grid.layout()
    by_name = {box.name: box for box in placed}
    return grid, tuple(by_name[name] for name in boxes), arrows


def _separate_columnless(items: Sequence[GridItem]) -> list[GridItem]:
    """Boxes without a column get one of their own, at the right, where their row has others."""
    shared = {item.row for item in items if item.column is not None}
    right = 1 + max((item.column for item in items if item.column is not None), default=0)
    return [replace(i, column=right) if i.column is None and i.row in shared else i for i in items]


def _order_rows(items: Sequence[GridItem], arrows: Sequence[PictureArrow]) -> list[GridItem]:
    """Boxes of a net without words, whose rows have no columns: each row in an order such that arrows cross little."""
    items = sorted(items, key=lambda item: item.order)
    rows = {item.box.name: item.row for item in items}
    place = minimize_crossings(rows, [(arrow.source, arrow.target) for arrow in arrows])
    return [replace(item, order=(place[item.box.name],)) for item in items]


def _group_name(attrs: Mapping[str, Any]) -> str:
    stem = join_stem(attrs["stack"], attrs["role"])
    return join_name(stem, () if attrs["slice"] is None else (attrs["slice"],))


def _make_box(name: str, attrs: Mapping[str, Any], label: tuple[TextRun, ...]) -> NodeBox:
    """The box of a node, by what its graph says of it."""
    done, token = bool(attrs.get("do")), attrs.get("token")
    learnable = attrs["learnable"] and not done
    kind = "set by do" if done else attrs["kind"]
    word = "" if token is None else f" “{format_token(token, None)}”"
    told = f"{kind}, {attrs['tpm']}" + (", learnable" if learnable else "")
    return NodeBox(
        name,
        0.0,
        0.0,
        max(measure_label(label, LABEL_SIZE) + 16.0, 36.0),
        BOX_HEIGHT,
        label,
        fill="do" if done else "observed" if kind == "observed" else "paper",
        border="double" if done or kind == "deterministic" else "single",
        is_dashed=learnable,
        title=f"{name}{word}: {told}, {'×'.join(map(str, attrs['shape'])) or 'one number'}",
    )


def _slice_lines(
    grid: Grid, groups: Mapping[str, NodeGroup], min_x: float = 0.0, *, is_always_shown: bool = False
) -> tuple[list[Frame], list[TextLine]]:
    """A thin line beside the rows of each slice, with its number; `is_always_shown` also beside the only one."""
    steps: dict[tuple[str, int], list[NodeBox]] = {}
    for name in grid.items_by_name:
        own = groups[name]
        if own.step is not None and own.slice is not None and own.word_stack is not None:
            steps.setdefault((own.stack, own.step), []).append(grid.boxes[name])
    steps = {key: boxes for key, boxes in steps.items() if key[1] >= 0 and len({b.y for b in boxes}) > 1}
    stacks = list(dict.fromkeys(stack for stack, _ in steps))
    if len(steps) < 2 and not is_always_shown:
        return [], []
    lanes = [end + 18.0 + 6.0 * grid.num_lanes.get(column, 0) for column, (_, end) in grid.columns.items()]
    right = 16.0 + max([min_x, *lanes, *(box.bounds[2] for box in grid.boxes.values())])
    frames, texts = [], []
    for (stack, step), boxes in steps.items():
        x = right + 58.0 * stacks.index(stack)
        top, bottom = min(b.bounds[1] for b in boxes), max(b.bounds[3] for b in boxes)
        frames.append(Frame(x, top, 0.0, bottom - top, "line"))
        said = f"{stack} slice {step}" if stack else f"slice {step}"
        texts.append(TextLine(x + 6.0, (top + bottom) / 2, text_to_label(said), "start", 9.0, "grey"))
    return frames, texts


def _box_frames(boxes: Sequence[NodeBox], box_names: Mapping[str, str]) -> tuple[list[Frame], list[TextLine]]:
    """A frame around the nodes of each box."""
    groups: dict[str, list[NodeBox]] = {}
    for box in boxes:
        if box.name in box_names:
            groups.setdefault(box_names[box.name], []).append(box)
    frames, texts = [], []
    for name, group in groups.items():
        frame = _bounding_frame(group, 8.0, "box", name)
        frame = replace(frame, height=frame.height + 8.0)
        strays = [b.name for b in boxes if box_names.get(b.name) != name and _overlaps(b, frame)]
        if strays:
            got = f"{strays[0]} among the nodes of {name}"
            allowed = "s.shrink(boxes).draw(path), or s.tan(boxes).draw(path), which draw the shrunk graph"
            raise BNetError("boxes", expected="boxes whose nodes stand side by side", actual=got, allowed=allowed)
        frames.append(frame)
        spot = frame.x + 7.0, frame.y + frame.height - 7.0
        texts.append(TextLine(*spot, text_to_label(format_token(name).replace("_", " ")), "start", 8.0, "accent"))
    return frames, texts


def _bounding_frame(boxes: Sequence[NodeBox], padding: float, kind: str, name: str) -> Frame:
    left, top, right, bottom = bounding_box(box.bounds for box in boxes)
    return Frame(left - padding, top - padding, right - left + 2 * padding, bottom - top + 2 * padding, kind, name)


def _overlaps(box: NodeBox, frame: Frame) -> bool:
    left, top, right, bottom = box.bounds
    return left < frame.x + frame.width and right > frame.x and top < frame.y + frame.height and bottom > frame.y


# which row of the grid a family stands in: below its parents, and close above its children


def assign_rows(template_graph: TemplateGraph, group_ids: Collection[int]) -> dict[int, tuple[int, int]]:
    """The row and the depth of each kept family; rows are numbered without gaps.

    The depth is 0 of what is not a weight. A weight stands above the row of what it is for, at depth 1 where that is
    words, 2 where it is a weight of depth 1, ...
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(
        family.index for family in template_graph.groups if family.index not in template_graph.word_independent
    )
    joined = ((bundle.parent, bundle.child) for bundle in template_graph.edges if bundle.parent < bundle.child)
    graph.add_edges_from((parent, child) for parent, child in joined if parent in graph and child in graph)
    late = {index: row for row, those in enumerate(nx.topological_generations(graph)) for index in those}
    for index in reversed(list(graph)):
        if graph[index]:
            late[index] = min(late[child] for child in graph[index]) - 1
    number = {row: k for k, row in enumerate(sorted({late[index] for index in graph if index in group_ids}))}
    found = {index: (number[late[index]], 0) for index in graph if index in group_ids}
    for family in reversed(template_graph.groups):
        if family.index in group_ids and family.index in template_graph.word_independent:
            below = [found[bundle.child] for bundle in template_graph.out_edges[family.index] if bundle.child in found]
            row = min((row for row, _ in below), default=0)
            found[family.index] = row, 1 + max((depth for _, depth in below), default=0)
    return found


def minimize_crossings(
    rows: Mapping[str, int], arrows: Sequence[tuple[str, str]], num_sweeps: int = 4
) -> dict[str, int]:
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
    for sweep in range(num_sweeps):
        way = 1 if sweep % 2 == 0 else -1
        for row in sorted(lines, reverse=way < 0):
            means = {}
            for name in lines[row]:
                others = [at[other] for other in joined[name] if (row - rows[other]) * way > 0]
                means[name] = sum(others) / len(others) if others else at[name]
            lines[row].sort(key=means.__getitem__)
            at |= {name: k - (len(lines[row]) - 1) / 2 for k, name in enumerate(lines[row])}
    return {name: k for line in lines.values() for k, name in enumerate(line)}

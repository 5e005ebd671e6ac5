"""Layout of the ground graph (words are columns, slices are rows) and of the folded (template) graph.

The rows of nodes have few crossings; their positions and the routes of arrows from `grid_layout`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import networkx as nx

from bnet_transformer._core.naming import WORD, join_stem
from bnet_transformer.bridges.networkx import template_graph_to_networkx
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.fonts import Density, TextRun, format_node_label, format_token, measure_label
from bnet_transformer.figures.grid_layout import MIN_ROW_GAP, Grid, GridItem, GridSpacing, WeightItem
from bnet_transformer.figures.options import (
    FoldedOptions,
    ViewOptions,
    compose_picture,
    get_highlighted_names,
    match_nodes,
    project_highlight,
    resolve_highlight,
    subgraph,
)
from bnet_transformer.figures.picture import (
    BOX_HEIGHT,
    DEFAULT_MARK,
    LABEL_SIZE,
    Drawing,
    Frame,
    NodeBox,
    Picture,
    PictureArrow,
    TextLine,
    arrow_colour,
    bounding_box,
    make_arrow,
)
from bnet_transformer.graph import GroundGraph, NodeGroup, NodeSelection, TemplateGraph
from bnet_transformer.inference.query import parse_slices
from bnet_transformer.tpm import Given

# --------------------------------------------------------------------------------------------------------------------
# Rows of a drawn graph: which row each node group has, and an order of the nodes of a row with few crossings.


def assign_rows(template_graph: TemplateGraph, group_ids: Collection[int]) -> dict[int, tuple[int, int]]:
    """The (row, depth) of each node group of `group_ids`; rows are numbered without gaps.

    Groups that depend on words have depth 0. A group that does not depend on words, such as a weight, is drawn above
    the row of its children: at depth 1 above groups of depth 0, at depth 2 above groups of depth 1, and so on.
    """
    wordless = template_graph.word_independent
    graph = _contract_hidden(template_graph, {index for index in group_ids if index not in wordless})
    # Longest-path layering puts every node below its parents. Then, children first, each node is moved down to the row
    # above its children: it stays below its parents, and its arrows become shorter.
    rows = {idx: row for row, indices in enumerate(nx.topological_generations(graph)) for idx in indices}
    for idx in reversed(list(graph)):
        if graph[idx]:
            rows[idx] = min(rows[child] for child in graph[idx]) - 1
    row_numbers = {row: k for k, row in enumerate(sorted({rows[idx] for idx in graph}))}
    result = {idx: (row_numbers[rows[idx]], 0) for idx in graph}
    for group in reversed(template_graph.groups):
        if group.index in group_ids and group.index in wordless:
            children = [result[edge.child] for edge in template_graph.out_edges[group.index] if edge.child in result]
            row = min((row for row, _ in children), default=0)
            result[group.index] = row, 1 + max((depth for _, depth in children), default=0)
    return result


def _contract_hidden(template_graph: TemplateGraph, visible: Collection[int]) -> nx.DiGraph:
    """The graph of the visible groups, with an arrow for each path between two of them through hidden groups.

    So a slice that is not drawn takes no rows, and parts of the graph that only it separates are drawn side by side.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(group.index for group in template_graph.groups if group.index in visible)
    nearest: dict[int, set[int]] = {}  # the visible groups from which a path through hidden groups leads to a group
    for group in template_graph.groups:  # parents come first, except along recurrent arrows
        sources: set[int] = set()
        for edge in template_graph.in_edges[group.index]:
            if edge.parent < group.index and edge.parent not in template_graph.word_independent:
                sources |= {edge.parent} if edge.parent in visible else nearest[edge.parent]
        nearest[group.index] = sources
        if group.index in visible:
            graph.add_edges_from((source, group.index) for source in sources)
    return graph


def minimize_crossings(rows: Mapping[str, int], arrows: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The index of each node in its row, such that few arrows cross; ties keep the order of `rows`."""
    # Barycentre heuristic of Sugiyama, Tagawa and Toda (1981, "Methods for visual understanding of hierarchical system
    # structures"); the exact problem is NP-hard even for two rows (Garey and Johnson, 1983). Sweeps go down and up in
    # turn: each row is sorted by the mean position of a node's neighbours in the rows already passed. Positions are
    # counted from the middle of a row, so that rows of different lengths are comparable.
    ordered: dict[int, list[str]] = {}
    for name, row in rows.items():
        ordered.setdefault(row, []).append(name)
    neighbours: dict[str, list[str]] = {name: [] for name in rows}
    for parent, child in arrows:
        neighbours[parent].append(child)
        neighbours[child].append(parent)
    positions = {name: k - (len(line) - 1) / 2 for line in ordered.values() for k, name in enumerate(line)}
    for direction in (1, -1, 1, -1):
        for row in sorted(ordered, reverse=direction < 0):
            means = {}
            for name in ordered[row]:
                adjacent = [positions[other] for other in neighbours[name] if (row - rows[other]) * direction > 0]
                means[name] = sum(adjacent) / len(adjacent) if adjacent else positions[name]
            ordered[row].sort(key=means.__getitem__)
            positions |= {name: k - (len(ordered[row]) - 1) / 2 for k, name in enumerate(ordered[row])}
    return {name: k for line in ordered.values() for k, name in enumerate(line)}


FOLDED_ROW_GAP = 22.0  # between the rows of a folded graph
BOX_FRAME_PADDING = 8.0  # between a box of `boxes=` and its nodes
WORDLESS_BOX_GAP = 28.0  # between the boxes of a row in a net without words
MAX_FULL_SLICES = 3  # a folded net with at most this many slices is drawn in full ...
MAX_FULL_GROUPS = 50  # ... if it has at most this many node groups

REACH_TEXTS = {
    "every": "every word",
    "causal": "words j ≤ i",
    "earlier": "words j < i",
    "before": "word i − 1",
    "after": "word i + 1",
    "rest": "its own word, except for the first word",
    "first": "the first word",
    "last": "the last word",
    "window": "words |i − j| ≤ {}",
    "recent": "words 0 ≤ i − j ≤ {}",
    "mask": "the words that a mask allows",
}


# the ground graph


def layout_ground_graph(
    network: Network, graph: nx.DiGraph, density: Density, *, boxes: Mapping[str, str] | None = None
) -> Picture:
    """Lay out a graph that `ground_graph_to_networkx` returned.

    `boxes` maps the name of a node to the name of its box. A frame is drawn around each box.
    """
    by_index = {(group.stack, group.role, group.slice): group for group in network.graph.groups}
    groups = {name: by_index[data["stack"], data["role"], data["slice"]] for name, data in graph.nodes(data=True)}
    # States and inputs over words show their token; an input with a default, such as a segment, has its own values.
    per_word = [spec for spec in network.specs if spec.group.word_stack is not None and not spec.group.plates]
    inputs = {spec.group.name for spec in per_word if isinstance(spec.tpm, Given) and spec.tpm.default is None}
    with_token = inputs | {spec.group.name for spec in per_word if network.is_state(spec.group)}
    boxes_by_name = {}
    for name, attrs in graph.nodes(data=True):
        index, word, token = attrs["index"], attrs["word"], attrs["token"] if groups[name].name in with_token else None
        plates = index if word is None else index[:-1]
        token = None if token is None else format_token(token, density.max_token)
        label = format_node_label(attrs["role"], slice=attrs["slice"], plates=plates, word=word, token=token)
        boxes_by_name[name] = _make_box(name, attrs, label, density)
    stacks = {stack.name: k for k, stack in enumerate(network.declaration.stacks)}
    words = {
        name: (stacks[group.word_stack], graph.nodes[name]["word"])
        for name, group in groups.items()
        if group.word_stack is not None
    }
    column_ids = {word: k for k, word in enumerate(sorted(set(words.values())))}
    column = {name: column_ids[words[name]] if name in words else None for name in groups}
    order = {name: attrs["index"][: len(groups[name].plates)] for name, attrs in graph.nodes(data=True)}
    links = []
    for parent, child, attrs in graph.edges(data=True):
        weight = attrs.get("weight")
        title = f"{parent} → {child}" + ("" if weight is None else f", P(j | i) = {weight:.3f}")
        links.append(make_arrow(parent, child, arrow_colour(groups[parent].role, groups[child].role), weight, title))
    spacing = GridSpacing(row_gap=44.0, min_column_gap=2 * BOX_FRAME_PADDING + 4.0) if boxes else GridSpacing()
    grid, nodes, arrows = _arrange(network, groups, boxes_by_name, column, order, links, spacing, density)
    lines, numbers = _slice_lines(grid, groups)
    frames, texts = _box_frames(nodes, boxes) if boxes else ([], [])
    return Picture(nodes, arrows, (*lines, *frames), (*numbers, *texts))


# the folded graph


@dataclass(frozen=True)
class _NetParts:
    """The node groups to draw, those after omitted slices, and a caption about the omitted ones."""

    names: Sequence[str]
    last_groups: frozenset[str] = frozenset()
    caption: str = ""


def layout_net(network: Network, options: FoldedOptions) -> Picture:
    """Lay out the folded graph; a deep net is shown by its first slice and the nodes after its last slice.

    With a width, so is any net with repeated slices that does not fit the page; if necessary, weights are omitted too.
    """
    names = list(network.graph.by_name)
    if options.slices is None and (marked := _find_marked_slices(network, options, names)):
        options = replace(options, slices=marked)  # slices with different marks do not repeat each other
    parts = [_select_groups(network, options)]
    if options.width is not None:
        if options.slices is None and not parts[0].last_groups and _has_repeated_slices(network):
            parts.append(_select_groups(network, options, is_shortened=True))
        part = parts[-1]
        names = [name for name in part.names if not _has_weights(network, [name])]
        if options.weights and (count := len(part.names) - len(names)):
            omitted = f"{count} node groups without words are not drawn"
            parts.append(replace(part, names=names, caption=f"{part.caption}. {omitted}" if part.caption else omitted))
        marks = get_highlighted_names(project_highlight(options, parts[0].names).highlight)
        parts[1:] = [part for part in parts[1:] if all(match_nodes(name, part.names) for name in marks)]
    return _layout_first_net(network, options, parts)


def _layout_first_net(network: Network, options: FoldedOptions, parts: Sequence[_NetParts]) -> Picture:
    """Lay out the first part of a folded graph that fits the width and the height of the options."""
    part, *remaining = parts
    names, groups, depth = part.names, network.graph.by_name, network.graph.depth
    projected = project_highlight(options, names)
    for name in get_highlighted_names(projected.highlight):
        if name in groups and name not in names:
            step, depths = groups[name].step, network.graph.slices
            slice_ = None if step is None else min(max(step, 0), depths[groups[name].stack] - 1)
            option = "weights=True" if slice_ is None else f"slices={slice_}"
            expected = "node groups that the figure draws"
            raise BNetError("highlight", expected=expected, actual=name, hint=f"Pass {option}")
    title = f"Folded graph of the net {network.declaration.name}"
    captions = [part.caption, "; ".join(_describe_reaches(network, names))]
    graph = subgraph(template_graph_to_networkx(network), names)

    def layout(density: Density) -> Drawing:
        picture = layout_template_graph(network, graph, density)
        last = [box for box in picture.boxes if box.name in part.last_groups]
        gap = max(FOLDED_ROW_GAP * density.row_gap, MIN_ROW_GAP) - 5.0  # without the outlines of a repeated node
        dots = [TextLine(b.x, b.bounds[1] - gap / 2, (TextRun("⋮"),), size=0.8 * gap, colour="grey") for b in last]
        return make_drawing(replace(picture, texts=(*picture.texts, *dots)), projected, title, captions)

    reductions = ["slices="] if options.slices is None and depth > 1 and not part.last_groups else []
    reductions += ["weights=False"] if _has_weights(network, names) else []
    fallback = partial(_layout_first_net, network, options, remaining) if remaining else None
    return compose_picture(layout, projected, lambda: reductions, fallback=fallback)


def _select_groups(network: Network, options: FoldedOptions, *, is_shortened: bool = False) -> _NetParts:
    """Return the node groups of the folded graph that the options select; of a deep net, those of one slice."""
    groups, slices, depth = network.graph.groups, network.graph.slices, network.graph.depth
    names, caption, last_groups = list(network.graph.by_name), "", set[str]()
    if options.slices is not None:
        selected = _groups_in_slices(network, parse_slices(options.slices, network))
        num_hidden = len(names) - len(selected)
        names, caption = selected, f"{num_hidden} of {len(names)} node groups are not drawn" if num_hidden else ""
    elif is_shortened or depth > MAX_FULL_SLICES or (depth > 1 and len(names) > MAX_FULL_GROUPS):
        names = _groups_in_slices(network, [0])
        steps = [(group, group.step) for group in groups if group.step is not None]
        names += [group.name for group, step in steps if step >= slices[group.stack]]
        last_groups = {group.name for group, step in steps if step + 1 == slices[group.stack] == group.slice}
        names += last_groups
        repeated = "Slice 1 repeats" if depth == 2 else f"Slices 1 to {depth - 1} repeat"
        caption = f"{repeated} slice 0 and {'is' if depth == 2 else 'are'} not drawn"
    if not options.weights:
        names = [name for name in names if not _has_weights(network, [name])]
    return _NetParts(names, frozenset(last_groups), caption)


def _has_weights(network: Network, names: Sequence[str]) -> bool:
    """Whether one of these node groups is a selector or a weight."""
    wordless = {network.graph.groups[index].name for index in network.graph.word_independent}
    return not wordless.isdisjoint(names)


def _has_repeated_slices(network: Network) -> bool:
    """Whether each stack has several slices with the same roles, or at most one."""
    roles: dict[tuple[str, int], set[str]] = {}
    for group in network.graph.groups:
        if group.step is not None and 0 <= group.step < network.graph.slices[group.stack]:
            roles.setdefault((group.stack, group.step), set()).add(group.role)
    is_same = all(names == roles.get((stack, 0)) for (stack, _), names in roles.items())
    return is_same and network.graph.depth > 1


def _find_marked_slices(network: Network, options: FoldedOptions, names: Sequence[str]) -> list[int]:
    """The slices with a mark of a result that is projected to the view; none if only slice 0 is marked."""
    projected = project_highlight(options, names)
    if projected is options:
        return []
    groups = [network.graph.by_name.get(name) for name in get_highlighted_names(projected.highlight)]
    marked = {group.slice for group in groups if group is not None and group.slice is not None}
    slices = sorted(position for position in marked if position < network.graph.depth)  # without the last states
    return slices if any(slices) else []


def _describe_reaches(network: Network, group_names: Sequence[str]) -> list[str]:
    """Return the words that each role depends on, if these are not only its own: folded arrows do not show them."""
    reaches: dict[tuple[str, str], None] = {}
    for spec in network.specs:
        for parent in spec.parents if spec.group.name in group_names else ():
            if parent.reach.kind != "same" and network.specs[parent.index].group.name in group_names:
                text = REACH_TEXTS[parent.reach.kind].format(parent.reach.width)
                reaches[join_stem(spec.group.stack, spec.group.role).replace("_", " "), text] = None
    return [f"{role} depends on {text}" for role, text in reaches]


def _groups_in_slices(network: Network, slices: Sequence[int]) -> list[str]:
    """The names of the node groups of these slices, and of the groups that belong to no slice."""
    ground = GroundGraph(network.graph.without_plates, {})
    return [group.name for group in network.graph.groups if ground.is_selected(group, NodeSelection(slices))]


def layout_template_graph(network: Network, graph: nx.MultiDiGraph, density: Density) -> Picture:
    """Lay out the folded graph: one box for each node group, a frame for each plate."""
    groups = {group.name: group for group in network.graph.groups if group.name in graph}
    boxes, columns = {}, {}
    stacks = [stack.name for stack in network.declaration.stacks]
    for name, group in groups.items():
        boxes[name] = _make_box(name, graph.nodes[name], format_node_label(group.role, slice=group.slice), density)
        columns[name] = None if group.word_stack is None else stacks.index(group.word_stack)
    links = []
    for parent, child, attrs in graph.edges(data=True):
        title = f"{parent} → {child} ({attrs['slot']}, {attrs['reach']})"
        links.append(make_arrow(parent, child, arrow_colour(groups[parent].role, groups[child].role), title=title))
    spacing = GridSpacing(weight_gap=44.0, row_gap=FOLDED_ROW_GAP, column_gap=64.0, min_column_gap=28.0)
    grid, nodes, arrows = _arrange(network, groups, boxes, columns, dict.fromkeys(boxes, ()), links, spacing, density)
    frames, texts, unframed = _plate_frames(network, nodes, groups, graph, density)
    nodes = tuple(replace(box, num_stacked=2) if box.name in unframed else box for box in nodes)
    right = max((frame.x + frame.width for frame in frames), default=0.0)
    lines, numbers = _slice_lines(grid, groups, right, is_always_shown=True)
    return Picture(nodes, arrows, (*frames, *lines), (*texts, *numbers))


def _plate_frames(
    network: Network,
    boxes: Sequence[NodeBox],
    node_groups: Mapping[str, NodeGroup],
    graph: nx.MultiDiGraph,
    density: Density,
) -> tuple[list[Frame], list[TextLine], set[str]]:
    """Return the frames of plates, their labels, and the nodes of plates without a frame.

    A plate has no frame if the frame would contain nodes that are not in the plate.
    """
    groups: dict[tuple[str, str, int | None], list[NodeBox]] = {}
    for box in boxes:
        node_group = node_groups[box.name]
        for plate in graph.nodes[box.name]["plates"]:
            step = node_group.step if plate != WORD else None
            stack = node_group.word_stack or "" if plate == WORD else node_group.stack
            groups.setdefault((plate, stack, step), []).append(box)
    frames: list[Frame] = []
    texts: list[TextLine] = []
    unframed: set[str] = set()
    for (plate, stack, _), group in sorted(groups.items(), key=lambda item: -len(item[1])):
        pad = max(26.0 * min(density.gap, 1.0), 12.0) if plate == WORD else max(14.0 * min(density.gap, 1.0), 7.0)
        name = f"{stack} word".strip() if plate == WORD else f"{plate} × {network.graph.plate_sizes[plate]}"
        frame = _bounding_frame(group, pad, "plate", name)
        names = {box.name for box in group}
        if any(box.name not in names and _overlaps(box, frame) for box in boxes):
            unframed |= names
            continue
        frames.append(frame)
        texts.append(TextLine(frame.x + 7.0, frame.y + frame.height - 7.0, (TextRun(name),), "start", 8.0, "grey"))
    return frames, texts, unframed


# both


def make_drawing(picture: Picture, options: ViewOptions, title: str, caption: Sequence[str]) -> Drawing:
    """The picture with highlighted nodes and arrows, and its title and caption."""
    if options.highlight is not None:
        marks, marked_arrows = resolve_highlight(options.highlight, dict.fromkeys(box.name for box in picture.boxes))
        boxes = [replace(b, mark=marks.get(b.name, ""), is_faded=b.name not in marks) for b in picture.boxes]
        # The text of a dot is omitted where it has no space, so its tooltip has the mark too.
        has_text = {b.name for b in boxes if b.border == "dot" and b.mark not in ("", DEFAULT_MARK)}
        boxes = [replace(b, title=f"{b.title}: {b.mark}") if b.name in has_text else b for b in boxes]
        arrows = []
        for arrow in picture.arrows:
            is_marked = (arrow.source, arrow.target) in marked_arrows
            width, opacity = (max(arrow.width, 1.8), 1.0) if is_marked else (arrow.width, arrow.opacity * 0.25)
            arrows.append(replace(arrow, width=width, opacity=opacity))
        picture = replace(picture, boxes=tuple(boxes), arrows=tuple(arrows))
    return Drawing(picture, title, caption, has_legend=options.legend)


def _arrange(
    network: Network,
    groups: Mapping[str, NodeGroup],
    boxes: Mapping[str, NodeBox],
    columns: Mapping[str, int | None],
    order: Mapping[str, tuple[int, ...]],
    unrouted_arrows: Sequence[PictureArrow],
    spacing: GridSpacing,
    density: Density,
) -> tuple[Grid, tuple[NodeBox, ...], tuple[PictureArrow, ...]]:
    """The grid, the boxes at their positions in the order of `boxes`, and the routed arrows."""
    rows = assign_rows(network.graph, {group.index for group in groups.values()})
    items: list[GridItem] = []
    weights: list[WeightItem] = []
    for name, box in boxes.items():
        group = groups[name]
        row, depth = rows[group.index]
        if depth:
            weights.append(WeightItem(box, row, depth, has_slice=group.slice is not None))
        else:
            items.append(GridItem(box, row, columns[name], (*order[name], group.index)))
    if network.graph.word_stacks:  # items without a column go to a new column at the right of items with a column
        shared = {item.row for item in items if item.column is not None}
        right = 1 + max((item.column for item in items if item.column is not None), default=0)
        items = [replace(i, column=right) if i.column is None and i.row in shared else i for i in items]
    else:
        items.sort(key=attrgetter("order"))
        row_by_name = {item.box.name: item.row for item in items}
        positions = minimize_crossings(row_by_name, [(arrow.source, arrow.target) for arrow in unrouted_arrows])
        items = [replace(item, order=(positions[item.box.name],)) for item in items]
        spacing = replace(spacing, box_gap=WORDLESS_BOX_GAP)
    grid = Grid(items, weights, unrouted_arrows, spacing.compact(density))
    positioned, arrows = grid.layout()
    by_name = {box.name: box for box in positioned}
    return grid, tuple(by_name[name] for name in boxes), arrows


def _make_box(name: str, attrs: Mapping[str, Any], label: tuple[TextRun, ...], density: Density) -> NodeBox:
    """The box of a node from its attributes in the networkx graph."""
    is_done, token = bool(attrs.get("do")), attrs.get("token")
    learnable = attrs["learnable"] and not is_done
    kind = "set by do" if is_done else attrs["kind"]
    word = "" if token is None else f" “{format_token(token, None)}”"
    description = f"{kind}, {attrs['tpm']}" + (", learnable" if learnable else "")
    return NodeBox(
        name,
        0.0,
        0.0,
        max(measure_label(label, LABEL_SIZE) + density.padding, density.min_box_width),
        BOX_HEIGHT,
        label,
        fill="do" if is_done else "observed" if kind == "observed" else "paper",
        border="double" if is_done or kind == "deterministic" else "single",
        is_dashed=learnable,
        title=f"{name}{word}: {description}, {'×'.join(map(str, attrs['shape'])) or 'scalar'}",
    )


def _slice_lines(
    grid: Grid, groups: Mapping[str, NodeGroup], min_x: float = 0.0, *, is_always_shown: bool = False
) -> tuple[list[Frame], list[TextLine]]:
    """Return a thin line next to the rows of each slice, and its number; for a single slice if `is_always_shown`."""
    steps: dict[tuple[str, int], list[NodeBox]] = {}
    for name in grid.items_by_name:
        group = groups[name]
        if group.step is not None and group.slice is not None and group.word_stack is not None:
            steps.setdefault((group.stack, group.step), []).append(grid.boxes[name])
    steps = {key: boxes for key, boxes in steps.items() if key[1] >= 0 and len({b.y for b in boxes}) > 1}
    stacks = list(dict.fromkeys(stack for stack, _ in steps))
    if len(steps) < 2 and not is_always_shown:
        return [], []
    low = min((box.bounds[1] for boxes in steps.values() for box in boxes), default=0.0)
    high = max((box.bounds[3] for boxes in steps.values() for box in boxes), default=0.0)
    right_ends = [box.bounds[2] for box in grid.boxes.values() if low <= box.y <= high]
    right = 16.0 + max([min_x, grid.right_edge, *right_ends])
    frames, texts = [], []
    for (stack, step), boxes in steps.items():
        x = right + 58.0 * stacks.index(stack)
        top, bottom = min(b.bounds[1] for b in boxes), max(b.bounds[3] for b in boxes)
        frames.append(Frame(x, top, 0.0, bottom - top, "line"))
        text = f"{stack} slice {step}" if stack else f"slice {step}"
        texts.append(TextLine(x + 6.0, (top + bottom) / 2, (TextRun(text),), "start", 9.0, "grey"))
    return frames, texts


def _box_frames(boxes: Sequence[NodeBox], box_names: Mapping[str, str]) -> tuple[list[Frame], list[TextLine]]:
    """Return a frame with a label for each box; raise an error if a frame would contain nodes of no or another box."""
    groups: dict[str, list[NodeBox]] = {}
    for box in boxes:
        if box.name in box_names:
            groups.setdefault(box_names[box.name], []).append(box)
    frames, texts = [], []
    for name, group in groups.items():
        frame = _bounding_frame(group, BOX_FRAME_PADDING, "box", name)
        frame = replace(frame, height=frame.height + 8.0)
        outside = [b.name for b in boxes if box_names.get(b.name) != name and _overlaps(b, frame)]
        if outside:
            received = f"{outside[0]} among the nodes of {name}"
            hint = "To draw the shrunk graph, use bt.draw(s.shrink(boxes), path) or bt.draw(s.tan(boxes), path)"
            raise BNetError("boxes", expected="boxes of adjacent nodes", actual=received, hint=hint)
        frames.append(frame)
        position = frame.x + 7.0, frame.y + frame.height - 7.0
        texts.append(TextLine(*position, (TextRun(format_token(name).replace("_", " ")),), "start", 8.0, "accent"))
    return frames, texts


def _bounding_frame(boxes: Sequence[NodeBox], padding: float, kind: str, name: str) -> Frame:
    """The frame around some boxes."""
    left, top, right, bottom = bounding_box(box.bounds for box in boxes)
    return Frame(left - padding, top - padding, right - left + 2 * padding, bottom - top + 2 * padding, kind, name)


def _overlaps(box: NodeBox, frame: Frame) -> bool:
    """True if a box and a frame overlap."""
    left, top, right, bottom = box.bounds
    return left < frame.x + frame.width and right > frame.x and top < frame.y + frame.height and bottom > frame.y

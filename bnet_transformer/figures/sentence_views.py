"""The figure of a sentence: the choice of the view, the nodes to draw, and a caption that counts omitted parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.naming import WORD, join_name, join_path, split_path
from bnet_transformer._core.tensors import to_numpy
from bnet_transformer.attention.tan import build_box_namer
from bnet_transformer.bridges.networkx import ground_graph_to_networkx
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, BudgetError, UnsupportedError, format_count, unknown_name_error
from bnet_transformer.figures.attention_grid import (
    StateAttention,
    describe_special_words,
    exclude_special_words,
    get_attention_specs,
    get_end_states,
    layout_attention_grid,
    select_edges,
)
from bnet_transformer.figures.fonts import GRID_DENSITIES, Density, format_token
from bnet_transformer.figures.graph_layout import layout_ground_graph, layout_net, make_drawing
from bnet_transformer.figures.options import (
    VIEWS,
    SentenceOptions,
    compose_picture,
    drop_wordless_components,
    get_highlighted_names,
    limit_error,
    match_nodes,
    name_variants,
    project_highlight,
    select_subgraph,
)
from bnet_transformer.figures.picture import Drawing, Picture
from bnet_transformer.graph import GroundGraph, NodeSelection, count_from_start, find_family
from bnet_transformer.inference import SentenceState, arrow_weights
from bnet_transformer.inference.posteriors import plan_expected_attention
from bnet_transformer.inference.query import find_state_group
from bnet_transformer.reference import compute_read_mask

MAX_UNFOLDED_ARROWS = 500  # by default, a sentence with at most this many arrows is drawn with all its nodes
MAX_OPEN_STATES = 64  # by default, attention is averaged over at most this many joint states of the latent choices
MAX_GRID_STATES = 15_000  # of words in one attention grid
MAX_GRID_PAIRS = 10_000_000  # of words in one attention grid, before the strongest pairs are selected
MAX_WEIGHED_ARROWS = 2_000_000  # arrows for which weights are computed to select some of them
FILTER_OPTIONS = ("slices", "words", "heads", "weights", "special")  # options that exclude nodes
MAX_MATCHED_NODES = 20_000  # an unknown name is compared with all nodes of a net with at most this many nodes

ArrowWeights = Mapping[tuple[int, int], float]


def select_nodes(state: SentenceState, options: SentenceOptions) -> NodeSelection:
    """The part of the ground graph that the options select."""
    selection = state.selection(
        weights=options.weights, slices=options.slices, words=options.words, heads=options.heads
    )
    return selection if options.special else exclude_special_words(state, selection)


def layout_sentence(state: SentenceState, options: SentenceOptions) -> Picture:
    """Lay out a sentence: its nodes if they are few, else the attention grid if it has one, else the folded net."""
    options = _resolve_names(state.ground, options)
    view = options.detail or _choose_view(state, options)
    views = [view]
    if options.detail is None and options.width is not None:
        views += _list_smaller_views(state, options, view)
    return _layout_first_fit(state, options, views)


def _resolve_names(ground: GroundGraph, options: SentenceOptions) -> SentenceOptions:
    """The options with a name for each node of `only` and `boxes`, and with words of `highlight` from the start."""
    highlight, only, boxes = options.highlight, options.only, options.boxes
    if isinstance(highlight, str):
        highlight = _count_words_from_start(ground, highlight)
    elif isinstance(highlight, Mapping):
        highlight = {_count_words_from_start(ground, str(name)): label for name, label in highlight.items()}
    elif isinstance(highlight, list | tuple | set | frozenset):
        highlight = [_count_words_from_start(ground, item) if isinstance(item, str) else item for item in highlight]
    if isinstance(only, str | Mapping | list | tuple | set | frozenset):
        only = _list_nodes(ground, dict.fromkeys(get_highlighted_names(only)))
    if isinstance(boxes, Mapping):
        boxes = _list_nodes(ground, boxes)
    return replace(options, highlight=highlight, only=only, boxes=boxes)


def _list_nodes(ground: GroundGraph, names: Mapping[str, Any]) -> dict[str, Any]:
    """The values of names and patterns by the name of each of their nodes."""
    return {ground.name(node): value for name, value in names.items() for node in find_family(ground, name).nodes}


def _count_words_from_start(ground: GroundGraph, path: str) -> str:
    """A name or a path with words that are counted from the start; of a row of attention, the node that attends."""
    steps = []
    for step in split_path(path):
        counted = ((variant, count_from_start(ground, variant)) for variant in name_variants(step))
        steps.append(next((name for variant, name in counted if name != variant), step))
    return join_path(steps)


def _layout_first_fit(state: SentenceState, options: SentenceOptions, views: Sequence[str]) -> Picture:
    """Lay out the first view that fits the width of the options, and a page or a slide in height."""
    view, *remaining = views
    fallback = partial(_layout_first_fit, state, options, remaining) if remaining else None
    if view == "words":
        options = project_highlight(options, _grid_nodes(state, select_nodes(state, options)))
    if view == "folded":  # a projection has no nodes that the figure omits
        _check_highlights(state, project_highlight(options, state.network.graph.by_name), view)
        return layout_net(state.network, options)
    _check_highlights(state, options, view)
    layout = _layout_nodes if view == "nodes" else _layout_words
    return layout(state, options, fallback)


def _list_smaller_views(state: SentenceState, options: SentenceOptions, view: str) -> list[str]:
    """The views with less detail than a view that draw the sentence with these options."""
    candidates = {"nodes": ("words", "folded"), "words": ("folded",), "folded": ()}[view]
    return [
        name
        for name in candidates
        if _can_draw_all(state, options, name)
        and (name != "words" or _can_draw_grid(state, select_nodes(state, options)))
    ]


def _choose_view(state: SentenceState, options: SentenceOptions) -> str:
    """Return the default view: all nodes if they are few, else the attention grid, else the folded net.

    A view that does not draw the highlighted nodes is skipped.
    """
    known, counts = state.network.graph, state.ground.word_counts
    names = get_highlighted_names(options.highlight)
    is_node_group = [name in known.by_name and known.parse_name(name, counts) is None for name in names]
    if any(is_node_group) and _can_draw_all(state, options, "folded"):  # one node of the folded net is a node group
        return "folded"
    max_arrows = MAX_UNFOLDED_ARROWS if options.limit is None else min(MAX_UNFOLDED_ARROWS, options.limit)
    can_use_grid = _can_draw_all(state, replace(options, weights=True), "words")  # the attention grid has no weights
    if not can_use_grid or state.ground.count_arrows(select_nodes(state, options)) <= max_arrows:
        return "nodes"
    if _can_draw_grid(state, select_nodes(state, options)):
        return "words"
    if options.unused("folded") and not options.unused("nodes"):
        return "nodes"
    options.check_view("folded")
    return "folded"


# views that draw the highlighted nodes


def _omitted_highlights(state: SentenceState, options: SentenceOptions, view: str) -> list[str]:
    """The highlighted names and patterns that match no node of a view."""
    names = get_highlighted_names(options.highlight)
    if not names:
        return []
    selection = select_nodes(state, options)
    if view == "nodes":
        return [name for name in names if not _is_selected(state.ground, name, selection)]
    nodes = _grid_nodes(state, selection) if view == "words" else state.network.graph.by_name
    return [name for name in names if not match_nodes(name, nodes)]


def _can_draw_all(state: SentenceState, options: SentenceOptions, view: str) -> bool:
    """Whether a view draws all highlighted nodes and uses every given option."""
    return not options.unused(view) and not _omitted_highlights(state, options, view)


def _check_highlights(state: SentenceState, options: SentenceOptions, view: str) -> None:
    """Raise an error if a view omits highlighted nodes that another view, or fewer options, would draw."""
    omitted = _omitted_highlights(state, options, view)
    if not omitted:
        return
    ground, graph = state.ground, state.network.graph
    if not _is_selected(ground, omitted[0], NodeSelection()) and not match_nodes(omitted[0], graph.by_name):
        names = [ground.iter_names(group) for group in graph.groups]
        known = itertools.chain(*names) if len(ground) <= MAX_MATCHED_NODES else map(next, names)  # one of each group
        raise unknown_name_error("highlight", omitted[0], known)
    if suggestions := [text for other in VIEWS if (text := _suggest_options(state, options, other))]:
        expected = f"nodes that this figure draws (detail={view!r})"
        raise BNetError("highlight", expected=expected, actual=omitted[0], hint=f"Use {' or '.join(suggestions)}")


def _suggest_options(state: SentenceState, options: SentenceOptions, view: str) -> str:
    """Return as text the options with which a view draws all highlighted nodes; an empty string if there are none."""
    defaults: dict[str, Any] = {option.name: option.default for option in fields(SentenceOptions)}
    unused = options.unused(view)
    given = [name for name in FILTER_OPTIONS if getattr(options, name) is not defaults[name]]
    parts = [name for name in given if name not in unused]
    for dropped in (unused, [*unused, *parts]):
        reduced = replace(options, detail=None, **{name: defaults[name] for name in dropped})
        if not _omitted_highlights(state, reduced, view):
            without = ", ".join(f"{name}=" for name in dropped)
            return f"detail={view!r}" + (f" without {without}" if dropped else "")
    return ""


def _is_selected(ground: GroundGraph, name: str, selection: NodeSelection) -> bool:
    """Whether a selection has a node that a name or a pattern matches."""
    for variant in name_variants(name):
        try:
            nodes = find_family(ground, variant).nodes
        except BNetError:
            continue
        for group in {ground.group_of(node) for node in nodes}:
            if not ground.is_selected(group, selection):
                continue
            if bool(np.isin(nodes, ground.select_nodes(group, selection)).any()):
                return True
    return False


# all nodes


def _layout_nodes(state: SentenceState, options: SentenceOptions, fallback: Callable[[], Picture] | None) -> Picture:
    """Lay out the selected nodes and their arrows."""
    ground, selection = state.ground, select_nodes(state, options)
    limit = math.inf if options.limit is None else options.limit
    if options.only is not None:
        selection = _restrict_words(ground, selection, get_highlighted_names(options.only))
    count, reductions = ground.count_arrows(selection), partial(_list_reductions, state, options, "nodes")
    limit_parts = "figure of the nodes", limit, "arrows"
    has_filter = any(part is not None for part in (options.only, options.min_weight, options.top))
    # With a filter, the number of arrows that remain is known only after their weights are computed.
    if count > (max(limit, MAX_WEIGHED_ARROWS) if has_filter else limit):
        raise limit_error(*limit_parts, count, reductions())
    weights, reason = _attention_weights(state, options, selection)
    if weights is not None and options.top is not None:
        weights = _select_strongest(state, weights, options)
    min_weight = options.min_weight or 0.0
    weak = sum(weight < min_weight for weight in (weights or {}).values())
    if options.only is None and count - weak > limit:
        raise limit_error(*limit_parts, count - weak, reductions())
    graph = ground_graph_to_networkx(
        state.network,
        ground,
        selection=selection,
        tokens=state.tokens,
        observed=state.evidence,
        weights=weights,
        min_weight=min_weight,
        limit=None,
    )
    if options.only is not None:
        graph = select_subgraph(graph, options.only, ground.id)
    elif options.slices is not None or options.words is not None or not options.special:
        graph = drop_wordless_components(graph)
    if graph.number_of_edges() > limit:
        raise limit_error(*limit_parts, graph.number_of_edges(), reductions())
    if not len(graph):
        raise BNetError("the options exclude all nodes of the figure", hint="Select more slices, words or heads")
    boxes = {} if options.boxes is None else _assign_boxes(state, options.boxes, options, list(graph))
    totals = {"nodes": (len(graph), len(ground)), "arrows": (graph.number_of_edges(), ground.count_arrows())}
    hidden = [f"{total - count:,} of {total:,} {kind}" for kind, (count, total) in totals.items() if count < total]
    counts = " and ".join(hidden)
    caption = [f"{counts} are not drawn" if counts else "", reason]
    if not options.special:
        attentions = [] if weights is None else _word_attentions(state, selection)
        caption.append(_describe_special(state, selection, attentions))

    def layout(density: Density) -> Drawing:
        picture = layout_ground_graph(state.network, graph, density, boxes=boxes)
        return make_drawing(picture, options, _format_title(state), caption)

    return compose_picture(layout, options, reductions, fallback=fallback)


def _restrict_words(ground: GroundGraph, selection: NodeSelection, names: Sequence[str]) -> NodeSelection:
    """The selection restricted to the words of some nodes."""
    indices = [ground.parse_name(name) for name in names]
    words = dict(selection.words)
    for stack in {group.word_stack for group, _ in indices if group.word_stack is not None}:
        word_ids = {index[-1] for group, index in indices if group.word_stack == stack}
        words[stack] = sorted(word_ids & set(map(int, words.get(stack, word_ids))))
    return replace(selection, words=words)


def _select_strongest(state: SentenceState, weights: ArrowWeights, options: SentenceOptions) -> ArrowWeights:
    """Return the weights, with -1 for arrows below `min_weight` or not among the `top` strongest reads.

    A read is the group of arrows by which one node attends to one word (from k and v). Reads are compared by their
    weight divided by the uniform share of their row.
    """
    min_weight, ground = options.min_weight or 0.0, state.ground
    indices = {node: ground.unravel_index(node) for arrow in weights for node in arrow}
    rows: dict[int, NDArray[np.int64]] = {}
    reads: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for source, target in weights:
        group, index = indices[source]
        axes = dict(zip(ground.axes(group), index, strict=True))
        reads.setdefault((target, axes.get("head"), axes.get(WORD)), []).append((source, target))
    gain = {}
    for read, arrows in reads.items():
        group, index = indices[read[0]]
        if group.index not in rows:
            rows[group.index] = compute_read_mask(state.model, state.network.specs[group.index]).sum(1)
        weight = max(weights[arrow] for arrow in arrows)
        if weight >= min_weight:
            gain[read] = weight * float(rows[group.index][index[-1]])
    selected = sorted(gain, key=lambda read: -round(gain[read], 9))[: options.top]
    return {**dict.fromkeys(weights, -1.0), **{arrow: weights[arrow] for read in selected for arrow in reads[read]}}


def _attention_weights(
    state: SentenceState, options: SentenceOptions, selection: NodeSelection
) -> tuple[ArrowWeights | None, str]:
    """Return `P(j | i)` of each arrow, or None; and the reason as text if `P(j | i)` is too expensive by default."""
    is_required = bool(options.attention) or options.min_weight is not None or options.top is not None
    has_attention = any(spec.has_word_attention for spec in state.network.specs)
    if not has_attention or (options.attention is False and not is_required):
        return None, ""
    if not is_required:
        count = 1  # joint states of the discrete nodes with children that are neither observed nor set by do
        for spec in state.network.specs:
            if spec.tpm.kind == "discrete" and state.network.graph.out_edges[spec.group.index]:
                for node in state.ground.select_nodes(spec.group).tolist():
                    is_open = node not in state.model.do and node not in state.evidence
                    count *= state.model.count_states(node) if is_open else 1
        if count > MAX_OPEN_STATES:
            states = f"the latent choices have {format_count(count)} joint states"
            return None, f"P(j | i) is not drawn: {states} (use attention=True)"
    return arrow_weights(state.query(), state.evaluator, selection), ""


def _assign_boxes(
    state: SentenceState, boxes: str | Mapping[str, str], options: SentenceOptions, names: Sequence[str]
) -> Mapping[str, str]:
    """Return the name of the box of each node that is in a box."""
    if not isinstance(boxes, str):
        return {name: boxes[name] for name in names if name in boxes}
    box, _ = build_box_namer(state.ground, boxes, options.slices if isinstance(options.slices, int) else 0)
    labels = {name: box(name) for name in names}
    return {name: label for name, label in labels.items() if label not in ("(outside)", name)}


# the attention grid


def _attention_specs(state: SentenceState, selection: NodeSelection) -> list[NodeSpec]:
    """The specs with attention over words, within the slices of their stack."""
    depths = state.network.graph.slices
    specs = get_attention_specs(state.network, selection.slices)
    return [spec for spec in specs if spec.group.step in range(depths[spec.group.stack])]


def _can_draw_grid(state: SentenceState, selection: NodeSelection) -> bool:
    """True if the attention grid can be drawn: every attention is a distribution over words, between hidden states."""
    specs = _attention_specs(state, selection)
    stacks = {stack for spec in specs for stack, _ in get_end_states(state.network, spec)}
    has_states = all(find_state_group(state.network, stack) is not None for stack in stacks)
    return bool(specs) and has_states and all(spec.tpm.has_attention for spec in specs)


def _grid_nodes(state: SentenceState, selection: NodeSelection) -> dict[str, tuple[str, int]]:
    """Return the stack and the word of each node of the attention grid of a selection."""
    network, nodes = state.network, dict[str, tuple[str, int]]()
    specs = _attention_specs(state, selection)
    for stack, slice_ in {end for spec in specs for end in get_end_states(network, spec)}:
        if (group := find_state_group(network, stack)) is not None:
            for word in selection.words.get(stack, range(len(state.tokens[stack]))):
                nodes[join_name(group.stem, (slice_, int(word)))] = stack, int(word)
    return nodes


def _layout_words(state: SentenceState, options: SentenceOptions, fallback: Callable[[], Picture] | None) -> Picture:
    """Lay out the attention grid."""
    network, selection = state.network, select_nodes(state, options)
    ends = [(spec, get_end_states(network, spec)) for spec in _attention_specs(state, selection)]
    if not ends:
        expected, actual = "a net with attention P(j | i)", network.declaration.name
        raise UnsupportedError("detail='words'", expected=expected, actual=actual, hint="Use detail='nodes'")
    end_states = {end for _, states in ends for end in states}
    stacks = [stack for stack in state.tokens if any(stack == end[0] for end in end_states)]
    words = {stack: [int(w) for w in selection.words.get(stack, range(len(state.tokens[stack])))] for stack in stacks}
    pairs = sum(len(words[stack]) * len(words[other]) for _, ((stack, _), (other, _)) in ends)
    hint = "Select fewer words= or slices="
    hint += ", or use detail='folded'" if _can_draw_all(state, options, "folded") else ""
    for unit, count, maximum in (
        ("states", sum(len(words[stack]) for stack, _ in end_states), MAX_GRID_STATES),
        ("pairs", pairs, MAX_GRID_PAIRS),
    ):
        if count > maximum:
            expected = f"at most {maximum} {unit} of words"
            raise BudgetError("attention grid", expected=expected, actual=count, hint=hint)
    attentions = _word_attentions(state, selection)
    grid = _grid_nodes(state, selection) if options.highlight is not None else {}
    highlighted = {grid[node] for name in get_highlighted_names(options.highlight) for node in match_nodes(name, grid)}
    stems = {stack: _state_stem(network, stack) for stack in stacks}
    reductions = partial(_list_reductions, state, options, "words")
    edges = select_edges(attentions, words, options, reductions, highlighted)
    num_nodes = state.ground.count_nodes()
    special = "" if options.special else _describe_special(state, selection, attentions)

    def layout(density: Density) -> Drawing:
        picture = layout_attention_grid(state.tokens, stems, attentions, edges, density)
        counts = f"{len(picture.boxes):,} of {num_nodes:,} nodes are drawn"
        caption = [_describe_heads(network, options), *edges.captions, special, counts]
        return make_drawing(picture, options, _format_title(state), caption)

    return compose_picture(layout, options, reductions, GRID_DENSITIES, fallback)


def _list_reductions(state: SentenceState, options: SentenceOptions, view: str) -> list[str]:
    """The options that make a figure smaller, as text."""
    graph = state.network.graph
    names = {"nodes": ("words", "slices", "heads"), "words": ("words", "slices")}[view]
    is_useful = {"words": bool(graph.word_stacks), "slices": graph.depth > 1, "heads": "head" in graph.plate_sizes}
    reductions = [f"{name}=" for name in names if is_useful[name]]
    if options.special and state.encoded.find_special_words(state.network):
        reductions.append("special=False")
    if view == "nodes" and options.weights and state.network.graph.word_independent:
        reductions.append("weights=False")
    return [*reductions, *(f"detail={name!r}" for name in _list_smaller_views(state, options, view))]


def _word_attentions(state: SentenceState, selection: NodeSelection) -> list[StateAttention]:
    """Return the mean attention of each node group of a selection that has one, between all words."""
    heads = selection.plates.get("head")
    return [
        StateAttention(
            *get_end_states(state.network, spec),
            _mean_attention(state, spec, heads),
            compute_read_mask(state.model, spec),
        )
        for spec in _attention_specs(state, selection)
    ]


def _describe_special(state: SentenceState, selection: NodeSelection, attentions: Sequence[StateAttention]) -> str:
    """Return the caption for the special tokens that are not drawn."""
    words = {stack: selection.words.get(stack, range(len(tokens))) for stack, tokens in state.tokens.items()}
    return describe_special_words(state.tokens, words, state.encoded.find_special_words(state.network), attentions)


def _mean_attention(state: SentenceState, spec: NodeSpec, heads: Any) -> NDArray[np.float64]:
    """Return the attention weights of a node group, `[word, word]`: the posterior mean, averaged over plates."""
    if not spec.tpm.has_attention:
        raise BNetError(spec.group.name, expected="attention P(j | i)", actual=spec.tpm.no_attention_reason())
    table: NDArray[np.float64] = to_numpy(
        plan_expected_attention(state.query(), state.evaluator.attention_query(spec)).run()
    )
    if heads is not None and "head" in spec.group.plates:
        table = np.take(table, list(heads), axis=spec.group.plates.index("head"))
    return np.asarray(table.reshape(-1, *table.shape[-2:]).mean(0).round(12))  # a certain weight becomes 1


def _state_stem(network: Network, stack: str) -> str:
    """Return the stem of the names of the hidden states of a stack."""
    group = find_state_group(network, stack)
    if group is None:
        name = f"stack {stack}" if stack else "the net"
        raise UnsupportedError(f"detail='words' requires hidden states, which {name} lacks", hint="Use detail='nodes'")
    return group.stem


def _describe_heads(network: Network, options: SentenceOptions) -> str:
    """Return a caption with the heads over which the attention grid is averaged."""
    if "head" not in network.graph.plate_sizes:
        return ""
    picks = (
        pair for spec in network.specs if spec.has_word_attention for parent in spec.parents for pair in parent.pick
    )
    selectors = dict.fromkeys(network.specs[index].group.name for plate, index in picks if plate == "head")
    if selectors:
        return f"Mean over the posterior of {', '.join(selectors)}"
    if options.heads is None:
        return f"Mean over {network.graph.plate_sizes['head']} heads"
    heads = [options.heads] if isinstance(options.heads, int) else list(options.heads)
    return f"Head {heads[0]}" if len(heads) == 1 else f"Mean over heads {', '.join(map(str, heads))}"


def _format_title(state: SentenceState) -> str:
    """The title of the figure of a sentence."""
    if not state.tokens:
        return f"Bnet {state.network.declaration.name}"
    text = " | ".join(" ".join(format_token(word, None) for word in words) for words in state.tokens.values())
    return f"Bnet of “{text[:300]}”"

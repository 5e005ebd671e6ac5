"""The figure of a sentence: which view is drawn, what of it, and what its caption says is left out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.arrays import to_numpy
from bnet_transformer._core.naming import WORD, join_name
from bnet_transformer.attention.tan import build_box_namer
from bnet_transformer.bridges.networkx import ground_graph_to_networkx
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, BudgetError, UnsupportedError, unknown_name_error
from bnet_transformer.figures.attention_grid import (
    StateAttention,
    get_attention_specs,
    get_end_states,
    layout_attention_grid,
)
from bnet_transformer.figures.graph_layout import finish_picture, layout_ground_graph, layout_net
from bnet_transformer.figures.labels import format_token
from bnet_transformer.figures.options import (
    VIEW_OPTIONS,
    FigureOptions,
    drop_wordless_components,
    get_highlighted_names,
    limit_error,
    match_names,
    name_variants,
    select_subgraph,
)
from bnet_transformer.figures.picture import Picture
from bnet_transformer.graph import GroundGraph, NodeSelection
from bnet_transformer.inference import SentenceState, arrow_weights
from bnet_transformer.inference.intervention_values import match_nodes
from bnet_transformer.inference.joint_posterior import expected_group_attention
from bnet_transformer.inference.selection import find_state_group
from bnet_transformer.reference.node_tables import compute_read_mask

MAX_UNFOLDED_ARROWS = 500  # arrows up to which every node of a sentence is drawn, if nothing else is asked
MAX_OPEN_STATES = 64  # joint states of open choices over which attention is averaged unasked
MAX_GRID_STATES = 15_000  # of words in one reading grid
MAX_GRID_PAIRS = 10_000_000  # of words in one reading grid, of which the strong ones are sought
MAX_WEIGHED_ARROWS = 2_000_000  # arrows of which some are sought
FILTER_OPTIONS = ("slices", "words", "heads", "weights")  # options that leave nodes out
MAX_MATCHED_NODES = 20_000  # nodes up to which an unknown name is compared with all

ArrowWeights = Mapping[tuple[int, int], float]


def select_nodes(state: SentenceState, options: FigureOptions) -> NodeSelection:
    """The part of the ground graph that the options of a figure ask for."""
    return state.selection(weights=options.weights, slices=options.slices, words=options.words, heads=options.heads)


def layout_sentence(state: SentenceState, options: FigureOptions) -> Picture:
    """The figure of a sentence: its nodes, where they are few; else the reading grid; else the folded net."""
    view = options.detail or _choose_view(state, options)
    _check_highlights(state, options, view)
    if view == "folded":
        return layout_net(state.network, options)
    return _layout_nodes(state, options) if view == "nodes" else _layout_words(state, options)


def _choose_view(state: SentenceState, options: FigureOptions) -> str:
    """The view that is drawn where none is asked for: all nodes where they are few, or else the reading grid, of those
    views that draw what is highlighted."""
    if _omitted_highlights(state, FigureOptions(highlight=options.highlight), "nodes"):
        return "folded" if _can_draw_all(state, options, "folded") else "nodes"
    few = MAX_UNFOLDED_ARROWS if options.limit is None else min(MAX_UNFOLDED_ARROWS, options.limit)
    in_grid = _can_draw_all(state, replace(options, weights=True), "words")  # no weight is in the reading grid
    if not in_grid or state.ground.count_arrows(select_nodes(state, options)) <= few:
        return "nodes"
    if _can_draw_grid(state, select_nodes(state, options)):
        return "words"
    if options.unused("folded") and not options.unused("nodes"):
        return "nodes"
    options.check_view("folded")
    return "folded"


# which views draw what is highlighted


def _omitted_highlights(state: SentenceState, options: FigureOptions, view: str) -> list[str]:
    """The names and patterns that are highlighted and of which a view draws no node."""
    names = get_highlighted_names(options.highlight)
    if not names:
        return []
    selection = select_nodes(state, options)
    if view == "nodes":
        return [name for name in names if not _is_selected(state.ground, name, selection)]
    drawn = _grid_nodes(state, selection) if view == "words" else state.network.graph.by_name
    return [name for name in names if not match_names(name, drawn)]


def _can_draw_all(state: SentenceState, options: FigureOptions, view: str) -> bool:
    """Whether a view draws all that is highlighted, and uses every option that was given."""
    return not options.unused(view) and not _omitted_highlights(state, options, view)


def _check_highlights(state: SentenceState, options: FigureOptions, view: str) -> None:
    """Refuse a view that leaves some out, where another view, or fewer options, would draw them."""
    lost = _omitted_highlights(state, options, view)
    if not lost:
        return
    ground, families = state.ground, state.network.graph.groups
    if not _is_selected(ground, lost[0], NodeSelection()) and not match_names(lost[0], state.network.graph.by_name):
        every = [ground.iter_names(family) for family in families]  # of a large net the first node of each family
        raise unknown_name_error(
            "highlight", lost[0], itertools.chain(*every) if len(ground) <= MAX_MATCHED_NODES else map(next, every)
        )
    if ways := [way for other in VIEW_OPTIONS if (way := _suggest_options(state, options, other))]:
        expected = f"nodes that this figure draws (detail={view!r})"
        raise BNetError("highlight", expected=expected, actual=lost[0], allowed="; ".join(ways))


def _suggest_options(state: SentenceState, options: FigureOptions, view: str) -> str:
    """How a view draws all: as it is, or without options that it does not use or that leave nodes out."""
    defaults: dict[str, Any] = {each.name: each.default for each in fields(FigureOptions)}
    unused = options.unused(view)
    parts = [name for name in FILTER_OPTIONS if name in options.non_default and name not in unused]
    for dropped in (unused, [*unused, *parts]):
        fewer = replace(options, detail=None, **{name: defaults[name] for name in dropped})
        if not _omitted_highlights(state, fewer, view):
            without = ", ".join(f"{name}=" for name in dropped)
            return f"detail={view!r}" + (f" without {without}" if dropped else "")
    return ""


def _is_selected(ground: GroundGraph, name: str, selection: NodeSelection) -> bool:
    """Whether a selection keeps some node that a name or a pattern stands for."""
    for form in name_variants(name):
        try:
            nodes = match_nodes(ground, form) if "*" in form else [ground.id(form)]
        except BNetError:
            continue
        for family in {ground.group_of(node) for node in nodes}:
            kept = ground.is_selected(family, selection)
            if kept and bool(np.isin(nodes, ground.select_nodes(family, selection)).any()):
                return True
    return False


# all nodes


def _layout_nodes(state: SentenceState, options: FigureOptions) -> Picture:
    """Every node and arrow that is asked for."""
    ground, selection = state.ground, select_nodes(state, options)
    most = math.inf if options.limit is None else options.limit
    if options.only is not None:
        selection = _restrict_words(ground, selection, get_highlighted_names(options.only))
    count = ground.count_arrows(selection)
    some = any(part is not None for part in (options.only, options.min_weight, options.top))
    if count > (
        max(most, MAX_WEIGHED_ARROWS) if some else most
    ):  # how many of some there are is known once they are weighed
        raise _arrow_limit_error(state, options, selection)
    weights, failed = _attention_weights(state, options, selection)
    if weights is not None and options.top is not None:
        weights = _select_strongest(state, weights, options)
    least = options.min_weight or 0.0
    weak = sum(weight < least for weight in (weights or {}).values())
    if options.only is None and count - weak > most:
        raise _arrow_limit_error(state, options, selection)
    graph = ground_graph_to_networkx(
        state.network,
        ground,
        selection=selection,
        tokens=state.tokens,
        observed=state.evidence,
        weights=weights,
        min_weight=least,
        limit=None,
    )
    if options.only is not None:
        graph = select_subgraph(graph, options.only, ground.id)
    elif options.slices is not None or options.words is not None:
        graph = drop_wordless_components(graph)
    if graph.number_of_edges() > most:
        raise _arrow_limit_error(state, options, selection)
    if not len(graph):
        raise BNetError("picture", expected="options that keep a node", actual="none kept")
    picture = layout_ground_graph(state.network, graph, boxes=_assign_boxes(state, options, list(graph)))
    hidden = [(len(ground) - len(graph), len(ground), "nodes")]
    hidden.append((ground.count_arrows() - graph.number_of_edges(), ground.count_arrows(), "arrows"))
    told = " and ".join(f"{gone:,} of {total:,} {what}" for gone, total, what in hidden if gone)
    return finish_picture(picture, options, _format_title(state), [f"{told} are not drawn" if told else "", failed])


def _restrict_words(ground: GroundGraph, selection: NodeSelection, names: Sequence[str]) -> NodeSelection:
    """The words of some nodes, of those that a selection keeps."""
    places = [ground.parse_name(name) for name in names]
    words = dict(selection.words)
    for stack in {family.word_stack for family, _ in places if family.word_stack is not None}:
        own = {index[-1] for family, index in places if family.word_stack == stack}
        words[stack] = sorted(own & set(map(int, words.get(stack, own))))
    return replace(selection, words=words)


def _arrow_limit_error(state: SentenceState, options: FigureOptions, selection: NodeSelection) -> BudgetError:
    """The error for a graph past the limit: its counts, and three ways to a figure that draws what must be drawn."""
    ground, limit = state.ground, options.limit or 0
    views = ("words", "folded") if _attention_specs(state, selection) else ("folded",)
    other = [f"detail={view!r}" for view in views if _can_draw_all(state, options, view)]
    must = (*get_highlighted_names(options.highlight), *get_highlighted_names(options.only))
    fits: list[str] = []
    for wanted in _candidate_filters(ground):
        if len(fits) + len(other[:1]) < 3:
            with suppress(BNetError):  # a net without slices, say, has no part of them
                part = select_nodes(state, replace(options, **wanted))
                count = ground.count_arrows(part)
                if 0 < count <= limit and all(_is_selected(ground, name, part) for name in must):
                    told = ", ".join(f"{name}={value}" for name, value in wanted.items())
                    fits.append(f"{told} ({count} arrows)")
    count = ground.count_arrows(selection)
    got = f"{ground.count_nodes(selection)} nodes and {count} arrows"
    return limit_error("figure of the nodes", limit, "arrows", got, [*fits, *other][:3], count)


def _candidate_filters(ground: GroundGraph) -> list[dict[str, Any]]:
    """Filters, the mildest first."""
    heads = {"heads": 0} if "head" in ground.template.plate_sizes else {}
    few = [{"words": range(n)} for n in (32, 16, 8, 5, 3) if n < min(ground.word_counts.values(), default=0)]
    tries: list[dict[str, Any]] = [{"slices": 0}, heads, *few, {"slices": 0, **heads}]
    tries += [{"slices": 0, **each} for each in few] + [{"slices": 0, **heads, **each} for each in few]
    tries += [{"weights": False, **each} for each in tries]
    return [wanted for wanted in tries if wanted]


def _select_strongest(state: SentenceState, weights: ArrowWeights, options: FigureOptions) -> ArrowWeights:
    """The weights, -1 where an arrow is of a weak read, or of one past the strongest.

    A read is all arrows by which one node reads one word (k and v), and strong against the even share.
    """
    least, ground = options.min_weight or 0.0, state.ground
    places = {node: ground.unravel_index(node) for arrow in weights for node in arrow}
    rows: dict[int, NDArray[np.int64]] = {}
    reads: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for source, target in weights:
        family, index = places[source]
        axes = dict(zip(ground.axes(family), index, strict=True))
        reads.setdefault((target, axes.get("head"), axes.get(WORD)), []).append((source, target))
    gain = {}
    for read, arrows in reads.items():
        family, index = places[read[0]]
        if family.index not in rows:
            rows[family.index] = compute_read_mask(state.model, state.network.specs[family.index]).sum(1)
        share = max(weights[arrow] for arrow in arrows)
        if share >= least:
            gain[read] = share * float(rows[family.index][index[-1]])
    kept = sorted(gain, key=lambda read: -round(gain[read], 9))[: options.top]
    return {**dict.fromkeys(weights, -1.0), **{arrow: weights[arrow] for read in kept for arrow in reads[read]}}


def _attention_weights(
    state: SentenceState, options: FigureOptions, selection: NodeSelection
) -> tuple[ArrowWeights | None, str]:
    """`P(j | i)` for the arrows, and why it is not there where nobody insists on it."""
    if options.attention is False and options.min_weight is None and options.top is None:
        return None, ""
    if not any(member.has_word_attention for member in state.network.specs):
        return None, ""
    if (
        options.attention is None
        and options.min_weight is None
        and options.top is None
        and (count := _count_open_states(state)) > MAX_OPEN_STATES
    ):
        return None, f"P(j | i) is not drawn, for {count:,} joint states are open (attention=True draws it)"
    return arrow_weights(state.query(), state.evaluator, selection), ""


def _count_open_states(state: SentenceState) -> int:
    """How many joint states the choices have that other nodes hang on, and that nothing has settled."""
    ground, count = state.ground, 1
    for member in state.network.specs:
        if member.tpm.kind == "discrete" and ground.template.out_edges[member.group.index]:
            for node in ground.select_nodes(member.group).tolist():
                count *= 1 if node in state.model.do or node in state.evidence else state.model.count_states(node)
    return count


def _assign_boxes(state: SentenceState, options: FigureOptions, names: Sequence[str]) -> dict[str, str]:
    """The box of each node that is in one."""
    if isinstance(options.boxes, str):
        box, _ = build_box_namer(state.ground, options.boxes, options.slices if isinstance(options.slices, int) else 0)
        found = {name: box(name) for name in names}
        return {name: where for name, where in found.items() if where != "(outside)" and where != name}
    told = options.boxes or {}
    for name in told:
        state.ground.id(name)
    return {name: told[name] for name in names if name in told}


# the reading grid


def _attention_specs(state: SentenceState, selection: NodeSelection) -> list[NodeSpec]:
    """The members that read words, within the slices of their stack."""
    depths = state.network.graph.slices
    readers = get_attention_specs(state.network, selection.slices)
    return [member for member in readers if member.group.step in range(depths[member.group.stack])]


def _can_draw_grid(state: SentenceState, selection: NodeSelection) -> bool:
    """True where a reading grid can be drawn: words are read by distributions, between states over words."""
    readers = _attention_specs(state, selection)
    stacks = {stack for member in readers for stack, _ in get_end_states(state.network, member)}
    has_states = all(find_state_group(state.network, stack) is not None for stack in stacks)
    return bool(readers) and has_states and all(member.tpm.has_attention for member in readers)


def _grid_nodes(state: SentenceState, selection: NodeSelection) -> dict[str, tuple[str, int]]:
    """The stack and the word of each node of the reading grid of a selection."""
    network, found = state.network, dict[str, tuple[str, int]]()
    for stack, slice_ in {
        end for member in _attention_specs(state, selection) for end in get_end_states(network, member)
    }:
        if (family := find_state_group(network, stack)) is not None:
            for word in selection.words.get(stack, range(len(state.tokens[stack]))):
                found[join_name(family.stem, (slice_, int(word)))] = stack, int(word)
    return found


def _layout_words(state: SentenceState, options: FigureOptions) -> Picture:
    """The reading grid."""
    network, selection = state.network, select_nodes(state, options)
    ends = [(member, get_end_states(network, member)) for member in _attention_specs(state, selection)]
    if not ends:
        raise UnsupportedError(
            "detail", expected="a net with P(j | i) (detail='words')", actual=network.declaration.name
        )
    every = {end for _, both in ends for end in both}
    stacks = [stack for stack in state.tokens if any(stack == end[0] for end in every)]
    words = {stack: [int(w) for w in selection.words.get(stack, range(len(state.tokens[stack])))] for stack in stacks}
    pairs = sum(len(words[stack]) * len(words[other]) for _, ((stack, _), (other, _)) in ends)
    allowed = "fewer words= or slices=" + (", or detail='folded'" if _can_draw_all(state, options, "folded") else "")
    for what, count, most in (
        ("states", sum(len(words[stack]) for stack, _ in every), MAX_GRID_STATES),
        ("pairs", pairs, MAX_GRID_PAIRS),
    ):
        if count > most:
            raise BudgetError("reading grid", expected=f"at most {most} {what} of words", actual=count, allowed=allowed)
    heads = selection.plates.get("head")
    readings = [
        StateAttention(*both, _mean_attention(state, member, heads), compute_read_mask(state.model, member))
        for member, both in ends
    ]
    grid = _grid_nodes(state, selection) if options.highlight is not None else {}
    marked = {grid[node] for name in get_highlighted_names(options.highlight) for node in match_names(name, grid)}
    stems = {stack: _state_stem(network, stack) for stack in stacks}
    picture, hidden = layout_attention_grid(state.tokens, words, stems, readings, options, marked)
    drawn = f"{len(picture.boxes):,} of {state.ground.count_nodes():,} nodes are drawn"
    return finish_picture(picture, options, _format_title(state), [_describe_heads(network, options), *hidden, drawn])


def _mean_attention(state: SentenceState, spec: NodeSpec, heads: Any) -> NDArray[np.float64]:
    """What a member reads, `[word, word]`, averaged over what is open and over its plates."""
    if not spec.tpm.has_attention:
        raise BNetError(spec.group.name, expected="attention P(j | i)", actual=spec.tpm.no_attention_reason())
    table: NDArray[np.float64] = to_numpy(
        expected_group_attention(state.query(), state.evaluator.attention_query(spec))
    )
    if heads is not None and "head" in spec.group.plates:
        table = np.take(table, list(heads), axis=spec.group.plates.index("head"))
    return np.asarray(table.reshape(-1, *table.shape[-2:]).mean(0).round(12))  # what is certain is exactly 1


def _state_stem(network: Network, stack: str) -> str:
    """The stem of the states of a stack's words."""
    family = find_state_group(network, stack)
    if family is None:
        expected, got = "a stack with a state over words", stack or "none"
        raise UnsupportedError("detail", expected=expected, actual=got, allowed="detail='nodes'")
    return family.stem


def _describe_heads(network: Network, options: FigureOptions) -> str:
    if "head" not in network.graph.plate_sizes:
        return ""
    if options.heads is None:
        return f"the mean over {network.graph.plate_sizes['head']} heads"
    told = [options.heads] if isinstance(options.heads, int) else list(options.heads)
    return f"head {told[0]}" if len(told) == 1 else f"the mean over heads {', '.join(map(str, told))}"


def _format_title(state: SentenceState) -> str:
    if not state.tokens:
        return f"the bnet {state.network.declaration.name}"
    said = " | ".join(" ".join(format_token(word, None) for word in words) for words in state.tokens.values())
    return f"the bnet of “{said[:300]}”"

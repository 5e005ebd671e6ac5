"""Figures of a net and of a sentence: which one is drawn, what of it, and what its caption says is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bnet_transformer import asking, export
from bnet_transformer.axes import WORD, join, stem_of
from bnet_transformer.errors import BNetError, BudgetError, ReadingError
from bnet_transformer.graph import Family, Ground, Selection
from bnet_transformer.inference import Answers, SentenceState, arrow_weights
from bnet_transformer.inference.rollout import settled_choices
from bnet_transformer.inference.tan import box_namer
from bnet_transformer.network import Member, Network
from bnet_transformer.viz.highlights import Highlights, check_families
from bnet_transformer.viz.labels import shown, written
from bnet_transformer.viz.marks import marks_of, meant, named, part, part_of, with_words
from bnet_transformer.viz.nodes import folded_picture, ground_picture
from bnet_transformer.viz.options import Options, too_many
from bnet_transformer.viz.picture import Picture, Text
from bnet_transformer.viz.style import emphasised, finished
from bnet_transformer.viz.words import Reading, chosen, spoken, words_picture

PLAIN = 500  # arrows up to which every node of a sentence is drawn, if nothing else is asked
OPEN = 64  # joint states of open choices over which attention is averaged unasked
STATES = 15_000  # of words in one reading grid
PAIRS = 10_000_000  # of words in one reading grid, of which the strong ones are sought
WEIGHED = 2_000_000  # arrows of which the strong ones are sought
DEEP = 3  # slices up to which a folded net is drawn whole ...
TALL = 50  # ... if it has no more families than this


Weights = Mapping[tuple[int, int], float]

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


def net_picture(network: Network, asked: Options) -> Picture:
    """The folded graph; of a deep net the first slice and what follows the last."""
    graph = export.folded_to_networkx(network)
    depth = network.graph.depth
    kept = list(graph)
    caption, not_drawn = "", False
    if asked.slices is not None:
        wanted = set(asking.slices_of(asked.slices, network))
        kept = [f.name for f in network.graph.families if _kept(network, f, wanted)]
        gone = len(graph) - len(kept)
        caption = f"{gone} of {len(graph)} families of nodes are not drawn" if gone else ""
    elif depth > DEEP or (depth > 1 and len(graph) > TALL):
        kept = [f.name for f in network.graph.families if _kept(network, f, {0})]
        kept += [
            f.name for f in network.graph.families if f.step is not None and f.step >= network.graph.slices[f.stack]
        ]
        kept += [f.name for f in network.graph.families if _leaves(network, f)]
        rest = "slice 1 is like slice 0, and is" if depth == 2 else f"slices 1 to {depth - 1} are like slice 0, and are"
        caption, not_drawn = f"{rest} not drawn", True
    if not asked.weights:
        wordless = {network.graph.families[index].name for index in network.graph.wordless}
        kept = [name for name in kept if name not in wordless]
    check_families(network, asked, kept)
    picture = folded_picture(network, part(graph, kept))
    if not_drawn:
        picture = replace(picture, texts=(*picture.texts, *_dots(network, picture)))
    told = [caption, *_told_reaches(network, kept)]
    return _finished(picture, asked, f"the folded graph of the net {network.declaration.name}", told)


def _told_reaches(network: Network, kept: Sequence[str]) -> list[str]:
    """Which words a word reads, for each role that reads others: a folded arrow does not show it."""
    told: dict[tuple[str, str], None] = {}
    for member in network.members:
        for given in member.inputs if member.family.name in kept else ():
            if given.reach.kind != "same" and network.members[given.parent].family.name in kept:
                said = REACHES[given.reach.kind].format(given.reach.width)
                told[stem_of(member.family.stack, member.family.role).replace("_", " "), said] = None
    return [f"{role} reads {said}" for role, said in told]


def _dots(network: Network, picture: Picture) -> list[Text]:
    """Dots above the states that leave the last slice."""
    last = {family.name for family in network.graph.families if _leaves(network, family)}
    return [
        Text(box.x, box.edges[1] - 12.0, written("⋮"), size=14.0, colour="grey")
        for box in picture.boxes
        if box.name in last
    ]


def _kept(network: Network, family: Family, slices: set[int]) -> bool:
    last = network.graph.slices.get(family.stack, 1) - 1
    if family.step is None:
        return True
    entered = family.slice is not None and family.slice in slices and family.step < family.slice
    return (
        entered or family.step in slices or (family.step < 0 and 0 in slices) or (family.step > last and last in slices)
    )


def _leaves(network: Network, family: Family) -> bool:
    """True for the state that leaves the last slice."""
    return family.step is not None and family.slice == network.graph.slices[family.stack] == family.step + 1


def selection_of(state: SentenceState, asked: Options) -> Selection:
    """The part of the ground graph that the options of a figure ask for."""
    return state.selection(weights=asked.weights, slices=asked.slices, words=asked.words, heads=asked.heads)


def sentence_picture(state: SentenceState, asked: Options) -> Picture:
    """The figure of a sentence: its nodes, where they are few; else the reading grid; else the folded net."""
    highlights = Highlights(asked, state.ground, partial(_grid_names, state), partial(selection_of, state))
    view = asked.detail or _view(state, asked, highlights)
    highlights.check(view)
    if view == "nodes":
        return _nodes(state, asked, highlights)
    return net_picture(state.network, asked) if view == "folded" else _words(state, asked, highlights)


def _view(state: SentenceState, asked: Options, highlights: Highlights) -> str:
    """The view that is drawn where none is asked for: all nodes where they are few, or else the reading grid, of those
    views that draw what is highlighted."""
    few = PLAIN if asked.limit is None else min(PLAIN, asked.limit)
    grid = replace(asked, weights=True).fits("words")  # no weight is in the reading grid
    if not highlights.left_out("nodes", Selection()):
        grid = grid and not highlights.left_out("words", selection_of(state, asked))
        if not grid or state.ground.count_arrows(selection_of(state, asked)) <= few:
            return "nodes"
        if _has_grid(state, selection_of(state, asked)):
            return "words"
        if asked.fits("nodes") and not asked.fits("folded"):
            return "nodes"
        asked.check_view("folded")
        return "folded"
    return "folded" if highlights.shown_in("folded") else "nodes"


def _has_grid(state: SentenceState, selection: Selection) -> bool:
    """True where a reading grid can be drawn: words are read by distributions, between states over words."""
    readers = _readers(state.network, selection.slices)
    stacks = {stack for member in readers for stack, _ in ends_of(state.network, member)}
    has_states = all(asking.state_of(state.network, stack) is not None for stack in stacks)
    return bool(readers) and has_states and all(member.tpm.has_reading for member in readers)


def _others(state: SentenceState, selection: Selection) -> tuple[str, ...]:
    """The views that can be drawn of a selection in place of its nodes."""
    return ("words", "folded") if _readers(state.network, selection.slices) else ("folded",)


def _grid_names(state: SentenceState, selection: Selection) -> dict[str, tuple[str, int]]:
    """The stack and the word of each node of the reading grid of a selection."""
    network, found = state.network, dict[str, tuple[str, int]]()
    for stack, slice_ in {end for member in _readers(network, selection.slices) for end in ends_of(network, member)}:
        if (family := asking.state_of(network, stack)) is not None:
            for word in selection.words.get(stack, range(len(state.tokens[stack]))):
                found[join(stem_of(stack, family.role), (slice_, int(word)))] = stack, int(word)
    return found


def _nodes(state: SentenceState, asked: Options, highlights: Highlights) -> Picture:
    """Every node and arrow that is asked for."""
    ground, selection, most = state.ground, selection_of(state, asked), asked.limit
    if asked.only is not None:
        selection = _narrowed(ground, selection, named(asked.only))

    def refusal() -> BudgetError:
        views = [view for view in _others(state, selection) if highlights.shown_in(view)]
        return too_many(ground, selection, views, most or 0, highlights.part_of)

    if most is not None and _least(state, asked, selection) > most:
        raise refusal()
    weights, failed = _arrow_weights(state, asked, selection)
    if weights is not None:
        weights = _strongest(state, weights, asked)
    if most is not None and asked.only is None and _count(ground, selection, weights) > most:
        raise refusal()
    graph = export.ground_to_networkx(
        state.network,
        ground,
        selection=selection,
        tokens=state.tokens,
        observed=state.evidence,
        weights=weights,
        min_weight=0.0,
        limit=None,
    )
    if asked.only is not None:
        graph = part_of(graph, asked.only, ground.id)
    elif asked.slices is not None or asked.words is not None:
        graph = with_words(graph)
    if most is not None and graph.number_of_edges() > most:
        raise refusal()
    if not len(graph):
        raise BNetError("picture", expected="options that keep a node", got="none kept")
    boxes = None if asked.boxes is None else _boxes(state, asked, list(graph))
    picture = ground_picture(state.network, graph, boxes=boxes)
    hidden = [(len(ground) - len(graph), len(ground), "nodes")]
    hidden.append((ground.count_arrows() - graph.number_of_edges(), ground.count_arrows(), "arrows"))
    told = " and ".join(f"{gone:,} of {total:,} {what}" for gone, total, what in hidden if gone)
    return _finished(picture, asked, _title(state), [f"{told} are not drawn" if told else "", failed])


def _narrowed(ground: Ground, selection: Selection, names: Sequence[str]) -> Selection:
    """The words of some nodes, of those that a selection keeps."""
    places = [ground.locate(name) for name in names]
    words = dict(selection.words)
    for stack in {family.words for family, _ in places if family.words is not None}:
        own = {index[-1] for family, index in places if family.words == stack}
        words[stack] = sorted(own & set(map(int, words.get(stack, own))))
    return replace(selection, words=words)


def _least(state: SentenceState, asked: Options, selection: Selection) -> int:
    """How many arrows will be left at least, known before anything is computed."""
    ground, members = state.ground, state.network.members
    count = ground.count_arrows(selection)
    if asked.only is not None:
        return 0 if count <= WEIGHED else count
    if (asked.min_weight is None and asked.top is None) or count > WEIGHED:
        return count
    over = [{g.parent for g in m.inputs if WORD in g.over} if m.reads_words else () for m in members]
    found = ((bundle, len(sources)) for bundle, sources, _ in ground.arrows(selection))
    return sum(size for bundle, size in found if bundle.parent not in over[bundle.child])


def _count(ground: Ground, selection: Selection, weights: Weights | None) -> int:
    """How many arrows of a selection are left without those of a weight below zero, which are not asked for."""
    return ground.count_arrows(selection) - sum(weight < 0 for weight in (weights or {}).values())


def _strongest(state: SentenceState, weights: Weights, asked: Options) -> Weights:
    """The weights, -1 where an arrow is not asked for: of a weak read, or of one past the strongest.

    A read is all arrows by which one node reads one word (k and v), and strong against the even share.
    """
    least, ground = asked.min_weight or 0.0, state.ground
    if asked.top is None:
        return {arrow: weight if weight >= least else -1.0 for arrow, weight in weights.items()}
    places = {node: ground.place(node) for arrow in weights for node in arrow}
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
            rows[family.index] = asking.readable(state.world, state.network.members[family.index]).sum(1)
        share = max(weights[arrow] for arrow in arrows)
        if share >= least:
            gain[read] = share * float(rows[family.index][index[-1]])
    kept = sorted(gain, key=lambda read: -round(gain[read], 9))[: asked.top]
    return {**dict.fromkeys(weights, -1.0), **{arrow: weights[arrow] for read in kept for arrow in reads[read]}}


def _arrow_weights(state: SentenceState, asked: Options, selection: Selection) -> tuple[Weights | None, str]:
    """`P(j | i)` for the arrows, and why it is not there where nobody insists on it."""
    if asked.attention is False and asked.min_weight is None and asked.top is None:
        return None, ""
    if not any(member.reads_words for member in state.network.members):
        return None, ""
    if asked.attention is None and asked.min_weight is None and asked.top is None and (count := _open(state)) > OPEN:
        return None, f"P(j | i) is not drawn, for {count:,} joint states are open (attention=True draws it)"
    return arrow_weights(state.query(), state.answers, selection), ""


def _open(state: SentenceState) -> int:
    """How many joint states the choices have that other nodes hang on, and that nothing has settled."""
    ground, count = state.ground, 1
    for member in state.network.members:
        if member.tpm.kind == "discrete" and ground.folded.out_of[member.family.index]:
            for node in ground.nodes(member.family).tolist():
                count *= 1 if node in state.world.do or node in state.evidence else state.world.count_states(node)
    return count


def _boxes(state: SentenceState, asked: Options, names: Sequence[str]) -> dict[str, str]:
    """The box of each node that is in one."""
    if isinstance(asked.boxes, str):
        slice_ = asked.slices if isinstance(asked.slices, int) else 0
        box, _ = box_namer(state.ground, asked.boxes, slice_)
        found = {name: box(name) for name in names}
        return {name: where for name, where in found.items() if where != "(outside)" and where != name}
    told = asked.boxes or {}
    for name in told:
        state.ground.id(name)
    return {name: told[name] for name in names if name in told}


def _words(state: SentenceState, asked: Options, highlights: Highlights) -> Picture:
    """The reading grid."""
    network, selection = state.network, selection_of(state, asked)
    ends = [(member, ends_of(network, member)) for member in _readers(network, selection.slices)]
    if not ends:
        raise ReadingError("detail", expected="a net with P(j | i) (detail='words')", got=network.declaration.name)
    there = {state for _, both in ends for state in both}
    stacks = [stack for stack in state.tokens if any(stack == state[0] for state in there)]
    words = {stack: [int(w) for w in selection.words.get(stack, range(len(state.tokens[stack])))] for stack in stacks}
    states = {stack: sorted(number for own, number in there if own == stack) for stack in stacks}
    count = sum(len(words[stack]) * len(states[stack]) for stack in stacks)
    allowed = "fewer words= or slices=" + (", or detail='folded'" if highlights.shown_in("folded") else "")
    if count > STATES:
        raise BudgetError("reading grid", expected=f"at most {STATES} states of words", got=count, allowed=allowed)
    pairs = sum(len(words[stack]) * len(words[other]) for _, ((stack, _), (other, _)) in ends)
    if pairs > PAIRS:
        raise BudgetError("reading grid", expected=f"at most {PAIRS} pairs of words", got=pairs, allowed=allowed)
    readings = [
        Reading(*both, _matrix(state, member, selection), asking.readable(state.world, member)) for member, both in ends
    ]
    grid = highlights.grid(selection) if highlights.names else {}
    marked = {grid[node] for name in highlights.names for node in meant(name, grid)}
    reads = chosen(readings, words, asked.min_weight, asked.top, asked.limit, parts=not marked)
    words, silent = spoken(words, reads, marked)
    stems = {stack: stem_of(stack, _state(network, stack).role) for stack in stacks}
    name = lambda stack, slice_, word: join(stems[stack], (slice_, word))  # noqa: E731
    picture = words_picture(state.tokens, words, states, name, reads)
    total = state.ground.count_nodes()
    caption = [_heads(network, asked), reads.hidden, silent, f"{len(picture.boxes):,} of {total:,} nodes are drawn"]
    return _finished(picture, asked, _title(state), caption)


def _heads(network: Network, asked: Options) -> str:
    if "head" not in network.graph.sizes:
        return ""
    if asked.heads is None:
        return f"the mean over {network.graph.sizes['head']} heads"
    told = [asked.heads] if isinstance(asked.heads, int) else list(asked.heads)
    return f"head {told[0]}" if len(told) == 1 else f"the mean over heads {', '.join(map(str, told))}"


def _readers(network: Network, slices: Any) -> list[Member]:
    """The members that read words, of some slices."""
    found = [member for member in network.members if member.reads_words]
    depths = network.graph.slices
    return [m for m in found if m.family.step in (slices or range(depths[m.family.stack]))]


def ends_of(network: Network, member: Member) -> tuple[tuple[str, int], tuple[str, int]]:
    """The states between which a member reads: of the words that are read, and of those that read."""
    step = member.family.step or 0
    source = network.stack_read(member)
    out = step if source == member.family.stack else network.graph.slices[source]
    return (source, out), (member.family.stack, step + 1)


def _matrix(state: SentenceState, member: Member, selection: Selection) -> NDArray[np.float64]:
    """What a member reads, `[word, word]`, averaged over its plates and over what is open."""
    family, step = member.family, member.family.step or 0
    heads = selection.plates.get("head")
    total: Any = 0.0
    for done, share in settled_choices(state.query(), [step], family.stem):
        answers = (
            Answers(state.module, replace(state.world, do={**state.world.do, **done}), {}) if done else state.answers
        )
        table = answers.attention(step, family.stem).detach().double()
        if heads is not None and "head" in family.plates:
            table = table.index_select(family.plates.index("head"), torch.tensor(list(heads)))
        total = total + share * table.reshape(-1, *table.shape[-2:]).mean(0)
    return np.asarray(total)


def _state(network: Network, stack: str) -> Family:
    """The state of a stack's words."""
    found = asking.state_of(network, stack)
    if found is not None:
        return found
    raise ReadingError(
        "detail", expected="a stack with a state over words", got=stack or "none", allowed="detail='nodes'"
    )


def _title(state: SentenceState) -> str:
    if not state.tokens:
        return f"the bnet {state.network.declaration.name}"
    return (
        "the bnet of “"
        + " | ".join(" ".join(shown(word, None) for word in words) for words in state.tokens.values())[:300]
        + "”"
    )


def _finished(picture: Picture, asked: Options, title: str, caption: Sequence[str]) -> Picture:
    """The picture with what stands out, its legend and caption, in its theme."""
    if asked.highlight is not None:
        marks, ways = marks_of(asked.highlight, {box.name for box in picture.boxes})
        boxes, arrows = emphasised(picture.boxes, picture.arrows, marks, ways)
        picture = replace(picture, boxes=boxes, arrows=arrows)
    return finished(replace(picture, theme=asked.theme), legend=asked.legend, title=title, caption=caption)

"""Plots of sentences: their attention TPMs as heat maps, and posteriors of their discrete nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer._core.arrays import to_numpy
from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer._core.naming import WORD
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.selection import find_attention_spec, merge_words, parse_attention_slices
from bnet_transformer.plots.canvas import Canvas
from bnet_transformer.plots.heat_maps import HeatMapData, draw_heat_map, draw_heat_maps, probability_limits
from bnet_transformer.plots.labelled_arrays import (
    BarSeries,
    draw_bars,
    make_labelled_array,
    plot_labelled_array,
    select_top,
)
from bnet_transformer.reference.node_tables import compute_read_mask

TOKEN_WORDS = "tokens"
BLANK_NOTE = "Blank: no arrow, word i does not read word j."


@runtime_checkable
class SentenceLike(Protocol):
    """A sentence, as plots ask it: of its words, its attention, its posteriors."""

    state: SentenceState

    def attention(self, slice: int, *, role: str | None = None, words: str = TOKEN_WORDS) -> Tensor:
        """The attention TPMs of a slice."""

    def posterior(self, name: Any, evidence: Mapping[str, object] | None = None) -> Tensor:
        """The posterior of a discrete node."""


def plot_sentence(
    s: SentenceLike,
    canvas: Canvas,
    *,
    slice: int | Collection[int] | None = None,
    head: int | None = None,
    role: str | None = None,
    words: str = TOKEN_WORDS,
    node: str | Sequence[str] | None = None,
    evidence: Mapping[str, object] | None = None,
    top: int = 20,
) -> None:
    """The attention TPMs of a slice, or of all; with `node`, its posterior given what is seen and the `evidence`."""
    if node is not None:
        if slice is not None or head is not None or role is not None or words != TOKEN_WORDS:
            raise BNetError("node", expected="node= with evidence= and top=", actual="options of attention as well")
        plot_posterior(s, canvas, node, evidence, top)
        return
    if evidence is not None:
        allowed = "node=; s.observe(...), whose attention is that of what was seen"
        raise BNetError("evidence", expected="a node whose posterior it changes", actual="none", allowed=allowed)
    check_choice("words", words, (TOKEN_WORDS, "words"))
    chosen = parse_attention_slices(s.state.network, "all" if slice is None else slice, role)[1]
    several = {t: build_attention_maps(s, t, head, role, words) for t in chosen}
    maps = [each for found in several.values() for each in found]
    told: Any = {"value_label": "P(j | i)", "x": "word j that is read", "y": "word i that reads"}
    if any(bool(np.isnan(each.values).any()) for each in maps):
        canvas.add_note(BLANK_NOTE)
    limits = probability_limits([each.values for each in maps])
    if len(maps) == 1:
        draw_heat_map(canvas, maps[0], **told, limits=limits, square=True)
        canvas.set_title(f"Slice {chosen[0]}" + (f", {maps[0].name}" if maps[0].name else ""))
        return
    across, panels = arrange_panels(several)
    draw_heat_maps(canvas, panels, **told, num_columns=across, limits=limits)
    canvas.set_title(f"Slice {chosen[0]}" if len(chosen) == 1 else "Attention TPMs, slice by slice")


def arrange_panels(maps_by_slice: Mapping[int, list[HeatMapData]]) -> tuple[int, list[HeatMapData | None]]:
    """How many panels there are across, and the panels of all slices row by row: each slice begins a row."""
    widest = max(map(len, maps_by_slice.values()))
    if widest == 1:
        alone = [replace(maps[0], name=f"slice {t}", short_name="") for t, maps in maps_by_slice.items()]
        return min(4, len(alone)), list(alone)
    if len(maps_by_slice) == 1:
        (maps,) = maps_by_slice.values()
        return min(4, len(maps)), list(maps)
    across = widest if widest <= 16 else 8
    panels: list[HeatMapData | None] = []
    for t, maps in maps_by_slice.items():
        panels += [replace(each, row_title=f"slice {t}") for each in maps]
        panels += [None] * (-len(maps) % across)
    return across, panels


def build_attention_maps(
    s: SentenceLike, slice_: int, head: int | None, role: str | None, words: str
) -> list[HeatMapData]:
    """A map for each state of the open choices and each head of a slice; blank where no arrow leads."""
    world = s.state.model
    found = s.attention(slice_, role=role, words=words).double()
    member = find_attention_spec(world, slice_, role)
    stacks = (
        member.group.word_stack or "",
        world.network.get_source_stack(member),
    )  # of those that read, and that are read
    rows, columns = (_word_labels(s, stack, words) for stack in stacks)
    names = _name_dims(s, member, found.dim() - 2)
    readable = torch.from_numpy(compute_read_mask(world, member))
    if words != TOKEN_WORDS:
        readable = merge_words(readable.double(), s.state.encoded.group_subwords()) > 0
    kept = found.masked_fill(~readable, torch.nan)
    if head is not None:
        if "head" not in names:
            chosen = [m.group.name for m in world.network.specs if m.tpm.kind == "discrete" and m.group.role == "c"]
            allowed = f"s.do({chosen[0]}=...)" if chosen else "head=None"
            raise BNetError("head", expected="a net with a plate of heads", actual="one without", allowed=allowed)
        place = names.index("head")
        if check_int("head", head, minimum=0) >= found.shape[place]:
            raise BNetError("head", expected=f"a head from 0 to {found.shape[place] - 1}", actual=head)
    maps = []
    for states in np.ndindex(*found.shape[:-2]):
        told = dict(zip(names, states, strict=True))
        if head is not None and told["head"] != head:
            continue
        name = ", ".join(f"head {k}" if axis == "head" else f"{axis} = {k}" for axis, k in told.items())
        short = ", ".join(str(k) for k in told.values())
        maps.append(HeatMapData(to_numpy(kept[states]), rows, columns, name, short_name=short))
    return maps


def plot_posterior(
    s: SentenceLike, canvas: Canvas, node: str | Sequence[str], evidence: Mapping[str, object] | None, top: int
) -> None:
    """Bars of one node, before and after the evidence; a heat map of two together."""
    check_int("top", top)
    names = (node,) if isinstance(node, str) else tuple(node)
    if not 1 <= len(names) <= 2:
        raise BNetError("node", expected="one node, or two together", actual=f"{len(names)}")
    said = [f"{name} = {value if isinstance(value, str | int) else '…'}" for name, value in (evidence or {}).items()]
    given = ", ".join([*said, *(f"{s.state.ground.name(node)} seen" for node in s.state.evidence)])
    what = f"P({', '.join(names)}" + (f" | {given})" if given and len(given) < 40 else " | evidence)" if given else ")")
    if len(names) == 2:
        called = {name: state_labels(s, name) for name in names}
        plot_labelled_array(
            make_labelled_array(s.posterior(names, evidence), names, labels=called, value_label=what), canvas
        )
        return
    series = [BarSeries(to_numpy(s.posterior(names[0], evidence).double()), what)]
    if evidence:
        before = to_numpy(s.posterior(names[0]).double())
        prior = f"P({names[0]}" + (" | seen)" if s.state.evidence else ")")
        series = [BarSeries(before, prior, colour="prior"), *series]
    series, labels, told = select_top(series, state_labels(s, names[0]), top)
    canvas.add_note(told)
    draw_bars(canvas, series, labels, value_label="probability" if evidence else what, category_label=names[0])


def plot_sentences(
    sentences_: Sequence[SentenceLike], canvas: Canvas, *, node: str = "c", evidence: Mapping[str, object] | None = None
) -> None:
    """The posterior of a node in each of several sentences, a row each."""
    if not isinstance(node, str):
        raise BNetError("node", expected="the name of one node", actual=node)
    shares = [s.posterior(node, evidence) for s in sentences_]
    if len({len(share) for share in shares}) != 1:
        raise BNetError("sentences", expected=f"as many states of {node} in each", actual="different numbers")
    said = [" ".join(token for tokens in s.state.tokens.values() for token in tokens) for s in sentences_]
    labels = {"sentence": said, node: state_labels(sentences_[0], node)}
    seen = "evidence" if evidence or any(s.state.evidence for s in sentences_) else ""
    what = f"P({node} | {seen})" if seen else f"P({node})"
    found = make_labelled_array(torch.stack(shares), ("sentence", node), labels=labels, value_label=what)
    plot_labelled_array(found, canvas, sort=False)


def state_labels(s: SentenceLike, name: str) -> list[str]:
    """What the states of a node are called: by their labels or words, else by their numbers."""
    node = s.state.ground.id(name)
    found = s.state.labels(node)
    return list(found) if found is not None else [str(k) for k in range(s.state.model.count_states(node))]


def _word_labels(s: SentenceLike, stack: str, words: str) -> tuple[str, ...]:
    tokens = tuple(s.state.tokens[stack])
    if words == TOKEN_WORDS:
        return tokens
    return tuple("".join(tokens[k].removeprefix("##") for k in group) for group in s.state.encoded.group_subwords())


def _name_dims(s: SentenceLike, spec: NodeSpec, num_dims: int) -> list[str]:
    """What the dims before the words are: open choices, then plates."""
    world = s.state.model
    plates = [axis for axis in world.ground.axes(spec.group) if axis != WORD]
    if len(plates) == num_dims:
        return plates
    node = int(world.ground.select_nodes(spec.group)[0])
    free = reference.find_open_choices(
        world, reference.attention_parents(world, node), reference.get_fixed(world, s.state.evidence)
    )
    families = list(dict.fromkeys(world.ground.group_of(each).name for each in free))
    for choices in (families, [world.ground.name(each) for each in free]):
        if len(choices) + len(plates) == num_dims:
            return [*choices, *plates]
    return [f"choice {k}" for k in range(num_dims - len(plates))] + plates

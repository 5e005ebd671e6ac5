"""Plots of sentences: attention TPMs as heat maps, and posteriors of discrete nodes."""

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
from bnet_transformer.plots.heat_maps import (
    HeatMapData,
    count_columns,
    draw_heat_map,
    draw_heat_maps,
    probability_limits,
)
from bnet_transformer.plots.labelled_arrays import (
    BarSeries,
    draw_bars,
    make_labelled_array,
    plot_labelled_array,
    select_top,
)
from bnet_transformer.plots.special_words import select_words
from bnet_transformer.reference.node_tables import compute_read_mask

TOKEN_WORDS = "tokens"
MIN_PANEL_WIDTH = 0.55  # inches of the attention of one head
BLANK_NOTE = "Blank: no arrow; word i cannot attend to word j."


@runtime_checkable
class SentenceLike(Protocol):
    """The part of `Sentence` that plots use."""

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
    special: bool = True,
    node: str | Sequence[str] | None = None,
    evidence: Mapping[str, object] | None = None,
    top: int = 20,
) -> None:
    """Plot the attention TPMs of slices, by default of all; or the posterior of `node` given the `evidence`.

    `special=False` leaves out the rows and columns of special tokens.
    """
    if node is not None:
        if slice is not None or head is not None or role is not None or words != TOKEN_WORDS:
            options = {"slice": slice, "head": head, "role": role, "words": None if words == TOKEN_WORDS else words}
            given = ", ".join(f"{name}=" for name, value in options.items() if value is not None)
            raise BNetError(f"{given} cannot be combined with node=", hint="Use only evidence= and top= with node=")
        plot_posterior(s, canvas, node, evidence, top)
        return
    if evidence is not None:
        hint = "Pass node=, or plot s.observe(...) to see the attention given evidence"
        raise BNetError("evidence= requires node=", hint=hint)
    check_choice("words", words, (TOKEN_WORDS, "words"))
    slices = parse_attention_slices(s.state.network, "all" if slice is None else slice, role)[1]
    maps_by_slice = {t: build_attention_maps(s, t, head, role, words) for t in slices}
    maps_by_slice = _drop_special(s, canvas, maps_by_slice, role, words, special)
    maps = [m for slice_maps in maps_by_slice.values() for m in slice_maps]
    labels: Any = {"value_label": "P(j | i)", "x": "word j attended to", "y": "word i that attends"}
    if any(bool(np.isnan(m.values).any()) for m in maps):
        canvas.add_note(BLANK_NOTE)
    limits = probability_limits([m.values for m in maps])
    if len(maps) == 1:
        draw_heat_map(canvas, maps[0], **labels, limits=limits, square=True)
        canvas.set_title(f"Slice {slices[0]}" + (f", {maps[0].name}" if maps[0].name else ""))
        return
    num_columns, panels = arrange_panels(canvas, maps_by_slice)
    draw_heat_maps(canvas, panels, **labels, num_columns=num_columns, limits=limits)
    canvas.set_title(f"Slice {slices[0]}" if len(slices) == 1 else "Attention TPMs by slice")


def _drop_special(
    s: SentenceLike,
    canvas: Canvas,
    maps_by_slice: Mapping[int, list[HeatMapData]],
    role: str | None,
    words: str,
    special: bool,
) -> dict[int, list[HeatMapData]]:
    """The maps without the rows and columns of special tokens."""
    spec = find_attention_spec(s.state.model, next(iter(maps_by_slice)), role)
    stacks = spec.group.word_stack or "", s.state.model.network.get_source_stack(spec)
    rows, columns = ([*_flag_special(s, stack, words)] for stack in stacks)
    first = next(iter(maps_by_slice.values()))[0]
    row_ids = select_words(canvas, first.row_labels, rows, special) if stacks[0] != stacks[1] else []
    row_ids = row_ids or [k for k, is_special in enumerate(rows) if special or not is_special]
    masses = np.stack([m.values[row_ids] for maps in maps_by_slice.values() for m in maps])
    column_ids = select_words(canvas, first.column_labels, columns, special, masses)
    return {t: [m.select(row_ids, column_ids) for m in maps] for t, maps in maps_by_slice.items()}


def _flag_special(s: SentenceLike, stack: str, words: str) -> Sequence[bool]:
    """Whether each word of a stack is a special token."""
    flags = s.state.encoded.flag_special_words(s.state.network, stack)
    if words == TOKEN_WORDS:
        return flags
    return [all(flags[k] for k in group) for group in s.state.encoded.group_subwords()]


def arrange_panels(
    canvas: Canvas, maps_by_slice: Mapping[int, list[HeatMapData]]
) -> tuple[int, list[HeatMapData | None]]:
    """The number of columns, and the panels row by row; each slice starts a new row, which is filled with None."""
    panels: list[HeatMapData | None] = []
    max_maps = max(map(len, maps_by_slice.values()))
    if max_maps == 1:
        panels += [replace(maps[0], name=f"slice {t}", short_name="") for t, maps in maps_by_slice.items()]
        return count_columns(canvas, len(panels), 4), panels
    if len(maps_by_slice) == 1:
        panels += next(iter(maps_by_slice.values()))
        return count_columns(canvas, len(panels), 4), panels
    limit, smallest = (max_maps, MIN_PANEL_WIDTH) if max_maps <= 16 else (8, None)
    num_columns = count_columns(canvas, max_maps, limit, smallest)
    for t, maps in maps_by_slice.items():
        panels += [replace(m, row_title=f"slice {t}") for m in maps]
        panels += [None] * (-len(maps) % num_columns)
    return num_columns, panels


def build_attention_maps(
    s: SentenceLike, slice_: int, head: int | None, role: str | None, words: str
) -> list[HeatMapData]:
    """A heat map for each joint state of the latent choices and each head of a slice; NaN where there is no arrow."""
    model = s.state.model
    attention = s.attention(slice_, role=role, words=words).double()
    spec = find_attention_spec(model, slice_, role)
    rows = _word_labels(s, spec.group.word_stack or "", words)
    columns = _word_labels(s, model.network.get_source_stack(spec), words)
    names = _name_dims(s, spec, attention.dim() - 2)
    readable = torch.from_numpy(compute_read_mask(model, spec))
    if words != TOKEN_WORDS:
        readable = merge_words(readable.double(), s.state.encoded.group_subwords()) > 0
    masked = attention.masked_fill(~readable, torch.nan)
    if head is not None:
        if "head" not in names:
            choices = [m.group.name for m in model.network.specs if m.tpm.kind == "discrete" and m.group.role == "c"]
            hint = f"Choose a state of the selector with s.do({choices[0]}=...)" if choices else "Leave out head="
            raise BNetError("head= requires a net with a plate of heads", hint=hint)
        head_dim = names.index("head")
        if check_int("head", head, minimum=0) >= attention.shape[head_dim]:
            expected = f"an index of a head from 0 to {attention.shape[head_dim] - 1}"
            raise BNetError("head", expected=expected, actual=head)
    maps = []
    for states in np.ndindex(*attention.shape[:-2]):
        state_by_dim = dict(zip(names, states, strict=True))
        if head is not None and state_by_dim["head"] != head:
            continue
        name = ", ".join(f"head {k}" if axis == "head" else f"{axis} = {k}" for axis, k in state_by_dim.items())
        short = ", ".join(str(k) for k in state_by_dim.values())
        maps.append(HeatMapData(to_numpy(masked[states]), rows, columns, name, short_name=short))
    return maps


def plot_posterior(
    s: SentenceLike, canvas: Canvas, node: str | Sequence[str], evidence: Mapping[str, object] | None, top: int
) -> None:
    """Plot the distribution of one node as bars, before and after the evidence; the joint one of two as a heat map."""
    check_int("top", top)
    names = (node,) if isinstance(node, str) else tuple(node)
    if not 1 <= len(names) <= 2:
        raise BNetError("node", expected="the name of one node, or of two nodes", actual=f"{len(names)} names")
    texts = [f"{name} = {value if isinstance(value, str | int) else '…'}" for name, value in (evidence or {}).items()]
    given = ", ".join([*texts, *(f"{s.state.ground.name(node)} observed" for node in s.state.evidence)])
    condition = f" | {given})" if given and len(given) < 40 else " | evidence)" if given else ")"
    value_label = f"P({', '.join(names)}" + condition
    if len(names) == 2:
        state_names = {name: state_labels(s, name) for name in names}
        joint = make_labelled_array(s.posterior(names, evidence), names, labels=state_names, value_label=value_label)
        plot_labelled_array(joint, canvas)
        return
    series = [BarSeries(to_numpy(s.posterior(names[0], evidence).double()), value_label)]
    if evidence:
        before = to_numpy(s.posterior(names[0]).double())
        prior = f"P({names[0]}" + (" | observed)" if s.state.evidence else ")")
        series = [BarSeries(before, prior, colour="prior"), *series]
    series, labels, note = select_top(series, state_labels(s, names[0]), top)
    canvas.add_note(note)
    draw_bars(canvas, series, labels, value_label="probability" if evidence else value_label, category_label=names[0])


def plot_sentences(
    sentences_: Sequence[SentenceLike], canvas: Canvas, *, node: str = "c", evidence: Mapping[str, object] | None = None
) -> None:
    """Plot the posterior of a node, a row for each sentence."""
    if not isinstance(node, str):
        raise BNetError("node", expected="the name of one node", actual=node)
    posteriors = [s.posterior(node, evidence) for s in sentences_]
    if len({len(posterior) for posterior in posteriors}) != 1:
        raise BNetError(f"the sentences have different numbers of states of {node}", hint="Use sentences of one net")
    texts = [" ".join(token for tokens in s.state.tokens.values() for token in tokens) for s in sentences_]
    labels = {"sentence": texts, node: state_labels(sentences_[0], node)}
    has_evidence = bool(evidence) or any(s.state.evidence for s in sentences_)
    value_label = f"P({node} | evidence)" if has_evidence else f"P({node})"
    array = make_labelled_array(torch.stack(posteriors), ("sentence", node), labels=labels, value_label=value_label)
    plot_labelled_array(array, canvas, sort=False)


def state_labels(s: SentenceLike, name: str) -> list[str]:
    """The labels of the states of a node; states without labels have their numbers."""
    node = s.state.ground.id(name)
    labels = s.state.labels(node)
    return list(labels) if labels is not None else [str(k) for k in range(s.state.model.count_states(node))]


def _word_labels(s: SentenceLike, stack: str, words: str) -> tuple[str, ...]:
    """The labels of the words of a stack: tokens, or full words."""
    tokens, encoded, tokenizer = tuple(s.state.tokens[stack]), s.state.encoded, s.state.network.tokenizer
    if words == TOKEN_WORDS or tokenizer is None or stack not in encoded.tokenized:
        return tokens
    ids = encoded.tokenized[stack].ids
    texts = {group: tokenizer.decode([ids[k] for k in group]).strip() for group in encoded.group_subwords()}
    return tuple(text or "".join(tokens[k] for k in group) for group, text in texts.items())


def _name_dims(s: SentenceLike, spec: NodeSpec, num_dims: int) -> list[str]:
    """The names of the dims of an attention that precede the dims of words: latent choices, then plates."""
    model = s.state.model
    plates = [axis for axis in model.ground.axes(spec.group) if axis != WORD]
    if len(plates) == num_dims:
        return plates
    node = int(model.ground.select_nodes(spec.group)[0])
    open_choices = reference.find_open_choices(
        model, reference.attention_parents(model, node), reference.get_fixed(model, s.state.evidence)
    )
    group_names = list(dict.fromkeys(model.ground.group_of(node).name for node in open_choices))
    for dim_names in (group_names, [model.ground.name(node) for node in open_choices]):
        if len(dim_names) + len(plates) == num_dims:
            return [*dim_names, *plates]
    return [f"choice {k}" for k in range(num_dims - len(plates))] + plates

"""Plots of contributions: the parts of heads and steps by slice, of words, of paths of two, of pairs in a score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bnet_transformer._core.arrays import to_numpy
from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer.errors import BNetError
from bnet_transformer.plots.canvas import Canvas
from bnet_transformer.plots.heat_maps import HeatMapData, draw_heat_map
from bnet_transformer.plots.labelled_arrays import BarSeries, draw_bars
from bnet_transformer.plots.numbers import format_digits
from bnet_transformer.plots.special_words import select_words
from bnet_transformer.plots.sweeps import symmetric_limits
from bnet_transformer.residual_stream import Contributions, PathContributions, ScoreContributions
from bnet_transformer.residual_stream.results import KINDS, ContributionTable, rank_writers
from bnet_transformer.residual_stream.writers import Writer

MAX_BARS = 16  # more writers are drawn as a heat map of slices and heads
PLOTS = (None, "writer", "head", "word")
SCALE_NOTE = "The scales of norms are held fixed: an identity at this sentence, not an effect."


def plot_contributions(
    result: Contributions, canvas: Canvas, *, by: str | None = None, top: int = MAX_BARS, special: bool = True
) -> None:
    """Plot the parts of a readout: bars for at most 16 writers, else a heat map of slices and heads.

    `by` selects the plot: `"writer"` (bars of the `top` strongest), `"head"` (the heat map) or `"word"` (a heat
    map of kinds of writers and words: the words that heads attend to, and the words of other writers). There
    `special=False` leaves out special tokens.
    """
    check_choice("by", by, PLOTS)
    check_int("top", top)
    heads = [writer for writer in result.writers if writer.kind == "attention"]
    if by is None:
        by = "head" if len(result.writers) > MAX_BARS and len(heads) > 1 else "writer"
    check_choice("special", special, (True, False))
    if not special and by != "word":
        hint = f'It has no effect on by="{by}", a plot without words'
        raise BNetError("special=False", expected='by="word", a plot with words', actual=f'by="{by}"', hint=hint)
    if by == "word":
        _plot_words(result, canvas, special)
    elif by == "head" and heads:
        _plot_heads(result, canvas)
    else:
        _plot_writers(result, canvas, top)
    value = format_digits(float(result.value), sign=True)
    canvas.set_title(f"{_format_readout(result.of)} at {result.node}: {value}", is_above_legend=by != "head")
    canvas.add_note(SCALE_NOTE if result.norms else "")
    _note_choices(canvas, result)


def _plot_writers(result: Contributions, canvas: Canvas, top: int) -> None:
    """Bars of the strongest writers; with exact effects a second bar each."""
    frame = result.to_dataframe()
    order = np.sort(np.argsort(-frame["part"].abs().to_numpy(), kind="stable")[:top])
    frame = frame.iloc[order]
    series = [BarSeries(frame["part"].to_numpy(), name="part" if result.effects is not None else "")]
    if result.effects is not None:
        series = [
            BarSeries(frame["part"].to_numpy(), name="part", colour="prior"),
            BarSeries(frame["effect"].to_numpy(), name="effect of its removal", colour="accent", hatch="////"),
        ]
    draw_bars(canvas, series, list(frame["writer"]), value_label="contribution", category_label="writer")
    if len(order) < len(result.writers):
        canvas.add_note(f"Showing the {len(order)} strongest of {len(result.writers):,} writers.")


def _plot_heads(result: Contributions, canvas: Canvas) -> None:
    """A heat map with a row for each slice, a column for each head and for the feed-forward steps."""
    parts = dict(zip(result.writers, to_numpy(result.parts).tolist(), strict=True))
    columns: dict[str, None] = {}
    rows: dict[int, dict[str, float]] = {}
    remaining: dict[str, float] = {}
    for writer, part in parts.items():
        if writer.kind in ("attention", "feed-forward") and writer.slice is not None:
            column = _name_column(writer, [w for w in parts if w.kind == writer.kind])
            columns.setdefault(column)
            row = rows.setdefault(writer.slice, {})
            row[column] = row.get(column, 0.0) + part
        else:
            key = "biases" if writer.kind == "bias" else writer.name
            remaining[key] = remaining.get(key, 0.0) + part
    ordered = [*(c for c in columns if not c.startswith("ffn")), *(c for c in columns if c.startswith("ffn"))]
    values = np.array([[rows[k].get(column, np.nan) for column in ordered] for k in sorted(rows)])
    data = HeatMapData(values, tuple(map(str, sorted(rows))), tuple(ordered))
    limits = symmetric_limits(values)
    axes = next((writer.axes for writer in parts if writer.kind == "attention" and writer.axes), ("head",))
    label = f"{'_'.join(axes)}, feed-forward step"
    draw_heat_map(canvas, data, value_label="contribution", limits=limits, x=label, y="slice")
    texts = ", ".join(f"{name} {format_digits(part, sign=True)}" for name, part in remaining.items())
    canvas.add_note(f"Other parts: {texts}." if texts else "")


def _name_column(writer: Writer, same_kind: Sequence[Writer]) -> str:
    """The column of a writer: its head, or the role of a step; with the role if several roles have the kind."""
    role = writer.group.removesuffix(f"_{writer.slice}")
    roles = {w.group.removesuffix(f"_{w.slice}") for w in same_kind}
    if writer.kind == "feed-forward":
        return "ffn" if len(roles) == 1 else f"ffn {role}"
    head = "_".join(map(str, writer.plates)) or "all"
    return head if len(roles) == 1 else f"{role} {head}"


def _plot_words(result: Contributions, canvas: Canvas, special: bool) -> None:
    """A heat map with a row for each kind of writer and a column for each word."""
    frame = result.by_word()
    kinds = [kind for kind in KINDS if kind in frame]
    matrix = frame[kinds].to_numpy().T
    labels = [f"{k} {word}" if word else "no word" for k, word in enumerate(frame["word"])]
    data = HeatMapData(matrix, tuple(kinds), tuple(labels))
    shown = select_words(canvas, list(frame["word"]), result.special[: len(labels)], special)
    if len(shown) < len(labels):
        remainder = float(matrix.sum() - matrix[:, shown].sum())
        canvas.add_note(f"The parts of the words that are not shown sum to {format_digits(remainder, sign=True)}.")
    data = data.select(range(len(kinds)), shown)
    limits = symmetric_limits(matrix)
    draw_heat_map(canvas, data, value_label="contribution", limits=limits, x="word (of a head: attended to)", y="")


def plot_path_contributions(result: PathContributions, canvas: Canvas, *, top: int = 12) -> None:
    """Plot the strongest paths of two as a heat map: the first writers as rows, the heads that read them as columns."""
    check_int("top", top)
    magnitude = result.values.abs()
    heads = sorted(rank_writers(magnitude.amax(-1), top))
    writers = sorted(rank_writers(magnitude.amax(-2), top))
    values = to_numpy(result.values[heads][:, writers].T)
    can_read = np.array([[_can_read(result, h, w) for h in heads] for w in writers])
    values = np.where((values == 0) & ~can_read, np.nan, values)
    names = [tuple(axis[k].name for k in chosen) for axis, chosen in ((result.writers, writers), (result.heads, heads))]
    data, limits = HeatMapData(values, names[0], names[1]), symmetric_limits(values)
    draw_heat_map(canvas, data, value_label="contribution", limits=limits, x="head", y="writer")
    canvas.set_title(f"{_format_readout(result.of)} at {result.node}: paths of two")
    _note_selection(canvas, (len(writers), len(result.writers), "writers"), (len(heads), len(result.heads), "heads"))
    canvas.add_note("Attention and the scales of norms are held fixed.")
    _note_choices(canvas, result)


def _can_read(result: PathContributions, head: int, writer: int) -> bool:
    """Whether a head can read a writer: an earlier one, and no bias of another head of its slice."""
    names = [item.name for item in result.writers]
    reader, source = result.heads[head], result.writers[writer]
    is_of_other_head = source.slice == reader.slice and bool(source.plates) and source.plates != reader.plates
    position = names.index(reader.name) if reader.name in names else len(names)
    return writer < position and not is_of_other_head


def plot_score_contributions(
    result: ScoreContributions, canvas: Canvas, *, word: int | None = None, top: int = 12
) -> None:
    """Plot the pairs of the strongest writers in the score of one word j, by default the most attended one."""
    check_int("top", top)
    position, table = result.at_word(word)
    queries = sorted(rank_writers(table.abs().amax(-1), top))
    keys = sorted(rank_writers(table.abs().amax(-2), top))
    values = to_numpy(table[queries][:, keys])
    names = [tuple(axis[k].name for k in chosen) for axis, chosen in ((result.queries, queries), (result.keys, keys))]
    data, limits = HeatMapData(values, names[0], names[1]), symmetric_limits(values)
    label = "contribution to the score"
    draw_heat_map(canvas, data, value_label=label, limits=limits, x="writer on the key side", y="writer, query side")
    score = format_digits(float(result.scores[position]), sign=True)
    noun = "centred score" if result.is_centred else "score"
    canvas.set_title(f"{result.node}, word {result.indices[position]} {result.words[position]!r}: {noun} {score}")
    sizes = (len(queries), len(result.queries), "writers of the query"), (len(keys), len(result.keys), "of the key")
    _note_selection(canvas, *sizes)
    if bool(result.positions.any()):
        canvas.add_note(f"The bias by distance adds {format_digits(float(result.positions[position]), sign=True)}.")
    if result.is_centred:
        canvas.add_note("Before the softmax, less the mean over the words attended to.")
    _note_choices(canvas, result)


def _note_choices(canvas: Canvas, result: ContributionTable) -> None:
    """A note with the states of the latent choices that the contributions are of."""
    text = result.describe_choices().strip()
    canvas.add_note(f"{text[0].upper()}{text[1:]}." if text else "")


def _note_selection(canvas: Canvas, *counts: tuple[int, int, str]) -> None:
    """A note with the numbers of rows and columns that are shown, if these are not all."""
    if any(shown < total for shown, total, _ in counts):
        canvas.add_note("Strongest: " + ", ".join(f"{shown} of {total} {noun}" for shown, total, noun in counts) + ".")


def _format_readout(text: str) -> str:
    """The name of a readout with the minus sign of numbers, as in "cat − dog"."""
    return text if text.startswith("logit of ") else text.replace(" - ", " − ", 1)

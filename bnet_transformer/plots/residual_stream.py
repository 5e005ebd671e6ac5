"""Plots of the residual stream: contributions of writers, and the grid of a lens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer._core.tensors import FloatArray, rank_by_size, to_numpy
from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.figures.fonts import format_token, text_width
from bnet_transformer.inference.query import parse_words
from bnet_transformer.plots.canvas import SMALL_FONT_SIZE, Canvas, format_digits, make_norm
from bnet_transformer.plots.heat_maps import BarSeries, HeatMapData, draw_bars, draw_matrix, select_words, shared_limits
from bnet_transformer.plots.sweeps import symmetric_limits
from bnet_transformer.residual_stream import Contributions, Lens, PathContributions, ScoreContributions, TunedLens
from bnet_transformer.residual_stream.linear_paths import Writer
from bnet_transformer.residual_stream.results import KINDS, ContributionTable

# --------------------------------------------------------------------------------------------------------------------
# Plots of contributions: the parts of heads and steps by slice, of words, of paths of two, of pairs in a score.


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
    canvas.set_title(f"{_format_readout(result.of)} at {result.node}: {value}")
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
    draw_matrix(canvas, [data], value_label="contribution", limits=limits, x=label, y="slice")
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
    draw_matrix(canvas, [data], value_label="contribution", limits=limits, x="word (of a head: attended to)", y="")


def plot_path_contributions(result: PathContributions, canvas: Canvas, *, top: int = 12) -> None:
    """Plot the strongest paths of two as a heat map: the first writers as rows, the heads that read them as columns."""
    position = {writer.name: k for k, writer in enumerate(result.writers)}
    # A head reads earlier writers, and no bias of another head of its slice.
    can_read = [
        [
            k < position.get(head.name, len(position))
            and not (writer.slice == head.slice and writer.plates and writer.plates != head.plates)
            for head in result.heads
        ]
        for k, writer in enumerate(result.writers)
    ]
    values = np.where((to_numpy(result.values.T) == 0) & ~np.array(can_read), np.nan, to_numpy(result.values.T))
    axes = {"writer": result.writers, "head": result.heads}
    _plot_strongest(canvas, values, axes, top, "contribution", ("writers", "heads"))
    canvas.set_title(f"{_format_readout(result.of)} at {result.node}: paths of two")
    canvas.add_note("Attention and the scales of norms are held fixed.")
    _note_choices(canvas, result)


def plot_score_contributions(
    result: ScoreContributions, canvas: Canvas, *, word: int | None = None, top: int = 12
) -> None:
    """Plot the pairs of the strongest writers in the score of one word j, by default the most attended one."""
    position, table = result.at_word(word)
    axes = {"writer, query side": result.queries, "writer on the key side": result.keys}
    nouns = "writers of the query", "of the key"
    _plot_strongest(canvas, to_numpy(table), axes, top, "contribution to the score", nouns)
    score = format_digits(float(result.scores[position]), sign=True)
    noun = "centred score" if result.is_centred else "score"
    canvas.set_title(f"{result.node}, word {result.indices[position]} {result.words[position]!r}: {noun} {score}")
    if bool(result.positions.any()):
        canvas.add_note(f"The bias by distance adds {format_digits(float(result.positions[position]), sign=True)}.")
    if result.is_centred:
        canvas.add_note("Before the softmax, less the mean over the words attended to.")
    _note_choices(canvas, result)


def _note_choices(canvas: Canvas, result: ContributionTable) -> None:
    """A note with the states of the latent choices that the contributions are of."""
    text = result.describe_choices().strip()
    canvas.add_note(f"{text[0].upper()}{text[1:]}." if text else "")


def _plot_strongest(
    canvas: Canvas,
    values: FloatArray,
    axes: Mapping[str, Sequence[Writer]],
    top: int,
    value_label: str,
    nouns: tuple[str, str],
) -> None:
    """A heat map of the `top` rows and columns with the largest absolute values."""
    magnitude = np.abs(np.nan_to_num(values))
    shown = [sorted(rank_by_size(magnitude.max(dim), top)) for dim in (1, 0)]
    names = [tuple(writer.name for writer in writers) for writers in axes.values()]
    data, (y, x) = HeatMapData(values, names[0], names[1]).select(*shown), axes
    draw_matrix(canvas, [data], value_label=value_label, limits=symmetric_limits(data.values), x=x, y=y)
    counts = list(zip(map(len, shown), values.shape, nouns, strict=True))
    if any(count < total for count, total, _ in counts):
        canvas.add_note("Strongest: " + ", ".join(f"{count} of {total} {noun}" for count, total, noun in counts) + ".")


def _format_readout(text: str) -> str:
    """The name of a readout with the minus sign of numbers, as in "cat − dog"."""
    return text if text.startswith("logit of ") else text.replace(" - ", " − ", 1)


# --------------------------------------------------------------------------------------------------------------------
# Plots of a lens: the grid of its most probable words, and the probability or the rank of one word by state.


COLOURS = {"probability": "probability of the word", "entropy": "entropy (nats)", "kl": "KL(end || lens) (nats)"}
MAX_GRID_CELLS = 4096
MAX_GRID_HEIGHT = 8.4  # inches
MIN_TEXT_WIDTH, MIN_TEXT_HEIGHT = 0.2, 0.09  # inches of a cell below which its text is not readable


def plot_lens(
    result: Lens,
    canvas: Canvas,
    *,
    colour: str = "probability",
    target: str | int | None = None,
    show: str | None = None,
    slices: object = None,
    words: object = None,
    special: bool = True,
) -> None:
    """Plot the most probable word of every state, or the probability or rank of a `target` word by state.

    In the grid, words are along x and slices along y, with the last state on top. `colour` is the quantity of the
    colours: `"probability"` of the written word, `"entropy"` or `"kl"`. `slices` and `words` select a part, and
    `special=False` leaves out special tokens. With `target`, the curve is that of the last selected word: of its
    probability, or with `show="rank"` of its rank.
    """
    check_choice("colour", colour, COLOURS)
    check_choice("show", show, (None, "probability", "rank"))
    if show is not None and target is None:
        raise BNetError(
            "show", expected="None without target=", actual=show, hint='Pass the word, as in target=" Paris"'
        )
    rows = result.parse_slices(range(len(result.states)) if slices is None else slices)
    columns = parse_words(result.words, range(len(result.words)) if words is None else words)
    shown = set(select_words(canvas, result.words, result.special, special))
    columns = [k for k in columns if k in shown]
    if not columns:
        raise BNetError("words", expected="words that are no special tokens", actual=words)
    kind = "Tuned lens" if result.is_tuned else "Logit lens"
    norm = f"The readout applies {result.norm} to each state." if result.norm else "No norm is applied to the states."
    canvas.add_note(norm if result.is_tuned else f"{norm} The lens of early slices is biased.")
    if target is not None:
        _plot_target(result, canvas, result.parse_state(target), rows, columns[-1], kind, show)
        return
    if len(rows) * len(columns) > MAX_GRID_CELLS:
        expected, actual = f"at most {MAX_GRID_CELLS:,} cells", f"{len(rows) * len(columns):,}"
        raise BudgetError("plot", expected=expected, actual=actual, hint="Select some by slices= and words=")
    canvas.set_title(f"{kind} of {result.readout}")
    _draw_grid(result, canvas, rows[::-1], columns, colour)


def _draw_grid(result: Lens, canvas: Canvas, rows: list[int], columns: list[int], colour: str) -> None:
    """Draw the grid; `rows` are the states from top to bottom."""
    quantity = {"probability": result.top_probabilities[..., 0], "entropy": result.entropy, "kl": result.kl}[colour]
    values = to_numpy(quantity).astype(np.float64)[np.ix_(rows, columns)]
    texts = [[result.labels[int(result.top_states[t, i, 0])] for i in columns] for t in rows]
    row_labels = tuple(result.states[t] for t in rows)
    column_labels = tuple(result.words[i] for i in columns)
    widths = (text_width(format_token(text.strip(), 12), SMALL_FONT_SIZE) for text in itertools.chain(*texts))
    width = max(1.6, (max(widths) / 72 + 0.12) * len(columns))
    low, high = (0.0, 1.0) if colour == "probability" else shared_limits([values])
    # The divergence of x_0 is often ten times that of other states: a root makes the others visible.
    norm = PowerNorm(0.5, low, high) if colour == "kl" else make_norm(low, high)

    def write_words(ax: Axes, image: Any, width: float, height: float) -> None:
        if width < MIN_TEXT_WIDTH or height < MIN_TEXT_HEIGHT:
            canvas.add_note("The words do not fit into the cells; select some by slices= and words=.")
            return
        font_size, points = min(SMALL_FONT_SIZE, 0.78 * 72 * height), (72 * width - 3) / canvas.font_scale
        style: Any = {"fontsize": font_size, "ha": "center", "va": "center_baseline"}
        shortened = {text: _shorten(text.strip() or text, font_size, points) for text in itertools.chain(*texts)}
        for (row, column), value in np.ndenumerate(values):
            colour = canvas.contrasting_colour(image.cmap(image.norm(value)))
            canvas.add_text(ax, column, row, shortened[texts[row][column]], color=colour, **style)

    labels: Any = {"value_label": COLOURS[colour], "x": "word", "y": "state", "norm": norm}
    labels["size"] = width, min(MAX_GRID_HEIGHT, max(1.3, 0.24 * len(rows)))
    draw_matrix(canvas, [HeatMapData(values, row_labels, column_labels)], **labels, write_cells=write_words)


def _shorten(text: str, size: float, points: float) -> str:
    """The longest form of a word that fits into a width in points."""
    lengths = range(min(len(text), 24), 1, -1)
    fitting = (format_token(text, n) for n in lengths if text_width(format_token(text, n), size) <= points)
    return next(fitting, format_token(text, 2))


def _plot_target(
    result: Lens, canvas: Canvas, state: int, rows: list[int], word: int, kind: str, show: str | None
) -> None:
    """Plot the probability or the rank of one state of the readout by slice, for one word."""
    probs, ranks = (to_numpy(values[rows, word]) for values in (result.probability(state), result.rank(state)))
    label = result.labels[state].strip()
    ax = canvas.add_axes(3.7, 1.9)
    style: Any = {"color": canvas.colours["accent"], "linewidth": 1.4, "marker": "o", "markersize": 3}
    ax.plot(rows, ranks if show == "rank" else probs, **style)
    if show == "rank":
        ax.set_yscale("log")
        ax.set_ylim(1.15 * max(2, ranks.max()), 0.85)
        ticks = [k * 10**power for power in range(len(str(ranks.max()))) for k in (1, 2, 5)]
        step = 1 if ranks.max() < 100 else 3  # powers of ten only
        ax.yaxis.set_major_locator(FixedLocator([tick for tick in ticks[::step] if tick <= ranks.max()]))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda rank, _: f"{rank:,.0f}"))
        ax.yaxis.set_minor_locator(NullLocator())
        canvas.style_curve_axes(ax, "state", f"rank of {label}")
    else:
        ax.set_ylim(-0.03, 1.1)
        canvas.style_curve_axes(ax, "state", f"P({label})")
        style = {"ha": "center", "va": "bottom", "fontsize": 6.5, "color": canvas.colours["grey"]}
        for k, (row, prob, rank) in enumerate(zip(rows, probs, ranks, strict=True)):
            if len(rows) <= 40 and rank <= 10 and (k == 0 or rank != ranks[k - 1]):
                canvas.add_text(ax, row, min(float(prob), 1.0) + 0.03, f"{rank}", **style)
        canvas.add_note("Numbers: the rank of the word, where it changes and is at most 10.")
    canvas.set_title(f"{kind}: {label} after {result.words[word].strip()}")


def plot_tuned_lens(result: TunedLens, canvas: Canvas) -> None:
    """Plot the held-out KL of the logit lens and of the tuned lens by slice."""
    ax = canvas.add_axes(3.7, 1.9)
    rows = range(len(result.kl))
    for name, values, colour in (("logit lens", result.plain_kl, "grey"), ("tuned lens", result.kl, "accent")):
        style: Any = {"linewidth": 1.4, "marker": "o", "markersize": 3, "label": name}
        ax.plot(rows, to_numpy(values), color=canvas.colours[colour], **style)
    ax.set_ylim(bottom=0)
    canvas.style_curve_axes(ax, "state", "held-out KL(end || lens) (nats)")
    canvas.add_legend(ax)
    for note in result.notes:
        canvas.add_note(note)
    canvas.set_title(f"Tuned lens of {result.readout}")

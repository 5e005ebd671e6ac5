"""Plots show the numbers of results, read back from the figure; hostile words are escaped; no global state changes."""

import io
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import bnet_transformer as bt
from bnet_transformer.attention import learn_tan
from bnet_transformer.figures.picture import PALETTES
from bnet_transformer.interventions.counterfactual import Counterfactual
from bnet_transformer.learning.fit import Check, Comparison, ModelComparison
from bnet_transformer.learning.fit.result import as_fit
from bnet_transformer.learning.training import Trained
from bnet_transformer.plots.attention import MAX_FLOWS, format_fraction, propagate_flow
from bnet_transformer.plots.canvas import DIVERGING_COLOURS, SEQUENTIAL_COLOURS, lightness
from bnet_transformer.plots.heat_maps import make_labelled_array
from bnet_transformer.tpm import Categorical, Normal

WORDS = ["the", "cat", "sat", "on", "mat"]
HOSTILE = (
    *("<script>alert(1)</script>", "$x_1$ & \\alpha", "שלום", "😀", "👨\u200d👩\u200d👧", "中文字", "x" * 200),
    *("a\nb", "\x00", "\ud800", "_^%#{}", "\u202eabc", " ", "\\input{x}", "$\\frac{$"),
)


@pytest.fixture(scope="module")
def net():
    return bt.bayesuvius(4, slices=2, heads=3, mask="causal", vocabulary=WORDS, observe=Categorical(5), seed=1)


@pytest.fixture(scope="module")
def s(net):
    return net.sentence("the cat sat on")


@pytest.fixture(scope="module")
def fits():
    net = bt.bayesuvius(3, heads=3, key_dim=2, observe=Normal(0.3))
    torch.manual_seed(1)
    x, y = torch.randn(24, 3, 3), torch.randn(24, 3, 3)
    plain = bt.fit(net, (x, y), method=bt.MAP(restarts=3, steps=12, optimizer="first-order"), progress=False)
    nuts = bt.fit(net, (x, y), method=bt.NUTS(chains=1, draws=20, warmup=5), learn=["c.logits"], progress=False)
    return plain, nuts, x, y


def get_cells(figure, k=0):
    """Return the numbers of the k-th panel's colours."""
    artists = [*figure.axes[k].collections, *figure.axes[k].images]
    array = artists[0].get_array()
    return np.ma.filled(array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array, np.nan)


def get_heights(figure, k=0):
    return [bar.get_height() for bar in figure.axes[k].patches]


def get_ticks(ax, axis="x"):
    return [label.get_text() for label in (ax.get_xticklabels() if axis == "x" else ax.get_yticklabels())]


def render(figure, kind="png"):
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind)
    return buffer.getvalue()


def test_attention_is_that_of_the_sentence_panel_by_panel(s):
    result = s.attention(1)
    figure = bt.plot(s, slice=1)
    for head in range(3):
        assert np.allclose(np.nan_to_num(get_cells(figure, head)), result[head].numpy())
    assert np.isnan(get_cells(figure)[0, 1:]).all()  # the mask's absent arrows are blank
    assert [ax.get_title() for ax in figure.axes[:3]] == ["c = 0", "c = 1", "c = 2"]
    assert get_ticks(figure.axes[0], "y") == list(s.words)
    all_slices = bt.plot(s)
    assert np.allclose(np.nan_to_num(get_cells(all_slices, 4)), s.attention(1)[1].numpy())
    single = bt.plot(s.do(c=2), slice=0)
    assert np.allclose(np.nan_to_num(get_cells(single)), s.attention(0)[2].numpy())


def test_each_slice_has_its_own_panels_where_each_has_a_selector():
    slices = 2
    s = bt.bayesuvius(4, heads=2, slices=slices, per="slice").sentence("the cat sat")
    figure = bt.plot(s)
    panels = [ax for ax in figure.axes if ax.get_visible() and ax.get_label() != "<colorbar>"]
    num_columns = 2**slices
    first_in_row = [ax for ax in panels if ax.get_ylabel()]
    assert [ax.get_ylabel() for ax in first_in_row] == [f"slice {t}" for t in range(slices)]
    assert [figure.axes.index(ax) for ax in first_in_row] == [t * num_columns for t in range(slices)]
    for t in range(slices):
        attention = s.attention(t).reshape(-1, 3, 3)
        assert len(attention) == 2 ** (t + 1)
        for k, weights in enumerate(attention):
            assert np.allclose(get_cells(figure, t * num_columns + k), weights.numpy())
        assert not any(figure.axes[t * num_columns + k].get_visible() for k in range(len(attention), num_columns))


def test_a_zero_is_drawn_where_there_is_an_arrow():
    net = bt.bayesuvius(4, heads=1, mask="causal", seed=1)
    s = net.replace({k: 300 * v for k, v in net.parameters.items() if "W_" in k}).sentence("the cat sat")
    cells = get_cells(bt.plot(s))
    assert (s.attention(0)[0].numpy()[np.tril_indices(3)] == 0).any()
    assert (np.isnan(cells) == np.triu(np.ones((3, 3), dtype=bool), 1)).all()
    assert (np.isnan(get_cells(bt.plot(s.reads()))) == np.triu(np.ones((3, 3), dtype=bool), 1)).all()


def test_heads_of_a_plate_and_a_chosen_one():
    s = bt.encoder(dim=8, heads=2, slices=2).sentence(x=torch.randn(3, 8))
    assert [ax.get_title() for ax in bt.plot(s, slice=0).axes[:2]] == ["head 0", "head 1"]
    assert np.allclose(get_cells(bt.plot(s, slice=1, head=1)), s.attention(1)[1].numpy())
    with pytest.raises(bt.BNetError, match="from 0 to 1"):
        bt.plot(s, slice=0, head=2)


def test_cross_attention_has_the_words_of_both_stacks():
    net = bt.encoder_decoder(dim=8, heads=2, slices=1)
    s = net.sentence({"enc": "a b c", "dec": "d e"})
    figure = bt.plot(s, slice=0, role="dec_cross_a", head=0)
    assert (get_ticks(figure.axes[0], "y"), get_ticks(figure.axes[0])) == (["d", "e"], ["a", "b", "c"])
    assert np.allclose(get_cells(figure), s.attention(0, role="dec_cross_a")[0].numpy())


def test_posteriors_before_and_after_with_the_labels_of_the_states(s, net):
    figure = bt.plot(s, node="y_3", evidence={"y_2": "mat"})
    expected = [*s.posterior("y_3").tolist(), *s.posterior("y_3", {"y_2": "mat"}).tolist()]
    assert get_heights(figure) == pytest.approx(expected) and get_ticks(figure.axes[0]) == WORDS
    joint = bt.plot(s, node=["c", "y_3"])
    assert np.allclose(get_cells(joint), s.posterior(["c", "y_3"]).numpy())
    batch = [net.sentence(text).observe(y_1="mat") for text in ("the cat sat", "cat on")]
    assert np.allclose(get_cells(bt.plot(batch, node="c")), torch.stack([x.posterior("c") for x in batch]).numpy())
    assert get_ticks(bt.plot(batch, node="c").axes[0], "y") == ["the cat sat", "cat on"]


def test_reads_matrix_entropies_and_flow(s):
    reads = s.reads(residual=0.3)
    assert np.allclose(np.nan_to_num(get_cells(bt.plot(reads))), reads.matrix.numpy())
    assert np.allclose(get_cells(bt.plot(reads, show="entropy")), reads.entropies.numpy())
    mass, flows = propagate_flow(reads.chain.numpy(), reads.weights.numpy(), 3)
    assert np.allclose(mass[0], reads.matrix[3].numpy()) and np.allclose(mass.sum(1), 1)
    assert np.allclose(flows.sum(1), mass[:-1]) and np.allclose(flows.sum(2), mass[1:])
    figure = bt.plot(reads, word=3, min_weight=0)
    (path,) = [line for line in figure.axes[0].lines if line.get_gid() == "path"]
    assert tuple(path.get_ydata()) == reads.paths(3)[0].words
    fractions = [t.get_text() for t in figure.axes[0].texts if t.get_text()[0].isdigit()]
    assert fractions == [format_fraction(fraction) for fraction in reads.matrix[3].tolist() if fraction > 0]
    thinned = bt.plot(reads, word=3, min_weight=0.2)
    assert any("Omitted: " in t.get_text() for t in thinned.texts)


def test_a_large_flow_is_reduced_to_its_strongest_with_a_note():
    net = bt.bayesuvius(4, slices=4, heads=2, combine="concat", residual=True, mask="causal", seed=1)
    reads = net.sentence([f"w{k}" for k in range(90)]).reads()
    figure = bt.plot(reads, word=89)
    ax = figure.axes[0]
    ribbons = [
        tuple(map(int, p.get_gid().split("_")[1:])) for p in ax.patches if (p.get_gid() or "").startswith("flow")
    ]
    blocks = [
        tuple(map(int, p.get_gid().split("_")[1:])) for p in ax.patches if (p.get_gid() or "").startswith("block")
    ]
    mass, flows = propagate_flow(reads.chain.numpy(), reads.weights.numpy(), 89)
    assert len(ax.get_xticks()) == 4 and 0 < len(ribbons) <= MAX_FLOWS
    rows = len([t for t in ax.texts if t.get_text().startswith("w")]) - 1
    assert rows == 32 and {0, 89} <= {int(t.get_text()[1:]) for t in ax.texts if t.get_text().startswith("w")}
    assert set(blocks) == {end for t, i, j in ribbons for end in ((t + 1, i), (t, j))}
    notes = " ".join(t.get_text() for t in figure.texts).replace("\n", " ")
    assert (
        f"Omitted: {(flows > 0).sum() - len(ribbons):,} flows of at most" in notes
        and f" and {90 - rows} words" in notes
    )
    assert f"most probable path ({format_fraction(reads.paths(89)[0].probability)})" in notes
    assert "(0.00)" not in notes and np.isclose(mass.sum(1), 1).all()


def test_trees_of_many_words_keep_the_strongest_arrows():
    s = bt.bayesuvius(4, heads=1, mask="causal", seed=1).sentence([f"w{k}" for k in range(90)])
    tree = s.tan_tree()
    arcs = {p.get_gid() for p in bt.plot(tree, top=5).axes[0].patches}
    best = sorted((i for i, p in enumerate(tree.parents) if p >= 0), key=lambda i: -tree.weights[i])[:5]
    words = sorted({*best, *(tree.parents[i] for i in best)})
    figure = bt.plot(tree, top=5)
    assert arcs == {f"arc_{words.index(tree.parents[i])}_{words.index(i)}" for i in best}
    assert get_ticks(figure.axes[0]) == [f"w{k}" for k in words]
    counts = f"Omitted: {sum(p >= 0 for p in tree.parents) - 5} arrows of at most", f" and {90 - len(words)} words."
    assert any(all(count in t.get_text() for count in counts) for t in figure.texts)
    assert 20 <= len(get_ticks(bt.plot(tree).axes[0])) <= 40
    minimum = sorted(tree.weights)[-4]
    assert len(bt.plot(tree, min_weight=minimum).axes[0].patches) == sum(
        w >= minimum for w, p in zip(tree.weights, tree.parents, strict=True) if p >= 0
    )
    with pytest.raises(bt.BNetError, match="a probability"):
        bt.plot(tree, min_weight=2)


def test_trees_and_boxes(s):
    tree = s.tan_tree(slice=0)
    arcs = {p.get_gid() for p in bt.plot(tree).axes[0].patches}
    assert arcs == {f"arc_{parent}_{i}" for i, parent in enumerate(tree.parents) if parent >= 0}
    tan = s.tan("roles")
    assert np.nansum(get_cells(bt.plot(tan))) == tan.quotient.counts.sum()
    corpus = learn_tan([0, 0, 1, 1], [[0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 0]], ["a", "b", "c"])
    figure = bt.plot(corpus, corrected=False)
    off_diagonal = ~np.eye(3, dtype=bool)
    assert np.allclose(get_cells(figure)[off_diagonal], corpus.information[off_diagonal])
    frames = {p.get_gid() for p in figure.axes[0].patches if p.get_gid()}
    assert frames == {f"frame_{a}_{b}" for i, p in enumerate(corpus.parents) if p >= 0 for a, b in ((i, p), (p, i))}


@pytest.mark.filterwarnings("ignore:R-hat is above:UserWarning")  # few draws
def test_fits_show_shares_intervals_and_history(fits):
    plain, nuts, x, y = fits
    figure = bt.plot(plain)
    assert get_heights(figure) == pytest.approx(plain.pi.tolist())
    lines = {line.get_label(): line for line in figure.axes[1].lines}
    assert lines["objective"].get_ydata().tolist() == pytest.approx(list(plain.bounds))
    expected = [value for _, restart, value in plain.measured if restart == plain.restart]
    assert lines[f"2 held-out sentences,\nrestart {plain.restart}"].get_ydata() == pytest.approx(expected)
    figure = bt.plot(nuts, show="pi", share=0.5)
    (whiskers,) = figure.axes[0].collections
    ends = np.array([segment[:, 1] for segment in whiskers.get_segments()])
    assert np.allclose(ends.T, torch.stack(nuts.interval("c.logits", 0.5)).numpy())
    assert np.allclose(get_cells(bt.plot(nuts, show="theta")), nuts.theta["c"].numpy()[None])
    weights = plain.responsibilities((x, y))
    cells = get_cells(bt.plot(weights, axes=("sentence", "head")))
    assert sorted(map(tuple, cells)) == sorted(map(tuple, weights.double().numpy()))
    assert (np.diff(cells.argmax(1)) >= 0).all()  # by the strongest head
    assert get_heights(bt.plot(plain.heads)) == pytest.approx(plain.heads.usage.tolist())
    cosine = next(iter(plain.heads.cosine.values()))
    assert np.allclose(get_cells(bt.plot(plain.heads, show="cosine")), cosine.numpy())
    with pytest.raises(bt.BNetError, match="'pi', 'theta', 'history'"):
        bt.plot(nuts, show="pie")


@pytest.mark.slow
def test_fits_show_every_selector_and_on_what_they_were_judged():
    torch.manual_seed(0)
    x, y = torch.randn(6, 2, 4), torch.randn(6, 2, 4)
    net = bt.bayesuvius(4, heads=2, slices=2, per="slice", observe=Normal(0.3))
    result = bt.fit(net, (x, y), method=bt.MAP(steps=3, restarts=1), progress=False)
    figure = bt.plot(result)
    for k, name in enumerate(("c_0", "c_1")):
        assert figure.axes[k].get_xlabel() == name
        assert get_heights(figure, k) == pytest.approx(result.theta[name].tolist())
    labels = [line.get_label() for line in figure.axes[2].lines]
    assert labels == ["objective", "the training sentences,\nrestart 0"]  # nothing was held out
    single = bt.plot(result, show="pi", owner="c_1")
    assert len(single.axes) == 1 and get_heights(single) == pytest.approx(result.theta["c_1"].tolist())
    outer = Figure()
    FigureCanvasAgg(outer)
    ax = outer.subplots()
    bt.plot(result, ax=ax)
    assert "choose another with owner=" in ax.get_xlabel()
    with pytest.raises(bt.BNetError, match="c_0, c_1"):
        bt.plot(result, show="pi", owner="c_2")


def test_comparisons_checks_training_and_costs():
    comparison = Comparison((1, 0), torch.tensor([[1.0, 5.0], [4.0, 0.0]]), 0.5, 0.1, 0.2, {}, {})
    figure = bt.plot(comparison)
    assert np.array_equal(get_cells(figure), comparison.overlap.numpy())
    assert {p.get_gid() for p in figure.axes[0].patches if p.get_gid()} == {"frame_0_1", "frame_1_0"}
    mean, spread, p = {"mean": 0.0, "still": 2.0}, {"mean": 0.5, "still": 0.0}, {"mean": 0.0, "still": 1.0}
    check = Check({"mean": 1.0, "still": 2.0}, mean, spread, p)
    data = next(line for line in bt.plot(check).axes[0].lines if line.get_label() == "data")
    assert data.get_xdata().tolist() == [2.0, 0.0]
    losses = tuple(1 / k for k in range(1, 301))
    lines = {line.get_label(): line for line in bt.plot(Trained(None, losses, ((3, 0.5),), 300)).axes[0].lines}
    assert lines["loss"].get_ydata().tolist() == list(losses) and lines["held out"].get_ydata() == [0.5]
    window = int(next(label for label in lines if "mean" in label).split()[2])
    smooth = lines[f"mean of {window} steps"]
    assert smooth.get_ydata()[0] == pytest.approx(np.mean(losses[:window])) and smooth.get_xdata()[0] == window // 2 + 1
    cost = bt.encoder(dim=8, heads=2, slices=1).cost(words=4)
    unit = {"k": 1e3, "": 1}[bt.plot(cost).axes[0].get_ylabel().removesuffix("FLOPs").strip()]
    assert np.array(get_heights(bt.plot(cost))) * unit == pytest.approx(
        sorted((r.flops for r in cost.rows if r.flops), reverse=True)
    )


def test_model_comparisons():
    fits = {k: as_fit(bt.bayesuvius(2, heads=k, observe=Normal(1.0))) for k in (1, 2, 3)}
    base = torch.tensor([0.0, 1.0, 2.0, 3.0]).double()
    noise = torch.tensor([0.1, -0.1, 0.1, -0.1]).double()
    table = ModelComparison(fits, torch.stack([base - 9 + noise, base - 0.05 + noise, base]), "density", ())
    ax = bt.plot(table).axes[0]
    (bars,) = [c for c in ax.containers if c.get_label() == "paired standard error"]
    points, _, (lines,) = bars
    assert points.get_xdata().tolist() == [2, 3] and points.get_ydata().tolist() == pytest.approx([1.45, 1.5])
    (low, high), _ = [segment[:, 1] for segment in lines.get_segments()]
    assert high - low == pytest.approx(2 * float(table.gain_error[1]))
    ring = next(line for line in ax.lines if line.get_label() == "choice")
    assert ring.get_xdata().tolist() == [table.choice] == [2]
    assert "−9" in [text.get_text() for text in ax.texts]  # a fit far below the others
    again = ModelComparison({"a": fits[2], "b": fits[2], "c": fits[3]}, table.densities, "density", ())
    assert get_ticks(bt.plot(again).axes[0]) == ["a", "b", "c"]


@pytest.mark.slow
def test_draws_distributions_counterfactuals(s):
    draws = s.sample(50, seed=1)
    assert sum(get_heights(bt.plot(draws, node="c"))) == pytest.approx(1)
    assert get_heights(bt.plot(draws, node="c"))[2] == pytest.approx(float((draws["c"] == 2).double().mean()))
    assert get_heights(bt.plot(s.do(c=0).tpm("y_1"))) == pytest.approx(s.do(c=0).tpm("y_1").probs.tolist())
    assert np.allclose(get_cells(bt.plot(s.tpm("y_1"))), s.tpm("y_1").probs.numpy())
    result = s.counterfactual("y_3", do={"c": 0}, evidence={"y_3": 1})
    assert get_heights(bt.plot(result)) == pytest.approx(result.probabilities.tolist())
    real_valued = Counterfactual("x", values=torch.tensor([[1.0, 2.0], [3.0, 4.0]]), weights=torch.tensor([0.5, 0.5]))
    assert get_heights(bt.plot(real_valued)) == [2.0, 3.0]
    with pytest.raises(bt.BNetError, match="y_0"):
        bt.plot(draws)
    assert get_ticks(bt.plot(draws, node="y_0").axes[0]) == WORDS == get_ticks(bt.plot(result).axes[0])
    assert get_ticks(bt.plot(draws, node="c").axes[0]) == ["0", "1", "2"]
    labels = list("vwxyz")
    assert get_ticks(bt.plot(s.do(c=0).tpm("y_0"), labels=labels).axes[0]) == labels


def test_distributions_of_real_nodes():
    s = bt.bayesuvius(4, heads=2, observe=Normal(0.5), seed=1).sentence("a b")
    assert np.allclose(get_cells(bt.plot(s.tpm("x_1_0"))), s.tpm("x_1_0").mean.numpy())
    closed = s.do(c=1)
    assert get_heights(bt.plot(closed.tpm("x_1_0"))) == pytest.approx(closed.tpm("x_1_0").mean.tolist())
    figure = bt.plot(closed.tpm("y_0"))
    mean = closed.tpm("y_0").mean
    assert get_heights(figure) == pytest.approx(mean.tolist())
    ends = np.array([segment[:, 1] for segment in figure.axes[0].collections[0].get_segments()])
    assert np.allclose(ends.T, torch.stack([mean - 0.5, mean + 0.5]).numpy())
    assert np.allclose(get_cells(bt.plot(closed.tpm("W_q_0"))), closed.tpm("W_q_0").mean.numpy())
    for node in ("x_0_0", "y_0"):
        with pytest.raises(bt.BNetError, match="a discrete random node"):
            bt.plot(s, node=node)


def test_tables_of_intervals_signs_and_three_axes():
    values, error = np.array([[0.1, -0.4], [0.0, 0.3]]), np.full((2, 2), 0.05)
    figure = bt.plot(values, axes=("slice", "head"), error=error)
    whiskers = next(c for c in figure.axes[0].collections if c.get_label() == "interval")
    minimum, maximum = -0.45, 0.35
    for (i, _), segment, value in zip(np.ndindex(2, 2), whiskers.get_segments(), values.ravel(), strict=True):
        ends = minimum + (maximum - minimum) * (0.4 - (segment[:, 1] - i)) / 0.8
        assert ends == pytest.approx([value - 0.05, value + 0.05])
    norm = figure.axes[0].collections[0].norm
    assert norm.vmin == -norm.vmax == -0.4  # the middle of the colours is 0
    assert np.isnan(get_cells(bt.plot(torch.full((2, 2), torch.nan), axes=("a", "b"), error=torch.zeros(2, 2)))).all()
    bars = bt.plot(np.array([0.2, 0.5]), low=[0.1, 0.4], high=[0.3, 0.6]).axes[0].collections[0]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[0.1, 0.3], [0.4, 0.6]]
    cube = torch.rand(3, 2, 4)
    figure = bt.plot(cube, axes=("sentence", "head", "word"))
    assert np.allclose(get_cells(figure, 1), cube[:, 1].numpy()) and figure.axes[1].get_title() == "head 1"


@dataclass(frozen=True)
class SweepLike:
    values: object
    axes: tuple
    labels: dict
    error: object = None


def test_what_has_values_and_axes_draws_itself():
    sweep = SweepLike(torch.tensor([[1.0, -2.0]]), ("slice", "word"), {"word": ("a", "b")}, torch.zeros(1, 2))
    figure = bt.plot(sweep)
    assert get_cells(figure).tolist() == [[1, -2]] and get_ticks(figure.axes[0]) == ["a", "b"]
    assert np.array_equal(get_cells(bt.plot(make_labelled_array(sweep.values, sweep.axes))), get_cells(figure))


def test_many_bars_are_reduced_to_the_greatest_with_a_note():
    probs = torch.arange(100.0) / 4950
    figure = bt.plot(probs, axes="state", top=5)
    assert [bar.get_height() for bar in figure.axes[0].patches] == pytest.approx(
        (torch.arange(99, 94, -1) / 4950).tolist()
    )
    assert any("Showing the 5 largest of 100; the sum of the others is 0.902" in t.get_text() for t in figure.texts)


@pytest.mark.slow
def test_hostile_words_are_shown_and_break_nothing():
    s = bt.bayesuvius(dim=4, heads=2).sentence(list(HOSTILE))
    for figure in (bt.plot(s.do(c=0), slice=0), bt.plot(s.reads(), word=6, min_weight=0), bt.plot(s.tan_tree())):
        written = render(figure, "svg")
        text = "".join(ElementTree.fromstring(written).itertext())
        assert "<script>alert" in text
        assert "שלום" in text and "\\x00" in text and "\\ud800" in text and "_^%#{}" in text
        assert b"<script>" not in written
    assert render(figure, "pdf").startswith(b"%PDF")
    notes = " ".join(t.get_text() for t in bt.plot(s, slice=0).texts)
    assert "U+4E2D" in notes or "中" in " ".join(get_ticks(bt.plot(s.do(c=0), slice=0).axes[0]))


@pytest.mark.slow
def test_ax_is_drawn_on_and_its_figure_comes_back(s, fits):
    outer = Figure(figsize=(7, 3))
    FigureCanvasAgg(outer)
    left, right = outer.subplots(1, 2)
    assert bt.plot(s.do(c=1), slice=0, ax=left) is outer and bt.plot(fits[0], ax=right) is outer
    assert [bar.get_height() for bar in right.patches] == pytest.approx(fits[0].pi.tolist())
    assert left.get_title(loc="left") == "Slice 0" and tuple(outer.get_size_inches()) == (7, 3)
    assert "Blank" in left.get_xlabel()  # notes are below
    render(outer)
    with pytest.raises(bt.BNetError, match="a plot with one panel; got 3 panels"):
        bt.plot(s, slice=0, ax=left)


@pytest.mark.slow
def test_no_state_of_matplotlib_is_changed_or_heeded(s):
    import matplotlib.pyplot as pyplot

    before = dict(matplotlib.rcParams)
    render(bt.plot(s.do(c=1), slice=0), "svg")
    assert pyplot.get_fignums() == [] and dict(matplotlib.rcParams) == before
    plain = render(bt.plot(s.do(c=0), slice=0, title="$x_1"))
    with matplotlib.rc_context({"text.color": "red", "font.size": 20, "axes.grid": True, "text.usetex": True}):
        figure = bt.plot(s.do(c=0), slice=0, title="$x_1")
    assert figure.texts[0].get_text() == "$x_1" and render(figure) == plain
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_text_is_text_in_svg_and_bytes_are_the_same_each_time(s):
    one, two = (bt.plot(s.do(c=0), slice=0) for _ in range(2))
    assert b">cat</text>" in render(one, "svg") and render(one) == render(two)


def test_colours_are_distinguishable_in_grey():
    for theme in ("light", "dark"):
        steps = [lightness(colour) for colour in SEQUENTIAL_COLOURS[theme]]
        assert (np.diff(steps) < -0.05).all() or (np.diff(steps) > 0.05).all()
        arms = [lightness(colour) for colour in DIVERGING_COLOURS[theme]]
        away = np.abs(np.array(arms) - arms[3])
        assert (np.diff(away[3:]) > 0.05).all() and (np.diff(away[:4]) < -0.05).all()
        paper = PALETTES[theme]["paper"]
        assert all(
            abs(lightness(PALETTES[theme][name]) - lightness(paper)) > 0.3 for name in ("ink", "grey", "q", "k", "v")
        )


BAD = {
    "no plot": (lambda s: bt.plot(s.net), "Sentence, an object with values and axes, a list of Sentences"),
    "no option": (lambda s: bt.plot(s, slize=0), "slice"),
    "theme": (lambda s: bt.plot(s, theme="blue"), "'light', 'dark'"),
    "ax": (lambda s: bt.plot(s, ax=3), "matplotlib Axes"),
    "title": (lambda s: bt.plot(s, title=3), "a string"),
    "axes": (lambda s: bt.plot(torch.rand(2, 2)), "a name for each of 2 dims"),
    "empty": (lambda s: bt.plot(np.zeros((0, 2)), axes=("a", "b")), "at least one number"),
    "infinite": (lambda s: bt.plot(np.array([np.inf])), "finite numbers"),
    "text": (lambda s: bt.plot(np.array(["a"])), "real numbers"),
    "labels": (lambda s: bt.plot(np.ones(2), axes="word", labels={"word": ["a"]}), "2 labels"),
    "label of nothing": (lambda s: bt.plot(np.ones(2), axes="word", labels={"wrd": ["a", "b"]}), "word"),
    "half an interval": (lambda s: bt.plot(np.ones(2), low=np.ones(2)), "low= and high="),
    "upside down": (lambda s: bt.plot(np.ones(2), low=np.ones(2), high=np.zeros(2)), "low= is above high="),
    "shape": (lambda s: bt.plot(np.ones(2), error=np.ones(3)), "the same shape as values"),
    "slice": (lambda s: bt.plot(s, slice=7), "slices: expected an integer from 0 to 1"),
    "head": (lambda s: bt.plot(s, head=0), "a net with a plate of heads"),
    "evidence": (lambda s: bt.plot(s, evidence={"y_1": 0}), "node="),
    "both": (lambda s: bt.plot(s, node="c", slice=0), "slice= cannot be combined"),
    "word": (lambda s: bt.plot(s.reads(), word=9), "from 0 to 3"),
    "panels": (lambda s: bt.plot(np.ones((300, 2, 2)), axes=("a", "b", "d")), "at most 256 panels"),
    "empty list": (lambda s: bt.plot([]), "a result that has a plot"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_for_bad_input_name_allowed_values(case, s):
    call, message = BAD[case]
    with pytest.raises(bt.BNetError) as caught:
        call(s)
    assert message in str(caught.value)

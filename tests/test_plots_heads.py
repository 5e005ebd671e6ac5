"""Plots of heads show the numbers of the posterior: values, intervals, ranks, losses are read back from figures."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.colors import Normalize, SymLogNorm, to_rgb

import bnet_transformer as bt
from bnet_transformer.attention.inclusion import damage
from bnet_transformer.plots.attention import MEASURES, choose_norm
from bnet_transformer.plots.canvas import lightness
from tests.test_plots import get_cells, get_ticks, render

WORDS = ["the", "cat", "sat", "on", "mat"]
TEXTS = ["the cat sat", "on the mat", "mat on cat", "sat the on"]


@pytest.fixture(scope="module")
def inclusion():
    net = bt.encoder(8, heads=4, slices=2, vocabulary=WORDS, seed=1)
    dead = net.parameters["W_o_1.value"].clone()
    dead[2] = 0
    return bt.inclusion(net.replace({"W_o_1.value": dead}), TEXTS, draws=200, progress=False)


@pytest.fixture(scope="module")
def loss(inclusion):
    return damage(inclusion, progress=False)


def get_ax_texts(ax):
    return [text.get_text() for text in ax.texts]


def read(text):
    return float(text.replace("−", "-"))


def get_notes(figure):
    return " ".join(text.get_text() for text in figure.texts)


@pytest.mark.parametrize(("show", "theme"), [(show, ("light", "dark")[k % 2]) for k, show in enumerate(MEASURES)])
def test_a_map_has_the_measure_of_each_head_in_its_colour_and_its_number(inclusion, show, theme):
    figure = bt.plot(inclusion, show=show, theme=theme)
    values = inclusion.mean if show == "rho" else getattr(inclusion, show)
    assert np.allclose(get_cells(figure), values.numpy())
    assert get_ticks(figure.axes[0], "y") == ["a_0", "a_1"] and get_ticks(figure.axes[0]) == ["0", "1", "2", "3"]
    numbers = [text for text in get_ax_texts(figure.axes[0]) if "±" not in text]
    assert [read(number) for number in numbers] == pytest.approx(values.flatten().tolist(), abs=0.006, rel=0.01)
    assert "4 sentences" in figure.texts[0].get_text()
    paper = figure.get_facecolor()[:3]
    for text in figure.axes[0].texts:
        mesh = figure.axes[0].collections[0]
        index = (round(text.get_position()[1]), round(text.get_position()[0]))
        colour = mesh.cmap(mesh.norm(float(values[index])))
        assert abs(lightness(to_rgb(text.get_color())) - lightness(colour)) > 0.3
    assert paper == pytest.approx(to_rgb("#ffffff" if theme == "light" else "#14171c"))


def test_intervals_are_in_the_cells_on_one_scale_from_0_to_1(inclusion):
    figure = bt.plot(inclusion)
    lines = next(c for c in figure.axes[0].collections if c.get_label() == "interval").get_segments()
    ends = np.array([segment[:, 0] for segment in lines]).reshape(2, 4, 2) - np.arange(4)[None, :, None]
    assert np.allclose((ends[..., 0] + 0.4) / 0.8, inclusion.low.numpy())
    assert np.allclose((ends[..., 1] + 0.4) / 0.8, inclusion.high.numpy())
    assert "90% interval" in get_notes(figure)
    assert "50% interval" in get_notes(bt.plot(replace(inclusion, interval=0.5)))


@pytest.mark.slow
def test_heads_without_an_interval_have_none(inclusion):
    rhat = torch.ones_like(inclusion.log_bayes)
    rhat[0, 1] = 2.0
    one, none = replace(inclusion, rhat=rhat), replace(inclusion, method="svi")
    for show in ("rho", "intervals"):
        assert "1 of 8 heads have no interval" in get_notes(bt.plot(one, show=show))
        figure = bt.plot(none, show=show)
        assert "8 of 8 heads have no interval" in get_notes(figure) and "90%" not in get_notes(figure)
        assert "90%" not in figure.axes[0].get_xlabel()
    for show, count in (("log_bayes", 8), ("intervals", 8)):
        for method, has_errors in (("exact", True), ("svi", False)):
            figure = bt.plot(replace(inclusion, method=method, error=torch.ones_like(rhat)), show=show)
            assert sum("±" in text.get_text() for text in figure.axes[0].texts) == count * has_errors
    lines = next(c for c in bt.plot(one).axes[0].collections if c.get_label() == "interval").get_segments()
    assert sum(len(line) > 0 for line in lines) == 7


@pytest.mark.slow
def test_dead_heads_are_framed_and_only_they(inclusion):
    assert inclusion.dead == ((1, 2),)
    for show in MEASURES:
        figure = bt.plot(inclusion, show=show)
        framed = [patch for patch in figure.axes[0].patches if (patch.get_gid() or "").startswith("dead")]
        assert [(round(p.get_x() + 0.45), round(p.get_y() + 0.45)) for p in framed] == [(2, 1)]
        assert "without effect" in get_notes(figure)
    alive = replace(inclusion, idle=torch.zeros_like(inclusion.idle))
    assert "without effect" not in get_notes(bt.plot(alive))


@pytest.mark.slow
def test_errors_are_written_where_they_are_known(inclusion):
    for show, error in (("importance", inclusion.importance_error), ("ablation", inclusion.ablation_error)):
        errors = [read(t[1:]) for t in get_ax_texts(bt.plot(inclusion, show=show).axes[0]) if "±" in t]
        expected = [value for value in error.flatten().tolist() if value >= 0.005]
        assert errors == pytest.approx(expected, abs=0.006)
    single = bt.inclusion(inclusion.network, TEXTS[:1], draws=50, progress=False)
    assert torch.isnan(single.ablation_error).all()
    assert not any("±" in text for text in get_ax_texts(bt.plot(single, show="ablation").axes[0]))
    assert bt.plot(single).texts[0].get_text().endswith("1 sentence")


@pytest.mark.parametrize("top", [3, 50])
def test_intervals_by_rank_are_those_of_the_frame(inclusion, top):
    figure = bt.plot(inclusion, show="intervals", top=top)
    ax, rows = figure.axes[0], inclusion.to_dataframe().head(top)
    assert get_ticks(ax, "y") == [f"{row.slice}_{row.head}_*" for row in rows.itertuples()]
    lines = next(c for c in ax.collections if c.get_label() == "interval").get_segments()
    assert np.allclose([segment[:, 0] for segment in lines], rows[["low", "high"]])
    dots = next(line for line in ax.lines if line.get_label() == "mean")
    assert np.allclose(dots.get_xdata(), rows["rho"]) and list(dots.get_ydata()) == list(range(len(rows)))
    numbers = [read(text.split(" ")[0]) for text in get_ax_texts(ax)]
    assert numbers == pytest.approx(rows["log_bayes"].tolist(), abs=0.006)
    assert ("of 8 heads" in get_notes(figure)) == (top == 3)


def test_names_in_the_ranking_are_those_that_do_takes(inclusion):
    s = bt.encoder(8, heads=4, slices=2, vocabulary=WORDS, seed=1).sentence("the cat")
    names = get_ticks(bt.plot(inclusion, show="intervals").axes[0], "y")
    changes = [float((s.do({name: torch.zeros(2)})["x_2_0"] - s["x_2_0"]).norm()) for name in names]
    assert min(changes) > 0


@pytest.mark.slow
def test_colours_go_by_powers_of_ten_where_a_few_heads_are_far_above_the_others(inclusion):
    assert type(choose_norm(np.array([1.0, 2.0, 40.0]))) is Normalize
    norm = choose_norm(np.array([[0.5, 2.0, -1.0], [3.0, 2000.0, np.nan]]))
    assert isinstance(norm, SymLogNorm) and (norm.vmin, norm.vmax) == (-2000, 2000) and norm.linthresh == 1.0
    log_bayes = inclusion.log_bayes.clone()
    log_bayes[0, 0] = 1e5
    figure = bt.plot(replace(inclusion, log_bayes=log_bayes), show="log_bayes")
    marks = [t.get_text() for t in figure.axes[0].child_axes[-1].get_yticklabels()]
    assert "0" in marks and "1e+05" in marks and "1e+06" not in marks
    flat = replace(inclusion, log_bayes=torch.zeros(2, 4))
    assert np.allclose(get_cells(bt.plot(flat, show="log_bayes")), 0)


def test_the_loss_has_a_line_per_measure_distinguishable_without_colour(loss):
    figure = bt.plot(loss)
    lines = figure.axes[0].lines
    assert [line.get_label() for line in lines] == list(loss.labels["measure"])
    for line, values in zip(lines, loss.values.numpy(), strict=True):
        assert list(line.get_xdata()) == list(range(9)) and np.allclose(line.get_ydata(), values)
    assert len({line.get_linestyle() for line in lines}) == len({line.get_marker() for line in lines}) == 3
    for band, values, error in zip(figure.axes[0].collections, loss.values, loss.error, strict=True):
        ends = band.get_paths()[0].get_extents()
        assert ends.ymax == pytest.approx(float((values + error).max()))
        assert ends.ymin == pytest.approx(float((values - error).min()))
    assert "4 sentences" in figure.texts[0].get_text()


def test_an_axis_by_powers_of_ten_is_for_losses_that_are_far_apart(loss):
    def get_scale(values, **options):
        changed = replace(loss, values=torch.tensor(values)[None].expand(3, -1), error=torch.zeros(3, 9))
        return bt.plot(changed, **options).axes[0].get_yscale()

    assert get_scale([0.0, 1, 2, 3, 4, 5, 6, 7, 8]) == "linear"
    assert get_scale([0.0, 0.01, 0.02, 0.1, 0.2, 1, 10, 100, 1000]) == "symlog"
    assert get_scale([0.0, 0.01, 0.02, 0.1, 0.2, 1, 10, 100, 1000], log=False) == "linear"
    assert get_scale([0.0] * 9) == "linear" and get_scale([0.0] * 9, log=True) == "symlog"
    single = replace(loss, error=torch.full_like(loss.error, torch.nan), sentences=1)
    figure = bt.plot(single)
    assert not figure.axes[0].collections and "Bands" not in get_notes(figure)


@pytest.mark.slow
def test_a_net_of_many_slices_and_heads_is_drawn(inclusion):
    values = {name: torch.rand(30, 20).double() for name in ("log_bayes", "error", "importance", "ablation")}
    large = replace(
        inclusion,
        slices=tuple(f"enc_cross_a_{k}" for k in range(30)),
        rho=torch.rand(20, 30, 20),
        importance_error=values["error"],
        ablation_error=values["error"],
        **(values | {"log_bayes": values["log_bayes"] ** 9 * 1e5}),
    )
    for show in ("rho", "log_bayes", "intervals"):
        figure = bt.plot(large, show=show)
        numbers = get_ax_texts(figure.axes[0]) if show in MEASURES else []
        assert len(numbers) in (0, 600)  # in all cells or in none
        assert show != "log_bayes" or render(figure)

"""The seasonal series of the experiments: trend and noise, splits without leakage, forecasters, errors."""

import pytest
import torch

from experiments import series


def test_a_season_ahead_only_the_trend_and_the_noise_are_new(monkeypatch):
    monkeypatch.setattr(series, "NOISE", 0.0)
    result = series.sample_series(5, 120, seed=3)
    ahead = result[:, series.SEASON :] - result[:, : -series.SEASON]
    torch.testing.assert_close(ahead, ahead[:, :1].expand_as(ahead), rtol=1e-4, atol=1e-4)
    assert ahead.abs().max() <= 0.02 * series.SEASON + 1e-4 and result.std() > 0.5
    assert not series.sample_series(5, 120, seed=4).equal(result)


def test_held_out_futures_are_behind_all_that_is_trained_on():
    words = torch.arange(float(series.LENGTH)).expand(2, -1)
    windows, future = series.cut_windows(words, series.WINDOW, series.SPLIT)
    history, truth = series.cut_windows(words, series.SPLIT, series.LENGTH, step=8)
    assert windows.min() == 0 and future.max() == series.SPLIT - 1
    assert truth.min() == series.SPLIT and truth.max() == series.LENGTH - 1
    for before, after in ((windows, future), (history, truth)):
        joined = torch.cat([before, after], 1)[..., 0]
        assert joined.shape[1] == series.WINDOW + series.AHEAD and (joined.diff(dim=1) == 1).all()


@pytest.mark.parametrize("forecaster", series.FORECASTERS, ids=lambda forecaster: forecaster.name)
def test_every_forecaster_forecasts(forecaster, monkeypatch):
    """One step of each; its forecasts and draws have the shape of the future."""
    monkeypatch.setattr(series, "STEPS", 1)
    monkeypatch.setattr(series, "DRAWS", 3)
    windows, future = series.cut_windows(series.sample_series(2, 80, seed=1), series.WINDOW, 80)
    net = forecaster.train(windows, future, seed=0).net
    assert forecaster.forecast(net, windows).shape == future.shape
    assert forecaster.draws(net, windows).shape == (3, *future.shape)


def test_an_lstm_has_at_most_the_parameters_of_its_transformer():
    sizes = [sum(value.numel() for value in f.build(0).parameters.values()) for f in series.FORECASTERS]
    for transformer, lstm in ((sizes[0], sizes[2]), (sizes[1], sizes[3])):
        assert 0.98 * transformer < lstm <= transformer


def test_errors_and_their_spread_are_those_of_the_forecasts():
    truth = torch.zeros(4, 3, 1)
    mase, rmse = series._compute_errors([truth + 1, truth - 3], truth, torch.tensor(2.0))
    assert mase == [0.5, 1.5] and rmse == [1.0, 3.0]
    assert series._format_spread(mase) == "1.000 (0.500 to 1.500)" and series._format_spread(mase[:1]) == "0.500"


def test_shown_windows_have_a_line_for_the_series_and_for_each_net():
    history, truth = (torch.randn(4, words, 1) for words in (series.WINDOW, series.AHEAD))
    figure = series.plot_windows(history, truth, {"one": truth, "other": truth})
    assert [len(ax.lines) for ax in figure.axes] == [3] * series.SHOWN

"""Rollouts: equal a loop by hand, batches equal their rows, samples follow the seed; errors."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import bnet_transformer as bt
from bnet_transformer.generation.forecast import windows
from bnet_transformer.tpm import Add, Given, Linear, Normal
from experiments import rigid_body
from tests import flat_options

D = torch.float64
WORD = ["word"]
SMALL = {"heads": 2, "slices": 1, "hidden": 6}


def integrator(sigma: float = 0.2) -> bt.BNet:
    return bt.geometric(4, heads=2, slices=1, observe=Normal(sigma)).to(D)


def forecaster(**options: object) -> bt.BNet:
    return bt.encoder(4, **SMALL, **{"mask": "causal", "readout": Normal(0.2), **options}).to(D)  # type: ignore[arg-type]


def recurrent() -> bt.BNet:
    return bt.recurrent(4, cell="lstm", readout=Normal(0.2)).to(D)


def translator() -> bt.BNet:
    return bt.encoder_decoder(4, **SMALL, readout=Normal(0.2)).to(D)  # type: ignore[arg-type]


def linear(reach: str) -> bt.BNet:
    """Return a map of one word with some reach."""
    slices = [bt.Node("x", Linear(2), [bt.Arrow("x", reach)], WORD)]
    readout = bt.Node("y", Normal(0.5), ["x"], WORD)
    return bt.BNet(bt.Declaration([bt.Stack(slices, [bt.Node("x", Given(2), plates=WORD)], [readout])])).to(D)


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "net, options, new, grow",
    [
        (integrator, {}, 3, False),
        (integrator, {"ahead": 2}, 2, False),
        (integrator, {"ahead": 1}, 1, False),
        (forecaster, {}, 1, False),
        (forecaster, {"grow": True}, 1, True),
        (forecaster, {"ahead": 3, "grow": True}, 3, True),
        (recurrent, {"grow": True}, 1, True),
        (lambda: forecaster(readout=None), {}, 1, False),
        (lambda: bt.volume_preserving(4, attention=None).to(D), {}, 1, False),
        (lambda: bt.volume_preserving(4).to(D), {}, 3, False),
    ],
)
def test_a_rollout_is_a_loop_over_the_module(net, options: dict, new: int, grow: bool) -> None:
    net, words = net(), vectors(2, 3, 4)
    module, result, window = net.module().eval(), [], words
    while sum(part.shape[1] for part in result) < 7:
        result.append(module(window)[:, -new:])
        window = torch.cat([window, result[-1]], 1)
        window = window if grow else window[:, -3:]
    assert_close(net.iterate(words, 7, **options), torch.cat(result, 1)[:, :7], rtol=1e-10, atol=1e-10)


def test_one_readout_of_the_sentence_is_the_next_word() -> None:
    net, words = forecaster(mask=None, pool="mean"), vectors(2, 3, 4)
    module, window = net.module().eval(), words
    for _ in range(4):
        window = torch.cat([window, module(window[:, -3:])[:, None]], 1)
    assert_close(net.iterate(words, 4), window[:, 3:], rtol=1e-10, atol=1e-10)
    longer = torch.cat([words, module(words)[:, None]], 1)
    assert_close(net.iterate(words, 2, grow=True)[:, 1], module(longer), rtol=1e-10, atol=1e-10)


def test_an_encoder_reads_the_window_once_and_the_decoder_goes_on() -> None:
    net, words = translator(), vectors(2, 5, 4)
    module, target = net.module().eval(), words[:, -1:]
    for _ in range(4):
        target = torch.cat([target, module({"enc": words, "dec": target})[:, -1:]], 1)
    assert_close(net.iterate(words, 4), target[:, 1:], rtol=1e-10, atol=1e-10)
    assert_close(net.iterate({"enc": words, "dec": target[:, :3]}, 2), target[:, 3:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("net", [integrator, forecaster, recurrent, translator])
def test_rows_of_a_batch_and_the_beginning_of_a_rollout(net) -> None:
    net, words = net(), vectors(2, 3, 3, 4)
    result = net.iterate(words, 5)
    assert result.shape == (2, 3, 5, 4) and not result.requires_grad
    for k in range(2):
        for m in range(3):
            assert_close(net.iterate(words[k, m], 5), result[k, m], rtol=1e-10, atol=1e-10)
    for steps in (1, 3, 4):
        assert_close(net.iterate(words, steps), result[:, :, :steps], rtol=1e-10, atol=1e-10)
    assert_close(net.iterate(words.numpy(), 5), result, rtol=0, atol=0)
    assert_close(net.iterate(words[0, 0].tolist(), 5), result[0, 0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("net", [integrator, forecaster, translator])
def test_draws_are_around_the_mean_by_the_seed(net) -> None:
    net, words = net(), vectors(3, 4)
    mean = net.iterate(words, 3)
    (name,) = [name for name in net.parameters if name.endswith("log_sigma")]
    nearly_exact = net.replace({name: torch.tensor(-18.0, dtype=D)})
    assert_close(nearly_exact.iterate(words, 3, sample=True), mean, rtol=0, atol=1e-6)
    windows_, rng_state = words.expand(4000, 3, 4), torch.get_rng_state()
    samples = net.iterate(windows_, 2, sample=True, seed=1)
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert torch.equal(samples, net.iterate(windows_, 2, sample=True, seed=1))
    assert torch.equal(samples[:, :1], net.iterate(windows_, 1, sample=True, seed=1))
    assert not torch.equal(samples, net.iterate(windows_, 2, sample=True, seed=2))
    first = samples[:, 0]
    assert_close(first.mean(0), mean[0], rtol=0, atol=0.015)
    assert_close(first.T.cov(), 0.04 * torch.eye(4, dtype=D), rtol=0, atol=0.004)


def test_draws_of_words_that_share_a_mean_are_apart() -> None:
    """All words depend only on the first, so they have the same mean."""
    samples = linear("first").iterate(vectors(3, 2).expand(4000, 3, 2), 3, ahead=3, sample=True).flatten(1)
    assert_close(samples.T.cov(), 0.25 * torch.eye(6, dtype=D), rtol=0, atol=0.025)


def test_a_float_net_takes_any_real_numbers() -> None:
    net = integrator().to(torch.float32)
    assert net.iterate(vectors(3, 4), 2).dtype == torch.float32
    assert net.iterate(np.ones((3, 4), dtype=int), 2).shape == (2, 4)


def adding_net(readouts: list[bt.Node], *given: bt.Node) -> bt.BNet:
    """Return a net with one slice that adds something to its words."""
    states = [bt.Node("x", Given(4), plates=WORD), *given]
    slices = [bt.Node("x", Add(), ["x", *(node.role for node in given)], WORD)]
    return bt.BNet(bt.Declaration([bt.Stack(slices, states, readouts)]))


def scaling_net(times: float) -> bt.BNet:
    """Return a net in which each word is the previous word times a number."""
    slices = [bt.Node("x", Linear(1), ["x"], WORD)]
    net = bt.BNet(bt.Declaration([bt.Stack(slices, [bt.Node("x", Given(1), plates=WORD)])])).to(D)
    return net.replace({name: torch.full_like(value, times) for name, value in net.parameters.items()})


TABLE = [[True, False, False], [True, True, False], [True, True, True]]
Y, Z = (bt.Node(role, Normal(0.5), ["x"], WORD) for role in "yz")
BAD = {
    "no steps": (integrator, (vectors(3, 4), 0), {}, "steps: expected an integer of at least 1; got 0"),
    "no words": (integrator, (vectors(0, 4), 2), {}, "window: expected .*at least one word; got shape .0, 4."),
    "width": (integrator, (vectors(3, 5), 2), {}, r"\[..., word, 4\].*got shape \(3, 5\)"),
    "nothing": (integrator, (None, 2), {}, "window: expected real numbers; got None"),
    "NaN": (integrator, (vectors(2, 3, 4).log(), 2), {}, "NaN or infinity at word 0 of the window 0"),
    "far ahead": (integrator, (vectors(3, 4), 2), {"ahead": 4}, "ahead: expected at most 3, the number of words"),
    "grows": (integrator, (vectors(3, 4), 2), {"grow": True}, "no word depends on a later word; got .*every"),
    "pooled": (
        lambda: forecaster(pool="mean"),
        (vectors(3, 4), 2),
        {"ahead": 2},
        "ahead: expected 1, because y has one",
    ),
    "sample": (integrator, (vectors(3, 4), 2), {"sample": 1}, "sample: expected one of"),
    "seed": (integrator, (vectors(3, 4), 2), {"seed": 3}, "only with sample=True"),
    "a state drawn": (lambda: bt.geometric(4), (vectors(3, 4), 2), {"sample": True}, "Normal readout; got x_2"),
    "learned positions, later": (
        lambda: forecaster(positions="learned", words=3),
        (vectors(3, 4), 2),
        {"grow": True},
        "at most 3 words, the number of learned positions; got 4",
    ),
    "table, later": (lambda: forecaster(mask=TABLE), (vectors(3, 4), 2), {"grow": True}, "mask table; got 4"),
    "vocabulary": (lambda: bt.decoder(4, **SMALL, vocabulary=5), (vectors(3, 4), 2), {}, "Use generate"),
    "ids": (lambda: bt.encoder(4, **SMALL, vocabulary=5, readout=Normal(1.0)), (vectors(3, 4), 2), {}, "vectors; got"),
    "two readouts": (lambda: adding_net([Y, Z]), (vectors(3, 4), 2), {}, r"got y \(Normal\), z \(Normal\)"),
    "another width": (
        lambda: adding_net([bt.Node("y", Normal(0.5, dim=2), ["x"], WORD)]),
        (vectors(3, 4), 2),
        {},
        r"an output of shape \(4,\), the shape of the words; got y of shape \(2,\)",
    ),
    "a choice": (
        lambda: bt.bayesuvius(4, heads=2, observe=Normal(1.0)),
        (vectors(3, 4), 2),
        {},
        "latent choices; got c",
    ),
    "more is given": (
        lambda: adding_net([Y], bt.Node("season", Given(4), plates=WORD)),
        (vectors(3, 4), 2),
        {},
        "no given nodes other than the words; got season",
    ),
    "no source": (translator, ({"dec": vectors(3, 4)}, 2), {}, "words of stack 'enc'; it is missing"),
    "overflow": (
        lambda: scaling_net(1e160),
        (torch.tensor([[[0.0]], [[1.0]]], dtype=D), 3),
        {},
        "finite numbers; got a NaN or infinity at step 2 of window 1. Use at most steps=1",
    ),
    "two batches": (translator, ({"enc": vectors(2, 3, 4), "dec": vectors(3, 3, 4)}, 2), {}, "same leading dims"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    net, arguments, options, message = BAD[name]
    with pytest.raises(bt.BNetError, match=message):
        net().iterate(*arguments, **options)


# windows of a series, and training on them


def test_windows_are_all_there_are() -> None:
    series = vectors(2, 7, 3)
    x, y = windows(series, 3, 2)
    assert x.shape == y.shape == (2 * 3, 3, 3)
    for row in range(2):
        for first in range(3):
            assert torch.equal(x[3 * row + first], series[row, first : first + 3])
            assert torch.equal(y[3 * row + first], series[row, first + 2 : first + 5])
    for bad in ((3, 5), (0, 1), (3, 0)):
        with pytest.raises(bt.BNetError):
            windows(series, *bad)


def test_arrays_of_real_numbers_are_read_as_their_examples() -> None:
    """As a whole, and one example after another: bitwise equal steps; errors name their example."""
    net, (x, y) = forecaster().to(torch.float32), windows(vectors(2, 12, 4), 3, 1)
    y[0, 1] = torch.nan
    options = {"steps": 12, "batch": 4, "held_out": (x[:5], y[:5]), "every": 4}
    expected = flat_options.train(net, (x, y), **options)
    for examples in (list(zip(x, y, strict=True)), (x.numpy(), y.numpy())):
        result = flat_options.train(net, examples, **options)
        assert result.losses == expected.losses and result.held_out == expected.held_out
    streamed = bt.train(net, lambda step: (x[step : step + 4], y[step : step + 4]), steps=3)
    pairs = bt.train(net, lambda s: list(zip(x[s : s + 4], y[s : s + 4], strict=True)), steps=3)
    assert streamed.losses == pairs.losses
    with pytest.raises(bt.BNetError, match="data: expected at least one example"):
        bt.train(net, (x[:0], y[:0]), steps=1)
    with pytest.raises(bt.BNetError, match=r"data\[\d+\], y: expected values of shape \(3, 4\)"):
        bt.train(net, (x, y[:, :2]), steps=1)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("tensors", torch.inf), ("arrays", torch.nan), ("two stacks", torch.nan), ("held out", torch.inf)],
)
def test_a_number_that_is_not_finite_is_named_before_the_first_step(kind: str, value: float) -> None:
    """In one row of many, which may not be in the first batch."""
    net = (translator() if kind == "two stacks" else forecaster()).to(torch.float32)
    x, y = windows(vectors(2, 40, 4), 3, 1)
    bad = x.clone()
    bad[-2, 1, 0] = value
    data = (bad.numpy(), y.numpy()) if kind == "arrays" else (bad, y)
    kwargs = {"data": (x, y), "held_out": data} if kind == "held out" else {"data": data}
    argument = "held_out" if kind == "held out" else "data"
    with pytest.raises(
        bt.BNetError, match=rf"{argument}\[{len(x) - 2}\], sentence.*: .*NaN or an infinite number at word 1"
    ):
        flat_options.train(net, **kwargs, steps=1, batch=1)
    if kind in ("tensors", "arrays"):
        infinite = y.masked_fill(torch.arange(len(y))[:, None, None] == 5, torch.inf)
        with pytest.raises(bt.BNetError, match=r"data\[5\], y: expected finite numbers"):
            bt.train(net, (x, infinite), steps=1, batch=1)


def test_windows_require_the_forecast_length() -> None:
    with pytest.raises(TypeError, match="ahead"):
        windows(vectors(2, 7, 3), 3)  # type: ignore[call-arg]


def test_a_module_of_the_net_may_be_passed() -> None:
    net = integrator()
    module = net.module().eval()
    assert_close(net.iterate(vectors(3, 4), 4, module=module), net.iterate(vectors(3, 4), 4), rtol=0, atol=0)
    with pytest.raises(bt.BNetError, match="module: expected"):
        net.iterate(vectors(3, 4), 4, module=module.train())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("net", [integrator, forecaster, recurrent, translator, lambda: bt.volume_preserving(4).to(D)])
def test_a_net_on_another_device_is_rolled_out_there(net) -> None:
    on_cpu, words = net(), vectors(2, 3, 4)
    on_gpu = on_cpu.to("cuda")
    for options in ({}, {"compile": True}):
        result = on_gpu.iterate(words, 5, **options)
        assert result.device.type == "cuda"
        assert_close(result.cpu(), on_cpu.iterate(words, 5), rtol=1e-8, atol=1e-8)


# the rigid body


def test_the_data_of_the_rigid_body_solve_the_midpoint_rule() -> None:
    starts = rigid_body.create_starts()
    assert starts.shape == (1238, 3) and starts.dtype == D
    angles = np.arange(0.1, 2 * np.pi, 0.01)
    zero = 0 * angles
    first, second = (
        np.stack([np.sin(angles), zero, np.cos(angles)], -1),
        np.stack([zero, np.sin(angles), np.cos(angles)], -1),
    )
    assert_close(starts, torch.from_numpy(np.concatenate([first, second])), rtol=0, atol=1e-12)
    z = rigid_body.integrate_orbits(starts)
    assert z.shape == (1238, 101, 3)
    middle = (z[:, :-1] + z[:, 1:]) / 2
    a, b, c = middle.unbind(-1)
    rate = torch.stack([0.5 * b * c, -c * a, 0.5 * a * b], -1)
    assert_close(z[:, 1:] - z[:, :-1], 0.2 * rate, rtol=0, atol=1e-14)
    assert_close(z.square().sum(-1), torch.ones(1238, 101, dtype=D), rtol=0, atol=1e-13)
    energy = rigid_body.energy(z)
    assert_close(energy, energy[:, :1].expand_as(energy), rtol=0, atol=1e-13)
    assert float((energy - energy.mean()).abs().max()) > 0.1


def test_the_relative_error_is_that_of_all_windows() -> None:
    net, series = integrator(), vectors(2, 9, 4)
    x, y = windows(series, 3, 3)
    forecasts = torch.stack([net.iterate(window, 3) for window in x])
    expected = float(((forecasts - y) ** 2).sum().sqrt() / (y**2).sum().sqrt())
    assert rigid_body.relative_error(net, series, 3) == pytest.approx(expected, rel=1e-9)


def test_the_trials_are_the_nets_of_the_rigid_body() -> None:
    sizes = []
    for trial in rigid_body.create_trials():
        net = trial.net.to(D)
        sizes.append(sum(value.numel() for name, value in net.parameters.items() if name != "y.log_sigma"))
        assert net.iterate(vectors(trial.words, 3), 4, ahead=trial.words).shape == (4, 3)
    assert sizes == [189, 162, 135]
    z = torch.stack([vectors(5, 3), 2 * vectors(5, 3)])
    assert_close(rigid_body.drift(z), ((z**2).sum(-1) - 1).abs().mean(0), rtol=1e-12, atol=0)

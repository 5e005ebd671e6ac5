"""Comparison of many fits, and the number of heads by held-out density: numbers, choices, folds, errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer.inference import Evidence, log_evidence
from bnet_transformer.learning.fit import ModelComparison, model_comparison
from bnet_transformer.learning.fit.model_comparison import check_readouts
from bnet_transformer.learning.fit.result import as_fit
from bnet_transformer.tpm import Categorical, Normal

ARVIZ = pytest.mark.filterwarnings("ignore:\nArviZ is undergoing:FutureWarning")
WEIGHTS = {
    f"W_{r}_0.values": torch.randn(5, 2, 2, generator=torch.Generator().manual_seed(k)) for k, r in enumerate("qkv")
}
TABLES = {"learn": ["c.logits"], "method": bt.EM(steps=12), "progress": False}


def mixture(heads, **options):
    """A net whose head k has the weights k, so that only the shares of the heads are learned."""
    net = bt.bayesuvius(2, heads=heads, **{"observe": Normal(0.7), **options})
    return net.replace({name: 2 * value[:heads] for name, value in WEIGHTS.items()})


def planted(sentences, seed=0, words=5):
    """Sentences of three heads."""
    torch.manual_seed(seed)
    x = torch.randn(sentences, words, 2)
    true = mixture(3).replace({"c.logits": torch.tensor([0.5, 0.3, 0.2]).log()})
    return x, true.pyro(parameters="own")(x)["y"].reshape(sentences, words, 2)


def change_record(f, **changes):
    return replace(f, record=replace(f.record, **changes))


@pytest.fixture(scope="module")
def fits():
    train = planted(60)
    return {k: bt.fit(mixture(k), train, **TABLES) for k in (4, 1, 3)}


def test_the_table_against_hand_computation(fits):
    x, y = planted(50, seed=1)
    table = bt.compare(fits, (x, y))
    expected = np.stack([log_evidence(f.net.module(), {"y": Evidence(y)}, x).detach().double() for f in fits.values()])
    assert np.allclose(table.densities, expected)
    best = expected.mean(1).argmax()
    assert np.allclose(table.density, expected.mean(1)) and table.best == [4, 1, 3][best]
    for k, row in enumerate(expected):
        difference = row - expected[best]
        error = np.sqrt(((difference - difference.mean()) ** 2).sum() / 49 / 50)
        assert float(table.gain[k]) == pytest.approx(difference.mean()) and float(table.gain_error[k]) == pytest.approx(
            error
        )
    assert (
        table.heads == (4, 1, 3)
        and table.parameters == (3, 0, 2)
        and table.live == tuple(f.heads.live for f in fits.values())
    )
    frame = table.to_dataframe()
    assert list(frame.index) == [[4, 1, 3][k] for k in np.argsort(-expected.mean(1))]
    assert list(frame.index[frame["choice"]]) == [table.choice]
    as_list = bt.compare(list(fits.values()), (x, y))
    assert torch.equal(as_list.densities, table.densities) and [*as_list.fits] == [0, 1, 2]


def test_the_pairwise_comparison_has_the_same_gain_and_error(fits):
    data = planted(50, seed=1)
    table, pair = bt.compare(fits, data), fits[1].compare(fits[3], data)
    other = ModelComparison({k: fits[k] for k in (1, 3)}, table.densities[1:], table.criterion)
    assert other.best == 3
    assert (pair.gain, pair.gain_error) == pytest.approx((float(other.gain[0]), float(other.gain_error[0])))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 30))
def test_the_choice_is_the_smallest_within_one_paired_standard_error(seed, sentences):
    rng = np.random.default_rng(seed)
    heads = [int(k) for k in rng.integers(1, 4, 4)]
    densities = rng.normal(size=sentences) * 5 + rng.normal(size=(4, sentences)) * 0.5
    table = ModelComparison({k: FITS[n] for k, n in enumerate(heads)}, torch.tensor(densities), "")
    best = densities.mean(1).argmax()
    difference = densities[best] - densities
    allowed = difference.mean(1) <= np.maximum(difference.std(1, ddof=1) / np.sqrt(sentences), 0.1 / sentences)
    fewest = min(heads[k] for k in range(4) if allowed[k])
    assert table.choice == min(
        (k for k in range(4) if allowed[k] and heads[k] == fewest), key=lambda k: difference[k].mean()
    )


FITS = {heads: as_fit(mixture(heads)) for heads in (1, 2, 3)}


def test_a_tie_is_decided_by_size_although_its_standard_error_is_0():
    densities = torch.tensor([[-2.0, -3.0], [-2.0 + 1e-6, -3.0 + 1e-6]]).double()
    table = ModelComparison({1: FITS[1], 2: FITS[2]}, densities, "")
    assert (table.best, table.choice) == (2, 1)


def test_a_fit_in_which_a_sentence_is_impossible_is_not_chosen():
    densities = torch.tensor([[-2.0, -torch.inf, -2.0], [-3.0, -3.0, -3.1]]).double()
    table = ModelComparison({1: FITS[1], 2: FITS[2]}, densities, "")
    assert table.best == table.choice == 2 and table.gain.tolist() == [-torch.inf, 0.0]


def test_evidences_are_shown_only_where_they_are_available(fits):
    f = change_record(fits[3], log_marginal_likelihood=-123.25, log_marginal_likelihood_error=0.04)
    table = bt.compare({3: f, 4: fits[4]}, planted(50, seed=1))
    assert table.log_marginal_likelihood == (-123.25, None)
    assert table.log_marginal_likelihood_error == (0.04, None)
    html = table._repr_html_()
    assert "-123.25 ± 0.04" in html and html.count("not available") == 1
    assert table.to_dataframe()["log marginal likelihood"].isna().sum() == 1


def test_a_net_is_compared_as_a_fit_without_learned_parameters(fits):
    table = bt.compare({"fit": fits[3], "net": fits[3].net}, planted(50, seed=1))
    assert table.parameters == (2, 0) and table.gain.tolist() == [0.0, 0.0] and table.choice == "net"


def test_notes_of_fits_are_notes_of_the_table_and_loaded_fits_are_compared(fits, tmp_path):
    data = planted(50, seed=1)
    warned = replace(change_record(fits[4], converged=False), notes=("restarts disagree",))
    object.__setattr__(fits[3], "notes", ())
    fits[3].save(tmp_path / "three.fit")
    table = bt.compare({3: bt.load(tmp_path / "three.fit"), 4: warned}, data)
    torch.testing.assert_close(table.densities, bt.compare({3: fits[3], 4: fits[4]}, data).densities)
    assert table.notes == ("fit 4: not converged", "fit 4: restarts disagree")
    assert all(note in table._repr_html_() and note in str(table) for note in table.notes)


@pytest.mark.parametrize(
    "options", [{"held_out": planted(150, seed=1)}, pytest.param({"folds": 3}, marks=pytest.mark.slow)]
)
def test_the_number_of_planted_heads_is_chosen(options):
    table = bt.fit_heads(mixture, planted(150), heads=range(1, 5), **options, **TABLES)
    assert table.choice == 3 and [*table.fits] == [1, 2, 3, 4] == list(table.heads)
    assert all(f.sentences == 150 for f in table.fits.values()) and table.densities.shape == (4, 150)


@pytest.mark.slow
def test_a_choice_at_the_end_of_the_range_or_with_dead_heads_is_noted():
    data, held_out = planted(60), planted(60, seed=1)
    end, dead = (bt.fit_heads(mixture, data, heads=k, held_out=held_out, **TABLES) for k in ((1, 2), (4, 5)))
    assert end.choice == 2 and any("extend heads=" in note for note in end.notes)
    assert dead.choice == 4 and any("only 3 of the 4 heads" in note for note in dead.notes)


@pytest.mark.slow
def test_the_number_of_planted_heads_is_chosen_if_all_weights_are_learned():
    def create(heads):
        return bt.bayesuvius(2, heads=heads, observe=Normal(0.7))

    method, held_out = bt.MAP(restarts=4, steps=60), planted(150, seed=1)
    table = bt.fit_heads(create, planted(100), heads=(2, 3, 4), held_out=held_out, method=method, spread=1.5)
    assert table.choice == 3 and table.live[1] == 3


@pytest.mark.slow
def test_each_sentence_is_held_out_once_and_evaluated_by_a_fit_of_the_others():
    x, y = planted(31)
    table = bt.fit_heads(mixture, (x, y), heads=(2, 3), folds=4, seed=5, **TABLES)
    folds = model_comparison.assign_folds(31, 4, 5)
    assert sorted(torch.cat(folds).tolist()) == list(range(31)) and {len(fold) for fold in folds} == {7, 8}
    for fold in folds[:2]:
        complement = [k for k in range(31) if k not in fold]
        f = bt.fit(mixture(3), (x[complement], y[complement]), seed=5, **TABLES)
        torch.testing.assert_close(table.densities[1, fold], f.log_likelihood((x[fold], y[fold])).double())
    final = bt.fit(mixture(3), (x, y), seed=5, **TABLES)
    assert torch.equal(table.fits[3].pi, final.pi)


@pytest.mark.slow
def test_padded_sentences_and_nets_without_words_have_folds():
    x, y = planted(8)
    data = [(a[:n], b[:n]) for a, b, n in zip(x, y, [2, 3] * 4, strict=True)]
    table = bt.fit_heads(mixture, data, heads=(1, 2), folds=2, **TABLES)
    folds = model_comparison.assign_folds(8, 2, 0)
    f = bt.fit(mixture(2), [data[k] for k in folds[1]], **TABLES)
    expected = f.log_likelihood([data[k] for k in folds[0]]).double()
    torch.testing.assert_close(table.densities[1, folds[0]], expected)

    def without_words(states):
        nodes = [bt.Node("c", Categorical(states)), bt.Node("y", Categorical(2), ["c"])]
        return bt.BNet(bt.Declaration(nodes=nodes))

    columns = {"y": [0, 1, 1, 0, 1, 1, 1, 1]}
    table = bt.fit_heads(without_words, columns, heads=(1, 2), folds=2, method=bt.EM(steps=5), progress=False)
    assert table.heads == (1, 2) and table.densities.shape == (2, 8)


@pytest.mark.slow
def test_an_interrupt_returns_the_numbers_of_heads_that_were_completed(monkeypatch):
    calls = []

    def interrupt_last(net, data, **options):
        calls.append(net)
        return change_record(bt.fit(net, data, **options), finished=len(calls) <= 5)

    monkeypatch.setattr(model_comparison, "fit_net", interrupt_last)
    table = bt.fit_heads(mixture, planted(20), heads=(1, 2, 3), folds=2, **TABLES)
    assert [*table.fits] == [1] and table.densities.shape == (1, 20) and "2, 3" in table.notes[-1]


def test_training_sentences_are_not_held_out(fits):
    (x, y), (other_x, other_y) = planted(60), planted(60, seed=1)
    leak = torch.cat([other_x, x[7:8]]), torch.cat([other_y, y[7:8]])
    short = [(x[3], y[3]), (other_x[0, :2], other_y[0, :2])]  # padding does not hide a training sentence
    for data, count in (((x, y), 60), (leak, 1), (short, 1)):
        with pytest.raises(bt.BNetError, match=f"{count} training sentences"):
            bt.compare(fits, data)
    with pytest.raises(bt.BNetError, match="1 training sentences"):
        bt.fit_heads(mixture, (x, y), heads=(1, 2), held_out=leak, **TABLES)


@pytest.mark.slow
def test_sentences_that_are_equal_by_chance_are_a_note():
    def create(heads):
        return bt.bayesuvius(2, heads=heads, vocabulary=["a", "b"], observe=Categorical(2))

    train, test = [("a b", "b a")] * 3 + [("b a", "a b")], [("a b", "b a"), ("a b", "b a"), ("a", "b")]
    f = {k: bt.fit(create(k), train, method=bt.MAP(steps=1), progress=False) for k in (1, 2)}
    assert "2 of 3" in bt.compare(f, test).notes[0]
    with pytest.raises(bt.BNetError, match="held-out"):
        bt.compare(f, train)


def test_fits_that_cannot_be_compared(fits, monkeypatch):
    data = planted(20, seed=1)
    other = bt.fit(mixture(2), planted(60, seed=2), **TABLES)
    with pytest.raises(bt.BNetError, match="of which 0 are also in fit 4"):
        bt.compare({**fits, "other": other}, data)
    with pytest.raises(bt.BNetError, match="same sentences in the same order"):
        bt.compare([fits[3], other])
    with pytest.raises(bt.BNetError, match="more heads"):
        bt.compare(fits)  # no samples: leave-one-out is not possible
    with pytest.raises(bt.BNetError, match="at least 2 sentences"):
        bt.compare(fits, planted(1, seed=1))
    with pytest.raises(bt.BNetError, match="at least one fit"):
        bt.compare({}, data)
    with pytest.raises(bt.BNetError, match="a Fit, or a net"):
        bt.compare([fits[3], 5], data)
    monkeypatch.setattr(type(fits[3]), "log_likelihood", lambda fit, data: torch.full((20,), torch.nan))
    with pytest.raises(bt.BNetError, match="fit 4: expected finite"):
        bt.compare(fits, data)


def test_fits_of_different_readouts_are_not_compared():
    node = bt.Node("c", Categorical(2))
    nets = [bt.BNet(bt.Declaration(nodes=[node, bt.Node("y", Categorical(2), ["c"]), *more])) for more in (
        [], [bt.Node("z", Categorical(2), ["c"])],
    )]  # fmt: skip
    columns = [{"y": [0, 1, 1, 0]}, {"y": [0, 1, 1, 0], "z": [0, 1, 0, 1]}]
    f = [bt.fit(net, data, method=bt.EM(steps=2), progress=False) for net, data in zip(nets, columns, strict=True)]
    corpus = [g._read_data(data) for g, data in zip(f, columns, strict=True)]
    with pytest.raises(bt.BNetError, match="same observed readouts"):
        check_readouts(["a", "b"], corpus)


@pytest.mark.parametrize("options, message", [
    ({"folds": 21}, "at most as many folds as sentences, 20"),
    ({"heads": (2, 2)}, "each once"),
    ({"folds": 2, "held_out": planted(5, seed=1)}, "None with held_out"),
    ({"checkpoints": "folder"}, "fit_heads runs many fits"),
    ({"restart": 2}, "fit option"),
])  # fmt: skip
def test_options_of_fit_heads(options, message):
    with pytest.raises(bt.BNetError, match=message):
        bt.fit_heads(mixture, planted(20), **{"heads": (1, 2), **TABLES, **options})


def test_sentences_that_share_a_draw_have_no_density():
    def create(heads):
        return bt.bayesuvius(2, heads=heads, per="corpus", observe=Normal(1.0))

    with pytest.raises(bt.BNetError, match="per='corpus'"):
        bt.fit_heads(create, planted(20), heads=(1, 2))
    with pytest.raises(bt.BNetError, match="per='corpus'"):
        bt.compare([create(1), create(2)], planted(20))


@pytest.mark.slow
@ARVIZ
def test_fits_with_samples_are_compared_by_leaving_one_out(monkeypatch):
    import arviz as az

    options = {"method": bt.NUTS(chains=1, draws=100, warmup=50), "learn": ["c.logits"], "progress": False}
    data = planted(40)
    f = {k: bt.fit(mixture(k), data, **options) for k in (2, 3)}
    table = bt.compare(f)
    loos = [az.loo(g.to_arviz(), var_name="y", pointwise=True) for g in f.values()]
    assert table.density.tolist() == pytest.approx([float(loo.elpd_loo) / 40 for loo in loos])
    difference = loos[0].loo_i.values - loos[1].loo_i.values
    assert float(table.gain_error[0]) == pytest.approx(difference.std(ddof=1) / 40**0.5)
    assert table.criterion.startswith("leave-one-out") and table.choice == 3
    held_out = bt.compare(f, planted(40, seed=1))
    draws = [f[2].net.replace({"c.logits": draw.log()}) for draw in f[2].samples["c.logits"][0]]
    x, y = planted(40, seed=1)
    rows = torch.stack([log_evidence(net.module(), {"y": Evidence(y)}, x).detach().double() for net in draws])
    torch.testing.assert_close(held_out.densities[0], rows.logsumexp(0) - np.log(100), atol=1e-4, rtol=0)
    monkeypatch.setattr("bnet_transformer.learning.fit.result.find_spec", lambda name: None)
    with pytest.raises(bt.BNetError, match="install ArviZ"):
        bt.compare(f)


def leave_one_out_by_quadrature(net, x, y):
    """The leave-one-out densities of a net of two heads with known weights and a uniform prior of the shares."""
    share = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    by_head = [
        log_evidence(net.replace({"c.logits": torch.eye(2)[k].log()}).module(), {"y": Evidence(y)}, x).detach().double()
        for k in range(2)
    ]
    rows = torch.logaddexp(share.log()[:, None] + by_head[0], (1 - share).log()[:, None] + by_head[1])
    return rows.sum(1).logsumexp(0) - (rows.sum(1, keepdim=True) - rows).logsumexp(0)


@pytest.mark.slow
@ARVIZ
def test_leave_one_out_requires_draws_from_the_posterior():
    pytest.importorskip("arviz")
    (x, y), net = planted(25), mixture(2)
    options = {"learn": ["c.logits"], "progress": False}
    weighted = bt.fit(net, (x, y), method=bt.Laplace(draws=2000), **options)
    table, pair = bt.compare({"a": weighted, "b": weighted}), weighted.compare(weighted)
    torch.testing.assert_close(table.densities[0], leave_one_out_by_quadrature(net, x, y), atol=0.05, rtol=0)
    assert pair.gain == 0.0 and pair.criterion == table.criterion
    normal = bt.fit(net, (x, y), method=bt.Laplace(draws=50, reweight=False), **options)
    guide = bt.fit(net, (x, y), method=bt.SVI(steps=2, draws=50), **options)
    for f in (normal, guide):
        assert not f.has_posterior_draws
        for run in (lambda f=f: bt.compare([weighted, f]), lambda f=f: weighted.compare(f)):
            with pytest.raises(bt.BNetError, match=r"draws from the posterior.*data=.*bt\.NUTS\(\)"):
                run()
        assert weighted.compare(f, planted(20, seed=1)).gain == pytest.approx(0.0, abs=0.2)
        assert bt.compare([weighted, f], planted(20, seed=1)).densities.isfinite().all()


@pytest.mark.slow
@ARVIZ
def test_draws_that_predict_too_differently_are_notes_or_errors():
    pytest.importorskip("arviz")
    data = planted(25)
    draws = 0.5 + 0.001 * torch.randn(200, 1, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, -1])
    f = bt.fit_from_pyro(mixture(2), data, {"c.logits": draws})
    likelihoods = f.log_likelihoods.clone()
    spread_out = replace(f, known_likelihoods=likelihoods.index_fill(2, torch.tensor([3]), 0.0), notes=("R-hat is 2",))
    spread_out.known_likelihoods[0, :, 3] = torch.linspace(-400, 0, 200)  # e^400 overflows in float32
    for result in (spread_out.compare(f), bt.compare([spread_out, f])):
        assert sum("unreliable for 1 sentences" in note for note in result.notes) == 1
        assert any("R-hat is 2" in note for note in result.notes)
        values = result.densities if hasattr(result, "densities") else torch.tensor([result.gain, result.gain_error])
        assert values.isfinite().all()
    impossible = replace(f, known_likelihoods=likelihoods.clone())
    impossible.known_likelihoods[0, 7, 3] = -torch.inf
    for run in (lambda: bt.compare([impossible, f]), lambda: impossible.compare(f)):
        with pytest.raises(bt.BNetError, match="1 draws in which a sentence has none"):
            run()


def test_a_sentence_without_probability_is_no_difference_of_nan(fits, monkeypatch):
    data = planted(20, seed=1)
    impossible = torch.zeros(20).index_fill(0, torch.tensor([2]), -torch.inf)
    monkeypatch.setattr(type(fits[3]), "log_likelihood", lambda fit, data: impossible)
    with pytest.raises(bt.BNetError, match="every sentence has a probability above 0"):
        fits[3].compare(fits[1], data)
    monkeypatch.setattr(type(fits[3]), "log_likelihood", lambda f, d: impossible if f is fits[3] else torch.zeros(20))
    assert fits[3].compare(fits[1], data).gain == -np.inf

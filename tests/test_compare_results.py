"""`a.compare(b)`: the estimates are those of the results, p is that of all permutations, errors have their rates."""

import importlib
import itertools
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import bnet_transformer as bt
from bnet_transformer._core.stats import ComparableResult, SentenceValues, digest_words
from tests.test_results import CLEAN, CORRUPT, METRIC, build, decoder, pair

pytestmark = pytest.mark.slow

COMPARABLE = [
    *("Sweep", "Mediation", "Circuit", "FaithfulnessCurves", "Inclusion", "Roles", "Reads"),
    *("Contributions", "PathContributions", "ScoreContributions"),
]


class Values(ComparableResult):
    """A result of given values by sentence."""

    def __init__(self, values, scale=None, **options):
        cells = options.pop("cells", tuple(f"cell {k}" for k in range(len(values))))
        self.values = SentenceValues("value", cells, {}, np.asarray(values), scale, **options)

    def _to_sentence_values(self):
        return self.values


def get_estimates(kind, result):
    """The estimates of a result, by its own properties."""
    match kind:
        case "Sweep":
            return result.to_dataframe()["effect"]
        case "Mediation":
            return np.concatenate([result.to_dataframe()[part] for part in ("direct", "indirect", "interaction")])
        case "Circuit":
            total, outcome = float((result.clean - result.corrupt).mean()), float(result.outcome.mean())
            return [result.faithfulness, result.distance, outcome, total]
        case "FaithfulnessCurves":
            return np.concatenate([[*result.faithfulness(name).tolist(), result.cpr[name]] for name in result.methods])
        case "Inclusion":
            return result.ablation.flatten()
        case "Roles":
            return (result.counts / result.sentences).flatten()
        case "Reads":
            return result.matrix.flatten()
        case "Contributions":
            return result.parts
        case _:
            return result.values.flatten()


@pytest.mark.parametrize("kind", COMPARABLE)
def test_estimates_are_those_of_the_results(kind):
    result = build(kind)
    comparison = result.compare(result, resamples=50)
    expected = np.asarray(get_estimates(kind, result), dtype=float)
    assert np.allclose(comparison.first[: len(expected)], expected, atol=1e-6)
    assert not comparison.difference.any() and comparison.significant() == ()
    assert comparison.p is None or bool((comparison.p == 1).all())
    assert comparison.to_dataframe()["name"].tolist() == list(comparison.cells)


def test_the_results_of_two_models_are_compared_in_one_call(tmp_path):
    first, second = (bt.sweep(*pair(seed), at="x", metric=METRIC) for seed in (0, 1))
    comparison = first.compare(second)
    expected = first.effects.double() - second.effects.double()
    assert np.allclose(comparison.difference, expected.mean(-1).flatten())
    first.save(tmp_path / "a")
    again = bt.load(tmp_path / "a").compare(second)
    assert again.difference.equal(comparison.difference) and again.p.equal(comparison.p)


def compute_p(statistics):
    """p and max-T adjusted p of statistics `[permutation, cell]`, the first of which is observed."""
    magnitude = np.abs(statistics)
    margin = 1e-9 * magnitude.max()
    p = (magnitude >= magnitude[0] - margin).mean(0)
    return p, (magnitude.max(1)[:, None] >= magnitude[0] - margin).mean(0)


def test_paired_p_is_that_of_all_sign_flips():
    first, second = np.random.default_rng(0).normal(size=(2, 4, 7)) + 0.4 * np.arange(2)[:, None, None]
    comparison = Values(first).compare(Values(second))
    flips = np.array(list(itertools.product([1, -1], repeat=7)))
    differences = (first - second) * flips[:, None]
    p, adjusted = compute_p(stats.ttest_1samp(differences, 0, axis=-1).statistic)
    assert comparison.is_exact
    assert np.allclose(comparison.p, p) and np.allclose(comparison.adjusted_p, adjusted)
    reverse = Values(second).compare(Values(first))
    assert reverse.difference.equal(-comparison.difference) and reverse.p.equal(comparison.p)


@pytest.mark.parametrize("resamples", [10_000, 50])
def test_differences_of_mean_zero_have_p_one(resamples):
    tenths = np.array([[1, 2, -3, 4, -5, 1, 0], [7, -3, -4, 6, -1, -2, -3], [1, 1, 1, -1, -1, -1, 2]])
    flips = list(itertools.product([1, -1], repeat=7))
    sums = [
        [abs(sum(Fraction(int(d), 10) * s for d, s in zip(row, flip, strict=True))) for row in tenths] for flip in flips
    ]
    p = [np.mean([row[k] >= sums[0][k] for row in sums]) for k in range(3)]
    assert p[:2] == [1, 1] and p[2] < 1
    comparison = Values(0.3 + tenths / 10).compare(Values(np.full(tenths.shape, 0.3)), resamples=resamples)
    assert comparison.is_exact == (resamples == 10_000)
    assert comparison.p[:2].tolist() == [1, 1] and comparison.adjusted_p[:2].tolist() == [1, 1]
    assert not comparison.is_exact or np.allclose(comparison.p, p)


def test_unpaired_p_is_that_of_all_divisions():
    values = np.random.default_rng(1).normal(size=(3, 9))
    values[:, :4] += 1
    comparison = Values(values[:, :4]).compare(Values(values[:, 4:]), paired=False)
    parts = [np.isin(np.arange(9), part) for part in itertools.combinations(range(9), 4)]
    t = [stats.ttest_ind(values[:, part], values[:, ~part], axis=-1, equal_var=False).statistic for part in parts]
    p, adjusted = compute_p(np.array(t))
    assert comparison.is_exact and not comparison.paired and comparison.examples == (4, 5)
    assert np.allclose(comparison.p, p) and np.allclose(comparison.adjusted_p, adjusted)


def test_a_ratio_is_exchanged_with_its_denominator():
    generator = np.random.default_rng(2)
    scale = 1 + generator.random((2, 1, 6))
    values = scale * np.array([0.9, 0.5])[:, None, None] + 0.1 * generator.normal(size=(2, 2, 6))
    comparison = Values(values[0], scale[0]).compare(Values(values[1], scale[1]))
    t = []
    for flip in itertools.product([0, 1], repeat=6):
        a, b = (np.where(np.array(flip) == k, 0, 1) for k in (0, 1))
        (num, den), (num_b, den_b) = ([x[i, ..., np.arange(6)].T for x in (values, scale)] for i in (a, b))
        f, f_b = num.mean(1) / den.mean(1), num_b.mean(1) / den_b.mean(1)
        influence = (num - f[:, None] * den) / den.mean(1)[:, None] - (num_b - f_b[:, None] * den_b) / den_b.mean()
        t.append((f - f_b) / influence.std(1, ddof=1))
    p, adjusted = compute_p(np.array(t))
    assert np.allclose(comparison.first, values[0].mean(-1) / scale[0].mean(-1))
    assert np.allclose(comparison.p, p) and np.allclose(comparison.adjusted_p, adjusted)


def test_clusters_count_as_one_sentence():
    first, second = np.random.default_rng(3).normal(size=(2, 3, 12)) + np.arange(2)[:, None, None]
    plain = Values(first).compare(Values(second), resamples=500)
    twice = Values(first.repeat(2, 1)).compare(
        Values(second.repeat(2, 1)), clusters=np.arange(12).repeat(2).tolist(), resamples=500
    )
    assert twice.clusters == (12, 12) and twice.examples == (24, 24) and plain.clusters is None
    for name in ("difference", "p", "adjusted_p", "low", "high"):
        assert torch.allclose(getattr(twice, name), getattr(plain, name))
    uneven = Values(first).compare(Values(second), clusters=torch.tensor([0] * 5 + list(range(7))))
    assert uneven.clusters == (7, 7)
    assert np.allclose(uneven.first, first.mean(1))  # sentences, not clusters, have equal weights
    parts = Values(first).compare(Values(second[:, :8]), paired=False, clusters=(list(range(12)), [0, 0, *range(6)]))
    assert parts.clusters == (12, 6)


@pytest.mark.slow
def test_intervals_of_many_sentences_are_those_of_student():
    first, second = np.random.default_rng(4).normal(size=(2, 3, 400))
    for paired, test in (
        (True, stats.ttest_rel(first, second, axis=1)),
        (False, stats.ttest_ind(first, second, axis=1)),
    ):
        comparison = Values(first).compare(Values(second), paired=paired, resamples=4000, confidence=0.9)
        expected = test.confidence_interval(0.9)
        width = expected.high - expected.low
        assert np.abs(comparison.low.numpy() - expected.low).max() < 0.08 * width.max()
        assert np.abs(comparison.high.numpy() - expected.high).max() < 0.08 * width.max()


def test_few_sentences_have_no_intervals_and_one_has_no_p():
    first, second = np.random.default_rng(5).normal(size=(2, 2, 9))
    small = Values(first[:, :4]).compare(Values(second[:, :4]))
    assert small.low is None and any("no intervals" in note for note in small.notes)
    assert any("no p is below 0.125" in note for note in small.notes) and float(small.p.min()) >= 0.125
    uneven = Values(first[:, :2]).compare(Values(second[:, :4]), paired=False)
    even = Values(first[:, :2]).compare(Values(second[:, :2]), paired=False)
    assert any("no p is below 0.0667" in note for note in uneven.notes)  # 1 of 15 divisions
    assert any("no p is below 0.333" in note for note in even.notes)  # 2 of 6, which are each other's mirror image
    single = Values(first[:, :1]).compare(Values(second[:, :1]))
    assert single.p is None and single.adjusted_p is None and "p" not in single.to_dataframe()
    assert any("single sentence" in note for note in single.notes)


def test_a_ratio_without_a_total_effect_has_no_p():
    scale = np.array([[1.0, -1.0, 2.0, -2.0]])
    comparison = Values(np.ones((2, 4)), np.concatenate([scale, scale + 1])).compare(Values(np.ones((2, 4))))
    assert comparison.p.isnan().tolist() == [True, False] == comparison.adjusted_p.isnan().tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build("Roles").compare(build("Inclusion")), "same kind, Roles.*Inclusion"),
        (lambda: build("Sweep").compare(3), "same kind, Sweep"),
        (lambda: build("Sweep").compare(build("Sweep").part("x")), "same at"),
        (
            lambda: sweep(metric=by_word).compare(sweep(texts=("the cat", "the dog"), metric=by_word)),
            "same cells.*x_0_2",
        ),
        (lambda: sweep(metric={"y_2": "cat"}).compare(sweep()), r"same metric.*log P\(y_2 = cat\).*log P\(y_2 = dog\)"),
        (lambda: sweep(metric={"y_2": ("cat", "ran")}).compare(sweep()), "same metric"),
        (lambda: sweep(metric={"y_1": ("cat", "dog")}).compare(sweep()), "same metric"),
        (lambda: sweep(metric=lambda x_1_2: x_1_2[:, 0]).compare(sweep(metric=lambda x_1_1: x_1_1[:, 0])), "x_1_2"),
        (lambda: build("Circuit").compare(search({"y_2": ("cat", "ran")})), "same metric"),
        (lambda: build("Circuit").compare(search(direction="denoise")), "same direction"),
        (lambda: curves(METRIC).compare(curves({"y_2": ("cat", "ran")})), "same metric"),
        (lambda: reads().compare(reads(head=1)), "same average over heads.*head 1"),
        (lambda: reads().compare(reads(slices=[0])), "same slices"),
        (lambda: sweep().compare(sweep(texts=("the dog sat", "the cat sat"))), "same sentences.*1 of 1.*paired=False"),
        (lambda: sweep().compare(sweep(texts=("the cat sat", "a dog sat"))), "same sentences.*1 of 1"),
        (
            lambda: bt.roles(decoder(), CLEAN).compare(bt.roles(decoder(), CLEAN[::-1])),
            "same sentences.*2 of 3.*sentence 0",
        ),
        (lambda: reads().compare(decoder().sentence("the dog sat").reads()), "same sentences"),
        (lambda: parts("the cat sat").compare(parts("the dog sat")), "same sentences"),
        (lambda: parts("the cat sat", paths=2).compare(parts("the dog sat", paths=2)), "same sentences"),
        (lambda: build("Inclusion").compare(inclusion(CORRUPT)), "same sentences.*3 of 3"),
        (lambda: build("Circuit").compare(build("Circuit").run(*pair()[::-1])), "same sentences"),
        (lambda: sweep(direction="noise").compare(sweep()), "same direction"),
        (lambda: sweep().compare(build("Sweep").part("x")), "same sentences.*1 and 3.*paired=False"),
        (lambda: build("Inclusion").compare(replace(build("Inclusion"), sigma=3.0)), "same sigma.*Pass one sigma="),
        (lambda: sweep().compare(sweep(), clusters=["a", "b"]), "clusters"),
        (lambda: sweep().compare(sweep(), paired=1), "paired"),
        (lambda: sweep().compare(sweep(), confidence=95), "confidence"),
    ],
)
def test_results_that_do_not_correspond_raise_errors(make, message):
    with pytest.raises(bt.BNetError, match=message):
        make()


def search(metric=METRIC, **options):
    return bt.circuit(*pair(), metric=metric, threshold="20%", over=("slice", "head"), **options)


def curves(metric):
    scores = search()
    return bt.faithfulness_curves(*pair(), metric=metric, scores=scores, over=scores.over, shares=(0.5, 1.0))


def reads(**options):
    return decoder().sentence("the cat sat").reads(**options)


def parts(text, **options):
    return decoder().sentence(text).contributions("y_2", of="cat", **options)


def inclusion(texts):
    return bt.inclusion(decoder(), texts, sigma=build("Inclusion").sigma, progress=False)


@pytest.mark.parametrize("kind", COMPARABLE)
def test_the_words_of_the_sentences_are_known(kind):
    assert not any("not checked that sentence" in note for note in build(kind).compare(build(kind), resamples=20).notes)


def test_sentences_that_are_unknown_give_a_note():
    nets = [bt.bayesuvius(4, mask="causal", seed=seed) for seed in (0, 1)]
    first, second = (net.sentence(x=torch.arange(12.0).reshape(3, 4)).reads() for net in nets)
    assert any("not checked that sentence" in note for note in first.compare(second).notes)
    assert not any("not checked that sentence" in note for note in first.compare(second, paired=False).notes)
    roles = [bt.roles(decoder(), texts) for texts in (CLEAN, CLEAN[::-1])]
    assert roles[0].compare(roles[1], paired=False).difference.abs().max() < 1e-6


def test_digests_are_those_of_the_text_and_not_of_the_tokens():
    text = digest_words({"": ["the", "Mona", "Lisa"]}, {})
    for tokens in (["the", "▁mona", "▁lisa"], ["The", "ĠMona", "ĠLi", "sa"], ["[CLS]", "the", "mon", "##a", "lisa"]):
        assert digest_words({"a": tokens}, {"a": [0] if tokens[0] == "[CLS]" else []}) == text
    assert digest_words({"": ["the", "Lisa", "Mona"]}, {}) != text
    assert digest_words({"": ["0", "1"]}, {}) == "" == digest_words({"": []}, {})
    values = [Values(np.ones((1, 2)), digests=(text, digest)) for digest in (text, digest_words({"": ["café"]}, {}))]
    assert any("of 1 pairs are unknown" in note for note in values[0].compare(values[1]).notes)


def by_word(y):
    return y[..., 0].sum(-1)


def test_the_functions_of_two_metrics_are_not_compared():
    first, second = (sweep(metric=lambda x_1_2, k=k: x_1_2[:, k]) for k in (0, 1))
    assert any("cannot be checked" in note for note in first.compare(second).notes)
    assert not any("cannot be checked" in note for note in sweep().compare(sweep()).notes)


def sweep(texts=("the cat sat", "the dog sat"), node="y_2", metric=None, **options):
    sentences = (decoder().sentence(text) for text in texts)
    return bt.sweep(*sentences, at="x", metric=metric or {node: ("cat", "dog")}, **options)


def test_the_plot_shows_the_largest_differences_in_order():
    comparison = build("ResultComparison")
    figure = bt.plot(comparison, top=5)
    names = {name for name, _ in comparison.top(5)}
    order = [k for k, name in enumerate(comparison.cells) if name in names]
    points = figure.axes[0].collections[-1].get_offsets()
    assert np.allclose(points[:, 0], comparison.difference[order])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [comparison.cells[k] for k in order]


def load_simulation():
    folder = str(Path(__file__).resolve().parents[1] / "docs" / "scripts")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("result_comparisons")
    finally:
        sys.path.remove(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal differences, 10", "faithfulness", "two data sets, normal"])
def test_intervals_and_p_hold_their_levels(kind):
    simulation = load_simulation()
    (case,) = (name for name in simulation.CASES if kind in name)
    rates = simulation.simulate(case, 300)
    assert 0.92 <= rates["coverage"] <= 0.98 and rates["p"] <= 0.075 and rates["adjusted p"] <= 0.1

"""First-order sweeps: the gradient of the metric, for every role; nodes without a gradient raise errors."""

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.interventions import Noise, Zero
from tests.cases import get_case
from tests.sweep_oracle import D, get_outputs, make_metric, make_pair, nonlinear
from tests.test_sweeps import (
    CASES_WITH_WORDS,
    READERS,
    REFUSED,
    ROLES,
    close,
    find_roles,
    make_examples,
    make_net,
    make_sentences,
)
from tests.test_sweeps_paths import ARROWS, PATHS, make_linear_net

NOISE_SCALE = 1e-6
# Roles computed word after word, or whose values decide a choice: a sweep runs their cells one at a time.
SEQUENTIAL = {
    "recurrent": {"h"},
    "recurrent, rnn": {"x"},
    "recurrent, lstm": {"token", "x", "input", "forget", "output", "candidate", "cell"},
    "recurrences": {"h", "m", "p"},
    "marginal": {"q", "k", "v", "W_q", "W_k", "W_v"},
}
# Weights below a choice; none left.
UNMOVED = {"chapter, real", "corpus", "slice", "hidden Markov", "experts", *SEQUENTIAL}


def add_noise(s, first=()):
    """Return the same sentence with a little noise in nodes of the first role that supports noise."""
    for role in (*first, *find_roles(s.net)):
        names = [s.ground.name(node) for node in s.ground.select_nodes(s.ground.template.by_stem[role][0]).tolist()]
        try:
            return s.do({name: Noise(NOISE_SCALE) for name in names})
        except bt.BNetError:  # of weights that depend on a choice
            continue
    raise AssertionError("no such nodes")


def check_effects(estimate, result):
    """Check first-order effects of small noise against measured ones, and return the scale of effects."""
    scale = float(result.effects.nan_to_num().abs().max())
    assert estimate.method == bt.Gradient() and result.method == "exact"
    torch.testing.assert_close(estimate.effects, result.effects, rtol=1e-4, atol=1e-4 * scale + 1e-14, equal_nan=True)
    assert estimate.axes == result.axes and estimate.names == result.names and estimate.labels == result.labels
    torch.testing.assert_close(estimate.corrupt, result.corrupt, rtol=0, atol=0)
    return scale


@pytest.mark.parametrize("name", [name for name in ROLES if name != "word"])
def test_a_small_change_has_the_first_order_effect(name):
    _, corrupt = make_pair(get_case(name))
    query = make_metric(get_outputs(corrupt))
    largest, refused = 0.0, set()
    for role in ROLES[name]:
        if (name, role) in REFUSED:
            continue
        clean = add_noise(corrupt, [role])
        result = bt.sweep(clean, corrupt, at=role, metric=query)
        try:
            estimate = bt.sweep(clean, corrupt, at=role, metric=query, method=bt.Gradient())
        except bt.BNetError as error:
            assert "method" in str(error)
            refused.add(role)
        else:
            largest = max(largest, check_effects(estimate, result))
    assert largest > NOISE_SCALE / 1000 or name in UNMOVED
    assert not refused - SEQUENTIAL.get(name, set()), "what a batch can hold has slopes"


@pytest.mark.parametrize("name", READERS)
def test_rows_of_attention_have_slopes_too(name):
    """Whole rows, and single entries."""
    _, corrupt = make_pair(get_case(name))
    sides = add_noise(corrupt), corrupt
    query = {"at": READERS[name][0], "metric": make_metric(get_outputs(corrupt))}
    rows = bt.sweep(*sides, **query)
    check_effects(bt.sweep(*sides, method=bt.Gradient(), **query), rows)
    over = (*rows.axes, "read")
    check_effects(bt.sweep(*sides, over=over, method=bt.Gradient(), **query), bt.sweep(*sides, over=over, **query))


def test_in_parts_as_at_once():
    net = make_net(heads=3, observe=bt.tpm.Categorical(3))
    clean, corrupt = make_examples(net, 5)
    query = {"at": "x", "metric": {"y_2": (0, 1)}, "method": bt.Gradient()}
    result = bt.sweep(clean, corrupt, **query)
    close(bt.sweep(clean, corrupt, memory=1, **query).effects, result.effects)
    per_example = [bt.sweep(a, b, **query) for a, b in zip(clean, corrupt, strict=True)]
    close(torch.cat([one.effects for one in per_example], -1), result.effects)
    close(result.clean, bt.sweep(clean, corrupt, at="x", metric={"y_2": (0, 1)}).clean)
    assert "to first order" in repr(result)
    assert result.select(slice=1).method == bt.Gradient()


def test_cells_of_names_and_of_an_ablation():
    """A name, a pattern, zeros: the gradient times the change of the value."""
    net = make_net(observe=bt.tpm.Categorical(3))
    s = make_sentences(net)[1]
    query = {"metric": {"y_2": (0, 1)}, "method": bt.Gradient()}
    result = bt.sweep(Zero(), s, at=["v_1_0_1", "v_1_*_1"], **query)
    per_node = bt.sweep(Zero(), s, at="v", **query)
    close(result.values[0], per_node["v_1_0_1"])
    close(result.values[1], per_node["v_1_0_1"] + per_node["v_1_1_1"])


def test_what_has_no_slope_is_refused():
    net = make_net(observe=bt.tpm.Categorical(3))
    clean, corrupt = make_sentences(net)
    for function in (lambda y_2: y_2.detach()[:, 0], lambda y_2: y_2.argmax(-1).double(), lambda y_2: torch.ones(1)):
        with pytest.raises(bt.BNetError, match="metric: expected a metric with a gradient"):
            bt.sweep(clean, corrupt, metric=function, method=bt.Gradient())
    with pytest.raises(bt.BNetError, match=r"metric: expected a metric with a finite gradient .* got NaN or infinity"):
        bt.sweep(clean, corrupt, metric=lambda y_2: (y_2 - y_2).sum(-1).abs().sqrt(), method=bt.Gradient())


@pytest.mark.parametrize(("mode", "at"), [(torch.no_grad, "x"), (torch.inference_mode, "j")])
def test_slopes_are_the_same_without_gradients_around_them(mode, at):
    net = make_net(observe=bt.tpm.Categorical(3))
    query = {"at": at, "metric": {"y_2": (0, 1)}, "method": bt.Gradient()}
    with mode():
        result = bt.sweep(*make_sentences(net), **query)
    assert result.effects.equal(bt.sweep(*make_sentences(net), **query).effects)
    assert result.values.abs().max() > 0


def test_parameters_are_as_they_were():
    net = make_net(observe=bt.tpm.Categorical(3))
    clean, corrupt = make_sentences(net)
    before = {name: (value.requires_grad, value.grad) for name, value in net.parameters.items()}
    bt.sweep(clean, corrupt, metric=lambda x_2_0, y_2: nonlinear(x_2_0, y_2), method=bt.Gradient())
    assert {name: (value.requires_grad, value.grad) for name, value in net.parameters.items()} == before
    assert net.network.dtype == D


# arrows and paths

RECURRENT_ARROWS = {("recurrent", "x -> h")}  # the arrow ends in a group that is computed word by word


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (k % 3 > 0)) for k, name in enumerate(ARROWS)]
)
def test_a_small_change_along_an_arrow_has_the_first_order_effect(name):
    """The derivative along the arrows only, with all other parents of the nodes of the run."""
    _, corrupt = make_pair(get_case(name))
    query, largest = {"metric": make_metric(get_outputs(corrupt))}, 0.0
    for item in (*ARROWS[name], *PATHS.get(name, ())):
        clean = add_noise(corrupt, [item.split(" -> ")[0]])
        if item.startswith("token") or (name, item) in RECURRENT_ARROWS:
            with pytest.raises(bt.BNetError, match="method"):
                bt.sweep(clean, corrupt, at=item, method=bt.Gradient(), **query)
            continue
        result = bt.sweep(clean, corrupt, at=item, **query)
        largest = max(largest, check_effects(bt.sweep(clean, corrupt, at=item, method=bt.Gradient(), **query), result))
    assert largest > NOISE_SCALE / 1000


@pytest.mark.slow
def test_joined_arrows_and_a_list_add_their_first_order_effects():
    clean, corrupt = make_examples(make_net(observe=bt.tpm.Categorical(3)), 3)
    query = {"metric": {"y_2": (0, 1)}, "method": bt.Gradient()}
    single = bt.sweep(clean, corrupt, at="v -> a", **query)
    result = bt.sweep(clean, corrupt, at=["v -> a", "x", "j", "x -> q -> a"], over=("slice", "head"), **query)
    close(result.part("v -> a").effects, single.effects.sum((2, 3)))
    close(result.part("j").effects, bt.sweep(clean, corrupt, at="j", **query).effects.sum(2))
    close(result.part("x -> q -> a").effects, bt.sweep(clean, corrupt, at="x -> q -> a", **query).effects)
    close(bt.sweep(clean, corrupt, at="v -> a", memory=1, **query).effects, single.effects)
    children = bt.sweep(clean, corrupt, at=["x -> v", "x -> k", "x -> q", "x -> x"], over=("slice",), **query)
    nodes = bt.sweep(clean, corrupt, at="x", over=("slice",), **query)
    close(sum(children.part(item).effects for item in children.parts)[:2], nodes.effects[:2])


# directions and integrated gradients


def differentiate(run, names, delta, at, query, step=1e-4):
    """The derivative of the metric when some nodes of a run move by `delta`, by central differences of exact sweeps."""
    sides = [run.do({name: run[name] + t * delta[name] for name in names}) for t in (step, -step)]
    up, down = (bt.sweep(side, run, at=[at], **query).effects[0, 0] for side in sides)
    return (up - down) / (2 * step)


INPUTS = {"concat": "x_0", "vanilla decoder, causal": "embed", "gated": "x_0"}  # the nodes that are interpolated


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("name", INPUTS)
def test_gradients_are_those_of_the_base_run_or_of_interpolated_runs(name, direction):
    """With `direction="noise"` the gradient at the clean run times corrupt - clean, as EAP defines it."""
    clean, corrupt = make_pair(get_case(name))
    base, source = (corrupt, clean) if direction == "denoise" else (clean, corrupt)
    query = {"metric": make_metric(get_outputs(corrupt))}
    role = "a"
    nodes = [corrupt.ground.name(n) for n in corrupt.ground.select_nodes(corrupt.ground.template.by_stem[role][0])]
    arrow = next(item for item in ("v -> a", "x -> a") if name != "gated" or item == "v -> a")
    arrows = [*bt.sweep(clean, corrupt, at=arrow, **query).names.values()]
    for steps in (0, 3):
        options = {"method": bt.Gradient(steps=steps), "direction": direction}
        result = bt.sweep(clean, corrupt, at=[nodes[-1], arrows[-1]], **options, **query)
        fractions = [(k + 0.5) / steps for k in range(steps)] or [0.0]
        inputs = [n for n in corrupt.ground.names if n.rpartition("_")[0] == INPUTS[name]]
        for cell in (nodes[-1], arrows[-1]):
            first, slopes = cell.split(" -> ")[0], []
            for fraction in fractions:
                run = base.do({n: base[n] + fraction * (source[n] - base[n]) for n in inputs}) if steps else base
                slopes.append(differentiate(run, [first], {first: source[first] - base[first]}, cell, query))
            expected = sum(slopes) / len(slopes)
            assert abs(float(result[cell] - expected)) < 1e-6 * max(1.0, abs(float(expected)))
        close(result.base, result.clean if direction == "noise" else result.corrupt)


def find_interpolated(s):
    """The nodes with real values at which differences of the inputs begin."""
    specs, names = s.net.network.specs, []
    for spec in specs:
        if spec.tpm.kind != "input":
            continue
        children = {edge.child for edge in s.ground.template.out_edges[spec.group.index]}
        groups = [specs[index] for index in children] if spec.tpm.is_index_valued else [spec]
        for member in groups:
            if member.tpm.kind in ("input", "deterministic") and not member.tpm.is_index_valued:
                names += [s.ground.name(node) for node in s.ground.select_nodes(member.group).tolist()]
    return list(dict.fromkeys(names))


# Latent choices that depend on values, or that no difference of an input reaches.
WITHOUT_RUNS = {"word", "marginal", "hidden Markov", "windowed selectors", "backward chain", "experts", "tagger"}
WITHOUT_RUNS |= {"word, codebook", "word, two slices", "codebook, two slices", "factorial chains"}
INTEGRATED = [case.name for case in CASES_WITH_WORDS if case.name not in WITHOUT_RUNS]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (k % 12 > 0)) for k, name in enumerate(INTEGRATED)]
)
def test_integrated_gradients_of_the_inputs_sum_to_the_total_effect(name):
    """Completeness, up to the error of the midpoint rule."""
    clean, corrupt = make_pair(get_case(name))
    query = {"at": find_interpolated(corrupt), "metric": make_metric(get_outputs(corrupt))}
    result = bt.sweep(clean, corrupt, method=bt.Gradient(steps=64), **query)
    scale = max(float(result.total.abs().max()), float(result.effects.abs().max()))
    assert float((result.effects.sum(0) - result.total).abs().max()) < 0.05 * scale


@pytest.mark.slow
def test_interpolation_of_several_examples_with_set_nodes_and_aligned_words():
    net = make_net(observe=bt.tpm.Categorical(3))
    clean, corrupt = make_examples(net, 3)
    query = {"at": "a", "metric": {"y_2": (0, 1)}, "method": bt.Gradient(steps=4)}
    result = bt.sweep(clean, corrupt, **query)
    close(bt.sweep(clean, corrupt, memory=1, **query).effects, result.effects)
    per_example = [bt.sweep(a, b, **query) for a, b in zip(clean, corrupt, strict=True)]
    close(torch.cat([one.effects for one in per_example], -1), result.effects)
    one = corrupt[0]
    treated = one.do(x_1_1=one["x_1_1"] + 1)  # the difference begins at x_1_1
    effect = bt.sweep(treated, one, **query | {"at": ["x_1_1"], "method": bt.Gradient(steps=32)})
    close(effect.effects[0], effect.total, 1e-3)
    both = [s.do(x_0_0=torch.ones(4, dtype=D)) for s in (clean[0], one)]
    assert float(bt.sweep(*both, **query | {"at": ["x_0_0"]}).effects.abs().max()) == 0
    aligned = bt.sweep(one, one, words={0: 2, 2: 0}, **query)
    assert float(aligned.effects.nan_to_num().abs().max()) > 0 and aligned.positions == result.positions
    select = make_net(combine="select", observe=bt.tpm.Categorical(3))
    pair = make_sentences(select)
    states = [
        bt.sweep(*(s.do(c=c) for s in pair), **query | {"at": "x", "metric": lambda x_2_2: x_2_2[:, 0]}) for c in (0, 1)
    ]
    mean = bt.sweep(*pair, **query | {"at": "x", "metric": lambda x_2_2: x_2_2[:, 0]})
    weights = pair[1].posterior("c")
    close(mean.effects, weights[0] * states[0].effects + weights[1] * states[1].effects)


@pytest.mark.parametrize("at", ["x", "a", "v -> a", "v -> a -> mix", "edges", ["x_1_2", "q_*_*_2 -> a_*_*_2"]])
@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_the_estimate_is_the_derivative_with_respect_to_the_strength(at, direction):
    """Of what a value becomes: a function, with the strength s between the value v and f(v), and zeros."""
    net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "cat", "dog", "sat"], norm="pre").to(D)
    s, strength = net.sentence("the cat sat dog"), 1e-5
    query = {"at": at, "metric": {"y_3": ("cat", "dog")}, "direction": direction}

    def run(intervention, **options):
        sides = (intervention, s) if direction == "denoise" else (s, intervention)
        return bt.sweep(*sides, **query, **options).effects

    for function in (torch.tanh, torch.zeros_like):
        exact = run(lambda v, f=function: v + strength * (f(v) - v)) / strength
        estimates = run(function, method=bt.Gradient())
        torch.testing.assert_close(estimates, exact, rtol=1e-3, atol=1e-6, equal_nan=True)
        assert estimates.nan_to_num().abs().max() > 1e-3
    close(run(Zero(), method=bt.Gradient()).nan_to_num(), estimates.nan_to_num())


@pytest.mark.parametrize("rule", ["midpoint", "left", "activations"])
def test_both_directions_average_the_gradient_over_the_same_runs(rule):
    """All rules go from the corrupt to the clean run, so only the sign of the differences depends on the direction."""
    clean, corrupt = make_decoder_pairs(D)
    query = {"at": "edges", "metric": {"y_2": "sat"}, "method": bt.Gradient(steps=3, rule=rule)}
    denoise, noise = (bt.sweep(clean, corrupt, direction=direction, **query) for direction in ("denoise", "noise"))
    if rule == "activations":  # the other groups of writers have their values of the run that is patched
        swapped = bt.sweep(corrupt, clean, direction="noise", **query)
        assert (swapped.effects - denoise.effects).abs().max() > 1e-6
    else:
        close(denoise.effects, -noise.effects)
    assert noise.effects.abs().max() > 0.01


def test_methods_are_checked():
    for options in ({"steps": -1}, {"check": 1.5}, {"seed": -1}, {"rule": "right", "steps": 2}, {"rule": "left"}):
        with pytest.raises(bt.BNetError, match=next(iter(options))):
            bt.Gradient(**options)


# calibration


def test_a_check_runs_some_cells():
    clean, corrupt = make_examples(make_net(observe=bt.tpm.Categorical(3)), 4)
    query = {"at": ["a", "v -> a"], "metric": {"y_2": (0, 1)}}
    exact = bt.sweep(clean, corrupt, **query)
    result = bt.sweep(clean, corrupt, method=bt.Gradient(check=9), **query)
    check = result.calibration
    assert len({*check.names}) == 9 and {*check.names} <= {*result.names.values()}
    for k, name in enumerate(check.names):
        close(check.exact[k], exact.effects[exact.index_of(name)])
        close(check.estimates[k], result.effects[result.index_of(name)])
    frame = check.to_dataframe()
    line = np.polyfit(frame["estimate"], frame["exact"], 1)
    assert check.slope == pytest.approx(line[0]) and check.largest_error == pytest.approx(frame["error"].abs().max())
    assert check.correlation == pytest.approx(frame["estimate"].corr(frame["exact"]))
    assert check.sign_agreement == (np.sign(frame["estimate"]) == np.sign(frame["exact"])).mean()
    again, other = (bt.sweep(clean, corrupt, method=bt.Gradient(check=9, seed=k), **query).calibration for k in (0, 1))
    assert again.names == check.names != other.names
    assert "checked 9 cells" in repr(result) and "slope" in repr(check)
    complete = bt.sweep(clean, corrupt, at="a", metric={"y_2": 1}, method=bt.Gradient(check=10**6))
    assert len(complete.calibration.names) == len(complete.names)


def test_estimates_of_a_linear_net_are_exact():
    """With a metric that is linear too; one cell has no slope and no correlation."""
    clean, corrupt = make_examples(make_linear_net())
    weights = torch.tensor([0.5, -1.0, 0.25, 2.0], dtype=D)
    query = {"metric": lambda pool: pool @ weights, "method": bt.Gradient(check=20)}
    for options in ({}, {"method": bt.Gradient(steps=3, check=20)}, {"direction": "noise"}):
        check = bt.sweep(clean, corrupt, at=["x", "v -> a", "x -> v -> a"], **query | options).calibration
        assert check.slope == pytest.approx(1) and check.correlation == pytest.approx(1)
        assert check.largest_error < 1e-10 and check.sign_agreement == 1
    single = bt.sweep(clean, corrupt, at=["x_0_0"], **query).calibration
    assert single.slope is None and single.correlation is None and "slope" not in repr(single)


def build_divergences(clean):
    """Metrics with their minimum at the clean run, whose outcomes are computed one sentence at a time."""
    logs = torch.stack([s.tpm("y_2").logits.log_softmax(-1) for s in clean]).detach()
    return {
        "KL": lambda y_2: torch.nn.functional.kl_div(y_2, logs, log_target=True, reduction="none").sum(-1),
        "squared": lambda y_2: (y_2 - logs).square().sum(-1),
        "entropy": lambda y_2: -(y_2.exp() * logs).sum(-1),  # no minimum: its gradient is not zero
    }


def make_decoder_pairs(dtype, scale=1.0):
    """Two pairs of sentences of a decoder whose readout is scaled."""
    net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "cat", "dog", "sat", "ran"], norm="pre")
    scaled = {name: value * scale if name == "norm.gain" else value for name, value in net.parameters.items()}
    net = bt.BNet(net.network.with_parameters(scaled).to(dtype))
    texts = ["the cat sat", "the dog ran"], ["the dog sat", "the cat ran"]
    return [[net.sentence(text) for text in side] for side in texts]


METHODS = "exact", bt.Gradient()
CELLS = ["a", "x", "j", "edges", "v -> a"]


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_a_gradient_of_zero_is_an_error(dtype, scale):
    """A divergence from the clean run has its minimum there: the derivative of each cell is exactly zero."""
    clean, corrupt = make_decoder_pairs(dtype, scale)
    metrics = build_divergences(clean)
    for at in CELLS:
        options = {"at": at, "direction": "noise", "method": bt.Gradient()}
        for name in ("KL", "squared"):
            with pytest.raises(bt.BNetError, match="steps="):
                bt.sweep(clean, corrupt, metric=metrics[name], **options)
        for metric in (metrics["entropy"], {"y_2": "sat"}):
            assert bt.sweep(clean, corrupt, metric=metric, **options).effects.nan_to_num().abs().max() > 1e-9
        denoised = bt.sweep(clean, corrupt, at=at, metric=metrics["KL"], method=bt.Gradient())
        assert denoised.effects.nan_to_num().abs().max() > 1e-4 and not denoised.notes
    one = {"metric": metrics["KL"], "direction": "noise"}
    with pytest.raises(bt.BNetError, match="steps="):  # its only points are the clean run
        bt.sweep(clean, corrupt, at="edges", method=bt.Gradient(steps=1, rule="activations"), **one)
    for at in ("x", "edges"):
        result = bt.sweep(clean, corrupt, at=at, method=bt.Gradient(steps=1), **one)
        assert result.effects.nan_to_num().abs().max() > 1e-4


def test_a_gradient_of_zero_in_some_examples_is_a_note():
    clean, corrupt = make_decoder_pairs(torch.float32)
    kl = build_divergences([clean[0], corrupt[1]])["KL"]
    result = bt.sweep(clean, corrupt, at="a", metric=kl, direction="noise", method=bt.Gradient())
    assert any("1 of 2 examples" in note for note in result.notes) and "1 of 2" in repr(result)
    assert result.effects[..., 0].abs().max() < 1e-6 < 1e-3 < result.effects[..., 1].abs().max()


@pytest.mark.parametrize("at", CELLS)
def test_a_metric_that_no_cell_changes_has_effects_of_zero_with_a_note(at):
    """Word 0 of a decoder does not depend on the words that differ, and an accuracy is piecewise constant."""
    clean, corrupt = make_decoder_pairs(D)
    accuracy = lambda y_2: (y_2.argmax(-1) >= 0).double()  # noqa: E731
    for metric, methods in (({"y_0": "cat"}, METHODS), (accuracy, ("exact",))):
        for method in methods:
            result = bt.sweep(clean, corrupt, at=at, metric=metric, method=method)
            assert result.effects.nan_to_num().abs().max() < 1e-14
            assert any("no cell changes" in note for note in result.notes)
    assert not bt.sweep(clean, corrupt, at=at, metric={"y_2": "sat"}).notes


def cast_pairs(pairs, dtype):
    """The same sentences in the same net with weights of another type."""
    net = pairs[0][0].net.to(dtype)
    return [[net.sentence(s.words) for s in side] for side in pairs]


HALF_TOLERANCE = {torch.bfloat16: 0.2, torch.float16: 0.02}


@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_effects_in_half_precision_are_those_of_the_same_weights_in_float64(dtype, method):
    """Rounding in half precision is no reason to report a gradient or an effect as zero."""
    half = cast_pairs(make_decoder_pairs(torch.float32), dtype)
    exact = cast_pairs(half, D)
    for at in ("x", "edges", ["x_1_2"]):
        options = {"at": at, "metric": {"y_2": "cat"}, "method": method}
        result, oracle = (bt.sweep(*pair, **options) for pair in (half, exact))
        scale = float(oracle.effects.nan_to_num().abs().max())
        close(result.effects, oracle.effects, HALF_TOLERANCE[dtype] * scale)
        assert not result.notes and scale > 0.1


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_notes_do_not_depend_on_the_unit_of_the_metric(method):
    """Effects are linear in the metric: a factor that is a power of two changes no digit."""
    clean, corrupt = make_decoder_pairs(torch.float32)
    kl = build_divergences(clean)["KL"]
    for metric in (kl, lambda y_2: y_2[:, 1].exp()):
        one, small = (
            bt.sweep(clean, corrupt, metric=lambda y_2, f=f, m=metric: f * m(y_2), method=method)
            for f in (1.0, 2.0**-40)
        )
        torch.testing.assert_close(small.effects, one.effects * 2.0**-40, rtol=0, atol=0)
        assert small.notes == one.notes == () and one.effects.abs().max() > 1e-3


def test_the_gradient_of_improbable_states_is_not_zero():
    """Log probabilities of -1e6 have errors of 1, on which the gradient of their difference does not depend."""
    clean, corrupt = make_decoder_pairs(torch.float32, 1e6)
    logs = corrupt[0].tpm("y_2").logits.log_softmax(-1)
    first, second = logs.argsort()[:2].tolist()
    query = {"metric": {"y_2": (first, second)}, "method": bt.Gradient(), "at": ["x_2_2"]}
    pair = clean[:1], corrupt[:1]
    result, exact = (bt.sweep(*sides, **query) for sides in (pair, cast_pairs(pair, D)))
    assert logs[second] < -1e5 and not result.notes
    close(result.effects / exact.effects, torch.ones_like(exact.effects), 1e-3)


@pytest.mark.parametrize(("steps", "at"), [(0, "x"), (8, "x"), (2, "edges")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, D])
def test_a_piecewise_constant_metric_is_an_error_only_if_it_differs_between_the_runs(steps, at, dtype):
    clean, corrupt = make_decoder_pairs(dtype)
    query = {"at": at, "method": bt.Gradient(steps=steps)}
    result = bt.sweep(clean, corrupt, metric=lambda y_2: y_2[:, 0] * 0 + 1, **query)
    assert bool((result.effects.nan_to_num() == 0).all())
    assert any("no cell changes" in note for note in result.notes)
    threshold = float(torch.stack([s.tpm("y_2").logits.log_softmax(-1)[0] for s in (clean[0], corrupt[0])]).mean())
    step = lambda y_2: y_2[:, 0] * 0 + (y_2[:, 0] > threshold)  # noqa: E731
    with pytest.raises(bt.BNetError, match="gradient of zero") as caught:
        bt.sweep(clean, corrupt, metric=step, **query)
    assert ("steps=8" in str(caught.value)) == (steps != 8)  # no advice to repeat the same call

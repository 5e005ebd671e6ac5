"""Second-order fits: products with curvature equal dense matrices, EM never decreases, results are maxima."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch.distributions import Independent, Laplace

import bnet_transformer as bt
from bnet_transformer._core.distributed import SINGLE_PROCESS
from bnet_transformer.data import Batch, read_batch
from bnet_transformer.data.batch import infer_fit_task
from bnet_transformer.learning.fit.curvature import (
    EMExpansion,
    FlatLayout,
    QuadraticModel,
    factorize_blocks,
    find_groups,
    solve_model,
)
from bnet_transformer.learning.fit.diagnostics import SCALE_FACTOR, describe_data_scale
from bnet_transformer.learning.fit.em import SecondOrderOptimizer, improve_by_moves
from bnet_transformer.learning.fit.objective import FitObjective, FitProblem, select_learnable
from bnet_transformer.learning.fit.restarts import init_restarts
from bnet_transformer.tpm import TPM, Categorical, Normal
from tests.cases import CASES, batch_evidence, batch_inputs, get_case

D = torch.float64


@dataclass(frozen=True)
class LaplaceNode(TPM):
    """A vector with independent Laplace noise around its parent: a distribution of a user."""

    slots: ClassVar[tuple[str, ...]] = ("x",)
    kind: ClassVar[str] = "continuous"

    def shape(self, *parents):
        return parents[0].shape

    def distribution(self, context, *parents):
        return Independent(Laplace(parents[0], 0.5), 1)


def make_net(observe=None, per="sentence", heads=3, **options):
    observe = Normal(0.7) if observe is None else observe
    return bt.bayesuvius(2, heads=heads, per=per, observe=observe, seed=3, **options).to(D)


def draw(net, sentences, words=4, seed=0):
    """Sentences of a net whose heads are planted by the seed."""
    torch.manual_seed(seed)
    weights = {k: 1.2 * torch.randn_like(v) for k, v in net.parameters.items() if k.startswith("W_")}
    planted = net.replace(weights)
    x = torch.randn(sentences, words, 2, dtype=D)
    y = planted.pyro(parameters="own")(x)["y"]
    return planted, (x, y.reshape(sentences, words, -1).squeeze(-1))


def make_problem(net, data, spread=1.0):
    learned = select_learnable(net.network, infer_fit_task(net.network).readouts, None, spread)
    return FitProblem(FitObjective(net.network, learned, 2**16), read_batch(net.network, data), None, None, 0)


def make_sets(problem, count):
    objective = problem.objective
    return init_restarts(objective.network, objective.learned.names, count, 1, torch.device("cpu")).values


NETS = {
    "sentence": lambda: make_net(),
    "word": lambda: make_net(per="word"),
    "categorical": lambda: make_net(Categorical(3)),
    "learned sigma": lambda: make_net(Normal(0.7, learnable=True)),
    "slices": lambda: make_net(slices=2, heads=2),
}


@pytest.mark.parametrize("case", NETS)
def test_products_are_those_of_the_gauss_newton_matrix(case):
    """The gradient is that of the log posterior density; the matrix is symmetric, and at least that of the prior."""
    net = NETS[case]()
    _, data = draw(net, 3, words=2)
    problem = make_problem(net, data)
    sets = make_sets(problem, 2)
    model = EMExpansion(problem.objective, [problem.corpus], SINGLE_PROCESS)(sets).model
    objective, layout, size = problem.objective, model.layout, model.gradient.shape[1]
    leaves = {name: value.clone().requires_grad_() for name, value in sets.items()}
    density = objective.log_evidences(leaves, problem.corpus).sum() + objective.log_prior(leaves).sum()
    gradient = torch.autograd.grad(density, [leaves[name] for name in layout.shapes])
    torch.testing.assert_close(layout.flatten(dict(zip(layout.shapes, gradient, strict=True))), model.gradient)
    H = torch.stack([model.product(torch.eye(size, dtype=D)[k].expand(2, size)) for k in range(size)], 2)
    torch.testing.assert_close(H, H.mT)
    assert float(torch.linalg.eigvalsh(H).min()) > 0.99  # the prior adds 1


@pytest.mark.parametrize("case", NETS)
def test_blocks_are_those_of_the_gauss_newton_matrix(case):
    """Nothing is between the blocks of different heads; what is between those and shared weights is omitted."""
    net = NETS[case]()
    problem = make_problem(net, draw(net, 3, words=2)[1])
    sets = make_sets(problem, 2)
    expansion = EMExpansion(problem.objective, [problem.corpus], SINGLE_PROCESS)
    model = expansion(sets).model
    size = model.gradient.shape[1]
    H = torch.stack([model.product(torch.eye(size, dtype=D)[k].expand(2, size)) for k in range(size)], 2)
    groups = find_groups(net.network, model.layout)
    blocks = expansion.compute_blocks(sets, groups, 1.0)
    total = torch.zeros_like(H)
    for group, matrix in zip(groups, blocks, strict=True):
        for k, index in enumerate(group.index):
            total[:, index[:, None], index] = matrix[:, k]
    is_shared = torch.ones(size, dtype=torch.bool)
    for group in groups:
        is_shared[group.index] &= group.selector is None
    H[:, is_shared[:, None] != is_shared] = 0.0
    torch.testing.assert_close(total, H)
    pairs = [(group.index, matrix) for group, matrix in zip(groups, blocks, strict=True)]
    solve = factorize_blocks(pairs, torch.ones(2, size, dtype=D), torch.zeros(2, dtype=D))
    torch.testing.assert_close(solve(model.gradient), torch.linalg.solve(H, model.gradient), rtol=1e-4, atol=1e-5)


def test_the_matrix_of_a_mixture_is_that_of_the_equations():
    """With observed heads the matrix is the sum of J^T J / sigma^2 of the means, with J by finite differences."""
    net, sigma = make_net(), 0.7
    planted, (x, y) = draw(net, 5)
    problem = make_problem(planted, (x, y))
    sets = {name: planted.parameters[name][None] for name in problem.objective.learned.names}
    model = EMExpansion(problem.objective, [problem.corpus], SINGLE_PROCESS)(sets).model
    r = bt.fit(planted, (x, y), method=bt.MAP(steps=1, rate=1e-12), progress=False).responsibilities((x, y))

    def means(flat):
        W = {name: value[0] for name, value in model.layout.unflatten(flat[None]).items()}
        q, k, v = (W[f"W_{role}_0.values"] for role in "qkv")
        scores = torch.einsum("sid,cad,cae,sje->scij", x, q, k, x)
        mean = torch.einsum("scij,cde,sje->scid", scores.softmax(-1), v, x)
        return (r.sqrt()[..., None, None] * mean / sigma).flatten()

    J = torch.autograd.functional.jacobian(means, model.layout.flatten(sets)[0])
    size = J.shape[1]
    H = torch.cat([model.product(torch.eye(size, dtype=D)[k][None]) for k in range(size)])
    torch.testing.assert_close(H, J.mT @ J + torch.eye(size, dtype=D))


def test_conjugate_gradients_solve_the_model_and_report_negative_curvature():
    torch.manual_seed(0)
    A = torch.randn(2, 6, 6, dtype=D)
    H = A @ A.mT + 0.1 * torch.eye(6, dtype=D)
    H[1, 0, 0] -= 50.0  # the second is indefinite
    g = torch.randn(2, 6, dtype=D)
    layout = FlatLayout({"a": torch.Size([2]), "b": torch.Size([4])})
    model = QuadraticModel(layout, g, lambda v: torch.einsum("rij,rj->ri", H, v))
    step = solve_model(model, torch.ones(2, 6, dtype=D), torch.zeros(2, dtype=D), 50, 1e-12)
    torch.testing.assert_close(step.step[0], torch.linalg.solve(H[0], g[0]), atol=1e-8, rtol=1e-8)
    assert float(step.gain[0]) == pytest.approx(float(g[0] @ torch.linalg.solve(H[0], g[0])) / 2)
    assert step.has_ascent.tolist() == [False, True] and float(g[1] @ step.step[1]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sentence", "word", "categorical", "learned sigma"])
def test_em_never_decreases_the_density(case):
    net = NETS[case]()
    problem = make_problem(net, draw(net, 20)[1])
    optimizer = SecondOrderOptimizer(problem, 8, 3)
    densities = [optimizer.em_step() for _ in range(8)]
    gains = torch.stack(densities).diff(dim=0)
    assert bool((gains >= -1e-9 * densities[0].abs()).all()) and bool((gains.sum(0) > 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("method", [bt.MAP(restarts=2), bt.EM(restarts=2)])
def test_a_fit_is_a_maximum(method):
    """Oracle: the dense Hessian and gradient by autograd, in the weights and the log ratios of the table."""
    net = make_net(heads=2, prior=2.0)
    _, data = draw(net, 60)
    f = bt.fit(net, data, method=method, spread=1.0, progress=False)
    assert f.converged and f.finished and "converged" in f.caption
    problem = make_problem(net, data)
    names = problem.objective.learned.names
    values = {name: f.net.parameters[name][None] for name in names}
    layout = FlatLayout.create(values, names)

    def density(flat):
        sets = {**values, **layout.unflatten(flat[None])}
        total = problem.objective.log_evidences(sets, problem.corpus).sum() + problem.objective.log_prior(sets).sum()
        return total

    point = layout.flatten(values)[0]
    g = torch.autograd.functional.jacobian(density, point)
    curvature, axes = torch.linalg.eigh(-torch.autograd.functional.hessian(density, point))
    is_gauge = curvature.abs() < 1e-3  # one rotation of each head, and the constant of the logits
    assert int(is_gauge.sum()) == 3 and float(curvature[~is_gauge].min()) > 0
    assert float(((axes.mT @ g)[~is_gauge].square() / curvature[~is_gauge]).sum().sqrt()) < 2e-3
    assert f.bounds[-1] == max(f.bounds)


@pytest.mark.slow
def test_moves_leave_a_local_maximum():
    """Two heads that are equal at the start stay equal in EM; a move separates them."""
    net = make_net()
    planted, data = draw(net, 120, words=6, seed=2)
    equal = {k: v[[0, 1, 1]] for k, v in planted.parameters.items() if k.startswith("W_")}
    problem = make_problem(net.replace(equal), data)
    optimizer = SecondOrderOptimizer(problem, 15)
    optimizer.is_started = True
    for _ in range(15):
        optimizer.em_step()
    before = float(optimizer.compute_log_density(optimizer.sets.values)[0])
    best = improve_by_moves(optimizer, optimizer.sets.get(0), 2, lambda: False)
    after = float(optimizer.compute_log_density({name: value[None] for name, value in best.items()})[0])
    truth = {name: planted.parameters[name][None] for name in best}
    assert after > before + 5 and after > float(optimizer.compute_log_density(truth)[0])


@pytest.mark.slow
def test_a_saddle_point_is_left():
    """Where W_q and W_k are 0, the gradient by both is 0."""
    planted, data = draw(make_net(heads=1), 100)
    zero = planted.replace(
        {name: torch.zeros_like(planted.parameters[name]) for name in ("W_q_0.values", "W_k_0.values")}
    )
    fits = [bt.fit(net, data, method=bt.EM(restarts=1), spread=1.0, progress=False) for net in (planted, zero)]
    assert fits[1].converged and fits[1].bounds[-1] > fits[0].bounds[-1] - 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_restart_that_is_dropped_cannot_win(seed):
    """Its steps, continued without the others, end below its bound, and not above the density of the search."""
    _, data = draw(make_net(), 80, seed=seed)
    optimizer = SecondOrderOptimizer(make_problem(make_net(), data), 40, 4)
    before = {}
    while optimizer.step < 40 and not optimizer.is_finished:
        before |= {k: optimizer.sets.get(row) for row, k in enumerate(optimizer.sets.restart_ids)}
        optimizer.compute(False, False)
        optimizer.update()
    for restart in {*optimizer.done} - optimizer.stationary:
        only = optimizer.fork({name: value[None] for name, value in before[restart].items()})
        while only.step < 100 and not only.is_finished:
            only.update()
        assert max(only.log_density.values()) < optimizer.done[restart] + 0.5
        assert max(only.log_density.values()) < optimizer.reached + 0.5


@pytest.mark.slow
def test_what_second_order_steps_do_not_cover_takes_first_order_steps_and_says_so():
    net = bt.bayesuvius(2, heads=2, observe=LaplaceNode())
    x = torch.randn(10, 3, 2)
    f = bt.fit(net, (x, x), method="map", progress=False)
    assert "first-order" in f.notes[0] and "Laplace" in f.notes[0] and f.converged is None
    with pytest.raises(bt.BNetError, match="first-order"):
        bt.fit(net, (x, x), method=bt.MAP(optimizer="second-order"))
    with pytest.raises(bt.BNetError, match="rate"):
        bt.MAP(optimizer="second-order", rate=0.1)


def test_a_fit_that_has_not_converged_says_so(tmp_path):
    net = make_net()
    f = bt.fit(net, draw(net, 20)[1], method=bt.EM(restarts=2, steps=1), spread=1.0, progress=False)
    assert f.finished and f.converged is False and "stationary" in f.notes[0]
    f.save(tmp_path / "f.fit")
    loaded = bt.load(tmp_path / "f.fit")
    assert (loaded.converged, loaded.notes) == (f.converged, f.notes)


@pytest.mark.slow
def test_notes_name_heads_that_coincide_and_weights_beyond_their_prior():
    net = make_net(heads=2)
    x = torch.randn(40, 4, 2, dtype=D)
    f = bt.fit(net, (x, 100 * x), method=bt.EM(steps=4), spread=1.0, progress=False)
    assert any("standard deviations" in note for note in f.notes)
    f = bt.fit(net, (x[:3], x[:3]), method=bt.EM(steps=4), spread=1.0, progress=False)
    assert any("3, is below" in note for note in f.notes)
    equal = net.replace({k: v[[0, 0]] for k, v in net.parameters.items() if v.dim()})
    f = bt.fit(equal, (x, x), method=bt.EM(steps=4, restarts=1), learn=["c.logits"], progress=False)
    assert any("coincide" in note for note in f.notes)


@pytest.mark.slow
def test_notes_of_a_fit_that_the_data_do_not_determine():
    """All words are 0, so all weights are 0; the free numbers are the weights and one share."""
    net, zero = make_net(heads=2), torch.zeros(20, 4, 2, dtype=D)
    f = bt.fit(net, (zero, draw(net, 20)[1][1]), method=bt.EM(steps=20), spread=1.0, progress=False)
    assert any("x_0 has mean 0" in note for note in f.notes) and any("coincide" in note for note in f.notes)
    assert any("20, is below that of the learned numbers, 25" in note for note in f.notes)
    first = bt.fit(net, (zero, zero), method=bt.EM(optimizer="first-order", steps=1), spread=1.0, progress=False)
    assert any("numbers, 25" in note for note in first.notes)


@pytest.mark.parametrize("method", [bt.MAP(optimizer="first-order", steps=2), bt.SVI(steps=2)], ids=["map", "svi"])
def test_the_first_note_names_data_on_another_scale_than_the_prior(method):
    net = bt.bayesuvius(2, heads=1, observe=Normal(0.3)).to(D)
    x = draw(net, 30)[1][0]
    for words, y, expected in ((x, x, ""), (x + 50, x, "x_0 has mean 50"), (x, 0 * x + 3, "y has mean 3")):
        first = [*bt.fit(net, (words, y), method=method, spread=1.0, progress=False).notes, ""][0]
        assert expected in first and ("standardise" in first) == bool(expected)


def test_the_scale_of_the_prior_is_that_of_its_formula():
    """Of a sentence of one word y = W_v x: E[y^2] = spread^2 |x|^2."""
    torch.manual_seed(0)
    net, x = bt.bayesuvius(3, heads=1, observe=Normal(0.01)).to(D), torch.randn(60, 1, 3, dtype=D)
    for spread in (0.5, 2.0):
        root_mean_square = spread * float(x.square().sum(-1).mean().sqrt())
        for factor, count in ((0.8, 0), (1.25, 1)):
            y = x * (factor * SCALE_FACTOR * root_mean_square / float(x.square().mean().sqrt()))
            problem = make_problem(net, (x, y), spread)
            assert len(describe_data_scale(problem.objective, problem.corpus)) == count


@pytest.mark.parametrize("name", [case.name for case in CASES if case.evidence])
def test_the_scale_of_observations_is_described_in_every_net(name):
    """Observations of each net are on its scale; real numbers that are a million times larger are not."""
    case = get_case(name)
    s, network = case.sentence.observe(case.evidence), case.net.network
    given, evidence = batch_inputs(s), batch_evidence(s)
    stacks = {key: network.get_spec(key).group.word_stack for key in given}
    x = {stack: given.pop(key) for key, stack in stacks.items() if stack is not None}
    specs = [network.get_spec(key) for key in evidence]
    objective = FitObjective(network, select_learnable(network, tuple(specs), None, 1.0), 2**16)
    real = [spec.group.name for spec in specs if isinstance(spec.tpm, Normal)]
    has_weights = any(key not in objective.learned.logits for key in objective.learned.weights)
    corpus = Batch(x, None, evidence, given).take(torch.zeros(10, dtype=torch.long))
    torch.manual_seed(0)
    noisy = {
        k: e.map(lambda v: v + torch.randn_like(v) if v.is_floating_point() else v) for k, e in corpus.evidence.items()
    }
    large = {k: e.map(lambda v: 1e6 * v if v.is_floating_point() else v) for k, e in noisy.items()}
    for observations, expected in ((noisy, []), (large, real if has_weights else [])):
        notes = describe_data_scale(objective, replace(corpus, evidence=observations))
        assert [key for key in real if any(f"{key} has mean" in note for note in notes)] == expected

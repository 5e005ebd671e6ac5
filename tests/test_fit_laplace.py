"""Coordinates with a fixed gauge, the Laplace approximation, importance weights."""

import math

import pytest
import torch
from scipy import stats

import bnet_transformer as bt
from bnet_transformer._core.stats import estimate_log_mean, resample, smooth_weights
from bnet_transformer.data import Batch, read_batch
from bnet_transformer.data.batch import infer_fit_task
from bnet_transformer.learning.fit.coordinates import Coordinates, GaugeBlock
from bnet_transformer.learning.fit.diagnostics import count_uninformed, describe_weighted, find_coincident_heads
from bnet_transformer.learning.fit.heads import find_selectors, interval
from bnet_transformer.learning.fit.identification import Gauge, find_gauges, find_unfixed
from bnet_transformer.learning.fit.laplace import (
    Approximation,
    Mode,
    Proposals,
    choose_approximation,
    compute_evidence,
    compute_log_student,
    find_head_symmetries,
    find_sign_symmetries,
    polish,
    share_weights,
)
from bnet_transformer.learning.fit.objective import FitObjective, select_learnable
from bnet_transformer.tpm import Categorical, Normal
from tests.cases import batch_evidence, batch_inputs, get_case, grouped

WEIGHTS = ["W_q_0.values", "W_k_0.values", "W_v_0.values"]
BLOCKS = [(2, 2, 3), (2, 3, 2), (3, 2, 2), (1, 2, 2), (3, 3, 1)]  # key_dim, columns of W_q and of W_k


def make_block(key_dim, queries, keys, groups=1, has_planes=False):
    return GaugeBlock(Gauge("x", ("q",), ("k",), 1, has_planes), groups, key_dim, (queries, keys))


def test_planes_of_rotary_positions_have_a_signed_normal_entry():
    block = make_block(2, 3, 3, groups=4000, has_planes=True)
    diagonal, _, _ = block.split(block.sample(torch.Generator().manual_seed(1), torch.float64))
    assert stats.kstest(diagonal[:, 0].exp(), stats.chi(2).cdf).pvalue > 1e-3
    assert stats.kstest(diagonal[:, 1], stats.norm.cdf).pvalue > 1e-3


def mixture(heads=2, sigma=0.5, dim=2, **options):
    return bt.bayesuvius(dim, heads=heads, observe=Normal(sigma), prior=1.0, seed=3, **options).to(torch.float64)


def draw_xy(net, sentences=12, words=2, seed=0, dim=2):
    torch.manual_seed(seed)
    x = torch.randn(sentences, words, dim).double()
    return x, net.pyro(parameters="own")(x)["y"].reshape(sentences, words, dim).detach()


def make_objective(net, learn=None, spread=1.0):
    learned = select_learnable(net.network, infer_fit_task(net.network).readouts, learn, spread)
    return FitObjective(net.network, learned, 2**16)


def fit(net, data, method, **options):
    return bt.fit(net, data, method=method, progress=False, **{"spread": 1.0, **options})


@pytest.mark.parametrize("sizes", BLOCKS)
def test_density_of_the_coordinates_is_that_of_the_matrices(sizes):
    """`p(W_q, W_k) |d(W_q, W_k) / d(z, Q, unused)| = p(z) p(Q) p(unused)`: the ratio does not depend on z."""
    key_dim, _, keys = sizes
    block, free = make_block(*sizes), key_dim * (key_dim - 1) // 2
    rows, columns = torch.triu_indices(key_dim, key_dim, 1)
    torch.manual_seed(0)

    def to_matrices(z, angles, unused):
        q, k = block.decode(z)
        skew = torch.zeros(key_dim, key_dim, dtype=z.dtype).index_put((rows, columns), angles)
        k = torch.cat([k[0, : block.rank], unused.reshape(-1, keys)])
        return torch.cat([(rotation := torch.linalg.matrix_exp(skew - skew.mT)) @ q[0], rotation @ k], 1).flatten()

    ratios = []
    for _ in range(4):
        z = torch.randn(block.size).double() * 0.7
        angles, unused = torch.zeros(free).double(), torch.randn((key_dim - block.rank) * keys).double()
        jacobian = torch.cat(torch.autograd.functional.jacobian(to_matrices, (z, angles, unused)), 1)
        assert jacobian.shape[0] == jacobian.shape[1]
        log_normal = lambda x: float(torch.distributions.Normal(0.0, 1.0).log_prob(x).sum())  # noqa: E731
        density = log_normal(to_matrices(z, angles, unused)) - log_normal(unused)
        ratios.append(density + float(torch.linalg.slogdet(jacobian).logabsdet) - float(block.log_prior(z)))
    torch.testing.assert_close(torch.tensor(ratios), torch.full((4,), ratios[0]))
    if key_dim == 2:  # the uniform density of the angle over one turn, of which det Q = 1 is all, or one half
        assert ratios[0] == pytest.approx(-math.log(2 * math.pi) if block.has_sign else -math.log(4 * math.pi))


@pytest.mark.parametrize("sizes", BLOCKS)
def test_the_prior_of_the_coordinates_is_bartletts(sizes):
    """The diagonal is chi, the other entries are Normal, and `T' Q'W_k` has the distribution of `W_q' W_k`."""
    key_dim, queries, keys = sizes
    block = make_block(*sizes, groups=4000)
    z = block.sample(torch.Generator().manual_seed(1), torch.float64)
    _, upper, rows = block.split(z)
    chi = torch.linalg.qr(block.decode(z)[0]).R.diagonal(dim1=-2, dim2=-1).abs()
    for i in range(block.rank):
        assert stats.kstest(chi[:, i], stats.chi(key_dim - i).cdf).pvalue > 1e-3
    for values in (upper, rows):
        assert values.numel() == 0 or stats.kstest(values.flatten(), stats.norm.cdf).pvalue > 1e-3
    q, k = block.decode(z)
    generator = torch.Generator().manual_seed(2)
    W_q = torch.randn(4000, key_dim, queries, generator=generator, dtype=torch.float64)
    W_k = torch.randn(4000, key_dim, keys, generator=generator, dtype=torch.float64)
    A, expected = q.mT @ k, W_q.mT @ W_k
    assert stats.ks_2samp(A[:, 0, 0], expected[:, 0, 0]).pvalue > 1e-3
    assert stats.ks_2samp(A.flatten(1).norm(dim=1), expected.flatten(1).norm(dim=1)).pvalue > 1e-3


@pytest.mark.parametrize("sizes", BLOCKS)
def test_straight_coordinates_separate_the_product_from_the_prior(sizes):
    """`A = W_q' W_k` depends on B and C only."""
    block, rank = make_block(*sizes), min(sizes[:2])
    torch.manual_seed(0)
    first, second = (block.straighten(torch.randn(block.size).double()) for _ in range(2))
    mixed = torch.cat([second[: rank * (rank + 1) // 2], first[rank * (rank + 1) // 2 :]])
    (q, k), (q_mixed, k_mixed) = (block.decode(block.bend(u)[0]) for u in (first, mixed))
    torch.testing.assert_close(q.mT @ k, q_mixed.mT @ k_mixed)
    assert not torch.allclose(q, q_mixed)


@pytest.mark.slow
def test_draws_of_laplace_predict_as_well_as_the_mode():
    """A Normal distribution in W_q and W_k leaves the ridge of equal A: its draws lost hundreds of nats."""
    net = mixture(sigma=0.3)
    data = draw_xy(net, 60, words=4)
    f = fit(net, data, bt.Laplace(draws=30, restarts=1))
    mode = {name: f.net.parameters[name] for name in f.learned}
    at_mode = float(make_objective(net).log_evidence(mode, read_batch(net.network, data)).sum())
    assert float(f.log_likelihoods.sum(-1).median()) > at_mode - 20


def test_directions_that_the_data_determine_are_counted_for_matrices_of_any_size():
    prior, share = torch.randn(2, 1000, 1, 6, 6, dtype=torch.float64), 0.6
    assert count_uninformed("A", prior[0], prior[1]) == {("A", 0): (36, 36)}
    assert not count_uninformed("A", share**0.5 * prior[0], prior[1])


NETS = {
    "heads": lambda: mixture(),
    "narrow keys": lambda: mixture(dim=3, key_dim=2),
    "wide keys": lambda: mixture(key_dim=4),
    "codebook": lambda: mixture(atoms=(2, 3, 2)),
    "words": lambda: mixture(per="word"),
    "words, codebook": lambda: mixture(per="word", atoms=2),
    "concat": lambda: mixture(combine="concat"),
    "marginal": lambda: mixture(attention="marginal"),
    "two slices": lambda: mixture(slices=2, per="slice"),
}


@pytest.mark.parametrize("name", NETS)
def test_coordinates_and_rotations_keep_the_model(name):
    net = NETS[name]()
    dim = 3 if name == "narrow keys" else 2
    data = torch.randn(4, 3, dim).double(), torch.randn(4, 3, dim).double()
    objective, corpus = make_objective(net, spread=1.3), read_batch(net.network, data)
    coordinates = Coordinates(objective, corpus)
    assert coordinates.blocks and not coordinates.unfixed
    values = {key: net.parameters[key].detach() for key in objective.learned.names}
    z = coordinates.encode(values)
    expected = objective.log_evidence(values, corpus)
    decoded = coordinates.decode(z)
    torch.testing.assert_close(coordinates.encode(decoded), z)
    torch.testing.assert_close(objective.log_evidence(decoded, corpus), expected)
    rotated = coordinates.rotate(decoded, torch.Generator().manual_seed(0))
    torch.testing.assert_close(objective.log_evidence(rotated, corpus), expected)
    assert not torch.allclose(rotated[coordinates.blocks[0].gauge.left[0]], values[coordinates.blocks[0].gauge.left[0]])
    torch.testing.assert_close(coordinates.encode(rotated).abs(), z.abs())  # up to the sign of the last row


GAUGES = {  # the number of gauges that are fixed, and of attention nodes whose gauge is not
    **{"slice": (4, 0), "codebook, two slices": (2, 0), "encoder, pre-norm": (4, 0), "two selectors": (2, 0)},
    **{"marginal": (2, 0), "bucketed": (4, 0), "backward chain": (1, 0), "positioned": (0, 2)},
    **{"grouped": (2, 2), "grouped, all features rotated": (4, 0)},
}


@pytest.mark.parametrize("name", GAUGES)
def test_gauges_of_the_table_of_nets(name):
    """Biases, codebooks, chains, W_o, groups of heads, rotary positions; those of some features are not fixed."""
    case = get_case(name.partition(",")[0] if "rotated" in name else name)
    network, evidence = case.net.network, batch_evidence(case.sentence.observe(case.evidence))
    if "rotated" in name:
        network = grouped(width=None).to(torch.float64).network
    (x,) = batch_inputs(case.sentence).values()
    corpus = Batch({"": x}, None, evidence)
    learned = select_learnable(network, tuple(network.get_spec(key) for key in evidence), None, 0.8)
    objective = FitObjective(network, learned, 2**16)
    coordinates = Coordinates(objective, corpus)
    assert (len(coordinates.blocks), len(coordinates.unfixed)) == GAUGES[name]
    values = {key: torch.randn_like(network.parameters[key]) for key in learned.names}
    z = coordinates.encode(values)
    decoded = coordinates.decode(z)
    torch.testing.assert_close(coordinates.encode(decoded), z)
    rotated = coordinates.rotate(decoded, torch.Generator().manual_seed(7))
    straight = coordinates.straighten(z)
    bent, log_det = coordinates.bend(straight)
    torch.testing.assert_close(bent, z)
    jacobian = torch.autograd.functional.jacobian(lambda u: coordinates.bend(u)[0], straight)
    torch.testing.assert_close(torch.linalg.slogdet(jacobian).logabsdet, log_det)
    for other in (decoded, rotated, *map(coordinates.decode, coordinates.mirrors(z))):
        torch.testing.assert_close(objective.log_evidence(other, corpus), objective.log_evidence(values, corpus))
    changed = [key for key in values if not torch.allclose(rotated[key], values[key])]
    assert {*changed} - {*learned.tables} == {key for block in coordinates.blocks for key in block.gauge.names}


def test_gauges_of_biases_rotary_positions_and_shared_queries():
    first, output, *_ = find_gauges(get_case("encoder, post-norm").net.network)
    assert first.left == ("W_q_0.value", "q_0.bias") and first.shared == 1
    assert output.left == ("W_v_0.value", "v_0.bias") and output.right == ("W_o_0.value",) and output.shared == 1
    mixed, readout = find_gauges(get_case("two selectors").net.network)
    assert readout.names == ("W_v_0.values", "y.weight") and not readout.shared
    assert not mixed.shared  # queries of selector c and keys of codebook d occur in all pairs
    rotary = get_case("chapter").net.network
    assert find_gauges(rotary) and not find_unfixed(rotary, ())
    positioned = get_case("positioned").net.network
    assert not find_gauges(positioned)
    partial = grouped().network
    samples = {name: partial.parameters[name][None, None] for name in ("W_q_0.value", "W_k_0.value")}
    samples |= {name: partial.parameters[name][None, None] for name in ("q_0.bias", "k_0.bias")}
    with pytest.raises(bt.BNetError, match=r"W_q\^T W_k"):
        interval(partial, samples, "W_q_0.value", 0.9)


@pytest.mark.parametrize("concentration", [0.5, 3.0])
def test_log_ratios_have_the_density_of_a_dirichlet(concentration):
    net = bt.bayesuvius(2, heads=3, observe=Normal(1.0), prior=concentration).to(torch.float64)
    data = torch.randn(2, 2, 2).double(), torch.randn(2, 2, 2).double()
    coordinates = Coordinates(make_objective(net, ["c.logits"]), read_batch(net.network, data))
    z = torch.tensor([0.4, -1.1]).double()
    probs = coordinates.decode(z)["c.logits"].exp()
    jacobian = torch.autograd.functional.jacobian(lambda z: coordinates.decode(z)["c.logits"].exp()[:2], z)
    expected = torch.distributions.Dirichlet(torch.full((3,), concentration).double()).log_prob(probs)
    torch.testing.assert_close(coordinates.log_prior(z), expected + torch.linalg.slogdet(jacobian).logabsdet)
    draws = torch.stack([coordinates.sample_prior() for _ in range(2000)])
    share = torch.vmap(coordinates.decode)(draws)["c.logits"].exp()[:, 0]
    assert stats.kstest(share, stats.beta(concentration, 2 * concentration).cdf).pvalue > 1e-3


@pytest.fixture(scope="module")
def regression():
    """Return a net whose only learned parameter is `W_v` of one head: Bayesian linear regression."""
    net, sigma, spread = mixture(heads=1, sigma=0.8), 0.8, 0.4
    x, y = draw_xy(net, 16)
    z = net.replace({"W_v_0.values": torch.eye(2).double()[None]}).module()(x, want=("x_1",))["x_1"].reshape(-1, 2)
    z = z.detach()
    covariance = torch.linalg.inv(z.mT @ z / sigma**2 + torch.eye(2).double() / spread**2)
    mean = (covariance @ z.mT @ y.reshape(-1, 2) / sigma**2).mT
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(len(z)).double(), spread**2 * z @ z.mT + sigma**2 * torch.eye(len(z)).double()
    )
    evidence = float(marginal.log_prob(y.reshape(-1, 2).mT).sum())
    return net, (x, y), spread, mean, covariance, evidence


def test_laplace_is_exact_for_linear_regression(regression):
    net, data, spread, mean, covariance, evidence = regression
    for reweight in (True, False):
        f = fit(net, data, bt.Laplace(draws=4000, reweight=reweight, restarts=1), learn=["W_v_0.values"], spread=spread)
        draws = f.samples["W_v_0.values"][0, :, 0]
        torch.testing.assert_close(f.net.parameters["W_v_0.values"][0], mean)
        torch.testing.assert_close(draws.mean(0), mean, atol=0.05 * float(covariance.max()) ** 0.5, rtol=0)
        for row in range(2):
            torch.testing.assert_close(torch.cov(draws[:, row].mT), covariance, rtol=0.1, atol=0.05 * covariance.max())
        assert f.khat < 0.5 and f.log_marginal_likelihood_error < 0.02
        assert f.log_marginal_likelihood == pytest.approx(evidence, abs=4 * f.log_marginal_likelihood_error)
        assert (f.effective_sample_size is not None) == reweight


@pytest.mark.slow
def test_evidence_counts_the_orders_of_exchangeable_heads():
    """Compared with the mean likelihood of draws from the prior; with equal W_q, W_k the two heads are exchangeable."""
    net = mixture(dim=1, sigma=0.4)
    equal = {name: net.parameters[name][:1].expand(2, 1, 1).clone() for name in WEIGHTS[:2]}
    net = net.replace({**equal, WEIGHTS[2]: torch.tensor([1.4, -1.2]).double().reshape(2, 1, 1)})
    data, learn = draw_xy(net, 30, dim=1), ["c.logits", "W_v_0.values"]
    f = fit(net, data, bt.Laplace(draws=200), learn=learn)
    objective, corpus = make_objective(net, learn), read_batch(net.network, data)
    torch.manual_seed(0)
    pi = torch.distributions.Dirichlet(torch.ones(2).double()).sample((40000,))
    sets = {"c.logits": pi.log(), "W_v_0.values": torch.randn(40000, 2, 1, 1).double()}
    expected = float(objective.log_evidences(sets, corpus).sum(1).logsumexp(0)) - math.log(40000)
    assert f.matched == ("c",) and f.log_marginal_likelihood == pytest.approx(expected, abs=0.1)


def test_evidence_counts_both_signs_of_the_last_row():
    """Compared with the mean likelihood of draws from the prior of the matrices, which has no gauge."""
    net = mixture(heads=1, dim=1, sigma=0.5)
    net = net.replace({name: torch.full((1, 1, 1), 1.3).double() for name in WEIGHTS})
    corpus = read_batch(net.network, draw_xy(net, 40, words=3, dim=1))
    objective = make_objective(net, WEIGHTS)
    coordinates = Coordinates(objective, corpus)
    z = coordinates.encode({name: net.parameters[name].detach() for name in WEIGHTS})
    mode = polish(coordinates, [corpus], z)
    (mirror,) = coordinates.mirrors(mode.z)
    torch.testing.assert_close(coordinates.log_density(mirror, corpus), coordinates.log_density(mode.z, corpus))
    assert not torch.allclose(mirror, mode.z)
    proposals = choose_approximation(coordinates, corpus, mode, torch.Generator().manual_seed(0))
    evidence, error, notes = compute_evidence(proposals, mode, (), {})
    torch.manual_seed(0)
    sets = {name: torch.randn(40000, 1, 1, 1).double() for name in WEIGHTS}
    expected = float(objective.log_evidences(sets, corpus).sum(1).logsumexp(0)) - math.log(40000)
    assert error < 0.1 and not notes and evidence == pytest.approx(expected, abs=0.1)


def draw_tables(prior=None, items=4, heads=2):
    options = {} if prior is None else {"prior": prior}
    nodes = [bt.Node(f"y{k}", Categorical(2, **options), ["c"]) for k in range(items)]
    return bt.BNet(bt.Declaration(nodes=[bt.Node("c", Categorical(heads, **options)), *nodes]))


def enumerate_evidence(y, heads, prior):
    """Sum the joint probability of the data and the heads of all sentences, in closed form, over all assignments."""
    heads_of = torch.cartesian_prod(*[torch.arange(heads)] * len(y))
    is_head = torch.nn.functional.one_hot(heads_of, heads).double()  # [assignment, sentence, head]
    ones = torch.einsum("nsk,si->nki", is_head, y.double())
    counts = is_head.sum(1)
    zeros = counts[..., None] - ones

    def log_dirichlet(counts):
        size = counts.shape[-1]
        constant = math.lgamma(size * prior) - size * math.lgamma(prior)
        return constant + (counts + prior).lgamma().sum(-1) - (counts.sum(-1) + size * prior).lgamma()

    return float((log_dirichlet(counts) + log_dirichlet(torch.stack([ones, zeros], -1)).sum((1, 2))).logsumexp(0))


@pytest.mark.parametrize(("sentences", "prior", "share"), [(14, None, 0.95), (15, 2.0, 0.95), (8, None, 1.0)])
def test_evidence_is_that_of_an_enumeration_of_all_assignments(sentences, prior, share):
    torch.manual_seed(0)
    is_first = torch.arange(sentences)[:, None] % 2 == 1
    y = (torch.rand(sentences, 4) < torch.where(is_first, share, 1 - share)).long()
    f = fit(draw_tables(prior), {f"y{k}": y[:, k] for k in range(4)}, bt.Laplace(draws=200), spread=None)
    error = f.log_marginal_likelihood_error
    assert error < 0.1 and f.matched == ("c",)
    exact = enumerate_evidence(y, 2, prior or 1.0)
    assert f.log_marginal_likelihood == pytest.approx(exact, abs=4 * error + 0.05)


@pytest.mark.parametrize(("y", "prior"), [([[0, 1, 1, 0], [1, 0, 1, 1]], 5.0), ([[0, 1], [1, 1]] * 4, 3.0)])
def test_no_evidence_if_heads_with_tables_coincide(y, prior):
    """One mode is its own image, so it must not be counted twice: K! would add log 2."""
    y = torch.tensor(y)
    net = draw_tables(prior, y.shape[1])
    f = fit(net, {f"y{k}": column for k, column in enumerate(y.T)}, bt.Laplace(draws=50), spread=None)
    assert f.khat < 0.7 and f.log_marginal_likelihood is None and f.log_marginal_likelihood_error is None
    values = {name: value.detach() for name, value in f.net.parameters.items()}
    assert find_coincident_heads(f.net.network, values) == ["heads 0 and 1 of c"]
    values["y0.logits"] = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    assert not find_coincident_heads(f.net.network, values)


def find_symmetries(net, dim):
    corpus = read_batch(net.network, (torch.randn(4, 3, dim).double(), torch.randn(4, 3, dim).double()))
    coordinates = Coordinates(make_objective(net), corpus)
    z = coordinates.sample_prior(torch.Generator().manual_seed(0))
    mode = Mode(z, 0.0, 0.0, torch.eye(len(z)).double(), 0.0)
    selectors = [spec.group.name for spec in find_selectors(net.network)]
    heads, signs = find_head_symmetries(coordinates, mode, selectors), find_sign_symmetries(coordinates, mode)
    return coordinates, corpus, heads, signs


@pytest.mark.parametrize("name", NETS)
def test_exchanges_of_heads_and_changes_of_signs_keep_the_density(name):
    coordinates, corpus, heads, signs = find_symmetries(NETS[name](), 3 if name == "narrow keys" else 2)
    assert len(heads) == (0 if name == "concat" else 2 if name == "two slices" else 1)
    draws = torch.stack([coordinates.sample_prior(torch.Generator().manual_seed(k)) for k in (1, 2)])
    for symmetry in (*heads, *signs):
        image = symmetry.apply(draws)
        assert not torch.allclose(image, draws) and symmetry.distance > 0
        torch.testing.assert_close(symmetry.apply(image).abs(), draws.abs())
        for z, other in zip(draws, image, strict=True):
            torch.testing.assert_close(coordinates.log_density(other, corpus), coordinates.log_density(z, corpus))


def test_a_draw_is_not_counted_for_two_images_of_a_mode():
    """The density is the sum of the proposal and its image, with the integral 2: each shared weight is 1."""
    coordinates, _, (exchange,), _ = find_symmetries(mixture(dim=1), 1)
    size = coordinates.size
    scaled = Approximation(coordinates, torch.ones(size).double(), 2.0 * torch.eye(size).double(), 0.0, False)
    draws = scaled.to_coordinates(torch.randn(50, size).double())[0]
    logs = [compute_log_student(scaled.to_steps(z)[0]) for z in (draws, exchange.apply(draws))]
    proposals = Proposals(scaled, draws, torch.stack(logs).logsumexp(0) - logs[0], torch.ones(0), 0.0)
    torch.testing.assert_close(share_weights(proposals, [exchange]), torch.zeros(50).double())


def test_coordinates_are_chosen_by_the_fit_of_the_normal_distribution_if_no_weights_are_reliable():
    """k-hat prefers the coordinates in which the density at the draws is lower by 50 nats."""
    net = mixture(heads=1, sigma=0.3)
    torch.manual_seed(1)
    net = net.replace({name: torch.randn(1, 2, 2).double() for name in WEIGHTS})
    corpus = read_batch(net.network, draw_xy(net, 30, words=4, seed=1))
    coordinates = Coordinates(make_objective(net, WEIGHTS), corpus)
    mode = polish(coordinates, [corpus], coordinates.encode({name: net.parameters[name].detach() for name in WEIGHTS}))
    chosen = choose_approximation(coordinates, corpus, mode, torch.Generator().manual_seed(0))
    by_khat = choose_approximation(coordinates, corpus, mode, torch.Generator().manual_seed(0), margin=0.0)
    assert by_khat.khat > 0.7 and by_khat.khat < chosen.khat
    medians = []
    for candidate in (chosen.approximation, by_khat.approximation):
        q = torch.distributions.MultivariateNormal(candidate.center, candidate.root @ candidate.root.mT)
        points, log_det = q.sample((100,)), torch.zeros(100).double()
        z, log_det = torch.vmap(coordinates.bend)(points) if candidate.is_straight else (points, log_det)
        joint = torch.vmap(lambda z: coordinates.log_density(z, corpus))(z)
        medians.append(float((joint + log_det - q.log_prob(points)).detach().median()))
    assert medians[0] > medians[1] + 10


@pytest.mark.slow
def test_laplace_names_what_the_data_do_not_determine():
    net = mixture(sigma=1.0)
    x, y = draw_xy(net, 6, words=1)  # attention over one word: no sentence informs A
    f = fit(net, (x, y), bt.Laplace(draws=100, restarts=1))
    notes = "; ".join(f.notes)
    assert f.log_marginal_likelihood is None and "sentences, 6," in notes
    assert "A x_1 of head 0 (4 of 4" in notes or "A x_1 of head 0 (3 of 4" in notes
    point = fit(net, (x, y), bt.EM(restarts=1))
    assert "A x_1 of head 0 (4 of 4 directions), A x_1 of head 1 (4 of 4" in "; ".join(point.notes)
    assert all(value.isfinite().all() for value in f.samples.values())
    prior_width = 2**0.5 * 2 * 1.645  # of an entry of A, if it were Normal
    low, high = f.interval("A x_1")
    assert 0.5 * prior_width < float((high - low).mean()) < 1.5 * prior_width
    large = net.replace({"W_v_0.values": 8 * net.parameters["W_v_0.values"]})
    g = fit(large, draw_xy(large, 40), bt.Laplace(draws=10, restarts=1), learn=["W_v_0.values"], spread=0.2)
    assert any("W_v_0.values" in note and "spread=" in note for note in g.notes)
    same = fit(net, (x, torch.zeros_like(y)), bt.Laplace(draws=10, restarts=1), learn=["c.logits"])
    assert same.pi.isfinite().all()


@pytest.mark.slow
def test_laplace_and_intervals_require_what_makes_them_valid(tmp_path):
    net = mixture()
    data = draw_xy(net)
    with pytest.raises(bt.BNetError, match=r"bt\.Laplace"):
        bt.SVI(guide="full-rank")
    f = fit(net, data, bt.Laplace(draws=20, restarts=1))
    with pytest.raises(bt.BNetError, match="A x_1"):
        f.interval("W_q_0.values")
    for name in ("A x_1", "OV x_1", "W_v_0.values", "c.logits"):
        low, high = f.interval(name)
        assert bool((low <= high).all())
    x = data[0][:3]
    low, high = f.predict_interval(x)
    mean = f.predict(x)
    assert low.shape == mean.shape and bool(((low < mean) & (mean < high)).all())
    half = fit(net, data, bt.Laplace(draws=20, restarts=1), learn=["W_q_0.values"])
    assert half.interval("W_q_0.values")[0].isfinite().all()  # W_k is fixed, so W_q is identified
    concat = fit(mixture(combine="concat"), data, bt.Laplace(draws=20, restarts=1))
    with pytest.raises(bt.BNetError, match=r"W_o_0\.value W_v_0\.value"):
        concat.interval("W_v_0.value")
    g = fit(net, data, bt.SVI(steps=3, draws=5))
    with pytest.raises(bt.BNetError, match=r"bt\.Laplace"):
        g.predict_interval(x)
    assert fit(net, data, bt.SVI(steps=3, draws=5), learn=["c.logits"]).has_intervals
    f.save(tmp_path / "f.fit")
    loaded = bt.load(tmp_path / "f.fit")
    assert (loaded.khat, loaded.notes, loaded.log_marginal_likelihood) == (f.khat, f.notes, f.log_marginal_likelihood)


@pytest.mark.slow
def test_a_discrete_readout_and_a_net_of_float32():
    net = bt.bayesuvius(2, heads=2, vocabulary=["a", "b", "c"], observe=Categorical(3), prior=1.0)
    data = [("a b c", "b c a"), ("b c", "a b"), ("c a b", "c a a")] * 3
    f = fit(net, data, bt.Laplace(draws=30, restarts=1))
    assert f.samples["W_q_0.values"].dtype == torch.float32 and f.pi.isfinite().all()
    assert f.predict(data).isfinite().all()


@pytest.mark.parametrize("scale", [0.4, 3.0])
def test_smoothed_weights_are_those_of_arviz(scale):
    arviz = pytest.importorskip("arviz")
    if not hasattr(arviz, "psislw"):
        pytest.skip("ArviZ 1 moved psislw")
    torch.manual_seed(0)
    logs = scale * torch.randn(1500).double()
    weights, khat = smooth_weights(logs)
    expected, shape = arviz.psislw(logs.numpy())
    torch.testing.assert_close(weights, torch.as_tensor(expected).exp())
    assert khat == pytest.approx(float(shape))


def test_mean_weight_and_its_error():
    """The standard error is the standard deviation of the estimate over replications."""
    torch.manual_seed(0)
    sets = 0.7 * torch.randn(200, 1000).double() - 0.7**2 / 2 + 3.0
    sets[:, :100] = -math.inf
    estimates = torch.tensor([estimate_log_mean(logs)[:2] for logs in sets])
    assert float(estimates[:, 0].mean()) == pytest.approx(3.0 + math.log(0.9), abs=0.01)
    assert float(estimates[:, 1].mean()) == pytest.approx(float(estimates[:, 0].std()), rel=0.2)
    assert describe_weighted(99.0) and not describe_weighted(100.0)


def test_weights_with_infinite_logs_and_resampling():
    logs = torch.full((100,), -math.inf).double()
    logs[:60] = 0.0
    weights, _ = smooth_weights(logs)
    torch.testing.assert_close(weights, torch.cat([torch.full((60,), 1 / 60), torch.zeros(40)]).double())
    indices = resample(torch.tensor([0.5, 0.25, 0.0, 0.25]).double(), 8, torch.Generator().manual_seed(0))
    assert torch.bincount(indices, minlength=4).tolist() == [4, 2, 0, 2]


@pytest.mark.slow
def test_no_evidence_if_no_sentence_informs_a_head():
    net = mixture()
    x = draw_xy(net, 2, words=3)[0]
    f = fit(net, (x, x), bt.Laplace(draws=50, restarts=1))
    assert f.log_marginal_likelihood is None
    assert "no sentence informs a head" in f.notes[-1]

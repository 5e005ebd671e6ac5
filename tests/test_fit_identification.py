"""What the likelihood does not identify: free bases of hidden vectors, the order of atoms, shifts of logits."""

import math

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.data import Batch, Evidence, read_batch
from bnet_transformer.learning.fit import heads
from bnet_transformer.learning.fit.coordinates import Coordinates
from bnet_transformer.learning.fit.heads import find_unidentified, interval
from bnet_transformer.learning.fit.identification import find_free_bases
from bnet_transformer.learning.fit.objective import FitObjective, select_learnable
from bnet_transformer.tpm import Categorical, Normal
from tests.cases import CASES, batch_evidence, batch_inputs, get_case, grouped

NOT_SUMMED = {"word, two slices", "windowed selectors"}  # a batch cannot sum their choices
NETS = [c.name for c in CASES if c.evidence and c.name not in NOT_SUMMED]
# One word has no attention to identify; head and atoms are confounded; all sentences have one draw, so one likelihood.
CONFOUNDED = {"one word", "slice, codebook", "word, codebook", "corpus"}


def draw_batch(case, count, generator):
    """Sentences of the form of a case with random inputs and observations, where the case has observations."""
    sentence, network = case.sentence.observe(case.evidence), case.net.network

    def draw(name, value):
        shape = count, *value.shape[1:]
        if value.is_floating_point():
            return torch.randn(shape, generator=generator, dtype=value.dtype)
        return torch.randint(0, network.get_spec(name).tpm.states, shape, generator=generator)

    x = {network.get_spec(k).group.word_stack or "": draw(k, v) for k, v in batch_inputs(sentence).items()}
    evidence = {}
    for name, given in batch_evidence(sentence).items():
        observed = None if given.observed is None else given.observed.expand(count, *given.observed.shape[1:])
        evidence[name] = Evidence(draw(name, given.value), observed)
    return Batch(x if sentence.state.encoded.given else {}, None, evidence)


def make_objective(network, evidence):
    learned = select_learnable(network, tuple(network.get_spec(name) for name in evidence), None, 1.0)
    return FitObjective(network, learned, 2**16)


@pytest.mark.parametrize("name", NETS)
def test_rotations_of_free_bases_keep_the_likelihood(name):
    generator = torch.Generator().manual_seed(0)
    case = get_case(name)
    network, corpus = case.net.network, draw_batch(case, 3, generator)
    objective = make_objective(network, corpus.evidence)
    values = {k: torch.randn(v.shape, generator=generator, dtype=v.dtype) / 2 for k, v in network.parameters.items()}
    expected = objective.log_evidence(values, corpus)
    for basis in find_free_bases(network, objective.learned.names):
        rotated = basis.rotate(values, basis.draw_rotation(generator, network.dtype))
        torch.testing.assert_close(objective.log_evidence(rotated, corpus), expected)
        assert all(not torch.allclose(rotated[k], values[k]) for k in basis.names)
        if name in ("chapter, two slices", "codebook", "word", "marginal", "started", "no slices"):
            partly = {**values, basis.names[0]: rotated[basis.names[0]]}
            assert not torch.allclose(objective.log_evidence(partly, corpus), expected)


SLOW = ("codebook, two slices", "slice")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in NETS if n not in CONFOUNDED]
)
def test_invariants_have_intervals_if_the_likelihood_identifies_them(name):
    """The oracle: a number is identified if its derivative is 0 in all directions in which no likelihood changes."""
    generator = torch.Generator().manual_seed(0)
    case = get_case(name)
    network = case.net.network
    selectors = heads.find_selectors(network)
    if not any(heads.find_invariant_parameters(network, selector) for selector in selectors):
        return
    objective = make_objective(network, draw_batch(case, 1, generator).evidence)
    names = objective.learned.names
    shapes = {k: network.parameters[k].shape for k in names}
    sizes = [shape.numel() for shape in shapes.values()]
    corpus = draw_batch(case, sum(sizes) + 20, generator)

    def unflatten(z):
        return {k: part.reshape(shapes[k]) for k, part in zip(names, z.split(sizes), strict=True)}

    z = torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda z: objective.log_evidence(unflatten(z), corpus), z)
    _, scale, axes = torch.linalg.svd(jacobian)
    flat = axes[int((scale > 1e-9 * scale[0]).sum()) :]
    unidentified, step = find_unidentified(network, names), 1e-4
    for selector in selectors:
        changes = {}
        for direction in flat:
            ends = [
                heads.invariants(network, selector, {**network.parameters, **unflatten(z + d * direction)})
                for d in (-step, step)
            ]
            for label, before in ends[0].items():
                change = float((ends[1][label] - before).abs().max()) / step
                changes[label] = max(changes.get(label, 0.0), change)
        for label, change in changes.items():
            assert (change > 1e-4) == (label in unidentified), label


def test_intervals_of_what_is_not_identified_are_refused():
    networks = {
        "readout": bt.bayesuvius(2, heads=2, key_dim=2, observe=Categorical(3)),
        "slices": bt.bayesuvius(2, heads=2, key_dim=2, slices=2, observe=Normal(0.5)),
        "atoms": bt.bayesuvius(2, heads=2, key_dim=2, atoms=3, observe=Normal(0.5)),
        "atoms of words": bt.bayesuvius(2, heads=2, key_dim=2, atoms=3, per="word", observe=Normal(0.5)),
        "rotary": grouped(),
        "one slice": bt.bayesuvius(2, heads=2, key_dim=2, observe=Normal(0.5)),
        "residual": bt.bayesuvius(2, heads=2, key_dim=2, slices=2, residual=True, observe=Normal(0.5)),
    }
    given = {
        "readout": {"c.logits", "A x_1"},
        "slices": {"c.logits", "A x_1"},
        "atoms": {"c.logits", "A x_1", "OV x_1"},
        "atoms of words": {"c_0.logits", "A x_1", "OV x_1"},
        "one slice": {"c.logits", "A x_1", "OV x_1", "W_v_0.values"},
        "residual": {"c.logits", "A x_1", "OV x_1", "A x_2", "OV x_2", "W_v_0.values", "W_v_1.values"},
    }
    for key, net in networks.items():
        network = net.network
        samples = {
            k: torch.randn(1, 5, *v.shape).softmax(-1) for k, v in network.parameters.items() if k in network.learnable
        }
        labels = {k for s in heads.find_selectors(network) for k in heads.find_invariant_parameters(network, s)}
        allowed = set()
        for name in [*samples, *labels]:
            try:
                interval(network, samples, name, 0.9)
                allowed.add(name)
            except bt.BNetError as error:
                assert name in str(error)
        if key == "rotary":
            assert not allowed & {f"W_{role}_{t}.value" for role in "qkv" for t in (0, 1)}
        else:
            assert allowed == given[key], key
        assert not {*heads.compute_invariant_samples(network, samples)} - allowed


def test_a_fixed_readout_fixes_the_basis_and_a_bias_of_0_does_not():
    network = bt.bayesuvius(2, heads=2, observe=Categorical(3)).network
    learned = {*network.learnable} - {"y.weight"}
    assert "OV x_1" not in find_unidentified(network, learned)
    assert "OV x_1" in find_unidentified(network, {*network.learnable} - {"W_k_0.values"})
    post_norm = get_case("encoder, post-norm").net.replace({"v_0.bias": torch.zeros(2, 2).double()}).network
    without_bias = {*post_norm.learnable} - {"v_0.bias"}
    names = [basis.names for basis in find_free_bases(post_norm, without_bias)]
    assert ("W_v_0.value", "v_0.bias", "W_o_0.value") in [tuple(sorted(n, key=lambda k: "_o_" in k)) for n in names]


def test_coordinates_fix_the_basis_of_a_readout_and_name_the_basis_between_slices():
    torch.manual_seed(0)
    x = torch.randn(6, 3, 2).double()
    readout = bt.bayesuvius(2, heads=2, key_dim=2, observe=Categorical(3)).to(torch.float64)
    corpus = read_batch(readout.network, (x, torch.randint(0, 3, (6, 3))))
    objective = make_objective(readout.network, corpus.evidence)
    coordinates = Coordinates(objective, corpus)
    assert [block.gauge.names for block in coordinates.blocks][1] == ("W_v_0.values", "y.weight")
    assert not coordinates.free_bases
    values = {k: torch.randn_like(readout.parameters[k]) for k in objective.learned.names}
    rotated = coordinates.rotate(coordinates.decode(coordinates.encode(values)), torch.Generator().manual_seed(1))
    torch.testing.assert_close(objective.log_evidence(rotated, corpus), objective.log_evidence(values, corpus))
    slices = bt.bayesuvius(2, heads=2, key_dim=2, slices=2, observe=Normal(0.5)).to(torch.float64)
    corpus = read_batch(slices.network, (x, x))
    coordinates = Coordinates(make_objective(slices.network, corpus.evidence), corpus)
    (basis,) = coordinates.free_bases
    assert basis.hidden == ("v_0", "x_1") and basis.names[0] == "W_v_0.values"


@pytest.mark.slow
def test_evidence_of_values_with_a_learned_readout_is_that_of_draws_from_the_prior():
    torch.manual_seed(0)
    net = bt.bayesuvius(1, heads=1, observe=Categorical(2)).to(torch.float64)
    corpus = read_batch(net.network, (torch.randn(8, 2, 1).double(), torch.randint(0, 2, (8, 2))))
    names = ["W_v_0.values", "y.weight"]
    objective = FitObjective(net.network, select_learnable(net.network, (net.network.get_spec("y"),), names, 1.0), 100)
    sets = {k: torch.randn(40000, *net.parameters[k].shape).double() for k in names}
    expected = float(objective.log_evidences(sets, corpus).sum(1).logsumexp(0)) - math.log(40000)
    coordinates = Coordinates(objective, corpus)
    assert len(coordinates.blocks) == 1
    logs = []
    for _ in range(2000):  # the prior of the coordinates is that of the matrices
        z = coordinates.sample_prior()
        logs.append(float(objective.log_evidence(coordinates.decode(z), corpus).sum()))
    assert float(torch.tensor(logs).logsumexp(0)) - math.log(2000) == pytest.approx(expected, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("method", [bt.Laplace(draws=20, restarts=1), bt.NUTS(draws=2, warmup=2, chains=1)])
def test_a_fit_with_a_free_basis_has_a_note_and_no_evidence(method):
    torch.manual_seed(0)
    x = torch.randn(4, 2, 2)
    net = bt.bayesuvius(2, heads=1, key_dim=1, slices=2, observe=Normal(0.5))
    f = bt.fit(net, (x, x), method=method, spread=1.0, progress=False)
    assert sum("the basis of v_0 and x_1 is free: " in note for note in f.notes) == 1
    assert f.log_marginal_likelihood is None
    torch.testing.assert_close(f.heads.OV["x_1"], f.net.parameters["W_v_0.values"])  # no mean over bases
    with pytest.raises(bt.BNetError, match="free"):
        f.interval("OV x_1")
    assert "OV_x_1" not in f.to_arviz(predictive_draws=0).posterior

"""Geometric and volume-preserving transformers: numpy's values, volumes, permutations, padding, bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.autograd import gradcheck
from torch.func import jacrev

import bnet_transformer as bt
from bnet_transformer.tpm import Categorical, Cayley, EvalContext, Given, Normal, Skew, Triangular, Weight
from tests import numpy_geometric as columns
from tests.cases import jitter

D = torch.float64
FORMS = ("skew", "arbitrary", None)


def perturb(net: bt.BNet, spread: float = 0.3) -> bt.BNet:
    """The net in float64, with noise on every parameter, so that biases are not zero."""
    return jitter(net, spread).to(D)


def get_arrays(net: bt.BNet) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in net.parameters.items()}


def run_net(net: bt.BNet, Z: np.ndarray) -> np.ndarray:
    """The output of the compiled net for words in the columns of `Z`, as columns."""
    return net.module()(torch.from_numpy(Z.T.copy())[None]).detach()[0].numpy().T


def flatten_map(net: bt.BNet, d: int, n: int):
    """The net as a function of R^(d n)."""
    module = net.module().eval()
    return lambda z: module(z.reshape(1, n, d)).reshape(-1)


def determinant(net: bt.BNet, x: torch.Tensor) -> float:
    """Return the determinant of the Jacobian over all words."""
    n, d = x.shape
    return torch.linalg.det(jacrev(flatten_map(net, d, n))(x.reshape(-1))).item()


# parity with the formulas


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("d", "n", "slices", "blocks"), [(3, 3, 3, 2), (5, 2, 1, 1), (2, 7, 2, 3)])
def test_the_correlation_matrix_mixes_the_words_themselves(d, n, slices, blocks, add):
    net = perturb(bt.geometric(d, slices=slices, blocks=blocks, add=add))
    p, Z = get_arrays(net), np.random.default_rng(d).normal(size=(d, n))
    expected = Z
    for t in range(slices):
        expected = columns.correlated_attention(expected, p[f"A_{t}.value"], add=add)
        expected = columns.resnet(expected, zip(p[f"x_{t + 1}.weight"], p[f"x_{t + 1}.bias"], strict=True))
    np.testing.assert_allclose(run_net(net, Z), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("d", "heads", "n", "slices", "blocks"), [(3, 1, 3, 3, 2), (4, 2, 5, 2, 1), (6, 3, 2, 1, 3)])
def test_the_standard_integrator_scales_by_the_full_width(d, heads, n, slices, blocks, add):
    net = perturb(bt.geometric(d, heads=heads, slices=slices, blocks=blocks, add=add))
    p, Z = get_arrays(net), np.random.default_rng(n).normal(size=(d, n))
    expected = Z
    for t in range(slices):
        P = [[W.T for W in p[f"W_{role}_{t}.value"]] for role in "qkv"]
        expected = columns.standard_attention(expected, *P, add=add)
        expected = columns.resnet(expected, zip(p[f"resnet_{t}.weight"], p[f"resnet_{t}.bias"], strict=True))
        last = zip(p[f"x_{t + 1}.weight"], p[f"x_{t + 1}.bias"], strict=True)
        expected = columns.resnet(expected, last, lambda x: x)
    np.testing.assert_allclose(run_net(net, Z), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("d", "n", "slices", "blocks"), [(3, 3, 3, 2), (5, 2, 1, 1), (2, 7, 2, 3), (4, 1, 1, 1)])
def test_volume_preserving_nets_are_their_formulas(d, n, slices, blocks, form):
    net = perturb(bt.volume_preserving(d, attention=form, slices=slices, blocks=blocks))
    p, Z = get_arrays(net), np.random.default_rng(d * n).normal(size=(d, n))
    expected = Z
    for t in range(slices):
        if form == "skew":
            expected = columns.cayley(expected, columns.unpack(p[f"A_{t}.packed"], d, "skew"), form)
        elif form == "arbitrary":
            expected = columns.cayley(expected, p[f"A_{t}.value"], form)
        pairs = 2 * blocks + 1
        for m in range(1, pairs + 1):
            tanh = np.tanh if m % 2 == 0 else None
            last = f"x_{t + 1}" if m == pairs else f"upper{m}_{t}"
            b = p.get(f"lower{m}_{t}.bias")
            assert (b is None) == (m % 2 == 1)
            expected = columns.triangular(expected, p[f"lower{m}_{t}.packed"], "lower", b, tanh)
            expected = columns.triangular(expected, p[f"{last}.packed"], "upper", p[f"{last}.bias"], tanh)
    np.testing.assert_allclose(run_net(net, Z), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("count", "net"),
    [
        (189, lambda: bt.geometric(3, heads=1, slices=3, blocks=2)),
        (180, lambda: bt.volume_preserving(3, attention="arbitrary", slices=3, blocks=2)),
        (162, lambda: bt.volume_preserving(3, attention="skew", slices=3, blocks=2)),
        (135, lambda: bt.volume_preserving(3, attention=None, slices=1, blocks=6)),
    ],
)
def test_the_nets_of_the_rigid_body_have_their_parameters(count, net):
    assert sum(value.numel() for value in net().parameters.values()) == count
    assert net().cost(3).parameters == count


def test_packed_matrices_have_the_layout_of_the_julia_package():
    """The examples of its documentation."""
    context = EvalContext({"packed": torch.arange(1.0, 7.0)})
    skew = [[0, -1, -2, -4], [1, 0, -3, -5], [2, 3, 0, -6], [4, 5, 6, 0]]
    upper = [[0, 1, 2, 4], [0, 0, 3, 5], [0, 0, 0, 6], [0, 0, 0, 0]]
    assert Skew(4).value(context).tolist() == skew
    for side, matrix in (("lower", np.array(upper).T), ("upper", np.array(upper))):
        step = Triangular(side, "identity", bias=False)
        actual = torch.stack([step.value(context, e) - e for e in torch.eye(4)], -1)
        assert actual.tolist() == matrix.tolist()


# volumes


@settings(max_examples=25, deadline=None)
@given(
    d=st.integers(2, 5),
    n=st.integers(1, 5),
    slices=st.integers(1, 2),
    form=st.sampled_from(["skew", None]),
    activation=st.sampled_from(["tanh", "relu", "gelu"]),
    spread=st.sampled_from([0.3, 0.6]),
    seed=st.integers(0, 2**31),
)
def test_volume_is_preserved(d, n, slices, form, activation, spread, seed):
    options = {"slices": slices, "attention": form, "activation": activation, "spread": spread}
    net = bt.volume_preserving(d, **options, seed=seed).to(D)
    x = torch.randn(n, d, dtype=D, generator=torch.Generator().manual_seed(seed))
    assert abs(determinant(net, x) - 1) < 1e-6


def test_the_arbitrary_form_changes_volume():
    """Words of two slices: the determinants are on both sides of 1, and none is 1."""
    net = bt.volume_preserving(3, attention="arbitrary", spread=1.0, slices=1).to(D)
    generator = torch.Generator().manual_seed(0)
    determinants = [determinant(net, torch.randn(3, 3, dtype=D, generator=generator)) for _ in range(8)]
    assert min(abs(value - 1) for value in determinants) > 1e-3 and min(determinants) < 0.9


@pytest.mark.parametrize("form", ["skew", "arbitrary"])
def test_only_the_skew_form_does_not_see_the_order_of_words(form):
    net = perturb(bt.volume_preserving(3, attention=form))
    x, order = torch.randn(1, 4, 3, dtype=D), [2, 0, 3, 1]
    module = net.module()
    difference = (module(x)[:, order] - module(x[:, order])).abs().max()
    assert difference < 1e-12 if form == "skew" else difference > 1e-2


@pytest.mark.parametrize("form", ["skew", "arbitrary"])
def test_attention_keeps_the_length_of_every_feature(form):
    """Cay(C) is orthogonal: `|z_a|^2` over the words does not change, nor does the Gram matrix of features."""
    net = perturb(bt.volume_preserving(3, attention=form, slices=1))
    x = torch.randn(2, 5, 3, dtype=D)
    a = net.module()(x, want=["a_0"])["a_0"]
    torch.testing.assert_close(a.mT @ a, x.mT @ x, rtol=1e-10, atol=1e-12)


# masks, types, gradients


@pytest.mark.parametrize("form", FORMS)
def test_a_padded_word_is_as_if_it_were_not_there(form):
    net = perturb(bt.volume_preserving(3, attention=form))
    module, x = net.module(), torch.randn(3, 5, 3, dtype=D)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 1, 1]], dtype=torch.bool)
    x[~mask] = 1e6
    padded = module(x, mask=mask)
    for words, present, actual in zip(x, mask, padded, strict=True):
        expected = module(words[present][None])[0]
        torch.testing.assert_close(actual[present], expected, rtol=1e-10, atol=1e-12)
    unpadded = module(x, mask=torch.ones_like(mask))
    assert torch.equal(unpadded, module(x)) or torch.allclose(unpadded, module(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["skew", "arbitrary"])
def test_one_system_for_all_words_is_as_many_as_words(form):
    """The value of one node, with a mask for each word, equals the mix of all words at once."""
    tpm, z, A = Cayley(form), torch.randn(4, 3, dtype=D), torch.randn(3, 3, dtype=D)
    A = A - A.mT if form == "skew" else A
    j = torch.arange(4)
    mask = torch.tensor([True, False, True, True])
    context = EvalContext(word=j, read_indices={"z.": j}, mask={"z.": mask.expand(4, 4)}, dtype=D)
    per_word = tpm.value(context, z[None], A)
    mixed = tpm.mix(j, mask, z, A)
    torch.testing.assert_close(per_word, mixed, rtol=1e-12, atol=1e-12)
    unmasked = tpm.mix(torch.arange(3), None, z[mask], A)
    torch.testing.assert_close(mixed[mask], unmasked, rtol=1e-12, atol=1e-12)
    assert not mixed[~mask].any()
    z.requires_grad_()
    A.requires_grad_()
    assert gradcheck(lambda z, A: tpm.mix(j, mask, z, A), (z, A))


@pytest.mark.parametrize("form", ["skew", "arbitrary"])
@pytest.mark.parametrize("scale", [1e3, 1e4])
def test_large_words_in_single_precision_are_as_in_double(form, scale):
    """C grows with the squares of the words, and the 1 of I + C must not be lost by rounding."""
    net = bt.volume_preserving(3, attention=form, slices=1)
    x = scale * torch.randn(200, 3, 3, generator=torch.Generator().manual_seed(0))
    actual = net.module()(x, want=["a_0"])["a_0"].double()
    expected = net.to(D).module()(x.double(), want=["a_0"])["a_0"]
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6 * scale)
    s = net.sentence(x=x[0])
    torch.testing.assert_close(s["a_0_1"].double(), expected[0, 1], rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.parametrize("form", ["skew", "arbitrary"])
@pytest.mark.parametrize("scale", [1e10, 1e30])
def test_words_without_a_solution_are_named_where_numbers_must_be_finite(form, scale):
    net = bt.volume_preserving(3, attention=form, slices=1, observe=Normal(0.1))
    x = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
    x[0] *= scale
    output = net.module()(x)
    assert output[0].isnan().all() and output[1].isfinite().all()
    with pytest.raises(bt.BNetError, match="a_0_1: expected a value that is a number; got NaN"):
        net.sentence(x=x[0])["a_0_1"]
    with pytest.raises(bt.BNetError, match="expected a finite loss; got loss nan"):
        bt.train(net, (x, x), steps=2, progress=False)
    for sample in (False, True):
        with pytest.raises(bt.BNetError, match="a NaN or infinity at step 1 of window 0"):
            net.iterate(x, 2, sample=sample)


def test_a_singular_system_has_no_solution():
    """C = -I, by a set matrix that is not skew: `I + C` has no inverse."""
    s = bt.volume_preserving(2, slices=1).to(D).sentence(x=torch.eye(2, dtype=D)).do(A_0=-torch.eye(2, dtype=D))
    with pytest.raises(bt.BNetError, match="a_0_0: expected a value that is a number"):
        s["a_0_0"]


@pytest.mark.slow
def test_the_compiled_net_is_one_graph_with_its_gradient():
    module = bt.volume_preserving(3, slices=1).module()
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch._dynamo.reset()  # clears the nets that other tests compiled
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)
    actual, expected = (torch.autograd.grad(fn(x).square().sum(), x)[0] for fn in (compiled, module))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_the_nets_support_evidence_and_queries():
    s = bt.volume_preserving(3, observe=Categorical(2, pool="mean")).sentence("a b c")
    assert s.parents("y") == ["x_2_0", "x_2_1", "x_2_2"]
    s = bt.geometric(3, heads=3).sentence("a b c")
    table = s.attention(0)
    torch.testing.assert_close(table.sum(-1), torch.ones(3, 3))
    assert s.parents("a_0_1_2") == ["q_0_1_0", "q_0_1_1", "q_0_1_2", "k_0_1_2", "v_0_1_0", "v_0_1_1", "v_0_1_2"]


# unsupported queries, and bad input


def test_a_cayley_net_has_no_attention_distribution():
    s = bt.volume_preserving(3).sentence("a b c")
    for call in (lambda: s.attention(0), lambda: s.reads()):
        with pytest.raises(bt.BNetError, match=r"got Cayley, .* orthogonal matrix: its columns are not distributions"):
            call()


BAD = [
    (lambda: bt.geometric(4, heads=3), "heads: expected a divisor of dim, which is 4; got 3"),
    (lambda: bt.geometric(4, observe=Weight(3)), "observe: expected a readout"),
    (lambda: bt.volume_preserving(1), "dim: expected an integer of at least 2; got 1"),
    (lambda: bt.volume_preserving(3, attention="softmax"), "attention: .*'skew', 'arbitrary', None"),
]


def test_bad_options_are_refused():
    for make, message in BAD:
        with pytest.raises(bt.BNetError, match=message):
            print(message, make())


@pytest.mark.parametrize(
    ("reach", "A", "message"),
    [
        ("causal", (3, 3), "parent x_0: expected reach 'every'.*got reach causal"),
        (bt.Reach("window", 1), (3, 3), r"got reach window\(1\)"),
        ("every", (3, 2), r"a matrix of shape \(3, 3\)"),
        ("every", 3, "a matrix"),
    ],
)
def test_cayley_asks_for_every_word_and_a_square_matrix(reach, A, message):
    word = ["word"]
    nodes = [bt.Node("A", Weight(A)), bt.Node("x", Cayley(), [bt.Arrow("x", reach), "A"], word)]
    with pytest.raises(bt.DeclarationError, match=message):
        bt.BNet(bt.Declaration([bt.Stack(nodes, [bt.Node("x", Given(3), plates=word)])]))


# equations


def test_equations_are_in_column_form_and_name_the_key():
    texts = {form: str(bt.geometric(3, heads=1).equations(form)) for form in ("word", "row", "column", "einstein")}
    assert all("q and k have changed roles" in text for text in texts.values())
    assert r"(Q^{t,h})^\top K^{t,h}" in texts["column"]
    assert r"Z_{:i} = a_i" in str(bt.geometric(3).equations("column"))
    for form in ("row", "column", "einstein"):  # the matrix of the words a is not the weight A
        assert "mathbf{A}" not in str(bt.geometric(3).equations(form)) and "Z" in str(bt.geometric(3).equations(form))
    skew, arbitrary = (str(bt.volume_preserving(3, attention=kind).equations("column")) for kind in FORMS[:2])
    assert r"X^t \operatorname{Cay}((X^t)^\top A^t X^t)" in skew and r"(\hat{A}^t)^\top = -\hat{A}^t" in skew
    assert r"X^t \operatorname{Cay}(C(A^t))" in arbitrary
    assert r"C(A^t) = B - B^\top, \quad B = \operatorname{lower}((X^t)^\top A^t X^t) / \sqrt{3}" in arbitrary

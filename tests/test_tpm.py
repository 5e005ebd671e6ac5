"""Each TPM compared with torch's modules or the formula in numpy, and its laws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

import bnet_transformer as bt
from bnet_transformer.tpm import (
    Activation,
    Add,
    Affine,
    Attention,
    Bilinear,
    Buckets,
    Categorical,
    Codebook,
    Concat,
    Dot,
    Dropout,
    Embed,
    EvalContext,
    FeedForward,
    Linear,
    Multiple,
    Neurons,
    Norm,
    Normal,
    Normaliser,
    Parent,
    Pool,
    Positions,
    Read,
    Relative,
    ResNet,
    Select,
    Sinusoid,
    Weight,
)

D = torch.float64


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed + sum(shape)))


def make_parameters(tpm, *parents: Parent) -> dict[str, torch.Tensor]:
    return {name: rand(*p.shape, seed=k) for k, (name, p) in enumerate(tpm.parameters(*parents).items())}


def make_ctx(slots: tuple[str, ...], i: int, mask: torch.Tensor, parameters=None) -> EvalContext:
    m = torch.arange(mask.shape[-1])
    collections = [slot for slot in slots if slot.endswith(".")]
    return EvalContext(
        parameters or {}, torch.tensor(i), dict.fromkeys(collections, m), dict.fromkeys(collections, mask)
    )


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_linear_and_affine():
    W, x = rand(3, 4), rand(4)
    close(Linear().value(EvalContext(), W, x), W @ x)
    p = make_parameters(Affine(3), Parent("x", (4,)))
    close(Affine(3).value(EvalContext(p), x), F.linear(x, p["weight"], p["bias"]))
    close(Affine().value(EvalContext({"bias": p["bias"]}), W, x), F.linear(x, W, p["bias"]))


@pytest.mark.parametrize("i", range(4))
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_attention_is_torchs(i, scale):
    q, k, v = rand(4, 6), rand(4, 6, seed=1), rand(4, 3, seed=2)
    mask = torch.tensor([True, i > 0, True, i > 1])
    tpm = Attention(Dot(scale))
    context = make_ctx(tpm.get_slots(), i, mask)
    peer = F.scaled_dot_product_attention(q[i : i + 1], k, v, mask[None], scale=scale)
    close(tpm.value(context, q[i], k, v), peer[0])
    weights = tpm.attention_weights(context, q[i], k, v)
    close(weights.sum(), torch.tensor(1.0, dtype=D))
    assert (weights[~mask] == 0).all()
    close(tpm.value(context, q[i], k, v), weights @ v)
    residual = Attention(Dot(scale), residual=True)
    close(residual.value(context, q[i], k, v, rand(3, seed=9)), weights @ v + rand(3, seed=9))


def test_attention_over_queries_is_the_column_softmax():
    """Seed 000: the output of column i is `sum_j v_j exp(q_j . k_i) / sum_j' exp(q_j' . k_i)`."""
    q, k, v = rand(4, 6), rand(4, 6, seed=1), rand(4, 3, seed=2)
    tpm = Attention(over="queries")
    weights = torch.softmax(q @ k.T, 0)
    for i in range(4):
        close(tpm.value(make_ctx(tpm.get_slots(), i, torch.ones(4, dtype=torch.bool)), q, k[i], v), weights[:, i] @ v)


@pytest.mark.parametrize("over", ["keys", "queries"])
def test_bilinear_is_the_correlation_matrix_of_seed_000(over):
    Z, A = rand(5, 3), rand(3, 3, seed=4)
    C = Z @ A @ Z.T
    weights = torch.softmax(C, 1 if over == "keys" else 0)
    tpm = Attention(Bilinear(), over=over)
    mask = torch.ones(5, dtype=torch.bool)
    for i in range(5):
        pair = (Z[i], Z) if over == "keys" else (Z, Z[i])
        row = weights[i] if over == "keys" else weights[:, i]
        close(tpm.value(make_ctx(tpm.get_slots(), i, mask), *pair, Z, A), row @ Z)


def test_rotary_scores_depend_only_on_distance_and_keep_length():
    score, q, k = Dot(rotary=50.0), rand(6), rand(1, 6, seed=3)
    scores = [score.score_keys(q, k, torch.tensor(i), torch.tensor([i + 3])) for i in range(5)]
    for other in scores[1:]:
        close(other, scores[0])
    close(score.score_keys(q, q[None], torch.tensor(4), torch.tensor([4])), (q @ q)[None])
    half = torch.polar(torch.ones(3, dtype=D), 2 * 50.0 ** -(torch.arange(3, dtype=D) / 3))
    rotated = torch.complex(q[:3], q[3:]) * half
    close(score.rotate(q, torch.tensor(2)), torch.cat([rotated.real, rotated.imag]))


def test_relative_bias_and_normalisers():
    table = rand(5)
    tpm = Attention(Dot(), Normaliser("sigmoid"), bias=Relative(2))
    q, k, v = rand(4, 3), rand(4, 3, seed=1), rand(4, 3, seed=2)
    mask = torch.tensor([True, True, True, False])
    for i in range(4):
        bias = torch.stack([table[max(-2, min(2, j - i)) + 2] for j in range(4)])
        weights = torch.sigmoid(k @ q[i] + bias) * mask
        close(tpm.value(make_ctx(tpm.get_slots(), i, mask), q[i], k, v, table), weights @ v)
    assert tpm.attention_weights(make_ctx(tpm.get_slots(), 0, mask), q[0], k, v, table) is None
    assert "not a distribution" in tpm.no_attention_reason()
    none = Attention(Dot(), Normaliser("none"))
    close(none.value(make_ctx(none.get_slots(), 0, mask), q[0], k, v), ((k @ q[0]) * mask) @ v)


@pytest.mark.parametrize("two_sided", [True, False])
def test_buckets_widen_with_the_distance(two_sided):
    """Each small distance has a separate bucket, then bucket widths grow by a constant ratio; the last is unbounded."""
    count, furthest = 16 if two_sided else 8, 64
    table, j = torch.arange(float(count)), torch.arange(-200, 201)
    result = Buckets(count, furthest, two_sided).compute_bias(table, torch.tensor(0), j).long().tolist()
    before, after = result[200::-1], result[200:]
    assert before[:5] == [0, 1, 2, 3, 4] and before[64:] == [7] * 137 and before == sorted(before)
    assert [before.index(k) for k in (5, 6, 7)] == [8, 16, 32]  # 4 (64 / 4)^(1/4), ...
    assert after == ([0, *(8 + k for k in before[1:])] if two_sided else [0] * 201)
    i = torch.arange(9)
    pairs = [
        Buckets(count, furthest, two_sided).compute_bias(table, i, i[None], from_key=keyed) for keyed in (False, True)
    ]
    assert pairs[0].equal(pairs[1].T)


def test_scale_and_rounded_sinusoids():
    close(Multiple(-0.5).value(EvalContext(), rand(3)), -rand(3) / 2)
    encodings = [
        Sinusoid(5, halves=True, rounded=rounded).value(EvalContext(word=torch.arange(40), dtype=D))
        for rounded in (True, False)
    ]
    assert encodings[0].equal(encodings[1].float().double()) and not encodings[0].equal(encodings[1])


def test_read_is_attentions_categorical():
    q, k = rand(3), rand(4, 3)
    mask = torch.tensor([True, False, True, True])
    tpm = Read(Dot(None))
    actual = tpm.distribution(make_ctx(tpm.get_slots(), 0, mask), q, k).probs
    close(actual, torch.softmax((k @ q / math.sqrt(3)).masked_fill(~mask, -torch.inf), -1))


def test_norms():
    x = rand(6)
    p = make_parameters(Norm(), Parent("x", (6,)))
    close(Norm(eps=1e-3).value(EvalContext(p), x), F.layer_norm(x, (6,), p["gain"], p["bias"], 1e-3))
    assert set(Norm(bias=False).parameters(Parent("x", (6,)))) == {"gain"}
    close(Norm(bias=False).value(EvalContext({"gain": p["gain"]}), x), F.layer_norm(x, (6,), p["gain"]))
    close(Norm("rms").value(EvalContext(p), x), F.rms_norm(x, (6,), p["gain"], 1e-5))
    close(Norm(affine=False).value(EvalContext(), x), F.layer_norm(x, (6,)))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "identity"])
def test_feed_forward(activation):
    functions = {"gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "identity": lambda x: x}
    act = functions.get(activation) or getattr(F, activation, None) or getattr(torch, activation)
    x = rand(4)
    tpm = FeedForward(5, activation)
    p = make_parameters(tpm, Parent("x", (4,)))
    hidden = act(F.linear(x, p["weight_in"], p["bias_in"]))
    close(tpm.value(EvalContext(p), x), F.linear(hidden, p["weight_out"], p["bias_out"]))
    close(Activation(activation).value(EvalContext(), x), act(x))
    gated = FeedForward(5, activation, gated=True, bias=False)
    p = make_parameters(gated, Parent("x", (4,)))
    assert not any("bias" in name for name in p)
    hidden = act(p["weight_gate"] @ x) * (p["weight_in"] @ x)
    close(gated.value(EvalContext(p), x), p["weight_out"] @ hidden)


def test_resnet_steps():
    z, tpm = rand(3), ResNet(2)
    p = make_parameters(tpm, Parent("x", (3,)))
    first = z + torch.tanh(p["weight"][0] @ z + p["bias"][0])
    close(tpm.value(EvalContext(p), z), first + torch.tanh(p["weight"][1] @ first + p["bias"][1]))


def test_concat_is_concatenation_then_one_matrix():
    W, a, x = rand(3, 5, 2), rand(3, 2), rand(5)
    flat = torch.cat(list(W), 1) @ a.flatten()
    close(Concat().value(EvalContext(), W, a), flat)
    close(Concat(bias=True, residual=True).value(EvalContext({"bias": x}), W, a, x), flat + 2 * x)
    close(Concat(mapped=False).value(EvalContext(), a), a.flatten())


def test_the_small_ones():
    x, values = rand(4), rand(3, 4)
    mask = torch.tensor([True, False, True])
    close(Pool().value(make_ctx(("x.",), 0, mask), values), (values[0] + values[2]) / 2)
    close(Pool("sum").value(make_ctx(("x.",), 0, mask), values), values[0] + values[2])
    close(Add().value(EvalContext(), x, x, x), 3 * x)
    close(Dropout(0.5).value(EvalContext(), x), x)
    dropped = Dropout(0.5).value(EvalContext(training=True), torch.ones(1000))
    assert set(dropped.tolist()) == {0.0, 2.0}
    table = rand(7, 4)
    close(Embed(4, scale=2.0).value(EvalContext({"table": table}), torch.tensor(3)), 2 * table[3])
    close(Embed(4, tied=True).value(EvalContext(), table, torch.tensor(3)), table[3])
    close(Positions(7, 4).value(EvalContext({"table": table}, torch.tensor(5))), table[5])
    close(Weight((2, 2)).value(EvalContext({"value": table[:2, :2]})), table[:2, :2])


def test_categorical_is_a_table_and_a_readout():
    theta, W, x = rand(2, 3, 4), rand(4, 5), rand(5)
    parents = [Parent("c", states=2), Parent("d", states=3)]
    tpm = Categorical(4)
    assert {k: p.shape for k, p in tpm.parameters(*parents).items()} == {"logits": (2, 3, 4)}
    actual = tpm.distribution(EvalContext({"logits": theta}), torch.tensor(1), torch.tensor(2)).probs
    close(actual, torch.softmax(theta[1, 2], -1))
    result = tpm.parameters(parents[0], Parent("x", (5,)))
    assert {k: p.shape for k, p in result.items()} == {"logits": (2, 4), "weight": (4, 5)}
    actual = tpm.logits(EvalContext({"logits": theta[:, 0], "weight": W}), torch.tensor(1), x)
    close(actual, theta[1, 0] + W @ x)
    close(Categorical(5, affine=False).logits(EvalContext(), x), x)
    fixed = Categorical(2, (0.25, 0.75))
    logits = torch.tensor(fixed.parameters()["logits"].fill, dtype=D)
    close(fixed.distribution(EvalContext({"logits": logits})).probs, torch.tensor([0.25, 0.75], dtype=D))
    assert not fixed.parameters()["logits"].learnable


def test_weight_nodes_under_a_selector():
    bank = rand(2, 3, 4, 5)
    close(Select((4, 5)).value(EvalContext({"values": bank}), torch.tensor(1), torch.tensor(2)), bank[1, 2])
    close(Select((4, 5)).value(EvalContext({"values": bank[0]}), torch.tensor(2)), bank[0, 2])
    codebook, p = Codebook(3, (4, 5)), {"atoms": bank[0], "logits": rand(2, 3)}
    close(codebook.distribution(EvalContext(p), torch.tensor(1)).probs, torch.softmax(p["logits"][1], -1))
    close(codebook.emit(EvalContext(p), torch.tensor(2)), bank[0, 2])


def test_normal():
    x, y = rand(4), rand(2, seed=7)
    tpm = Normal(0.5, dim=2)
    p = {"log_sigma": torch.tensor(math.log(0.5), dtype=D), "weight": rand(2, 4), "bias": rand(2)}
    mean = p["weight"] @ x + p["bias"]
    expected = -0.5 * ((y - mean) / 0.5).square().sum() - 2 * math.log(0.5) - math.log(2 * math.pi)
    close(tpm.distribution(EvalContext(p), x).log_prob(y), expected)


# one definition serves one node and a batch: leading dims broadcast


BATCHED = [
    (Linear(), [(3, 4), (4,)]),
    (Affine(3), [(4,)]),
    (Norm(), [(4,)]),
    (Norm("rms"), [(4,)]),
    (FeedForward(5, gated=True), [(4,)]),
    (Neurons(5, gated=True), [(4,)]),
    (ResNet(2), [(4,)]),
    (Add(), [(4,), (4,)]),
    (Normal(1.0, dim=2), [(4,)]),
    (Categorical(3), [2, (4,)]),
    (Select((2, 3)), [2, 3]),
    (Codebook(4, (2, 3)), [2]),
    (Embed(4), [5]),
    (Attention(Dot(None, rotary=10.0), bias=Relative(1)), [(4,), "(4,)", "(3,)", (3,)]),
    (Attention(Dot(), bias=Buckets(5, furthest=3)), [(4,), "(4,)", "(3,)", (5,)]),
    (Multiple(0.5), [(4,)]),
    (Attention(Bilinear(), over="queries"), ["(4,)", (4,), "(4,)", (4, 4)]),
    (Read(), [(4,), "(4,)"]),
    (Pool(), ["(4,)"]),
    (Concat(bias=True), ["(5, 3)", "(3,)"]),
]


@pytest.mark.parametrize("tpm, slots", BATCHED, ids=lambda x: repr(x) if isinstance(x, bt.tpm.TPM) else "")
def test_one_definition_serves_a_batch(tpm, slots):
    """Batch [b] of plates [h]: each entry of the output equals that of a separate call."""
    b, h, m = 2, 3, 4
    parents, values = [], []
    for k, slot in enumerate(slots):
        if isinstance(slot, int):
            parents.append(Parent(f"p{k}", states=slot))
            values.append(torch.randint(slot, (b, h), generator=torch.Generator().manual_seed(k)))
        else:
            is_collection = isinstance(slot, str)
            shape = eval(slot) if is_collection else slot
            parents.append(Parent(f"p{k}", shape, over=(("head", m),) if is_collection else ()))
            values.append(rand(b, h, *([m] if is_collection else []), *shape, seed=k))
    parameters = {n: rand(h, *p.shape, seed=3) for n, p in tpm.parameters(*parents).items()}
    names = [s for s in tpm.get_slots() if s.endswith(".")]
    word = torch.tensor([[0, 1, 2], [3, 2, 1]])
    mask = torch.tensor([True, True, False, True])

    def evaluate(word_index, parameters, values):
        context = EvalContext(
            parameters, word_index, dict.fromkeys(names, torch.arange(m)), dict.fromkeys(names, mask), dtype=D
        )
        if tpm.kind == "deterministic":
            return tpm.value(context, *values)
        if tpm.kind == "continuous":
            return tpm.distribution(context, *values).mean
        logits = tpm.logits(context, *values)
        if not isinstance(tpm, Codebook):
            return logits
        return torch.cat([logits, tpm.emit(context, values[0]).flatten(logits.dim() - 1)], -1)

    batch = evaluate(word, parameters, values)
    for i in range(b):
        for j in range(h):
            single = evaluate(word[i, j], {n: p[j] for n, p in parameters.items()}, [v[i, j] for v in values])
            close(batch[i, j], single)


# laws


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 10**6), st.floats(-3, 3))
def test_softmax_attention_is_a_distribution_and_its_output_is_in_the_hull(n, d, seed, scale):
    q, k, v = rand(d, seed=seed), rand(n, d, seed=seed + 1), rand(n, d, seed=seed + 2)
    tpm = Attention(Dot(scale))
    context = make_ctx(tpm.get_slots(), 0, torch.ones(n, dtype=torch.bool))
    weights = tpm.attention_weights(context, q, k, v)
    assert (weights >= 0).all() and abs(float(weights.sum()) - 1) < 1e-12
    out = tpm.value(context, q, k, v)
    direction = rand(d, seed=seed + 3)
    assert (v @ direction).min() - 1e-9 <= out @ direction <= (v @ direction).max() + 1e-9


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.floats(2, 1e4), st.integers(0, 200), st.integers(0, 50), st.booleans())
def test_a_shift_of_the_sinusoid_is_one_linear_map(half, base, n, k, halves):
    """Seed 002: for any fixed offset k the encoding at n + k is a linear map of that at n, the same for all n."""
    dim = 2 * half
    tpm = Sinusoid(dim, base, halves)
    encode = lambda i: tpm.value(EvalContext(word=torch.tensor(i), dtype=D)).numpy()  # noqa: E731
    rotation = np.zeros((dim, dim))
    for e in range(half):
        angle = k * base ** (-2 * e / dim)
        s, c = (e, e + half) if halves else (2 * e, 2 * e + 1)
        rotation[s, s] = rotation[c, c] = math.cos(angle)
        rotation[s, c], rotation[c, s] = math.sin(angle), -math.sin(angle)
    np.testing.assert_allclose(encode(n + k), rotation @ encode(n), atol=1e-9)
    assert abs(encode(n)).max() <= 1


@pytest.mark.parametrize("dim", [1, 5, 8])
def test_the_sinusoid_follows_seed_003(dim):
    actual = Sinusoid(dim).value(EvalContext(word=torch.arange(4), dtype=D))
    for i in range(4):
        for feature in range(dim):
            angle = i / 10000 ** (2 * (feature // 2) / dim)
            expected = math.sin(angle) if feature % 2 == 0 else math.cos(angle)
            assert abs(float(actual[i, feature]) - expected) < 1e-12
    shifted = Sinusoid(dim, first=1).value(EvalContext(word=torch.arange(4), dtype=D))  # seeds 002 and 003 count from 1
    for i in range(1, 5):
        for feature in range(1, dim + 1):
            angle = i / 10000 ** ((feature - feature % 2) / dim)
            expected = math.cos(angle) if feature % 2 else math.sin(angle)
            assert abs(float(shifted[i - 1, feature - 1]) - expected) < 1e-12
    halves = Sinusoid(dim, halves=True).value(EvalContext(word=torch.arange(1, 5), dtype=D))
    close(Sinusoid(dim, halves=True, first=1).value(EvalContext(word=torch.arange(4), dtype=D)), halves)

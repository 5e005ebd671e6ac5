"""The vanilla transformers: torch's own modules, the size of the base model, positions, words, readouts, bad input."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bnet_transformer as bt
from bnet_transformer.models import shift_right, weights_of
from bnet_transformer.tpm import Categorical, Dropout, Normal, Positions, Sinusoid
from tests.cases import jitter

D = torch.float64
PLAIN = {"dropout": 0.0, "positions": None}
SIZES = {"heads": 3, "slices": 2, "hidden": 10}
WORDS = ["the", "cat", "sat", "on", "mat"]
EXACT = [(D, 1e-10), (torch.float32, 1e-5)]


@pytest.fixture(params=EXACT, ids=["float64", "float32"])
def precision(request):
    """A floating type, and the tolerance against torch."""
    return request.param


def perturb(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return torch's module with noise on biases and gains, which would start at zero and one."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.3)
    return module.to(dtype).eval()


def check_peer(net, peer, output, inputs, tolerance, *, x, stack=None, want=None, mask=None, do=None, rows=slice(None)):
    """Outputs of the net and of torch's module agree, and gradients of a loss by every weight and by the inputs."""
    weights = weights_of(peer, stack)
    module = net.to(next(peer.parameters()).dtype).replace(weights).module().eval()
    actual = module(x, mask, want=[want or module.output], do=do)[want or module.output]
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    tolerances = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(actual[rows], output[rows], **tolerances)
    parameters = {name: module.store[name.replace(".", "/")] for name in weights}
    expected = torch.autograd.grad((output * weight)[rows].sum(), [*peer.parameters(), *inputs], retain_graph=True)
    grads = torch.autograd.grad((actual * weight)[rows].sum(), [*parameters.values(), *inputs])
    expected_grads = weights_of(replace_values(peer, expected), stack)
    scale = max(float(gradient.abs().max()) for gradient in expected)
    for name, gradient in zip(parameters, grads, strict=False):
        torch.testing.assert_close(
            gradient / scale, expected_grads[name] / scale, **tolerances, msg=lambda m, n=name: f"{n}: {m}"
        )
    for gradient, other in zip(grads[len(parameters) :], expected[len(list(peer.parameters())) :], strict=True):
        torch.testing.assert_close(gradient / scale, other / scale, **tolerances)


def replace_values(peer: nn.Module, values) -> nn.Module:
    """Return a copy of torch's module with these values (gradients, to be mapped to our names)."""
    clone = copy.deepcopy(peer)
    for parameter, value in zip(clone.parameters(), values, strict=False):
        parameter.data = value
    return clone


# torch's own modules


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mask", [None, "causal", "table"])
def test_multihead_attention_is_torchs(precision, mask, bias):
    dtype, tolerance = precision
    peer = perturb(nn.MultiheadAttention(6, 3, bias=bias, batch_first=True), dtype)
    x = torch.randn(2, 5, 6, dtype=dtype, requires_grad=True)
    allowed = {"causal": torch.ones(5, 5).tril().bool(), "table": torch.rand(5, 5) < 0.5}.get(mask)
    if allowed is not None:
        allowed = allowed | torch.eye(5, dtype=torch.bool)
    output, weights = peer(x, x, x, attn_mask=None if allowed is None else ~allowed, average_attn_weights=False)
    net = bt.encoder(6, heads=3, slices=1, bias=bias, mask=allowed.numpy() if mask == "table" else mask, **PLAIN)
    check_peer(net, peer, output, [x], tolerance, x=x, want="mix_0")
    s = net.to(dtype).replace(weights_of(peer)).sentence(x=x[0].detach())
    torch.testing.assert_close(s.attention(0), weights[0].detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_encoder_is_torchs(precision, norm, activation, bias):
    """With padded sentences: values at padded positions do not matter, and outputs there are not compared."""
    dtype, tolerance = precision
    layer = nn.TransformerEncoderLayer(6, 3, 10, 0.0, activation, 1e-5, True, norm == "pre", bias)
    final = nn.LayerNorm(6, bias=bias) if norm == "pre" else None
    peer = perturb(nn.TransformerEncoder(layer, 2, final, enable_nested_tensor=False), dtype)
    net = bt.encoder(6, norm=norm, activation=activation, bias=bias, **SIZES, **PLAIN)
    x = torch.randn(2, 5, 6, dtype=dtype, requires_grad=True)
    valid = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    output = peer(x, src_key_padding_mask=~valid)
    check_peer(net, peer, output, [x], tolerance, x=x, mask=valid, rows=valid)
    assert set(weights_of(peer)) == set(net.parameters)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_causal_encoder_is_the_decoder(precision, norm):
    dtype, tolerance = precision
    layer = nn.TransformerEncoderLayer(6, 3, 10, 0.0, batch_first=True, norm_first=norm == "pre")
    peer = perturb(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), dtype)
    net = bt.decoder(6, norm=norm, final_norm=False, **SIZES, **PLAIN)
    x = torch.randn(2, 20, 6, dtype=dtype, requires_grad=True)
    output = peer(x, nn.Transformer.generate_square_subsequent_mask(20, dtype=dtype), is_causal=True)
    check_peer(net, peer, output, [x], tolerance, x=x)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_decoder_is_torchs(precision, norm):
    """Torch's decoder is the stack `dec` of an encoder-decoder whose last encoder state is set."""
    dtype, tolerance = precision
    layer = nn.TransformerDecoderLayer(6, 3, 10, 0.0, batch_first=True, norm_first=norm == "pre")
    peer = perturb(nn.TransformerDecoder(layer, 2), dtype)
    allowed = torch.tensor([[True, True, False, True], [False, True, True, True], [True, False, False, True]])
    net = bt.encoder_decoder(6, norm=norm, final_norm=False, mask={"cross": allowed.numpy()}, **SIZES, **PLAIN)
    memory = torch.randn(2, 4, 6, dtype=dtype, requires_grad=True)
    x = torch.randn(2, 3, 6, dtype=dtype, requires_grad=True)
    causal = nn.Transformer.generate_square_subsequent_mask(3).isinf()
    output = peer(x, memory, tgt_mask=causal, memory_mask=~allowed)
    check_peer(net, peer, output, [x, memory], tolerance, x={"enc": memory, "dec": x}, do={"enc_x_2": memory})


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_transformer_is_torchs(precision, norm):
    """Both stacks with their final norms, causal, and padded on both sides."""
    dtype, tolerance = precision
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True", UserWarning)
        peer = perturb(nn.Transformer(6, 3, 2, 2, 10, 0.0, batch_first=True, norm_first=norm == "pre"), dtype)
    net = bt.encoder_decoder(6, norm=norm, final_norm=True, **SIZES, **PLAIN)
    source = torch.randn(2, 4, 6, dtype=dtype, requires_grad=True)
    target = torch.randn(2, 3, 6, dtype=dtype, requires_grad=True)
    source_mask = torch.tensor([[True] * 4, [True] * 2 + [False] * 2])
    target_mask = torch.tensor([[True] * 3, [True] * 2 + [False]])
    output = peer(
        source,
        target,
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(3).isinf(),
        src_key_padding_mask=~source_mask,
        tgt_key_padding_mask=~target_mask,
        memory_key_padding_mask=~source_mask,
    )
    x, mask = {"enc": source, "dec": target}, {"enc": source_mask, "dec": target_mask}
    check_peer(net, peer, output, [source, target], tolerance, x=x, mask=mask, rows=target_mask)
    assert set(weights_of(peer)) == set(net.parameters)


MISMATCHES = {
    "more slices": ({"slices": 3}, {}, r"the module has no .*_2\."),
    "fewer slices": ({"slices": 1}, {}, r"the net has no .*_1\."),
    "no biases": ({}, {"bias": False}, "the module has no"),
    "biases": ({"bias": False}, {}, "the net has no"),
    "a final norm": ({"final_norm": True}, {}, r"the module has no norm\.bias, norm\.gain"),
    "pre-norm": ({"norm": "pre", "final_norm": False}, {}, "norm2_0"),
    "activation": ({"activation": "gelu"}, {}, "activation of the module: expected that of the net, 'gelu'"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_copy_in_part_is_refused(name):
    """The parameters of the module and of the net differ, except words and readout."""
    options, layer, match = MISMATCHES[name]
    peer = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 3, 10, **layer), 2, enable_nested_tensor=False)
    base = {**SIZES, "vocabulary": 5, "readout": Categorical(4)}
    net = bt.encoder(6, **base, bias=layer.get("bias", True))
    assert weights_of(peer, net=net).keys() == weights_of(peer).keys() < net.parameters.keys()
    with pytest.raises(bt.BNetError, match=match):
        weights_of(peer, net=bt.encoder(6, **{**base, **options}))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_a_whole_copy_of_a_part():
    """Only attention, one stack of two, stacks of different depths."""
    attention = nn.MultiheadAttention(6, 3)
    assert len(weights_of(attention, net=bt.encoder(6, heads=3, slices=1))) == 8
    with pytest.raises(bt.BNetError, match="the module has no"):
        weights_of(attention, net=bt.encoder(6, heads=3, slices=2))
    peer = nn.Transformer(6, 3, 1, 2, 10, 0.0, batch_first=True).eval()
    net = bt.encoder_decoder(6, heads=3, slices={"enc": 1, "dec": 2}, hidden=10, final_norm=True, **PLAIN)
    net = net.replace(weights_of(peer, net=net))
    source, target = torch.randn(2, 4, 6), torch.randn(2, 3, 6)
    causal = nn.Transformer.generate_square_subsequent_mask(3)
    expected = peer(source, target, tgt_mask=causal, tgt_is_causal=True)
    torch.testing.assert_close(net.module().eval()({"enc": source, "dec": target}), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(bt.BNetError, match="the net has no enc_norm"):
        weights_of(peer, net=bt.encoder_decoder(6, heads=3, slices={"enc": 1, "dec": 2}, hidden=10, **PLAIN))
    with pytest.raises(bt.BNetError, match="net has no"):
        weights_of(peer.decoder, net=bt.encoder(6, heads=3, slices=2, hidden=10, **PLAIN))
    for slices in ({"enc": 1}, {"enc": 1, "dec": 0}, (1, 2)):
        with pytest.raises(bt.BNetError, match="slices"):
            bt.encoder_decoder(6, heads=3, slices=slices)


def test_copied_weights_are_copies():
    peer = nn.TransformerEncoderLayer(4, 2)
    weights = weights_of(peer, "enc")
    assert "enc_x_1.gain" in weights and not any(value.requires_grad for value in weights.values())
    weights["enc_norm1_0.gain"].zero_()
    assert peer.norm1.weight.sum() == 4


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: nn.Linear(3, 3), "a supported torch module; got Linear"),
        (lambda: nn.MultiheadAttention(6, 2, kdim=4), "kdim"),
        (lambda: nn.MultiheadAttention(6, 2, add_bias_kv=True), "add_bias_kv"),
        (lambda: nn.MultiheadAttention(6, 2, add_zero_attn=True), "add_zero_attn"),
        (lambda: nn.TransformerEncoderLayer(6, 2, layer_norm_eps=1e-3), "eps"),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2), 1, nn.RMSNorm(6)), "LayerNorm"),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2), 1, nn.LayerNorm(6, elementwise_affine=False)),
         "gain"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_what_our_nets_have_not_is_refused(make, message):
    with pytest.raises(bt.BNetError, match=message):
        weights_of(make())


# sizes


@pytest.mark.slow
def test_the_base_model_has_63_082_496_parameters():
    net = bt.encoder_decoder(vocabulary=37_000)
    assert sum(value.numel() for value in net.parameters.values()) == 63_082_496
    stacks = net.declaration.stacks
    assert [(s.name, s.slices) for s in stacks] == [("enc", 6), ("dec", 6)]
    assert net.network.get_spec("dec_ffn_5").parameters["weight_in"].shape == (2048, 512)
    assert net.network.get_spec("dec_cross_q_0").group.plates == ("head",) and net.network.graph.plate_sizes == {
        "head": 8
    }


def test_one_table_serves_embeddings_and_readout():
    net = jitter(bt.encoder_decoder(4, heads=2, slices=1, vocabulary=WORDS)).to(D)
    s = net.sentence({"enc": "the cat", "dec": "sat the"})
    table, x = net.parameters["W_embed.value"], s["dec_x_1_1"]
    readers = ["enc_embed_0", "enc_embed_1", "dec_embed_0", "dec_embed_1", "dec_logits_0", "dec_logits_1"]
    assert s.children("W_embed") == readers
    assert s["enc_embed_0"].equal(table[0] * 2) and s["dec_embed_1"].equal(table[0] * 2)
    torch.testing.assert_close(s.tpm("dec_y_1").probs, (table @ x).softmax(0), rtol=1e-12, atol=1e-12)
    untied = bt.encoder_decoder(4, heads=2, slices=1, vocabulary=WORDS, tie=False).parameters
    assert {"enc_embed.table", "dec_embed.table", "dec_logits.weight", "dec_logits.bias"} <= set(untied)
    split = bt.encoder_decoder(4, heads=2, slices=1, vocabulary=WORDS, target_vocabulary=3)
    assert split.parameters["enc_embed.table"].shape == (5, 4) and split.parameters["W_embed.value"].shape == (3, 4)
    assert split.sentence({"enc": "cat", "dec": [2]}).children("W_embed") == ["dec_embed_0", "dec_logits_0"]


def test_a_tied_table_takes_no_memory_for_each_word():
    """No tensor of the forward and backward run is larger than the table itself."""
    sizes = []

    class SizeRecorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(tensor.numel() for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor))
            return out

    module = bt.decoder(8, heads=2, slices=1, vocabulary=500).module()
    with SizeRecorder():
        module(torch.randint(500, (2, 32)), want=["x_1"])["x_1"].square().sum().backward()
    assert max(sizes) == module.store["W_embed/value"].grad.numel() == 500 * 8


# words: positions, order, dropout


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_without_positions_words_have_no_order_and_with_them_they_do(norm):
    x = torch.randn(1, 5, 6, dtype=D)
    order = torch.randperm(5)
    for positions in (None, "sinusoidal"):
        net = jitter(bt.encoder(6, norm=norm, positions=positions, **SIZES)).to(D)
        module = net.module().eval()
        same = torch.allclose(module(x[:, order]), module(x)[:, order], rtol=0, atol=1e-10)
        assert same == (positions is None)


def test_a_decoders_word_ignores_later_words_and_every_word_of_the_encoder_counts():
    net = jitter(bt.encoder_decoder(4, heads=2, slices=2, vocabulary=WORDS)).to(D)
    module = net.module().eval()
    s = net.sentence({"enc": "the cat", "dec": "sat on mat"})
    assert "dec_token_2" not in s.ancestors("dec_y_1") and {"dec_token_1", "enc_token_1"} <= set(
        s.ancestors("dec_y_0", "dec_y_1")
    )
    x = {"enc": torch.tensor([[0, 1]]), "dec": torch.tensor([[2, 3, 4]])}
    plain = module(x)
    later = module({**x, "dec": torch.tensor([[2, 3, 0]])})
    assert later[:, :2].equal(plain[:, :2]) and not later[:, 2].allclose(plain[:, 2])
    assert not module({**x, "enc": torch.tensor([[0, 2]])})[:, 0].allclose(plain[:, 0])


def test_outputs_are_shifted_right():
    outputs = torch.tensor([[3, 1, 4], [2, 2, 0]])
    assert shift_right(outputs, 0).tolist() == [[0, 3, 1], [0, 2, 2]]
    with pytest.raises(bt.BNetError, match="outputs"):
        shift_right(torch.zeros(2, 2), 0)


def test_dropout_is_a_node_that_zero_leaves_out():
    def find_dropouts(net):
        return {m.group.stem: m.tpm.p for m in net.network.specs if isinstance(m.tpm, Dropout)}

    net = bt.encoder_decoder(4, heads=2, slices=1, vocabulary=5, dropout=0.5)
    roles = {"enc_x", "enc_drop1", "enc_drop2", "dec_x", "dec_drop1", "dec_cross_drop", "dec_drop2"}
    assert find_dropouts(net) == dict.fromkeys(roles, 0.5)
    assert not find_dropouts(bt.encoder_decoder(4, heads=2, slices=1, vocabulary=5, dropout=0.0))
    assert set(find_dropouts(bt.encoder(4, heads=2))) == {"x", "drop1", "drop2"}
    assert set(find_dropouts(bt.encoder(4, heads=2, positions=None))) == {"drop1", "drop2"}  # given vectors stay whole
    module, x = net.module(), {"enc": torch.zeros(1, 3).long(), "dec": torch.zeros(1, 2).long()}
    result = module(x, want=["enc_mix_0", "enc_drop1_0"])
    nonzero = result["enc_drop1_0"] != 0
    assert not nonzero.all() and nonzero.any()
    torch.testing.assert_close(result["enc_drop1_0"][nonzero], 2 * result["enc_mix_0"][nonzero])
    assert module.eval()(x).equal(module(x))


# readouts


def test_the_masked_word_of_an_encoder_with_its_transform():
    net = jitter(bt.encoder(4, heads=2, slices=1, vocabulary=WORDS, readout="word", transform="gelu")).to(D)
    s, p = net.sentence("the cat"), net.parameters
    hidden = nn.functional.gelu(p["dense.weight"] @ s["x_1_1"] + p["dense.bias"])
    normed = nn.functional.layer_norm(hidden, (4,), p["transform_norm.gain"], p["transform_norm.bias"])
    expected = (p["W_embed.value"] @ normed + p["logits.bias"]).softmax(0)
    torch.testing.assert_close(s.tpm("y_1").probs, expected, rtol=1e-12, atol=1e-12)
    assert s.observe(y_1="mat") is not None and "token_1" in s.ancestors("y_0")


@pytest.mark.parametrize("pool", ["first", "last", "mean", "sum"])
def test_the_class_of_a_sentence(pool):
    readout = Categorical(2, labels=("good", "bad"))
    net = jitter(bt.encoder(4, heads=2, slices=1, readout=readout, pool=pool, transform="tanh", norm="pre")).to(D)
    s, p = net.sentence("the cat sat"), net.parameters
    words = torch.stack([s[f"norm_{i}"] for i in range(3)])
    pooled = {"first": words[0], "last": words[-1], "mean": words.mean(0), "sum": words.sum(0)}[pool]
    hidden = torch.tanh(p["dense.weight"] @ pooled + p["dense.bias"])
    expected = (p["y.weight"] @ hidden + p["y.logits"]).softmax(0)
    torch.testing.assert_close(s.tpm("y").probs, expected, rtol=1e-12, atol=1e-12)
    assert s.observe(y="bad") is not None
    x = s.state.encoded.given["embed"][None]
    torch.testing.assert_close(net.module().eval()(x)[0].exp(), expected, rtol=1e-10, atol=1e-10)


def test_readouts_of_words_pools_of_their_own_and_none():
    assert bt.encoder(4, heads=2, readout=Normal(0.5)).sentence("a b").parents("y_1") == ["x_6_1"]
    assert bt.decoder(4, heads=2, readout=Normal(0.5, pool="mean")).sentence("a b").parents("y") == ["x_6_0", "x_6_1"]
    for net in (bt.encoder(4, heads=2, vocabulary=3), bt.decoder(4, heads=2), bt.decoder(4, heads=2, readout=None)):
        assert "y" not in net.network.graph.by_stem
    assert "y" in bt.decoder(4, heads=2, vocabulary=3).network.graph.by_stem


# bad input


BAD = [
    (lambda: bt.encoder(10, heads=3), "heads: expected a divisor of dim, which is 10; got 3"),
    (lambda: bt.encoder(4, heads=2, activation="step"), "activation.*'relu'"),
    (lambda: bt.encoder(4, heads=2, dropout=1.0), "dropout.*below 1"),
    (lambda: bt.encoder(4, heads=2, mask="first"), "mask: expected a mask"),
    (lambda: bt.encoder(4, heads=2, positions="learned"), "words"),
    (lambda: bt.encoder(4, heads=2, words=9), "unless positions='learned'"),
    (lambda: bt.encoder(4, heads=2, positions=Sinusoid(6)), r"add.*shape \(4,\).*shape \(6,\)"),
    (lambda: bt.encoder(4, heads=2, readout="word"), "a vocabulary"),
    (lambda: bt.encoder(4, heads=2, readout=Normal(1.0), pool="max"), "'mean'"),
    (
        lambda: bt.encoder(4, heads=2, readout=Categorical(2, pool="mean"), pool="first"),
        "pool= and transform= do not apply",
    ),
    (lambda: bt.encoder(4, heads=2, transform="tanh"), "transform"),
    (lambda: bt.encoder_decoder(4, heads=2, mask={"cross": "causal"}), "cross.*no common order.*got causal"),
    (lambda: bt.encoder_decoder(4, heads=2, mask={"decoder": None}), "mask: .*allowed: enc, dec, cross"),
]


def test_bad_nets_are_refused():
    for make, message in BAD:
        with pytest.raises(bt.BNetError, match=message):
            print(message, make())


def test_positions_bound_the_words():
    net = bt.decoder(4, heads=2, slices=1, vocabulary=3, positions="learned", words=2)
    for call in (net.sentence, lambda words: net.module()(torch.tensor([words]))):
        with pytest.raises(bt.BNetError, match="at most 2 words"):
            call([0, 1, 2])
    assert bt.encoder(4, heads=2, positions=Positions(3, 4)).sentence("a b c").words == ("a", "b", "c")

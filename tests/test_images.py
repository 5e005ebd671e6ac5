"""Images as words: ViT of transformers as the oracle, patches against torch's convolution, hostile images."""

import re

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional

import bnet_transformer as bt
from bnet_transformer.pretrained import FAMILIES, from_hugging_face, from_pretrained, to_hugging_face
from bnet_transformer.pretrained.weights import canonicalize_key, map_parameters
from bnet_transformer.tpm import EvalContext, Given, Patches, Start
from tests.huggingface_models import VIT, D, init_model, set_config

ODD = {"hidden_size": 15, "num_attention_heads": 5, "hidden_act": "relu", "layer_norm_eps": 1e-5, "qkv_bias": False}
MODELS = [
    ("ViTForImageClassification", {**VIT, "num_labels": 3}),
    ("ViTForImageClassification", {**VIT, **ODD, "num_labels": 4}),
    ("ViTModel", {**VIT, "num_attention_heads": 1, "num_hidden_layers": 3, "image_size": 9, "patch_size": 4}),
    ("ViTModel", {**VIT, "num_channels": 1, "patch_size": [2, 3], "hidden_act": "gelu_new"}),
]
NODES = ("x_0_1", "x_1_3", "x_2_0", "q_1_2_3", "a_0_1_2", "mix_1_0", "norm1_0_2", "add1_1_1", "ffn_0_1", "norm_4")
NAMES = [f"{name} {k}" for k, (name, _) in enumerate(MODELS)]


def sample_images(net, count=2, dtype=D):
    grid = net.network.get_spec("patch").tpm.image
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, grid.channels, grid.rows, grid.columns, generator=generator, dtype=D).to(dtype)


def run_module(net, module, pixels):
    """Return our states except the last, the output of the final norm, the readout or pooled output, and attention
    weights."""
    batch = net.batch(list(pixels))
    readout = "classifier" if "classifier" in net.network.graph.by_name else "pooled"
    names = [*(f"x_{t}" for t in range(net.network.graph.slices[""] + 1)), "norm", readout]
    attn, values = module.attention_weights(batch.x, batch.mask, want=names)
    return [values[name] for name in names[:-2]], values["norm"], values[readout], attn


@pytest.mark.parametrize(("dtype", "tolerance", "attention"), [(D, 1e-9, "eager"), (torch.float32, 1e-4, "sdpa")])
@pytest.mark.parametrize(("name", "options"), MODELS, ids=NAMES)
def test_states_attention_and_readout_are_transformers(name, options, attention, dtype, tolerance):
    model = init_model(name, options, dtype, attention)
    net = from_pretrained(model)
    pixels = sample_images(net, dtype=dtype)
    peer = model(pixels, output_hidden_states=True, output_attentions=attention == "eager")
    states, normed, readout, attn = run_module(net, net.module().eval(), pixels)
    tolerances = {"rtol": tolerance, "atol": tolerance}
    for actual, expected in zip(states, peer.hidden_states, strict=True):
        torch.testing.assert_close(actual, expected, **tolerances)
    torch.testing.assert_close(readout, peer.logits if "logits" in peer else peer.pooler_output, **tolerances)
    if "last_hidden_state" in peer:
        torch.testing.assert_close(normed, peer.last_hidden_state, **tolerances)
    for t, expected in enumerate(peer.attentions or ()):
        torch.testing.assert_close(attn[f"a_{t}"], expected, **tolerances)
    s = net.sentence(pixels[1])
    torch.testing.assert_close(s["x_1_2"], peer.hidden_states[1][1, 2].detach(), **tolerances)
    assert s.words == net.network.get_spec("patch").tpm.image.tokens
    assert s.tokens.special == (True, *[False] * (len(s.words) - 1))


def test_gradients_are_transformers():
    model = init_model(*MODELS[0])
    net = from_pretrained(model)
    pixels, module = sample_images(net), net.module().eval()
    *_, readout, _ = run_module(net, module, pixels)
    weight = torch.linspace(-1, 1, readout.numel(), dtype=D).reshape(readout.shape)
    (model(pixels).logits * weight).sum().backward()
    names = [name.replace("/", ".") for name in module.store]
    actual = dict(zip(names, torch.autograd.grad((readout * weight).sum(), list(module.store.values())), strict=True))
    family = FAMILIES["vit"]
    peer_grads = {canonicalize_key(family, key): value.grad for key, value in model.named_parameters()}
    for entry in map_parameters(net.network, family):
        grad = entry.view(peer_grads[canonicalize_key(family, entry.keys[0])])
        torch.testing.assert_close(actual[entry.name], grad, rtol=1e-9, atol=1e-9 * float(grad.abs().max()) + 1e-12)


def test_a_folder_has_the_keys_of_before_and_is_read_as_the_model(tmp_path):
    model = init_model("ViTForImageClassification", {**VIT, "num_labels": 3}, torch.float32)
    model.save_pretrained(tmp_path)
    net, read = from_pretrained(model), from_pretrained(tmp_path)
    assert read.declaration == net.declaration
    assert all(value.equal(net.parameters[name]) for name, value in read.parameters.items())
    read.save(tmp_path / "net.safetensors")
    pixels = sample_images(net, dtype=torch.float32)
    again = bt.load(tmp_path / "net.safetensors").sentence(pixels[0])
    assert again["x_2_0"].equal(net.sentence(pixels[0])["x_2_0"])
    set_config(tmp_path, patch_size=[3, 4])
    with pytest.raises(bt.BNetError, match=r"projection.weight of shape \(12, 3, 3, 4\).*got shape \(12, 3, 4, 3\)"):
        from_pretrained(tmp_path)


def test_values_of_names_equal_our_nodes():
    model = init_model("ViTModel", VIT)
    net, observed = from_pretrained(model), {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda m, i, o, name=name: observed.update({f"{name}.output": o, f"{name}.input": i})
        )
    pixels = sample_images(net, 1)
    outputs = model(pixels, output_hidden_states=True, output_attentions=True)
    s = net.sentence(pixels[0])
    for node in NODES:
        peer = to_hugging_face(net, node)
        key, index = re.fullmatch(r"([^\[]*(?:\[\d+\])?)(\[:.*\])", peer).groups()
        value = eval(key, {"hidden_states": outputs.hidden_states}) if "hidden" in key else observed[key]
        value = value[0] if isinstance(value, tuple) else value
        torch.testing.assert_close(eval(f"value{index}")[0], s[node], rtol=1e-9, atol=1e-9)
        assert from_hugging_face(net, peer) == (node,)
    assert to_hugging_face(net, "start.vector") == "embeddings.cls_token"
    with pytest.raises(bt.UnknownNameError):
        to_hugging_face(net, "embed_1")  # the output of a convolution is no [batch, word, feature]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=5, max_size=5))
def test_patches_are_what_a_convolution_sees(sizes):
    channels, down, across, high, width = sizes
    grid = Patches(channels, down * high + high - 1, across * width + width - 1, high, width)
    image = torch.randn(channels, grid.rows, grid.columns, dtype=D)
    kernel = torch.randn(2, channels, high, width, dtype=D)
    peer = functional.conv2d(image[None], kernel, stride=(high, width))[0].flatten(1).mT
    patches = grid.patchify(image)
    torch.testing.assert_close(patches[1:] @ kernel.flatten(1).mT, peer, rtol=1e-10, atol=1e-10)
    assert not patches[0].any() and len(patches) == grid.words == len(grid.tokens)


def test_the_first_word_is_of_no_patch():
    """Its embedding is replaced by a learned vector; other words pass, and no arrow leads from a patch to it."""
    x = torch.arange(6.0).reshape(3, 2)
    actual = Start().value(EvalContext({"vector": torch.tensor([9.0, 8.0])}, word=torch.arange(3)), x)
    assert actual.equal(torch.tensor([[9.0, 8.0], [2.0, 3.0], [4.0, 5.0]]))
    net = from_pretrained(init_model("ViTModel", VIT))
    sentence = net.sentence(sample_images(net)[0])
    patches = sentence.state.encoded.given["patch"].clone()
    patches[0] = 5.0
    changed = net.sentence(x=patches)
    assert changed["x_2_1"].equal(sentence["x_2_1"]) and changed["x_0_0"].equal(sentence["x_0_0"])
    assert sentence.parents("start_0") == [] and sentence.parents("start_1") == ["embed_1"]
    assert sentence.separated("patch_0", "x_2_1") and not sentence.separated("patch_1", "x_2_0")


def test_a_vector_for_hidden_patches_is_of_no_use_where_none_is_hidden():
    model = init_model("ViTForMaskedImageModeling", {**VIT, "image_size": 12, "patch_size": 4})
    assert model.vit.embeddings.mask_token is not None
    pixels = torch.randn(1, 3, 12, 12, dtype=D)
    s = from_pretrained(model, readout=None).sentence(pixels[0])
    peer = model.vit(pixels).last_hidden_state[0]
    torch.testing.assert_close(s["norm_3"], peer[3].detach(), rtol=1e-5, atol=1e-6)


def test_invalid_images_are_refused():
    net = from_pretrained(init_model("ViTModel", VIT))
    pixels = sample_images(net)
    for wrong, match in (
        (["a", "cat"], "an image"),
        (pixels[0, :, :-1], r"got \(3, 8, 9\)"),
        (pixels[0] * torch.nan, "finite numbers"),
    ):
        with pytest.raises(bt.BNetError, match=match):
            net.sentence(wrong)
    with pytest.raises(bt.BNetError, match="at most the size of the image, 4 x 4; got 5 x 2"):
        Patches(1, 4, 4, 5, 2)
    with pytest.raises(bt.BNetError, match="a size of 12, the number of features of a patch"):
        Given(11, image=Patches(3, 4, 4, 2, 2))

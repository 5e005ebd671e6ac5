"""Decoders with rotary positions, grouped heads and windows equal those of transformers."""

import dataclasses
import math

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.models.builders import BlockBuilder
from bnet_transformer.pretrained import FAMILIES, from_pretrained
from bnet_transformer.tpm import Attention, Concat, Dot, Embed, Given, Parent, Rotary
from tests.huggingface_models import BERT, DISTIL, GPT2, LLAMA, MPNET, NEOX, D, T, init_model, set_config

GROUPED = {**LLAMA, "num_key_value_heads": 2}
LONG = {**BERT, "max_position_embeddings": 22}
LINEAR = {"rope_type": "linear", "factor": 3.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 4}
BANDS = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KNOWN = [
    ("LlamaConfig", {"rope_theta": 100.0}, Rotary(100.0)),
    ("LlamaConfig", {"rope_scaling": {"type": "linear", "factor": 3.0}}, Rotary(factor=3.0)),
    ("LlamaConfig", {"rope_parameters": {**LINEAR, "rope_theta": 50.0}}, Rotary(50.0, factor=3.0)),
    (
        "LlamaConfig",
        {"rope_theta": 5e5, "rope_scaling": {**BANDS, "original_max_position_embeddings": 16}},
        Rotary(5e5, None, 8.0, (1.0, 4.0, 16)),
    ),
    (
        "LlamaConfig",
        {"rope_scaling": {**BANDS, "original_max_position_embeddings": 16}, "original_max_position_embeddings": 24},
        Rotary(1e4, None, 8.0, (1.0, 4.0, 24)),
    ),
    ("LlamaConfig", {"rope_parameters": BANDS, "max_position_embeddings": 32}, Rotary(1e4, None, 8.0, (1.0, 4.0, 32))),
    ("Qwen2Config", {"rope_theta": 1e6}, Rotary(1e6)),
    ("GPTNeoXConfig", {}, Rotary(1e4, 4)),
    ("GPTNeoXConfig", {"head_dim": 32}, Rotary(1e4, 8)),
    ("GPTNeoXConfig", {"head_dim": 32, "rotary_pct": 0.5}, Rotary(1e4)),
    ("GPTNeoXConfig", {"rotary_pct": 1.0, "rotary_emb_base": 500}, Rotary(500)),
    ("GPTNeoXConfig", {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}}, Rotary(1e4, 8, 3.0)),
]


def read_rotary(kind, given):
    """The rotary positions that a family reads from a config."""
    return FAMILIES[kind].config_to_options(given, None, None).rotary


@pytest.mark.parametrize(("kind", "settings", "expected"), KNOWN)
def test_rotary_configs_are_read_with_current_and_former_keys(kind, settings, expected):
    """Current and former key names, from a file and from a config of transformers; the angles equal those of
    transformers."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    sizes |= {"num_key_value_heads": 4} if kind == "Qwen2Config" else {}
    config = getattr(T, kind)(**sizes, **settings)
    result = read_rotary(config.model_type, config.to_dict())
    assert result == read_rotary(config.model_type, {**sizes, **settings}) == expected
    module = T.AutoModel.from_config(config).rotary_emb
    torch.testing.assert_close(result.frequencies(16), module.inv_freq.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("kind", "settings", "match"),
    [
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "got yarn; allowed: default, linear, llama3"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor of the rope_parameters: expected a finite"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ("llama", {"rope_parameters": {**BANDS, "high_freq_factor": 0.5}}, "high of the rotary bands"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "same parameters for all slices"),
        (
            "llama",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "1, because the family rotates all features; got 0.5",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, not 1.0"),
        ("llama", {"num_key_value_heads": 3}, "a divisor of the 4 heads; got 3"),
        ("llama", {"head_dim": 5}, None),
        ("gpt_neox", {"rotary_pct": 1.5}, "at most 1; got 1.5"),
        ("gpt_neox", {"rotary_pct": 0.3}, "an even number"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "one attention type for all slices"),
        ("qwen2", {**SLIDING, "max_window_layers": 1}, "one attention type for all slices"),
    ],
)
def test_settings_without_an_equation_are_refused(kind, settings, match):
    sizes = {"hidden_size": 40, "num_attention_heads": 4, "num_hidden_layers": 2, **settings}
    if match is None:  # a separate head width; an odd width, which rotary pairs cannot use
        net = BlockBuilder(8, bias=False, heads=2, hidden=4, norm="pre", key_dim=5, score=Dot(None, Rotary()))
        stack = bt.Stack(net.build_slice(bt.Reach("causal")), [bt.Node("x", Given(8), plates=["word"])])
        with pytest.raises(bt.BNetError, match="an even width"):
            bt.BNet(bt.Declaration([stack], plates=net.plates))
        return
    with pytest.raises(bt.BNetError, match=match):
        FAMILIES[kind].config_to_options(sizes, None, None)


@pytest.mark.parametrize(
    ("kind", "settings", "reach"),
    [
        ("llama", {}, bt.Reach("causal")),
        ("mistral", {}, bt.Reach("recent", 4095)),
        ("mistral", {"sliding_window": None}, bt.Reach("causal")),
        ("mistral", {"sliding_window": 3, "layer_types": ["full_attention"] * 2}, bt.Reach("recent", 2)),
        ("qwen2", {}, bt.Reach("causal")),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": False, "max_window_layers": 0}, bt.Reach("causal")),
        ("qwen2", {**SLIDING, "max_window_layers": 0}, bt.Reach("recent", 3)),
        ("qwen2", SLIDING, bt.Reach("causal")),
        ("qwen2", {**SLIDING, "layer_types": ["sliding_attention"] * 2}, bt.Reach("recent", 3)),
    ],
)
def test_windows(kind, settings, reach):
    sizes = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    assert FAMILIES[kind].config_to_options({**sizes, **settings}, None, None).reach == reach


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LlamaForCausalLM", {**GROUPED, "is_causal": False}),
        ("MistralForCausalLM", {**GROUPED, "is_causal": False, "sliding_window": 3}),
        ("MistralForCausalLM", {**GROUPED, "layer_types": ["full_attention"] * 2, "sliding_window": 3}),
        ("Qwen2ForCausalLM", {**GROUPED, **SLIDING, "is_causal": False, "max_window_layers": 0}),
        ("GPTNeoXForCausalLM", {**NEOX, "is_causal": False, "head_dim": 16}),
        ("GPT2LMHeadModel", {**GPT2, "n_positions": 20, "is_causal": False}),
        ("BertLMHeadModel", {**LONG, "is_decoder": True, "is_causal": False}),
        ("RobertaForCausalLM", {**LONG, "is_decoder": True}),
        ("AlbertForMaskedLM", {**LONG, "is_decoder": True}),
        ("DistilBertForMaskedLM", {**DISTIL, "max_position_embeddings": 20, "is_decoder": True}),
        ("MPNetForMaskedLM", {**MPNET, "is_decoder": True}),
    ],
)
def test_the_mask_is_that_of_transformers(name, options):
    """Some settings apply only to some families: `is_causal` to all decoders, `is_decoder` to BERT and RoBERTa, the
    types of slices to Qwen2."""
    model = init_model(name, options, attention="sdpa" if getattr(T, name)._supports_sdpa else "eager")
    ids = torch.randint(2, 13, (2, 18), generator=torch.Generator().manual_seed(0))
    module = from_pretrained(model).module().eval()
    present = torch.arange(18) < torch.tensor([18, 5])[:, None]
    for mask in (None, present):
        peer = model(ids, attention_mask=None if mask is None else mask.long()).logits
        compared = torch.ones_like(present) if mask is None else mask
        logits = module(ids, mask, want=["logits"])["logits"]
        torch.testing.assert_close(logits[compared], peer[compared], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "add", "left"),
    [
        ("LlamaForCausalLM", {"lm_head.bias": 13}, "lm_head.bias"),
        ("LlamaForCausalLM", {"model.norm.bias": 16}, "model.norm.bias"),
        ("LlamaModel", {"norm.bias": 16}, "norm.bias"),
    ],
)
def test_leftover_weights_are_refused(name, add, left, tmp_path):
    from safetensors.torch import load_file, save_file

    init_model(name, LLAMA, torch.float32).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {key: torch.ones(n) for key, n in add.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        bt.BNetError, match=f"without other weights in its slices or in modules that are read; got {left}$"
    ):
        from_pretrained(tmp_path)
    if left == "lm_head.bias":
        assert from_pretrained(tmp_path, readout=None).sentence([3, 4])["norm_1"].isfinite().all()


def test_a_window_wider_than_a_sentence_is_causal():
    """In its values, and in the call of torch, which gets no mask."""
    options = {**LLAMA, "num_key_value_heads": 2}
    windowed = from_pretrained(init_model("MistralForCausalLM", {**options, "sliding_window": 20}))
    causal = from_pretrained(init_model("MistralForCausalLM", {**options, "sliding_window": None}))
    ids = torch.randint(13, (2, 20), generator=torch.Generator().manual_seed(0))
    actual, peer = (net.module()(ids, want=["logits"])["logits"] for net in (windowed, causal))
    assert actual.equal(peer)
    longer = torch.cat([ids, ids], 1)
    actual, peer = (net.module()(longer, want=["logits"])["logits"] for net in (windowed, causal))
    torch.testing.assert_close(actual[:, :20], peer[:, :20])
    assert (actual - peer)[:, 20:].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2}),
        ("MistralForCausalLM", {**LLAMA, "num_key_value_heads": 2, "sliding_window": 3}),
        ("GPTNeoXForCausalLM", NEOX),
    ],
)
def test_words_are_generated_as_transformers_does(name, options):
    model = init_model(name, options)
    prompts = torch.tensor([[3, 4, 5], [6, 7, 8]])
    peer = model.generate(prompts, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    result = from_pretrained(model).generate(prompts.tolist(), length=8)
    assert torch.tensor(result.ids).equal(peer[:, 3:])


def test_former_files_are_read(tmp_path):
    """Files of Pythia contain masks and angles, and name the readout `embed_out`."""
    model = init_model("GPTNeoXForCausalLM", NEOX, torch.float32)
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    assert "embed_out.weight" in tensors and "lm_head.weight" not in tensors
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 8, 8)
    tensors["gpt_neox.layers.1.attention.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors")
    set_config(tmp_path, rope_parameters=..., tie_word_embeddings=..., rotary_pct=0.25)
    net = from_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5, 6]])
    actual = net.module()(ids, want=["logits"])["logits"]
    torch.testing.assert_close(actual, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options"), [("LlamaModel", {**LLAMA, "num_key_value_heads": 2}), ("GPTNeoXModel", NEOX)]
)
def test_weights_are_mapped_without_a_copy(name, options):
    model = init_model(name, options)
    pointers = {value.untyped_storage().data_ptr() for value in model.parameters()}
    net = from_pretrained(model)
    assert {value.untyped_storage().data_ptr() for value in net.parameters.values()} == pointers
    assert net.network.shapes.keys() == net.parameters.keys()


def test_names_of_grouped_heads():
    net = from_pretrained(init_model("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2}))
    s = net.sentence([3, 4, 5])
    assert s.parents("a_1_1_0_2") == ["q_1_1_0_2", *(f"{r}_1_1_{j}" for r in "kv" for j in range(3))]
    assert net.graph().nodes["a_0"]["plates"] != net.graph().nodes["k_0"]["plates"]
    to_hugging_face = bt.pretrained.to_hugging_face
    assert to_hugging_face(net, "q_1_1_0_2") == "model.layers.1.self_attn.q_proj.output[:, 2, 8:12]"
    assert to_hugging_face(net, "k_1_1_*") == "model.layers.1.self_attn.k_proj.output[..., 4:8]"
    assert to_hugging_face(net, "a_1_1_*_*") == "model.layers.1.self_attn.o_proj.input[..., 8:16]"
    assert to_hugging_face(net, "j_1_1_*_2") == "attentions[1][:, 2:4, 2, :]"
    with pytest.raises(bt.BNetError, match="a group index from 0 to 1"):
        to_hugging_face(net, "k_1_2_0")
    reads = [s.reads(head=k).weights for k in range(4)]
    torch.testing.assert_close(torch.stack(reads).mean(0), s.reads().weights)
    with pytest.raises(bt.BNetError, match="a head, from 0 to 3; got 4"):
        s.reads(head=4)


# the TPMs


def test_a_rotation_is_a_complex_product():
    """The features beyond `width` are not rotated; low frequencies are divided, high ones are not."""
    x = torch.randn(5, 8, dtype=D, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 2, 7, 1000])
    rotary = Rotary(100.0, width=6, factor=3.0)
    angles = positions[:, None] * torch.tensor([1.0, 100 ** (-1 / 3), 100 ** (-2 / 3)], dtype=D) / 3
    rotated = torch.complex(x[:, :3], x[:, 3:6]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotary.rotate(x, positions), torch.cat([rotated.real, rotated.imag, x[:, 6:]], -1))
    bands = dataclasses.replace(rotary, bands=(1.0, 4.0, 100))
    plain, banded = Rotary(100.0, width=6).frequencies(8), bands.frequencies(8)
    num_rotations = 100 * plain / (2 * math.pi)
    for rotations, before, after in zip(num_rotations, plain, banded, strict=True):
        weight = min(max((float(rotations) - 1) / 3, 0), 1)
        assert float(after) == pytest.approx(float(before) * (weight + (1 - weight) / 3))
    half = x.to(torch.bfloat16)
    expected = Rotary().rotate(half.double(), positions)
    assert (Rotary().rotate(half, positions).double() - expected).abs().max() < 0.05  # at word 1000 too


def test_heads_in_groups_are_summed_as_heads():
    grouped, plain = Concat(plates=2), Concat()
    W_o, a = torch.randn(2, 3, 5, 4, dtype=D), torch.randn(7, 2, 3, 4, dtype=D)
    context = bt.tpm.EvalContext()
    actual = grouped.value(context, W_o, a)
    torch.testing.assert_close(actual, plain.value(context, W_o.flatten(0, 1), a.flatten(1, 2)))
    torch.testing.assert_close(actual, torch.einsum("ghoi,bghi->bo", W_o, a))
    concatenated = Concat(mapped=False, plates=2)
    assert concatenated.value(context, a).shape == (7, 24) and concatenated.shape(_heads((4,))) == (24,)
    with pytest.raises(bt.BNetError, match="2 plates of heads"):
        grouped.shape(_heads((5, 4), 1), _heads((4,), 1))
    with pytest.raises(bt.BNetError, match="a collection over one plate of heads"):
        plain.shape(_heads((5, 4)), _heads((4,)))


def _heads(shape, plates=2):
    over = (("group", 2), ("head", 3))[2 - plates :]
    return Parent("p", shape, over=over)


def test_equations_show_partial_rotation_and_windows():
    heads = [bt.Node("x", Embed(8), ["token"], plates=["word"])]
    token = bt.Node("token", Given(states=3), plates=["word"])

    def get_latex(rotary, reach="causal"):
        arrow = bt.Arrow("x", reach)
        node = bt.Node("x", Attention(Dot(None, rotary=rotary)), ["x", arrow, arrow], plates=["word"])
        return bt.BNet(bt.Declaration([bt.Stack([node], [token, *heads])])).equations().latex

    assert r"\text{ by the angle } i / (2 \cdot 100^{2e/4}) \text{ for } e < 2" in get_latex(Rotary(100.0, 4, 2.0))
    bands = get_latex(Rotary(100.0, factor=4.0, bands=(1.0, 3.0, 64)))
    assert r"g_e = 100^{-2e/8}" in bands and r"f_e = (s_e + \frac{1 - s_e}{4}) g_e" in bands
    assert r"\frac{1}{2} (\frac{64 g_e}{2 \pi} - 1)" in bands
    assert r"\sum_{i-2 \le j \le i}" in get_latex(None, bt.Reach("recent", 2))

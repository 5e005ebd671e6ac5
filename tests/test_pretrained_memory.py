"""Models in memory, changed after they were built: read as they compute (transformers is the oracle), or refused."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.pretrained import from_pretrained
from tests.hugging import D, T, random_model
from tests.test_families import TABLE
from tests.test_pretrained_configs import check_logits, saved


class Wrong(torch.nn.Module):
    """A module that no config makes."""

    def forward(self, x):
        return x * 2


ACTIVATIONS = {
    "albert": "albert.encoder.albert_layer_groups.0.albert_layers.0.activation",
    "bart": "model.decoder.layers.1.activation_fn",
    "bert": "bert.encoder.layer.1.intermediate.intermediate_act_fn",
    "distilbert": "distilbert.transformer.layer.1.ffn.activation",
    "gpt2": "transformer.h.1.mlp.act",
    "gpt_neox": "gpt_neox.layers.1.mlp.act",
    "llama": "model.layers.1.mlp.act_fn",
    "marian": "model.encoder.layers.1.activation_fn",
    "mistral": "model.layers.1.mlp.act_fn",
    "mpnet": "mpnet.encoder.layer.1.intermediate.intermediate_act_fn",
    "qwen2": "model.layers.1.mlp.act_fn",
    "roberta": "roberta.encoder.layer.1.intermediate.intermediate_act_fn",
    "t5": "decoder.block.1.layer.2.DenseReluDense.act",
    "vit": "vit.layers.1.mlp.activation_fn",
}
CHANGES = {  # settings that a model reads when it is built, or whenever it computes
    "albert": {"hidden_act": "relu", "num_attention_heads": 6, "layer_norm_eps": 0.5, "num_hidden_layers": 2},
    "bart": {"activation_function": "relu", "encoder_attention_heads": 6, "scale_embedding": True, "is_causal": False},
    "bert": {"hidden_act": "relu", "num_attention_heads": 6, "layer_norm_eps": 0.5, "is_decoder": True},
    "distilbert": {"activation": "relu", "n_heads": 6},
    "gpt2": {"activation_function": "relu", "n_head": 6, "layer_norm_epsilon": 0.5, "is_causal": False},
    "gpt_neox": {"hidden_act": "relu", "layer_norm_eps": 0.5, "use_parallel_residual": False, "is_causal": False},
    "llama": {"hidden_act": "relu", "rms_norm_eps": 0.5, "is_causal": False, "head_dim": 8},
    "marian": {"activation_function": "relu", "decoder_attention_heads": 6, "scale_embedding": True},
    "mistral": {"hidden_act": "relu", "rms_norm_eps": 0.5, "sliding_window": 2},
    "mpnet": {"hidden_act": "relu", "num_attention_heads": 6, "layer_norm_eps": 0.5},
    "qwen2": {"hidden_act": "relu", "rms_norm_eps": 0.5, "is_causal": False},
    "roberta": {"hidden_act": "relu", "num_attention_heads": 6, "layer_norm_eps": 0.5, "is_decoder": True},
    "t5": {
        "dense_act_fn": "silu",
        "d_kv": 6,
        "layer_norm_epsilon": 0.5,
        "is_causal": False,
        "relative_attention_max_distance": 9,
        "is_gated_act": True,
        "scale_decoder_outputs": False,
    },
    "vit": {"hidden_act": "relu", "num_attention_heads": 6, "layer_norm_eps": 0.5},
}
TURNED = ["llama", "mistral", "qwen2", "gpt_neox"]


def read_or_refused(model, sentence):
    """True where a model in memory is refused; else its logits are ours."""
    try:
        net = from_pretrained(model)
    except bt.BNetError:
        return True
    check_logits(net, model, sentence, 1e-9)
    return False


def held(name):
    """The tiny model of a family and a sentence."""
    kind, options, sentences = TABLE[name]
    return random_model(kind, options), sentences[0]


def test_every_family_is_changed():
    assert set(ACTIVATIONS) == set(CHANGES) == set(TABLE)


@pytest.mark.parametrize("name", list(TABLE))
def test_a_replaced_activation_is_refused(name):
    model, sentence = held(name)
    assert not read_or_refused(model, sentence)
    parent, _, last = ACTIVATIONS[name].rpartition(".")
    for other in (torch.nn.Tanh(), Wrong()):
        assert isinstance(getattr(model.get_submodule(parent), last), torch.nn.Module)
        setattr(model.get_submodule(parent), last, other)
        with pytest.raises(bt.BNetError, match=ACTIVATIONS[name]):
            from_pretrained(model)


@pytest.mark.parametrize(("name", "setting"), [(name, setting) for name in CHANGES for setting in CHANGES[name]])
def test_a_config_changed_after_building_is_read_or_refused(name, setting):
    model, sentence = held(name)
    setattr(model.config, setting, CHANGES[name][setting])
    refused = read_or_refused(model, sentence)
    assert refused or setting in ("is_causal", "scale_decoder_outputs", "num_hidden_layers", "sliding_window")


@pytest.mark.parametrize("name", list(TABLE))
def test_settings_of_modules_that_no_config_has_are_refused(name):
    model, sentence = held(name)
    for path, module in model.named_modules():
        for setting in ("eps", "variance_epsilon", "scaling", "num_heads", "embed_scale", "offset", "is_causal"):
            value = getattr(module, setting, None)
            if isinstance(value, int | float):
                setattr(module, setting, 0 if value is True else value + 1)
                assert read_or_refused(model, sentence), f"{path}.{setting}"
                setattr(module, setting, value)
    assert not read_or_refused(model, sentence)


@pytest.mark.parametrize("name", TURNED)
def test_a_base_of_rotary_positions_changed_after_building_is_refused(name):
    """Angles are buffers that are not saved: a model computes with those that it was built with."""
    model, sentence = held(name)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 50.0}
    assert read_or_refused(model, sentence) or name == "gpt_neox"  # of its two features that turn the angle is 1
    model, sentence = held(name)
    model.base_model.rotary_emb.inv_freq *= 1.01
    assert read_or_refused(model, sentence)


def test_positions_of_a_buffer_are_those_of_the_words():
    model, sentence = held("bert")
    model.bert.embeddings.position_ids = model.bert.embeddings.position_ids.flip(-1)
    assert read_or_refused(model, sentence)


@pytest.mark.parametrize("name", list(TABLE))
def test_changes_that_compute_the_same_are_read(name):
    """Settings of training, of generation, of labels; hooks that look; another attention; types; a bare dropout."""
    model, sentence = held(name)
    model.config.use_cache = False
    model.config.pad_token_id = model.config.pad_token_id if name in ("roberta", "mpnet") else 3
    model.config.eos_token_id = 4
    model.train()
    for path, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.7
            parent, _, last = path.rpartition(".")
            setattr(model.get_submodule(parent), last, torch.nn.Identity())
    model.register_forward_hook(lambda *_: None)
    model.requires_grad_(False)
    assert not read_or_refused(model.eval(), sentence)
    for dtype in (torch.float32, torch.bfloat16):
        from_pretrained(model.to(dtype))
    if name != "vit":
        model = random_model(*TABLE[name][:2], torch.float32)
        model.resize_token_embeddings(15, mean_resizing=False)
        check_logits(from_pretrained(model), model, sentence, 1e-4)


@pytest.mark.parametrize("name", list(TABLE))
def test_a_model_that_transformers_has_loaded_is_read(name, tmp_path):
    """In the type of its file or another, tables tied on loading, and angles that are kept in float32."""
    kind, sentence = saved(name, tmp_path)
    model = kind.from_pretrained(tmp_path).eval()
    check_logits(from_pretrained(model), model, sentence)
    assert from_pretrained(kind.from_pretrained(tmp_path, dtype=torch.bfloat16)).check()


def test_fewer_slices_of_a_changed_config_are_read():
    """Slices that are left out, in the model and in its config."""
    model, sentence = held("bert")
    model.bert.encoder.layer = model.bert.encoder.layer[1:]
    assert read_or_refused(model, sentence)
    model.config.num_hidden_layers = 1
    assert not read_or_refused(model, sentence)


def test_a_model_without_its_pooler_is_read():
    settings = T.BertConfig(**TABLE["bert"][1])
    model = T.BertModel(settings, add_pooling_layer=False).to(D).eval()
    net = from_pretrained(model)
    with torch.no_grad():
        torch.testing.assert_close(net.sentence([3, 4])["x_2_1"], model(torch.tensor([[3, 4]]))[0][0, 1])


def test_what_checks_a_model_leaves_the_state_of_torch():
    model, _ = held("gpt2")
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    from_pretrained(model)
    assert torch.rand(3).equal(wanted)
    assert not torch.nn.Linear(2, 2).weight.is_meta

"""Models in memory, changed after they were built: read as they compute (transformers is the oracle), or an error."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.pretrained import from_pretrained
from tests.huggingface_models import D, T, init_model
from tests.test_families import TABLE
from tests.test_pretrained_configs import check_logits, save_model


class DoublingModule(torch.nn.Module):
    """A module that no config creates."""

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
CHANGES = {  # settings that a model reads at construction, or in each forward pass
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
SIX = pytest.mark.parametrize("name", ["albert", "bert", "gpt2", "llama", "t5", "vit"])
ROTARY = ["llama", "mistral", "qwen2", "gpt_neox"]


def read_or_refuse(model, sentence):
    """Return whether a model in memory raises an error; otherwise check that its logits are ours."""
    try:
        net = from_pretrained(model)
    except bt.BNetError:
        return True
    check_logits(net, model, sentence, 1e-9)
    return False


def make_model(name):
    """The tiny model of a family and a sentence."""
    kind, options, sentences = TABLE[name]
    return init_model(kind, options), sentences[0]


def test_every_family_is_changed():
    assert set(ACTIVATIONS) == set(CHANGES) == set(TABLE)


@pytest.mark.parametrize("name", list(TABLE))
def test_a_replaced_activation_is_refused(name):
    model, sentence = make_model(name)
    assert not read_or_refuse(model, sentence)
    parent, _, attribute = ACTIVATIONS[name].rpartition(".")
    assert isinstance(getattr(model.get_submodule(parent), attribute), torch.nn.Module)
    setattr(model.get_submodule(parent), attribute, torch.nn.Tanh() if name in ("bert", "t5") else DoublingModule())
    with pytest.raises(bt.BNetError, match=ACTIVATIONS[name]):
        from_pretrained(model)


@pytest.mark.parametrize("name", list(TABLE))
def test_a_config_changed_after_building_is_read_or_refused(name):
    for setting, value in CHANGES[name].items():
        model, sentence = make_model(name)
        setattr(model.config, setting, value)
        assert read_or_refuse(model, sentence) or setting in READ, setting


READ = ("is_causal", "scale_decoder_outputs", "num_hidden_layers", "sliding_window")
SETTINGS = ("eps", "variance_epsilon", "scaling", "num_heads", "embed_scale", "offset", "is_causal")


@SIX
def test_settings_of_modules_that_no_config_has_are_refused(name):
    """One module of each class; the last, which is deepest."""
    model, sentence = make_model(name)
    modules = {type(module): (path, module) for path, module in model.named_modules()}
    for path, module in modules.values():
        for setting in SETTINGS:
            value = getattr(module, setting, None)
            if isinstance(value, int | float):
                setattr(module, setting, 0 if value is True else value + 1)
                assert read_or_refuse(model, sentence), f"{path}.{setting}"
                setattr(module, setting, value)
    assert not read_or_refuse(model, sentence)


@pytest.mark.parametrize("name", ROTARY)
def test_a_base_of_rotary_positions_changed_after_building_is_refused(name):
    """Angles are buffers that are not saved: a model keeps the angles of its construction."""
    model, sentence = make_model(name)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 50.0}
    assert read_or_refuse(model, sentence) or name == "gpt_neox"  # it has two rotary features, so the angle is 1
    model, sentence = make_model(name)
    model.base_model.rotary_emb.inv_freq *= 1.01
    assert read_or_refuse(model, sentence)


CASTS = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "half and back": lambda model: model.half().float(),
    "to": lambda model: model.to(torch.bfloat16).to(D),
}


@pytest.mark.parametrize(("name", "cast"), list(zip(ROTARY, CASTS, strict=True)))
def test_a_cast_that_rounds_the_angles_is_refused(name, cast):
    """A cast model computes with rounded angles, in float32; the net's are exact."""
    kind, options, _ = TABLE[name]
    if name == "gpt_neox":
        options = {**options, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rotary_pct": 1.0}
    model = CASTS[cast](init_model(kind, options, torch.float32))
    with pytest.raises(bt.BNetError, match="inv_freq"):
        from_pretrained(model)
    exact = init_model(kind, options, torch.float32)
    model.base_model.rotary_emb.inv_freq = exact.base_model.rotary_emb.inv_freq
    assert from_pretrained(model).check()


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_types_that_leave_the_angles_are_read(name, tmp_path):
    """The advice of the error for a cast: 1,500 words as `transformers` reads them, with angles in float32."""
    kind = getattr(T, TABLE[name][0])
    init_model(TABLE[name][0], {**TABLE[name][1], "hidden_size": 64}, torch.float32).save_pretrained(tmp_path)
    words = (torch.arange(1500) * 7 % 13).tolist()
    loaded, oracle = (kind.from_pretrained(tmp_path, dtype=torch.bfloat16).eval() for _ in range(2))
    net = from_pretrained(loaded, dtype=torch.float32)
    check_logits(net, oracle.float(), words, 1e-3)
    if name == "llama":  # its tiny model shows the effect of rounded angles: gpt_neox rotates fewer features
        with pytest.raises(AssertionError):
            check_logits(net, oracle.bfloat16().float(), words, 1e-3)
    cast = from_pretrained(kind.from_pretrained(tmp_path, dtype=torch.float32), dtype=torch.bfloat16)
    assert cast.network.dtype == torch.bfloat16


def test_positions_of_a_buffer_are_those_of_the_words():
    model, sentence = make_model("bert")
    model.bert.embeddings.position_ids = model.bert.embeddings.position_ids.flip(-1)
    assert read_or_refuse(model, sentence)


@SIX
def test_changes_that_compute_the_same_are_read(name):
    """Settings of training, generation and labels; hooks without effect; types; removed dropout."""
    model, sentence = make_model(name)
    model.config.use_cache = False
    model.config.pad_token_id = model.config.pad_token_id if name in ("roberta", "mpnet") else 3
    model.config.eos_token_id = 4
    model.train()
    for path, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.7
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, torch.nn.Identity())
    model.register_forward_hook(lambda *_: None)
    model.requires_grad_(False)
    assert not read_or_refuse(model.eval(), sentence)
    del model.forward  # it computes in float64
    for dtype in (torch.float32,) if name in ROTARY else (torch.float32, torch.bfloat16):  # this rounds angles
        from_pretrained(model.to(dtype))
    if name != "vit":
        model = init_model(*TABLE[name][:2], torch.float32)
        model.resize_token_embeddings(15, mean_resizing=False)
        check_logits(from_pretrained(model), model, sentence, 1e-4)


@SIX
def test_a_model_that_transformers_has_loaded_is_read(name, tmp_path):
    """In the type of its file or another, tables tied on loading, and angles that stay in float32."""
    kind, sentence = save_model(name, tmp_path)
    model = kind.from_pretrained(tmp_path).eval()
    check_logits(from_pretrained(model), model, sentence)
    assert from_pretrained(kind.from_pretrained(tmp_path, dtype=torch.bfloat16)).check()


def test_fewer_slices_of_a_changed_config_are_read():
    """Slices that are omitted, in the model and in its config."""
    model, sentence = make_model("bert")
    model.bert.encoder.layer = model.bert.encoder.layer[1:]
    assert read_or_refuse(model, sentence)
    model.config.num_hidden_layers = 1
    assert not read_or_refuse(model, sentence)


def test_a_model_without_its_pooler_is_read():
    settings = T.BertConfig(**TABLE["bert"][1])
    model = T.BertModel(settings, add_pooling_layer=False).to(D).eval()
    net = from_pretrained(model)
    with torch.no_grad():
        torch.testing.assert_close(net.sentence([3, 4])["x_2_1"], model(torch.tensor([[3, 4]]))[0][0, 1])


def test_what_checks_a_model_leaves_the_state_of_torch():
    model, _ = make_model("gpt2")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    from_pretrained(model)
    assert torch.rand(3).equal(expected)
    assert not torch.nn.Linear(2, 2).weight.is_meta


class FixedModel(T.BertModel):
    """A class whose constructor takes no config."""

    def __init__(self):
        super().__init__(T.BertConfig(**TABLE["bert"][1]))


class GPT2LMHeadModel(T.GPT2LMHeadModel):
    """A class with the name of its base, whose constructor takes another argument."""

    def __init__(self, settings, extra):
        super().__init__(settings)


def test_classes_whose_constructors_take_other_arguments_are_read():
    sentence = [3, 4]
    fixed = FixedModel().to(D).eval()
    with torch.no_grad():
        expected = fixed(torch.tensor([sentence]))[0][0, 1]
    torch.testing.assert_close(from_pretrained(fixed).sentence(sentence)["x_2_1"], expected)
    same_name = GPT2LMHeadModel(T.GPT2Config(**TABLE["gpt2"][1]), 3).to(D).eval()
    assert not read_or_refuse(same_name, sentence)
    same_name.transformer.h[1].mlp.act = DoublingModule()
    assert read_or_refuse(same_name, sentence)


@pytest.mark.parametrize("name", ["gpt2"])
def test_a_compiled_model_is_read(name):
    model, sentence = make_model(name)
    check_logits(from_pretrained(torch.compile(model, backend="eager")), model, sentence, 1e-9)


@pytest.mark.parametrize("name", ["qwen2", "gpt_neox"])
def test_a_longest_sentence_changed_after_building_is_read(name):
    """Angles that do not depend on the length are the same for any length."""
    model, sentence = make_model(name)
    model.config.max_position_embeddings *= 4
    assert not read_or_refuse(model, sentence)


@pytest.mark.parametrize("name", ["albert", "distilbert"])
def test_chunks_of_a_feed_forward_net_are_read(name):
    model, sentence = make_model(name)
    model.config.chunk_size_feed_forward = 5
    assert not read_or_refuse(model, sentence)


def test_a_plain_table_is_read_where_the_scale_is_one():
    model, sentence = make_model("bart")
    table = torch.nn.Embedding(13, 12).to(D)
    model.set_input_embeddings(table)
    assert not read_or_refuse(model, sentence)
    kind, options, _ = TABLE["bart"]
    model = init_model(kind, {**options, "scale_embedding": True})
    model.set_input_embeddings(table)
    assert read_or_refuse(model, sentence)
    model, sentence = make_model("bart")
    positions = model.model.decoder.embed_positions
    model.model.decoder.embed_positions = torch.nn.Embedding(*positions.weight.shape).to(D)
    with pytest.raises(bt.BNetError):  # the class adds 2 to a position
        from_pretrained(model)


def test_a_class_of_the_same_name_is_distinguished():
    class Linear(torch.nn.Linear):
        pass

    model, _ = make_model("bert")
    model.bert.encoder.layer[0].attention.self.query = Linear(12, 12)
    with pytest.raises(bt.BNetError) as error:
        from_pretrained(model)
    assert error.value.expected.split(",")[0] != error.value.actual
    assert Linear.__module__ in error.value.actual

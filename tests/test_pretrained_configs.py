"""The config.json of a folder: transformers' models and config classes as oracles."""

import sys

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.errors import FileError
from bnet_transformer.pretrained import FAMILIES, from_pretrained
from bnet_transformer.pretrained.family import IRRELEVANT_KEYS, load_config
from tests.huggingface_models import T, init_model, set_config
from tests.test_families import TABLE

ALIASED = ["gpt2", "distilbert", "bart", "marian", "t5"]


def tensor_ids(sentence):
    """Return the inputs of transformers for a sentence of the table."""
    if isinstance(sentence, dict):
        return {"input_ids": torch.tensor([sentence["enc"]]), "decoder_input_ids": torch.tensor([sentence["dec"]])}
    is_image = isinstance(sentence, torch.Tensor)
    return {"pixel_values": sentence[None]} if is_image else {"input_ids": torch.tensor([sentence])}


def check_logits(net, model, sentence, tolerance=1e-5):
    """Check that our logits equal those of a model of transformers."""
    with torch.no_grad():
        peer = model(**tensor_ids(sentence)).logits
        role = next(name for name in ("dec_logits", "logits", "classifier") if name in net.network.graph.by_name)
        batch = net.batch([sentence])
        actual = net.module().eval()(batch.x, batch.mask, given=batch.given, want=[role])[role]
    torch.testing.assert_close(actual.to(peer.dtype), peer, rtol=tolerance, atol=tolerance)


def save_model(name, folder, dtype=torch.float32):
    """Save the tiny model of a family; return the folder, its class and a sentence."""
    kind, options, sentences = TABLE[name]
    model = init_model(kind, options, dtype)
    model.save_pretrained(folder)
    sentence = sentences[0].to(dtype) if isinstance(sentences[0], torch.Tensor) else sentences[0]
    return getattr(T, kind), sentence


@pytest.mark.parametrize("name", list(TABLE))
def test_a_folder_is_read_as_transformers_reads_it(name, tmp_path):
    kind, sentence = save_model(name, tmp_path)
    check_logits(from_pretrained(tmp_path), kind.from_pretrained(tmp_path).eval(), sentence)


@pytest.mark.parametrize("name", ALIASED)
def test_alternative_names_of_settings_are_read(name, tmp_path):
    """Each name of the config class's attribute_map, together with the canonical name and another value, which is
    ignored."""
    kind, sentence = save_model(name, tmp_path)
    settings = kind.config_class.from_pretrained(tmp_path)
    changes = {}
    for alias, canonical in kind.config_class.attribute_map.items():
        changes |= {alias: getattr(settings, canonical), canonical: getattr(settings, canonical) * 2}
    if name == "t5":  # the number of decoder slices has its canonical name
        changes["num_decoder_layers"] = settings.num_decoder_layers
    set_config(tmp_path, **changes)
    model = kind.from_pretrained(tmp_path).eval()
    check_logits(from_pretrained(tmp_path), model, sentence)


def iter_configs():
    """Return settings of each family in the form of a config.json."""
    for name, (_, options, _) in TABLE.items():
        yield name, options
        yield name, {}
        for alias, canonical in getattr(T, TABLE[name][0]).config_class.attribute_map.items():
            remaining = {key: value for key, value in options.items() if key != canonical}
            if canonical in options:
                yield name, {**remaining, alias: options[canonical]}
                yield name, {**options, alias: options[canonical] * (1 if alias == "num_attention_heads" else 2)}
    for projection in ("relu", "gated-gelu", "gated-silu", "gelu"):
        yield "t5", {**TABLE["t5"][1], "feed_forward_proj": projection}
        yield "t5", {**TABLE["t5"][1], "feed_forward_proj": projection, "dense_act_fn": "tanh", "is_gated_act": True}
    yield "t5", {"num_hidden_layers": 3}
    yield "t5", {"tie_word_embeddings": False}
    yield "t5", {"tie_word_embeddings": False, "scale_decoder_outputs": True}
    yield "bert", {"num_labels": 5}
    yield "qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
    yield "qwen2", {"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 0}
    yield "llama", {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    yield "gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 500}
    yield "marian", {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 17}


def test_configs_are_read_equally_without_transformers(monkeypatch):
    """The oracle is the config class; without it, the family's table of names and defaults gives the same result."""
    cases = [(FAMILIES[name], {"model_type": name, **settings}) for name, settings in iter_configs()]
    expected = []
    for family, raw in cases:
        settings = {key: value for key, value in raw.items() if key != "model_type"}
        expected.append(family.config_to_options(T.AutoConfig.for_model(family.name, **settings).to_dict(), None, None))
        assert family.config_to_options(load_config(family, raw, "test"), None, None) == expected[-1], raw
    for module in [module_name for module_name in sys.modules if module_name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for (family, raw), options in zip(cases, expected, strict=True):
        assert load_config(family, raw, "test") == raw
        assert family.config_to_options(raw, None, None) == options, raw


def test_alternative_names_are_those_of_the_config_classes():
    for name, family in FAMILIES.items():
        assert family.aliases == T.AutoConfig.for_model(name).attribute_map


def test_a_folder_is_read_without_transformers(tmp_path, monkeypatch):
    kind, sentence = save_model("gpt2", tmp_path)
    set_config(tmp_path, n_head=..., num_attention_heads=3)
    model = kind.from_pretrained(tmp_path).eval()
    monkeypatch.setitem(sys.modules, "transformers", None)
    check_logits(from_pretrained(tmp_path), model, sentence)


@pytest.mark.parametrize(
    ("projection", "activation"), [("relu", "tanh"), ("gated-gelu", "gelu"), ("gated-relu", "silu")]
)
def test_an_explicit_activation_of_t5_is_read(projection, activation, tmp_path):
    kind, options, sentences = TABLE["t5"]
    options = {**options, "feed_forward_proj": projection, "dense_act_fn": activation}
    model = init_model(kind, options)
    check_logits(from_pretrained(model), model, sentences[0], 1e-9)
    init_model(kind, options, torch.float32).save_pretrained(tmp_path)
    check_logits(from_pretrained(tmp_path), getattr(T, kind).from_pretrained(tmp_path).eval(), sentences[0])


@pytest.mark.parametrize("projection", ["relu", "gated-gelu", "gated-quick_gelu", "mish"])
def test_an_activation_that_no_family_has_is_refused_in_t5(projection, tmp_path):
    kind, options, _ = TABLE["t5"]
    explicit = {} if projection in ("gated-quick_gelu", "mish") else {"dense_act_fn": "quick_gelu"}
    model = init_model(kind, {**options, "feed_forward_proj": projection, **explicit}, torch.float32)
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path):
        with pytest.raises(bt.BNetError, match="a supported activation"):
            from_pretrained(source)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_slices_that_differ_are_refused(name, tmp_path):
    """A config may give a single slice different settings, which no family supports."""
    kind, options, _ = TABLE[name]
    overrides = {"0": {next(key for key in ("hidden_act", "activation", "activation_function", "dense_act_fn")
                      if key in getattr(T, kind).config_class().to_dict()): "tanh"}}  # fmt: skip
    model = init_model(kind, options, torch.float32)
    model.save_pretrained(tmp_path)
    set_config(tmp_path, per_layer_config=overrides)
    model.config.per_layer_config = overrides
    for source in (tmp_path, model):
        with pytest.raises(bt.BNetError):
            from_pretrained(source)


@pytest.mark.parametrize("name", list(TABLE))
def test_a_setting_that_no_rule_reads_is_refused_by_name(name, tmp_path):
    kind, options, _ = TABLE[name]
    model = init_model(kind, options, torch.float32)
    model.save_pretrained(tmp_path)
    set_config(tmp_path, residual_multiplier=0.5)
    model.config.residual_multiplier = 0.5
    for source in (tmp_path, model):
        with pytest.raises(bt.BNetError, match=r"residual_multiplier=0\.5"):
            from_pretrained(source)
    for setting, value in (("is_turbo", False), ("eps", 0.5)):  # also a name of this library; as without transformers
        with pytest.raises(bt.BNetError, match=f"{setting}="):
            FAMILIES[name].config_to_options({**options, setting: value}, None, None)


@pytest.mark.parametrize(
    "setting",
    ["dropless_scale", "scale_token_ids", "attention_version", "summary_scale", "no_flash_attn_scale", "dropout_scale"],
)
def test_an_invented_setting_with_a_known_word_is_refused(setting):
    for value in (2.0, False, 0, [], {}):  # a value that is off or empty may replace a default that is on
        with pytest.raises(bt.BNetError, match=f"{setting}="):
            FAMILIES["llama"].config_to_options({**TABLE["llama"][1], setting: value}, None, None)
    assert FAMILIES["llama"].config_to_options({**TABLE["llama"][1], setting: None}, None, None)


PUBLISHED = {  # settings in the config.json of published models that no model of transformers reads
    "albert": {"net_structure_type": 0, "gap_size": 0, "layers_to_keep": [], "position_embedding_type": "absolute"},
    "bart": {
        "_num_labels": 3,
        "classif_dropout": 0.0,
        "normalize_before": False,
        "extra_pos_embeddings": 2,
        "prefix": " ",
    },
    "bert": {"directionality": "bidi", "pooler_type": "first_token_transform", "gradient_checkpointing": False},
    "distilbert": {"sinusoidal_pos_embds": False, "tie_weights_": True},
    "gpt2": {
        "n_ctx": 1024,
        "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"max_length": 50}},
    },
    "llama": {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}, "unsloth_version": "1"},
    "marian": {"static_position_embeddings": True, "bad_words_ids": [[1]], "num_beams": 6},
    "qwen2": {"use_mrope": False, "torch_dtype": "bfloat16"},
    "t5": {"n_positions": 512, "output_past": True},
    "vit": {"encoder_stride": 16},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_of_published_models_are_accepted(name, tmp_path):
    save_model(name, tmp_path)
    set_config(tmp_path, **PUBLISHED[name])
    assert from_pretrained(tmp_path, check=True).declaration.name == name


def test_an_unread_parameter_of_rotary_positions_is_refused():
    rope = {"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 1]}
    with pytest.raises(bt.BNetError, match="mrope_section"):
        FAMILIES["llama"].config_to_options({**TABLE["llama"][1], "rope_parameters": rope}, None, None)


def alter(value):
    """Return another value of a setting: of the same type, and in the range of any share."""
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value / 2 + 0.1


@pytest.mark.parametrize("name", list(TABLE))
def test_settings_of_a_family_change_its_options_or_no_value(name):
    """Each number and switch in the defaults of a config class. Settings that are read change the options. Others raise
    an error, or they are irrelevant: then the logits of transformers are the same for all of them at once."""
    kind, options, sentences = TABLE[name]
    family, defaults = FAMILIES[name], getattr(T, kind).config_class(**options).to_dict()
    expected, altered = family.config_to_options(defaults, None, None), {}
    for key, value in defaults.items():
        is_read = key in family.read_keys and key not in family.unsupported
        if not isinstance(value, int | float) or key == "return_dict" or (is_read and key in CONDITIONAL):
            continue
        try:
            actual = family.config_to_options({**defaults, key: alter(value)}, None, None)
        except bt.BNetError:
            continue
        assert (actual != expected) == is_read, key
        if not is_read:
            altered[key] = alter(value)
    assert len(altered) > 3
    model = init_model(kind, options, torch.float32)
    other = init_model(kind, {**options, **altered}, torch.float32)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        inputs = {key: x.float() if x.is_floating_point() else x for key, x in tensor_ids(sentences[0]).items()}
        torch.testing.assert_close(other(**inputs).logits, model(**inputs).logits, rtol=1e-6, atol=1e-6)
    assert all(IRRELEVANT_KEYS.fullmatch(key) or key in family.irrelevant for key in altered)


# Settings that are read only together with another one: the window of Qwen2, the readouts, the length of rotary nets.
CONDITIONAL = (
    "use_sliding_window",
    "max_window_layers",
    "tie_word_embeddings",
    "max_position_embeddings",
    "is_decoder",
)
CONDITIONAL += ("decoder_vocab_size",)


HOSTILE = [
    {"num_hidden_layers": 10**9},
    {"n_layer": 10**9},
    {"num_labels": 10**12},
    {"num_labels": "many"},
    {"n_head": "three"},
    {"to_dict": 3},
    {"__class__": "x"},
    {"__dict__": {}},
    {"self": 3},
    {"id2label": [1, 2]},
]


def test_hostile_configs_are_refused(tmp_path):
    save_model("gpt2", tmp_path)
    valid = (tmp_path / "config.json").read_text()
    for changes in HOSTILE:
        (tmp_path / "config.json").write_text(valid)
        set_config(tmp_path, **changes)
        with pytest.raises(bt.BNetError):
            print(changes, from_pretrained(tmp_path))


def test_a_config_that_transformers_refuses_is_refused(tmp_path):
    save_model("llama", tmp_path)
    set_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": "far"})
    with pytest.raises(bt.BNetError):
        from_pretrained(tmp_path)
    set_config(tmp_path, rope_parameters=..., initializer_range="far")
    with pytest.raises(FileError):
        from_pretrained(tmp_path)

"""Encoder-decoders (T5, BART, Marian) equal those of transformers; names, text, and errors."""

import re

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.pretrained import FAMILIES, from_hugging_face, from_pretrained, to_hugging_face, to_lens
from bnet_transformer.pretrained.weights import canonicalize_key, map_parameters
from bnet_transformer.tpm import Buckets
from tests.huggingface_models import BART, T5, D, T, init_model, set_config

LONG = {**BART, "max_position_embeddings": 20}
SMALL = {"d_model": 15, "encoder_attention_heads": 5, "decoder_attention_heads": 5, "activation_function": "relu"}
SEPARATE_VOCABULARIES = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 17}
MODELS = [
    ("T5ForConditionalGeneration", T5),
    ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 9}),
    ("T5Model", {**T5, "num_heads": 1, "d_kv": 12, "num_layers": 1, "num_decoder_layers": None}),
    ("BartForConditionalGeneration", LONG),
    ("BartForConditionalGeneration", {**LONG, **SMALL, "tie_word_embeddings": False, "scale_embedding": True}),
    ("BartModel", {**LONG, "encoder_layers": 1, "encoder_attention_heads": 1, "decoder_attention_heads": 1}),
    ("MarianMTModel", {**LONG, "scale_embedding": True}),
    ("MarianMTModel", {**LONG, **SMALL, **SEPARATE_VOCABULARIES}),
    ("MarianMTModel", {**LONG, "tie_word_embeddings": False, "activation_function": "swish"}),
    ("MarianModel", {**LONG, "encoder_layers": 3, "decoder_layers": 1}),
]
NAMES = [f"{name} {k}" for k, (name, _) in enumerate(MODELS)]
SLOW = (2, 3, 6, 9, 10)  # variants of models that other tests cover
EVERY_MODEL = pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(*model, marks=[pytest.mark.slow] * (k in SLOW)) for k, model in enumerate(MODELS)],
    ids=NAMES,
)


def make_padded():
    """Ids `[3, word]` of sentences of different lengths for each stack, and their masks."""
    generator = torch.Generator().manual_seed(0)
    ids = {"enc": torch.randint(2, 13, (3, 18), generator=generator)}
    ids["dec"] = torch.randint(2, 13, (3, 5), generator=generator)
    lengths = {"enc": torch.tensor([18, 4, 1]), "dec": torch.tensor([2, 5, 1])}
    return ids, {stack: torch.arange(value.shape[1]) < lengths[stack][:, None] for stack, value in ids.items()}


def run_peer(model, ids, present, **options):
    """The outputs of transformers for both sentences."""
    masks = {"attention_mask": present["enc"].long(), "decoder_attention_mask": present["dec"].long()}
    return model(input_ids=ids["enc"], decoder_input_ids=ids["dec"], **masks, output_hidden_states=True, **options)


def run_net(net, module, ids, present):
    """Return the states of both stacks from the first to the last slice, and the logits, of a net."""
    graph, names_of = net.network.graph, {}
    for stack, slices in graph.slices.items():
        last = f"{stack}_norm" if f"{stack}_norm" in graph.by_name else f"{stack}_x_{slices}"
        names_of[stack] = [*(f"{stack}_x_{t}" for t in range(slices)), last]
    logits = ["dec_logits"] if "dec_logits" in graph.by_name else []
    values = module(ids, present, want=[*names_of["enc"], *names_of["dec"], *logits])
    return {stack: [values[name] for name in names] for stack, names in names_of.items()}, [values[x] for x in logits]


def check_states(model, net, exact):
    """Assert that states of both stacks and logits equal those of a model of transformers."""
    ids, present = make_padded()
    peer = run_peer(model, ids, present)
    result = run_net(net, net.module().eval(), ids, present)
    tolerances = {"rtol": exact, "atol": exact}
    for stack, states in (("enc", peer.encoder_hidden_states), ("dec", peer.decoder_hidden_states)):
        assert len(result[0][stack]) == len(states)
        for value, expected in zip(result[0][stack], states, strict=True):
            torch.testing.assert_close(value[present[stack]], expected[present[stack]], **tolerances)
    assert bool(result[1]) == hasattr(peer, "logits")
    for value in result[1]:
        torch.testing.assert_close(value[present["dec"]], peer.logits[present["dec"]], **tolerances)


@pytest.mark.parametrize("k", [1, 5, 8])
def test_states_in_single_precision_are_those_of_fused_attention(k):
    name, options = MODELS[k]
    model = init_model(name, options, torch.float32, "sdpa")
    check_states(model, from_pretrained(model), 1e-4)


@EVERY_MODEL
def test_states_attention_and_gradients_are_transformers(name, options):
    model = init_model(name, options)
    net, family = from_pretrained(model), FAMILIES[model.config.model_type]
    check_states(model, net, 1e-9)
    ids, present = make_padded()
    s = net.sentence({stack: item[0] for stack, item in ids.items()})
    first_ids = {stack: item[:1] for stack, item in ids.items()}
    first = run_peer(model, first_ids, all_present(first_ids), output_attentions=True)
    peer = run_peer(model, ids, present, output_attentions=True)
    module = net.module().eval()
    attention, _ = module.attention_weights(ids, present, want=[f"dec_x_{net.network.graph.slices['dec']}"])
    for role, kind, rows in (("enc_a", "encoder", "enc"), ("dec_a", "decoder", "dec"), ("dec_cross_a", "cross", "dec")):
        for t, expected in enumerate(getattr(first, f"{kind}_attentions")):
            torch.testing.assert_close(s.attention(t, role=role), expected[0].detach(), rtol=1e-9, atol=1e-9)
        for t, expected in enumerate(getattr(peer, f"{kind}_attentions")):
            compared = present[rows][:, None, :, None]
            actual = attention[f"{role}_{t}"] * compared
            torch.testing.assert_close(actual, expected.detach() * compared, rtol=1e-9, atol=1e-9)
    states, logits = run_net(net, module, ids, present)
    expected, actual = (peer.logits, logits[0]) if logits else (peer.decoder_hidden_states[-1], states["dec"][-1])
    weight = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1), dtype=D) * present["dec"][..., None]
    (expected * weight).sum().backward()
    grads = torch.autograd.grad((actual * weight).sum(), list(module.store.values()), allow_unused=True)
    gradients = dict(zip((name.replace("/", ".") for name in module.store), grads, strict=True))
    by_key = {canonicalize_key(family, key): p.grad for key, p in model.named_parameters() if p.grad is not None}
    scale, checked = max(float(grad.abs().max()) for grad in by_key.values()), set()
    for mapping in map_parameters(net.network, family):
        keys = (canonicalize_key(family, key) for key in mapping.keys)
        peer_grads = [by_key[key] for key in keys if key in by_key]
        if peer_grads and gradients[mapping.name] is not None:
            checked.add(mapping.name)
            expected_grad = mapping.view(peer_grads[0])
            torch.testing.assert_close(gradients[mapping.name] / scale, expected_grad / scale, rtol=1e-9, atol=1e-9)
        else:
            assert not peer_grads or not any(grad.any() for grad in peer_grads)
    unchecked = set(net.parameters) - checked - {"dec_logits.bias"}  # not a parameter of the peer
    assert all(re.match(r"(enc|dec)_k_|dec_cross_k_", item) for item in unchecked)  # nearly invisible to the softmax


def all_present(ids):
    """Masks in which every word is present."""
    return {stack: torch.ones_like(value, dtype=torch.bool) for stack, value in ids.items()}


def test_an_untied_readout_is_read_as_in_flan_t5():
    model = init_model("T5ForConditionalGeneration", {**T5, "tie_word_embeddings": False})
    model.lm_head.weight = torch.nn.Parameter(torch.randn(13, 12, dtype=D))
    net = from_pretrained(model)
    check_states(model, net, 1e-9)
    assert {"W_embed.value", "dec_logits.weight"} <= set(net.parameters) and "scaled" not in net.network.graph.by_stem


def test_one_node_biases_the_scores_of_all_slices():
    net = from_pretrained(init_model("T5ForConditionalGeneration", T5))
    s = net.sentence({"enc": [3, 4], "dec": [0, 5]})
    assert net.parameters["enc_b.value"].shape == (3, 6)
    assert s.children("enc_b_1") == [f"enc_a_{t}_1_{i}" for t in range(2) for i in range(2)]
    assert s.parents("dec_cross_a_0_1_0")[-1] == "dec_cross_v_0_1_1"  # these scores have no bias
    text = net.equations("word").latex
    assert r"\beta_{6,7}(j-i)" in text and r"\max(-\delta, 0)" in text


@pytest.mark.parametrize("k", [1, 8])
def test_a_folder_is_read_as_the_model_in_memory(k, tmp_path):
    model = init_model(*MODELS[k], torch.bfloat16)
    net = from_pretrained(model)
    for size in ("5GB", "1KB"):
        folder = tmp_path / size
        model.save_pretrained(folder, max_shard_size=size)
        loaded = from_pretrained(folder)
        assert loaded.declaration == net.declaration and loaded.network.dtype == torch.bfloat16
        assert all(value.equal(net.parameters[key]) for key, value in loaded.parameters.items())


# names


def make_one_slice_model(k):
    """A model with one slice in each stack."""
    name, options = MODELS[k]
    layers = ("num_layers", "num_decoder_layers") if "T5" in name else ("encoder_layers", "decoder_layers")
    return init_model(name, {**options, **dict.fromkeys(layers, 1)})


@pytest.mark.parametrize("k", [0, 4, 7])
def test_values_of_hugging_face_names_equal_our_nodes(k):
    model = make_one_slice_model(k)
    net, observed = from_pretrained(model), {}
    for name, module in model.named_modules():
        module.register_forward_hook(record_output(observed, name))
    ids = {"enc": torch.tensor([[3, 4, 5, 6]]), "dec": torch.tensor([[1, 7, 8]])}
    with torch.no_grad():
        outputs = run_peer(model, ids, all_present(ids), output_attentions=True)
    for key in (x for x in outputs if re.search("hidden_states|attentions", x) and "last" not in x):
        observed |= {f"{key}[{t}]": value_ for t, value_ in enumerate(outputs[key])}
    groups = [m.group for m in net.network.specs if m.tpm.kind == "deterministic" and m.group.word_stack]
    with torch.no_grad():
        attention, values = (
            net.module().eval().attention_weights(ids, want=[f.name for f in groups if f.role != "token"])
        )
    matched = set()
    for name, value in [*values.items(), *((re.sub("a(?=_[0-9])", "j", a), value_) for a, value_ in attention.items())]:
        heads = re.search(r"(^|_)(q|k|v|a|j)_\d", name)
        for star in ["_2", "_*"] if heads and value.shape[1] > 2 else ["_0"] if heads else [""]:
            node = f"{name}{star}_1"
            rows = value[:, 2] if star == "_2" else value[:, 0] if star == "_0" else value
            try:
                hook_name = to_hugging_face(net, node)
            except bt.UnknownNameError:
                continue
            hook, index = re.fullmatch(r"(.*put|\w+\[\d+\])(\[.*\])?", hook_name).groups()
            recorded = eval(f"x{index or ''}", {"x": observed[hook]})
            expected = rows[..., 1, :] if star != "_*" or "j_" in name else rows[..., 1, :].flatten(1)
            torch.testing.assert_close(recorded, expected, rtol=1e-9, atol=1e-9)
            assert from_hugging_face(net, hook_name) == (node,)
            matched.add(name)
    unmatched = {re.sub(r"_\d+$", "", name) for name in values if name not in matched}
    scaled = {"enc_embed", "dec_embed"} if model.config.to_dict().get("scale_embedding") else set()
    sinusoids = {"enc_position", "dec_position"} if model.config.model_type == "marian" else set()
    biased = {"dec_logits"} if "dec_logits.bias" in net.parameters else set()  # added outside the module
    assert unmatched == scaled | sinusoids | biased and len(matched) > 20


def record_output(observed, name):
    def hook(module, inputs, output):
        observed[f"{name}.output"] = output[0] if isinstance(output, tuple) else output
        if inputs:
            observed[f"{name}.input"] = inputs[0]

    return hook


@pytest.mark.parametrize("k", [1, 5, 8])
def test_tensors_of_keys_equal_our_parameters(k):
    model = make_one_slice_model(k)
    net, state_dict = from_pretrained(model), model.state_dict()
    views = {entry.name: entry.view for entry in map_parameters(net.network, FAMILIES[net.declaration.name])}
    for parameter, value in net.parameters.items():
        key = to_hugging_face(net, parameter)
        assert views[parameter](state_dict[key]).equal(value) and parameter in from_hugging_face(net, key)
    with pytest.raises(bt.BNetError, match="encoder_blocks"):
        to_lens(net, "enc_x_0_*")


def test_unknown_names_are_refused():
    net = from_pretrained(init_model("BartModel", BART))
    assert to_hugging_face(net, "dec_cross_j_2_1_*") == "cross_attentions[2][:, 1, :, :]"
    for wrong, match in (
        ("enc_x_3_*", "a slice index from 0 to 2"),
        ("dec_x_4_*", "0 to 3"),
        ("enc_q_0_3_*", "0 to 2"),
    ):
        with pytest.raises(bt.BNetError, match=match):
            to_hugging_face(net, wrong)


# text


@pytest.fixture
def folder(tmp_path):
    """A folder with a small BART, whose tokenizer adds `<s>` and `</s>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<pad>", "</s>", "<s>", "<unk>", "the", "cat", "sat", "die", "Katze"]
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 1)]
    )
    init_model("BartForConditionalGeneration", BART).save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_the_words_of_a_decoder_are_outputs_shifted_right(folder, tmp_path):
    from transformers.models.bart.modeling_bart import shift_tokens_right

    net, tokenizer = from_pretrained(folder), T.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    s = net.sentence({"enc": "the cat", "dec": ["die", "Katze"]})
    assert s.words == ("<s>", "the", "cat", "</s>", "</s>", "<s>", "die", "Katze")
    assert s.tokens.special == (True, False, False, True, True, True, False, False)
    assert s.tokens.spans == (None, (0, 3), (4, 7), None, None, None, (0, 3), (4, 9))
    assert s.tokens.groups == tuple((k,) for k in range(8))
    label_ids = torch.tensor([tokenizer("die Katze")["input_ids"]])
    assert s.state.encoded.given["dec_token"].equal(shift_tokens_right(label_ids, 0, 1)[0])
    assert net.sentence({"enc": [2, 4, 5, 1], "dec": "die Katze"})["dec_x_3_2"].equal(s["dec_x_3_2"])
    assert s.observe(dec_y_1="die")
    net.save(tmp_path / "net.safetensors")
    assert bt.load(tmp_path / "net.safetensors").sentence({"enc": "the cat", "dec": "die Katze"}).words == s.words
    batch = net.batch([{"enc": "the cat", "dec": "die"}, {"enc": "the cat sat", "dec": "die Katze"}])
    assert batch.x["dec"].tolist() == [[1, 2, 7, 0], [1, 2, 7, 8]] and batch.mask["enc"].sum() == 9
    assert net.generate("the cat", length=3) == net.generate([[2, 4, 5, 1]], start=1, length=3)
    with pytest.raises(bt.BNetError, match="a mapping from stack"):
        net.sentence("the cat")
    with pytest.raises(bt.BNetError, match="at most 11 words"):
        net.sentence({"enc": "cat " * 12, "dec": "die"})
    set_config(folder, decoder_start_token_id=None)
    with pytest.raises(bt.BNetError, match=r"sentence of stack 'dec': expected ids, .*start"):
        from_pretrained(folder).sentence({"enc": "the", "dec": "die"})


def test_text_of_separate_vocabularies_has_one_tokenizer(folder, tmp_path):
    """A Marian with separate vocabularies for its stacks comes with the tokenizer of the first stack."""
    for states in (13, 17):
        options = {**BART, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": states}
        init_model("MarianMTModel", options).save_pretrained(folder)
        net = from_pretrained(folder)
        net.save(tmp_path / "net.safetensors")
        for loaded in (net, bt.load(tmp_path / "net.safetensors")):
            s = loaded.sentence({"enc": "the cat", "dec": [1, 7, 2]})
            assert s.words == ("<s>", "the", "cat", "</s>", "1", "7", "2")
            assert s.tokens.special == (True, False, False, True, False, False, False)
            with pytest.raises(bt.BNetError, match=r"sentence of stack 'dec': .* because the tokenizer is only"):
                loaded.sentence({"enc": "the cat", "dec": "die Katze"})
            result = loaded.generate("the cat", length=3)
            assert result.words == (tuple(map(str, result.ids[0])),)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("BartForConditionalGeneration", {**LONG, "is_causal": False}),
        ("MarianMTModel", {**LONG, "is_causal": False}),
        ("T5ForConditionalGeneration", {**T5, "is_causal": False}),
    ],
)
def test_a_decoder_attends_to_later_words_if_its_config_is_not_causal(name, options):
    model = init_model(name, options, attention="sdpa")
    net, (ids, present) = from_pretrained(model), make_padded()
    _, (actual,) = run_net(net, net.module().eval(), ids, present)
    peer = run_peer(model, ids, present).logits
    torch.testing.assert_close(actual[present["dec"]], peer[present["dec"]], rtol=1e-9, atol=1e-9)


# the bias


@pytest.mark.parametrize("two_sided", [True, False])
def test_buckets_are_transformers(two_sided):
    from transformers.models.t5.modeling_t5 import T5Attention

    i = torch.arange(300)
    for count, furthest in ((4, 33), (7, 200), (16, 64), (32, 100), (32, 128), (33, 200)):
        actual = Buckets(count, furthest, two_sided).compute_bias(torch.arange(float(count)), i, i[None])
        peer = T5Attention._relative_position_bucket(i[None] - i[:, None], two_sided, count, furthest)
        assert actual.long().equal(peer), (count, furthest)


# bad input


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        (
            "BartModel",
            {**BART, "decoder_attention_heads": 2},
            "decoder_attention_heads of the config: expected 3, the number of heads",
        ),
        ("T5EncoderModel", T5, "architecture: expected a model class with a supported readout; got T5EncoderModel"),
        ("T5Model", {**T5, "relative_attention_max_distance": 1}, "furthest: expected more than 1"),
        ("T5Model", {**T5, "feed_forward_proj": "gated-quick_gelu"}, "a supported activation; got quick_gelu"),
    ],
)
def test_settings_that_change_the_equations_are_refused(name, options, match):
    if options.get("relative_attention_max_distance") == 1:
        options = {**options, "relative_attention_num_buckets": 4}
    with pytest.raises(bt.BNetError, match=match):
        from_pretrained(init_model(name, options))


def test_positions_that_are_no_sinusoids_are_refused():
    model = init_model("MarianModel", BART)
    model.encoder.embed_positions.weight.data[3, 4] += 1e-5
    with pytest.raises(bt.BNetError, match=r"MarianModel: encoder.embed_positions: expected sinusoidal positions"):
        from_pretrained(model)

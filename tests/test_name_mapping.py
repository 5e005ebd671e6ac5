"""Names of TransformerLens and Hugging Face: the tensor with a name equals the value of our nodes of that name."""

import re
import warnings

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.pretrained import from_hugging_face, from_lens, from_pretrained, to_hugging_face, to_lens
from bnet_transformer.pretrained.families import FAMILIES
from bnet_transformer.pretrained.weights import map_parameters
from bnet_transformer.tpm import Attention, Given, Linear, Weight
from tests.huggingface_models import ALBERT, BERT, DISTIL, GPT2, LLAMA, MPNET, NEOX, T, init_model

IDS = torch.tensor([[3, 4, 5, 6, 7]])
LENS = [
    ("BertForMaskedLM", {**BERT, "num_hidden_layers": 3}, False),
    ("BertForMaskedLM", BERT, True),
    ("RobertaForMaskedLM", {**BERT, "type_vocab_size": 1}, False),
    ("GPT2LMHeadModel", {**GPT2, "n_layer": 3}, False),
    ("GPT2LMHeadModel", {**GPT2, "tie_word_embeddings": False, "n_inner": 7}, True),
    ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2}, False),
    ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 1, "attention_bias": True}, True),
    ("MistralForCausalLM", {**LLAMA, "num_key_value_heads": 2, "sliding_window": 3}, False),
    ("Qwen2ForCausalLM", {**LLAMA, "num_key_value_heads": 4}, True),
    ("GPTNeoXForCausalLM", NEOX, False),
    ("GPTNeoXForCausalLM", {**NEOX, "use_parallel_residual": False}, False),
]
HUGGING_FACE = [
    ("BertForMaskedLM", BERT),
    ("BertForMaskedLM", {**BERT, "tie_word_embeddings": False}),
    ("BertModel", {**BERT, "num_attention_heads": 1}),
    ("BertForSequenceClassification", {**BERT, "num_labels": 3}),
    ("RobertaForMaskedLM", {**BERT, "type_vocab_size": 1}),
    ("DistilBertForMaskedLM", DISTIL),
    ("DistilBertForSequenceClassification", {**DISTIL, "num_labels": 3}),
    ("GPT2LMHeadModel", {**GPT2, "n_layer": 3}),
    ("GPT2Model", GPT2),
    ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2}),
    ("LlamaModel", {**LLAMA, "num_key_value_heads": 1, "attention_bias": True}),
    ("MistralForCausalLM", {**LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("Qwen2ForTokenClassification", {**LLAMA, "num_key_value_heads": 2, "num_labels": 3}),
    ("GPTNeoXForCausalLM", NEOX),
    ("GPTNeoXModel", {**NEOX, "use_parallel_residual": False}),
    ("AlbertForMaskedLM", ALBERT),
    ("AlbertForSequenceClassification", {**ALBERT, "num_labels": 3, "num_hidden_layers": 1}),
    ("MPNetForMaskedLM", MPNET),
]
TOLERANCES = {"rtol": 1e-6, "atol": 1e-6}


def make_ids(models):
    return [f"{name} {k}" for k, (name, *_) in enumerate(models)]


def compute_values(net):
    """Values `[batch, word, (head), feature]` of deterministic nodes, and attention weights, by role and slice."""
    specs = [m for m in net.network.specs if m.tpm.kind == "deterministic"]
    groups = [m.group for m in specs if not isinstance(m.tpm, Given | Weight)]
    with torch.no_grad():
        attention, result = net.module().eval().attention_weights(IDS, want=[g.name for g in groups])
    values = {(g.role, g.name.removeprefix(g.role)): result[g.name] for g in groups}
    values = {key: value.movedim(-2, 1) if value.dim() > 3 else value for key, value in values.items()}
    return values | {("j", name.removeprefix("a")): value for name, value in attention.items()}


def iter_names(net):
    """Names and values of the nodes of each group: all, and those of the first and last word, head and group."""
    for (role, slice_), value in compute_values(net).items():
        start = role + slice_
        if role == "j" or value.dim() > 3:
            rows = value if role == "j" else value.movedim(1, -2)
            yield from iter_head_names(start, rows, [], rows.shape[1:-2], read=role == "j")
        elif value.dim() == 3:
            yield from ((f"{start}_{i}", value[:, i]) for i in (0, 4))
            yield f"{start}_*", value
        else:
            yield start, value


def iter_head_names(start, rows, indices, plates, *, read):
    """Names and values of the rest of `[batch, *plates, word, feature]` where some plates are indexed."""
    name = "_".join([start, *indices, *"*" * len(plates)])
    yield from ((f"{name}_{i}", rows[..., i, :]) for i in (0, 4))
    yield f"{name}_*", rows if read else rows.movedim(-2, 1)
    for k in {0, plates[0] - 1} if plates else ():
        yield from iter_head_names(start, rows[:, k], [*indices, str(k)], plates[1:], read=read)


def index_tensor(tensor, index):
    """A tensor at an index in brackets, as text."""
    return eval(f"tensor{index or ''}", {"tensor": tensor})


def mark_slow(models, chosen):
    """Return all models; those that are not chosen are marked slow."""
    return [pytest.param(model, marks=[pytest.mark.slow] * (k not in chosen)) for k, model in enumerate(models)]


@pytest.fixture(scope="module", params=mark_slow(LENS, (0, 4, 5, 9)), ids=make_ids(LENS))
def bridge(request, tmp_path_factory):
    """A net, and the value of every hook of a TransformerBridge of the same model."""
    pytest.importorskip("transformer_lens", reason='the oracle of its names: pip install "bnet-transformer[peers]"')
    name, options, compatible = request.param
    folder = tmp_path_factory.mktemp("bridge")
    model = init_model(name, options)
    model.save_pretrained(folder)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        from tokenizers import Tokenizer, models
        from transformer_lens.model_bridge import TransformerBridge

        words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(13)}, unk_token="w12"))
        special = dict.fromkeys(("pad_token", "bos_token", "eos_token"), "w0")
        T.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w12", **special).save_pretrained(folder)
        lens_model = TransformerBridge.boot_transformers(
            str(folder),
            hf_model=model,
            tokenizer=T.AutoTokenizer.from_pretrained(folder),
            device="cpu",
            dtype=torch.float64,
        )
        if compatible:
            lens_model.enable_compatibility_mode(no_processing=True)
        cache = lens_model.run_with_cache(IDS)[1]
    return from_pretrained(init_model(name, options)).expose_neurons(), dict(cache.items())


def test_tensors_of_hooks_equal_our_nodes(bridge):
    net, cache = bridge
    hooks = set()
    for name, value in iter_names(net):
        peer = to_lens(net, name)
        hook, _, index = peer.partition("[")
        expected = index_tensor(cache[hook], index and f"[{index}")
        torch.testing.assert_close(expected, value.reshape(expected.shape), **TOLERANCES)  # groups and heads: one dim
        assert from_lens(net, peer) in (name, name.replace("_*_", "_0_"))  # the only group, or all groups
        hooks.add(hook)
    assert len(hooks) == len(compute_values(net))


def test_our_nodes_for_a_hook_equal_its_tensor(bridge):
    """All hooks of a bridge that have a name here; each of our groups is among them."""
    net, cache = bridge
    values, names = dict(iter_names(net)), set()
    for hook, expected in cache.items():
        try:
            name = from_lens(net, hook)
        except bt.BNetError:
            continue
        torch.testing.assert_close(expected, values[name].reshape(expected.shape), **TOLERANCES)
        names.add(name)
    assert len(names) == len(compute_values(net))


def record_values(model):
    """Inputs and outputs of each module of transformers, hidden states and attentions."""
    observed = {}

    def make_hook(name):
        def record(module, inputs, output):
            observed[f"{name}.output"] = output[0] if isinstance(output, tuple) else output
            if inputs:
                observed[f"{name}.input"] = inputs[0]

        return record

    for name, module in model.named_modules():
        module.register_forward_hook(make_hook(name))
    with torch.no_grad():
        outputs = model(IDS, output_hidden_states=True, output_attentions=True)
    for key in ("hidden_states", "attentions"):
        observed |= {f"{key}[{t}]": value for t, value in enumerate(outputs[key])}
    return observed


@pytest.fixture(scope="module", params=mark_slow(HUGGING_FACE, (0, 7, 9, 13, 15)), ids=make_ids(HUGGING_FACE))
def pretrained(request):
    """A model of transformers, and our net of it, with neurons as nodes."""
    model = init_model(*request.param)
    return model, from_pretrained(model).expose_neurons()


def test_tensors_of_hugging_face_names_equal_our_nodes(pretrained):
    model, net = pretrained
    observed, unnamed = record_values(model), set()
    for actual, value in iter_names(net):
        try:
            peer = to_hugging_face(net, actual)
        except bt.UnknownNameError:
            unnamed.add(actual)
            continue
        key, index = re.fullmatch(r"(.*put|\w+\[\d+\])(\[.*\])?", peer).groups()
        expected = index_tensor(observed[key], index)
        torch.testing.assert_close(expected, value.reshape(expected.shape), **TOLERANCES)
        assert from_hugging_face(net, peer) in ((actual,), (actual.replace("_*_", "_0_"),))
    if FAMILIES[net.declaration.name].shared and net.network.graph.slices[""] > 1:  # a module is called for each slice
        unnamed = {actual for actual in unnamed if not re.search(r"_\d+_", actual)}
        assert to_hugging_face(net, "x_1_*") == "hidden_states[1]"
    if FAMILIES[net.declaration.name].locate("q").is_interleaved:  # the columns of all heads are not adjacent
        interleaved = {actual for actual in unnamed if re.match(r"[qkv]_\d+_\*_", actual)}
        assert interleaved == {actual for actual, _ in iter_names(net) if re.match(r"[qkv]_\d+_\*_", actual)}
        unnamed -= interleaved
    assert unnamed <= {"first", "pooled"}
    if hasattr(model.config, "n_embd"):
        assert from_hugging_face(net, f"hidden_states[{model.config.n_layer}][:, 2, :]") == ("norm_2",)


def test_tensors_of_keys_equal_our_parameters(pretrained):
    """Every parameter has a key of the model, whose tensor is ours; every weight that is read has a name here."""
    model, net = pretrained
    state = model.state_dict()
    views = {entry.name: entry.view for entry in map_parameters(net.network, FAMILIES[net.declaration.name])}
    for parameter, value in net.parameters.items():
        key = to_hugging_face(net, parameter)
        assert views[parameter](state[key]).equal(value)
        assert parameter in from_hugging_face(net, key)
    names = {name for key in state if "pooler" not in key for name in from_hugging_face(net, key)}
    assert names == {name for name in net.parameters if not name.startswith("pooler")}


def test_unknown_names_are_refused():
    bert = from_pretrained(init_model("BertForMaskedLM", BERT))
    gpt2 = from_pretrained(init_model("GPT2LMHeadModel", GPT2))
    distil = from_pretrained(init_model("DistilBertModel", DISTIL))
    assert to_lens(bert, "q_1_2_*") == "blocks.1.attn.hook_q[..., 2, :]"
    assert from_lens(bert, "blocks.1.attn.hook_pattern[:, 2, 4, :]") == "j_1_2_4"
    assert to_lens(bert, "q_1_2") == to_lens(bert, "q_1_2_*") and to_lens(bert, "q_1") == to_lens(bert, "q_1_*_*")
    assert to_lens(bert, "q_1_2_-1") == "blocks.1.attn.hook_q[:, -1, 2, :]"
    assert from_lens(bert, "blocks.1.attn.hook_q[:, -1, 2, :]") == "q_1_2_-1"
    assert (
        from_lens(bert, "blocks.1.hook_resid_mid") == "add2_1_*" and to_lens(bert, "add1_1_*") == "blocks.1.ln1.hook_in"
    )
    assert to_hugging_face(gpt2, "k_1_2_*") == "transformer.h.1.attn.c_attn.output[..., 20:24]"
    assert from_hugging_face(gpt2, "h.1.attn.c_attn.weight") == ("W_q_1.value", "W_k_1.value", "W_v_1.value")
    for wrong, match in (
        ("q_1_99_*", "a head index from 0 to 2"),
        ("x_1_999", "a word index from 0 to 8"),
        ("q_7_0_0", "a slice index from 0 to 1"),
        ("q", "q_slice_head_word"),
        ("q_1_-1_0", "a head index"),
        ("zz_0_1", "a known name"),
    ):
        for translate in (to_lens, to_hugging_face):
            with pytest.raises(bt.BNetError, match=match):
                translate(gpt2, wrong)
    for wrong, match in (
        ("blocks.9.attn.hook_q", "a known name"),
        ("blocks.1.attn.hook_q[..., 99, :]", "whole nodes"),
        ("blocks.1.attn.hook_q[0]", "an index"),
        ("blocks.1.hook_resid_pre[:, 99, :]", "a word index from 0 to 8"),
    ):
        with pytest.raises(bt.BNetError, match=match):
            from_lens(gpt2, wrong)
    for wrong, match in (
        ("transformer.h.1.attn.c_attn.output", r"whole nodes; .*allowed: .*c_attn.output\[..., 12:16\]"),
        ("hidden_states[9]", "a known name"),
        ("hidden_states[0][:, 99, :]", "a word index from 0 to 8"),
    ):
        with pytest.raises(bt.BNetError, match=match):
            from_hugging_face(gpt2, wrong)
    with pytest.raises(bt.BNetError, match=r"got distilbert.*allowed: bert, gpt2, gpt_neox, llama"):
        to_lens(distil, "x_0_*")
    with pytest.raises(bt.BNetError, match=r"a pretrained net; got .*bert"):
        from_lens(bt.encoder(4, heads=2), "blocks.0.hook_resid_pre")


EQUIVALENTS = {  # hook -> the node group in a pre-norm decoder, in a post-norm decoder, and in a bnet of the book
    "hook_embed": ("embed", "x_0", None),
    "hook_pos_embed": ("position", "position", None),
    "blocks.1.hook_resid_pre": ("x_1", "x_1", "state_1"),
    "blocks.1.hook_resid_mid": ("add1_1", "add2_1", None),
    "blocks.1.hook_resid_post": ("x_2", "x_2", "state_2"),
    "blocks.1.hook_attn_out": ("mix_1", "norm1_1", None),
    "blocks.1.hook_mlp_out": ("ffn_1", "ffn_1", None),
    "blocks.1.attn.hook_q": ("q_1", "q_1", "query_1"),
    "blocks.1.attn.hook_k": ("k_1", "k_1", "key_1"),
    "blocks.1.attn.hook_v": ("v_1", "v_1", "value_1"),
    "blocks.1.attn.hook_z": ("a_1", "a_1", "state_2"),
    "blocks.1.attn.hook_z[:, 0]": ("a_1", "a_1", "state_2"),
    "blocks.1.ln1.hook_normalized": ("norm1_1", "norm1_1", None),
    "ln_final.hook_normalized": ("norm", None, None),
    "blocks.1.mlp.hook_post": (None, None, None),
}


def test_the_error_for_a_hook_names_the_node():
    word = {"plates": ["word"]}
    user_roles = bt.Stack(
        prologue=[bt.Node("state", Given(4), **word)],
        slice=[
            *[bt.Node(role, Linear(4), ["state"], **word) for role in ("query", "key", "value")],
            bt.Node(
                "state", Attention(), [bt.Arrow("query"), bt.Arrow("key", "every"), bt.Arrow("value", "every")], **word
            ),
        ],
        slices=2,
    )
    options = {"dim": 8, "heads": 2, "slices": 2, "vocabulary": ["a", "b"]}
    nets = [bt.decoder(**options, norm="pre"), bt.decoder(**options), bt.BNet(bt.Declaration([user_roles]))]
    sentences = [*(net.sentence("a b") for net in nets[:2]), nets[2].sentence(x=torch.zeros(2, 4))]
    for hook, groups in EQUIVALENTS.items():
        for sentence, group in zip(sentences, groups, strict=True):
            with pytest.raises(bt.UnknownNameError) as caught:
                sentence[hook]
            text = "This net has no node" if group is None else f"is {group}_"
            assert text in caught.value.hint and repr(hook) in str(caught.value)
    s = sentences[1]
    for query in (
        lambda hook: s.do({hook: 0.0}),
        lambda hook: bt.sweep(s, s, at=hook, metric={"y_1": ("a", "b")}),
        lambda hook: bt.sweep(s, s, at=[hook], metric={"y_1": ("a", "b")}),
        s.parents,
    ):
        with pytest.raises(bt.UnknownNameError, match=r"is x_1_word here, such as x_1_0\. .* do\(x_1=\.\.\.\)"):
            query("blocks.1.hook_resid_pre")
    for hook, hint in (
        ("blocks.1.attn.hook_pattern", r"P\(j \| i\) of a_1_head_word here: s.attention\(1\)"),
        ("blocks.2.hook_resid_pre", "this net has 2 slices"),
    ):
        with pytest.raises(bt.UnknownNameError, match=hint):
            s[hook]
    hook, user = "blocks.0.attn.hook_pattern", sentences[2]
    with pytest.raises(bt.UnknownNameError, match=r"s.attention\(0\), do\(state_1_0=Attend\(row\)\), or at='state_j'"):
        user[hook]
    assert bt.sweep(user, user.net.sentence(x=torch.ones(2, 4)), at="state_j", metric=lambda state_2_0: state_2_0[:, 0])
    both = bt.encoder_decoder(8, heads=2, slices=1).sentence({"enc": torch.ones(2, 8), "dec": torch.ones(2, 8)})
    with pytest.raises(bt.UnknownNameError, match=r"s.attention\(0, role='enc_a'\), .* at='enc_j' .* at='dec_j'"):
        both[hook]
    assert both.attention(0, role="enc_a").shape == (2, 2, 2)

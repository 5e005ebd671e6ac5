"""Every analysis works on every family of models: a table of tiny random models, and one test for each analysis.

A family that is added to the package gets a row here; `test_the_table_has_every_family` checks this.
"""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.interventions.edge_runs import build_edge_runner
from bnet_transformer.pretrained import FAMILIES, ModelFamily, from_pretrained, register_family
from tests.edge_oracle import run_edge
from tests.huggingface_models import (
    ALBERT,
    BERT,
    DISTIL,
    GPT2,
    LLAMA,
    MPNET,
    NEOX,
    T5 as T5_SMALL,
    VIT,
    D,
    T,
    init_model,
    set_config,
)

IDS = [3, 4, 5, 6]
OTHER_IDS = [3, 7, 5, 8]
SENTENCES = (IDS, OTHER_IDS)
IMAGES = tuple(torch.randn(3, 9, 9, dtype=D, generator=torch.Generator().manual_seed(k)) for k in range(2))
PAIRS = tuple({"enc": ids, "dec": [0, 9, 10]} for ids in SENTENCES)
TWO = {"vocab_size": 13, "d_model": 12, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
BART = {
    **TWO,
    **{f"{stack}_{size}": n for stack in ("encoder", "decoder") for size, n in (("layers", 2), ("attention_heads", 3))},
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 10),
    "max_position_embeddings": 9,
}
T5 = {**TWO, "d_kv": 4, "d_ff": 10, "num_layers": 2, "num_heads": 3}
VIT_3_LABELS = {**VIT, "image_size": [8, 6], "num_labels": 3}
TABLE = {
    "albert": ("AlbertForMaskedLM", ALBERT, SENTENCES),
    "bart": ("BartForConditionalGeneration", BART, PAIRS),
    "bert": ("BertForMaskedLM", BERT, SENTENCES),
    "distilbert": ("DistilBertForMaskedLM", DISTIL, SENTENCES),
    "gpt2": ("GPT2LMHeadModel", GPT2, SENTENCES),
    "gpt_neox": ("GPTNeoXForCausalLM", NEOX, SENTENCES),
    "llama": ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2}, SENTENCES),
    "marian": ("MarianMTModel", {**BART, "decoder_vocab_size": 13}, PAIRS),
    "mistral": ("MistralForCausalLM", {**LLAMA, "num_key_value_heads": 2, "sliding_window": 3}, SENTENCES),
    "mpnet": ("MPNetForMaskedLM", MPNET, SENTENCES),
    "qwen2": ("Qwen2ForCausalLM", {**LLAMA, "num_key_value_heads": 2}, SENTENCES),
    "roberta": ("RobertaForMaskedLM", {**BERT, "type_vocab_size": 1}, SENTENCES),
    "t5": ("T5ForConditionalGeneration", T5, PAIRS),
    "vit": ("ViTForImageClassification", VIT_3_LABELS, tuple(image[:, :8, :6] for image in IMAGES)),
}
ALL = pytest.mark.parametrize("name", list(TABLE))
SIX = pytest.mark.parametrize("name", ["albert", "bert", "gpt_neox", "llama", "t5", "vit"])  # one of each structure
NETS = {}


def make_case(name):
    """Return the net of the tiny model of a family, with two sentences of the same length."""
    if name not in NETS:
        kind, options, sentences = TABLE[name]
        net = from_pretrained(init_model(kind, options))
        NETS[name] = net, *(net.sentence(sentence) for sentence in sentences)
    return NETS[name]


def find_outcome(s):
    """Return the last readout of a sentence: of a word, or of all words."""
    return [name for name in s.nodes if name.rpartition("y")[2].strip("_0123456789") == ""][-1]


def find_states(s):
    """The role of the states of the first stack."""
    names = [stack.name for stack in s.net.declaration.stacks]
    return f"{names[0]}_x" if names[0] else "x"


def test_the_table_has_every_family():
    assert set(TABLE) == set(FAMILIES)


@SIX
def test_it_is_drawn(name, tmp_path):
    net, s, _ = make_case(name)
    net.draw(tmp_path / "net.svg")
    s.draw(tmp_path / "s.svg", slices=[0], heads=[0])
    text = (tmp_path / "s.svg").read_text()
    assert text.count("<path") + text.count("<line") > len(s.words) and text.endswith("</svg>\n")
    graph = s.graph(slices=[0], weights=False)
    assert {"x_0_0" if find_states(s) == "x" else f"{find_states(s)}_0_0"} <= set(graph.nodes)


@ALL
def test_equations(name):
    net, *_ = make_case(name)
    for form in ("word", "row", "column", "einstein"):
        text = net.equations(form).latex
        assert all(rf"P({'W' if role.startswith('W') else ''}" in text for role in ("x", "W_q")), form
        assert text.count("{") == text.count("}") and text.count(r"\left") == text.count(r"\right"), form
        assert "softmax" in text or r"\exp" in text, form


def softmax(scores):
    return np.exp(scores) / np.exp(scores).sum()


def test_its_equations_give_its_values():
    """By hand, from the equation and the values of the parents: two norms, a gated map, three attentions."""

    def evaluate(name, equation, *nodes):
        net, s, _ = make_case(name)
        assert equation in net.equations().latex
        return [s[node].detach().numpy() for node in nodes], {
            key: value.detach().numpy() for key, value in net.parameters.items()
        }

    root = r"= g^{\mathrm{norm1},t} \odot \frac{x_i^t}{\sqrt{\operatorname{mean}(x_i^t \odot x_i^t) + 10^{-6}}}"
    (x, norm), params = evaluate("llama", root, "x_1_2", "norm1_1_2")
    np.testing.assert_allclose(norm, params["norm1_1.gain"] * x / np.sqrt((x * x).mean() + 1e-6), rtol=1e-12)
    gate = r"W_2^{\mathrm{ffn},t} \, \left(\operatorname{SiLU}(W_g^{\mathrm{ffn},t} \, \mathrm{norm2}_i^t) \odot (W_1^"
    (x, ffn), params = evaluate("llama", gate, "norm2_1_2", "ffn_1_2")
    W_g, W_1, W_2 = (params[f"ffn_1.weight_{kind}"] for kind in ("gate", "in", "out"))
    np.testing.assert_allclose(ffn, W_2 @ (W_g @ x / (1 + np.exp(-W_g @ x)) * (W_1 @ x)), rtol=1e-12)

    rotary = r"\exp\left(\frac{1}{\sqrt{4}} (R_i^a q_i^{t,\alpha,h})^\top R_j^a k_j^{t,\alpha}\right)"
    names = [f"{role}_1_1_{j}" for role in "kv" for j in range(3)]
    (q, a, *kv), _ = evaluate("llama", rotary, "q_1_1_0_2", "a_1_1_0_2", *names)
    assert r"e + 2 \text{ by the angle } i / 10000^{2e/4}" in make_case("llama")[0].equations().latex

    def rotate(i, z):
        w = (z[:2] + 1j * z[2:]) * np.exp(1j * i / 10000 ** (2 * np.arange(2) / 4))
        return np.concatenate([w.real, w.imag])

    P = softmax(np.array([rotate(2, q) @ rotate(j, k) / 2 for j, k in enumerate(kv[:3])]))
    np.testing.assert_allclose(a, P @ np.stack(kv[3:]), rtol=1e-12)

    biased = r"k_j^{\mathrm{enc},t,h} + b_{\beta_{32,128}(j-i)}^{\mathrm{enc},h}\right)"
    names = [f"enc_{role}_1_2_{j}" for role in "kv" for j in range(4)]
    (q, b, a, *kv), _ = evaluate("t5", biased, "enc_q_1_2_1", "enc_b_2", "enc_a_1_2_1", *names)
    bucket = [1, 0, 17, 18]  # of the words before, at and after it
    np.testing.assert_allclose(a, softmax(np.stack(kv[:4]) @ q + b[bucket]) @ np.stack(kv[4:]), rtol=1e-12)

    names = [f"{role}_1_2_{j}" for role in "kv" for j in range(4)]
    plain = r"\exp\left(\frac{1}{\sqrt{4}} (q_i^{t,h})^\top k_j^{t,h}"
    (q, a, *kv), _ = evaluate("albert", plain, "q_1_2_1", "a_1_2_1", *names)
    np.testing.assert_allclose(a, softmax(np.stack(kv[:4]) @ q / 2) @ np.stack(kv[4:]), rtol=1e-12)
    mean = r"x_i^{t+1} = g^x \odot \frac{\mathrm{add2}_i^t - \operatorname{mean}(\mathrm{add2}_i^t)}{\sqrt{"
    (x, state), params = evaluate("albert", mean, "add2_0_2", "x_1_2")
    scaled = (x - x.mean()) / np.sqrt(x.var() + 1e-12)
    np.testing.assert_allclose(state, params["x.gain"] * scaled + params["x.bias"], rtol=1e-12)


@SIX
@pytest.mark.usefixtures("cached_runs")
def test_its_values_are_the_references(name):
    """Node by node, of one word of every role, after a `do` in the middle."""
    net, s, _ = make_case(name)
    middle = f"{find_states(s)}_1_1"
    done = s.do({middle: torch.linspace(-1, 1, len(s[middle]), dtype=D)})
    for node in {name.rstrip("0123456789_"): name for name in done.nodes}.values():
        spec = net.network.specs[done.ground.group_of(done.ground.id(node)).index]
        if spec.tpm.kind == "deterministic":
            (expected,) = reference.values(done.state.model, done.ground.id(node), {})[None]
            torch.testing.assert_close(done[node], expected, rtol=1e-9, atol=1e-9)


@ALL
def test_it_is_swept(name):
    """Clean words instead of all words of the first states make the corrupt run equal to the clean one."""
    _, corrupt, clean = make_case(name)
    at, node = find_states(corrupt), find_outcome(corrupt)
    result = bt.sweep(clean, corrupt, at=at, metric={node: 1}, over=("slice",))
    expected, base = (float(s.tpm(node).log_prob(torch.tensor(1))) for s in (clean, corrupt))
    assert result.values[0].item() == pytest.approx(expected - base, rel=1e-5) and abs(expected - base) > 1e-6


@ALL
def test_reads(name):
    _, s, _ = make_case(name)
    for role in (None,) if find_states(s) == "x" else ("enc_a", "dec_a"):
        result = s.reads(role=role)
        torch.testing.assert_close(result.matrix.sum(-1), torch.ones(len(result.tokens), dtype=D))
        attentions = [s.attention(t, role=role).flatten(0, -3).mean(0) for t in result.slices]
        with_residual = [(attention + torch.eye(len(attention), dtype=D)) / 2 for attention in attentions]
        torch.testing.assert_close(result.matrix, torch.linalg.multi_dot(with_residual[::-1]))


@pytest.mark.parametrize("name", ["llama"])
def test_inclusion(name):
    net, *_ = make_case(name)
    result = bt.inclusion(net, list(TABLE[name][2]), progress=False)
    assert ((result.rho >= 0) & (result.rho <= 1)).all()


@SIX
def test_it_has_a_page(name, tmp_path):
    _, s, _ = make_case(name)
    s.draw(tmp_path / "s.html")
    text = (tmp_path / "s.html").read_text(encoding="utf-8")
    assert text.rstrip().endswith("</html>") and 20_000 < len(text) < 3_000_000


@pytest.mark.parametrize("name", ["llama"])
def test_a_net_of_halves_is_shown_as_others(name, tmp_path):
    """numpy has no bfloat16: the page, reads and plots of such a net are in float32."""
    kind, options, sentences = TABLE[name]
    net = from_pretrained(init_model(kind, options, torch.float32), dtype=torch.bfloat16)
    s, other = (net.sentence(x.bfloat16() if isinstance(x, torch.Tensor) else x) for x in sentences)
    role = None if find_states(s) == "x" else "dec_a"
    s.draw(tmp_path / "s.html")
    assert (tmp_path / "s.html").stat().st_size > 20_000
    reads = s.reads(role=role)
    assert reads.matrix.isfinite().all() and len(bt.plot(s, slice=0, role=role).axes) > 1
    assert bt.plot(reads).axes and bt.plot(reads, show="entropy").axes
    assert s.reads(role=role, method="flow").matrix.isfinite().all()
    sweep = bt.sweep(s, other, at=find_states(s), metric={find_outcome(s): 1}, over=("slice",), progress=False)
    assert bt.plot(sweep).axes


@ALL
def test_it_is_saved_and_read(name, tmp_path):
    net, s, _ = make_case(name)
    net.save(tmp_path / "net.safetensors")
    loaded = bt.load(tmp_path / "net.safetensors")
    node = find_outcome(s)
    assert loaded.declaration == net.declaration
    assert loaded.sentence(TABLE[name][2][0]).tpm(node).logits.equal(s.tpm(node).logits)


@ALL
def test_its_neurons_are_nodes(name):
    """All neurons patched are the feed-forward nodes patched; the readout and the parameters are the same."""
    net, corrupt, clean = make_case(name)
    exposed, node = net.expose_neurons(), find_outcome(corrupt)
    query = {"metric": {node: 1}, "over": ("slice",)}
    stem = find_states(corrupt).removesuffix("x")
    ffn = bt.sweep(clean, corrupt, at=f"{stem}ffn", **query)
    clean, corrupt = (exposed.sentence(sentence) for sentence in TABLE[name][2][::-1])
    torch.testing.assert_close(bt.sweep(clean, corrupt, at=f"{stem}neuron", **query).outcomes, ffn.outcomes)
    assert ffn.effects.abs().max() > 1e-9
    assert {id(value) for value in exposed.parameters.values()} == {id(value) for value in net.parameters.values()}


# properties of single families


def test_albert_has_one_weight_node_and_many_slices():
    """A weight has arrows to the maps of all slices; an intervention on it changes every slice, as in a net with that
    weight."""
    net, s, _ = make_case("albert")
    graph = s.graph(slices=[0, 1, 2], heads=[1])
    children = {f"q_{t}_1_{i}" for t in range(3) for i in range(len(IDS))}
    assert set(graph.successors("W_q_1")) == children and not any(name.startswith("W_q_1_") for name in graph)
    assert sum(name.startswith("W_q.") for name in net.parameters) == 1
    W = torch.randn(4, 12, dtype=D, generator=torch.Generator().manual_seed(3))
    weights = net.parameters["W_q.value"].clone()
    weights[1] = W
    changed_s = net.replace({"W_q.value": weights}).sentence(IDS)
    for node in ("x_1_2", "x_3_0"):
        torch.testing.assert_close(s.do({"W_q_1": W})[node], changed_s[node])
        assert not torch.allclose(changed_s[node], s[node])


def test_the_buckets_of_mpnet_are_transformers():
    """At every possible distance, in float32, as transformers computes them."""
    net = from_pretrained(init_model("MPNetModel", MPNET))
    b, n = torch.arange(32.0), torch.arange(600)
    peer = T.models.mpnet.modeling_mpnet.MPNetEncoder.relative_position_bucket(n[None] - n[:, None])
    assert net.network.get_spec("a_1").tpm.bias.compute_bias(b, n, n).equal(peer.float())
    assert [i.index for i in net.network.get_spec("a_0").parents][-1] == net.network.graph.by_name["b"].index


# adding a family


def test_an_unknown_family_is_refused_with_the_list(tmp_path):
    init_model("BertModel", BERT, torch.float32).save_pretrained(tmp_path)
    set_config(tmp_path, model_type="mamba")
    with pytest.raises(bt.BNetError, match=f"got 'mamba'; allowed: .*{', '.join(TABLE)}.*docs/adapters.md"):
        from_pretrained(tmp_path)


def test_a_user_defined_family_needs_no_change(monkeypatch):
    """ELECTRA is BERT under another name, with optionally narrower words: a family outside the package."""
    monkeypatch.delitem(FAMILIES, "electra", raising=False)
    bert = FAMILIES["bert"]
    electra = ModelFamily(
        name="electra",
        prefix="electra.",
        config=bert.config,
        modules=bert.modules,
        unsupported={"embedding_size": 12},
        buffers=bert.buffers,
        in_transformer_lens=False,
    )
    try:
        assert register_family(electra) is electra and register_family(electra) is electra
        model = init_model("ElectraModel", {**BERT, "embedding_size": 12})
        net = from_pretrained(model)
        peer = model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
        s = net.sentence(IDS)
        for t, state in enumerate(peer):
            torch.testing.assert_close(s[f"x_{t}_2"], state[0, 2].detach(), rtol=1e-9, atol=1e-9)
        with pytest.raises(bt.BNetError, match="a name that no other family has; got bert"):
            register_family(ModelFamily(name="bert", prefix="", config={}, modules={}))
        with pytest.raises(bt.BNetError, match="expected a ModelFamily"):
            register_family("bert")
    finally:
        FAMILIES.pop("electra", None)


MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
GRANITE = {"attention_multiplier": 0.5, "tie_word_embeddings": False}  # the scale of a Llama with heads of width 4
FOREIGN = [  # a model, the settings that Llama does not have, and where its equations depart from those of Llama
    ("Gemma", {"head_dim": 4}, {}, "x_0"),
    ("Granite", GRANITE, {"embedding_multiplier": 3.0}, "x_0"),
    ("Granite", GRANITE, {"attention_multiplier": 2.0}, "a_0"),
    ("Granite", GRANITE, {"residual_multiplier": 0.25}, "add1_0"),
    ("Granite", GRANITE, {"logits_scaling": 2.0}, "logits"),
]


@pytest.mark.parametrize(("name", "options", "settings", "node"), FOREIGN, ids=[f"{o[0]} {o[3]}" for o in FOREIGN])
def test_a_family_with_other_equations_is_refused(name, options, settings, node, monkeypatch, tmp_path):
    """By the settings that no rule reads; and where a family calls them irrelevant, by the values."""
    kind = name.lower()
    model = init_model(f"{name}ForCausalLM", {**LLAMA, "num_key_value_heads": 2, **options, **settings})
    if name == "Granite":
        monkeypatch.setitem(FAMILIES, kind, replace(FAMILIES["llama"], name=kind))
        for setting in settings:
            with pytest.raises(bt.BNetError, match=f"{setting}={settings[setting]}"):
                from_pretrained(model)
    monkeypatch.setitem(FAMILIES, kind, replace(FAMILIES["llama"], name=kind, irrelevant=MULTIPLIERS))
    with pytest.raises(bt.BNetError, match=f"the first node group that differs is {node},"):
        from_pretrained(model)
    net, ids = from_pretrained(model, check=False), torch.tensor([IDS])
    with torch.no_grad():
        assert (net.module()(ids, want=["logits"])["logits"] - model(ids).logits).abs().max() > 0.1
    init_model(
        f"{name}ForCausalLM", {**LLAMA, "num_key_value_heads": 2, **options, **settings}, torch.float32
    ).save_pretrained(tmp_path)
    assert from_pretrained(tmp_path)
    with pytest.raises(bt.BNetError, match=f"the first node group that differs is {node},"):
        from_pretrained(tmp_path, check=True)


def test_a_granite_without_multipliers_is_a_llama(monkeypatch):
    """The values of a foreign model are accepted where its equations are those of the family."""
    monkeypatch.setitem(FAMILIES, "granite", replace(FAMILIES["llama"], name="granite", irrelevant=MULTIPLIERS))
    model = init_model("GraniteForCausalLM", {**LLAMA, "num_key_value_heads": 2, **GRANITE})
    assert from_pretrained(model).declaration.name == "granite"


def load_in(dtype, kind, options, folder, std=None):
    """Save a model with random weights; load it with `transformers` in a dtype."""
    torch.manual_seed(4)
    model = getattr(T, kind)(getattr(T, kind).config_class(**options))
    for parameter in model.parameters() if std else ():
        torch.nn.init.normal_(parameter, std=std)
    for module in model.modules():
        if hasattr(module, "create_weight"):  # a table of sinusoids
            module.weight.data.copy_(module.create_weight())
    model.save_pretrained(folder)
    return getattr(T, kind).from_pretrained(folder, dtype=dtype)


HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
SMALL_DEVIATIONS = [  # the standard deviation of the weights; None for the distribution of `transformers`, of 0.02
    ("Granite", {**GRANITE, "logits_scaling": 1.2}, 0.3, "logits"),
    ("Granite", {**GRANITE, "residual_multiplier": 0.9}, 0.3, "add1_0"),
    ("Helium", {"head_dim": 4, "tie_word_embeddings": False}, None, "a_0"),
]


@HALVES
@pytest.mark.parametrize(("name", "options", "std", "node"), SMALL_DEVIATIONS, ids=[o[3] for o in SMALL_DEVIATIONS])
def test_a_small_deviation_is_found_in_half_precision(name, options, std, node, dtype, monkeypatch, tmp_path):
    """Smaller than the rounding of 30 operations in the type. Helium rotates other pairs of features than Llama."""
    kind = name.lower()
    model = load_in(dtype, f"{name}ForCausalLM", {**LLAMA, "num_key_value_heads": 2, **options}, tmp_path, std)
    family = replace(FAMILIES["llama"], name=kind, irrelevant=MULTIPLIERS if name == "Granite" else ())
    monkeypatch.setitem(FAMILIES, kind, family)
    for source in (model, tmp_path):
        with pytest.raises(bt.BNetError, match=f"the first node group that differs is {node},"):
            from_pretrained(source, check=True)


@HALVES
@ALL
def test_a_model_in_half_precision_is_read(name, dtype, tmp_path):
    """Rounding is not a deviation; a net may also have a narrower type than its model."""
    kind, options, _ = TABLE[name]
    for std in (0.02, 1.0):
        model = load_in(dtype, kind, options, tmp_path, std)
        assert from_pretrained(model, dtype=dtype).network.dtype == dtype
    assert from_pretrained(load_in(torch.float32, kind, options, tmp_path, 0.3), dtype=dtype).network.dtype == dtype


def test_amplified_rounding_is_not_a_deviation():
    """In float32 the scores of T5, which have no scale, amplify rounding above the limit; float64 decides."""
    torch.manual_seed(38)
    config = T.T5Config(**{**T5_SMALL, "feed_forward_proj": "gated-gelu"}, attn_implementation="eager")
    model = T.T5ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=2.0)
    assert from_pretrained(model)


@ALL
def test_the_mode_of_the_caller_and_the_form_of_outputs_are_irrelevant(name):
    kind, options, _ = TABLE[name]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert from_pretrained(init_model(kind, options, torch.float32))
    with torch.inference_mode():
        assert from_pretrained(init_model(kind, options, torch.float32))
    model = init_model(kind, {**options, "return_dict": False, "output_attentions": True}, torch.float32)
    assert from_pretrained(model) and model.config.return_dict is False


@ALL
def test_the_comparison_changes_nothing_in_a_model(name):
    """Its bytes are those of before: hooks, modes, config, weights and gradients; so is the random state."""
    kind, options, _ = TABLE[name]
    model = init_model(kind, {**options, "return_dict": False}, torch.float32).train()
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    next(reversed(list(model.parameters()))).requires_grad_(False)
    next(module for module in model.modules() if isinstance(module, torch.nn.Linear)).eval()
    before, random = pickle.dumps(model), torch.get_rng_state()
    from_pretrained(model)
    assert pickle.dumps(model) == before and torch.get_rng_state().equal(random)


@ALL
def test_a_folder_is_compared_with_transformers(name, tmp_path):
    kind, options, _ = TABLE[name]
    init_model(kind, options, torch.float32).save_pretrained(tmp_path)
    for dtype in (None, torch.bfloat16):
        assert from_pretrained(tmp_path, check=True, dtype=dtype).declaration.name == name
    assert from_pretrained(tmp_path, check=True, readout=None).declaration.name == name


@SIX
def test_the_comparison_leaves_a_model_as_it_was(name):
    """A model in training mode has the values of evaluation; a hook that changes values is found."""
    kind, options, _ = TABLE[name]
    model = init_model(kind, options).train()
    last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1].eval()
    modes = [module.training for module in model.modules()]
    from_pretrained(model)
    assert [module.training for module in model.modules()] == modes and not last._forward_hooks
    handle = last.register_forward_hook(lambda _, inputs, output: output * 1.5)
    with pytest.raises(bt.BNetError, match="the first node group that differs"):
        from_pretrained(model)
    assert from_pretrained(model, check=False)
    handle.remove()
    assert from_pretrained(model)


def test_a_source_without_a_model_of_transformers_is_not_compared():
    with pytest.raises(bt.BNetError, match="check="):
        from_pretrained("tiny", check=True)


@SIX
def test_its_edges_equal_two_runs_by_hand(name):
    """Also grouped heads, post-norm, cross attention and images; a circuit without an edge is the exact effect."""
    net, clean, corrupt = make_case(name)
    node = find_outcome(corrupt)
    metric = {node: (1, 2)}
    result = bt.sweep(clean, corrupt, at="edges", metric=metric)
    table = net.edges()
    assert {"q", "k", "v", "readout"} <= set(table["channel"]) and set(result.names.values()) <= set(table["edge"])
    reverse = build_edge_runner(corrupt, clean, metric)
    edge_of = {edge: k for k, edge in enumerate(reverse.edge_names)}
    for (index,), edge in list(result.names.items())[:: len(result.names) // 3]:
        (value,) = run_edge(
            corrupt.state.model, clean.state.model, reverse.structure, edge_of[edge], [corrupt.ground.id(node)]
        )
        expected = float(value[1] - value[2])
        assert float(result.outcomes[index]) == pytest.approx(expected, abs=1e-10)
        without = torch.arange(len(edge_of)) != edge_of[edge]
        assert float(reverse.evaluate(without[None])) == pytest.approx(expected, abs=1e-9)
    estimates = bt.sweep(clean, corrupt, at="edges", metric=metric, method=bt.Gradient())
    assert bool(estimates.effects.isfinite().all())

"""Contributions in every family of pretrained models, and direct logit attribution by hooks as an oracle."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.graph.template_graph import get_attention_name
from bnet_transformer.interventions.cells import find_attention_groups
from bnet_transformer.pretrained import from_pretrained
from tests.cases import close
from tests.huggingface_models import GPT2, LLAMA, init_model
from tests.test_families import SIX, TABLE, find_outcome, make_case

FAMILIES = pytest.mark.parametrize(
    "name", [name if name in SIX.args[1] else pytest.param(name, marks=pytest.mark.slow) for name in TABLE]
)
NONLINEAR_HEADS = {"albert", "bert", "distilbert", "mpnet", "roberta"}  # a transform before the logits


@FAMILIES
def test_parts_sum_in_every_family(name):
    _, s, _ = make_case(name)
    node = find_outcome(s)
    if name in NONLINEAR_HEADS:
        with pytest.raises(bt.UnsupportedError, match="transform"):
            s.contributions(node, of=(1, 2))
        node = node.replace("y", "x").replace("x_", f"x_{s.net.declaration.stacks[0].slices}_")
        of = torch.ones(s[node].shape, dtype=torch.float64)  # before the transform
        expected = s[node] @ of
    else:
        of = (1, 2)
        expected = s.tpm(node).logits[1] - s.tpm(node).logits[2]
    result = s.contributions(node, of=of)
    close(result.total, expected, 1e-9)
    assert result.norms
    paths = s.contributions(node, of=of, paths=2)
    heads = [k for k, writer in enumerate(result.writers) if writer.kind == "attention"]
    assert len(heads) == paths.values.shape[0] > 0
    close(paths.values.sum(-1), result.parts[heads], 1e-9)


@FAMILIES
def test_scores_in_every_family(name):
    _, s, _ = make_case(name)
    for groups in find_attention_groups(s.state.model).values():
        for group in (groups[0], groups[-1]):
            index = [group.slice, *(size - 1 for size in s.ground.shapes[group.index])]
            result = s.contributions("_".join(map(str, [get_attention_name(group), *index])))
            close(result.total, result.scores, 1e-9)
            close(result.scores.softmax(-1), result.weights, 1e-9)


def test_names_of_heads_in_groups():
    s = make_case("llama")[1]
    name = s.ground.name(s.ground.id(find_outcome(s)))
    result = s.contributions(name, of=(1, 2))
    heads = result.by_head()
    assert heads.columns.name == "group_head" and heads.loc["a_1", "1_0"] == float(result["a_1_1_0"])
    for short in ("a_1", "a_1_0"):
        with pytest.raises(bt.UnknownNameError, match=r"a_1_group_head.*a_1_1_0"):
            result[short]
    with pytest.raises(bt.UnknownNameError, match="j_slice_group_head_word"):
        s.contributions("j_1_0_0")
    with pytest.raises(bt.UnsupportedError, match="j_1_1_0_1"):
        s.contributions("a_1_1_0_1", of=0)


def attribute_with_hooks(model, ids, word, pair):
    """Direct logit attribution: each head's output through W_o, each map, the embeddings, the final norm's scale."""
    captured = {}

    def hook(key, is_input=False):
        def store(module, args, output):
            captured[key] = args[0] if is_input else output[0] if isinstance(output, tuple) else output

        return store

    is_gpt2 = hasattr(model, "transformer")
    body = model.transformer if is_gpt2 else model.model
    layers, norm = (body.h, body.ln_f) if is_gpt2 else (body.layers, body.norm)
    handles = []
    for t, layer in enumerate(layers):
        projection = layer.attn.c_proj if is_gpt2 else layer.self_attn.o_proj
        handles.append(projection.register_forward_hook(hook(("mix", t), is_input=True)))
        handles.append(layer.mlp.register_forward_hook(hook(("ffn", t))))
    handles.append(norm.register_forward_hook(hook("final", is_input=True)))
    with torch.no_grad():
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    x, heads = captured["final"][0, word], model.config.num_attention_heads
    u = norm.weight * (model.lm_head.weight[pair[0]] - model.lm_head.weight[pair[1]])
    if is_gpt2:
        u = (u - u.mean()) / (x.var(correction=0) + norm.eps).sqrt()
    else:
        u = u / (x.square().mean() + norm.variance_epsilon).sqrt()
    parts = {}
    for t, layer in enumerate(layers):
        mix = captured["mix", t][0, word].reshape(heads, -1)
        W = layer.attn.c_proj.weight.T if is_gpt2 else layer.self_attn.o_proj.weight
        W = W.reshape(W.shape[0], heads, -1)
        for h in range(heads):
            parts[t, h] = W[:, h] @ mix[h] @ u
        parts["ffn", t] = captured["ffn", t][0, word] @ u
    table = body.wte if is_gpt2 else body.embed_tokens
    parts["embed"] = table.weight[ids[word]] @ u
    if is_gpt2:
        parts["position"] = body.wpe.weight[word] @ u
    return parts


@pytest.mark.parametrize(
    ("kind", "options"), [("GPT2LMHeadModel", GPT2), ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2})]
)
def test_direct_logit_attribution_by_hooks(kind, options):
    model = init_model(kind, options)
    ids, word, pair = [3, 4, 5, 6, 7], 4, (2, 9)
    parts = attribute_with_hooks(model, ids, word, pair)
    result = from_pretrained(model).sentence(ids).contributions(f"logits_{word}", of=pair)
    actual = dict(zip([writer.name for writer in result.writers], result.parts, strict=True))
    heads = [actual[writer.name] for writer in result.writers if writer.kind == "attention"]
    close(torch.stack(heads), torch.stack([part for key, part in parts.items() if isinstance(key[0], int)]), 1e-9)
    for t in range(2):
        close(actual[f"ffn_{t}"], parts["ffn", t], 1e-9)
    close(actual["embed" if kind.startswith("GPT2") else "x_0"], parts["embed"], 1e-9)
    if kind.startswith("GPT2"):
        close(actual["position"], parts["position"], 1e-9)

"""Sweeps of small pretrained nets: all arrows in one call, and estimates that equal autograd of transformers."""

import pytest
import torch

import bnet_transformer as bt
from tests.huggingface_models import GPT2, LLAMA, init_model

MODELS = {"GPT2LMHeadModel": GPT2, "LlamaForCausalLM": LLAMA}
CLEAN, CORRUPT = [[1, 5, 7, 2], [3, 3, 9, 4]], [[1, 6, 7, 2], [3, 8, 9, 11]]
METRIC = {"y_3": (2, 4)}


@pytest.fixture(params=MODELS)
def model(request):
    return init_model(request.param, MODELS[request.param])


def make_sentences(net):
    return tuple([net.sentence(ids) for ids in side] for side in (CLEAN, CORRUPT))


def find_embedding(net):
    """The group that embeds the tokens."""
    return "embed" if "embed" in net.network.graph.by_stem else "x_0"


def record_embeddings(model, ids):
    """The embeddings of tokens, and the metric of a run that starts at them."""
    embedding = model.get_input_embeddings()(torch.tensor(ids)).detach().requires_grad_()
    logits = model(inputs_embeds=embedding).logits[:, -1].log_softmax(-1)
    return embedding, logits[:, METRIC["y_3"][0]] - logits[:, METRIC["y_3"][1]]


@pytest.mark.parametrize(("direction", "steps"), [("noise", 0), ("denoise", 0), ("noise", 5)])
def test_estimates_at_embeddings_are_those_of_autograd(model, direction, steps):
    """The gradient at the clean run times corrupt - clean with `direction="noise"`; at midpoints with steps."""
    net = bt.from_pretrained(model)
    clean, corrupt = make_sentences(net)
    options = {"metric": METRIC, "method": bt.Gradient(steps=steps), "direction": direction}
    result = bt.sweep(clean, corrupt, at=[f"{find_embedding(net)}_{i}" for i in range(4)], **options)
    base_ids, source_ids = (CLEAN, CORRUPT) if direction == "noise" else (CORRUPT, CLEAN)
    base, metric = record_embeddings(model, base_ids)
    difference = record_embeddings(model, source_ids)[0].detach() - base.detach()
    slopes = []
    for k in range(max(1, steps)):
        point = (base.detach() + difference * ((k + 0.5) / steps if steps else 0.0)).requires_grad_()
        logits = model(inputs_embeds=point).logits[:, -1].log_softmax(-1)
        value = logits[:, METRIC["y_3"][0]] - logits[:, METRIC["y_3"][1]]
        slopes.append(torch.autograd.grad(value.sum(), point)[0])
    expected = (torch.stack(slopes).mean(0) * difference).sum(-1)
    torch.testing.assert_close(result.effects.T, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(result.base, metric.detach(), rtol=1e-9, atol=1e-10)


def test_all_arrows_in_one_call_and_to_first_order(model):
    net = bt.from_pretrained(model)
    clean, corrupt = make_sentences(net)
    query = {
        "metric": METRIC,
        "over": ("slice", "group", "head") if "group" in net.network.graph.plate_sizes else ("slice", "head"),
    }
    result = bt.sweep(clean, corrupt, at="arrows", **query)
    for item in [*result.parts][::4]:
        part = result.part(item)
        single = bt.sweep(clean, corrupt, at=item, metric=METRIC, over=part.axes)
        torch.testing.assert_close(part.outcomes, single.outcomes, rtol=1e-10, atol=1e-10, equal_nan=True)
    node = f"{find_embedding(net)}_1"
    small = [[s.do({node: s[node] + 1e-6 * torch.linspace(-1, 1, len(s[node])).sin()}) for s in corrupt], corrupt]
    exact = bt.sweep(*small, at="arrows", **query)
    estimate = bt.sweep(*small, at="arrows", method=bt.Gradient(), **query)
    names = [name for name in estimate.names.values() if name in exact.names.values()]
    pairs = torch.stack([torch.stack([r.effects[r.index_of(n)] for n in names]) for r in (exact, estimate)])
    torch.testing.assert_close(pairs[1], pairs[0], rtol=1e-3, atol=1e-4 * float(pairs.abs().max()))
    assert len(names) > 50 and float(pairs.abs().max()) > 1e-10

"""Steered generation of pretrained nets equals hooks on the model of transformers, and `do` on the full sentence."""

import pytest
import torch

from bnet_transformer.interventions import Shift, Zero
from bnet_transformer.pretrained import from_pretrained
from tests.cases import close
from tests.huggingface_models import GPT2, LLAMA, D, init_model

MODELS = {
    "GPT-2": ("GPT2LMHeadModel", {**GPT2, "n_positions": 20}, lambda model: model.transformer.h),
    "Llama with grouped heads": (
        "LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2}, lambda model: model.model.layers
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_shift_of_the_residual_stream_equals_a_hook(name):
    """The output of the first block plus a vector, at every word, as by a forward hook (activation addition)."""
    model_class, options, get_blocks = MODELS[name]
    model = init_model(model_class, options)
    net = from_pretrained(model)
    vector = 3 * torch.randn(net.sentence([1])["x_1_0"].shape, generator=torch.Generator().manual_seed(2), dtype=D)

    def add_vector(module, inputs, output):
        return (output[0] + vector, *output[1:]) if isinstance(output, tuple) else output + vector

    handle = get_blocks(model)[0].register_forward_hook(add_vector)
    ids = [[1, 2, 3], [4, 5, 6]]
    with torch.no_grad():
        for _ in range(6):  # the full prefix each time
            logits = model(torch.tensor(ids), use_cache=False).logits[:, -1]
            ids = [[*row, int(word)] for row, word in zip(ids, logits.argmax(-1), strict=True)]
    handle.remove()
    result = net.generate([[1, 2, 3], [4, 5, 6]], length=6, do={"x_1": Shift(vector)})
    assert [list(row) for row in result.ids] == [row[3:] for row in ids]
    assert result.ids != net.generate([[1, 2, 3], [4, 5, 6]], length=6).ids


@pytest.mark.parametrize("name", MODELS)
def test_an_ablated_head_equals_do_on_the_full_sentence(name):
    model_class, options, _ = MODELS[name]
    net = from_pretrained(init_model(model_class, options))
    attention = next(m for m in net.network.specs if m.has_word_attention)
    head = attention.group.name + "_0" * (len(attention.group.plates) - 1) + "_1"
    do = {head: Zero(), "x_1_0": Zero()}
    result = net.generate([[1, 2], [5, 4, 3]], length=5, do=do)
    for prompt, ids, log_probs in zip([[1, 2], [5, 4, 3]], result.ids, result.log_probs, strict=True):
        s = net.sentence([*prompt, *ids]).do(do)
        expected = [s.tpm(f"y_{len(prompt) - 1 + k}").log_prob(torch.tensor(word)) for k, word in enumerate(ids)]
        close(torch.tensor(log_probs, dtype=D), torch.stack(expected))

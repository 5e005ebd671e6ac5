"""Small models of transformers with random weights, which the tests of pretrained nets ask as oracles."""

import contextlib
import functools
import json
import sys
import warnings
from unittest import mock

import pytest
import torch

pytest.importorskip("tokenizers", reason='reads text: pip install "bnet-transformer[minilm]"')
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers says of its own imports
    T = pytest.importorskip("transformers", reason='the oracle: pip install "bnet-transformer[pretrained]"')
    from transformers import modeling_rope_utils
T.logging.set_verbosity_error()

D = torch.float64
BERT = {
    "vocab_size": 13,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 10,
    "max_position_embeddings": 11,
}
GPT2 = {
    "vocab_size": 13,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 9,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DISTIL = {"vocab_size": 13, "dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 10, "max_position_embeddings": 9}

LLAMA = {
    "vocab_size": 13,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 10,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
NEOX = {**LLAMA, "hidden_size": 32}
ALBERT = {**BERT, "embedding_size": 5, "num_hidden_layers": 3}
MPNET = {**BERT, "max_position_embeddings": 41}
T5 = {
    "vocab_size": 13,
    "d_model": 12,
    "d_kv": 5,
    "d_ff": 10,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 7,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 13,
    "d_model": 12,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 10,
    "decoder_ffn_dim": 7,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "max_position_embeddings": 11,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
}
VIT = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 10,
    "image_size": [9, 9],
    "patch_size": [4, 3],
}


def make_model(name, options, dtype=D, attention="eager"):
    """A model of transformers with random weights, biases and gains among them."""
    kind = getattr(T, name)
    torch.manual_seed(4)
    settings = kind.config_class(**options, attn_implementation=attention)
    if dtype == D:
        with in_double(sys.modules[kind.__module__]):
            model = kind(settings).to(dtype).eval()
        model.forward = doubled(model)
    else:
        model = kind(settings).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    for module in model.modules():
        if hasattr(module, "create_weight"):  # a table of sinusoids
            module.weight.data.copy_(module.create_weight())
        if hasattr(module, "final_logits_bias"):
            torch.nn.init.normal_(module.final_logits_bias)
    return model


class Double:
    """torch, whose float32 is float64."""

    float = float32 = D

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def in_double(module):
    """Compute in float64 what transformers always computes in float32: RMS norms, rotary positions, some softmaxes."""
    with contextlib.ExitStack() as stack:
        for item in (module, modeling_rope_utils):
            stack.enter_context(mock.patch.object(item, "torch", Double()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def doubled(model):
    """The forward of a model, in float64 throughout."""
    forward, module = model.forward, sys.modules[type(model).__module__]

    @functools.wraps(forward)
    def inner(*inputs, **options):
        with in_double(module):
            return forward(*inputs, **options)

    return inner


def set_config(folder, **changes):
    """Change what the config.json of a folder says; `...` leaves out."""
    path = folder / "config.json"
    given = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in given.items() if value is not ...}))

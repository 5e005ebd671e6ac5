"""Small models of transformers with random weights: oracles for pretrained nets."""

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
    warnings.simplefilter("ignore")  # warnings of the imports of transformers
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


def init_model(name, options, dtype=D, attention="eager"):
    """A model of transformers whose parameters, also biases and gains, are random."""
    model_class = getattr(T, name)
    torch.manual_seed(4)
    config = model_class.config_class(**options, attn_implementation=attention)
    if dtype == D:
        with use_float64(sys.modules[model_class.__module__]):
            model = model_class(config).to(dtype).eval()
        model.forward = wrap_forward(model)
    else:
        model = model_class(config).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    for module in model.modules():
        if hasattr(module, "create_weight"):  # a table of sinusoids
            module.weight.data.copy_(module.create_weight())
        if hasattr(module, "final_logits_bias"):
            torch.nn.init.normal_(module.final_logits_bias)
    return model


class Float64Torch:
    """The namespace of torch with float64 as float32."""

    float = float32 = D

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def use_float64(module):
    """Compute in float64 what transformers always computes in float32: RMS norms, rotary positions, some softmaxes."""
    with contextlib.ExitStack() as stack:
        for namespace in (module, modeling_rope_utils):
            stack.enter_context(mock.patch.object(namespace, "torch", Float64Torch()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def wrap_forward(model):
    """The forward of a model, computed in float64 throughout."""
    forward, module = model.forward, sys.modules[type(model).__module__]

    @functools.wraps(forward)
    def forward_in_float64(*inputs, **options):
        with use_float64(module):
            return forward(*inputs, **options)

    return forward_in_float64


def set_config(folder, **changes):
    """Set values in the config.json of a folder; `...` removes a key."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))

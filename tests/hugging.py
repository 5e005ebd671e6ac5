"""Small models of transformers with random weights, which the tests of pretrained nets ask as oracles."""

import json
import warnings

import pytest
import torch

pytest.importorskip("tokenizers", reason='reads text: pip install "bnet-transformer[minilm]"')
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers says of its own imports
    T = pytest.importorskip("transformers", reason='the oracle: pip install "bnet-transformer[pretrained]"')
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


def random_model(name, options, dtype=D, attention="eager"):
    """A model of transformers with random weights, biases and gains among them."""
    kind = getattr(T, name)
    torch.manual_seed(4)
    model = kind(kind.config_class(**options, attn_implementation=attention)).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def config(folder, **changes):
    """Change what the config.json of a folder says; `...` leaves out."""
    path = folder / "config.json"
    told = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in told.items() if value is not ...}))

"""T5 (Raffel et al. 2020), v1.1 and Flan among them: an encoder and a decoder without positions, without biases and
without a scale of the scores, which have a bias by distance; RMS norms before the sublayers."""

from collections.abc import Mapping
from typing import Any

from bnet_transformer.pretrained.family import Where
from bnet_transformer.pretrained.two_stacks import TwoStacks
from bnet_transformer.tpm import Dot

SELF, CROSS, FFN = "{stack}.block.{t}.layer.0", "{stack}.block.{t}.layer.1", "{stack}.block.{t}.layer.{last}"


def stack(name: str, long: str, last: int) -> dict[str, str | Where]:
    """The parts of a stack; its feed-forward map is the last of its sublayers."""
    table = f"{long}.block.0.layer.0.SelfAttention.relative_attention_bias"
    here = {
        **{role: f"{SELF}.SelfAttention.{role}" for role in "qkv"},
        "mix": f"{SELF}.SelfAttention.o",
        "norm1": f"{SELF}.layer_norm",
        **{f"cross_{role}": f"{CROSS}.EncDecAttention.{role}" for role in "qkv"},
        "cross_mix": f"{CROSS}.EncDecAttention.o",
        "cross_norm": f"{CROSS}.layer_norm",
        "norm2": f"{FFN}.layer_norm",
        "ffn_in": f"{FFN}.DenseReluDense.wi",
        "ffn_gate": f"{FFN}.DenseReluDense.wi_0",
        "ffn_in_gated": f"{FFN}.DenseReluDense.wi_1",
        "ffn_out": f"{FFN}.DenseReluDense.wo",
        "norm": "{stack}.final_layer_norm",
        "embed": "{stack}.embed_tokens",
    }
    keys = {part: key.replace("{stack}", long).replace("{last}", str(last)) for part, key in here.items()}
    return {
        **{f"{name}_{part}": key for part, key in keys.items() if last > 1 or "cross" not in part},
        f"{name}_b": Where(table, transposed=True),
    }


DEFAULTS = {
    "dim": 512,
    "heads": 8,
    "key_dim": 64,
    "slices": 6,
    "hidden": 2048,
    "states": 32128,
    "eps": 1e-6,
    "buckets": 32,
    "furthest": 128,
    "start": None,
}


def translate(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `T5Config` derives from others, where a config does not tell them.

    Tables are tied whatever a config says, unless the weights hold others: what it says is whether logits are scaled.
    """
    projection = str(config.get("feed_forward_proj", "relu"))
    parts, slices = projection.split("-"), config.get("num_decoder_layers")
    return {
        "is_gated_act": parts[0] == "gated",
        "dense_act_fn": "gelu_new" if projection == "gated-gelu" else parts[-1],
        "scale_decoder_outputs": config.get("tie_word_embeddings") is not False,
        **config,
        "num_decoder_layers": config.get("num_layers", DEFAULTS["slices"]) if slices is None else slices,
        "tie_word_embeddings": True,
    }


FAMILY = TwoStacks(
    name="t5",
    prefix="",
    config={
        "dim": "d_model",
        "heads": "num_heads",
        "key_dim": "d_kv",
        "slices": "num_layers",
        "hidden": "d_ff",
        "states": "vocab_size",
        "activation": "dense_act_fn",
        "gated_ffn": "is_gated_act",
        "eps": "layer_norm_epsilon",
        "buckets": "relative_attention_num_buckets",
        "furthest": "relative_attention_max_distance",
        "scaled_logits": "scale_decoder_outputs",
        "start": "decoder_start_token_id",
    },
    decoder={"slices": "num_decoder_layers"},
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    defaults=DEFAULTS,
    modules={
        "embed": "shared",
        **stack("enc", "encoder", 1),
        **stack("dec", "decoder", 2),
        "logits": "lm_head",
    },
    norm="pre",
    form="rms",
    normed_words=False,
    logits_bias=False,
    biased={"map": False, "mix": False, "ffn": False},
    positions=None,
    score=Dot(1.0),
    translate=translate,
    buffers=(
        "shared.weight",  # where each stack has a table of its own
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    ),
    in_lens=False,
)

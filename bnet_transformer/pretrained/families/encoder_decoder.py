"""Encoders with decoders: BART, Marian, T5.

BART (Lewis et al. 2020) is post-norm, with learned positions that count from 2. Marian (Junczys-Dowmunt et al. 2018,
the Opus translation models) is BART with sinusoidal positions and without a norm of the embeddings. T5 (Raffel et al.
2020, also v1.1 and Flan) has no positions, no biases and no scale of the scores, which have a bias by distance, and it
has RMS norms before the sublayers.
"""

from collections.abc import Mapping
from typing import Any

from bnet_transformer.pretrained.declaration import EncoderDecoderFamily
from bnet_transformer.pretrained.family import WeightLocation
from bnet_transformer.tpm import Dot

CONFIG: dict[str, str | tuple[str | None, object]] = {
    "dim": ("d_model", 1024),
    "heads": ("encoder_attention_heads", 16),
    "slices": ("encoder_layers", 12),
    "hidden": ("encoder_ffn_dim", 4096),
    "length": ("max_position_embeddings", 1024),
    "states": ("vocab_size", 50265),
    "activation": ("activation_function", "gelu"),
    "scaled_words": ("scale_embedding", False),
    "start": ("decoder_start_token_id", 2),
    "eps": (None, 1e-5),
}
DECODER_KEYS = {"slices": "decoder_layers", "hidden": "decoder_ffn_dim", "heads": "decoder_attention_heads"}
ALIASES = {
    "num_attention_heads": "encoder_attention_heads",
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
}

# Settings of fairseq that a config of 2020 contains, and that `transformers` does not read.
FAIRSEQ_SETTINGS = (
    *("add_bias_logits", "add_final_layer_norm", "do_blenderbot_90_layernorm", "extra_pos_embeddings"),
    *("normalize_before", "normalize_embedding", "static_position_embeddings"),
)


def _list_bart_modules(stack: str, module: str) -> dict[str, str | WeightLocation]:
    """List the parts of a stack of BART or Marian."""
    attention = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "mix": "out_proj"}
    modules = {
        "embed": "embed_tokens",
        **{part: "layers.{t}.self_attn." + key for part, key in attention.items()},
        "norm1": "layers.{t}.self_attn_layer_norm",
        "ffn_in": "layers.{t}.fc1",
        "ffn_out": "layers.{t}.fc2",
        "norm2": "layers.{t}.final_layer_norm",
    }
    if stack == "dec":
        modules |= {f"cross_{part}": "layers.{t}.encoder_attn." + key for part, key in attention.items()}
        modules["cross_norm"] = "layers.{t}.encoder_attn_layer_norm"
    return {f"{stack}_{part}": f"{module}.{key}" for part, key in modules.items()}


STACK_MODULES = {"embed": "shared", **_list_bart_modules("enc", "encoder"), **_list_bart_modules("dec", "decoder")}
LOGITS = WeightLocation("lm_head", bias=WeightLocation("final_logits_bias", is_tensor_key=True, leading_dims=1))

BART = EncoderDecoderFamily(
    name="bart",
    prefix="model.",
    config=CONFIG,
    decoder_keys=DECODER_KEYS,
    aliases=ALIASES,
    modules={
        **STACK_MODULES,
        "enc_position": WeightLocation("encoder.embed_positions", row_offset=2),
        "dec_position": WeightLocation("decoder.embed_positions", row_offset=2),
        "enc_x_0": "encoder.layernorm_embedding",
        "dec_x_0": "decoder.layernorm_embedding",
        "logits": LOGITS,
    },
    positions="learned",
    irrelevant=FAIRSEQ_SETTINGS,
    buffers=("shared.weight",),  # unused if each stack has a separate table
    in_transformer_lens=False,
)

MARIAN = EncoderDecoderFamily(
    name="marian",
    prefix="model.",
    config={
        **CONFIG,
        "states": ("vocab_size", 58101),
        "start": ("decoder_start_token_id", 58100),
        "one_table": "share_encoder_decoder_embeddings",
    },
    decoder_keys={**DECODER_KEYS, "states": "decoder_vocab_size"},
    aliases=ALIASES,
    modules={
        **STACK_MODULES,
        "enc_sinusoids": "encoder.embed_positions",
        "dec_sinusoids": "decoder.embed_positions",
        "logits": LOGITS,
    },
    positions="sinusoidal",
    irrelevant=FAIRSEQ_SETTINGS,
    has_embed_norm=False,
    buffers=("shared.weight", "encoder.embed_positions.weight", "decoder.embed_positions.weight"),
    in_transformer_lens=False,
)

SELF_ATTENTION, CROSS_ATTENTION = "{stack}.block.{t}.layer.0", "{stack}.block.{t}.layer.1"
FEED_FORWARD = "{stack}.block.{t}.layer.{last}"


def _list_t5_modules(stack: str, module: str, last_sublayer: int) -> dict[str, str | WeightLocation]:
    """List the parts of a stack of T5; the feed-forward map is the last of its sublayers."""
    table = f"{module}.block.0.layer.0.SelfAttention.relative_attention_bias"
    parts = {
        **{role: f"{SELF_ATTENTION}.SelfAttention.{role}" for role in "qkv"},
        "mix": f"{SELF_ATTENTION}.SelfAttention.o",
        "norm1": f"{SELF_ATTENTION}.layer_norm",
        **{f"cross_{role}": f"{CROSS_ATTENTION}.EncDecAttention.{role}" for role in "qkv"},
        "cross_mix": f"{CROSS_ATTENTION}.EncDecAttention.o",
        "cross_norm": f"{CROSS_ATTENTION}.layer_norm",
        "norm2": f"{FEED_FORWARD}.layer_norm",
        "ffn_in": f"{FEED_FORWARD}.DenseReluDense.wi",
        "ffn_gate": f"{FEED_FORWARD}.DenseReluDense.wi_0",
        "ffn_in_gated": f"{FEED_FORWARD}.DenseReluDense.wi_1",
        "ffn_out": f"{FEED_FORWARD}.DenseReluDense.wo",
        "norm": "{stack}.final_layer_norm",
        "embed": "{stack}.embed_tokens",
    }
    keys = {part: key.replace("{stack}", module).replace("{last}", str(last_sublayer)) for part, key in parts.items()}
    return {
        **{f"{stack}_{part}": key for part, key in keys.items() if last_sublayer > 1 or "cross" not in part},
        f"{stack}_b": WeightLocation(table, transposed=True),
    }


def _derive_t5_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the settings that `T5Config` derives from others.

    Tables are tied for any `tie_word_embeddings`, unless the weights contain different tables. The setting only
    determines whether logits are scaled.
    """
    projection = str(config.get("feed_forward_proj", "relu"))
    parts, slices = projection.split("-"), config.get("num_decoder_layers")
    return {
        "is_gated_act": parts[0] == "gated",
        "dense_act_fn": "gelu_new" if projection == "gated-gelu" else parts[-1],
        "scale_decoder_outputs": config.get("tie_word_embeddings") is not False,
        **config,
        "num_decoder_layers": config.get("num_layers", 6) if slices is None else slices,
        "tie_word_embeddings": True,
    }


T5 = EncoderDecoderFamily(
    name="t5",
    prefix="",
    config={
        "dim": ("d_model", 512),
        "heads": ("num_heads", 8),
        "key_dim": ("d_kv", 64),
        "slices": ("num_layers", 6),
        "hidden": ("d_ff", 2048),
        "states": ("vocab_size", 32128),
        "activation": "dense_act_fn",
        "gated_ffn": "is_gated_act",
        "eps": ("layer_norm_epsilon", 1e-6),
        "buckets": ("relative_attention_num_buckets", 32),
        "furthest": ("relative_attention_max_distance", 128),
        "scaled_logits": "scale_decoder_outputs",
        "start": ("decoder_start_token_id", None),
    },
    decoder_keys={"slices": "num_decoder_layers"},
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    modules={
        "embed": "shared",
        **_list_t5_modules("enc", "encoder", 1),
        **_list_t5_modules("dec", "decoder", 2),
        "logits": "lm_head",
    },
    norm="pre",
    norm_type="rms",
    has_embed_norm=False,
    logits_bias=False,
    biased={"map": False, "mix": False, "ffn": False},
    positions=None,
    score=Dot(1.0),
    derive_settings=_derive_t5_settings,
    irrelevant=("n_positions", "feed_forward_proj"),  # there is no table of positions; the projection is derived above
    buffers=(
        "shared.weight",  # unused if each stack has a separate table
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    ),
    in_transformer_lens=False,
)

FAMILIES = (BART, MARIAN, T5)

"""BART (Lewis et al. 2020): a post-norm encoder and decoder whose learned positions count from 2."""

from bnet_transformer.pretrained.family import Where
from bnet_transformer.pretrained.two_stacks import TwoStacks

CONFIG = {
    "dim": "d_model",
    "heads": "encoder_attention_heads",
    "slices": "encoder_layers",
    "hidden": "encoder_ffn_dim",
    "length": "max_position_embeddings",
    "states": "vocab_size",
    "activation": "activation_function",
    "scaled_words": "scale_embedding",
    "start": "decoder_start_token_id",
}
DECODER = {"slices": "decoder_layers", "hidden": "decoder_ffn_dim", "heads": "decoder_attention_heads"}
ALIASES = {
    "num_attention_heads": "encoder_attention_heads",
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
}
DEFAULTS = {
    "dim": 1024,
    "heads": 16,
    "slices": 12,
    "hidden": 4096,
    "length": 1024,
    "states": 50265,
    "activation": "gelu",
    "scaled_words": False,
    "eps": 1e-5,
    "start": 2,
}


def stack(name: str, long: str) -> dict[str, str | Where]:
    """The parts of a stack."""
    here = {
        "embed": "embed_tokens",
        "q": "layers.{t}.self_attn.q_proj",
        "k": "layers.{t}.self_attn.k_proj",
        "v": "layers.{t}.self_attn.v_proj",
        "mix": "layers.{t}.self_attn.out_proj",
        "norm1": "layers.{t}.self_attn_layer_norm",
        "ffn_in": "layers.{t}.fc1",
        "ffn_out": "layers.{t}.fc2",
        "norm2": "layers.{t}.final_layer_norm",
    }
    cross = {
        "cross_q": "layers.{t}.encoder_attn.q_proj",
        "cross_k": "layers.{t}.encoder_attn.k_proj",
        "cross_v": "layers.{t}.encoder_attn.v_proj",
        "cross_mix": "layers.{t}.encoder_attn.out_proj",
        "cross_norm": "layers.{t}.encoder_attn_layer_norm",
    }
    parts = here if name == "enc" else here | cross
    return {f"{name}_{part}": f"{long}.{key}" for part, key in parts.items()}


STACKS = {"embed": "shared", **stack("enc", "encoder"), **stack("dec", "decoder")}
LOGITS = Where("lm_head", bias=Where("final_logits_bias", bare=True, lead=1))

FAMILY = TwoStacks(
    name="bart",
    prefix="model.",
    config=CONFIG,
    decoder=DECODER,
    defaults=DEFAULTS,
    aliases=ALIASES,
    modules={
        **STACKS,
        "enc_position": Where("encoder.embed_positions", skip=2),
        "dec_position": Where("decoder.embed_positions", skip=2),
        "enc_x_0": "encoder.layernorm_embedding",
        "dec_x_0": "decoder.layernorm_embedding",
        "logits": LOGITS,
    },
    positions="learned",
    buffers=("shared.weight",),  # where each stack has a table of its own
    in_lens=False,
)

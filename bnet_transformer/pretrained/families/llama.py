"""Llama (Touvron et al. 2023): a causal pre-norm stack of RMS norms, rotary positions, grouped heads, gated maps."""

from bnet_transformer.pretrained.family import Family

SIZES = {
    "dim": "hidden_size",
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads",
    "key_dim": "head_dim",
    "slices": "num_hidden_layers",
    "hidden": "intermediate_size",
    "length": "max_position_embeddings",
    "states": "vocab_size",
    "activation": "hidden_act",
    "eps": "rms_norm_eps",
    "rotary_base": "rope_theta",
}
DEFAULTS = {
    "dim": 4096,
    "heads": 32,
    "groups": None,
    "key_dim": None,
    "slices": 32,
    "hidden": 11008,
    "length": 2048,
    "states": 32000,
    "activation": "silu",
    "eps": 1e-6,
    "tied": False,
}
MODULES = {
    "embed": "embed_tokens",
    "norm1": "layers.{t}.input_layernorm",
    "q": "layers.{t}.self_attn.q_proj",
    "k": "layers.{t}.self_attn.k_proj",
    "v": "layers.{t}.self_attn.v_proj",
    "mix": "layers.{t}.self_attn.o_proj",
    "norm2": "layers.{t}.post_attention_layernorm",
    "ffn_gate": "layers.{t}.mlp.gate_proj",
    "ffn_in": "layers.{t}.mlp.up_proj",
    "ffn_out": "layers.{t}.mlp.down_proj",
    "norm": "norm",
    "logits": "lm_head",
    "tags": "score",
}
BUFFERS = ("layers.{t}.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")

FAMILY = Family(
    name="llama",
    prefix="model.",
    config=SIZES,
    defaults=DEFAULTS,
    modules=MODULES,
    norm="pre",
    reach="causal",
    logits_bias=False,
    unsupported={"partial_rotary_factor": 1.0},
    buffers=BUFFERS,
    in_lens=False,
    form="rms",
    gated=True,
    rotary=True,
    biased={"map": "attention_bias", "mix": "attention_bias", "ffn": "mlp_bias"},
)

"""Llama (Touvron et al. 2023): a causal pre-norm stack with RMS norms, rotary positions, grouped heads and gated maps.

Families that are derived from it: Mistral, Qwen2.
"""

from dataclasses import replace

from bnet_transformer.pretrained.family import GGUFFormat, ModelFamily, WeightLocation

CONFIG: dict[str, str | tuple[str | None, object]] = {
    "dim": ("hidden_size", 4096),
    "heads": ("num_attention_heads", 32),
    "groups": ("num_key_value_heads", None),
    "key_dim": ("head_dim", None),
    "slices": ("num_hidden_layers", 32),
    "hidden": ("intermediate_size", 11008),
    "length": ("max_position_embeddings", 2048),
    "states": ("vocab_size", 32000),
    "activation": ("hidden_act", "silu"),
    "eps": ("rms_norm_eps", 1e-6),
    "rotary_base": "rope_theta",
    "tied": ("tie_word_embeddings", False),
}
MODULES: dict[str, str | WeightLocation] = {
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

LLAMA = ModelFamily(
    name="llama",
    prefix="model.",
    config=CONFIG,
    modules=MODULES,
    norm="pre",
    reach="causal",
    logits_bias=False,
    unsupported={"partial_rotary_factor": 1.0, "rope_interleaved": False, "use_mrope": False},
    irrelevant=("is_llama_config", "max_sequence_length"),
    buffers=BUFFERS,
    norm_type="rms",
    gated=True,
    rotary=True,
    biased={"map": "attention_bias", "mix": "attention_bias", "ffn": "mlp_bias"},
    gguf=GGUFFormat("llama", interleaved=("q", "k")),
)

# Jiang et al. 2023: words attend to a sliding window of earlier words.
MISTRAL = replace(
    LLAMA,
    name="mistral",
    config={
        **CONFIG,
        "groups": ("num_key_value_heads", 8),
        "hidden": ("intermediate_size", 14336),
        "length": ("max_position_embeddings", 131072),
        "window": ("sliding_window", 4096),
    },
    biased={"map": False, "mix": False, "ffn": False},
    irrelevant=("attention_bias", "mlp_bias", "layer_types"),
    gguf=None,  # llama.cpp stores it as a Llama, without the window
)

# Yang et al. 2024: the maps of q, k and v have a bias.
QWEN2 = replace(
    LLAMA,
    name="qwen2",
    config={
        **CONFIG,
        "groups": ("num_key_value_heads", 32),
        "hidden": ("intermediate_size", 22016),
        "length": ("max_position_embeddings", 32768),
        "states": ("vocab_size", 151936),
        "window": ("sliding_window", 4096),
        "slides": ("use_sliding_window", False),
        "first_sliding": ("max_window_layers", 28),
        "types": "layer_types",
    },
    biased={"map": True, "mix": False, "ffn": False},
    irrelevant=("attention_bias", "mlp_bias"),
    gguf=GGUFFormat("qwen2"),
)

FAMILIES = (LLAMA, MISTRAL, QWEN2)

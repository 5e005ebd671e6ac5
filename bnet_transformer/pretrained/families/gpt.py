"""Causal pre-norm stacks: GPT-2 and GPT-NeoX.

GPT-2 (Radford et al. 2019) stores its maps transposed, with q, k and v in one matrix. GPT-NeoX (Black et al. 2022, for
example Pythia) computes attention and the feed-forward map in parallel, and rotates a part of the features.
"""

from bnet_transformer.pretrained.family import GGUFFormat, ModelFamily, WeightLocation

GPT2 = ModelFamily(
    name="gpt2",
    prefix="transformer.",
    config={
        "dim": ("n_embd", 768),
        "heads": ("n_head", 12),
        "slices": ("n_layer", 12),
        "hidden": ("n_inner", None),
        "length": ("n_positions", 1024),
        "states": ("vocab_size", 50257),
        "activation": ("activation_function", "gelu_new"),
        "eps": ("layer_norm_epsilon", 1e-5),
    },
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    modules={
        "embed": "wte",
        "position": "wpe",
        "norm1": "h.{t}.ln_1",
        "q": WeightLocation("h.{t}.attn.c_attn", transposed=True, chunk=(0, 3)),
        "k": WeightLocation("h.{t}.attn.c_attn", transposed=True, chunk=(1, 3)),
        "v": WeightLocation("h.{t}.attn.c_attn", transposed=True, chunk=(2, 3)),
        "mix": WeightLocation("h.{t}.attn.c_proj", transposed=True),
        "norm2": "h.{t}.ln_2",
        "ffn_in": WeightLocation("h.{t}.mlp.c_fc", transposed=True),
        "ffn_out": WeightLocation("h.{t}.mlp.c_proj", transposed=True),
        "norm": "ln_f",
        "logits": "lm_head",
    },
    norm="pre",
    reach="causal",
    has_embed_norm=False,
    logits_bias=False,
    unsupported={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    irrelevant=("reorder_and_upcast_attn",),
    buffers=("h.{t}.attn.bias", "h.{t}.attn.masked_bias"),
    gguf=GGUFFormat("gpt2"),
)

QKV = "layers.{t}.attention.query_key_value"

GPT_NEOX = ModelFamily(
    name="gpt_neox",
    prefix="gpt_neox.",
    config={
        "dim": ("hidden_size", 6144),
        "heads": ("num_attention_heads", 64),
        "slices": ("num_hidden_layers", 44),
        "hidden": ("intermediate_size", 24576),
        "length": ("max_position_embeddings", 2048),
        "states": ("vocab_size", 50432),
        "activation": ("hidden_act", "gelu"),
        "eps": ("layer_norm_eps", 1e-5),
        "parallel": ("use_parallel_residual", True),
        "rotary_base": "rotary_emb_base",
        "rotary_part": ("rotary_pct", 0.25),
        "rotary_width": ("head_dim", None),
        "attention_bias": ("attention_bias", True),
        "tied": ("tie_word_embeddings", False),
    },
    modules={
        "embed": "embed_in",
        "norm1": "layers.{t}.input_layernorm",
        "q": WeightLocation(QKV, chunk=(0, 3), is_interleaved=True),
        "k": WeightLocation(QKV, chunk=(1, 3), is_interleaved=True),
        "v": WeightLocation(QKV, chunk=(2, 3), is_interleaved=True),
        "mix": "layers.{t}.attention.dense",
        "norm2": "layers.{t}.post_attention_layernorm",
        "ffn_in": "layers.{t}.mlp.dense_h_to_4h",
        "ffn_out": "layers.{t}.mlp.dense_4h_to_h",
        "norm": "final_layer_norm",
        "logits": "lm_head",
        "tags": "classifier",
    },
    norm="pre",
    reach="causal",
    logits_bias=False,
    buffers=(
        "layers.{t}.attention.bias",
        "layers.{t}.attention.masked_bias",
        "layers.{t}.attention.rotary_emb.inv_freq",
    ),
    key_mapping={r"^embed_out\.": "lm_head."},
    rotary=True,
    biased={"map": "attention_bias", "mix": "attention_bias"},
)

FAMILIES = (GPT2, GPT_NEOX)

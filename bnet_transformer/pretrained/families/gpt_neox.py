"""GPT-NeoX (Black et al. 2022), Pythia among them: attention and feed-forward map side by side, few features turned."""

from bnet_transformer.pretrained.family import Family, Where

QKV = "layers.{t}.attention.query_key_value"

FAMILY = Family(
    name="gpt_neox",
    prefix="gpt_neox.",
    config={
        "dim": "hidden_size",
        "heads": "num_attention_heads",
        "slices": "num_hidden_layers",
        "hidden": "intermediate_size",
        "length": "max_position_embeddings",
        "states": "vocab_size",
        "activation": "hidden_act",
        "eps": "layer_norm_eps",
        "parallel": "use_parallel_residual",
        "rotary_base": "rotary_emb_base",
        "rotary_part": "rotary_pct",
    },
    defaults={
        "dim": 6144,
        "heads": 64,
        "slices": 44,
        "hidden": 24576,
        "length": 2048,
        "states": 50432,
        "activation": "gelu",
        "eps": 1e-5,
        "parallel": True,
        "rotary_part": 0.25,
        "attention_bias": True,
        "tied": False,
    },
    modules={
        "embed": "embed_in",
        "norm1": "layers.{t}.input_layernorm",
        "q": Where(QKV, part=(0, 3), within=True),
        "k": Where(QKV, part=(1, 3), within=True),
        "v": Where(QKV, part=(2, 3), within=True),
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
    in_lens=False,
    former={r"^embed_out\.": "lm_head."},
    rotary=True,
    biased={"map": "attention_bias", "mix": "attention_bias"},
)

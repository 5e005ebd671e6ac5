"""GPT-2 (Radford et al. 2019): a causal pre-norm stack whose maps lie transposed, q, k and v side by side."""

from bnet_transformer.pretrained.family import Family, Where

FAMILY = Family(
    name="gpt2",
    prefix="transformer.",
    config={
        "dim": "n_embd",
        "heads": "n_head",
        "slices": "n_layer",
        "hidden": "n_inner",
        "length": "n_positions",
        "states": "vocab_size",
        "activation": "activation_function",
        "eps": "layer_norm_epsilon",
    },
    defaults={
        "dim": 768,
        "heads": 12,
        "slices": 12,
        "hidden": None,
        "length": 1024,
        "states": 50257,
        "activation": "gelu_new",
        "eps": 1e-5,
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
        "q": Where("h.{t}.attn.c_attn", transposed=True, part=(0, 3)),
        "k": Where("h.{t}.attn.c_attn", transposed=True, part=(1, 3)),
        "v": Where("h.{t}.attn.c_attn", transposed=True, part=(2, 3)),
        "mix": Where("h.{t}.attn.c_proj", transposed=True),
        "norm2": "h.{t}.ln_2",
        "ffn_in": Where("h.{t}.mlp.c_fc", transposed=True),
        "ffn_out": Where("h.{t}.mlp.c_proj", transposed=True),
        "norm": "ln_f",
        "logits": "lm_head",
    },
    norm="pre",
    reach="causal",
    normed_words=False,
    logits_bias=False,
    unsupported={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    buffers=("h.{t}.attn.bias", "h.{t}.attn.masked_bias"),
)

"""ViT (Dosovitskiy et al. 2020): a pre-norm encoder of images; a word is a patch, the first gathers the image."""

from bnet_transformer.pretrained.family import Family, Where

SLICE = r"^encoder\.layer\.(\d+)\."

VIT = Family(
    name="vit",
    prefix="vit.",
    config={
        "dim": ("hidden_size", 768),
        "heads": ("num_attention_heads", 12),
        "slices": ("num_hidden_layers", 12),
        "hidden": ("intermediate_size", 3072),
        "activation": ("hidden_act", "gelu"),
        "eps": ("layer_norm_eps", 1e-12),
        "qkv_bias": ("qkv_bias", True),
    },
    modules={
        "embed": Where("embeddings.patch_embeddings.projection", flat=True),
        "start": Where("embeddings.cls_token", bare=True, lead=2),
        "position": Where("embeddings.position_embeddings", bare=True, lead=1),
        "norm1": "layers.{t}.layernorm_before",
        "q": "layers.{t}.attention.q_proj",
        "k": "layers.{t}.attention.k_proj",
        "v": "layers.{t}.attention.v_proj",
        "mix": "layers.{t}.attention.o_proj",
        "norm2": "layers.{t}.layernorm_after",
        "ffn_in": "layers.{t}.mlp.fc1",
        "ffn_out": "layers.{t}.mlp.fc2",
        "norm": "layernorm",
        "pooler": "pooler.dense",
        "classifier": "classifier",
    },
    norm="pre",
    unsupported={"pooler_act": "tanh"},
    biased={"map": "qkv_bias"},
    buffers=("embeddings.mask_token",),  # which stands for patches that are hidden: here none is
    in_lens=False,
    former={
        rf"{SLICE}attention\.attention\.query": r"layers.\1.attention.q_proj",
        rf"{SLICE}attention\.attention\.key": r"layers.\1.attention.k_proj",
        rf"{SLICE}attention\.attention\.value": r"layers.\1.attention.v_proj",
        rf"{SLICE}attention\.output\.dense": r"layers.\1.attention.o_proj",
        rf"{SLICE}intermediate\.dense": r"layers.\1.mlp.fc1",
        rf"{SLICE}output\.dense": r"layers.\1.mlp.fc2",
        rf"{SLICE}layernorm": r"layers.\1.layernorm",
    },
    last_normed=False,
    in_image=True,
)

FAMILIES = (VIT,)

"""ViT (Dosovitskiy et al. 2020): a pre-norm encoder of images. A word is a patch; the first word is the class token."""

from bnet_transformer.pretrained.family import ModelFamily, WeightLocation

LAYER_PATTERN = r"^encoder\.layer\.(\d+)\."

VIT = ModelFamily(
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
        "embed": WeightLocation("embeddings.patch_embeddings.projection", is_conv=True),
        "start": WeightLocation("embeddings.cls_token", is_tensor_key=True, leading_dims=2),
        "position": WeightLocation("embeddings.position_embeddings", is_tensor_key=True, leading_dims=1),
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
    irrelevant=("encoder_stride", "pooler_output_size"),  # for masked images; the size of a weight
    biased={"map": "qkv_bias"},
    buffers=("embeddings.mask_token",),  # for masked patches, which do not occur here
    in_transformer_lens=False,
    key_mapping={
        rf"{LAYER_PATTERN}attention\.attention\.query": r"layers.\1.attention.q_proj",
        rf"{LAYER_PATTERN}attention\.attention\.key": r"layers.\1.attention.k_proj",
        rf"{LAYER_PATTERN}attention\.attention\.value": r"layers.\1.attention.v_proj",
        rf"{LAYER_PATTERN}attention\.output\.dense": r"layers.\1.attention.o_proj",
        rf"{LAYER_PATTERN}intermediate\.dense": r"layers.\1.mlp.fc1",
        rf"{LAYER_PATTERN}output\.dense": r"layers.\1.mlp.fc2",
        rf"{LAYER_PATTERN}layernorm": r"layers.\1.layernorm",
    },
    has_normed_last_state=False,
    is_vision=True,
)

FAMILIES = (VIT,)

"""ALBERT (Lan et al. 2019): BERT whose slices all share one set of weights, its words narrower than its states."""

from bnet_transformer.pretrained.families import bert
from bnet_transformer.pretrained.family import Family, Where

SLICE = "encoder.albert_layer_groups.0.albert_layers.0"

FAMILY = Family(
    name="albert",
    prefix="albert.",
    config={**bert.SIZES, "embedding": "embedding_size"},
    defaults={
        **bert.DEFAULTS,
        "dim": 4096,
        "heads": 64,
        "hidden": 16384,
        "states": 30000,
        "activation": "gelu_new",
        "embedding": 128,
    },
    modules={
        "embed": "embeddings.word_embeddings",
        "position": "embeddings.position_embeddings",
        "segment_embed": "embeddings.token_type_embeddings",
        "embed_norm": "embeddings.LayerNorm",
        "x_0": "encoder.embedding_hidden_mapping_in",
        "q": f"{SLICE}.attention.query",
        "k": f"{SLICE}.attention.key",
        "v": f"{SLICE}.attention.value",
        "mix": f"{SLICE}.attention.dense",
        "norm1": f"{SLICE}.attention.LayerNorm",
        "ffn_in": f"{SLICE}.ffn",
        "ffn_out": f"{SLICE}.ffn_output",
        "norm2": f"{SLICE}.full_layer_layer_norm",
        "pooler": "pooler",
        "dense": "predictions.dense",
        "transform_norm": "predictions.LayerNorm",
        "logits": Where("predictions.decoder", bias="predictions.bias"),
        "classifier": "classifier",
        "tags": "classifier",
    },
    classifier=("pooler", "tanh"),
    unsupported={"num_hidden_groups": 1, "inner_group_num": 1},
    buffers=bert.FAMILY.buffers,
    in_lens=False,
    shared=True,
)

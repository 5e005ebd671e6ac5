"""DistilBERT (Sanh et al. 2019): BERT without segments and pooler, under other names."""

from bnet_transformer.pretrained.family import Family

FAMILY = Family(
    name="distilbert",
    prefix="distilbert.",
    config={
        "dim": "dim",
        "heads": "n_heads",
        "slices": "n_layers",
        "hidden": "hidden_dim",
        "length": "max_position_embeddings",
        "states": "vocab_size",
        "activation": "activation",
    },
    defaults={
        "dim": 768,
        "heads": 12,
        "slices": 6,
        "hidden": 3072,
        "length": 512,
        "states": 30522,
        "activation": "gelu",
        "eps": 1e-12,
    },
    modules={
        "embed": "embeddings.word_embeddings",
        "position": "embeddings.position_embeddings",
        "x_0": "embeddings.LayerNorm",
        "q": "transformer.layer.{t}.attention.q_lin",
        "k": "transformer.layer.{t}.attention.k_lin",
        "v": "transformer.layer.{t}.attention.v_lin",
        "mix": "transformer.layer.{t}.attention.out_lin",
        "norm1": "transformer.layer.{t}.sa_layer_norm",
        "ffn_in": "transformer.layer.{t}.ffn.lin1",
        "ffn_out": "transformer.layer.{t}.ffn.lin2",
        "norm2": "transformer.layer.{t}.output_layer_norm",
        "dense": "vocab_transform",
        "transform_norm": "vocab_layer_norm",
        "logits": "vocab_projector",
        "class_dense": "pre_classifier",
        "classifier": "classifier",
        "tags": "classifier",
    },
    classifier=("class_dense", "relu"),
    buffers=("embeddings.position_ids",),
    in_lens=False,
)

"""BERT (Devlin et al. 2018), MiniLM among them: a post-norm encoder with segments and a norm of the embeddings."""

from bnet_transformer.pretrained.family import Family, Where

SIZES = {
    "dim": "hidden_size",
    "heads": "num_attention_heads",
    "slices": "num_hidden_layers",
    "hidden": "intermediate_size",
    "length": "max_position_embeddings",
    "states": "vocab_size",
    "segments": "type_vocab_size",
    "activation": "hidden_act",
    "eps": "layer_norm_eps",
}
DEFAULTS = {
    "dim": 768,
    "heads": 12,
    "slices": 12,
    "hidden": 3072,
    "length": 512,
    "states": 30522,
    "segments": 2,
    "activation": "gelu",
    "eps": 1e-12,
}
STATES = {
    "embed": "embeddings.word_embeddings",
    "position": "embeddings.position_embeddings",
    "segment_embed": "embeddings.token_type_embeddings",
    "x_0": "embeddings.LayerNorm",
    "q": "encoder.layer.{t}.attention.self.query",
    "k": "encoder.layer.{t}.attention.self.key",
    "v": "encoder.layer.{t}.attention.self.value",
    "mix": "encoder.layer.{t}.attention.output.dense",
    "norm1": "encoder.layer.{t}.attention.output.LayerNorm",
    "ffn_in": "encoder.layer.{t}.intermediate.dense",
    "ffn_out": "encoder.layer.{t}.output.dense",
    "norm2": "encoder.layer.{t}.output.LayerNorm",
    "pooler": "pooler.dense",
}

FAMILY = Family(
    name="bert",
    prefix="bert.",
    config=SIZES,
    defaults=DEFAULTS,
    modules={
        **STATES,
        "dense": "cls.predictions.transform.dense",
        "transform_norm": "cls.predictions.transform.LayerNorm",
        "logits": Where("cls.predictions.decoder", bias="cls.predictions.bias"),
        "classifier": "classifier",
        "tags": "classifier",
    },
    decodes=True,
    classifier=("pooler", "tanh"),
    unsupported={"position_embedding_type": "absolute", "add_cross_attention": False},
    buffers=("embeddings.position_ids", "embeddings.token_type_ids"),
)

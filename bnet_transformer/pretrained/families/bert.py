"""BERT (Devlin et al. 2018), for example MiniLM: a post-norm encoder with segments and a norm of the embeddings.

Families that are derived from it: RoBERTa, MPNet, ALBERT, DistilBERT.
"""

from bnet_transformer.pretrained.family import ModelFamily, WeightLocation
from bnet_transformer.tpm import Buckets

CONFIG: dict[str, str | tuple[str | None, object]] = {
    "dim": ("hidden_size", 768),
    "heads": ("num_attention_heads", 12),
    "slices": ("num_hidden_layers", 12),
    "hidden": ("intermediate_size", 3072),
    "length": ("max_position_embeddings", 512),
    "states": ("vocab_size", 30522),
    "segments": ("type_vocab_size", 2),
    "activation": ("hidden_act", "gelu"),
    "eps": ("layer_norm_eps", 1e-12),
}
ENCODER_MODULES: dict[str, str | WeightLocation] = {
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
# Settings of a pooler in files of 2018, which no model has.
POOLER_SETTINGS = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type"),
)
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")

BERT = ModelFamily(
    name="bert",
    prefix="bert.",
    config=CONFIG,
    modules={
        **ENCODER_MODULES,
        "dense": "cls.predictions.transform.dense",
        "transform_norm": "cls.predictions.transform.LayerNorm",
        "logits": WeightLocation("cls.predictions.decoder", bias="cls.predictions.bias"),
        "classifier": "classifier",
        "tags": "classifier",
    },
    can_decode=True,
    classifier=("pooler", "tanh"),
    unsupported={"position_embedding_type": "absolute"},
    irrelevant=POOLER_SETTINGS,
    buffers=BUFFERS,
)

# Liu et al. 2019: positions count from 2, and the readouts have other modules.
ROBERTA = ModelFamily(
    name="roberta",
    prefix="roberta.",
    config={**CONFIG, "states": ("vocab_size", 50265)},
    modules={
        **ENCODER_MODULES,
        "position": WeightLocation("embeddings.position_embeddings", row_offset=2),
        "dense": "lm_head.dense",
        "transform_norm": "lm_head.layer_norm",
        "logits": WeightLocation("lm_head.decoder", bias="lm_head.bias"),
        "class_dense": "classifier.dense",
        "classifier": "classifier.out_proj",
        "tags": "classifier",
    },
    first_position=2,
    transform="gelu",
    can_decode=True,
    classifier=("class_dense", "tanh"),
    unsupported={"position_embedding_type": "absolute", "pad_token_id": 1},
    buffers=BUFFERS,
)

# Song et al. 2020: RoBERTa with a bias of all scores by distance, one table for all slices.
MPNET = ModelFamily(
    name="mpnet",
    prefix="mpnet.",
    config={**{option: key for option, key in CONFIG.items() if option != "segments"}, "states": ("vocab_size", 30527)},
    modules={
        **{part: location for part, location in ROBERTA.modules.items() if part != "segment_embed"},
        "b": WeightLocation("encoder.relative_attention_bias", transposed=True),
        "q": "encoder.layer.{t}.attention.attn.q",
        "k": "encoder.layer.{t}.attention.attn.k",
        "v": "encoder.layer.{t}.attention.attn.v",
        "mix": "encoder.layer.{t}.attention.attn.o",
        "norm1": "encoder.layer.{t}.attention.LayerNorm",
    },
    first_position=2,
    transform="gelu",
    classifier=("class_dense", "tanh"),
    unsupported={"relative_attention_num_buckets": 32},  # transformers always computes 32 buckets
    irrelevant=("is_decoder",),
    buffers=BUFFERS,
    in_transformer_lens=False,
    relative_bias=Buckets(32, furthest=128),
)

# Lan et al. 2019: all slices share one set of weights, words are narrower than states.
SHARED_LAYER = "encoder.albert_layer_groups.0.albert_layers.0"
ALBERT = ModelFamily(
    name="albert",
    prefix="albert.",
    config={
        **CONFIG,
        "dim": ("hidden_size", 4096),
        "heads": ("num_attention_heads", 64),
        "hidden": ("intermediate_size", 16384),
        "states": ("vocab_size", 30000),
        "activation": ("hidden_act", "gelu_new"),
        "embedding": ("embedding_size", 128),
    },
    modules={
        "embed": "embeddings.word_embeddings",
        "position": "embeddings.position_embeddings",
        "segment_embed": "embeddings.token_type_embeddings",
        "embed_norm": "embeddings.LayerNorm",
        "x_0": "encoder.embedding_hidden_mapping_in",
        "q": f"{SHARED_LAYER}.attention.query",
        "k": f"{SHARED_LAYER}.attention.key",
        "v": f"{SHARED_LAYER}.attention.value",
        "mix": f"{SHARED_LAYER}.attention.dense",
        "norm1": f"{SHARED_LAYER}.attention.LayerNorm",
        "ffn_in": f"{SHARED_LAYER}.ffn",
        "ffn_out": f"{SHARED_LAYER}.ffn_output",
        "norm2": f"{SHARED_LAYER}.full_layer_layer_norm",
        "pooler": "pooler",
        "dense": "predictions.dense",
        "transform_norm": "predictions.LayerNorm",
        "logits": WeightLocation("predictions.decoder", bias="predictions.bias"),
        "classifier": "classifier",
        "tags": "classifier",
    },
    classifier=("pooler", "tanh"),
    unsupported={"num_hidden_groups": 1, "inner_group_num": 1, "position_embedding_type": "absolute"},
    irrelevant=(  # settings of TensorFlow
        *("is_decoder", "net_structure_type", "gap_size", "num_memory_blocks", "down_scale_factor", "layers_to_keep"),
    ),
    buffers=BUFFERS,
    in_transformer_lens=False,
    shared=True,
)

# Sanh et al. 2019: without segments and pooler, with other names.
DISTILBERT = ModelFamily(
    name="distilbert",
    prefix="distilbert.",
    config={
        "dim": ("dim", 768),
        "heads": ("n_heads", 12),
        "slices": ("n_layers", 6),
        "hidden": ("hidden_dim", 3072),
        "length": ("max_position_embeddings", 512),
        "states": ("vocab_size", 30522),
        "activation": ("activation", "gelu"),
        "eps": (None, 1e-12),
    },
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
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
    irrelevant=("is_decoder", "sinusoidal_pos_embds", "tie_weights_"),  # the table of positions is in the file
    buffers=("embeddings.position_ids",),
    in_transformer_lens=False,
)

FAMILIES = (BERT, ROBERTA, MPNET, ALBERT, DISTILBERT)

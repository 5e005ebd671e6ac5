"""RoBERTa (Liu et al. 2019): BERT whose positions count from 2, with heads of its own."""

from bnet_transformer.pretrained.families import bert
from bnet_transformer.pretrained.family import Family, Where

FAMILY = Family(
    name="roberta",
    prefix="roberta.",
    config=bert.SIZES,
    defaults={**bert.DEFAULTS, "states": 50265},
    modules={
        **bert.STATES,
        "position": Where("embeddings.position_embeddings", skip=2),
        "dense": "lm_head.dense",
        "transform_norm": "lm_head.layer_norm",
        "logits": Where("lm_head.decoder", bias="lm_head.bias"),
        "class_dense": "classifier.dense",
        "classifier": "classifier.out_proj",
        "tags": "classifier",
    },
    first_position=2,
    transform="gelu",
    decodes=True,
    classifier=("class_dense", "tanh"),
    unsupported={"position_embedding_type": "absolute", "add_cross_attention": False, "pad_token_id": 1},
    buffers=bert.FAMILY.buffers,
)

"""MPNet (Song et al. 2020): RoBERTa with a bias of all scores by distance, one table for all slices."""

from bnet_transformer.pretrained.families import roberta
from bnet_transformer.pretrained.family import Family, Where
from bnet_transformer.tpm import Buckets

FAMILY = Family(
    name="mpnet",
    prefix="mpnet.",
    config={option: name for option, name in roberta.FAMILY.config.items() if option != "segments"},
    defaults={**roberta.FAMILY.defaults, "states": 30527},
    modules={
        **{part: where for part, where in roberta.FAMILY.modules.items() if part != "segment_embed"},
        "b": Where("encoder.relative_attention_bias", transposed=True),
        "q": "encoder.layer.{t}.attention.attn.q",
        "k": "encoder.layer.{t}.attention.attn.k",
        "v": "encoder.layer.{t}.attention.attn.v",
        "mix": "encoder.layer.{t}.attention.attn.o",
        "norm1": "encoder.layer.{t}.attention.LayerNorm",
    },
    first_position=2,
    transform="gelu",
    classifier=("class_dense", "tanh"),
    unsupported={"relative_attention_num_buckets": 32},  # transformers computes 32 of them, whatever a config says
    buffers=roberta.FAMILY.buffers,
    in_lens=False,
    relative=Buckets(32, furthest=128),
)

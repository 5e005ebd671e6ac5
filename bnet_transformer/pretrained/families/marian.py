"""Marian (Junczys-Dowmunt et al. 2018), the Opus translation models: BART with sinusoids and no norm of the words."""

from bnet_transformer.pretrained.families import bart
from bnet_transformer.pretrained.two_stacks import TwoStacks

FAMILY = TwoStacks(
    name="marian",
    prefix="model.",
    config={**bart.CONFIG, "one_table": "share_encoder_decoder_embeddings"},
    decoder={**bart.DECODER, "states": "decoder_vocab_size"},
    defaults={**bart.DEFAULTS, "states": 58101, "start": 58100},
    aliases=bart.ALIASES,
    modules={
        **bart.STACKS,
        "enc_sinusoids": "encoder.embed_positions",
        "dec_sinusoids": "decoder.embed_positions",
        "logits": bart.LOGITS,
    },
    positions="sinusoidal",
    normed_words=False,
    buffers=("shared.weight", "encoder.embed_positions.weight", "decoder.embed_positions.weight"),
    in_lens=False,
)

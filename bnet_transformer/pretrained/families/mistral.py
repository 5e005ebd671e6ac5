"""Mistral (Jiang et al. 2023): Llama whose words read a window of the words before them."""

from dataclasses import replace

from bnet_transformer.pretrained.families import llama

FAMILY = replace(
    llama.FAMILY,
    name="mistral",
    config={**llama.SIZES, "window": "sliding_window"},
    defaults={**llama.DEFAULTS, "groups": 8, "hidden": 14336, "length": 131072, "window": 4096},
    biased={"map": False, "mix": False, "ffn": False},
)

"""Qwen2 (Yang et al. 2024): Llama whose maps of q, k and v have a bias."""

from dataclasses import replace

from bnet_transformer.pretrained.families import llama

FAMILY = replace(
    llama.FAMILY,
    name="qwen2",
    config={
        **llama.SIZES,
        "window": "sliding_window",
        "slides": "use_sliding_window",
        "first_sliding": "max_window_layers",
        "types": "layer_types",
    },
    defaults={
        **llama.DEFAULTS,
        "groups": 32,
        "hidden": 22016,
        "length": 32768,
        "states": 151936,
        "window": 4096,
        "slides": False,
        "first_sliding": 28,
    },
    biased={"map": True, "mix": False, "ffn": False},
)

"""Models of images: the patches that a config tells, and the nodes that make words of them.

x_0_0 = u + position_0        x_0_i = W patch_i + b + position_i        word 0 is of no patch
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnet_transformer.errors import BNetError, whole
from bnet_transformer.network import Arrow, Node
from bnet_transformer.tpm import Add, Affine, Given, Patches, Positions, Start

WORD = ["word"]


def config_to_patches(config: Mapping[str, Any]) -> Patches:
    """How a config cuts an image; a size is one number or `[rows, columns]`."""
    rows, columns = _pair(config, "image_size", 224)
    high, wide = _pair(config, "patch_size", 16)
    channels = whole("num_channels of the config", config.get("num_channels", 3))
    return Patches(channels, rows, columns, high, wide)


def _pair(config: Mapping[str, Any], name: str, default: int) -> tuple[int, int]:
    found = config.get(name, default)
    pair = list(found) if isinstance(found, list | tuple) else [found, found]
    if len(pair) != 2:
        raise BNetError(f"{name} of the config", expected="a number, or one for rows and one for columns", got=found)
    return whole(f"{name} of the config", pair[0]), whole(f"{name} of the config", pair[1])


def image_words(image: Patches, dim: int) -> list[Node]:
    """The first state of the words of an image."""
    return [
        Node("patch", Given(image.features, image=image), plates=WORD),
        Node("embed", Affine(dim), ["patch"], WORD),
        Node("start", Start(), [Arrow("embed", "rest")], WORD),
        Node("position", Positions(image.words, dim), plates=WORD),
        Node("x", Add(), ["start", "position"], WORD),
    ]

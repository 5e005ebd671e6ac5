"""The config.json of a folder, as `transformers` reads it: alternative names, defaults and derived values.

Its config classes are asked where `transformers` is installed and knows the model type; else the family's own tables,
`Family.aliases` and `Family.defaults`, say the same.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from bnet_transformer.errors import FileError, shown
from bnet_transformer.pretrained.family import LARGEST, MOST_SLICES, Family, bounded, config_labels

COUNTED = ("dim", "heads", "slices", "hidden", "states", "segments", "embedding")  # options that count something


def load_config(family: Family, raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The settings that `transformers` makes of a config.json."""
    _check_counts(family, raw)
    config_class = _config_class(family.name)
    if config_class is None:
        return raw
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that are deprecated
            config: dict[str, Any] = config_class.from_dict(copy.deepcopy(dict(raw))).to_dict()
    except Exception as error:  # of many kinds, for each class checks its settings in its own way
        got = shown(" ".join(str(error).split()) or type(error).__name__)  # in one line
        raise FileError(f"config of {where}", expected="settings that transformers reads", got=got) from error
    return config


def _config_class(kind: str) -> Any:
    """The config class of a model type; None where `transformers` is not installed or does not know it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own imports
            from transformers import CONFIG_MAPPING

            return CONFIG_MAPPING[kind]
    except (ImportError, KeyError):
        return None


def _check_counts(family: Family, raw: Mapping[str, Any]) -> None:
    """Refuse counts that no model has before a config class makes a list of such a length."""
    for option in COUNTED:
        own = family.config.get(option)
        for name in (own, *(alias for alias, name in family.aliases.items() if name == own)):
            if name is not None and raw.get(name) is not None:
                bounded(f"{name} of the config", raw[name], MOST_SLICES if option == "slices" else LARGEST)
    config_labels(raw)

"""Python values as JSON data that restores them: tuples, lists, mappings, and floats that are not finite.

A tuple is a JSON list. A list, a mapping and a float that is not finite are `{"list": ...}`, `{"dict": ...}` and
`{"float": ...}`. A token of a vocabulary is `{"token": [raw, decoded, text]}`. The caller encodes and
decodes all other objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Size

from bnet_transformer._core.tokens import Labels, Token

Encoder = Callable[[object, str], Any]  # JSON data of an object, and where it is, for messages
Decoder = Callable[[dict[str, Any], str], Any]


def to_json_data(value: object, location: str, encode_object: Encoder) -> Any:
    """A value as JSON data; `encode_object` encodes what is neither a number, a string nor a collection.

    >>> to_json_data({"a": (1, [float("inf")])}, "it", lambda value, location: None)
    {'dict': [['a', [1, {'list': [{'float': 'inf'}]}]]]}
    """

    def encode(part: object, where: str) -> Any:
        return to_json_data(part, where, encode_object)

    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Token):
        return {"token": [value.raw, value.decoded, str(value)]}
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) in (tuple, Size, Labels):
        return [encode(part, f"{location}[{k}]") for k, part in enumerate(value)]  # type: ignore[arg-type, var-annotated]
    if type(value) is list:
        return {"list": [encode(part, f"{location}[{k}]") for k, part in enumerate(value)]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key, location), encode(part, f"{location}[{key!r}]")] for key, part in value.items()]}
    return encode_object(value, location)


def from_json_data(data: object, location: str, decode_object: Decoder) -> Any:
    """The value of JSON data; `decode_object` decodes JSON objects that are no collection and no float.

    >>> from_json_data({"dict": [["a", [1, 2]]]}, "it", lambda data, location: None)
    {'a': (1, 2)}
    """

    def decode(part: object, where: str) -> Any:
        return from_json_data(part, where, decode_object)

    if isinstance(data, list):
        return tuple(decode(part, f"{location}[{k}]") for k, part in enumerate(data))
    if not isinstance(data, dict):
        return data
    match data:
        case {"list": list(parts), **rest} if not rest:
            return [decode(part, f"{location}[{k}]") for k, part in enumerate(parts)]
        case {"dict": list(pairs), **rest} if not rest and all(isinstance(p, list) and len(p) == 2 for p in pairs):
            return {decode(key, location): decode(part, f"{location}[{key!r}]") for key, part in pairs}
        case {"token": [str(raw), str(decoded), str(text)], **rest} if not rest:
            return Token(raw, decoded, text)
        case {"float": "inf" | "-inf" | "nan" as name, **rest} if not rest:
            return float(name)
    return decode_object(data, location)

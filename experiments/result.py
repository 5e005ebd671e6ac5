"""The result of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """The result of an experiment: a summary, the rows of a table, and figures by their captions.

    The page has the rows `shown` (all by default); the JSON file has all of them.
    """

    name: str
    summary: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: Mapping[str, Any] = field(default_factory=dict)
    shown: tuple[int, ...] | None = None

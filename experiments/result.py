"""What an experiment gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """What an experiment says: what was done, in words, and rows of a table; figures by what they show.

    The page has the rows `shown` (all by default); the JSON beside it has all of them.
    """

    name: str
    told: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: Mapping[str, Any] = field(default_factory=dict)
    shown: tuple[int, ...] | None = None

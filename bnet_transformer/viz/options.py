"""What a user may ask of a figure, checked, and the error for a graph that is too large for one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from bnet_transformer.errors import BNetError, BudgetError, number, one_of, unknown, whole
from bnet_transformer.graph import Ground, Selection

LIMIT = 2_000  # arrows of one figure
DETAILS = (None, "nodes", "words", "folded")
THEMES = ("light", "dark", "auto")


@dataclass(frozen=True)
class Options:
    """The options of `Sentence.picture`; the first six are those of `Sentence.graph`."""

    weights: bool = True
    slices: int | Collection[int] | None = None
    words: object = None
    heads: int | Collection[int] | None = None
    attention: bool | None = None
    min_weight: float | None = None
    top: int | None = None
    detail: str | None = None
    only: object = None
    highlight: object = None
    boxes: str | Mapping[str, str] | None = None
    theme: str = "light"
    legend: bool = True
    limit: int | None = LIMIT

    def __post_init__(self) -> None:
        for what in ("weights", "legend"):
            one_of(what, getattr(self, what), (True, False))
        one_of("attention", self.attention, (None, True, False))
        one_of("detail", self.detail, DETAILS)
        one_of("theme", self.theme, THEMES)
        if self.min_weight is not None:
            number("min_weight", self.min_weight)
        if self.top is not None:
            whole("top", self.top)
        if self.limit is not None:
            whole("limit", self.limit, least=0)

    @property
    def nodes(self) -> bool:
        """True where only the grid of nodes can do what is asked."""
        return self.only is not None or self.boxes is not None


def options(told: Mapping[str, Any], known: Collection[str] = ()) -> Options:
    """Options from keywords; a name that none has is refused with the near ones."""
    names = list(known) or [each.name for each in fields(Options)]
    for name in told:
        if name not in names:
            raise unknown("option of a picture", name, names)
    return Options(**told)


def too_many(ground: Ground, selection: Selection, limit: int, parts: Callable[..., Selection]) -> BudgetError:
    """The error for a graph past the limit: its counts, and three filters that fit it."""
    got = f"{ground.count_nodes(selection)} nodes and {ground.count_arrows(selection)} arrows"
    fits: list[str] = []
    for told, wanted in _filters(ground):
        if len(fits) < 2:
            try:
                count = ground.count_arrows(parts(**wanted))
            except BNetError:
                continue
            if 0 < count <= limit:
                fits.append(f"{told} ({count} arrows)")
    fits += ["detail='words'", "min_weight=0.5 or top=100 of the reads", "detail='folded'"]
    return BudgetError(
        "figure of the nodes",
        expected=f"at most {limit} arrows, or nobody can read it",
        got=got,
        allowed=", ".join(fits[:3]) + f"; or limit={ground.count_arrows(selection)}",
    )


def _filters(ground: Ground) -> list[tuple[str, dict[str, Any]]]:
    """Filters, the mildest first."""
    heads = {"heads": 0} if "head" in ground.folded.sizes else {}
    few = [{"words": range(n)} for n in (32, 16, 8, 5, 3) if n < min(ground.words.values())]
    tries: list[dict[str, Any]] = [{"slices": 0}, heads, *few, {"slices": 0, **heads}]
    tries += [{"slices": 0, **each} for each in few] + [{"slices": 0, **heads, **each} for each in few]
    tries += [{"weights": False, **each} for each in tries]
    return [(", ".join(f"{name}={value}" for name, value in wanted.items()), wanted) for wanted in tries if wanted]

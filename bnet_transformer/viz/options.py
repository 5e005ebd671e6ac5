"""What a user may ask of a figure, checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from bnet_transformer.errors import BNetError, BudgetError, check_names, mapping, number, one_of, whole

LIMIT = 2_000  # arrows of one figure
DETAILS = (None, "nodes", "words", "folded")
BOXES = ("words", "roles")
VIEWS: Mapping[str, tuple[str, ...]] = {  # the options that each view uses, besides detail=
    "nodes": (
        *("weights", "slices", "words", "heads", "attention", "min_weight", "top"),
        *("only", "highlight", "boxes", "theme", "legend", "limit"),
    ),
    "words": ("slices", "words", "heads", "min_weight", "top", "highlight", "theme", "legend", "limit"),
    "folded": ("slices", "weights", "highlight", "theme", "legend"),
}
THEMES = ("light", "dark", "auto")


@dataclass(frozen=True)
class Options:
    """The options of `Sentence.picture`; the first six are those of `Sentence.graph`.

    Args:
        weights: Draw selectors and weights.
        slices: Slices to draw, such as 0 or 0,5; None for all.
        words: Words to draw; None for all.
        heads: Heads to draw, such as 3 or 0,3; None for all.
        attention: Put `P(j | i)` on the arrows; None for as is usual: figures do, graphs do not.
        min_weight: Leave out arrows that are read less than this.
        top: At most so many reads, the strongest.
        detail: What is drawn: `"nodes"`, `"words"` or `"folded"`; None for what can be read.
        only: Some nodes, or a networkx graph of them.
        highlight: Names, patterns, paths or an answer that are marked.
        boxes: What frames nodes: `"words"`, `"roles"`, or a box for each name.
        theme: `"light"`, `"dark"` or `"auto"`.
        legend: Whether there is a legend.
        limit: The most arrows; None for any number.
    """

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
        if self.min_weight is not None and not 0.0 <= number("min_weight", self.min_weight) <= 1.0:
            raise BNetError("min_weight", expected="a probability from 0 to 1", got=self.min_weight)
        if self.top is not None:
            whole("top", self.top)
        if self.limit is not None:
            whole("limit", self.limit, least=0)
        if isinstance(self.boxes, str):
            one_of("boxes", self.boxes, BOXES)
        else:
            for name, box in mapping("boxes", self.boxes).items():
                if not isinstance(box, str):
                    raise BNetError(f"box of {name}", expected="the name of a box, a string", got=box)
        if self.detail is not None:
            self.check_view(self.detail)

    @property
    def told(self) -> list[str]:
        """The options besides `detail` that are not at their defaults."""
        pairs = [(each.name, getattr(self, each.name), each.default) for each in fields(self)]
        return [n for n, value, usual in pairs if n != "detail" and (type(value) is not type(usual) or value != usual)]

    def unused(self, view: str) -> list[str]:
        """The options that are told and that a view has no use for."""
        return [name for name in self.told if name not in VIEWS[view]]

    def check_view(self, view: str) -> None:
        """Refuse an option that a view has no use for."""
        for name in self.unused(view):
            uses = ", ".join(f"detail={other!r}" for other, names in VIEWS.items() if name in names)
            raise BNetError(name, expected="a view that uses it", got=f"detail={view!r}", allowed=uses)


def options_of(told: Mapping[str, Any], known: Collection[str] = ()) -> Options:
    """Options from keywords; a name that none has is refused with the near ones."""
    check_names("option of a picture", told, known or [each.name for each in fields(Options)])
    return Options(**told)


def over_limit(what: str, limit: int, things: str, got: str, fits: Sequence[str], count: int) -> BudgetError:
    """The error for a figure of more arrows than anybody can read, with ways to one that fits."""
    advice = "; ".join(fits) + "; or " if fits else ""
    expected = f"at most {limit} {things}, or nobody can read it"
    return BudgetError(what, expected=expected, got=got, allowed=f"{advice}limit={count}")

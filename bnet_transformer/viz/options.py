"""What a user may ask of a figure, checked, and the error for a graph that is too large for one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from bnet_transformer.errors import BNetError, BudgetError, mapping, number, one_of, unknown, whole
from bnet_transformer.graph import Ground, Selection

LIMIT = 2_000  # arrows of one figure
DETAILS = (None, "nodes", "words", "folded")
BOXES = ("words", "roles")
VIEWS: Mapping[str, tuple[str, ...]] = MappingProxyType(  # the options that each view uses, besides detail=
    {
        "nodes": (
            *("weights", "slices", "words", "heads", "attention", "min_weight", "top"),
            *("only", "highlight", "boxes", "theme", "legend", "limit"),
        ),
        "words": ("slices", "words", "heads", "min_weight", "top", "highlight", "theme", "legend", "limit"),
        "folded": ("slices", "weights", "highlight", "theme", "legend"),
    }
)
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
        found = []
        for each in fields(self):
            value = getattr(self, each.name)
            plain = isinstance(value, bool | int | str) and value == each.default
            if each.name != "detail" and value is not each.default and not plain:
                found.append(each.name)
        return found

    def fits(self, view: str) -> bool:
        """True where a view uses every option that is told."""
        return set(self.told) <= set(VIEWS[view])

    def check_view(self, view: str) -> None:
        """Refuse an option that a view has no use for."""
        for name in self.told:
            if name not in VIEWS[view]:
                uses = ", ".join(f"detail={other!r}" for other, names in VIEWS.items() if name in names)
                raise BNetError(name, expected="a view that uses it", got=f"detail={view!r}", allowed=uses)


def options_of(told: Mapping[str, Any], known: Collection[str] = ()) -> Options:
    """Options from keywords; a name that none has is refused with the near ones."""
    names = list(known) or [each.name for each in fields(Options)]
    for name in told:
        if name not in names:
            raise unknown("option of a picture", name, names)
    return Options(**told)


def too_many(
    ground: Ground, selection: Selection, views: Sequence[str], limit: int, parts: Callable[..., Selection]
) -> BudgetError:
    """The error for a graph past the limit: its counts, and three filters that fit it and what else is asked.

    `views` can draw the same in place of the nodes; `parts` refuses a filter that leaves out what must be drawn.
    """
    got = f"{ground.count_nodes(selection)} nodes and {ground.count_arrows(selection)} arrows"
    other = [f"detail={view!r}" for view in views]
    fits: list[str] = []
    for told, wanted in _filters(ground):
        if len(fits) + len(other[:1]) < 3:
            try:
                count = ground.count_arrows(parts(**wanted))
            except BNetError:
                continue
            if 0 < count <= limit:
                fits.append(f"{told} ({count} arrows)")
    fits += other
    return BudgetError(
        "figure of the nodes",
        expected=f"at most {limit} arrows, or nobody can read it",
        got=got,
        allowed="; or ".join(["; ".join(fits[:3])] * bool(fits) + [f"limit={ground.count_arrows(selection)}"]),
    )


def _filters(ground: Ground) -> list[tuple[str, dict[str, Any]]]:
    """Filters, the mildest first."""
    heads = {"heads": 0} if "head" in ground.folded.sizes else {}
    few = [{"words": range(n)} for n in (32, 16, 8, 5, 3) if n < min(ground.words.values(), default=0)]
    tries: list[dict[str, Any]] = [{"slices": 0}, heads, *few, {"slices": 0, **heads}]
    tries += [{"slices": 0, **each} for each in few] + [{"slices": 0, **heads, **each} for each in few]
    tries += [{"weights": False, **each} for each in tries]
    return [(", ".join(f"{name}={value}" for name, value in wanted.items()), wanted) for wanted in tries if wanted]

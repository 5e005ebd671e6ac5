"""How a fit is made: its settings, checked as a whole."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from bnet_transformer.errors import BNetError, number, one_of, put, seed_of, whole
from bnet_transformer.files import checkpoint

METHODS = ("map", "em", "svi", "nuts")
STEPS = {"map": 300, "em": 300, "svi": 1000, "nuts": 0}
RATES = {"map": 0.05, "em": 0.05, "svi": 0.05, "nuts": 0.0}
PRECISIONS = (None, "bfloat16")
CLIMB, POINT = ("map", "em", "svi"), ("map", "em")
TAKEN_BY = {
    "steps": CLIMB,
    "rate": CLIMB,
    "clip": CLIMB,
    "weight_decay": CLIMB,
    "patience": CLIMB,
    "restarts": POINT,
    "prune": POINT,
    "held_out": POINT,
    "anneal": POINT,
    "precision": POINT,
    "inner": ("em",),
    "draws": ("svi", "nuts"),
    "chains": ("nuts",),
    "warmup": ("nuts",),
}
OF_WEIGHTS = ("rate", "batch", "clip", "weight_decay", "precision", "inner")  # what em has no use for without weights


@dataclass(frozen=True)
class Recipe:
    """How a fit is made; with the same recipe, net and data it comes out the same."""

    method: str = "map"
    steps: int | None = None
    batch: int | None = None
    rate: float | None = None
    restarts: int = 1
    prune: bool = True
    anneal: float | None = None
    inner: int = 10
    spread: float | None = None
    clip: float | None = None
    weight_decay: float = 0.0
    precision: str | None = None
    chains: int = 4
    draws: int = 500
    warmup: int = 300
    choices: str = "exact"
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS)
        for what in ("steps", "batch"):
            if getattr(self, what) is not None:
                put(self, **{what: whole(what, getattr(self, what))})
        for what in ("restarts", "inner", "chains", "draws", "warmup"):
            put(self, **{what: whole(what, getattr(self, what))})
        for what in ("rate", "spread", "clip"):
            if getattr(self, what) is not None:
                put(self, **{what: number(what, getattr(self, what), above=0)})
        if self.anneal is not None:
            put(self, anneal=number("anneal", self.anneal))
        if self.anneal is not None and not 0 < self.anneal <= 1:
            raise BNetError("anneal", expected="the power from which likelihoods rise to 1, a share", got=self.anneal)
        put(self, weight_decay=number("weight_decay", self.weight_decay))
        if self.weight_decay < 0:
            raise BNetError("weight_decay", expected="a number of at least 0", got=self.weight_decay)
        one_of("prune", self.prune, (True, False))
        one_of("precision", self.precision, PRECISIONS)
        one_of("choices", self.choices, ("exact", "sampled"))
        if self.choices == "sampled" and self.method != "svi":
            raise BNetError("choices", expected="'exact' but for svi", got=f"'sampled' with {self.method}")
        put(self, seed=seed_of(self.seed))
        if self.restarts > 1 and self.method in ("svi", "nuts"):
            got = f"restarts={self.restarts} with method={self.method!r}"
            raise BNetError("restarts", expected="1: start from the net of a fit by map or em", got=got)
        usual = {field.name: field.default for field in fields(self)}
        self.refuse_untaken({name for name, value in self.told().items() if value != usual[name]})

    def refuse_untaken(self, given: Collection[str]) -> None:
        """Refuse options that the method has no use for, and say which methods have one."""
        for name, methods in TAKEN_BY.items():
            taken = self.method in methods or (name == "anneal" and self.choices == "sampled")
            if name in given and not taken:
                allowed = " and ".join(f"method={method!r}" for method in methods)
                allowed += ", and 'svi' with choices='sampled'" if name == "anneal" else ""
                wanted = f"an option that method={self.method!r} takes"
                raise BNetError(name, expected=wanted, got="one that it has no use for", allowed=allowed)

    def refuse_weightless(self) -> None:
        """Refuse what em has no use for where tables alone are learned: every step is the closed form of all data."""
        usual = {field.name: field.default for field in fields(self)}
        for name in OF_WEIGHTS:
            if self.method == "em" and getattr(self, name) != usual[name]:
                got = f"{name}={getattr(self, name)!r}"
                allowed = "method='map', or weights among learn="
                wanted = "no option of steps by gradient: em of tables alone has none"
                raise BNetError(name, expected=wanted, got=got, allowed=allowed)

    @property
    def total(self) -> int:
        """How many steps there are in all."""
        return STEPS[self.method] if self.steps is None else self.steps

    @property
    def highest(self) -> float:
        """The highest rate."""
        return RATES[self.method] if self.rate is None else self.rate

    @property
    def halvings(self) -> tuple[int, ...]:
        """The steps after which the worse half of the restarts is let go."""
        return (self.total // 4, self.total // 2) if self.prune and self.restarts > 2 else ()

    def power(self, step: int) -> float:
        """To what power likelihoods are taken at a step: rising to 1 over the first half."""
        if self.anneal is None:
            return 1.0
        return min(1.0, self.anneal + (1 - self.anneal) * 2 * step / self.total)

    def told(self) -> dict[str, Any]:
        """What a resumed fit must share with the one that it goes on with."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Habits:
    """What goes on around the steps: what is measured and kept, and when it ends early."""

    every: int | None = None
    patience: int | None = None
    folder: Any = None
    resume: bool | str = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        one_of("resume", self.resume, (True, False, "changed"))
        one_of("progress", self.progress, (True, False, None))
        for what in ("every", "patience"):
            if getattr(self, what) is not None:
                whole(what, getattr(self, what))
        if self.resume and self.folder is None:
            raise BNetError("resume", expected="a folder= with a checkpoint", got="none")

    @property
    def free(self) -> frozenset[str]:
        """The settings that a resumed fit may have others of."""
        return checkpoint.CHANGEABLE if self.resume == "changed" else frozenset()

    @property
    def together(self) -> tuple[object, ...]:
        """What several processes must have in common, for at a pause they meet."""
        return self.every, self.patience, self.folder is not None, self.resume

    @property
    def kept(self) -> bool:
        """True where there is a checkpoint to go on from."""
        return self.folder is not None and checkpoint.path_of(self.folder).exists()

    def pauses(self, step: int, steps: int) -> bool:
        """True after the steps at which something is measured and kept: by default ten times, and at the end."""
        return step % (self.every or max(1, steps // 10)) == 0 or step == steps

"""What training gives back: the trained net, and how its loss went."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from bnet_transformer.network import Network

if TYPE_CHECKING:
    import pandas as pd


class Holder(Protocol):
    """What holds a network, as a BNet does."""

    @property
    def network(self) -> Network:
        """The network."""


N = TypeVar("N", bound="Holder | Network")


@dataclass(frozen=True)
class Trained(Generic[N]):
    """A trained net, its loss at each step, and the held-out loss at some: `(step, loss)`, steps counted from 1."""

    net: N
    losses: tuple[float, ...] = field(repr=False)
    held_out: tuple[tuple[int, float], ...] = field(repr=False)
    steps: int

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each step: `loss`, and `held_out` where it was measured."""
        import pandas as pd

        rows = pd.DataFrame({"loss": self.losses}, index=pd.RangeIndex(1, len(self.losses) + 1, name="step"))
        rows["held_out"] = pd.Series(dict(self.held_out), dtype=float)
        return rows

    def _repr_html_(self) -> str:
        measured = dict(self.held_out)
        shown = sorted({1, len(self.losses), *list(measured)[-10:]} & set(range(1, len(self.losses) + 1)))
        rows = "".join(
            f"<tr><td>{step}</td><td>{self.losses[step - 1]:.4f}</td>"
            f"<td>{format(measured[step], '.4f') if step in measured else ''}</td></tr>"
            for step in shown
        )
        head = "<tr><th>step</th><th>loss</th><th>held out</th></tr>"
        return f"<p>{html.escape(repr(self.net))}, {self.steps} steps</p><table>{head}{rows}</table>"

"""Calibration of estimated effects: estimated and exact effects of some cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from bnet_transformer._core.saved_results import SavedResult

if TYPE_CHECKING:
    import pandas as pd

MAX_HTML_ROWS = 12  # rows in a notebook
RELATIVE_ZERO = 1e-9  # effects that are smaller, relative to the largest, have no sign


@dataclass(frozen=True, eq=False, repr=False)
class EstimateCalibration(SavedResult):
    """Estimated and exact effects of some cells, the result of `bt.sweep(..., first_order=True, check=n)`.

    Half of the cells are those with the largest estimates, the others are drawn at random.

    Attributes:
        names: The names of the cells.
        estimates: The estimated effects, `[cell, example]`.
        exact: The exact effects, `[cell, example]`.

    The numbers below compare means over the examples.
    """

    _shapes = "names: any cell; estimates exact: float64 cell example"

    names: tuple[str, ...]
    estimates: Tensor
    exact: Tensor

    @property
    def correlation(self) -> float | None:
        """The correlation of the estimates and the exact effects; None if one of them is constant."""
        estimates, exact = self._means
        scale = max(np.abs(estimates).max(), np.abs(exact).max())
        if min(estimates.std(), exact.std()) <= RELATIVE_ZERO * scale:
            return None
        return float(np.corrcoef(estimates, exact)[0, 1])

    @property
    def slope(self) -> float | None:
        """The slope of the least-squares line from the estimates to the exact effects; None without a spread.

        A slope of 2 means that exact effects are twice as large as estimated.
        """
        estimates, exact = self._means
        if estimates.std() <= RELATIVE_ZERO * np.abs(estimates).max():
            return None
        return float(np.cov(estimates, exact, bias=True)[0, 1] / estimates.var())

    @property
    def largest_error(self) -> float:
        """The largest `|estimate - exact|`."""
        estimates, exact = self._means
        return float(np.abs(estimates - exact).max())

    @property
    def sign_agreement(self) -> float:
        """The share of cells whose estimate and exact effect have the same sign; 0 has its own sign."""
        estimates, exact = self._means
        zero = RELATIVE_ZERO * max(np.abs(estimates).max(), np.abs(exact).max())
        signs = [np.sign(np.where(np.abs(means) <= zero, 0.0, means)) for means in (estimates, exact)]
        return float((signs[0] == signs[1]).mean())

    @property
    def _means(self) -> tuple[np.ndarray, np.ndarray]:
        """The mean estimate and the mean exact effect of each cell."""
        estimates, exact = (effects.double().mean(-1).numpy() for effects in (self.estimates, self.exact))
        return estimates, exact

    def to_dataframe(self) -> pd.DataFrame:
        """A data frame of the cells.

        Returns:
            A row for each cell: its name, its estimated and its exact mean effect, and their difference.
        """
        import pandas as pd

        estimates, exact = self._means
        columns = {"name": self.names, "estimate": estimates, "exact": exact, "error": estimates - exact}
        return pd.DataFrame(columns)

    def format_line(self) -> str:
        """The numbers as one line of text."""
        terms = {"correlation": self.correlation, "slope": self.slope}
        numbers = [f"{name} {value:.3f}" for name, value in terms.items() if value is not None]
        numbers += [f"largest error {self.largest_error:.2g}", f"signs agree {self.sign_agreement:.0%}"]
        count = len(self.names)
        return f"checked {count:,} cell{'s' * (count != 1)}: {', '.join(numbers)}"

    def __repr__(self) -> str:
        return f"EstimateCalibration({self.format_line()})"

    def _repr_html_(self) -> str:
        """The numbers, and the cells with the largest effects, as HTML."""
        frame = self.to_dataframe().sort_values("exact", key=abs, ascending=False, kind="stable")
        table = frame.head(MAX_HTML_ROWS).to_html(index=False, float_format="{:.3g}".format)
        return f"<p>{self.format_line()}</p>{table}"

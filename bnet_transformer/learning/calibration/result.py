"""`Calibration`, the result of a simulation-based calibration: ranks, bands, p values and verdicts."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from bnet_transformer._core.checks import check_fraction, check_names
from bnet_transformer._core.hashing import derive_seed
from bnet_transformer._core.saved_results import SavedResult
from bnet_transformer.errors import BNetError
from bnet_transformer.learning.calibration.bands import (
    FloatArray,
    count_below,
    ecdf_p_value,
    get_points,
    simultaneous_band,
)

if TYPE_CHECKING:
    import pandas as pd

MIN_REPLICATIONS = 20  # fewer ranks support no verdict
MIN_DRAWS = 9  # with fewer independent draws, positions hardly show a posterior that is too narrow
CALIBRATED, UNDECIDED = "calibrated", "too few replications"
SHAPE_Z = float(norm.isf(0.005))  # z-score at which the mean or the variance of the positions names the defect


@dataclass(frozen=True)
class Calibration(SavedResult):
    """The result of `calibrate`: for each quantity, the rank of the true value among posterior draws.

    If the posterior is correct, the position of the true value among the draws is uniform between 0 and 1. The ECDF of
    the positions is compared with a band that contains all points of all quantities together with probability `level`:
    it is simultaneous over the points (Säilynoja et al. 2022), and the error is divided by the number of quantities
    (Bonferroni).

    Attributes:
        method: The name of the method, such as `"nuts"`.
        ranks: The number of draws that are smaller than the true value by quantity, `[replication]`. Ties are broken at
            random.
        draws: The number of draws that were compared, by quantity, `[replication]`: draws of correlated chains are
            thinned to half of their effective sample size, so that the remaining ones are nearly independent.
        requested: The number of requested replications.
        level: The probability that no quantity of a calibrated method leaves its band.
        failures: The reason for each replication that failed, by its number. Failed replications have no ranks.
        omitted: The reason for each default quantity that could not be computed, by its name.
        seconds: The duration in seconds.
        finished: False if Ctrl-C ended the run early.
        seed: The seed of the run.

    >>> import torch
    >>> ranks = torch.arange(200) % 20
    >>> Calibration("exact", {"c": ranks}, {"c": torch.full((200,), 19)}, 200).verdict
    'calibrated'
    """

    _shapes = "ranks draws: {quantity} int replication"

    method: str
    ranks: Mapping[str, Tensor] = field(repr=False)
    draws: Mapping[str, Tensor] = field(repr=False)
    requested: int
    level: float = 0.95
    failures: Mapping[int, str] = field(default_factory=dict, repr=False)
    omitted: Mapping[str, str] = field(default_factory=dict, repr=False)
    seconds: float = field(default=0.0, repr=False)
    finished: bool = True
    seed: int = field(default=0, repr=False)

    @property
    def replications(self) -> int:
        """The number of replications with ranks."""
        return max((len(ranks) for ranks in self.ranks.values()), default=0)

    @property
    def error(self) -> float:
        """The probability that one quantity of a calibrated method leaves its band."""
        return (1 - self.level) / max(1, len(self.ranks))

    @property
    def positions(self) -> dict[str, Tensor]:
        """The position of the true value among the draws by quantity, between 0 and 1, `[replication]`.

        It is the rank with a uniform random number between this rank and the next, divided by the number of draws + 1.
        So it is uniform for a correct posterior, for any number of draws.
        """
        result = {}
        for name, ranks in self.ranks.items():
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "position", name))
            jitter = torch.rand(len(ranks), generator=generator, dtype=torch.float64)
            result[name] = (ranks + jitter) / (self.draws[name] + 1)
        return result

    @property
    def points(self) -> FloatArray:
        """The points at which the ECDFs are compared with the uniform distribution, `[point]`."""
        return get_points(self.replications)

    @property
    def differences(self) -> dict[str, FloatArray]:
        """The ECDF of the positions minus that of the uniform distribution by quantity, `[point]`."""
        points, count = self.points, self.replications
        return {name: count_below(u.numpy()) / count - points for name, u in self.positions.items()}

    @property
    def band(self) -> tuple[FloatArray, FloatArray]:
        """The lower and the upper bound of `differences`, both `[point]`."""
        low, high = simultaneous_band(self.replications, self.error)
        return low - self.points, high - self.points

    @property
    def p(self) -> dict[str, float]:
        """The probability, for a correct posterior, of an ECDF at least as extreme as that of each quantity.

        It is exact over all points of one quantity, and not adjusted over quantities: compare it with `error`.
        """
        return {name: ecdf_p_value(u.numpy()) for name, u in self.positions.items()}

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict of each quantity.

        It is `"calibrated"` if the ECDF is inside the band. Otherwise it describes the posterior: `"too narrow"` or
        `"too wide"` (the variance of the positions), `"biased low"` or `"biased high"` (their mean: the draws are
        mostly below or above the true value), or `"not uniform"`. With fewer than 20 replications it is
        `"too few replications"`.
        """
        if self.replications < MIN_REPLICATIONS:
            return dict.fromkeys(self.ranks, UNDECIDED)
        p, positions = self.p, self.positions
        return {name: CALIBRATED if p[name] > self.error else describe_shape(u) for name, u in positions.items()}

    @property
    def verdict(self) -> str:
        """`"calibrated"`, `"too few replications"`, or the quantities that leave the band with their verdicts."""
        verdicts = self.verdicts
        if self.replications < MIN_REPLICATIONS:
            return UNDECIDED
        return "; ".join(f"{name}: {text}" for name, text in verdicts.items() if text != CALIBRATED) or CALIBRATED

    def coverage(self, name: str, share: float = 0.9) -> tuple[float, float]:
        """Compute how often the central posterior interval of a quantity contains the true value.

        Args:
            name: The quantity.
            share: The posterior probability of the interval, 0.9 by default.

        Returns:
            The share of the replications, and its standard error.

        Raises:
            BNetError: If the quantity is unknown, or there are no replications.
        """
        check_names("quantity", [name], self.ranks)
        check_fraction("share", share)
        if not self.replications:
            raise BNetError("coverage", expected="a calibration with replications", actual="none")
        inside = (self.positions[name] - 0.5).abs() <= share / 2
        mean = float(inside.double().mean())
        return mean, (mean * (1 - mean) / len(inside)) ** 0.5

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row for each quantity: replications, median draws, mean position, coverage, p, verdict."""
        import pandas as pd

        p, verdicts, positions = self.p, self.verdicts, self.positions
        coverage = {name: self.coverage(name) for name in self.ranks}
        columns = {
            "replications": {name: len(ranks) for name, ranks in self.ranks.items()},
            "draws": {name: float(draws.double().median()) for name, draws in self.draws.items()},
            "mean position": {name: float(u.mean()) for name, u in positions.items()},
            "coverage of 90%": {name: mean for name, (mean, _) in coverage.items()},
            "standard error": {name: error for name, (_, error) in coverage.items()},
            "p": p,
            "verdict": verdicts,
        }
        return pd.DataFrame(columns, index=pd.Index(list(self.ranks), name="quantity"))

    def _repr_html_(self) -> str:
        """Return the verdict and the table of the quantities as HTML."""
        caption = f"calibration of {self.method}: {self.replications} of {self.requested} replications"
        caption += "" if self.finished else ", interrupted"
        caption += f" in {self.seconds:.0f} seconds; {self.verdict}"
        if self.replications:
            caption += f". The bands contain all quantities with probability {self.level:g} (each p > {self.error:.2g})"
        lines = [caption, *self.notes]
        table = self.to_dataframe().to_html(float_format="{:.3g}".format) if self.replications else ""
        return f"<p>{'<br>'.join(map(html.escape, lines))}</p>{table}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What limits the result: failed replications, few effective draws, omitted quantities."""
        notes = [f"omitted: {name} ({reason})" for name, reason in self.omitted.items()]
        if self.failures:
            number, reason = next(iter(self.failures.items()))
            notes.append(f"{len(self.failures)} replications failed and have no ranks; number {number}: {reason}")
        thin = [name for name, draws in self.draws.items() if len(draws) and float(draws.double().median()) < MIN_DRAWS]
        if thin:
            notes.append(
                f"fewer than {MIN_DRAWS} draws after thinning: {', '.join(thin)}; request more draws of the method"
            )
        return tuple(notes)


def describe_shape(positions: Tensor) -> str:
    """Describe how positions differ from uniform ones: by their mean, by their variance, or otherwise."""
    # For n uniform numbers the mean has variance 1/(12 n), and the mean of (u - 1/2)^2 has mean 1/12 and variance
    # 1/(180 n). Large positions mean draws below the true value; a large variance means that it is often in the tails.
    # The variance is that about their mean, because a shift of the mean moves all positions. The larger z-score names
    # the defect.
    u = positions.numpy() - 0.5
    mean_z = float(u.mean() * np.sqrt(12 * len(u)))
    variance_z = float((np.square(u - u.mean()).mean() - 1 / 12) * np.sqrt(180 * len(u)))
    if max(abs(mean_z), abs(variance_z)) < SHAPE_Z:
        return "not uniform"
    if abs(mean_z) > abs(variance_z):
        return "biased low" if mean_z > 0 else "biased high"
    return "too narrow" if variance_z > 0 else "too wide"

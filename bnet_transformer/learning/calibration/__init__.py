"""Simulation-based calibration: are the posteriors of a method correct for a net and a prior?

`simulation` (`calibrate`) draws parameters and data, fits, and ranks the true values; `quantities` computes the label-
invariant quantities of many draws; `bands` has the exact simultaneous bands and p values of an ECDF; `result` is
`Calibration`.
"""

from bnet_transformer.learning.calibration.result import Calibration
from bnet_transformer.learning.calibration.simulation import calibrate

__all__ = ["Calibration", "calibrate"]

"""Fitting nets with choices: MAP, EM, SVI and NUTS over one objective, the exact log evidence.

Data flows through these modules: `methods` (`fit`: checks, the table of methods, `explain_fit`), `problem` (objective
and configs of the methods), `restarts` with `adam` (MAP, EM: many restarts at once) or `sampling` (guides, chains),
`result` (`Fit`). A `Fit` uses `predictive` (predictions, posterior predictive checks), `head_summary` (heads and their
invariants) and `comparison` (two fits compared, heads of draws aligned). `from_pyro` creates a `Fit` from Pyro.

The E step of EM is `problem.FitObjective.expected_counts`, the M step `restarts.PointOptimizer.m_step`.
"""

from bnet_transformer.learning.fit.comparison import Comparison
from bnet_transformer.learning.fit.head_summary import Heads
from bnet_transformer.learning.fit.methods import explain_fit, fit
from bnet_transformer.learning.fit.predictive import Check
from bnet_transformer.learning.fit.problem import EM, MAP, NUTS, SVI
from bnet_transformer.learning.fit.result import Fit

__all__ = ["EM", "MAP", "NUTS", "SVI", "Check", "Comparison", "Fit", "Heads", "explain_fit", "fit"]

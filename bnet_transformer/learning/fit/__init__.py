"""Fitting nets with latent choices: MAP, EM, Laplace, SVI and NUTS with one objective, the exact log evidence.

A fit passes through these modules: `methods` (`fit`, its checks, the table of methods, `explain_fit`), `problem` (the
objective and the configs of the methods), `restarts` with `adam` (MAP, EM: many restarts at once), `laplace` or
`sampling` (SVI, NUTS), and `result` (`Fit`). `laplace` and `sampling` use `coordinates`, in which the `gauge` of
attention is fixed, and `importance` (weights of draws). A `Fit` uses `predictive` (predictions, posterior predictive
checks), `head_summary` (heads and their invariants) and `comparison` (comparison of two fits, alignment of the heads of
draws). `from_pyro` creates a `Fit` from a result of Pyro.
"""

from bnet_transformer.learning.fit.comparison import Comparison
from bnet_transformer.learning.fit.head_summary import Heads
from bnet_transformer.learning.fit.methods import explain_fit, fit
from bnet_transformer.learning.fit.predictive import Check
from bnet_transformer.learning.fit.problem import EM, MAP, NUTS, SVI, Laplace
from bnet_transformer.learning.fit.result import Fit

__all__ = ["EM", "MAP", "NUTS", "SVI", "Check", "Comparison", "Fit", "Heads", "Laplace", "explain_fit", "fit"]

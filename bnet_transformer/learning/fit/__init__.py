"""Fitting nets with latent choices: MAP, EM, Laplace, SVI and NUTS with one objective, the exact log evidence.

A fit passes through these modules: `methods` (`fit`, its checks, the table of methods, `explain_fit`), `problem` (the
objective and the configs of the methods), `point` (MAP and EM: `restarts` with `adam`, or `second_order` with
`gauss_newton`, `curvature` and `split_merge`), `laplace`, `variational` (SVI) or `nuts`, and `result` (`Fit`). These
three use `coordinates`, in which the `gauge` of attention is fixed, `approximation` (the Normal distribution at a
mode) with `importance` (weights of draws), and `symmetries` (the equal modes that an evidence counts). A `Fit`
uses `predictive` (predictions, posterior predictive checks), `head_summary` (heads and their invariants), `comparison`
(comparison of two fits, alignment of the heads of draws) and `arviz_groups` (the export to ArviZ). `from_pyro` creates
a `Fit` from a result of Pyro. `model_comparison` compares many fits in one table, and `cross_validation` fits each
number of heads.
"""

from bnet_transformer.learning.fit.comparison import Comparison
from bnet_transformer.learning.fit.cross_validation import fit_heads
from bnet_transformer.learning.fit.head_summary import Heads
from bnet_transformer.learning.fit.methods import explain_fit, fit
from bnet_transformer.learning.fit.model_comparison import ModelComparison, compare
from bnet_transformer.learning.fit.predictive import Check
from bnet_transformer.learning.fit.problem import EM, MAP, NUTS, SVI, Laplace
from bnet_transformer.learning.fit.result import Fit

__all__ = [
    "EM",
    "MAP",
    "NUTS",
    "SVI",
    "Check",
    "Comparison",
    "Fit",
    "Heads",
    "Laplace",
    "ModelComparison",
    "compare",
    "explain_fit",
    "fit",
    "fit_heads",
]

"""Fitting nets with latent choices: MAP, EM, Laplace, SVI and NUTS with one objective, the exact log evidence.

A fit passes through these modules: `methods` (`fit`, its checks, the table of methods, the plan), `objective` (the
objective and the configs of the methods), `em` (MAP and EM by second-order steps, with `curvature`) or `adam` (the same
to first order), `laplace`, `svi` or `nuts`, `restarts` (the run of several restarts, and the creation of the fit, which
the methods share), and `result` (`Fit`). `laplace`, `svi` and `nuts` use
`coordinates`, in which the gauge of attention is fixed, and from `laplace` the Normal distribution at a mode and the
equal modes that an evidence counts. `identification` states what the likelihood does not identify, and `diagnostics`
what limits a fit. A `Fit` uses `predictive` (predictions, posterior predictive checks), `heads` (heads and their
invariants, matched heads of two fits, alignment of the heads of draws) and `arviz_groups` (the export to ArviZ).
`from_pyro` creates a `Fit` from a result of Pyro. `model_comparison` compares many fits in one table, and fits each
number of heads.
"""

from bnet_transformer.learning.fit.em import EM, MAP
from bnet_transformer.learning.fit.heads import Comparison, Heads
from bnet_transformer.learning.fit.laplace import Laplace
from bnet_transformer.learning.fit.methods import fit
from bnet_transformer.learning.fit.model_comparison import ModelComparison, compare, fit_heads
from bnet_transformer.learning.fit.nuts import NUTS
from bnet_transformer.learning.fit.predictive import Check
from bnet_transformer.learning.fit.result import Fit
from bnet_transformer.learning.fit.svi import SVI

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
    "fit",
    "fit_heads",
]

"""Fitting nets with choices: MAP, EM, SVI and NUTS over one objective, the exact log evidence.

`objective` is what all methods make large, `recipe` how; `descent` and `ascent` follow many restarts at once,
`sampling` gives posteriors; `result` is what comes out, with `heads`, `matching`, `predictive`, `samples`, `saved`.
"""

from bnet_transformer.inference.fit.heads import Heads
from bnet_transformer.inference.fit.matching import Comparison
from bnet_transformer.inference.fit.predictive import Check
from bnet_transformer.inference.fit.result import Fit
from bnet_transformer.inference.fit.run import fit

__all__ = ["Check", "Comparison", "Fit", "Heads", "fit"]

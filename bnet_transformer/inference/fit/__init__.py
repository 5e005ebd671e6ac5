"""Fitting nets with choices: MAP, EM, SVI and NUTS over one objective, the exact log evidence.

`objective` is what all methods make large. `methods` has their options, and `run` the table of the functions that
solve a problem by them: `point` (with `ascent` and `descent`, which take steps of many restarts at once) and `sampling`
(with `variational` and `chains`). `explain` says how before it starts. `result` is what comes out, with `heads`,
`matching`, `predictive`, `samples`, and `saved`; `from_pyro` makes one of what a user found with Pyro.
"""

from bnet_transformer.inference.fit.heads import Comparison, Heads
from bnet_transformer.inference.fit.methods import EM, MAP, NUTS, SVI
from bnet_transformer.inference.fit.predictive import Check
from bnet_transformer.inference.fit.result import Fit
from bnet_transformer.inference.fit.run import explain_fit, fit

__all__ = ["EM", "MAP", "NUTS", "SVI", "Check", "Comparison", "Fit", "Heads", "explain_fit", "fit"]

"""Fitting nets with choices: MAP, EM, SVI and NUTS over one objective, the exact log evidence.

`problem` has the objective that all methods make large, and their options; `run` is the table of the functions that
solve a problem by them: `ascent` takes steps of many restarts at once, `sampling` has guides and chains. `explain`
says how before it starts. `result` is what comes out, with `heads`; `run` makes one of what a user found with Pyro
too.
"""

from bnet_transformer.learning.fit.head_summary import Comparison, Heads
from bnet_transformer.learning.fit.methods import explain_fit, fit
from bnet_transformer.learning.fit.problem import EM, MAP, NUTS, SVI
from bnet_transformer.learning.fit.result import Check, Fit

__all__ = ["EM", "MAP", "NUTS", "SVI", "Check", "Comparison", "Fit", "Heads", "explain_fit", "fit"]

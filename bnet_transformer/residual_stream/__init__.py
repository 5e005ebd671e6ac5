"""The residual stream: what each writer adds to a readout or a score, and what the readout makes of every state.

Contributions: `linear_paths` runs a sentence and passes back along sums, linear maps and norms with fixed scales, and
collects the parts of the pass in a table of writers; or it passes forward, from the writers to many vectors.
`contributions` uses the pass back for a readout, with exact effects, and the pass forward for the values of all heads
(paths of two) and for a query and its keys (scores). `results` has the tables, and the readouts.

Lenses: `lens` applies the readout to every state (the logit lens), and `tuned_lens` fits the affine maps that correct
early states.
"""

from bnet_transformer.residual_stream.lens import Lens, compute_lens
from bnet_transformer.residual_stream.results import Contributions, PathContributions, ScoreContributions
from bnet_transformer.residual_stream.tuned_lens import TunedLens, fit_lens

__all__ = ["Contributions", "Lens", "PathContributions", "ScoreContributions", "TunedLens", "compute_lens", "fit_lens"]

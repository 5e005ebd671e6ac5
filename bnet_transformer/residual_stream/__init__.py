"""The residual stream: what each writer adds to a readout or a score, and what the readout makes of every state.

The pipeline of contributions: `linear_paths` runs a sentence and passes from a readout back along sums, linear maps and
norms with fixed scales; `writers` collects the parts of a pass in a table; `contributions` parses the readout, and adds
paths of two and exact effects; `score_contributions` combines the parts of a query and of the keys; `results` contains
the tables. Lenses: `lens_path` finds the states and the readout, `lens` applies the readout to every state, and
`tuned_lens` fits the affine maps that correct early states.
"""

from bnet_transformer.residual_stream.lens import Lens, compute_lens
from bnet_transformer.residual_stream.results import Contributions, PathContributions, ScoreContributions
from bnet_transformer.residual_stream.tuned_lens import TunedLens, fit_lens

__all__ = ["Contributions", "Lens", "PathContributions", "ScoreContributions", "TunedLens", "compute_lens", "fit_lens"]

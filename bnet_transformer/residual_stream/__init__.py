"""The residual stream: what each writer adds to a readout or a score, and what the readout makes of every state.

Contributions: `linear_groups` has the structure of the paths. `linear_paths` runs a sentence and passes back along
sums, linear maps and norms with fixed scales, and `writers` collects the parts of a pass in a table. `readout` parses a
readout and starts its pass, and `contributions` adds exact effects. `decomposition` passes forward instead, from the
writers to many vectors: the values of all heads (`path_contributions`), and a query and its keys
(`score_contributions`). `results` has the tables.

Lenses: `lens_path` finds the states and the readout, `lens` applies the readout to every state, and `tuned_lens` fits
the affine maps that correct early states.
"""

from bnet_transformer.residual_stream.lens import Lens, compute_lens
from bnet_transformer.residual_stream.results import Contributions, PathContributions, ScoreContributions
from bnet_transformer.residual_stream.tuned_lens import TunedLens, fit_lens

__all__ = ["Contributions", "Lens", "PathContributions", "ScoreContributions", "TunedLens", "compute_lens", "fit_lens"]

"""The residual stream: what each writer (embedding, head, feed-forward step, bias) adds to a logit or to a score.

`linear_groups` has the structure of the paths. `linear_paths` runs a sentence and passes back along sums, linear maps
and norms with fixed scales, and `writers` collects the parts of a pass in a table. `readout` parses a readout and
starts its pass, and `contributions` adds exact effects. `decomposition` passes forward instead, from the writers to
many vectors: the values of all heads (`path_contributions`), and a query and its keys (`score_contributions`).
`results` has the tables.
"""

from bnet_transformer.residual_stream.results import Contributions, PathContributions, ScoreContributions

__all__ = ["Contributions", "PathContributions", "ScoreContributions"]

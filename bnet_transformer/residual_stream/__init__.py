"""The residual stream: what each writer (embedding, head, feed-forward step, bias) adds to a logit or to a score.

The pipeline: `linear_paths` runs a sentence and passes from a readout back along sums, linear maps and norms with fixed
scales; `writers` collects the parts of a pass in a table; `contributions` parses the readout, and adds paths of two and
exact effects; `score_contributions` combines the parts of a query and of the keys; `results` contains the tables.
"""

from bnet_transformer.residual_stream.results import Contributions, PathContributions, ScoreContributions

__all__ = ["Contributions", "PathContributions", "ScoreContributions"]

"""Inference on the compiled reading: exact elimination of the discrete choices, for a batch of sentences at once."""

from bnet_transformer.inference import ground
from bnet_transformer.inference.exact import log_evidence, posterior
from bnet_transformer.inference.factors import Evidence

__all__ = ["Evidence", "ground", "log_evidence", "posterior"]

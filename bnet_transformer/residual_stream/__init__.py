"""The residual stream: the states `x_0`, ..., `x_T` of a stack, which the slices change one after another.

`lens` applies the readout to every state, and `tuned_lens` fits the affine maps that correct early states.
"""

from bnet_transformer.residual_stream.lens import Lens as Lens, compute_lens as compute_lens
from bnet_transformer.residual_stream.tuned_lens import TunedLens as TunedLens, fit_lens as fit_lens

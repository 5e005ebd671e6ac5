"""The architectures: functions that return a `BNet`.

To add an architecture, write its function and add its name to `ARCHITECTURES`; it becomes `bt.models.<name>`.
`builders` contains what several architectures share. `weights_of` converts the weights of torch's modules, and
`shift_right` computes a decoder's inputs from its outputs.
"""

from bnet_transformer.models.bayesuvius import bayesuvius
from bnet_transformer.models.builders import shift_right, weights_of
from bnet_transformer.models.geometric import geometric, volume_preserving
from bnet_transformer.models.recurrent import recurrent
from bnet_transformer.models.transformer import decoder, encoder, encoder_decoder

ARCHITECTURES = ["bayesuvius", "decoder", "encoder", "encoder_decoder", "geometric", "recurrent", "volume_preserving"]

__all__ = [
    "bayesuvius",
    "decoder",
    "encoder",
    "encoder_decoder",
    "geometric",
    "recurrent",
    "shift_right",
    "volume_preserving",
    "weights_of",
]

"""The TPMs: one small final class for each kind of conditional distribution, over one abstract base.

A TPM of your own is a frozen dataclass that extends `TPM` and writes the equation of one ground node.
"""

from bnet_transformer.tpm.attention import Attention, Read
from bnet_transformer.tpm.base import TPM, At, Parameter, Parent, Product
from bnet_transformer.tpm.bias import Bias, Buckets, Relative
from bnet_transformer.tpm.cayley import Cayley
from bnet_transformer.tpm.combine import Add, Concat, Dropout, Pool
from bnet_transformer.tpm.discrete import Categorical, Codebook, Select
from bnet_transformer.tpm.images import Patches, Start
from bnet_transformer.tpm.linear import Affine, Linear
from bnet_transformer.tpm.norm import Norm
from bnet_transformer.tpm.normal import Normal
from bnet_transformer.tpm.packed import Skew, Triangular
from bnet_transformer.tpm.recurrent import Gated, Memory, Recur
from bnet_transformer.tpm.roots import Embed, Given, Positions, Sinusoid, Weight
from bnet_transformer.tpm.rotary import Rotary
from bnet_transformer.tpm.score import Bilinear, Dot, Normaliser, Score
from bnet_transformer.tpm.steps import Activation, FeedForward, ResNet, Scale

__all__ = [
    "TPM",
    "Activation",
    "Add",
    "Affine",
    "At",
    "Attention",
    "Bias",
    "Bilinear",
    "Buckets",
    "Categorical",
    "Cayley",
    "Codebook",
    "Concat",
    "Dot",
    "Dropout",
    "Embed",
    "FeedForward",
    "Gated",
    "Given",
    "Linear",
    "Memory",
    "Norm",
    "Normal",
    "Normaliser",
    "Parameter",
    "Parent",
    "Patches",
    "Pool",
    "Positions",
    "Product",
    "Read",
    "Recur",
    "Relative",
    "ResNet",
    "Rotary",
    "Scale",
    "Score",
    "Select",
    "Sinusoid",
    "Skew",
    "Start",
    "Triangular",
    "Weight",
]

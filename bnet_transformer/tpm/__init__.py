"""The TPMs: one small final class for each kind of conditional distribution, over one abstract base.

A TPM of your own is a frozen dataclass that extends `TPM` and writes the equation of one ground node.
"""

from bnet_transformer.tpm.attention import Attention, Read
from bnet_transformer.tpm.base import TPM, At, Parameter, Parent, Product
from bnet_transformer.tpm.cayley import Cayley
from bnet_transformer.tpm.combine import Add, Concat, Dropout, Pool
from bnet_transformer.tpm.discrete import Categorical, Codebook, Select
from bnet_transformer.tpm.linear import Affine, Linear
from bnet_transformer.tpm.norm import Norm
from bnet_transformer.tpm.normal import Normal
from bnet_transformer.tpm.packed import Skew, Triangular
from bnet_transformer.tpm.recurrent import Gated, Memory, Recur
from bnet_transformer.tpm.roots import Embed, Given, Positions, Sinusoid, Weight
from bnet_transformer.tpm.score import Bilinear, Dot, Normaliser, Relative, Score
from bnet_transformer.tpm.steps import Activation, FeedForward, ResNet

__all__ = [
    "TPM",
    "Activation",
    "Add",
    "Affine",
    "At",
    "Attention",
    "Bilinear",
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
    "Pool",
    "Positions",
    "Product",
    "Read",
    "Recur",
    "Relative",
    "ResNet",
    "Score",
    "Select",
    "Sinusoid",
    "Skew",
    "Triangular",
    "Weight",
]

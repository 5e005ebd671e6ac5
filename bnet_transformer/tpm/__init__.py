"""TPMs: the conditional distributions of nodes given their parents. Each is one small final class.

A TPM (transition probability matrix) is what other libraries call a CPD. Your own TPM is a frozen dataclass that
extends `TPM`, the abstract base class in `base`, with the equation of one ground node.

The modules: `base` (the base class, and the checks of options), `roots` (inputs, weights), `deterministic` (linear
maps, sums, word-wise functions), `attention`, `random` (discrete and continuous nodes), `table` (given tables),
`volume_preserving` (Cayley and triangular maps). `symbols` writes equations. To add a TPM to the package, define it
in one of these modules and export it here; values, costs, figures and files follow from its methods.
"""

from bnet_transformer.tpm.attention import (
    Attention,
    Bias,
    Bilinear,
    Buckets,
    Dot,
    Normaliser,
    Read,
    Relative,
    Rotary,
    Score,
)
from bnet_transformer.tpm.base import TPM, EvalContext, Parameter, Parent, Patches, Product
from bnet_transformer.tpm.deterministic import (
    Activation,
    Add,
    Affine,
    Concat,
    Dropout,
    FeedForward,
    Gated,
    Linear,
    Memory,
    Multiple,
    Neurons,
    Norm,
    Pool,
    Recur,
    ResNet,
)
from bnet_transformer.tpm.random import Categorical, Codebook, Normal, Select
from bnet_transformer.tpm.roots import Embed, Given, Positions, Sinusoid, Start, Weight
from bnet_transformer.tpm.table import Table
from bnet_transformer.tpm.volume_preserving import Cayley, Skew, Triangular

__all__ = [
    "TPM",
    "Activation",
    "Add",
    "Affine",
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
    "EvalContext",
    "FeedForward",
    "Gated",
    "Given",
    "Linear",
    "Memory",
    "Multiple",
    "Neurons",
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
    "Score",
    "Select",
    "Sinusoid",
    "Skew",
    "Start",
    "Table",
    "Triangular",
    "Weight",
]

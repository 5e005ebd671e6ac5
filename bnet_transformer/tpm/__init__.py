"""TPMs: the conditional distributions of nodes given their parents. Each is one small final class.

A TPM (transition probability matrix) is what other libraries call a CPD. Your own TPM is a frozen dataclass that
extends `TPM`, the abstract base class in `base`, with the equation of one ground node.

The modules: `roots` (inputs, weights), `combine` (linear maps, sums), `steps` (word-wise functions), `score` and
`attention`, `random` (discrete and continuous nodes), `table` (given tables), `volume_preserving` (Cayley and
triangular maps). `field_checks` checks options, and `symbols` writes equations. To add a TPM to the package, define it
in one of these modules and export it here; values, costs, figures and files follow from its methods.
"""

from bnet_transformer.tpm.attention import Attention, Read
from bnet_transformer.tpm.base import TPM, EvalContext, Parameter, Parent, Product
from bnet_transformer.tpm.combine import Add, Affine, Concat, Linear, Pool
from bnet_transformer.tpm.random import Categorical, Codebook, Normal, Select
from bnet_transformer.tpm.roots import Embed, Given, Patches, Positions, Sinusoid, Start, Weight
from bnet_transformer.tpm.score import Bias, Bilinear, Buckets, Dot, Normaliser, Relative, Rotary, Score
from bnet_transformer.tpm.steps import Activation, Dropout, FeedForward, Gated, Memory, Norm, Recur, ResNet, Scale
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
    "Table",
    "Triangular",
    "Weight",
]

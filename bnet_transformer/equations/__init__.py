r"""The reading *equations*: the TPM of every node template in LaTeX, told per word, with words as rows,
with words as columns, or in index notation.

Passes: `groups` (slices with equal equations are told once), `tell` (a group becomes a row, in the letters of
`Notation`), `meanings` (what the letters stand for). Each TPM writes its own right-hand side (`TPM.latex`); no
architecture and no TPM is known here by name.
"""

from bnet_transformer.equations.render import equations
from bnet_transformer.equations.result import PAGE_SETUP, Equation, Equations

__all__ = ["PAGE_SETUP", "Equation", "Equations", "equations"]

r"""The equations of a net in LaTeX: for one word, with words as rows or as columns, or in index notation.

`render` joins the slices that share an equation and writes one row for each. Every TPM writes the right-hand side of
its equation (`TPM.latex`), so that this package contains no code for particular architectures or TPMs. `notation`
assigns letters to roles and plates and describes them. `result` contains the rows and lays them out.
"""

from bnet_transformer.equations.render import equations
from bnet_transformer.equations.result import PAGE_SETUP, Equation, Equations

__all__ = ["PAGE_SETUP", "Equation", "Equations", "equations"]

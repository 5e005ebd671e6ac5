r"""The TPM of every node template in LaTeX: for one word, with words as rows or as columns, or in index notation.

`render` joins the slices that share an equation and writes one row for each; every TPM writes its own right-hand side
(`TPM.latex`), so no architecture and no TPM is known here by name. `notation` assigns letters to roles and plates and
describes them. `result` holds the rows and lays them out.
"""

from bnet_transformer.equations.render import equations
from bnet_transformer.equations.result import PAGE_SETUP, Equation, Equations

__all__ = ["PAGE_SETUP", "Equation", "Equations", "equations"]

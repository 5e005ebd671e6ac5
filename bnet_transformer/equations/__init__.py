r"""The reading *equations*: the TPM of every node template in LaTeX, told per word, with words as rows,
with words as columns, or in index notation.

Passes: `groups` (slices with equal equations are told once), `tell` (a group becomes a row, in the letters of
`Letters`), `meanings` (what the letters stand for). Each TPM writes its own right-hand side (`TPM.latex`); no
architecture and no TPM is known here by name.
"""

from __future__ import annotations

from bnet_transformer.equations.letters import Letters, meanings
from bnet_transformer.equations.result import PAGE_SETUP, Equation, Equations
from bnet_transformer.equations.telling import groups, tell
from bnet_transformer.errors import one_of
from bnet_transformer.network import Network, network_of
from bnet_transformer.tpm.symbols import FORMS

__all__ = ["FORMS", "PAGE_SETUP", "Equation", "Equations", "equations"]


def equations(network: Network, form: str = "word") -> Equations:
    r"""The structural equations of a net, in one of four forms: `word`, `row`, `column`, `einstein`.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(4)
    >>> print(net.equations()["q_t"])
    P(q_i^t \mid W_q^t, x_i^t) = \mathbb{I}(\, q_i^t = W_q^t x_i^t \,)
    >>> print(net.equations("row")["q_t"])
    P(Q^t \mid W_q^t, X^t) = \mathbb{I}(\, Q^t = X^t (W_q^t)^\top \,)
    """
    one_of("form", form, FORMS)
    network = network_of(network)
    letters = Letters(network)
    told = [tell(group, form) for group in groups(network, letters)]
    rows = tuple(row for row, _ in told)
    said = [line for _, lines in told for line in lines]
    return Equations(form, rows, tuple(dict.fromkeys([*meanings(network, letters, form), *said])))

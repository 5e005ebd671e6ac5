"""Which heads matter, with uncertainty: gates on the heads that a net sums, their posterior; and what heads read.

    xi_(s, nu) ~ Bernoulli(rho_nu)      rho_nu ~ Beta(1, 1)      a = sum_nu xi_nu W_o^nu a^nu

`xi` is one gate for each sentence s and head nu of a slice.
"""

from __future__ import annotations

from bnet_transformer.attention.heads.head_inclusion import damage, inclusion
from bnet_transformer.attention.heads.head_roles import Roles, roles
from bnet_transformer.attention.heads.head_tables import Damage, Inclusion

__all__ = ["Damage", "Inclusion", "Roles", "damage", "inclusion", "roles"]

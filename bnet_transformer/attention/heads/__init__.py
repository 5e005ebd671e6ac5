"""The importance of heads, with uncertainty: the posterior of gates on summed heads; and what heads attend to.

    xi_(s, nu) ~ Bernoulli(rho_nu)      rho_nu ~ Beta(1, 1)      a = sum_nu xi_nu W_o^nu a^nu

`xi` is one gate for each sentence s and head nu of a slice. `gated_runs` computes the likelihood of sentences with
gates, and `gate_posterior` and `gibbs_posterior` the posterior of the gates. `head_inclusion` combines it with
ablation and gradient importance into the results of `head_tables`. `head_attention` computes what heads attend to, and
`head_roles` summarizes it.
"""

from __future__ import annotations

from bnet_transformer.attention.heads.head_inclusion import damage, inclusion
from bnet_transformer.attention.heads.head_roles import Roles, roles
from bnet_transformer.attention.heads.head_tables import Damage, Inclusion

__all__ = ["Damage", "Inclusion", "Roles", "damage", "inclusion", "roles"]

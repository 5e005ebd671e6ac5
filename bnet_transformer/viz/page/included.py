"""How the page has the heads that are in: a table that a user made, or the posterior that `inclusion` found."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from bnet_transformer.errors import BNetError
from bnet_transformer.inference.heads import Inclusion
from bnet_transformer.network import Network
from bnet_transformer.tpm.arrays import in_numpy


def included(network: Network, told: object) -> dict[str, Any] | None:
    """A row for each slice (for each family of heads, of a posterior) and in it a share for each head, from 0 to 1."""
    if told is None:
        return None
    return _found(network, told) if isinstance(told, Inclusion) else _table(network, told)


def _found(network: Network, told: Inclusion) -> dict[str, Any]:
    """The posterior mean of `rho`, with its interval and the log Bayes factor of each head."""
    families = {member.family.name: member.family for member in network.members}
    heads = told.mean.shape[1]
    for name in told.slices:
        family = families.get(name)
        sizes = None if family is None else [network.graph.sizes[plate] for plate in family.plates]
        if sizes != [heads]:
            got = "no such family" if sizes is None else f"{sizes[0]} of them" if sizes else "one without heads"
            expected = f"the inclusion of heads of this net, {heads} of {name}"
            raise BNetError("inclusion", expected=expected, got=got, allowed="bt.inclusion(s.net, sentences)")
    s = "s" * (told.sentences != 1)
    sigma = "" if told.sigma is None else f", sigma {told.sigma:.3g}"
    return {
        "title": "Share of sentences in which a head is in",
        "note": f"By {told.sentences:,} sentence{s}: the mean of rho, its interval of {told.interval:.0%} as a line. "
        f"{told.likelihood}{sigma}.",
        "rows": list(told.slices),
        "shares": _rounded(told.mean),
        "low": _rounded(told.low),
        "high": _rounded(told.high),
        "log_bayes": _rounded(told.log_bayes),
    }


def _rounded(values: Tensor) -> list[list[float]]:
    found: list[list[float]] = in_numpy(values.double()).round(6).tolist()
    return found


def _table(network: Network, told: object) -> dict[str, Any]:
    """The probability that each head is in, `[slice, head]`; one row stands for every slice."""
    try:
        table = np.atleast_2d(np.asarray(told.tolist() if isinstance(told, Tensor) else told, dtype=np.float64))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        wanted = "probabilities, [slice, head], or what bt.inclusion found"
        raise BNetError("inclusion", expected=wanted, got=told) from error
    graph = network.graph
    slices = graph.depth
    states = {m.tpm.states for m in network.members if m.tpm.kind == "discrete" and graph.out_of[m.family.index]}
    heads = {graph.sizes["head"]} if "head" in graph.sizes else states
    if table.ndim != 2 or table.shape[0] not in (1, slices) or table.shape[1] not in heads:
        wanted = f"probabilities of shape [{slices}, {' or '.join(map(str, sorted(h for h in heads if h)))}]"
        raise BNetError("inclusion", expected=wanted, got=f"shape {list(table.shape)}")
    if not ((table >= 0) & (table <= 1)).all():
        raise BNetError("inclusion", expected="probabilities from 0 to 1", got=told)
    shares: list[list[float]] = np.broadcast_to(table, (slices, table.shape[1])).round(6).tolist()
    return {"title": "P(head is in)", "rows": [f"slice {k}" for k in range(slices)], "shares": shares}

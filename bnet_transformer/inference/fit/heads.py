"""What a fitted net says of its heads: how much each is used, and what they are up to a change of basis."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bnet_transformer.network import Input, Member, Network
from bnet_transformer.tpm import Attention, Codebook, Linear, Select, Weight

if TYPE_CHECKING:
    import pandas as pd

DEAD = 0.01  # a head with a smaller share than this is dead


@dataclass(frozen=True)
class Heads:
    """The heads of a selector: shares, how many there are in effect, and what no change of basis alters.

    `A` is `W_q^T W_k` and `OV` is `W_v`, `[head, dim, dim]`, by the attention that reads with them; under codebooks
    the mean over a head's atoms; of a posterior the means over its draws, as `usage` is. `cosine` compares the heads
    with each other, `[head, head]`.
    """

    selector: str
    usage: Tensor
    A: Mapping[str, Tensor] = field(repr=False)
    OV: Mapping[str, Tensor] = field(repr=False)

    @property
    def effective(self) -> float:
        """How many heads there are in effect: `exp H(pi)`."""
        return float(torch.special.entr(self.usage).sum().exp())

    @property
    def dead(self) -> tuple[int, ...]:
        """The heads that are hardly ever drawn: a share below 1 in 100."""
        return tuple((self.usage < DEAD).nonzero()[:, 0].tolist())

    @property
    def live(self) -> int:
        """How many heads are not dead."""
        return len(self.usage) - len(self.dead)

    @property
    def cosine(self) -> dict[str, Tensor]:
        """Between the heads: of `A` and `OV` of each attention."""
        return {f"{what} {name}": cosines(value, value) for what, name, value in self._matrices()}

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each head."""
        import pandas as pd

        rows = {"usage": self.usage.tolist(), "dead": [head in self.dead for head in range(len(self.usage))]}
        rows |= {f"|{what}| {name}": value.flatten(1).norm(dim=1).tolist() for what, name, value in self._matrices()}
        return pd.DataFrame(rows, index=pd.RangeIndex(len(self.usage), name="head"))

    def _repr_html_(self) -> str:
        told = f"{self.selector}: {self.live} live heads of {len(self.usage)}, {self.effective:.2f} in effect"
        return f"<p>{html.escape(told)}</p>{self.to_dataframe().to_html(float_format='{:.3f}'.format)}"

    def _matrices(self) -> list[tuple[str, str, Tensor]]:
        return [(what, name, value) for what, by in (("A", self.A), ("OV", self.OV)) for name, value in by.items()]


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """The cosine between each matrix of a and each of b."""
    a, b = (x.flatten(1) / x.flatten(1).norm(dim=1, keepdim=True).clamp(min=1e-30) for x in (a, b))
    return a @ b.mT


def heads_of(network: Network, selector: Member) -> Heads:
    """The heads of one selector."""
    usage = network.parameters[f"{selector.owner}.logits"].detach().softmax(-1)
    found = invariants(network, selector, network.parameters)
    return Heads(selector.family.name, usage, *parted(found))


def parted(found: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Invariants as those of `A` and of `OV`, each by its attention."""
    A, OV = ({k[len(what) :]: v for k, v in found.items() if k.startswith(what)} for what in ("A ", "OV "))
    return A, OV


def invariants(network: Network, selector: Member, store: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`A x_1`, `OV x_1` and so on, `[head, dim, dim]`; draws of parameters lead, as they do in the store."""
    found = {}
    for what, sources in sources_of(network, selector).items():
        made = [_made([store[name].detach() for name in names]) for names in sources]
        found[what] = made[0].mT @ made[1] if len(made) == 2 else made[0]
    return found


def sources_of(network: Network, selector: Member) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The parameters that each invariant of the heads is made of: those of `W_q` and `W_k`, or those of `W_v`."""
    found: dict[str, tuple[tuple[str, ...], ...]] = {}
    for member in network.members:
        if not isinstance(member.tpm, Attention):
            continue
        q, k, v = (*[_sources(network, given, selector) for given in member.inputs[:3]], None, None, None)[:3]
        if q is not None and k is not None:
            found[f"A {member.family.name}"] = q, k
        if v is not None:
            found[f"OV {member.family.name}"] = (v,)
    return found


def _sources(network: Network, given: Input, selector: Member) -> tuple[str, ...] | None:
    """The parameters of the matrices, `[head, out, in]`, that make what an attention reads; None where none are."""
    made = network.members[given.parent]
    if not isinstance(made.tpm, Linear) or made.tpm.dim is not None:
        return None
    weight, index = network.members[made.inputs[0].parent], selector.family.index
    parents = [each.parent for each in weight.inputs]
    if isinstance(weight.tpm, Select) and parents == [index]:
        return (f"{weight.owner}.values",)
    if isinstance(weight.tpm, Codebook) and parents == [index]:
        return f"{weight.owner}.logits", f"{weight.owner}.atoms"
    picks = [by for _, by in given.pick]
    if isinstance(weight.tpm, Weight) and len(weight.family.plates) == 1 == len(picks):
        drawn = network.members[picks[0]]
        if picks == [index]:
            return (f"{weight.owner}.value",)
        if [each.parent for each in drawn.inputs] == [index]:
            return f"{drawn.owner}.logits", f"{weight.owner}.value"
    return None


def _made(of: list[Tensor]) -> Tensor:
    """The matrices of the heads: as they stand, or the mean over a head's atoms."""
    return of[0] if len(of) == 1 else torch.einsum("...cm,...moi->...coi", of[0].softmax(-1), of[1])

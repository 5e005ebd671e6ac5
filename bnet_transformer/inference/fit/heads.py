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
    the mean over a head's atoms. `cosine` compares the heads with each other, `[head, head]`.
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
    A, OV = {}, {}
    for member in network.members:
        if not isinstance(member.tpm, Attention):
            continue
        found = [_weights(network, given, selector) for given in member.inputs[:3]]
        q, k, v = (*found, *[None] * 3)[:3]
        if q is not None and k is not None:
            A[member.family.name] = q.mT @ k
        if v is not None:
            OV[member.family.name] = v
    return Heads(selector.family.name, usage, A, OV)


def _weights(network: Network, given: Input, selector: Member) -> Tensor | None:
    """The matrices of each head, `[head, out, in]`, that make what an attention reads; None where they are no such."""
    made = network.members[given.parent]
    if not isinstance(made.tpm, Linear) or made.tpm.dim is not None:
        return None
    weight = network.members[made.inputs[0].parent]
    store, index = network.parameters, selector.family.index
    parents = [each.parent for each in weight.inputs]
    if isinstance(weight.tpm, Select) and parents == [index]:
        return store[f"{weight.owner}.values"].detach()
    if isinstance(weight.tpm, Codebook) and parents == [index]:
        return _mean(store[f"{weight.owner}.logits"], store[f"{weight.owner}.atoms"])
    picks = [by for _, by in given.pick]
    if isinstance(weight.tpm, Weight) and len(weight.family.plates) == 1 == len(picks):
        drawn = network.members[picks[0]]
        value = store[f"{weight.owner}.value"].detach()
        if picks == [index]:
            return value
        if [each.parent for each in drawn.inputs] == [index]:
            return _mean(store[f"{drawn.owner}.logits"], value)
    return None


def _mean(logits: Tensor, atoms: Tensor) -> Tensor:
    return torch.einsum("cm,moi->coi", logits.detach().softmax(-1), atoms.detach())

"""What a fitted net says of its heads, and two fits beside each other.

Of heads: how much each is used, and what they are up to a change of basis. Heads of two fits have no names in common:
they are matched by what they answer for.
"""

from __future__ import annotations

import html
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bnet_transformer.data import Batch
from bnet_transformer.errors import BNetError
from bnet_transformer.network import Input, Member, Network
from bnet_transformer.tpm import Attention, Codebook, Linear, Select, Weight

if TYPE_CHECKING:
    import pandas as pd

    from bnet_transformer.inference.fit.result import Fit

LEFT_OUT = "leave-one-out (PSIS, az.loo)"
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


@dataclass(frozen=True)
class Comparison:
    """Two fits on the same sentences.

    `match[h]` is the head of the other fit that answers for what head h answers for (-1 where it has none left),
    `agreement` the adjusted Rand index of the most responsible heads, `gain` the mean log likelihood of a sentence
    under this fit less that under the other, with its standard error (`judged_by` says which likelihood). `A` and
    `OV` are cosines of matched heads.
    """

    match: tuple[int, ...]
    overlap: Tensor = field(repr=False)
    agreement: float
    gain: float
    gain_error: float
    A: dict[str, Tensor] = field(repr=False)
    OV: dict[str, Tensor] = field(repr=False)
    judged_by: str = "log likelihood"

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each head of this fit."""
        import pandas as pd

        rows: dict[str, list[float]] = {"match": list(self.match)}
        rows["overlap"] = [float(self.overlap[h, m]) if m >= 0 else 0.0 for h, m in enumerate(self.match)]
        for what, by in (("A", self.A), ("OV", self.OV)):
            rows |= {f"cosine {what} {name}": value.tolist() for name, value in by.items()}
        return pd.DataFrame(rows, index=pd.RangeIndex(len(self.match), name="head"))

    def _repr_html_(self) -> str:
        told = f"ARI {self.agreement:.3f}; {self.gain:+.4f} ± {self.gain_error:.4f} nats a sentence"
        told += f" by {self.judged_by}"
        return f"<p>{html.escape(told)}</p>{self.to_dataframe().to_html(float_format='{:.3f}'.format)}"


def overlap_of(a: Tensor, b: Tensor, present: Tensor | None = None) -> Tensor:
    """How many sentences (or words, of those that are `present`) both heads answer for, `[head of a, head of b]`."""
    if present is not None:
        a = a * present[..., None]
    return a.flatten(0, -2).mT @ b.flatten(0, -2).to(a.dtype)


def words_present(member: Member, corpus: Batch) -> Tensor | None:
    """Which words of which sentence a selector of words draws for, `[sentence, word]`; None for all, or sentences."""
    stack = member.family.words
    if stack is None:
        return None
    if corpus.mask is not None and stack in corpus.mask:
        return corpus.mask[stack]
    shown = [told.observed for told in corpus.evidence.values()]
    known = [each for each in shown if each is not None and each.shape == corpus.x[stack].shape[:2]]
    return torch.stack(known).any(0) if known and len(known) == len(shown) else None


def matched(overlap: Tensor) -> tuple[int, ...]:
    """For each row the column that it goes with, none twice, their sum the greatest; -1 where no column is left."""
    rows, columns = linear_sum_assignment(overlap.detach().cpu().numpy(), maximize=True)
    found = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    return tuple(found.get(row, -1) for row in range(len(overlap)))


def compared(
    shares: Sequence[Tensor], present: Tensor | None, heads: Sequence[Heads], by: str, gain: Tensor
) -> Comparison:
    """Two fits by their responsibilities (of the words `present`), their heads, and the gain of each sentence."""
    (a, b), (mine, theirs) = shares, heads
    if a.shape[:-1] != b.shape[:-1]:
        got = f"responsibilities of shape {tuple(a.shape)} and {tuple(b.shape)}"
        wanted = "selectors that draw for the same things: both for sentences, or both for their words"
        raise BNetError("compare", expected=wanted, got=got, allowed="selector=")
    from sklearn.metrics import adjusted_rand_score  # slow to import

    match = matched(overlap := overlap_of(a.double(), b.double(), present))
    most = [share.argmax(-1) if present is None else share.argmax(-1)[present] for share in shares]
    labels = [label.flatten().cpu().numpy() for label in most]
    return Comparison(
        match,
        overlap,
        float(adjusted_rand_score(*labels)),
        float(gain.mean()),
        float(gain.std() / len(gain) ** 0.5) if len(gain) > 1 else float("nan"),
        {k: _of_match(v, theirs.A[k], match) for k, v in mine.A.items() if k in theirs.A},
        {k: _of_match(v, theirs.OV[k], match) for k, v in mine.OV.items() if k in theirs.OV},
        by,
    )


def held_by_both(one: Batch | None, other: Batch | None) -> tuple[Batch, Batch]:
    """The sentences that two fits were fitted to, where they are the same."""
    if one is None or other is None:
        got = "none: a net, or a fit that was loaded, does not hold the sentences that it was fitted to"
        raise BNetError("data", expected="sentences to compare on", got=got, allowed="data=")
    if not one.same(other):
        wanted, got = "two fits of the same sentences in the same order", "fits of other sentences"
        raise BNetError("compare", expected=wanted, got=got, allowed="data=")
    return one, other


def gains(one: Fit[Any], other: Fit[Any], corpora: Sequence[Batch], *, told: bool) -> tuple[str, Tensor]:
    """By which likelihood two fits are compared, and how much more of each sentence the first foretells."""
    both = one.log_likelihoods is not None and other.log_likelihoods is not None
    if not told and both and find_spec("arviz") is not None:
        return LEFT_OUT, _left_out(one) - _left_out(other)
    mine, theirs = (fit.log_likelihood(corpus).double() for fit, corpus in zip((one, other), corpora, strict=True))
    return "log likelihood of " + ("the data told" if told else "the sentences learned from"), mine - theirs


def _left_out(fit: Fit[Any]) -> Tensor:
    """The log probability of each sentence given all others, `[sentence]`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "\nArviZ is undergoing", FutureWarning)
        import arviz as az
    found: Any = az.loo(fit.to_arviz(), var_name="y", pointwise=True)  # type: ignore[no-untyped-call]
    return torch.as_tensor(found.loo_i.values, dtype=torch.float64)


def _of_match(a: Tensor, b: Tensor, match: tuple[int, ...]) -> Tensor:
    """The cosine of each head's matrix and that of its match; NaN where it has none."""
    same = a.shape[1:] == b.shape[1:]
    table = cosines(a, b.to(a.dtype)) if same else a.new_full((len(a), len(b)), torch.nan)
    return torch.stack([table[h, m] if m >= 0 else table.new_tensor(torch.nan) for h, m in enumerate(match)])

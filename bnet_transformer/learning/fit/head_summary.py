"""What a fitted net, or draws of its posterior, say of heads; two fits beside each other; ArviZ.

Of heads: how much each is used, and what they are up to a change of basis. Heads of two fits, or draws, have no names
in common: they are matched by what they answer for. Whatever is computed of many draws is computed in pieces.
"""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bnet_transformer.data import Batch
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.learning.fit.problem import FitObjective, to_parameters
from bnet_transformer.tpm import Attention, Codebook, Linear, Select, Weight
from bnet_transformer.tpm.arrays import to_numpy

if TYPE_CHECKING:
    import arviz as az
    import pandas as pd

    from bnet_transformer.learning.fit.result import Fit

LEAVE_ONE_OUT = "leave-one-out (PSIS, az.loo)"
DEAD_USAGE = 0.01  # a head with a smaller share than this is dead
MAX_CHUNK_NUMEL = 2**22  # numbers of the largest table that a piece holds: draws times sentences times joint states
MAX_INTERVAL_NUMEL = 2**28  # numbers of all draws of one matrix whose interval is still told
MATCHING_SENTENCES = 200  # sentences by whose responsibilities heads are matched
ARVIZ_DTYPES = {"diverging": "bool", "n_steps": "int64", "tree_depth": "int64"}  # as ArviZ has them


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
        return tuple((self.usage < DEAD_USAGE).nonzero()[:, 0].tolist())

    @property
    def live(self) -> int:
        """How many heads are not dead."""
        return len(self.usage) - len(self.dead)

    @property
    def cosine(self) -> dict[str, Tensor]:
        """Between the heads: of `A` and `OV` of each attention."""
        return {f"{what} {name}": cosine_matrix(value, value) for what, name, value in self._matrices()}

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


def cosine_matrix(a: Tensor, b: Tensor) -> Tensor:
    """The cosine between each matrix of a and each of b."""
    a, b = (x.flatten(1) / x.flatten(1).norm(dim=1, keepdim=True).clamp(min=1e-30) for x in (a, b))
    return a @ b.mT


def summarize_heads(network: Network, selector: NodeSpec, usage: Tensor, samples: Mapping[str, Tensor]) -> Heads:
    """The heads of one selector; of samples of a posterior the means over them."""
    if samples:
        found = mean_invariants(network, selector, samples_to_parameters(network, samples))
    else:
        found = invariants(network, selector, network.parameters)
    A, OV = ({k.removeprefix(what): v for k, v in found.items() if k.startswith(what)} for what in ("A ", "OV "))
    return Heads(selector.group.name, usage, A, OV)


def invariants(network: Network, selector: NodeSpec, store: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`A x_1`, `OV x_1` and so on, `[head, dim, dim]`; draws of parameters lead, as they do in the store."""
    found = {}
    for what, sources in find_invariant_parameters(network, selector).items():
        made = [_compute_matrices([store[name].detach() for name in names]) for names in sources]
        found[what] = made[0].mT @ made[1] if len(made) == 2 else made[0]
    return found


def find_invariant_parameters(network: Network, selector: NodeSpec) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The parameters that each invariant of the heads is made of: those of `W_q` and `W_k`, or those of `W_v`."""
    found: dict[str, tuple[tuple[str, ...], ...]] = {}
    for member in network.specs:
        if not isinstance(member.tpm, Attention):
            continue
        q, k, v = (
            *[_find_matrix_parameters(network, given, selector) for given in member.parents[:3]],
            None,
            None,
            None,
        )[:3]
        if q is not None and k is not None:
            found[f"A {member.group.name}"] = q, k
        if v is not None:
            found[f"OV {member.group.name}"] = (v,)
    return found


def _find_matrix_parameters(network: Network, parent: ParentSpec, selector: NodeSpec) -> tuple[str, ...] | None:
    """The parameters of the matrices, `[head, out, in]`, that make what an attention reads; None where none are."""
    made = network.specs[parent.index]
    if not isinstance(made.tpm, Linear) or made.tpm.dim is not None:
        return None
    weight, index = network.specs[made.parents[0].index], selector.group.index
    parents = [each.index for each in weight.parents]
    if isinstance(weight.tpm, Select) and parents == [index]:
        return (f"{weight.param_prefix}.values",)
    if isinstance(weight.tpm, Codebook) and parents == [index]:
        return f"{weight.param_prefix}.logits", f"{weight.param_prefix}.atoms"
    picks = [by for _, by in parent.pick]
    if isinstance(weight.tpm, Weight) and len(weight.group.plates) == 1 == len(picks):
        drawn = network.specs[picks[0]]
        if picks == [index]:
            return (f"{weight.param_prefix}.value",)
        if [each.index for each in drawn.parents] == [index]:
            return f"{drawn.param_prefix}.logits", f"{weight.param_prefix}.value"
    return None


def _compute_matrices(parameters: list[Tensor]) -> Tensor:
    """The matrices of the heads: as they stand, or the mean over a head's atoms."""
    return (
        parameters[0]
        if len(parameters) == 1
        else torch.einsum("...cm,...moi->...coi", parameters[0].softmax(-1), parameters[1])
    )


@dataclass(frozen=True)
class Comparison:
    """Two fits on the same sentences.

    `match[h]` is the head of the other fit that answers for what head h answers for (-1 where it has none left),
    `agreement` the adjusted Rand index of the most responsible heads, `gain` the mean log likelihood of a sentence
    under this fit less that under the other, with its standard error (`criterion` says which likelihood). `A` and
    `OV` are cosines of matched heads.
    """

    match: tuple[int, ...]
    overlap: Tensor = field(repr=False)
    agreement: float
    gain: float
    gain_error: float
    A: dict[str, Tensor] = field(repr=False)
    OV: dict[str, Tensor] = field(repr=False)
    criterion: str = "log likelihood"

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
        told += f" by {self.criterion}"
        return f"<p>{html.escape(told)}</p>{self.to_dataframe().to_html(float_format='{:.3f}'.format)}"


def count_overlap(a: Tensor, b: Tensor, present: Tensor | None = None) -> Tensor:
    """How many sentences (or words, of those that are `present`) both heads answer for, `[head of a, head of b]`."""
    if present is not None:
        a = a * present[..., None]
    return a.flatten(0, -2).mT @ b.flatten(0, -2).to(a.dtype)


def get_present_words(spec: NodeSpec, corpus: Batch) -> Tensor | None:
    """Which words of which sentence a selector of words draws for, `[sentence, word]`; None for all, or sentences."""
    stack = spec.group.word_stack
    if stack is None:
        return None
    if corpus.mask is not None and stack in corpus.mask:
        return corpus.mask[stack]
    shown = [told.observed for told in corpus.evidence.values()]
    known = [each for each in shown if each is not None and each.shape == corpus.x[stack].shape[:2]]
    return torch.stack(known).any(0) if known and len(known) == len(shown) else None


def match_heads(overlap: Tensor) -> tuple[int, ...]:
    """For each row the column that it goes with, none twice, their sum the greatest; -1 where no column is left."""
    rows, columns = linear_sum_assignment(overlap.detach().cpu().numpy(), maximize=True)
    found = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    return tuple(found.get(row, -1) for row in range(len(overlap)))


def compare(
    first: Fit[Any], second: Fit[Any], data: object, selector: str | None, selector_spec: NodeSpec
) -> Comparison:
    """Two fits by their responsibilities, their heads, and how much more of each sentence the first foretells."""
    told = data is not None
    if told:
        corpora = [fit._read_data(data) for fit in (first, second)]
    else:
        corpora = [*_get_shared_data(first.data, second.data)]
    a, b = (
        fit.responsibilities(corpus, selector=selector) for fit, corpus in zip((first, second), corpora, strict=True)
    )
    if a.shape[:-1] != b.shape[:-1]:
        got = f"responsibilities of shape {tuple(a.shape)} and {tuple(b.shape)}"
        wanted = "selectors that draw for the same things: both for sentences, or both for their words"
        raise BNetError("compare", expected=wanted, actual=got, allowed="selector=")
    mine, theirs = first.heads_of(selector), second.heads_of(selector)
    by, gain = _log_likelihood_gains(first, second, corpora, has_data=told)
    from sklearn.metrics import adjusted_rand_score  # slow to import

    present = get_present_words(selector_spec, corpora[0])
    match = match_heads(overlap := count_overlap(a.double(), b.double(), present))
    most = [share.argmax(-1) if present is None else share.argmax(-1)[present] for share in (a, b)]
    labels = [label.flatten().cpu().numpy() for label in most]
    return Comparison(
        match,
        overlap,
        float(adjusted_rand_score(*labels)),
        float(gain.mean()),
        float(gain.std() / len(gain) ** 0.5) if len(gain) > 1 else float("nan"),
        {k: _matched_cosines(v, theirs.A[k], match) for k, v in mine.A.items() if k in theirs.A},
        {k: _matched_cosines(v, theirs.OV[k], match) for k, v in mine.OV.items() if k in theirs.OV},
        by,
    )


def _get_shared_data(first: Batch | None, second: Batch | None) -> tuple[Batch, Batch]:
    """The sentences that two fits were fitted to, where they are the same."""
    if first is None or second is None:
        got = "none: a net, or a fit that was loaded, does not hold the sentences that it was fitted to"
        raise BNetError("data", expected="sentences to compare on", actual=got, allowed="data=")
    if not first.equals(second):
        wanted, got = "two fits of the same sentences in the same order", "fits of other sentences"
        raise BNetError("compare", expected=wanted, actual=got, allowed="data=")
    return first, second


def _log_likelihood_gains(
    first: Fit[Any], second: Fit[Any], corpora: Sequence[Batch], *, has_data: bool
) -> tuple[str, Tensor]:
    """By which likelihood two fits are compared, and how much more of each sentence the first foretells."""
    both = first.log_likelihoods is not None and second.log_likelihoods is not None
    if not has_data and both and find_spec("arviz") is not None:
        return LEAVE_ONE_OUT, _leave_one_out(first) - _leave_one_out(second)
    mine, theirs = (fit.log_likelihood(corpus).double() for fit, corpus in zip((first, second), corpora, strict=True))
    return "log likelihood of " + ("the data told" if has_data else "the sentences learned from"), mine - theirs


def _leave_one_out(fit: Fit[Any]) -> Tensor:
    """The log probability of each sentence given all others, `[sentence]`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "\nArviZ is undergoing", FutureWarning)
        import arviz as az
    found: Any = az.loo(fit.to_arviz(), var_name="y", pointwise=True)  # type: ignore[no-untyped-call]
    return torch.as_tensor(found.loo_i.values, dtype=torch.float64)


def _matched_cosines(a: Tensor, b: Tensor, match: tuple[int, ...]) -> Tensor:
    """The cosine of each head's matrix and that of its match; NaN where it has none."""
    same = a.shape[1:] == b.shape[1:]
    table = cosine_matrix(a, b.to(a.dtype)) if same else a.new_full((len(a), len(b)), torch.nan)
    return torch.stack([table[h, m] if m >= 0 else table.new_tensor(torch.nan) for h, m in enumerate(match)])


def find_selectors(network: Network) -> list[NodeSpec]:
    """The choices that hang on no other node, and that something reads."""
    return [member for member in network.choices if not member.parents]


def samples_to_parameters(network: Network, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Samples, one dim of draws in front, as parameters."""
    return to_parameters(network, {name: value.flatten(0, 1) for name, value in samples.items()})


def split_into_chunks(objective: FitObjective, corpus: Batch) -> tuple[int, list[Batch]]:
    """How many draws are computed at once, and the parts of the sentences, so that no table passes `MAX_CHUNK_NUMEL`."""
    with torch.no_grad():
        course, factors = objective(corpus.take(slice(0, 1)), lambda course, factors: (course, factors))
    tables = [*(factor.table for factor in factors), *course.values.values()]
    worded = [m for m in objective.network.specs if m.group.word_stack is not None or m.group.name in corpus.evidence]
    vectors = [m.tpm.states or 1 if m.tpm.kind == "discrete" else math.prod(m.shape) for m in worded]
    widest = max([*vectors, *(x.shape[1] for x in corpus.x.values()), 1])  # of one word: a vector, states, words read
    each = max([t.numel() for t in tables if isinstance(t, Tensor)], default=1) * widest
    if objective.has_corpus_choice:
        return max(1, MAX_CHUNK_NUMEL // (each * len(corpus))), [corpus]
    sentences = max(1, min(len(corpus), MAX_CHUNK_NUMEL // each))
    return max(1, MAX_CHUNK_NUMEL // (each * sentences)), corpus.parts(sentences)


def log_likelihoods(objective: FitObjective, corpus: Batch, sets: Mapping[str, Tensor]) -> Tensor:
    """The log evidence of each sentence under each draw, `[draw, sentence]`."""
    with torch.no_grad():
        return _compute_in_chunks(objective, corpus, sets, objective.log_evidences)


def responsibilities(objective: FitObjective, corpus: Batch, sets: Mapping[str, Tensor], selector: NodeSpec) -> Tensor:
    """`P(c | x, y)` under each draw, `[draw, sentence, head]` or `[draw, sentence, word, head]`."""

    def ask(some: dict[str, Tensor], part: Batch) -> Tensor:
        return torch.vmap(lambda one: objective.responsibilities(one, part, selector))(some)

    return _compute_in_chunks(objective, corpus, sets, ask)


def _compute_in_chunks(
    objective: FitObjective, corpus: Batch, sets: Mapping[str, Tensor], fn: Callable[[dict[str, Tensor], Batch], Tensor]
) -> Tensor:
    """What is asked of some draws and sentences at a time, `[draw, sentence, ...]`."""
    at_once, parts = split_into_chunks(objective, corpus)
    rows = []
    for start in range(0, len(next(iter(sets.values()))), at_once):
        some = {name: value[start : start + at_once] for name, value in sets.items()}
        rows.append(torch.cat([fn(some, part) for part in parts], 1))
    return torch.cat(rows)


def invariants_by_draw(network: Network, selector: NodeSpec, sets: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The invariants of the heads, `[head, dim, dim]`, draw by draw; those that no sample tells of too."""
    for k in range(len(next(iter(sets.values())))):
        one = {name: value[k] for name, value in sets.items()}
        yield invariants(network, selector, {**network.parameters, **one})


def mean_invariants(network: Network, selector: NodeSpec, sets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The means of the invariants over all draws: not those of the means, which a change of basis would spoil."""
    totals: dict[str, Tensor] = {}
    for found in invariants_by_draw(network, selector, sets):
        for name, value in found.items():
            totals[name] = totals.get(name, 0) + value
    count = len(next(iter(sets.values())))
    return {name: total / count for name, total in totals.items()}


def interval(network: Network, samples: Mapping[str, Tensor], name: str, probability: float) -> tuple[Tensor, Tensor]:
    """Between which values each number of a parameter, or of an invariant of the heads, lies with a probability."""
    if name in samples:
        return _quantile_bounds(samples[name].flatten(0, 1), probability)
    sets = samples_to_parameters(network, samples)
    count = len(next(iter(sets.values())))
    by_name: dict[str, NodeSpec] = {}
    for selector in find_selectors(network):
        by_name |= {each: selector for each in find_invariant_parameters(network, selector) if each not in by_name}
    if name not in by_name:
        raise unknown_name_error("parameter", name, [*samples, *by_name])
    found: list[Tensor] = []
    for each in invariants_by_draw(network, by_name[name], sets):
        found.append(each[name])
        if count * found[0].numel() > MAX_INTERVAL_NUMEL:
            raise BNetError(
                name, expected=f"at most {MAX_INTERVAL_NUMEL:,} numbers", actual=f"{count} draws of it", allowed="fewer"
            )
    return _quantile_bounds(torch.stack(found), probability)


def _quantile_bounds(values: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """The ends of the interval of each number, from draws of it, `[draw, ...]`."""
    ends = torch.tensor([(1 - probability) / 2, (1 + probability) / 2], dtype=values.dtype, device=values.device)
    columns = values.flatten(1).split(max(1, MAX_CHUNK_NUMEL // len(values)), 1)
    low, high = torch.cat([torch.quantile(each, ends, dim=0) for each in columns], 1)
    return low.reshape(values.shape[1:]), high.reshape(values.shape[1:])


def find_representative(network: Network, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The draw that stands for all, as parameters: its tables and invariants lie nearest their means.

    Each number counts in units of its spread, each table and matrix as much as any other. Weights that no invariant is
    made of are taken as they are.
    """
    sets, used = samples_to_parameters(network, samples), set[str]()
    count = len(next(iter(sets.values())))
    far = torch.zeros(count, dtype=torch.float64)
    for selector in find_selectors(network):
        used |= {
            name for names in find_invariant_parameters(network, selector).values() for each in names for name in each
        }
        means = mean_invariants(network, selector, sets)
        variances = {name: torch.zeros_like(mean) for name, mean in means.items()}
        for found in invariants_by_draw(network, selector, sets) if means else ():
            for name, value in found.items():
                variances[name] += (value - means[name]).square() / count
        for k, found in enumerate(invariants_by_draw(network, selector, sets) if means else ()):
            for name, value in found.items():
                far[k] += _distance(value[None], means[name], variances[name])[0]
    for name, value in samples.items():
        if name in network.unconditional_logit_names or name not in used:
            flat = value.flatten(0, 1)
            far += _distance(flat, flat.mean(0), flat.var(0, correction=0))
    return {name: value[int(far.argmin())] for name, value in sets.items()}


def _distance(values: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """The mean square distance of each draw from the mean, in units of the variance of each number."""
    tiny = torch.finfo(values.dtype).tiny
    return ((values - mean).square() / variance.clamp(min=tiny)).flatten(1).mean(1).double().cpu()


def align_heads(
    objective: FitObjective, corpus: Batch, samples: dict[str, Tensor], log_density: Tensor
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The samples with the heads of every draw in the order of the densest one's; the selectors of which that is done.

    It is done where another order of the heads is as likely: a draw stays a draw of the same posterior.
    """
    network, lead = objective.network, log_density.shape
    part = corpus if objective.has_corpus_choice else corpus.take(slice(0, MATCHING_SENTENCES))
    sets, top, done = samples_to_parameters(network, samples), int(log_density.argmax()), []
    for selector in find_selectors(network):
        dims = {name: dim for name in network.parameters if (dim := head_dim(network, selector, name)) is not None}
        if not _is_exchangeable(objective, part, {name: value[top] for name, value in sets.items()}, dims):
            continue
        answers, present = responsibilities(objective, part, sets, selector), get_present_words(selector, part)
        orders = [torch.tensor(match_heads(count_overlap(answers[top], each, present))) for each in answers]
        for name in sets.keys() & dims.keys():
            drawn = zip(sets[name], orders, strict=True)
            sets[name] = torch.stack([each.index_select(dims[name], order.to(each.device)) for each, order in drawn])
        done.append(selector.group.name)
    found = {name: value.exp() if name in network.unconditional_logit_names else value for name, value in sets.items()}
    return {name: found[name].reshape(*lead, *found[name].shape[1:]) for name in samples}, tuple(done)


def _is_exchangeable(
    objective: FitObjective, corpus: Batch, parameters: Mapping[str, Tensor], dims: Mapping[str, int]
) -> bool:
    """True where no order of a selector's heads is likelier than another.

    What of a head is not learned must be equal over heads; and the log evidence must stay as it is under a turn and a
    swap, of which all orders are made.
    """
    store = {**{k: v.detach().to(objective.device) for k, v in objective.network.parameters.items()}, **parameters}
    for name, dim in dims.items():
        if name not in parameters and not torch.equal(store[name], store[name].roll(1, dim)):
            return False
    count = next((store[name].shape[dim] for name, dim in dims.items()), 0)
    if count < 2:
        return False
    few = corpus if objective.has_corpus_choice else corpus.take(slice(0, 16))
    with torch.no_grad():
        own = objective.log_evidence(store, few)
        for order in ([*range(1, count), 0], [1, 0, *range(2, count)]):
            turned = {k: store[k].index_select(dim, torch.tensor(order, device=own.device)) for k, dim in dims.items()}
            other = objective.log_evidence({**store, **turned}, few)
            if not torch.allclose(own, other, rtol=torch.finfo(own.dtype).eps ** 0.5, atol=1e-4):
                return False
    return True


def head_dim(network: Network, selector: NodeSpec, name: str) -> int | None:
    """The dim of a parameter along which the heads of a selector lie; None where it has none."""
    owner, _, key = name.rpartition(".")
    index = selector.group.index
    if owner == selector.param_prefix:
        return 0 if key == "logits" else None
    for member in network.specs:
        if member.param_prefix != owner:
            continue
        parents = [given.index for given in member.parents]
        if index in parents and key in ("logits", "values"):
            return len(member.group.plates) + parents.index(index)
        for other in network.specs:
            for given in other.parents:
                for plate, by in given.pick:
                    made = network.specs[given.index]
                    if by == index and plate in member.group.plates and made.group.stack == member.group.stack:
                        return member.group.plates.index(plate)
    return None


def to_arviz(fit: Fit[Any]) -> az.InferenceData:
    """ArviZ's InferenceData of a fit with samples.

    The posterior has every parameter, tables as the probabilities that samples are: a selector's is `<selector>_pi`,
    another's `<owner>_theta`. And what does not hang on the labels of heads: `<selector>_sorted` (shares in falling
    order), `<selector>_effective` (heads in effect), `log_evidence`. NUTS's statistics of each draw go with it.
    """
    if not fit.samples:
        raise BNetError("to_arviz", expected="a fit with samples", actual=fit.method, allowed="svi, nuts")
    try:
        import arviz as az
    except ImportError as error:
        way = 'pip install "bnet-transformer[arviz]"'
        raise BNetError("to_arviz", expected="ArviZ", actual="none", allowed=way) from error
    owners = [fit.network.get_spec(name).param_prefix for name in fit.selectors]
    names = {name: f"{name.removesuffix('.logits')}_theta" for name in fit.network.unconditional_logit_names}
    names |= {f"{owner}.logits": f"{owner}_pi" for owner in owners}
    posterior = {names.get(k, k).replace(".", "_"): value for k, value in fit.samples.items()}
    for owner in owners:
        pi = fit.samples.get(f"{owner}.logits")
        if pi is not None:
            posterior[f"{owner}_sorted"] = pi.sort(-1, descending=True).values
            posterior[f"{owner}_effective"] = torch.special.entr(pi).sum(-1).exp()
    likelihood = None if fit.log_likelihoods is None else {"y": to_numpy(fit.log_likelihoods)}
    if fit.log_likelihoods is not None:
        posterior["log_evidence"] = fit.log_likelihoods.sum(-1)
    drawn = {name: to_numpy(value) for name, value in posterior.items()}
    told = {name: to_numpy(value).astype(ARVIZ_DTYPES.get(name, "float64")) for name, value in fit.statistics.items()}
    made: az.InferenceData = az.from_dict(posterior=drawn, log_likelihood=likelihood, sample_stats=told or None)
    return made

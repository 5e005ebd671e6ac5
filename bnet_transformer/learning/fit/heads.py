"""The heads of a fit: usage, invariants, intervals, the representative draw, and the heads of another fit or draw.

Functions of many posterior draws work in chunks, so that no table exceeds `MAX_CHUNK_NUMEL` numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bnet_transformer._core.results import Result
from bnet_transformer._core.stats import MIN_INTERVAL_COUNT, permutation_p, studentised_interval
from bnet_transformer._core.tensors import to_numpy
from bnet_transformer.data import Batch
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.inference.factors import LOG_ZERO
from bnet_transformer.learning.fit.identification import (
    find_exchangeable_atoms,
    find_free_bases,
    find_gauges,
    find_rotary_pairs,
    find_shifted_logits,
)
from bnet_transformer.learning.fit.objective import FitObjective, to_parameters
from bnet_transformer.tpm import Attention, Codebook, Linear, Select, Weight

DEAD_USAGE = 0.01  # a head with a smaller probability is dead
MAX_CHUNK_NUMEL = 2**22  # maximum number of entries of the table of one chunk: draws x sentences x joint states
UNIDENTIFIED_HINT = "Use f.predict_interval(data); a parameter that learn= leaves out fixes a free basis"
MAX_INTERVAL_NUMEL = 2**28  # maximum number of entries, over all draws, of an invariant with an interval


@dataclass(frozen=True)
class Heads(Result):
    """The heads of a selector: their usage, and matrices that are invariant under a change of basis.

    Attributes:
        selector: The name of the selector.
        usage: `P(head)`, `[head]`; for a chain along words its stationary distribution.
        A: The matrices `W_q^T W_k` by attention node, `[head, dim, dim]`. With codebooks each is the mean over a head's
            atoms, and with posterior samples the mean over draws; if the basis of its vectors is free, that of the net.
        OV: The matrices `W_v` by attention node, `[head, dim, dim]`, with the same means.
    """

    _index = "head"
    _shapes = "usage: float head; A OV: {_} float head _ _"

    # The score is x^T W_q^T W_k x. An invertible map of the key space changes W_q and W_k but not the attention. So
    # they are not identified, and only their product can be compared (Elhage et al. 2021, the QK and OV circuits).

    selector: str
    usage: Tensor
    A: Mapping[str, Tensor] = field(repr=False)
    OV: Mapping[str, Tensor] = field(repr=False)

    @property
    def effective(self) -> float:
        """The effective number of heads, `exp H(pi)`, which is the perplexity of the usage."""
        return float(torch.special.entr(self.usage).sum().exp())

    @property
    def dead(self) -> tuple[int, ...]:
        """The heads with a probability below 0.01."""
        return tuple((self.usage < DEAD_USAGE).nonzero()[:, 0].tolist())

    @property
    def live(self) -> int:
        """The number of heads that are not dead."""
        return len(self.usage) - len(self.dead)

    @property
    def cosine(self) -> dict[str, Tensor]:
        """The cosines between the heads, `[head, head]`, for `A` and `OV` of each attention node."""
        return {f"{kind} {name}": cosine_matrix(value, value) for kind, name, value in self._matrices()}

    def _get_columns(self) -> Mapping[str, Any]:
        dead = [head in self.dead for head in range(len(self.usage))]
        norms = {f"|{kind}| {name}": value.flatten(1).norm(dim=1).tolist() for kind, name, value in self._matrices()}
        return {"head": range(len(self.usage)), "usage": self.usage.tolist(), "dead": dead, **norms}

    @property
    def caption(self) -> str:
        """The number of heads that are used, in one line."""
        return f"{self.selector}: {self.live} live heads of {len(self.usage)}, effective number {self.effective:.2f}"

    def _matrices(self) -> list[tuple[str, str, Tensor]]:
        """Return the kind, attention node and matrices of each invariant."""
        return [("A", *item) for item in self.A.items()] + [("OV", *item) for item in self.OV.items()]


def cosine_matrix(a: Tensor, b: Tensor) -> Tensor:
    """Compute the cosine between each matrix of a and each matrix of b, `[a, b]`."""
    a, b = (x.flatten(1) / x.flatten(1).norm(dim=1, keepdim=True).clamp(min=1e-30) for x in (a, b))
    return a @ b.mT


def invariants(network: Network, selector: NodeSpec, store: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute the invariants by name (`A x_1`, `OV x_1`), `[head, dim, dim]`, after leading dims of the parameters."""
    result = {}
    for label, sources in find_invariant_parameters(network, selector).items():
        factors = [_compute_matrices([store[name].detach() for name in names]) for names in sources]
        result[label] = factors[0].mT @ factors[1] if len(factors) == 2 else factors[0]
    return result


def find_invariant_parameters(network: Network, selector: NodeSpec) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Find the parameters of each invariant: those of `W_q` and of `W_k` for `A`, those of `W_v` for `OV`."""
    result: dict[str, tuple[tuple[str, ...], ...]] = {}
    for spec in network.specs:
        if not isinstance(spec.tpm, Attention):
            continue
        matrices = [_find_matrix_parameters(network, parent, selector) for parent in spec.parents[:3]]
        q, k, v = [*matrices, *[None] * 3][:3]
        if q is not None and k is not None:
            result[f"A {spec.group.name}"] = q, k
        if v is not None:
            result[f"OV {spec.group.name}"] = (v,)
    return result


def _find_matrix_parameters(network: Network, parent: ParentSpec, selector: NodeSpec) -> tuple[str, ...] | None:
    """Find the parameters of the matrices of a parent of attention, `[head, out, in]`; None if there are none.

    The parent must be a linear map whose matrix the selector chooses: by `Select`, from a `Codebook`, or by a pick.
    """
    source = network.specs[parent.index]
    if not isinstance(source.tpm, Linear) or source.tpm.dim is not None:
        return None
    weight, index = network.specs[source.parents[0].index], selector.group.index
    parents = [p.index for p in weight.parents]
    if isinstance(weight.tpm, Select) and parents == [index]:
        return (f"{weight.param_prefix}.values",)
    if isinstance(weight.tpm, Codebook) and parents == [index]:
        return f"{weight.param_prefix}.logits", f"{weight.param_prefix}.atoms"
    picks = [by for _, by in parent.pick]
    if isinstance(weight.tpm, Weight) and len(weight.group.plates) == 1 == len(picks):
        selected = network.specs[picks[0]]
        if picks == [index]:
            return (f"{weight.param_prefix}.value",)
        if [p.index for p in selected.parents] == [index]:
            return f"{selected.param_prefix}.logits", f"{weight.param_prefix}.value"
    return None


def _compute_matrices(parameters: list[Tensor]) -> Tensor:
    """Return the matrices of the heads: the parameter itself, or the mean over a head's atoms."""
    if len(parameters) == 1:
        return parameters[0]
    return torch.einsum("...cm,...moi->...coi", parameters[0].softmax(-1), parameters[1])


def find_selectors(network: Network) -> list[NodeSpec]:
    """Find the selectors: the choices without parents, and chains along words, which have no parents but themselves."""
    return [spec for spec in network.choices if {parent.index for parent in spec.parents} <= {spec.group.index}]


def head_dims(network: Network, selector: NodeSpec, name: str) -> tuple[int, ...]:
    """Return the dims of a parameter that index the heads of a selector; two for the table of a chain along words."""
    owner, _, key = name.rpartition(".")
    index = selector.group.index
    if owner == selector.param_prefix:
        return tuple(range(len(selector.parents) + 1)) if key == "logits" else (0,) if key == "initial" else ()
    for spec in network.specs:
        if spec.param_prefix != owner:
            continue
        parents = [parent.index for parent in spec.parents]
        if index in parents and key in ("logits", "values"):
            return (len(spec.group.plates) + parents.index(index),)
        for child in network.specs:
            for parent in child.parents:
                stack = network.specs[parent.index].group.stack
                for plate, by in parent.pick:
                    if by == index and plate in spec.group.plates and stack == spec.group.stack:
                        return (spec.group.plates.index(plate),)
    return ()


def occupancy(selector: NodeSpec, theta: Mapping[str, Tensor]) -> Tensor:
    """Compute `P(head)`, `[head]`, from the tables: the stationary distribution of a chain, else its only table."""
    table = theta[selector.param_prefix]
    if not selector.parents:
        return table
    # The lazy chain (I + P) / 2 has the stationary distributions of P and no period, so its powers converge; squaring
    # reaches 2^50 words. If there are several, the limit depends on the initial distribution.
    lazy = (torch.eye(table.shape[-1], dtype=torch.float64, device=table.device) + table.double()) / 2
    for _ in range(50):
        lazy = lazy @ lazy
        lazy = lazy / lazy.sum(-1, keepdim=True)
    initial = theta[f"{selector.param_prefix}.initial"].double()
    return (initial.unsqueeze(-2) @ lazy).squeeze(-2).to(table.dtype)


def samples_to_parameters(network: Network, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert samples `[chain, draw, *shape]` to parameters `[chain * draw, *shape]`."""
    return to_parameters(network, {name: value.flatten(0, 1) for name, value in samples.items()})


def split_into_chunks(objective: FitObjective, corpus: Batch) -> tuple[int, list[Batch]]:
    """Return the number of draws of a chunk and the parts of the sentences: no table exceeds `MAX_CHUNK_NUMEL`."""
    with torch.no_grad():
        state, factors = objective(corpus.take(slice(0, 1)), lambda state, factors: (state, factors))
    tables = [*(factor.table for factor in factors), *state.values.values()]
    specs = [m for m in objective.network.specs if m.group.word_stack is not None or m.group.name in corpus.evidence]
    vectors = [m.tpm.states or 1 if m.tpm.kind == "discrete" else math.prod(m.shape) for m in specs]
    # The largest dims of one word: the features of a vector, the states of a node, the words that it reads.
    max_width = max([*vectors, *(x.shape[1] for x in corpus.x.values()), 1])
    numel = max([t.numel() for t in tables if isinstance(t, Tensor)], default=1) * max_width
    if objective.has_corpus_choice:
        return max(1, MAX_CHUNK_NUMEL // (numel * len(corpus))), [corpus]
    sentences = max(1, min(len(corpus), MAX_CHUNK_NUMEL // numel))
    return max(1, MAX_CHUNK_NUMEL // (numel * sentences)), corpus.parts(sentences)


def log_likelihoods(objective: FitObjective, corpus: Batch, sets: Mapping[str, Tensor]) -> Tensor:
    """Compute the log evidence of each sentence for each draw, `[draw, sentence]`."""
    with torch.no_grad():
        return _compute_in_chunks(objective, corpus, sets, objective.log_evidences)


def responsibilities(objective: FitObjective, corpus: Batch, sets: Mapping[str, Tensor], selector: NodeSpec) -> Tensor:
    """Compute `P(c | x, y)` for each draw, `[draw, sentence, head]` or `[draw, sentence, word, head]`."""

    def evaluate(draws: dict[str, Tensor], part: Batch) -> Tensor:
        return torch.vmap(lambda parameters: objective.responsibilities(parameters, part, selector))(draws)

    return _compute_in_chunks(objective, corpus, sets, evaluate)


def _compute_in_chunks(
    objective: FitObjective, corpus: Batch, sets: Mapping[str, Tensor], fn: Callable[[dict[str, Tensor], Batch], Tensor]
) -> Tensor:
    """Apply `fn` to chunks of draws and sentences, and concatenate the results, `[draw, sentence, ...]`."""
    chunk_size, parts = split_into_chunks(objective, corpus)
    rows = []
    for start in range(0, len(next(iter(sets.values()))), chunk_size):
        draws = {name: value[start : start + chunk_size] for name, value in sets.items()}
        rows.append(torch.cat([fn(draws, part) for part in parts], 1))
    return torch.cat(rows)


def invariants_by_draw(network: Network, selector: NodeSpec, sets: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Iterate over the invariants of each draw, `[head, dim, dim]`; parameters without samples are those of the net."""
    for k in range(len(next(iter(sets.values())))):
        draw = {name: value[k] for name, value in sets.items()}
        yield invariants(network, selector, {**network.parameters, **draw})


def mean_invariants(network: Network, selector: NodeSpec, sets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute the mean of each invariant over all draws; invariants of mean parameters would depend on the basis."""
    totals: dict[str, Tensor] = {}
    for draw in invariants_by_draw(network, selector, sets):
        for name, value in draw.items():
            totals[name] = totals.get(name, 0) + value
    count = len(next(iter(sets.values())))
    return {name: total / count for name, total in totals.items()}


def compute_invariant_samples(network: Network, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute the identified invariants of all selectors that depend on samples, `[chain, draw, head, dim, dim]`.

    Args:
        network: The net.
        samples: The samples of its parameters, `[chain, draw, *shape]`.
    """
    store = {**network.parameters, **to_parameters(network, samples)}
    result: dict[str, Tensor] = {}
    unidentified = find_unidentified(network, samples)
    for selector in find_selectors(network):
        sources = find_invariant_parameters(network, selector)
        names = [label for label, sides in sources.items() if any(name in samples for side in sides for name in side)]
        names = [label for label in names if label not in unidentified]
        values = invariants(network, selector, store) if names else {}
        result |= {name: values[name] for name in names}
    return result


def find_unidentified(network: Network, learned: Collection[str]) -> dict[str, str]:
    """Find the learned parameters and the invariants of heads that the likelihood does not identify, with the reason.

    Args:
        network: The net.
        learned: The names of the learned parameters.
    """
    result: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    gauges = [{*gauge.names} for gauge in find_gauges(network)]
    for basis in find_free_bases(network, learned):
        values = {k: torch.randn(v.shape, generator=generator, dtype=v.dtype) for k, v in network.parameters.items()}
        rotated = basis.rotate(values, basis.draw_rotation(generator, network.dtype))
        changed = []
        for selector in find_selectors(network):
            before, after = (invariants(network, selector, store) for store in (values, rotated))
            changed += [k for k, v in before.items() if not torch.allclose(v, after[k], atol=1e-3)]
        if not changed and any({*basis.names} <= names for names in gauges):
            continue  # a gauge of attention, whose product is an invariant
        names = dict.fromkeys([*changed, *(name for name in basis.names if name in learned)], basis.reason)
        result = names | result
    for find in (find_exchangeable_atoms, find_rotary_pairs, find_shifted_logits):
        result = find(network, learned) | result
    return result


def describe_unidentified(network: Network, learned: Collection[str]) -> tuple[str, ...]:
    """Describe why learned parameters and invariants of heads are not identified, and so have no intervals."""
    names: dict[str, list[str]] = {}
    for name, reason in find_unidentified(network, learned).items():
        names.setdefault(reason, []).append(name)
    parts = [f"{reason} (no intervals of {', '.join(sorted(labels))})" for reason, labels in names.items()]
    return ("; ".join(parts),) if parts else ()


def interval(network: Network, samples: Mapping[str, Tensor], name: str, probability: float) -> tuple[Tensor, Tensor]:
    """Compute the central interval of each number of a parameter or invariant, with a given probability."""
    identified = "a parameter or invariant that the likelihood identifies"
    gauge = next((g for g in find_gauges(network) if name in g.names and {*g.names} <= samples.keys()), None)
    if gauge is not None:
        labels = [label for s in find_selectors(network) for label in find_invariant_parameters(network, s)]
        label = f"A {gauge.node}"
        is_invariant = label in labels and not gauge.is_output and label not in find_unidentified(network, samples)
        hint = f'Use f.interval("{label}"), the matrix W_q^T W_k' if is_invariant else ""
        expected = f"{identified}; a rotation of the space between two matrices changes their entries, but not "
        raise BNetError(name, expected=expected + gauge.product, hint=hint)
    if reason := find_unidentified(network, samples).get(name):
        raise BNetError(name, expected=f"{identified}; {reason}", hint=UNIDENTIFIED_HINT)
    if name in samples:
        return quantile_bounds(samples[name].flatten(0, 1), probability)
    sets = samples_to_parameters(network, samples)
    count = len(next(iter(sets.values())))
    by_name: dict[str, NodeSpec] = {}
    for selector in find_selectors(network):
        by_name |= {label: selector for label in find_invariant_parameters(network, selector) if label not in by_name}
    if name not in by_name:
        raise unknown_name_error("parameter", name, [*samples, *by_name])
    draws: list[Tensor] = []
    for draw in invariants_by_draw(network, by_name[name], sets):
        draws.append(draw[name])
        if count * draws[0].numel() > MAX_INTERVAL_NUMEL:
            expected = f"at most {MAX_INTERVAL_NUMEL:,} numbers over all draws"
            hint = "Fit with fewer draws"
            raise BNetError(name, expected=expected, actual=f"{count} draws of {draws[0].numel():,} numbers", hint=hint)
    return quantile_bounds(torch.stack(draws), probability)


def quantile_bounds(values: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """Compute the bounds of the central interval of each number, from its draws `[draw, ...]`."""
    ends = torch.tensor([(1 - probability) / 2, (1 + probability) / 2], dtype=values.dtype, device=values.device)
    columns = values.flatten(1).split(max(1, MAX_CHUNK_NUMEL // len(values)), 1)
    low, high = torch.cat([torch.quantile(column, ends, dim=0) for column in columns], 1)
    return low.reshape(values.shape[1:]), high.reshape(values.shape[1:])


def find_representative(network: Network, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Find the representative draw, as parameters: its tables and invariants are nearest to their posterior means."""
    # The mean of the parameters is not used: if matrices are identified only up to a basis, it can be far from every
    # draw. The distance is the squared distance in units of the variance of each number, averaged over each table or
    # matrix so that all have the same weight. Weights that are part of no invariant are compared directly. Weights and
    # invariants that the likelihood does not identify are not compared: their means are far from every draw.
    sets, used = samples_to_parameters(network, samples), {*find_unidentified(network, samples)}
    count = len(next(iter(sets.values())))
    distances = torch.zeros(count, dtype=torch.float64)
    for selector in find_selectors(network):
        means = {k: mean for k, mean in mean_invariants(network, selector, sets).items() if k not in used}
        used |= {
            name for names in find_invariant_parameters(network, selector).values() for group in names for name in group
        }
        variances = {name: torch.zeros_like(mean) for name, mean in means.items()}
        for draw in invariants_by_draw(network, selector, sets) if means else ():
            for name in means:
                variances[name] += (draw[name] - means[name]).square() / count
        for k, draw in enumerate(invariants_by_draw(network, selector, sets) if means else ()):
            for name in means:
                distances[k] += _distance(draw[name][None], means[name], variances[name])[0]
    for name, value in samples.items():
        if name in network.unconditional_logit_names or name not in used:
            flat = value.flatten(0, 1)
            distances += _distance(flat, flat.mean(0), flat.var(0, correction=0))
    return {name: value[int(distances.argmin())] for name, value in sets.items()}


def _distance(values: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Compute the mean squared distance of each draw from the mean, in units of each number's variance, `[draw]`."""
    tiny = torch.finfo(values.dtype).tiny
    return ((values - mean).square() / variance.clamp(min=tiny)).flatten(1).mean(1).double().cpu()


# --------------------------------------------------------------------------------------------------------------------
# The heads of two fits, or of two draws. Heads have no names: they are matched by responsibilities.
#
# `match_heads` matches the heads of two fits. `align_heads` brings the heads of all posterior draws into one order.


RESAMPLES = 2000  # of the p value and the interval of a gain
MATCHING_SENTENCES = 200  # the number of sentences whose responsibilities match heads


@dataclass(frozen=True)
class Comparison(Result):
    """The comparison of two fits on the same sentences.

    Attributes:
        match: The head of the other fit that is matched to each head of this fit; -1 for a head without a match.
        overlap: The sum over sentences of the products of responsibilities, `[head, other head]`.
        agreement: The adjusted Rand index (ARI) of the most responsible heads.
        gain: The mean difference of the log likelihood of a sentence, this fit minus the other, in nats.
        gain_error: The standard error of `gain`.
        interval: The 95% interval of `gain` over sentences (bootstrap-t); None on training data, and with fewer than 10
            sentences.
        p: The p value of `gain` by sign flips of the differences of sentences; None on training data, which the fits
            have seen, for one sentence, and if a sentence has probability 0 in one fit.
        A: The cosines of the matrices `W_q^T W_k` of matched heads by attention node, `[head]`.
        OV: The cosines of the matrices `W_v` of matched heads by attention node, `[head]`.
        criterion: The name of the likelihood in `gain`.
        notes: What a reader of the comparison must know: the notes of both fits, and sentences for which leave-one-out
            cross-validation is unreliable.
    """

    _index = "head"
    _shapes = "match: int<other head; overlap: float64 head other; A OV: {_} float head"

    match: tuple[int, ...]
    overlap: Tensor = field(repr=False)
    agreement: float
    gain: float
    gain_error: float
    A: dict[str, Tensor] = field(repr=False)
    OV: dict[str, Tensor] = field(repr=False)
    criterion: str = "log likelihood"
    notes: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None
    p: float | None = None

    def _get_columns(self) -> Mapping[str, Any]:
        overlap = [float(self.overlap[h, m]) if m >= 0 else 0.0 for h, m in enumerate(self.match)]
        cosines = [("A", *item) for item in self.A.items()] + [("OV", *item) for item in self.OV.items()]
        columns = {"head": range(len(self.match)), "match": self.match, "overlap": overlap}
        return columns | {f"cosine {kind} {name}": value.tolist() for kind, name, value in cosines}

    @property
    def caption(self) -> str:
        """The agreement and the gain, in one line."""
        caption = f"ARI {self.agreement:.3f}; gain {self.gain:+.4f} ± {self.gain_error:.4f} nats per sentence"
        caption += f" by {self.criterion}"
        caption += "" if self.interval is None else "; 95% interval {:+.4f} to {:+.4f}".format(*self.interval)
        return caption + ("" if self.p is None else f"; p {self.p:.3g} by sign flips over sentences")


def count_overlap(a: Tensor, b: Tensor, present: Tensor | None = None) -> Tensor:
    """Compute the expected number of sentences (or `present` words) for which both heads are responsible.

    The result is `[head a, head b]`.
    """
    if present is not None:
        a = a * present[..., None]
    return a.flatten(0, -2).mT @ b.flatten(0, -2).to(a.dtype)


def get_present_words(spec: NodeSpec, corpus: Batch) -> Tensor | None:
    """Return the words that a selector draws for, `[sentence, word]`; None for all words or for whole sentences."""
    stack, present = spec.group.word_stack, corpus.get_present(spec)
    if stack is None or present is not None:
        return present
    masks = [evidence.observed for evidence in corpus.evidence.values()]
    known = [mask for mask in masks if mask is not None and mask.shape == corpus.x[stack].shape[:2]]
    return torch.stack(known).any(0) if known and len(known) == len(masks) else None


def match_heads(overlap: Tensor) -> tuple[int, ...]:
    """Match each row to one column so that the sum of the overlaps is maximal; -1 for a row without a column."""
    # A linear assignment problem (Kuhn 1955, the Hungarian algorithm). Matching each row to its best column would
    # match two heads to one; relabelling heads does not change the sum, so the match does not depend on their order.
    rows, columns = linear_sum_assignment(overlap.detach().cpu().numpy(), maximize=True)
    match = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    return tuple(match.get(row, -1) for row in range(len(overlap)))


def paired_difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Compute the mean over sentences of `a - b` and its standard error.

    The error is NaN for a single sentence, and for a sentence of probability 0.
    """
    # Both fits are evaluated on the same sentences, whose difficulty is common to both and cancels in the difference.
    difference = a - b
    error = float(difference.std() / len(difference) ** 0.5) if len(difference) > 1 else float("nan")
    return float(difference.mean()), error


def estimate_gain_uncertainty(a: Tensor, b: Tensor) -> tuple[tuple[float, float] | None, float | None]:
    """The 95% interval of the mean over sentences of `a - b`, and its p value, as of `compare` of other results."""
    if len(a) < 2 or not bool((a - b).isfinite().all()):  # a sentence of probability 0 in one fit
        return None, None
    tables = [np.stack([to_numpy(x)[None], np.ones((1, len(x)))]) for x in (a, b)]
    p, _, _ = permutation_p(tables, True, RESAMPLES, 0)
    if len(a) < MIN_INTERVAL_COUNT:
        return None, float(p[0])
    low, high = studentised_interval(tables, True, 0.95, RESAMPLES, 0)
    return (float(low[0]), float(high[0])), float(p[0])


def check_densities(names: Sequence[str], densities: Sequence[Tensor]) -> None:
    """Raise an error if a log density is NaN, or all fits give some sentence the probability 0."""
    for name, row in zip(names, densities, strict=True):
        if bool((row.isnan() | row.isposinf()).any()):
            hint = "Its parameters are not valid: fit it again, for example with a lower rate"
            raise BNetError(name, expected="finite log densities of all sentences", hint=hint)
    if not any(bool((row > LOG_ZERO / 2).all()) for row in densities):
        expected = "a fit in which every sentence has a probability above 0"
        raise BNetError("compare", expected=expected, hint="Use a prior=, which leaves no probability 0")


def matched_cosines(a: Tensor, b: Tensor, match: tuple[int, ...]) -> Tensor:
    """Compute the cosine of each head's matrix with that of its match, `[head]`; NaN for a head without a match."""
    same = a.shape[1:] == b.shape[1:]
    table = cosine_matrix(a, b.to(a.dtype)) if same else a.new_full((len(a), len(b)), torch.nan)
    return torch.stack([table[h, m] if m >= 0 else table.new_tensor(torch.nan) for h, m in enumerate(match)])


def align_heads(
    objective: FitObjective, corpus: Batch, samples: dict[str, Tensor], log_density: Tensor
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Order the heads of every draw as in the draw of highest density; also return the aligned selectors."""
    # Label switching (Stephens 2000): if the posterior is invariant under permutations of the heads, a permuted draw is
    # a draw of the same posterior, and means over draws make sense only in one common order. Each draw is matched to
    # the pivot by its responsibilities. A selector whose heads are not exchangeable is not changed.
    network, shape = objective.network, log_density.shape
    part = corpus if objective.has_corpus_choice else corpus.take(slice(0, MATCHING_SENTENCES))
    sets, pivot, aligned = samples_to_parameters(network, samples), int(log_density.argmax()), []
    for selector in find_selectors(network):
        dims = {name: dims for name in network.parameters if (dims := head_dims(network, selector, name))}
        if not _is_exchangeable(objective, part, {name: value[pivot] for name, value in sets.items()}, dims):
            continue
        probs, present = responsibilities(objective, part, sets, selector), get_present_words(selector, part)
        orders = [torch.tensor(match_heads(count_overlap(probs[pivot], draw, present))) for draw in probs]
        for name in sets.keys() & dims.keys():
            pairs = zip(sets[name], orders, strict=True)
            sets[name] = torch.stack([permute_heads(draw, dims[name], order) for draw, order in pairs])
        aligned.append(selector.group.name)
    tables = network.unconditional_logit_names
    values = {name: sets[name].exp() if name in tables else sets[name] for name in samples}
    return {name: value.reshape(*shape, *value.shape[1:]) for name, value in values.items()}, tuple(aligned)


def _is_exchangeable(
    objective: FitObjective, corpus: Batch, parameters: Mapping[str, Tensor], dims: Mapping[str, tuple[int, ...]]
) -> bool:
    """Return True if the prior and the log evidence do not depend on the order of a selector's heads."""
    # A cyclic shift and one transposition of neighbours generate all permutations, so two orders are enough. Parameters
    # of heads that are not learned keep their order, so they must be equal for all heads.
    store = {**{k: v.detach().to(objective.device) for k, v in objective.network.parameters.items()}, **parameters}
    for name, axes in dims.items():
        if name not in parameters and not torch.equal(store[name], store[name].roll([1] * len(axes), axes)):
            return False
    count = next((store[name].shape[axes[0]] for name, axes in dims.items()), 0)
    if count < 2:
        return False
    subset = corpus if objective.has_corpus_choice else corpus.take(slice(0, 16))
    orders = [*range(1, count), 0], [1, 0, *range(2, count)]
    for name, alpha in {**objective.learned.tables, **objective.learned.logits}.items():
        rows = alpha.expand(objective.network.parameters[name].shape)
        if not all(torch.equal(rows, permute_heads(rows, dims.get(name, ()), torch.tensor(order))) for order in orders):
            return False
    with torch.no_grad():
        before = objective.log_evidence(store, subset)
        for order in orders:
            permuted = {name: permute_heads(store[name], axes, torch.tensor(order)) for name, axes in dims.items()}
            after = objective.log_evidence({**store, **permuted}, subset)
            if not torch.allclose(before, after, rtol=torch.finfo(before.dtype).eps ** 0.5, atol=1e-4):
                return False
    return True


def permute_heads(value: Tensor, dims: tuple[int, ...], order: Tensor) -> Tensor:
    """Return a parameter with its heads in another order."""
    for dim in dims:
        value = value.index_select(dim, order.to(value.device))
    return value

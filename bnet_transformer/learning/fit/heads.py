"""Summaries of the heads of a fit: usage, invariants, intervals, and the representative draw.

Functions of many posterior draws work in chunks, so that no table exceeds `MAX_CHUNK_NUMEL` numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.results import Result
from bnet_transformer.data import Batch
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, unknown_name_error
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

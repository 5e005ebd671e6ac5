"""Roles of heads: what the heads of a net attend to in a corpus, as shares of attention by relation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

from bnet_transformer._core.checks import check_float, check_int, check_seed, check_sequence
from bnet_transformer._core.distributed import distributed_context, resolve_device
from bnet_transformer._core.files import derive_seed
from bnet_transformer._core.naming import Reach
from bnet_transformer._core.process import check_memory, translate_memory_errors
from bnet_transformer._core.stats import SentenceValues
from bnet_transformer._core.tensors import FloatArray
from bnet_transformer._core.tokens import get_raw
from bnet_transformer.attention.inclusion import HeadTable
from bnet_transformer.compiler.gather import ExecutionRequest, ExecutionState, gather_parents
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.data import EncodedSentence
from bnet_transformer.data.dataset import encode_sentences
from bnet_transformer.declare import Network, NodeSpec, ParentSpec, as_network
from bnet_transformer.errors import BNetError, BudgetError, UnsupportedError, format_count, unknown_name_error
from bnet_transformer.inference.factors import log_prior
from bnet_transformer.inference.query import parse_attention_slices
from bnet_transformer.reference import BUDGET

if TYPE_CHECKING:
    import pandas as pd


# --------------------------------------------------------------------------------------------------------------------
# The attention `P(j | i)` of each head in sentences, and the relation of each attended word j to word i.
#
# Sentences are batched by length, so there is no padding. Relations are ordered: the first one that holds for a pair of
# words counts. `other` is the relation of all other pairs, so each pair has exactly one relation.
#
# If heads are a plate, a head is an index of the plate. If a selector chooses one of the heads, a head is a state of
# the selector, and attention is averaged over the prior of all other choices (atoms, selectors of earlier slices).


RelationCodes = NDArray[np.int64]
BoolTable = NDArray[np.bool_]

OTHER = "other"
ONE_STACK, TOKENS, SEPARATORS = "one stack", "tokens", "separators"
MAX_ATTENTION_NUMEL = 2**21  # elements of the attention tensors of one batch
NUMEL_PER_PAIR = 16  # additional elements for each pair of words, such as those of relation tables
SENTENCES_PER_CHUNK = 64  # sentences whose weights in posterior samples are drawn together


@dataclass(frozen=True)
class AttentionNodes:
    """The node groups with attention, one for each slice, and the selector whose states are their heads, if any.

    `stacks` contains the stack of the attending words and the stack of the attended words.
    """

    specs: tuple[NodeSpec, ...]
    selectors: tuple[int | None, ...]
    num_heads: int
    stacks: tuple[str, str]


def find_attention_nodes(network: Network, role: str | None, slices: object) -> AttentionNodes:
    """Find the node groups with attention over words in some slices (`"all"`, or indices), of one role."""
    by_slice = _attention_by_slice(network, role)
    chosen = list(by_slice) if isinstance(slices, str) and slices == "all" else slices
    requested = parse_attention_slices(network, chosen, next(iter(by_slice.values())).group.stem)[1]
    for t in requested:
        if t not in by_slice:
            actual, stem = f"slice {t}", next(iter(by_slice.values())).group.stem
            expected = f"slices in which {stem} attends to words"
            raise BNetError("slices", expected=expected, actual=actual, allowed=f"{list(by_slice)}")
    specs = tuple(by_slice[t] for t in requested)
    selectors = tuple(_find_selector(network, spec) for spec in specs)
    counts = {
        m.group.name: math.prod(network.graph.plate_sizes[plate] for plate in m.group.plates)
        if c is None
        else network.specs[c].tpm.states or 1
        for m, c in zip(specs, selectors, strict=True)
    }
    if len(set(counts.values())) > 1:
        listing = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise BNetError("slices", expected="slices with the same number of heads", actual=listing)
    first = specs[0]
    read = network.specs[_get_attended_parent(first).index].group.word_stack or ""
    return AttentionNodes(specs, selectors, counts[first.group.name], (first.group.word_stack or "", read))


def _attention_by_slice(network: Network, role: str | None) -> dict[int, NodeSpec]:
    """Return the node group with attention in each slice, of one role."""
    by_role: dict[str, dict[int, NodeSpec]] = {}
    for spec in network.specs:
        step = spec.group.step
        within = step is not None and 0 <= step < network.graph.slices[spec.group.stack]
        if step is not None and within and spec.group.word_stack is not None and spec.has_word_attention:
            by_role.setdefault(spec.group.stem, {})[step] = spec
    if not by_role:
        kinds = sorted({type(m.tpm).__name__ for m in network.specs if (m.group.step or -1) >= 0})
        actual = ", ".join(kinds) or "no slice"
        raise BNetError("net", expected="a TPM with attention P(j | i) over words in its slices", actual=actual)
    if role is not None and role not in by_role:
        raise unknown_name_error("role with attention", role, by_role)
    if role is None and len(by_role) > 1:
        expected = f"one of {', '.join(by_role)}, because the slices have several roles with attention"
        raise BNetError("role", expected=expected, hint=f"Pass role={next(iter(by_role))!r}, for example")
    return by_role[role if role is not None else next(iter(by_role))]


def _get_attended_parent(spec: NodeSpec) -> ParentSpec:
    """Return the parent over whose words a group attends."""
    slots = spec.tpm.attention_slots()
    return next(parent for parent in spec.word_parents if parent.slot in slots)


def _find_selector(network: Network, spec: NodeSpec) -> int | None:
    """Find the choice whose states are the heads, if there is one.

    It is the topmost choice that determines the attention of a slice, given its words.
    """
    if spec.group.plates:
        return None
    parents = [parent for parent in spec.parents if parent.slot in spec.tpm.attention_slots()]
    stack = [i for parent in parents for i in (parent.index, *(selector for _, selector in parent.pick))]
    choices: set[int] = set()
    visited: set[int] = set()
    while stack:
        index = stack.pop()
        group, parent_indices = network.specs[index].group, [edge.parent for edge in network.graph.in_edges[index]]
        if index not in visited and not network.is_word_state(group):
            visited.add(index)
            choices |= {index} if network.specs[index].tpm.kind == "discrete" else set()
            stack.extend(
                i for i in parent_indices if network.specs[i].group.stem != group.stem
            )  # without the earlier nodes of the same role
    # Given the words, the topmost choice determines the head. Choices below it (atoms) are averaged for each of its
    # states.
    tops = [i for i in sorted(choices) if not network.graph.ancestors([i]) & choices]
    if len(tops) > 1:
        names = ", ".join(network.specs[i].group.name for i in tops)
        expected = "heads that one selector chooses"
        raise BNetError(spec.group.name, expected=expected, actual=f"the choices {names}")
    return tops[0] if tops else None


def attention_mask(network: Network, spec: NodeSpec, words: Mapping[str, int]) -> Tensor:
    """Return a table `[i, j]` of whether the mask lets word i attend to word j."""
    parent = _get_attended_parent(spec)
    read = network.specs[parent.index].group.word_stack or ""
    return torch.tensor(parent.reach.matrix(words[spec.group.word_stack or ""], words[read]))


@torch.no_grad()
def compute_attention(
    module: CompiledModule, nodes: AttentionNodes, sentences: Sequence[EncodedSentence]
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Compute `P(j | i)` of sentences, in batches of one length.

    Args:
        module: The compiled net.
        nodes: The groups with attention.
        sentences: The sentences.

    Yields:
        The indices of some sentences, and for each slice `P(j | i)`, `[head, sentence, word, word]`.
    """
    network = module.network
    lengths: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for k, sentence in enumerate(sentences):
        lengths.setdefault(tuple(sentence.word_counts.items()), []).append(k)
    for length, indices in sorted(lengths.items()):
        words = dict(length)
        n, m = (words[stack] for stack in nodes.stacks)
        numel = _count_joint_states(network, nodes, words) * len(nodes.specs) * nodes.num_heads + NUMEL_PER_PAIR
        size = max(1, MAX_ATTENTION_NUMEL // (numel * n * m))
        for start in range(0, len(indices), size):
            chunk = indices[start : start + size]
            yield chunk, _compute_attention_part(module, nodes, [sentences[k] for k in chunk])


def _count_joint_states(network: Network, nodes: AttentionNodes, words: Mapping[str, int]) -> int:
    """Count the joint states of the choices that an attention depends on, except its heads; check the budget."""
    maximum = 1
    for spec, selector in zip(nodes.specs, nodes.selectors, strict=True):
        ancestors = network.graph.ancestors([spec.group.index]) - {selector}
        choices = [i for i in ancestors if network.specs[i].tpm.kind == "discrete"]
        count = math.prod(network.count_states(i, words) for i in choices)
        if count > BUDGET:
            names = ", ".join(network.specs[i].group.name for i in sorted(choices)[:6])
            expected = f"at most {BUDGET:,} joint states of the choices that it depends on ({names})"
            subject, hint = f"attention of {spec.group.name}", "Pass slices= with only the first slices"
            raise BudgetError(subject, expected=expected, actual=format_count(count), hint=hint)
        maximum = max(maximum, count)
    return maximum


def _compute_attention_part(
    module: CompiledModule, nodes: AttentionNodes, sentences: Sequence[EncodedSentence]
) -> list[Tensor]:
    """Compute `P(j | i)` of sentences of one length, for each slice."""
    network, device = module.network, module.network.device
    indices = {spec.group.index for spec in nodes.specs}
    ancestors = network.graph.ancestors(indices)
    choices = {i for i in ancestors if network.specs[i].tpm.kind == "discrete"}
    discrete = {m.group.index for m in nodes.specs if m.tpm.kind == "discrete"}
    parents = {parent.index for i in discrete for parent in network.specs[i].parents}
    given = {name: torch.stack([s.given[name] for s in sentences]).to(device) for name in sentences[0].given}
    request = ExecutionRequest(
        tuple(sorted(choices | parents)),
        {network.graph.get_group(name).index: value for name, value in given.items()},
        sentences[0].word_counts,
        device,
        record_attention=frozenset(indices - discrete),
        enumerate_too=frozenset(choices),
        training=False,
    )
    execution, _ = module.execute(request)
    pairs = zip(nodes.specs, nodes.selectors, strict=True)
    return [_attention_by_head(execution, spec, selector, nodes.num_heads, len(sentences)) for spec, selector in pairs]


def _attention_by_head(
    state: ExecutionState, spec: NodeSpec, selector: int | None, num_heads: int, batch_size: int
) -> Tensor:
    """Compute `P(j | i)` of each head, averaged over the other choices, `[head, batch, word, attended word]`."""
    layout, attention, group = state.layout, _attention_weights(state, spec), spec.group
    probs = _choice_probabilities(state, attention, selector)
    if probs is not None:
        attention = attention * probs[..., None].to(attention.dtype)
    dim = None if selector is None else layout.enumerated.index(selector)
    other_dims = [k for k in range(layout.batch_dim) if k != dim and attention.shape[k] > 1]
    attention = attention.sum(other_dims, keepdim=True) if other_dims else attention
    full = [1] * layout.rank
    full[layout.batch_dim], full[layout.word_dim] = batch_size, state.word_counts[group.word_stack or ""]
    sizes = {layout.axis(plate): state.network.graph.plate_sizes[plate] for plate in group.plates}
    if dim is not None and not sizes:
        sizes = {dim: num_heads}
    for axis, size in sizes.items():
        full[axis] = size
    attention = attention.expand(*full, attention.shape[-1]).movedim([*sizes], tuple(range(len(sizes))))
    return attention.reshape(-1, batch_size, *attention.shape[-2:])


def _attention_weights(state: ExecutionState, spec: NodeSpec) -> Tensor:
    """Return `P(j | i)` in the layout; of a deterministic group, as the execution recorded it."""
    weights = state.attention_weights.get(spec.group.index)
    if spec.tpm.kind == "discrete":
        context, parents = gather_parents(state, spec)
        weights = spec.tpm.attention_weights(context, *parents)
    if weights is None:
        expected, actual = "a node group that attends to all words at once", "a group that is computed word by word"
        raise UnsupportedError(spec.group.name, expected=expected, actual=actual)
    return state.layout.pad_dims(weights, 1)


def _choice_probabilities(state: ExecutionState, attention: Tensor, selector: int | None) -> Tensor | None:
    """Compute `P(other choices | head)` of the choices that the attention depends on; None without other choices."""
    layout, graph, specs = state.layout, state.network.graph, state.network.specs
    decisive = {i for k, i in enumerate(layout.enumerated) if attention.shape[k] > 1}
    needed = {i for i in layout.enumerated if i in graph.ancestral_set(decisive)}
    if needed <= {selector}:
        return None
    root = selector is not None and not graph.ancestors([selector]) & needed
    logs = [log_prior(state, i, specs[i]) for i in sorted(needed) if not (root and i == selector)]
    total = torch.stack(torch.broadcast_tensors(*logs)).sum(0)
    if root or selector is None:
        return total.exp()
    other_dims = [k for k in range(layout.batch_dim) if k != layout.enumerated.index(selector)]
    return (total - total.logsumexp(other_dims, keepdim=True)).exp()


@dataclass(frozen=True)
class QueryKeyTokens:
    """The tokens of the attending and of the attended words of a sentence, and which attended ones are separators."""

    query_tokens: tuple[str, ...]
    key_tokens: tuple[str, ...]
    is_separator: BoolTable
    is_self_attention: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        """The number of attending and of attended words."""
        return len(self.query_tokens), len(self.key_tokens)

    @property
    def distance(self) -> RelationCodes:
        """The offset `j - i` of each pair of words."""
        offsets: RelationCodes = np.subtract.outer(np.arange(len(self.query_tokens)), np.arange(len(self.key_tokens)))
        return -offsets


def _has_same_token(pair: QueryKeyTokens) -> BoolTable:
    """Return the pairs of different words with the same token; in cross-attention, all pairs with the same token."""
    queries, keys = (np.array([*map(get_raw, tokens)]) for tokens in (pair.query_tokens, pair.key_tokens))
    is_same: BoolTable = queries[:, None] == keys[None, :]
    return is_same & (pair.distance != 0) if pair.is_self_attention else is_same


# What each relation requires, and the function that returns where it holds.
RELATIONS: Mapping[str, tuple[str, Callable[[QueryKeyTokens], BoolTable]]] = {
    "same": (ONE_STACK, lambda pair: pair.distance == 0),
    "previous": (ONE_STACK, lambda pair: pair.distance == -1),
    "next": (ONE_STACK, lambda pair: pair.distance == 1),
    "first": ("", lambda pair: Reach("first").matrix(*pair.shape)),
    "last": ("", lambda pair: Reach("last").matrix(*pair.shape)),
    "separator": (SEPARATORS, lambda pair: np.broadcast_to(pair.is_separator, pair.shape)),
    "same token": (TOKENS, _has_same_token),
    "earlier": (ONE_STACK, lambda pair: pair.distance < 0),
    "later": (ONE_STACK, lambda pair: pair.distance > 0),
}
DEFAULT_RELATIONS = ("same", "previous", "next", "first", "separator", "same token")


@dataclass(frozen=True)
class Relations:
    """Relations in order, with `other` last.

    `left_out` contains the reason for each default relation that is not defined for these sentences.
    """

    tables: Mapping[str, Callable[[QueryKeyTokens], BoolTable]]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the relations, `other` last."""
        return *self.tables, OTHER

    def codes(self, pair: QueryKeyTokens, subject: str) -> RelationCodes:
        """Return the index of the relation of each pair of words, `[i, j]`."""
        tables = [_check_table(fn(pair), pair, f"relation {name!r}, {subject}") for name, fn in self.tables.items()]
        result: RelationCodes = np.argmax(np.stack([*tables, np.ones(pair.shape, dtype=bool)]), axis=0)
        return result


def resolve_relations(requested: object, missing: Mapping[str, str]) -> Relations:
    """Resolve the requested relations.

    Args:
        requested: None for the default ones, a list of names, or a mapping from names to definitions.
        missing: A mapping from the requirements of relations that are not met to the reason.
    """
    if requested is None:
        left_out = {name: missing[RELATIONS[name][0]] for name in DEFAULT_RELATIONS if RELATIONS[name][0] in missing}
        return Relations({name: RELATIONS[name][1] for name in DEFAULT_RELATIONS if name not in left_out}, left_out)
    if isinstance(requested, str) or not isinstance(requested, Sequence | Mapping):
        expected = "a list of relations, or a mapping from names to relations"
        raise BNetError("relations", expected=expected, actual=requested, allowed=", ".join(RELATIONS))
    named = requested if isinstance(requested, Mapping) else {name: name for name in requested if name != OTHER}
    tables = {name: _resolve_relation(name, relation, missing) for name, relation in named.items()}
    if not tables:
        expected = f"at least one relation other than {OTHER!r}"
        raise BNetError("relations", expected=expected, allowed=", ".join(RELATIONS))
    return Relations(tables)


def _resolve_relation(
    name: object, relation: object, missing: Mapping[str, str]
) -> Callable[[QueryKeyTokens], BoolTable]:
    """Return the table function of one relation: a predefined one, a Reach, or a function of the tokens."""
    if not isinstance(name, str) or not name or name == OTHER:
        expected = f"a name for each relation, other than {OTHER!r}, which is for pairs without a relation"
        raise BNetError("relations", expected=expected, actual=name)
    if isinstance(relation, str):
        if relation not in RELATIONS:
            raise unknown_name_error("relation", relation, RELATIONS)
        needs, table = RELATIONS[relation]
        if needs in missing:
            raise BNetError(f"relation {relation!r} is not defined: {missing[needs]}")
        return table
    if isinstance(relation, Reach):
        return lambda pair: relation.matrix(*pair.shape)
    if not callable(relation):
        expected = "a function of the tokens, a Reach, or the name of a relation"
        raise BNetError(f"relation {name!r}", expected=expected, actual=relation, allowed=", ".join(RELATIONS))
    return lambda pair: relation(*[pair.query_tokens, pair.key_tokens][: 1 if pair.is_self_attention else 2])


def _check_table(value: object, pair: QueryKeyTokens, subject: str) -> BoolTable:
    """Check that a relation is a boolean table over all pairs of words."""
    expected = f"a table of booleans of shape {pair.shape}"
    try:
        table = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BNetError(subject, expected=expected, actual=value) from error
    if table.dtype != bool or table.shape != pair.shape:
        raise BNetError(subject, expected=expected, actual=f"{table.dtype} of shape {table.shape}")
    return table


# --------------------------------------------------------------------------------------------------------------------
# `roles`: what the heads of a net attend to in a corpus, as shares of attention by relation, with uncertainty.
#
#     theta = E[y]      y_1, ..., y_N ~ F      F ~ DP(alpha, ..., alpha at the corners of the simplex)
#
# `y_s` is the mean attention of sentence s: the share of `P(j | i)` by relation, averaged over its words i. The prior
# of the distribution F of these shares is a Dirichlet process with weight alpha at each corner of the simplex, where
# all attention has one relation.


@dataclass(frozen=True)
class Roles(HeadTable):
    """What each head attends to: the shares of attention by relation, which sum to 1 for each head.

    Attributes:
        slices: The names of the node groups with attention, one for each slice.
        relations: The names of the relations; `other` is last.
        alpha: The prior weight of each relation.
        interval: The probability of the intervals.
        sentences: The number of sentences.
        words: The number of words of all sentences.
        mean: The posterior mean of the expected share in a new sentence, `[slice, head, relation]`.
        low: The lower end of the interval of this share, `[slice, head, relation]`.
        high: The upper end of the interval of this share, `[slice, head, relation]`.
        spread: The standard deviation of the share over sentences, `[slice, head, relation]`.
        counts: The expected number of sentences by relation, `[slice, head, relation]`.
        chance: The share under uniform attention to all words that the mask allows, `[slice, head, relation]`.
        above: The probability that the share exceeds chance, `[slice, head, relation]`; NaN if chance is 0 or 1.
        top: The probability that a relation exceeds chance by more than all others, `[slice, head, relation]`.
        selectors: For each slice the selector whose states are the heads; None if heads are a plate.
        left_out: The default relations that are not defined for these sentences, with the reason.
        by_sentence: The shares of each sentence, `[sentence, slice, head, relation]`; `compare` compares their means.
        digests: A digest of the words of each sentence; empty if they are unknown.
    """

    _columns = ("mean", "low", "high", "spread", "counts", "chance", "above", "top")
    _shapes = (
        "sentences: size sentence; slices selectors: any slice; relations: any relation; mean low high spread counts "
        "chance above top: float64 slice head relation; by_sentence: float64 sentence slice head relation; digests: "
        "any sentence?"
    )

    slices: tuple[str, ...]
    relations: tuple[str, ...]
    alpha: float
    interval: float
    sentences: int
    words: int
    mean: Tensor = field(repr=False)
    low: Tensor = field(repr=False)
    high: Tensor = field(repr=False)
    spread: Tensor = field(repr=False)
    counts: Tensor = field(repr=False)
    chance: Tensor = field(repr=False)
    above: Tensor = field(repr=False)
    top: Tensor = field(repr=False)
    selectors: tuple[str | None, ...] = field(repr=False)
    left_out: Mapping[str, str] = field(repr=False)
    by_sentence: Tensor | None = field(default=None, repr=False)
    digests: tuple[str, ...] = field(default=(), repr=False)

    @property
    def role(self) -> tuple[tuple[str, ...], ...]:
        """The most probable top relation of each head."""
        return tuple(tuple(self.relations[r] for r in row) for row in self.top.argmax(-1).tolist())

    @property
    def probability(self) -> Tensor:
        """The probability of the role of each head, `[slice, head]`."""
        return self.top.amax(-1)

    @property
    def strength(self) -> Tensor:
        """The share of the role of each head, rescaled so that 0 is chance and 1 is all attention, `[slice, head]`."""
        mean, chance = self.of_role(self.mean), self.of_role(self.chance)
        return ((mean - chance) / (1 - chance)).nan_to_num(0.0).clamp(0, 1)

    def of_role(self, values: Tensor) -> Tensor:
        """Select values at the role of each head.

        Args:
            values: Values by relation, `[slice, head, relation]`.

        Returns:
            The values, `[slice, head]`.
        """
        return values.gather(-1, self.top.argmax(-1, keepdim=True))[..., 0]

    def heads_that_read(self, relation: str, minimum: float = 0.5) -> tuple[tuple[int, int], ...]:
        """Find the heads that attend by a relation.

        Args:
            relation: The name of the relation.
            minimum: The minimum of the lower end of the interval of its share, 0.5 by default.

        Returns:
            The pairs (slice, head), in descending order of this lower end.
        """
        if relation not in self.relations:
            raise unknown_name_error("relation", relation, self.relations)
        low = self.low[..., self.relations.index(relation)]
        heads = (low >= check_float("minimum", minimum)).nonzero().tolist()
        return tuple((int(t), int(h)) for t, h in sorted(heads, key=lambda at: -float(low[at[0], at[1]])))

    def _get_axes(self) -> Mapping[str, Sequence[Any]]:
        return {"slice": self.slices, "head": range(self.mean.shape[1]), "relation": self.relations}

    def by_head(self) -> pd.DataFrame:
        """Return one row for each head: its role, the probability of that role, and the posterior of its share."""
        table, relations = self.to_dataframe(), len(self.relations)
        rows = torch.arange(0, len(table), relations) + self.top.argmax(-1).flatten()
        result = table.iloc[rows.numpy()].rename(columns={"relation": "role", "top": "probability"})
        columns = ["slice", "head", "role", "probability", "mean", "low", "high", "chance", "above"]
        return result[columns].reset_index(drop=True)

    def _to_sentence_values(self) -> SentenceValues:
        note = f"the estimates are means without the prior: alpha = {self.alpha:g} is not in them"
        options: Any = {"notes": (note,), "digests": self.digests}
        settings = {"relations": self.relations}
        return self._to_head_values("mean share of attention over the sentences", self.by_sentence, settings, **options)

    def _get_notes(self) -> Sequence[str]:
        return [f"The relation {name} is left out: {reason}." for name, reason in self.left_out.items()]

    @property
    def caption(self) -> str:
        """The subject and the method, in one line."""
        slices, heads, _ = self.mean.shape
        names = list(dict.fromkeys(name for name in self.selectors if name))
        states = f", states of {', '.join(names)}" if names else ""
        counts = {"head": heads, "slice": slices, "sentence": self.sentences}
        h, t, s = (f"{count} {unit}{'s' * (count != 1)}" for unit, count in counts.items())
        method = f"intervals of {100 * self.interval:g}%, each sentence counting once"
        return f"{h} of {t}{states}, from {s} with {self.words} words; {method}"


def average_relations(codes: Tensor, weights: Tensor, relations: int) -> Tensor:
    """Compute shares by relation, as means over words.

    Args:
        codes: The relation of each pair of words, `[sentence, i, j]`.
        weights: The weight of word j for word i, `[*, sentence, i, j]` or `[*, i, j]`.
        relations: The number of relations.

    Returns:
        The shares, `[sentence, *, relation]`.
    """
    one_hot = torch.nn.functional.one_hot(codes, relations).double()
    pairs = "sij" if weights.dim() > 3 else "ij"
    return torch.einsum(f"h{pairs},sijr->shir", weights.double(), one_hot).mean(2)


def estimate_shares(
    y: FloatArray, chance: FloatArray, alpha: float, interval: float, draws: int, seed: int
) -> dict[str, Tensor]:
    """Compute the posterior of the expected shares.

    Args:
        y: The shares of each sentence, `[sentence, slice, head, relation]`.
        chance: The shares of each sentence under uniform attention, `[sentence, slice, relation]`.
        alpha: The prior weight of each relation.
        interval: The probability of intervals.
        draws: The number of posterior samples.
        seed: The seed of the samples.

    Returns:
        The fields of `Roles` by name, each `[slice, head, relation]`.
    """
    (count, *shape), relations = y.shape, y.shape[-1]
    total, squares, prior = y.sum(0), np.square(y).sum(0), alpha * relations
    uniform = np.broadcast_to(chance.mean(0)[:, None], shape)
    # The mean and variance of theta_r under the Dirichlet process are exact. Its intervals and tails are those of
    # the Beta distribution with the same mean and variance, which is exact if each sentence has only one relation.
    mean = (alpha + total) / (prior + count)
    variance = ((alpha + squares) / (prior + count) - np.square(mean)) / (prior + count + 1)
    concentration = mean * (1 - mean) / variance - 1
    a, b = mean * concentration, (1 - mean) * concentration
    tail = (1 - interval) / 2
    theta = draw_shares(y, alpha, draws, seed)
    best = np.where(uniform > 0, theta - uniform, -np.inf).argmax(-1)
    result = {
        "mean": mean,
        "low": special.betaincinv(a, b, tail),
        "high": special.betainccinv(a, b, tail),
        "spread": np.sqrt(np.clip(squares / count - np.square(total / count), 0, None)),
        "counts": total,
        "chance": uniform.copy(),
        "above": np.where((uniform > 0) & (uniform < 1), special.betaincc(a, b, uniform), np.nan),
        "top": np.stack([(best == r).mean(0) for r in range(relations)], -1),
    }
    return {name: torch.from_numpy(value) for name, value in result.items()}


def draw_shares(y: FloatArray, alpha: float, draws: int, seed: int) -> FloatArray:
    """Draw posterior samples of `theta`, `[draw, slice, head, relation]`, from the shares of each sentence."""
    # The posterior of a Dirichlet process is a Dirichlet process (Ferguson 1973), with the sentences as additional
    # atoms. theta is a mean of atoms and corners with Dirichlet weights, which are normalised gamma variables; a
    # gamma variable with shape 1 is exponential. Those of a sentence are random numbers of this sentence.
    count, slices, heads, relations = y.shape
    corners = np.random.default_rng(seed).standard_gamma(alpha, (draws, relations))
    total, weighted = corners.sum(1), np.tile(corners, (1, slices * heads))
    for start in range(0, count, SENTENCES_PER_CHUNK):
        rows = y[start : start + SENTENCES_PER_CHUNK].reshape(-1, weighted.shape[1])
        seeds = (derive_seed(seed, "reading", start + k) for k in range(len(rows)))
        weights = np.stack([np.random.default_rng(number).standard_exponential(draws) for number in seeds])
        total += weights.sum(0)
        weighted += weights.T @ rows
    theta: FloatArray = (weighted / total[:, None]).reshape(draws, slices, heads, relations)
    return theta


@translate_memory_errors("roles")
def roles(
    net: object,
    sentences: object,
    *,
    relations: object = None,
    separators: Collection[str] | None = None,
    role: str | None = None,
    slices: object = "all",
    alpha: float | None = None,
    interval: float = 0.9,
    draws: int = 2000,
    seed: int = 0,
) -> Roles:
    """Compute what the heads of a net attend to in sentences: shares of attention by relation, with intervals.

    The first relation that holds for a pair of words counts; `other` is the relation of all other pairs.

    Args:
        net: A net with attention over words.
        sentences: Text, lists of words, ids or vectors.
        relations: By default same (the word itself), previous, next, first, separator, same token (another word with
            the same token). A list contains names of predefined relations (also last, earlier, later). A mapping gives
            a name to a function of the tokens that returns a boolean table `[word, attended word]`, to a `Reach`, or to
            a predefined relation.
        separators: The tokens that are separators; by default the special tokens of the net's tokenizer.
        role: The role with attention, if a slice has several.
        slices: The indices of slices, or `"all"`.
        alpha: The prior weight of each relation; by default all relations together have the weight of one sentence.
        interval: The probability of intervals, 0.9 by default.
        draws: The number of posterior samples, from which the probabilities of roles are computed.
        seed: The seed of the samples.

    Returns:
        The shares. Each sentence counts once, because the words of a sentence are dependent.

    Raises:
        BNetError: If the net has no attention over words, or an option is out of range.

    >>> import bnet_transformer as bt
    >>> net = bt.encoder(8, heads=2, slices=1, vocabulary=["the", "cat", "sat"])
    >>> found = bt.roles(net, ["the cat sat", "sat the cat"], relations=["same", "previous", "next"])
    >>> found.relations, found.mean.shape
    (('same', 'previous', 'next', 'other'), torch.Size([1, 2, 4]))
    """
    network = as_network(net)
    if not check_float("interval", interval, above=0) < 1:
        raise BNetError("interval", expected="a probability between 0 and 1", actual=interval)
    nodes = find_attention_nodes(network, role, slices)
    encoded = encode_sentences(network, sentences)
    unnamed = frozenset().union(*(sentence.unnamed for sentence in encoded))
    resolved = resolve_relations(relations, _explain_missing(network, nodes, unnamed, separators))
    weight = 1 / len(resolved.names) if alpha is None else check_float("alpha", alpha, above=0)
    shape = len(nodes.specs), nodes.num_heads, len(resolved.names)
    check_int("draws", draws), check_seed(seed)
    check_memory(f"{draws} draws", 8 * draws * math.prod(shape), "fewer draws=")
    marks = _check_separators(network, separators)
    with distributed_context(resolve_device(None, network)) as ranks:
        settings = resolved.names, relations, role, slices, weight, draws, seed, sorted(marks or ())
        ranks.assert_same("roles", net=network, data=[sentence.given for sentence in encoded], settings=settings)
        local = ranks.shard(encoded)
        y, chance = (torch.zeros(len(local), *dims, dtype=torch.float64) for dims in (shape, (shape[0], shape[2])))
        module = CompiledModule(ranks.to_device(network)).eval()
        for indices, tables in compute_attention(module, nodes, local):
            ids = ranks.global_indices(torch.tensor(indices)).tolist()
            pairs = [_split_tokens(network, nodes, encoded[k], marks) for k in ids]
            rows = [resolved.codes(pair, f"sentence {k}") for k, pair in zip(ids, pairs, strict=True)]
            codes = torch.from_numpy(np.stack(rows))
            masks = torch.stack([attention_mask(network, spec, encoded[ids[0]].word_counts) for spec in nodes.specs])
            chance[indices] = average_relations(codes, masks.double() / masks.sum(-1, keepdim=True), shape[2])
            for k, table in enumerate(tables):
                y[indices, k] = average_relations(codes, table.cpu(), shape[2])
        y, chance = (ranks.all_gather(rows).cpu() for rows in (y, chance))
    selectors = [None if c is None else network.specs[c].group.name for c in nodes.selectors]
    return Roles(
        tuple(spec.group.name for spec in nodes.specs),
        resolved.names,
        weight,
        interval,
        len(encoded),
        sum(sentence.word_counts[nodes.stacks[0]] for sentence in encoded),
        selectors=tuple(selectors),
        left_out=resolved.left_out,
        by_sentence=y,
        digests=tuple(sentence.digest(network) for sentence in encoded),
        **estimate_shares(y.numpy(), chance.numpy(), weight, interval, draws, seed),
    )


def _explain_missing(
    network: Network, nodes: AttentionNodes, vector_stacks: Collection[str], separators: Collection[str] | None
) -> dict[str, str]:
    """Return the requirements of relations that these sentences do not meet, with the reason."""
    reasons = {}
    name, stacks = nodes.specs[0].group.name, nodes.stacks
    if stacks[0] != stacks[1]:
        reasons[ONE_STACK] = f"the words of {name} attend to words of another stack"
    if set(vector_stacks) & set(stacks):
        reasons[TOKENS] = reasons[SEPARATORS] = "the words are vectors and have no tokens"
    elif separators is None and network.tokenizer is None:
        reasons[SEPARATORS] = "the vocabulary of the net has no special tokens (pass separators=)"
    if separators is not None and SEPARATORS in reasons:
        raise BNetError("separators", expected=f"None, because {reasons[SEPARATORS]}", actual=list(separators))
    return reasons


def _check_separators(network: Network, separators: Collection[str] | None) -> frozenset[str] | None:
    """Return the tokens that are separators; None for the special tokens of the tokenizer."""
    if separators is None:
        return None
    known = {word for words in network.vocabularies.values() for word in words}
    known |= {get_raw(word) for word in known}
    known |= set(network.tokenizer.vocabulary) if network.tokenizer is not None else set()
    for token in check_sequence("separators", separators, str):
        if known and token not in known:
            raise unknown_name_error("token of separators", token, known)
    return frozenset(separators)


def _split_tokens(
    network: Network, nodes: AttentionNodes, sentence: EncodedSentence, separators: frozenset[str] | None
) -> QueryKeyTokens:
    """Return the tokens of the attending and of the attended words."""
    query_stack, key_stack = nodes.stacks
    read = sentence.tokens[key_stack]
    if separators is not None:
        marks = [bool({token, get_raw(token)} & separators) for token in read]
    else:
        start = sum(len(sentence.tokens[s]) for s in list(sentence.tokens)[: list(sentence.tokens).index(key_stack)])
        marks = list(sentence.flag_special_tokens(network)[start : start + len(read)])
    return QueryKeyTokens(sentence.tokens[query_stack], read, np.array(marks, dtype=bool), query_stack == key_stack)

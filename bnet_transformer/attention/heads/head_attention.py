"""The attention `P(j | i)` of each head in sentences, and the relation of each attended word j to word i.

Sentences are batched by length, so there is no padding. Relations are ordered: the first one that holds for a pair of
words counts. `other` is the relation of all other pairs, so each pair has exactly one relation.

If heads are a plate, a head is an index of the plate. If a selector chooses one of the heads, a head is a state of the
selector, and attention is averaged over the prior of all other choices (atoms, selectors of earlier slices).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer._core.naming import Reach
from bnet_transformer._core.tokens import get_raw
from bnet_transformer.compiler.execution_state import ExecutionRequest, ExecutionState
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.data import EncodedSentence
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, BudgetError, UnsupportedError, format_count, unknown_name_error
from bnet_transformer.inference.factors import log_prior
from bnet_transformer.inference.selection import parse_attention_slices
from bnet_transformer.reference import BUDGET

RelationCodes = NDArray[np.int64]
BoolTable = NDArray[np.bool_]

OTHER = "other"
ONE_STACK, TOKENS, SEPARATORS = "one stack", "tokens", "separators"
MAX_ATTENTION_NUMEL = 2**21  # elements of the attention tensors of one batch
NUMEL_PER_PAIR = 16  # additional elements for each pair of words, such as those of relation tables


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
    filled = {network.get_spec(name).group.word_stack for name in given}
    request = ExecutionRequest(
        tuple(network.specs[i].group.name for i in sorted(choices | parents)),
        {
            s: torch.zeros(len(sentences), n, device=device)
            for s, n in sentences[0].word_counts.items()
            if s not in filled
        },
        given=given,
        record_attention=frozenset(indices - discrete),
        enumerate_too=frozenset(choices),
        training=False,
    )
    execution, _ = module.run(request)
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

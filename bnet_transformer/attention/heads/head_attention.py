"""What each head reads in sentences, `P(j | i)`, and what a word that is read is to its reader.

Sentences of one length are read at a time, so that no padding is read. Relations are in order, of which the first that
holds counts; `other` is what none of them holds of, so of each word that is read exactly one relation holds.

Where heads are a plate, a head is an entry of it; where a selector draws one, a head is a state of the selector, and
what other choices (atoms, selectors of earlier slices) make of its reading is averaged as the net draws them.
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
from bnet_transformer.compiler.execution_state import ExecutionRequest, ExecutionState
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.data import EncodedSentence
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, BudgetError, UnsupportedError, unknown_name_error
from bnet_transformer.inference.factors import log_prior
from bnet_transformer.inference.selection import parse_slices
from bnet_transformer.reference import BUDGET

RelationCodes = NDArray[np.int64]
BoolTable = NDArray[np.bool_]

OTHER = "other"
ONE_STACK, TOKENS, SEPARATORS = "one stack", "tokens", "separators"
MAX_ATTENTION_NUMEL, NUMEL_PER_PAIR = (
    2**21,
    16,
)  # of the readings of a piece of the corpus; of what is told of each pair of words beside


@dataclass(frozen=True)
class AttentionNodes:
    """The families by which slices read, one for each, with the selector whose states are its heads, if there is one.

    `stacks` are the one whose words read and the one whose words are read.
    """

    specs: tuple[NodeSpec, ...]
    selectors: tuple[int | None, ...]
    num_heads: int
    stacks: tuple[str, str]


def find_attention_nodes(network: Network, role: str | None, slices: object) -> AttentionNodes:
    """The families that read words in slices ("all", or some), of one role: refused where there are several."""
    own = _attention_by_slice(network, role)
    wanted = list(own) if isinstance(slices, str) and slices == "all" else parse_slices(slices, network)
    for t in wanted:
        if t not in own:
            got, stem = f"slice {t}", next(iter(own.values())).group.stem
            raise BNetError("slices", expected=f"slices in which {stem} reads", actual=got, allowed=f"{list(own)}")
    members = tuple(own[t] for t in wanted)
    selectors = tuple(_find_selector(network, member) for member in members)
    counts = {
        m.group.name: math.prod(network.graph.plate_sizes[plate] for plate in m.group.plates)
        if c is None
        else network.specs[c].tpm.states or 1
        for m, c in zip(members, selectors, strict=True)
    }
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise BNetError("slices", expected="slices with as many heads", actual=told)
    first = members[0]
    read = network.specs[_get_attended_parent(first).index].group.word_stack or ""
    return AttentionNodes(members, selectors, counts[first.group.name], (first.group.word_stack or "", read))


def _attention_by_slice(network: Network, role: str | None) -> dict[int, NodeSpec]:
    """The family that reads in each slice, of one role."""
    found: dict[str, dict[int, NodeSpec]] = {}
    for member in network.specs:
        step = member.group.step
        within = step is not None and 0 <= step < network.graph.slices[member.group.stack]
        if step is not None and within and member.group.word_stack is not None and member.has_word_attention:
            found.setdefault(member.group.stem, {})[step] = member
    if not found:
        kinds = sorted({type(m.tpm).__name__ for m in network.specs if (m.group.step or -1) >= 0})
        raise BNetError("net", expected="a TPM with P(j | i) in its slices", actual=", ".join(kinds) or "no slice")
    if role is not None and role not in found:
        raise unknown_name_error("role that reads", role, found)
    if role is None and len(found) > 1:
        raise BNetError("role", expected="which of them reads (role=)", actual="none", allowed=", ".join(found))
    return found[role if role is not None else next(iter(found))]


def _get_attended_parent(spec: NodeSpec) -> ParentSpec:
    """The words that a family reads."""
    slots = spec.tpm.attention_slots()
    return next(given for given in spec.word_parents if given.slot in slots)


def _find_selector(network: Network, spec: NodeSpec) -> int | None:
    """The choice whose states are the heads: the topmost of those that decide whom a slice reads, given its words."""
    if spec.group.plates:
        return None
    inputs = [given for given in spec.parents if given.slot in spec.tpm.attention_slots()]
    stack = [i for given in inputs for i in (given.index, *(selector for _, selector in given.pick))]
    choices: set[int] = set()
    passed: set[int] = set()
    while stack:
        index = stack.pop()
        family, above = network.specs[index].group, [bundle.parent for bundle in network.graph.in_edges[index]]
        if index not in passed and not network.is_word_state(family):
            passed.add(index)
            choices |= {index} if network.specs[index].tpm.kind == "discrete" else set()
            stack.extend(i for i in above if network.specs[i].group.stem != family.stem)  # no selector's own past
    tops = [i for i in sorted(choices) if not network.graph.ancestors([i]) & choices]
    if len(tops) > 1:
        names = ", ".join(network.specs[i].group.name for i in tops)
        raise BNetError(spec.group.name, expected="heads that one selector draws", actual=f"choices {names}")
    return tops[0] if tops else None


def attention_mask(network: Network, spec: NodeSpec, words: Mapping[str, int]) -> Tensor:
    """`[i, j]`: which words the mask lets each word read."""
    given = _get_attended_parent(spec)
    read = network.specs[given.index].group.word_stack or ""
    return torch.tensor(given.reach.matrix(words[spec.group.word_stack or ""], words[read]))


@torch.no_grad()
def compute_attention(
    module: CompiledModule, nodes: AttentionNodes, sentences: Sequence[EncodedSentence]
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """The numbers of some sentences of one length, and `P(j | i)` of each slice, `[head, sentence, word, word]`."""
    network = module.network
    lengths: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for k, intake in enumerate(sentences):
        lengths.setdefault(tuple(intake.word_counts.items()), []).append(k)
    for length, which in sorted(lengths.items()):
        words = dict(length)
        n, m = (words[stack] for stack in nodes.stacks)
        each = _count_joint_states(network, nodes, words) * len(nodes.specs) * nodes.num_heads + NUMEL_PER_PAIR
        size = max(1, MAX_ATTENTION_NUMEL // (each * n * m))
        for start in range(0, len(which), size):
            some = which[start : start + size]
            yield some, _compute_attention_part(module, nodes, [sentences[k] for k in some])


def _count_joint_states(network: Network, nodes: AttentionNodes, words: Mapping[str, int]) -> int:
    """How many joint states of choices a reading hangs on, beside its heads; refused past the budget."""
    most = 1
    for member, selector in zip(nodes.specs, nodes.selectors, strict=True):
        above = network.graph.ancestors([member.group.index]) - {selector}
        free = [i for i in above if network.specs[i].tpm.kind == "discrete"]
        count = math.prod(network.count_states(i, words) for i in free)
        if count > BUDGET:
            names = ", ".join(network.specs[i].group.name for i in sorted(free)[:6])
            wanted = f"at most {BUDGET} joint states of what is drawn above them ({names})"
            what = f"readings of {member.group.name}"
            raise BudgetError(what, expected=wanted, actual=f"{count}", allowed="slices= of the first ones")
        most = max(most, count)
    return most


def _compute_attention_part(
    module: CompiledModule, nodes: AttentionNodes, sentences: Sequence[EncodedSentence]
) -> list[Tensor]:
    """`P(j | i)` of sentences of one length, slice by slice."""
    network, device = module.network, module.network.device
    indices = {member.group.index for member in nodes.specs}
    above = network.graph.ancestors(indices)
    free = {i for i in above if network.specs[i].tpm.kind == "discrete"}
    drawn = {m.group.index for m in nodes.specs if m.tpm.kind == "discrete"}
    parents = {given.index for i in drawn for given in network.specs[i].parents}
    given = {name: torch.stack([each.given[name] for each in sentences]).to(device) for name in sentences[0].given}
    told = {network.get_spec(name).group.word_stack for name in given}
    request = ExecutionRequest(
        tuple(network.specs[i].group.name for i in sorted(free | parents)),
        {
            s: torch.zeros(len(sentences), n, device=device)
            for s, n in sentences[0].word_counts.items()
            if s not in told
        },
        given=given,
        record_attention=frozenset(indices - drawn),
        enumerate_too=frozenset(free),
        training=False,
    )
    course, _ = module.run(request)
    pairs = zip(nodes.specs, nodes.selectors, strict=True)
    return [_attention_by_head(course, member, selector, nodes.num_heads, len(sentences)) for member, selector in pairs]


def _attention_by_head(
    state: ExecutionState, spec: NodeSpec, selector: int | None, num_heads: int, batch_size: int
) -> Tensor:
    """`P(j | i)` of each head, what other choices make of it averaged: `[head, batch, word, word read]`."""
    layout, found, family = state.layout, _attention_weights(state, spec), spec.group
    shares = _choice_probabilities(state, found, selector)
    if shares is not None:
        found = found * shares[..., None].to(found.dtype)
    place = None if selector is None else layout.enumerated.index(selector)
    rest = [k for k in range(layout.batch_dim) if k != place and found.shape[k] > 1]
    found = found.sum(rest, keepdim=True) if rest else found
    full = [1] * layout.rank
    full[layout.batch_dim], full[layout.word_dim] = batch_size, state.word_counts[family.word_stack or ""]
    sizes = {layout.axis(plate): state.network.graph.plate_sizes[plate] for plate in family.plates}
    if place is not None and not sizes:
        sizes = {place: num_heads}
    for axis, size in sizes.items():
        full[axis] = size
    found = found.expand(*full, found.shape[-1]).movedim([*sizes], tuple(range(len(sizes))))
    return found.reshape(-1, batch_size, *found.shape[-2:])


def _attention_weights(state: ExecutionState, spec: NodeSpec) -> Tensor:
    """`P(j | i)` in the layout: of a deterministic family as the course kept it."""
    weights = state.attention_weights.get(spec.group.index)
    if spec.tpm.kind == "discrete":
        at, parents = gather_parents(state, spec)
        weights = spec.tpm.attention_weights(at, *parents)
    if weights is None:
        wanted, got = "a family that reads all words at once", "one that is computed word after word"
        raise UnsupportedError(spec.group.name, expected=wanted, actual=got)
    return state.layout.pad_dims(weights, 1)


def _choice_probabilities(state: ExecutionState, attention: Tensor, selector: int | None) -> Tensor | None:
    """`P(other choices | head)`, of the choices on which a reading hangs; None where there are no others."""
    layout, graph, members = state.layout, state.network.graph, state.network.specs
    own = {i for k, i in enumerate(layout.enumerated) if attention.shape[k] > 1}
    needed = {i for i in layout.enumerated if i in graph.ancestral_set(own)}
    if needed <= {selector}:
        return None
    root = selector is not None and not graph.ancestors([selector]) & needed
    logs = [log_prior(state, i, members[i]) for i in sorted(needed) if not (root and i == selector)]
    total = torch.stack(torch.broadcast_tensors(*logs)).sum(0)
    if root or selector is None:
        return total.exp()
    others = [k for k in range(layout.batch_dim) if k != layout.enumerated.index(selector)]
    return (total - total.logsumexp(others, keepdim=True)).exp()


@dataclass(frozen=True)
class QueryKeyTokens:
    """The words that read and the words that are read, of one sentence: their tokens, and which are separators."""

    query_tokens: tuple[str, ...]
    key_tokens: tuple[str, ...]
    is_separator: BoolTable
    is_self_attention: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.query_tokens), len(self.key_tokens)

    @property
    def distance(self) -> RelationCodes:
        """`j - i`."""
        found: RelationCodes = np.subtract.outer(np.arange(len(self.query_tokens)), np.arange(len(self.key_tokens)))
        return -found


def _has_same_token(pair: QueryKeyTokens) -> BoolTable:
    """Another word with the same token; in another stack, any word with it."""
    alike: BoolTable = np.array(pair.query_tokens)[:, None] == np.array(pair.key_tokens)[None, :]
    return alike & (pair.distance != 0) if pair.is_self_attention else alike


# What each relation needs to have a meaning, and where it holds.
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
    """Relations in order, `other` last; `left_out` says of the default ones that have no meaning here why."""

    tables: Mapping[str, Callable[[QueryKeyTokens], BoolTable]]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return *self.tables, OTHER

    def codes(self, pair: QueryKeyTokens, subject: str) -> RelationCodes:
        """The number of the relation of each reader i and each word j that is read, `[i, j]`."""
        held = [_check_table(table(pair), pair, f"relation {name!r}, {subject}") for name, table in self.tables.items()]
        found: RelationCodes = np.argmax(np.stack([*held, np.ones(pair.shape, dtype=bool)]), axis=0)
        return found


def resolve_relations(requested: object, missing: Mapping[str, str]) -> Relations:
    """The relations that are asked for: none for the default ones, a list of names, or a mapping from names to what
    says where they hold; `missing` says why there is no meaning to relations that need something."""
    if requested is None:
        left = {name: missing[RELATIONS[name][0]] for name in DEFAULT_RELATIONS if RELATIONS[name][0] in missing}
        return Relations({name: RELATIONS[name][1] for name in DEFAULT_RELATIONS if name not in left}, left)
    if isinstance(requested, str) or not isinstance(requested, Sequence | Mapping):
        wanted = "a list of relations, or a mapping from names to what says where they hold"
        raise BNetError("relations", expected=wanted, actual=requested, allowed=", ".join(RELATIONS))
    named = requested if isinstance(requested, Mapping) else {name: name for name in requested if name != OTHER}
    tables = {name: _resolve_relation(name, told, missing) for name, told in named.items()}
    if not tables:
        wanted = f"at least one beside {OTHER!r}"
        raise BNetError("relations", expected=wanted, actual="none", allowed=", ".join(RELATIONS))
    return Relations(tables)


def _resolve_relation(
    name: object, relation: object, missing: Mapping[str, str]
) -> Callable[[QueryKeyTokens], BoolTable]:
    """Where one relation holds: as one of ours, a Reach, or a function of the tokens says."""
    if not isinstance(name, str) or not name or name == OTHER:
        wanted = f"a name for each relation; {OTHER!r} is what no relation holds of"
        raise BNetError("relations", expected=wanted, actual=name)
    if isinstance(relation, str):
        if relation not in RELATIONS:
            raise unknown_name_error("relation", relation, RELATIONS)
        needs, table = RELATIONS[relation]
        if needs in missing:
            raise BNetError(f"relation {relation!r}", expected=f"a reading that has {needs}", actual=missing[needs])
        return table
    if isinstance(relation, Reach):
        return lambda pair: relation.matrix(*pair.shape)
    if not callable(relation):
        wanted = "a function of the tokens, a Reach, or the name of a relation"
        raise BNetError(f"relation {name!r}", expected=wanted, actual=relation, allowed=", ".join(RELATIONS))
    return lambda pair: (
        relation(pair.query_tokens) if pair.is_self_attention else relation(pair.query_tokens, pair.key_tokens)
    )


def _check_table(value: object, pair: QueryKeyTokens, subject: str) -> BoolTable:
    """A table of booleans for all pairs of words, or the error that says which one is none."""
    wanted = f"a table of booleans of shape {pair.shape}"
    try:
        table = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BNetError(subject, expected=wanted, actual=value) from error
    if table.dtype != bool or table.shape != pair.shape:
        raise BNetError(subject, expected=wanted, actual=f"{table.dtype} of shape {table.shape}")
    return table

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
from bnet_transformer.compiler.course import ExecutionRequest, ExecutionState, gather_parents
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.data import EncodedSentence
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, BudgetError, UnsupportedError, unknown_name_error
from bnet_transformer.inference.factors import log_prior
from bnet_transformer.reference import BUDGET, asking

Codes = NDArray[np.int64]
Table = NDArray[np.bool_]

OTHER = "other"
ONE_STACK, TOKENS, SEPARATORS = "one stack", "tokens", "separators"
NUMBERS, BESIDE = 2**21, 16  # of the readings of a piece of the corpus; of what is told of each pair of words beside


@dataclass(frozen=True)
class Readers:
    """The families by which slices read, one for each, with the selector whose states are its heads, if there is one.

    `stacks` are the one whose words read and the one whose words are read.
    """

    members: tuple[NodeSpec, ...]
    selectors: tuple[int | None, ...]
    heads: int
    stacks: tuple[str, str]


def readers_of(network: Network, role: str | None, slices: object) -> Readers:
    """The families that read words in slices ("all", or some), of one role: refused where there are several."""
    own = _by_slice(network, role)
    wanted = list(own) if isinstance(slices, str) and slices == "all" else asking.parse_slices(slices, network)
    for t in wanted:
        if t not in own:
            got, stem = f"slice {t}", next(iter(own.values())).group.stem
            raise BNetError("slices", expected=f"slices in which {stem} reads", actual=got, allowed=f"{list(own)}")
    members = tuple(own[t] for t in wanted)
    selectors = tuple(_selector(network, member) for member in members)
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
    read = network.specs[_collection(first).index].group.word_stack or ""
    return Readers(members, selectors, counts[first.group.name], (first.group.word_stack or "", read))


def _by_slice(network: Network, role: str | None) -> dict[int, NodeSpec]:
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


def _collection(member: NodeSpec) -> ParentSpec:
    """The words that a family reads."""
    slots = member.tpm.attention_slots()
    return next(given for given in member.word_parents if given.slot in slots)


def _selector(network: Network, member: NodeSpec) -> int | None:
    """The choice whose states are the heads: the topmost of those that decide whom a slice reads, given its words."""
    if member.group.plates:
        return None
    inputs = [given for given in member.parents if given.slot in member.tpm.attention_slots()]
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
        raise BNetError(member.group.name, expected="heads that one selector draws", actual=f"choices {names}")
    return tops[0] if tops else None


def allowed(network: Network, member: NodeSpec, words: Mapping[str, int]) -> Tensor:
    """`[i, j]`: which words the mask lets each word read."""
    given = _collection(member)
    read = network.specs[given.index].group.word_stack or ""
    return torch.tensor(given.reach.matrix(words[member.group.word_stack or ""], words[read]))


@torch.no_grad()
def readings(
    module: CompiledModule, readers: Readers, intakes: Sequence[EncodedSentence]
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """The numbers of some sentences of one length, and `P(j | i)` of each slice, `[head, sentence, word, word]`."""
    network = module.network
    lengths: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for k, intake in enumerate(intakes):
        lengths.setdefault(tuple(intake.word_counts.items()), []).append(k)
    for length, which in sorted(lengths.items()):
        words = dict(length)
        n, m = (words[stack] for stack in readers.stacks)
        each = _states(network, readers, words) * len(readers.members) * readers.heads + BESIDE
        size = max(1, NUMBERS // (each * n * m))
        for start in range(0, len(which), size):
            some = which[start : start + size]
            yield some, _read(module, readers, [intakes[k] for k in some])


def _states(network: Network, readers: Readers, words: Mapping[str, int]) -> int:
    """How many joint states of choices a reading hangs on, beside its heads; refused past the budget."""
    most = 1
    for member, selector in zip(readers.members, readers.selectors, strict=True):
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


def _read(module: CompiledModule, readers: Readers, intakes: Sequence[EncodedSentence]) -> list[Tensor]:
    """`P(j | i)` of sentences of one length, slice by slice."""
    network, device = module.network, module.network.device
    indices = {member.group.index for member in readers.members}
    above = network.graph.ancestors(indices)
    free = {i for i in above if network.specs[i].tpm.kind == "discrete"}
    drawn = {m.group.index for m in readers.members if m.tpm.kind == "discrete"}
    parents = {given.index for i in drawn for given in network.specs[i].parents}
    given = {name: torch.stack([each.given[name] for each in intakes]).to(device) for name in intakes[0].given}
    told = {network.get_spec(name).group.word_stack for name in given}
    request = ExecutionRequest(
        tuple(network.specs[i].group.name for i in sorted(free | parents)),
        {s: torch.zeros(len(intakes), n, device=device) for s, n in intakes[0].word_counts.items() if s not in told},
        given=given,
        record_attention=frozenset(indices - drawn),
        enumerate_too=frozenset(free),
        training=False,
    )
    course, _ = module.run(request)
    pairs = zip(readers.members, readers.selectors, strict=True)
    return [_by_head(course, member, selector, readers.heads, len(intakes)) for member, selector in pairs]


def _by_head(course: ExecutionState, member: NodeSpec, selector: int | None, heads: int, batch: int) -> Tensor:
    """`P(j | i)` of each head, what other choices make of it averaged: `[head, batch, word, word read]`."""
    layout, found, family = course.layout, _reading(course, member), member.group
    shares = _shares(course, found, selector)
    if shares is not None:
        found = found * shares[..., None].to(found.dtype)
    place = None if selector is None else layout.enumerated.index(selector)
    rest = [k for k in range(layout.batch_dim) if k != place and found.shape[k] > 1]
    found = found.sum(rest, keepdim=True) if rest else found
    full = [1] * layout.rank
    full[layout.batch_dim], full[layout.word_dim] = batch, course.word_counts[family.word_stack or ""]
    sizes = {layout.axis(plate): course.network.graph.plate_sizes[plate] for plate in family.plates}
    if place is not None and not sizes:
        sizes = {place: heads}
    for axis, size in sizes.items():
        full[axis] = size
    found = found.expand(*full, found.shape[-1]).movedim([*sizes], tuple(range(len(sizes))))
    return found.reshape(-1, batch, *found.shape[-2:])


def _reading(course: ExecutionState, member: NodeSpec) -> Tensor:
    """`P(j | i)` in the layout: of a deterministic family as the course kept it."""
    weights = course.attention_weights.get(member.group.index)
    if member.tpm.kind == "discrete":
        at, parents = gather_parents(course, member)
        weights = member.tpm.attention_weights(at, *parents)
    if weights is None:
        wanted, got = "a family that reads all words at once", "one that is computed word after word"
        raise UnsupportedError(member.group.name, expected=wanted, actual=got)
    return course.layout.pad_dims(weights, 1)


def _shares(course: ExecutionState, reading: Tensor, selector: int | None) -> Tensor | None:
    """`P(other choices | head)`, of the choices on which a reading hangs; None where there are no others."""
    layout, graph, members = course.layout, course.network.graph, course.network.specs
    own = {i for k, i in enumerate(layout.enumerated) if reading.shape[k] > 1}
    needed = {i for i in layout.enumerated if i in graph.ancestral_set(own)}
    if needed <= {selector}:
        return None
    root = selector is not None and not graph.ancestors([selector]) & needed
    logs = [log_prior(course, i, members[i]) for i in sorted(needed) if not (root and i == selector)]
    total = torch.stack(torch.broadcast_tensors(*logs)).sum(0)
    if root or selector is None:
        return total.exp()
    others = [k for k in range(layout.batch_dim) if k != layout.enumerated.index(selector)]
    return (total - total.logsumexp(others, keepdim=True)).exp()


@dataclass(frozen=True)
class Pair:
    """The words that read and the words that are read, of one sentence: their tokens, and which are separators."""

    tokens: tuple[str, ...]
    read: tuple[str, ...]
    separators: Table
    one_stack: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.tokens), len(self.read)

    @property
    def distance(self) -> Codes:
        """`j - i`."""
        found: Codes = np.subtract.outer(np.arange(len(self.tokens)), np.arange(len(self.read)))
        return -found


def _same_token(pair: Pair) -> Table:
    """Another word with the same token; in another stack, any word with it."""
    alike: Table = np.array(pair.tokens)[:, None] == np.array(pair.read)[None, :]
    return alike & (pair.distance != 0) if pair.one_stack else alike


# What each relation needs to have a meaning, and where it holds.
RELATIONS: Mapping[str, tuple[str, Callable[[Pair], Table]]] = {
    "same": (ONE_STACK, lambda pair: pair.distance == 0),
    "previous": (ONE_STACK, lambda pair: pair.distance == -1),
    "next": (ONE_STACK, lambda pair: pair.distance == 1),
    "first": ("", lambda pair: Reach("first").matrix(*pair.shape)),
    "last": ("", lambda pair: Reach("last").matrix(*pair.shape)),
    "separator": (SEPARATORS, lambda pair: np.broadcast_to(pair.separators, pair.shape)),
    "same token": (TOKENS, _same_token),
    "earlier": (ONE_STACK, lambda pair: pair.distance < 0),
    "later": (ONE_STACK, lambda pair: pair.distance > 0),
}
DEFAULT = ("same", "previous", "next", "first", "separator", "same token")


@dataclass(frozen=True)
class Relations:
    """Relations in order, `other` last; `left_out` says of the default ones that have no meaning here why."""

    tables: Mapping[str, Callable[[Pair], Table]]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return *self.tables, OTHER

    def codes(self, pair: Pair, where: str) -> Codes:
        """The number of the relation of each reader i and each word j that is read, `[i, j]`."""
        held = [_checked(table(pair), pair, f"relation {name!r}, {where}") for name, table in self.tables.items()]
        found: Codes = np.argmax(np.stack([*held, np.ones(pair.shape, dtype=bool)]), axis=0)
        return found


def relations_of(asked: object, missing: Mapping[str, str]) -> Relations:
    """The relations that are asked for: none for the default ones, a list of names, or a mapping from names to what
    says where they hold; `missing` says why there is no meaning to relations that need something."""
    if asked is None:
        left = {name: missing[RELATIONS[name][0]] for name in DEFAULT if RELATIONS[name][0] in missing}
        return Relations({name: RELATIONS[name][1] for name in DEFAULT if name not in left}, left)
    if isinstance(asked, str) or not isinstance(asked, Sequence | Mapping):
        wanted = "a list of relations, or a mapping from names to what says where they hold"
        raise BNetError("relations", expected=wanted, actual=asked, allowed=", ".join(RELATIONS))
    named = asked if isinstance(asked, Mapping) else {name: name for name in asked if name != OTHER}
    tables = {name: _table_of(name, told, missing) for name, told in named.items()}
    if not tables:
        wanted = f"at least one beside {OTHER!r}"
        raise BNetError("relations", expected=wanted, actual="none", allowed=", ".join(RELATIONS))
    return Relations(tables)


def _table_of(name: object, told: object, missing: Mapping[str, str]) -> Callable[[Pair], Table]:
    """Where one relation holds: as one of ours, a Reach, or a function of the tokens says."""
    if not isinstance(name, str) or not name or name == OTHER:
        wanted = f"a name for each relation; {OTHER!r} is what no relation holds of"
        raise BNetError("relations", expected=wanted, actual=name)
    if isinstance(told, str):
        if told not in RELATIONS:
            raise unknown_name_error("relation", told, RELATIONS)
        needs, table = RELATIONS[told]
        if needs in missing:
            raise BNetError(f"relation {told!r}", expected=f"a reading that has {needs}", actual=missing[needs])
        return table
    if isinstance(told, Reach):
        return lambda pair: told.matrix(*pair.shape)
    if not callable(told):
        wanted = "a function of the tokens, a Reach, or the name of a relation"
        raise BNetError(f"relation {name!r}", expected=wanted, actual=told, allowed=", ".join(RELATIONS))
    return lambda pair: told(pair.tokens) if pair.one_stack else told(pair.tokens, pair.read)


def _checked(told: object, pair: Pair, where: str) -> Table:
    """A table of booleans for all pairs of words, or the error that says which one is none."""
    wanted = f"a table of booleans of shape {pair.shape}"
    try:
        table = np.asarray(told)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BNetError(where, expected=wanted, actual=told) from error
    if table.dtype != bool or table.shape != pair.shape:
        raise BNetError(where, expected=wanted, actual=f"{table.dtype} of shape {table.shape}")
    return table

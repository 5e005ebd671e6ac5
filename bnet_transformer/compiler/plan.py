"""First pass, network to plan: the families that what is wanted needs, in order, and the choices to enumerate.

Within the plan some matrix products are made as one. Maps of one vector are made *together*:
`[q k v] = [W_q W_k W_v] x`. Maps around an attention are *folded* into it where that costs less:
`q_i . k_j = x_i . (W_q^T W_k) x_j`, and `sum_j P(j | i) W_v x_j = W_v sum_j P(j | i) x_j`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bnet_transformer._core.naming import WORD
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import UnsupportedError
from bnet_transformer.tpm import Affine, Attention, Dot, Linear

Spread = Mapping[int, frozenset[object]]
MEETING = (  # what to do where choices of different words meet
    "do= for that choice; net.sentence(...), which asks about one sentence within a budget"
)


@dataclass(frozen=True)
class Fold:
    """An attention that reads x instead of q, k (and v): how it sees x, and the weights that are applied to it."""

    member: NodeSpec
    W_q: ParentSpec
    W_k: ParentSpec
    W_v: ParentSpec | None
    residual: bool
    away: frozenset[int]


def folds(
    network: Network, groups: Sequence[Sequence[int]], enumerated: set[int], kept: set[int], known: Collection[int]
) -> dict[int, Fold]:
    """The attentions of a plan that are cheaper when the maps around them are folded in; `kept` are wanted."""
    order = [index for group in groups for index in group]
    spread = _spread(network, order, enumerated)
    readers = dict.fromkeys(order, 0)
    for index in order:
        for parent in {bundle.parent for bundle in network.graph.in_edges[index]} & readers.keys():
            readers[parent] += 1
    free = {index for index in order if readers[index] == 1 and index not in {*kept, *known, *enumerated}}
    found: dict[int, Fold] = {}
    for (index,) in (group for group in groups if len(group) == 1):
        member = network.specs[index]
        if isinstance(member.tpm, Attention) and index not in known:
            fold = _fold(network, member, spread, free)
            if fold is not None:
                found[index] = fold
    return found


def together(network: Network, order: Sequence[int], away: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Maps of one vector by weights that are all there when the first of them is due: first -> all."""
    place = {index: k for k, index in enumerate(order)}
    alike: dict[tuple[object, ...], list[int]] = {}
    for index in order:
        member = network.specs[index]
        if index not in away and isinstance(member.tpm, Linear | Affine) and _is_map(member):
            x = member.parents[1]
            alike.setdefault((x.index, member.group.plates, member.group.word_stack, type(member.tpm)), []).append(
                index
            )
    found = {}
    for indices in alike.values():
        there = [i for i in indices if place.get(network.specs[i].parents[0].index, -1) < place[indices[0]]]
        if len(there) > 1:
            found[there[0]] = tuple(there)
    return found


def _fold(network: Network, member: NodeSpec, spread: Spread, free: set[int]) -> Fold | None:
    tpm = member.tpm
    assert isinstance(tpm, Attention)
    if not isinstance(tpm.score, Dot) or tpm.score.rotary is not None or tpm.over != "keys":
        return None
    if any(given.pick for given in member.parents) or any(given.over != (WORD,) for given in member.parents[1:3]):
        return None
    q, k, v = (network.specs[given.index] for given in member.parents[:3])
    if not all(m.group.index in free and isinstance(m.tpm, Linear) and _is_map(m) for m in (q, k)):
        return None
    (W_q, x_q), (W_k, x_k) = q.parents, k.parents
    of_words = {m.group.index for m in network.specs if m.group.word_stack is not None}
    if W_k.index in of_words:  # weights of the word that is read, which only a map before the attention can take
        return None
    (key,), (d_q,), (d_k,) = q.shape, q.tpm_parents[1].shape, k.tpm_parents[1].shape
    together, alone_q, alone_k = (_size(network, spread, *some) for some in ((W_q, W_k), (W_q,), (W_k,)))
    if d_k > key or together * d_q * d_k > (alone_q * d_q + alone_k * d_k) * key:
        return None
    inputs = [replace(x_q, slot="q"), replace(member.parents[1], parent=x_k.index), *member.parents[2:]]
    away, W_v = {q.group.index, k.group.index}, None
    if v.group.index in free and isinstance(v.tpm, Linear) and _is_map(v):
        weights, x_v = v.parents
        shared = not spread.get(x_v.index, frozenset()) & spread[weights.index]
        within = spread[W_q.index] | spread[W_k.index] <= spread[weights.index]
        if shared and within and weights.index not in of_words and v.tpm_parents[1].shape <= v.shape:
            W_v = weights
            inputs[2] = replace(member.parents[2], parent=x_v.index)
            away.add(v.group.index)
    scored = replace(tpm, score=Dot(tpm.score.get_scale(key)), residual=False)
    return Fold(replace(member, tpm=scored, inputs=tuple(inputs)), W_q, W_k, W_v, tpm.residual, frozenset(away))


def _is_map(member: NodeSpec) -> bool:
    """True for `W x` of a word's own vector, W and x read as they are."""
    if len(member.parents) != 2:
        return False
    W, x = member.parents
    bare = not (W.pick or x.pick or W.over or x.over)
    return bare and W.reach.kind == x.reach.kind == "same" and member.group.word_stack is not None


def _spread(network: Network, order: Sequence[int], enumerated: set[int]) -> Spread:
    """The dims besides batch and word along which each value spreads: plates, and enumerated families."""
    found: dict[int, frozenset[object]] = {}
    for index in order:
        family = network.specs[index].group
        above = (found.get(bundle.parent, frozenset()) for bundle in network.graph.in_edges[index])
        inner = {index} if index in enumerated else {d for each in above for d in each if isinstance(d, int)}
        found[index] = frozenset({*family.plates, *inner})
    return found


def _size(network: Network, spread: Spread, *weights: ParentSpec) -> float:
    """How many entries the dims have along which some weights spread."""
    dims = {dim for W in weights for dim in spread.get(W.index, frozenset())}
    families = [network.specs[dim].tpm.states or math.inf for dim in dims if isinstance(dim, int)]
    return math.prod([network.graph.plate_sizes[dim] for dim in dims if isinstance(dim, str)]) * math.prod(families)


@dataclass(frozen=True)
class Plan:
    """What is computed: groups of families in order (several in one group read each other word after word), the
    families that nothing reads after each group, the discrete families whose states lead as enumerated dims, what
    is wanted, the attentions into which their maps are folded, the maps that are made together, the families that
    are left to whoever asked, who finds all that they read, and those that are computed word after word."""

    groups: tuple[tuple[int, ...], ...]
    done: tuple[tuple[int, ...], ...]
    enumerated: tuple[int, ...]
    wanted: tuple[int, ...]
    folds: Mapping[int, Fold] = field(default_factory=dict)
    together: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    left: frozenset[int] = frozenset()
    recurrent: frozenset[int] = frozenset()  # of the graph, where torch.compile cannot trace a cached property


def network_to_plan(
    network: Network,
    want: Sequence[str],
    known: Collection[int] = (),
    enumerate_too: Collection[int] = (),
    *,
    fold: bool = False,
    left: frozenset[int] = frozenset(),
    patched: frozenset[int] = frozenset(),
    passed: frozenset[int] = frozenset(),
    words: Mapping[str, int] | None = None,
) -> Plan:
    """The plan for some families; `known` are those whose value comes from outside (`do`, evidence).

    `fold` where there are so many words that a product of two weights costs less than a map of all words; the families
    `left` are not computed, but all that they read is; the deterministic families `passed` are computed, and not kept.
    Some nodes of the families `patched` are set. `words` of each stack are for the messages.
    """
    wanted = tuple(network.graph.get_group(name).index for name in want)
    needs = find_needs(network, wanted, known, enumerate_too, patched=patched, passed=passed, words=words)
    if needs.fault is not None:
        raise needs.fault
    needed, enumerated = set(needs.needed), set(needs.enumerated)
    groups = network.filter_components(needed)
    read = [index for index in wanted if network.specs[index].tpm.is_random and index not in known]
    kept = {*wanted, *(bundle.parent for index in read for bundle in network.graph.in_edges[index])}
    folded = folds(network, groups, enumerated, kept | patched, known) if fold else {}
    groups = network.filter_components(needed - {index for each in folded.values() for index in each.away})
    kept |= {parent for index in left for parent in _read(network, index, folded)}
    sides = together(network, [group[0] for group in groups if len(group) == 1], {*known, *folded})
    done = _done(network, groups, kept, folded)
    return Plan(groups, done, tuple(sorted(enumerated)), wanted, folded, sides, left, network.graph.recurrent)


@dataclass(frozen=True)
class Needs:
    """The families that a question needs, the choices among them that are enumerated, and why it cannot be planned."""

    needed: frozenset[int]
    enumerated: frozenset[int]
    fault: UnsupportedError | None


def find_needs(
    network: Network,
    wanted: Sequence[int],
    known: Collection[int],
    enumerate_too: Collection[int] = (),
    *,
    patched: frozenset[int] = frozenset(),
    passed: frozenset[int] = frozenset(),
    words: Mapping[str, int] | None = None,
) -> Needs:
    """What `network_to_plan` plans for, or the fault for which it refuses, which is not raised here.

    Args:
        network: The net.
        wanted: Families whose values, or whose parents' values, are asked for.
        known: Families whose value comes from outside (inputs, `do`, evidence).
        enumerate_too: Choices that are enumerated though no value depends on them.
        patched: Families of which some nodes are set.
        passed: Deterministic families that are computed and not kept.
        words: How many words each stack has, for the message alone.
    """
    needed: set[int] = set(enumerate_too)
    enumerated: set[int] = set(enumerate_too)
    fault: UnsupportedError | None = None
    stack = [parent for index in wanted for parent in _above(network, index, known, wanted=True)]
    stack += [index for index in (*wanted, *passed) if not network.specs[index].tpm.is_random or index in known]
    while stack:
        index = stack.pop()
        if index in needed:
            continue
        needed.add(index)
        member = network.specs[index]
        if member.tpm.kind == "discrete" and index not in known:
            enumerated.add(index)
        elif member.tpm.kind == "continuous" and index not in known:
            fault = fault or open_parent(member.group.name)
        else:
            stack.extend(_above(network, index, known, wanted=False))
    for index in sorted(enumerated):
        computed = (needed - enumerated) | set(wanted)
        fault = fault or _meeting_fault(network, index, computed, enumerated, words)
    fault = fault or _patched_fault(network, needed & patched, enumerated)
    return Needs(frozenset(needed), frozenset(enumerated), fault)


def open_parent(name: str) -> UnsupportedError:
    """The fault of a family that is random and real, and has no value."""
    expected = "a value (do= or evidence) for all of it, for it is random and real, and others read it"
    return UnsupportedError(name, expected=expected, actual="none")


def _patched_fault(network: Network, patched: Collection[int], enumerated: Collection[int]) -> UnsupportedError | None:
    """Some nodes of a family may be set where its values are computed, or enumerated, for all words at once; word after
    word where it is neither random nor an attention."""
    for index in sorted(patched):
        member, recurrent = network.specs[index], index in network.graph.recurrent
        if (recurrent and isinstance(member.tpm, Attention)) or (
            member.tpm.is_random and (recurrent or index not in enumerated)
        ):
            return UnsupportedError(
                member.group.name,
                expected="all nodes of a family set, or none, where they are random or attend word after word",
                actual="some of them",
            )
    return None


def _read(network: Network, index: int, folded: Mapping[int, Fold]) -> set[int]:
    """What the value of a family is made of, also through the maps that are folded into it."""
    above = {index, *(folded[index].away if index in folded else ())}
    return {bundle.parent for i in above for bundle in network.graph.in_edges[i]}


def _done(
    network: Network, groups: tuple[tuple[int, ...], ...], kept: set[int], folded: Mapping[int, Fold]
) -> tuple[tuple[int, ...], ...]:
    """After each group, the families that are read no more."""
    last: dict[int, int] = {}
    for k, group in enumerate(groups):
        for index in group:
            last.setdefault(index, k)
            last |= dict.fromkeys(_read(network, index, folded), k)
    return tuple(tuple(i for i, at in last.items() if at == k and i not in kept) for k in range(len(groups)))


def _above(network: Network, index: int, known: Collection[int], *, wanted: bool) -> list[int]:
    """The families whose values one family needs: none where its value comes from outside or is enumerated."""
    member = network.specs[index]
    if index in known or member.tpm.kind == "input" or (member.tpm.is_random and not wanted):
        return []
    return [bundle.parent for bundle in network.graph.in_edges[index]]


def _meeting_fault(
    network: Network, index: int, computed: set[int], enumerated: set[int], words: Mapping[str, int] | None
) -> UnsupportedError | None:
    """A choice for each word may be enumerated in parallel only while no word's value depends on another's choice."""
    where = _meeting(network, index, computed, enumerated)
    if where is None:
        return None
    count = "" if words is None else f": {_joint_states(network, computed, enumerated, words)}"
    return UnsupportedError(
        network.specs[index].group.name,
        expected="a choice whose words do not meet, to be enumerated for all words at once",
        actual=f"{network.specs[where].group.name}, which reads other words' choices{count}",
        allowed=MEETING,
    )


def _meeting(network: Network, index: int, computed: set[int], enumerated: set[int]) -> int | None:
    """The first computed family that reads a choice of other words; None where none does."""
    reached = {index} if network.specs[index].group.word_stack is not None else set()
    before: set[int] = set()
    while reached - before:  # once more where families read each other word after word: no order has parents first
        before = set(reached)
        for child in sorted(computed):
            inputs = network.specs[child].parents
            picks = {selector for given in inputs for _, selector in given.pick}
            reads = [given for given in inputs if given.index in reached]
            if not all(given.reach.is_positionwise for given in reads):
                return child
            if child not in enumerated and (reads or picks & reached):
                reached.add(child)
    return None


def _joint_states(network: Network, computed: set[int], enumerated: set[int], words: Mapping[str, int]) -> str:
    """How many joint states one value hangs on: all words' choices where they meet, else one word's."""
    total = 1
    for index in enumerated:
        member = network.specs[index]
        nodes = math.prod(network.graph.plate_sizes[plate] for plate in member.group.plates)
        if _meeting(network, index, computed, enumerated) is not None:
            nodes *= words[member.group.word_stack or ""]
        total *= network.count_states(index, words) ** nodes
    told = f"{total}" if total < 10**12 else f"about 10^{math.log10(total):.0f}"
    most = ", ".join(f"{count} words" for count in words.values())
    return f"up to {told} joint states ({most})"

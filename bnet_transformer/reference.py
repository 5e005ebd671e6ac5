"""The reference: slow, node by node over the ground graph, small tensors. It is the meaning of a declaration.

Every other reading is tested against this one. A node's value is what its TPM says of its parents' values; a sum over
unseen choices is a loop over their joint states. A `World` is a sentence with all that is settled about it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from bnet_transformer.axes import WORD, Reach
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError
from bnet_transformer.graph.ground import Ground, Kept
from bnet_transformer.graph.walk import ancestors
from bnet_transformer.network import Input, Member, Network
from bnet_transformer.tpm import At, Attention


@dataclass(frozen=True)
class Row:
    """What `do` sets a node to that reads by a row of its own in place of `P(j | i)`: `weights[j]`, for all words."""

    weights: Tensor


Done = Mapping[int, Tensor | Row]


@dataclass(frozen=True)
class World:
    """A sentence with all that is settled about it.

    `given` holds the values that come with the sentence, `[*plates, word, *shape]` for each family of `Given` nodes;
    `do` a value (a state, where the node is discrete) for each node that is set, `rows` a row of attention for each
    that reads by one. Nodes are ground ids.
    """

    network: Network
    ground: Ground
    given: Mapping[str, Tensor]
    do: Mapping[int, Tensor] = field(default_factory=dict)
    rows: Mapping[int, Tensor] = field(default_factory=dict)

    def member(self, node: int) -> Member:
        """The family of a node, as it was declared."""
        return self.network.members[self.ground.family_of(node).index]

    def count_states(self, node: int) -> int:
        """How many states a discrete node has."""
        return self.network.count_states(self.ground.family_of(node).index, self.ground.words)

    def surgery(self, done: Done) -> World:
        """The same sentence with more nodes set; of what is told of one node, the last counts."""
        if not done:
            return self
        do = {node: value for node, value in self.do.items() if node not in done}
        rows = {node: row for node, row in self.rows.items() if node not in done}
        do |= {node: value for node, value in done.items() if isinstance(value, Tensor)}
        rows |= {node: value.weights for node, value in done.items() if isinstance(value, Row)}
        kept = {node: _kept(self.member(node)) for node in rows}
        return replace(self, ground=self.ground.surgery(do, kept), do=do, rows=rows)


def sources(
    world: World, member: Member, index: tuple[int, ...], given: Input, states: Mapping[int, Tensor]
) -> tuple[tuple[int, ...], list[int], list[int]]:
    """The ground parents that fill one slot of a node: the axes of the collection, the ids, the words read.

    An id of -1 stands for a word that is not there, whose value is zero (or state 0): the one before the first, or
    one that a selector picks out of reach (which has probability zero).
    """
    ground, parent = world.ground, world.network.members[given.parent].family
    own = dict(zip(ground.axes(member.family), index, strict=True))
    options: list[list[int]] = []
    words: list[int] = []
    for plate in parent.plates:
        picked = _picked(world, member, index, given, plate, states)
        wide = list(range(ground.folded.sizes[plate]))
        options.append(wide if plate in given.over and picked is None else [own[plate] if picked is None else picked])
    if parent.words is not None:
        row = given.reach.matrix(_count(world, member), ground.words[parent.words])[own.get(WORD, 0)]
        words = np.flatnonzero(row).tolist()
        picked = _picked(world, member, index, given, WORD, states)
        words = words if picked is None else [word for word in words if word == picked]
        if not words and WORD not in given.over:
            return (), [-1], []
        options.append(words)
    shape = tuple(len(option) for axis, option in zip(ground.axes(parent), options, strict=True) if axis in given.over)
    return shape, [ground.number(parent, at) for at in itertools.product(*options)], words


def _picked(
    world: World, member: Member, index: tuple[int, ...], given: Input, plate: str, states: Mapping[int, Tensor]
) -> int | None:
    """The entry along a plate that a selector picks, if one does."""
    selector = dict(given.pick).get(plate)
    if selector is None:
        return None
    chooser, own = world.network.members[selector], dict(zip(world.ground.axes(member.family), index, strict=True))
    at = tuple(own[axis] for axis in world.ground.axes(chooser.family))
    node = world.ground.number(chooser.family, at)
    state = world.do.get(node, states.get(node))
    if state is None and chooser.tpm.kind == "input":
        state = world.given[chooser.family.name][at]
    if state is None:
        raise EvidenceError(world.ground.name(node), expected="a state, for it is random", got="none")
    return int(state)


def pending(world: World, node: int, known: Mapping[int, object], states: Mapping[int, Tensor]) -> list[int]:
    """The nodes on which a value depends, itself last, that are not known yet; a node with a state needs no parent."""
    order: list[int] = []
    seen: set[int] = set()
    stack = [(node, False)]
    while stack:
        at, ready = stack.pop()
        if ready:
            order.append(at)
        elif at not in seen and at not in known:
            seen.add(at)
            stack.append((at, True))
            above = [] if at in states else parents(world, at)
            stack.extend((parent, False) for parent in above if parent not in known)
    return order


def parents(world: World, node: int) -> list[int]:
    """A node's parents after surgery: none where it is set."""
    return [] if node in world.do else world.ground.parents(node)


def reading_parents(world: World, node: int) -> list[int]:
    """The parents of a node on which its reading `P(j | i)` depends."""
    member, _ = where(world, node)
    slots = member.tpm.reading_slots() if node not in world.rows else ()
    families = {given.parent for given in member.inputs if given.slot in slots}
    families |= {selector for given in member.inputs if given.slot in slots for _, selector in given.pick}
    return [parent for parent in parents(world, node) if world.ground.family_of(parent).index in families]


def choices(world: World, nodes: Iterable[int], settled: Mapping[int, Tensor], *, beyond: bool = False) -> list[int]:
    """The discrete random nodes, not settled, that decide the values of `nodes`; `beyond` adds those that decide
    their distributions in turn."""
    discrete = frozenset(m.family.index for m in world.network.members if m.tpm.kind == "discrete")
    start = [node for node in nodes if node not in world.do]
    ends, stops = ((), ()) if beyond else (discrete, settled)
    found = {*start, *ancestors(world.ground, start, ends, stops)}
    open_ = (node for node in found if node not in settled and node not in world.do)
    return sorted(node for node in open_ if world.ground.family_of(node).index in discrete)


def words_read(world: World, node: int) -> list[int]:
    """The words that a node may read whose state is a word."""
    member, index = where(world, node)
    read = member.word_inputs[0]
    words = world.ground.words[world.network.stack_read(member)]
    row = index[-1] if member.family.words is not None else 0
    found: list[int] = np.flatnonzero(read.reach.matrix(_count(world, member), words)[row]).tolist()
    return found


def settling(world: World, evidence: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The evidence that says outright what a random node came to."""
    return {node: seen for node, seen in evidence.items() if settles(world, node, seen)}


def settles(world: World, node: int, seen: Tensor) -> bool:
    """True where evidence says outright what a random node came to."""
    kind = world.member(node).tpm.kind
    return kind == "continuous" or (kind == "discrete" and not seen.is_floating_point())


def _kept(member: Member) -> Kept:
    """What a node still reads that reads by a row: the families of its values and its residual, with their reaches."""
    assert isinstance(member.tpm, Attention)
    kept: dict[int, tuple[Reach, ...]] = {}
    for given in member.inputs:
        if given.slot in member.tpm.mixed_slots():
            kept[given.parent] = tuple(dict.fromkeys((*kept.get(given.parent, ()), given.reach)))
    return kept


def where(world: World, node: int) -> tuple[Member, tuple[int, ...]]:
    """The member to which a node belongs, and its index there."""
    family, index = world.ground.place(node)
    return world.network.members[family.index], index


def _count(world: World, member: Member) -> int:
    return 1 if member.family.words is None else world.ground.words[member.family.words]


BUDGET = 2**16
ATOL = 1e-6
ROUNDING = {torch.float32: 2**-12, torch.float16: 2**-7, torch.bfloat16: 2**-4}  # 2^11 eps, and 8 of a half: measured


class Run:
    """One full course of events: `states` says what each random node came to; the rest follows.

    `values` has the values of nodes so far; what is put there counts as a node's value.
    """

    def __init__(self, world: World, states: Mapping[int, Tensor]) -> None:
        self.world = world
        self.states = states
        self.values: dict[int, Tensor] = {}

    def value(self, node: int) -> Tensor:
        """The value of a node, as its children receive it."""
        if node not in self.values:
            for ancestor in pending(self.world, node, self.values, self.states):
                self.values[ancestor] = self._value(ancestor)
        return self.values[node]

    def _value(self, node: int) -> Tensor:
        member, index = where(self.world, node)
        settled = self.world.do.get(node, self.states.get(node))
        if settled is not None:
            whole_state = member.tpm.kind == "discrete" and not settled.is_floating_point()
            return member.tpm.emit(self._at(member, index), settled) if whole_state else settled
        if member.tpm.kind == "input":
            return self.world.given[member.family.name][index]
        if member.tpm.is_random:
            name = self.world.ground.name(node)
            raise EvidenceError(name, expected="a state or evidence, for it is random", got="neither")
        value = self._mixed(node) if node in self.world.rows else member.tpm.value(*self._seen(member, index))
        if not isinstance(value, Tensor) or tuple(value.shape) != member.shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            what = f"{self.world.ground.name(node)} ({type(member.tpm).__name__})"
            raise BNetError(what, expected=f"a value of shape {member.shape}, as it says", got=got)
        if bool(value.isnan().any()):
            raise BNetError(self.world.ground.name(node), expected="a value that is a number", got="NaN")
        return value

    def _mixed(self, node: int) -> Tensor:
        """The mix of an attention by the row that was set."""
        member, index = where(self.world, node)
        assert isinstance(member.tpm, Attention)
        at, *parents = self._seen(member, index, member.tpm.mixed_slots())
        return member.tpm.mix(self.world.rows[node][at.read["v."]], *parents)

    def distribution(self, node: int) -> Distribution:
        """`P(node | its parents)`, a delta for what is given or set."""
        from pyro.distributions import Delta

        member, index = where(self.world, node)
        if node in {**self.world.do, **self.world.rows} or member.tpm.kind == "input":
            value = self.value(node)
            return Delta(value, event_dim=value.dim())
        at, *parents = self._seen(member, index)
        if member.tpm.kind == "discrete" and member.tpm.states is None:
            network = self.world.network
            scores = torch.full((self.world.count_states(node),), -math.inf, dtype=network.dtype, device=network.device)
            scores[next(iter(at.read.values()))] = member.tpm.logits(at, *parents)
            return torch.distributions.Categorical(logits=scores, validate_args=False)
        found: Any = member.tpm.distribution(at, *parents)
        if member.tpm.kind == "discrete" and found.param_shape[-1] != member.tpm.states:
            what = f"{self.world.ground.name(node)} ({type(member.tpm).__name__})"
            raise BNetError(what, expected=f"logits for {member.tpm.states} states", got=f"{found.param_shape[-1]}")
        distribution: Distribution = found
        return distribution

    def log_prob(self, node: int) -> Tensor:
        """`log P(what a random node came to | its parents)`."""
        found: Tensor = self.distribution(node).log_prob(self.states[node]).double()
        if bool(found.isnan().any()):
            raise BNetError(self.world.ground.name(node), expected="a log probability that is a number", got="NaN")
        return found

    def reading(self, node: int) -> tuple[list[int], Tensor] | None:
        """The words that a node reads and `P(j | i)` over them, where its TPM has that distribution."""
        member, index = where(self.world, node)
        if node in self.world.rows:
            given = next(given for given in member.inputs if given.slot == "v.")
            words = sources(self.world, member, index, given, self.states)[2]
            return words, self.world.rows[node][words]
        at, *parents = self._seen(member, index, member.tpm.reading_slots())
        weights = member.tpm.reading(at, *parents)
        if weights is None:
            return None
        if bool(weights.isnan().any()):
            raise BNetError(self.world.ground.name(node), expected="a reading P(j | i) of numbers", got="NaN")
        return next(iter(at.read.values())).tolist(), weights

    def _seen(
        self, member: Member, index: tuple[int, ...], slots: tuple[str, ...] | None = None
    ) -> tuple[At, *tuple[Tensor, ...]]:
        """What the TPM of a node sees: where it stands, then the value in each slot (of `slots`, the rest empty)."""
        read, mask, values = {}, {}, []
        device = self.world.network.device
        for given in member.inputs:
            if slots is not None and given.slot not in slots:
                values.append(torch.zeros(0))
                continue
            shape, ids, words = sources(self.world, member, index, given, self.states)
            found = [self.value(node) if node >= 0 else None for node in ids]
            parent = self.world.network.members[given.parent]
            zero = torch.zeros(
                parent.shape, dtype=torch.long if parent.tpm.reads_by_index else self.world.network.dtype, device=device
            )
            filled = [zero if value is None else value for value in found]
            values.append(
                torch.stack(filled or [zero])[: len(filled)].reshape(*shape, *zero.shape) if shape else filled[0]
            )
            if shape:
                there = words if WORD in given.over else list(range(shape[-1]))
                read[given.slot] = torch.tensor(there, device=device)
                mask[given.slot] = torch.ones(len(there), dtype=torch.bool, device=device)
        return (self._at(member, index, read, mask), *values)

    def _at(
        self,
        member: Member,
        index: tuple[int, ...],
        read: Mapping[str, Tensor] | None = None,
        mask: Mapping[str, Tensor] | None = None,
    ) -> At:
        plates = index[: len(member.family.plates)]
        parameters = {name: value[plates] for name, value in self.world.network.of(member).items()}
        word = torch.tensor(index[-1] if member.family.words is not None else 0, device=self.world.network.device)
        return At(parameters, word, read or {}, mask or {}, dtype=self.world.network.dtype)


def runs(world: World, free: list[int], known: Mapping[int, Tensor], budget: int = BUDGET) -> Iterator[Run]:
    """A run for each joint state of the free nodes."""
    check_joint_states(world, free, budget)
    for states in itertools.product(*(range(world.count_states(node)) for node in free)):
        chosen = (torch.tensor(state, device=world.network.device) for state in states)
        yield Run(world, {**known, **dict(zip(free, chosen, strict=True))})


def check_joint_states(world: World, free: Sequence[int], budget: int) -> None:
    """Refuse more joint states of the free nodes than the budget."""
    count = math.prod(world.count_states(node) for node in free)
    if count > budget:
        names = ", ".join(world.ground.name(node) for node in free[:6]) + (", …" if len(free) > 6 else "")
        raise BudgetError(
            "exact enumeration",
            expected=f"at most {budget} joint states of {names}",
            got=f"{count} states",
            allowed="evidence or do on some of these nodes; a larger budget=, of a question that takes one; "
            "sample(n) without evidence, which is approximate",
        )


def values(world: World, node: int, settled: Mapping[int, Tensor], budget: int = BUDGET) -> Tensor:
    """The value of a node for each joint state of the choices that decide it: `[*states, *shape]`."""
    settled = settling(world, settled)
    free = choices(world, [node], settled)
    found = torch.stack([run.value(node) for run in runs(world, free, settled, budget)])
    return found.reshape((*(world.count_states(choice) for choice in free), *found.shape[1:]))


def log_evidence(
    world: World, evidence: Mapping[int, Tensor], query: int | None = None, budget: int = BUDGET, atol: float = ATOL
) -> Tensor:
    """`log P(evidence)`, or `log P(query = state, evidence)` for each state of a discrete query.

    Evidence on a node that is a function of its parents, or a tensor for a node that is chosen by its state, is
    reproduced (`fits`) or is impossible. Impossible evidence is an error that names the node.
    """
    settled = {n: v for n, v in evidence.items() if settles(world, n, v)}
    asked = [] if query is None or query in evidence else [query]
    free = choices(world, [*evidence, *asked], settled, beyond=True)
    size = 1 if query is None else world.count_states(query)
    totals = torch.full((len(evidence) + 1, size), -math.inf, dtype=torch.float64)
    for run in runs(world, free, settled, budget):
        state = 0 if query is None else int(run.states[query])
        totals[:, state] = torch.logaddexp(totals[:, state], _log_terms(run, free, evidence, atol).cumsum(0))
    for k in range(len(evidence)):
        if torch.logsumexp(totals[k + 1], 0) == -math.inf:
            raise impossible(world, evidence, k)
    return totals[-1] if query is not None else totals[-1, 0]


def impossible(world: World, evidence: Mapping[int, Tensor], k: int) -> EvidenceError:
    """The error of the first piece of evidence (its place k) that has probability zero beside those before it."""
    node = [*evidence][k]
    return EvidenceError(
        world.ground.name(node),
        expected="evidence that some state of the net makes possible",
        got=f"one of probability zero{' given the evidence before it' if k else ''}: {evidence[node].tolist()}",
    )


def posterior(
    world: World, query: int, evidence: Mapping[int, Tensor], budget: int = BUDGET, atol: float = ATOL
) -> Tensor:
    """`P(query | evidence)` for a discrete node, by enumeration."""
    return torch.softmax(log_evidence(world, evidence, query, budget, atol), 0)


def _log_terms(run: Run, free: list[int], evidence: Mapping[int, Tensor], atol: float) -> Tensor:
    """`log P(the free choices)`, then the log probability of each piece of evidence in the run."""
    terms = [sum((run.log_prob(node) for node in free), torch.zeros((), dtype=torch.float64))]
    for node, seen in evidence.items():
        if settles(run.world, node, seen):
            terms.append(run.log_prob(node))
        else:
            made = run.value(node)
            is_same = bool(fits(made, seen, atol, made.dim()))
            terms.append(torch.tensor(0.0 if is_same else -math.inf, dtype=torch.float64))
    return torch.stack(terms)


def log_joint(run: Run, free: list[int], evidence: Mapping[int, Tensor], atol: float = ATOL) -> float:
    """`log P(the free choices, the evidence)` of one run."""
    return float(_log_terms(run, free, evidence, atol).sum())


def fits(made: Tensor, told: Tensor, atol: float, own: int) -> Tensor:
    """Whether told values are those that were made: `|made - told| <= atol + r greatest` in every entry.

    The last `own` dims are a node's own, and `greatest` is the largest entry, made or told, of that very node in that
    state and sentence. r is the rounding of the floating type: 0 in float64.
    """
    dims = tuple(range(-own, 0))
    greatest = torch.maximum(made.detach().abs(), told.abs())
    greatest = greatest.amax(dims, keepdim=True) if own else greatest
    near = (made - told).abs() <= atol + ROUNDING.get(made.dtype, 0.0) * greatest
    return near.all(dims) if own else near

"""The reference: slow, node by node over the ground graph, small tensors. It is the meaning of a declaration.

Every other reading is tested against this one. A node's value is what its TPM says of its parents' values; a sum over
unseen choices is a loop over their joint states.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from bnet_transformer.axes import WORD
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError
from bnet_transformer.graph.ground import Ground
from bnet_transformer.network import Input, Member, Network
from bnet_transformer.tpm import At, Given

BUDGET = 2**16
ATOL = 1e-6


@dataclass(frozen=True)
class World:
    """A sentence with all that is settled about it.

    `given` holds the values that come with the sentence, `[*plates, word, *shape]` for each family of `Given` nodes;
    `do` a value (a state, where the node is discrete) for each node that is set. Nodes are ground ids.
    """

    network: Network
    ground: Ground
    given: Mapping[str, Tensor]
    do: Mapping[int, Tensor] = field(default_factory=dict)


class Run:
    """One full course of events: `states` says what each random node came to; the rest follows."""

    def __init__(self, world: World, states: Mapping[int, Tensor]) -> None:
        self.world = world
        self.states = states
        self._values: dict[int, Tensor] = {}

    def value(self, node: int) -> Tensor:
        """The value of a node, as its children receive it."""
        if node not in self._values:
            for ancestor in pending(self.world, node, self._values, self.states):
                self._values[ancestor] = self._value(ancestor)
        return self._values[node]

    def _value(self, node: int) -> Tensor:
        member, index = _where(self.world, node)
        settled = self.world.do.get(node, self.states.get(node))
        if settled is not None:
            whole_state = member.tpm.kind == "discrete" and not settled.is_floating_point()
            return member.tpm.emit(self._at(member, index), settled) if whole_state else settled
        if isinstance(member.tpm, Given):
            return self.world.given[member.family.name][index]
        if member.tpm.kind != "deterministic":
            name = self.world.ground.name(node)
            raise EvidenceError(name, expected="a state or evidence, for it is random", got="neither")
        value = member.tpm.value(*self._seen(member, index))
        if not isinstance(value, Tensor) or tuple(value.shape) != member.shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            what = f"{self.world.ground.name(node)} ({type(member.tpm).__name__})"
            raise BNetError(what, expected=f"a value of shape {member.shape}, as it says", got=got)
        if bool(value.isnan().any()):
            raise BNetError(self.world.ground.name(node), expected="a value that is a number", got="NaN")
        return value

    def distribution(self, node: int) -> Distribution:
        """`P(node | its parents)`, a delta for what is given or set."""
        from pyro.distributions import Delta

        member, index = _where(self.world, node)
        if node in self.world.do or isinstance(member.tpm, Given):
            value = self.value(node)
            return Delta(value, event_dim=value.dim())
        at, *parents = self._seen(member, index)
        if member.tpm.kind == "discrete" and member.tpm.states is None:
            scores = torch.full((support(self.world, node),), -math.inf, dtype=self.world.network.dtype)
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
        member, index = _where(self.world, node)
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
        for given in member.inputs:
            if slots is not None and given.slot not in slots:
                values.append(torch.zeros(0))
                continue
            shape, ids, words = sources(self.world, member, index, given, self.states)
            found = [self.value(node) if node >= 0 else None for node in ids]
            parent = self.world.network.members[given.parent]
            zero = torch.zeros(
                parent.shape, dtype=torch.long if parent.tpm.reads_by_index else self.world.network.dtype
            )
            filled = [zero if value is None else value for value in found]
            values.append(
                torch.stack(filled or [zero])[: len(filled)].reshape(*shape, *zero.shape) if shape else filled[0]
            )
            if shape:
                there = words if WORD in given.over else list(range(shape[-1]))
                read[given.slot] = torch.tensor(there)
                mask[given.slot] = torch.ones(len(there), dtype=torch.bool)
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
        word = torch.tensor(index[-1] if member.family.words is not None else 0)
        return At(parameters, word, read or {}, mask or {}, dtype=self.world.network.dtype)


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
    base, size = int(ground.offsets[parent.index]), ground.shapes[parent.index]
    ids = [base + (int(np.ravel_multi_index(at, size)) if at else 0) for at in itertools.product(*options)]
    return shape, ids, words


def _picked(
    world: World,
    member: Member,
    index: tuple[int, ...],
    given: Input,
    plate: str,
    states: Mapping[int, Tensor],
) -> int | None:
    for axis, selector in given.pick:
        if axis == plate:
            node = _selector(world, member, index, selector)
            state = world.do.get(node, states.get(node))
            chooser, where = _where(world, node)
            if state is None and isinstance(chooser.tpm, Given):
                state = world.given[chooser.family.name][where]
            if state is None:
                raise EvidenceError(world.ground.name(node), expected="a state, for it is random", got="none")
            return int(state)
    return None


def _selector(world: World, member: Member, index: tuple[int, ...], selector: int) -> int:
    family = world.network.members[selector].family
    own = dict(zip(world.ground.axes(member.family), index, strict=True))
    at = tuple(own[axis] for axis in world.ground.axes(family))
    shape = world.ground.shapes[selector]
    return int(world.ground.offsets[selector]) + (int(np.ravel_multi_index(at, shape)) if at else 0)


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
    member, _ = _where(world, node)
    slots = member.tpm.reading_slots()
    families = {given.parent for given in member.inputs if given.slot in slots}
    families |= {selector for given in member.inputs if given.slot in slots for _, selector in given.pick}
    return [parent for parent in parents(world, node) if world.ground.family_of(parent).index in families]


def choices(world: World, nodes: Iterable[int], settled: Mapping[int, Tensor], *, beyond: bool = False) -> list[int]:
    """The discrete random nodes, not settled, that decide the values of `nodes`; `beyond` adds those that decide
    their distributions in turn."""
    found: set[int] = set()
    seen: set[int] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in seen or node in world.do:
            continue
        seen.add(node)
        discrete = _where(world, node)[0].tpm.kind == "discrete" and node not in settled
        if discrete:
            found.add(node)
        if beyond or not (discrete or node in settled):
            stack.extend(parents(world, node))
    return sorted(found)


def support(world: World, node: int) -> int:
    """How many states a discrete node has."""
    member, _ = _where(world, node)
    if member.tpm.states is not None:
        return member.tpm.states
    read = next(given for given in member.inputs if WORD in given.over)
    words = world.network.members[read.parent].family.words
    return world.ground.words[words or ""]


def runs(world: World, free: list[int], known: Mapping[int, Tensor], budget: int = BUDGET) -> Iterator[Run]:
    """A run for each joint state of the free nodes."""
    sizes = [support(world, node) for node in free]
    count = math.prod(sizes)
    if count > budget:
        names = ", ".join(world.ground.name(node) for node in free[:6]) + (", …" if len(free) > 6 else "")
        raise BudgetError(
            "exact enumeration",
            expected=f"at most {budget} joint states of {names}",
            got=f"{count} states",
            allowed="a larger budget=; evidence or do on some of these nodes; SVI (net.pyro()), which is approximate",
        )
    for states in itertools.product(*map(range, sizes)):
        yield Run(world, {**known, **{n: torch.tensor(state) for n, state in zip(free, states, strict=True)}})


def values(world: World, node: int, settled: Mapping[int, Tensor], budget: int = BUDGET) -> Tensor:
    """The value of a node for each joint state of the choices that decide it: `[*states, *shape]`."""
    settled = settling(world, settled)
    free = choices(world, [node], settled)
    found = torch.stack([run.value(node) for run in runs(world, free, settled, budget)])
    return found.reshape((*(support(world, choice) for choice in free), *found.shape[1:]))


def log_evidence(
    world: World,
    evidence: Mapping[int, Tensor],
    query: int | None = None,
    budget: int = BUDGET,
    atol: float = ATOL,
) -> Tensor:
    """`log P(evidence)`, or `log P(query = state, evidence)` for each state of a discrete query.

    Evidence on a node that is a function of its parents, or a tensor for a node that is chosen by its state, is
    reproduced within `atol` or is impossible. Impossible evidence is an error that names the node.
    """
    settled = {n: v for n, v in evidence.items() if _settles(world, n, v)}
    asked = [] if query is None or query in evidence else [query]
    free = choices(world, [*evidence, *asked], settled, beyond=True)
    size = 1 if query is None else support(world, query)
    totals = torch.full((len(evidence) + 1, size), -math.inf, dtype=torch.float64)
    for run in runs(world, free, settled, budget):
        state = 0 if query is None else int(run.states[query])
        totals[:, state] = torch.logaddexp(totals[:, state], _log_terms(run, free, evidence, atol).cumsum(0))
    for k, node in enumerate(evidence):
        if torch.logsumexp(totals[k + 1], 0) == -math.inf:
            raise EvidenceError(
                world.ground.name(node),
                expected="evidence that some state of the net makes possible",
                got=f"one of probability zero{' given the evidence before it' if k else ''}: {evidence[node].tolist()}",
            )
    return totals[-1] if query is not None else totals[-1, 0]


def posterior(
    world: World, query: int, evidence: Mapping[int, Tensor], budget: int = BUDGET, atol: float = ATOL
) -> Tensor:
    """`P(query | evidence)` for a discrete node, by enumeration."""
    return torch.softmax(log_evidence(world, evidence, query, budget, atol), 0)


def expected_reading(
    world: World, node: int, evidence: Mapping[int, Tensor], budget: int = BUDGET
) -> tuple[list[int], Tensor] | None:
    """The words that a node reads and `P(j | i, evidence)`: its reading averaged over the posterior of the choices."""
    settled = {n: v for n, v in evidence.items() if _settles(world, n, v)}
    free = choices(world, [*reading_parents(world, node), *evidence], settled, beyond=True)
    words: list[int] = []
    found, logs = [], []
    for run in runs(world, free, settled, budget):
        reading = run.reading(node)
        if reading is None:
            return None
        words = reading[0]
        found.append(reading[1].double())
        logs.append(_log_terms(run, free, evidence, ATOL).sum())
    if evidence and torch.stack(logs).max() == -math.inf:
        log_evidence(world, evidence, budget=budget)
    share = torch.softmax(torch.stack(logs), 0)
    return words, torch.einsum("s,sm->m", share, torch.stack(found))


def _log_terms(run: Run, free: list[int], evidence: Mapping[int, Tensor], atol: float) -> Tensor:
    """`log P(the free choices)`, then the log probability of each piece of evidence in the run."""
    terms = [sum((run.log_prob(node) for node in free), torch.zeros((), dtype=torch.float64))]
    for node, seen in evidence.items():
        settled = _settles(run.world, node, seen)
        terms.append(run.log_prob(node) if settled else _reproduced(run, node, seen, atol))
    return torch.stack(terms)


def log_joint(run: Run, free: list[int], evidence: Mapping[int, Tensor], atol: float = ATOL) -> float:
    """`log P(the free choices, the evidence)` of one run."""
    return float(_log_terms(run, free, evidence, atol).sum())


def settling(world: World, evidence: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The evidence that says outright what a random node came to."""
    return {node: seen for node, seen in evidence.items() if _settles(world, node, seen)}


def single_parents(world: World, node: int) -> set[int]:
    """The parents of a node that fill a slot of a single parent (its query, its residual)."""
    member, index = _where(world, node)
    single = [given for given in member.inputs if not given.over and not given.pick]
    return {parent for given in single for parent in sources(world, member, index, given, {})[1]}


def _settles(world: World, node: int, seen: Tensor) -> bool:
    """True where evidence says outright what a random node came to."""
    kind = _where(world, node)[0].tpm.kind
    return kind == "continuous" or (kind == "discrete" and not seen.is_floating_point())


def _reproduced(run: Run, node: int, seen: Tensor, atol: float) -> Tensor:
    same = torch.allclose(run.value(node).double(), seen.double(), rtol=0, atol=atol)
    return torch.tensor(0.0 if same else -math.inf, dtype=torch.float64)


def _where(world: World, node: int) -> tuple[Member, tuple[int, ...]]:
    family, index = world.ground.place(node)
    return world.network.members[family.index], index


def _count(world: World, member: Member) -> int:
    return 1 if member.family.words is None else world.ground.words[member.family.words]

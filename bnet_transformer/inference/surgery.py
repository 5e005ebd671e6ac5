"""What `do` takes: nodes by name, family, role or pattern; zeros, means, noise, attention rows, others' values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError, EvidenceError, number, unknown, whole
from bnet_transformer.graph import Ground
from bnet_transformer.reference import World, sources
from bnet_transformer.tpm import Attention


class Valued(Protocol):
    """What has values by name, as a Sentence does."""

    def __getitem__(self, name: str) -> Tensor:
        """The value of a node."""


@dataclass(frozen=True)
class Zero:
    """The value 0 for every number of a node."""


@dataclass(frozen=True)
class Mean:
    """The mean of a node's values in other sentences; without any, of its family's values over this one's words."""

    sentences: tuple[Valued, ...] = ()

    def __init__(self, sentences: Sequence[Valued] = ()) -> None:
        object.__setattr__(self, "sentences", tuple(sentences))


@dataclass(frozen=True)
class Noise:
    """A node's own value plus normal noise; each node's noise is fixed by the seed and its name."""

    sigma: float
    seed: int = 0

    def __post_init__(self) -> None:
        number("sigma", self.sigma, above=0)
        whole("seed", self.seed, least=0)


@dataclass(frozen=True)
class Attend:
    """A row of attention in place of `P(j | i)`: a probability for each word that the node may read, or for all words.

    It sets the node to `sum_j v_j P(j)` (and its residual), at the values that v has in this sentence.
    """

    weights: Tensor

    def __init__(self, weights: object) -> None:
        try:
            row = torch.as_tensor(weights, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BNetError("Attend", expected="a probability for each word", got=weights) from error
        if row.dim() != 1 or not bool((row >= 0).all()) or abs(float(row.sum()) - 1) > 1e-6:
            raise BNetError("Attend", expected="probabilities of words, summing to 1", got=weights)
        object.__setattr__(self, "weights", row)


def matching(ground: Ground, pattern: object) -> list[int]:
    """The nodes that a name, a family (`q_2`), a role (`q`) or a pattern (`q_2_*_3`) stands for.

    A star stands for one index, so `q_*_3` has slice and word and no head. A name comes before a family, a family
    before a role.
    """
    folded = ground.folded
    if not isinstance(pattern, str) or "*" not in pattern:
        if isinstance(pattern, str) and not _is_node(ground, pattern):
            families = [folded.by_name[pattern]] if pattern in folded.by_name else folded.by_stem.get(pattern, ())
            found = [node for family in families for node in ground.nodes(family).tolist()]
            if found:
                return found
        return [ground.id(pattern)]
    count = pattern.count("_")
    found = []
    for family in folded.families:
        if family.name.count("_") + len(ground.shapes[family.index]) == count:
            base = int(ground.offsets[family.index])
            names = ground.family_names(family)
            found += [base + k for k, name in enumerate(names) if fnmatchcase(name, pattern)]
    if not found:
        shown = [next(ground.family_names(family)) for family in folded.families]
        raise unknown("pattern of nodes", pattern, shown)
    return found


def expanded(ground: Ground, wanted: Mapping[str, object]) -> dict[int, object]:
    """For each node that names, families, roles and patterns stand for, what is wanted of it: one thing."""
    found: dict[int, object] = {}
    for pattern, value in wanted.items():
        for node in matching(ground, pattern):
            if node in found:
                got = f"two, one of them by {pattern!r}"
                raise EvidenceError(f"do of {ground.name(node)}", expected="one value", got=got)
            found[node] = value
    return found


def _is_node(ground: Ground, name: str) -> bool:
    try:
        ground.locate(name)
    except BNetError:
        return False
    return True


def value_for(world: World, sentence: Valued, node: int, value: object) -> object:
    """What a node is set to: zeros, means and the like told as a tensor; any other value as it is."""
    name = world.ground.name(node)
    match value:
        case Zero():
            return torch.zeros_like(_own(world, sentence, node))
        case Mean(sentences=()):
            family = world.ground.family_of(node)
            names = [world.ground.name(other) for other in _row(world, node)]
            if family.words is None:
                raise EvidenceError(name, expected="a node over words, or Mean(sentences)", got="Mean() of another")
            return torch.stack([_own(world, sentence, world.ground.id(each)) for each in names]).mean(0)
        case Mean(sentences=others):
            return torch.stack([_real(world, node, other[name]) for other in others]).mean(0)
        case Noise(sigma=sigma, seed=seed):
            own = _own(world, sentence, node)
            digest = hashlib.sha256(f"{seed}/noise/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            return own + sigma * torch.randn(own.shape, generator=generator, dtype=own.dtype)
        case Attend(weights=weights):
            return _mixed(world, sentence, node, weights)
        case _ if _has_values(value):
            return value[name]  # type: ignore[index]
    return value


def _has_values(value: object) -> bool:
    """True of a sentence, or of what else has values by name without being a mapping, a list or a tensor."""
    plain = isinstance(value, Tensor | Mapping | Sequence | str)
    return not plain and hasattr(value, "ground") and hasattr(value, "__getitem__")


def _real(world: World, node: int, value: Tensor) -> Tensor:
    if not value.is_floating_point():
        got = "a discrete one"
        raise EvidenceError(world.ground.name(node), expected="a node whose value is real numbers", got=got)
    return value


def _own(world: World, sentence: Valued, node: int) -> Tensor:
    """The value that a node has, real and the same for each state of the choices."""
    name, member = world.ground.name(node), world.network.members[world.ground.family_of(node).index]
    if member.tpm.kind != "deterministic":
        wanted = "a node with a value: a function of its parents"
        raise EvidenceError(name, expected=wanted, got=f"a {member.tpm.kind} one")
    return _real(world, node, sentence[name])


def _row(world: World, node: int) -> list[int]:
    """The nodes of a family at every word, with the other indices of this one."""
    family, index = world.ground.place(node)
    return [node - index[-1] + i for i in range(world.ground.shapes[family.index][-1])]


def _mixed(world: World, sentence: Valued, node: int, weights: Tensor) -> Tensor:
    """`sum_j v_j P(j) (+ x)` for a row of attention."""
    (family, index), name = world.ground.place(node), world.ground.name(node)
    member = world.network.members[family.index]
    if not isinstance(member.tpm, Attention) or any(given.pick for given in member.inputs):
        got = type(member.tpm).__name__
        raise EvidenceError(name, expected="a node that is the mix of an Attention without picks", got=got)
    if node in world.do:
        raise EvidenceError(name, expected="a node that still reads: undo it first", got="one that is set")
    slots = {given.slot: sources(world, member, index, given, {}) for given in member.inputs}
    _, ids, words = slots["v."]
    total = world.ground.shapes[world.ground.family_of(ids[0]).index][-1]
    if len(weights) == total and total != len(ids):
        if float(weights[words].sum()) < 1 - 1e-6:
            got = f"{weights.tolist()}"
            raise EvidenceError(name, expected=f"probabilities of the words that it reads, {words}", got=got)
        weights = weights[words]
    if len(weights) != len(ids):
        wanted = f"{total} probabilities, one for each word"
        raise EvidenceError(name, expected=wanted, got=f"{len(weights)}")
    found = torch.stack([sentence[world.ground.name(each)] for each in ids])
    if found.dim() > 1 + len(member.shape):
        raise EvidenceError(name, expected="values v that are settled: do(c=...) first", got="open choices above them")
    mix = torch.einsum("m,m...->...", weights.to(found.dtype), found)
    return mix + sentence[world.ground.name(slots["x"][1][0])] if member.tpm.residual else mix

"""What `do` takes: nodes by name, family, role or pattern; zeros, means, noise, attention rows, others' values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from bnet_transformer.axes import WORD
from bnet_transformer.data.encode import encode_value, way_to_one_value
from bnet_transformer.errors import BNetError, EvidenceError, number, put, seed_of, unknown
from bnet_transformer.graph import Family, Ground
from bnet_transformer.tpm import Attention
from bnet_transformer.tpm.arrays import own_tensor
from bnet_transformer.world import Row, World, sources, where


@dataclass(frozen=True)
class Zero:
    """The value 0 for every number of a node.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.inference import Zero
    >>> bt.bayesuvius(dim=4).sentence("the cat sat").do(v_0_1=Zero())["v_0_1"]
    tensor([0., 0., 0., 0.])
    """


@dataclass(frozen=True)
class Mean:
    """The mean of a node's values in other sentences; without any, of its family's values over this one's words.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.inference import Mean
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> s.do(x_0_1=Mean())["x_0_1"].isclose((s["x_0_0"] + s["x_0_1"] + s["x_0_2"]) / 3).all().item()
    True
    """

    sentences: tuple[Any, ...] = ()

    def __init__(self, sentences: Sequence[Any] | None = None) -> None:
        several = isinstance(sentences, Sequence) and bool(sentences) and all(map(_has_values, sentences))
        if sentences is not None and not several:
            allowed = "Mean(), over the words of this sentence"
            raise BNetError("Mean", expected="a list of sentences", got=sentences, allowed=allowed)
        object.__setattr__(self, "sentences", tuple(sentences or ()))


@dataclass(frozen=True)
class Noise:
    """A node's own value plus normal noise; each node's noise is fixed by the seed and its name.

    The value is that of the sentence with all else done that the same `do` says, but for noise and `Mean()`.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.inference import Noise
    >>> bt.bayesuvius(dim=4).sentence("the cat sat").do(x_0_1=Noise(0.1))["x_0_1"].shape
    torch.Size([4])
    """

    sigma: float
    seed: int = 0

    def __post_init__(self) -> None:
        put(self, sigma=number("sigma", self.sigma, above=0), seed=seed_of(self.seed))


@dataclass(frozen=True)
class Attend:
    """A row of attention in place of `P(j | i)`: a probability for each word that the node may read, or for all words.

    The node still reads its values v (and its residual), as they come to be; its q and k are not read any more.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.inference import Attend
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat").do(x_1_0=Attend([0, 0, 1]))
    >>> s["x_1_0"].isclose(s["v_0_2"]).all().item(), s.parents("x_1_0")
    (True, ['v_0_0', 'v_0_1', 'v_0_2'])
    """

    weights: Tensor

    def __init__(self, weights: object) -> None:
        try:
            row = own_tensor(weights)
            if row.is_complex():
                raise TypeError("complex")
            row = row.to(torch.float64)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
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


def is_own(value: object) -> bool:
    """True of what hangs on the values of the sentence itself: noise, and the mean over its words."""
    return isinstance(value, Noise) or (isinstance(value, Mean) and not value.sentences)


def value_for(world: World, node: int, value: object) -> Tensor | Row:
    """What a node is set to: by zeros, means, a row, another sentence, or a value as it is."""
    name, member = world.ground.name(node), world.member(node)
    match value:
        case Zero():
            if member.tpm.reads_by_index:
                raise EvidenceError(name, expected="a node whose value is real numbers", got="one that has states")
            return torch.zeros(member.shape, dtype=world.network.dtype, device=world.network.device)
        case Mean(sentences=others):
            return torch.stack([_settled(world, node, other[name]) for other in others]).mean(0)
        case Attend(weights=weights):
            return _row(world, node, weights)
    return encode_value(world, node, value[name] if _has_values(value) else value, evidence=False)  # type: ignore[index]


@dataclass
class OwnValues:
    """What `Noise` and `Mean()` set nodes of a sentence to (`is_own`); the mean of each family is computed once."""

    world: World
    value: Callable[[int], Tensor]
    _means: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, node: int, value: object) -> Tensor:
        if isinstance(value, Noise):
            own = self._own(node)
            return own + noise_of(self.world.ground.name(node), value, own)
        family, index = self.world.ground.place(node)
        check_over_words(family, self.world.ground.name(node))
        first = node - index[-1]
        if first not in self._means:
            words = range(self.world.ground.words[family.words or ""])
            self._means[first] = torch.stack([self._own(first + i) for i in words]).mean(0)
        return self._means[first]

    def _own(self, node: int) -> Tensor:
        """The value that a node has."""
        name, tpm = self.world.ground.name(node), self.world.member(node).tpm
        if tpm.is_random and node not in self.world.do:
            expected = "a node with a value: a function of its parents"
            raise EvidenceError(name, expected=expected, got=f"a {tpm.kind} one")
        return _settled(self.world, node, self.value(node))


def noise_of(name: str, noise: Noise, like: Tensor) -> Tensor:
    """The noise of a node, which its name and the seed fix."""
    digest = hashlib.sha256(f"{noise.seed}/noise/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return noise.sigma * torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


def check_over_words(family: Family, name: str) -> None:
    """Refuse the mean over words of a node that is over none."""
    if family.words is None:
        raise EvidenceError(name, expected="a node over words, or Mean(sentences)", got="Mean() of another")


def _has_values(value: object) -> bool:
    """True of a sentence, or of what else has values by name without being a mapping, a list or a tensor."""
    plain = isinstance(value, Tensor | Mapping | Sequence | str)
    return not plain and hasattr(value, "ground") and hasattr(value, "__getitem__")


def _settled(world: World, node: int, value: Tensor) -> Tensor:
    """A value that is real numbers, and the same for each state of the choices."""
    name, shape = world.ground.name(node), world.member(node).shape
    if not value.is_floating_point():
        raise EvidenceError(name, expected="a node whose value is real numbers", got="one that has states")
    if tuple(value.shape) != shape:
        hint = way_to_one_value(world.network, value, shape)
        got = f"one of shape {tuple(value.shape)}"
        raise EvidenceError(name, expected=f"one value of shape {shape}", got=got, allowed=hint)
    return value


def _row(world: World, node: int, weights: Tensor) -> Row:
    """A row of attention, a weight for each word that there is."""
    (member, index), name = where(world, node), world.ground.name(node)
    values = next((given for given in member.inputs if given.slot == "v."), None)
    plain = isinstance(member.tpm, Attention) and not any(given.pick for given in member.inputs)
    if not plain or values is None or values.over != (WORD,):
        wanted = "a node that is the mix of an Attention over words, without picks"
        raise EvidenceError(name, expected=wanted, got=type(member.tpm).__name__)
    words = sources(world, member, index, values, {})[2]
    row = torch.zeros(world.ground.words[world.network.members[values.parent].family.words or ""])
    if len(weights) not in (len(row), len(words)):
        raise EvidenceError(name, expected=f"{len(row)} probabilities, one for each word", got=f"{len(weights)}")
    if len(weights) == len(row) and float(weights[words].sum()) < 1 - 1e-6:
        got = f"{weights.tolist()}"
        raise EvidenceError(name, expected=f"probabilities of the words that it reads, {words}", got=got)
    row = row.to(world.network.device, world.network.dtype)
    row[words] = (weights[words] if len(weights) == len(row) else weights).to(row)
    return Row(row)

"""A question about the probabilities of nodes of a sentence, and its translation from nodes to families of nodes.

Inference computes with whole families of nodes in batches; a person asks about single nodes. `evidence_by_family`,
`interventions` and `sentence_arguments` turn the one into the other; `evidence_forms` and `set_families` do so for the
structure alone, without tensors, so that the router can decide before anything is computed. `joint_states`, `pieces`
and `of_one_sentence` make a batch of the joint states of choices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer.compiler.module import Module
from bnet_transformer.data import Evidence
from bnet_transformer.reference import ATOL, BUDGET, World, fits, where

NUMBERS = 2**21  # of one value of all words and states of a piece of the batch


@dataclass(frozen=True)
class Query:
    """Which nodes of a sentence are asked for, given what evidence, within what limits.

    Args:
        module: The compiled net.
        world: The sentence after its interventions: network, ground graph, inputs, nodes that are set.
        evidence: Node -> observed state (a whole number) or value, `[*shape]`.
        nodes: The nodes that are asked for, by their ground ids.
        budget: The most joint states of choices that are computed.
        atol: The tolerance of evidence on nodes that are functions of their parents.
    """

    module: Module
    world: World
    evidence: Mapping[int, Tensor] = field(default_factory=dict)
    nodes: tuple[int, ...] = ()
    budget: int = BUDGET
    atol: float = ATOL

    def names(self) -> str:
        """The names of the nodes that are asked for."""
        return ", ".join(map(self.world.ground.name, self.nodes))

    @cached_property
    def settled(self) -> dict[int, Tensor]:
        """The evidence that says outright which state or value a random node has."""
        return reference.settling(self.world, self.evidence)

    @cached_property
    def choices(self) -> list[int]:
        """The open choices above the nodes and the evidence, and those that decide their distributions in turn."""
        return reference.choices(self.world, [*self.nodes, *self.evidence], self.settled, beyond=True)

    def without_own_evidence(self) -> Query:
        """The same query without evidence on the nodes that it asks for."""
        rest = {node: value for node, value in self.evidence.items() if node not in self.nodes}
        return self if len(rest) == len(self.evidence) else replace(self, evidence=rest)

    def without_input_evidence(self) -> Query:
        """The same query without evidence on inputs, which either repeats the input or is impossible.

        Raises:
            EvidenceError: Where evidence differs from the input.
        """
        rest = dict(self.evidence)
        for k, (node, observed) in enumerate(self.evidence.items()):
            member, index = where(self.world, node)
            if member.tpm.kind == "input":
                value = self.world.given[member.family.name][index]
                if not bool(fits(value, observed, self.atol, value.dim())):
                    raise reference.impossible(self.world, self.evidence, k)
                del rest[node]
        return self if len(rest) == len(self.evidence) else replace(self, evidence=rest)


def word_counts(world: World) -> dict[str, Tensor]:
    """What says how many words a stack has, `[1, word]`, for the stacks whose words no input fills."""
    filled = {world.network.member(name).family.words for name in world.given}
    device, words = world.network.device, world.ground.words
    return {stack: torch.zeros(1, count, device=device) for stack, count in words.items() if stack not in filled}


def sentence_arguments(world: World) -> dict[str, Any]:
    """A sentence after its interventions as the arguments `x`, `do`, `patched`, `rows`, `given` of a batch of one."""
    given = {name: value[None] for name, value in world.given.items()}
    return {"x": word_counts(world), "given": given, **interventions(world)}


def evidence_by_family(
    world: World, evidence: Mapping[int, Tensor], states: Mapping[int, Tensor] | None = None
) -> dict[str, Evidence]:
    """Evidence on nodes as evidence on families.

    Args:
        world: The sentence.
        evidence: Node -> observed state or value, the same in each row of a batch.
        states: Node -> its state in each row, `[row]`; a batch of one row without.
    """
    states = {node: state.to(world.network.device) for node, state in (states or {}).items()}
    families = node_values_by_family(world, evidence, states=states)
    return {name: Evidence(value, None if bool(which.all()) else which) for name, (value, which) in families.items()}


def interventions(world: World, above: Collection[int] | None = None) -> dict[str, Any]:
    """The nodes that are set, as `do`, `patched` and `rows`: whole families, some nodes of a family, attention rows.

    Args:
        world: The sentence.
        above: The families that matter; all by default.
    """
    whole: dict[str, Tensor] = {}
    patched: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (value, which) in node_values_by_family(world, world.do, above).items():
        if bool(which.all()) and world.network.member(name).tpm.kind != "input":
            whole[name] = value
        else:
            patched[name] = value, which
    return {"do": whole, "patched": patched, "rows": node_values_by_family(world, world.rows, above)}


def node_values_by_family(
    world: World,
    values: Mapping[int, Tensor],
    above: Collection[int] | None = None,
    states: Mapping[int, Tensor] | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Values of nodes as tensors of their families, which the compiled net computes with.

    Args:
        world: The sentence.
        values: Node -> its value, `[*shape]`, the same in each row of a batch.
        above: The families that matter; all by default.
        states: Node -> its value in each row, `[row, *shape]`; it counts where `values` has one too.

    Returns:
        Family -> values `[row, *plates, word, *shape]`, zero for nodes without one (one row where no node has
        `states`), and which nodes have one, `[1, *plates, word]`.
    """
    columns = {**{node: value[None] for node, value in values.items()}, **(states or {})}
    families = {}
    for index, nodes in nodes_by_family(world, columns, above).items():
        shape, places = world.ground.shapes[index], [node - int(world.ground.offsets[index]) for node in nodes]
        first = next((columns[node] for node in nodes if node in (states or {})), columns[nodes[0]])
        flat = first.new_zeros(len(first), math.prod(shape), *first.shape[1:])
        which = torch.zeros(math.prod(shape), dtype=torch.bool, device=first.device)
        flat[:, places] = torch.stack([columns[node].expand_as(first) for node in nodes], 1)
        which[places] = True
        name = world.network.members[index].family.name
        families[name] = flat.reshape(-1, *shape, *first.shape[1:]), which.reshape(1, *shape)
    return families


def set_families(world: World, above: Collection[int] | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The families of which all nodes are set, and those of which some nodes or rows are: names, without values."""
    whole, some = list[str](), list[str]()
    for index, nodes in nodes_by_family(world, world.do, above).items():
        family = world.network.members[index].family
        is_whole = len(nodes) == math.prod(world.ground.shapes[index])
        (whole if is_whole and world.network.members[index].tpm.kind != "input" else some).append(family.name)
    rows = (world.network.members[index].family.name for index in nodes_by_family(world, world.rows, above))
    return tuple(whole), tuple(dict.fromkeys([*some, *rows]))


def evidence_forms(
    world: World, evidence: Mapping[int, Tensor], states: Iterable[int] = ()
) -> dict[str, tuple[bool, bool]]:
    """Family -> whether evidence and set nodes are all its nodes, and whether the evidence is in real numbers.

    Args:
        world: The sentence.
        evidence: Node -> observed state or value.
        states: Further nodes, of which a state will be observed.
    """
    is_real = {node: value.is_floating_point() for node, value in evidence.items()} | dict.fromkeys(states, False)
    forms = {}
    for index, nodes in nodes_by_family(world, is_real).items():
        base, real = int(world.ground.offsets[index]), is_real[nodes[0]]
        others = [node for node in range(base, base + math.prod(world.ground.shapes[index])) if node not in is_real]
        alike = all(node in world.do and world.do[node].is_floating_point() == real for node in others)
        forms[world.network.members[index].family.name] = alike, real
    return forms


def nodes_by_family(world: World, nodes: Iterable[int], above: Collection[int] | None = None) -> dict[int, list[int]]:
    """Nodes by their family."""
    families: dict[int, list[int]] = {}
    for node in nodes:
        index = world.ground.family_of(node).index
        if above is None or index in above:
            families.setdefault(index, []).append(node)
    return families


def joint_states(supports: Sequence[Sequence[int]]) -> Tensor:
    """All joint states, the last choice fastest: `[S, choice]`."""
    if not supports:
        return torch.zeros(1, 0, dtype=torch.long)
    grids = torch.meshgrid(*(torch.tensor(list(each), dtype=torch.long) for each in supports), indexing="ij")
    return torch.stack([grid.reshape(-1) for grid in grids], -1)


def pieces(world: World, count: int, asked: Iterable[int]) -> Iterator[slice]:
    """Parts of a batch of so many states, each small enough to be computed at once.

    `asked` are the families whose values or distributions are computed; those above them count as well.
    """
    families = set(asked)
    largest = max(_numbers(world, index) for index in world.network.graph.ancestral_set(families))
    size = max(1, NUMBERS // largest)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _numbers(world: World, index: int) -> int:
    """How many numbers a family holds for one state: its values, the logits of its states, the words that it reads."""
    member, words = world.network.members[index], max(world.ground.words.values(), default=1)
    states = world.network.count_states(index, world.ground.words) if member.tpm.kind == "discrete" else 0
    return math.prod(world.ground.shapes[index]) * (max(math.prod(member.shape), states) + words)


def of_one_sentence(module: Module) -> Module:
    """The module whose batch are states of one sentence: what is drawn for a whole corpus is drawn for it alone."""
    network = module.network
    if all(member.scope == "sentence" for member in network.members):
        return module
    members = tuple(replace(member, scope="sentence") for member in network.members)
    return Module(replace(network, members=members)).eval()

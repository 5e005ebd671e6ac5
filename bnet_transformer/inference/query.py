"""A question about the probabilities of nodes of a sentence, and its translation from nodes to families of nodes.

Inference computes with whole families of nodes in batches; a person asks about single nodes. `evidence_by_family`,
`interventions` and `sentence_arguments` turn the one into the other; `evidence_forms` and `set_families` do so for the
structure alone, without tensors, so that the router can decide before anything is computed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer.compiler.module import Module
from bnet_transformer.data import Evidence
from bnet_transformer.errors import ReadingError
from bnet_transformer.graph import ancestors
from bnet_transformer.reference import ATOL, BUDGET, World, fits
from bnet_transformer.world import where


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

    def settled(self) -> dict[int, Tensor]:
        """The evidence that says outright which state or value a random node has."""
        return reference.settling(self.world, self.evidence)

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


def choices_above(world: World, nodes: Iterable[int], settled: Mapping[int, Tensor]) -> list[int]:
    """The discrete random nodes, not settled, that decide the values of `nodes`: `reference.choices`, by families."""
    members, start = world.network.members, [node for node in nodes if node not in world.do]
    discrete = frozenset(member.family.index for member in members if member.tpm.kind == "discrete")
    if any(world.ground.family_of(node).index not in discrete for node in settled):
        return reference.choices(world, start, settled)
    above = {*start, *ancestors(world.ground, start, ends=discrete)}
    is_open = (node for node in above if node not in settled and node not in world.do)
    return sorted(node for node in is_open if world.ground.family_of(node).index in discrete)


def word_counts(world: World) -> dict[str, Tensor]:
    """What says how many words a stack has, `[1, word]`, for the stacks whose words no input fills."""
    filled = {world.network.member(name).family.words for name in world.given}
    device, words = world.network.device, world.ground.words
    return {stack: torch.zeros(1, count, device=device) for stack, count in words.items() if stack not in filled}


def sentence_arguments(world: World) -> dict[str, Any]:
    """A sentence after its interventions as the arguments `x`, `do`, `patched`, `rows`, `given` of a batch of one."""
    given = {name: value[None] for name, value in world.given.items()}
    return {"x": word_counts(world), "given": given, **interventions(world)}


def evidence_by_family(world: World, evidence: Mapping[int, Tensor]) -> dict[str, Evidence]:
    """Evidence on nodes as evidence on families, for a batch of one sentence."""
    families = node_values_by_family(world, evidence)
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
    return {"do": whole, "patched": patched, "rows": _rows_by_family(world, above)}


def node_values_by_family(
    world: World, values: Mapping[int, Tensor], above: Collection[int] | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Values of nodes by family: `[1, *plates, word, *shape]`, and which nodes have one, `[1, *plates, word]`."""
    families = {}
    for index, nodes in _by_family(world, values, above).items():
        member, shape = world.network.members[index], world.ground.shapes[index]
        first, base = values[nodes[0]], int(world.ground.offsets[index])
        flat = torch.zeros(math.prod(shape), *first.shape, dtype=first.dtype, device=first.device)
        which = torch.zeros(len(flat), dtype=torch.bool, device=first.device)
        places = [node - base for node in nodes]
        flat[places], which[places] = torch.stack([values[node] for node in nodes]), True
        families[member.family.name] = flat.reshape(1, *shape, *first.shape), which.reshape(1, *shape)
    return families


def set_families(world: World, above: Collection[int] | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The families of which all nodes are set, and those of which some nodes or rows are: names, without values."""
    whole, some = list[str](), list[str]()
    for index, nodes in _by_family(world, world.do, above).items():
        family = world.network.members[index].family
        is_whole = len(nodes) == math.prod(world.ground.shapes[index])
        (whole if is_whole and world.network.members[index].tpm.kind != "input" else some).append(family.name)
    rows = (world.network.members[index].family.name for index in _by_family(world, world.rows, above))
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
    for index, nodes in _by_family(world, is_real).items():
        base, real = int(world.ground.offsets[index]), is_real[nodes[0]]
        others = [node for node in range(base, base + math.prod(world.ground.shapes[index])) if node not in is_real]
        alike = all(node in world.do and world.do[node].is_floating_point() == real for node in others)
        forms[world.network.members[index].family.name] = alike, real
    return forms


def mixed_fault(
    world: World, values: Mapping[int, Tensor], states: Iterable[int] = (), above: Collection[int] | None = None
) -> ReadingError | None:
    """The fault of a family of which some nodes have states and others tensors: no tensor holds both."""
    is_real = {node: value.is_floating_point() for node, value in values.items()} | dict.fromkeys(states, False)
    for index, nodes in _by_family(world, is_real, above).items():
        if len({is_real[node] for node in nodes}) > 1:
            name = world.network.members[index].family.name
            return ReadingError(name, expected="states for its nodes, or tensors", got="both")
    return None


def _by_family(world: World, nodes: Iterable[int], above: Collection[int] | None = None) -> dict[int, list[int]]:
    """Nodes by their family."""
    families: dict[int, list[int]] = {}
    for node in nodes:
        index = world.ground.family_of(node).index
        if above is None or index in above:
            families.setdefault(index, []).append(node)
    return families


def _rows_by_family(world: World, above: Collection[int] | None) -> dict[str, tuple[Tensor, Tensor]]:
    """The rows of attention that are set, by family: `[1, *plates, word, word read]`, and of which nodes."""
    rows: dict[str, tuple[Tensor, Tensor]] = {}
    for index, nodes in _by_family(world, world.rows, above).items():
        shape, first = world.ground.shapes[index], world.rows[nodes[0]]
        weights, which = first.new_zeros(1, *shape, len(first)), first.new_zeros(1, *shape, dtype=torch.bool)
        for node in nodes:
            at = (0, *world.ground.place(node)[1])
            weights[at], which[at] = world.rows[node], True
        rows[world.network.members[index].family.name] = weights, which
    return rows

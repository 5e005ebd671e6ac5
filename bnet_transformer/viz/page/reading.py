"""What is read, for the page: `P(j | i)` of every reader in every state of the open choices, and its posterior mean."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer import asking, reference
from bnet_transformer.axes import WORD
from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.joint_posterior import expected_reading, route_expected_reading
from bnet_transformer.network import Member, Network
from bnet_transformer.reference import World
from bnet_transformer.tpm.arrays import in_numpy

OPEN = 64  # joint states of open choices that are told one by one; of more, the mean alone
SLOW = 4_096  # nodes whose mean is computed one by one

Table = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Reading:
    """What a family reads, `[slot, plate, word, word read]`: `slots` are the posterior mean, where choices are open,
    then their joint states, the last choice fastest; `choices` are their names and numbers of states.

    Nodes that are set read nothing. `note` says in words what is missing.
    """

    member: Member
    table: Table
    choices: tuple[tuple[str, int], ...] = ()
    mean: bool = False
    note: str = ""


def prepare(state: SentenceState, members: Sequence[Member]) -> None:
    """Compute what these members read in one course of the net, where that can be."""
    set_ = {state.ground.family_of(node).index for node in state.world.do}
    state.answers.prepare([m for m in members if m.tpm.has_reading and m.family.index not in set_])


def reading_of(state: SentenceState, member: Member, heads: Collection[int] | None = None) -> Reading | str:
    """What a member reads; in words why nothing, where its TPM has no `P(j | i)`."""
    world, family = state.world, member.family
    set_ = [node for node in world.do if world.ground.family_of(node).index == family.index]
    if not member.tpm.has_reading:
        return f"{family.name}: expected attention P(j | i); got {member.tpm.why_no_reading()}"
    if family.index in world.network.graph.recurrent and set_:
        return f"{family.name} reads what is set in it: no P(j | i) is shown"
    if set_:  # what it would read, had it not been set; the rows of what is set are empty
        rest = {node: value for node, value in state.interventions.items() if node not in set_}
        state = replace(state, interventions=rest, before=None)
    choices, own = _choices(state, member)
    try:
        values = None if _states(choices) > OPEN else _values(state, member, len(choices))
    except BudgetError:
        values = None
    except BNetError as error:
        if not choices:
            return error.args[0] if error.args else f"{family.name} has no P(j | i)"
        values = None
    table, named, mean, note = _slots(state, member, choices, own, values)
    if table is None:
        return note
    table = _emptied(world, table, set_)
    if heads is not None and "head" in family.plates:
        table = _picked(member, table, sorted(heads))
    flat = table.reshape(len(table), -1, *table.shape[-2:])
    return Reading(member, flat, named, mean, note)


def _slots(
    state: SentenceState, member: Member, choices: Mapping[str, int], own: bool, values: Tensor | None
) -> tuple[Table | None, tuple[tuple[str, int], ...], bool, str]:
    """`[slot, *plates, word, word]` with its choices, whether the mean leads, and what is missing."""
    name, count = member.family.name, _states(choices)
    if not choices:
        return (None if values is None else in_numpy(values)[None]), (), False, ""
    mean, why = None, ""
    try:
        mean = _mean(state, member)
    except BudgetError as error:
        why = str(error)
    parts = [] if mean is None else [mean[None]]
    parts += [] if values is None else [in_numpy(values).reshape(-1, *values.shape[len(choices) :])]
    if not parts:
        return None, (), False, f"{name}: {why or 'too many choices are open'}"
    many = f"{count:,} joint states are open" if count > OPEN else "its words hang on different choices"
    told = f"{name}: {many}; the mean alone is shown" if values is None else ""
    note = told if mean is not None else f"{name}: no posterior mean ({why})"
    named = tuple(choices.items()) if values is not None else ()
    return np.concatenate(parts), named, mean is not None, note


def _values(state: SentenceState, member: Member, states: int) -> Tensor:
    step, stem = member.family.step or 0, member.family.stem
    found = state.answers.attention(step, stem).detach()
    if found.dim() != states + len(member.family.plates) + 2:
        raise BNetError(member.family.name, expected="a dim for each open choice", got=f"{tuple(found.shape)}")
    return found


def _choices(state: SentenceState, member: Member) -> tuple[dict[str, int], bool]:
    """The open choices that decide what a member reads, with their states; whether each word has its own."""
    world, network = state.world, state.network
    if not asking.choice_above(network, [member.family.index]):
        return {}, False
    settled = reference.settling(world, state.evidence)
    above = {
        node: reference.choices(world, reference.reading_parents(world, node), settled)
        for node in world.ground.nodes(member.family).tolist()
        if node not in world.do and node not in world.rows
    }
    every = sorted(set().union(*above.values()))
    sizes = {choice: world.count_states(choice) for choice in every}
    choices = asking.shared_and_own(world, above)
    if choices is None or not choices[1]:
        return {world.ground.name(choice): size for choice, size in sizes.items()}, False
    named = {}
    for choice, size in sizes.items():  # in the order of the dims
        family = world.ground.family_of(choice)
        named[f"{family.name}_i" if family.index in choices[1] else world.ground.name(choice)] = size
    return named, True


def _mean(state: SentenceState, member: Member) -> Table:
    """The reading averaged over the posterior of the choices: `[*plates, word, word]`."""
    nodes, reading = len(state.ground.nodes(member.family)), state.answers.reading_query(member)
    if nodes > SLOW and route_expected_reading(reading).algorithm == "reference":
        raise BudgetError(member.family.name, expected=f"at most {SLOW} nodes for a mean", got=nodes)
    return in_numpy(expected_reading(state.query(), reading))


def _emptied(world: World, table: Table, nodes: Sequence[int]) -> Table:
    """The table without the rows of nodes that are set."""
    if not nodes:
        return table
    table = table.copy()
    for node in nodes:
        at: tuple[Any, ...] = (slice(None), *world.ground.place(node)[1])
        table[at] = 0.0
    return table


def _picked(member: Member, table: Table, heads: Sequence[int]) -> Table:
    return np.take(table, heads, axis=1 + member.family.plates.index("head"))


def _states(choices: Mapping[str, int]) -> int:
    return math.prod(choices.values())


def readers_of(network: Network, slices: Collection[int] | None) -> list[Member]:
    """The members that read words, of some slices (None: of all)."""
    return [
        member for member in network.members if member.reads_words and (slices is None or member.family.step in slices)
    ]


def read_from(member: Member) -> int:
    """The family whose words are read, the values where they are another than the keys."""
    return [given.parent for given in member.inputs if WORD in given.over][-1]

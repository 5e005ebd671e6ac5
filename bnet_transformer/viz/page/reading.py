"""What is read, for the page: `P(j | i)` of every reader in every state of the open choices, and its posterior mean."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnet_transformer import asking
from bnet_transformer.axes import WORD
from bnet_transformer.errors import BudgetError
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.joint_posterior import expected_reading, route_expected_reading
from bnet_transformer.inference.node_queries import NodeQuery
from bnet_transformer.network import Member
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
    reading = state.answers.reading_query(member)
    apart = asking.shared_and_own(state.world, reading.choices)
    choices = _named(state.world, reading, [] if apart is None else apart[1])
    count = math.prod(choices.values())
    is_told = apart is not None and count <= OPEN and 0 <= (family.step or 0) < world.network.graph.depth
    parts, note = [], ""
    if choices or not is_told:
        try:
            parts.append(_mean(state, reading)[None])
        except BudgetError as error:
            note = f"{family.name}: no posterior mean ({error})"
    has_mean = bool(parts and choices)
    if is_told:
        values = in_numpy(state.answers.attention(family.step or 0, family.stem).detach())
        parts.append(values.reshape(-1, *values.shape[len(choices) :]))
    elif not parts:
        return note
    elif choices:
        many = f"{count:,} joint states are open" if count > OPEN else "its words hang on different choices"
        note = f"{family.name}: {many}; the mean alone is shown"
    table = np.concatenate(parts)
    for node in set_:
        at: tuple[Any, ...] = (slice(None), *world.ground.place(node)[1])
        table[at] = 0.0
    if heads is not None and "head" in family.plates:
        table = np.take(table, sorted(heads), axis=1 + family.plates.index("head"))
    flat = table.reshape(len(table), -1, *table.shape[-2:])
    return Reading(member, flat, tuple(choices.items()) if is_told else (), has_mean, note)


def _named(world: World, reading: NodeQuery, own: Collection[int]) -> dict[str, int]:
    """The open choices that decide what is read, in the order of the dims, with their states; `own` end in `_i`."""
    named = {}
    for choice in sorted(set().union(*reading.choices.values())):
        family = world.ground.family_of(choice)
        named[f"{family.name}_i" if family.index in own else world.ground.name(choice)] = world.count_states(choice)
    return named


def _mean(state: SentenceState, reading: NodeQuery) -> Table:
    """The reading averaged over the posterior of the choices: `[*plates, word, word]`."""
    nodes = len(state.ground.nodes(reading.member.family))
    if nodes > SLOW and route_expected_reading(reading).algorithm == "reference":
        raise BudgetError(reading.member.family.name, expected=f"at most {SLOW} nodes for a mean", got=nodes)
    return in_numpy(expected_reading(state.query(), reading))


def read_from(member: Member) -> int:
    """The family whose words are read, the values where they are another than the keys."""
    return [given.parent for given in member.inputs if WORD in given.over][-1]

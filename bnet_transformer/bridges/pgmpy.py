"""The discrete part of a sentence's bnet as tables: a pgmpy network, and the BIF format."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer._core.checks import check_int
from bnet_transformer._core.torch_context import preserve_python_rng
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError
from bnet_transformer.reference import ATOL, BUDGET, GroundModel, ReferenceRun, find_open_choices, parents
from bnet_transformer.tpm.arrays import to_numpy

if TYPE_CHECKING:
    from pgmpy.models import DiscreteBayesianNetwork

ENTRIES = 10_000_000  # of tables
MOST_DIMS = 64  # numpy's, so pgmpy's
SEEN = ("seen", "unseen")


@dataclass(frozen=True)
class Table:
    """A variable with its table: `values[s, p1, p2, ...]` is the probability of state s given the parents' states."""

    name: str
    states: tuple[str, ...]
    parents: tuple[str, ...]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class _Plan:
    """A table that is to be made. `seen` is what evidence says of the node, where the variable stands for that."""

    node: int
    name: str
    states: tuple[str, ...]
    parents: tuple[int, ...]
    seen: Tensor | None = None


@preserve_python_rng()
def to_pgmpy(
    world: GroundModel, *, evidence: Mapping[int, Tensor] | None = None, limit: int = ENTRIES, runs: int = BUDGET
) -> DiscreteBayesianNetwork:
    """The discrete part as a pgmpy network. States are named as `state_name` says, unlabelled ones "0", "1", ...

    A node that `do` sets to a state is a root with a delta; ask `VariableElimination`, not `CausalInference`, whose
    `do` is wrong (pgmpy 1.1.2). Evidence that no state of a variable can carry (on a continuous or a deterministic
    node) becomes a variable with the states seen and unseen, whose table is its likelihood over the greatest one.
    `model.graph["evidence"]` is all of the evidence, as `query` takes it.

    Tables are counted first: it refuses more than `limit` entries and more than `runs` runs of the reference.
    """
    tables, states = world_to_tables(world, evidence=evidence, limit=limit, runs=runs)
    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.models import DiscreteBayesianNetwork

    names = {table.name: list(table.states) for table in tables}
    model = DiscreteBayesianNetwork()
    model.add_nodes_from(names)
    model.add_edges_from((parent, table.name) for table in tables for parent in table.parents)
    for table in tables:
        model.add_cpds(
            TabularCPD(
                table.name,
                len(table.states),
                table.values.reshape(len(table.states), -1),
                evidence=list(table.parents),
                evidence_card=list(table.values.shape[1:]),
                state_names={name: names[name] for name in (table.name, *table.parents)},
            )
        )
    model.graph["evidence"] = states
    return model


def to_bif(
    world: GroundModel, *, evidence: Mapping[int, Tensor] | None = None, limit: int = ENTRIES, runs: int = BUDGET
) -> str:
    """The discrete part in the BIF format, each probability to its last digit; see `to_pgmpy` and `state_name`.

    (pgmpy's BIFReader takes names that differ in case alone for one.)
    """
    tables, _ = world_to_tables(world, evidence=evidence, limit=limit, runs=runs)
    lines = ["network bnet {", "}"]
    for table in tables:
        states = ", ".join(table.states)
        lines += [f"variable {table.name} {{", f"  type discrete [ {len(table.states)} ] {{ {states} }};", "}"]
    names = {table.name: table.states for table in tables}
    for table in tables:
        bar = f" | {', '.join(table.parents)}" if table.parents else ""
        lines.append(f"probability ( {table.name}{bar} ) {{")
        for at in np.ndindex(*table.values.shape[1:]):
            given = ", ".join(names[parent][state] for parent, state in zip(table.parents, at, strict=True))
            row = ", ".join(map(repr, table.values[(slice(None), *at)].tolist()))
            lines.append(f"  ({given}) {row};" if given else f"  table {row};")
        lines.append("}")
    return "\n".join(lines) + "\n"


def state_name(text: str) -> str:
    """A label as a BIF identifier: letters stay, as do digits after the first place; any other character is `_hex_`.

    >>> state_name("sat"), state_name("don't"), state_name("2nd")
    ('sat', 'don_27_t', '_32_nd')
    """
    kept = (re.fullmatch("[A-Za-z0-9]" if k else "[A-Za-z]", character) for k, character in enumerate(text))
    parts = [c if plain else f"_{ord(c):x}_" for c, plain in zip(text, kept, strict=True)]
    return "".join(parts) or "__"


def world_to_tables(
    world: GroundModel, *, evidence: Mapping[int, Tensor] | None = None, limit: int = ENTRIES, runs: int = BUDGET
) -> tuple[list[Table], dict[str, str]]:
    """The tables of the discrete part, and the evidence as the state of each variable that has some."""
    seen = dict(evidence or {})
    chosen = {n: v for n, v in world.do.items() if _is_state(world, n, v)}
    free = replace(world, do={n: v for n, v in world.do.items() if n not in chosen})
    known = {n: v for n, v in seen.items() if world.spec(n).tpm.kind == "continuous"}
    plans = _plans(free, chosen, seen, known)
    _count(free, plans, check_int("limit", limit), check_int("runs", runs))
    names = {plan.node: plan.name for plan in plans if plan.seen is None}
    tables = {}
    with torch.no_grad():
        for parents, group in _grouped(plans).items():
            sizes = [free.count_states(parent) for parent in parents]
            each_run = reference.enumerate_runs(free, list(parents), known, runs)
            logs = [[_row(run, plan, chosen.get(plan.node)) for plan in group] for run in each_run]
            for plan, rows in zip(group, zip(*logs, strict=True), strict=True):
                table = np.moveaxis(to_numpy(torch.stack(rows).reshape(*sizes, -1)), -1, 0)
                values = _likelihood(table, plan.name, plan.seen) if plan.seen is not None else np.exp(table)
                tables[plan.name] = Table(plan.name, plan.states, tuple(names[p] for p in parents), values)
    states = {plan.name: SEEN[0] for plan in plans if plan.seen is not None}
    by_node = {plan.node: plan for plan in plans if plan.seen is None}
    states |= {by_node[n].name: by_node[n].states[int(v)] for n, v in seen.items() if _is_state(world, n, v)}
    return [tables[plan.name] for plan in plans], states


def _plans(
    world: GroundModel, chosen: Mapping[int, Tensor], seen: Mapping[int, Tensor], known: Mapping[int, Tensor]
) -> list[_Plan]:
    """Every variable with its parents: the discrete random nodes, then what evidence says of other nodes.

    `known` is the evidence on continuous nodes, which settles what is below them.
    """
    ground = world.ground
    families = [m.group for m in world.network.specs if m.tpm.kind == "discrete"]
    nodes = [n for family in families for n in ground.select_nodes(family).tolist() if n not in world.do]
    if not nodes:
        kinds = sorted({type(m.tpm).__name__ for m in world.network.specs if m.tpm.is_random})
        got = f"none ({', '.join(kinds)} {'is' if len(kinds) == 1 else 'are'} continuous)" if kinds else "none"
        raise BNetError("discrete part", expected="at least one discrete random node", actual=got)

    def above(node: int) -> tuple[int, ...]:
        """The discrete random nodes that decide the distribution of a node."""
        return tuple(find_open_choices(world, parents(world, node), known))

    plans = [_Plan(n, ground.name(n), _states(world, n), () if n in chosen else above(n)) for n in nodes]
    variables = set(nodes)
    for node, value in seen.items():
        if node in variables and value.is_floating_point():
            plans.append(_Plan(node, f"{ground.name(node)}_{SEEN[0]}", SEEN, (node,), value))
        elif node not in variables:
            plans.append(_Plan(node, ground.name(node), SEEN, above(node), value))
    return plans


def _count(world: GroundModel, plans: Sequence[_Plan], limit: int, budget: int) -> None:
    """Refuse tables that are too large, before any is made."""
    ways = "do on some of its parents to a value, a shorter sentence, fewer heads, or limit="
    total = 0
    for plan in plans:
        dims = 1 + len(plan.parents)
        entries = len(plan.states) * math.prod(world.count_states(parent) for parent in plan.parents)
        if dims > MOST_DIMS or entries > limit:
            wanted = f"a table of at most {MOST_DIMS} dims and {limit} entries"
            raise BudgetError(
                plan.name, expected=wanted, actual=f"{dims} dims and {_said(entries)} entries", allowed=ways
            )
        total += entries
    if total > limit:
        got = f"{_said(total)} in {len(plans)} tables"
        raise BudgetError("discrete part", expected=f"at most {limit} entries in all", actual=got, allowed="limit=")
    count = sum(math.prod(world.count_states(p) for p in parents) for parents in _grouped(plans))
    if count > budget:
        wanted = f"at most {budget} runs of the reference, one for each joint state of a variable's parents"
        raise BudgetError("discrete part", expected=wanted, actual=f"{_said(count)} runs", allowed=f"runs={count}")


def _said(count: int) -> str:
    return str(count) if count < 10**15 else f"some 2^{count.bit_length() - 1}"


def _grouped(plans: Sequence[_Plan]) -> dict[tuple[int, ...], list[_Plan]]:
    """Variables of the same parents share the runs."""
    groups: dict[tuple[int, ...], list[_Plan]] = {}
    for plan in plans:
        groups.setdefault(plan.parents, []).append(plan)
    return groups


def _row(run: ReferenceRun, plan: _Plan, chosen: Tensor | None) -> Tensor:
    """The log probability of each state, or of what is seen."""
    if plan.seen is not None:
        if run.model.spec(plan.node).tpm.kind == "continuous":
            return run.log_prob(plan.node).reshape(1)
        same = torch.allclose(run.value(plan.node).double(), plan.seen.double(), rtol=0, atol=ATOL)
        return torch.tensor([0.0 if same else -math.inf], dtype=torch.float64)
    states = torch.arange(len(plan.states))
    if chosen is not None:
        return torch.where(states == chosen, 0.0, -math.inf).double()
    row = run.distribution(plan.node).log_prob(states).double()
    if bool(row.isnan().any()):
        raise EvidenceError(plan.name, expected="a distribution over its states", actual="probabilities that are NaN")
    return row


def _likelihood(table: NDArray[np.float64], name: str, told: Tensor) -> NDArray[np.float64]:
    """Seen and unseen from a log likelihood: over the greatest, so that both are probabilities."""
    top = table.max()
    if not top > -math.inf:
        got = f"{told.tolist()}, of probability zero"
        raise EvidenceError(name, expected="evidence that some state of the net makes possible", actual=got)
    seen = np.exp(table - top)
    return np.concatenate([seen, 1 - seen])


def _states(world: GroundModel, node: int) -> tuple[str, ...]:
    """The names of a variable's states: its labels, the words of the vocabulary for a readout of words, or numbers."""
    member, count = world.spec(node), world.count_states(node)
    labels = getattr(member.tpm, "labels", None)
    words = world.network.vocabularies.get(member.group.stack, ())
    is_last = member.group.step == world.network.graph.slices.get(member.group.stack)
    if labels is None and is_last and len(words) == count:
        labels = words
    names = tuple(map(state_name, map(str, labels))) if labels is not None else tuple(map(str, range(count)))
    if len(set(names)) != count:
        raise BNetError(f"labels of {member.group.name}", expected=f"{count} different ones", actual=labels)
    return names


def _is_state(world: GroundModel, node: int, value: Tensor) -> bool:
    """True for a value that is a state of a discrete random node, and not an atom by its matrix."""
    return world.spec(node).tpm.kind == "discrete" and not value.is_floating_point()

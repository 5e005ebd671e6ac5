"""Discrete Bayesian networks of pgmpy and in the BIF format: export of the discrete part of a net, and import.

The export is the discrete part of a sentence's bnet, given its words, as tables.

The variables are the discrete random nodes (selectors, atoms, word positions, categorical readouts). The parents of a
variable are the discrete random nodes on which its distribution depends, also through deterministic nodes. The
reference implementation computes its table, with one run for each joint state of the parents. Continuous readouts are
left out, unless they have evidence.

The import is a declaration without words, in which each variable is a node with a `Table`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer._core.arrays import to_numpy
from bnet_transformer._core.checks import check_choice, check_int, check_names
from bnet_transformer._core.files import as_path, wrap_read_errors
from bnet_transformer._core.naming import find_role_fault
from bnet_transformer._core.tokens import get_raw
from bnet_transformer._core.torch_context import preserve_python_rng
from bnet_transformer.bridges.bif import (
    ESCAPED_STATES,
    MAX_TABLE_DIMS,
    MAX_TABLE_ENTRIES,
    ConditionalTable,
    format_state_name,
    parse_bif,
)
from bnet_transformer.declare import Declaration, Node
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError, FileError, format_count
from bnet_transformer.reference import ATOL, BUDGET, GroundModel, ReferenceRun, find_open_choices, parents
from bnet_transformer.tpm import Table
from bnet_transformer.tpm.table import check_rows

if TYPE_CHECKING:
    import os

    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.models import DiscreteBayesianNetwork

Roles = Mapping[str, str] | Callable[[str], str] | None  # from the names of variables to roles
OBSERVATION_STATES = ("seen", "unseen")
ROW_SUM_TOLERANCE = 0.01  # of pgmpy's `check_model`; published tables are often rounded
EXACT_SUM_TOLERANCE = 1e-9  # rows whose sum is nearer to 1 stay as they are
K = TypeVar("K")


@dataclass(frozen=True)
class _TablePlan:
    """A table to compute; `evidence` is the evidence on the node, if the variable is an observation of it."""

    node: int
    name: str
    states: tuple[str, ...]
    parents: tuple[int, ...]
    evidence: Tensor | None = None


@preserve_python_rng()
def to_pgmpy(
    model: GroundModel,
    *,
    evidence: Mapping[int, Tensor] | None = None,
    limit: int = MAX_TABLE_ENTRIES,
    runs: int = BUDGET,
) -> DiscreteBayesianNetwork:
    """Convert the discrete part to a pgmpy network.

    States have the names of their labels; states without labels are "0", "1", .... A node that `do` sets to a
    state is a root with a delta distribution. Query it with `VariableElimination`, not with `CausalInference`, whose
    `do` is wrong in pgmpy 1.1.2. Evidence on a continuous or deterministic node becomes a variable with the states
    `seen` and `unseen`. Its table is the likelihood divided by its maximum: this is virtual evidence (Pearl 1988),
    which does not change posteriors. `network.graph["evidence"]` contains all evidence, in the form that `query` takes.

    Args:
        model: The ground model of the sentence.
        evidence: The evidence by node.
        limit: The maximum number of entries of all tables.
        runs: The maximum number of runs, one for each joint state of the parents of a variable.

    Returns:
        The pgmpy network.

    Raises:
        BudgetError: If the tables have more than `limit` entries, or need more than `runs` runs. Both are counted
            before any table is computed.
    """
    tables, states = model_to_tables(model, evidence=evidence, limit=limit, runs=runs)
    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.models import DiscreteBayesianNetwork

    names = {table.name: list(table.states) for table in tables}
    network = DiscreteBayesianNetwork()
    network.add_nodes_from(names)
    network.add_edges_from((parent, table.name) for table in tables for parent in table.parents)
    for table in tables:
        network.add_cpds(
            TabularCPD(
                table.name,
                len(table.states),
                table.values.reshape(len(table.states), -1),
                evidence=list(table.parents),
                evidence_card=list(table.values.shape[1:]),
                state_names={name: names[name] for name in (table.name, *table.parents)},
            )
        )
    network.graph["evidence"] = states
    return network


def to_bif(
    model: GroundModel,
    *,
    evidence: Mapping[int, Tensor] | None = None,
    limit: int = MAX_TABLE_ENTRIES,
    runs: int = BUDGET,
) -> str:
    """Convert the discrete part to the BIF format, with exact probabilities; see `to_pgmpy`.

    States are named as by `format_state_name`, because a BIF identifier has no special characters; `read_bif` restores
    the labels. (pgmpy's BIFReader does not distinguish names of variables that differ only in case.)

    Args:
        model: The ground model of the sentence.
        evidence: The evidence by node.
        limit: The maximum number of entries of all tables.
        runs: The maximum number of runs, one for each joint state of the parents of a variable.

    Returns:
        The BIF text.
    """
    tables, _ = model_to_tables(model, evidence=evidence, limit=limit, runs=runs)
    names = {table.name: _to_identifiers(table.states) for table in tables}
    is_escaped = any(names[table.name] != table.states for table in tables)
    title = format_state_name(model.network.declaration.name or "bnet")
    lines = [f"network {title} {{", *([f"  {ESCAPED_STATES} ;"] if is_escaped else []), "}"]
    for table in tables:
        states = ", ".join(names[table.name])
        lines += [f"variable {table.name} {{", f"  type discrete [ {len(table.states)} ] {{ {states} }};", "}"]
    for table in tables:
        bar = f" | {', '.join(table.parents)}" if table.parents else ""
        lines.append(f"probability ( {table.name}{bar} ) {{")
        for index in np.ndindex(*table.values.shape[1:]):
            condition = ", ".join(names[parent][state] for parent, state in zip(table.parents, index, strict=True))
            row = ", ".join(map(repr, table.values[(slice(None), *index)].tolist()))
            lines.append(f"  ({condition}) {row};" if condition else f"  table {row};")
        lines.append("}")
    return "\n".join(lines) + "\n"


def _to_identifiers(states: tuple[str, ...]) -> tuple[str, ...]:
    """The states of a variable as BIF identifiers; the numbers "0", "1", ... stay."""
    return states if states == tuple(map(str, range(len(states)))) else tuple(map(format_state_name, states))


@preserve_python_rng()
def pgmpy_to_declaration(
    network: DiscreteBayesianNetwork, *, roles: Roles = None, learnable: bool = False
) -> Declaration:
    """Convert a network of pgmpy to a declaration without words: a node with a `Table` for each variable.

    The names of states become labels; the numbers 0, 1, ... are states without labels.

    Args:
        network: The network, with a `TabularCPD` for each variable.
        roles: The role of each variable, by name, or a function from names to roles. None (default): the name itself.
        learnable: Whether training changes the tables. Default False.

    Returns:
        The declaration.

    Raises:
        BNetError: If a variable has no table, its table is no distribution, or its name is no valid role.
    """
    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.models import DiscreteBayesianNetwork

    _check_import_options(roles, learnable)
    if not isinstance(network, DiscreteBayesianNetwork):
        raise BNetError("model", expected="a DiscreteBayesianNetwork of pgmpy", actual=network)
    tables: dict[Hashable, TabularCPD] = {variable: network.get_cpds(variable) for variable in network.nodes}
    for variable, table in tables.items():
        if not isinstance(table, TabularCPD):
            actual = "no table" if table is None else type(table).__name__
            raise BNetError(f"variable {variable}", expected="a TabularCPD", actual=actual)
        if set(table.variables[1:]) != set(network.get_parents(variable)):
            expected = f"a table with the parents {sorted(map(str, network.get_parents(variable)))}"
            raise BNetError(f"variable {variable}", expected=expected, actual=sorted(map(str, table.variables[1:])))
    role_of, nodes = _find_roles([*tables], roles), []
    for variable, table in tables.items():
        labels = _to_labels(table.state_names[variable])
        tpm = _build_tpm(variable, _read_probabilities(variable, tables), labels, learnable)
        nodes.append(Node(role_of[variable], tpm, [role_of[name] for name in table.variables[1:]]))
    return Declaration(nodes=nodes, name=str(network.name or "net"))


def bif_to_declaration(path: str | os.PathLike[str], *, roles: Roles = None, learnable: bool = False) -> Declaration:
    """Read a file in the BIF format as a declaration; see `pgmpy_to_declaration`.

    Args:
        path: The file.
        roles: The role of each variable, by name, or a function from names to roles. None (default): the name itself.
        learnable: Whether training changes the tables. Default False.

    Returns:
        The declaration.

    Raises:
        FileError: If the file is missing or not in the BIF format.
        BNetError: If the network cannot be converted.
    """
    _check_import_options(roles, learnable)
    file = as_path(path)
    with wrap_read_errors(file, "a file in the BIF format"):
        try:
            title, tables = parse_bif(file.read_text(encoding="utf-8-sig"))
        except BNetError as error:
            raise FileError(f"{file}, {error.subject}", **error.parts) from error
    role_of, states = _find_roles([table.name for table in tables], roles), {t.name: t.states for t in tables}
    nodes = []
    for table in tables:
        values = _normalize_rows(table.name, np.moveaxis(table.values, 0, -1), [states[name] for name in table.parents])
        tpm = _build_tpm(table.name, values, table.states, learnable)
        nodes.append(Node(role_of[table.name], tpm, [role_of[name] for name in table.parents]))
    return Declaration(nodes=nodes, name=title or "net")


def _read_probabilities(variable: Hashable, tables: Mapping[Hashable, TabularCPD]) -> NDArray[np.float64]:
    """The table of a variable, `[*states of the parents, states]`, with all states in the order of their variable."""
    table = tables[variable]
    values = np.asarray(table.values, dtype=np.float64)
    states = [list(tables[name].state_names[name]) for name in table.variables]
    for axis, (name, names) in enumerate(zip(table.variables, states, strict=True)):
        given = list(table.state_names[name])
        if len(given) != len(names) or set(given) != set(names):
            raise BNetError(f"variable {variable}", expected=f"the states {names} of its parent {name}", actual=given)
        values = values.take([given.index(state) for state in names], axis)
    return _normalize_rows(variable, np.moveaxis(values, 0, -1), states[1:])


def _normalize_rows(
    variable: Hashable, values: NDArray[np.float64], states: Sequence[Sequence[int | str]]
) -> NDArray[np.float64]:
    """The table `[*states of the parents, states]` with rows that sum to 1, if their sums are rounded."""
    sums = values.sum(-1, keepdims=True)
    is_rounded = (np.abs(sums - 1) > EXACT_SUM_TOLERANCE) & (np.abs(sums - 1) <= ROW_SUM_TOLERANCE)
    values = values / np.where(is_rounded, sums, 1)
    check_rows(f"variable {variable}", values, states)
    return values


def _build_tpm(
    variable: Hashable, values: NDArray[np.float64], labels: tuple[str, ...] | None, learnable: bool
) -> Table:
    """The `Table` of a variable; errors name the variable."""
    try:
        return Table(values, labels, learnable=learnable)
    except BNetError as error:
        raise BNetError(f"variable {variable}, {error.subject}", **error.parts) from error


def _check_import_options(roles: object, learnable: object) -> None:
    """Raise an error for invalid options of an import, before the network is read."""
    if roles is not None and not isinstance(roles, Mapping) and not callable(roles):
        raise BNetError("roles", expected="a mapping or a function from names of variables to roles", actual=roles)
    check_choice("learnable", learnable, (True, False))


def _find_roles(variables: Sequence[Hashable], roles: Roles) -> dict[Hashable, str]:
    """The role of each variable; raises an error that proposes valid roles for invalid names."""
    names = [str(variable) for variable in variables]
    if isinstance(roles, Mapping):
        check_names("variable in roles", roles, names)
        converted = [roles.get(name, name) for name in names]
    else:
        converted = names if roles is None else [roles(name) for name in names]
    invalid = {name: fault for name, role in zip(names, converted, strict=True) if (fault := find_role_fault(role))}
    if invalid:
        proposed = {name: _propose_role(name) for name in invalid}
        shown = ", ".join(f"{name!r}: {role!r}" for name, role in [*proposed.items()][:8])
        more = f" and for {len(invalid) - 8} more variables" if len(invalid) > 8 else ""
        expected = "names that are valid roles: identifiers that do not end in _ and digits"
        hint = f"Pass roles=, a mapping or a function from names to roles, such as {{{shown}}}{more}"
        raise BNetError("names of variables", expected=expected, actual=next(iter(invalid.values())), hint=hint)
    if len(set(converted)) < len(converted):
        duplicate = next(role for role in converted if converted.count(role) > 1)
        raise BNetError("roles", expected="different roles", actual=f"{duplicate!r} twice")
    return dict(zip(variables, converted, strict=True))


def _propose_role(name: str) -> str:
    """A valid role that is similar to a name.

    >>> _propose_role("C_NI_12_00"), _propose_role("2nd-day"), _propose_role("class")
    ('C_NI1200', 'n2nd_day', 'class_node')
    """
    parts = re.sub("[^A-Za-z0-9]+", "_", name).strip("_").split("_")
    end = max((k for k, part in enumerate(parts) if not part.isdigit()), default=0)  # the parts after it are numbers
    role = "_".join(parts[: end + 1]) + "".join(parts[end + 1 :])
    role = role if role[:1].isalpha() else f"n{role}"
    return role if find_role_fault(role) is None else f"{role}_node"


def _to_labels(states: Sequence[Hashable]) -> tuple[str, ...] | None:
    """The labels of the states of a variable; None for the numbers 0, 1, ...."""
    is_numbered = all(isinstance(state, int | np.integer) and not isinstance(state, bool) for state in states)
    return None if is_numbered and list(states) == [*range(len(states))] else tuple(map(str, states))


def model_to_tables(
    model: GroundModel,
    *,
    evidence: Mapping[int, Tensor] | None = None,
    limit: int = MAX_TABLE_ENTRIES,
    runs: int = BUDGET,
) -> tuple[list[ConditionalTable], dict[str, str]]:
    """Compute the tables of the discrete part, and the evidence as the state of each variable that has evidence."""
    # In float64, parameters with declared values have all their digits: a probability of 0.99 is not 0.99000005.
    model, observed = _to_float64(model), _cast_values(evidence or {})
    set_states = {n: v for n, v in model.do.items() if _is_state(model, n, v)}
    open_model = replace(model, do={n: v for n, v in model.do.items() if n not in set_states})
    known = {n: v for n, v in observed.items() if model.spec(n).tpm.kind == "continuous"}
    plans = _plan_tables(open_model, set_states, observed, known)
    _check_table_sizes(open_model, plans, check_int("limit", limit), check_int("runs", runs))
    names = {plan.node: plan.name for plan in plans if plan.evidence is None}
    tables = {}
    with torch.no_grad():
        for parents, group in _group_by_parents(plans).items():
            sizes = [open_model.count_states(parent) for parent in parents]
            results = reference.enumerate_runs(open_model, list(parents), known, runs)
            logs = [[_compute_log_row(run, plan, set_states.get(plan.node)) for plan in group] for run in results]
            for plan, rows in zip(group, zip(*logs, strict=True), strict=True):
                table = np.moveaxis(to_numpy(torch.stack(rows).reshape(*sizes, -1)), -1, 0)
                if plan.evidence is not None:
                    values = _build_likelihood_table(table, plan.name, plan.evidence)
                else:
                    values = np.exp(table)
                tables[plan.name] = ConditionalTable(plan.name, plan.states, tuple(names[p] for p in parents), values)
    states = {plan.name: OBSERVATION_STATES[0] for plan in plans if plan.evidence is not None}
    by_node = {plan.node: plan for plan in plans if plan.evidence is None}
    states |= {by_node[n].name: by_node[n].states[int(v)] for n, v in observed.items() if _is_state(model, n, v)}
    return [tables[plan.name] for plan in plans], states


def _to_float64(model: GroundModel) -> GroundModel:
    """The model with parameters and values in float64."""
    return replace(
        model,
        network=model.network.to(torch.float64),
        inputs=_cast_values(model.inputs),
        do=_cast_values(model.do),
        attention_rows=_cast_values(model.attention_rows),
    )


def _cast_values(values: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """Real values in float64; states unchanged."""
    return {key: value.double() if value.is_floating_point() else value for key, value in values.items()}


def _plan_tables(
    model: GroundModel, set_states: Mapping[int, Tensor], evidence: Mapping[int, Tensor], fixed: Mapping[int, Tensor]
) -> list[_TablePlan]:
    """Plan every variable with its parents: the discrete random nodes, then observations of other nodes.

    `fixed` is the evidence on continuous nodes: their descendants do not depend on their ancestors through them.
    """
    ground = model.ground
    groups = [m.group for m in model.network.specs if m.tpm.kind == "discrete"]
    nodes = [n for group in groups for n in ground.select_nodes(group).tolist() if n not in model.do]
    if not nodes:
        kinds = sorted({type(m.tpm).__name__ for m in model.network.specs if m.tpm.is_random})
        expected = "at least one discrete random node"
        hint = f"All random nodes are continuous ({', '.join(kinds)})" if kinds else "This net has no random nodes"
        raise BNetError("discrete part", expected=expected, hint=hint)

    def find_discrete_parents(node: int) -> tuple[int, ...]:
        """The discrete random nodes on which the distribution of a node depends: its parents first, in their order."""
        slots = {parent.index: -k for k, parent in enumerate(reversed(model.spec(node).parents))}
        choices = find_open_choices(model, parents(model, node), fixed)
        return tuple(sorted(choices, key=lambda choice: (slots.get(ground.group_of(choice).index, 1), choice)))

    plans = [
        _TablePlan(n, ground.name(n), _get_state_names(model, n), () if n in set_states else find_discrete_parents(n))
        for n in nodes
    ]
    variables = set(nodes)
    for node, value in evidence.items():
        if node in variables and value.is_floating_point():
            plans.append(
                _TablePlan(node, f"{ground.name(node)}_{OBSERVATION_STATES[0]}", OBSERVATION_STATES, (node,), value)
            )
        elif node not in variables:
            plans.append(_TablePlan(node, ground.name(node), OBSERVATION_STATES, find_discrete_parents(node), value))
    return plans


def _check_table_sizes(model: GroundModel, plans: Sequence[_TablePlan], limit: int, budget: int) -> None:
    """Raise an error for tables that are too large, before any is computed."""
    hint = "Set some of its parents with do=, use a shorter sentence or fewer heads, or raise limit="
    total = 0
    for plan in plans:
        dims = 1 + len(plan.parents)
        entries = len(plan.states) * math.prod(model.count_states(parent) for parent in plan.parents)
        if dims > MAX_TABLE_DIMS or entries > limit:
            expected = f"a table of at most {MAX_TABLE_DIMS} dims and {limit:,} entries"
            raise BudgetError(
                plan.name, expected=expected, actual=f"{dims} dims and {format_count(entries)} entries", hint=hint
            )
        total += entries
    if total > limit:
        actual = f"{format_count(total)} in {len(plans)} tables"
        expected = f"at most {limit:,} entries in all tables"
        raise BudgetError("discrete part", expected=expected, actual=actual, hint="Raise limit=")
    count = sum(math.prod(model.count_states(p) for p in parents) for parents in _group_by_parents(plans))
    if count > budget:
        expected = f"at most {budget:,} runs, one for each joint state of a variable's parents"
        actual = f"{format_count(count)} runs"
        raise BudgetError("discrete part", expected=expected, actual=actual, hint="Raise runs=")


def _group_by_parents(plans: Sequence[_TablePlan]) -> dict[tuple[int, ...], list[_TablePlan]]:
    """Group variables by their parents: variables with the same parents share the runs."""
    groups: dict[tuple[int, ...], list[_TablePlan]] = {}
    for plan in plans:
        groups.setdefault(plan.parents, []).append(plan)
    return groups


def _compute_log_row(run: ReferenceRun, plan: _TablePlan, set_state: Tensor | None) -> Tensor:
    """Compute the log probability of each state, or of the evidence."""
    if plan.evidence is not None:
        if run.model.spec(plan.node).tpm.kind == "continuous":
            return run.log_prob(plan.node).reshape(1)
        same = torch.allclose(run.value(plan.node).double(), plan.evidence.double(), rtol=0, atol=ATOL)
        return torch.tensor([0.0 if same else -math.inf], dtype=torch.float64)
    states = torch.arange(len(plan.states))
    if set_state is not None:
        return torch.where(states == set_state, 0.0, -math.inf).double()
    row = run.distribution(plan.node).log_prob(states).double()
    if bool(row.isnan().any()):
        expected = "a distribution over its states"
        raise EvidenceError(plan.name, expected=expected, actual="probabilities that contain NaN")
    return row


def _build_likelihood_table(log_likelihood: NDArray[np.float64], name: str, evidence: Tensor) -> NDArray[np.float64]:
    """Compute the table of `seen` and `unseen`: the likelihood divided by its maximum, which has the same ratios."""
    top = log_likelihood.max()
    if not top > -math.inf:
        actual = f"{evidence.tolist()}, which has probability zero"
        raise EvidenceError(name, expected="evidence that is possible in some state of the net", actual=actual)
    likelihood = np.exp(log_likelihood - top)
    return np.concatenate([likelihood, 1 - likelihood])


def _get_state_names(model: GroundModel, node: int) -> tuple[str, ...]:
    """Return the names of a variable's states: its labels, the words of the vocabulary for a readout, or numbers."""
    spec, count = model.spec(node), model.count_states(node)
    labels = getattr(spec.tpm, "labels", None)
    words = model.network.vocabularies.get(spec.group.stack, ())
    is_last = spec.group.step == model.network.graph.slices.get(spec.group.stack)
    if labels is None and is_last and len(words) == count:
        labels = words
    names = tuple(map(str, range(count))) if labels is None else tuple(map(get_raw, labels))
    if len(set(names)) != count:
        expected = f"{count} different labels"
        raise BNetError(f"labels of {spec.group.name}", expected=expected, actual=labels)
    return names


def _is_state(model: GroundModel, node: int, value: Tensor) -> bool:
    """Return True for a state of a discrete random node; the matrix of an atom is not a state."""
    return model.spec(node).tpm.kind == "discrete" and not value.is_floating_point()

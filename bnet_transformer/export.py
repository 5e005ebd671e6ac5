"""Exports: a sentence or a net as something else reads it: networkx graphs, tables of pgmpy and BIF, files by suffix.

Nodes of the graphs (the folded one of a net, the ground one of a sentence or of a part of it) carry all that a picture
or a query needs (role, slice, word, kind, label, ...), so that other exports and drawings read these graphs and nothing
else.

The tables are the discrete part of a sentence's bnet, given its words. Their variables are the discrete random nodes
(selectors, atoms, words that are read, categorical readouts). A variable's parents are those that decide its
distribution, be it through deterministic nodes; its table comes from the reference. Continuous readouts are left out,
unless evidence on them is given.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer._core.torch_context import same_random
from bnet_transformer.axes import WORD, label
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError, number, one_of, whole
from bnet_transformer.files import as_path, replacing
from bnet_transformer.graph import Ground, Selection
from bnet_transformer.inference import SentenceState, arrow_weights
from bnet_transformer.network import Member, Network
from bnet_transformer.reference import ATOL, BUDGET, Run, World, choices, parents
from bnet_transformer.tpm.arrays import in_numpy

if TYPE_CHECKING:
    import networkx as nx
    from pgmpy.models import DiscreteBayesianNetwork

LIMIT = 100_000
WEIGHED = 2_000_000  # arrows of which the weak ones are sought
ENTRIES = 10_000_000  # of tables
MOST_DIMS = 64  # numpy's, so pgmpy's
SEEN = ("seen", "unseen")
HEAD = "head"
FORMAT = {"format": "bnet_transformer graph", "version": 1}

# What XML 1.0 cannot hold, the carriage return, which its readers turn into a line feed, and what looks like such JSON.
_AS_JSON = re.compile('[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|(?s:\\A".*"\\Z)')

Writers = dict[str, Callable[[], bytes]]  # by suffix, what makes the content of a file
Weights = Mapping[tuple[int, int], float]


def graph_writers(graph: Callable[[], nx.Graph]) -> Writers:
    """The formats of a graph, which is made when a file is written."""
    return {".json": lambda: to_json(graph()).encode(), ".graphml": lambda: to_graphml(graph()).encode()}


def write(path: str | os.PathLike[str], writers: Writers) -> None:
    """Write a file, whole or not at all; its suffix says how."""
    suffix = as_path(path).suffix.lower()
    if suffix not in writers:
        got = f"{suffix!r}" if suffix else "none"
        raise BNetError(f"suffix of {path}", expected="one that says how", got=got, allowed=", ".join(sorted(writers)))
    with replacing(path) as temporary:
        temporary.write_bytes(writers[suffix]())


# graphs


def folded_to_networkx(network: Network) -> nx.MultiDiGraph:
    """One node for each family (a template at a slice), one arrow for each slot that a parent fills or picks.

    Nodes: stack, role, slice, plates, kind, learnable, shape, tpm, label. Arrows: role (the parent's), slot, reach and
    pick, which maps a plate of the parent to the family whose state picks along it; that family has an arrow of its
    own, whose slot is `pick`.
    """
    import networkx as nx

    graph = nx.MultiDiGraph()
    for member in network.members:
        family = member.family
        shown = label(family.role, stack=family.stack, slice=family.slice)
        words = () if family.words is None else (WORD,)
        graph.add_node(family.name, **_common(member), plates=(*family.plates, *words), label=shown)
    families = network.graph.families
    for member in network.members:
        arrows = [
            (given.parent, given.slot, str(given.reach), {plate: families[k].name for plate, k in given.pick})
            for given in member.inputs
        ]
        selectors = dict.fromkeys(index for given in member.inputs for _, index in given.pick)
        for index, slot, reach, pick in [*arrows, *((index, "pick", "same", {}) for index in selectors)]:
            parent = families[index]
            graph.add_edge(parent.name, member.family.name, role=parent.role, slot=slot, reach=reach, pick=pick)
    return graph


def ground_to_networkx(
    network: Network,
    ground: Ground,
    *,
    selection: Selection | None = None,
    tokens: Mapping[str, Sequence[str]] | None = None,
    observed: Collection[int] = (),
    weights: Weights | None = None,
    min_weight: float | None = None,
    limit: int | None = LIMIT,
) -> nx.DiGraph:
    """The ground graph of a sentence, or what a selection keeps of it.

    Nodes: role, stack, slice, head, plates, index (along each of the plates), word, token, kind (`deterministic`,
    `stochastic`, `observed`), learnable, shape, tpm, label. Arrows: role (the parent's) and, where `weights` has one
    for `(parent, child)`, weight; those of a weight below `min_weight` are left out. `tokens` are the words of each
    stack. Past `limit` arrows, those left out not counted, it refuses with the count, before it makes any; `limit=None`
    is no limit.
    """
    selection = selection or Selection()
    weak = 0 if weights is None or min_weight is None else sum(weight < min_weight for weight in weights.values())
    check_size(ground, selection, limit, weak=weak)
    import networkx as nx

    graph = nx.DiGraph()
    for member in network.members:
        if ground.kept(member.family, selection):
            graph.add_nodes_from(_nodes(ground, member, selection, tokens or {}, observed))
    names: NDArray[np.object_] = np.array(ground.names, dtype=object)
    families = network.graph.families
    for bundle, sources, targets in ground.arrows(selection):
        role = {"role": families[bundle.parent].role}
        arrows: Any = zip(names[sources].tolist(), names[targets].tolist(), itertools.repeat(role))
        if weights is not None:
            ids = zip(sources.tolist(), targets.tolist(), strict=True)
            arrows = _weighed(arrows, map(weights.get, ids), min_weight)
        graph.add_edges_from(arrows)  # networkx copies the attributes
    return graph


def sentence_to_networkx(
    state: SentenceState,
    *,
    weights: bool = True,
    slices: int | Collection[int] | None = None,
    words: object = None,
    heads: int | Collection[int] | None = None,
    attention: bool = False,
    min_weight: float | None = None,
    limit: int | None = LIMIT,
) -> nx.DiGraph:
    """The ground graph of a sentence, or the part of it that a user asks for.

    Args:
        state: The sentence.
        weights: Whether selectors and weights are in it.
        slices: The slices that are in it; all where None.
        words: The words that are in it; all where None.
        heads: The heads that are in it; all where None.
        attention: Whether arrows carry `weight`, `P(j | i)` on average over the posterior of the open choices.
        min_weight: The least weight of an arrow that is read.
        limit: How many arrows may remain.

    Raises:
        BudgetError: More arrows than `limit` remain.
    """
    one_of("weights", weights, (True, False))
    one_of("attention", attention, (True, False))
    selection = state.selection(weights=weights, slices=slices, words=words, heads=heads)
    most = limit
    if min_weight is not None:
        if not 0.0 <= number("min_weight", min_weight) <= 1.0:
            raise BNetError("min_weight", expected="a probability from 0 to 1", got=min_weight)
        most = None if limit is None else max(whole("limit", limit, least=0), WEIGHED)
    check_size(state.ground, selection, most)  # before attention is computed: too large whatever is read
    needs_weights = attention or min_weight is not None
    weighed = arrow_weights(state.query(), state.answers, selection) if needs_weights else None
    return ground_to_networkx(
        state.network,
        state.ground,
        selection=selection,
        tokens=state.tokens,
        observed=state.evidence.keys(),
        weights=weighed,
        min_weight=min_weight,
        limit=limit,
    )


def check_size(ground: Ground, selection: Selection, limit: int | None = LIMIT, *, weak: int = 0) -> None:
    """Refuse more arrows than the limit, with the count, `weak` ones left out; no arrow is made for it."""
    if limit is None:
        return
    arrows = ground.count_arrows(selection) - weak
    if arrows > whole("limit", limit, least=0):
        raise BudgetError(
            "networkx graph",
            expected=f"at most {limit} arrows (each becomes a Python object)",
            got=f"{ground.count_nodes(selection)} nodes and {arrows} arrows",
            allowed=f"fewer slices, words or plates, or limit={arrows} (limit=None for no limit)",
        )


def drawn_kind(member: Member) -> str:
    """What figures and exported graphs call the kind of a node: observed, deterministic or stochastic."""
    return {"input": "observed", "deterministic": "deterministic"}.get(member.tpm.kind, "stochastic")


def _common(member: Member) -> dict[str, Any]:
    """The attributes that all nodes of a family share."""
    return {
        "stack": member.family.stack,
        "role": member.family.role,
        "slice": member.family.slice,
        "kind": drawn_kind(member),
        "learnable": member.learnable,
        "shape": member.shape,
        "tpm": type(member.tpm).__name__,
    }


def _nodes(
    ground: Ground, member: Member, selection: Selection, tokens: Mapping[str, Sequence[str]], observed: Collection[int]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The nodes of a family with their attributes."""
    family = member.family
    axes = ground.axes(family)
    at = axes.index(HEAD) if HEAD in axes else None
    inner = len(family.plates)
    said = None if family.words is None else tokens.get(family.words)
    common = _common(member) | {"plates": axes}
    kept = ground.indices(family, selection).values()
    ids = ground.nodes(family, selection).tolist()
    for node, index in zip(ids, itertools.product(*(axis.tolist() for axis in kept)), strict=True):
        word = index[-1] if family.words is not None else None
        token = None if said is None or word is None else said[word]
        shown = label(family.role, stack=family.stack, slice=family.slice, plates=index[:inner], word=word, token=token)
        head = None if at is None else index[at]
        own = {"index": index, "head": head, "word": word, "token": token, "label": shown}
        own["do"] = node in ground.cut or node in ground.rows
        if node in observed:
            own["kind"] = "observed"
        yield ground.names[node], common | own


def _weighed(arrows: Any, weights: Any, least: float | None) -> Iterator[tuple[Any, ...]]:
    """Arrows with the weight that they have; those of too small a weight left out."""
    for arrow, weight in zip(arrows, weights, strict=True):
        if weight is None:
            yield arrow
        elif least is None or weight >= least:
            parent, child, attributes = arrow
            yield parent, child, {**attributes, "weight": float(weight)}


def to_json(graph: nx.Graph) -> str:
    """Node-link JSON, which networkx reads back as the same graph, but for lists in place of tuples.

    Raises:
        BNetError: A weight is no finite number.

    >>> import networkx as nx
    >>> g = nx.DiGraph([("x_0_0", "q_0_0", {"role": "x", "weight": 0.5})])
    >>> nx.utils.graphs_equal(nx.node_link_graph(json.loads(to_json(g)), edges="edges"), g)
    True
    """
    import networkx as nx

    try:
        return json.dumps(FORMAT | nx.node_link_data(graph, edges="edges"), allow_nan=False)
    except ValueError as error:
        raise BNetError("graph", expected="finite numbers", got=str(error)) from error


def to_graphml(graph: nx.Graph) -> str:
    """GraphML. What it has no type for is JSON in a string: tuples and mappings, strings with characters that XML
    forbids and, to be told from these, strings in double quotes. Attributes that are None are left out.
    """
    import networkx as nx

    plain = graph.copy()
    for *_, data in (*plain.nodes(data=True), *plain.edges(data=True)):
        told = _xml(data)
        data.clear()
        data.update(told)
    header = '<?xml version="1.0" encoding="utf-8"?>'
    return "\n".join([header, *nx.generate_graphml(plain, encoding="utf-8")]) + "\n"


def _xml(data: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in data.items():
        if isinstance(value, bool | int | float) or (isinstance(value, str) and not _AS_JSON.search(value)):
            found[key] = value
        elif value is not None:
            found[key] = json.dumps(value)
    return found


# the discrete part


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


@same_random()
def to_pgmpy(
    world: World, *, evidence: Mapping[int, Tensor] | None = None, limit: int = ENTRIES, runs: int = BUDGET
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
    world: World, *, evidence: Mapping[int, Tensor] | None = None, limit: int = ENTRIES, runs: int = BUDGET
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
    world: World, *, evidence: Mapping[int, Tensor] | None = None, limit: int = ENTRIES, runs: int = BUDGET
) -> tuple[list[Table], dict[str, str]]:
    """The tables of the discrete part, and the evidence as the state of each variable that has some."""
    seen = dict(evidence or {})
    chosen = {n: v for n, v in world.do.items() if _is_state(world, n, v)}
    free = replace(world, do={n: v for n, v in world.do.items() if n not in chosen})
    known = {n: v for n, v in seen.items() if world.member(n).tpm.kind == "continuous"}
    plans = _plans(free, chosen, seen, known)
    _count(free, plans, whole("limit", limit), whole("runs", runs))
    names = {plan.node: plan.name for plan in plans if plan.seen is None}
    tables = {}
    with torch.no_grad():
        for parents, group in _grouped(plans).items():
            sizes = [free.count_states(parent) for parent in parents]
            each_run = reference.runs(free, list(parents), known, runs)
            logs = [[_row(run, plan, chosen.get(plan.node)) for plan in group] for run in each_run]
            for plan, rows in zip(group, zip(*logs, strict=True), strict=True):
                table = np.moveaxis(in_numpy(torch.stack(rows).reshape(*sizes, -1)), -1, 0)
                values = _likelihood(table, plan.name, plan.seen) if plan.seen is not None else np.exp(table)
                tables[plan.name] = Table(plan.name, plan.states, tuple(names[p] for p in parents), values)
    states = {plan.name: SEEN[0] for plan in plans if plan.seen is not None}
    by_node = {plan.node: plan for plan in plans if plan.seen is None}
    states |= {by_node[n].name: by_node[n].states[int(v)] for n, v in seen.items() if _is_state(world, n, v)}
    return [tables[plan.name] for plan in plans], states


def _plans(
    world: World, chosen: Mapping[int, Tensor], seen: Mapping[int, Tensor], known: Mapping[int, Tensor]
) -> list[_Plan]:
    """Every variable with its parents: the discrete random nodes, then what evidence says of other nodes.

    `known` is the evidence on continuous nodes, which settles what is below them.
    """
    ground = world.ground
    families = [m.family for m in world.network.members if m.tpm.kind == "discrete"]
    nodes = [n for family in families for n in ground.nodes(family).tolist() if n not in world.do]
    if not nodes:
        kinds = sorted({type(m.tpm).__name__ for m in world.network.members if m.tpm.is_random})
        got = f"none ({', '.join(kinds)} {'is' if len(kinds) == 1 else 'are'} continuous)" if kinds else "none"
        raise BNetError("discrete part", expected="at least one discrete random node", got=got)

    def above(node: int) -> tuple[int, ...]:
        """The discrete random nodes that decide the distribution of a node."""
        return tuple(choices(world, parents(world, node), known))

    plans = [_Plan(n, ground.name(n), _states(world, n), () if n in chosen else above(n)) for n in nodes]
    variables = set(nodes)
    for node, value in seen.items():
        if node in variables and value.is_floating_point():
            plans.append(_Plan(node, f"{ground.name(node)}_{SEEN[0]}", SEEN, (node,), value))
        elif node not in variables:
            plans.append(_Plan(node, ground.name(node), SEEN, above(node), value))
    return plans


def _count(world: World, plans: Sequence[_Plan], limit: int, budget: int) -> None:
    """Refuse tables that are too large, before any is made."""
    ways = "do on some of its parents to a value, a shorter sentence, fewer heads, or limit="
    total = 0
    for plan in plans:
        dims = 1 + len(plan.parents)
        entries = len(plan.states) * math.prod(world.count_states(parent) for parent in plan.parents)
        if dims > MOST_DIMS or entries > limit:
            wanted = f"a table of at most {MOST_DIMS} dims and {limit} entries"
            raise BudgetError(plan.name, expected=wanted, got=f"{dims} dims and {_said(entries)} entries", allowed=ways)
        total += entries
    if total > limit:
        got = f"{_said(total)} in {len(plans)} tables"
        raise BudgetError("discrete part", expected=f"at most {limit} entries in all", got=got, allowed="limit=")
    count = sum(math.prod(world.count_states(p) for p in parents) for parents in _grouped(plans))
    if count > budget:
        wanted = f"at most {budget} runs of the reference, one for each joint state of a variable's parents"
        raise BudgetError("discrete part", expected=wanted, got=f"{_said(count)} runs", allowed=f"runs={count}")


def _said(count: int) -> str:
    return str(count) if count < 10**15 else f"some 2^{count.bit_length() - 1}"


def _grouped(plans: Sequence[_Plan]) -> dict[tuple[int, ...], list[_Plan]]:
    """Variables of the same parents share the runs."""
    groups: dict[tuple[int, ...], list[_Plan]] = {}
    for plan in plans:
        groups.setdefault(plan.parents, []).append(plan)
    return groups


def _row(run: Run, plan: _Plan, chosen: Tensor | None) -> Tensor:
    """The log probability of each state, or of what is seen."""
    if plan.seen is not None:
        if run.world.member(plan.node).tpm.kind == "continuous":
            return run.log_prob(plan.node).reshape(1)
        same = torch.allclose(run.value(plan.node).double(), plan.seen.double(), rtol=0, atol=ATOL)
        return torch.tensor([0.0 if same else -math.inf], dtype=torch.float64)
    states = torch.arange(len(plan.states))
    if chosen is not None:
        return torch.where(states == chosen, 0.0, -math.inf).double()
    row = run.distribution(plan.node).log_prob(states).double()
    if bool(row.isnan().any()):
        raise EvidenceError(plan.name, expected="a distribution over its states", got="probabilities that are NaN")
    return row


def _likelihood(table: NDArray[np.float64], name: str, told: Tensor) -> NDArray[np.float64]:
    """Seen and unseen from a log likelihood: over the greatest, so that both are probabilities."""
    top = table.max()
    if not top > -math.inf:
        got = f"{told.tolist()}, of probability zero"
        raise EvidenceError(name, expected="evidence that some state of the net makes possible", got=got)
    seen = np.exp(table - top)
    return np.concatenate([seen, 1 - seen])


def _states(world: World, node: int) -> tuple[str, ...]:
    """The names of a variable's states: its labels, the words of the vocabulary for a readout of words, or numbers."""
    member, count = world.member(node), world.count_states(node)
    labels = getattr(member.tpm, "labels", None)
    words = world.network.vocabularies.get(member.family.stack, ())
    is_last = member.family.step == world.network.graph.slices.get(member.family.stack)
    if labels is None and is_last and len(words) == count:
        labels = words
    names = tuple(map(state_name, map(str, labels))) if labels is not None else tuple(map(str, range(count)))
    if len(set(names)) != count:
        raise BNetError(f"labels of {member.family.name}", expected=f"{count} different ones", got=labels)
    return names


def _is_state(world: World, node: int, value: Tensor) -> bool:
    """True for a value that is a state of a discrete random node, and not an atom by its matrix."""
    return world.member(node).tpm.kind == "discrete" and not value.is_floating_point()

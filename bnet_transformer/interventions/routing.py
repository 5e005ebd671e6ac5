"""Routing of cells: which cells of a sweep share one compiled run, and why others run one at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer._core.naming import WORD
from bnet_transformer._core.tensors import BoolArray, IntArray
from bnet_transformer.compiler.gather import build_request
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError, format_count
from bnet_transformer.inference.plan import Obstacle, find_mixed_type_fault
from bnet_transformer.inference.posteriors import plan_joint
from bnet_transformer.inference.query import Query, enumerate_joint_states
from bnet_transformer.interventions.cells import PatchCells, PatchSites
from bnet_transformer.interventions.examples import Examples
from bnet_transformer.interventions.patched_run import NeededPositions, find_changed_positions
from bnet_transformer.reference import (
    BUDGET,
    GroundModel,
    evaluation_order,
    find_open_choices,
    has_ancestor_choices,
    locate_node,
)

# --------------------------------------------------------------------------------------------------------------------
# Latent choices that are ancestors of the patched nodes or of the outcomes.
#
# They have the same state in both runs of a sweep, and outcomes are averaged over their joint states.


@dataclass(frozen=True)
class EnumeratedChoices:
    """Latent choices that depend on no value (a selector, atoms), and all their joint states, `[state, node]`.

    Args:
        nodes: Ground ids of the choices.
        states: Their joint states, `[state, node]`.
        examples: The sentences, which give the probabilities of the states.
    """

    nodes: tuple[int, ...]
    states: Tensor
    examples: Examples = field(repr=False)

    @cached_property
    def log_probs(self) -> Tensor:
        """The log probability of each joint state in each example, `[state, example]`."""
        module, nodes = self.examples.module, self.nodes
        columns = [plan_joint(Query(module, model, nodes=nodes)).run() for model in self.examples.models]
        return torch.stack(columns, -1)

    def __iter__(self) -> Iterator[dict[int, Tensor]]:
        for row in self.states:
            yield dict(zip(self.nodes, row.unbind(), strict=True))

    def marginalize(self, outcomes: Sequence[Tensor], *, is_discrete: bool) -> Tensor:
        """Average an outcome over the joint states.

        Args:
            outcomes: The outcome in each joint state, `[cell, example, *shape]` each.
            is_discrete: Whether outcomes are log probabilities; then the probabilities are averaged.

        Returns:
            The mean, or the log of the mean probabilities, `[cell, example, *shape]`.
        """
        if not self.nodes:
            return outcomes[0]
        stacked = torch.stack(list(outcomes))
        log_probs = self.log_probs.to(stacked.dtype).reshape(len(stacked), 1, -1, *[1] * (stacked.dim() - 3))
        return (stacked + log_probs).logsumexp(0) if is_discrete else (stacked * log_probs.exp()).sum(0)


def enumerate_choices(
    source: Examples | None,
    base: Examples,
    nodes: Sequence[int],
    outcome_nodes: Sequence[int],
    side_names: tuple[str, str] = ("clean", "corrupt"),
) -> EnumeratedChoices:
    """Find the latent choices of either run that depend on no value, and are therefore enumerated.

    Args:
        source: The examples that provide values; None for an ablation.
        base: The examples that are patched, with equal lengths.
        nodes: Ground ids of the nodes that cells set, or read.
        outcome_nodes: Ground ids of the nodes that the metric reads.
        side_names: The names of both sides in errors.

    Returns:
        The ancestral choices of these nodes, with all their joint states.

    Raises:
        BudgetError: There are more joint states than the budget.
        EvidenceError: A choice is set in one run only.
    """
    choices: set[int] = set()
    for examples in (base,) if source is None else (source, base):
        model = examples.model
        queried = [*nodes]
        for node in outcome_nodes:  # the outcome of a random node is a function of its parents
            is_random = locate_node(model, node)[0].tpm.is_random and node not in model.do
            queried += reference.parents(model, node) if is_random else [node]
        groups = {*np.unique(np.searchsorted(model.ground.offsets, queried, side="right") - 1).tolist()}
        has_discrete = any(model.network.specs[index].tpm.kind == "discrete" for index in groups)
        if not has_discrete and not has_ancestor_choices(model.network, groups):
            continue  # a fast test on groups, before the search over nodes
        choices |= {node for node in find_open_choices(model, queried, {}) if not _is_value_dependent(model, node)}
    open_choices = sorted(choices)
    model = base.model
    for node in choices.intersection(outcome_nodes):
        name = model.ground.name(node)
        expected = "a node that depends on the patched nodes"
        raise BNetError(f"metric of {name}", expected=expected, actual="a choice with the same state in both runs")
    count = math.prod(model.count_states(node) for node in open_choices)
    if count > BUDGET:
        raise BudgetError(
            "sweep",
            expected=f"at most {BUDGET:,} joint states of the latent choices",
            actual=format_count(count),
            hint="Set some of them by do: " + ", ".join(map(model.ground.name, open_choices[:6])),
        )
    for node in open_choices:
        if node in model.do:
            name = model.ground.name(node)
            hint = f"Set it also in the {side_names[0]} sentences by do({name}=...)"
            raise EvidenceError(f"{name} is set in the {side_names[1]} sentences only", hint=hint)
    states = enumerate_joint_states([range(model.count_states(node)) for node in open_choices])
    return EnumeratedChoices(tuple(open_choices), states, base)


def _is_value_dependent(model: GroundModel, node: int) -> bool:
    """True if the distribution of a choice depends on values, not only on other choices."""
    ancestors = [model.spec(ancestor) for ancestor in evaluation_order(model, node, {}, {}) if ancestor != node]
    return any(m.tpm.kind == "input" or (m.tpm.kind != "discrete" and m.parents) for m in ancestors)


# --------------------------------------------------------------------------------------------------------------------
# Routing of cells: which cells of a sweep share one compiled run, and why others run one at a time.
#
# The decision is made before any value is computed. Cells share one compiled run, in which only the values that a cell
# changes are computed again (`patched_run`). A cell has a separate run (`engine`) if a rule below applies. The
# reported reason is the first rule that applies.
#
# | obstacle | cells that run one at a time |
# |---|---|
# | a continuous random ancestor of the metric without a value | all |
# | a latent ancestor of the metric that is not enumerated: it depends on values, or belongs to other words | all |
# | such a node or choice, as an ancestor of the nodes that a cell patches | those cells |
# | nodes of one group set to states and to vectors | all |
# | recurrent words that the cell changes | those cells |
# | a word picked by a choice, or a row of attention set by `do`, in a group that the cell changes | those cells |
# | rows of attention of a group of which `do` sets a node | those cells |
# | a selector that the cell changes | those cells |


MAX_TABLE_ENTRIES = 2**24  # entries of all tables of changed words at once

# Sentences in which the enumerated choices are set, and the words that affect an outcome.
PreparedExamples = tuple[Examples, NeededPositions]


def find_shared_obstacle(sides: Sequence[PreparedExamples]) -> Obstacle | None:
    """The obstacle to a shared run of all cells; None if one compiled run computes the metric."""
    for examples, needed in sides:
        outcomes = {examples.model.ground.group_of(node).index for node in needed.outcome_nodes}
        obstacle = find_run_obstacle(examples, {*needed.ancestor_words, *outcomes})
        if obstacle is not None:
            return obstacle
    return None


def find_obstacles(
    sides: Sequence[PreparedExamples], cells: PatchCells, *, is_exact: bool = True
) -> tuple[dict[int, Obstacle], dict[int, Obstacle]]:
    """Find the cells that require a separate run, for one batch of examples.

    Args:
        sides: The base sentences, and the source sentences if there are any.
        cells: What each cell sets.
        is_exact: Whether cells are run; of estimates only the nodes that cells set matter.

    Returns:
        Two mappings from cells to obstacles. The first has the obstacles to a shared run that provides the values of a
        cell. The second has the obstacles to a shared run that computes the changes of a cell; these do not matter for
        a cell that changes no value.
    """
    base, needed = sides[0]
    model = base.model
    obstacles: dict[int, Obstacle] = {}
    sources = find_source_groups(model, cells)
    if any(find_run_obstacle(examples, sources) is not None for examples, _ in sides):
        for cell_ids, groups in _iter_source_groups(model, cells):
            for obstacle in (find_run_obstacle(examples, groups) for examples, _ in sides):
                if obstacle is not None:
                    obstacles |= dict.fromkeys(cell_ids, obstacle)
    for sites, (examples, _) in itertools.product(cells.sites, reversed(sides)):
        ground = examples.model.ground
        set_nodes = (
            [*ground.get_cut_nodes(sites.group), *ground.get_partly_cut_nodes(sites.group)]
            if sites.is_attention
            else []
        )
        if set_nodes:  # rows with cut nodes cannot be read, or set, as one tensor
            name = ground.name(set_nodes[0])
            obstacles |= dict.fromkeys(sites.cells.tolist(), Obstacle(name, f"{name} is set by do"))
    return obstacles, _find_update_obstacles(model, needed, cells, is_exact=is_exact)


def find_set_groups(model: GroundModel, cells: PatchCells) -> set[int]:
    """The groups whose nodes cells set: those of sites, and the last ones of paths."""
    last_nodes = {path.nodes[-1] for path in cells.paths}
    groups = {sites.group for sites in cells.sites} | {model.ground.group_of(node).index for node in last_nodes}
    return groups if cells.edges is None else groups | cells.edges.targets


def find_source_groups(model: GroundModel, cells: PatchCells) -> set[int]:
    """The groups whose values a run provides for cells: the groups that cells set, and those on paths, with parents."""
    return set().union(*(groups for _, groups in _iter_source_groups(model, cells)))


def find_score_parents(model: GroundModel, sites: Iterable[PatchSites]) -> set[int]:
    """The parents of the groups whose scores cells set, from which the scores are computed."""
    edges = model.network.graph.in_edges
    return {edge.parent for part in sites if part.is_score for edge in edges[part.group]}


def _iter_source_groups(model: GroundModel, cells: PatchCells) -> Iterator[tuple[list[int], set[int]]]:
    """Yield sets of cells, with the node groups whose values a run provides for them."""
    for sites in cells.sites:
        yield sites.cells.tolist(), {sites.group, *find_score_parents(model, [sites])}
    if cells.edges is not None:
        yield cells.edges.cells.tolist(), {*cells.edges.source_groups}
    nodes = {node for path in cells.paths for node in path.nodes}
    group_of = {node: model.ground.group_of(node).index for node in nodes}
    by_groups: dict[frozenset[int], list[int]] = {}
    for path in cells.paths:
        by_groups.setdefault(frozenset(group_of[node] for node in path.nodes), []).append(path.cell)
    for groups, cell_ids in by_groups.items():
        parents = {edge.parent for index in groups for edge in model.network.graph.in_edges[index]}
        yield cell_ids, {*groups, *parents}


def find_run_obstacle(examples: Examples, groups: Collection[int]) -> Obstacle | None:
    """The obstacle to computing the values (or distributions) of node groups in one compiled run; None if it can."""
    model, graph = examples.model, examples.model.network.graph
    ancestors = {*groups, *graph.ancestors(groups)}
    mixed = find_mixed_type_fault(model, model.do, relevant=ancestors)
    if mixed is not None:
        return mixed
    needs = examples.module.find_requirements(build_request(model, tuple(sorted(groups)), ancestors).structure)
    if needs.enumerated:
        name = graph.groups[min(needs.enumerated)].name
        return Obstacle(name, f"{name} is a latent choice that the sweep does not enumerate", f"set {name} by do")
    if needs.fault is not None:
        return Obstacle(needs.fault.node, needs.fault.reason, needs.fault.remedy)
    return None


def _find_update_obstacles(
    model: GroundModel, needed: NeededPositions, cells: PatchCells, *, is_exact: bool
) -> dict[int, Obstacle]:
    """The obstacles to computing the changes of cells in one run, from the words that change in each group."""
    network = model.network
    attention_groups = {sites.group for sites in cells.sites if sites.is_attention}
    suspects = {
        spec.group.index: spec
        for spec in (network.specs[index] for index in sorted(needed.ancestor_words))
        if spec.group.index in network.graph.recurrent
        or any(parent.pick for parent in spec.parents)
        or model.ground.get_partly_cut_nodes(spec.group.index)
    }
    if not suspects:
        return {}
    obstacles: dict[int, Obstacle] = {}
    for cell_ids, set_words in iter_patched_words(model, needed, cells):
        if is_exact:
            changed = find_changed_positions(model, needed, set_words, len(cell_ids))
        else:
            masked = {index: table & needed.ancestor_words[index] for index, table in set_words.items()}
            changed = {index: (np.zeros_like(table), table) for index, table in masked.items()}
        for index, spec in suspects.items():
            group, marked = spec.group, list[tuple[Obstacle, BoolArray]]()
            for selector in {selector for parent in spec.parents for _, selector in parent.pick}:
                if selector in changed:
                    name = network.graph.groups[selector].name
                    reason = f"the cell changes the selector {name} of {group.name}"
                    marked.append((Obstacle(name, reason), changed[selector][1]))
            if index in changed:
                descends, updated = changed[index]
                if index in attention_groups:  # the attention of its words is computed in each cell
                    descends = updated
                if any(axis == WORD for parent in spec.parents for axis, _ in parent.pick):
                    marked.append((Obstacle(group.name, f"a choice picks the word that {group.name} reads"), descends))
                if model.ground.get_partly_cut_nodes(index):
                    marked.append((Obstacle(group.name, f"do sets rows of attention of {group.name}"), descends))
                if index in network.graph.recurrent:
                    marked.append((Obstacle(group.name, f"{group.name} is computed word by word"), updated))
            for obstacle, table in marked:
                for cell in cell_ids[np.any(table, axis=-1)].tolist():
                    obstacles.setdefault(cell, obstacle)
    return obstacles


def iter_patched_words(
    model: GroundModel, needed: NeededPositions, cells: PatchCells
) -> Iterator[tuple[IntArray, dict[int, BoolArray]]]:
    """Yield chunks of cells that fit in memory, with the mask `[cell, word]` of their words in each group."""
    all_ids, ground = cells.cell_ids, model.ground
    patched: list[tuple[int, IntArray, IntArray]] = [(sites.group, sites.cells, sites.nodes) for sites in cells.sites]
    for path in cells.paths:
        group = ground.group_of(path.nodes[-1]).index
        patched.append((group, np.array([path.cell]), np.array([path.nodes[-1] - int(ground.offsets[group])])))
    if cells.edges is not None:
        patched += cells.edges.list_target_words({i: len(words) for i, words in needed.ancestor_words.items()})
    size = max(1, MAX_TABLE_ENTRIES // max(1, sum(map(len, needed.ancestor_words.values()))))
    for start in range(0, len(all_ids), size):
        cell_ids, tables = all_ids[start : start + size], dict[int, BoolArray]()
        for index, cell, node in patched:
            inside = (cell >= cell_ids[0]) & (cell <= cell_ids[-1])
            if index in needed.ancestor_words and inside.any():
                words = len(needed.ancestor_words[index])
                table = tables.setdefault(index, np.zeros((len(cell_ids), words), dtype=np.bool_))
                table[np.searchsorted(cell_ids, cell[inside]), node[inside] % words] = True
        yield cell_ids, tables


def find_relevant_cells(model: GroundModel, needed: NeededPositions, cells: PatchCells) -> set[int]:
    """The cells that set a node on which the metric depends."""
    relevant = set[int]()
    for cell_ids, set_words in iter_patched_words(model, needed, cells):
        for index, table in set_words.items():
            relevant.update(cell_ids[np.any(table & needed.ancestor_words[index], axis=-1)].tolist())
    return relevant

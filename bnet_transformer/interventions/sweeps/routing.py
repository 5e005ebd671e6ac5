"""Which cells of a sweep are computed together, and why others run alone: decided before any value is computed.

All cells share one compiled run, and of each cell only the values that change are computed again (`patched_run`). A
cell runs alone (`sequential`) where a rule below forbids that. The first rule that applies is the reason that is given.

| what | the cells that run alone |
|---|---|
| an open real random node above the metric | all |
| an open choice above the metric that is not enumerated: values decide it, or it is of other words | all |
| the same above the nodes that a cell takes its values from | those cells |
| nodes of one family set to states and to tensors | all |
| words that are computed one after another and that the cell changes | those cells |
| a word picked by a choice, or a row of attention set by `do`, in a family that the cell changes | those cells |
| rows of attention of a family of which `do` set a node | those cells |
| a selector that the cell changes | those cells |
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from bnet_transformer._core.naming import WORD
from bnet_transformer.inference.query import find_set_groups
from bnet_transformer.inference.routing import Obstacle, find_mixed_type_fault
from bnet_transformer.interventions.sweeps.cell_spec import IntArray, PatchCells
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.interventions.sweeps.sparse_update import BoolArray, NeededPositions, find_changed_positions
from bnet_transformer.reference import GroundModel

MAX_TABLE_ENTRIES = 2**24  # entries of the tables of changed words at once
RECURRENT_REASON = "computed one word after another"
OPEN_CHOICE_REASON = "an open choice that the sweep does not enumerate"


PreparedExamples = tuple[
    Examples, NeededPositions
]  # sentences in which the choices are set, and the words that lead to an outcome


def find_shared_obstacle(sides: Sequence[PreparedExamples]) -> Obstacle | None:
    """Why no cell is computed together with others; None where one compiled run answers for the metric."""
    for examples, needed in sides:
        outcomes = {examples.model.ground.group_of(node).index for node in needed.outcome_nodes}
        obstacle = find_run_obstacle(examples, {*needed.ancestor_words, *outcomes})
        if obstacle is not None:
            return obstacle
    return None


def find_obstacles(
    sides: Sequence[PreparedExamples], cells: PatchCells, *, first_order: bool = False
) -> tuple[dict[int, Obstacle], dict[int, Obstacle]]:
    """Apply the rules that forbid single cells to one batch of examples.

    Args:
        sides: The corrupt sentences, then the clean ones if there are any.
        cells: What each cell sets.
        first_order: True where no cell runs, so that only the nodes that cells set matter.

    Returns:
        Why a cell cannot take its values from a common run, of each that cannot; and why what a cell changes is not
        computed with others, which is no obstacle to one that sets nothing to another value.
    """
    corrupt, needed = sides[0]
    world = corrupt.model
    found: dict[int, Obstacle] = {}
    sources = find_source_groups(world, cells)
    if any(find_run_obstacle(examples, sources) is not None for examples, _ in sides):
        for numbers, families in _iter_source_groups(world, cells):
            for obstacle in (find_run_obstacle(examples, families) for examples, _ in sides):
                if obstacle is not None:
                    found |= dict.fromkeys(numbers, obstacle)
    for entries, (examples, _) in itertools.product(cells.sites, reversed(sides)):
        ground = examples.model.ground
        done = (
            [*ground.get_cut_nodes(entries.group), *ground.get_partly_cut_nodes(entries.group)]
            if entries.is_attention
            else []
        )
        if done:  # such rows are neither taken from a run, nor set in one, all at once
            found |= dict.fromkeys(entries.cells.tolist(), Obstacle(ground.name(done[0]), "set by do()"))
    return found, _find_update_obstacles(world, needed, cells, first_order=first_order)


def find_source_groups(model: GroundModel, cells: PatchCells) -> set[int]:
    """The families whose values cells take from a run: those that they set, those along paths and their parents."""
    return set().union(*(families for _, families in _iter_source_groups(model, cells)))


def _iter_source_groups(model: GroundModel, cells: PatchCells) -> Iterator[tuple[list[int], set[int]]]:
    """For groups of cells, the families whose values they take from a run."""
    for entries in cells.sites:
        yield entries.cells.tolist(), {entries.group}
    nodes = {node for path in cells.paths for node in path.nodes}
    family_of = {node: model.ground.group_of(node).index for node in nodes}
    by_families: dict[frozenset[int], list[int]] = {}
    for path in cells.paths:
        by_families.setdefault(frozenset(family_of[node] for node in path.nodes), []).append(path.cell)
    for families, numbers in by_families.items():
        above = {bundle.parent for index in families for bundle in model.network.graph.in_edges[index]}
        yield numbers, {*families, *above}


def find_run_obstacle(examples: Examples, groups: Collection[int]) -> Obstacle | None:
    """Why one compiled run does not compute the values of families (of random ones their distribution)."""
    world, graph = examples.model, examples.model.network.graph
    above = {*groups, *graph.ancestors(groups)}
    mixed = find_mixed_type_fault(world, world.do, relevant=above)
    if mixed is not None:
        return mixed
    known, patched = ([graph.by_name[name].index for name in names] for names in find_set_groups(world, above))
    want = [graph.groups[index].name for index in sorted(groups)]
    needs = examples.module.find_requirements(want, known, patched=patched)
    if needs.enumerated:
        return Obstacle(graph.groups[min(needs.enumerated)].name, OPEN_CHOICE_REASON)
    if needs.fault is not None:
        return Obstacle(needs.fault.subject, f"without {needs.fault.expected}")
    return None


def _find_update_obstacles(
    model: GroundModel, needed: NeededPositions, cells: PatchCells, *, first_order: bool
) -> dict[int, Obstacle]:
    """Why what cells change is not computed with others, from the words that change in each family."""
    network = model.network
    rows = {entries.group for entries in cells.sites if entries.is_attention}
    suspects = {
        member.group.index: member
        for member in (network.specs[index] for index in sorted(needed.ancestor_words))
        if member.group.index in network.graph.recurrent
        or any(given.pick for given in member.parents)
        or model.ground.get_partly_cut_nodes(member.group.index)
    }
    if not suspects:
        return {}
    obstacles: dict[int, Obstacle] = {}
    for numbers, set_words in iter_patched_words(model, needed, cells):
        changed = find_changed_positions(model, needed, set_words, len(numbers))
        for index, member in suspects.items():
            family, marked = member.group, list[tuple[Obstacle, BoolArray]]()
            for selector in {selector for given in member.parents for _, selector in given.pick}:
                if selector in changed and not first_order:
                    reason = f"a selector that changes, by which {family.name} picks"
                    marked.append((Obstacle(network.graph.groups[selector].name, reason), changed[selector][1]))
            if index in changed:
                descends, both = changed[index]
                if first_order:
                    descends, both = np.zeros_like(descends), set_words.get(index, np.zeros_like(both))
                if index in rows:  # the weights of its words are computed in each cell
                    descends = both
                if any(axis == WORD for given in member.parents for axis, _ in given.pick):
                    marked.append((Obstacle(family.name, "picked by a choice of a word"), descends))
                if model.ground.get_partly_cut_nodes(index):
                    marked.append((Obstacle(family.name, "mixed by rows of attention that do() set"), descends))
                if index in network.graph.recurrent:
                    marked.append((Obstacle(family.name, RECURRENT_REASON), both))
            for obstacle, table in marked:
                for cell in numbers[np.any(table, axis=-1)].tolist():
                    obstacles.setdefault(cell, obstacle)
    return obstacles


def iter_patched_words(
    model: GroundModel, needed: NeededPositions, cells: PatchCells
) -> Iterator[tuple[IntArray, dict[int, BoolArray]]]:
    """The words of each family that cells set, `[cell, word]`, for as many cells at a time as memory holds."""
    there, ground = cells.cell_ids, model.ground
    sets: list[tuple[int, IntArray, IntArray]] = [
        (entries.group, entries.cells, entries.nodes) for entries in cells.sites
    ]
    for path in cells.paths:
        family = ground.group_of(path.nodes[-1]).index
        sets.append((family, np.array([path.cell]), np.array([path.nodes[-1] - int(ground.offsets[family])])))
    size = max(1, MAX_TABLE_ENTRIES // max(1, sum(map(len, needed.ancestor_words.values()))))
    for start in range(0, len(there), size):
        numbers, tables = there[start : start + size], dict[int, BoolArray]()
        for index, cell, node in sets:
            inside = (cell >= numbers[0]) & (cell <= numbers[-1])
            if index in needed.ancestor_words and inside.any():
                words = len(needed.ancestor_words[index])
                table = tables.setdefault(index, np.zeros((len(numbers), words), dtype=np.bool_))
                table[np.searchsorted(numbers, cell[inside]), node[inside] % words] = True
        yield numbers, tables

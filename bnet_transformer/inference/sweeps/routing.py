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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bnet_transformer.axes import WORD
from bnet_transformer.cost import cost
from bnet_transformer.inference.query import mixed_fault, set_families
from bnet_transformer.inference.route import Obstacle, Route
from bnet_transformer.inference.sweeps.cell_spec import Cells, Ids
from bnet_transformer.inference.sweeps.examples import Examples
from bnet_transformer.inference.sweeps.needed_positions import (
    NeededPositions,
    Table,
    count_words,
    find_changed_positions,
)
from bnet_transformer.inference.sweeps.sparse_update import is_wordwise
from bnet_transformer.network import Member
from bnet_transformer.world import World

CHUNK = 2**24  # entries of the tables of changed words at once
ONE_AFTER_ANOTHER = "computed one word after another"
OPEN_CHOICES = "an open choice that the sweep does not enumerate"


@dataclass(frozen=True)
class Obstacles:
    """Why cells run alone.

    Args:
        everywhere: Why all do; None where one compiled run answers for the metric.
        sources: Of the cells for whose values there is no compiled run, why.
        changes: Of the cells for which what they change cannot be computed with others, why. Of these, cells that set
            nodes to the values that they have anyway change nothing, so they need not run.
    """

    everywhere: Obstacle | None = None
    sources: Mapping[int, Obstacle] = field(default_factory=dict)
    changes: Mapping[int, Obstacle] = field(default_factory=dict)

    def of_cells(self, cells: Cells) -> dict[int, Obstacle]:
        """The obstacle of each cell that has one."""
        if self.everywhere is not None:
            return dict.fromkeys(cells.there.tolist(), self.everywhere)
        return {**self.changes, **self.sources}


def find_obstacles(
    sides: Sequence[tuple[Examples, NeededPositions]], cells: Cells, *, first_order: bool = False
) -> Obstacles:
    """Apply the rules to one batch of examples.

    Args:
        sides: The corrupt sentences, then the clean ones if there are any, each with the words that lead to an outcome.
            The choices that the outcomes are averaged over are set in them.
        cells: What each cell sets.
        first_order: True where no cell runs, so that only the nodes that cells set matter.
    """
    corrupt, needed = sides[0]
    world = corrupt.world
    for examples, positions in sides:
        outcomes = {world.ground.family_of(node).index for node in positions.outcomes}
        everywhere = find_obstacle_of_a_run(examples, {*positions.leads, *outcomes})
        if everywhere is not None:
            return Obstacles(everywhere)
    sources = sources_of(world, cells)
    without_source: dict[int, Obstacle] = {}
    if any(find_obstacle_of_a_run(examples, sources) is not None for examples, _ in sides):
        for numbers, families in _sources_by_cells(world, cells):
            for obstacle in (find_obstacle_of_a_run(examples, families) for examples, _ in sides):
                if obstacle is not None:
                    without_source |= dict.fromkeys(numbers, obstacle)
    for entries, (examples, _) in itertools.product(cells.entries, reversed(sides)):
        ground = examples.world.ground
        done = [*ground.cut_in(entries.family), *ground.rows_in(entries.family)] if entries.rows else []
        if done:  # such rows are neither taken from a run, nor set in one, all at once
            obstacle = Obstacle(ground.name(done[0]), "set by do()")
            without_source |= dict.fromkeys(entries.cell.tolist(), obstacle)
    return Obstacles(None, without_source, _obstacles_of_changes(world, needed, cells, first_order=first_order))


def sources_of(world: World, cells: Cells) -> set[int]:
    """The families whose values cells take from a run: those that they set, those along paths and their parents."""
    return set().union(*(families for _, families in _sources_by_cells(world, cells)))


def _sources_by_cells(world: World, cells: Cells) -> Iterator[tuple[list[int], set[int]]]:
    """For groups of cells, the families whose values they take from a run."""
    for entries in cells.entries:
        yield entries.cell.tolist(), {entries.family}
    nodes = {node for path in cells.paths for node in path.nodes}
    family_of = {node: world.ground.family_of(node).index for node in nodes}
    by_families: dict[frozenset[int], list[int]] = {}
    for path in cells.paths:
        by_families.setdefault(frozenset(family_of[node] for node in path.nodes), []).append(path.cell)
    for families, numbers in by_families.items():
        above = {bundle.parent for index in families for bundle in world.network.graph.into[index]}
        yield numbers, {*families, *above}


def find_obstacle_of_a_run(examples: Examples, families: Collection[int]) -> Obstacle | None:
    """Why one compiled run does not compute the values of families (of random ones their distribution)."""
    world, graph = examples.world, examples.world.network.graph
    above = {*families, *graph.ancestors(families)}
    mixed = mixed_fault(world, world.do, above=above)
    if mixed is not None:
        return mixed
    known, patched = ([graph.by_name[name].index for name in names] for names in set_families(world, above))
    want = [graph.families[index].name for index in sorted(families)]
    needs = examples.module.find_needs(want, known, patched=patched)
    if needs.enumerated:
        return Obstacle(graph.families[min(needs.enumerated)].name, OPEN_CHOICES)
    if needs.fault is not None:
        return Obstacle(needs.fault.what, f"without {needs.fault.expected}")
    return None


def _obstacles_of_changes(
    world: World, needed: NeededPositions, cells: Cells, *, first_order: bool
) -> dict[int, Obstacle]:
    """Why what cells change is not computed with others, from the words that change in each family."""
    network = world.network
    rows = {entries.family for entries in cells.entries if entries.rows}
    suspects = {
        member.family.index: member
        for member in (network.members[index] for index in sorted(needed.leads))
        if member.family.index in network.graph.recurrent
        or any(given.pick for given in member.inputs)
        or world.ground.rows_in(member.family.index)
    }
    if not suspects:
        return {}
    obstacles: dict[int, Obstacle] = {}
    for numbers, set_words in _set_words(world, needed, cells):
        changed = find_changed_positions(world, needed, set_words, len(numbers))
        for index, member in suspects.items():
            marked = []
            for selector in {selector for given in member.inputs for _, selector in given.pick}:
                if selector in changed and not first_order:
                    reason = f"a selector that changes, by which {member.family.name} picks"
                    marked.append((Obstacle(network.graph.families[selector].name, reason), changed[selector][1]))
            if index in changed:
                descends, both = changed[index]
                if first_order:
                    descends, both = np.zeros_like(descends), set_words.get(index, np.zeros_like(both))
                if index in rows:  # the weights of its words are computed in each cell
                    descends = both
                marked += _obstacles_of_family(world, member, descends, both)
            for obstacle, table in marked:
                for cell in numbers[np.any(table, axis=-1)].tolist():
                    obstacles.setdefault(cell, obstacle)
    return obstacles


def _obstacles_of_family(
    world: World, member: Member, descends: Table, changed: Table
) -> Iterator[tuple[Obstacle, Table]]:
    """The rules for a family of which these words are computed again, or change: the obstacle, and in which cells."""
    family = member.family
    if any(axis == WORD for given in member.inputs for axis, _ in given.pick):
        yield Obstacle(family.name, "picked by a choice of a word"), descends
    if world.ground.rows_in(family.index):
        yield Obstacle(family.name, "mixed by rows of attention that do() set"), descends
    if family.index in world.network.graph.recurrent:
        yield Obstacle(family.name, ONE_AFTER_ANOTHER), changed


def _set_words(world: World, needed: NeededPositions, cells: Cells) -> Iterator[tuple[Ids, dict[int, Table]]]:
    """The words of each family that cells set, `[cell, word]`, for as many cells at a time as memory holds."""
    there, ground = cells.there, world.ground
    sets: list[tuple[int, Ids, Ids]] = [(entries.family, entries.cell, entries.node) for entries in cells.entries]
    for path in cells.paths:
        family = ground.family_of(path.nodes[-1]).index
        sets.append((family, np.array([path.cell]), np.array([path.nodes[-1] - int(ground.offsets[family])])))
    size = max(1, CHUNK // max(1, sum(map(len, needed.leads.values()))))
    for start in range(0, len(there), size):
        numbers, tables = there[start : start + size], dict[int, Table]()
        for index, cell, node in sets:
            inside = (cell >= numbers[0]) & (cell <= numbers[-1])
            if index in needed.leads and inside.any():
                words = count_words(world, index)
                table = tables.setdefault(index, np.zeros((len(numbers), words), dtype=np.bool_))
                table[np.searchsorted(numbers, cell[inside]), node[inside] % words] = True
        yield numbers, tables


def make_route(
    corrupt: Examples,
    needed: NeededPositions,
    cells: Cells,
    obstacles: Mapping[int, Obstacle],
    *,
    runs: int,
    states: int = 1,
    first_order: bool = False,
    count_flops: bool = True,
) -> Route:
    """Describe how a sweep is computed.

    Args:
        corrupt: Corrupt sentences of one length.
        needed: The words that lead to an outcome.
        cells: What each cell sets.
        obstacles: Of each cell that runs alone, why.
        runs: The number of examples, in each joint state of the open choices.
        states: Joint states of the open choices that the outcomes are averaged over.
        first_order: True where effects are estimated from slopes.
        count_flops: Count the FLOPs of the cells that are computed together, which takes some time.

    Returns:
        The route of all cells; where some run alone, `parts` has a route for those that do not, and one for each
        obstacle.
    """
    there = cells.there
    alone = np.array(sorted(obstacles), dtype=np.int64)
    together = there[~np.isin(there, alone)]
    parts: list[Route] = []
    if len(together):
        flops = _count_flops(corrupt, needed, cells, together, runs) if count_flops and not first_order else None
        reason = "all cells share one run, and only what a cell changes is computed again"
        reason = "the slopes of one run estimate the effect of every cell" if first_order else reason
        parts.append(
            Route(_question(len(together)), "compiled", reason, states=states, flops=flops, is_exact=not first_order)
        )
    nodes = sum(
        int(table.sum()) * int(np.prod(corrupt.world.ground.shapes[index], dtype=np.int64)) // len(table)
        for index, table in needed.leads.items()
    )
    for obstacle in dict.fromkeys(obstacles.values()):
        count = sum(each == obstacle for each in obstacles.values())
        reason, evaluations = str(obstacle), count * runs * nodes
        parts.append(Route(_question(count), "sequential", reason, obstacle.what, states, evaluations=evaluations))
    if len(parts) == 1:
        return parts[0]
    reason = "cells meet different obstacles"
    evaluations, flops = sum(part.evaluations for part in parts), parts[0].flops
    node, question = parts[-1].node, _question(len(there))
    return Route(question, "sequential", reason, node, states, flops, evaluations, not first_order, tuple(parts))


def _question(cells: int) -> str:
    return f"sweep of {cells:,} cell{'s' if cells != 1 else ''}"


def _count_flops(corrupt: Examples, needed: NeededPositions, cells: Cells, numbers: Ids, runs: int) -> int | None:
    """FLOPs of the products of the runs, and of what cells change; None where a TPM does not say its products."""
    world = corrupt.world
    network, ground = world.network, world.ground
    want = sorted({network.graph.families[ground.family_of(node).index].name for node in needed.outcomes})
    if corrupt.module.find_needs(want, ()).fault is not None:
        return None
    words = dict(ground.words)
    flops: dict[str, int] = {}
    slices: dict[str, int] = {}
    for row in cost(network, words or None, want=want).rows:
        if row.flops is None:
            return None
        flops[row.template] = flops.get(row.template, 0) + row.flops
        slices[row.template] = slices.get(row.template, 0) + row.slices
    share = dict.fromkeys(needed.leads, 2.0)  # of a run that a family takes: the corrupt and the clean one
    for chunk, set_words in _set_words(world, needed, cells):
        inside = np.isin(chunk, numbers)
        for index, (_, both) in find_changed_positions(world, needed, set_words, len(chunk)).items():
            table = both[inside]
            if not is_wordwise(network, network.members[index]):  # all words of a cell are computed
                table = np.any(table, axis=-1, keepdims=True)
            share[index] += float(table.mean(-1).sum())
    stems = {index: network.graph.families[index].stem for index in share}
    return round(runs * sum(part * flops.get(stems[i], 0) / slices.get(stems[i], 1) for i, part in share.items()))

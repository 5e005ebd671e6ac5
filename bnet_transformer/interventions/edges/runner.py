"""Runs of circuits of edges, for searches and curves: masks of edges in, the metric of each circuit out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import BoolArray
from bnet_transformer._core.checks import check_int
from bnet_transformer._core.naming import join_path, split_path
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, UnsupportedError
from bnet_transformer.interventions.circuits.arrow_runs import run_with_cells
from bnet_transformer.interventions.circuits.runs import (
    BETWEEN,
    INPUT,
    OUTCOME,
    CircuitParts,
    CircuitRuns,
    describe_node,
)
from bnet_transformer.interventions.edges.masked_run import MaskedRun, Outcomes
from bnet_transformer.interventions.edges.pruning import find_blocked_edges
from bnet_transformer.interventions.edges.structure import READOUT, EdgeStructure
from bnet_transformer.interventions.sweeps.choices import EnumeratedChoices, enumerate_choices
from bnet_transformer.interventions.sweeps.edge_cells import build_structure
from bnet_transformer.interventions.sweeps.examples import DEFAULT_MEMORY, Examples, has_difference, parse_example_pair
from bnet_transformer.interventions.sweeps.metric import Metric, parse_metric
from bnet_transformer.interventions.sweeps.patched_run import PatchedRun
from bnet_transformer.interventions.sweeps.routing import find_run_obstacle
from bnet_transformer.interventions.sweeps.sparse_update import NeededPositions, find_needed_positions, get_layout_shape
from bnet_transformer.reference import GroundModel, locate_node


@dataclass
class EdgeRunner(CircuitRuns):
    """Runs of circuits of edges from writers to readers.

    Args:
        clean: The sentences that a circuit runs.
        corrupt: The corrupt sentences, as many.
        structure: The edges of the net.
        metric: The metric.
        choices: The latent choices over which outcomes are averaged.
        needed: The words that lead to an outcome.
        memory: The approximate number of bytes that are used at once.
    """

    clean: Examples
    corrupt: Examples
    structure: EdgeStructure
    metric: Metric
    choices: EnumeratedChoices
    needed: NeededPositions
    memory: int

    edge_names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.edge_names = self.structure.edges.names

    def swap(self) -> EdgeRunner:
        """The same edges with the clean and the corrupt run exchanged."""
        swapped = replace(self, clean=self.corrupt, corrupt=self.clean)
        if "blocked" in self.__dict__:  # the maps are the same in both runs
            swapped.__dict__["blocked"] = self.blocked
        return swapped

    @cached_property
    def blocked(self) -> BoolArray:
        """The edges that cannot transmit anything, by proof, `[edge]`."""
        blocked = np.ones(len(self.edge_names), dtype=bool)
        set_groups = {model.ground.group_of(node).index for model in self.clean.models for node in model.do}
        if set_groups - self.structure.word_dependent:  # weights that `do` sets may differ between the examples
            return ~blocked
        groups = frozenset(writer.spec.group.index for writer in self.structure.writer_groups)
        for states in self.choices:  # weights under a choice differ between its states
            example = next(self.clean.with_choices(states).split(1))
            blocked &= find_blocked_edges(PatchedRun(example, self.needed, groups), self.structure)
        return blocked

    @property
    def edge_groups(self) -> tuple[tuple[int, ...], ...]:
        """The edges of each group of readers."""
        readers = self.structure.edges.readers
        return tuple(tuple(np.flatnonzero(readers == r).tolist()) for r in np.unique(readers))

    def find_connected(self, retained: Tensor) -> Tensor:
        """The mask of the edges that can transmit a difference, and whose reader leads to the metric, `[edge]`."""
        table, structure = self.structure.edges, self.structure
        active = {(r, u): structure.reader_groups[r].is_readout for r, u in structure.reader_units}
        needed: set[tuple[int, int]] = set()  # the writers that lead to the metric
        connected = np.zeros(len(table), dtype=bool)
        for r in reversed(range(len(structure.reader_groups))):
            edges = np.flatnonzero(table.readers == r)
            for u in np.unique(table.reader_units[edges]).tolist():
                if active[r, u] or needed & structure.find_fed_writers(r, u):
                    edges_in = edges[table.reader_units[edges] == u]
                    connected[edges_in] = True
                    retained_edges = edges_in[retained.numpy()[edges_in]]
                    needed |= set(
                        zip(
                            table.writers[retained_edges].tolist(),
                            table.writer_units[retained_edges].tolist(),
                            strict=True,
                        )
                    )
        return torch.from_numpy(connected & ~self.blocked)

    def trace(self, retained: Tensor) -> CircuitParts:
        """The edges on a path from a writer that differs to the metric, and the arrows from readers to writers."""
        table, structure, connected = self.structure.edges, self.structure, self.find_connected(retained) & retained
        reached = {
            (w, v)
            for w, writer in enumerate(structure.writer_groups)
            if writer.kind == "input"
            for v in range(len(structure.list_units(writer.spec)))
        }
        edge_of: dict[str, str | None] = {}
        nodes: dict[str, dict[str, Any]] = {}
        needed = {
            (int(w), int(v)) for w, v in zip(table.writers[connected], table.writer_units[connected], strict=True)
        }
        for k in np.flatnonzero(connected.numpy()).tolist():  # readers are in topological order
            r, w = int(table.readers[k]), int(table.writers[k])
            u, v = int(table.reader_units[k]), int(table.writer_units[k])
            if (w, v) not in reached:
                continue
            writer_name, reader_name = split_path(table.names[k])
            edge_of[table.names[k]] = table.names[k]
            reader, kind = structure.reader_groups[r], structure.writer_groups[w].kind
            nodes.setdefault(
                writer_name, self._describe(structure.writer_groups[w].spec, v, INPUT if kind == "input" else BETWEEN)
            )
            part = OUTCOME if reader.is_readout and reader.channel == READOUT else BETWEEN
            nodes.setdefault(reader_name, {**self._describe(reader.target, u, part), "channel": reader.channel})
            for fed in structure.find_fed_writers(r, u) & needed:
                reached.add(fed)
                name = structure.get_writer_names(fed[0])[fed[1]]
                nodes.setdefault(name, self._describe(structure.writer_groups[fed[0]].spec, fed[1], BETWEEN))
                if name != reader_name:
                    edge_of[join_path((reader_name, name))] = None
        return CircuitParts(edge_of, nodes, 0)

    def _describe(self, spec: NodeSpec, unit: int, part: str) -> dict[str, Any]:
        """The attributes of a node without its word."""
        return describe_node(spec.group, spec.group.plates, self.structure.list_units(spec)[unit], part)

    @cached_property
    def runs(self) -> list[MaskedRun]:
        """The runs in each joint state of the choices."""
        runs = []
        for states in self.choices:
            sides = (side.with_choices(states) for side in (self.clean, self.corrupt))
            clean, corrupt = (run_with_cells(side, self.metric.nodes) for side in sides)
            runs.append(MaskedRun(self.structure, clean, corrupt, self.needed, self.metric.nodes, self.clean))
        return runs

    def evaluate(self, retained: Tensor) -> Tensor:
        """The metric of some circuits.

        Args:
            retained: The mask of the retained edges, `[circuit, edge]`.

        Returns:
            The metric, `[circuit, example]`.
        """
        size = max(1, self.memory // self._circuit_bytes)
        return torch.cat([self._evaluate_metric(retained[k : k + size]) for k in range(0, len(retained), size)])

    def evaluate_with_grad(self, gates: Tensor) -> Tensor:
        """The metric, `[example]`, of a circuit in which edges are retained in part: factors from 0 to 1, `[edge]`."""
        outcomes = [run.compute_outcomes(gates[None]) for run in self.runs]
        return self.metric.evaluate_with_grad(self._marginalize(outcomes))

    def evaluate_clean(self) -> Tensor:
        """The metric of the clean run, `[example]`: that of the circuit of all edges."""
        return self.evaluate(torch.ones(1, len(self.edge_names), dtype=torch.bool))[0]

    def evaluate_corrupt(self) -> Tensor:
        """The metric of the corrupt run, `[example]`: that of the circuit without edges."""
        return self.evaluate(torch.zeros(1, len(self.edge_names), dtype=torch.bool))[0]

    @torch.no_grad()
    def _evaluate_metric(self, retained: Tensor) -> Tensor:
        """The metric of circuits that fit in memory."""
        return self.metric(self._marginalize([run.compute_outcomes(retained) for run in self.runs]))

    def _marginalize(self, outcomes: Sequence[Mapping[int, Tensor]]) -> Outcomes:
        """The outcomes, averaged over the joint states of the choices."""
        model, averaged = self.clean.model, {}
        for node in self.metric.nodes:
            is_discrete = locate_node(model, node)[0].tpm.kind == "discrete" and node not in model.do
            averaged[node] = self.choices.marginalize([values[node] for values in outcomes], is_discrete=is_discrete)
        return averaged

    @cached_property
    def _circuit_bytes(self) -> int:
        """The memory of one circuit: the values of all groups, the changes of all writers, and what a reader sees."""
        run, structure = self.runs[0], self.structure
        sizes = {
            index: math.prod(get_layout_shape(run.corrupt, spec)) * math.prod(spec.shape)
            for index, spec in enumerate(run.corrupt.network.specs)
            if index in structure.relevant
        }
        changes = run.first_columns[-1] * max((sizes[index] for index in run.sums), default=1)
        visible = max(
            structure.count_units(reader.target) * max((sizes[i] for i in reader.chain if i not in run.sums), default=1)
            for reader in structure.reader_groups
        )
        # Changes are copied once when they are joined (`merge_changes`).
        total = 3 * sum(sizes.values()) + 2 * changes + 4 * visible
        return max(1, len(self.clean) * run.corrupt.dtype.itemsize * total)


def build_edge_runner(clean: object, corrupt: object, metric: object, memory: int = DEFAULT_MEMORY) -> EdgeRunner:
    """Validate the sentences and the metric, and build the runner of their circuits.

    Args:
        clean: The sentence or sentences that circuits run.
        corrupt: The corrupt sentence or sentences.
        metric: The metric, as for `bt.sweep`.
        memory: The approximate number of bytes that are used at once.

    Returns:
        The runner.
    """
    clean_examples, corrupt_examples = parse_example_pair(clean, corrupt)
    return build_runner(clean_examples, corrupt_examples, metric, memory)


def build_runner(clean_examples: Examples, corrupt_examples: Examples, metric: object, memory: int) -> EdgeRunner:
    """The runner of the circuits of valid examples."""
    if not has_difference(clean_examples, corrupt_examples):
        actual = "clean and corrupt sentences with the same values"
        raise BNetError("corrupt", expected="a pair that differs", actual=actual)
    parsed = parse_metric(clean_examples, metric)
    structure = build_structure(clean_examples, corrupt_examples, parsed.nodes)
    model = clean_examples.model
    specs, ground = model.network.specs, model.ground
    _check_readouts(structure, model, parsed.nodes)
    _check_interventions(structure, clean_examples, corrupt_examples)
    targets = {reader.target.group.index for reader in structure.reader_groups}
    touched = [int(ground.offsets[index]) for index in sorted(targets) if not specs[index].tpm.is_random]
    choices = enumerate_choices(corrupt_examples, clean_examples, touched, parsed.nodes, ("corrupt", "clean"))
    states = next(iter(choices))
    prepared = clean_examples.with_choices(states)
    needed = find_needed_positions(prepared.model, parsed.nodes)
    for side in (prepared, corrupt_examples.with_choices(states)):
        outcomes = {ground.group_of(node).index for node in parsed.nodes}
        obstacle = find_run_obstacle(side, {*needed.ancestor_words, *outcomes})
        if obstacle is not None:
            raise UnsupportedError(f"edges cannot share a run, because {obstacle}")
    return EdgeRunner(clean_examples, corrupt_examples, structure, parsed, choices, needed, check_int("memory", memory))


def _check_readouts(structure: EdgeStructure, model: GroundModel, nodes: Sequence[int]) -> None:
    """Raise an error for a metric of a node that no edge enters, such as an embedding."""
    inputs = {writer.spec.group.index for writer in structure.writer_groups if writer.kind == "input"}
    for node in nodes:
        if model.ground.group_of(node).index in inputs:
            expected = "nodes that an edge enters, for circuits of edges"
            raise BNetError(f"metric of {model.ground.name(node)}", expected=expected, actual="a writer of the input")


def _check_interventions(structure: EdgeStructure, clean: Examples, corrupt: Examples) -> None:
    """Raise an error for nodes that the runs set to different values, unless they are inputs or whole node groups.

    A circuit has one set of weights, and a node that is set inside the net would not be a sum of its writers in one of
    the runs only.
    """
    ground = clean.model.ground
    inputs = {writer.spec.group.index for writer in structure.writer_groups if writer.kind == "input"}
    for kind in ("do", "attention_rows"):
        for one, other in zip(clean.models, corrupt.models, strict=True):
            values, counterparts = getattr(one, kind), getattr(other, kind)
            for node in {*values, *counterparts}:
                value, counterpart = values.get(node), counterparts.get(node)
                is_same = value is not None and counterpart is not None and torch.equal(value, counterpart)
                if is_same or (kind == "do" and ground.group_of(node).index in inputs):
                    continue
                name = ground.name(node)
                expected = "interventions that are equal in both runs, except on inputs"
                hint = f'Set {name} to the same value in clean and corrupt, or use ground arrows (at="arrows")'
                raise UnsupportedError('at="edges"', expected=expected, actual=f"{name}, which differs", hint=hint)

"""The validated arguments of a sweep: cells, metric, and the batches of examples that fit in memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_int, check_seed
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.intervention_values import Mean, Noise, Zero
from bnet_transformer.interventions.edges.structure import EdgeStructure
from bnet_transformer.interventions.sweeps.ablation import Ablation
from bnet_transformer.interventions.sweeps.alignment import WordAlignment, parse_words
from bnet_transformer.interventions.sweeps.cell_spec import (
    PatchCells,
    align_labels,
    flag_special_positions,
    is_index_valued,
)
from bnet_transformer.interventions.sweeps.edge_cells import build_structure
from bnet_transformer.interventions.sweeps.engine import ExampleBatch, SweepOptions
from bnet_transformer.interventions.sweeps.examples import Examples, has_difference, parse_example_pair, parse_examples
from bnet_transformer.interventions.sweeps.gradients import CONVENTIONS
from bnet_transformer.interventions.sweeps.metric import Metric, parse_metric
from bnet_transformer.interventions.sweeps.parse_cells import parse_cells
from bnet_transformer.interventions.sweeps.sparse_update import estimate_bytes, find_needed_positions

ABLATIONS = Zero | Mean | Noise
DIRECTIONS = ("denoise", "noise")


@dataclass(frozen=True)
class SweepRequest:
    """A sweep whose arguments are valid.

    Args:
        source: The sentences that provide the values; None for an ablation.
        base: The sentences that are patched.
        alignment: The word of the source from which each word of the base takes its values.
        cells: The cells.
        metric: The metric, of nodes of the base.
        options: How cells are computed.
        check: The number of cells that are also run, to check estimates.
        seed: The seed of the random choice of half of these cells.
        ablation: The values of an ablation.
    """

    source: Examples | None
    base: Examples
    alignment: WordAlignment
    cells: PatchCells
    metric: Metric
    options: SweepOptions
    check: int = 0
    seed: int = 0
    ablation: Ablation | None = field(default=None, repr=False)

    def build_batches(self) -> list[ExampleBatch]:
        """The batches of examples whose runs fit in half of the memory."""
        memory, nodes, size = self.options.memory, self.metric.nodes, 1
        if len(self.base) > 1:
            needed = find_needed_positions(self.base.model, nodes)
            size = max(1, memory // (2 * estimate_bytes(self.base.model, needed)[1]))
        fits = size >= len(self.base)
        bases = list(self.base.split(size))
        sources = [None] * len(bases) if self.source is None else self.source.split(size)
        shared = self.alignment, self.cells, nodes, self.options, self.ablation
        return [
            ExampleBatch(source, base, *shared, k * size, should_cache=fits)
            for k, (source, base) in enumerate(zip(sources, bases, strict=True))
        ]

    def choose_cells(self, effects: Tensor) -> SweepRequest:
        """The exact sweep of `check` cells: those with the largest estimates, `[cell, example]`, and random others."""
        cell_ids = self.cells.cell_ids
        count = min(self.check, len(cell_ids))
        sizes = effects[torch.from_numpy(cell_ids)].mean(-1).abs().numpy()
        largest = cell_ids[np.argsort(-sizes, kind="stable")[: count // 2]]
        remaining = np.setdiff1d(cell_ids, largest)
        sampled = np.random.default_rng(self.seed).choice(remaining, count - len(largest), replace=False)
        chosen = np.sort(np.concatenate([largest, sampled]))
        options = replace(self.options, first_order=False, steps=0)
        return replace(self, cells=self.cells.select(chosen), options=options)


def parse_request(
    clean: object,
    corrupt: object,
    *,
    at: Any,
    metric: object,
    over: object,
    direction: str,
    words: object,
    memory: int,
    first_order: bool = False,
    steps: int = 0,
    convention: str | None = None,
    check: int = 0,
    seed: int = 0,
) -> SweepRequest:
    """Validate the arguments of a sweep."""
    check_choice("direction", direction, DIRECTIONS)
    check_choice("first_order", first_order, (True, False))
    for name, number in (("steps", steps), ("check", check)):
        if check_int(name, number, minimum=0) and not first_order:
            raise BNetError(name, expected="0, or first_order=True, whose estimates it is about", actual=number)
    is_noise = direction == "noise"
    check_choice("convention", convention, (None, *CONVENTIONS))
    options = SweepOptions(check_int("memory", memory), first_order, steps, is_noise, convention)
    source, base = _parse_sides(clean, corrupt, options, has_alignment=words is not None)
    alignment = parse_words(base.model, base.model if source is None else source.model, words)
    parsed_metric = parse_metric(base, metric)

    def find_edges() -> EdgeStructure:
        return build_structure(base, source, parsed_metric.nodes)

    cells = parse_cells(base, at, over, find_edges, is_real=first_order)
    cells = replace(cells, special=flag_special_positions(cells.positions, base))
    if source is not None and alignment.is_identity and not has_difference(source, base):
        actual = "clean and corrupt sentences with the same values at every cell"
        raise BNetError("corrupt", expected="a pair that differs", actual=actual)
    if first_order:
        _check_real_paths(base, cells)
    if source is None:
        ablation = _build_ablation(corrupt if is_noise else clean, clean if is_noise else corrupt, base, cells, options)
        if words is not None or steps:
            name = "steps" if words is None else "words"
            raise BNetError(name, expected="sentences on both sides", actual="an ablation, which has no other run")
        return SweepRequest(None, base, alignment, cells, parsed_metric, options, check, check_seed(seed), ablation)
    if not alignment.is_identity and any(sites.is_attention for sites in cells.sites):
        expected = "nodes, arrows or paths, because words= does not align the entries of rows of attention"
        raise BNetError("at", expected=expected, actual=at)
    if convention is not None and (cells.edges is None or cells.sites or cells.paths or not (is_noise and steps)):
        expected = 'None, or at="edges" with first_order=True, direction="noise" and steps='
        raise BNetError("convention", expected=expected, actual=convention)
    if words is not None and cells.edges is not None:
        expected = "None, because an edge sets all words of its reader"
        raise BNetError("words", expected=expected, actual=words)
    cells = alignment.drop_unaligned(cells)
    if alignment.is_identity:
        runs = (base, source) if is_noise else (source, base)
        cells = replace(cells, aligned=align_labels(cells.positions, *runs))
    return SweepRequest(source, base, alignment, cells, parsed_metric, options, check, check_seed(seed))


def _parse_sides(
    clean: object, corrupt: object, options: SweepOptions, *, has_alignment: bool
) -> tuple[Examples | None, Examples]:
    """The sentences that provide the values (None for an ablation), and those that are patched."""
    sides = {"clean": clean, "corrupt": corrupt}
    source_name, base_name = options.side_names
    if isinstance(sides[base_name], ABLATIONS):
        other = "denoise" if options.is_noise else "noise"
        hint = f"To ablate the {source_name} sentences use direction={other!r}"
        raise BNetError(base_name, expected="sentences, which are patched", actual=sides[base_name], hint=hint)
    if isinstance(sides[source_name], ABLATIONS):
        return None, parse_examples(base_name, sides[base_name])
    clean_examples, corrupt_examples = parse_example_pair(clean, corrupt, has_alignment=has_alignment)
    return (corrupt_examples, clean_examples) if options.is_noise else (clean_examples, corrupt_examples)


def _check_real_paths(base: Examples, cells: PatchCells) -> None:
    """Raise an error for a path with a node that has no real value, and thus no gradient."""
    specs = base.model.network.specs
    for index in {base.model.ground.group_of(node).index for path in cells.paths for node in path.nodes}:
        if is_index_valued(specs[index]):
            expected, hint = "nodes with real values, for first_order=True", "Use first_order=False"
            raise BNetError(f"at {specs[index].group.name}", expected=expected, actual="discrete nodes", hint=hint)


def _build_ablation(
    intervention: Any, sentences: object, base: Examples, cells: PatchCells, options: SweepOptions
) -> Ablation:
    """The values of an ablation of these sentences."""
    if cells.paths or any(sites.is_attention for sites in cells.sites):
        hint = 'Pass a role such as "a", or names of nodes'
        raise BNetError("at", expected="nodes, for an ablation", actual=cells.at, hint=hint)
    items = list(sentences) if isinstance(sentences, list | tuple) else [sentences]
    return Ablation(intervention, items, cells.get_patched_nodes(base.model), options.memory)

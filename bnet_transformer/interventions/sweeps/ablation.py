"""Ablations: the values that `Zero()`, `Mean(...)` and `Noise(...)` set, each computed once for a whole sweep."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.inference.sentence_state import (
    Mean,
    Noise,
    RelativeValues,
    Zero,
    check_has_words,
    is_relative,
    resolve_value,
    sample_noise,
)
from bnet_transformer.interventions.sweeps.cell_spec import Ids
from bnet_transformer.interventions.sweeps.examples import Examples, examples_of, form_of, state_of
from bnet_transformer.interventions.sweeps.patched_run import PatchedRun, picked
from bnet_transformer.interventions.sweeps.routing import find_obstacle_of_a_run
from bnet_transformer.interventions.sweeps.sparse_update import bytes_of, find_needed_positions, full_shape, index_of
from bnet_transformer.reference import GroundModel, locate_node
from bnet_transformer.reference.asking import has_ancestor_choices


@dataclass
class Ablation:
    """The values that an ablation sets in the corrupt sentences, which cells may set any of `nodes`.

    `Zero()` and `Mean(sentences)` set the same in every sentence. `Noise` and `Mean()` depend on the values of each:
    those of the corrupt run, which has them for all sentences at once.
    """

    intervention: Zero | Mean | Noise
    corrupt: Sequence[Any]
    nodes: Sequence[int]
    memory: int
    _constant: dict[int, Tensor] = field(default_factory=dict)
    _own: dict[int, RelativeValues] = field(default_factory=dict)

    def value(self, example: int, node: int) -> Tensor:
        """The value of one node in one sentence."""
        if not is_relative(self.intervention):
            return self._shared_value(node)
        if example not in self._own:
            state = self.corrupt[example].state
            self._own[example] = RelativeValues(state.world, state.answers.value)
        return self._own[example](node, self.intervention)

    def values(self, run: PatchedRun, first: int, family: int, nodes: Ids) -> Tensor:
        """The values of nodes of a family (by their number in it) in the sentences of a run, `[1 or N, node, *shape]`.

        `first` is the number of the run's first sentence.
        """
        offset = int(run.examples.world.ground.offsets[family])
        if not is_relative(self.intervention):
            return torch.stack([self._shared_value(offset + int(node)) for node in nodes])[None]
        base = run.base.values[family]
        if has_ancestor_choices(run.examples.world.network, {family}) or not base.is_floating_point():
            examples = range(first, first + len(run.examples))
            return torch.stack([torch.stack([self.value(n, offset + int(node)) for node in nodes]) for n in examples])
        member, ground = run.members[family], run.examples.world.ground
        names = [ground.name(offset + int(node)) for node in nodes]
        if isinstance(self.intervention, Mean):
            check_has_words(member.group, names[0])
            base = base.mean(run.base.layout.word_dim, keepdim=True)
        own = picked(run, family, base, index_of(run.base, member, nodes)).transpose(0, 1)
        if isinstance(self.intervention, Noise):
            own = own + torch.stack([sample_noise(name, self.intervention, own[0, 0]) for name in names])
        return own

    def _shared_value(self, node: int) -> Tensor:
        world: GroundModel = self.corrupt[0].state.world
        if not self._constant and isinstance(self.intervention, Mean):
            self._constant |= means_of(world, self.nodes, self.intervention.sentences, self.memory)
        if node not in self._constant:
            value = resolve_value(world, node, self.intervention)
            assert isinstance(value, Tensor)
            self._constant[node] = value
        return self._constant[node]


def means_of(world: GroundModel, nodes: Sequence[int], sentences: Sequence[Any], memory: int) -> dict[int, Tensor]:
    """The means of some nodes' values over sentences, where the sentences can be run in batches; else of no node.

    Sentences of one form are one batch (or as many as fit in half of the memory); all families are of one run.
    """
    by_form: dict[Hashable, list[Any]] = {}
    for sentence in sentences:
        state = state_of(sentence)
        if state is None or state.evidence or state.network is not world.network:
            return {}
        by_form.setdefault(form_of(state.model), []).append(sentence)
    tpms = {node: locate_node(world, node)[0].tpm for node in nodes}
    real = [node for node, tpm in tpms.items() if not tpm.is_random and not tpm.is_index_valued]
    totals = {node: torch.zeros((), dtype=world.network.dtype, device=world.network.device) for node in real}
    for several in by_form.values():
        there, batch = several[0].state.ground, examples_of("clean", several)
        ids = {there.id(world.ground.name(node)): node for node in real}
        families = {there.family_of(node).index for node in ids}
        if find_obstacle_of_a_run(batch, families) is not None:  # such nodes are refused one by one
            return {}
        size = max(1, memory // (2 * bytes_of(batch.world, find_needed_positions(batch.world, ids))[1]))
        for part in batch.parts(size):
            for node, total in _sums(part, list(ids)).items():
                totals[ids[node]] = totals[ids[node]] + total
    return {node: total / len(sentences) for node, total in totals.items()}


def _sums(examples: Examples, nodes: Sequence[int]) -> Mapping[int, Tensor]:
    """The sum of each node's value over sentences, from one run of all."""
    ground = examples.world.ground
    by_family: dict[int, list[int]] = {}
    for node in nodes:
        by_family.setdefault(ground.group_of(node).index, []).append(node)
    course = examples.course(by_family)
    values: dict[int, Tensor] = {}
    for index, some in by_family.items():
        member = examples.world.network.specs[index]
        value = course.values[index].expand(len(examples), *full_shape(course, member), *member.shape).sum(0)
        at = index_of(course, member, np.array(some) - int(ground.offsets[index]))
        values |= dict(zip(some, value[at], strict=True))
    return values

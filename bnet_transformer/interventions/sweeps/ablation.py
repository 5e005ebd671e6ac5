"""Ablations: the values that `Zero()`, `Mean(...)` and `Noise(...)` set, each computed once for a whole sweep."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.inference.intervention_values import (
    Mean,
    Noise,
    RelativeValues,
    Zero,
    check_has_words,
    is_relative,
    resolve_value,
    sample_noise,
)
from bnet_transformer.interventions.sweeps.cell_spec import IntArray
from bnet_transformer.interventions.sweeps.examples import Examples, get_batch_key, get_sentence_state, parse_examples
from bnet_transformer.interventions.sweeps.patched_run import PatchedRun, gather_nodes
from bnet_transformer.interventions.sweeps.routing import find_run_obstacle
from bnet_transformer.interventions.sweeps.sparse_update import (
    estimate_bytes,
    find_needed_positions,
    get_layout_index,
    get_layout_shape,
)
from bnet_transformer.reference import GroundModel, locate_node
from bnet_transformer.reference.node_tables import has_ancestor_choices


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
    _shared_values: dict[int, Tensor] = field(default_factory=dict)
    _example_values: dict[int, RelativeValues] = field(default_factory=dict)

    def get_value(self, example: int, node: int) -> Tensor:
        """The value of one node in one sentence."""
        if not is_relative(self.intervention):
            return self._get_shared_value(node)
        if example not in self._example_values:
            state = self.corrupt[example].state
            self._example_values[example] = RelativeValues(state.model, state.evaluator.value)
        return self._example_values[example](node, self.intervention)

    def get_values(self, run: PatchedRun, first_example: int, group: int, nodes: IntArray) -> Tensor:
        """The values of nodes of a family (by their number in it) in the sentences of a run, `[1 or N, node, *shape]`.

        `first_example` is the number of the run's first sentence.
        """
        offset = int(run.examples.model.ground.offsets[group])
        if not is_relative(self.intervention):
            return torch.stack([self._get_shared_value(offset + int(node)) for node in nodes])[None]
        base = run.base.values[group]
        if has_ancestor_choices(run.examples.model.network, {group}) or not base.is_floating_point():
            examples = range(first_example, first_example + len(run.examples))
            return torch.stack(
                [torch.stack([self.get_value(n, offset + int(node)) for node in nodes]) for n in examples]
            )
        member, ground = run.specs[group], run.examples.model.ground
        names = [ground.name(offset + int(node)) for node in nodes]
        if isinstance(self.intervention, Mean):
            check_has_words(member.group, names[0])
            base = base.mean(run.base.layout.word_dim, keepdim=True)
        own = gather_nodes(run, group, base, get_layout_index(run.base, member, nodes)).transpose(0, 1)
        if isinstance(self.intervention, Noise):
            own = own + torch.stack([sample_noise(name, self.intervention, own[0, 0]) for name in names])
        return own

    def _get_shared_value(self, node: int) -> Tensor:
        world: GroundModel = self.corrupt[0].state.model
        if not self._shared_values and isinstance(self.intervention, Mean):
            self._shared_values |= compute_means(world, self.nodes, self.intervention.sentences, self.memory)
        if node not in self._shared_values:
            value = resolve_value(world, node, self.intervention)
            assert isinstance(value, Tensor)
            self._shared_values[node] = value
        return self._shared_values[node]


def compute_means(model: GroundModel, nodes: Sequence[int], sentences: Sequence[Any], memory: int) -> dict[int, Tensor]:
    """The means of some nodes' values over sentences, where the sentences can be run in batches; else of no node.

    Sentences of one form are one batch (or as many as fit in half of the memory); all families are of one run.
    """
    by_form: dict[Hashable, list[Any]] = {}
    for sentence in sentences:
        state = get_sentence_state(sentence)
        if state is None or state.evidence or state.network is not model.network:
            return {}
        by_form.setdefault(get_batch_key(state.model), []).append(sentence)
    tpms = {node: locate_node(model, node)[0].tpm for node in nodes}
    real = [node for node, tpm in tpms.items() if not tpm.is_random and not tpm.is_index_valued]
    totals = {node: torch.zeros((), dtype=model.network.dtype, device=model.network.device) for node in real}
    for several in by_form.values():
        there, batch = several[0].state.ground, parse_examples("clean", several)
        ids = {there.id(model.ground.name(node)): node for node in real}
        families = {there.group_of(node).index for node in ids}
        if find_run_obstacle(batch, families) is not None:  # such nodes are refused one by one
            return {}
        size = max(1, memory // (2 * estimate_bytes(batch.model, find_needed_positions(batch.model, ids))[1]))
        for part in batch.split(size):
            for node, total in _sum_values(part, list(ids)).items():
                totals[ids[node]] = totals[ids[node]] + total
    return {node: total / len(sentences) for node, total in totals.items()}


def _sum_values(examples: Examples, nodes: Sequence[int]) -> Mapping[int, Tensor]:
    """The sum of each node's value over sentences, from one run of all."""
    ground = examples.model.ground
    by_family: dict[int, list[int]] = {}
    for node in nodes:
        by_family.setdefault(ground.group_of(node).index, []).append(node)
    course = examples.run(by_family)
    values: dict[int, Tensor] = {}
    for index, some in by_family.items():
        member = examples.model.network.specs[index]
        value = course.values[index].expand(len(examples), *get_layout_shape(course, member), *member.shape).sum(0)
        at = get_layout_index(course, member, np.array(some) - int(ground.offsets[index]))
        values |= dict(zip(some, value[at], strict=True))
    return values

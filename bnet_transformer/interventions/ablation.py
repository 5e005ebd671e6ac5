"""Ablations: the values of `Zero()`, `Mean(...)` and `Noise(...)`, each computed once for all cells of a sweep."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.tensors import IntArray
from bnet_transformer.inference.do_values import (
    Mean,
    Noise,
    RelativeValues,
    Zero,
    check_has_word,
    check_has_words,
    is_relative,
    resolve_value,
    sample_noise,
)
from bnet_transformer.interventions.examples import Examples, get_batch_key, get_sentence_state, parse_examples
from bnet_transformer.interventions.patched_run import (
    PatchedRun,
    estimate_bytes,
    find_needed_positions,
    gather_nodes,
    get_layout_index,
    get_layout_shape,
)
from bnet_transformer.interventions.routing import find_run_obstacle
from bnet_transformer.reference import GroundModel, has_ancestor_choices, locate_node


@dataclass
class Ablation:
    """The values that an ablation sets in the sentences.

    `Zero()` and `Mean(sentences)` set the same value in every sentence. The values of `Noise` and `Mean()` depend on
    the values of the sentence, which their run contains for all sentences.

    Args:
        intervention: The ablation.
        sentences: The sentences.
        nodes: Ground ids of the nodes that cells may set.
        memory: The maximum number of bytes that are used at once.
    """

    intervention: Zero | Mean | Noise
    sentences: Sequence[Any]
    nodes: Sequence[int]
    memory: int
    _shared_values: dict[int, Tensor] = field(default_factory=dict)
    _example_values: dict[int, RelativeValues] = field(default_factory=dict)

    def get_value(self, example: int, node: int) -> Tensor:
        """The value of one node in one sentence, `[*shape]`."""
        if not is_relative(self.intervention):
            return self._get_shared_value(node)
        if example not in self._example_values:
            state = self.sentences[example].state
            self._example_values[example] = RelativeValues(state.model, state.evaluator.value)
        return self._example_values[example](node, self.intervention)

    def get_values(self, run: PatchedRun, first_example: int, group: int, nodes: IntArray) -> Tensor:
        """The values of nodes of a group in the sentences of a run.

        Args:
            run: The run.
            first_example: The index of the run's first sentence among the sentences.
            group: The node group.
            nodes: The nodes, as indices within the group.

        Returns:
            The values, `[1 or N, node, *shape]`.
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
        spec, ground = run.specs[group], run.examples.model.ground
        names = [ground.name(offset + int(node)) for node in nodes]
        if isinstance(self.intervention, Mean):
            check_has_words(spec, names[0])
            base = base.mean(run.base.layout.word_dim, keepdim=True)
        values = gather_nodes(run, group, base, get_layout_index(run.base, spec, nodes)).transpose(0, 1)
        if isinstance(self.intervention, Noise):
            values = values + torch.stack([sample_noise(name, self.intervention, values[0, 0]) for name in names])
        return values

    def _get_shared_value(self, node: int) -> Tensor:
        """The value of `Zero()` or `Mean(sentences)` for a node."""
        model: GroundModel = self.sentences[0].state.model
        if not self._shared_values and isinstance(self.intervention, Mean):
            self._shared_values |= compute_means(model, self.nodes, self.intervention.sentences, self.memory)
        if node not in self._shared_values:
            value = resolve_value(model, node, self.intervention)
            assert isinstance(value, Tensor)
            self._shared_values[node] = value
        return self._shared_values[node]


def compute_means(model: GroundModel, nodes: Sequence[int], sentences: Sequence[Any], memory: int) -> dict[int, Tensor]:
    """Compute the means of nodes over sentences in batches; the result is empty if no batch can be run.

    Sentences with the same batch key are one batch, or several batches that fit in half of the memory.

    Args:
        model: The sentence to which the ids of the nodes refer.
        nodes: Ground ids of the nodes.
        sentences: The sentences to average over.
        memory: Bytes that may be used at once.

    Returns:
        The mean of each real deterministic node, `[*shape]`, by its id.
    """
    by_key: dict[Hashable, list[Any]] = {}
    for sentence in sentences:
        state = get_sentence_state(sentence)
        if state is None or state.evidence or state.network is not model.network:
            return {}
        by_key.setdefault(get_batch_key(state.model), []).append(sentence)
    tpms = {node: locate_node(model, node)[0].tpm for node in nodes}
    real = [node for node, tpm in tpms.items() if not tpm.is_random and not tpm.is_index_valued]
    totals = {node: torch.zeros((), dtype=model.network.dtype, device=model.network.device) for node in real}
    for members in by_key.values():
        ground, batch = members[0].state.ground, parse_examples("clean", members)
        names = {model.ground.name(node): node for node in real}
        for name in names:
            check_has_word(name, ground)
        ids = {ground.id(name): node for name, node in names.items()}
        groups = {ground.group_of(node).index for node in ids}
        if find_run_obstacle(batch, groups) is not None:  # the caller then computes nodes one by one
            return {}
        size = max(1, memory // (2 * estimate_bytes(batch.model, find_needed_positions(batch.model, ids))[1]))
        for part in batch.split(size):
            for node, total in _sum_values(part, list(ids)).items():
                totals[ids[node]] = totals[ids[node]] + total
    return {node: total / len(sentences) for node, total in totals.items()}


def _sum_values(examples: Examples, nodes: Sequence[int]) -> Mapping[int, Tensor]:
    """The sum of each node's value over sentences, `[*shape]`, from one run of all sentences."""
    ground = examples.model.ground
    by_group: dict[int, list[int]] = {}
    for node in nodes:
        by_group.setdefault(ground.group_of(node).index, []).append(node)
    state = examples.run(by_group)
    values: dict[int, Tensor] = {}
    for index, group_nodes in by_group.items():
        spec = examples.model.network.specs[index]
        value = state.values[index].expand(len(examples), *get_layout_shape(state, spec), *spec.shape).sum(0)
        layout_index = get_layout_index(state, spec, np.array(group_nodes) - int(ground.offsets[index]))
        values |= dict(zip(group_nodes, value[layout_index], strict=True))
    return values

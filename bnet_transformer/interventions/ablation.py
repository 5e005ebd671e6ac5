"""What an intervention without another run sets in the examples of a sweep, computed once for all cells."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.tensors import IntArray
from bnet_transformer.compiler.gather import ExecutionState, lay_out_value
from bnet_transformer.data.do_values import (
    Change,
    Mean,
    as_change,
    check_has_word,
    check_has_words,
    compute_word_means,
    is_relative,
    resolve_value,
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
    """What an intervention sets in the sentences.

    `Zero()`, `Mean(sentences)` and a given value are the same in every sentence. The values of `Mean()` depend on the
    values of the sentence, which their run contains for all sentences. A change, such as a function, is applied to the
    values of each cell or circuit; only its constant is computed once.

    Args:
        intervention: The intervention.
        model: The first sentence.
        memory: The maximum number of bytes that are used at once.
        nodes: Ground ids of the nodes that may be set.
        sentences: The sentences, for cells that run one at a time.
        donors: The sentences of `Swap`, whose values are its constants in circuits.
    """

    intervention: Any
    model: GroundModel
    memory: int
    nodes: Sequence[int] = ()
    sentences: Sequence[Any] = ()
    donors: Examples | None = None
    _shared_values: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @property
    def change(self) -> Change | None:
        """The change of the current value; None for a value that does not depend on the cell."""
        return as_change(self.intervention)

    @property
    def is_relative(self) -> bool:
        """Whether the values depend on those in the run in which they are set."""
        return is_relative(self.intervention)

    @property
    def joins_words(self) -> bool:
        """Whether the value of a node depends on those of its group at other words."""
        return self.is_relative and self.change is None

    def check(self, groups: Iterable[int]) -> None:
        """Raise an error if the intervention is not defined for the nodes of a group."""
        for index in sorted(groups):
            spec, name = self.model.network.specs[index], self.model.ground.name(int(self.model.ground.offsets[index]))
            if self.change is not None:
                self.change.check(name, spec)
            elif self.is_relative:
                check_has_words(spec, name)

    def build_overrides(self, nodes: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """The values of nodes, with the masks of the nodes, by group; none if they depend on the run."""
        overrides: dict[int, tuple[Tensor, Tensor]] = {}
        self.nodes, network = nodes, self.model.network
        for index, members in self.model.ground.split_by_group(nodes).items() if not self.is_relative else ():
            shape, ids = self.model.ground.shapes[index], np.array(members) - int(self.model.ground.offsets[index])
            values = torch.stack([self._get_shared_value(node) for node in members])
            full = torch.zeros(math.prod(shape), *values.shape[1:], dtype=network.dtype, device=network.device)
            mask = torch.zeros(len(full), dtype=torch.bool, device=network.device)
            full[ids], mask[ids] = values, True
            overrides[index] = full.reshape(1, *shape, *values.shape[1:]), mask.reshape(1, *shape)
        return overrides

    def apply(self, state: ExecutionState, index: int, value: Tensor, donors: ExecutionState) -> Tensor:
        """The values that depend on those of a group, `[circuit, example, *plates, word, *shape]`.

        Args:
            state: The run of the circuit.
            index: The group.
            value: The values of the group in this run.
            donors: The run of the sentences of `Swap`.
        """
        if self.change is None:
            return value.mean(state.layout.word_dim, keepdim=True).expand(value.shape)
        shape, ground = state.network.specs[index].shape, self.model.ground
        if self.donors is not None:
            return self.change.apply(value, shape, donors.values[index])
        nodes = range(int(ground.offsets[index]), int(ground.offsets[index + 1]))
        constants = torch.stack([self._get_constant(self.model, node) for node in nodes])
        return self.change.apply(
            value, shape, lay_out_value(state, index, constants.reshape(1, *ground.shapes[index], *shape))
        )

    def get_value(self, example: int, node: int) -> Tensor:
        """The value of one node in one sentence, `[*shape]`, or the constant of a change."""
        if not self.is_relative:
            return self._get_shared_value(node)
        if self.change is None:
            state = self.sentences[example].state
            return compute_word_means(state.model, [node], state.evaluator.value)[node]
        return self._get_constant(self.model, node)

    def get_values(self, run: PatchedRun, first_example: int, group: int, nodes: IntArray) -> Tensor:
        """The values of nodes of a group in the sentences of a run, or the constants of a change.

        Args:
            run: The run.
            first_example: The index of the run's first sentence among the sentences.
            group: The node group.
            nodes: The nodes, as indices within the group.

        Returns:
            The values, `[1 or N, node, *shape]`.
        """
        spec, model = run.specs[group], run.examples.model
        ids = [int(model.ground.offsets[group]) + int(node) for node in nodes]
        if self.change is not None:
            return torch.stack([self._get_constant(model, node) for node in ids])[None]
        if not self.is_relative:
            return torch.stack([self._get_shared_value(node) for node in ids])[None]
        base = run.base.values[group]
        if has_ancestor_choices(model.network, {group}) or not base.is_floating_point():
            states = [self.sentences[first_example + n].state for n in range(len(run.examples))]
            means = [compute_word_means(state.model, ids, state.evaluator.value) for state in states]
            return torch.stack([torch.stack([values[node] for node in ids]) for values in means])
        check_has_words(spec, model.ground.name(ids[0]))
        mean = base.mean(run.base.layout.word_dim, keepdim=True)
        return gather_nodes(run.base, spec, mean, get_layout_index(run.base, spec, nodes)).transpose(0, 1)

    def _get_constant(self, model: GroundModel, node: int) -> Tensor:
        """The constant of the change of a node; zeros if it has none."""
        assert self.change is not None
        if node not in self._shared_values:
            name, spec = model.ground.name(node), locate_node(model, node)[0]
            self.change.check(name, spec)
            zeros = torch.zeros(spec.shape, dtype=model.network.dtype, device=model.network.device)
            constant = self.change.get_constant(name, zeros)
            self._shared_values[node] = zeros if constant is None else constant
        return self._shared_values[node]

    def _get_shared_value(self, node: int) -> Tensor:
        """The value of `Zero()` or `Mean(sentences)` for a node."""
        if not self._shared_values and isinstance(self.intervention, Mean):
            self._shared_values |= compute_means(self.model, self.nodes, self.intervention.sentences, self.memory)
        if node not in self._shared_values:
            value = resolve_value(self.model, node, self.intervention)
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
    by_group = ground.split_by_group(nodes)
    state = examples.run(by_group)
    values: dict[int, Tensor] = {}
    for index, group_nodes in by_group.items():
        spec = examples.model.network.specs[index]
        value = state.values[index].expand(len(examples), *get_layout_shape(state, spec), *spec.shape).sum(0)
        layout_index = get_layout_index(state, spec, np.array(group_nodes) - int(ground.offsets[index]))
        values |= dict(zip(group_nodes, value[layout_index], strict=True))
    return values

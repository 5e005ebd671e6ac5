"""What an intervention without another run sets in the examples of a sweep, computed once for all cells."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.tensors import BoolArray, IntArray
from bnet_transformer.compiler.gather import ExecutionState, group_values, lay_out_value
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
from bnet_transformer.errors import EvidenceError, UnsupportedError
from bnet_transformer.inference.values import NodeEvaluator
from bnet_transformer.interventions.cells import WordAlignment
from bnet_transformer.interventions.examples import Examples, get_batch_key, get_sentence_state, parse_examples
from bnet_transformer.interventions.patched_run import (
    PatchedRun,
    estimate_bytes,
    find_needed_positions,
    gather_nodes,
    get_layout_index,
)
from bnet_transformer.reference import GroundModel, locate_node


@dataclass
class Ablation:
    """What an intervention sets in the sentences.

    `Zero()`, `Mean(sentences)` and a given value are the same in every sentence. The values of `Mean()` depend on the
    values of the sentence, which their run contains for all sentences. A change, such as a function, is applied to the
    values of each cell or circuit; only its constant is computed once. With an alignment of words, a node has the value
    of its word in the donors, or the change towards it; a node of another word has its value in the circuit.

    Args:
        intervention: The intervention; None for the values in the donors, with an alignment.
        model: The first sentence.
        memory: The maximum number of bytes that are used at once.
        nodes: Ground ids of the nodes that may be set.
        donors: The sentences of `Swap`, whose values are its constants in circuits, or those of an alignment.
        alignment: The words of the donors from which words take their values; None for the same words.
    """

    intervention: Any
    model: GroundModel
    memory: int
    nodes: Sequence[int] = ()
    donors: Examples | None = None
    alignment: WordAlignment | None = None
    _constants: dict[int, Tensor] = field(default_factory=dict, repr=False)
    _aligned: dict[int, Tensor] = field(default_factory=dict, repr=False)  # values in the donors, at aligned words

    @property
    def peer(self) -> Examples | None:
        """The donors whose nodes are those of the sentences; None with an alignment, which has its own run."""
        return self.donors if self.alignment is None else None

    @property
    def change(self) -> Change | None:
        """The change of the current value; None for a value that does not depend on the cell."""
        return as_change(self.intervention)

    @property
    def is_relative(self) -> bool:
        """Whether the values depend on those in the run in which they are set."""
        return self.alignment is not None or is_relative(self.intervention)

    @property
    def joins_words(self) -> bool:
        """Whether the value of a node depends on those of its group at other words."""
        return self.is_relative and self.change is None and self.alignment is None

    def find_set_nodes(self, group: int) -> BoolArray:
        """The nodes of a group that the intervention sets: those of aligned words, `[node]`."""
        nodes = np.arange(int(np.prod(self.model.ground.shapes[group], dtype=np.int64)))
        return np.asarray((nodes if self.alignment is None else self.alignment.align_nodes(group, nodes)) >= 0)

    def check(self, groups: Iterable[int]) -> None:
        """Raise an error if the intervention is not defined for the nodes of a group."""
        for index in sorted(groups):
            spec, name = self.model.network.specs[index], self.model.ground.name(int(self.model.ground.offsets[index]))
            if self.change is not None:
                self.change.check(name, spec)
            elif self.joins_words:
                check_has_words(spec, name)

    def build_overrides(self, nodes: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """The values of nodes, with the masks of the nodes, by group; none if they depend on the run."""
        if self.alignment is not None:
            self._aligned = self._align_donors([*self.model.ground.split_by_group(nodes)])
        if self.is_relative:
            return {}
        self.nodes = nodes
        return group_values(self.model, {node: self._get_constant(node) for node in nodes})

    def apply(self, state: ExecutionState, index: int, value: Tensor, donors: ExecutionState) -> Tensor:
        """The values that depend on those of a group, `[circuit, example, *plates, word, *shape]`.

        Args:
            state: The run of the circuit.
            index: The group.
            value: The values of the group in this run.
            donors: The run of the sentences of `Swap`.
        """
        if self.alignment is not None:
            current, target = torch.broadcast_tensors(value, self._aligned[index])
            if self.change is not None:
                target = self.change.apply(current, state.network.specs[index].shape, target)
            is_set = torch.from_numpy(self.find_set_nodes(index)).to(value.device)
            is_set = lay_out_value(state, index, is_set.reshape(1, *self.model.ground.shapes[index]), ())
            return torch.where(is_set.reshape(*is_set.shape, *[1] * (value.dim() - is_set.dim())), target, current)
        if self.change is None:
            return value.mean(state.layout.word_dim, keepdim=True).expand(value.shape)
        shape, ground = state.network.specs[index].shape, self.model.ground
        if self.donors is not None:
            return self.change.apply(value, shape, donors.values[index])
        nodes = range(int(ground.offsets[index]), int(ground.offsets[index + 1]))
        constants = torch.stack([self._get_constant(node) for node in nodes])
        return self.change.apply(
            value, shape, lay_out_value(state, index, constants.reshape(1, *ground.shapes[index], *shape))
        )

    def get_value(self, evaluator: NodeEvaluator, node: int) -> Tensor:
        """The value of one node in one sentence, `[*shape]`, or the constant of a change."""
        if self.joins_words:
            return compute_word_means(evaluator.model, [node], evaluator.value)[node]
        return self._get_constant(node)

    def get_values(self, run: PatchedRun, group: int, nodes: IntArray) -> Tensor:
        """The values of nodes of a group in the sentences of a run, or the constants of a change.

        Args:
            run: The run.
            group: The node group.
            nodes: The nodes, as indices within the group.

        Returns:
            The values, `[1 or N, node, *shape]`.
        """
        spec, offset = run.specs[group], int(self.model.ground.offsets[group])
        if not self.joins_words:
            return torch.stack([self._get_constant(offset + int(node)) for node in nodes])[None]
        name = self.model.ground.name(offset + int(nodes[0]))
        check_has_words(spec, name)
        if not run.base.values[group].is_floating_point():
            raise EvidenceError(name, expected="a node with real values", actual="a discrete node")
        mean = run.base.values[group].mean(run.base.layout.word_dim, keepdim=True)
        return gather_nodes(run.base, spec, mean, get_layout_index(run.base, spec, nodes)).transpose(0, 1)

    def _align_donors(self, groups: Sequence[int]) -> dict[int, Tensor]:
        """The values of groups in the donors at aligned words, `[1, example, *plates, word, *shape]`."""
        assert self.alignment is not None and self.donors is not None
        if (obstacle := self.donors.find_obstacle(groups)) is not None:
            raise UnsupportedError(f"words: the corrupt sentences cannot be one run, because {obstacle}")
        state, aligned = self.donors.run(groups), dict[int, Tensor]()
        for index in groups:
            value, stack = state.values[index], self.model.network.specs[index].group.word_stack
            if stack is not None and value.shape[state.layout.word_dim] > 1:
                words = torch.from_numpy(self.alignment.by_stack[stack].clip(0)).to(value.device)
                value = value.index_select(state.layout.word_dim, words)
            aligned[index] = value[None]
        return aligned

    def _get_constant(self, node: int) -> Tensor:
        """The value of an intervention that does not depend on the run, or the constant of a change; zeros if none."""
        if node in self._constants:
            return self._constants[node]
        if isinstance(self.intervention, Mean) and not self._constants:
            self._constants |= compute_means(self.model, self.nodes, self.intervention.sentences, self.memory)
        if node not in self._constants and self.change is None:
            value = resolve_value(self.model, node, self.intervention)
            assert isinstance(value, Tensor)
            self._constants[node] = value
        elif node not in self._constants and self.change is not None:
            name, spec = self.model.ground.name(node), locate_node(self.model, node)[0]
            self.change.check(name, spec)
            zeros = torch.zeros(spec.shape, dtype=self.model.network.dtype, device=self.model.network.device)
            constant = self.change.get_constant(name, zeros)
            self._constants[node] = zeros if constant is None else constant
        return self._constants[node]


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
        if batch.find_obstacle(groups) is not None:  # the caller then computes nodes one by one
            return {}
        size = max(1, memory // (2 * estimate_bytes(batch.model, find_needed_positions(batch.model, ids))[1]))
        for part in batch.split(size):
            run = part.run(groups)
            for index, members in ground.split_by_group(list(ids)).items():
                spec = model.network.specs[index]
                position = get_layout_index(run, spec, np.array(members) - int(ground.offsets[index]))
                values = gather_nodes(run, spec, run.values[index], position)
                sums = values.expand(-1, len(part), *spec.shape).sum(1)
                for node, value in zip(members, sums, strict=True):
                    totals[ids[node]] = totals[ids[node]] + value
    return {node: total / len(sentences) for node, total in totals.items()}

"""Evaluation of many circuits on the same examples in one batch, from the first group that changes to the outcomes.

Along a retained arrow a node uses the value of its parent in the run of the circuit; along any other arrow it uses
the value in the corrupt run. Values have the layout `[circuit, example, *plates, word, *shape]`; a mask `[circuit,
arrow]` marks the retained arrows into a node group. A node that reads all words can then read a different collection in
each circuit and for each word, `[..., i, j, *shape]`. This tensor is avoided if all words use the same collection. It
is also avoided for an attention, which instead mixes the scores and the weighted values of the two runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bnet_transformer._core.arrays import BoolArray
from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.evaluate import evaluate_tpm
from bnet_transformer.compiler.execution_state import ExecutionState, TensorLayout
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import UnsupportedError
from bnet_transformer.graph import ancestors
from bnet_transformer.interventions.circuits.arrows import (
    CircuitArrows,
    IncomingArrows,
    get_node_slice,
    mark_needed_sources,
)
from bnet_transformer.interventions.sweeps.examples import Examples, Metric
from bnet_transformer.interventions.sweeps.sparse_update import (
    CELL_AXIS,
    get_layout_shape,
    get_parent_groups,
    summarize_distribution,
)
from bnet_transformer.tpm import Attention, Bilinear, Dot, EvalContext

GroupValues = dict[int, Tensor]


@dataclass(frozen=True)
class MaskedGroup:
    """A node group (or its one needed word) that is evaluated with a mask over its incoming arrows.

    `slot_arrows` contains, for each entry of each slot, `[1 or N, *plates, word, *over]`, the index of the arrow along
    which the entry is read; -1 for an idle arrow.
    """

    spec: NodeSpec
    word: int | None
    slot_arrows: tuple[Tensor, ...]

    @classmethod
    def build(cls, state: ExecutionState, arrows: CircuitArrows, index: int, word: int | None) -> MaskedGroup:
        """Find the arrow of each entry of each slot: gather node ids instead of values, and find the pairs of ids."""
        spec, offsets = state.network.specs[index], arrows.ground.offsets
        incoming = arrows.incoming.get(index, IncomingArrows(*[np.zeros(0, dtype=np.int64)] * 3))
        scale = len(arrows.ground)
        find_arrows = pd.Index(incoming.targets * scale + incoming.sources).get_indexer  # -1 for pairs without an arrow
        targets, slot_arrows = _number_nodes(state, spec, int(offsets[index]), word)[0], []
        for parent in spec.parents:
            parent_spec = state.network.specs[parent.index]
            picks = {selector: state.values[selector] for _, selector in parent.pick}
            numbers = _number_nodes(state, parent_spec, int(offsets[parent.index]), None) + 1  # 0 is padding
            numbered = replace(state, values={**picks, parent.index: numbers})
            _, (source,) = gather_parents(numbered, replace(spec, parents=(parent,)), word)
            target = targets.reshape(*targets.shape, *[1] * (source.dim() - 1 - targets.dim()))
            ends = torch.where(source[0] > 0, target * scale + source[0] - 1, -1)
            numbers_of_arrows = torch.from_numpy(find_arrows(ends.reshape(-1).cpu().numpy()))
            slot_arrows.append(numbers_of_arrows.reshape(ends.shape).to(state.device))
        return cls(spec, word, tuple(slot_arrows))

    @staticmethod
    def can_mix_attention(spec: NodeSpec) -> bool:
        """True for an attention over words whose scores and weighted values can be a mixture of two runs."""
        is_supported = isinstance(spec.tpm, Attention) and isinstance(spec.tpm.score, Dot | Bilinear)
        return is_supported and all(parent.over in ((), (WORD,)) for parent in spec.parents)

    def compute(self, state: ExecutionState, corrupt: ExecutionState, retained: Tensor) -> Tensor:
        """The values of the group in each circuit.

        Args:
            state: The values of the circuit's run.
            corrupt: The corrupt run.
            retained: The mask of the retained arrows into the group, `[circuit, arrow]`.

        Returns:
            The values, `[circuit, example, *plates, word, *shape]`; for a random group `log P` or the mean.
        """
        context, values = gather_parents(state, self.spec, self.word)
        _, corrupt_values = gather_parents(corrupt, self.spec, self.word)

        def select_slots() -> list[Tensor]:
            slots = zip(values, corrupt_values, self.slot_arrows, strict=True)
            return [_select_parent_values(*slot, retained) for slot in slots]

        if self.can_mix_attention(self.spec) and not bool(retained.all()):
            result = self._mix_attention(context, values, corrupt_values, retained)
        elif self.spec.tpm.is_random:
            result = summarize_distribution(self.spec, context, select_slots())
        else:
            result = evaluate_tpm(state, self.spec, context, select_slots())
        event_shape = result.shape[-1:] if self.spec.tpm.kind == "discrete" else self.spec.shape
        result = state.layout.pad_dims(result, len(event_shape))
        if self.spec.group.index not in state.attention_rows:
            return result
        rows, is_set = state.attention_rows[self.spec.group.index]  # nodes with a set row of attention
        if self.word is not None:
            rows, is_set = (tensor.narrow(state.layout.word_dim, self.word, 1) for tensor in (rows, is_set))
        assert isinstance(self.spec.tpm, Attention)
        return torch.where(is_set[..., None], self.spec.tpm.mix(rows, *select_slots()), result)

    def _mix_attention(
        self, context: EvalContext, circuit_parents: list[Tensor], corrupt_parents: list[Tensor], retained: Tensor
    ) -> Tensor:
        """Evaluate an attention whose scores and weighted values are a mixture of both runs."""
        # A score reads one key, and the weighted sum is linear in the values. So the score of word j comes from the run
        # in which k_j is read, and sum_j w_j v_j is the sum over retained arrows plus the sum over other arrows with
        # the values of the corrupt run. No copy of all keys and values for each word is necessary.
        tpm = self.spec.tpm
        assert isinstance(tpm, Attention)
        names = [parent.slot for parent in self.spec.parents]
        read_slot = next(k for k, name in enumerate(names[:2]) if name.endswith("."))
        parents = [
            value if k in (read_slot, 2) else _select_parent_values(value, corrupt, slot, retained)
            for k, (value, corrupt, slot) in enumerate(
                zip(circuit_parents, corrupt_parents, self.slot_arrows, strict=True)
            )
        ]
        scores, mask = tpm.scores(context, *parents)
        in_circuit = _build_mask(self.slot_arrows[read_slot], retained)
        if in_circuit is not None:
            swapped = [*parents]
            swapped[read_slot] = corrupt_parents[read_slot]
            scores = torch.where(in_circuit, scores, tpm.scores(context, *swapped)[0])
        weights = tpm.normaliser.normalise(scores, mask)
        in_circuit = _build_mask(self.slot_arrows[2], retained)
        if in_circuit is None:
            return tpm.mix(weights, *parents)
        swapped = [*parents]
        swapped[2] = corrupt_parents[2]
        if tpm.residual:
            swapped[-1] = torch.zeros_like(swapped[-1])  # the first of the two sums adds the residual
        return tpm.mix(weights * in_circuit, *parents) + tpm.mix(weights * ~in_circuit, *swapped)


def _number_nodes(state: ExecutionState, spec: NodeSpec, offset: int, word: int | None) -> Tensor:
    """The ids of the nodes of a group in the layout, `[1, 1, *plates, word]`."""
    shape = (1, 1, *get_layout_shape(state, spec))
    ids = (torch.arange(int(np.prod(shape)), device=state.device) + offset).reshape(shape)
    return ids if word is None else ids.narrow(state.layout.word_dim, word, 1)


def _select_parent_values(
    circuit_value: Tensor, corrupt_value: Tensor, slot_arrows: Tensor, retained: Tensor
) -> Tensor:
    """The values that a slot reads: of the circuit along retained and idle arrows, else of the corrupt run."""
    mask = _build_mask(slot_arrows, retained)
    if mask is None:
        return circuit_value
    for d in range(1, mask.dim()):  # words (or heads) that read the same arrows share a collection
        if mask.shape[d] > 1 and circuit_value.shape[d] == corrupt_value.shape[d] == 1:
            mask = _collapse_dim(mask, slot_arrows >= 0, d)
    event_dim = circuit_value.dim() - mask.dim()
    return torch.where(mask.reshape(*mask.shape, *[1] * event_dim), circuit_value, corrupt_value)


def _build_mask(slot_arrows: Tensor, retained: Tensor) -> Tensor | None:
    """The mask of the slot's entries whose arrow is retained, `[circuit, *entries]`; None if all arrows are."""
    if bool(retained.all()):
        return None
    mask = retained[:, slot_arrows.clamp(min=0)] & (slot_arrows >= 0)
    return None if bool((mask | ~(slot_arrows >= 0)).all()) else mask


def _collapse_dim(mask: Tensor, has_arrow: Tensor, dim: int) -> Tensor:
    """Reduce a dim of a mask to size 1 if all entries with an arrow agree along it; else return the mask unchanged."""
    has_true, has_false = (part.any(dim, keepdim=True) for part in (mask, ~mask & has_arrow))
    return mask if bool((has_true & has_false).any()) else has_true


@dataclass
class CircuitRunner:
    """Evaluates circuits. The first circuit has all arrows, and `fix_arrows` fixes one node group at a time.

    Groups are fixed from the outcomes to the inputs. So the ancestors of the group under test have all their arrows and
    their clean values, and only the group and its descendants are computed again.

    Args:
        clean: The clean run.
        corrupt: The corrupt run.
        arrows: The active arrows, by the node group of their target.
        metric: The metric.
        num_examples: The number of examples.
        memory: The maximum number of bytes that are used at once.

    `retained` contains the mask of the retained arrows into each group. `needed` marks the nodes that lead to an
    outcome along these arrows, `[node]`. `circuit_values` contains the values of the fixed groups in the run of the
    current circuit. If only one word of a group is needed, the group is computed for that word only (`single_words`).
    """

    clean: ExecutionState
    corrupt: ExecutionState
    arrows: CircuitArrows
    metric: Metric
    num_examples: int
    memory: int
    retained: dict[int, BoolArray] = field(init=False)
    needed: BoolArray = field(init=False)
    circuit_values: GroupValues = field(init=False)
    single_words: dict[int, int] = field(default_factory=dict)
    _masked_groups: dict[tuple[int, int | None], MaskedGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.retained = {group: np.ones(len(incoming), dtype=bool) for group, incoming in self.arrows.incoming.items()}
        self.needed = np.zeros(len(self.arrows.ground), dtype=bool)
        self.needed[list(self.arrows.outcome_nodes)] = True
        self.circuit_values = self._summarize_outcomes(self.clean)

    def fix_arrows(self, group: int, retained: BoolArray) -> None:
        """Fix the retained arrows into a group, `[arrow]`, and update the values of the circuit."""
        self.retained[group] = retained
        affected = self._find_affected_groups(group)
        if affected:
            self.circuit_values |= self._compute_groups(affected, retained[None], should_release=False)
        mark_needed_sources(self.arrows, self.retained, self.needed, group)

    def evaluate_candidates(self, group: int, masks: BoolArray) -> Tensor:
        """The metric, `[circuit, example]`, with each mask of the arrows into a group, `[circuit, arrow]`."""
        affected = self._find_affected_groups(group)
        size, results = max(1, self.memory // max(1, sum(map(self._estimate_bytes, affected)))), []
        for start in range(0, len(masks), size):
            part = masks[start : start + size]
            values = {**self.circuit_values, **self._compute_groups(affected, part)}
            results.append(self._evaluate_metric(values, len(part)))
        return torch.cat(results)

    def evaluate_run(self, state: ExecutionState) -> Tensor:
        """The metric of the clean or of the corrupt run: `[example]`."""
        return self._evaluate_metric(self._summarize_outcomes(state), 1, state)[0]

    def evaluate_circuit(self) -> Tensor:
        """The metric of the current circuit: `[example]`."""
        return self._evaluate_metric(self.circuit_values, 1)[0]

    def _find_affected_groups(self, group: int) -> list[int]:
        """The group and its descendants that lead to an outcome, in order; empty if the group does not."""
        graph, affected = self.clean.network.graph, {group}
        for index in self.arrows.incoming:
            if index > group and any(edge.parent in affected for edge in graph.in_edges[index]):
                affected.add(index)
        needed = [index for index in sorted(affected) if self.needed[get_node_slice(self.arrows.ground, index)].any()]
        for index in needed:
            self._find_single_word(index)
        return needed if group in needed else []

    def _find_single_word(self, index: int) -> None:
        """Record the word of a group if only one word is needed; called when all groups that read it are fixed."""
        spec, ground = self.clean.network.specs[index], self.arrows.ground
        if (
            spec.group.word_stack is not None
            and self.clean.word_counts[spec.group.word_stack] > 1
            and index not in self.single_words
        ):
            marks = self.needed[get_node_slice(ground, index)].reshape(ground.shapes[index])
            words = np.flatnonzero(marks.reshape(-1, marks.shape[-1]).any(0))
            self.single_words[index] = int(words[0]) if len(words) == 1 else -1

    @torch.no_grad()
    def _compute_groups(self, groups: Sequence[int], masks: BoolArray, *, should_release: bool = True) -> GroupValues:
        """The values of groups in topological order; the first group is computed with each mask of `[circuit, arrow]`.

        With `should_release`, values are freed after their last use, except those of outcomes.
        """
        specs = self.clean.network.specs
        last_use = {parent.index: k for k, index in enumerate(groups) for parent in specs[index].parents}
        outcome_groups = {self.arrows.ground.group_of(node).index for node in self.arrows.outcome_nodes}
        words = {index: word for index, word in self.single_words.items() if word >= 0}
        values: GroupValues = {}
        for k, index in enumerate(groups):
            retained = torch.from_numpy(masks if k == 0 else self.retained[index][None]).to(self.clean.device)
            merged = {**self.circuit_values, **values}
            values[index] = self._compute_group(index, words.get(index), merged, retained, words)
            for i in [*values] if should_release else ():
                if last_use.get(i, -1) <= k and i != index and i not in outcome_groups:
                    del values[i]
        return values

    def _compute_group(
        self,
        index: int,
        word: int | None,
        values: Mapping[int, Tensor],
        retained: Tensor,
        single_words: Mapping[int, int],
    ) -> Tensor:
        """The values of one group in each circuit; nodes that `do` sets have their set values."""
        key = index, word
        if key not in self._masked_groups:
            self._masked_groups[key] = MaskedGroup.build(self.clean, self.arrows, index, word)
        masked = self._masked_groups[key]
        result = masked.compute(self._build_state(masked.spec, word, values, single_words), self.corrupt, retained)
        value, is_set = self.clean.patched.get(index, (None, None))
        if value is not None and is_set is not None and result.dim() == value.dim():  # not log P of a choice
            if word is not None:
                value, is_set = (tensor.narrow(self.clean.layout.word_dim, word, 1) for tensor in (value, is_set))
            result = torch.where(is_set.reshape(*is_set.shape, *[1] * (value.dim() - is_set.dim())), value, result)
        return result

    def _build_state(
        self, spec: NodeSpec, word: int | None, values: Mapping[int, Tensor], single_words: Mapping[int, int]
    ) -> ExecutionState:
        """The state that a group reads: values of the circuit if they are computed, else clean values."""
        merged = self.clean.values | {g.index: values[g.index] for g in spec.parents if g.index in values}
        axis = self.clean.layout.word_dim
        for parent in spec.parents:
            index, parent_word = parent.index, single_words.get(parent.index)
            is_aligned = parent.reach.kind == "same" and parent_word == word
            if parent_word is not None and not is_aligned and index in values and merged[index].shape[axis] == 1:
                # Only one word is computed. The other words get corrupt values, which no needed node uses.
                value, corrupt_value = merged[index], self.corrupt.values[index]
                count = self.clean.word_counts[self.clean.network.specs[index].group.word_stack or ""]
                batch_shape = torch.broadcast_shapes(value.shape[:axis], corrupt_value.shape[:axis])
                expanded = corrupt_value.expand(*batch_shape, count, *corrupt_value.shape[axis + 1 :]).clone()
                expanded.narrow(axis, parent_word, 1).copy_(value.expand(*batch_shape, 1, *value.shape[axis + 1 :]))
                merged[index] = expanded
        return replace(self.clean, values=merged)

    @torch.no_grad()
    def _summarize_outcomes(self, state: ExecutionState) -> GroupValues:
        """The summaries (`log P`, or the mean) of the random outcomes in a run, by node group."""
        summaries: GroupValues = {}
        for node in self.arrows.outcome_nodes:
            index = self.arrows.ground.group_of(node).index
            if index not in state.values and index not in summaries:
                spec = state.network.specs[index]
                value = summarize_distribution(spec, *gather_parents(state, spec))
                event_dim = 1 if spec.tpm.kind == "discrete" else len(spec.shape)
                summaries[index] = state.layout.pad_dims(value, event_dim)
        return summaries

    def _evaluate_metric(
        self, values: Mapping[int, Tensor], num_circuits: int, state: ExecutionState | None = None
    ) -> Tensor:
        """The metric of the values of node groups: `[circuit, example]`."""
        base, outcomes = state or self.clean, {}
        for node in self.arrows.outcome_nodes:
            group, index = self.arrows.ground.unravel_index(node)
            value = values[group.index] if group.index in values else base.values[group.index]
            position = dict(zip(self.arrows.ground.axes(group), index, strict=True))
            for plate in reversed((*base.layout.plates, WORD)):
                axis = base.layout.axis(plate)
                value = value.select(axis, position.get(plate, 0) if value.shape[axis] > 1 else 0)
            outcomes[node] = value.expand(num_circuits, self.num_examples, *value.shape[2:])
        return self.metric(outcomes)

    def _estimate_bytes(self, index: int) -> int:
        """An upper bound of the memory of a group, and of the collections that it reads, in one circuit."""
        spec, sizes = self.clean.network.specs[index], self.clean.network.graph.plate_sizes
        *plates, words = get_layout_shape(self.clean, spec)
        count = self.num_examples * math.prod(plates) * (1 if self.single_words.get(index, -1) >= 0 else words)
        num_values = self.clean.count_states(index) if spec.tpm.kind == "discrete" else math.prod(spec.shape)
        sources = self.arrows.incoming[index].sources
        for parent, tpm_parent in zip(spec.parents, spec.tpm_parents, strict=True):
            ids = get_node_slice(self.arrows.ground, parent.index)
            if not ((sources >= ids.start) & (sources < ids.stop)).any():
                continue  # the slot is the same in all circuits
            read_stack = self.clean.network.specs[parent.index].group.word_stack or ""
            counts = {**sizes, WORD: self.clean.word_counts.get(read_stack, 1)}
            size = math.prod(counts[axis] for axis in parent.over)
            num_values += size * (1 if MaskedGroup.can_mix_attention(spec) else math.prod(tpm_parent.shape))
        return 3 * count * num_values * self.clean.dtype.itemsize


def build_runner(
    clean: Examples, corrupt: Examples, arrows: CircuitArrows, metric: Metric, memory: int
) -> CircuitRunner:
    """Run both sides of the examples, and start from the circuit of all arrows."""
    clean_state, corrupt_state = (_run_examples(examples, arrows.outcome_nodes) for examples in (clean, corrupt))
    return CircuitRunner(clean_state, corrupt_state, arrows, metric, len(clean), memory)


def check_ancestors_fixed(examples: Examples, outcome_nodes: Sequence[int]) -> None:
    """Raise an error if a random ancestor of an outcome is not set."""
    model = examples.model
    for node in ancestors(model.ground, outcome_nodes):
        spec = model.network.specs[model.ground.group_of(node).index]
        if spec.tpm.is_random and node not in model.do:
            name = model.ground.name(node)
            raise UnsupportedError(
                f"circuit: the metric depends on the random node {name}, which is not set",
                hint=f"Set it in clean and corrupt by do({name}=...)",
            )


def _run_examples(examples: Examples, outcome_nodes: Sequence[int]) -> ExecutionState:
    """Run the ancestors of the outcomes, with a leading dim for circuits: `[1, example, *plates, word, *shape]`."""
    model = examples.model
    nodes = *outcome_nodes, *ancestors(model.ground, outcome_nodes)
    ancestor_groups = {model.ground.group_of(node).index for node in nodes}
    set_groups = {model.ground.group_of(node).index for node in model.do}
    specs = model.network.specs
    state = examples.run({index for index in ancestor_groups if not specs[index].tpm.is_random or index in set_groups})
    values = {index: value[None] for index, value in state.values.items()}
    return replace(
        state,
        layout=TensorLayout((CELL_AXIS,), state.layout.plates),
        values=_zero_pruned_groups(state, ancestor_groups) | values,
        patched={index: (value[None], is_set[None]) for index, (value, is_set) in state.patched.items()},
        attention_rows={index: (value[None], is_set[None]) for index, (value, is_set) in state.attention_rows.items()},
        known={},
        attention_weights={},
    )


def _zero_pruned_groups(state: ExecutionState, ancestor_groups: set[int]) -> GroupValues:
    """Zeros for the parent groups that no longer lead to an outcome after surgery: a TPM still gathers them."""
    specs, zeros = state.network.specs, {}
    for index in ancestor_groups:
        for parent in get_parent_groups(state.network, specs[index]):
            if parent not in ancestor_groups:
                dtype = torch.long if specs[parent].tpm.is_index_valued else state.dtype
                shape = 1, 1, *get_layout_shape(state, specs[parent]), *specs[parent].shape
                zeros[parent] = torch.zeros(shape, dtype=dtype, device=state.device)
    return zeros

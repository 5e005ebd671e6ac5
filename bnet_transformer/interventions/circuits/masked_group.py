"""A node group that is evaluated in many circuits at once, with a mask over its incoming arrows.

Along a retained arrow a node uses the value of its parent in the run of the circuit; along any other arrow it uses
the value in the corrupt run. Values have the layout `[circuit, example, *plates, word, *shape]`; a mask `[circuit,
arrow]` marks the retained arrows into a node group. A node that reads all words can then read a different collection in
each circuit and for each word, `[..., i, j, *shape]`. This tensor is avoided if all words use the same collection. It
is also avoided for an attention, which instead mixes the scores and the weighted values of the two runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.evaluate import evaluate_tpm
from bnet_transformer.compiler.execution_state import ExecutionState
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.declare import NodeSpec
from bnet_transformer.interventions.circuits.arrows import CircuitArrows, IncomingArrows
from bnet_transformer.interventions.sweeps.sparse_update import get_layout_shape, summarize_distribution
from bnet_transformer.tpm import Attention, Bilinear, Dot, EvalContext


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

"""One run of the reference: the value, distribution and attention of each node, given a state of each random node."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from bnet_transformer._core.naming import WORD
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, EvidenceError
from bnet_transformer.reference.ground_model import GroundModel, evaluation_order, find_slot_parents, locate_node
from bnet_transformer.tpm import Attention, EvalContext


class ReferenceRun:
    """One full course of events: `states` says what each random node came to; the rest follows.

    `enumerate_values` has the values of nodes so far; what is put there counts as a node's value.
    """

    def __init__(self, model: GroundModel, states: Mapping[int, Tensor]) -> None:
        self.model = model
        self.states = states
        self.values: dict[int, Tensor] = {}

    def value(self, node: int) -> Tensor:
        """The value of a node, as its children receive it."""
        if node not in self.values:
            for ancestor in evaluation_order(self.model, node, self.values, self.states):
                self.values[ancestor] = self._compute_value(ancestor)
        return self.values[node]

    def _compute_value(self, node: int) -> Tensor:
        member, index = locate_node(self.model, node)
        settled = self.model.do.get(node, self.states.get(node))
        if settled is not None:
            whole_state = member.tpm.kind == "discrete" and not settled.is_floating_point()
            return member.tpm.emit(self._make_context(member, index), settled) if whole_state else settled
        if member.tpm.kind == "input":
            return self.model.inputs[member.group.name][index]
        if member.tpm.is_random:
            name = self.model.ground.name(node)
            raise EvidenceError(name, expected="a state or evidence, for it is random", actual="neither")
        value = (
            self._mix_by_row(node)
            if node in self.model.attention_rows
            else member.tpm.value(*self._tpm_arguments(member, index))
        )
        if not isinstance(value, Tensor) or tuple(value.shape) != member.shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            what = f"{self.model.ground.name(node)} ({type(member.tpm).__name__})"
            raise BNetError(what, expected=f"a value of shape {member.shape}, as it says", actual=got)
        if bool(value.isnan().any()):
            raise BNetError(self.model.ground.name(node), expected="a value that is a number", actual="NaN")
        return value

    def _mix_by_row(self, node: int) -> Tensor:
        """The mix of an attention by the row that was set."""
        member, index = locate_node(self.model, node)
        assert isinstance(member.tpm, Attention)
        at, *parents = self._tpm_arguments(member, index, member.tpm.mixed_slots())
        return member.tpm.mix(self.model.attention_rows[node][at.read_indices["v."]], *parents)

    def distribution(self, node: int) -> Distribution:
        """`P(node | its parents)`, a delta for what is given or set."""
        from pyro.distributions import Delta

        member, index = locate_node(self.model, node)
        if node in {**self.model.do, **self.model.attention_rows} or member.tpm.kind == "input":
            value = self.value(node)
            return Delta(value, event_dim=value.dim())
        at, *parents = self._tpm_arguments(member, index)
        if member.tpm.kind == "discrete" and member.tpm.states is None:
            network = self.model.network
            scores = torch.full((self.model.count_states(node),), -math.inf, dtype=network.dtype, device=network.device)
            scores[next(iter(at.read_indices.values()))] = member.tpm.logits(at, *parents)
            return torch.distributions.Categorical(logits=scores, validate_args=False)
        found: Any = member.tpm.distribution(at, *parents)
        if member.tpm.kind == "discrete" and found.param_shape[-1] != member.tpm.states:
            what = f"{self.model.ground.name(node)} ({type(member.tpm).__name__})"
            raise BNetError(what, expected=f"logits for {member.tpm.states} states", actual=f"{found.param_shape[-1]}")
        distribution: Distribution = found
        return distribution

    def log_prob(self, node: int) -> Tensor:
        """`log P(what a random node came to | its parents)`."""
        found: Tensor = self.distribution(node).log_prob(self.states[node]).double()
        if bool(found.isnan().any()):
            raise BNetError(self.model.ground.name(node), expected="a log probability that is a number", actual="NaN")
        return found

    def attention(self, node: int) -> tuple[list[int], Tensor] | None:
        """The words that a node reads and `P(j | i)` over them, where its TPM has that distribution."""
        member, index = locate_node(self.model, node)
        if node in self.model.attention_rows:
            given = next(given for given in member.parents if given.slot == "v.")
            words = find_slot_parents(self.model, member, index, given, self.states)[2]
            return words, self.model.attention_rows[node][words]
        at, *parents = self._tpm_arguments(member, index, member.tpm.attention_slots())
        weights = member.tpm.attention_weights(at, *parents)
        if weights is None:
            return None
        if bool(weights.isnan().any()):
            raise BNetError(self.model.ground.name(node), expected="a reading P(j | i) of numbers", actual="NaN")
        return next(iter(at.read_indices.values())).tolist(), weights

    def _tpm_arguments(
        self, spec: NodeSpec, index: tuple[int, ...], slots: tuple[str, ...] | None = None
    ) -> tuple[EvalContext, *tuple[Tensor, ...]]:
        """What the TPM of a node sees: where it stands, then the value in each slot (of `slots`, the rest empty)."""
        read, mask, enumerate_values = {}, {}, []
        device = self.model.network.device
        for given in spec.parents:
            if slots is not None and given.slot not in slots:
                enumerate_values.append(torch.zeros(0))
                continue
            shape, ids, words = find_slot_parents(self.model, spec, index, given, self.states)
            found = [self.value(node) if node >= 0 else None for node in ids]
            parent = self.model.network.specs[given.index]
            zero = torch.zeros(
                parent.shape,
                dtype=torch.long if parent.tpm.is_index_valued else self.model.network.dtype,
                device=device,
            )
            filled = [zero if value is None else value for value in found]
            enumerate_values.append(
                torch.stack(filled or [zero])[: len(filled)].reshape(*shape, *zero.shape) if shape else filled[0]
            )
            if shape:
                there = words if WORD in given.over else list(range(shape[-1]))
                read[given.slot] = torch.tensor(there, device=device)
                mask[given.slot] = torch.ones(len(there), dtype=torch.bool, device=device)
        return (self._make_context(spec, index, read, mask), *enumerate_values)

    def _make_context(
        self,
        spec: NodeSpec,
        index: tuple[int, ...],
        read_indices: Mapping[str, Tensor] | None = None,
        mask: Mapping[str, Tensor] | None = None,
    ) -> EvalContext:
        plates = index[: len(spec.group.plates)]
        parameters = {name: value[plates] for name, value in self.model.network.get_parameters(spec).items()}
        word = torch.tensor(index[-1] if spec.group.word_stack is not None else 0, device=self.model.network.device)
        return EvalContext(parameters, word, read_indices or {}, mask or {}, dtype=self.model.network.dtype)

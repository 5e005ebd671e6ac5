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
    """One run: `states` contains the state of each random node, which determines all other values.

    `values` caches the values of nodes; a value that a caller stores there replaces the computed one.
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
        """Compute the value of a node from the values of its parents."""
        spec, index = locate_node(self.model, node)
        fixed = self.model.do.get(node, self.states.get(node))
        if fixed is not None:
            is_state = spec.tpm.kind == "discrete" and not fixed.is_floating_point()
            return spec.tpm.emit(self._make_context(spec, index), fixed) if is_state else fixed
        if spec.tpm.kind == "input":
            return self.model.inputs[spec.group.name][index]
        if spec.tpm.is_random:
            name = self.model.ground.name(node)
            hint = f"Use tpm({name!r}) for its distribution, or observe or set it"
            raise EvidenceError(f"{name}: the node is random and has no value", hint=hint)
        value = (
            self._mix_by_row(node)
            if node in self.model.attention_rows
            else spec.tpm.value(*self._tpm_arguments(spec, index))
        )
        if not isinstance(value, Tensor) or tuple(value.shape) != spec.shape:
            actual = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            subject = f"{self.model.ground.name(node)} ({type(spec.tpm).__name__})"
            raise BNetError(subject, expected=f"a value of its declared shape {spec.shape}", actual=actual)
        if bool(value.isnan().any()):
            raise BNetError(self.model.ground.name(node), expected="a value that is a number", actual="NaN")
        return value

    def _mix_by_row(self, node: int) -> Tensor:
        """The value of an attention node whose row is set."""
        spec, index = locate_node(self.model, node)
        assert isinstance(spec.tpm, Attention)
        context, *parents = self._tpm_arguments(spec, index, spec.tpm.mixed_slots())
        return spec.tpm.mix(self.model.attention_rows[node][context.read_indices["v."]], *parents)

    def distribution(self, node: int) -> Distribution:
        """`P(node | parents)`; a delta for inputs and for nodes that are set."""
        from pyro.distributions import Delta

        spec, index = locate_node(self.model, node)
        if node in {**self.model.do, **self.model.attention_rows} or spec.tpm.kind == "input":
            value = self.value(node)
            return Delta(value, event_dim=value.dim())
        context, *parents = self._tpm_arguments(spec, index)
        if spec.tpm.kind == "discrete" and spec.tpm.states is None:
            network = self.model.network
            scores = torch.full((self.model.count_states(node),), -math.inf, dtype=network.dtype, device=network.device)
            scores[next(iter(context.read_indices.values()))] = spec.tpm.logits(context, *parents)
            return torch.distributions.Categorical(logits=scores, validate_args=False)
        conditional: Any = spec.tpm.distribution(context, *parents)
        if spec.tpm.kind == "discrete" and conditional.param_shape[-1] != spec.tpm.states:
            subject = f"{self.model.ground.name(node)} ({type(spec.tpm).__name__})"
            raise BNetError(
                subject, expected=f"logits for {spec.tpm.states} states", actual=f"{conditional.param_shape[-1]}"
            )
        distribution: Distribution = conditional
        return distribution

    def log_prob(self, node: int) -> Tensor:
        """`log P(state | parents)` of a random node."""
        log_prob: Tensor = self.distribution(node).log_prob(self.states[node]).double()
        if bool(log_prob.isnan().any()):
            raise BNetError(self.model.ground.name(node), expected="a log probability that is a number", actual="NaN")
        return log_prob

    def attention(self, node: int) -> tuple[list[int], Tensor] | None:
        """The words to which a node attends, and `P(j | i)` over them; None if its TPM has no such distribution."""
        spec, index = locate_node(self.model, node)
        if node in self.model.attention_rows:
            parent = next(parent for parent in spec.parents if parent.slot == "v.")
            words = find_slot_parents(self.model, spec, index, parent, self.states)[2]
            return words, self.model.attention_rows[node][words]
        context, *parents = self._tpm_arguments(spec, index, spec.tpm.attention_slots())
        weights = spec.tpm.attention_weights(context, *parents)
        if weights is None:
            return None
        if bool(weights.isnan().any()):
            raise BNetError(self.model.ground.name(node), expected="attention P(j | i) of numbers", actual="NaN")
        return next(iter(context.read_indices.values())).tolist(), weights

    def _tpm_arguments(
        self, spec: NodeSpec, index: tuple[int, ...], slots: tuple[str, ...] | None = None
    ) -> tuple[EvalContext, *tuple[Tensor, ...]]:
        """The arguments of a node's TPM: the context, and the value in each slot; slots not in `slots` are empty."""
        read_indices, mask, missing, arguments = {}, {}, dict[int, Tensor](), []
        device = self.model.network.device
        for k, parent in enumerate(spec.parents):
            if slots is not None and parent.slot not in slots:
                arguments.append(torch.zeros(0))
                continue
            shape, ids, words = find_slot_parents(self.model, spec, index, parent, self.states)
            values = [self.value(node) if node >= 0 else None for node in ids]
            parent_spec = self.model.network.specs[parent.index]
            zero = torch.zeros(
                parent_spec.shape,
                dtype=torch.long if parent_spec.tpm.is_index_valued else self.model.network.dtype,
                device=device,
            )
            if spec.tpm_parents[k].is_optional:
                missing[k] = torch.tensor(ids == [-1], device=device)
            padded = [zero if value is None else value for value in values]
            arguments.append(
                torch.stack(padded or [zero])[: len(padded)].reshape(*shape, *zero.shape) if shape else padded[0]
            )
            if shape:
                indices = words if WORD in parent.over else list(range(shape[-1]))
                read_indices[parent.slot] = torch.tensor(indices, device=device)
                mask[parent.slot] = torch.ones(len(indices), dtype=torch.bool, device=device)
        return (self._make_context(spec, index, read_indices, mask, missing), *arguments)

    def _make_context(
        self,
        spec: NodeSpec,
        index: tuple[int, ...],
        read_indices: Mapping[str, Tensor] | None = None,
        mask: Mapping[str, Tensor] | None = None,
        missing: Mapping[int, Tensor] | None = None,
    ) -> EvalContext:
        """The context of a node: its parameters, its word, and what the caller passes."""
        plates = index[: len(spec.group.plates)]
        parameters = {name: value[plates] for name, value in self.model.network.get_parameters(spec).items()}
        word = torch.tensor(index[-1] if spec.group.word_stack is not None else 0, device=self.model.network.device)
        return EvalContext(
            parameters, word, read_indices or {}, mask or {}, dtype=self.model.network.dtype, missing=missing or {}
        )

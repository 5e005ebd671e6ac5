"""The compiled net as an `nn.Module`: it shares the net's parameters and computes only what the outputs need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bnet_transformer._core.checks import check_int, check_mapping
from bnet_transformer._core.naming import WORD
from bnet_transformer._core.tensors import is_dense
from bnet_transformer.compiler.evaluate import plan_to_values
from bnet_transformer.compiler.gather import (
    ExecutionRequest,
    ExecutionState,
    StackTensors,
    TensorLayout,
    ValidatedInputs,
    gather_parents,
    zero_padding,
)
from bnet_transformer.compiler.plan import Plan, Requirements, find_requirements, network_to_plan
from bnet_transformer.data.encode import check_word_counts, find_main_input
from bnet_transformer.declare import Network, NodeSpec, ParentSpec, as_network
from bnet_transformer.errors import BNetError, UnsupportedError, unknown_name_error
from bnet_transformer.graph import NodeGroup

# --------------------------------------------------------------------------------------------------------------------
# Check the inputs of a module (names, values, masks) and reshape them to the layout of a run.
#
# Shapes and types are always checked. Numbers (ids out of range, words without a word to read) are checked except
# within
# `torch.compile`, where they are not readable, and except in training steps, whose data are checked on loading.


def check_output_names(outputs: object) -> tuple[str, ...]:
    """The requested names, from a list."""
    if isinstance(outputs, str):
        hint = f"Pass want=[{outputs!r}]"
        raise BNetError("want", expected="a list of names of node groups", actual=repr(outputs), hint=hint)
    if not isinstance(outputs, Sequence) or not all(isinstance(name, str) for name in outputs):
        raise BNetError("want", expected="a list of names of node groups", actual=outputs)
    return tuple(outputs)


def find_output_groups(network: Network, outputs: object) -> dict[str, tuple[NodeGroup, ...]]:
    """The node groups of each requested name: a group (`x_1`), or a role with its groups of all slices (`x`)."""
    return {name: find_groups(network, name) for name in check_output_names(outputs)}


def list_group_names(outputs: Mapping[str, Sequence[NodeGroup]]) -> tuple[str, ...]:
    """The names of all groups of the requested names, each once."""
    return tuple(dict.fromkeys(group.name for groups in outputs.values() for group in groups))


def find_groups(network: Network, name: str) -> tuple[NodeGroup, ...]:
    """The node groups of a name whose nodes have the same axes: one group, or the groups of a role in all slices."""
    if name in network.graph.by_name:  # torch.compile traces no parsing of names
        return (network.graph.by_name[name],)
    matches = network.graph.match_groups(name, {})
    if not matches or any(i is not None for _, index in matches for i in index):
        return (network.graph.get_group(name),)
    groups = tuple(group for group, _ in matches)
    if len({(group.plates, group.word_stack, network.specs[group.index].shape) for group in groups}) > 1:
        expected = "a role whose nodes have the same axes and shapes in all slices"
        raise BNetError(name, expected=expected, actual="groups with different axes or shapes")
    return groups


def index_by_group(network: Network, subject: str, values: object) -> dict[int, tuple[str, Tensor]]:
    """Values by the index of their group, each with its name in messages; unknown names are an error.

    The value of a role with several groups is `[batch, slice, ...]`.
    """
    indexed: dict[int, tuple[str, Tensor]] = {}
    for name, value in ({} if values is None else check_mapping(subject, values)).items():
        groups, label = find_groups(network, name), f"{subject}[{name!r}]"
        if len(groups) > 1 and not (is_dense(value) and value.dim() > 1 and value.shape[1] == len(groups)):
            actual = f"shape {tuple(value.shape)}" if is_dense(value) else value
            raise BNetError(label, expected=f"a tensor [batch, {len(groups)} slices, ...]", actual=actual)
        for group, part in zip(groups, value.unbind(1) if len(groups) > 1 else (value,), strict=True):
            if group.index in indexed:
                raise BNetError(f"{label}: {group.name} has another value already")
            indexed[group.index] = label, part
    return indexed


def check_value(
    network: Network,
    spec: NodeSpec,
    subject: str,
    value: object,
    *,
    word_counts: Mapping[str, int],
    batch: int | None,
    like: Tensor | None,
) -> None:
    """Raise an error for a value that is not `[batch, *plates, word, *shape]` or has a wrong type.

    With `batch=None` there is no batch dim. `like` is a parameter, which has the type of the net. The value may be on
    any device.
    """
    if not is_dense(value):
        raise BNetError(subject, expected="a dense tensor" if torch.is_tensor(value) else "a tensor", actual=value)
    is_integer = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    is_discrete = spec.tpm.kind == "discrete" or spec.tpm.is_index_valued
    if is_integer and not is_discrete:
        dtype_text = "" if like is None else f" ({like.dtype}, the type of the parameters)"
        raise BNetError(subject, expected=f"real numbers{dtype_text}", actual=f"{value.dtype}")
    if not is_integer and (spec.tpm.is_index_valued or not value.is_floating_point()):
        kind = "ids" if spec.tpm.kind == "input" else "states"
        raise BNetError(
            subject, expected=f"integers, the {kind}" if is_discrete else "real numbers", actual=f"{value.dtype}"
        )
    if like is not None and not is_integer and value.dtype != like.dtype:
        hint = f"Convert the net by net.to({value.dtype}), or the tensor to {like.dtype}"
        expected = f"{like.dtype}, the type of the parameters"
        raise BNetError(subject, expected=expected, actual=f"{value.dtype}", hint=hint)
    sizes, shape = get_plate_sizes(network, spec, word_counts), () if is_integer else spec.shape
    batches: list[tuple[int, ...]] = [(), (1,)] if batch is None else [(), (1,), (batch,)]
    if not is_allowed_shape(value.shape, [(*b, *sizes, *shape) for b in batches]):
        if batch is None:
            expected = f"one value for all sentences, of shape {(*sizes, *shape)}"
        else:
            expected = f"{describe_shape(spec, is_state=is_integer)} of shape {(batch, *sizes, *shape)}"
        raise BNetError(subject, expected=expected, actual=f"shape {tuple(value.shape)}")


def is_allowed_shape(shape: Sequence[int], shapes: Sequence[Sequence[int]]) -> bool:
    """True if a shape is one of these. Sizes are compared one by one: `torch.compile` may make them symbolic."""
    for other in shapes:
        if len(shape) == len(other) and all([n == m for n, m in zip(shape, other, strict=True)]):  # noqa: C419
            return True
    return False


def get_plate_sizes(network: Network, spec: NodeSpec, word_counts: Mapping[str, int]) -> tuple[int, ...]:
    """The number of nodes of a group along each of its plates, the word last."""
    group = spec.group
    sizes = tuple(network.graph.plate_sizes[plate] for plate in group.plates)
    return sizes if group.word_stack is None else (*sizes, word_counts[group.word_stack])


def describe_shape(spec: NodeSpec, *, is_state: bool = False) -> str:
    """The dims of a value (or state) of a group, for messages: `[batch, head, word, 4]`."""
    group, shape = spec.group, () if is_state else spec.shape
    axes = ["batch", *group.plates, *([WORD] if group.word_stack is not None else []), *map(str, shape)]
    return f"[{', '.join(axes)}]"


def infer_batch_size(network: Network, values: Mapping[int, tuple[str, Tensor]], minimum: int) -> int:
    """The number of sentences; values of batch size 1 are broadcast."""
    sizes = [minimum]
    for index, (_, value) in values.items() if minimum == 1 else ():
        spec = network.specs[index]
        shape = spec.shape if isinstance(value, Tensor) and value.is_floating_point() else ()
        rank = len(spec.group.plates) + (spec.group.word_stack is not None) + len(shape)
        if is_dense(value) and value.dim() == rank + 1:
            sizes.append(value.shape[0])
    return max(sizes)


def lay_out_value(state: ExecutionState, index: int, value: Tensor, event_shape: Sequence[int] | None = None) -> Tensor:
    """Reshape a value `[batch, *plates, word, *shape]`, with or without batch, to the layout.

    The shape is `event_shape`, by default that of the group, or () for states.
    """
    spec = state.network.specs[index]
    group, layout = spec.group, state.layout
    value_shape = tuple(event_shape) if event_shape is not None else spec.shape if value.is_floating_point() else ()
    rank = len(value_shape) + len(group.plates) + (group.word_stack is not None)
    value = value if value.dim() > rank else value.unsqueeze(0)
    shape = [1] * layout.batch_dim + [value.shape[0]] + [1] * (len(layout.plates) + 1)
    for k, plate in enumerate(group.plates):
        shape[layout.axis(plate)] = value.shape[1 + k]
    if group.word_stack is not None:
        shape[layout.word_dim] = value.shape[1 + len(group.plates)]
    return value.reshape(*shape, *value_shape)


def lay_out_values(state: ExecutionState, values: Mapping[int, tuple[str, Tensor]]) -> dict[int, Tensor]:
    """Values in the layout, states as `int64`; values at padding words become zero."""
    result = {}
    for index, (label, value) in values.items():
        tensor = lay_out_value(state, index, value if value.is_floating_point() else value.long())
        result[index] = zero_padding(state, state.network.specs[index].group.word_stack, tensor)
        check_states(state, index, label, result[index])
    return result


def validate_gates(network: Network, gates: object, batch: int, like: Tensor | None) -> dict[int, Tensor]:
    """The gates `[batch, *plates]` by the index of their group; an error for groups that cannot have gates."""
    validated = {}
    for index, (label, value) in index_by_group(network, "gates", gates).items():
        spec = network.specs[index]
        is_recurrent = index in network.graph.recurrent
        is_discrete = spec.tpm.kind == "discrete" or spec.tpm.states is not None
        if is_discrete or is_recurrent or spec.tpm.is_random:
            kind = "a recurrent group" if is_recurrent else "a discrete group" if is_discrete else "a random group"
            expected = "a group of vectors that are deterministic and not recurrent"
            raise UnsupportedError(label, expected=expected, actual=kind)
        sizes = tuple(network.graph.plate_sizes[plate] for plate in spec.group.plates)
        fits = is_dense(value) and value.dim() == 1 + len(sizes) and value.shape[1:] == sizes
        fits = fits and (len(value) in (1, batch) or (batch == 1 and len(value) > 0))
        if not fits or (like is not None and (value.dtype, value.device) != (like.dtype, like.device)):
            shape = f"[{', '.join(['batch', *spec.group.plates])}] of shape {(batch, *sizes)}"
            actual = f"{value.dtype} of shape {tuple(value.shape)} on {value.device}" if is_dense(value) else value
            dtype_text = "" if like is None else f", {like.dtype} on {like.device} as the parameters"
            raise BNetError(label, expected=f"real numbers {shape}{dtype_text}", actual=actual)
        validated[index] = value
    return validated


def lay_out_gates(state: ExecutionState, gates: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Reshape gates to the layout."""
    result = {}
    for index, value in gates.items():
        spec = state.network.specs[index]
        ones = [1] * len(spec.shape)
        word = [] if spec.group.word_stack is None else [1]
        result[index] = lay_out_value(state, index, value.reshape(*value.shape, *word, *ones), ones)
    return result


def check_states(state: ExecutionState, index: int, subject: str, value: Tensor) -> None:
    """Raise an error for ids and states that are out of range."""
    if value.is_floating_point() or not value.numel() or not (state.check_values and is_readable(value)):
        return
    low, high = (int(end) for end in value.aminmax())
    states = state.count_states(index)
    if not 0 <= low <= high < states:
        kind = "ids" if state.network.specs[index].tpm.kind == "input" else "states"
        raise BNetError(subject, expected=f"{kind} from 0 to {states - 1}", actual=low if low < 0 else high)


def is_readable(value: Tensor) -> bool:
    """True if the numbers of a tensor are readable: not within `torch.compile`, nor on the device meta."""
    return not torch.compiler.is_compiling() and not value.is_meta and type(value) in (Tensor, nn.Parameter)


def check_mask(
    mask: StackTensors | None, word_counts: Mapping[str, int], batch: int, *, check_values: bool = True
) -> dict[str, Tensor]:
    """The masks `[batch, word]` by stack; other types and shapes, and sentences without words, are errors."""
    if mask is None:
        return {}
    if not isinstance(mask, Mapping) and len(word_counts) > 1:
        kind = "one tensor" if isinstance(mask, Tensor) else mask
        raise BNetError("mask", expected="a mapping from stack: " + ", ".join(word_counts), actual=kind)
    if not isinstance(mask, Mapping) and not word_counts:
        raise BNetError("mask", expected="None: the net has no words", actual=mask)
    by_stack = dict(mask) if isinstance(mask, Mapping) else {next(iter(word_counts)): mask}
    for stack, present in by_stack.items():
        if stack not in word_counts:
            raise unknown_name_error("stack of mask", stack, word_counts)
        label = f"mask[{stack!r}]" if stack else "mask"
        shape = (batch, word_counts[stack])
        fits = is_dense(present) and is_allowed_shape(present.shape, [shape, (1, word_counts[stack])])
        if not fits or present.dtype != torch.bool:
            actual = f"{present.dtype} of shape {tuple(present.shape)}" if is_dense(present) else present
            raise BNetError(label, expected=f"booleans of shape {shape}, true for words", actual=actual)
        if check_values and is_readable(present) and not bool((has_word := present.any(-1)).all()):
            sentence = int((~has_word).nonzero()[0])
            raise BNetError(f"{label}, sentence {sentence}: all words are masked")
    return by_stack


def check_masked_reads(state: ExecutionState, specs: Iterable[NodeSpec]) -> None:
    """Raise an error if a mask leaves a word without words to read, unless its TPM allows it."""
    checked = set()
    for spec in specs:
        if spec.group.index in state.known or spec.tpm.can_read_empty:
            continue
        for parent in spec.parents:
            parent_group = state.network.specs[parent.index].group
            key = (parent.reach, spec.group.word_stack, parent_group.word_stack)
            if WORD in parent.over and parent_group.word_stack in state.present and key not in checked:
                checked.add(key)
                _check_masked_reach(state, spec, parent, parent_group.word_stack or "")


def _check_masked_reach(state: ExecutionState, spec: NodeSpec, parent: ParentSpec, stack: str) -> None:
    """Raise an error if a mask leaves a word without words to read along one reach."""
    child_stack = spec.group.word_stack
    if parent.reach.kind == "every" or (child_stack == stack and parent.reach.kind in ("causal", "window", "recent")):
        return  # each sentence has a word, and each word depends on itself
    present = state.present[stack]
    if not is_readable(present):
        return
    n, m = 1 if child_stack is None else state.word_counts[child_stack], state.word_counts[stack]
    pairs = torch.tensor(parent.reach.matrix(n, m), device=present.device)
    is_empty = ~(pairs & present[:, None, :]).any(-1)
    if child_stack is not None and child_stack in state.present:
        is_empty = is_empty & state.present[child_stack]
    if bool(is_empty.any()):
        sentence, word = is_empty.nonzero()[0].tolist()
        reader = spec.group.name if child_stack is None else f"word {word} of {spec.group.name}"
        raise BNetError(
            f"mask, sentence {sentence}, {reader}",
            expected=f"at least one word of {state.network.specs[parent.index].group.name} to read that is not masked",
            actual=f"only masked words (reach {parent.reach})",
        )


T = TypeVar("T")


class CompiledModule(nn.Module):
    """The compiled net, an `nn.Module` that computes values of node groups for a batch of sentences.

    `module(x, mask)` returns the value of the last hidden state or readout, and `module(x, mask, want=["x_1"])` returns
    the values of other node groups by name. A value is a tensor `[*states, batch, *plates, word, *shape]`, with one
    leading dimension for each latent choice on which it depends; for a random group it is the logits or the mean. The
    module shares the tensors of the net as its parameters. In their names, `/` replaces `.`.

    Args:
        network: The net.
        check_values: Whether to check that ids, states and masks are in range.
    """

    def __init__(self, network: Network, *, check_values: bool = True) -> None:
        super().__init__()
        network = as_network(network)
        network.check_single_dtype()
        self.network = network
        self.store = nn.ParameterDict()
        for name, value in network.parameters.items():
            self.store[name.replace(".", "/")] = nn.Parameter(value, requires_grad=name in network.learnable)
        self._store_keys = [(name, name.replace(".", "/")) for name in network.parameters]
        self.output = find_default_output(network)
        self._stacks = network.graph.word_stacks
        self.max_width = max((n for spec in network.specs for n in spec.shape), default=0)
        self._input_specs = [spec for spec in network.specs if spec.tpm.kind == "input"]
        self._input_indices = frozenset(spec.group.index for spec in self._input_specs)
        self._cache: dict[Hashable, Any] = {}
        self.check_values = check_values
        tables = {parent.reach for m in network.specs for parent in m.parents if parent.reach.kind == "mask"}
        self._reach_tables = {reach: f"table_{k}" for k, reach in enumerate(sorted(tables, key=repr))}
        for reach, name in self._reach_tables.items():
            self.register_buffer(name, torch.tensor(reach.table), persistent=False)
        if self.find_requirements((self.output,), ()).fault is None:  # else the call raises the error
            for fold in (False, True):
                self.plan((self.output,), frozenset(), fold=fold)
            _ = network.graph.backward  # torch.compile does not trace the first access to a cached property

    def forward(
        self,
        x: StackTensors | None = None,
        mask: StackTensors | None = None,
        *,
        want: Sequence[str] | None = None,
        do: Mapping[str, Tensor] | None = None,
        given: Mapping[str, Tensor] | None = None,
        gates: Mapping[str, Tensor] | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Compute the values of node groups for a batch of sentences.

        Args:
            x: The words: vectors `[batch, word, dim]` or ids `[batch, word]`; in a net with several stacks, a mapping
                from stack.
            mask: Booleans `[batch, word]`, true for words and false for padding; by default there is no padding.
            want: The names of the node groups to compute (`"x_1"`), or of roles (`"x"`: the groups of all slices); by
                default the module's `output`.
            do: Values of node groups or roles that are set, a mapping from name to `[batch, *plates, word, *shape]`, or
                to states `[batch, *plates, word]`; of a role with several slices `[batch, slice, *plates, word, ...]`.
            given: Values of further input groups, a mapping from name.
            gates: Factors by which values of node groups are multiplied, a mapping from name to `[batch, *plates]`; 0
                turns a head off.

        Returns:
            The value of `output`, `[*states, batch, *plates, word, *shape]`; if `want` is given, a dictionary of values
            by name, of a role with several slices `[*states, batch, slice, *plates, word, *shape]`.

        Raises:
            UnsupportedError: One batched pass cannot compute these values.
        """
        outputs = find_output_groups(self.network, [self.output] if want is None else want)
        state, _ = self.run(ExecutionRequest(list_group_names(outputs), x, mask, given, do, gates=gates))
        values = {name: self.stack_outputs(state, groups) for name, groups in outputs.items()}
        return values[self.output] if want is None else values

    def attention_weights(
        self,
        x: StackTensors | None = None,
        mask: StackTensors | None = None,
        *,
        nodes: Sequence[str] | None = None,
        want: Sequence[str] = (),
        do: Mapping[str, Tensor] | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute the attention weights `P(j | i)` of node groups, and values of other groups, in one run.

        Args:
            x: The words: vectors `[batch, word, dim]` or ids `[batch, word]`; in a net with several stacks, a mapping
                from stack.
            mask: Booleans `[batch, word]`, true for words and false for padding; by default there is no padding.
            nodes: The names of node groups with attention; by default all of them.
            want: The names of further groups whose values are computed.
            do: Values of node groups that are set, a mapping from name.
            given: Values of further input groups, a mapping from name.

        Returns:
            The attention weights, a dictionary from group to `[*states, batch, *plates, word i, word j]`, and the
            dictionary of the values of `want`.

        Raises:
            UnsupportedError: A group is set, or is computed word by word.
        """
        readers = {
            m.group.name: m.group.index for m in self.network.specs if m.has_word_attention and not m.tpm.is_random
        }
        for name in check_output_names([] if nodes is None else nodes):
            if name not in readers:
                raise unknown_name_error("node group with attention", name, readers)
        requested = {name: readers[name] for name in (readers if nodes is None else nodes)}
        outputs = find_output_groups(self.network, want)
        names, recorded = list_group_names(outputs), frozenset(requested.values())
        state, _ = self.run(ExecutionRequest(names, x, mask, given, do, record_attention=recorded))
        attention = {}
        for name, index in requested.items():
            weights = state.attention_weights[index]
            if weights is None:
                spec = self.network.specs[index]
                reason = "it is set by do=" if index in state.known else "it is computed word by word"
                raise UnsupportedError(f"{spec.group.name}: its attention is not available, because {reason}")
            attention[name] = _drop_absent_dims(state, self.network.specs[index], weights)
        return attention, {name: self.stack_outputs(state, groups) for name, groups in outputs.items()}

    def run(self, request: ExecutionRequest) -> tuple[ExecutionState, Plan]:
        """Compute all values that the outputs require, except those of `deferred` groups, in one layout.

        Args:
            request: The outputs, the sentences and the interventions.

        Returns:
            The state with the values, by the index of their group, and its plan.

        Raises:
            UnsupportedError: One batched pass cannot compute the values. `find_requirements` returns the same error
                without a computation.

        >>> import bnet_transformer as bt
        >>> module = bt.bayesuvius(dim=4).module()
        >>> state, plan = module.run(ExecutionRequest(("x_1",), torch.zeros(2, 3, 4)))
        >>> state.values[plan.outputs[0]].shape  # [state of c, batch, word, feature]
        torch.Size([2, 2, 3, 4])
        """
        x, recorded, perturbations = request.x, request.record_attention, request.perturbations or {}
        x = x if isinstance(x, ValidatedInputs) else self.validate_inputs(x, request.given)
        inputs, word_counts, batch, device = x
        assigned = self.validate_values("do", request.do, word_counts, batch)
        assigned |= self.validate_values("evidence", request.observed, word_counts, batch)
        batch = infer_batch_size(self.network, assigned, batch) if assigned else batch
        gates = validate_gates(self.network, request.gates, batch, next(iter(self.store.values()), None))
        batch = max([batch, *map(len, gates.values())])
        patches = request.patched or {}
        set_values = {name: value for name, (value, _) in patches.items()}
        patch_values = self.validate_values("do", set_values, word_counts, batch)
        rows = {self.network.graph.get_group(name).index: row for name, row in (request.attention_rows or {}).items()}
        # Folding maps into an attention costs one product of two weights and saves one map of each word, so it is
        # faster if there are more words than features. A folded attention cannot use given rows (it has no v) or record
        # P(j | i), and its q, k and v have no value to perturb.
        fold = not (recorded or perturbations or rows) and batch * max([0, *word_counts.values()]) > self.max_width
        modified = frozenset({*patch_values, *rows, *gates, *perturbations})
        known, plan_args = frozenset(assigned), (request.enumerate_too, request.deferred, modified, recorded)
        options: dict[str, Any] = {"fold": fold, "has_chains": request.has_chains}
        plan = self.plan(request.outputs, known, *plan_args, **options, word_counts=word_counts)
        stored: Mapping[str, Any] = (
            self.store._parameters
        )  # faster than `self.store[key]`, which also returns parametrised tensors
        parameters = {name: stored[key] if key in stored else self.store[key] for name, key in self._store_keys}
        check_values = self.check_values if request.check_values is None else request.check_values
        present = check_mask(request.mask, word_counts, batch, check_values=check_values)
        state = ExecutionState(
            self.network,
            TensorLayout(plan.enumerated, tuple(self.network.graph.plate_sizes), plan.neighbours, plan.backward),
            parameters,
            {},
            word_counts,
            present,
            self.training if request.training is None else request.training,
            {},
            next((p.dtype for p in parameters.values()), self.network.default_dtype),
            device,
            perturbations=perturbations,
            is_multi_device=any([value.device != device for value in parameters.values()]),  # noqa: C419
            reach_tables={reach: getattr(self, name) for reach, name in self._reach_tables.items()},
            check_values=check_values,
        )
        state.known = lay_out_values(state, {**inputs, **assigned})
        patched = lay_out_values(state, patch_values)
        for (index, value), (_, mask) in zip(patched.items(), patches.values(), strict=True):
            state.patched[index] = value, lay_out_value(state, index, mask)
        for index, (weights, mask) in rows.items():
            event_shape = weights.shape[-1:]
            row = lay_out_value(state, index, weights, event_shape)
            state.attention_rows[index] = row, lay_out_value(state, index, mask)
        state.attention_weights.update(dict.fromkeys(recorded))
        state.gates.update(lay_out_gates(state, gates))
        if present and check_values:
            groups = (*plan.components, plan.outputs, request.deferred)
            check_masked_reads(state, (self.network.specs[index] for group in groups for index in group))
        plan_to_values(plan, state)
        return state, plan

    def memoize(self, key: Hashable, make: Callable[[], T]) -> T:
        """Cache a result that depends only on the net and a key: a plan, the analysis of a query, a compiled function.

        Args:
            key: The key. It contains all, except the net, on which the result depends; its first entry is the kind of
                result.
            make: The function that computes the result; it is called once for each key.

        Returns:
            The result.
        """
        if key not in self._cache:
            self._cache[key] = make()
        value: T = self._cache[key]
        return value

    def plan(
        self,
        outputs: tuple[str, ...],
        known: frozenset[int],
        enumerate_too: frozenset[int] = frozenset(),
        deferred: frozenset[int] = frozenset(),
        patched: frozenset[int] = frozenset(),
        transient: frozenset[int] = frozenset(),
        *,
        fold: bool = False,
        has_chains: bool = False,
        word_counts: Mapping[str, int] | None = None,
    ) -> Plan:
        """The cached plan of some outputs.

        Args:
            outputs: The names of the requested groups.
            known: The indices of groups whose values are given (inputs, `do`, evidence).
            enumerate_too: Choices to enumerate even if no value depends on them.
            deferred: Groups that are not computed, although their parents are.
            patched: Groups of which some nodes are set.
            transient: Deterministic groups that are computed and then dropped.
            fold: Whether to fold linear maps into attentions.
            has_chains: Whether values may depend on a choice at two neighbouring words; see `ExecutionRequest`.
            word_counts: The number of words of each stack, for error messages only.

        Returns:
            The plan.
        """
        options: dict[str, Any] = {"fold": fold, "deferred": deferred, "patched": patched, "transient": transient}
        options["has_chains"] = has_chains
        return self.memoize(
            ("plan", outputs, known, enumerate_too, *options.values()),
            lambda: network_to_plan(
                self.network, outputs, known | self._input_indices, enumerate_too, word_counts=word_counts, **options
            ),
        )

    def find_requirements(
        self,
        outputs: Sequence[str],
        known: Collection[int],
        enumerate_too: Collection[int] = (),
        patched: Collection[int] = (),
        word_counts: Mapping[str, int] | None = None,
        *,
        has_chains: bool = False,
    ) -> Requirements:
        """The cached requirements of some outputs, if all inputs are known.

        Args:
            outputs: The names of the requested groups.
            known: The indices of groups, in addition to the inputs, whose values are given.
            enumerate_too: Choices to enumerate even if no value depends on them.
            patched: Groups of which some nodes are set.
            word_counts: The number of words of each stack, for error messages only.
            has_chains: Whether values may depend on a choice at two neighbouring words; see `ExecutionRequest`.

        Returns:
            The groups to compute, the choices to enumerate, and the error if one pass cannot compute the outputs.
        """
        indices = [self.network.graph.get_group(name).index for name in outputs]
        known, patched_ids = self._input_indices.union(known), frozenset(patched)
        return self.memoize(
            ("needs", tuple(indices), known, frozenset(enumerate_too), patched_ids, has_chains),
            lambda: find_requirements(
                self.network,
                indices,
                known,
                enumerate_too,
                patched=patched_ids,
                has_chains=has_chains,
                word_counts=word_counts,
            ),
        )

    def compute_output(self, state: ExecutionState, index: int) -> Tensor:
        """The value of a group after a run; for a random group the logits or the mean.

        Args:
            state: The state of the run.
            index: The index of the group.

        Returns:
            A tensor `[*states, batch, *plates, word, *shape]`, without the dimensions that the group does not have.
        """
        return _drop_absent_dims(state, self.network.specs[index], self._compute_in_layout(state, index))

    def stack_outputs(self, state: ExecutionState, groups: Sequence[NodeGroup]) -> Tensor:
        """The value of one group after a run, or of several groups with the same axes and shapes.

        Args:
            state: The state of the run.
            groups: The groups.

        Returns:
            The value of one group as `compute_output`; of several `[*states, batch, slice, *plates, word, *shape]`.
        """
        if len(groups) == 1:
            return self.compute_output(state, groups[0].index)
        values = torch.broadcast_tensors(*(self._compute_in_layout(state, group.index) for group in groups))
        parts = [
            _drop_absent_dims(state, self.network.specs[group.index], value)
            for group, value in zip(groups, values, strict=True)
        ]
        event = values[0].dim() - state.layout.rank
        axes = len(groups[0].plates) + (groups[0].word_stack is not None)
        return torch.stack(parts, parts[0].dim() - event - axes)

    def _compute_in_layout(self, state: ExecutionState, index: int) -> Tensor:
        """The value of a group after a run, or its logits or mean, with all dims of the layout."""
        spec = self.network.specs[index]
        if index in state.values and (spec.tpm.kind == "deterministic" or index in state.known):
            return state.values[index]
        context, parents = gather_parents(state, spec)
        if spec.tpm.kind == "discrete":
            return state.layout.pad_dims(torch.log_softmax(spec.tpm.logits(context, *parents), -1), 1)
        return state.layout.pad_dims(spec.tpm.distribution(context, *parents).mean, len(spec.shape))

    def validate_values(
        self, subject: str, values: object, word_counts: Mapping[str, int], batch: int
    ) -> dict[int, tuple[str, Tensor]]:
        """Check values of groups, for `do`.

        Args:
            subject: The argument, for messages.
            values: A mapping from the name of a group to its value.
            word_counts: The number of words of each stack.
            batch: The number of sentences.

        Returns:
            The name in messages and the value, by the index of the group.

        Raises:
            BNetError: A name is unknown, or a value has a wrong type or shape.
        """
        indexed = index_by_group(self.network, subject, values)
        batch = infer_batch_size(self.network, indexed, batch)
        for index, (name, value) in indexed.items():
            self._check_value(index, name, value, word_counts, batch)
        return indexed

    def _check_value(self, index: int, subject: str, value: Tensor, word_counts: Mapping[str, int], batch: int) -> None:
        """Raise an error for a value of a wrong type or shape."""
        like = next(iter(self.store.values()), None)
        check_value(
            self.network, self.network.specs[index], subject, value, word_counts=word_counts, batch=batch, like=like
        )

    def validate_inputs(self, x: StackTensors | None, given: Mapping[str, Tensor] | None) -> ValidatedInputs:
        """Check the inputs of a batch.

        Args:
            x: The words: vectors `[batch, word, dim]` or ids `[batch, word]`; in a net with several stacks, a mapping
                from stack.
            given: Values of further input groups, a mapping from name.

        Returns:
            The checked inputs; an `ExecutionRequest` takes them as `x`, without `given`.

        Raises:
            BNetError: An input is missing, or has a wrong type or shape.
        """
        stacks = self._stacks
        if not stacks and isinstance(x, Tensor):
            hint = "Pass values of input nodes as given=, and values of other nodes as do="
            raise BNetError("x", expected="None: the net has no words", actual="a tensor", hint=hint)
        if len(stacks) > 1 and x is not None and not isinstance(x, Mapping):
            raise BNetError("x", expected="a mapping from stack: " + ", ".join(stacks), actual="one tensor")
        by_stack = dict(x) if isinstance(x, Mapping) else {} if x is None else {stacks[0]: x}
        inputs = index_by_group(self.network, "given", given)
        for index, (label, _) in inputs.items():
            if self.network.specs[index].tpm.kind != "input":
                inputs_text = ", ".join(m.group.name for m in self._input_specs)
                hint = "Use do= to set another node"
                raise BNetError(label, expected="an input node", allowed=inputs_text or None, hint=hint)
        word_counts: dict[str, int] = {}
        for stack, value in by_stack.items():
            if stack not in stacks:
                raise unknown_name_error("stack", stack, stacks)
            label = f"x[{stack!r}]" if len(stacks) > 1 else "x"
            spec = self._find_main_input(stack, label, check_mapping("given", given))
            if not is_dense(value) or value.dim() < 2:
                actual = tuple(value.shape) if is_dense(value) else value
                raise BNetError(label, expected="ids [batch, word] or vectors [batch, word, dim]", actual=actual)
            word_counts[stack] = value.shape[1]
            if spec is not None:
                inputs[spec.group.index] = label, value
        for index, (label, value) in inputs.items():
            group = self.network.specs[index].group
            if group.word_stack is not None:
                if not is_dense(value) or value.dim() < 2 + len(group.plates):
                    actual = tuple(value.shape) if is_dense(value) else value
                    raise BNetError(label, expected=describe_shape(self.network.specs[index]), actual=actual)
                word_counts.setdefault(group.word_stack, value.shape[1 + len(group.plates)])
        return self._complete_inputs(inputs, word_counts, by_stack)

    def _complete_inputs(
        self, inputs: dict[int, tuple[str, Tensor]], word_counts: dict[str, int], by_stack: Mapping[str, Tensor]
    ) -> ValidatedInputs:
        """Add defaults; raise errors for missing inputs, wrong shapes, and numbers of words that do not fit the net."""
        values = [*by_stack.values(), *(value for _, value in inputs.values())]
        first = values[0] if values else torch.zeros(1)
        for spec in self._input_specs:
            default = spec.tpm.default
            has_words = spec.group.word_stack is None or spec.group.word_stack in word_counts
            if default is not None and has_words and spec.group.index not in inputs:
                sizes = get_plate_sizes(self.network, spec, word_counts)
                inputs[spec.group.index] = spec.group.name, torch.full((1, *sizes), default, device=first.device)
        missing = [m.group.name for m in self._input_specs if m.group.index not in inputs]
        missing += [f"stack {stack!r}" for stack in self._stacks if stack not in word_counts]
        if missing:
            has_inputs = {spec.group.word_stack for spec in self._input_specs}.issuperset(self._stacks)
            placeholder = "" if has_inputs else "; for a stack without input nodes, zeros [batch, word]"
            hint = f"Pass it as x or given={placeholder}"
            raise BNetError(f"x: there is no value for {', '.join(missing)}", hint=hint)
        batch = infer_batch_size(self.network, inputs, first.shape[0] if by_stack else 1)
        if batch == 0:
            label = ", ".join(label for label, _ in inputs.values())
            raise BNetError(label, expected="at least one sentence", actual="an empty batch")
        for index, (label, value) in inputs.items():
            self._check_value(index, label, value, word_counts, batch)
        if not torch.compiler.is_compiling():
            self.memoize(("words", *word_counts.items()), lambda: self._check_words(word_counts))
        return ValidatedInputs(inputs, word_counts, batch, first.device)

    def _check_words(self, word_counts: Mapping[str, int]) -> None:
        """Raise an error for numbers of words that the reaches and positions of the net do not allow."""
        for stack, count in word_counts.items():
            check_int(f"words of stack {stack!r}" if stack else "words", count)
        check_word_counts(self.network, word_counts)

    def _find_main_input(self, stack: str, subject: str, given: Mapping[str, Tensor]) -> NodeSpec | None:
        """The input group of a stack whose value is `x`; a value for the same group in `given` is an error."""
        candidates = [spec for spec in self._input_specs if spec.group.word_stack == stack and not spec.group.plates]
        main = find_main_input([spec for spec in candidates if spec.group.name not in given])
        is_filled = main is None or main.tpm.default is not None
        first_choice = find_main_input(candidates)
        if is_filled and first_choice is not None and first_choice.group.name in given:
            name = first_choice.group.name
            raise BNetError(f"pass {subject} or given[{name!r}], not both: each is the value of {name}")
        return main

    def check_mask(self, outputs: tuple[str, ...], x: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> None:
        """Raise an error if a mask leaves a sentence without words, or a word without words to read.

        Args:
            outputs: The names of the groups that will be computed.
            x: The words of each stack.
            mask: The mask of each stack, booleans `[batch, word]`.

        Raises:
            BNetError: A sentence has no word, or a word has no word to read.
        """
        word_counts, first = {stack: value.shape[1] for stack, value in x.items()}, next(iter(x.values()))
        specs, present = self.network.specs, check_mask(mask, word_counts, len(first))
        # The mask does not depend on choices, so they count as known, even if they cannot be enumerated.
        choices = frozenset(m.group.index for m in specs if m.tpm.kind == "discrete" and m.group.name not in outputs)
        plan = self.plan(outputs, choices, word_counts=word_counts)
        layout = TensorLayout((), tuple(self.network.graph.plate_sizes))
        state = ExecutionState(
            self.network, layout, {}, {}, word_counts, present, False, {}, self.network.default_dtype, first.device
        )
        check_masked_reads(state, (specs[index] for group in plan.components for index in group))


def find_default_output(network: Network) -> str:
    """The group that a module returns by default: the last readout, or without readouts the last hidden state."""
    last = network.specs[-1].group
    for stack in network.declaration.stacks:
        nodes = stack.epilogue or stack.slice or stack.prologue
        if not nodes:
            continue
        name = f"{stack.name}_{nodes[-1].role}" if stack.name else nodes[-1].role
        groups = network.graph.by_stem.get(name, ())
        last = groups[-1] if groups else last
    return last.name


def _drop_absent_dims(state: ExecutionState, spec: NodeSpec, value: Tensor) -> Tensor:
    """A value without the dims of plates and words that its group does not have, and of states without effect."""
    layout, group = state.layout, spec.group
    drop = {k for k, i in enumerate(layout.enumerated) if value.shape[k] == 1 and state.count_states(i) > 1}
    drop |= {layout.axis(plate) for plate in layout.plates if plate not in group.plates}
    drop |= {layout.word_dim} if group.word_stack is None else set()
    full = list(value.shape)
    for plate in group.plates:
        full[layout.axis(plate)] = state.network.graph.plate_sizes[plate]
    if group.word_stack is not None:
        full[layout.word_dim] = state.word_counts[group.word_stack]
    return value.expand(full).reshape([size for k, size in enumerate(full) if k not in drop])

"""The compiled net as an `nn.Module`: it shares the net's parameters and computes only what the outputs need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from bnet_transformer._core.checks import check_mapping
from bnet_transformer.compiler.batch_interventions import resolve_interventions
from bnet_transformer.compiler.evaluate import plan_to_values
from bnet_transformer.compiler.gather import (
    ExecutionRequest,
    ExecutionState,
    TensorLayout,
    gates_to_changes,
    gather_parents,
    lay_out_known,
    lay_out_value,
)
from bnet_transformer.compiler.plan import ExecutionPlan, PlanRequest, Requirements, find_requirements, network_to_plan
from bnet_transformer.data.checks import (
    Inputs,
    StackTensors,
    check_gates,
    check_inputs,
    check_mask,
    check_masked_reads,
    check_states,
    check_values,
    find_groups,
    get_plate_sizes,
    infer_batch_size,
)
from bnet_transformer.data.encode import check_word_counts
from bnet_transformer.declare import Network, NodeSpec, as_network
from bnet_transformer.errors import BNetError, UnsupportedError, unknown_name_error
from bnet_transformer.graph import NodeGroup

T = TypeVar("T")


class CompiledModule(nn.Module):
    """The compiled net, an `nn.Module` that computes values of node groups for a batch of sentences.

    `module(x, mask)` returns the value of the last hidden state or readout, and `module(x, mask, want=["x_1"])` returns
    the values of other node groups by name. A value is a tensor `[*states, batch, *plates, word, *shape]`, with one
    leading dimension for each latent choice on which it depends; for a random group it is the logits or the mean. The
    module shares the tensors of the net as its parameters. In their names, `/` replaces `.`.

    Args:
        network: The net.
        check_values: Whether calls check that ids, states and masks are in range.
    """

    validates_requests: ClassVar[bool] = False  # whether `execute` checks its requests too; the tests set it

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
        self.max_width = max((n for spec in network.specs for n in spec.shape), default=0)
        self._defaults = [(spec, spec.tpm.default) for spec in network.inputs if spec.tpm.default is not None]
        self._input_indices = frozenset(spec.group.index for spec in network.inputs)
        self._cache: dict[Hashable, Any] = {}
        self.check_values = check_values
        tables = {parent.reach for m in network.specs for parent in m.parents if parent.reach.kind == "mask"}
        self._reach_tables = {reach: f"table_{k}" for k, reach in enumerate(sorted(tables, key=repr))}
        for reach, name in self._reach_tables.items():
            self.register_buffer(name, torch.tensor(reach.table), persistent=False)
        output = network.graph.get_group(self.output).index
        if self.find_requirements(PlanRequest((output,))).fault is None:  # else the call raises the error
            for fold in (False, True):
                self.plan(PlanRequest((output,), fold=fold))
        _ = (
            network.graph.backward,
            network.graph.word_stacks,
        )  # torch.compile traces no first access to a cached property

    def forward(
        self,
        x: StackTensors | None = None,
        mask: StackTensors | None = None,
        *,
        want: Sequence[str] | None = None,
        do: Mapping[str, object] | None = None,
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
            do: Interventions, a mapping from name. A tensor sets a node group or a role to `[batch, *plates, word,
                *shape]`, or to states `[batch, *plates, word]`; a role with several slices to `[batch, slice, *plates,
                word, ...]`. Other values are those of `Sentence.do` that are defined at each word of each sentence
                separately: `Zero()`, a change (`Scale(0.5)`, `Shift(vector)`, a function), a sentence. Their names may
                also be those of nodes, such as `"a_0_1"` (head 1 at all words) or `"x_1_0"`, and patterns.
            given: Values of further input groups, a mapping from name.
            gates: Factors by which values of node groups are multiplied, a mapping from name to `[batch, *plates]`; 0
                turns a head off.

        Returns:
            The value of `output`, `[*states, batch, *plates, word, *shape]`; if `want` is given, a dictionary of values
            by name, of a role with several slices `[*states, batch, slice, *plates, word, *shape]`.

        Raises:
            UnsupportedError: One batched pass cannot compute these values.
        """
        names = [self.output] if want is None else want
        request = self.check_request(names, x, mask, do=do, given=given, gates=gates)
        state, _ = self.execute(request)
        outputs = find_output_groups(self.network, names)
        values = {name: self.stack_outputs(state, groups) for name, groups in outputs.items()}
        return values[self.output] if want is None else values

    def attention_weights(
        self,
        x: StackTensors | None = None,
        mask: StackTensors | None = None,
        *,
        nodes: Sequence[str] | None = None,
        want: Sequence[str] = (),
        do: Mapping[str, object] | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute the attention weights `P(j | i)` of node groups, and values of other groups, in one run.

        Args:
            x: The words: vectors `[batch, word, dim]` or ids `[batch, word]`; in a net with several stacks, a mapping
                from stack.
            mask: Booleans `[batch, word]`, true for words and false for padding; by default there is no padding.
            nodes: The names of node groups with attention; by default all of them.
            want: The names of further groups whose values are computed.
            do: Interventions, a mapping from name, as for a call of the module.
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
        request = self.check_request([*outputs, *requested], x, mask, do=do, given=given)
        recorded = frozenset(requested.values())
        state, _ = self.execute(replace(request, outputs=list_group_indices(outputs), record_attention=recorded))
        attention = {}
        for name, index in requested.items():
            weights = state.attention_weights[index]
            if weights is None:
                spec = self.network.specs[index]
                reason = "it is set by do=" if index in state.known else "it is computed word by word"
                raise UnsupportedError(f"{spec.group.name}: its attention is not available, because {reason}")
            if index in state.attention_rows:
                rows, is_set = state.attention_rows[index]
                weights = torch.where(is_set[..., None], rows, weights)
            attention[name] = _drop_absent_dims(state, self.network.specs[index], weights)
        return attention, {name: self.stack_outputs(state, groups) for name, groups in outputs.items()}

    def check_request(
        self,
        want: Sequence[str],
        x: StackTensors | None = None,
        mask: StackTensors | None = None,
        *,
        do: Mapping[str, object] | None = None,
        given: Mapping[str, Tensor] | None = None,
        gates: Mapping[str, Tensor] | None = None,
    ) -> ExecutionRequest:
        """Check the tensors of a user, and turn them into a request for `execute`.

        Args:
            want: The names of the node groups to compute, or of roles.
            x: The words, as for a call of the module.
            mask: Booleans `[batch, word]`, true for words and false for padding; by default there is no padding.
            do: Interventions, a mapping from name, as for a call of the module.
            given: Values of further input groups, a mapping from name.
            gates: Factors by which values of node groups are multiplied, a mapping from name.

        Returns:
            The request.

        Raises:
            BNetError: A name is unknown, or a value is missing, has a wrong type or shape, or is out of range.
        """
        values = check_mapping("do", do)
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        outputs = list_group_indices(find_output_groups(self.network, want))
        inputs = self.check_inputs(x, given, tensors)
        network, known, word_counts = self.network, inputs.values, inputs.word_counts
        factors = check_gates(network, gates, inputs.batch, next(iter(self.store.values()), None))
        batch = max([inputs.batch, *map(len, factors.values())])
        present = check_mask(mask, word_counts, batch, check_values=self.check_values)
        if self.check_values:
            check_states(network, inputs.subjects, known, word_counts, present)
            check_masked_reads(network, outputs, known, present, word_counts)
        changes = gates_to_changes(network, factors)
        request = ExecutionRequest(outputs, known, word_counts, inputs.device, present, changes=changes)
        if len(tensors) == len(values):
            return request
        remaining = {name: value for name, value in values.items() if name not in tensors}
        shortest = {**word_counts, **{stack: int(words.sum(1).min()) for stack, words in present.items()}}
        interventions = resolve_interventions(network, remaining, word_counts, shortest)
        for group in (intervention.spec.group for intervention in interventions.groups):
            if (label := inputs.subjects.get(group.index, "")).startswith("do["):
                raise BNetError(f"{label}: {group.name} has another value already")
        return interventions.add_to_request(request)

    def check_inputs(
        self, x: StackTensors | None, given: Mapping[str, Tensor] | None, do: Mapping[str, Tensor] | None
    ) -> Inputs:
        """Check the inputs of a user and the values of `do`, except that ids and states are in range.

        Args:
            x: The words, as for a call of the module.
            given: Values of further input groups, a mapping from name.
            do: Values of node groups that are set, a mapping from name.

        Returns:
            The checked values.

        Raises:
            BNetError: An input is missing, or a value has a wrong type or shape.
        """
        inputs = check_inputs(self.network, x, given, do, next(iter(self.store.values()), None))
        if not torch.compiler.is_compiling():
            counts = inputs.word_counts
            self.memoize(("words", *counts.items()), partial(check_word_counts, self.network, counts))
        return inputs

    def execute(self, request: ExecutionRequest) -> tuple[ExecutionState, ExecutionPlan]:
        """Compute all values that the outputs require, except those of `deferred` groups, in one layout.

        Args:
            request: The outputs, the sentences and the interventions, which are trusted.

        Returns:
            The state with the values, by the index of their group, and its plan.

        Raises:
            UnsupportedError: One batched pass cannot compute the values. `find_requirements` returns the same error
                without a computation.

        >>> import bnet_transformer as bt
        >>> module = bt.bayesuvius(dim=4).module()
        >>> state, plan = module.execute(module.check_request(["x_1"], torch.zeros(2, 3, 4)))
        >>> state.values[plan.outputs[0]].shape  # [state of c, batch, word, feature]
        torch.Size([2, 2, 3, 4])
        """
        if self.validates_requests:
            self._validate_request(request)
        word_counts = request.word_counts
        # Folding maps into an attention costs one product of two weights and saves one map of each word, so it is
        # faster if there are more words than features. A folded attention cannot use given rows (it has no v) or record
        # P(j | i).
        batch = max([1, *map(len, request.known.values())])
        fold = not (request.record_attention or request.attention_rows)
        fold = fold and batch * max([0, *word_counts.values()]) > self.max_width
        plan = self.plan(request.structure._replace(fold=fold), word_counts)
        stored: Mapping[str, Any] = (
            self.store._parameters
        )  # faster than `self.store[key]`, which also returns parametrised tensors
        parameters = {name: stored[key] if key in stored else self.store[key] for name, key in self._store_keys}
        state = ExecutionState(
            self.network,
            TensorLayout(plan.enumerated, tuple(self.network.graph.plate_sizes), plan.neighbours, plan.backward),
            parameters,
            {},
            word_counts,
            request.mask,
            self.training if request.training is None else request.training,
            {},
            next((p.dtype for p in parameters.values()), self.network.default_dtype),
            request.device,
            changes=request.changes,
            is_multi_device=any([value.device != request.device for value in parameters.values()]),  # noqa: C419
            reach_tables={reach: getattr(self, name) for reach, name in self._reach_tables.items()},
        )
        state.known = self.lay_out_inputs(state, request.known)
        for index, (value, mask) in request.patched.items():
            state.patched[index] = lay_out_known(state, index, value), lay_out_value(state, index, mask)
        for index, (weights, mask) in request.attention_rows.items():
            row = lay_out_value(state, index, weights, weights.shape[-1:])
            state.attention_rows[index] = row, lay_out_value(state, index, mask)
        state.attention_weights.update(dict.fromkeys(request.record_attention))
        plan_to_values(plan, state)
        return state, plan

    def _validate_request(self, request: ExecutionRequest) -> None:
        """Raise an error for an invalid request: a bug, because values of users are checked where they enter."""
        network, words, like = self.network, request.word_counts, next(iter(self.store.values()), None)
        patches = {index: value for index, (value, _) in request.patched.items()}
        for values in (request.known, patches):
            labels = {index: f"request, {network.specs[index].group.name}" for index in values}
            named = {index: (labels[index], value) for index, value in values.items()}
            check_values(network, named, words, infer_batch_size(network, named, 1), like)
            check_states(network, labels, values, words, request.mask)
        check_mask(request.mask, words, max([1, *map(len, request.mask.values())]))
        missing = [m.group.name for m in network.inputs if m.tpm.default is None and m.group.index not in request.known]
        if missing:
            raise BNetError(f"request: there is no value for {', '.join(missing)}")

    def lay_out_inputs(self, state: ExecutionState, known: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The given values in the layout of a run; inputs without a value have their default.

        Args:
            state: The state of the run.
            known: The values `[batch, *plates, word, *shape]`, by group.

        Returns:
            The values in the layout, by group.
        """
        values = dict(known)
        for spec, default in self._defaults:
            if spec.group.index not in values:
                sizes = get_plate_sizes(self.network, spec, state.word_counts)
                values[spec.group.index] = torch.full((1, *sizes), default, device=state.device)
        return {index: lay_out_known(state, index, value) for index, value in values.items()}

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

    def plan(self, request: PlanRequest, word_counts: Mapping[str, int] | None = None) -> ExecutionPlan:
        """The cached plan of some outputs.

        Args:
            request: The groups to compute, and those with given values.
            word_counts: The number of words of each stack, for error messages only.

        Returns:
            The plan.
        """
        request = PlanRequest(request.outputs, request.known | self._input_indices, *request[2:])
        make = partial(network_to_plan, self.network, request, self.find_requirements, word_counts)
        return self.memoize(("plan", *request), make)

    def find_requirements(self, request: PlanRequest, word_counts: Mapping[str, int] | None = None) -> Requirements:
        """The cached requirements of some outputs.

        Args:
            request: The groups to compute, and those with given values.
            word_counts: The number of words of each stack, for error messages only.

        Returns:
            The groups to compute, the choices to enumerate, and the error if one pass cannot compute the outputs.
        """
        request = PlanRequest(request.outputs, request.known | self._input_indices, *request[2:])
        return self.memoize(("needs", *request), partial(find_requirements, self.network, request, word_counts))

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


def list_group_indices(outputs: Mapping[str, Sequence[NodeGroup]]) -> tuple[int, ...]:
    """The indices of all groups of the requested names, each once."""
    return tuple(dict.fromkeys(group.index for groups in outputs.values() for group in groups))


def _drop_absent_dims(state: ExecutionState, spec: NodeSpec, value: Tensor) -> Tensor:
    """A value without the dims of plates and words that its group does not have, and of states without effect."""
    layout, group = state.layout, spec.group
    drop = {
        k
        for k, i in enumerate(layout.enumerated)
        if value.shape[k] == 1 and state.network.count_states(i, state.word_counts) > 1
    }
    drop |= {layout.axis(plate) for plate in layout.plates if plate not in group.plates}
    drop |= {layout.word_dim} if group.word_stack is None else set()
    full = list(value.shape)
    for plate in group.plates:
        full[layout.axis(plate)] = state.network.graph.plate_sizes[plate]
    if group.word_stack is not None:
        full[layout.word_dim] = state.word_counts[group.word_stack]
    return value.expand(full).reshape([size for k, size in enumerate(full) if k not in drop])

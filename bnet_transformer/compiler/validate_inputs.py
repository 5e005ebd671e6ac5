"""Check the inputs of a module (names, values, masks) and reshape them to the layout of a run.

Shapes and types are always checked. Numbers (ids out of range, words without a word to read) are checked except within
`torch.compile`, where they are not readable, and except in training steps, whose data are checked on loading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from bnet_transformer._core.arrays import is_dense
from bnet_transformer._core.checks import check_mapping
from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.execution_state import ExecutionState, StackTensors
from bnet_transformer.compiler.gather import zero_padding
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, UnsupportedError, unknown_name_error
from bnet_transformer.graph import NodeGroup


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

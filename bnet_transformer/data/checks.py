"""Checks of the tensors that users pass: inputs, values of `do`, evidence, gates and masks of a batch of sentences.

Values are checked here, where they enter: in a call of a compiled module, in `log_evidence` and `posterior`, and in a
`Batch` that a user has made. The checks return values by the index of their node group, with a batch dim, which all
code behind them trusts. Shapes and types are always checked; numbers (ids out of range, words without a word to read)
are not where they are not readable, within `torch.compile` or on the device meta.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_int, check_mapping
from bnet_transformer._core.naming import WORD
from bnet_transformer._core.tensors import is_dense, is_readable
from bnet_transformer.data.batch import Batch, Evidence
from bnet_transformer.data.encode import check_word_counts, find_main_input
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, EvidenceError, UnsupportedError, unknown_name_error
from bnet_transformer.graph import NodeGroup

StackTensors = Tensor | Mapping[str, Tensor]


class Inputs(NamedTuple):
    """Checked values of inputs and of `do`, with their names in messages, by group; and the sizes of the batch."""

    values: dict[int, Tensor]
    subjects: dict[int, str]
    word_counts: dict[str, int]
    batch: int
    device: torch.device


def index_inputs(
    network: Network, x: Mapping[str, Tensor], given: Mapping[str, Tensor]
) -> tuple[dict[int, Tensor], dict[str, int], torch.device]:
    """The inputs of sentences whose tensors are valid; `check_inputs` does the same for tensors of users.

    Args:
        network: The net.
        x: The words of each stack, `[batch, word]` or `[batch, word, dim]`.
        given: Values of further input groups, by name.

    Returns:
        The value of each input group by its index, the words of each stack, and the device.
    """
    values = {network.graph.get_group(name).index: value for name, value in given.items()}
    word_counts = {stack: words.shape[1] for stack, words in x.items()}
    for stack, words in x.items():
        spec = _find_stack_input(network, stack, given)
        if spec is not None:
            values[spec.group.index] = words
    for index, value in values.items():
        group = network.specs[index].group
        if group.word_stack is not None:
            word_counts.setdefault(group.word_stack, value.shape[1 + len(group.plates)])
    tensors = [*x.values(), *values.values()]
    return values, word_counts, tensors[0].device if tensors else network.device


def _find_stack_input(network: Network, stack: str, given: Mapping[str, Tensor]) -> NodeSpec | None:
    """The input group of a stack whose value is `x`, if some groups have values already."""
    candidates = [spec for spec in network.inputs if spec.group.word_stack == stack and not spec.group.plates]
    return find_main_input([spec for spec in candidates if spec.group.name not in given])


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


def check_inputs(
    network: Network,
    x: StackTensors | None,
    given: Mapping[str, Tensor] | None,
    do: Mapping[str, Tensor] | None,
    like: Tensor | None,
) -> Inputs:
    """Check the inputs and the values of `do` that a user passes.

    Args:
        network: The net.
        x: The words: vectors `[batch, word, dim]` or ids `[batch, word]`; in a net with several stacks, a mapping from
            stack.
        given: Values of further input groups, a mapping from name.
        do: Values of groups that are set, a mapping from name.
        like: A parameter, which has the floating type of the net.

    Raises:
        BNetError: An input is missing, or a value has a wrong type or shape.
    """
    stacks = network.graph.word_stacks
    if not stacks and isinstance(x, Tensor):
        hint = "Pass values of input nodes as given=, and values of other nodes as do="
        raise BNetError("x", expected="None: the net has no words", actual="a tensor", hint=hint)
    if len(stacks) > 1 and x is not None and not isinstance(x, Mapping):
        raise BNetError("x", expected="a mapping from stack: " + ", ".join(stacks), actual="one tensor")
    by_stack = dict(x) if isinstance(x, Mapping) else {} if x is None else {stacks[0]: x}
    inputs = index_by_group(network, "given", given)
    word_counts: dict[str, int] = {}
    for index, (label, _) in inputs.items():
        if network.specs[index].tpm.kind != "input":
            inputs_text = ", ".join(spec.group.name for spec in network.inputs)
            hint = "Use do= to set another node"
            raise BNetError(label, expected="an input node", allowed=inputs_text or None, hint=hint)
    for stack, value in by_stack.items():
        if stack not in stacks:
            raise unknown_name_error("stack", stack, stacks)
        label = f"x[{stack!r}]" if len(stacks) > 1 else "x"
        spec, first_choice = _find_stack_input(network, stack, given or {}), _find_stack_input(network, stack, {})
        is_filled = spec is None or spec.tpm.default is not None
        if is_filled and first_choice is not None and first_choice.group.name in (given or {}):
            name = first_choice.group.name
            raise BNetError(f"pass {label} or given[{name!r}], not both: each is the value of {name}")
        if not is_dense(value) or value.dim() < 2:
            actual = tuple(value.shape) if is_dense(value) else value
            raise BNetError(label, expected="ids [batch, word] or vectors [batch, word, dim]", actual=actual)
        word_counts[stack] = value.shape[1]
        if spec is not None:
            inputs[spec.group.index] = label, value
    for index, (label, value) in inputs.items():
        group = network.specs[index].group
        if group.word_stack is not None:
            if not is_dense(value) or value.dim() < 2 + len(group.plates):
                actual = tuple(value.shape) if is_dense(value) else value
                raise BNetError(label, expected=describe_shape(network.specs[index]), actual=actual)
            word_counts.setdefault(group.word_stack, value.shape[1 + len(group.plates)])
    has_default = {m.group.index for m in network.inputs if m.tpm.default is not None}
    has_default = {index for index in has_default if network.specs[index].group.word_stack in (None, *word_counts)}
    missing = [m.group.name for m in network.inputs if m.group.index not in {*inputs, *has_default}]
    missing += [f"stack {stack!r}" for stack in stacks if stack not in word_counts]
    if missing:
        has_inputs = {spec.group.word_stack for spec in network.inputs}.issuperset(stacks)
        placeholder = "" if has_inputs else "; for a stack without input nodes, zeros [batch, word]"
        hint = f"Pass it as x or given={placeholder}"
        raise BNetError(f"x: there is no value for {', '.join(missing)}", hint=hint)
    tensors = [*by_stack.values(), *(value for _, value in inputs.values())]
    batch = infer_batch_size(network, inputs, len(tensors[0]) if by_stack else 1)
    if batch == 0:
        label = ", ".join(label for label, _ in inputs.values())
        raise BNetError(label, expected="at least one sentence", actual="an empty batch")
    for stack, count in word_counts.items() if not torch.compiler.is_compiling() else ():
        check_int(f"words of stack {stack!r}" if stack else "words", count)
    values, named = check_values(network, inputs, word_counts, batch, like), index_by_group(network, "do", do)
    batch = infer_batch_size(network, named, batch)
    values |= check_values(network, named, word_counts, batch, like)
    subjects = {index: label for index, (label, _) in {**inputs, **named}.items()}
    return Inputs(values, subjects, word_counts, batch, tensors[0].device if tensors else network.device)


def check_values(
    network: Network,
    values: Mapping[int, tuple[str, Tensor]],
    word_counts: Mapping[str, int],
    batch: int | None,
    like: Tensor | None,
) -> dict[int, Tensor]:
    """Check values of groups, `[batch, *plates, word, *shape]`; the batch dim is added where it is missing.

    Args:
        network: The net.
        values: The name in messages and the value, by the index of the group.
        word_counts: The number of words of each stack.
        batch: The number of sentences; None for one value for all sentences.
        like: A parameter, which has the floating type of the net. The values may be on any device.

    Raises:
        BNetError: A value has a wrong type or shape.
    """
    checked: dict[int, Tensor] = {}
    for index, (subject, value) in values.items():
        spec = network.specs[index]
        _check_type(spec, subject, value, like)
        sizes, shape = get_plate_sizes(network, spec, word_counts), spec.shape if value.is_floating_point() else ()
        batches: list[tuple[int, ...]] = [(), (1,)] if batch is None else [(), (1,), (batch,)]
        if not is_allowed_shape(value.shape, [(*b, *sizes, *shape) for b in batches]):
            if batch is None:
                expected = f"one value for all sentences, of shape {(*sizes, *shape)}"
            else:
                described = describe_shape(spec, is_state=not value.is_floating_point())
                expected = f"{described} of shape {(batch, *sizes, *shape)}"
            raise BNetError(subject, expected=expected, actual=f"shape {tuple(value.shape)}")
        checked[index] = value if value.dim() > len(sizes) + len(shape) else value[None]
    return checked


def _check_type(spec: NodeSpec, subject: str, value: object, like: Tensor | None) -> None:
    """Raise an error for a value that is no tensor, or has a type that the group or the net does not have."""
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


def check_states(
    network: Network,
    subjects: Mapping[int, str],
    values: Mapping[int, Tensor],
    word_counts: Mapping[str, int],
    mask: Mapping[str, Tensor],
) -> None:
    """Raise an error for ids and states that are out of range; those of padding are never read.

    Args:
        network: The net.
        subjects: The name in messages, by the index of the group.
        values: The values, `[batch, *plates, word, *shape]`.
        word_counts: The number of words of each stack.
        mask: The mask of each stack, `[batch, word]`.
    """
    for index, value in values.items():
        if value.is_floating_point() or not value.numel() or not is_readable(value):
            continue
        spec = network.specs[index]
        present = None if spec.group.word_stack is None else mask.get(spec.group.word_stack)
        if present is not None:
            value = value.where(present.reshape(len(present), *[1] * len(spec.group.plates), -1).to(value.device), 0)
        low, high = (int(end) for end in value.aminmax())
        states = network.count_states(index, word_counts)
        if not 0 <= low <= high < states:
            kind = "ids" if spec.tpm.kind == "input" else "states"
            raise BNetError(subjects[index], expected=f"{kind} from 0 to {states - 1}", actual=low if low < 0 else high)


def check_gates(
    network: Network, gates: Mapping[str, Tensor] | None, batch: int, like: Tensor | None
) -> dict[int, Tensor]:
    """Check gates `[batch, *plates]`, and index them by group.

    Args:
        network: The net.
        gates: The gates by name.
        batch: The number of sentences.
        like: A parameter, which has the floating type and the device of the net.

    Raises:
        UnsupportedError: A group cannot have gates.
        BNetError: Gates have a wrong type or shape.
    """
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


def check_evidence(
    network: Network,
    evidence: Mapping[str, Evidence],
    known: Mapping[int, Tensor],
    word_counts: Mapping[str, int],
    mask: Mapping[str, Tensor],
    like: Tensor | None,
) -> dict[int, Evidence]:
    """Check evidence on groups that a user passes, and index it by group.

    Args:
        network: The net.
        evidence: The evidence by name.
        known: The values of inputs and of groups that are set.
        word_counts: The number of words of each stack.
        mask: The mask of each stack, `[batch, word]`.
        like: A parameter, which has the floating type of the net.

    Raises:
        BNetError: The evidence has a wrong type or shape, or is out of range.
        EvidenceError: The evidence is on an input, or on a group that is set.
    """
    specs = {}
    for name, item in check_mapping("evidence", evidence).items():
        specs[name] = spec = network.get_spec(name)
        if spec.tpm.kind == "input":
            raise EvidenceError(f"{name}: an input node cannot be observed, because its value is given")
        if spec.group.index in known:
            raise EvidenceError(f"{name}: set it by do or observe it, not both")
        if not isinstance(item, Evidence):
            raise BNetError(f"evidence[{name!r}]", expected="Evidence(value, observed)", actual=item)
    batch = max([1, *map(len, known.values()), *map(len, mask.values())])
    per_sentence = {m.group.index: (k, evidence[k].value) for k, m in specs.items() if m.scope != "corpus"}
    batch, checked = infer_batch_size(network, per_sentence, batch), {}
    for name, spec in specs.items():
        index, subject, observed = spec.group.index, f"evidence[{name!r}]", evidence[name].observed
        rows = None if spec.scope == "corpus" else batch
        values = check_values(network, {index: (subject, evidence[name].value)}, word_counts, rows, like)
        value = hidden = values[index]
        if observed is not None:
            shape = get_plate_sizes(network, spec, word_counts)
            shapes = [shape, (1, *shape), shape if rows is None else (batch, *shape)]
            is_mask = is_dense(observed) and observed.dtype == torch.bool
            if not is_mask or tuple(observed.shape) not in shapes:
                is_tensor = isinstance(observed, Tensor)
                actual = f"{observed.dtype} of shape {tuple(observed.shape)}" if is_tensor else observed
                expected = f"booleans of shape {shapes[-1]}, true for observed nodes"
                raise BNetError(f"{subject}.observed", expected=expected, actual=actual)
            observed = observed if observed.dim() > len(shape) else observed[None]
            hidden = value if value.is_floating_point() else value.where(observed, 0)
        check_states(network, {index: subject}, {index: hidden}, word_counts, mask)
        checked[index] = Evidence(value, observed)
    return checked


def check_batch(network: Network, batch: Batch, *, has_loss: bool = False) -> Batch:
    """Check sentences that a user has made as a batch; the rest of the library trusts its batches.

    Evidence whose name is not a group of the net is not checked, because a loss function of the user may read it.

    Args:
        network: The net.
        batch: The sentences.
        has_loss: Whether a loss function of the user reads the evidence, which may then be any tensor.

    Returns:
        The batch. Each of its tensors has a row for each sentence, so that minibatches can select some of them.
    """
    source, batch = batch, batch.cast_like(network)
    like = next(iter(network.parameters.values()), None)
    inputs = check_inputs(network, batch.x, batch.given, None, like)
    check_word_counts(network, inputs.word_counts)
    mask = check_mask(batch.mask, inputs.word_counts, inputs.batch)
    check_states(network, inputs.subjects, inputs.values, inputs.word_counts, mask)
    evidence = {name: item for name, item in batch.evidence.items() if name in network.graph.by_name and not has_loss}
    checked = check_evidence(network, evidence, inputs.values, inputs.word_counts, mask, like)
    checked = {index: item for index, item in checked.items() if network.specs[index].scope != "corpus"}
    count = max([inputs.batch, *(len(item.value) for item in checked.values())])

    def expand(value: Tensor, dims: int) -> Tensor:
        """Repeat a value with one row, or without a batch dim, for each sentence."""
        value = value if value.dim() == dims else value[None]
        return value.expand(count, *value.shape[1:])

    given = dict(source.given)
    for name, value in given.items():
        groups = find_groups(network, name)
        given[name] = expand(value, value.dim() if len(groups) > 1 else inputs.values[groups[0].index].dim())
    expanded = dict(source.evidence)
    for index, item in checked.items():
        name = network.specs[index].group.name
        value, observed = expanded[name].value, expanded[name].observed
        mask_rows = None if observed is None or item.observed is None else expand(observed, item.observed.dim())
        expanded[name] = Evidence(expand(value, item.value.dim()), mask_rows)
    return Batch(
        {stack: expand(value, value.dim()) for stack, value in source.x.items()},
        source.mask and {stack: expand(value, 2) for stack, value in source.mask.items()},
        expanded,
        given,
    )


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


def check_masked_reads(
    network: Network,
    outputs: Collection[int],
    known: Collection[int],
    mask: Mapping[str, Tensor],
    word_counts: Mapping[str, int],
) -> None:
    """Raise an error if a mask leaves a word without words to read, unless its TPM allows it.

    Args:
        network: The net.
        outputs: The groups that will be computed, with their ancestors.
        known: The groups with given values.
        mask: The mask of each stack, `[batch, word]`.
        word_counts: The number of words of each stack.
    """
    if not mask or torch.compiler.is_compiling():
        return
    reads: list[tuple[NodeSpec, ParentSpec, str]] = []
    for spec in network.specs:
        for parent in spec.parents if not spec.tpm.can_read_empty else ():
            stack, kind = network.specs[parent.index].group.word_stack, parent.reach.kind
            # Each sentence has a word, and with some reaches each word depends on itself.
            has_itself = spec.group.word_stack == stack and kind in ("causal", "window", "recent")
            if WORD in parent.over and stack in mask and kind != "every" and not has_itself:
                reads.append((spec, parent, stack or ""))
    # Choices among the ancestors count as known: their values are states, whatever their distributions depend on.
    choices = {spec.group.index for spec in network.specs if spec.tpm.kind == "discrete"} if reads else set()
    closed = choices.difference(outputs).union(known)
    computed = network.graph.ancestral_set(outputs, closed) - closed if reads else set()
    for spec, parent, stack in reads:
        present, child_stack = mask[stack], spec.group.word_stack
        if spec.group.index not in computed or not is_readable(present):
            continue
        n, m = spec.group.count_words(word_counts), word_counts[stack]
        pairs = torch.tensor(parent.reach.matrix(n, m), device=present.device)
        is_empty = ~(pairs & present[:, None, :]).any(-1)
        if child_stack is not None and child_stack in mask:
            is_empty = is_empty & mask[child_stack]
        if bool(is_empty.any()):
            sentence, word = is_empty.nonzero()[0].tolist()
            reader = spec.group.name if child_stack is None else f"word {word} of {spec.group.name}"
            read = network.specs[parent.index].group.name
            raise BNetError(
                f"mask, sentence {sentence}, {reader}",
                expected=f"at least one word of {read} to read that is not masked",
                actual=f"only masked words (reach {parent.reach})",
            )

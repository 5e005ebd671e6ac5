"""Interventions on a batch of sentences: from the names and values of `do` to the fields of a request.

A node group, a role or a pattern without a word index applies at every word, also at words that are generated later. A
name with a word index applies at this word of every sentence. Each sentence then has the values of
`net.sentence(words).do(do)`. In a net with latent choices, a change applies in each of their states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bnet_transformer.compiler.gather import ExecutionRequest, batch_to_request, get_layout_sizes
from bnet_transformer.data.batch import Batch
from bnet_transformer.data.checks import get_plate_sizes
from bnet_transformer.data.do_values import (
    Attend,
    Change,
    Mean,
    Within,
    as_change,
    has_node_values,
    is_relative,
    parse_entries,
    resolve_value,
)
from bnet_transformer.data.encode import expand_names
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import EvidenceError
from bnet_transformer.graph import GroundGraph, count_from_start, find_family
from bnet_transformer.reference import GroundModel
from bnet_transformer.tpm.base import broadcast_shapes


@dataclass(frozen=True)
class GroupIntervention:
    """An intervention that sets some nodes of a group, or changes their values; a call is a `ValueChange`.

    Args:
        spec: The group.
        change: The change of the values; None if they are set.
        is_full: Whether all nodes of the group change.
        mask: The nodes, `[row or 1, *plates of the layout, word]`.
        values: The values that are set, or the constants of the change, `[1, *plates of the layout, word, *shape]`;
            None if the change has no constants.
    """

    spec: NodeSpec
    change: Change | None
    is_full: bool
    mask: Tensor
    values: Tensor | None

    def at_words(self, start: int, count: int) -> GroupIntervention:
        """The same intervention on some words only."""
        if self.spec.group.word_stack is None:
            return self
        values = None if self.values is None else self.values.narrow(self.mask.dim() - 1, start, count)
        return replace(self, mask=self.mask.narrow(-1, start, count), values=values)

    def __call__(self, value: Tensor, word: int | None = None) -> Tensor:
        if word is not None:
            return self.at_words(word, 1)(value)
        mask, shape = self.mask.to(value.device), self.spec.shape
        values = None if self.values is None else self.values.to(value.device)
        if self.change is None:
            assert values is not None
            return torch.where(mask.reshape(*mask.shape, *[1] * (values.dim() - mask.dim())), values, value)
        sizes = broadcast_shapes(value.shape[: value.dim() - len(shape)], mask.shape)
        value = value.expand(*sizes, *shape)
        values = None if values is None else values.expand_as(value)
        if self.is_full:
            return self.change.apply(value, shape, values)
        # A function is called with the changed nodes only, because it may not be defined for the values of others.
        nodes = mask.expand(sizes).nonzero(as_tuple=True)
        if not len(nodes[0]):
            return value
        changed = self.change.apply(value[nodes], shape, None if values is None else values[nodes])
        return value.index_put(nodes, changed)


@dataclass
class BatchInterventions:
    """The interventions on the sentences of a batch.

    Args:
        network: The net.
        groups: The interventions on values. At most one for each group sets values, and all have different nodes.
        attention_rows: The attention weights of nodes, by the index of the group, the index among the plates and the
            word.
    """

    network: Network
    groups: list[GroupIntervention]
    attention_rows: Mapping[int, Mapping[tuple[int, int], Tensor]]

    def repeat(self, times: int) -> None:
        """Repeat each row `times` times."""
        for k, group in enumerate(self.groups):
            if len(group.mask) > 1:
                self.groups[k] = replace(group, mask=group.mask.repeat_interleave(times, 0))

    def build_request(self, batch: Batch, outputs: tuple[int, ...] = ()) -> ExecutionRequest:
        """The request of a run over the sentences of a batch, with the interventions."""
        return self.add_to_request(batch_to_request(self.network, batch, outputs))

    def add_to_request(self, request: ExecutionRequest) -> ExecutionRequest:
        """The request of the same sentences with the interventions."""
        network, counts = self.network, request.word_counts
        known, patched, rows = dict(request.known), dict(request.patched), dict(request.attention_rows)
        changes = dict(request.changes)
        for intervention in self.groups:
            spec, index = intervention.spec, intervention.spec.group.index
            group = intervention.at_words(0, counts.get(spec.group.word_stack or "", 0))
            if group.change is not None:
                changes[index] = [*changes.get(index, ()), group]
            elif group.values is not None:
                sizes = get_plate_sizes(network, spec, counts)
                values = group.values.reshape(1, *sizes, *group.values.shape[group.mask.dim() :])
                if bool(group.mask.all()) and spec.tpm.kind == "discrete":
                    known[index] = values
                elif bool(group.mask.any()):
                    patched[index] = values, group.mask.reshape(-1, *sizes)
        for index, by_node in self.attention_rows.items():
            spec = network.specs[index]
            sizes, read = get_plate_sizes(network, spec, counts), counts[network.get_source_stack(spec)]
            words = 1 if spec.group.word_stack is None else sizes[-1]
            weights = next(iter(by_node.values())).new_zeros(math.prod(sizes), read)
            mask = torch.zeros(len(weights), dtype=torch.bool, device=weights.device)
            for (k, word), row in by_node.items():
                weights[k * words + word], mask[k * words + word] = row[:read], True
            rows[index] = weights.reshape(1, *sizes, read), mask.reshape(1, *sizes)
        return replace(request, known=known, patched=patched, attention_rows=rows, changes=changes)


def resolve_interventions(
    network: Network,
    do: Mapping[str, object],
    word_counts: Mapping[str, int],
    shortest: Mapping[str, int],
    growing: str | None = None,
    first_word: Tensor | None = None,
) -> BatchInterventions:
    """Resolve the interventions on a batch, and raise an error for those that are not defined at every word.

    Args:
        network: The net.
        do: The values by name, group, role or pattern.
        word_counts: The maximum number of words of each stack, including new words.
        shortest: The number of words of the shortest sentence of each stack.
        growing: The stack in which words are generated; None if there is none.
        first_word: The first word `[row]` of `growing` at which interventions without a word apply; by default word 0.

    Raises:
        EvidenceError: A value is not defined for its nodes.
    """
    do, ground = parse_entries(do), GroundGraph(network.graph, word_counts)
    for name in do:
        group = ground.group_of(find_family(ground, name).nodes[0])
        if growing is not None and group.word_stack == growing and count_from_start(ground, name) != name:
            expected = "a word of the prompt that is counted from the start, because the sentence grows"
            raise EvidenceError("do", expected=expected, actual=name)
    resolver = _Resolver(GroundModel(network, ground, {}), shortest, growing, first_word)
    by_plates: dict[tuple[int, int], dict[int, object]] = {}
    for node, value in expand_names(resolver.model, "do", do).items():
        index = ground.group_of(node).index
        k, i = divmod(node - int(ground.offsets[index]), ground.count_words(index))
        by_plates.setdefault((index, k), {})[i] = value
    rows: dict[int, dict[tuple[int, int], Tensor]] = {}
    nodes: dict[tuple[int, int | None], tuple[Change | None, list[ResolvedNode]]] = {}
    for (index, k), values in by_plates.items():
        first_node = int(ground.offsets[index]) + k * ground.count_words(index)
        for word, value, is_everywhere in resolver.iter_values(index, first_node, values):
            tensor, change = resolver.resolve(first_node + (word or 0), value, is_everywhere), as_change(value)
            if isinstance(value, Attend) and word is not None and tensor is not None:
                rows.setdefault(index, {})[k, word] = tensor
            else:
                key = index, None if change is None else id(value)
                nodes.setdefault(key, (change, []))[1].append((k, word, tensor, is_everywhere))
    groups = [resolver.build(index, change, resolved) for (index, _), (change, resolved) in nodes.items()]
    return BatchInterventions(network, groups, rows)


# The index among the plates, the word (None for all words), the value, and whether the name of the node has no word.
ResolvedNode = tuple[int, int | None, Tensor | None, bool]


@dataclass(frozen=True)
class _Resolver:
    """Turns the values of `do` into tensors; the fields are arguments of `resolve_interventions`."""

    model: GroundModel
    shortest: Mapping[str, int]
    growing: str | None
    first_word: Tensor | None

    def iter_values(
        self, index: int, first_node: int, values: Mapping[int, object]
    ) -> Iterator[tuple[int | None, object, bool]]:
        """The values of some nodes with the same plates, by word: the word, None if the value is the same at all words,
        the value, and whether it is that of a name without a word.
        """
        ground, network, stack = self.model.ground, self.model.network, self.model.network.specs[index].group.word_stack
        count, (word, value) = self.model.ground.count_words(index), next(iter(values.items()))
        if self.growing is not None and network.specs[index].tpm.is_random and not network.graph.out_edges[index]:
            name = ground.name(first_node + word)
            raise EvidenceError(name, expected="a node on which the next word depends", actual="a readout")
        if len(values) < count or any(other is not value for other in values.values()):
            last = count if stack is None else self.shortest[stack] - 1
            for word, value in values.items():
                if word > last:
                    expected = f"a word of every prompt or sentence, from 0 to {last}, or a name without a word index"
                    raise EvidenceError(ground.name(first_node + word), expected=expected, actual=f"word {word}")
                yield word, value, False
            return
        change = as_change(value)
        source = change.target if isinstance(change, Within) else value
        sentences = source.sentences if isinstance(source, Mean) else (source,) if has_node_values(source) else ()
        if not sentences and (change is None or self.resolve(first_node, value) is None):
            yield None, value, True
            return
        # A sentence of a net without this stack has no such node, which `resolve` reports.
        words = min([count, *(other.ground.word_counts.get(stack, count) for other in sentences if stack is not None)])
        if words < count and isinstance(source, Mean):
            expected = f"sentences of at least {count} words, because Mean averages each word over sentences"
            hint = "Pass the mean as a tensor, to set every word to it"
            raise EvidenceError(ground.name(first_node), expected=expected, actual=f"{words} words", hint=hint)
        yield from ((word, value, True) for word in range(words))

    def resolve(self, node: int, value: object, is_everywhere: bool = True) -> Tensor | None:
        """The value of a node, its attention weights, or the constant of its change; an error if it is not defined."""
        name, spec, change = self.model.ground.name(node), self.model.spec(node), as_change(value)
        network = self.model.network
        if change is not None:
            if spec.tpm.is_random:
                expected = "a node that is a function of its parents"
                raise EvidenceError(name, expected=expected, actual=f"a {spec.tpm.kind} node")
            change.check(name, spec)
            return change.get_constant(name, torch.zeros(spec.shape, dtype=network.dtype, device=network.device))
        if is_relative(value) or (isinstance(value, Attend) and is_everywhere):
            expected = "a value that does not depend on the other words: a tensor, a state, Zero(), Shift(vector)"
            hint = f"Set {name} by Attend" if isinstance(value, Attend) else None
            raise EvidenceError(name, expected=expected, actual=type(value).__name__, hint=hint)
        resolved = resolve_value(self.model, node, value)
        if isinstance(resolved, Tensor):
            return resolved
        read = self.shortest[network.get_source_stack(spec)]
        if bool(resolved.weights[read:].any()):
            expected = f"weights of the words of every sentence, from 0 to {read - 1}"
            raise EvidenceError(name, expected=expected, actual=resolved.weights.tolist())
        return resolved.weights

    def build(self, index: int, change: Change | None, nodes: Sequence[ResolvedNode]) -> GroupIntervention:
        """The intervention on a group, from its nodes."""
        network, spec, count = self.model.network, self.model.network.specs[index], self.model.ground.count_words(index)
        first = self.first_word if spec.group.word_stack == self.growing else None
        is_constant = first is None and all(word is None for _, word, _, _ in nodes)
        positions = torch.arange(1 if is_constant else count, device=network.device)[None]
        applies = positions >= (0 if first is None else first[:, None])
        sizes, example = get_layout_sizes(network, spec), nodes[0][2]
        mask = applies.new_zeros(len(applies), math.prod(sizes), applies.shape[1])
        values = None if example is None else example.new_zeros(*mask.shape[1:], *example.shape)
        for k, word, tensor, is_everywhere in nodes:
            at = slice(None) if word is None else word
            mask[:, k, at] = applies[:, at] if is_everywhere else True
            if tensor is not None and values is not None:
                values[k, at] = tensor
        if values is not None:
            values = values.reshape(1, *sizes, -1, *values.shape[2:])
            values = values.expand(1, *sizes, count, *values.shape[1 + len(sizes) + 1 :])
        is_full, mask = bool(mask.all()), mask.reshape(-1, *sizes, mask.shape[-1]).expand(-1, *sizes, count)
        return GroupIntervention(spec, change, is_full, mask, values)

"""Interventions during decoding: the values to which nodes are set, and the vectors that are added, at each word.

A node group, a role or a pattern without a word index is set at every word, also at new words. A name with a word
index is set at this word of the prompt. Each word then has the values of `net.sentence(words).do(do)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bnet_transformer.compiler.gather import ExecutionRequest, TensorLayout, batch_to_request
from bnet_transformer.data import Batch
from bnet_transformer.data.batch import Task
from bnet_transformer.data.encode import expand_names
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import EvidenceError
from bnet_transformer.graph import GroundGraph, count_from_start, find_family
from bnet_transformer.inference.do_values import Attend, Mean, Shift, has_node_values, is_relative, resolve_value
from bnet_transformer.reference import AttentionRow, GroundModel


@dataclass
class GroupIntervention:
    """The values to which nodes of a group are set, or the vectors that are added to them.

    Attributes:
        spec: The group.
        sizes: The sizes of its plates.
        is_shift: Whether the tensors are added.
        at_all_words: The tensor of a node at every word, by the index of the node among the plates.
        at_word: The tensors at words that are named, by word, then as in `at_all_words`.
        from_sentences: The tensors at the words of given sentences, as in `at_word`.
        first_word: The first word `[row]` at which all tensors except those of named words apply; None for all words.
    """

    spec: NodeSpec
    sizes: tuple[int, ...]
    is_shift: bool
    at_all_words: dict[int, Tensor] = field(default_factory=dict)
    at_word: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    from_sentences: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    first_word: Tensor | None = None

    def evaluate(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The tensors `[1, *plates, word, *shape]` and the mask `[row or 1, *plates, word]` of some words."""
        by_word = (*self.at_word.values(), *self.from_sentences.values())
        like = next(value for tensors in (self.at_all_words, *by_word) for value in tensors.values())
        count, words = max(1, torch.Size(self.sizes).numel()), stop - start
        values = like.new_zeros(count, words, *like.shape)
        mask = torch.zeros(count, words, dtype=torch.bool, device=like.device)
        for k, tensor in self.at_all_words.items():
            values[k], mask[k] = tensor, True
        for word, tensors in self.from_sentences.items():
            for k, tensor in tensors.items() if start <= word < stop else ():
                values[k, word - start], mask[k, word - start] = tensor, True
        rows = mask[None]
        if self.first_word is not None:
            rows = rows & (torch.arange(start, stop, device=like.device) >= self.first_word[:, None])[:, None]
        if any(start <= word < stop for word in self.at_word):
            rows = rows.clone()
        for word, tensors in self.at_word.items():
            for k, tensor in tensors.items() if start <= word < stop else ():
                values[k, word - start], rows[:, k, word - start] = tensor, True
        return values.reshape(1, *self.sizes, words, *like.shape), rows.reshape(-1, *self.sizes, words)


class DecodingInterventions:
    """The interventions of one call of `generate`, by node group.

    Args:
        network: The net.
        stack: The stack in which words are generated.
        groups: The interventions, at most two for each node group: values that are set, and shifts.
        attention_rows: The attention weights of words of the prompt, by the index of the group, the index among the
            plates and the word.
    """

    def __init__(
        self,
        network: Network,
        stack: str,
        groups: Sequence[GroupIntervention],
        attention_rows: Mapping[int, Mapping[tuple[int, int], Tensor]],
    ) -> None:
        self.network, self.stack, self.groups, self.attention_rows = network, stack, groups, attention_rows
        self.indices = frozenset(group.spec.group.index for group in groups)
        self.layout = TensorLayout((), tuple(network.graph.plate_sizes))

    def repeat(self, times: int) -> None:
        """Repeat each row `times` times."""
        for group in self.groups:
            if group.first_word is not None:
                group.first_word = group.first_word.repeat_interleave(times, 0)

    def apply_to_request(self, request: ExecutionRequest) -> ExecutionRequest:
        """The request of the same sentences with the interventions."""
        word_counts = request.word_counts
        known, patched, attention_rows, perturbations = dict(request.known), {}, {}, {}
        for group in self.groups:
            spec, stack = group.spec, group.spec.group.word_stack
            values, mask = group.evaluate(0, 1 if stack is None else word_counts[stack])
            if group.is_shift:
                perturbations[spec.group.index] = self.lay_out(spec, _select_masked(values, mask, spec))
                continue
            if stack is None:
                values, mask = values.squeeze(1 + len(group.sizes)), mask.squeeze(-1)
            if bool(mask.all()) and spec.tpm.kind == "discrete":
                known[spec.group.index] = values
            elif bool(mask.any()):
                patched[spec.group.index] = values, mask
        for index, rows in self.attention_rows.items():
            spec = self.network.specs[index]
            sizes = tuple(self.network.graph.plate_sizes[plate] for plate in spec.group.plates)
            words, read = word_counts[self.stack], word_counts[self.network.get_source_stack(spec)]
            weights = next(iter(rows.values())).new_zeros(max(1, torch.Size(sizes).numel()), words, read)
            mask = torch.zeros(weights.shape[:2], dtype=torch.bool, device=weights.device)
            for (k, word), row in rows.items():
                weights[k, word], mask[k, word] = row[:read], True
            shape = (1, *sizes, words)
            attention_rows[index] = weights.reshape(*shape, read), mask.reshape(shape)
        return replace(
            request, known=known, patched=patched, attention_rows=attention_rows, perturbations=perturbations
        )

    def apply(self, index: int, value: Tensor, word: int) -> Tensor:
        """The value of a group at one word, `[rows, *layout, *shape]`, after its intervention."""
        for group in self.groups:
            if group.spec.group.index != index:
                continue
            spec, at = group.spec, 0 if group.spec.group.word_stack is None else word
            values, mask = group.evaluate(at, at + 1)
            if group.is_shift:
                value = value + self.lay_out(spec, _select_masked(values, mask, spec))
            else:
                mask, values = self.lay_out(spec, mask), self.lay_out(spec, values)
                value = torch.where(mask.reshape(*mask.shape, *[1] * (values.dim() - mask.dim())), values, value)
        return value

    def lay_out(self, spec: NodeSpec, value: Tensor) -> Tensor:
        """Reshape `[row, *plates, word, *shape]` to the layout of a run."""
        plates = spec.group.plates
        sizes = dict(zip(plates, value.shape[1:], strict=False))
        shape = [sizes.get(plate, 1) for plate in self.layout.plates]
        return value.reshape(len(value), *shape, *value.shape[1 + len(plates) :])


def build_request(
    network: Network,
    interventions: DecodingInterventions | None,
    x: Mapping[str, Tensor],
    mask: Mapping[str, Tensor] | None,
    outputs: tuple[int, ...] = (),
) -> ExecutionRequest:
    """The request of a run over the words `[row, word]` of each stack, with the interventions if there are any."""
    request = batch_to_request(network, Batch(x, mask), outputs)
    return request if interventions is None else interventions.apply_to_request(request)


def _select_masked(values: Tensor, mask: Tensor, spec: NodeSpec) -> Tensor:
    """The values of masked nodes, and zero for other nodes."""
    return values * mask.reshape(*mask.shape, *[1] * len(spec.shape))


def resolve_decoding_interventions(
    task: Task,
    stack: str,
    do: Mapping[str, object],
    lengths: Tensor,
    max_length: int,
    other_lengths: Mapping[str, Tensor],
    do_from: str,
) -> DecodingInterventions:
    """Resolve the interventions of `generate`, and raise an error for those that cannot apply to every new word.

    Args:
        task: The task of the net.
        stack: The stack in which words are generated.
        do: The values by name, group, role or pattern.
        lengths: The number of words of each prompt, `[row]`.
        max_length: The maximum number of words of a row, including new words.
        other_lengths: The number of words of each sentence of the other stacks, `[row]`.
        do_from: `"start"` or `"new"`: interventions without a word index apply from the first word on, or at new words.
    """
    network = task.network
    counts = {name: int(value.max()) for name, value in other_lengths.items()}
    counts[stack] = task.encoders[stack].exact_length or max_length
    shortest = {name: int(value.min()) for name, value in {**other_lengths, stack: lengths}.items()}
    model = GroundModel(network, GroundGraph(network.graph, counts), {})
    for name in do:
        group = model.ground.group_of(find_family(model.ground, name).nodes[0])
        if group.word_stack == stack and count_from_start(model.ground, name) != name:
            expected = "a word of the prompt that is counted from the start, because the sentence grows"
            raise EvidenceError("do", expected=expected, actual=name)
    resolver = _Resolver(model, stack, shortest, lengths if do_from == "new" else None)
    by_plates: dict[tuple[int, int], dict[int, object]] = {}
    for node, value in expand_names(model, "do", do).items():
        group = model.ground.group_of(node)
        words = 1 if group.word_stack is None else counts[group.word_stack]
        k, word = divmod(node - int(model.ground.offsets[group.index]), words)
        by_plates.setdefault((group.index, k), {})[word] = value
    for (index, k), values in by_plates.items():
        resolver.add(index, k, values)
    # Interventions on nodes on which the next word does not depend are checked, but have no effect.
    needed = {spec.group.index for readout in task.readouts for spec in network.ancestral_specs(readout)}
    groups = [group for group in resolver.groups.values() if group.spec.group.index in needed]
    rows = {index: row for index, row in resolver.attention_rows.items() if index in needed}
    return DecodingInterventions(network, stack, groups, rows)


@dataclass
class _Resolver:
    """Collects interventions by group. `shortest` is the length of the shortest prompt or sentence of each stack."""

    model: GroundModel
    stack: str
    shortest: Mapping[str, int]
    first_word: Tensor | None
    groups: dict[tuple[int, bool], GroupIntervention] = field(default_factory=dict)
    attention_rows: dict[int, dict[tuple[int, int], Tensor]] = field(default_factory=dict)

    def add(self, index: int, k: int, values: Mapping[int, object]) -> None:
        """Add the values of the nodes of a group with index k among the plates, by word."""
        spec, ground = self.model.network.specs[index], self.model.ground
        stack, offset = spec.group.word_stack, int(ground.offsets[index])
        count = 1 if stack is None else ground.word_counts[stack]
        first = next(iter(values.values()))
        name = ground.name(offset + k * count + next(iter(values)))
        is_readout = spec.tpm.is_random and not self.model.network.graph.out_edges[index]
        if is_readout:
            raise EvidenceError(name, expected="a node on which the next word depends", actual="a readout")
        is_everywhere = len(values) == count and all(value is first for value in values.values())
        if is_everywhere:
            self._add_everywhere(spec, k, first, offset + k * count)
            return
        for word, value in values.items():
            node = offset + k * count + word
            if stack is not None and word >= self.shortest[stack]:
                expected = (
                    f"a word of every prompt, from 0 to {self.shortest[stack] - 1}, or a name without a word index"
                )
                raise EvidenceError(ground.name(node), expected=expected, actual=f"word {word}")
            if isinstance(value, Attend) and stack == self.stack:
                row = resolve_value(self.model, node, value)
                assert isinstance(row, AttentionRow)
                self.attention_rows.setdefault(index, {})[k, word] = row.weights
            else:
                self._get_group(spec, is_shift=isinstance(value, Shift)).at_word.setdefault(word, {})[k] = (
                    self._resolve(node, value)
                )

    def _add_everywhere(self, spec: NodeSpec, k: int, value: object, first_node: int) -> None:
        """Add a value of the node with index k among the plates at every word."""
        ground, stack = self.model.ground, spec.group.word_stack
        count = 1 if stack is None else ground.word_counts[stack]
        group = self._get_group(spec, is_shift=isinstance(value, Shift))
        sentences = value.sentences if isinstance(value, Mean) else (value,) if has_node_values(value) else ()
        if not sentences:
            group.at_all_words[k] = self._resolve(first_node, value)
            return
        # A sentence of a net without this stack has no such node, which `_resolve` reports.
        words = 1 if stack is None else min(count, *(other.ground.word_counts.get(stack, count) for other in sentences))
        if words < count and isinstance(value, Mean):
            expected = f"sentences of at least {count} words, because Mean averages each word over sentences"
            hint = "Pass the mean as a tensor, to set every word to it"
            raise EvidenceError(ground.name(first_node), expected=expected, actual=f"{words} words", hint=hint)
        for word in range(words):
            group.from_sentences.setdefault(word, {})[k] = self._resolve(first_node + word, value)

    def _get_group(self, spec: NodeSpec, *, is_shift: bool) -> GroupIntervention:
        """The intervention on a group, which sets its nodes or shifts them."""
        sizes = tuple(self.model.network.graph.plate_sizes[plate] for plate in spec.group.plates)
        first_word = self.first_word if spec.group.word_stack == self.stack else None
        group = GroupIntervention(spec, sizes, is_shift, first_word=first_word)
        return self.groups.setdefault((spec.group.index, is_shift), group)

    def _resolve(self, node: int, value: object) -> Tensor:
        """The tensor of a value; an error for values that are not defined at every new word."""
        name = self.model.ground.name(node)
        if isinstance(value, Shift):
            value.check(name, self.model.spec(node))
            return value.vector.to(self.model.network.device, self.model.network.dtype)
        if is_relative(value) or isinstance(value, Attend):
            expected = "a value that does not depend on the other words: a tensor, a state, Zero(), Shift(vector)"
            hint = f"Set {name} by Attend" if isinstance(value, Attend) else None
            raise EvidenceError(name, expected=expected, actual=type(value).__name__, hint=hint)
        resolved = resolve_value(self.model, node, value)
        assert isinstance(resolved, Tensor)
        return resolved

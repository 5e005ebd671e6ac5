"""Decoding of one new word after another: with a KV cache, and with the states of latent choices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.batch_interventions import BatchInterventions
from bnet_transformer.compiler.gather import (
    ExecutionRequest,
    ExecutionState,
    build_context,
    gather_parents,
    get_layout_sizes,
)
from bnet_transformer.data import Batch, Evidence
from bnet_transformer.data.batch import Task, find_deciding_stacks, find_next_word_readout
from bnet_transformer.declare import NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.elimination import compute_posterior
from bnet_transformer.inference.factors import request_factors
from bnet_transformer.tpm import Affine, Attention, Concat, Dot, EvalContext, Linear

# --------------------------------------------------------------------------------------------------------------------
# Incremental decoding: compute the readout for one new word after another, with a KV cache.
#
# The declaration determines the cache: it contains the node groups of the stack on which a word depends at other words
# (k and v of attention). Other groups that depend on the words are computed only for the new word; groups that do not
# depend on them are computed once.
#
# Why it is exact: in a causal net no value of an earlier word depends on a later word, so cached values never change. A
# step computes the groups of one word from cached values in O(n) for attention; a full pass takes O(n^2).


@dataclass
class DecodingState:
    """The state of a step: the word index, its values, and the cache `[rows, ..., max_length, ...]` of each group."""

    max_length: int
    word: int = 0
    values: dict[int, Tensor] = field(default_factory=dict)
    kv_cache: dict[int, Tensor] = field(default_factory=dict)


Operation = Callable[[DecodingState], None]
Reader = Callable[[DecodingState], Tensor]


class IncrementalDecoder:
    """Computes the readout for one new word after another, for a batch of rows.

    The constructor runs the compiled net once on the prompts `[batch, word]`, which fills the cache. `log_probs`,
    `[rows, states]`, are the log probabilities of the word after the last one.
    """

    def __init__(
        self,
        module: CompiledModule,
        task: Task,
        x: Mapping[str, Tensor],
        mask: Mapping[str, Tensor] | None,
        length: int,
        interventions: BatchInterventions,
    ) -> None:
        self.readout, self.stack = find_next_word_readout(task)
        self.network = module.network
        needed = self.network.ancestral_specs(self.readout)
        decided = find_deciding_stacks(self.network, needed)
        self.per_word_specs = [m for m in needed if self.stack in decided[m.group.index]]
        self.per_word_indices = {spec.group.index for spec in self.per_word_specs}
        _check_incremental(self.per_word_specs, self.stack, self.per_word_indices, self.network.specs)
        self.input_index = next(m.group.index for m in self.per_word_specs if m.tpm.kind == "input")
        inputs = [parent for spec in self.per_word_specs for parent in spec.parents]
        self.cached_indices = {p.index for p in inputs if p.reach.kind != "same"} & self.per_word_indices
        fixed = {parent.index for parent in inputs} - self.per_word_indices
        outputs = (*sorted(self.cached_indices | fixed), self.readout.group.index)
        self.batch_size, words = x[self.stack].shape
        x = {**x, self.stack: pad_to_length(x[self.stack], task.encoders[self.stack].exact_length)}
        self.interventions = interventions
        execution, _ = module.execute(interventions.build_request(Batch(x, mask), outputs))
        self.execution, self.layout = execution, execution.layout
        self.log_probs = compute_next_word(execution, self.readout, words - 1).expand(self.batch_size, -1)
        self.state = DecodingState(max(length, x[self.stack].shape[1]), words - 1)
        self.static_values = {index: execution.values[index] for index in fixed}
        for index in self.cached_indices:
            self._write_cache(index, execution.values[index], 0)
        self.positions = torch.arange(self.state.max_length, device=execution.device)
        self.full_mask = torch.ones(1, self.state.max_length, dtype=torch.bool, device=execution.device)
        self._operations: list[Operation] | None = None

    def repeat(self, times: int) -> None:
        """Repeat each row `times` times, for beam search: row r becomes rows `r * times` to `(r + 1) * times - 1`."""
        self.static_values |= {
            i: value.repeat_interleave(times, 0) for i, value in self.static_values.items() if value.shape[0] > 1
        }
        caches, present = self.state.kv_cache, self.execution.present
        self.state.kv_cache = {index: value.repeat_interleave(times, 0) for index, value in caches.items()}
        self.execution.present = {stack: value.repeat_interleave(times, 0) for stack, value in present.items()}
        self.log_probs = self.log_probs.repeat_interleave(times, 0)
        self.interventions.repeat(times)
        self.batch_size, self._operations = self.batch_size * times, None

    def reorder(self, rows: Tensor) -> None:
        """Replace row r by row `rows[r]`."""
        axis, length = self.layout.word_dim, self.state.word + 1
        for value in self.state.kv_cache.values():
            part = value.narrow(axis, 0, length)
            part.copy_(part.index_select(0, rows))

    def step(self, ids: Tensor) -> Tensor:
        """Append one word to each row (`ids`, `[rows]`); return the log probabilities of the next, `[rows, states]`."""
        if self._operations is None:
            self._operations = self._compile_operations()
        state = self.state
        state.word += 1
        state.values = {self.input_index: ids.reshape(-1, *[1] * (self.layout.rank - 1))}
        for operation in self._operations:
            operation(state)
        logits = state.values[self.readout.group.index].select(self.layout.word_dim, -1)
        self.log_probs = _log_softmax(logits).expand(self.batch_size, -1)  # one row if do= sets all words of a group
        return self.log_probs

    def _write_cache(self, index: int, value: Tensor, word: int) -> None:
        """Write the values of a group to the cache, from position `word` on."""
        axis, caches = self.layout.word_dim, self.state.kv_cache
        if index not in caches:
            shape = list(value.shape)
            shape[0], shape[axis] = self.batch_size, self.state.max_length
            caches[index] = value.new_zeros(shape)
        caches[index].narrow(axis, word, value.shape[axis]).copy_(value)

    # The operations of a step.

    def _compile_operations(self) -> list[Operation]:
        """Create the operations of a step in topological order: one for each node group, or for all maps of one x."""
        done: set[int] = set()
        operations: list[Operation] = []
        for spec in self.per_word_specs:
            index = spec.group.index
            if index in done or spec.tpm.kind == "input":
                continue
            siblings = self._find_sibling_maps(spec) if self._is_linear_map(spec) else []
            if siblings:
                operations.append(self._fuse_maps(siblings))
                done |= {sibling.group.index for sibling in siblings}
            else:
                operations.append(self._create_operation(spec))
            for sibling in siblings or [spec]:
                operations += self._create_updates(sibling.group.index)
        return [*self._create_updates(self.input_index), *operations]

    def _create_updates(self, index: int) -> Sequence[Operation]:
        """Create the operations after the value of a group at the new word: its interventions, then the cache."""
        groups = [group for group in self.interventions.groups if group.spec.group.index == index]

        def intervene(state: DecodingState) -> None:
            for group in groups:
                state.values[index] = group(state.values[index], state.word)

        def write(state: DecodingState) -> None:
            self._write_cache(index, state.values[index], state.word)

        return [intervene] * bool(groups) + [write] * (index in self.cached_indices)

    def _create_operation(self, spec: NodeSpec) -> Operation:
        """Create the operation that computes the value of a node group for the new word."""
        index, tpm = spec.group.index, spec.tpm
        readers = [self._create_reader(parent) for parent in spec.parents]
        fast = self._fuse_attention(spec) or self._fuse_concat(spec)
        if fast is not None:
            return lambda state: state.values.update({index: fast(state, readers)})
        parameters = build_context(self.execution, spec).parameters
        fixed = {g.slot: self._static_read_indices(g) for g in spec.parents if g.over and not self._is_growing(g)}
        grow = [parent.slot for parent in spec.parents if self._is_growing(parent)]
        dtype, rank = self.execution.dtype, self.layout.rank + len(spec.shape)
        make = tpm.logits if tpm.kind == "discrete" else tpm.value
        rank += tpm.kind == "discrete"

        def operation(state: DecodingState) -> None:
            known = self.positions[: state.word + 1]
            read = {slot: pair[0] for slot, pair in fixed.items()} | dict.fromkeys(grow, known)
            mask = {slot: pair[1] for slot, pair in fixed.items()}
            for parent in spec.parents:
                if parent.slot in grow:
                    mask[parent.slot] = self._growing_mask(parent, state.word)
            position = self.positions[state.word : state.word + 1]
            context = EvalContext(parameters, position, read, mask, False, dtype)
            value = make(context, *[reader(state) for reader in readers])
            state.values[index] = value.reshape(*[1] * (rank - value.dim()), *value.shape)

        return operation

    def _growing_mask(self, parent: ParentSpec, word: int) -> Tensor:
        """Return the mask of the words up to this one that are read, `[1, word + 1]`."""
        positions, reach = self.positions[None, : word + 1], parent.reach
        if reach.kind == "mask":
            return torch.tensor([reach.table[word][: word + 1]], device=positions.device)
        return self.full_mask[:, : word + 1] if reach.kind == "causal" else reach.has_arrow(word, positions, word + 1)

    def _is_growing(self, parent: ParentSpec) -> bool:
        """Return True if the parent ranges over words whose number grows with each step."""
        return WORD in parent.over and parent.index in self.per_word_indices

    def _create_reader(self, parent: ParentSpec) -> Reader:
        """Create a function that returns the value of a parent, aligned with the values of the new word."""
        axis, index, reach = self.layout.word_dim, parent.index, parent.reach.kind
        if index not in self.per_word_indices:  # a value of the first word, of all words, or without words
            value = self.static_values[index]
            if reach == "first":
                value = value.narrow(axis, 0, 1)
            elif WORD in parent.over:
                value = value.unsqueeze(axis)
            aligned = self._align_plates(parent, value)
            return lambda state: aligned
        if reach in ("same", "rest"):  # a new word is never the first one
            return lambda state: self._align_plates(parent, state.values[index])
        if reach == "first":
            return lambda state: self._align_plates(parent, state.kv_cache[index].narrow(axis, 0, 1))
        if reach == "before":
            return lambda state: self._align_plates(parent, state.kv_cache[index].narrow(axis, state.word - 1, 1))
        return lambda s: self._align_plates(parent, s.kv_cache[index].narrow(axis, 0, s.word + 1).unsqueeze(axis))

    def _align_plates(self, parent: ParentSpec, value: Tensor) -> Tensor:
        """Move the plate dims over which a parent ranges to new dims after the layout."""
        for plate in reversed(parent.over):
            if plate != WORD:
                value = value.unsqueeze(self.layout.rank).transpose(self.layout.axis(plate), self.layout.rank)
        return value

    def _static_read_indices(self, parent: ParentSpec) -> tuple[Tensor, Tensor]:
        """Return the indices and the mask of the entries that are read, for a dim that does not grow."""
        if WORD not in parent.over:
            size = self.network.graph.plate_sizes[parent.over[-1]]
            return torch.arange(size, device=self.execution.device), self.full_mask.new_ones(size)
        stack = self.network.specs[parent.index].group.word_stack or ""
        count = self.execution.word_counts[stack]
        mask = self.full_mask.new_ones(1, count)
        if stack in self.execution.present:
            present = self.execution.present[stack]
            mask = present.reshape(len(present), *[1] * len(self.layout.plates), 1, count)
        return torch.arange(count, device=self.execution.device), mask

    # Fusions for TPMs of the package: a step has one word, so launching small products dominates its time. Fewer and
    # larger products give the same numbers.

    def _is_linear_map(self, spec: NodeSpec) -> bool:
        """Return True for a linear map with fixed weights of a vector of the same word."""
        if not isinstance(spec.tpm, Linear | Affine) or spec.tpm.dim is not None or len(spec.parents) != 2:
            return False
        W, x = spec.parents
        is_static = W.index not in self.per_word_indices and self.static_values[W.index].shape[0] == 1 and not W.over
        return is_static and x.index in self.per_word_indices and x.reach.kind == "same" and not x.over

    def _find_sibling_maps(self, spec: NodeSpec) -> list[NodeSpec]:
        """Find all linear maps of the same vector; none if the vector has plates."""
        source = spec.parents[1].index
        if self.network.specs[source].group.plates:
            return []
        return [s for s in self.per_word_specs if self._is_linear_map(s) and s.parents[1].index == source]

    def _fuse_maps(self, specs: list[NodeSpec]) -> Operation:
        """Compute `[W_q W_k W_v] x` as one product. The weights are concatenated once."""
        weights, biases = list[Tensor](), list[Tensor]()
        for spec in specs:
            W = self.static_values[spec.parents[0].index]
            weights.append(W.expand(1, *get_layout_sizes(self.network, spec), 1, *W.shape[-2:]))
            bias, shape = build_context(self.execution, spec).parameters.get("bias"), weights[-1].shape[:-1]
            biases.append(W.new_zeros(shape) if bias is None else bias.expand(shape))
        W_all = torch.cat([W.reshape(-1, W.shape[-1]) for W in weights])
        b_all = torch.cat([b.reshape(-1) for b in biases])
        is_linear = all(not isinstance(spec.tpm, Affine) for spec in specs)
        sizes = [W.shape[:-1].numel() for W in weights]
        shapes = [(-1, *W.shape[1:-1]) for W in weights]
        indices = [spec.group.index for spec in specs]
        source = specs[0].parents[1].index

        def operation(state: DecodingState) -> None:
            x = state.values[source]
            outputs = functional.linear(x.reshape(-1, x.shape[-1]), W_all, None if is_linear else b_all)
            for index, part, shape in zip(indices, outputs.split(sizes, -1), shapes, strict=True):
                state.values[index] = part.reshape(shape)

        return operation

    def _fuse_attention(self, spec: NodeSpec) -> Callable[[DecodingState, list[Reader]], Tensor] | None:
        """Compute `softmax(q k) v` over the words so far; None for attention with other options."""
        tpm = spec.tpm
        if not isinstance(tpm, Attention) or not isinstance(tpm.score, Dot) or tpm.score.rotary is not None:
            return None
        is_plain = tpm.bias is None and tpm.over == "keys" and tpm.normaliser.kind == "softmax"
        if not is_plain or any(g.over != (WORD,) or g.reach.kind not in ("causal", "every") for g in spec.parents[1:3]):
            return None
        key = spec.parents[1]
        mask = None if self._is_growing(key) else self._static_read_indices(key)[1]
        hidden = None if mask is None or bool(mask.all()) else ~mask
        score, residual = tpm.score, tpm.residual

        def value(state: DecodingState, readers: list[Reader]) -> Tensor:
            q, k, v = (reader(state) for reader in readers[:3])
            k, v = k.squeeze(-3), v.squeeze(-3)
            scores = (q * score.get_scale(q.shape[-1])) @ k.mT
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            mix = scores.softmax(-1) @ v
            return mix + readers[-1](state) if residual else mix

        return value

    def _fuse_concat(self, spec: NodeSpec) -> Callable[[DecodingState, list[Reader]], Tensor] | None:
        """Compute `W_o [a^1 a^2 ...]` as one product. The matrices are concatenated once. None for another TPM."""
        tpm = spec.tpm
        if not isinstance(tpm, Concat) or not tpm.mapped or spec.group.plates:
            return None
        weight_index = spec.parents[0].index
        if weight_index in self.per_word_indices or self.static_values[weight_index].shape[0] != 1:
            return None
        W_o = tpm.concat_weights(self._align_plates(spec.parents[0], self.static_values[weight_index]))
        W = W_o.reshape(W_o.shape[-2:])
        bias = build_context(self.execution, spec).parameters["bias"] if tpm.bias else None

        def value(state: DecodingState, readers: list[Reader]) -> Tensor:
            total = functional.linear(readers[1](state).flatten(-1 - tpm.plates), W, bias)
            return total + readers[-1](state) if tpm.residual else total

        return value


def pad_to_length(ids: Tensor, length: int | None) -> Tensor:
    """Pad words `[row, word]` to the length that a table requires; no earlier word depends on the padding."""
    return ids if length is None else functional.pad(ids, (0, length - ids.shape[1]))


def _check_incremental(
    per_word_specs: list[NodeSpec], stack: str, per_word_indices: set[int], specs: tuple[NodeSpec, ...]
) -> None:
    """Raise an error for a net that cannot be computed word by word."""
    for spec in per_word_specs:
        name = spec.group.name
        if spec.tpm.kind == "input" and not spec.tpm.is_index_valued:
            raise BNetError(name, expected="words of a vocabulary", actual="vectors", hint="Use iterate")
        for parent in spec.parents:
            read = specs[parent.index].group
            if parent.pick:
                expected = "no node that picks a plate by a choice"
                raise BNetError(name, expected=expected, actual=f"pick of {read.name}")
            is_other = parent.index not in per_word_indices and read.word_stack is not None
            kind = parent.reach.kind
            if is_other and not (kind == "first" or (kind == "every" and WORD in parent.over)):
                expected = "to read all words of the other stack, or its first word"
                raise BNetError(name, expected=expected, actual=f"{read.name} by reach {parent.reach}")
            if parent.reach.kind == "earlier" and not spec.tpm.can_read_empty:
                expected = "a parent that exists for word 0"
                raise BNetError(name, expected=expected, actual=f"{read.name} with reach earlier")
    if sum(spec.tpm.kind == "input" for spec in per_word_specs) != 1:
        expected = f"one given node over the words of {stack!r}"
        raise BNetError("generate", expected=expected, actual="several given nodes")


def compute_next_word(execution: ExecutionState, readout: NodeSpec, word: int) -> Tensor:
    """Compute the log probabilities of the word after a word, `[rows, states]`, from the parents of its readout."""
    context, parents = gather_parents(execution, readout)
    logits = readout.tpm.logits(context, *parents)
    return _log_softmax(
        logits.select(execution.layout.word_dim, min(word, logits.shape[execution.layout.word_dim] - 1))
    )


def _log_softmax(logits: Tensor) -> Tensor:
    """Compute the log probabilities of the last word, `[rows, states]`."""
    return logits.reshape(len(logits), -1, logits.shape[-1])[:, -1].log_softmax(-1)


# --------------------------------------------------------------------------------------------------------------------
# Draw the states of latent choices during decoding: first those of the prompt, then those of each new word.
#
# The choices of the prompt are drawn from their joint posterior given its words, one node after another: `P(c_1 |
# words) P(c_2 | c_1, words) ...`. The choices of a new word are drawn given the words and the choices so far: no word
# depends on them yet, so they have the distribution of their TPM, and one run computes it. The words are drawn given
# the choices. So words and choices have the joint distribution of the net, given the prompt.


@dataclass
class ChoiceSampler:
    """Draws the choices on which the next word depends, for a batch of rows.

    Args:
        module: The compiled net.
        task: The task of the net.
        stack: The stack in which words are generated.
        prompts: The padded prompts, `[rows, word]`.
        lengths: The number of words of each prompt, `[rows]`.
        generator: The random numbers.
        interventions: The interventions at each word.
    """

    module: CompiledModule
    task: Task
    stack: str
    prompts: Tensor
    lengths: Tensor
    generator: torch.Generator
    interventions: BatchInterventions
    states: dict[int, Tensor] = field(default_factory=dict)
    has_state: dict[int, Tensor] = field(default_factory=dict)

    def draw(self, x: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None, count: int) -> dict[int, Tensor]:
        """Draw the choices of a new word; return the states of all choices that `do` does not set.

        Args:
            x: The words so far, `[rows, word]`, with the padding that the net requires.
            mask: The masks of the other stacks.
            count: The number of words so far.

        Returns:
            The states by node group, `[rows, *plates, word]`.
        """
        known = self.interventions.build_request(Batch(x, mask)).known
        specs, size = self._find_choices(known), x[self.stack].shape[1]
        if not self.states and specs:
            self._draw_prompt(specs, x, mask)
        per_word = [spec for spec in specs if spec.group.word_stack == self.stack]
        for choice in (spec.group.index for spec in per_word):  # new words have no drawn states yet
            missing = max(0, size - self.states[choice].shape[-1])
            self.states[choice] = functional.pad(self.states[choice], (0, missing))
            self.has_state[choice] = functional.pad(self.has_state[choice], (0, missing))
        is_new = count - 1 >= self.lengths
        if bool(is_new.any()):
            counts = torch.full_like(self.lengths, count)
            self._draw_nodes(per_word, count - 1, is_new, x, mask, counts, is_leaf=True)
        return {spec.group.index: self._narrow(spec.group.index, self.states, size) for spec in specs}

    def get_states(self, count: int) -> dict[str, Tensor]:
        """The drawn states of the first `count` words by name, `[rows, *plates, word]`."""
        groups = self.module.network.graph.groups
        return {groups[index].name: self._narrow(index, self.states, count) for index in self.states}

    def _find_choices(self, known: Collection[int]) -> list[NodeSpec]:
        """The choices on which the next word depends and that `do` does not set, parents first."""
        network = self.module.network
        needed = network.ancestral_specs(self.task.readouts[0])
        choices = {spec.group.index for spec in network.choices}
        return [spec for spec in needed if spec.group.index in choices.difference(known)]

    def _narrow(self, choice: int, tensors: Mapping[int, Tensor], size: int) -> Tensor:
        """The tensor of a choice at the first words."""
        is_per_word = self.module.network.graph.groups[choice].word_stack == self.stack
        return tensors[choice][..., :size] if is_per_word else tensors[choice]

    def _draw_prompt(
        self, specs: Sequence[NodeSpec], x: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None
    ) -> None:
        """Draw the choices without words and those of the words of each prompt, given the full prompts."""
        words = max(self.prompts.shape[1], x[self.stack].shape[1])
        x = {**x, self.stack: functional.pad(self.prompts, (0, words - self.prompts.shape[1]))}
        graph = self.module.network.graph
        for spec in specs:
            stack = spec.group.word_stack
            sizes = [graph.plate_sizes[plate] for plate in spec.group.plates]
            sizes += [] if stack is None else [x[stack].shape[1]]
            self.states[spec.group.index] = self.prompts.new_zeros(len(self.prompts), *sizes)
            self.has_state[spec.group.index] = self.states[spec.group.index].bool()
        outside = [spec for spec in specs if spec.group.word_stack != self.stack]
        inside = [spec for spec in specs if spec.group.word_stack == self.stack]
        is_leaf = bool((self.lengths == 1).all())  # no readout is observed
        rows = torch.ones_like(self.lengths, dtype=torch.bool)
        self._draw_nodes(outside, None, rows, x, mask, self.lengths, is_leaf=is_leaf)
        for word in range(int(self.lengths.max())):
            self._draw_nodes(inside, word, word < self.lengths, x, mask, self.lengths, is_leaf=is_leaf)

    def _draw_nodes(
        self,
        specs: Sequence[NodeSpec],
        word: int | None,
        rows: Tensor,
        x: Mapping[str, Tensor],
        mask: Mapping[str, Tensor] | None,
        counts: Tensor,
        *,
        is_leaf: bool,
    ) -> None:
        """Draw nodes of some rows, one after another, given the words and the states that are drawn already.

        Args:
            specs: The choices.
            word: The word of the nodes; None for all nodes.
            rows: The rows with new states, `[rows]`.
            x: The words.
            mask: The masks of the other stacks.
            counts: The number of words of each row, all except the last of which have an observed readout.
            is_leaf: Whether no observed readout depends on these nodes.
        """
        size, request = x[self.stack].shape[1], self.interventions.build_request(Batch(x, mask))
        words = {self.task.readouts[0].group.index: observe_next_words(x[self.stack], counts[:, None] - 1)}
        for choice in (spec.group.index for spec in specs):
            is_recurrent = choice in self.module.network.graph.recurrent
            states, has_state = self.states[choice], self.has_state[choice]
            for index in itertools.product(*map(range, states.shape[1:])):
                if word is not None and index[-1] != word:
                    continue
                if is_leaf and not is_recurrent:
                    probs = self._compute_conditional(choice, request, size)
                else:
                    evidence = {**words, **self._collect_evidence(size)}
                    factor_request = request_factors(self.module, evidence, choice, request)
                    probs = compute_posterior(self.module, choice, factor_request)
                at: tuple[slice | int, ...] = (slice(None), *index)
                sampled = torch.multinomial(probs[at].expand(len(rows), -1), 1, generator=self.generator)[:, 0]
                states[at] = torch.where(rows, sampled, states[at])
                has_state[at] |= rows

    def _collect_evidence(self, size: int) -> dict[int, Evidence]:
        """The drawn states of the first `size` words as evidence, by node group."""
        return {
            choice: Evidence(self._narrow(choice, self.states, size), self._narrow(choice, self.has_state, size))
            for choice, masks in self.has_state.items()
            if bool(masks.any())
        }

    def _compute_conditional(self, choice: int, request: ExecutionRequest, size: int) -> Tensor:
        """The distribution of a choice given the drawn states, `[rows or 1, *plates, word, state]`."""
        states = {other: self._narrow(other, self.states, size) for other in self.states if other != choice}
        request = replace(request, outputs=(choice,), known={**request.known, **states})
        return self.module.compute_output(self.module.execute(request)[0], choice).exp()


def observe_next_words(ids: Tensor, counts: int | Tensor) -> Evidence:
    """The evidence of the words after the first `counts` words: the readout of word i is word i + 1.

    Args:
        ids: The words, `[rows, word]`.
        counts: The number of observed readouts, one for all rows or `[rows, 1]`.
    """
    value = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
    observed = (torch.arange(ids.shape[1], device=ids.device) < counts).expand(value.shape)
    return Evidence(value, observed)


# --------------------------------------------------------------------------------------------------------------------
# Decoding of nets with latent choices: the next word, given the words so far.
#
# By default, `P(y_t | y_(<t), x_(<=t))` averages the readout over the posterior of the choices, given the words so far.
# In a chain along words this is forward filtering. Each step is one exact posterior of the readout: there is no cache,
# so that a sentence of n words takes O(n^2) words of computation. If all choices have states, because `do` sets them or
# because they are drawn (`ChoiceSampler`), each step is one run of the net with these states.


class FilteringDecoder:
    """Computes the readout for one new word after another, for a batch of rows; it replaces `IncrementalDecoder`.

    Args:
        module: The compiled net.
        task: The task of the net; its readout predicts the next word.
        x: The words of each stack, `[rows, word]`.
        mask: The masks of the other stacks.
        interventions: The interventions at each word.
        sampler: Draws the states of choices; None to sum them out.
    """

    def __init__(
        self,
        module: CompiledModule,
        task: Task,
        x: Mapping[str, Tensor],
        mask: Mapping[str, Tensor] | None,
        interventions: BatchInterventions,
        sampler: ChoiceSampler | None = None,
    ) -> None:
        self.readout, self.stack = find_next_word_readout(task)
        self.module, self.x, self.mask = module, dict(x), dict(mask or {})
        self.exact_length = task.encoders[self.stack].exact_length
        self.interventions, self.sampler = interventions, sampler
        needed = {spec.group.index for spec in module.network.ancestral_specs(self.readout)}
        self.choices = [spec for spec in module.network.choices if spec.group.index in needed]
        self.log_probs = self._compute_log_probs()

    def _compute_log_probs(self) -> Tensor:
        """Compute the log probabilities of the word after the last one, `[rows, states]`."""
        ids, index = self.x[self.stack], self.readout.group.index
        count = ids.shape[1]
        x, mask = {**self.x, self.stack: pad_to_length(ids, self.exact_length)}, self.mask or None
        request = self.interventions.build_request(Batch(x, mask), (index,))
        if self.sampler is not None:
            request = replace(request, known={**request.known, **self.sampler.draw(x, mask, count)})
        if all(spec.group.index in request.known for spec in self.choices):
            execution, _ = self.module.execute(request)
            return compute_next_word(execution, self.readout, count - 1).expand(len(ids), -1)
        evidence = {index: observe_next_words(x[self.stack], count - 1)}
        probs = compute_posterior(self.module, index, request_factors(self.module, evidence, index, request))
        return probs[:, count - 1].log()

    def step(self, ids: Tensor) -> Tensor:
        """Append one word to each row (`ids`, `[rows]`); return the log probabilities of the next, `[rows, states]`."""
        self.x[self.stack] = torch.cat([self.x[self.stack], ids[:, None]], 1)
        self.log_probs = self._compute_log_probs()
        return self.log_probs

    def repeat(self, times: int) -> None:
        """Repeat each row `times` times, for beam search: row r becomes rows `r * times` to `(r + 1) * times - 1`."""
        self.x = {stack: value.repeat_interleave(times, 0) for stack, value in self.x.items()}
        self.mask = {stack: value.repeat_interleave(times, 0) for stack, value in self.mask.items()}
        self.log_probs = self.log_probs.repeat_interleave(times, 0)
        self.interventions.repeat(times)

    def reorder(self, rows: Tensor) -> None:
        """Replace row r by row `rows[r]`."""
        self.x = {stack: value[rows] for stack, value in self.x.items()}

"""Many sentences as tensors: padded, with masks and evidence; and what data a net takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from bnet_transformer._core.files import compute_digest
from bnet_transformer._core.naming import Reach
from bnet_transformer.data.encode import WordEncoder, build_word_counter, encode_sentence, word_encoder
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError

# --------------------------------------------------------------------------------------------------------------------
# Infer from a net what data it takes: its words, its readouts, and whether a readout predicts the next word.


def is_backward(reach: Reach) -> bool:
    """True if no word depends on a later word; tables and reaches of width 0 are included."""
    return reach.is_causal or reach.kind == "first" or reach == Reach("window", 0)


@dataclass(frozen=True)
class Task:
    """The readouts of a net, the words of each stack, and the stack whose next word is predicted, if there is one.

    In a stack of real-valued words the next word is predicted only if another stack contains the words before it.
    """

    network: Network
    readouts: tuple[NodeSpec, ...]
    encoders: dict[str, WordEncoder]
    next_word: str | None

    @property
    def stacks(self) -> tuple[str, ...]:
        """The stacks whose words are given."""
        return tuple(self.encoders)

    @property
    def has_choices(self) -> bool:
        """True if a readout depends on a latent choice, over which its probability is summed."""
        needed = {spec.group.index for readout in self.readouts for spec in self.network.ancestral_specs(readout)}
        return any(spec.group.index in needed for spec in self.network.choices)

    def needs_mask(self, stack: str) -> bool:
        """True if a word of a stack could read the padding at its end, or a choice at the padding would be counted."""
        for spec in self.network.choices:
            if spec.group.word_stack == stack:
                return True
        for spec in self.network.specs:
            for parent in spec.parents:
                words = self.network.specs[parent.index].group.word_stack
                if words == stack and (spec.group.word_stack != stack or not is_backward(parent.reach)):
                    return True
        return False


def infer_task(network: Network) -> Task:
    """Infer what data a net takes: its readouts, the words of its stacks, and whether a readout predicts next words.

    Args:
        network: The net, with or without readouts and choices.

    Returns:
        The task. Its readouts are the random nodes without children.

    Raises:
        BNetError: A stack has words but no input node for them.
    """
    readouts = tuple(m for m in network.specs if m.tpm.is_random and not network.graph.out_edges[m.group.index])
    encoders = {}
    for stack in network.graph.word_stacks:
        encoder = word_encoder(network, stack) or build_word_counter(network, stack)
        if encoder is None:
            raise BNetError(f"stack {stack!r}: no input node of this stack takes the words of a sentence")
        encoders[stack] = encoder
    return Task(network, readouts, encoders, _infer_next_word(network, readouts, encoders))


def infer_fit_task(network: Network) -> Task:
    """Infer what data a fit of a net takes: all readouts are observed, and no observation is the next word.

    Args:
        network: The net, which may have choices.

    Returns:
        The task. In a net without words every random node can be observed, so all of them are readouts.

    Raises:
        BNetError: The net has no readout.
    """
    task = infer_task(network)
    if not task.encoders:
        task = replace(task, readouts=tuple(m for m in network.specs if m.tpm.is_random))
    if not task.readouts:
        subject = "net: there is no readout (a Categorical or Normal node without children), hence no likelihood to fit"
        raise BNetError(subject, hint="Build the net with observe=")
    return replace(task, next_word=None)


def check_has_words(network: Network, subject: str, alternative: str | None = None) -> None:
    """Raise an error for a net without words."""
    if not network.graph.word_stacks:
        hint = None if alternative is None else f"Use {alternative}"
        raise BNetError(subject, expected="a net with words", hint=hint)


def _infer_next_word(network: Network, readouts: tuple[NodeSpec, ...], encoders: dict[str, WordEncoder]) -> str | None:
    """The stack whose next word the only readout predicts without reading later words; None without such a stack."""
    if len(readouts) != 1:
        return None
    (readout,) = readouts
    stack = readout.group.word_stack
    if stack is None or readout.group.plates:
        return None
    encoder = encoders[stack]
    if readout.tpm.kind == "discrete":
        predicts_words = readout.tpm.states is not None and readout.tpm.states == encoder.states
    else:  # real-valued words count only with several stacks
        predicts_words = len(encoders) > 1 and encoder.states is None and readout.shape == encoder.spec.shape
    return stack if predicts_words and find_noncausal_arrow(network, readout, stack) is None else None


def find_next_word_readout(task: Task, subject: str = "generate") -> tuple[NodeSpec, str]:
    """Find the readout that predicts the next word, and its stack; raise an error with the reason if there is none."""
    expected = "a net whose only readout predicts the next word"
    if task.next_word is not None and task.encoders[task.next_word].states is not None:
        return task.readouts[0], task.next_word
    for readout in task.readouts:
        stack, states = readout.group.word_stack, readout.tpm.states
        arrow = None if stack is None else find_noncausal_arrow(task.network, readout, stack)
        if stack is not None and arrow is not None and states is not None and states == task.encoders[stack].states:
            actual = f"a net in which a word depends on later words: {arrow}"
            raise BNetError(subject, expected=expected, actual=actual, hint="Build the net with mask='causal'")
    names = ", ".join(f"{readout.group.name} ({type(readout.tpm).__name__})" for readout in task.readouts)
    actual = f"the readouts {names}" if names else "a net without a readout"
    hint = "Use iterate if words are vectors" if subject == "generate" else None
    raise BNetError(subject, expected=expected, actual=actual, hint=hint)


def find_noncausal_arrow(network: Network, spec: NodeSpec, stack: str) -> str | None:
    """The first arrow among a node's ancestors by which it depends on later words of a stack; None if there is none.

    Only parents that depend on words of the stack matter; other arrows may connect all words.
    """
    needed = network.ancestral_specs(spec)
    decided = find_deciding_stacks(network, needed)
    for child in needed:
        for parent in child.parents:
            parent_group = network.specs[parent.index].group
            if stack not in decided[parent.index]:
                continue
            if child.group.word_stack != stack or parent_group.word_stack != stack or not is_backward(parent.reach):
                return f"{parent_group.name} -> {child.group.name} ({parent.reach})"
    return None


def find_deciding_stacks(network: Network, specs: list[NodeSpec]) -> dict[int, frozenset[str]]:
    """For each group, the stacks on whose words it depends; `specs` lists all ancestors in topological order."""
    stacks: dict[int, frozenset[str]] = {}
    for spec in specs:
        index, words = spec.group.index, spec.group.word_stack
        parents = (stacks.get(edge.parent, frozenset()) for edge in network.graph.in_edges[index])
        stacks[index] = frozenset(({words} if words is not None else set()).union(*parents))
    return stacks


def infer_trainable_task(network: Network, *, is_generation: bool = False) -> Task:
    """Infer the task of a net that is trained on the log probability of its readouts.

    Args:
        network: The net.
        is_generation: Whether words will be generated, which changes the hints of the errors.

    Returns:
        The task, which has at least one readout.

    Raises:
        BNetError: The net has no readout, a random node that is not discrete and has children, or a choice that all
            sentences share.
    """
    task = infer_task(network)
    out_of = network.graph.out_edges
    latent = [m for m in network.specs if m.tpm.is_random and out_of[m.group.index]]
    unsummable = [m.group.name for m in latent if m.tpm.kind != "discrete" or m.scope == "corpus"]
    if not task.readouts:
        subject = "net: there is no readout (a Categorical or Normal node without children), hence no likelihood"
        hint = "Build the net with observe= or readout=, or pass loss= to train"
        if is_generation:
            subject = (
                "net: there is no readout (a Categorical or Normal node without children) to predict the next word"
            )
            hint = "Build the net with observe= or readout="
        raise BNetError(subject, hint=hint)
    if unsummable:
        expected = (
            "discrete latent choices of words or sentences, which are summed out of the probability of a sentence"
        )
        hint = "Use another net" if is_generation else "Use bt.fit for a choice that all sentences share, or pass loss="
        raise BNetError("net", expected=expected, actual=", ".join(unsummable[:4]), hint=hint)
    return task


UNOBSERVED = -1


@dataclass(frozen=True)
class Evidence:
    """The observed values of a node group.

    Args:
        value: The values, `[batch, *plates, word, *shape]`; states of discrete nodes are integers without `shape`.
        observed: The mask of observed nodes, booleans `[batch, *plates, word]`; None if all are observed.
    """

    value: Tensor
    observed: Tensor | None = None

    def map(self, fn: Callable[[Tensor], Tensor]) -> Evidence:
        """The evidence with a function applied to each of its tensors.

        Args:
            fn: A function from a tensor to a tensor.

        Returns:
            The new evidence.
        """
        return Evidence(fn(self.value), None if self.observed is None else fn(self.observed))


@dataclass(frozen=True, eq=False)
class Batch:
    """Sentences as tensors: the input of compiled modules, training, fits and head analyses.

    `==` compares batches by identity; `equals` compares their contents.

    Args:
        x: The words of each stack: ids `[sentence, word]` or vectors `[sentence, word, *shape]`; zeros `[sentence,
            word]` for a stack without an input node, whose words have no values.
        mask: For each stack booleans `[sentence, word]`, true for words and false for padding; None, or no entry of a
            stack, if there is no padding. The values of padding are never read.
        evidence: The observations, a mapping from node group.
        given: The values of further inputs, a mapping from node group to `[sentence, *plates, word, *shape]`.

    >>> import bnet_transformer as bt
    >>> net = bt.encoder(8, heads=2, slices=1, vocabulary=["the", "cat", "sat"])
    >>> batch = net.batch(["the cat sat", "cat"])
    >>> batch.x[""].shape, batch.mask[""].tolist()
    (torch.Size([2, 3]), [[True, True, True], [True, False, False]])
    """

    x: Mapping[str, Tensor]
    mask: Mapping[str, Tensor] | None = None
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    given: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        values = (*self.x.values(), *self.given.values(), *(e.value for e in self.evidence.values()))
        return len(values[0]) if values else 1

    @property
    def observed(self) -> dict[str, Tensor]:
        """The observations of each node group as one tensor; missing states are -1, missing real numbers NaN."""
        return {name: _fill_missing(evidence) for name, evidence in self.evidence.items()}

    @property
    def count(self) -> int:
        """The number of observed words, summed over all node groups."""
        total = 0
        for evidence in self.evidence.values():
            value = evidence.value
            words = value[..., 0] if value.is_floating_point() else value
            total += words.numel() if evidence.observed is None else int(evidence.observed.sum())
        return total

    def index_evidence(self, network: Network) -> dict[int, Evidence]:
        """The observations by the index of their node group.

        Args:
            network: The net of the batch.

        Returns:
            The evidence.
        """
        return {network.graph.get_group(name).index: item for name, item in self.evidence.items()}

    def map(self, fn: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with a function applied to each of its tensors.

        Args:
            fn: A function from a tensor to a tensor.

        Returns:
            The new batch.
        """
        return Batch(
            {name: fn(value) for name, value in self.x.items()},
            None if self.mask is None else {name: fn(value) for name, value in self.mask.items()},
            {name: e.map(fn) for name, e in self.evidence.items()},
            {name: fn(value) for name, value in self.given.items()},
        )

    def take(self, indices: Tensor | slice) -> Batch:
        """Select some of the sentences.

        Args:
            indices: A slice, or a tensor `[n]` of the indices of sentences.

        Returns:
            The batch of these sentences, in the order of `indices`.

        Raises:
            BNetError: An index is out of range.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(4, vocabulary=["the", "cat"], observe=bt.tpm.Categorical(2))
        >>> fitted = bt.fit(net, [("the cat", "cat the"), ("cat the", "the cat")], method=bt.MAP(steps=1))
        >>> fitted.log_likelihood(fitted.data.take(slice(1))).shape
        torch.Size([1])
        """
        expected = f"a slice, or a tensor of indices from 0 to {len(self) - 1}"
        if not isinstance(indices, slice) and not (isinstance(indices, Tensor) and indices.dim() == 1):
            raise BNetError("indices", expected=expected, actual=indices)
        try:
            return self.map(lambda value: value[indices])
        except (IndexError, TypeError, ValueError) as error:
            raise BNetError("indices", expected=expected, actual=indices) from error

    def shard(self, rank: int, world_size: int) -> Batch:
        """The shard of one process of distributed training: every `world_size`-th sentence.

        Args:
            rank: The rank of the process, from 0.
            world_size: The number of processes.

        Returns:
            The shard. If there are fewer sentences than processes, some shards are one sentence without observations,
            so that every process runs the same computation.
        """
        if rank < len(self):
            return self.take(slice(rank, None, world_size))
        first = self.take(slice(1))
        hidden = {k: Evidence(e.value, torch.zeros_like(e.value, dtype=torch.bool)) for k, e in first.evidence.items()}
        return replace(first, evidence=hidden)

    def get_present(self, spec: NodeSpec) -> Tensor | None:
        """Find the words that are present in the stack of a node group.

        Args:
            spec: The spec of the node group.

        Returns:
            Booleans `[sentence, word]`; None if all words are present.
        """
        stack = spec.group.word_stack
        return None if stack is None or self.mask is None else self.mask.get(stack)

    def parts(self, size: int) -> list[Batch]:
        """Split the batch into parts of consecutive sentences.

        Args:
            size: The maximum number of sentences of a part.

        Returns:
            The parts, in order.
        """
        if len(self) <= size:
            return [self]
        return [self.take(slice(start, start + size)) for start in range(0, len(self), size)]

    def split_by_length(self, network: Network, words: int) -> Iterator[tuple[Tensor, Batch]]:
        """Split the batch into batches whose sentences have equal lengths, without padding.

        Args:
            network: The net of the batch.
            words: The approximate number of words of each part.

        Returns:
            An iterator over pairs: the indices of the sentences, `[n]`, and their batch.
        """
        # Sentences of equal length require neither mask nor padding, so no computation is spent on padding.
        lengths = torch.stack([self._count_words(stack) for stack in self.x], 1)
        kinds, kind = lengths.unique(dim=0, return_inverse=True)
        for k, length in enumerate(kinds.tolist()):
            size = max(1, words // max(1, sum(length)))
            for indices in (kind == k).nonzero()[:, 0].split(size):
                yield indices, self.take(indices).trim(network, dict(zip(self.x, length, strict=True)))

    def _count_words(self, stack: str) -> Tensor:
        """The number of words of each sentence, `[sentence]`."""
        x = self.x[stack]
        if self.mask is None or stack not in self.mask:
            return torch.full((len(x),), x.shape[1])
        return self.mask[stack].long().sum(-1).cpu()

    def trim(self, network: Network, word_counts: Mapping[str, int]) -> Batch:
        """Remove the padding of sentences that have equal lengths.

        Args:
            network: The net of the batch.
            word_counts: The number of words of each stack.

        Returns:
            The batch without padding and without masks.
        """

        def trim_value(name: str, value: Tensor) -> Tensor:
            group = network.graph.get_group(name)
            stack = group.word_stack
            return value if stack is None else value.narrow(1 + len(group.plates), 0, word_counts[stack])

        evidence = {name: e.map(partial(trim_value, name)) for name, e in self.evidence.items()}
        x = {stack: value[:, : word_counts[stack]] for stack, value in self.x.items()}
        return Batch(x, None, evidence, {name: trim_value(name, value) for name, value in self.given.items()})

    def repeat(self, times: int) -> Batch:
        """Repeat each sentence; copies of a sentence are consecutive.

        Args:
            times: The number of copies of each sentence.

        Returns:
            The batch of `times` times as many sentences.
        """
        return self if times == 1 else self.map(lambda value: value.repeat_interleave(times, 0))

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
        """Copy the batch to a device; the copy is asynchronous.

        Args:
            device: The device.
            dtype: The floating type to which real numbers are converted; None to keep theirs.

        Returns:
            The batch on the device.
        """
        return self.map(
            lambda v: send_to_device(v.to(dtype) if dtype is not None and v.is_floating_point() else v, device)
        )

    def cast_like(self, network: Network) -> Batch:
        """Convert the real numbers of the batch to the floating type of a net.

        Args:
            network: The net.

        Returns:
            The batch in the floating type of the net.
        """
        return self.map(lambda value: value.to(network.dtype) if value.is_floating_point() else value)

    def equals(self, batch: Batch) -> bool:
        """Whether two batches have the same sentences in the same order; floating types may differ.

        Args:
            batch: The other batch.

        Returns:
            True if all tensors are equal.
        """
        first, second = (item.to(torch.device("cpu"), torch.float32).digest() for item in (self, batch))
        return first == second

    def digest(self) -> str:
        """A hash of all numbers of the batch."""
        tensors = {f"{k} value": e.value for k, e in self.evidence.items()}
        tensors |= {f"{k} seen": e.observed for k, e in self.evidence.items() if e.observed is not None}
        tensors |= {f"{k} there": value for k, value in (self.mask or {}).items()}
        tensors |= {f"{k} given": value for k, value in self.given.items()}
        return compute_digest({**{f"{k} words": value for k, value in self.x.items()}, **tensors})


def send_to_device(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, asynchronously from pinned memory if the device is a GPU."""
    pinned = value.pin_memory() if device.type == "cuda" and value.device.type == "cpu" else value
    return pinned.to(device, non_blocking=True)


def get_fill_value(value: Tensor) -> float:
    """The number that marks a missing observation: -1 for a state, NaN for a real number."""
    return float("nan") if value.is_floating_point() else UNOBSERVED


def is_observed(value: Tensor) -> Tensor:
    """The mask of observed entries; a vector is missing if any of its numbers is NaN."""
    return ~value.isnan().any(-1) if value.is_floating_point() else value != UNOBSERVED


def split_missing(value: Tensor) -> Evidence:
    """Evidence from values with -1 or NaN for missing ones; these become 0, a value that every TPM accepts."""
    observed = is_observed(value)
    if bool(observed.all()):
        return Evidence(value)
    hidden = ~observed[..., None] if value.is_floating_point() else ~observed
    return Evidence(value.masked_fill(hidden, 0), observed)


def _fill_missing(evidence: Evidence) -> Tensor:
    """The inverse of `split_missing`."""
    value, observed = evidence.value, evidence.observed
    if observed is None:
        return value
    hidden = ~observed if observed.dim() == value.dim() else ~observed[..., None]
    return value.masked_fill(hidden, get_fill_value(value))


def pad(values: Sequence[Tensor], axis: int, fill: float = 0) -> Tensor:
    """Stack the values of several sentences, with padding at the end of shorter sentences.

    Args:
        values: One tensor for each sentence; their shapes may differ in one axis only.
        axis: The axis of the words.
        fill: The value of the padding.

    Returns:
        `[sentence, ...]`.

    >>> pad([torch.ones(1), torch.ones(2)], 0).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """
    if all(value.shape == values[0].shape for value in values):
        return torch.stack(list(values))
    shape = list(values[0].shape)
    shape[axis] = max(value.shape[axis] for value in values)
    padded = values[0].new_full((len(values), *shape), fill)
    for row, value in zip(padded, values, strict=True):
        row.narrow(axis, 0, value.shape[axis]).copy_(value)
    return padded


def lengths_to_mask(lengths: Sequence[int]) -> Tensor:
    """The mask `[sentence, word]` of sentences of the given lengths: true for words, false for padding."""
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def encode_batch(network: Network, sentences: Sequence[object], pairs: Sequence[object] | None = None) -> Batch:
    """Encode sentences of different lengths by `encode_sentence`, and pad them to the longest.

    Args:
        network: The net.
        sentences: A list of at least one sentence.
        pairs: A second sentence for each sentence, which the tokenizer appends to the first.

    Returns:
        The batch, on the device of the net, with a mask for every stack.

    Raises:
        BNetError: There is no sentence, the number of pairs differs from that of sentences, or the net has no input
            node for words.
    """
    if isinstance(sentences, str) or not isinstance(sentences, Sequence) or not len(sentences):
        raise BNetError("sentences", expected="a list of at least one sentence", actual=sentences)
    is_list = isinstance(pairs, Sequence) and not isinstance(pairs, str)
    if pairs is not None and not (is_list and len(pairs) == len(sentences)):
        actual = len(pairs) if is_list else pairs
        raise BNetError("pairs", expected=f"{len(sentences)} sentences, one for each of sentences", actual=actual)
    encoded = [
        encode_sentence(network, text, pair=None if pairs is None else pairs[k]) for k, text in enumerate(sentences)
    ]
    given = {}
    for name in encoded[0].given:
        group = network.graph.get_group(name)
        given[name] = pad([e.given[name] for e in encoded], len(group.plates))
    x, mask = {}, {}
    for stack in network.graph.word_stacks:
        encoder = word_encoder(network, stack)
        if encoder is not None:
            x[stack] = given.pop(encoder.spec.group.name)
        mask[stack] = lengths_to_mask([e.word_counts[stack] for e in encoded]).to(network.device)
        if encoder is None and build_word_counter(network, stack) is not None:
            x[stack] = torch.zeros(mask[stack].shape, device=network.device)
    if len(mask) == 1 and not x:
        raise BNetError("batch: the net has no input node for words")
    return Batch(x, mask or None, {}, given)

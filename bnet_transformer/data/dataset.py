"""Read data of any form (sentences, pairs, arrays, columns, token files) as one batch, or as minibatches by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.hashing import compute_digest, derive_seed
from bnet_transformer.data.arrays import PAIR_FORMS, copy_arrays, map_tokens, read_arrays, read_windows, to_host
from bnet_transformer.data.batch import Batch, split_missing
from bnet_transformer.data.encode import EncodedSentence, encode_sentence
from bnet_transformer.data.examples import (
    Example,
    ExampleReader,
    add_row_number,
    is_dataframe,
    is_stack_pair,
    pad_examples,
    read_columns,
    read_example,
)
from bnet_transformer.data.task import Task, infer_fit_task, infer_task
from bnet_transformer.data.word_encoder import is_text_array
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError

DATA_FORMS = "a list of sentences or of pairs, an array [sentence, word], a pair of arrays, or a token file"
ObservedMode = Literal["required", "optional", "none"]
FORMS_BY_MODE: dict[ObservedMode, str] = {
    "required": PAIR_FORMS,
    "optional": "a list of sentences, a list of pairs (sentence, observations), or an array [sentence, word]",
    "none": "a list of sentences, or an array [sentence, word]",
}


@dataclass(frozen=True)
class Dataset:
    """Examples, and the minibatch of each step; each example occurs once in an epoch, in an order set by the seed.

    Args:
        task: The words and the readouts of the net.
        size: The number of examples; None if a function builds the batch of each step.
        example: A function that returns the example of an index.
        batch: The number of examples of a step.
        seed: The seed of the order of the examples.
        make_batch: A function that returns the batch of a step; None for data of a fixed size.
        full_batch: All examples as one batch, if the data are arrays; `example` is then not called.
    """

    task: Task
    size: int | None
    example: Callable[[int], Example] | None = None
    batch: int = 1
    seed: int = 0
    make_batch: Callable[[int], Batch] | None = None
    full_batch: Batch | None = None

    @property
    def epoch(self) -> int | None:
        """The number of steps of an epoch; None if a function builds the batch of each step."""
        return None if self.size is None else -(-self.size // self.batch)

    def __call__(self, step: int) -> Batch:
        """The minibatch of a step.

        Args:
            step: The number of the step, from 0. The order of the examples depends on the seed and the epoch only.

        Returns:
            The minibatch.
        """
        if self.size is None or self.epoch is None:
            assert self.make_batch is not None
            return self.make_batch(step)
        epoch, index = divmod(step, self.epoch)
        return self.take(_shuffle_indices(self.size, self.seed, epoch)[index * self.batch : (index + 1) * self.batch])

    def in_order(self) -> list[Batch]:
        """All examples once, in the order of the data, as minibatches."""
        if self.size is None:
            raise BNetError("held_out", expected=DATA_FORMS, actual="a function of the step")
        return [self.take(order) for order in torch.arange(self.size).split(self.batch)]

    def take(self, indices: Tensor, *, mask_padding: bool = False) -> Batch:
        """The examples of some indices as one batch.

        Args:
            indices: The indices of the examples, `[n]`.
            mask_padding: Whether to mask all padding; by default only padding that a word could read is masked.

        Returns:
            The batch.
        """
        if self.full_batch is not None:
            return self.full_batch.take(indices)
        assert self.example is not None
        return pad_examples(self.task, [self.example(int(k)) for k in indices], mask_padding=mask_padding)

    def digest(self) -> str:
        """A hash that identifies the data: all numbers of arrays; else the size, the first and the last example."""
        if self.size is None:
            return "a function of the step"
        if self.example is None:
            return cast(Batch, self.full_batch).digest()
        return compute_digest([self.size, self.example(0), self.example(self.size - 1)])


@lru_cache(maxsize=4)
def _shuffle_indices(size: int, seed: int, epoch: int) -> Tensor:
    """The order of the examples in an epoch."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(derive_seed(seed, "order", epoch)))


def read_batch(
    network: Network,
    data: object,
    subject: str = "data",
    *,
    observed: ObservedMode = "required",
    missing: bool = False,
    missing_option: str | None = "missing=True",
    mask_padding: bool = False,
) -> Batch:
    """Read data of any form as one batch of tensors.

    Args:
        network: The net.
        data: A list of sentences (text, words, ids, vectors; mappings from stack), a list of pairs (sentence,
            observations), a tuple (x, y) of arrays or lists, columns by name (a mapping or a DataFrame), a `Batch` or a
            `Dataset`. A tuple is always a pair; a sentence is a list.
        subject: The name of the data in messages.
        observed: Whether observations are "required", "optional" (also the next words of a net that predicts them), or
            omitted ("none").
        missing: Whether NaN in every number of a word means that the word is not observed.
        missing_option: The caller's option that sets `missing`, for the error; None if there is no such option.
        mask_padding: Whether to mask all padding; by default only padding that a word could read is masked.

    Returns:
        The batch, in the net's floating type.

    Raises:
        BNetError: The data have another form, or contain numbers that are not finite.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(4, vocabulary=["the", "cat"], observe=bt.tpm.Categorical(2))
    >>> batch = read_batch(net.network, [("the cat", "cat the"), ("cat", "the")])
    >>> batch.x[""].shape, batch.observed["y"].tolist()
    (torch.Size([2, 2]), [[1, 0], [0, -1]])
    """
    if isinstance(data, Dataset) and data.size is not None:
        data = data.take(torch.arange(data.size), mask_padding=mask_padding)
    if isinstance(data, Batch):
        return (replace(data, evidence={}) if observed == "none" else data).cast_like(network)
    task = infer_task(network)
    if not task.encoders:
        return _read_columns(network, data, subject, observed, missing, missing_option)
    data, expected = _to_rows(data, subject), FORMS_BY_MODE[observed]
    if observed == "required" or (observed == "optional" and has_observed(task, data)):
        task = infer_fit_task(network)
    elif observed == "none" or task.next_word is None or len(task.stacks) > 1:
        data, task = _drop_observed(task, data), replace(task, next_word=None)
        observed = "none"
    if isinstance(data, str | Path) or callable(data):
        raise BNetError(subject, expected=expected, actual="a function" if callable(data) else data)
    reader = ExampleReader(task, inputs_only=observed == "none", missing=missing, missing_option=missing_option)
    dataset = read_dataset(reader, copy_arrays(data, subject), subject=subject, expected=expected)
    batch = dataset.full_batch or dataset.take(torch.arange(dataset.size or 0), mask_padding=mask_padding)
    return _check_observed(batch.cast_like(network), subject)


def encode_sentences(network: Network, data: object, subject: str = "sentences") -> list[EncodedSentence]:
    """Encode sentences one by one, with the names of their words.

    Args:
        network: The net.
        data: A list or an array of sentences. Observations in the data are ignored.
        subject: The name of the data in messages.

    Raises:
        BNetError: The data or one of the sentences have another form; the message contains the number of the sentence.
    """
    rows = _drop_observed(infer_task(network), _to_rows(data, subject))
    if isinstance(rows, str) or not isinstance(rows, Sequence | Tensor | np.ndarray) or not len(rows):
        raise BNetError(subject, expected="a list of at least one sentence", actual=data)
    encoded = []
    for k, row in enumerate(rows):
        if isinstance(row, tuple) and len(row) == len(network.graph.word_stacks) > 1:
            row = dict(zip(network.graph.word_stacks, row, strict=True))
        stacks = {n: v for n, v in row.items() if n in network.graph.word_stacks} if isinstance(row, Mapping) else row
        try:
            encoded.append(encode_sentence(network, stacks))
        except BNetError as error:
            raise add_row_number(error, subject, k) from error
    return encoded


def _read_columns(
    network: Network, data: object, subject: str, observed: ObservedMode, missing: bool, missing_option: str | None
) -> Batch:
    """The batch of a net without words, from the columns of its nodes."""
    if data is None and observed == "none":
        return Batch({})
    reader = ExampleReader(infer_fit_task(network), missing=missing, missing_option=missing_option)
    given, values = read_columns(reader, data, subject)
    evidence = {} if observed == "none" else {name: split_missing(value) for name, value in values.items()}
    return _check_observed(Batch({}, None, evidence, given), subject).cast_like(network)


def read_dataset(
    reader: ExampleReader,
    data: object,
    batch: int = 1,
    seed: int = 0,
    words: int | None = None,
    subject: str = "data",
    expected: str = DATA_FORMS,
) -> Dataset:
    """Read data of any form as examples, in minibatches by step.

    Args:
        reader: The reader of one example.
        data: The forms of `read_batch`, an array `[sentence, word]`, a token stream (an array or a file), or a
            function that returns the batch of a step in any of these forms.
        batch: The number of examples of a step.
        seed: The seed of the order of the examples.
        words: The number of words of a window of a stream.
        subject: The name of the data in messages.
        expected: The forms of data that messages list.

    Returns:
        The data set. Arrays are not copied. Of a file, only the examples of a step are read.

    Raises:
        BNetError: The data have another form.
        FileError: A file is not a token file.
    """
    task = reader.task
    if isinstance(data, Dataset):
        return replace(data, batch=batch, seed=seed)
    if isinstance(data, Batch):
        return Dataset(task, len(data), None, batch, seed, full_batch=data)
    if callable(data):
        make = cast(Callable[[int], object], data)

        def fresh(step: int) -> Batch:
            dataset = read_dataset(reader, make(step), words=words, subject=subject)
            if dataset.size is None:
                raise BNetError(subject, expected=DATA_FORMS, actual="a function that returns a function")
            return dataset.take(torch.arange(dataset.size))

        return Dataset(task, None, reader, batch, seed, fresh)
    name = str(data) if isinstance(data, str | Path) else subject
    data = map_tokens(data) if isinstance(data, str | Path) else _to_rows(to_host(subject, data), subject)
    if isinstance(data, Tensor | np.ndarray) and data.ndim == 1 and data.dtype != object and not is_text_array(data):
        reader.reject_start_stop("windows of a token stream have no start or stop words")
        size, window = read_windows(task, data, words, name)
        return Dataset(task, size, window, batch, seed)
    if words is not None:
        raise BNetError("words", expected="None: only a token stream is split into windows", actual=words)
    return replace(_read_rows(reader, data, subject, expected), batch=batch, seed=seed)


def _read_rows(reader: ExampleReader, data: object, subject: str, expected: str) -> Dataset:
    """The data set of a tuple of arrays, of one array, or of a list of examples."""
    task = reader.task
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor | np.ndarray) for part in data):
        parts = data
        if len({tuple(part.shape[:1]) for part in parts} | {()}) != 2:
            shapes = [tuple(part.shape) for part in parts]
            raise BNetError(subject, expected="as many observations as sentences", actual=shapes)
        if not len(parts[0]):
            raise BNetError(subject, expected="at least one example", actual="empty arrays")

        def example(k: int) -> Example:
            return read_example(reader, k, tuple(part[k] for part in parts), subject)

        full_batch = read_arrays(reader, parts, subject)
        if full_batch is None:
            example(0)
        return Dataset(task, len(parts[0]), example, full_batch=full_batch)
    if isinstance(data, Tensor | np.ndarray) and data.ndim and len(data):
        rows = data
        return Dataset(task, len(rows), lambda k: read_example(reader, k, rows[k], subject))
    is_plain = (task.next_word is not None or reader.inputs_only) and not _is_pair_of_lists(task, data)
    data = data if is_plain else _zip_pairs(task, data, subject)
    if not isinstance(data, Sequence) or not data:
        raise BNetError(subject, expected=expected, actual=data)
    if all(isinstance(word, int) for word in data):
        raise BNetError(subject, expected=expected, actual="a list of ids", hint="Pass a single sentence as [ids]")
    read = [read_example(reader, k, row, subject) for k, row in enumerate(data)]
    return Dataset(task, len(read), read.__getitem__)


def _to_rows(data: object, subject: str) -> object:
    """Convert columns by name (a mapping, a DataFrame) to a list of mappings; return other data unchanged."""
    columns = {name: list(data[name]) for name in data.columns} if is_dataframe(data) else data
    if not isinstance(columns, Mapping):
        return data
    listed = all(isinstance(column, Sequence | Tensor | np.ndarray) and not isinstance(column, str) for column in
                 columns.values())  # fmt: skip
    lengths = {name: len(column) for name, column in columns.items()} if listed else {}
    if not lengths or len(set(lengths.values())) > 1:
        actual = lengths or data
        raise BNetError(subject, expected="columns of equal length, one for each stack and readout", actual=actual)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def has_observed(task: Task, data: object) -> bool:
    """True if data contain observations: a tuple (x, y), pairs, or mappings with other keys than the stacks."""
    if not task.readouts:
        return False
    parts = len(task.stacks) + len(task.readouts) if len(task.stacks) == 1 else 0
    if isinstance(data, Batch):
        return bool(data.evidence)
    if isinstance(data, tuple):
        return len(data) == parts or _is_pair_of_lists(task, data)
    if not isinstance(data, list) or not data:
        return False
    return all(_is_observed_row(task, row, parts) for row in data)


def _is_observed_row(task: Task, row: object, parts: int) -> bool:
    """True for a pair of a sentence and observations, or a mapping with other keys than the stacks."""
    if isinstance(row, Mapping):
        return not set(row) <= set(task.stacks)
    return is_stack_pair(row) if parts == 0 else isinstance(row, tuple) and len(row) == parts


def _is_pair_of_lists(task: Task, data: object) -> bool:
    """True for a tuple of sentences of several stacks, as mappings, and their observations."""
    is_pair = len(task.stacks) > 1 and isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], list)
    return is_pair and bool(data[0]) and all(isinstance(row, Mapping) for row in data[0])  # type: ignore[index]


def _drop_observed(task: Task, data: object) -> object:
    """The sentences of data that may contain observations; from mappings, the reader drops the observations."""
    if not has_observed(task, data):
        return data
    if isinstance(data, tuple):
        return data[0]
    return [row[0] if isinstance(row, tuple) else row for row in cast(list[Any], data)]


def _zip_pairs(task: Task, data: object, subject: str) -> object:
    """Convert a tuple `(x, y)` of lists to a list of pairs; return other data unchanged."""
    is_single = (len(task.readouts) == 1 and len(task.stacks) == 1) or _is_pair_of_lists(task, data)
    if not is_single or not isinstance(data, tuple | list) or len(data) != 2:
        return data
    is_list, arrays = isinstance(data, list), all(isinstance(part, Tensor | np.ndarray) for part in data)
    if (is_list and arrays) or (not is_list and all(isinstance(part, tuple) and len(part) == 2 for part in data)):
        kind = "list of two arrays" if is_list else "tuple of two tuples"
        actual = f"a {kind}, which is ambiguous: two pairs, or sentences and observations"
        hint = "Pass two pairs as [(sentence, observed), (sentence, observed)], or a tuple (x, y) of lists or arrays"
        raise BNetError(subject, expected="a list of pairs, or a tuple (x, y)", actual=actual, hint=hint)
    if is_list or any(isinstance(part, Mapping | Example) for part in data):
        return data
    x, y = data
    if any(isinstance(part, str) or not isinstance(part, Sequence | Tensor | np.ndarray) for part in data):
        raise BNetError(subject, expected=PAIR_FORMS, actual=data, hint="Pass a single pair as [(sentence, observed)]")
    if len(x) != len(y):
        raise BNetError(subject, expected="as many observations as sentences", actual=f"{len(x)} and {len(y)}")
    return list(zip(x, y, strict=True))


def _check_observed(batch: Batch, subject: str) -> Batch:
    """Raise an error if a readout has no observation in the data."""
    for name, evidence in batch.evidence.items():
        if evidence.observed is not None and not bool(evidence.observed.any()):
            raise BNetError(f"{subject}: no node of {name} is observed")
    return batch

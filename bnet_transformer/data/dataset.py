"""Data of any form: sentences, pairs, arrays, columns, files of tokens; all at once, or minibatches by step."""

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
    pad_examples,
    read_columns,
    read_example,
)
from bnet_transformer.data.task import Task, infer_fit_task, infer_task
from bnet_transformer.data.word_encoder import is_text_array
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError

DATA_FORMS = "a list of sentences or of pairs, an array [sentence, word], a pair of arrays, a file of tokens"
ObservedMode = Literal["required", "optional", "none"]
FORMS_BY_MODE: dict[ObservedMode, str] = {
    "required": PAIR_FORMS,
    "optional": "a list of sentences, or of pairs of them and what is observed; an array [sentence, word]",
    "none": "a list of sentences, or an array of them",
}


@dataclass(frozen=True)
class Dataset:
    """Examples, and minibatches of them by step: reproducible by a seed, each example once in an epoch.

    Args:
        task: the words and the readouts of the net.
        size: the number of examples; None if a function makes a batch for each step.
        example: the function from an index to its example.
        batch: the number of examples of a step.
        seed: the seed of the order of the examples.
        make_batch: the function from a step to its batch, if there is one.
        full_batch: all examples as one batch, if they came as arrays; `example` is then not called.
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
        """The number of steps of an epoch; None if a function makes a batch for each step."""
        return None if self.size is None else -(-self.size // self.batch)

    def __call__(self, step: int) -> Batch:
        """The minibatch of a step, counted from 0; its order depends on the seed and the epoch only."""
        if self.size is None or self.epoch is None:
            assert self.make_batch is not None
            return self.make_batch(step)
        epoch, index = divmod(step, self.epoch)
        return self.take(_shuffle_indices(self.size, self.seed, epoch)[index * self.batch : (index + 1) * self.batch])

    def in_order(self) -> list[Batch]:
        """All examples once, in their given order, in minibatches."""
        if self.size is None:
            raise BNetError("held_out", expected=DATA_FORMS, actual="a function of the step")
        return [self.take(order) for order in torch.arange(self.size).split(self.batch)]

    def take(self, indices: Tensor, *, mask_padding: bool = False) -> Batch:
        """The examples at some indices as one batch; see `pad_examples`."""
        if self.full_batch is not None:
            return self.full_batch.take(indices)
        assert self.example is not None
        return pad_examples(self.task, [self.example(int(k)) for k in indices], mask_padding=mask_padding)

    def digest(self) -> str:
        """A hash that identifies the data: their number, the first and the last example; of arrays, every number."""
        if self.size is None:
            return "a function of the step"
        if self.example is None:
            return cast(Batch, self.full_batch).digest()
        return compute_digest([self.size, self.example(0), self.example(self.size - 1)])


@lru_cache(maxsize=4)
def _shuffle_indices(size: int, seed: int, epoch: int) -> Tensor:
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
        network: the net.
        data: a list of sentences (text, words, ids, vectors; mappings from stack), a list of pairs (sentence,
            observed), a tuple (x, y) of arrays or lists, columns by name (a mapping or a DataFrame), or a `Batch` or a
            `Dataset`, which are used as they are. A tuple is a pair; a sentence is a list.
        subject: the name of the data in messages.
        observed: whether observations are "required", "optional" (also the next words of a net that predicts them), or
            left out ("none").
        missing: whether NaN in every number of a word means that the word was not observed.
        missing_option: how the caller turns `missing` on, for the error; None where there is no such option.
        mask_padding: whether all padding is masked; by default only where a word could read it.

    Returns:
        The batch, in the net's floating type.

    Raises:
        BNetError: where data are of another form, or have numbers that are not finite.

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
        network: the net.
        data: a list or an array of sentences; observations that come with them are left out.
        subject: the name of the data in messages.

    Raises:
        BNetError: where data are of another form, or a sentence is; the message has its number.
    """
    rows = _drop_observed(infer_task(network), _to_rows(data, subject))
    if isinstance(rows, str) or not isinstance(rows, Sequence | Tensor | np.ndarray) or not len(rows):
        raise BNetError(subject, expected="a list of sentences, at least one", actual=data)
    encoded = []
    for k, row in enumerate(rows):
        stacks = {n: v for n, v in row.items() if n in network.graph.word_stacks} if isinstance(row, Mapping) else row
        try:
            encoded.append(encode_sentence(network, stacks))
        except BNetError as error:
            raise add_row_number(error, subject, k) from error
    return encoded


def _read_columns(
    network: Network, data: object, subject: str, observed: ObservedMode, missing: bool, missing_option: str | None
) -> Batch:
    """The batch of a net without words: columns of its nodes; None where it has no inputs."""
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
        reader: the reader of one example.
        data: as for `read_batch`; or an array `[sentence, word]`, a stream of tokens (an array or a file), or a
            function from the step to any of these, which is one batch.
        batch: the number of examples of a step.
        seed: the seed of the order of the examples.
        words: the number of words of a window of a stream.
        subject: the name of the data in messages.
        expected: the forms that messages name.

    Returns:
        The data set. Arrays are not copied: of a file, only the examples of a step are read.

    Raises:
        BNetError: where data are of another form.
        FileError: if a file is not a file of tokens.
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
        reader.reject_start_stop("a stream is cut into windows as it is")
        size, window = read_windows(task, data, words, name)
        return Dataset(task, size, window, batch, seed)
    if words is not None:
        raise BNetError("words", expected="None: only a stream of tokens is cut in windows", actual=words)
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
            raise BNetError(subject, expected="at least one example", actual="arrays of none")

        def example(k: int) -> Example:
            return read_example(reader, k, tuple(part[k] for part in parts), subject)

        full_batch = read_arrays(reader, parts, subject)
        if full_batch is None:
            example(0)
        return Dataset(task, len(parts[0]), example, full_batch=full_batch)
    if isinstance(data, Tensor | np.ndarray) and data.ndim and len(data):
        rows = data
        return Dataset(task, len(rows), lambda k: read_example(reader, k, rows[k], subject))
    data = data if task.next_word is not None or reader.inputs_only else _zip_pairs(task, data, subject)
    if not isinstance(data, Sequence) or not data:
        raise BNetError(subject, expected=expected, actual=data)
    if all(isinstance(word, int) for word in data):
        raise BNetError(subject, expected=expected, actual="a list of ids", allowed="[ids], for a single sentence")
    read = [read_example(reader, k, row, subject) for k, row in enumerate(data)]
    return Dataset(task, len(read), read.__getitem__)


def _to_rows(data: object, subject: str) -> object:
    """Columns by name (a mapping, a DataFrame) as a list of mappings; other data as they are."""
    columns = {name: list(data[name]) for name in data.columns} if is_dataframe(data) else data
    if not isinstance(columns, Mapping):
        return data
    listed = all(isinstance(column, Sequence | Tensor | np.ndarray) and not isinstance(column, str) for column in
                 columns.values())  # fmt: skip
    lengths = {name: len(column) for name, column in columns.items()} if listed else {}
    if not lengths or len(set(lengths.values())) > 1:
        actual = lengths or data
        raise BNetError(subject, expected="columns of one length, a list for each stack and readout", actual=actual)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def has_observed(task: Task, data: object) -> bool:
    """True for data with observations: a tuple (x, y), pairs, or mappings with more keys than the stacks."""
    if not task.readouts:
        return False
    parts = len(task.stacks) + len(task.readouts) if len(task.stacks) == 1 else 0
    if isinstance(data, Batch):
        return bool(data.evidence)
    if isinstance(data, tuple):
        return len(data) == parts
    if not isinstance(data, list) or not data:
        return False
    return all(not set(row) <= set(task.stacks) if isinstance(row, Mapping) else
               isinstance(row, tuple) and len(row) == parts for row in data)  # fmt: skip


def _drop_observed(task: Task, data: object) -> object:
    """The sentences of data that may have observations; of mappings the reader drops them."""
    if not has_observed(task, data):
        return data
    if isinstance(data, tuple):
        return data[0]
    return [row[0] if isinstance(row, tuple) else row for row in cast(list[Any], data)]


def _zip_pairs(task: Task, data: object, subject: str) -> object:
    """A tuple `(x, y)` of lists as a list of pairs; other data as they are."""
    is_single = len(task.readouts) == 1 and len(task.stacks) == 1
    if not is_single or not isinstance(data, tuple | list) or len(data) != 2:
        return data
    is_list, arrays = isinstance(data, list), all(isinstance(part, Tensor | np.ndarray) for part in data)
    if (is_list and arrays) or (not is_list and all(isinstance(part, tuple) and len(part) == 2 for part in data)):
        actual = "what could be two pairs, and could be sentences and what is observed of them"
        allowed = "[(sentence, observed), (sentence, observed)], two pairs; (x, y), a tuple of two arrays or lists"
        raise BNetError(subject, expected="a list of pairs, or a tuple (x, y)", actual=actual, allowed=allowed)
    if is_list or any(isinstance(part, Mapping | Example) for part in data):
        return data
    x, y = data
    if any(isinstance(part, str) or not isinstance(part, Sequence | Tensor | np.ndarray) for part in data):
        raise BNetError(subject, expected=PAIR_FORMS, actual=data, allowed="[(sentence, observed)] for a single one")
    if len(x) != len(y):
        raise BNetError(subject, expected="as many observations as sentences", actual=f"{len(x)} and {len(y)}")
    return list(zip(x, y, strict=True))


def _check_observed(batch: Batch, subject: str) -> Batch:
    """Refuse data in which nothing is observed of a readout."""
    for name, evidence in batch.evidence.items():
        if evidence.observed is not None and not bool(evidence.observed.any()):
            raise BNetError(subject, expected=f"something observed of {name}", actual="nothing")
    return batch

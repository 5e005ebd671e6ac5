"""Arrays and streams of tokens as data: whole arrays are checked once, not row by row; a stream is cut into windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.data.batch import Batch, split_missing
from bnet_transformer.data.examples import Example, ExampleReader, read_example
from bnet_transformer.data.task import Task
from bnet_transformer.data.word_encoder import to_integers
from bnet_transformer.errors import BNetError, FileError
from bnet_transformer.tpm.arrays import copy_to_tensor, is_dense

PAIR_FORMS = "pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists"


def to_host(subject: str, data: object) -> object:
    """Arrays where minibatches are made and looked at; other data as they are."""
    if isinstance(data, tuple) and all(isinstance(part, Tensor) for part in data):
        return tuple(to_host(subject, part) for part in data)
    if not isinstance(data, Tensor):
        return data
    if data.is_meta or not is_dense(data):
        raise BNetError(subject, expected="arrays with a number in each place", actual=data)
    return data.cpu()


def copy_arrays(data: object, subject: str) -> object:
    """A pair of arrays of numbers as tensors that share no memory with them; other data as they are."""
    if not isinstance(data, tuple) or not all(
        isinstance(part, Tensor) or (isinstance(part, np.ndarray) and part.dtype.kind not in "OU") for part in data
    ):
        return data
    try:
        return tuple(copy_to_tensor(part) for part in data)
    except (TypeError, ValueError) as problem:
        raise BNetError(subject, expected=PAIR_FORMS, actual=str(problem)) from problem


def read_arrays(reader: ExampleReader, parts: Sequence[Tensor | np.ndarray], subject: str) -> Batch | None:
    """Words and what is observed as one batch that shares their memory, without a look at each example.

    All rows of an array have one form, so that of one is read by the reader: the first row that has a number which no
    example may have, for its error, or else the first. None for data that need a look at each: of a file, whose
    examples stay there until they are wanted, and of images, whose words are patches.
    """
    task = reader.task
    names = [*task.stacks, *(readout.group.name for readout in task.readouts)]
    if len(parts) > len(names) or not all(map(_is_in_memory, parts)):
        return None
    tensors = [part.detach() if isinstance(part, Tensor) else torch.from_numpy(part) for part in parts]
    states = [
        *(encoder.states for encoder in task.encoders.values()),
        *(readout.tpm.states for readout in task.readouts),
    ]
    order = zip(names, tensors, states, strict=False)  # the words that follow are no part of their own
    invalid = [_find_invalid_row(reader, value, top, is_words=name in task.encoders) for name, value, top in order]
    row = min((k for k in invalid if k is not None), default=0)
    example = read_example(reader, row, tuple(value[row] for value in tensors), subject)
    forms = [*example.words.values(), *example.observed.values()]
    if len(task.stacks) > 1 or len(parts) < len(names):
        return None
    if any(value.shape[1:] != form.shape for value, form in zip(tensors, forms, strict=True)):
        return None
    values = [v if v.is_floating_point() else v.to(form.dtype) for v, form in zip(tensors, forms, strict=True)]
    observed = {name: split_missing(value) for name, value in zip(names[1:], values[1:], strict=True)}
    return Batch({names[0]: values[0]}, None, observed)


def _find_invalid_row(reader: ExampleReader, value: Tensor, states: int | None, *, is_words: bool) -> int | None:
    """The first row with a number that no example may have; None where all are sound, or no number can be told."""
    if value.is_floating_point():
        invalid = ~value.isfinite() if is_words else reader.is_invalid(value)
    elif states is None or value.dtype == torch.bool or value.is_complex():
        return None
    else:
        invalid = (value < (0 if is_words else -1)) | (value >= states)
    rows = invalid.reshape(len(invalid), -1).any(1).nonzero()[:1]
    return int(rows[0]) if len(rows) else None


def _is_in_memory(array: Tensor | np.ndarray) -> bool:
    """True for numbers in memory that torch can look at as they lie."""
    if isinstance(array, Tensor):
        return True
    known = array.dtype in (np.float32, np.float64, np.int64)
    return known and array.flags.writeable and not isinstance(array, np.memmap)


def map_tokens(path: str | Path) -> np.ndarray:
    """Map a stream of tokens on disk into memory: `.npy`, or `.bin` of uint16.

    Raises:
        FileError: for a file of another kind.
    """
    name, expected = str(path), "a file of tokens: .npy, or .bin of uint16"
    if Path(path).suffix not in (".npy", ".bin"):
        received = f"the suffix {Path(path).suffix!r}"
        raise FileError(name, expected=expected, actual=received, allowed="a sentence is told in a list")
    try:
        if Path(path).suffix == ".npy":
            tokens: np.ndarray = np.lib.format.open_memmap(path, mode="r")  # an array alone: no pickle, no archive
        else:
            tokens = np.memmap(path, dtype=np.uint16, mode="r")
    except Exception as error:  # numpy reads the header by Python's own tokenizer, which fails in ways of its own
        raise FileError(name, expected=expected, actual=str(error) or type(error).__name__) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise FileError(name, expected=expected, actual=f"{tokens.dtype} of shape {tokens.shape}")
    return tokens


def read_windows(
    task: Task, stream: Tensor | np.ndarray, words: int | None, name: str
) -> tuple[int, Callable[[int], Example]]:
    """How many windows of `words` words and the one after them a stream has, and the function that reads one; the last
    window has what is left."""
    stack = task.next_word
    if stack is None or len(task.stacks) > 1:
        expected = "sentences: a stream is for a net of one stack that tells the next word"
        raise BNetError("data", expected=expected, actual=f"a stream of {len(stream)} tokens")
    if words is None:
        raise BNetError("words", expected="how many words a window of the stream has", actual="None")
    encoder, readout = task.encoders[stack], task.readouts[0].group.name
    states = encoder.states or 0
    encoder.check_length(words)
    if len(stream) < 2:
        raise BNetError(name, expected="at least 2 tokens, the second to be told by the first", actual=len(stream))
    if encoder.exact_length is not None and (len(stream) - 1) % words:
        received = f"{len(stream)} tokens: the last window would have {(len(stream) - 1) % words} words"
        raise BNetError(
            name, expected=f"windows of {words} words, for the mask is a table for so many", actual=received
        )

    def window(k: int) -> Example:
        ids = to_integers(name, stream[k * words : (k + 1) * words + 1])
        invalid = torch.nonzero((ids < 0) | (ids >= states)).flatten().tolist()
        if invalid:
            subject, received = f"{name}, token {k * words + invalid[0]} (window {k})", int(ids[invalid[0]])
            raise BNetError(subject, expected=f"ids from 0 to {states - 1}", actual=received)
        return Example({stack: ids[:-1]}, {readout: ids[1:]})

    return -(-(len(stream) - 1) // words), window

"""Arrays and token streams as data: whole arrays are checked at once, and a stream is split into windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import copy_to_tensor, is_dense
from bnet_transformer.data.batch import Batch, split_missing
from bnet_transformer.data.examples import Example, ExampleReader, read_example
from bnet_transformer.data.task import Task
from bnet_transformer.data.word_encoder import to_integers
from bnet_transformer.errors import BNetError, FileError

PAIR_FORMS = "pairs (sentence, observations): a list of pairs, or a tuple (x, y) of arrays or lists"


def to_host(subject: str, data: object) -> object:
    """Copy tensors to the CPU, where minibatches are built and checked; other data are returned unchanged."""
    if isinstance(data, tuple) and all(isinstance(part, Tensor) for part in data):
        return tuple(to_host(subject, part) for part in data)
    if not isinstance(data, Tensor):
        return data
    if data.is_meta or not is_dense(data):
        raise BNetError(subject, expected="dense arrays of numbers", actual=data)
    return data.cpu()


def copy_arrays(data: object, subject: str) -> object:
    """Copy a tuple of numeric arrays to tensors; other data are returned unchanged."""
    if not isinstance(data, tuple) or not all(
        isinstance(part, Tensor) or (isinstance(part, np.ndarray) and part.dtype.kind not in "OU") for part in data
    ):
        return data
    try:
        return tuple(copy_to_tensor(part) for part in data)
    except (TypeError, ValueError) as problem:
        raise BNetError(subject, expected=PAIR_FORMS, actual=str(problem)) from problem


def read_arrays(reader: ExampleReader, parts: Sequence[Tensor | np.ndarray], subject: str) -> Batch | None:
    """Read arrays of words and observations as one batch that shares their memory.

    All rows of an array have the same shape and type, so the reader checks one row only: the first row with an invalid
    number, so that the error names it, or else row 0.

    Returns:
        The batch. None for data that must be read row by row: memory-mapped files, and images, whose words are patches.
    """
    task = reader.task
    names = [*task.stacks, *(readout.group.name for readout in task.readouts)]
    if len(parts) > len(names) or not all(map(_is_in_memory, parts)):
        return None
    tensors = [part.detach() if isinstance(part, Tensor) else torch.from_numpy(part) for part in parts]
    states = [encoder.states for encoder in task.encoders.values()]
    states += [readout.tpm.states for readout in task.readouts]
    order = zip(names, tensors, states, strict=False)  # next words have no separate array
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
    """The index of the first row with an invalid number; None if all are valid, or if the type is invalid."""
    if value.is_floating_point():
        invalid = ~value.isfinite() if is_words else reader.is_invalid(value)
    elif states is None or value.dtype == torch.bool or value.is_complex():
        return None
    else:
        invalid = (value < (0 if is_words else -1)) | (value >= states)
    rows = invalid.reshape(len(invalid), -1).any(1).nonzero()[:1]
    return int(rows[0]) if len(rows) else None


def _is_in_memory(array: Tensor | np.ndarray) -> bool:
    """True for numbers in memory that torch can use without a copy."""
    if isinstance(array, Tensor):
        return True
    known = array.dtype in (np.float32, np.float64, np.int64)
    return known and array.flags.writeable and not isinstance(array, np.memmap)


def map_tokens(path: str | Path) -> np.ndarray:
    """Map a token stream on disk into memory: a `.npy` file, or a `.bin` file of uint16 numbers.

    Raises:
        FileError: The file has another format.
    """
    name, expected = str(path), "a file of tokens: .npy, or .bin of uint16"
    if Path(path).suffix not in (".npy", ".bin"):
        actual = f"the suffix {Path(path).suffix!r}"
        raise FileError(name, expected=expected, actual=actual, hint="Pass a single sentence as a list of one")
    try:
        if Path(path).suffix == ".npy":
            tokens: np.ndarray = np.lib.format.open_memmap(
                path, mode="r"
            )  # reads `.npy` only, neither pickles nor archives
        else:
            tokens = np.memmap(path, dtype=np.uint16, mode="r")
    except Exception as error:  # numpy parses the header with Python's tokenizer, which may raise anything
        raise FileError(name, expected=expected, actual=str(error) or type(error).__name__) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise FileError(name, expected=expected, actual=f"{tokens.dtype} of shape {tokens.shape}")
    return tokens


def read_windows(
    task: Task, stream: Tensor | np.ndarray, words: int | None, name: str
) -> tuple[int, Callable[[int], Example]]:
    """Split a token stream into windows of `words` words; the targets of a window are the next words.

    Consecutive windows share one token: the last target of a window is the first input of the next window. The last
    window may be shorter.

    Returns:
        The number of windows, and a function that returns the example of a window, given its index.
    """
    stack = task.next_word
    if stack is None or len(task.stacks) > 1:
        expected = "sentences: only a net of one stack that predicts the next word takes a token stream"
        raise BNetError("data", expected=expected, actual=f"a stream of {len(stream)} tokens")
    if words is None:
        raise BNetError("words: a token stream requires the number of words of a window", hint="Pass words=")
    encoder, readout = task.encoders[stack], task.readouts[0].group.name
    states = encoder.states or 0
    encoder.check_length(words)
    if len(stream) < 2:
        raise BNetError(name, expected="at least 2 tokens, to predict the second from the first", actual=len(stream))
    if encoder.exact_length is not None and (len(stream) - 1) % words:
        actual = f"{len(stream)} tokens: the last window would have {(len(stream) - 1) % words} words"
        expected = f"windows of exactly {words} words, the size of the net's mask table"
        raise BNetError(name, expected=expected, actual=actual)

    def window(k: int) -> Example:
        ids = to_integers(name, stream[k * words : (k + 1) * words + 1])
        invalid = torch.nonzero((ids < 0) | (ids >= states)).flatten().tolist()
        if invalid:
            subject, actual = f"{name}, token {k * words + invalid[0]} (window {k})", int(ids[invalid[0]])
            raise BNetError(subject, expected=f"ids from 0 to {states - 1}", actual=actual)
        return Example({stack: ids[:-1]}, {readout: ids[1:]})

    return -(-(len(stream) - 1) // words), window

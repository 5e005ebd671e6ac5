"""Whole arrays as data: looked at once, and not example by example; streams of tokens on disk, cut into windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.data.batch import Batch, split_gaps
from bnet_transformer.data.examples import Example, ExampleReader, read_example
from bnet_transformer.data.task import Task
from bnet_transformer.data.words import to_integers
from bnet_transformer.errors import BNetError, FileError
from bnet_transformer.tpm.arrays import is_plain, own_tensor

PAIRS = "pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists"


def to_host(what: str, data: object) -> object:
    """Arrays where minibatches are made and looked at; other data as they are."""
    if isinstance(data, tuple) and all(isinstance(part, Tensor) for part in data):
        return tuple(to_host(what, part) for part in data)
    if not isinstance(data, Tensor):
        return data
    if data.is_meta or not is_plain(data):
        raise BNetError(what, expected="arrays with a number in each place", got=data)
    return data.cpu()


def own_arrays(data: object, what: str) -> object:
    """A pair of arrays of numbers as tensors that share no memory with them; other data as they are."""
    if not isinstance(data, tuple) or not all(isinstance(part, Tensor | np.ndarray) for part in data):
        return data
    if any(isinstance(part, np.ndarray) and part.dtype.kind in "OU" for part in data):
        return data
    try:
        return tuple(own_tensor(part) for part in data)
    except (TypeError, ValueError) as problem:
        raise BNetError(what, expected=PAIRS, got=str(problem)) from problem


def read_arrays(reader: ExampleReader, parts: Sequence[Tensor | np.ndarray], what: str) -> Batch | None:
    """Words and what is observed as one batch that shares their memory, without a look at each example.

    All rows of an array have one form, so that of one is read by the reader: the first row that has a number which no
    example may have, for its error, or else the first. None for data that need a look at each: of a file, whose
    examples stay there until they are wanted, and of images, whose words are patches.
    """
    task = reader.task
    names = [*task.stacks, *(readout.family.name for readout in task.readouts)]
    if len(parts) > len(names) or not all(map(_is_in_memory, parts)):
        return None
    tensors = [part.detach() if isinstance(part, Tensor) else torch.from_numpy(part) for part in parts]
    states = [*(of.states for of in task.words.values()), *(readout.tpm.states for readout in task.readouts)]
    order = zip(names, tensors, states, strict=False)  # the words that follow are no part of their own
    bad = [_bad_row(reader, value, top, is_words=name in task.words) for name, value, top in order]
    row = min((k for k in bad if k is not None), default=0)
    example = read_example(reader, row, tuple(value[row] for value in tensors), what)
    forms = [*example.words.values(), *example.observed.values()]
    if len(task.stacks) > 1 or len(parts) < len(names):
        return None
    if any(value.shape[1:] != form.shape for value, form in zip(tensors, forms, strict=True)):
        return None
    whole = [v if v.is_floating_point() else v.to(form.dtype) for v, form in zip(tensors, forms, strict=True)]
    observed = {name: split_gaps(value) for name, value in zip(names[1:], whole[1:], strict=True)}
    return Batch({names[0]: whole[0]}, None, observed)


def _bad_row(reader: ExampleReader, value: Tensor, states: int | None, *, is_words: bool) -> int | None:
    """The first row with a number that no example may have; None where all are sound, or no number can be told."""
    if value.is_floating_point():
        bad = ~value.isfinite() if is_words else reader.is_bad(value)
    elif states is None or value.dtype == torch.bool or value.is_complex():
        return None
    else:
        bad = (value < (0 if is_words else -1)) | (value >= states)
    rows = bad.reshape(len(bad), -1).any(1).nonzero()[:1]
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
    name, wanted = str(path), "a file of tokens: .npy, or .bin of uint16"
    if Path(path).suffix not in (".npy", ".bin"):
        got = f"the suffix {Path(path).suffix!r}"
        raise FileError(name, expected=wanted, got=got, allowed="a sentence is told in a list")
    try:
        if Path(path).suffix == ".npy":
            tokens: np.ndarray = np.lib.format.open_memmap(path, mode="r")  # an array alone: no pickle, no archive
        else:
            tokens = np.memmap(path, dtype=np.uint16, mode="r")
    except Exception as error:  # numpy reads the header by Python's own tokenizer, which fails in ways of its own
        raise FileError(name, expected=wanted, got=str(error) or type(error).__name__) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise FileError(name, expected=wanted, got=f"{tokens.dtype} of shape {tokens.shape}")
    return tokens


def read_windows(
    task: Task, stream: Tensor | np.ndarray, words: int | None, name: str
) -> tuple[int, Callable[[int], Example]]:
    """How many windows of `words` words and the one after them a stream has, and the function that reads one; the last
    window has what is left."""
    stack = task.next_word
    if stack is None or len(task.stacks) > 1:
        wanted = "sentences: a stream is for a net of one stack that tells the next word"
        raise BNetError("data", expected=wanted, got=f"a stream of {len(stream)} tokens")
    if words is None:
        raise BNetError("words", expected="how many words a window of the stream has", got="None")
    of, readout = task.words[stack], task.readouts[0].family.name
    states = of.states or 0
    of.check_length(words)
    if len(stream) < 2:
        raise BNetError(name, expected="at least 2 tokens, the second to be told by the first", got=len(stream))
    if of.exact is not None and (len(stream) - 1) % words:
        got = f"{len(stream)} tokens: the last window would have {(len(stream) - 1) % words} words"
        raise BNetError(name, expected=f"windows of {words} words, for the mask is a table for so many", got=got)

    def window(k: int) -> Example:
        ids = to_integers(name, stream[k * words : (k + 1) * words + 1])
        strange = torch.nonzero((ids < 0) | (ids >= states)).flatten().tolist()
        if strange:
            what, got = f"{name}, token {k * words + strange[0]} (window {k})", int(ids[strange[0]])
            raise BNetError(what, expected=f"ids from 0 to {states - 1}", got=got)
        return Example({stack: ids[:-1]}, {readout: ids[1:]})

    return -(-(len(stream) - 1) // words), window

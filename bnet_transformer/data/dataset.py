"""Read data of any form (sentences, pairs, arrays, columns, token files) as one batch, or as minibatches by step."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.files import compute_digest, derive_seed
from bnet_transformer._core.tensors import copy_to_tensor, is_dense, to_numpy
from bnet_transformer._core.tokens import Labels, as_labels
from bnet_transformer.data.batch import (
    UNOBSERVED,
    Batch,
    Evidence,
    Task,
    get_fill_value,
    infer_fit_task,
    infer_task,
    lengths_to_mask,
    pad,
    split_missing,
)
from bnet_transformer.data.checks import check_batch, check_mask, check_masked_reads, index_inputs
from bnet_transformer.data.encode import (
    EncodedSentence,
    WordCounter,
    encode_sentence,
    is_text_array,
    to_integers,
    to_reals,
)
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, FileError, unknown_name_error

# --------------------------------------------------------------------------------------------------------------------
# Read one example of a data set (words and observations), or the columns of a net without words, one for each node.


COLUMN_FORMS = (
    "observations of the nodes of a net without words: a list of mappings, one for each sentence, a DataFrame, "
    "or a mapping from node to an array [sentence, ...]"
)


@dataclass(frozen=True)
class Example:
    """One sentence: the words of each stack and the observations of each readout."""

    words: Mapping[str, Tensor]
    observed: Mapping[str, Tensor]


@dataclass(frozen=True)
class ExampleReader:
    """Reads one example: a sentence, a pair, or a mapping from stack and readout.

    Args:
        task: The words and the readouts of the net.
        start: A word before each sentence whose next words are predicted; None for no such word.
        stop: A word after each sentence whose next words are predicted; None for no such word.
        inputs_only: Whether nothing is observed; readouts in a mapping are then ignored.
        missing: Whether NaN in all numbers of a word means that the word is not observed; with None, one NaN suffices.
        missing_option: The caller's option that sets `missing`, for the error.
    """

    task: Task
    start: object = None
    stop: object = None
    inputs_only: bool = False
    missing: bool | None = None
    missing_option: str | None = None

    def __post_init__(self) -> None:
        if self.task.next_word is None:
            self.reject_start_stop("the net does not predict next words")

    def reject_start_stop(self, reason: str) -> None:
        """Raise an error if there are start or stop words, which would have no effect."""
        for option, word in (("start", self.start), ("stop", self.stop)):
            if word is not None:
                raise BNetError(option, expected=f"None: {reason}", actual=word)

    def __call__(self, row: object) -> Example:
        """Read an example.

        Args:
            row: A sentence, if nothing or the next words are observed; a tuple of the words of each stack, or of a
                sentence (with several stacks a mapping from stack) and its observations; or a mapping from stack and
                readout.

        Raises:
            BNetError: A part is missing or has another form.
            UnknownNameError: The net has no such part, word or label.
        """
        task = self.task
        if isinstance(row, Example):
            return row
        if isinstance(row, Mapping):
            return self._read_parts(row)
        names = list(task.stacks)
        if len(names) == 1 and task.next_word is None and not self.inputs_only:
            names += [readout.group.name for readout in task.readouts] or ["observed"]
        if len(names) == 1:
            return self._read_parts({names[0]: row})
        if len(task.stacks) > 1 and is_stack_pair(row):
            pair: Any = row
            return self._read_parts({**pair[0], **self._name_observed(pair[1])})
        if not isinstance(row, tuple | list) or len(row) != len(names):
            raise self._example_error(row, [name or "sentence" for name in names])
        return self._read_parts(dict(zip(names, row, strict=True)))

    def _name_observed(self, observed: object) -> Mapping[str, object]:
        """The observations of a pair by readout."""
        names = [readout.group.name for readout in self.task.readouts] or ["observed"]
        if isinstance(observed, Mapping):
            return observed
        if len(names) != 1:
            expected = f"a mapping from readout ({', '.join(names)})"
            raise BNetError("observations", expected=expected, actual=observed)
        return {names[0]: observed}

    def _example_error(self, row: object, names: Sequence[str]) -> BNetError:
        """The error for an invalid example; for a series of real-valued words it names the function to use."""
        expected, hint = f"({', '.join(names)})", None
        if isinstance(row, Tensor | np.ndarray):
            stacks = [readout.group.word_stack for readout in self.task.readouts]
            is_series = all(encoder.states is None for encoder in self.task.encoders.values())
            if stacks == list(self.task.stacks) and is_series:
                hint = "Use training.windows(series, words, ahead) to make pairs of a series"
            row = f"an array of shape {tuple(row.shape)}"
        elif isinstance(row, tuple) and any(isinstance(part, Tensor | np.ndarray) for part in row):
            row = f"{len(row)} parts"
        expected = f"a pair {expected}" if len(names) == 2 else expected
        return BNetError("example", expected=expected, actual=row, hint=hint)

    def _read_parts(self, row: Mapping[str, object]) -> Example:
        """Read an example from a mapping from stack and readout."""
        task, words, observed = self.task, {}, {}
        readouts = {readout.group.name: readout for readout in task.readouts}
        if self.inputs_only:
            row = {name: part for name, part in row.items() if name in task.encoders or name not in readouts}
        for name in row:
            if name not in task.encoders and name not in readouts and task.readouts:
                raise unknown_name_error("example", name, [*task.encoders, *readouts])
        for stack, encoder in task.encoders.items():
            if stack in row:
                words[stack] = encoder.encode(row[stack])
                continue
            counts = [name for name, m in readouts.items() if m.group.word_stack == stack and name in row]
            if not isinstance(encoder, WordCounter) or not counts:
                raise BNetError("example", expected=f"words of stack {stack!r}", actual=f"only {', '.join(row)}")
            words[stack] = torch.zeros(len(self.encode_observed(readouts[counts[0]], row[counts[0]])))
        next_word = task.next_word
        expected = () if self.inputs_only else readouts or [name for name in row if name not in task.encoders]
        for name in expected:
            if name in row:
                observed[name] = self.encode_observed(readouts.get(name), row[name])
            elif next_word is not None:
                words[next_word], observed[name] = self._shift_words(next_word, words[next_word])
            else:
                raise BNetError("example", expected=f"observations of {name}", actual=f"only {', '.join(row)}")
        for stack, encoder in task.encoders.items():
            encoder.check_length(len(words[stack]))
        for name, value in observed.items():
            self.check_observed(readouts.get(name), value, words)
        return Example(words, observed)

    def _shift_words(self, stack: str, words: Tensor) -> tuple[Tensor, Tensor]:
        """All words except the last, and the next word of each."""
        encoder = self.task.encoders[stack]
        ends = [None if word is None else encoder.encode_word(word) for word in (self.start, self.stop)]
        words = torch.cat([part for part in (ends[0], words, ends[1]) if part is not None])
        if len(words) < 2:
            raise BNetError("example", expected="at least 2 words, to predict the second from the first", actual="1")
        return words[:-1], words[1:]

    def encode_observed(self, readout: NodeSpec | None, value: object) -> Tensor:
        """Encode the observations of a readout as a tensor."""
        if readout is None:
            array = to_numpy(value) if isinstance(value, Tensor) else np.asarray(value)
            return (to_reals if array.dtype.kind == "f" else to_integers)("observed", value)
        group = readout.group
        if readout.tpm.kind == "continuous":
            return to_reals(group.name, value)
        encoder = self.task.encoders[group.word_stack] if group.word_stack is not None else None
        labels = self._get_labels(readout)
        value = value.tolist() if is_text_array(value) else value
        if isinstance(value, str) and encoder is not None:
            value = value.split() if labels is not encoder.vocabulary else encoder.encode(value)
        if isinstance(value, str | list | tuple):
            value = _labels_to_states(group.name, labels, value)
        return to_integers(group.name, value)

    def is_invalid(self, value: Tensor) -> Tensor:
        """The mask of invalid observations: infinite numbers, and NaN unless it marks a missing word."""
        if self.missing is None:
            return value.isinf()
        absent = value.isnan().all(-1, keepdim=True) if self.missing else torch.zeros_like(value, dtype=torch.bool)
        return ~value.isfinite() & ~absent

    def _get_labels(self, readout: NodeSpec) -> Labels:
        """The labels of a readout, which may be the words of a stack that the readout predicts."""
        labels = getattr(readout.tpm, "labels", None)
        if labels is not None:
            return as_labels(labels)
        words = self.task.encoders.get(readout.group.stack)
        vocabulary = None if words is None else words.vocabulary
        return vocabulary if vocabulary is not None and len(vocabulary) == readout.tpm.states else Labels()

    def check_observed(
        self, readout: NodeSpec | None, value: Tensor, words: Mapping[str, Tensor], leading: tuple[int, ...] = ()
    ) -> None:
        """Raise an error for observations of a wrong shape and states out of range; `leading` are their first dims."""
        if readout is None:
            return
        group, discrete = readout.group, readout.tpm.kind == "discrete"
        _check_shape(self.task.network, readout, value, group.name, leading, words)
        if not discrete and bool(self.is_invalid(value).any()):
            expected = "finite numbers, or NaN in every number of a word" if self.missing else "finite numbers"
            is_complete = bool((value.isnan().all(-1) | value.isfinite().all(-1)).all())
            helps = self.missing_option is not None and self.missing is False and is_complete
            hint = f"If NaN marks words that are not observed, pass {self.missing_option}" if helps else None
            actual = "infinity" if bool(value.isinf().any()) else "NaN"
            raise BNetError(group.name, expected=expected, actual=actual, hint=hint)
        states = readout.tpm.states
        if discrete and states is not None and value.numel():
            low, high = int(value.min()), int(value.max())
            if low < UNOBSERVED or high >= states:
                expected = f"states from 0 to {states - 1} (-1 or None: not observed)"
                raise BNetError(group.name, expected=expected, actual=low if low < UNOBSERVED else high)


def is_stack_pair(row: object) -> bool:
    """True for a pair of a mapping from stack and observations."""
    return isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], Mapping)


def _labels_to_states(subject: str, labels: Labels, value: object) -> object:
    """The states of labels; None is a missing observation."""
    if value is None:
        return UNOBSERVED
    if isinstance(value, str):
        state = labels.find(value, f"label of {subject}")
        if state is None:
            raise unknown_name_error(f"label of {subject}", value, labels)
        return state
    return [_labels_to_states(subject, labels, part) for part in value] if isinstance(value, list | tuple) else value


def read_example(reader: ExampleReader, k: int, row: object, subject: str) -> Example:
    """Read an example; its number is part of any error."""
    try:
        return reader(row)
    except BNetError as error:
        raise add_row_number(error, subject, k) from error


def add_row_number(error: BNetError, subject: str, k: int) -> BNetError:
    """The same error with the number of the row."""
    return type(error)(f"{subject}[{k}], {error.subject}", **error.parts)


def pad_examples(task: Task, examples: Sequence[Example], *, mask_padding: bool = False) -> Batch:
    """Collate examples, padded at their ends.

    Args:
        task: The words and the readouts of the net.
        examples: At least one example.
        mask_padding: Whether to mask all padding; by default only padding that a word could read is masked.

    Returns:
        The batch; its real numbers have the net's floating type.
    """
    if not examples:
        raise BNetError("data", expected="at least one example in a batch", actual="an empty batch")
    graph, x, mask = task.network.graph, {}, {}
    for stack in task.stacks:
        rows = [example.words[stack] for example in examples]
        lengths = [len(row) for row in rows]
        x[stack] = pad(rows, 0)
        if len(set(lengths)) > 1 and (mask_padding or task.needs_mask(stack)):
            mask[stack] = lengths_to_mask(lengths)
    evidence = {}
    known = {readout.group.name for readout in task.readouts}
    for name in examples[0].observed:
        axis = len(graph.get_group(name).plates) if name in known else 0
        rows = [example.observed[name] for example in examples]
        value = pad(rows, axis, get_fill_value(rows[0]))
        evidence[name] = split_missing(value) if name in known else Evidence(value)
    return Batch(x, mask or None, evidence).cast_like(task.network)


def read_columns(reader: ExampleReader, data: object, subject: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read the columns of a net without words.

    Args:
        reader: The reader of observations; its readouts are the random nodes.
        data: A mapping from node to a column, a DataFrame, or a list of mappings. If the net has only one readout, its
            column without a name suffices.
        subject: The name of the data in messages.

    Returns:
        The values of input nodes, and the observations of random ones, both `[sentence, *plates, *shape]` by name.

    Raises:
        BNetError: A column is missing, or has a wrong length or shape.
        UnknownNameError: The net has no such node.
    """
    task, network = reader.task, reader.task.network
    by_node = _split_by_node(task, data, subject)
    given: dict[str, Tensor] = {}
    observed: dict[str, Tensor] = {}
    random = {spec.group.name: spec for spec in task.readouts}
    inputs = {m.group.name: m for m in network.specs if m.tpm.kind == "input"}
    for name, column in by_node.items():
        if name not in random and name not in inputs:
            raise unknown_name_error(f"node of {subject}", name, [*random, *inputs])
        spec = random.get(name) or inputs[name]
        if spec.scope == "corpus":
            actual = "a node with one value for the corpus"
            raise BNetError(f"{subject}, {name}", expected="a node with a value for each sentence", actual=actual)
        if name in inputs:
            read = to_integers if spec.tpm.is_index_valued else to_reals
            given[name] = read(f"{subject}, {name}", _series_to_list(spec, column))
        else:
            observed[name] = reader.encode_observed(spec, _mark_missing(network, spec, _series_to_list(spec, column)))
    needed = [m.group.name for m in network.specs if m.tpm.kind == "input" and m.tpm.default is None]
    missing = [name for name in needed if name not in by_node]
    if missing:
        raise BNetError(f"{subject}: the input nodes {', '.join(missing)} have no column")
    counts = {name: len(value) if value.dim() else 0 for name, value in {**given, **observed}.items()}
    if len(set(counts.values())) > 1 or not all(counts.values()):
        actual = ", ".join(f"{n} of {name}" for name, n in counts.items())
        raise BNetError(subject, expected="columns of equal length, with at least one sentence", actual=actual)
    for name, value in given.items():
        _check_shape(network, inputs[name], value, f"{subject}, {name}", (len(value),), {})
        if not bool(value.isfinite().all()):
            raise BNetError(f"{subject}, {name}", expected="finite numbers", actual="NaN or infinity")
    for name, value in observed.items():
        reader.check_observed(random[name], value, {}, leading=(len(value),))
    return given, observed


def _split_by_node(task: Task, data: object, subject: str) -> dict[str, object]:
    """The column of each node."""
    if isinstance(data, Mapping):
        by_node = dict(data)
    elif is_dataframe(data):
        by_node = {name: data[name] for name in data.columns}
    elif isinstance(data, Sequence) and data and all(isinstance(row, Mapping) for row in data):
        names = dict.fromkeys(name for row in data for name in row)
        by_node = {name: [row.get(name) for row in data] for name in names}
    else:
        leaves = [m.group.name for m in task.readouts if not task.network.graph.out_edges[m.group.index]]
        is_column = isinstance(data, Tensor | np.ndarray | Sequence) and not isinstance(data, str) and len(data)
        if len(leaves) != 1 or not is_column:
            raise BNetError(subject, expected=COLUMN_FORMS, actual=data)
        by_node = {leaves[0]: data}
    if not by_node or not all(isinstance(name, str) for name in by_node):
        raise BNetError(subject, expected=COLUMN_FORMS, actual=data)
    return by_node


def is_dataframe(data: Any) -> TypeGuard[Any]:
    """True for a DataFrame of pandas; the test uses its methods, so that pandas is not imported."""
    return all(hasattr(data, name) for name in ("columns", "isna", "to_numpy"))


def _series_to_list(spec: NodeSpec, column: Any) -> Any:
    """A Series of pandas as a list, with None for missing values; numbers of a node of width 1 become vectors."""
    if not hasattr(column, "isna"):
        return column
    values = [None if absent else value for value, absent in zip(column, column.isna(), strict=True)]
    if spec.shape != (1,) or spec.group.plates:
        return values
    return [[value] if isinstance(value, numbers.Real) else value for value in values]


def _mark_missing(network: Network, spec: NodeSpec, column: object) -> object:
    """The column with None for missing states and NaN for missing real numbers."""
    if spec.tpm.kind == "discrete":
        return _to_integer_states(column)
    if not isinstance(column, list | tuple):
        return column
    sizes = [network.graph.plate_sizes[plate] for plate in spec.group.plates]
    return [np.full((*sizes, *spec.shape), np.nan) if value is None else value for value in column]


def _to_integer_states(column: Any) -> Any:
    """Convert states to integers, also from booleans and floating types; NaN becomes None."""
    if isinstance(column, Tensor | np.ndarray):
        array = to_numpy(column) if isinstance(column, Tensor) else column
        return _to_integer_states(array.tolist()) if array.dtype.kind in "bfO" else column
    if isinstance(column, list | tuple):
        return [_to_integer_states(value) for value in column]
    if isinstance(column, bool | np.bool_):
        return int(column)
    if isinstance(column, float | np.floating):
        return None if np.isnan(column) else int(column) if float(column).is_integer() else column
    return column


def _check_shape(
    network: Network, spec: NodeSpec, value: Tensor, subject: str, leading: tuple[int, ...], words: Mapping[str, Tensor]
) -> None:
    """Raise an error if values of a node are not `[*leading, *plates, word, *shape]`."""
    group, is_state = spec.group, spec.tpm.kind == "discrete" or spec.tpm.is_index_valued
    shape = (*leading, *(network.graph.plate_sizes[plate] for plate in group.plates))
    shape += (len(words[group.word_stack]),) if group.word_stack is not None else ()
    shape += () if is_state else spec.shape
    if tuple(value.shape) != shape:
        raise BNetError(subject, expected=f"values of shape {shape}", actual=f"shape {tuple(value.shape)}")


# --------------------------------------------------------------------------------------------------------------------
# Arrays and token streams as data: whole arrays are checked at once, and a stream is split into windows.


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
        data = replace(data, evidence={}) if observed == "none" else data
        batch = check_batch(network, data.cast_like(network))
        check_batch_mask(infer_task(network), batch)
        return batch
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
    check_batch_mask(task, batch)
    return _check_observed(batch.cast_like(network), subject)


def check_batch_mask(task: Task, batch: Batch) -> None:
    """Check that a mask leaves each sentence a word, and each word that readouts or observations need a word to read.

    Args:
        task: The net and its readouts.
        batch: The sentences.

    Raises:
        BNetError: A sentence has no word, or a word has no word to read.
    """
    if batch.mask is not None:
        network, word_counts = task.network, index_inputs(task.network, batch.x, batch.given)[1]
        outputs = {*(readout.group.index for readout in task.readouts), *batch.index_evidence(network)}
        check_masked_reads(network, outputs, (), check_mask(batch.mask, word_counts, len(batch)), word_counts)


def encode_sentences(network: Network, data: object) -> list[EncodedSentence]:
    """Encode sentences one by one, with the names of their words.

    Args:
        network: The net.
        data: A list or an array of sentences. Observations in the data are ignored.

    Raises:
        BNetError: The data or one of the sentences have another form; the message contains the number of the sentence.
    """
    rows = _drop_observed(infer_task(network), _to_rows(data, "sentences"))
    if isinstance(rows, str) or not isinstance(rows, Sequence | Tensor | np.ndarray) or not len(rows):
        raise BNetError("sentences", expected="a list of at least one sentence", actual=data)
    encoded = []
    for k, row in enumerate(rows):
        if isinstance(row, tuple) and len(row) == len(network.graph.word_stacks) > 1:
            row = dict(zip(network.graph.word_stacks, row, strict=True))
        stacks = {n: v for n, v in row.items() if n in network.graph.word_stacks} if isinstance(row, Mapping) else row
        try:
            encoded.append(encode_sentence(network, stacks))
        except BNetError as error:
            raise add_row_number(error, "sentences", k) from error
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
    *,
    has_loss: bool = False,
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
        has_loss: Whether a loss function of the user reads the observations of batches that the user has made.

    Returns:
        The data set. Arrays are not copied. Of a file, only the examples of a step are read.

    Raises:
        BNetError: The data have another form.
        FileError: A file is not a token file.
    """
    task = reader.task
    if isinstance(data, Dataset):
        dataset = replace(data, batch=batch, seed=seed)
        if data.task.network is not task.network:  # it was read for another net
            check_batch(task.network, dataset(0), has_loss=has_loss)
        return dataset
    if isinstance(data, Batch):
        checked = check_batch(task.network, data, has_loss=has_loss)
        return Dataset(task, len(data), None, batch, seed, full_batch=checked)
    if callable(data):
        make = cast(Callable[[int], object], data)

        def fresh(step: int) -> Batch:
            dataset = read_dataset(reader, make(step), words=words, subject=subject, has_loss=has_loss)
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

"""Read one example of a data set (words and observations), or the columns of a net without words, one for each node."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import to_numpy
from bnet_transformer._core.tokens import Labels, as_labels
from bnet_transformer.data.batch import UNOBSERVED, Batch, Evidence, get_fill_value, lengths_to_mask, pad, split_missing
from bnet_transformer.data.task import Task
from bnet_transformer.data.word_encoder import WordCounter, is_text_array, to_integers, to_reals
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, unknown_name_error

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

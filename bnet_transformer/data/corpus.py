"""The data of a fit: sentences with what is observed of them, checked once and kept as tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.data.batch import Evidence
from bnet_transformer.data.columns import columns_of
from bnet_transformer.data.dataset import Batch, Example, Reader, batches, padded, seen
from bnet_transformer.data.task import Task, task_of
from bnet_transformer.data.words import is_text
from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.network import Network
from bnet_transformer.tpm.arrays import own_tensor

PAIRS = "pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists"
SAID = "a list of sentences, or of pairs of them and what is observed; an array [sentence, word]"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Sentences as tensors: words, who is present, evidence of each readout; `given` are the inputs of a net without
    words. Equal to itself alone."""

    x: Mapping[str, Tensor]
    mask: Mapping[str, Tensor] | None
    evidence: Mapping[str, Evidence]
    given: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        values = (*self.x.values(), *self.given.values(), *(told.value for told in self.evidence.values()))
        return len(values[0]) if values else 1

    @property
    def numbers(self) -> int:
        """How many numbers are observed: what a log likelihood per dim is divided by."""
        total = 0
        for told in self.evidence.values():
            each = told.value if told.observed is None else told.value[told.observed]
            total += each.numel()
        return total

    def take(self, which: Tensor | slice) -> Corpus:
        """Some of the sentences: a slice of them, or those at some places.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(4, vocabulary=["the", "cat"], observe=bt.tpm.Categorical(2))
        >>> found = bt.fit(net, [("the cat", "cat the"), ("cat the", "the cat")], method=bt.MAP(steps=1))
        >>> found.log_likelihood(found.data.take(slice(1))).shape
        torch.Size([1])
        """
        wanted = f"a slice, or places from 0 to {len(self) - 1}, a tensor of them"
        if not isinstance(which, slice) and not (isinstance(which, Tensor) and which.dim() == 1):
            raise BNetError("which", expected=wanted, got=which)
        try:
            return Corpus(
                {k: v[which] for k, v in self.x.items()},
                None if self.mask is None else {k: v[which] for k, v in self.mask.items()},
                {
                    k: Evidence(told.value[which], None if told.observed is None else told.observed[which])
                    for k, told in self.evidence.items()
                },
                {k: v[which] for k, v in self.given.items()},
            )
        except (IndexError, TypeError, ValueError) as error:
            raise BNetError("which", expected=wanted, got=which) from error

    def parts(self, size: int) -> list[Corpus]:
        """All sentences in parts of at most so many."""
        if len(self) <= size:
            return [self]
        return [self.take(slice(start, start + size)) for start in range(0, len(self), size)]

    def like(self, network: Network) -> Corpus:
        """The same in the floating type of a net."""

        def typed(value: Tensor) -> Tensor:
            return value.to(network.dtype) if value.is_floating_point() else value

        told = {k: Evidence(typed(each.value), each.observed) for k, each in self.evidence.items()}
        values = (*self.x.values(), *self.given.values(), *(each.value for each in self.evidence.values()))
        if all(typed(value) is value for value in values):
            return self
        given = {k: typed(v) for k, v in self.given.items()}
        return Corpus({k: typed(v) for k, v in self.x.items()}, self.mask, told, given)

    def same(self, other: Corpus) -> bool:
        """True for the same sentences in the same order, whatever their floating types."""
        mine, theirs = self._tensors(), other._tensors()
        return mine.keys() == theirs.keys() and all(
            value.shape == theirs[name].shape and bool((value.cpu().float() == theirs[name].cpu().float()).all())
            for name, value in mine.items()
        )

    def _tensors(self) -> dict[str, Tensor]:
        told = {f"{k} value": each.value for k, each in self.evidence.items()}
        told |= {f"{k} seen": each.observed for k, each in self.evidence.items() if each.observed is not None}
        there = {f"{k} there": value for k, value in (self.mask or {}).items()}
        words = {f"{k} words": value for k, value in self.x.items()}
        return {**words, **{f"{k} given": value for k, value in self.given.items()}, **told, **there}

    def digest(self) -> str:
        """What tells other data: a hash of every number."""
        found = hashlib.sha256()
        for name, value in sorted(self._tensors().items()):
            found.update(f"{name} {tuple(value.shape)}".encode())
            found.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()[:16]

    def to(self, device: torch.device) -> Corpus:
        """The same on a device."""
        return Corpus(
            {k: v.to(device) for k, v in self.x.items()},
            None if self.mask is None else {k: v.to(device) for k, v in self.mask.items()},
            {
                k: Evidence(told.value.to(device), None if told.observed is None else told.observed.to(device))
                for k, told in self.evidence.items()
            },
            {k: v.to(device) for k, v in self.given.items()},
        )


def task_of_mixture(network: Network) -> Task:
    """The readouts of a net that may choose; refused where there is nothing to observe.

    Of a net without words every random node can be observed: it may be told which ones are.
    """
    task = task_of(network, likelihood=False)
    if not task.words:
        task = replace(task, readouts=tuple(m for m in network.members if m.tpm.is_random))
    if not task.readouts:
        raise BNetError(
            "net",
            expected="a readout: a net without observe= has no likelihood to fit",
            got="no Categorical or Normal node that nothing reads",
            allowed="observe= of the net",
        )
    return replace(task, next_word=None)


def corpus_of(
    network: Network,
    data: object,
    what: str = "data",
    *,
    missing: bool = False,
    option: str | None = "missing=True",
    task: Task | None = None,
    told: bool = False,
) -> Corpus:
    """The corpus of data in any of its forms; NaN is refused, but (`missing`) for words of which nothing is seen.

    The `option` is how the caller turns that on, for the error; None where there is no such option.
    A tuple of two is `(x, y)`, arrays or lists; a list is one of pairs, or (where a `task` tells next words) of
    sentences. All padding is `told` by a mask, or that alone which a word could read.
    """
    if isinstance(data, Corpus):
        return data.like(network)
    wanted, task = PAIRS if task is None else SAID, task or task_of_mixture(network)
    if not task.words:
        return _corpus_of_columns(network, task, data, what, missing, option)
    if isinstance(data, str | Path):
        raise BNetError(what, expected=wanted, got=data)
    batch = _of_arrays(network, task, data, what)
    if batch is not None:
        _check_numbers(what, batch.x, batch.observed, missing, option)
        return _corpus(network, batch, what)
    pairs = _as_pairs(task, data, what)
    try:
        read = batches(Reader(task), pairs, 1, 0, None, what)
    except BNetError as error:
        raise _of_pairs(error, what, wanted) from error
    if read.size is None:
        raise BNetError(what, expected=wanted, got="a function")
    examples = [_in_numbers(network, task, read.example(k)) for k in range(read.size)]
    for k, example in enumerate(examples):
        words, observed = (
            {name: value[None] for name, value in each.items()} for each in (example.words, example.observed)
        )
        _check_numbers(what, words, observed, missing, option, k)
    return _corpus(network, padded(task, examples, told=told), what)


def _corpus_of_columns(
    network: Network, task: Task, data: object, what: str, missing: bool, option: str | None
) -> Corpus:
    """The corpus of a net without words."""
    columns = columns_of(network, task, data, what)
    _check_numbers(what, columns.given, columns.observed, missing, option)
    return replace(_corpus(network, columns.batch, what), given=columns.given).like(network)


def _of_pairs(error: BNetError, what: str, wanted: str) -> BNetError:
    """An error of the data as a whole says what forms they may have here."""
    whole = error.what == what and not isinstance(error, BudgetError)
    return BNetError(what, expected=wanted, got=error.got) if whole else error


def corpus_of_both(
    network: Network, x: object, y: object, *, missing: bool = False, option: str | None = "missing=True"
) -> Corpus:
    """The corpus of sentences and what is observed of them, told apart: arrays or lists."""
    if not network.graph.word_stacks:
        _check_no_words(x)
        return corpus_of(network, y, "y", missing=missing, option=option)
    x, y = (list(part) if isinstance(part, tuple) else part for part in (x, y))
    return corpus_of(network, (x, y), "(x, y)", missing=missing, option=option)


def _in_numbers(network: Network, task: Task, example: Example) -> Example:
    """An example whose real numbers are in the net's floating type, also where they came as whole ones."""
    real = {name for name, of in task.words.items() if of.states is None}
    real_told = {readout.family.name for readout in task.readouts if readout.tpm.kind != "discrete"}
    words = {k: v.to(network.dtype) if k in real else v for k, v in example.words.items()}
    return Example(words, {k: v.to(network.dtype) if k in real_told else v for k, v in example.observed.items()})


def _is_pair(data: object, task: Task) -> TypeGuard[Sequence[Any]]:
    """True for two parts that can be sentences and what is observed of them: one stack, one readout."""
    if not isinstance(data, tuple | list) or len(data) != 2 or len(task.readouts) != 1 or len(task.stacks) != 1:
        return False
    return not any(isinstance(part, Mapping | Example) for part in data)


def _are_arrays(parts: Sequence[Any]) -> bool:
    return all(isinstance(part, Tensor | np.ndarray) for part in parts)


def _as_pairs(task: Task, data: object, what: str) -> object:
    """A tuple `(x, y)` of lists as the pairs that it tells; other data as they are."""
    if not _is_pair(data, task):
        return data
    listed = isinstance(data, list)
    if _are_arrays(data) if listed else all(isinstance(part, tuple) and len(part) == 2 for part in data):
        raise BNetError(
            what,
            expected="a list of pairs, or a tuple (x, y)",
            got="what could be two pairs, and could be sentences and what is observed of them",
            allowed="[(sentence, observed), (sentence, observed)], two pairs; (x, y), a tuple of two arrays or lists",
        )
    if listed:
        return data
    x, y = data
    if any(isinstance(part, str) or not isinstance(part, Sequence | Tensor | np.ndarray) for part in data):
        raise BNetError(what, expected=PAIRS, got=data, allowed="[(sentence, observed)] for a single one")
    if len(x) != len(y):
        raise BNetError(what, expected="as many observations as sentences", got=f"{len(x)} and {len(y)}")
    return list(zip(x, y, strict=True))


def _of_arrays(network: Network, task: Task, data: object, what: str) -> Batch | None:
    """A batch of a pair of whole arrays, without a look at each sentence; None for other data."""
    if not _is_pair(data, task) or not isinstance(data, tuple):
        return None
    if not _are_arrays(data) or any(part.dtype == object or is_text(part) for part in data):
        return None
    try:
        x, y = map(own_tensor, data)
    except (TypeError, ValueError) as problem:
        raise BNetError(what, expected=PAIRS, got=str(problem)) from problem
    if not x.dim() or not y.dim() or not len(x):
        raise BNetError(what, expected="at least one sentence", got=f"arrays of shape {_shapes(x, y)}")
    if len(x) != len(y):
        raise BNetError(what, expected="as many observations as sentences", got=f"shapes {_shapes(x, y)}")
    reader = Reader(task)
    (stack,), (readout,) = task.stacks, task.readouts
    try:
        # Forms and types are told by the reader of single sentences.
        first = _in_numbers(network, task, reader((x[0], y[0])))
    except BNetError as error:
        where = f"{what}[0], {error.what}"
        raise type(error)(where, expected=error.expected, got=error.got, allowed=error.allowed) from error
    words, observed = first.words[stack], first.observed[readout.family.name]
    if x.shape[1:] != words.shape or y.shape[1:] != observed.shape:
        raise BNetError(what, expected=f"[sentence, {words.shape}], {observed.shape}", got=f"{_shapes(x, y)}")
    states = task.words[stack].states
    for name, part, top in (("x", x, states), ("y", y, readout.tpm.states)):
        if top is not None and (int(part.min()) < (0 if name == "x" else -1) or int(part.max()) >= top):
            low, high = int(part.min()), int(part.max())
            raise BNetError(f"{what}, {name}", expected=f"ids from 0 to {top - 1}", got=f"{low} to {high}")
    return Batch({stack: x.to(words.dtype)}, None, {readout.family.name: y.to(observed.dtype)})


def _shapes(x: Tensor, y: Tensor) -> str:
    return f"{tuple(x.shape)} and {tuple(y.shape)}"


def _corpus(network: Network, batch: Batch, what: str) -> Corpus:
    """A batch as a corpus, in the net's floating type."""
    x = {stack: value.to(network.dtype) if value.is_floating_point() else value for stack, value in batch.x.items()}
    evidence = {}
    for name, value in batch.observed.items():
        shown = seen(value)
        if not bool(shown.any()):
            raise BNetError(what, expected=f"something observed of {name}", got="nothing")
        if value.is_floating_point():
            value = value.to(network.dtype).masked_fill(~shown[..., None], 0.0)
        else:
            value = value.masked_fill(~shown, 0)
        evidence[name] = Evidence(value, None if bool(shown.all()) else shown)
    return Corpus(x, batch.mask, evidence)


def _check_numbers(
    what: str,
    x: Mapping[str, Tensor],
    observed: Mapping[str, Tensor],
    missing: bool,
    option: str | None,
    first: int = 0,
) -> None:
    """Refuse numbers that are none, told with the sentence where they are."""
    for name, value in (*x.items(), *observed.items()):
        if not value.is_floating_point():
            continue
        good, absent = value.isfinite().all(-1), value.isnan().all(-1)
        may_be_absent = missing and name in observed
        accepted = good | absent if may_be_absent else good
        if not bool(accepted.all()):
            which = first + int((~accepted.reshape(len(good), -1).all(1)).nonzero()[0, 0])
            helps = option is not None and not missing and name in observed and bool((good | absent).all())
            raise BNetError(
                f"{what}, {name or 'x'}, sentence {which}",
                expected="finite numbers, or NaN in every number of a word" if may_be_absent else "finite numbers",
                got="NaN or infinity",
                allowed=f"{option}, where NaN says that nothing of a word was observed" if helps else None,
            )


def words_of_corpus(network: Network, x: object, *, told: bool = False) -> Corpus:
    """Sentences of which nothing is observed: text, lists, ids or vectors; an array `[sentence, word, ...]`; where a
    net has several stacks, mappings from stack. All padding is `told` by a mask, or that alone which is read."""
    task = task_of(network, likelihood=False)
    if not task.words:
        return _inputs_without_words(network, x)
    if isinstance(x, str) or not isinstance(x, Sequence | Tensor | np.ndarray) or not len(x):
        raise BNetError("x", expected="a list of sentences, or an array of them", got=x)
    examples = [_in_numbers(network, task, Example(_words_of(task, said), {})) for said in x]
    for example in examples:
        for stack, words in example.words.items():
            task.words[stack].check_length(len(words))
    batch = padded(task, examples, told=told)
    _check_numbers("x", batch.x, {}, False, None)
    floating = {k: v.to(network.dtype) if v.is_floating_point() else v for k, v in batch.x.items()}
    return Corpus(floating, batch.mask, {})


def _check_no_words(x: object) -> None:
    if x is not None:
        allowed = "y=, with what is observed and given of its nodes"
        raise BNetError("x", expected="None: the net has no words", got=x, allowed=allowed)


def _inputs_without_words(network: Network, x: object) -> Corpus:
    """The inputs of a net without words: columns of its given nodes; None where it has none."""
    if x is None:
        return Corpus({}, None, {})
    columns = columns_of(network, task_of_mixture(network), x, "x")
    if columns.observed:
        raise BNetError("x", expected="given nodes alone", got=", ".join(columns.observed))
    _check_numbers("x", columns.given, {}, False, None)
    return Corpus({}, None, {}, columns.given).like(network)


def _words_of(task: Task, said: object) -> dict[str, Tensor]:
    """The words of each stack."""
    if len(task.stacks) == 1 and not isinstance(said, Mapping):
        said = {task.stacks[0]: said}
    if not isinstance(said, Mapping) or set(said) != set(task.stacks):
        wanted = f"a mapping from stack: {', '.join(task.stacks)}"
        raise BNetError("sentence", expected=wanted, got=list(said) if isinstance(said, Mapping) else said)
    return {stack: task.words[stack].tensor(said[stack]) for stack in task.stacks}

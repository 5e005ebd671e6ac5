"""Data as examples: lists of sentences or of pairs, arrays, a stream of tokens on disk; and minibatches by step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bnet_transformer._core.hashing import derive_seed
from bnet_transformer.data.rows import rows_of, suspect
from bnet_transformer.data.task import Task
from bnet_transformer.data.words import is_text, real_numbers, tokens_of, whole_numbers
from bnet_transformer.errors import BNetError, not_endless, unknown, whole
from bnet_transformer.network import Member
from bnet_transformer.tpm.arrays import is_plain

UNSEEN = -1
WAYS = "a list of sentences or of pairs, an array [sentence, word], a pair of arrays, a file of tokens"


@dataclass(frozen=True)
class Example:
    """One sentence: the words of each stack, and what is observed at each readout."""

    words: Mapping[str, Tensor]
    observed: Mapping[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """Sentences padded to one length: words `[batch, word]`, who is present, what is observed (-1 or NaN: nothing)."""

    x: Mapping[str, Tensor]
    mask: Mapping[str, Tensor] | None
    observed: Mapping[str, Tensor]

    @property
    def sentences(self) -> int:
        """How many sentences there are."""
        return len(next(iter((*self.x.values(), *self.observed.values()))))

    @cached_property
    def count(self) -> int:
        """How many words are observed, over all readouts."""
        return sum(int(seen(value).sum()) for value in self.observed.values())

    def share(self, rank: int, world: int) -> Batch:
        """Every `world`-th sentence; where none is left, one of which nothing is observed."""
        if whole("rank", rank, least=0) >= whole("world", world):
            raise BNetError("rank", expected=f"a whole number below {world}", got=rank)
        if rank < self.sentences:
            return self._each(lambda value: value[rank::world], lambda value: value[rank::world])
        return self._each(lambda value: value[:1], lambda value: torch.full_like(value[:1], nothing(value)))

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """The same on a device, real numbers in the net's floating type; nobody waits for it to be there."""

        def moved(value: Tensor) -> Tensor:
            return sent(value.to(dtype) if value.is_floating_point() else value, device)

        return self._each(moved, moved)

    def flat(self) -> dict[str, Tensor]:
        """Its tensors by name; `Batch.of` puts them together again."""
        parts = {"x": self.x, "mask": self.mask or {}, "observed": self.observed}
        return {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}

    @classmethod
    def of(cls, flat: Mapping[str, Tensor]) -> Batch:
        """The batch of tensors by name."""
        parts: dict[str, dict[str, Tensor]] = {"x": {}, "mask": {}, "observed": {}}
        for key, value in flat.items():
            part, _, name = key.partition("/")
            parts[part][name] = value
        return cls(parts["x"], parts["mask"] or None, parts["observed"])

    def _each(self, words: Callable[[Tensor], Tensor], observed: Callable[[Tensor], Tensor]) -> Batch:
        mask = None if self.mask is None else {k: words(v) for k, v in self.mask.items()}
        return replace(
            self,
            x={k: words(v) for k, v in self.x.items()},
            mask=mask,
            observed={k: observed(v) for k, v in self.observed.items()},
        )


def sent(value: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, where it will be when it is used: nobody waits for it."""
    pinned = value.pin_memory() if device.type == "cuda" and value.device.type == "cpu" else value
    return pinned.to(device, non_blocking=True)


def nothing(value: Tensor) -> float:
    """What stands where nothing is observed."""
    return float("nan") if value.is_floating_point() else UNSEEN


def seen(value: Tensor) -> Tensor:
    """Where something is observed: of real numbers, of a whole vector."""
    return ~value.isnan().any(-1) if value.is_floating_point() else value != UNSEEN


@dataclass(frozen=True)
class Reader:
    """How one example is read: by a task, with words before and after what is told, and a bound on its length."""

    task: Task
    start: object = None
    stop: object = None

    def __post_init__(self) -> None:
        if self.task.next_word is None:
            self.without_ends("the net tells no next word")

    def without_ends(self, why: str) -> None:
        """Refuse words around what is told, where they would have no effect."""
        for what, word in (("start", self.start), ("stop", self.stop)):
            if word is not None:
                raise BNetError(what, expected=f"None: {why}", got=word)

    def __call__(self, said: object) -> Example:
        """An example of a sentence, a pair, or a mapping from stack and readout."""
        task = self.task
        if isinstance(said, Example):
            return said
        if isinstance(said, Mapping):
            return self._example(said)
        names = list(task.stacks)
        if len(names) == 1 and task.next_word is None:
            names += [readout.family.name for readout in task.readouts] or ["observed"]
        if len(names) == 1:
            return self._example({names[0]: said})
        if not isinstance(said, tuple | list) or len(said) != len(names):
            raise self._not_one(said, [name or "sentence" for name in names])
        return self._example(dict(zip(names, said, strict=True)))

    def _not_one(self, said: object, names: Sequence[str]) -> BNetError:
        """The error of what is no example; a series of real-valued words is to be cut into pairs."""
        wanted, allowed = f"({', '.join(names)})", None
        if isinstance(said, Tensor | np.ndarray):
            told = [readout.family.words for readout in self.task.readouts]
            if told == list(self.task.stacks) and all(of.states is None for of in self.task.words.values()):
                allowed = "training.windows(series, words, ahead), which makes pairs of a series"
            said = f"an array of shape {tuple(said.shape)}"
        elif isinstance(said, tuple) and any(isinstance(part, Tensor | np.ndarray) for part in said):
            said = f"{len(said)} of them"
        wanted = f"a pair {wanted}" if len(names) == 2 else wanted
        return BNetError("example", expected=wanted, got=said, allowed=allowed)

    def _example(self, said: Mapping[str, object]) -> Example:
        task, words, observed = self.task, {}, {}
        readouts = {readout.family.name: readout for readout in task.readouts}
        for name in said:
            if name not in task.words and name not in readouts and task.readouts:
                raise unknown("example", name, [*task.words, *readouts])
        for stack, of in task.words.items():
            if stack not in said:
                raise BNetError("example", expected=f"words of stack {stack!r}", got=f"only {', '.join(said)}")
            words[stack] = of.tensor(said[stack])
        told = task.next_word
        for name in readouts or [name for name in said if name not in task.words]:
            if name in said:
                observed[name] = self.observed(readouts.get(name), said[name])
            elif told is not None:
                words[told], observed[name] = self._shifted(told, words[told])
            else:
                raise BNetError("example", expected=f"what is observed of {name}", got=f"only {', '.join(said)}")
        for stack, of in task.words.items():
            of.check_length(len(words[stack]))
        for name, value in observed.items():
            self.check(readouts.get(name), value, words)
        return Example(words, observed)

    def _shifted(self, stack: str, words: Tensor) -> tuple[Tensor, Tensor]:
        """All words but the last, and the next word of each."""
        of = self.task.words[stack]
        ends = [None if word is None else of.one(word) for word in (self.start, self.stop)]
        words = torch.cat([part for part in (ends[0], words, ends[1]) if part is not None])
        if len(words) < 2:
            raise BNetError("example", expected="at least 2 words, the second to be told by the first", got="1")
        return words[:-1], words[1:]

    def observed(self, readout: Member | None, value: object) -> Tensor:
        """What is observed of a readout, as a tensor."""
        if readout is None:
            floating = isinstance(value, Tensor) and value.is_floating_point()
            array = np.asarray(value) if not isinstance(value, Tensor) else None
            floating = floating or (array is not None and array.dtype.kind == "f")
            return real_numbers("observed", value) if floating else whole_numbers("observed", value)
        family = readout.family
        if readout.tpm.kind == "continuous":
            return real_numbers(family.name, value)
        said = self.task.words[family.words] if family.words is not None else None
        labels = self._labels(readout)
        value = value.tolist() if is_text(value) else value
        if isinstance(value, str) and said is not None:
            value = value.split() if labels is not said.place else said.tensor(value)
        if isinstance(value, str | list | tuple):
            value = _states(family.name, labels, value)
        return whole_numbers(family.name, value)

    def _labels(self, readout: Member) -> Mapping[str, int]:
        """The state of each label of a readout: its own, or the words of its stack where it tells one of them."""
        labels = getattr(readout.tpm, "labels", None)
        if labels is not None:
            return {label: state for state, label in enumerate(labels)}
        words = self.task.words.get(readout.family.stack)
        return words.place if words is not None and len(words.place) == readout.tpm.states else {}

    def check(
        self, readout: Member | None, value: Tensor, words: Mapping[str, Tensor], lead: tuple[int, ...] = ()
    ) -> None:
        """Refuse what is observed of a readout in another form, or states that it has not; `lead` dims come first."""
        if readout is None:
            return
        family, discrete = readout.family, readout.tpm.kind == "discrete"
        sizes = self.task.network.graph.sizes
        shape = (*lead, *(sizes[plate] for plate in family.plates))
        shape += (len(words[family.words]),) if family.words is not None else ()
        shape += () if discrete else readout.shape
        if tuple(value.shape) != shape:
            raise BNetError(family.name, expected=f"values of shape {shape}", got=f"shape {tuple(value.shape)}")
        if not discrete and bool(value.isinf().any()):
            raise BNetError(family.name, expected="finite numbers (NaN: not observed)", got="an infinite one")
        states = readout.tpm.states
        if discrete and states is not None and value.numel():
            low, high = int(value.min()), int(value.max())
            if low < UNSEEN or high >= states:
                wanted = f"states from 0 to {states - 1} (-1 or None: not observed)"
                raise BNetError(family.name, expected=wanted, got=low if low < UNSEEN else high)


def _states(what: str, labels: Mapping[str, int], value: object) -> object:
    """States of labels; None is what is not observed."""
    if value is None:
        return UNSEEN
    if isinstance(value, str):
        if value not in labels:
            raise unknown(f"label of {what}", value, labels)
        return labels[value]
    return [_states(what, labels, part) for part in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Batches:
    """Minibatches by step: the same at every run for the same seed, each example once in an epoch."""

    task: Task
    batch: int
    seed: int
    size: int | None
    example: Callable[[int], Example]
    fresh: Callable[[int], Batch] | None = None
    rows: Mapping[str, Tensor] | None = None

    @property
    def epoch(self) -> int | None:
        """How many steps an epoch has; None where every step has data of its own."""
        return None if self.size is None else -(-self.size // self.batch)

    def __call__(self, step: int) -> Batch:
        """The minibatch of a step, counted from 0."""
        if self.fresh is not None or self.size is None or self.epoch is None:
            assert self.fresh is not None
            return self.fresh(step)
        epoch, place = divmod(step, self.epoch)
        order = _order(self.size, self.seed, epoch)[place * self.batch : (place + 1) * self.batch]
        return self.of(order)

    def in_order(self) -> list[Batch]:
        """All examples once, as they come."""
        if self.size is None:
            raise BNetError("held_out", expected=WAYS, got="a function of the step")
        return [self.of(order) for order in torch.arange(self.size).split(self.batch)]

    def of(self, order: Tensor) -> Batch:
        """These examples as a batch."""
        if self.rows is None:
            return padded(self.task, [self.example(int(k)) for k in order])
        found = {name: value[order] for name, value in self.rows.items()}
        (stack,) = self.task.stacks
        return Batch({stack: found.pop(stack)}, None, found)

    def digest(self) -> str:
        """What tells other data: how much there is, and its first and last example."""
        if self.size is None:
            return "a function of the step"
        found = hashlib.sha256(str(self.size).encode())
        for example in (self.example(0), self.example(self.size - 1)):
            for name, value in sorted({**example.words, **example.observed}.items()):
                found.update(f"{name} {value.tolist()}".encode())
        return found.hexdigest()[:16]


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(derive_seed(seed, "order", epoch)))


def batches(reader: Reader, data: object, batch: int, seed: int, words: int | None, what: str = "data") -> Batches:
    """Minibatches of whatever form the data has; `what` they are, in messages."""
    task = reader.task
    if callable(data):
        make = cast(Callable[[int], object], data)

        def fresh(step: int) -> Batch:
            found = batches(reader, make(step), 1, 0, words, what)
            if found.size is None:
                raise BNetError(what, expected=WAYS, got="a function that returns a function")
            return found.of(torch.arange(found.size))

        return Batches(task, batch, seed, None, reader, fresh)
    where = str(data) if isinstance(data, str | Path) else what
    if isinstance(data, Tensor):
        data = _on_host(what, data)
    if isinstance(data, tuple) and all(isinstance(part, Tensor) for part in data):
        data = tuple(_on_host(what, part) for part in data)
    if isinstance(data, str | Path):
        data = tokens_of(data)
    if isinstance(data, Tensor | np.ndarray) and data.ndim == 1 and data.dtype != object and not is_text(data):
        reader.without_ends("a stream is cut into windows as it is")
        return _windows(task, data, batch, seed, words, where)
    if words is not None:
        raise BNetError("words", expected="None: only a stream of tokens is cut in windows", got=words)
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor | np.ndarray) for part in data):
        arrays = data
        if len({tuple(part.shape[:1]) for part in arrays} | {()}) != 2:
            raise BNetError(what, expected="arrays of one length", got=[tuple(part.shape) for part in arrays])

        def example(k: int) -> Example:
            return _told(reader, k, tuple(part[k] for part in arrays), what)

        if not len(arrays[0]):
            raise BNetError(what, expected="at least one example", got="arrays of none")
        example(suspect(task, arrays) or 0)  # all are of one form, and that row has what no example may have
        return Batches(task, batch, seed, len(arrays[0]), example, rows=rows_of(task, arrays))
    if isinstance(data, Tensor | np.ndarray) and data.ndim and len(data):
        rows = data
        return Batches(task, batch, seed, len(rows), lambda k: _told(reader, k, rows[k], what))
    if not isinstance(data, Sequence) or not data:
        raise BNetError(what, expected=WAYS, got=data)
    not_endless(what, data)
    if all(isinstance(word, int) for word in data):
        raise BNetError(what, expected=WAYS, got="a list of ids", allowed="[ids], for a single sentence")
    read = [_told(reader, k, said, what) for k, said in enumerate(data)]
    return Batches(task, batch, seed, len(read), read.__getitem__)


def _on_host(what: str, value: Tensor) -> Tensor:
    """An array where batches are made and looked at."""
    if value.is_meta or not is_plain(value):
        raise BNetError(what, expected="arrays with a number in each place", got=value)
    return value.cpu()


def _told(reader: Reader, k: int, said: object, what: str) -> Example:
    """An example, or the error that says which one it is."""
    try:
        return reader(said)
    except BNetError as error:
        raise type(error)(
            f"{what}[{k}], {error.what}", expected=error.expected, got=error.got, allowed=error.allowed
        ) from error


def _windows(task: Task, stream: Tensor | np.ndarray, batch: int, seed: int, words: int | None, where: str) -> Batches:
    """A stream of tokens, cut into windows of `words` words and the one after them; the last has what is left."""
    stack = task.next_word
    if stack is None or len(task.stacks) > 1:
        raise BNetError("data", expected="sentences: a stream is for a net of one stack that tells the next word",
                        got=f"a stream of {len(stream)} tokens")  # fmt: skip
    if words is None:
        raise BNetError("words", expected="how many words a window of the stream has", got="None")
    of, readout = task.words[stack], task.readouts[0].family.name
    states = of.states or 0
    of.check_length(words)
    if len(stream) < 2:
        raise BNetError(where, expected="at least 2 tokens, the second to be told by the first", got=len(stream))
    if of.exact is not None and (len(stream) - 1) % words:
        got = f"{len(stream)} tokens: the last window would have {(len(stream) - 1) % words} words"
        raise BNetError(where, expected=f"windows of {words} words, for the mask is a table for so many", got=got)
    count = -(-(len(stream) - 1) // words)

    def window(k: int) -> Example:
        ids = whole_numbers(where, stream[k * words : (k + 1) * words + 1])
        strange = torch.nonzero((ids < 0) | (ids >= states)).flatten().tolist()
        if strange:
            what, got = f"{where}, token {k * words + strange[0]} (window {k})", int(ids[strange[0]])
            raise BNetError(what, expected=f"ids from 0 to {states - 1}", got=got)
        return Example({stack: ids[:-1]}, {readout: ids[1:]})

    return Batches(task, batch, seed, count, window)


def padded(task: Task, examples: Sequence[Example], *, told: bool = False) -> Batch:
    """Examples as a batch, padded behind their ends; a mask where a word could read the padding (`told`: wherever
    there is padding)."""
    if not examples:
        raise BNetError("data", expected="at least one example in a batch", got="none")
    x, mask = {}, {}
    for stack in task.stacks:
        rows = [example.words[stack] for example in examples]
        lengths = [len(row) for row in rows]
        x[stack] = _together(rows, 0)
        if len(set(lengths)) > 1 and (told or task.masks(stack)):
            mask[stack] = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    observed = {}
    for name in examples[0].observed:
        rows = [example.observed[name] for example in examples]
        observed[name] = _together(rows, nothing(rows[0]))
    return Batch(x, mask or None, observed)


def _together(rows: Sequence[Tensor], fill: float) -> Tensor:
    if all(row.shape == rows[0].shape for row in rows):
        return torch.stack(list(rows))
    return pad_sequence(list(rows), batch_first=True, padding_value=fill)

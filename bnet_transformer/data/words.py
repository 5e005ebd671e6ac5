"""The words of a stack as training and decoding take them: text, ids, arrays or vectors, as tensors; files of ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.tokenizer import Tokenizer
from bnet_transformer.data.encode import main_of
from bnet_transformer.errors import BNetError, FileError, unknown
from bnet_transformer.network import Member, Network
from bnet_transformer.tpm.arrays import own_tensor


@dataclass(frozen=True)
class Words:
    """What the words of one stack are: the family that they fill, its vocabulary; the most of them, or how many."""

    stack: str
    member: Member
    vocabulary: tuple[str, ...] | None
    longest: int | None
    tokenizer: Tokenizer | None = None
    exact: int | None = None

    @property
    def states(self) -> int | None:
        """How many words there are; None where words are vectors."""
        return self.member.tpm.states

    @cached_property
    def place(self) -> dict[str, int]:
        """The id of each word of the vocabulary."""
        return {word: k for k, word in enumerate(self.vocabulary or ())}

    def tensor(self, said: object) -> Tensor:
        """A sentence as ids `[word]`, or as vectors `[word, *shape]`."""
        if isinstance(said, str):
            said = said.split() if self.tokenizer is None else list(self.tokenizer.read(said).ids)
        if self.states is None:
            return self._vectors(said)
        said = said.tolist() if is_text(said) else said
        if isinstance(said, Sequence) and said and all(isinstance(word, str) for word in said):
            return torch.tensor([self.id(word) for word in said])
        ids = whole_numbers(self._where, said)
        if ids.dim() != 1 or not len(ids):
            raise BNetError(self._where, expected="words, at least one", got=said)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.states:
            raise BNetError(self._where, expected=f"ids from 0 to {self.states - 1}", got=low if low < 0 else high)
        return ids

    def id(self, word: object) -> int:
        """The id of one word, told as itself or as its id."""
        if isinstance(word, str):
            if self.vocabulary is None:
                raise BNetError(self._where, expected="ids: the net has no vocabulary", got=word)
            if word not in self.place:
                raise unknown(f"word of the {self._where}", word, self.place)
            return self.place[word]
        return int(self.tensor([word])[0])

    def one(self, word: object) -> Tensor:
        """A sentence of one word."""
        if self.states is not None:
            return torch.tensor([self.id(word)])
        return self.tensor(real_numbers(self._where, word)[None])

    def tell(self, ids: Iterable[int]) -> tuple[str, ...]:
        """Ids as words; as numerals where there is no vocabulary."""
        return tuple(str(k) if self.vocabulary is None else self.vocabulary[k] for k in ids)

    def check_length(self, words: int, *, begun: bool = False) -> None:
        """Refuse more words than there are learned positions, and another number than that of a mask's table; where
        they are only `begun`, a greater one."""
        if self.exact is not None and (words > self.exact or (words < self.exact and not begun)):
            wanted = f"{'at most ' if begun else ''}{self.exact} words, for the mask is a table for so many"
            raise BNetError(self._where, expected=wanted, got=f"{words} words")
        if self.longest is not None and words > self.longest:
            wanted = f"at most {self.longest} words, the learned positions"
            raise BNetError(self._where, expected=wanted, got=f"{words} words")

    @property
    def _where(self) -> str:
        return f"sentence of stack {self.stack!r}" if self.stack else "sentence"

    def _vectors(self, said: object) -> Tensor:
        found = real_numbers(self._where, said)
        image = self.member.tpm.image
        if image is not None and found.dim() == 3:
            found = image.read(found)
        if not found.dim() or tuple(found.shape[1:]) != self.member.shape or not len(found):
            wanted = f"vectors of shape (words, {', '.join(map(str, self.member.shape))})"
            raise BNetError(self._where, expected=wanted, got=f"shape {tuple(found.shape)}")
        if not bool(found.isfinite().all()):
            word = int((~found.isfinite()).flatten(1).any(1).nonzero()[0])
            raise BNetError(self._where, expected="finite numbers", got=f"a NaN or an infinite one at word {word}")
        return found


def words_of(network: Network, stack: str) -> Words:
    """The words of a stack: its `Given` family over words, the discrete one where there are several."""
    over = [
        member
        for member in network.members
        if member.tpm.kind == "input" and member.family.words == stack and not member.family.plates
    ]
    found = main_of(over)
    if found is None:
        raise BNetError(f"stack {stack!r}", expected="words that are given with the sentence", got="none")
    bounds = [m.tpm.longest for m in network.members if m.family.words == stack and m.tpm.longest is not None]
    tokenizer = network.tokenizer if stack == network.graph.word_stacks[0] else None
    vocabulary = network.vocabularies.get(stack)
    return Words(stack, found, vocabulary, min(bounds, default=None), tokenizer, _exact(network, stack))


def _exact(network: Network, stack: str) -> int | None:
    """How many words a stack has, where a table says who reads whom."""
    for member in network.members:
        for given in member.inputs:
            if given.reach.kind == "mask" and member.family.words == stack:
                return len(given.reach.table)
            if given.reach.kind == "mask" and network.members[given.parent].family.words == stack:
                return len(given.reach.table[0])
    return None


def is_text(value: object) -> TypeGuard[np.ndarray]:
    """True for an array of words or sentences."""
    return isinstance(value, np.ndarray) and value.dtype.kind == "U"


def whole_numbers(what: str, value: object) -> Tensor:
    """Whole numbers as a tensor of ids."""
    try:
        with np.errstate(invalid="ignore"):  # of NaN as a whole number, which is refused below
            told = value if isinstance(value, Tensor) else np.asanyarray(value)
            if isinstance(told, np.ndarray) and told.dtype.kind == "c":
                raise TypeError("complex")
            found = own_tensor(told if isinstance(told, Tensor) else told.astype(np.int64))
        exact = isinstance(value, Tensor) or bool(np.all(np.asarray(value) == np.asarray(found)))
        kind = str(value.dtype) if isinstance(value, Tensor) else str(np.asarray(value).dtype)
    except (TypeError, ValueError, OverflowError, RuntimeError) as problem:
        raise BNetError(what, expected="text, a list of words, or ids", got=value) from problem
    if not exact or "float" in kind or "bool" in kind or "complex" in kind:
        raise BNetError(what, expected="text, a list of words, or ids", got=value)
    return found.long()


def real_numbers(what: str, value: object) -> Tensor:
    """Real numbers as a tensor."""
    if value is None:
        raise BNetError(what, expected="real numbers", got=value)
    try:
        found = own_tensor(value if isinstance(value, Tensor) else np.asanyarray(value, dtype=np.float64))
    except (TypeError, ValueError, RuntimeError) as problem:
        raise BNetError(what, expected="real numbers", got=value) from problem
    if found.is_complex() or found.dtype == torch.bool:
        raise BNetError(what, expected="real numbers", got=str(found.dtype))
    return found


def tokens_of(path: str | Path) -> np.ndarray:
    """A stream of tokens on disk, mapped into memory: `.npy`, or `.bin` of uint16."""
    where, wanted = str(path), "a file of tokens: .npy, or .bin of uint16"
    if Path(path).suffix not in (".npy", ".bin"):
        got = f"the suffix {Path(path).suffix!r}"
        raise FileError(where, expected=wanted, got=got, allowed="a sentence is told in a list")
    try:
        if Path(path).suffix == ".npy":
            found: np.ndarray = np.lib.format.open_memmap(path, mode="r")  # an array alone: no pickle, no archive
        else:
            found = np.memmap(path, dtype=np.uint16, mode="r")
    except Exception as error:  # numpy reads the header by Python's own tokenizer, which fails in ways of its own
        raise FileError(where, expected=wanted, got=str(error) or type(error).__name__) from error
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise FileError(where, expected=wanted, got=f"{found.dtype} of shape {found.shape}")
    return found

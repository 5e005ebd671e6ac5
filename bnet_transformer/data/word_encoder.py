"""Encode the words of one stack (text, lists of words, ids, vectors or images) as tensors.

If the net has a tokenizer, `_core.tokenizer` splits text first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import copy_to_tensor
from bnet_transformer._core.tokenizer import Tokenizer, is_text
from bnet_transformer._core.tokens import Labels
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.graph.template_graph import NodeGroup
from bnet_transformer.tpm import Given


@dataclass(frozen=True)
class WordEncoder:
    """Encodes the words of one stack as ids `[word]`, or as vectors `[word, *shape]` if the net has no vocabulary.

    Args:
        stack: The name of the stack.
        spec: The input group that the words fill.
        vocabulary: The words by id; None without a vocabulary.
        max_length: The maximum number of words, the number of learned positions; None for no limit.
        tokenizer: The tokenizer that splits text into words of the vocabulary; None to split at spaces.
        exact_length: The required number of words, the size of a mask table; None for any number.
        seed: The seed of the net; it determines the vectors of words of a net without a vocabulary.
    """

    stack: str
    spec: NodeSpec
    vocabulary: Labels | None
    max_length: int | None = None
    tokenizer: Tokenizer | None = None
    exact_length: int | None = None
    seed: int = 0

    @property
    def states(self) -> int | None:
        """The number of ids; None if words are vectors."""
        return self.spec.tpm.states

    @property
    def name(self) -> str:
        """The name of the sentence in messages."""
        return format_sentence_label(self.stack)

    def encode(self, sentence: object) -> Tensor:
        """Encode one sentence.

        Args:
            sentence: A text, a list of words, ids, vectors `[word, *shape]`, or an image `[channel, row, column]` if
                the words of the net are patches.

        Returns:
            Ids `[word]`, or vectors `[word, *shape]` in the floating type of the input.

        Raises:
            BNetError: The sentence has another form, is empty, or contains a number that is not finite.
            UnknownNameError: A word is not in the vocabulary.
        """
        sentence = sentence.tolist() if is_text_array(sentence) else sentence
        if self.tokenizer is not None and is_text(sentence):
            sentence = list(self.tokenizer.encode(sentence).ids)
        words = split_words(self.name, sentence)
        if not isinstance(sentence, str | Sequence | Tensor | np.ndarray) or isinstance(sentence, bytes):
            raise BNetError(self.name, expected="a text, a list of words, ids, or vectors", actual=sentence)
        if self.states is None:
            return self.encode_vectors(sentence) if words is None else self._make_vectors(words)
        ids = to_integers(self.name, sentence) if words is None else torch.tensor([self.id(word) for word in words])
        if ids.dim() != 1:
            hint = "Use net.batch for several sentences" if ids.dim() == 2 else None
            actual = f"ids of shape {tuple(ids.shape)}"
            raise BNetError(self.name, expected="a text, a list of words, or ids", actual=actual, hint=hint)
        if not len(ids):
            raise BNetError(self.name, expected="at least one word", actual=sentence)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.states:
            raise BNetError(self.name, expected=f"ids from 0 to {self.states - 1}", actual=low if low < 0 else high)
        return ids

    def id(self, word: object) -> int:
        """The id of one word, given as text or as an id."""
        if not isinstance(word, str):
            return int(self.encode([word])[0])
        if self.vocabulary is None:
            hint = "For a pretrained model without tokenizer, pass from_pretrained(..., tokenizer=)"
            raise BNetError(self.name, expected="ids: the net has no vocabulary", actual=word, hint=hint)
        state = self.vocabulary.find(word, f"word of the {self.name}")
        if state is None:
            raise unknown_name_error(f"word of the {self.name}", word, self.vocabulary)
        return state

    def encode_word(self, word: object) -> Tensor:
        """Encode a sentence of one word, `[1]` or `[1, *shape]`."""
        if self.states is not None:
            return torch.tensor([self.id(word)])
        return self.encode_vectors(to_reals(self.name, word)[None])

    def decode(self, ids: Iterable[int]) -> tuple[str, ...]:
        """The words of ids; numerals without a vocabulary."""
        return tuple(str(k) if self.vocabulary is None else self.vocabulary[k] for k in ids)

    def name_words(self, sentence: object, value: Tensor) -> tuple[str, ...]:
        """The names of the words of an encoded sentence: the words of the text, the words of ids, or numerals."""
        words, image = split_words(self.name, sentence), self.spec.tpm.image
        if words is not None:
            return tuple(words)
        if image is not None and len(value) == len(image.tokens):
            return image.tokens
        return self.decode(range(len(value)) if self.states is None else value.tolist())

    def check_length(self, words: int, *, is_prefix: bool = False) -> None:
        """Raise an error for a number of words that the net cannot take.

        Args:
            words: The number of words.
            is_prefix: Whether more words may follow; a number below `exact_length` is then valid.

        Raises:
            BNetError: There are more words than learned positions, or their number differs from the size of a mask
                table.
        """
        if self.exact_length is not None and (
            words > self.exact_length or (words < self.exact_length and not is_prefix)
        ):
            bound = "at most " if is_prefix else ""
            expected = f"{bound}{self.exact_length} words, the size of the net's mask table"
            raise BNetError(self.name, expected=expected, actual=f"{words} words")
        if self.max_length is not None and words > self.max_length:
            expected = f"at most {self.max_length} words, the number of learned positions"
            raise BNetError(self.name, expected=expected, actual=f"{words} words")

    def encode_vectors(self, vectors: object, subject: str | None = None) -> Tensor:
        """Encode vectors, or the patches of an image; `subject` is their name in messages."""
        subject = subject or self.name
        value, image = to_reals(subject, vectors), self.spec.tpm.image
        if image is not None and value.dim() != 2:
            value = image.patchify(value)
        if not value.dim() or tuple(value.shape[1:]) != self.spec.shape or not len(value):
            expected = f"vectors of shape (words, {', '.join(map(str, self.spec.shape))}) with at least one word"
            raise BNetError(subject, expected=expected, actual=f"shape {tuple(value.shape)}")
        if not bool(value.isfinite().all()):
            word = int((~value.isfinite()).flatten(1).any(1).nonzero()[0])
            raise BNetError(subject, expected="finite numbers", actual=f"a NaN or an infinite number at word {word}")
        return value

    def _make_vectors(self, words: Sequence[str]) -> Tensor:
        """The fixed vectors of words, for a net without a vocabulary."""
        is_image = self.spec.tpm.image is not None
        if is_image or len(self.spec.shape) != 1:
            image = "an image [channel, row, column], or its words as vectors (x=)"
            expected = image if is_image else f"values of shape {self.spec.shape} for each word (x=)"
            raise BNetError(self.name, expected=expected, actual=" ".join(words))
        return torch.stack([word_vector(word, self.spec.shape[0], self.seed) for word in words])


class WordCounter(WordEncoder):
    """Encodes the words of a stack without an input group as zeros `[word]`, because only their number matters.

    An example is a hidden Markov model, whose nodes at each word depend on no given value.
    """

    @property
    def states(self) -> int | None:
        return 0

    def encode(self, sentence: object) -> Tensor:
        """Encode one sentence (a text, or a list or an array with an entry for each word) as zeros `[word]`."""
        words = split_words(self.name, sentence)
        entries = to_reals(self.name, sentence) if words is None else torch.zeros(len(words))
        if not entries.dim() or not len(entries):
            raise BNetError(self.name, expected="a text, or a list with an entry for each word", actual=sentence)
        return torch.zeros(len(entries))


def build_word_counter(network: Network, stack: str) -> WordCounter | None:
    """The encoder of a stack without an input group for each word; None if the stack has such a group."""
    if any(spec.tpm.kind == "input" and spec.group.word_stack == stack for spec in network.specs):
        return None
    placeholder = NodeSpec(NodeGroup(-1, stack, "", None, (), stack), Given(states=1), (), (), (), "", "sentence", {})
    vocabulary, length = network.vocabularies.get(stack), _get_table_length(network, stack)
    return WordCounter(stack, placeholder, vocabulary, _get_max_words(network, stack), None, length, network.seed)


def word_encoder(network: Network, stack: str, given: Mapping[str, object] | None = None) -> WordEncoder | None:
    """The encoder of the words of a stack.

    Args:
        network: The net.
        stack: The name of the stack.
        given: The input groups, by name, whose values are given separately.

    Returns:
        The encoder for the stack's input group over words. Of several groups it is the discrete one; groups with a
        default value do not count. None if there is no such group.
    """
    candidates = [
        spec
        for spec in network.specs
        if spec.tpm.kind == "input" and spec.group.word_stack == stack and not spec.group.plates
    ]
    main = find_main_input([spec for spec in candidates if spec.group.name not in (given or {})])
    # Words are the value of a group with a default only if the net has no other group for them.
    if main is None or (main.tpm.default is not None and main is not find_main_input(candidates)):
        return None
    tokenizer = network.tokenizer if stack == network.graph.word_stacks[0] else None
    longest, vocabulary = _get_max_words(network, stack), network.vocabularies.get(main.group.stack)
    return WordEncoder(stack, main, vocabulary, longest, tokenizer, _get_table_length(network, stack), network.seed)


def find_main_input(specs: Sequence[NodeSpec]) -> NodeSpec | None:
    """The input group that takes the words of a stack: the discrete one of those without a default value."""
    needed = [m for m in specs if m.tpm.default is None]
    return next(iter([m for m in needed if m.tpm.is_index_valued] or needed or specs), None)


def _get_max_words(network: Network, stack: str) -> int | None:
    """The maximum number of words of a stack, the number of learned positions; None for no limit."""
    bounds = [m.tpm.max_words for m in network.specs if m.group.word_stack == stack and m.tpm.max_words is not None]
    return min(bounds, default=None)


def _get_table_length(network: Network, stack: str) -> int | None:
    """The number of words of a stack that a mask table requires; None if no mask is a table."""
    for spec in network.specs:
        for parent in spec.parents:
            if parent.reach.kind == "mask" and spec.group.word_stack == stack:
                return len(parent.reach.table)
            if parent.reach.kind == "mask" and network.specs[parent.index].group.word_stack == stack:
                return len(parent.reach.table[0])
    return None


def word_vector(word: str, dim: int, seed: int) -> Tensor:
    """The fixed vector of a word in a net without a vocabulary: standard normal, seeded by a hash of the word.

    >>> word_vector("cat", 4, 0).equal(word_vector("cat", 4, 0))
    True
    """
    digest = hashlib.sha256(f"{seed}/word/{word}".encode(errors="surrogatepass")).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(dim, generator=generator, dtype=torch.float32, device="cpu")


def format_sentence_label(stack: str) -> str:
    """The name of a stack's sentence in messages."""
    return f"sentence of stack {stack!r}" if stack else "sentence"


def split_words(subject: str, sentence: object) -> list[str] | None:
    """The words of a text, or of a list or an array of words; None for other types.

    Args:
        subject: The name of the sentence in messages.
        sentence: The sentence, of any type.

    Raises:
        BNetError: There are no words, or one is empty.

    >>> split_words("sentence", "the cat"), split_words("sentence", [0, 1])
    (['the', 'cat'], None)
    """
    words = sentence.split() if isinstance(sentence, str) else sentence
    words = words.tolist() if is_text_array(words) else words
    if not isinstance(words, Sequence) or isinstance(words, bytes):
        return None
    if not words:
        raise BNetError(subject, expected="at least one word", actual=sentence)
    if not all(isinstance(word, str) for word in words):
        return None
    if not all(words):
        raise BNetError(subject, expected="words that are not empty", actual=list(words))
    return list(words)


def is_text_array(value: object) -> TypeGuard[np.ndarray]:
    """True for an array of words or sentences."""
    return isinstance(value, np.ndarray) and value.dtype.kind == "U"


def to_integers(subject: str, value: object, expected: str = "a text, a list of words, or ids") -> Tensor:
    """Convert integers to an `int64` tensor; `subject` is their name in messages."""
    try:
        ids = copy_to_tensor(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as problem:
        raise BNetError(subject, expected=expected, actual=value) from problem
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise BNetError(subject, expected=expected, actual=value)
    return ids.long()


def to_reals(subject: str, value: object) -> Tensor:
    """Convert real numbers to a tensor of their floating type (integers: `float64`); `subject` is used in messages."""
    if value is None:
        raise BNetError(subject, expected="real numbers", actual=value)
    try:
        reals = copy_to_tensor(value if isinstance(value, Tensor) else np.asanyarray(value, dtype=np.float64))
    except (TypeError, ValueError, RuntimeError) as problem:
        raise BNetError(subject, expected="real numbers", actual=value) from problem
    if reals.is_complex() or reals.dtype == torch.bool:
        raise BNetError(subject, expected="real numbers", actual=str(reals.dtype))
    return reals if reals.is_floating_point() else reals.double()

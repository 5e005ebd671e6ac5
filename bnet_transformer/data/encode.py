"""Encode one sentence (text, ids, vectors or images) as tensors, and the values of `do` and evidence on its nodes."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_int, check_mapping
from bnet_transformer._core.naming import WORD
from bnet_transformer._core.stats import digest_words
from bnet_transformer._core.tensors import copy_to_tensor, is_dense
from bnet_transformer._core.tokens import Labels, Span, TokenizedText, Tokenizer, as_labels, is_text
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, EvidenceError, UnknownNameError, format_value, unknown_name_error
from bnet_transformer.graph import NodeFamily, find_family
from bnet_transformer.graph.template_graph import NodeGroup
from bnet_transformer.reference import GroundModel, find_readable_words
from bnet_transformer.tpm import Given

# --------------------------------------------------------------------------------------------------------------------
# Encode the words of one stack (text, lists of words, ids, vectors or images) as tensors.
#
# If the net has a tokenizer, `_core.tokens.Tokenizer` splits text first.


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


Tokens = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class EncodedSentence:
    """A sentence as tensors.

    Args:
        tokens: The names of the words of each stack.
        given: The value of each input group, `[*plates, word, *shape]`.
        tokenized: The output of the tokenizer, for each stack with text; stacks of words or ids have no entry.
        unnamed: The stacks whose words are vectors without names; their tokens are numerals.
    """

    tokens: Tokens
    given: dict[str, Tensor]
    tokenized: dict[str, TokenizedText] = field(default_factory=dict)
    unnamed: frozenset[str] = frozenset()

    @cached_property
    def word_counts(self) -> dict[str, int]:
        """The number of words of each stack."""
        return {stack: len(tokens) for stack, tokens in self.tokens.items()}

    def flag_special_tokens(self, network: Network) -> tuple[bool, ...]:
        """For each token of all stacks, whether it is a special token of the net's tokenizer."""
        flags: list[bool] = []
        tokenizer, first = network.tokenizer, next(iter(self.tokens), "")
        for stack, tokens in self.tokens.items():
            encoder = word_encoder(network, stack)
            spec = None if encoder is None else encoder.spec
            if stack in self.tokenized:
                flags += self.tokenized[stack].special
            elif spec and spec.tpm.is_index_valued and tokenizer and tokenizer.can_encode(stack, first):
                flags += tokenizer.special_tokens_mask(self.given[spec.group.name].tolist())
            else:
                is_image = spec is not None and spec.tpm.image is not None
                flags += [is_image and k == 0 for k in range(len(tokens))]
        return tuple(flags)

    def find_special_words(self, network: Network) -> dict[str, tuple[int, ...]]:
        """The indices of the special tokens of each stack that has some."""
        flags = iter(self.flag_special_tokens(network))
        words = {stack: tuple(k for k, _ in enumerate(tokens) if next(flags)) for stack, tokens in self.tokens.items()}
        return {stack: indices for stack, indices in words.items() if indices}

    def digest(self, network: Network) -> str:
        """A digest of the words of all stacks."""
        return digest_words(self.tokens, self.find_special_words(network))

    def flag_special_words(self, network: Network, stack: str) -> tuple[bool, ...]:
        """For each word of a stack, whether it is a special token."""
        special = self.find_special_words(network).get(stack, ())
        return tuple(k in special for k in range(len(self.tokens[stack])))

    def get_spans(self) -> tuple[Span | None, ...]:
        """For each token of all stacks, its character span in the text; None without a text."""
        spans: list[Span | None] = []
        for stack, tokens in self.tokens.items():
            spans += self.tokenized[stack].spans if stack in self.tokenized else [None] * len(tokens)
        return tuple(spans)

    def group_subwords(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the tokens of each full word, for all stacks in order."""
        groups: list[tuple[int, ...]] = []
        start = 0
        for stack, tokens in self.tokens.items():
            single = tuple((k,) for k in range(len(tokens)))
            by_word = self.tokenized[stack].groups if stack in self.tokenized else single
            groups += [tuple(start + k for k in group) for group in by_word]
            start += len(tokens)
        return tuple(groups)


def encode_sentence(
    network: Network,
    sentence: object = None,
    x: object = None,
    given: Mapping[str, object] | None = None,
    *,
    pair: object = None,
) -> EncodedSentence:
    """Encode a sentence.

    Args:
        network: The net; all its parameters have the same floating type. A net without words takes no sentence.
        sentence: A text, a list of words, ids, vectors or an image; a mapping from stack if the net has several. A net
            with a tokenizer uses it to encode text and lists of words.
        x: The words as vectors `[word, *shape]`; `sentence` may contain their names.
        given: The values of further input nodes, a mapping from node group to `[*plates, word, *shape]`.
        pair: A second sentence, which the tokenizer appends to the first.

    Returns:
        The sentence as tensors, on the device of the net.

    Raises:
        BNetError: A part is missing, has a wrong shape, or conflicts with another part.
        UnknownNameError: The net has no such stack, input or word.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(8, heads=2, slices=1, vocabulary=["the", "cat", "sat"])
    >>> encoded = encode_sentence(net.network, "the cat sat")
    >>> encoded.tokens, [value.shape for value in encoded.given.values()]
    ({'': ('the', 'cat', 'sat')}, [torch.Size([3])])
    """
    network.check_single_dtype()
    stacks, inputs = network.graph.word_stacks, [m.group.name for m in network.specs if m.tpm.kind == "input"]
    extra = dict(check_mapping("given", given))
    tokenized = _tokenize(network.tokenizer, sentence, pair, stacks, extra)
    for subject, value in (("sentence", sentence), ("x", x)):
        if value is not None and not stacks:
            hint = "Pass values of input nodes as given=, and values of other nodes by observe() or do()"
            raise BNetError(subject, expected="None: the net has no words", actual=format_value(value), hint=hint)
    text_by = {} if sentence is None else split_by_stack("sentence", sentence, stacks)
    x_by = {} if x is None else split_by_stack("x", x, stacks)
    text_by |= {stack: list(text.ids) for stack, text in tokenized.items()}
    for name in extra:
        if name not in inputs:
            raise unknown_name_error("given", name, inputs)
    tokens: Tokens = {}
    values: dict[str, Tensor] = {}
    for stack in stacks:
        tokens[stack], value = _encode_stack(network, stack, text_by.get(stack), x_by.get(stack), extra)
        values |= value
    tokens |= {stack: text.tokens for stack, text in tokenized.items()}
    unnamed = frozenset(s for s in stacks if s not in text_by or _is_numeric_table(text_by[s]))
    encoded = EncodedSentence(tokens, values, tokenized, unnamed)
    for spec in network.specs:
        if spec.tpm.kind == "input" and spec.group.name not in values:
            values[spec.group.name] = _encode_given(network, spec, extra, encoded.word_counts)
    for stack, words in text_by.items():
        _check_same_ids(network, stack, words, extra, values)
    check_word_counts(network, encoded.word_counts)
    values.update({name: value.to(network.device) for name, value in values.items()})
    return encoded


def _is_numeric_table(sentence: object) -> bool:
    """True for a table of numbers (vectors or an image), in contrast to words or ids."""
    if isinstance(sentence, Tensor | np.ndarray):
        return sentence.ndim > 1
    first = sentence[0] if isinstance(sentence, Sequence) and not isinstance(sentence, str) and sentence else None
    return (isinstance(first, Sequence) and not isinstance(first, str)) or getattr(first, "ndim", 0) > 0


def _encode_stack(
    network: Network, stack: str, words: object, x: object, extra: Mapping[str, object]
) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """The tokens of one stack, and the value of the input group that its words fill."""
    name, encoder = format_sentence_label(stack), word_encoder(network, stack, extra)
    if x is not None:
        if encoder is None or encoder.states is not None:
            expected, hint = "None, because the words of this net are ids", "Pass ids or text as the sentence"
            raise BNetError(f"x of stack {stack!r}" if stack else "x", expected=expected, hint=hint)
        if words is not None and encoder.spec.tpm.image is not None:
            raise BNetError(f"{name}: pass an image [channel, row, column] or its words as vectors (x=), not both")
        value = encoder.encode_vectors(x, "x").to(network.dtype)
        if not bool(value.isfinite().all()):  # the cast to the net's type may overflow
            raise BNetError("x", expected="finite numbers", actual=f"numbers out of the range of {network.dtype}")
        tokens = encoder.name_words(x if words is None else words, value)
        if len(tokens) != len(value):
            expected = f"{len(value)} words, one for each row of x"
            raise BNetError(name, expected=expected, actual=f"{len(tokens)} words")
        return tokens, {encoder.spec.group.name: value}
    if encoder is None and words is None:
        words = _number_words(network, stack, extra)
    if words is None:
        raise BNetError(f"{name}: the net requires a sentence of at least one word")
    if encoder is None:
        return _name_words(network, stack, words), {}
    value = encoder.encode(words)
    tokens = encoder.name_words(words, value)
    return tokens, {encoder.spec.group.name: value.to(network.dtype) if value.is_floating_point() else value}


def _name_words(network: Network, stack: str, words: object) -> tuple[str, ...]:
    """The tokens of a stack whose words fill no input group: its value is in `given`, or there is none.

    An integer is the number of words.
    """
    name, vocabulary = format_sentence_label(stack), network.vocabularies.get(stack)
    if isinstance(words, int) and not isinstance(words, bool):
        return tuple(map(str, range(check_int(name, words))))
    tokens = split_words(name, words)
    if tokens is not None:
        return tuple(tokens)
    ids = to_integers(name, words).flatten().tolist()
    if not ids:
        raise BNetError(name, expected="at least one word", actual=format_value(words))
    return tuple(vocabulary[i] if vocabulary and 0 <= i < len(vocabulary) else str(i) for i in ids)


def _tokenize(
    tokenizer: Tokenizer | None, sentence: object, pair: object, stacks: Sequence[str], extra: dict[str, object]
) -> dict[str, TokenizedText]:
    """The output of the tokenizer for each stack with text; the segment ids of words are added to `extra`."""
    is_multi_stack = len(stacks) > 1
    if tokenizer is None or is_multi_stack or not is_text(sentence):
        if pair is not None:
            expected = "None: only a net with a tokenizer and one stack takes pairs, as text"
            raise BNetError("pair", expected=expected, actual=pair)
        if tokenizer is not None and is_multi_stack and isinstance(sentence, Mapping):
            return tokenizer.encode_stacks(sentence, stacks)
        return {}
    text = tokenizer.encode(sentence, pair)
    if tokenizer.segments_role is not None:
        extra.setdefault(tokenizer.segments_role, list(text.segments))
    return {stacks[0]: text}


def split_by_stack(
    subject: str, value: object, stacks: Sequence[str], given_stack: str | None = None
) -> dict[str, Any]:
    """A value for each stack, from a mapping or from the value of the only stack except `given_stack`."""
    if isinstance(value, Mapping):
        for stack in value:
            if stack not in stacks:
                raise unknown_name_error("stack", stack, stacks)
        return dict(value)
    open_stacks = [stack for stack in stacks if stack != given_stack] or stacks
    if len(open_stacks) != 1:
        names = ", ".join(repr(stack) for stack in stacks)
        raise BNetError(subject, expected=f"a mapping from stack ({names})", actual=format_value(value))
    return {open_stacks[0]: value}


def _number_words(network: Network, stack: str, extra: Mapping[str, object]) -> list[str] | None:
    """Numerals as words, if a stack has values of input nodes but no words; None if it has no values either."""
    for name, value in extra.items():
        group = network.get_spec(name).group
        if isinstance(value, Tensor) and not is_dense(value):
            continue  # `_encode_given` raises the error
        shape = tuple(getattr(value, "shape", ())) or np.asarray(value, dtype=object).shape
        if group.word_stack == stack and len(shape) > len(group.plates):
            return [str(i) for i in range(shape[len(group.plates)])]
    return None


def _check_same_ids(
    network: Network, stack: str, words: object, extra: Mapping[str, object], values: Mapping[str, Tensor]
) -> None:
    """Raise an error if the ids of the words differ from those in `given`."""
    encoder = word_encoder(network, stack)
    if encoder is None or encoder.states is None or word_encoder(network, stack, extra) is not None:
        return
    name = encoder.spec.group.name
    if encoder.vocabulary is not None or split_words(encoder.name, words) is None:
        ids = encoder.encode(words).tolist()
        if ids != values[name].tolist():
            expected, hint = f"{ids}, the ids of the words of the sentence", "Pass the words or given=, not both"
            raise BNetError(f"given[{name!r}]", expected=expected, actual=values[name].tolist(), hint=hint)


def _encode_given(
    network: Network, spec: NodeSpec, given: Mapping[str, object], word_counts: Mapping[str, int]
) -> Tensor:
    """The value of an input group from `given`, or its default."""
    group, default = spec.group, spec.tpm.default
    sizes = [network.graph.plate_sizes[plate] for plate in group.plates]
    sizes += [] if group.word_stack is None else [word_counts[group.word_stack]]
    if group.name not in given and default is not None:
        return torch.full(sizes, default)
    if group.name not in given:
        hint = f"Pass given={{{group.name!r}: ...}}"
        raise BNetError(f"{group.name}: the sentence has no value for this input node", hint=hint)
    shape = (*sizes, *spec.shape)
    value = given[group.name]
    if spec.tpm.is_index_valued:
        tensor = to_integers(group.name, value, "integers")
        if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < (spec.tpm.states or 0):
            raise BNetError(group.name, expected=f"states from 0 to {(spec.tpm.states or 0) - 1}", actual=value)
    else:
        tensor = _to_finite_tensor(group.name, value, network.dtype, BNetError)
    if tuple(tensor.shape) != shape:
        raise BNetError(group.name, expected=f"a value of shape {shape}", actual=f"shape {tuple(tensor.shape)}")
    return tensor


def expand_names(model: GroundModel, subject: str, values: Mapping[str, object]) -> dict[int, object]:
    """A mapping from node to value, for `do` and for evidence.

    A value of several nodes applies to each of them, or has one entry for each: `[slice, *plates, word, *shape]`, with
    the dims of `NodeFamily.array`.

    Args:
        model: The ground model of the sentence.
        subject: `"do"` or `"evidence"`, for messages.
        values: The values by name or pattern.

    Raises:
        EvidenceError: A node has two values.
    """
    result: dict[int, object] = {}
    for name, value in values.items():
        family = find_family(model.ground, name)
        entries = None if family.is_node else _split_value(model, family, value)
        for k, node in enumerate(family.nodes):
            if node in result:
                fault = f"{subject}: {name!r} sets {model.ground.name(node)}, which has another value already"
                raise EvidenceError(fault, hint="Name each node once, or set it in a second call")
            result[node] = value if entries is None else entries[k]
    return result


def _split_value(model: GroundModel, family: NodeFamily, value: object) -> Sequence[object] | None:
    """The value of each node of a family, from an array or a nested list; None for a value of all nodes."""
    if not isinstance(value, Tensor | np.ndarray | list | tuple):
        return None
    try:
        sizes = tuple(value.shape) if isinstance(value, Tensor | np.ndarray) else np.shape(value)
    except (ValueError, TypeError, RuntimeError):  # a ragged list, or one of objects without a shape
        return None
    shape = model.spec(family.nodes[0]).shape
    if len(sizes) in (0, len(shape)):  # a number is the value of every entry
        return None
    axes = family.array.shape
    if sizes[: len(axes)] != axes:
        hint = suggest_do(model.network, value, shape) if isinstance(value, Tensor) else None
        expected = f"a value of shape {shape} for all nodes, or of shape {(*axes, *shape)}"
        raise EvidenceError(family.name, expected=expected, actual=f"shape {sizes}", hint=hint)
    entries: list[Any] = [value]
    for _ in axes:
        entries = [entry for part in entries for entry in part]
    return entries


def encode_value(model: GroundModel, node: int, value: object, *, evidence: bool) -> Tensor:
    """The tensor of a value of `do` or evidence on a node: a state, a label, or a value of the node's shape.

    In `do`, a number is the value of every entry of a node with real values.
    """
    name = model.ground.name(node)
    group = model.ground.group_of(node)
    spec = model.network.specs[group.index]
    discrete = spec.tpm.kind == "discrete" or spec.tpm.is_index_valued
    if isinstance(value, str):
        value = _get_label_state(model.network, spec, name, value)
    if discrete and (spec.tpm.is_index_valued or _is_index(value)):
        count = model.count_states(node)
        state = operator.index(value) if _is_index(value) else -1  # type: ignore[arg-type]
        if not 0 <= state < count:
            raise EvidenceError(name, expected=f"a state from 0 to {count - 1}", actual=value)
        allowed_states = range(count) if evidence or spec.tpm.states is not None else find_readable_words(model, node)
        if state not in allowed_states:
            expected = f"a word to which it may attend: {list(allowed_states)}"
            raise EvidenceError(name, expected=expected, actual=value)
        return torch.tensor(state, device=model.network.device)
    tensor = _to_finite_tensor(name, value, model.network.dtype, EvidenceError).to(model.network.device)
    if tensor.dim() == 0 and not (evidence or discrete or isinstance(value, bool | np.bool_)):
        return tensor.expand(spec.shape).clone()
    if tuple(tensor.shape) != spec.shape:
        suggestion = suggest_do(model.network, tensor, spec.shape)
        actual = f"shape {tuple(tensor.shape)}"
        raise EvidenceError(name, expected=f"a value of shape {spec.shape}", actual=actual, hint=suggestion)
    return tensor


def split_stack_texts(network: Network, text: str) -> object:
    """Return the argument of `net.sentence` for one text, in which `|` separates the texts of several stacks.

    Returns:
        The text, None for a net without words, or the texts of stacks by name.
    """
    stacks = network.graph.word_stacks
    if not stacks and text:
        raise BNetError("the net has no words, so it takes no sentence", hint="Leave out the sentence")
    if len(stacks) < 2:
        return text or None
    parts = [part.strip() for part in text.split("|")]
    if len(parts) != len(stacks):
        expected = f"{len(stacks)} texts separated by |, one for each of the stacks {', '.join(stacks)}"
        raise BNetError("sentence", expected=expected, actual=text)
    return dict(zip(stacks, parts, strict=True))


def suggest_do(network: Network, value: Tensor, shape: tuple[int, ...]) -> str | None:
    """Suggest `do` on a choice if a value has a leading dimension of its states; None for any other value."""
    graph = network.graph
    choices = [m.group.name for m in network.specs if m.tpm.kind == "discrete" and graph.out_edges[m.group.index]]
    has_choice_dim = value.dim() > len(shape) and tuple(value.shape[value.dim() - len(shape) :]) == shape
    if not choices or not has_choice_dim:
        return None
    return f"The value has a dimension for the states of a latent choice. Take it after do({choices[0]}=...)"


def merge_assignments(subject: str, nodes: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a mapping from nodes to values with keyword arguments; a node in both is an error."""
    for name in nodes:
        if name in named:
            raise EvidenceError(f"{subject}: {name} is in the mapping and also a keyword argument")
    return {**nodes, **named}


def check_word_counts(network: Network, word_counts: Mapping[str, int]) -> None:
    """Raise an error if a word has no word to read, or if there are more words than learned positions."""
    for spec in network.specs:
        group = spec.group
        n = group.count_words(word_counts)
        longest = spec.tpm.max_words
        if longest is not None and n > longest:
            expected = f"at most {longest} words, the number of its learned positions"
            raise BNetError(group.name, expected=expected, actual=f"{n} words")
        for parent in spec.parents:
            parent_group = network.specs[parent.index].group
            if parent_group.word_stack is not None:
                parent.reach.check_word_counts(
                    n, word_counts[parent_group.word_stack], f"{parent_group.name} -> {group.name}, "
                )
                empty = parent.reach.first_empty_row(n, word_counts[parent_group.word_stack])
                if WORD in parent.over and empty is not None and not spec.tpm.can_read_empty:
                    expected = f"at least one word of {parent_group.name} to read"
                    actual = f"no word (reach {parent.reach}, {word_counts[parent_group.word_stack]} words)"
                    raise BNetError(f"word {empty} of {group.name}", expected=expected, actual=actual)


def _get_label_state(network: Network, spec: NodeSpec, name: str, label: str) -> int:
    """The state of a label, from the labels of the TPM or from the vocabulary of the stack."""
    labels = getattr(spec.tpm, "labels", None)
    readout = spec.group.step == network.graph.slices.get(spec.group.stack) and spec.tpm.kind == "discrete"
    if labels is None and (readout or spec.tpm.kind == "input"):
        labels = network.vocabularies.get(spec.group.stack)
    if labels is None or len(labels) != spec.tpm.states:
        raise EvidenceError(name, expected="an integer or a tensor, because its states have no labels", actual=label)
    state = as_labels(labels).find(label, name, EvidenceError)
    if state is None:
        error: UnknownNameError = unknown_name_error("", label, labels)
        raise EvidenceError(name, expected="one of its labels", actual=label, allowed=error.allowed)
    return state


def _is_index(value: object) -> bool:
    """True for an integer: of Python, of numpy, or a tensor with a single integer."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not (value.is_floating_point() or value.is_complex()) and value.dtype != torch.bool
    return hasattr(value, "__index__") and not isinstance(value, bool | np.bool_ | np.ndarray | type)


def _to_finite_tensor(name: str, value: object, dtype: torch.dtype, error: type[BNetError]) -> Tensor:
    """A value as a tensor of finite numbers."""
    try:
        tensor = to_reals(name, value).to(dtype)
    except BNetError as problem:
        raise error(name, **problem.parts) from problem
    if not bool(tensor.isfinite().all()):
        raise error(name, expected="finite numbers", actual="NaN or infinity")
    return tensor

"""Pretrained tokenizers: from text to ids, spans, special tokens, and the word of each token."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from bnet_transformer._core.tokens import Labels, Spelling, Token
from bnet_transformer.errors import BNetError

Span = tuple[int, int]


@dataclass(frozen=True)
class TokenizedText:
    """The output of a tokenizer for a text or a pair of texts, with one entry for each token.

    Attributes:
        tokens: The tokens, with the text that a reader expects.
        ids: Their ids in the vocabulary.
        spans: The character offsets of each token in its text; None for tokens that the tokenizer adds. A list of words
            is a text with single spaces between the words.
        special: Whether each token is special: added by the tokenizer, or a special token of the text. The unknown
            token is not special.
        segments: The segment of each token: 0 for the first text, 1 for the second.
        groups: The indices of the tokens of each word.
    """

    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    spans: tuple[Span | None, ...]
    special: tuple[bool, ...]
    segments: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    def shift_right(self, start_id: int, token: str) -> TokenizedText:
        """The inputs of a decoder: a start token (special, and its own word), then all tokens except the last."""
        last = len(self.ids) - 1
        groups = (tuple(k + 1 for k in group if k < last) for group in self.groups)
        return TokenizedText(
            (token, *self.tokens[:-1]),
            (start_id, *self.ids[:-1]),
            (None, *self.spans[:-1]),
            (True, *self.special[:-1]),
            (0, *self.segments[:-1]),
            ((0,), *(group for group in groups if group)),
        )


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer from a `tokenizer.json`. It never truncates or pads, even if the file requests it.

    Args:
        json_text: The text of the file.
        segments_role: The role of the node for the segments; None (default) for none.
        start_token_id: The id of the first token of a decoder's inputs; None (default) if it is unknown.
        first_stack_only: Whether the tokenizer is only for the first stack, because other stacks have another
            vocabulary. Default False.
    """

    json_text: str = field(repr=False)
    segments_role: str | None = None
    start_token_id: int | None = None
    first_stack_only: bool = False

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer of the library `tokenizers`."""
        try:
            from tokenizers import Tokenizer as HFTokenizer
        except ImportError as error:
            hint = 'Install it with pip install "bnet-transformer[pretrained]", or pass ids instead of text'
            expected = "the package tokenizers, which this net needs for text"
            raise BNetError("tokenizer", expected=expected, hint=hint) from error
        with _wrap_tokenizer_errors("tokenizer", "a tokenizer.json"):
            tokenizer = HFTokenizer.from_str(self.json_text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """The ids of the special tokens, without the unknown token."""
        added, unknown = self._tokenizer.get_added_tokens_decoder(), getattr(self._tokenizer.model, "unk_token", None)
        return frozenset(k for k, token in added.items() if token.special and token.content != unknown)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token."""
        return dict(self._tokenizer.get_vocab())

    @cached_property
    def _spelling(self) -> tuple[Spelling, frozenset[str]]:
        """The spelling of tokens, and the added tokens, which are spelled as in a text."""
        with _wrap_tokenizer_errors("tokenizer", "a tokenizer.json"):
            content = json.loads(self.json_text)
            added = frozenset(token["content"] for token in content.get("added_tokens") or ())
            return Spelling.of_tokenizer(content), added

    @cached_property
    def _vocabularies(self) -> dict[tuple[str, ...], Labels]:
        """The vocabularies that `read_vocabulary` has read."""
        return {}

    def read_vocabulary(self, raws: Iterable[str]) -> Labels:
        """All tokens of a vocabulary, which is read once for all nets with this tokenizer."""
        key = tuple(raws)
        if key not in self._vocabularies:
            self._vocabularies[key] = self.read_tokens(key)
        return self._vocabularies[key]

    def read_tokens(self, raws: Iterable[str]) -> Labels:
        """Raw tokens of the vocabulary with the text that a reader expects."""
        spelling, added = self._spelling
        return Labels(Token(raw, raw if raw in added else spelling.decode(raw)) for raw in raws)

    def can_encode(self, stack: str, first_stack: str) -> bool:
        """True if the tokenizer is valid for the words of `stack`."""
        return stack == first_stack or not self.first_stack_only

    def special_tokens_mask(self, ids: Sequence[int]) -> tuple[bool, ...]:
        """Whether each id is that of a special token."""
        return tuple(k in self._special_ids for k in ids)

    def encode(self, text_or_words: object, pair: object = None) -> TokenizedText:
        """The tokens of a text or list of words, and optionally of a second one, with the model's special tokens."""
        given = [_check_text("sentence", text_or_words)] + ([] if pair is None else [_check_text("pair", pair)])
        if len({isinstance(text, str) for text in given}) > 1:
            raise BNetError(
                "pair", expected="a second sentence of the same form (text, or a list of words)", actual=pair
            )
        texts = [text if isinstance(text, str) else " ".join(text) for text in given]
        with _wrap_tokenizer_errors("sentence", "text that the tokenizer can encode"):
            encoding = self._tokenizer.encode(*texts)
        if not encoding.ids:
            raise BNetError("sentence", expected="at least one token", actual=text_or_words)
        flags = zip(encoding.special_tokens_mask, self.special_tokens_mask(encoding.ids), strict=True)
        special = tuple(bool(mask) or named for mask, named in flags)
        of_text = encoding.sequence_ids
        spans = tuple(
            None if text is None else _strip_leading_space(texts[text], at)
            for text, at in zip(of_text, encoding.offsets, strict=True)
        )
        split, single = encoding.word_ids, list(special)
        if not isinstance(text_or_words, str):
            single = [span is None for span in spans]
            ends = [list(accumulate(len(word) + 1 for word in words)) for words in given]
            split = [  # the word in which a token begins, from the ends of the words
                None if span is None else min(bisect_right(ends[k], span[0]), len(ends[k]) - 1)
                for k, span in zip(of_text, spans, strict=True)
            ]
        return TokenizedText(
            self.read_tokens(encoding.tokens),
            tuple(encoding.ids),
            spans,
            special,
            tuple(encoding.type_ids),
            _group_by_word(list(zip(of_text, split, strict=True)), single),
        )

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, with special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def encode_stacks(self, sentences: Mapping[str, object], stacks: Sequence[str]) -> dict[str, TokenizedText]:
        """The tokens of the stacks with text; those of later stacks are outputs, and are shifted right."""
        tokenized = {}
        for stack, sentence in sentences.items():
            if not is_text(sentence):
                continue
            if not self.can_encode(stack, stacks[0]):
                expected = f"ids, because the tokenizer is only for stack {stacks[0]!r}"
                raise BNetError(f"sentence of stack {stack!r}", expected=expected, actual=sentence)
            tokenized[stack] = self.encode(sentence)
            if stack == stacks[0]:
                continue
            if self.start_token_id is None:
                expected = "ids, because the start token of the decoder is unknown"
                raise BNetError(f"sentence of stack {stack!r}", expected=expected, actual=sentence)
            start = self.read_tokens([self._tokenizer.id_to_token(self.start_token_id) or "[start]"])
            tokenized[stack] = tokenized[stack].shift_right(self.start_token_id, *start)
        return tokenized


@contextmanager
def _wrap_tokenizer_errors(subject: str, expected: str) -> Iterator[None]:
    """Re-raise errors of the library `tokenizers`, and panics of its Rust code, as `BNetError`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BNetError(subject, expected=expected, actual=str(error)) from error


def is_text(value: object) -> bool:
    """True for a string, and for a list that starts with a string."""
    return isinstance(value, str) or (isinstance(value, Sequence) and bool(value) and isinstance(value[0], str))


def _check_text(subject: str, value: object) -> str | list[str]:
    """The value as a text or a list of words."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(word, str) and word for word in value):
        return list(value)
    raise BNetError(subject, expected="text, or a list of words that are not empty", actual=value)


def _strip_leading_space(text: str, span: Span) -> Span:
    """The span of a token without leading spaces."""
    start, end = span
    while start < end and text[start].isspace():
        start += 1
    return start, end


def _group_by_word(
    word_ids: Sequence[tuple[int | None, int | None]], is_single: Sequence[bool]
) -> tuple[tuple[int, ...], ...]:
    """The indices of the tokens of each word, in order; a token with `is_single` is its own word."""
    groups: list[list[int]] = []
    before: object = None
    for k, (word, single) in enumerate(zip(word_ids, is_single, strict=True)):
        if single or None in word or word != before:
            groups.append([])
        groups[-1].append(k)
        before = None if single else word
    return tuple(map(tuple, groups))

"""Text as the tokens of a pretrained model, by its own tokenizer: ids, spans, special tokens, the words they are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bnet_transformer.errors import BNetError

Span = tuple[int, int]


@dataclass(frozen=True)
class Told:
    """What a tokenizer makes of a text, or of a pair of texts: one entry for each token.

    A span is where the token stands in its text (a list of words is joined by spaces), None for a special token;
    `segments` tells of which text it is, `groups` of which word of that text.
    """

    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    spans: tuple[Span | None, ...]
    special: tuple[bool, ...]
    segments: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


class Tokenizer:
    """A tokenizer, from the text of a `tokenizer.json`; `segments` is the role of the node that takes the segments.

    Nothing is cut off and nothing is padded, whatever the file says.
    """

    def __init__(self, text: str, segments: str | None = None) -> None:
        self.text = text
        self.segments = segments

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer as Theirs
        except ImportError as error:
            wanted = "the package tokenizers, which reads text for this net"
            allowed = 'pip install "bnet-transformer[pretrained]", or ids'
            raise BNetError("tokenizer", expected=wanted, got="none", allowed=allowed) from error
        try:
            found = Theirs.from_str(self.text)
        except Exception as error:  # the only kind that the package raises
            raise BNetError("tokenizer", expected="a tokenizer.json", got=str(error)) from error
        found.no_truncation()
        found.no_padding()
        return found

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(k for k, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token."""
        return dict(self._tokenizer.get_vocab())

    def is_special(self, ids: Sequence[int]) -> tuple[bool, ...]:
        """Which ids are those of special tokens."""
        return tuple(k in self._special for k in ids)

    def read(self, said: object, pair: object = None) -> Told:
        """The tokens of a text or a list of words (and of a second one), special tokens where the model has them."""
        texts = [_text("sentence", said)] + ([] if pair is None else [_text("pair", pair)])
        if len({isinstance(text, str) for text in texts}) > 1:
            raise BNetError("pair", expected="a second sentence, text or words as the first", got=pair)
        found = self._tokenizer.encode(*texts, is_pretokenized=not isinstance(texts[0], str))
        if not found.ids:
            raise BNetError("sentence", expected="at least one token", got=said)
        named = self.is_special(found.ids)
        special = tuple(bool(a) or b for a, b in zip(found.special_tokens_mask, named, strict=True))
        where = zip(found.sequence_ids, found.word_ids, found.offsets, special, strict=True)
        spans = tuple(None if s or text is None else _span(texts[text], word, at) for text, word, at, s in where)
        return Told(
            tuple(found.tokens),
            tuple(found.ids),
            spans,
            special,
            tuple(found.type_ids),
            _grouped(list(zip(found.sequence_ids, found.word_ids, strict=True)), special),
        )


def _text(what: str, said: object) -> str | list[str]:
    if isinstance(said, str):
        return said
    if isinstance(said, Sequence) and said and all(isinstance(word, str) and word for word in said):
        return list(said)
    raise BNetError(what, expected="text, or a list of words, none empty", got=said)


def _span(text: str | list[str], word: int, at: Span) -> Span:
    """Where a token stands in its text, without the space before it."""
    start, end = at
    whole = text if isinstance(text, str) else text[word]
    while start < end and whole[start].isspace():
        start += 1
    shift = 0 if isinstance(text, str) else sum(len(before) + 1 for before in text[:word])
    return start + shift, end + shift


def _grouped(words: Sequence[tuple[int | None, int | None]], special: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, in order; a special token is a word of its own."""
    found: list[list[int]] = []
    before: object = None
    for k, (word, alone) in enumerate(zip(words, special, strict=True)):
        if alone or None in word or word != before:
            found.append([])
        found[-1].append(k)
        before = None if alone else word
    return tuple(map(tuple, found))

"""Text as the tokens of a pretrained model, by its own tokenizer: ids, spans, special tokens, the words they are of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from bnet_transformer.errors import BNetError

Span = tuple[int, int]


@dataclass(frozen=True)
class TokenizedText:
    """What a tokenizer makes of a text, or of a pair of texts: one entry for each token.

    A span is where the token stands in its text, None for one that the tokenizer puts around it. A list of words is
    the text that they make with single spaces between them. A token is special where the tokenizer put it there, or the
    text says one of its special tokens; the unknown token stands for a piece of the text, and is not. `segments` tells
    of which text a token is, `groups` of which word of that text.
    """

    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    spans: tuple[Span | None, ...]
    special: tuple[bool, ...]
    segments: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    def shifted(self, start: int, token: str) -> TokenizedText:
        """Shifted right by one: a start token, special and a word of its own, then all but the last."""
        last = len(self.ids) - 1
        groups = (tuple(k + 1 for k in group if k < last) for group in self.groups)
        return TokenizedText(
            (token, *self.tokens[:-1]),
            (start, *self.ids[:-1]),
            (None, *self.spans[:-1]),
            (True, *self.special[:-1]),
            (0, *self.segments[:-1]),
            ((0,), *(group for group in groups if group)),
        )


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer, from the text of a `tokenizer.json`; `segments` is the role of the node that takes the segments,
    `start` the token with which the words of a decoder start. `apart`: it reads the words of the first stack alone, as
    others have another vocabulary.

    Nothing is cut off and nothing is padded, whatever the file says.
    """

    text: str = field(repr=False)
    segments: str | None = None
    start: int | None = None
    apart: bool = False

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer as Theirs
        except ImportError as error:
            needed = "the package tokenizers, which reads text for this net"
            allowed = 'pip install "bnet-transformer[pretrained]", or ids'
            raise BNetError("tokenizer", expected=needed, got="none", allowed=allowed) from error
        with _theirs("tokenizer", "a tokenizer.json"):
            tokenizer = Theirs.from_str(self.text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _special(self) -> frozenset[int]:
        added, unknown = self._tokenizer.get_added_tokens_decoder(), getattr(self._tokenizer.model, "unk_token", None)
        return frozenset(k for k, token in added.items() if token.special and token.content != unknown)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token."""
        return dict(self._tokenizer.get_vocab())

    def reads(self, stack: str, first: str) -> bool:
        """True where the words of a stack are of its vocabulary."""
        return stack == first or not self.apart

    def is_special(self, ids: Sequence[int]) -> tuple[bool, ...]:
        """Which ids are those of special tokens."""
        return tuple(k in self._special for k in ids)

    def read(self, text_or_words: object, pair: object = None) -> TokenizedText:
        """The tokens of a text or a list of words (and of a second one), special tokens where the model has them."""
        given = [_text("sentence", text_or_words)] + ([] if pair is None else [_text("pair", pair)])
        if len({isinstance(text, str) for text in given}) > 1:
            raise BNetError("pair", expected="a second sentence, text or words as the first", got=pair)
        texts = [text if isinstance(text, str) else " ".join(text) for text in given]
        with _theirs("sentence", "text that its tokenizer reads"):
            encoding = self._tokenizer.encode(*texts)
        if not encoding.ids:
            raise BNetError("sentence", expected="at least one token", got=text_or_words)
        flags = zip(encoding.special_tokens_mask, self.is_special(encoding.ids), strict=True)
        special = tuple(bool(mask) or named for mask, named in flags)
        of_text = encoding.sequence_ids
        spans = tuple(
            None if text is None else _span(texts[text], at) for text, at in zip(of_text, encoding.offsets, strict=True)
        )
        split, single = encoding.word_ids, list(special)
        if not isinstance(text_or_words, str):
            single = [span is None for span in spans]
            ends = [list(accumulate(len(word) + 1 for word in words)) for words in given]
            split = [  # the word in which a token begins, by where words end
                None if span is None else min(bisect_right(ends[k], span[0]), len(ends[k]) - 1)
                for k, span in zip(of_text, spans, strict=True)
            ]
        return TokenizedText(
            tuple(encoding.tokens),
            tuple(encoding.ids),
            spans,
            special,
            tuple(encoding.type_ids),
            _grouped(list(zip(of_text, split, strict=True)), single),
        )

    def read_each(self, sentences: Mapping[str, object], stacks: Sequence[str]) -> dict[str, TokenizedText]:
        """The tokens of each stack that is told text or words; all but the first are told outputs, shifted right."""
        tokenized = {}
        for stack, each in sentences.items():
            if not is_text(each):
                continue
            if not self.reads(stack, stacks[0]):
                wanted = f"ids: the tokenizer is that of stack {stacks[0]!r}, whose words are others"
                raise BNetError(f"sentence of stack {stack!r}", expected=wanted, got=each)
            tokenized[stack] = self.read(each)
            if stack == stacks[0]:
                continue
            if self.start is None:
                wanted = "ids: the model does not say with which token they start"
                raise BNetError(f"sentence of stack {stack!r}", expected=wanted, got=each)
            start = self._tokenizer.id_to_token(self.start) or "[start]"
            tokenized[stack] = tokenized[stack].shifted(self.start, start)
        return tokenized


@contextmanager
def _theirs(what: str, wanted: str) -> Iterator[None]:
    """What the package refuses, as a word that its vocabulary lacks, is told as ours; so is a panic of its Rust."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BNetError(what, expected=wanted, got=str(error)) from error


def is_text(value: object) -> bool:
    """True for a text, and for a list that starts with one."""
    return isinstance(value, str) or (isinstance(value, Sequence) and bool(value) and isinstance(value[0], str))


def _text(what: str, value: object) -> str | list[str]:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(word, str) and word for word in value):
        return list(value)
    raise BNetError(what, expected="text, or a list of words, none empty", got=value)


def _span(text: str, at: Span) -> Span:
    """Where a token stands in its text, without the space before it."""
    start, end = at
    while start < end and text[start].isspace():
        start += 1
    return start, end


def _grouped(words: Sequence[tuple[int | None, int | None]], alone: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, in order; a token that stands alone is a word of its own."""
    groups: list[list[int]] = []
    before: object = None
    for k, (word, single) in enumerate(zip(words, alone, strict=True)):
        if single or None in word or word != before:
            groups.append([])
        groups[-1].append(k)
        before = None if single else word
    return tuple(map(tuple, groups))

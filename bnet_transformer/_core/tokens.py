"""Tokens: the text that a reader expects of them, the token that a text names, and pretrained tokenizers.

A vocabulary contains tokens in the spelling of its tokenizer: bytes as characters (`Ġcaf`, `Ã©`), a space as `▁`, a
piece of a word as `##s`. A `Token` is a string with the decoded text, and has the raw token as attribute.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

from bnet_transformer.errors import BNetError, format_value

PIECE = "·"  # before a piece that continues a word
WHITE_SPACE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})
JOINERS = "\u200c\u200d"  # between characters outside of ASCII they shape letters and emoji
SELECTORS = tuple(map(chr, range(0xFE00, 0xFE10)))  # they select a variant of the character before
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a token of SentencePiece for one byte
MAX_CANDIDATES = 6


class Token(str):
    """The text of a token, as a reader expects it, with the token of the vocabulary.

    A leading space is not shown. In other places a space at the start, a line break and a tab are `␣`, `↵` and `⇥`.
    Any other character that is not visible is its number in hexadecimal: `‹1b›`, and `‹00ad›` from U+0080.

    Args:
        raw: The token in the vocabulary.
        decoded: The decoded token, with its leading space.
        text: The string; None (default) for the decoded token with visible white space and control characters.

    >>> Token("Ġcat", " cat"), Token("Ġcat", " cat").raw, Token("Ġ", " "), Token("Ċ", "\\n"), Token("ě", "\\x1b")
    ('cat', 'Ġcat', '␣', '↵', '‹1b›')
    """

    raw: str
    decoded: str

    def __new__(cls, raw: str, decoded: str, text: str | None = None) -> Token:
        token = super().__new__(cls, _show_text(decoded) if text is None else text)
        token.raw, token.decoded = raw, decoded
        return token

    def __getnewargs__(self) -> tuple[str, str, str]:  # type: ignore[override]
        return self.raw, self.decoded, str(self)


def _show_text(decoded: str) -> str:
    """The text of a decoded token without one leading space, in which all characters are visible."""
    text = decoded.removeprefix(" ")
    letters = text.lstrip(" ")
    if not letters.strip():
        return _show_hidden(decoded.translate(WHITE_SPACE))
    return _show_hidden("␣" * (len(text) - len(letters)) + letters.replace("\n", "↵").replace("\t", "⇥"))


def _show_hidden(text: str) -> str:
    """The text in which each character that is not visible is its number in hexadecimal."""
    if text.isprintable() and not text.startswith(SELECTORS):
        return text
    characters = zip(["", *text], text, [*text[1:], ""], strict=False)
    return "".join(
        letter if _is_visible(before, letter, after) else f"‹{ord(letter):0{2 if letter.isascii() else 4}x}›"
        for before, letter, after in characters
    )


def _is_visible(before: str, letter: str, after: str) -> bool:
    """Whether a character is visible or changes its neighbours, of which one that is missing is empty."""
    if letter in JOINERS:
        return all(neighbour > "\x7f" and neighbour.isprintable() for neighbour in (before, after))
    return letter.isprintable() and (before != "" or letter not in SELECTORS)


@dataclass(frozen=True)
class Spelling:
    """How a tokenizer spells text in its tokens.

    Args:
        has_bytes: Whether each character of a token is a byte, as in GPT-2 and Llama 3.
        has_byte_tokens: Whether `<0xE4>` is a token for one byte, as in Llama 2.
        space: The character for a space, as `▁` of SentencePiece; empty for none.
        prefix: The start of a piece that continues a word, as `##` of BERT; empty for none.
        suffix: The end of a piece that ends a word, as `</w>` of CLIP; empty for none.
    """

    has_bytes: bool = False
    has_byte_tokens: bool = False
    space: str = ""
    prefix: str = ""
    suffix: str = ""

    @classmethod
    def of_tokenizer(cls, content: Mapping[str, Any]) -> Spelling:
        """The spelling of a tokenizer.json."""
        parts = [*_iter_parts(content.get("pre_tokenizer")), *_iter_parts(content.get("decoder"))]
        kinds, model = {part.get("type") for part in parts}, content.get("model") or {}
        spaces = [part.get("replacement", "▁") for part in parts if part.get("type") == "Metaspace"]
        for part in parts:
            if part.get("type") == "Replace" and part.get("content") == " " and isinstance(part.get("pattern"), dict):
                spaces += [part["pattern"].get("String", "")]
        return cls(
            "ByteLevel" in kinds,
            "ByteFallback" in kinds or bool(model.get("byte_fallback")),
            next(iter(spaces), ""),
            model.get("continuing_subword_prefix") or "",
            model.get("end_of_word_suffix") or "",
        )

    def decode(self, raw: str) -> str:
        """The text of a token; bytes that are no whole character are `‹e4›`.

        >>> Spelling(has_bytes=True).decode("ĠcafÃ©"), Spelling(has_bytes=True).decode("ä½")
        (' café', '‹e4›‹bd›')
        >>> Spelling(space="▁", has_byte_tokens=True).decode("▁cat"), Spelling(prefix="##").decode("##s")
        (' cat', '·s')
        """
        byte = BYTE_TOKEN.fullmatch(raw) if self.has_byte_tokens else None
        if byte is not None:
            return _decode_bytes(bytes.fromhex(byte[1]))
        if self.prefix and raw.startswith(self.prefix) and raw != self.prefix:
            return PIECE + raw.removeprefix(self.prefix)
        text = raw.removesuffix(self.suffix) or raw
        letters, table = _map_bytes()
        if self.has_bytes and letters.issuperset(text):
            return _decode_bytes(text.translate(table).encode("latin-1"))
        return text.replace(self.space, " ") if self.space else text


def _iter_parts(part: Any) -> Iterable[dict[str, Any]]:
    """The parts of a pre-tokenizer or decoder, which may be a sequence."""
    if isinstance(part, dict):
        yield part
        for inner in [*part.get("pretokenizers", ()), *part.get("decoders", ())]:
            yield from _iter_parts(inner)


def _decode_bytes(data: bytes) -> str:
    """The text of bytes; each byte that belongs to no whole character is shown in hexadecimal."""
    # `surrogateescape` maps each such byte to one character, U+DC80 plus its lower seven bits.
    text = data.decode("utf-8", "surrogateescape")
    if text.isprintable():
        return text
    return re.sub("[\udc80-\udcff]", lambda match: f"‹{ord(match[0]) - 0xDC00:02x}›", text)


@cache
def _map_bytes() -> tuple[frozenset[str], dict[int, int]]:
    """The characters of a byte-level vocabulary (Radford et al. 2019), and the byte of each character whose number is
    not that of its byte: the bytes that are not printable in Latin-1 are characters from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {256 + k: byte for k, byte in enumerate(byte for byte in range(256) if byte not in printable)}
    return frozenset(map(chr, [*printable, *table])), table


class Labels(tuple[str, ...]):
    """The labels of states, in which a text is found quickly.

    >>> labels = Labels([Token("Mary", "Mary"), Token("ĠMary", " Mary"), Token("ĠJohn", " John")])
    >>> labels.find("John"), labels.find(" Mary"), labels.find("ĠMary"), labels.find("Tom")
    (2, 1, 1, None)
    """

    @cached_property
    def _states_by_text(self) -> dict[str, list[int]]:
        """The states of each text: as shown, and as decoded."""
        states: dict[str, list[int]] = defaultdict(list)
        for state, label in enumerate(self):
            states[label].append(state)
            if isinstance(label, Token) and label.decoded != label:
                states[label.decoded].append(state)
        return dict(states)

    @cached_property
    def _states_by_spaced_text(self) -> dict[str, list[int]]:
        """The states of each text with a visible leading space."""
        return _group_states(map(_show_leading_space, self))

    @cached_property
    def _states_by_raw(self) -> dict[str, list[int]]:
        """The states of each raw token."""
        return _group_states(map(get_raw, self))

    def find_all(self, label: str) -> list[int]:
        """The states that a label names: by its raw token if it is a `Token`, else by text, else by raw token."""
        if isinstance(label, Token) and label.raw in self._states_by_raw:
            return self._states_by_raw[label.raw]
        if label in self._states_by_text:
            return self._states_by_text[label]
        spaced = self._states_by_spaced_text if label.startswith("␣") else {}
        return spaced.get(label) or self._states_by_raw.get(label, [])

    def find(self, label: str, subject: str = "label", error: type[BNetError] = BNetError) -> int | None:
        """The state that a label names; None if there is none.

        Args:
            label: The text of a token, also with its leading space, or the raw token. A text of one token that is the
                raw token of another one names the first; a `Token` is always named by its raw token.
            subject: The name of the label in messages.
            error: The class of the error if several tokens have this text.
        """
        states = self.find_all(label)
        if len(states) > 1:
            candidates = [f"{get_raw(self[state])!r} (id {state})" for state in states]
            more = ", …" if len(candidates) > MAX_CANDIDATES else ""
            names = [(k, text) for k in states for text in (_show_leading_space(self[k]), get_decoded(self[k]))]
            unique = [f'"{text}"' for k, text in names if text.isprintable() and self.find_all(text) == [k]]
            hint = "Pass the id of one of them" + (
                f", or the leading space: {' or '.join(unique[:2])}" if unique else ""
            )
            raise error(
                subject,
                expected="the text of one token",
                actual=format_value(label),
                allowed=", ".join(candidates[:MAX_CANDIDATES]) + more,
                hint=hint,
            )
        return states[0] if states else None


def _group_states(names: Iterable[str]) -> dict[str, list[int]]:
    """The states of each name, from a name for each state."""
    states: dict[str, list[int]] = defaultdict(list)
    for state, name in enumerate(names):
        states[name].append(state)
    return dict(states)


def get_raw(label: str) -> str:
    """The raw token of a label; a label without one is returned."""
    return label.raw if isinstance(label, Token) else str(label)


def get_decoded(label: str) -> str:
    """The text of a label with its leading space."""
    return label.decoded if isinstance(label, Token) else str(label)


def _show_leading_space(label: str) -> str:
    """The text of a label with a visible leading space."""
    is_spaced = get_decoded(label).startswith(" ") and not label.startswith("␣")
    return f"␣{label}" if is_spaced else str(label)


def distinguish(labels: Iterable[str]) -> list[str]:
    """The labels of a list, in which different tokens with the same text get different texts.

    A leading space is then shown; tokens that this does not distinguish get their raw token in parentheses.

    >>> distinguish([Token("Mary", "Mary"), Token("ĠMary", " Mary"), Token("ĠJohn", " John")])
    ['Mary', '␣Mary', 'John']
    """
    result = list(labels)
    for show in (_show_leading_space, lambda label: f"{label} ({get_raw(label)})"):
        raws: dict[str, set[str]] = defaultdict(set)
        for label in result:
            raws[str(label)].add(get_raw(label))
        for k, label in enumerate(result):
            if isinstance(label, Token) and len(raws[str(label)]) > 1:
                result[k] = Token(label.raw, label.decoded, show(label))
    return result


def name_columns(nodes: Iterable[str], reserved: Collection[str]) -> list[str]:
    """The columns of nodes in a table with other columns: a node with the name of one of these is marked.

    >>> name_columns(["rain", "share"], ["log_prob", "share"])
    ['rain', 'share (node)']
    """
    return [f"{name} (node)" if name in reserved else name for name in nodes]


def as_labels(labels: Iterable[str]) -> Labels:
    """The same labels in a form in which a text is found quickly."""
    return labels if isinstance(labels, Labels) else Labels(labels)


# --------------------------------------------------------------------------------------------------------------------
# Pretrained tokenizers: from text to ids, spans, special tokens, and the word of each token.


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

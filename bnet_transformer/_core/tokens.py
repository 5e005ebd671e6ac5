"""Tokens of a vocabulary with the text that a reader expects, and the search for the token that a text names.

A vocabulary contains tokens in the spelling of its tokenizer: bytes as characters (`Ġcaf`, `Ã©`), a space as `▁`, a
piece of a word as `##s`. A `Token` is a string with the decoded text, and has the raw token as attribute.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
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

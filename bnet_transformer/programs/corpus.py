"""A corpus of known programs, as data: for each the program, its sentences, and a rule for pairs of sentences.

Among them are the mechanisms that are difficult for searches: an OR of two heads, a backup that is read only where the
first path is missing, a copy that is never read, two writers that cancel, and a net with a norm.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from bnet_transformer._core.checks import check_int, check_names, check_seed
from bnet_transformer.errors import BNetError
from bnet_transformer.programs.compiled import (
    CONSTANT,
    Compiled,
    Pair,
    TrueEdges,
    Words,
    compile,
    is_defined,
    list_sentences,
    true_edges,
)
from bnet_transformer.programs.language import (
    Selector,
    SOp,
    Value,
    aggregate,
    fallback,
    indices,
    linear_sequence_map,
    map,
    select,
    selector_width,
    sequence_map,
    tokens,
)

MAX_DRAWS = 10_000


@dataclass(frozen=True, eq=False)
class KnownProgram:
    """A program of the corpus.

    Attributes:
        name: The name, such as `"induction"`.
        description: What the program computes at each word.
        build: The function that builds the program.
        vocabulary: The tokens.
        max_words: The number of words of its sentences.
        causal: Whether the net is causal.
        norm: The norm of the net, or None.
        constant: The constant coordinate with a norm.
        rule: The rule for pairs: `"resample"`, two independent sentences, or `"replace"`, a sentence and the same one
            with one word replaced. The outputs of a pair differ.
    """

    name: str
    description: str
    build: Callable[[], SOp]
    vocabulary: Sequence[Value]
    max_words: int
    causal: bool = False
    norm: str | None = None
    constant: float = CONSTANT
    rule: str = "resample"

    @cached_property
    def compiled(self) -> Compiled:
        """The compiled program."""
        return compile(
            self.build(),
            vocabulary=self.vocabulary,
            max_words=self.max_words,
            causal=self.causal,
            norm=self.norm,
            constant=self.constant,
        )

    @cached_property
    def truth(self) -> TrueEdges:
        """The true circuit, from pairs of sentences of `max_words` words."""
        return true_edges(self.compiled)

    def list_pairs(self, count: int = 64, *, seed: int = 0) -> list[Pair]:
        """Pairs of a clean and a corrupt sentence by the rule of the program; their outputs differ.

        Args:
            count: The number of different pairs, at most 64. Fewer are returned if there are no more.
            seed: The seed of the draws. Default 0.

        Returns:
            The pairs of lists of tokens, all with `max_words` words.

        Raises:
            BNetError: The count is not between 1 and 64.

        >>> from bnet_transformer import programs
        >>> programs.get_program("shift").list_pairs(1)
        [(('b', 'b', 'a', 'b', 'c'), ('b', 'b', 'b', 'b', 'b'))]
        """
        if check_int("count", count) > 64:
            raise BNetError("count", expected="at most 64 pairs", actual=count)
        generator = random.Random(check_seed(seed))
        pairs: dict[Pair, None] = {}
        outputs: dict[Words, Words | None] = {}  # None where the program is not defined
        for _ in range(MAX_DRAWS):
            clean = self._draw(generator)
            corrupt = self._replace_word(clean, generator) if self.rule == "replace" else self._draw(generator)
            for words in {clean, corrupt} - outputs.keys():
                outputs[words] = self.compiled.run(words) if is_defined(self.compiled, words) else None
            if None not in (outputs[clean], outputs[corrupt]) and outputs[clean] != outputs[corrupt]:
                pairs[clean, corrupt] = None
            if len(pairs) == count:
                break
        return [*pairs]

    def list_sentences(self, *, seed: int = 0) -> list[Words]:
        """The sentences of all lengths for which the program is defined; from more than 5000 of a length, a sample.

        Args:
            seed: The seed of the sample. Default 0.

        Returns:
            The sentences as lists of tokens.
        """
        generator = random.Random(check_seed(seed))
        lengths = range(1, self.max_words + 1)
        return [words for length in lengths for words in list_sentences(self.compiled, length, generator)[0]]

    def _draw(self, generator: random.Random) -> Words:
        """A random sentence."""
        return tuple(generator.choice(self.vocabulary) for _ in range(self.max_words))

    def _replace_word(self, words: Words, generator: random.Random) -> Words:
        """A sentence with one word replaced by another one."""
        i = generator.randrange(len(words))
        candidates = [token for token in self.vocabulary if token != words[i]]
        return (*words[:i], generator.choice(candidates), *words[i + 1 :])


def _shifted(offset: int) -> Selector:
    """The selector of the word at a distance before each word."""
    return select(indices, indices, lambda j, i: j == i - offset)


def _is_token(token: Value, name: str) -> SOp:
    """1 where a word is this token; numeric."""
    return map(lambda t: t == token, tokens, encoding="numeric", name=name)


def _average(values: SOp, name: str) -> SOp:
    """The mean over the words up to each word."""
    return aggregate(select(indices, indices, operator.le), values, name=name)


def shift() -> SOp:
    """The previous token."""
    return aggregate(_shifted(1), tokens, name="previous")


def length() -> SOp:
    """The number of words."""
    return selector_width(select(tokens, tokens, lambda key, query: True), name="length")


def reverse() -> SOp:
    """The tokens in reverse order (Weiss et al. 2021)."""
    opposite = sequence_map(lambda n, i: n - i - 1, length(), indices, name="opposite")
    return aggregate(select(indices, opposite, operator.eq), tokens, name="reverse")


def induction() -> SOp:
    """The token after an earlier occurrence of the same token (Olsson et al. 2022)."""
    previous = shift()
    return aggregate(select(previous, tokens, operator.eq), tokens, name="next")


def histogram() -> SOp:
    """The number of words with the same token (Weiss et al. 2021)."""
    return selector_width(select(tokens, tokens, operator.eq), name="count")


def double_histogram() -> SOp:
    """The number of words with the same count."""
    count = histogram()
    return selector_width(select(count, count, operator.eq), name="double_count")


def fraction() -> SOp:
    """The fraction of "x" among the words up to each word (Weiss et al. 2021)."""
    return _average(_is_token("x", "is_x"), "fraction")


def sort() -> SOp:
    """The tokens in increasing order, each once at the first position of its run (Weiss et al. 2021)."""
    target = selector_width(select(tokens, tokens, operator.lt), name="target")
    return aggregate(select(target, indices, operator.eq), tokens, name="sorted")


def first_occurrence() -> SOp:
    """Whether no earlier word has the same token."""
    earlier = select(tokens, tokens, operator.eq) & select(indices, indices, operator.lt)
    return map(lambda n: n == 0, selector_width(earlier, name="num_earlier"), name="is_first")


def balance() -> SOp:
    """The fraction of "(" minus that of ")" among the words up to each word (Weiss et al. 2021)."""
    opened, closed = _average(_is_token("(", "is_open"), "opened"), _average(_is_token(")", "is_close"), "closed")
    return linear_sequence_map(opened, closed, 1, -1, name="balance")


def dyck() -> SOp:
    """Whether the parentheses of the sentence are balanced (Dyck-1; Weiss et al. 2021)."""
    value = balance()
    is_negative = map(lambda b: b < 0, value, encoding="numeric", name="is_negative")
    everywhere = select(tokens, tokens, lambda key, query: True)
    has_negative = map(lambda share: share > 0, aggregate(everywhere, is_negative), name="has_negative")
    is_zero = map(lambda b: b == 0, value, name="is_zero")
    last = map(lambda n: n - 1, length(), name="last")
    ends_at_zero = aggregate(select(indices, last, operator.eq), is_zero, name="ends_at_zero")
    return sequence_map(lambda zero, negative: zero and not negative, ends_at_zero, has_negative, name="is_balanced")


def is_mode() -> SOp:
    """Whether no other token is more frequent than that of the word."""
    count = histogram()
    more_frequent = selector_width(select(count, count, operator.gt), name="num_more")
    return map(lambda n: n == 0, more_frequent, name="is_most_frequent")


def lookup() -> SOp:
    """The token at the position that the word names: each token is a pointer."""
    return aggregate(select(indices, tokens, operator.eq), tokens, name="value")


def either() -> SOp:
    """Whether one of the two previous words is "x": an OR of two heads."""
    one, two = (aggregate(_shifted(k), tokens, name=f"previous{k}") for k in (1, 2))
    return sequence_map(lambda s, t: "x" in (s, t), one, two, name="either")


def backup() -> SOp:
    """The token after "#", or the first token where no word follows "#"."""
    marked = aggregate(select(shift(), tokens, lambda key, query: key == "#"), tokens, name="marked")
    first = aggregate(select(indices, indices, lambda j, i: j == 0), tokens, name="first")
    return fallback(marked, first, name="answer")


def redundant() -> SOp:
    """The previous token, by two heads, of which the second is read only where the first has no value: nowhere."""
    one, two = (aggregate(_shifted(1), tokens, name=f"copy{k}") for k in (1, 2))
    return fallback(one, two, name="previous")


def cancelling() -> SOp:
    """1 where the word is "x", plus the fraction of "x" by one head, minus the same fraction by another head."""
    is_x = _is_token("x", "is_x")
    one, two = (_average(is_x, f"fraction{k}") for k in (1, 2))
    return linear_sequence_map(is_x, linear_sequence_map(one, two, 1, -1, name="difference"), name="total")


def prefix_majority() -> SOp:
    """Whether more than half of the words up to each word are "x"."""
    return map(lambda share: share > 0.5, fraction(), name="is_majority")


CORPUS: tuple[KnownProgram, ...] = (
    KnownProgram("shift", "the previous token", shift, "abc", 5),
    KnownProgram("reverse", "the tokens in reverse order", reverse, "abc", 5),
    KnownProgram("induction", "the token after an earlier equal token", induction, "abcd", 5, causal=True),
    KnownProgram("histogram", "the number of equal tokens", histogram, "abc", 5),
    KnownProgram("double histogram", "the number of words with an equal count", double_histogram, "abc", 5),
    KnownProgram("fraction", 'the fraction of "x" so far', fraction, "xab", 6, causal=True),
    KnownProgram("sort", "the tokens in increasing order", sort, (1, 2, 3, 4), 4),
    KnownProgram("first occurrence", "whether no earlier token is equal", first_occurrence, "abc", 5),
    KnownProgram("balance", 'the fraction of "(" minus that of ")" so far', balance, "()a", 5),
    KnownProgram("dyck", "whether the parentheses are balanced", dyck, "()", 6, rule="replace"),
    KnownProgram("mode", "whether no token is more frequent", is_mode, "abc", 5),
    KnownProgram("lookup", "the token at the position that the token names", lookup, (0, 1, 2, 3), 4),
    KnownProgram("either", 'whether one of the two previous words is "x"', either, "xab", 5, causal=True),
    KnownProgram("backup", 'the token after "#", else the first token', backup, "ab#", 5),
    KnownProgram("redundant", "the previous token, by two heads", redundant, "abc", 5),
    KnownProgram("cancelling", 'whether the word is "x", with two heads that cancel', cancelling, "xab", 5),
    KnownProgram(
        "induction, norm", "the token after an earlier equal token", induction, "abcd", 5, True, "rms", constant=3.0
    ),
    KnownProgram("majority, norm", 'whether most words so far are "x"', prefix_majority, "xab", 6, norm="rms"),
)


def get_program(name: str) -> KnownProgram:
    """A program of the corpus.

    Args:
        name: Its name.

    Returns:
        The program.

    Raises:
        UnknownNameError: The corpus has no program of this name.

    >>> from bnet_transformer import programs
    >>> programs.get_program("histogram").compiled.run("abca")
    (2, 1, 1, 2)
    """
    by_name = {known.name: known for known in CORPUS}
    check_names("program", [name], by_name)
    return by_name[name]

"""The errors of the package. A message names its subject, what was expected, the invalid value, and what to do."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

INVISIBLE_CHARACTERS = re.compile(
    r"[^\S \n]|[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ud800-\udfff\ufeff]"
)
MAX_EXACT_COUNT = 10**15  # the digits of larger numbers are not readable


class NotGiven(Enum):
    """The type of `NOT_GIVEN`; its member stays the same object when an error is pickled."""

    NOT_GIVEN = "not given"


NOT_GIVEN = NotGiven.NOT_GIVEN  # no value: the message has no "got"


class BNetError(ValueError):
    """Invalid input; the base class of all errors of the package, and a `ValueError`.

    The message has the form "subject: expected ...; got ...; allowed: .... Hint."

    Attributes:
        subject: The argument, node or file; if `expected` is None, the whole first sentence of the message.
        expected: The valid input, as a noun phrase.
        actual: The invalid value, or a description of it; `NOT_GIVEN` if the message has no "got".
        allowed: The valid values, or near matches.
        hint: What to do, as a sentence without its full stop.

    >>> raise BNetError("slices", expected="an integer of at least 1", actual=0)
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.BNetError: slices: expected an integer of at least 1; got 0
    """

    subject: str
    expected: str | None
    actual: object
    allowed: str | None
    hint: str | None

    def __init__(
        self,
        subject: str,
        *,
        expected: str | None = None,
        actual: object = NOT_GIVEN,
        allowed: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.subject = subject
        self.expected = expected
        self.actual = actual
        self.allowed = allowed
        self.hint = hint
        # Pyro's trace rebuilds an error from its text only; then `expected` is None.
        message = subject if expected is None else f"{subject}: expected {expected}"
        message += "" if actual is NOT_GIVEN else f"; got {format_value(actual)}"
        message += f"; allowed: {allowed}" if allowed else ""
        super().__init__(f"{message}. {hint}." if hint else message)

    @property
    def parts(self) -> dict[str, Any]:
        """The message after its subject, as keyword arguments that create the error for another subject or type."""
        return {"expected": self.expected, "actual": self.actual, "allowed": self.allowed, "hint": self.hint}

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickle, (type(self), self.args, self.__dict__)


@dataclass(frozen=True)
class DeclarationFault:
    """One fault of a declaration.

    Attributes:
        node: The name of the node.
        expected: The valid declaration, as a noun phrase.
        actual: The invalid part of the declaration; empty if something is missing.
        part: The part of the node, such as `"parent x_0"`; empty for the node itself.
    """

    node: str
    expected: str
    actual: str = ""
    part: str = ""

    def __str__(self) -> str:
        subject = f"{self.node}, {self.part}" if self.part else self.node
        return f"{subject}: expected {self.expected}" + (f"; got {self.actual}" if self.actual else "")


class DeclarationError(BNetError):
    """A declaration with faults; the message lists all of them.

    Attributes:
        faults: The faults, each with its node, what was expected, and the invalid part.

    >>> import bnet_transformer as bt
    >>> x = bt.Node("x", bt.tpm.Given(4), plates=["word"])
    >>> bt.BNet(bt.Declaration([bt.Stack([bt.Node("x", bt.tpm.Linear(), ["W", "x"], ["word"])], prologue=[x])]))
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.DeclarationError: ...
    """

    faults: tuple[DeclarationFault, ...]

    def __init__(self, faults: Iterable[DeclarationFault]) -> None:
        self.faults = tuple(faults)
        count = f"{len(self.faults)} fault" + ("s" if len(self.faults) != 1 else "")
        super().__init__("declaration", expected="a valid declaration", actual=count)
        self.args = ("\n  ".join([f"the declaration has {count}:", *map(str, self.faults)]),)


class UnknownNameError(BNetError):
    """A name that does not exist; the message lists near matches.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> s["q_0_9"]
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.UnknownNameError: node: expected a node q_slice_word; got 'q_0_9'; allowed: q_0_0 to q_0_2
    """


class EvidenceError(BNetError):
    """Evidence, or a value of `do`, that is invalid for its node or has probability 0.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> s.observe(c=2)
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.EvidenceError: c: ...
    """


class UnsupportedError(BNetError):
    """A valid request that a method cannot answer for the structure of this net; the message names an alternative.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat"], observe=bt.tpm.Categorical(2))
    >>> bt.circuit(net.sentence("the cat"), net.sentence("cat the"), metric={"y_1": ("the", "cat")}, threshold=0.1)
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.UnsupportedError: ...
    """


class BudgetError(BNetError):
    """A request beyond a budget of states, nodes, arrows or bytes; the message gives the count and an alternative.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> s.graph(limit=10)
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.BudgetError: ...
    """


class FileError(BNetError):
    """A file that is missing or corrupt, has an unsupported version, or names an untrusted class.

    >>> import bnet_transformer as bt
    >>> bt.load("nowhere.safetensors")
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.FileError: ...
    """


def format_value(value: object, width: int = 160) -> str:
    """A value as text of at most `width` characters for a message.

    A string is shown without quotation marks, unless it is empty or has invisible characters; other values by `repr`.
    """
    is_plain = isinstance(value, str) and value.strip() and not INVISIBLE_CHARACTERS.search(value)
    text = str(value) if is_plain else _safe_repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"


def format_count(count: int) -> str:
    """A number of states or table entries as text; a number of at least 10^15 by its order of magnitude.

    Python raises an error for the text of an integer of more than 4300 digits, such as the number of joint states of
    thousands of choices.

    >>> format_count(2**12), format_count(2**20000)
    ('4,096', 'about 10^6021')
    """
    return f"{count:,}" if count < MAX_EXACT_COUNT else f"about 10^{math.log10(count):.0f}"


def _safe_repr(value: object) -> str:
    """The `repr` of a value, or its type if `repr` fails, as for deeply nested lists and very long integers."""
    try:
        return repr(value)
    except Exception:
        return f"a value of type {type(value).__name__}, which cannot be shown"


# Of near matches, as the ratio of equal letters. "caption" and "attention", which mean different things, have 0.63.
MIN_SIMILARITY = 0.65
MAX_LISTED = 20  # known names in the error for a name without near matches, such as all options of a picture


def unknown_name_error(
    subject: str, name: object, names: Iterable[str], *, hint: str | None = None
) -> UnknownNameError:
    """The error for a `name` that is not in `names`, with the near matches.

    >>> print(unknown_name_error("node", "q_0_9", ["q_0_0", "q_0_1", "token"]))
    node: expected a known name; got 'q_0_9'; allowed: near matches are q_0_1, q_0_0
    """
    known = [item or "''" for item in dict.fromkeys(names)]
    matches = difflib.get_close_matches(
        (name if isinstance(name, str) else _safe_repr(name))[:200], known, n=4, cutoff=MIN_SIMILARITY
    )
    if matches:
        allowed = "near matches are " + ", ".join(matches)
    else:
        allowed = ", ".join(known[:MAX_LISTED]) + (f", … ({len(known)} in all)" if len(known) > MAX_LISTED else "")
    allowed = allowed or "no name exists"
    return UnknownNameError(
        subject, expected="a known name", actual=format_value(_safe_repr(name)), allowed=allowed, hint=hint
    )


def _unpickle(cls: type[BNetError], args: tuple[object, ...], state: dict[str, object]) -> BNetError:
    """Unpickle an error without a call of its constructor; worker processes send their errors to the parent process."""
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error

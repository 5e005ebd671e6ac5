"""The one family of errors: each says what was expected, what came, and what is allowed."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class BNetError(ValueError):
    """Bad input, told as expected / got / allowed.

    >>> raise BNetError("slices", expected="a whole number of at least 1", got=0)
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.BNetError: slices: expected a whole number of at least 1; got 0
    """

    def __init__(
        self, what: str, *, expected: str | None = None, got: object = None, allowed: str | None = None
    ) -> None:
        self.what = what
        self.expected = expected
        self.got = got
        self.allowed = allowed
        tail = f"; allowed: {allowed}" if allowed else ""
        if expected is None:  # the whole message: Pyro's trace makes an error anew from its text
            super().__init__(what)
            return
        super().__init__(f"{what}: expected {expected}; got {shown(got)}{tail}")

    def __reduce__(self) -> tuple[object, ...]:
        return _revive, (type(self), self.args, self.__dict__)


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with one node of a declaration."""

    node: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.node}: expected {self.expected}; got {self.got}"


class DeclarationError(BNetError):
    """A declaration with faults: all of them, each with node, expected and got (`.faults`).

    >>> import bnet_transformer as bt
    >>> x = bt.Node("x", bt.tpm.Given(4), plates=["word"])
    >>> bt.BNet(bt.Declaration([bt.Stack([bt.Node("x", bt.tpm.Linear(), ["W", "x"], ["word"])], prologue=[x])]))
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.DeclarationError: ...
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        count = f"{len(self.faults)} fault" + ("s" if len(self.faults) != 1 else "")
        super().__init__("declaration", expected="a sound declaration", got=count)
        self.args = ("\n  ".join([f"the declaration has {count}:", *map(str, self.faults)]),)


class UnknownNameError(BNetError):
    """A name that nothing has; near matches are listed.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> s["q_0_9"]
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.UnknownNameError: node: expected a node q_slice_word; got 'q_0_9'; allowed: q_0_0 to q_0_2
    """


class EvidenceError(BNetError):
    """Evidence, or a `do`, that the node cannot take, or that is impossible.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> s.observe(c=2)
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.EvidenceError: c: ...
    """


class ReadingError(BNetError):
    """A sound question that one reading of a net cannot answer for its structure; says which can.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat"], observe=bt.tpm.Categorical(2))
    >>> bt.circuit(net.sentence("the cat"), net.sentence("cat the"), metric={"y_1": ("the", "cat")}, threshold=0.1)
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.ReadingError: ...
    """


class BudgetError(BNetError):
    """More states, nodes or arrows than the stated budget; says the count and the way out.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> s.graph(limit=10)
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.BudgetError: ...
    """


class FileError(BNetError):
    """A file that is missing, corrupt, of another version, or that asks for a stranger's code.

    >>> import bnet_transformer as bt
    >>> bt.load("nowhere.safetensors")
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.FileError: ...
    """


def shown(value: object, width: int = 160) -> str:
    """`value` as it stands in a message: strings as they are, the rest by repr, neither of them long."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"


def unknown(what: str, name: object, names: Iterable[str]) -> UnknownNameError:
    """The error for a `name` that is none of `names`, with the near ones.

    >>> print(unknown("node", "q_0_9", ["q_0_0", "q_0_1", "token"]))
    node: expected a known name; got 'q_0_9'; allowed: near matches are q_0_1, q_0_0
    """
    known = list(dict.fromkeys(names))
    near = difflib.get_close_matches(str(name)[:200], known, n=4, cutoff=0.5)
    if near:
        allowed = "near matches are " + ", ".join(near)
    else:
        allowed = ", ".join(known[:12]) + (f", … ({len(known)} in all)" if len(known) > 12 else "")
    return UnknownNameError(
        what, expected="a known name", got=shown(repr(name)), allowed=allowed or "nothing: there are none"
    )


def whole(what: str, value: object, *, least: int = 1) -> int:
    """`value` as a whole number of at least `least`, or the error that says so."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least:
        raise BNetError(what, expected=f"a whole number of at least {least}", got=value)
    return number


def seed_of(value: object) -> int:
    """`value` as a seed that every generator takes, or the error that says so."""
    seed = whole("seed", value, least=0)
    if seed >= 2**63:
        raise BNetError("seed", expected="a whole number below 2^63", got=value)
    return seed


def listed(what: str, value: object, kind: type) -> tuple[Any, ...]:
    """`value` as a tuple of `kind`, or the error that says so."""
    try:
        things: tuple[Any, ...] | None = (
            None if isinstance(value, str | bytes) else tuple(value)  # type: ignore[arg-type]
        )
    except TypeError:
        things = None
    if things is None or not all(isinstance(thing, kind) for thing in things):
        raise BNetError(what, expected=f"a list of {kind.__name__}", got=value)
    return things


def mapping(what: str, value: object) -> Mapping[str, Any]:
    """`value` as a mapping from strings (empty for None), or the error that says so."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise BNetError(what, expected="a mapping from names", got=value)
    return value


def number(what: str, value: object, *, above: float | None = None) -> float:
    """A finite number, above a bound where one is given."""
    wanted = "a finite number" + ("" if above is None else f" above {above:g}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BNetError(what, expected=wanted, got=value)
    if not abs(float(value)) < float("inf") or (above is not None and not value > above):
        raise BNetError(what, expected=wanted, got=value)
    return float(value)


def one_of(what: str, value: object, options: Iterable[object]) -> None:
    """Refuse a `value` that is none of `options`."""
    listed = tuple(options)
    if not any(value is option or (type(value) is type(option) and value == option) for option in listed):
        allowed = ", ".join(repr(option) for option in listed)
        raise BNetError(what, expected="one of the allowed values", got=value, allowed=allowed)


def _revive(kind: type[BNetError], args: tuple[object, ...], state: dict[str, object]) -> BNetError:
    """Unpickle an error without asking its constructor (workers send errors home)."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error

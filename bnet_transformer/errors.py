"""The one family of errors: each says what was expected, what came, and what is allowed."""

from __future__ import annotations

import difflib
import operator
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from inspect import isfunction
from numbers import Real
from typing import Any, TypeVar

T = TypeVar("T")
UNSEEN = re.compile(r"[^\S \n]|[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ud800-\udfff\ufeff]")
OUT_OF_MEMORY = re.compile("OutOfMemoryError|can't allocate memory|not enough memory|bad_alloc|out of memory")


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
    """`value` as it stands in a message: words as they are, by repr what a terminal does not show; not long."""
    plain = isinstance(value, str) and value.strip() and not UNSEEN.search(value)
    text = str(value) if plain else _spelled(value)
    return text if len(text) <= width else text[: width - 1] + "…"


def _spelled(value: object) -> str:
    """The repr of a value, or what it is where it has none: too deep a list, too long a number, a stranger's class."""
    try:
        return repr(value)
    except Exception:
        return f"a value of type {type(value).__name__}, which cannot be shown"


def unknown(what: str, name: object, names: Iterable[str]) -> UnknownNameError:
    """The error for a `name` that is none of `names`, with the near ones.

    >>> print(unknown("node", "q_0_9", ["q_0_0", "q_0_1", "token"]))
    node: expected a known name; got 'q_0_9'; allowed: near matches are q_0_1, q_0_0
    """
    known = [each or "''" for each in dict.fromkeys(names)]
    near = difflib.get_close_matches((name if isinstance(name, str) else _spelled(name))[:200], known, n=4, cutoff=0.5)
    if near:
        allowed = "near matches are " + ", ".join(near)
    else:
        allowed = ", ".join(known[:12]) + (f", … ({len(known)} in all)" if len(known) > 12 else "")
    return UnknownNameError(
        what, expected="a known name", got=shown(_spelled(name)), allowed=allowed or "nothing: there are none"
    )


def check_names(what: str, told: Iterable[str], names: Collection[str]) -> None:
    """Refuse what is none of these names, with the near ones."""
    for name in told:
        if name not in names:
            raise unknown(what, name, names)


def whole(what: str, value: object, *, least: int = 1) -> int:
    """`value` as a whole number of at least `least`, or the error that says so."""
    answer = str(getattr(value, "dtype", "")).endswith("bool") or isinstance(value, bool)
    try:
        number = None if answer or getattr(value, "ndim", 0) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        number = None
    if number is None or number < least or number.bit_length() > 1024:  # no float holds more
        most = "" if number is None or number < least else ", below 2^1024"
        raise BNetError(what, expected=f"a whole number of at least {least}{most}", got=value)
    return number


def seed_of(value: object) -> int:
    """`value` as a seed that every generator takes, or the error that says so."""
    seed = whole("seed", value, least=0)
    if seed >= 2**63:
        raise BNetError("seed", expected="a whole number below 2^63", got=value)
    return seed


def listed(what: str, value: object, kind: type, read: Callable[[Any], Any] | None = None) -> tuple[Any, ...]:
    """`value` as a tuple of `kind`, each entry as it is `read`, or the error that says so."""
    things: list[Any] = []
    try:
        for thing in None if isinstance(value, str | bytes | Mapping) else value:  # type: ignore[attr-defined]
            things.append(thing if read is None else read(thing))
            if not isinstance(things[-1], kind):  # the first wrong one tells, for a list may have no end
                raise TypeError
    except TypeError as error:
        raise BNetError(what, expected=f"a list of {kind.__name__}", got=value) from error
    return tuple(things)


def mapping(what: str, value: object) -> Mapping[str, Any]:
    """`value` as a mapping from strings (empty for None), or the error that says so."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise BNetError(what, expected="a mapping from names", got=value)
    return value


def number(what: str, value: object, *, above: float | None = None, least: float | None = None) -> float:
    """A finite number, above a bound or from one on, where one is given."""
    bound = "" if above is None else f" above {above:g}"
    bound = bound if least is None else f" of at least {least:g}"
    try:
        found = None if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        found = None
    is_low = found is not None and ((above is not None and found <= above) or (least is not None and found < least))
    if found is None or not abs(found) < float("inf") or is_low:
        raise BNetError(what, expected=f"a finite number{bound}", got=value)
    return found


def share(what: str, value: object) -> float:
    """A share that is neither nothing nor all."""
    found = number(what, value)
    if not 0 < found < 1:
        raise BNetError(what, expected="a share between 0 and 1", got=value)
    return found


def put(thing: object, **checked: object) -> None:
    """Fields of a frozen dataclass as their checks give them: plain numbers, for those of numpy or 0-d tensors."""
    for name, value in checked.items():
        object.__setattr__(thing, name, value)


def one_of(what: str, value: object, options: Iterable[object]) -> None:
    """Refuse a `value` that is none of `options`."""
    listed = tuple(options)
    if not any(value is option or (type(value) is type(option) and value == option) for option in listed):
        allowed = ", ".join(repr(option) for option in listed)
        raise BNetError(what, expected="one of the allowed values", got=value, allowed=allowed)


def memory() -> int | None:
    """The bytes of the machine's memory; None where the system does not say."""
    with suppress(OSError, ValueError, AttributeError):
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return found if found > 0 else None
    return None


def room_for(what: str, size: int, allowed: str) -> None:
    """Refuse, before anything is taken, what needs more bytes than there are.

    >>> room_for("draws", 10**18, "fewer draws=")
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.BudgetError: draws: expected at most ... bytes, the memory that is here; got ... bytes; ...
    """
    there = memory()
    if there is not None and size > there:
        wanted = f"at most {there:,} bytes, the memory that is here"
        raise BudgetError(what, expected=wanted, got=f"{size:,} bytes", allowed=allowed)


@contextmanager
def within_memory(what: str) -> Iterator[None]:
    """Memory that runs out inside is told as a BudgetError; what is made inside is where the net is, not elsewhere.

    >>> with within_memory("a list"):
    ...     [0] * 10**17
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.BudgetError: a list: expected memory for what is asked; got ...
    """
    try:
        with _default_device():
            yield
    except (MemoryError, RuntimeError) as error:
        told = str(error).strip().partition("\n")[0]
        if not isinstance(error, MemoryError) and not OUT_OF_MEMORY.search(f"{type(error).__name__} {told}"):
            raise
        asked = re.search(r"allocate ([\d.]+ ?\w+)", told)
        got = f"none for {asked[1]} more" if asked else "none left"
        allowed = "fewer or shorter sentences at once, a smaller budget=, memory= or batch="
        raise BudgetError(what, expected="memory for what is asked", got=got, allowed=allowed) from error


def methods_within_memory(kind: type[T]) -> type[T]:
    """A class whose every public method is told `within_memory`, under its own name."""
    for name, method in list(vars(kind).items()):
        if isfunction(method) and not name.startswith("_"):
            setattr(kind, name, within_memory(name)(method))
    return kind


def _default_device() -> AbstractContextManager[object]:
    """What names no device is made on the CPU, whatever `torch.set_default_device` said: a net knows where it is."""
    torch = sys.modules.get("torch")
    elsewhere = torch is not None and torch.get_default_device().type != "cpu"
    return torch.device("cpu") if torch is not None and elsewhere else nullcontext()


def _revive(kind: type[BNetError], args: tuple[object, ...], state: dict[str, object]) -> BNetError:
    """Unpickle an error without asking its constructor (workers send errors home)."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error

"""Counts as polynomials in the number of words, and orders: which products of sizes they grow with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Powers = tuple[str, ...]  # the symbols of a monomial, each as often as its power says, sorted


@dataclass(frozen=True)
class Polynomial:
    """A polynomial with whole coefficients: `terms` maps symbols, each as often as its power says, to a coefficient.

    >>> p = Polynomial({("n", "n"): 3, ("n",): 2})
    >>> print(p, p(10))
    3 n^2 + 2 n 320
    """

    terms: Mapping[Powers, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kept = {powers: count for powers, count in self.terms.items() if count}
        object.__setattr__(self, "terms", dict(sorted(kept.items(), key=lambda term: (-len(term[0]), term[0]))))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols in it."""
        return tuple(sorted({symbol for powers in self.terms for symbol in powers}))

    def __call__(self, n: int | Mapping[str, int]) -> int:
        """The value, for one number in place of all symbols, or one for each symbol."""
        values = n if isinstance(n, Mapping) else dict.fromkeys(self.symbols, n)
        return sum(count * math.prod(values[symbol] for symbol in powers) for powers, count in self.terms.items())

    def __add__(self, other: Polynomial) -> Polynomial:
        found = Counter(self.terms)
        found.update(other.terms)
        return Polynomial(found)

    def __mul__(self, other: Polynomial) -> Polynomial:
        found: Counter[Powers] = Counter()
        for a, x in self.terms.items():
            for b, y in other.terms.items():
                found[tuple(sorted((*a, *b)))] += x * y
        return Polynomial(found)

    def __str__(self) -> str:
        return " + ".join(f"{count} {_powers(powers)}".rstrip() for powers, count in self.terms.items()) or "0"


ZERO = Polynomial()


def number(count: int) -> Polynomial:
    """A constant."""
    return Polynomial({(): count})


@dataclass(frozen=True)
class Size:
    """One factor of a count: its symbol in an order, how many it is, and its symbol in a polynomial (words alone)."""

    symbol: str
    count: int
    words: str = ""

    @property
    def polynomial(self) -> Polynomial:
        return Polynomial({(self.words,): 1}) if self.words else number(self.count)


@dataclass(frozen=True)
class Amount:
    """A count, exact in the number of words, and the monomials of sizes that it is made of."""

    exact: Polynomial = ZERO
    monomials: frozenset[Powers] = frozenset()

    @classmethod
    def of(cls, sizes: Iterable[Size]) -> Amount:
        """The product of the sizes."""
        sizes = tuple(sizes)
        exact = math.prod((size.polynomial for size in sizes), start=number(1))
        return cls(exact, frozenset({tuple(sorted(size.symbol for size in sizes if size.symbol))}))

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.exact + other.exact, self.monomials | other.monomials)

    def repeated(self, times: Polynomial) -> Amount:
        """The count so many times over, where the times are so many words, or fewer by a number."""
        words = tuple(symbol for powers in times.terms for symbol in powers)
        return Amount(self.exact * times, frozenset(tuple(sorted((*m, *words))) for m in self.monomials))

    @property
    def order(self) -> str:
        """Its order of growth, `O(n d^2 + n^2 d)`: the monomials that no other one holds."""
        return order(self.monomials)


def order(monomials: Iterable[Powers]) -> str:
    """The order of a sum of monomials.

    >>> order([("d", "d", "n"), ("d", "n"), ("d", "n", "n")]), order([()]), order([])
    ('O(n^2 d + n d^2)', 'O(1)', '0')
    """
    found = set(monomials)
    leading = [a for a in found if not any(a != b and not Counter(a) - Counter(b) for b in found)]
    if not leading:
        return "0"
    leading.sort(key=lambda powers: [-sum(s.partition("_")[0] == "n" for s in powers), powers])
    return f"O({' + '.join(_powers(powers) or '1' for powers in leading)})"


def _powers(powers: Powers) -> str:
    """A monomial: words first, then widths, then other sizes."""
    counted = sorted(Counter(powers).items(), key=lambda item: ("nd".find(item[0].partition("_")[0]) % 3, item[0]))
    return " ".join(symbol if power == 1 else f"{symbol}^{power}" for symbol, power in counted)

"""How many multiplications the compiled reading makes for each family: its plan, walked with dims instead of tensors.

A product takes one multiplication for each index of what has gone into it: the dims of its factors, the widths that
it runs over, the axis of what is summed. That is so for every product that the compiled reading makes, fused or not.

Values spread along dims: a plate or `word`, `BATCH`, or the index of an enumerated family. A dim on which a value does
not depend has size 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.fused import FEW
from bnet_transformer.compiler.plan import Fold, Plan
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.tpm import Attention, Dot, Parent, Product, Weight

Powers = tuple[str, ...]  # the symbols of a monomial, each as often as its power says, sorted
BATCH = "*batch"
Dims = frozenset[object]
NONE: Dims = frozenset()


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


@dataclass(frozen=True)
class Seen:
    """One parent as a child sees it: its dims, and whether its values differ along the axes that are collected."""

    dims: Dims
    axes: tuple[object, ...] = ()
    collected: bool = False  # a collection over words


@dataclass(frozen=True)
class Sizes:
    """How many entries dims and widths have, and by which symbols orders tell them."""

    network: Network
    words: Mapping[str, int]
    batch: int

    @cached_property
    def widths(self) -> dict[str, int]:
        """The width of each stack: that of the states that its slices make, else of its first vector over words."""
        found: dict[str, int] = {}
        for stack in self.network.declaration.stacks:
            over = [m for m in self.network.specs if m.group.word_stack == stack.name and len(m.shape) == 1]
            states = [m for m in over if m.group.stack == stack.name and m.group.role in stack.states]
            for member in states[-1:] or over[:1]:
                found[stack.name] = member.shape[0]
        return found

    @cached_property
    def features(self) -> dict[int, str]:
        """The symbol of each width of words that are given: whose it is."""
        given = [m for m in self.network.specs if m.tpm.kind == "input" and m.group.word_stack is not None]
        return {width: f"|{m.group.name}|" for m in reversed(given) for width in m.shape}

    @cached_property
    def symbols(self) -> dict[int, str]:
        """The symbol of each stack's width: `d`, or `d_enc` and `d_dec` where they differ."""
        one = len(set(self.widths.values())) == 1
        return {width: "d" if one else f"d_{stack}" for stack, width in reversed(self.widths.items())}

    def word(self, stack: str | None) -> Size:
        """The words of a stack; 1 for a node without words."""
        if stack is None:
            return Size("", 1)
        symbol = f"n_{stack}" if len(self.words) > 1 else "n"
        return Size(symbol, self.words[stack], symbol)

    def dim(self, dim: object, member: NodeSpec) -> Size:
        """One dim of a value that a member makes."""
        if dim == BATCH:
            return Size("", self.batch)
        if dim == WORD:
            return self.word(member.group.word_stack)
        if isinstance(dim, str):
            return Size(dim, self.network.graph.plate_sizes[dim])
        assert isinstance(dim, int)
        choice = self.network.specs[dim]
        if choice.tpm.states is None:
            return self.word(self.network.get_source_stack(choice))
        return Size(f"|{choice.group.name}|", choice.tpm.states)

    def of(self, member: NodeSpec, dims: Dims, widths: Sequence[int], axes: Sequence[Size] = ()) -> Amount:
        """A product of these sizes: a plate times a width that make up a stack's width count as that width."""
        found = [*(self.dim(dim, member) for dim in sorted(dims, key=str)), *axes]
        rest = list(widths)
        told = []
        for size in found:
            is_plate = size.symbol in self.network.graph.plate_sizes
            share = next((width for width in rest if is_plate and size.count * width in self.symbols), 0)
            if share:
                rest.remove(share)
                size = Size(self.symbols[size.count * share], size.count * share)
            told.append(size)
        return Amount.of([*told, *(Size(self._width(member, width), width) for width in rest)])

    def _width(self, member: NodeSpec, width: int) -> str:
        """The symbol of a width: that of a stack's, of the words that are given, else whose it is."""
        known = {**self.features, **self.symbols, 1: ""}
        if width in known:
            return known[width]
        if width in (*member.shape, member.tpm.states):
            return f"|{member.group.role}|"
        for given in member.parents:
            parent = self.network.specs[given.index]
            if width in parent.shape:
                return f"|{parent.group.role}|"
        fields = dataclasses.fields(member.tpm)
        names = [each.name for each in fields if getattr(member.tpm, each.name) == width and len(each.name) > 1]
        return names[0] if names else str(width)


@dataclass
class Counting:
    """The multiplications and the entries of the value of each family that a plan makes; None where not known."""

    plan: Plan
    sizes: Sizes
    known: frozenset[int] = frozenset()  # families whose values come from outside
    dims: dict[int, Dims] = field(default_factory=dict)
    products: dict[int, Amount | None] = field(default_factory=dict)
    values: dict[int, Amount] = field(default_factory=dict)

    def __post_init__(self) -> None:
        network = self.sizes.network
        for group in self.plan.groups:
            member = network.specs[group[0]]
            if group[0] in self.plan.folds:
                self._folded(self.plan.folds[group[0]])
            elif len(group) == 1 and all(given.index != group[0] for given in member.parents):
                self._made(member)
            else:
                self._scan([network.specs[index] for index in group])
        for index in self.plan.wanted:
            if network.specs[index].tpm.is_random and index not in self.known:
                self._readout(network.specs[index])

    def flops(self, families: Iterable[int]) -> Amount | None:
        """Twice the multiplications of those of some families that are computed; None where one is not known."""
        counts = [self.products[index] for index in families if index in self.products]
        known = [count for count in counts if count is not None]
        return sum(known, Amount()).repeated(number(2)) if len(known) == len(counts) else None

    def dims_of(self, member: NodeSpec, seen: Iterable[Seen]) -> Dims:
        """The dims of a family's value, from what it sees."""
        family, tpm = member.group, member.tpm
        own: Dims = frozenset(family.plates)
        word: Dims = NONE if family.word_stack is None else frozenset({WORD})
        if family.index in self.plan.enumerated:
            return frozenset({family.index}) | (NONE if tpm.is_index_valued else own)
        if tpm.kind == "input" or family.index in self.known:
            return own | {BATCH} | word
        return _dims_made(member, seen)

    def seen(self, member: NodeSpec, there: Mapping[int, Dims] | None = None) -> list[Seen]:
        """What a family sees in each of its slots.

        At one word of a scan, `there` are the families of the group that have a word already.
        """
        found = []
        for given in member.parents:
            dims = self.dims.get(given.index) if there is None else {**there, **self.dims}.get(given.index)
            if dims is None:
                found.append(Seen(NONE, (), WORD in given.over))
                continue
            picked = dict(given.pick)
            axes: tuple[object, ...] = tuple(plate for plate in given.over if plate in dims)
            if WORD not in picked and (WORD in given.over or given.reach.kind in ("first", "last")):
                dims = dims - {WORD}
            for plate, selector in given.pick:
                if plate in dims:
                    dims = (dims - {plate}) | self.dims[selector]
            dims = (dims - set(given.over)) | (frozenset({WORD}) if WORD in picked else NONE)
            found.append(Seen(dims if there is None else dims - {WORD}, axes, WORD in given.over))
        return found

    def _made(self, member: NodeSpec) -> None:
        index = member.group.index
        comes = index in self.plan.enumerated or index in self.known  # its value is not computed
        seen = [] if comes else self.seen(member)
        self.products[index] = Amount() if comes else self._computed(member, seen)
        self._valued(member, self.dims_of(member, seen))

    def _valued(self, member: NodeSpec, dims: Dims) -> None:
        self.dims[member.group.index] = dims
        shape = () if member.tpm.is_index_valued else member.shape
        self.values[member.group.index] = self.sizes.of(member, dims, shape)

    def _computed(self, member: NodeSpec, seen: Sequence[Seen]) -> Amount | None:
        """By the fused attention where it applies, else as the TPM says."""
        tpm = member.tpm
        if isinstance(tpm, Attention) and isinstance(tpm.score, Dot) and member.parents[1].over == (WORD,):
            plain = tpm.over == "keys" and tpm.normaliser.kind == "softmax"  # the compiled reading fuses these
            q, k, v = seen[:3]
            if plain and WORD not in k.dims | v.dims:  # with positions, each word's q and k are its own
                return self._attention(member, q, k, v, turned=tpm.score.rotary is not None or tpm.bias is not None)
        return self._said(member, seen)

    def _attention(self, member: NodeSpec, q: Seen, k: Seen, v: Seen, *, turned: bool) -> Amount:
        """Scores and mix; with many words torch's own attention, for which q, k, v are spread over one another."""
        read = self.sizes.word(self.sizes.network.specs[member.parents[1].index].group.word_stack)
        axes = [read] if turned or WORD in k.axes else []
        asked = q.dims | {WORD} if turned and member.group.word_stack is not None else q.dims
        rows = self.sizes.word(member.group.word_stack).count if WORD in asked else 1
        many = rows * (read.count if axes else 1) > FEW
        scored = asked | k.dims | (v.dims if many else NONE)
        scores = self.sizes.of(member, scored, member.tpm_parents[1].shape, axes)
        return scores + self.sizes.of(member, asked | k.dims | v.dims, member.tpm_parents[2].shape, axes)

    def _said(self, member: NodeSpec, seen: Sequence[Seen], *, drop: Dims = NONE) -> Amount | None:
        """As the TPM says, without the dims of `drop`."""
        products = member.tpm.products(*member.tpm_parents)
        if products is None:
            return None
        return sum((self._product(member, seen, product, drop) for product in products), Amount())

    def _product(self, member: NodeSpec, seen: Sequence[Seen], product: Product, drop: Dims) -> Amount:
        def place(parent: Parent) -> int:
            return next(k for k, told in enumerate(member.tpm_parents) if told is parent)

        dims: Dims = frozenset(member.group.plates) if product.has_parameter else NONE
        for parent in product.parents:
            each = seen[place(parent)]
            dims |= each.dims
            if each.collected and all(parent is not other for other in product.over):
                dims |= {WORD}  # what is read differs from word to word
        axes = []
        for parent in product.over:
            words = self.sizes.network.specs[member.parents[place(parent)].index].group.word_stack
            for axis in seen[place(parent)].axes:
                axes.append(self.sizes.word(words) if axis == WORD else self.sizes.dim(axis, member))
        return self.sizes.of(member, dims - drop, product.sizes, axes)

    def _folded(self, fold: Fold) -> None:
        """`W_q^T W_k`, that of every word, the attention, and W_v of the mix."""
        network, member = self.sizes.network, fold.member
        told = [
            dataclasses.replace(parent, shape=network.specs[given.index].shape)
            for parent, given in zip(member.tpm_parents, member.parents, strict=True)
        ]
        member = dataclasses.replace(member, parents=tuple(told))
        seen = self.seen(member)
        q, k, v = seen[:3]
        (keys, d_q), (_, d_k) = (network.specs[W.index].shape for W in (fold.W_q, fold.W_k))
        weights = self.dims[fold.W_q.index] | self.dims[fold.W_k.index]
        folded = self.sizes.of(member, weights, (d_k, keys, d_q))
        mapped = self.sizes.of(member, weights | q.dims, (d_k, d_q))
        seen[0] = dataclasses.replace(q, dims=q.dims | weights)
        attended = self._computed(member, seen)
        dims = seen[0].dims | k.dims | v.dims
        if fold.W_v is not None:
            dims |= self.dims[fold.W_v.index]
            mapped += self.sizes.of(member, dims, network.specs[fold.W_v.index].shape)
        made = None if attended is None else folded + mapped + attended
        self.products[member.group.index] = made
        self._valued(member, dims | (seen[-1].dims if fold.residual else NONE))
        for index in fold.away:
            self.products[index], self.values[index] = Amount(), Amount()

    def _readout(self, member: NodeSpec) -> None:
        """The logits or the mean of a random family that is wanted."""
        index = member.group.index
        seen = self.seen(member)
        self.products[index] = self._said(member, seen)
        dims = _dims_made(member, seen)
        states = (self.sizes.dim(index, member),) if member.tpm.kind == "discrete" else ()
        self.values[index] = self.sizes.of(member, dims, () if states else member.shape, states)

    def _scan(self, group: Sequence[NodeSpec]) -> None:
        """Word after word, until the dims of no value grow any more; the words that are left cost the same each."""
        stack = group[0].group.word_stack
        word = self.sizes.word(stack)
        there: dict[int, Dims] = {}
        made: dict[int, list[Amount | None]] = {member.group.index: [] for member in group}
        for _ in range(word.count):
            before = dict(there)
            for member in group:
                index = member.group.index
                comes = index in self.plan.enumerated or index in self.known
                seen = [] if comes else self.seen(member, there)
                made[index].append(Amount() if comes else self._said(member, seen, drop=frozenset({WORD})))
                there[index] = there.get(index, NONE) | self.dims_of(member, seen) | {WORD}
            if there == before:
                break
        for member in group:
            index = member.group.index
            self.products[index] = _over_words(made[index], word)
            self._valued(member, there[index])


def _dims_made(member: NodeSpec, seen: Iterable[Seen]) -> Dims:
    """The dims of what a TPM makes of what it sees."""
    found = frozenset(dim for each in seen for dim in each.dims)
    if member.parameters:
        found |= frozenset(member.group.plates)
    placed = not member.parents and not isinstance(member.tpm, Weight)
    return found | {WORD} if member.group.word_stack is not None and (placed or member.word_parents) else found


def _over_words(made: Sequence[Amount | None], word: Size) -> Amount | None:
    """The sum over all words, of which the last one told stands for those that are left."""
    counted = [each for each in made if each is not None]
    if len(counted) < len(made):
        return None
    if len(counted) == word.count:
        return sum(counted, Amount())
    return sum(counted[:-1], Amount()) + counted[-1].repeated(word.polynomial + number(1 - len(counted)))

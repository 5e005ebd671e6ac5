"""The number of multiplications of each node group: an abstract interpretation of its plan, with dims for tensors.

A product takes one multiplication for each index of its operands, as in an einsum: the dims of its factors, their
widths, and the axes of the sum. This is true for every product that the compiler generates, fused or not.

The dims of a value are plates, `word`, `BATCH`, and the indices of enumerated groups. A dim on which a value does not
depend has size 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bnet_transformer._core.checks import check_int, check_names
from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.fused import MAX_EXPLICIT_PAIRS
from bnet_transformer.compiler.plan import ExecutionPlan, Fold
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm import Attention, Dot, Parent, Product, Weight

Monomial = tuple[str, ...]  # the symbols of a monomial, sorted, each repeated by its power
BATCH = "*batch"
Dims = frozenset[object]
NO_DIMS: Dims = frozenset()


@dataclass(frozen=True)
class Polynomial:
    """A polynomial with integer coefficients.

    Args:
        terms: The coefficient of each monomial; a monomial is a tuple of symbols, repeated by their power.
        symbol_by_stack: The symbol of the number of words of each stack. Default: none.

    >>> p = Polynomial({("n", "n"): 3, ("n",): 2})
    >>> print(p, p(10))
    3 n^2 + 2 n 320
    """

    terms: Mapping[Monomial, int] = field(default_factory=dict)
    symbol_by_stack: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        terms = {powers: count for powers, count in self.terms.items() if count}
        object.__setattr__(self, "terms", dict(sorted(terms.items(), key=lambda term: (-len(term[0]), term[0]))))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols of the polynomial."""
        return tuple(sorted({symbol for powers in self.terms for symbol in powers}))

    def __call__(self, n: int | Mapping[str, int]) -> int:
        """The value of the polynomial.

        Args:
            n: One number for all symbols, or a mapping to numbers from stacks, as in `net.cost(words=...)`, or from
                symbols.

        Returns:
            The value.

        Raises:
            BNetError: The mapping has an unknown name, or a symbol has no number.

        >>> import bnet_transformer as bt
        >>> cost = bt.encoder_decoder(dim=8, heads=2, slices=1, vocabulary=5).cost({"enc": 4, "dec": 3})
        >>> cost.flops_in_words({"enc": 4, "dec": 3}) == cost.flops
        True
        """
        symbols = self.symbols
        if isinstance(n, Mapping):
            known = {**self.symbol_by_stack, **{symbol: symbol for symbol in self.symbol_by_stack.values()}}
            check_names("stack", n if known else (), known)
            values = {known.get(name, name): check_int(f"words of {name!r}", number) for name, number in n.items()}
        else:
            values = dict.fromkeys(symbols, check_int("n", n))
        for symbol in symbols:
            if symbol not in values:
                raise BNetError("words", expected=f"the number {symbol} of words", actual=f"{dict(n)}")  # type: ignore[arg-type]
        return sum(count * math.prod(values[symbol] for symbol in powers) for powers, count in self.terms.items())

    def __add__(self, other: Polynomial) -> Polynomial:
        terms = Counter(self.terms)
        terms.update(other.terms)
        return Polynomial(terms, {**self.symbol_by_stack, **other.symbol_by_stack})

    def __mul__(self, other: Polynomial) -> Polynomial:
        terms: Counter[Monomial] = Counter()
        for a, x in self.terms.items():
            for b, y in other.terms.items():
                terms[tuple(sorted((*a, *b)))] += x * y
        return Polynomial(terms, {**self.symbol_by_stack, **other.symbol_by_stack})

    def __str__(self) -> str:
        return " + ".join(f"{count} {_format_monomial(powers)}".rstrip() for powers, count in self.terms.items()) or "0"


ZERO = Polynomial()


def constant(count: int) -> Polynomial:
    """A constant."""
    return Polynomial({(): count})


@dataclass(frozen=True)
class SymbolicSize:
    """One factor of a count: its symbol in an order, its value, and its symbol in a polynomial (words only)."""

    symbol: str
    count: int
    word_symbol: str = ""

    @property
    def polynomial(self) -> Polynomial:
        """The size as a polynomial in the number of words."""
        return Polynomial({(self.word_symbol,): 1}) if self.word_symbol else constant(self.count)


@dataclass(frozen=True)
class SymbolicCount:
    """A count as an exact polynomial in the number of words, and the monomials of sizes for its order."""

    exact: Polynomial = ZERO
    monomials: frozenset[Monomial] = frozenset()

    @classmethod
    def product(cls, sizes: Iterable[SymbolicSize]) -> SymbolicCount:
        """The product of the sizes."""
        sizes = tuple(sizes)
        exact = math.prod((size.polynomial for size in sizes), start=constant(1))
        return cls(exact, frozenset({tuple(sorted(size.symbol for size in sizes if size.symbol))}))

    def __add__(self, other: SymbolicCount) -> SymbolicCount:
        return SymbolicCount(self.exact + other.exact, self.monomials | other.monomials)

    def scaled(self, times: Polynomial) -> SymbolicCount:
        """The count times a polynomial in the number of words, of degree 1 or a constant."""
        words = tuple(symbol for powers in times.terms for symbol in powers)
        return SymbolicCount(self.exact * times, frozenset(tuple(sorted((*m, *words))) for m in self.monomials))

    @property
    def order(self) -> str:
        """The order of growth, such as `O(n d^2 + n^2 d)`: the monomials that do not divide another monomial."""
        return format_order(self.monomials)


def format_order(monomials: Iterable[Monomial]) -> str:
    """The order of a sum of monomials; monomials that divide another one are dominated and omitted.

    >>> format_order([("d", "d", "n"), ("d", "n"), ("d", "n", "n")]), format_order([()]), format_order([])
    ('O(n^2 d + n d^2)', 'O(1)', '0')
    """
    unique = set(monomials)
    leading = [a for a in unique if not any(a != b and not Counter(a) - Counter(b) for b in unique)]
    if not leading:
        return "0"
    leading.sort(key=lambda powers: [-sum(s.partition("_")[0] == "n" for s in powers), powers])
    return f"O({' + '.join(_format_monomial(powers) or '1' for powers in leading)})"


def _format_monomial(monomial: Monomial) -> str:
    """A monomial: words first, then widths, then other sizes."""
    counted = sorted(Counter(monomial).items(), key=lambda item: ("nd".find(item[0].partition("_")[0]) % 3, item[0]))
    return " ".join(symbol if power == 1 else f"{symbol}^{power}" for symbol, power in counted)


@dataclass(frozen=True)
class ParentDims:
    """A parent as a child reads it: its dims, and the collected axes along which its values differ."""

    dims: Dims
    axes: tuple[object, ...] = ()
    is_collected: bool = False  # whether it is a collection over words


@dataclass(frozen=True)
class SizeTable:
    """The sizes of dims and widths, and their symbols in orders."""

    network: Network
    word_counts: Mapping[str, int]
    batch: int

    @cached_property
    def widths(self) -> dict[str, int]:
        """The width of each stack: the width of its hidden state, or else of its first vector over words."""
        widths: dict[str, int] = {}
        for stack in self.network.declaration.stacks:
            candidates = [m for m in self.network.specs if m.group.word_stack == stack.name and len(m.shape) == 1]
            states = [m for m in candidates if m.group.stack == stack.name and m.group.role in stack.states]
            for spec in states[-1:] or candidates[:1]:
                widths[stack.name] = spec.shape[0]
        return widths

    @cached_property
    def input_symbols(self) -> dict[int, str]:
        """The symbol of each width of input words: the name of the input."""
        inputs = [m for m in self.network.specs if m.tpm.kind == "input" and m.group.word_stack is not None]
        return {width: f"|{m.group.name}|" for m in reversed(inputs) for width in m.shape}

    @cached_property
    def width_symbols(self) -> dict[int, str]:
        """The symbol of the width of each stack: `d`, or `d_enc` and `d_dec` if they differ."""
        one = len(set(self.widths.values())) == 1
        return {width: "d" if one else f"d_{stack}" for stack, width in reversed(self.widths.items())}

    def word_size(self, stack: str | None) -> SymbolicSize:
        """The number of words of a stack; 1 for a node without words."""
        if stack is None:
            return SymbolicSize("", 1)
        symbol = f"n_{stack}" if len(self.word_counts) > 1 else "n"
        return SymbolicSize(symbol, self.word_counts[stack], symbol)

    def dim_size(self, dim: object, spec: NodeSpec) -> SymbolicSize:
        """The size of one dim of the value of a group."""
        if dim == BATCH:
            return SymbolicSize("", self.batch)
        if dim == WORD:
            return self.word_size(spec.group.word_stack)
        if isinstance(dim, str):
            return SymbolicSize(dim, self.network.graph.plate_sizes[dim])
        assert isinstance(dim, int)
        choice = self.network.specs[dim]
        if choice.tpm.states is None:
            return self.word_size(self.network.get_source_stack(choice))
        return SymbolicSize(f"|{choice.group.name}|", choice.tpm.states)

    def count_entries(
        self, spec: NodeSpec, dims: Dims, widths: Sequence[int], axes: Sequence[SymbolicSize] = ()
    ) -> SymbolicCount:
        """The product of some sizes; heads times their width is written as the stack's width if both are equal."""
        sizes = [*(self.dim_size(dim, spec) for dim in sorted(dims, key=str)), *axes]
        unmatched = list(widths)
        factors = []
        for size in sizes:
            is_plate = size.symbol in self.network.graph.plate_sizes
            head_width = next(
                (width for width in unmatched if is_plate and size.count * width in self.width_symbols), 0
            )
            if head_width:
                unmatched.remove(head_width)
                size = SymbolicSize(self.width_symbols[size.count * head_width], size.count * head_width)
            factors.append(size)
        return SymbolicCount.product(
            [*factors, *(SymbolicSize(self._get_width_symbol(spec, width), width) for width in unmatched)]
        )

    def _get_width_symbol(self, spec: NodeSpec, width: int) -> str:
        """The symbol of a width: of a stack or an input; else the name of the node or the field of the TPM."""
        known = {**self.input_symbols, **self.width_symbols, 1: ""}
        if width in known:
            return known[width]
        if width in (*spec.shape, spec.tpm.states):
            return f"|{spec.group.role}|"
        for parent in spec.parents:
            parent_spec = self.network.specs[parent.index]
            if width in parent_spec.shape:
                return f"|{parent_spec.group.role}|"
        fields = dataclasses.fields(spec.tpm)
        names = [f.name for f in fields if getattr(spec.tpm, f.name) == width and len(f.name) > 1]
        return names[0] if names else str(width)


@dataclass
class FlopCounter:
    """The multiplications of each group of a plan (None if not known), and the number of entries of its value."""

    plan: ExecutionPlan
    sizes: SizeTable
    known: frozenset[int] = frozenset()  # groups whose values are given
    dims: dict[int, Dims] = field(default_factory=dict)
    multiplications: dict[int, SymbolicCount | None] = field(default_factory=dict)
    entries: dict[int, SymbolicCount] = field(default_factory=dict)

    def __post_init__(self) -> None:
        network = self.sizes.network
        for component in self.plan.components:
            spec = network.specs[component[0]]
            if component[0] in self.plan.folds:
                self._count_folded_attention(self.plan.folds[component[0]])
            elif len(component) == 1 and all(parent.index != component[0] for parent in spec.parents):
                self._count_group(spec)
            else:
                self._count_scan([network.specs[index] for index in component])
        for index in self.plan.outputs:
            if network.specs[index].tpm.is_random and index not in self.known:
                self._count_readout(network.specs[index])

    def flops(self, groups: Iterable[int]) -> SymbolicCount | None:
        """Twice the multiplications of those groups that are computed; None if one of them is not known."""
        counts = [self.multiplications[index] for index in groups if index in self.multiplications]
        known = [count for count in counts if count is not None]
        return sum(known, SymbolicCount()).scaled(constant(2)) if len(known) == len(counts) else None

    def get_value_dims(self, spec: NodeSpec, parent_dims: Iterable[ParentDims]) -> Dims:
        """The dims of the value of a group, from the dims of its parents."""
        group, tpm = spec.group, spec.tpm
        plate_dims: Dims = frozenset(group.plates)
        word_dims: Dims = NO_DIMS if group.word_stack is None else frozenset({WORD})
        if group.index in self.plan.enumerated:
            return frozenset({group.index}) | (NO_DIMS if tpm.is_index_valued else plate_dims)
        if tpm.kind == "input" or group.index in self.known:
            return plate_dims | {BATCH} | word_dims
        return _get_output_dims(spec, parent_dims)

    def get_parent_dims(self, spec: NodeSpec, computed: Mapping[int, Dims] | None = None) -> list[ParentDims]:
        """The dims of the value in each slot of a group.

        At one word of a scan, `computed` contains the dims of the groups of the component that already have a value.
        """
        parent_dims = []
        for parent in spec.parents:
            dims = self.dims.get(parent.index) if computed is None else {**computed, **self.dims}.get(parent.index)
            if dims is None:
                parent_dims.append(ParentDims(NO_DIMS, (), WORD in parent.over))
                continue
            picked = dict(parent.pick)
            axes: tuple[object, ...] = tuple(plate for plate in parent.over if plate in dims)
            if WORD not in picked and (WORD in parent.over or parent.reach.kind in ("first", "last")):
                dims = dims - {WORD}
            for plate, selector in parent.pick:
                if plate in dims:
                    dims = (dims - {plate}) | self.dims[selector]
            dims = (dims - set(parent.over)) | (frozenset({WORD}) if WORD in picked else NO_DIMS)
            parent_dims.append(ParentDims(dims if computed is None else dims - {WORD}, axes, WORD in parent.over))
        return parent_dims

    def _count_group(self, spec: NodeSpec) -> None:
        """Count the multiplications of a group, and record the dims of its value."""
        index = spec.group.index
        is_known = index in self.plan.enumerated or index in self.known
        parent_dims = [] if is_known else self.get_parent_dims(spec)
        self.multiplications[index] = SymbolicCount() if is_known else self._count_multiplications(spec, parent_dims)
        self._record_value(spec, self.get_value_dims(spec, parent_dims))

    def _record_value(self, spec: NodeSpec, dims: Dims) -> None:
        """Record the dims and the number of entries of the value of a group."""
        self.dims[spec.group.index] = dims
        shape = () if spec.tpm.is_index_valued else spec.shape
        self.entries[spec.group.index] = self.sizes.count_entries(spec, dims, shape)

    def _count_multiplications(self, spec: NodeSpec, parent_dims: Sequence[ParentDims]) -> SymbolicCount | None:
        """The multiplications of the fused attention if it applies, else the products that the TPM declares."""
        tpm = spec.tpm
        if isinstance(tpm, Attention) and isinstance(tpm.score, Dot) and spec.parents[1].over == (WORD,):
            plain = tpm.over == "keys" and tpm.normaliser.kind == "softmax"  # the compiler fuses these
            q, k, v = parent_dims[:3]
            if plain and WORD not in k.dims | v.dims:
                # With rotary positions or a bias, each pair of words has a different score.
                has_word_scores = tpm.score.rotary is not None or tpm.bias is not None
                return self._count_attention(spec, q, k, v, has_word_scores=has_word_scores)
        return self._count_products(spec, parent_dims)

    def _count_attention(
        self, spec: NodeSpec, q: ParentDims, k: ParentDims, v: ParentDims, *, has_word_scores: bool
    ) -> SymbolicCount:
        """The multiplications of scores and weighted sum; torch's attention, for many words, broadcasts q, k and v."""
        read = self.sizes.word_size(self.sizes.network.specs[spec.parents[1].index].group.word_stack)
        axes = [read] if has_word_scores or WORD in k.axes else []
        query_dims = q.dims | {WORD} if has_word_scores and spec.group.word_stack is not None else q.dims
        rows = self.sizes.word_size(spec.group.word_stack).count if WORD in query_dims else 1
        is_fused = rows * (read.count if axes else 1) > MAX_EXPLICIT_PAIRS
        scored = query_dims | k.dims | (v.dims if is_fused else NO_DIMS)
        scores = self.sizes.count_entries(spec, scored, spec.tpm_parents[1].shape, axes)
        return scores + self.sizes.count_entries(spec, query_dims | k.dims | v.dims, spec.tpm_parents[2].shape, axes)

    def _count_products(
        self, spec: NodeSpec, parent_dims: Sequence[ParentDims], *, excluded: Dims = NO_DIMS
    ) -> SymbolicCount | None:
        """The products that the TPM declares, without the dims of `excluded`."""
        products = spec.tpm.products(*spec.tpm_parents)
        if products is None:
            return None
        return sum((self._count_product(spec, parent_dims, product, excluded) for product in products), SymbolicCount())

    def _count_product(
        self, spec: NodeSpec, parent_dims: Sequence[ParentDims], product: Product, excluded: Dims
    ) -> SymbolicCount:
        """The multiplications of one product, without the dims of `excluded`."""

        def find_position(parent: Parent) -> int:
            return next(k for k, candidate in enumerate(spec.tpm_parents) if candidate is parent)

        dims: Dims = frozenset(spec.group.plates) if product.has_parameter else NO_DIMS
        for parent in product.parents:
            item = parent_dims[find_position(parent)]
            dims |= item.dims
            if item.is_collected and all(parent is not other for other in product.over):
                dims |= {WORD}  # each word has different entries
        axes = []
        for parent in product.over:
            words = self.sizes.network.specs[spec.parents[find_position(parent)].index].group.word_stack
            for axis in parent_dims[find_position(parent)].axes:
                axes.append(self.sizes.word_size(words) if axis == WORD else self.sizes.dim_size(axis, spec))
        return self.sizes.count_entries(spec, dims - excluded, product.sizes, axes)

    def _count_folded_attention(self, fold: Fold) -> None:
        """Count `W_q^T W_k`, this product times each x_i, the attention, and W_v times the weighted sum."""
        network, spec = self.sizes.network, fold.spec
        tpm_parents = [
            dataclasses.replace(parent, shape=network.specs[source.index].shape)
            for parent, source in zip(spec.tpm_parents, spec.parents, strict=True)
        ]
        spec = dataclasses.replace(spec, tpm_parents=tuple(tpm_parents))
        parent_dims = self.get_parent_dims(spec)
        q, k, v = parent_dims[:3]
        (keys, d_q), (_, d_k) = (network.specs[W.index].shape for W in (fold.W_q, fold.W_k))
        weights = self.dims[fold.W_q.index] | self.dims[fold.W_k.index]
        folded = self.sizes.count_entries(spec, weights, (d_k, keys, d_q))
        mapped = self.sizes.count_entries(spec, weights | q.dims, (d_k, d_q))
        parent_dims[0] = dataclasses.replace(q, dims=q.dims | weights)
        attended = self._count_multiplications(spec, parent_dims)
        dims = parent_dims[0].dims | k.dims | v.dims
        if fold.W_v is not None:
            dims |= self.dims[fold.W_v.index]
            mapped += self.sizes.count_entries(spec, dims, network.specs[fold.W_v.index].shape)
        total = None if attended is None else folded + mapped + attended
        self.multiplications[spec.group.index] = total
        self._record_value(spec, dims | (parent_dims[-1].dims if fold.has_residual else NO_DIMS))
        for index in fold.absorbed:
            self.multiplications[index], self.entries[index] = SymbolicCount(), SymbolicCount()

    def _count_readout(self, spec: NodeSpec) -> None:
        """Count the logits or the mean of a random output."""
        index = spec.group.index
        parent_dims = self.get_parent_dims(spec)
        self.multiplications[index] = self._count_products(spec, parent_dims)
        dims = _get_output_dims(spec, parent_dims)
        states = (self.sizes.dim_size(index, spec),) if spec.tpm.kind == "discrete" else ()
        self.entries[index] = self.sizes.count_entries(spec, dims, () if states else spec.shape, states)

    def _count_scan(self, component: Sequence[NodeSpec]) -> None:
        """Count a scan word by word until the dims of values no longer change; all later words cost the same."""
        stack = component[0].group.word_stack
        word = self.sizes.word_size(stack)
        dims: dict[int, Dims] = {}
        counts: dict[int, list[SymbolicCount | None]] = {spec.group.index: [] for spec in component}
        for _ in range(word.count):
            before = dict(dims)
            for spec in component:
                index = spec.group.index
                is_known = index in self.plan.enumerated or index in self.known
                parent_dims = [] if is_known else self.get_parent_dims(spec, dims)
                counts[index].append(
                    SymbolicCount() if is_known else self._count_products(spec, parent_dims, excluded=frozenset({WORD}))
                )
                dims[index] = dims.get(index, NO_DIMS) | self.get_value_dims(spec, parent_dims) | {WORD}
            if dims == before:
                break
        for spec in component:
            index = spec.group.index
            self.multiplications[index] = _sum_over_words(counts[index], word)
            self._record_value(spec, dims[index])


def _get_output_dims(spec: NodeSpec, parent_dims: Iterable[ParentDims]) -> Dims:
    """The dims of the value of a TPM, from the dims of its parents."""
    dims = frozenset(dim for item in parent_dims for dim in item.dims)
    if spec.parameters:
        dims |= frozenset(spec.group.plates)
    is_positional = not spec.parents and not isinstance(spec.tpm, Weight)
    return dims | {WORD} if spec.group.word_stack is not None and (is_positional or spec.word_parents) else dims


def _sum_over_words(counts: Sequence[SymbolicCount | None], word: SymbolicSize) -> SymbolicCount | None:
    """The sum over all words; all remaining words have the last count."""
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    if len(known) == word.count:
        return sum(known, SymbolicCount())
    return sum(known[:-1], SymbolicCount()) + known[-1].scaled(word.polynomial + constant(1 - len(known)))

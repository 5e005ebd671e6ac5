"""The cost of a net: what each family counts, put together for templates, for the slices of a stack, and in all.

The result has a row for each node template, one for the slices of each stack, and the totals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from bnet_transformer._core.checks import check_int
from bnet_transformer.compiler import Module
from bnet_transformer.compiler.plan import Plan
from bnet_transformer.compiler.told import wanted
from bnet_transformer.cost.counting import ZERO, Amount, Counting, Polynomial, Powers, Size, Sizes, number, order
from bnet_transformer.cost.paths import links, longest_path, steps
from bnet_transformer.data.encode import check_reads
from bnet_transformer.declare import Network, NodeSpec, as_network
from bnet_transformer.errors import BNetError, unknown_name_error

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Row:
    """One node template: all its nodes, heads and slices, for the whole batch.

    `flops` are None where a TPM does not say its products. What the forward pass does not make costs nothing.
    """

    template: str
    block: str
    tpm: str
    slices: int
    parameters: int
    flops: int | None
    flops_in_words: Polynomial | None
    order: str
    monomials: frozenset[Powers]
    parameter_bytes: int
    value_bytes: int
    value_bytes_in_words: Polynomial


@dataclass(frozen=True)
class SliceCost:
    """The slices of one stack, beside as many dense maps of all n d inputs to all n d outputs.

    `order` and `steps` are those of one slice. `steps` is the longest chain of words each of which waits for the one
    before; `longest_path` the hops between the two words that are farthest apart (None: no word reads another, or its
    order is "unknown": it needs a table of more than 4096 places). Their orders are empty where only the number for so
    many words is known, as with tables of who reads whom.
    """

    stack: str
    slices: int
    flops: int | None
    flops_in_words: Polynomial | None
    order: str
    steps: int
    steps_order: str
    longest_path: int | None
    longest_path_order: str
    dense_parameters: int
    dense_flops: int
    dense_order: str


@dataclass(frozen=True)
class Cost:
    """What a forward pass of the compiled reading costs.

    FLOPs are those of matrix products, two for each multiplication with its addition; operations entry by entry (sums,
    norms, activations, softmax) are not counted. Bytes are those of parameters, and of the values of all nodes but
    weights, were they all kept.
    """

    name: str
    words: dict[str, int]
    batch: int
    rows: tuple[Row, ...]
    slices: tuple[SliceCost, ...]

    @property
    def parameters(self) -> int:
        """How many numbers the net learns or is given."""
        return sum(row.parameters for row in self.rows)

    @property
    def flops_in_words(self) -> Polynomial | None:
        """The FLOPs in the number of words; None where a template's are not known."""
        known = [row.flops_in_words for row in self.rows if row.flops_in_words is not None]
        return sum(known, ZERO) if len(known) == len(self.rows) else None

    @property
    def flops(self) -> int | None:
        """The FLOPs of the forward pass; None where a template's are not known."""
        known = [row.flops for row in self.rows if row.flops is not None]
        return sum(known) if len(known) == len(self.rows) else None

    @property
    def unknown(self) -> tuple[str, ...]:
        """The templates whose TPM does not say its products."""
        return tuple(row.template for row in self.rows if row.flops is None)

    @property
    def order(self) -> str:
        """The order of the whole."""
        return "unknown" if self.unknown else order(powers for row in self.rows for powers in row.monomials)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters."""
        return sum(row.parameter_bytes for row in self.rows)

    @property
    def value_bytes(self) -> int:
        """The bytes of all values, were they all kept."""
        return sum(row.value_bytes for row in self.rows)

    def to_dataframe(self) -> pd.DataFrame:
        """The rows as a pandas DataFrame; the polynomials as text."""
        import pandas as pd

        frame = pd.DataFrame([vars(row) for row in self.rows]).drop(columns="monomials")
        frame["flops_in_words"] = [str(row.flops_in_words or "") for row in self.rows]
        frame["value_bytes_in_words"] = [str(row.value_bytes_in_words) for row in self.rows]
        return frame.astype({"flops": "Int64"})

    def __str__(self) -> str:
        return "\n".join([self._head(), "", *_lines(self._table()), "", *_lines(self._stacks())])

    def _repr_html_(self) -> str:
        import pandas as pd

        frames = [pd.DataFrame(rows, columns=head) for head, *rows in (self._table(), self._stacks())]
        with pd.option_context("display.max_colwidth", None):
            tables = "".join(frame.to_html(index=False, border=0) for frame in frames)
        return f"<p>{escape(self._head())}</p>{tables}"

    def _head(self) -> str:
        words = "".join(f"{n:,} words" + (f" of {stack}, " if stack else ", ") for stack, n in self.words.items())
        flops = f"{self.flops:,} FLOPs" if self.flops is not None else "FLOPs unknown for " + ", ".join(self.unknown)
        return f"{self.name}: {words}batch {self.batch}: {self.parameters:,} parameters, {flops}, {self.order}"

    def _table(self) -> list[tuple[str, ...]]:
        head = ("template", "TPM", "slices", "parameters", "FLOPs", "in n", "order", "bytes", "bytes of values")
        rows = [(row.template, row.tpm, str(row.slices), *_numbers(row)) for row in self.rows]
        return [head, *rows, ("total", "", "", *_numbers(self))]

    def _stacks(self) -> list[tuple[str, ...]]:
        head = ("slices", "how many", "order of one", "steps of one", "longest path", "dense map", "dense parameters")
        table: list[tuple[str, ...]] = [head]
        for each in self.slices:
            steps = _with(each.steps, each.steps_order)
            longest_path = _with(each.longest_path, each.longest_path_order)
            dense = (each.dense_order, f"{each.dense_parameters:,}")
            table.append((each.stack or "all", str(each.slices), each.order, steps, longest_path, *dense))
        return table


def cost(
    network: Network, words: int | Mapping[str, int] | None = None, batch: int = 1, want: Sequence[str] | None = None
) -> Cost:
    """What one forward pass of the compiled reading costs for sentences of so many words.

    `words` is one number, or one for each stack, and nothing for a net without words; `want` names the families that
    are asked for, as `net.module()` has it. The polynomials are exact for every number of words that the compiled
    reading treats in the same way.
    """
    network = as_network(network)
    counted = _words(network, words)
    check_int("batch", batch)
    check_reads(network, counted)
    module = Module(network)
    names = (module.output,) if want is None else wanted(want)
    fold = batch * max([0, *counted.values()]) > module.widest
    counting = Counting(module.plan(names, frozenset(), fold=fold), Sizes(network, counted, batch))
    templates: dict[tuple[str, str, str], list[NodeSpec]] = {}
    for member in network.specs:
        templates.setdefault((member.group.stack, _block(network, member), member.group.role), []).append(member)
    rows = tuple(_row(counting, block, members) for (_, block, _), members in templates.items())
    stacks = [stack.name for stack in network.declaration.stacks if stack.name in counting.sizes.widths]
    return Cost(network.declaration.name, dict(counted), batch, rows, tuple(_slices(counting, s) for s in stacks))


def plan_flops(
    network: Network, plan: Plan, words: Mapping[str, int], known: frozenset[int] = frozenset(), batch: int = 1
) -> int | None:
    """The floating-point operations of a plan; None where a TPM does not say what its products are.

    Args:
        network: The net.
        plan: What is computed.
        words: How many words each stack has.
        known: Families whose values come from outside, and are not computed.
        batch: How many sentences are computed.
    """
    sizes = Sizes(network, dict(words), batch)
    counting = Counting(plan, sizes, known)
    flops = counting.flops(counting.products)
    return None if flops is None else flops.exact(_symbols(sizes))


def _words(network: Network, words: object) -> dict[str, int]:
    """How many words each stack has."""
    stacks = network.graph.word_stacks
    if not stacks and words not in (None, {}):
        raise BNetError("words", expected="None: the net has no words", actual=words)
    if not stacks:
        return {}
    if not isinstance(words, Mapping):
        return dict.fromkeys(stacks, check_int("words", words))
    for name in words:
        if name not in stacks:
            raise unknown_name_error("stack", name, stacks)
    for name in stacks:
        if name not in words:
            raise BNetError(
                "words", expected="a number for each stack: " + ", ".join(stacks), actual=f"none for {name!r}"
            )
    return {name: check_int(f"words of {name!r}", words[name]) for name in stacks}


def _block(network: Network, member: NodeSpec) -> str:
    """Where a template stands: the block of its stack, or outside the stacks."""
    step = member.group.step
    if step is None:
        return "outside"
    return "prologue" if step < 0 else "epilogue" if step == network.graph.slices[member.group.stack] else "slice"


def _row(counting: Counting, block: str, members: Sequence[NodeSpec]) -> Row:
    """One template: all its slices together, parameters that they share once."""
    network, words = counting.sizes.network, _symbols(counting.sizes)
    store = {
        f"{m.param_prefix}.{name}": network.parameters[f"{m.param_prefix}.{name}"]
        for m in members
        for name in m.parameters
    }
    flops = counting.flops(member.group.index for member in members)
    first = members[0]
    weights = first.group.index in network.graph.word_independent
    size = 8 if first.tpm.is_index_valued else network.dtype.itemsize
    made = [m.group.index for m in members if m.group.index in counting.products and not weights]
    kept = sum((counting.values[index] for index in made), Amount()).exact * number(size)
    return Row(
        template=first.group.stem,
        block=block,
        tpm=type(first.tpm).__name__,
        slices=len(members),
        parameters=sum(value.numel() for value in store.values()),
        **_told(flops, words),
        monomials=frozenset() if flops is None else flops.monomials,
        parameter_bytes=sum(value.numel() * value.element_size() for value in store.values()),
        value_bytes=kept(words),
        value_bytes_in_words=kept,
    )


def _told(flops: Amount | None, words: Mapping[str, int]) -> dict[str, Any]:
    """What a row tells of FLOPs; None where a TPM does not say its products."""
    if flops is None:
        return {"flops": None, "flops_in_words": None, "order": "unknown"}
    return {"flops": flops.exact(words), "flops_in_words": flops.exact, "order": flops.order}


def _symbols(sizes: Sizes) -> dict[str, int]:
    """The words of each stack, by their symbol in the polynomials."""
    return {sizes.word(stack).symbol: n for stack, n in sizes.words.items()}


def _slices(counting: Counting, stack: str) -> SliceCost:
    """The slices of a stack beside dense maps of all inputs to all outputs, their paths and steps."""
    sizes = counting.sizes
    network, words = sizes.network, _symbols(sizes)
    count = network.graph.slices[stack]
    inside = [m.group for m in network.specs if m.group.stack == stack and _block(network, m) == "slice"]
    flops = counting.flops(family.index for family in inside)
    word, width = sizes.word(stack), sizes.widths[stack]
    side = (word, Size(sizes.symbols[width], width))
    dense = Amount.of((*side, *side))
    n = sizes.words[stack]
    longest, path_order = longest_path(links(network, stack), n)
    sequential, steps_order = steps(network, stack, n)
    return SliceCost(
        stack=stack,
        slices=count,
        **_told(flops, words),
        steps=sequential,
        steps_order=steps_order,
        longest_path=longest,
        longest_path_order=path_order,
        dense_parameters=dense.exact(words) * count,
        dense_flops=2 * sizes.batch * dense.exact(words) * count,
        dense_order=dense.order,
    )


def _numbers(counted: Row | Cost) -> tuple[str, ...]:
    """The numbers of a template, or of the whole."""
    return (
        f"{counted.parameters:,}",
        "unknown" if counted.flops is None else f"{counted.flops:,}",
        "" if counted.flops_in_words is None else str(counted.flops_in_words),
        counted.order,
        f"{counted.parameter_bytes:,}",
        f"{counted.value_bytes:,}",
    )


def _with(count: int | None, told: str) -> str:
    """A count with its order, where it has one."""
    return told or "none" if count is None else f"{count:,}, {told}" if told else f"{count:,}"


def _lines(table: Sequence[Sequence[str]]) -> list[str]:
    """A table as text, its numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(_cell(text, width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _cell(text: str, width: int) -> str:
    return text.rjust(width) if text[:1].isdigit() and text.replace(",", "").isdigit() else text.ljust(width)

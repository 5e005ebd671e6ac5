"""The cost of a net: what each family counts, put together for templates, for the slices of a stack, and in all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bnet_transformer.compiler import Module
from bnet_transformer.compiler.plan import Plan
from bnet_transformer.compiler.told import wanted
from bnet_transformer.cost.counting import Counting, Sizes
from bnet_transformer.cost.paths import links, longest_path, steps
from bnet_transformer.cost.polynomial import Amount, Size, number
from bnet_transformer.cost.result import Cost, Row, SliceCost
from bnet_transformer.data.encode import check_reads
from bnet_transformer.errors import BNetError, unknown, whole
from bnet_transformer.network import Member, Network, network_of


def cost(
    network: Network, words: int | Mapping[str, int] | None = None, batch: int = 1, want: Sequence[str] | None = None
) -> Cost:
    """What one forward pass of the compiled reading costs for sentences of so many words.

    `words` is one number, or one for each stack, and nothing for a net without words; `want` names the families that
    are asked for, as `net.module()` has it. The polynomials are exact for every number of words that the compiled
    reading treats in the same way.
    """
    network = network_of(network)
    counted = _words(network, words)
    whole("batch", batch)
    check_reads(network, counted)
    module = Module(network)
    names = (module.output,) if want is None else wanted(want)
    fold = batch * max([0, *counted.values()]) > module.widest
    counting = Counting(module.plan(names, frozenset(), fold=fold), Sizes(network, counted, batch))
    templates: dict[tuple[str, str, str], list[Member]] = {}
    for member in network.members:
        templates.setdefault((member.family.stack, _block(network, member), member.family.role), []).append(member)
    rows = tuple(_row(counting, block, members) for (_, block, _), members in templates.items())
    stacks = [stack.name for stack in network.declaration.stacks if stack.name in counting.sizes.widths]
    found = Cost(network.declaration.name, dict(counted), batch, rows, tuple(_slices(counting, s) for s in stacks))
    if max(found.flops or 0, found.value_bytes) >= 2**63:
        got = f"{words}, batch {batch}"
        raise BNetError("words", expected="so few words that FLOPs and bytes are below 2^63", got=got)
    return found


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
    if not stacks and words is not None and not (isinstance(words, Mapping) and not words):
        raise BNetError("words", expected="None: the net has no words", got=words)
    if words is None and not stacks:
        return {}
    if not isinstance(words, Mapping):
        return dict.fromkeys(stacks, whole("words", words))
    for name in words:
        if name not in stacks:
            raise unknown("stack", name, stacks)
    for name in stacks:
        if name not in words:
            raise BNetError("words", expected="a number for each stack: " + ", ".join(stacks), got=f"none for {name!r}")
    return {name: whole(f"words of {name!r}", words[name]) for name in stacks}


def _block(network: Network, member: Member) -> str:
    """Where a template stands: the block of its stack, or outside the stacks."""
    step = member.family.step
    if step is None:
        return "outside"
    return "prologue" if step < 0 else "epilogue" if step == network.graph.slices[member.family.stack] else "slice"


def _row(counting: Counting, block: str, members: Sequence[Member]) -> Row:
    """One template: all its slices together, parameters that they share once."""
    network, words = counting.sizes.network, _symbols(counting.sizes)
    store = {f"{m.owner}.{name}": network.parameters[f"{m.owner}.{name}"] for m in members for name in m.parameters}
    flops = counting.flops(member.family.index for member in members)
    first = members[0]
    weights = first.family.index in network.graph.wordless
    size = 8 if first.tpm.reads_by_index else network.dtype.itemsize
    made = [m.family.index for m in members if m.family.index in counting.products and not weights]
    kept = sum((counting.values[index] for index in made), Amount()).exact * number(size)
    return Row(
        template=first.family.stem,
        block=block,
        tpm=type(first.tpm).__name__,
        slices=len(members),
        parameters=sum(value.numel() for value in store.values()),
        flops=None if flops is None else flops.exact(words),
        flops_in_words=None if flops is None else flops.exact,
        order="unknown" if flops is None else flops.order,
        monomials=frozenset() if flops is None else flops.monomials,
        parameter_bytes=sum(value.numel() * value.element_size() for value in store.values()),
        value_bytes=kept(words),
        value_bytes_in_words=kept,
    )


def _symbols(sizes: Sizes) -> dict[str, int]:
    """The words of each stack, by their symbol in the polynomials."""
    return {sizes.word(stack).symbol: n for stack, n in sizes.words.items()}


def _slices(counting: Counting, stack: str) -> SliceCost:
    """The slices of a stack beside dense maps of all inputs to all outputs, their paths and steps."""
    sizes = counting.sizes
    network, words = sizes.network, _symbols(sizes)
    count = network.graph.slices[stack]
    inside = [m.family for m in network.members if m.family.stack == stack and _block(network, m) == "slice"]
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
        flops=None if flops is None else flops.exact(words),
        flops_in_words=None if flops is None else flops.exact,
        order="unknown" if flops is None else flops.order,
        steps=sequential,
        steps_order=steps_order,
        longest_path=longest,
        longest_path_order=path_order,
        dense_parameters=dense.exact(words) * count,
        dense_flops=2 * sizes.batch * dense.exact(words) * count,
        dense_order=dense.order,
    )

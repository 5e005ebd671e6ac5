"""The cost of a net: a row for each template of nodes, a row for the slices of each stack, totals and path lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
from scipy.sparse.csgraph import csgraph_from_dense, dijkstra

from bnet_transformer._core.checks import check_int
from bnet_transformer._core.naming import KINDS_WITH_WIDTH, Reach
from bnet_transformer._core.results import Result
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.module import find_output_groups, list_group_indices
from bnet_transformer.compiler.plan import PlanRequest
from bnet_transformer.cost.flop_counter import (
    ZERO,
    FlopCounter,
    Monomial,
    Polynomial,
    SizeTable,
    SymbolicCount,
    SymbolicSize,
    constant,
    format_order,
)
from bnet_transformer.data.encode import check_word_counts
from bnet_transformer.declare import Network, NodeSpec, as_network
from bnet_transformer.errors import BNetError, unknown_name_error

if TYPE_CHECKING:
    import pandas as pd


# --------------------------------------------------------------------------------------------------------------------
# The path length between words of a stack, and the number of sequential steps of its slice.
#
# Both are columns of table 1 of Vaswani et al. 2017. A *hop* is an arrow between different words. The path length from
# one word to another is the minimum number of hops from the state of the first to the state of the second, through any
# number of slices. The maximum is over the pairs of connected words.


MAX_TABLE_ROWS = 4096  # the maximum size of the table of all pairs of (node, word)


@dataclass(frozen=True)
class SliceEdge:
    """All arrows from one node of a slice to another, by indices of `SliceGraph.nodes`, and the reach of words."""

    parent: int
    child: int
    reach: Reach


@dataclass(frozen=True)
class SliceGraph:
    """The nodes of the last slice of a stack and the arrows within it; its input and output state are one node.

    So a cycle in the graph is a path through several slices.
    """

    nodes: tuple[NodeSpec, ...]
    edges: tuple[SliceEdge, ...]
    states: frozenset[int]


def build_slice_graph(network: Network, stack: str) -> SliceGraph:
    """The slice of a stack as a graph from state to state.

    Arrows from other slices than the child's are ignored, and so are paths through other stacks.
    """
    declared = next(s for s in network.declaration.stacks if s.name == stack)
    step = declared.slices - 1
    inside = [m for m in network.specs if m.group.stack == stack and m.group.step == step]
    nodes = [m for m in inside if m.group.word_stack in (stack, None)]
    position = {m.group.index: k for k, m in enumerate(nodes)}
    roles = {m.group.role: k for k, m in enumerate(nodes)}
    states = {role for role in declared.states if role in roles}
    for spec in network.specs:
        if spec.group.stack == stack and spec.group.slice == step and spec.group.role in states:
            position[spec.group.index] = roles[spec.group.role]
    edges = []
    for k, spec in enumerate(nodes):
        for edge in network.graph.in_edges[spec.group.index]:
            if edge.parent in position:
                edges += [SliceEdge(position[edge.parent], k, reach) for reach in edge.reaches]
    return _contract_graph(SliceGraph(tuple(nodes), tuple(edges), frozenset(roles[role] for role in states)))


def _contract_graph(graph: SliceGraph) -> SliceGraph:
    """Remove nodes that are on no path between states; merge nodes that are connected in both directions in one word.

    A merge does not change the number of hops between words: its nodes reach each other without a hop.
    """
    arrows, word_arrows = nx.DiGraph(), nx.DiGraph()
    for digraph in (arrows, word_arrows):
        digraph.add_nodes_from(range(len(graph.nodes)))
    for edge in graph.edges:
        arrows.add_edge(edge.parent, edge.child)
        wordless = None in (graph.nodes[edge.parent].group.word_stack, graph.nodes[edge.child].group.word_stack)
        if edge.reach.kind in ("same", "every", "causal", *KINDS_WITH_WIDTH) and not wordless:
            word_arrows.add_edge(edge.parent, edge.child)
    below = graph.states.union(*(nx.descendants(arrows, state) for state in graph.states))
    above = graph.states.union(*(nx.ancestors(arrows, state) for state in graph.states))
    representative = {
        k: min(component)
        for component in nx.strongly_connected_components(word_arrows)
        for k in component
        if k in below & above
    }
    retained = sorted(set(representative.values()))
    position = {k: retained.index(first) for k, first in representative.items()}
    edges = {
        SliceEdge(position[j.parent], position[j.child], j.reach)
        for j in graph.edges
        if {j.parent, j.child} <= {*position}
    }
    ordered = sorted(edges, key=lambda edge: (edge.parent, edge.child, str(edge.reach)))
    return SliceGraph(
        tuple(graph.nodes[k] for k in retained), tuple(ordered), frozenset(position[k] for k in graph.states)
    )


def longest_path(graph: SliceGraph, n: int) -> tuple[int | None, str]:
    """The maximum path length between two of n words, and its order.

    Returns:
        The length, None if no word is connected to another; and its order. The order is empty if the length is known
        for this n only, and "unknown" if it requires a table of all pairs with more than `MAX_TABLE_ROWS` rows.
    """
    overs = [(edge.reach, [graph.nodes[k].group.word_stack for k in (edge.parent, edge.child)]) for edge in graph.edges]
    kinds = {reach for reach, words in overs if None not in words and not reach.is_positionwise}
    kinds = {
        reach for reach in kinds if reach.kind not in KINDS_WITH_WIDTH or reach.width
    }  # reaches that join two words
    # In a graph of one node any hop can follow any other.
    is_single_node = len(graph.nodes) == 1 and graph.nodes[0].group.word_stack is not None
    if is_single_node and all(reach.kind in _SHIFT_KINDS for reach in kinds):
        return _longest_shift_path(kinds, n) if kinds else (None, "")
    if sum(1 if node.group.word_stack is None else n for node in graph.nodes) > MAX_TABLE_ROWS:
        return None, "unknown"
    return _longest_table_path(graph, n), ""


_SHIFT_KINDS = ("every", "causal", "earlier", "before", "after", "window", "recent", "same")


def _longest_shift_path(reaches: set[Reach], n: int) -> tuple[int | None, str]:
    """The path length if a word depends on all words, or the words up to a distance before and after it.

    Hops of at most s words cover a distance of n - 1 in ceil((n - 1) / s) steps; the slower direction is decisive.
    """
    backward: dict[str, float] = {"every": math.inf, "causal": math.inf, "earlier": math.inf, "before": 1}
    behind = max(backward.get(reach.kind, reach.width) for reach in reaches)
    forward = {"every": math.inf, "recent": 0, "after": 1}
    ahead = max(forward.get(reach.kind, reach.width) for reach in reaches)
    slowest = min(step for step in (behind, ahead) if step)
    if n == 1:
        return None, ""
    if slowest == math.inf:
        return 1, "O(1)"
    return math.ceil((n - 1) / slowest), "O(n)" if slowest == 1 else f"O(n / {slowest})"


def _longest_table_path(graph: SliceGraph, n: int) -> int | None:
    """The path length by Dijkstra's algorithm over all (node, word); None if no two words are connected."""
    sizes = [1 if node.group.word_stack is None else n for node in graph.nodes]
    starts = np.cumsum([0, *sizes])
    hops = np.full((starts[-1], starts[-1]), np.inf)
    for edge in graph.edges:
        rows = slice(starts[edge.parent], starts[edge.parent + 1])
        columns = slice(starts[edge.child], starts[edge.child + 1])
        n_parent, n_child = sizes[edge.parent], sizes[edge.child]
        leaves, enters = (graph.nodes[k].group.word_stack is None for k in (edge.parent, edge.child))
        if leaves:
            reads, steps = np.ones((n_parent, n_child), bool), np.full((n_parent, n_child), 0.0 if enters else 1.0)
        elif enters:
            reads, steps = edge.reach.matrix(1, n_parent).T, np.zeros((n_parent, 1))
        else:
            reads, steps = edge.reach.matrix(n_child, n_parent).T, 1 - np.eye(n)
        hops[rows, columns] = np.minimum(hops[rows, columns], np.where(reads, steps, np.inf))
    states = sorted(k for k in graph.states if graph.nodes[k].group.word_stack is not None)
    if not states:
        return None
    inside = np.concatenate([np.arange(starts[k], starts[k + 1]) for k in states])
    distances = dijkstra(csgraph_from_dense(hops, null_value=np.inf), indices=inside)[:, inside]
    word_distances = distances.reshape(len(states), n, len(states), n).min(
        (0, 2)
    )  # [word, word], the minimum over the states
    finite = word_distances[~np.eye(n, dtype=bool) & np.isfinite(word_distances)]
    return int(finite.max()) if finite.size else None


def count_sequential_steps(network: Network, stack: str, n: int) -> tuple[int, str]:
    """The sequential steps of a slice over n words, and their order if it is known.

    It is the longest chain of words, each of which depends on the previous one: no parallel schedule has fewer steps.
    """
    step = next(s for s in network.declaration.stacks if s.name == stack).slices - 1
    longest, waits = 1, False
    for component in network.graph.components:
        specs = [network.specs[index] for index in component]
        position = {index: k for k, index in enumerate(component)}
        inside = [
            (position[g.index], k, g.reach) for k, m in enumerate(specs) for g in m.parents if g.index in position
        ]
        group = specs[0].group
        if inside and group.stack == stack and group.step == step and group.word_stack is not None:
            longest, waits = max(longest, _longest_chain(inside, n)), True
    return longest, "O(1)" if not waits else "O(n)" if longest == n else ""


def _longest_chain(reaches: Sequence[tuple[int, int, Reach]], n: int) -> int:
    """The longest chain of words in a component that depends on itself at earlier words.

    A component is strongly connected. If every arrow can join a word to itself or to the next, a cycle can step to the
    next word, so the chain has all n words. Otherwise it is the longest path in the DAG of (node, word).
    """
    if all(reach.kind in ("same", "before", "earlier", "causal", "after") for _, _, reach in reaches):
        return n
    graph = nx.DiGraph()
    for parent, child, reach in reaches:
        words, read = np.nonzero(reach.matrix(n, n))
        pairs = zip(words.tolist(), read.tolist(), strict=True)
        graph.add_weighted_edges_from(((parent, j), (child, i), int(i != j)) for i, j in pairs)
    return 1 + int(nx.dag_longest_path_length(graph))


@dataclass(frozen=True)
class TemplateCost:
    """The cost of one template: all its nodes, heads and slices, for the batch.

    Nodes that the forward pass does not compute cost nothing.

    Attributes:
        template: The name of the template.
        block: The block of the template: prologue, slice or epilogue of a stack.
        tpm: The class of its TPM.
        slices: The number of slices.
        parameters: The number of parameters.
        flops: The FLOPs; None if the TPM does not declare its products.
        flops_in_words: The FLOPs as a polynomial in the number of words; None if they are not known.
        order: The order of growth of the FLOPs.
        monomials: The monomials of the FLOPs.
        parameter_bytes: The bytes of the parameters.
        value_bytes: The bytes of the values.
        value_bytes_in_words: The bytes of the values as a polynomial in the number of words.
    """

    template: str
    block: str
    tpm: str
    slices: int
    parameters: int
    flops: int | None
    flops_in_words: Polynomial | None
    order: str
    monomials: frozenset[Monomial]
    parameter_bytes: int
    value_bytes: int
    value_bytes_in_words: Polynomial


@dataclass(frozen=True)
class SliceCost:
    """The cost of the slices of one stack, compared with as many dense maps of all n d inputs to all n d outputs.

    The orders of steps and paths are empty if only the number for this number of words is known.

    Attributes:
        stack: The name of the stack.
        slices: The number of slices.
        flops: The FLOPs of all slices; None if they are not known.
        flops_in_words: The FLOPs as a polynomial in the number of words; None if they are not known.
        order: The order of growth of the FLOPs of one slice.
        steps: The number of sequential steps of one slice: the longest chain of words, each of which depends on the
            previous one.
        steps_order: The order of growth of `steps`.
        longest_path: The maximum path length between two words, in hops (Vaswani et al. 2017, table 1). None if no word
            depends on another, or if its computation requires a table of more than 4096 rows.
        longest_path_order: The order of growth of `longest_path`; "unknown" if the table would be too large.
        dense_parameters: The number of parameters of the dense maps.
        dense_flops: The FLOPs of the dense maps.
        dense_order: The order of growth of the FLOPs of one dense map.
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
class Cost(Result):
    """The cost of a forward pass of the compiled net.

    FLOPs are those of matrix products, two for each multiplication with its addition; elementwise operations (sums,
    norms, activations, softmax) are not counted. Bytes are those of the parameters, and of the values of all nodes
    except weights, as if all of them were stored.

    Attributes:
        name: The name of the net.
        words: The number of words of each stack.
        batch: The number of sentences.
        rows: The cost of each template of nodes.
        slices: The cost of the slices of each stack.
    """

    name: str
    words: dict[str, int]
    batch: int
    rows: tuple[TemplateCost, ...]
    slices: tuple[SliceCost, ...]

    @property
    def parameters(self) -> int:
        """The number of parameters, learnable and fixed."""
        return sum(row.parameters for row in self.rows)

    @property
    def flops_in_words(self) -> Polynomial | None:
        """The FLOPs as a polynomial in the number of words; None if the FLOPs of a template are not known."""
        known = [row.flops_in_words for row in self.rows if row.flops_in_words is not None]
        return sum(known, ZERO) if len(known) == len(self.rows) else None

    @property
    def flops(self) -> int | None:
        """The FLOPs of the forward pass; None if the FLOPs of a template are not known."""
        known = [row.flops for row in self.rows if row.flops is not None]
        return sum(known) if len(known) == len(self.rows) else None

    @property
    def unknown(self) -> tuple[str, ...]:
        """The templates whose TPM does not declare its products."""
        return tuple(row.template for row in self.rows if row.flops is None)

    @property
    def order(self) -> str:
        """The order of growth of the FLOPs."""
        return "unknown" if self.unknown else format_order(powers for row in self.rows for powers in row.monomials)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters."""
        return sum(row.parameter_bytes for row in self.rows)

    @property
    def value_bytes(self) -> int:
        """The bytes of all values, as if all of them were stored."""
        return sum(row.value_bytes for row in self.rows)

    def to_dataframe(self) -> pd.DataFrame:
        """A data frame with a row for each template of nodes; polynomials are text."""
        import pandas as pd

        frame = pd.DataFrame([vars(row) for row in self.rows]).drop(columns="monomials")
        frame["flops_in_words"] = [str(row.flops_in_words or "") for row in self.rows]
        frame["value_bytes_in_words"] = [str(row.value_bytes_in_words) for row in self.rows]
        return frame.astype({"flops": "Int64"})

    def __str__(self) -> str:
        return "\n".join(
            [self._format_header(), "", *_format_table(self._template_table()), "", *_format_table(self._slice_table())]
        )

    def _repr_html_(self) -> str:
        """The cost as HTML tables."""
        import pandas as pd

        frames = [pd.DataFrame(rows, columns=head) for head, *rows in (self._template_table(), self._slice_table())]
        with pd.option_context("display.max_colwidth", None):
            tables = "".join(frame.to_html(index=False, border=0) for frame in frames)
        return f"<p>{escape(self._format_header())}</p>{tables}"

    def _format_header(self) -> str:
        """The first line: sizes and totals."""
        words = "".join(f"{n:,} words" + (f" of {stack}, " if stack else ", ") for stack, n in self.words.items())
        flops = f"{self.flops:,} FLOPs" if self.flops is not None else "FLOPs unknown for " + ", ".join(self.unknown)
        return f"{self.name}: {words}batch {self.batch}: {self.parameters:,} parameters, {flops}, {self.order}"

    def _template_table(self) -> list[tuple[str, ...]]:
        """The table of node groups."""
        head = ("template", "TPM", "slices", "parameters", "FLOPs", "in n", "order", "bytes", "bytes of values")
        rows = [(row.template, row.tpm, str(row.slices), *_format_numbers(row)) for row in self.rows]
        return [head, *rows, ("total", "", "", *_format_numbers(self))]

    def _slice_table(self) -> list[tuple[str, ...]]:
        """The table of slices."""
        head = ("slices", "how many", "order of one", "steps of one", "longest path", "dense map", "dense parameters")
        table: list[tuple[str, ...]] = [head]
        for item in self.slices:
            steps = _format_with_order(item.steps, item.steps_order)
            longest_path = _format_with_order(item.longest_path, item.longest_path_order)
            dense = (item.dense_order, f"{item.dense_parameters:,}")
            table.append((item.stack or "all", str(item.slices), item.order, steps, longest_path, *dense))
        return table


def cost(
    network: Network, words: int | Mapping[str, int] | None = None, batch: int = 1, want: Sequence[str] | None = None
) -> Cost:
    """Compute the cost of one forward pass of the compiled net.

    The polynomials are exact for all numbers of words for which the compiler chooses the same operations.

    Args:
        network: The net.
        words: The number of words, or a mapping from stack to its number; None for a net without words.
        batch: The number of sentences.
        want: The names of the node groups or roles to compute; by default the outputs of `net.module()`.

    Returns:
        The cost, in total and for each template of nodes.
    """
    network = as_network(network)
    word_counts = _check_words(network, words)
    check_int("batch", batch)
    check_word_counts(network, word_counts)
    module = CompiledModule(network)
    outputs = list_group_indices(find_output_groups(network, [module.output] if want is None else want))
    fold = batch * max([0, *word_counts.values()]) > module.max_width
    counter = FlopCounter(module.plan(PlanRequest(outputs, fold=fold)), SizeTable(network, word_counts, batch))
    templates: dict[tuple[str, str, str], list[NodeSpec]] = {}
    for spec in network.specs:
        templates.setdefault((spec.group.stack, _get_block(network, spec), spec.group.role), []).append(spec)
    rows = tuple(_count_template(counter, block, specs) for (_, block, _), specs in templates.items())
    stacks = [stack.name for stack in network.declaration.stacks if stack.name in counter.sizes.widths]
    return Cost(
        network.declaration.name, dict(word_counts), batch, rows, tuple(_count_slices(counter, s) for s in stacks)
    )


def count_plan_flops(
    module: CompiledModule, request: PlanRequest, word_counts: Mapping[str, int], batch: int = 1
) -> int | None:
    """The floating-point operations of a run; None if a TPM does not declare its products.

    Args:
        module: The compiled net.
        request: The structure of the run.
        word_counts: The number of words of each stack.
        batch: The number of sentences.
    """
    sizes = SizeTable(module.network, dict(word_counts), batch)
    counter = FlopCounter(module.plan(request), sizes, request.known)
    flops = counter.flops(counter.multiplications)
    return None if flops is None else flops.exact(_get_word_values(sizes))


def _check_words(network: Network, words: object) -> dict[str, int]:
    """The number of words of each stack."""
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
            subject = f"words of stack {name!r}" if name else "words"
            hint = f"Pass a number for each of the stacks {', '.join(map(repr, stacks))}" if name else "Pass an integer"
            raise BNetError(subject, expected="a number of words", hint=hint)
    return {name: check_int(f"words of {name!r}", words[name]) for name in stacks}


def _get_block(network: Network, spec: NodeSpec) -> str:
    """The block of a template: prologue, slice or epilogue of its stack, or "outside"."""
    step = spec.group.step
    if step is None:
        return "outside"
    return "prologue" if step < 0 else "epilogue" if step == network.graph.slices[spec.group.stack] else "slice"


def _count_template(counter: FlopCounter, block: str, specs: Sequence[NodeSpec]) -> TemplateCost:
    """The cost of one template over all its slices; parameters that slices share count once."""
    network, word_values = counter.sizes.network, _get_word_values(counter.sizes)
    store = {
        f"{m.param_prefix}.{name}": network.parameters[f"{m.param_prefix}.{name}"]
        for m in specs
        for name in m.parameters
    }
    flops = counter.flops(spec.group.index for spec in specs)
    symbols = _get_symbols(counter.sizes)
    first = specs[0]
    weights = first.group.index in network.graph.word_independent
    size = 8 if first.tpm.is_index_valued else network.dtype.itemsize
    computed = [m.group.index for m in specs if m.group.index in counter.multiplications and not weights]
    value_bytes = sum((counter.entries[index] for index in computed), SymbolicCount()).exact * constant(size)
    value_bytes = replace(value_bytes, symbol_by_stack=symbols)
    return TemplateCost(
        template=first.group.stem,
        block=block,
        tpm=type(first.tpm).__name__,
        slices=len(specs),
        parameters=sum(value.numel() for value in store.values()),
        **_describe_flops(flops, word_values, symbols),
        monomials=frozenset() if flops is None else flops.monomials,
        parameter_bytes=sum(value.numel() * value.element_size() for value in store.values()),
        value_bytes=value_bytes(word_values),
        value_bytes_in_words=value_bytes,
    )


def _describe_flops(
    flops: SymbolicCount | None, word_values: Mapping[str, int], symbols: Mapping[str, str]
) -> dict[str, Any]:
    """The FLOPs of a row; None if a TPM does not declare its products."""
    if flops is None:
        return {"flops": None, "flops_in_words": None, "order": "unknown"}
    polynomial = replace(flops.exact, symbol_by_stack=symbols)
    return {"flops": flops.exact(word_values), "flops_in_words": polynomial, "order": flops.order}


def _get_symbols(sizes: SizeTable) -> dict[str, str]:
    """The symbol of the number of words of each stack in the polynomials."""
    return {stack: sizes.word_size(stack).symbol for stack in sizes.word_counts}


def _get_word_values(sizes: SizeTable) -> dict[str, int]:
    """The number of words of each stack, by its symbol in the polynomials."""
    return {sizes.word_size(stack).symbol: n for stack, n in sizes.word_counts.items()}


def _count_slices(counter: FlopCounter, stack: str) -> SliceCost:
    """The cost of the slices of a stack and of dense maps of all inputs to all outputs, and their paths and steps."""
    sizes = counter.sizes
    network, word_values = sizes.network, _get_word_values(sizes)
    count = network.graph.slices[stack]
    inside = [m.group for m in network.specs if m.group.stack == stack and _get_block(network, m) == "slice"]
    flops = counter.flops(group.index for group in inside)
    word, width = sizes.word_size(stack), sizes.widths[stack]
    side = (word, SymbolicSize(sizes.width_symbols[width], width))
    dense = SymbolicCount.product((*side, *side))
    n = sizes.word_counts[stack]
    longest, path_order = longest_path(build_slice_graph(network, stack), n)
    sequential, steps_order = count_sequential_steps(network, stack, n)
    return SliceCost(
        stack=stack,
        slices=count,
        **_describe_flops(flops, word_values, _get_symbols(sizes)),
        steps=sequential,
        steps_order=steps_order,
        longest_path=longest,
        longest_path_order=path_order,
        dense_parameters=dense.exact(word_values) * count,
        dense_flops=2 * sizes.batch * dense.exact(word_values) * count,
        dense_order=dense.order,
    )


def _format_numbers(item: TemplateCost | Cost) -> tuple[str, ...]:
    """The numbers of a template, or the totals, as text."""
    return (
        f"{item.parameters:,}",
        "unknown" if item.flops is None else f"{item.flops:,}",
        "" if item.flops_in_words is None else str(item.flops_in_words),
        item.order,
        f"{item.parameter_bytes:,}",
        f"{item.value_bytes:,}",
    )


def _format_with_order(count: int | None, order_text: str) -> str:
    """A count with its order, if the order is known."""
    return order_text or "none" if count is None else f"{count:,}, {order_text}" if order_text else f"{count:,}"


def _format_table(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, with right-justified numbers."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(_justify_cell(text, width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table
    ]


def _justify_cell(text: str, width: int) -> str:
    """A cell of a table, right-justified if it is a number."""
    return text.rjust(width) if text[:1].isdigit() and text.replace(",", "").isdigit() else text.ljust(width)

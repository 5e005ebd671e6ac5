"""Computations on log tables: for `variable elimination` (`factor_graph`) sums, samples and the largest entries of a
product of tables, whose variables are eliminated one by one; for `elimination`, recursions on chains.

A log table has a dim for each variable of its scope; -inf is the log of probability 0. To eliminate a variable, all
tables whose scope contains it are added, and the variable is summed or maximised out (Dechter 1999, Bucket elimination:
a unifying framework for reasoning). The cost is that of the largest joint scope, so the order matters. Orders come from
the tree decompositions of networkx: the bags of a decomposition are joint scopes, and if the variables of each bag that
do not occur in its parent bag are eliminated from the leaves to the root, no other scopes arise (Koller and Friedman
2009, section 10.4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
import torch
from networkx.algorithms.approximation import treewidth_min_degree, treewidth_min_fill_in
from numpy.typing import NDArray
from torch import Tensor

# --------------------------------------------------------------------------------------------------------------------
# Rows of states of variables that contain all joint states of each of many scopes, such as one scope for each word.


@dataclass(frozen=True)
class JointRows:
    """Rows in which each variable is in the state of its colour; the variables of one scope have different colours.

    So the rows contain all joint states of each scope, and their number is the product over colours and not over
    variables. The last colour varies fastest.

    Attributes:
        counts: The number of states of each variable.
        colours: The colour of each variable in a scope, by the position of the variable in `counts`.
        sizes: The number of states of each colour.
    """

    counts: Sequence[int]
    colours: Mapping[int, int]
    sizes: tuple[int, ...]

    @classmethod
    def build(
        cls, scopes: Iterable[Sequence[int]], counts: Sequence[int], order: Sequence[tuple[int, int]]
    ) -> JointRows:
        """Rows for some scopes, with a small number of colours.

        Args:
            scopes: The positions of the variables of each scope.
            counts: The number of states of each variable.
            order: A sort key of each variable, such as its word.
        """
        neighbours: dict[int, set[int]] = {}
        for scope in {tuple(scope) for scope in scopes}:
            for k in scope:
                neighbours.setdefault(k, set()).update(scope)
        colours: dict[int, int] = {}
        # Greedy colouring in the order of words: if scopes are intervals of words, it needs only as many colours as the
        # largest scope has variables (Golumbic 2004, Algorithmic graph theory and perfect graphs, chapter 8).
        for k in sorted(neighbours, key=order.__getitem__):
            taken = {colours[other] for other in neighbours[k] if other in colours}
            colours[k] = next(colour for colour in range(len(taken) + 1) if colour not in taken)
        sizes = [1] * (max(colours.values(), default=-1) + 1)
        for k, colour in colours.items():
            sizes[colour] = max(sizes[colour], counts[k])
        return cls(counts, colours, tuple(sizes))

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return math.prod(self.sizes)

    def get_states(self) -> dict[int, NDArray[np.int64]]:
        """The state of each variable of a scope in each row, `[row]` by position.

        A variable with fewer states than its colour is in its last state in the other rows, which `find_rows` omits.
        """
        digits = np.unravel_index(np.arange(self.num_rows), self.sizes) if self.sizes else ()
        return {k: np.minimum(digits[colour], self.counts[k] - 1) for k, colour in self.colours.items()}

    def find_rows(self, scope: Sequence[int]) -> NDArray[np.int64]:
        """The row of each joint state of some variables, with all other colours in their first state.

        Returns:
            `[*states of the scope]`.
        """
        rows = np.zeros([1] * len(scope), dtype=np.int64)
        for axis, k in enumerate(scope):
            steps = np.arange(self.counts[k]) * math.prod(self.sizes[self.colours[k] + 1 :])
            rows = rows + steps.reshape([-1 if other == axis else 1 for other in range(len(scope))])
        return rows


Array = NDArray[np.float64]
Indices = NDArray[np.int64]
MAX_TIES = 256  # equal products that are compared at the end of a ranked list
MAX_FILL_VARIABLES = 128  # variables up to which minimum fill, which is slower, is tried as well


@dataclass(frozen=True, eq=False)
class LogTable:
    """The log of one factor of a product.

    Attributes:
        scope: The variables, in increasing order.
        values: `[*states of the scope]`.
    """

    scope: tuple[int, ...]
    values: Array


@dataclass(frozen=True)
class EliminationOrder:
    """An order in which variables are eliminated, and its cost.

    Attributes:
        variables: The eliminated variables, in order.
        scope: The variables of the largest joint scope.
        states: The number of joint states of that scope.
        entries: The number of entries of all tables that the elimination computes.
    """

    variables: tuple[int, ...]
    scope: tuple[int, ...]
    states: int
    entries: int


def find_elimination_order(
    scopes: Iterable[Collection[int]], sizes: Sequence[int], retained: Collection[int] = ()
) -> EliminationOrder:
    """The cheapest elimination order that the heuristics of networkx find.

    Args:
        scopes: The scopes of the tables.
        sizes: The number of states of each variable.
        retained: The variables that are not eliminated; their joint table remains.

    Returns:
        The order, and the cost of the elimination and of the joint table of the retained variables.
    """
    distinct = {frozenset(scope) for scope in scopes}
    # A clique of the retained variables is in one bag. With this bag as the root, they are the last ones.
    graph = _build_interaction_graph([*distinct, frozenset(retained)])
    heuristics = [treewidth_min_degree]
    heuristics += [treewidth_min_fill_in] if len(graph) <= MAX_FILL_VARIABLES else []
    orders = [_order_by_decomposition(heuristic(graph)[1], frozenset(retained)) for heuristic in heuristics]
    candidates = [_measure_order(order, distinct, sizes, retained) for order in orders]
    return min(candidates, key=lambda order: (order.states, order.entries))


def find_constrained_order(
    scopes: Iterable[Collection[int]], sizes: Sequence[int], last: Collection[int]
) -> tuple[EliminationOrder, EliminationOrder]:
    """An order in which all other variables are eliminated before those of `last`, as marginal MAP requires.

    Args:
        scopes: The scopes of the tables.
        sizes: The number of states of each variable.
        last: The variables that are eliminated last.

    Returns:
        The order of the other variables, and the order of `last`.
    """
    # Variables of different connected components, once `last` is removed, do not meet before `last` is eliminated. So
    # each component is ordered by itself, and what remains of it is one table over its neighbours.
    remaining = {frozenset(scope) for scope in scopes}
    first, total, largest = list[int](), 0, EliminationOrder((), (), 1, 0)
    graph = _build_interaction_graph(remaining)
    for component in nx.connected_components(graph.subgraph(set(graph) - set(last))):
        touching = {scope for scope in remaining if scope & component}
        boundary = frozenset().union(*touching) - component
        order = find_elimination_order(touching, sizes, boundary)
        first += order.variables
        total += order.entries
        largest = max(largest, order, key=lambda item: item.states)
        remaining = (remaining - touching) | {boundary}
    summed = EliminationOrder(tuple(first), largest.scope, largest.states, total)
    return summed, find_elimination_order(remaining, sizes)


def _build_interaction_graph(scopes: Iterable[Collection[int]]) -> nx.Graph:
    """The graph with an edge between each two variables of one scope."""
    graph = nx.Graph()
    for scope in scopes:
        ordered = sorted(scope)
        graph.add_nodes_from(ordered)
        graph.add_edges_from((a, b) for k, a in enumerate(ordered) for b in ordered[k + 1 :])
    return graph


def _order_by_decomposition(decomposition: nx.Graph, retained: frozenset[int]) -> list[int]:
    """The variables of a tree decomposition from its leaves to the root, without those that are retained."""
    if not decomposition:
        return []
    root = next(bag for bag in decomposition if retained <= bag)
    order, eliminated = list[int](), set[int](retained)
    # Parents come before children in a search from the root, so that the reverse of its bags starts at the leaves.
    search = [(None, root), *nx.bfs_edges(decomposition, root)]
    for parent, bag in reversed(search):
        variables = sorted(bag - (parent or frozenset()) - eliminated)
        order += variables
        eliminated.update(variables)
    return order


def _measure_order(
    order: Sequence[int], scopes: Iterable[frozenset[int]], sizes: Sequence[int], retained: Collection[int]
) -> EliminationOrder:
    """The largest joint scope of an order, and the number of entries of all its tables."""
    touching: dict[int, set[frozenset[int]]] = {}
    for scope in scopes:
        for variable in scope:
            touching.setdefault(variable, set()).add(scope)
    largest, states = tuple(sorted(retained)), math.prod(sizes[variable] for variable in retained)
    entries = states
    for variable in order:
        merged = touching.pop(variable, set())
        joint = frozenset({variable}).union(*merged)
        count = math.prod(sizes[other] for other in joint)
        entries += count
        if count > states:
            largest, states = tuple(sorted(joint)), count
        for other in joint - {variable}:
            touching[other] -= merged
            touching[other].add(joint - {variable})
    return EliminationOrder(tuple(order), largest, states, entries)


def _add_aligned(tables: Sequence[LogTable], scope: Sequence[int], sizes: Sequence[int]) -> Array:
    """The sum of tables over a joint scope, which contains their scopes."""
    total = np.zeros([sizes[variable] for variable in scope])
    for table in tables:
        total += _align(table, scope)
    return total


def _align(table: LogTable, scope: Sequence[int]) -> Array:
    """The values of a table with a dim for each variable of a joint scope; other dims have size 1."""
    inside = iter(table.values.shape)
    return table.values.reshape([next(inside) if variable in table.scope else 1 for variable in scope])


def logsumexp(values: Array, axis: int) -> Array:
    """`log sum exp` over one axis; -inf if all entries are -inf."""
    greatest = values.max(axis, keepdims=True)
    greatest = np.where(np.isfinite(greatest), greatest, 0.0)
    with np.errstate(divide="ignore"):
        result: Array = np.log(np.exp(values - greatest).sum(axis)) + greatest.squeeze(axis)
    return result


class _TableBuckets:
    """Tables by the variables of their scopes."""

    def __init__(self, tables: Iterable[LogTable]) -> None:
        self.tables: dict[int, LogTable] = {}
        self._by_variable: dict[int, list[int]] = {}
        self._count = 0
        for table in tables:
            self.add(table)

    def add(self, table: LogTable) -> None:
        """Add a table."""
        self.tables[self._count] = table
        for variable in table.scope:
            self._by_variable.setdefault(variable, []).append(self._count)
        self._count += 1

    def pop(self, variable: int) -> list[LogTable]:
        """Remove the tables whose scope contains a variable."""
        keys = self._by_variable.pop(variable, [])
        return [self.tables.pop(key) for key in keys if key in self.tables]


def _join_scopes(tables: Iterable[LogTable | RankedTable], *variables: int) -> tuple[int, ...]:
    """The union of the scopes of some tables and further variables, in increasing order."""
    return tuple(sorted({*variables}.union(*(table.scope for table in tables))))


def sum_out(
    tables: Iterable[LogTable],
    order: Iterable[int],
    sizes: Sequence[int],
    joints: list[tuple[int, LogTable]] | None = None,
) -> list[LogTable]:
    """Sum variables out of a product of tables.

    Args:
        tables: The log tables of the product.
        order: The variables to sum out.
        sizes: The number of states of each variable.
        joints: A list to which each variable is appended with the joint table from which it was summed out; None if
            these tables are not used.

    Returns:
        The tables that remain.
    """
    buckets = _TableBuckets(tables)
    for variable in order:
        merged = buckets.pop(variable)
        scope = _join_scopes(merged, variable)
        joint = LogTable(scope, _add_aligned(merged, scope, sizes))
        axis = scope.index(variable)
        buckets.add(LogTable((*scope[:axis], *scope[axis + 1 :]), logsumexp(joint.values, axis)))
        if joints is not None:
            joints.append((variable, joint))
    return list(buckets.tables.values())


def compute_joint_table(
    tables: Iterable[LogTable], order: EliminationOrder, sizes: Sequence[int], retained: Sequence[int]
) -> Array:
    """The log of the sum of a product over all variables of an order: a table over the retained variables.

    Args:
        tables: The log tables of the product.
        order: The order of the other variables.
        sizes: The number of states of each variable.
        retained: The variables of the result.

    Returns:
        `[*states of retained]`.
    """
    scope = tuple(sorted(retained))
    values = _add_aligned(sum_out(tables, order.variables, sizes), scope, sizes)
    return values.transpose([scope.index(variable) for variable in retained])


def draw_states(
    tables: Iterable[LogTable], order: EliminationOrder, sizes: Sequence[int], draw_uniforms: Callable[[], Array]
) -> tuple[float, dict[int, Indices]]:
    """Independent samples from the normalised product of tables.

    Args:
        tables: The log tables of the product.
        order: An order of all variables.
        sizes: The number of states of each variable.
        draw_uniforms: A function that returns a uniform random number in [0, 1) for each sample.

    Returns:
        The log of the sum of the product, and the states of each variable, `[sample]`. The states have no meaning if
        the sum is zero.
    """
    joints = list[tuple[int, LogTable]]()
    total = sum(float(table.values) for table in sum_out(tables, order.variables, sizes, joints))
    states: dict[int, Indices] = {}
    # The joint table of a variable contains all factors in which it meets the variables that are eliminated later. So
    # in reverse order, given their states, it is the conditional distribution up to a constant.
    for variable, joint in reversed(joints) if total > -math.inf else ():
        logs = np.moveaxis(joint.values, joint.scope.index(variable), -1)
        logs = logs[tuple(states[other] for other in joint.scope if other != variable)]
        uniforms = draw_uniforms()
        cumulative = np.exp(logs - logs.max(-1, keepdims=True)).cumsum(-1)
        cumulative = np.atleast_2d(cumulative / cumulative[..., -1:])
        states[variable] = (cumulative > uniforms[:, None]).argmax(-1)
    return total, states


def compute_marginals(
    tables: Iterable[LogTable], order: EliminationOrder, sizes: Sequence[int]
) -> tuple[float, dict[int, Array]]:
    """The marginals of all variables under the normalised product of tables, in two passes.

    Args:
        tables: The log tables of the product.
        order: An order of all variables.
        sizes: The number of states of each variable.

    Returns:
        The log of the sum of the product, and the log probabilities of each variable, `[state]`. They have no meaning
        if the sum is zero.
    """
    joints = list[tuple[int, LogTable]]()
    total = sum(float(table.values) for table in sum_out(tables, order.variables, sizes, joints))
    position = {variable: k for k, variable in enumerate(order.variables)}
    beliefs: dict[int, LogTable] = {}
    marginals: dict[int, Array] = {}
    # P(v | separator) of the joint table of v, times P(separator), a marginal of the table that contains v's message.
    # This calibrates the tree of buckets (Koller and Friedman 2009, section 10.3).
    for variable, joint in reversed(joints) if total > -math.inf else ():
        axis, separator = joint.scope.index(variable), tuple(other for other in joint.scope if other != variable)
        message = np.expand_dims(logsumexp(joint.values, axis), axis)
        conditional = np.where(np.isfinite(message), joint.values - np.where(np.isfinite(message), message, 0), -np.inf)
        context = LogTable((), np.zeros(()))
        if separator:
            context = _marginalise(beliefs[min(separator, key=position.__getitem__)], separator)
        beliefs[variable] = LogTable(joint.scope, conditional + _align(context, joint.scope))
        marginals[variable] = _marginalise(beliefs[variable], (variable,)).values
    return total, marginals


def _marginalise(table: LogTable, scope: Sequence[int]) -> LogTable:
    """The sum of a log table over all variables except those of a scope."""
    axes = tuple(k for k, variable in enumerate(table.scope) if variable not in scope)
    shape = [size for k, size in enumerate(table.values.shape) if k not in axes]
    flat = (
        np.moveaxis(table.values, axes, range(-len(axes), 0)).reshape(*shape, -1) if axes else table.values[..., None]
    )
    return LogTable(tuple(scope), logsumexp(flat, -1))


@dataclass(frozen=True, eq=False)
class RankedTable:
    """The k largest sums over the eliminated variables, in each state of a scope.

    Attributes:
        variable: The variable that was eliminated last.
        scope: The variables, in increasing order.
        values: `[*states of the scope, k]`, from the largest; -inf beyond the number of possible states.
    """

    variable: int
    scope: tuple[int, ...]
    values: Array


@dataclass(frozen=True, eq=False)
class _Merge:
    """How a ranked list was merged from lists: the pair of ranks of each of its entries.

    `left` has the rank in the list merged so far, and `right` that in the list of the eliminated variable `variable`,
    `[*states of the scope, k]` each.
    """

    variable: int
    left: Indices
    right: Indices


@dataclass(frozen=True, eq=False)
class _Maximisation:
    """How one variable was eliminated: the merged lists, and the state and the rank of each entry of the result."""

    variable: int
    scope: tuple[int, ...]  # with the variable
    merges: Sequence[_Merge]
    states: Indices  # [*states of the scope without the variable, k]
    ranks: Indices


def find_best_states(
    tables: Sequence[LogTable], order: EliminationOrder, sizes: Sequence[int], count: int
) -> tuple[dict[int, Indices], Array]:
    """The joint states of the largest products of tables.

    Args:
        tables: The log tables of the product.
        order: An order of all variables.
        sizes: The number of states of each variable.
        count: The maximum number of joint states.

    Returns:
        The states of each variable, `[k]`, from the largest product, and the logs of the products, `[k]`; k is smaller
        than `count` if there are fewer possible joint states. Of equal products, the smaller states come first.
    """
    length, longest = count + 1, count + MAX_TIES
    states, logs = _find_ranked_states(tables, order, sizes, length)
    # If the products after the last one are equal to it, the list is extended to find those with the smallest states.
    while len(logs) == length < longest and logs[-1] == logs[count - 1]:
        length = min(2 * length, longest)
        states, logs = _find_ranked_states(tables, order, sizes, length)
    return {variable: state[:count] for variable, state in states.items()}, logs[:count]


def _find_ranked_states(
    tables: Sequence[LogTable], order: EliminationOrder, sizes: Sequence[int], count: int
) -> tuple[dict[int, Indices], Array]:
    """The joint states of the largest products, by elimination with ranked lists of k entries instead of maxima."""
    # Lists with addition and selection of the k largest are a semiring, so that the algorithm is that of the sum
    # (Nilsson 1998, An efficient algorithm for finding the M most probable configurations).
    buckets = _TableBuckets(_round_to_grid(tables))
    ranked: dict[int, list[RankedTable]] = {}  # by each variable of their scope, or -1 for an empty scope
    steps = list[_Maximisation]()
    for variable in order.variables:
        merged, lists = buckets.pop(variable), ranked.pop(variable, [])
        for item in lists:
            for other in item.scope:
                if other != variable:
                    ranked[other].remove(item)
        scope = _join_scopes([*merged, *lists], variable)
        values, merges = _merge_lists(lists, scope, sizes, count)
        values = values + _add_aligned(merged, scope, sizes)[..., None]
        axis = scope.index(variable)
        values = np.moveaxis(values, axis, -2)  # [*other states, state, rank]
        length = values.shape[-1]
        values, selected = _select_largest(values.reshape(*values.shape[:-2], -1), count)
        result = RankedTable(variable, (*scope[:axis], *scope[axis + 1 :]), values)
        for other in result.scope or (-1,):
            ranked.setdefault(other, []).append(result)
        steps.append(_Maximisation(variable, scope, merges, selected // length, selected % length))
    lists = ranked.pop(-1, [])
    values, merges = _merge_lists(lists, (), sizes, count)
    constant = _add_aligned([*buckets.tables.values()], (), sizes)
    possible = int((values + constant > -np.inf).sum())
    ranks = _split_ranks(merges, np.arange(possible), ())
    states: dict[int, Indices] = {}
    for step in reversed(steps):
        at = (*(states[other] for other in step.scope if other != step.variable), ranks[step.variable])
        states[step.variable] = step.states[at]
        position = tuple(states[other] for other in step.scope)
        ranks |= _split_ranks(step.merges, step.ranks[at], position)
    terms = np.zeros((possible, len(tables)))
    for k, table in enumerate(tables):
        terms[:, k] = table.values[tuple(states[variable] for variable in table.scope)]
    logs = np.array([math.fsum(row) for row in terms])  # its rounding does not depend on the order of the terms
    rank = np.lexsort([*(states[variable] for variable in sorted(states, reverse=True)), -logs])
    return {variable: state[rank] for variable, state in states.items()}, logs[rank]


def _round_to_grid(tables: Sequence[LogTable]) -> list[LogTable]:
    """The tables in multiples of a power of 2 so large that all sums are exact, and equal sums are ties."""
    magnitudes = [
        float(np.abs(table.values, where=np.isfinite(table.values), out=np.zeros_like(table.values)).max())
        for table in tables
    ]
    step = find_grid_step(sum(magnitudes))
    return [LogTable(table.scope, np.round(table.values / step) * step) for table in tables]


def find_grid_step(total: float) -> float:
    """A power of 2 such that sums of its multiples are exact, if their magnitudes add up to at most `total`."""
    return 2.0 ** (math.frexp(total)[1] - 51)


def _merge_lists(
    lists: Sequence[RankedTable], scope: tuple[int, ...], sizes: Sequence[int], count: int
) -> tuple[Array, list[_Merge]]:
    """The k largest sums of one entry of each list, in each state of a joint scope: `[*states of the scope, k]`."""
    shape = [sizes[variable] for variable in scope]
    values, merges = np.zeros((*shape, 1)), list[_Merge]()
    for item in lists:
        aligned = _align_list(item, scope)
        if not merges:  # one list is its own result; views without copies for each state
            values = np.broadcast_to(aligned, (*shape, aligned.shape[-1]))
            ranks = np.arange(aligned.shape[-1])
            merges.append(_Merge(item.variable, *(np.broadcast_to(k, values.shape) for k in (0 * ranks, ranks))))
            continue
        # The entry of rank a and the one of rank b have at least (a + 1) (b + 1) - 1 pairs before them.
        pairs = [
            (a, b) for a in range(values.shape[-1]) for b in range(aligned.shape[-1]) if (a + 1) * (b + 1) <= count
        ]
        left, right = (np.array(ranks) for ranks in zip(*pairs, strict=True))
        sums = np.broadcast_to(values[..., left] + aligned[..., right], (*shape, len(pairs)))
        values, selected = _select_largest(sums, count)
        merges.append(_Merge(item.variable, left[selected], right[selected]))
    return values, merges


def _align_list(item: RankedTable, scope: Sequence[int]) -> Array:
    """The values of a ranked table with a dim for each variable of a joint scope, and the dim of ranks."""
    inside = iter(item.values.shape[:-1])
    shape = [next(inside) if variable in item.scope else 1 for variable in scope]
    return item.values.reshape(*shape, item.values.shape[-1])


def _select_largest(values: Array, count: int) -> tuple[Array, Indices]:
    """The k largest entries of the last dim, from the largest, and their indices; equal entries keep their order."""
    selected = np.argsort(-values, axis=-1, kind="stable")[..., :count]
    return np.take_along_axis(values, selected, -1), selected


def _split_ranks(merges: Sequence[_Merge], ranks: Indices, position: tuple[Indices, ...]) -> dict[int, Indices]:
    """The rank in each merged list, from the ranks in the result of a merge, in some states of the joint scope."""
    split = {}
    for merge in reversed(merges):
        at = (*position, ranks)
        split[merge.variable] = merge.right[at]
        ranks = merge.left[at]
    return split


# --------------------------------------------------------------------------------------------------------------------
# Forward-backward recursions on chains in log space: log partition functions with exact gradients.
#
# A chain of n positions with states `c_0 .. c_(n-1)` has the unnormalised probability
#
#     exp(u_0[c_0]) prod_{i > 0} exp(p_i[c_(i-1), c_i] + u_i[c_i]),
#
# with a vector `u_i` (`unary`) for each position and a matrix `p_i` (`pair`) for each position but the first. The
# forward message `alpha_i[b]` is the log of the sum over all states up to i with `c_i = b`; the backward message
# `beta_i[a]` is that over all states after i, given `c_i = a` (Rabiner 1989, "A tutorial on hidden Markov models").
#
# All sums are log-sum-exp. Rescaled products of probabilities are not enough: if the likelihood of one position favours
# a state by 800 nats, and later positions favour another state by 2,000 nats, then the decisive state has underflowed.


# The loop takes n steps, the tree O(log n). On a CPU the tree is faster while the matrices of one position have few
# entries (measured). On a GPU it is faster while its terms fit in memory.
MAX_TREE_SIZE = 2**9
MAX_TREE_TERMS = 2**27
CHUNK_ELEMENTS = 2**18  # entries of pair posteriors that are computed at once, so that they fit in the cache


def chain_log_partition(unary: Tensor, pair: Tensor) -> Tensor:
    """The log of the sum over all sequences of states, in float64.

    Its derivative with respect to `unary` is the posterior `P(c_i = b)`, and that with respect to `pair` is
    `P(c_(i-1) = a, c_i = b)` (Darwiche 2003, "A differential approach to inference in Bayesian networks").

    Args:
        unary: `[n, S, K]`: the log potential of each position, sequence and state.
        pair: `[n - 1 or 1, S or 1, K, K]`: the log potential of each position after the first, from the state of the
            previous position (dim -2) to its own state (dim -1). Size 1 broadcasts.

    Returns:
        The log partition function of each sequence, `[S]`.
    """
    unary, pair = unary.double(), pair.double()
    if len(unary) == 1:
        return unary[0].logsumexp(-1)
    log_partition: Tensor = _ForwardBackward.apply(unary, pair, torch.is_grad_enabled())[0]  # type: ignore[no-untyped-call]
    return log_partition


def most_probable_path(unary: Array, pair: Array) -> tuple[NDArray[np.int64], float]:
    """The most probable sequence of states, and the log of its product (Viterbi 1967).

    Args:
        unary: `[n, K]`: the log potential of each position and state.
        pair: `[n - 1, K, K]`: the log potential of each position after the first, from the state of the previous
            position to its own state.

    Returns:
        The states `[n]` and the log of the product. Of equal products, the sequence with the smallest first states.
    """
    # Backward messages, and then states from the first position on: so the first of equal maxima is the smallest state.
    greatest = [np.abs(table, where=np.isfinite(table), out=np.zeros_like(table)) for table in (unary, pair)]
    step = find_grid_step(sum(float(table.max(tuple(range(1, table.ndim)), initial=0.0).sum()) for table in greatest))
    rounded, links = np.round(unary / step) * step, np.round(pair / step) * step
    for i in range(len(links) - 1, -1, -1):
        rounded[i] += (links[i] + rounded[i + 1]).max(1)
    state = int(rounded[0].argmax())
    states = [state]
    for i, link in enumerate(links):
        state = int((link[state] + rounded[i + 1]).argmax())
        states.append(state)
    path = np.array(states)
    terms = np.concatenate([unary[np.arange(len(path)), path], pair[np.arange(len(pair)), path[:-1], path[1:]]])
    return path, math.fsum(terms)


def forward_messages(unary: Tensor, pair: Tensor) -> Tensor:
    """The forward messages `alpha`, `[n, S, K]`, in a loop over the positions."""
    messages = [unary[0]]
    for factor, matrix in zip(unary[1:].unbind(0), _matrices(unary, pair), strict=True):
        messages.append((messages[-1].unsqueeze(-1) + matrix).logsumexp(-2) + factor)
    return torch.stack(messages)


def backward_messages(unary: Tensor, pair: Tensor) -> Tensor:
    """The backward messages `beta`, `[n, S, K]`, in a loop over the positions."""
    messages = [torch.zeros_like(unary[-1])]
    for factor, matrix in zip(unary[1:].flip(0).unbind(0), reversed(_matrices(unary, pair)), strict=True):
        messages.append((matrix + (messages[-1] + factor).unsqueeze(-2)).logsumexp(-1))
    return torch.stack(messages[::-1])


def _matrices(unary: Tensor, pair: Tensor) -> list[Tensor]:
    """The matrix of each position after the first, `[S or 1, K, K]`."""
    return list(pair.expand(len(unary) - 1, *pair.shape[1:]).unbind(0))


class _ForwardBackward(torch.autograd.Function):
    """`log Z`, `alpha` and `beta`. The gradient of `log Z` is a function of the messages, which are outputs, so that it
    is differentiable too.
    """

    @staticmethod
    def forward(unary: Tensor, pair: Tensor, needs_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
        n, sequences, states = unary.shape
        if unary.device.type == "cpu":
            has_tree = sequences * states**2 <= MAX_TREE_SIZE
        else:
            has_tree = n * sequences * states**3 <= MAX_TREE_TERMS
        messages = _messages_by_tree(unary, pair) if has_tree else None
        if messages is None and not has_tree and unary.device.type == "cpu" and pair.shape[1] == 1:
            messages = _messages_by_products(unary, pair, needs_gradient)
        if messages is None:
            alpha = forward_messages(unary, pair)
            messages = alpha, backward_messages(unary, pair) if needs_gradient else torch.zeros_like(alpha)
        return messages[0][-1].logsumexp(-1), *messages

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:2], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        unary, pair, log_partition, alpha, beta = ctx.saved_tensors
        by_partition, by_alpha, by_beta = grads
        unary_grad, pair_grad = None, None
        if by_partition is not None:
            posterior = (alpha + beta - log_partition.unsqueeze(-1)).clamp(max=0.0).exp()
            unary_grad = by_partition.unsqueeze(-1) * posterior
            if ctx.needs_input_grad[1]:
                pair_grad = _weighted_pair_posterior(unary, pair, alpha, beta, log_partition, by_partition)
        for messages, grad in ((forward_messages, by_alpha), (backward_messages, by_beta)):  # second derivatives
            if grad is not None:
                by_unary, by_pair = torch.func.vjp(messages, unary, pair)[1](grad)
                unary_grad = by_unary if unary_grad is None else unary_grad + by_unary
                pair_grad = by_pair if pair_grad is None else pair_grad + by_pair
        return unary_grad, pair_grad, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], unary: Tensor, pair: Tensor, needs_gradient: bool
    ) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
        """The dim of `vmap` becomes part of the dim of sequences."""
        count, (n, sequences, states) = info.batch_size, unary.shape[-3:]
        by_set = unary.unsqueeze(0) if in_dims[0] is None else unary.movedim(in_dims[0], 0)
        n, sequences, states = by_set.shape[1:]
        unary = by_set.expand(count, n, sequences, states).transpose(0, 1).reshape(n, -1, states)
        pair = pair.unsqueeze(0) if in_dims[1] is None else pair.movedim(in_dims[1], 0)
        if in_dims[1] is not None or pair.shape[2] > 1:
            pair = pair.expand(count, -1, sequences, states, states)
        pair = pair.transpose(0, 1).flatten(1, 2)
        log_partition, *messages = _ForwardBackward.apply(unary, pair, needs_gradient)  # type: ignore[no-untyped-call]
        unfolded = (message.unflatten(1, (count, sequences)) for message in messages)
        return (log_partition.unflatten(0, (count, sequences)), *unfolded), (0, 1, 1)


def _weighted_pair_posterior(
    unary: Tensor, pair: Tensor, alpha: Tensor, beta: Tensor, log_partition: Tensor, weight: Tensor
) -> Tensor:
    """`P(c_(i-1) = a, c_i = b)` times the weight of each sequence, summed over the dims in which `pair` has size 1."""
    size = max(1, CHUNK_ELEMENTS // (unary.shape[1] * unary.shape[2] ** 2))
    parts = []
    for start in range(0, len(unary) - 1, size):
        current = slice(start + 1, start + 1 + size)
        matrices = pair if len(pair) == 1 else pair[start : start + size]
        into = (unary[current] + beta[current] - log_partition.unsqueeze(-1)).unsqueeze(-2)
        logs = alpha[: len(unary) - 1][start : start + size].unsqueeze(-1) + matrices + into
        part = logs.clamp(max=0.0).exp() * weight[:, None, None]
        part = part.sum(1, keepdim=True) if pair.shape[1] == 1 else part
        parts.append(part.sum(0, keepdim=True) if len(pair) == 1 else part)
    return torch.stack(parts).sum(0) if len(pair) == 1 else torch.cat(parts)


def _messages_by_products(unary: Tensor, pair: Tensor, needs_gradient: bool) -> tuple[Tensor, Tensor] | None:
    """The messages of sequences that share their matrices, by a matrix product for each position; None if they
    underflow.
    """
    matrices = pair.squeeze(1).expand(len(unary) - 1, *pair.shape[2:])
    arrivals = _iterate_products(unary, matrices)
    if arrivals is None:
        return None
    alpha, zero = torch.cat([unary[:1], arrivals + unary[1:]]), torch.zeros_like(unary)
    arrivals = _iterate_products(unary.flip(0), matrices.flip(0).mT) if needs_gradient else zero[1:]
    return None if arrivals is None else (alpha, torch.cat([arrivals.flip(0), zero[:1]]))


def _iterate_products(unary: Tensor, matrices: Tensor) -> Tensor | None:
    """`log(exp(m_i + u_i) @ exp(p_i))` for each position but the last, where m_(i+1) is the result of position i.

    None if scaling by the maximum of each vector and column does not prevent underflow; see `_log_matmul`.
    """
    columns = matrices.amax(-2, keepdim=True)
    message, arrivals, products = unary[0], list[Tensor](), list[Tensor]()
    for factor, matrix, column in zip(unary[1:], (matrices - columns).exp(), columns, strict=True):
        greatest = message.amax(-1, keepdim=True)
        products.append((message - greatest).exp() @ matrix)
        arrivals.append(products[-1].log() + (greatest + column))
        message = arrivals[-1] + factor
    return torch.stack(arrivals) if _is_exact(torch.stack(products)) else None


def _messages_by_tree(unary: Tensor, pair: Tensor) -> tuple[Tensor, Tensor] | None:
    """The messages by products of neighbouring matrices in a balanced tree, in O(log n) steps; None if they underflow.

    The products of blocks of 1, 2, 4, ... positions are computed upwards; downwards, the messages at the ends of each
    block follow from those of the block above it (Blelloch 1990, "Prefix sums and their applications"; Särkkä and
    García-Fernández 2021 for hidden Markov models).
    """
    levels = [pair + unary[1:].unsqueeze(-2)]
    while len(levels[-1]) > 1:
        blocks = levels[-1]
        even = len(blocks) // 2 * 2
        products = _log_matmul(blocks[0:even:2], blocks[1:even:2])
        if products is None:
            return None
        levels.append(torch.cat([products, blocks[even:]]))
    alpha, beta = unary[:1], torch.zeros_like(unary[:1])  # before and after the block of all positions
    for blocks in levels[-2::-1]:
        even = len(blocks) // 2 * 2
        left, right = alpha[: even // 2], beta[: even // 2]
        middle = (
            (left.unsqueeze(-1) + blocks[0:even:2]).logsumexp(-2),
            (blocks[1:even:2] + right.unsqueeze(-2)).logsumexp(-1),
        )
        alpha = torch.cat([torch.stack([left, middle[0]], 1).flatten(0, 1), alpha[even // 2 :]])
        beta = torch.cat([torch.stack([middle[1], right], 1).flatten(0, 1), beta[even // 2 :]])
    last = (alpha[-1:].unsqueeze(-1) + levels[0][-1:]).logsumexp(-2)
    first = (levels[0][:1] + beta[:1].unsqueeze(-2)).logsumexp(-1)
    return torch.cat([alpha, last]), torch.cat([first, beta])


def _log_matmul(left: Tensor, right: Tensor) -> Tensor | None:
    """`log(exp(left) @ exp(right))`; None if scaling by the maximum of each row and column does not prevent underflow.

    A GPU does not wait for this test: it computes log-sum-exp of all terms instead.
    """
    if left.device.type != "cpu":
        return (left.unsqueeze(-1) + right.unsqueeze(-3)).logsumexp(-2)
    row, column = left.amax(-1, keepdim=True), right.amax(-2, keepdim=True)
    product = (left - row).exp() @ (right - column).exp()
    return product.log() + row + column if _is_exact(product) else None


def _is_exact(products: Tensor) -> bool:
    """True if all entries are much greater than the smallest number, and so than all terms that underflow."""
    return bool((products > torch.finfo(products.dtype).tiny ** 0.8).all())

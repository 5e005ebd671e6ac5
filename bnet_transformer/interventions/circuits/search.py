"""The circuit search: remove edges one by one as long as the metric changes little (ACDC, Conmy et al. 2023).

Node groups are visited from the outcomes back to the inputs. The edges into one group are tested in increasing order of
their single effects. `circuit` returns a `Circuit` with the retained edges, the effect of each tested edge, and the
metric of the circuit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import BoolArray
from bnet_transformer._core.checks import check_float, check_int
from bnet_transformer._core.memory import translate_memory_errors
from bnet_transformer._core.naming import format_label
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.circuits.arrows import (
    CircuitArrows,
    find_circuit_arrows,
    iter_active_arrows,
    parse_edge_axes,
)
from bnet_transformer.interventions.circuits.runner import CircuitRunner, build_runner, check_ancestors_fixed
from bnet_transformer.interventions.sweeps.examples import DEFAULT_MEMORY, Examples, parse_example_pair, parse_metric

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd

INITIAL_BATCH_SIZE = 4  # tests in the first batch; doubled after each batch that was predicted correctly
TIE_DECIMALS = 9  # effects that agree to this number of decimals are ties, tested in the order of the graph
MAX_HTML_ROWS = 20  # rows in a notebook
INPUT, OUTCOME, BETWEEN = "differs", "outcome", "between"
MARKED = "marked"  # the mark of a highlighted node without a label
ARROW_SEPARATOR = " -> "


@dataclass(frozen=True, eq=False, repr=False)
class Circuit:
    """The result of `circuit`: the arrows that the search retains.

    Along a retained arrow a node uses its parent in the run of the circuit, along other arrows in the corrupt run. The
    search removes *edges*: single ground arrows, or all arrows that `over` joins. Draw a circuit with
    `s.draw(path, highlight=circuit)`, or `only=circuit.graph`.

    Attributes:
        threshold: The threshold of the search.
        over: The axes along which arrows are separate edges.
        effects: For each edge, in the order of the tests, how much its removal increased the mean over the examples of
            `|metric(H) - metric(clean)|`; 0 for an edge that no longer leads to the metric.
        retained: The names of the edges that were not removed.
        idle: The number of arrows between ancestors of the metric that transmit no difference between the runs, such as
            those from weights and from equal words.
        clean: The metric of the clean run, `[example]`.
        corrupt: The metric of the corrupt run, `[example]`.
        outcome: The metric of the circuit, `[example]`.
        arrows: The ground arrows (`"v_0_0_1 -> a_0_0_3"`) on a path from a node that differs to the metric.
        nodes: The nodes on these paths, with their attributes.
        edge_of: The edge of each of these arrows; None for an arrow that was not a candidate.
    """

    threshold: float
    over: tuple[str, ...]
    effects: Mapping[str, float]
    retained: tuple[str, ...]
    idle: int
    clean: Tensor
    corrupt: Tensor
    outcome: Tensor
    arrows: tuple[str, ...]
    nodes: Mapping[str, Mapping[str, Any]]
    edge_of: Mapping[str, str | None]

    @property
    def edges(self) -> int:
        """The number of retained edges."""
        return len(self.retained)

    @property
    def candidates(self) -> int:
        """The number of tested edges: all that transmit a difference to the metric."""
        return len(self.effects)

    @property
    def faithfulness(self) -> float:
        """The fraction of the mean of `clean - corrupt` that the circuit restores; NaN if that mean is 0."""
        total = float((self.clean - self.corrupt).mean())
        return float((self.outcome - self.corrupt).mean()) / total if total else float("nan")

    @property
    def distance(self) -> float:
        """`D(H)`: the mean over the examples of `|metric(H) - metric(clean)|`."""
        return float((self.outcome - self.clean).abs().mean())

    @cached_property
    def graph(self) -> nx.DiGraph:
        """The circuit as a graph.

        Nodes have the attributes stack, role, slice, head, plates, index, word, token, label and part; arrows have
        role, effect and edge. The effect of an arrow that was not a candidate is None.
        """
        import networkx as nx

        graph = nx.DiGraph()
        graph.add_nodes_from((name, dict(about)) for name, about in self.nodes.items())
        for arrow in self.arrows:
            edge, (source, target) = self.edge_of[arrow], arrow.split(ARROW_SEPARATOR)
            effect = None if edge is None else self.effects[edge]
            graph.add_edge(source, target, role=self.nodes[source]["role"], effect=effect, edge=edge)
        return graph

    def marks(self) -> dict[str, str]:
        """The marks of the nodes and arrows of the circuit, for `draw(highlight=)`."""
        parts = {name: INPUT if about["part"] == INPUT else MARKED for name, about in self.nodes.items()}
        return parts | dict.fromkeys(self.arrows, MARKED)

    def to_dataframe(self) -> pd.DataFrame:
        """A data frame with a row for each tested edge, in the order of the tests."""
        import pandas as pd

        retained, on_path = set(self.retained), set(self.edge_of.values())
        rows = [
            {"edge": name, "effect": effect, "kept": name in retained, "on a path": name in on_path}
            for name, effect in self.effects.items()
        ]
        return pd.DataFrame(rows, columns=["edge", "effect", "kept", "on a path"])

    def __repr__(self) -> str:
        return f"<Circuit: {self._format_summary()}>"

    def _format_summary(self) -> str:
        """The number of edges, the threshold, the faithfulness and the number of examples, as text."""
        count = len(self.clean)
        return (
            f"{self.edges} of {self.candidates} edges at threshold {self.threshold:g}, "
            f"faithfulness {round(self.faithfulness, 3) + 0.0:.3f}, {count} example{'s' * (count != 1)}"
        )

    def _repr_html_(self) -> str:
        """The circuit as an HTML table of its strongest edges."""
        frame = self.to_dataframe()
        retained = frame[frame["kept"]].sort_values("effect", ascending=False, kind="stable")
        more = "" if len(retained) <= MAX_HTML_ROWS else f"<p>… and {len(retained) - MAX_HTML_ROWS} more</p>"
        table = retained.head(MAX_HTML_ROWS).drop(columns="kept").to_html(index=False)
        idle = f"{self.idle:,} arrows transmit no difference"
        return f"<p>{escape(self._format_summary())}; {idle}</p>{table}{more}"


@translate_memory_errors("circuit")
def circuit(
    clean: object,
    corrupt: object,
    *,
    metric: object,
    threshold: float,
    over: Sequence[str] | None = None,
    candidates: str | Sequence[str] | None = None,
    memory: int = DEFAULT_MEMORY,
) -> Circuit:
    """Find a small set of arrows that preserves a metric, by greedy removal (ACDC, Conmy et al. 2023).

    A circuit H runs the clean sentence: along an arrow of H a node uses the value of its parent in this run, along any
    other arrow the value in the corrupt run. An edge is removed if that increases the mean over the examples of
    `|metric(H) - metric(clean)|` by less than `threshold`.

    Args:
        clean: The sentence, or the list of sentences (the examples), that the circuit runs.
        corrupt: The corrupt sentence or sentences: as many as the clean ones, with the same numbers of words.
        metric: A mapping from a discrete node to one or two states, or a function of nodes, as for `bt.sweep`.
        threshold: The increase of the mean distance to the clean metric up to which an edge is removed; at least 0.
        over: The axes along which arrows are separate edges: `"slice"`, the plates of the net and `"word"`; by default
            all. With `("slice", "head")` the arrows between all words of two node groups are one edge.
        candidates: The arrows that may be removed, such as `["v -> a", "k -> a"]`; other arrows are retained. By
            default all arrows.
        memory: The approximate number of bytes that are used at once.

    Returns:
        The circuit: its arrows, the effect of each tested edge, and its metric, `[example]`.

    Raises:
        BNetError: No candidate transmits a difference between the sentences to the metric.
        UnsupportedError: A random ancestor of the metric is not set, or a node group cannot be tested in a batch.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(dim=4, heads=2, combine="concat", residual=True)
    >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    >>> found = bt.circuit(clean, corrupt, metric=lambda x_1_2: x_1_2[:, 0], threshold=10.0)
    >>> found.edges, found.candidates
    (0, 10)
    """
    if check_float("threshold", threshold) < 0:
        raise BNetError("threshold", expected="a number of at least 0", actual=threshold)
    check_int("memory", memory)
    clean_examples, corrupt_examples = parse_example_pair(clean, corrupt)
    measure = parse_metric(clean_examples, metric)
    axes = parse_edge_axes(clean_examples.model.ground, over)
    for examples in (clean_examples, corrupt_examples):
        check_ancestors_fixed(examples, measure.nodes)
    arrows = find_circuit_arrows(clean_examples, corrupt_examples, measure.nodes, axes, candidates)
    if not arrows.edge_names:
        reason = "the clean and the corrupt sentence do not differ in any ancestor of the metric"
        if arrows.incoming:
            reason = "none of the candidates transmits a difference between clean and corrupt to the metric"
        raise BNetError(f"corrupt: {reason}")
    runner = build_runner(clean_examples, corrupt_examples, arrows, measure, memory)
    clean_values, corrupt_values = runner.evaluate_run(runner.clean), runner.evaluate_run(runner.corrupt)
    results = search_edges(runner, clean_values, float(threshold))
    ground, edges = arrows.ground, arrows.edge_names
    edge_of = {
        f"{ground.name(source)}{ARROW_SEPARATOR}{ground.name(target)}": None if edge < 0 else edges[edge]
        for source, target, edge in iter_active_arrows(arrows, runner.retained)
    }
    nodes = dict.fromkeys(name for arrow in edge_of for name in arrow.split(ARROW_SEPARATOR))
    return Circuit(
        threshold=float(threshold),
        over=axes,
        effects={edges[edge]: effect for edge, (effect, _) in results.items()},
        retained=tuple(edges[edge] for edge, (_, is_retained) in results.items() if is_retained),
        idle=arrows.num_idle,
        clean=clean_values,
        corrupt=corrupt_values,
        outcome=runner.evaluate_circuit(),
        arrows=tuple(edge_of),
        nodes={name: _get_node_attributes(clean_examples, arrows, name) for name in nodes},
        edge_of=edge_of,
    )


def search_edges(runner: CircuitRunner, clean: Tensor, threshold: float) -> dict[int, tuple[float, bool]]:
    """Test all edges, from the outcomes to the inputs.

    Args:
        runner: The runs; the search stores the retained arrows in `runner.retained`.
        clean: The metric of the clean run, `[example]`.
        threshold: The increase of `D(H)`, the mean of `|metric(H) - metric(clean)|`, up to which an edge is removed.

    Returns:
        For each tested edge, in order, by how much its removal increases `D(H)`, and whether it is retained.
    """
    arrows = runner.arrows
    results: dict[int, tuple[float, bool]] = {}
    distance = 0.0
    for group in reversed(arrows.incoming):
        incoming = arrows.incoming[group]
        needed = set(incoming.edge_ids[runner.needed[incoming.targets]].tolist())  # the edges that lead to an outcome
        idle = [edge for edge in arrows.edges_by_group[group] if edge not in needed]
        results |= dict.fromkeys(idle, (0.0, False))
        mask = runner.retained[group] & ~np.isin(incoming.edge_ids, idle)
        edges = [edge for edge in arrows.edges_by_group[group] if edge in needed]
        if edges:
            tests, mask, distance = _test_edges(runner, group, edges, mask, distance, clean=clean, threshold=threshold)
            results |= tests
        runner.fix_arrows(group, mask)
    return results


def _test_edges(
    runner: CircuitRunner,
    group: int,
    edges: Sequence[int],
    retained: BoolArray,
    distance: float,
    *,
    clean: Tensor,
    threshold: float,
) -> tuple[dict[int, tuple[float, bool]], BoolArray, float]:
    """Test the edges into one node group, in the order of their single effects.

    Returns:
        The effect of each edge and whether it is retained; the mask of the retained arrows, `[arrow]`; and `D` of the
        circuit after the tests.
    """
    edge_of = runner.arrows.incoming[group].edge_ids
    max_size = max(1, runner.memory // (4 * len(edge_of)))

    def distances(removed: Sequence[Sequence[int]]) -> Tensor:  # D without each of these sets of edges
        computed = []
        for start in range(0, len(removed), max_size):
            masks = [retained & ~np.isin(edge_of, list(subset)) for subset in removed[start : start + max_size]]
            computed.append((runner.evaluate_candidates(group, np.stack(masks)) - clean).abs().mean(-1))
        return torch.cat(computed)

    results: dict[int, tuple[float, bool]] = {}
    single_effects = distances([[edge] for edge in edges]) - distance
    order = sorted(range(len(edges)), key=lambda k: round(float(single_effects[k]), TIE_DECIMALS))
    # The tests are sequential: each depends on the edges that were removed before. To evaluate several in one batch,
    # predict that all edges of the batch will be removed, or that none will, like the last tested edge. Results up to
    # the first wrong prediction, inclusive, are those of the sequential search; the others are discarded (speculative
    # execution). The prediction changes the time, but never the circuit.
    remaining, size, should_remove = [edges[k] for k in order], INITIAL_BATCH_SIZE, True
    while remaining:
        guess = remaining[:size]
        # D at the test of each edge, if all edges before it in the batch are removed, or if none is.
        computed = distances([guess[: k + 1] if should_remove else [guess[k]] for k in range(len(guess))])
        num_used, is_removed = 0, should_remove
        for edge, new_distance in zip(guess, computed.tolist(), strict=True):
            is_removed = new_distance - distance < threshold
            results[edge] = new_distance - distance, not is_removed
            num_used += 1
            if is_removed:
                retained, distance = retained & (edge_of != edge), new_distance
            if is_removed != should_remove:
                break
        size = 2 * size if is_removed == should_remove else INITIAL_BATCH_SIZE
        remaining, should_remove = remaining[num_used:], is_removed
    return results, retained, distance


def _get_node_attributes(examples: Examples, arrows: CircuitArrows, name: str) -> dict[str, Any]:
    """The attributes of a node of the graph; its token is None if the examples have different tokens."""
    ground = arrows.ground
    node = ground.id(name)
    group, index = ground.unravel_index(node)
    position = dict(zip(ground.axes(group), index, strict=True))
    word = position.get("word")
    tokens = set() if word is None else {by_stack[group.word_stack or ""][word] for by_stack in examples.tokens}
    token = tokens.pop() if len(tokens) == 1 else None
    plates = tuple(int(position[plate]) for plate in group.plates)
    part = OUTCOME if node in arrows.outcome_nodes else INPUT if arrows.differing_nodes[node] else BETWEEN
    label = format_label(group.role, stack=group.stack, slice=group.slice, plates=plates, word=word, token=token)
    return {
        "stack": group.stack,
        "role": group.role,
        "slice": group.slice,
        "head": position.get("head"),
        "plates": ground.axes(group),
        "index": index,
        "word": word,
        "token": token,
        "label": label,
        "part": part,
    }

"""The search: edges are taken away one after another, as long as what is told of the outcomes hardly changes.

The order is that of ACDC (Conmy et al. 2023): the families from the outcomes back to the words; of the arrows into one
family, those first whose loss alone moves the metric least. What comes next in that order is guessed, and computed in
one batch: while edges go, that more go; while they stay, that more stay. A wrong guess costs time and changes nothing.

A `Circuit` tells which arrows were kept, what each is worth, and what comes out of them alone.
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

from bnet_transformer._core.checks import check_float, check_int
from bnet_transformer._core.memory import translate_memory_errors
from bnet_transformer._core.naming import format_label
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.circuits.arrows import (
    BoolArray,
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

INITIAL_BATCH_SIZE = 4  # guesses in the first batch; twice as many after a batch that was right
TIE_DECIMALS = 9  # decimals: effects that agree so far are alike, and go in the order of the graph
MAX_HTML_ROWS = 20  # rows in a notebook
INPUT, OUTCOME, BETWEEN = "differs", "outcome", "between"
MARKED = "marked"  # what a picture calls a node of which it says no more
ARROW_SEPARATOR = " -> "


@dataclass(frozen=True, eq=False, repr=False)
class Circuit:
    """The arrows that keep the outcome: along them a node sees this run, along all others the corrupt one.

    What is taken away at once is an *edge*, one ground arrow unless `over` joins several. `effects` has, for each edge
    in the order of testing, how much its loss raised the mean over the examples of `|metric(H) - metric(clean)|` (0
    where it led to nothing any more); `kept` are those that stayed, of so many `candidates`. `idle` counts the arrows
    above the metric that carry nothing, for the runs do not differ there: weights, words that are the same.

    `clean`, `corrupt` and `outcome` are the metric `[example]` of the two runs and of a run of the circuit itself.
    `arrows` are the ground arrows (`"v_0_0_1 -> a_0_0_3"`), and `nodes` the nodes, on a path from where the runs
    differ to the metric: `s.draw(path, highlight=circuit)`, or `only=circuit.graph`, draws them.
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
        """How many edges were kept."""
        return len(self.retained)

    @property
    def candidates(self) -> int:
        """How many edges there were to choose from: those that carry something to the metric."""
        return len(self.effects)

    @property
    def faithfulness(self) -> float:
        """The share of `clean - corrupt` that the circuit restores, of means; NaN where these two are the same."""
        total = float((self.clean - self.corrupt).mean())
        return float((self.outcome - self.corrupt).mean()) / total if total else float("nan")

    @property
    def distance(self) -> float:
        """`D(H)`: the mean over the examples of `|metric(H) - metric(clean)|`."""
        return float((self.outcome - self.clean).abs().mean())

    @cached_property
    def graph(self) -> nx.DiGraph:
        """The circuit: nodes with stack, role, slice, head, word, token, label and part, arrows with effect and edge.

        The effect of an arrow that was no candidate is None.
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
        """The nodes and arrows of the circuit, and where the runs differ, for `draw(highlight=)`."""
        parts = {name: INPUT if about["part"] == INPUT else MARKED for name, about in self.nodes.items()}
        return parts | dict.fromkeys(self.arrows, MARKED)

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each edge that was tested, in that order."""
        import pandas as pd

        kept, there = set(self.retained), set(self.edge_of.values())
        rows = [
            {"edge": name, "effect": effect, "kept": name in kept, "on a path": name in there}
            for name, effect in self.effects.items()
        ]
        return pd.DataFrame(rows, columns=["edge", "effect", "kept", "on a path"])

    def __repr__(self) -> str:
        return f"<Circuit: {self._format_summary()}>"

    def _format_summary(self) -> str:
        count = len(self.clean)
        return (
            f"{self.edges} of {self.candidates} edges at threshold {self.threshold:g}, "
            f"faithfulness {round(self.faithfulness, 3) + 0.0:.3f}, {count} example{'s' * (count != 1)}"
        )

    def _repr_html_(self) -> str:
        frame = self.to_dataframe()
        kept = frame[frame["kept"]].sort_values("effect", ascending=False, kind="stable")
        more = "" if len(kept) <= MAX_HTML_ROWS else f"<p>… and {len(kept) - MAX_HTML_ROWS} more</p>"
        table = kept.head(MAX_HTML_ROWS).drop(columns="kept").to_html(index=False)
        return f"<p>{escape(self._format_summary())}; {self.idle:,} arrows carry nothing</p>{table}{more}"


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
    """The arrows that keep a metric, found by taking away each that hardly matters (ACDC, Conmy et al. 2023).

    A circuit H runs the clean sentence: along an arrow of H a node sees what its parent came to in this run, along any
    other what its parent is in the corrupt run. An arrow is taken away if that raises the mean over the examples of
    `|metric(H) - metric(clean)|` by less than `threshold`; metrics are those of `bt.sweep`.

    Args:
        clean: A sentence, or a list of them (the examples), that the circuit runs.
        corrupt: As many sentences of the same length.
        metric: As for `bt.sweep`.
        threshold: How much the loss of an arrow that is taken away may raise the mean distance to the clean metric.
        over: The axes along which arrows stay apart (`slice`, the net's plates, `word`; all by default): over
            `("slice", "head")` the arrows between all words of two families are one edge.
        candidates: The arrows that may go, such as `["v -> a", "k -> a"]`; the others stay.
        memory: About how many bytes are used at once.

    Returns:
        The arrows that were kept, the effect of each that was tested, and the metric of the circuit, `[example]`.

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
    ours, theirs = parse_example_pair(clean, corrupt)
    measure = parse_metric(ours, metric)
    axes = parse_edge_axes(ours.model.ground, over)
    for examples in (ours, theirs):
        check_ancestors_fixed(examples, measure.nodes)
    arrows = find_circuit_arrows(ours, theirs, measure.nodes, axes, candidates)
    if not arrows.edge_names:
        got = "one that does not" if not arrows.incoming else "none of these arrows"
        wanted = "a sentence that differs from clean in what leads to the metric, along candidates"
        raise BNetError("corrupt", expected=wanted, actual=got)
    runs = build_runner(ours, theirs, arrows, measure, memory)
    whole_clean, whole_corrupt = runs.evaluate_run(runs.clean), runs.evaluate_run(runs.corrupt)
    tests = search_edges(runs, whole_clean, float(threshold))
    ground, edges = arrows.ground, arrows.edge_names
    edge_of = {
        f"{ground.name(source)}{ARROW_SEPARATOR}{ground.name(target)}": None if edge < 0 else edges[edge]
        for source, target, edge in iter_active_arrows(arrows, runs.retained)
    }
    nodes = dict.fromkeys(name for arrow in edge_of for name in arrow.split(ARROW_SEPARATOR))
    return Circuit(
        threshold=float(threshold),
        over=axes,
        effects={edges[edge]: effect for edge, (effect, _) in tests.items()},
        retained=tuple(edges[edge] for edge, (_, stays) in tests.items() if stays),
        idle=arrows.num_idle,
        clean=whole_clean,
        corrupt=whole_corrupt,
        outcome=runs.evaluate_circuit(),
        arrows=tuple(edge_of),
        nodes={name: _get_node_attributes(ours, arrows, name) for name in nodes},
        edge_of=edge_of,
    )


def search_edges(runner: CircuitRunner, clean: Tensor, threshold: float) -> dict[int, tuple[float, bool]]:
    """For each edge that was tested, in order, how much its loss raised `D(H)`, and whether it was kept.

    `D(H)` is the mean over the examples of `|metric(H) - metric(clean)|`. The arrows stay with the runs.
    """
    arrows = runner.arrows
    results: dict[int, tuple[float, bool]] = {}
    distance = 0.0
    for family in reversed(arrows.incoming):
        into = arrows.incoming[family]
        leading = set(into.edge_ids[runner.needed[into.targets]].tolist())  # those to a node that leads to an outcome
        idle = [edge for edge in arrows.edges_by_group[family] if edge not in leading]
        results |= dict.fromkeys(idle, (0.0, False))
        kept = runner.retained[family] & ~np.isin(into.edge_ids, idle)
        edges = [edge for edge in arrows.edges_by_group[family] if edge in leading]
        if edges:
            tests, kept, distance = _test_edges(runner, family, edges, kept, distance, clean=clean, threshold=threshold)
            results |= tests
        runner.fix_arrows(family, kept)
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
    """Test edges into one family in the order of what each does alone.

    Returns:
        What came of each test; then which arrows are kept, and `D` of the circuit, as they are after the tests.
    """
    edge_of = runner.arrows.incoming[group].edge_ids
    most = max(1, runner.memory // (4 * len(edge_of)))

    def distances(removed: Sequence[Sequence[int]]) -> Tensor:  # D without these edges
        found = []
        for start in range(0, len(removed), most):
            tables = [retained & ~np.isin(edge_of, list(some)) for some in removed[start : start + most]]
            found.append((runner.evaluate_candidates(group, np.stack(tables)) - clean).abs().mean(-1))
        return torch.cat(found)

    results: dict[int, tuple[float, bool]] = {}
    alone = distances([[edge] for edge in edges]) - distance
    order = sorted(range(len(edges)), key=lambda k: round(float(alone[k]), TIE_DECIMALS))
    rest, size, going = [edges[k] for k in order], INITIAL_BATCH_SIZE, True
    while rest:
        guess = rest[:size]
        # D at the test of each edge, if all of them before it go, or if all of them stay.
        found = distances([guess[: k + 1] if going else [guess[k]] for k in range(len(guess))])
        right, goes = 0, going
        for edge, its in zip(guess, found.tolist(), strict=True):
            goes = its - distance < threshold
            results[edge] = its - distance, not goes
            right += 1
            if goes:
                retained, distance = retained & (edge_of != edge), its
            if goes != going:
                break
        rest, size, going = rest[right:], 2 * size if goes == going else INITIAL_BATCH_SIZE, goes
    return results, retained, distance


def _get_node_attributes(examples: Examples, arrows: CircuitArrows, name: str) -> dict[str, Any]:
    """The attributes of a node; a word's token is told where it is the same in all examples."""
    ground = arrows.ground
    node = ground.id(name)
    family, index = ground.unravel_index(node)
    place = dict(zip(ground.axes(family), index, strict=True))
    word = place.get("word")
    tokens = set() if word is None else {each[family.word_stack or ""][word] for each in examples.tokens}
    token = tokens.pop() if len(tokens) == 1 else None
    plates = tuple(int(place[plate]) for plate in family.plates)
    part = OUTCOME if node in arrows.outcome_nodes else INPUT if arrows.differing_nodes[node] else BETWEEN
    shown = format_label(family.role, stack=family.stack, slice=family.slice, plates=plates, word=word, token=token)
    return {
        "stack": family.stack,
        "role": family.role,
        "slice": family.slice,
        "head": place.get("head"),
        "plates": ground.axes(family),
        "index": index,
        "word": word,
        "token": token,
        "label": shown,
        "part": part,
    }

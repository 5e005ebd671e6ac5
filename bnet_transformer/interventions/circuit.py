"""Circuits: sets of edges, found by a search or one's own, with their tests."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_float, check_int, check_seed, check_sequence
from bnet_transformer._core.naming import join_path, split_path
from bnet_transformer._core.process import translate_memory_errors
from bnet_transformer._core.results import Result
from bnet_transformer._core.stats import ComparableResult, SentenceValues
from bnet_transformer._core.tensors import to_numpy
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.acdc import (
    ARROWS,
    DEFAULT_THRESHOLD,
    DIRECTIONS,
    MAX_BATCH_SIZE,
    CircuitPairs,
    evaluate_changes,
    is_same_network,
    parse_threshold,
    search_circuit,
)
from bnet_transformer.interventions.circuit_arrows import NODES
from bnet_transformer.interventions.circuit_runs import INPUT, CircuitRuns, build_mask, match_edges
from bnet_transformer.interventions.edges import (
    EDGES,
    StoredCircuit as StoredCircuit,
    iter_chain_arrows,
    read_json as read_json,
    write_mib,
)
from bnet_transformer.interventions.examples import (
    DEFAULT_MEMORY,
    describe_metric,
    explain_unchecked_metric,
    parse_metric,
)
from bnet_transformer.interventions.parse_cells import build_structure
from bnet_transformer.interventions.sweep_results import Sweep

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd


# --------------------------------------------------------------------------------------------------------------------
# Tests of sufficiency, necessity and minimality of a circuit against random sets of edges (Shi et al. 2024).


LEVEL = 0.05  # in the summary, without a correction for the number of edges


@dataclass(frozen=True, eq=False, repr=False)
class CircuitTests(Result):
    """The result of `Circuit.test`: p values against random sets of edges of the same size.

    Attributes:
        sufficiency: The p value of the distance `D` of the circuit from the clean run, against that of random circuits:
            the share of random circuits that are at least as near. Small if the circuit is better than random ones.
        necessity: The p value of the distance from the clean run if the edges of the circuit are removed from the net,
            against that of the removal of as many random edges outside the circuit: the share that changes the metric
            at least as much.
        minimality: For each edge of the circuit, the p value of the change of the metric by its removal from the
            circuit, against that of edges outside, each added to the circuit: the share that changes it at least as
            much. Large for an edge that the circuit does not need. The least possible value is `1 / (1 + n)` with n
            edges outside; there is no correction for the number of edges.
        changes: For each edge of the circuit, the mean of the absolute change of the metric by its removal.
        distance: `D` of the circuit.
        removed_distance: `D` of the net without the edges of the circuit.
        draws: The number of random sets.
        examples: The number of pairs.
        is_in_sample: Whether the pairs are those of the search.
    """

    _shapes = "minimality changes: {edge}"

    sufficiency: float
    necessity: float
    minimality: Mapping[str, float]
    changes: Mapping[str, float]
    distance: float
    removed_distance: float
    draws: int
    examples: int
    is_in_sample: bool

    def _get_columns(self) -> Mapping[str, Any]:
        names = [[*self.minimality][k] for k in np.argsort([*self.minimality.values()])]
        columns = {"change": self.changes, "p": self.minimality}
        return {"edge": names} | {key: [values[name] for name in names] for key, values in columns.items()}

    def __repr__(self) -> str:
        count = sum(p <= LEVEL for p in self.minimality.values())
        pairs = f"{self.examples} {'searched' if self.is_in_sample else 'other'} pair{'s' * (self.examples != 1)}"
        return (
            f"<CircuitTests: sufficiency p {self.sufficiency:.3g}, necessity p {self.necessity:.3g}, "
            f"minimality p at most {LEVEL} for {count} of {len(self.minimality)} edges, {pairs}>"
        )


def run_tests(
    runs: CircuitRuns, retained: Sequence[str], positions: Sequence[int], draws: int, seed: int, *, is_in_sample: bool
) -> CircuitTests:
    """Compare a circuit with random sets of edges, on the examples at some positions."""
    mask, index = build_mask(runs, retained), torch.as_tensor(positions, dtype=torch.long)
    members, outside = torch.nonzero(mask)[:, 0], torch.nonzero(~mask)[:, 0]
    if not len(members) or not len(outside):
        expected = "a circuit with some of the edges that transmit a difference"
        raise BNetError("test", expected=expected, actual=f"{len(members)} of {len(mask)} edges")
    generator = np.random.default_rng(seed)
    every, size = torch.arange(len(mask)), len(members)
    random_sets, outer_sets = (torch.zeros(draws, len(mask), dtype=torch.bool) for _ in range(2))
    for sets, edges in ((random_sets, every), (outer_sets, outside)):
        for row in sets:
            row[torch.from_numpy(generator.permutation(edges.numpy())[:size])] = True
    added = torch.from_numpy(generator.permutation(outside.numpy())[:draws])

    def evaluate(masks: Tensor) -> Tensor:
        return torch.cat([runs.evaluate(part)[:, index] for part in masks.split(MAX_BATCH_SIZE)])

    clean, outcome = runs.evaluate_clean()[index], evaluate(mask[None])
    distances = []
    for masks in (torch.cat([mask[None], random_sets]), ~torch.cat([mask[None], outer_sets])):
        distances.append((evaluate(masks) - clean).abs().mean(-1))
    with_only, without = distances
    changes, other_changes = (
        (evaluate_changes(runs, mask, edges[:, None].tolist())[:, index] - outcome).abs().mean(-1)
        for edges in (members, added)
    )
    names = [runs.edge_names[edge] for edge in members.tolist()]
    minimality = [compute_p_value(other_changes >= change) for change in changes]
    return CircuitTests(
        sufficiency=compute_p_value(with_only[1:] <= with_only[0]),
        necessity=compute_p_value(without[1:] >= without[0]),
        minimality=dict(zip(names, minimality, strict=True)),
        changes=dict(zip(names, changes.tolist(), strict=True)),
        distance=float(with_only[0]),
        removed_distance=float(without[0]),
        draws=draws,
        examples=len(index),
        is_in_sample=is_in_sample,
    )


def compute_p_value(is_extreme: Tensor) -> float:
    """The p value of a Monte Carlo test: the observed value counts as one of the draws."""
    return (1 + int(is_extreme.sum())) / (1 + len(is_extreme))


# --------------------------------------------------------------------------------------------------------------------
# `Circuit`: a set of edges with the metric of its run, on the pairs of a search and on other pairs.


MARKED = "marked"  # the mark of a highlighted node without a label
RELATIVE_ZERO = 1e-9  # a total effect is 0 if it is smaller than this share of the metric
MIN_EXAMPLES_OF_ERROR = 4  # the number of pairs from which the total effect is compared with its standard error


class FaithfulnessWarning(UserWarning):
    """The total effect of the pairs is 0 or has a large standard error, so ratios to it have no meaning."""


@dataclass(frozen=True, eq=False, repr=False)
class Circuit(ComparableResult):
    """A set of edges, and the metric of the run in which the other edges are corrupt.

    Along a retained edge a node uses its parent in the run of the circuit, along other edges in the corrupt run. Edges
    are single ground arrows, or all arrows that `over` joins. Draw a circuit with `s.draw(path, highlight=circuit)`, or
    `only=circuit.graph`. `a | b`, `a & b` and `a - b` are circuits of the union, intersection and difference of the
    edges, evaluated on the pairs of `a`.

    Attributes:
        threshold: The threshold of the search, as a number; None without a search.
        direction: The direction of the search; None without a search.
        over: The axes along which arrows are separate edges; after `"nodes"`, the axes along which nodes are separate.
        effects: For each tested edge, in the order of the tests, how much its removal increased the mean over the
            examples of `|metric(H) - metric(clean)|`; 0 for an edge that no longer leads to the metric. With
            `direction="denoise"` it is the increase of `|metric(H) - metric(corrupt)|` when the edge is restored; with
            `"both"` the larger of the two.
        retained: The names of the edges of the circuit.
        edge_names: The names of all edges that can be in a circuit of these pairs, targets in topological order.
        idle: The number of arrows between ancestors of the metric that transmit no difference between the runs, such as
            those from weights and from equal words.
        clean: The metric of the clean run, `[example]`.
        corrupt: The metric of the corrupt run, or with an ablation or `words` that of the circuit without edges,
            `[example]`.
        outcome: The metric of the circuit, `[example]`.
        arrows: The ground arrows (`"v_0_0_1 -> a_0_0_3"`) on a path from a node that differs to the metric.
        nodes: The nodes on these paths, with their attributes.
        edge_of: The edge of each of these arrows; None for an arrow that was not a candidate.
        is_in_sample: Whether the edges were found on these examples.
        held_out: The same edges on pairs that the search did not use; None without such pairs.
        pairs: The sentences and the metric of all pairs, for set operations.
        notes: What to consider: the edges and the candidates that change nothing, because what replaces their value is
            equal to it in all examples.
    """

    _shapes = "clean corrupt outcome: float64 example"

    threshold: float | None
    direction: str | None
    over: tuple[str, ...]
    effects: Mapping[str, float]
    retained: tuple[str, ...]
    edge_names: tuple[str, ...]
    idle: int
    clean: Tensor
    corrupt: Tensor
    outcome: Tensor
    arrows: tuple[str, ...]
    nodes: Mapping[str, Mapping[str, Any]]
    edge_of: Mapping[str, str | None]
    is_in_sample: bool
    held_out: Circuit | None
    pairs: CircuitPairs = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def edges(self) -> int:
        """The number of retained edges."""
        return len(self.retained)

    @property
    def candidates(self) -> int:
        """The number of edges that transmit a difference to the metric; a search tests each of them."""
        return len(self.edge_names)

    @property
    def kind(self) -> str:
        """`"edges"`, or `"nodes"` if each edge is all arrows from a node."""
        return NODES if NODES in self.over else EDGES

    @property
    def faithfulness(self) -> float:
        """The fraction of the mean of `clean - corrupt` that the circuit restores; NaN if that mean is 0."""
        if is_total_zero(self.clean, self.corrupt):
            return math.nan
        return float((self.outcome - self.corrupt).mean() / (self.clean - self.corrupt).mean())

    @property
    def distance(self) -> float:
        """`D(H)`: the mean over the examples of `|metric(H) - metric(clean)|`."""
        return float((self.outcome - self.clean).abs().mean())

    @cached_property
    def graph(self) -> nx.DiGraph:
        """The circuit as a graph.

        Nodes have the attributes stack, role, slice, head, plates, index, word, token, label and part; arrows have
        role, effect and edge. The effect of an arrow that was not tested is None.
        """
        import networkx as nx

        graph = nx.DiGraph()
        graph.add_nodes_from((name, dict(about)) for name, about in self.nodes.items())
        for arrow in self.arrows:
            edge, (source, target) = self.edge_of[arrow], split_path(arrow)
            effect = None if edge is None else self.effects.get(edge)
            graph.add_edge(source, target, role=self.nodes[source]["role"], effect=effect, edge=edge)
        return graph

    @translate_memory_errors("run")
    def run(self, clean: object, corrupt: object, *, metric: object = None) -> Circuit:
        """Evaluate the same edges on other pairs.

        Edges that transmit no difference between these pairs remain in the circuit and have no effect; edges that
        transmit a difference only between these pairs are not in it.

        Args:
            clean: The clean sentence or sentences, of the same net.
            corrupt: The corrupt sentence or sentences, or an ablation.
            metric: The metric; None for that of this circuit, if it has no states or data of each example.

        Returns:
            The circuit with the metric of these pairs.

        Raises:
            BNetError: The sentences are of another net, or do not differ, or the metric of this circuit refers to its
                examples.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, heads=2, combine="concat", residual=True)
        >>> cat, dog, sun = (net.sentence(text) for text in ("the cat sat", "the dog sat", "the sun sat"))
        >>> found = bt.circuit(cat, dog, metric=lambda x_1_2: x_1_2[:, 0], threshold=0.0)
        >>> round(found.run(sun, dog).faithfulness, 3)
        1.0
        """
        return self._evaluate_on(self.pairs.with_sentences(clean, corrupt, metric))

    def _evaluate_on(self, pairs: CircuitPairs) -> Circuit:
        """The same edges on other pairs of the same net."""
        result = evaluate_circuit(pairs, pairs.build_runs(), self.retained, effects=self.effects, is_in_sample=False)
        return replace(result, threshold=self.threshold, direction=self.direction)

    @translate_memory_errors("test")
    def test(self, *, draws: int = 200, seed: int = 0) -> CircuitTests:
        """Compare the circuit with random sets of as many edges: sufficiency, necessity and minimality.

        The pairs are the held-out ones, or those of the circuit if there are none. A random set has edges of the same
        kind, drawn uniformly. Random ground arrows rarely form a path, so that a small p value of sufficiency says
        little for them; it says more with `over=("slice", "head")`.

        Args:
            draws: The number of random sets.
            seed: The seed of the random sets.

        Returns:
            The p values.

        Raises:
            BNetError: The circuit has no edge, or all edges.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, heads=2, combine="concat", residual=True)
        >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
        >>> found = bt.circuit(clean, corrupt, metric=lambda x_1_2: x_1_2[:, 0], threshold="20%")
        >>> sorted(found.test().minimality) == sorted(found.retained)
        True
        """
        positions = self.pairs.held_out or tuple(self.pairs.in_sample.tolist())
        runs, is_in_sample = self.pairs.build_runs(), self.is_in_sample and not self.pairs.held_out
        count, seed = check_int("draws", draws), check_seed(seed)
        return run_tests(runs, self.retained, positions, count, seed, is_in_sample=is_in_sample)

    def to_json(self, path: object, *, scores: object = None, convention: str = "mib", ungroup: bool = False) -> None:
        """Write the edges and their effects in the format of MIB's circuit track (`Graph.to_json` of EAP-IG).

        The format has edges from a writer (embedding, head, feed-forward step) to a reader. `read_json` reads it.

        Args:
            path: The path of the file.
            scores: The scores of edges: a mapping from names, or a `Sweep`; by default the effects of the search.
            convention: The format: `"mib"`.
            ungroup: Whether to write the keys and values of grouped heads for each head that reads them, as the format
                has edges per query head.

        Raises:
            BNetError: An edge has no counterpart in the format, such as one between words, or there are no scores.
        """
        network = self.pairs.clean.model.network
        values: Any = {name: scores[name] for name in scores.names.values()} if isinstance(scores, Sweep) else scores
        if values is None and not self.effects:
            hint = "Pass the scores by which the edges were chosen, such as a sweep"
            raise BNetError("scores", expected="scores, because this circuit has no search", actual=None, hint=hint)
        values = self.effects if values is None else values
        write_mib(path, convention, self.edge_names, self.retained, values, network, ungroup=ungroup)

    @cached_property
    def _ground_graph(self) -> nx.DiGraph:
        """The graph of ground nodes that figures mark: for an edge to a reader, all chains from its writer."""
        if self.over != (EDGES,):
            return self.graph
        import networkx as nx

        clean, ground = self.pairs.clean, self.pairs.clean.model.ground
        other = self.pairs.corrupt if self.pairs.alignment is None else None
        structure = build_structure(clean, other, parse_metric(clean, self.pairs.metric).nodes)
        graph = nx.DiGraph()
        arrows = iter_chain_arrows(structure, ground, set(self.arrows))
        graph.add_edges_from((ground.name(source), ground.name(target)) for source, target in arrows)
        return graph

    def marks(self) -> dict[str, str]:
        """The marks of the nodes and arrows of the circuit, for `draw(highlight=)`."""
        graph = self._ground_graph
        parts = {name: INPUT if about.get("part") == INPUT else MARKED for name, about in graph.nodes.items()}
        return parts | dict.fromkeys((join_path(arrow) for arrow in graph.edges), MARKED)

    def project_marks(self, names: Collection[str]) -> dict[str, str]:
        """The marks of the circuit in a view that draws other nodes: node groups, or the states of words.

        A node belongs to its node group, if the view draws it. Otherwise paths of the circuit between nodes of the view
        are its arrows.

        Args:
            names: The nodes of the view.

        Returns:
            The label of each marked node and arrow.
        """
        known, ends, graph = set(names), {}, self._ground_graph
        for name in graph:
            parts = name.split("_")
            prefixes = ("_".join(parts[:count]) for count in range(len(parts), 0, -1))
            ends[name] = next((prefix for prefix in prefixes if prefix in known), None)
        arrows = set()
        for start in (name for name, end in ends.items() if end is not None):
            reached, pending = {start}, [start]
            while pending:  # nodes without a counterpart in the view are contracted
                for target in graph.successors(pending.pop()):
                    if ends[target] is not None:
                        arrows.add(join_path([str(ends[start]), str(ends[target])]))
                    elif target not in reached:
                        reached.add(target)
                        pending.append(target)
        inputs = {ends[name] for name, about in graph.nodes.items() if about.get("part") == INPUT}
        nodes = {end: INPUT if end in inputs else MARKED for end in ends.values() if end is not None}
        return nodes | dict.fromkeys(sorted(arrows), MARKED)

    def __or__(self, other: object) -> Circuit:
        """The union of the edges, evaluated on the pairs of the first circuit."""
        return self._combine(other, lambda first, second: {**dict.fromkeys(first), **dict.fromkeys(second)})

    def __and__(self, other: object) -> Circuit:
        """The intersection of the edges, evaluated on the pairs of the first circuit."""
        return self._combine(other, lambda first, second: [name for name in first if name in set(second)])

    def __sub__(self, other: object) -> Circuit:
        """The edges that the other circuit does not have, evaluated on the pairs of the first circuit."""
        return self._combine(other, lambda first, second: [name for name in first if name not in set(second)])

    def __contains__(self, name: object) -> bool:
        """Whether an edge is in the circuit."""
        return name in self._retained_names

    @cached_property
    def _retained_names(self) -> frozenset[str]:
        """The retained edges, for membership."""
        return frozenset(self.retained)

    def _combine(self, other: object, choose: Callable[[Sequence[str], Sequence[str]], Iterable[str]]) -> Circuit:
        """The circuit of chosen edges of two circuits of one net: the pairs are of the first, the effects of both."""
        if not isinstance(other, Circuit):
            raise BNetError("circuits", expected="a Circuit on both sides of | & -", actual=other)
        if not is_same_network(other.pairs.clean.model.network, self.pairs.clean.model.network):
            raise BNetError("circuits", expected="two circuits of one net", actual="circuits of two nets")
        if other.over != self.over:
            raise BNetError("circuits", expected=f"two circuits over {self.over}", actual=other.over)
        runs, names = self.pairs.build_runs(), tuple(choose(self.retained, other.retained))
        effects = {**self.effects, **{name: e for name, e in other.effects.items() if name not in self.effects}}
        result = evaluate_circuit(self.pairs, runs, names, effects=effects, is_in_sample=self.is_in_sample)
        if self.held_out is not None and not self.pairs.held_out:
            result = replace(result, held_out=result._evaluate_on(self.held_out.pairs))
        return result

    def _get_columns(self) -> Mapping[str, Any]:
        names = [*dict.fromkeys([*(self.effects or self.edge_names), *self.retained])]
        on_path = set(self.edge_of.values())
        effects = np.array([self.effects.get(name, math.nan) for name in names])
        flags = {"kept": [name in self for name in names], "on a path": [name in on_path for name in names]}
        return {"edge": names, "effect": effects, **flags}

    def _to_sentence_values(self) -> SentenceValues:
        part = self if self.held_out is None else self.held_out
        clean, corrupt, outcome = (to_numpy(values) for values in (part.clean, part.corrupt, part.outcome))
        ones = np.ones_like(clean)
        rows = {
            "faithfulness": (outcome - corrupt, clean - corrupt),
            "distance": (np.abs(outcome - clean), ones),
            "metric of the circuit": (outcome, ones),
            "total effect": (clean - corrupt, ones),
        }
        values, scale = (np.stack(arrays) for arrays in zip(*rows.values(), strict=True))
        notes = [explain_weak_total(part.clean, part.corrupt) or ""]
        notes += ["a circuit was searched on these pairs: its faithfulness is too high"] if part.is_in_sample else []
        metric = describe_metric(part.pairs.metric)
        notes += explain_unchecked_metric(metric)
        settings = {"over": self.over, "metric": metric}
        digests = part.pairs.digests
        if len(digests) > len(clean):  # the pairs contain those of the other part
            digests = tuple(digests[k] for k in (part.pairs.in_sample if part is self else part.pairs.held_out))
        return SentenceValues("circuit", tuple(rows), {}, values, scale, settings, tuple(filter(None, notes)), digests)

    def _check_pair(self, other: Circuit) -> None:
        directions = self.direction, other.direction
        if None not in directions and directions[0] != directions[1]:
            expected = f"two results with the same direction, {directions[0]!r}"
            raise BNetError("compare", expected=expected, actual=repr(directions[1]))

    def _describe_pair(self, other: Any) -> tuple[str, ...]:
        first, second = self._retained_names, other._retained_names
        both, union = len(first & second), len(first | second)
        share = f" (Jaccard index {both / union:.2f})" if union else ""
        return (
            f"edges: {both:,} in both, {len(first) - both:,} in the first only, {len(second) - both:,} in the "
            f"second only{share}",
        )

    def __repr__(self) -> str:
        return f"<Circuit: {self._format_summary()}>"

    def _format_summary(self) -> str:
        """The number of edges, the threshold, and the faithfulness in the sample and out of it, as text."""
        search = "" if self.threshold is None else f" at threshold {self.threshold:g}"
        search += f" by {self.direction}" if self.direction not in (None, "noise") else ""
        text = f"{self.edges} of {self.candidates} {self.kind}{search}, faithfulness {self._format_faithfulness()}"
        return text if self.held_out is None else f"{text}, {self.held_out._format_faithfulness('held-out ')}"

    def _format_faithfulness(self, kind: str = "") -> str:
        """The faithfulness and the number of pairs, as text."""
        value, count = self.faithfulness, len(self.clean)
        number = "undefined (total effect 0)" if math.isnan(value) else f"{round(value, 3) + 0.0:.3f}"
        return f"{number} on {count} {'searched ' if self.is_in_sample else kind}pair{'s' * (count != 1)}"

    @property
    def caption(self) -> str:
        """The number of edges, the faithfulness, the threshold and the number of idle arrows, in one line."""
        total = float((self.clean - self.corrupt).abs().mean())
        has_share = self.is_in_sample and self.threshold is not None and total > 0
        share = f"; the threshold is {(self.threshold or 0.0) / total:.3g} of the total effect" if has_share else ""
        return f"{self._format_summary()}{share}; {self.idle:,} arrows transmit no difference"

    def _get_shown_frame(self) -> pd.DataFrame:
        frame = self.to_dataframe()
        return frame[frame["kept"]].sort_values("effect", ascending=False, kind="stable").drop(columns="kept")

    def _get_notes(self) -> Sequence[str]:
        return [note for note in [explain_weak_total(self.clean, self.corrupt), *self.notes] if note]


def evaluate_circuit(
    pairs: CircuitPairs,
    runs: CircuitRuns,
    names: Sequence[str],
    *,
    effects: Mapping[str, float] | None = None,
    is_in_sample: bool,
) -> Circuit:
    """Run a circuit on all pairs, and divide the metric into the examples in the sample and those out of it."""
    mask = build_mask(runs, names)
    clean, corrupt, outcome = runs.evaluate_clean(), runs.evaluate_corrupt(), runs.evaluate(mask[None])[0]
    parts, notes = runs.trace(mask), runs.list_notes()

    def build(positions: Sequence[int], *, is_in_sample: bool, held_out: Circuit | None) -> Circuit:
        index = torch.as_tensor(positions, dtype=torch.long)
        return Circuit(
            threshold=None,
            direction=None,
            over=pairs.over,
            effects=dict(effects or {}),
            retained=tuple(names),
            edge_names=tuple(runs.edge_names),
            idle=parts.num_idle,
            clean=clean[index],
            corrupt=corrupt[index],
            outcome=outcome[index],
            arrows=tuple(parts.edge_of),
            nodes=parts.nodes,
            edge_of=parts.edge_of,
            is_in_sample=is_in_sample,
            held_out=held_out,
            notes=notes,
            pairs=pairs,
        )

    held_out = build(pairs.held_out, is_in_sample=False, held_out=None) if pairs.held_out else None
    return build(pairs.in_sample.tolist(), is_in_sample=is_in_sample, held_out=held_out)


def is_total_zero(clean: Tensor, corrupt: Tensor) -> bool:
    """True if the mean of `clean - corrupt` is 0, compared with the size of the metric."""
    scale = max(float(clean.abs().mean()), float(corrupt.abs().mean()))
    return abs(float((clean - corrupt).mean())) <= RELATIVE_ZERO * scale


def explain_weak_total(clean: Tensor, corrupt: Tensor) -> str | None:
    """The reason why a ratio to the mean total effect has no meaning, as a sentence; None if it has one."""
    total, count = clean - corrupt, len(clean)
    if bool((total == 0).all()):
        return "The metric is the same in the clean and the corrupt run of each pair: faithfulness is undefined."
    if is_total_zero(clean, corrupt):
        return "The effects clean - corrupt cancel: their mean is 0, and faithfulness is undefined."
    mean, error = float(total.mean()), float(total.std()) / math.sqrt(count) if count > 1 else 0.0
    if count >= MIN_EXAMPLES_OF_ERROR and abs(mean) < 2 * error:
        return (
            f"The mean of clean - corrupt, {mean:.2g}, is less than twice its standard error, {error:.2g}: "
            "faithfulness, its ratio, is unstable."
        )
    return None


# --------------------------------------------------------------------------------------------------------------------
# `bt.circuit`: search a circuit, or evaluate one's own.


@translate_memory_errors("circuit")
def circuit(
    clean: object,
    corrupt: object,
    *,
    metric: object,
    threshold: float | str | None = None,
    edges: str | Sequence[str] | StoredCircuit | None = None,
    direction: str = "noise",
    at: str = ARROWS,
    over: Sequence[str] | None = None,
    candidates: str | Sequence[str] | None = None,
    held_out: float | tuple[object, ...] | None = None,
    seed: int = 0,
    words: object = None,
    memory: int = DEFAULT_MEMORY,
    progress: bool | None = None,
) -> Circuit:
    """Find a small set of arrows that preserves a metric, by greedy removal (ACDC, Conmy et al. 2023), or evaluate one.

    A circuit H runs the clean sentence: along an arrow of H a node uses the value of its parent in this run, along any
    other arrow the value in the corrupt run. An edge is removed if that increases the mean over the examples of
    `|metric(H) - metric(clean)|` by less than `threshold`. With `edges` there is no search.

    With an ablation instead of corrupt sentences, an arrow that is left out transmits the ablated value of its parent.
    A value that depends on that of the node is computed from its value in the run of the circuit. Only real nodes are
    ablated, by default those that depend on the words: arrows from tokens and states are never removed. The metric of
    the circuit without edges is then that of the corrupt side.

    Args:
        clean: The sentence, or the list of sentences (the examples), that the circuit runs.
        corrupt: The corrupt sentence or sentences: as many as the clean ones, with the same numbers of words. The pairs
            of a list may differ in length if edges refer to no single word, as with `over=("slice", "head")`. Or an
            ablation: what the values become, as in `bt.sweep`: `Zero()`, `Mean(...)`, `Noise(...)`, `Shift(...)`,
            `Scale(...)`, a function of the value, `Project(...)`, `Set(...)`, or `Swap(sentences, within)`.
        metric: A mapping from a discrete node to one or two states, or a function of nodes, as for `bt.sweep`.
        threshold: The increase of the mean distance to the clean metric up to which an edge is removed: a number of at
            least 0, or a share of the mean of `|clean - corrupt|`, such as `"5%"`; by default `"1%"`. The increases of
            removed edges add up: `faithfulness` is the share of the total effect that the circuit retains.
        edges: The edges of a circuit that is evaluated instead of a search: names, patterns such as `"a_0_* -> *"`, in
            which a star is every value of one index, or a circuit of a file. With `at="nodes"` the nodes.
        direction: `"noise"` removes edges from the clean run; `"denoise"` restores edges in the corrupt run, and
            retains those whose restoration changes the metric by at least the threshold; `"both"` retains the edges of
            either search. Of two branches of which one suffices, only `"denoise"` and `"both"` find the second.
        at: The kind of edges: `"arrows"`, ground arrows; `"edges"`, those of `net.edges()`; or `"nodes"`, all arrows
            from a node, so that all nodes which depend on a node that is left out use its other value. The metric is
            no such node: the value of its nodes is that in the run of the circuit.
        over: The axes along which arrows are separate edges: `"slice"`, the plates of the net and `"word"`; by default
            all. With `("slice", "head")` the arrows between all words of two node groups are one edge. With
            `at="nodes"` the axes along which nodes are separate, as in `bt.sweep`.
        candidates: The arrows that may be removed, such as `["v -> a", "k -> a"]`, or with `at="nodes"` the roles, such
            as `["a"]`; other arrows are retained. By default all.
        held_out: The pairs that the search does not use, on which the circuit is evaluated: a share of the pairs,
            chosen by `seed`, or other sentences, `(clean, corrupt)`, with another metric if that names states of each
            example, `(clean, corrupt, metric)`; by default a quarter of 8 or more pairs.
        seed: The seed of the choice of held-out pairs.
        words: The word of the corrupt sentence from which each word of the clean one takes its values along arrows that
            are left out, as a mapping or as pairs, such as `{3: 5, 4: 6}`; arrows from other words are retained. The
            sentences may then differ in length. For several stacks, a map for each stack. `corrupt` of the result is
            then the metric of the circuit without edges.
        memory: The approximate number of bytes that are used at once.
        progress: Whether to show a progress bar; by default only in a terminal.

    Returns:
        The circuit: its edges and arrows, the effect of each tested edge, and its metric, `[example]`.

    Raises:
        BNetError: No candidate transmits a difference between the sentences to the metric, an edge is unknown, or an
            ablation or `words` has no meaning: with another `direction` than `"noise"`, or an ablation of nodes without
            real values.
        UnsupportedError: A random ancestor of the metric is not set, or a node group cannot be tested in a batch.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(dim=4, heads=2, combine="concat", residual=True)
    >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    >>> found = bt.circuit(clean, corrupt, metric=lambda x_1_2: x_1_2[:, 0], threshold=10.0)
    >>> found.edges, found.candidates
    (0, 10)
    >>> from bnet_transformer.interventions import Zero
    >>> zeros = bt.circuit(clean, Zero(), metric=lambda x_1_2: x_1_2[:, 0], at="nodes", over=("slice", "head"))
    >>> zeros.kind, zeros.candidates
    ('nodes', 9)
    """
    check_choice("direction", direction, DIRECTIONS)
    check_choice("progress", progress, (True, False, None))
    if threshold is not None and edges is not None:
        expected = "threshold= for a search, or edges= for a circuit without a search"
        raise BNetError("circuit", expected=expected, actual="both of them")
    pairs = CircuitPairs.parse(clean, corrupt, metric, at, over, candidates, memory, words)
    if (pairs.ablation is not None or pairs.alignment is not None) and direction != DIRECTIONS[0]:
        expected = f"{DIRECTIONS[0]!r}, because an ablation, or words=, has no corrupt run in which edges are restored"
        raise BNetError("direction", expected=expected, actual=direction)
    is_given = isinstance(held_out, tuple) and len(held_out) in (2, 3)
    other_pairs = pairs.with_sentences(*(*held_out, None)[:3]) if is_given else None  # type: ignore[misc]
    if edges is not None:
        if held_out is not None:
            raise BNetError("held_out: a circuit without a search uses no pairs", hint="Use run() for other pairs")
        runs = pairs.build_runs()
        listed = [edges] if isinstance(edges, str) else edges.edges if isinstance(edges, StoredCircuit) else edges
        names = match_edges(check_sequence("edges", listed, str), runs)
        result = evaluate_circuit(pairs, runs, names, is_in_sample=False)
    else:
        pairs = pairs.hold_out(0.0 if other_pairs else _parse_share(held_out), check_seed(seed))
        runs = pairs.build_runs()
        sample = pairs.in_sample
        threshold = DEFAULT_THRESHOLD if threshold is None else threshold
        level = parse_threshold(threshold, runs.evaluate_clean()[sample], runs.evaluate_corrupt()[sample])
        search = search_circuit(runs, sample, level, direction, progress)
        names = tuple(runs.edge_names[edge] for edge in search.retained)
        effects = {runs.edge_names[edge]: effect for edge, effect in search.effects.items()}
        result = evaluate_circuit(pairs, runs, names, effects=effects, is_in_sample=True)
        result = replace(result, threshold=level, direction=direction)
    if other_pairs is not None:
        result = replace(result, held_out=result._evaluate_on(other_pairs))
    if note := explain_weak_total(result.clean, result.corrupt):
        warnings.warn(note, FaithfulnessWarning, stacklevel=3)
    return result


def _parse_share(held_out: object) -> float | None:
    """The share of the pairs that are held out; None for the default."""
    if held_out is None:
        return None
    if isinstance(held_out, tuple):
        raise BNetError(
            "held_out",
            expected="a share, (clean, corrupt) or (clean, corrupt, metric)",
            actual=f"a tuple of {len(held_out)}",
        )
    share = check_float("held_out", held_out, minimum=0.0)
    if share >= 1:
        raise BNetError("held_out", expected="a share below 1, or (clean, corrupt)", actual=held_out)
    return share

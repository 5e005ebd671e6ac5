"""The search of a circuit by removing edges (ACDC, Conmy et al. 2023), and the pairs of sentences that it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer._core.checks import check_choice, check_float, check_int
from bnet_transformer._core.naming import WORD
from bnet_transformer._core.process import check_cancelled
from bnet_transformer._core.results import Fields, UnsavedFunction, get_fields, register_codec
from bnet_transformer._core.tensors import IntArray
from bnet_transformer.data.do_values import Attend, Swap, is_intervention, to_stored
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.ablation import Ablation
from bnet_transformer.interventions.cells import WordAlignment, parse_words
from bnet_transformer.interventions.circuit_arrows import NODES, parse_edge_axes
from bnet_transformer.interventions.circuit_runs import CircuitParts, CircuitRuns, build_arrow_runs
from bnet_transformer.interventions.edges import EDGES
from bnet_transformer.interventions.examples import (
    Examples,
    Metric,
    has_example_data,
    parse_metric,
    parse_sides,
    split_by_length,
    split_metric,
)
from bnet_transformer.reference import check_discrete_node

# --------------------------------------------------------------------------------------------------------------------
# The pairs of a circuit: clean and corrupt examples with a metric, and the edges whose circuits they evaluate.


MIN_HELD_OUT = 8  # the number of pairs from which a part is held out by default
HELD_OUT_SHARE = 0.25
ARROWS = "arrows"  # ground arrows, joined by `over`; the other kind of edges is `EDGES`


@dataclass(frozen=True)
class CircuitPairs:
    """Clean and corrupt examples, a metric, and the kind of edges.

    Args:
        clean: The clean examples.
        corrupt: The corrupt examples, or those of `Swap`; None for another ablation.
        metric: The metric, as the user passed it.
        over: The axes along which arrows are separate edges; `("edges",)` for edges from writers to readers.
        candidates: The arrows that may be removed, as the user passed them.
        memory: The number of bytes that are used at once.
        held_out: The positions of the examples that a search does not use.
        ablation: The intervention on nodes whose arrows are left out; None for the values in the corrupt examples.
        numbers: The numbers of these examples among those of all lengths.
        other_lengths: The examples of other lengths.
        words: The corrupt word from which each clean word takes its values, as the user passed it.
    """

    clean: Examples = field(repr=False)
    corrupt: Examples | None = field(repr=False)
    metric: object = field(repr=False)
    over: tuple[str, ...]
    candidates: object
    memory: int
    held_out: tuple[int, ...] = ()
    ablation: object = None
    numbers: tuple[int, ...] = ()
    other_lengths: tuple[CircuitPairs, ...] = ()
    words: object = None

    @classmethod
    def parse(
        cls,
        clean: object,
        corrupt: object,
        metric: object,
        at: object,
        over: object,
        candidates: object,
        memory: object,
        words: object = None,
    ) -> CircuitPairs:
        """Validate the sentences and the options."""
        check_choice("at", at, (ARROWS, EDGES, NODES))
        sides, ablation = _parse_sides(clean, corrupt, words)
        for name, value in (("over", over), ("candidates", candidates)):
            if at == EDGES and value is not None:
                expected = 'None for at="edges": an edge joins all words and paths from a writer to a reader'
                raise BNetError(name, expected=expected, actual=value)
        axes = (EDGES,) if at == EDGES else parse_edge_axes(sides[0][1].model.ground, over)
        axes = (NODES, *axes) if at == NODES else axes
        if len(sides) > 1 and WORD in axes:
            expected, hint = "no axis 'word', because the sentences differ in length", 'Pass over=("slice", "head")'
            raise BNetError("over", expected=expected, actual=over, hint=hint)
        options: dict[str, Any] = {"memory": check_int("memory", memory), "ablation": ablation, "words": words}
        first, *following = (
            cls(one, two, metric, axes, candidates, numbers=numbers, **options) for numbers, one, two in sides
        )
        return replace(first, other_lengths=tuple(following))

    def __len__(self) -> int:
        return sum(len(part.clean) for part in (self, *self.other_lengths))

    @property
    def digests(self) -> tuple[str, ...]:
        """A digest of the words of each pair, or of each clean sentence without corrupt ones."""
        parts = (self, *self.other_lengths)
        digests = [digest for part in parts for digest in part.clean.digest_pairs(part.corrupt)]
        return tuple(digests[k] for k in np.argsort([k for part in parts for k in part.numbers] or range(len(digests))))

    def with_sentences(self, clean: object, corrupt: object, metric: object) -> CircuitPairs:
        """The same edges on other sentences of the net with the same alignment of words, without held-out ones."""
        words = self.words if isinstance(corrupt, Swap) or not is_intervention(corrupt) else None
        sides, ablation = _parse_sides(clean, corrupt, words)
        if not is_same_network(sides[0][1].model.network, self.clean.model.network):
            raise BNetError("clean", expected="sentences of the net of the circuit", actual="sentences of another net")
        if metric is None and has_example_data(self.metric):
            hint = "Pass metric= with the states, or the function, of these pairs"
            expected = "a metric of these pairs, because that of the circuit refers to its examples"
            raise BNetError("metric", expected=expected, hint=hint)
        new_metric = self.metric if metric is None else metric
        blank = replace(self, ablation=ablation, metric=new_metric, held_out=(), other_lengths=(), words=words)
        first, *following = (replace(blank, numbers=numbers, clean=one, corrupt=two) for numbers, one, two in sides)
        return replace(first, other_lengths=tuple(following))

    def hold_out(self, share: float | None, seed: int) -> CircuitPairs:
        """Hold out a random share of the examples; by default a quarter of 8 or more."""
        if share is None:
            share = HELD_OUT_SHARE if len(self) >= MIN_HELD_OUT else 0.0
        count = min(round(share * len(self)), len(self) - 1)
        chosen = np.random.default_rng(seed).permutation(len(self))[:count]
        return replace(self, held_out=tuple(sorted(chosen.tolist())))

    @property
    def in_sample(self) -> IntArray:
        """The positions of the examples that a search uses."""
        return np.setdiff1d(np.arange(len(self)), self.held_out)

    @cached_property
    def alignment(self) -> WordAlignment | None:
        """The corrupt word of each clean word; None if it is the same."""
        if self.words is None or self.corrupt is None:
            return None
        alignment = parse_words(self.clean.model, self.corrupt.model, self.words)
        return None if alignment.is_identity else alignment

    def build_runs(self) -> CircuitRuns:
        """Run both sides of the examples."""
        if self.other_lengths:
            return JoinedRuns.build(self, CircuitPairs.build_runs)
        if isinstance(self.ablation, UnsavedFunction):
            hint = "Use run(clean, corrupt) with the ablation"
            raise BNetError("corrupt", expected="an ablation", actual=self.ablation, hint=hint)
        other: Any = self.corrupt
        if self.ablation is not None or self.alignment is not None:
            other = Ablation(self.ablation, self.clean.model, self.memory, (), self.corrupt, self.alignment)
        if self.over == (EDGES,):
            from bnet_transformer.interventions.edge_runs import build_edge_runner

            return build_edge_runner(self.clean, other, self.metric, self.memory)
        metric = parse_metric(self.clean, self.metric)
        return build_arrow_runs(self.clean, other, metric, self.over, self.candidates, self.memory)


def _parse_sides(
    clean: object, corrupt: object, words: object
) -> tuple[list[tuple[tuple[int, ...], Examples, Any]], object]:
    """The sentences of each length, and the ablation.

    The sentences are their numbers, the clean ones, and the corrupt ones or those of a swap (None without them).
    """
    if isinstance(corrupt, Attend):
        expected = "sentences, Zero(), Mean(...), or a change of the value of a node, such as a function"
        raise BNetError("corrupt", expected=expected, actual=corrupt)
    sides, ablation = [], None
    for numbers, *pair in split_by_length(clean, corrupt, words):
        other, base, ablation = parse_sides(*pair, is_noise=True, words=words, hint="Pass the ablation as corrupt")
        sides.append((numbers or tuple(range(len(base))), base, other))
    return sides, ablation


@dataclass
class JoinedRuns(CircuitRuns):
    """The runs of sentences of several lengths, with the same edges.

    Args:
        parts: The runs of each length.
        order: The position of each example among those of the parts.
    """

    parts: Sequence[CircuitRuns]
    order: Tensor

    @classmethod
    def build(cls, pairs: CircuitPairs, build_runs: Callable[[CircuitPairs], CircuitRuns]) -> JoinedRuns:
        """Build the runs of each length."""
        parts = (pairs, *pairs.other_lengths)
        numbers = [part.numbers for part in parts]
        metrics = split_metric(pairs.clean.model, pairs.metric, numbers, has_words=False)
        runs = [build_runs(replace(part, metric=m, other_lengths=())) for part, m in zip(parts, metrics, strict=True)]
        for other in runs[1:]:
            if only := {*other.edge_names} ^ {*runs[0].edge_names}:
                expected = "the same edges in sentences of all lengths"
                raise BNetError("circuit", expected=expected, actual=f"{min(only)}, which only one length has")
        return cls(runs, torch.tensor([k for part in numbers for k in part]).argsort())

    def __post_init__(self) -> None:
        self.edge_names = self.parts[0].edge_names

    def evaluate(self, retained: Tensor) -> Tensor:
        return self._join([part.evaluate(retained) for part in self.parts])

    def evaluate_corrupt(self) -> Tensor:
        return self._join([part.evaluate_corrupt() for part in self.parts])

    def swap(self) -> JoinedRuns:
        return replace(self, parts=[part.swap() for part in self.parts])

    @property
    def edge_groups(self) -> tuple[tuple[int, ...], ...]:
        return self.parts[0].edge_groups

    def find_connected(self, retained: Tensor) -> Tensor:
        return torch.stack([part.find_connected(retained) for part in self.parts]).any(0)

    def check_edge(self, name: str) -> None:
        self.parts[0].check_edge(name)

    def list_notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for part in self.parts for note in part.list_notes()))

    def trace(self, retained: Tensor) -> CircuitParts:
        """The arrows and nodes in the sentences of the first length."""
        return self.parts[0].trace(retained)

    def _join(self, values: Sequence[Tensor]) -> Tensor:
        """The values of all examples, `[*circuit, example]`."""
        return torch.cat(list(values), -1)[..., self.order]


def _to_fields(pairs: CircuitPairs) -> Fields:
    """The fields of pairs; of functions and of values of other sentences, which a file does not contain, the name."""
    return {**get_fields(pairs), "ablation": to_stored(pairs.ablation)}


register_codec(CircuitPairs, _to_fields, lambda fields, trust: CircuitPairs(**fields), CircuitPairs)


def is_same_network(first: Network, second: Network) -> bool:
    """True if two networks are equal: the net of a loaded circuit is a copy of that of the sentences."""
    if first is second:
        return True
    parameters, other = first.parameters, second.parameters
    is_same = first.declaration == second.declaration and parameters.keys() == other.keys()
    return is_same and all(torch.equal(value, other[name].to(value.device)) for name, value in parameters.items())


def build_divergence_runs(pairs: CircuitPairs, readout: object) -> CircuitRuns:
    """The runs whose metric is the KL divergence from the distribution of a discrete node in the clean run, in nats."""
    if not isinstance(readout, str):
        raise BNetError("readout", expected="the name of a discrete node", actual=readout)
    if pairs.other_lengths:
        return JoinedRuns.build(pairs, lambda part: build_divergence_runs(part, readout))
    ground = pairs.clean.model.ground
    node = ground.id(readout)
    check_discrete_node(pairs.clean.model, node)
    clean: list[Tensor] = []

    def record(outcomes: Mapping[int, Tensor]) -> Tensor:
        clean.append(outcomes[node])
        return clean[-1].new_zeros(len(clean[-1]))

    def diverge(outcomes: Mapping[int, Tensor]) -> Tensor:
        return torch.nn.functional.kl_div(outcomes[node], clean[0], log_target=True, reduction="none").sum(-1)

    replace(pairs, metric=Metric((node,), record)).build_runs().evaluate_clean()
    return replace(pairs, metric=Metric((node,), diverge)).build_runs()


# --------------------------------------------------------------------------------------------------------------------
# The circuit search: remove edges one by one as long as the metric changes little (ACDC, Conmy et al. 2023).
#
# Groups of edges are visited from the outcomes back to the inputs. The edges of one group are tested in increasing
# order of their single effects. The search depends only on `CircuitRuns`: the names of edges, and the metric of masks.


INITIAL_BATCH_SIZE = 4  # tests in the first batch; doubled after each batch that was predicted correctly
MAX_BATCH_SIZE = 512  # masks in one call; the runs divide them further by their memory
MAX_MASK_BYTES = 2**26  # of all masks in one call
TIE_DECIMALS = 9  # effects that agree to this number of decimals are ties, tested in the order of the graph
DIRECTIONS = ("noise", "denoise", "both")
DEFAULT_THRESHOLD = "1%"  # of the total effect


@dataclass(frozen=True)
class SearchResult:
    """The tested edges.

    Args:
        effects: For each tested edge, in order, by how much its removal increases the distance from the base run.
        retained: The edges that were not removed, in order.
        threshold: The increase of the distance up to which an edge was removed.
    """

    effects: Mapping[int, float]
    retained: tuple[int, ...]
    threshold: float


def parse_threshold(threshold: object, clean: Tensor, corrupt: Tensor) -> float:
    """The threshold as a number: itself, or a share such as "5%" of the mean of `|clean - corrupt|`."""
    if isinstance(threshold, str):
        text = threshold.strip()
        try:
            share = float(text.removesuffix("%")) / 100 if text.endswith("%") else -1.0
        except ValueError:
            share = -1.0
        if not 0 <= share < float("inf"):
            raise BNetError("threshold", expected='a number of at least 0, or a share such as "5%"', actual=threshold)
        total = float((clean - corrupt).abs().mean())
        if total == 0 and share > 0:
            expected = "a metric that changes if all edges are left out, for a share of the total effect"
            hint = "Pass sentences with another metric, or an intervention that changes a value on which it depends"
            raise BNetError("threshold", expected=expected, actual="a total effect of 0", hint=hint)
        return share * total
    number = check_float("threshold", threshold)
    if number < 0:
        raise BNetError("threshold", expected="a number of at least 0", actual=threshold)
    return number


def search_circuit(
    runs: CircuitRuns, examples: IntArray, threshold: float, direction: str, progress: bool | None = False
) -> SearchResult:
    """Search from the clean run, from the corrupt run, or both.

    `"noise"` starts from the circuit of all edges, and an edge is removed (reads the corrupt run) if the metric stays
    near that of the clean run. `"denoise"` is the same search with the runs exchanged: all edges read a corrupt run,
    and an edge is restored (reads the clean run) if the metric stays near that of the corrupt run; the edges whose
    restoration matters are the circuit. `"both"` is the union, with the larger of the two effects.

    Args:
        runs: The runs.
        examples: The positions of the examples that are used.
        threshold: The increase of the distance up to which an edge is removed.
        direction: `"noise"`, `"denoise"` or `"both"`.
        progress: Whether to show a progress bar; None for only in a terminal.

    Returns:
        The effects and the retained edges.
    """
    check_choice("direction", direction, DIRECTIONS)
    searches = [*([runs] if direction != "denoise" else []), *([runs.swap()] if direction != "noise" else [])]
    hide = None if progress is None else not progress
    with tqdm(total=len(searches) * len(runs.edge_names), disable=hide, unit="edge", leave=False) as bar:
        results = [search_edges(item, examples, threshold, bar.update) for item in searches]
    if len(results) == 1:
        return results[0]
    effects = {edge: max(result.effects[edge] for result in results) for edge in results[0].effects}
    retained = {edge for result in results for edge in result.retained}
    return SearchResult(effects, tuple(edge for edge in effects if edge in retained), threshold)


def evaluate_changes(runs: CircuitRuns, retained: Tensor, changes: Sequence[Sequence[int]]) -> Tensor:
    """The metric of a circuit after each of these sets of edges was removed, or added, `[set, example]`."""
    size = max(1, min(MAX_BATCH_SIZE, MAX_MASK_BYTES // max(1, len(retained))))
    parts = []
    for start in range(0, len(changes), size):
        sets = changes[start : start + size]
        masks = retained.repeat(len(sets), 1)
        for mask, edges in zip(masks, sets, strict=True):
            mask[list(edges)] ^= True
        parts.append(runs.evaluate(masks))
    return torch.cat(parts)


def search_edges(
    runs: CircuitRuns, examples: IntArray, threshold: float, report: Callable[[int], object]
) -> SearchResult:
    """Test all edges, from the outcomes to the inputs.

    Args:
        runs: The runs.
        examples: The positions of the examples that are used.
        threshold: The increase of `D(H)`, the mean of `|metric(H) - metric(clean)|`, up to which an edge is removed.
        report: Receives the number of edges that were tested since its last call.

    Returns:
        The effects, and the retained edges.
    """
    clean, columns = runs.evaluate_clean()[examples], torch.from_numpy(examples)

    retained = torch.ones(len(runs.edge_names), dtype=torch.bool)

    def measure_distances(removed: Sequence[Sequence[int]]) -> Tensor:  # D without each of these sets of edges
        check_cancelled()
        return (evaluate_changes(runs, retained, removed)[:, columns] - clean).abs().mean(-1)

    effects: dict[int, float] = {}
    distance = 0.0
    for group in reversed(runs.edge_groups):
        connected = runs.find_connected(retained)
        idle = [edge for edge in group if not connected[edge]]
        effects |= dict.fromkeys(idle, 0.0)
        retained[idle] = False
        report(len(idle))
        edges = [edge for edge in group if connected[edge]]
        if edges:
            distance = _test_edges(measure_distances, edges, retained, distance, threshold, effects, report)
    return SearchResult(effects, tuple(edge for edge in effects if retained[edge]), threshold)


def _test_edges(
    measure: Callable[[Sequence[Sequence[int]]], Tensor],
    edges: Sequence[int],
    retained: Tensor,
    distance: float,
    threshold: float,
    effects: dict[int, float],
    report: Callable[[int], object],
) -> float:
    """Test the edges of one group, in the order of their single effects; update `retained` and `effects`.

    `measure` returns `D` of the retained edges without each of some sets. The result is `D` after the tests.
    """
    single_effects = measure([[edge] for edge in edges]) - distance
    order = sorted(range(len(edges)), key=lambda k: round(float(single_effects[k]), TIE_DECIMALS))
    # The tests are sequential: each depends on the edges that were removed before. To evaluate several in one batch,
    # predict that all edges of the batch will be removed, or that none will, like the last tested edge. Results up to
    # the first wrong prediction, inclusive, are those of the sequential search; the others are discarded (speculative
    # execution). The prediction changes the time, but never the circuit.
    remaining, size, should_remove = [edges[k] for k in order], INITIAL_BATCH_SIZE, True
    while remaining:
        guess = remaining[:size]
        # D at the test of each edge, if all edges before it in the batch are removed, or if none is.
        computed = measure([guess[: k + 1] if should_remove else [guess[k]] for k in range(len(guess))])
        num_used, is_removed = 0, should_remove
        for edge, new_distance in zip(guess, computed.tolist(), strict=True):
            is_removed = new_distance - distance < threshold
            effects[edge] = new_distance - distance
            num_used += 1
            if is_removed:
                retained[edge], distance = False, new_distance
            if is_removed != should_remove:
                break
        report(num_used)
        size = 2 * size if is_removed == should_remove else INITIAL_BATCH_SIZE
        remaining, should_remove = remaining[num_used:], is_removed
    return distance

"""The circuit search: remove edges one by one as long as the metric changes little (ACDC, Conmy et al. 2023).

Groups of edges are visited from the outcomes back to the inputs. The edges of one group are tested in increasing order
of their single effects. The search depends only on `CircuitRuns`: the names of edges, and the metric of masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer._core.arrays import IntArray
from bnet_transformer._core.cancellation import check_cancelled
from bnet_transformer._core.checks import check_choice, check_float
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.circuits.runs import CircuitRuns

INITIAL_BATCH_SIZE = 4  # tests in the first batch; doubled after each batch that was predicted correctly
MAX_BATCH_SIZE = 512  # masks in one call; the runs divide them further by their memory
MAX_MASK_BYTES = 2**26  # of all masks in one call
TIE_DECIMALS = 9  # effects that agree to this number of decimals are ties, tested in the order of the graph
DIRECTIONS = ("noise", "denoise", "both")


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
            expected = "a metric that differs between clean and corrupt, for a share of the total effect"
            raise BNetError("threshold", expected=expected, actual="a total effect of 0", hint="Pass a number")
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
    searches = [runs] * (direction != "denoise") + [runs.swap()] * (direction != "noise")
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

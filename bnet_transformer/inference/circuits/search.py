"""The search: edges are taken away one after another, as long as what is told of the outcomes hardly changes.

The order is that of ACDC (Conmy et al. 2023): the families from the outcomes back to the words; of the arrows into one
family, those first whose loss alone moves the metric least. What comes next in that order is guessed, and computed in
one batch: while edges go, that more go; while they stay, that more stay. A wrong guess costs time and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.errors import BNetError, number, whole, within_memory
from bnet_transformer.inference.circuits.arrows import Marks, arrows_of, axes_over
from bnet_transformer.inference.circuits.result import Circuit, result_of
from bnet_transformer.inference.circuits.run import Runs, check_settled, runs_of
from bnet_transformer.inference.sweeps.examples import MEMORY, metric_of, pair

FIRST = 4  # guesses in the first batch; twice as many after a batch that was right
TIES = 9  # decimals: effects that agree so far are alike, and go in the order of the graph


@within_memory("circuit")
def circuit(
    clean: object,
    corrupt: object,
    *,
    metric: object,
    threshold: float,
    over: Sequence[str] | None = None,
    candidates: str | Sequence[str] | None = None,
    memory: int = MEMORY,
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
    if number("threshold", threshold) < 0:
        raise BNetError("threshold", expected="a number of at least 0", got=threshold)
    whole("memory", memory)
    sides = pair(clean, corrupt)
    if len(sides) > 1:
        wanted = "sentences in which the same nodes are set"
        raise BNetError("clean, corrupt", expected=wanted, got="others in some", allowed="a search for each")
    ((ours, theirs),) = sides
    measure = metric_of(ours, metric)
    axes = axes_over(ours.world.ground, over)
    for examples in (ours, theirs):
        check_settled(examples, measure.nodes)
    arrows = arrows_of(ours, theirs, measure.nodes, axes, candidates)
    if not arrows.edges:
        got = "one that does not" if not arrows.into else "none of these arrows"
        wanted = "a sentence that differs from clean in what leads to the metric, along candidates"
        raise BNetError("corrupt", expected=wanted, got=got)
    runs = runs_of(ours, theirs, arrows, measure, memory)
    whole_clean, whole_corrupt = runs.metric_of(runs.clean), runs.metric_of(runs.corrupt)
    tests = search(runs, whole_clean, float(threshold))
    told = {"threshold": float(threshold), "over": axes, "clean": whole_clean, "corrupt": whole_corrupt}
    return result_of(ours, arrows, runs.kept, tests, {**told, "outcome": runs.outcome()})


def search(runs: Runs, clean: Tensor, threshold: float) -> dict[int, tuple[float, bool]]:
    """For each edge that was tested, in order, how much its loss raised `D(H)`, and whether it was kept.

    `D(H)` is the mean over the examples of `|metric(H) - metric(clean)|`. The arrows stay with the runs.
    """
    arrows = runs.arrows
    results: dict[int, tuple[float, bool]] = {}
    distance = 0.0
    for family in reversed(arrows.into):
        into = arrows.into[family]
        leading = set(into.edge[runs.below[into.targets]].tolist())  # those to a node that leads to an outcome
        idle = [edge for edge in arrows.of[family] if edge not in leading]
        results |= dict.fromkeys(idle, (0.0, False))
        kept = runs.kept[family] & ~np.isin(into.edge, idle)
        edges = [edge for edge in arrows.of[family] if edge in leading]
        if edges:
            tests, kept, distance = _test(runs, family, edges, kept, distance, clean=clean, threshold=threshold)
            results |= tests
        runs.settle(family, kept)
    return results


def _test(
    runs: Runs, family: int, edges: Sequence[int], kept: Marks, distance: float, *, clean: Tensor, threshold: float
) -> tuple[dict[int, tuple[float, bool]], Marks, float]:
    """Test edges into one family in the order of what each does alone.

    Returns:
        What came of each test; then which arrows are kept, and `D` of the circuit, as they are after the tests.
    """
    edge_of = runs.arrows.into[family].edge
    most = max(1, runs.memory // (4 * len(edge_of)))

    def distances(gone: Sequence[Sequence[int]]) -> Tensor:  # D without these edges
        found = []
        for start in range(0, len(gone), most):
            tables = [kept & ~np.isin(edge_of, list(some)) for some in gone[start : start + most]]
            found.append((runs.tried(family, np.stack(tables)) - clean).abs().mean(-1))
        return torch.cat(found)

    results: dict[int, tuple[float, bool]] = {}
    alone = distances([[edge] for edge in edges]) - distance
    order = sorted(range(len(edges)), key=lambda k: round(float(alone[k]), TIES))
    rest, size, going = [edges[k] for k in order], FIRST, True
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
                kept, distance = kept & (edge_of != edge), its
            if goes != going:
                break
        rest, size, going = rest[right:], 2 * size if goes == going else FIRST, goes
    return results, kept, distance

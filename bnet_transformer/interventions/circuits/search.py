"""`bt.circuit`: search a circuit, or evaluate one's own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from bnet_transformer._core.checks import check_choice, check_float, check_seed, check_sequence
from bnet_transformer._core.memory import translate_memory_errors
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.circuits.greedy import DIRECTIONS, parse_threshold, search_circuit
from bnet_transformer.interventions.circuits.mib import StoredCircuit
from bnet_transformer.interventions.circuits.pairs import ARROWS, CircuitPairs
from bnet_transformer.interventions.circuits.result import (
    Circuit,
    FaithfulnessWarning,
    evaluate_circuit,
    explain_weak_total,
)
from bnet_transformer.interventions.circuits.runs import match_edges
from bnet_transformer.interventions.sweeps.examples import DEFAULT_MEMORY


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
    memory: int = DEFAULT_MEMORY,
    progress: bool | None = None,
) -> Circuit:
    """Find a small set of arrows that preserves a metric, by greedy removal (ACDC, Conmy et al. 2023), or evaluate one.

    A circuit H runs the clean sentence: along an arrow of H a node uses the value of its parent in this run, along any
    other arrow the value in the corrupt run. An edge is removed if that increases the mean over the examples of
    `|metric(H) - metric(clean)|` by less than `threshold`. With `edges` there is no search.

    Args:
        clean: The sentence, or the list of sentences (the examples), that the circuit runs.
        corrupt: The corrupt sentence or sentences: as many as the clean ones, with the same numbers of words.
        metric: A mapping from a discrete node to one or two states, or a function of nodes, as for `bt.sweep`.
        threshold: The increase of the mean distance to the clean metric up to which an edge is removed: a number of at
            least 0, or a share of the mean of `|clean - corrupt|`, such as `"5%"`.
        edges: The edges of a circuit that is evaluated instead of a search: names, patterns such as `"a_0_* -> *"`, in
            which a star is every value of one index, or a circuit of a file.
        direction: `"noise"` removes edges from the clean run; `"denoise"` restores edges in the corrupt run, and
            retains those whose restoration changes the metric by at least the threshold; `"both"` retains the edges of
            either search. Of two branches of which one suffices, only `"denoise"` and `"both"` find the second.
        at: The kind of edges: `"arrows"`, ground arrows, or `"edges"`, those of `net.edges()`.
        over: The axes along which arrows are separate edges: `"slice"`, the plates of the net and `"word"`; by default
            all. With `("slice", "head")` the arrows between all words of two node groups are one edge.
        candidates: The arrows that may be removed, such as `["v -> a", "k -> a"]`; other arrows are retained. By
            default all arrows.
        held_out: The pairs that the search does not use, on which the circuit is evaluated: a share of the pairs,
            chosen by `seed`, or other sentences, `(clean, corrupt)`, with another metric if that names states of each
            example, `(clean, corrupt, metric)`; by default a quarter of 8 or more pairs.
        seed: The seed of the choice of held-out pairs.
        memory: The approximate number of bytes that are used at once.
        progress: Whether to show a progress bar; by default only in a terminal.

    Returns:
        The circuit: its edges and arrows, the effect of each tested edge, and its metric, `[example]`.

    Raises:
        BNetError: No candidate transmits a difference between the sentences to the metric, or an edge is unknown.
        UnsupportedError: A random ancestor of the metric is not set, or a node group cannot be tested in a batch.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(dim=4, heads=2, combine="concat", residual=True)
    >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    >>> found = bt.circuit(clean, corrupt, metric=lambda x_1_2: x_1_2[:, 0], threshold=10.0)
    >>> found.edges, found.candidates
    (0, 10)
    """
    check_choice("direction", direction, DIRECTIONS)
    check_choice("progress", progress, (True, False, None))
    if (threshold is None) == (edges is None):
        expected = "threshold= for a search, or edges= for a circuit without a search"
        raise BNetError("circuit", expected=expected, actual="none of them" if edges is None else "both of them")
    pairs = CircuitPairs.parse(clean, corrupt, metric, at, over, candidates, memory)
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

"""The pairs of a circuit: clean and corrupt examples with a metric, and the edges whose circuits they evaluate."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import IntArray
from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer._core.saved_results import stored_class
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.circuits.arrow_runs import build_arrow_runs, check_ancestors_fixed
from bnet_transformer.interventions.circuits.arrows import find_circuit_arrows, parse_edge_axes
from bnet_transformer.interventions.circuits.runs import CircuitRuns
from bnet_transformer.interventions.edges.structure import EDGES
from bnet_transformer.interventions.sweeps.examples import Examples, parse_example_pair
from bnet_transformer.interventions.sweeps.metric import has_example_data, parse_metric
from bnet_transformer.reference.node_tables import check_discrete_node

MIN_HELD_OUT = 8  # the number of pairs from which a part is held out by default
HELD_OUT_SHARE = 0.25
ARROWS = "arrows"  # ground arrows, joined by `over`; the other kind of edges is `EDGES`


@stored_class
@dataclass(frozen=True)
class CircuitPairs:
    """Clean and corrupt examples, a metric, and the kind of edges.

    Args:
        clean: The clean examples.
        corrupt: The corrupt examples.
        metric: The metric, as the user passed it.
        over: The axes along which arrows are separate edges; `("edges",)` for edges from writers to readers.
        candidates: The arrows that may be removed, as the user passed them.
        memory: The number of bytes that are used at once.
        held_out: The positions of the examples that a search does not use.
    """

    clean: Examples = field(repr=False)
    corrupt: Examples = field(repr=False)
    metric: object = field(repr=False)
    over: tuple[str, ...]
    candidates: object
    memory: int
    held_out: tuple[int, ...] = ()

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
    ) -> CircuitPairs:
        """Validate the sentences and the options."""
        check_choice("at", at, (ARROWS, EDGES))
        pairs = parse_example_pair(clean, corrupt)
        for name, value in (("over", over), ("candidates", candidates)):
            if at == EDGES and value is not None:
                expected = 'None for at="edges": an edge joins all words and paths from a writer to a reader'
                raise BNetError(name, expected=expected, actual=value)
        axes = (EDGES,) if at == EDGES else parse_edge_axes(pairs[0].model.ground, over)
        return cls(*pairs, metric, axes, candidates, check_int("memory", memory))

    def __len__(self) -> int:
        return len(self.clean)

    def with_sentences(self, clean: object, corrupt: object, metric: object) -> CircuitPairs:
        """The same edges on other sentences of the net, without held-out ones."""
        pairs = parse_example_pair(clean, corrupt)
        if not is_same_network(pairs[0].model.network, self.clean.model.network):
            raise BNetError("clean", expected="sentences of the net of the circuit", actual="sentences of another net")
        if metric is None and has_example_data(self.metric):
            hint = "Pass metric= with the states, or the function, of these pairs"
            expected = "a metric of these pairs, because that of the circuit refers to its examples"
            raise BNetError("metric", expected=expected, hint=hint)
        new_metric = self.metric if metric is None else metric
        return replace(self, clean=pairs[0], corrupt=pairs[1], metric=new_metric, held_out=())

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

    def build_runs(self) -> CircuitRuns:
        """Run both sides of the examples."""
        if self.over == (EDGES,):
            from bnet_transformer.interventions.edges.runner import build_runner

            return build_runner(self.clean, self.corrupt, self.metric, self.memory)
        metric = parse_metric(self.clean, self.metric)
        for examples in (self.clean, self.corrupt):
            check_ancestors_fixed(examples, metric.nodes)
        arrows = find_circuit_arrows(self.clean, self.corrupt, metric.nodes, self.over, self.candidates)
        if not arrows.edge_names:
            raise BNetError(f"corrupt: {_explain_missing_edges(arrows.incoming)}")
        return build_arrow_runs(self.clean, self.corrupt, arrows, metric, self.memory)


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
    ground = pairs.clean.model.ground
    node = ground.id(readout)
    name = ground.name(node)
    check_discrete_node(pairs.clean.model, node)
    clean: list[Tensor] = []

    def record(**outcomes: Tensor) -> Tensor:
        clean.append(outcomes[name])
        return clean[-1].new_zeros(len(clean[-1]))

    def diverge(**outcomes: Tensor) -> Tensor:
        return torch.nn.functional.kl_div(outcomes[name], clean[0], log_target=True, reduction="none").sum(-1)

    for function in (record, diverge):
        parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        function.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    replace(pairs, metric=record).build_runs().evaluate_clean()
    return replace(pairs, metric=diverge).build_runs()


def _explain_missing_edges(incoming: object) -> str:
    """The reason why no edge can be removed."""
    if incoming:
        return "none of the candidates transmits a difference between clean and corrupt to the metric"
    return "the clean and the corrupt sentence do not differ in any ancestor of the metric"

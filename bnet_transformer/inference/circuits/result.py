"""What a circuit search tells: which arrows were kept, what each is worth, and what comes out of them alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bnet_transformer.axes import label
from bnet_transformer.graph import Ground
from bnet_transformer.inference.circuits.arrows import Arrows, Marks, that_matter
from bnet_transformer.inference.sweeps.examples import Examples

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd

SHOWN = 20  # rows in a notebook
INPUT, OUTCOME, BETWEEN = "differs", "outcome", "between"
MARKED = "marked"  # what a picture calls a node of which it says no more
TO = " -> "


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
    kept: tuple[str, ...]
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
        return len(self.kept)

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
            edge, (source, target) = self.edge_of[arrow], arrow.split(TO)
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

        kept, there = set(self.kept), set(self.edge_of.values())
        rows = [
            {"edge": name, "effect": effect, "kept": name in kept, "on a path": name in there}
            for name, effect in self.effects.items()
        ]
        return pd.DataFrame(rows, columns=["edge", "effect", "kept", "on a path"])

    def __repr__(self) -> str:
        return f"<Circuit: {self._told()}>"

    def _told(self) -> str:
        count = len(self.clean)
        return (
            f"{self.edges} of {self.candidates} edges at threshold {self.threshold:g}, "
            f"faithfulness {round(self.faithfulness, 3) + 0.0:.3f}, {count} example{'s' * (count != 1)}"
        )

    def _repr_html_(self) -> str:
        frame = self.to_dataframe()
        kept = frame[frame["kept"]].sort_values("effect", ascending=False, kind="stable")
        more = "" if len(kept) <= SHOWN else f"<p>… and {len(kept) - SHOWN} more</p>"
        table = kept.head(SHOWN).drop(columns="kept").to_html(index=False)
        return f"<p>{escape(self._told())}; {self.idle:,} arrows carry nothing</p>{table}{more}"


def result_of(
    examples: Examples,
    arrows: Arrows,
    kept: Mapping[int, Marks],
    tests: Mapping[int, tuple[float, bool]],
    told: Mapping[str, Any],
) -> Circuit:
    """The circuit of these kept arrows."""
    ground, edges = arrows.ground, arrows.edges
    edge_of = {
        f"{ground.name(source)}{TO}{ground.name(target)}": None if edge < 0 else edges[edge]
        for source, target, edge in that_matter(arrows, kept)
    }
    nodes = dict.fromkeys(name for arrow in edge_of for name in arrow.split(TO))
    return Circuit(
        effects={edges[edge]: effect for edge, (effect, _) in tests.items()},
        kept=tuple(edges[edge] for edge, (_, stays) in tests.items() if stays),
        idle=arrows.idle,
        arrows=tuple(edge_of),
        nodes={name: _about(examples, ground, arrows, name) for name in nodes},
        edge_of=edge_of,
        **told,
    )


def _about(examples: Examples, ground: Ground, arrows: Arrows, name: str) -> dict[str, Any]:
    """The attributes of a node; a word's token is told where it is the same in all examples."""
    node = ground.id(name)
    family, index = ground.place(node)
    place = dict(zip(ground.axes(family), index, strict=True))
    word = place.get("word")
    tokens = set() if word is None else {each[family.words or ""][word] for each in examples.tokens}
    token = tokens.pop() if len(tokens) == 1 else None
    plates = tuple(int(place[plate]) for plate in family.plates)
    part = OUTCOME if node in arrows.outcomes else INPUT if arrows.inputs[node] else BETWEEN
    shown = label(family.role, stack=family.stack, slice=family.slice, plates=plates, word=word, token=token)
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

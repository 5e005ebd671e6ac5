"""TAN over a corpus: a discrete class and discrete codes of boxes, their conditional mutual information, the best tree.

Given the words alone the boxes are functions of their parents, and all of this would be degenerate: it needs a corpus.
Entropies are plug-in; corrected ones add (states met - 1) / 2N for each class (Miller and Madow). That mends
entropies of few states. The joint entropy of all boxes cannot exceed log N, whatever is true: so the divergence is
told only where there are `ENOUGH` sentences to each joint state that was met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.torch_context import same_random
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    import pandas as pd

Codes = NDArray[np.int64]
ENOUGH = 10  # sentences to each joint state that was met: the bias is then below 1/20 nat


@dataclass(frozen=True)
class CorpusTan:
    """The tree of boxes of greatest conditional mutual information given the class, over a corpus.

    `parents[i]` is the box above box i (-1: the root); `information[i, j]` is `I(box i; box j | class)` in nats, and
    `corrected` the same less its bias, by which the tree is chosen. `divergence` is the KL divergence from the corpus
    to the TAN fitted to it; None where there are fewer than 10 sentences to each of the `joint_states` (class and all
    boxes) that were met, as `why_no_divergence` says. `pgmpy_tan` and `pgmpy_chow_liu` are the arrows that pgmpy's
    TreeSearch finds in the same table.
    """

    boxes: tuple[str, ...]
    parents: tuple[int, ...]
    information: NDArray[np.float64] = field(repr=False)
    corrected: NDArray[np.float64] = field(repr=False)
    divergence: float | None
    divergence_corrected: float | None
    joint_states: int
    sentences: int
    pgmpy_tan: tuple[tuple[str, str], ...] = field(repr=False)
    pgmpy_chow_liu: tuple[tuple[str, str], ...] = field(repr=False)

    @property
    def why_no_divergence(self) -> str | None:
        """Why the divergence is not told; None where it is."""
        if self.divergence is not None:
            return None
        told = f"{self.sentences} sentences met {self.joint_states} joint states of the class and all boxes"
        return f"{told}: their joint entropy needs {ENOUGH} to each"

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each box: its parent in the tree and the information that they share."""
        import pandas as pd

        rows = [
            (box, self.boxes[p], self.information[i, p], self.corrected[i, p]) if p >= 0 else (box, "", 0.0, 0.0)
            for i, (box, p) in enumerate(zip(self.boxes, self.parents, strict=True))
        ]
        return pd.DataFrame(rows, columns=["box", "parent", "information", "corrected"])

    def _repr_html_(self) -> str:
        if self.divergence is None or self.divergence_corrected is None:
            told = f"divergence from the TAN not told: {self.why_no_divergence}"
        else:
            told = f"{self.divergence:.3f} nats from the TAN ({self.divergence_corrected:.3f} corrected)"
        return f"<p>{self.sentences} sentences; {told}</p>{self.to_dataframe().to_html(index=False)}"


def corpus_tan(classes: Sequence[int], codes: Codes, boxes: Sequence[str]) -> CorpusTan:
    """The TAN of a corpus: a class for each sentence, and a code for each of its boxes, `[sentence, box]`."""
    import networkx as nx

    label, table = np.asarray(classes), np.asarray(codes)
    if table.ndim != 2 or len(label) != len(table) or len(table) < 2:
        got = f"{len(label)} classes and codes of shape {table.shape}"
        raise BNetError("corpus", expected="at least two sentences, a class for each", got=got)
    if all(len(np.unique(table[label == c], axis=0)) == 1 for c in np.unique(label)):
        wanted = "codes that differ between sentences of a class"
        raise BNetError("corpus", expected=wanted, got="boxes that the class determines: their information is zero")
    n = table.shape[1]
    pairs = [(i, j) for i in range(n) for j in range(i)]
    plain, corrected = np.zeros((n, n)), np.zeros((n, n))
    for i, j in pairs:
        each, other, both = (_entropies(label, table[:, columns]) for columns in ([i], [j], [i, j]))
        plain[i, j], corrected[i, j] = (a + b - c for a, b, c in zip(each, other, both, strict=True))
    plain, corrected = plain + plain.T, corrected + corrected.T
    graph = nx.Graph()
    graph.add_nodes_from(range(n))
    graph.add_weighted_edges_from((i, j, corrected[i, j]) for i, j in pairs)
    tree = nx.bfs_tree(nx.maximum_spanning_tree(graph), 0)
    parents = tuple(next(iter(tree.predecessors(i)), -1) for i in range(n))
    kept = [(i, parent) for i, parent in enumerate(parents) if parent >= 0]
    alone = np.sum([_entropies(label, table[:, [i]]) for i in range(n)], axis=0)
    told = [sum(float(each[edge]) for edge in kept) for each in (plain, corrected)]
    met = len(np.unique(np.column_stack([label, table]), axis=0))
    divergence = alone - np.array(_entropies(label, table)) - np.array(told) if len(table) >= ENOUGH * met else None
    return CorpusTan(
        boxes=tuple(boxes),
        parents=parents,
        information=plain,
        corrected=corrected,
        divergence=None if divergence is None else float(divergence[0]),
        divergence_corrected=None if divergence is None else float(divergence[1]),
        joint_states=met,
        sentences=len(table),
        pgmpy_tan=_pgmpy(label, table, boxes, "tan"),
        pgmpy_chow_liu=_pgmpy(label, table, boxes, "chow-liu"),
    )


def _entropies(label: Codes, codes: Codes) -> tuple[float, float]:
    """`H(codes | class)` in nats: plug-in, and corrected for its bias."""
    plain = extra = 0.0
    for c in np.unique(label):
        counts = np.unique(codes[label == c], axis=0, return_counts=True)[1]
        share = counts / counts.sum()
        plain -= float((share * np.log(share)).sum()) * counts.sum() / len(label)
        extra += (len(counts) - 1) / (2 * len(label))
    return plain, plain + extra


@same_random()
def _pgmpy(label: Codes, codes: Codes, boxes: Sequence[str], kind: str) -> tuple[tuple[str, str], ...]:
    """The arrows of pgmpy's own TreeSearch; none where it has nothing to search."""
    import pandas as pd
    from pgmpy.estimators import TreeSearch

    frame = pd.DataFrame(codes, columns=list(boxes))
    if kind == "tan":
        frame["class"] = label
    if len(boxes) < 2:
        return ()
    search = TreeSearch(frame, root_node=boxes[0], n_jobs=1)
    options = {"class_node": "class"} if kind == "tan" else {}
    return tuple(sorted(search.estimate(estimator_type=kind, show_progress=False, **options).edges()))

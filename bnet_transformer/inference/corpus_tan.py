"""TAN over a corpus: a discrete class and discrete codes of boxes, their conditional mutual information, the best tree.

Given the words alone the boxes are functions of their parents, and all of this would be degenerate: it needs a corpus.
Entropies are plug-in; corrected ones add (states met - 1) / 2N for each class (Miller and Madow). That mends
entropies of few states. The joint entropy of all boxes cannot exceed log N, whatever is true: so the divergence is
told only where there are `ENOUGH` sentences to each joint state that was met.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer import asking
from bnet_transformer._core.distributed import device_of, ranks
from bnet_transformer.data.arrays import to_host
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.joint_posterior import joint_posterior
from bnet_transformer.inference.rollout import reads
from bnet_transformer.inference.sentence_state import SentenceState

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
    boxes) that were met, as `why_no_divergence` says.
    """

    boxes: tuple[str, ...]
    parents: tuple[int, ...]
    information: NDArray[np.float64] = field(repr=False)
    corrected: NDArray[np.float64] = field(repr=False)
    divergence: float | None
    divergence_corrected: float | None
    joint_states: int
    sentences: int

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


def tan_of_corpus(
    states: Sequence[SentenceState], classes: object, slice_: int, head: int | None, role: str | None
) -> CorpusTan:
    """The TAN of sentences of one length: boxes are words, and the code of a word is the word that it reads most.

    Args:
        states: The sentences; ranks share them.
        classes: A label for each sentence, or a discrete node: the class is its most probable state given the
            evidence of the sentence, and counts as evidence itself.
        slice_: The slice that reads.
        head: The head that reads; all on average where None.
        role: The role that reads.

    Raises:
        BNetError: The sentences differ in length, one has no evidence for its class, or labels are missing.
    """
    network = states[0].network if states else None
    if network is None or len({len(s.tokens[asking.slices_that_read(network, slice_, role)[0]]) for s in states}) != 1:
        raise BNetError("sentences", expected="sentences of one length, at least one", got="others, or none")
    node = classes if isinstance(classes, str) else None
    if node is not None and not all(state.evidence for state in states):
        wanted = f"evidence (observe) on each sentence, for {classes} is its class"
        raise BNetError("sentences", expected=wanted, got="one without", allowed="classes=, a list of labels")
    labels = _labels(classes, len(states)) if node is None else [None] * len(states)
    with ranks(device_of(None, network)) as here:
        data = [(state.encoded.given, state.evidence) for state in states]
        here.assert_same("tan of a corpus", net=network, data=data, settings=(labels, node, slice_, head, role))
        shard = here.shard([*zip(states, labels, strict=True)])
        every = here.all_gather_object([_class_and_codes(s, node, label, slice_, head, role) for s, label in shard])
    rows = [every[k % len(every)][k // len(every)] for k in range(len(states))]
    if node is not None:  # labels that a user gave stay this rank's own objects
        labels = [label for label, _ in rows]
    number = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    table = np.array([codes for _, codes in rows])
    boxes = [f"word_{i}" for i in range(table.shape[1])]
    return corpus_tan([number[label] for label in labels], table, boxes)


def _class_and_codes(
    state: SentenceState, node: str | None, label: Hashable, slice_: int, head: int | None, role: str | None
) -> tuple[Hashable, list[int]]:
    """The class of a sentence, and the word that each of its words reads most."""
    if node is not None:
        number = state.ground.id(node)
        asking.must_be_discrete(state.world, number)
        label = int(joint_posterior(state.query([number])).argmax())
        state = state if number in state.evidence else state.with_evidence({node: label})
    stack, slices = asking.slices_that_read(state.network, slice_, role)
    options: dict[str, Any] = {"role": role, "residual": 0.0, "head": head, "method": "rollout"}
    result = reads(state.query(), state.tokens[stack], slices, **options)
    codes: list[int] = result.matrix.argmax(-1).tolist()
    return label, codes


def _labels(classes: object, count: int) -> list[Hashable]:
    """A label for each sentence, from a list, an array or a tensor of them."""
    entries: list[Any] = asking.items(to_host("classes", classes))
    labels = [entry.item() if isinstance(entry, Tensor | np.generic) else entry for entry in entries]
    if len(labels) != count:
        raise BNetError("classes", expected=f"{count} labels, or a discrete node", got=classes)
    for label in labels:
        if not isinstance(label, str | int | float) or label != label:
            raise BNetError("classes", expected="labels that are names or numbers", got=label)
    return labels

"""TAN (tree-augmented naive Bayes): of a slice shrunk to boxes, of its attention, and of a corpus.

A slice that is shrunk to boxes is classified as a naive Bayes, a TAN or another structure. The TAN of the attention of
a slice is its maximum spanning tree. Over a corpus, the tree maximizes the conditional mutual information of discrete
codes of boxes given a discrete class. Given only the words, boxes are functions of their parents, and all these
quantities would be degenerate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer._core.checks import check_choice, resolve_index
from bnet_transformer._core.distributed import distributed_context, resolve_device
from bnet_transformer._core.naming import WORD
from bnet_transformer._core.results import Result
from bnet_transformer._core.tensors import IntArray, to_numpy
from bnet_transformer.attention.rollout import plan_reads
from bnet_transformer.data.dataset import to_host
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.graph import GroundGraph, NodeSelection, Quotient, shrink
from bnet_transformer.inference.posteriors import plan_posterior
from bnet_transformer.inference.query import get_depth, parse_attention_slices, to_list
from bnet_transformer.inference.values import SentenceState
from bnet_transformer.reference import check_discrete_node

if TYPE_CHECKING:
    import pandas as pd


# --------------------------------------------------------------------------------------------------------------------
# Maximum spanning arborescences (Chu and Liu 1965; Edmonds 1967): the best acyclic choice of parents.


def best_parents(weight: NDArray[np.float64]) -> list[int]:
    """The parent of each node in a maximum spanning forest with as few roots as possible; -1 for a root.

    `weight[i, j]` is the weight of the arrow from j to i, or NaN if there is no arrow. The diagonal is ignored.

    >>> best_parents(np.array([[0, 3.0, 1], [2, 0, 1], [1, 4, 0]]))
    [1, -1, 1]
    """
    # A root is represented as a child of an additional node n. The weight of an arrow from n is lower than any
    # difference between two choices of the other arrows, so the maximum has as few of them as possible.
    n = len(weight)
    table = np.full((n + 1, n + 1), -np.inf)
    table[:n, :n] = np.where(np.isnan(weight), -np.inf, weight)
    finite = table[np.isfinite(table)]
    table[:n, n] = -1 - 2 * (n + 1) * (np.abs(finite).max() if len(finite) else 0)
    np.fill_diagonal(table, -np.inf)
    return [-1 if parent == n else int(parent) for parent in _arborescence(table, n)[:n]]


def _arborescence(table: NDArray[np.float64], root: int) -> NDArray[np.int64]:
    """The parent of each node in the maximum spanning arborescence from `root`."""
    parent: NDArray[np.int64] = table.argmax(axis=1)
    parent[root] = root
    pointers = parent
    for _ in range(len(table).bit_length()):
        pointers = pointers[pointers]  # 2^k steps up; at the end every pointer is the root or part of a cycle
    unreached = np.flatnonzero(pointers != root)
    if not len(unreached):
        return parent
    # Edmonds (1967): if the greedy choice has a cycle, some maximum arborescence contains all its arrows except one,
    # which an arrow from outside replaces. So contract the cycle, subtract from the weight of each entering arrow that
    # of the arrow that it replaces, and recurse.
    path = [int(unreached[0])]
    while int(parent[path[-1]]) not in path:
        path.append(int(parent[path[-1]]))
    cycle = np.array(path[path.index(int(parent[path[-1]])) :])
    in_cycle = np.zeros(len(table), dtype=bool)
    in_cycle[cycle] = True
    outer = np.flatnonzero(~in_cycle)
    gain = table[cycle] - table[cycle, parent[cycle]][:, None]  # the change of weight by an entering arrow
    reduced = np.full((len(outer) + 1, len(outer) + 1), -np.inf)
    reduced[:-1, :-1] = table[np.ix_(outer, outer)]
    reduced[-1, :-1] = gain[:, outer].max(axis=0)
    reduced[:-1, -1] = table[np.ix_(outer, cycle)].max(axis=1)
    np.fill_diagonal(reduced, -np.inf)
    contracted = _arborescence(reduced, int(np.flatnonzero(outer == root)[0]))
    parents: NDArray[np.int64] = parent.copy()
    for k, node in enumerate(outer):
        best = table[node, cycle].argmax()
        parents[node] = cycle[best] if contracted[k] == len(outer) else outer[contracted[k]]
    entry = outer[contracted[-1]]
    parents[cycle[gain[:, entry].argmax()]] = entry
    return parents


CLASS, OUTSIDE = "class", "(outside)"


@dataclass(frozen=True)
class Tan(Result):
    """The structure of a slice that is shrunk to boxes, one of which is the class.

    `kind` is one of:

    - `no DAG`; `naive Bayes`;
    - `TAN`: the boxes without the class form one tree, each with at most one other parent;
    - `forest augmented naive Bayes`: they form several trees;
    - `reverse TAN` and its forest: at most one child, the tree with reversed arrows;
    - `augmented naive Bayes`;
    - `DAG`: the class has no arrow to some boxes (`missing`).

    Attributes:
        kind: The kind of the structure.
        nearly: The kind after adding arrows from the class to the `missing` boxes.
        class_box: The box of the class.
        missing: The boxes to which the class has no arrow.
        quotient: The boxes and the arrows between them.
    """

    kind: str
    nearly: str
    class_box: str
    missing: tuple[str, ...]
    quotient: Quotient = field(repr=False)

    def _get_columns(self) -> Mapping[str, Any]:
        boxes = np.array(self.quotient.boxes, dtype=object)
        parents, children = self.quotient.arrows.T
        return {"parent": boxes[parents], "child": boxes[children], "arrows": self.quotient.counts}

    @property
    def caption(self) -> str:
        """The kind of the structure, in one line."""
        note = f"; with arrows to {', '.join(self.missing)} it would be: {self.nearly}" if self.missing else ""
        return f"{self.kind} (class {self.class_box}){note}"


@dataclass(frozen=True)
class TanTree(Result):
    """The maximum spanning arborescence of the attention of a slice: a TAN with the hidden state as class.

    Attributes:
        parents: The parent of each word; -1 for a root.
        weights: The attention of each word to its parent; 0 for a root.
        mass: The share of the attention between different words that is on the tree,
            `sum P(pa(i) | i) / sum (1 - P(i | i))`. It measures how tree-like the attention is.
        tokens: The tokens of the words.
        slice: The index of the slice.
        head: A description of the heads over which attention is averaged.
    """

    _shapes = "tokens: any word; parents: int<word word; weights: share word"

    parents: tuple[int, ...]
    weights: tuple[float, ...]
    mass: float
    tokens: tuple[str, ...]
    slice: int
    head: str

    def _get_columns(self) -> Mapping[str, Any]:
        parent_tokens = [self.tokens[parent] if parent >= 0 else "" for parent in self.parents]
        return {"token": self.tokens, "parent": self.parents, "parent_token": parent_tokens, "share": self.weights}

    @property
    def caption(self) -> str:
        """The slice, the head and the share of the attention, in one line."""
        return f"slice {self.slice}, {self.head}: {self.mass:.1%} of the attention between words is in the tree"

    def _get_shown_frame(self) -> pd.DataFrame:
        return self.to_dataframe().rename_axis("word")


def classify_slice(
    state: SentenceState, boxes: str | Mapping[str, str], slice_: int, class_box: str | None, stack: str | None = None
) -> Tan:
    """Classify the structure of a slice that is shrunk to boxes.

    Args:
        state: The sentence.
        boxes: `"words"`, `"roles"`, or a mapping from node to box.
        slice_: The index of the slice.
        class_box: The box of the class. By default the state that enters the slice, else the root with the most
            outgoing arrows.
        stack: The stack of the slice, in a net with several stacks.

    Raises:
        BNetError: If there is no such slice or box.
        UnknownNameError: If there is no such stack.
    """
    ground, depths = state.ground, state.network.graph.slices
    if stack is not None and (not isinstance(stack, str) or stack not in depths):
        raise unknown_name_error("stack", stack, depths)
    if isinstance(boxes, str) or depths:
        slice_ = resolve_index("slice", slice_, get_depth(state.network, stack))
    if isinstance(boxes, str):
        check_choice("boxes", boxes, ("words", "roles"))
        naming, first = build_box_namer(ground, boxes, slice_, stack)
        quotient = _drop_box(shrink(ground, naming, NodeSelection(slices=[slice_], weights=False)), OUTSIDE)
    else:
        quotient, first = shrink(ground, boxes, NodeSelection(slices=[slice_], weights=False)), None
    chosen = class_box if class_box is not None else first or _guess_class_box(quotient)
    if not isinstance(chosen, str) or chosen not in quotient.boxes:
        raise BNetError("class_box", expected="the name of a box", actual=chosen, allowed=", ".join(quotient.boxes))
    return _classify(quotient, chosen)


def build_box_namer(
    ground: GroundGraph, boxes: str, slice_: int, stack: str | None = None
) -> tuple[Callable[[str], str], str]:
    """Return a function from node names to boxes, and the name of the class box."""
    previous = slice_ - 1 if slice_ else -1
    word_groups = [group for group in ground.template.groups if group.word_stack is not None]
    states = [f for f in word_groups if (f.slice, f.step) == (slice_, previous) and stack in (None, f.stack)]
    if len(states) != 1:
        expected = "a slice with exactly one state that enters it"
        if not states:
            raise BNetError("slice", expected=expected, hint="Pass boxes= as a mapping from node to box")
        names = ", ".join(group.name for group in states)
        hint = f"Pass stack=, one of {', '.join(group.stack for group in states)}, or boxes= as a mapping"
        raise BNetError("slice", expected=expected, actual=names, hint=hint)
    entry, stack = states[0], states[0].stack

    def box(name: str) -> str:
        group, index = ground.parse_name(name)
        if group.index == entry.index:
            return CLASS if boxes == "words" else entry.name
        if group.step != slice_ or group.stack != stack:
            return OUTSIDE
        if boxes == "roles" or ground.axes(group)[-1:] != (WORD,):
            return group.name
        return f"word_{index[-1]}"

    return box, CLASS if boxes == "words" else entry.name


def _drop_box(quotient: Quotient, box: str) -> Quotient:
    """Return the quotient without one box and its arrows."""
    if box not in quotient.boxes:
        return quotient
    index = quotient.boxes.index(box)
    mask = ~(quotient.arrows == index).any(axis=1)
    arrows = quotient.arrows[mask]
    boxes = tuple(name for name in quotient.boxes if name != box)
    return Quotient(boxes, arrows - (arrows > index), quotient.counts[mask])


def _guess_class_box(quotient: Quotient) -> str:
    """Return the root with the most outgoing arrows; the first box if there is no root."""
    counts = np.bincount(quotient.arrows[:, 0], minlength=len(quotient.boxes))
    entered = set(quotient.arrows[:, 1].tolist())
    roots = [k for k in range(len(quotient.boxes)) if k not in entered] or [0]
    return quotient.boxes[max(roots, key=lambda k: (counts[k], -k))]


def _classify(quotient: Quotient, class_box: str) -> Tan:
    """Classify the structure of the boxes, given the box of the class."""
    word_boxes = [box for box in quotient.boxes if box != class_box]
    sources, targets = quotient.arrows.T
    class_index, edges = quotient.boxes.index(class_box), _drop_box(quotient, class_box).arrows
    reached = {quotient.boxes[k] for k in targets[sources == class_index].tolist()}
    missing = tuple(box for box in word_boxes if box not in reached)
    parents, children = (np.bincount(edges[:, side]).max(initial=0) for side in (1, 0))
    acyclic = quotient.acyclic
    if not acyclic or (targets == class_index).any():
        nearly = "no DAG" if not acyclic else "DAG"
    elif not len(edges):
        nearly = "naive Bayes"
    else:
        one_tree = len(edges) == len(word_boxes) - 1
        tree_kind = "TAN" if one_tree else "forest augmented naive Bayes"
        nearly = tree_kind if parents <= 1 else f"reverse {tree_kind}" if children <= 1 else "augmented naive Bayes"
    kind = "DAG" if missing and nearly != "no DAG" else nearly
    return Tan(kind, nearly, class_box, missing, quotient)


def tan_tree(attention: Tensor, tokens: tuple[str, ...], slice_: int, head: str) -> TanTree:
    """Compute the maximum spanning arborescence of the attention of one slice.

    Args:
        attention: The attention `P(j | i)`, `[word, word]`.
        tokens: The tokens of the words.
        slice_: The index of the slice.
        head: A description of the heads over which attention is averaged, for display.

    Returns:
        The tree, and the share of the attention that is on it.

    >>> import torch
    >>> tan_tree(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), ("the", "cat"), 0, "head 0").parents
    (-1, 0)
    """
    table = to_numpy(attention)
    table = np.where(table == 0, np.nan, table)
    # Maximum spanning arborescence (Chu and Liu 1965, Edmonds 1967), in graph.arborescence.
    parents = best_parents(table)
    weights = [float(attention[i, parent]) if parent >= 0 else 0.0 for i, parent in enumerate(parents)]
    total = float((1 - torch.diagonal(attention)).sum())
    mass = sum(weights) / total if total > 0 else 1.0
    return TanTree(tuple(parents), tuple(weights), mass, tokens, slice_, head)


MIN_SENTENCES_PER_STATE = 10  # sentences for each observed joint state, so that the bias is below 1/20 nat


@dataclass(frozen=True)
class CorpusTan(Result):
    """The tree of boxes with the maximum conditional mutual information given the class, over a corpus.

    Attributes:
        boxes: The names of the boxes.
        parents: The parent of each box; -1 for the root.
        information: `I(box i; box j | class)` in nats, `[box, box]`.
        corrected: `information` without its estimated bias, `[box, box]`; it determines the tree.
        divergence: The KL divergence in nats from the corpus to the TAN that is fitted to it. It is None for fewer than
            10 sentences for each observed joint state, as `no_divergence_reason` explains.
        divergence_corrected: `divergence` without its estimated bias.
        joint_states: The number of observed joint states of the class and all boxes.
        sentences: The number of sentences.
    """

    _shapes = "boxes: any box; parents: int<box box; information corrected: float64 box box"

    boxes: tuple[str, ...]
    parents: tuple[int, ...]
    information: NDArray[np.float64] = field(repr=False)
    corrected: NDArray[np.float64] = field(repr=False)
    divergence: float | None
    divergence_corrected: float | None
    joint_states: int
    sentences: int

    @property
    def no_divergence_reason(self) -> str | None:
        """The reason why there is no divergence; None if there is one."""
        if self.divergence is not None:
            return None
        counts = f"{self.sentences} sentences have {self.joint_states} joint states of the class and all boxes"
        return f"{counts}, and the estimate of the joint entropy requires {MIN_SENTENCES_PER_STATE} sentences for each"

    def _get_columns(self) -> Mapping[str, Any]:
        edges = [(i, p) for i, p in enumerate(self.parents)]
        tables = {"information": self.information, "corrected": self.corrected}
        columns = {name: [table[edge] if edge[1] >= 0 else 0.0 for edge in edges] for name, table in tables.items()}
        return {"box": self.boxes, "parent": [self.boxes[p] if p >= 0 else "" for p in self.parents], **columns}

    @property
    def caption(self) -> str:
        """The number of sentences and the divergence from the tree, in one line."""
        if self.divergence is None or self.divergence_corrected is None:
            return f"{self.sentences} sentences; no divergence from the TAN: {self.no_divergence_reason}"
        detail = f"{self.divergence:.3f} nats from the TAN ({self.divergence_corrected:.3f} corrected)"
        return f"{self.sentences} sentences; {detail}"


def learn_tan(classes: Sequence[int], codes: IntArray, boxes: Sequence[str]) -> CorpusTan:
    """Learn the TAN of a corpus from discrete codes.

    Args:
        classes: The class of each sentence, `[sentence]`.
        codes: The code of each box of each sentence, `[sentence, box]`.
        boxes: The names of the boxes.

    Returns:
        The tree, the mutual information of the boxes, and the divergence of the corpus from the TAN.

    Raises:
        BNetError: If there are fewer than two sentences, or the classes determine all codes.
    """
    import networkx as nx

    label, table = np.asarray(classes), np.asarray(codes)
    if table.ndim != 2 or len(label) != len(table) or len(table) < 2:
        actual = f"{len(label)} classes and codes of shape {table.shape}"
        raise BNetError("corpus", expected="at least two sentences with a class for each", actual=actual)
    if all(len(np.unique(table[label == c], axis=0)) == 1 for c in np.unique(label)):
        expected = "codes that differ between sentences of a class, because otherwise their information is zero"
        raise BNetError("corpus", expected=expected)
    n = table.shape[1]
    pairs = [(i, j) for i in range(n) for j in range(i)]
    plain, corrected = np.zeros((n, n)), np.zeros((n, n))
    for i, j in pairs:
        h_i, h_j, h_ij = (_conditional_entropies(label, table[:, columns]) for columns in ([i], [j], [i, j]))
        plain[i, j], corrected[i, j] = (a + b - c for a, b, c in zip(h_i, h_j, h_ij, strict=True))
    plain, corrected = plain + plain.T, corrected + corrected.T
    # The tree that maximizes the likelihood is the maximum spanning tree of the conditional mutual information (Chow
    # and Liu 1968; Friedman, Geiger and Goldszmidt 1997); its root and directions do not matter.
    graph = nx.Graph()
    graph.add_nodes_from(range(n))
    graph.add_weighted_edges_from((i, j, corrected[i, j]) for i, j in pairs)
    tree = nx.bfs_tree(nx.maximum_spanning_tree(graph), 0)
    parents = tuple(next(iter(tree.predecessors(i)), -1) for i in range(n))
    edges = [(i, parent) for i, parent in enumerate(parents) if parent >= 0]
    marginal = np.sum([_conditional_entropies(label, table[:, [i]]) for i in range(n)], axis=0)
    explained = [sum(float(h_i[edge]) for edge in edges) for h_i in (plain, corrected)]
    # KL(corpus || TAN) = sum_i H(i | class) - H(all | class) - sum_edges I(i; j | class). The estimate of the joint
    # entropy is at most log N for any truth, so the divergence requires several sentences for each joint state.
    num_states = len(np.unique(np.column_stack([label, table]), axis=0))
    divergence = (
        marginal - np.array(_conditional_entropies(label, table)) - np.array(explained)
        if len(table) >= MIN_SENTENCES_PER_STATE * num_states
        else None
    )
    return CorpusTan(
        boxes=tuple(boxes),
        parents=parents,
        information=plain,
        corrected=corrected,
        divergence=None if divergence is None else float(divergence[0]),
        divergence_corrected=None if divergence is None else float(divergence[1]),
        joint_states=num_states,
        sentences=len(table),
    )


def _conditional_entropies(labels: IntArray, codes: IntArray) -> tuple[float, float]:
    """Compute `H(codes | class)` in nats: the plug-in estimate, and the estimate with bias correction."""
    # The plug-in entropy is biased down by about (observed states - 1) / 2N nats (Miller 1955). The correction adds
    # this for each class.
    plain = extra = 0.0
    for c in np.unique(labels):
        counts = np.unique(codes[labels == c], axis=0, return_counts=True)[1]
        probs = counts / counts.sum()
        plain -= float((probs * np.log(probs)).sum()) * counts.sum() / len(labels)
        extra += (len(counts) - 1) / (2 * len(labels))
    return plain, plain + extra


def learn_tan_from_sentences(
    states: Sequence[SentenceState], classes: object, slice_: int, head: int | None, role: str | None
) -> CorpusTan:
    """Learn the TAN of sentences of one length.

    Boxes are words, and the code of a word is the word with its maximum attention.

    Args:
        states: The sentences; ranks share them.
        classes: A label for each sentence, or a discrete node. The class is then the most probable state of the node
            given the evidence of the sentence, and it is added to the evidence.
        slice_: The index of the slice.
        head: The index of the head; None for the mean over heads.
        role: The role with attention.

    Raises:
        BNetError: If the sentences differ in length, one has no evidence for its class, or labels are missing.
    """
    network = states[0].network if states else None
    if network is None or len({len(s.tokens[parse_attention_slices(network, slice_, role)[0]]) for s in states}) != 1:
        raise BNetError("sentences", expected="at least one sentence, all of the same length")
    node = classes if isinstance(classes, str) else None
    if node is not None and not all(state.evidence for state in states):
        expected = f"evidence on each sentence, because {classes} is its class"
        raise BNetError("sentences", expected=expected, hint="Call observe(...), or pass a list of labels as classes=")
    labels = _parse_labels(classes, len(states)) if node is None else [None] * len(states)
    with distributed_context(resolve_device(None, network)) as ranks:
        data = [(state.encoded.given, state.evidence) for state in states]
        ranks.assert_same("tan of a corpus", net=network, data=data, settings=(labels, node, slice_, head, role))
        shard = ranks.shard([*zip(states, labels, strict=True)])
        local = [_get_class_and_codes(s, node, label, slice_, head, role) for s, label in shard]
        results = ranks.all_gather_object(local)
    rows = [results[k % len(results)][k // len(results)] for k in range(len(states))]
    if node is not None:  # labels that the user passed stay the objects of this rank
        labels = [label for label, _ in rows]
    number = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    table = np.array([codes for _, codes in rows])
    boxes = [f"word_{i}" for i in range(table.shape[1])]
    return learn_tan([number[label] for label in labels], table, boxes)


def _get_class_and_codes(
    state: SentenceState, node: str | None, label: Hashable, slice_: int, head: int | None, role: str | None
) -> tuple[Hashable, list[int]]:
    """Return the class of a sentence, and for each word the word with its maximum attention."""
    if node is not None:
        number = state.ground.id(node)
        check_discrete_node(state.model, number)
        label = int(plan_posterior(state.query([number])).run().argmax())
        state = state if number in state.evidence else state.with_evidence({node: label})
    stack, slices = parse_attention_slices(state.network, slice_, role)
    options: dict[str, Any] = {"role": role, "residual": 0.0, "head": head, "method": "rollout"}
    result = plan_reads(state.query(), state.tokens[stack], slices, **options).run()
    codes: list[int] = result.matrix.argmax(-1).tolist()
    return label, codes


def _parse_labels(classes: object, count: int) -> list[Hashable]:
    """Read a label for each sentence from a list, an array or a tensor."""
    entries: list[Any] = to_list(to_host("classes", classes))
    labels = [entry.item() if isinstance(entry, Tensor | np.generic) else entry for entry in entries]
    if len(labels) != count:
        raise BNetError("classes", expected=f"{count} labels, or the name of a discrete node", actual=classes)
    for label in labels:
        if not isinstance(label, str | int | float) or label != label:
            raise BNetError("classes", expected="labels that are strings or numbers", actual=label)
    return labels

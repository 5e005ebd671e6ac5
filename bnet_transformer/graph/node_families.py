"""The nodes of a name: one node, or a family, which is an array of nodes along the indices that the name leaves open.

All functions that take names of nodes find them here, so that a name or a pattern has one meaning everywhere. The rule
is in `_core.naming`, and on the page "Declare an architecture".
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bnet_transformer._core.naming import SLICE, WORD, count_word_from_start
from bnet_transformer.errors import BNetError
from bnet_transformer.graph.ground_graph import GroundGraph, Ids, NodeSelection


@dataclass(frozen=True)
class NodeFamily:
    """The nodes of a name or a pattern.

    Args:
        name: The name or the pattern.
        parts: For each node group, the ids of the nodes as an array along its open axes.
        axes: For each node group, the open axes: those plates, and `"word"`, of which the name has no number.
    """

    name: str
    parts: tuple[Ids, ...] = field(repr=False)
    axes: tuple[tuple[str, ...], ...]

    @property
    def nodes(self) -> list[int]:
        """The ids of all nodes: by node group, then in row-major order of the open axes."""
        return [node for part in self.parts for node in part.ravel().tolist()]

    @property
    def is_node(self) -> bool:
        """True for the name of one node; False for an array of nodes, also if it has only one."""
        return len(self.parts) == 1 and not self.axes[0]

    @property
    def open_axes(self) -> tuple[str, ...]:
        """The axes of `array`: `"slice"` for several slices, then the open plates, then `"word"`.

        Raises:
            BNetError: The node groups have different axes.
        """
        if len({(axes, part.shape) for axes, part in zip(self.axes, self.parts, strict=True)}) > 1:
            expected = "a role whose nodes have the same axes in all slices"
            raise BNetError(self.name, expected=expected, actual="groups with different axes")
        return ((SLICE,) if len(self.parts) > 1 else ()) + self.axes[0]

    @property
    def array(self) -> Ids:
        """The ids of all nodes, as an array along `open_axes`."""
        return np.stack(self.parts) if len(self.open_axes) > len(self.axes[0]) else self.parts[0]


def find_family(ground: GroundGraph, name: object) -> NodeFamily:
    """The nodes of a name or a pattern.

    Args:
        ground: The graph of the sentence.
        name: A node (`q_2_0_3`), a node group (`q_2`), a role (`q`), a name without its last indices (`q_2_0`: head 0
            at all words), or a pattern (`q_2_*_3`). A negative word counts from the end (`q_2_0_-1`).

    Raises:
        UnknownNameError: The name matches no node.

    >>> import bnet_transformer as bt
    >>> ground = bt.bayesuvius(dim=4, heads=2, combine="concat").sentence("the cat sat").ground
    >>> family = find_family(ground, "q_0_*_-1")
    >>> family.axes, list(map(ground.name, family.nodes))
    ((('head',),), ['q_0_0_2', 'q_0_1_2'])
    """
    parts, axes = list[Ids](), list[tuple[str, ...]]()
    for group, index in ground.template.match_groups(name, ground.word_counts):
        numbers = {axis: [i] for axis, i in zip(ground.axes(group), index, strict=True) if i is not None}
        words = {group.word_stack or "": numbers.pop(WORD)} if WORD in numbers else {}
        nodes = ground.select_nodes(group, NodeSelection(words=words, plates=numbers))
        pairs = zip(ground.axes(group), ground.shapes[group.index], index, strict=True)
        is_open = [(axis, size) for axis, size, i in pairs if i is None]
        parts.append(nodes.reshape([size for _, size in is_open]))
        axes.append(tuple([axis for axis, _ in is_open]))
    if not any(part.size for part in parts):
        raise ground.unknown_node_error(name)
    return NodeFamily(str(name), tuple(parts), tuple(axes))


def count_from_start(ground: GroundGraph, name: str) -> str:
    """The same name or pattern, with a word that is counted from the start: `y_-1` of three words is `y_2`.

    Args:
        ground: The graph of the sentence.
        name: The name or the pattern; it is returned unchanged if it matches no node.
    """
    groups = [group for group, _ in ground.template.match_groups(name, ground.word_counts)]
    stack = groups[0].word_stack if groups else None
    return name if stack is None else count_word_from_start(name, ground.word_counts[stack])

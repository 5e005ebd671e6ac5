"""Why an algorithm does not apply to a query, as a value and not as an error."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from bnet_transformer.compiler.plan import StructureError
from bnet_transformer.inference.query import group_nodes
from bnet_transformer.reference import GroundModel


@dataclass(frozen=True)
class Obstacle:
    """Why an algorithm does not apply, without an error: the next rule is tried.

    Args:
        node: The node or the node group that is the reason.
        reason: The reason, as a clause.
        remedy: What would make the algorithm possible, as an instruction; None if nothing would.
    """

    node: str
    reason: str
    remedy: str | None = None

    def __str__(self) -> str:
        return self.reason


Fault = Obstacle | StructureError  # a StructureError is the error that the algorithm would raise


def find_mixed_type_fault(
    model: GroundModel,
    values: Mapping[int, Tensor],
    states: Iterable[int] = (),
    relevant: Collection[int] | None = None,
) -> Obstacle | None:
    """Why the values of a group are not one tensor: some nodes have states and others have vectors."""
    is_real = {node: value.is_floating_point() for node, value in values.items()} | dict.fromkeys(states, False)
    for index, nodes in group_nodes(model, is_real, relevant).items():
        if len({is_real[node] for node in nodes}) > 1:
            name = model.network.specs[index].group.name
            return Obstacle(
                name,
                f"some nodes of {name} are set to or observed as states and others as vectors",
                f"use states only or vectors only for {name}",
            )
    return None

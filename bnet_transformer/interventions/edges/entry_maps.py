"""What each unit of a group of writers adds to a group that sums over them: each head by its own matrix.

The zeros of all other heads would be mapped too if each head were a full collection.
"""

from __future__ import annotations

from torch import Tensor

from bnet_transformer.compiler.execution_state import ExecutionState
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.interventions.edges.structure import EdgeStructure


def adds_units(network: Network, spec: NodeSpec, parent: int) -> bool:
    """Whether a group adds one term for each unit of a parent group."""
    plates = network.specs[parent].group.plates
    slots = [slot for slot in spec.parents if slot.index == parent]
    is_single = len(slots) == 1 and slots[0].over == plates != () and slots[0].reach.kind == "same"
    is_plain = all(slot.over in ((), plates) and not slot.pick for slot in spec.parents)
    return spec.tpm.adds_entries and is_single and is_plain


def map_units(state: ExecutionState, structure: EdgeStructure, spec: NodeSpec, parent: int) -> Tensor:
    """The term of each unit of a parent for which `adds_units` is true, `[unit, *layout, *shape]`.

    Args:
        state: The run, in which the parent has the values that are mapped.
        structure: The edges of the net.
        spec: The group that maps the parent.
        parent: The parent group.

    Returns:
        The terms, without the constant of the map.
    """
    context, parents = gather_parents(state, spec)
    linear, rank = structure.get_linear_positions(spec), state.layout.rank
    inputs, zeros = [], []
    for k, (slot, value) in enumerate(zip(spec.parents, parents, strict=True)):
        count, event = len(slot.over), value.shape[rank + len(slot.over) :]
        if k in linear:
            zero = value.new_zeros([1] * (1 + rank + count) + list(event))
            zeros.append(zero)
            if slot.index != parent:
                inputs.append(zero)
                continue
        entries = value[None]
        if count:  # the units are a separate dim, and collections have one entry
            sizes = [structure.network.graph.plate_sizes[plate] for plate in slot.over]
            full = value.expand(*value.shape[:rank], *sizes, *event)
            units = full.movedim(list(range(rank, rank + count)), list(range(count))).flatten(0, count - 1)
            entries = units.reshape(*units.shape[: 1 + rank], *[1] * count, *event)
        inputs.append(entries)
        if k not in linear:
            zeros.append(entries)
    terms: Tensor = spec.tpm.value(context, *inputs) - spec.tpm.value(context, *zeros)
    return terms

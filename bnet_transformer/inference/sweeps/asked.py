"""What is asked of a sweep: `at=` and `over=`, as cells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bnet_transformer.errors import BNetError
from bnet_transformer.inference.surgery import matching
from bnet_transformer.inference.sweeps.cells import ARROW, Cells, Entries, Route, check_value, labelled
from bnet_transformer.inference.sweeps.nodes import of_role
from bnet_transformer.inference.sweeps.pairs import Examples
from bnet_transformer.inference.sweeps.routes import named_route, of_arrows
from bnet_transformer.world import World


def cells_of(examples: Examples, at: object, over: object) -> Cells:
    """The cells that `at=` and `over=` stand for."""
    world = examples.world
    if isinstance(at, str):
        if ARROW in at:
            found = of_arrows(world, at, over)
        else:
            _check_role(world, at)
            found = of_role(world, at, over)
        return labelled(examples, found)
    if not isinstance(at, Sequence) or not at or not all(isinstance(each, str) for each in at):
        forms = 'a role ("x"), an arrow of roles ("v -> a"), or a list of names, patterns and paths of names'
        raise BNetError("at", expected=forms, got=at)
    if over is not None:
        raise BNetError("over", expected="none, for a list of cells", got=over)
    return _listed(world, list(at))


def _check_role(world: World, at: str) -> None:
    """Refuse a name or a pattern in place of a role, and say where it may stand."""
    if "*" in at or (at not in world.network.graph.by_stem and _is_known(world, at)):
        raise BNetError("at", expected="a role", got=at, allowed=f"at=[{at!r}], a list of names and patterns")


def _is_known(world: World, name: str) -> bool:
    try:
        return bool(matching(world.ground, name))
    except BNetError:
        return False


def _listed(world: World, patterns: Sequence[str]) -> Cells:
    """One cell for each pattern or path."""
    for pattern in patterns:
        if patterns.count(pattern) > 1:
            raise BNetError("at", expected="each cell once", got=f"{pattern!r} twice")
    by_family: dict[int, list[tuple[int, int]]] = {}
    routes = []
    for cell, pattern in enumerate(patterns):
        if ARROW in pattern:
            routes.append(Route(cell, named_route(world, pattern)))
            continue
        for node in matching(world.ground, pattern):
            family = world.ground.family_of(node).index
            by_family.setdefault(family, []).append((cell, node - int(world.ground.offsets[family])))
    entries = []
    for family, pairs in sorted(by_family.items()):
        check_value(world, world.network.members[family])
        cell, node = np.array(sorted(set(pairs)), dtype=np.int64).T
        entries.append(Entries(family, cell, node))
    count = tuple(range(len(patterns)))
    places, labels = {"cell": count}, {"cell": tuple(patterns)}
    names = dict(enumerate(patterns))
    return Cells("cells", ("cell",), places, labels, names, tuple(entries), tuple(routes))

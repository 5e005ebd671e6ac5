"""Questions of values to a sentence, as the reference answers them where the compiled reading refuses.

Distributions, attention TPMs, weights of arrows; and what a person means by slices, words and heads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal as TorchNormal

from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer._core.naming import WORD
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.graph import NodeGroup
from bnet_transformer.reference import (
    BUDGET,
    World,
    choices,
    log_evidence,
    log_joint,
    parents,
    reading_parents,
    runs,
    settling,
    sources,
)


def must_be_discrete(world: World, node: int) -> None:
    """Refuse a node without a finite number of states."""
    member = world.member(node)
    if node in world.do:
        got = f"one that is set to {world.do[node].tolist()}"
        raise BNetError(world.ground.name(node), expected="a node that is still random", actual=got)
    if member.tpm.kind != "discrete":
        names = [m.group.name for m in world.network.specs if m.tpm.kind == "discrete"]
        raise BNetError(
            world.ground.name(node),
            expected="a discrete random node",
            actual=f"{'an' if member.tpm.kind == 'input' else 'a'} {member.tpm.kind} one ({type(member.tpm).__name__})",
            allowed="nodes of " + ", ".join(names) if names else "none: this net has no discrete random node",
        )


def distribution(world: World, node: int, seen: Mapping[int, Tensor]) -> Distribution:
    """`P(node | parents)`, batched over the open choices that decide the parents: `[*states]`."""
    seen = settling(world, seen)
    free = choices(world, parents(world, node), seen)
    sizes = [world.count_states(choice) for choice in free]
    found = [run.distribution(node) for run in runs(world, free, seen)]
    if not free:
        return found[0]
    first = found[0]

    def of_states(name: str) -> Tensor:
        table = torch.stack([getattr(each, name) for each in found])
        return table.reshape((*sizes, *table.shape[1:]))

    if isinstance(first, Categorical):
        return Categorical(logits=of_states("logits"), validate_args=False)
    if isinstance(first, Independent) and isinstance(first.base_dist, TorchNormal):
        normal = TorchNormal(of_states("mean"), of_states("stddev"), validate_args=False)
        return Independent(normal, first.mean.dim(), validate_args=False)
    from pyro.distributions import Delta

    if isinstance(first, Delta):
        return Delta(of_states("v"), event_dim=first.v.dim())
    names = ", ".join(world.ground.name(choice) for choice in free)
    raise BNetError(
        world.ground.name(node),
        expected=f"{names} settled (do or observe)",
        actual="open choices",
        allowed=f"a batch is made of categoricals, deltas and normals, not of {type(first).__name__}",
    )


def attention(world: World, member: NodeSpec, seen: Mapping[int, Tensor]) -> Tensor:
    """`P(j | i)` of a family that reads words, which depend on the same choices: `[*states, *plates, word, word]`."""
    seen = settling(world, seen)
    base, shape = int(world.ground.offsets[member.group.index]), world.ground.shapes[member.group.index]
    given = next(given for given in member.parents if WORD in given.over or dict(given.pick).get(WORD) is not None)
    width = world.ground.word_counts[world.network.specs[given.index].group.word_stack or ""]
    rows = []
    for offset in range(len(world.ground.select_nodes(member.group))):
        node = base + offset
        free = choices(world, reading_parents(world, node), seen)
        table = []
        for run in runs(world, free, seen):
            reading = run.reading(node)
            if reading is None:
                raise BNetError(member.group.name, expected="attention P(j | i)", actual=member.tpm.why_no_reading())
            row = torch.zeros(width, dtype=reading[1].dtype)
            row[reading[0]] = reading[1]
            table.append(row)
        rows.append(torch.stack(table).reshape((*(world.count_states(choice) for choice in free), width)))
    states = max((row.shape[:-1] for row in rows), key=len)
    stacked = torch.stack([row.expand(*states, width) for row in rows], -2)
    return stacked.reshape((*stacked.shape[:-2], *shape, width))


def grouped(reading: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """`P(j | i)` over groups of words: summed over the tokens that are read, averaged over those that read."""
    read = torch.stack([reading[..., list(group)].sum(-1) for group in groups], -1)
    return torch.stack([read[..., list(group), :].mean(-2) for group in groups], -2)


def shared_and_own(world: World, above: Mapping[int, Sequence[int]]) -> tuple[list[int], list[int]] | None:
    """The choices that decide all of some nodes, and the families of which each node has that of its own word beside
    them; None where nodes depend on other choices. `above` has the choices that decide each node."""
    shared = set.intersection(*map(set, above.values())) if above else set()
    families = set()
    for node, free in above.items():
        word = world.ground.unravel_index(node)[1][-1:]
        own = [world.ground.unravel_index(choice) for choice in free if choice not in shared]
        if any(index[-1:] != word for _, index in own):
            return None
        families.add(tuple(family.index for family, _ in own))
    apart = families.pop() if families else ()
    return None if families or len(set(apart)) < len(apart) else (sorted(shared), sorted(apart))


def reader(world: World, slice_: int, role: str | None) -> NodeSpec:
    """The member that reads words in a slice: the one whose TPM is an attention."""
    depth = depth_of(world.network)
    if check_int("slice", slice_, minimum=0) >= depth:
        raise BNetError("slice", expected=f"a slice from 0 to {depth - 1}", actual=slice_)
    found = [m for m in world.network.specs if m.group.step == slice_ and m.has_word_attention]
    names = {member.group.stem: member for member in found}
    if role is not None:
        if not isinstance(role, str) or role not in names:
            raise unknown_name_error("role that reads", role, names)
        return names[role]
    if len(found) > 1:
        raise BNetError("role", expected="which of them reads (role=)", actual="none", allowed=", ".join(names))
    if not found:
        here = [m for m in world.network.specs if m.group.step == slice_]
        collect = [m.tpm.why_no_reading() for m in here if m.word_parents]
        got = "; ".join(dict.fromkeys(collect)) or ", ".join(sorted({type(m.tpm).__name__ for m in here}))
        raise BNetError(f"attention of slice {slice_}", expected="a TPM with P(j | i)", actual=got)
    return found[0]


def choice_above(network: Network, families: Collection[int]) -> bool:
    """True where a discrete family stands above some families."""
    return any(network.specs[index].tpm.kind == "discrete" for index in network.graph.ancestors(families))


def state_of(network: Network, stack: str) -> NodeGroup | None:
    """The first state of a stack's words, if it has one without plates."""
    return next((each for each in network.graph.groups if each.stack == stack and network.is_word_state(each)), None)


def readable(world: World, member: NodeSpec) -> NDArray[np.bool_]:
    """`[word, word]`: whether an arrow lets word i of a member read word j, along any of its plates."""
    ground, family = world.ground, member.group
    over = {given.index for given in member.word_parents}
    bundles = [bundle for bundle in ground.template.in_edges[family.index] if bundle.parent in over]
    pairs: NDArray[np.bool_] = np.logical_or.reduce([ground.word_adjacency(bundle) for bundle in bundles])
    cut, rows = ground.get_cut_nodes(family.index), ground.get_partly_cut_nodes(family.index)
    places = [ground.unravel_index(node)[1] for node in (*cut, *rows)]
    each = math.prod(ground.shapes[family.index][:-1])
    gone = [word for word, count in Counter(place[-1] for place in places).items() if count == each]
    some = [kept for kept in map(ground.retained_edge, bundles) if kept is not None] if rows else []
    stay = {ground.unravel_index(node)[1][-1] for node in rows}
    for word in gone:
        left = [ground.word_adjacency(kept)[word] for kept in some] if word in stay else []
        pairs[word] = np.logical_or.reduce(left) if left else False
    return pairs


def expected_reading(
    world: World, node: int, evidence: Mapping[int, Tensor], budget: int = BUDGET
) -> tuple[list[int], Tensor] | None:
    """The words that a node reads and `P(j | i, evidence)`: its reading averaged over the posterior of the choices."""
    settled = settling(world, evidence)
    free = choices(world, [*reading_parents(world, node), *evidence], settled, beyond=True)
    words: list[int] = []
    found, logs = [], []
    for run in runs(world, free, settled, budget):
        reading = run.reading(node)
        if reading is None:
            return None
        words = reading[0]
        found.append(reading[1].double())
        logs.append(log_joint(run, free, evidence))
    if evidence and max(logs) == -math.inf:
        log_evidence(world, evidence, budget=budget)
    share = torch.softmax(torch.tensor(logs, dtype=torch.float64), 0)
    return words, torch.einsum("s,sm->m", share, torch.stack(found))


def single_parents(world: World, node: int) -> set[int]:
    """The parents of a node that fill a slot of a single parent (its query, its residual)."""
    family, index = world.ground.unravel_index(node)
    member = world.network.specs[family.index]
    single = [given for given in member.parents if not given.over and not given.pick]
    return {parent for given in single for parent in sources(world, member, index, given, {})[1]}


def slices_of(wanted: object, network: Network) -> list[int]:
    """Slices of a net, from one or several."""
    return numbers_of("slices", wanted, depth_of(network))


def slices_that_read(network: Network, slices: object, role: str | None) -> tuple[str, list[int]]:
    """The stack and the numbers of the slices in which words read words.

    Args:
        network: The net.
        slices: One slice, several, or `"all"`.
        role: The role that reads; its stack is meant. By default the first stack.
    """
    graph = network.graph
    if role is not None and (not isinstance(role, str) or role not in graph.by_stem):
        raise unknown_name_error("role", role, graph.by_stem)
    stack = graph.by_stem[role][0].stack if role is not None else next(iter(graph.slices), "")
    depth = depth_of(network, stack)
    if stack not in graph.word_stacks:
        got = f"the stack {stack!r}, without words" if stack else "a net without words"
        raise BNetError("slice", expected="slices in which words read words", actual=got)
    if isinstance(slices, str):
        check_choice("slices", slices, ("all",))
        return stack, list(range(depth))
    numbers = sorted({check_int("slice", item, minimum=0) for item in items(slices)})
    if not numbers or numbers[-1] >= depth:
        raise BNetError("slices", expected=f"slices from 0 to {depth - 1}", actual=slices)
    return stack, numbers


def depth_of(network: Network, stack: str | None = None) -> int:
    """The number of slices of a stack, by default of the deepest; refused where a net has none."""
    depth = network.graph.depth if stack is None else network.graph.slices.get(stack, 0)
    if not depth:
        got = f"none in the stack {stack!r}" if stack else "a net without slices"
        raise BNetError("slice", expected="a net with slices", actual=got)
    return depth


def places_of(tokens: Sequence[str], wanted: object) -> list[int]:
    """Indices of words, from indices or the words themselves (every place where a word stands)."""
    asked = items(wanted)
    found: list[int] = []
    for item in asked:
        if isinstance(item, str):
            places = [k for k, token in enumerate(tokens) if token == item]
            if not places:
                raise unknown_name_error("word", item, tokens)
            found.extend(places)
        else:
            found.extend(numbers_of("words", item, len(tokens)))
    return sorted(set(found))


def items(wanted: object) -> list[object]:
    """What was asked for as a list: one thing, or a collection of them."""
    if isinstance(wanted, Tensor | np.ndarray):
        with suppress(RuntimeError):  # a tensor without a plain table of numbers is refused as it is
            wanted = wanted.tolist()
    return list(wanted) if isinstance(wanted, Collection) and not isinstance(wanted, str) else [wanted]


def numbers_of(what: str, wanted: object, count: int) -> list[int]:
    """Indices below `count`, from one or several."""
    found = []
    for item in items(wanted):
        number = check_int(what, item, minimum=0)
        if number >= count:
            raise BNetError(what, expected=f"numbers from 0 to {count - 1}", actual=number)
        found.append(number)
    if not found:
        raise BNetError(what, expected=f"numbers from 0 to {count - 1}, at least one", actual="none")
    return sorted(set(found))

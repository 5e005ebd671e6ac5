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
    GroundModel,
    attention_parents,
    enumerate_runs,
    find_open_choices,
    find_slot_parents,
    get_fixed,
    log_evidence,
    log_joint,
    parents,
)


def check_discrete_node(model: GroundModel, node: int) -> None:
    """Refuse a node without a finite number of states."""
    member = model.spec(node)
    if node in model.do:
        got = f"one that is set to {model.do[node].tolist()}"
        raise BNetError(model.ground.name(node), expected="a node that is still random", actual=got)
    if member.tpm.kind != "discrete":
        names = [m.group.name for m in model.network.specs if m.tpm.kind == "discrete"]
        raise BNetError(
            model.ground.name(node),
            expected="a discrete random node",
            actual=f"{'an' if member.tpm.kind == 'input' else 'a'} {member.tpm.kind} one ({type(member.tpm).__name__})",
            allowed="nodes of " + ", ".join(names) if names else "none: this net has no discrete random node",
        )


def conditional_distribution(model: GroundModel, node: int, evidence: Mapping[int, Tensor]) -> Distribution:
    """`P(node | parents)`, batched over the open choices that decide the parents: `[*states]`."""
    evidence = get_fixed(model, evidence)
    free = find_open_choices(model, parents(model, node), evidence)
    sizes = [model.count_states(choice) for choice in free]
    found = [run.distribution(node) for run in enumerate_runs(model, free, evidence)]
    if not free:
        return found[0]
    first = found[0]

    def stack_states(name: str) -> Tensor:
        table = torch.stack([getattr(each, name) for each in found])
        return table.reshape((*sizes, *table.shape[1:]))

    if isinstance(first, Categorical):
        return Categorical(logits=stack_states("logits"), validate_args=False)
    if isinstance(first, Independent) and isinstance(first.base_dist, TorchNormal):
        normal = TorchNormal(stack_states("mean"), stack_states("stddev"), validate_args=False)
        return Independent(normal, first.mean.dim(), validate_args=False)
    from pyro.distributions import Delta

    if isinstance(first, Delta):
        return Delta(stack_states("v"), event_dim=first.v.dim())
    names = ", ".join(model.ground.name(choice) for choice in free)
    raise BNetError(
        model.ground.name(node),
        expected=f"{names} settled (do or observe)",
        actual="open choices",
        allowed=f"a batch is made of categoricals, deltas and normals, not of {type(first).__name__}",
    )


def conditional_attention(model: GroundModel, spec: NodeSpec, evidence: Mapping[int, Tensor]) -> Tensor:
    """`P(j | i)` of a family that reads words, which depend on the same choices: `[*states, *plates, word, word]`."""
    evidence = get_fixed(model, evidence)
    base, shape = int(model.ground.offsets[spec.group.index]), model.ground.shapes[spec.group.index]
    given = next(given for given in spec.parents if WORD in given.over or dict(given.pick).get(WORD) is not None)
    width = model.ground.word_counts[model.network.specs[given.index].group.word_stack or ""]
    rows = []
    for offset in range(len(model.ground.select_nodes(spec.group))):
        node = base + offset
        free = find_open_choices(model, attention_parents(model, node), evidence)
        table = []
        for run in enumerate_runs(model, free, evidence):
            reading = run.attention(node)
            if reading is None:
                raise BNetError(spec.group.name, expected="attention P(j | i)", actual=spec.tpm.no_attention_reason())
            row = torch.zeros(width, dtype=reading[1].dtype)
            row[reading[0]] = reading[1]
            table.append(row)
        rows.append(torch.stack(table).reshape((*(model.count_states(choice) for choice in free), width)))
    states = max((row.shape[:-1] for row in rows), key=len)
    stacked = torch.stack([row.expand(*states, width) for row in rows], -2)
    return stacked.reshape((*stacked.shape[:-2], *shape, width))


def merge_words(attention: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """`P(j | i)` over groups of words: summed over the tokens that are read, averaged over those that read."""
    read = torch.stack([attention[..., list(group)].sum(-1) for group in groups], -1)
    return torch.stack([read[..., list(group), :].mean(-2) for group in groups], -2)


def split_choices(
    model: GroundModel, ancestor_choices: Mapping[int, Sequence[int]]
) -> tuple[list[int], list[int]] | None:
    """The choices that decide all of some nodes, and the families of which each node has that of its own word beside
    them; None where nodes depend on other choices. `ancestor_choices` has the choices that decide each node."""
    shared = set.intersection(*map(set, ancestor_choices.values())) if ancestor_choices else set()
    families = set()
    for node, free in ancestor_choices.items():
        word = model.ground.unravel_index(node)[1][-1:]
        own = [model.ground.unravel_index(choice) for choice in free if choice not in shared]
        if any(index[-1:] != word for _, index in own):
            return None
        families.add(tuple(family.index for family, _ in own))
    apart = families.pop() if families else ()
    return None if families or len(set(apart)) < len(apart) else (sorted(shared), sorted(apart))


def find_attention_spec(model: GroundModel, slice_: int, role: str | None) -> NodeSpec:
    """The member that reads words in a slice: the one whose TPM is an attention."""
    depth = get_depth(model.network)
    if check_int("slice", slice_, minimum=0) >= depth:
        raise BNetError("slice", expected=f"a slice from 0 to {depth - 1}", actual=slice_)
    found = [m for m in model.network.specs if m.group.step == slice_ and m.has_word_attention]
    names = {member.group.stem: member for member in found}
    if role is not None:
        if not isinstance(role, str) or role not in names:
            raise unknown_name_error("role that reads", role, names)
        return names[role]
    if len(found) > 1:
        raise BNetError("role", expected="which of them reads (role=)", actual="none", allowed=", ".join(names))
    if not found:
        here = [m for m in model.network.specs if m.group.step == slice_]
        collect = [m.tpm.no_attention_reason() for m in here if m.word_parents]
        got = "; ".join(dict.fromkeys(collect)) or ", ".join(sorted({type(m.tpm).__name__ for m in here}))
        raise BNetError(f"attention of slice {slice_}", expected="a TPM with P(j | i)", actual=got)
    return found[0]


def has_ancestor_choices(network: Network, groups: Collection[int]) -> bool:
    """True where a discrete family stands above some families."""
    return any(network.specs[index].tpm.kind == "discrete" for index in network.graph.ancestors(groups))


def find_state_group(network: Network, stack: str) -> NodeGroup | None:
    """The first state of a stack's words, if it has one without plates."""
    return next((each for each in network.graph.groups if each.stack == stack and network.is_word_state(each)), None)


def compute_read_mask(model: GroundModel, spec: NodeSpec) -> NDArray[np.bool_]:
    """`[word, word]`: whether an arrow lets word i of a member read word j, along any of its plates."""
    ground, family = model.ground, spec.group
    over = {given.index for given in spec.word_parents}
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


def expected_attention(
    model: GroundModel, node: int, evidence: Mapping[int, Tensor], budget: int = BUDGET
) -> tuple[list[int], Tensor] | None:
    """The words that a node reads and `P(j | i, evidence)`: its reading averaged over the posterior of the choices."""
    settled = get_fixed(model, evidence)
    free = find_open_choices(model, [*attention_parents(model, node), *evidence], settled, include_ancestors=True)
    words: list[int] = []
    found, logs = [], []
    for run in enumerate_runs(model, free, settled, budget):
        reading = run.attention(node)
        if reading is None:
            return None
        words = reading[0]
        found.append(reading[1].double())
        logs.append(log_joint(run, free, evidence))
    if evidence and max(logs) == -math.inf:
        log_evidence(model, evidence, budget=budget)
    share = torch.softmax(torch.tensor(logs, dtype=torch.float64), 0)
    return words, torch.einsum("s,sm->m", share, torch.stack(found))


def find_single_parents(model: GroundModel, node: int) -> set[int]:
    """The parents of a node that fill a slot of a single parent (its query, its residual)."""
    family, index = model.ground.unravel_index(node)
    member = model.network.specs[family.index]
    single = [given for given in member.parents if not given.over and not given.pick]
    return {parent for given in single for parent in find_slot_parents(model, member, index, given, {})[1]}


def parse_slices(slices: object, network: Network) -> list[int]:
    """Slices of a net, from one or several."""
    return parse_indices("slices", slices, get_depth(network))


def parse_attention_slices(network: Network, slices: object, role: str | None) -> tuple[str, list[int]]:
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
    depth = get_depth(network, stack)
    if stack not in graph.word_stacks:
        got = f"the stack {stack!r}, without words" if stack else "a net without words"
        raise BNetError("slice", expected="slices in which words read words", actual=got)
    if isinstance(slices, str):
        check_choice("slices", slices, ("all",))
        return stack, list(range(depth))
    numbers = sorted({check_int("slice", item, minimum=0) for item in to_list(slices)})
    if not numbers or numbers[-1] >= depth:
        raise BNetError("slices", expected=f"slices from 0 to {depth - 1}", actual=slices)
    return stack, numbers


def get_depth(network: Network, stack: str | None = None) -> int:
    """The number of slices of a stack, by default of the deepest; refused where a net has none."""
    depth = network.graph.depth if stack is None else network.graph.slices.get(stack, 0)
    if not depth:
        got = f"none in the stack {stack!r}" if stack else "a net without slices"
        raise BNetError("slice", expected="a net with slices", actual=got)
    return depth


def parse_words(tokens: Sequence[str], words: object) -> list[int]:
    """Indices of words, from indices or the words themselves (every place where a word stands)."""
    asked = to_list(words)
    found: list[int] = []
    for item in asked:
        if isinstance(item, str):
            places = [k for k, token in enumerate(tokens) if token == item]
            if not places:
                raise unknown_name_error("word", item, tokens)
            found.extend(places)
        else:
            found.extend(parse_indices("words", item, len(tokens)))
    return sorted(set(found))


def to_list(value: object) -> list[object]:
    """What was asked for as a list: one thing, or a collection of them."""
    if isinstance(value, Tensor | np.ndarray):
        with suppress(RuntimeError):  # a tensor without a plain table of numbers is refused as it is
            value = value.tolist()
    return list(value) if isinstance(value, Collection) and not isinstance(value, str) else [value]


def parse_indices(subject: str, indices: object, count: int) -> list[int]:
    """Indices below `count`, from one or several."""
    found = []
    for item in to_list(indices):
        number = check_int(subject, item, minimum=0)
        if number >= count:
            raise BNetError(subject, expected=f"numbers from 0 to {count - 1}", actual=number)
        found.append(number)
    if not found:
        raise BNetError(subject, expected=f"numbers from 0 to {count - 1}, at least one", actual="none")
    return sorted(set(found))

"""First pass, network to plan: the families that what is wanted needs, in order, and the choices to enumerate.

Within the plan some matrix products are made as one. Maps of one vector are made *together*:
`[q k v] = [W_q W_k W_v] x`. Maps around an attention are *folded* into it where that costs less:
`q_i . k_j = x_i . (W_q^T W_k) x_j`, and `sum_j P(j | i) W_v x_j = W_v sum_j P(j | i) x_j`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bnet_transformer._core.naming import WORD
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import UnsupportedError
from bnet_transformer.tpm import Affine, Attention, Dot, Linear

ValueDims = Mapping[int, frozenset[object]]
CROSS_WORD_HINT = (  # what to do where choices of different words meet
    "do= for that choice; net.sentence(...), which asks about one sentence within a budget"
)


@dataclass(frozen=True)
class Fold:
    """An attention that reads x instead of q, k (and v): how it sees x, and the weights that are applied to it."""

    spec: NodeSpec
    W_q: ParentSpec
    W_k: ParentSpec
    W_v: ParentSpec | None
    has_residual: bool
    absorbed: frozenset[int]


def find_folds(
    network: Network,
    components: Sequence[Sequence[int]],
    enumerated: set[int],
    retained: set[int],
    known: Collection[int],
) -> dict[int, Fold]:
    """The attentions of a plan that are cheaper when the maps around them are folded in; `retained` are wanted."""
    order = [index for component in components for index in component]
    value_dims = _find_value_dims(network, order, enumerated)
    num_readers = dict.fromkeys(order, 0)
    for index in order:
        for parent in {edge.parent for edge in network.graph.in_edges[index]} & num_readers.keys():
            num_readers[parent] += 1
    foldable = {index for index in order if num_readers[index] == 1 and index not in {*retained, *known, *enumerated}}
    folds: dict[int, Fold] = {}
    for (index,) in (component for component in components if len(component) == 1):
        spec = network.specs[index]
        if isinstance(spec.tpm, Attention) and index not in known:
            fold = _fold_attention(network, spec, value_dims, foldable)
            if fold is not None:
                folds[index] = fold
    return folds


def find_fused_maps(network: Network, order: Sequence[int], excluded: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Maps of one vector by weights that are all there when the first of them is due: first -> all."""
    position = {index: k for k, index in enumerate(order)}
    by_input: dict[tuple[object, ...], list[int]] = {}
    for index in order:
        spec = network.specs[index]
        if index not in excluded and isinstance(spec.tpm, Linear | Affine) and _is_map(spec):
            x = spec.parents[1]
            by_input.setdefault((x.index, spec.group.plates, spec.group.word_stack, type(spec.tpm)), []).append(index)
    fused = {}
    for indices in by_input.values():
        available = [i for i in indices if position.get(network.specs[i].parents[0].index, -1) < position[indices[0]]]
        if len(available) > 1:
            fused[available[0]] = tuple(available)
    return fused


def _fold_attention(network: Network, spec: NodeSpec, value_dims: ValueDims, foldable: set[int]) -> Fold | None:
    tpm = spec.tpm
    assert isinstance(tpm, Attention)
    if not isinstance(tpm.score, Dot) or tpm.score.rotary is not None or tpm.over != "keys":
        return None
    if any(parent.pick for parent in spec.parents) or any(parent.over != (WORD,) for parent in spec.parents[1:3]):
        return None
    q, k, v = (network.specs[parent.index] for parent in spec.parents[:3])
    if not all(m.group.index in foldable and isinstance(m.tpm, Linear) and _is_map(m) for m in (q, k)):
        return None
    (W_q, x_q), (W_k, x_k) = q.parents, k.parents
    of_words = {m.group.index for m in network.specs if m.group.word_stack is not None}
    if W_k.index in of_words:  # weights of the word that is read, which only a map before the attention can take
        return None
    (key,), (d_q,), (d_k,) = q.shape, q.tpm_parents[1].shape, k.tpm_parents[1].shape
    num_joint, num_q, num_k = (_count_entries(network, value_dims, *pair) for pair in ((W_q, W_k), (W_q,), (W_k,)))
    if d_k > key or num_joint * d_q * d_k > (num_q * d_q + num_k * d_k) * key:
        return None
    parents = [replace(x_q, slot="q"), replace(spec.parents[1], index=x_k.index), *spec.parents[2:]]
    absorbed, W_v = {q.group.index, k.group.index}, None
    if v.group.index in foldable and isinstance(v.tpm, Linear) and _is_map(v):
        W, x_v = v.parents
        shared = not value_dims.get(x_v.index, frozenset()) & value_dims[W.index]
        within = value_dims[W_q.index] | value_dims[W_k.index] <= value_dims[W.index]
        if shared and within and W.index not in of_words and v.tpm_parents[1].shape <= v.shape:
            W_v = W
            parents[2] = replace(spec.parents[2], index=x_v.index)
            absorbed.add(v.group.index)
    scored = replace(tpm, score=Dot(tpm.score.get_scale(key)), residual=False)
    return Fold(replace(spec, tpm=scored, parents=tuple(parents)), W_q, W_k, W_v, tpm.residual, frozenset(absorbed))


def _is_map(spec: NodeSpec) -> bool:
    """True for `W x` of a word's own vector, W and x read as they are."""
    if len(spec.parents) != 2:
        return False
    W, x = spec.parents
    is_plain = not (W.pick or x.pick or W.over or x.over)
    return is_plain and W.reach.kind == x.reach.kind == "same" and spec.group.word_stack is not None


def _find_value_dims(network: Network, order: Sequence[int], enumerated: set[int]) -> ValueDims:
    """The dims besides batch and word along which each value spreads: plates, and enumerated families."""
    value_dims: dict[int, frozenset[object]] = {}
    for index in order:
        group = network.specs[index].group
        parent_dims = (value_dims.get(edge.parent, frozenset()) for edge in network.graph.in_edges[index])
        inner = {index} if index in enumerated else {d for dims in parent_dims for d in dims if isinstance(d, int)}
        value_dims[index] = frozenset({*group.plates, *inner})
    return value_dims


def _count_entries(network: Network, value_dims: ValueDims, *weights: ParentSpec) -> float:
    """How many entries the dims have along which some weights spread."""
    dims = {dim for W in weights for dim in value_dims.get(W.index, frozenset())}
    state_counts = [network.specs[dim].tpm.states or math.inf for dim in dims if isinstance(dim, int)]
    return math.prod([network.graph.plate_sizes[dim] for dim in dims if isinstance(dim, str)]) * math.prod(state_counts)


@dataclass(frozen=True)
class Plan:
    """What is computed: groups of families in order (several in one group read each other word after word), the
    families that nothing reads after each group, the discrete families whose states lead as enumerated dims, what
    is wanted, the attentions into which their maps are folded, the maps that are made together, the families that
    are left to whoever asked, who finds all that they read, and those that are computed word after word."""

    components: tuple[tuple[int, ...], ...]
    released: tuple[tuple[int, ...], ...]
    enumerated: tuple[int, ...]
    outputs: tuple[int, ...]
    folds: Mapping[int, Fold] = field(default_factory=dict)
    fused_maps: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    deferred: frozenset[int] = frozenset()
    recurrent: frozenset[int] = frozenset()  # of the graph, where torch.compile cannot trace a cached property


def network_to_plan(
    network: Network,
    outputs: Sequence[str],
    known: Collection[int] = (),
    enumerate_too: Collection[int] = (),
    *,
    fold: bool = False,
    deferred: frozenset[int] = frozenset(),
    patched: frozenset[int] = frozenset(),
    transient: frozenset[int] = frozenset(),
    word_counts: Mapping[str, int] | None = None,
) -> Plan:
    """The plan for some families; `known` are those whose value comes from outside (`do`, evidence).

    `fold` where there are so many words that a product of two weights costs less than a map of all words; the families
    `deferred` are not computed, but all that they read is; the deterministic families `transient` are computed, and not kept.
    Some nodes of the families `patched` are set. `build_length_inputs` of each stack are for the messages.
    """
    output_ids = tuple(network.graph.get_group(name).index for name in outputs)
    needs = find_requirements(
        network, output_ids, known, enumerate_too, patched=patched, transient=transient, word_counts=word_counts
    )
    if needs.fault is not None:
        raise needs.fault
    needed, enumerated = set(needs.required), set(needs.enumerated)
    components = network.filter_components(needed)
    random_outputs = [index for index in output_ids if network.specs[index].tpm.is_random and index not in known]
    retained = {*output_ids, *(edge.parent for index in random_outputs for edge in network.graph.in_edges[index])}
    folds = find_folds(network, components, enumerated, retained | patched, known) if fold else {}
    components = network.filter_components(
        needed - {index for attention in folds.values() for index in attention.absorbed}
    )
    retained |= {parent for index in deferred for parent in _get_effective_parents(network, index, folds)}
    fused_maps = find_fused_maps(
        network, [component[0] for component in components if len(component) == 1], {*known, *folds}
    )
    released = _find_released(network, components, retained, folds)
    return Plan(
        components,
        released,
        tuple(sorted(enumerated)),
        output_ids,
        folds,
        fused_maps,
        deferred,
        network.graph.recurrent,
    )


@dataclass(frozen=True)
class Requirements:
    """The families that a question needs, the choices among them that are enumerated, and why it cannot be planned."""

    required: frozenset[int]
    enumerated: frozenset[int]
    fault: UnsupportedError | None


def find_requirements(
    network: Network,
    outputs: Sequence[int],
    known: Collection[int],
    enumerate_too: Collection[int] = (),
    *,
    patched: frozenset[int] = frozenset(),
    transient: frozenset[int] = frozenset(),
    word_counts: Mapping[str, int] | None = None,
) -> Requirements:
    """What `network_to_plan` plans for, or the fault for which it refuses, which is not raised here.

    Args:
        network: The net.
        outputs: Families whose values, or whose parents' values, are asked for.
        known: Families whose value comes from outside (inputs, `do`, evidence).
        enumerate_too: Choices that are enumerated though no value depends on them.
        patched: Families of which some nodes are set.
        transient: Deterministic families that are computed and not kept.
        word_counts: How many words each stack has, for the message alone.
    """
    needed: set[int] = set(enumerate_too)
    enumerated: set[int] = set(enumerate_too)
    fault: UnsupportedError | None = None
    stack = [parent for index in outputs for parent in _get_required_parents(network, index, known, is_output=True)]
    stack += [index for index in (*outputs, *transient) if not network.specs[index].tpm.is_random or index in known]
    while stack:
        index = stack.pop()
        if index in needed:
            continue
        needed.add(index)
        spec = network.specs[index]
        if spec.tpm.kind == "discrete" and index not in known:
            enumerated.add(index)
        elif spec.tpm.kind == "continuous" and index not in known:
            fault = fault or unset_parent_error(spec.group.name)
        else:
            stack.extend(_get_required_parents(network, index, known, is_output=False))
    for index in sorted(enumerated):
        computed = (needed - enumerated) | set(outputs)
        fault = fault or _find_cross_word_error(network, index, computed, enumerated, word_counts)
    fault = fault or _find_patch_error(network, needed & patched, enumerated)
    return Requirements(frozenset(needed), frozenset(enumerated), fault)


def unset_parent_error(name: str) -> UnsupportedError:
    """The fault of a family that is random and real, and has no value."""
    expected = "a value (do= or evidence) for all of it, for it is random and real, and others read it"
    return UnsupportedError(name, expected=expected, actual="none")


def _find_patch_error(
    network: Network, patched: Collection[int], enumerated: Collection[int]
) -> UnsupportedError | None:
    """Some nodes of a family may be set where its values are computed, or enumerated, for all words at once; word after
    word where it is neither random nor an attention."""
    for index in sorted(patched):
        spec, recurrent = network.specs[index], index in network.graph.recurrent
        if (recurrent and isinstance(spec.tpm, Attention)) or (
            spec.tpm.is_random and (recurrent or index not in enumerated)
        ):
            return UnsupportedError(
                spec.group.name,
                expected="all nodes of a family set, or none, where they are random or attend word after word",
                actual="some of them",
            )
    return None


def _get_effective_parents(network: Network, index: int, folds: Mapping[int, Fold]) -> set[int]:
    """What the value of a family is made of, also through the maps that are folded into it."""
    indices = {index, *(folds[index].absorbed if index in folds else ())}
    return {edge.parent for i in indices for edge in network.graph.in_edges[i]}


def _find_released(
    network: Network, components: tuple[tuple[int, ...], ...], retained: set[int], folds: Mapping[int, Fold]
) -> tuple[tuple[int, ...], ...]:
    """After each group, the families that are read no more."""
    last: dict[int, int] = {}
    for k, component in enumerate(components):
        for index in component:
            last.setdefault(index, k)
            last |= dict.fromkeys(_get_effective_parents(network, index, folds), k)
    return tuple(
        tuple(i for i, step in last.items() if step == k and i not in retained) for k in range(len(components))
    )


def _get_required_parents(network: Network, index: int, known: Collection[int], *, is_output: bool) -> list[int]:
    """The families whose values one family needs: none where its value comes from outside or is enumerated."""
    spec = network.specs[index]
    if index in known or spec.tpm.kind == "input" or (spec.tpm.is_random and not is_output):
        return []
    return [edge.parent for edge in network.graph.in_edges[index]]


def _find_cross_word_error(
    network: Network, index: int, computed: set[int], enumerated: set[int], word_counts: Mapping[str, int] | None
) -> UnsupportedError | None:
    """A choice for each word may be enumerated in parallel only while no word's value depends on another's choice."""
    reader = _find_cross_word_reader(network, index, computed, enumerated)
    if reader is None:
        return None
    count = "" if word_counts is None else f": {_describe_joint_states(network, computed, enumerated, word_counts)}"
    return UnsupportedError(
        network.specs[index].group.name,
        expected="a choice whose words do not meet, to be enumerated for all words at once",
        actual=f"{network.specs[reader].group.name}, which reads other words' choices{count}",
        allowed=CROSS_WORD_HINT,
    )


def _find_cross_word_reader(network: Network, index: int, computed: set[int], enumerated: set[int]) -> int | None:
    """The first computed family that reads a choice of other words; None where none does."""
    reached = {index} if network.specs[index].group.word_stack is not None else set()
    before: set[int] = set()
    while reached - before:  # once more where families read each other word after word: no order has parents first
        before = set(reached)
        for child in sorted(computed):
            parents = network.specs[child].parents
            picks = {selector for parent in parents for _, selector in parent.pick}
            reads = [parent for parent in parents if parent.index in reached]
            if not all(parent.reach.is_positionwise for parent in reads):
                return child
            if child not in enumerated and (reads or picks & reached):
                reached.add(child)
    return None


def _describe_joint_states(
    network: Network, computed: set[int], enumerated: set[int], word_counts: Mapping[str, int]
) -> str:
    """How many joint states one value hangs on: all words' choices where they meet, else one word's."""
    total = 1
    for index in enumerated:
        spec = network.specs[index]
        nodes = math.prod(network.graph.plate_sizes[plate] for plate in spec.group.plates)
        if _find_cross_word_reader(network, index, computed, enumerated) is not None:
            nodes *= word_counts[spec.group.word_stack or ""]
        total *= network.count_states(index, word_counts) ** nodes
    number = f"{total}" if total < 10**12 else f"about 10^{math.log10(total):.0f}"
    lengths = ", ".join(f"{count} words" for count in word_counts.values())
    return f"up to {number} joint states ({lengths})"

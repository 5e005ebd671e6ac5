"""First pass, network to plan: the node groups that the outputs need, in order, and the choices to enumerate.

The plan also merges matrix products. Linear maps of one vector are *fused*: `[q k v] = [W_q W_k W_v] x`. Linear maps
before and after an attention are *folded* into it if that costs less:
`q_i . k_j = x_i . (W_q^T W_k) x_j`, and `sum_j P(j | i) W_v x_j = W_v sum_j P(j | i) x_j`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bnet_transformer._core.naming import WORD
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import UnsupportedError, format_count
from bnet_transformer.tpm import Affine, Attention, Dot, Linear, Weight

ValueDims = Mapping[int, frozenset[object]]
CROSS_WORD_HINT = (  # of the error for a value that depends on the choices of several words
    "Set or observe this choice, or use net.sentence(...), which sums over joint states up to a budget"
)


class StructureError(UnsupportedError):
    """The structure of the net, the evidence or the interventions rules a batched computation out.

    Args:
        message: What is not possible, and why.
        node: The node or the node group that is the reason.
        reason: The reason as a clause, by default the message.
        hint: What to do instead, as a sentence without its full stop.
        remedy: What would make the computation possible, as an instruction.
    """

    def __init__(
        self,
        message: str,
        *,
        node: str = "",
        reason: str | None = None,
        hint: str | None = None,
        remedy: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(message, hint=hint, **options)
        self.node = node
        self.reason = reason or message
        self.remedy = remedy

    @property
    def parts(self) -> dict[str, Any]:
        return super().parts | {"node": self.node, "reason": self.reason, "remedy": self.remedy}


@dataclass(frozen=True)
class Fold:
    """An attention that reads x instead of q, k (and v): its node with x as parents, and the weights to apply to x."""

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
    """The attentions of a plan that cost less with folded maps; the `retained` values must be computed."""
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
    """Linear maps of one vector that can be one product: a mapping from the first map to all of them.

    All their weights must be computed before the first map.
    """
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
    """The fold of an attention if it is possible and costs less; else None."""
    tpm = spec.tpm
    assert isinstance(tpm, Attention)
    # Associativity: (W_q x_i) . (W_k x_j) = x_i . (W_q^T W_k x_j). A rotation between W and x depends on the positions,
    # so rotary scores cannot be folded. Mixing is linear: sum_j P(j | i) W_v x_j = W_v sum_j P(j | i) x_j, as long as
    # W_v does not depend on the word j.
    if not isinstance(tpm.score, Dot) or tpm.score.rotary is not None or tpm.over != "keys":
        return None
    if any(parent.pick for parent in spec.parents) or any(parent.over != (WORD,) for parent in spec.parents[1:3]):
        return None
    q, k, v = (network.specs[parent.index] for parent in spec.parents[:3])
    if not all(m.group.index in foldable and isinstance(m.tpm, Linear) and _is_map(m) for m in (q, k)):
        return None
    (W_q, x_q), (W_k, x_k) = q.parents, k.parents
    of_words = {m.group.index for m in network.specs if m.group.word_stack is not None}
    if W_k.index in of_words:  # a weight that differs between the words j must be applied before the attention
        return None
    # The cost for each word: the joint weight has d_q d_k entries, W_q and W_k have (d_q + d_k) key.
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
    """True for `W x` where W and x are read at the same word, without selector or collection."""
    if len(spec.parents) != 2:
        return False
    W, x = spec.parents
    is_plain = not (W.pick or x.pick or W.over or x.over)
    return is_plain and W.reach.kind == x.reach.kind == "same" and spec.group.word_stack is not None


def _find_value_dims(network: Network, order: Sequence[int], enumerated: set[int]) -> ValueDims:
    """The dims, in addition to batch and word, along which each value varies: plates and enumerated node groups."""
    value_dims: dict[int, frozenset[object]] = {}
    for index in order:
        group = network.specs[index].group
        parent_dims = (value_dims.get(edge.parent, frozenset()) for edge in network.graph.in_edges[index])
        inner = {index} if index in enumerated else {d for dims in parent_dims for d in dims if isinstance(d, int)}
        value_dims[index] = frozenset({*group.plates, *inner})
    return value_dims


def _count_entries(network: Network, value_dims: ValueDims, *weights: ParentSpec) -> float:
    """The number of entries of the dims along which the weights vary."""
    dims = {dim for W in weights for dim in value_dims.get(W.index, frozenset())}
    state_counts = [network.specs[dim].tpm.states or math.inf for dim in dims if isinstance(dim, int)]
    return math.prod([network.graph.plate_sizes[dim] for dim in dims if isinstance(dim, str)]) * math.prod(state_counts)


@dataclass(frozen=True)
class ExecutionPlan:
    """The computations of one run. Numbers are indices of node groups.

    Args:
        components: Strongly connected components in topological order; the groups of one component read each other
            word by word.
        released: For each component, the groups that no later component reads: their values are dropped.
        enumerated: Discrete groups, each of which has a leading dim of its states.
        outputs: The requested groups.
        neighbours: Enumerated groups with a second dim, of the states at the neighbouring word.
        backward: Those of `neighbours` for which this is the word after.
        folds: Attentions into which their linear maps are folded.
        fused_maps: A mapping from the first of several linear maps of one vector to all of them.
        deferred: Groups that the caller computes; their parents are computed here.
        recurrent: Groups that are computed word by word.
    """

    components: tuple[tuple[int, ...], ...]
    released: tuple[tuple[int, ...], ...]
    enumerated: tuple[int, ...]
    outputs: tuple[int, ...]
    neighbours: tuple[int, ...] = ()
    backward: frozenset[int] = frozenset()
    folds: Mapping[int, Fold] = field(default_factory=dict)
    fused_maps: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    deferred: frozenset[int] = frozenset()
    recurrent: frozenset[int] = frozenset()  # copied: torch.compile cannot trace the graph's cached property


class PlanRequest(NamedTuple):
    """All except the net on which a plan depends: the structure of an `ExecutionRequest`, without its tensors.

    Args:
        outputs: The requested groups; for a random group, its parents are computed.
        known: Groups whose values are given (`do`, evidence); those of inputs are always given.
        enumerate_too: Choices to enumerate even if no value depends on them.
        patched: Groups of which some nodes are set.
        transient: Deterministic groups that are computed and then dropped.
        deferred: Groups that are not computed, although their parents are.
        has_chains: Whether values may depend on a choice at two neighbouring words; see `ExecutionRequest`.
        fold: Whether to fold maps into attentions, which is faster if there are more words than features.
    """

    outputs: tuple[int, ...]
    known: frozenset[int] = frozenset()
    enumerate_too: frozenset[int] = frozenset()
    patched: frozenset[int] = frozenset()
    transient: frozenset[int] = frozenset()
    deferred: frozenset[int] = frozenset()
    has_chains: bool = False
    fold: bool = False


def network_to_plan(
    network: Network,
    request: PlanRequest,
    find_needs: Callable[[PlanRequest, Mapping[str, int] | None], Requirements],
    word_counts: Mapping[str, int] | None = None,
) -> ExecutionPlan:
    """Plan the computation of some node groups.

    Args:
        network: The net.
        request: The groups to compute, and those with given values.
        find_needs: Returns the cached requirements, which do not depend on deferred groups and folds.
        word_counts: The number of words of each stack, for the error message only.

    Raises:
        UnsupportedError: One batched pass cannot compute them.
    """
    outputs, known, patched, deferred = request.outputs, request.known, request.patched, request.deferred
    needs = find_needs(request._replace(deferred=frozenset(), fold=False), word_counts)
    if needs.fault is not None:  # the message of a cached one may contain the number of other words
        raise find_requirements(network, request, word_counts).fault or needs.fault
    needed, enumerated = set(needs.required), set(needs.enumerated)
    components = network.filter_components(needed)
    random_outputs = [index for index in outputs if network.specs[index].tpm.is_random and index not in known]
    retained = {*outputs, *(edge.parent for index in random_outputs for edge in network.graph.in_edges[index])}
    folds = find_folds(network, components, enumerated, retained | patched, known) if request.fold else {}
    components = network.filter_components(needed.difference(*(attention.absorbed for attention in folds.values())))
    components, recurrent = _split_components(network, components, enumerated | set(known))
    # Weights are views of their parameters. Views of all of them, one after another, are created from code that is in
    # the cache of the processor; each product in between would displace it.
    weights = [component for component in components if isinstance(network.specs[component[0]].tpm, Weight)]
    later = [component for component in components if not isinstance(network.specs[component[0]].tpm, Weight)]
    components = (*weights, *later)
    retained |= {parent for index in deferred for parent in _get_effective_parents(network, index, folds)}
    single = [component[0] for component in components if len(component) == 1]
    fused_maps = find_fused_maps(network, single, {*known, *folds})
    released = _find_released(network, components, retained, folds)
    return ExecutionPlan(
        components,
        released,
        tuple(sorted(enumerated)),
        outputs,
        tuple(sorted(needs.word_offsets)),
        frozenset(index for index, offset in needs.word_offsets.items() if offset > 0),
        folds,
        fused_maps,
        deferred,
        recurrent,
    )


def _split_components(
    network: Network, components: Sequence[tuple[int, ...]], closed: Collection[int]
) -> tuple[tuple[tuple[int, ...], ...], frozenset[int]]:
    """Split the components that are not recurrent once the values of their choices are known or enumerated.

    An example is a chain of choices that depend on a function of the choice before.
    """
    split: list[tuple[int, ...]] = []  # torch.compile cannot trace `list[...]()`
    recurrent: set[int] = set()
    for component in components:
        inner = set(component) - set(closed)
        reads = (parent for i in inner for parent in network.specs[i].parents if parent.index in inner)
        if len(component) > 1 and all(parent.reach.is_positionwise for parent in reads):
            split += [(index,) for index in component]  # in the order of computation within one word
        else:
            split.append(component)
            recurrent |= set(component) & network.graph.recurrent
    return tuple(split), frozenset(recurrent)


@dataclass(frozen=True)
class Requirements:
    """The groups to compute, the choices to enumerate among them, and the error if there is no plan.

    `word_offsets` has an entry for each choice on which values of the neighbouring word depend: -1 if word i depends on
    the choice of word i - 1, and 1 if it depends on that of word i + 1.
    """

    required: frozenset[int]
    enumerated: frozenset[int]
    fault: StructureError | None
    word_offsets: Mapping[int, int] = field(default_factory=dict)


def find_requirements(
    network: Network, request: PlanRequest, word_counts: Mapping[str, int] | None = None
) -> Requirements:
    """Find the groups that a plan must compute; an error is returned, not raised.

    Args:
        network: The net.
        request: The groups to compute, and those with given values.
        word_counts: The number of words of each stack, for the error message only.
    """
    outputs, known = request.outputs, request.known
    needed: set[int] = set(request.enumerate_too)
    enumerated: set[int] = set(request.enumerate_too)
    fault: StructureError | None = None
    in_edges = network.graph.in_edges
    stack = [edge.parent for index in outputs if index not in known for edge in in_edges[index]]
    stack += [
        index for index in (*outputs, *request.transient) if not network.specs[index].tpm.is_random or index in known
    ]
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
        elif index not in known:
            stack.extend(edge.parent for edge in in_edges[index])
    word_offsets: dict[int, int] = {}
    for index in sorted(enumerated):
        computed = (needed - enumerated) | set(outputs)
        offset, reader = find_word_offset(network, index, computed, enumerated)
        if reader is not None and not (request.has_chains and offset):
            fault = fault or _cross_word_error(network, index, reader, computed, enumerated, word_counts)
        elif reader is not None:
            word_offsets[index] = offset
    for index in sorted(needed & request.patched):
        fault = fault or _find_patch_error(network, index, enumerated)
    return Requirements(frozenset(needed), frozenset(enumerated), fault, word_offsets)


def unset_parent_error(name: str) -> StructureError:
    """The error for a continuous random group that has children and no value."""
    return StructureError(
        f"{name} is random and continuous, other nodes depend on it, and it has no value",
        node=name,
        hint=f"Set or observe all nodes of {name}",
        remedy=f"set or observe all nodes of {name}",
    )


def _find_patch_error(network: Network, index: int, enumerated: Collection[int]) -> StructureError | None:
    """The error for a group of which some nodes are set, if a run cannot mix set and computed values.

    Set and computed values can be mixed if all words are computed or enumerated at once, and in a scan if the group is
    neither random nor an attention.
    """
    spec, recurrent = network.specs[index], index in network.graph.recurrent
    if not (
        (recurrent and isinstance(spec.tpm, Attention))
        or (spec.tpm.is_random and (recurrent or index not in enumerated))
    ):
        return None
    name, reason = spec.group.name, "random" if spec.tpm.is_random else "a recurrent attention"
    return StructureError(
        f"some nodes of {name} are set and others are not, which one pass cannot mix: {name} is {reason}",
        node=name,
        hint=f"Set all nodes of {name}, or use net.sentence(...)",
        remedy=f"set all nodes of {name}",
    )


def _get_effective_parents(network: Network, index: int, folds: Mapping[int, Fold]) -> set[int]:
    """The parents of a group, with those of the maps that are folded into it."""
    indices = {index, *(folds[index].absorbed if index in folds else ())}
    return {edge.parent for i in indices for edge in network.graph.in_edges[i]}


def _find_released(
    network: Network, components: tuple[tuple[int, ...], ...], retained: set[int], folds: Mapping[int, Fold]
) -> tuple[tuple[int, ...], ...]:
    """For each component, the groups that no later component reads."""
    last: dict[int, int] = {}
    for k, component in enumerate(components):
        for index in component:
            last.setdefault(index, k)
            last |= dict.fromkeys(_get_effective_parents(network, index, folds), k)
    return tuple(
        tuple(i for i, step in last.items() if step == k and i not in retained) for k in range(len(components))
    )


def _cross_word_error(
    network: Network,
    index: int,
    reader: int,
    computed: set[int],
    enumerated: set[int],
    word_counts: Mapping[str, int] | None,
) -> StructureError:
    """The error for a choice of each word that cannot be enumerated for all words in parallel.

    In parallel enumeration all words share one dim of states. This is exact only if each value depends on the choice of
    at most one word: otherwise the states of two words would have to vary independently.
    """
    name = network.specs[index].group.name
    count = "" if word_counts is None else f" ({_describe_joint_states(network, computed, enumerated, word_counts)})"
    source = "itself" if reader == index else name
    reason = f"{network.specs[reader].group.name} depends on {source} at several words{count}"
    return elimination_error(name, reason)


def elimination_error(name: str, reason: str) -> StructureError:
    """The error for a choice that a batched computation cannot enumerate."""
    return StructureError(
        f"cannot eliminate {name} exactly in a batch: {reason}",
        node=name,
        reason=reason,
        hint=CROSS_WORD_HINT,
        remedy=f"set or observe {name}",
    )


def find_word_offset(network: Network, index: int, computed: set[int], enumerated: set[int]) -> tuple[int, int | None]:
    """How far from its word a computed group depends on a choice.

    Args:
        network: The net.
        index: The choice.
        computed: The groups with computed values or distributions.
        enumerated: The enumerated choices; their values do not depend on other choices, only their distributions do.

    Returns:
        The offset, and the first group that depends on the choice at another word, or None. The offset is -1 if all
        values of word i depend on the choices of the words i - 1 and i only (a chain), 1 for i and i + 1, else 0; then
        the group is the one that rules a chain out.
    """
    offsets: dict[int, set[int]] = {index: {0}} if network.specs[index].group.word_stack is not None else {}
    steps, reader, used, is_changed = {"same": 0, "rest": 0, "before": -1, "after": 1}, None, {0}, bool(offsets)
    while is_changed:  # until a fixed point: a recurrent component has no order with all parents first
        is_changed = False
        for child in sorted(computed):
            reached = set[int]()
            for parent in network.specs[child].parents:
                reached |= {offset for _, selector in parent.pick for offset in offsets.get(selector, ())}
                values, step = offsets.get(parent.index, set()), steps.get(parent.reach.kind)
                # The value at a neighbouring word may not depend on a neighbour itself, because a choice has two dims.
                if values and (step is None or (step and values != {0})):
                    return 0, child
                reached |= {offset + (step or 0) for offset in values}
            reader = child if reader is None and not reached <= {0} else reader
            used |= reached
            if not (used <= {0, -1} or used <= {0, 1}):
                return 0, child
            if child not in enumerated and not reached <= offsets.get(child, set()):
                offsets[child] = offsets.get(child, set()) | reached
                is_changed = True
    return sum(used), reader


def _describe_joint_states(
    network: Network, computed: set[int], enumerated: set[int], word_counts: Mapping[str, int]
) -> str:
    """A text with the maximum number of joint states on which one value depends."""
    total = 1
    for index in enumerated:
        spec = network.specs[index]
        nodes = math.prod(network.graph.plate_sizes[plate] for plate in spec.group.plates)
        if find_word_offset(network, index, computed, enumerated)[1] is not None:
            nodes *= word_counts[spec.group.word_stack or ""]
        total *= network.count_states(index, word_counts) ** nodes
    lengths = ", ".join(f"{count} words" for count in word_counts.values())
    return f"up to {format_count(total)} joint states for {lengths}"

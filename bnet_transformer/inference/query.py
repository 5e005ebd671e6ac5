"""A query about the nodes of one sentence: its slices, words and nodes, and joint states of its choices as a batch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer._core.checks import check_choice, check_int, resolve_index
from bnet_transformer._core.tokens import as_labels
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.graph import NodeGroup
from bnet_transformer.reference import ATOL, BUDGET, GroundModel, is_close, locate_node

# --------------------------------------------------------------------------------------------------------------------
# Parse the slices, words and heads that users pass into indices and node groups.


def merge_words(attention: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """`P(j | i)` for groups of tokens: the sum over the tokens j of a group, the mean over the tokens i of a group."""
    read = torch.stack([attention[..., list(group)].sum(-1) for group in groups], -1)
    return torch.stack([read[..., list(group), :].mean(-2) for group in groups], -2)


def find_attention_spec(model: GroundModel, slice_: int, role: str | None) -> NodeSpec:
    """The node group with attention over words in a slice; a negative slice counts from the last of its stack."""
    by_stem = model.network.graph.by_stem
    stack = by_stem[role][0].stack if isinstance(role, str) and role in by_stem else None
    slice_ = resolve_index("slice", slice_, get_depth(model.network, stack))
    matches = [m for m in model.network.specs if m.group.step == slice_ and m.has_word_attention]
    names = {spec.group.stem: spec for spec in matches}
    if role is not None:
        if not isinstance(role, str) or role not in names:
            raise unknown_name_error("role with attention", role, names)
        return names[role]
    if len(matches) > 1:
        raise BNetError(f"slice {slice_} has several nodes with attention", hint=f"Pass role=: {', '.join(names)}")
    if not matches:
        in_slice = [m for m in model.network.specs if m.group.step == slice_]
        reasons = [m.tpm.no_attention_reason() for m in in_slice if m.word_parents]
        actual = "; ".join(dict.fromkeys(reasons)) or ", ".join(sorted({type(m.tpm).__name__ for m in in_slice}))
        raise BNetError(f"attention of slice {slice_}", expected="a node with attention P(j | i)", actual=actual)
    return matches[0]


def find_state_group(network: Network, stack: str) -> NodeGroup | None:
    """The hidden state of a stack that is the input of its first slice, if there is one without plates."""
    return next((g for g in network.graph.groups if g.stack == stack and network.is_word_state(g)), None)


def parse_slices(slices: object, network: Network) -> list[int]:
    """The indices of slices, from one index or several; negative ones count from the end of the deepest stack."""
    return parse_indices("slices", slices, get_depth(network), is_from_end=True)


def parse_attention_slices(network: Network, slices: object, role: str | None) -> tuple[str, list[int]]:
    """The stack and the indices of the slices with attention.

    Args:
        network: The net.
        slices: The index of a slice, several indices, or `"all"`. Negative ones count from the end of the stack.
        role: The role with attention, which determines the stack; by default the first stack.
    """
    graph = network.graph
    if role is not None and (not isinstance(role, str) or role not in graph.by_stem):
        raise unknown_name_error("role", role, graph.by_stem)
    stack = graph.by_stem[role][0].stack if role is not None else next(iter(graph.slices), "")
    depth = get_depth(network, stack)
    if stack not in graph.word_stacks:
        subject = f"the stack {stack!r} has no words" if stack else "the net has no words"
        raise BNetError(f"slices: {subject}, so that there is no attention")
    if isinstance(slices, str):
        check_choice("slices", slices, ("all",))
        return stack, list(range(depth))
    return stack, parse_indices("slices", slices, depth, is_from_end=True)


def get_depth(network: Network, stack: str | None = None) -> int:
    """The number of slices of a stack, by default of the deepest stack; an error if there are no slices."""
    depth = network.graph.depth if stack is None else network.graph.slices.get(stack, 0)
    if not depth:
        raise BNetError(f"slices: {f'the stack {stack!r}' if stack else 'the net'} has no slices")
    return depth


def parse_words(tokens: Sequence[str], words: object) -> list[int]:
    """The indices of words, from indices or from words (all their positions)."""
    items = to_list(words)
    indices: list[int] = []
    for item in items:
        if isinstance(item, str):
            positions = as_labels(tokens).find_all(item)
            if not positions:
                raise unknown_name_error("word", item, tokens)
            indices.extend(positions)
        else:
            indices.extend(parse_indices("words", item, len(tokens)))
    return sorted(set(indices))


def to_list(value: object) -> list[object]:
    """An item or a collection of items, as a list."""
    if isinstance(value, Tensor | np.ndarray):
        with suppress(RuntimeError):  # a tensor without a list form is an error later
            value = value.tolist()
    return list(value) if isinstance(value, Collection) and not isinstance(value, str) else [value]


def parse_indices(subject: str, indices: object, count: int, *, is_from_end: bool = False) -> list[int]:
    """Indices below `count`, from one index or several; with `is_from_end` negative ones count from the end."""
    result = []
    for item in to_list(indices):
        if is_from_end:
            result.append(resolve_index(subject, item, count))
            continue
        number = check_int(subject, item, minimum=0)
        if number >= count:
            raise BNetError(subject, expected=f"integers from 0 to {count - 1}", actual=number)
        result.append(number)
    if not result:
        raise BNetError(subject, expected=f"at least one integer from 0 to {count - 1}", actual="an empty list")
    return sorted(set(result))


MAX_DIMS = 64  # of a tensor of torch
MAX_CHUNK_ELEMENTS = 2**21  # elements of one tensor of a chunk


@dataclass(frozen=True)
class Query:
    """The requested nodes of a sentence, the evidence, and the limits of the computation.

    Args:
        module: The compiled net.
        model: The ground model after interventions: network, ground graph, inputs, set nodes.
        evidence: The observed state (an integer) or value `[*shape]` of each node, by ground id.
        nodes: The requested nodes, by ground id.
        budget: The maximum number of joint states of choices.
        atol: The tolerance of evidence on nodes that are functions of their parents.
    """

    module: CompiledModule
    model: GroundModel
    evidence: Mapping[int, Tensor] = field(default_factory=dict)
    nodes: tuple[int, ...] = ()
    budget: int = BUDGET
    atol: float = ATOL

    def format_nodes(self) -> str:
        """The names of the requested nodes."""
        return ", ".join(map(self.model.ground.name, self.nodes))

    @cached_property
    def fixed(self) -> dict[int, Tensor]:
        """The states and values of random nodes that evidence determines."""
        return reference.get_fixed(self.model, self.evidence)

    @cached_property
    def choices(self) -> list[int]:
        """The latent choices on which the nodes and the evidence depend, with their latent ancestors."""
        nodes = [*self.nodes, *self.evidence]
        return reference.find_open_choices(self.model, nodes, self.fixed, include_ancestors=True)

    @cached_property
    def varying_nodes(self) -> tuple[int, ...]:
        """The requested nodes with several states: their joint states are those of all requested nodes."""
        return tuple(node for node in self.nodes if self.model.count_states(node) > 1)

    def without_target_evidence(self) -> Query:
        """The query without evidence on its requested nodes."""
        evidence = {node: value for node, value in self.evidence.items() if node not in self.nodes}
        return self if len(evidence) == len(self.evidence) else replace(self, evidence=evidence)

    def without_input_evidence(self) -> Query:
        """The query without evidence on inputs; such evidence must equal the input.

        Raises:
            EvidenceError: The evidence differs from the input.
        """
        evidence = dict(self.evidence)
        for k, (node, observed) in enumerate(self.evidence.items()):
            spec, index = locate_node(self.model, node)
            if spec.tpm.kind == "input":
                value = self.model.inputs[spec.group.name][index]
                if not bool(is_close(value, observed, self.atol, value.dim())):
                    raise reference.impossible_evidence_error(self.model, self.evidence, k)
                del evidence[node]
        return self if len(evidence) == len(self.evidence) else replace(self, evidence=evidence)


def enumerate_joint_states(supports: Sequence[Sequence[int]]) -> Tensor:
    """All joint states, `[S, choice]`; the last choice varies fastest."""
    if not supports:
        return torch.zeros(1, 0, dtype=torch.long)
    # Not `meshgrid`, whose tensors have a dim for each choice: torch has at most 64 dims.
    rows = torch.arange(math.prod(map(len, supports)))
    indices = torch.unravel_index(rows, [*map(len, supports)])
    pairs = zip(supports, indices, strict=True)
    return torch.stack([torch.tensor(support, dtype=torch.long)[index] for support, index in pairs], -1)


def iter_chunks(model: GroundModel, count: int, groups: Iterable[int], summed: int = 1) -> Iterator[slice]:
    """Slices of a batch of `count` states, each small enough to be computed at once.

    Args:
        model: The ground model.
        count: The number of states.
        groups: The groups whose values or distributions are computed; their ancestors count as well.
        summed: The number of joint states of choices that are summed out in each state of the batch.
    """
    indices = set(groups)
    counts = (_count_elements(model, index) for index in model.network.graph.ancestral_set(indices))
    largest = max(counts, default=1)
    size = max(1, MAX_CHUNK_ELEMENTS // (largest * summed))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def enumerate_as_batch(
    model: GroundModel, nodes: Sequence[int], states: Tensor, groups: Iterable[int], summed: int = 1
) -> Iterator[dict[int, Tensor]]:
    """Joint states `[row, node]` of nodes as batches, each small enough to be computed at once: `[row]` by node."""
    for chunk in iter_chunks(model, len(states), groups, summed):
        yield dict(zip(nodes, states[chunk].unbind(1), strict=True))


def _count_elements(model: GroundModel, index: int) -> int:
    """The number of elements of a group for one state: its values, its logits, and the words that it attends to."""
    spec = model.network.specs[index]
    words = max(model.ground.word_counts.values(), default=1) if spec.word_parents else 0
    states = model.network.count_states(index, model.ground.word_counts) if spec.tpm.kind == "discrete" else 0
    return math.prod(model.ground.shapes[index]) * (max(math.prod(spec.shape), states) + words)


def with_sentence_scope(module: CompiledModule) -> CompiledModule:
    """The module with every choice in the scope of a sentence, for a batch of states of one sentence."""
    network = module.network
    if all(spec.scope == "sentence" for spec in network.specs):
        return module
    specs = tuple(replace(spec, scope="sentence") for spec in network.specs)
    return CompiledModule(replace(network, specs=specs)).eval()


def prune_interventions(model: GroundModel, nodes: Collection[int]) -> GroundModel:
    """The model with only the interventions above some nodes."""
    groups = {model.ground.group_of(node).index for node in nodes}
    ancestral = model.network.graph.ancestral_set(groups)
    do, rows = (
        {node: value for node, value in values.items() if model.ground.group_of(node).index in ancestral}
        for values in (model.do, model.attention_rows)
    )
    return replace(model, do=do, attention_rows=rows)


def prune_barren_choices(model: GroundModel, relevant: Collection[int]) -> GroundModel:
    """The model with barren choices at state 0: no relevant node descends from them, so that their states do not affect
    any probability (Shachter 1986).
    """
    groups = {model.ground.group_of(node).index for node in relevant}
    ancestral = model.network.graph.ancestral_set(groups)
    choices = [m.group for m in model.network.specs if m.tpm.kind == "discrete" and m.group.index in ancestral]
    nodes = [node for group in choices for node in model.ground.select_nodes(group).tolist()]
    zero = torch.zeros((), dtype=torch.long, device=model.network.device)
    return replace(model, do={**{node: zero for node in nodes if node not in relevant}, **model.do})

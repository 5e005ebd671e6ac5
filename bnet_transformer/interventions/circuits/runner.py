"""Runs of many circuits of the same examples at once, from the family where they differ down to the outcomes.

Along a kept arrow a node sees what its parent came to in this run, along any other what its parent is in the corrupt
one. Values lie as `[circuit, example, *plates, word, *shape]`. A table `[circuit, arrow]` says which arrows into a
family are kept; where a collection is read, each node may then see another one, `[..., i, j, *shape]`. That is made
only where it must be: not where all words see alike, nor by an attention, which mixes scores and weights instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.evaluate import evaluate_tpm
from bnet_transformer.compiler.execution_state import ExecutionState, TensorLayout
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import UnsupportedError
from bnet_transformer.graph import ancestors
from bnet_transformer.interventions.circuits.arrows import (
    BoolArray,
    CircuitArrows,
    IncomingArrows,
    get_node_slice,
    mark_needed_sources,
)
from bnet_transformer.interventions.sweeps.examples import Examples, Metric
from bnet_transformer.interventions.sweeps.sparse_update import (
    CELL_AXIS,
    get_layout_shape,
    get_parent_groups,
    summarize_distribution,
)
from bnet_transformer.tpm import Attention, Bilinear, Dot, EvalContext

GroupValues = dict[int, Tensor]


@dataclass(frozen=True)
class MaskedGroup:
    """A family some of whose arrows are not kept, or the one word of it that is needed.

    `slot_arrows` has for each entry of each slot, `[1 or N, *plates, word, *over]`, the number of the arrow along which it is
    seen; -1 where nothing that differs is.
    """

    spec: NodeSpec
    word: int | None
    slot_arrows: tuple[Tensor, ...]

    @classmethod
    def build(cls, state: ExecutionState, arrows: CircuitArrows, index: int, word: int | None) -> MaskedGroup:
        """Find the arrow of each entry of each slot, by letting nodes see numbers in place of values."""
        member, offsets = state.network.specs[index], arrows.ground.offsets
        into = arrows.incoming.get(index, IncomingArrows(*[np.zeros(0, dtype=np.int64)] * 3))
        scale = len(arrows.ground)
        number_of = pd.Index(into.targets * scale + into.sources).get_indexer  # -1 where there is no arrow
        own, slots = _number_nodes(state, member, int(offsets[index]), word)[0], []
        for given in member.parents:
            parent = state.network.specs[given.index]
            picks = {selector: state.values[selector] for _, selector in given.pick}
            numbers = _number_nodes(state, parent, int(offsets[given.index]), None) + 1  # 0 is nobody
            told = replace(state, values={**picks, given.index: numbers})
            _, (source,) = gather_parents(told, replace(member, parents=(given,)), word)
            target = own.reshape(*own.shape, *[1] * (source.dim() - 1 - own.dim()))
            ends = torch.where(source[0] > 0, target * scale + source[0] - 1, -1)
            slots.append(torch.from_numpy(number_of(ends.reshape(-1).numpy())).reshape(ends.shape))
        return cls(member, word, tuple(slots))

    @staticmethod
    def can_mix_attention(spec: NodeSpec) -> bool:
        """True for an attention over words, whose scores and weights can be mixed of two runs."""
        plain = isinstance(spec.tpm, Attention) and isinstance(spec.tpm.score, Dot | Bilinear)
        return plain and all(given.over in ((), (WORD,)) for given in spec.parents)

    def compute(self, state: ExecutionState, corrupt: ExecutionState, retained: Tensor) -> Tensor:
        """The value (of a random node log P, or its mean) in each circuit of a table `[circuit, arrow]`."""
        at, here = gather_parents(state, self.spec, self.word)
        _, there = gather_parents(corrupt, self.spec, self.word)
        random = self.spec.tpm.is_random
        if self.can_mix_attention(self.spec) and not bool(retained.all()):
            found = self._mix_attention(at, here, there, retained)
        else:
            parents = [
                _select_parent_values(*each, retained) for each in zip(here, there, self.slot_arrows, strict=True)
            ]
            found = (
                summarize_distribution(self.spec, at, parents)
                if random
                else evaluate_tpm(state, self.spec, at, parents)
            )
        own = found.shape[-1:] if self.spec.tpm.kind == "discrete" else self.spec.shape
        found = state.layout.pad_dims(found, len(own))
        if self.spec.group.index not in state.attention_rows:
            return found
        rows, which = state.attention_rows[self.spec.group.index]  # the nodes whose row of attention is set
        if self.word is not None:
            rows, which = (each.narrow(state.layout.word_dim, self.word, 1) for each in (rows, which))
        parents = [_select_parent_values(*each, retained) for each in zip(here, there, self.slot_arrows, strict=True)]
        assert isinstance(self.spec.tpm, Attention)
        return torch.where(which[..., None], self.spec.tpm.mix(rows, *parents), found)

    def _mix_attention(
        self, context: EvalContext, circuit_parents: list[Tensor], corrupt_parents: list[Tensor], retained: Tensor
    ) -> Tensor:
        """An attention whose scores, and then values, are mixed of both runs: no word needs keys of its own."""
        tpm = self.spec.tpm
        assert isinstance(tpm, Attention)
        names = [given.slot for given in self.spec.parents]
        read = next(k for k, name in enumerate(names[:2]) if name.endswith("."))
        parents = [
            ours if k in (read, 2) else _select_parent_values(ours, theirs, slot, retained)
            for k, (ours, theirs, slot) in enumerate(
                zip(circuit_parents, corrupt_parents, self.slot_arrows, strict=True)
            )
        ]
        scores, mask = tpm.scores(context, *parents)
        which = _build_mask(self.slot_arrows[read], retained)
        if which is not None:
            other = [*parents]
            other[read] = corrupt_parents[read]
            scores = torch.where(which, scores, tpm.scores(context, *other)[0])
        weights = tpm.normaliser.normalise(scores, mask)
        which = _build_mask(self.slot_arrows[2], retained)
        if which is None:
            return tpm.mix(weights, *parents)
        other = [*parents]
        other[2] = corrupt_parents[2]
        if tpm.residual:
            other[-1] = torch.zeros_like(other[-1])
        return tpm.mix(weights * which, *parents) + tpm.mix(weights * ~which, *other)


def _number_nodes(state: ExecutionState, spec: NodeSpec, offset: int, word: int | None) -> Tensor:
    """The ids of a family's nodes in the layout, `[1, 1, *plates, word]`."""
    shape = (1, 1, *get_layout_shape(state, spec))
    found = (torch.arange(int(np.prod(shape))) + offset).reshape(shape)
    return found if word is None else found.narrow(state.layout.word_dim, word, 1)


def _select_parent_values(
    circuit_value: Tensor, corrupt_value: Tensor, slot_arrows: Tensor, retained: Tensor
) -> Tensor:
    """What is seen in a slot: of this run where the arrow is kept, of the corrupt one where it is not."""
    which = _build_mask(slot_arrows, retained)
    if which is None:
        return circuit_value
    for d in range(1, which.dim()):  # not one collection for each word (or head) where they all see alike
        if which.shape[d] > 1 and circuit_value.shape[d] == corrupt_value.shape[d] == 1:
            which = _collapse_dim(which, slot_arrows >= 0, d)
    own = circuit_value.dim() - which.dim()
    return torch.where(which.reshape(*which.shape, *[1] * own), circuit_value, corrupt_value)


def _build_mask(slot_arrows: Tensor, retained: Tensor) -> Tensor | None:
    """Which entries of a slot are seen in this run, `[circuit, *entries]`; None where all that differ are."""
    if bool(retained.all()):
        return None
    which = retained[:, slot_arrows.clamp(min=0)] & (slot_arrows >= 0)
    return None if bool((which | ~(slot_arrows >= 0)).all()) else which


def _collapse_dim(mask: Tensor, has_arrow: Tensor, dim: int) -> Tensor:
    """The same with one entry along a dim, where all entries along it that are there agree."""
    some, none = (each.any(dim, keepdim=True) for each in (mask, ~mask & has_arrow))
    return mask if bool((some & none).any()) else some


@dataclass
class CircuitRunner:
    """The clean examples run by a circuit: at first by all arrows; `fix_arrows` says which of a family's arrows stay.

    Families are settled from the outcomes upwards, so whatever stands above the one that is tried has all its arrows,
    and its clean value. `circuit_values` has what the settled ones come to in the run of the present circuit, `needed` marks the
    nodes from which kept arrows lead to an outcome. A family of which one word alone is needed has that word alone.
    """

    clean: ExecutionState
    corrupt: ExecutionState
    arrows: CircuitArrows
    metric: Metric
    num_examples: int
    memory: int
    retained: dict[int, BoolArray] = field(init=False)
    needed: BoolArray = field(init=False)
    circuit_values: GroupValues = field(init=False)
    single_words: dict[int, int] = field(default_factory=dict)
    _masked_groups: dict[tuple[int, int | None], MaskedGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.retained = {family: np.ones(len(into), dtype=bool) for family, into in self.arrows.incoming.items()}
        self.needed = np.zeros(len(self.arrows.ground), dtype=bool)
        self.needed[list(self.arrows.outcome_nodes)] = True
        self.circuit_values = self._summarize_outcomes(self.clean)

    def fix_arrows(self, group: int, retained: BoolArray) -> None:
        """Keep these arrows into a family and no others."""
        self.retained[group] = retained
        way = self._find_affected_groups(group)
        if way:
            self.circuit_values |= self._compute_groups(way, retained[None], should_release=False)
        mark_needed_sources(self.arrows, self.retained, self.needed, group)

    def evaluate_candidates(self, group: int, masks: BoolArray) -> Tensor:
        """The metric with other arrows kept into a family, `[circuit, arrow]`: `[circuit, example]`."""
        way = self._find_affected_groups(group)
        size, found = max(1, self.memory // max(1, sum(map(self._estimate_bytes, way)))), []
        for start in range(0, len(masks), size):
            part = masks[start : start + size]
            found.append(self._evaluate_metric({**self.circuit_values, **self._compute_groups(way, part)}, len(part)))
        return torch.cat(found)

    def evaluate_run(self, state: ExecutionState) -> Tensor:
        """The metric of the clean or of the corrupt run: `[example]`."""
        return self._evaluate_metric(self._summarize_outcomes(state), 1, state)[0]

    def evaluate_circuit(self) -> Tensor:
        """The metric of the circuit of the arrows that stay: `[example]`."""
        return self._evaluate_metric(self.circuit_values, 1)[0]

    def _find_affected_groups(self, group: int) -> list[int]:
        """The families that change with the arrows into one, and lead to an outcome; that one is the first."""
        graph, found = self.clean.network.graph, {group}
        for index in self.arrows.incoming:
            if index > group and any(bundle.parent in found for bundle in graph.in_edges[index]):
                found.add(index)
        way = [index for index in sorted(found) if self.needed[get_node_slice(self.arrows.ground, index)].any()]
        for index in way:
            self._find_single_word(index)
        return way if group in way else []

    def _find_single_word(self, index: int) -> None:
        """Note the word of a family, if only one is needed. It is asked when all that reads the family is settled."""
        member, ground = self.clean.network.specs[index], self.arrows.ground
        if (
            member.group.word_stack is not None
            and self.clean.word_counts[member.group.word_stack] > 1
            and index not in self.single_words
        ):
            marks = self.needed[get_node_slice(ground, index)].reshape(ground.shapes[index])
            words = np.flatnonzero(marks.reshape(-1, marks.shape[-1]).any(0))
            self.single_words[index] = int(words[0]) if len(words) == 1 else -1

    @torch.no_grad()
    def _compute_groups(self, groups: Sequence[int], masks: BoolArray, *, should_release: bool = True) -> GroupValues:
        """What the families on a way come to, the first by a table `[circuit, arrow]` of kept arrows."""
        parents = {index: {given.index for given in self.clean.network.specs[index].parents} for index in groups}
        last = {parent: k for k, index in enumerate(groups) for parent in parents[index]}
        told = {self.arrows.ground.group_of(node).index for node in self.arrows.outcome_nodes}
        words = {index: word for index, word in self.single_words.items() if word >= 0}
        found: GroupValues = {}
        for k, index in enumerate(groups):
            kept = torch.from_numpy(masks if k == 0 else self.retained[index][None])
            found[index] = self._compute_group(index, words.get(index), {**self.circuit_values, **found}, kept, words)
            for done in [i for i in found if should_release and last.get(i, -1) <= k and i != index and i not in told]:
                del found[done]
        return found

    def _compute_group(
        self,
        index: int,
        word: int | None,
        values: Mapping[int, Tensor],
        retained: Tensor,
        single_words: Mapping[int, int],
    ) -> Tensor:
        """What one family comes to in each circuit; what `do` set of it stays."""
        key = index, word
        if key not in self._masked_groups:
            self._masked_groups[key] = MaskedGroup.build(self.clean, self.arrows, index, word)
        masked = self._masked_groups[key]
        found = masked.compute(self._build_state(masked.spec, word, values, single_words), self.corrupt, retained)
        value, which = self.clean.patched.get(index, (None, None))
        if value is not None and which is not None and found.dim() == value.dim():  # not log P of a choice
            if word is not None:
                value, which = (each.narrow(self.clean.layout.word_dim, word, 1) for each in (value, which))
            found = torch.where(which.reshape(*which.shape, *[1] * (value.dim() - which.dim())), value, found)
        return found

    def _build_state(
        self, spec: NodeSpec, word: int | None, values: Mapping[int, Tensor], single_words: Mapping[int, int]
    ) -> ExecutionState:
        """What a family reads: of this run where it has changed, else clean; all words of it, unless it reads one."""
        there = self.clean.values | {g.index: values[g.index] for g in spec.parents if g.index in values}
        axis = self.clean.layout.word_dim
        for given in spec.parents:
            index, own = given.index, single_words.get(given.index)
            alone = given.reach.kind == "same" and own == word
            if own is not None and not alone and index in values and there[index].shape[axis] == 1:
                # One word among the others of its family; nothing needed is read from those.
                value, others = there[index], self.corrupt.values[index]
                count = self.clean.word_counts[self.clean.network.specs[index].group.word_stack or ""]
                lead = torch.broadcast_shapes(value.shape[:axis], others.shape[:axis])
                wide = others.expand(*lead, count, *others.shape[axis + 1 :]).clone()
                wide.narrow(axis, own, 1).copy_(value.expand(*lead, 1, *value.shape[axis + 1 :]))
                there[index] = wide
        return replace(self.clean, values=there)

    @torch.no_grad()
    def _summarize_outcomes(self, state: ExecutionState) -> GroupValues:
        """What the random nodes of which something is told come to in a run: log P, or the mean."""
        found: GroupValues = {}
        for node in self.arrows.outcome_nodes:
            index = self.arrows.ground.group_of(node).index
            if index not in state.values and index not in found:
                member = state.network.specs[index]
                value = summarize_distribution(member, *gather_parents(state, member))
                own = 1 if member.tpm.kind == "discrete" else len(member.shape)
                found[index] = state.layout.pad_dims(value, own)
        return found

    def _evaluate_metric(
        self, values: Mapping[int, Tensor], num_circuits: int, state: ExecutionState | None = None
    ) -> Tensor:
        """The metric of what the outcomes came to: `[circuit, example]`."""
        base, found = state or self.clean, {}
        for node in self.arrows.outcome_nodes:
            family, index = self.arrows.ground.unravel_index(node)
            value = values[family.index] if family.index in values else base.values[family.index]
            place = dict(zip(self.arrows.ground.axes(family), index, strict=True))
            for plate in reversed((*base.layout.plates, WORD)):
                axis = base.layout.axis(plate)
                value = value.select(axis, place.get(plate, 0) if value.shape[axis] > 1 else 0)
            found[node] = value.expand(num_circuits, self.num_examples, *value.shape[2:])
        return self.metric(found)

    def _estimate_bytes(self, index: int) -> int:
        """The memory that the nodes of a family, and what they see, take in one circuit, at most."""
        member, sizes = self.clean.network.specs[index], self.clean.network.graph.plate_sizes
        *plates, words = get_layout_shape(self.clean, member)
        count = self.num_examples * math.prod(plates) * (1 if self.single_words.get(index, -1) >= 0 else words)
        own = self.clean.count_states(index) if member.tpm.kind == "discrete" else math.prod(member.shape)
        sources = self.arrows.incoming[index].sources
        for given, parent in zip(member.parents, member.tpm_parents, strict=True):
            there = get_node_slice(self.arrows.ground, given.index)
            if not ((sources >= there.start) & (sources < there.stop)).any():
                continue  # it is the same in all circuits
            read = self.clean.network.specs[given.index].group.word_stack or ""
            over = math.prod(self.clean.word_counts[read] if axis == WORD else sizes[axis] for axis in given.over)
            own += over * (1 if MaskedGroup.can_mix_attention(member) else math.prod(parent.shape))
        return 3 * count * own * self.clean.dtype.itemsize


def build_runner(
    clean: Examples, corrupt: Examples, arrows: CircuitArrows, metric: Metric, memory: int
) -> CircuitRunner:
    """The runs of two sides of the same examples."""
    ours, theirs = (_run_examples(examples, arrows.outcome_nodes) for examples in (clean, corrupt))
    return CircuitRunner(ours, theirs, arrows, metric, len(clean), memory)


def check_ancestors_fixed(examples: Examples, outcome_nodes: Sequence[int]) -> None:
    """Refuse a sentence in which something random is open above an outcome."""
    world = examples.model
    for node in ancestors(world.ground, outcome_nodes):
        member = world.network.specs[world.ground.group_of(node).index]
        if member.tpm.is_random and node not in world.do:
            name = world.ground.name(node)
            raise UnsupportedError(
                f"circuit below {name}",
                expected="random nodes above the metric that are set",
                actual=f"{name} open",
                allowed=f"do({name}=...) first, in clean and corrupt",
            )


def _run_examples(examples: Examples, outcome_nodes: Sequence[int]) -> ExecutionState:
    """A run of all that leads to the outcomes, `[1, example, *plates, word, *shape]`: circuits lead."""
    world = examples.model
    above = {world.ground.group_of(node).index for node in (*outcome_nodes, *ancestors(world.ground, outcome_nodes))}
    set_ = {world.ground.group_of(node).index for node in world.do}
    members = world.network.specs
    course = examples.run({index for index in above if not members[index].tpm.is_random or index in set_})

    return replace(
        course,
        layout=TensorLayout((CELL_AXIS,), course.layout.plates),
        values=_zero_pruned_groups(course, above) | {index: value[None] for index, value in course.values.items()},
        patched={index: (value[None], which[None]) for index, (value, which) in course.patched.items()},
        attention_rows={index: (value[None], which[None]) for index, (value, which) in course.attention_rows.items()},
        known={},
        attention_weights={},
    )


def _zero_pruned_groups(state: ExecutionState, ancestor_groups: set[int]) -> GroupValues:
    """Zeros for the families of which surgery has left nothing that leads to an outcome: their readers see these."""
    members, found = state.network.specs, {}
    for index in ancestor_groups:
        for parent in get_parent_groups(state.network, members[index]):
            if parent not in ancestor_groups:
                dtype = torch.long if members[parent].tpm.is_index_valued else state.dtype
                shape = 1, 1, *get_layout_shape(state, members[parent]), *members[parent].shape
                found[parent] = torch.zeros(shape, dtype=dtype)
    return found

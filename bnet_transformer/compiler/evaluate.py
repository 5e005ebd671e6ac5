"""Second pass, plan to values: each node group as one tensor, `[*enumerated, batch, *plates, word, *shape]`.

A dim on which a value does not depend has size 1, and values broadcast. So a value that does not depend on a selector
is computed once for all states of the selector.

Groups that read themselves at earlier words are computed word by word (`Scan`). All values that do not depend on an
earlier word are computed before the loop: parameters, values from outside the component, and the products `W x` of
recurrent maps, for all words and all gates at once. The loop contains one product `U h` for all gates that read the
same h.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.fused import (
    AttentionInputs,
    WordPick,
    apply_map,
    apply_maps,
    attend,
    attend_with_weights,
    build_attention_inputs,
    expand_table,
    is_full_or_causal,
    is_scaled_dot_product,
    is_softmax_dot_product,
)
from bnet_transformer.compiler.gather import (
    ExecutionState,
    build_context,
    find_word_picks,
    gather_parents,
    get_initial_value,
    get_known_value,
    get_missing_mask,
    get_present_mask,
    pick_entry,
)
from bnet_transformer.compiler.plan import ExecutionPlan, Fold
from bnet_transformer.declare import NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, UnsupportedError
from bnet_transformer.tpm import Affine, Attention, Cayley, EvalContext, Linear, Recur, Select
from bnet_transformer.tpm.base import broadcast_shapes
from bnet_transformer.tpm.deterministic import ACTIVATIONS

Picks = tuple[tuple[str, int], ...]  # plates with the groups of their selectors


def plan_to_values(plan: ExecutionPlan, state: ExecutionState) -> None:
    """Compute the value of every group of a plan, and store it in `state.values`."""
    modified = {*state.attention_rows, *state.patched, *state.changes}
    for component, released in zip(plan.components, plan.released, strict=True):
        index = component[0]  # a component of several groups is recurrent
        if index in plan.deferred:
            pass
        elif index in plan.folds:
            state.values[index] = compute_folded_attention(state, plan.folds[index])
        elif index in plan.fused_maps:
            state.values |= compute_fused_maps(state, plan.fused_maps[index])
        elif index in state.values:
            pass  # computed with an earlier fused map
        elif index in plan.recurrent:
            state.values |= Scan(state, component).run(released)
        else:
            state.values[index] = compute_value(state, index)
        if index in modified:
            _modify_value(state, index, is_recurrent=index in plan.recurrent)
        for unread in released:
            state.values.pop(unread, None)


def _modify_value(state: ExecutionState, index: int, *, is_recurrent: bool) -> None:
    """Change the value of a group by the interventions on it, in `state.values`."""
    if index in state.attention_rows and index not in state.known:
        state.values[index] = _apply_attention_rows(state, index)
    if index in state.patched and not is_recurrent:
        state.values[index] = _apply_patch(state, index)
    for change in state.changes.get(index, ()) if not is_recurrent else ():  # a scan changes the values of its groups
        state.values[index] = change(state.values[index], None)


def _apply_patch(state: ExecutionState, index: int) -> Tensor:
    """The value of a group of which some nodes are set."""
    (patch, mask), spec, value = state.patched[index], state.network.specs[index], state.values[index]
    if spec.tpm.kind == "discrete" and not patch.is_floating_point():
        patch = state.layout.pad_dims(spec.tpm.emit(build_context(state, spec), patch), len(spec.shape))
    event_dim = patch.dim() - state.layout.rank
    return torch.where(mask.reshape(*mask.shape, *[1] * event_dim).to(value.device), patch.to(value.device), value)


def _apply_attention_rows(state: ExecutionState, index: int) -> Tensor:
    """The value of an attention of which some nodes have a given row instead of their `P(j | i)`."""
    (weights, mask), spec = state.attention_rows[index], state.network.specs[index]
    assert isinstance(spec.tpm, Attention)
    _, parents = gather_parents(state, spec)
    mix = state.layout.pad_dims(spec.tpm.mix(weights.to(parents[0].device), *parents), len(spec.shape))
    return torch.where(mask[..., None].to(mix.device), mix, state.values[index])


def compute_value(state: ExecutionState, index: int) -> Tensor:
    """The value of one group, for all its words at once."""
    spec = state.network.specs[index]
    known = get_known_value(state, index)
    if known is not None:
        return known
    if type(spec.tpm) is Select and (dims := _find_state_dims(state, spec)):
        return expand_table(state.parameters[f"{spec.param_prefix}.values"], dims, state.layout.rank)
    picks = [] if spec.is_wordwise else find_word_picks(state, spec)
    return _compute_picked(state, spec, picks) if picks else _compute_unpicked(state, spec)


def _compute_unpicked(state: ExecutionState, spec: NodeSpec, picks: Mapping[str, WordPick] | None = None) -> Tensor:
    """The value of a group from the values of its parents; its `P(j | i)` is stored if it is recorded."""
    context, parents = gather_parents(state, spec)
    compute = _compute_with_attention if spec.group.index in state.attention_weights else evaluate_tpm
    return state.layout.pad_dims(compute(state, spec, context, parents, picks), len(spec.shape))


# Where word i picks the entry c_i of collections of words (the head of its keys and values), a gather of the entries
# would copy each collection for each word: [word, word read, feature]. There are two ways without copies. The node is
# computed for all entries, and word i then picks its entry of the value: the work of K heads, for any number of joint
# states or samples of c. In attention, the features of all entries are used in one product (see
# `build_attention_inputs`): the work of K heads for each of these joint states, with one softmax instead of K.


def _compute_picked(state: ExecutionState, spec: NodeSpec, picks: Sequence[Picks]) -> Tensor:
    """The value of a group that picks entries of collections of words, without copies of the collections."""
    shared, can_fold = _find_shared_picks(spec, picks), is_softmax_dot_product(spec)
    if shared and not (can_fold and _is_constant_over_states(state, spec, shared)):
        value = _compute_unpicked(state, _remove_picks(spec, picks))
        weights = state.attention_weights.get(spec.group.index)
        for plate, selector in shared:
            axis = state.layout.axis(plate)
            value = pick_entry(state, value, axis, selector)
            weights = None if weights is None else pick_entry(state, weights, axis, selector)
        if weights is not None:
            state.attention_weights[spec.group.index] = weights
        return value
    if not can_fold:
        return _compute_unpicked(state, spec)
    by_collection = [pairs if parent.over else () for parent, pairs in zip(spec.parents, picks, strict=True)]
    folded = {
        parent.slot: _build_word_pick(state, pairs)
        for parent, pairs in zip(spec.parents, by_collection, strict=True)
        if pairs
    }
    return _compute_unpicked(state, _remove_picks(spec, by_collection), folded)


def _find_shared_picks(spec: NodeSpec, picks: Sequence[Picks]) -> Picks:
    """The picks of all parents with these plates, if they are the same; else none."""
    pairs = next(pairs for pairs in picks if pairs)
    plates = {plate for plate, _ in pairs}
    is_shared = all(other in ((), pairs) for other in picks) and WORD not in plates
    is_free = plates.isdisjoint([*spec.group.plates, *(plate for parent in spec.parents for plate in parent.over)])
    return pairs if is_shared and is_free else ()


def _is_constant_over_states(state: ExecutionState, spec: NodeSpec, picks: Picks) -> bool:
    """True if selectors have no joint states or samples for which the parents have one value."""
    parents = [state.values[parent.index] for parent in spec.parents if parent.index in state.values]
    selectors = [state.values[selector] for _, selector in picks]
    return all(
        any(value.shape[d] > 1 for value in parents) or all(selected.shape[d] == 1 for selected in selectors)
        for d in range(state.layout.word_dim)
    )


def _remove_picks(spec: NodeSpec, picks: Sequence[Picks]) -> NodeSpec:
    """A group without some picks of its parents."""
    parents = [
        replace(parent, pick=tuple(pair for pair in parent.pick if pair not in removed))
        for parent, removed in zip(spec.parents, picks, strict=True)
    ]
    return replace(spec, parents=tuple(parents))


def _build_word_pick(state: ExecutionState, picks: Picks) -> WordPick:
    """The picks of one collection, as one."""
    axes: tuple[int, ...] = ()
    entry, count = torch.zeros_like(state.values[picks[0][1]]), 1
    for plate, selector in picks:
        size = state.network.graph.plate_sizes[plate]
        axes, entry, count = (*axes, state.layout.axis(plate)), entry * size + state.values[selector], count * size
    return WordPick(axes, entry, count)


def _find_state_dims(state: ExecutionState, spec: NodeSpec) -> list[int]:
    """The enumerated dims of the parents, if each parent is a different enumerated choice of the same word; else []."""
    enumerated = state.layout.enumerated
    parent_ids = {parent.index for parent in spec.parents}
    is_plain = all(not (parent.pick or parent.over) and parent.reach.kind == "same" for parent in spec.parents)
    is_plain = is_plain and not parent_ids & state.patched.keys()
    if spec.group.plates or not is_plain or len(parent_ids) < len(spec.parents) or not parent_ids <= {*enumerated}:
        return []
    return [enumerated.index(parent.index) for parent in spec.parents]


def _compute_with_attention(
    state: ExecutionState,
    spec: NodeSpec,
    context: EvalContext,
    parents: list[Tensor],
    picks: Mapping[str, WordPick] | None,
) -> Tensor:
    """The value of a group; its `P(j | i)` is stored in `state.attention_weights`. Fused attention computes both."""
    tpm = spec.tpm
    if isinstance(tpm, Attention) and is_scaled_dot_product(spec, parents):
        weights, mix = attend_with_weights(build_attention_inputs(state, spec, context, parents, picks))
        value = mix + parents[-1] if tpm.residual else mix
    else:
        attention = tpm.attention_weights(context, *parents)
        if attention is None:
            expected = "a node with attention P(j | i)"
            raise UnsupportedError(spec.group.name, expected=expected, actual=tpm.no_attention_reason())
        weights, value = attention, evaluate_tpm(state, spec, context, parents)
    state.attention_weights[spec.group.index] = state.layout.pad_dims(weights, 1)
    return value


def evaluate_tpm(
    state: ExecutionState,
    spec: NodeSpec,
    context: EvalContext,
    parents: list[Tensor],
    picks: Mapping[str, WordPick] | None = None,
) -> Tensor:
    """The value of a TPM from its parents, by a fused operation if there is one.

    `picks` are the entries that each word picks from collections of which the parents contain all entries.
    """
    tpm = spec.tpm  # of final classes, whose comparison is faster than `isinstance` of an abstract class
    if (type(tpm) is Linear or type(tpm) is Affine) and tpm.dim is None:
        return apply_map(parents[0], parents[1], context["bias"] if tpm.has_bias else None)
    if type(tpm) is Attention and is_scaled_dot_product(spec, parents):
        mix = attend(build_attention_inputs(state, spec, context, parents, picks))
        return mix + parents[-1] if tpm.residual else mix
    if type(tpm) is Cayley and all(x.shape[-3] == 1 for x in parents) and context.word is context.read_indices["z."]:
        # All words depend on the same words (those that are not masked), so one Cayley transform suffices.
        mask = None if is_full_or_causal(state, spec)[0] else context.mask["z."].any(-2, keepdim=True)
        return tpm.mix(context.read_indices["z."], mask, *parents).squeeze(-3)
    value = tpm.value(context, *parents)
    if not isinstance(value, Tensor) or value.shape[max(0, value.dim() - len(spec.shape)) :] != spec.shape:
        actual = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        subject = f"{spec.group.name} ({type(spec.tpm).__name__})"
        raise BNetError(subject, expected=f"a value of its declared shape {spec.shape}", actual=actual)
    return value


def compute_fused_maps(state: ExecutionState, indices: tuple[int, ...]) -> dict[int, Tensor]:
    """Compute several linear maps of one vector as one product."""
    specs = [state.network.specs[index] for index in indices]
    gathered = [gather_parents(state, spec) for spec in specs]
    biases = [
        context["bias"] if isinstance(m.tpm, Affine) else None for m, (context, _) in zip(specs, gathered, strict=True)
    ]
    values = apply_maps([parents[0] for _, parents in gathered], gathered[0][1][1], biases)
    return {m.group.index: state.layout.pad_dims(value, len(m.shape)) for m, value in zip(specs, values, strict=True)}


def compute_folded_attention(state: ExecutionState, fold: Fold) -> Tensor:
    """Compute an attention with folded maps: `softmax(x_i . (W_q^T W_k) x_j)`, and W_v after the weighted sum."""
    context, parents, residual = _gather_folded(state, fold)
    mix = evaluate_tpm(state, fold.spec, context, parents)
    if fold.W_v is not None:
        (mix,) = apply_maps([state.values[fold.W_v.index]], mix, [None])
    return state.layout.pad_dims(mix if residual is None else mix + residual, len(fold.spec.shape))


def _gather_folded(state: ExecutionState, fold: Fold) -> tuple[EvalContext, list[Tensor], Tensor | None]:
    """The context and the parents of a folded attention, and the residual to add to its output."""
    context, parents = gather_parents(state, fold.spec)
    residual = parents.pop() if fold.has_residual else None
    W_q, W_k = state.values[fold.W_q.index], state.values[fold.W_k.index]
    (parents[0],) = apply_maps([W_k.mT @ W_q], parents[0], [None])
    return context, parents, residual


def gather_attention_inputs(
    state: ExecutionState, spec: NodeSpec, fold: Fold | None
) -> tuple[AttentionInputs, Tensor | None, Tensor | None]:
    """The inputs of a softmax attention; W_v if it is applied to the weighted sum; the residual if there is one."""
    if fold is not None:
        context, parents, residual = _gather_folded(state, fold)
        W_v = None if fold.W_v is None else state.values[fold.W_v.index]
        return build_attention_inputs(state, fold.spec, context, parents), W_v, residual
    context, parents = gather_parents(state, spec)
    assert isinstance(spec.tpm, Attention)
    return build_attention_inputs(state, spec, context, parents), None, parents[-1] if spec.tpm.residual else None


WordReader = Callable[[int], Tensor]
WordStep = Callable[[int], None]


class Scan:
    """The word-by-word computation of one component, whose groups read themselves or each other at earlier words."""

    def __init__(self, state: ExecutionState, component: Sequence[int]) -> None:
        self.state, self.axis = state, state.layout.word_dim
        self.specs = {index: state.network.specs[index] for index in component}
        self.num_words = state.word_counts[self.specs[component[0]].group.word_stack or ""]
        # Lists over words are in the order of the computation, which is that of the sentence or its reverse.
        self.is_backward = component[0] in state.network.graph.backward
        self.positions = self.split_by_word(state.arange(self.num_words), 0)
        self.known_values = {
            index: value for index in component if (value := get_known_value(state, index)) is not None
        }
        self.values_by_word = {index: list(self.split_by_word(value)) for index, value in self.known_values.items()}
        self.values_by_word |= {index: [] for index in component if index not in self.known_values}
        self.patched = {
            index: (
                self.split_by_word(value),
                self.split_by_word(mask.reshape(*mask.shape, *[1] * len(self.specs[index].shape))),
            )
            for index, (value, mask) in state.patched.items()
            if index in self.values_by_word
        }

    def run(self, released: Collection[int] = ()) -> dict[int, Tensor]:
        """Compute all words in order, and return the values of the groups that are not `released`."""
        steps: list[WordStep] = []
        done = set(self.known_values)
        for index, spec in self.specs.items():
            if index not in done:
                fusable = self.find_fusable_maps(spec)
                steps.append(self.build_fused_step(fusable) if fusable else self.build_step(spec))
                done |= {m.group.index for m in fusable}
        for word in range(self.num_words):
            for step in steps:
                step(word)
        return {index: self.get_value(index) for index in self.specs if index not in released}

    def split_by_word(self, value: Tensor, axis: int | None = None) -> Sequence[Tensor]:
        """A value at each word; one tensor for all words if it does not depend on the word."""
        parts: list[Tensor] = list(value.split(1, self.axis if axis is None else axis))
        parts = parts[::-1] if self.is_backward else parts
        return parts if len(parts) == self.num_words else parts * self.num_words

    def get_value(self, index: int) -> Tensor:
        """The value of a group at all words."""
        return self.known_values[index] if index in self.known_values else self.concat(self.values_by_word[index])

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate the values of consecutive words, broadcast to one shape."""
        shapes = {part.shape for part in parts}
        if len(shapes) > 1:
            shape = broadcast_shapes(*shapes)
            parts = [part.expand(shape) for part in parts]
        return torch.cat(list(parts)[::-1] if self.is_backward else list(parts), self.axis)

    def append_value(self, index: int, word: int, value: Tensor) -> None:
        """Append the value of a group at a step, or the value to which its word is set, after its change."""
        if index in self.patched:
            values, mask = self.patched[index]
            value = torch.where(mask[word], values[word], value)
        for change in self.state.changes.get(index, ()):
            value = change(value, self.num_words - 1 - word if self.is_backward else word)
        self.values_by_word[index].append(value)

    # the steps of one word, in order

    def build_step(self, spec: NodeSpec) -> WordStep:
        """The step of one group, by its TPM."""
        index, tpm, event_dim, pad = spec.group.index, spec.tpm, len(spec.shape), self.state.layout.pad_dims
        if not all(map(self.is_single, spec.parents)):

            def step(word: int) -> None:  # several words, or entries that a selector picks
                word_context, parents = self.gather_word(spec, word)
                self.append_value(index, word, pad(tpm.value(word_context, *parents), event_dim))

            return step
        reads = [self.make_reader(parent) for parent in spec.parents]
        context = build_context(self.state, spec)
        optional = [k for k, described in enumerate(spec.tpm_parents) if described.is_optional]
        missing = {k: self.split_by_word(get_missing_mask(self.state, spec.parents[k])) for k in optional}
        contexts = [
            replace(context, word=position, rotary={}, missing={k: masks[step] for k, masks in missing.items()})
            for step, position in enumerate(self.positions)
        ]
        return lambda word: self.append_value(
            index, word, pad(tpm.value(contexts[word], *(read(word) for read in reads)), event_dim)
        )

    def gather_word(self, spec: NodeSpec, word: int) -> tuple[EvalContext, list[Tensor]]:
        """The context and the values of the parents of one word."""
        for parent in spec.parents:
            selectors = [selector for _, selector in parent.pick]
            for index in {parent.index, *selectors} & self.values_by_word.keys():
                if self.values_by_word[index]:
                    self.state.values[index] = self.pad_to_length(index)
        position = self.num_words - 1 - word if self.is_backward else word
        return gather_parents(self.state, spec, position)

    def pad_to_length(self, index: int) -> Tensor:
        """The value of a group at all words, with zeros at words that are not computed yet, and that are never read."""
        if index in self.known_values:
            return self.known_values[index]
        computed = self.values_by_word[index]
        return self.concat([*computed, *[torch.zeros_like(computed[0])] * (self.num_words - len(computed))])

    def is_single(self, parent: ParentSpec) -> bool:
        """True for a parent of which one entry is read: at the same word, at the previous word, or without words."""
        return parent.reach.kind in ("same", "before", "after") and not parent.over and not parent.pick

    def make_reader(self, parent: ParentSpec) -> WordReader:
        """The function from a word to the value of one slot."""
        parts: Sequence[Tensor]
        if parent.index in self.values_by_word:
            parts = self.values_by_word[parent.index]
        else:
            parts = self.split_by_word(self.state.values[parent.index])
        if parent.reach.kind == "same":
            return lambda word: parts[word]
        initial = torch.zeros_like(parts[0]) if parts else get_initial_value(self.state, parent)
        step = 1 if (parent.reach.kind == "after") != self.is_backward else -1
        inside = range(self.num_words)
        present = get_present_mask(self.state, self.state.network.specs[parent.index].group.word_stack)
        if present is None:
            return lambda word: parts[word + step] if word + step in inside else initial
        event_dim = initial.dim() - present.dim()
        present_by_word = [mask.reshape(*mask.shape, *[1] * event_dim) for mask in self.split_by_word(present)]

        def read(word: int) -> Tensor:
            neighbour = word + step
            return (
                torch.where(present_by_word[neighbour], parts[neighbour], initial) if neighbour in inside else initial
            )

        return read

    # Recurrent maps W x + U h + b of the same x and h (the gates of an LSTM) are computed as one product: W x + b is
    # not recurrent, so it is one matrix product over all words; only U h is computed in the loop.

    def find_fusable_maps(self, spec: NodeSpec) -> list[NodeSpec]:
        """The recurrent maps that can be fused with this one: they read the same x from outside, and the same h."""
        if not self.is_recurrent_map(spec):
            return []

        def read_sources(candidate: NodeSpec) -> list[tuple[object, ...]]:
            return [(parent.index, parent.reach) for parent in candidate.parents]

        fusable = [
            other
            for index, other in self.specs.items()
            if index not in self.known_values
            and self.is_recurrent_map(other)
            and read_sources(other) == read_sources(spec)
        ]
        return sorted(fusable, key=_get_activation)

    def is_recurrent_map(self, spec: NodeSpec) -> bool:
        """True for a recurrent map without plates, of x from outside the component and h at the previous word."""
        if not isinstance(spec.tpm, Recur) or spec.group.plates:
            return False
        x, h = spec.parents
        inside = x.index not in self.values_by_word and h.index in self.values_by_word and h.reach.kind != "same"
        return inside and self.is_single(x) and self.is_single(h)

    def build_fused_step(self, specs: Sequence[NodeSpec]) -> WordStep:
        """The step of several recurrent maps: `W x + b` of all words, then at each word `+ U h` and the activations."""
        contexts = [build_context(self.state, spec) for spec in specs]
        x, h = (self.make_reader(parent) for parent in specs[0].parents)
        W, U = (torch.cat([context[name] for context in contexts]) for name in "WU")
        inputs = self.state.values[specs[0].parents[0].index]
        bias = torch.cat([context.parameters.get("bias", W.new_zeros(len(context["W"]))) for context in contexts])
        if specs[0].parents[0].reach.kind == "same":
            projected = self.split_by_word(functional.linear(inputs, W, bias))
        else:
            projected = [functional.linear(x(word), W, bias) for word in range(self.num_words)]
        kinds = dict.fromkeys(map(_get_activation, specs))
        by_activation = {
            kind: [(m.group.index, m.shape[0]) for m in specs if _get_activation(m) == kind] for kind in kinds
        }
        activations = [(ACTIVATIONS[kind], outputs) for kind, outputs in by_activation.items()]
        widths = [sum(width for _, width in outputs) for _, outputs in activations]

        def step(word: int) -> None:
            preactivations = _add_map(U, h(word), projected[word]).split_with_sizes(widths, -1)
            for (activation, outputs), part in zip(activations, preactivations, strict=True):
                values = activation(part).split_with_sizes([width for _, width in outputs], -1)
                for (index, _), value in zip(outputs, values, strict=True):
                    self.append_value(index, word, value)

        return step


def _add_map(U: Tensor, h: Tensor, offset: Tensor) -> Tensor:
    """`U h + offset`, in one operation if both have the same leading dims."""
    if h.shape[:-1] != offset.shape[:-1]:
        return functional.linear(h, U) + offset
    flat = torch.addmm(offset.reshape(-1, len(U)), h.reshape(-1, U.shape[-1]), U.mT)
    return flat.reshape(offset.shape)


def _get_activation(spec: NodeSpec) -> str:
    """The activation of a recurrent map."""
    assert isinstance(spec.tpm, Recur)
    return spec.tpm.activation

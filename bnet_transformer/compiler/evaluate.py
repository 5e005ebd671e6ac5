"""Second pass, plan to values: every family as one tensor, in the layout `[*enumerated, batch, *plates, word, *shape]`.

A dim on which a value does not depend has size 1, so values broadcast: all states of a selector share what lies
before it.

Families that read themselves at earlier words are computed word after word (`Scan`). All that does not wait for an
earlier word is done before the first: parameters, what comes from outside the group, and the products `W x` of a
recurrent map, of all words and of all gates at once. What is left of a word is one product `U h` for all gates that
read the same h, and what stands between it and the next word.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.execution_state import (
    ExecutionState,
    build_context,
    gather_parents,
    get_initial_value,
    get_known_value,
    get_present_mask,
    pad_dims,
)
from bnet_transformer.compiler.fused import (
    AttentionInputs,
    apply_maps,
    attend_with_weights,
    build_attention_inputs,
    compute_fused,
    expand_table,
    is_scaled_dot_product,
)
from bnet_transformer.compiler.plan import Fold, Plan
from bnet_transformer.declare import NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, UnsupportedError
from bnet_transformer.tpm import Affine, Attention, EvalContext, Recur, Select
from bnet_transformer.tpm.base import broadcast_shapes
from bnet_transformer.tpm.steps import ACTIVATIONS


def plan_to_values(plan: Plan, state: ExecutionState) -> None:
    """Compute the value of every family of a plan."""
    for group, done in zip(plan.components, plan.released, strict=True):
        if group[0] in plan.deferred:
            pass
        elif group[0] in plan.folds:
            state.values[group[0]] = compute_folded_attention(state, plan.folds[group[0]])
        elif group[0] in plan.fused_maps:
            state.values |= compute_fused_maps(state, plan.fused_maps[group[0]])
        elif group[0] in state.values:
            pass  # made together with an earlier one
        elif group[0] in plan.recurrent:
            state.values |= Scan(state, group).run(done)
        else:
            state.values[group[0]] = compute_value(state, group[0])
        if group[0] in state.attention_rows and group[0] not in state.known:
            state.values[group[0]] = _apply_attention_rows(state, group[0])
        if group[0] in state.patched and group[0] not in plan.recurrent:
            state.values[group[0]] = _apply_patch(state, group[0])
        if group[0] in state.gates:
            state.values[group[0]] = state.values[group[0]] * state.gates[group[0]]
        if group[0] in state.perturbations:
            made = state.values[group[0]]
            state.values[group[0]] = made + state.perturbations[group[0]].to(made.device)
        for index in done:
            state.values.pop(index, None)


def _apply_patch(state: ExecutionState, index: int) -> Tensor:
    """The value of a family some of whose nodes are set."""
    (set_, which), member, made = state.patched[index], state.network.specs[index], state.values[index]
    if member.tpm.kind == "discrete" and not set_.is_floating_point():
        set_ = pad_dims(state, member, member.tpm.emit(build_context(state, member), set_))
    own = set_.dim() - state.layout.rank
    return torch.where(which.reshape(*which.shape, *[1] * own).to(made.device), set_.to(made.device), made)


def _apply_attention_rows(state: ExecutionState, index: int) -> Tensor:
    """The value of a family some of whose nodes mix by rows that were set, in place of their `P(j | i)`."""
    (weights, which), member = state.attention_rows[index], state.network.specs[index]
    assert isinstance(member.tpm, Attention)
    _, parents = gather_parents(state, member)
    mix = pad_dims(state, member, member.tpm.mix(weights.to(parents[0].device), *parents))
    return torch.where(which[..., None].to(mix.device), mix, state.values[index])


def compute_value(state: ExecutionState, index: int) -> Tensor:
    """The value of one family, for all its words at once."""
    member = state.network.specs[index]
    found = get_known_value(state, index)
    if found is not None:
        return found
    if isinstance(member.tpm, Select) and (dims := _find_state_dims(state, member)):
        return expand_table(state.parameters[f"{member.param_prefix}.values"], dims, state.layout.rank)
    at, parents = gather_parents(state, member)
    if index in state.attention_weights:
        return pad_dims(state, member, _compute_with_attention(state, member, at, parents))
    return pad_dims(state, member, evaluate_tpm(state, member, at, parents))


def _find_state_dims(state: ExecutionState, spec: NodeSpec) -> list[int]:
    """The dims along which the parents of a family run through all their states; none where some do not."""
    enumerated = state.layout.enumerated
    each = {given.index for given in spec.parents}
    plain = all(not (given.pick or given.over) and given.reach.kind == "same" for given in spec.parents)
    plain = plain and not each & state.patched.keys()
    if spec.group.plates or not plain or len(each) < len(spec.parents) or not each <= {*enumerated}:
        return []
    return [enumerated.index(given.index) for given in spec.parents]


def _compute_with_attention(
    state: ExecutionState, spec: NodeSpec, context: EvalContext, parents: list[Tensor]
) -> Tensor:
    """The value of a family, whose `P(j | i)` is kept beside it: an attention is computed once for both."""
    tpm = spec.tpm
    if isinstance(tpm, Attention) and is_scaled_dot_product(tpm, spec, parents):
        weights, mix = attend_with_weights(_prepare_attention_inputs(state, spec, context, parents))
        found = mix + parents[-1] if tpm.residual else mix
    else:
        told = tpm.attention_weights(context, *parents)
        if told is None:
            raise UnsupportedError(spec.group.name, expected="attention P(j | i)", actual=tpm.no_attention_reason())
        weights, found = told, evaluate_tpm(state, spec, context, parents)
    state.attention_weights[spec.group.index] = state.layout.pad_dims(weights, 1)
    return found


def evaluate_tpm(state: ExecutionState, spec: NodeSpec, context: EvalContext, parents: list[Tensor]) -> Tensor:
    """What a TPM makes of what it sees, by a fused operation where there is one."""
    whole, causal = _is_full_or_causal(state, spec)
    found = compute_fused(spec, context, parents, is_full=whole, is_causal=causal)
    if found is not None:
        return found
    found = spec.tpm.value(context, *parents)
    if not isinstance(found, Tensor) or found.shape[max(0, found.dim() - len(spec.shape)) :] != spec.shape:
        got = f"one of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
        what = f"{spec.group.name} ({type(spec.tpm).__name__})"
        raise BNetError(what, expected=f"a value of shape {spec.shape}, as it says", actual=got)
    return found


def compute_fused_maps(state: ExecutionState, indices: tuple[int, ...]) -> dict[int, Tensor]:
    """Several maps of one vector, as one product."""
    members = [state.network.specs[index] for index in indices]
    seen_ = [gather_parents(state, member) for member in members]
    biases = [at["bias"] if isinstance(m.tpm, Affine) else None for m, (at, _) in zip(members, seen_, strict=True)]
    made = apply_maps([parents[0] for _, parents in seen_], seen_[0][1][1], biases)
    return {m.group.index: pad_dims(state, m, each) for m, each in zip(members, made, strict=True)}


def compute_folded_attention(state: ExecutionState, fold: Fold) -> Tensor:
    """An attention with the maps around it folded in: `softmax(x_i . (W_q^T W_k) x_j)`, and W_v after the mix."""
    at, parents, residual = _gather_folded(state, fold)
    mix = evaluate_tpm(state, fold.spec, at, parents)
    if fold.W_v is not None:
        (mix,) = apply_maps([state.values[fold.W_v.index]], mix, [None])
    return pad_dims(state, fold.spec, mix if residual is None else mix + residual)


def _gather_folded(state: ExecutionState, fold: Fold) -> tuple[EvalContext, list[Tensor], Tensor | None]:
    """What the attention of a fold sees, and the residual that is added to what it makes."""
    at, parents = gather_parents(state, fold.spec)
    residual = parents.pop() if fold.has_residual else None
    W_q, W_k = state.values[fold.W_q.index], state.values[fold.W_k.index]
    (parents[0],) = apply_maps([W_k.mT @ W_q], parents[0], [None])
    return at, parents, residual


def gather_attention_inputs(
    state: ExecutionState, spec: NodeSpec, fold: Fold | None
) -> tuple[AttentionInputs, Tensor | None, Tensor | None]:
    """What a plain attention reads; then W_v, where it is applied to the mix; then the residual."""
    if fold is not None:
        at, parents, residual = _gather_folded(state, fold)
        W_v = None if fold.W_v is None else state.values[fold.W_v.index]
        return _prepare_attention_inputs(state, fold.spec, at, parents), W_v, residual
    at, parents = gather_parents(state, spec)
    assert isinstance(spec.tpm, Attention)
    return _prepare_attention_inputs(state, spec, at, parents), None, parents[-1] if spec.tpm.residual else None


def _prepare_attention_inputs(
    state: ExecutionState, spec: NodeSpec, context: EvalContext, parents: list[Tensor]
) -> AttentionInputs:
    """What a plain attention reads, from what it sees."""
    assert isinstance(spec.tpm, Attention)
    whole, causal = _is_full_or_causal(state, spec)
    return build_attention_inputs(spec.tpm, context, parents, is_full=whole, is_causal=causal)


def _is_full_or_causal(state: ExecutionState, spec: NodeSpec) -> tuple[bool, bool]:
    """Whether all words are there and every one reads every one, or those up to itself: no mask is needed then."""
    reaches = {_get_reach_kind(state, given) for given in spec.parents if WORD in given.over}
    bare = not state.present
    return bare and reaches == {"every"}, bare and reaches == {"causal"}


def _get_reach_kind(state: ExecutionState, parent: ParentSpec) -> str:
    """The kind of a reach; that of recent words is causal where no word stands further back."""
    words = state.word_counts[state.network.specs[parent.index].group.word_stack or ""]
    near = parent.reach.kind == "recent" and words <= parent.reach.width + 1
    return "causal" if near else parent.reach.kind


WordReader = Callable[[int], Tensor]
WordStep = Callable[[int], None]


class Scan:
    """One scan of a group whose members read each other, or themselves, at earlier words: the values so far."""

    def __init__(self, state: ExecutionState, component: Sequence[int]) -> None:
        self.state, self.axis = state, state.layout.word_dim
        self.specs = {index: state.network.specs[index] for index in component}
        self.num_words = state.word_counts[self.specs[component[0]].group.word_stack or ""]
        self.positions = state.arange(self.num_words).split(1)
        self.known_values = {
            index: found for index in component if (found := get_known_value(state, index)) is not None
        }
        self.values_by_word = {index: list(self.split_by_word(found)) for index, found in self.known_values.items()}
        self.values_by_word |= {index: [] for index in component if index not in self.known_values}
        self.patched = {
            index: (
                self.split_by_word(value),
                self.split_by_word(which.reshape(*which.shape, *[1] * len(self.specs[index].shape))),
            )
            for index, (value, which) in state.patched.items()
            if index in self.values_by_word
        }

    def run(self, released: Collection[int] = ()) -> dict[int, Tensor]:
        """All words, one after another; the values of all members but those that nothing reads after it."""
        steps = self.build_steps()
        for word in range(self.num_words):
            for step in steps:
                step(word)
        return {index: self.get_value(index) for index in self.specs if index not in released}

    def split_by_word(self, value: Tensor) -> Sequence[Tensor]:
        """A value at each word; the same at all, where it does not depend on the word."""
        parts: list[Tensor] = list(value.split(1, self.axis))
        return parts if len(parts) == self.num_words else parts * self.num_words

    def get_value(self, index: int) -> Tensor:
        """The value of a member at all words."""
        return self.known_values[index] if index in self.known_values else self.concat(self.values_by_word[index])

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Values at words one after another, broadcast to one shape."""
        shapes = {each.shape for each in parts}
        if len(shapes) > 1:
            shape = broadcast_shapes(*shapes)
            parts = [each.expand(shape) for each in parts]
        return torch.cat(list(parts), self.axis)

    def append_value(self, index: int, word: int, value: Tensor) -> None:
        """Keep the value of a member at a word, or what is set in its place."""
        if index in self.patched:
            values, which = self.patched[index]
            value = torch.where(which[word], values[word], value)
        self.values_by_word[index].append(value)

    # what is done at each word, in order

    def build_steps(self) -> list[WordStep]:
        """What each word takes."""
        found: list[WordStep] = []
        made: set[int] = set()
        for index, member in self.specs.items():
            if index in self.known_values or index in made:
                continue
            beside = self.find_fusable_maps(member)
            found.append(self.build_fused_step(beside) if beside else self.build_step(member))
            made |= {each.group.index for each in beside}
        return found

    def build_step(self, spec: NodeSpec) -> WordStep:
        """One member, by its TPM."""
        index, tpm, event_dim = spec.group.index, spec.tpm, len(spec.shape)
        if not all(map(self.is_single, spec.parents)):
            return lambda word: self.append_value(index, word, self.evaluate_word(spec, word))
        reads = [self.make_reader(given) for given in spec.parents]
        at = build_context(self.state, spec)
        ats = [EvalContext(at.parameters, place, {}, {}, at.training, at.dtype) for place in self.positions]
        pad_dims = self.state.layout.pad_dims
        return lambda word: self.append_value(
            index, word, pad_dims(tpm.value(ats[word], *(read(word) for read in reads)), event_dim)
        )

    def evaluate_word(self, spec: NodeSpec, word: int) -> Tensor:
        """One member at a word, of which it reads several words, or those that a selector picks."""
        for given in spec.parents:
            selectors = [selector for _, selector in given.pick]
            for index in {given.index, *selectors} & self.values_by_word.keys():
                if self.values_by_word[index]:
                    self.state.values[index] = self.pad_to_length(index)
        at, parents = gather_parents(self.state, spec, word)
        return pad_dims(self.state, spec, spec.tpm.value(at, *parents))

    def pad_to_length(self, index: int) -> Tensor:
        """A member at all words, zero at those that are still to come."""
        if index in self.known_values:
            return self.known_values[index]
        there = self.values_by_word[index]
        return self.concat([*there, *[torch.zeros_like(there[0])] * (self.num_words - len(there))])

    def is_single(self, parent: ParentSpec) -> bool:
        """True for a parent of which the own word is read, or the one before, or one without words."""
        return parent.reach.kind in ("same", "before") and not parent.over and not parent.pick

    def make_reader(self, parent: ParentSpec) -> WordReader:
        """What a slot receives at each word."""
        parts: Sequence[Tensor]
        if parent.index in self.values_by_word:
            parts = self.values_by_word[parent.index]
        else:
            parts = self.split_by_word(self.state.values[parent.index])
        if parent.reach.kind == "same":
            return lambda word: parts[word]
        nobody = torch.zeros_like(parts[0]) if parts else get_initial_value(self.state, parent)
        there = get_present_mask(self.state, self.state.network.specs[parent.index].group.word_stack)
        if there is None:
            return lambda word: parts[word - 1] if word else nobody
        own = nobody.dim() - there.dim()
        here = [each.reshape(*each.shape, *[1] * own) for each in self.split_by_word(there)]
        return lambda word: torch.where(here[word - 1], parts[word - 1], nobody) if word else nobody

    # recurrent maps of the same words, as one product

    def find_fusable_maps(self, spec: NodeSpec) -> list[NodeSpec]:
        """The recurrent maps that are made together with one: of the same x from outside, and of the same h."""
        if not self.is_recurrent_map(spec):
            return []

        def read_sources(candidate: NodeSpec) -> list[tuple[object, ...]]:
            return [(given.index, given.reach) for given in candidate.parents]

        fusable = [
            other
            for index, other in self.specs.items()
            if index not in self.known_values
            and self.is_recurrent_map(other)
            and read_sources(other) == read_sources(spec)
        ]
        return sorted(fusable, key=_get_activation)

    def is_recurrent_map(self, spec: NodeSpec) -> bool:
        """True for a recurrent map without plates of a word from outside and of what came before it in the group."""
        if not isinstance(spec.tpm, Recur) or spec.group.plates:
            return False
        x, h = spec.parents
        inside = x.index not in self.values_by_word and h.index in self.values_by_word and h.reach.kind == "before"
        return inside and self.is_single(x) and self.is_single(h)

    def build_fused_step(self, specs: Sequence[NodeSpec]) -> WordStep:
        """Several recurrent maps: `W x + b` of all words, then at each word `+ U h`, and their activations."""
        ats = [build_context(self.state, member) for member in specs]
        x, h = (self.make_reader(given) for given in specs[0].parents)
        W, U = (torch.cat([at[name] for at in ats]) for name in "WU")
        whole = self.state.values[specs[0].parents[0].index]
        bias = torch.cat([at.parameters.get("bias", W.new_zeros(len(at["W"]))) for at in ats])
        if specs[0].parents[0].reach.kind == "same":
            ready = self.split_by_word(functional.linear(whole, W, bias))
        else:
            ready = [functional.linear(x(word), W, bias) for word in range(self.num_words)]
        kinds = dict.fromkeys(map(_get_activation, specs))
        alike = {kind: [(m.group.index, m.shape[0]) for m in specs if _get_activation(m) == kind] for kind in kinds}
        acts = [(ACTIVATIONS[kind], some) for kind, some in alike.items()]
        widths = [sum(width for _, width in some) for _, some in acts]

        def step(word: int) -> None:
            raw = _add_map(U, h(word), ready[word]).split_with_sizes(widths, -1)
            for (act, some), each in zip(acts, raw, strict=True):
                made = act(each).split_with_sizes([width for _, width in some], -1)
                for (index, _), value in zip(some, made, strict=True):
                    self.append_value(index, word, value)

        return step


def _add_map(U: Tensor, h: Tensor, offset: Tensor) -> Tensor:
    """`U h + ready`, in one operation where both have the same dims."""
    if h.shape[:-1] != offset.shape[:-1]:
        return functional.linear(h, U) + offset
    flat = torch.addmm(offset.reshape(-1, len(U)), h.reshape(-1, U.shape[-1]), U.mT)
    return flat.reshape(offset.shape)


def _get_activation(spec: NodeSpec) -> str:
    assert isinstance(spec.tpm, Recur)
    return spec.tpm.activation

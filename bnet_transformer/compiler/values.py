"""Second pass, plan to values: every family as one tensor, in the layout `[*enumerated, batch, *plates, word, *shape]`.

A dim on which a value does not depend has size 1, so values broadcast: all states of a selector share what lies
before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bnet_transformer.axes import WORD
from bnet_transformer.compiler.course import Course
from bnet_transformer.compiler.fused import Reading, entries, fused, is_plain, maps, reading_of, told_apart
from bnet_transformer.compiler.plan import Fold, Plan
from bnet_transformer.compiler.scan import Scan
from bnet_transformer.compiler.seeing import full, given_value, seen, standing
from bnet_transformer.errors import BNetError, ReadingError
from bnet_transformer.network import Input, Member
from bnet_transformer.tpm import Affine, At, Attention, Select


def plan_to_values(plan: Plan, course: Course) -> dict[int, Tensor]:
    """The value of every family of a plan."""
    for group, done in zip(plan.groups, plan.done, strict=True):
        if group[0] in plan.left:
            pass
        elif group[0] in plan.folds:
            course.values[group[0]] = folded(course, plan.folds[group[0]])
        elif group[0] in plan.together:
            course.values |= made_together(course, plan.together[group[0]])
        elif group[0] in course.values:
            pass  # made together with an earlier one
        elif group[0] in plan.recurrent:
            course.values |= Scan(course, group).run(done)
        else:
            course.values[group[0]] = value(course, group[0])
        if group[0] in course.rows and group[0] not in course.known:
            course.values[group[0]] = _by_rows(course, group[0])
        if group[0] in course.patched and group[0] not in plan.recurrent:
            course.values[group[0]] = _patched(course, group[0])
        if group[0] in course.gates:
            course.values[group[0]] = course.values[group[0]] * course.gates[group[0]]
        if group[0] in course.nudges:
            made = course.values[group[0]]
            course.values[group[0]] = made + course.nudges[group[0]].to(made.device)
        for index in done:
            course.values.pop(index, None)
    return course.values


def _patched(course: Course, index: int) -> Tensor:
    """The value of a family some of whose nodes are set."""
    (set_, which), member, made = course.patched[index], course.network.members[index], course.values[index]
    if member.tpm.kind == "discrete" and not set_.is_floating_point():
        set_ = full(course, member, member.tpm.emit(standing(course, member), set_))
    own = set_.dim() - course.layout.rank
    return torch.where(which.reshape(*which.shape, *[1] * own).to(made.device), set_.to(made.device), made)


def _by_rows(course: Course, index: int) -> Tensor:
    """The value of a family some of whose nodes mix by rows that were set, in place of their `P(j | i)`."""
    (rows, which), member = course.rows[index], course.network.members[index]
    assert isinstance(member.tpm, Attention)
    _, parents = seen(course, member)
    mix = full(course, member, member.tpm.mix(rows.to(parents[0].device), *parents))
    return torch.where(which[..., None].to(mix.device), mix, course.values[index])


def value(course: Course, index: int) -> Tensor:
    """The value of one family, for all its words at once."""
    member = course.network.members[index]
    found = given_value(course, index)
    if found is not None:
        return found
    if isinstance(member.tpm, Select) and (dims := _all_states(course, member)):
        return entries(course.parameters[f"{member.owner}.values"], dims, course.layout.rank)
    at, parents = seen(course, member)
    if index in course.readings:
        return full(course, member, _with_reading(course, member, at, parents))
    return full(course, member, computed(course, member, at, parents))


def _all_states(course: Course, member: Member) -> list[int]:
    """The dims along which the parents of a family run through all their states; none where some do not."""
    enumerated = course.layout.enumerated
    each = {given.parent for given in member.inputs}
    plain = all(not (given.pick or given.over) and given.reach.kind == "same" for given in member.inputs)
    plain = plain and not each & course.patched.keys()
    if member.family.plates or not plain or len(each) < len(member.inputs) or not each <= {*enumerated}:
        return []
    return [enumerated.index(given.parent) for given in member.inputs]


def _with_reading(course: Course, member: Member, at: At, parents: list[Tensor]) -> Tensor:
    """The value of a family, whose `P(j | i)` is kept beside it: an attention is computed once for both."""
    tpm = member.tpm
    if isinstance(tpm, Attention) and is_plain(tpm, member, parents):
        whole, causal = _unmasked(course, member)
        weights, mix = told_apart(reading_of(tpm, at, parents, whole=whole, causal=causal))
        found = mix + parents[-1] if tpm.residual else mix
    else:
        told = tpm.reading(at, *parents)
        if told is None:
            raise ReadingError(member.family.name, expected="attention P(j | i)", got=tpm.why_no_reading())
        weights, found = told, computed(course, member, at, parents)
    course.readings[member.family.index] = course.layout.full(weights, 1)
    return found


def computed(course: Course, member: Member, at: At, parents: list[Tensor]) -> Tensor:
    """What a TPM makes of what it sees, by a fused operation where there is one."""
    whole, causal = _unmasked(course, member)
    found = fused(member, at, parents, whole=whole, causal=causal)
    if found is not None:
        return found
    found = member.tpm.value(at, *parents)
    if not isinstance(found, Tensor) or found.shape[max(0, found.dim() - len(member.shape)) :] != member.shape:
        got = f"one of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
        what = f"{member.family.name} ({type(member.tpm).__name__})"
        raise BNetError(what, expected=f"a value of shape {member.shape}, as it says", got=got)
    return found


def made_together(course: Course, indices: tuple[int, ...]) -> dict[int, Tensor]:
    """Several maps of one vector, as one product."""
    members = [course.network.members[index] for index in indices]
    seen_ = [seen(course, member) for member in members]
    biases = [at["bias"] if isinstance(m.tpm, Affine) else None for m, (at, _) in zip(members, seen_, strict=True)]
    made = maps([parents[0] for _, parents in seen_], seen_[0][1][1], biases)
    return {m.family.index: full(course, m, each) for m, each in zip(members, made, strict=True)}


def folded(course: Course, fold: Fold) -> Tensor:
    """An attention with the maps around it folded in: `softmax(x_i . (W_q^T W_k) x_j)`, and W_v after the mix."""
    at, parents, residual = _folded_in(course, fold)
    mix = computed(course, fold.member, at, parents)
    if fold.W_v is not None:
        (mix,) = maps([course.values[fold.W_v.parent]], mix, [None])
    return full(course, fold.member, mix if residual is None else mix + residual)


def _folded_in(course: Course, fold: Fold) -> tuple[At, list[Tensor], Tensor | None]:
    """What the attention of a fold sees, and the residual that is added to what it makes."""
    at, parents = seen(course, fold.member)
    residual = parents.pop() if fold.residual else None
    W_q, W_k = course.values[fold.W_q.parent], course.values[fold.W_k.parent]
    (parents[0],) = maps([W_k.mT @ W_q], parents[0], [None])
    return at, parents, residual


def attended(course: Course, member: Member, fold: Fold | None) -> tuple[Reading, Tensor | None, Tensor | None]:
    """What a plain attention reads; then W_v, where it is applied to the mix; then the residual."""
    if fold is not None:
        at, parents, residual = _folded_in(course, fold)
        member = fold.member
    else:
        at, parents = seen(course, member)
    whole, causal = _unmasked(course, member)
    tpm = member.tpm
    assert isinstance(tpm, Attention)
    if fold is None:
        residual = parents[-1] if tpm.residual else None
    W_v = None if fold is None or fold.W_v is None else course.values[fold.W_v.parent]
    return reading_of(tpm, at, parents, whole=whole, causal=causal), W_v, residual


def _unmasked(course: Course, member: Member) -> tuple[bool, bool]:
    """Whether all words are there and every one reads every one, or those up to itself: no mask is needed then."""
    reaches = {_kind(course, given) for given in member.inputs if WORD in given.over}
    bare = not course.present
    return bare and reaches == {"every"}, bare and reaches == {"causal"}


def _kind(course: Course, given: Input) -> str:
    """The kind of a reach; that of recent words is causal where no word stands further back."""
    words = course.words[course.network.members[given.parent].family.words or ""]
    near = given.reach.kind == "recent" and words <= given.reach.width + 1
    return "causal" if near else given.reach.kind

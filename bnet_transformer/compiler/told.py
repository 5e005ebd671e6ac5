"""What a module is told, checked and laid out: names of families, values, masks.

Forms and types are always checked. What only the numbers tell (ids outside their table, a word that is left nothing to
read) is checked where they can be read and are looked at: not within `torch.compile`, nor in a step of training, whose
data are looked at as they come in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from bnet_transformer._core.checks import check_mapping
from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.course import Course, Values, present_alone
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, UnsupportedError, unknown_name_error
from bnet_transformer.tpm.arrays import is_dense


def wanted(want: object) -> tuple[str, ...]:
    """The names of wanted families, from a list of them."""
    if isinstance(want, str):
        raise BNetError("want", expected="a list of families", actual=repr(want), allowed=f"want=[{want!r}]")
    if not isinstance(want, Sequence) or not all(isinstance(name, str) for name in want):
        raise BNetError("want", expected="a list of families", actual=want)
    return tuple(want)


def by_family(network: Network, what: str, told: object) -> dict[int, tuple[str, Tensor]]:
    """Values by the number of their family, each with how a message calls it; names that are none are refused."""
    values = {} if told is None else check_mapping(what, told)
    return {network.graph.get_group(name).index: (f"{what}[{name!r}]", value) for name, value in values.items()}


def check_value(
    network: Network,
    member: NodeSpec,
    what: str,
    value: object,
    *,
    words: Mapping[str, int],
    batch: int | None,
    like: Tensor | None,
) -> None:
    """Refuse a value that is not `[batch, *plates, word, *shape]`, or of the wrong type; see `form`.

    `batch` None allows no such dim; `like` is a parameter, whose type is the net's. Values may come from any device.
    """
    if not is_dense(value):
        raise BNetError(
            what, expected="a tensor", actual=value, allowed="a dense one" if torch.is_tensor(value) else None
        )
    whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    states = member.tpm.kind == "discrete" or member.tpm.is_index_valued
    if whole and not states:
        wanted_type = "" if like is None else f" ({like.dtype}, as the parameters)"
        raise BNetError(what, expected=f"real numbers{wanted_type}", actual=f"{value.dtype}")
    if not whole and (member.tpm.is_index_valued or not value.is_floating_point()):
        kind = "ids" if member.tpm.kind == "input" else "states"
        raise BNetError(
            what, expected=f"whole numbers, the {kind}" if states else "real numbers", actual=f"{value.dtype}"
        )
    if like is not None and not whole and value.dtype != like.dtype:
        hint = f"net.to({value.dtype}), or {what} in {like.dtype}"
        raise BNetError(what, expected=f"{like.dtype}, as the parameters", actual=f"{value.dtype}", allowed=hint)
    lead, shape = lead_of(network, member, words), () if whole else member.shape
    batches: list[tuple[int, ...]] = [(), (1,)] if batch is None else [(), (1,), (batch,)]
    if not is_one_of(value.shape, [(*b, *lead, *shape) for b in batches]):
        if batch is None:
            wanted_shape = f"one value for all sentences, of shape {(*lead, *shape)}"
        else:
            wanted_shape = f"{form(member, state=whole)} of shape {(batch, *lead, *shape)}"
        raise BNetError(what, expected=wanted_shape, actual=f"shape {tuple(value.shape)}")


def is_one_of(shape: Sequence[int], shapes: Sequence[Sequence[int]]) -> bool:
    """True where a shape is one of these, size by size: `torch.compile` may know sizes as symbols."""
    for other in shapes:
        if len(shape) == len(other) and all([n == m for n, m in zip(shape, other, strict=True)]):  # noqa: C419
            return True
    return False


def lead_of(network: Network, member: NodeSpec, words: Mapping[str, int]) -> tuple[int, ...]:
    """How many nodes a family has along each of its plates, the word last."""
    family = member.group
    sizes = tuple(network.graph.plate_sizes[plate] for plate in family.plates)
    return sizes if family.word_stack is None else (*sizes, words[family.word_stack])


def form(member: NodeSpec, *, state: bool = False) -> str:
    """How a value (or state) of a family lies, as a message says it: `[batch, head, word, 4]`."""
    family, shape = member.group, () if state else member.shape
    axes = ["batch", *family.plates, *([WORD] if family.word_stack is not None else []), *map(str, shape)]
    return f"[{', '.join(axes)}]"


def batch_of(network: Network, told: Mapping[int, tuple[str, Tensor]], least: int) -> int:
    """How many sentences there are: what is told of one of them holds for all."""
    found = [least]
    for index, (_, value) in told.items() if least == 1 else ():
        member = network.specs[index]
        shape = member.shape if isinstance(value, Tensor) and value.is_floating_point() else ()
        rank = len(member.group.plates) + (member.group.word_stack is not None) + len(shape)
        if is_dense(value) and value.dim() == rank + 1:
            found.append(value.shape[0])
    return max(found)


def laid_out(course: Course, index: int, value: Tensor, shape_of: Sequence[int] | None = None) -> Tensor:
    """A value `[batch, *plates, word, *shape]` (or without batch) in the layout; the shape is the family's own, or ()
    of states, or that which is told."""
    member = course.network.specs[index]
    family, layout = member.group, course.layout
    own = tuple(shape_of) if shape_of is not None else member.shape if value.is_floating_point() else ()
    rank = len(own) + len(family.plates) + (family.word_stack is not None)
    value = value if value.dim() > rank else value.unsqueeze(0)
    shape = [1] * layout.batch + [value.shape[0]] + [1] * (len(layout.plates) + 1)
    for k, plate in enumerate(family.plates):
        shape[layout.axis(plate)] = value.shape[1 + k]
    if family.word_stack is not None:
        shape[layout.word] = value.shape[1 + len(family.plates)]
    return value.reshape(*shape, *own)


def received(course: Course, told: Mapping[int, tuple[str, Tensor]]) -> dict[int, Tensor]:
    """Values in the layout, states as whole numbers of their table; what stands at absent words becomes zero."""
    found = {}
    for index, (what, value) in told.items():
        laid = laid_out(course, index, value if value.is_floating_point() else value.long())
        found[index] = present_alone(course, course.network.specs[index].group.word_stack, laid)
        check_states(course, index, what, found[index])
    return found


def told_gates(network: Network, gates: object, batch: int, like: Tensor | None) -> dict[int, Tensor]:
    """By what the values of families are multiplied, `[batch, *plates]`, by the number of their family."""
    found = {}
    for index, (what, value) in by_family(network, "gates", gates).items():
        member = network.specs[index]
        after, states = index in network.graph.recurrent, member.tpm.kind == "discrete" or member.tpm.states is not None
        if states or after or member.tpm.is_random:
            got = "words one after another" if after else "states" if states else "one that is random"
            raise UnsupportedError(what, expected="vectors, a function of their parents, all words at once", actual=got)
        sizes = tuple(network.graph.plate_sizes[plate] for plate in member.group.plates)
        fits = is_dense(value) and value.dim() == 1 + len(sizes) and value.shape[1:] == sizes
        fits = fits and (len(value) in (1, batch) or (batch == 1 and len(value) > 0))
        if not fits or (like is not None and (value.dtype, value.device) != (like.dtype, like.device)):
            shape = f"[{', '.join(['batch', *member.group.plates])}] of shape {(batch, *sizes)}"
            told = f"{value.dtype} of shape {tuple(value.shape)} on {value.device}" if is_dense(value) else value
            where = "" if like is None else f", {like.dtype} on {like.device}, as the parameters"
            raise BNetError(what, expected=f"real numbers {shape}{where}", actual=told)
        found[index] = value
    return found


def gates_in(course: Course, gates: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Gates in the layout."""
    found = {}
    for index, value in gates.items():
        member = course.network.specs[index]
        own = [1] * len(member.shape)
        word = [] if member.group.word_stack is None else [1]
        found[index] = laid_out(course, index, value.reshape(*value.shape, *word, *own), own)
    return found


def check_states(course: Course, index: int, what: str, value: Tensor) -> None:
    """Refuse ids and states that there are not."""
    if value.is_floating_point() or not value.numel() or not (course.check_values and readable(value)):
        return
    low, high = (int(end) for end in value.aminmax())
    states = course.count_states(index)
    if not 0 <= low <= high < states:
        kind = "ids" if course.network.specs[index].tpm.kind == "input" else "states"
        raise BNetError(what, expected=f"{kind} from 0 to {states - 1}", actual=low if low < 0 else high)


def readable(value: Tensor) -> bool:
    """True where the numbers of a tensor can be looked at."""
    return not torch.compiler.is_compiling() and not value.is_meta and type(value) in (Tensor, nn.Parameter)


def check_mask(
    mask: Values | None, words: Mapping[str, int], batch: int, *, check_values: bool = True
) -> dict[str, Tensor]:
    """The words that are present, by stack: booleans, in every sentence some."""
    if mask is None:
        return {}
    if not isinstance(mask, Mapping) and len(words) > 1:
        got = "one tensor" if isinstance(mask, Tensor) else mask
        raise BNetError("mask", expected="a mapping from stack: " + ", ".join(words), actual=got)
    if not isinstance(mask, Mapping) and not words:
        raise BNetError("mask", expected="None: the net has no words", actual=mask)
    by_stack = dict(mask) if isinstance(mask, Mapping) else {next(iter(words)): mask}
    for stack, present in by_stack.items():
        if stack not in words:
            raise unknown_name_error("stack of mask", stack, words)
        what = f"mask[{stack!r}]" if stack else "mask"
        wanted_shape = (batch, words[stack])
        fits = is_dense(present) and is_one_of(present.shape, [wanted_shape, (1, words[stack])])
        if not fits or present.dtype != torch.bool:
            told = f"{present.dtype} of shape {tuple(present.shape)}" if is_dense(present) else present
            raise BNetError(what, expected=f"booleans of shape {wanted_shape}, true where a word is", actual=told)
        if check_values and readable(present) and not bool((some := present.any(-1)).all()):
            which = int((~some).nonzero()[0])
            raise BNetError(f"{what}, sentence {which}", expected="at least one word that is present", actual="none")
    return by_stack


def check_read(course: Course, members: Iterable[NodeSpec]) -> None:
    """Refuse a mask that leaves a present word nothing to read, where its TPM cannot read nothing."""
    done = set()
    for member in members:
        if member.group.index in course.known or member.tpm.can_read_empty:
            continue
        for given in member.parents:
            parent = course.network.specs[given.index].group
            key = (given.reach, member.group.word_stack, parent.word_stack)
            if WORD in given.over and parent.word_stack in course.present and key not in done:
                done.add(key)
                _check_reach(course, member, given, parent.word_stack or "")


def _check_reach(course: Course, member: NodeSpec, given: ParentSpec, words: str) -> None:
    own = member.group.word_stack
    if given.reach.kind == "every" or (own == words and given.reach.kind in ("causal", "window", "recent")):
        return  # each sentence has a word, and each word reads itself
    there = course.present[words]
    if not readable(there):
        return
    n, m = 1 if own is None else course.words[own], course.words[words]
    pairs = torch.tensor(given.reach.matrix(n, m), device=there.device)
    nothing = ~(pairs & there[:, None, :]).any(-1)
    nothing = nothing & course.present[own] if own is not None and own in course.present else nothing
    if bool(nothing.any()):
        sentence, word = nothing.nonzero()[0].tolist()
        who = member.group.name if own is None else f"word {word} of {member.group.name}"
        raise BNetError(
            f"mask, sentence {sentence}, {who}",
            expected=f"at least one present word of {course.network.specs[given.index].group.name} to read",
            actual=f"none (reach {given.reach})",
        )

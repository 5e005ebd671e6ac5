"""The compiled net as an `nn.Module`: shares the net's parameters, computes only what is wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bnet_transformer.compiler.plan import Plan, network_to_plan
from bnet_transformer.compiler.values import Course, Layout, count_states, plan_to_values, seen
from bnet_transformer.errors import BNetError, mapping, unknown
from bnet_transformer.network import Member, Network
from bnet_transformer.tpm import Given

Values = Tensor | Mapping[str, Tensor]


class Module(nn.Module):
    """`module(x, mask=None, want=None, do=None)`: a batch of sentences in, values out.

    `x` is `[batch, word, dim]` vectors or `[batch, word]` ids (a mapping from stack where there are several), `mask`
    is true where a word is present, `want` names families (`"x_1"`); by default the last state or readout. A value is
    `[*states, batch, *plates, word, *shape]`; of a random family its logits or its mean. Parameters are the net's
    own tensors, under their names with `/` for `.`.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        network.one_type()
        self.network = network
        self.store = nn.ParameterDict()
        for name, value in network.parameters.items():
            self.store[name.replace(".", "/")] = nn.Parameter(value, requires_grad=name in network.learnable)
        self.output = output_of(network)
        self._plans: dict[tuple[tuple[str, ...], frozenset[int], frozenset[int]], Plan] = {}
        with contextlib.suppress(BNetError):  # a default that cannot be computed is refused when it is asked for
            self.plan((self.output,), frozenset())

    def forward(
        self,
        x: Values | None = None,
        mask: Values | None = None,
        *,
        want: Sequence[str] | None = None,
        do: Mapping[str, Tensor] | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The wanted values; a dict where `want` is given."""
        names = (self.output,) if want is None else tuple(want)
        course, plan = self.course(names, x, mask, do=do, given=given)
        found = {name: self._wanted(course, name, index) for name, index in zip(names, plan.wanted, strict=True)}
        return found[self.output] if want is None else found

    def course(
        self,
        want: tuple[str, ...],
        x: Values | None = None,
        mask: Values | None = None,
        *,
        do: Mapping[str, Tensor] | None = None,
        given: Mapping[str, Tensor] | None = None,
        enumerate_too: frozenset[int] = frozenset(),
    ) -> tuple[Course, Plan]:
        """All values that the wanted families need, in one layout, and the plan that computed them."""
        parameters = {name: self.store[name.replace(".", "/")] for name in self.network.parameters}
        inputs, words, batch, device = self.inputs(x, given or {})
        set_ = {self.network.graph.family(name).index: value for name, value in mapping("do", do).items()}
        plan = self.plan(want, frozenset(set_), enumerate_too)
        layout = Layout(plan.enumerated, tuple(self.network.graph.sizes))
        dtype = next((p.dtype for p in parameters.values()), torch.get_default_dtype())
        present = self.present(mask, words, batch)
        course = Course(self.network, layout, parameters, {}, words, present, self.training, {}, dtype, device)
        course.known = {index: laid_out(course, index, value) for index, value in {**inputs, **set_}.items()}
        plan_to_values(plan, course)
        return course, plan

    def plan(self, want: tuple[str, ...], known: frozenset[int], enumerate_too: frozenset[int] = frozenset()) -> Plan:
        """The plan of a question, made once."""
        key = (want, known, enumerate_too)
        if key not in self._plans:
            given = {m.family.index for m in self.network.members if isinstance(m.tpm, Given)}
            self._plans[key] = network_to_plan(self.network, want, known | given, enumerate_too)
        return self._plans[key]

    def _wanted(self, course: Course, name: str, index: int) -> Tensor:
        member = self.network.members[index]
        if index in course.values and (member.tpm.kind == "deterministic" or index in course.known):
            return _bare(course, member, course.values[index])
        at, parents = seen(course, member)
        if member.tpm.kind == "discrete":
            return _bare(course, member, torch.log_softmax(member.tpm.logits(at, *parents), -1))
        return _bare(course, member, member.tpm.distribution(at, *parents).mean)

    def inputs(
        self, x: Values | None, given: Mapping[str, Tensor]
    ) -> tuple[dict[int, Tensor], dict[str, int], int, torch.device]:
        """The value of every `Given` family, the words of each stack, the batch."""
        stacks = [stack.name for stack in self.network.declaration.stacks]
        by_stack = dict(x) if isinstance(x, Mapping) else {} if x is None else {stacks[0]: x}
        if len(stacks) > 1 and x is not None and not isinstance(x, Mapping):
            raise BNetError("x", expected="a mapping from stack: " + ", ".join(stacks), got="one tensor")
        inputs: dict[int, Tensor] = {}
        words: dict[str, int] = {}
        for stack, value in by_stack.items():
            if stack not in stacks:
                raise unknown("stack", stack, stacks)
            member = self._main(stack, given)
            if value.dim() < 2:
                raise BNetError("x", expected="[batch, word] ids or [batch, word, dim] vectors", got=tuple(value.shape))
            words[stack] = value.shape[1]
            if member is not None:
                if tuple(value.shape[2:]) != member.shape:
                    wanted = f"[batch, word{''.join(f', {n}' for n in member.shape)}]"
                    raise BNetError("x", expected=wanted, got=f"shape {tuple(value.shape)}")
                inputs[member.family.index] = value
        for name, value in given.items():
            member = self.network.member(name)
            inputs[member.family.index] = value
            if member.family.words is not None:
                words.setdefault(member.family.words, value.shape[1 + len(member.family.plates)])
        missing = [
            m.family.name for m in self.network.members if isinstance(m.tpm, Given) and m.family.index not in inputs
        ]
        if missing or set(stacks) - set(words):
            raise BNetError(
                "x", expected="a value for every given node and stack", got="none for " + ", ".join(missing)
            )
        first = next(iter(inputs.values()), next(iter(by_stack.values()), torch.zeros(1)))
        return inputs, words, first.shape[0], first.device

    def _main(self, stack: str, given: Mapping[str, Tensor]) -> Member | None:
        over = [
            member
            for member in self.network.members
            if isinstance(member.tpm, Given)
            and member.family.words == stack
            and not member.family.plates
            and member.family.name not in given
        ]
        return next(iter([m for m in over if m.tpm.reads_by_index] or over), None)

    def present(self, mask: Values | None, words: Mapping[str, int], batch: int) -> dict[str, Tensor]:
        if mask is None:
            return {}
        by_stack = dict(mask) if isinstance(mask, Mapping) else {next(iter(words)): mask}
        for stack, present in by_stack.items():
            wanted = (batch, words[stack])
            if present.dtype != torch.bool or tuple(present.shape) != wanted:
                got = f"{present.dtype} of shape {tuple(present.shape)}"
                raise BNetError("mask", expected=f"booleans of shape {wanted}, true where a word is", got=got)
        return by_stack


def output_of(network: Network) -> str:
    """The family that a module returns by default: the last readout, else the last state."""
    last = network.members[-1].family
    for stack in network.declaration.stacks:
        nodes = stack.epilogue or stack.slice
        name = f"{stack.name}_{nodes[-1].role}" if stack.name else nodes[-1].role
        families = network.graph.by_stem.get(name, ())
        last = families[-1] if families else last
    return last.name


def laid_out(course: Course, index: int, value: Tensor) -> Tensor:
    """A value `[batch, *plates, word, *shape]` (or without batch) in the layout."""
    member = course.network.members[index]
    family, layout = member.family, course.layout
    discrete = not value.is_floating_point()
    rank = (0 if discrete else len(member.shape)) + len(family.plates) + (family.words is not None)
    value = value if value.dim() > rank else value.unsqueeze(0)
    shape = [1] * layout.batch + [value.shape[0]] + [1] * (len(layout.plates) + 1)
    for k, plate in enumerate(family.plates):
        shape[layout.axis(plate)] = value.shape[1 + k]
    if family.words is not None:
        shape[layout.word] = value.shape[1 + len(family.plates)]
    return value.reshape(*shape, *([] if discrete else member.shape))


def _bare(course: Course, member: Member, value: Tensor) -> Tensor:
    """A value without the dims that its family has not, and without the states on which it does not depend."""
    layout, family = course.layout, member.family
    drop = {k for k in range(layout.batch) if value.shape[k] == 1 and count_states(course, layout.enumerated[k]) > 1}
    drop |= {layout.axis(plate) for plate in layout.plates if plate not in family.plates}
    drop |= {layout.word} if family.words is None else set()
    full = list(value.shape)
    for plate in family.plates:
        full[layout.axis(plate)] = course.network.graph.sizes[plate]
    if family.words is not None:
        full[layout.word] = course.words[family.words]
    return value.expand(full).reshape([size for k, size in enumerate(full) if k not in drop])

"""The compiled net as an `nn.Module`: shares the net's parameters, computes only what is wanted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bnet_transformer._core.checks import check_int, check_mapping
from bnet_transformer.compiler.evaluate import plan_to_values
from bnet_transformer.compiler.execution_state import (
    ExecutionRequest,
    ExecutionState,
    StackTensors,
    TensorLayout,
    ValidatedInputs,
    gather_parents,
)
from bnet_transformer.compiler.plan import Plan, Requirements, find_requirements, network_to_plan
from bnet_transformer.compiler.validate_inputs import (
    check_mask,
    check_masked_reads,
    check_value,
    describe_shape,
    get_plate_sizes,
    index_by_group,
    infer_batch_size,
    lay_out_gates,
    lay_out_value,
    lay_out_values,
    validate_gates,
    validate_outputs,
)
from bnet_transformer.data.encode import check_word_counts
from bnet_transformer.data.word_encoder import find_main_input
from bnet_transformer.declare import Network, NodeSpec, as_network
from bnet_transformer.errors import BNetError, UnsupportedError, unknown_name_error
from bnet_transformer.tpm.arrays import is_dense

T = TypeVar("T")


class CompiledModule(nn.Module):
    """`module(x, mask=None, want=None, do=None)`: a batch of sentences in, values out.

    `x` is `[batch, word, dim]` vectors or `[batch, word]` ids (a mapping from stack where there are several), `mask`
    is true where a word is present, `want` names families (`"x_1"`); by default the last state or readout. A value is
    `[*states, batch, *plates, word, *shape]`; of a random family its logits or its mean. Parameters are the net's
    own tensors, under their names with `/` for `.`.
    """

    def __init__(self, network: Network, *, check_values: bool = True) -> None:
        super().__init__()
        network = as_network(network)
        network.check_single_dtype()
        self.network = network
        self.store = nn.ParameterDict()
        for name, value in network.parameters.items():
            self.store[name.replace(".", "/")] = nn.Parameter(value, requires_grad=name in network.learnable)
        self.output = find_default_output(network)
        self._stacks = network.graph.word_stacks
        self.max_width = max((n for member in network.specs for n in member.shape), default=0)
        self._input_specs = [member for member in network.specs if member.tpm.kind == "input"]
        self._input_indices = frozenset(member.group.index for member in self._input_specs)
        self._cache: dict[Hashable, Any] = {}
        self.check_values = check_values
        tables = {given.reach for m in network.specs for given in m.parents if given.reach.kind == "mask"}
        self._reach_tables = {reach: f"table_{k}" for k, reach in enumerate(sorted(tables, key=repr))}
        for reach, name in self._reach_tables.items():
            self.register_buffer(name, torch.tensor(reach.table), persistent=False)
        if self.find_requirements((self.output,), ()).fault is None:  # else it is refused when it is asked for
            for fold in (False, True):
                self.plan((self.output,), frozenset(), fold=fold)

    def forward(
        self,
        x: StackTensors | None = None,
        mask: StackTensors | None = None,
        *,
        want: Sequence[str] | None = None,
        do: Mapping[str, Tensor] | None = None,
        given: Mapping[str, Tensor] | None = None,
        gates: Mapping[str, Tensor] | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The wanted values; a dict where `want` is given.

        The values of a family are multiplied by its `gates`, `[batch, *plates]`: zero shuts a head off.
        """
        names = (self.output,) if want is None else validate_outputs(want)
        course, plan = self.run(ExecutionRequest(names, x, mask, given, do, gates=gates))
        found = {
            name: self.compute_output(course, name, index) for name, index in zip(names, plan.outputs, strict=True)
        }
        return found[self.output] if want is None else found

    def attention_weights(
        self,
        x: StackTensors | None = None,
        mask: StackTensors | None = None,
        *,
        nodes: Sequence[str] | None = None,
        want: Sequence[str] = (),
        do: Mapping[str, Tensor] | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`P(j | i)` of the families that read words (`of`; all by default), and the wanted values, in one course.

        A reading is `[*states, batch, *plates, word, word read]`.
        """
        readers = {
            m.group.name: m.group.index for m in self.network.specs if m.has_word_attention and not m.tpm.is_random
        }
        for name in validate_outputs([] if nodes is None else nodes):
            if name not in readers:
                raise unknown_name_error("family that reads words", name, readers)
        asked = {name: readers[name] for name in (readers if nodes is None else nodes)}
        names = validate_outputs(want)
        course, plan = self.run(ExecutionRequest(names, x, mask, given, do, record_attention=frozenset(asked.values())))
        found = {}
        for name, index in asked.items():
            weights = course.attention_weights[index]
            if weights is None:
                member = self.network.specs[index]
                got = "one that is set" if index in course.known else "one that is computed word after word"
                raise UnsupportedError(member.group.name, expected="a family that reads all words at once", actual=got)
            found[name] = _drop_absent_dims(course, self.network.specs[index], weights)
        own = zip(names, plan.outputs, strict=True)
        return found, {name: self.compute_output(course, name, index) for name, index in own}

    def run(self, request: ExecutionRequest) -> tuple[ExecutionState, Plan]:
        """Compute all values that the wanted families need (but for the `left`), in one layout.

        Args:
            request: What is computed, of which sentences, under which interventions.

        Returns:
            The state with the values, by family, and the plan that it followed.

        Raises:
            UnsupportedError: Where one batched pass cannot compute it; `find_requirements` says so beforehand.

        >>> import bnet_transformer as bt
        >>> module = bt.bayesuvius(dim=4).module()
        >>> state, plan = module.run(Request(("x_1",), torch.zeros(2, 3, 4)))
        >>> state.values[plan.wanted[0]].shape  # [state of c, batch, word, feature]
        torch.Size([2, 2, 3, 4])
        """
        x, readings, nudges = request.x, request.record_attention, request.perturbations or {}
        inputs, words, batch, device = x if isinstance(x, ValidatedInputs) else self.validate_inputs(x, request.given)
        set_ = self.validate_values("do", request.do, words, batch) | self.validate_values(
            "evidence", request.observed, words, batch
        )
        batch = infer_batch_size(self.network, set_, batch) if set_ else batch
        gates = validate_gates(self.network, request.gates, batch, next(iter(self.store.values()), None))
        batch = max([batch, *map(len, gates.values())])
        patches = request.patched or {}
        some = self.validate_values("do", {name: value for name, (value, _) in patches.items()}, words, batch)
        rows = {self.network.graph.get_group(name).index: row for name, row in (request.attention_rows or {}).items()}
        # One weight folds maps into an attention where there are more words than features. Then there are no
        # values v to mix by a row, no P(j | i) to keep and nothing to add to.
        fold = not (readings or nudges or rows) and batch * max([0, *words.values()]) > self.max_width
        apart = frozenset({*some, *rows, *gates, *nudges})
        known, sets = frozenset(set_), (request.enumerate_too, request.deferred, apart, readings)
        plan = self.plan(request.outputs, known, *sets, fold=fold, word_counts=words)
        parameters = {name: self.store[name.replace(".", "/")] for name in self.network.parameters}
        check_values = self.check_values if request.check_values is None else request.check_values
        present = check_mask(request.mask, words, batch, check_values=check_values)
        course = ExecutionState(
            self.network,
            TensorLayout(plan.enumerated, tuple(self.network.graph.plate_sizes)),
            parameters,
            {},
            words,
            present,
            self.training if request.training is None else request.training,
            {},
            next((p.dtype for p in parameters.values()), self.network.default_dtype),
            device,
            perturbations=nudges,
            is_multi_device=any([value.device != device for value in parameters.values()]),  # noqa: C419
            reach_tables={reach: getattr(self, name) for reach, name in self._reach_tables.items()},
            check_values=check_values,
        )
        course.known = lay_out_values(course, {**inputs, **set_})
        for (index, value), (_, which) in zip(lay_out_values(course, some).items(), patches.values(), strict=True):
            course.patched[index] = value, lay_out_value(course, index, which)
        for index, (weights, which) in rows.items():
            own = weights.shape[-1:]
            course.attention_rows[index] = (
                lay_out_value(course, index, weights, own),
                lay_out_value(course, index, which),
            )
        course.attention_weights.update(dict.fromkeys(readings))
        course.gates.update(lay_out_gates(course, gates))
        if present and check_values:
            groups = (*plan.components, plan.outputs, request.deferred)
            check_masked_reads(course, (self.network.specs[index] for group in groups for index in group))
        plan_to_values(plan, course)
        return course, plan

    def memoize(self, key: Hashable, make: Callable[[], T]) -> T:
        """What follows from the net and a key alone, made once: plans, analyses of questions, compiled functions.

        Args:
            key: What it depends on besides the net; begins with a name of its own.
            make: Makes it; called where the key is new.
        """
        if key not in self._cache:
            self._cache[key] = make()
        found: T = self._cache[key]
        return found

    def plan(
        self,
        outputs: tuple[str, ...],
        known: frozenset[int],
        enumerate_too: frozenset[int] = frozenset(),
        deferred: frozenset[int] = frozenset(),
        patched: frozenset[int] = frozenset(),
        transient: frozenset[int] = frozenset(),
        *,
        fold: bool = False,
        word_counts: Mapping[str, int] | None = None,
    ) -> Plan:
        """The plan of a question, made once; `build_length_inputs` are for the messages of what cannot be planned."""
        options: dict[str, Any] = {"fold": fold, "deferred": deferred, "patched": patched, "transient": transient}
        return self.memoize(
            ("plan", outputs, known, enumerate_too, *options.values()),
            lambda: network_to_plan(
                self.network, outputs, known | self._input_indices, enumerate_too, word_counts=word_counts, **options
            ),
        )

    def find_requirements(
        self,
        outputs: Sequence[str],
        known: Collection[int],
        enumerate_too: Collection[int] = (),
        patched: Collection[int] = (),
        word_counts: Mapping[str, int] | None = None,
    ) -> Requirements:
        """What a question needs and why it cannot be planned, found once: `compiler.plan.find_needs`, inputs known."""
        indices = [self.network.graph.get_group(name).index for name in outputs]
        known, some = self._input_indices.union(known), frozenset(patched)
        return self.memoize(
            ("needs", tuple(indices), known, frozenset(enumerate_too), some),
            lambda: find_requirements(
                self.network, indices, known, enumerate_too, patched=some, word_counts=word_counts
            ),
        )

    def compute_output(self, state: ExecutionState, name: str, index: int) -> Tensor:
        """The value of a family in a course, of a random one its logits or its mean, without dims that it has not."""
        member = self.network.specs[index]
        if index in state.values and (member.tpm.kind == "deterministic" or index in state.known):
            return _drop_absent_dims(state, member, state.values[index])
        at, parents = gather_parents(state, member)
        if member.tpm.kind == "discrete":
            logits = torch.log_softmax(member.tpm.logits(at, *parents), -1)
            return _drop_absent_dims(state, member, state.layout.pad_dims(logits, 1))
        return _drop_absent_dims(state, member, member.tpm.distribution(at, *parents).mean)

    def validate_values(
        self, subject: str, values: object, word_counts: Mapping[str, int], batch: int
    ) -> dict[int, tuple[str, Tensor]]:
        """Values by the number of their family, each with its name in messages; wrong names and forms are refused."""
        found = index_by_group(self.network, subject, values)
        batch = infer_batch_size(self.network, found, batch)
        for index, (name, value) in found.items():
            self._check_value(index, name, value, word_counts, batch)
        return found

    def _check_value(self, index: int, subject: str, value: Tensor, word_counts: Mapping[str, int], batch: int) -> None:
        like = next(iter(self.store.values()), None)
        check_value(
            self.network, self.network.specs[index], subject, value, word_counts=word_counts, batch=batch, like=like
        )

    def validate_inputs(self, x: StackTensors | None, given: Mapping[str, Tensor] | None) -> ValidatedInputs:
        """What a batch gives, checked; a `ExecutionRequest` takes it in place of `x` and `given`."""
        stacks = self._stacks
        if not stacks and isinstance(x, Tensor):
            raise BNetError("x", expected="None: the net has no words", actual="a tensor", allowed="given=, do=")
        if len(stacks) > 1 and x is not None and not isinstance(x, Mapping):
            raise BNetError("x", expected="a mapping from stack: " + ", ".join(stacks), actual="one tensor")
        by_stack = dict(x) if isinstance(x, Mapping) else {} if x is None else {stacks[0]: x}
        inputs = index_by_group(self.network, "given", given)
        for index, (what, _) in inputs.items():
            if self.network.specs[index].tpm.kind != "input":
                hint = ", ".join(m.group.name for m in self._input_specs) + "; do= sets any node"
                raise BNetError(what, expected="a node that is given", actual="one that is not", allowed=hint)
        words: dict[str, int] = {}
        for stack, value in by_stack.items():
            if stack not in stacks:
                raise unknown_name_error("stack", stack, stacks)
            what = f"x[{stack!r}]" if len(stacks) > 1 else "x"
            member = self._find_main_input(stack, what, check_mapping("given", given))
            if not is_dense(value) or value.dim() < 2:
                got = tuple(value.shape) if is_dense(value) else value
                raise BNetError(what, expected="[batch, word] ids or [batch, word, dim] vectors", actual=got)
            words[stack] = value.shape[1]
            if member is not None:
                inputs[member.group.index] = what, value
        for index, (what, value) in inputs.items():
            family = self.network.specs[index].group
            if family.word_stack is not None:
                if not is_dense(value) or value.dim() < 2 + len(family.plates):
                    got = tuple(value.shape) if is_dense(value) else value
                    raise BNetError(what, expected=describe_shape(self.network.specs[index]), actual=got)
                words.setdefault(family.word_stack, value.shape[1 + len(family.plates)])
        return self._complete_inputs(inputs, words, by_stack)

    def _complete_inputs(
        self, inputs: dict[int, tuple[str, Tensor]], words: dict[str, int], by_stack: Mapping[str, Tensor]
    ) -> ValidatedInputs:
        """The inputs, none missing, all of the right form for words that the net can read."""
        given = [*by_stack.values(), *(value for _, value in inputs.values())]
        first = given[0] if given else torch.zeros(1)
        for member in self._input_specs:
            default = member.tpm.default
            words_known = member.group.word_stack is None or member.group.word_stack in words
            if default is not None and words_known and member.group.index not in inputs:
                lead = get_plate_sizes(self.network, member, words)
                inputs[member.group.index] = member.group.name, torch.full((1, *lead), default, device=first.device)
        missing = [m.group.name for m in self._input_specs if m.group.index not in inputs]
        missing += [f"stack {stack!r}" for stack in self._stacks if stack not in words]
        if missing:
            raise BNetError(
                "x", expected="a value for every given node and stack", actual="none for " + ", ".join(missing)
            )
        batch = infer_batch_size(self.network, inputs, first.shape[0] if by_stack else 1)
        if batch == 0:
            what = ", ".join(what for what, _ in inputs.values())
            raise BNetError(what, expected="at least one sentence", actual="none")
        for index, (what, value) in inputs.items():
            self._check_value(index, what, value, words, batch)
        if not torch.compiler.is_compiling():
            self.memoize(("words", *words.items()), lambda: self._check_words(words))
        return ValidatedInputs(inputs, words, batch, first.device)

    def _check_words(self, word_counts: Mapping[str, int]) -> None:
        """Refuse numbers of words that the reaches and positions of the net do not allow; each is looked at once."""
        for stack, count in word_counts.items():
            check_int(f"words of stack {stack!r}" if stack else "words", count)
        check_word_counts(self.network, word_counts)

    def _find_main_input(self, stack: str, subject: str, given: Mapping[str, Tensor]) -> NodeSpec | None:
        """The family that `x` fills: what `given` leaves open of a stack's; both for one family are refused."""
        over = [member for member in self._input_specs if member.group.word_stack == stack and not member.group.plates]
        found = find_main_input([member for member in over if member.group.name not in given])
        rest = found is None or found.tpm.default is not None
        main = find_main_input(over)
        if rest and main is not None and main.group.name in given:
            name = main.group.name
            raise BNetError(f"{subject} and given[{name!r}]", expected=f"one value for {name}", actual="two")
        return found

    def check_mask(self, outputs: tuple[str, ...], x: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> None:
        """Refuse a mask that leaves a sentence no word, or a word nothing to read, wherever the parameters lie."""
        words, first = {stack: value.shape[1] for stack, value in x.items()}, next(iter(x.values()))
        members, present = self.network.specs, check_mask(mask, words, len(first))
        # Whether choices can be summed is no matter of a mask: they are taken as they come.
        choices = frozenset(m.group.index for m in members if m.tpm.kind == "discrete" and m.group.name not in outputs)
        plan = self.plan(outputs, choices, word_counts=words)
        layout = TensorLayout((), tuple(self.network.graph.plate_sizes))
        course = ExecutionState(
            self.network, layout, {}, {}, words, present, False, {}, self.network.default_dtype, first.device
        )
        check_masked_reads(course, (members[index] for group in plan.components for index in group))


def find_default_output(network: Network) -> str:
    """The family that a module returns by default: the last readout, else the last state."""
    last = network.specs[-1].group
    for stack in network.declaration.stacks:
        nodes = stack.epilogue or stack.slice or stack.prologue
        if not nodes:
            continue
        name = f"{stack.name}_{nodes[-1].role}" if stack.name else nodes[-1].role
        families = network.graph.by_stem.get(name, ())
        last = families[-1] if families else last
    return last.name


def _drop_absent_dims(state: ExecutionState, spec: NodeSpec, value: Tensor) -> Tensor:
    """A value without the dims that its family has not, and without the states on which it does not depend."""
    layout, family = state.layout, spec.group
    drop = {k for k in range(layout.batch_dim) if value.shape[k] == 1 and state.count_states(layout.enumerated[k]) > 1}
    drop |= {layout.axis(plate) for plate in layout.plates if plate not in family.plates}
    drop |= {layout.word_dim} if family.word_stack is None else set()
    full = list(value.shape)
    for plate in family.plates:
        full[layout.axis(plate)] = state.network.graph.plate_sizes[plate]
    if family.word_stack is not None:
        full[layout.word_dim] = state.word_counts[family.word_stack]
    return value.expand(full).reshape([size for k, size in enumerate(full) if k not in drop])

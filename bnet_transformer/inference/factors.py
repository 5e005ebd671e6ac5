"""From a question to log factors: one tensor for each random family that matters, in the compiled layout."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_mapping
from bnet_transformer.compiler.course import (
    ExecutionRequest,
    ExecutionState,
    ValidatedInputs,
    enumerate_states,
    gather_parents,
    get_present_mask,
)
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.compiler.plan import unset_parent_error
from bnet_transformer.compiler.told import (
    check_states,
    check_value,
    get_plate_sizes,
    index_by_group,
    infer_batch_size,
    lay_out_value,
)
from bnet_transformer.data import Evidence
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError, UnsupportedError
from bnet_transformer.inference.readout import attentions_below, log_likelihood
from bnet_transformer.reference import is_close
from bnet_transformer.tpm import EvalContext
from bnet_transformer.tpm.base import broadcast_shapes

OVER_BUDGET = (
    "a larger budget=; do or evidence on some of these; sample(n) of a sentence, without evidence, which is approximate"
)
NEVER = -1e30  # the log probability of what cannot be: finite, so that sums and gradients stay so


@dataclass(frozen=True)
class Factor:
    """`log P` of one family, or (`told`) of its evidence: the family says over which plates and words it lies."""

    member: NodeSpec
    table: Tensor
    told: Evidence | None = None
    summed: bool = False  # over its words already


@dataclass(frozen=True)
class Question:
    """What a question needs of a net, whatever the numbers: families by their index, or by name for `Module.course`."""

    want: tuple[str, ...]  # whose values the factors read
    settled: tuple[str, ...]  # random ones of which evidence says outright what they came to
    free: frozenset[int]  # choices that are enumerated
    needed: tuple[int, ...]  # those that have a factor
    below: Mapping[int, int]  # readout -> the attention right below it, which is left to its likelihood
    choices: Mapping[int, Collection[int]]  # asked for -> the choices on which its value depends
    fault: UnsupportedError | None  # why the choices cannot be eliminated family by family; not raised here
    has_plan: bool  # False where the plan is at fault, which then says how many joint states the sentences have


def question_to_factors(
    module: CompiledModule,
    evidence: Mapping[str, Evidence],
    query: str | None,
    request: ExecutionRequest,
    *,
    atol: float,
    budget: int,
) -> tuple[ExecutionState, list[Factor]]:
    """The factors that evidence and a query need, every choice among them enumerated along a dim of its own.

    Args:
        module: The compiled net.
        evidence: What was observed, by family.
        query: The discrete family that is asked for, if any.
        request: The sentences and their interventions; the families that are computed are found here.
        atol: The tolerance of evidence on families that are functions of their parents.
        budget: The most joint states of the choices on which one value depends.
    """
    network, rows = module.network, request.attention_rows or {}
    evidence, do, patched = check_mapping("evidence", evidence), check_mapping("do", request.do), request.patched or {}
    _check_names(network, evidence, do)
    forms = {name: _says(told, patched.get(name)) for name, told in evidence.items()}
    question = analyse_question(module, forms, query, do, {**patched, **rows})
    if question.fault is not None and question.has_plan:
        raise question.fault
    inputs = request.x if isinstance(request.x, ValidatedInputs) else module.validate_inputs(request.x, request.given)
    for index, choices in question.choices.items():
        check_count(network, index, choices, inputs.word_counts, budget)
    _check_forms(module, evidence, do, inputs.word_counts, inputs.batch)
    request = replace(
        request,
        want=question.want,
        x=inputs,
        observed={name: _every_state(evidence[name], patched.get(name)) for name in question.settled},
        patched={name: some for name, some in patched.items() if name not in question.settled},
        training=False,
        enumerate_too=question.free,
        left=frozenset(question.below.values()),
    )
    course, plan = module.run(request)
    factors = []
    for index in question.needed:
        member = network.specs[index]
        if index in question.free:
            factors.append(Factor(member, prior_of(course, index, member)))
        if member.group.name in evidence:
            told = evidence_in(course, member, evidence[member.group.name])
            if index in question.below:
                table = log_likelihood(course, plan, member, told.value, told.observed).clamp(min=NEVER)
                factors.append(Factor(member, table, told, summed=True))
                continue
            found = _match if index in question.free else likelihood_of
            factors.append(Factor(member, where_seen(told, found(course, index, member, told, atol)), told))
    return course, factors


def analyse_question(
    module: CompiledModule,
    forms: Mapping[str, tuple[bool, bool]],
    query: str | None,
    do: Collection[str],
    some: Collection[str],
) -> Question:
    """What a question needs of a net, and whether elimination can answer it; worked out once for each structure.

    Args:
        module: The compiled net.
        forms: Family -> whether its evidence is of all its nodes, and whether it is in real numbers.
        query: The discrete family that is asked for, if any.
        do: Families that are set.
        some: Families of which some nodes, or the attention rows of some nodes, are set.
    """
    key = tuple(forms.items()), query, tuple(do), tuple(some), _is_half(module)
    return module.memoize(("question", *key), lambda: _analysed(module, forms, query, do, some, half=_is_half(module)))


def _analysed(
    module: CompiledModule,
    evidence: Mapping[str, tuple[bool, bool]],
    query: str | None,
    do: Collection[str],
    some: Collection[str],
    *,
    half: bool,
) -> Question:
    network = module.network
    known = {network.graph.get_group(name).index for name in do}
    asked = [network.graph.get_group(name).index for name in (*evidence, *([query] if query else []))]
    above = network.graph.ancestral_set(asked, known)
    inner = {bundle.parent for index in above for bundle in network.graph.in_edges[index] if index not in known}
    random = {i for i in above if network.specs[i].tpm.is_random and i not in known}
    of_tensors = {network.graph.get_group(name).index for name, (_, is_real) in evidence.items() if is_real}
    tops = {asked[-1]} if query else set()
    tops |= {i for i in random & of_tensors if network.specs[i].tpm.kind == "discrete"}
    settled = {i for i in inner - tops if _settles(network, i, evidence)}
    free = {i for i in random - settled if network.specs[i].tpm.kind == "discrete" and i in inner | tops}
    needed = random | set(asked) - known
    told_of = {network.graph.get_group(name).index for name in evidence} - known
    partly = {network.graph.get_group(name).index for name in some}
    kept = {*known, *settled, *tops, *(told_of - random), *partly}
    below = {} if half else attentions_below(network, told_of, above, kept, free)
    closed = known | settled
    above_settled = {bundle.parent for index in settled for bundle in network.graph.in_edges[index]}
    want = _names(network, (needed - settled) | above_settled)
    choices = {index: choices_above(network, index, free, closed) for index in free | told_of}
    left_open = [i for i in sorted(above_settled - closed) if network.specs[i].tpm.kind == "continuous"]
    fault = unset_parent_error(network.specs[left_open[0]].group.name) if left_open else None
    plan_fault = None if fault else module.find_requirements(want, closed, free, partly - settled).fault
    return Question(
        want=want,
        settled=_names(network, settled),
        free=frozenset(free),
        needed=tuple(sorted(needed)),
        below=below,
        choices={index: choices.get(index, ()) for index in asked},
        fault=fault or plan_fault or _elimination_fault(network, choices, below),
        has_plan=plan_fault is None,
    )


def _elimination_fault(
    network: Network, choices: Mapping[int, Collection[int]], below: Collection[int]
) -> UnsupportedError | None:
    """The choices of plates or words are summed out node by node, among factors over the same plates and words."""
    for index, above in sorted(choices.items()):
        family = network.specs[index].group
        group = ((), None) if index in below else (family.plates, family.word_stack)
        for choice in above:
            other = network.specs[choice].group
            if (other.word_stack is not None or other.plates) and (other.plates, other.word_stack) != group:
                return UnsupportedError(
                    other.name,
                    expected="choices for each word that meet no other plate",
                    actual=f"{family.name}, of another plate, which depends on one",
                    allowed="net.sentence(...), which asks about one sentence within a budget",
                )
    return None


def _check_names(network: Network, evidence: Mapping[str, Evidence], do: Mapping[str, Tensor]) -> None:
    """Refuse evidence on what is no family, on what is given or set, and what is no `Evidence`."""
    for name, told in evidence.items():
        member = network.get_spec(name)
        if name in do:
            raise EvidenceError(name, expected="do or evidence on a node, not both", actual="both")
        if member.tpm.kind == "input":
            raise EvidenceError(
                name, expected="evidence on a node that is not given with the sentence", actual="a given one"
            )
        if not isinstance(told, Evidence):
            raise BNetError(f"evidence[{name!r}]", expected="Evidence(value, observed)", actual=told)


def _says(told: Evidence, patched: tuple[Tensor, Tensor] | None) -> tuple[bool, bool]:
    """What evidence says: whether of all of its family (but for the nodes that are set), and whether in real numbers
    (which of a choice is the tensor that its children receive, not its state)."""
    real = isinstance(told.value, Tensor) and told.value.is_floating_point()
    if patched is None or told.observed is None:
        return told.observed is None, real
    value, which = patched
    return bool((told.observed | which).all()) and value.is_floating_point() == real, real


def _every_state(told: Evidence, patched: tuple[Tensor, Tensor] | None) -> Tensor:
    """The states of all nodes of a family: those that were seen, and those that are set."""
    if patched is None:
        return told.value
    value, which = patched
    return torch.where(which.reshape(*which.shape, *[1] * (value.dim() - which.dim())), value, told.value)


def _settles(network: Network, index: int, evidence: Mapping[str, tuple[bool, bool]]) -> bool:
    """True where evidence says outright what a random family came to, all of it."""
    of_all, real = evidence.get(network.graph.groups[index].name, (False, False))
    kind = network.specs[index].tpm.kind
    if network.specs[index].scope == "corpus":
        return False  # one draw for all sentences: its probability counts once
    return of_all and (kind == "continuous" or (kind == "discrete" and not real))


def _names(network: Network, indices: Collection[int]) -> tuple[str, ...]:
    return tuple(network.graph.groups[index].name for index in sorted(indices))


def _check_forms(
    module: CompiledModule,
    evidence: Mapping[str, Evidence],
    do: Mapping[str, Tensor] | None,
    words: Mapping[str, int],
    batch: int,
) -> None:
    """Refuse evidence of another form or type than its family has, in another number of sentences."""
    network, like = module.network, next(iter(module.store.values()), None)
    batch = infer_batch_size(network, index_by_group(network, "do", do), batch)
    values = {f"evidence[{name!r}]": (network.get_spec(name), told) for name, told in evidence.items()}
    apart = {m.group.index: (what, told.value) for what, (m, told) in values.items() if m.scope != "corpus"}
    batch = infer_batch_size(network, apart, batch)
    for what, (member, told) in values.items():
        sentences = None if member.scope == "corpus" else batch
        check_value(network, member, what, told.value, word_counts=words, batch=sentences, like=like)
        if told.observed is not None:
            lead = get_plate_sizes(network, member, words)
            shapes = [lead, (1, *lead), lead if sentences is None else (batch, *lead)]
            given = told.observed
            if not isinstance(given, Tensor) or given.dtype != torch.bool or tuple(given.shape) not in shapes:
                got = f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else given
                wanted = f"booleans of shape {shapes[-1]}, true where it was seen"
                raise BNetError(f"{what}.observed", expected=wanted, actual=got)


def evidence_in(course: ExecutionState, member: NodeSpec, told: Evidence) -> Evidence:
    """Evidence in the layout; zero stands where nothing was seen, at absent words among others."""
    index, shown = member.group.index, get_present_mask(course, member.group.word_stack)
    value = lay_out_value(course, index, told.value if told.value.is_floating_point() else told.value.long())
    if told.observed is not None:
        observed = lay_out_value(course, index, told.observed.long()).bool()
        shown = observed if shown is None else shown & observed
    if shown is not None:
        value = value.where(shown.reshape(*shown.shape, *[1] * (value.dim() - shown.dim())), 0)
    check_states(course, index, f"evidence[{member.group.name!r}]", value)
    return Evidence(value, shown)


def where_seen(told: Evidence, table: Tensor) -> Tensor:
    """A table of log likelihoods, zero where nothing was seen."""
    return table if told.observed is None else torch.where(told.observed, table, 0.0)


def choices_above(network: Network, index: int, free: set[int], known: set[int]) -> list[int]:
    """The choices on which the value of a family hangs, itself among them."""
    parents = {bundle.parent for bundle in network.graph.in_edges[index]}
    return sorted(free & {index, *(network.graph.ancestral_set(parents, free | known) - known)})


def check_count(network: Network, index: int, choices: Collection[int], words: Mapping[str, int], budget: int) -> None:
    """Refuse evidence of which these choices have more joint states than the budget."""
    count = math.prod(network.count_states(i, words) for i in choices)
    if count > budget:
        names = ", ".join(network.specs[i].group.name for i in choices)
        raise BudgetError(
            f"exact elimination for {network.specs[index].group.name}",
            expected=f"at most {budget} joint states for each sentence ({names})",
            actual=f"{count}",
            allowed=OVER_BUDGET,
        )


def prior_of(course: ExecutionState, index: int, member: NodeSpec) -> Tensor:
    """`log P(state | parents)` for every state, along the family's own dim."""
    at, parents = _seen_in_logs(course, member)
    table = _along(course, index, _log_softmax(course, member.tpm.logits(at, *parents))).clamp(min=NEVER)
    if index not in course.patched:
        return table
    # A node that is set has no parents: a delta at its state. One that is set to a tensor sends that to its children,
    # whatever its state: its delta is at state 0.
    value, which = course.patched[index]
    state = torch.zeros_like(which, dtype=torch.long) if value.is_floating_point() else value
    return torch.where(which, torch.where(enumerate_states(course, index) == state, 0.0, NEVER).to(table.dtype), table)


def table_entries(course: ExecutionState, factor: Factor) -> Tensor:
    """The entries of its family's table that a factor holds, not normalised: of every state, or of those seen."""
    member, told = factor.member, factor.told
    at, parents = _seen_in_logs(course, member)
    logits = course.layout.pad_dims(member.tpm.logits(at, *parents), 1)
    if told is None:
        return _along(course, member.group.index, logits)
    return where_seen(told, _picked(logits, told))


def _along(course: ExecutionState, index: int, table: Tensor) -> Tensor:
    """A table `[*layout, states]` of an enumerated family, its states along the family's own dim."""
    return table.transpose(course.layout.enumerated.index(index), -1).squeeze(-1)


def _picked(table: Tensor, told: Evidence) -> Tensor:
    """The entries of a table `[*layout, states]` for the states that were seen."""
    lead = broadcast_shapes(table.shape[:-1], told.value.shape)
    return table.expand(*lead, table.shape[-1]).gather(-1, told.value.expand(lead)[..., None]).squeeze(-1)


def _match(course: ExecutionState, index: int, member: NodeSpec, told: Evidence, atol: float) -> Tensor:
    """Evidence on an enumerated family: zero for the states that agree with it, NEVER for the others."""
    if told.value.is_floating_point():
        return _agreement(course, index, member, told, atol)
    return torch.where(enumerate_states(course, index) == told.value, 0.0, NEVER).to(course.log_dtype)


def likelihood_of(course: ExecutionState, index: int, member: NodeSpec, told: Evidence, atol: float) -> Tensor:
    """`log P(evidence | parents)` of a family that is not enumerated, or that is a function of its parents."""
    if not member.tpm.is_random:
        return _agreement(course, index, member, told, atol)
    at, parents = _seen_in_logs(course, member)
    if member.tpm.kind == "continuous":
        return member.tpm.log_prob(at, told.value.to(course.log_dtype), *parents).clamp(min=NEVER)
    return _picked(_log_softmax(course, member.tpm.logits(at, *parents)), told).clamp(min=NEVER)


def _agreement(course: ExecutionState, index: int, member: NodeSpec, told: Evidence, atol: float) -> Tensor:
    """Zero where the value that the net makes is the one that was seen (`fits`); else NEVER."""
    near = is_close(course.values[index], told.value, atol, len(member.shape))
    return torch.where(near, 0.0, NEVER).to(course.log_dtype)


def _is_half(module: CompiledModule) -> bool:
    """True for a net in half precision: what its readouts say is then reckoned in float32."""
    first = next(iter(module.store.values()), None)  # all have one type
    return first is not None and first.dtype in (torch.float16, torch.bfloat16)


def _seen_in_logs(course: ExecutionState, member: NodeSpec) -> tuple[EvalContext, list[Tensor]]:
    """What a TPM sees, in the type of log probabilities."""
    at, parents = gather_parents(course, member)
    return at.to(course.log_dtype), [p.to(course.log_dtype) if p.is_floating_point() else p for p in parents]


def _log_softmax(course: ExecutionState, logits: Tensor) -> Tensor:
    """Log probabilities `[*layout, states]`; the dims that a TPM left out lead with size 1."""
    return course.layout.pad_dims(torch.log_softmax(logits, -1), 1)

"""Exact inference by elimination: the log evidence of a batch, its gradient, posteriors, and impossible evidence.

The sum of log factors over all choices: choices of single words go first, within their word; then those of the
sentence; then those of the corpus. Selectors go before anything that depends on a sentence, so codebooks cost no factor
K.

A likelihood may lie at -10^8, where float32 has no digits left for a log prior: two of its neighbours are 8 apart. So
each likelihood is taken relative to its greatest value over the choices, and these values are added at the end. They
are constants, and `log sum exp` is the same function of its input whatever constant is taken out, so all derivatives
(posteriors, counts, gradients) are those of the log evidence.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_float, check_int
from bnet_transformer._core.naming import WORD, join_name
from bnet_transformer._core.torch_context import enable_gradients
from bnet_transformer.compiler.execution_state import ExecutionRequest, ExecutionState, NodePatches, StackTensors
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.compiler.validate_inputs import is_readable
from bnet_transformer.data import Evidence
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError
from bnet_transformer.graph import NodeGroup
from bnet_transformer.inference.factors import LOG_ZERO, Factor, build_factors
from bnet_transformer.reference import ATOL, BUDGET
from bnet_transformer.tpm.base import broadcast_shapes

MAX_TABLE_ELEMENTS = 2**30


def log_evidence(
    module: CompiledModule,
    evidence: Mapping[str, Evidence],
    x: StackTensors | None = None,
    mask: StackTensors | None = None,
    *,
    do: Mapping[str, Tensor] | None = None,
    patched: NodePatches | None = None,
    attention_rows: NodePatches | None = None,
    given: Mapping[str, Tensor] | None = None,
    budget: int = BUDGET,
    atol: float = ATOL,
    check: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`log P(evidence)` of each sentence, `[batch]`; of the whole batch, `[1]`, under a selector of the corpus.

    `do` sets whole families. `patched` sets some nodes of a family: values, and which nodes, `[batch, *plates, word]`;
    `attention_rows` sets the attention weights of some nodes in the same form. `check=False` does not look at the result (on an
    accelerator that waits for it): of evidence that is impossible it is then at most -5e29. `dtype` is the type of the
    result, by default that of log probabilities in the net; float64 keeps apart what differs by less than float32 can
    tell beside a large likelihood.

    >>> import torch
    >>> import bnet_transformer as bt
    >>> from bnet_transformer.inference import Evidence, log_evidence
    >>> module = bt.bayesuvius(dim=4, observe=bt.tpm.Categorical(3)).module()
    >>> log_evidence(module, {"y": Evidence(torch.tensor([[0, 2, 1]]))}, torch.zeros(1, 3, 4)).shape      # [batch]
    torch.Size([1])
    """
    _check_arguments(module, budget, atol)
    request = ExecutionRequest((), x, mask, given, do, patched=patched, attention_rows=attention_rows)
    course, factors = build_factors(module, evidence, None, request, atol=atol, budget=budget)
    total = eliminate_choices(course, factors, dtype)
    if check and is_readable(total):
        check_possible(course, factors, total)
    return total


@enable_gradients()
def posterior(
    module: CompiledModule,
    target: str,
    evidence: Mapping[str, Evidence],
    x: StackTensors | None = None,
    mask: StackTensors | None = None,
    *,
    do: Mapping[str, Tensor] | None = None,
    patched: NodePatches | None = None,
    attention_rows: NodePatches | None = None,
    given: Mapping[str, Tensor] | None = None,
    budget: int = BUDGET,
    atol: float = ATOL,
) -> Tensor:
    """`P(query | evidence)` for a discrete family: `[batch, *plates, word, states]`; batch is 1 for one of the corpus.

    Evidence on a family that is a function of others counts for the states that reproduce it: no entry is off by more
    than `atol + r m`, with m the largest entry, made or seen, of that very node in that state and sentence, and r the
    rounding of the floating type (0 in float64, 2^-12 in float32: `reference.fits`).

    It is the gradient of the log evidence by the log probability of each state (Darwiche 2003).

    >>> import torch
    >>> import bnet_transformer as bt
    >>> from bnet_transformer.inference import Evidence, posterior
    >>> module = bt.bayesuvius(dim=4, observe=bt.tpm.Categorical(3)).module()
    >>> posterior(module, "c", {"y": Evidence(torch.tensor([[0, 2, 1]]))}, torch.zeros(1, 3, 4)).shape  # [batch, state]
    torch.Size([1, 2])
    """
    _check_arguments(module, budget, atol)
    network = module.network
    index = network.graph.get_group(target).index
    member = network.specs[index]
    if member.tpm.kind != "discrete":
        names = ", ".join(m.group.name for m in network.specs if m.tpm.kind == "discrete")
        got = f"a {member.tpm.kind} one"
        raise BNetError(target, expected="a discrete family", actual=got, allowed=names or "none: this net has none")
    if target in (do or ()):
        raise BNetError(target, expected="a family that is still random", actual="one that is set by do=")
    with torch.no_grad():
        request = ExecutionRequest((), x, mask, given, do, patched=patched, attention_rows=attention_rows)
        course, factors = build_factors(module, evidence, target, request, atol=atol, budget=budget)
    place = course.layout.enumerated.index(index)
    batch = 1 if member.scope == "corpus" else get_batch_size(factors, course)
    shape = get_full_shape(course, member.group.plates, member.group.word_stack, batch)
    shape[place] = course.count_states(index)
    tilt = torch.zeros(shape, dtype=course.log_dtype, device=course.device, requires_grad=True)
    total = eliminate_choices(course, [*factors, Factor(member, tilt)])
    (share,) = torch.autograd.grad(total.sum(), tilt)
    check_possible(course, factors, total)
    kept = [
        k
        for k in range(course.layout.rank)
        if k >= course.layout.batch_dim and has_posterior_dim(course, member.group, k)
    ]
    return share.movedim(place, -1).reshape([share.shape[k] for k in kept] + [shape[place]])


def _check_arguments(module: object, budget: object, atol: object) -> None:
    """Refuse a net in place of its module, and a budget and a tolerance that are none."""
    if not isinstance(module, CompiledModule):
        raise BNetError("module", expected="a compiled net", actual=type(module).__name__, allowed="net.module()")
    check_int("budget", budget)
    check_float("atol", atol, minimum=0)


def has_posterior_dim(execution: ExecutionState, group: NodeGroup, dim: int) -> bool:
    """True where dim k of the layout is one that a family's posterior keeps."""
    layout = execution.layout
    if dim == layout.word_dim:
        return group.word_stack is not None
    return dim == layout.batch_dim or layout.plates[dim - layout.batch_dim - 1] in group.plates


def check_possible(execution: ExecutionState, factors: Sequence[Factor], total: Tensor) -> None:
    """Refuse evidence of probability zero, naming the first piece of it that cannot be beside those before it."""
    possible = total > LOG_ZERO / 2
    if bool(possible.all()):
        return
    if bool(total.isnan().any()):
        _check_inputs_finite(execution, factors)
    sentence = int((~possible).nonzero()[0])
    several = len(total) > 1
    execution, factors = _select_sentence(execution, factors, sentence) if several else (execution, factors)
    pieces = sum(_get_evidence_shape(execution, factor).numel() for factor in factors if factor.evidence is not None)
    count = bisect_left(range(pieces), True, key=lambda k: not _are_possible(execution, factors, 0, k))
    if count == 0:
        raise BNetError("log evidence", expected="a log probability that is a number", actual="NaN before any evidence")
    raise _impossible_evidence_error(
        execution, factors, count - 1, sentence if several else None
    )  # so many are not possible together


def _check_inputs_finite(execution: ExecutionState, factors: Sequence[Factor]) -> None:
    """Refuse what is given or set and is no number, and parameters that are none: evidence is not to blame then."""
    layout = execution.layout
    told = {factor.spec.group.index for factor in factors if factor.evidence is not None}
    for index, value in execution.known.items():
        bad = ~torch.isfinite(value)
        if index in told or not bool(bad.any()):
            continue
        family, at = execution.network.specs[index].group, bad.nonzero()[0].tolist()
        axes = [*family.plates, *([WORD] if family.word_stack is not None else [])]
        what = join_name(family.name, [at[layout.axis(axis)] for axis in axes])
        what += f" of sentence {at[layout.batch_dim]}" if value.shape[layout.batch_dim] > 1 else ""
        raise EvidenceError(what, expected="finite numbers", actual=value[tuple(at)].item())
    for name, value in execution.parameters.items():
        if bool(value.isnan().any()):
            raise BNetError(f"parameter {name}", expected="numbers", actual="NaN")


def _select_sentence(
    execution: ExecutionState, factors: Sequence[Factor], sentence: int
) -> tuple[ExecutionState, list[Factor]]:
    """The same question of one sentence of the batch."""
    place = execution.layout.batch_dim

    def select(table: Tensor) -> Tensor:
        return table.narrow(place, sentence, 1) if table.shape[place] > 1 else table

    found = []
    for factor in factors:
        told = None if factor.evidence is None else Evidence(select(factor.evidence.value))
        found.append(replace(factor, table=select(factor.table), evidence=told))
    return replace(execution, known={index: select(value) for index, value in execution.known.items()}), found


def _get_evidence_shape(execution: ExecutionState, factor: Factor) -> torch.Size:
    """How many pieces of evidence a factor holds along the batch, the plates and the words."""
    return factor.table.shape[execution.layout.batch_dim :]


def _are_possible(execution: ExecutionState, factors: Sequence[Factor], low: int, high: int) -> bool:
    """True where the pieces of evidence from `low` to before `high` are possible together."""
    found, start = [], 0
    for factor in factors:
        if factor.evidence is not None:
            own = _get_evidence_shape(execution, factor)
            number = start + torch.arange(own.numel(), device=factor.table.device).reshape(own)
            start += own.numel()
            factor = replace(factor, table=factor.table.where((low <= number) & (number < high), 0.0), evidence=None)
        found.append(factor)
    return bool((eliminate_choices(execution, found) > LOG_ZERO / 2).all())


def _impossible_evidence_error(
    execution: ExecutionState, factors: Sequence[Factor], entry: int, sentence: int | None
) -> BNetError:
    """The error for one piece of evidence that cannot be, alone or after those before it."""
    layout, alone = execution.layout, not _are_possible(execution, factors, entry, entry + 1)
    told = [(factor, factor.evidence) for factor in factors if factor.evidence is not None]
    while entry >= _get_evidence_shape(execution, told[0][0]).numel():
        entry -= _get_evidence_shape(execution, told.pop(0)[0]).numel()
    (factor, evidence), family = told[0], told[0][0].spec.group
    at = [int(i) for i in torch.unravel_index(torch.tensor(entry), _get_evidence_shape(execution, factor))]
    axes = [*family.plates, *([WORD] if family.word_stack is not None else [])]
    what = (
        family.name
        if factor.is_summed
        else join_name(family.name, [at[layout.axis(k) - layout.batch_dim] for k in axes])
    )
    if sentence is not None or _get_evidence_shape(execution, factor)[0] > 1:
        what += f" of sentence {at[0] if sentence is None else sentence}"
    lead = [0] * layout.batch_dim + at
    value = evidence.value[tuple(0 if n == 1 else i for n, i in zip(evidence.value.shape, lead, strict=False))]
    if factor.is_summed:
        value = evidence.value.select(layout.batch_dim, 0 if evidence.value.shape[layout.batch_dim] == 1 else at[0])
    if not bool(torch.isfinite(value).all()):
        return EvidenceError(what, expected="finite numbers", actual=value.tolist())
    own = factor.table.flatten(layout.batch_dim)[..., entry]
    if bool(own.isnan().any()):
        return BNetError(what, expected="a log probability that is a number", actual="NaN")
    beside = "" if alone else " given the evidence before it"
    if factor.spec.tpm.kind == "continuous":  # a density that is not zero may still be too small to reckon with
        wanted = f"evidence whose log density is above {LOG_ZERO / 2:g} in some state of the net"
        return EvidenceError(what, expected=wanted, actual=f"one below it{beside}: {value.tolist()}")
    got = f"one of probability zero{beside}: {value.tolist()}"
    return EvidenceError(what, expected="evidence that some state of the net makes possible", actual=got)


def eliminate_choices(execution: ExecutionState, factors: list[Factor], dtype: torch.dtype | None = None) -> Tensor:
    """The sum of all factors over all choices; `Question.fault` has ruled out choices that other plates depend on.

    In `dtype` is what no choice changes added up, and the result: float64 where results are to be compared that differ
    by less than float32 can tell beside a large likelihood.
    """
    layout, members = execution.layout, execution.network.specs
    local = {i for i in layout.enumerated if members[i].group.word_stack is not None or members[i].group.plates}
    corpus = {i for i in layout.enumerated if members[i].scope == "corpus"}
    batch, axes = get_batch_size(factors, execution), tuple(range(layout.batch_dim + 1, layout.rank))
    groups: dict[tuple[tuple[str, ...], str | None], list[Tensor]] = {}
    constants: list[Tensor] = []  # what no choice changes
    for factor in factors:
        family, table = factor.spec.group, factor.table
        over = ((), None) if factor.is_summed else (family.plates, family.word_stack)
        if factor.evidence is not None and factor.spec.scope != "corpus":
            choices = [k for k in range(layout.batch_dim) if table.shape[k] > 1]
            greatest = _detached_amax(table, choices) if choices else table
            constant = greatest.to(dtype or greatest.dtype)
            whole = constant.expand(broadcast_shapes(constant.shape, get_full_shape(execution, *over, batch)))
            constants.append(whole.sum(axes, keepdim=True))
            if not choices:
                continue
            table = table - greatest
        groups.setdefault(over, []).append(table)
    rest = groups.pop(((), None), [])
    for (plates, words), tables in groups.items():
        own = {i for i in local if (members[i].group.plates, members[i].group.word_stack) == (plates, words)}
        shape = get_full_shape(execution, plates, words, batch)
        wide = [table.expand(broadcast_shapes(table.shape, shape)) for table in tables]
        total = _sum_out_choices(execution, wide, sorted(own))
        rest.append(total.sum(axes, keepdim=True))
    apart = [f.table for f in factors if f.spec.scope == "corpus" and f.spec.group.index in corpus]
    rest = [table for table in rest if not any(table is other for other in apart)]
    inner = [i for i in layout.enumerated if i not in local and i not in corpus]
    total = _sum_out_choices(execution, rest, inner)
    if corpus:
        total = total.expand(*total.shape[: layout.batch_dim], batch, *total.shape[layout.batch_dim + 1 :])
        total = _sum_out_choices(execution, [total.sum(layout.batch_dim, keepdim=True), *apart], sorted(corpus))
        constants = [constant.sum(layout.batch_dim, keepdim=True) for constant in constants]
        batch = 1
    total = _add_log_tables([total.to(dtype or total.dtype), *constants])
    return total.expand(*[1] * layout.batch_dim, batch, *[1] * (layout.rank - layout.batch_dim - 1)).reshape(batch)


def _sum_out_choices(execution: ExecutionState, tables: list[Tensor], choices: list[int]) -> Tensor:
    """Sum the choices out, each time the one whose joint table is smallest; then add what is left."""
    layout = execution.layout
    left = list(choices)
    while left:
        places = {i: layout.enumerated.index(i) for i in left}
        touching = {i: [table for table in tables if table.shape[place] > 1] for i, place in places.items()}
        costs = {
            i: math.prod(broadcast_shapes(*(t.shape for t in some))) if some else 0 for i, some in touching.items()
        }
        chosen = min(left, key=lambda i: costs[i])
        if costs[chosen] > MAX_TABLE_ELEMENTS:
            name = execution.network.specs[chosen].group.name
            raise BudgetError(
                f"eliminating {name}",
                expected=f"a table of at most {MAX_TABLE_ELEMENTS} numbers",
                actual=f"{costs[chosen]}",
                allowed="do= or evidence on some of these choices; fewer sentences at once",
            )
        place = places[chosen]
        tables = [table for table in tables if table.shape[place] == 1]
        if touching[chosen]:
            tables.append(_logsumexp(_add_log_tables(touching[chosen]), place))
        left.remove(chosen)
    if not tables:
        return torch.zeros([1] * layout.rank, dtype=execution.log_dtype, device=execution.device)
    return _add_log_tables(tables)


def _detached_amax(table: Tensor, dims: int | list[int]) -> Tensor:
    """The greatest value over some dims, a constant for every derivative; zero where it is no number."""
    return table.detach().amax(dims, keepdim=True).nan_to_num(0.0, 0.0, 0.0)


def _logsumexp(table: Tensor, dim: int) -> Tensor:
    """`log sum exp` over a dim, whose derivative sums to 1 in every floating type.

    That of `torch.logsumexp` is `exp(table - result)`, which sums to 1 only as far as the result is exact: at -10^6 it
    is to 0.03 in float32. Here it is each term of the sum over the sum.
    """
    greatest = _detached_amax(table, dim)
    return (table - greatest).exp().sum(dim, keepdim=True).log() + greatest


def _add_log_tables(tables: list[Tensor]) -> Tensor:
    """The sum of log tables, small ones first, so that what no sentence changes is added once."""
    ordered = sorted(tables, key=lambda table: table.numel())
    total = ordered[0]
    for table in ordered[1:]:
        total = total + table
    return total.clamp(min=LOG_ZERO)


def get_full_shape(execution: ExecutionState, plates: tuple[str, ...], words: str | None, batch_size: int) -> list[int]:
    """How a table over all nodes of a family lies in the layout, were it no function of choices."""
    layout = execution.layout
    shape = [1] * layout.rank
    shape[layout.batch_dim] = batch_size
    for plate in plates:
        shape[layout.axis(plate)] = execution.network.graph.plate_sizes[plate]
    if words is not None:
        shape[layout.axis(WORD)] = execution.word_counts[words]
    return shape


def get_batch_size(factors: list[Factor], execution: ExecutionState) -> int:
    """How many sentences are asked about."""
    sizes = [factor.table.shape[execution.layout.batch_dim] for factor in factors]
    sizes += [value.shape[execution.layout.batch_dim] for value in execution.known.values()]
    return max(sizes, default=1)

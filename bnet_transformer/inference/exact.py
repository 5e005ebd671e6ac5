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
    execution, factors = build_factors(module, evidence, None, request, atol=atol, budget=budget)
    total = eliminate_choices(execution, factors, dtype)
    if check and is_readable(total):
        check_possible(execution, factors, total)
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
    spec = network.specs[index]
    if spec.tpm.kind != "discrete":
        names = ", ".join(spec.group.name for spec in network.specs if spec.tpm.kind == "discrete")
        actual = f"a {spec.tpm.kind} one"
        raise BNetError(target, expected="a discrete family", actual=actual, allowed=names or "none: this net has none")
    if target in (do or ()):
        raise BNetError(target, expected="a family that is still random", actual="one that is set by do=")
    with torch.no_grad():
        request = ExecutionRequest((), x, mask, given, do, patched=patched, attention_rows=attention_rows)
        execution, factors = build_factors(module, evidence, target, request, atol=atol, budget=budget)
    dim = execution.layout.enumerated.index(index)
    batch = 1 if spec.scope == "corpus" else get_batch_size(factors, execution)
    shape = get_full_shape(execution, spec.group.plates, spec.group.word_stack, batch)
    shape[dim] = execution.count_states(index)
    tilt = torch.zeros(shape, dtype=execution.log_dtype, device=execution.device, requires_grad=True)
    total = eliminate_choices(execution, [*factors, Factor(spec, tilt)])
    (probs,) = torch.autograd.grad(total.sum(), tilt)
    check_possible(execution, factors, total)
    dims = [
        k
        for k in range(execution.layout.rank)
        if k >= execution.layout.batch_dim and has_posterior_dim(execution, spec.group, k)
    ]
    return probs.movedim(dim, -1).reshape([probs.shape[k] for k in dims] + [shape[dim]])


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
    is_batch = len(total) > 1
    execution, factors = _select_sentence(execution, factors, sentence) if is_batch else (execution, factors)
    pieces = sum(_get_evidence_shape(execution, factor).numel() for factor in factors if factor.evidence is not None)
    count = bisect_left(range(pieces), True, key=lambda k: not _are_possible(execution, factors, 0, k))
    if count == 0:
        raise BNetError("log evidence", expected="a log probability that is a number", actual="NaN before any evidence")
    raise _impossible_evidence_error(
        execution, factors, count - 1, sentence if is_batch else None
    )  # so many are not possible together


def _check_inputs_finite(execution: ExecutionState, factors: Sequence[Factor]) -> None:
    """Refuse what is given or set and is no number, and parameters that are none: evidence is not to blame then."""
    layout = execution.layout
    evidence_groups = {factor.spec.group.index for factor in factors if factor.evidence is not None}
    for index, value in execution.known.items():
        is_invalid = ~torch.isfinite(value)
        if index in evidence_groups or not bool(is_invalid.any()):
            continue
        group, entry = execution.network.specs[index].group, is_invalid.nonzero()[0].tolist()
        axes = [*group.plates, *([WORD] if group.word_stack is not None else [])]
        subject = join_name(group.name, [entry[layout.axis(axis)] for axis in axes])
        subject += f" of sentence {entry[layout.batch_dim]}" if value.shape[layout.batch_dim] > 1 else ""
        raise EvidenceError(subject, expected="finite numbers", actual=value[tuple(entry)].item())
    for name, value in execution.parameters.items():
        if bool(value.isnan().any()):
            raise BNetError(f"parameter {name}", expected="numbers", actual="NaN")


def _select_sentence(
    execution: ExecutionState, factors: Sequence[Factor], sentence: int
) -> tuple[ExecutionState, list[Factor]]:
    """The same question of one sentence of the batch."""
    batch_dim = execution.layout.batch_dim

    def select(table: Tensor) -> Tensor:
        return table.narrow(batch_dim, sentence, 1) if table.shape[batch_dim] > 1 else table

    selected = []
    for factor in factors:
        evidence = None if factor.evidence is None else Evidence(select(factor.evidence.value))
        selected.append(replace(factor, table=select(factor.table), evidence=evidence))
    return replace(execution, known={index: select(value) for index, value in execution.known.items()}), selected


def _get_evidence_shape(execution: ExecutionState, factor: Factor) -> torch.Size:
    """How many pieces of evidence a factor holds along the batch, the plates and the words."""
    return factor.table.shape[execution.layout.batch_dim :]


def _are_possible(execution: ExecutionState, factors: Sequence[Factor], low: int, high: int) -> bool:
    """True where the pieces of evidence from `low` to before `high` are possible together."""
    masked, start = [], 0
    for factor in factors:
        if factor.evidence is not None:
            shape = _get_evidence_shape(execution, factor)
            number = start + torch.arange(shape.numel(), device=factor.table.device).reshape(shape)
            start += shape.numel()
            factor = replace(factor, table=factor.table.where((low <= number) & (number < high), 0.0), evidence=None)
        masked.append(factor)
    return bool((eliminate_choices(execution, masked) > LOG_ZERO / 2).all())


def _impossible_evidence_error(
    execution: ExecutionState, factors: Sequence[Factor], entry: int, sentence: int | None
) -> BNetError:
    """The error for one piece of evidence that cannot be, alone or after those before it."""
    layout, is_first = execution.layout, not _are_possible(execution, factors, entry, entry + 1)
    pieces = [(factor, factor.evidence) for factor in factors if factor.evidence is not None]
    while entry >= _get_evidence_shape(execution, pieces[0][0]).numel():
        entry -= _get_evidence_shape(execution, pieces.pop(0)[0]).numel()
    (factor, evidence), group = pieces[0], pieces[0][0].spec.group
    index = [int(i) for i in torch.unravel_index(torch.tensor(entry), _get_evidence_shape(execution, factor))]
    axes = [*group.plates, *([WORD] if group.word_stack is not None else [])]
    subject = (
        group.name
        if factor.is_summed
        else join_name(group.name, [index[layout.axis(k) - layout.batch_dim] for k in axes])
    )
    if sentence is not None or _get_evidence_shape(execution, factor)[0] > 1:
        subject += f" of sentence {index[0] if sentence is None else sentence}"
    full_index = [0] * layout.batch_dim + index
    value = evidence.value[tuple(0 if n == 1 else i for n, i in zip(evidence.value.shape, full_index, strict=False))]
    if factor.is_summed:
        value = evidence.value.select(layout.batch_dim, 0 if evidence.value.shape[layout.batch_dim] == 1 else index[0])
    if not bool(torch.isfinite(value).all()):
        return EvidenceError(subject, expected="finite numbers", actual=value.tolist())
    log_probs = factor.table.flatten(layout.batch_dim)[..., entry]
    if bool(log_probs.isnan().any()):
        return BNetError(subject, expected="a log probability that is a number", actual="NaN")
    condition = "" if is_first else " given the evidence before it"
    if factor.spec.tpm.kind == "continuous":  # a density that is not zero may still be too small to reckon with
        expected = f"evidence whose log density is above {LOG_ZERO / 2:g} in some state of the net"
        return EvidenceError(subject, expected=expected, actual=f"one below it{condition}: {value.tolist()}")
    actual = f"one of probability zero{condition}: {value.tolist()}"
    return EvidenceError(subject, expected="evidence that some state of the net makes possible", actual=actual)


def eliminate_choices(execution: ExecutionState, factors: list[Factor], dtype: torch.dtype | None = None) -> Tensor:
    """The sum of all factors over all choices; `Question.fault` has ruled out choices that other plates depend on.

    In `dtype` is what no choice changes added up, and the result: float64 where results are to be compared that differ
    by less than float32 can tell beside a large likelihood.
    """
    layout, specs = execution.layout, execution.network.specs
    local = {i for i in layout.enumerated if specs[i].group.word_stack is not None or specs[i].group.plates}
    corpus = {i for i in layout.enumerated if specs[i].scope == "corpus"}
    batch, axes = get_batch_size(factors, execution), tuple(range(layout.batch_dim + 1, layout.rank))
    tables_by_axes: dict[tuple[tuple[str, ...], str | None], list[Tensor]] = {}
    constants: list[Tensor] = []  # what no choice changes
    for factor in factors:
        group, table = factor.spec.group, factor.table
        axes_key = ((), None) if factor.is_summed else (group.plates, group.word_stack)
        if factor.evidence is not None and factor.spec.scope != "corpus":
            choices = [k for k in range(layout.batch_dim) if table.shape[k] > 1]
            greatest = _detached_amax(table, choices) if choices else table
            constant = greatest.to(dtype or greatest.dtype)
            expanded = constant.expand(broadcast_shapes(constant.shape, get_full_shape(execution, *axes_key, batch)))
            constants.append(expanded.sum(axes, keepdim=True))
            if not choices:
                continue
            table = table - greatest
        tables_by_axes.setdefault(axes_key, []).append(table)
    remaining = tables_by_axes.pop(((), None), [])
    for (plates, words), tables in tables_by_axes.items():
        inner_choices = {i for i in local if (specs[i].group.plates, specs[i].group.word_stack) == (plates, words)}
        shape = get_full_shape(execution, plates, words, batch)
        expanded_tables = [table.expand(broadcast_shapes(table.shape, shape)) for table in tables]
        total = _sum_out_choices(execution, expanded_tables, sorted(inner_choices))
        remaining.append(total.sum(axes, keepdim=True))
    corpus_tables = [f.table for f in factors if f.spec.scope == "corpus" and f.spec.group.index in corpus]
    remaining = [table for table in remaining if not any(table is corpus_table for corpus_table in corpus_tables)]
    sentence_choices = [i for i in layout.enumerated if i not in local and i not in corpus]
    total = _sum_out_choices(execution, remaining, sentence_choices)
    if corpus:
        total = total.expand(*total.shape[: layout.batch_dim], batch, *total.shape[layout.batch_dim + 1 :])
        total = _sum_out_choices(execution, [total.sum(layout.batch_dim, keepdim=True), *corpus_tables], sorted(corpus))
        constants = [constant.sum(layout.batch_dim, keepdim=True) for constant in constants]
        batch = 1
    total = _add_log_tables([total.to(dtype or total.dtype), *constants])
    return total.expand(*[1] * layout.batch_dim, batch, *[1] * (layout.rank - layout.batch_dim - 1)).reshape(batch)


def _sum_out_choices(execution: ExecutionState, tables: list[Tensor], choices: list[int]) -> Tensor:
    """Sum the choices out, each time the one whose joint table is smallest; then add what is left."""
    layout = execution.layout
    remaining = list(choices)
    while remaining:
        dims = {i: layout.enumerated.index(i) for i in remaining}
        touching = {i: [table for table in tables if table.shape[dim] > 1] for i, dim in dims.items()}
        costs = {
            i: math.prod(broadcast_shapes(*(t.shape for t in operands))) if operands else 0
            for i, operands in touching.items()
        }
        chosen = min(remaining, key=lambda i: costs[i])
        if costs[chosen] > MAX_TABLE_ELEMENTS:
            name = execution.network.specs[chosen].group.name
            raise BudgetError(
                f"eliminating {name}",
                expected=f"a table of at most {MAX_TABLE_ELEMENTS} numbers",
                actual=f"{costs[chosen]}",
                allowed="do= or evidence on some of these choices; fewer sentences at once",
            )
        dim = dims[chosen]
        tables = [table for table in tables if table.shape[dim] == 1]
        if touching[chosen]:
            tables.append(_logsumexp(_add_log_tables(touching[chosen]), dim))
        remaining.remove(chosen)
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

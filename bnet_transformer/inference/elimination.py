"""The algorithm `elimination`: log evidence of a batch, its gradient, posteriors, impossible evidence.

A factor is one tensor of a whole node group, for all its words and all sentences, and whole groups of choices are
eliminated: those of single words first, within their word, then chains along words, the choices of the sentence, and
those of the corpus. The log evidence is the log of the sum, over all choices, of the product of the factors.

The algorithm applies if at most one group is requested, and if each value depends on the choices of one word, or of two
neighbouring words of a chain. Else `posteriors` takes the cheapest of several algorithms; one of them is `variable
elimination` (`factor_graph`), which eliminates single nodes of one sentence.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_float, check_int
from bnet_transformer._core.naming import WORD, join_name
from bnet_transformer._core.process import ignore_caller_modes
from bnet_transformer._core.tensors import enable_gradients, is_readable
from bnet_transformer.compiler.gather import ExecutionRequest, ExecutionState
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.data import Evidence
from bnet_transformer.data.checks import StackTensors, check_evidence, check_masked_reads
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError, format_count
from bnet_transformer.graph import NodeGroup
from bnet_transformer.inference.contraction import chain_log_partition, most_probable_path
from bnet_transformer.inference.factors import LOG_ZERO, Factor, FactorRequest, compute_factors, request_factors
from bnet_transformer.reference import ATOL, BUDGET
from bnet_transformer.tpm.base import broadcast_shapes

MAX_TABLE_ELEMENTS = 2**30


def log_evidence(
    module: CompiledModule,
    evidence: Mapping[str, Evidence],
    x: StackTensors | None = None,
    mask: StackTensors | None = None,
    *,
    do: Mapping[str, object] | None = None,
    given: Mapping[str, Tensor] | None = None,
    budget: int = BUDGET,
    atol: float = ATOL,
    check: bool = True,
) -> Tensor:
    """The log evidence `log P(evidence)` of each sentence of a batch, with gradients; autocast is ignored.

    Args:
        module: The compiled net.
        evidence: The observed values, a mapping from the name of a node group to `Evidence`.
        x: The words: vectors `[batch, word, dim]` or ids `[batch, word]`; with several stacks a mapping from stack.
        mask: Booleans `[batch, word]`, true for words and false for padding; by default there is no padding.
        do: Interventions, a mapping from name, as for a call of the module.
        given: Values of further input groups, a mapping from name.
        budget: The maximum number of joint states of the choices on which one value depends.
        atol: The absolute tolerance of evidence on nodes that are functions of their parents.
        check: Whether impossible evidence is an error; the check synchronises with a GPU. Without the check, the log
            probability of impossible evidence is at most -5e29.

    Returns:
        A tensor `[batch]`; in a net with a selector of the whole corpus `[1]`, for the batch as a whole.

    Raises:
        EvidenceError: The evidence is impossible; the error names the first impossible observation.
        BudgetError: A value depends on more joint states than the budget.

    >>> import torch
    >>> import bnet_transformer as bt
    >>> from bnet_transformer.inference import Evidence, log_evidence
    >>> module = bt.bayesuvius(dim=4, observe=bt.tpm.Categorical(3)).module()
    >>> log_evidence(module, {"y": Evidence(torch.tensor([[0, 2, 1]]))}, torch.zeros(1, 3, 4)).shape      # [batch]
    torch.Size([1])
    """
    request, observed = _check_arguments(module, None, evidence, budget, atol, x=x, mask=mask, do=do, given=given)
    factor_request = request_factors(module, observed, None, request, budget=budget, atol=atol)
    return compute_log_evidence(module, factor_request, check=check)


@ignore_caller_modes()
def compute_log_evidence(
    module: CompiledModule, factor_request: FactorRequest, *, check: bool = True, dtype: torch.dtype | None = None
) -> Tensor:
    """The log evidence of each sentence, as `log_evidence`, of values that are trusted.

    Args:
        module: The compiled net.
        factor_request: The factors of the evidence.
        check: Whether impossible evidence is an error.
        dtype: The type of the result; by default that of log probabilities in the net. float64 preserves differences
            that float32 loses if the log likelihood is large.
    """
    execution, factors = compute_factors(module, factor_request)
    total = eliminate_choices(execution, factors, dtype)
    if check and is_readable(total):
        check_possible(execution, factors, total)
    return total


def posterior(
    module: CompiledModule,
    target: str,
    evidence: Mapping[str, Evidence],
    x: StackTensors | None = None,
    mask: StackTensors | None = None,
    *,
    do: Mapping[str, object] | None = None,
    given: Mapping[str, Tensor] | None = None,
    budget: int = BUDGET,
    atol: float = ATOL,
) -> Tensor:
    """`P(target | evidence)` for a discrete node group.

    Evidence on a group that is a function of its parents excludes the states that do not reproduce it: no entry may
    differ by more than `atol + r m`, where m is the largest entry, computed or observed, of that node in that state and
    sentence, and r is the rounding of the floating type (0 in float64, 2^-12 in float32: `reference.is_close`).

    Args:
        module: The compiled net.
        target: The name of the discrete node group.
        evidence: The observed values, a mapping from the name of a node group to `Evidence`.
        x: The words: vectors `[batch, word, dim]` or ids `[batch, word]`; with several stacks a mapping from stack.
        mask: Booleans `[batch, word]`, true for words and false for padding; by default there is no padding.
        do: Interventions, a mapping from name, as for a call of the module.
        given: Values of further input groups, a mapping from name.
        budget: The maximum number of joint states of the choices on which one value depends.
        atol: The absolute tolerance of evidence on nodes that are functions of their parents.

    Returns:
        Probabilities `[batch, *plates, word, states]`; the batch size is 1 for a selector of the whole corpus.

    Raises:
        EvidenceError: The evidence is impossible; the error names the first impossible observation.
        BudgetError: A value depends on more joint states than the budget.

    >>> import torch
    >>> import bnet_transformer as bt
    >>> from bnet_transformer.inference import Evidence, posterior
    >>> module = bt.bayesuvius(dim=4, observe=bt.tpm.Categorical(3)).module()
    >>> posterior(module, "c", {"y": Evidence(torch.tensor([[0, 2, 1]]))}, torch.zeros(1, 3, 4)).shape  # [batch, state]
    torch.Size([1, 2])
    """
    request, observed = _check_arguments(module, target, evidence, budget, atol, x=x, mask=mask, do=do, given=given)
    index = module.network.graph.get_group(target).index
    factor_request = request_factors(module, observed, index, request, budget=budget, atol=atol)
    return compute_posterior(module, index, factor_request)


@enable_gradients()
def compute_posterior(module: CompiledModule, target: int, factor_request: FactorRequest) -> Tensor:
    """`P(target | evidence)` for a discrete node group, as `posterior`, of values that are trusted.

    Args:
        module: The compiled net.
        target: The discrete node group.
        factor_request: The factors of the evidence and the target.
    """
    with torch.no_grad():
        execution, factors = compute_factors(module, factor_request)
    spec = module.network.specs[target]
    tilt = build_tilt(execution, factors, spec).requires_grad_()
    total = eliminate_choices(execution, [*factors, Factor(spec, tilt)])
    (probs,) = torch.autograd.grad(total.sum(), tilt)
    check_possible(execution, factors, total)
    return shape_posterior(execution, spec.group, probs)


def build_tilt(execution: ExecutionState, factors: list[Factor], spec: NodeSpec) -> Tensor:
    """A zero table that is added to the log prior of a group; the derivative of the log evidence is the posterior."""
    # The derivative by the log probability of a state is the posterior probability of that state (Darwiche 2003, A
    # differential approach to inference in Bayesian networks): one backward pass gives those of all nodes of the group.
    group, batch = spec.group, 1 if spec.scope == "corpus" else get_batch_size(factors, execution)
    shape = get_full_shape(execution, group.plates, group.word_stack, batch)
    states = execution.network.count_states(group.index, execution.word_counts)
    shape[execution.layout.enumerated.index(group.index)] = states
    return torch.zeros(shape, dtype=execution.log_dtype, device=execution.device)


def shape_posterior(execution: ExecutionState, group: NodeGroup, probs: Tensor) -> Tensor:
    """The derivative by the table of `build_tilt` as `[batch, *plates, word, state]`."""
    dim = execution.layout.enumerated.index(group.index)
    sizes = [probs.shape[k] for k in [*find_posterior_dims(execution, group), dim]]
    return probs.movedim(dim, -1).reshape(sizes)


@torch.no_grad()
def find_best_paths(module: CompiledModule, factor_request: FactorRequest) -> tuple[dict[int, Tensor], float]:
    """The most probable states of independent chains along the words, the only choices of a sentence (Viterbi 1967).

    Args:
        module: The compiled net.
        factor_request: The factors of the evidence of one sentence and of one chain.

    Returns:
        The states `[node]` of each enumerated group, by its index, of equally probable paths the smallest one; and
        `log P(states, evidence)`.
    """
    execution, factors = compute_factors(module, factor_request)
    layout = execution.layout
    # Sums of float32 numbers would lose the digits that decide between two paths.
    factors = [replace(factor, table=factor.table.double()) for factor in factors]
    constants = [factor for factor in factors if all(size == 1 for size in factor.table.shape[: layout.batch_dim])]
    log_prob = float(eliminate_choices(execution, constants, torch.float64)) if constants else 0.0
    paths = dict[int, Tensor]()
    for index in layout.enumerated:
        dims = (layout.enumerated.index(index), layout.neighbour_dim(index))
        tables = [factor.table for factor in factors if any(factor.table.shape[dim] > 1 for dim in dims)]
        paths[index], log_prob_of_chain = _find_paths_of_group(execution, tables, index)
        log_prob += log_prob_of_chain
    return paths, log_prob


def _find_paths_of_group(execution: ExecutionState, tables: list[Tensor], index: int) -> tuple[Tensor, float]:
    """The most probable states of the chain of each plate, `[node]`, and the log of the product of their tables."""
    layout, group = execution.layout, execution.network.specs[index].group
    axes = [layout.axis(plate) for plate in group.plates]
    shape = get_full_shape(execution, group.plates, group.word_stack, 1)
    if not tables:  # one state
        return torch.zeros(math.prod(shape), dtype=torch.long), 0.0
    unary, pair, batch_shape = _arrange_chain(execution, tables, [index])
    unary, pair = (table.where(table > LOG_ZERO / 2, -math.inf).cpu() for table in (unary, pair))
    pairs = pair.expand(-1, unary.shape[1], -1, -1)
    paths = [most_probable_path(unary[:, k].numpy(), pairs[:, k].numpy()) for k in range(unary.shape[1])]
    states = torch.from_numpy(np.stack([path for path, _ in paths]))  # [batch, word]
    log_probs = torch.tensor([log_prob for _, log_prob in paths], dtype=torch.float64).reshape(batch_shape)
    batch_shape[layout.word_dim] = states.shape[1]
    states = states.reshape(batch_shape).expand(shape)
    log_probs = log_probs.expand([size if dim in axes else 1 for dim, size in enumerate(shape)])
    single = [dim for dim in range(layout.rank) if dim not in (*axes, layout.word_dim)]
    return states.permute(*single, *axes, layout.word_dim).flatten(), float(log_probs.sum())


def _check_arguments(
    module: object, target: str | None, evidence: Mapping[str, Evidence], budget: int, atol: float, **tensors: Any
) -> tuple[ExecutionRequest, dict[int, Evidence]]:
    """The request and the evidence by group, from arguments of a user."""
    if not isinstance(module, CompiledModule):
        hint = "Pass net.module()"
        raise BNetError("module", expected="a compiled net", actual=type(module).__name__, hint=hint)
    check_int("budget", budget)
    check_float("atol", atol, minimum=0)
    network = module.network
    spec = None if target is None else network.get_spec(target)
    if spec is not None and spec.tpm.kind != "discrete":
        names = ", ".join(other.group.name for other in network.specs if other.tpm.kind == "discrete")
        actual = f"a node group of kind {spec.tpm.kind}"
        more = {"allowed": names} if names else {"hint": "This net has no discrete nodes"}
        raise BNetError(spec.group.name, expected="a discrete node group", actual=actual, **more)
    request = module.check_request([], **tensors)
    if spec is not None and spec.group.index in request.known:
        raise BNetError(f"{target}: do= sets this node group, so that it has no posterior")
    like = next(iter(module.store.values()), None)
    observed = check_evidence(network, evidence, request.known, request.word_counts, request.mask, like)
    if request.mask:
        targets = [] if spec is None else [spec.group.index]
        requested = network.graph.ancestral_set([*observed, *targets], request.known)
        check_masked_reads(network, requested, request.known, request.mask, request.word_counts)
    return request, observed


def find_posterior_dims(execution: ExecutionState, group: NodeGroup) -> list[int]:
    """The dims of the layout that a group's posterior has: the batch, its plates and its words."""
    axes = [*group.plates, *([] if group.word_stack is None else [WORD])]
    return [execution.layout.batch_dim, *sorted(map(execution.layout.axis, axes))]


def check_possible(execution: ExecutionState, factors: Sequence[Factor], total: Tensor) -> None:
    """Raise an error for evidence of probability zero; it names the first observation that is impossible given the
    earlier observations.
    """
    possible = total > LOG_ZERO / 2
    if bool(possible.all()):
        return
    if bool(total.isnan().any()):
        _check_inputs_finite(execution, factors)
    sentence = int((~possible).nonzero()[0])
    is_batch = len(total) > 1
    execution, factors = _select_sentence(execution, factors, sentence) if is_batch else (execution, factors)
    numbers = _number_observations(execution, factors)
    pieces = sum(number.numel() for number in numbers)
    count = bisect_left(range(pieces), True, key=lambda k: not _are_possible(execution, factors, numbers, 0, k))
    if count == 0:
        raise BNetError(
            "log evidence", expected="a log probability that is a number", actual="NaN without any evidence"
        )
    # The first `count - 1` observations are possible together, the first `count` are not. If some observations are
    # impossible, they are also impossible with further ones, so bisection finds the first.
    raise _impossible_evidence_error(execution, factors, numbers, count - 1, sentence if is_batch else None)


def _check_inputs_finite(execution: ExecutionState, factors: Sequence[Factor]) -> None:
    """Raise an error for inputs, set values and parameters that are not finite: the evidence is then not the fault."""
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
    """The execution state and the factors of one sentence of the batch."""
    batch_dim = execution.layout.batch_dim

    def select(table: Tensor) -> Tensor:
        return table.narrow(batch_dim, sentence, 1) if table.shape[batch_dim] > 1 else table

    selected = []
    for factor in factors:
        evidence = None if factor.evidence is None else Evidence(select(factor.evidence.value))
        selected.append(replace(factor, table=select(factor.table), evidence=evidence))
    return replace(execution, known={index: select(value) for index, value in execution.known.items()}), selected


def _get_evidence_shape(execution: ExecutionState, factor: Factor) -> torch.Size:
    """The shape of a factor's observations: batch, plates, words."""
    return factor.table.shape[execution.layout.batch_dim :]


def _number_observations(execution: ExecutionState, factors: Sequence[Factor]) -> list[Tensor]:
    """For each factor with evidence, the numbers of its observations: word by word, after those without a word."""
    axis, shapes, words = execution.layout.word_dim - execution.layout.batch_dim, [], []
    for factor in factors:
        if factor.evidence is not None:
            shape = _get_evidence_shape(execution, factor)
            has_words = factor.spec.group.word_stack is not None and not factor.is_summed
            word = torch.arange(shape[axis]) if has_words else torch.full([shape[axis]], -1)
            shapes.append(shape)
            words.append(word.reshape([-1, *[1] * (len(shape) - axis - 1)]).expand(shape).flatten())
    order = torch.cat(words).argsort(stable=True)
    numbers = torch.empty_like(order).index_put_((order,), torch.arange(len(order)))
    return [part.reshape(shape) for part, shape in zip(numbers.split([*map(len, words)]), shapes, strict=True)]


def _are_possible(
    execution: ExecutionState, factors: Sequence[Factor], numbers: Sequence[Tensor], low: int, high: int
) -> bool:
    """True if the observations numbered from `low` to `high - 1` have positive probability together."""
    masked, left = [], iter(numbers)
    for factor in factors:
        if factor.evidence is not None:
            number = next(left).to(factor.table.device)
            factor = replace(factor, table=factor.table.where((low <= number) & (number < high), 0.0), evidence=None)
        masked.append(factor)
    return bool((eliminate_choices(execution, masked) > LOG_ZERO / 2).all())


def _impossible_evidence_error(
    execution: ExecutionState, factors: Sequence[Factor], numbers: Sequence[Tensor], entry: int, sentence: int | None
) -> BNetError:
    """The error for one observation that is impossible, without other evidence or given the earlier observations."""
    layout, is_by_itself = execution.layout, not _are_possible(execution, factors, numbers, entry, entry + 1)
    pieces = [(factor, factor.evidence) for factor in factors if factor.evidence is not None]
    position = next(k for k, number in enumerate(numbers) if bool((number == entry).any()))
    (factor, evidence), group = pieces[position], pieces[position][0].spec.group
    index = (numbers[position] == entry).nonzero()[0].tolist()
    axes = [*group.plates, *([WORD] if group.word_stack is not None else [])]
    coordinates = [index[layout.axis(axis) - layout.batch_dim] for axis in axes]
    subject = group.name if factor.is_summed else join_name(group.name, coordinates)
    if sentence is not None or _get_evidence_shape(execution, factor)[0] > 1:
        subject += f" of sentence {index[0] if sentence is None else sentence}"
    full_index = [0] * layout.batch_dim + index
    value = evidence.value[tuple(0 if n == 1 else i for n, i in zip(evidence.value.shape, full_index, strict=False))]
    if factor.is_summed:
        value = evidence.value.select(layout.batch_dim, 0 if evidence.value.shape[layout.batch_dim] == 1 else index[0])
    if not bool(torch.isfinite(value).all()):
        return EvidenceError(subject, expected="finite numbers", actual=value.tolist())
    log_probs = factor.table[(..., *index)]
    if bool(log_probs.isnan().any()):
        return BNetError(subject, expected="a log probability that is a number", actual="NaN")
    condition = "" if is_by_itself else " given the evidence before it"
    if factor.spec.tpm.kind == "continuous":  # a positive density may still be too small
        expected = f"evidence whose log density is above {LOG_ZERO / 2:g} in some state of the net"
        return EvidenceError(subject, expected=expected, actual=f"a lower log density{condition}: {value.tolist()}")
    actual = f"a value of probability zero{condition}: {value.tolist()}"
    return EvidenceError(subject, expected="evidence that is possible in some state of the net", actual=actual)


def eliminate_choices(execution: ExecutionState, factors: list[Factor], dtype: torch.dtype | None = None) -> Tensor:
    """The log of the sum, over all choices, of the product of the factors.

    Choices on which nodes of other plates depend do not occur here: `EliminationProblem.fault` excludes them.

    Args:
        execution: The state after the pass that computed the factors.
        factors: The factors, in the layout of the execution.
        dtype: The type of the result, and of the sum of constants. float64 preserves differences that float32 loses if
            the log likelihood is large.

    Returns:
        `[batch]`, or `[1]` with a selector of the corpus.
    """
    layout, specs = execution.layout, execution.network.specs
    local = {i for i in layout.enumerated if specs[i].group.word_stack is not None or specs[i].group.plates}
    corpus = {i for i in layout.enumerated if specs[i].scope == "corpus"}
    batch, axes = get_batch_size(factors, execution), tuple(range(layout.batch_dim + 1, layout.rank))
    tables_by_axes: dict[tuple[tuple[str, ...], str | None], list[Tensor]] = {}
    constants: list[Tensor] = []  # the same in every state of the choices
    for factor in factors:
        group, table = factor.spec.group, factor.table
        over = ((), None) if factor.is_summed else (group.plates, group.word_stack)
        # A log likelihood may be near -10^8, where neighbouring float32 numbers differ by 8, so that all digits of a
        # log prior would be lost in the sum. So the maximum over the choices is subtracted from each likelihood and
        # added at the end. These maxima are constants (detached): log-sum-exp does not depend on the constant that is
        # subtracted, so that gradients, posteriors and expected counts are those of the log evidence.
        if factor.evidence is not None and factor.spec.scope != "corpus":
            choices = [k for k in range(layout.batch_dim) if table.shape[k] > 1]
            greatest = _detached_amax(table, choices) if choices else table
            constant = greatest.to(dtype or greatest.dtype)
            full_shape = get_full_shape(execution, *over, batch)
            expanded = constant.expand(broadcast_shapes(constant.shape, full_shape))
            constants.append(expanded.sum(axes, keepdim=True))
            if not choices:
                continue
            table = table - greatest
        tables_by_axes.setdefault(over, []).append(table)
    remaining = tables_by_axes.pop(((), None), [])
    # Given the choices of the sentence and the corpus, nodes of different words or plates are independent. So the sums
    # over the choices of each word are computed for all words at once, and their logs are added.
    for (plates, words), tables in tables_by_axes.items():
        inner_choices = {i for i in local if (specs[i].group.plates, specs[i].group.word_stack) == (plates, words)}
        shape = get_full_shape(execution, plates, words, batch)
        tables = _sum_out_choices(execution, tables, sorted(inner_choices - {*layout.neighbours}))
        tables, chains = _sum_out_chains(execution, tables, sorted(inner_choices & {*layout.neighbours}))
        remaining += [table.expand(broadcast_shapes(table.shape, shape)).sum(axes, keepdim=True) for table in tables]
        shape[layout.word_dim] = 1
        remaining += [table.expand(broadcast_shapes(table.shape, shape)).sum(axes, keepdim=True) for table in chains]
    corpus_tables = [f.table for f in factors if f.spec.scope == "corpus" and f.spec.group.index in corpus]
    remaining = [table for table in remaining if not any(table is corpus_table for corpus_table in corpus_tables)]
    sentence_choices = [i for i in layout.enumerated if i not in local and i not in corpus]
    total = _add_log_tables(_sum_out_choices(execution, remaining, sentence_choices), execution)
    if corpus:
        total = total.expand(*total.shape[: layout.batch_dim], batch, *total.shape[layout.batch_dim + 1 :])
        corpus_tables = [total.sum(layout.batch_dim, keepdim=True), *corpus_tables]
        total = _add_log_tables(_sum_out_choices(execution, corpus_tables, sorted(corpus)), execution)
        constants = [constant.sum(layout.batch_dim, keepdim=True) for constant in constants]
        batch = 1
    total = _add_log_tables([total, *constants], execution).to(dtype or execution.log_dtype)
    return total.expand(*[1] * layout.batch_dim, batch, *[1] * (layout.rank - layout.batch_dim - 1)).reshape(batch)


def _sum_out_choices(execution: ExecutionState, tables: list[Tensor], choices: list[int]) -> list[Tensor]:
    """Sum the choices out; the tables that remain do not depend on them."""
    layout = execution.layout
    remaining = list(choices)
    while remaining:
        dims = {i: layout.enumerated.index(i) for i in remaining}
        touching = {i: [table for table in tables if table.shape[dim] > 1] for i, dim in dims.items()}
        # Greedy elimination order by the size of the joint table (Koller and Friedman 2009, section 9.4): a heuristic,
        # because the optimal order is NP-hard. Every order gives the same sum.
        shapes = {i: broadcast_shapes(*(t.shape for t in operands)) for i, operands in touching.items() if operands}
        costs = {i: math.prod(shapes.get(i, (0,))) for i in remaining}
        chosen = min(remaining, key=costs.__getitem__)
        if costs[chosen] > MAX_TABLE_ELEMENTS:
            name = execution.network.specs[chosen].group.name
            raise BudgetError(
                f"eliminating {name}",
                expected=f"a table of at most {MAX_TABLE_ELEMENTS} numbers",
                actual=format_count(costs[chosen]),
                hint="Set or observe some of these choices, or pass fewer sentences at once",
            )
        dim = dims[chosen]
        tables = [table for table in tables if table.shape[dim] == 1]
        if touching[chosen]:
            tables.append(_logsumexp(_add_log_tables(touching[chosen], execution), dim))
        remaining.remove(chosen)
    return tables


def _sum_out_chains(
    execution: ExecutionState, tables: list[Tensor], choices: list[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Sum out all states of chains along words: the tables that do not depend on them, and one table of each chain."""
    layout, remaining, totals = execution.layout, list(choices), list[Tensor]()
    while remaining:
        chain, touching = {remaining[0]}, list[Tensor]()
        size = 0
        while len(chain) > size:  # choices that share a table are one chain, of their joint states
            size = len(chain)
            dims = {i: (layout.enumerated.index(i), layout.neighbour_dim(i)) for i in choices}
            touching = [t for t in tables if any(t.shape[dim] > 1 for i in chain for dim in dims[i])]
            chain |= {i for i in choices for t in touching if any(t.shape[dim] > 1 for dim in dims[i])}
        tables = [table for table in tables if not any(table is joined for joined in touching)]
        if touching:
            unary, pair, shape = _arrange_chain(execution, touching, sorted(chain))
            totals.append(chain_log_partition(unary, pair).reshape(shape))
        remaining = [i for i in remaining if i not in chain]
    return tables, totals


def _arrange_chain(
    execution: ExecutionState, tables: list[Tensor], chain: list[int]
) -> tuple[Tensor, Tensor, list[int]]:
    """The tables of one chain, added and flat in its batch dims and in its joint states.

    Returns:
        The tables of one word, `[word, batch, state]`; those of each word after the first and the word before it,
        `[word - 1, batch or 1, state of the word before, state]`; and the shape of the batch in the layout.
    """
    layout, states = execution.layout, [execution.network.count_states(i, execution.word_counts) for i in chain]
    dims, neighbour_dims = [layout.enumerated.index(i) for i in chain], [layout.neighbour_dim(i) for i in chain]
    has_neighbour = [any(table.shape[dim] > 1 for dim in neighbour_dims) for table in tables]
    unary = _add_log_tables([t for t, is_pair in zip(tables, has_neighbour, strict=True) if not is_pair], execution)
    pair = _add_log_tables([t for t, is_pair in zip(tables, has_neighbour, strict=True) if is_pair], execution)
    state_dims = dict(zip((*dims, *neighbour_dims), states * 2, strict=True))
    words = get_full_shape(execution, (), execution.network.specs[chain[0]].group.word_stack, 1)
    shape = broadcast_shapes(unary.shape, pair.shape, words)
    batch = [dim for dim in range(layout.rank) if dim not in state_dims and dim != layout.word_dim]

    def arrange(table: Tensor, selected: list[int]) -> Tensor:
        """The table as `[word, batch, states]`, flat in its batch and in its states; the batch may stay 1."""
        has_batch = any(table.shape[dim] > 1 for dim in batch)
        expanded = {layout.word_dim, *selected, *(batch if has_batch else ())}
        full = [state_dims.get(dim, shape[dim]) if dim in expanded else 1 for dim in range(layout.rank)]
        order = [layout.word_dim, *batch, *selected, *(dim for dim in state_dims if dim not in selected)]
        return (
            table.expand(full).permute(order).reshape(full[layout.word_dim], -1, math.prod(full[d] for d in selected))
        )

    flat_unary = arrange(unary, dims).expand(-1, math.prod(shape[dim] for dim in batch), -1)
    flat_pair = arrange(pair, [*neighbour_dims, *dims]).unflatten(-1, (math.prod(states), -1))
    # The word at the end has no neighbour: its row of the pair table is the same for each state of the neighbour.
    if chain[0] in layout.backward:
        flat_unary = torch.cat([flat_unary[:-1], flat_unary[-1:] + flat_pair[-1:, :, 0]])
        flat_pair = flat_pair[:-1].mT
    else:
        flat_unary = torch.cat([flat_unary[:1] + flat_pair[:1, :, 0], flat_unary[1:]])
        flat_pair = flat_pair[1:]
    return flat_unary, flat_pair, [shape[dim] if dim in batch else 1 for dim in range(layout.rank)]


def _detached_amax(table: Tensor, dims: int | list[int]) -> Tensor:
    """The maximum over some dims, without gradient; zero where it is not finite."""
    return table.detach().amax(dims, keepdim=True).nan_to_num(0.0, 0.0, 0.0)


def _logsumexp(table: Tensor, dim: int) -> Tensor:
    """`log sum exp` over a dim, with a gradient that sums to 1 in every floating type.

    The gradient of `torch.logsumexp` is `exp(table - result)`. Its sum has the rounding error of the result: at -10^6
    it is off by 3% in float32. Here the gradient is each term of the sum, divided by the sum.
    """
    greatest = _detached_amax(table, dim)
    return (table - greatest).exp().sum(dim, keepdim=True).log() + greatest


def _add_log_tables(tables: list[Tensor], execution: ExecutionState) -> Tensor:
    """The sum of log tables, in increasing order of size, so that a table without a batch is added only once."""
    if not tables:
        return torch.zeros([1] * execution.layout.rank, dtype=execution.log_dtype, device=execution.device)
    ordered = sorted(tables, key=Tensor.numel)
    return ordered[0] if len(ordered) == 1 else reduce(torch.add, ordered).clamp(min=LOG_ZERO)


def get_full_shape(execution: ExecutionState, plates: tuple[str, ...], words: str | None, batch_size: int) -> list[int]:
    """The shape, in the layout, of a table over all nodes of a group that depends on no choice."""
    layout = execution.layout
    shape = [1] * layout.rank
    shape[layout.batch_dim] = batch_size
    for plate in plates:
        shape[layout.axis(plate)] = execution.network.graph.plate_sizes[plate]
    if words is not None:
        shape[layout.axis(WORD)] = execution.word_counts[words]
    return shape


def get_batch_size(factors: list[Factor], execution: ExecutionState) -> int:
    """The number of sentences in the batch."""
    sizes = [factor.table.shape[execution.layout.batch_dim] for factor in factors]
    sizes += [value.shape[execution.layout.batch_dim] for value in execution.known.values()]
    return max(sizes, default=1)

"""Log factors for elimination: one tensor for each random node group that matters, in the compiled layout."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD
from bnet_transformer._core.tensors import is_readable
from bnet_transformer.compiler.evaluate import gather_attention_inputs
from bnet_transformer.compiler.fused import AttentionInputs, apply_maps, attend, classify_dims, scaled_product
from bnet_transformer.compiler.gather import (
    ExecutionRequest,
    ExecutionState,
    build_context,
    enumerate_states,
    gather_parents,
    get_present_mask,
    lay_out_value,
    zero_padding,
)
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.compiler.plan import (
    ExecutionPlan,
    PlanRequest,
    StructureError,
    elimination_error,
    unset_parent_error,
)
from bnet_transformer.cost.net_cost import count_plan_flops
from bnet_transformer.data import Evidence
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BudgetError, format_count
from bnet_transformer.reference import ATOL, BUDGET, is_close
from bnet_transformer.tpm import Attention, Categorical, Dot, EvalContext, Normal
from bnet_transformer.tpm.base import broadcast_shapes
from bnet_transformer.tpm.deterministic import apply_linear
from bnet_transformer.tpm.random import squared_distance

# --------------------------------------------------------------------------------------------------------------------
# The likelihood of a readout of an attention, for all words together, without the mean of each joint state.
#
# The linear map of the readout commutes with the attention weights: `W (P v) = P (W v)`. For a Normal readout
#
#     sum_i |t_i - sum_j P_ij v_j|^2 = |t|^2 - 2 <P, t v^T> + <P^T P, v v^T>
#
# On the right, the choices of P (of q and k) and the choices of v are combined only in a product of Gram matrices. With
# M atoms for each of q, k and v, the right-hand side takes M^2 attentions and M^3 inner products of n^2 numbers; the
# left-hand side takes M^3 products of n^2 d numbers.


MIN_LOG_SIGMA = -2.5  # minimum log sigma for Gram matrices in float32
MIN_SPEEDUP = 2.0  # required ratio of products, because products of Gram matrices are small and slow


def find_deferred_attention(
    network: Network,
    observed: Collection[int],
    ancestral_set: Collection[int],
    retained: Collection[int],
    enumerated: Collection[int],
) -> dict[int, int]:
    """Readouts whose attention no other computation requires.

    Args:
        network: The net.
        observed: Groups with evidence.
        ancestral_set: All groups that matter.
        retained: Groups whose values are requested or set.
        enumerated: The enumerated choices.

    Returns:
        A mapping from readout to its attention, by group index.
    """
    deferred = {}
    if any(network.specs[i].group.word_stack is not None or network.specs[i].group.plates for i in enumerated):
        return {}
    for index in observed:
        spec = network.specs[index]
        if _is_affine_readout(spec) and not spec.group.plates and index not in retained:
            (parent,) = spec.parents
            readers = {edge.child for edge in network.graph.out_edges[parent.index]} & set(ancestral_set)
            is_same_word = not parent.pick and parent.reach.kind == "same" and spec.group.word_stack is not None
            if is_same_word and readers == {index} and _is_fusible_attention(network.specs[parent.index], retained):
                deferred[index] = parent.index
    return deferred


def _is_affine_readout(spec: NodeSpec) -> bool:
    """True for a readout of single words that is affine in one vector."""
    tpm = spec.tpm
    if not isinstance(tpm, Normal | Categorical) or tpm.pool or len(spec.parents) != 1:
        return False
    return isinstance(tpm, Normal) or (tpm.affine and spec.tpm_parents[0].states is None)


def _is_fusible_attention(spec: NodeSpec, retained: Collection[int]) -> bool:
    """True for softmax attention over words by scaled dot products, without a bias."""
    tpm = spec.tpm
    if not isinstance(tpm, Attention) or spec.group.plates or spec.group.index in retained:
        return False
    is_plain = isinstance(tpm.score, Dot) and tpm.score.rotary is None and tpm.bias is None and tpm.over == "keys"
    over = all(parent.over == (WORD,) and not parent.pick for parent in spec.parents[1:3])
    return is_plain and over and tpm.normaliser.kind == "softmax" and not spec.parents[0].pick


def deferred_log_likelihood(
    execution: ExecutionState, plan: ExecutionPlan, spec: NodeSpec, y: Tensor, observed: Tensor | None
) -> Tensor:
    """`log P(y | choices)`, summed over all words.

    Args:
        execution: The state after the pass.
        plan: The plan of the pass.
        spec: The readout.
        y: The observed values, in the layout.
        observed: The mask of observed words; None for all.
    """
    x = execution.network.specs[spec.parents[0].index]
    attention, output_map, residual = gather_attention_inputs(execution, x, plan.folds.get(x.group.index))
    context = build_context(execution, spec)
    W = context.parameters.get("weight")
    if W is not None:
        residual = None if residual is None else apply_linear(W, residual)
        if output_map is None and _is_map_first_cheaper(W, attention):
            attention = replace(attention, v=apply_linear(W, attention.v))
        else:
            output_map = W if output_map is None else W @ output_map
    if isinstance(spec.tpm, Normal):
        target = y if W is None else y - context["bias"]
        target = target if residual is None else target - residual
        return _normal_log_likelihood(spec.tpm, context, attention, output_map, target, observed)
    logits = context["logits"] if residual is None else context["logits"] + residual
    logits = _mapped_mix(attention, output_map) + logits
    # Subtract the detached maximum: `exp(logits - logsumexp)`, the gradient of torch.logsumexp, does not sum to 1 when
    # logits are large. (log_softmax is slower for few states.)
    logits = logits - logits.detach().amax(-1, keepdim=True)
    return _sum_over_words(_gather_states(logits, y) - logits.exp().sum(-1).log(), observed)


def _normal_log_likelihood(
    tpm: Normal,
    context: EvalContext,
    attention: AttentionInputs,
    output_map: Tensor | None,
    target: Tensor,
    observed: Tensor | None,
) -> Tensor:
    """The log likelihood of a Normal readout, by Gram matrices if that costs less and is precise enough."""
    if output_map is None and _is_gram_precise(context["log_sigma"]) and _is_gram_cheaper(attention, target):
        square = _gram_squared_error(attention, target, observed)
    else:
        mean = _mapped_mix(attention, output_map)
        over = (-1,) if observed is not None else (-2, -1)
        square = squared_distance(target, mean, over)
        square = square.unsqueeze(-1) if observed is None else _sum_over_words(square, observed)
    words = target.shape[-2] if observed is None else observed.sum(-1, keepdim=True)
    return tpm.log_density(context, square, words * target.shape[-1])


def _mapped_mix(attention: AttentionInputs, output_map: Tensor | None) -> Tensor:
    """The mixed values, multiplied by the output map."""
    mix = attend(attention)
    return mix if output_map is None else apply_maps([output_map], mix, [None])[0]


def _sum_over_words(values: Tensor, observed: Tensor | None) -> Tensor:
    """The sum over the observed words."""
    return (values if observed is None else values * observed).sum(-1, keepdim=True)


def _is_map_first_cheaper(W: Tensor, attention: AttentionInputs) -> bool:
    """True if mapping the values takes fewer products than mapping the mixed values of every joint state."""
    (rows, width), m = W.shape[-2:], attention.k.shape[-2]
    return rows * m <= width * (m + rows)


def _is_gram_precise(log_sigma: Tensor) -> bool:
    """False in float32 with a small sigma: the terms of the expansion are much larger than their sum (cancellation)."""
    if log_sigma.dtype == torch.float64 or not is_readable(log_sigma):
        return True
    return float(log_sigma.detach().min()) >= MIN_LOG_SIGMA


def _is_gram_cheaper(attention: AttentionInputs, target: Tensor) -> bool:
    """True if Gram matrices take far fewer products than the mixed values of every joint state."""
    dims = classify_dims(attention, target)
    n, m, width = attention.q.shape[-2], attention.k.shape[-2], attention.v.shape[-1]
    P, V = dims.count_entries(dims.only_q) * dims.count_entries(dims.only_k), dims.count_entries(dims.only_v)
    grams = P * m * (n * m + V * (n + m)) + V * m * width * (n + m)
    return P * V * n * m * width > MIN_SPEEDUP * grams


def _gram_squared_error(attention: AttentionInputs, target: Tensor, observed: Tensor | None) -> Tensor:
    """`sum_i |t_i - sum_j P_ij v_j|^2`, `[*lead, 1]`."""
    mask_by_word = None if observed is None else observed.unsqueeze(-1)
    # The expansion in the module docstring: <P, t v^T> and <P^T P, v v^T> are inner products of n m and m^2 numbers,
    # one for each pair of a state of P and a state of v, so that no mixture P v of a joint state is computed.
    dims = classify_dims(attention, target, *([] if mask_by_word is None else [mask_by_word]))
    n, m, width = attention.q.shape[-2], attention.k.shape[-2], attention.v.shape[-1]
    Q, K, V = (
        dims.flatten(attention.q, dims.only_q, is_leading=True),
        dims.flatten(attention.k, dims.only_k),
        dims.flatten(attention.v, dims.only_v, is_leading=True),
    )
    t, count = dims.flatten(target, ()), len(Q)
    mask = None if mask_by_word is None else dims.flatten(mask_by_word, ())
    t = t if mask is None else t * mask
    values = V.reshape(-1, m, width)
    vv = torch.bmm(values, values.mT).reshape(count, -1, m * m)
    tv = torch.bmm(t, V.mT).reshape(count, n, -1, m).transpose(1, 2).reshape(count, -1, n * m)
    squares = []
    for k in K.reshape(count, m, -1, K.shape[-1]).unbind(2):  # one state of the keys at a time, to limit memory
        scores = scaled_product(Q, k, attention.scale).reshape(count, -1, n, m)
        if attention.mask is not None:
            scores = scores.masked_fill(~dims.flatten_mask(attention.mask).unsqueeze(-3), -torch.inf)
        P = scores.softmax(-1)
        P = (P if mask is None else P * mask.unsqueeze(1)).reshape(-1, n, m)
        pp = torch.bmm(P.mT, P).reshape(count, -1, m * m)
        squares.append(torch.baddbmm(torch.bmm(pp, vv.mT), P.reshape(count, -1, n * m), tv.mT, alpha=-2))
    total = torch.stack(squares, 2) + t.square().sum((1, 2))[:, None, None, None]
    return dims.unflatten(total.flatten(1, 2), 1, 1).squeeze(-1)


OVER_BUDGET_HINT = (
    "Raise the budget (s.limits(budget=...)), set or observe some of these, or use sample(n) of a sentence without "
    "evidence"
)
LOG_ZERO = -1e30  # the log of probability 0: finite, so that sums and gradients are finite


@dataclass(frozen=True)
class Factor:
    """`log P` of one group, or of its evidence; its plates and words are those of the group."""

    spec: NodeSpec
    table: Tensor
    evidence: Evidence | None = None
    is_summed: bool = False  # whether it is summed over its words


@dataclass(frozen=True)
class EliminationProblem:
    """The structure of an elimination, without numbers. Groups are identified by index."""

    outputs: tuple[int, ...]  # groups whose values the factors need
    fixed: frozenset[int]  # random groups that evidence fixes
    enumerated: frozenset[int]  # choices that are enumerated
    factor_groups: tuple[int, ...]  # groups with a factor
    deferred_attention: Mapping[int, int]  # readout -> the attention that its likelihood computes
    ancestor_choices: Mapping[int, Collection[int]]  # group -> the choices on which it depends
    chain_scopes: Mapping[int, Collection[int]]  # first choice of a chain -> those of two words, and of the sentence
    fault: StructureError | None  # why elimination does not apply; not raised here

    @property
    def scopes(self) -> list[tuple[int, Collection[int]]]:
        """The choices in the scope of each sum, and a group that depends on them."""
        return [*self.ancestor_choices.items(), *self.chain_scopes.items()]

    def find_largest_scope(self, network: Network, words: Mapping[str, int]) -> tuple[int, int, Collection[int]]:
        """The number of joint states of the largest sum, a group that depends on its choices, and the choices."""
        counts = ((math.prod(network.count_states(i, words) for i in scope), k, scope) for k, scope in self.scopes)
        return max(counts, key=itemgetter(0), default=(1, 0, ()))

    def bind(self, evidence: Mapping[int, Evidence], request: ExecutionRequest, atol: float = ATOL) -> FactorRequest:
        """The factors of evidence and sentences with the structure of this problem.

        Args:
            evidence: The evidence, by group.
            request: The sentences and their interventions; this method sets the groups that are computed.
            atol: The tolerance of evidence on groups that are functions of their parents.
        """
        patched = request.patched
        observed = {index: _merge_set_states(evidence[index], patched.get(index)) for index in self.fixed}
        pass_request = replace(
            request,
            outputs=self.outputs,
            known={**request.known, **observed},
            patched={index: patch for index, patch in patched.items() if index not in self.fixed},
            training=bool(request.training),
            enumerate_too=self.enumerated,
            has_chains=True,
            deferred=frozenset(self.deferred_attention.values()),
        )
        return FactorRequest(self, evidence, request, pass_request, atol)


@dataclass(frozen=True)
class FactorRequest:
    """The factors that `compute_factors` computes: their structure, the evidence by group, and the pass of the net."""

    problem: EliminationProblem
    evidence: Mapping[int, Evidence]
    sentence_request: ExecutionRequest  # the sentences and their interventions, without the evidence
    pass_request: ExecutionRequest  # the pass over these sentences, with the values that the evidence fixes
    atol: float

    def with_evidence(self, evidence: Mapping[int, Evidence]) -> FactorRequest:
        """The factors of other evidence with the same structure."""
        return self.problem.bind(evidence, self.sentence_request, self.atol)

    def count_flops(self, module: CompiledModule, batch: int = 1) -> int | None:
        """The floating-point operations of the pass for a batch of sentences."""
        outputs = tuple(dict.fromkeys([*self.problem.outputs, *self.problem.factor_groups]))
        structure = self.pass_request.structure._replace(outputs=outputs, patched=frozenset(), deferred=frozenset())
        return count_plan_flops(module, structure, self.pass_request.word_counts, batch)


def request_factors_unchecked(
    module: CompiledModule,
    evidence: Mapping[int, Evidence],
    target: int | None,
    request: ExecutionRequest,
    atol: float = ATOL,
    *,
    defer: bool = True,
) -> FactorRequest:
    """Request the factors of evidence and a target; if elimination does not apply, `problem.fault` is the reason.

    Args:
        module: The compiled net.
        evidence: The evidence, by group.
        target: The requested discrete group, if any.
        request: The sentences and their interventions.
        atol: The tolerance of evidence on groups that are functions of their parents.
        defer: Whether the likelihood of a readout may be computed without its mean (`deferred_log_likelihood`).
    """
    patched, do = request.patched, request.known.keys() - {spec.group.index for spec in module.network.inputs}
    forms = {index: _classify_evidence(item, patched.get(index)) for index, item in evidence.items()}
    partly_set = patched.keys() | request.attention_rows.keys() | request.changes.keys()
    # The log likelihoods of a net in half precision are computed in float32 (all its parameters have the same type).
    first = next(iter(module.store.values()), None)
    defer = defer and not (first is not None and first.dtype in (torch.float16, torch.bfloat16))
    key = (*forms.items(), target, frozenset(do), frozenset(partly_set), defer)
    build = partial(build_elimination_problem, module, forms, target, do, partly_set, defer=defer)
    return module.memoize(("question", *key), build).bind(evidence, request, atol)


def request_factors(
    module: CompiledModule,
    evidence: Mapping[int, Evidence],
    target: int | None,
    request: ExecutionRequest,
    *,
    budget: int = BUDGET,
    atol: float = ATOL,
    defer: bool = True,
) -> FactorRequest:
    """Request the factors of evidence and a target, and raise an error if elimination does not apply.

    The Args are those of `request_factors_unchecked`, and `budget`, the maximum number of joint states of the choices
    on which one value depends.

    Raises:
        StructureError: Elimination does not apply.
        BudgetError: A value depends on more joint states than the budget.
    """
    factor_request = request_factors_unchecked(module, evidence, target, request, atol, defer=defer)
    if factor_request.problem.fault is not None:
        # The error of the plan has the number of words.
        module.plan(factor_request.pass_request.structure, request.word_counts)
        raise factor_request.problem.fault
    for index, choices in factor_request.problem.scopes:
        check_elimination_budget(module.network, index, choices, request.word_counts, budget)
    return factor_request


def compute_factors(module: CompiledModule, factor_request: FactorRequest) -> tuple[ExecutionState, list[Factor]]:
    """The execution state after the pass, and the factors."""
    execution, plan = module.execute(factor_request.pass_request)
    problem, factors = factor_request.problem, []
    for index in problem.factor_groups:
        spec = module.network.specs[index]
        if index in problem.enumerated:
            factors.append(Factor(spec, log_prior(execution, index, spec)))
        if index in factor_request.evidence:
            aligned = align_evidence(execution, spec, factor_request.evidence[index])
            if index in problem.deferred_attention:
                log_probs = deferred_log_likelihood(execution, plan, spec, aligned.value, aligned.observed)
                table = log_probs.clamp(min=LOG_ZERO)
                factors.append(Factor(spec, table, aligned, is_summed=True))
                continue
            if index in problem.enumerated and not aligned.value.is_floating_point():
                log_probs = torch.where(enumerate_states(execution, index) == aligned.value, 0.0, LOG_ZERO)
                log_probs = log_probs.to(execution.log_dtype)
            elif index in problem.enumerated:
                log_probs = _value_log_indicator(execution, index, spec, aligned, factor_request.atol)
            else:
                log_probs = evidence_log_prob(execution, index, spec, aligned, factor_request.atol)
            factors.append(Factor(spec, mask_unobserved(aligned, log_probs), aligned))
    return execution, factors


def build_elimination_problem(
    module: CompiledModule,
    forms: Mapping[int, tuple[bool, bool]],
    target: int | None,
    do: Collection[int],
    partly_set: Collection[int],
    *,
    defer: bool = True,
) -> EliminationProblem:
    """The structure of an elimination, and its fault if it has one.

    Args:
        module: The compiled net.
        forms: For each group with evidence, whether it covers all nodes, and whether it consists of real numbers.
        target: The requested discrete group, if any.
        do: Groups that are set.
        partly_set: Groups of which some nodes, or the attention rows of some nodes, are set.
        defer: Whether the likelihood of a readout may be computed without its mean.
    """
    # Elimination needs factors for the random ancestors of the evidence and the target; interventions cut the graph
    # above the nodes that they set, and nodes below are barren (Shachter 1986). Random groups with full evidence are
    # constants (`fixed`), and the discrete ones that remain are enumerated.
    network, known = module.network, set(do)
    requested = [*forms, *([] if target is None else [target])]
    ancestral = network.graph.ancestral_set(requested, known)
    parents = {edge.parent for index in ancestral for edge in network.graph.in_edges[index] if index not in known}
    random = {i for i in ancestral if network.specs[i].tpm.is_random and i not in known}
    discrete = {i for i in random if network.specs[i].tpm.kind == "discrete"}
    targets = set() if target is None else {target}
    targets |= {i for i, (_, is_real) in forms.items() if is_real and i in discrete}
    fixed = set()  # without values of the whole corpus, whose probability counts once
    for i in (parents - targets) & forms.keys():
        (is_complete, is_real), spec = forms[i], network.specs[i]
        is_state = spec.tpm.kind == "discrete" and not is_real
        if is_complete and spec.scope != "corpus" and (is_state or spec.tpm.kind == "continuous"):
            fixed.add(i)
    enumerated = (discrete - fixed) & (parents | targets)
    needed = random | set(requested) - known
    observed = forms.keys() - known
    required = {*known, *fixed, *targets, *(observed - random), *partly_set}
    deferred = find_deferred_attention(network, observed, ancestral, required, enumerated) if defer else {}
    closed = known | fixed
    parents_of_fixed = {edge.parent for index in fixed for edge in network.graph.in_edges[index]}
    outputs = tuple(sorted((needed - fixed) | parents_of_fixed))
    choices = {index: find_ancestor_choices(network, index, enumerated, closed) for index in enumerated | observed}
    unset = [i for i in sorted(parents_of_fixed - closed) if network.specs[i].tpm.kind == "continuous"]
    fault = unset_parent_error(network.specs[unset[0]].group.name) if unset else None
    patched = frozenset(set(partly_set) - fixed)
    request = PlanRequest(outputs, frozenset(closed), frozenset(enumerated), patched, has_chains=True)
    needs = module.find_requirements(request)
    chains = _find_chains(network, choices.values(), needs.word_offsets)
    fault = fault or needs.fault or _find_direction_fault(network, chains, needs.word_offsets)
    return EliminationProblem(
        outputs=outputs,
        fixed=frozenset(fixed),
        enumerated=frozenset(enumerated),
        factor_groups=tuple(sorted(needed)),
        deferred_attention=deferred,
        ancestor_choices={index: choices.get(index, ()) for index in requested},
        chain_scopes={chain[0]: _join_scopes(network, chain, choices.values()) for chain in chains},
        fault=fault or _find_plate_fault(network, choices, deferred),
    )


def _find_chains(
    network: Network, scopes: Collection[Collection[int]], word_offsets: Mapping[int, int]
) -> tuple[tuple[int, ...], ...]:
    """The choices that form chains along words. Choices of words that share a factor, or are joined by such choices,
    form one chain: its states are their joint states.
    """
    chains: list[set[int]] = []
    for scope in scopes:
        joined = {i for i in scope if network.specs[i].group.word_stack is not None}
        for chain in [chain for chain in chains if chain & joined]:
            chains.remove(chain)
            joined |= chain
        chains.append(joined)
    members = (tuple(sorted(chain & word_offsets.keys())) for chain in chains)
    return tuple(chain for chain in members if chain)


def _join_scopes(network: Network, chain: Collection[int], scopes: Collection[Collection[int]]) -> tuple[int, ...]:
    """The choices in the sums of a chain: its own at two neighbouring words, and those of the sentence and the corpus
    that share a factor with it.
    """
    shared = {i for scope in scopes if set(scope) & {*chain} for i in scope}
    return (*chain, *chain, *sorted(i for i in shared if network.specs[i].group.word_stack is None))


def _find_direction_fault(
    network: Network, chains: Collection[Collection[int]], word_offsets: Mapping[int, int]
) -> StructureError | None:
    """The error for a chain of choices of which some depend on the word before, and others on the word after."""
    for chain in chains:
        if len({word_offsets[index] for index in chain}) > 1:
            names = " and ".join(network.specs[index].group.name for index in chain)
            reason = f"{names} are chains along words in opposite directions, and values depend on both"
            return elimination_error(network.specs[min(chain)].group.name, reason)
    return None


def _find_plate_fault(
    network: Network, ancestor_choices: Mapping[int, Collection[int]], deferred_attention: Collection[int]
) -> StructureError | None:
    """The error for a choice of each word or plate, if a group with other plates or words depends on it."""
    for index, choices in sorted(ancestor_choices.items()):
        group = network.specs[index].group
        axes = ((), None) if index in deferred_attention else (group.plates, group.word_stack)
        for choice in choices:
            other = network.specs[choice].group
            if (other.word_stack is not None or other.plates) and (other.plates, other.word_stack) != axes:
                reason = f"{group.name}, which has other plates or words, depends on several nodes of {other.name}"
                return elimination_error(other.name, reason)
    return None


def _classify_evidence(evidence: Evidence, patch: tuple[Tensor, Tensor] | None) -> tuple[bool, bool]:
    """Whether evidence covers all nodes of its group that are not set, and whether it consists of real numbers.

    If evidence on a choice consists of real numbers, these are the vector that its children receive, not its state.
    """
    real = isinstance(evidence.value, Tensor) and evidence.value.is_floating_point()
    if patch is None or evidence.observed is None:
        return evidence.observed is None, real
    value, is_set = patch
    return bool((evidence.observed | is_set).all()) and value.is_floating_point() == real, real


def _merge_set_states(evidence: Evidence, patch: tuple[Tensor, Tensor] | None) -> Tensor:
    """The states of all nodes of a group, of which some are observed and others are set."""
    if patch is None:
        return evidence.value
    value, is_set = patch
    return torch.where(is_set.reshape(*is_set.shape, *[1] * (value.dim() - is_set.dim())), value, evidence.value)


def align_evidence(execution: ExecutionState, spec: NodeSpec, evidence: Evidence) -> Evidence:
    """Reshape evidence to the layout, with zeros at nodes that are not observed and at padding."""
    index, observed_mask = spec.group.index, get_present_mask(execution, spec.group.word_stack)
    value = evidence.value if evidence.value.is_floating_point() else evidence.value.long()
    value = lay_out_value(execution, index, value)
    if evidence.observed is not None:
        observed = lay_out_value(execution, index, evidence.observed.long()).bool()
        observed_mask = observed if observed_mask is None else observed_mask & observed
    if observed_mask is not None:
        value = value.where(observed_mask.reshape(*observed_mask.shape, *[1] * (value.dim() - observed_mask.dim())), 0)
    return Evidence(value, observed_mask)


def mask_unobserved(evidence: Evidence, table: Tensor) -> Tensor:
    """A table of log likelihoods, zero at nodes that are not observed."""
    return table if evidence.observed is None else torch.where(evidence.observed, table, 0.0)


def find_ancestor_choices(network: Network, index: int, enumerated: set[int], closed: set[int]) -> list[int]:
    """The choices on which a group depends, including itself."""
    parents = {edge.parent for edge in network.graph.in_edges[index]}
    return sorted(enumerated & {index, *(network.graph.ancestral_set(parents, enumerated | closed) - closed)})


def check_elimination_budget(
    network: Network, index: int, enumerated: Collection[int], words: Mapping[str, int], budget: int
) -> None:
    """Raise an error if the choices have more joint states than the budget."""
    count = math.prod(network.count_states(i, words) for i in enumerated)
    if count > budget:
        names = ", ".join(network.specs[i].group.name for i in enumerated)
        raise BudgetError(
            f"exact elimination for {network.specs[index].group.name}",
            expected=f"at most {format_count(budget)} joint states for each sentence ({names})",
            actual=format_count(count),
            hint=OVER_BUDGET_HINT,
        )


def log_prior(execution: ExecutionState, index: int, spec: NodeSpec) -> Tensor:
    """`log P(state | parents)` of every state, along the dim of the group."""
    position = execution.layout.enumerated.index(index)
    table = state_log_probs(execution, spec).transpose(position, -1).squeeze(-1).clamp(min=LOG_ZERO)
    if index not in execution.patched:
        return table
    # A set node has no parents: its prior is a delta at its state. If it is set to a vector, its children receive that
    # vector in every state, and the delta is at state 0.
    value, is_set = execution.patched[index]
    state = torch.zeros_like(is_set, dtype=torch.long) if value.is_floating_point() else value
    delta = torch.where(enumerate_states(execution, index) == state, 0.0, LOG_ZERO).to(table.dtype)
    return torch.where(is_set, delta, table)


def state_log_probs(execution: ExecutionState, spec: NodeSpec) -> Tensor:
    """`log P(state | parents)` of every state of a discrete group: `[*layout, states]`."""
    context, parents = gather_in_log_dtype(execution, spec)
    names = [name for name in spec.parameters if f"{spec.param_prefix}.{name}" in execution.network.logit_names]
    if spec.tpm.is_lookup and all(parent.states is not None for parent in spec.tpm_parents):
        # The rows are normalised once, and not at each word that looks them up.
        normalised = {name: torch.log_softmax(context[name], -1) for name in names}
        context = replace(context, parameters={**context.parameters, **normalised})
        return execution.layout.pad_dims(spec.tpm.logits(context, *parents), 1)
    return execution.layout.pad_dims(torch.log_softmax(spec.tpm.logits(context, *parents), -1), 1)


def select_logits(execution: ExecutionState, factor: Factor) -> Tensor:
    """The logits of a factor, not normalised: of every state, or of the observed states; 0 at padding."""
    spec, evidence = factor.spec, factor.evidence
    context, parents = gather_in_log_dtype(execution, spec)
    logits = execution.layout.pad_dims(spec.tpm.logits(context, *parents), 1)
    if evidence is None:
        logits = zero_padding(execution, spec.group.word_stack, logits)
        return logits.transpose(execution.layout.enumerated.index(spec.group.index), -1).squeeze(-1)
    return mask_unobserved(evidence, _gather_states(logits, evidence.value))


def _gather_states(table: Tensor, states: Tensor) -> Tensor:
    """The entries of a table `[*layout, states]` at the observed states."""
    shape = broadcast_shapes(table.shape[:-1], states.shape)
    return table.expand(*shape, table.shape[-1]).gather(-1, states.expand(shape)[..., None]).squeeze(-1)


def evidence_log_prob(execution: ExecutionState, index: int, spec: NodeSpec, evidence: Evidence, atol: float) -> Tensor:
    """`log P(evidence | parents)` of a group that is not enumerated, or that is a function of its parents."""
    if not spec.tpm.is_random:
        return _value_log_indicator(execution, index, spec, evidence, atol)
    if spec.tpm.kind == "discrete":
        return _gather_states(state_log_probs(execution, spec), evidence.value).clamp(min=LOG_ZERO)
    context, parents = gather_in_log_dtype(execution, spec)
    return spec.tpm.log_prob(context, evidence.value.to(execution.log_dtype), *parents).clamp(min=LOG_ZERO)


def _value_log_indicator(
    execution: ExecutionState, index: int, spec: NodeSpec, evidence: Evidence, atol: float
) -> Tensor:
    """0 where the computed and the observed value agree (`is_close`), else `LOG_ZERO`."""
    is_equal = is_close(execution.values[index], evidence.value, atol, len(spec.shape))
    return torch.where(is_equal, 0.0, LOG_ZERO).to(execution.log_dtype)


def gather_in_log_dtype(execution: ExecutionState, spec: NodeSpec) -> tuple[EvalContext, list[Tensor]]:
    """The context and the parents of a TPM, in the type of log probabilities."""
    (context, parents), dtype = gather_parents(execution, spec), execution.log_dtype
    return context.to(dtype), [parent.to(dtype) if parent.is_floating_point() else parent for parent in parents]

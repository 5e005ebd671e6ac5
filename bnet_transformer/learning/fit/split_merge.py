"""Split-and-merge moves from a fit that has converged: one head is removed and grown again elsewhere.

A local maximum of a mixture often spends two heads where one is enough, and one where two are needed. EM cannot leave
it, but a fit that starts with one head less, and a new one on sentences that the others explain badly, can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from bnet_transformer._core.hashing import derive_seed
from bnet_transformer.compiler.execution_state import ExecutionState
from bnet_transformer.declare import NodeSpec
from bnet_transformer.inference.elimination import eliminate_choices, get_batch_size, get_full_shape
from bnet_transformer.inference.factors import Factor
from bnet_transformer.learning.fit.gauss_newton import Tilt
from bnet_transformer.learning.fit.head_summary import find_selectors, head_dims
from bnet_transformer.learning.fit.problem import FitObjective
from bnet_transformer.learning.fit.restarts import init_restarts
from bnet_transformer.learning.fit.second_order import AGREEMENT, SecondOrderOptimizer

FORBIDDEN = -1e6  # log weight of a state that an anchor excludes; far from LOG_ZERO, so that sums keep their digits
MIN_ANCHORS = 20  # sentences (or words) on which a new head starts, if there are as many
FORCED_STEPS, FREE_STEPS, LAST_STEPS = 3, 6, 30
MAX_FAILURES = 4  # rounds in sequence without an improvement
PATIENCE = 10  # gains as large as its last one with which a candidate must be able to exceed the density of the fit
FINALISTS = 2  # candidates that take the last steps, at most `LAST_STEPS`


def find_movable_selectors(objective: FitObjective) -> list[NodeSpec]:
    """Find the selectors of at least two heads with learned weights; not those with one draw for all sentences."""
    network, weights = objective.network, objective.learned.weights
    return [
        spec
        for spec in find_selectors(network)
        if spec.scope != "corpus"
        and (spec.tpm.states or 0) > 1
        and any(head_dims(network, spec, name) for name in weights)
    ]


def improve_by_moves(
    optimizer: SecondOrderOptimizer, best: Mapping[str, Tensor], rounds: int, should_stop: Callable[[], bool]
) -> dict[str, Tensor]:
    """Split and merge until a round of moves of every selector does not increase the log posterior density.

    Args:
        optimizer: The optimizer that found `best`; its own state does not change.
        best: The parameters of a converged fit.
        rounds: The maximum number of rounds.
        should_stop: Whether to stop before the next move.

    Returns:
        The best parameters.
    """
    selectors = find_movable_selectors(optimizer.objective)
    density = float(optimizer.compute_log_density({name: value[None] for name, value in best.items()})[0])
    failures = 0
    for number in range(rounds):
        before = density
        for selector in selectors:
            if should_stop():
                break
            score, _, parameters = propose_moves(optimizer, best, selector, number, density).best
            new_density = score * len(optimizer.corpus)
            if new_density > density + AGREEMENT:
                density, best = new_density, parameters
        failures = failures + 1 if density == before else 0
        if failures == MAX_FAILURES or not selectors:
            break
    return dict(best)


def propose_moves(
    optimizer: SecondOrderOptimizer, best: Mapping[str, Tensor], selector: NodeSpec, number: int, target: float
) -> SecondOrderOptimizer:
    """Return an optimizer with the best candidates of one round, in which one head each was removed and grown again.

    Args:
        optimizer: The optimizer of the fit.
        best: The parameters from which the moves start.
        selector: The selector of the heads.
        number: The number of the round, which determines the random draws.
        target: The log posterior density that a candidate must exceed; those that cannot are stopped.
    """
    # Split-and-merge EM (Ueda, Nakano, Ghahramani and Hinton 2000). To remove head k and to grow it elsewhere is their
    # merge of k into the others and a split in one move. As in k-means++ (Arthur and Vassilvitskii 2007) the new head
    # starts on sentences that are sampled in proportion to how badly the other heads explain them.
    objective, heads = optimizer.objective, selector.tpm.states or 0
    sets = {name: value.expand(heads, *value.shape).clone() for name, value in best.items()}
    fresh = init_restarts(
        objective.network, tuple(sets), heads + 1, derive_seed(optimizer.seed, "move", number), optimizer.ranks.device
    ).values
    for name in objective.learned.weights:
        for dim in head_dims(objective.network, selector, name)[:1]:
            for k in range(heads):
                sets[name][k].select(dim, k).copy_(fresh[name][k + 1].select(dim, k))
    sample = optimizer.draw_sample("move sample", number)
    candidates = optimizer.fork(sets, sample)
    tilt = draw_anchors(candidates, best, selector, derive_seed(optimizer.seed, "anchors", number))
    for _ in range(FORCED_STEPS):
        candidates.em_step(tilt)
    for _ in range(FREE_STEPS):
        density = candidates.em_step()
    candidates.select(density.topk(min(FINALISTS, heads)).indices.tolist())
    if sample is not None:
        candidates.use_sentences(optimizer.corpus)
    candidates.reached = target
    while candidates.step < LAST_STEPS and not candidates.is_converged:
        candidates.advance()
        candidates.stop_slow(target + AGREEMENT, PATIENCE)
    candidates.evaluate_restarts()
    return candidates


def draw_anchors(optimizer: SecondOrderOptimizer, best: Mapping[str, Tensor], selector: NodeSpec, seed: int) -> Tilt:
    """Draw the sentences (or words) on which each removed head starts again: its anchors.

    Set k removes head k. Its anchors can only be in head k, and all other sentences (or words) only in other heads.
    """
    heads, dims, badness = selector.tpm.states or 0, (0, 0), list[Tensor]()
    with torch.no_grad():
        for part in optimizer.expand.parts:
            measure = partial(_measure_badness, selector=selector)
            values, dims = optimizer.objective.evaluate(best, part, measure)
            badness.append(values)
    sizes = [len(values) for values in badness]
    # All processes draw the anchors of all sentences, so that the result does not depend on their number.
    gathered = optimizer.ranks.all_gather(torch.cat(badness) if badness else torch.zeros(0))
    weights = gathered.transpose(0, 1).flatten(1).double().cpu()
    weights = weights - weights.amin(1, keepdim=True) + torch.finfo(torch.float32).tiny
    count = min(weights.shape[1], max(MIN_ANCHORS, weights.shape[1] // (2 * heads)))
    sampled = torch.multinomial(weights, count, generator=torch.Generator().manual_seed(seed))
    is_anchor = torch.zeros_like(weights, dtype=torch.bool).scatter_(
        1, sampled, torch.ones_like(sampled, dtype=torch.bool)
    )
    anchors = is_anchor.reshape(heads, len(gathered), *gathered.shape[2:]).transpose(0, 1).to(gathered.device)
    states_dim, batch_dim = dims
    log_weights = []
    for part in optimizer.ranks.shard(anchors).split(sizes):  # [sentence, removed head, ...]
        mask = part.transpose(0, 1).reshape(heads, *[1] * batch_dim, len(part), *part.shape[2:])
        states = torch.arange(heads, device=mask.device)
        states = states.reshape([-1 if d == states_dim else 1 for d in range(mask.dim() - 1)])
        removed = torch.arange(heads, device=mask.device).reshape(-1, *[1] * (mask.dim() - 1))
        log_weights.append(torch.where(mask == (states == removed), 0.0, FORBIDDEN).to(gathered.dtype))
    return Tilt(selector, log_weights)


def _measure_badness(
    state: ExecutionState, factors: list[Factor], selector: NodeSpec
) -> tuple[Tensor, tuple[int, int]]:
    """How badly the other heads explain each sentence (or word), `[sentence, removed head, *plates, word]`.

    The function also returns the dim of the states of the selector, and that of the sentences, in the layout.
    """
    group, dim, batch_dim = selector.group, state.layout.enumerated.index(selector.group.index), state.layout.batch_dim
    shape = get_full_shape(state, group.plates, group.word_stack, get_batch_size(factors, state))
    states = torch.arange(selector.tpm.states or 0, device=state.device)
    states = states.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    rows = []
    for k in range(states.numel()):
        removed = torch.where(states == k, FORBIDDEN, 0.0).to(state.log_dtype)
        if group.word_stack is None and not group.plates:
            rows.append(-eliminate_choices(state, [*factors, Factor(selector, removed)]).reshape(shape[batch_dim:]))
        else:
            rows.append(-_word_evidence(state, factors, removed, shape).reshape(shape[batch_dim:]))
    return torch.stack(rows, 1), (dim, batch_dim)


def _word_evidence(state: ExecutionState, factors: list[Factor], removed: Tensor, shape: list[int]) -> Tensor:
    """The log evidence of each word on its own, `[*layout]` without states; exact if words share no other choice."""
    total, batch_dim = removed, state.layout.batch_dim
    for factor in factors:
        axes = [d for d in range(batch_dim + 1, len(shape)) if factor.table.shape[d] > 1 and shape[d] == 1]
        total = total + (factor.table.sum(axes, keepdim=True) if axes else factor.table)
    evidence = total.logsumexp([*range(batch_dim)], keepdim=True)
    return evidence.expand([1] * batch_dim + shape[batch_dim:])

"""The joint posterior of the gates of all slices, by Gibbs sampling with the exact likelihood.

Several chains sample the shares rho and the gates of each sentence in all slices. A step of a gate runs every sentence
with this gate flipped, samples rho with the gate summed out, then the gate. If heads have large effects, such chains
stay in one of several modes of a sentence. So the gate settings of a sentence that occur while the likelihood is
tempered are stored with their likelihoods, and each later sweep samples the gates again among these. This needs no run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from bnet_transformer.attention.heads.gate_posterior import (
    CHUNK_NUMEL,
    MIN_RHO,
    GatePosterior,
    bridge_sampling,
    log_mean_exp,
    sample_rho,
)
from bnet_transformer.attention.heads.gated_runs import GatedRuns

MAX_RHAT = 1.1  # above it, the chains of a head disagree: neither its interval nor the error of its mean is given
NUM_FREE = 8  # chains in which no share is fixed
NUM_GROUPS = 4  # groups of these chains; the error of a Bayes factor is estimated from their spread
GIBBS_WARMUP_FRACTION = 1 / 4  # fraction of the sweeps in which the power of the likelihood rises to 1
MIN_POWER = 1e-3  # the power of the likelihood in the first sweep
MAX_SETTINGS = 256  # settings that are stored for each sentence
CERTAIN = 1e6  # the log likelihood ratio, in nats, of a gate that is certain


class _StoredSettings:
    """The most probable of the gate settings of each sentence that were run, without duplicates."""

    def __init__(self, num_sentences: int, num_gates: int) -> None:
        self.gates = torch.zeros(num_sentences, 0, num_gates, dtype=torch.bool)
        self.log_probs = torch.zeros(num_sentences, 0, dtype=torch.float64)  # -inf for a duplicate
        # A setting is identified by a sum of random 64-bit integers, one for each gate that is on.
        fixed = torch.Generator().manual_seed(0)
        self.weights = torch.randint(-(2**62), 2**62, (num_gates,), generator=fixed)

    def keys(self, gates: Tensor) -> Tensor:
        """Return the integers that identify settings, `[...]`, from `[..., gate]`."""
        return torch.where(gates, self.weights, 0).sum(-1)

    def add(self, gates: Tensor, log_probs: Tensor) -> None:
        """Add settings, `[sentence, setting, gate]`, with their `log P`, `[sentence, setting]`."""
        gates, log_probs = torch.cat([self.gates, gates], 1), torch.cat([self.log_probs, log_probs], 1)
        keys, order = self.keys(gates).sort(dim=1, stable=True)
        log_probs = log_probs.gather(1, order)
        log_probs[:, 1:].masked_fill_(keys[:, 1:] == keys[:, :-1], -torch.inf)
        self.log_probs, selected = log_probs.topk(min(MAX_SETTINGS, keys.shape[1]), 1)
        index = order.gather(1, selected)
        self.gates = gates.gather(1, index[..., None].expand(-1, -1, gates.shape[-1]))

    def sample(
        self, gates: Tensor, log_probs: Tensor, log_odds: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sample the gates of each sentence and chain among the stored settings, if they are one of these.

        Args:
            gates: The gates, `[sentence, chain, gate]`.
            log_probs: Their `log P`, `[sentence, chain]`.
            log_odds: The log odds of the shares, `[chain, gate]`.
            uniforms: A uniform random number for each sentence and chain.

        Returns:
            The gates; their `log P`; and `log P(y_s | on) - log P(y_s | off)` of each gate, the other gates summed out
            over the stored settings, `[sentence, chain, gate]`. Outside of these, the gate itself is certain. The chain
            of another head is left out.
        """
        gates, log_probs, num_stored = gates.clone(), log_probs.clone(), self.gates.shape[1]
        ratios = torch.where(gates, CERTAIN, -CERTAIN).double()
        log_all_off = -functional.softplus(log_odds).sum(1)
        size = max(1, CHUNK_NUMEL // (num_stored * max(gates.shape[1:])))
        for part in torch.arange(len(gates)).split(size):
            stored, stored_log_probs = self.gates[part], self.log_probs[part, None]
            is_same = self.keys(stored)[:, None] == self.keys(gates[part])[..., None]
            is_stored = (is_same & stored_log_probs.isfinite()).any(-1)
            log = stored_log_probs + (stored.double() @ log_odds.T).mT + log_all_off[:, None]
            cumulative = log.softmax(-1).cumsum(-1)
            index = torch.searchsorted(cumulative, uniforms[part, :, None] * cumulative[..., -1:])[..., 0]
            sampled = stored.gather(1, index[..., None].expand(-1, -1, gates.shape[-1]))
            gates[part] = torch.where(is_stored[..., None], sampled, gates[part])
            log_probs[part] = torch.where(is_stored, self.log_probs[part].gather(1, index), log_probs[part])
            for gate in range(gates.shape[-1]):
                chains, is_on = [*range(NUM_FREE), NUM_FREE + gate], stored[:, None, :, gate]
                terms = log[:, chains]
                on, off = (terms.masked_fill(mask, -torch.inf).logsumexp(-1) for mask in (~is_on, is_on))
                ratio = (on - off - log_odds[chains, gate]).clamp(-CERTAIN, CERTAIN)
                at = part[:, None], torch.tensor(chains), gate
                ratios[at] = torch.where(is_stored[:, chains], ratio, ratios[at])
        return gates, log_probs, ratios


def gibbs_gate_posterior(
    runs: GatedRuns,
    scale: float,
    rounds: int,
    draws: int,
    generator: torch.Generator,
    update_progress: Callable[[int], object],
) -> GatePosterior:
    """Compute the posterior of all gates by Gibbs sampling.

    Args:
        runs: The gated runs. The random numbers of a sentence do not depend on the number of ranks.
        scale: The factor by which `log P` of a run is multiplied.
        rounds: The number of sweeps of each chain, of which a fourth are warmup.
        draws: The number of samples of rho.
        generator: The random generator.
        update_progress: A function that receives the number of finished runs.
    """
    # Let r_s be the likelihood ratio of a gate on and off in a sentence, given the other gates of the sentence. Given
    # these, the share of the head has a density proportional to `prod_s (1 - rho + rho r_s)`: its gates are summed out.
    # So rho and all gates of one head are sampled together (van Dyk and Park 2008, Partially collapsed Gibbs samplers),
    # and the share of a head without effect is independent from sweep to sweep.
    # The stored settings do not change after the warmup. If the setting of a sentence is one of these, it is sampled
    # from the posterior restricted to them, and else it stays, so this step too leaves the posterior invariant. The
    # power of the likelihood rises geometrically in the warmup, so the stored settings include several modes.
    # For the Bayes factors, one more chain for each head has `rho = 0` for this head.
    shape, ranks, num_local = (len(runs.sites), runs.num_heads), runs.ranks, len(runs.corpus)
    num_gates, count = math.prod(shape), sum(ranks.all_gather_object(num_local))
    is_zero = torch.cat([torch.zeros(NUM_FREE, num_gates), torch.eye(num_gates)]).bool()  # [chain, gate]
    num_chains = len(is_zero)
    parts = list(runs.parts(max(1, runs.gradient_part_size() // num_chains)))

    def compute_log_probs(gates: Tensor) -> Tensor:
        """Compute the scaled `log P` of each sentence in each chain, `[sentence, chain]`."""
        log_probs = torch.zeros(gates.shape[:2], dtype=torch.float64)
        for part in parts:
            log_probs[part.indices] = scale * runs.log_probs_by_chain(part, gates[part.indices].unflatten(-1, shape))
            update_progress(len(part) * num_chains)
        return log_probs

    def draw_uniforms() -> Tensor:
        """Draw a uniform number for each gate, and one more, `[sentence, chain, gate + 1]`."""
        uniforms = torch.rand(count, num_chains, num_gates + 1, generator=generator, dtype=torch.float64)
        return ranks.shard(uniforms)

    rho = torch.rand(num_chains, num_gates, generator=generator, dtype=torch.float64).clamp(MIN_RHO, 1 - MIN_RHO)
    log_odds = torch.where(is_zero, -CERTAIN, torch.logit(rho))
    gates = draw_uniforms()[..., :-1] < torch.sigmoid(log_odds)  # [sentence, chain, gate]
    log_probs, stored = compute_log_probs(gates), _StoredSettings(num_local, num_gates)
    stored.add(gates, log_probs)
    num_warmup = max(1, round(GIBBS_WARMUP_FRACTION * rounds))
    num_on, by_flips, by_settings = [], [], []  # of each sweep after the warmup, [chain, gate]
    inclusion = torch.zeros(num_local, num_gates, dtype=torch.float64)
    for sweep in range(rounds):
        is_warmup, uniforms, log_integrals = sweep < num_warmup, draw_uniforms(), torch.empty_like(log_odds)
        power = MIN_POWER ** (1 - (sweep + 1) / num_warmup) if is_warmup else 1.0
        run_gates, run_log_probs = [], []
        for gate in range(num_gates):
            flipped, is_on = gates.clone(), gates[..., gate]
            flipped[..., gate] = ~is_on
            log_flipped = compute_log_probs(flipped)
            ratio = power * torch.where(is_on, log_probs - log_flipped, log_flipped - log_probs)
            rho, log_integrals[:, gate] = sample_rho(ratio.T, 1, generator, ranks)
            log_odds[:, gate] = torch.where(is_zero[:, gate], -CERTAIN, torch.logit(rho[:, 0]))
            probs = torch.sigmoid(ratio + log_odds[:, gate])
            will_be_on = uniforms[..., gate] < probs
            log_probs = torch.where(will_be_on == is_on, log_probs, log_flipped)
            gates[..., gate] = will_be_on
            if is_warmup:
                run_gates.append(flipped)
                run_log_probs.append(log_flipped)
            else:
                inclusion[:, gate] += probs[:, :NUM_FREE].mean(1) / (rounds - num_warmup)
        if is_warmup:
            stored.add(torch.cat(run_gates, 1), torch.cat(run_log_probs, 1))
            continue
        gates, log_probs, ratios = stored.sample(gates, log_probs, log_odds, uniforms[..., -1])
        num_on.append(ranks.all_reduce(gates[:, :NUM_FREE].sum(0).double()))
        by_flips.append(log_integrals)
        by_settings.append(sample_rho(ratios.flatten(1).T, 1, generator, ranks)[1].reshape(log_odds.shape))
    counts = torch.stack(num_on, 1)
    rho, rhat = _sample_shares(counts, count, draws, generator)
    by_state = torch.stack([torch.stack(by_flips, 1), torch.stack(by_settings, 1)])  # [kind, chain, sweep, gate]
    bayes_factors = [_estimate_log_bayes(by_state[..., gate], gate) for gate in range(num_gates)]
    log_bayes, error = torch.stack(bayes_factors).unbind(1)
    return GatePosterior(
        rho.reshape(draws, *shape),
        _estimate_rho_error(counts, count, draws, rhat).reshape(shape),
        log_bayes.reshape(shape),
        error.reshape(shape),
        ranks.all_gather(inclusion.reshape(num_local, *shape)),
        None,
        rhat.reshape(shape),
    )


def _sample_shares(num_on: Tensor, count: int, draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample rho given the gates of each state of the chains, and compute R-hat from one sample of each state.

    Args:
        num_on: The numbers of sentences with the gate on, `[chain, sweep, gate]`.
        count: The number of sentences.
        draws: The number of samples.
        generator: The random generator.

    Returns:
        The samples, `[draw, gate]`, evenly over the states, and R-hat, `[gate]`.
    """
    # Given the gates, the shares are independent Beta variables, here ratios of gamma variables, because these accept a
    # generator.
    num_states = num_on[..., 0].numel()
    counts = num_on.expand(-(-draws // num_states), *num_on.shape)
    on, off = (torch._standard_gamma(1 + values, generator=generator) for values in (counts, count - counts))
    rho = (on / (on + off)).clamp(MIN_RHO, 1 - MIN_RHO)
    selected = torch.linspace(0, rho[..., 0].numel() - 1, draws, dtype=torch.float64).round().long()
    return rho.flatten(0, 2)[selected], split_rhat(rho[0])


def _estimate_rho_error(num_on: Tensor, count: int, draws: int, rhat: Tensor) -> Tensor:
    """Compute the Monte Carlo error of the mean of rho, `[gate]`; NaN if the chains of a gate disagree.

    Args:
        num_on: The numbers of sentences with the gate on, `[chain, sweep, gate]`.
        count: The number of sentences.
        draws: The number of samples.
        rhat: R-hat of each gate.
    """
    # The chains are independent, so the spread of their means includes the correlation of successive sweeps. Given the
    # gates, rho is Beta(1 + on, 1 + off). If chains do not mix between modes, the number of chains in a mode is not an
    # estimate of its probability, so that no error is known.
    a, total = 1 + num_on, count + 2
    mean, variance = a / total, a * (total - a) / (total**2 * (total + 1))
    spread = (mean.flatten(0, 1).var(0) + variance.mean((0, 1))) / draws
    error = (mean.mean(1).var(0) / len(mean) + spread).sqrt()
    return torch.where(rhat <= MAX_RHAT, error, torch.nan)


def split_rhat(samples: Tensor) -> Tensor:
    """Compute the split R-hat of samples `[chain, draw, ...]`, which is near 1 if chains agree; NaN below 4 draws."""
    # Each chain is split in two halves (Gelman et al. 2013, Bayesian Data Analysis, section 11.4).
    half = samples.shape[1] // 2
    halves = torch.cat([samples[:, :half], samples[:, -half:]])
    within, between = halves.var(1).mean(0), halves.mean(1).var(0)
    return ((half - 1) / half + between / within).sqrt()


def _estimate_log_bayes(log_integrals: Tensor, head: int) -> Tensor:
    """Compute the log Bayes factor of a head and its error, `[2]`.

    Args:
        log_integrals: The log integral of the density of rho in each state of the chains, relative to its value at 0:
            given the other gates, and with all stored settings summed out, `[kind, chain, sweep]`.
        head: The index of the head.
    """
    # As in the exact method, the Bayes factor is the mean of such an integral over the posterior with rho = 0, and one
    # over the mean of its inverse over the free posterior. Bridge sampling combines both. With either kind of integral
    # this is right, so that with the smaller error is used: that of the stored settings if heads have large effects.
    estimates = []
    for by_chain in log_integrals:
        free, restricted = by_chain[:NUM_FREE], by_chain[NUM_FREE + head]
        by_group = zip(restricted.tensor_split(NUM_GROUPS), free.tensor_split(NUM_GROUPS), strict=True)
        bridges = torch.stack([bridge_sampling(zero, any_rho.flatten()) for zero, any_rho in by_group])
        low, high = log_mean_exp(restricted), -log_mean_exp(-free.flatten())
        error = torch.hypot(bridges.std() / NUM_GROUPS**0.5, (high - low) / 4)
        estimates.append(torch.stack([bridge_sampling(restricted, free.flatten()), error]))
    return min(estimates, key=lambda estimate: float(estimate[1]))

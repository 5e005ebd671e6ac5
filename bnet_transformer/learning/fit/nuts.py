"""`nuts`: Pyro's No-U-Turn sampler in coordinates with a fixed gauge; its chains draw in turn, one draw each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro.infer import NUTS as Kernel
from torch import Tensor

from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer._core.hashing import derive_seed
from bnet_transformer._core.torch_context import seed_rngs
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.factors import LOG_ZERO
from bnet_transformer.learning.fit.approximation import Approximation, Mode, choose_approximation
from bnet_transformer.learning.fit.comparison import align_heads
from bnet_transformer.learning.fit.coordinates import Coordinates
from bnet_transformer.learning.fit.diagnostics import compute_rhat, describe_effective
from bnet_transformer.learning.fit.head_summary import find_representative
from bnet_transformer.learning.fit.laplace import find_mode, randomize, to_double
from bnet_transformer.learning.fit.problem import NUTS, FitProblem, check_full_batch, to_parameters
from bnet_transformer.learning.fit.restarts import build_fit, to_network_devices
from bnet_transformer.learning.fit.result import Fit
from bnet_transformer.learning.training.configs import defer_interrupt

MAX_INIT_TRIES = 100  # draws at the mode that are tried as a start with finite density
INIT_JITTER = 0.1  # standard deviation of a start around a mode without a Hessian
CHAIN_RESTARTS = 2  # starts of the point fit that finds the start of a chain
# The density of straightened coordinates is unbounded where A is singular, and a chain near such a point needs small
# steps, so these coordinates are used only if the others are clearly worse; k-hat has a standard error of about 0.15.
STRAIGHT_MARGIN = 0.5
MAX_DENSITY_RHAT = 1.05  # a note reports a larger R-hat of the log density
MAX_MODE_GAP = 3.0  # difference of the log densities of the starts, in nats, that a note reports
# A chain starts at the best mode if the log mass of the mode that it found is lower by more: at least 10 nats, a share
# of the posterior of 5e-5, and 5 standard deviations sqrt(d / 2) of the log density of d Normal coordinates, because
# the masses are approximate.
MIN_RESTART_GAP, RESTART_DEVIATIONS = 10.0, 5.0
SITE = "w"  # the name of the state of a chain in Pyro
STATISTICS = ("diverging", "acceptance_rate", "n_steps", "tree_depth", "step_size", "lp")
WARMUP_NOTE = "interrupted during the warmup: there are no draws, and the net has the likeliest parameters of a chain"
ChainStart = tuple[Mode, Approximation | None]  # None if there are too many coordinates


class NUTSChain:
    """One chain of NUTS: its random state, its draws after the warmup, and the statistics of each draw.

    The chain moves in standard deviations w of the Laplace approximation at the mode that its own random starts found:
    there the posterior is about Normal(0, 1).
    """

    def __init__(
        self, coordinates: Coordinates, problem: FitProblem, start: ChainStart, warmup: int, index: int
    ) -> None:
        self.coordinates, self.corpus, (self.mode, self.approximation) = coordinates, problem.corpus, start
        self.device, self.warmup, self.index = coordinates.device, warmup, index
        self.center = self.mode.z.to(coordinates.dtype)
        self.samples: list[dict[str, Tensor]] = []
        self.statistics: list[tuple[float, ...]] = []
        self.step = self.num_evaluations = self.num_divergences = 0
        seed_rngs(derive_seed(problem.seed, "chain", index), self.device)
        self.rng_state = _get_rng_state(self.device)
        self.kernel = Kernel(potential_fn=self._potential)
        with self._use_rng_state():
            self.w = {SITE: self._init()}
            self.kernel.initial_params = self.w
            self.kernel.setup(warmup)

    def _init(self) -> Tensor:
        """Draw the start from the Laplace approximation, with a finite density; near the mode without one."""
        scale = INIT_JITTER if self.approximation is None else 1.0
        for _ in range(MAX_INIT_TRIES):
            w = scale * torch.randn_like(self.center)
            with torch.no_grad():
                if float(self._log_density(w)) > LOG_ZERO / 2:
                    return w
            scale *= 0.9
        raise BNetError(
            f"chain {self.index}",
            expected=f"a start with a finite density; {MAX_INIT_TRIES} draws at the mode have none",
            hint="Use a smaller spread=, or a net in float64",
        )

    def advance(self) -> None:
        """Run one step of the warmup, or one draw."""
        # Pyro exposes the acceptance rate only as a private running mean m. That of draw n is n m_n - (n - 1) m_(n-1).
        before, mean = self.num_evaluations, self.kernel._mean_accept_prob
        with self._use_rng_state():
            self.w = self.kernel.sample(self.w)
        self.step += 1
        count = self.step - self.warmup
        if count <= 0:
            return
        steps = self.num_evaluations - before
        mean = mean if count > 1 else 0.0
        acceptance = min(1.0, max(0.0, mean + count * (self.kernel._mean_accept_prob - mean)))
        divergences = len(self.kernel.diagnostics()["divergences"])
        diverging, self.num_divergences = float(divergences > self.num_divergences), divergences
        depth = steps.bit_length()  # a tree of depth d has from 2^(d-1) to 2^d - 1 leapfrog steps
        self.statistics.append((diverging, acceptance, steps, depth, float(self.kernel.step_size), self.log_density()))
        with self._use_rng_state():
            self.samples.append(self.parameters())

    def log_density(self) -> float:
        """Return the log density of the current state, in the coordinates."""
        with torch.no_grad():
            return float(self.coordinates.log_density(self._to_coordinates(self.w[SITE])[0], self.corpus))

    def parameters(self) -> dict[str, Tensor]:
        """Return the current state as parameters in a random gauge, with tables as probabilities."""
        samples = self.coordinates.to_samples(self._to_coordinates(self.w[SITE].detach())[0][None])
        return {name: value[0] for name, value in samples.items()}

    def _to_coordinates(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Map a state to coordinates; also return the log determinant of the derivative, up to a constant."""
        if self.approximation is None:
            return self.center + w, w.new_zeros(())
        return self.approximation.to_coordinates(w)

    def _potential(self, w: dict[str, Tensor]) -> Tensor:
        """Evaluate the potential, and count the evaluation."""
        self.num_evaluations += 1
        return -self._log_density(w[SITE])

    def _log_density(self, w: Tensor) -> Tensor:
        """Compute the log density of a state, `[]`."""
        z, log_det = self._to_coordinates(w)
        return self.coordinates.log_density(z, self.corpus) + log_det

    @contextmanager
    def _use_rng_state(self) -> Iterator[None]:
        """Use the random state of this chain in a block, and save it afterwards."""
        torch.set_rng_state(self.rng_state[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.rng_state[1], self.device)
        yield
        self.rng_state = _get_rng_state(self.device)


def _get_rng_state(device: torch.device) -> list[Tensor]:
    """Return the states of the random generators: of the CPU, and of the device if it is a GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def find_chain_starts(problem: FitProblem, numbers: list[int]) -> tuple[Coordinates, list[ChainStart]]:
    """Find the mode at which each chain starts, by fits from random starts that no other chain uses.

    Separate starts let R-hat detect modes that the chains do not connect (Gelman and Rubin 1992). Only the first chain
    also starts at the parameters of the net.
    """
    double = to_double(problem)
    double = replace(double, loop=replace(double.loop, progress=False))
    coordinates, starts = Coordinates(double.objective, double.corpus), list[ChainStart]()
    chain_coordinates = Coordinates(problem.objective, problem.corpus)
    for number in numbers:
        if starts and not starts[-1][0].is_finished:  # Ctrl-C
            starts.append(starts[-1])
            continue
        seed, start = derive_seed(problem.seed, "mode of chain", number), double
        if number:
            start = replace(double, objective=randomize(double.objective, seed))
        mode = find_mode(start, coordinates, CHAIN_RESTARTS, seed)
        approximation = None
        if mode.root is not None:
            generator = torch.Generator().manual_seed(seed)
            choice = choose_approximation(coordinates, double.corpus, mode, generator, margin=STRAIGHT_MARGIN)
            approximation = choice.approximation.to(chain_coordinates)
        starts.append((mode, approximation))
    return chain_coordinates, starts


def replace_poor_starts(
    starts: list[ChainStart], numbers: list[int], coordinates: Coordinates, ranks: DistributedContext
) -> tuple[list[ChainStart], tuple[str, ...]]:
    """Start each chain whose mode has a negligible probability at the best mode; also describe these chains.

    Args:
        starts: The starts of the chains of this rank.
        numbers: The numbers of these chains.
        coordinates: The coordinates of the chains.
        ranks: The processes that share the chains.
    """
    # A chain does not leave its mode, and all chains have the same number of draws, but the posterior weights a mode by
    # its mass. By Laplace's method this is the density at the mode times the square root of |covariance|.
    masses = {number: compute_log_mass(mode) for number, (mode, _) in zip(numbers, starts, strict=True)}
    masses = {number: mass for part in ranks.all_gather_object(masses) for number, mass in part.items()}
    best = max(masses, key=masses.__getitem__)
    limit = max(MIN_RESTART_GAP, RESTART_DEVIATIONS * math.sqrt(coordinates.size / 2))
    poor = sorted(number for number, mass in masses.items() if not masses[best] - mass <= limit)
    if not poor:
        return starts, ()
    local = _move_start(starts[numbers.index(best)], torch.device("cpu"), None) if best in numbers else None
    (start,) = (part for part in ranks.all_gather_object(local) if part is not None)
    start = _move_start(start, ranks.device, coordinates)
    replaced = [start if number in poor else first for number, first in zip(numbers, starts, strict=True)]
    gaps = ", ".join(f"chain {number} ({masses[best] - masses[number]:.0f} nats)" for number in poor)
    problem = f"modes of negligible probability, below that of chain {best}: {gaps}"
    return replaced, (f"{problem}; these chains were restarted in the mode of chain {best}",)


def compute_log_mass(mode: Mode) -> float:
    """Compute the log probability of a mode by Laplace's method, up to a constant; its density without a Hessian."""
    return mode.log_density + (0.0 if mode.root is None else mode.log_det / 2)


def _move_start(start: ChainStart, device: torch.device, coordinates: Coordinates | None) -> ChainStart:
    """Return a start on another device, with other coordinates."""
    mode, approximation = start
    mode = replace(mode, z=mode.z.to(device), root=None if mode.root is None else mode.root.to(device))
    if approximation is None:
        return mode, None
    center, root = approximation.center.to(device), approximation.root.to(device)
    return mode, replace(approximation, coordinates=coordinates, center=center, root=root)  # type: ignore[arg-type]


def fit_nuts(problem: FitProblem, method: NUTS) -> Fit[Network]:
    """Fit by NUTS. The chains draw in turn, so after an interrupt all have the same number of draws.

    Under torchrun the chains are distributed over the ranks; each chain uses all sentences.

    Args:
        problem: The fit problem.
        method: The options.

    Returns:
        The fit; without samples if it was interrupted in the warmup.

    Raises:
        BNetError: If `batch` is smaller than the number of sentences.
    """
    objective, corpus, network = problem.objective, problem.corpus, problem.objective.network
    check_full_batch(problem, "NUTS", "method='svi'")
    chains, is_finished, notes = _run_chains(problem, method)
    draws, statistics_by_chain, best = _gather_chains(chains, method.chains, problem.ranks)
    notes += _describe_starts(chains, problem.ranks)
    fields: dict[str, Any] = {"approximate": WARMUP_NOTE}
    parameters = to_parameters(network, best)
    if draws:
        samples = {name: torch.stack([chain[name] for chain in draws]) for name in objective.learned.names}
        statistics = dict(zip(STATISTICS, torch.stack(statistics_by_chain).unbind(-1), strict=True))
        samples, matched = align_heads(objective, corpus, samples, statistics["lp"])
        divergent = tuple(int(count) for count in statistics["diverging"].sum(1))
        notes += _describe_chains(divergent, statistics) + describe_effective(network, samples)
        fields = {"divergent": divergent, "statistics": statistics, "matched": matched, "notes": notes}
        fields["samples"], parameters = to_network_devices(network, samples), find_representative(network, samples)
    return build_fit(problem, method, parameters, finished=is_finished, **fields)


def _run_chains(problem: FitProblem, method: NUTS) -> tuple[list[NUTSChain], bool, tuple[str, ...]]:
    """Run the chains of this rank; also return whether they finished, and notes on their starts."""
    ranks = problem.ranks
    problem.objective.cache_factors(problem.corpus)
    steps, done, numbers = method.warmup + method.draws, 0, list(ranks.shard(range(method.chains)))
    with pyro.validation_enabled(False), warnings.catch_warnings(), defer_interrupt() as interrupts:
        warnings.simplefilter("ignore", UserWarning)  # warnings of Pyro about deprecated functions of torch
        coordinates, starts = find_chain_starts(problem, numbers)
        starts, notes = replace_poor_starts(starts, numbers, coordinates, ranks)
        stop = ranks.any(not all(mode.is_finished for mode, _ in starts))
        pairs = zip(numbers, starts, strict=True)
        chains = [NUTSChain(coordinates, problem, start, method.warmup, number) for number, start in pairs]
        with problem.loop.progress_bar(ranks, steps, 0, "draw") as bar:
            while done < steps and not stop:
                for chain in chains:
                    chain.advance()
                done += 1
                stop = ranks.any(bool(interrupts))
                bar.update()
                bar.set_postfix(phase="warmup" if done <= method.warmup else "draws", refresh=False)
            bar.refresh()  # so that a short fit also shows its last state
    return chains, done == steps, notes


def _describe_starts(chains: list[NUTSChain], ranks: DistributedContext) -> tuple[str, ...]:
    """Describe chains that start at modes of different density."""
    local = [chain.mode.log_density for chain in chains]
    densities = [density for part in ranks.all_gather_object(local) for density in part]
    gap = max(densities) - min(densities)
    if gap <= MAX_MODE_GAP:
        return ()
    problem = f"the chains start at modes whose log densities differ by up to {gap:.1f} nats"
    return (f"{problem}: check R-hat (f.to_arviz()) and statistics['lp'] of each chain",)


def _describe_chains(divergent: tuple[int, ...], statistics: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Describe divergent transitions, and chains that have not mixed."""
    notes, (chains, draws) = [], statistics["lp"].shape
    if any(divergent):
        notes.append(
            f"{sum(divergent)} of {chains * draws} draws are divergent: the draws may omit a part of the posterior"
        )
    if (rhat := float(compute_rhat(statistics["lp"]))) > MAX_DENSITY_RHAT:
        notes.append(f"R-hat of the log density is {rhat:.2f}, above {MAX_DENSITY_RHAT}: use more warmup= and draws=")
    return tuple(notes)


def _gather_chains(
    chains: list[NUTSChain], count: int, ranks: DistributedContext
) -> tuple[list[dict[str, Tensor]], list[Tensor], dict[str, Tensor]]:
    """Gather the draws and statistics of all chains in the order of the chains, and the state of highest density."""
    local: dict[int, Any] = {}
    for chain in chains:
        draws = {k: torch.stack([draw[k] for draw in chain.samples]).cpu() for k in (chain.samples or [{}])[0]}
        current = {name: value.cpu() for name, value in chain.parameters().items()}
        local[chain.index] = draws, torch.tensor(chain.statistics, dtype=torch.float64), chain.log_density(), current
    by_number = {number: chain for part in ranks.all_gather_object(local) for number, chain in part.items()}
    ordered = [by_number[number] for number in range(count)]
    _, _, _, best = max(ordered, key=lambda chain: chain[2])

    def to_device(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(ranks.device) for name, value in values.items()}

    return [to_device(draws) for draws, *_ in ordered if draws], [rows for _, rows, *_ in ordered], to_device(best)

"""`nuts`: Pyro's No-U-Turn sampler in coordinates with a fixed gauge.

The warmup runs chain by chain, because its state is private to Pyro: a resumed fit repeats that of one chain. Then the
chains draw in turn, one draw each, so that after an interrupt all have the same number of draws.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pyro
import torch
from pyro.infer import NUTS as Kernel
from torch import Tensor

from bnet_transformer._core.checks import check_int, check_options
from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer._core.files import derive_seed
from bnet_transformer._core.tensors import seed_rngs
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.factors import LOG_ZERO
from bnet_transformer.learning.fit.coordinates import Coordinates
from bnet_transformer.learning.fit.diagnostics import compute_rhat, describe_effective
from bnet_transformer.learning.fit.heads import align_heads, find_representative
from bnet_transformer.learning.fit.laplace import (
    Approximation,
    Mode,
    choose_approximation,
    find_mode,
    randomize,
    to_double,
)
from bnet_transformer.learning.fit.objective import FitProblem, Method, to_parameters
from bnet_transformer.learning.fit.restarts import build_fit, to_network_devices
from bnet_transformer.learning.fit.result import Fit
from bnet_transformer.learning.loop import Checkpoint, defer_interrupt

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


@dataclass(frozen=True, kw_only=True)
class NUTS(Method):
    """Posterior samples by Pyro's No-U-Turn sampler on the exact log evidence.

    Args:
        chains: The number of chains. They draw in turn, one draw each.
        draws: The number of draws of each chain.
        warmup: The number of warmup steps of each chain before its draws. They adapt the step size and mass matrix.

    Raises:
        BNetError: If an option is out of range.

    >>> import bnet_transformer as bt
    >>> bt.NUTS(chains=2, draws=100).warmup
    300
    """

    name: ClassVar[str] = "nuts"
    full_batch: ClassVar[tuple[str, str] | None] = "NUTS", "method='svi'"

    chains: int = 4
    draws: int = 500
    warmup: int = 300

    def __post_init__(self) -> None:
        check_options(self, check_int, "chains", "draws", "warmup")


class NUTSChain:
    """One chain of NUTS: its random state, its draws after the warmup, and the statistics of each draw.

    The chain moves in standard deviations w of the Laplace approximation at the mode that its own random starts found:
    there the posterior is about Normal(0, 1). A chain resumes from its checkpoint, in the subfolder `chain-<index>`.
    """

    def __init__(
        self, coordinates: Coordinates, problem: FitProblem, start: ChainStart, method: NUTS, index: int
    ) -> None:
        self.coordinates, self.corpus, (self.mode, self.approximation) = coordinates, problem.corpus, start
        self.device, self.warmup, self.draws, self.index = coordinates.device, method.warmup, method.draws, index
        self.network, self.settings = problem.objective.network, problem.settings
        self.loop = problem.loop.in_subfolder(f"chain-{index}")
        self.center = self.mode.z.to(coordinates.dtype)
        self.samples: list[dict[str, Tensor]] = []
        self.statistics: list[tuple[float, ...]] = []
        self.step = self.num_evaluations = self.num_divergences = self.num_kernel_draws = 0
        if self.loop.resume(self.network, self.settings, self._restore):
            return
        seed_rngs(derive_seed(problem.seed, "chain", index), self.device)
        self.rng_state = _get_rng_state(self.device)
        self.kernel = Kernel(potential_fn=self._potential)
        with self._use_rng_state():
            self.w = {SITE: self._init()}
            self.kernel.initial_params = self.w
            self.kernel.setup(self.warmup)

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
        """Run one step of the warmup, or one draw. Write a checkpoint after the warmup, and at an evaluation step."""
        # Pyro exposes the acceptance rate only as a private running mean m. That of draw n is n m_n - (n - 1) m_(n-1).
        before, mean = self.num_evaluations, self.kernel._mean_accept_prob
        with self._use_rng_state():
            self.w = self.kernel.sample(self.w)
        self.step += 1
        if self.step > self.warmup:
            self._record(self.num_evaluations - before, mean)
        count = self.step - self.warmup
        if count == 0 or (count > 0 and self.loop.is_evaluation_step(count, self.draws)):
            # Also without checkpoints, so that a resumed fit equals an uninterrupted one bit for bit.
            self._replace_kernel(float(self.kernel.step_size), self.kernel.inverse_mass_matrix[SITE,])
            self._save()

    def _record(self, steps: int, mean: float) -> None:
        """Store the current state as a draw, with the statistics of its number of leapfrog steps and mean before."""
        self.num_kernel_draws += 1
        count = self.num_kernel_draws
        acceptance = min(1.0, max(0.0, mean + count * (self.kernel._mean_accept_prob - mean)))
        divergences = len(self.kernel.diagnostics()["divergences"])
        diverging, self.num_divergences = float(divergences > self.num_divergences), divergences
        depth = steps.bit_length()  # a tree of depth d has from 2^(d-1) to 2^d - 1 leapfrog steps
        self.statistics.append((diverging, acceptance, steps, depth, float(self.kernel.step_size), self.log_density()))
        with self._use_rng_state():
            self.samples.append(self.parameters())

    def _replace_kernel(self, step_size: float, inverse_mass: Tensor) -> None:
        """Continue with a new kernel that does not adapt.

        After the warmup, the state, the random state, the step size and the mass matrix determine all further draws.
        They are public in Pyro; its sums over draws start at 0 in the new kernel.
        """
        self.w = {SITE: self.w[SITE].detach()}
        options = {"step_size": step_size, "adapt_step_size": False, "adapt_mass_matrix": False}
        self.kernel = Kernel(potential_fn=self._potential, **options)
        self.kernel.initial_params = self.w
        self.kernel.setup(0)
        self.kernel.mass_matrix_adapter.inverse_mass_matrix = {(SITE,): inverse_mass}
        self.num_divergences = self.num_kernel_draws = 0

    def _save(self) -> None:
        """Write the checkpoint of the chain. The current kernel must be new."""
        tensors = {f"rng/{k}": state for k, state in enumerate(self.rng_state)}
        tensors |= {f"samples/{k}": torch.stack([draw[k] for draw in self.samples]) for k in (self.samples or [{}])[0]}
        tensors["chain/statistics"] = torch.tensor(self.statistics, dtype=torch.float64).reshape(-1, len(STATISTICS))
        tensors["chain/step_size"] = torch.tensor(float(self.kernel.step_size), dtype=torch.float64)
        tensors |= {"chain/w": self.w[SITE], "chain/inverse_mass": self.kernel.inverse_mass_matrix[SITE,]}
        self.loop.save(self.network, Checkpoint(self.step, tensors, (), (), self.settings))

    def _restore(self, state: Checkpoint) -> None:
        """Load the state of a checkpoint."""
        chain = {name: value.to(self.device) for name, value in state.get_tensors("chain").items()}
        samples = {name: value.to(self.device) for name, value in state.get_tensors("samples").items()}
        self.rng_state = [state.tensors[f"rng/{k}"] for k in range(1 + (self.device.type == "cuda"))]
        self.statistics = [tuple(row) for row in chain["statistics"].tolist()]
        self.samples = [{k: value[n] for k, value in samples.items()} for n in range(len(self.statistics))]
        self.step, self.w = state.step, {SITE: chain["w"]}
        self._replace_kernel(float(chain["step_size"]), chain["inverse_mass"])

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
    double, loop = to_double(problem), replace(problem.loop, progress=False)
    coordinates, starts = Coordinates(double.objective, double.corpus), list[ChainStart]()
    chain_coordinates = Coordinates(problem.objective, problem.corpus)
    for number in numbers:
        if starts and not starts[-1][0].is_finished:  # Ctrl-C
            starts.append(starts[-1])
            continue
        seed = derive_seed(problem.seed, "mode of chain", number)
        start = replace(double, loop=loop.in_subfolder(f"chain-{number}"))
        if number:
            start = replace(start, objective=randomize(double.objective, seed))
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
    masses = {  # without a Hessian the density
        number: mode.log_density + (0.0 if mode.root is None else mode.log_det / 2)
        for number, (mode, _) in zip(numbers, starts, strict=True)
    }
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


def _move_start(start: ChainStart, device: torch.device, coordinates: Coordinates | None) -> ChainStart:
    """Return a start on another device, with other coordinates."""
    mode, approximation = start
    mode = replace(mode, z=mode.z.to(device), root=None if mode.root is None else mode.root.to(device))
    if approximation is None:
        return mode, None
    center, root = approximation.center.to(device), approximation.root.to(device)
    return mode, replace(approximation, coordinates=coordinates, center=center, root=root)  # type: ignore[arg-type]


def fit_nuts(problem: FitProblem, method: NUTS) -> Fit[Network]:
    """Fit by NUTS. After an interrupt all chains have the same number of draws.

    Under torchrun the chains are distributed over the ranks; each chain uses all sentences.

    Args:
        problem: The fit problem.
        method: The options.

    Returns:
        The fit; without samples if it was interrupted in the warmup.
    """
    objective, corpus, network = problem.objective, problem.corpus, problem.objective.network
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
    steps, numbers = method.warmup + method.draws, list(ranks.shard(range(method.chains)))
    with (
        pyro.validation_enabled(False),
        warnings.catch_warnings(),
        defer_interrupt() as interrupts,
        ExitStack() as stack,
    ):
        warnings.simplefilter("ignore", UserWarning)  # warnings of Pyro about deprecated functions of torch
        coordinates, starts = find_chain_starts(problem, numbers)
        starts, notes = replace_poor_starts(starts, numbers, coordinates, ranks)
        stop = ranks.any(not all(mode.is_finished for mode, _ in starts))
        for number in numbers:
            stack.enter_context(problem.loop.in_subfolder(f"chain-{number}").lock(is_main_process=True))
        pairs = zip(numbers, starts, strict=True)
        chains = [NUTSChain(coordinates, problem, start, method, number) for number, start in pairs]
        rounds = _schedule_rounds(chains, method, ranks)
        with problem.loop.progress_bar(ranks, len(rounds), 0, "draw") as bar:
            for members in rounds:
                if stop:
                    break
                for chain in members:
                    chain.advance()
                stop = ranks.any(bool(interrupts))
                bar.update()
                is_warmup = any(chain.step <= method.warmup for chain in chains)
                bar.set_postfix(phase="warmup" if is_warmup else "draws", refresh=False)
            bar.refresh()  # so that a short fit also shows its last state
        is_finished = not ranks.any(any(chain.step < steps for chain in chains))
    return chains, is_finished, notes


def _schedule_rounds(chains: list[NUTSChain], method: NUTS, ranks: DistributedContext) -> list[list[NUTSChain]]:
    """Return the chains of this rank that take a step in each round: one in the warmup, then all.

    All ranks have the same number of rounds, because they communicate after each. A resumed chain waits for the others.
    """
    warmups = [[chain] for chain in chains for _ in range(chain.step, method.warmup)]
    first = min(max(chain.step, method.warmup) for chain in chains)
    counts = ranks.all_gather_object((len(warmups), first))
    warmups += [[]] * (max(count for count, _ in counts) - len(warmups))
    steps = range(min(first for _, first in counts), method.warmup + method.draws)
    return warmups + [[chain for chain in chains if chain.step <= step] for step in steps]


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
    shortest = min(len(rows) for _, rows, *_ in ordered)  # resumed chains can differ when Ctrl-C stops them
    _, _, _, best = max(ordered, key=lambda chain: chain[2])

    def to_device(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(ranks.device) for name, value in values.items()}

    draws_by_chain = [to_device({name: value[:shortest] for name, value in draws.items()}) for draws, *_ in ordered]
    return draws_by_chain if shortest else [], [rows[:shortest] for _, rows, *_ in ordered], to_device(best)

"""`nuts`: samples of the posterior by Pyro's No-U-Turn sampler, from chains that go on side by side, a draw each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from pyro.infer import NUTS as Kernel
from torch import Tensor
from torch.distributions import biject_to

from bnet_transformer._core.distributed import Ranks
from bnet_transformer._core.hashing import derive_seed
from bnet_transformer._core.torch_context import reseed
from bnet_transformer.data import Batch
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.factors import NEVER
from bnet_transformer.inference.fit.draws import aligned, representative
from bnet_transformer.inference.fit.methods import NUTS, FitProblem
from bnet_transformer.inference.fit.point import at_home, with_learned
from bnet_transformer.inference.fit.result import Fit
from bnet_transformer.inference.fit.variational import SIMPLEX, Model, site
from bnet_transformer.network import Network
from bnet_transformer.training.configs import asked_to_stop

TRIED = 100  # draws of the prior among which a start with a finite density is looked for
JITTER = 0.1  # by how much the first chain's start lies off the net's own parameters
STATISTICS = ("diverging", "acceptance_rate", "n_steps", "tree_depth", "step_size", "lp")
EARLY = "interrupted in the warmup: nothing is drawn yet, and the net is the likeliest that was come to"


class Chain:
    """One chain: NUTS with random numbers of its own, what it drew after the warmup, and what is known of each draw."""

    def __init__(self, model: Model, problem: FitProblem, warmup: int, number: int) -> None:
        self.model, self.corpus, self.warmup, self.number = model, problem.corpus, warmup, number
        self.drawn: list[dict[str, Tensor]] = []
        self.statistics: list[tuple[float, ...]] = []
        self.step = self.evaluations = self.divergences = 0
        reseed(derive_seed(problem.seed, "chain", number), model.device)
        self.random = _random_state(model.device)
        self.kernel = Kernel(potential_fn=self._potential)
        with self._own_random():
            self.z = started(model, problem.corpus, number)
            self.kernel.initial_params = self.z
            self.kernel.setup(warmup)

    def advance(self) -> None:
        """One step of the warmup, or one draw."""
        # Pyro tells of the acceptance rate by its running mean alone, which it keeps to itself.
        before, mean = self.evaluations, self.kernel._mean_accept_prob
        with self._own_random():
            self.z = self.kernel.sample(self.z)
        self.step += 1
        count = self.step - self.warmup
        if count <= 0:
            return
        steps = self.evaluations - before
        mean = mean if count > 1 else 0.0
        acceptance = min(1.0, max(0.0, mean + count * (self.kernel._mean_accept_prob - mean)))
        divergences = len(self.kernel.diagnostics()["divergences"])
        diverging, self.divergences = float(divergences > self.divergences), divergences
        depth = steps.bit_length()  # a tree of depth d takes from 2^(d-1) to 2^d - 1 steps
        self.statistics.append((diverging, acceptance, steps, depth, float(self.kernel.step_size), self.density()))
        self.drawn.append(self.parameters())

    def density(self) -> float:
        """The log density where the chain stands, of parameters without constraints."""
        with torch.no_grad():
            return -float(self.model.potential(self.corpus, self.z))

    def parameters(self) -> dict[str, Tensor]:
        """Where the chain stands, tables as probabilities."""
        values = {name: self.z[site(name)].detach() for name in self.model.learned.names}
        return {k: biject_to(SIMPLEX)(v) if k in self.model.learned.tables else v for k, v in values.items()}

    def _potential(self, z: dict[str, Tensor]) -> Tensor:
        self.evaluations += 1
        return self.model.potential(self.corpus, z)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        device = self.model.device
        torch.set_rng_state(self.random[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(self.random[1], device)
        yield
        self.random = _random_state(device)


def _random_state(device: torch.device) -> list[Tensor]:
    """The state of the random numbers: of the processor, and of the device where that is another."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def started(model: Model, corpus: Batch, number: int) -> dict[str, Tensor]:
    """Where a chain begins: the first near the net's own parameters, the others at draws of the prior."""
    for _ in range(TRIED):
        z = {}
        for name in model.learned.names:
            own = model.objective.network.parameters[name].detach().to(model.device)
            is_table = name in model.learned.tables
            value = model.prior(name).sample() if number else own.softmax(-1) if is_table else own
            if is_table:
                value = biject_to(SIMPLEX).inv(0.9 * value + 0.1 / value.shape[-1])
            z[site(name)] = value if number else value + JITTER * torch.randn_like(value)
        with torch.no_grad():
            if bool(model.potential(corpus, z) < -NEVER / 2):
                return z
    raise BNetError(
        f"chain {number}",
        expected=f"a start with a finite density, among {TRIED} draws of the prior",
        got="none",
        allowed="a smaller spread=, float64",
    )


def fit_nuts(problem: FitProblem, method: NUTS) -> Fit[Network]:
    """A fit by NUTS: a draw of each chain in turn, so that all chains have as many draws whenever they end.

    Under torchrun each rank follows every so many-th chain, on all sentences.

    Args:
        problem: What is fitted.
        method: The options.

    Returns:
        The fit; without samples where it was interrupted in the warmup.

    Raises:
        BNetError: Where `batch` is less than all sentences.
    """
    objective, corpus = problem.objective, problem.corpus
    network, tables = objective.network, objective.learned.tables
    if problem.batch is not None and problem.batch < len(corpus):
        wanted = f"None or all {len(corpus)} sentences: NUTS needs the whole likelihood"
        raise BNetError("batch", expected=wanted, got=problem.batch, allowed="svi")
    chains, is_finished = _run_chains(problem, method)
    drawn, statistics_by_chain, best = _of_all(chains, method.chains, problem.ranks)
    found: dict[str, Any] = {"approximate": EARLY}
    shown = {name: value.log() if name in tables else value for name, value in best.items()}
    if drawn:
        samples = {name: torch.stack([each[name] for each in drawn]) for name in objective.learned.names}
        statistics = dict(zip(STATISTICS, torch.stack(statistics_by_chain).unbind(-1), strict=True))
        samples, matched = aligned(objective, corpus, samples, statistics["lp"])
        divergent = tuple(int(count) for count in statistics["diverging"].sum(1))
        found = {"divergent": divergent, "statistics": statistics, "matched": matched}
        found["samples"], shown = at_home(network, samples), representative(network, samples, tables)
    return Fit(
        with_learned(network, shown),
        method.name,
        len(corpus),
        "the sentences learned from",
        finished=is_finished,
        learned=objective.learned.names,
        budget=objective.budget,
        **found,
    )


def _run_chains(problem: FitProblem, method: NUTS) -> tuple[list[Chain], bool]:
    """The chains of this rank after their draws, and whether they came to the end."""
    ranks = problem.ranks
    problem.objective.keep(problem.corpus)
    model, steps, done, stop = Model(problem.objective), method.warmup + method.draws, 0, False
    with pyro.validation_enabled(False), warnings.catch_warnings(), asked_to_stop() as asked:
        warnings.simplefilter("ignore", UserWarning)  # Pyro's own, of torch interfaces that go away
        chains = [Chain(model, problem, method.warmup, number) for number in ranks.shard(range(method.chains))]
        with problem.loop.progress_bar(ranks, steps, 0, "draw") as bar:
            while done < steps and not stop:
                for chain in chains:
                    chain.advance()
                done += 1
                stop = ranks.any(bool(asked))
                bar.update()
                bar.set_postfix(phase="warmup" if done <= method.warmup else "draws", refresh=False)
            bar.refresh()  # a quick fit shows how it ended, too
    return chains, done == steps


def _of_all(
    chains: list[Chain], count: int, ranks: Ranks
) -> tuple[list[dict[str, Tensor]], list[Tensor], dict[str, Tensor]]:
    """The draws and statistics of the chains of all ranks, by their numbers, and where the densest of them stands."""
    own: dict[int, Any] = {}
    for chain in chains:
        drawn = {k: torch.stack([each[k] for each in chain.drawn]).cpu() for k in (chain.drawn or [{}])[0]}
        stands = {name: value.cpu() for name, value in chain.parameters().items()}
        own[chain.number] = drawn, torch.tensor(chain.statistics, dtype=torch.float64), chain.density(), stands
    by_number = {number: each for part in ranks.all_gather_object(own) for number, each in part.items()}
    every = [by_number[number] for number in range(count)]
    _, _, _, best = max(every, key=lambda each: each[2])

    def here(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(ranks.device) for name, value in values.items()}

    return [here(drawn) for drawn, *_ in every if drawn], [rows for _, rows, *_ in every], here(best)

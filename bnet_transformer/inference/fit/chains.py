"""Chains of NUTS that go on side by side, a draw of each in turn: their starts, statistics and states on disk."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pyro.infer import NUTS
from pyro.ops.integrator import potential_grad
from torch import Tensor
from torch.distributions import biject_to

from bnet_transformer._core.distributed import Ranks
from bnet_transformer._core.hashing import derive_seed
from bnet_transformer._core.torch_context import reseed
from bnet_transformer.data import Batch
from bnet_transformer.errors import BNetError
from bnet_transformer.files import checkpoint, reading
from bnet_transformer.inference.factors import NEVER
from bnet_transformer.inference.fit.methods import FitProblem
from bnet_transformer.inference.fit.variational import SIMPLEX, Model, site
from bnet_transformer.network import Network

TRIED = 100  # draws of the prior among which a start with a finite density is looked for
JITTER = 0.1  # by how much the first chain's start lies off the net's own parameters
TOLD = ("diverging", "acceptance_rate", "n_steps", "tree_depth", "step_size", "lp")


class Chain:
    """One chain: NUTS with random numbers of its own, what it drew after the warmup, and what is known of each draw."""

    def __init__(self, model: Model, problem: FitProblem, warmup: int, number: int) -> None:
        self.model, self.corpus, self.warmup, self.number = model, problem.corpus, warmup, number
        self.drawn: list[dict[str, Tensor]] = []
        self.told: list[tuple[float, ...]] = []
        self.evaluations = self.divergences = 0
        self.random = _seeded(derive_seed(problem.seed, "chain", number), model.device)
        self.kernel = NUTS(potential_fn=self._potential)
        with self._own_random():
            self.z = started(model, problem.corpus, number)
            self.kernel.initial_params = self.z
            self.kernel.setup(warmup)

    def advance(self) -> None:
        """One step of the warmup, or one draw."""
        before, mean = self.evaluations, self.kernel._mean_accept_prob
        with self._own_random():
            self.z = self.kernel.sample(self.z)
        count = self.step - self.warmup
        if count <= 0:
            return
        steps = self.evaluations - before
        mean = mean if count > 1 else 0.0
        acceptance = min(1.0, max(0.0, mean + count * (self.kernel._mean_accept_prob - mean)))
        divergences = len(self.kernel.diagnostics()["divergences"])
        diverging, self.divergences = float(divergences > self.divergences), divergences
        depth = steps.bit_length()  # a tree of depth d takes from 2^(d-1) to 2^d - 1 steps
        self.told.append((diverging, acceptance, steps, depth, float(self.kernel.step_size), self.density))
        self.drawn.append(self.parameters())

    @property
    def step(self) -> int:
        """How many steps are done, those of the warmup among them."""
        return int(self.kernel._t)

    @property
    def density(self) -> float:
        """The log density where the chain stands, of parameters without constraints."""
        energy: Any = self.kernel._potential_energy_last
        return -float(energy)

    def parameters(self) -> dict[str, Tensor]:
        """Where the chain stands, tables as probabilities."""
        found = {name: self.z[site(name)].detach() for name in self.model.learned.names}
        return {k: biject_to(SIMPLEX)(v) if k in self.model.learned.tables else v for k, v in found.items()}

    def state(self) -> dict[str, Tensor]:
        """All that the chain needs to go on as if it had never stopped."""
        adapter, (mass, spread) = self.kernel._adapter, self._mass()
        scheme = adapter._step_size_adapt_scheme
        numbers = [self.kernel._t, self.kernel._mean_accept_prob, adapter.step_size, adapter._current_window]
        numbers += [scheme.prox_center, scheme._x_avg, scheme._g_avg, scheme._t, spread.n_samples]
        found = {"numbers": torch.tensor([float(number) for number in numbers], dtype=torch.float64), "mass": mass}
        found |= {"mean": torch.zeros_like(mass) + spread._mean, "squares": torch.zeros_like(mass) + spread._m2}
        found |= {f"random/{k}": value for k, value in enumerate(self.random)}
        found |= {f"z/{name}": value.detach() for name, value in self.z.items()}
        found["told"] = torch.tensor(self.told, dtype=torch.float64).reshape(-1, len(TOLD))
        if self.drawn:
            found |= {f"drawn/{name}": torch.stack([each[name] for each in self.drawn]) for name in self.drawn[0]}
        return found

    def _form(self, draws: int) -> dict[str, Tensor]:
        """What a state looks like after so many draws."""
        like = {f"drawn/{name}": value.expand(draws, *value.shape) for name, value in self.parameters().items()}
        return self.state() | {"told": torch.zeros(draws, len(TOLD), dtype=torch.float64)} | (like if draws else {})

    def restore(self, found: Mapping[str, Tensor]) -> None:
        """Go on from a state; one of other parameters is refused."""
        checkpoint.check_forms(found, self._form(len(found["told"])))
        kernel, device = self.kernel, self.model.device
        adapter = kernel._adapter
        scheme = adapter._step_size_adapt_scheme
        numbers = found["numbers"].tolist()
        kernel._t, kernel._mean_accept_prob = int(numbers[0]), numbers[1]
        adapter.step_size, adapter._current_window = numbers[2], int(numbers[3])
        scheme.prox_center, scheme._x_avg, scheme._g_avg, scheme._t = *numbers[4:7], int(numbers[7])
        (sites,) = adapter.mass_matrix_adapter.inverse_mass_matrix
        adapter.mass_matrix_adapter.inverse_mass_matrix = {sites: found["mass"].to(device)}
        spread = adapter.mass_matrix_adapter._adapt_scheme[sites]
        spread._mean, spread._m2 = found["mean"].to(device), found["squares"].to(device)
        spread.n_samples = int(numbers[8])
        self.random = [found[f"random/{k}"] for k in range(len(self.random))]
        _set_random(self.random, device)  # which looks at them
        self.z = {name: found[f"z/{name}"].to(device) for name in self.z}
        slopes, energy = potential_grad(lambda z: self.model.potential(self.corpus, z), self.z)
        kernel._cache(self.z, energy, slopes)
        self.told = [tuple(row) for row in found["told"].tolist()]
        names = self.model.learned.names if self.told else ()
        drawn = {name: found[f"drawn/{name}"].to(device) for name in names}
        self.drawn = [{name: value[k] for name, value in drawn.items()} for k in range(len(self.told))]

    def _potential(self, z: dict[str, Tensor]) -> Tensor:
        self.evaluations += 1
        return self.model.potential(self.corpus, z)

    def _mass(self) -> tuple[Tensor, Any]:
        """The inverse mass matrix (one block, of all parameters), and the spread from which the next one is made."""
        adapter = self.kernel.mass_matrix_adapter
        ((sites, inverse),) = adapter.inverse_mass_matrix.items()
        return inverse, adapter._adapt_scheme[sites]

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        _set_random(self.random, self.model.device)
        yield
        self.random = _random(self.model.device)


def started(model: Model, corpus: Batch, number: int) -> dict[str, Tensor]:
    """Where a chain begins: the first near the net's own parameters, the others at draws of the prior."""
    for _ in range(TRIED):
        found = {}
        for name in model.learned.names:
            own = model.objective.network.parameters[name].detach().to(model.device)
            table = name in model.learned.tables
            value = model.prior(name).sample() if number else own.softmax(-1) if table else own
            if table:
                value = biject_to(SIMPLEX).inv(0.9 * value + 0.1 / value.shape[-1])
            found[site(name)] = value if number else value + JITTER * torch.randn_like(value)
        with torch.no_grad():
            if bool(model.potential(corpus, found) < -NEVER / 2):
                return found
    raise BNetError(
        f"chain {number}",
        expected=f"a start with a finite density, among {TRIED} draws of the prior",
        got="none",
        allowed="a smaller spread=, float64",
    )


def _seeded(seed: int, device: torch.device) -> list[Tensor]:
    reseed(seed, device)
    return _random(device)


def _random(device: torch.device) -> list[Tensor]:
    """The state of the random numbers: of the processor, and of the device where that is another."""
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *own]


def _set_random(state: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


def keep(path: Path, network: Network, chains: list[Chain], settings: Mapping[str, Any], ranks: Ranks) -> None:
    """Write a checkpoint of the chains of all ranks."""
    own = {f"{c.number}/{k}": v.detach().cpu() for c in chains for k, v in c.state().items()}
    told = ranks.all_gather_object(own)
    if ranks.first:
        tensors = {f"net/{name}": value for name, value in network.parameters.items()}
        tensors |= {name: value for each in told for name, value in each.items()}
        checkpoint.write(path, network, checkpoint.Checkpoint(chains[0].step, tensors, (), (), settings))
    ranks.barrier()


def go_on(path: Path, network: Network, chains: list[Chain], settings: Mapping[str, Any], free: Collection[str]) -> int:
    """Set the chains of this rank where a checkpoint has them; how many steps are done."""
    found = checkpoint.read(path, network)
    checkpoint.check_settings(path, found, settings, free)
    with reading(path, checkpoint.WANTED):
        for chain in chains:
            chain.restore(found.part(str(chain.number)))
    return found.step

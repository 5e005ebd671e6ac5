"""Rows of fits: batched restarts compared with a loop, the time until planted heads are found; and the step whose
growth `growth.py` measures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from torch import Tensor

import bnet_transformer as bt
from benchmarks.harness import Figure, figure, limit_runs, peak_memory, ratios, time_calls
from benchmarks.head_recovery import LEVELS, SPREAD, TOLERANCE, World, fit_from_truth
from benchmarks.limits import measure_limit
from benchmarks.mixtures import use_one_thread
from bnet_transformer.data import Batch, read_batch
from bnet_transformer.data.batch import infer_fit_task
from bnet_transformer.learning.fit.adam import AdamOptimizer
from bnet_transformer.learning.fit.em import SecondOrderOptimizer
from bnet_transformer.learning.fit.objective import FitObjective, select_learnable
from bnet_transformer.learning.fit.restarts import RestartOptimizer
from bnet_transformer.tpm import Normal

RESTARTS, SENTENCES = 16, 256
Sets = dict[str, Tensor]
Gradients = Callable[[], list[Tensor]]

FIRST_WORLD, ADAM_RESTARTS, INNER_STEPS, RATE = 5000, 8, 10, 0.05  # the rate and the inner steps of `bt.EM` by Adam
TRIAL_STEPS = 40  # steps of Adam from which the time of a step is estimated
CHECK_INTERVAL = 5  # steps of Adam between two tests of the rule
DEFAULT = "default EM"
TABLE = "c.logits"
WEIGHTS = {role: f"W_{role}_0.values" for role in "qkv"}


def recovery_with_2_features() -> list[Figure]:
    """Seconds until the success rule of the page on head recovery holds in worlds of its small level, on one thread:
    the log posterior density of some restart is within 0.5 nats of that of a fit started at the truth, and it has as
    many planted heads. The default `bt.fit(method="em")` runs first; Adam-EM and Adam-MAP of this library (8 restarts),
    plain Pyro (SVI with AutoDelta, enumeration, Adam, one start), and a hand-written EM in torch (8 restarts, Adam in
    the M step) are each given the time that it takes in the same world. The tests of the rule do not count. A median
    of inf means that the rule did not hold in half of the worlds."""
    return _measure_recovery("small", runs=5, target=2.0)


def recovery_with_8_features() -> list[Figure]:
    """The same in worlds of the wide level (d=8). The target is that the default EM is not slower than Adam."""
    return _measure_recovery("wide", runs=3)


def _measure_recovery(level: str, runs: int, target: float | None = None) -> list[Figure]:
    """Return the figures of all methods in the first worlds of a level."""
    reached: dict[str, list[float]] = {}
    totals = []
    with use_one_thread():
        for seed in range(FIRST_WORLD, FIRST_WORLD + limit_runs(runs)):
            world = World.create(LEVELS[level], seed)
            rule = Rule(world)
            clock = Clock(rule)
            _fit_library(world, bt.EM(), clock)
            totals.append(clock.seconds())
            reached.setdefault(DEFAULT, []).append(clock.reached)
            methods: dict[str, Callable[[Clock, float], None]] = {
                "Adam-EM, 8 restarts": partial(_fit_by_adam, world, bt.EM),
                "Adam-MAP, 8 restarts": partial(_fit_by_adam, world, bt.MAP),
                "Pyro, SVI": partial(_fit_by_pyro, world),
                "EM in torch, 8 restarts": partial(_fit_by_torch, world),
            }
            for name, fit in methods.items():
                clock = Clock(rule)
                fit(clock, totals[-1])
                reached.setdefault(name, []).append(clock.reached)
    figures = [figure(f"{DEFAULT}: the whole fit", totals, "s")]
    for name, seconds in reached.items():
        figures.append(figure(f"{name}: until the rule holds", seconds, "s", target if name == DEFAULT else None))
        share = sum(math.isfinite(value) for value in seconds) / len(seconds)
        figures.append(figure(f"{name}: share of the worlds in which it holds", share, ""))
    if target is None:
        adam = min(figure("", reached[name], "").value for name in reached if name.startswith("Adam"))
        default = figure("", reached[DEFAULT], "").value
        ratio = default / adam if math.isfinite(default) else math.inf
        figures.append(figure(f"{DEFAULT} over the faster Adam: until the rule holds", ratio, "", target=1.0))
    return [*figures, figure("peak memory of this process", peak_memory(), "MB")]


class Rule:
    """The success rule of one world: at least the density and the heads of a fit that starts at the truth."""

    def __init__(self, world: World) -> None:
        oracle = fit_from_truth(world).net
        self.world, self.oracle = world, oracle
        self.log_posterior, self.recovered = world.log_posterior(oracle), world.count_recovered(oracle)

    def holds(self, sets: Sets) -> bool:
        """Whether one of several sets of parameters, `[set, *shape]`, fulfils the rule."""
        for i in range(len(sets[TABLE])):
            net = self.oracle.replace({name: value[i].detach().double() for name, value in sets.items()})
            is_as_high = self.world.log_posterior(net) >= self.log_posterior - TOLERANCE
            if is_as_high and self.world.count_recovered(net) >= self.recovered:
                return True
        return False


class Clock:
    """A clock of one fit, in processor time, that stands still while the rule is tested."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.reached = rule, math.inf
        self.start = time.process_time()

    def seconds(self) -> float:
        """The seconds since the start, less those of the tests."""
        return time.process_time() - self.start

    def test(self, sets: Sets) -> None:
        """Note the time at which the rule holds for the first time."""
        if math.isfinite(self.reached):
            return
        now = self.seconds()
        if self.rule.holds(sets):
            self.reached = now
        self.start += self.seconds() - now


@contextmanager
def _test_steps(optimizer_class: type[RestartOptimizer], clock: Clock, interval: int) -> Iterator[None]:
    """Test the rule after the steps of all optimizers of a class."""
    update = optimizer_class.update

    def update_and_test(optimizer: RestartOptimizer) -> None:
        update(optimizer)
        if optimizer.step % interval == 0:
            clock.test(optimizer.sets.values)
            if optimizer.best[2] and math.isfinite(optimizer.best[0]):  # of a restart that takes no further steps
                clock.test({name: value[None] for name, value in optimizer.best[2].items()})

    with mock.patch.object(optimizer_class, "update", update_and_test):
        yield


def _fit_library(world: World, method: bt.EM | bt.MAP, clock: Clock) -> None:
    """Fit a random net by this library, in its default precision."""
    net = world.level.create_mixture(world.seed).to(torch.float32)
    data = world.x.float(), world.y.float()
    is_first_order = method.optimizer == "first-order"
    optimizer_class = AdamOptimizer if is_first_order else SecondOrderOptimizer
    with _test_steps(optimizer_class, clock, CHECK_INTERVAL if is_first_order else 1):
        f = bt.fit(net, data, method=method, spread=SPREAD, seed=world.seed, progress=False)
    clock.test({name: f.net.parameters[name][None] for name in f.learned})


def _fit_by_adam(world: World, method: type[bt.EM] | type[bt.MAP], clock: Clock, limit: float) -> None:
    """Fit by Adam, with as many steps as take the time."""
    create = partial(method, optimizer="first-order", restarts=ADAM_RESTARTS)
    net, data = world.level.create_mixture(world.seed).to(torch.float32), (world.x.float(), world.y.float())
    start = time.process_time()
    bt.fit(net, data, method=create(steps=TRIAL_STEPS), spread=SPREAD, seed=world.seed, progress=False)
    steps = max(1, round(TRIAL_STEPS * limit / (time.process_time() - start)))
    clock.start = time.process_time()
    _fit_library(world, create(steps=steps), clock)


def _fit_by_torch(world: World, clock: Clock, limit: float) -> None:
    """Fit by EM written in torch: exact responsibilities, pi in closed form, Adam for the weights; batched restarts."""
    level, x, y = world.level, world.x.float(), world.y.float()
    generator = torch.Generator().manual_seed(world.seed)
    heads, rows = len(level.pi), {"q": level.key, "k": level.key, "v": level.dim}
    W = {
        r: torch.randn(ADAM_RESTARTS, heads, rows[r], level.dim, generator=generator).div(math.sqrt(level.dim))
        for r in "qkv"
    }
    leaves = [value.requires_grad_() for value in W.values()]
    log_pi = torch.full((ADAM_RESTARTS, heads), -math.log(heads))
    optimizer, number = torch.optim.Adam(leaves, lr=RATE), 0

    def compute_log_joint() -> Tensor:
        q, k, v = (torch.einsum("rkoi,sni->rskno", W[role], x) for role in "qkv")
        errors = y[None, :, None] - (q @ k.mT).softmax(-1) @ v
        return log_pi[:, None] - errors.square().sum((-1, -2)) / (2 * level.sigma**2)

    while clock.seconds() < limit:
        with torch.no_grad():
            responsibilities = compute_log_joint().softmax(-1)  # [restart, sentence, head]
            log_pi = responsibilities.mean(1).clamp(min=1e-8).log()
        for _ in range(INNER_STEPS):
            optimizer.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * min(1.0, clock.seconds() / limit))) / 2
            optimizer.zero_grad()
            squares = sum(leaf.square().sum() for leaf in leaves)
            loss = squares / (2 * SPREAD**2) - (responsibilities * compute_log_joint()).sum()
            (loss / len(x)).backward()
            optimizer.step()
            number += 1
            if number % CHECK_INTERVAL == 0:
                clock.test({TABLE: log_pi, **{WEIGHTS[r]: value for r, value in W.items()}})


def _fit_by_pyro(world: World, clock: Clock, limit: float) -> None:
    """Fit by SVI of Pyro with AutoDelta, on its own model with enumerated heads; constant rate, one start."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
    from pyro.infer.autoguide import AutoDelta, init_to_sample
    from pyro.optim import PyroOptim

    level, x, y = world.level, world.x.float(), world.y.float()
    heads, rows = len(level.pi), {"q": level.key, "k": level.key, "v": level.dim}

    @config_enumerate  # type: ignore[untyped-decorator]
    def model() -> None:
        pi = pyro.sample("pi", dist.Dirichlet(torch.ones(heads)))
        shapes = {r: (heads, rows[r], level.dim) for r in "qkv"}
        W = {r: pyro.sample(f"W_{r}", dist.Normal(0.0, SPREAD).expand(shapes[r]).to_event(3)) for r in "qkv"}
        with pyro.plate("sentence", len(x)):
            c = pyro.sample("c", dist.Categorical(pi))
            q, k, v = (torch.einsum("...oi,...ni->...no", W[r][c], x) for r in "qkv")
            mean = torch.softmax(q @ k.mT, -1) @ v
            pyro.sample("y", dist.Normal(mean, level.sigma).to_event(2), obs=y)

    pyro.clear_param_store()
    pyro.set_rng_seed(world.seed)
    guide = AutoDelta(pyro.poutine.block(model, hide=["c", "y"]), init_loc_fn=init_to_sample)
    svi = SVI(model, guide, PyroOptim(torch.optim.Adam, {"lr": RATE}), TraceEnum_ELBO(max_plate_nesting=1))
    number = 0
    while clock.seconds() < limit:
        svi.step()
        number += 1
        if number % CHECK_INTERVAL == 0:
            point = guide.median()
            clock.test({TABLE: point["pi"].log()[None], **{WEIGHTS[r]: point[f"W_{r}"][None] for r in "qkv"}})
    pyro.clear_param_store()


def batched_restarts() -> list[Figure]:
    """A gradient of the exact marginal of 16 restarts (4 heads, 8 words, d=8, d_k=4, 256 sentences), on all threads: as
    one batched dimension, compared with a loop over them. The gradients are first asserted to be equal."""
    batched, looped = create_restarts(RESTARTS, heads=4, words=8, dim=8)
    torch.testing.assert_close(batched(), looped(), rtol=1e-3, atol=1e-3)
    spent = time_calls({"at once": batched, "one by one": looped}, runs=15, warm=2)
    return [
        figure("at once", spent["at once"], "s"),
        figure("one by one", spent["one by one"], "s"),
        figure("at once over one by one", ratios(spent["at once"], spent["one by one"]), "", target=1 / 1.5),
        *measure_limit(batched, spent["at once"]),
    ]


def create_restarts(count: int, *, device: str = "cpu", **sizes: int) -> tuple[Gradients, Gradients]:
    """Return functions that compute the gradients of all restarts: as one batched dimension, and in a loop."""
    objective, corpus, sets = _create_case(count, device=device, **sizes)

    def compute_batched() -> list[Tensor]:
        leaves = {name: value.requires_grad_() for name, value in sets.items()}
        return list(torch.autograd.grad(objective.log_evidences(leaves, corpus).sum(), list(leaves.values())))

    def compute_looped() -> list[Tensor]:
        grads = []
        for r in range(count):
            leaves = {name: value[r].detach().requires_grad_() for name, value in sets.items()}
            grads.append(torch.autograd.grad(objective.log_evidence(leaves, corpus).sum(), list(leaves.values())))
        return [torch.stack(item) for item in zip(*grads, strict=True)]

    return compute_batched, compute_looped


def _create_case(
    restarts: int,
    *,
    heads: int,
    words: int,
    dim: int,
    atoms: int | None = None,
    sentences: int = SENTENCES,
    device: str = "cpu",
) -> tuple[FitObjective, Batch, Sets]:
    """Return a mixture or a codebook with parameters of all restarts, and data."""
    torch.manual_seed(0)
    net = bt.bayesuvius(dim, heads=heads, key_dim=4, atoms=atoms, observe=Normal(1.0))
    data = torch.randn(sentences, words, dim), torch.randn(sentences, words, dim)
    noise = {n: 0.1 * torch.randn(restarts, *p.shape) for n, p in net.parameters.items()}
    net = net.to(device)
    learned = select_learnable(net.network, infer_fit_task(net.network).readouts, None, None)
    objective, corpus = (
        FitObjective(net.network, learned, 2**16),
        read_batch(net.network, data).to(torch.device(device)),
    )
    return objective, corpus, {name: net.parameters[name] + noise[name].to(device) for name in learned.names}


def create_step(*, heads: int, words: int, atoms: int | None = None, sentences: int = 128) -> Callable[[], object]:
    """Return a gradient of the exact marginal of a mixture, or of codebooks."""
    objective, corpus, sets = _create_case(1, heads=heads, words=words, dim=8, atoms=atoms, sentences=sentences)

    def run() -> object:
        leaves = {name: value[0].detach().requires_grad_() for name, value in sets.items()}
        return torch.autograd.grad(objective.log_evidence(leaves, corpus).sum(), list(leaves.values()))

    return run

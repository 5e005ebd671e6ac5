"""`calibrate`: simulation-based calibration of the posteriors of a method for a net and a prior."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from bnet_transformer._core.checks import (
    check_fraction,
    check_int,
    check_mapping,
    check_names,
    check_seed,
    check_sequence,
)
from bnet_transformer._core.config_options import suggest_config_for_options
from bnet_transformer._core.distributed import SINGLE_PROCESS
from bnet_transformer._core.hashing import derive_seed
from bnet_transformer._core.memory import translate_memory_errors
from bnet_transformer._core.torch_context import enable_gradients, fork_torch_rng, seed_rngs
from bnet_transformer.bridges.pyro import PyroModel
from bnet_transformer.compiler.validate_inputs import get_plate_sizes
from bnet_transformer.data import Batch, Evidence, read_batch
from bnet_transformer.data.task import infer_fit_task
from bnet_transformer.declare import Network, NodeSpec, as_network
from bnet_transformer.errors import BNetError
from bnet_transformer.learning.calibration.quantities import Quantities
from bnet_transformer.learning.calibration.result import MIN_REPLICATIONS, Calibration
from bnet_transformer.learning.fit.diagnostics import count_effective
from bnet_transformer.learning.fit.head_summary import samples_to_parameters
from bnet_transformer.learning.fit.methods import METHODS, create_problem, fit, resolve_method
from bnet_transformer.learning.fit.problem import Method, to_parameters
from bnet_transformer.learning.fit.result import Fit
from bnet_transformer.learning.fit.variational import ParameterModel
from bnet_transformer.learning.training.configs import LoopConfig, defer_interrupt
from bnet_transformer.reference import BUDGET

MAX_DRAWS = 200  # the maximum number of draws of a fit for which the quantities are computed
MAX_FAILURES = 5  # after this number of failures without a success the run ends with an error
DRAWS_PER_RANK = 2  # the effective sample size for each draw of a rank, so that these draws are nearly independent


@suggest_config_for_options(method=tuple(METHODS))
@enable_gradients()
@translate_memory_errors("calibrate")
def calibrate(
    net: object,
    method: Method | str = "nuts",
    *,
    x: object = None,
    replications: int = 200,
    quantities: Mapping[str, Callable[[Any], object]] | None = None,
    observed: Collection[str] | None = None,
    level: float = 0.95,
    batch: int | None = None,
    spread: float | None = None,
    learn: Collection[str] | None = None,
    budget: int = BUDGET,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool | None = None,
) -> Calibration:
    """Check the posteriors of a method by simulation-based calibration (Talts et al. 2018), for your net and prior.

    Each replication draws the learned parameters from the prior of the fit (Dirichlet tables, Normal weights), draws
    observations from the net with these parameters, fits `net` to them with `bt.fit`, and computes the rank of the true
    value of each quantity among the posterior draws. If the posterior is correct, the ranks are uniform. The fit starts
    as `bt.fit(net, ...)` does, from the parameters of `net`, and never from the true ones.

    The quantities do not depend on labels of heads: the log likelihood of the observations, two random projections of
    the prediction of each readout for the first sentence, the sorted probabilities of each selector, the mean entropy
    of the rows of each learned table, the sorted norms of `A` and `OV` of the heads, and the norms of all other learned
    weights. Draws are thinned, separately for each quantity and replication, to half of their effective sample size:
    the ranks of a true value among correlated draws are too often extreme, also if the posterior is correct.

    Args:
        net: A net with a readout. Its parameters are the start of each fit, and the true values of the parameters that
            are not learned.
        method: A method of `bt.fit` with posterior samples, such as `bt.NUTS(...)` or `bt.SVI(...)`, or its name.
        x: The sentences of each replication, in the forms of `f.predict`; or a function of a seed that returns them.
            For a net without words and inputs, the number of rows.
        replications: The number of replications, at least 20. At least 200 are recommended: with fewer, only large
            defects leave the bands.
        quantities: Your own quantities: a mapping from name to a function of a net that returns a number. A function
            must not depend on labels of heads.
        observed: The names of the observed nodes; by default the random nodes without children.
        level: The probability that no quantity of a calibrated method leaves its band.
        batch: The number of sentences of a step of the method; see `bt.fit`.
        spread: The standard deviation of the Normal prior on every weight, of the fit and of the true values; required
            if weights are learned.
        learn: The names of the parameters to learn; None for all parameters on which an observed node depends.
        budget: The maximum number of joint states of the choices of a sentence that are summed.
        seed: The seed of the true values, observations, fits and ties.
        device: The device of the fits; None for the device of the net.
        progress: True shows a progress bar, False none; None shows one only in a terminal.

    Returns:
        The calibration: ranks, bands, p values and verdicts. Ctrl-C returns the replications so far. A replication in
        which the fit raises an error is counted in `failures`.

    Raises:
        BNetError: If an option is out of range, the method has no posterior samples, learned weights have no prior, or
            the first five fits fail.

    >>> import bnet_transformer as bt
    >>> binary = bt.tpm.Categorical(2)
    >>> rain = bt.BNet(bt.Declaration(nodes=[bt.Node("rain", binary), bt.Node("wet", binary, ["rain"])]))
    >>> result = bt.calibrate(rain, bt.SVI(steps=5, draws=20), x=10, replications=20, progress=False)
    >>> result.replications, list(result.ranks)
    (20, ['log_likelihood', 'wet_predicted', 'rain_sorted', 'wet_entropy'])
    """
    config = resolve_method(method)
    if config.is_point:
        names = ", ".join(repr(kind.name) for kind in METHODS if not kind.is_point)
        raise BNetError("method", expected="a method with posterior samples", actual=config.name, allowed=names)
    check_int("replications", replications)
    if replications < MIN_REPLICATIONS:
        expected = f"an integer of at least {MIN_REPLICATIONS}, because fewer ranks support no verdict"
        raise BNetError("replications", expected=expected, actual=replications, hint="Use 200 or more")
    check_fraction("level", level)
    check_seed(seed)
    custom = check_mapping("quantities", quantities)
    for name, function in custom.items():
        if not callable(function):
            raise BNetError(f"quantity {name}", expected="a function of a net that returns a number", actual=function)
    simulator = Simulator(as_network(net), x, observed, seed)
    options: dict[str, Any] = {"batch": batch, "spread": spread, "learn": learn, "budget": budget}
    with fork_torch_rng(simulator.network.device):
        example = simulator.observe(simulator.network, 0)
    problem = create_problem(net, example, config, seed=seed, **options)  # raises an error for invalid options
    model = ParameterModel(problem.objective)

    def wrap(network: Network) -> object:
        return network if isinstance(net, Network) else cast(Callable[[Network], object], type(net))(network)

    computed = Quantities(problem.objective, simulator.readouts, custom, wrap, seed)
    rows: list[dict[str, tuple[int, int]]] = []
    failures: dict[int, str] = {}
    done, is_interrupted, start = 0, False, time.perf_counter()
    bar = LoopConfig(progress=progress).progress_bar(SINGLE_PROCESS, replications, 0, "replication")
    with defer_interrupt() as interrupts, fork_torch_rng(simulator.network.device), bar:
        while done < replications and not is_interrupted:
            truth = _draw_truth(model, derive_seed(seed, "truth", done))
            corpus = simulator.observe(simulator.network.with_parameters(truth), done)
            fit_seed = derive_seed(seed, "fit", done)
            try:
                fitted = fit(net, corpus, method=config, seed=fit_seed, device=device, progress=False, **options)
                if fitted.finished:
                    rows.append(_rank(fitted, truth, corpus, computed, derive_seed(seed, "ties", done)))
                is_interrupted = bool(interrupts) or not fitted.finished
            except (BNetError, ArithmeticError, RuntimeError, ValueError) as error:
                failures[done] = f"{type(error).__name__}: {error}"
                if len(failures) == MAX_FAILURES and not rows:
                    raise
            done += 1
            bar.update()
        bar.refresh()
    shared = [name for name in (rows[0] if rows else ()) if all(name in row for row in rows)]
    by_name = {name: torch.tensor([row[name] for row in rows]).unbind(1) for name in shared}
    return Calibration(
        config.name,
        {name: ranks for name, (ranks, _) in by_name.items()},
        {name: draws for name, (_, draws) in by_name.items()},
        replications,
        level,
        failures,
        computed.omitted,
        time.perf_counter() - start,
        not is_interrupted,
        seed,
    )


class Simulator:
    """Draws the sentences and observations of a replication.

    Args:
        network: The net.
        x: The sentences, a function of a seed that returns them, or a number of rows.
        observed: The names of the observed nodes; None for the random nodes without children.
        seed: The seed of the run.
    """

    def __init__(self, network: Network, x: object, observed: Collection[str] | None, seed: int) -> None:
        self.network, self.seed = network, seed
        candidates = {spec.group.name: spec for spec in infer_fit_task(network).readouts}
        names = tuple(name for name, m in candidates.items() if not network.graph.out_edges[m.group.index])
        if observed is not None:
            names = check_sequence("observed", observed, str)
            check_names("observed node", names, candidates)
        self.readouts: tuple[NodeSpec, ...] = tuple(candidates[name] for name in names)
        self.function = x if callable(x) else None
        self.fixed = None if callable(x) else self._read(x)

    def _read(self, x: object) -> tuple[Batch, int]:
        """Read sentences; also return their number."""
        inputs = [m.group.name for m in self.network.specs if m.tpm.kind == "input"]
        if self.network.graph.word_stacks or inputs:
            if x is None or isinstance(x, int):
                expected = "the sentences of a replication, in the forms of f.predict, or a function of a seed"
                raise BNetError("x", expected=expected, actual=x)
            batch = read_batch(self.network, x, "x", observed="none", mask_padding=True)
            return batch, len(batch)
        if x is None:
            raise BNetError("x", expected="the number of rows of a replication", hint="Pass for example x=100")
        return Batch({}), check_int("x", x)

    def observe(self, network: Network, number: int) -> Batch:
        """Draw the observations of replication `number` from a net."""
        function = self.function
        batch, count = self.fixed or self._read(cast(Any, function)(derive_seed(self.seed, "x", number)))
        seed_rngs(derive_seed(self.seed, "data", number), network.device)
        with torch.no_grad():
            sites = PyroModel(network, parameters="own")(batch.x, mask=batch.mask, given=batch.given, batch=count)
        words = {stack: value.shape[1] for stack, value in batch.x.items()}
        evidence = {}
        for spec in self.readouts:
            group = spec.group
            value = sites[group.name].reshape(count, *get_plate_sizes(network, spec, words), *spec.shape)
            present = (batch.mask or {}).get(group.word_stack or "")
            is_padded = group.word_stack is not None and present is not None and not bool(present.all())
            evidence[group.name] = Evidence(value, _add_plates(present, group.plates, value) if is_padded else None)
        return replace(batch, evidence=evidence)


def _add_plates(present: Tensor | None, plates: tuple[str, ...], value: Tensor) -> Tensor:
    """Expand a mask of words, `[sentence, word]`, to `[sentence, *plates, word]`."""
    assert present is not None
    mask = present[:, *[None] * len(plates)]
    return mask.expand(value.shape[: 2 + len(plates)])


def _draw_truth(model: ParameterModel, seed: int) -> dict[str, Tensor]:
    """Draw the learned parameters from their prior."""
    seed_rngs(seed, model.device)
    return to_parameters(model.network, {name: model.prior(name).sample() for name in model.learned.names})


def _rank(
    fitted: Fit[Any], truth: Mapping[str, Tensor], corpus: Batch, quantities: Quantities, seed: int
) -> dict[str, tuple[int, int]]:
    """Compute the rank of the true value of each quantity among thinned draws, and the number of these draws."""
    if not fitted.samples:
        raise BNetError("this fit has no samples")
    chains, count = next(iter(fitted.samples.values())).shape[:2]
    idx = _evenly_spaced(count, max(1, MAX_DRAWS // chains))
    samples = samples_to_parameters(quantities.network, {k: v[:, idx] for k, v in fitted.samples.items()})
    sets = {name: torch.cat([truth[name][None], samples[name].to(truth[name])]) for name in truth}
    seed_rngs(seed, torch.device("cpu"))
    ranks = {}
    for name, values in quantities.evaluate(sets, corpus).items():
        if bool(values.isnan().any()):
            raise BNetError(f"quantity {name}", expected="numbers", actual="NaN")
        draws = values[1:]
        size = float(count_effective(draws.reshape(chains, -1)))
        if fitted.effective_sample_size is not None:  # weighted draws
            size = min(size, fitted.effective_sample_size)
        draws = draws[_evenly_spaced(len(draws), max(1, int(size / DRAWS_PER_RANK)))]
        below, ties = int((draws < values[0]).sum()), int((draws == values[0]).sum())
        ranks[name] = below + int(torch.randint(ties + 1, ())), len(draws)
    return ranks


def _evenly_spaced(count: int, maximum: int) -> Tensor:
    """Return at most `maximum` evenly spaced indices of `count` draws."""
    size = min(count, maximum)
    return ((torch.arange(size) + 1) * count) // size - 1

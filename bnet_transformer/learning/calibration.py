"""Simulation-based calibration: are the posteriors of a method correct for a net and a prior?"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.stats import norm
from torch import Tensor

from bnet_transformer._core.checks import (
    check_fraction,
    check_int,
    check_mapping,
    check_names,
    check_seed,
    check_sequence,
    suggest_config_for_options,
)
from bnet_transformer._core.distributed import SINGLE_PROCESS
from bnet_transformer._core.files import derive_seed
from bnet_transformer._core.process import translate_memory_errors
from bnet_transformer._core.results import Result
from bnet_transformer._core.tensors import enable_gradients, fork_torch_rng, seed_rngs
from bnet_transformer.bridges.pyro import PyroModel
from bnet_transformer.data import Batch, Evidence, read_batch
from bnet_transformer.data.batch import infer_fit_task
from bnet_transformer.data.checks import get_plate_sizes
from bnet_transformer.declare import Network, NodeSpec, as_network
from bnet_transformer.declare.network import restore_type
from bnet_transformer.errors import BNetError, BudgetError, UnsupportedError
from bnet_transformer.learning.fit.diagnostics import count_effective
from bnet_transformer.learning.fit.heads import (
    find_invariant_parameters,
    find_selectors,
    invariants,
    log_likelihoods,
    occupancy,
    samples_to_parameters,
)
from bnet_transformer.learning.fit.methods import METHODS, create_problem, fit, resolve_method
from bnet_transformer.learning.fit.objective import FitObjective, Method, to_parameters
from bnet_transformer.learning.fit.predictive import ReadoutPredictor, evaluate_number, predict_readout
from bnet_transformer.learning.fit.result import Fit
from bnet_transformer.learning.fit.svi import get_prior
from bnet_transformer.learning.loop import LoopConfig, defer_interrupt
from bnet_transformer.reference import BUDGET

# --------------------------------------------------------------------------------------------------------------------
# Simultaneous confidence bands for the empirical distribution function (ECDF) of uniform numbers, and exact p values.
#
# Under the hypothesis, the number of N uniform values that are at most z is Binomial(N, z) at each point z. A band of
# binomial intervals that contains the whole ECDF with a given probability needs wider intervals than each point on its
# own (Säilynoja, Bürkner and Vehtari 2022, "Graphical test for discrete uniformity and its applications in
# goodness-of-fit evaluation and multiple sample comparison").

FloatArray = NDArray[np.float64]
MAX_POINTS = 100  # the maximum number of points at which an ECDF is evaluated


def get_points(count: int) -> FloatArray:
    """Return the points at which the ECDF of some values is evaluated: multiples of 1 / K between 0 and 1."""
    cells = min(count, MAX_POINTS)
    points: FloatArray = np.arange(1, cells) / cells
    return points


def count_below(values: FloatArray) -> NDArray[np.int64]:
    """Count the values that are at most each point, `[point]`."""
    return np.searchsorted(np.sort(values), get_points(len(values)), side="right").astype(np.int64)


@lru_cache(maxsize=16)
def _tail_probabilities(count: int) -> FloatArray:
    """Compute the two-sided tail probability of each number of values below each point, `[point, count + 1]`."""
    points, numbers = get_points(count)[:, None], np.arange(count + 1)
    lower = stats.binom.cdf(numbers, count, points)
    upper = stats.binom.sf(numbers - 1, count, points)
    tails: FloatArray = np.minimum(1.0, 2 * np.minimum(lower, upper))
    return tails


@lru_cache(maxsize=256)
def exceedance_probability(count: int, tail: float) -> float:
    """Compute the probability that the smallest tail probability of the ECDF of uniform values is at most `tail`.

    This is the p value of an ECDF whose smallest tail probability is `tail`.
    """
    # The numbers of uniform values in K equal cells are multinomial, which is K independent Poisson numbers given that
    # their sum is N. So partial sums that are still in all their intervals have the density of convolutions with one
    # Poisson distribution, each followed by a truncation (the exact algorithm of Moscovich and Nadler 2017, "Fast
    # calculation of boundary crossing probabilities for Poisson processes", on a grid). No simulation is needed. The
    # result is the sum of what is truncated, because 1 minus what remains has no correct digit if it is below 1e-15.
    inside = _tail_probabilities(count) > tail
    numbers = np.arange(count + 1)
    increments = stats.poisson.pmf(numbers, count / (len(inside) + 1))
    points = get_points(count)[:, None]
    last = stats.poisson.pmf(count - numbers, count * (1 - points))  # of the values above a point, `[point, count + 1]`
    density = np.zeros(count + 1)
    density[0], total = 1.0, 0.0
    for row, above in zip(inside, last, strict=True):
        density = np.convolve(density, increments)[: count + 1]
        total += float(density[~row] @ above[~row])
        density *= row
    return min(1.0, total / float(stats.poisson.pmf(count, count)))


def ecdf_p_value(values: FloatArray) -> float:
    """Compute the probability that the ECDF of uniform values is at least as extreme as that of `values`."""
    tails = _tail_probabilities(len(values))
    return exceedance_probability(len(values), float(tails[np.arange(len(tails)), count_below(values)].min()))


@lru_cache(maxsize=64)
def simultaneous_band(count: int, error: float) -> tuple[FloatArray, FloatArray]:
    """Compute the band that the ECDF of uniform values leaves with a probability of at most `error`.

    Returns:
        The lowest and the highest ECDF in the band at each point, both `[point]`.
    """
    tails = _tail_probabilities(count)
    levels = np.unique(tails)
    low, high = -1, len(levels) - 1  # the widest band has no level; the narrowest excludes everything
    while high - low > 1:
        middle = (low + high) // 2
        if exceedance_probability(count, float(levels[middle])) <= error:
            low = middle
        else:
            high = middle
    inside: Any = tails > (levels[low] if low >= 0 else -1.0)
    return inside.argmax(1) / count, (count - inside[:, ::-1].argmax(1)) / count


# --------------------------------------------------------------------------------------------------------------------
# Quantities of a fit that do not depend on labels of heads or on the basis of keys, for each of many draws.
#
# Only such quantities are identified: permuting the heads, or changing the basis of the keys, changes parameters but
# not the density, so the rank of a true parameter among draws shows the labels and not the calibration.

MAX_SORTED = 4  # sorted probabilities, norms or projections of one node
PROJECTIONS = 2  # random projections of the prediction of a readout

Sets = Mapping[str, Tensor]


class Quantities:
    """Computes the quantities of many sets of parameters, `[set, *shape]` by name.

    Args:
        objective: The log evidence, and the learned parameters.
        readouts: The observed readouts, whose predictions are quantities.
        custom: The user's functions of a net by name.
        wrap: Converts a network to the type of the user's net.
        seed: The seed of the projections.
    """

    def __init__(
        self,
        objective: FitObjective,
        readouts: tuple[NodeSpec, ...],
        custom: Mapping[str, Callable[[Any], object]],
        wrap: Callable[[Network], object],
        seed: int,
    ) -> None:
        self.objective, self.network, self.readouts = objective, objective.network, readouts
        self.custom, self.wrap, self.seed = custom, wrap, seed
        self.omitted: dict[str, str] = {}
        self.predictors: dict[str, ReadoutPredictor] = {}
        self.selectors = find_selectors(self.network)

    def evaluate(self, sets: Sets, corpus: Batch) -> dict[str, Tensor]:
        """Compute all quantities, `[set]` by name. Quantities that need an impossible sum are omitted."""
        result: dict[str, Tensor] = {}
        for spec in (None, *self.readouts):
            name = "log_likelihood" if spec is None else f"{spec.group.name}_predicted"
            if name in self.omitted:
                continue
            try:
                if spec is None:
                    result[name] = log_likelihoods(self.objective, corpus, sets).sum(1)
                else:
                    result |= self._predictions(sets, spec, corpus)
            except (BudgetError, UnsupportedError) as error:
                self.omitted[name] = str(error)
        result |= self._tables(sets) | self._weights(sets)
        if self.custom:
            rows = zip(*sets.values(), strict=True)
            networks = [self.wrap(self.network.with_parameters(dict(zip(sets, row, strict=True)))) for row in rows]
            for name, function in self.custom.items():
                expected = "a function of a net that returns a number"
                values = [evaluate_number(f"quantity {name}", function, net, expected) for net in networks]
                result[name] = torch.tensor(values)
        return {name: value.detach().double().cpu() for name, value in result.items()}

    def _predictions(self, sets: Sets, spec: NodeSpec, corpus: Batch) -> dict[str, Tensor]:
        """Project the prediction of a readout for the first sentence on random directions."""
        part = replace(corpus.take(slice(0, 1)), evidence={})
        if part.x:
            ((_, part),) = part.split_by_length(self.network, 1)
        name = spec.group.name
        if name not in self.predictors:
            predict_readout(self.network, name, [part], self.objective.budget)  # raises an error for impossible sums
            self.predictors[name] = ReadoutPredictor(self.network, name)
        values = self.predictors[name].predict(sets, part)
        table = values.detach().flatten(1).double().cpu()
        states = spec.tpm.states if spec.tpm.kind == "discrete" else None
        free = table.shape[1] - (0 if states is None else table.shape[1] // states)  # probabilities have the sum 1
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "projection", name))
        directions = torch.randn(table.shape[1], min(PROJECTIONS, free), generator=generator, dtype=torch.float64)
        return _number(f"{name}_predicted", table @ directions)

    def _tables(self, sets: Sets) -> dict[str, Tensor]:
        """Compute the sorted probabilities of each selector, and the mean entropy of the rows of each learned table."""
        result: dict[str, Tensor] = {}
        owners = set[str]()
        for spec in self.selectors:
            owner = spec.param_prefix
            tables = {f"{owner}.logits", f"{owner}.initial"} & set(self.network.parameters)
            if owner in owners or not tables & set(sets):
                continue
            owners.add(owner)
            count = len(next(iter(sets.values())))
            fixed = {name: self.network.parameters[name].detach() for name in tables}
            values = {**{name: value.expand(count, *value.shape) for name, value in fixed.items()}, **sets}
            theta = {name.removesuffix(".logits"): values[name].softmax(-1) for name in tables}
            usage = occupancy(spec, theta).sort(-1, descending=True).values
            if usage.shape[-1] > 1:
                result |= _number(f"{owner}_sorted", usage[:, : min(MAX_SORTED, usage.shape[-1] - 1)])
        for name in self.objective.learned.tables:
            probs = sets[name].softmax(-1)
            is_binary_selector = name.removesuffix(".logits") in owners and sets[name][0].numel() == 2
            if probs.shape[-1] > 1 and not is_binary_selector:  # of two probabilities, the larger one determines it
                entropy = torch.special.entr(probs).sum(-1).reshape(len(probs), -1).mean(1)
                result[f"{name.removesuffix('.logits').replace('.', '_')}_entropy"] = entropy
        return result

    def _weights(self, sets: Sets) -> dict[str, Tensor]:
        """Compute the sorted norms of the invariants of heads, and the norms of all other learned weights."""
        result: dict[str, Tensor] = {}
        used = set[str]()
        for selector in self.selectors:
            sources = find_invariant_parameters(self.network, selector)
            learned = {label for label, names in sources.items() if {n for group in names for n in group} & set(sets)}
            if not learned:
                continue
            used |= {name for label in learned for group in sources[label] for name in group}
            values = invariants(self.network, selector, {**self.network.parameters, **sets})
            for label in sorted(learned):
                norms = values[label].flatten(2).norm(dim=2).sort(-1, descending=True).values
                result |= _number(f"{label} norm", norms[:, :MAX_SORTED])
        for name in self.objective.learned.weights:
            if name not in used:
                result[f"{name} norm"] = sets[name].flatten(1).norm(dim=1)
        return result


def _number(name: str, table: Tensor) -> dict[str, Tensor]:
    """Name the columns of a table `[set, column]`."""
    if table.shape[1] == 1:
        return {name: table[:, 0]}
    return {f"{name}[{k}]": column for k, column in enumerate(table.unbind(1))}


# --------------------------------------------------------------------------------------------------------------------
# `Calibration`, the result of a simulation-based calibration: ranks, bands, p values and verdicts.

MIN_REPLICATIONS = 20  # fewer ranks support no verdict
MIN_DRAWS = 9  # with fewer independent draws, positions hardly show a posterior that is too narrow
CALIBRATED, UNDECIDED = "calibrated", "too few replications"
SHAPE_Z = float(norm.isf(0.005))  # z-score at which the mean or the variance of the positions names the defect


@dataclass(frozen=True)
class Calibration(Result):
    """The result of `calibrate`: for each quantity, the rank of the true value among posterior draws.

    If the posterior is correct, the position of the true value among the draws is uniform between 0 and 1. The ECDF of
    the positions is compared with a band that contains all points of all quantities together with probability `level`:
    it is simultaneous over the points (Säilynoja et al. 2022), and the error is divided by the number of quantities
    (Bonferroni).

    Attributes:
        method: The name of the method, such as `"nuts"`.
        ranks: The number of draws that are smaller than the true value by quantity, `[replication]`. Ties are broken at
            random.
        draws: The number of draws that were compared, by quantity, `[replication]`: draws of correlated chains are
            thinned to half of their effective sample size, so that the remaining ones are nearly independent.
        requested: The number of requested replications.
        level: The probability that no quantity of a calibrated method leaves its band.
        failures: The reason for each replication that failed, by its number. Failed replications have no ranks.
        omitted: The reason for each default quantity that could not be computed, by its name.
        seconds: The duration in seconds.
        finished: False if Ctrl-C ended the run early.
        seed: The seed of the run.

    >>> import torch
    >>> ranks = torch.arange(200) % 20
    >>> Calibration("exact", {"c": ranks}, {"c": torch.full((200,), 19)}, 200).verdict
    'calibrated'
    """

    _index = "quantity"
    _shapes = "ranks draws: {quantity} int replication"

    method: str
    ranks: Mapping[str, Tensor] = field(repr=False)
    draws: Mapping[str, Tensor] = field(repr=False)
    requested: int
    level: float = 0.95
    failures: Mapping[int, str] = field(default_factory=dict, repr=False)
    omitted: Mapping[str, str] = field(default_factory=dict, repr=False)
    seconds: float = field(default=0.0, repr=False)
    finished: bool = True
    seed: int = field(default=0, repr=False)

    @property
    def replications(self) -> int:
        """The number of replications with ranks."""
        return max((len(ranks) for ranks in self.ranks.values()), default=0)

    @property
    def error(self) -> float:
        """The probability that one quantity of a calibrated method leaves its band."""
        return (1 - self.level) / max(1, len(self.ranks))

    @property
    def positions(self) -> dict[str, Tensor]:
        """The position of the true value among the draws by quantity, between 0 and 1, `[replication]`.

        It is the rank with a uniform random number between this rank and the next, divided by the number of draws + 1.
        So it is uniform for a correct posterior, for any number of draws.
        """
        result = {}
        for name, ranks in self.ranks.items():
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "position", name))
            jitter = torch.rand(len(ranks), generator=generator, dtype=torch.float64)
            result[name] = (ranks + jitter) / (self.draws[name] + 1)
        return result

    @property
    def points(self) -> FloatArray:
        """The points at which the ECDFs are compared with the uniform distribution, `[point]`."""
        return get_points(self.replications)

    @property
    def differences(self) -> dict[str, FloatArray]:
        """The ECDF of the positions minus that of the uniform distribution by quantity, `[point]`."""
        points, count = self.points, self.replications
        return {name: count_below(u.numpy()) / count - points for name, u in self.positions.items()}

    @property
    def band(self) -> tuple[FloatArray, FloatArray]:
        """The lower and the upper bound of `differences`, both `[point]`."""
        low, high = simultaneous_band(self.replications, self.error)
        return low - self.points, high - self.points

    @property
    def p(self) -> dict[str, float]:
        """The probability, for a correct posterior, of an ECDF at least as extreme as that of each quantity.

        It is exact over all points of one quantity, and not adjusted over quantities: compare it with `error`.
        """
        return {name: ecdf_p_value(u.numpy()) for name, u in self.positions.items()}

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict of each quantity.

        It is `"calibrated"` if the ECDF is inside the band. Otherwise it describes the posterior: `"too narrow"` or
        `"too wide"` (the variance of the positions), `"biased low"` or `"biased high"` (their mean: the draws are
        mostly below or above the true value), or `"not uniform"`. With fewer than 20 replications it is
        `"too few replications"`.
        """
        if self.replications < MIN_REPLICATIONS:
            return dict.fromkeys(self.ranks, UNDECIDED)
        p, positions = self.p, self.positions
        return {name: CALIBRATED if p[name] > self.error else describe_shape(u) for name, u in positions.items()}

    @property
    def verdict(self) -> str:
        """`"calibrated"`, `"too few replications"`, or the quantities that leave the band with their verdicts."""
        verdicts = self.verdicts
        if self.replications < MIN_REPLICATIONS:
            return UNDECIDED
        return "; ".join(f"{name}: {text}" for name, text in verdicts.items() if text != CALIBRATED) or CALIBRATED

    def coverage(self, name: str, share: float = 0.9) -> tuple[float, float]:
        """Compute how often the central posterior interval of a quantity contains the true value.

        Args:
            name: The quantity.
            share: The posterior probability of the interval, 0.9 by default.

        Returns:
            The share of the replications, and its standard error.

        Raises:
            BNetError: If the quantity is unknown, or there are no replications.
        """
        check_names("quantity", [name], self.ranks)
        check_fraction("share", share)
        if not self.replications:
            raise BNetError("coverage", expected="a calibration with replications", actual="none")
        inside = (self.positions[name] - 0.5).abs() <= share / 2
        mean = float(inside.double().mean())
        return mean, (mean * (1 - mean) / len(inside)) ** 0.5

    def _get_columns(self) -> Mapping[str, Any]:
        coverage = [self.coverage(name) for name in self.ranks]
        return {
            "quantity": [*self.ranks],
            "replications": [len(ranks) for ranks in self.ranks.values()],
            "draws": [float(draws.double().median()) for draws in self.draws.values()],
            "mean position": [float(positions.mean()) for positions in self.positions.values()],
            "coverage of 90%": [mean for mean, _ in coverage],
            "standard error": [error for _, error in coverage],
            "p": [self.p[name] for name in self.ranks],
            "verdict": [self.verdicts[name] for name in self.ranks],
        }

    @property
    def caption(self) -> str:
        """The replications and the verdict, in one line."""
        text = f"calibration of {self.method}: {self.replications} of {self.requested} replications"
        text += f"{'' if self.finished else ', interrupted'} in {self.seconds:.0f} seconds; {self.verdict}"
        bands = f". The bands contain all quantities with probability {self.level:g} (each p > {self.error:.2g})"
        return text + (bands if self.replications else "")

    @property
    def notes(self) -> tuple[str, ...]:
        """What limits the result: failed replications, few effective draws, omitted quantities."""
        notes = [f"omitted: {name} ({reason})" for name, reason in self.omitted.items()]
        if self.failures:
            number, reason = next(iter(self.failures.items()))
            notes.append(f"{len(self.failures)} replications failed and have no ranks; number {number}: {reason}")
        thin = [name for name, draws in self.draws.items() if len(draws) and float(draws.double().median()) < MIN_DRAWS]
        if thin:
            notes.append(
                f"fewer than {MIN_DRAWS} draws after thinning: {', '.join(thin)}; request more draws of the method"
            )
        return tuple(notes)


def describe_shape(positions: Tensor) -> str:
    """Describe how positions differ from uniform ones: by their mean, by their variance, or otherwise."""
    # For n uniform numbers the mean has variance 1/(12 n), and the mean of (u - 1/2)^2 has mean 1/12 and variance
    # 1/(180 n). Large positions mean draws below the true value; a large variance means that it is often in the tails.
    # The variance is that about their mean, because a shift of the mean moves all positions. The larger z-score names
    # the defect.
    u = positions.numpy() - 0.5
    mean_z = float(u.mean() * np.sqrt(12 * len(u)))
    variance_z = float((np.square(u - u.mean()).mean() - 1 / 12) * np.sqrt(180 * len(u)))
    if max(abs(mean_z), abs(variance_z)) < SHAPE_Z:
        return "not uniform"
    if abs(mean_z) > abs(variance_z):
        return "biased low" if mean_z > 0 else "biased high"
    return "too narrow" if variance_z > 0 else "too wide"


# --------------------------------------------------------------------------------------------------------------------
# `calibrate`: simulation-based calibration of the posteriors of a method for a net and a prior.

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
    problem = create_problem(simulator.network, config, example, seed=seed, **options)  # raises for invalid options
    wrap = partial(restore_type, net)
    computed = Quantities(problem.objective, simulator.readouts, custom, wrap, seed)
    rows: list[dict[str, tuple[int, int]]] = []
    failures: dict[int, str] = {}
    done, is_interrupted, start = 0, False, time.perf_counter()
    bar = LoopConfig(progress=progress).progress_bar(SINGLE_PROCESS, replications, 0, "replication")
    with defer_interrupt() as interrupts, fork_torch_rng(simulator.network.device), bar:
        while done < replications and not is_interrupted:
            seed_rngs(derive_seed(seed, "truth", done), simulator.network.device)
            learned = problem.objective.learned.names
            draws = {name: get_prior(problem.objective, name).sample() for name in learned}
            truth = to_parameters(simulator.network, draws)
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
            present, observed = batch.get_present(spec), None
            if present is not None and not bool(present.all()):
                observed = present[:, *[None] * len(group.plates)].expand(value.shape[: 2 + len(group.plates)])
            evidence[group.name] = Evidence(value, observed)
        return replace(batch, evidence=evidence)


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

"""`Laplace`: a Normal distribution around the mode of the posterior density, in coordinates with a fixed gauge.

`find_mode` is also the start of the Gaussian guides of `svi` and of the chains of `nuts`. All computations are in
float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_int, check_options
from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer._core.files import derive_seed
from bnet_transformer._core.stats import MAX_KHAT, effective_sample_size, estimate_log_mean, resample, smooth_weights
from bnet_transformer.data import Batch
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.factors import LOG_ZERO
from bnet_transformer.learning.fit.coordinates import Coordinates
from bnet_transformer.learning.fit.diagnostics import (
    DRAWS_PER_NUMBER,
    MIN_VARIANCE_DRAWS,
    Uninformed,
    count_uninformed,
    describe_parameters,
    describe_uninformed,
    describe_weighted,
    find_coincident_heads,
    find_dead_heads,
    find_learned_invariants,
)
from bnet_transformer.learning.fit.em import EM, MAP, describe_restarts, fit_point
from bnet_transformer.learning.fit.heads import (
    align_heads,
    find_invariant_parameters,
    find_selectors,
    head_dims,
    invariants,
    log_likelihoods,
    permute_heads,
)
from bnet_transformer.learning.fit.objective import FitObjective, FitProblem, Method, to_float64
from bnet_transformer.learning.fit.restarts import build_fit, init_restarts, replace_learned, to_network_devices
from bnet_transformer.learning.fit.result import Fit
from bnet_transformer.learning.loop import Checkpoint
from bnet_transformer.tpm import Codebook


@dataclass(frozen=True, kw_only=True)
class Laplace(Method):
    """Posterior samples by the Laplace approximation: a Normal distribution at the mode of the posterior density.

    The mode is found by point fits from several starts and Newton steps with the exact Hessian, in coordinates without
    the gauge of attention: `W_q` and `W_k` enter by the triangular factor of `W_q` and by `W_k` in its basis. The prior
    must be proper: `fit` requires `spread=`. Entries of `W_q` and `W_k` that are Normal with standard deviation s give
    entries of `A = W_q^T W_k` with mean 0 and standard deviation `s^2 sqrt(key_dim)`, which are uncorrelated but not
    independent and not Normal: their tails are heavier, and the rank of `A` is at most `key_dim`.

    Args:
        draws: The number of draws, which are the posterior samples.
        reweight: True (default) draws from a Student t distribution and reweights the draws by the exact density with
            Pareto-smoothed importance weights, if their diagnostic k-hat is below 0.7. Otherwise the draws are Normal.
        restarts: The number of starts of the point fit.

    Raises:
        BNetError: If an option is out of range.

    >>> import bnet_transformer as bt
    >>> bt.Laplace(draws=500).restarts
    4
    """

    name: ClassVar[str] = "laplace"
    full_batch: ClassVar[tuple[str, str] | None] = "Laplace", "method='svi'"

    draws: int = 1000
    reweight: bool = True
    restarts: int = 4

    def __post_init__(self) -> None:
        check_options(self, check_int, "draws", "restarts")
        check_choice("reweight", self.reweight, (True, False))


# --------------------------------------------------------------------------------------------------------------------
# The Normal distribution at a mode.
#
# `choose_approximation` chooses the coordinates in which the distribution is Normal, and weights draws from a Student t
# distribution with the same center and covariance by the exact density.


PROPOSAL_FREEDOM = 5.0  # degrees of freedom of the Student t proposal
MIN_PROPOSALS = 2000
BOUND_DRAWS = 1000  # maximum number of draws of the Normal distribution that compare two of them
OUTER_SHARE = 0.05  # share of these draws, those of the least density, that the comparison omits


@dataclass(frozen=True)
class Mode:
    """A mode of the posterior density of the coordinates, and the Normal distribution there.

    Attributes:
        z: The coordinates, `[coordinate]`.
        log_density: The log joint density of coordinates and observations.
        decrement: The Newton decrement `sqrt(g' H^-1 g)`: the distance to the exact mode in standard deviations.
        root: A matrix `L` with covariance `L L'`, `[coordinate, coordinate]`; None if there are too many coordinates.
        log_det: The log determinant of the covariance.
        singular: Descriptions of directions in which the density is not concave, or nearly flat.
        is_finished: False if Ctrl-C ended the search.
        search_notes: What the user must know of the search, such as restarts that disagree.
    """

    z: Tensor
    log_density: float
    decrement: float
    root: Tensor | None
    log_det: float
    singular: tuple[str, ...] = field(default=())
    is_finished: bool = True
    search_notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Approximation:
    """A Normal distribution around a mode.

    Attributes:
        coordinates: The coordinates of the mode.
        center: The mean, `[coordinate]`.
        root: A matrix `L` with covariance `L L'`, `[coordinate, coordinate]`.
        log_det: The log determinant of the root.
        is_straight: Whether it is Normal in the straightened coordinates, `Coordinates.straighten`.
    """

    coordinates: Coordinates
    center: Tensor
    root: Tensor
    log_det: float
    is_straight: bool

    def to_coordinates(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Map steps in standard deviations to coordinates, `[..., coordinate]`.

        Returns:
            The coordinates, and the log determinant of the derivative by the steps, without that of the root, `[...]`.
        """
        points = self.center + steps @ self.root.mT
        if not self.is_straight:
            return points, points.new_zeros(points.shape[:-1])
        z, log_det = torch.vmap(self.coordinates.bend)(points) if points.dim() > 1 else self.coordinates.bend(points)
        return z, log_det

    def to(self, coordinates: Coordinates) -> Approximation:
        """Return the same distribution in the precision of other coordinates."""
        center, root = (value.to(coordinates.dtype) for value in (self.center, self.root))
        return replace(self, coordinates=coordinates, center=center, root=root)

    def to_steps(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Invert `to_coordinates`, `[draw, coordinate]`; the log determinant is that of `to_coordinates`, `[draw]`."""
        points, log_det = z, z.new_zeros(len(z))
        if self.is_straight:
            points = torch.vmap(self.coordinates.straighten)(z)
            log_det = torch.vmap(self.coordinates.bend)(points)[1]
        return torch.linalg.solve(self.root, (points - self.center).mT).mT, log_det

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw coordinates, `[draw, coordinate]`."""
        steps = torch.randn(count, len(self.center), generator=generator, dtype=torch.float64)
        return self.to_coordinates(steps.to(self.center.device))[0]


@dataclass(frozen=True)
class Proposals:
    """Draws from a Student t distribution around a mode, with their importance weights.

    Attributes:
        approximation: The Normal distribution with the same center and covariance.
        draws: The draws, `[draw, coordinate]`.
        log_weights: The log joint density minus the log density of the proposal, `[draw]`.
        weights: The smoothed and normalised weights, `[draw]`.
        khat: The k-hat of the weights.
    """

    approximation: Approximation
    draws: Tensor
    log_weights: Tensor
    weights: Tensor
    khat: float


def approximate(coordinates: Coordinates, mode: Mode) -> list[Approximation]:
    """Return the Normal distributions at a mode: in the coordinates, and in straightened ones if these are finite."""
    assert mode.root is not None
    result = [Approximation(coordinates, mode.z, mode.root, mode.log_det / 2, False)]
    if coordinates.blocks:
        center = coordinates.straighten(mode.z)
        root = torch.autograd.functional.jacobian(coordinates.straighten, mode.z) @ mode.root
        if bool(center.isfinite().all() and root.isfinite().all()):
            log_det = mode.log_det / 2 - float(coordinates.bend(center)[1])
            result.append(Approximation(coordinates, center, root, log_det, True))
    return result


def evaluate_draws(coordinates: Coordinates, corpus: Batch, draws: Tensor) -> Tensor:
    """Compute the log joint density of draws `[draw, coordinate]`, `[draw]`, in chunks; -inf if it is not finite."""
    with torch.no_grad():
        priors = torch.vmap(coordinates.log_prior)(draws)
        sets = torch.vmap(coordinates.decode)(draws)
        total = priors + log_likelihoods(coordinates.objective, corpus, sets).sum(1)
    return total.where(total.isfinite() & (total > LOG_ZERO / 2), -torch.inf)


def compute_log_student(steps: Tensor) -> Tensor:
    """Compute the log density of steps under the Student t distribution of the proposal, `[draw, step]` to `[draw]`."""
    size, freedom = steps.shape[-1], PROPOSAL_FREEDOM
    constant = math.lgamma((freedom + size) / 2) - math.lgamma(freedom / 2) - size / 2 * math.log(freedom * math.pi)
    return constant - (freedom + size) / 2 * torch.log1p(steps.square().sum(-1) / freedom)


def choose_approximation(
    coordinates: Coordinates,
    corpus: Batch,
    mode: Mode,
    generator: torch.Generator,
    count: int = MIN_PROPOSALS,
    margin: float | None = None,
) -> Proposals:
    """Choose between the Normal distributions in the coordinates and in the straightened ones.

    The choice is the smaller k-hat if one is below 0.7. Otherwise the weights are not used, and the choice is the
    larger lower bound on the log evidence of the Normal distribution, without the 5% of its draws of least density.

    Args:
        coordinates: The coordinates.
        corpus: The sentences.
        mode: The mode.
        generator: The generator of the proposals.
        count: The number of proposals.
        margin: If not None, the straightened coordinates are chosen only if their k-hat is smaller by this margin.

    Returns:
        The proposals of the chosen distribution.
    """
    # The proposal is a Student t distribution with the Hessian's covariance, whose tails are heavier than those of the
    # Normal distribution, so the weights are bounded more often (Geweke 1989).
    size, freedom = coordinates.size, PROPOSAL_FREEDOM
    normal = torch.randn(count, size, generator=generator, dtype=torch.float64)
    gamma = torch._standard_gamma(torch.full((count, 1), freedom / 2, dtype=torch.float64), generator=generator)
    steps = (normal / (2 * gamma / freedom).sqrt()).to(mode.z.device)
    results = []
    for approximation in approximate(coordinates, mode):
        draws, log_joint = _evaluate_steps(approximation, corpus, steps)
        log_weights = log_joint - compute_log_student(steps)
        results.append(Proposals(approximation, draws, log_weights, *smooth_weights(log_weights)))
    if len(results) == 1:
        return results[0]
    if margin is not None or any(result.khat < MAX_KHAT for result in results):
        return min(results, key=lambda result: result.khat + (margin or 0.0) * result.approximation.is_straight)
    # k-hat describes the tails of the proposals. Above 0.7 it is mostly noise, and the draws are those of the Normal
    # distribution, whose fit is the lower bound E_q[log p(y, z) - log q(z)] on the log evidence. Both have the same
    # steps, so log q(steps) cancels. In straightened coordinates the mean has no limit: one draw in a thousand is near
    # a singular A, with a log density of -10^4, and no interval depends on it. So the mean omits the worst draws.
    steps = normal[:BOUND_DRAWS].to(mode.z.device)
    omitted = int(OUTER_SHARE * len(steps))

    def compute_bound(result: Proposals) -> float:
        return float(_evaluate_steps(result.approximation, corpus, steps)[1].sort().values[omitted:].mean())

    return max(results, key=compute_bound)


def _evaluate_steps(approximation: Approximation, corpus: Batch, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Map steps to coordinates, and compute the log joint density of the steps, `[draw]`; -inf if it is not finite."""
    draws, log_det = approximation.to_coordinates(steps)
    log_joint = evaluate_draws(approximation.coordinates, corpus, draws) + log_det + approximation.log_det
    return draws, log_joint.where(log_joint.isfinite(), -torch.inf)


# --------------------------------------------------------------------------------------------------------------------
# The symmetries of a posterior density: exchanges of two exchangeable heads, and changes of a free sign.
#
# A mode of the density has an image of equal density under each of them. The log marginal likelihood counts these
# images, so they must be separate, and a draw must not be counted for two of them.


@dataclass(frozen=True)
class Symmetry:
    """A map of coordinates that changes no density, and is its own inverse.

    Attributes:
        apply: The map, `[draw, coordinate]` to `[draw, coordinate]`.
        distance: The distance of the mode from its image, in standard deviations of the Normal distribution there.
    """

    apply: Callable[[Tensor], Tensor]
    distance: float


def find_sign_symmetries(coordinates: Coordinates, mode: Mode) -> list[Symmetry]:
    """Find the changes of one free sign: that of the last rows of the two factors of `W_q^T W_k`."""
    return [_create_symmetry(mode, partial(torch.mul, signs)) for signs in coordinates.mirrors(torch.ones_like(mode.z))]


def find_head_symmetries(coordinates: Coordinates, mode: Mode, selectors: Sequence[str]) -> list[Symmetry]:
    """Find the exchanges of two heads of selectors with exchangeable heads."""
    network, result = coordinates.objective.network, []
    for name in selectors:
        selector = network.get_spec(name)
        dims = {key: axes for key in coordinates.learned.names if (axes := head_dims(network, selector, key))}
        for pair in itertools.combinations(range(selector.tpm.states or 1), 2):
            result.append(_create_symmetry(mode, partial(_exchange_heads, coordinates, mode, dims, pair)))
    return result


def _create_symmetry(mode: Mode, apply: Callable[[Tensor], Tensor]) -> Symmetry:
    """Create a symmetry of this map."""
    (distance,) = measure_distance(mode, apply(mode.z[None])).tolist()
    return Symmetry(apply, distance)


def measure_distance(mode: Mode, z: Tensor) -> Tensor:
    """Compute the distance of coordinates from the mode, in standard deviations, `[draw, coordinate]` to `[draw]`."""
    assert mode.root is not None
    distance: Tensor = torch.linalg.solve(mode.root, (z - mode.z).mT).norm(dim=0)
    return distance


def _exchange_heads(
    coordinates: Coordinates, mode: Mode, dims: dict[str, tuple[int, ...]], pair: tuple[int, int], z: Tensor
) -> Tensor:
    """Exchange two heads in draws, with the free signs that are nearest to the mode."""
    first, second = pair

    def exchange(draw: Tensor) -> Tensor:
        values = coordinates.decode(draw)
        for name, axes in dims.items():
            order = list(range(values[name].shape[axes[0]]))
            order[first], order[second] = second, first
            values[name] = permute_heads(values[name], axes, torch.tensor(order))
        return coordinates.encode(values)

    image = torch.vmap(exchange)(z)
    for signs in coordinates.mirrors(torch.ones_like(mode.z)):  # the factors 1 and -1 of the coordinates
        is_nearer = measure_distance(mode, signs * image) < measure_distance(mode, image)
        image = torch.where(is_nearer[:, None], signs * image, image)
    return image


def share_weights(proposals: Proposals, symmetries: Sequence[Symmetry]) -> Tensor:
    """Return the log weights for which the integral of the density is their mean times the number of images, `[draw]`.

    The proposal has full support, so its draws also reach the images of the mode, and the mean of the usual weights is
    the integral over all of them, or a part of it by chance.
    """

    # The density p is invariant under the group G, so its integral is the mean of p(z) / mean_g q(g z), where the
    # denominator is the density of a draw from the proposal q that a random element of G is applied to. This is |G|
    # times the mean of p(z) / sum_g q(g z). The sum is over the identity and the given elements. The others, products
    # of these, have images that are farther away.
    def log_proposal(z: Tensor) -> Tensor:
        steps, log_det = proposals.approximation.to_steps(z)
        return (compute_log_student(steps) - log_det).nan_to_num(nan=-torch.inf)

    first = log_proposal(proposals.draws)
    total = torch.stack([first, *(log_proposal(symmetry.apply(proposals.draws)) for symmetry in symmetries)])
    shared = proposals.log_weights + first - total.logsumexp(0)
    return shared.where(shared.isfinite(), -torch.inf)


# --------------------------------------------------------------------------------------------------------------------
# The search of the mode, and the fit.


MAX_NEWTON_STEPS = 200
MAX_COORDINATES = 2000  # the Hessian is a dense matrix of this many rows
HESSIAN_ROWS = 64  # rows of the Hessian that one backward pass computes
STATIONARY = 1e-5  # the Newton decrement sqrt(g' H^-1 g), in standard deviations, at which the polish ends
POINT_TOLERANCE = 1.0  # the same for the notes of a point fit, whose parameters are near the mode of the coordinates
MAX_DECREMENT = 1e-3  # a mode with a larger decrement has not converged
MIN_CURVATURE = 1e-3  # of the prior's precision; a direction with less curvature is singular
POINT_PROPOSALS = 100
MAX_POINT_NUMBERS = 128  # learned numbers of a point fit whose directions are tested
SAME_MODE, SEPARATE_MODE = 0.1, 4.0  # distances in standard deviations of a mode from its mirror image
MAX_EVIDENCE_ERROR = 0.2  # standard error of a log marginal likelihood, in nats; with a larger one it is not given
MAX_LAPLACE_GAP = 1.0  # difference of Laplace's method from the log marginal likelihood, in nats, that a note reports
NO_EVIDENCE = "the log marginal likelihood is not available"
INTERRUPTED_NOTE = "interrupted in the search for the mode: there may be a better one"
APPROXIMATE_NOTE = "a Normal distribution at one mode; other modes are not represented"
REWEIGHTED_NOTE = "importance-weighted draws from a Student t distribution at one mode; other modes are not represented"


def to_double(problem: FitProblem) -> FitProblem:
    """Return the problem in float64, for one process that uses all sentences.

    Under torchrun each process has its own checkpoints, because each computes the same result.
    """
    loop, rank = problem.loop, problem.ranks.rank
    if rank:
        loop = loop.in_subfolder(f"rank-{rank}")
    ranks = DistributedContext(0, 1, problem.ranks.device)
    return replace(to_float64(problem), held_out=None, loop=loop, ranks=ranks)


def find_start(problem: FitProblem, restarts: int, seed: int) -> Fit[Network]:
    """Fit a point in float64 from several starts."""
    objective = problem.objective
    kind = EM if objective.learned.tables else MAP
    try:
        with problem.loop.lock(problem.ranks.is_main_process):
            return fit_point(replace(problem, seed=seed), kind(restarts=restarts))
    except BNetError:
        objective.check_possible(problem.corpus)
        raise


def randomize(objective: FitObjective, seed: int) -> FitObjective:
    """Return the objective with random learned parameters."""
    network, learned = objective.network, objective.learned
    values = init_restarts(network, learned.names, 2, seed, objective.device).get(1)
    return FitObjective(replace_learned(network, values), learned, objective.budget).to(objective.device)


def find_mode(problem: FitProblem, coordinates: Coordinates, restarts: int, seed: int) -> Mode:
    """Find a mode: a point fit from several starts, then Newton steps with the exact Hessian.

    The checkpoint in the subfolder `mode` contains the result of the point fit, or the last Newton step. The point fit
    has its own checkpoint, in `mode/search`.

    Args:
        problem: The problem of `to_double`, whose loop has the folder of the checkpoints.
        coordinates: Its coordinates.
        restarts: The number of starts of the point fit.
        seed: The seed of the starts.

    Returns:
        The mode.
    """
    network, device, loop = problem.objective.network, problem.objective.device, problem.loop.in_subfolder("mode")
    with loop.lock(problem.ranks.is_main_process):
        first, is_finished, state = 0, True, dict[str, Any]()

        def restore(saved: Checkpoint) -> None:
            state.update(first=saved.step, ends=saved.tensors["mode/ends"], z=saved.tensors["mode/z"].to(device))

        if loop.resume(network, problem.settings, restore):
            first, ends, z = state["first"], state["ends"], state["z"]
        else:
            start = find_start(replace(problem, loop=loop.in_subfolder("search")), restarts, seed)
            is_finished, density = start.finished, start.bounds[-1] * start.sentences
            ends = torch.tensor([density, *start.restart_densities], dtype=torch.float64)
            z = coordinates.encode({k: start.network.parameters[k].detach().to(device) for k in start.learned})

        def save(step: int, z: Tensor) -> None:
            if is_finished:  # an interrupted search resumes from its own checkpoint
                loop.save(network, Checkpoint(step, {"mode/z": z, "mode/ends": ends}, (), (), problem.settings))

        if not state:
            save(0, z)
        density, *densities = ends.tolist()
        notes = describe_restarts(densities, density) if is_finished else [INTERRUPTED_NOTE]
        fields: dict[str, Any] = {"is_finished": is_finished, "search_notes": tuple(notes)}
        parts = problem.objective.split(problem.corpus)
        for part in parts:
            problem.objective.cache_factors(part)
        if coordinates.size > MAX_COORDINATES:
            value = float(_evaluate(coordinates, parts, z))
            return Mode(z, value, math.inf, None, math.nan, **fields)
        return replace(polish(coordinates, parts, z, first=first, save=save), **fields)


def polish(
    coordinates: Coordinates,
    parts: list[Batch],
    z: Tensor,
    tolerance: float = STATIONARY,
    first: int = 0,
    save: Callable[[int, Tensor], None] | None = None,
) -> Mode:
    """Maximise the log density from a start by Newton steps, and compute the Normal distribution at the mode.

    Args:
        coordinates: The coordinates.
        parts: The sentences.
        z: The start, `[coordinate]`.
        tolerance: The Newton decrement at which the steps end.
        first: The number of steps that were taken before, by an interrupted run.
        save: A function of the number of steps and the point, called after each step; None for none.
    """
    # Newton's method with |eigenvalues| of the exact Hessian: an ascent direction also where the density is not
    # concave (Nocedal and Wright 2006, section 3.4). Backtracking makes the density increase in every step. At a saddle
    # the gradient is 0, so the step follows the direction of the largest positive curvature.
    value, gradient, hessian = evaluate_hessian(coordinates, parts, z)
    decrement = math.inf
    for step in range(first, MAX_NEWTON_STEPS):
        if not value.isfinite() or not hessian.isfinite().all():
            break
        curvature, axes = torch.linalg.eigh(-hessian)
        direction = axes @ ((axes.mT @ gradient) / curvature.abs().clamp(min=MIN_CURVATURE))
        slope = float(gradient @ direction)
        decrement = math.sqrt(max(slope, 0.0))
        is_saddle = decrement < STATIONARY and float(curvature[0]) <= -MIN_CURVATURE
        if decrement < tolerance and not is_saddle:
            break
        if is_saddle:
            direction, slope = axes[:, 0] / math.sqrt(-float(curvature[0])), 0.0
        moved = _search(coordinates, parts, z, float(value), direction, slope)
        if moved is None:
            break
        z = moved
        if save is not None:
            save(step + 1, z)
        value, gradient, hessian = evaluate_hessian(coordinates, parts, z)
    if not value.isfinite() or not hessian.isfinite().all():
        expected = "a mode with a finite density and finite second derivatives"
        raise BNetError("the posterior density", expected=expected, hint="Use a smaller spread=, or rescale the data")
    curvature, axes = torch.linalg.eigh(-hessian)
    is_singular = curvature < MIN_CURVATURE
    # The prior of a coordinate has about unit precision, so a direction without curvature gets the prior's width.
    singular = tuple(dict.fromkeys(coordinates.describe(axes[:, k]) for k in is_singular.nonzero()[:, 0].tolist()))
    curvature = curvature.where(~is_singular, 1.0)
    return Mode(z, float(value), decrement, axes / curvature.sqrt(), -float(curvature.log().sum()), singular)


def _search(
    coordinates: Coordinates, parts: list[Batch], z: Tensor, value: float, direction: Tensor, slope: float
) -> Tensor | None:
    """Return the first point of a backtracking line search with a sufficient increase; None if there is none."""
    signs = (1.0,) if slope else (1.0, -1.0)
    size = 1.0
    while size > 1e-10:
        for sign in signs:
            point = z + sign * size * direction
            gain = float(_evaluate(coordinates, parts, point)) - value
            if gain > 1e-4 * size * slope and gain > 0:
                return point
        size /= 2
    return None


def _evaluate(coordinates: Coordinates, parts: list[Batch], z: Tensor) -> Tensor:
    """Compute the log joint density of all sentences, `[]`."""
    with torch.no_grad():
        values, total = coordinates.decode(z), coordinates.log_prior(z)
        for part in parts:
            total = total + coordinates.objective.log_evidence(values, part).sum()
    return total


def evaluate_hessian(coordinates: Coordinates, parts: list[Batch], z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the log joint density, its gradient `[coordinate]` and Hessian `[coordinate, coordinate]`."""
    total, gradient = z.new_zeros(()), torch.zeros_like(z)
    hessian = z.new_zeros(len(z), len(z))
    rows = torch.eye(len(z), dtype=z.dtype, device=z.device).split(HESSIAN_ROWS)
    for number, part in enumerate(parts):
        leaf = z.detach().requires_grad_()
        value = coordinates.objective.log_evidence(coordinates.decode(leaf), part).sum()
        if number == 0:
            value = value + coordinates.log_prior(leaf)
        (first,) = torch.autograd.grad(value, leaf, create_graph=True)
        options = {"retain_graph": True, "is_grads_batched": True}
        hessian += torch.cat([torch.autograd.grad(first, leaf, block, **options)[0] for block in rows])
        total, gradient = total + value.detach(), gradient + first.detach()
    return total, gradient, (hessian + hessian.mT) / 2


def fit_laplace(problem: FitProblem, method: Laplace) -> Fit[Network]:
    """Fit by the Laplace approximation.

    Args:
        problem: The fit problem. Under torchrun each process computes the same fit.
        method: The options.

    Returns:
        The fit, with draws as samples.

    Raises:
        BNetError: If there are too many parameters, or the density is not finite.
    """
    double = to_double(problem)
    coordinates, corpus = Coordinates(double.objective, double.corpus), double.corpus
    check_size(coordinates)
    mode = find_mode(double, coordinates, method.restarts, derive_seed(problem.seed, "mode"))
    generator = torch.Generator().manual_seed(derive_seed(problem.seed, "laplace"))
    count = max(MIN_PROPOSALS, 4 * method.draws)
    proposals = choose_approximation(coordinates, corpus, mode, generator, count)
    approximation, khat = proposals.approximation, proposals.khat
    is_reweighted = method.reweight and khat < MAX_KHAT
    draws = (
        proposals.draws[resample(proposals.weights, method.draws, generator)]
        if is_reweighted
        else approximation.draw(method.draws, generator)
    )
    samples = {name: value[None] for name, value in coordinates.to_samples(draws, generator).items()}
    log_density = evaluate_draws(coordinates, corpus, draws)[None]
    samples, matched = align_heads(double.objective, corpus, samples, log_density)
    uninformed = find_uninformed(approximation, mode)
    notes = describe_mode(approximation, corpus, mode, uninformed)
    if method.reweight and not is_reweighted:
        notes.append(
            f"the draws are not reweighted, because k-hat of the importance weights is {khat:.2f}, above {MAX_KHAT}: "
            "intervals are those of the Normal distribution at the mode; compare with method=bt.NUTS()"
        )
    size = effective_sample_size(proposals.weights) if is_reweighted else None
    if size is not None:
        notes += describe_weighted(size)
    evidence, error, evidence_notes = compute_evidence(proposals, mode, matched, uninformed)
    notes += evidence_notes
    return build_fit(
        problem,
        method,
        coordinates.decode(mode.z),
        finished=mode.is_finished,
        converged=mode.decrement <= MAX_DECREMENT and not mode.singular if mode.is_finished else None,
        approximate=REWEIGHTED_NOTE if is_reweighted else APPROXIMATE_NOTE,
        bounds=(mode.log_density / len(corpus),),
        samples=to_network_devices(problem.objective.network, samples),
        matched=matched,
        notes=tuple(notes),
        khat=khat,
        effective_sample_size=size,
        log_marginal_likelihood=evidence,
        log_marginal_likelihood_error=error,
        criterion="log joint density",
    )


def describe_point(problem: FitProblem, fitted: Fit[Network]) -> Fit[Network]:
    """Add a note to a converged fit by `map` or `em` with a prior: directions of heads that the data do not determine.

    They are those of the Laplace approximation, of at most 128 learned numbers.
    """
    objective = problem.objective
    size = sum(objective.network.parameters[name].numel() for name in objective.learned.names)
    if objective.learned.logits or size > MAX_POINT_NUMBERS:
        return fitted
    if not any(find_invariant_parameters(objective.network, s) for s in find_selectors(objective.network)):
        return fitted
    double = to_double(problem)
    coordinates, corpus = Coordinates(double.objective, double.corpus), double.corpus
    values = {name: fitted.network.parameters[name].detach().to(coordinates.device).double() for name in fitted.learned}
    parts = double.objective.split(corpus)
    mode = polish(coordinates, parts, coordinates.encode(values), POINT_TOLERANCE)
    generator = torch.Generator().manual_seed(derive_seed(problem.seed, "directions"))
    approximation = choose_approximation(coordinates, corpus, mode, generator, POINT_PROPOSALS).approximation
    if uninformed := find_uninformed(approximation, mode):
        fitted = replace(fitted, notes=(*fitted.notes, describe_uninformed(uninformed)))
    return fitted


def check_size(coordinates: Coordinates) -> None:
    """Raise an error if the dense Hessian would be too large."""
    if coordinates.size > MAX_COORDINATES:
        expected = f"at most {MAX_COORDINATES} learned numbers, because the Hessian is a dense matrix"
        hint = "Name fewer parameters in learn=, or use method=bt.SVI() (mean-field)"
        raise BNetError("learn", expected=expected, actual=coordinates.size, hint=hint)


def compute_evidence(
    proposals: Proposals, mode: Mode, matched: tuple[str, ...], uninformed: Uninformed
) -> tuple[float | None, float | None, list[str]]:
    """Estimate the log marginal likelihood by importance sampling.

    It counts the K! equal modes of a selector with K exchangeable heads, and the two of a free sign.

    Args:
        proposals: The weighted draws.
        mode: The mode.
        matched: The selectors with exchangeable heads.
        uninformed: The result of `find_uninformed`.

    Returns:
        The estimate and its standard error, or None if it is not trustworthy, and notes, such as the reason for None.
    """
    coordinates = proposals.approximation.coordinates
    network, learned = coordinates.objective.network, coordinates.learned
    values = _get_parameters(coordinates, mode)
    reasons = []
    if mode.decrement > MAX_DECREMENT:
        reasons.append("the mode has not converged")
    if mode.singular:
        reasons.append("the Hessian has singular directions")
    if not proposals.khat < MAX_KHAT:
        reasons.append(f"k-hat is {proposals.khat:.2f}, not below {MAX_KHAT}")
    if find_dead_heads(network, values):
        reasons.append("a head is dead")
    flat = {key for key, (count, total) in uninformed.items() if count == total}
    if any(_is_uninformed(network, selector, learned.names, flat) for selector in find_selectors(network)):
        reasons.append("no sentence informs a head")
    is_coincident = bool(find_coincident_heads(network, values))
    if is_coincident:
        reasons.append("heads coincide")
    atoms = [f"{spec.param_prefix}.atoms" for spec in network.specs if isinstance(spec.tpm, Codebook)]
    if {*atoms} & {*learned.weights}:
        reasons.append("the atoms of a codebook are exchangeable, and their equal modes are not counted")
    if coordinates.unfixed:
        reasons.append("the gauge of attention is not fixed")
    if coordinates.free_bases:
        reasons.append(f"the basis of {', '.join(basis.vectors for basis in coordinates.free_bases)} is free")
    signs, heads = find_sign_symmetries(coordinates, mode), find_head_symmetries(coordinates, mode, matched)
    if any(SAME_MODE < symmetry.distance < SEPARATE_MODE for symmetry in signs):
        reasons.append("the rank of W_q^T W_k of a head is uncertain, so two equal modes overlap")
    if not is_coincident and any(symmetry.distance < SEPARATE_MODE for symmetry in heads):
        reasons.append("two heads are not separate: modes that differ by their exchange overlap")
    if reasons:
        return None, None, [f"{NO_EVIDENCE}: {'; '.join(reasons)}"]
    signs = [symmetry for symmetry in signs if symmetry.distance >= SEPARATE_MODE]
    estimate, error, khat = estimate_log_mean(share_weights(proposals, [*signs, *heads]))
    if not khat < MAX_KHAT:
        return None, None, [f"{NO_EVIDENCE}: k-hat of one mode is {khat:.2f}, not below {MAX_KHAT}"]
    if error > MAX_EVIDENCE_ERROR:
        reason = f"its standard error is {error:.2f} nats, above {MAX_EVIDENCE_ERROR}; use more draws="
        return None, None, [f"{NO_EVIDENCE}: {reason}"]
    images = math.log(2) * len(signs)
    images += sum(math.lgamma(1 + (network.get_spec(name).tpm.states or 1)) for name in matched)
    gap = mode.log_density + coordinates.size * math.log(2 * math.pi) / 2 + mode.log_det / 2 - estimate
    notes = []
    if abs(gap) > MAX_LAPLACE_GAP:
        direction = "above" if gap > 0 else "below"
        text = f"the value of Laplace's method is {abs(gap):.1f} nats {direction} the log marginal likelihood"
        notes.append(f"{text} by importance sampling: the posterior is far from a Normal distribution")
    return estimate + images, error, notes


def _get_parameters(coordinates: Coordinates, mode: Mode) -> dict[str, Tensor]:
    """Return all parameters of the net at the mode, on the device of the coordinates."""
    fixed = {name: value.detach().to(mode.z.device) for name, value in coordinates.objective.network.parameters.items()}
    return {**fixed, **coordinates.decode(mode.z)}


def _is_uninformed(
    network: Network, selector: NodeSpec, learned: Collection[str], flat: Collection[tuple[str, int]]
) -> bool:
    """Return True if all learned invariants of some head of a selector have the width of their prior."""
    names = find_learned_invariants(network, selector, learned)
    return any(all((name, head) in flat for name in names) for head in range(selector.tpm.states or 0) if names)


def describe_mode(approximation: Approximation, corpus: Batch, mode: Mode, uninformed: Uninformed) -> list[str]:
    """Describe what limits the approximation: the restarts, too few data, singular directions, the heads, the scale."""
    coordinates, notes = approximation.coordinates, list(mode.search_notes)
    values = _get_parameters(coordinates, mode)
    if mode.decrement > MAX_DECREMENT:
        notes.append(
            f"the mode has not converged: its distance is {mode.decrement:.2g} standard deviations; use more restarts="
        )
    if mode.singular:
        names = ", ".join(mode.singular[:4])
        notes.append(f"the density has no curvature in directions of {names}; they have the width of the prior")
    if coordinates.unfixed:
        reason = "because its queries and keys are not one pair of matrices, or only some of their features are rotated"
        notes.append(f"the gauge of {', '.join(coordinates.unfixed)} is not fixed, {reason}")
    for basis in coordinates.free_bases:
        problem = f"draws do not follow the ring of equal densities that the free basis of {basis.vectors} makes"
        notes.append(f"{problem}: their predictions are too wide; use method=bt.NUTS(), or fix a matrix by learn=")
    notes += describe_parameters(coordinates.objective, len(corpus), values)
    if uninformed:
        notes.append(describe_uninformed(uninformed))
    return notes


def find_uninformed(approximation: Approximation, mode: Mode) -> Uninformed:
    """Find the invariants of heads with directions in which the posterior is about as wide as the prior.

    The result is the number of these directions and of all, by invariant and head.
    """
    coordinates, generator = approximation.coordinates, torch.Generator().manual_seed(0)
    network, values = coordinates.objective.network, _get_parameters(coordinates, mode)
    learned = coordinates.learned.names
    pairs = [(selector, find_learned_invariants(network, selector, learned)) for selector in find_selectors(network)]
    sizes = [invariants(network, selector, values)[name][0].numel() for selector, names in pairs for name in names]
    if not sizes:
        return {}
    count, result = max(MIN_VARIANCE_DRAWS, DRAWS_PER_NUMBER * max(sizes)), Uninformed()
    prior_draws = torch.stack([coordinates.sample_prior(generator) for _ in range(count)])
    posterior, prior = (torch.vmap(coordinates.decode)(z) for z in (approximation.draw(count, generator), prior_draws))
    fixed = {name: value.expand(count, *value.shape) for name, value in values.items() if name not in posterior}
    for selector, names in pairs:
        after, before = (invariants(network, selector, {**fixed, **draws}) for draws in (posterior, prior))
        for name in names:
            result |= count_uninformed(name, after[name], before[name])
    return result

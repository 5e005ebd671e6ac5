"""The Normal distribution at a mode of the posterior density, and the modes that symmetries give.

`choose_approximation` chooses the coordinates in which the distribution is Normal, and weights draws from a Student t
distribution with the same center and covariance by the exact density.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from bnet_transformer._core.stats import MAX_KHAT, smooth_weights
from bnet_transformer.data import Batch
from bnet_transformer.inference.factors import LOG_ZERO
from bnet_transformer.learning.fit.comparison import permute_heads
from bnet_transformer.learning.fit.coordinates import Coordinates
from bnet_transformer.learning.fit.heads import head_dims, log_likelihoods

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

"""The symmetries of a posterior density: exchanges of two exchangeable heads, and changes of a free sign.

A mode of the density has an image of equal density under each of them. The log marginal likelihood counts these images,
so they must be separate, and a draw must not be counted for two of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bnet_transformer.learning.fit.approximation import Mode, Proposals, compute_log_student
from bnet_transformer.learning.fit.comparison import permute_heads
from bnet_transformer.learning.fit.coordinates import Coordinates
from bnet_transformer.learning.fit.head_summary import head_dims


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
    return [_create_symmetry(mode, partial(torch.mul, signs)) for signs in _find_signs(coordinates, mode)]


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


def _find_signs(coordinates: Coordinates, mode: Mode) -> list[Tensor]:
    """Return the factors 1 and -1 of the coordinates by which each free sign changes, each `[coordinate]`."""
    return coordinates.mirrors(torch.ones_like(mode.z))


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
    for signs in _find_signs(coordinates, mode):
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

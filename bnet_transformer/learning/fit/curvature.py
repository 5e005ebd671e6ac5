"""Second-order information on several sets of parameters at once: quadratic models, conjugate gradients, convergence.

A quadratic model of the log posterior density `f` at the parameters `w` of a set is `f(w + d) = f + g d - d^T H d / 2`.
The matrix `H` is never formed: a model multiplies it with vectors. Two models are used: of the expected complete-data
density (with the Gauss-Newton matrix, `gauss_newton.py`), and of `f` (with its exact Hessian).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DECREMENT = 1e-3  # a point is stationary if its Newton decrement sqrt(g^T H^-1 g) is at most this
LANCZOS_ITERATIONS = 20
NEGATIVE_CURVATURE = 1e-8  # relative to the scale of H: rounding errors of a product are smaller


@dataclass(frozen=True)
class FlatLayout:
    """The order of several parameters in one flat vector for each set."""

    shapes: Mapping[str, torch.Size]

    @classmethod
    def create(cls, values: Mapping[str, Tensor], names: Sequence[str]) -> FlatLayout:
        """Return the layout of these parameters, which are `[set, *shape]`."""
        return cls({name: values[name].shape[1:] for name in names})

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """Concatenate the parameters, `[set, entry]`."""
        first = next(iter(values.values()))
        parts = [values[name].reshape(len(first), -1) for name in self.shapes]
        return torch.cat([first.new_zeros(len(first), 0), *parts], 1)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Split a flat vector, `[set, entry]`, into parameters, `[set, *shape]`."""
        parts = flat.split([shape.numel() for shape in self.shapes.values()], 1)
        pairs = zip(self.shapes.items(), parts, strict=True)
        return {name: part.reshape(-1, *shape) for (name, shape), part in pairs}

    def locate(self, names: Sequence[str]) -> Tensor:
        """Return the positions of the entries of some parameters in the flat vector, `[entry]`."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        positions = dict(zip(self.shapes, torch.arange(sum(sizes)).split(sizes), strict=True))
        return torch.cat([positions[name] for name in names])

    def block_means(self, flat: Tensor) -> Tensor:
        """Replace each entry by the mean over the entries of its parameter, `[set, entry]`."""
        parts = flat.split([shape.numel() for shape in self.shapes.values()], 1)
        return torch.cat([part.mean(1, keepdim=True).expand_as(part) for part in parts], 1)


@dataclass(frozen=True)
class QuadraticModel:
    """A quadratic model of the log posterior density of each set.

    Attributes:
        layout: The order of the entries.
        gradient: The gradient `g`, `[set, entry]`.
        product: The function from vectors `v`, `[set, entry]`, to `H v`.
    """

    layout: FlatLayout
    gradient: Tensor
    product: Callable[[Tensor], Tensor]

    def estimate_scale(self) -> Tensor:
        """Estimate the mean of the diagonal of `H` over the entries of each parameter, `[set, entry]`; positive."""
        # Hutchinson's estimator with one vector of random signs: E[v_i (H v)_i] = H_ii (Bekas et al. 2007).
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, self.gradient.shape[1:], generator=generator) * 2.0 - 1
        v = signs.to(self.gradient).expand_as(self.gradient)
        scale = self.layout.block_means(v * self.product(v))
        floor = scale.abs().amax(1, keepdim=True) * 1e-6 + torch.finfo(scale.dtype).tiny ** 0.5
        return torch.maximum(scale, floor)


@dataclass(frozen=True)
class ModelStep:
    """The step that conjugate gradients found for each set.

    Attributes:
        step: The step `d`, `[set, entry]`.
        gain: The predicted gain `g d - d^T H d / 2`, `[set]`, without the damping.
        has_ascent: Whether a direction of negative curvature of `H` (plus damping) was met, `[set]`.
        residual: The norm of `g - (H + damping) d` over that of `g`, in the norm of the preconditioner, `[set]`.
        iterations: The number of products.
    """

    step: Tensor
    gain: Tensor
    has_ascent: Tensor
    residual: Tensor
    iterations: int


def solve_model(
    model: QuadraticModel,
    scale: Tensor,
    damping: Tensor,
    iterations: int,
    tolerance: float,
    floor: Tensor | float = 0.0,
    precondition: Callable[[Tensor], Tensor] | None = None,
) -> ModelStep:
    """Maximise the damped models of all sets by conjugate gradients.

    Args:
        model: The models.
        scale: The positive diagonal of the damping, `[set, entry]`.
        damping: The factor of `scale` that is added to `H`, `[set]`.
        iterations: The maximum number of products.
        tolerance: The relative residual at which a set stops.
        floor: The square of the scaled norm of a gradient, `[set]`, that may be a rounding error: such a set gets the
            step 0.
        precondition: The function from vectors, `[set, entry]`, to their products with the inverse of a matrix that
            is similar to the damped `H`; None for the inverse of `scale`.

    Returns:
        The steps.
    """
    # Preconditioned conjugate gradients (Nocedal and Wright 2006, algorithm 5.3) with Steihaug's rule (their algorithm
    # 7.2): at a direction p of negative curvature the iteration ends, with a further step along p, as long as the step
    # before it; at the first iteration p is the scaled gradient. Sets are independent: each has its own step lengths,
    # and a set that has stopped gets steps of length 0.
    precondition = precondition or (lambda r: r / scale)
    g, added = model.gradient, damping[:, None] * scale
    d, r = torch.zeros_like(g), g.clone()
    z = precondition(r)
    p, rz = z.clone(), (r * z).sum(1)
    start, active = rz.clone(), rz > floor
    has_ascent, product = torch.zeros_like(active), torch.zeros_like(g)  # H d
    count = 0
    while count < iterations and bool(active.any()):
        count += 1
        Hp = model.product(p)
        curvature, norm = (p * (Hp + added * p)).sum(1), (scale * p * p).sum(1)
        is_negative = active & ~(curvature > NEGATIVE_CURVATURE * norm)
        has_ascent |= is_negative
        active = active & ~is_negative
        length = torch.where(active, rz / torch.where(active, curvature, 1.0), 0.0)
        before = (scale * d * d).sum(1)
        along = torch.where(before > 0, (before / norm.clamp(min=1e-300)).sqrt(), 1.0)
        length = torch.where(is_negative & curvature.isfinite(), along, length)
        d, product = d + length[:, None] * p, product + length[:, None] * Hp
        r = r - length[:, None] * (Hp + added * p)
        z = precondition(r)
        new = torch.where(active, (r * z).sum(1), rz)
        p = z + (new / torch.where(rz > 0, rz, 1.0))[:, None] * p
        rz, active = new, active & (new > tolerance**2 * start)
    gain = (g * d).sum(1) - 0.5 * (d * product).sum(1)
    residual = (rz / start.clamp(min=torch.finfo(rz.dtype).tiny)).sqrt()
    return ModelStep(d, gain, has_ascent, torch.where(start > floor, residual, 0.0), count)


def find_lowest_curvature(model: QuadraticModel, scale: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Find the direction of the lowest curvature of each set by Lanczos iterations from a random vector.

    Args:
        model: The models.
        scale: The positive diagonal in whose units curvatures and lengths are measured, `[set, entry]`.
        seed: The seed of the random vector.

    Returns:
        The curvature, `[set]`, an upper bound of the lowest one; and the direction, of length 1, `[set, entry]`.
    """
    # The lowest eigenvalue of a few Lanczos iterations (Golub and Van Loan 2013, section 10.1), with all vectors
    # orthogonalised twice. A large negative curvature appears after a few iterations.
    root, count = scale.rsqrt(), min(LANCZOS_ITERATIONS, scale.shape[1])
    random = torch.randn(scale.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(scale)
    basis, products = [random / random.norm(dim=1, keepdim=True)], []
    for _ in range(count):
        products.append(root * model.product(root * basis[-1]))
        residual, known = products[-1], torch.stack(basis, 1)
        for _ in range(2):
            residual = residual - torch.einsum("ski,sk->si", known, torch.einsum("ski,si->sk", known, residual))
        length = residual.norm(dim=1, keepdim=True)
        if len(basis) == count or bool((length < NEGATIVE_CURVATURE).any()):
            break
        basis.append(residual / length)
    known = torch.stack(basis, 1)
    small = torch.einsum("ski,sli->skl", known, torch.stack(products, 1))
    curvature, vectors = torch.linalg.eigh((small + small.mT) / 2)
    return curvature[:, 0], root * torch.einsum("ski,sk->si", known, vectors[..., 0])


def expand_function(
    function: Callable[[dict[str, Tensor]], Tensor], values: Mapping[str, Tensor], layout: FlatLayout
) -> tuple[Tensor, QuadraticModel]:
    """The exact quadratic model of a function of several sets.

    Args:
        function: From the parameters, `[set, *shape]`, to one number for each set, `[set]`.
        values: The point.
        layout: The entries that vary.

    Returns:
        The values of the function, `[set]`, and the model; `H` is minus its Hessian.
    """
    flat = layout.flatten(values).detach().requires_grad_()
    result = function({**values, **layout.unflatten(flat)})
    if not result.requires_grad:  # a constant
        zero = torch.zeros_like(flat)
        return result, QuadraticModel(layout, zero, lambda v: torch.zeros_like(v))
    (gradient,) = torch.autograd.grad(result.sum(), flat, create_graph=True)

    def product(v: Tensor) -> Tensor:
        # The derivative of g . v by the parameters is the Hessian times v (Pearlmutter 1994).
        if not gradient.requires_grad:
            return torch.zeros_like(v)
        (Hv,) = torch.autograd.grad(gradient, flat, v, retain_graph=True)
        return -Hv

    return result.detach(), QuadraticModel(layout, gradient.detach(), product)

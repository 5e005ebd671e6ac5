"""Curvature: E step of EM and M step of its tables, products with the Gauss-Newton matrix, its blocks, and CG.

A quadratic model of the log posterior density `f` at the parameters `w` of a set is `f(w + d) = f + g d - d^T H d / 2`.
The matrix `H` is never formed: a model multiplies it with vectors. Two models are used: of the expected complete-data
density (with the Gauss-Newton matrix, `EMExpansion`), and of `f` (with its exact Hessian).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer.compiler.gather import ExecutionState, get_present_mask
from bnet_transformer.data import Batch
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.inference.elimination import eliminate_choices
from bnet_transformer.inference.factors import Factor, gather_in_log_dtype, mask_unobserved, select_logits
from bnet_transformer.learning.fit.heads import find_selectors, head_dims
from bnet_transformer.learning.fit.objective import FitObjective
from bnet_transformer.tpm import Normal

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
        parts = (v * self.product(v)).split([shape.numel() for shape in self.layout.shapes.values()], 1)
        scale = torch.cat([part.mean(1, keepdim=True).expand_as(part) for part in parts], 1)
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
        return result, QuadraticModel(layout, torch.zeros_like(flat), torch.zeros_like)
    (gradient,) = torch.autograd.grad(result.sum(), flat, create_graph=True)

    def product(v: Tensor) -> Tensor:
        # The derivative of g . v by the parameters is the Hessian times v (Pearlmutter 1994).
        if not gradient.requires_grad:
            return torch.zeros_like(v)
        (Hv,) = torch.autograd.grad(gradient, flat, v, retain_graph=True)
        return -Hv

    return result.detach(), QuadraticModel(layout, gradient.detach(), product)


# --------------------------------------------------------------------------------------------------------------------
# Dense blocks of the Gauss-Newton matrix, one for each head: which weights they have, and their inverse.
#
# Under a choice of heads, each prediction depends on the weights of one head, so that the matrix has one block for each
# head, and one vector that contains the same entry of every head probes all blocks at once. Where weights of several
# heads act together, the blocks omit what lies between them.

MAX_ENTRIES = 128  # of a block; weights of larger ones have the mean of the diagonal only
RIDGE = 1e-6  # of the scale, which is added to a block: without a prior it can be singular


@dataclass(frozen=True)
class BlockGroup:
    """Some weights with one block for each head of a selector.

    Attributes:
        selector: The selector; None for one block of weights that are not of heads.
        index: The positions of the entries of each block in the flat vector of the weights, `[block, entry]`.
    """

    selector: NodeSpec | None
    index: Tensor


def factorize_blocks(
    blocks: Sequence[tuple[Tensor, Tensor]], scale: Tensor, damping: Tensor
) -> Callable[[Tensor], Tensor]:
    """Factorise damped blocks of the Gauss-Newton matrix.

    Args:
        blocks: The positions of the entries of each block, `[block, entry]`, with the blocks without damping,
            `[set, block, entry, entry]`.
        scale: The diagonal of the matrix where there are no blocks, `[set, entry]`.
        damping: The factor of `scale` that is added to the matrix, `[set]`.

    Returns:
        The function from vectors, `[set, entry]`, to their products with the inverse.
    """
    added, diagonal = (damping[:, None] + RIDGE) * scale, (1 + damping[:, None]) * scale
    factors = [(at, torch.linalg.cholesky_ex(matrix + added[:, at].diag_embed()).L) for at, matrix in blocks]

    def solve(r: Tensor) -> Tensor:
        z = r / diagonal
        for at, factor in factors:
            z[:, at] = torch.cholesky_solve(r[:, at][..., None], factor)[..., 0]
        return z

    return solve


def find_groups(network: Network, layout: FlatLayout) -> list[BlockGroup]:
    """Group the weights of a layout into blocks. Weights whose block would have too many entries are in no group."""
    parts: dict[str | None, tuple[NodeSpec | None, list[Tensor]]] = {}
    offset = 0
    for name, shape in layout.shapes.items():
        index = torch.arange(offset, offset + shape.numel()).reshape(shape)
        offset += shape.numel()
        owners = [(s, dims[0]) for s in find_selectors(network) if (dims := head_dims(network, s, name))]
        selector, index = (owners[0][0], index.movedim(owners[0][1], 0)) if owners else (None, index[None])
        key = selector.param_prefix if selector else None
        parts.setdefault(key, (selector, []))[1].append(index.reshape(len(index), -1))
    groups = [BlockGroup(selector, torch.cat(index, 1)) for selector, index in parts.values()]
    return [group for group in groups if group.index.shape[1] <= MAX_ENTRIES]


# --------------------------------------------------------------------------------------------------------------------
# EM at several sets of parameters: E step, M step of the tables, gradient, and products with the Gauss-Newton matrix.
#
# One evaluation of the net for all sets gives the log evidence, the expected counts of the tables, the responsibilities
# of the latent choices, and a graph for products with the Jacobian of the predictions.

MIN_COUNT = 1e-8  # of an entry in the M step of a table; it keeps logs finite


@dataclass(frozen=True)
class Expansion:
    """What one EM iteration needs of the log posterior density at the parameters of each set.

    Attributes:
        log_density: The log posterior density up to a constant, `[set]`.
        counts: The expected count of each entry of the learned tables, `[set, *shape]`.
        model: The quadratic model of the expected complete-data density in the weights: its gradient, which is the
            gradient of the log posterior density too, and its Gauss-Newton matrix. None without weights.
    """

    log_density: Tensor
    counts: dict[str, Tensor]
    model: QuadraticModel | None


@dataclass(frozen=True)
class Tilt:
    """Log weights of the states of a selector, which are added to its log prior.

    Attributes:
        selector: The selector.
        log_weights: For each part of the sentences, the log weights, `[set, *layout]`.
    """

    selector: NodeSpec
    log_weights: Sequence[Tensor]


@dataclass(frozen=True)
class _Site:
    """A factor whose distribution may depend on the weights."""

    index: int  # of the factor
    table_shape: torch.Size
    state_dim: int | None  # the dim of the states of a latent choice; None for evidence
    is_categorical: bool  # whether the predicted entries are logits
    state_dims: Mapping[int, int]  # the dim of predictions with the states of each choice, by the index of its group


@dataclass(frozen=True)
class _Prediction:
    """The parameters of the distribution of a factor at each state of the latent choices."""

    value: Tensor  # [set, *layout, entry]
    weight: Tensor  # the posterior probability of the states, [set, *layout]
    site: _Site

    def multiply_root(self, tangent: Tensor) -> Tensor:
        """Return `R J v` of `J v`, where `R^T R` is the weighted Fisher information."""
        if self.site.is_categorical:  # the Fisher information of logits is diag(p) - p p^T
            probs = self.value.detach().softmax(-1)
            tangent = probs.sqrt() * (tangent - (probs * tangent).sum(-1, keepdim=True))
        return self.weight.clamp(min=0).sqrt()[..., None] * tangent


@dataclass(frozen=True)
class _PartGraph:
    """The evaluation of one part of the sentences, with a graph for products with the Gauss-Newton matrix.

    The matrix is `J^T F J`. `J` is the Jacobian of the predictions by the weights, and `F` their Fisher information,
    weighted with the posterior probabilities of the states in which they are made.
    """

    evidence: Tensor  # [set]
    counts: dict[str, Tensor]
    gradient: Tensor
    flat: Tensor
    rows: list[_Prediction]

    def linearize(self) -> tuple[list[Tensor], Tensor]:
        """Return cotangents `u` and the graph of `J^T u`, whose derivative by `u` in a direction `v` is `J v`."""
        # J v is a product in forward mode. A backward pass is linear in its cotangent u, so that its own derivative
        # gives J v by reverse mode only, which every operation of the compiled net supports.
        predictions = [row.value for row in self.rows]
        u = [torch.zeros_like(p, requires_grad=True) for p in predictions]
        (back,) = torch.autograd.grad(predictions, self.flat, u, create_graph=True)
        return u, back

    def multiply(self, v: Tensor, linear: tuple[list[Tensor], Tensor]) -> Tensor:
        """Return `J^T F J v`, `[set, entry]`."""
        cotangents = []
        for tangent, row in zip(
            torch.autograd.grad(linear[1], linear[0], v, retain_graph=True), self.rows, strict=True
        ):
            if row.site.is_categorical:
                probs = row.value.detach().softmax(-1)
                tangent = probs * (tangent - (probs * tangent).sum(-1, keepdim=True))
            cotangents.append(row.weight[..., None] * tangent)
        (result,) = torch.autograd.grad([row.value for row in self.rows], self.flat, cotangents, retain_graph=True)
        return result

    def compute_blocks(self, group: BlockGroup) -> Tensor:
        """Return the blocks of a group, `[set, block, entry, entry]`, from one product `J v` for each entry."""
        u, back = self.linearize()
        columns: list[list[Tensor]] = [[] for _ in self.rows]
        for positions in group.index.mT:  # the same entry of each block
            v = torch.zeros_like(self.flat)
            v[:, positions] = 1.0
            for row, column, tangent in zip(
                self.rows, columns, torch.autograd.grad(back, u, v, retain_graph=True), strict=True
            ):
                column.append(row.multiply_root(tangent))
        blocks, entries = group.index.shape
        total = self.flat.new_zeros(len(self.flat), blocks, entries, entries)
        for row, column in zip(self.rows, columns, strict=True):
            J = torch.stack(column, 1)  # [set, entry, *layout, entry of the prediction]
            dim = row.site.state_dims.get(group.selector.group.index) if group.selector else None
            J = J[:, None] if dim is None else J.movedim(dim + 1, 1)
            J = J.flatten(3)
            total = total + J @ J.mT  # broadcast over the blocks where all predictions depend on all of them
        return total


def find_uncovered(objective: FitObjective) -> str | None:
    """Return why Gauss-Newton steps do not cover a net; None if they do."""
    network, weights = objective.network, {name.rpartition(".")[0] for name in objective.learned.weights}
    for spec in network.specs:
        depends = any(s.param_prefix in weights for s in network.ancestral_specs(spec))
        if depends and spec.tpm.kind == "continuous" and spec.tpm.is_random and not isinstance(spec.tpm, Normal):
            return (
                f"{spec.group.name} has a distribution without a known Fisher information ({type(spec.tpm).__name__})"
            )
    return None


class EMExpansion:
    """Expands the log posterior density of several sets of parameters on fixed sentences.

    Args:
        objective: The log evidence and the log prior.
        parts: The sentences of this process, in parts that are evaluated together.
        ranks: The processes that share the sentences.
        weights: The weights in which the density is expanded; by default the learned ones.
    """

    def __init__(
        self,
        objective: FitObjective,
        parts: Sequence[Batch],
        ranks: DistributedContext,
        weights: Sequence[str] | None = None,
    ) -> None:
        self.objective, self.parts, self.ranks = objective, parts, ranks
        self.weights = objective.learned.weights if weights is None else weights
        self._sites: dict[int, list[_Site]] = {}

    def compute_blocks(self, sets: Mapping[str, Tensor], groups: Sequence[BlockGroup], factor: float) -> list[Tensor]:
        """Compute blocks of the Gauss-Newton matrix.

        Args:
            sets: The learned parameters, `[set, *shape]`.
            groups: The weights of the blocks, in the flat vector of all learned weights.
            factor: The number of sentences for which each sentence stands.

        Returns:
            The blocks of each group, `[set, block, entry, entry]`, without damping.
        """
        layout = FlatLayout.create(sets, self.weights)
        flat = layout.flatten(sets).detach().requires_grad_()
        totals = [flat.new_zeros(len(flat), *group.index.shape, group.index.shape[1]) for group in groups]
        with sdpa_kernel(SDPBackend.MATH):
            for number, part in enumerate(self.parts):
                graph = self._expand_part(number, part, sets, flat, layout, None)
                totals = [t + graph.compute_blocks(group) for t, group in zip(totals, groups, strict=True)]
        _, prior = expand_function(self.objective.log_prior, sets, layout)
        diagonal = prior.product(torch.ones_like(flat))  # the prior is a product over the entries
        pairs = zip(groups, totals, strict=True)
        return [factor * self.ranks.all_reduce(t) + diagonal[:, g.index].diag_embed() for g, t in pairs]

    def __call__(self, sets: Mapping[str, Tensor], tilt: Tilt | None = None) -> Expansion:
        """Expand at these parameters.

        Args:
            sets: The learned parameters, `[set, *shape]`.
            tilt: Log weights of the states of a selector; None for none.

        Returns:
            The expansion; with a tilt, that of the tilted density.
        """
        layout = FlatLayout.create(sets, self.weights)
        flat = layout.flatten(sets).detach().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of attention have no second derivative
            graphs = [self._expand_part(n, part, sets, flat, layout, tilt) for n, part in enumerate(self.parts)]
        first = next(iter(sets.values()))
        evidence = self.ranks.all_reduce(sum((g.evidence for g in graphs), first.new_zeros(len(first))))
        counts = {
            name: self.ranks.all_reduce(sum((g.counts[name] for g in graphs), torch.zeros_like(sets[name])))
            for name in sorted(self.objective.learned.tables)
        }
        log_prior, prior = expand_function(self.objective.log_prior, sets, layout)
        if not self.weights:
            return Expansion(evidence + log_prior, counts, None)
        gradient = self.ranks.all_reduce(sum((g.gradient for g in graphs), torch.zeros_like(flat)).detach())
        linear: list[tuple[list[Tensor], Tensor]] = []

        def product(v: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                linear.extend(g.linearize() for g in graphs[len(linear) :])  # at the first product
                pairs = zip(graphs, linear, strict=True)
                total = sum((g.multiply(v, item) for g, item in pairs), torch.zeros_like(v))
            return self.ranks.all_reduce(total) + prior.product(v)

        # The log prior is concave in the weights.
        model = QuadraticModel(layout, gradient + prior.gradient, product)
        return Expansion(evidence + log_prior, counts, model)

    def _expand_part(
        self, number: int, part: Batch, sets: Mapping[str, Tensor], flat: Tensor, layout: FlatLayout, tilt: Tilt | None
    ) -> _PartGraph:
        """Evaluate one part of the sentences, with the derivatives of its log evidence."""
        if number not in self._sites:
            self._sites[number] = self._find_sites(part, sets)
        sites, objective, like = self._sites[number], self.objective, next(iter(sets.values()))
        # The derivative of the log evidence by the log of a factor is the posterior probability of its states, and by
        # the log probability of a table entry its expected count (Darwiche 2003): zeros that are added to both are the
        # inputs of one backward pass, which is the E step. By Fisher's identity, the gradient of the log evidence by
        # the weights is that of the expected complete-data density.
        count_zeros = {name: torch.zeros_like(sets[name]).requires_grad_() for name in objective.learned.tables}
        site_zeros = [like.new_zeros(len(like), *site.table_shape).requires_grad_() for site in sites]

        def evaluate(
            parameters: dict[str, Tensor],
            count_zeros: dict[str, Tensor],
            site_zeros: list[Tensor],
            log_weights: Tensor | None,
        ) -> tuple[Tensor, list[Tensor]]:
            def fn(state: ExecutionState, factors: list[Factor]) -> tuple[Tensor, list[Tensor]]:
                shifted, counted = list(factors), replace(state, parameters={**state.parameters, **count_zeros})
                for k, factor in enumerate(factors):
                    if is_density(state, factor) and objective.find_learned_tables(factor):
                        shifted[k] = replace(factor, table=factor.table + select_logits(counted, factor))
                predictions = []
                for site, zeros in zip(sites, site_zeros, strict=True):
                    factor = shifted[site.index]
                    shifted[site.index] = replace(factor, table=factor.table + _mask_absent(state, factor, zeros))
                    predictions.append(_predict(state, factor, site))
                if tilt is not None and log_weights is not None:
                    shifted.append(Factor(tilt.selector, log_weights))
                return eliminate_choices(state, shifted), predictions

            return objective.evaluate(parameters, part, fn, defer=not sites)

        parameters = {name: value.detach() for name, value in sets.items()} | layout.unflatten(flat)
        log_weights = None if tilt is None else tilt.log_weights[number]
        in_dims = (0, 0, 0, None if log_weights is None else 0)
        evidence, predictions = torch.vmap(evaluate, in_dims)(parameters, count_zeros, site_zeros, log_weights)
        evidence = evidence.sum(1)
        inputs = [*count_zeros.values(), *site_zeros, flat]
        gradients = torch.autograd.grad(
            evidence.sum(), inputs, retain_graph=bool(self.weights), allow_unused=True, materialize_grads=True
        )
        counts, rows = dict(zip(count_zeros, gradients, strict=False)), []
        for site, p, w in zip(sites, predictions, gradients[len(counts) :], strict=False):
            if p.requires_grad:
                # The distribution of a choice is the same for all its states.
                weight = w if site.state_dim is None else w.sum(site.state_dim + 1, keepdim=True)
                rows.append(_Prediction(p, weight, site))
        return _PartGraph(evidence.detach(), counts, gradients[-1], flat, rows)

    def _find_sites(self, part: Batch, sets: Mapping[str, Tensor]) -> list[_Site]:
        """Find the factors whose distribution may depend on the learned weights, with the shapes of their tables."""
        if not self.weights:
            return []
        weighted, network = {name.rpartition(".")[0] for name in self.weights}, self.objective.network

        def fn(state: ExecutionState, factors: list[Factor]) -> list[_Site]:
            sites = []
            state_dims = {index: dim + 1 for dim, index in enumerate(state.layout.enumerated)}
            for k, factor in enumerate(factors):
                spec = factor.spec
                depends = any(other.param_prefix in weighted for other in network.ancestral_specs(spec))
                if is_density(state, factor) and spec.tpm.is_random and depends:
                    state_dim = None if factor.evidence is not None else state.layout.enumerated.index(spec.group.index)
                    is_categorical = spec.tpm.kind == "discrete"
                    sites.append(_Site(k, factor.table.shape, state_dim, is_categorical, state_dims))
            return sites

        with torch.no_grad():
            return self.objective.evaluate({name: v[0] for name, v in sets.items()}, part, fn, defer=False)


def update_tables(
    objective: FitObjective, values: Mapping[str, Tensor], counts: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tables of the M step, `theta = (counts + concentration - 1) / sum`, as logs, `[set, *shape]`.

    Args:
        objective: The objective, with the concentrations of the priors.
        values: The parameters before the step.
        counts: The expected counts of all sentences, `[set, *shape]`, by table.
    """
    # With expected counts n_k, the expected complete-data log posterior of a row is sum_k (n_k + a_k - 1) log theta_k,
    # whose maximum is the mode of a Dirichlet(n + a): theta_k is proportional to n_k + a_k - 1 (Dempster, Laird and
    # Rubin 1977; Bishop 2006, section 9.4). If every n_k + a_k >= 1, a step never decreases the posterior density.
    # Otherwise (a prior below 1 and few counts) that density is unbounded at the border of the simplex, and
    # `MIN_COUNT` bounds the distance of the row to the border. Impossible states (-inf) stay impossible.
    tables = {}
    for name, count in counts.items():
        probs = (count + (objective.learned.tables[name] - 1).to(count)).clamp(min=MIN_COUNT)
        probs = probs.where(values[name] > -torch.inf, 0.0)
        tables[name] = (probs / probs.sum(-1, keepdim=True)).log()
    return tables


def is_density(state: ExecutionState, factor: Factor) -> bool:
    """True for a factor that is the probability of a node; a choice that is enumerated though observed has two."""
    return factor.evidence is None or factor.spec.group.index not in state.layout.enumerated


def _mask_absent(state: ExecutionState, factor: Factor, table: Tensor) -> Tensor:
    """Return the table with zeros at nodes that are not observed, or at padding."""
    if factor.evidence is not None:
        return mask_unobserved(factor.evidence, table)
    present = get_present_mask(state, factor.spec.group.word_stack)
    return table if present is None else torch.where(present, table, 0.0)


def _predict(state: ExecutionState, factor: Factor, site: _Site) -> Tensor:
    """The parameters of the distribution of a factor, `[*layout, entry]`: logits, or a mean in units of its sigma.

    In these units the Fisher information of a mean is the identity. So it is for a learned log sigma, which is the last
    entry, times the square root of 2 d.
    """
    context, parents = gather_in_log_dtype(state, factor.spec)
    shape = list(site.table_shape)
    if site.is_categorical:
        logits = state.layout.pad_dims(factor.spec.tpm.logits(context, *parents), 1)
        if site.state_dim is not None:
            shape[site.state_dim] = 1
        return logits.expand(*shape, -1)
    assert isinstance(factor.spec.tpm, Normal)
    mean = state.layout.pad_dims(factor.spec.tpm.mean(context, *parents), 1)
    log_sigma = context["log_sigma"]
    entries = (mean * (-log_sigma.detach()).exp()[..., None]).expand(*shape, -1)
    scale = (2 * mean.shape[-1]) ** 0.5 * log_sigma[..., None]
    return torch.cat([entries, scale.expand(*shape, 1)], -1) if factor.spec.tpm.learnable else entries


# --------------------------------------------------------------------------------------------------------------------
# Conjugate gradients that Gauss-Newton blocks of the heads precondition.
#
# The blocks only speed up a solution, and never change what it converges to. So they may be those of a sample of the
# sentences, or of earlier parameters.

# Blocks are those of a sample if they need more products with the Jacobian, or if there are more sentences.
MAX_PROBES, MAX_SENTENCES = 16, 1000
MAX_VALUES = 2**25  # numbers in the products of one part of the sample


class PreconditionedSolver:
    """Maximises quadratic models of several sets of parameters. Blocks are computed again as soon as it saves products.

    Args:
        objective: The log evidence and the log prior.
        corpus: The sentences of the blocks, or a set of which they are a sample.
        split: The function that splits sentences into the parts of this process.
        sets: The learned parameters, `[set, *shape]`.
        ranks: The processes that share the sentences.
    """

    def __init__(
        self,
        objective: FitObjective,
        corpus: Batch,
        split: Callable[[Batch], list[Batch]],
        sets: Mapping[str, Tensor],
        ranks: DistributedContext,
    ) -> None:
        self.weights = objective.learned.weights
        self.groups = find_groups(objective.network, FlatLayout.create(sets, self.weights))
        self.blocks: list[Tensor] | None = None  # of each group
        self.excess = 0.0  # products since the blocks were computed, beyond those that new blocks would have needed
        self.first_products: dict[int, float] = {}  # of the first solution with these blocks, by its limit
        sizes = [group.index.shape[1] for group in self.groups]
        self.stride = max(1, math.ceil(sum(sizes) / MAX_PROBES), math.ceil(len(corpus) / MAX_SENTENCES))
        if objective.has_corpus_choice:
            self.stride = 1
        sample = corpus.take(torch.arange(0, len(corpus), self.stride))
        count, observed = len(next(iter(sets.values()))), count_observed_numbers(corpus)
        states = max((spec.tpm.states or 1 for spec in objective.network.choices), default=1)
        size = max(1, MAX_VALUES // (count * max(sizes, default=1) * states * observed))
        parts = split(sample) if self.stride == 1 else [part for full in split(sample) for part in full.parts(size)]
        self.expand = EMExpansion(objective, parts, ranks)

    def solve(
        self,
        sets: Mapping[str, Tensor],
        model: QuadraticModel,
        scale: Tensor,
        damping: Tensor,
        limit: int,
        tolerance: float,
        floor: Tensor | float = 0.0,
    ) -> ModelStep:
        """Maximise damped models by conjugate gradients.

        Args:
            sets: The parameters, at which new blocks are computed.
            model: The models.
            scale: The positive diagonal of the damping, `[set, entry]`.
            damping: The factor of `scale` that is added to `H`, `[set]`.
            limit: The maximum number of products.
            tolerance: The relative residual at which a set stops.
            floor: As that of `solve_model`.

        Returns:
            The steps.
        """
        if not self.groups:
            return solve_model(model, scale, damping, limit, tolerance, floor)
        if self.blocks is None or self.excess > MAX_PROBES:
            self.blocks = self.expand.compute_blocks(sets, self.groups, self.stride)
            self.excess, self.first_products = 0.0, {}
        positions = model.layout.locate(self.weights)
        blocks = [(positions[group.index], matrix) for group, matrix in zip(self.groups, self.blocks, strict=True)]
        precondition = factorize_blocks(blocks, scale, damping)
        solution = solve_model(model, scale, damping, limit, tolerance, floor, precondition)
        self.excess += solution.iterations - self.first_products.setdefault(limit, solution.iterations)
        return solution

    def select(self, rows: list[int]) -> None:
        """Keep only some sets."""
        self.blocks = self.blocks and [matrix[rows] for matrix in self.blocks]

    def snapshot(self) -> dict[str, Tensor]:
        """Return the state as tensors."""
        state = {f"blocks_{i}": matrix for i, matrix in enumerate(self.blocks or ())}
        products = [(0.0, self.excess), *self.first_products.items()]
        return state | {"products": torch.tensor(products, dtype=torch.float64)}

    def restore(self, state: Mapping[str, Tensor], like: Tensor) -> None:
        """Load the state of a snapshot, to the device of another tensor."""
        (_, self.excess), *products = state["products"].tolist()
        self.first_products = {int(limit): count for limit, count in products}
        blocks = [state[f"blocks_{i}"].to(like) for i in range(len(self.groups)) if f"blocks_{i}" in state]
        self.blocks = blocks or None


def count_observed_numbers(corpus: Batch) -> int:
    """Count the observed numbers of one sentence; at least 1."""
    return max(1, sum(evidence.value[0].numel() for evidence in corpus.evidence.values()))

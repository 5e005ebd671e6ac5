"""`Laplace`: a Normal distribution around the mode of the posterior density, in coordinates with a fixed gauge.

`find_mode` is also the start of the Gaussian guides of `svi` and of the chains of `nuts`. All computations are in
float64.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer._core.hashing import derive_seed
from bnet_transformer.data import Batch
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.factors import LOG_ZERO
from bnet_transformer.learning.fit.comparison import align_heads
from bnet_transformer.learning.fit.coordinates import Coordinates
from bnet_transformer.learning.fit.diagnostics import (
    VARIANCE_DRAWS,
    Uninformed,
    count_uninformed,
    describe_parameters,
    describe_uninformed,
    find_coincident_heads,
    find_dead_heads,
    find_learned_invariants,
)
from bnet_transformer.learning.fit.head_summary import (
    find_invariant_parameters,
    find_selectors,
    invariants,
    log_likelihoods,
)
from bnet_transformer.learning.fit.importance import MAX_KHAT, resample, smooth_weights
from bnet_transformer.learning.fit.point import fit_point
from bnet_transformer.learning.fit.problem import EM, MAP, FitObjective, FitProblem, Laplace, Parameters, to_float64
from bnet_transformer.learning.fit.restarts import (
    FULL_PASS_SIZE,
    build_fit,
    init_restarts,
    replace_learned,
    to_network_devices,
)
from bnet_transformer.learning.fit.result import Fit
from bnet_transformer.learning.training.configs import LoopConfig
from bnet_transformer.tpm import Codebook

MAX_NEWTON_STEPS = 200
MAX_COORDINATES = 2000  # the Hessian is a dense matrix of this many rows
HESSIAN_ROWS = 64  # rows of the Hessian that one backward pass computes
STATIONARY = 1e-5  # the Newton decrement sqrt(g' H^-1 g) at which the polish ends
MAX_DECREMENT = 1e-3  # a mode with a larger decrement has not converged
MIN_CURVATURE = 1e-3  # of the prior's precision; a direction with less curvature is singular
PROPOSAL_FREEDOM = 5.0  # degrees of freedom of the Student t proposal
MIN_PROPOSALS = 2000
SAME_MODE, SEPARATE_MODE = 0.1, 4.0  # distances in standard deviations of a mode from its mirror image
APPROXIMATE_NOTE = "a Normal distribution at one mode; other modes are not represented"
REWEIGHTED_NOTE = "importance-weighted draws from a Student t distribution at one mode; other modes are not represented"


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
    """

    z: Tensor
    log_density: float
    decrement: float
    root: Tensor | None
    log_det: float
    singular: tuple[str, ...] = field(default=())
    is_finished: bool = True


def to_double(problem: FitProblem) -> FitProblem:
    """Return the problem in float64, for one process that uses all sentences and writes no checkpoints."""
    loop = LoopConfig(problem.loop.every, None, problem.loop.progress)
    ranks = DistributedContext(0, 1, problem.ranks.device)
    return replace(to_float64(problem), held_out=None, loop=loop, settings={}, ranks=ranks)


def split_corpus(objective: FitObjective, corpus: Batch) -> list[Batch]:
    """Split sentences into the parts of a full pass; one part if all sentences share a draw."""
    return [corpus] if objective.has_corpus_choice else corpus.parts(FULL_PASS_SIZE)


def find_start(problem: FitProblem, restarts: int, seed: int) -> tuple[Parameters, bool]:
    """Fit a point in float64 from several starts; also return whether the fit finished."""
    objective = problem.objective
    kind = EM if objective.learned.tables else MAP
    try:
        fitted = fit_point(replace(problem, seed=seed), kind(restarts=restarts))
    except BNetError:
        objective.check_possible(problem.corpus, FULL_PASS_SIZE)
        raise
    device = objective.device
    values = fitted.network.parameters
    return {name: values[name].detach().to(device) for name in objective.learned.names}, fitted.finished


def randomize(objective: FitObjective, seed: int) -> FitObjective:
    """Return the objective with random learned parameters."""
    network, learned = objective.network, objective.learned
    values = init_restarts(network, learned.names, 2, seed, objective.device).get(1)
    return FitObjective(replace_learned(network, values), learned, objective.budget).to(objective.device)


def find_mode(problem: FitProblem, coordinates: Coordinates, restarts: int, seed: int) -> Mode:
    """Find a mode: a point fit from several starts, then Newton steps with the exact Hessian.

    Args:
        problem: The problem of `to_double`.
        coordinates: Its coordinates.
        restarts: The number of starts of the point fit.
        seed: The seed of the starts.

    Returns:
        The mode.
    """
    parameters, is_finished = find_start(problem, restarts, seed)
    parts = split_corpus(problem.objective, problem.corpus)
    for part in parts:
        problem.objective.cache_factors(part)
    z = coordinates.encode(parameters)
    if coordinates.size > MAX_COORDINATES:
        value = float(_evaluate(coordinates, parts, z))
        return Mode(z, value, math.inf, None, math.nan, is_finished=is_finished)
    return replace(polish(coordinates, parts, z), is_finished=is_finished)


def polish(coordinates: Coordinates, parts: list[Batch], z: Tensor) -> Mode:
    """Maximise the log density from a start by Newton steps, and compute the Normal distribution at the mode."""
    # Newton's method with |eigenvalues| of the exact Hessian: an ascent direction also where the density is not
    # concave (Nocedal and Wright 2006, section 3.4). Backtracking makes the density increase in every step. At a saddle
    # the gradient is 0, so the step follows the direction of the largest positive curvature.
    value, gradient, hessian = evaluate_hessian(coordinates, parts, z)
    decrement = math.inf
    for _ in range(MAX_NEWTON_STEPS):
        if not value.isfinite() or not hessian.isfinite().all():
            break
        curvature, axes = torch.linalg.eigh(-hessian)
        direction = axes @ ((axes.mT @ gradient) / curvature.abs().clamp(min=MIN_CURVATURE))
        slope = float(gradient @ direction)
        decrement = math.sqrt(max(slope, 0.0))
        is_saddle = decrement < STATIONARY
        if is_saddle and float(curvature[0]) > -MIN_CURVATURE:
            break
        if is_saddle:
            direction, slope = axes[:, 0] / math.sqrt(-float(curvature[0])), 0.0
        moved = _search(coordinates, parts, z, float(value), direction, slope)
        if moved is None:
            break
        z = moved
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


def evaluate_draws(coordinates: Coordinates, corpus: Batch, draws: Tensor) -> Tensor:
    """Compute the log joint density of draws `[draw, coordinate]`, `[draw]`, in chunks; -inf if it is not finite."""
    with torch.no_grad():
        priors = torch.vmap(coordinates.log_prior)(draws)
        sets = torch.vmap(coordinates.decode)(draws)
        total = priors + log_likelihoods(coordinates.objective, corpus, sets).sum(1)
    return total.where(total.isfinite() & (total > LOG_ZERO / 2), -torch.inf)


def fit_laplace(problem: FitProblem, method: Laplace) -> Fit[Network]:
    """Fit by the Laplace approximation.

    Args:
        problem: The fit problem. Under torchrun each process computes the same fit.
        method: The options.

    Returns:
        The fit, with draws as samples.

    Raises:
        BNetError: If `batch` is smaller than the number of sentences, there are too many parameters, or the density is
            not finite.
    """
    check_full_batch(problem, "Laplace")
    double = to_double(problem)
    coordinates, corpus = Coordinates(double.objective, double.corpus), double.corpus
    check_size(coordinates)
    mode = find_mode(double, coordinates, method.restarts, derive_seed(problem.seed, "mode"))
    generator = torch.Generator().manual_seed(derive_seed(problem.seed, "laplace"))
    draws, khat, effective = draw_posterior(coordinates, corpus, mode, method, generator)
    is_reweighted = method.reweight and khat < MAX_KHAT
    samples = {name: value[None] for name, value in coordinates.to_samples(draws, generator).items()}
    log_density = evaluate_draws(coordinates, corpus, draws)[None]
    samples, matched = align_heads(double.objective, corpus, samples, log_density)
    notes = describe_mode(coordinates, corpus, mode)
    if method.reweight and not is_reweighted:
        notes.append(
            f"the draws are not reweighted, because k-hat of the importance weights is {khat:.2f}, above {MAX_KHAT}: "
            "intervals are those of the Normal distribution at the mode; compare with method=bt.NUTS()"
        )
    evidence, reason = compute_evidence(coordinates, corpus, mode, khat, matched)
    if reason:
        notes.append(f"the log marginal likelihood is not available: {reason}")
    dtype = problem.objective.network.dtype
    parameters = {name: value.to(dtype) for name, value in coordinates.decode(mode.z).items()}
    return build_fit(
        problem,
        method,
        parameters,
        finished=mode.is_finished,
        converged=mode.decrement <= MAX_DECREMENT and not mode.singular,
        approximate=REWEIGHTED_NOTE if is_reweighted else APPROXIMATE_NOTE,
        bounds=(mode.log_density / len(corpus),),
        samples={k: v.to(dtype) for k, v in to_network_devices(problem.objective.network, samples).items()},
        matched=matched,
        notes=tuple(notes),
        khat=khat,
        effective_sample_size=effective if is_reweighted else None,
        log_marginal_likelihood=evidence,
        criterion="log joint density of the coordinates and the sentences",
    )


def check_full_batch(problem: FitProblem, name: str) -> None:
    """Raise an error if a step uses a part of the sentences."""
    count = len(problem.corpus)
    if problem.batch is not None and problem.batch < count:
        expected = f"None or all {count} sentences, because {name} requires the whole likelihood"
        raise BNetError("batch", expected=expected, actual=problem.batch, hint="Use method='svi' for minibatches")


def check_size(coordinates: Coordinates) -> None:
    """Raise an error if the dense Hessian would be too large."""
    if coordinates.size > MAX_COORDINATES:
        expected = f"at most {MAX_COORDINATES} learned numbers, because the Hessian is a dense matrix"
        hint = "Name fewer parameters in learn=, or use method=bt.SVI() (mean-field)"
        raise BNetError("learn", expected=expected, actual=coordinates.size, hint=hint)


def draw_posterior(
    coordinates: Coordinates, corpus: Batch, mode: Mode, method: Laplace, generator: torch.Generator
) -> tuple[Tensor, float, float]:
    """Draw from the approximation; also return k-hat and the effective sample size of the importance weights.

    The draws `[draw, coordinate]` are reweighted if the method requests it and k-hat is below 0.7, else Normal.
    """
    # The proposal is a Student t distribution with the Hessian's covariance, whose tails are heavier than those of the
    # Normal distribution, so the weights are bounded more often (Geweke 1989).
    assert mode.root is not None
    count = max(MIN_PROPOSALS, 4 * method.draws)
    size, device, freedom = coordinates.size, mode.z.device, PROPOSAL_FREEDOM
    normal = torch.randn(count, size, generator=generator, dtype=torch.float64)
    gamma = torch._standard_gamma(torch.full((count, 1), freedom / 2, dtype=torch.float64), generator=generator)
    steps = (normal / (2 * gamma / freedom).sqrt()).to(device)
    proposals = mode.z + steps @ mode.root.mT
    log_proposal = -(freedom + size) / 2 * torch.log1p(steps.square().sum(1) / freedom)
    weights, khat = smooth_weights(evaluate_draws(coordinates, corpus, proposals) - log_proposal)
    effective = float(1 / weights.square().sum())
    if method.reweight and khat < MAX_KHAT:
        return proposals[resample(weights, method.draws, generator)], khat, effective
    normal = torch.randn(method.draws, size, generator=generator, dtype=torch.float64).to(device)
    return mode.z + normal @ mode.root.mT, khat, effective


def compute_evidence(
    coordinates: Coordinates, corpus: Batch, mode: Mode, khat: float, matched: tuple[str, ...]
) -> tuple[float | None, str]:
    """Compute the log marginal likelihood by Laplace's method; None and the reason if it is not trustworthy.

    It counts the K! equal modes of a selector with K exchangeable heads, and the two of a free sign.
    """
    network, learned = coordinates.objective.network, coordinates.learned
    values = _get_parameters(coordinates, mode)
    reasons = []
    if mode.decrement > MAX_DECREMENT:
        reasons.append("the mode has not converged")
    if mode.singular:
        reasons.append("the Hessian has singular directions")
    if not khat < MAX_KHAT:
        reasons.append(f"k-hat is {khat:.2f}, not below {MAX_KHAT}")
    if find_dead_heads(network, values):
        reasons.append("a head is dead")
    flat = {key for key, (count, total) in find_uninformed(coordinates, mode).items() if count == total}
    if any(_is_uninformed(network, selector, flat) for selector in find_selectors(network)):
        reasons.append("no sentence informs a head")
    if find_coincident_heads(network, values):
        reasons.append("heads coincide")
    atoms = [f"{spec.param_prefix}.atoms" for spec in network.specs if isinstance(spec.tpm, Codebook)]
    if {*atoms} & {*learned.weights}:
        reasons.append("the atoms of a codebook are exchangeable, and their equal modes are not counted")
    if coordinates.unfixed:
        reasons.append("the gauge of attention is not fixed")
    assert mode.root is not None
    steps = [torch.linalg.solve(mode.root, mode.z - mirror) for mirror in coordinates.mirrors(mode.z)]
    distances = [float(step.norm()) for step in steps]
    if any(SAME_MODE < distance < SEPARATE_MODE for distance in distances):
        reasons.append("the rank of W_q^T W_k of a head is uncertain, so two equal modes overlap")
    if reasons:
        return None, "; ".join(reasons)
    modes = math.log(2) * sum(distance >= SEPARATE_MODE for distance in distances)
    modes += sum(math.lgamma(1 + (network.get_spec(name).tpm.states or 1)) for name in matched)
    return mode.log_density + coordinates.size * math.log(2 * math.pi) / 2 + mode.log_det / 2 + modes, ""


def _get_parameters(coordinates: Coordinates, mode: Mode) -> dict[str, Tensor]:
    """Return all parameters of the net at the mode, on the device of the coordinates."""
    fixed = {name: value.detach().to(mode.z.device) for name, value in coordinates.objective.network.parameters.items()}
    return {**fixed, **coordinates.decode(mode.z)}


def _is_uninformed(network: Network, selector: NodeSpec, flat: Collection[tuple[str, int]]) -> bool:
    """Return True if all learned invariants of some head of a selector have the width of their prior."""
    names = list(find_invariant_parameters(network, selector))
    return any(all((name, head) in flat for name in names) for head in range(selector.tpm.states or 0) if names)


def describe_mode(coordinates: Coordinates, corpus: Batch, mode: Mode) -> list[str]:
    """Describe what limits the approximation: too few data, singular directions, heads that coincide, the scale."""
    notes: list[str] = []
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
    notes += describe_parameters(coordinates.objective, len(corpus), coordinates.size, values)
    if flat := find_uninformed(coordinates, mode):
        notes.append(describe_uninformed(flat))
    return notes


def find_uninformed(coordinates: Coordinates, mode: Mode) -> Uninformed:
    """Find the invariants of heads with directions in which the posterior is about as wide as the prior.

    The result is the number of these directions and of all, by invariant and head.
    """
    assert mode.root is not None
    network, generator, count = coordinates.objective.network, torch.Generator().manual_seed(0), VARIANCE_DRAWS
    normal = torch.randn(count, coordinates.size, generator=generator, dtype=torch.float64).to(mode.z.device)
    prior_draws = torch.stack([coordinates.sample_prior(generator) for _ in range(count)])
    posterior, prior = (torch.vmap(coordinates.decode)(z) for z in (mode.z + normal @ mode.root.mT, prior_draws))
    values = _get_parameters(coordinates, mode)
    fixed = {name: value.expand(count, *value.shape) for name, value in values.items() if name not in posterior}
    result: Uninformed = {}
    for selector in find_selectors(network):
        after, before = (invariants(network, selector, {**fixed, **draws}) for draws in (posterior, prior))
        for name in find_learned_invariants(network, selector, posterior):
            result |= count_uninformed(name, after[name], before[name])
    return result

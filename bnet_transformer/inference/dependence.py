"""How strongly nodes of a sentence depend on each other: over the states of choices, and to first order in the words.

The first-order test treats the sentence as a linear Gaussian network around its current values: the vectors of its
words are independent standard normals, each random node has independent noise, and each choice is in its most probable
state. With `J` the derivatives of values with respect to all this noise, the covariance of x and y given z is

    J_x J_y^T - J_x J_z^T (J_z J_z^T)^+ J_z J_y^T.

It is zero for nodes that the graph separates. If it is not zero, the nodes are dependent in the linear network. If it
is zero, this implies nothing about higher orders, other states of the choices, or other weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from bnet_transformer import reference
from bnet_transformer._core.tensors import enable_gradients
from bnet_transformer.declare import NodeSpec
from bnet_transformer.graph import ancestral_order
from bnet_transformer.inference.plan import Plan, plan_reference
from bnet_transformer.inference.values import get_normal
from bnet_transformer.reference import ATOL, BUDGET, GroundModel, ReferenceRun

MIN_RESIDUAL = 1e-7  # relative norm of a derivative below which the conditioning set determines the node
RANK_TOLERANCE = 1e-10


def plan_choice_dependence(
    question: str,
    model: GroundModel,
    x: Sequence[int],
    y: Sequence[int],
    given: Sequence[int],
    budget: int = BUDGET,
    atol: float = ATOL,
) -> Plan[float | None]:
    """The plan of the maximum of `|P(x, y | given) - P(x | given) P(y | given)|` over all values, by enumeration.

    Values of nodes that are functions of choices count as states; values that differ by at most `atol` are one state.

    Args:
        question: The question in words.
        model: The ground model of the sentence.
        x: Nodes, by ground id.
        y: Nodes, by ground id.
        given: The conditioning set, by ground id.
        budget: The maximum number of joint states.
        atol: The tolerance up to which two values are one state.

    Returns:
        The plan of the maximum; its result is None if there are no choices, or if an ancestor is a continuous random
        node, which has no states.
    """
    nodes = [*x, *y, *given]
    choices = reference.find_open_choices(model, nodes, {}, include_ancestors=True)
    parts = [*map(len, (x, y, given))]
    run = partial(_max_dependence, model, nodes, parts, choices, budget, atol)
    return plan_reference(question, model, choices, run)


def _max_dependence(
    model: GroundModel, nodes: Sequence[int], parts: list[int], choices: list[int], budget: int, atol: float
) -> float | None:
    """The maximum of `plan_choice_dependence`, where `parts` has the numbers of nodes of x, y and the given ones."""
    if not choices or any(_get_kind(model, node) == "continuous" for node in ancestral_order(model.ground, nodes)):
        return None
    logs, codes = [], []
    codebooks: list[list[Tensor]] = [[] for _ in nodes]
    for run in reference.enumerate_runs(model, choices, {}, budget):
        logs.append(sum((run.log_prob(node) for node in choices), torch.zeros((), dtype=torch.float64)))
        values = [run.states[node] if node in run.states else run.value(node) for node in nodes]
        codes.append([_encode_value(codebook, value, atol) for codebook, value in zip(codebooks, values, strict=True)])
    probs = torch.stack(logs).exp()
    table = torch.tensor(codes).reshape(len(codes), len(nodes))
    # Number the distinct rows of each part; an extra column of zeros is for parts without columns.
    i, j, k = (torch.unique(pad(part, (0, 1)), dim=0, return_inverse=True)[1] for part in table.split(parts, dim=1))
    joint = torch.zeros(int(k.max()) + 1, int(i.max()) + 1, int(j.max()) + 1, dtype=torch.float64)
    joint.index_put_((k, i, j), probs, accumulate=True)
    joint = joint[joint.sum((1, 2)) > 0]
    joint = joint / joint.sum((1, 2), keepdim=True)
    return float((joint - joint.sum(2, keepdim=True) * joint.sum(1, keepdim=True)).abs().max())


def _encode_value(codebook: list[Tensor], value: Tensor, atol: float) -> int:
    """The index of a value in a codebook; new values are appended."""
    for number, other in enumerate(codebook):
        if bool(((value - other).abs() <= atol).all()):
            return number
    codebook.append(value)
    return len(codebook) - 1


def _get_kind(model: GroundModel, node: int) -> str:
    """The kind of the TPM of a node, or "set" for a node that `do` sets."""
    return "set" if node in model.do else model.spec(node).tpm.kind


@enable_gradients()
def max_partial_correlation(model: GroundModel, x: Sequence[int], y: Sequence[int], given: Sequence[int]) -> float:
    """The maximum, over the entries of x and y, of the absolute partial correlation given z, to first order."""
    sentence = _PerturbedSentence(model.to_float64(), frozenset(given))
    sentence.propagate([*x, *y, *given])
    J_x, J_y, J_z = (sentence.jacobian(nodes) for nodes in (x, y, given))
    if not J_x.numel() or not J_y.numel():
        return 0.0
    # Partial correlation as the cosine of residuals: projecting out the row space of J_z is the Schur complement above
    # (Whittaker 1990, Graphical Models in Applied Multivariate Statistics), without a pseudo-inverse.
    basis = _orthonormal_basis(J_z)
    residual_x, residual_y = (_normalize_rows(J - (J @ basis.mT) @ basis, J) for J in (J_x, J_y))
    return float((residual_x @ residual_y.mT).abs().max())


def _orthonormal_basis(J: Tensor) -> Tensor:
    """An orthonormal basis of the row space, `[rank, noise]`."""
    J = J[J.norm(dim=1) > 0]
    if not len(J):
        return J
    _, singular_values, rows = torch.linalg.svd(J / J.norm(dim=1, keepdim=True), full_matrices=False)
    basis: Tensor = rows[singular_values > RANK_TOLERANCE * singular_values[0]]
    return basis


def _normalize_rows(residual: Tensor, original: Tensor) -> Tensor:
    """Each residual row divided by its norm; zero if the conditioning set determines it."""
    norm = residual.norm(dim=1, keepdim=True)
    return torch.where(norm > MIN_RESIDUAL * original.norm(dim=1, keepdim=True), residual / norm, 0.0)


@dataclass
class _PerturbedSentence:
    """The sentence with noise: `noise` is that of each root and random node, `perturbed` is the value of each node."""

    model: GroundModel
    given: frozenset[int]
    noise: list[Tensor] = field(default_factory=list)
    perturbed: dict[int, Tensor] = field(default_factory=dict)

    def propagate(self, nodes: Sequence[int]) -> None:
        """Compute all ancestors of some nodes, parents before children."""
        states: dict[int, Tensor] = {}
        run = ReferenceRun(self.model, states)
        for node in ancestral_order(self.model.ground, nodes):
            spec, kind = self.model.spec(node), _get_kind(self.model, node)
            if kind == "discrete":
                logits = run.distribution(node).logits  # type: ignore[attr-defined]
                states[node] = logits.argmax()
                self.perturbed[node] = self._add_noise(torch.where(torch.isfinite(logits), logits, 0.0))
            elif kind == "continuous":
                normal = get_normal(spec, run.distribution(node))
                self.perturbed[node] = run.values[node] = self._add_noise(normal.mean, normal.stddev)
            elif kind != "set" and spec.tpm.is_index_valued:
                self.perturbed[node] = torch.zeros(0, dtype=torch.float64)  # an id: its noise is that of its embedding
            elif kind != "set" and self._is_root(node, spec):
                self._perturb_root(run, node)
            else:
                self.perturbed[node] = run.value(node)

    def _is_root(self, node: int, spec: NodeSpec) -> bool:
        """True for an input vector, and for a vector of a word that depends on ids only."""
        if spec.tpm.kind == "input":
            return True
        parents = [self.model.spec(parent) for parent in self.model.ground.parents(node)]
        is_embedding = all(m.group.word_stack is None or m.tpm.is_index_valued for m in parents)
        return spec.group.word_stack is not None and is_embedding

    def _perturb_root(self, run: ReferenceRun, node: int) -> None:
        """Add noise to a root, and assign the noise to its ids; a root whose ids are all given gets no noise."""
        ids = [parent for parent in self.model.ground.parents(node) if self.model.spec(parent).tpm.is_index_valued]
        value = run.value(node)
        if not ids or not self.given.issuperset(ids):
            perturbed = self._add_noise(value)
            for index_node in ids:
                noise = (perturbed - value.detach()).flatten()
                self.perturbed[index_node] = torch.cat([self.perturbed[index_node].reshape(-1), noise])
            value = run.values[node] = perturbed
        self.perturbed[node] = value

    def _add_noise(self, mean: Tensor, sigma: Tensor | float = 1.0) -> Tensor:
        """A value plus independent noise."""
        self.noise.append(torch.zeros_like(mean, requires_grad=True))
        return mean + sigma * self.noise[-1]

    def jacobian(self, nodes: Sequence[int]) -> Tensor:
        """`J`: the derivatives of the entries of some nodes with respect to all noise, `[entries, noise]`."""
        value = torch.cat([torch.zeros(0, dtype=torch.float64), *(self.perturbed[node].flatten() for node in nodes)])
        if not value.requires_grad:
            return torch.zeros(len(value), sum(noise.numel() for noise in self.noise), dtype=torch.float64)
        eye = torch.eye(len(value), dtype=value.dtype)
        grads = torch.autograd.grad(value, self.noise, eye, retain_graph=True, allow_unused=True, is_grads_batched=True)
        rows = zip(grads, self.noise, strict=True)
        zero = torch.zeros(len(value), 1, dtype=value.dtype)
        return torch.cat([zero.expand(-1, z.numel()) if J is None else J.flatten(1) for J, z in rows], 1)

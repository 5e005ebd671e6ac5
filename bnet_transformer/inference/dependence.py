"""How dependent nodes are in the numbers of a sentence: over the states of its choices, and as its words vary.

The second test reads the sentence as a linear net with normal noise, at the point where it stands: the vectors of its
words vary as independent unit normals, each random node by a noise of its own, each choice stays at its most probable
state. With `J` the derivatives of values by all that noise, the covariance of x and y given z is

    J_x J_y^T - J_x J_z^T (J_z J_z^T)^+ J_z J_y^T.

What the graph separates has none. Nodes that have some are dependent in that linear net; to find none shows nothing of
higher orders, of other choices, or of what would follow if weights varied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bnet_transformer import reference
from bnet_transformer._core.torch_context import enable_gradients
from bnet_transformer.declare import NodeSpec
from bnet_transformer.graph import ancestral_order
from bnet_transformer.inference.node_queries import normal_of
from bnet_transformer.inference.query import route_reference
from bnet_transformer.reference import ATOL, BUDGET, GroundModel, ReferenceRun

K = TypeVar("K")
LEAST = 1e-7  # what is left of a derivative, relative to it, once what is given is told: below, the node is determined
RANK = 1e-10


def over_choices(
    world: GroundModel,
    x: Sequence[int],
    y: Sequence[int],
    given: Sequence[int],
    budget: int = BUDGET,
    atol: float = ATOL,
) -> float | None:
    """The greatest `|P(x, y | given) - P(x | given) P(y | given)|` over all values, by enumeration of the choices.

    Values of nodes that are functions of choices count as states: values within `atol` of each other are one. None
    where there are no choices, or a random real node, which has no states to count.
    """
    nodes = [*x, *y, *given]
    free = reference.find_open_choices(world, nodes, {}, include_ancestors=True)
    if not free or any(_kind(world, node) == "continuous" for node in ancestral_order(world.ground, nodes)):
        return None
    route_reference("separation, verified", world, free).warn_if_slow()
    logs, codes = [], []
    books: list[list[Tensor]] = [[] for _ in nodes]
    for run in reference.enumerate_runs(world, free, {}, budget):
        logs.append(sum((run.log_prob(node) for node in free), torch.zeros((), dtype=torch.float64)))
        values = [run.states[node] if node in run.states else run.value(node) for node in nodes]
        codes.append([_code(book, value, atol) for book, value in zip(books, values, strict=True)])
    share = torch.stack(logs).exp()
    table = torch.tensor(codes).reshape(len(codes), len(nodes))
    parts = table.split([len(x), len(y), len(given)], dim=1)
    # The number of each row among the different ones; a column of zeros stands in where there is none.
    i, j, k = (torch.unique(pad(part, (0, 1)), dim=0, return_inverse=True)[1] for part in parts)
    joint = torch.zeros(int(k.max()) + 1, int(i.max()) + 1, int(j.max()) + 1, dtype=torch.float64)
    joint.index_put_((k, i, j), share, accumulate=True)
    joint = joint[joint.sum((1, 2)) > 0]
    joint = joint / joint.sum((1, 2), keepdim=True)
    return float((joint - joint.sum(2, keepdim=True) * joint.sum(1, keepdim=True)).abs().max())


def _code(book: list[Tensor], value: Tensor, atol: float) -> int:
    """The number of a value in a book of those met so far."""
    for number, other in enumerate(book):
        if bool(((value - other).abs() <= atol).all()):
            return number
    book.append(value)
    return len(book) - 1


def _kind(world: GroundModel, node: int) -> str:
    return "set" if node in world.do else world.spec(node).tpm.kind


@enable_gradients()
def over_roots(world: GroundModel, x: Sequence[int], y: Sequence[int], given: Sequence[int]) -> float:
    """The greatest partial correlation of a number of x and one of y given others, to first order."""
    varied = _Varied(_in_double(world), frozenset(given))
    varied.run_through([*x, *y, *given])
    J_x, J_y, J_z = (varied.derivatives(nodes) for nodes in (x, y, given))
    if not J_x.numel() or not J_y.numel():
        return 0.0
    kept = _basis(J_z)
    rest_x, rest_y = (_scaled(J - (J @ kept.mT) @ kept, J) for J in (J_x, J_y))
    return float((rest_x @ rest_y.mT).abs().max())


def _basis(J: Tensor) -> Tensor:
    """An orthonormal basis of the rows, `[rank, noise]`."""
    J = J[J.norm(dim=1) > 0]
    if not len(J):
        return J
    _, sizes, rows = torch.linalg.svd(J / J.norm(dim=1, keepdim=True), full_matrices=False)
    kept: Tensor = rows[sizes > RANK * sizes[0]]
    return kept


def _scaled(rest: Tensor, whole: Tensor) -> Tensor:
    """Each row by its length; zero where what is given determines it."""
    left = rest.norm(dim=1, keepdim=True)
    return torch.where(left > LEAST * whole.norm(dim=1, keepdim=True), rest / left, 0.0)


def _in_double(world: GroundModel) -> GroundModel:
    """The same in float64."""

    def double(values: Mapping[K, Tensor]) -> dict[K, Tensor]:
        return {key: value.double() if value.is_floating_point() else value for key, value in values.items()}

    return replace(world, network=world.network.to(torch.float64), given=double(world.inputs), do=double(world.do))


@dataclass
class _Varied:
    """The sentence with noise: `noise` of each root and random node, `told`, what stands for a node that is asked."""

    world: GroundModel
    given: frozenset[int]
    noise: list[Tensor] = field(default_factory=list)
    told: dict[int, Tensor] = field(default_factory=dict)

    def run_through(self, nodes: Sequence[int]) -> None:
        """Give every node above some its value, parents first."""
        states: dict[int, Tensor] = {}
        run = ReferenceRun(self.world, states)
        for node in ancestral_order(self.world.ground, nodes):
            member, kind = self.world.spec(node), _kind(self.world, node)
            if kind == "discrete":
                logits = run.distribution(node).logits  # type: ignore[attr-defined]
                states[node] = logits.argmax()
                self.told[node] = self._noisy(torch.where(torch.isfinite(logits), logits, 0.0))
            elif kind == "continuous":
                normal = normal_of(member, run.distribution(node))
                self.told[node] = run.values[node] = self._noisy(normal.mean, normal.stddev)
            elif kind != "set" and member.tpm.is_index_valued:
                self.told[node] = torch.zeros(0, dtype=torch.float64)  # an id: its noise is that of its vectors
            elif kind != "set" and self._is_root(node, member):
                self._vary(run, node)
            else:
                self.told[node] = run.value(node)

    def _is_root(self, node: int, member: NodeSpec) -> bool:
        """True for a vector that is given, and for one of a word that is made of ids alone."""
        if member.tpm.kind == "input":
            return True
        above = [self.world.spec(parent) for parent in self.world.ground.parents(node)]
        return member.group.word_stack is not None and all(
            m.group.word_stack is None or m.tpm.is_index_valued for m in above
        )

    def _vary(self, run: ReferenceRun, node: int) -> None:
        """A root with its noise, which is that of its ids where it has some; none where these are given."""
        ids = [parent for parent in self.world.ground.parents(node) if self.world.spec(parent).tpm.is_index_valued]
        value = run.value(node)
        if not ids or not self.given.issuperset(ids):
            varied = self._noisy(value)
            for each in ids:
                self.told[each] = torch.cat([self.told[each].reshape(-1), (varied - value.detach()).flatten()])
            value = run.values[node] = varied
        self.told[node] = value

    def _noisy(self, mean: Tensor, sigma: Tensor | float = 1.0) -> Tensor:
        """A value and a noise of its own."""
        self.noise.append(torch.zeros_like(mean, requires_grad=True))
        return mean + sigma * self.noise[-1]

    def derivatives(self, nodes: Sequence[int]) -> Tensor:
        """`J`: the derivatives of the numbers of some nodes by all noise, `[numbers, noise]`."""
        value = torch.cat([torch.zeros(0, dtype=torch.float64), *(self.told[node].flatten() for node in nodes)])
        if not value.requires_grad:
            return torch.zeros(len(value), sum(each.numel() for each in self.noise), dtype=torch.float64)
        eye = torch.eye(len(value), dtype=value.dtype)
        found = torch.autograd.grad(value, self.noise, eye, retain_graph=True, allow_unused=True, is_grads_batched=True)
        rows = zip(found, self.noise, strict=True)
        none = torch.zeros(len(value), 1, dtype=value.dtype)
        return torch.cat([none.expand(-1, z.numel()) if J is None else J.flatten(1) for J, z in rows], 1)

"""Joint questions to a sentence: posteriors of several nodes, log probabilities, samples, and how dependent nodes are.

All are exact. Joint posteriors are products along a chain, `P(a | e) P(b | a, e)`; so are the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer.compiler.module import Module
from bnet_transformer.errors import BNetError, BudgetError, ReadingError
from bnet_transformer.graph import topological_order
from bnet_transformer.inference import exact, ground
from bnet_transformer.reference import ATOL, BUDGET, Run, World

if TYPE_CHECKING:
    import pandas as pd

Seen = Mapping[int, Tensor]


def joint_posterior(
    module: Module, world: World, nodes: Sequence[int], evidence: Seen, budget: int = BUDGET, atol: float = ATOL
) -> Tensor:
    """`P(nodes | evidence)` for discrete nodes: `[*states]`, a dim for each in their order."""
    if len(set(nodes)) < len(nodes):
        raise BNetError("nodes", expected="different nodes", got=", ".join(map(world.ground.name, nodes)))
    sizes = [reference.support(world, node) for node in nodes]
    if len(nodes) > 1 and math.prod(sizes) > budget:
        names = ", ".join(map(world.ground.name, nodes))
        got, allowed = f"{math.prod(sizes)}", "a larger budget=; fewer nodes; sample, which is approximate"
        wanted = f"at most {budget} joint states of {names}"
        raise BudgetError("joint posterior", expected=wanted, got=got, allowed=allowed)
    first, *rest = nodes
    share = ground.posterior(module, world, first, evidence, budget, atol)
    if not rest:
        return share
    told = evidence.get(first)
    states = range(sizes[0]) if told is None or told.is_floating_point() else [int(told)]
    found = share.new_zeros(sizes)
    for state in states:
        if share[state] > 0:
            more = {**evidence, first: torch.tensor(state)} if told is None else evidence
            found[state] = share[state] * joint_posterior(module, world, rest, more, budget, atol)
    return found


def joint_log_evidence(
    module: Module, world: World, evidence: Seen, budget: int = BUDGET, atol: float = ATOL
) -> Tensor:
    """`log P(evidence)`: a number (of a density, where a node is continuous)."""
    if not evidence:
        return torch.zeros((), dtype=torch.float64)
    try:
        found = exact.log_evidence(
            module,
            ground.seen_families(world, evidence),
            ground.counted(world),
            do=ground.set_families(world),
            given={name: value[None] for name, value in world.given.items()},
            budget=budget,
            atol=atol,
        )
    except ReadingError:
        return reference.log_evidence(world, evidence, budget=budget, atol=atol)
    return found.detach()[0].double()


@dataclass(frozen=True)
class Samples:
    """Draws of all random nodes: `states[name]` is `[n]` for a discrete node, `[n, *shape]` for a continuous one."""

    states: dict[str, Tensor] = field(repr=False)
    n: int

    def __getitem__(self, name: str) -> Tensor:
        return self.states[name]

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each draw, a column for each node (for each of its numbers, where it has several)."""
        import pandas as pd

        columns = {}
        for name, drawn in self.states.items():
            if drawn.dim() == 1:
                columns[name] = drawn.numpy()
            else:
                columns |= {f"{name}[{k}]": part.numpy() for k, part in enumerate(drawn.flatten(1).unbind(1))}
        return pd.DataFrame(columns, index=pd.RangeIndex(self.n, name="draw"))

    def _repr_html_(self) -> str:
        told = f"<p>{self.n} draws of {escape(', '.join(self.states))}</p>"
        return f"{told}{self.to_dataframe().head(10).to_html()}"


def sample(module: Module, world: World, evidence: Seen, n: int, seed: int) -> Samples:
    """n draws of every random node given the evidence, parents before children.

    A node above evidence is drawn from its posterior given what was drawn before, every other from its TPM. Draws that
    agree so far are drawn on together.
    """
    generator = torch.Generator().manual_seed(seed)
    random = [node for node in topological_order(world.ground).tolist() if _is_random(world, node)]
    joint_log_evidence(module, world, evidence)
    settled = reference.settling(world, evidence)
    above = set(reference.choices(world, evidence, settled, beyond=True))
    drawn = {node: _empty(world, node, n) for node in random}
    groups: list[tuple[Tensor, dict[int, Tensor]]] = [(torch.arange(n), {})]
    for node in random:
        after: list[tuple[Tensor, dict[int, Tensor]]] = []
        for rows, known in groups:
            if node in settled:
                drawn[node][rows] = settled[node]
                after.append((rows, {**known, node: settled[node]}))
                continue
            if node in above:
                share = ground.posterior(module, world, node, {**evidence, **known})
                states = torch.multinomial(share, len(rows), replacement=True, generator=generator)
            else:
                states = _drawn(Run(world, known), node, len(rows), generator)
            drawn[node][rows] = states
            after += _split(rows, states, known, node, bool(world.ground.children(node)))
        groups = after
    return Samples({world.ground.name(node): value for node, value in drawn.items()}, n)


def _split(
    rows: Tensor, states: Tensor, known: dict[int, Tensor], node: int, read: bool
) -> Iterator[tuple[Tensor, dict[int, Tensor]]]:
    """The draws that go on together: those with one state of the node, or all where nothing reads it."""
    if not read:
        yield rows, known
        return
    for state in torch.unique(states, dim=0):
        same = (states == state).reshape(len(rows), -1).all(1)
        yield rows[same], {**known, node: state}


def _drawn(run: Run, node: int, n: int, generator: torch.Generator) -> Tensor:
    """n draws of a node from its TPM, its parents known."""
    distribution = run.distribution(node)
    if isinstance(distribution, torch.distributions.Categorical):
        return torch.multinomial(distribution.probs, n, replacement=True, generator=generator)
    if isinstance(distribution, torch.distributions.Independent):
        normal = distribution.base_dist
        if isinstance(normal, torch.distributions.Normal):
            noise = torch.randn((n, *normal.mean.shape), generator=generator, dtype=normal.mean.dtype)
            return normal.mean + normal.stddev * noise
    name, kind = run.world.ground.name(node), type(distribution).__name__
    raise ReadingError(name, expected="a Categorical or a Normal to draw from", got=kind, allowed="net.pyro()")


def _empty(world: World, node: int, n: int) -> Tensor:
    member = world.network.members[world.ground.family_of(node).index]
    if member.tpm.kind == "discrete":
        return torch.zeros(n, dtype=torch.long)
    return torch.zeros((n, *member.shape), dtype=world.network.dtype)


def _is_random(world: World, node: int) -> bool:
    member = world.network.members[world.ground.family_of(node).index]
    return member.tpm.kind != "deterministic" and node not in world.do


def dependence(
    world: World, x: Sequence[int], y: Sequence[int], given: Sequence[int], budget: int = BUDGET, atol: float = ATOL
) -> float:
    """The greatest `|P(x, y | given) - P(x | given) P(y | given)|` over all values, by enumeration.

    Values of nodes that are functions of choices count as states: values within `atol` of each other are one. Random
    real nodes have no such states and are refused.
    """
    nodes = [*x, *y, *given]
    free = reference.choices(world, nodes, {}, beyond=True)
    for node in {above for each in nodes for above in reference.pending(world, each, {}, {})}:
        _refuse_real(world, node)
    logs, codes = [], []
    books: list[list[Tensor]] = [[] for _ in nodes]
    for run in reference.runs(world, free, {}, budget):
        logs.append(sum((run.log_prob(node) for node in free), torch.zeros((), dtype=torch.float64)))
        codes.append([_code(book, _state(run, node), atol) for book, node in zip(books, nodes, strict=True)])
    share = torch.stack(logs).exp()
    table = torch.tensor(codes).reshape(len(codes), len(nodes))
    parts = table.split([len(x), len(y), len(given)], dim=1)
    i, j, k = (_numbered(part) for part in parts)
    joint = torch.zeros(int(k.max()) + 1, int(i.max()) + 1, int(j.max()) + 1, dtype=torch.float64)
    joint.index_put_((k, i, j), share, accumulate=True)
    joint = joint[joint.sum((1, 2)) > 0]
    joint = joint / joint.sum((1, 2), keepdim=True)
    return float((joint - joint.sum(2, keepdim=True) * joint.sum(1, keepdim=True)).abs().max())


def _refuse_real(world: World, node: int) -> None:
    member = world.network.members[world.ground.family_of(node).index]
    if member.tpm.kind == "continuous" and node not in world.do:
        raise ReadingError(world.ground.name(node), expected="nodes with states to count", got="a random real one")


def _state(run: Run, node: int) -> Tensor:
    return run.states[node] if node in run.states else run.value(node)


def _numbered(rows: Tensor) -> Tensor:
    """The number of each row among the different ones."""
    if not rows.shape[1]:
        return torch.zeros(len(rows), dtype=torch.long)
    numbers: Tensor = torch.unique(rows, dim=0, return_inverse=True)[1]
    return numbers.reshape(-1)


def _code(book: list[Tensor], value: Tensor, atol: float) -> int:
    """The number of a value in a book of those met so far."""
    for number, other in enumerate(book):
        if bool(((value - other).abs() <= atol).all()):
            return number
    book.append(value)
    return len(book) - 1

"""Reading paths: which words of a slice a later state was read from, along the attention TPMs.

The product of attention TPMs over slices (rollout: Abnar and Zuidema 2020) is exact in an auxiliary Markov chain: from
word i of the last state it goes, slice by slice, to the word that i reads. It is no posterior of the bnet. Under a
selector the products are averaged, `sum_c P(c | e) prod_t A_t(c)`, never the matrices first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bnet_transformer import asking, reference
from bnet_transformer.compiler.module import Module
from bnet_transformer.errors import BNetError, number, one_of, whole
from bnet_transformer.inference.answers import Answers
from bnet_transformer.inference.joint import joint_posterior
from bnet_transformer.reference import BUDGET, World

if TYPE_CHECKING:
    import pandas as pd

METHODS = ("rollout", "flow")


@dataclass(frozen=True)
class Path:
    """A path of the chain: its words from the last state down to the first, the choices with which, its probability."""

    words: tuple[int, ...]
    tokens: tuple[str, ...]
    choices: dict[str, int]
    probability: float

    def __str__(self) -> str:
        with_ = "".join(f", {name}={state}" for name, state in self.choices.items())
        return f"{' <- '.join(self.tokens)} ({self.probability:.3f}{with_})"


@dataclass(frozen=True)
class Reads:
    """`P(source word | output word)` in the chain of attention TPMs: `matrix[i, j]`.

    `attention[s, t]` is the TPM of slice `slices[t]` under state s of the open choices (`P(j | i)`, heads averaged
    unless one was named), `chain` the same with the residual share, `weights[s]` the probability of that state.
    """

    matrix: Tensor
    attention: Tensor = field(repr=False)
    weights: Tensor = field(repr=False)
    choices: tuple[dict[str, int], ...] = field(repr=False)
    tokens: tuple[str, ...]
    slices: tuple[int, ...]
    residual: float
    head: str
    method: str

    @property
    def chain(self) -> Tensor:
        """The transitions of the chain, `[state, slice, word, word]`: `(1 - residual) P(j | i) + residual 1(j = i)`."""
        return with_residual(self.attention, self.residual)

    @property
    def entropies(self) -> Tensor:
        """The entropy of each attention TPM in nats, `[slice, word]`, averaged over the choices."""
        return torch.einsum("s,stn->tn", self.weights, torch.special.entr(self.attention).sum(-1))

    def paths(self, word: int, count: int = 1) -> tuple[Path, ...]:
        """The most probable paths from a word of the last state, with their choices (Viterbi)."""
        n, count = len(self.tokens), whole("count", count)
        if whole("word", word, least=0) >= n:
            raise BNetError("word", expected=f"a word from 0 to {n - 1}", got=word)
        found = []
        for share, steps, choices in zip(self.weights.tolist(), self.chain, self.choices, strict=True):
            for probability, words in _viterbi(steps, word, count):
                tokens = tuple(self.tokens[i] for i in words)
                found.append(Path(words, tokens, choices, share * probability))
        return tuple(sorted(found, key=lambda path: -path.probability)[:count])

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each output word and each source word."""
        import pandas as pd

        rows = [
            {"output": i, "output_token": self.tokens[i], "source": j, "source_token": self.tokens[j], "share": share}
            for i, row in enumerate(self.matrix.tolist())
            for j, share in enumerate(row)
        ]
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(token)}</th>" for token in self.tokens)
        rows = "".join(
            f"<tr><th>{escape(token)}</th>" + "".join(f"<td>{share:.3f}</td>" for share in row) + "</tr>"
            for token, row in zip(self.tokens, self.matrix.tolist(), strict=True)
        )
        told = f"{self.method} over slices {list(self.slices)}, residual share {self.residual:g}, {self.head}"
        return f"<p>{escape(told)}</p><table><tr><th></th>{head}</tr>{rows}</table>"


def reads(
    module: Module,
    world: World,
    evidence: Mapping[int, Tensor],
    tokens: Sequence[str],
    slices: Sequence[int],
    *,
    role: str | None,
    residual: float,
    head: int | None,
    method: str,
    budget: int = BUDGET,
) -> Reads:
    """Which word of the first state of these slices each word of their last state was read from."""
    one_of("method", method, METHODS)
    if not 0 <= number("residual", residual) <= 1:
        raise BNetError("residual", expected="a share from 0 to 1", got=residual)
    if list(slices) != list(range(min(slices), max(slices) + 1)):
        raise BNetError("slices", expected="slices that follow one another", got=list(slices))
    tables, weights, choices = [], [], []
    for chosen, share in settled_choices(module, world, evidence, slices, role, budget):
        answers = Answers(module, replace(world, do={**world.do, **chosen}), {})
        tables.append(torch.stack([_square(world, answers.attention(t, role), t, head) for t in slices]))
        weights.append(share)
        choices.append({world.ground.name(node): int(state) for node, state in chosen.items()})
    attention, shares = torch.stack(tables).double(), torch.tensor(weights, dtype=torch.float64)
    through: Callable[[Tensor], Tensor] = product if method == "rollout" else max_flow
    each = torch.stack([through(steps) for steps in with_residual(attention, residual)])
    told = "one head" if head is None and "head" not in world.network.graph.sizes else "the mean over heads"
    return Reads(
        torch.einsum("s,sij->ij", shares, each),
        attention,
        shares,
        tuple(choices),
        tuple(tokens),
        tuple(slices),
        float(residual),
        told if head is None else f"head {head}",
        method,
    )


def settled_choices(
    module: Module,
    world: World,
    evidence: Mapping[int, Tensor],
    slices: Sequence[int],
    role: str | None,
    budget: int,
) -> Iterator[tuple[dict[int, Tensor], float]]:
    """The joint states of the open choices that decide what is read, each with its posterior probability."""
    free: list[int] = []
    families = [asking.reader(world, t, role).family for t in slices]
    if _choice_above(world, {family.index for family in families}):
        nodes = [node for family in families for node in world.ground.nodes(family).tolist()]
        above = [parent for node in nodes for parent in reference.reading_parents(world, node)]
        free = reference.choices(world, above, {})
    if not free:
        yield {}, 1.0
        return
    share = joint_posterior(module, world, free, evidence, budget)
    for states in itertools.product(*map(range, share.shape)):
        if share[states] > 0:
            yield {node: torch.tensor(state) for node, state in zip(free, states, strict=True)}, float(share[states])


def _choice_above(world: World, families: set[int]) -> bool:
    """True where a discrete family stands above some families."""
    found: set[int] = set()
    stack = list(families)
    while stack:
        above = {bundle.parent for bundle in world.network.graph.into[stack.pop()]} - found
        found |= above
        stack.extend(above)
    return any(world.network.members[index].tpm.kind == "discrete" for index in found)


def with_residual(attention: Tensor, share: float) -> Tensor:
    """`(1 - share) P(j | i) + share 1(j = i)`."""
    return (1 - share) * attention + share * torch.eye(attention.shape[-1], dtype=attention.dtype)


def product(steps: Tensor) -> Tensor:
    """`A_T ... A_1 A_0` of `[slice, word, word]`."""
    found = steps[0]
    for step in steps[1:]:
        found = step @ found
    return found


def max_flow(steps: Tensor) -> Tensor:
    """For each output word and source word, the greatest flow between them where transitions are capacities."""
    import networkx as nx

    count, n, _ = steps.shape
    graph = nx.DiGraph()
    for t, step in enumerate(steps.tolist()):
        for i, j in itertools.product(range(n), range(n)):
            if step[i][j] > 0:
                graph.add_edge((t + 1, i), (t, j), capacity=step[i][j])
    found = torch.zeros(n, n, dtype=steps.dtype)
    for i, j in itertools.product(range(n), range(n)):
        if graph.has_node((count, i)) and graph.has_node((0, j)):
            found[i, j] = nx.maximum_flow_value(graph, (count, i), (0, j))
    return found


def _viterbi(steps: Tensor, word: int, count: int) -> list[tuple[float, tuple[int, ...]]]:
    """The most probable paths from a word down through all slices: probability and words."""
    best: dict[int, list[tuple[float, tuple[int, ...]]]] = {word: [(1.0, (word,))]}
    for step in reversed(steps.tolist()):
        after: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
        for i, paths in best.items():
            for j, share in enumerate(step[i]):
                if share > 0:
                    after.setdefault(j, []).extend((p * share, (*words, j)) for p, words in paths)
        best = {j: sorted(paths, key=lambda path: -path[0])[:count] for j, paths in after.items()}
    return sorted((path for paths in best.values() for path in paths), key=lambda path: -path[0])[:count]


def _square(world: World, reading: Tensor, slice_: int, head: int | None) -> Tensor:
    """`P(j | i)` of one slice, `[word, word]`: of one head, or the mean over the plates."""
    n = reading.shape[-1]
    if reading.shape[-2] != n:
        got = f"{reading.shape[-2]} words that read {n}"
        raise BNetError(f"slice {slice_}", expected="words that read their own stack", got=got, allowed="role=")
    lead = reading.reshape(-1, n, n)
    if head is None:
        return lead.mean(0)
    heads = world.network.graph.sizes.get("head")
    if heads is None or len(lead) != heads:
        raise BNetError("head", expected="a net with a plate of heads", got="one without", allowed="evidence on c")
    if whole("head", head, least=0) >= heads:
        raise BNetError("head", expected=f"a head from 0 to {heads - 1}", got=head)
    return lead[head]

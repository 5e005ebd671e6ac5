"""What users hold: `BNet`, a net, and `Sentence`, the bnet of one sentence. One call for each method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from bnet_transformer import asking, export, files, graph, inference, reference
from bnet_transformer.equations import Equations, equations
from bnet_transformer.errors import BNetError, EvidenceError, mapping, number, one_of, whole
from bnet_transformer.graph import Ground, Quotient, Selection
from bnet_transformer.intake import Intake, sentence_to_tensors, value_of
from bnet_transformer.network import Declaration, Network, declare

if TYPE_CHECKING:
    import networkx as nx
    from pgmpy.models import DiscreteBayesianNetwork

    from bnet_transformer.compiler import Module
    from bnet_transformer.cost import Cost
    from bnet_transformer.pyro_reading import PyroModel
    from bnet_transformer.training import Generated


class BNet:
    """A net: one declaration, its parameters, and every reading of them.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(dim=8, slices=2, heads=4)
    >>> net.sentence("the cat sat")["x_2_1"].shape          # for each state of c
    torch.Size([4, 8])
    """

    def __init__(self, declaration: Declaration | Network, *, seed: int = 0) -> None:
        if not isinstance(declaration, Declaration | Network):
            raise BNetError("BNet", expected="a Declaration", got=declaration)
        self.network = declaration if isinstance(declaration, Network) else declare(declaration, seed=_seed(seed))

    @property
    def declaration(self) -> Declaration:
        """The declaration that everything else is a reading of."""
        return self.network.declaration

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameter store: a tensor for each name, such as `W_q_0.values` and `c.logits`."""
        return MappingProxyType(dict(self.network.parameters))

    def replace(self, parameters: Mapping[str, Tensor]) -> BNet:
        """The same net with other values for some parameters."""
        return BNet(self.network.with_parameters(parameters))

    def to(self, dtype: torch.dtype) -> BNet:
        """The same net in another floating type."""
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise BNetError("dtype", expected="a floating torch.dtype", got=dtype)
        moved = {name: value.to(dtype) for name, value in self.network.parameters.items()}
        return BNet(replace(self.network.with_parameters(moved), floating=dtype))

    def check(self) -> bool:
        """True, or the error that lists every fault of the declaration and the parameters."""
        declare(self.declaration, parameters=self.network.parameters)
        return True

    def graph(self) -> nx.MultiDiGraph:
        """The folded graph: one node for each template and slice, its plates as attributes."""
        return export.folded_to_networkx(self.network)

    def equations(self, form: str = "word") -> Equations:
        """The structural equations and TPMs in LaTeX; `form` is `word`, `row`, `column` or `einstein`."""
        return equations(self.network, form)

    def sentence(
        self, sentence: object = None, *, x: object = None, given: Mapping[str, object] | None = None
    ) -> Sentence:
        """The bnet of a sentence: text, a list of words, ids, or vectors `x=` of shape `[word, dim]`.

        A net with several stacks takes a mapping from stack. `given` fills further nodes that a declaration gives.
        """
        return Sentence(self, sentence_to_tensors(self.network, sentence, x, given))

    def module(self) -> Module:
        """The compiled net: an `nn.Module` in batched tensor operations.

        >>> import bnet_transformer as bt
        >>> module = bt.bayesuvius(dim=8, heads=4).module()
        >>> module(torch.zeros(2, 5, 8)).shape                  # [states of c, batch, word, dim]
        torch.Size([4, 2, 5, 8])
        """
        from bnet_transformer.compiler import Module

        return Module(self.network)

    def pyro(self) -> PyroModel:
        """The net as a Pyro model, `model(x, y)`: plates, and `Categorical` sites that can be enumerated."""
        from bnet_transformer.pyro_reading import pyro_model

        return pyro_model(self.network)

    def generate(self, prompt: object = None, **options: Any) -> Generated:
        """New words after each prompt, chosen by `method="greedy"`, `"beam"` or `"sample"`, with k and v kept.

        The options are those of `training.generate`; text, ids, an array, or a list of these; `start=` and `stop=` are
        words.
        """
        from bnet_transformer.training import generate

        return generate(self.network, prompt, **options)

    @cached_property
    def _evaluated(self) -> Module:
        """The compiled net that answers for its sentences."""
        return self.module().eval()

    def cost(self, words: int | Mapping[str, int], *, batch: int = 1, want: Sequence[str] | None = None) -> Cost:
        """What a forward pass of `module()` costs for sentences of so many words: parameters, FLOPs, bytes, paths.

        `words` is one number, or one for each stack; `want` names families as `module()` has it.

        >>> import bnet_transformer as bt
        >>> bt.bayesuvius(dim=8).cost(words=6).order
        'O(n^2 d |c| + n d^2 |c|)'
        """
        from bnet_transformer.cost import cost

        return cost(self.network, words, batch, want)

    def save(self, path: str | Path) -> None:
        """Write the net to one safetensors file: its parameters, and its declaration as versioned JSON."""
        files.save(self.network, path)

    def __repr__(self) -> str:
        slices = ", ".join(f"{s.name or 'slices'}={s.slices}" for s in self.declaration.stacks)
        count = sum(p.numel() for p in self.network.parameters.values())
        families = len(self.network.graph.families)
        return f"<BNet {self.declaration.name}: {slices}, {families} families of nodes, {count:,} parameters>"


class Sentence:
    """The bnet of one sentence: ground, lazy, evaluated on demand.

    Nodes have names (`q_0_2`: slice 0, word 2); `s[name]` is a value, `s.tpm(name)` a distribution. `do` and `observe`
    give a new sentence.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=8).sentence("the cat sat")
    >>> s.parents("q_0_2"), s.do(c=1)["x_1_0"].shape
    (['W_q_0', 'x_0_2'], torch.Size([8]))
    """

    def __init__(
        self,
        net: BNet,
        intake: Intake,
        done: Mapping[int, Tensor] | None = None,
        seen: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.net = net
        self._intake = intake
        self._done = dict(done or {})
        self._seen = dict(seen or {})

    @cached_property
    def ground(self) -> Ground:
        """The ground graph on integers, after surgery: counts, arrow arrays, names."""
        return Ground(self.net.network.graph, self._intake.words, self._done)

    @cached_property
    def _world(self) -> reference.World:
        return reference.World(self.net.network, self.ground, self._intake.given, self._done)

    @property
    def words(self) -> tuple[str, ...]:
        """The words; with several stacks, those of all stacks in order."""
        return tuple(token for tokens in self._intake.tokens.values() for token in tokens)

    # values and distributions

    def __getitem__(self, name: str) -> Tensor:
        """The value of a node: `[*states, *shape]`, with a dim for each open choice that decides it (`c` first)."""
        return reference.values(self._world, self.ground.id(name), self._seen)

    def tpm(self, name: str) -> Distribution:
        """The distribution of a node given its parents' values, for each state of the open choices that decide them."""
        return asking.distribution(self._world, self.ground.id(name), self._seen)

    def attention(self, slice: int, *, role: str | None = None) -> Tensor:
        """The attention TPMs of a slice, `P(j | i)`: `[*states, *plates, word, word]`, zero where i cannot read j.

        `role` names the node that reads, where a slice has several.
        """
        return asking.attention(self._world, slice, role, self._seen)

    def posterior(
        self,
        name: str,
        evidence: Mapping[str, object] | None = None,
        *,
        budget: int = reference.BUDGET,
        atol: float = reference.ATOL,
    ) -> Tensor:
        """`P(node | evidence)` for a discrete node: `[states]`; what the sentence observes counts as well.

        Exact, over at most `budget` joint states: of the choices that one node hangs on, which are eliminated, or of
        all, where choices of words meet. Evidence on a node that is a function of its parents must be reproduced
        within `atol`.
        """
        node = self.ground.id(name)
        seen = self._with(mapping("evidence", evidence))._seen
        asking.must_be_discrete(self._world, node)
        module, limit = self.net._evaluated, whole("budget", budget)
        return inference.ground.posterior(module, self._world, node, seen, limit, number("atol", atol))

    # a sentence like this one

    def do(self, nodes: Mapping[str, object] | None = None, /, **named: object) -> Sentence:
        """A new sentence in which nodes are set: their arrows from parents go, what descends is computed again."""
        wanted = _once("do", mapping("do", nodes), named)
        ids = {self.ground.id(name): value for name, value in wanted.items()}
        for node in ids:
            if node in self._seen:
                raise EvidenceError(self.ground.name(node), expected="do or evidence on a node, not both", got="both")
        done = {node: value_of(self._world, node, value, evidence=False) for node, value in ids.items()}
        return Sentence(self.net, self._intake, {**self._done, **done}, self._seen)

    def observe(self, nodes: Mapping[str, object] | None = None, /, **named: object) -> Sentence:
        """A new sentence in which nodes are seen to have a value: evidence, which changes no arrow."""
        return self._with(_once("observe", mapping("observe", nodes), named))

    def _with(self, evidence: Mapping[str, object]) -> Sentence:
        ids = {self.ground.id(name): value for name, value in evidence.items()}
        for node in ids:
            if node in self._done:
                raise EvidenceError(self.ground.name(node), expected="do or evidence on a node, not both", got="both")
        seen = {node: value_of(self._world, node, value, evidence=True) for node, value in ids.items()}
        for node, value in seen.items():
            if node in self._seen and not torch.equal(value, self._seen[node]):
                got = f"{value.tolist()} beside {self._seen[node].tolist()}"
                raise EvidenceError(self.ground.name(node), expected="one piece of evidence for a node", got=got)
        return Sentence(self.net, self._intake, self._done, {**self._seen, **seen})

    # structure

    def parents(self, name: str) -> list[str]:
        """The nodes with an arrow into this one."""
        return self._named(self.ground.parents(self.ground.id(name)))

    def children(self, name: str) -> list[str]:
        """The nodes to which this one has an arrow."""
        return self._named(self.ground.children(self.ground.id(name)))

    def ancestors(self, *names: str) -> list[str]:
        """All from which a path of arrows leads to one of these nodes."""
        return self._named(graph.ancestors(self.ground, map(self.ground.id, names)))

    def descendants(self, *names: str) -> list[str]:
        """All to which a path of arrows leads from one of these nodes."""
        return self._named(graph.descendants(self.ground, map(self.ground.id, names)))

    def blanket(self, name: str) -> list[str]:
        """The Markov blanket: parents, children, and the children's other parents."""
        return self._named(graph.blanket(self.ground, self.ground.id(name)))

    def topological_order(self) -> list[str]:
        """All nodes, parents before children."""
        return self._named(graph.topological_order(self.ground).tolist())

    def shrink(self, boxes: Mapping[str, str] | Callable[[str], str], *, weights: bool = False) -> Quotient:
        """The graph with each box of nodes shrunk to one; `boxes` maps a node's name to its box."""
        one_of("weights", weights, (True, False))
        return graph.shrink(self.ground, boxes, Selection(weights=weights))

    def _named(self, nodes: Sequence[int]) -> list[str]:
        return [self.ground.name(node) for node in nodes]

    def graph(
        self,
        *,
        weights: bool = True,
        slices: int | Collection[int] | None = None,
        words: object = None,
        heads: int | Collection[int] | None = None,
        attention: bool = False,
        min_weight: float | None = None,
        limit: int = export.LIMIT,
    ) -> nx.DiGraph:
        """The ground graph: one node for each word, named by the naming law, with role, slice, head, word, kind, ...

        `weights=False` leaves out selectors and weights; `slices`, `words` and `heads` keep a part. With `attention`
        the arrows that are read carry `weight`, `P(j | i)` (averaged over the posterior of what is open);
        `min_weight` drops the weaker ones. Past `limit` arrows it refuses with the count.
        """
        one_of("weights", weights, (True, False))
        selection = asking.selection(self._world, self._intake.tokens, weights, slices, words, heads)
        export.check_size(self.ground, selection, limit)
        weighed = None
        if min_weight is not None:
            number("min_weight", min_weight)
        if attention or min_weight is not None:
            weighed = asking.arrow_weights(self._world, selection, self._seen)
        return export.ground_to_networkx(
            self.net.network,
            self.ground,
            selection=selection,
            tokens=self._intake.tokens,
            observed=set(self._seen),
            weights=weighed,
            min_weight=min_weight,
            limit=limit,
        )

    def draw(self, path: str | Path, **options: Any) -> None:
        """Write the bnet of the sentence; the suffix says how. `options` are those of `graph`."""
        export.write(path, self._exportable(options))

    def _exportable(self, options: Mapping[str, Any]) -> export.Exportable:
        return export.Exportable(graph=lambda: self.graph(**options), world=self._world, evidence=self._seen)

    def to_pgmpy(self, *, limit: int = 10_000_000, runs: int = 2**16) -> DiscreteBayesianNetwork:
        """The discrete part, given the words, as a pgmpy network, of at most `limit` table entries."""
        return export.to_pgmpy(self._world, evidence=self._seen, limit=limit, runs=runs)

    def to_bif(self, *, limit: int = 10_000_000, runs: int = 2**16) -> str:
        """The discrete part, given the words, in the BIF format."""
        return export.to_bif(self._world, evidence=self._seen, limit=limit, runs=runs)

    def __repr__(self) -> str:
        said = " | ".join(" ".join(tokens) for tokens in self._intake.tokens.values())
        said = said if len(said) <= 60 else said[:59] + "…"
        counts = f"{len(self.ground):,} nodes, {self.ground.count_arrows():,} arrows"
        extra = "".join(
            f", {what} {', '.join(self._named(list(nodes)))}"
            for what, nodes in (("do", self._done), ("seen", self._seen))
            if nodes
        )
        return f"<Sentence {said!r}: {counts}{extra}>"


def load(path: str | Path, *, trust: Collection[str] | bool = ()) -> BNet:
    """Read a net that `save` wrote. A TPM class of somebody else's is imported only if `trust` names it."""
    return BNet(files.load(path, trust=trust))


def _once(what: str, nodes: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Nodes told by a mapping and by keyword, none by both."""
    for name in nodes:
        if name in named:
            raise EvidenceError(f"{what} of {name}", expected="one value", got="two, in the mapping and by keyword")
    return {**nodes, **named}


def _seed(seed: object) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise BNetError("seed", expected="a whole number", got=seed)
    return seed

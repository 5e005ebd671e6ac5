"""One run at a time: what a sweep asks where it cannot be computed for many cells at once.

A word after another (recurrence), choices that hang on what is set, choices that meet: exact, by the readings that
answer for a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.errors import EvidenceError
from bnet_transformer.graph import ancestors
from bnet_transformer.inference.joint_posterior import joint_log_probs, joint_posterior
from bnet_transformer.inference.node_queries import NodeEvaluator
from bnet_transformer.inference.query import Query
from bnet_transformer.interventions.sweeps.cell_spec import Cells
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.reference import AttentionRow, GroundModel, find_open_choices, locate_node


def outcomes(module: CompiledModule, world: GroundModel, nodes: Sequence[int]) -> list[Tensor]:
    """`log P` of a discrete node, the mean of a continuous one, the value of any other, averaged over what is open."""
    return [_outcome(module, world, node) for node in nodes]


def stacked(nodes: Sequence[int], rows: Sequence[Sequence[Sequence[Tensor]]]) -> dict[int, Tensor]:
    """From outcomes by cell, example and node: `[cell, example, *shape]` of each node."""
    return {
        node: torch.stack([torch.stack([each[k] for each in examples]) for examples in rows])
        for k, node in enumerate(nodes)
    }


def _outcome(module: CompiledModule, world: GroundModel, node: int) -> Tensor:
    member = locate_node(world, node)[0]
    if node in world.do:
        value: Tensor = world.do[node]
        return value
    world = _without_batched_values(world, node)
    answers = NodeEvaluator(module, world, {})
    if member.tpm.kind == "discrete":
        if member.parents and not find_open_choices(world, reference.parents(world, node), {}):
            own: Tensor = answers.distribution(node).logits.double()  # type: ignore[attr-defined]
            return own
        return joint_posterior(Query(module, world, nodes=(node,))).log()
    if not member.tpm.is_random:
        return _averaged(module, world, [node], answers.value(node), len(member.shape))
    mean = answers.distribution(node).mean
    return _averaged(module, world, reference.parents(world, node), mean, len(member.shape))


def _without_batched_values(world: GroundModel, node: int) -> GroundModel:
    """The sentence without values that have a row for each state of an open choice.

    Such a value is set below a choice that decides no outcome, so it is not above the node that is asked for.
    """
    batched = {
        n for n, v in world.do.items() if v.is_floating_point() and v.dim() > len(locate_node(world, n)[0].shape)
    }
    if not batched or batched & {*ancestors(world.ground, [node])}:
        return world
    return replace(world, do={n: v for n, v in world.do.items() if n not in batched})


def _averaged(module: CompiledModule, world: GroundModel, nodes: Sequence[int], value: Tensor, own: int) -> Tensor:
    """A value `[*states, *shape]` over the choices that decide it, as they are distributed."""
    free = find_open_choices(world, nodes, {})
    if not free or value.dim() == own:
        return value
    share = joint_log_probs(Query(module, world, nodes=tuple(free))).exp().to(value.dtype)
    found: Tensor = torch.tensordot(share, value, share.dim())
    return found


@dataclass
class Cases:
    """The sentences that cells make of the corrupt ones, each by surgery, and what some nodes come to in these."""

    clean: Examples | None
    corrupt: Examples
    cells: Cells
    nodes: Sequence[int]
    values: Callable[[int, int], Tensor] | None = None
    _answers: dict[tuple[bool, int], NodeEvaluator] = field(default_factory=dict)
    _base: dict[int, list[Tensor]] = field(default_factory=dict)

    def outcomes(self, cell: int) -> list[list[Tensor]]:
        """The outcomes with a cell set, example by example; where it sets what is there anyway, those of the base."""
        found = []
        for n, world in enumerate(self.corrupt.worlds):
            done = {**self._entries(cell, n), **self._paths(cell, n)}
            changes = any(
                isinstance(v, AttentionRow) or not torch.equal(v, self._found(False, n, k)) for k, v in done.items()
            )
            if changes or n not in self._base:
                made = outcomes(self.corrupt.module, world.surgery(done) if changes else world, self.nodes)
                if not changes:
                    self._base[n] = made
            found.append(made if changes else self._base[n])
        return found

    def _entries(self, cell: int, n: int) -> dict[int, Tensor | AttentionRow]:
        found: dict[int, Tensor | AttentionRow] = {}
        for entries in self.cells.entries:
            offset = int(self.corrupt.world.ground.offsets[entries.family])
            for k in (entries.cell == cell).nonzero()[0]:
                node = offset + int(entries.node[k])
                if not entries.rows:
                    found[node] = self._value(True, n, node) if self.values is None else self.values(n, node)
                elif entries.read is None:
                    found[node] = AttentionRow(self._row(True, n, node))
                else:
                    before = found[node].weights if node in found else self._row(False, n, node)  # type: ignore[union-attr]
                    row, j = before.clone(), int(entries.read[k])
                    row[j] = self._row(True, n, node)[j]
                    found[node] = AttentionRow(row)
        return found

    def _paths(self, cell: int, n: int) -> dict[int, Tensor]:
        ends: dict[int, list[tuple[int, ...]]] = {}
        for path in self.cells.paths:
            if path.cell == cell:
                ends.setdefault(path.nodes[-1], []).append(path.nodes)
        found = {}
        for end, paths in ends.items():
            sent = {path[0]: self._value(True, n, path[0]) for path in paths}
            for step in range(1, len(paths[0])):
                child = paths[0][step]
                sent = {child: self._made(n, child, sent)}
            found[end] = sent[end]
        return found

    def _made(self, n: int, child: int, sent: dict[int, Tensor]) -> Tensor:
        """What a node comes to when its arrows from some parents carry what is sent."""
        world = self.corrupt.worlds[n]
        others = [p for p in reference.parents(world, child) if not locate_node(world, p)[0].tpm.is_random]
        told = {parent: self._value(False, n, parent) for parent in others if parent not in sent}
        return NodeEvaluator(self.corrupt.module, world.surgery({**told, **sent}), {}).value(child)

    def _of(self, clean: bool, n: int) -> NodeEvaluator:
        if (clean, n) not in self._answers:
            examples = self.clean if clean else self.corrupt
            assert examples is not None
            self._answers[clean, n] = NodeEvaluator(examples.module, examples.worlds[n], {})
        return self._answers[clean, n]

    def _found(self, clean: bool, n: int, node: int) -> Tensor:
        """The value of a node in a run as it is; it may have one for each state of a choice."""
        answers = self._of(clean, n)
        return answers.model.do[node] if node in answers.model.do else answers.value(node)

    def _value(self, clean: bool, n: int, node: int) -> Tensor:
        found = self._found(clean, n, node)
        if found.is_floating_point() and tuple(found.shape) != locate_node(self.corrupt.world, node)[0].shape:
            name = self.corrupt.world.ground.name(node)
            allowed = "do() on the choices that decide it, in both runs"
            raise EvidenceError(name, expected="one value", actual="one for each state of a choice", allowed=allowed)
        return found

    def _row(self, clean: bool, n: int, node: int) -> Tensor:
        answers = self._of(clean, n)
        member, index = locate_node(answers.model, node)
        assert member.group.step is not None
        table = answers.attention(member.group.step, member.group.stem)
        return table[index]

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
from bnet_transformer.inference.node_evaluator import NodeEvaluator
from bnet_transformer.inference.query import Query
from bnet_transformer.interventions.sweeps.cell_spec import PatchCells
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.reference import AttentionRow, GroundModel, find_open_choices, locate_node


def compute_outcomes(module: CompiledModule, model: GroundModel, nodes: Sequence[int]) -> list[Tensor]:
    """`log P` of a discrete node, the mean of a continuous one, the value of any other, averaged over what is open."""
    return [_compute_outcome(module, model, node) for node in nodes]


def stack_outcomes(nodes: Sequence[int], outcomes: Sequence[Sequence[Sequence[Tensor]]]) -> dict[int, Tensor]:
    """From outcomes by cell, example and node: `[cell, example, *shape]` of each node."""
    return {
        node: torch.stack([torch.stack([each[k] for each in examples]) for examples in outcomes])
        for k, node in enumerate(nodes)
    }


def _compute_outcome(module: CompiledModule, model: GroundModel, node: int) -> Tensor:
    member = locate_node(model, node)[0]
    if node in model.do:
        value: Tensor = model.do[node]
        return value
    model = _drop_batched_values(model, node)
    answers = NodeEvaluator(module, model, {})
    if member.tpm.kind == "discrete":
        if member.parents and not find_open_choices(model, reference.parents(model, node), {}):
            own: Tensor = answers.distribution(node).logits.double()  # type: ignore[attr-defined]
            return own
        return joint_posterior(Query(module, model, nodes=(node,))).log()
    if not member.tpm.is_random:
        return _average_over_choices(module, model, [node], answers.value(node), len(member.shape))
    mean = answers.distribution(node).mean
    return _average_over_choices(module, model, reference.parents(model, node), mean, len(member.shape))


def _drop_batched_values(model: GroundModel, node: int) -> GroundModel:
    """The sentence without values that have a row for each state of an open choice.

    Such a value is set below a choice that decides no outcome, so it is not above the node that is asked for.
    """
    batched = {
        n for n, v in model.do.items() if v.is_floating_point() and v.dim() > len(locate_node(model, n)[0].shape)
    }
    if not batched or batched & {*ancestors(model.ground, [node])}:
        return model
    return replace(model, do={n: v for n, v in model.do.items() if n not in batched})


def _average_over_choices(
    module: CompiledModule, model: GroundModel, nodes: Sequence[int], value: Tensor, event_dim: int
) -> Tensor:
    """A value `[*states, *shape]` over the choices that decide it, as they are distributed."""
    free = find_open_choices(model, nodes, {})
    if not free or value.dim() == event_dim:
        return value
    share = joint_log_probs(Query(module, model, nodes=tuple(free))).exp().to(value.dtype)
    found: Tensor = torch.tensordot(share, value, share.dim())
    return found


@dataclass
class SequentialSweep:
    """The sentences that cells make of the corrupt ones, each by surgery, and what some nodes come to in these."""

    clean: Examples | None
    corrupt: Examples
    cells: PatchCells
    outcome_nodes: Sequence[int]
    ablation_value: Callable[[int, int], Tensor] | None = None
    _answers: dict[tuple[bool, int], NodeEvaluator] = field(default_factory=dict)
    _base_outcomes: dict[int, list[Tensor]] = field(default_factory=dict)

    def compute_outcomes(self, cell: int) -> list[list[Tensor]]:
        """The outcomes with a cell set, example by example; where it sets what is there anyway, those of the base."""
        found = []
        for n, world in enumerate(self.corrupt.models):
            done = {**self._resolve_sites(cell, n), **self._resolve_paths(cell, n)}
            changes = any(
                isinstance(v, AttentionRow) or not torch.equal(v, self._get_value(False, n, k)) for k, v in done.items()
            )
            if changes or n not in self._base_outcomes:
                made = compute_outcomes(
                    self.corrupt.module, world.surgery(done) if changes else world, self.outcome_nodes
                )
                if not changes:
                    self._base_outcomes[n] = made
            found.append(made if changes else self._base_outcomes[n])
        return found

    def _resolve_sites(self, cell: int, n: int) -> dict[int, Tensor | AttentionRow]:
        found: dict[int, Tensor | AttentionRow] = {}
        for entries in self.cells.sites:
            offset = int(self.corrupt.model.ground.offsets[entries.group])
            for k in (entries.cells == cell).nonzero()[0]:
                node = offset + int(entries.nodes[k])
                if not entries.is_attention:
                    found[node] = (
                        self._get_single_value(True, n, node)
                        if self.ablation_value is None
                        else self.ablation_value(n, node)
                    )
                elif entries.read_words is None:
                    found[node] = AttentionRow(self._get_attention_row(True, n, node))
                else:
                    before = found[node].weights if node in found else self._get_attention_row(False, n, node)  # type: ignore[union-attr]
                    row, j = before.clone(), int(entries.read_words[k])
                    row[j] = self._get_attention_row(True, n, node)[j]
                    found[node] = AttentionRow(row)
        return found

    def _resolve_paths(self, cell: int, n: int) -> dict[int, Tensor]:
        ends: dict[int, list[tuple[int, ...]]] = {}
        for path in self.cells.paths:
            if path.cell == cell:
                ends.setdefault(path.nodes[-1], []).append(path.nodes)
        found = {}
        for end, paths in ends.items():
            sent = {path[0]: self._get_single_value(True, n, path[0]) for path in paths}
            for step in range(1, len(paths[0])):
                child = paths[0][step]
                sent = {child: self._compute_child(n, child, sent)}
            found[end] = sent[end]
        return found

    def _compute_child(self, n: int, child: int, parent_values: dict[int, Tensor]) -> Tensor:
        """What a node comes to when its arrows from some parents carry what is sent."""
        world = self.corrupt.models[n]
        others = [p for p in reference.parents(world, child) if not locate_node(world, p)[0].tpm.is_random]
        told = {parent: self._get_single_value(False, n, parent) for parent in others if parent not in parent_values}
        return NodeEvaluator(self.corrupt.module, world.surgery({**told, **parent_values}), {}).value(child)

    def _get_answers(self, is_clean: bool, n: int) -> NodeEvaluator:
        if (is_clean, n) not in self._answers:
            examples = self.clean if is_clean else self.corrupt
            assert examples is not None
            self._answers[is_clean, n] = NodeEvaluator(examples.module, examples.models[n], {})
        return self._answers[is_clean, n]

    def _get_value(self, is_clean: bool, n: int, node: int) -> Tensor:
        """The value of a node in a run as it is; it may have one for each state of a choice."""
        answers = self._get_answers(is_clean, n)
        return answers.model.do[node] if node in answers.model.do else answers.value(node)

    def _get_single_value(self, is_clean: bool, n: int, node: int) -> Tensor:
        found = self._get_value(is_clean, n, node)
        if found.is_floating_point() and tuple(found.shape) != locate_node(self.corrupt.model, node)[0].shape:
            name = self.corrupt.model.ground.name(node)
            allowed = "do() on the choices that decide it, in both runs"
            raise EvidenceError(name, expected="one value", actual="one for each state of a choice", allowed=allowed)
        return found

    def _get_attention_row(self, is_clean: bool, n: int, node: int) -> Tensor:
        answers = self._get_answers(is_clean, n)
        member, index = locate_node(answers.model, node)
        assert member.group.step is not None
        table = answers.attention(member.group.step, member.group.stem)
        return table[index]

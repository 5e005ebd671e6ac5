"""Sequential evaluation of cells that cannot share a run: one sentence and one run at a time.

Such cells change recurrent groups, or values on which latent choices depend. Outcomes are exact: the interventions of a
cell are applied to each sentence, which is evaluated by the algorithms of single sentences.
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
from bnet_transformer.interventions.sweeps.alignment import WordAlignment
from bnet_transformer.interventions.sweeps.cell_spec import PatchCells
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.reference import AttentionRow, GroundModel, find_open_choices, locate_node


def compute_outcomes(module: CompiledModule, model: GroundModel, nodes: Sequence[int]) -> list[Tensor]:
    """The outcome of each node: `log P` if it is discrete, its mean if it is continuous, else its mean value."""
    return [_compute_outcome(module, model, node) for node in nodes]


def stack_outcomes(nodes: Sequence[int], outcomes: Sequence[Sequence[Sequence[Tensor]]]) -> dict[int, Tensor]:
    """Stack outcomes by cell, example and node into `[cell, example, *shape]` of each node."""
    return {
        node: torch.stack([torch.stack([values[k] for values in examples]) for examples in outcomes])
        for k, node in enumerate(nodes)
    }


def _compute_outcome(module: CompiledModule, model: GroundModel, node: int) -> Tensor:
    """The outcome of one node."""
    spec = locate_node(model, node)[0]
    if node in model.do:
        value: Tensor = model.do[node]
        return value
    model = _drop_batched_values(model, node)
    evaluator = NodeEvaluator(module, model, {})
    if spec.tpm.kind == "discrete":
        if spec.parents and not find_open_choices(model, reference.parents(model, node), {}):
            log_probs: Tensor = evaluator.distribution(node).logits.double()  # type: ignore[attr-defined]
            return log_probs
        return joint_posterior(Query(module, model, nodes=(node,))).log()
    if not spec.tpm.is_random:
        return _average_over_choices(module, model, [node], evaluator.value(node), len(spec.shape))
    mean = evaluator.distribution(node).mean
    return _average_over_choices(module, model, reference.parents(model, node), mean, len(spec.shape))


def _drop_batched_values(model: GroundModel, node: int) -> GroundModel:
    """The model without the set values that have a row for each state of a latent choice.

    Such a value was set below a choice that does not affect outcomes, so it cannot be an ancestor of the node.
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
    """The mean of a value `[*states, *shape]` over the latent choices on which it depends: `[*shape]`."""
    open_choices = find_open_choices(model, nodes, {})
    if not open_choices or value.dim() == event_dim:
        return value
    probs = joint_log_probs(Query(module, model, nodes=tuple(open_choices))).exp().to(value.dtype)
    mean: Tensor = torch.tensordot(probs, value.flatten(0, value.dim() - event_dim - 1), 1)
    return mean


@dataclass
class SequentialSweep:
    """Computes cells by interventions on the base sentences, one sentence at a time.

    Args:
        source: The sentences that provide the values; None for an ablation.
        base: The sentences that are patched.
        alignment: The word of the source from which each word of the base takes its values.
        cells: What each cell sets.
        outcome_nodes: Ground ids of the nodes that the metric reads.
        ablation_value: The value of an ablation, by example and node.
    """

    source: Examples | None
    base: Examples
    alignment: WordAlignment
    cells: PatchCells
    outcome_nodes: Sequence[int]
    ablation_value: Callable[[int, int], Tensor] | None = None
    _evaluators: dict[tuple[bool, int], NodeEvaluator] = field(default_factory=dict)
    _base_outcomes: dict[int, list[Tensor]] = field(default_factory=dict)

    def compute_outcomes(self, cell: int) -> list[list[Tensor]]:
        """The outcomes with a cell set, by example and node; cached if the cell changes no value."""
        results = []
        for n, model in enumerate(self.base.models):
            interventions = {**self._resolve_sites(cell, n), **self._resolve_paths(cell, n)}
            changes = any(
                isinstance(v, AttentionRow) or not torch.equal(v, self._get_value(False, n, k))
                for k, v in interventions.items()
            )
            if changes or n not in self._base_outcomes:
                patched = model.surgery(interventions) if changes else model
                outcomes = compute_outcomes(self.base.module, patched, self.outcome_nodes)
                if not changes:
                    self._base_outcomes[n] = outcomes
            results.append(outcomes if changes else self._base_outcomes[n])
        return results

    def _resolve_sites(self, cell: int, n: int) -> dict[int, Tensor | AttentionRow]:
        """The values, or rows of attention, that a cell sets in example `n`, by node."""
        patches: dict[int, Tensor | AttentionRow] = {}
        for sites in self.cells.sites:
            offset = int(self.base.model.ground.offsets[sites.group])
            for k in (sites.cells == cell).nonzero()[0]:
                node = offset + int(sites.nodes[k])
                if not sites.is_attention:
                    patches[node] = (
                        self._get_single_value(True, n, node)
                        if self.ablation_value is None
                        else self.ablation_value(n, node)
                    )
                elif sites.read_words is None:
                    patches[node] = AttentionRow(self._get_attention_row(True, n, node))
                else:
                    before = patches[node].weights if node in patches else self._get_attention_row(False, n, node)  # type: ignore[union-attr]
                    row, j = before.clone(), int(sites.read_words[k])
                    row[j] = self._get_attention_row(True, n, node)[j]
                    patches[node] = AttentionRow(row)
        return patches

    def _resolve_paths(self, cell: int, n: int) -> dict[int, Tensor]:
        """The values that the paths of a cell transmit to their last nodes in example `n`, by node."""
        ends: dict[int, list[tuple[int, ...]]] = {}
        for path in self.cells.paths:
            if path.cell == cell:
                ends.setdefault(path.nodes[-1], []).append(path.nodes)
        patches = {}
        for end, paths in ends.items():
            sent = {path[0]: self._get_single_value(True, n, path[0]) for path in paths}
            for step in range(1, len(paths[0])):
                child = paths[0][step]
                sent = {child: self._compute_child(n, child, sent)}
            patches[end] = sent[end]
        return patches

    def _compute_child(self, n: int, child: int, parent_values: dict[int, Tensor]) -> Tensor:
        """The value of a node in the base run with these values of some parents, `[*shape]`."""
        model = self.base.models[n]
        parents = [p for p in reference.parents(model, child) if not locate_node(model, p)[0].tpm.is_random]
        values = {p: self._get_single_value(False, n, p) for p in parents if p not in parent_values}
        evaluator = NodeEvaluator(self.base.module, model.surgery({**values, **parent_values}), {})
        return self._check_single_value(child, evaluator.value(child))

    def _get_evaluator(self, is_source: bool, n: int) -> NodeEvaluator:
        """The cached evaluator of example `n` of the source or the base sentences."""
        if (is_source, n) not in self._evaluators:
            examples = self.source if is_source else self.base
            assert examples is not None
            self._evaluators[is_source, n] = NodeEvaluator(examples.module, examples.models[n], {})
        return self._evaluators[is_source, n]

    def _align(self, node: int) -> int:
        """The id in the source sentences of a node that cells set."""
        aligned = self.alignment.align_node(node)
        assert aligned is not None  # cells without a source do not exist
        return aligned

    def _get_value(self, is_source: bool, n: int, node: int) -> Tensor:
        """The value of a node in the source or the base run, `[*states, *shape]` if it depends on latent choices."""
        evaluator = self._get_evaluator(is_source, n)
        node = self._align(node) if is_source else node
        return evaluator.model.do[node] if node in evaluator.model.do else evaluator.value(node)

    def _get_single_value(self, is_source: bool, n: int, node: int) -> Tensor:
        """The value of a node, `[*shape]`; an error if it depends on latent choices."""
        return self._check_single_value(node, self._get_value(is_source, n, node))

    def _check_single_value(self, node: int, value: Tensor) -> Tensor:
        """The value of a node, `[*shape]`; an error if it has more dims, for the states of latent choices."""
        if value.is_floating_point() and tuple(value.shape) != locate_node(self.base.model, node)[0].shape:
            name = self.base.model.ground.name(node)
            hint = "Set the choices on which it depends in both runs, by do"
            raise EvidenceError(name, expected="one value", actual="a value for each state of a choice", hint=hint)
        return value

    def _get_attention_row(self, is_source: bool, n: int, node: int) -> Tensor:
        """The row of attention `P(j | i)` of a node, `[word j]`."""
        evaluator = self._get_evaluator(is_source, n)
        spec, index = locate_node(evaluator.model, node)
        assert spec.group.step is not None
        table = evaluator.attention(spec.group.step, spec.group.stem)
        return table[index]

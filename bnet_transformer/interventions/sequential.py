"""The runs of cells that cannot share a run: one cell and one sentence at a time, by the algorithms of sentences.

Such cells change recurrent groups, or values on which latent choices depend. Outcomes are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer._core.tensors import IntArray
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.data.do_values import Change, Entries, resolve_relative
from bnet_transformer.errors import EvidenceError
from bnet_transformer.graph import ancestors, topological_order
from bnet_transformer.inference.posteriors import plan_joint, plan_posterior
from bnet_transformer.inference.query import Query
from bnet_transformer.inference.values import NodeEvaluator
from bnet_transformer.interventions.ablation import Ablation
from bnet_transformer.interventions.cells import PatchCells, WordAlignment
from bnet_transformer.interventions.examples import Examples
from bnet_transformer.reference import AttentionRow, GroundModel, find_open_choices, locate_node


@dataclass
class SequentialRuns:
    """Computes cells by interventions on the base sentences, one sentence at a time.

    Args:
        source: The sentences that provide the values; None for an ablation.
        base: The sentences that are patched.
        alignment: The word of the source from which each word of the base takes its values.
        cells: What each cell sets.
        outcome_nodes: Ground ids of the nodes that the metric reads.
        ablation: The values of an intervention without a source.
        change: The change of the values of nodes, whose constants are the values of the source or of `ablation`.
    """

    source: Examples | None
    base: Examples
    alignment: WordAlignment
    cells: PatchCells
    outcome_nodes: Sequence[int]
    ablation: Ablation | None = None
    change: Change | None = None
    changing_cells: set[int] = field(default_factory=set)  # of the computed cells, those that change a value
    _evaluators: dict[tuple[bool, int], NodeEvaluator] = field(default_factory=dict)
    _base_outcomes: dict[int, list[Tensor]] = field(default_factory=dict)

    def compute_base(self) -> dict[int, Tensor]:
        """The outcomes of the base: `[1, example, *shape]` of each node."""
        return self._stack([[self._get_base_outcomes(n) for n in range(len(self.base))]])

    def compute_source(self, nodes: Sequence[int]) -> dict[int, Tensor]:
        """The outcomes of these nodes of the source, by the ids of the base: `[1, example, *shape]` of each node."""
        assert self.source is not None
        models = self.source.models
        return self._stack([[[compute_outcome(self.source.module, m, node) for node in nodes] for m in models]])

    def compute_cells(self, cells: IntArray) -> dict[int, Tensor]:
        """The outcomes of some cells: `[cell, example, *shape]` of each node."""
        return self._stack([[self._compute_cell(cell, n) for n in range(len(self.base))] for cell in cells.tolist()])

    def _stack(self, outcomes: Sequence[Sequence[Sequence[Tensor]]]) -> dict[int, Tensor]:
        """Stack outcomes by cell, example and node."""
        return {
            node: torch.stack([torch.stack([values[k] for values in examples]) for examples in outcomes])
            for k, node in enumerate(self.outcome_nodes)
        }

    def _get_base_outcomes(self, n: int) -> list[Tensor]:
        """The outcomes of a sentence without a cell."""
        if n not in self._base_outcomes:
            module, model = self.base.module, self.base.models[n]
            self._base_outcomes[n] = [compute_outcome(module, model, node) for node in self.outcome_nodes]
        return self._base_outcomes[n]

    def _compute_cell(self, cell: int, n: int) -> list[Tensor]:
        """The outcomes of a sentence with a cell set; those of the base if the cell changes no value."""
        interventions = {**self._resolve_sites(cell, n), **self._resolve_paths(cell, n)}
        if not any(
            isinstance(value, AttentionRow) or not torch.equal(value, self._get_evaluator(False, n).read_value(node))
            for node, value in interventions.items()
        ):
            return self._get_base_outcomes(n)
        self.changing_cells.add(cell)
        patched = self.base.models[n].surgery(interventions)
        return [compute_outcome(self.base.module, patched, node) for node in self.outcome_nodes]

    def _apply_change(
        self, n: int, values: Mapping[int, Tensor], entries: Mapping[int, Sequence[int]] = MappingProxyType({})
    ) -> dict[int, Tensor]:
        """The values of nodes in example `n` after the change, whose constants are given, of all or of some entries."""
        changes = {} if self.change is None else dict.fromkeys(values, self.change)
        changes |= {n: Entries(torch.tensor(part), self.change or values[n]) for n, part in entries.items()}
        fixed = {node: value for node, value in values.items() if node not in changes}
        model, module = self.base.models[n], self.base.module

        def evaluate(resolved: Mapping[int, Tensor]) -> Callable[[int], Tensor]:
            return NodeEvaluator(module, model.surgery({**fixed, **resolved}), {}).read_value

        return {**fixed, **resolve_relative(model, changes, evaluate, values)}

    def _resolve_sites(self, cell: int, n: int) -> dict[int, Tensor | AttentionRow]:
        """The values, or rows of attention, that a cell sets in example `n`, by node."""
        values, entries, rows = dict[int, Tensor](), dict[int, list[int]](), dict[int, list[int]]()
        for sites in self.cells.sites:
            offset = int(self.base.model.ground.offsets[sites.group])
            for k in (sites.cells == cell).nonzero()[0]:
                node = offset + int(sites.nodes[k])
                part = [] if sites.entries is None else [int(sites.entries[k])]
                if sites.is_attention:
                    rows.setdefault(node, []).extend(part)
                    continue
                values[node] = values[node] if node in values else self._get_source_value(n, node)
                if part:
                    entries.setdefault(node, []).extend(part)
        patches = dict[int, AttentionRow]()
        for node in topological_order(self.base.model.ground).tolist() if rows else ():
            if node not in rows:
                continue
            row, model = _read_row(self._get_evaluator(True, n), node), self.base.models[n]
            if rows[node]:  # the other entries are those of the run with the rows of earlier nodes
                index = torch.tensor(rows[node])
                base = _read_row(NodeEvaluator(self.base.module, model.surgery(patches), {}), node)
                row = base.index_copy(0, index, row[index])
            patches[node] = AttentionRow(row)
        return {**self._apply_change(n, values, entries), **patches}

    def _resolve_paths(self, cell: int, n: int) -> dict[int, Tensor]:
        """The values that the paths of a cell transmit to their last nodes in example `n`, by node."""
        ends: dict[int, list[tuple[int, ...]]] = {}
        for path in self.cells.paths:
            if path.cell == cell:
                ends.setdefault(path.nodes[-1], []).append(path.nodes)
        patches, model = dict[int, Tensor](), self.base.models[n]
        for end, paths in ends.items():
            sent = self._apply_change(n, {path[0]: self._get_source_value(n, path[0]) for path in paths})
            for child in paths[0][1:]:  # in the base run with these values of some parents
                parents = [p for p in reference.parents(model, child) if not locate_node(model, p)[0].tpm.is_random]
                read = self._get_evaluator(False, n).read_value
                values = {p: self._check_single_value(p, read(p)) for p in parents if p not in sent}
                evaluator = NodeEvaluator(self.base.module, model.surgery({**values, **sent}), {})
                sent = {child: self._check_single_value(child, evaluator.value(child))}
            patches[end] = sent[end]
        return patches

    def _get_evaluator(self, is_source: bool, n: int) -> NodeEvaluator:
        """The cached evaluator of example `n` of the source or the base sentences."""
        if (is_source, n) not in self._evaluators:
            examples = self.source if is_source else self.base
            assert examples is not None
            self._evaluators[is_source, n] = NodeEvaluator(examples.module, examples.models[n], {})
        return self._evaluators[is_source, n]

    def _get_source_value(self, n: int, node: int) -> Tensor:
        """The value of the source, or of an intervention without one, for a node of example `n`, `[*shape]`."""
        if self.ablation is not None:
            return self.ablation.get_value(self._get_evaluator(False, n), node)
        aligned = self.alignment.align_node(node)
        assert aligned is not None  # cells without a source do not exist
        return self._check_single_value(node, self._get_evaluator(True, n).read_value(aligned))

    def _check_single_value(self, node: int, value: Tensor) -> Tensor:
        """The value of a node, `[*shape]`; an error if it has more dims, for the states of latent choices."""
        if value.is_floating_point() and tuple(value.shape) != locate_node(self.base.model, node)[0].shape:
            name = self.base.model.ground.name(node)
            hint = "Set the choices on which it depends in both runs, by do"
            raise EvidenceError(name, expected="one value", actual="a value for each state of a choice", hint=hint)
        return value


def _read_row(evaluator: NodeEvaluator, node: int) -> Tensor:
    """The row of attention `P(j | i)` of a node, `[word j]`."""
    spec, index = locate_node(evaluator.model, node)
    return evaluator.plan_attention(spec).run()[index]


def compute_outcome(module: CompiledModule, model: GroundModel, node: int) -> Tensor:
    """The outcome of a node: `log P` if it is discrete, its mean if it is continuous, else its mean value."""
    spec = locate_node(model, node)[0]
    if node in model.do:
        value: Tensor = model.do[node]
        return value
    # A set value with a row for each state of a choice was set below a choice that affects no outcome.
    batched = {
        n for n, v in model.do.items() if v.is_floating_point() and v.dim() > len(locate_node(model, n)[0].shape)
    }
    if batched and not batched & {*ancestors(model.ground, [node])}:
        model = replace(model, do={n: v for n, v in model.do.items() if n not in batched})
    evaluator = NodeEvaluator(module, model, {})
    if spec.tpm.kind == "discrete":
        if spec.parents and not find_open_choices(model, reference.parents(model, node), {}):
            log_probs: Tensor = evaluator.plan_distribution(node).run().logits.double()  # type: ignore[attr-defined]
            return log_probs
        return plan_posterior(Query(module, model, nodes=(node,))).run().log()
    parents = reference.parents(model, node) if spec.tpm.is_random else [node]
    result: Tensor = evaluator.plan_distribution(node).run().mean if spec.tpm.is_random else evaluator.value(node)
    open_choices = find_open_choices(model, parents, {})
    if not open_choices or result.dim() == len(spec.shape):
        return result
    probs = plan_joint(Query(module, model, nodes=tuple(open_choices))).run().exp().to(result.dtype)
    mean: Tensor = torch.tensordot(probs, result.flatten(0, result.dim() - len(spec.shape) - 1), 1)
    return mean

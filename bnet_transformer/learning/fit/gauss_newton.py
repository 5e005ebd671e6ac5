"""The expansion of EM at several sets of parameters: E step, gradient, and products with the Gauss-Newton matrix.

One evaluation of the net for all sets gives the log evidence, the expected counts of the tables, the responsibilities
of the latent choices, and a graph for products with the Jacobian of the predictions (`gather_predictions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer.compiler.execution_state import ExecutionState
from bnet_transformer.compiler.gather import get_present_mask
from bnet_transformer.data import Batch
from bnet_transformer.declare import NodeSpec
from bnet_transformer.inference.elimination import eliminate_choices
from bnet_transformer.inference.factors import Factor, gather_in_log_dtype, mask_unobserved, select_logits
from bnet_transformer.learning.fit.curvature import FlatLayout, QuadraticModel, expand_function
from bnet_transformer.learning.fit.curvature_blocks import BlockGroup, CurvatureBlocks
from bnet_transformer.learning.fit.problem import FitObjective
from bnet_transformer.tpm import Normal


@dataclass(frozen=True)
class Expansion:
    """What one EM iteration needs of the log posterior density at the parameters of each set.

    Attributes:
        log_density: The log posterior density up to a constant, `[set]`.
        evidence: The log evidence of all sentences, `[set]`.
        counts: The expected count of each entry of the learned tables, `[set, *shape]`.
        model: The quadratic model of the expected complete-data density in the weights: its gradient, which is the
            gradient of the log posterior density too, and its Gauss-Newton matrix. None without weights.
    """

    log_density: Tensor
    evidence: Tensor
    counts: dict[str, Tensor]
    model: QuadraticModel | None


@dataclass(frozen=True)
class Tilt:
    """Log weights of the states of a selector, which are added to its log prior.

    Attributes:
        selector: The selector.
        log_weights: For each part of the sentences, the log weights, `[set, *layout]`.
    """

    selector: NodeSpec
    log_weights: Sequence[Tensor]


@dataclass(frozen=True)
class _Prediction:
    """The parameters of the distribution of a factor at each state of the latent choices."""

    value: Tensor  # [set, *layout, entry]
    weight: Tensor  # the posterior probability of the states, [set, *layout]
    is_categorical: bool  # whether the entries are logits
    state_dims: Mapping[int, int]  # the dim of `value` with the states of each choice, by the index of its group

    def multiply_root(self, tangent: Tensor) -> Tensor:
        """Return `R J v` of `J v`, where `R^T R` is the weighted Fisher information."""
        if self.is_categorical:  # the Fisher information of logits is diag(p) - p p^T
            probs = self.value.detach().softmax(-1)
            tangent = probs.sqrt() * (tangent - (probs * tangent).sum(-1, keepdim=True))
        return self.weight.clamp(min=0).sqrt()[..., None] * tangent


@dataclass(frozen=True)
class _PartGraph:
    """The evaluation of one part of the sentences, with a graph for products with the Gauss-Newton matrix.

    The matrix is `J^T F J`. `J` is the Jacobian of the predictions by the weights, and `F` their Fisher information,
    weighted with the posterior probabilities of the states in which they are made.
    """

    evidence: Tensor  # [set]
    counts: dict[str, Tensor]
    gradient: Tensor | None
    flat: Tensor | None
    rows: list[_Prediction]

    def linearize(self) -> tuple[list[Tensor], Tensor]:
        """Return cotangents `u` and the graph of `J^T u`, whose derivative by `u` in a direction `v` is `J v`."""
        # J v is a product in forward mode. A backward pass is linear in its cotangent u, so that its own derivative
        # gives J v by reverse mode only, which every operation of the compiled net supports.
        assert self.flat is not None
        predictions = [row.value for row in self.rows]
        u = [torch.zeros_like(p, requires_grad=True) for p in predictions]
        (back,) = torch.autograd.grad(predictions, self.flat, u, create_graph=True)
        return u, back

    def multiply(self, v: Tensor, linear: tuple[list[Tensor], Tensor]) -> Tensor:
        """Return `J^T F J v`, `[set, entry]`."""
        assert self.flat is not None
        cotangents = []
        for tangent, row in zip(
            torch.autograd.grad(linear[1], linear[0], v, retain_graph=True), self.rows, strict=True
        ):
            if row.is_categorical:
                probs = row.value.detach().softmax(-1)
                tangent = probs * (tangent - (probs * tangent).sum(-1, keepdim=True))
            cotangents.append(row.weight[..., None] * tangent)
        (result,) = torch.autograd.grad([row.value for row in self.rows], self.flat, cotangents, retain_graph=True)
        return result

    def compute_blocks(self, group: BlockGroup) -> Tensor:
        """Return the blocks of a group, `[set, block, entry, entry]`, from one product `J v` for each entry."""
        assert self.flat is not None
        u, back = self.linearize()
        columns: list[list[Tensor]] = [[] for _ in self.rows]
        for positions in group.index.mT:  # the same entry of each block
            v = torch.zeros_like(self.flat)
            v[:, positions] = 1.0
            for row, column, tangent in zip(
                self.rows, columns, torch.autograd.grad(back, u, v, retain_graph=True), strict=True
            ):
                column.append(row.multiply_root(tangent))
        blocks, entries = group.index.shape
        total = self.flat.new_zeros(len(self.flat), blocks, entries, entries)
        for row, column in zip(self.rows, columns, strict=True):
            J = torch.stack(column, 1)  # [set, entry, *layout, entry of the prediction]
            dim = row.state_dims.get(group.selector.group.index) if group.selector else None
            J = J[:, None] if dim is None else J.movedim(dim + 1, 1)
            J = J.flatten(3)
            total = total + J @ J.mT  # broadcast over the blocks where all predictions depend on all of them
        return total


def find_uncovered(objective: FitObjective) -> str | None:
    """Return why Gauss-Newton steps do not cover a net; None if they do."""
    network, weights = objective.network, {name.rpartition(".")[0] for name in objective.learned.weights}
    for spec in network.specs:
        depends = any(s.param_prefix in weights for s in network.ancestral_specs(spec))
        if depends and spec.tpm.kind == "continuous" and spec.tpm.is_random and not isinstance(spec.tpm, Normal):
            return (
                f"{spec.group.name} has a distribution without a known Fisher information ({type(spec.tpm).__name__})"
            )
    return None


@dataclass(frozen=True)
class _Site:
    """A factor whose distribution may depend on the weights."""

    index: int  # of the factor
    table_shape: torch.Size
    state_dim: int | None  # the dim of the states of a latent choice; None for evidence
    is_categorical: bool
    state_dims: Mapping[int, int]  # of `_Prediction`


class EMExpansion:
    """Expands the log posterior density of several sets of parameters on fixed sentences.

    Args:
        objective: The log evidence and the log prior.
        parts: The sentences of this process, in parts that are evaluated together.
        ranks: The processes that share the sentences.
    """

    def __init__(self, objective: FitObjective, parts: Sequence[Batch], ranks: DistributedContext) -> None:
        self.objective, self.parts, self.ranks = objective, parts, ranks
        self.learned = objective.learned
        self._sites: dict[int, list[_Site]] = {}

    def compute_blocks(
        self, sets: Mapping[str, Tensor], groups: Sequence[BlockGroup], factor: float
    ) -> CurvatureBlocks:
        """Compute blocks of the Gauss-Newton matrix.

        Args:
            sets: The learned parameters, `[set, *shape]`.
            groups: The weights of the blocks, in the flat vector of all learned weights.
            factor: The number of sentences for which each sentence stands.

        Returns:
            The blocks.
        """
        layout = FlatLayout.create(sets, self.learned.weights)
        flat = layout.flatten(sets).detach().requires_grad_()
        totals = [flat.new_zeros(len(flat), *group.index.shape, group.index.shape[1]) for group in groups]
        with sdpa_kernel(SDPBackend.MATH):
            for number, part in enumerate(self.parts):
                graph = self._expand_part(number, part, sets, flat, layout, None)
                totals = [t + graph.compute_blocks(group) for t, group in zip(totals, groups, strict=True)]
        _, prior = expand_function(self.objective.log_prior, sets, layout)
        diagonal = prior.product(torch.ones_like(flat))  # the prior is a product over the entries
        pairs = zip(groups, totals, strict=True)
        matrices = [factor * self.ranks.all_reduce(t) + diagonal[:, g.index].diag_embed() for g, t in pairs]
        return CurvatureBlocks(groups, matrices)

    def __call__(self, sets: Mapping[str, Tensor], tilt: Tilt | None = None) -> Expansion:
        """Expand at these parameters.

        Args:
            sets: The learned parameters, `[set, *shape]`.
            tilt: Log weights of the states of a selector; None for none.

        Returns:
            The expansion; with a tilt, that of the tilted density.
        """
        layout = FlatLayout.create(sets, self.learned.weights)
        flat = layout.flatten(sets).detach().requires_grad_() if self.learned.weights else None
        graphs = []
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of attention have no second derivative
            for number, part in enumerate(self.parts):
                graphs.append(self._expand_part(number, part, sets, flat, layout, tilt))
        first = next(iter(sets.values()))
        evidence = self.ranks.all_reduce(sum((g.evidence for g in graphs), first.new_zeros(len(first))))
        counts = {
            name: self.ranks.all_reduce(sum((g.counts[name] for g in graphs), torch.zeros_like(sets[name])))
            for name in sorted(self.learned.tables)
        }
        log_prior, prior = expand_function(self.objective.log_prior, sets, layout)
        model = None if flat is None else self._build_model(graphs, flat, layout, prior)
        return Expansion(evidence + log_prior, evidence, counts, model)

    def _build_model(
        self, graphs: Sequence[_PartGraph], flat: Tensor, layout: FlatLayout, prior: QuadraticModel
    ) -> QuadraticModel:
        """Return the sum of the models of the parts and of the log prior, which is concave in the weights."""
        gradient = sum((g.gradient for g in graphs if g.gradient is not None), torch.zeros_like(flat)).detach()
        linear: list[tuple[list[Tensor], Tensor]] = []

        def product(v: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                linear.extend(g.linearize() for g in graphs[len(linear) :])  # at the first product
                pairs = zip(graphs, linear, strict=True)
                total = sum((g.multiply(v, item) for g, item in pairs), torch.zeros_like(v))
            return self.ranks.all_reduce(total) + prior.product(v)

        return QuadraticModel(layout, self.ranks.all_reduce(gradient) + prior.gradient, product)

    def _expand_part(
        self,
        number: int,
        part: Batch,
        sets: Mapping[str, Tensor],
        flat: Tensor | None,
        layout: FlatLayout,
        tilt: Tilt | None,
    ) -> _PartGraph:
        """Evaluate one part of the sentences, with the derivatives of its log evidence."""
        if number not in self._sites:
            self._sites[number] = self._find_sites(part, sets)
        sites, objective, like = self._sites[number], self.objective, next(iter(sets.values()))
        tables = {name: sets[name].detach() for name in self.learned.tables}
        # The derivative of the log evidence by the log of a factor is the posterior probability of its states, and by
        # the log probability of a table entry its expected count (Darwiche 2003): zeros that are added to both are the
        # inputs of one backward pass, which is the E step. By Fisher's identity, the gradient of the log evidence by
        # the weights is that of the expected complete-data density.
        count_zeros = {name: torch.zeros_like(table).requires_grad_() for name, table in tables.items()}
        site_zeros = [like.new_zeros(len(like), *site.table_shape).requires_grad_() for site in sites]

        def evaluate(
            parameters: dict[str, Tensor],
            count_zeros: dict[str, Tensor],
            site_zeros: list[Tensor],
            log_weights: Tensor | None,
        ) -> tuple[Tensor, list[Tensor]]:
            def fn(state: ExecutionState, factors: list[Factor]) -> tuple[Tensor, list[Tensor]]:
                shifted, counted = list(factors), replace(state, parameters={**state.parameters, **count_zeros})
                for k, factor in enumerate(factors):
                    if is_density(state, factor) and objective.find_learned_tables(factor):
                        shifted[k] = replace(factor, table=factor.table + select_logits(counted, factor))
                predictions = []
                for site, zeros in zip(sites, site_zeros, strict=True):
                    factor = shifted[site.index]
                    shifted[site.index] = replace(factor, table=factor.table + _mask_absent(state, factor, zeros))
                    predictions.append(_predict(state, factor, site))
                if tilt is not None and log_weights is not None:
                    shifted.append(Factor(tilt.selector, log_weights))
                return eliminate_choices(state, shifted), predictions

            return objective.evaluate(parameters, part, fn, defer=not sites)

        parameters = tables | ({} if flat is None else layout.unflatten(flat))
        log_weights = None if tilt is None else tilt.log_weights[number]
        in_dims = (0, 0, 0, None if log_weights is None else 0)
        evidence, predictions = torch.vmap(evaluate, in_dims)(parameters, count_zeros, site_zeros, log_weights)
        evidence = evidence.sum(1)
        inputs = [*count_zeros.values(), *site_zeros, *([] if flat is None else [flat])]
        gradients = torch.autograd.grad(
            evidence.sum(), inputs, retain_graph=flat is not None, allow_unused=True, materialize_grads=True
        )
        counts, rows = dict(zip(count_zeros, gradients, strict=False)), []
        for site, p, w in zip(sites, predictions, gradients[len(counts) :], strict=False):
            if p.requires_grad:
                # The distribution of a choice is the same for all its states.
                weight = w if site.state_dim is None else w.sum(site.state_dim + 1, keepdim=True)
                rows.append(_Prediction(p, weight, site.is_categorical, site.state_dims))
        return _PartGraph(evidence.detach(), counts, None if flat is None else gradients[-1], flat, rows)

    def _find_sites(self, part: Batch, sets: Mapping[str, Tensor]) -> list[_Site]:
        """Find the factors whose distribution may depend on the learned weights, with the shapes of their tables."""
        if not self.learned.weights:
            return []
        weighted, network = {name.rpartition(".")[0] for name in self.learned.weights}, self.objective.network

        def fn(state: ExecutionState, factors: list[Factor]) -> list[_Site]:
            sites = []
            state_dims = {index: dim + 1 for dim, index in enumerate(state.layout.enumerated)}
            for k, factor in enumerate(factors):
                spec = factor.spec
                depends = any(other.param_prefix in weighted for other in network.ancestral_specs(spec))
                if is_density(state, factor) and spec.tpm.is_random and depends:
                    state_dim = None if factor.evidence is not None else state.layout.enumerated.index(spec.group.index)
                    is_categorical = spec.tpm.kind == "discrete"
                    sites.append(_Site(k, factor.table.shape, state_dim, is_categorical, state_dims))
            return sites

        with torch.no_grad():
            return self.objective.evaluate({name: v[0] for name, v in sets.items()}, part, fn, defer=False)


def is_density(state: ExecutionState, factor: Factor) -> bool:
    """True for a factor that is the probability of a node; a choice that is enumerated though observed has two."""
    return factor.evidence is None or factor.spec.group.index not in state.layout.enumerated


def _mask_absent(state: ExecutionState, factor: Factor, table: Tensor) -> Tensor:
    """Return the table with zeros at nodes that are not observed, or at padding."""
    if factor.evidence is not None:
        return mask_unobserved(factor.evidence, table)
    present = get_present_mask(state, factor.spec.group.word_stack)
    return table if present is None else torch.where(present, table, 0.0)


def _predict(state: ExecutionState, factor: Factor, site: _Site) -> Tensor:
    """The parameters of the distribution of a factor, `[*layout, entry]`: logits, or a mean in units of its sigma.

    In these units the Fisher information of a mean is the identity. So it is for a learned log sigma, which is the last
    entry, times the square root of 2 d.
    """
    context, parents = gather_in_log_dtype(state, factor.spec)
    shape = list(site.table_shape)
    if site.is_categorical:
        logits = state.layout.pad_dims(factor.spec.tpm.logits(context, *parents), 1)
        if site.state_dim is not None:
            shape[site.state_dim] = 1
        return logits.expand(*shape, -1)
    assert isinstance(factor.spec.tpm, Normal)
    mean = state.layout.pad_dims(factor.spec.tpm.mean(context, *parents), 1)
    log_sigma = context["log_sigma"]
    entries = (mean * (-log_sigma.detach()).exp()[..., None]).expand(*shape, -1)
    scale = (2 * mean.shape[-1]) ** 0.5 * log_sigma[..., None]
    return torch.cat([entries, scale.expand(*shape, 1)], -1) if factor.spec.tpm.learnable else entries

"""Quantities of a fit that do not depend on labels of heads or on the basis of keys, for each of many draws.

Only such quantities are identified: permuting the heads, or changing the basis of the keys, changes parameters but not
the density, so the rank of a true parameter among draws shows the labels and not the calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.hashing import derive_seed
from bnet_transformer.data import Batch
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, BudgetError, UnsupportedError
from bnet_transformer.learning.fit.head_summary import (
    find_invariant_parameters,
    find_selectors,
    invariants,
    log_likelihoods,
    occupancy,
)
from bnet_transformer.learning.fit.predictive import ReadoutPredictor, predict_readout
from bnet_transformer.learning.fit.problem import FitObjective

MAX_SORTED = 4  # sorted probabilities, norms or projections of one node
PROJECTIONS = 2  # random projections of the prediction of a readout

Sets = Mapping[str, Tensor]


class Quantities:
    """Computes the quantities of many sets of parameters, `[set, *shape]` by name.

    Args:
        objective: The log evidence, and the learned parameters.
        readouts: The observed readouts, whose predictions are quantities.
        custom: The user's functions of a net by name.
        wrap: Converts a network to the type of the user's net.
        seed: The seed of the projections.
    """

    def __init__(
        self,
        objective: FitObjective,
        readouts: tuple[NodeSpec, ...],
        custom: Mapping[str, Callable[[Any], object]],
        wrap: Callable[[Network], object],
        seed: int,
    ) -> None:
        self.objective, self.network, self.readouts = objective, objective.network, readouts
        self.custom, self.wrap, self.seed = custom, wrap, seed
        self.omitted: dict[str, str] = {}
        self.predictors: dict[str, ReadoutPredictor] = {}
        self.selectors = find_selectors(self.network)

    def evaluate(self, sets: Sets, corpus: Batch) -> dict[str, Tensor]:
        """Compute all quantities, `[set]` by name. Quantities that need an impossible sum are omitted."""
        groups: dict[str, Callable[[], dict[str, Tensor]]] = {
            "log_likelihood": lambda: {"log_likelihood": log_likelihoods(self.objective, corpus, sets).sum(1)}
        }
        for spec in self.readouts:
            groups[f"{spec.group.name}_predicted"] = lambda spec=spec: self._predictions(sets, spec, corpus)  # type: ignore[misc]
        result: dict[str, Tensor] = {}
        for name, compute in groups.items():
            if name in self.omitted:
                continue
            try:
                result |= compute()
            except (BudgetError, UnsupportedError) as error:
                self.omitted[name] = str(error)
        result |= self._tables(sets) | self._weights(sets)
        parts = [{k: v[i] for k, v in sets.items()} for i in range(_count(sets) if self.custom else 0)]
        networks = [self.wrap(self.network.with_parameters(parameters)) for parameters in parts]
        for name, function in self.custom.items():
            result[name] = torch.tensor([self._call(name, function, net) for net in networks])
        return {name: value.detach().double().cpu() for name, value in result.items()}

    def _predictions(self, sets: Sets, spec: NodeSpec, corpus: Batch) -> dict[str, Tensor]:
        """Project the prediction of a readout for the first sentence on random directions."""
        part = replace(corpus.take(slice(0, 1)), evidence={})
        if part.x:
            ((_, part),) = part.split_by_length(self.network, 1)
        name = spec.group.name
        if name not in self.predictors:
            predict_readout(self.network, name, [part], self.objective.budget)  # raises an error for impossible sums
            self.predictors[name] = ReadoutPredictor(self.network, name)
        values = self.predictors[name].predict(sets, part)
        table = values.detach().flatten(1).double().cpu()
        states = spec.tpm.states if spec.tpm.kind == "discrete" else None
        free = table.shape[1] - (0 if states is None else table.shape[1] // states)  # probabilities have the sum 1
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "projection", name))
        directions = torch.randn(table.shape[1], min(PROJECTIONS, free), generator=generator, dtype=torch.float64)
        return _number(f"{name}_predicted", table @ directions)

    def _tables(self, sets: Sets) -> dict[str, Tensor]:
        """Compute the sorted probabilities of each selector, and the mean entropy of the rows of each learned table."""
        result: dict[str, Tensor] = {}
        owners = set[str]()
        for spec in self.selectors:
            owner = spec.param_prefix
            tables = {f"{owner}.logits", f"{owner}.initial"} & set(self.network.parameters)
            if owner in owners or not tables & set(sets):
                continue
            owners.add(owner)
            count = _count(sets)
            theta = {name.removesuffix(".logits"): self._expand(name, sets, count).softmax(-1) for name in tables}
            usage = occupancy(spec, theta).sort(-1, descending=True).values
            if usage.shape[-1] > 1:
                result |= _number(f"{owner}_sorted", usage[:, : min(MAX_SORTED, usage.shape[-1] - 1)])
        for name in self.objective.learned.tables:
            probs = sets[name].softmax(-1)
            is_binary_selector = name.removesuffix(".logits") in owners and sets[name][0].numel() == 2
            if probs.shape[-1] > 1 and not is_binary_selector:  # of two probabilities, the larger one determines it
                entropy = torch.special.entr(probs).sum(-1).reshape(len(probs), -1).mean(1)
                result[f"{name.removesuffix('.logits').replace('.', '_')}_entropy"] = entropy
        return result

    def _weights(self, sets: Sets) -> dict[str, Tensor]:
        """Compute the sorted norms of the invariants of heads, and the norms of all other learned weights."""
        result: dict[str, Tensor] = {}
        used = set[str]()
        for selector in self.selectors:
            sources = find_invariant_parameters(self.network, selector)
            learned = {label for label, names in sources.items() if {n for group in names for n in group} & set(sets)}
            if not learned:
                continue
            used |= {name for label in learned for group in sources[label] for name in group}
            values = invariants(self.network, selector, {**self.network.parameters, **sets})
            for label in sorted(learned):
                norms = values[label].flatten(2).norm(dim=2).sort(-1, descending=True).values
                result |= _number(f"{label} norm", norms[:, :MAX_SORTED])
        for name in self.objective.learned.weights:
            if name not in used:
                result[f"{name} norm"] = sets[name].flatten(1).norm(dim=1)
        return result

    def _expand(self, name: str, sets: Sets, count: int) -> Tensor:
        """Return the values of a parameter in all sets; a parameter that is not learned is the same in all."""
        if name in sets:
            return sets[name]
        value = self.network.parameters[name].detach()
        return value.expand(count, *value.shape)

    @staticmethod
    def _call(name: str, function: Callable[[Any], object], net: object) -> float:
        """Call a function of the user with a net, and check that it returns a number."""
        value: Any = function(net)
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            expected = "a function of a net that returns a number"
            raise BNetError(f"quantity {name}", expected=expected, actual=value) from error


def _count(sets: Sets) -> int:
    """Return the number of sets."""
    return len(next(iter(sets.values())))


def _number(name: str, table: Tensor) -> dict[str, Tensor]:
    """Name the columns of a table `[set, column]`."""
    if table.shape[1] == 1:
        return {name: table[:, 0]}
    return {f"{name}[{k}]": column for k, column in enumerate(table.unbind(1))}

"""What the optimizers of all methods share: the parameters and the run of several restarts, and the fit at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bnet_transformer._core.files import derive_seed
from bnet_transformer.data import Batch
from bnet_transformer.declare import Network
from bnet_transformer.declare.network import initialize_parameters
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.factors import LOG_ZERO
from bnet_transformer.learning.fit.objective import LOG_EVIDENCE, LOG_POSTERIOR, FitProblem, Method
from bnet_transformer.learning.fit.result import Fit, FitRecord
from bnet_transformer.learning.loop import Checkpoint, LoopConfig, Run, check_shapes_and_dtypes, run_steps

TRAINING_SENTENCES = "the training sentences"
DEFAULT_BATCH_SIZE = 256  # sentences of a minibatch, if the caller gives none
ROUNDING = 1e-12  # relative difference of two scores that may be a rounding error
DIVERGENCE_FACTOR = 100.0  # a bound has diverged if it is this many times (1 + |start|) below its start


@dataclass
class ParameterSets:
    """The learned parameters of all active restarts, `[set, *shape]`, with their Adam moments.

    `restart_ids[i]` is the index of the restart in row i; the rows of dropped restarts are removed.
    """

    values: dict[str, Tensor]
    first_moments: dict[str, Tensor]
    second_moments: dict[str, Tensor]
    restart_ids: list[int]

    @classmethod
    def create(cls, values: dict[str, Tensor]) -> ParameterSets:
        """Create sets of parameters before the first step: all moments are 0."""
        first, second = ({name: torch.zeros_like(value) for name, value in values.items()} for _ in range(2))
        return cls(values, first, second, list(range(len(next(iter(values.values()))))))

    def select(self, indices: list[int]) -> None:
        """Keep only these rows."""
        for part in (self.values, self.first_moments, self.second_moments):
            for name, value in part.items():
                part[name] = value[indices]
        self.restart_ids = [self.restart_ids[i] for i in indices]

    def get(self, index: int) -> dict[str, Tensor]:
        """Return a copy of the parameters of one row, without the leading dim."""
        return {name: value[index].detach().clone() for name, value in self.values.items()}


def init_restarts(
    network: Network, names: tuple[str, ...], restarts: int, seed: int, device: torch.device
) -> ParameterSets:
    """Create the initial parameters of all restarts: those of the net for the first, random ones for the others.

    Tables with declared numbers are drawn from a uniform Dirichlet. Logits that are -inf in the net are -inf in all
    restarts.
    """
    sets = [{name: network.parameters[name] for name in names}]
    for r in range(1, restarts):
        init = initialize_parameters(network, derive_seed(seed, "restart", r))
        new = {name: init[name].to(sets[0][name]) for name in names}
        for name in names:
            if isinstance(network.parameter_specs[name][1].fill, tuple) and name in network.logit_names:
                generator = torch.Generator().manual_seed(derive_seed(seed, "restart", r, name))
                # Normalised exponential variables have the uniform Dirichlet distribution.
                samples = torch.empty(init[name].shape, dtype=torch.float64).exponential_(generator=generator)
                new[name] = samples.log().to(sets[0][name])
        sets.append({name: value.where(sets[0][name] > -torch.inf, -torch.inf) for name, value in new.items()})
    return ParameterSets.create({name: torch.stack([s[name].detach().to(device) for s in sets]) for name in names})


class RestartOptimizer(Run):
    """The state of a fit: the parameters of all active restarts, their scores, and the best parameters so far.

    Args:
        problem: The fit problem.
        steps: The number of steps.
        restarts: The number of restarts.
        prune: Whether the worse half of the restarts is dropped at 25% and at 50% of the steps.

    Attributes:
        bounds: The highest objective of the restarts at each step, per sentence. It is a bound of the log evidence only
            in SVI; in `map` and `em` it is the log posterior density itself, or an estimate of it from a minibatch.
    """

    has_summed_choices: ClassVar[bool] = True
    is_comparable: bool = True  # whether the bounds of all steps are those of one objective
    remedies = "another seed=, or data and weights of a smaller scale"  # the options that may help a diverged fit

    def __init__(self, problem: FitProblem, steps: int, restarts: int = 1, prune: bool = False) -> None:
        self.objective = objective = problem.objective
        self.network, self.corpus = objective.network, problem.corpus
        self.ranks, self.seed = problem.ranks, problem.seed
        self.steps, self.restarts = steps, restarts
        # Successive halving (Jamieson and Talwalkar 2016) with two rungs. Restarts that end in a poor local optimum are
        # usually behind early, so the remaining steps are spent on the better half.
        self.extra_evaluations = (steps // 4, steps // 2) if prune and restarts > 2 else ()
        self.validation = self.corpus if problem.held_out is None else problem.held_out
        self.settings = {**problem.settings, "judged_by": self.criterion}
        self.sets = init_restarts(self.network, objective.learned.names, restarts, self.seed, self.ranks.device)
        self.bounds: list[float] = []
        self.measured: list[tuple[int, int, float]] = []
        self.best: tuple[float, int, dict[str, Tensor]] = (-math.inf, 0, self.sets.get(0))
        self.corpus_parts = self.split_full_pass(self.corpus)
        held_out = problem.held_out
        self.validation_parts = self.corpus_parts if held_out is None else self.split_full_pass(held_out)
        for part in (*self.corpus_parts, *self.validation_parts) if self.has_summed_choices else ():
            objective.cache_factors(part)
        batch = len(self.corpus) if objective.has_corpus_choice else problem.batch or DEFAULT_BATCH_SIZE
        self.batch_size = min(batch, len(self.corpus))

    def describe(self) -> Mapping[str, object]:
        """Return what the progress bar shows."""
        return {"bound": f"{self.bounds[-1]:.4f}", "restarts": len(self.sets.restart_ids)}

    def valid_bounds(self, bound: Tensor) -> Tensor:
        """Return whether each objective is finite, of positive probability, and not far below the start, `[set]`."""
        is_valid = bound.isfinite() & (bound > LOG_ZERO / 2 / len(self.corpus))
        if not self.bounds or not self.is_comparable:
            return is_valid
        start = self.bounds[0]
        return is_valid & (bound > start - DIVERGENCE_FACTOR * (1 + abs(start)))

    def create_error(self, received: str) -> BNetError:
        """Create the error of a fit that diverged, with the last checkpoint and the remedies.

        Raises:
            EvidenceError: The sentences are impossible in the net; the error names the first impossible observation.
        """
        if self.has_summed_choices:
            self.objective.check_possible(self.corpus)
        remedies = f"{self.remedies}, or a prior (spread=)"
        return self.divergence_error(
            "a finite bound, not far below its start", received, remedies, len(self.bounds) + 1
        )

    @property
    def criterion(self) -> str:
        """The name of the quantity in `scores`. Without a prior the log posterior density equals the log evidence."""
        return LOG_POSTERIOR if self.validation is self.corpus and self.objective.has_prior else LOG_EVIDENCE

    def scores(self) -> list[float]:
        """Compute the criterion of each restart, per validation sentence.

        On the training sentences it is the objective, including the prior, because the likelihood would prefer the step
        that overfits most. On held-out sentences it is the log evidence, which evaluates prior and data together.
        """
        with torch.no_grad():
            total = self.sum_log_evidence(self.validation_parts, self.sets.values)
        total = self.ranks.all_reduce(total)  # before the prior, which must count once and not once for each rank
        if self.criterion == LOG_POSTERIOR:
            total = total + self.objective.log_prior(self.sets.values).detach()
        return [float(score) for score in total / len(self.validation)]

    def sum_log_evidence(self, parts: list[Batch], values: Mapping[str, Tensor]) -> Tensor:
        """Compute the log evidence of the sentences of this process for each set of parameters, `[set]`."""
        first = next(iter(values.values()))
        total = first.new_zeros(len(first))
        for part in parts:
            total = total + self.objective.log_evidences(values, part).sum(1)
        return total

    def split_full_pass(self, corpus: Batch) -> list[Batch]:
        """Split this process's shard of a corpus into the parts of a full pass; one part if sentences share a draw."""
        shard = corpus if self.objective.has_corpus_choice else self.ranks.shard(corpus)
        return self.objective.split(shard) if len(shard) else []

    def update_best(self) -> list[float]:
        """Score every restart, and keep the best parameters so far."""
        scores = self.scores()
        for i, (restart, score) in enumerate(zip(self.sets.restart_ids, scores, strict=True)):
            # Of restarts that are equal up to rounding errors, the first is the best.
            if math.isinf(self.best[0]) or score > self.best[0] + ROUNDING * abs(self.best[0]):
                self.best = score, restart, self.sets.get(i)
        return scores

    def evaluate(self) -> None:
        """Score every restart and keep the best parameters. At a pruning step, drop the worse half, rounded down."""
        scores = self.update_best()
        self.measured += [(self.step, k, score) for k, score in zip(self.sets.restart_ids, scores, strict=True)]
        if self.step in self.extra_evaluations:
            order = sorted(range(len(scores)), key=lambda i: -scores[i])
            self.sets.select(sorted(order[: -(-len(order) // 2)]))

    def snapshot(self) -> Checkpoint:
        """Create a checkpoint of the current state."""
        (score, restart, best), sets = self.best, self.sets
        tensors = {f"net/{name}": value for name, value in best.items() if name in self.network.parameters}
        parts = {"best": best, "all": sets.values, "first": sets.first_moments, "second": sets.second_moments}
        tensors |= {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}
        tensors["story/who"] = torch.tensor(sets.restart_ids)
        tensors["story/best"] = torch.tensor([score, restart], dtype=torch.float64)
        tensors["story/measured"] = torch.tensor(self.measured, dtype=torch.float64).reshape(-1, 3)
        return Checkpoint(self.step, tensors, tuple(self.bounds), (), self.settings)

    def restore(self, saved: Checkpoint) -> None:
        """Load the state of a checkpoint."""
        history, device = saved.get_tensors("story"), self.ranks.device
        ids = [int(k) for k in history["who"]]
        if not ids or not {*ids} <= {*range(self.restarts)}:
            raise BNetError("restarts", expected=f"indices of restarts below {self.restarts}", actual=ids)
        expected = {name: value[:1].expand(len(ids), *value.shape[1:]) for name, value in self.sets.values.items()}
        parts = [saved.get_tensors(name) for name in ("all", "first", "second")]
        for part in parts:
            check_shapes_and_dtypes(part, expected)
        best = saved.get_tensors("best")
        check_shapes_and_dtypes(best, {name: value[0] for name, value in expected.items()})
        values, first, second = ({k: v.to(device) for k, v in part.items()} for part in parts)
        self.sets = ParameterSets(values, first, second, ids)
        self.bounds = list(saved.losses)
        self.measured = [(int(step), int(k), score) for step, k, score in history["measured"].tolist()]
        score, restart = history["best"].tolist()
        self.best = score, int(restart), {name: value.to(device) for name, value in best.items()}


def optimize(optimizer: RestartOptimizer, loop: LoopConfig) -> bool:
    """Run the remaining steps of `run_steps`; return False if Ctrl-C ended the run early. Then score its end too."""
    is_complete = run_steps(optimizer, loop)
    if not optimizer.measured or optimizer.measured[-1][0] < optimizer.step:
        optimizer.evaluate()
    return is_complete


def build_fit(
    problem: FitProblem,
    method: Method,
    parameters: Mapping[str, Tensor],
    evaluated_on: str = TRAINING_SENTENCES,
    **fields: Any,
) -> Fit[Network]:
    """Create the fit of a method: the net with these parameters, and `fields` of `Fit` and of its record."""
    objective, count = problem.objective, len(problem.corpus)
    net, learned = replace_learned(objective.network, parameters), objective.learned.names
    parts = {name: fields.pop(name) for name in ("notes", "samples", "statistics", "choices") if name in fields}
    record = FitRecord(count, evaluated_on, learned=learned, budget=objective.budget, **fields)
    return Fit(net, method.name, record, **parts)


def replace_learned(network: Network, learned: Mapping[str, Tensor]) -> Network:
    """Return the net with the learned parameters, each on the device of the parameter that it replaces."""
    return network.with_parameters({**network.parameters, **to_network_devices(network, learned)})


def to_network_devices(network: Network, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move values or draws of parameters to the devices and floating types of the parameters of the net."""
    return {name: value.to(network.parameters[name]) for name, value in values.items()}

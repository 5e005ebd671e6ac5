"""The latent choices on which the words of a lens depend, and the runs of the net that contain their joint states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.errors import BudgetError, format_count
from bnet_transformer.inference.factor_graph import locate_words, propagate_variables, select_marks
from bnet_transformer.inference.joint_posterior import joint_state_probs, node_posteriors
from bnet_transformer.inference.joint_rows import JointRows
from bnet_transformer.inference.node_evaluator import NodeEvaluator
from bnet_transformer.inference.sentence_state import SentenceState
from bnet_transformer.reference.node_tables import has_ancestor_choices
from bnet_transformer.residual_stream.lens_path import LensPath

MAX_RUNS = 256  # of the net, in each of which all latent choices are set


@dataclass(frozen=True, eq=False)
class ChoiceRuns:
    """Runs of the net in which all latent choices are set, and the weight of each run for each word of the readout.

    Attributes:
        choices: The ground ids of the choices.
        states: Their states in each run, `[run, choice]`.
        log_weights: The log posterior probability of the joint state of the choices on which a word depends, `[run,
            word]`; -inf in a run that repeats a joint state of these choices, or in which it is impossible.
        averaged: The ground ids of the choices on which at least one word depends.
    """

    choices: tuple[int, ...]
    states: Tensor
    log_weights: Tensor
    averaged: tuple[int, ...]

    def set_choices(self, evaluator: NodeEvaluator, run: int) -> NodeEvaluator:
        """The evaluator of the sentence with the choices at their states of one run."""
        if not self.choices:
            return evaluator
        states = dict(zip(self.choices, self.states[run][:, None], strict=True))
        batched = evaluator.with_batched_states(states, evaluator.module)
        return NodeEvaluator(batched.module, batched.model, {})


def find_choice_runs(state: SentenceState, path: LensPath) -> ChoiceRuns:
    """The runs for the mean of a lens over the posterior of the latent choices on which each word depends.

    Choices on which no word depends together are set in the same runs. So the number of runs is about the largest
    number of joint states on which one word depends, and not the product over all words.

    Raises:
        BudgetError: The number of runs is too large.
    """
    model, ground, readout = state.model, state.ground, path.readout.group
    nodes, choices = ground.select_nodes(readout).tolist(), find_lens_choices(state.evaluator, path)
    if not choices:
        return ChoiceRuns((), torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, len(nodes), dtype=torch.float64), ())
    counts = [model.count_states(choice) for choice in choices]
    scopes = _find_scopes(state, path, nodes, choices, counts)
    # The largest scope is checked first: many large scopes are slow to combine.
    largest = max(scopes, key=len)
    num_runs = math.prod(counts[k] for k in largest)
    if num_runs <= MAX_RUNS:
        rows = JointRows.build(scopes, counts, locate_words(model, choices))
        num_runs = rows.num_rows
    if num_runs > MAX_RUNS:
        expected = f"at most {MAX_RUNS} runs, for the joint states of the latent choices on which a word depends"
        hint = f"Set or observe some of them, such as s.do({ground.name(choices[largest[0]])}=0).lens()"
        raise BudgetError(f"lens of {readout.name}", expected=expected, actual=format_count(num_runs), hint=hint)
    log_weights = torch.full((rows.num_rows, len(nodes)), -math.inf, dtype=torch.float64)
    posteriors = _compute_posteriors(state, choices, scopes)
    for k, scope in enumerate(scopes):
        log_weights[torch.from_numpy(rows.find_rows(scope).ravel()), k] = posteriors[scope].log().cpu()
    states = torch.zeros(rows.num_rows, len(choices), dtype=torch.long)
    for k, row_states in rows.get_states().items():
        states[:, k] = torch.from_numpy(row_states)
    is_used = log_weights.isfinite().any(1)
    averaged = tuple(choices[k] for k in sorted(rows.colours))
    return ChoiceRuns(tuple(choices), states[is_used], log_weights[is_used], averaged)


def find_lens_choices(evaluator: NodeEvaluator, path: LensPath) -> list[int]:
    """The latent choices on which the readout or a state of the lens depends, by ground id."""
    ground, readout = evaluator.model.ground, path.readout.group
    if not has_ancestor_choices(evaluator.model.network, [readout.index, *(m.group.index for m in path.states)]):
        return []
    values = {parent for node in ground.select_nodes(readout).tolist() for parent in ground.parents(node)}
    values |= {node for spec in path.states for node in ground.select_nodes(spec.group).tolist()}
    return evaluator.find_open_choices(sorted(values))


def _find_scopes(
    state: SentenceState, path: LensPath, nodes: Sequence[int], choices: Sequence[int], counts: Sequence[int]
) -> list[tuple[int, ...]]:
    """The positions of the choices with several states on which each readout depends, in any slice of the lens."""
    ground = state.ground
    last = ground.select_nodes(path.states[-1].group).tolist()
    # Under do(x_T = x_t), a readout depends on the choices after x_T, and on those of x_t at each word of x_T that it
    # reads. So the nodes of x_T, cut from their parents, are unknown values, which are variables as the choices are.
    after = replace(state.model, ground=ground.surgery({*ground.cut_nodes, *last}))
    marks = propagate_variables(after, [*choices, *last], [*counts, *(2 for _ in last)])
    is_parent = select_marks(after, marks, nodes, len(choices) + len(last))
    marks = propagate_variables(state.model, choices, counts)
    tables = [
        select_marks(state.model, marks, ground.select_nodes(m.group).tolist(), len(choices)) for m in path.states
    ]
    reads = is_parent[:, len(choices) :].astype(np.float32)  # as numbers: products of booleans are slow
    depends = is_parent[:, : len(choices)] | (reads @ np.logical_or.reduce(tables).astype(np.float32) > 0)
    return [tuple(np.flatnonzero(row).tolist()) for row in depends]


def _compute_posteriors(
    state: SentenceState, choices: Sequence[int], scopes: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], Tensor]:
    """The posterior probabilities of the joint states of each scope, `[joint state]`."""
    posteriors: dict[tuple[int, ...], Tensor] = {(): torch.ones(1, dtype=torch.float64)}
    singles = {scope for scope in scopes if len(scope) == 1}
    if singles:  # together: they have two passes in common
        by_node = node_posteriors(state.query([choices[k] for (k,) in sorted(singles)]))
        posteriors |= {(k,): by_node[choices[k]] for (k,) in singles}
    for scope in set(scopes) - posteriors.keys():
        posteriors[scope] = joint_state_probs(state.query([choices[k] for k in scope]))
    return posteriors

"""Contributions to a readout: what each writer adds to a logit, to the difference of two, or along a direction.

The readout is `u . z` with the logits, the mean or the value z of a node and a vector u. One pass (`linear_paths`)
computes the parts of all writers and words.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice
from bnet_transformer._core.naming import join_name, split_name
from bnet_transformer._core.torch_context import enable_gradients
from bnet_transformer.errors import BNetError, UnsupportedError
from bnet_transformer.graph import ancestors
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.intervention_values import Zero
from bnet_transformer.inference.joint_posterior import find_marginal_map, joint_log_evidence
from bnet_transformer.interventions.sweeps import sweep
from bnet_transformer.reference import get_fixed
from bnet_transformer.residual_stream.path_contributions import compute_paths
from bnet_transformer.residual_stream.readout import (
    Readout,
    compute_readout,
    make_run,
    name_attention_row,
    parse_readout,
    seed_readout,
)
from bnet_transformer.residual_stream.results import Contributions, PathContributions, ScoreContributions
from bnet_transformer.residual_stream.score_contributions import compute_score_contributions, find_attention_row
from bnet_transformer.residual_stream.writers import Writer, WriterTable, collect_writers


@enable_gradients()
def compute_contributions(
    state: SentenceState, name: str, of: object, paths: int, exact: bool
) -> Contributions | PathContributions | ScoreContributions:
    """The contributions to a readout, along paths of two, or to a row of attention scores."""
    check_choice("paths", paths, (1, 2))
    check_choice("exact", exact, (True, False))
    row, digest = find_attention_row(state.model, name), state.encoded.digest(state.network)
    if row is not None:
        if of is not None or paths == 2:
            expected = f"None for {name}, a row of attention scores" if of is not None else "1 for attention scores"
            subject, actual = ("of", of) if of is not None else ("paths", paths)
            raise BNetError(subject, expected=expected, actual=actual)
        group, index = row[0].group, row[1]
        node = state.ground.ravel_index(group, index)
        is_node = split_name(name)[0] == group.stem  # otherwise the name is that of its row of attention
        name = state.ground.name(node) if is_node else name_attention_row(group, index)
        state, choices, prob = fix_choices(state, node)
        scores = compute_score_contributions(state, name, *row, exact=exact)
        return replace(scores, choices=choices, choice_prob=prob, digest=digest)
    if paths == 2 and exact:
        hint = "Use paths=1 for the effects of writers"
        raise BNetError("exact", expected="False for paths=2, which have no effects", actual=exact, hint=hint)
    readout = parse_readout(state, name, of)
    name = state.ground.name(readout.node)  # results with the same node are comparable, however it was named
    state, choices, prob = fix_choices(state, readout.node)
    if paths == 2:
        return replace(compute_paths(state, name, readout), choices=choices, choice_prob=prob, digest=digest)
    run = make_run(state, readout)
    value, constant, seeds, active, norms = seed_readout(run, readout)
    table = collect_writers(run, run.pull_back(seeds, active), 1, split_reads=True)
    table = _add_constant(table, readout, constant)
    effects = _compute_effects(state, name, readout, table.writers, value) if exact else None
    norms = (*table.norms, *norms)
    parts = table.writers, table.words, table.values[0]
    special = (*state.encoded.flag_special_tokens(state.network), False)  # the last entry is for nodes without words
    numbers = *parts, value, effects, readout, special
    return Contributions(name, norms, readout.label, *numbers, choices=choices, choice_prob=prob, digest=digest)


def fix_choices(state: SentenceState, node: int) -> tuple[SentenceState, dict[str, int], float]:
    """The sentence at the most probable joint state of the latent choices on which a node depends.

    The contributions are of this state, because an average over the states would be of no run of the net.

    Returns:
        The sentence with these choices set, as are the others of their groups, on which the node does not depend; the
        state of each choice, by name; and the posterior probability of the joint state.

    Raises:
        BudgetError: The choices have too many joint states.
    """
    ground, model = state.ground, state.model
    choices = state.evaluator.find_open_choices(sorted(ground.parents(node)))
    if not choices:
        return state, {}, 1.0
    query = state.query(choices)
    choices, (states,), (log_prob,) = find_marginal_map(query, 1)
    known = {**dict(zip(choices, states, strict=True)), **get_fixed(model, state.evidence)}
    groups = {ground.group_of(choice) for choice in choices}
    nodes = {node for group in groups for node in ground.select_nodes(group).tolist()} - state.interventions.keys()
    interventions = {**state.interventions, **{node: known.get(node, torch.tensor(0)) for node in nodes}}
    evidence = {node: value for node, value in state.evidence.items() if node not in nodes}
    fixed = replace(state, interventions=interventions, evidence=evidence, previous=state.evaluator)
    by_name = {ground.name(choice): int(state) for choice, state in zip(choices, states, strict=True)}
    return fixed, by_name, float((log_prob - joint_log_evidence(replace(query, nodes=()))).exp())


def _add_constant(table: WriterTable, readout: Readout, constant: Tensor) -> WriterTable:
    """A table with the bias of the readout itself as its last writer, if it is not zero."""
    if not bool(constant.any()):
        return table
    group = readout.spec.group
    index = readout.index[: len(group.plates)]
    words = () if readout.word is None else (readout.word,)
    name = f"bias of {join_name(group.name, index)}"
    writer = Writer(name, "bias", group.name, index, group.slice, words, group.plates)
    column = table.values.new_zeros(*table.values.shape[:-2], 1, len(table.words))
    column[..., 0, -1] = constant
    values = torch.cat([table.values, column], -2)
    return WriterTable((*table.writers, writer), table.words, values, table.norms)


# the exact effects


def _compute_effects(
    state: SentenceState, name: str, readout: Readout, writers: tuple[Writer, ...], value: Tensor
) -> Tensor:
    """The readout minus the readout of a run with each writer zero at its words, `[writer]`; NaN for biases."""
    cells = {k: writer.nodes for k, writer in enumerate(writers) if writer.kind != "bias"}
    effects = torch.full((len(writers),), torch.nan, dtype=torch.float64)
    if readout.spec.tpm.is_random and readout.spec.tpm.kind != "discrete":  # the mean is no value of a sweep
        for k, nodes in cells.items():
            removed = compute_readout(state.with_interventions(dict.fromkeys(nodes, Zero())), name, readout)
            assert removed is not None
            effects[k] = value.double() - removed.double()
    elif cells:
        metric = _build_metric(name, readout)
        above = {*ancestors(state.ground, [readout.node])}
        observed = {node: value for node, value in get_fixed(state.model, state.evidence).items() if node in above}
        interventions = {**state.interventions, **observed}  # sweeps accept no evidence
        sentence = SimpleNamespace(state=replace(state, interventions=interventions, evidence={}, previous=None))
        at = {f"{writers[k].name} ({writers[k].kind})": nodes for k, nodes in cells.items()}
        result = sweep(Zero(), sentence, at=at, metric=metric, progress=False)
        effects[list(cells)] = -result.values.double()
    return effects


def _build_metric(name: str, readout: Readout) -> Any:
    """The readout as the metric of a sweep."""
    if readout.spec.tpm.kind == "discrete" and readout.states is not None and len(readout.states) == 2:
        return {name: readout.states}  # the log probabilities differ as the logits do
    if readout.spec.tpm.is_random:
        hint = f"Use of=(a, b), or the node of the logits, the parent of {name}"
        raise UnsupportedError("exact=True", expected=f"a difference of two logits of {name}", hint=hint)

    def project(**values: Tensor) -> Tensor:
        return values[name] @ readout.direction.to(values[name])

    parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
    project.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    return project

"""Contributions: what each writer adds to a logit, along a path of two, or to an attention score.

The readout is `u . z` with the logits, the mean or the value z of a node and a vector u. One pass (`linear_paths`)
computes the parts of all writers and words.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice
from bnet_transformer._core.naming import SLICE, WORD, join_name, split_name
from bnet_transformer._core.tensors import BoolArray, enable_gradients
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.compiler.linear import is_aligned
from bnet_transformer.data.do_values import Zero, is_intervention
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, UnknownNameError, UnsupportedError
from bnet_transformer.graph import ancestors
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.most_probable import plan_marginal_map
from bnet_transformer.inference.posteriors import plan_log_evidence
from bnet_transformer.interventions.cells import find_attention_groups
from bnet_transformer.interventions.linear_pass import multiply_parts
from bnet_transformer.interventions.sweep import sweep
from bnet_transformer.reference import GroundModel, get_fixed
from bnet_transformer.residual_stream.linear_paths import (
    Addend,
    Decomposition,
    LinearRun,
    Step,
    Values,
    Writer,
    WriterTable,
    collect_writers,
    list_writers,
)
from bnet_transformer.residual_stream.results import (
    Contributions,
    PathContributions,
    Readout,
    ScoreContributions,
    compute_readout,
    make_run,
    name_attention_row,
    parse_readout,
    pull_back_readout,
)
from bnet_transformer.tpm import Attention
from bnet_transformer.tpm.attention import ScoredAttention

# --------------------------------------------------------------------------------------------------------------------
# Contributions to attention scores: what each pair of writers adds, one on the side of the query, one of the key.
#
# A score is bilinear in the query and the keys, and these are sums of parts with the scales of norms held fixed. So the
# score is the sum over the pairs of parts, plus the bias by distance. The scores are those before a soft-cap and before
# the softmax, centred over the words that word i attends to. Scores without a softmax are not centred.


AttentionRowIndex = tuple[NodeSpec, tuple[int, ...]]


def find_attention_row(model: GroundModel, name: object) -> AttentionRowIndex | None:
    """The group and the index of a row of attention, such as `j_1_0_9`; None for another name."""
    stem, indices = split_name(name) if isinstance(name, str) else ("", ())
    specs, graph = model.network.specs, model.network.graph
    if stem in graph.by_stem:
        if not any(
            isinstance(specs[group.index].tpm, ScoredAttention) and specs[group.index].tpm.is_random
            for group in graph.by_stem[stem]
        ):
            return None
        group, index = model.ground.unravel_index(model.ground.id(name))
        return specs[group.index], index
    groups = find_attention_groups(model).get(stem)
    if groups is None:
        return None
    for group_stem in dict.fromkeys(group.stem for group in groups):
        parsed = graph.parse_name(join_name(group_stem, indices), model.ground.word_counts)
        if parsed is not None and parsed[0] in groups:
            return specs[parsed[0].index], parsed[1]
    (first, low), (last, high) = ((group, model.ground.shapes[group.index]) for group in (groups[0], groups[-1]))
    axes = (*(() if first.slice is None else (SLICE,)), *model.ground.axes(first))
    ends = name_attention_row(first, (0,) * len(low)), name_attention_row(last, tuple(size - 1 for size in high))
    allowed, expected = " to ".join(ends), "_".join((stem, *axes))
    raise UnknownNameError("row of attention", expected=expected, actual=repr(name), allowed=allowed)


def compute_score_contributions(
    state: SentenceState, name: str, spec: NodeSpec, index: tuple[int, ...], *, removed: Any = None
) -> ScoreContributions:
    """The contributions to the scores of one row of attention; with exact effects, what a removed writer becomes."""
    tpm = spec.tpm
    _check_row(state, name, spec, index)
    assert isinstance(tpm, ScoredAttention)
    read = 1 if tpm.over == "keys" else 0
    run = _make_score_run(state, name, spec)
    row = _compute_row(run, spec, index)
    with torch.no_grad():
        context, parents = gather_parents(run.execution, spec, _get_word(spec, index))
        matrices = tpm.attention_parents(tuple(parents))[2:]  # of a bilinear score, and the bias
        matrices = matrices if tpm.bias is None else matrices[:-1]
        extra = [run.select_node(spec, index, x, 2)[0, None] for x in matrices]
        norms, vectors = _decompose_parents(run, spec, index)
        (single_writers, single), (read_writers, collected) = vectors[1 - read], vectors[read]
        j = context.read_indices[spec.parents[read].slot]
        table = _score_pairs(tpm, single, collected, context.word, j, extra)
    if read == 0:
        table = table.transpose(-3, -2)
    sides = [single_writers, read_writers]
    queries, keys = sides if read == 1 else reversed(sides)
    stack = state.network.specs[spec.parents[read].index].group.word_stack or ""
    indices = tuple(row.words.tolist())
    tokens = tuple(state.tokens[stack][j] for j in indices)
    writers = () if removed is None else (*queries, *keys)
    effects = _compute_score_effects(state, name, spec, index, row, writers, removed) if writers else None
    scores, table = _centre(tpm, row.scores), _centre(tpm, table[..., row.words])
    numbers = table, _centre(tpm, row.positions), scores, row.weights
    is_centred = tpm.normaliser.kind == "softmax"
    return ScoreContributions(name, tuple(norms), queries, keys, tokens, indices, *numbers, effects, is_centred)


@dataclass(frozen=True)
class ScoreRow:
    """A row of scores: the words j to which the word attends, their scores, bias by distance and weights.

    Args:
        words: The words.
        scores: The scores, `[word]`.
        positions: The bias by distance, `[word]`.
        weights: The attention, `[word]`.
    """

    words: Tensor
    scores: Tensor
    positions: Tensor
    weights: Tensor


def _centre(tpm: ScoredAttention, values: Tensor) -> Tensor:
    """Values less their mean over the words; the values themselves if a constant changes the weights."""
    return values - values.mean(-1, keepdim=True) if tpm.normaliser.kind == "softmax" else values


def _get_word(spec: NodeSpec, index: tuple[int, ...]) -> int | None:
    """The word of a node; None for a node without one."""
    return index[-1] if spec.group.word_stack is not None else None


def _make_score_run(state: SentenceState, name: str, spec: NodeSpec) -> LinearRun:
    """The run with the values on all linear paths to the query and the keys."""
    outputs = {parent.index for parent in spec.parents} | {s for parent in spec.parents for _, s in parent.pick}
    groups = frozenset(spec.parents[k].index for k in (0, 1))
    return LinearRun(state, f"contributions to {name}", groups, frozenset(outputs))


@torch.no_grad()
def _compute_row(run: LinearRun, spec: NodeSpec, index: tuple[int, ...]) -> ScoreRow:
    """The scores of a row."""
    tpm = spec.tpm
    assert isinstance(tpm, ScoredAttention)
    context, parents = gather_parents(run.execution, spec, _get_word(spec, index))
    scores, mask = tpm.scores(context, *parents)
    positions = torch.zeros_like(scores)
    if tpm.bias is not None:
        table, j = (
            tpm.attention_parents(tuple(parents))[-1],
            context.read_indices[spec.parents[tpm.over == "keys"].slot],
        )
        positions = tpm.bias.compute_bias(table, context.word, j, from_key=tpm.over == "queries")
    words = mask.reshape(-1, mask.shape[-1])[0].nonzero().flatten()
    weights = tpm.normaliser.normalise(scores, mask)
    return ScoreRow(words, *(run.select_node(spec, index, x, 1)[0, words] for x in (scores, positions, weights)))


def _compute_score_effects(
    state: SentenceState,
    name: str,
    spec: NodeSpec,
    index: tuple[int, ...],
    row: ScoreRow,
    writers: tuple[Writer, ...],
    removed: Any,
) -> dict[str, Tensor]:
    """The centred scores minus those of a run in which a writer is removed at all words, `[word]` by writer."""
    effects, tpm = {}, spec.tpm
    assert isinstance(tpm, ScoredAttention)
    for writer in dict.fromkeys(writers):
        if writer.kind != "bias" and writer.name not in effects:
            pattern = join_name(writer.group, writer.plates) + ("_*" if writer.words else "")
            run = _make_score_run(state.with_interventions({pattern: removed}), name, spec)
            effects[writer.name] = _centre(tpm, row.scores - _compute_row(run, spec, index).scores)
    return effects


def _check_row(state: SentenceState, name: str, spec: NodeSpec, index: tuple[int, ...]) -> None:
    """Raise an error for scores that are set by `do`, or that are not bilinear."""
    model, tpm, subject = state.model, spec.tpm, f"contributions to {name}"
    node = model.ground.ravel_index(spec.group, index)
    if node in model.do or node in model.attention_rows:
        hint = "Use the sentence before this do"
        raise BNetError(subject, expected="scores that the net computes", actual="a row that is set by do", hint=hint)
    is_bilinear = isinstance(tpm, ScoredAttention) and tpm.score.is_bilinear
    if not is_bilinear or all(parent.over != (WORD,) for parent in spec.parents[:2]):
        actual = f"{type(tpm.score).__name__}" if isinstance(tpm, ScoredAttention) else type(tpm).__name__
        hint = "A Score declares it by is_bilinear = True"
        raise UnsupportedError(subject, expected="a score that is linear in query and key", actual=actual, hint=hint)


def _score_pairs(
    tpm: ScoredAttention, single: Tensor, collected: Tensor, i: Tensor, j: Tensor, extra: list[Tensor]
) -> Tensor:
    """The scores of all pairs of parts, `[writer, writer, m]`, from `[writer, (m,) d]`.

    A score is bilinear, so unit vectors give its matrix for each word of the collection.
    """

    def score(vector: Tensor, words: Tensor) -> Tensor:
        if tpm.over == "keys":
            return tpm.score.score_keys(vector, words, i, j, *extra)
        return tpm.score.score_queries(words, vector, j, i, *extra)

    m, size = collected.shape[-2:]
    unit = torch.eye(size, dtype=collected.dtype, device=collected.device)[:, None].expand(size, m, size)
    rows = torch.eye(single.shape[-1], dtype=single.dtype, device=single.device)
    matrix = torch.stack([score(row[None], unit) for row in rows], -3)  # [d of the word, d collected, m]
    left = torch.einsum("...qd,...dem->...mqe", single, matrix)
    return torch.einsum("...mqe,...kme->...qkm", left, collected)


def _decompose_parents(
    run: LinearRun, spec: NodeSpec, index: tuple[int, ...]
) -> tuple[list[str], list[tuple[tuple[Writer, ...], Tensor]]]:
    """The norms, and the writers and the parts of the parents in the first two slots, `[writer, *collected, d]`."""
    word, starts = _get_word(spec, index), dict[int, BoolArray]()
    for parent in spec.parents[:2]:
        words = np.ones(run.count_words(parent.index), dtype=bool)
        if word is not None and is_aligned(parent) and len(words) > 1:
            words = np.arange(len(words)) == word
        starts[parent.index] = starts.get(parent.index, words) | words
    parts = Decomposition(run, starts)
    sides = []
    for k, parent in enumerate(spec.parents[:2]):
        writers, block = parts.join(parent.index)
        values = block[0].movedim(run.layout.word_dim - 1, 0)  # the writers as a batch
        value = run.select_node(spec, index, run.gather(spec, {parent.index: values}, word)[1][k], 1 + len(parent.over))
        sides.append(_drop_zero_biases(writers, value))
    return run.list_norms(parts.forward.words), sides


def _drop_zero_biases(writers: Sequence[Writer], parts: Tensor) -> tuple[tuple[Writer, ...], Tensor]:
    """The writers and parts, `[writer, ...]`, without biases that add nothing, such as those of other heads."""
    is_used = parts.flatten(1).any(-1).tolist()
    used = [k for k, writer in enumerate(writers) if writer.kind != "bias" or is_used[k]]
    return tuple(writers[k] for k in used), parts[used]


# --------------------------------------------------------------------------------------------------------------------
# Paths of two: what each writer adds to a readout through the values of each head.
#
# One pass back from the readout gives the adjoint of each head, and a short pass from the values of the head continues
# to the first sum. There it meets the parts of the writers, which one pass from the words computes for all heads.


VALUE_SLOT = 2  # of an Attention


@dataclass
class _ValueBranch:
    """The values of the heads of one attention: a pass back from them, with one seed for each head.

    Args:
        sums: The steps of the first sums.
        between: The writers between these sums and the values, such as biases.
        norms: The norms between them.
        parts: The parts of all writers by name and kind, `[head]`.
    """

    sums: list[Step]
    between: tuple[Writer, ...]
    norms: list[str]
    parts: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def add(self, writers: Sequence[Writer], parts: Tensor) -> None:
        """Add parts, `[head, writer]`, to those of their writers."""
        for writer, part in zip(writers, parts.unbind(1), strict=True):
            key = writer.name, writer.kind
            self.parts[key] = self.parts[key] + part if key in self.parts else part


def compute_paths(state: SentenceState, name: str, readout: Readout) -> PathContributions:
    """The parts of the paths through the values of each head."""
    run = _make_path_run(state, readout)
    back = pull_back_readout(run, readout)
    pairs = [(step, addend) for step in back.steps for addend in step.addends if addend.kind == "attention"]
    if not pairs:
        raise UnsupportedError(f"{run.subject}, paths=2", expected="a readout that reads heads", hint="Use paths=1")
    heads = [writer for step, addend in pairs for writer in list_writers(run, step.spec, addend, step.words).values()]
    branches = [_follow_values(run, step, addend) for step, addend in pairs]
    starts: dict[int, BoolArray] = {}
    for step in (step for branch in branches for step in branch.sums):
        starts[step.spec.group.index] = starts.get(step.spec.group.index, step.words) | step.words
    decomposition = Decomposition(run, starts)
    axis, words = run.layout.word_dim, decomposition.forward.words
    for index in starts:
        writers, block = decomposition.join(index)
        for branch in branches:
            for step in (step for step in branch.sums if step.spec.group.index == index):
                every = np.arange(len(step.words))
                needed = every == (every if step.word is None else step.word)
                branch.add(writers, multiply_parts(step.adjoint, block, axis, needed, words[index])[0])
    order = {run.network.graph.groups[index].name: k for k, index in enumerate(run.linear_groups)}
    listed = [*(writer for branch in branches for writer in branch.between), *decomposition.writers]
    by_key = {(writer.name, writer.kind): writer for writer in sorted(listed, key=lambda writer: order[writer.group])}
    values = []
    for branch in branches:
        zero = torch.zeros_like(next(iter(branch.parts.values())))  # of writers that these heads do not read
        values.append(torch.stack([branch.parts.get(key, zero) for key in by_key], -1))
    between = (norm for branch in branches for norm in branch.norms)
    norms = dict.fromkeys((*run.list_norms(words), *between, *back.norms))
    axes = tuple(heads), tuple(by_key.values())
    return PathContributions(name, tuple(norms), readout.label, *axes, torch.cat(values))


def _make_path_run(state: SentenceState, readout: Readout) -> LinearRun:
    """The run with the values on the linear paths to a readout and to the values of all heads that it reads."""
    run = make_run(state, readout)
    specs = [state.network.specs[index] for index in run.linear_groups if index not in run.structure.leaves]
    attention = [spec for spec in specs if spec.tpm.has_attention]
    for spec in attention:
        if not isinstance(spec.tpm, Attention):
            actual = f"{spec.group.name} with the TPM {type(spec.tpm).__name__}"
            raise UnsupportedError(f"{run.subject}, paths=2", expected="heads with an Attention", actual=actual)
    return make_run(state, readout, {spec.parents[VALUE_SLOT].index for spec in attention})


def _follow_values(run: LinearRun, step: Step, addend: Addend) -> _ValueBranch:
    """The branch of an attention: a pass back from its values to the first sums."""
    spec = step.spec
    heads = [*list_writers(run, spec, addend, step.words)]
    seeds = run.structure.split_units(addend.mask(step.adjoint[0]), spec, run.layout)[heads]
    sums, between = run.structure.find_sums([spec.parents[VALUE_SLOT].index], run.execution.patched)

    def read(values: Values) -> Tensor:
        return run.evaluate(spec, (VALUE_SLOT,), values, step.word)

    _, steps = run.pull_back(spec, (VALUE_SLOT,), step.words, step.word, read, seeds, sums)
    by_group = {step.spec.group.index: step for step in steps}
    table = collect_writers(run, [by_group[index] for index in between], len(heads))
    norms = run.list_norms({index: by_group[index].words for index in between})
    branch = _ValueBranch([by_group[index] for index in sums], table.writers, norms)
    branch.add(table.writers, table.values.sum(-1))
    return branch


@enable_gradients()
def compute_contributions(
    state: SentenceState, name: str, of: object, paths: int, exact: object
) -> Contributions | PathContributions | ScoreContributions:
    """The contributions to a readout, along paths of two, or to a row of attention scores."""
    check_choice("paths", paths, (1, 2))
    if not isinstance(exact, bool) and not is_intervention(exact):
        expected = "True, False, or what a removed writer becomes: Zero(), Mean(sentences), a function, ..."
        raise BNetError("exact", expected=expected, actual=exact)
    removed = Zero() if exact is True else None if exact is False else exact
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
        scores = compute_score_contributions(state, name, *row, removed=removed)
        return replace(scores, choices=choices, choice_prob=prob, digest=digest)
    if paths == 2 and removed is not None:
        hint = "Use paths=1 for the effects of writers"
        raise BNetError("exact", expected="False for paths=2, which have no effects", actual=exact, hint=hint)
    readout = parse_readout(state, name, of)
    name = state.ground.name(readout.node)  # results with the same node are comparable, however it was named
    state, choices, prob = fix_choices(state, readout.node)
    if paths == 2:
        return replace(compute_paths(state, name, readout), choices=choices, choice_prob=prob, digest=digest)
    run = make_run(state, readout)
    value, constant, steps, norms = pull_back_readout(run, readout)
    table = _add_constant(collect_writers(run, steps, 1, split_reads=True), readout, constant)
    effects = None if removed is None else _compute_effects(state, name, readout, table.writers, value, removed)
    parts = table.writers, table.words, table.values[0]
    special = (*state.encoded.flag_special_tokens(state.network), False)  # the last entry is for nodes without words
    numbers = *parts, value, effects, readout, special
    return Contributions(name, norms, readout.label, *numbers, choices=choices, choice_prob=prob, digest=digest)


def fix_choices(state: SentenceState, node: int) -> tuple[SentenceState, dict[str, int], float]:
    """The sentence at the most probable joint state of the latent choices on which a node depends.

    The contributions are of this state, because an average over the states would be of no run of the net.

    Returns:
        The sentence with these choices set, as are those of groups before the node, on which the node does not depend;
        the state of each choice, by name; and the posterior probability of the joint state.

    Raises:
        BudgetError: The choices have too many joint states.
    """
    ground, model, network = state.ground, state.model, state.network
    known, index = get_fixed(model, state.evidence), ground.group_of(node).index
    choices = state.evaluator.find_open_choices(sorted(ground.parents(node)))
    groups = {ground.group_of(choice).index for choice in choices} | network.graph.ancestral_set([index]) - {index}
    specs = [network.specs[i] for i in sorted(groups) if network.specs[i].tpm.is_random]
    discrete = [spec.group for spec in specs if spec.tpm.kind == "discrete"]
    nodes = {node for group in discrete for node in ground.select_nodes(group).tolist()} - state.interventions.keys()
    if nodes <= known.keys():
        return state, {}, 1.0
    by_name, prob = dict[str, int](), 1.0
    if choices:
        query = state.query(choices)
        choices, (states,), (log_prob,) = plan_marginal_map(query, 1).run()
        known = {**dict(zip(choices, states, strict=True)), **known}
        by_name = {ground.name(choice): int(state) for choice, state in zip(choices, states, strict=True)}
        prob = float((log_prob - plan_log_evidence(replace(query, nodes=())).run()).exp())
    interventions = {**state.interventions, **{node: known.get(node, torch.tensor(0)) for node in nodes}}
    evidence = {node: value for node, value in state.evidence.items() if node not in nodes}
    fixed = replace(state, interventions=interventions, evidence=evidence, previous=state.evaluator)
    return fixed, by_name, prob


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
    return WriterTable((*table.writers, writer), table.words, values)


# the exact effects


def _compute_effects(
    state: SentenceState, name: str, readout: Readout, writers: tuple[Writer, ...], value: Tensor, removed: Any
) -> Tensor:
    """The readout minus the readout of a run with each writer removed at its words, `[writer]`; NaN for biases."""
    cells = {k: writer.nodes for k, writer in enumerate(writers) if writer.kind != "bias"}
    effects = torch.full((len(writers),), torch.nan, dtype=torch.float64)
    if readout.spec.tpm.is_random and readout.spec.tpm.kind != "discrete":  # the mean is no value of a sweep
        for k, nodes in cells.items():
            without = compute_readout(state.with_interventions(dict.fromkeys(nodes, removed)), name, readout)
            assert without is not None
            effects[k] = value.double() - without.double()
    elif cells:
        metric = _build_metric(name, readout)
        above = {*ancestors(state.ground, [readout.node])}
        observed = {node: value for node, value in get_fixed(state.model, state.evidence).items() if node in above}
        interventions = {**state.interventions, **observed}  # sweeps accept no evidence
        sentence = SimpleNamespace(state=replace(state, interventions=interventions, evidence={}, previous=None))
        at = {f"{writers[k].name} ({writers[k].kind})": nodes for k, nodes in cells.items()}
        result = sweep(removed, sentence, at=at, metric=metric, progress=False)
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

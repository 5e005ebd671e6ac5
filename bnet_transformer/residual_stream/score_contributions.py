"""Contributions to attention scores: what each pair of writers adds, one on the side of the query, one of the key.

A score is bilinear in the query and the keys, and these are sums of parts with the scales of norms held fixed. So the
score is the sum over the pairs of parts, plus the bias by distance. The scores are those before a soft-cap and before
the softmax, centred over the words that word i attends to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD, join_name, split_name
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, UnsupportedError, unknown_name_error
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.intervention_values import Zero
from bnet_transformer.interventions.sweeps.cell_spec import find_attention_groups
from bnet_transformer.reference import GroundModel
from bnet_transformer.residual_stream.linear_paths import LinearRun, compute_vjp, is_wordwise
from bnet_transformer.residual_stream.results import ScoreContributions
from bnet_transformer.residual_stream.writers import Writer, WriterTable, collect_writers
from bnet_transformer.tpm import EvalContext
from bnet_transformer.tpm.attention import ScoredAttention

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
    names = {}
    for group in groups:
        start = () if group.slice is None else (group.slice,)
        shape = model.ground.shapes[group.index]
        has_slice = indices[: len(start)] == start
        position = indices[len(start) :]
        if has_slice and len(position) == len(shape) and all(k < size for k, size in zip(position, shape, strict=True)):
            return specs[group.index], position
        names["_".join(map(str, [stem, *start, *(f"0..{size - 1}" for size in shape)]))] = group
    raise unknown_name_error("row of attention", name, names)


def compute_score_contributions(
    state: SentenceState, name: str, spec: NodeSpec, index: tuple[int, ...], *, exact: bool
) -> ScoreContributions:
    """The contributions to the scores of one row of attention."""
    tpm = spec.tpm
    _check_row(state, name, spec, index)
    assert isinstance(tpm, ScoredAttention)
    read = 1 if tpm.over == "keys" else 0
    run = _make_run(state, name, spec)
    row = _compute_row(run, spec, index)
    with torch.no_grad():
        word = _get_word(spec, index)
        context, parents = gather_parents(run.execution, spec, word)
        extra = [run.select_node(spec, index, x, 2)[..., None, :, :] for x in _get_matrices(tpm, parents)]
    single, single_table = _collect_single(run, spec, index, 1 - read, word)
    collected, read_writers, norms = _collect_read(run, spec, index, read, word)
    score = _make_score(tpm, context, spec.parents[read].slot, extra)
    with torch.no_grad():
        table = torch.stack([score(single[..., k : k + 1, :], collected) for k in range(single.shape[-2])], -3)
    if read == 0:
        table = table.transpose(-3, -2)
    sides = [single_table.writers, read_writers]
    queries, keys = sides if read == 1 else reversed(sides)
    stack = state.network.specs[spec.parents[read].index].group.word_stack or ""
    tokens = tuple(state.tokens[stack][k] for k in row.words.tolist())
    all_norms = tuple(dict.fromkeys((*single_table.norms, *norms)))
    effects = _compute_effects(state, name, spec, index, row, (*queries, *keys)) if exact else None
    scores, table = _centre(row.scores), _centre(table[..., row.words])
    positions = _centre(row.positions)
    return ScoreContributions(name, all_norms, queries, keys, tokens, table, positions, scores, row.weights, effects)


@dataclass(frozen=True)
class ScoreRow:
    """A row of scores: the words j to which the word attends, their scores, bias by distance and weights.

    Args:
        words: The words.
        scores: The scores, `[*states, word]`.
        positions: The bias by distance, `[*states, word]`.
        weights: The attention, `[*states, word]`.
    """

    words: Tensor
    scores: Tensor
    positions: Tensor
    weights: Tensor


def _centre(values: Tensor) -> Tensor:
    """Values less their mean over the words."""
    return values - values.mean(-1, keepdim=True)


def _get_word(spec: NodeSpec, index: tuple[int, ...]) -> int | None:
    """The word of a node; None for a node without one."""
    return index[-1] if spec.group.word_stack is not None else None


def _make_run(state: SentenceState, name: str, spec: NodeSpec) -> LinearRun:
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
    rows = (run.select_node(spec, index, run.layout.pad_dims(x, 1), 1) for x in (scores, positions, weights))
    return ScoreRow(words, *(run.expand_node_states(x, 1)[..., words] for x in rows))


def _compute_effects(
    state: SentenceState, name: str, spec: NodeSpec, index: tuple[int, ...], row: ScoreRow, writers: tuple[Writer, ...]
) -> dict[str, Tensor]:
    """The centred scores minus those of a run in which a writer is zero at all words, `[*states, word]` by writer."""
    effects = {}
    for writer in dict.fromkeys(writers):
        if writer.kind != "bias" and writer.name not in effects:
            pattern = join_name(writer.group, writer.plates) + ("_*" if writer.words else "")
            removed = _compute_row(_make_run(state.with_interventions({pattern: Zero()}), name, spec), spec, index)
            effects[writer.name] = _centre(row.scores) - _centre(removed.scores)
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


def _get_matrices(tpm: ScoredAttention, parents: list[Tensor]) -> tuple[Tensor, ...]:
    """The further parents of the score, such as the matrix of a bilinear score."""
    extra = tpm.attention_parents(tuple(parents))[2:]
    return extra[:-1] if tpm.bias is not None else extra


def _make_score(
    tpm: ScoredAttention, context: EvalContext, slot: str, extra: list[Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    """The score of parts: `[*states, 1, d]` of the word itself, `[*states, writer, m, d]` of the collection."""
    i, j = context.word, context.read_indices[slot]

    def score(single: Tensor, collected: Tensor) -> Tensor:
        if tpm.over == "keys":
            return tpm.score.score_keys(single, collected, i, j, *extra)
        return tpm.score.score_queries(collected, single, j, i, *extra)

    return score


def _seed(
    run: LinearRun, spec: NodeSpec, index: tuple[int, ...], k: int, word: int | None
) -> tuple[Tensor, dict[int, Tensor]]:
    """A parent at a node, `[*states, *collected, d]`, and its leaves."""
    _, parents, leaves = run.gather_leaves(spec, (k,), word)
    event_dims = 1 + len(spec.parents[k].over)
    return run.expand_node_states(run.select_node(spec, index, parents[k], event_dims), event_dims), leaves


def _collect_single(
    run: LinearRun, spec: NodeSpec, index: tuple[int, ...], k: int, word: int | None
) -> tuple[Tensor, WriterTable]:
    """The parts of the vector of the word itself, `[*states, writer, d]`."""
    vector, leaves = _seed(run, spec, index, k, word)
    size = vector.shape[-1]
    unit = torch.eye(size, dtype=vector.dtype, device=vector.device)
    seeds = unit.reshape(size, *[1] * (vector.dim() - 1), size).expand(size, *vector.shape)
    gradients = compute_vjp(vector, list(leaves.values()), seeds)
    table = collect_writers(run, run.pull_back(dict(zip(leaves, gradients, strict=True))), size)
    return table.values.sum(-1).movedim(0, -1), table


def _collect_read(
    run: LinearRun, spec: NodeSpec, index: tuple[int, ...], k: int, word: int | None
) -> tuple[Tensor, tuple[Writer, ...], tuple[str, ...]]:
    """The parts of the vectors of a collection, `[*states, writer, m, d]`, their writers, and norms."""
    vectors, leaves = _seed(run, spec, index, k, word)
    m, size = vectors.shape[-2:]
    unit = torch.eye(size, dtype=vectors.dtype, device=vectors.device)
    unit = unit.reshape(size, *[1] * (vectors.dim() - 1), size).expand(size, *vectors.shape)

    def collect(seeds: Tensor) -> WriterTable:
        gradients = compute_vjp(vectors, list(leaves.values()), seeds)
        return collect_writers(run, run.pull_back(dict(zip(leaves, gradients, strict=True))), size)

    if is_wordwise(run, {spec.parents[k].index}):  # word j of a writer is word j of the key: one pass for all words
        table = collect(unit)
        stack = run.network.specs[spec.parents[k].index].group.word_stack or ""
        start = 0
        for name, tokens in run.state.tokens.items():
            if name == stack:
                break
            start += len(tokens)
        return table.values[..., start : start + m].movedim(0, -1), table.writers, table.norms
    tables = []
    for j in range(m):
        is_word = torch.zeros(m, 1, dtype=unit.dtype, device=unit.device)
        is_word[j] = 1
        tables.append(collect(unit * is_word))
    writers = tuple(dict.fromkeys(w for table in tables for w in table.writers))
    names = [writer.name for writer in writers]
    parts = vectors.new_zeros(*vectors.shape[:-2], len(writers), m, size)
    for j, table in enumerate(tables):
        for position, writer in enumerate(table.writers):
            parts[..., names.index(writer.name), j, :] += table.values[..., position, :].sum(-1).movedim(0, -1)
    return parts, writers, tuple(dict.fromkeys(name for table in tables for name in table.norms))

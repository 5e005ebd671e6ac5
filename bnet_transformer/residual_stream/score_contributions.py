"""Contributions to attention scores: what each pair of writers adds, one on the side of the query, one of the key.

A score is bilinear in the query and the keys, and these are sums of parts with the scales of norms held fixed. So the
score is the sum over the pairs of parts, plus the bias by distance. The scores are those before a soft-cap and before
the softmax, centred over the words that word i attends to. Scores without a softmax are not centred.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bnet_transformer._core.naming import SLICE, WORD, join_name, split_name
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.compiler.linear_groups import is_aligned
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, UnknownNameError, UnsupportedError
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.intervention_values import Zero
from bnet_transformer.interventions.sweeps.cell_spec import find_attention_groups
from bnet_transformer.reference import GroundModel
from bnet_transformer.residual_stream.decomposition import decompose
from bnet_transformer.residual_stream.linear_paths import LinearRun
from bnet_transformer.residual_stream.readout import name_attention_row
from bnet_transformer.residual_stream.results import ScoreContributions
from bnet_transformer.residual_stream.writers import Writer
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
    state: SentenceState, name: str, spec: NodeSpec, index: tuple[int, ...], *, exact: bool
) -> ScoreContributions:
    """The contributions to the scores of one row of attention."""
    tpm = spec.tpm
    _check_row(state, name, spec, index)
    assert isinstance(tpm, ScoredAttention)
    read = 1 if tpm.over == "keys" else 0
    run = _make_run(state, name, spec)
    row = _compute_row(run, spec, index)
    word, norms = _get_word(spec, index), dict[str, None]()
    with torch.no_grad():
        context, parents = gather_parents(run.execution, spec, word)
        extra = [run.select_node(spec, index, x, 2)[..., None, :, :] for x in _get_matrices(tpm, parents)]
        vectors = _decompose_parents(run, spec, index, word, norms)
        (single_writers, single), (read_writers, collected) = vectors[1 - read], vectors[read]
        score = _make_score(tpm, context, spec.parents[read].slot, extra)
        table = _score_pairs(score, single, collected)
    if read == 0:
        table = table.transpose(-3, -2)
    sides = [single_writers, read_writers]
    queries, keys = sides if read == 1 else reversed(sides)
    stack = state.network.specs[spec.parents[read].index].group.word_stack or ""
    indices = tuple(row.words.tolist())
    tokens = tuple(state.tokens[stack][j] for j in indices)
    effects = _compute_effects(state, name, spec, index, row, (*queries, *keys)) if exact else None
    scores, table = _centre(tpm, row.scores), _centre(tpm, table[..., row.words])
    numbers = table, _centre(tpm, row.positions), scores, row.weights
    is_centred = tpm.normaliser.kind == "softmax"
    return ScoreContributions(name, tuple(norms), queries, keys, tokens, indices, *numbers, effects, is_centred)


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


def _centre(tpm: ScoredAttention, values: Tensor) -> Tensor:
    """Values less their mean over the words; the values themselves if a constant changes the weights."""
    return values - values.mean(-1, keepdim=True) if tpm.normaliser.kind == "softmax" else values


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
    effects, tpm = {}, spec.tpm
    assert isinstance(tpm, ScoredAttention)
    for writer in dict.fromkeys(writers):
        if writer.kind != "bias" and writer.name not in effects:
            pattern = join_name(writer.group, writer.plates) + ("_*" if writer.words else "")
            removed = _compute_row(_make_run(state.with_interventions({pattern: Zero()}), name, spec), spec, index)
            effects[writer.name] = _centre(tpm, row.scores - removed.scores)
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


def _score_pairs(score: Callable[[Tensor, Tensor], Tensor], single: Tensor, collected: Tensor) -> Tensor:
    """The scores of all pairs of parts, `[*states, writer, writer, m]`, from `[*states, writer, (m,) d]`.

    A score is bilinear, so unit vectors give its matrix for each word of the collection.
    """
    m, size = collected.shape[-2:]
    unit = torch.eye(size, dtype=collected.dtype, device=collected.device)[:, None].expand(size, m, size)
    rows = torch.eye(single.shape[-1], dtype=single.dtype, device=single.device)
    matrix = torch.stack([score(row[None], unit) for row in rows], -3)  # [*states, d of the word, d collected, m]
    left = torch.einsum("...qd,...dem->...mqe", single, matrix)
    return torch.einsum("...mqe,...kme->...qkm", left, collected)


def _decompose_parents(
    run: LinearRun, spec: NodeSpec, index: tuple[int, ...], word: int | None, norms: dict[str, None]
) -> list[tuple[tuple[Writer, ...], Tensor]]:
    """The writers and the parts of the parents in the first two slots, `[*states, writer, *collected, d]`."""
    starts: dict[int, frozenset[int]] = {}
    for parent in spec.parents[:2]:
        stack = run.network.specs[parent.index].group.word_stack
        words = range(0 if stack is None else run.execution.word_counts[stack])
        read = run.find_read_words(spec, parent, () if word is None else (word,))
        read = read if is_aligned(parent) else frozenset(words)
        starts[parent.index] = starts.get(parent.index, frozenset()) | read
    sides: dict[int, tuple[tuple[Writer, ...], Tensor]] = {}
    for group, parts in decompose(run, starts, norms):
        merged = parts.merge(run.layout.batch_dim)
        for k in (0, 1):
            parent = spec.parents[k]
            if parent.index == group:
                execution = replace(run.execution, values={**run.execution.values, group: merged})
                value = gather_parents(execution, spec, word)[1][k]
                value = run.select_node(spec, index, value, 1 + len(parent.over), keep_batch=True)
                sides[k] = _drop_zero_biases(
                    parts.writers, run.expand_node_states(value, 2 + len(parent.over)), run.layout.batch_dim
                )
    return [sides[0], sides[1]]


def _drop_zero_biases(writers: tuple[Writer, ...], parts: Tensor, writer_dim: int) -> tuple[tuple[Writer, ...], Tensor]:
    """The writers and parts without biases that add nothing, such as those of other heads."""
    is_used = parts.movedim(writer_dim, 0).flatten(1).any(-1).tolist()
    used = [k for k, writer in enumerate(writers) if writer.kind != "bias" or is_used[k]]
    if len(used) == len(writers):
        return writers, parts
    return tuple(writers[k] for k in used), parts.index_select(writer_dim, torch.tensor(used, device=parts.device))

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

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice
from bnet_transformer._core.naming import SLICE, WORD, join_name, split_name
from bnet_transformer._core.tensors import enable_gradients
from bnet_transformer.compiler.fused import find_linear_groups, get_linear_positions, is_aligned
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, UnknownNameError, UnsupportedError
from bnet_transformer.graph import ancestors
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.do_values import Zero
from bnet_transformer.inference.posteriors import plan_log_evidence, plan_marginal_map
from bnet_transformer.interventions.cells import find_attention_groups
from bnet_transformer.interventions.sweep import sweep
from bnet_transformer.reference import GroundModel, get_fixed
from bnet_transformer.residual_stream.linear_paths import (
    ActiveWords,
    GroupParts,
    LinearRun,
    Step,
    Writer,
    WriterTable,
    collect_writers,
    decompose,
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
    seed_readout,
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
    state: SentenceState, name: str, spec: NodeSpec, index: tuple[int, ...], *, exact: bool
) -> ScoreContributions:
    """The contributions to the scores of one row of attention."""
    tpm = spec.tpm
    _check_row(state, name, spec, index)
    assert isinstance(tpm, ScoredAttention)
    read = 1 if tpm.over == "keys" else 0
    run = _make_score_run(state, name, spec)
    row = _compute_row(run, spec, index)
    word, norms = _get_word(spec, index), dict[str, None]()
    with torch.no_grad():
        context, parents = gather_parents(run.execution, spec, word)
        matrices = tpm.attention_parents(tuple(parents))[2:]  # of a bilinear score, and the bias
        matrices = matrices if tpm.bias is None else matrices[:-1]
        extra = [run.select_node(spec, index, x, 2)[..., None, :, :] for x in matrices]
        vectors = _decompose_parents(run, spec, index, word, norms)
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
    effects = _compute_score_effects(state, name, spec, index, row, (*queries, *keys)) if exact else None
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
    rows = (run.select_node(spec, index, run.layout.pad_dims(x, 1), 1) for x in (scores, positions, weights))
    return ScoreRow(words, *(run.expand_node_states(x, 1)[..., words] for x in rows))


def _compute_score_effects(
    state: SentenceState, name: str, spec: NodeSpec, index: tuple[int, ...], row: ScoreRow, writers: tuple[Writer, ...]
) -> dict[str, Tensor]:
    """The centred scores minus those of a run in which a writer is zero at all words, `[*states, word]` by writer."""
    effects, tpm = {}, spec.tpm
    assert isinstance(tpm, ScoredAttention)
    for writer in dict.fromkeys(writers):
        if writer.kind != "bias" and writer.name not in effects:
            pattern = join_name(writer.group, writer.plates) + ("_*" if writer.words else "")
            removed = _compute_row(
                _make_score_run(state.with_interventions({pattern: Zero()}), name, spec), spec, index
            )
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


def _score_pairs(
    tpm: ScoredAttention, single: Tensor, collected: Tensor, i: Tensor, j: Tensor, extra: list[Tensor]
) -> Tensor:
    """The scores of all pairs of parts, `[*states, writer, writer, m]`, from `[*states, writer, (m,) d]`.

    A score is bilinear, so unit vectors give its matrix for each word of the collection.
    """

    def score(vector: Tensor, words: Tensor) -> Tensor:
        if tpm.over == "keys":
            return tpm.score.score_keys(vector, words, i, j, *extra)
        return tpm.score.score_queries(words, vector, j, i, *extra)

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


# --------------------------------------------------------------------------------------------------------------------
# Paths of two: what each writer adds to a readout through the values of each head.
#
# One pass back from the readout gives the adjoint of each head, and a short pass from the values of the head continues
# to the first sum. There it meets the parts of the writers, which one pass from the words computes for all heads.


VALUE_SLOT = 2  # of an Attention


WriterKey = tuple[str, str]  # name and kind: the active words of a writer differ between branches


@dataclass
class _ValueBranch:
    """The values of the heads of one attention.

    Args:
        adjoints: Their adjoints at the first sums, `[seed, *layout, *shape]`; one seed for each index along the plates.
        active: The words of these sums.
        steps: The parts between these sums and the values, such as biases.
        parts: The parts of all writers, `[*states, seed]`.
    """

    adjoints: dict[int, Tensor]
    active: ActiveWords
    steps: WriterTable
    parts: dict[WriterKey, Tensor] = field(default_factory=dict)

    def add(self, writers: Sequence[Writer], parts: Tensor) -> None:
        """Add parts, `[*states, seed, writer]`, to those of their writers."""
        for k, writer in enumerate(writers):
            key = writer.name, writer.kind
            self.parts[key] = self.parts[key] + parts[..., k] if key in self.parts else parts[..., k]


def compute_paths(state: SentenceState, name: str, readout: Readout) -> PathContributions:
    """The parts of the paths through the values of each head."""
    run = _make_path_run(state, readout)
    seed = seed_readout(run, readout)
    steps = list(run.pull_back(seed.adjoints, seed.active))
    heads = [step for step in steps if step.kind == "attention"]
    if not heads:
        raise _no_heads_error(run)
    direct = collect_writers(run, heads, 1)
    branches = [_follow_values(run, step) for step in reversed(heads)]
    starts: dict[int, frozenset[int]] = {}
    for branch in branches:
        starts |= {index: starts.get(index, frozenset()) | branch.active[index] for index in branch.adjoints}
    norms: dict[str, None] = {}
    writers: dict[WriterKey, Writer] = {}
    for index, parts in decompose(run, starts, norms):
        writers |= {(writer.name, writer.kind): writer for writer in parts.writers}
        for branch in branches:
            if index in branch.adjoints:
                word = run.get_word(index, branch.active)
                branch.add(parts.writers, _project_parts(run, parts, branch.adjoints[index], word))
    for branch in branches:
        branch.add(branch.steps.writers, branch.steps.values.sum(-1).movedim(0, -2))
        writers |= {(writer.name, writer.kind): writer for writer in branch.steps.writers}
        norms |= dict.fromkeys(branch.steps.norms)
    order = {run.network.graph.groups[index].name: k for k, index in enumerate(reversed(run.linear_groups))}
    writers = dict(sorted(writers.items(), key=lambda item: order[item[1].group]))
    norms |= dict.fromkeys((*collect_writers(run, steps, 1).norms, *seed.norms))
    values = torch.cat([_stack_parts(branch, [*writers]) for branch in branches], -2)  # [*states, head, writer]
    heads_and_writers = direct.writers, tuple(writers.values())
    return PathContributions(name, tuple(norms), readout.label, *heads_and_writers, values)


def _stack_parts(branch: _ValueBranch, keys: Sequence[WriterKey]) -> Tensor:
    """The parts of a branch as a table, `[*states, seed, writer]`; zero for a writer that it does not read."""
    zero = torch.zeros_like(next(iter(branch.parts.values())))
    return torch.stack([branch.parts.get(key, zero) for key in keys], -1)


def _make_path_run(state: SentenceState, readout: Readout) -> LinearRun:
    """The run with the values on the linear paths to a readout and to the values of all heads that it reads."""
    run, specs = make_run(state, readout), state.network.specs
    reached = find_linear_groups(run.network, run.groups, run.set_groups)
    attention = [i for i in reached if specs[i].tpm.has_attention and i not in run.set_groups]
    if not attention:
        raise _no_heads_error(run)
    for spec in (specs[i] for i in attention):
        if not isinstance(spec.tpm, Attention):
            actual = f"{spec.group.name} with the TPM {type(spec.tpm).__name__}"
            raise UnsupportedError(f"{run.subject}, paths=2", expected="heads with an Attention", actual=actual)
    return make_run(state, readout, {specs[i].parents[VALUE_SLOT].index for i in attention})


def _no_heads_error(run: LinearRun) -> UnsupportedError:
    """The error for a readout without heads, or whose heads are all set."""
    return UnsupportedError(f"{run.subject}, paths=2", expected="a readout that reads heads", hint="Use paths=1")


def _follow_values(run: LinearRun, step: Step) -> _ValueBranch:
    """The branch of an attention: a pass back from its values to the first sums."""
    spec, layout = step.spec, run.layout
    assert isinstance(spec.tpm, Attention)
    is_narrow = step.adjoint.shape[layout.word_dim + 1] == 1 and len(step.words) == 1
    word = step.words[0] if is_narrow and spec.group.word_stack is not None else None
    value = spec.parents[VALUE_SLOT]
    active = run.find_active_words({value.index: run.find_read_words(spec, value, step.words)})
    linear_map = run.make_linear_map(spec, word)
    _, parents, leaves = run.gather_leaves(spec, (VALUE_SLOT,), word, active)
    heads = list(list_writers(run, spec, step.kind, step.words, step.nodes))
    gradients = run.compute_adjoints(linear_map.evaluate(*parents), leaves, _split_heads(run, step)[heads], active)
    sums = _find_sums(run, value.index)
    steps = list(run.pull_back(gradients, active, sums))
    adjoints = {item.spec.group.index: item.adjoint for item in steps if item.spec.group.index in sums}
    return _ValueBranch(adjoints, active, collect_writers(run, steps, len(gradients[value.index])))


def _split_heads(run: LinearRun, step: Step) -> Tensor:
    """The adjoint of an attention with one seed for each index along its plates, `[seed, *layout, *shape]`."""
    seeds = step.adjoint
    for axis in (run.layout.axis(plate) for plate in step.spec.group.plates):
        size = seeds.shape[axis + 1]
        unit = torch.eye(size, dtype=seeds.dtype, device=seeds.device)
        shape = [1] * seeds.dim()
        shape[axis + 1] = size
        seeds = (seeds[:, None] * unit.reshape(size, *shape[1:])[None]).flatten(0, 1)
    return seeds


def _find_sums(run: LinearRun, start: int) -> set[int]:
    """The first groups before a group that add several parents, or that are writers; between them is one path."""
    sums, stack = set(), [start]
    while stack:
        spec = run.network.specs[stack.pop()]
        parents = {spec.parents[k].index for k in get_linear_positions(spec, run.set_groups)}
        if len(parents) == 1 and spec.group.index not in run.execution.patched:
            stack += parents
        else:
            sums.add(spec.group.index)
    return sums


def _project_parts(run: LinearRun, parts: GroupParts, adjoint: Tensor, word: int | None) -> Tensor:
    """The products of parts with adjoints, `[seed, *layout, *shape]`, as `[*states, seed, writer]`."""
    dim, products = run.layout.batch_dim, []
    rows = adjoint.squeeze(dim + 1).movedim(0, dim)  # [*states, seed, *plates, word, *shape]
    for _, block in parts.blocks:
        narrow = run.narrow_words(block, word)
        sizes = adjoint.shape[dim + 2 :]
        narrow = narrow.expand(*narrow.shape[: dim + 1], *sizes)
        products.append(rows.flatten(dim + 1) @ narrow.flatten(dim + 1).mT)
    states = [max(product.shape[k] for product in products) for k in range(dim)]
    return torch.cat([product.expand(*states, *product.shape[dim:]) for product in products], -1)


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
    choices, (states,), (log_prob,) = plan_marginal_map(query, 1).run()
    known = {**dict(zip(choices, states, strict=True)), **get_fixed(model, state.evidence)}
    groups = {ground.group_of(choice) for choice in choices}
    nodes = {node for group in groups for node in ground.select_nodes(group).tolist()} - state.interventions.keys()
    interventions = {**state.interventions, **{node: known.get(node, torch.tensor(0)) for node in nodes}}
    evidence = {node: value for node, value in state.evidence.items() if node not in nodes}
    fixed = replace(state, interventions=interventions, evidence=evidence, previous=state.evaluator)
    by_name = {ground.name(choice): int(state) for choice, state in zip(choices, states, strict=True)}
    return fixed, by_name, float((log_prob - plan_log_evidence(replace(query, nodes=())).run()).exp())


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

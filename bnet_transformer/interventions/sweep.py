"""Sweeps: patch many nodes, attention rows, arrows or paths in one batch, and measure the effect on a metric."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_int, suggest_config_for_options
from bnet_transformer._core.naming import WORD, split_path
from bnet_transformer._core.process import translate_memory_errors
from bnet_transformer._core.tensors import IntArray, enable_gradients
from bnet_transformer.compiler.plan import PlanRequest
from bnet_transformer.cost import cost
from bnet_transformer.data.do_values import Swap, as_change, is_intervention
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.plan import Plan, format_fault, planned
from bnet_transformer.interventions.ablation import Ablation
from bnet_transformer.interventions.cells import (
    READ,
    PatchCells,
    align_labels,
    flag_special_positions,
    is_index_valued,
    parse_words,
)
from bnet_transformer.interventions.edge_attribution import estimate_cells
from bnet_transformer.interventions.edges import EdgeStructure
from bnet_transformer.interventions.engine import CellOutcomes, Experiment, iter_patched_words, run_cells
from bnet_transformer.interventions.examples import (
    DEFAULT_MEMORY,
    Examples,
    describe_metric,
    get_sentence_state,
    has_difference,
    parse_metric,
    parse_sides,
    split_by_length,
    split_metric,
)
from bnet_transformer.interventions.gradients import HALF_BITS
from bnet_transformer.interventions.methods import ACTIVATIONS, EXACT, EXACT_HINT, Gradient, resolve_method
from bnet_transformer.interventions.parse_cells import build_structure, parse_cells
from bnet_transformer.interventions.patched_run import find_changed_positions, is_wordwise
from bnet_transformer.interventions.sweep_results import CellResult, EstimateCalibration, Mediation, Sweep
from bnet_transformer.reference import GroundModel, locate_node

# --------------------------------------------------------------------------------------------------------------------
# The plan of a sweep: which cells share a run, which run one at a time and why, and what they cost.


R = TypeVar("R")


def plan_cells(experiment: Experiment, run: Callable[[], R]) -> Plan[R]:
    """The plan of the cells.

    If some cells run one at a time, `parts` contains a plan for the cells that share a run, and one for each obstacle.
    """
    cells, gradient, obstacles = experiment.cells, experiment.gradient, experiment.obstacles
    shared_ids, num_runs = cells.cell_ids[~np.isin(cells.cell_ids, list(obstacles))], len(experiment.base_rows)

    def make_plan(count: int, algorithm: str, reason: str, **options: Any) -> Plan[R]:
        question = f"sweep of {count:,} cell{'s' if count != 1 else ''}"
        return Plan(question, algorithm, reason, run, states=len(experiment.choices.states), **options)

    parts = list[Plan[R]]()
    if len(shared_ids) or not obstacles:  # also for no cells
        reason = "all cells share one run, and only the values that a cell changes are computed again"
        options: dict[str, Any] = {"count_flops": partial(_count_flops, experiment, shared_ids)}
        if gradient is not None:
            steps = gradient.steps
            runs = f"{steps} interpolated runs" if steps else f"the {experiment.side_names[1]} run"
            reason, options = f"the gradient at {runs} estimates the effect of every cell", {}
        parts.append(make_plan(len(shared_ids), "compiled", reason, is_exact=gradient is None, **options))
    shapes, ancestors = experiment.base.model.ground.shapes, experiment.needed.ancestor_words
    num_nodes = sum(int(words.sum()) * math.prod(shapes[i]) // len(words) for i, words in ancestors.items())
    for obstacle, count in Counter(obstacles.values()).items():
        reason = f"each cell has a separate run; {format_fault('a shared run', obstacle)}"
        evaluations = count * num_runs * num_nodes
        parts.append(make_plan(count, "sequential", reason, node=obstacle.node, evaluations=evaluations))
    if len(parts) == 1:
        return parts[0].with_warning()
    reason = "some cells require separate runs, for the reasons below"
    options = {"evaluations": sum(part.evaluations for part in parts), "node": parts[-1].node, "parts": tuple(parts)}
    options |= {"count_flops": parts[0].count_flops, "is_exact": gradient is None}
    return make_plan(len(cells.cell_ids), "sequential", reason, **options).with_warning()


def _count_flops(experiment: Experiment, cell_ids: IntArray) -> int | None:
    """FLOPs of the matrix products of the runs and of the changes of cells; None if a TPM does not define them."""
    model, needed = experiment.base_rows.model, experiment.needed
    network, ground = model.network, model.ground
    requested = {group.name: group.index for group in map(ground.group_of, needed.outcome_nodes)}
    if experiment.base.module.find_requirements(PlanRequest(tuple(requested.values()))).fault is not None:
        return None
    flops, slices = Counter[str](), Counter[str]()
    for row in cost(network, dict(ground.word_counts) or None, want=sorted(requested)).rows:
        if row.flops is None:
            return None
        flops[row.template] += row.flops
        slices[row.template] += row.slices
    fractions = dict.fromkeys(needed.ancestor_words, 2.0)  # how many times a group is computed; 2 for the base runs
    for chunk, set_words in iter_patched_words(model, needed, experiment.cells):
        inside = np.isin(chunk, cell_ids)
        for index, (_, changed) in find_changed_positions(model, needed, set_words, len(chunk)).items():
            table = changed[inside]
            if not is_wordwise(network, network.specs[index]):  # then all words of a cell are computed
                table = np.any(table, axis=-1, keepdims=True)
            fractions[index] += float(table.mean(-1).sum())
    stems = {index: network.graph.groups[index].stem for index in fractions}
    total = sum(n * flops[stems[i]] / (slices[stems[i]] or 1) for i, n in fractions.items())
    return round(len(experiment.base_rows) * total)


# --------------------------------------------------------------------------------------------------------------------
# The arguments of a sweep: one experiment for each length of sentences.
#
# Sentences of unequal lengths have the same cells, such as the heads of `over=("slice", "head")`, each at all of its
# words.


DIRECTIONS = ("denoise", "noise")


def parse_experiment(
    clean: object,
    corrupt: object,
    *,
    at: Any,
    metric: object,
    over: object,
    direction: str,
    words: object,
    memory: int,
    method: object = EXACT,
    numbers: Sequence[int] = (),
) -> Experiment:
    """Validate the arguments of a sweep of sentences of one length."""
    check_choice("direction", direction, DIRECTIONS)
    gradient, is_noise, memory = resolve_method(method), direction == "noise", check_int("memory", memory)
    other_side, other_direction = ("corrupt", "denoise") if is_noise else ("clean", "noise")
    hint = f"To change the {other_side} sentences use direction={other_direction!r}"
    source, base, intervention = parse_sides(clean, corrupt, is_noise=is_noise, words=words, hint=hint)
    alignment = parse_words(base.model, base.model if source is None else source.model, words)
    parsed_metric = parse_metric(base, metric)

    def find_edges() -> EdgeStructure:
        return build_structure(base, source, parsed_metric.nodes)

    cells = parse_cells(base, at, over, find_edges, is_real=gradient is not None)
    if source is not None and alignment.is_identity and not has_difference(source, base):
        actual = "clean and corrupt sentences with the same values at every cell"
        raise BNetError("corrupt", expected="a pair that differs", actual=actual)
    if gradient is not None:
        _check_gradient(gradient, base, cells)
    has_rows = any(sites.is_attention for sites in cells.sites)
    if intervention is not None and has_rows:
        hint = "Pass sentences on both sides, or names of nodes"
        raise BNetError("at", expected="nodes, for what values become", actual=cells.at, hint=hint)
    ablation, change = None, as_change(intervention)
    if source is None:
        ablation = Ablation(intervention, base.model, memory, cells.get_patched_nodes(base.model))
        if gradient is not None and gradient.steps:
            expected, actual = "sentences on both sides", "an ablation or a change, which has no other run"
            raise BNetError("steps", expected=expected, actual=actual)
    elif not alignment.is_identity and has_rows:
        expected = "nodes, arrows or paths, because words= does not align the entries of rows of attention"
        raise BNetError("at", expected=expected, actual=at)
    elif words is not None and cells.edges is not None:
        expected = "None, because an edge sets all words of its reader"
        raise BNetError("words", expected=expected, actual=words)
    else:
        cells = alignment.drop_unaligned(cells)
        if change is not None:
            for node in {*cells.get_patched_nodes(base.model), *(path.nodes[0] for path in cells.paths)}:
                change.check(base.model.ground.name(node), locate_node(base.model, node)[0])
    cells = replace(cells, special=flag_special_positions(cells.positions, base))
    if source is not None and alignment.is_identity:
        runs = (base, source) if is_noise else (source, base)
        cells = replace(cells, aligned=align_labels(cells.positions, *runs))
    return Experiment(
        source=source,
        base=base,
        alignment=alignment,
        cells=cells,
        metric=parsed_metric,
        memory=memory,
        gradient=gradient,
        is_noise=is_noise,
        ablation=ablation,
        change=change,
        numbers=numbers or range(len(base)),
    )


def _check_gradient(gradient: Gradient, base: Examples, cells: PatchCells) -> None:
    """Raise an error for nodes without real values, and thus without a gradient, and a rule that cells do not have."""
    specs, nodes = base.model.network.specs, {node for path in cells.paths for node in path.nodes}
    groups = {sites.group for sites in cells.sites} | {base.model.ground.group_of(node).index for node in nodes}
    for index in sorted(groups):
        if is_index_valued(specs[index]):
            subject, expected = f"at {specs[index].group.name}", "nodes with real values, for method=bt.Gradient()"
            raise BNetError(subject, expected=expected, actual="discrete nodes", hint=EXACT_HINT)
    if gradient.rule == ACTIVATIONS and (cells.edges is None or groups):
        raise BNetError("rule", expected='"activations" only for at="edges", whose writers it sets', actual=cells.at)


def parse_experiments(
    clean: object, corrupt: object, *, metric: object, words: object, **options: Any
) -> list[Experiment]:
    """Validate the arguments of a sweep, for the examples of each length.

    Raises:
        BNetError: The sentences differ in length, and the cells or the metric refer to words.
    """
    parts = split_by_length(clean, corrupt, words)
    if len(parts) < 2:
        return [parse_experiment(clean, corrupt, metric=metric, words=words, **options)]
    sides = [side.target if isinstance(side, Swap) else side for side in parts[0][1:]]
    state = next(get_sentence_state(side[0]) for side in sides if isinstance(side, list | tuple))
    assert state is not None
    metrics = split_metric(state.model, metric, [numbers for numbers, *_ in parts], has_words=False)
    experiments = list[Experiment]()
    for (numbers, *pair), part_metric in zip(parts, metrics, strict=True):
        experiment = parse_experiment(*pair, metric=part_metric, words=None, numbers=numbers, **options)
        _check_cells(experiment.base.model, experiment.cells)
        experiments.append(experiment)
    first, *remaining = (experiment.cells for experiment in experiments)
    for cells in remaining:
        if (cells.axes, cells.positions, cells.names) != (first.axes, first.positions, first.names):
            only = next(iter({*cells.names.values()} ^ {*first.names.values()}), "")
            expected = "the same cells in sentences of all lengths"
            raise BNetError("at", expected=expected, actual=f"{only}, which only sentences of one length have")
    return experiments


def _check_cells(model: GroundModel, cells: PatchCells) -> None:
    """Raise an error for cells that set only some words of their nodes."""
    expected, actual = "cells of all words, because the sentences differ in length", ""
    hint = 'Pass over=("slice", "head"), for example, or names without a word, such as "a_0_1"'
    axes = [axis for axis in cells.axes if axis in (WORD, READ)]
    if axes:
        raise BNetError("over", expected=expected, actual=f"the axis {axes[0]!r}", hint=hint)
    for sites in cells.sites:
        stack = model.network.specs[sites.group].group.word_stack
        if stack is None:
            continue
        count = model.ground.word_counts[stack]
        pairs = np.unique(np.stack([sites.cells, sites.nodes // count, sites.nodes % count]), axis=1)
        _, counts = np.unique(pairs[:2], axis=1, return_counts=True)
        if bool((counts < count).any()):
            actual = cells.names[int(pairs[0, int(counts.argmin())])]
    for path in cells.paths:
        for name in split_path(cells.names[path.cell]):
            parsed = model.ground.template.parse_name(name, model.ground.word_counts)
            actual = cells.names[path.cell] if parsed is not None and parsed[0].word_stack is not None else actual
    if actual:
        raise BNetError("at", expected=expected, actual=actual, hint=hint)


ROUNDING_STEPS = 4  # effects below this number of rounding steps of the metric are rounding errors
ADVISED_STEPS = 8  # enough to average gradients of which one is zero
MAX_LISTED = 6  # names in a note


@suggest_config_for_options(method=(Gradient,))
@translate_memory_errors("sweep")
@planned
@enable_gradients()
def sweep(
    clean: object,
    corrupt: object,
    *,
    at: str | Sequence[str] | Mapping[str, Sequence[str]] = "x",
    metric: object,
    over: str | Sequence[str] | None = None,
    direction: Literal["denoise", "noise"] = "denoise",
    words: object = None,
    method: Literal["exact"] | Gradient = "exact",
    memory: int = DEFAULT_MEMORY,
    progress: bool | None = None,
) -> Plan[Sweep]:
    """Patch values of one run into another, one cell at a time, and measure the metric (activation patching).

    A *cell* is a group of nodes that are patched together. Cells are computed in batches whose size depends on
    `memory`. `bt.explain("sweep", ...)` reports the cells that run one at a time.

    Args:
        clean: The sentence, or the list of sentences (the examples), whose values are patched into the corrupt run.
            Or what the values of the corrupt sentences become: a tensor with the shape of the nodes, `Zero()`,
            `Mean(...)`, `Noise(...)`, `Shift(...)`, `Scale(...)`, a function of the value, `Project(...)`, `Set(...)`,
            or `Swap(sentences, within)`.
        corrupt: The corrupt sentence or sentences: as many as the clean ones, each with as many words as its clean one.
            With `direction="noise"` also what the values of the clean sentences become. The pairs of a list may differ
            in length if cells and metric refer to no single word, as with `over=("slice", "head")`.
        at: The nodes that cells set: a role (`"x"`, `"q"`; `"j"`, `"score"` for attention), an arrow or a path of roles
            (`"v -> a"`), `"arrows"` for all arrows of roles, `"edges"` for all edges of `net.edges()` or the name of
            one (`"a_0_1 -> q_2_3"`), a list of all these and of names, patterns, paths of names
            and arrows of patterns (`"v_0_1_* -> a_0_1_*"`; without words only if no edge matches), or a mapping from
            the name of a cell to the names and patterns of all its nodes. In a list each role or arrow of roles is
            expanded into its cells; `result.part("v -> a")` returns those of one item. Names and patterns may have
            entries of the value, in row-major order: `"x_1_2[3]"`, `"neuron_1_*[7,9]"`.
        metric: A mapping from a discrete node to a state, whose log probability is the metric, or to two states, for
            the difference of their log probabilities. A list of states has one for each example. The node `"y_-1"` is
            that of the last word; of a role, `"y"`, the metric is the mean over its nodes. Or a function whose
            parameters are names of nodes, which are `[example, *shape]`, or of roles, which are `[example, slice,
            *plates, word, *shape]` (without `slice` for a role of one group, such as `x_2`). A parameter `examples`
            receives the indices of the examples, `[example]`, for data such as `labels[examples]`; functions of
            sentences of unequal lengths, which are called for each length, must have it.
        over: The axes along which cells are separate, such as `("slice", "word")`; by default all. Nodes that differ
            along other axes only belong to one cell. `"entry"` makes a cell of each entry of the values of a role, and
            `"read"` of each entry of rows of attention. Without the axis `"group"` of groups of heads, the axis
            `"head"` numbers the heads over all groups. In a list it applies to the items with these axes.
        direction: `"denoise"`: the clean values are patched into the corrupt run, and effects are changes from the
            corrupt run. `"noise"`: the corrupt values are patched into the clean run, and effects are changes from it.
        words: The word of the other sentence from which each word takes its values, as a mapping or as pairs, such as
            `{3: 5, 4: 6}`, with words of the sentence that is patched as keys. Words that are not in it are not
            patched. The sentences may then differ in length, or be equal. For several stacks, a map for each stack.
        method: `"exact"` runs every cell. `bt.Gradient(...)` estimates the effects from gradients, without running a
            cell (attribution patching, integrated gradients, EAP, EAP-IG).
        memory: The approximate number of bytes that are used at once.
        progress: Whether to show a progress bar; by default only in a terminal.

    Returns:
        The result; `result.outcomes` is the metric with each cell patched, `[*axes, example]`, and `result.clean` and
        `result.corrupt` are the metric of the unpatched runs; `result.silent` names the cells that change no value, and
        `result.notes` states if no cell changes the metric.

    Raises:
        BNetError: The sentences do not match or do not differ, a cell has no values, the metric returns no number, or
            with `bt.Gradient` its gradient is zero up to rounding, as that of a divergence from the patched run.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "a", "cat", "dog", "sat"])
    >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    >>> found = bt.sweep(clean, corrupt, at="x", metric={"y_2": ("cat", "dog")})
    >>> found.axes, found.values.shape, found.values[0, 0].item()
    (('slice', 'word'), torch.Size([3, 3]), 0.0)
    """
    check_choice("progress", progress, (True, False, None))
    options: dict[str, Any] = {"direction": direction, "words": words, "memory": memory, "method": method}
    experiments = parse_experiments(clean, corrupt, at=at, metric=metric, over=over, **options)

    @enable_gradients()
    def compute() -> Sweep:
        first, result = experiments[0], _run_experiments(experiments, progress)
        silent = _find_silent_cells(first, result)
        runs = (result.base, result.source) if first.is_noise else (result.source, result.base)
        has_check = first.gradient is not None and first.gradient.check
        return Sweep(
            **vars(first.cells.grid),
            parts=first.cells.parts,
            aligned=first.cells.aligned,
            special=first.cells.special,
            clean=runs[0],
            corrupt=runs[1],
            outcomes=result.values,
            direction=direction,
            metric=describe_metric(metric),
            digests=_digest_sentences(experiments),
            method=first.gradient or EXACT,
            calibration=_calibrate(experiments, result.values - result.base, progress) if has_check else None,
            notes=(*_explain_zeros(first, result), *_describe_named_cells(experiments, silent)),
            silent=tuple(first.cells.names[cell] for cell in silent),
        )

    return plan_cells(max(experiments, key=lambda experiment: len(experiment.base.model.ground)), compute)


def _run_experiments(experiments: Sequence[Experiment], progress: bool | None) -> CellOutcomes:
    """The outcomes of the cells, with the examples of all lengths in their order."""
    compute = run_cells if experiments[0].gradient is None else estimate_cells
    results = [compute(experiment, progress) for experiment in experiments]
    if len(results) == 1:
        return results[0]
    order = torch.tensor([k for experiment in experiments for k in experiment.numbers]).argsort()

    def join(name: str) -> Any:
        tables = [getattr(result, name) for result in results]
        return None if None in tables else torch.cat(tables, -1)[..., order]

    changes = np.maximum.reduce([result.changes for result in results])
    tables = {name: join(name) for name in ("values", "source", "base", "is_stationary")}
    return CellOutcomes(**tables, changes=changes)


def _find_silent_cells(experiment: Experiment, result: CellOutcomes) -> list[int]:
    """The cells that change no value by more than its rounding error, in any example.

    In half precision the rounding error of a value may be as large as its change, so that only equal values count.
    """
    precision = torch.finfo(experiment.base.model.network.dtype)
    bound = ROUNDING_STEPS * precision.eps if precision.bits > HALF_BITS else 0.0
    return [cell for cell in experiment.cells.names if result.changes[cell] <= bound]


def _describe_named_cells(experiments: Sequence[Experiment], silent: Sequence[int]) -> list[str]:
    """The notes on cells of names and patterns that have no effect by construction."""
    names, relevant = experiments[0].cells.names, set[int]()
    named = experiments[0].cells.named & names.keys()
    for item in experiments if named else ():  # the cells that set a node on which the metric depends
        for cell_ids, set_words in iter_patched_words(item.base_rows.model, item.needed, item.cells):
            for index, table in set_words.items():
                relevant.update(cell_ids[np.any(table & item.needed.ancestor_words[index], axis=-1)].tolist())
    notes = {"no value changes in": named.intersection(silent), "the metric depends on no node of": named - relevant}
    texts = []
    for note, cells in notes.items():
        listed = [names[cell] for cell in sorted(cells)]
        shown = [*listed[:MAX_LISTED], *(["..."] if len(listed) > MAX_LISTED else [])]
        texts += [f"{note} {len(cells)} of {len(named)} named cells: {', '.join(shown)}"] if cells else []
    return texts


def _explain_zeros(experiment: Experiment, result: CellOutcomes) -> list[str]:
    """The notes on effects and gradients of zero; an error if they contradict the difference of the two runs."""
    gradient, stationary = experiment.gradient, int(result.is_stationary.sum())
    has_difference = result.source is None or not torch.equal(result.source, result.base)
    if gradient is not None and stationary == len(result.base) and has_difference:
        runs = "every interpolated run" if gradient.steps else f"the {experiment.side_names[1]} run"
        expected = f"a metric whose gradient is not zero at {runs}, for method=bt.Gradient()"
        actual = "a gradient of zero, as of a divergence at its minimum or of a metric that is piecewise constant"
        has_more_steps = gradient.steps < ADVISED_STEPS and experiment.source is not None
        advice = f"bt.Gradient(steps={ADVISED_STEPS}), " if has_more_steps else ""
        hint = f'Use {advice}the log probability of a state as the metric, or method="exact"'
        raise BNetError("metric", expected=expected, actual=actual, hint=hint)
    notes = []
    if stationary:
        notes.append(f"the gradient of the metric is zero in {stationary} of {len(result.base)} examples")
    # Sums are accumulated in float32 or better, so that a run repeats its metric to a few steps of that type. A larger
    # bound, or an absolute one, would hide effects on a small metric or in half precision.
    precision = torch.finfo(torch.promote_types(experiment.base.model.network.dtype, torch.float32))
    is_unchanged = torch.isclose(result.values, result.base, rtol=ROUNDING_STEPS * precision.eps, atol=0)
    if bool((is_unchanged | result.values.isnan()).all()):  # NaN: no cell
        order = ", to first order" if gradient is not None else ""
        notes.append(f"no cell changes the metric by more than its rounding error{order}")
    return notes


def _digest_sentences(experiments: Sequence[Experiment]) -> tuple[str, ...]:
    """The digests of the pairs, clean first, or of the patched sentences if an ablation provides the values."""
    digests: dict[int, str] = {}
    for item in experiments:
        first, other = item.base, item.source
        if other is not None and not item.is_noise:
            first, other = other, first
        digests |= dict(zip(item.numbers, first.digest_pairs(other), strict=True))
    return tuple(digests[k] for k in sorted(digests))


def _calibrate(experiments: Sequence[Experiment], effects: Tensor, progress: bool | None) -> EstimateCalibration:
    """Run `check` cells, and compare with the estimated effects, `[*axes, example]`.

    They are the cells with the largest estimates, and random others.
    """
    cells, gradient, flat = experiments[0].cells, experiments[0].gradient, effects.flatten(0, -2)
    assert gradient is not None
    count = min(gradient.check, len(cells.cell_ids))
    sizes = flat[torch.from_numpy(cells.cell_ids)].mean(-1).abs().numpy()
    largest = cells.cell_ids[np.argsort(-sizes, kind="stable")[: count // 2]]
    remaining = np.setdiff1d(cells.cell_ids, largest)
    sampled = np.random.default_rng(gradient.seed).choice(remaining, count - len(largest), replace=False)
    chosen = np.sort(np.concatenate([largest, sampled]))
    exact = [replace(item, cells=item.cells.select(chosen), gradient=None) for item in experiments]
    result = _run_experiments(exact, progress)
    exact_effects = (result.values - result.base).flatten(0, -2)[chosen]
    return EstimateCalibration(tuple(cells.names[int(cell)] for cell in chosen), flat[chosen], exact_effects)


@translate_memory_errors("mediation")
def mediation(
    clean: object,
    corrupt: object,
    *,
    through: str | Sequence[str] | Mapping[str, Sequence[str]] = "x",
    metric: object,
    over: str | Sequence[str] | None = None,
    memory: int = DEFAULT_MEMORY,
    progress: bool | None = None,
) -> Mediation:
    """Compute the natural indirect effect through each cell, and the natural direct effect (Pearl 2001).

    The indirect effect is that of the clean values of the cell in the corrupt run. The direct effect, which bypasses
    the cell, is that of the clean run with the corrupt values of the cell. Both are differences from the corrupt run.

    Args:
        clean: The clean sentence, or a list of sentences; `corrupt.do(...)` for a treatment of some nodes;
            `Swap(sentences, within)` for the effect through a subspace of the values of the cells.
        corrupt: The corrupt sentence or sentences: as many as the clean ones, with the same numbers of words.
        through: The nodes of the cells: a role, an arrow or a path of roles, or a list, as `at=` of `sweep`.
        metric: A mapping from a discrete node to one or two states, or a function of nodes, as for `sweep`.
        over: The axes along which cells are separate, such as `("slice", "word")`; by default all.
        memory: The approximate number of bytes that are used at once.
        progress: Whether to show a progress bar; by default only in a terminal.

    Returns:
        The result: for each cell the direct and the indirect effect, `[*axes]`, and the total effect; `result.notes`
        states if no cell changes the metric.

    Raises:
        BNetError: The sentences do not match, a cell has no values, the metric returns no number, or `clean` is an
            ablation.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "a", "cat", "dog", "sat"])
    >>> clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    >>> found = bt.mediation(clean, corrupt, through="x", metric={"y_2": ("cat", "dog")})
    >>> found.axes, found.indirect.shape, found.direct.shape
    (('slice', 'word'), torch.Size([3, 3]), torch.Size([3, 3]))
    """
    check_choice("progress", progress, (True, False, None))
    if is_intervention(corrupt) or (is_intervention(clean) and not isinstance(clean, Swap)):
        actual = corrupt if is_intervention(corrupt) else clean
        raise BNetError("mediation", expected="sentences, or clean=Swap(sentences, within)", actual=actual)
    treated, swapped = (clean.target, Swap(corrupt, clean.basis)) if isinstance(clean, Swap) else (clean, corrupt)
    indirect = sweep(clean, corrupt, at=through, metric=metric, over=over, memory=memory, progress=progress)
    direct = sweep(
        treated, swapped, at=through, metric=metric, over=over, direction="noise", memory=memory, progress=progress
    )
    shared = {item.name: getattr(indirect, item.name) for item in fields(CellResult)}
    shared["notes"] = tuple(note for note in indirect.notes if note in direct.notes)
    return Mediation(**shared, indirect_outcomes=indirect.outcomes, direct_outcomes=direct.outcomes)

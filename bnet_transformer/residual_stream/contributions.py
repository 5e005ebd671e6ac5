"""Contributions to a readout: what each writer adds to a logit, to the difference of two, or along a direction.

The readout is `u . z` with the logits, the mean or the value z of a node and a vector u. One pass (`linear_paths`)
computes the parts of all writers and words.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.arrays import is_dense
from bnet_transformer._core.checks import check_choice
from bnet_transformer._core.naming import join_name
from bnet_transformer._core.torch_context import enable_gradients
from bnet_transformer.data.encode import encode_value
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import NOT_GIVEN, BNetError, UnsupportedError
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.intervention_values import Zero
from bnet_transformer.interventions.sweeps import sweep
from bnet_transformer.residual_stream.linear_paths import LinearRun, Step, compute_vjp
from bnet_transformer.residual_stream.results import Contributions, PathContributions, ScoreContributions
from bnet_transformer.residual_stream.score_contributions import compute_score_contributions, find_attention_row
from bnet_transformer.residual_stream.writers import Writer, WriterTable, collect_writers
from bnet_transformer.tpm import Attention

OF_FORMS = "a state or its label, a pair of them, or a vector"


@dataclass(frozen=True)
class Readout:
    """A linear function of a node: `u . z` with its logits, its mean or its value z.

    Args:
        node: The ground id of the node.
        spec: Its group.
        index: Its index along the plates, and its word if it has one.
        direction: The vector u.
        label: The function in words.
        states: The one or two states whose logits it contains; None for a vector.
    """

    node: int
    spec: NodeSpec
    index: tuple[int, ...]
    direction: Tensor
    label: str
    states: tuple[int, ...] | None

    @property
    def word(self) -> int | None:
        """The word of the node; None without one."""
        return self.index[-1] if self.spec.group.word_stack is not None else None


@enable_gradients()
def compute_contributions(
    state: SentenceState, name: str, of: object, paths: int, exact: bool
) -> Contributions | PathContributions | ScoreContributions:
    """The contributions to a readout, along paths of two, or to a row of attention scores."""
    check_choice("paths", paths, (1, 2))
    check_choice("exact", exact, (True, False))
    row = find_attention_row(state.model, name)
    if row is not None:
        if of is not None or paths == 2:
            expected = f"None for {name}, a row of attention scores" if of is not None else "1 for attention scores"
            raise BNetError("of" if of is not None else "paths", expected=expected, actual=of or paths)
        return compute_score_contributions(state, name, *row, exact=exact)
    readout = parse_readout(state, name, of)
    run = make_run(state, readout)
    if paths == 2:
        return _compute_paths(run, name, readout)
    value, constant, seeds = _seed_readout(run, readout)
    table = collect_writers(run, run.pull_back(seeds), 1, split_reads=True)
    table = _add_constant(table, readout, constant)
    if exact and value.dim():
        hint = "Set or observe the latent choices first"
        raise UnsupportedError("exact=True", expected="a readout without latent choices", hint=hint)
    effects = _compute_effects(state, name, readout, table.writers) if exact else None
    return Contributions(name, table.norms, readout.label, table.writers, table.words, table.values[0], value, effects)


# the readout


def parse_readout(state: SentenceState, name: str, of: object) -> Readout:
    """The readout of a node; an error for a node that is no affine function of its parents."""
    model, subject = state.model, f"contributions to {name}"
    node = model.ground.id(name)
    group, index = model.ground.unravel_index(node)
    spec = state.network.specs[group.index]
    if node in model.do or spec.tpm.kind == "input":
        expected = "a node that depends on others"
        actual = "a node that is set by do" if node in model.do else "an input"
        raise BNetError(subject, expected=expected, actual=actual)
    if not spec.tpm.linear_parents(*spec.tpm_parents):
        expected = "a node that is a sum or a linear map of its parents, a norm, or a readout of these"
        hint = 'Use a readout such as "logits_0" or "y_0"; for the scores of attention "j_0_0"'
        raise UnsupportedError(subject, expected=expected, actual=f"a {type(spec.tpm).__name__}", hint=hint)
    shape = (model.count_states(node),) if spec.tpm.kind == "discrete" else spec.shape
    if len(shape) != 1:
        raise UnsupportedError(subject, expected="a vector or a discrete node", actual=f"shape {shape}")
    direction, label, states = _parse_direction(state, node, shape[0], of)
    return Readout(node, spec, index, direction, label, states)


def _parse_direction(
    state: SentenceState, node: int, size: int, of: object
) -> tuple[Tensor, str, tuple[int, ...] | None]:
    """The vector u of a readout, its name, and its states."""
    dtype, device = state.network.dtype, state.network.device
    name = state.ground.name(node)
    if is_dense(of) and isinstance(of, Tensor) and of.is_floating_point():
        if tuple(of.shape) != (size,) or not bool(of.isfinite().all()):
            raise BNetError("of", expected=f"a finite vector of {size} numbers", actual=f"shape {tuple(of.shape)}")
        return of.detach().to(device, dtype), "a direction", None
    pair = tuple(of) if isinstance(of, tuple | list) else (of,)
    if of is None or len(pair) not in (1, 2):
        hint = f'For example contributions("{name}", of=0), or of=(0, 1) for a difference'
        raise BNetError("of", expected=OF_FORMS, hint=hint, actual=NOT_GIVEN if of is None else of)
    label_node = _find_label_node(state, node, size)
    states = [_parse_state(state, label_node, name, size, item) for item in pair]
    labels = None if label_node is None else state.labels(label_node)
    direction = torch.zeros(size, dtype=dtype, device=device)
    for k, sign in zip(states, (1.0, -1.0), strict=False):
        direction[k] += sign
    names = [labels[k] if labels else f"state {k}" for k in states]
    return direction, " - ".join(names) if len(pair) == 2 else f"logit of {names[0]}", tuple(states)


def _find_label_node(state: SentenceState, node: int, size: int) -> int | None:
    """The discrete node whose states are the entries of a node: the node itself, or a child that uses it as logits."""
    model, network = state.model, state.network
    if model.spec(node).tpm.kind == "discrete":
        return node
    for child in model.ground.children(node):
        spec = model.spec(child)
        if spec.tpm.kind == "discrete" and spec.tpm.states == size and not network.graph.out_edges[spec.group.index]:
            return child
    return None


def _parse_state(state: SentenceState, label_node: int | None, name: str, size: int, item: object) -> int:
    """A state from its number or its label."""
    if label_node is not None:
        return int(encode_value(state.model, label_node, item, evidence=True))
    if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < size:
        expected = f"an integer from 0 to {size - 1}; the entries of {name} have no labels"
        raise BNetError("of", expected=expected, actual=item)
    return item


def make_run(state: SentenceState, readout: Readout) -> LinearRun:
    """The run of a sentence with the values on all linear paths to a readout."""
    spec, name = readout.spec, state.ground.name(readout.node)
    positions = spec.tpm.linear_parents(*spec.tpm_parents)
    outputs = {parent.index for parent in spec.parents} | {s for parent in spec.parents for _, s in parent.pick}
    groups = frozenset(spec.parents[k].index for k in positions)
    return LinearRun(state, f"contributions to {name}", groups, frozenset(outputs))


def _seed_readout(run: LinearRun, readout: Readout) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """The value of a readout and its bias, `[*states]` each, and its derivative with respect to the linear parents."""
    spec, layout = readout.spec, run.layout
    positions = spec.tpm.linear_parents(*spec.tpm_parents)
    context, parents, leaves = run.gather_leaves(spec, positions, readout.word)
    zeros = [torch.zeros_like(p) if k in positions else p for k, p in enumerate(parents)]
    if isinstance(spec.tpm, Attention):
        raise UnsupportedError(run.subject, expected="a readout", actual="an Attention", hint="Use a later node")
    with torch.no_grad():
        scale = spec.tpm.norm_scale(context, *parents)
        constant = layout.pad_dims(spec.tpm.linear_value(context, scale, *zeros), 1)
    vector = layout.pad_dims(spec.tpm.linear_value(context, scale, *parents), 1)
    value = run.select_node(spec, readout.index, vector, 1)
    gradients = compute_vjp(_project(readout, value), list(leaves.values()), torch.ones_like(value[..., 0])[None])
    bias = _project(readout, run.select_node(spec, readout.index, constant, 1)).expand(value.shape[:-1])
    return _project(readout, value).detach(), bias, dict(zip(leaves, gradients, strict=True))


def _project(readout: Readout, vector: Tensor) -> Tensor:
    """`u . z` for vectors z, `[..., size]`; entries with u = 0 do not count, even if a logit is -inf."""
    if readout.states is None:
        return vector @ readout.direction
    first, *second = (vector[..., k] for k in readout.states)
    return first - second[0] if second else first


def _add_constant(table: WriterTable, readout: Readout, constant: Tensor) -> WriterTable:
    """A table with the bias of the readout itself as its last writer, if it is not zero."""
    if not bool(constant.any()):
        return table
    group = readout.spec.group
    name = join_name(group.name, readout.index[: len(group.plates)])
    words = () if readout.word is None else (readout.word,)
    writer = Writer(f"bias of {name}", "bias", group.name, readout.index[: len(group.plates)], group.slice, words)
    column = table.values.new_zeros(*table.values.shape[:-2], 1, len(table.words))
    column[..., 0, -1] = constant
    values = torch.cat([table.values, column], -2)
    return WriterTable((*table.writers, writer), table.words, values, table.norms)


# paths of two


def _compute_paths(run: LinearRun, name: str, readout: Readout) -> PathContributions:
    """The parts of the paths through the values of each head."""
    _, _, seeds = _seed_readout(run, readout)
    steps = list(run.pull_back(seeds))
    attention = [step for step in steps if step.kind == "attention"]
    if not attention:
        raise UnsupportedError(f"{run.subject}, paths=2", expected="a readout that reads heads", hint="Use paths=1")
    for step in attention:
        if not isinstance(step.spec.tpm, Attention):
            actual = f"{step.spec.group.name}, a {type(step.spec.tpm).__name__}"
            raise UnsupportedError(f"{run.subject}, paths=2", expected="heads with an Attention", actual=actual)
    values = frozenset(step.spec.parents[2].index for step in attention)
    outer = LinearRun(run.state, run.subject, run.groups | values, run.outputs)
    direct = collect_writers(outer, iter(attention), 1)
    tables = [_follow_values(outer, step) for step in reversed(attention)]
    writers = list(dict.fromkeys(writer for table in tables for writer in table.writers))
    position = {writer: k for k, writer in enumerate(writers)}
    size = sum(len(table.values) for table in tables)
    parts = direct.values.new_zeros(*direct.values.shape[1:-2], size, len(writers))
    start = 0
    for table in tables:
        columns = torch.tensor([position[writer] for writer in table.writers], dtype=torch.long)
        rows = table.values.sum(-1).movedim(0, -2)  # [*states, head, writer]
        parts[..., start : start + len(table.values), columns] = rows
        start += len(table.values)
    norms = dict.fromkeys(name for table in tables for name in table.norms)
    stem = dict.fromkeys(name for name in collect_writers(run, steps, 1).norms)
    return PathContributions(name, (*norms, *stem), readout.label, direct.writers, tuple(writers), parts)


def _follow_values(run: LinearRun, step: Step) -> WriterTable:
    """The parts of the writers that each head of an attention reads through its values: one seed for each head."""
    spec, layout = step.spec, run.layout
    assert isinstance(spec.tpm, Attention)
    weights = run.get_attention_weights(spec)
    _, parents, leaves = run.gather_leaves(spec, (2,))
    zeros = [p if k == 2 else torch.zeros_like(p) for k, p in enumerate(parents)]
    mix = layout.pad_dims(spec.tpm.mix(weights, *zeros), len(spec.shape))
    adjoint, axes = step.adjoint[0], [layout.axis(plate) for plate in spec.group.plates]
    seeds = adjoint[None]
    for axis in axes:  # one seed for each index of the plates
        size = adjoint.shape[axis]
        unit = torch.eye(size, dtype=adjoint.dtype, device=adjoint.device)
        shape = [1] * seeds.dim()
        shape[axis + 1] = size
        seeds = (seeds[:, None] * unit.reshape(size, *shape[1:])[None]).flatten(0, 1)
    gradients = compute_vjp(mix, list(leaves.values()), seeds)
    return collect_writers(run, run.pull_back(dict(zip(leaves, gradients, strict=True))), len(seeds))


# the exact effects


def _compute_effects(state: SentenceState, name: str, readout: Readout, writers: tuple[Writer, ...]) -> Tensor:
    """The readout minus the readout of a run without each writer, `[writer]`; NaN for biases."""
    cells = {k: writer.node_pattern for k, writer in enumerate(writers) if writer.kind != "bias"}
    effects = torch.full((len(writers),), torch.nan, dtype=torch.float64)
    if cells:
        metric = _build_metric(name, readout)
        sentence = SimpleNamespace(state=state)
        result = sweep(Zero(), sentence, at=list(cells.values()), metric=metric, progress=False)
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

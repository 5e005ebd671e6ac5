"""Readouts: a linear function of a node, its value at a sentence, and its derivative by the linear parents."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import is_dense
from bnet_transformer._core.naming import join_name
from bnet_transformer._core.tokens import distinguish
from bnet_transformer._core.torch_context import enable_gradients
from bnet_transformer.data.encode import encode_value
from bnet_transformer.data.word_encoder import to_reals
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import NOT_GIVEN, BNetError, UnsupportedError
from bnet_transformer.graph import NodeGroup
from bnet_transformer.graph.transformer_lens import get_attention_name
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.joint_posterior import joint_state_probs
from bnet_transformer.interventions.sweeps.cell_spec import find_attention_groups
from bnet_transformer.residual_stream.linear_paths import ActiveWords, LinearRun
from bnet_transformer.residual_stream.results import ReadoutDirection
from bnet_transformer.residual_stream.writers import format_norm
from bnet_transformer.tpm import Attention

OF_FORMS = "a state or its label, a pair of them, or a vector"


@dataclass(frozen=True)
class Readout(ReadoutDirection):
    """A linear function of a node: `u . z` with its logits, its mean or its value z.

    Args:
        node: The ground id of the node.
        spec: Its group.
        index: Its index along the plates, and its word if it has one.
    """

    node: int
    spec: NodeSpec
    index: tuple[int, ...]

    @property
    def word(self) -> int | None:
        """The word of the node; None without one."""
        return self.index[-1] if self.spec.group.word_stack is not None else None


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
        hint = _suggest_nodes(state, spec, index)
        raise UnsupportedError(subject, expected=expected, actual=f"the TPM {type(spec.tpm).__name__}", hint=hint)
    shape = (model.count_states(node),) if spec.tpm.kind == "discrete" else spec.shape
    if len(shape) != 1:
        raise UnsupportedError(subject, expected="a vector or a discrete node", actual=f"shape {shape}")
    direction, label, states = _parse_direction(state, node, shape[0], of)
    return Readout(direction, label, states, node, spec, index)


def name_attention_row(group: NodeGroup, index: tuple[int, ...]) -> str:
    """The name of a row of attention, such as `j_1_0_9`."""
    return join_name(get_attention_name(group), (*(() if group.slice is None else (group.slice,)), *index))


def _suggest_nodes(state: SentenceState, spec: NodeSpec, index: tuple[int, ...]) -> str:
    """Names of a readout and of a row of attention in this sentence, near a node that is neither."""
    ground, network, hints = state.ground, state.network, []
    leaves = [m for m in network.specs if not network.graph.out_edges[m.group.index]]
    readout = next((m.group for m in leaves if m.tpm.linear_parents(*m.tpm_parents)), None)
    if readout is not None:
        hints.append(f"Use a readout such as {ground.name(int(ground.select_nodes(readout)[-1]))}")
    groups = [group for members in find_attention_groups(state.model).values() for group in members]
    if spec.group in groups:
        hints.append(f"for its scores of attention use {name_attention_row(spec.group, index)}")
    elif groups:
        group = next((g for g in groups if g.slice == spec.group.slice), groups[0])
        last = tuple(size - 1 for size in ground.shapes[group.index])
        hints.append(f"for scores of attention a row such as {name_attention_row(group, last)}")
    return "; ".join(hints)


def _parse_direction(
    state: SentenceState, node: int, size: int, of: object
) -> tuple[Tensor, str, tuple[int, ...] | None]:
    """The vector u of a readout, its name, and its states."""
    dtype, device = state.network.dtype, state.network.device
    name = state.ground.name(node)
    vector = _to_vector(of)
    if vector is not None:
        if tuple(vector.shape) != (size,) or not bool(vector.isfinite().all()):
            raise BNetError("of", expected=f"a finite vector of {size} numbers", actual=f"shape {tuple(vector.shape)}")
        return vector.to(device, dtype), "a direction", None
    label_node = _find_label_node(state, node, size)
    if of is None and label_node is not None:
        of = int(joint_state_probs(state.query([label_node])).argmax())
    pair = tuple(of) if isinstance(of, tuple | list) else (of,)
    if of is None or len(pair) not in (1, 2):
        hint = f'For example contributions("{name}", of=0), or of=(0, 1) for a difference'
        raise BNetError("of", expected=OF_FORMS, hint=hint, actual=NOT_GIVEN if of is None else of)
    states = [_parse_state(state, label_node, name, size, item) for item in pair]
    labels = None if label_node is None else state.labels(label_node)
    direction = torch.zeros(size, dtype=dtype, device=device)
    for k, sign in zip(states, (1.0, -1.0), strict=False):
        direction[k] += sign
    names = distinguish(labels[k] if labels else f"state {k}" for k in states)
    return direction, " - ".join(names) if len(pair) == 2 else f"logit of {names[0]}", tuple(states)


def _to_vector(of: object) -> Tensor | None:
    """A tensor, an array or a list of real numbers as a tensor; None for states, which are integers or labels."""
    if isinstance(of, list | tuple):
        has_reals = any(isinstance(item, float | np.floating) for item in of)
        is_vector = has_reals and all(isinstance(item, Real) and not isinstance(item, bool) for item in of)
    elif isinstance(of, np.ndarray):
        is_vector = np.issubdtype(of.dtype, np.floating)
    else:
        is_vector = is_dense(of) and of.is_floating_point()
    return to_reals("of", of) if is_vector else None


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


@enable_gradients()
def compute_readout(state: SentenceState, name: str, readout: ReadoutDirection) -> Tensor | None:
    """The value of the same readout in another sentence, `[*states]`; None if its node is set or has another size."""
    model = state.model
    node = model.ground.id(name)
    group, index = model.ground.unravel_index(node)
    spec = state.network.specs[group.index]
    shape = (model.count_states(node),) if spec.tpm.kind == "discrete" else spec.shape
    if node in model.do or shape != readout.direction.shape or not spec.tpm.linear_parents(*spec.tpm_parents):
        return None
    direction = readout.direction.to(state.network.device, state.network.dtype)
    moved = Readout(direction, readout.label, readout.states, node, spec, index)
    return seed_readout(make_run(state, moved), moved).value


def make_run(state: SentenceState, readout: Readout, further_groups: Collection[int] = ()) -> LinearRun:
    """The run of a sentence with the values on all linear paths to a readout and to further groups."""
    spec, name = readout.spec, state.ground.name(readout.node)
    positions = spec.tpm.linear_parents(*spec.tpm_parents)
    outputs = {parent.index for parent in spec.parents} | {s for parent in spec.parents for _, s in parent.pick}
    groups = frozenset({*(spec.parents[k].index for k in positions), *further_groups})
    return LinearRun(state, f"contributions to {name}", groups, frozenset(outputs))


class ReadoutSeed(NamedTuple):
    """The start of a pass back from a readout.

    Args:
        value: The readout, `[*states]`.
        bias: Its constant, `[*states]`.
        adjoints: Its derivative with respect to the linear parents, `[1, *layout, *shape]`.
        active: The words of each group on which it depends.
        norms: The name of the node if it is a norm, whose scale is held fixed.
    """

    value: Tensor
    bias: Tensor
    adjoints: dict[int, Tensor]
    active: ActiveWords
    norms: tuple[str, ...]


def seed_readout(run: LinearRun, readout: Readout) -> ReadoutSeed:
    """The value of a readout and its derivative."""
    spec, layout = readout.spec, run.layout
    positions = spec.tpm.linear_parents(*spec.tpm_parents)
    if isinstance(spec.tpm, Attention):
        raise UnsupportedError(run.subject, expected="a readout", actual="an Attention", hint="Use a later node")
    words = () if readout.word is None else (readout.word,)
    starts: dict[int, frozenset[int]] = {}
    for parent in (spec.parents[k] for k in positions):
        read = run.find_read_words(spec, parent, words)
        starts[parent.index] = starts.get(parent.index, frozenset()) | read
    active = run.find_active_words(starts)
    entries = None if readout.states is None else torch.tensor(readout.states, device=run.execution.device)
    linear_map = run.make_linear_map(spec, readout.word, entries)
    _, parents, leaves = run.gather_leaves(spec, positions, readout.word, active)
    # The batch has the values and zeros, so that a large matrix of logits is read once for the value and the bias.
    inputs = [
        torch.cat([x, torch.zeros_like(x)], layout.batch_dim) if k in positions else linear_map.parents[k]
        for k, x in enumerate(parents)
    ]
    pair = run.select_node(spec, readout.index, linear_map.evaluate(*inputs), 1, keep_batch=True)
    states = None if readout.states is None else tuple(range(len(readout.states)))
    scalar, bias = _project(pair, readout.direction, states if linear_map.has_entries else readout.states).unbind(-1)
    gradients = run.compute_adjoints(scalar, leaves, torch.ones_like(scalar)[None], active)
    norms = (format_norm(spec, words),) if linear_map.is_norm else ()
    return ReadoutSeed(scalar.detach(), bias.detach(), gradients, active, norms)


def _project(vector: Tensor, direction: Tensor, states: tuple[int, ...] | None) -> Tensor:
    """`u . z` for vectors z, `[..., size]`; entries with u = 0 do not count, even if a logit is -inf."""
    if states is None:
        return vector @ direction
    first, *second = (vector[..., k] for k in states)
    return first - second[0] if second else first

"""Paths of two: what each writer adds to a readout through the values of each head.

One pass back from the readout gives the adjoint of each head, and a short pass from the values of the head continues to
the first sum. There it meets the parts of the writers, which one pass from the words computes for all heads
(`decomposition`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bnet_transformer.compiler.linear_groups import find_linear_groups, get_linear_positions
from bnet_transformer.errors import UnsupportedError
from bnet_transformer.inference import SentenceState
from bnet_transformer.residual_stream.decomposition import GroupParts, decompose
from bnet_transformer.residual_stream.linear_paths import ActiveWords, LinearRun, Step
from bnet_transformer.residual_stream.readout import Readout, make_run, seed_readout
from bnet_transformer.residual_stream.results import PathContributions
from bnet_transformer.residual_stream.writers import Writer, WriterTable, collect_writers, list_writers
from bnet_transformer.tpm import Attention

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
    run = _make_run(state, readout)
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


def _make_run(state: SentenceState, readout: Readout) -> LinearRun:
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

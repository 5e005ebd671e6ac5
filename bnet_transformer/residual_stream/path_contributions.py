"""Paths of two: what each writer adds to a readout through the values of each head.

One pass back from the readout gives the adjoint of each head, and a short pass from the values of the head continues to
the first sum. There it meets the parts of the writers, which one pass from the words computes for all heads
(`decomposition`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bnet_transformer.errors import UnsupportedError
from bnet_transformer.inference import SentenceState
from bnet_transformer.residual_stream.decomposition import GroupParts, decompose
from bnet_transformer.residual_stream.linear_paths import (
    ActiveWords,
    LinearRun,
    Step,
    find_linear_groups,
    get_linear_positions,
)
from bnet_transformer.residual_stream.readout import Readout, make_run, seed_readout
from bnet_transformer.residual_stream.results import PathContributions
from bnet_transformer.residual_stream.writers import Writer, collect_writers
from bnet_transformer.tpm import Attention

VALUE_SLOT = 2  # of an Attention


@dataclass
class _Branch:
    """The values of the heads of one attention: their adjoints at the first sums, and the parts of each writer.

    A part is `[*states, seed]`, with one seed for each index along the plates of the attention.
    """

    step: Step
    sums: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[Writer, Tensor] = field(default_factory=dict)
    later_parts: dict[Writer, Tensor] = field(default_factory=dict)
    norms: tuple[str, ...] = ()


def compute_paths(state: SentenceState, name: str, readout: Readout) -> PathContributions:
    """The parts of the paths through the values of each head."""
    run = _make_run(state, readout)
    _, _, seeds, active = seed_readout(run, readout)
    steps = list(run.pull_back(seeds, active))
    heads = [step for step in steps if step.kind == "attention"]
    if not heads:
        raise _no_heads_error(run)
    direct = collect_writers(run, heads, 1)
    branches = [_follow_values(run, step) for step in reversed(heads)]
    starts: dict[int, frozenset[int]] = {}
    for branch, sums in branches:
        for index, words in sums.items():
            starts[index] = starts.get(index, frozenset()) | words
    norms: dict[str, None] = {}
    for index, group_parts in decompose(run, starts, norms):
        for branch, sums in branches:
            if index in branch.sums:
                word = run.get_word(index, sums)
                _add_parts(branch.parts, group_parts, _project_parts(run, group_parts, branch.sums[index], word))
    tables = [{**branch.parts, **branch.later_parts} for branch, _ in branches]
    writers = tuple(dict.fromkeys(writer for table in tables for writer in table))
    blocks = []
    for table in tables:
        zero = torch.zeros_like(next(iter(table.values())))
        blocks.append(torch.stack([table.get(writer, zero) for writer in writers], -1))
    for branch, _ in branches:
        norms |= dict.fromkeys(branch.norms)
    norms |= dict.fromkeys(collect_writers(run, steps, 1).norms)
    values = torch.cat(blocks, -2)  # [*states, head, writer]
    return PathContributions(name, tuple(norms), readout.label, direct.writers, writers, values)


def _make_run(state: SentenceState, readout: Readout) -> LinearRun:
    """The run with the values on the linear paths to a readout and to the values of all heads that it reads."""
    run, specs = make_run(state, readout), state.network.specs
    reached = find_linear_groups(run.network, run.groups, run.set_groups)
    attention = [i for i in reached if specs[i].tpm.has_attention and i not in run.set_groups]
    if not attention:
        raise _no_heads_error(run)
    for spec in (specs[i] for i in attention):
        if not isinstance(spec.tpm, Attention):
            actual = f"{spec.group.name}, a {type(spec.tpm).__name__}"
            raise UnsupportedError(f"{run.subject}, paths=2", expected="heads with an Attention", actual=actual)
    return make_run(state, readout, {specs[i].parents[VALUE_SLOT].index for i in attention})


def _no_heads_error(run: LinearRun) -> UnsupportedError:
    """The error for a readout without heads, or whose heads are all set."""
    return UnsupportedError(f"{run.subject}, paths=2", expected="a readout that reads heads", hint="Use paths=1")


def _follow_values(run: LinearRun, step: Step) -> tuple[_Branch, ActiveWords]:
    """The branch of an attention, with its pass back to the first sums; and the active words of all groups."""
    spec, layout = step.spec, run.layout
    assert isinstance(spec.tpm, Attention)
    is_narrow = step.adjoint.shape[layout.word_dim + 1] == 1 and len(step.words) == 1
    word = step.words[0] if is_narrow and spec.group.word_stack is not None else None
    value = spec.parents[VALUE_SLOT]
    active = run.find_active_words({value.index: run.find_read_words(spec, value, step.words)})
    linear_map = run.make_linear_map(spec, word)
    _, parents, leaves = run.gather_leaves(spec, (VALUE_SLOT,), word, active)
    gradients = run.compute_adjoints(linear_map.evaluate(*parents), leaves, _split_heads(run, step), active)
    sums = _find_sums(run, value.index)
    steps = list(run.pull_back(gradients, active, sums))
    branch = _Branch(step)
    table = collect_writers(run, steps, 1)
    branch.norms = table.norms
    for k, writer in enumerate(table.writers):
        branch.later_parts[writer] = table.values[..., k, :].sum(-1).movedim(0, -1)
    branch.sums = {s.spec.group.index: s.adjoint for s in steps if s.spec.group.index in sums}
    return branch, {index: active[index] for index in branch.sums}


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
    sizes = [max(product.shape[k] for product in products) for k in range(dim)]
    return torch.cat([product.expand(*sizes, *product.shape[dim:]) for product in products], -1)


def _add_parts(table: dict[Writer, Tensor], parts: GroupParts, products: Tensor) -> None:
    """Add products, `[*states, seed, writer]`, to the parts of their writers."""
    for k, writer in enumerate(parts.writers):
        table[writer] = table[writer] + products[..., k] if writer in table else products[..., k]

"""Along arrows: what a node comes to where some of its arrows alone carry another value, and so on down a path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.compiler.course import Course, Layout
from bnet_transformer.compiler.seeing import seen
from bnet_transformer.compiler.values import computed
from bnet_transformer.inference.sweeps.cell_spec import Ids, Route
from bnet_transformer.inference.sweeps.patched_run import PatchedRun, picked
from bnet_transformer.inference.sweeps.sparse_update import CELLS, Setting, full_shape, index_of

Sent = Mapping[int, Tensor]  # what the arrows from some parents carry, `[example, *shape]` each


@dataclass(frozen=True)
class _End:
    """The last node of some paths of a cell: that it is set to what they bring."""

    cell: int
    node: int
    paths: tuple[tuple[int, ...], ...]


def settings_of(run: PatchedRun, clean: Course, routes: Sequence[Route], memory: int) -> dict[int, list[Setting]]:
    """What paths come to at their last nodes, which are then set: the first node's value is that of the clean run."""
    ends: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for route in routes:
        ends.setdefault((route.cell, route.nodes[-1]), []).append(route.nodes)
    items = [_End(cell, node, tuple(paths)) for (cell, node), paths in ends.items()]
    starts = [path[0] for each in items for path in each.paths]
    values = iter(_values(run, clean, starts))
    sent: list[Sent] = [{path[0]: next(values) for path in each.paths} for each in items]
    for step in range(1, max(len(each.paths[0]) for each in items)):
        due = [k for k, each in enumerate(items) if len(each.paths[0]) > step]
        children = [items[k].paths[0][step] for k in due]
        made = _through(run, children, [sent[k] for k in due], memory)
        for k, child, value in zip(due, children, made, strict=True):
            sent[k] = {child: value}
    found = {}
    for family, which in _by_family(run, [each.node for each in items]).items():
        node = index_of(run.base, run.members[family], _numbers(run, family, [items[k].node for k in which]))
        cell = torch.tensor([items[k].cell for k in which])
        source = torch.stack([sent[k][items[k].node] for k in which], 1)
        found[family] = [Setting(cell, node, source, own=True)]
    return found


def _by_family(run: PatchedRun, nodes: Sequence[int]) -> dict[int, list[int]]:
    """Which of some nodes are of each family."""
    ends = run.examples.world.ground.offsets
    families = np.searchsorted(ends, np.array(nodes, dtype=np.int64), side="right") - 1
    found: dict[int, list[int]] = {}
    for k, family in enumerate(families.tolist()):
        found.setdefault(family, []).append(k)
    return found


def _numbers(run: PatchedRun, family: int, nodes: Sequence[int]) -> Ids:
    """The numbers of nodes in their family."""
    found: Ids = np.array(nodes, dtype=np.int64) - int(run.examples.world.ground.offsets[family])
    return found


def _values(run: PatchedRun, course: Course, nodes: Sequence[int]) -> list[Tensor]:
    """The values of nodes in a run: `[example, *shape]` each."""
    found: list[Tensor] = [torch.zeros(0)] * len(nodes)
    for family, which in _by_family(run, nodes).items():
        index = index_of(run.base, run.members[family], _numbers(run, family, [nodes[k] for k in which]))
        value = course.values[family]
        value = value.expand(len(run.examples), *value.shape[1:])
        for k, each in zip(which, picked(run, family, value, index).unbind(), strict=True):
            found[k] = each
    return found


def _through(run: PatchedRun, children: Sequence[int], sent: Sequence[Sent], memory: int) -> list[Tensor]:
    """What each child comes to when its arrows from some parents carry what is sent, and the others what they did."""
    ground, members = run.examples.world.ground, run.members
    groups: dict[tuple[int, int, frozenset[int]], list[int]] = {}
    for k, (child, told) in enumerate(zip(children, sent, strict=True)):
        own, at = ground.place(child)
        word = at[-1] if own.words is not None else -1
        groups.setdefault((own.index, word, frozenset(_by_family(run, list(told)))), []).append(k)
    found: list[Tensor] = [torch.zeros(0)] * len(children)
    for (family, word, parents), which in groups.items():
        member = members[family]
        size = max(1, memory // _bytes(run, parents))
        for start in range(0, len(which), size):
            some = which[start : start + size]
            made = _computed(run, family, None if word < 0 else word, [sent[k] for k in some])
            index = index_of(run.base, member, _numbers(run, family, [children[k] for k in some]))
            own_ = made.shape[run.base.layout.rank + 1 :]
            full = made.expand(len(some), len(run.examples), *full_shape(run.base, member)[:-1], 1, *own_)
            full = full.movedim(1, run.base.layout.rank)  # [sent, *plates, 1, example, *shape]
            rows = (torch.arange(len(some)), *index[:-1], torch.zeros_like(index[-1]))
            for k, each in zip(some, full[rows].unbind(), strict=True):
                found[k] = each
    return found


def _bytes(run: PatchedRun, parents: frozenset[int]) -> int:
    """What one child's parents take, with the words that it reads."""
    numbers = sum(run.base.values[parent].numel() for parent in parents)
    return max(1, 16 * numbers * len(run.examples))


def _computed(run: PatchedRun, family: int, word: int | None, sent: Sequence[Sent]) -> Tensor:
    """A family at one word, once for each of what is sent: `[sent, example, *plates, 1, *shape]`."""
    member, base = run.members[family], run.base
    read = {given.parent for given in member.inputs} | {s for given in member.inputs for _, s in given.pick}
    values = {parent: base.values[parent][None] for parent in read}
    told = [(row, node, value) for row, each in enumerate(sent) for node, value in each.items()]
    for parent, which in _by_family(run, [node for _, node, _ in told]).items():
        value = base.values[parent]
        lead = (len(sent), len(run.examples), *full_shape(base, run.members[parent]))
        values[parent] = value[None].expand(*lead, *value.shape[base.layout.rank :]).clone()
        index = index_of(base, run.members[parent], _numbers(run, parent, [told[k][1] for k in which]))
        rows = torch.tensor([told[k][0] for k in which])
        carried = torch.stack([told[k][2] for k in which])
        values[parent].movedim(1, base.layout.rank)[(rows, *index)] = carried
    layout = Layout((CELLS,), base.layout.plates)
    course = replace(base, layout=layout, values=values, masks={}, readings={})
    at, seen_ = seen(course, member, word)
    made = computed(course, member, at, seen_)
    return layout.full(made, len(member.shape))

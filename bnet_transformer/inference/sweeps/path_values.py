"""Along arrows: what a node comes to where some of its arrows alone carry another value, and so on down a path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.compiler.course import Course, Layout
from bnet_transformer.compiler.seeing import seen
from bnet_transformer.compiler.values import computed
from bnet_transformer.inference.sweeps.cell_spec import Ids, NodePath
from bnet_transformer.inference.sweeps.patched_run import PatchedRun, picked
from bnet_transformer.inference.sweeps.sparse_update import CELLS, Setting, full_shape, index_of, parents_of

Sent = Mapping[int, Tensor]  # what the arrows from some parents carry, `[example, *shape]` each


def settings_of(run: PatchedRun, clean: Course, routes: Sequence[NodePath], memory: int) -> dict[int, list[Setting]]:
    """What paths come to at their last nodes, which are then set: the first node's value is that of the clean run."""
    paths: dict[tuple[int, int], list[tuple[int, ...]]] = {}  # by the cell and the last node
    for route in routes:
        paths.setdefault((route.cell, route.nodes[-1]), []).append(route.nodes)
    ends, ways = list(paths), list(paths.values())
    values = iter(_values(run, clean, [path[0] for several in ways for path in several]))
    sent: list[Sent] = [{path[0]: next(values) for path in several} for several in ways]
    for step in range(1, max(len(several[0]) for several in ways)):
        due = [k for k, several in enumerate(ways) if len(several[0]) > step]
        children = [ways[k][0][step] for k in due]
        made = _through(run, children, [sent[k] for k in due], memory)
        for k, child, value in zip(due, children, made, strict=True):
            sent[k] = {child: value}
    found = {}
    for family, which in _by_family(run, [node for _, node in ends]).items():
        cells, nodes = zip(*(ends[k] for k in which), strict=True)
        node = index_of(run.base, run.members[family], _numbers(run, family, nodes))
        source = torch.stack([sent[k][ends[k][1]] for k in which], 1)
        found[family] = [Setting(torch.tensor(cells), node, source, own=True)]
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
        numbers = len(run.examples) * sum(run.base.values[parent].numel() for parent in parents)
        size = max(1, memory // max(1, 16 * numbers))
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


def _computed(run: PatchedRun, family: int, word: int | None, sent: Sequence[Sent]) -> Tensor:
    """A family at one word, once for each of what is sent: `[sent, example, *plates, 1, *shape]`."""
    member, base = run.members[family], run.base
    values = {parent: base.values[parent][None] for parent in parents_of(member)}
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

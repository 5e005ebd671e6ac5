"""Tables of whole families of nodes, from one pass of the compiled net: values, logits, moments, `P(j | i)`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent
from torch.distributions import Normal as TorchNormal

from bnet_transformer.compiler.course import Course, Layout
from bnet_transformer.compiler.seeing import seen
from bnet_transformer.errors import BNetError
from bnet_transformer.network import Input, Member
from bnet_transformer.tpm import Normal


@dataclass(frozen=True)
class FamilyTable:
    """The values of one family in a layout, `[*enumerated, 1, *plates, word, *shape]`."""

    layout: Layout
    values: Tensor


def distribution_of(member: Member, parameters: Tensor) -> Distribution:
    """The distribution of a node: of its value, of its mean and sigma, or of its logits."""
    if not member.tpm.is_random:
        from pyro.distributions import Delta

        return Delta(parameters, event_dim=len(member.shape))
    if isinstance(member.tpm, Normal):
        mean, sigma = parameters.unbind(-2)
        return Independent(TorchNormal(mean, sigma, validate_args=False), 1, validate_args=False)
    return Categorical(logits=parameters, validate_args=False)


def inputs_of(table: str, member: Member) -> list[Input]:
    """What the logits or the reading of a family depend on."""
    slots = member.tpm.reading_slots()
    return [given for given in member.inputs if table != "reading" or given.slot in slots]


def table_of(table: str, member: Member, course: Course) -> FamilyTable:
    """A table of a family, whose parents a pass has computed."""
    if table == "value":
        return FamilyTable(course.layout, course.values[member.family.index])
    inputs = inputs_of(table, member)
    at, values = seen(course, replace(member, inputs=tuple(inputs)))
    each = iter(values)
    parents = [next(each) if given in inputs else torch.zeros(0) for given in member.inputs]
    if table == "normal":  # its mean and its sigma, one above the other
        normal = member.tpm.distribution(at, *parents)
        return FamilyTable(course.layout, course.layout.full(torch.stack([normal.mean, normal.stddev], -2), 2))
    entries = member.tpm.reading(at, *parents) if table == "reading" else member.tpm.logits(at, *parents)
    if entries is None:
        raise BNetError(member.family.name, expected="attention P(j | i)", got=member.tpm.why_no_reading())
    entries = entries if table == "reading" else torch.log_softmax(entries.to(course.log_dtype), -1)
    entries = course.layout.full(entries, 1)
    if table == "reading" and member.family.index in course.rows:
        rows, which = course.rows[member.family.index]
        entries = torch.where(which[..., None], rows, entries)
    return FamilyTable(course.layout, entries)

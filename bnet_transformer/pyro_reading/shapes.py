"""Values and distributions in Pyro's form: plates at fixed dims from the right, enumerated dims left of them."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.distributions import Distribution, Independent

from bnet_transformer.compiler.course import Course, Layout
from bnet_transformer.errors import BNetError, shown
from bnet_transformer.network import Member

NO_FAMILY = -1  # in a layout, a dim that Pyro enumerates: which family it belongs to is Pyro's to know


def event_dims(member: Member, value: Tensor) -> int:
    """How many dims of a value are the node's own: none where it is a state."""
    return 0 if member.tpm.kind == "discrete" and not value.is_floating_point() else len(member.shape)


def received(course: Course, member: Member, value: Tensor) -> Tensor:
    """What a site returned, with all dims of the layout; the layout grows where Pyro enumerated one more site."""
    own = event_dims(member, value)
    lead, shape = list(value.shape[: value.dim() - own]), list(value.shape[value.dim() - own :])
    while len(lead) > course.layout.rank and lead[0] == 1:
        del lead[0]
    plain = course.layout.rank - course.layout.batch
    if 0 < len(lead) < plain and value.numel() > 1:
        raise BNetError(
            member.family.name,
            expected=f"a value with the {plain} dims of sentence, plates and word (model.data makes them)",
            got=f"shape {tuple(value.shape)}",
        )
    grow(course, len(lead) - course.layout.rank)
    return value.reshape([1] * (course.layout.rank - len(lead)) + lead + shape)


def grow(course: Course, more: int) -> None:
    """Room for more enumerated dims, in front of all values so far."""
    if more > 0:
        course.layout = Layout((*course.layout.enumerated, *[NO_FAMILY] * more), course.layout.plates)
        for index, value in course.values.items():
            course.values[index] = value.reshape([1] * more + list(value.shape))
        course.known = {k: value.reshape([1] * more + list(value.shape)) for k, value in course.known.items()}


def pyro_distribution(what: str, found: Distribution) -> Any:
    """The same distribution as Pyro's class; a stranger's must be Pyro's or one that Pyro has under its name."""
    if isinstance(found, TorchDistributionMixin):
        return found
    if isinstance(found, Independent):
        return pyro_distribution(what, found.base_dist).to_event(found.reinterpreted_batch_ndims)
    kind = getattr(dist, type(found).__name__, None)
    arguments = {name: vars(found)[name] for name in found.arg_constraints if name in vars(found)}
    if kind is None or not arguments:
        raise BNetError(what, expected="a distribution that Pyro has", got=shown(found), allowed="pyro.distributions")
    if "logits" in arguments:
        arguments.pop("probs", None)
    return kind(**arguments, validate_args=False)


def categorical(logits: Tensor) -> dist.Categorical:
    """The Categorical of a choice."""
    return dist.Categorical(logits=logits, validate_args=False)


def dirichlet(table: Tensor, concentration: float) -> Any:
    """One Dirichlet for each row of a table."""
    rows = torch.full_like(table, concentration)
    return dist.Dirichlet(rows, validate_args=False).to_event(table.dim() - 1)

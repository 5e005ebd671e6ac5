"""Values and distributions in Pyro's form, and what Pyro would pass over in silence.

Plates have fixed dims from the right, enumerated dims lie left of them. Refused are data for names that are no site or
of another form, and choices that meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.do_messenger import DoMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor
from torch.distributions import Distribution, Independent

from bnet_transformer._core.checks import check_int
from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.execution_state import ExecutionState, TensorLayout
from bnet_transformer.compiler.validate_inputs import (
    check_states,
    describe_shape,
    get_plate_sizes,
    infer_batch_size,
    is_readable,
)
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, EvidenceError, format_value

UNKNOWN_GROUP = -1  # in a layout, a dim that Pyro enumerates: which family it belongs to is Pyro's to know


def event_shape(spec: NodeSpec) -> tuple[int, ...]:
    """The dims of a value of a family that are its own: none of a state."""
    return () if spec.tpm.kind == "discrete" else spec.shape


class SiteStatusMessenger(Messenger):
    """Sees whether a site within it is enumerated, and whether its value is fixed (`obs=`, condition, do)."""

    def __init__(self) -> None:
        super().__init__()
        self.is_enumerated = False
        self.is_fixed = False

    def _pyro_post_sample(self, msg: Any) -> None:
        self.is_enumerated = (msg["infer"] or {}).get("_enumerate_dim") is not None
        self.is_fixed = bool(msg["is_observed"])


def iterate_handled_sites() -> Iterator[tuple[str, str, object]]:
    """What the handlers around the model condition or set: `"condition"` or `"do"`, the name, the value."""
    for handler in _PYRO_STACK:
        if isinstance(handler, ConditionMessenger | DoMessenger) and isinstance(handler.data, dict):
            what = "do" if isinstance(handler, DoMessenger) else "condition"
            yield from ((what, name, value) for name, value in handler.data.items())


def count_sentences(
    network: Network, observed: Mapping[str, Tensor], max_plate_nesting: int, minimum: int, batch: int | None
) -> int:
    """How many sentences there are: where inputs tell of one (`minimum`), as many as are observed, or asked for.

    Observations are `[batch, *plates, word, *shape]`; what `condition` and `do` fix has Pyro's shape, `max_plate_nesting` plates.
    """
    members = {m.group.name: m for m in network.specs if m.tpm.is_random and m.scope != "corpus"}
    told = {members[name].group.index: (name, value) for name, value in observed.items() if name in members}
    found = [infer_batch_size(network, told, minimum)]
    for _, name, value in iterate_handled_sites() if minimum == 1 else ():
        if name in members and isinstance(value, Tensor):
            own = len(members[name].shape) if value.is_floating_point() else 0
            found += (
                value.shape[value.dim() - own - max_plate_nesting :][:1]
                if value.dim() >= own + max_plate_nesting
                else []
            )
    if batch is not None and check_int("batch", batch) != max(found) > 1:
        raise BNetError("batch", expected=f"{max(found)}, the number of sentences in y", actual=batch)
    return max(found) if batch is None else batch


def check_handled_sites(network: Network, sites: frozenset[str], observed: frozenset[str]) -> dict[str, frozenset[str]]:
    """The sites under `condition` and `do`; refuse nodes of the net that are no site, and do on what is seen."""
    found: dict[str, set[str]] = {"condition": set(), "do": set()}
    for what, name, _ in iterate_handled_sites():
        if name in sites:
            found[what].add(name)
        elif name in network.graph.by_name:
            kind = "set by do=" if network.get_spec(name).tpm.is_random else "deterministic"
            raise BNetError(
                f"{what} on {name}",
                expected="a random site of the model",
                actual=f"a {kind} node, which Pyro would pass over in silence",
                allowed=", ".join(sorted(sites)) + f"; to set it, model(x, do={{{name!r}: ...}})",
            )
        elif (
            owner := network.graph.find_group_of_node(name)
        ) is not None:  # any other name is a site of a model around this one
            some = (
                f", or y={{{owner.name!r}: ...}} with observed_mask= for some of its words"
                if owner.name in sites
                else ""
            )
            raise BNetError(
                f"{what} on {name}",
                expected="the name of a whole family, for its nodes are one site",
                actual="one node",
                allowed=f"{owner.name!r}{some}",
            )
    for name in sorted(found["do"] & (found["condition"] | observed)):
        raise EvidenceError(name, expected="do or evidence on a node, not both", actual="both")
    return {what: frozenset(names) for what, names in found.items()}


def check_type(subject: str, spec: NodeSpec, value: object, dtype: torch.dtype) -> Tensor:
    """A value of a random family, or the error: states are whole numbers, the rest real ones of the net's type."""
    if not isinstance(value, Tensor):
        raise BNetError(subject, expected="a tensor", actual=value)
    discrete = spec.tpm.kind == "discrete"
    if discrete == (value.is_floating_point() or value.is_complex()) or value.dtype == torch.bool:
        wanted = "whole numbers, the states" if discrete else "real numbers"
        raise BNetError(subject, expected=wanted, actual=f"{value.dtype}")
    if not discrete and value.dtype != dtype:
        hint = f"net.to({value.dtype}), or {subject} in {dtype}"
        raise BNetError(subject, expected=f"{dtype}, as the net", actual=f"{value.dtype}", allowed=hint)
    return value


def check_finite(subject: str, value: Tensor, observed_mask: Tensor | None = None) -> None:
    """Refuse NaN and infinity, where something is seen."""
    if not value.is_floating_point() or not is_readable(value):
        return
    bad = ~torch.isfinite(value.detach())
    bad = (
        bad
        if observed_mask is None
        else bad & observed_mask.reshape(*observed_mask.shape, *[1] * (bad.dim() - observed_mask.dim()))
    )
    if bool(bad.any()):
        raise EvidenceError(subject, expected="finite numbers", actual=value.detach()[bad][0].item())


def check_data(state: ExecutionState, spec: NodeSpec, value: object) -> Tensor:
    """A value `[batch, *plates, word, *shape]`, for sentences that are not known yet, or the error."""
    name, network, own = f"data[{spec.group.name!r}]", state.network, event_shape(spec)
    value = check_type(name, spec, value, network.dtype)
    words = value.shape[value.dim() - len(own) - 1] if value.dim() > len(own) else 0
    sizes = (*get_plate_sizes(network, spec, {spec.group.word_stack or "": words}), *own)
    fits = value.dim() in (len(sizes), len(sizes) + 1) and value.shape[value.dim() - len(sizes) :] == sizes
    if not fits or 0 in value.shape:
        wanted = describe_shape(spec, is_state=spec.tpm.kind == "discrete")
        wanted += "".join(f", {network.graph.plate_sizes[plate]} along {plate}" for plate in spec.group.plates)
        raise BNetError(name, expected=wanted, actual=f"shape {tuple(value.shape)}")
    check_finite(name, value)
    if spec.tpm.states is not None:  # of words that are read the run knows how many there are
        check_states(state, spec.group.index, name, value)
    return value


def check_sample(
    state: ExecutionState, spec: NodeSpec, subject: str, value: object, sizes: Sequence[int], handler: str
) -> Tensor:
    """The value of a site: states that there are; under condition and do (`handler`), also of the form of the site.

    `sizes` are the site's sentences, plates and words. `do` may set one value for all; a value has further dims in
    front where a handler draws many at once.
    """
    if handler or spec.tpm.kind == "discrete":
        value = check_type(subject, spec, value, state.dtype)
    assert isinstance(value, Tensor)
    if handler:
        own, full = event_shape(spec), tuple(sizes)
        split = max(0, value.dim() - len(own))
        lead = tuple(value.shape[:split])
        if len(lead) < len(full) and set(lead) <= {1}:
            lead = (1,) * (len(full) - len(lead)) + lead
        fitting = [full, (1, *full[1:]), (1,) * len(full)] if handler == "do" else [full]
        if lead[max(0, len(lead) - len(full)) :] not in fitting or value.shape[split:] != own:
            wanted = f"shape {(*full, *own)}, first the {len(full)} dims of sentence, plates and word"
            got = f"shape {tuple(value.shape)}"
            raise BNetError(subject, expected=wanted, actual=got, allowed="model.data makes these dims")
        check_finite(subject, value)
    check_states(state, spec.group.index, subject, value)
    return value


def check_probabilities(subject: str, value: object, stored: Tensor) -> None:
    """Refuse a table of probabilities that is of another form or type, or whose rows are none."""
    if not isinstance(value, Tensor) or value.dtype != stored.dtype:
        got = f"{value.dtype}" if isinstance(value, Tensor) else value
        raise BNetError(subject, expected=f"probabilities in {stored.dtype}", actual=got)
    if value.shape[max(0, value.dim() - stored.dim()) :] != stored.shape:
        raise BNetError(subject, expected=f"shape {tuple(stored.shape)}", actual=f"shape {tuple(value.shape)}")
    if is_readable(value):
        rows = value.detach()
        near = (rows.sum(-1) - 1).abs() <= torch.finfo(rows.dtype).eps ** 0.5
        if not bool(near.all() & (rows >= 0).all()):
            raise BNetError(subject, expected="rows of probabilities, which sum to 1", actual=rows.tolist())


def find_meeting_group(network: Network, index: int, known: frozenset[int]) -> str | None:
    """The first family in which entries of a plate meet that a choice was drawn for one by one; None where none does.

    Pyro sums such a choice out for each entry apart, which is right only while nothing depends on two of them.
    """
    member = network.specs[index]
    own = set(member.group.plates) | ({WORD} if member.group.word_stack is not None else set())
    reached = {index: own}
    before: dict[int, set[str]] = {}
    while reached != before:  # once more where families read each other word after word: no order has parents first
        before = dict(reached)
        for child in network.specs:
            at = child.group.index
            if at in known or (at == index and not any(given.index == index for given in child.parents)):
                continue
            axes: set[str] = set()
            for given in child.parents:
                if given.index in reached:
                    if any(_meets(child, given, axis) for axis in reached[given.index]):
                        return child.group.name
                    axes |= reached[given.index]
                axes |= {axis for _, selector in given.pick for axis in reached.get(selector, ())}
            reads = any(g.index in reached or any(s in reached for _, s in g.pick) for g in child.parents)
            if reads and child.tpm.kind == "deterministic":
                reached[at] = axes
    return None


def _meets(child: NodeSpec, parent: ParentSpec, axis: str) -> bool:
    """True where one entry of the child reads other entries of its parent along an axis."""
    if axis in parent.over or axis in dict(parent.pick):
        return True
    return not parent.reach.is_positionwise if axis == WORD else axis not in child.group.plates


def align_site_value(state: ExecutionState, spec: NodeSpec, value: Tensor) -> Tensor:
    """What a site returned, with all dims of the layout; the layout grows where Pyro enumerated one more site."""
    split = value.dim() - len(event_shape(spec))
    lead, shape = list(value.shape[:split]), list(value.shape[split:])
    while len(lead) > state.layout.rank and lead[0] == 1:
        del lead[0]
    plain = state.layout.rank - state.layout.batch_dim
    if 0 < len(lead) < plain and value.numel() > 1:
        wanted = f"a value with the {plain} dims of sentence, plates and word (model.data makes them)"
        raise BNetError(spec.group.name, expected=wanted, actual=f"shape {tuple(value.shape)}")
    more = len(lead) - state.layout.rank
    if more > 0:  # room for more enumerated dims, in front of all values so far
        state.layout = TensorLayout((*state.layout.enumerated, *[UNKNOWN_GROUP] * more), state.layout.plates)
        state.values.update({k: each.reshape([1] * more + list(each.shape)) for k, each in state.values.items()})
        state.known = {k: each.reshape([1] * more + list(each.shape)) for k, each in state.known.items()}
    return value.reshape([1] * (state.layout.rank - len(lead)) + lead + shape)


def to_pyro_distribution(subject: str, distribution: Distribution) -> Any:
    """The same distribution as Pyro's class; a stranger's must be Pyro's or one that Pyro has under its name."""
    if isinstance(distribution, TorchDistributionMixin):
        return distribution
    if isinstance(distribution, Independent):
        return to_pyro_distribution(subject, distribution.base_dist).to_event(distribution.reinterpreted_batch_ndims)
    kind = getattr(dist, type(distribution).__name__, None)
    arguments = {name: vars(distribution)[name] for name in distribution.arg_constraints if name in vars(distribution)}
    if kind is None or not arguments:
        raise BNetError(
            subject,
            expected="a distribution that Pyro has",
            actual=format_value(distribution),
            allowed="pyro.distributions",
        )
    if "logits" in arguments:
        arguments.pop("probs", None)
    return kind(**arguments, validate_args=False)

"""Conversion of values and distributions to Pyro's shapes and classes, and errors for mistakes that Pyro ignores.

Plates have fixed dims from the right; enumerated dims are to the left of them. Errors are raised for data with names
that are not sites, for wrong shapes, and for enumerated choices that cannot be summed out independently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.do_messenger import DoMessenger
from pyro.poutine.enum_messenger import EnumMessenger
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

UNKNOWN_GROUP = -1  # in a layout: a dim that Pyro enumerates for a site that is not in the net


def event_shape(spec: NodeSpec) -> tuple[int, ...]:
    """Return the event shape of a group's site: its shape, or () for states."""
    return () if spec.tpm.kind == "discrete" else spec.shape


class SiteStatusMessenger(Messenger):
    """Records whether a site inside it is enumerated, and whether its value is fixed (`obs=`, condition, do)."""

    def __init__(self) -> None:
        super().__init__()
        self.is_enumerated = False
        self.is_fixed = False

    def _pyro_post_sample(self, msg: Any) -> None:
        """Record the status of a site after its sample statement."""
        self.is_enumerated = (msg["infer"] or {}).get("_enumerate_dim") is not None
        self.is_fixed = bool(msg["is_observed"])


def is_enumerating() -> bool:
    """Return True inside a handler that enumerates sites, such as that of `TraceEnum_ELBO`."""
    return any(isinstance(handler, EnumMessenger) for handler in _PYRO_STACK)


def iterate_handled_sites() -> Iterator[tuple[str, str, object]]:
    """Iterate over the data of the handlers around the model: `"condition"` or `"do"`, the name, the value."""
    for handler in _PYRO_STACK:
        if isinstance(handler, ConditionMessenger | DoMessenger) and isinstance(handler.data, dict):
            kind = "do" if isinstance(handler, DoMessenger) else "condition"
            yield from ((kind, name, value) for name, value in handler.data.items())


def count_sentences(
    network: Network, observed: Mapping[str, Tensor], max_plate_nesting: int, minimum: int, batch: int | None
) -> int:
    """Return the number of sentences: of the inputs (`minimum`) if above 1, else of the observations, or `batch`.

    Observations are `[batch, *plates, word, *shape]`. The data of `condition` and `do` have Pyro's shape, with
    `max_plate_nesting` plates.
    """
    specs = {m.group.name: m for m in network.specs if m.tpm.is_random and m.scope != "corpus"}
    by_group = {specs[name].group.index: (name, value) for name, value in observed.items() if name in specs}
    counts = [infer_batch_size(network, by_group, minimum)]
    for _, name, value in iterate_handled_sites() if minimum == 1 else ():
        if name in specs and isinstance(value, Tensor):
            event_dim = len(specs[name].shape) if value.is_floating_point() else 0
            start = value.dim() - event_dim - max_plate_nesting
            counts += value.shape[start:][:1] if start >= 0 else []
    if batch is not None and check_int("batch", batch) != max(counts) > 1:
        raise BNetError("batch", expected=f"{max(counts)}, the number of sentences in the data", actual=batch)
    return max(counts) if batch is None else batch


def check_handled_sites(
    network: Network, sites: frozenset[str], observed: frozenset[str], *, is_summed: bool = False
) -> dict[str, frozenset[str]]:
    """Return the sites with `condition` and `do`; raise an error for other nodes, and for `do` on an observed site.

    `is_summed` is true for a model that sums all random nodes out.
    """
    handled: dict[str, set[str]] = {"condition": set(), "do": set()}
    for handler, name, _ in iterate_handled_sites():
        if name in sites:
            handled[handler].add(name)
        elif name in network.graph.by_name:
            if network.get_spec(name).tpm.is_random and is_summed:
                hint = "Pass observations as y= and interventions as do=, or use net.pyro(choices='sites')"
                message = f"{handler} on {name}: with choices='summed' choices are summed out, and no node is a site"
                raise BNetError(message, hint=hint)
            is_set = network.get_spec(name).tpm.is_random
            kind = "a node that do= sets" if is_set else "a deterministic node"
            hint = f"Leave {name} out of do=" if is_set else f"Use model(x, do={{{name!r}: ...}}) to set the node"
            raise BNetError(
                f"{handler} on {name}",
                expected="a random site of the model",
                actual=f"{kind}, for which Pyro would silently ignore the value",
                allowed=", ".join(sorted(sites)),
                hint=hint,
            )
        # A name that is not a node of the net may be a site of a model around this one.
        elif (owner := network.graph.find_group_of_node(name)) is not None:
            hint = f"Use {owner.name!r}"
            hint += f", or y={{{owner.name!r}: ...}} with observed_mask=" if owner.name in sites else ""
            raise BNetError(
                f"{handler} on {name}",
                expected="the name of a node group, because all its nodes are one site",
                actual="the name of one node",
                hint=hint,
            )
    for name in sorted(handled["do"] & (handled["condition"] | observed)):
        raise EvidenceError(name, expected="do or evidence on a node, not both")
    return {handler: frozenset(names) for handler, names in handled.items()}


def check_type(subject: str, spec: NodeSpec, value: object, dtype: torch.dtype) -> Tensor:
    """Check the type of a value of a random group: states are integers, other values have the dtype of the net."""
    if not isinstance(value, Tensor):
        raise BNetError(subject, expected="a tensor", actual=value)
    discrete = spec.tpm.kind == "discrete"
    if discrete == (value.is_floating_point() or value.is_complex()) or value.dtype == torch.bool:
        expected = "integers, which are states" if discrete else "real numbers"
        raise BNetError(subject, expected=expected, actual=f"{value.dtype}")
    if not discrete and value.dtype != dtype:
        hint = f"Convert the net with net.to({value.dtype}), or the value to {dtype}"
        raise BNetError(subject, expected=f"{dtype}, the dtype of the net", actual=f"{value.dtype}", hint=hint)
    return value


def check_finite(subject: str, value: Tensor, observed_mask: Tensor | None = None) -> None:
    """Raise an error for NaN and infinity in observed entries."""
    if not value.is_floating_point() or not is_readable(value):
        return
    bad = ~torch.isfinite(value.detach())
    if observed_mask is not None:
        bad = bad & observed_mask.reshape(*observed_mask.shape, *[1] * (bad.dim() - observed_mask.dim()))
    if bool(bad.any()):
        raise EvidenceError(subject, expected="finite numbers", actual=value.detach()[bad][0].item())


def check_data(state: ExecutionState, spec: NodeSpec, value: object) -> Tensor:
    """Check the shape of a value `[batch, *plates, word, *shape]`, as far as it is known before a run."""
    name, network, event = f"data[{spec.group.name!r}]", state.network, event_shape(spec)
    value = check_type(name, spec, value, network.dtype)
    words = value.shape[value.dim() - len(event) - 1] if value.dim() > len(event) else 0
    sizes = (*get_plate_sizes(network, spec, {spec.group.word_stack or "": words}), *event)
    fits = value.dim() in (len(sizes), len(sizes) + 1) and value.shape[value.dim() - len(sizes) :] == sizes
    if not fits or 0 in value.shape:
        expected = describe_shape(spec, is_state=spec.tpm.kind == "discrete")
        expected += "".join(f", {network.graph.plate_sizes[plate]} along {plate}" for plate in spec.group.plates)
        raise BNetError(name, expected=expected, actual=f"shape {tuple(value.shape)}")
    check_finite(name, value)
    if spec.tpm.states is not None:  # else the states are words, whose number is known only in a run
        check_states(state, spec.group.index, name, value)
    return value


def check_sample(
    state: ExecutionState, spec: NodeSpec, subject: str, value: object, sizes: Sequence[int], handler: str
) -> Tensor:
    """Check the value of a site: its states, and in `condition` and `do` (`handler`) its shape.

    `sizes` are the numbers of sentences, entries of each plate, and words of the site. `do` may set one value for all.
    Additional leading dims are those of vectorized samples.
    """
    if handler or spec.tpm.kind == "discrete":
        value = check_type(subject, spec, value, state.dtype)
    assert isinstance(value, Tensor)
    if handler:
        event, full = event_shape(spec), tuple(sizes)
        split = max(0, value.dim() - len(event))
        leading = tuple(value.shape[:split])
        if len(leading) < len(full) and set(leading) <= {1}:
            leading = (1,) * (len(full) - len(leading)) + leading
        fitting = [full, (1, *full[1:]), (1,) * len(full)] if handler == "do" else [full]
        if leading[max(0, len(leading) - len(full)) :] not in fitting or value.shape[split:] != event:
            expected = f"shape {(*full, *event)}, which starts with the {len(full)} dims of sentence, plates and word"
            actual = f"shape {tuple(value.shape)}"
            raise BNetError(subject, expected=expected, actual=actual, hint="Use model.data to create these dims")
        check_finite(subject, value)
    check_states(state, spec.group.index, subject, value)
    return value


def check_probabilities(subject: str, value: object, stored: Tensor) -> None:
    """Raise an error for a table with a wrong shape or dtype, or with rows that are not probabilities."""
    if not isinstance(value, Tensor) or value.dtype != stored.dtype:
        actual = f"{value.dtype}" if isinstance(value, Tensor) else value
        raise BNetError(subject, expected=f"probabilities in {stored.dtype}", actual=actual)
    if value.shape[max(0, value.dim() - stored.dim()) :] != stored.shape:
        raise BNetError(subject, expected=f"shape {tuple(stored.shape)}", actual=f"shape {tuple(value.shape)}")
    if is_readable(value):
        rows = value.detach()
        is_normalized = (rows.sum(-1) - 1).abs() <= torch.finfo(rows.dtype).eps ** 0.5
        if not bool(is_normalized.all() & (rows >= 0).all()):
            raise BNetError(subject, expected="rows of probabilities that sum to 1", actual=rows.tolist())


def find_meeting_group(network: Network, index: int, known: frozenset[int]) -> str | None:
    """Find the first group in which several entries of an enumerated choice interact; None if there is none.

    Parallel enumeration gives all entries of a plate one dim of states, and sums them out independently. This is exact
    only if no value depends on two entries of the choice (Obermeyer et al. 2019, tensor variable elimination).
    """
    spec = network.specs[index]
    choice_axes = set(spec.group.plates) | ({WORD} if spec.group.word_stack is not None else set())
    reached = {index: choice_axes}
    before: dict[int, set[str]] = {}
    while reached != before:  # to a fixed point: in a recurrent component no order puts all parents first
        before = dict(reached)
        for child in network.specs:
            child_id = child.group.index
            if child_id in known or (child_id == index and not any(parent.index == index for parent in child.parents)):
                continue
            axes: set[str] = set()
            for parent in child.parents:
                if parent.index in reached:
                    if any(_meets(child, parent, axis) for axis in reached[parent.index]):
                        return child.group.name
                    axes |= reached[parent.index]
                axes |= {axis for _, selector in parent.pick for axis in reached.get(selector, ())}
            reads = any(g.index in reached or any(s in reached for _, s in g.pick) for g in child.parents)
            if reads and child.tpm.kind == "deterministic":
                reached[child_id] = axes
    return None


def _meets(child: NodeSpec, parent: ParentSpec, axis: str) -> bool:
    """Return True if one entry of the child reads other entries of its parent along an axis."""
    if axis in parent.over or axis in dict(parent.pick):
        return True
    return not parent.reach.is_positionwise if axis == WORD else axis not in child.group.plates


def align_site_value(state: ExecutionState, spec: NodeSpec, value: Tensor) -> Tensor:
    """Align the value of a site with all dims of the layout; the layout grows if Pyro enumerated another site."""
    split = value.dim() - len(event_shape(spec))
    leading, shape = list(value.shape[:split]), list(value.shape[split:])
    while len(leading) > state.layout.rank and leading[0] == 1:
        del leading[0]
    plain = state.layout.rank - state.layout.batch_dim
    if 0 < len(leading) < plain and value.numel() > 1:
        expected = f"a value with the {plain} dims of sentence, plates and word"
        actual, hint = f"shape {tuple(value.shape)}", "Use model.data to create these dims"
        raise BNetError(spec.group.name, expected=expected, actual=actual, hint=hint)
    more = len(leading) - state.layout.rank
    if more > 0:  # Pyro allocates enumerated dims to the left, so earlier values get dims of size 1 in front
        state.layout = TensorLayout((*state.layout.enumerated, *[UNKNOWN_GROUP] * more), state.layout.plates)
        state.values.update({k: v.reshape([1] * more + list(v.shape)) for k, v in state.values.items()})
        state.known = {k: v.reshape([1] * more + list(v.shape)) for k, v in state.known.items()}
    return value.reshape([1] * (state.layout.rank - len(leading)) + leading + shape)


def to_pyro_distribution(subject: str, distribution: Distribution) -> Any:
    """Convert a distribution to the class of Pyro with the same name."""
    if isinstance(distribution, TorchDistributionMixin):
        return distribution
    if isinstance(distribution, Independent):
        return to_pyro_distribution(subject, distribution.base_dist).to_event(distribution.reinterpreted_batch_ndims)
    kind = getattr(dist, type(distribution).__name__, None)
    arguments = {name: vars(distribution)[name] for name in distribution.arg_constraints if name in vars(distribution)}
    if kind is None or not arguments:
        raise BNetError(
            subject,
            expected="a distribution that Pyro defines",
            actual=format_value(distribution),
            hint="Use a class of pyro.distributions",
        )
    if "logits" in arguments:
        arguments.pop("probs", None)
    return kind(**arguments, validate_args=False)

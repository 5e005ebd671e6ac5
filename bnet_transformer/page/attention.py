"""The attention `P(j | i)` that the page shows, for every state of the latent choices and averaged; and the inclusion
of heads."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer._core.tensors import to_numpy
from bnet_transformer.attention.inclusion import Inclusion
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, BudgetError, format_count
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.posteriors import plan_expected_attention
from bnet_transformer.inference.values import NodeQuery
from bnet_transformer.reference import GroundModel, split_choices

MAX_OPEN_STATES = 64  # with more joint states of the latent choices than this, only the mean is shown
MAX_REFERENCE_NODES = 4_096  # the maximum number of nodes whose mean the reference algorithm computes, one at a time

AttentionArray = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class PageAttention:
    """The attention of a node group, `[slot, plate, word, word attended to]`.

    The slots are the posterior mean (if `has_mean`) and then the joint states of the latent choices; the last choice
    varies fastest. `choices` has the names of the choices and their numbers of states. Rows of nodes that `do` sets are
    zero. `note` explains omitted values.
    """

    spec: NodeSpec
    attention: AttentionArray
    choices: tuple[tuple[str, int], ...] = ()
    has_mean: bool = False
    note: str = ""


def prepare_attention(state: SentenceState, specs: Sequence[NodeSpec]) -> None:
    """Compute the attention of these nodes in one pass through the net, except of groups that `do` sets."""
    set_groups = {state.ground.group_of(node).index for node in state.model.do}
    specs = [m for m in specs if m.tpm.has_attention and m.group.index not in set_groups]
    state.evaluator.prefetch("attention", specs)


def compute_page_attention(
    state: SentenceState, spec: NodeSpec, heads: Collection[int] | None = None
) -> PageAttention | str:
    """Return the attention of a node group, for all or some heads; if it has no attention, the reason as text."""
    model, group = state.model, spec.group
    set_nodes = [node for node in model.do if model.ground.group_of(node).index == group.index]
    if not spec.tpm.has_attention:
        return f"{group.name} has no P(j | i): {spec.tpm.no_attention_reason()}."
    if group.index in model.network.graph.recurrent and set_nodes:
        return f"{group.name}: P(j | i) is not shown, because do set some of these nodes and others depend on them."
    # The group is not recurrent, so its nodes do not depend on each other: the other nodes attend as they would without
    # these interventions. So the attention is computed without them, and the rows of set nodes become zero.
    if set_nodes:
        interventions = {node: value for node, value in state.interventions.items() if node not in set_nodes}
        state = replace(state, interventions=interventions, previous=state.evaluator)
    query = state.evaluator.attention_query(spec)
    split = split_choices(state.model, query.choices)
    choices = _count_choice_states(state.model, query, [] if split is None else split[1])
    count = math.prod(choices.values())
    has_states = split is not None and count <= MAX_OPEN_STATES and 0 <= (group.step or 0) < model.network.graph.depth
    parts, note = [], ""
    if choices or not has_states:
        try:
            parts.append(_mean_attention(state, query)[None])
        except BudgetError as error:
            note = f"{group.name}: the posterior mean is not shown ({error})."
    has_mean = bool(parts and choices)
    if has_states:
        values = to_numpy(state.evaluator.plan_attention(spec).run().detach())
        parts.append(values.reshape(-1, *values.shape[-len(model.ground.shapes[group.index]) - 1 :]))
    elif not parts:
        return note
    elif choices:
        reason = "its words depend on different choices"
        if count > MAX_OPEN_STATES:
            reason = f"the latent choices have {format_count(count)} joint states"
        note = f"{group.name}: only the posterior mean is shown, because {reason}."
    table = np.concatenate(parts)
    for node in set_nodes:
        index: tuple[Any, ...] = (slice(None), *model.ground.unravel_index(node)[1])
        table[index] = 0.0
    if heads is not None and "head" in group.plates:
        table = np.take(table, sorted(heads), axis=1 + group.plates.index("head"))
    flat = table.reshape(len(table), -1, *table.shape[-2:])
    return PageAttention(spec, flat, tuple(choices.items()) if has_states else (), has_mean, note)


def _count_choice_states(model: GroundModel, query: NodeQuery, per_word: Collection[int]) -> dict[str, int]:
    """Return the numbers of states of the latent choices of an attention, by name, in the order of the dims.

    The groups in `per_word` have a choice for each word; their names end in `_i`.
    """
    counts = {}
    for choice in sorted(set().union(*query.choices.values())):
        group = model.ground.group_of(choice)
        name = f"{group.name}_i" if group.index in per_word else model.ground.name(choice)
        counts[name] = model.count_states(choice)
    return counts


def _mean_attention(state: SentenceState, query: NodeQuery) -> AttentionArray:
    """Return the attention averaged over the posterior of the latent choices, `[*plates, word, word]`."""
    group = query.spec.group
    num_nodes, plan = len(state.ground.select_nodes(group)), plan_expected_attention(state.query(), query)
    if num_nodes > MAX_REFERENCE_NODES and plan.algorithm == "reference":
        raise BudgetError(
            group.name, expected=f"at most {MAX_REFERENCE_NODES} nodes for a posterior mean", actual=num_nodes
        )
    return to_numpy(plan.run())


# inclusion of heads: a table of probabilities, or the posterior that `bt.inclusion` estimated


def describe_inclusion(network: Network, inclusion: object) -> dict[str, Any] | None:
    """Return the inclusion of heads for JSON: a row for each slice, or in a posterior for each group of heads."""
    if isinstance(inclusion, Inclusion):
        return _describe_posterior_inclusion(network, inclusion)
    return None if inclusion is None else _describe_inclusion_table(network, inclusion)


def _describe_posterior_inclusion(network: Network, inclusion: Inclusion) -> dict[str, Any]:
    """The posterior mean of `rho` with its interval (null without one), and the log Bayes factor of each head."""
    groups = {spec.group.name: spec.group for spec in network.specs}
    heads = inclusion.mean.shape[1]
    for name in inclusion.slices:
        group = groups.get(name)
        sizes = None if group is None else [network.graph.plate_sizes[plate] for plate in group.plates]
        if sizes != [heads]:
            actual = f"{name} with {sizes[0]} heads" if sizes else f"{name} without heads"
            actual = f"no node group {name}" if sizes is None else actual
            hint = "Compute it for this net with bt.inclusion(s.net, sentences)"
            expected = f"the inclusion of heads of this net: {name} with {heads} heads"
            raise BNetError("inclusion", expected=expected, actual=actual, hint=hint)
    fields = {"probabilities": "mean", "low": "low", "high": "high", "log_bayes": "log_bayes"}
    tables = {name: to_numpy(getattr(inclusion, field).double()).round(6) for name, field in fields.items()}
    s = "s" * (inclusion.sentences != 1)
    sigma = "" if inclusion.sigma is None else f", sigma {inclusion.sigma:.3g}"
    line = f"; line: {inclusion.interval:.0%} interval" if inclusion.has_interval.any() else ", without intervals"
    return {
        "title": "Share of sentences that include a head",
        "note": f"Posterior mean of rho over {inclusion.sentences:,} sentence{s}{line}. {inclusion.likelihood}{sigma}.",
        "rows": list(inclusion.slices),
        **{name: np.where(np.isnan(table), np.array(None), table).tolist() for name, table in tables.items()},
    }


def _describe_inclusion_table(network: Network, inclusion: object) -> dict[str, Any]:
    """Return the probabilities that heads are included, `[slice, head]`; a single row applies to every slice."""
    try:
        values = inclusion.tolist() if isinstance(inclusion, Tensor) else inclusion
        table = np.atleast_2d(np.asarray(values, dtype=np.float64))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        expected = "probabilities of shape [slice, head], or a result of bt.inclusion"
        raise BNetError("inclusion", expected=expected, actual=inclusion) from error
    graph, slices = network.graph, network.graph.depth
    states = {m.tpm.states for m in network.specs if m.tpm.kind == "discrete" and graph.out_edges[m.group.index]}
    heads = {graph.plate_sizes["head"]} if "head" in graph.plate_sizes else states
    if table.ndim != 2 or table.shape[0] not in (1, slices) or table.shape[1] not in heads:
        expected = f"probabilities of shape [{slices}, {' or '.join(map(str, sorted(h for h in heads if h)))}]"
        raise BNetError("inclusion", expected=expected, actual=f"shape {list(table.shape)}")
    if not ((table >= 0) & (table <= 1)).all():
        raise BNetError("inclusion", expected="probabilities from 0 to 1", actual=inclusion)
    rows: list[list[float]] = np.broadcast_to(table, (slices, table.shape[1])).round(6).tolist()
    return {"title": "P(head is included)", "rows": [f"slice {k}" for k in range(slices)], "probabilities": rows}

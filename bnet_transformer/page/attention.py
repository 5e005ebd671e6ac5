"""What the page shows of heads, what is read and how each head is in; and the equations of the net.

What is read is `P(j | i)` of every reader in every state of the open choices, and its posterior mean.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer.attention.heads.head_tables import Inclusion
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.equations import equations
from bnet_transformer.equations.notation import Notation
from bnet_transformer.equations.render import share_equations
from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.joint_posterior import expected_group_attention, route_expected_attention
from bnet_transformer.inference.node_evaluator import NodeQuery
from bnet_transformer.reference import GroundModel
from bnet_transformer.reference.node_tables import split_choices
from bnet_transformer.tpm.arrays import to_numpy

MAX_OPEN_STATES = 64  # joint states of open choices that are told one by one; of more, the mean alone
MAX_REFERENCE_NODES = 4_096  # nodes whose mean is computed one by one

MATHML_TAGS = frozenset(
    {"math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "mfrac", "msqrt", "mroot", "msub", "msup", "msubsup"}
    | {"munder", "mover", "munderover", "mtable", "mtr", "mtd", "mstyle", "mpadded", "menclose"}
)
MATHML_ATTRIBUTES = frozenset(
    {"mathvariant", "stretchy", "fence", "form", "minsize", "maxsize", "width", "height", "depth", "accent"}
    | {"columnalign", "separator", "movablelimits", "display", "displaystyle", "scriptlevel", "largeop"}
    | {"linethickness", "lspace", "rspace", "symmetric"}
)
UNDERBRACE = "\u23df"

AttentionArray = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class PageAttention:
    """What a family reads, `[slot, plate, word, word read]`: `slots` are the posterior mean, where choices are open,
    then their joint states, the last choice fastest; `choices` are their names and numbers of states.

    Nodes that are set read nothing. `note` says in words what is missing.
    """

    spec: NodeSpec
    attention: AttentionArray
    choices: tuple[tuple[str, int], ...] = ()
    has_mean: bool = False
    note: str = ""


def prepare_attention(state: SentenceState, specs: Sequence[NodeSpec]) -> None:
    """Compute what these members read in one course of the net, where that can be."""
    set_ = {state.ground.group_of(node).index for node in state.model.do}
    state.evaluator.prefetch_attention([m for m in specs if m.tpm.has_attention and m.group.index not in set_])


def compute_page_attention(
    state: SentenceState, spec: NodeSpec, heads: Collection[int] | None = None
) -> PageAttention | str:
    """What a member reads; in words why nothing, where its TPM has no `P(j | i)`."""
    world, family = state.model, spec.group
    set_ = [node for node in world.do if world.ground.group_of(node).index == family.index]
    if not spec.tpm.has_attention:
        return f"{family.name}: expected attention P(j | i); got {spec.tpm.no_attention_reason()}"
    if family.index in world.network.graph.recurrent and set_:
        return f"{family.name} reads what is set in it: no P(j | i) is shown"
    if set_:  # what it would read, had it not been set; the rows of what is set are empty
        rest = {node: value for node, value in state.interventions.items() if node not in set_}
        state = replace(state, interventions=rest, previous=None)
    reading = state.evaluator.attention_query(spec)
    apart = split_choices(state.model, reading.choices)
    choices = _count_choice_states(state.model, reading, [] if apart is None else apart[1])
    count = math.prod(choices.values())
    is_told = apart is not None and count <= MAX_OPEN_STATES and 0 <= (family.step or 0) < world.network.graph.depth
    parts, note = [], ""
    if choices or not is_told:
        try:
            parts.append(_mean_attention(state, reading)[None])
        except BudgetError as error:
            note = f"{family.name}: no posterior mean ({error})"
    has_mean = bool(parts and choices)
    if is_told:
        values = to_numpy(state.evaluator.attention(family.step or 0, family.stem).detach())
        parts.append(values.reshape(-1, *values.shape[len(choices) :]))
    elif not parts:
        return note
    elif choices:
        many = f"{count:,} joint states are open" if count > MAX_OPEN_STATES else "its words hang on different choices"
        note = f"{family.name}: {many}; the mean alone is shown"
    table = np.concatenate(parts)
    for node in set_:
        at: tuple[Any, ...] = (slice(None), *world.ground.unravel_index(node)[1])
        table[at] = 0.0
    if heads is not None and "head" in family.plates:
        table = np.take(table, sorted(heads), axis=1 + family.plates.index("head"))
    flat = table.reshape(len(table), -1, *table.shape[-2:])
    return PageAttention(spec, flat, tuple(choices.items()) if is_told else (), has_mean, note)


def _count_choice_states(model: GroundModel, query: NodeQuery, per_word: Collection[int]) -> dict[str, int]:
    """The open choices that decide what is read, in the order of the dims, with their states; `per_word` end in `_i`."""
    named = {}
    for choice in sorted(set().union(*query.choices.values())):
        family = model.ground.group_of(choice)
        named[f"{family.name}_i" if family.index in per_word else model.ground.name(choice)] = model.count_states(
            choice
        )
    return named


def _mean_attention(state: SentenceState, query: NodeQuery) -> AttentionArray:
    """The reading averaged over the posterior of the choices: `[*plates, word, word]`."""
    nodes = len(state.ground.select_nodes(query.spec.group))
    if nodes > MAX_REFERENCE_NODES and route_expected_attention(query).algorithm == "reference":
        raise BudgetError(
            query.spec.group.name, expected=f"at most {MAX_REFERENCE_NODES} nodes for a mean", actual=nodes
        )
    return to_numpy(expected_group_attention(state.query(), query))


# how the heads are in: a table that a user made, or the posterior that `inclusion` found


def describe_inclusion(network: Network, inclusion: object) -> dict[str, Any] | None:
    """A row for each slice (for each family of heads, of a posterior) and in it a share for each head, from 0 to 1."""
    if inclusion is None:
        return None
    return (
        _describe_posterior_inclusion(network, inclusion)
        if isinstance(inclusion, Inclusion)
        else _describe_inclusion_table(network, inclusion)
    )


def _describe_posterior_inclusion(network: Network, inclusion: Inclusion) -> dict[str, Any]:
    """The posterior mean of `rho`, with its interval and the log Bayes factor of each head."""
    families = {member.group.name: member.group for member in network.specs}
    heads = inclusion.mean.shape[1]
    for name in inclusion.slices:
        family = families.get(name)
        sizes = None if family is None else [network.graph.plate_sizes[plate] for plate in family.plates]
        if sizes != [heads]:
            got = "no such family" if sizes is None else f"{sizes[0]} of them" if sizes else "one without heads"
            expected = f"the inclusion of heads of this net, {heads} of {name}"
            raise BNetError("inclusion", expected=expected, actual=got, allowed="bt.inclusion(s.net, sentences)")
    parts = {"shares": inclusion.mean, "low": inclusion.low, "high": inclusion.high, "log_bayes": inclusion.log_bayes}
    s = "s" * (inclusion.sentences != 1)
    sigma = "" if inclusion.sigma is None else f", sigma {inclusion.sigma:.3g}"
    return {
        "title": "Share of sentences in which a head is in",
        "note": f"By {inclusion.sentences:,} sentence{s}: the mean of rho, its interval of {inclusion.interval:.0%} as a line. "
        f"{inclusion.likelihood}{sigma}.",
        "rows": list(inclusion.slices),
        **{name: to_numpy(values.double()).round(6).tolist() for name, values in parts.items()},
    }


def _describe_inclusion_table(network: Network, inclusion: object) -> dict[str, Any]:
    """The probability that each head is in, `[slice, head]`; one row stands for every slice."""
    try:
        table = np.atleast_2d(
            np.asarray(inclusion.tolist() if isinstance(inclusion, Tensor) else inclusion, dtype=np.float64)
        )
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        wanted = "probabilities, [slice, head], or what bt.inclusion found"
        raise BNetError("inclusion", expected=wanted, actual=inclusion) from error
    graph, slices = network.graph, network.graph.depth
    states = {m.tpm.states for m in network.specs if m.tpm.kind == "discrete" and graph.out_edges[m.group.index]}
    heads = {graph.plate_sizes["head"]} if "head" in graph.plate_sizes else states
    if table.ndim != 2 or table.shape[0] not in (1, slices) or table.shape[1] not in heads:
        wanted = f"probabilities of shape [{slices}, {' or '.join(map(str, sorted(h for h in heads if h)))}]"
        raise BNetError("inclusion", expected=wanted, actual=f"shape {list(table.shape)}")
    if not ((table >= 0) & (table <= 1)).all():
        raise BNetError("inclusion", expected="probabilities from 0 to 1", actual=inclusion)
    shares: list[list[float]] = np.broadcast_to(table, (slices, table.shape[1])).round(6).tolist()
    return {"title": "P(head is in)", "rows": [f"slice {k}" for k in range(slices)], "shares": shares}


# equations: LaTeX, and MathML as nested lists, so that the page parses no markup


def describe_equations(network: Network) -> tuple[list[dict[str, Any]], list[int]]:
    """Each equation with its name, LaTeX, MathML and note; and for each family which equation is its own."""
    told = equations(network)
    rows = [
        {
            "name": row.name,
            "latex": row.latex,
            "math": _render_sides(row.left, row.right + row.condition),
            "note": row.note,
        }
        for row in told.rows
    ]
    which = [-1] * len(network.specs)
    for k, group in enumerate(share_equations(network, Notation(network))):
        for member in group.specs:
            which[member.group.index] = k
    return rows, which


def _render_sides(left: str, right: str) -> list[Any] | None:
    """The two sides of an equation, each a formula of its own, so that they can stand below one another."""
    sides = to_mathml(left), to_mathml(f"= {right}")
    return None if None in sides else list(sides)


def to_mathml(latex: str) -> list[Any] | None:
    """A formula as MathML: `[tag, marks, text or parts]`; None where the converter does not know the LaTeX.

    >>> to_mathml("x^2")[2][0][2][0]
    ['msup', {}, [['mi', {}, 'x'], ['mn', {}, '2']]]
    """
    from latex2mathml.converter import convert

    try:
        root = ElementTree.fromstring(convert(latex, display="block"))
    except Exception:  # a stranger's TPM may write what no converter knows: the page shows its LaTeX
        return None
    return _element_to_lists(root)


def _element_to_lists(element: ElementTree.Element) -> list[Any]:
    tag = element.tag.rpartition("}")[2]
    marks = {name: value for name, value in element.attrib.items() if name in MATHML_ATTRIBUTES}
    children = _merge_upright_letters([_element_to_lists(child) for child in element])
    if tag == "munder" and len(children) == 2 and children[1][2] == UNDERBRACE:  # few fonts can stretch a brace
        return ["mrow", {"class": "brace"}, children[:1]]
    if children:
        return [tag if tag in MATHML_TAGS else "mrow", marks, children]
    return [tag if tag in MATHML_TAGS else "mtext", marks, element.text or ""]


def _merge_upright_letters(parts: list[list[Any]]) -> list[list[Any]]:
    """Upright letters side by side as one name."""
    found: list[list[Any]] = []
    for part in parts:
        upright = part[0] in ("mi", "mn", "mo") and part[1].get("mathvariant") == "normal" and isinstance(part[2], str)
        upright = upright or (part[0] == "mn" and bool(found) and found[-1][0] == "mi" and len(found[-1][2]) > 1)
        if upright and found and found[-1][0] == "mi" and found[-1][1].get("mathvariant") == "normal":
            found[-1] = ["mi", {"mathvariant": "normal"}, found[-1][2] + part[2]]
        else:
            found.append(part)
    return found

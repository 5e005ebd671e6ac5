"""A sentence as the page has it: a small description that JSON can hold, and one block of bytes: what is read, then
which nodes arrows join.

The arrows from one family to another are the pairs of plates times the pairs of words that they join, each a table of
bits; a table that many families share is there once. Where `do` took arrows away one table holds all pairs of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_names, check_sequence
from bnet_transformer._core.naming import WORD
from bnet_transformer.bridges.networkx import get_display_kind
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.figures.attention_grid import get_attention_specs, get_end_states
from bnet_transformer.figures.labels import escape_invisible, format_token, parse_role
from bnet_transformer.figures.options import THEMES
from bnet_transformer.figures.picture import DASH_PATTERNS
from bnet_transformer.figures.row_order import assign_rows, minimize_crossings
from bnet_transformer.figures.style import ARROW_OPACITY, ARROW_WIDTH, ROLE_DASHES, arrow_colour
from bnet_transformer.graph import EdgeTemplate, GroundGraph, NodeGroup
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.joint_posterior import joint_posterior
from bnet_transformer.inference.selection import find_state_group
from bnet_transformer.page.attention import (
    PageAttention,
    compute_page_attention,
    describe_equations,
    describe_inclusion,
    prepare_attention,
)
from bnet_transformer.reference import GroundModel
from bnet_transformer.reference.node_tables import check_discrete_node, compute_read_mask

QUANTIZATION_STEPS = 255  # a probability p is the byte round(255 p), so it is exact to 1/510
MAX_WORDS = 512  # of a stack
MAX_BYTES = 40_000_000  # of what is read: 512 words in 12 slices of 12 heads
MAX_STATES = 24  # of a discrete node whose posterior is told
MAX_CHOICES, MAX_NODES = 24, 200  # nodes whose posteriors are told unasked, of a net with words and of one without
PAGE_DETAILS = (None, "words", "nodes")


BitTables = dict[tuple[int, int, bytes], int]  # tables of booleans (rows, columns and bits) by their numbers


@dataclass(frozen=True)
class PageOptions:
    """What a user asks of the page: `slices` and `heads` say whose reads stand in it, the structure is there anyhow."""

    detail: str | None = None
    posterior: str | Sequence[str] | None = None
    title: str | None = None
    theme: str = "auto"
    slices: int | Collection[int] | None = None
    heads: int | Collection[int] | None = None
    inclusion: object = None

    def __post_init__(self) -> None:
        check_choice("detail", self.detail, PAGE_DETAILS)
        check_choice("theme", self.theme, THEMES)
        if self.title is not None and not isinstance(self.title, str):
            raise BNetError("title", expected="text", actual=self.title)


def parse_page_options(options: Mapping[str, Any]) -> PageOptions:
    """What is asked, from keywords; a name that none has is refused with the near ones."""
    check_names("option of a page", options, [each.name for each in fields(PageOptions)])
    return PageOptions(**options)


def describe_sentence(state: SentenceState, options: PageOptions) -> tuple[dict[str, Any], bytes]:
    """The description of a sentence, which JSON can hold, and the bytes of what is read."""
    world = state.model
    selection = state.selection(slices=options.slices, heads=options.heads)
    heads = selection.plates.get("head")
    _check_word_count(state)
    readers = get_attention_specs(world.network, selection.slices)
    _check_size(world, readers, None if heads is None else len(heads))
    prepare_attention(state, readers)
    found = [
        compute_page_attention(state, member, None if heads is None else [int(h) for h in heads]) for member in readers
    ]
    readings = [each for each in found if isinstance(each, PageAttention)]
    tables: BitTables = {}
    links = _describe_edges(world, tables)
    places = assign_rows(world.network.graph, range(len(world.network.specs)))
    equations, which = describe_equations(world.network)
    told, reads = _pack_attention(world, readings, tables)
    pairs, bits = list[list[int]](), bytearray()
    for rows, columns, held in tables:
        pairs.append([rows, columns, len(reads) + len(bits)])  # where it begins in the block
        bits += held
    notes = [each for each in found if isinstance(each, str)] + [each.note for each in readings if each.note]
    about = {
        "title": escape_invisible(options.title or _format_title(state)),
        "net": world.network.declaration.name,
        "theme": options.theme,
        "detail": options.detail,
        "steps": QUANTIZATION_STEPS,
        "look": {
            "width": ARROW_WIDTH,
            "opacity": ARROW_OPACITY,
            "dashes": {role: DASH_PATTERNS[dash] for role, dash in ROLE_DASHES.items()},
        },
        "counts": [len(world.ground), world.ground.count_arrows()],
        "sizes": dict(world.network.graph.plate_sizes),
        "families": [
            _describe_group(world, member, *places[k], which[k]) for k, member in enumerate(world.network.specs)
        ],
        "order": _order_groups(world.network, places),
        "equations": equations,
        "links": links,
        "pairs": pairs,
        "cut": sorted(world.ground.cut_nodes),
        "stacks": [_describe_stack(state, name) for name in world.network.graph.slices],
        "done": {world.ground.name(node): _format_value(value) for node, value in world.do.items()}
        | {world.ground.name(node): "a row of attention" for node in world.attention_rows},
        "seen": {world.ground.name(node): _format_value(value, state, node) for node, value in state.evidence.items()},
        "heads": None if heads is None else [int(head) for head in heads],
        "readings": told,
        "posteriors": _describe_posteriors(state, options, readings),
        "inclusion": describe_inclusion(world.network, options.inclusion),
        "moved": _relative_changes(state),
        "notes": list(dict.fromkeys(notes)),
    }
    return about, reads + bits


def _format_title(state: SentenceState) -> str:
    return " | ".join(" ".join(words) for words in state.tokens.values())[:300] or state.network.declaration.name


def _check_word_count(state: SentenceState) -> None:
    for stack, words in state.tokens.items():
        if len(words) > MAX_WORDS:
            got = f"{len(words)} words" + (f" in the stack {stack}" if stack else "")
            allowed = "a shorter sentence, or draw('x.svg', words=...), which draws some words of a long one"
            raise BudgetError("page", expected=f"a sentence of at most {MAX_WORDS} words", actual=got, allowed=allowed)


def _check_size(model: GroundModel, specs: Sequence[NodeSpec], num_heads: int | None) -> None:
    """Refuse more reads than a page can hold, and say which slices and heads fit."""
    sizes = [_count_attention_entries(model, member, num_heads) for member in specs]
    if sum(sizes) <= MAX_BYTES:
        return
    slices = len({member.group.step for member in specs})
    many = model.network.graph.plate_sizes.get("head", 1) if num_heads is None else num_heads
    per_slice, per_head = sum(sizes) / slices, sum(sizes) / many
    fits = [f"slices=range({int(MAX_BYTES // per_slice)})"] if per_slice <= MAX_BYTES else []
    fits += [f"heads=range({int(MAX_BYTES // per_head)})"] if per_head <= MAX_BYTES and many > 1 else []
    if not fits and per_slice <= MAX_BYTES * many:
        fits = [f"slices=0, heads=range({int(MAX_BYTES * many // per_slice)})"]
    expected, got = f"at most {MAX_BYTES:,} reads P(j | i)", f"{sum(sizes):,}"
    raise BudgetError("page", expected=expected, actual=got, allowed=", or ".join(fits) or "a shorter sentence")


def _count_attention_entries(model: GroundModel, spec: NodeSpec, num_heads: int | None) -> int:
    pairs = int(compute_read_mask(model, spec).sum())
    plates = [
        model.network.graph.plate_sizes[p] if p != "head" or num_heads is None else num_heads for p in spec.group.plates
    ]
    return pairs * int(np.prod(plates, dtype=np.int64))


# structure


def _order_groups(network: Network, rows: Mapping[int, tuple[int, int]]) -> list[int]:
    """The families in the order in which those of a row stand: without words, one in which arrows cross little."""
    names = [family.name for family in network.graph.groups]
    if network.graph.word_stacks:
        return list(range(len(names)))
    arrows = [(names[bundle.parent], names[bundle.child]) for bundle in network.graph.edges]
    place = minimize_crossings({names[index]: row for index, (row, _) in rows.items()}, arrows)
    return sorted(range(len(names)), key=lambda index: place[names[index]])


def _table_index(tables: BitTables, table: NDArray[np.bool_]) -> int:
    """The number of a table `[row, column]`; each is there once."""
    key = (*table.shape, np.packbits(table.reshape(-1)).tobytes())
    return tables.setdefault(key, len(tables))


def _describe_edges(model: GroundModel, tables: BitTables) -> list[list[Any]]:
    """Every arrow: parents' and children's family, the tables of plates and of words, and the colour."""
    graph, ground, found = model.network.graph, model.ground, []
    for bundle in graph.edges:
        parent, child = graph.groups[bundle.parent], graph.groups[bundle.child]
        plates, words = _match_plates(ground, bundle), ground.word_adjacency(bundle)
        changed = [*ground.get_cut_nodes(child.index), *ground.get_partly_cut_nodes(child.index)]
        if changed:
            plates, words = np.kron(plates, words), np.ones((1, 1), dtype=bool)
            for node in changed:
                start = int(ground.offsets[parent.index])
                inside = [p - start for p in ground.parents(node) if start <= p < start + plates.shape[1]]
                plates[node - int(ground.offsets[child.index])] = np.isin(np.arange(plates.shape[1]), inside)
        colour = arrow_colour(parent.role, child.role)
        found.append([parent.index, child.index, _table_index(tables, plates), _table_index(tables, words), colour])
    return found


def _match_plates(ground: GroundGraph, edge: EdgeTemplate) -> NDArray[np.bool_]:
    """Which indices of a child's plates, flat, go with which of its parent's: those that agree along shared plates."""
    child, parent = (ground.template.groups[k].plates for k in (edge.child, edge.parent))
    sizes = [[ground.template.plate_sizes[plate] for plate in plates] for plates in (child, parent)]
    here, there = (np.indices(size).reshape(len(size), math.prod(size)) for size in sizes)
    agree = np.ones((here.shape[1], there.shape[1]), dtype=bool)
    for k, plate in enumerate(child):
        if plate in parent:
            agree &= here[k][:, None] == there[parent.index(plate)]
    return agree


def _describe_group(model: GroundModel, spec: NodeSpec, row: int, depth: int, equation: int) -> dict[str, Any]:
    own, network = spec.group, model.network
    into = network.graph.in_edges[own.index]
    letter, below = parse_role(own.role)
    return {
        "name": own.name,
        "role": own.role,
        "stack": own.stack,
        "slice": own.slice,
        "step": own.step,
        "plates": list(own.plates),
        "places": list(model.ground.shapes[own.index]),
        "words": own.word_stack,
        "row": row,
        "depth": depth,
        "state": _is_state(network, own),
        "reads": len(into) > 1 and any(reach.kind != "same" for bundle in into for reach in bundle.reaches),
        "kind": get_display_kind(spec),
        "tpm": type(spec.tpm).__name__,
        "learnable": spec.learnable,
        "shape": list(spec.shape),
        "letter": [letter.text, letter.style, below],
        "selector": _is_selector(network, own),
        "equation": equation,
    }


def _is_state(network: Network, group: NodeGroup) -> bool:
    """True for a state of words, and for a role that passes from slice to slice of a stack without words."""
    if group.stack is None or group.stack in network.graph.word_stacks:
        return network.is_word_state(group)
    return network.is_state(group)


def _describe_stack(state: SentenceState, name: str) -> dict[str, Any]:
    words = state.tokens.get(name, ())
    return {
        "name": name,
        "slices": state.network.graph.slices.get(name, 0),
        "words": [format_token(word) for word in words],
        "whole": {
            str(k): format_token(word, None)
            for k, word in enumerate(words)
            if format_token(word, None) != format_token(word)
        },
    }


# what is read


def _pack_attention(
    model: GroundModel, attentions: Sequence[PageAttention], tables: BitTables
) -> tuple[list[dict[str, Any]], bytes]:
    """Each reading with where its bytes begin, and the bytes of all: of each slot and plate the pairs that can be."""
    told: list[dict[str, Any]] = []
    parts: list[bytes] = []
    at = 0
    for reading in attentions:
        member, family = reading.spec, reading.spec.group
        pairs = compute_read_mask(model, member)
        block = quantize(reading.attention[..., pairs]).tobytes()
        into, out = _find_end_groups(model.network, member)
        told.append(
            {
                "family": family.index,
                "from": [given.index for given in member.parents if WORD in given.over][
                    -1
                ],  # not the keys but the values
                "over": sorted({given.index for given in member.word_parents}),
                "into": into,
                "out": out,
                "choices": [list(choice) for choice in reading.choices],
                "mean": reading.has_mean,
                "slots": reading.attention.shape[0],
                "plates": reading.attention.shape[1],
                "pairs": _table_index(tables, pairs),
                "at": at,
            }
        )
        parts.append(block)
        at += len(block)
    return told, b"".join(parts)


def quantize(probabilities: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """Probabilities as bytes.

    >>> quantize(np.array([0.0, 0.5, 1.0])).tolist()
    [0, 128, 255]
    """
    return np.asarray(np.rint(np.clip(probabilities, 0.0, 1.0) * QUANTIZATION_STEPS), dtype=np.uint8)


def _find_end_groups(network: Network, spec: NodeSpec) -> tuple[int | None, int | None]:
    """The state families between which a member reads: of the words that read, and of those that are read."""
    out, into = get_end_states(network, spec)
    found: list[int | None] = []
    for stack, slice_ in (into, out):
        state = find_state_group(network, stack)
        named = None if state is None else network.graph.by_stem[state.stem]
        found.append(next((f.index for f in named or () if f.slice == slice_), None))
    return found[0], found[1]


# numbers


def _describe_posteriors(
    state: SentenceState, options: PageOptions, attentions: Sequence[PageAttention]
) -> list[dict[str, Any]]:
    """Prior and posterior of the nodes that a user names, and of the choices that decide what is read; of a net without
    words, of every discrete node."""
    told = () if options.posterior is None else options.posterior
    wanted = [told] if isinstance(told, str) else check_sequence("posterior", told, str)
    ids = [state.ground.id(name) for name in wanted]
    for node in ids:
        check_discrete_node(state.model, node)
    found = [_describe_posterior(state, node) for node in dict.fromkeys(ids)]
    network, ground = state.network, state.ground
    wordless = not network.graph.word_stacks
    families = [m.group for m in network.specs if m.tpm.kind == "discrete"]
    families = [family for family in families if wordless or _is_selector(network, family)]
    others = [node for f in families for node in ground.select_nodes(f).tolist()]
    for node in others[: MAX_NODES if wordless else MAX_CHOICES]:
        if node not in ids and node not in state.model.do and node not in state.evidence:
            with suppress(BudgetError):
                found.append(_describe_posterior(state, node))
    return found


def _is_selector(network: Network, group: NodeGroup) -> bool:
    return network.specs[group.index].tpm.kind == "discrete" and bool(network.graph.out_edges[group.index])


def _describe_posterior(state: SentenceState, node: int) -> dict[str, Any]:
    world = state.model
    after = joint_posterior(state.query([node]))
    before = joint_posterior(replace(state.query([node]), evidence={})) if state.evidence else after
    labels = state.labels(node) or tuple(map(str, range(len(after))))
    kept = torch.argsort(after, descending=True, stable=True)[:MAX_STATES].sort().values.tolist()
    states = [[format_token(labels[k]), round(float(before[k]), 6), round(float(after[k]), 6), k] for k in kept]
    return {
        "node": world.ground.name(node),
        "states": states,
        "more": len(after) - len(kept),
        "seen": bool(state.evidence),
    }


def _format_value(value: Tensor, state: SentenceState | None = None, node: int = -1) -> str:
    """A value in few words: a state by its label, a vector by its size."""
    if value.dim() or value.is_floating_point():
        nothing = bool((value == 0).all())
        return "zero" if nothing and value.dim() else f"{float(value):.4g}" if not value.dim() else "a value"
    labels = None if state is None else state.labels(node)
    return format_token(labels[int(value)]) if labels else str(int(value))


def _relative_changes(state: SentenceState) -> dict[str, list[float]] | None:
    """How far the states are from what they were before `do`: the norm of the change over that of the state, by family.

    Only where no choice is open, for then a state is one vector.
    """
    if not state.interventions:
        return None
    clean = state.without_interventions()
    found: dict[str, list[float]] = {}
    network = state.network
    for family in network.graph.groups:
        if not network.is_word_state(family):
            continue
        own: list[float] = []
        for node in state.ground.select_nodes(family).tolist():
            after, before = _state_vector(state, node), _state_vector(clean, node)
            if after is None or before is None or after.shape != before.shape or after.dim() != 1:
                return None
            size = float(before.norm())
            own.append(round(float((after - before).norm()) / size, 6) if size else 0.0)
        found[str(family.index)] = own
    return found or None


def _state_vector(state: SentenceState, node: int) -> Tensor | None:
    """The value of a state, set or computed."""
    with suppress(BNetError):
        return (state.model.do[node] if node in state.model.do else state.evaluator.value(node)).double()
    return None

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
from bnet_transformer.figures.labels import letter_of, shown, visible
from bnet_transformer.figures.nodes import places_in_rows, rows_and_depths
from bnet_transformer.figures.options import THEMES
from bnet_transformer.figures.picture import DASHES
from bnet_transformer.figures.style import DASH, OPACITY, WIDTH, hue
from bnet_transformer.figures.words import ends_of, readers_of
from bnet_transformer.graph import EdgeTemplate, GroundGraph, NodeGroup
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.joint_posterior import joint_posterior
from bnet_transformer.page.reading import Reading, formulas, included, prepare, reading_of
from bnet_transformer.reference import GroundModel, asking

STEPS = 255  # a probability p is the byte round(255 p), so it is exact to 1/510
MOST_WORDS = 512  # of a stack
MOST_BYTES = 40_000_000  # of what is read: 512 words in 12 slices of 12 heads
MOST_STATES = 24  # of a discrete node whose posterior is told
MOST_CHOICES, MOST_NODES = 24, 200  # nodes whose posteriors are told unasked, of a net with words and of one without
DETAILS = (None, "words", "nodes")


Tables = dict[tuple[int, int, bytes], int]  # tables of booleans (rows, columns and bits) by their numbers


@dataclass(frozen=True)
class Asked:
    """What a user asks of the page: `slices` and `heads` say whose reads stand in it, the structure is there anyhow."""

    detail: str | None = None
    posterior: str | Sequence[str] | None = None
    title: str | None = None
    theme: str = "auto"
    slices: int | Collection[int] | None = None
    heads: int | Collection[int] | None = None
    inclusion: object = None

    def __post_init__(self) -> None:
        check_choice("detail", self.detail, DETAILS)
        check_choice("theme", self.theme, THEMES)
        if self.title is not None and not isinstance(self.title, str):
            raise BNetError("title", expected="text", actual=self.title)


def asked_of(told: Mapping[str, Any]) -> Asked:
    """What is asked, from keywords; a name that none has is refused with the near ones."""
    check_names("option of a page", told, [each.name for each in fields(Asked)])
    return Asked(**told)


def described(state: SentenceState, asked: Asked) -> tuple[dict[str, Any], bytes]:
    """The description of a sentence, which JSON can hold, and the bytes of what is read."""
    world = state.model
    selection = state.selection(slices=asked.slices, heads=asked.heads)
    heads = selection.plates.get("head")
    _check_words(state)
    readers = readers_of(world.network, selection.slices)
    _check_bytes(world, readers, None if heads is None else len(heads))
    prepare(state, readers)
    found = [reading_of(state, member, None if heads is None else [int(h) for h in heads]) for member in readers]
    readings = [each for each in found if isinstance(each, Reading)]
    tables: Tables = {}
    links = _links(world, tables)
    places = rows_and_depths(world.network.graph, range(len(world.network.specs)))
    equations, which = formulas(world.network)
    told, reads = _packed(world, readings, tables)
    pairs, bits = list[list[int]](), bytearray()
    for rows, columns, held in tables:
        pairs.append([rows, columns, len(reads) + len(bits)])  # where it begins in the block
        bits += held
    notes = [each for each in found if isinstance(each, str)] + [each.note for each in readings if each.note]
    about = {
        "title": visible(asked.title or _title(state)),
        "net": world.network.declaration.name,
        "theme": asked.theme,
        "detail": asked.detail,
        "steps": STEPS,
        "look": {"width": WIDTH, "opacity": OPACITY, "dashes": {role: DASHES[dash] for role, dash in DASH.items()}},
        "counts": [len(world.ground), world.ground.count_arrows()],
        "sizes": dict(world.network.graph.plate_sizes),
        "families": [_family(world, member, *places[k], which[k]) for k, member in enumerate(world.network.specs)],
        "order": _order(world.network, places),
        "equations": equations,
        "links": links,
        "pairs": pairs,
        "cut": sorted(world.ground.cut_nodes),
        "stacks": [_stack(state, name) for name in world.network.graph.slices],
        "done": {world.ground.name(node): _said_value(value) for node, value in world.do.items()}
        | {world.ground.name(node): "a row of attention" for node in world.attention_rows},
        "seen": {world.ground.name(node): _said_value(value, state, node) for node, value in state.evidence.items()},
        "heads": None if heads is None else [int(head) for head in heads],
        "readings": told,
        "posteriors": _posteriors(state, asked, readings),
        "inclusion": included(world.network, asked.inclusion),
        "moved": _moved(state),
        "notes": list(dict.fromkeys(notes)),
    }
    return about, reads + bits


def _title(state: SentenceState) -> str:
    return " | ".join(" ".join(words) for words in state.tokens.values())[:300] or state.network.declaration.name


def _check_words(state: SentenceState) -> None:
    for stack, words in state.tokens.items():
        if len(words) > MOST_WORDS:
            got = f"{len(words)} words" + (f" in the stack {stack}" if stack else "")
            allowed = "a shorter sentence, or draw('x.svg', words=...), which draws some words of a long one"
            raise BudgetError("page", expected=f"a sentence of at most {MOST_WORDS} words", actual=got, allowed=allowed)


def _check_bytes(world: GroundModel, readers: Sequence[NodeSpec], heads: int | None) -> None:
    """Refuse more reads than a page can hold, and say which slices and heads fit."""
    sizes = [_reads(world, member, heads) for member in readers]
    if sum(sizes) <= MOST_BYTES:
        return
    slices = len({member.group.step for member in readers})
    many = world.network.graph.plate_sizes.get("head", 1) if heads is None else heads
    per_slice, per_head = sum(sizes) / slices, sum(sizes) / many
    fits = [f"slices=range({int(MOST_BYTES // per_slice)})"] if per_slice <= MOST_BYTES else []
    fits += [f"heads=range({int(MOST_BYTES // per_head)})"] if per_head <= MOST_BYTES and many > 1 else []
    if not fits and per_slice <= MOST_BYTES * many:
        fits = [f"slices=0, heads=range({int(MOST_BYTES * many // per_slice)})"]
    expected, got = f"at most {MOST_BYTES:,} reads P(j | i)", f"{sum(sizes):,}"
    raise BudgetError("page", expected=expected, actual=got, allowed=", or ".join(fits) or "a shorter sentence")


def _reads(world: GroundModel, member: NodeSpec, heads: int | None) -> int:
    pairs = int(asking.compute_read_mask(world, member).sum())
    plates = [
        world.network.graph.plate_sizes[p] if p != "head" or heads is None else heads for p in member.group.plates
    ]
    return pairs * int(np.prod(plates, dtype=np.int64))


# structure


def _order(network: Network, places: Mapping[int, tuple[int, int]]) -> list[int]:
    """The families in the order in which those of a row stand: without words, one in which arrows cross little."""
    names = [family.name for family in network.graph.groups]
    if network.graph.word_stacks:
        return list(range(len(names)))
    arrows = [(names[bundle.parent], names[bundle.child]) for bundle in network.graph.edges]
    place = places_in_rows({names[index]: row for index, (row, _) in places.items()}, arrows)
    return sorted(range(len(names)), key=lambda index: place[names[index]])


def _number(tables: Tables, table: NDArray[np.bool_]) -> int:
    """The number of a table `[row, column]`; each is there once."""
    key = (*table.shape, np.packbits(table.reshape(-1)).tobytes())
    return tables.setdefault(key, len(tables))


def _links(world: GroundModel, tables: Tables) -> list[list[Any]]:
    """Every arrow: parents' and children's family, the tables of plates and of words, and the colour."""
    graph, ground, found = world.network.graph, world.ground, []
    for bundle in graph.edges:
        parent, child = graph.groups[bundle.parent], graph.groups[bundle.child]
        plates, words = _plate_pairs(ground, bundle), ground.word_adjacency(bundle)
        changed = [*ground.get_cut_nodes(child.index), *ground.get_partly_cut_nodes(child.index)]
        if changed:
            plates, words = np.kron(plates, words), np.ones((1, 1), dtype=bool)
            for node in changed:
                start = int(ground.offsets[parent.index])
                inside = [p - start for p in ground.parents(node) if start <= p < start + plates.shape[1]]
                plates[node - int(ground.offsets[child.index])] = np.isin(np.arange(plates.shape[1]), inside)
        colour = hue(parent.role, child.role)
        found.append([parent.index, child.index, _number(tables, plates), _number(tables, words), colour])
    return found


def _plate_pairs(ground: GroundGraph, bundle: EdgeTemplate) -> NDArray[np.bool_]:
    """Which indices of a child's plates, flat, go with which of its parent's: those that agree along shared plates."""
    child, parent = (ground.template.groups[k].plates for k in (bundle.child, bundle.parent))
    sizes = [[ground.template.plate_sizes[plate] for plate in plates] for plates in (child, parent)]
    here, there = (np.indices(size).reshape(len(size), math.prod(size)) for size in sizes)
    agree = np.ones((here.shape[1], there.shape[1]), dtype=bool)
    for k, plate in enumerate(child):
        if plate in parent:
            agree &= here[k][:, None] == there[parent.index(plate)]
    return agree


def _family(world: GroundModel, member: NodeSpec, row: int, depth: int, equation: int) -> dict[str, Any]:
    own, network = member.group, world.network
    into = network.graph.in_edges[own.index]
    letter, below = letter_of(own.role)
    return {
        "name": own.name,
        "role": own.role,
        "stack": own.stack,
        "slice": own.slice,
        "step": own.step,
        "plates": list(own.plates),
        "places": list(world.ground.shapes[own.index]),
        "words": own.word_stack,
        "row": row,
        "depth": depth,
        "state": _is_state(network, own),
        "reads": len(into) > 1 and any(reach.kind != "same" for bundle in into for reach in bundle.reaches),
        "kind": get_display_kind(member),
        "tpm": type(member.tpm).__name__,
        "learnable": member.learnable,
        "shape": list(member.shape),
        "letter": [letter.text, letter.style, below],
        "selector": _is_selector(network, own),
        "equation": equation,
    }


def _is_state(network: Network, family: NodeGroup) -> bool:
    """True for a state of words, and for a role that passes from slice to slice of a stack without words."""
    if family.stack is None or family.stack in network.graph.word_stacks:
        return network.is_word_state(family)
    return network.is_state(family)


def _stack(state: SentenceState, name: str) -> dict[str, Any]:
    words = state.tokens.get(name, ())
    return {
        "name": name,
        "slices": state.network.graph.slices.get(name, 0),
        "words": [shown(word) for word in words],
        "whole": {str(k): shown(word, None) for k, word in enumerate(words) if shown(word, None) != shown(word)},
    }


# what is read


def _packed(world: GroundModel, readings: Sequence[Reading], tables: Tables) -> tuple[list[dict[str, Any]], bytes]:
    """Each reading with where its bytes begin, and the bytes of all: of each slot and plate the pairs that can be."""
    told: list[dict[str, Any]] = []
    parts: list[bytes] = []
    at = 0
    for reading in readings:
        member, family = reading.member, reading.member.group
        pairs = asking.compute_read_mask(world, member)
        block = quantised(reading.table[..., pairs]).tobytes()
        into, out = _states_between(world.network, member)
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
                "mean": reading.mean,
                "slots": reading.table.shape[0],
                "plates": reading.table.shape[1],
                "pairs": _number(tables, pairs),
                "at": at,
            }
        )
        parts.append(block)
        at += len(block)
    return told, b"".join(parts)


def quantised(shares: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """Probabilities as bytes.

    >>> quantised(np.array([0.0, 0.5, 1.0])).tolist()
    [0, 128, 255]
    """
    return np.asarray(np.rint(np.clip(shares, 0.0, 1.0) * STEPS), dtype=np.uint8)


def _states_between(network: Network, member: NodeSpec) -> tuple[int | None, int | None]:
    """The state families between which a member reads: of the words that read, and of those that are read."""
    out, into = ends_of(network, member)
    found: list[int | None] = []
    for stack, slice_ in (into, out):
        state = asking.find_state_group(network, stack)
        named = None if state is None else network.graph.by_stem[state.stem]
        found.append(next((f.index for f in named or () if f.slice == slice_), None))
    return found[0], found[1]


# numbers


def _posteriors(state: SentenceState, asked: Asked, readings: Sequence[Reading]) -> list[dict[str, Any]]:
    """Prior and posterior of the nodes that a user names, and of the choices that decide what is read; of a net without
    words, of every discrete node."""
    told = () if asked.posterior is None else asked.posterior
    wanted = [told] if isinstance(told, str) else check_sequence("posterior", told, str)
    ids = [state.ground.id(name) for name in wanted]
    for node in ids:
        asking.check_discrete_node(state.model, node)
    found = [_posterior(state, node) for node in dict.fromkeys(ids)]
    network, ground = state.network, state.ground
    wordless = not network.graph.word_stacks
    families = [m.group for m in network.specs if m.tpm.kind == "discrete"]
    families = [family for family in families if wordless or _is_selector(network, family)]
    others = [node for f in families for node in ground.select_nodes(f).tolist()]
    for node in others[: MOST_NODES if wordless else MOST_CHOICES]:
        if node not in ids and node not in state.model.do and node not in state.evidence:
            with suppress(BudgetError):
                found.append(_posterior(state, node))
    return found


def _is_selector(network: Network, family: NodeGroup) -> bool:
    return network.specs[family.index].tpm.kind == "discrete" and bool(network.graph.out_edges[family.index])


def _posterior(state: SentenceState, node: int) -> dict[str, Any]:
    world = state.model
    after = joint_posterior(state.query([node]))
    before = joint_posterior(replace(state.query([node]), evidence={})) if state.evidence else after
    labels = state.labels(node) or tuple(map(str, range(len(after))))
    kept = torch.argsort(after, descending=True, stable=True)[:MOST_STATES].sort().values.tolist()
    states = [[shown(labels[k]), round(float(before[k]), 6), round(float(after[k]), 6), k] for k in kept]
    return {
        "node": world.ground.name(node),
        "states": states,
        "more": len(after) - len(kept),
        "seen": bool(state.evidence),
    }


def _said_value(value: Tensor, state: SentenceState | None = None, node: int = -1) -> str:
    """A value in few words: a state by its label, a vector by its size."""
    if value.dim() or value.is_floating_point():
        nothing = bool((value == 0).all())
        return "zero" if nothing and value.dim() else f"{float(value):.4g}" if not value.dim() else "a value"
    labels = None if state is None else state.labels(node)
    return shown(labels[int(value)]) if labels else str(int(value))


def _moved(state: SentenceState) -> dict[str, list[float]] | None:
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
            after, before = _vector(state, node), _vector(clean, node)
            if after is None or before is None or after.shape != before.shape or after.dim() != 1:
                return None
            size = float(before.norm())
            own.append(round(float((after - before).norm()) / size, 6) if size else 0.0)
        found[str(family.index)] = own
    return found or None


def _vector(state: SentenceState, node: int) -> Tensor | None:
    """The value of a state, set or computed."""
    with suppress(BNetError):
        return (state.model.do[node] if node in state.model.do else state.evaluator.value(node)).double()
    return None

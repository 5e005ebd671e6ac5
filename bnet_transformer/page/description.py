"""The data of the page: a description for JSON, and a buffer with the attention as bytes and then adjacency as bits.

The arrows between two groups are a Kronecker product of two boolean matrices, one of plates and one of words; equal
matrices are stored once. If `do` removed arrows of single nodes, one matrix has all pairs of nodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_names, check_sequence
from bnet_transformer._core.naming import WORD, join_name
from bnet_transformer._core.tensors import rank_by_size, to_numpy
from bnet_transformer._core.tokens import distinguish
from bnet_transformer.attention.inclusion import Inclusion
from bnet_transformer.bridges.networkx import get_display_kind
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, BudgetError, format_count, format_value
from bnet_transformer.figures.attention_grid import (
    StateAttention,
    describe_special_words,
    exclude_words,
    get_attention_specs,
    get_end_states,
)
from bnet_transformer.figures.fonts import escape_invisible, format_token, parse_role
from bnet_transformer.figures.graph_layout import assign_rows, minimize_crossings
from bnet_transformer.figures.options import THEMES
from bnet_transformer.figures.picture import ARROW_OPACITY, ARROW_WIDTH, DASH_PATTERNS, ROLE_DASHES, arrow_colour
from bnet_transformer.graph import GroundGraph, NodeGroup
from bnet_transformer.inference import SentenceState
from bnet_transformer.inference.posteriors import plan_expected_attention, plan_posterior
from bnet_transformer.inference.query import find_state_group
from bnet_transformer.inference.values import NodeQuery
from bnet_transformer.page.html import describe_equations
from bnet_transformer.reference import (
    GroundModel,
    check_discrete_node,
    compute_read_mask,
    has_ancestor_choices,
    split_choices,
)
from bnet_transformer.residual_stream import Contributions
from bnet_transformer.residual_stream.contributions import fix_choices
from bnet_transformer.residual_stream.linear_paths import Writer
from bnet_transformer.residual_stream.results import ContributionTable, compute_readout

# --------------------------------------------------------------------------------------------------------------------
# The contributions that the page shows in the panel of a readout.


MAX_PARTS = 100  # the number of the largest parts that the page contains; it shows the sum of the others
EXPECTED = "the result of contributions(...) for a node of this sentence, or a list of such results"


def parse_contributions(contributions: object) -> tuple[Contributions, ...]:
    """Return the results of an option of the page."""
    if contributions is None:
        return ()
    items = contributions if isinstance(contributions, list | tuple) else [contributions]
    for k, item in enumerate(items):
        if not isinstance(item, Contributions):
            text = f"{type(item).__name__} {format_value(item, 40)}" if not isinstance(item, ContributionTable) else ""
            actual = (text or type(item).__name__) + (f", item {k} of the list" if items is contributions else "")
            hint = "For paths of two and attention scores use bt.plot(result)"
            raise BNetError("contributions", expected=EXPECTED, actual=actual, hint=hint)
    return tuple(items)


def _describe_result(state: SentenceState, result: Contributions) -> dict[str, Any]:
    """The parts of one readout for JSON, largest first, each with the node of its writer."""
    _check_sentence(state, result)
    _check_value(state, result)
    parts = result.parts.double()
    order = rank_by_size(parts, len(parts))
    shown, omitted = order[:MAX_PARTS], order[MAX_PARTS:]
    effects = None if result.effects is None else result.effects.double().tolist()
    return {
        "node": result.node,
        "of": format_token(result.of, None) + result.describe_choices(),
        "value": float(result.value),
        "norms": list(result.norms),
        "has_effects": effects is not None,
        "parts": [
            {
                "writer": result.writers[k].name,
                "kind": result.writers[k].kind,
                "node": _name_node(state, result, result.writers[k]),
                "part": float(parts[k]),
                "effect": None if effects is None or math.isnan(effects[k]) else effects[k],
            }
            for k in shown
        ],
        "num_omitted": len(omitted),
        "omitted": float(parts[omitted].sum()),
    }


def _check_sentence(state: SentenceState, result: Contributions) -> None:
    """Raise an error if the words of a result, its node or its writers are not those of the sentence."""
    names = {spec.group.name: spec.group for spec in state.network.specs}
    sizes = state.network.graph.plate_sizes
    words = tuple(itertools.chain.from_iterable(state.tokens.values()))
    if result.words[:-1] != words:
        actual = f"a result for the words {' '.join(result.words[:-1])!r}"
        raise BNetError("contributions", expected=EXPECTED, actual=actual)
    state.ground.id(result.node)
    for writer in result.writers:
        plates = () if writer.group not in names else names[writer.group].plates
        is_inside = len(plates) == len(writer.plates) and all(
            k < sizes[plate] for k, plate in zip(writer.plates, plates, strict=True)
        )
        if writer.group not in names or not is_inside:
            raise BNetError("contributions", expected=EXPECTED, actual=f"a result with the writer {writer.name}")


def _check_value(state: SentenceState, result: Contributions) -> None:
    """Raise an error if the readout has another value in this sentence, as after another `do`."""
    if result.readout is None:  # an older file
        hint = "Call contributions(...) of this sentence"
        raise BNetError("contributions", expected=EXPECTED, actual="a result without its readout", hint=hint)
    state, choices, _ = fix_choices(state, state.ground.id(result.node))
    value = compute_readout(state, result.node, result.readout)
    rounding = torch.finfo(result.value.dtype).eps ** 0.5
    if (
        choices != result.choices
        or value is None
        or value.shape != result.value.shape
        or not bool(
            torch.isclose(value.to(result.value), result.value, rtol=rounding, atol=rounding, equal_nan=True).all()
        )
    ):
        actual = f"a result for other interventions, observations or parameters: {result.of} differs at {result.node}"
        hint = "Call contributions(...) of this sentence"
        raise BNetError("contributions", expected=EXPECTED, actual=actual, hint=hint)


def _name_node(state: SentenceState, result: Contributions, writer: Writer) -> str:
    """The node of a writer: at the word of the readout if it writes there, else at the last of its words."""
    if not writer.words:
        return join_name(writer.group, writer.plates)
    _, index = state.ground.unravel_index(state.ground.id(result.node))
    word = index[-1] if index and index[-1] in writer.words else writer.words[-1]
    return join_name(writer.group, (*writer.plates, word))


QUANTIZATION_STEPS = 255  # a probability p is the byte round(255 p), so it is exact to 1/510
MAX_WORDS = 512  # of a stack
MAX_BYTES = 40_000_000  # of attention: 512 words in 12 slices of 12 heads
MAX_STATES = 24  # the number of states of a discrete node that are shown
MAX_CHOICES, MAX_NODES = 24, 200  # of posteriors that are shown by default: in a net with words, and without words
PAGE_DETAILS = (None, "words", "nodes")


BitTables = dict[tuple[int, int, bytes], int]  # the numbers of boolean matrices: rows, columns, packed bits


@dataclass(frozen=True)
class PageOptions:
    """The options of the page. `slices` and `heads` limit the attention that it contains; the graph is complete.

    Args:
        detail: What is unfolded initially: `"words"` nothing, `"nodes"` every slice; None for every slice of a small
            sentence.
        posterior: Discrete nodes whose posteriors are shown, in addition to selectors.
        title: The title of the page; None for the words of the sentence.
        theme: The colours: `"auto"`, `"light"` or `"dark"`.
        slices: The slices whose attention the page contains; None for all slices.
        heads: The heads whose attention the page contains; None for all heads.
        inclusion: A result of `bt.inclusion`, or probabilities `[slice, head]` that heads are included.
        contributions: A result of `Sentence.contributions` for this sentence, or a list of such results.
        special: Whether special tokens, such as `[CLS]`, are shown initially.
    """

    detail: str | None = None
    posterior: str | Sequence[str] | None = None
    title: str | None = None
    theme: str = "auto"
    slices: int | Collection[int] | None = None
    heads: int | Collection[int] | None = None
    inclusion: object = None
    contributions: object = None
    special: bool = True

    def __post_init__(self) -> None:
        parse_contributions(self.contributions)
        check_choice("detail", self.detail, PAGE_DETAILS)
        check_choice("theme", self.theme, THEMES)
        check_choice("special", self.special, (True, False))
        if self.title is not None and not isinstance(self.title, str):
            raise BNetError("title", expected="a string", actual=self.title)


def parse_page_options(options: Mapping[str, Any]) -> PageOptions:
    """Return the options from keyword arguments; the error for an unknown name suggests similar names."""
    check_names("option of a page", options, [field.name for field in fields(PageOptions)])
    return PageOptions(**options)


def describe_sentence(
    state: SentenceState, options: PageOptions, clean: SentenceState | None = None
) -> tuple[dict[str, Any], bytes]:
    """Return the description of a sentence for JSON, and the buffer to which its offsets refer.

    `clean` is the sentence without its interventions, if its values are known.
    """
    model, network, ground = state.model, state.network, state.ground
    selection = state.selection(slices=options.slices, heads=options.heads)
    heads = selection.plates.get("head")
    head_list = None if heads is None else [int(head) for head in heads]
    specs = get_attention_specs(network, selection.slices)
    _check_size(state, specs, None if heads is None else len(heads))
    prepare_attention(state, specs)
    results = [compute_page_attention(state, spec, head_list) for spec in specs]
    attentions = [result for result in results if isinstance(result, PageAttention)]
    tables: BitTables = {}
    edges = _describe_edges(model, tables)
    rows = assign_rows(network.graph, range(len(network.specs)))
    equations, equation_of = describe_equations(network)
    attention, buffer = _pack_attention(model, attentions, tables)
    bit_tables = list[list[int]]()
    for num_rows, num_columns, bits in tables:
        bit_tables.append([num_rows, num_columns, len(buffer)])
        buffer += bits
    notes = [result for result in results if isinstance(result, str)] + [a.note for a in attentions if a.note]
    words = " | ".join(" ".join(tokens) for tokens in state.tokens.values())
    special, counts = state.encoded.find_special_words(network), state.encoded.word_counts
    description = {
        "title": escape_invisible(options.title or words[:300] or network.declaration.name),
        "net": network.declaration.name,
        "theme": options.theme,
        "detail": options.detail,
        "quantization_steps": QUANTIZATION_STEPS,
        "line_style": {
            "width": ARROW_WIDTH,
            "opacity": ARROW_OPACITY,
            "dashes": {role: DASH_PATTERNS[dash] for role, dash in ROLE_DASHES.items()},
        },
        "counts": [len(ground), ground.count_arrows()],
        "declared_arrows": network.derive(  # before interventions
            ("arrows before interventions", *counts.items()), lambda: GroundGraph(network.graph, counts).count_arrows()
        ),
        "plate_sizes": dict(network.graph.plate_sizes),
        "groups": [_describe_group(model, spec, *rows[k], equation_of[k]) for k, spec in enumerate(network.specs)],
        "group_order": _order_groups(network, rows),
        "equations": equations,
        "edges": edges,
        "bit_tables": bit_tables,
        "severed": sorted(ground.cut_nodes),
        "stacks": [_describe_stack(state, name, special.get(name, ())) for name in network.graph.slices],
        "special": _describe_special_words(state, special, attentions, options),
        "interventions": {ground.name(node): _format_value(state, node, value) for node, value in model.do.items()}
        | {ground.name(node): "a row of attention" for node in model.attention_rows},
        "evidence": {ground.name(node): _format_value(state, node, value) for node, value in state.evidence.items()},
        "heads": head_list,
        "attention": attention,
        "posteriors": _describe_posteriors(state, options),
        "inclusion": describe_inclusion(network, options.inclusion),
        "contributions": [_describe_result(state, r) for r in parse_contributions(options.contributions)],
        "relative_changes": _relative_changes(state, clean),
        "notes": list(dict.fromkeys(notes)),
    }
    return description, bytes(buffer)


def _check_size(state: SentenceState, specs: Sequence[NodeSpec], num_heads: int | None) -> None:
    """Raise an error for more words or attention than a page can have; it suggests slices and heads that fit."""
    for stack, words in state.tokens.items():
        if len(words) > MAX_WORDS:
            actual = f"{len(words)} words" + (f" in the stack {stack}" if stack else "")
            expected = f"a sentence of at most {MAX_WORDS} words"
            hint = "Use a shorter sentence, or draw('x.svg', words=...) to draw some of its words"
            raise BudgetError("page", expected=expected, actual=actual, hint=hint)
    model = state.model
    plate_sizes = {**model.network.graph.plate_sizes, **({} if num_heads is None else {"head": num_heads})}
    sizes = [
        int(compute_read_mask(model, spec).sum()) * math.prod(plate_sizes[plate] for plate in spec.group.plates)
        for spec in specs
    ]
    if sum(sizes) <= MAX_BYTES:
        return
    slices = len({spec.group.step for spec in specs})
    heads = model.network.graph.plate_sizes.get("head", 1) if num_heads is None else num_heads
    per_slice, per_head = sum(sizes) / slices, sum(sizes) / heads
    fits = [f"slices=range({int(MAX_BYTES // per_slice)})"] if per_slice <= MAX_BYTES else []
    fits += [f"heads=range({int(MAX_BYTES // per_head)})"] if per_head <= MAX_BYTES and heads > 1 else []
    if not fits and per_slice <= MAX_BYTES * heads:
        fits = [f"slices=0, heads=range({int(MAX_BYTES * heads // per_slice)})"]
    expected, actual = f"at most {MAX_BYTES:,} values P(j | i)", f"{sum(sizes):,}"
    hint = f"Pass {' or '.join(fits)}" if fits else "Use a shorter sentence"
    raise BudgetError("page", expected=expected, actual=actual, hint=hint)


# structure


def _order_groups(network: Network, rows: Mapping[int, tuple[int, int]]) -> list[int]:
    """Return the order of groups within rows; in a net without words, an order with few crossings of arrows."""
    names = [group.name for group in network.graph.groups]
    if network.graph.word_stacks:
        return list(range(len(names)))
    arrows = [(names[edge.parent], names[edge.child]) for edge in network.graph.edges]
    positions = minimize_crossings({names[index]: row for index, (row, _) in rows.items()}, arrows)
    return sorted(range(len(names)), key=lambda index: positions[names[index]])


def _table_index(tables: BitTables, table: NDArray[np.bool_]) -> int:
    """Return the number of a boolean matrix, `[row, column]`; equal matrices have the same number."""
    key = (*table.shape, np.packbits(table.reshape(-1)).tobytes())
    return tables.setdefault(key, len(tables))


def _describe_edges(model: GroundModel, tables: BitTables) -> list[list[Any]]:
    """The arrows between groups: parent, child, the numbers of the matrices of plates and of words, and the colour."""
    graph, ground, edges = model.network.graph, model.ground, []
    for edge in graph.edges:
        parent, child = graph.groups[edge.parent], graph.groups[edge.child]
        sizes = tuple((plate, graph.plate_sizes[plate]) for plate in sorted({*child.plates, *parent.plates}))
        plates, words = _match_plates(child.plates, parent.plates, sizes), ground.word_adjacency(edge)
        changed = [*ground.get_cut_nodes(child.index), *ground.get_partly_cut_nodes(child.index)]
        if (
            changed
        ):  # no longer a product: one matrix of all pairs of nodes, in which the rows of these nodes are replaced
            plates, words = np.kron(plates, words), np.ones((1, 1), dtype=bool)
            for node in changed:
                start = int(ground.offsets[parent.index])
                local_parents = [p - start for p in ground.parents(node) if start <= p < start + plates.shape[1]]
                plates[node - int(ground.offsets[child.index])] = np.isin(np.arange(plates.shape[1]), local_parents)
        colour = arrow_colour(parent.role, child.role)
        edges.append([parent.index, child.index, _table_index(tables, plates), _table_index(tables, words), colour])
    return edges


@lru_cache(maxsize=256)  # few combinations of plates, and each edge of each sentence has one
def _match_plates(
    child: tuple[str, ...], parent: tuple[str, ...], sizes: tuple[tuple[str, int], ...]
) -> NDArray[np.bool_]:
    """Return which flat plate indices of a child and of its parent agree along shared plates, `[child, parent]`."""
    shapes = [[dict(sizes)[plate] for plate in plates] for plates in (child, parent)]
    of_child, of_parent = (np.indices(shape).reshape(len(shape), math.prod(shape)) for shape in shapes)
    matches = np.ones((of_child.shape[1], of_parent.shape[1]), dtype=bool)
    for k, plate in enumerate(child):
        if plate in parent:
            matches &= of_child[k][:, None] == of_parent[parent.index(plate)]
    return matches


def _describe_group(model: GroundModel, spec: NodeSpec, row: int, depth: int, equation: int) -> dict[str, Any]:
    """The description of a node group."""
    group, network = spec.group, model.network
    in_edges = network.graph.in_edges[group.index]
    letter, subscripts = parse_role(group.role)
    return {
        "name": group.name,
        "role": group.role,
        "stack": group.stack,
        "slice": group.slice,
        "step": group.step,
        "plates": list(group.plates),
        "dims": list(model.ground.shapes[group.index]),
        "word_stack": group.word_stack,
        "row": row,
        "depth": depth,
        "is_state": _is_state(network, group),
        "has_attention_edges": len(in_edges) > 1 and any(r.kind != "same" for edge in in_edges for r in edge.reaches),
        "kind": get_display_kind(spec),
        "tpm": type(spec.tpm).__name__,
        "is_learnable": spec.learnable,
        "value_shape": list(spec.shape),
        "label": [letter.text, letter.style, subscripts],
        "is_selector": _is_selector(network, group),
        "equation": equation,
    }


def _is_state(network: Network, group: NodeGroup) -> bool:
    """True for a hidden state of words; in a stack without words, for a role that each slice passes to the next."""
    if group.stack is None or group.stack in network.graph.word_stacks:
        return network.is_word_state(group)
    return network.is_state(group)


def _describe_special_words(
    state: SentenceState,
    special: Mapping[str, Sequence[int]],
    attentions: Sequence[PageAttention],
    options: PageOptions,
) -> dict[str, Any] | None:
    """Whether special tokens are shown initially, and the note while they are hidden; None if none can be hidden."""
    if not special or (options.special and any(len(special.get(k, ())) == len(w) for k, w in state.tokens.items())):
        return None
    words = exclude_words(state.tokens, {stack: range(len(w)) for stack, w in state.tokens.items()}, special)
    model = state.model
    means = []
    for item in attentions:
        if item.has_mean or not item.choices:
            mean, mask = np.asarray(item.attention[0].mean(0), dtype=np.float64), compute_read_mask(model, item.spec)
            means.append(StateAttention(*get_end_states(model.network, item.spec), mean, mask))
    return {"is_shown": options.special, "note": f"{describe_special_words(state.tokens, words, special, means)}."}


def _describe_stack(state: SentenceState, name: str, special: Sequence[int]) -> dict[str, Any]:
    """The description of a stack and its words; the words of `special` can be hidden."""
    words = state.tokens.get(name, ())
    return {
        "name": name,
        "num_slices": state.network.graph.slices.get(name, 0),
        "words": [format_token(word) for word in words],
        "full_words": {
            str(k): format_token(word, None)
            for k, word in enumerate(words)
            if format_token(word, None) != format_token(word)
        },
        "special": list(special),
    }


# attention


def _pack_attention(
    model: GroundModel, attentions: Sequence[PageAttention], tables: BitTables
) -> tuple[list[dict[str, Any]], bytearray]:
    """Describe each attention; the buffer has the bytes of the pairs in the mask, for each slot and plate."""
    descriptions: list[dict[str, Any]] = []
    buffer = bytearray()
    for item in attentions:
        spec = item.spec
        mask = compute_read_mask(model, spec)
        ends = []  # the groups of hidden states at both ends: the source, and the target
        for stack, slice_ in get_end_states(model.network, spec):
            state = find_state_group(model.network, stack)
            groups = () if state is None else model.network.graph.by_stem[state.stem]
            ends.append(next((group.index for group in groups if group.slice == slice_), None))
        descriptions.append(
            {
                "group": spec.group.index,
                # the last one is the group of values, not of keys
                "source_group": [parent.index for parent in spec.parents if WORD in parent.over][-1],
                "word_parents": sorted({parent.index for parent in spec.word_parents}),
                "target_state": ends[1],
                "source_state": ends[0],
                "choices": [list(choice) for choice in item.choices],
                "has_mean": item.has_mean,
                "num_slots": item.attention.shape[0],
                "num_plates": item.attention.shape[1],
                "mask": _table_index(tables, mask),
                "offset": len(buffer),
            }
        )
        table = item.attention
        pairs = table.reshape(*table.shape[:-2], -1) if mask.all() else table[..., mask]
        buffer += quantize(pairs).tobytes()
    return descriptions, buffer


def quantize(probabilities: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """Probabilities as bytes.

    >>> quantize(np.array([0.0, 0.5, 1.0])).tolist()
    [0, 128, 255]
    """
    scaled = probabilities * QUANTIZATION_STEPS
    np.rint(scaled, out=scaled)
    np.clip(scaled, 0, QUANTIZATION_STEPS, out=scaled)
    return scaled.astype(np.uint8)


# posteriors and values


def _describe_posteriors(state: SentenceState, options: PageOptions) -> list[dict[str, Any]]:
    """Describe prior and posterior of selectors and `options.posterior`; without words, of all discrete nodes."""
    requested = () if options.posterior is None else options.posterior
    names = [requested] if isinstance(requested, str) else check_sequence("posterior", requested, str)
    ids = [state.ground.id(name) for name in names]
    for node in ids:
        check_discrete_node(state.model, node)
    posteriors = [_describe_posterior(state, node) for node in dict.fromkeys(ids)]
    network, ground = state.network, state.ground
    is_wordless = not network.graph.word_stacks
    groups = [spec.group for spec in network.specs if spec.tpm.kind == "discrete"]
    groups = [group for group in groups if is_wordless or _is_selector(network, group)]
    nodes = [node for group in groups for node in ground.select_nodes(group).tolist()]
    for node in nodes[: MAX_NODES if is_wordless else MAX_CHOICES]:
        if node not in ids and node not in state.model.do and node not in state.evidence:
            with suppress(BudgetError):
                posteriors.append(_describe_posterior(state, node))
    return posteriors


def _is_selector(network: Network, group: NodeGroup) -> bool:
    """True for a discrete node with children."""
    return network.specs[group.index].tpm.kind == "discrete" and bool(network.graph.out_edges[group.index])


def _describe_posterior(state: SentenceState, node: int) -> dict[str, Any]:
    """The description of prior and posterior of one node."""
    after = plan_posterior(state.query([node])).run()
    before = plan_posterior(replace(state.query([node]), evidence={})).run() if state.evidence else after
    labels = state.labels(node) or tuple(map(str, range(len(after))))
    shown = torch.argsort(after, descending=True, stable=True)[:MAX_STATES].sort().values.tolist()
    names = map(format_token, distinguish(labels[k] for k in shown))
    rows = zip(names, shown, strict=True)
    states = [[name, round(float(before[k]), 6), round(float(after[k]), 6), k] for name, k in rows]
    return {
        "node": state.ground.name(node),
        "states": states,
        "num_omitted": len(after) - len(shown),
        "has_evidence": bool(state.evidence),
    }


def _format_value(state: SentenceState, node: int, value: Tensor) -> str:
    """Return a value as short text: the label of a state, a number, or for a vector whether it is zero."""
    if value.dim() or value.is_floating_point():
        if not value.dim():
            return f"{float(value):.4g}"
        return "a vector" if value.any() else "zero"
    labels = state.labels(node)
    return format_token(labels[int(value)]) if labels else str(int(value))


def _relative_changes(state: SentenceState, clean: SentenceState | None) -> dict[str, list[float]] | None:
    """Return the relative change of each state by `do`, `|x' - x| / |x|`, by group and word.

    Return None if a state depends on a latent choice, so that it has no single value.
    """
    if not state.interventions:
        return None
    network, clean = state.network, clean or state.without_interventions()
    specs = [spec for spec in network.specs if network.is_word_state(spec.group)]
    changes: dict[str, list[float]] = {}
    for spec, after, before in zip(specs, _state_vectors(state, specs), _state_vectors(clean, specs), strict=True):
        if after is None or before is None or after.shape != before.shape:
            return None
        norm, distance = before.norm(dim=-1), (after - before).norm(dim=-1)
        change = torch.where(norm > 0, distance / norm.clamp_min(torch.finfo(norm.dtype).tiny), 0.0)
        changes[str(spec.group.index)] = [round(value, 6) for value in change.tolist()]
    return changes or None


def _state_vectors(state: SentenceState, specs: Sequence[NodeSpec]) -> list[Tensor | None]:
    """Return the values of states, `[word, feature]` for each group; None if a group cannot be computed."""
    evaluator, fixed, vectors = state.evaluator, state.model.do, list[Tensor | None]()
    evaluator.prefetch("value", specs)
    for spec in specs:
        nodes = state.ground.select_nodes(spec.group).tolist()
        has_choices = has_ancestor_choices(state.network, [spec.group.index])
        if has_choices or evaluator.find_table_fault("value", [spec], ()) is not None:
            rows: list[Tensor] = []
            with suppress(BNetError):  # a value that cannot be computed
                rows = [evaluator.read_value(node).double() for node in nodes]
            vectors.append(torch.stack(rows) if rows and all(row.dim() == 1 for row in rows) else None)
            continue
        table = evaluator.compute_group("value", spec).double().flatten(0, -2)
        for k, node in enumerate(nodes):
            if node in fixed:  # the table has its value without do
                table[k] = fixed[node]
        vectors.append(None if bool(table.isnan().any()) else table)
    return vectors


# --------------------------------------------------------------------------------------------------------------------
# The attention `P(j | i)` that the page shows, for every state of the latent choices and averaged; and the inclusion of
# heads.


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
    """Return the inclusion of heads for JSON: a row for each slice, or in a posterior for each group of heads.

    A posterior has the mean of `rho` with its interval (null without one), and the log Bayes factor of each head.
    """
    if not isinstance(inclusion, Inclusion):
        return None if inclusion is None else _describe_inclusion_table(network, inclusion)
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
